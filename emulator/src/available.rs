//! Whether this host lets a layer work ([`crate::trap::layers`] names them).
//!
//! Which of them a process gets is decided at its first open of the device, by the shim, which tries to set it up.
//! Here is what `run` and `doctor` ask beforehand; every answer comes from trying.

use nix::errno::Errno;

use crate::backend::{self, Obstacle};
use crate::trap::layers::Net;

/// Tries whether it can be had here; for [`Net::Auto`] says which of them would be. That is itself where a nested run
/// shares what traps already.
///
/// # Errors
/// What is in the way; for [`Net::Auto`] of both.
pub fn check(net: Net) -> Result<Net, Vec<Obstacle>> {
    match net {
        Net::Auto if backend::under_our_filter() => Ok(Net::Auto),
        Net::Auto => check(Net::Notify).or_else(|mut notify| {
            check(Net::Trace).map_err(|trace| {
                notify.extend(trace);
                notify
            })
        }),
        Net::None => Ok(net),
        Net::Notify => backend::check_notify().map(|()| net).map_err(|obstacle| vec![obstacle]),
        Net::Trace if backend::under_our_filter() => Ok(Net::Trace),
        Net::Trace => try_trace().map(|()| net).map_err(|obstacle| vec![obstacle]),
    }
}

/// Traces a child by another one, which it has named as its tracer, as a client does its supervisor.
///
/// # Errors
/// What ptrace(2) answered, or that no child could be made.
pub fn try_trace() -> Result<(), Obstacle> {
    let refused = |answer| Obstacle {
        tried: "trace a process that has named its tracer (ptrace)",
        answer,
        help: match (answer, yama_scope()) {
            (Errno::EPERM, _) if is_traced() => "a debugger or another tracer is attached: start without it",
            (Errno::EPERM, Some(2 | 3)) => {
                "kernel.yama.ptrace_scope forbids it: set it to 0 or 1 (3 stays until the next boot)"
            }
            _ => "the surroundings (a container's seccomp profile?) forbid it: allow ptrace(2) there",
        },
    };
    let client = child(|| {
        // EINVAL where no Yama is: then nothing needs to be named.
        // SAFETY: sets a property of this process alone.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
        // SAFETY: stops the child.
        unsafe { libc::raise(libc::SIGSTOP) };
        0
    })?;
    let mut status = 0;
    // SAFETY: status is writable.
    let stopped = Errno::result(unsafe { libc::waitpid(client, &raw mut status, libc::WUNTRACED) });
    let answer = match stopped {
        Ok(_) => child(|| {
            let seized = nix::sys::ptrace::seize(
                nix::unistd::Pid::from_raw(client),
                nix::sys::ptrace::Options::empty(),
            );
            seized.err().unwrap_or(Errno::UnknownErrno) as i32
        })
        .and_then(|tracer| backend::exit_code(tracer).map_err(refused)),
        Err(e) => Err(refused(e)),
    };
    // SAFETY: our own child, which nobody else has reaped.
    unsafe {
        libc::kill(client, libc::SIGKILL);
        libc::waitpid(client, &raw mut status, 0);
    }
    match answer? {
        0 => Ok(()),
        errno => Err(refused(Errno::from_raw(errno))),
    }
}

/// A child that does `work`, and ends with what that returns.
fn child(work: impl FnOnce() -> i32) -> Result<libc::pid_t, Obstacle> {
    // SAFETY: the callers have one thread or make raw system calls; the child ends by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = work();
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(code) };
    }
    Errno::result(child).map_err(backend::no_child)
}

/// Whether this process, and so its children perhaps, has a tracer.
fn is_traced() -> bool {
    std::fs::read_to_string("/proc/self/status")
        .is_ok_and(|status| status.lines().any(|l| l.starts_with("TracerPid:") && !l.ends_with("\t0")))
}

/// Yama's setting, if there is a Yama.
pub fn yama_scope() -> Option<u8> {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?.trim().parse().ok()
}
