//! Counts for people: why everything was invalidated, and how often recordings hit.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::arena::Arena;

/// Why every region was reported without hint instead of an exact event.
#[repr(usize)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// The index kept changing, or its writer stood still.
    IndexBusy = 0,
    /// A region's state kept changing.
    SlotBusy = 1,
    /// The ring of queued regions was full.
    QueueFull = 2,
    /// The lock's owner was dead, or had left it by a jump out of a signal handler.
    TakenOver = 3,
    /// The arena contradicted itself.
    Corrupt = 4,
    /// The supervisor couldn't find out in time what an operation does.
    Deadline = 5,
    /// The supervisor couldn't read what an operation does.
    Unreadable = 6,
    /// A thread was inside a watched call when watching began.
    LateThread = 7,
    /// A supervisor ended or came back.
    Supervisor = 8,
    /// The context moved to another backend.
    Switched = 9,
    /// Somebody asked for it.
    Requested = 10,
    /// An invalidation was announced, and nobody told which.
    Unfulfilled = 11,
    /// The process was detached from.
    Detached = 12,
}

impl Reason {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Self; 13] = [
        Self::IndexBusy,
        Self::SlotBusy,
        Self::QueueFull,
        Self::TakenOver,
        Self::Corrupt,
        Self::Deadline,
        Self::Unreadable,
        Self::LateThread,
        Self::Supervisor,
        Self::Switched,
        Self::Requested,
        Self::Unfulfilled,
        Self::Detached,
    ];

    /// A few words for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::IndexBusy => "index busy",
            Self::SlotBusy => "region busy",
            Self::QueueFull => "queue full",
            Self::TakenOver => "lock taken over",
            Self::Corrupt => "arena corrupt",
            Self::Deadline => "deadline passed",
            Self::Unreadable => "operation unreadable",
            Self::LateThread => "thread late at activation",
            Self::Supervisor => "supervisor replaced",
            Self::Switched => "backend switched",
            Self::Requested => "requested",
            Self::Unfulfilled => "announced, never told",
            Self::Detached => "detached",
        }
    }
}

/// Words of the arena behind those of [`Reason`].
#[derive(Clone, Copy)]
pub(crate) enum Count {
    Misses = 16,
    Hits = 17,
    AfterHits = 18,
    Registered = 19,
    Unregistered = 20,
    Reported = 21,
    Announced = 22,
    Vain = 23,
}

/// What happened to a context so far. Counts may lose some when several threads count at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Invalidations that were recorded, hit or not, but for those that became "everything".
    pub invalidations: u64,
    /// Invalidations that hit at least one region, after-hits among them.
    pub hits: u64,
    /// Invalidations that hit none.
    pub misses: u64,
    /// After-hits: regions registered or dequeued while an operation ran.
    pub after_hits: u64,
    /// Regions ever registered.
    pub registered: u64,
    /// Regions ever unregistered.
    pub unregistered: u64,
    /// INVAL records read.
    pub reported: u64,
    /// Invalidations for which the counter moved before their range was known.
    pub announced: u64,
    /// Those of them that hit no region, so that the counter moved for nothing.
    pub vain: u64,
    everything: [u64; Reason::ALL.len()],
}

impl Statistics {
    /// How often everything was invalidated for that reason.
    pub fn everything(&self, reason: Reason) -> u64 {
        self.everything.get(reason as usize).copied().unwrap_or(0)
    }

    pub(crate) fn of(arena: &Arena) -> Self {
        let words = &arena.header().statistics;
        let get = |count: Count| words[count as usize].load(Relaxed);
        let (hits, misses) = (get(Count::Hits), get(Count::Misses));
        let mut everything = [0; Reason::ALL.len()];
        for (out, word) in everything.iter_mut().zip(words) {
            *out = word.load(Relaxed);
        }
        Self {
            invalidations: hits.wrapping_add(misses),
            hits,
            misses,
            after_hits: get(Count::AfterHits),
            registered: get(Count::Registered),
            unregistered: get(Count::Unregistered),
            reported: get(Count::Reported),
            announced: get(Count::Announced),
            vain: get(Count::Vain),
            everything,
        }
    }
}

/// Adds to a count without a locked instruction: concurrent additions may get lost, which a figure for people
/// can bear and the fast path notices.
#[inline]
pub(crate) fn count(arena: &Arena, what: Count, n: u64) {
    let word = &arena.header().statistics[what as usize];
    word.store(word.load(Relaxed).wrapping_add(n), Relaxed);
}

/// Counts an "everything" exactly: these are rare.
pub(crate) fn count_everything(arena: &Arena, reason: Reason) {
    let word: &AtomicU64 = &arena.header().statistics[reason as usize];
    word.fetch_add(1, Relaxed);
}
