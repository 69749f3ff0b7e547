//! Probes of everything but seccomp: what the supervisor needs to look at a client, and what later layers would.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::unistd::{Pid, pipe};
use ummunotify::target::memory;

use super::{Answer, Outcome, checked, end, in_child, spawn};

/// What a reader must find in the other process.
static MARK: u64 = 0x7563_6d6d_5f6d_6172;

/// Features of linux/userfaultfd.h.
const UFFD_EVENTS: u64 = UFFD_REMAP | UFFD_REMOVE | UFFD_UNMAP;
const UFFD_REMAP: u64 = 1 << 2;
const UFFD_REMOVE: u64 = 1 << 3;
const UFFD_UNMAP: u64 = 1 << 6;
const UFFD_FORK: u64 = 1 << 1;
const UFFD_WP_ASYNC: u64 = 1 << 15;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;

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

/// Ways to get a userfaultfd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::cli) enum Uffd {
    /// The plain system call.
    Plain,
    /// The system call for faults of user mode only.
    UserModeOnly,
    /// /dev/userfaultfd.
    Device,
}

/// A userfaultfd of that kind with the events of unmapping can be had.
pub(in crate::cli) fn userfaultfd(way: Uffd) -> Answer {
    in_child(move || with_features(way, UFFD_EVENTS))
}

/// It can also watch files without stopping writers.
pub(in crate::cli) fn userfaultfd_wp_async(way: Uffd) -> Answer {
    in_child(move || with_features(way, UFFD_EVENTS | UFFD_WP_ASYNC))
}

/// It can also tell of forks.
pub(in crate::cli) fn userfaultfd_fork(way: Uffd) -> Answer {
    in_child(move || with_features(way, UFFD_EVENTS | UFFD_FORK))
}

fn with_features(way: Uffd, features: u64) -> Outcome {
    let fd = open_userfaultfd(way)?;
    // struct uffdio_api: api, features, ioctls.
    let mut api = [0xaa_u64, features, 0];
    // SAFETY: the call reads and writes three u64 behind the pointer.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) }.into())?;
    Ok(api[1] & features == features)
}

fn open_userfaultfd(way: Uffd) -> Result<OwnedFd, Errno> {
    let fd = match way {
        // SAFETY: takes flags only.
        Uffd::Plain => unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) },
        // SAFETY: as above.
        Uffd::UserModeOnly => unsafe {
            libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | UFFD_USER_MODE_ONLY)
        },
        Uffd::Device => {
            let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd");
            let device = device.map_err(errno_of)?;
            // SAFETY: takes flags only.
            unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC).into() }
        }
    };
    let fd = checked(fd)?;
    // SAFETY: the kernel just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A ring can be set up.
pub(in crate::cli) fn io_uring() -> Answer {
    in_child(|| {
        // struct io_uring_params.
        let mut parameters = [0u8; 120];
        // SAFETY: the call reads and writes 120 bytes behind the pointer.
        checked(unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) })?;
        Ok(true)
    })
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
        if in_child(|| with_features(Uffd::UserModeOnly, UFFD_EVENTS)) != Answer::Works {
            println!("skipped: no userfaultfd can be had here");
            return;
        }
        let answer = in_child(|| with_features(Uffd::UserModeOnly, 1 << 60));
        assert_eq!(answer, Answer::Refused(Errno::EINVAL));
    }
}
