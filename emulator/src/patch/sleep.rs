//! Threads that don't notice that they were stopped.
//!
//! A stop ends a sleeping system call, and for most the kernel begins it again. But `epoll_wait` and some others fail
//! with EINTR (signal(7), "Interruption of system calls and library functions by stop signals"), and a `write` that has
//! written a part returns that. A thread that runs may be about to make such a call.

use std::fs;

/// Calls that are begun again after a stop, with the time that is left, as if nothing had been: they sleep by
/// `restart_block`, -ERESTARTSYS or -ERESTARTNOHAND, whatever their arguments are.
const RESUMED: [libc::c_long; 11] = [
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_pause,
    libc::SYS_rt_sigsuspend,
];

/// True if all threads of the process but `asker`, which sleeps until it is answered, sleep in calls that go on after a
/// stop as if nothing had been. False if that can't be seen. A thread that wakes behind this look, and makes another
/// call before it is stopped, isn't seen either.
pub fn is_sound(pid: u32, asker: u32) -> bool {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    for task in tasks {
        let Ok(task) = task else { return false };
        if task.file_name().to_str().and_then(|name| name.parse().ok()) == Some(asker) {
            continue;
        }
        let call = fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
        let number = call.split(' ').next().and_then(|number| number.trim().parse().ok());
        if !number.is_some_and(|number: libc::c_long| RESUMED.contains(&number)) {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::process::{Child, Command};
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    /// Processes of their own, since a test's has other threads.
    #[test]
    fn a_thread_that_runs_is_noticed_and_one_that_sleeps_is_not() {
        let start = |script: &str| Command::new("sh").args(["-c", script]).spawn().expect("a shell");
        let end = |mut child: Child| {
            child.kill().expect("it can be killed");
            child.wait().expect("it ends");
        };
        let sleeps = start("exec sleep 60");
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_sound(sleeps.id(), 0) {
            assert!(Instant::now() < deadline, "it doesn't sleep");
            std::thread::yield_now();
        }
        end(sleeps);
        let runs = start("while :; do :; done");
        for _ in 0..100 {
            assert!(!is_sound(runs.id(), 0));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(is_sound(runs.id(), runs.id()), "nobody else is there");
        end(runs);
        assert!(!is_sound(u32::MAX >> 1, 0));
    }

    #[test]
    fn a_write_that_waits_is_noticed() {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send(nix::unistd::gettid()).expect("the test listens");
            // More than fits in.
            nix::unistd::write(&writer, &[0; 1 << 20])
        });
        let tid = told.recv().expect("the thread tells its number");
        let call = || fs::read_to_string(format!("/proc/self/task/{tid}/syscall")).unwrap_or_default();
        while !call().starts_with("1 ") {
            std::thread::yield_now();
        }
        assert!(!is_sound(std::process::id(), 0), "{}", reader.as_raw_fd());
        drop(reader);
        assert!(thread.join().expect("no panic").is_ok_and(|written| written < 1 << 20));
    }
}
