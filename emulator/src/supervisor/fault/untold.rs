//! Calls on whose ends no event of userfaultfd comes: the watch is taken off for them, or isn't on all that is
//! registered where they act. A look at the thread shows their end.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ummunotify_abi::PageRange;
use ummunotify_engine::{Announced, Begin, Reason};

use super::arming::pages_of;
use super::{AWAIT, State};
use crate::supervisor::context::{Context, lock};
use crate::supervisor::ranges::Ranges;
use crate::supervisor::settle::Leaving;
use crate::supervisor::space::Space;
use crate::supervisor::{log, watcher};
use crate::target::KernelTraits;

/// Where contexts stood, by their numbers.
pub type Begins = HashMap<u64, Begin>;

/// A call on whose end no event will come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Untold {
    /// What it touches.
    pub over: PageRange,
    /// It would fail where a mapping is watched in part: the watch is taken off for it.
    pub fails: bool,
}

/// A call on whose end no event comes, see [`State::off`]; so it is announced where it hits, which holds LAST back until
/// the call has acted, and whoever registers something there waits as long.
#[derive(Debug)]
pub(super) struct Off {
    /// Which call it was: a later one of the same task must not be taken for it.
    number: u64,
    ranges: Ranges,
    /// The task makes another call already.
    pub(super) left: bool,
    /// What the call touches.
    pub(super) over: PageRange,
    /// It would fail where a mapping is watched in part.
    fails: bool,
    /// The contexts in which it hits something, told of its end when this is dropped.
    #[expect(dead_code, reason = "kept to be dropped")]
    hits: Vec<Hit>,
}

impl State {
    /// What is to be put on after the call of task `tid`: true if the watch is off there for another call too.
    fn leave_to_another(&mut self, tid: u32, range: PageRange) -> bool {
        let another =
            self.off.iter_mut().find(|(task, off)| **task != tid && off.fails && off.over.hits(range));
        another.map(|(_, off)| off.ranges.insert(range)).is_some()
    }
}

/// What a call on whose end no event comes does in one context.
#[derive(Debug)]
struct Hit {
    context: Arc<Context>,
    /// Where it stood before anything was recorded.
    begin: Begin,
    /// What was recorded before the call.
    recorded: Vec<PageRange>,
    /// What is still to be told: the last piece. Not of programs whose readers the call waits for, if they sleep, so
    /// that they can't wait for the call; to them all is recorded before it, and its end may come late.
    announced: Option<(Announced, PageRange)>,
}

impl Hit {
    /// Records the call's beginning; `None` if it hits nothing of that context.
    fn new(context: Arc<Context>, pieces: &[PageRange]) -> Option<Self> {
        let begin = context.engine.begin();
        let mut recorded: Vec<_> = pieces.iter().copied().filter(|p| context.engine.may_hit(*p)).collect();
        let last = if context.is_shims { recorded.pop()? } else { *recorded.first()? };
        // Before what is recorded, so that it is held back as long.
        let announced = context.is_shims.then(|| (watcher::announce(&context), last));
        recorded.iter().for_each(|piece| context.record(*piece));
        Some(Self { context, begin, recorded, announced })
    }
}

impl Drop for Hit {
    /// The call's end.
    fn drop(&mut self) {
        self.recorded.iter().for_each(|piece| watcher::end(&self.context, self.begin, *piece));
        if let Some((announced, piece)) = self.announced {
            watcher::fulfil(&self.context, announced, Some(piece));
        }
    }
}

impl Space {
    /// Where each context stands.
    pub fn begins(&self) -> Begins {
        self.contexts().iter().map(|context| (context.number, context.engine.begin())).collect()
    }

    /// Records a call of task `tid` in every context that isn't spared and has its end told without an event, by
    /// [`Self::tend`]; takes the watch off for it until then if it would fail. `pieces` are what it invalidates, found
    /// out after `begins`. What was registered or read since isn't regarded in them, and may be in use already: then it
    /// is all that the call touches.
    pub fn take_off(
        self: &Arc<Self>,
        tid: u32,
        call: Untold,
        pieces: &[PageRange],
        begins: &Begins,
        spared: &[u64],
        kernel: &KernelTraits,
    ) {
        let range = call.over;
        // Whoever registers something there from here on waits for the call.
        let _order = lock(&self.fault.order);
        let contexts = self.contexts().into_iter().filter(|c| !spared.contains(&c.number));
        let contexts: Vec<_> = contexts.collect();
        let moved = |context: &Arc<Context>| {
            begins.get(&context.number).is_none_or(|begin| !context.engine.unmoved(*begin))
        };
        let all =
            [pieces.iter().fold(range, |all, p| PageRange::new(all.start.min(p.start), all.end.max(p.end)))];
        let pieces = if contexts.iter().any(moved) { &all } else { pieces };
        let armed = match self.arming(kernel).filter(|_| call.fails) {
            Some(arming) => {
                let armed = lock(&self.fault.state).armed.over(range);
                let pieces: Vec<_> = armed.into_iter().filter_map(|r| r.intersection(range)).collect();
                pieces.iter().for_each(|piece| arming.disarm(*piece));
                pieces
            }
            None => Vec::new(),
        };
        let hits = contexts.into_iter().filter_map(|context| Hit::new(context, pieces)).collect();
        let mut state = lock(&self.fault.state);
        state.offs += 1;
        let number = state.offs;
        // Its last such call is over, since it makes another.
        let mut ranges = state.off.remove(&tid).map(|before| before.ranges).unwrap_or_default();
        armed.into_iter().for_each(|piece| ranges.insert(piece));
        let lost = state.lost.over(range).into_iter();
        for piece in lost.filter_map(|r| r.intersection(range)).collect::<Vec<_>>() {
            state.lost.remove(piece);
            ranges.insert(piece);
        }
        state.off.insert(tid, Off { number, ranges, left: false, over: range, fails: call.fails, hits });
    }

    /// Waits, for a bounded time, while a call is on its way that touches `region` and whose end no event tells: who
    /// registers meanwhile would take in memory that is about to go. To be called before the region is registered,
    /// so that it isn't hit by what was before it.
    pub fn await_calls(&self, region: PageRange) {
        let pages = pages_of(region);
        let mut pause = Duration::from_micros(20);
        let start = Instant::now();
        while self.fault.is_on() && self.fault.is_off_at(pages) && start.elapsed() < AWAIT {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
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
                let is_idle = || lock(&space.fault.state).off.is_empty();
                loop {
                    space.put_all_on(&kernel);
                    space.fault.tending.store(false, Ordering::Release);
                    if is_idle() || space.fault.tending.swap(true, Ordering::AcqRel) {
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
            let off = std::mem::take(&mut lock(&self.fault.state).off);
            drop(off);
            self.invalidate_all(Reason::Unreadable);
        }
    }

    /// Waits until all calls have acted that something was taken off for, and arms that.
    fn put_all_on(self: &Arc<Self>, kernel: &KernelTraits) {
        let mut calls: HashMap<(u32, u64), Leaving> = HashMap::new();
        let mut pause = Duration::from_micros(50);
        loop {
            let off: Vec<_> = {
                let state = lock(&self.fault.state);
                state.off.iter().map(|(tid, off)| (*tid, off.number, off.left)).collect()
            };
            if off.is_empty() {
                return;
            }
            calls.retain(|call, _| off.iter().any(|(tid, number, _)| *call == (*tid, *number)));
            for (tid, number, left) in off {
                if left || calls.entry((tid, number)).or_insert_with(|| Leaving::new(tid)).is_over(self.pid) {
                    self.put_on(tid, number, kernel);
                }
            }
            let state = lock(&self.fault.state);
            let rest = |state: &mut State| state.off.values().all(|off| !off.left);
            let _ = self.fault.calls_end.wait_timeout_while(state, pause, rest);
            pause = (pause * 2).min(Duration::from_micros(500));
        }
    }

    /// Arms what was taken off for that call of a task, unless it has made another one.
    fn put_on(self: &Arc<Self>, tid: u32, number: u64, kernel: &KernelTraits) {
        let ranges = || match lock(&self.fault.state).off.get(&tid) {
            Some(off) if off.number == number => Some(off.ranges.all()),
            _ => None,
        };
        let Some(before) = ranges() else { return };
        let hull = before.into_iter().reduce(|a, b| PageRange::new(a.start, b.end));
        let put_on = || {
            let Some(off) = ranges() else { return };
            if let Some(arming) = self.arming(kernel).as_ref() {
                for range in off.into_iter().filter(|range| self.any(|c| c.engine.may_hit(*range))) {
                    // Another call would fail on it, and has it put on in the end.
                    if !lock(&self.fault.state).leave_to_another(tid, range) {
                        arming.arm_or_wait(range);
                    }
                    if self.fault.bypass() {
                        // Nobody watched meanwhile.
                        self.record(&[range], &[]);
                    }
                }
            }
            // Not earlier: who is about to make another such call looks here. And what another call does there is told
            // by an event from here on.
            let off = lock(&self.fault.state).off.remove(&tid);
            drop(off);
        };
        match hull {
            // Between the calls that would fail on it.
            Some(hull) => self.change(hull, put_on),
            None => {
                let _order = lock(&self.fault.order);
                put_on();
            }
        }
    }
}
