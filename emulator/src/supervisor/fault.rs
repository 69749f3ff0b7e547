//! The fault layer of one address space: a userfaultfd on the ranges that are registered with the device.
//!
//! It sees what no trapped call causes (a request of io_uring, a task that the filter doesn't reach), and of calls
//! that are trapped the end. Its events come from [`watcher`](super::watcher); here is what is watched, and which
//! trapped calls are on their way.
//!
//! Lock order: `order`, then `state`. `order` is held across calls that can wait for the target's mapping lock, so
//! neither the main loop nor the watcher takes it; `state` never across any.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use ummunotify_abi::PageRange;
use ummunotify_abi::arena::ELSEWHERE_FAULT;
use ummunotify_abi::range::PAGE_SIZE;
use ummunotify_engine::Begin;
use ummunotify_sys::uffd::Watch;

use super::context::{Context, lock};
use super::host::SupervisorHost;
use super::log;
use super::ranges::Ranges;
use super::space::Space;
use super::{settle, task, watcher};
use crate::target::maps::{self, Mapping, Name};
use crate::target::{KernelTraits, Target};
use crate::trap::operation::{ADDRESS_END, Operation, Reach};

/// A trapped call that was let go and may be followed by events.
#[derive(Debug)]
pub struct Call {
    /// What it does.
    pub operation: Operation,
    /// The widest ranges that it may touch.
    pub reach: Vec<PageRange>,
    /// Where each context stood before anything of it was recorded, by the context's number.
    pub begins: HashMap<u64, Begin>,
    /// What was recorded for it. In a context without regions there, that is all it may touch.
    pub recorded: Vec<PageRange>,
}

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
    /// What was taken off for the call of a task, until that has acted.
    off: HashMap<u32, Off>,
    /// Number of the last call that something was taken off for.
    offs: u64,
    /// Ranges that became armed without being registered: the new places of moved mappings.
    stray: Ranges,
    /// The last trapped call of each task, if it may cause events.
    calls: HashMap<u32, Call>,
    /// How many of them there may be before those of tasks that have ended are dropped.
    crowded: usize,
}

/// See [`State::off`].
#[derive(Debug, Default)]
struct Off {
    /// Which call it was: a later one of the same task must not be taken for it.
    number: u64,
    ranges: Ranges,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Fault {
    /// Serialises what arms and disarms.
    order: Mutex<()>,
    state: Mutex<State>,
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

/// Calls that are kept without a look at who made them.
const CALLS: usize = 256;

/// How many probes may be spent on finding out which pages of a range are registered by nobody else.
const PROBES: usize = 512;

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

    /// A trapped call of task `tid` begins. To be called before anything is recorded or tested for it.
    pub fn begin(&self, tid: u32, operation: &Operation, reach: Reach, contexts: &[Arc<Context>]) {
        let mut state = lock(&self.state);
        if operation.causes_events() && reach != Reach::Nothing {
            let begins = contexts.iter().map(|c| (c.number, c.engine.begin())).collect();
            let reach: Vec<_> = reach.ranges().collect();
            let call = Call { operation: *operation, recorded: reach.clone(), reach, begins };
            state.calls.insert(tid, call);
            if state.calls.len() > state.crowded.max(CALLS) {
                state.calls.retain(|tid, _| task::exists(*tid));
                state.crowded = 2 * state.calls.len();
            }
        } else {
            // The last one is over, since the task makes another.
            state.calls.remove(&tid);
        }
    }

    /// What was recorded for the call of task `tid`.
    pub fn recorded(&self, tid: u32, pieces: &[PageRange]) {
        if self.is_on()
            && let Some(call) = lock(&self.state).calls.get_mut(&tid)
        {
            call.recorded = pieces.to_vec();
        }
    }

    /// Runs `f` on the calls that may be on their way.
    pub fn with_calls<T>(&self, f: impl FnOnce(&mut HashMap<u32, Call>) -> T) -> T {
        f(&mut lock(&self.state).calls)
    }

    /// Whether the border of two mappings at that address was made by us.
    pub fn is_seam(&self, address: u64) -> bool {
        self.is_on() && lock(&self.state).armed.has_edge(address)
    }

    /// Whether a call of task `tid` has to be looked at because watching would make it fail: now, or as soon as
    /// what was taken off for its last call is armed again.
    pub fn is_in_the_way_of(&self, tid: u32, operation: &Operation) -> bool {
        self.is_on()
            && operation.fails_on_watched().is_some_and(|range| {
                let state = lock(&self.state);
                state.armed.touches(range) || state.lost.touches(range) || state.off.contains_key(&tid)
            })
    }

    /// Whether something in `range` is to be armed again, or something that was taken off for a call of task `tid`:
    /// that must not happen while the task is in another call.
    pub fn is_to_be_armed(&self, tid: u32, range: PageRange) -> bool {
        let state = lock(&self.state);
        state.off.contains_key(&tid) || state.lost.touches(range)
    }

    /// What was armed in `range` isn't mapped there any more; `moved_to`: it is there now.
    pub fn gone(&self, range: PageRange, moved_to: Option<PageRange>) {
        if range.is_empty() {
            return;
        }
        let mut state = lock(&self.state);
        for piece in state.armed.over(range).into_iter().filter_map(|r| r.intersection(range)) {
            state.lost.insert(piece);
        }
        if let Some(to) = moved_to {
            state.stray.insert(to);
            state.armed.insert(to);
        }
    }

    /// Lets go of the userfaultfd and with it of every range and waiter.
    pub fn end(&self) {
        let mut state = lock(&self.state);
        self.on.store(false, Ordering::Release);
        if let Some(stop) = state.stop.take() {
            // Fails only for a counter that is full.
            let _ = stop.write(1);
        }
        *state = State::default();
    }
}

impl Space {
    /// Whether a userfaultfd has to be had, for a context that was added to the space before.
    pub fn lacks_userfaultfd(&self) -> bool {
        // Not while the end of the last context takes it away.
        let _order = lock(&self.fault.order);
        !self.fault.is_there()
    }

    /// Puts the layer on, for all contexts: from the return on, each registered range is watched, and so is each
    /// that will be registered. May wait for the target's mapping lock. Does nothing if it is on.
    ///
    /// # Errors
    /// ENODEV without a userfaultfd; else what kept it from starting.
    pub fn watch_registered(self: &Arc<Self>, kernel: &KernelTraits) -> io::Result<()> {
        let fault = &self.fault;
        let _order = lock(&fault.order);
        if fault.is_on() {
            return Ok(());
        }
        let watch = lock(&fault.state).watch.clone().ok_or(Errno::ENODEV)?;
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        watcher::start(Arc::clone(self), Arc::clone(&watch), Arc::clone(&stop))?;
        lock(&fault.state).stop = Some(stop);
        fault.on.store(true, Ordering::Release);
        log::info!("process {}: userfaultfd watches what it registers", self.pid);
        let arming = Arming { space: self, kernel, watch };
        for context in self.contexts() {
            arming.context(&context);
        }
        Ok(())
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
        let _order = lock(&self.fault.order);
        if let Some(arming) = self.arming(kernel).as_ref() {
            arming.context(context);
        }
    }

    /// A region was registered: it is watched when this returns. May wait for the target's mapping lock.
    pub fn region_added(self: &Arc<Self>, region: PageRange, kernel: &KernelTraits) {
        if !self.fault.is_on() {
            return;
        }
        let _order = lock(&self.fault.order);
        if let Some(arming) = self.arming(kernel).as_ref() {
            arming.tidy();
            arming.arm_or_wait(pages_of(region));
        }
    }

    /// A region was unregistered: what nobody else registered isn't watched any more.
    pub fn region_removed(self: &Arc<Self>, region: PageRange, kernel: &KernelTraits) {
        if !self.fault.is_on() {
            return;
        }
        let _order = lock(&self.fault.order);
        if let Some(arming) = self.arming(kernel).as_ref() {
            arming.disarm_unregistered(pages_of(region));
            arming.tidy();
        }
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

    /// Takes the watch off a range, for a call of task `tid` that would fail on it, until [`Self::tend`].
    pub fn take_off(self: &Arc<Self>, tid: u32, range: PageRange, kernel: &KernelTraits) {
        let _order = lock(&self.fault.order);
        let Some(arming) = self.arming(kernel) else { return };
        let armed = lock(&self.fault.state).armed.over(range);
        armed.iter().for_each(|piece| arming.disarm(*piece));
        let mut state = lock(&self.fault.state);
        state.offs += 1;
        let number = state.offs;
        let off = state.off.entry(tid).or_default();
        off.number = number;
        armed.into_iter().for_each(|piece| off.ranges.insert(piece));
        let lost = state.lost.over(range);
        for piece in lost {
            state.lost.remove(piece);
            state.off.entry(tid).or_default().ranges.insert(piece);
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
            self.fault.unwatched.fetch_add(1, Ordering::Relaxed);
        }
        !pieces.is_empty()
    }

    /// Arms what was taken off again, once the calls have acted, on a thread of its own.
    pub fn tend(self: &Arc<Self>, kernel: &KernelTraits) {
        if self.fault.tending.swap(true, Ordering::AcqRel) {
            // The one at work looks once more when it has done.
            return;
        }
        let (space, kernel) = (Arc::clone(self), kernel.clone());
        let started =
            std::thread::Builder::new().name("tend".into()).stack_size(256 * 1024).spawn(move || {
                loop {
                    let next =
                        || lock(&space.fault.state).off.iter().next().map(|(tid, off)| (*tid, off.number));
                    while let Some((tid, number)) = next() {
                        settle::leave(space.pid, tid);
                        space.put_on(tid, number, &kernel);
                    }
                    space.fault.tending.store(false, Ordering::Release);
                    if next().is_none() || space.fault.tending.swap(true, Ordering::AcqRel) {
                        return;
                    }
                }
            });
        if let Err(e) = started {
            self.fault.tending.store(false, Ordering::Release);
            log::warning!(
                "process {}: can't start a thread: {e}; what it moved isn't watched any more",
                self.pid
            );
        }
    }

    /// Arms what was taken off for that call of a task, unless it has made another one.
    fn put_on(self: &Arc<Self>, tid: u32, number: u64, kernel: &KernelTraits) {
        let _order = lock(&self.fault.order);
        let Some(arming) = self.arming(kernel) else { return };
        let off = match lock(&self.fault.state).off.get(&tid) {
            Some(off) if off.number == number => off.ranges.all(),
            _ => return,
        };
        for range in off.into_iter().filter(|range| self.any(|c| c.engine.may_hit(*range))) {
            arming.arm_or_wait(range);
            if self.fault.bypass() {
                // Nobody watched meanwhile.
                self.record(&[range], &[]);
            }
        }
        // Not earlier: who is about to make another such call looks here.
        lock(&self.fault.state).off.remove(&tid);
    }

    fn arming<'a>(self: &'a Arc<Self>, kernel: &'a KernelTraits) -> Option<Arming<'a>> {
        if !self.fault.is_on() {
            return None;
        }
        let watch = lock(&self.fault.state).watch.clone()?;
        Some(Arming { space: self, kernel, watch })
    }
}

/// What is done with `order` held.
struct Arming<'a> {
    space: &'a Arc<Space>,
    kernel: &'a KernelTraits,
    watch: Arc<Watch>,
}

impl Arming<'_> {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        lock(&self.space.fault.state)
    }

    /// Turns the context's own registrations to us, and arms those that are there.
    fn context(&self, context: &Arc<Context>) {
        let host = SupervisorHost::new(Arc::clone(self.space), Arc::clone(context));
        let mut regions = Ranges::default();
        let seen = context
            .engine
            .set_elsewhere(&host, ELSEWHERE_FAULT)
            .and_then(|()| context.engine.visit(&host, |region| regions.insert(pages_of(region.range))));
        if seen.is_err() {
            self.space.fault.unwatched.fetch_add(1, Ordering::Relaxed);
            log::warning!(
                "process {}, context {}: a thread stays inside a call of the device, so its regions can't be \
                 watched by userfaultfd",
                self.space.pid,
                context.number
            );
        }
        for range in regions.all() {
            self.arm_or_wait(range);
        }
    }

    /// Arms what is mapped in a range: as a whole, else mapping by mapping. False if nothing is mapped there.
    fn arm(&self, range: PageRange) -> bool {
        let Err(whole) = self.watch.arm(range.start, range.len()) else {
            self.state().armed.insert(range);
            return true;
        };
        if self.space.is_gone() || !self.space.process_alive() {
            return true;
        }
        let table = match task::mappings(self.space.pid, self.kernel) {
            Ok(table) => table,
            Err(e) => {
                self.lose(range, &format!("{whole}; {e}"));
                return true;
            }
        };
        let mapped = maps::overlapping(&table, range);
        for mapping in mapped.iter().filter(|m| m.name != Name::Special) {
            let Some(piece) = mapping.range.intersection(range) else { continue };
            // Huge pages are watched whole.
            let piece = if self.is_huge(mapping) { mapping.range } else { piece };
            match self.watch.arm(piece.start, piece.len()) {
                Ok(()) => self.state().armed.insert(piece),
                Err(e) => self.lose(piece, &e.to_string()),
            }
        }
        !mapped.is_empty()
    }

    /// The same; what isn't mapped yet is armed later.
    fn arm_or_wait(&self, range: PageRange) {
        if !self.arm(range) {
            self.state().lost.insert(range);
        }
    }

    fn is_huge(&self, mapping: &Mapping) -> bool {
        use crate::target::{FileKind, ProcessTarget};
        let mut target = ProcessTarget::new(self.space.pid.cast_signed(), true, self.kernel);
        matches!(target.device_kind(mapping.device), FileKind::Hugetlb(_))
    }

    /// Coverage is lost: said the first time, and counted.
    fn lose(&self, piece: PageRange, why: &str) {
        if self.space.fault.unwatched.fetch_add(1, Ordering::Relaxed) == 0 {
            log::warning!(
                "process {}: userfaultfd can't watch [{:#x},{:#x}): {why}; what changes it past the filter goes \
                 unseen (said once, counted in the statistics)",
                self.space.pid,
                piece.start,
                piece.end
            );
        }
    }

    /// Disarms a range, whatever is mapped there now.
    fn disarm(&self, range: PageRange) {
        self.state().armed.remove(range);
        if self.watch.disarm(range.start, range.len()).is_ok() {
            return;
        }
        // Something in it never was watched. What isn't mapped any more needs nothing.
        let Ok(table) = task::mappings(self.space.pid, self.kernel) else { return };
        for piece in maps::overlapping(&table, range).iter().filter_map(|m| m.range.intersection(range)) {
            let _ = self.watch.disarm(piece.start, piece.len());
        }
    }

    /// Disarms the parts of a range that nobody has registered.
    fn disarm_unregistered(&self, range: PageRange) {
        let registered = |range| self.space.any(|c| c.engine.may_hit(range));
        let mut free = Ranges::default();
        unregistered(range, &registered, &mut free, &mut { PROBES });
        for piece in free.all() {
            self.state().lost.remove(piece);
            self.disarm(piece);
        }
    }

    /// Arms what was lost and is mapped again, and disarms what was moved to where nothing is registered.
    fn tidy(&self) {
        let (lost, stray) = {
            let mut state = self.state();
            (state.lost.all(), std::mem::take(&mut state.stray))
        };
        for range in stray.all() {
            self.disarm_unregistered(range);
        }
        for range in lost.into_iter().take(PROBES) {
            // Where it was taken off for a call, that would fail; it is armed after the call. And it stays in the set
            // until it is armed: who is about to make such a call looks there.
            let waits = self.state().off.values().any(|off| off.ranges.touches(range));
            let wanted = self.space.any(|c| c.engine.may_hit(range));
            if !wanted || !waits && self.arm(range) {
                self.state().lost.remove(range);
            }
        }
    }
}

/// The pages that an invalidation of a region can be about, whatever the region looks like.
fn pages_of(region: PageRange) -> PageRange {
    let start = region.start.min(region.end.saturating_sub(1));
    let end = region.end.max(region.start.saturating_add(1));
    let down = |address: u64| address & !(PAGE_SIZE - 1);
    PageRange::new(
        down(start.min(ADDRESS_END)),
        down(end.min(ADDRESS_END).saturating_add(PAGE_SIZE - 1)).max(PAGE_SIZE),
    )
}

/// Adds the parts of `range` that aren't `registered` to `free`, as far as the probes suffice.
fn unregistered(
    range: PageRange,
    registered: &dyn Fn(PageRange) -> bool,
    free: &mut Ranges,
    probes: &mut usize,
) {
    if range.is_empty() || *probes == 0 {
        return;
    }
    *probes -= 1;
    if !registered(range) {
        free.insert(range);
    } else if range.len() > PAGE_SIZE {
        let middle = range.start + ((range.len() / 2) & !(PAGE_SIZE - 1)).max(PAGE_SIZE);
        unregistered(PageRange::new(range.start, middle), registered, free, probes);
        unregistered(PageRange::new(middle, range.end), registered, free, probes);
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

#[cfg(test)]
mod tests {
    use super::*;

    const fn pages(start: u64, end: u64) -> PageRange {
        PageRange::new(start * PAGE_SIZE, end * PAGE_SIZE)
    }

    #[test]
    fn regions_of_any_shape_have_pages() {
        assert_eq!(pages_of(PageRange::new(0x1800, 0x1801)), pages(1, 2));
        assert_eq!(pages_of(pages(1, 3)), pages(1, 3));
        assert_eq!(pages_of(PageRange::new(0x1800, 0x1800)), pages(1, 2));
        assert_eq!(pages_of(pages(5, 5)), pages(4, 6));
        assert_eq!(pages_of(pages(9, 5)), pages(4, 10));
        assert_eq!(pages_of(PageRange::new(0, 0)), pages(0, 1));
        assert_eq!(pages_of(PageRange::ALL), PageRange::new(0, ADDRESS_END));
    }

    #[test]
    fn what_others_registered_stays_armed() {
        let left = [pages(3, 4), pages(7, 9), pages(20, 21)];
        let registered = |range: PageRange| left.iter().any(|r| range.hits(*r));
        let mut free = Ranges::default();
        unregistered(pages(0, 16), &registered, &mut free, &mut { PROBES });
        assert_eq!(free.all(), [pages(0, 3), pages(4, 7), pages(9, 16)]);
        let mut free = Ranges::default();
        unregistered(pages(0, 1 << 30), &|_| true, &mut free, &mut { PROBES });
        assert_eq!(free.all(), [], "and the search ends");
    }
}
