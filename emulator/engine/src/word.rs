//! A region's state word and its hint.
//!
//! A word is a state and a *stamp*. The stamp moves when a slot is made or unmade and whenever an idle region
//! is claimed for queueing, so a compare-and-swap made for one registration or one queueing fails in every
//! other. The transitions:
//!
//! | from | to | who |
//! |---|---|---|
//! | Free(n) | Idle(n+1) | register |
//! | any(n) | Free(n+1) | unregister |
//! | Idle(n) | Writing(n+1) | first hit, which goes on to write the hint and a ring entry |
//! | Writing(n) | Hinted(n) | the same, done |
//! | Writing(n), Hinted(n) | Plain(n) | a second hit; on Writing it first makes a ring entry of its own |
//! | Writing(n), Hinted(n), Plain(n) | Reading(n) | a read, under the lock |
//! | Reading(n) | Again(n) | a hit while the records are delivered |
//! | Reading(n) | Idle(n), or back to Hinted(n) or Plain(n) | the read: delivered or not |
//! | Again(n) | Plain(n+1), or Plain(n) | likewise |
//! | any(n) | Idle(n+1) | repair, followed by "everything is invalid" |
//!
//! Whoever finds a state that covers its hit relies on nobody: Hinted and Plain have their ring entry already.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use ummunotify_abi::PageRange;
use ummunotify_abi::arena::Slot;

/// State of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Free,
    Idle,
    Writing,
    Hinted,
    Plain,
    Reading,
    Again,
    /// Not written by this engine.
    Invalid,
}

/// State and stamp in one word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Word(pub(crate) u64);

const STATE_BITS: u32 = 4;
const STAMP_MAX: u64 = u64::MAX >> STATE_BITS;

impl Word {
    pub(crate) const fn new(state: State, stamp: u64) -> Self {
        Self((stamp & STAMP_MAX) << STATE_BITS | state as u64)
    }

    pub(crate) fn load(slot: &Slot) -> Self {
        Self(slot.word.load(Acquire))
    }

    pub(crate) const fn state(self) -> State {
        match self.0 & ((1 << STATE_BITS) - 1) {
            0 => State::Free,
            1 => State::Idle,
            2 => State::Writing,
            3 => State::Hinted,
            4 => State::Plain,
            5 => State::Reading,
            6 => State::Again,
            _ => State::Invalid,
        }
    }

    pub(crate) const fn stamp(self) -> u64 {
        self.0 >> STATE_BITS
    }

    /// The same stamp in another state.
    pub(crate) const fn with(self, state: State) -> Self {
        Self::new(state, self.stamp())
    }

    /// The next stamp in another state.
    pub(crate) const fn next(self, state: State) -> Self {
        Self::new(state, self.stamp().wrapping_add(1))
    }

    /// True while a ring entry of this stamp stands for something to report.
    pub(crate) const fn is_queued(self) -> bool {
        matches!(self.state(), State::Writing | State::Hinted | State::Plain)
    }

    /// Replaces the slot's word if it still is `self`.
    pub(crate) fn swap(self, slot: &Slot, new: Self) -> bool {
        slot.word.compare_exchange(self.0, new.0, AcqRel, Acquire).is_ok()
    }
}

/// Hints are kept by pages, for translations change by pages; this page number means "the region's own bound".
const OWN: u64 = u64::MAX >> TAG_BITS;
const TAG_BITS: u32 = 12;
const TAG_MASK: u64 = (1 << TAG_BITS) - 1;
const PAGE_BITS: u32 = 12;

/// Writes the hint of an invalidation into a slot that the caller has claimed with `stamp`; false if somebody
/// else wrote. Each word is replaced by compare-and-swap and carries the stamp's low bits: a recorder that was
/// stopped here and goes on when the slot has long moved on can't mix its range into another's.
pub(crate) fn write_hint(slot: &Slot, region: PageRange, range: PageRange, stamp: u64) -> bool {
    let start = if range.start <= region.start { OWN } else { range.start >> PAGE_BITS };
    let end = if range.end >= region.end {
        OWN
    } else {
        (range.end >> PAGE_BITS) + u64::from(range.end & ((1 << PAGE_BITS) - 1) != 0)
    };
    let put = |word: &core::sync::atomic::AtomicU64, page: u64| {
        let old = word.load(Relaxed);
        let new = page.min(OWN) << TAG_BITS | stamp & TAG_MASK;
        word.compare_exchange(old, new, AcqRel, Relaxed).is_ok()
    };
    put(&slot.hint_start, start) && put(&slot.hint_end, end)
}

/// This page number stands where a hint would: "each page is mapped", for as long as the stamp stays the same. No hint
/// ends there: nothing that a program can unmap lies so high.
const MAPPED: u64 = OWN - 1;

/// Notes at a registration, whose word will be `word`, whether each page of the region is known to be mapped. The first
/// hit takes the note back by moving the stamp.
pub(crate) fn note_mapped(slot: &Slot, word: Word, mapped: bool) {
    let note = if mapped { MAPPED << TAG_BITS | word.stamp() & TAG_MASK } else { 0 };
    slot.hint_end.store(note, Relaxed);
}

/// True if each page of the region was mapped when it was registered, and nothing has hit it since.
pub(crate) fn is_known_mapped(slot: &Slot, word: Word) -> bool {
    let note = MAPPED << TAG_BITS | word.stamp() & TAG_MASK;
    word.state() == State::Idle && slot.hint_end.load(Acquire) == note
}

/// The hint that was written with `stamp`, cut to the region.
pub(crate) fn read_hint(slot: &Slot, region: PageRange, stamp: u64) -> Option<PageRange> {
    let (start, end) = (slot.hint_start.load(Acquire), slot.hint_end.load(Acquire));
    if start & TAG_MASK != stamp & TAG_MASK || end & TAG_MASK != stamp & TAG_MASK {
        return None;
    }
    let bound =
        |word: u64, own: u64| if word >> TAG_BITS == OWN { own } else { (word >> TAG_BITS) << PAGE_BITS };
    Some(PageRange::new(bound(start, region.start).max(region.start), bound(end, region.end).min(region.end)))
}
