//! The processes that work, and how they are asked: one line each way.

use std::io::{BufRead as _, BufReader};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{MsgFlags, send};
use ummunotify::client::Notifier;

use super::work::{self, Bench, Work};

/// A process that answers the name of a work with nanoseconds per repetition.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    ask: Option<UnixStream>,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts it, and waits until it is ready.
    ///
    /// # Errors
    /// It couldn't be started, or ended: it has said on standard error why.
    pub fn start(mut command: Command) -> Result<Self> {
        let (ask, theirs) = UnixStream::pair().context("a socket to a process that works")?;
        let mut child = command
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{}: can't be started", command.get_program().display()))?;
        // The command keeps its end of the socket.
        drop(command);
        let answers = BufReader::new(child.stdout.take().context("no pipe from the process that works")?);
        let mut worker = Self { child, ask: Some(ask), answers };
        worker.ask("0")?;
        Ok(worker)
    }

    /// Nanoseconds for each repetition of a batch.
    pub fn measure(&mut self, work: &Work) -> Result<f64> {
        self.ask(work.name)?.trim().parse().with_context(|| format!("no figure of {}", work.name))
    }

    /// Has it register that many regions elsewhere.
    pub fn fill(&mut self, count: u64) -> Result<()> {
        self.ask(&count.to_string()).map(|_| ())
    }

    fn ask(&mut self, question: &str) -> Result<String> {
        let socket = self.ask.as_ref().context("it was told to end")?;
        let mut line = String::new();
        // A process that has ended doesn't read, and no signal is to tell us: what it answered, nothing, does.
        let _ = send(socket.as_raw_fd(), format!("{question}\n").as_bytes(), MsgFlags::MSG_NOSIGNAL);
        self.answers.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the process that works ended at `{question}`: {}", self.child.wait()?);
        Ok(line)
    }

    /// Tells it to end, and waits for that.
    pub fn finish(mut self) -> Result<()> {
        drop(self.ask.take());
        let status = self.child.wait()?;
        ensure!(status.success(), "a process that works failed: {status}");
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It ends by itself when its socket does.
        drop(self.ask.take());
        let _ = self.child.wait();
    }
}

/// Is such a process: answers until the questions end. A number asks for that many regions elsewhere.
pub fn serve(with_device: bool) -> Result<()> {
    let notifier = if with_device {
        Some(Notifier::open_nonblocking().context("/dev/ummunotify can't be opened")?)
    } else {
        None
    };
    let mut bench = Bench::new(notifier)?;
    for line in std::io::stdin().lines() {
        let line = line?;
        if let Ok(count) = line.parse() {
            bench.fill(count)?;
            println!("filled");
        } else {
            let work = work::find(&line).with_context(|| format!("no work is called `{line}`"))?;
            let time = bench.measure(work).with_context(|| format!("{line} isn't done here"))?;
            println!("{time}");
        }
    }
    Ok(())
}
