//! Probes of everything but seccomp: what the supervisor needs to look at a client, and what later layers would.

use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::unistd::{Pid, pipe};
use ummunotify::target::memory;
use ummunotify_sys::uffd::{self, Way};

use super::{Answer, Outcome, checked, end, in_child, spawn};

/// What a reader must find in the other process.
static MARK: u64 = 0x7563_6d6d_5f6d_6172;

/// Whether a process that is no ancestor can read a client's memory, as a supervisor does under a plain preload.
/// `named`: the client has named it with PR_SET_PTRACER.
pub(in crate::cli) fn read_memory(named: bool) -> Answer {
    in_child(move || beside_a_client(named, read_mark))
}

/// The same for the client's mapping table.
pub(in crate::cli) fn read_mappings() -> Answer {
    in_child(|| {
        beside_a_client(true, |client| {
            let maps = std::fs::read_to_string(format!("/proc/{client}/maps")).map_err(errno_of)?;
            Ok(maps.contains("[stack]"))
        })
    })
}

fn read_mark(client: Pid) -> Outcome {
    let mut bytes = [0u8; 8];
    // As the supervisor does it.
    memory::read(client.as_raw(), (&raw const MARK).addr() as u64, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes) == MARK)
}

fn errno_of(error: std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Runs `look` in one child upon another one.
fn beside_a_client(named: bool, look: impl FnOnce(Pid) -> Outcome) -> Outcome {
    let (ready, tell) = pipe()?;
    let client = spawn(move || {
        if named {
            // EINVAL where no Yama is: then nothing needs to be named.
            // SAFETY: sets a property of this process alone.
            unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
        }
        let _ = nix::unistd::write(&tell, b"r");
        loop {
            nix::unistd::pause();
        }
    })?;
    let mut byte = [0u8];
    nix::unistd::read(&ready, &mut byte)?;
    let looker = spawn(move || match look(client) {
        Ok(true) => 0,
        Ok(false) => 255,
        Err(errno) => errno as i32,
    })?;
    let status = nix::sys::wait::waitpid(looker, None);
    end(client);
    match status? {
        nix::sys::wait::WaitStatus::Exited(_, 0) => Ok(true),
        nix::sys::wait::WaitStatus::Exited(_, 255) => Ok(false),
        nix::sys::wait::WaitStatus::Exited(_, errno) => Err(Errno::from_raw(errno)),
        _ => Err(Errno::ECHILD),
    }
}

/// A filter can stop calls for a tracer.
pub(in crate::cli) fn trace_action() -> Answer {
    let action: u32 = libc::SECCOMP_RET_TRACE;
    in_child(|| {
        // SAFETY: the call reads one u32 behind the pointer and changes nothing.
        checked(unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action)
        })?;
        Ok(true)
    })
}

/// A userfaultfd of that kind with the events of unmapping can be had.
pub(in crate::cli) fn userfaultfd(way: Way) -> Answer {
    in_child(move || with_features(way, uffd::EVENTS))
}

/// What it can watch, tried in this process; `None` if it can't be had.
pub(in crate::cli) fn userfaultfd_memory(way: Way) -> Option<uffd::Memory> {
    uffd::open(way).and_then(uffd::Watch::new).ok().map(|watch| watch.memory())
}

fn with_features(way: Way, features: u64) -> Outcome {
    let fd = uffd::open(way).map_err(errno_of)?;
    uffd::ask_for(fd.as_fd(), features).map_err(errno_of).map(|()| true)
}

/// A ring can be set up.
pub(in crate::cli) fn io_uring() -> Answer {
    in_child(|| try_io_uring().map(|()| true))
}

/// Sets one up, in this process.
pub(in crate::cli) fn try_io_uring() -> Result<(), Errno> {
    // struct io_uring_params.
    let mut parameters = [0u8; 120];
    // SAFETY: the call reads and writes 120 bytes behind the pointer.
    let ring =
        checked(unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) })? as i32;
    // SAFETY: the ring was just made here, and nobody else knows it.
    unsafe { libc::close(ring) };
    Ok(())
}

/// Gets a userfaultfd with all that the fault layer needs, in this process.
pub(in crate::cli) fn try_userfaultfd() -> std::io::Result<()> {
    let ways = [Way::UserModeOnly, Way::Plain, Way::Device];
    let mut answers = ways.into_iter().map(|way| uffd::open(way).and_then(uffd::Watch::new).map(drop));
    let first = answers.next().unwrap_or(Ok(()));
    if first.is_ok() || answers.any(|answer| answer.is_ok()) { Ok(()) } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_finds_nothing_is_told_from_one_that_was_refused() {
        assert_eq!(in_child(|| beside_a_client(true, |_| Ok(true))), Answer::Works);
        assert_eq!(in_child(|| beside_a_client(true, |_| Ok(false))), Answer::Wrong);
        assert_eq!(in_child(|| beside_a_client(true, |_| Err(Errno::EPERM))), Answer::Refused(Errno::EPERM));
    }

    #[test]
    fn features_that_no_kernel_has_are_refused() {
        if in_child(|| with_features(Way::UserModeOnly, uffd::EVENTS)) != Answer::Works {
            println!("skipped: no userfaultfd can be had here");
            return;
        }
        let answer = in_child(|| with_features(Way::UserModeOnly, 1 << 60));
        assert_eq!(answer, Answer::Refused(Errno::EINVAL));
    }
}
