//! An address space that opened the device, and what is known of it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crossbeam_channel::Sender;
use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;
use ummunotify_engine::{Begin, Reason, Recorder};

use super::context::{Context, FileName, lock, sealed_memfd};
use super::fault::Fault;
use super::sleepers::GoOn;
use super::task;
use super::worker::Job;
use crate::target::{KernelTraits, Mapping};
use crate::trap::operation::Reach;

/// One address space. It outlives its process as long as a context of it is open somewhere.
#[derive(Debug)]
pub struct Space {
    /// The process that opened the device first.
    pub pid: u32,
    pidfd: OwnedFd,
    /// Its `/proc/PID/statm`.
    size: File,
    /// A page that the opener maps for as long as this address space exists (not inherited by fork, gone
    /// with exec): its presence in a mapping table proves that the table is this space's.
    marker: OwnedFd,
    marker_identity: FileName,
    /// The marker was seen. Only from then on its absence proves something.
    marked: AtomicBool,
    /// Until then: the process's mapping table. Bound to the address space, it is empty once nobody runs in that.
    table: Mutex<Option<File>>,
    contexts: Mutex<Vec<Arc<Context>>>,
    /// Nothing fires any more: the process has called execve, or every task is gone.
    gone: AtomicBool,
    /// Thread id of a member that is inside execve, 0 if none.
    executing: AtomicU32,
    /// Another task than the threads of `pid` shares the space.
    many_tasks: AtomicBool,
    /// The process's own threads may record, by the gate that our filter lets through.
    inline: AtomicBool,
    /// End of the heap as a mapping table showed it; `u64::MAX` while unknown.
    heap_end: AtomicU64,
    /// Largest argument of a trapped brk.
    heap_asked: AtomicU64,
    jobs: Sender<Arc<Job>>,
    /// Its userfaultfd.
    pub fault: Fault,
    /// The worker didn't meet a deadline and hasn't come back since.
    pub stuck: AtomicBool,
    /// In which round of [`super::attachment::Attachment`] its threads were waited for; 0 under `run`.
    pub settled: AtomicU64,
}

impl Space {
    /// Takes note of the address space of process `pid`. `jobs` leads to its worker.
    pub fn new(pid: u32, jobs: Sender<Arc<Job>>) -> io::Result<Self> {
        let pidfd = ummunotify_sys::process::pidfd_open(pid)?;
        let size = File::open(format!("/proc/{pid}/statm"))?;
        // Nobody may read the table of some processes: an open goes on without it.
        let table = File::open(format!("/proc/{pid}/maps")).ok();
        let marker = sealed_memfd(c"ummunotify-space", PAGE_SIZE)?;
        let marker_identity = FileName::of(&marker)?;
        Ok(Self {
            pid,
            pidfd,
            size,
            marker,
            marker_identity,
            marked: AtomicBool::new(false),
            table: Mutex::new(table),
            contexts: Mutex::new(Vec::new()),
            gone: AtomicBool::new(false),
            executing: AtomicU32::new(0),
            many_tasks: AtomicBool::new(false),
            inline: AtomicBool::new(false),
            heap_end: AtomicU64::new(u64::MAX),
            heap_asked: AtomicU64::new(0),
            jobs,
            fault: Fault::default(),
            stuck: AtomicBool::new(false),
            settled: AtomicU64::new(0),
        })
    }

    /// The marker, for the opener to map.
    pub fn marker(&self) -> BorrowedFd<'_> {
        self.marker.as_fd()
    }

    /// Whether a mapping table is this space's: the marker is in it. It is made readable once forks don't inherit it
    /// any more; one that a fork amid the open has copied never is.
    pub fn owns(&self, table: &[Mapping]) -> bool {
        let readable = |m: &&Mapping| i32::from(m.prot) & libc::PROT_READ != 0;
        let found = table.iter().filter(readable).any(|m| self.marker_identity.is_mapped_by(m));
        if found {
            self.set_marked();
        }
        found
    }

    /// The opener has mapped the marker.
    pub fn set_marked(&self) {
        if !self.marked.swap(true, Ordering::AcqRel) {
            *lock(&self.table) = None;
        }
    }

    /// Whether the process may still be about to map the marker: nobody has seen it, and the process hasn't executed
    /// another program. Must be asked before the look at a table, so that it can't be mapped in between.
    pub fn awaits_marker(&self) -> bool {
        if self.marked.load(Ordering::Acquire) || !self.process_alive() {
            return false;
        }
        match &*lock(&self.table) {
            // That of a first thread which had ended was empty from the beginning.
            Some(table) => !self.has_memory() || !matches!(table.read_at(&mut [0], 0), Ok(0)),
            None => self.executing().is_none(),
        }
    }

    /// The same after a look whether the marker is mapped.
    pub fn still_awaits_marker(&self, kernel: &KernelTraits) -> bool {
        self.awaits_marker() && !task::mappings(self.pid, kernel).is_ok_and(|table| self.owns(&table))
    }

    /// Whether process `pid` runs in this address space, as far as the kernel tells.
    pub fn is_of(&self, pid: u32) -> bool {
        // Two first threads that have ended have the same memory: none.
        let shares = || ummunotify_sys::process::same_address_space(pid, self.pid).unwrap_or(false);
        self.pid == pid || self.has_memory() && shares()
    }

    /// For polling: readable once the process is gone.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether the process still has a task.
    pub fn process_alive(&self) -> bool {
        ummunotify_sys::process::pidfd_alive(&self.pidfd)
    }

    /// Whether the process's first task has an address space: not when it has ended, though others of its threads may go
    /// on. False if it can't be told.
    pub fn has_memory(&self) -> bool {
        let mut size = [0; 2];
        self.size.read_at(&mut size, 0).is_ok() && size != *b"0 "
    }

    /// The open contexts.
    pub fn contexts(&self) -> Vec<Arc<Context>> {
        lock(&self.contexts).clone()
    }

    /// True if no context is open.
    pub fn is_idle(&self) -> bool {
        lock(&self.contexts).is_empty()
    }

    /// Adds a context.
    pub fn add(&self, context: Arc<Context>) {
        let mut contexts = lock(&self.contexts);
        if contexts.is_empty() {
            // Of calls to brk nothing was noted meanwhile.
            self.set_heap_end(u64::MAX);
        }
        contexts.push(context);
        drop(contexts);
        self.tell_recorders();
    }

    /// Forgets a context; true if it was here.
    pub fn remove(&self, number: u64) -> bool {
        let removed = {
            let mut contexts = lock(&self.contexts);
            let before = contexts.len();
            contexts.retain(|c| c.number != number);
            contexts.len() < before
        };
        self.tell_recorders();
        removed
    }

    /// Whether the process's threads may record, those contexts that they list.
    pub fn set_inline(&self, inline: bool) {
        self.inline.store(inline, Ordering::Release);
        self.tell_recorders();
    }

    /// See [`Self::set_inline`].
    pub fn is_inline(&self) -> bool {
        self.inline.load(Ordering::Acquire)
    }

    /// Says in every arena who records and how many contexts there are. While a context is there whose descriptors
    /// are closed, the traps must see where its counter is unmapped; while userfaultfd watches, whatever hits.
    pub fn tell_recorders(&self) {
        let contexts = lock(&self.contexts);
        let lingers = contexts.iter().any(|c| c.lingering().is_some());
        let recorder = match (self.is_inline() && !lingers, self.fault.is_on()) {
            (false, _) => Recorder::Traps,
            (true, false) => Recorder::Opener,
            (true, true) => Recorder::OpenerPasses,
        };
        for context in contexts.iter() {
            context.engine.set_siblings(u32::try_from(contexts.len()).unwrap_or(u32::MAX));
            context.engine.set_recorder(recorder);
        }
    }

    /// Calls `f` on each open context until it says true; the answer is whether one did.
    pub fn any(&self, mut f: impl FnMut(&Context) -> bool) -> bool {
        lock(&self.contexts).iter().any(|c| f(c))
    }

    /// A trapped call of `tid` has come in: adds the contexts to `spared` for which the kernel module records it.
    pub fn spare(&self, tid: u32, spared: &mut Vec<u64>) {
        let contexts = lock(&self.contexts);
        spared.extend(contexts.iter().filter(|c| !c.watch().admits(tid)).map(|c| c.number));
    }

    /// Whether `range` may hit a region of a context that isn't spared.
    pub fn may_hit(&self, range: PageRange, spared: &[u64]) -> bool {
        self.may_be_hit(Reach::Ranges(range, None), spared)
    }

    /// Whether a call that reaches so far may hit a region of a context that isn't spared.
    pub fn may_be_hit(&self, reach: Reach, spared: &[u64]) -> bool {
        self.any(|context| !spared.contains(&context.number) && context.may_be_hit(reach))
    }

    /// A trapped call of `tid` has come in: whether all contexts are recorded in, none of it hits, and none lingers.
    pub fn is_missed(&self, tid: u32, reach: Reach) -> bool {
        let contexts = lock(&self.contexts);
        contexts.iter().all(|c| c.watch().admits(tid) && c.lingering().is_none() && !c.may_be_hit(reach))
    }

    /// Records everything as invalid in every context.
    pub fn invalidate_all(&self, reason: Reason) {
        self.invalidate_all_but(reason, &[]);
    }

    /// The same but for the contexts of these numbers.
    pub fn invalidate_all_but(&self, reason: Reason, spared: &[u64]) {
        for context in lock(&self.contexts).iter().filter(|c| !spared.contains(&c.number)) {
            context.invalidate_all(reason);
        }
    }

    /// Records each of `pieces`, in order, in every context that isn't spared.
    pub fn record(&self, pieces: &[PageRange], spared: &[u64]) {
        let contexts = lock(&self.contexts);
        for piece in pieces {
            for context in contexts.iter().filter(|c| !spared.contains(&c.number)) {
                context.record(*piece);
            }
        }
    }

    /// Keeps a call waiting for as long as a ring that was made before is on its way.
    pub fn delay(&self, call: &Arc<GoOn>) {
        for context in lock(&self.contexts).iter() {
            context.delay(call);
        }
    }

    /// At the end of an operation that was recorded as `pieces`: hits the regions that were registered or dequeued
    /// since it began. `begin` tells what [`ummunotify_engine::Engine::begin`] gave for the context of that number.
    pub fn record_after(&self, pieces: &[PageRange], spared: &[u64], begin: impl Fn(u64) -> Begin) {
        let contexts = lock(&self.contexts);
        for piece in pieces {
            for context in contexts.iter().filter(|c| !spared.contains(&c.number)) {
                context.record_after(begin(context.number), *piece);
            }
        }
    }

    /// Nothing of this space fires any more.
    pub fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
        self.fault.end();
    }

    /// See [`Self::set_gone`].
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// A member is about to execve.
    pub fn set_executing(&self, tid: u32) {
        self.executing.store(tid, Ordering::Release);
    }

    /// The member that was last seen entering execve, unless it was seen to fail: until then every call of
    /// the process needs proof that it still runs in this space.
    pub fn executing(&self) -> Option<u32> {
        Some(self.executing.load(Ordering::Acquire)).filter(|&tid| tid != 0)
    }

    /// `tid` was seen in this space after its execve, which hence failed.
    pub fn exec_failed(&self, tid: u32) {
        // Another member may have entered execve since: its mark stays.
        let _ = self.executing.compare_exchange(tid, 0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Another task than the threads of the process lives here.
    pub fn set_many_tasks(&self) {
        self.many_tasks.store(true, Ordering::Release);
    }

    /// See [`Self::set_many_tasks`].
    pub fn many_tasks(&self) -> bool {
        self.many_tasks.load(Ordering::Acquire)
    }

    /// Whether it isn't known where the heap ends.
    pub fn heap_is_unknown(&self) -> bool {
        self.heap_end.load(Ordering::Acquire) == u64::MAX
    }

    /// The heap ends here, says the mapping table, which was read while nobody was inside a brk that wasn't noted.
    pub fn set_heap_end(&self, end: u64) {
        self.heap_end.store(end, Ordering::Release);
    }

    /// brk was asked for `end`.
    pub fn heap_asked(&self, end: u64) {
        self.heap_asked.fetch_max(end, Ordering::AcqRel);
    }

    /// No byte of the heap lies at or above this address.
    pub fn heap_limit(&self) -> u64 {
        let end = self.heap_end.load(Ordering::Acquire);
        let asked = self.heap_asked.load(Ordering::Acquire).saturating_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1);
        end.max(asked)
    }

    /// Hands a job to the worker; false if the worker is gone or has too many.
    pub fn submit(&self, job: Arc<Job>) -> bool {
        self.jobs.try_send(job).is_ok()
    }
}
