//! Starts programs in a mode, under a time limit, and captures what they say.

use crate::{Account, Stage};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use ummunotify_abi::config::{ENV_BINARY, ENV_TRAP};

/// How a program gets the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// `ummunotify run -- PROGRAM`.
    Run,
    /// LD_PRELOAD names the shim, and a variable the binary.
    Preload,
    /// Not at all.
    Native,
}

impl Mode {
    /// The two ways in which a program gets the emulated device.
    pub const EMULATED: [Self; 2] = [Self::Run, Self::Preload];
}

/// A time limit that only a program that hangs reaches.
const DEFAULT_LIMIT: Duration = Duration::from_secs(60);

/// How long the output may stay open after the program ended: somebody who inherited it must let go.
const OUTPUT_PATIENCE: Duration = Duration::from_secs(5);

/// A program that is about to be started.
#[derive(Debug)]
pub struct Program<'a> {
    stage: &'a Stage,
    mode: Mode,
    account: Account,
    path: PathBuf,
    args: Vec<OsString>,
    run_options: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    preload: Vec<PathBuf>,
    limit: Duration,
}

impl<'a> Program<'a> {
    pub(crate) fn new(stage: &'a Stage, mode: Mode, account: Account, path: &Path) -> Self {
        Self {
            stage,
            mode,
            account,
            path: path.to_owned(),
            args: Vec::new(),
            run_options: Vec::new(),
            env: Vec::new(),
            preload: Vec::new(),
            limit: DEFAULT_LIMIT,
        }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Adds an option of `ummunotify run`; without effect in the other modes.
    #[must_use]
    pub fn run_option(mut self, option: impl AsRef<OsStr>) -> Self {
        self.run_options.push(option.as_ref().to_owned());
        self
    }

    /// Sets a variable of the environment.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Chooses the layers that trap, instead of those that are chosen without being asked for.
    #[must_use]
    pub fn layers(self, layers: &str) -> Self {
        self.env(ENV_TRAP, layers)
    }

    /// Preloads a library, behind the shim where the mode preloads that.
    #[must_use]
    pub fn preload(mut self, library: impl AsRef<Path>) -> Self {
        self.preload.push(library.as_ref().to_owned());
        self
    }

    /// Sets the time after which the program and its process group are killed. 60 s if not set.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs the program to its end, with nothing on its standard input.
    pub fn run(self) -> Outcome {
        let mut running = self.spawn();
        running.close_stdin();
        running.finish()
    }

    /// Starts the program; its standard input, output and error are pipes.
    pub fn spawn(self) -> Running<'a> {
        let mut preload = self.preload.clone();
        let mut command = match self.mode {
            Mode::Run => {
                let mut command = Command::new(self.stage.binary());
                command.arg("run").args(&self.run_options).arg("--").arg(&self.path);
                command
            }
            Mode::Preload => {
                preload.insert(0, self.stage.shim());
                let mut command = Command::new(&self.path);
                command.env(ENV_BINARY, self.stage.binary());
                command
            }
            Mode::Native => Command::new(&self.path),
        };
        command.args(&self.args);
        if !preload.is_empty() {
            let names: Vec<&OsStr> = preload.iter().map(|library| library.as_os_str()).collect();
            command.env("LD_PRELOAD", names.join(OsStr::new(":")));
        }
        // Every process that a program leaves can be told by this name; see leftovers.
        command.env("UMMUNOTIFY_TEST_STAGE", self.stage.folder()).env("TMPDIR", self.stage.work());
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.current_dir(self.stage.work());
        if let Some((user, group)) = self.account.change_to() {
            command.uid(user).gid(group).env("HOME", self.stage.work());
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);

        let started = Instant::now();
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let group = i32::try_from(child.id()).expect("a process number is an int");
        self.stage.started(group);
        let stdout = Capture::start(child.stdout.take().expect("stdout is a pipe"));
        let stderr = Capture::start(child.stderr.take().expect("stderr is a pipe"));
        let stdin = child.stdin.take();
        let deadline = started + self.limit;
        let what = format!("{} {:?} ({:?}, {:?})", self.path.display(), self.args, self.mode, self.account);
        Running {
            stage: self.stage,
            what,
            child,
            group,
            stdin,
            stdout,
            stderr,
            started,
            deadline,
            ended: false,
        }
    }
}

/// A program that runs. Dropped before [`Running::finish`], it is killed.
#[derive(Debug)]
pub struct Running<'a> {
    stage: &'a Stage,
    what: String,
    child: Child,
    group: i32,
    stdin: Option<ChildStdin>,
    stdout: Capture,
    stderr: Capture,
    started: Instant,
    deadline: Instant,
    ended: bool,
}

impl Running<'_> {
    /// The process number; under `ummunotify run` the command's own, for it keeps it.
    pub fn pid(&self) -> i32 {
        self.group
    }

    /// Writes a line to the program.
    pub fn write_line(&mut self, line: &str) {
        let what = &self.what;
        let stdin = self.stdin.as_mut().unwrap_or_else(|| panic!("{what}: standard input was closed"));
        stdin.write_all(format!("{line}\n").as_bytes()).unwrap_or_else(|e| panic!("write to {what}: {e}"));
    }

    /// Closes the program's standard input.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Waits until the standard output holds a whole line that starts with `prefix`; returns the first such
    /// line.
    ///
    /// # Panics
    /// If the program ends or its time is over before.
    pub fn wait_for_line(&mut self, prefix: &str) -> String {
        if let Some(line) = self.stdout.wait_for_line(prefix, self.deadline) {
            return line;
        }
        let (stdout, stderr) = (self.stdout.text(), self.stderr.text());
        panic!("{}: no line '{prefix}...'\nstdout:\n{stdout}\nstderr:\n{stderr}", self.what);
    }

    /// Sends a signal to the program alone.
    pub fn signal(&self, signal: Signal) {
        nix::sys::signal::kill(Pid::from_raw(self.group), signal)
            .unwrap_or_else(|e| panic!("{signal} to {}: {e}", self.what));
    }

    /// Waits for the end of the program, or for its time to be over: then its process group is killed.
    pub fn finish(mut self) -> Outcome {
        self.stdin = None;
        let mut timed_out = false;
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() >= self.deadline => {
                    timed_out = true;
                    self.kill_group();
                    break self.child.wait().unwrap_or_else(|e| panic!("wait for {}: {e}", self.what));
                }
                Ok(None) => thread::sleep(Duration::from_millis(2)),
                Err(e) => panic!("wait for {}: {e}", self.what),
            }
        };
        self.ended = true;
        self.stage.ended(self.group);
        let elapsed = self.started.elapsed();
        let patience = Instant::now() + OUTPUT_PATIENCE;
        let closed = self.stdout.wait_for_end(patience) & self.stderr.wait_for_end(patience);
        Outcome {
            what: self.what.clone(),
            status,
            timed_out,
            output_held: !closed && !timed_out,
            stdout: self.stdout.text(),
            stderr: self.stderr.text(),
            elapsed,
        }
    }

    /// Kills the process group that was made for this program.
    fn kill_group(&self) {
        let _ = killpg(Pid::from_raw(self.group), Signal::SIGKILL);
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.kill_group();
            let _ = self.child.wait();
            self.stage.ended(self.group);
        }
    }
}

/// How a program ended.
#[derive(Debug)]
pub struct Outcome {
    what: String,
    /// The exit status.
    pub status: ExitStatus,
    /// True if its time was over and it was killed.
    pub timed_out: bool,
    /// True if some process still held the output open seconds after the program had ended.
    pub output_held: bool,
    /// The whole standard output.
    pub stdout: String,
    /// The whole standard error.
    pub stderr: String,
    /// From start to end.
    pub elapsed: Duration,
}

impl Outcome {
    /// The exit code, if it exited.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The signal that killed it, if one did.
    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// Insists that it ended in time, by itself, with exit code 0, and that nobody holds its output.
    pub fn assert_success(&self) {
        assert!(self.status.success() && !self.timed_out && !self.output_held, "{self}");
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} after {:?}", self.what, self.status, self.elapsed)?;
        if self.timed_out {
            write!(f, ", killed because its time was over")?;
        }
        if self.output_held {
            write!(f, ", and some process still holds its output open")?;
        }
        write!(f, "\n--- stdout\n{}\n--- stderr\n{}", self.stdout, self.stderr)
    }
}

/// What a pipe carried so far.
#[derive(Default, Debug)]
struct Captured {
    bytes: Vec<u8>,
    ended: bool,
}

/// Reads a pipe to its end in a thread.
#[derive(Debug)]
struct Capture(Arc<(Mutex<Captured>, Condvar)>);

impl Capture {
    fn start(mut from: impl Read + Send + 'static) -> Self {
        let shared: Arc<(Mutex<Captured>, Condvar)> = Arc::default();
        let theirs = Arc::clone(&shared);
        thread::spawn(move || {
            let mut buffer = [0; 16384];
            loop {
                let read = from.read(&mut buffer).unwrap_or(0);
                let mut captured = theirs.0.lock().expect("no holder panics");
                captured.bytes.extend_from_slice(&buffer[..read]);
                captured.ended = read == 0;
                theirs.1.notify_all();
                if captured.ended {
                    return;
                }
            }
        });
        Self(shared)
    }

    /// Waits until `done` yields something; `None` when the time is over or nothing more can come.
    fn wait<T>(&self, until: Instant, mut done: impl FnMut(&Captured) -> Option<T>) -> Option<T> {
        let mut captured = self.0.0.lock().expect("no holder panics");
        loop {
            if let Some(result) = done(&captured) {
                return Some(result);
            }
            let left = until.saturating_duration_since(Instant::now());
            if captured.ended || left.is_zero() {
                return None;
            }
            captured = self.0.1.wait_timeout(captured, left).expect("no holder panics").0;
        }
    }

    fn wait_for_line(&self, prefix: &str, until: Instant) -> Option<String> {
        self.wait(until, |captured| {
            let text = String::from_utf8_lossy(&captured.bytes);
            let whole = &text[..text.rfind('\n')?];
            whole.lines().find(|line| line.starts_with(prefix)).map(str::to_owned)
        })
    }

    fn wait_for_end(&self, until: Instant) -> bool {
        self.wait(until, |captured| captured.ended.then_some(())).is_some()
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.0.lock().expect("no holder panics").bytes).into_owned()
    }
}
