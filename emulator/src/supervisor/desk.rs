//! The desk: threads that serve trapped calls of the device.
//!
//! Serving one means reading the caller's memory, which can wait for as long as whoever backs that memory wants. So
//! each call has a thread to itself, taken from those that are idle or made when none is, up to a bound. What waits here
//! delays nobody else, and waits as long as it would in the kernel: how soon a thread gets a processor is no reason to
//! fail a call. Only when no more threads can be had, since all of them wait, a call whose turn doesn't come in time
//! fails with EIO, and an open goes on as if the device weren't there.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use ummunotify_sys::notify::Notification;

use super::caller::Caller;
use super::log;
use super::shared::{Message, Shared};
use super::{device_call, open_call};
use crate::trap::device::DeviceCall;
use crate::trap::operation::{Decoded, Syscall};

/// How long a call may wait for somebody to look at it when there is nobody more to be had.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// Threads at once.
const MAX_THREADS: usize = 64;
/// How long a thread stays without work.
const IDLE: Duration = Duration::from_secs(10);

/// A call that waits to be served.
#[derive(Debug)]
pub struct Visit {
    /// The call.
    pub call: Notification,
    /// What it may be.
    pub asks: DeviceCall,
    /// When it must have been looked at, if nobody more can be had.
    pub due: Instant,
    claimed: AtomicBool,
}

impl Visit {
    /// True for whoever asks first: that one answers.
    pub fn claim(&self) -> bool {
        !self.claimed.swap(true, Ordering::AcqRel)
    }

    /// Whether somebody has claimed it.
    pub fn is_claimed(&self) -> bool {
        self.claimed.load(Ordering::Acquire)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Desk {
    visits: Sender<Arc<Visit>>,
    queue: Receiver<Arc<Visit>>,
    /// Threads that are ready for a call, less the calls that were submitted: below zero, calls that none is ready for.
    free: Arc<AtomicIsize>,
    threads: Arc<AtomicUsize>,
    /// The last thread that was wanted couldn't be had.
    exhausted: bool,
    /// Calls that perhaps nobody has looked at yet, by the time when they are due.
    waiting: VecDeque<Arc<Visit>>,
}

impl Desk {
    /// Without threads yet.
    pub fn new() -> Self {
        let (visits, queue) = unbounded();
        Self {
            visits,
            queue,
            free: Arc::default(),
            threads: Arc::default(),
            exhausted: false,
            waiting: VecDeque::new(),
        }
    }

    /// Has a call served.
    pub fn submit(&mut self, shared: &Arc<Shared>, call: Notification, asks: DeviceCall) {
        let due = Instant::now() + DEADLINE;
        let visit = Arc::new(Visit { call, asks, due, claimed: AtomicBool::new(false) });
        if self.free.fetch_sub(1, Ordering::AcqRel) <= 0 {
            self.hire(shared);
        }
        // The other end is ours, too.
        let _ = self.visits.send(Arc::clone(&visit));
        self.forget_claimed();
        self.waiting.push_back(visit);
    }

    /// Those that stay are few: each has a thread that waits for the caller's memory, or none yet.
    fn forget_claimed(&mut self) {
        self.waiting.retain(|visit| !visit.is_claimed());
    }

    /// True if calls wait for threads that can't be had.
    fn is_exhausted(&self) -> bool {
        self.exhausted && self.free.load(Ordering::Acquire) < 0
    }

    /// When the next call is due that nobody has looked at.
    pub fn due(&self) -> Option<Instant> {
        if !self.is_exhausted() {
            return None;
        }
        self.waiting.iter().find(|visit| !visit.is_claimed()).map(|visit| visit.due)
    }

    /// Answers the calls that nobody has looked at in time.
    pub fn deadlines(&mut self, shared: &Shared) {
        self.forget_claimed();
        if !self.is_exhausted() {
            return;
        }
        let now = Instant::now();
        for visit in self.waiting.iter().take_while(|visit| visit.due <= now) {
            if visit.claim() {
                give_up(shared, visit);
            }
        }
    }

    fn hire(&mut self, shared: &Arc<Shared>) {
        self.exhausted = self.threads.load(Ordering::Acquire) >= MAX_THREADS;
        if self.exhausted {
            return;
        }
        let (shared, queue) = (Arc::clone(shared), self.queue.clone());
        let (free, threads) = (Arc::clone(&self.free), Arc::clone(&self.threads));
        threads.fetch_add(1, Ordering::AcqRel);
        let work = move || {
            loop {
                free.fetch_add(1, Ordering::AcqRel);
                match queue.recv_timeout(IDLE) {
                    Ok(visit) => serve(&shared, &visit),
                    // Below zero a call that was just submitted counts on this thread.
                    Err(RecvTimeoutError::Timeout) if free.fetch_sub(1, Ordering::AcqRel) <= 0 => {}
                    Err(_) => break,
                }
            }
            threads.fetch_sub(1, Ordering::AcqRel);
        };
        if let Err(e) = std::thread::Builder::new().name("desk".into()).stack_size(256 * 1024).spawn(work) {
            self.threads.fetch_sub(1, Ordering::AcqRel);
            self.exhausted = true;
            log::warning!("can't start a thread for a call of the device: {e}");
        }
    }
}

/// Serves one call.
fn serve(shared: &Arc<Shared>, visit: &Arc<Visit>) {
    let Some(listener) = shared.gate.listener.get() else { return };
    let caller = Caller { call: &visit.call, listener };
    shared.alarm.is_up(visit.call.tid);
    match visit.asks {
        DeviceCall::Open { path, flags } => open_call::serve(shared, &caller, visit, path, flags),
        // What it reads of the caller's memory waits as the kernel would.
        _ if visit.claim() => device_call::serve(shared, &caller, visit),
        _ => {}
    }
}

/// The call is none of the device's.
pub fn is_ordinary(shared: &Shared, caller: &Caller<'_>) {
    let call = caller.call;
    match Decoded::new(&Syscall { arch: call.arch, nr: call.nr, args: call.args }) {
        Decoded::Ignore => caller.proceed(),
        _ => shared.tell(Message::Ordinary(*call)),
    }
}

/// Nobody has looked at the call in time.
fn give_up(shared: &Shared, visit: &Visit) {
    let Some(listener) = shared.gate.listener.get() else { return };
    let caller = Caller { call: &visit.call, listener };
    match visit.asks {
        DeviceCall::Open { .. } => {
            log::warning!("task {}: the path of an open can't be read in time; it goes on", visit.call.tid);
            is_ordinary(shared, &caller);
        }
        asks => {
            log::warning!("task {}: {asks:?}: too many calls of the device wait: EIO", visit.call.tid);
            caller.answer(Err(nix::Error::EIO));
        }
    }
}
