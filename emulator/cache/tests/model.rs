//! A million random operations against a model that says of each request whether an entry must serve it.
#![cfg(not(shuttle))]

mod common;

use common::{Machine, PAGE};
use std::collections::BTreeMap;
use std::sync::Arc;
use ummunotify_cache::{Access, Cache, Handle, Limits, PageRange};

const PAGES: u64 = 64;

/// xorshift64*: the sequence is the seed's.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % n
    }
}

/// What the model knows of an entry: it serves requests, or only waits for its handles.
struct Entry {
    range: PageRange,
    access: Access,
    serves: bool,
    handles: usize,
}

type TestCache = Cache<Arc<Machine>, Arc<Machine>>;
type TestHandle<'c> = Handle<'c, Arc<Machine>, Arc<Machine>>;

struct Model<'c> {
    machine: &'c Machine,
    cache: &'c TestCache,
    /// By the registration's number.
    entries: BTreeMap<u64, Entry>,
    handles: Vec<(u64, TestHandle<'c>)>,
}

impl<'c> Model<'c> {
    /// Entries leave the model as they leave the adapter. Those that serve and aren't in use may do so at any miss.
    fn follow(&mut self, evictions_allowed: bool) {
        let pinned = self.machine.pinned();
        self.entries.retain(|number, entry| {
            let there = pinned.contains_key(number);
            assert!(there || entry.handles == 0, "registration {number} was given back in use");
            assert!(there || !entry.serves || evictions_allowed, "registration {number} was given back");
            // What nobody can use any more is gone at once: one thread, so nothing can be missed.
            assert!(!there || entry.serves || entry.handles > 0, "registration {number} is left over");
            there
        });
        assert_eq!(self.entries.len(), pinned.len(), "a registration that nobody knows");
    }

    fn get(&mut self, range: PageRange, offset: u64, length: u64, access: Access) {
        let serving = |e: &Entry| {
            e.serves && e.range.start <= range.start && range.end <= e.range.end && e.access.contains(access)
        };
        let must_hit = self.entries.values().any(serving);
        let before = self.cache.statistics();
        match self.cache.get(range.start + offset, length, access) {
            Ok(handle) => {
                let number = handle.registration().number;
                let after = self.cache.statistics();
                assert_eq!(after.hits - before.hits, u64::from(must_hit));
                assert_eq!(after.misses - before.misses, u64::from(!must_hit));
                assert_eq!(
                    handle.registration().pinned.versions,
                    self.machine.versions(handle.range()),
                    "stale"
                );
                assert!(handle.range().start <= range.start && range.end <= handle.range().end);
                assert!(handle.access().contains(access) && handle.is_current());
                if must_hit {
                    assert!(self.entries.get(&number).is_some_and(serving), "another registration");
                } else {
                    assert_eq!((handle.range(), handle.access()), (range, access));
                    for entry in self.entries.values_mut() {
                        let inside = range.start <= entry.range.start && entry.range.end <= range.end;
                        entry.serves &= !(inside && access.contains(entry.access));
                    }
                    self.entries.insert(number, Entry { range, access, serves: true, handles: 0 });
                }
                if let Some(entry) = self.entries.get_mut(&number) {
                    entry.handles += 1;
                }
                self.follow(!must_hit);
                self.handles.push((number, handle));
            }
            Err(error) => {
                // Only for want of room, which handles must take.
                let full = matches!(
                    error,
                    ummunotify_cache::Error::Full { .. } | ummunotify_cache::Error::TooLarge { .. }
                );
                assert!(full && !must_hit, "{error}");
                self.follow(true);
                let limits = self.cache.limits();
                let kept: u64 = self.entries.values().map(|e| e.range.len()).sum();
                let too_many = self.entries.len() >= limits.entries || kept + range.len() > limits.bytes;
                assert!(too_many, "{error}");
                assert!(self.entries.values().all(|e| e.handles > 0), "something could have been evicted");
            }
        }
        let statistics = self.cache.statistics();
        assert_eq!(statistics.bytes, self.machine.pinned_bytes());
        assert_eq!(statistics.entries, self.entries.len());
        assert!(statistics.bytes <= self.cache.limits().bytes);
        assert!(statistics.entries <= self.cache.limits().entries);
    }

    fn drop_handle(&mut self, nth: usize) {
        let (number, handle) = self.handles.swap_remove(nth);
        drop(handle);
        if let Some(entry) = self.entries.get_mut(&number) {
            entry.handles -= 1;
        }
        self.follow(false);
    }

    fn remap(&mut self, pages: std::ops::Range<u64>) {
        self.machine.remap(pages.clone());
        let range = common::range_of(pages);
        self.entries.values_mut().filter(|e| range.hits(e.range)).for_each(|e| e.serves = false);
    }
}

/// `UMMUNOTIFY_SEED` and `UMMUNOTIFY_MODEL_STEPS` choose another run.
#[test]
fn the_cache_differs_from_its_model() {
    let variable = |name: &str, default: u64| {
        std::env::var(name)
            .map_or(default, |text| text.parse().unwrap_or_else(|e| panic!("{name}={text}: {e}")))
    };
    let seed = variable(
        "UMMUNOTIFY_SEED",
        std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos().into(),
    );
    let steps = variable("UMMUNOTIFY_MODEL_STEPS", 1_000_000);
    println!("UMMUNOTIFY_SEED={seed}");
    let mut random = Random(seed | 1);
    let mut total = ummunotify_cache::Statistics::default();
    for part in 0..10 {
        let machine = Machine::new(PAGES);
        // From a cache that holds everything to one that holds next to nothing.
        let limits =
            Limits { entries: [4096, 8, 24, 2][part % 4], bytes: [u64::MAX, 20 * PAGE, 60 * PAGE][part % 3] };
        let cache = Cache::new(machine.clone(), machine.clone(), limits).unwrap();
        let mut model =
            Model { machine: &machine, cache: &cache, entries: BTreeMap::new(), handles: Vec::new() };
        for _ in 0..steps / 10 {
            match random.below(20) {
                0 | 1 => {
                    let first = random.below(PAGES - 4);
                    model.remap(first..first + 1 + random.below(4));
                    // A hint of when: not before the next request is anything given back.
                    cache.sweep().unwrap();
                    model.follow(false);
                }
                2..8 if !model.handles.is_empty() => {
                    let nth = random.below(model.handles.len() as u64) as usize;
                    model.drop_handle(nth);
                }
                _ => {
                    let first = random.below(PAGES - 8);
                    let most = if random.below(8) == 0 { 8 } else { 2 };
                    let pages = 1 + random.below(most);
                    let access = Access::from_bits_truncate([0, 1, 3, 7][random.below(4) as usize]);
                    let offset = random.below(PAGE);
                    let length = pages * PAGE - offset - random.below(PAGE - offset);
                    let range = common::range_of(first..first + pages);
                    model.get(range, offset, length, access);
                    if model.handles.len() > 12 {
                        model.drop_handle(0);
                    }
                }
            }
        }
        while !model.handles.is_empty() {
            model.drop_handle(0);
        }
        drop(model);
        let s = cache.statistics();
        total.hits += s.hits;
        total.misses += s.misses;
        total.evicted += s.evicted;
        total.superseded += s.superseded;
        total.invalidated += s.invalidated;
        total.deferred += s.deferred;
        cache.clear().unwrap();
        assert_eq!((cache.statistics().entries, cache.statistics().bytes), (0, 0));
        assert_eq!((machine.pinned().len(), machine.watched()), (0, 0));
    }
    println!("{total:?}");
    // A run in which one of these never happened would have tested less than it says.
    let counts =
        [total.hits, total.misses, total.evicted, total.superseded, total.invalidated, total.deferred];
    assert!(steps < 100_000 || counts.iter().all(|count| *count > 100), "{total:?}");
}
