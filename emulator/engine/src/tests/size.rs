//! Many regions, and what an arena costs in memory.

use core::sync::atomic::Ordering::Relaxed;
use std::vec::Vec;
use ummunotify_abi::arena::{Bank, Header, NODES, SLOTS};

use super::memory::Memory;
use super::model::Model;
use super::{ME, read};
use crate::{MAX_REGIONS, PageRange, ReadError, Reason, Recorded, RegisterError};

const PAGE: u64 = 4096;
const MILLION: u64 = 1_000_000;

/// The `i`th number of a permutation of `0..MILLION` (977 has no factor in common with it).
fn shuffled(i: u64) -> u64 {
    let x = i * 977 % MILLION;
    (x * x / 2 % 10 * 100_003 + x * 600_011 + 3) % MILLION
}

fn order() -> Vec<u64> {
    let mut order: Vec<u64> = (0..MILLION).collect();
    let mut random = 0x2545_f491_4f6c_dd1du64;
    for i in (1..order.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order.swap(i, (random % (i as u64 + 1)) as usize);
    }
    order
}

/// Region `n` of a million that leave gaps.
fn region(n: u64) -> PageRange {
    PageRange::new(n * 8 * PAGE, (n * 8 + 5) * PAGE)
}

#[test]
fn a_million_regions_in_random_order() {
    let memory = Memory::private();
    let engine = memory.create();
    let order = order();
    for &n in &order {
        engine.register(&ME, region(n), n).unwrap();
    }
    let bytes = memory.resident_pages() as u64 * PAGE;
    std::println!("{:.1} bytes a region", bytes as f64 / MILLION as f64);
    assert!(bytes <= 160 * MILLION, "{bytes} bytes");
    assert_eq!(engine.regions(), MILLION);

    for i in 0..100_000 {
        let page = i * 79 % (8 * MILLION);
        for len in [1, 3, 4] {
            let range = PageRange::new(page * PAGE, (page + len) * PAGE);
            let expected = page % 8 < 5 || page % 8 + len > 8 && page / 8 + 1 < MILLION;
            assert_eq!(engine.may_hit(range), expected, "page {page}, {len}");
        }
    }

    // A hit of all, in the order of the index.
    assert_eq!(engine.record(PageRange::new(0, 8 * MILLION * PAGE)), Recorded::Hit);
    assert_eq!(engine.counter(), 1);
    let mut next = 0;
    loop {
        match read(&engine, 128) {
            Ok(records) => {
                for record in records.iter().filter(|record| record.kind == 0) {
                    assert_eq!((record.cookie_counter, record.flags), (next, 1));
                    next += 1;
                }
            }
            Err(error) => {
                assert_eq!(error, ReadError::NotReadable);
                break;
            }
        }
    }
    assert_eq!(next, MILLION);

    // Half go, and the other half is still found, and the first isn't.
    for &n in &order {
        if n % 2 == 0 {
            engine.unregister(&ME, n).unwrap();
        }
    }
    for n in (0..MILLION).step_by(97) {
        assert_eq!(engine.may_hit(region(n)), n % 2 == 1, "{n}");
    }
    for &n in order.iter().rev() {
        if n % 2 == 1 {
            engine.unregister(&ME, n).unwrap();
        }
    }
    assert_eq!(engine.regions(), 0);
    assert!(!engine.may_hit(PageRange::ALL));
    assert_eq!(Reason::ALL.map(|reason| engine.statistics().everything(reason)), [0; 13]);
}

#[test]
fn a_small_context_stays_small_whatever_it_does() {
    let memory = Memory::private();
    let engine = memory.create();
    let mut model = Model::default();
    for n in 0..100 {
        engine.register(&ME, region(n), n).unwrap();
        model.register(region(n), n);
    }
    // Hit, unregister and register for ever, mostly without reading: exact, and no growth.
    for round in 0..200_000u64 {
        let n = shuffled(round) % 100;
        let hit = region(shuffled(round + 7) % 100);
        assert_eq!(engine.record(hit), Recorded::Hit);
        assert!(model.record(hit));
        engine.unregister(&ME, n).unwrap();
        assert!(model.unregister(n));
        engine.register(&ME, region(n), n).unwrap();
        assert!(model.register(region(n), n));
        if round % 1009 == 0 {
            assert_eq!(read(&engine, 30).unwrap(), model.read(30, false).unwrap());
        }
    }
    while model.is_readable() {
        assert_eq!(read(&engine, 128).unwrap(), model.read(128, false).unwrap());
    }
    assert!(!engine.is_readable());
    assert_eq!(Reason::ALL.map(|reason| engine.statistics().everything(reason)), [0; 13]);
    let bytes = memory.resident_pages() * 4096;
    std::println!("{bytes} bytes for 100 regions");
    assert!(bytes <= 256 << 10, "{bytes}");
}

#[test]
fn a_new_context_touches_a_few_pages() {
    let memory = Memory::private();
    let engine = memory.create();
    engine.register(&ME, region(1), 1).unwrap();
    engine.record(region(1));
    let _ = read(&engine, 128);
    let bytes = memory.resident_pages() * 4096;
    std::println!("{bytes} bytes for one region");
    assert!(bytes <= 32 << 10, "{bytes}");
}

#[test]
fn growing_through_ring_and_table_sizes_keeps_the_order() {
    let memory = Memory::private();
    let engine = memory.create();
    // Each registration is hit at once, so entries lie in rings of several sizes.
    for n in 0..20_000 {
        engine.register(&ME, region(shuffled(n)), n).unwrap();
        engine.record(region(shuffled(n)));
    }
    let mut next = 0;
    while let Ok(records) = read(&engine, 100) {
        for record in records.iter().filter(|record| record.kind == 0) {
            assert_eq!(record.cookie_counter, next);
            next += 1;
        }
    }
    assert_eq!(next, 20_000);
    assert_eq!(Reason::ALL.map(|reason| engine.statistics().everything(reason)), [0; 13]);
}

#[test]
fn a_full_arena_refuses_and_stays_whole() {
    let memory = Memory::private();
    let engine = memory.create();
    for n in 0..1000 {
        engine.register(&ME, region(n), n).unwrap();
    }
    let forge = |offset: usize, value: u32, body: &dyn Fn()| {
        let word = memory.word(offset & !7);
        let shift = 8 * (offset as u64 & 7);
        let before = word.load(Relaxed);
        word.store(before & !(0xffff_ffff << shift) | u64::from(value) << shift, Relaxed);
        body();
        let now = word.load(Relaxed);
        word.store(now & !(0xffff_ffff << shift) | before & (0xffff_ffff << shift), Relaxed);
    };
    let refused = || assert_eq!(engine.register(&ME, region(2000), 2000), Err(RegisterError::NoMemory));
    forge(core::mem::offset_of!(Header, regions), MAX_REGIONS, &refused);
    forge(core::mem::offset_of!(Header, slots_used), SLOTS, &refused);
    // No node is left: what needs one is refused, the rest is as it was.
    let used = core::mem::offset_of!(Header, banks) + core::mem::offset_of!(Bank, used);
    assert_eq!(used % 8, 4);
    let word = memory.word(used & !7);
    word.store(word.load(Relaxed) & 0xffff_ffff | u64::from(NODES / 2) << 32, Relaxed);
    let (mut full, mut more) = (0, Vec::new());
    for cookie in 5000..5100 {
        match engine.register(&ME, region(500), cookie) {
            Ok(()) => more.push(cookie),
            Err(error) => {
                assert_eq!(error, RegisterError::NoMemory);
                full += 1;
                engine.record(region(500));
                let cookies: Vec<u64> =
                    read(&engine, 128).unwrap().iter().map(|event| event.cookie_counter).collect();
                let expected: Vec<u64> = more.iter().rev().copied().chain([500, engine.counter()]).collect();
                assert_eq!(cookies, expected);
            }
        }
    }
    assert!(full > 0 && !more.is_empty(), "{full} refused, {} not", more.len());
    for &cookie in &more {
        engine.unregister(&ME, cookie).unwrap();
    }
    assert_eq!(engine.regions(), 1000);
    assert_eq!(Reason::ALL.map(|reason| engine.statistics().everything(reason)), [0; 13]);
}
