//! `ummunotify attach` and `ummunotify detach`.
//!
//! The filter is put on by the new supervisor. This process only starts it and says what came of it: it can be killed
//! at any moment, and matters to nobody.

use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ummunotify::attach::{self, AttachError, Presence, Subject, Wanted, ask};
use ummunotify::supervisor::{self, Attached};
use ummunotify_abi::config;
use ummunotify_sys::process;

use super::enclosure::arrange_descriptors;
use super::{AttachArguments, DetachArguments, Failure, complain};

/// How long a new supervisor may take to say what came of it: longer than it tries.
const ANSWER: Duration = Duration::from_secs(60);
/// How long somebody else may be in the way who attaches, too.
const OTHERS: Duration = Duration::from_secs(10);

pub(super) fn main(options: &AttachArguments) -> Result<i32, Failure> {
    let pid = options.pid;
    let fail = |error: AttachError| Failure::new(1, error.to_string());
    let (start, mut announced) = (Instant::now(), false);
    let mut patience = 10;
    loop {
        if let Some(known) = reach(pid, Wanted::Serve, None).map_err(fail)? {
            return say_known(pid, known);
        }
        let error = match attach::look(pid, options.despite_filter) {
            // The filter may be that of another who attaches, whose supervisor is about to know the process.
            Ok(subject) if subject.filtered && patience > 0 => {
                patience -= 1;
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            Ok(subject) => {
                if !std::mem::replace(&mut announced, true) {
                    announce(&subject);
                    export(options)?;
                }
                match start_supervisor(&subject)? {
                    Told::Attached { supervisor, stopped, no_new_privs } => {
                        say_attached(&subject, supervisor, stopped, no_new_privs);
                        return Ok(0);
                    }
                    Told::Inherited(token) => {
                        let known = reach(pid, Wanted::Serve, Some(token)).map_err(fail)?;
                        return say_known(pid, known.unwrap_or(Presence::Own));
                    }
                    Told::Refused { passing: true, error } => error,
                    Told::Refused { passing: false, error } => return Err(Failure::new(1, error)),
                }
            }
            Err(error) if error.is_passing() => error.to_string(),
            Err(error) => return Err(fail(error)),
        };
        // Whoever is in the way has attached to it by the next look, or is gone.
        if start.elapsed() > OTHERS {
            return Err(Failure::new(1, error));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(super) fn detach(options: &DetachArguments) -> Result<i32, Failure> {
    let pid = options.pid;
    let fail = |error: AttachError| Failure::new(1, error.to_string());
    let process = attach::descriptor(pid).map_err(fail)?;
    match ask(pid, &process, Wanted::Park, None).map_err(fail)? {
        Ok(Presence::Served { supervisor, ended }) => {
            let contexts = match ended {
                0 => "it had no context open".to_owned(),
                1 => "its open context has reported everything as invalid and is ended".to_owned(),
                n => format!("its {n} open contexts have reported everything as invalid and are ended"),
            };
            println!(
                "process {pid}: detached: {contexts}. The filter stays, parked: process {supervisor} lets its calls go by \
                 until it and what it starts have ended; `ummunotify attach {pid}` serves it again"
            );
            Ok(0)
        }
        Ok(Presence::Parked { .. }) => {
            println!("process {pid}: detached from already");
            Ok(0)
        }
        Ok(Presence::Own) => Err(fail(AttachError::Served(pid))),
        Err(others) => Err(fail(AttachError::NotAttached { pid, others })),
    }
}

/// Asks whether somebody has the process.
fn reach(pid: u32, wanted: Wanted, token: Option<u64>) -> Result<Option<Presence>, AttachError> {
    // Without one the look that comes next says what is wrong.
    let Ok(process) = process::pidfd_open(pid) else { return Ok(None) };
    Ok(ask(pid, &process, wanted, token)?.ok())
}

/// Says how a supervisor has the process.
fn say_known(pid: u32, known: Presence) -> Result<i32, Failure> {
    match known {
        Presence::Served { supervisor, .. } => {
            println!("process {pid}: attached to already; its supervisor is process {supervisor}");
        }
        Presence::Parked { supervisor } => println!(
            "process {pid}: attached again: its filter was still there, and process {supervisor} serves it; it finds \
             /dev/ummunotify from now on"
        ),
        Presence::Own => return Err(Failure::new(1, AttachError::Served(pid).to_string())),
    }
    Ok(0)
}

/// What can't be taken back, before it is done.
fn announce(subject: &Subject) {
    let Subject { pid, name, threads, .. } = subject;
    let threads = if *threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
    println!(
        "process {pid} ({name}, {threads}): a seccomp filter comes over all its threads, and over what it starts. It can't \
         be removed: `ummunotify detach {pid}` only parks it."
    );
    if subject.sets_no_new_privs {
        println!(
            "process {pid}: no_new_privs is set with it, for good: set-user-ID programs that it starts (sudo, ping) run \
             without their privileges."
        );
    }
}

fn say_attached(subject: &Subject, supervisor: u32, stopped: Duration, no_new_privs: bool) {
    let pid = subject.pid;
    println!(
        "process {pid}: attached, by the layer notify alone (no call of its libraries is patched): it finds /dev/ummunotify \
         from now on. One thread was stopped for {:.1} ms; process {supervisor} is its supervisor.",
        stopped.as_secs_f64() * 1e3
    );
    if no_new_privs && !subject.sets_no_new_privs {
        complain(&format!("notice: process {pid}: no_new_privs had to be set for it after all"));
    }
}

/// Puts the options where the supervisor looks.
fn export(options: &AttachArguments) -> anyhow::Result<()> {
    let mut names = Vec::new();
    names.extend(options.log.map(|level| (config::ENV_LOG, level.name().into())));
    if let Some(path) = &options.log_file {
        let path = std::path::absolute(path).context("--log-file: current directory")?;
        OpenOptions::new().append(true).create(true).open(&path).with_context(|| {
            format!("--log-file {}: can't be written; choose another file", path.display())
        })?;
        names.push((config::ENV_LOG_FILE, path.into_os_string()));
    }
    names.extend(options.stats.then(|| (config::ENV_STATS, "1".into())));
    for (name, value) in names {
        // SAFETY: this program has one thread.
        unsafe { std::env::set_var(name, value) };
    }
    Ok(())
}

/// What a new supervisor says: a line of words.
enum Told {
    Attached {
        supervisor: u32,
        stopped: Duration,
        no_new_privs: bool,
    },
    Inherited(u64),
    /// `passing`: somebody else is in the way who will soon be gone.
    Refused {
        passing: bool,
        error: String,
    },
}

impl Told {
    fn line(done: Result<Attached, AttachError>) -> String {
        match done {
            Ok(Attached::Now { supervisor, stopped, no_new_privs }) => {
                format!("attached {supervisor} {} {}", stopped.as_nanos(), u8::from(no_new_privs))
            }
            Ok(Attached::Inherited { token }) => format!("inherited {token}"),
            Err(error) => {
                let passing = error.is_passing();
                format!("{} {error}", if passing { "passing" } else { "refused" })
            }
        }
    }

    fn read(line: &str) -> Option<Self> {
        let (word, rest) = line.split_once(' ')?;
        let mut numbers = rest.split(' ').map(str::parse::<u64>);
        let mut number = || numbers.next()?.ok();
        Some(match word {
            "attached" => Self::Attached {
                supervisor: u32::try_from(number()?).ok()?,
                stopped: Duration::from_nanos(number()?),
                no_new_privs: number()? == 1,
            },
            "inherited" => Self::Inherited(number()?),
            "passing" => Self::Refused { passing: true, error: rest.to_owned() },
            "refused" => Self::Refused { passing: false, error: rest.to_owned() },
            _ => return None,
        })
    }
}

fn start_supervisor(subject: &Subject) -> anyhow::Result<Told> {
    // What is still in the buffer would be said twice. That it can't be said is no reason not to do it.
    let _ = std::io::stdout().flush();
    let (ours, theirs) = UnixStream::pair().context("socket pair for the supervisor")?;
    // SAFETY: this program has one thread here, and the copy ends in `supervise`.
    if unsafe { process::fork_hidden() }.context("new process for the supervisor (ulimit -u?)")?.is_none() {
        supervise(subject, theirs.into());
    }
    drop(theirs);
    let mut ready = [PollFd::new(ours.as_fd(), PollFlags::POLLIN)];
    let wait = PollTimeout::try_from(ANSWER).unwrap_or(PollTimeout::MAX);
    loop {
        match poll(&mut ready, wait) {
            Ok(0) => anyhow::bail!(
                "process {}: no answer from the new supervisor within {} seconds; --log-file shows how far it came",
                subject.pid,
                ANSWER.as_secs()
            ),
            Ok(_) => break,
            Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e).context("poll"),
        }
    }
    let mut line = [0; 4096];
    let len = (&ours).read(&mut line).context("answer of the new supervisor")?;
    let line = String::from_utf8_lossy(&line[..len]);
    Told::read(&line).with_context(|| {
        format!(
            "process {}: the new supervisor ended without an answer (killed?); the process goes on, and can be attached to \
             again",
            subject.pid
        )
    })
}

/// The copy of this process that becomes the supervisor: of nobody's environment, in no way tied to this one.
fn supervise(subject: &Subject, control: OwnedFd) -> ! {
    arrange_descriptors(&control, false);
    process::reset_signals();
    process::raise_descriptor_limit();
    let say = |control: OwnedFd, line: &str| {
        // Whoever asked may be gone by now.
        let _ = nix::unistd::write(&control, line.as_bytes());
    };
    let spare = control.try_clone();
    let done = supervisor::run_attached(subject.clone(), move |done| say(control, &Told::line(done)));
    let code = match done {
        Ok(()) => 0,
        Err(error) => {
            if let Ok(spare) = spare {
                say(spare, &format!("refused supervisor: {error:#}"));
            }
            1
        }
    };
    std::process::exit(code)
}
