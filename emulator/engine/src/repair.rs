//! Making the arena whole again from its slots, the only part that is never half-written: a slot's fields come
//! before the word that makes it live. Under the lock.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::fence;
use ummunotify_abi::arena::{SLOTS, Slot};

use crate::arena::Arena;
use crate::cookies::Cookies;
use crate::hook::step;
use crate::index::{Entry, Index, Key};
use crate::queue;
use crate::record::everything;
use crate::statistics::Reason;
use crate::word::{State, Word};

/// Makes the word of a live slot Idle with a new stamp: ring entries and recorders of the old one fail.
pub(crate) fn reset(slot: &Slot) {
    for _ in 0..1024 {
        let word = Word::load(slot);
        if word.swap(slot, word.next(State::Idle)) {
            return;
        }
    }
    // Recorders change a word a few times a queueing: this is somebody's malice, and the store ends it.
    slot.word.store(Word::load(slot).next(State::Idle).0, Release);
}

/// [`reset`] for every region that is queued.
pub(crate) fn reset_queued(arena: &Arena) {
    for n in 1..arena.header().slots_used.load(Relaxed).min(SLOTS) {
        let Some(slot) = arena.slot(n) else { break };
        if Word::load(slot).is_queued() {
            reset(slot);
        }
    }
}

/// Makes index, cookie tables and free list anew and everything invalid. With `spare`, the slot that was in
/// hand isn't used again if it is free: its writer may be this very thread, interrupted, and go on.
pub(crate) fn repair(arena: &Arena, spare: bool, reason: Reason) {
    let header = arena.header();
    // An odd number of its own: if the writer that left the index half-changed goes on, it can't close it.
    let odd = (header.sequence.load(Relaxed) | 1).wrapping_add(2);
    header.sequence.store(odd, Relaxed);
    fence(Release);
    step();

    let spared = if spare { header.in_hand.load(Relaxed) } else { 0 };
    let bank = header.bank.load(Relaxed) & 1 ^ 1;
    let index = Index::of(arena, bank);
    let cookies = Cookies::new(arena);
    index.clear();
    cookies.clear();
    let (mut free, mut regions, mut epoch, mut whole) = (0, 0, header.epoch.load(Relaxed), true);
    for n in 1..header.slots_used.load(Relaxed).min(SLOTS) {
        let Some(slot) = arena.slot(n) else { break };
        step();
        if Word::load(slot).state() == State::Free {
            if n != spared {
                slot.seq.store(0, Relaxed);
                slot.start.store(free, Relaxed);
                free = u64::from(n);
            }
            continue;
        }
        reset(slot);
        let key = Key { start: slot.start.load(Relaxed), seq: slot.seq.load(Relaxed) };
        epoch = epoch.max(key.seq).max(slot.epoch.load(Relaxed));
        whole &= index.insert(Entry { key, end: slot.end.load(Relaxed), id: n }).is_ok();
        whole &= cookies.insert(slot.cookie.load(Acquire), n, regions).is_ok();
        regions += 1;
    }
    if !whole {
        // A forged arena, or one that is full to the last node: recorders must not trust the index.
        index.mark_broken();
    }
    header.slots_free.store(free as u32, Relaxed);
    header.regions.store(regions, Relaxed);
    header.epoch.store(epoch.wrapping_add(1), Release);
    header.in_hand.store(0, Relaxed);
    header.bank.store(bank, Relaxed);
    step();
    // It fails if another repair has begun since.
    let _ = header.sequence.compare_exchange(odd, odd.wrapping_add(1), AcqRel, Relaxed);
    step();
    queue::grow(arena, regions);
    // All entries are stale now.
    queue::compact(arena);
    everything(arena, reason);
}
