//! Which slot the entry that begins at an address has, probably: a table that fits where the tree doesn't, so that most
//! hits wait for far memory once. It is changed under the lock and read without one.
//!
//! Hints, no more: whoever follows one looks at the slot, and whoever finds none asks the tree. A line of the machine's
//! cache is a bucket; what a full one has no place for goes without. The table doubles as entries come, and what is in
//! the smaller one moves over with the next ones, some at a time; until then readers look at both.

use crate::sync::{Acquire, AtomicU32, OnceLock, Relaxed, Release};

/// Places of a bucket; few for a model checker, which should see full buckets and tables that double.
const PLACES: usize = if cfg!(shuttle) { 2 } else { 16 };
/// Entries for each bucket from which on the table doubles.
const FILL: usize = if cfg!(shuttle) { 1 } else { 13 };
/// Buckets of the smallest table, as a power of two.
const SMALLEST: u32 = if cfg!(shuttle) { 0 } else { 3 };
/// Tables: the largest has room for `Limits::MOST_ENTRIES`.
const TABLES: usize = 19;
/// Bits of a slot's number plus one: see `Limits::MOST_ENTRIES`.
const SLOT_BITS: u32 = 24;
/// Slots that move with each new entry.
const PACE: u32 = 8;

/// In a place: eight bits of the hash, and the slot's number plus one; 0 if it is empty.
#[derive(Debug)]
#[repr(align(64))]
struct Bucket([AtomicU32; PLACES]);

/// The tables that were made. None is ever freed: a reader may be in it.
#[derive(Debug)]
pub(crate) struct Hints {
    tables: [OnceLock<Box<[Bucket]>>; TABLES],
    /// Twice the table's number, and 1 while the one before it holds what this one doesn't.
    current: AtomicU32,
}

/// What only the holder of the lock has.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    entries: usize,
    /// Slots below moved to the current table.
    moved: u32,
}

/// Multiplication spreads neighbouring pages over the buckets (Fibonacci hashing); twice, for buffers that are a power of
/// two apart.
const fn hash(key: u64) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let once = key.wrapping_mul(FACTOR);
    (once ^ once >> 32).wrapping_mul(FACTOR)
}

const fn place(hash: u64, slot: u32) -> u32 {
    (hash as u32) >> SLOT_BITS << SLOT_BITS | (slot + 1)
}

impl Hints {
    pub(crate) fn new() -> Self {
        let hints = Self { tables: [const { OnceLock::new() }; TABLES], current: AtomicU32::new(0) };
        hints.make(0);
        hints
    }

    fn make(&self, table: u32) {
        let bucket = |_| Bucket([const { AtomicU32::new(0) }; PLACES]);
        if let Some(place) = self.tables.get(table as usize) {
            place.get_or_init(|| (0..1u32 << (SMALLEST + table)).map(bucket).collect());
        }
    }

    #[inline(always)]
    fn bucket(&self, table: u32, hash: u64) -> Option<&Bucket> {
        let buckets = self.tables.get(table as usize)?.get()?;
        buckets.get((hash >> 32 >> (32 - SMALLEST - table)) as usize)
    }

    /// The first answer that `look` gives about a slot which may be the one that was put in under `key`.
    #[inline(always)]
    pub(crate) fn find<T>(&self, key: u64, mut look: impl FnMut(u32) -> Option<T>) -> Option<T> {
        let hash = hash(key);
        let current = self.current.load(Acquire);
        let found = self.find_in(current / 2, hash, &mut look);
        if found.is_some() || current.is_multiple_of(2) {
            return found;
        }
        self.find_in((current / 2).checked_sub(1)?, hash, &mut look)
    }

    #[inline(always)]
    fn find_in<T>(&self, table: u32, hash: u64, look: &mut impl FnMut(u32) -> Option<T>) -> Option<T> {
        let sought = place(hash, 0) - 1;
        self.bucket(table, hash)?.0.iter().find_map(|place| {
            let other = place.load(Relaxed) ^ sought;
            if other >> SLOT_BITS != 0 {
                return None;
            }
            look(other.checked_sub(1)?)
        })
    }

    /// Puts in which slot the entry `key` has. Under the lock; `key_of` says which entry a slot below `slots` is, if it
    /// is one.
    pub(crate) fn insert(
        &self,
        writer: &mut Writer,
        key: u64,
        slot: u32,
        slots: u32,
        key_of: impl Fn(u32) -> Option<u64>,
    ) {
        writer.entries += 1;
        let mut current = self.current.load(Relaxed);
        if writer.entries > FILL << (SMALLEST + current / 2) && current as usize / 2 + 1 < TABLES {
            self.make(current / 2 + 1);
            current = current / 2 * 2 + 3;
            writer.moved = 0;
            self.current.store(current, Release);
        }
        self.put(current / 2, key, slot);
        if current % 2 == 1 {
            let end = slots.min(writer.moved + PACE);
            for moving in writer.moved..end {
                if let Some(key) = key_of(moving) {
                    self.put(current / 2, key, moving);
                }
            }
            writer.moved = end;
            if end == slots {
                self.current.store(current - 1, Release);
            }
        }
    }

    /// Takes out what was put in. Under the lock.
    pub(crate) fn remove(&self, writer: &mut Writer, key: u64, slot: u32) {
        writer.entries -= 1;
        let current = self.current.load(Relaxed);
        self.replace(current / 2, hash(key), place(hash(key), slot), 0);
        if current % 2 == 1 {
            self.replace(current / 2 - 1, hash(key), place(hash(key), slot), 0);
        }
    }

    fn put(&self, table: u32, key: u64, slot: u32) {
        let hash = hash(key);
        let is_there = self.replace(table, hash, place(hash, slot), place(hash, slot));
        if !is_there {
            self.replace(table, hash, 0, place(hash, slot));
        }
    }

    /// Writes `new` over the first `old`, if there is one.
    fn replace(&self, table: u32, hash: u64, old: u32, new: u32) -> bool {
        let places = self.bucket(table, hash).map_or(&[][..], |bucket| &bucket.0);
        let found = places.iter().find(|place| place.load(Relaxed) == old);
        if let Some(place) = found.filter(|_| old != new) {
            place.store(new, Release);
        }
        found.is_some()
    }

    /// The bytes of the tables, for a test that compares them.
    #[cfg(all(test, not(shuttle)))]
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let tables = self.tables.iter().filter_map(|table| table.get());
        let places = tables.flat_map(|table| table.iter().flat_map(|bucket| &bucket.0));
        places.chain([&self.current]).flat_map(|place| place.load(Relaxed).to_ne_bytes()).collect()
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Entries at all multiples of a stride, or anywhere; each is in slot n.
    fn key(n: u32, stride: u64) -> u64 {
        match stride {
            0 => u64::from(n).wrapping_mul(0xd134_2543_de82_ef95) >> 8,
            stride => 0x0010_0007_f000_0000 + u64::from(n) * stride,
        }
    }

    #[test]
    fn most_entries_have_no_hint() {
        for stride in [0, 1, 2, 3, 16, 512, 513, 1 << 18] {
            let (hints, mut writer) = (Hints::new(), Writer::default());
            let found = |n| hints.find(key(n, stride), |slot| (slot == n).then_some(())).is_some();
            let mut end = 0;
            for entries in [1, 10, 104, 105, 1000, 30_000, 106_496, 106_700, 150_000] {
                for n in end..entries {
                    hints.insert(&mut writer, key(n, stride), n, n + 1, |n| Some(key(n, stride)));
                }
                end = entries;
                // Also while the table doubles.
                let without = (0..entries).filter(|n| !found(*n)).count();
                assert!(without <= entries as usize / 20 + 10, "{without} of {entries}, {stride}");
            }
            for n in 0..end {
                hints.remove(&mut writer, key(n, stride), n);
                assert!(!found(n));
            }
            assert_eq!(writer.entries, 0);
        }
    }

    #[test]
    fn a_slot_is_found_that_is_none_any_more() {
        let (hints, mut writer) = (Hints::new(), Writer::default());
        // Slots that are used again by other entries, while tables double: nothing is found twice or under an old key.
        let mut keys: Vec<Option<u64>> = Vec::new();
        let mut random = 1u64;
        for step in 0..200_000u64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let slot = (random % (step / 20 + 1)) as u32;
            keys.resize(keys.len().max(slot as usize + 1), None);
            if let Some(old) = keys[slot as usize].take() {
                hints.remove(&mut writer, old, slot);
                assert!(hints.find(old, |found| (found == slot).then_some(())).is_none(), "{step}");
            } else {
                keys[slot as usize] = Some(step);
                let key_of = |slot: u32| keys.get(slot as usize).copied().flatten();
                hints.insert(&mut writer, step, slot, keys.len() as u32, key_of);
                let mut times = 0;
                hints.find(step, |found| {
                    times += u32::from(found == slot);
                    None::<()>
                });
                assert!(times <= 2, "{times} hints of one entry");
            }
        }
        assert_eq!(writer.entries, keys.iter().flatten().count());
    }
}
