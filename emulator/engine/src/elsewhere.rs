//! A context whose calls the opener's threads may not answer themselves for a while, since the supervisor has to
//! see them: it keeps the kernel module's regions, or something armed on them, in step with the arena's.
//!
//! The flags change under the lock. So whoever sets one knows that every earlier call of a client is complete in
//! the arena, and that no later one gets in.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use ummunotify_abi::PageRange;
use ummunotify_abi::arena::SLOTS;
use ummunotify_abi::device::{EVENT_INVAL, Event, FLAG_HINT};

use crate::Engine;
use crate::arena::Arena;
use crate::cookies::Cookies;
use crate::error::Stuck;
use crate::host::Host;
use crate::index::Key;
use crate::lock::{lock, release};
use crate::lookup::Found;
use crate::queue;
use crate::record::{Outcome, everything, hit};
use crate::statistics::Reason;
use crate::word::{State, Word};

/// A live region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Its bounds.
    pub range: PageRange,
    /// Its name.
    pub cookie: u64,
    /// Regions that were registered later have larger numbers.
    pub number: u64,
}

/// Whether one of the flags stands. Under the lock.
pub(crate) fn is_set(arena: &Arena, flags: u32) -> bool {
    arena.header().elsewhere.load(Relaxed) & flags != 0
}

impl Engine {
    /// Sets flags of [`Header::elsewhere`](ummunotify_abi::arena::Header::elsewhere): from the return on, the
    /// opener's threads are turned away from what they name; what they did before is done.
    ///
    /// # Errors
    /// The lock doesn't come free; the flags are as they were.
    pub fn set_elsewhere(&self, host: &impl Host, flags: u32) -> Result<(), Stuck> {
        let arena = self.arena();
        let guard = lock(arena, host)?;
        arena.header().elsewhere.fetch_or(flags, AcqRel);
        release(arena, host, guard);
        Ok(())
    }

    /// Takes flags back: from the return on, nobody is turned away on their account.
    ///
    /// # Errors
    /// As [`Engine::set_elsewhere`].
    pub fn clear_elsewhere(&self, host: &impl Host, flags: u32) -> Result<(), Stuck> {
        let arena = self.arena();
        let guard = lock(arena, host)?;
        arena.header().elsewhere.fetch_and(!flags, AcqRel);
        release(arena, host, guard);
        Ok(())
    }

    /// The flags as they stand now. Who decides by them must hold off who changes them.
    pub fn elsewhere(&self) -> u32 {
        self.arena().header().elsewhere.load(Acquire)
    }

    /// Calls `visit` with each live region, in no particular order, under the lock. In a forged arena these may be
    /// any regions, at most 2^21.
    ///
    /// # Errors
    /// The lock doesn't come free; nothing was visited.
    pub fn visit(&self, host: &impl Host, mut visit: impl FnMut(Region)) -> Result<(), Stuck> {
        let arena = self.arena();
        let guard = lock(arena, host)?;
        for n in 1..arena.header().slots_used.load(Acquire).min(SLOTS) {
            let Some(slot) = arena.slot(n) else { break };
            if Word::load(slot).state() == State::Free {
                continue;
            }
            let range = PageRange::new(slot.start.load(Acquire), slot.end.load(Acquire));
            visit(Region { range, cookie: slot.cookie.load(Acquire), number: slot.seq.load(Acquire) });
        }
        release(arena, host, guard);
        Ok(())
    }

    /// Queues the regions of INVAL records that somebody else reports, in their order: as hits by the ranges of
    /// their hints, or by the whole region. Rule 3 holds across both: what is queued already loses its hint. The
    /// counter doesn't move, for whoever reports has counted. Unknown cookies are passed over.
    ///
    /// # Errors
    /// The lock doesn't come free; nothing was queued.
    pub fn requeue(&self, host: &impl Host, records: &[Event]) -> Result<(), Stuck> {
        let arena = self.arena();
        let guard = lock(arena, host)?;
        let mut compacted = false;
        for record in records.iter().filter(|record| record.kind == EVENT_INVAL) {
            if let Err(reason) = requeue_one(arena, record, &mut compacted) {
                everything(arena, reason);
                break;
            }
        }
        release(arena, host, guard);
        Ok(())
    }

    /// Asks the opener's threads for the real device, under a number that isn't 0.
    pub fn ask_for_device(&self, number: u32) {
        self.arena().header().request.store(number, Release);
    }

    /// Withdraws that.
    pub fn withdraw_request(&self) {
        self.arena().header().request.store(0, Release);
    }

    /// True if [`Engine::take_request`] may find one.
    #[inline]
    pub fn is_requested(&self) -> bool {
        self.arena().header().request.load(Relaxed) != 0
    }

    /// The number of a request that nobody else has taken; one load where there is none.
    #[inline]
    pub fn take_request(&self) -> Option<u32> {
        let request = &self.arena().header().request;
        if request.load(Relaxed) == 0 {
            return None;
        }
        Some(request.swap(0, AcqRel)).filter(|&number| number != 0)
    }
}

fn requeue_one(arena: &Arena, record: &Event, compacted: &mut bool) -> Result<(), Reason> {
    let place = Cookies::new(arena).find(record.cookie_counter).map_err(|_| Reason::Corrupt)?;
    let Some(place) = place else { return Ok(()) };
    let slot = arena.slot(place.slot).ok_or(Reason::Corrupt)?;
    let key = Key { start: slot.start.load(Acquire), seq: slot.seq.load(Acquire) };
    let found = Found { slot: place.slot, key };
    let hinted = record.flags & FLAG_HINT != 0;
    let range = hinted.then(|| PageRange::new(record.hint_start, record.hint_end));
    let mut outcome = hit(arena, &found, range);
    if outcome == Outcome::Failed(Reason::QueueFull) && !core::mem::replace(compacted, true) {
        // Once: it costs as much as the ring is long.
        if queue::compact(arena) {
            outcome = hit(arena, &found, range);
        }
    }
    match outcome {
        Outcome::Queued | Outcome::Gone => Ok(()),
        Outcome::Failed(reason) => Err(reason),
    }
}
