//! The desk: threads that serve trapped calls of the device.
//!
//! Serving one means reading the caller's memory, which can wait for as long as whoever backs that memory wants. So
//! each call has a thread to itself, taken from those that are idle or made when none is, up to a bound. An open that
//! isn't looked at in time goes on as if the device weren't there; any other call whose turn doesn't come fails with
//! EIO. What waits here delays nobody else.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use ummunotify_sys::notify::Notification;

use super::caller::Caller;
use super::log;
use super::shared::{Message, Shared};
use super::{device_call, open_call};
use crate::trap::device::DeviceCall;
use crate::trap::operation::{Decoded, Syscall};

/// How long a call may wait for somebody to look at it.
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
    /// When it must have been looked at.
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
    idle: Arc<AtomicUsize>,
    threads: Arc<AtomicUsize>,
    /// Calls that perhaps nobody has looked at yet, by the time when they are due.
    waiting: VecDeque<Arc<Visit>>,
}

impl Desk {
    /// Without threads yet.
    pub fn new() -> Self {
        let (visits, queue) = unbounded();
        Self { visits, queue, idle: Arc::default(), threads: Arc::default(), waiting: VecDeque::new() }
    }

    /// Has a call served.
    pub fn submit(&mut self, shared: &Arc<Shared>, call: Notification, asks: DeviceCall) {
        let due = Instant::now() + DEADLINE;
        let visit = Arc::new(Visit { call, asks, due, claimed: AtomicBool::new(false) });
        if self.idle.load(Ordering::Acquire) <= self.visits.len() {
            self.hire(shared);
        }
        // The other end is ours, too.
        let _ = self.visits.send(Arc::clone(&visit));
        self.forget_claimed();
        self.waiting.push_back(visit);
    }

    fn forget_claimed(&mut self) {
        while self.waiting.front().is_some_and(|visit| visit.is_claimed()) {
            self.waiting.pop_front();
        }
    }

    /// When the next call is due that nobody has looked at.
    pub fn due(&self) -> Option<Instant> {
        self.waiting.iter().find(|visit| !visit.is_claimed()).map(|visit| visit.due)
    }

    /// Answers the calls that nobody has looked at in time.
    pub fn deadlines(&mut self, shared: &Shared) {
        self.forget_claimed();
        let now = Instant::now();
        for visit in self.waiting.iter().take_while(|visit| visit.due <= now) {
            if visit.claim() {
                give_up(shared, visit);
            }
        }
    }

    fn hire(&self, shared: &Arc<Shared>) {
        if self.threads.load(Ordering::Acquire) >= MAX_THREADS {
            return;
        }
        let (shared, queue) = (Arc::clone(shared), self.queue.clone());
        let (idle, threads) = (Arc::clone(&self.idle), Arc::clone(&self.threads));
        threads.fetch_add(1, Ordering::AcqRel);
        let work = move || {
            loop {
                idle.fetch_add(1, Ordering::AcqRel);
                let visit = queue.recv_timeout(IDLE);
                idle.fetch_sub(1, Ordering::AcqRel);
                match visit {
                    Ok(visit) => serve(&shared, &visit),
                    // One that came just now: whoever submitted it may have counted on this thread.
                    Err(RecvTimeoutError::Timeout) if !queue.is_empty() => {}
                    Err(_) => break,
                }
            }
            threads.fetch_sub(1, Ordering::AcqRel);
        };
        if let Err(e) = std::thread::Builder::new().name("desk".into()).stack_size(256 * 1024).spawn(work) {
            self.threads.fetch_sub(1, Ordering::AcqRel);
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
