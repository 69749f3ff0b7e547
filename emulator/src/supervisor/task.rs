//! Facts about a task that its /proc entry tells.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ummunotify_sys::{process, ptrace};

use super::spare;
use crate::target::{self, KernelTraits, Mapping, ProcessTarget, Source, Target, Unreadable};

/// The mapping table of a task. The one fact here that can wait for the task's mapping lock.
///
/// A first thread that has ended (pthread_exit in main) stays as a zombie without memory while the rest of its
/// process goes on: its own table is empty then, and that of another thread is the process's.
pub fn mappings(tid: u32, kernel: &KernelTraits) -> target::Result<Arc<[Mapping]>> {
    let own = ProcessTarget::new(tid.cast_signed(), false, kernel).mappings();
    if own.as_ref().map_or_else(|e| !is_end(e.errno), |table| !table.is_empty()) {
        return own;
    }
    let unreadable =
        |e: io::Error| Unreadable { source: Source::Other, errno: e.raw_os_error().unwrap_or(0) };
    let others = match threads(tid) {
        Err(e) if is_gone(&e) => return own,
        others => others.map_err(unreadable)?,
    };
    for other in others.into_iter().filter(|other| *other != tid) {
        match ProcessTarget::new(other.cast_signed(), false, kernel).mappings() {
            Ok(table) if table.is_empty() => {}
            Err(e) if is_end(e.errno) => {}
            // It may be this one's that is wanted.
            known => return known,
        }
    }
    own
}

/// The threads of a process.
///
/// # Errors
/// What [`is_gone`] knows, or it can't be said.
pub fn threads(pid: u32) -> io::Result<Vec<u32>> {
    let mut threads = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        threads.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(threads)
}

/// Whether an error of a look into /proc means that the task is gone: any other (EMFILE, ENFILE, ENOMEM) says nothing of
/// it.
pub fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(is_end)
}

fn is_end(errno: i32) -> bool {
    matches!(errno, libc::ENOENT | libc::ESRCH)
}

/// The process (thread group) that a task belongs to; `None` if it is gone or not visible.
pub fn process_of(tid: u32) -> Option<u32> {
    status_field(tid, "Tgid:")
}

/// The parent of a process.
pub fn parent_of(pid: u32) -> Option<u32> {
    status_field(pid, "PPid:")
}

/// Whether there is a task of that number; true if that can't be told. Any thread has an entry in /proc, shown or not.
pub fn exists(tid: u32) -> bool {
    !std::fs::metadata(format!("/proc/{tid}")).is_err_and(|e| is_gone(&e))
}

/// A thread of process `pid` beside the first that hasn't ended; `None` if there is none.
///
/// # Errors
/// It can't be said.
pub fn other_thread(pid: u32) -> io::Result<Option<u32>> {
    for tid in threads(pid)?.into_iter().filter(|tid| *tid != pid) {
        match is_zombie(tid) {
            Ok(false) => return Ok(Some(tid)),
            Err(e) if !is_gone(&e) => return Err(e),
            _ => {}
        }
    }
    Ok(None)
}

/// Whether the task has ended and waits to be reaped, or for the other threads of its process.
///
/// # Errors
/// It is gone, or it can't be said.
pub fn is_zombie(tid: u32) -> io::Result<bool> {
    Ok(status(tid)?.lines().any(|line| line.starts_with("State:\tZ")))
}

/// Whether the task is gone, or as good as; false if that can't be told.
pub fn has_ended(tid: u32) -> bool {
    match status(tid) {
        Ok(status) => status.lines().any(|l| l.starts_with("State:\tZ") || l.starts_with("State:\tX")),
        Err(e) => is_gone(&e),
    }
}

/// The process that traces the task; 0 if none does, `None` if that can't be seen.
pub fn tracer_of(tid: u32) -> Option<u32> {
    status_field(tid, "TracerPid:")
}

/// Whether a process is that user's alone: its real, effective and saved ids all are.
pub fn belongs_to(pid: u32, uid: u32) -> bool {
    let Ok(status) = status(pid) else { return false };
    let Some(ids) = status.lines().find_map(|line| line.strip_prefix("Uid:")) else { return false };
    let mut ids = ids.split_whitespace().take(3).peekable();
    ids.peek().is_some() && ids.all(|id| id.parse() == Ok(uid))
}

/// What /proc tells of a task, by as few reads as can be: the kernel works it out for each.
fn status(tid: u32) -> io::Result<String> {
    let mut text = Vec::with_capacity(4096);
    File::open(format!("/proc/{tid}/status"))?.read_to_end(&mut text)?;
    // Names are any bytes.
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn status_field(tid: u32, name: &str) -> Option<u32> {
    field(&status(tid).ok()?, name)
}

fn field(status: &str, name: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

/// Whether a task's pid namespace is the reader's own, so that both call a task by the same number. False
/// where that can't be told.
pub fn in_our_pid_namespace(pid: u32) -> bool {
    let ours = std::fs::read_link("/proc/self/ns/pid");
    let theirs = std::fs::read_link(format!("/proc/{pid}/ns/pid"));
    matches!((ours, theirs), (Ok(a), Ok(b)) if a == b)
}

/// When the task began, in clock ticks since boot: with its id it names one task only (proc_pid_stat(5), starttime).
///
/// # Errors
/// It is gone, or it can't be said.
pub fn born(tid: u32) -> io::Result<u64> {
    let path = format!("/proc/{tid}/stat");
    let stat = String::from_utf8_lossy(&spare::with(|| std::fs::read(&path))?).into_owned();
    // The name in parentheses may hold anything; the third field follows the last of them.
    let rest = stat.rfind(')').and_then(|end| stat.get(end + 1..));
    let field = rest.and_then(|rest| rest.split_ascii_whitespace().nth(22 - 3));
    field.and_then(|field| field.parse().ok()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Who traces a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tracer {
    Nobody,
    Ourselves,
    /// Another supervisor, which tries to attach to the process and will find that we have it.
    Kin,
    Somebody,
    /// It can't be told.
    Unknown,
}

fn tracer(tid: u32) -> Tracer {
    let status = match status(tid) {
        Ok(status) => status,
        Err(e) if is_gone(&e) => return Tracer::Nobody,
        Err(_) => return Tracer::Unknown,
    };
    match field(&status, "TracerPid:") {
        None | Some(0) => Tracer::Nobody,
        Some(tracer) if process::has_thread(std::process::id(), tracer) => Tracer::Ourselves,
        Some(tracer) if is_kin(tracer) => Tracer::Kin,
        Some(_) => Tracer::Somebody,
    }
}

/// Whether a task is a supervisor's, as far as its name tells.
fn is_kin(tid: u32) -> bool {
    let process = process_of(tid).unwrap_or(tid);
    std::fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name.trim_end() == super::NAME)
}

/// How long one that calls itself a supervisor may trace a task of ours, or one of whom nothing can be told.
const KIN: Duration = Duration::from_secs(2);

/// Whether somebody else, a debugger, traces the task.
pub fn is_traced(tid: u32) -> bool {
    tracer(tid) == Tracer::Somebody
}

/// Begins to trace the task, when another of our threads has let go of it.
///
/// # Errors
/// EPERM: somebody else traces it, or nobody may. ESRCH: it is gone.
pub fn seize(tid: u32) -> io::Result<ptrace::Seized> {
    let start = Instant::now();
    loop {
        // Seen before the try: one of ours that is over by then is nobody the next time.
        let before = tracer(tid);
        match ptrace::seize(tid) {
            Err(e) if e.raw_os_error() == Some(libc::EPERM) && before == Tracer::Ourselves => {
                std::thread::sleep(Duration::from_micros(50));
            }
            Err(e) if e.raw_os_error() == Some(libc::EPERM) && tracer(tid) == Tracer::Ourselves => {}
            Err(e)
                if e.raw_os_error() == Some(libc::EPERM)
                    && [before, tracer(tid)].iter().any(|t| matches!(t, Tracer::Kin | Tracer::Unknown))
                    && start.elapsed() < KIN =>
            {
                std::thread::sleep(Duration::from_micros(200));
            }
            done => return done,
        }
    }
}

/// A signal that a task would take now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// None.
    None,
    /// Its own.
    Thread,
    /// One of its process, which any of its threads may take.
    Process,
}

/// Whether a signal waits for a task that takes none just now.
pub fn signal_waits(tid: u32) -> Signal {
    let Ok(status) = status(tid) else { return Signal::None };
    let set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
    };
    let free = !set("SigBlk:");
    if set("SigPnd:") & free != 0 {
        Signal::Thread
    } else if set("ShdPnd:") & free != 0 {
        Signal::Process
    } else {
        Signal::None
    }
}
