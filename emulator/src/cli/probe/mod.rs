//! Tries what this host allows. Each probe really does the thing, in a child of its own, under a deadline:
//! none goes by the kernel's version.

pub(super) mod host;
pub(super) mod notify;

use std::fmt;
use std::io::{Read, Write};
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

/// Longest time that a probe may take.
const DEADLINE_MS: u16 = 3000;

/// What came of a probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// It was done, and had the effect that it should have.
    Works,
    /// It was refused.
    Refused(Errno),
    /// It was accepted and had not the effect that it should have.
    Wrong,
    /// No answer before the deadline, or the child died.
    Silent,
}

impl Answer {
    pub(super) const fn works(self) -> bool {
        matches!(self, Self::Works)
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Works => f.pad("yes"),
            Self::Refused(errno) => f.pad(&format!("no: {errno:?}")),
            Self::Wrong => f.pad("no: without effect"),
            Self::Silent => f.pad("no answer"),
        }
    }
}

/// What a probe's child reports.
pub(super) type Outcome = Result<bool, Errno>;

/// Runs `probe` in a child: true is [`Answer::Works`], false [`Answer::Wrong`].
pub(super) fn in_child(probe: impl FnOnce() -> Outcome) -> Answer {
    try_in_child(probe).unwrap_or_else(Answer::Refused)
}

fn try_in_child(probe: impl FnOnce() -> Outcome) -> Result<Answer, Errno> {
    let (answer, report) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    // SAFETY: this program has one thread, so the child may do whatever the parent may.
    let child = match unsafe { fork() }? {
        ForkResult::Child => {
            die_with_parent();
            let code: i32 = match probe() {
                Ok(true) => 0,
                Ok(false) => -1,
                Err(errno) => errno as i32,
            };
            // The parent takes silence for an answer of its own kind.
            let _ = std::fs::File::from(report).write_all(&code.to_ne_bytes());
            exit(0);
        }
        ForkResult::Parent { child } => child,
    };
    drop(report);
    let mut code = [0u8; 4];
    let mut poll_fds = [PollFd::new(answer.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut poll_fds, PollTimeout::from(DEADLINE_MS)).is_ok_and(|n| n > 0);
    let told = ready && std::fs::File::from(answer).read_exact(&mut code).is_ok();
    end(child);
    Ok(match i32::from_ne_bytes(code) {
        _ if !told => Answer::Silent,
        0 => Answer::Works,
        -1 => Answer::Wrong,
        errno => Answer::Refused(Errno::from_raw(errno)),
    })
}

/// A child that is about to do `work` and nothing else, ever.
fn spawn(work: impl FnOnce() -> i32) -> Result<Pid, Errno> {
    // SAFETY: as in `try_in_child`.
    match unsafe { fork() }? {
        ForkResult::Child => {
            die_with_parent();
            exit(work())
        }
        ForkResult::Parent { child } => Ok(child),
    }
}

/// Ends this process without running what the parent meant to run at its own end.
fn exit(code: i32) -> ! {
    // SAFETY: _exit can be called at any time.
    unsafe { libc::_exit(code) }
}

/// Nothing of a probe outlives it.
fn die_with_parent() {
    // Where it isn't possible, the deadline's kill is left.
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
}

/// Kills and reaps a child.
fn end(child: Pid) {
    let _ = kill(child, Signal::SIGKILL);
    while waitpid(child, None) == Err(Errno::EINTR) {}
}

/// Waits for a child; true if it exited with 0.
fn succeeded(child: Pid) -> Result<bool, Errno> {
    loop {
        match waitpid(child, None) {
            Err(Errno::EINTR) => {}
            answer => return answer.map(|status| matches!(status, WaitStatus::Exited(_, 0))),
        }
    }
}

/// Turns what a system call returned into a result.
fn checked(answer: libc::c_long) -> Result<libc::c_long, Errno> {
    Errno::result(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_answer_comes_back() {
        assert_eq!(in_child(|| Ok(true)), Answer::Works);
        assert_eq!(in_child(|| Ok(false)), Answer::Wrong);
        assert_eq!(in_child(|| Err(Errno::EBUSY)), Answer::Refused(Errno::EBUSY));
        assert_eq!(in_child(|| exit(0)), Answer::Silent);
    }
}
