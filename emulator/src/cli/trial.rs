//! Another program, run for what it says, that doesn't keep us waiting.

use std::io;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How it ended.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Trial {
    /// It exited with 0.
    pub(super) success: bool,
    /// What it and its children wrote to standard error.
    pub(super) said: String,
}

/// Runs it, with standard input and output empty, until it and all who have its standard error from it have ended.
///
/// # Errors
/// ETIMEDOUT: that took longer than `limit`; it was killed (its children weren't). Else what the kernel says.
pub(super) fn attempt(command: &mut Command, limit: Duration) -> io::Result<Trial> {
    let deadline = Instant::now() + limit;
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let said = child.stderr.take().map_or(Ok(Vec::new()), |pipe| read_until(pipe, deadline));
    let ended = said.and_then(|said| {
        // It may have closed its standard error long before.
        await_readable(ummunotify_sys::process::pidfd_open(child.id())?, deadline)?;
        Ok(said)
    });
    if ended.is_err() {
        let _ = child.kill();
    }
    let status = child.wait()?;
    Ok(Trial { success: status.success(), said: String::from_utf8_lossy(&ended?).into_owned() })
}

/// What comes through a pipe until its end.
fn read_until(mut pipe: impl io::Read + AsFd, deadline: Instant) -> io::Result<Vec<u8>> {
    let (mut all, mut some) = (Vec::new(), [0; 4096]);
    loop {
        await_readable(&pipe, deadline)?;
        match pipe.read(&mut some)? {
            0 => return Ok(all),
            n => all.extend_from_slice(&some[..n]),
        }
    }
}

/// Fails with ETIMEDOUT if it isn't by then.
fn await_readable(fd: impl AsFd, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).as_millis();
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], left) {
            Ok(0) => return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
            Ok(_) => return Ok(()),
            Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> io::Result<Trial> {
        attempt(Command::new("sh").args(["-c", script]), limit)
    }

    #[test]
    fn what_was_said_and_how_it_ended_is_told() {
        let long = Duration::from_secs(60);
        let trial = shell("echo no; echo a >&2; exec >&-; echo b >&2; exit 3", long).expect("it ran");
        assert_eq!(trial, Trial { success: false, said: "a\nb\n".to_owned() });
        let trial = shell("head -c 200000 /dev/zero | tr '\\0' x >&2", long).expect("it ran");
        assert_eq!((trial.success, trial.said.len()), (true, 200_000));
    }

    #[test]
    fn who_doesnt_end_is_killed() {
        let file = std::env::temp_dir().join(format!("ummunotify-trial-{}", std::process::id()));
        // The second says nothing any more.
        for closing in ["", "2>&-"] {
            let script = format!("echo $$ >'{}'; exec sleep 600 {closing}", file.display());
            let refused = shell(&script, Duration::from_millis(500)).map(|_| ());
            assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::ETIMEDOUT));
            let pid = std::fs::read_to_string(&file).expect("it came so far");
            std::fs::remove_file(&file).expect("it is ours");
            assert!(!std::path::Path::new("/proc").join(pid.trim()).exists(), "{pid} is left");
        }
    }
}
