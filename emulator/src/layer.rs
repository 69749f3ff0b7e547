//! The layers that trap memory operations, and whether this host lets one work.
//!
//! Which of them a process gets is decided at its first open of the device, by the shim, which tries to set it up.
//! Here is what `run` and `doctor` ask beforehand; every answer comes from trying.

use core::fmt;
use core::str::FromStr;

use nix::errno::Errno;

use crate::backend::{self, Obstacle};

/// What the user wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LayerChoice {
    /// Notify if it can be had, else trace.
    #[default]
    Auto,
    /// A seccomp filter with a listener.
    Notify,
    /// ptrace, with a seccomp filter that picks the calls where that can be had.
    Trace,
}

impl LayerChoice {
    /// The word that stands for it on the command line and in the environment.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Notify => "notify",
            Self::Trace => "trace",
        }
    }

    /// Tries whether it can be had here; for [`LayerChoice::Auto`] says which of them would be.
    ///
    /// # Errors
    /// What is in the way; for [`LayerChoice::Auto`] of both.
    pub fn check(self) -> Result<Self, Vec<Obstacle>> {
        match self {
            // A nested run shares what traps already.
            Self::Auto if backend::under_our_filter() => Ok(Self::Auto),
            Self::Auto => Self::Notify.check().or_else(|mut notify| {
                Self::Trace.check().map_err(|trace| {
                    notify.extend(trace);
                    notify
                })
            }),
            Self::Notify => backend::check_notify().map(|()| self).map_err(|obstacle| vec![obstacle]),
            Self::Trace => try_trace().map(|()| self).map_err(|obstacle| vec![obstacle]),
        }
    }
}

impl fmt::Display for LayerChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for LayerChoice {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        [Self::Auto, Self::Notify, Self::Trace]
            .into_iter()
            .find(|layer| layer.name() == word)
            .ok_or_else(|| format!("there are the layers notify and trace, and auto; not `{word}`"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_words() {
        for layer in [LayerChoice::Auto, LayerChoice::Notify, LayerChoice::Trace] {
            assert_eq!(layer.name().parse(), Ok(layer));
        }
        for layers in ["", "fault", "notify,trace", "notify,"] {
            let e = layers.parse::<LayerChoice>().unwrap_err();
            assert!(e.contains("notify and trace") && e.contains(layers), "{layers}");
        }
    }
}
