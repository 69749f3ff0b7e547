//! Registering and unregistering, under the lock.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::fence;
use ummunotify_abi::PageRange;
use ummunotify_abi::arena::{ELSEWHERE_FAULT, ELSEWHERE_KMOD, MAX_REGIONS, SLOTS};

use crate::arena::Arena;
use crate::cookies::{self, Cookies};
use crate::elsewhere;
use crate::error::{RegisterError, UnregisterError};
use crate::hook::step;
use crate::host::Host;
use crate::index::{Entry, Index, IndexError, Key};
use crate::inline::looked_in_vain;
use crate::lock::{Guard, lock, release};
use crate::queue;
use crate::record::{everything, settle_everything};
use crate::repair::repair;
use crate::statistics::{Count, Reason, count};
use crate::word::{State, Word, is_known_mapped, note_mapped};

/// Why a change of the registry failed.
enum Fault {
    /// An ordinary refusal.
    Refused(RegisterError),
    /// No region of that cookie.
    Unknown,
    /// The caller is a client's thread, and it isn't for it to do.
    Elsewhere,
    /// The arena contradicts itself.
    Corrupt,
    /// The lock was taken over.
    Lost,
}

impl From<IndexError> for Fault {
    fn from(error: IndexError) -> Self {
        match error {
            IndexError::Full => Self::Refused(RegisterError::NoMemory),
            IndexError::Corrupt => Self::Corrupt,
        }
    }
}

impl From<cookies::Corrupt> for Fault {
    fn from(_: cookies::Corrupt) -> Self {
        Self::Corrupt
    }
}

/// Runs `change` while `sequence` is odd.
fn change_index(
    arena: &Arena,
    change: impl FnOnce(&Index<'_>) -> Result<(), IndexError>,
) -> Result<(), IndexError> {
    let sequence = &arena.header().sequence;
    let odd = sequence.load(Relaxed) | 1;
    sequence.store(odd, Relaxed);
    fence(Release);
    step();
    let result = change(&Index::current(arena));
    step();
    // It fails if a repair has begun since: that one's number must stand.
    let _ = sequence.compare_exchange(odd, odd.wrapping_add(1), AcqRel, Relaxed);
    result
}

/// Runs `attempt` under the lock; again after a repair if the arena contradicts itself or the lock was lost.
/// `None` if that doesn't help.
fn locked<T>(
    arena: &Arena,
    host: &impl Host,
    mut attempt: impl FnMut(&Guard, bool) -> Result<T, Fault>,
) -> Option<Result<T, Fault>> {
    let mut again = false;
    for _ in 0..3 {
        let mut guard = lock(arena, host).ok()?;
        let mut result = attempt(&guard, again);
        if matches!(result, Err(Fault::Corrupt)) && !guard.holds(arena) {
            result = Err(Fault::Lost);
        }
        if matches!(result, Err(Fault::Corrupt)) {
            repair(arena, false, Reason::Corrupt);
            guard.raised = true;
            result = attempt(&guard, true);
        }
        release(arena, host, guard);
        match result {
            Err(Fault::Lost) => again = true,
            Err(Fault::Corrupt) => return None,
            other => return Some(other),
        }
    }
    None
}

/// Turns a client's thread away where the supervisor has to see what is registered.
fn refuse_elsewhere(arena: &Arena, host: &impl Host) -> Result<(), Fault> {
    let turned_away = ELSEWHERE_KMOD | ELSEWHERE_FAULT;
    if host.is_client() && elsewhere::is_set(arena, turned_away) { Err(Fault::Elsewhere) } else { Ok(()) }
}

/// See [`Engine::register`](crate::Engine::register).
pub(crate) fn register(
    arena: &Arena,
    host: &impl Host,
    region: PageRange,
    cookie: u64,
    mapped: bool,
) -> Result<(), RegisterError> {
    arena.header().used.store(1, Relaxed);
    let done = locked(arena, host, |guard, again| {
        let header = arena.header();
        refuse_elsewhere(arena, host)?;
        let cookies = Cookies::new(arena);
        if let Some(place) = cookies.find(cookie)? {
            let slot = arena.slot(place.slot).ok_or(Fault::Corrupt)?;
            let same = slot.start.load(Relaxed) == region.start && slot.end.load(Relaxed) == region.end;
            // A repair after the first attempt found its slot live.
            return if again && same { Ok(()) } else { Err(Fault::Refused(RegisterError::CookieInUse)) };
        }
        let live = header.regions.load(Relaxed);
        if live >= MAX_REGIONS {
            return Err(Fault::Refused(RegisterError::NoMemory));
        }
        // What was invalid before the region was there must not report it.
        if header.everything.load(Acquire) != 0 {
            settle_everything(arena);
        }
        let number = take_slot(arena)?.ok_or(Fault::Refused(RegisterError::NoMemory))?;
        let slot = arena.slot(number).ok_or(Fault::Corrupt)?;
        queue::grow(arena, live + 1);
        let epoch = header.epoch.load(Relaxed).wrapping_add(1);
        step();
        if !guard.holds(arena) {
            return Err(Fault::Lost);
        }
        slot.start.store(region.start, Relaxed);
        slot.end.store(region.end, Relaxed);
        slot.cookie.store(cookie, Relaxed);
        slot.epoch.store(epoch, Relaxed);
        slot.seq.store(epoch, Relaxed);
        step();
        let word = Word::load(slot);
        note_mapped(slot, word.next(State::Idle), mapped);
        if word.state() != State::Free || !word.swap(slot, word.next(State::Idle)) {
            return Err(Fault::Corrupt);
        }
        step();
        cookies.insert(cookie, number, live)?;
        step();
        if !guard.holds(arena) {
            return Err(Fault::Lost);
        }
        let entry = Entry { key: Key { start: region.start, seq: epoch }, end: region.end, id: number };
        if let Err(error) = change_index(arena, |index| index.insert(entry)) {
            if error == IndexError::Full {
                undo(arena, cookie, number)?;
            }
            return Err(error.into());
        }
        // Last: an operation that began with the old value may have missed the region, one that begins with the
        // new finds it.
        header.epoch.store(epoch, Release);
        header.regions.store(live + 1, Relaxed);
        header.in_hand.store(0, Relaxed);
        count(arena, Count::Registered, 1);
        Ok(())
    });
    match done {
        Some(Ok(())) => Ok(()),
        Some(Err(Fault::Refused(error))) => Err(error),
        Some(Err(Fault::Elsewhere)) => Err(RegisterError::Elsewhere),
        _ => Err(RegisterError::Broken),
    }
}

/// Takes a free slot in hand.
fn take_slot(arena: &Arena) -> Result<Option<u32>, Fault> {
    let header = arena.header();
    let free = header.slots_free.load(Relaxed);
    let number = if free != 0 { free } else { header.slots_used.load(Relaxed) };
    if number >= SLOTS {
        return Ok(None);
    }
    let slot = arena.slot(number).ok_or(Fault::Corrupt)?;
    if Word::load(slot).state() != State::Free {
        return Err(Fault::Corrupt);
    }
    header.in_hand.store(number, Relaxed);
    step();
    if free != 0 {
        header.slots_free.store((slot.start.load(Relaxed) % u64::from(SLOTS)) as u32, Relaxed);
    } else {
        header.slots_used.store(number + 1, Release);
    }
    Ok(Some(number))
}

/// Gives a free slot back.
fn give_slot(arena: &Arena, number: u32) {
    let header = arena.header();
    if let Some(slot) = arena.slot(number) {
        slot.seq.store(0, Relaxed);
        slot.start.store(u64::from(header.slots_free.load(Relaxed)), Relaxed);
        header.slots_free.store(number, Relaxed);
    }
    header.in_hand.store(0, Relaxed);
}

/// Makes a slot free; true if it was queued. Recorders may move the word meanwhile.
fn retire(arena: &Arena, number: u32) -> Result<bool, Fault> {
    let slot = arena.slot(number).ok_or(Fault::Corrupt)?;
    for _ in 0..1024 {
        let word = Word::load(slot);
        if word.swap(slot, word.next(State::Free)) {
            return Ok(word.is_queued());
        }
    }
    Err(Fault::Corrupt)
}

/// Takes a region back that the index has no room for.
fn undo(arena: &Arena, cookie: u64, number: u32) -> Result<(), Fault> {
    let cookies = Cookies::new(arena);
    if let Some(place) = cookies.find(cookie)? {
        cookies.remove(place)?;
    }
    retire(arena, number)?;
    give_slot(arena, number);
    Ok(())
}

/// See [`Engine::unregister`](crate::Engine::unregister).
pub(crate) fn unregister(arena: &Arena, host: &impl Host, cookie: u64) -> Result<PageRange, UnregisterError> {
    let mut region = PageRange::new(0, 0);
    let done = locked(arena, host, |guard, again| {
        let header = arena.header();
        refuse_elsewhere(arena, host)?;
        let cookies = Cookies::new(arena);
        let Some(place) = cookies.find(cookie)? else {
            // A repair after the first attempt found its slot free.
            return if again { Ok(()) } else { Err(Fault::Unknown) };
        };
        let slot = arena.slot(place.slot).ok_or(Fault::Corrupt)?;
        region = PageRange::new(slot.start.load(Relaxed), slot.end.load(Relaxed));
        let key = Key { start: region.start, seq: slot.seq.load(Relaxed) };
        header.in_hand.store(place.slot, Relaxed);
        step();
        if !guard.holds(arena) {
            return Err(Fault::Lost);
        }
        if is_known_mapped(slot, Word::load(slot)) {
            looked_in_vain(header);
        }
        // From here nothing is reported of it: its ring entry, if it has one, is stale.
        let queued = retire(arena, place.slot)?;
        step();
        if !guard.holds(arena) {
            return Err(Fault::Lost);
        }
        cookies.remove(place)?;
        step();
        if !guard.holds(arena) {
            return Err(Fault::Lost);
        }
        change_index(arena, |index| index.remove(key, place.slot))?;
        step();
        if !guard.holds(arena) {
            return Err(Fault::Lost);
        }
        give_slot(arena, place.slot);
        let live = header.regions.load(Relaxed).saturating_sub(1);
        header.regions.store(live, Relaxed);
        let stale = header.stale.load(Relaxed).saturating_add(u32::from(queued));
        header.stale.store(stale, Relaxed);
        if queue::is_crowded(stale, live) && !queue::compact(arena) {
            everything(arena, Reason::QueueFull);
        }
        count(arena, Count::Unregistered, 1);
        Ok(())
    });
    match done {
        Some(Ok(())) => Ok(region),
        Some(Err(Fault::Unknown)) => Err(UnregisterError::UnknownCookie),
        Some(Err(Fault::Elsewhere)) => Err(UnregisterError::Elsewhere),
        _ => Err(UnregisterError::Broken),
    }
}
