//! All threads of a process stopped for a moment, by ptrace(2), while its code is changed.
//!
//! PTRACE_SEIZE and PTRACE_INTERRUPT (Linux 3.4): nothing of it is seen by the process's parent or by job control.
//! A thread that sleeps in one of a few calls (epoll_wait, sigtimedwait, sockets with a timeout: signal(7)) wakes
//! with EINTR, as after SIGSTOP and SIGCONT; one that waits to write more (to a pipe, a socket) returns what it has
//! written.

use std::io;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use crate::check;

/// How long a thread may be traced by somebody else.
const HANDOVER: Duration = Duration::from_millis(50);

/// What `status` of a stop shows in its high half for PTRACE_INTERRUPT and group stops.
const EVENT_STOP: i32 = libc::PTRACE_EVENT_STOP;

/// Threads that are stopped; they go on when it is dropped.
#[derive(Debug)]
pub struct Halted {
    threads: Vec<Thread>,
    /// Tracing belongs to a thread.
    here: PhantomData<*mut ()>,
}

#[derive(Debug)]
struct Thread {
    tid: libc::pid_t,
    stopped: bool,
    /// It was about to be delivered when the thread stopped.
    signal: i32,
}

/// Stops every thread of process `pid`, runs `act` and lets them go. In a thread of its own, whose end lets go of
/// those that didn't stop in time, too.
///
/// # Errors
/// ETIMEDOUT: a thread didn't stop within `limit` (one that waits for its vfork child doesn't); EPERM: the process
/// may not be traced, or is. Then `act` wasn't run.
pub fn while_halted<T: Send>(
    pid: u32,
    limit: Duration,
    act: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    std::thread::scope(|scope| {
        let tracer = std::thread::Builder::new().name("tracer".into()).stack_size(256 * 1024);
        let tracer = tracer.spawn_scoped(scope, || {
            let halted = Halted::halt(pid, limit)?;
            let result = act();
            drop(halted);
            result
        })?;
        tracer.join().map_err(|_| io::Error::other("the tracing thread failed"))?
    })
}

impl Halted {
    fn halt(pid: u32, limit: Duration) -> io::Result<Self> {
        let start = Instant::now();
        let mut halted = Self { threads: Vec::new(), here: PhantomData };
        // A thread that runs may make others: until a look finds none that isn't stopped.
        loop {
            let mut new = false;
            for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
                let name = entry?.file_name();
                let Some(tid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
                if halted.threads.iter().all(|thread| thread.tid != tid) {
                    new |= halted.seize(tid)?;
                }
            }
            if !new {
                return Ok(halted);
            }
            while !halted.all_stopped()? {
                if start.elapsed() > limit {
                    return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// False if the thread is gone.
    fn seize(&mut self, tid: libc::pid_t) -> io::Result<bool> {
        let start = Instant::now();
        // SAFETY: no memory is passed.
        let seize = || check(unsafe { libc::ptrace(libc::PTRACE_SEIZE, tid, 0, 0) });
        let mut seized = seize();
        // Another thread of ours that has traced it and ended lets go of it a moment after it was joined.
        while matches!(&seized, Err(e) if e.raw_os_error() == Some(libc::EPERM)) && start.elapsed() < HANDOVER
        {
            std::thread::sleep(Duration::from_micros(200));
            seized = seize();
        }
        match seized {
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Ok(false),
            // A thread that has ended and isn't reaped yet (the first one of a process may stay so) can't run.
            Err(e) if is_zombie(tid) => {
                drop(e);
                return Ok(false);
            }
            Err(e) => return Err(e),
        }
        self.threads.push(Thread { tid, stopped: false, signal: 0 });
        // SAFETY: no memory is passed. If it fails the thread is gone, which waiting finds out.
        unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0) };
        Ok(true)
    }

    fn all_stopped(&mut self) -> io::Result<bool> {
        for thread in self.threads.iter_mut().filter(|thread| !thread.stopped) {
            let mut status = 0;
            // SAFETY: room for a status.
            let got = unsafe { libc::waitpid(thread.tid, &raw mut status, libc::__WALL | libc::WNOHANG) };
            match got {
                0 => return Ok(false),
                tid if tid == thread.tid => {
                    if libc::WIFSTOPPED(status) {
                        if status >> 16 != EVENT_STOP {
                            thread.signal = libc::WSTOPSIG(status);
                        }
                        thread.stopped = true;
                    } else {
                        // It has ended.
                        thread.tid = 0;
                        thread.stopped = true;
                    }
                }
                _ => {
                    let e = io::Error::last_os_error();
                    match e.raw_os_error() {
                        Some(libc::EINTR) => return Ok(false),
                        Some(libc::ECHILD) => (thread.tid, thread.stopped) = (0, true),
                        _ => return Err(e),
                    }
                }
            }
        }
        Ok(true)
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        for thread in self.threads.iter().filter(|thread| thread.stopped && thread.tid != 0) {
            // SAFETY: no memory is passed; the last argument is the signal to deliver.
            unsafe { libc::ptrace(libc::PTRACE_DETACH, thread.tid, 0, thread.signal) };
        }
    }
}

fn is_zombie(tid: libc::pid_t) -> bool {
    std::fs::read_to_string(format!("/proc/{tid}/stat"))
        .is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child that is always busy uses no time while it is halted.
    #[test]
    fn threads_run_while_they_are_halted() {
        let mut child =
            std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("sh");
        let ticks = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("stat");
            let fields: Vec<_> =
                stat.rsplit_once(") ").expect("fields").1.split(' ').map(str::to_owned).collect();
            (fields[0].clone(), fields[11].clone())
        };
        let seen = while_halted(child.id(), Duration::from_secs(5), || {
            let before = ticks();
            std::thread::sleep(Duration::from_millis(50));
            Ok((before, ticks()))
        })
        .expect("halted");
        assert_eq!(seen.0, seen.1);
        assert_eq!(seen.0.0, "t");
        assert_ne!(ticks().0, "t");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_process_that_is_gone_is_no_error_of_ours() {
        let mut child = std::process::Command::new("true").spawn().expect("true");
        child.wait().expect("wait");
        assert!(while_halted(child.id(), Duration::from_secs(1), || Ok(())).is_err());
    }
}
