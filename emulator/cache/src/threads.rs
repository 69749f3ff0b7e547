//! Who uses an entry, counted so that a hit writes to no memory that another thread reads.
//!
//! Each thread has a shard of its own for each cache, and alone writes to it. In it stands for each entry how often
//! this thread acquired it, and how often this thread released it, wherever it had been acquired. An entry is idle
//! if the sums over all shards are equal.

use crate::chunks::Chunks;
use crate::sync::{Acquire, AtomicU32, AtomicU64, OnceLock, Relaxed, Release, SeqCst, fence};

/// Threads with a shard at a time. Further ones share one.
const SHARDS: usize = if cfg!(shuttle) { 8 } else { 256 };
/// Places of a thread's memory for what it used last; a power of two.
const MEMO: usize = if cfg!(shuttle) { 2 } else { 1024 };

/// Bits of a slot's number plus one: see `Limits::MOST_ENTRIES`.
const SLOT_BITS: u32 = 24;

#[derive(Debug, Default)]
struct Count {
    acquired: AtomicU32,
    released: AtomicU32,
}

/// Written by one thread alone.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Shard {
    hits: AtomicU64,
    /// By a hash of what was asked for: more of the hash, and behind it the slot's number plus one. Hints: whoever
    /// follows one looks at the slot.
    memo: Box<[AtomicU64]>,
    counts: Chunks<Count>,
}

impl Shard {
    fn new(slots: usize) -> Self {
        let memo = (0..MEMO).map(|_| AtomicU64::new(0)).collect();
        Self { hits: AtomicU64::new(0), memo, counts: Chunks::new(slots) }
    }

    /// The place for `key`, and what stands in the upper bits there if it is this one's.
    #[inline(always)]
    fn place(&self, key: u64) -> Option<(&AtomicU64, u64)> {
        // Multiplication spreads neighbouring pages over the places (Fibonacci hashing).
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let place = self.memo.get((hash >> (64 - MEMO.ilog2())) as usize)?;
        Some((place, hash << SLOT_BITS))
    }

    /// The slot that this thread used last for `key`, or (hardly ever) for another one.
    #[inline(always)]
    pub(crate) fn remembered(&self, key: u64) -> Option<u32> {
        let (place, tag) = self.place(key)?;
        let found = place.load(Relaxed) ^ tag;
        if found >> SLOT_BITS != 0 {
            return None; // without a look at the slot, which may be far away
        }
        (found as u32).checked_sub(1)
    }

    #[inline(always)]
    pub(crate) fn remember(&self, key: u64, slot: u32) {
        if let Some((place, tag)) = self.place(key) {
            place.store(tag | u64::from(slot + 1), Relaxed);
        }
    }

    #[inline(always)]
    pub(crate) fn count_hit(&self) {
        self.hits.store(self.hits.load(Relaxed).wrapping_add(1), Relaxed);
    }
}

/// All shards of a cache.
#[derive(Debug)]
pub(crate) struct Uses {
    shards: Box<[OnceLock<Box<Shard>>]>,
    /// No shard from here on was made.
    used: AtomicU32,
    /// Of threads without a number: those beyond SHARDS, and those that are ending.
    others: Box<Shard>,
    slots: usize,
}

impl Uses {
    pub(crate) fn new(slots: usize) -> Self {
        let shards = (0..SHARDS).map(|_| OnceLock::new()).collect();
        Self { shards, used: AtomicU32::new(0), others: Box::new(Shard::new(slots)), slots }
    }

    /// The calling thread's shard; `None` if it has to share one.
    #[inline(always)]
    pub(crate) fn mine(&self) -> Option<&Shard> {
        let number = number::get()?;
        let shard = self.shards.get(number as usize)?;
        match shard.get() {
            Some(shard) => Some(shard),
            None => Some(self.make(number, shard)),
        }
    }

    #[cold]
    fn make<'a>(&self, number: u32, shard: &'a OnceLock<Box<Shard>>) -> &'a Shard {
        // Before the first use is counted there, so that whoever looks for uses looks there too.
        self.used.fetch_max(number + 1, SeqCst);
        shard.get_or_init(|| Box::new(Shard::new(self.slots)))
    }

    /// The shards that there are.
    fn all(&self) -> impl Iterator<Item = &Shard> {
        let used = self.used.load(SeqCst) as usize;
        self.shards
            .iter()
            .take(used)
            .filter_map(|shard| shard.get())
            .chain([&self.others])
            .map(|shard| &**shard)
    }

    #[inline(always)]
    fn count<'a>(&'a self, shard: Option<&'a Shard>, slot: u32) -> Option<&'a Count> {
        let counts = &shard.unwrap_or(&self.others).counts;
        counts.get(slot).or_else(|| counts.make(slot))
    }

    /// Counts one more use by `shard`, which is the calling thread's. Whoever looks at the slot's state after this
    /// sees what was written before a look at the counts that missed it.
    ///
    /// One instruction, though the thread alone writes there: a signal's handler may use the cache in between.
    #[inline(always)]
    pub(crate) fn acquire(&self, shard: Option<&Shard>, slot: u32) {
        if let Some(count) = self.count(shard, slot) {
            count.acquired.fetch_add(1, Relaxed);
        }
        fence(SeqCst);
    }

    /// Takes a use back, whichever thread counted it.
    #[inline(always)]
    pub(crate) fn release(&self, shard: Option<&Shard>, slot: u32) {
        if let Some(count) = self.count(shard, slot) {
            count.released.fetch_add(1, Release);
        }
    }

    /// True if nobody uses the slot, and nobody will who looks at its state after acquiring it, as it was set before.
    ///
    /// What was released is added up first, what was acquired afterwards: the second sum isn't less than the first,
    /// and if they are equal nothing was in use between the two.
    pub(crate) fn idle(&self, slot: u32) -> bool {
        fence(SeqCst);
        let sum = |of: fn(&Count) -> u32| {
            self.all().filter_map(|shard| shard.counts.get(slot)).map(of).fold(0, u32::wrapping_add)
        };
        let released = sum(|count| count.released.load(Acquire));
        let acquired = sum(|count| count.acquired.load(Acquire));
        released == acquired
    }

    /// Hits by all threads so far.
    pub(crate) fn hits(&self) -> u64 {
        self.all().map(|shard| shard.hits.load(Relaxed)).sum()
    }

    /// Counts a hit of a thread without a number.
    pub(crate) fn count_other_hit(&self) {
        self.others.hits.fetch_add(1, Relaxed);
    }
}

/// Small numbers for threads: no two have the same at a time. Without a lock: a forked child that makes a cache of its own
/// would wait for ever for one that another thread held.
#[cfg(not(shuttle))]
mod number {
    use super::SHARDS;
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire};

    const UNKNOWN: u32 = u32::MAX;
    /// The thread is ending, and gave its number back.
    const ENDED: u32 = u32::MAX - 1;

    /// Bit n of all: number n is taken.
    static TAKEN: [AtomicU64; SHARDS / 64] = [const { AtomicU64::new(0) }; SHARDS / 64];

    thread_local! {
        static NUMBER: Cell<u32> = const { Cell::new(UNKNOWN) };
        static GIVEN: Given = const { Given };
    }

    /// Gives the number back at the thread's end.
    struct Given;

    impl Drop for Given {
        fn drop(&mut self) {
            give_back(NUMBER.replace(ENDED));
        }
    }

    /// The thread's number; `None` while it is ending, or while SHARDS others have one.
    #[inline(always)]
    pub(super) fn get() -> Option<u32> {
        match NUMBER.get() {
            UNKNOWN => take(),
            ENDED => None,
            number => Some(number),
        }
    }

    #[cold]
    fn take() -> Option<u32> {
        if GIVEN.try_with(|_| ()).is_err() {
            NUMBER.set(ENDED);
            return None;
        }
        let number = (0..).zip(&TAKEN).find_map(|(nth, word)| {
            let first = |taken: u64| (taken != u64::MAX).then(|| taken | (taken + 1));
            let before = word.fetch_update(AcqRel, Acquire, first).ok()?;
            Some(nth * 64 + before.trailing_ones())
        })?;
        // A signal's handler may have been quicker.
        match NUMBER.get() {
            UNKNOWN => NUMBER.set(number),
            _ => give_back(number),
        }
        Some(NUMBER.get())
    }

    fn give_back(number: u32) {
        if let Some(word) = TAKEN.get(number as usize / 64) {
            word.fetch_and(!(1 << (number % 64)), AcqRel);
        }
    }
}

#[cfg(shuttle)]
mod number {
    pub(super) fn get() -> Option<u32> {
        u32::try_from(usize::from(shuttle::current::me())).ok()
    }
}
