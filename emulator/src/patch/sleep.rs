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
/// stop as if nothing had been. False if that can't be seen.
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
    use std::sync::mpsc;
    use std::time::Duration;

    /// A process of its own, since a test's has other threads: the child of a shell that sleeps so.
    #[test]
    fn a_thread_that_runs_is_noticed_and_one_that_waits_for_a_lock_is_not() {
        let child = |script: &str| {
            let child = std::process::Command::new("sh").args(["-c", script]).spawn().expect("a shell");
            std::thread::sleep(Duration::from_millis(200));
            child
        };
        for (script, sound) in [("sleep 30 & wait", true), ("while :; do :; done", false)] {
            let mut child = child(script);
            assert_eq!(is_sound(child.id(), 0), sound, "{script}");
            assert!(is_sound(child.id(), child.id()), "{script}: nobody else is there");
            child.kill().expect("it can be killed");
            child.wait().expect("it ends");
        }
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
