//! The fault layer of one address space: a userfaultfd on the ranges that are registered with the device.
//!
//! It sees what no trapped call causes (a request of io_uring, a task that the filter doesn't reach), and of calls
//! that are trapped the end. Its events come from [`watcher`](super::watcher); here is what is watched, and which
//! trapped calls are on their way.
//!
//! Lock order: `order`, then `state`. `order` is held across calls that can wait for the target's mapping lock, so
//! neither the main loop nor the watcher takes it; `state` never across any.

mod arming;
mod untold;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use ummunotify_abi::PageRange;
use ummunotify_sys::uffd::{Change, Watch};

use super::calls::{CALLS, Call, Calls, range_of};
use super::context::{Context, lock};
use super::log;
use super::ranges::Ranges;
use super::settle::Leaving;
use super::space::Space;
use super::{task, watcher};
use crate::target::KernelTraits;
use crate::trap::operation::{Operation, Reach};

use self::arming::{Arming, pages_of};
use self::untold::Off;
pub use self::untold::{Begins, Untold};

/// What [`Fault::order`] doesn't guard.
#[derive(Debug, Default)]
struct State {
    /// The userfaultfd.
    watch: Option<Arc<Watch>>,
    /// Ends the watcher.
    stop: Option<Arc<EventFd>>,
    /// Ranges that were armed and not taken off again. What was unmapped since is among them.
    armed: Ranges,
    /// Armed ranges that went away: to be armed again if something is mapped there and still registered.
    lost: Ranges,
    /// The calls of tasks on whose ends no events come, until they have acted; and what was taken off for them.
    off: HashMap<u32, Off>,
    /// Number of the last call that something was taken off for.
    offs: u64,
    /// What is being armed, and whether some of it went away meanwhile.
    arming: Option<(PageRange, bool)>,
    /// Registered ranges that can't be watched.
    bare: Ranges,
    /// Ranges that became armed without being registered: the new places of moved mappings.
    stray: Ranges,
    /// The trapped calls on their way that may cause events.
    calls: Calls,
    /// The last trapped call of each task that would fail if the watch parted a mapping meanwhile, and was let go since
    /// it didn't: what it touches.
    acting: HashMap<u32, PageRange>,
    /// What is about to be watched, or not any more: a call that would fail on it waits for that.
    changing: Vec<PageRange>,
    /// Changes so far.
    changes: u64,
}

impl State {
    /// Whether the watch would make a call of task `tid` on that range fail, or soon will.
    fn hinders(&self, tid: u32, range: PageRange) -> bool {
        self.armed.touches(range) || self.changes_soon(tid, range)
    }

    /// Whether what is watched of that range is about to change.
    fn changes_soon(&self, tid: u32, range: PageRange) -> bool {
        self.is_in_doubt(range)
            || self.changing.iter().any(|pages| pages.hits(range))
            || self.off.iter().any(|(task, off)| *task == tid || off.over.hits(range))
    }

    /// Whether something of that range may not be watched although it was to be.
    fn is_in_doubt(&self, range: PageRange) -> bool {
        self.lost.touches(range)
            // An event that is being read may be of a mapping that went from there, and what is there now isn't watched.
            || self.calls.is_reading()
            || self.arming.is_some_and(|(arming, _)| arming.hits(range))
    }

    /// What was armed in `range` isn't mapped there any more; `moved_to`: it is there now.
    fn gone(&mut self, range: PageRange, moved_to: Option<PageRange>) {
        if range.is_empty() {
            return;
        }
        if let Some((arming, went)) = &mut self.arming {
            *went |= arming.hits(range);
        }
        for piece in self.armed.over(range).into_iter().filter_map(|r| r.intersection(range)) {
            self.lost.insert(piece);
        }
        if let Some(to) = moved_to {
            self.stray.insert(to);
            self.armed.insert(to);
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Fault {
    /// Serialises what arms and disarms.
    order: Mutex<()>,
    state: Mutex<State>,
    /// A call has ended that something was taken off for.
    calls_end: Condvar,
    on: AtomicBool,
    /// Memory may change by what the filter doesn't see.
    bypass: AtomicBool,
    /// Somebody takes care of ranges that were taken off for a call.
    tending: AtomicBool,
    /// The client wasn't told yet what of its rings isn't seen.
    notice: AtomicBool,
    /// Pieces of registered ranges that can't be watched.
    unwatched: AtomicU64,
}

/// How long a registration waits for a call.
const AWAIT: Duration = Duration::from_secs(2);

/// How long a call waits for an event that is being read.
const AWAIT_READING: Duration = Duration::from_millis(5);

impl Fault {
    /// Takes the userfaultfd of the address space, for later. A second one isn't taken.
    ///
    /// # Errors
    /// It is none, or the kernel's has no events.
    pub fn adopt(&self, fd: OwnedFd) -> io::Result<()> {
        let watch = Watch::new(fd)?;
        lock(&self.state).watch.get_or_insert_with(|| Arc::new(watch));
        Ok(())
    }

    /// Whether a userfaultfd was taken.
    pub fn is_there(&self) -> bool {
        lock(&self.state).watch.is_some()
    }

    /// Whether registered ranges are watched.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Whether nothing is watched, and no call was let go whose end matters: the next one need not be noted.
    pub fn is_quiet(&self) -> bool {
        let state = lock(&self.state);
        !self.is_on() && state.acting.is_empty() && state.off.is_empty()
    }

    /// From here on no event is taken for a trapped call's.
    pub fn set_bypass(&self) {
        self.bypass.store(true, Ordering::Release);
    }

    /// See [`Self::set_bypass`].
    pub fn bypass(&self) -> bool {
        self.bypass.load(Ordering::Acquire)
    }

    /// True once after the layer went on because of a ring.
    pub fn take_notice(&self) -> bool {
        self.notice.load(Ordering::Relaxed) && self.notice.swap(false, Ordering::AcqRel)
    }

    /// Pieces of registered ranges that can't be watched, so far.
    pub fn unwatched(&self) -> u64 {
        self.unwatched.load(Ordering::Relaxed)
    }

    /// The last trapped call of task `tid` is over.
    pub fn ended(&self, tid: u32) {
        self.end_of_call(&mut lock(&self.state), tid);
    }

    fn end_of_call(&self, state: &mut State, tid: u32) {
        state.acting.remove(&tid);
        if let Some(off) = state.off.get_mut(&tid) {
            off.left = true;
            self.calls_end.notify_all();
        }
    }

    /// A trapped call of task `tid` begins. To be called before anything is recorded or tested for it.
    pub fn begin(&self, tid: u32, operation: &Operation, reach: Reach, contexts: &[Arc<Context>]) {
        let mut state = lock(&self.state);
        // Since the task makes another.
        self.end_of_call(&mut state, tid);
        if !self.is_on() {
            return;
        }
        if operation.causes_events() && reach != Reach::Nothing {
            let begins = contexts.iter().map(|c| (c.number, c.engine.begin())).collect();
            let reach: Vec<_> = reach.ranges().collect();
            let call = Call { operation: *operation, recorded: reach.clone(), reach, begins };
            state.calls.begin(tid, Some(call));
        } else {
            state.calls.begin(tid, None);
        }
    }

    /// What was recorded for the call of task `tid`.
    pub fn recorded(&self, tid: u32, pieces: &[PageRange]) {
        if self.is_on() {
            lock(&self.state).calls.recorded(tid, pieces);
        }
    }

    /// What an operation touches on whose end no event will come, although it hits what is registered: that isn't
    /// watched, or perhaps not. `None` if one will come, or of an operation of another kind.
    pub fn untold(&self, operation: &Operation, reach: Reach) -> Option<Untold> {
        if !self.is_on() || !operation.ends_with_event() {
            return None;
        }
        let state = lock(&self.state);
        let untold = |range: PageRange| state.is_in_doubt(range) || state.bare.touches(range);
        reach.ranges().any(untold).then(|| reach.hull()).flatten().map(|over| Untold { over, fails: false })
    }

    /// Waits, for a bounded time, until no event is being read: what is watched isn't known before.
    pub fn await_reading(&self) {
        let start = Instant::now();
        while self.is_on() && lock(&self.state).calls.is_reading() && start.elapsed() < AWAIT_READING {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// An event was read: `change` has happened. True if a trapped call explains it, see [`Calls::explain`].
    pub fn happened(&self, change: &Change) -> bool {
        // In one step: who sees that the event was read sees what isn't watched any more.
        let mut state = lock(&self.state);
        let explained = state.calls.explain(change, !self.bypass());
        match *change {
            Change::Unmapped { .. } => state.gone(range_of(change), None),
            Change::Moved { to, len, .. } => {
                state.gone(range_of(change), Some(PageRange::new(to, to.saturating_add(len))));
            }
            Change::Dropped { .. } => {}
        }
        explained
    }

    /// Runs `f` on the calls that may be on their way.
    pub fn with_calls<T>(&self, f: impl FnOnce(&mut Calls) -> T) -> T {
        f(&mut lock(&self.state).calls)
    }

    /// Whether the border of two mappings at that address was made by us.
    pub fn is_seam(&self, address: u64) -> bool {
        self.is_on() && lock(&self.state).armed.has_edge(address)
    }

    /// Whether a call of task `tid` may be let go as it is: watching doesn't make it fail, and won't as long as it acts.
    pub fn passes(&self, tid: u32, operation: &Operation) -> bool {
        let Some(range) = operation.fails_on_watched() else { return true };
        let mut state = lock(&self.state);
        let passes = !state.hinders(tid, range);
        if passes {
            if state.acting.len() >= CALLS {
                state.acting.retain(|tid, _| task::exists(*tid));
            }
            state.acting.insert(tid, range);
        }
        passes
    }

    /// The same of a call on watched memory that is a single mapping, says `is_whole`: then the watch hasn't parted it.
    pub fn passes_whole(&self, tid: u32, range: PageRange, is_whole: impl FnOnce() -> bool) -> bool {
        let changes = {
            let state = lock(&self.state);
            if state.changes_soon(tid, range) {
                return false;
            }
            state.changes
        };
        if !is_whole() {
            return false;
        }
        let mut state = lock(&self.state);
        let passes = state.changes == changes && !state.changes_soon(tid, range);
        if passes {
            state.acting.insert(tid, range);
        }
        passes
    }

    /// The tasks whose calls may be acting on `pages` just now, as they were let go.
    fn acting_on(&self, pages: PageRange) -> Vec<u32> {
        let state = lock(&self.state);
        state.acting.iter().filter(|(_, range)| range.hits(pages)).map(|(tid, _)| *tid).collect()
    }

    /// Whether something there was taken off for a call that is on its way.
    fn is_off_at(&self, pages: PageRange) -> bool {
        lock(&self.state).off.values().any(|off| off.over.hits(pages))
    }

    /// Lets go of the userfaultfd and with it of every range and waiter.
    pub fn end(&self) {
        let mut state = lock(&self.state);
        self.on.store(false, Ordering::Release);
        if let Some(stop) = state.stop.take() {
            // Fails only for a counter that is full.
            let _ = stop.write(1);
        }
        let ended = std::mem::take(&mut *state);
        drop(state);
        drop(ended);
    }
}

impl Space {
    /// Whether a userfaultfd has to be had, for a context that was added to the space before.
    pub fn lacks_userfaultfd(&self) -> bool {
        // Not while the end of the last context takes it away.
        let _order = lock(&self.fault.order);
        !self.fault.is_there()
    }

    /// Changes what is watched of `pages`, between the calls that would fail on that.
    fn change<T>(&self, pages: PageRange, change: impl FnOnce() -> T) -> T {
        {
            let mut state = lock(&self.fault.state);
            state.changing.push(pages);
            state.changes += 1;
        }
        self.await_tasks(
            || self.fault.acting_on(pages),
            |tid| {
                lock(&self.fault.state).acting.remove(&tid);
            },
        );
        let result = {
            let _order = lock(&self.fault.order);
            change()
        };
        let mut state = lock(&self.fault.state);
        if let Some(at) = state.changing.iter().position(|range| *range == pages) {
            state.changing.swap_remove(at);
        }
        result
    }

    /// Waits until all calls are over of the tasks that `acting` names; `over` takes one out of it.
    fn await_tasks(&self, acting: impl Fn() -> Vec<u32>, mut over: impl FnMut(u32)) {
        let mut calls: HashMap<u32, Leaving> = HashMap::new();
        let mut pause = Duration::from_micros(20);
        loop {
            let mut still = false;
            for tid in acting() {
                if calls.entry(tid).or_insert_with(|| Leaving::new(tid)).is_over(self.pid) {
                    over(tid);
                } else {
                    still = true;
                }
            }
            if !still {
                return;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_micros(500));
        }
    }

    /// Whether one has to be made for programs without a shim, which gives none.
    pub fn lacks_userfaultfd_of_a_shim(&self) -> bool {
        !self.fault.is_there() && self.any(|context| !context.is_shims)
    }

    /// Puts the layer on, for all contexts: from the return on, each registered range is watched, and so is each
    /// that will be registered. May wait for the target's mapping lock. Does nothing if it is on.
    ///
    /// # Errors
    /// ENODEV without a userfaultfd; else what kept it from starting.
    pub fn watch_registered(self: &Arc<Self>, kernel: &KernelTraits) -> io::Result<()> {
        let fault = &self.fault;
        if fault.is_on() {
            return Ok(());
        }
        self.change(PageRange::ALL, || {
            if fault.is_on() {
                return Ok(());
            }
            let watch = lock(&fault.state).watch.clone().ok_or(Errno::ENODEV)?;
            let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
            watcher::start(Arc::clone(self), Arc::clone(&watch), Arc::clone(&stop))?;
            lock(&fault.state).stop = Some(stop);
            fault.on.store(true, Ordering::Release);
            self.tell_recorders();
            log::info!("process {}: userfaultfd watches what it registers", self.pid);
            let arming = Arming { space: self, kernel, watch };
            for context in self.contexts() {
                arming.context(&context);
            }
            Ok(())
        })
    }

    /// The process has a ring, or is about to: calls may go past the filter from here on.
    ///
    /// # Errors
    /// As [`Self::watch_registered`].
    pub fn expect_bypass(self: &Arc<Self>, kernel: &KernelTraits) -> io::Result<()> {
        if !self.fault.bypass() {
            self.fault.notice.store(true, Ordering::Release);
        }
        self.fault.set_bypass();
        self.watch_registered(kernel)
    }

    /// A context was opened: its regions are watched if others' are.
    pub fn watch_context(self: &Arc<Self>, context: &Arc<Context>, kernel: &KernelTraits) {
        if !self.fault.is_on() {
            return;
        }
        self.change(PageRange::ALL, || {
            if let Some(arming) = self.arming(kernel).as_ref() {
                arming.context(context);
            }
        });
    }

    /// A region was registered: it is watched when this returns. May wait for the target's mapping lock.
    pub fn region_added(self: &Arc<Self>, region: PageRange, kernel: &KernelTraits) {
        let pages = pages_of(region);
        let start = Instant::now();
        loop {
            if !self.fault.is_on() {
                return;
            }
            let added = self.change(pages, || {
                let Some(arming) = self.arming(kernel) else { return true };
                // A call may have come since that would fail.
                let waits = self.fault.is_off_at(pages);
                if !waits {
                    arming.tidy();
                    arming.arm_or_wait(pages);
                } else if start.elapsed() > AWAIT {
                    lock(&self.fault.state).lost.insert(pages);
                }
                !waits || start.elapsed() > AWAIT
            });
            if added {
                break;
            }
            self.await_calls(region);
        }
        self.await_unwatched(pages);
    }

    /// A call that came before this registration, and hit nothing, may be about to change what can't be watched there.
    fn await_unwatched(&self, pages: PageRange) {
        let calls = {
            let state = lock(&self.fault.state);
            if !state.bare.touches(pages) {
                return;
            }
            state.calls.reaching(pages)
        };
        let left = Mutex::new(calls);
        self.await_tasks(|| lock(&left).clone(), |tid| lock(&left).retain(|task| *task != tid));
    }

    /// A region was unregistered: what nobody else registered isn't watched any more.
    pub fn region_removed(self: &Arc<Self>, region: PageRange, kernel: &KernelTraits) {
        if !self.fault.is_on() {
            return;
        }
        let pages = pages_of(region);
        self.change(pages, || {
            if let Some(arming) = self.arming(kernel).as_ref() {
                arming.disarm_unregistered(pages);
                arming.tidy();
            }
        });
    }

    /// A context is gone: what it alone registered isn't watched any more; with the last one nothing is.
    pub fn context_removed(self: &Arc<Self>, kernel: &KernelTraits) {
        let _order = lock(&self.fault.order);
        if self.is_idle() {
            self.fault.end();
            return;
        }
        if let Some(arming) = self.arming(kernel).as_ref() {
            let armed = lock(&self.fault.state).armed.all();
            for range in armed {
                arming.disarm_unregistered(range);
            }
        }
    }

    /// Takes the watch off a range for good: it is somebody else's from here on. True if it was watched.
    pub fn give_away(self: &Arc<Self>, range: PageRange, kernel: &KernelTraits) -> bool {
        let _order = lock(&self.fault.order);
        let Some(arming) = self.arming(kernel) else { return false };
        let armed = lock(&self.fault.state).armed.over(range);
        let pieces: Vec<_> = armed.into_iter().filter_map(|r| r.intersection(range)).collect();
        for piece in &pieces {
            arming.disarm(*piece);
            lock(&self.fault.state).bare.insert(*piece);
            self.fault.unwatched.fetch_add(1, Ordering::Relaxed);
        }
        !pieces.is_empty()
    }

    fn arming<'a>(self: &'a Arc<Self>, kernel: &'a KernelTraits) -> Option<Arming<'a>> {
        if !self.fault.is_on() {
            return None;
        }
        let watch = lock(&self.fault.state).watch.clone()?;
        Some(Arming { space: self, kernel, watch })
    }
}

/// Says that the layer isn't to be had, for whom it matters.
pub fn say_missing(space: &Space, errno: Errno, why: &str) {
    space.fault.unwatched.fetch_add(1, Ordering::Relaxed);
    log::warning!(
        "process {}: {why}, and userfaultfd can't be had ({errno}): what changes memory through io_uring goes unseen",
        space.pid
    );
}
