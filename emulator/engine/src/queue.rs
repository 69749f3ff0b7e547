//! The FIFO of queued regions: a ring of cells for each size, of which recorders append to the present one.
//!
//! A ticket is a place in a ring: nobody but its taker fills that cell, by a compare-and-swap from "empty in
//! this round" that fails once a reader has skipped the place. So a recorder that stops between ticket and
//! cell holds nobody up, and one that goes on much later finds out. A ring grows with the number of
//! regions (under the lock, by moving on to the next size): live entries are at most one a region, and the
//! stale entries of regions that are no more are dropped before they fill what is left. What several
//! recorders add to that at once (double entries, skipped places) may fill a ring; then everything is invalid.
//!
//! Readers empty the smaller rings first, for sizes only go up.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use ummunotify_abi::arena::{RING_LEVELS, RING_MIN_LOG, SLOTS};

use crate::arena::Arena;
use crate::hook::step;
use crate::repair;
use crate::word::Word;

/// Tickets that a recorder takes before it gives up: each but the last was skipped by a reader.
const TICKETS: usize = 8;
const FILLED: u64 = 1 << 63;
const SLOT_BITS: u32 = SLOTS.trailing_zeros();
const STAMP_MASK: u64 = (1 << (63 - SLOT_BITS)) - 1;

/// A filled cell: slot and stamp. An empty one holds the round that it is empty in.
fn filled(slot: u32, stamp: u64) -> u64 {
    FILLED | (stamp & STAMP_MASK) << SLOT_BITS | u64::from(slot % SLOTS)
}

fn capacity(level: usize) -> u64 {
    1 << (RING_MIN_LOG as usize + level)
}

/// The round that a place belongs to.
fn round(level: usize, place: u64) -> u64 {
    place >> (RING_MIN_LOG as usize + level) & !FILLED
}

/// The round after.
fn next_round(level: usize, place: u64) -> u64 {
    round(level, place).wrapping_add(1) & !FILLED
}

fn cell(arena: &Arena, level: usize, place: u64) -> Option<&AtomicU64> {
    let capacity = capacity(level);
    arena.cell((capacity + (place & (capacity - 1))) as usize)
}

fn level(arena: &Arena) -> usize {
    (arena.header().level.load(Acquire) as usize).min(RING_LEVELS - 1)
}

/// Tickets of a ring that weren't consumed; none if head and tail make no sense.
fn pending(arena: &Arena, level: usize) -> u64 {
    let header = arena.header();
    let n = header.tails[level % 16].load(Acquire).wrapping_sub(header.heads[level % 16].load(Acquire));
    if n >> 63 == 0 { n } else { 0 }
}

/// Appends an entry; false if there is no room.
pub(crate) fn push(arena: &Arena, slot: u32, stamp: u64) -> bool {
    for _ in 0..TICKETS {
        let level = level(arena);
        if pending(arena, level) >= capacity(level) {
            return false;
        }
        let place = arena.header().tails[level % 16].fetch_add(1, AcqRel);
        step();
        let Some(cell) = cell(arena, level, place) else { return false };
        if cell.compare_exchange(round(level, place), filled(slot, stamp), AcqRel, Relaxed).is_ok() {
            return true;
        }
    }
    false
}

/// True if any ring has tickets that weren't consumed.
pub(crate) fn is_pending(arena: &Arena) -> bool {
    (0..=level(arena)).any(|level| pending(arena, level) != 0)
}

/// How many tickets of all rings weren't consumed.
pub(crate) fn length(arena: &Arena) -> u64 {
    (0..=level(arena)).fold(0, |sum, level| sum.saturating_add(pending(arena, level)))
}

/// Makes sure that the present ring suits so many regions: room for one entry each, half as many stale ones,
/// and 512 more.
pub(crate) fn grow(arena: &Arena, regions: u32) {
    let now = level(arena);
    let mut wanted = now;
    while capacity(wanted) < 2 * u64::from(regions) + 512 && wanted + 1 < RING_LEVELS {
        wanted += 1;
    }
    if wanted != now {
        arena.header().level.store(wanted as u32, Release);
    }
}

/// True once stale entries are worth dropping, at the latest when [`grow`] counts on it.
pub(crate) fn is_crowded(stale: u32, regions: u32) -> bool {
    stale > regions / 2 + 128
}

/// What stands at a place.
enum Cell {
    Live { slot: u32, word: Word },
    Stale,
}

/// Looks at a place and, if it isn't filled, takes it from whoever has the ticket.
fn look(arena: &Arena, level: usize, place: u64) -> Cell {
    let Some(cell) = cell(arena, level, place) else { return Cell::Stale };
    let mut value = cell.load(Acquire);
    if value == round(level, place) {
        match cell.compare_exchange(value, next_round(level, place), AcqRel, Acquire) {
            Ok(_) => return Cell::Stale,
            Err(now) => value = now,
        }
    }
    if value & FILLED == 0 {
        return Cell::Stale;
    }
    let number = (value % u64::from(SLOTS)) as u32;
    let Some(slot) = arena.slot(number) else { return Cell::Stale };
    let word = Word::load(slot);
    if word.is_queued() && filled(number, word.stamp()) == value {
        Cell::Live { slot: number, word }
    } else {
        Cell::Stale
    }
}

/// Empties a place for its next round.
fn clear(arena: &Arena, level: usize, place: u64) {
    if let Some(cell) = cell(arena, level, place) {
        let value = cell.load(Relaxed);
        if value & FILLED != 0 || value == round(level, place) {
            // It fails only if whoever runs this lost the lock long ago and the place is in use again.
            let _ = cell.compare_exchange(value, next_round(level, place), Release, Relaxed);
        }
    }
}

/// A reader's way through the rings, under the lock. Nothing is consumed before [`Cursor::commit`].
///
/// The heads are read once: were they read again, somebody who keeps moving them could lead it on for ever.
#[derive(Debug)]
pub(crate) struct Cursor {
    level: usize,
    last: usize,
    heads: [u64; RING_LEVELS],
    /// Places passed, for each ring.
    passed: [u64; RING_LEVELS],
    stale: u32,
}

impl Cursor {
    pub(crate) fn new(arena: &Arena) -> Self {
        let mut heads = [0; RING_LEVELS];
        for (place, head) in heads.iter_mut().zip(&arena.header().heads) {
            *place = head.load(Relaxed);
        }
        Self { level: 0, last: level(arena), heads, passed: [0; RING_LEVELS], stale: 0 }
    }

    /// The next region that is queued, and its word.
    pub(crate) fn next(&mut self, arena: &Arena) -> Option<(u32, Word)> {
        while self.level <= self.last {
            let level = self.level;
            let (head, passed) = (*self.heads.get(level)?, self.passed.get_mut(level)?);
            let tickets = arena.header().tails[level % 16].load(Acquire).wrapping_sub(head);
            // A place a full round ahead of the head can't be filled before the head's cell is cleared.
            let filled = if tickets >> 63 == 0 { tickets.min(capacity(level)) } else { 0 };
            while *passed < filled {
                let place = head.wrapping_add(*passed);
                *passed += 1;
                match look(arena, level, place) {
                    Cell::Live { slot, word } => return Some((slot, word)),
                    Cell::Stale => self.stale = self.stale.wrapping_add(1),
                }
            }
            self.level += 1;
        }
        None
    }

    /// Consumes what was passed.
    pub(crate) fn commit(self, arena: &Arena) {
        let header = arena.header();
        for (level, (&head, &passed)) in self.heads.iter().zip(&self.passed).enumerate() {
            if passed == 0 {
                continue;
            }
            for i in 0..passed {
                clear(arena, level, head.wrapping_add(i));
            }
            step();
            header.heads[level % 16].store(head.wrapping_add(passed), Release);
        }
        let stale = header.stale.load(Relaxed).saturating_sub(self.stale);
        header.stale.store(stale, Relaxed);
    }
}

/// Drops stale entries: takes everything out and appends what is live again, in order. Under the lock. False
/// if something may have got lost: a region that did isn't queued any more, and must be told of by "everything".
pub(crate) fn compact(arena: &Arena) -> bool {
    let header = arena.header();
    let mut complete = true;
    for level in 0..=level(arena) {
        let tail = header.tails[level % 16].load(Acquire);
        let mut head = header.heads[level % 16].load(Relaxed);
        if tail.wrapping_sub(head) > 2 * capacity(level) {
            // More tickets than recorders can have taken: a forged tail.
            header.heads[level % 16].store(tail, Release);
            repair::reset_queued(arena);
            complete = false;
            continue;
        }
        while head != tail {
            let found = look(arena, level, head);
            clear(arena, level, head);
            head = head.wrapping_add(1);
            header.heads[level % 16].store(head, Release);
            step();
            if let Cell::Live { slot, word } = found
                && !push(arena, slot, word.stamp())
            {
                complete = false;
                // Queued without an entry it would swallow every later hit.
                if let Some(slot) = arena.slot(slot) {
                    repair::reset(slot);
                }
            }
        }
    }
    header.stale.store(0, Relaxed);
    complete
}
