//! Waiting until every thread of a process was seen outside the watched calls.
//!
//! A filter that is put on all threads (TSYNC) doesn't reach a call that has already passed the entry. Such
//! a call may still change mappings after open has returned. So open waits for them, bounded.

use std::fmt;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use nix::sys::ptrace;
use nix::sys::wait::WaitPidFlag;
use nix::unistd::Pid;

use super::context::Context;
use super::shared::{Message, Shared};
use super::space::Space;
use super::task;
use crate::target::{KernelTraits, maps};
use crate::trap::operation::{Decoded, Operation, Reach, Syscall};
use crate::trap::policy::ARCH_X86_64;

/// How long an open may wait for the other threads.
const PATIENCE: Duration = Duration::from_millis(250);

/// What a thread was seen doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Seen {
    /// Asleep in a call that isn't watched, in user mode, or gone.
    Outside,
    /// Asleep inside a watched call.
    Inside,
    /// On a processor, or not visible to us.
    Unclear,
}

/// Threads that weren't seen outside the watched calls in time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Late {
    /// These.
    Threads(Vec<u32>),
    /// The process's threads can't be listed: any of them.
    Any,
}

impl Late {
    /// Whether each was in time.
    pub fn is_nobody(&self) -> bool {
        matches!(self, Self::Threads(threads) if threads.is_empty())
    }
}

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Threads(threads) => write!(f, "{} threads stay", threads.len()),
            Self::Any => write!(f, "its threads can't be listed, so any may stay"),
        }
    }
}

/// Waits until each thread of `pid` was seen outside the watched calls once (the one that opens the device
/// sleeps in recvmsg meanwhile). Returns those that weren't in time.
pub fn settle(shared: &Shared, pid: u32) -> Late {
    let start = Instant::now();
    let mut left = loop {
        match task::threads(pid) {
            Ok(threads) => break threads,
            Err(e) if task::is_gone(&e) => return Late::Threads(Vec::new()),
            Err(_) if start.elapsed() >= PATIENCE => return Late::Any,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let mut pause = Duration::from_micros(20);
    let mut stopped = false;
    while !left.is_empty() && start.elapsed() < PATIENCE {
        left.retain(|&tid| look(pid, tid) != Seen::Outside);
        if left.is_empty() {
            break;
        }
        // Threads that are always on a processor never show what they do. A ptrace stop happens only at the
        // way back to user mode or asleep outside: it proves that an earlier call has ended. It is used
        // late and briefly, since it can turn a call that has just begun to sleep into an EINTR (signal(7)).
        if !stopped && start.elapsed() > Duration::from_millis(2) {
            let (inside, mut unclear) =
                left.iter().partition::<Vec<u32>, _>(|&&tid| look(pid, tid) == Seen::Inside);
            stop(shared, &mut unclear);
            left = inside;
            left.append(&mut unclear);
            stopped = true;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    }
    Late::Threads(left)
}

/// Learns where the heap of a space with an open context ends, if every thread of process `pid` is outside the watched
/// calls at this moment: from now on what they ask brk for is noted. Else it stays unknown.
pub fn learn_heap(space: &Space, pid: u32, kernel: &KernelTraits) {
    let outside = |left: Vec<u32>| left.iter().all(|&tid| look(pid, tid) == Seen::Outside);
    if space.heap_is_unknown()
        && task::threads(pid).is_ok_and(outside)
        && let Ok(table) = task::mappings(pid, kernel)
    {
        space.set_heap_end(maps::heap_end(&table).unwrap_or(0));
    }
}

/// Follows threads that [`settle`] gave up on until they were seen outside, for at most ten seconds.
pub fn follow(pid: u32, mut left: Late) {
    let start = Instant::now();
    while !left.is_nobody() && start.elapsed() < Duration::from_secs(10) {
        match &mut left {
            Late::Threads(threads) => threads.retain(|&tid| look(pid, tid) != Seen::Outside),
            Late::Any => match task::threads(pid) {
                Ok(threads) => left = Late::Threads(threads),
                Err(e) if task::is_gone(&e) => return,
                Err(_) => {}
            },
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waiting for a thread to leave the call that it was let into, on whose end no event comes.
#[derive(Debug)]
pub struct Leaving {
    tid: u32,
    since: Instant,
    stopped: bool,
}

impl Leaving {
    /// From now on.
    pub fn new(tid: u32) -> Self {
        Self { tid, since: Instant::now(), stopped: false }
    }

    /// Whether the thread of process `pid` has left it, or ten seconds are over.
    pub fn is_over(&mut self, pid: u32) -> bool {
        match look(pid, self.tid) {
            Seen::Outside => return true,
            Seen::Inside => {}
            Seen::Unclear => {
                // As in `settle`: late, and once.
                if !self.stopped && self.since.elapsed() > Duration::from_millis(2) {
                    self.stopped = true;
                    let mut running = vec![self.tid];
                    // A traced one tells the tracer.
                    stop_apart(&mut running);
                    if running.is_empty() {
                        return true;
                    }
                }
            }
        }
        self.since.elapsed() > Duration::from_secs(10)
    }
}

/// Waits until each task was seen outside whose call the context's [`Watch`](super::recorder::Watch) let go
/// unrecorded; false if some weren't when the time is `due`. Its next trapped call shows that as well, so a busy
/// task needs no look. With the process everything ends that could be inside.
pub fn settle_loose(shared: &Shared, context: &Context, due: Instant, has_ended: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    let mut pause = Duration::from_micros(20);
    let mut stopped = false;
    loop {
        let left = context.watch().loose();
        if left.is_empty() || has_ended() {
            return true;
        }
        let stop_now = !stopped && start.elapsed() > STOP_AFTER;
        stopped |= stop_now;
        let mut unclear = Vec::new();
        for tid in left {
            match look_at(&format!("/proc/{tid}/syscall"), &acts) {
                Seen::Outside => context.watch().seen_outside(tid),
                Seen::Unclear => unclear.push(tid),
                Seen::Inside => {}
            }
        }
        if stop_now {
            let mut running = unclear.clone();
            stop(shared, &mut running);
            for tid in unclear.into_iter().filter(|tid| !running.contains(tid)) {
                context.watch().seen_outside(tid);
            }
        }
        if Instant::now() >= due {
            return context.watch().loose().is_empty();
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    }
}

/// How long a task may compute before [`settle_loose`] stops it for a moment: long, for most make a call before.
const STOP_AFTER: Duration = Duration::from_millis(100);

/// How long a thread may take to stop when asked to.
const STOP_PATIENCE: Duration = Duration::from_millis(50);

/// What the thread is doing, by /proc/PID/task/TID/syscall: "running", "-1 …" (asleep outside any call, in a
/// page fault), or number and arguments of the call that it sleeps in (proc_pid_syscall(5)).
fn look(pid: u32, tid: u32) -> Seen {
    look_for(pid, tid, &acts)
}

/// Whether the operation can touch anything.
fn acts(operation: &Operation) -> bool {
    operation.reach() != Reach::Nothing
}

/// The same for the calls that `watched` names.
fn look_for(pid: u32, tid: u32, watched: &dyn Fn(&Operation) -> bool) -> Seen {
    look_at(&format!("/proc/{pid}/task/{tid}/syscall"), watched)
}

fn look_at(path: &str, watched: &dyn Fn(&Operation) -> bool) -> Seen {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if task::is_gone(&e) => return Seen::Outside,
        Err(_) => return Seen::Unclear,
    };
    let mut words = text.split_whitespace();
    let Some(Ok(nr)) = words.next().map(str::parse::<i64>) else { return Seen::Unclear };
    let Ok(nr) = u32::try_from(nr) else { return Seen::Outside };
    let mut args = [0; 6];
    for (arg, word) in args.iter_mut().zip(words) {
        *arg = u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap_or(0);
    }
    match Decoded::new(&Syscall { arch: ARCH_X86_64, nr, args }) {
        Decoded::Operation(operation) | Decoded::Fork(operation) if watched(&operation) => Seen::Inside,
        Decoded::NewRing => Seen::Inside,
        _ => Seen::Outside,
    }
}

/// Stops threads and lets them go on; takes those out of the list that were seen stopped outside any call that isn't
/// recorded, or are gone.
fn stop(shared: &Shared, threads: &mut Vec<u32>) {
    if shared.gate.is_traced() { stop_traced(shared, threads) } else { stop_apart(threads) }
}

/// Has the resident tracer stop them, all at once.
fn stop_traced(shared: &Shared, threads: &mut Vec<u32>) {
    let asked = threads.iter().map(|&tid| {
        let (answer, outside) = crossbeam_channel::bounded(1);
        shared.tell(Message::Outside(tid, answer));
        (tid, outside)
    });
    let asked: Vec<_> = asked.collect();
    let until = Instant::now() + STOP_PATIENCE;
    // The sender goes with its task.
    let late = |outside: &Receiver<()>| outside.recv_deadline(until) == Err(RecvTimeoutError::Timeout);
    *threads = asked.into_iter().filter(|(_, outside)| late(outside)).map(|(tid, _)| tid).collect();
}

/// [`stop_one`] for each, by a tracer thread of its own. PTRACE_DETACH works on a stopped thread only, and one that waits
/// for the answer to a notification stops after that answer: perhaps when nobody looks any more, and then for as
/// long as its tracer lives. The end of the tracer lets it go in whatever state it is (ptrace(2)).
fn stop_apart(threads: &mut Vec<u32>) {
    threads.retain(|&tid| {
        let tracer = std::thread::Builder::new().name("tracer".into()).spawn(move || stop_one(tid));
        !tracer.is_ok_and(|tracer| tracer.join().unwrap_or(false))
    });
}

/// Stops the thread by ptrace and lets it go; true if it was seen stopped. False where tracing isn't allowed
/// or a debugger is there.
fn stop_one(tid: u32) -> bool {
    let Ok(tid) = i32::try_from(tid) else { return false };
    let tid = Pid::from_raw(tid);
    if ptrace::seize(tid, ptrace::Options::empty()).is_err() {
        return false;
    }
    let mut seen = ptrace::interrupt(tid).is_err();
    let start = Instant::now();
    while !seen && start.elapsed() < STOP_PATIENCE {
        seen = match nix::sys::wait::waitpid(tid, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG)) {
            Ok(nix::sys::wait::WaitStatus::StillAlive) => {
                std::thread::sleep(Duration::from_micros(50));
                false
            }
            // Stopped, or ended.
            _ => true,
        };
    }
    // Where it isn't stopped yet, the end of this tracer thread detaches it (ptrace(2)).
    let _ = ptrace::detach(tid, None);
    seen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::spent::without_descriptors;
    use crate::trap::{Layers, Rings};

    #[test]
    fn threads_that_cannot_be_listed_are_taken_for_none() {
        let shared = Shared::new(None, Layers::default(), Rings::default()).expect("what they share");
        let me = std::process::id();
        assert_eq!(without_descriptors(|| settle(&shared, me)), Late::Any);
        // Above the largest id that any kernel gives (proc(5), pid_max).
        let nobody = 1 << 23;
        assert!(settle(&shared, nobody).is_nobody());
        let start = Instant::now();
        follow(nobody, Late::Any);
        assert!(start.elapsed() < Duration::from_secs(5), "who is gone is followed");
    }
}
