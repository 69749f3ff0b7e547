//! The trace layer: the main loop as resident tracer of its clients (ptrace(2)).
//!
//! It serves hosts that refuse a seccomp listener. Each thread of the client, and whatever these make, is traced.
//! A filter with `SECCOMP_RET_TRACE` stops them at the calls that matter; where no filter can be had, every call
//! is stopped. At the entry a call is recorded as under the notify layer. Unlike there its exit is seen as well,
//! so that regions which were registered or dequeued meanwhile are hit again (the after-hit).
//!
//! The kernel takes ptrace requests from the thread that seized, and from no other. So the main loop makes them
//! all; a worker that looks at a target answers through the gate. The main loop waits for no single task.
//!
//! The end of the supervisor lets every task run. Under a filter what it traps then fails with ENOSYS, and so does a
//! call that waits for a worker. But one that the main loop itself is looking at runs, unrecorded. Without a filter nothing would be seen any
//! more while the counter says that all is well; so there the tasks end with their supervisor
//! (PTRACE_O_EXITKILL).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crossbeam_channel::Sender;
use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use ummunotify_engine::Begin;
use ummunotify_sys::tracer::{self, Call, Entry, Event, Run};

use super::{MainLoop, Source, Trapped};
use crate::supervisor::gate::{Answer, Held};
use crate::supervisor::space::Space;
use crate::supervisor::{log, task};
use crate::trap::filter::TRACE_DATA;
use crate::trap::operation::{Decoded, Syscall};

/// Stops that are handled before the loop looks at its other sources.
const STOPS_A_TURN: usize = 64;

/// Looks at a process's threads until none is new; each look seizes all that it finds, and threads of seized
/// ones come seized.
const LOOKS: usize = 100;

/// Blocks SIGCHLD, by which the kernel tells of traced tasks. Before any thread is made: one that doesn't block it
/// would take it.
pub fn block_signal() {
    if let Err(e) = child_signal().thread_block() {
        log::warning!("SIGCHLD can't be blocked: {e}");
    }
}

fn child_signal() -> SigSet {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGCHLD);
    signals
}

/// A call between its entry and its exit.
#[derive(Debug)]
struct Operation {
    /// For each context that was open at the entry, by number.
    begins: Vec<(u64, Begin)>,
    /// Contexts in which nothing is recorded of this call, by number.
    spared: Vec<u64>,
    /// Known once the call may go on.
    answer: Option<Answer>,
}

/// A traced task.
#[derive(Debug, Default)]
struct Task {
    /// Number of the call that waits for an answer; 0 if none does.
    waits: u64,
    /// Set from the entry to the exit of a call that may invalidate something.
    operation: Option<Operation>,
    /// The number of a call that was made none for as long as it waits.
    number: Option<i64>,
    /// What the present call is to return instead of its own result.
    result: Option<i64>,
    /// Ends with the tracer.
    fatal: bool,
    /// Isn't to be traced any more: its next stop is its last.
    let_go: bool,
    /// Whoever waits until it was seen outside the call that it was in.
    outside: Vec<Sender<()>>,
}

/// What the main loop knows of the tasks that it traces.
#[derive(Debug, Default)]
pub(super) struct Tracer {
    signals: Option<SignalFd>,
    tasks: HashMap<u32, Task>,
    /// New tasks that wait for their maker to tell of them: what it has to record of its call comes first.
    newborn: HashSet<u32>,
    /// New tasks of which their maker has told and that haven't stopped yet.
    announced: HashSet<u32>,
    /// No filter: every call is stopped.
    unfiltered: bool,
    /// Something may have happened that wasn't asked for yet.
    more: bool,
    /// Some task is traced.
    alive: bool,
    /// Calls so far.
    calls: u64,
}

impl Tracer {
    /// Whether a traced task is left.
    pub(super) fn is_needed(&self) -> bool {
        self.alive
    }

    /// Whether [`MainLoop::stops`] has something to do.
    pub(super) fn has_more(&self) -> bool {
        self.more
    }

    /// The signal has come. It may stand for many events.
    pub(super) fn signalled(&mut self) {
        if let Some(signals) = &self.signals {
            let _ = signals.read_signal();
        }
        self.more = true;
    }

    /// From here on calls are stopped: by the filter, or all of them.
    pub(super) fn begin(&mut self, filtered: bool) {
        if filtered {
            return;
        }
        self.unfiltered = true;
        for tid in self.tasks.keys() {
            // Its next stop makes it run from call to call. One that has ended says so.
            let _ = tracer::interrupt(*tid);
        }
    }

    /// See [`crate::supervisor::shared::Message::Outside`].
    pub(super) fn ask_outside(&mut self, tid: u32, answer: Sender<()>) {
        let Some(task) = self.tasks.get_mut(&tid) else { return };
        let unrecorded = task.operation.as_ref().is_some_and(|operation| !operation.spared.is_empty());
        if !unrecorded && (task.waits != 0 || task.operation.is_some()) {
            // What it is in was seen from its entry on.
            let _ = answer.send(());
        } else if tracer::interrupt(tid).is_ok() {
            task.outside.push(answer);
        }
    }

    /// The call that the task is in returns this.
    pub(super) fn set_result(&mut self, tid: u32, value: i64) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.result = Some(value);
        }
    }

    /// The task is about to invalidate something in one of these spaces.
    pub(super) fn begin_operation(&mut self, tid: u32, spaces: &[Arc<Space>], spared: &[u64]) {
        let Some(task) = self.tasks.get_mut(&tid) else { return };
        let contexts = spaces.iter().flat_map(|space| space.contexts());
        let begins = contexts.map(|context| (context.number, context.engine.begin())).collect();
        task.operation = Some(Operation { begins, spared: spared.to_vec(), answer: None });
    }

    /// The task's call may wait for long. Should this process end meanwhile, it must not run.
    pub(super) fn hold_back(&mut self, tid: u32) {
        if let Some(task) = self.tasks.get_mut(&tid)
            && let Ok(number) = tracer::number(tid)
            && tracer::set_number(tid, -1).is_ok()
        {
            task.number = Some(number);
        }
    }

    /// The task's call isn't made.
    pub(super) fn skip(&mut self, tid: u32) {
        said(tid, "set the number of its call", tracer::set_number(tid, -1));
    }

    /// Lets a stopped task run.
    fn run(&mut self, tid: u32, signal: i32) {
        let Some(task) = self.tasks.get_mut(&tid) else { return };
        if task.let_go {
            said(tid, "let go", tracer::let_go(tid, signal));
            self.tasks.remove(&tid);
            return;
        }
        if self.unfiltered && !task.fatal {
            task.fatal = tracer::set_fatal(tid, true).is_ok();
        }
        let exit_matters = task.operation.is_some() || task.result.is_some();
        let how = if exit_matters || self.unfiltered { Run::ToCall } else { Run::On };
        said(tid, "run", tracer::run(tid, how, signal));
    }

    /// The task was seen outside any call that it was in before.
    fn is_outside(&mut self, tid: u32) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            for waiting in task.outside.drain(..) {
                let _ = waiting.send(());
            }
        }
    }

    /// The stopped task is at the exit of its call.
    fn exit(&mut self, tid: u32) {
        if let Some(value) = self.tasks.get_mut(&tid).and_then(|task| task.result.take()) {
            said(tid, "set the result", tracer::set_result(tid, value));
        }
        self.end_operation(tid);
        self.is_outside(tid);
    }

    /// The task has made another one. The call has done to the mappings what it does; the new task must not be able
    /// to register anything before that is recorded.
    fn made(&mut self, tid: u32) {
        self.end_operation(tid);
        if let Ok(child) = tracer::message(tid) {
            if self.newborn.remove(&child) {
                self.run(child, 0);
            } else if !self.tasks.contains_key(&child) {
                self.announced.insert(child);
            }
        }
        self.run(tid, 0);
    }

    /// A new task before its first instruction.
    fn born(&mut self, tid: u32) {
        self.tasks.insert(tid, Task::default());
        if self.announced.remove(&tid) {
            self.run(tid, 0);
        } else {
            self.newborn.insert(tid);
        }
    }

    /// A task has ended. If it had made another and couldn't say so any more, that one need not wait.
    fn ended(&mut self, tid: u32) {
        self.tasks.remove(&tid);
        self.newborn.remove(&tid);
        self.announced.remove(&tid);
        self.wait_no_longer();
    }

    /// Lets all new tasks run.
    fn wait_no_longer(&mut self) {
        for tid in std::mem::take(&mut self.newborn) {
            self.run(tid, 0);
        }
    }

    /// Hits what was registered or dequeued since the task's call began.
    fn end_operation(&mut self, tid: u32) {
        let Some(task) = self.tasks.get_mut(&tid) else { return };
        if let Some(Operation { begins, spared, answer: Some(answer) }) = task.operation.take() {
            for space in &answer.spaces {
                space.fault.ended(tid);
                space.record_after(&answer.pieces, &spared, |number| {
                    // What was opened meanwhile had no region at the beginning.
                    begins.iter().find(|(n, _)| *n == number).map_or(Begin::EVER, |(_, begin)| *begin)
                });
            }
        }
    }
}

/// A task that was killed meanwhile isn't an error: its end is reported.
fn said(tid: u32, what: &str, result: nix::Result<()>) {
    if let Err(e) = result
        && e != Errno::ESRCH
    {
        log::warning!("task {tid}: {what}: {e}");
    }
}

impl MainLoop {
    /// Traces every thread of the process, or none.
    pub(super) fn seize(&mut self, pid: u32) -> nix::Result<()> {
        if self.tracer.signals.is_none() {
            let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
            let signals = SignalFd::with_flags(&child_signal(), flags)?;
            self.shared.epoll.add(&signals, EpollEvent::new(EpollFlags::EPOLLIN, Source::Tracees.word()))?;
            self.tracer.signals = Some(signals);
        }
        let mut seized = Vec::new();
        let done = self.seize_threads(pid, &mut seized);
        self.tracer.alive |= !seized.is_empty();
        self.tracer.more = true;
        if done.is_err() {
            for tid in seized {
                let Some(task) = self.tracer.tasks.get_mut(&tid) else { continue };
                task.let_go = true;
                // One that has ended says so.
                let _ = tracer::interrupt(tid);
            }
        }
        done
    }

    fn seize_threads(&mut self, pid: u32, seized: &mut Vec<u32>) -> nix::Result<()> {
        for _ in 0..LOOKS {
            let mut threads =
                task::threads(pid).map_err(|e| e.raw_os_error().map_or(Errno::EIO, Errno::from_raw))?;
            threads.retain(|tid| !self.tracer.tasks.contains_key(tid));
            let before = seized.len();
            for tid in threads {
                match tracer::seize(tid, false) {
                    Ok(()) => {
                        self.tracer.tasks.insert(tid, Task::default());
                        seized.push(tid);
                    }
                    // It has ended, as ptrace(2) says with ESRCH or EPERM, or has come traced since the look.
                    Err(_) if task::has_ended(tid) || task::tracer_of(tid) == Some(std::process::id()) => {}
                    Err(e) => {
                        let other = task::tracer_of(tid).is_some_and(|tracer| tracer != 0);
                        log::warning!("task {tid}: can't be traced: {e}");
                        return Err(if other { Errno::EBUSY } else { e });
                    }
                }
            }
            if seized.len() == before {
                return Ok(());
            }
        }
        log::warning!("process {pid}: makes threads faster than they can be traced");
        Err(Errno::EAGAIN)
    }

    /// Handles what traced tasks have to tell.
    pub(super) fn stops(&mut self) {
        for _ in 0..STOPS_A_TURN {
            if !self.tracer.more {
                return;
            }
            match tracer::next() {
                Ok(Some((tid, event))) => {
                    self.stop(tid, event);
                    self.answers();
                }
                Ok(None) => self.tracer.more = false,
                Err(e) => {
                    self.tracer.more = false;
                    if e.raw_os_error() == Some(libc::ECHILD) {
                        self.tracer.alive = false;
                        self.tracer.tasks.clear();
                    } else {
                        log::warning!("can't wait for traced tasks: {e}");
                    }
                }
            }
        }
    }

    /// Lets calls go on that others have looked at.
    pub(super) fn answers(&mut self) {
        while let Ok(answer) = self.shared.gate.answers.try_recv() {
            let Some(task) = self.tracer.tasks.get_mut(&answer.tid) else { continue };
            if task.waits != answer.call {
                continue;
            }
            task.waits = 0;
            let tid = answer.tid;
            if let Some(number) = task.number.take() {
                said(tid, "set the number of its call", tracer::set_number(tid, number));
            }
            if let Some(operation) = &mut task.operation {
                operation.answer = Some(answer);
            }
            self.tracer.run(tid, 0);
        }
    }

    fn stop(&mut self, tid: u32, event: Event) {
        if event == Event::Ended {
            self.tracer.ended(tid);
            self.forget(tid);
            return;
        }
        if event == Event::Trap && !self.tracer.tasks.contains_key(&tid) {
            return self.tracer.born(tid);
        }
        // A new thread of a process that is just being stopped shows that first.
        self.tracer.tasks.entry(tid).or_default();
        match event {
            Event::Child => return self.tracer.made(tid),
            Event::Exec => self.executed(tid),
            Event::Call | Event::Filter => return self.at_call(tid, event),
            Event::Ended | Event::Trap | Event::Stopped | Event::Signal(_) => {}
        }
        self.tracer.is_outside(tid);
        match event {
            Event::Stopped if tracer::listen(tid).is_ok() => {}
            Event::Signal(signal) => self.tracer.run(tid, signal),
            _ => self.tracer.run(tid, 0),
        }
    }

    fn at_call(&mut self, tid: u32, event: Event) {
        // Under a filter the only stops of this kind are those that were asked for at an entry.
        let is_exit = event == Event::Call && !self.tracer.unfiltered;
        match if is_exit { Ok(Call::Exit) } else { tracer::call(tid) } {
            Ok(Call::Entry(entry)) => {
                self.tracer.is_outside(tid);
                match entry.data {
                    // Somebody else's filter wants a tracer that isn't there; what it would have got is this.
                    Some(data) if event == Event::Filter && data != TRACE_DATA => {
                        said(tid, "skip its call", tracer::skip(tid, -i64::from(libc::ENOSYS)));
                        self.tracer.run(tid, 0);
                    }
                    None if !self.tracer.unfiltered => self.tracer.run(tid, 0),
                    _ => self.at_entry(tid, &entry),
                }
            }
            Ok(Call::Exit) => {
                self.tracer.exit(tid);
                self.tracer.run(tid, 0);
            }
            Ok(Call::None) => self.tracer.run(tid, 0),
            // Killed: its end comes.
            Err(_) => {}
        }
    }

    fn at_entry(&mut self, tid: u32, entry: &Entry) {
        let call = Syscall { arch: entry.arch, nr: entry.nr, args: entry.args };
        if Decoded::new(&call) == Decoded::Ignore {
            // Most calls, where every one is stopped.
            return self.tracer.run(tid, 0);
        }
        // An open that was over before this call began must be known to it.
        self.messages();
        self.tracer.calls += 1;
        let number = self.tracer.calls;
        if let Some(task) = self.tracer.tasks.get_mut(&tid) {
            task.waits = number;
            task.operation = None;
            task.result = None;
        }
        self.trapped(Trapped { held: Held::Traced { tid, call: number }, tid, call, behind: 0 });
    }

    /// The task has executed another program. Its process's other threads are gone, and so is its own number if it
    /// wasn't the first one's.
    fn executed(&mut self, tid: u32) {
        if let Ok(former) = tracer::message(tid)
            && former != tid
        {
            self.tracer.tasks.remove(&former);
            self.forget(former);
        }
        // The first thread, whose end isn't told here, may have made another process.
        self.tracer.wait_no_longer();
        let fatal = self.tracer.tasks.get(&tid).is_some_and(|task| task.fatal);
        self.tracer.tasks.insert(tid, Task { fatal, ..Task::default() });
        self.forget(tid);
        for space in self.shared.spaces().iter().filter(|space| space.pid == tid && !space.is_gone()) {
            log::info!("process {tid}: has called execve; its contexts never fire again");
            space.set_gone();
        }
    }

    /// The number of that task means nothing any more.
    fn forget(&mut self, tid: u32) {
        self.members.remove(&tid);
        self.strangers.remove(tid);
    }
}
