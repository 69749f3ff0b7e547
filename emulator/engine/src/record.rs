//! Recording invalidations: without the lock, for any number of threads in several processes, in bounded time.
//!
//! The order is what makes it sound. A recorder first queues all hits, each with a ring entry before the state
//! that says so, and then adds to the counter. A reader loads the counter, then looks for "everything" and at
//! the rings, and only what it found empty *afterwards* lets it answer LAST with that value. So what LAST
//! counts was delivered before.

use core::sync::atomic::Ordering::{AcqRel, Acquire, SeqCst};
use ummunotify_abi::PageRange;
use ummunotify_abi::arena::SLOTS;

use crate::arena::Arena;
use crate::hook::step;
use crate::host::Host;
use crate::index::Key;
use crate::lookup::{Chunk, Found, Unknown, collect, exists, misses};
use crate::queue;
use crate::statistics::{Count, Reason, count, count_everything};
use crate::word::{self, State, Word, write_hint};

/// Turns of the loop around one region's state, which moves by others' hits (three times a queueing) and reads.
const TRIES: usize = 64;
/// How often a reader waits, some 10 ms each time, for any announced invalidation to be told.
const ANNOUNCED_WAITS: usize = 100;
/// How often it waits when some are told and others announced meanwhile.
const ANNOUNCED_TURNS: usize = 64;
/// The part of [`Header::announced`](ummunotify_abi::arena::Header) that counts those that aren't told yet.
const OUTSTANDING: u32 = 0xffff;
/// The part that moves with each that is told.
const TOLD: u32 = 0xff_0000;
/// One reader has given up: those that were announced before don't count any more.
const ROUND: u32 = 1 << 24;
/// Regions in the first look: most invalidations hit few, and the array costs.
const FEW: usize = 8;
/// Regions in each further look.
const MANY: usize = 64;

/// What became of an invalidation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recorded {
    /// It hit no region; the counter didn't move.
    Missed,
    /// It hit at least one region; all are queued and the counter has moved.
    Hit,
    /// It couldn't be recorded exactly: every region counts as invalid and the counter has moved.
    Everything,
}

/// Taken before an operation's own invalidation is recorded; see [`Engine::end`](crate::Engine::end).
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Begin {
    pub(crate) epoch: u64,
}

impl Begin {
    /// Before everything: an operation that ends with it hits all regions. So ends one in a context that was opened
    /// after it had begun.
    pub const EVER: Self = Self { epoch: 0 };
}

/// An invalidation that was announced; see [`Engine::announce`](crate::Engine::announce).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Announced {
    pub(crate) begin: Begin,
    /// Of the word in which it is counted; `None` if it isn't.
    round: Option<u32>,
}

/// What became of one region's hit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// A ring entry stands for it, or a read that is being delivered will make one.
    Queued,
    /// The region was unregistered.
    Gone,
    /// It wasn't recorded.
    Failed(Reason),
}

/// Hits one region. Without a range (under the lock, when everything is invalid) no hint is left.
pub(crate) fn hit(arena: &Arena, found: &Found, range: Option<PageRange>) -> Outcome {
    let Some(slot) = arena.slot(found.slot) else { return Outcome::Failed(Reason::Corrupt) };
    for _ in 0..TRIES {
        let word = Word::load(slot);
        // A registration's number is there before the word that makes it live, and goes after it: if it is the
        // one that was found, the compare-and-swap below can't succeed in another registration.
        if word.state() == State::Free || slot.seq.load(Acquire) != found.key.seq {
            return Outcome::Gone;
        }
        step();
        match word.state() {
            State::Plain | State::Again => return Outcome::Queued,
            State::Hinted => {
                if word.swap(slot, word.with(State::Plain)) {
                    return Outcome::Queued;
                }
            }
            State::Reading => {
                if word.swap(slot, word.with(State::Again)) {
                    return Outcome::Queued;
                }
            }
            State::Idle => {
                let claimed = word.next(State::Writing);
                if !word.swap(slot, claimed) {
                    continue;
                }
                step();
                let region = PageRange::new(slot.start.load(Acquire), slot.end.load(Acquire));
                let hinted = range.is_some_and(|range| write_hint(slot, region, range, claimed.stamp()));
                step();
                if !queue::push(arena, found.slot, claimed.stamp()) {
                    claimed.swap(slot, claimed.with(State::Idle));
                    return Outcome::Failed(Reason::QueueFull);
                }
                step();
                // If it fails, another hit has made it Plain, or a read has taken the entry meanwhile and
                // reports the whole region: both cover this hit.
                claimed.swap(slot, claimed.with(if hinted { State::Hinted } else { State::Plain }));
                return Outcome::Queued;
            }
            State::Writing => {
                // Its writer may be stopped or dead before its ring entry: make one, double entries don't harm.
                if !queue::push(arena, found.slot, word.stamp()) {
                    return Outcome::Failed(Reason::QueueFull);
                }
                step();
                if word.swap(slot, word.with(State::Plain)) {
                    return Outcome::Queued;
                }
            }
            State::Free | State::Invalid => return Outcome::Failed(Reason::Corrupt),
        }
    }
    Outcome::Failed(Reason::SlotBusy)
}

/// Makes every region invalid. The flag comes first: a reader that sees the new counter sees it too.
pub(crate) fn everything(arena: &Arena, reason: Reason) -> Recorded {
    count_everything(arena, reason);
    arena.header().everything.store(1, SeqCst);
    step();
    arena.counter().fetch_add(1, SeqCst);
    Recorded::Everything
}

/// When an invalidation is recorded, as seen from the operation that causes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum When {
    /// Before it.
    Before,
    /// After it: only regions that were registered or dequeued after this epoch are hit.
    After(u64),
    /// The counter has moved for it before its range was known, at this epoch. It moves again only for a region
    /// that was registered or dequeued since.
    Announced(u64),
}

/// One invalidation: hits the regions that `range` overlaps.
#[inline]
pub(crate) fn sweep(arena: &Arena, range: PageRange, when: When) -> Recorded {
    if misses(arena, range) {
        missed(arena, when);
        return Recorded::Missed;
    }
    sweep_near(arena, range, when)
}

#[inline]
fn missed(arena: &Arena, when: When) {
    if !matches!(when, When::After(_)) {
        count(arena, Count::Misses, 1);
    }
}

fn sweep_near(arena: &Arena, range: PageRange, when: When) -> Recorded {
    let mut few = Chunk::<FEW>::new();
    match find(arena, range, None, &mut few) {
        Ok(()) => sweep_found(arena, range, when, &few, |pass| pass.rest(few.last())),
        Err(reason) => everything(arena, reason),
    }
}

/// See [`Engine::record_known`](crate::Engine::record_known).
pub(crate) fn sweep_known(arena: &Arena, range: PageRange) -> Option<Recorded> {
    let mut few = Chunk::<FEW>::new();
    collect(arena, Some(range), None, &mut few).ok()?;
    if few.more || !few.found().iter().any(|found| is_mapped(arena, found)) {
        return None;
    }
    Some(sweep_found(arena, range, When::Before, &few, |_| Ok(())))
}

/// The same once the first regions are found; `rest` is for the others, if there may be more.
#[inline]
fn sweep_found(
    arena: &Arena,
    range: PageRange,
    when: When,
    few: &Chunk<FEW>,
    rest: impl FnOnce(&mut Pass<'_>) -> Result<(), Reason>,
) -> Recorded {
    // While everything is invalid, all regions stand queued without hint, but for their ring entries: whoever
    // holds the lock makes these before it adds a region or reads. Nothing to add to that but the counter.
    let covered = arena.header().everything.load(Acquire) != 0;
    let mut pass = Pass { arena, range, when, covered, hit: false, newer: false };
    let recorded = pass.take(few).and_then(|()| if few.more { rest(&mut pass) } else { Ok(()) });
    if let Err(reason) = recorded {
        return everything(arena, reason);
    }
    step();
    if !pass.hit {
        missed(arena, when);
        return Recorded::Missed;
    }
    if pass.newer || !matches!(when, When::Announced(_)) {
        arena.counter().fetch_add(1, AcqRel);
    }
    count(arena, Count::Hits, 1);
    if matches!(when, When::After(_)) {
        count(arena, Count::AfterHits, 1);
    }
    Recorded::Hit
}

/// Finds regions to hit, behind `after`.
fn find<const N: usize>(
    arena: &Arena,
    range: PageRange,
    after: Option<Key>,
    chunk: &mut Chunk<N>,
) -> Result<(), Reason> {
    collect(arena, Some(range), after, chunk).map_err(|unknown| match unknown {
        Unknown::Busy => Reason::IndexBusy,
        Unknown::Corrupt => Reason::Corrupt,
    })
}

struct Pass<'a> {
    arena: &'a Arena,
    range: PageRange,
    when: When,
    covered: bool,
    hit: bool,
    /// A region was hit that is newer than the epoch of `when`.
    newer: bool,
}

impl Pass<'_> {
    /// Hits what was found.
    fn take<const N: usize>(&mut self, chunk: &Chunk<N>) -> Result<(), Reason> {
        for found in chunk.found() {
            let newer = match self.when {
                When::Before => false,
                When::After(epoch) | When::Announced(epoch) => {
                    let slot = self.arena.slot(found.slot).ok_or(Reason::Corrupt)?;
                    slot.epoch.load(Acquire) > epoch
                }
            };
            if matches!(self.when, When::After(_)) && !newer {
                continue;
            }
            if self.covered {
                (self.hit, self.newer) = (true, self.newer || newer);
                continue;
            }
            match hit(self.arena, found, Some(self.range)) {
                Outcome::Queued => (self.hit, self.newer) = (true, self.newer || newer),
                Outcome::Gone => {}
                Outcome::Failed(reason) => return Err(reason),
            }
        }
        Ok(())
    }

    /// Many hits. Each look starts behind the last, so their number is bounded by that of the slots.
    #[cold]
    fn rest(&mut self, mut after: Option<Key>) -> Result<(), Reason> {
        let mut chunk = Chunk::<MANY>::new();
        for _ in 0..=SLOTS as usize / MANY {
            find(self.arena, self.range, after, &mut chunk)?;
            self.take(&chunk)?;
            if !chunk.more {
                return Ok(());
            }
            after = chunk.last();
        }
        Err(Reason::Corrupt)
    }
}

/// See [`Engine::announce`](crate::Engine::announce).
pub(crate) fn announce(arena: &Arena) -> Announced {
    let header = arena.header();
    // Before the counter: who registers after this load and before the addition gets one more.
    let begin = Begin { epoch: header.epoch.load(SeqCst) };
    let more = |n: u32| (n & OUTSTANDING != OUTSTANDING).then(|| n + 1);
    let round = header.announced.fetch_update(SeqCst, SeqCst, more).ok().map(|n| n / ROUND);
    if round.is_none() {
        // More than tasks can be in a call at once: forged.
        everything(arena, Reason::Corrupt);
    }
    step();
    arena.counter().fetch_add(1, SeqCst);
    count(arena, Count::Announced, 1);
    Announced { begin, round }
}

/// See [`Engine::fulfil`](crate::Engine::fulfil).
pub(crate) fn fulfil(arena: &Arena, host: &impl Host, told: Announced, range: Option<PageRange>) -> Recorded {
    let announced = &arena.header().announced;
    let counts = |n: u32| told.round == Some(n / ROUND);
    // If a reader gives up from here on, everything was invalid after the operation. If one has before, it may have been
    // so before the operation changed anything: then this is an invalidation as any other.
    let when = if counts(announced.load(SeqCst)) { When::Announced(told.begin.epoch) } else { When::Before };
    let recorded = range.map_or(Recorded::Missed, |range| sweep(arena, range, when));
    if recorded == Recorded::Missed {
        count(arena, Count::Vain, 1);
    }
    step();
    let less = |n: u32| {
        let told = n.wrapping_add(OUTSTANDING + 1) & TOLD;
        (n & !(TOLD | OUTSTANDING)) | told | ((n & OUTSTANDING) - 1)
    };
    let _ = announced.fetch_update(SeqCst, SeqCst, |n| (counts(n) && n & OUTSTANDING > 0).then(|| less(n)));
    host.wake(announced);
    recorded
}

/// Announced invalidations that aren't told yet.
pub(crate) fn outstanding(arena: &Arena) -> u32 {
    arena.header().announced.load(SeqCst) & OUTSTANDING
}

/// Waits, for a bounded time, until nothing is announced any more; false if there always was something, though not
/// the same.
pub(crate) fn await_announced(arena: &Arena, host: &impl Host) -> bool {
    let announced = &arena.header().announced;
    let (mut waits, mut turns) = (0, 0);
    loop {
        let seen = announced.load(SeqCst);
        if seen & OUTSTANDING == 0 {
            return true;
        }
        if waits >= ANNOUNCED_WAITS {
            // Whoever announced it is dead or stopped. From here on it counts as everything.
            everything(arena, Reason::Unfulfilled);
            host.invalidated();
            let round = (seen & !(TOLD | OUTSTANDING)).wrapping_add(ROUND);
            if announced.compare_exchange(seen, round, SeqCst, SeqCst).is_ok() {
                return true;
            }
        } else {
            host.wait(announced, seen);
        }
        if announced.load(SeqCst) == seen {
            waits += 1;
        } else {
            (waits, turns) = (0, turns + 1);
            if turns == ANNOUNCED_TURNS {
                return false;
            }
        }
    }
}

/// True if `range` may hit a region: exact but while the index changes.
#[inline]
pub(crate) fn may_hit(arena: &Arena, range: PageRange) -> bool {
    if misses(arena, range) {
        return false;
    }
    exists(arena, range).unwrap_or(true)
}

/// See [`Engine::is_known_mapped`](crate::Engine::is_known_mapped).
pub(crate) fn is_known_mapped(arena: &Arena, range: PageRange) -> bool {
    let mut chunk = Chunk::<FEW>::new();
    collect(arena, Some(range), None, &mut chunk).is_ok()
        && chunk.found().iter().any(|found| is_mapped(arena, found))
}

/// Whether a region is known to be mapped.
fn is_mapped(arena: &Arena, found: &Found) -> bool {
    arena.slot(found.slot).is_some_and(|slot| {
        let word = Word::load(slot);
        // As in `hit`: then the word is that of the registration that was found.
        slot.seq.load(Acquire) == found.key.seq && word::is_known_mapped(slot, word)
    })
}

/// The same of regions alone that were registered before `begin`.
pub(crate) fn may_have_hit(arena: &Arena, begin: Begin, range: PageRange) -> bool {
    let mut chunk = Chunk::<FEW>::new();
    let mut after = None;
    for _ in 0..=SLOTS as usize / FEW {
        if collect(arena, Some(range), after, &mut chunk).is_err() {
            return true;
        }
        if chunk.found().iter().any(|found| found.key.seq <= begin.epoch) {
            return true;
        }
        if !chunk.more {
            return false;
        }
        after = chunk.last();
    }
    true
}

/// Gives every region its ring entry after "everything is invalid". Under the lock; false if some didn't get
/// one, and then the flag stands again.
pub(crate) fn settle_everything(arena: &Arena) -> bool {
    let header = arena.header();
    // First the flag: one that is raised meanwhile must stay.
    header.everything.swap(0, SeqCst);
    step();
    let mut settling = Settling { arena, compacted: false };
    let complete = settling.by_index().unwrap_or_else(|| settling.by_slots());
    if !complete {
        header.everything.store(1, SeqCst);
    }
    complete
}

struct Settling<'a> {
    arena: &'a Arena,
    compacted: bool,
}

impl Settling<'_> {
    /// Queues one region; false if there is no room, which no later one would find either.
    fn queue(&mut self, found: &Found) -> bool {
        let mut outcome = hit(self.arena, found, None);
        if outcome == Outcome::Failed(Reason::QueueFull) && !self.compacted {
            // Once: it costs as much as the ring is long.
            self.compacted = true;
            if queue::compact(self.arena) {
                outcome = hit(self.arena, found, None);
            }
        }
        step();
        !matches!(outcome, Outcome::Failed(_))
    }

    /// All regions in the index's order; `None` if the index is of no use.
    fn by_index(&mut self) -> Option<bool> {
        let mut chunk = Chunk::<MANY>::new();
        let mut after = None;
        for _ in 0..=SLOTS as usize / MANY {
            collect(self.arena, None, after, &mut chunk).ok()?;
            if !chunk.found().iter().all(|found| self.queue(found)) {
                return Some(false);
            }
            if !chunk.more {
                return Some(true);
            }
            after = chunk.last();
        }
        None
    }

    /// All regions, the slots as they come.
    fn by_slots(&mut self) -> bool {
        for n in 1..self.arena.header().slots_used.load(Acquire).min(SLOTS) {
            let Some(slot) = self.arena.slot(n) else { break };
            let key = Key { start: slot.start.load(Acquire), seq: slot.seq.load(Acquire) };
            if !self.queue(&Found { slot: n, key }) {
                return false;
            }
        }
        true
    }
}
