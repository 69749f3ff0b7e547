//! An arena full of anything: no call may panic, leave the arena, or run without bound.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;
use proptest::prelude::*;
use std::time::{Duration, Instant};
use std::vec;
use std::vec::Vec;
use ummunotify_abi::arena::{
    COOKIES_OFFSET, FIRST_NODE, Header, LAYOUT_VERSION, NODES, Node, RING_MIN_LOG, RINGS_OFFSET,
    SLOTS_OFFSET, Slot,
};

use super::memory::Memory;
use super::{Buffer, ME, read};
use crate::{ARENA_BYTES, BadArena, Engine, Host, PageRange, Reason, Recorded};

/// A thread to whom nobody is proven dead, and who doesn't really sleep while a forged owner has the lock.
struct Wakeful;

impl Host for Wakeful {
    fn id(&self) -> u32 {
        7
    }
    fn wait(&self, _: &AtomicU32, _: u32) {}
    fn wake(&self, _: &AtomicU32) {}
    fn gone(&self, _: u32) -> bool {
        false
    }
}

const PAGE: u64 = 4096;

/// A call may take long (a forged queue of millions has to be gone through), but not for ever.
const LIMIT: Duration = Duration::from_secs(20);

fn every_call(engine: &Engine, seed: u64) {
    let began = Instant::now();
    for i in 0..3u64 {
        let place = seed.wrapping_mul(i + 1) % 64;
        let range = PageRange::new(place * PAGE, (place + 3) * PAGE);
        let begin = engine.begin();
        engine.may_hit(range);
        engine.record(range);
        engine.record(PageRange::ALL);
        let _ = engine.register(&Wakeful, range, seed.wrapping_add(i));
        let _ = engine.register(&Wakeful, PageRange::ALL, i);
        engine.end(begin, range);
        let _ = engine.read(&Wakeful, 0, &mut Buffer::default());
        let _ = engine.read(&Wakeful, 128, &mut Buffer { refuse: true, ..Buffer::default() });
        let _ = engine.read(&Wakeful, 128, &mut Buffer::default());
        let _ = engine.unregister(&Wakeful, seed.wrapping_add(i));
        let _ = engine.unregister(&Wakeful, i + 1);
        engine.invalidate_all(Reason::Requested);
        let _ = engine.read(&Wakeful, 3, &mut Buffer::default());
        let _ = engine.exchange_features();
        engine.is_readable();
        engine.regions();
        engine.statistics();
    }
    assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
}

/// Where forged words go: everywhere that a small context uses.
fn place() -> impl Strategy<Value = usize> {
    let words = |start: usize, len: usize| (0..len / 8).prop_map(move |word| start + 8 * word);
    prop_oneof![
        4 => words(0, size_of::<Header>()),
        4 => words(FIRST_NODE as usize * size_of::<Node>(), 6 * size_of::<Node>()),
        1 => words(NODES as usize / 2 * size_of::<Node>(), 4 * size_of::<Node>()),
        4 => words(SLOTS_OFFSET + size_of::<Slot>(), 50 * size_of::<Slot>()),
        1 => words(COOKIES_OFFSET + (4 << 10), 4 << 10),
        2 => words(RINGS_OFFSET + (8 << 10), 8 << 10),
        1 => words(0, ARENA_BYTES),
    ]
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => any::<u64>(),
        3 => 0u64..64,
        2 => (0u64..64, 0u64..64).prop_map(|(high, low)| high << 32 | low),
        1 => (0u32..64).prop_map(|bit| 1 << bit),
        1 => Just(u64::MAX),
        1 => (any::<u32>()).prop_map(u64::from),
        1 => (0u64..50, 0u64..200).prop_map(|(slot, stamp)| 1 << 63 | stamp << 21 | slot),
    ]
}

fn fill(engine: &Engine) {
    for cookie in 1..=40 {
        engine.register(&Wakeful, PageRange::new(cookie * PAGE, (cookie + 2) * PAGE), cookie).unwrap();
    }
    engine.record(PageRange::new(3 * PAGE, 9 * PAGE));
}

#[test]
fn forged_words_in_a_working_arena_do_no_harm() {
    let memory = Memory::private();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 3000,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let forgery = (prop::collection::vec((place(), value()), 1..40), any::<u64>());
    let result = runner.run(&forgery, |(words, seed)| {
        memory.zero();
        let engine = memory.create();
        fill(&engine);
        for (place, value) in words {
            memory.word(place).store(value, Relaxed);
        }
        every_call(&engine, seed);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn an_arena_of_noise_does_no_harm() {
    let memory = Memory::private();
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    for round in 0..40 {
        memory.zero();
        let engine = memory.create();
        // Numbers that are mostly small, so that many of them pass for references.
        let mut next = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            if round % 2 == 0 { seed } else { (seed & 63) << 32 | seed >> 32 & 63 }
        };
        for (start, len) in [
            (64, 4096 * 16),
            (NODES as usize / 2 * size_of::<Node>(), 4096 * 4),
            (SLOTS_OFFSET, 4096 * 4),
            (COOKIES_OFFSET + 4096, 4096 * 3),
            (RINGS_OFFSET + 8192, 4096 * 6),
        ] {
            for offset in (start..start + len).step_by(8) {
                memory.word(offset).store(next(), Relaxed);
            }
        }
        every_call(&engine, next());
    }
}

#[test]
fn a_tree_that_shares_its_nodes_is_walked_in_bounded_time() {
    // Eight levels of sixteen entries that all lead to one node below: 16^8 ways, none of which hits.
    let memory = Memory::private();
    let engine = memory.create();
    for level in 0..8usize {
        let number = FIRST_NODE as usize + level;
        let base = number * size_of::<Node>();
        memory.word(base).store((level as u64) << 32 | 16, Relaxed);
        for i in 0..16 {
            memory.word(base + 64 + 8 * i).store(0, Relaxed);
            let end = if level == 0 { 0 } else { u64::MAX };
            memory.word(base + 64 + 128 + 8 * i).store(end, Relaxed);
        }
        for i in 0..8 {
            let below = number as u64 - 1;
            memory.word(base + 64 + 384 + 8 * i).store(below << 32 | below, Relaxed);
        }
    }
    let bank = core::mem::offset_of!(Header, banks);
    memory.word(bank + 8).store(u64::MAX, Relaxed);
    memory.word(bank + 16).store(64 << 32 | (FIRST_NODE as u64 + 7), Relaxed);
    let began = Instant::now();
    assert!(engine.may_hit(PageRange::new(PAGE, 2 * PAGE)));
    engine.record(PageRange::new(PAGE, 2 * PAGE));
    assert_eq!(engine.statistics().everything(Reason::Corrupt), 1);
    assert!(began.elapsed() < Duration::from_secs(1));
}

/// Three regions, the first of them queued; then the ring's tail goes on by so many places, and the second is hit.
fn without_room(places: u64) -> (Memory, Engine, impl Fn(u64) -> PageRange) {
    let memory = Memory::private();
    let engine = memory.create();
    let region = |n: u64| PageRange::new(8 * n * PAGE, (8 * n + 1) * PAGE);
    for n in 1..=3 {
        engine.register(&ME, region(n), n).unwrap();
    }
    engine.record(region(1));
    memory.word(core::mem::offset_of!(Header, tails)).fetch_add(places, Relaxed);
    engine.record(region(2));
    (memory, engine, region)
}

/// As recorders make it that race for a ring's last places.
#[test]
fn a_ring_without_room_loses_no_region() {
    let (_memory, engine, region) = without_room(1 << RING_MIN_LOG);
    for _ in 0..3 {
        // All of them: there was no room for the second.
        let mut told = read(&engine, 4096).unwrap();
        assert_eq!(told.pop().map(|event| (event.kind, event.cookie_counter)), Some((1, engine.counter())));
        let mut cookies: Vec<_> = told.iter().map(|event| event.cookie_counter).collect();
        cookies.sort_unstable();
        assert_eq!(cookies, [1, 2, 3]);
        (1..=3).for_each(|n| assert_eq!(engine.record(region(n)), Recorded::Hit));
    }
}

/// Nothing can be queued any more, so nothing is said to be valid.
#[test]
fn a_forged_tail_never_ends_a_read() {
    let (_memory, engine, _) = without_room(1 << 40);
    for _ in 0..3 {
        assert!(read(&engine, 4096).is_err() && engine.is_readable());
    }
}

#[test]
fn words_that_change_while_calls_run_do_no_harm() {
    let memory = std::sync::Arc::new(Memory::private());
    let engine = memory.create();
    fill(&engine);
    let stop = std::sync::Arc::new(core::sync::atomic::AtomicU64::new(0));
    let (memory2, stop2) = (memory.clone(), stop.clone());
    let forger = std::thread::spawn(move || {
        let mut seed = 88_172_645_463_325_252u64;
        let spots: Vec<(usize, usize)> = vec![
            (64, 704),
            (FIRST_NODE as usize * 512, 512 * 6),
            (SLOTS_OFFSET, 64 * 50),
            (RINGS_OFFSET + 8192, 8192),
        ];
        while stop2.load(Relaxed) == 0 {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            let (start, len) = spots[(seed % 4) as usize];
            let offset = start + (((seed >> 8) as usize % len) & !7);
            let value = if seed >> 40 & 1 == 0 { seed >> 20 & 63 } else { seed };
            memory2.word(offset).store(value, Relaxed);
            if seed >> 50 & 15 == 0 {
                std::thread::yield_now();
            }
        }
    });
    let began = Instant::now();
    let mut rounds = 0;
    while began.elapsed() < Duration::from_secs(2) {
        every_call(&engine, rounds);
        rounds += 1;
    }
    stop.store(1, Relaxed);
    forger.join().unwrap();
    assert!(rounds > 0);
}

#[test]
fn foreign_memory_is_refused() {
    let memory = Memory::private();
    let check = |offset: usize, value: u64, expected: BadArena| {
        memory.zero();
        memory.create();
        memory.word(offset).store(value, Relaxed);
        assert_eq!(memory.try_attach().err(), Some(expected));
    };
    check(0, 1, BadArena::Magic);
    check(8, u64::from(LAYOUT_VERSION) + 1, BadArena::Version);
    check(16, 4096, BadArena::Size);
    memory.zero();
    assert_eq!(memory.try_attach().err(), Some(BadArena::Magic));
    memory.create();
    assert!(memory.try_attach().is_ok());
    assert_eq!(memory.try_create().err(), Some(BadArena::InUse));
}
