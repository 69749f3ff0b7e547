//! Several recorders, a client that registers and unregisters, and a reader, on two mappings of one arena.
//!
//! What is checked: once a LAST has told of a hit's counter value, the region was reported after the hit began;
//! a retired cookie isn't reported any more; in the end everything was told.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::SeqCst;
use std::boxed::Box;
use std::vec::Vec;

use super::memory::Memory;
use super::{Buffer, Thread};
use crate::{Engine, Event, PageRange, Port, ReadError, Reason, Recorded};

const PAGE: u64 = 4096;
/// Cookies of the regions that come and go start here.
const CHURN: u64 = 1 << 32;

fn region(cookie: u64) -> PageRange {
    PageRange::new(cookie * 4 * PAGE, (cookie * 4 + 2) * PAGE)
}

/// What the reader has told so far.
struct Told {
    /// Reports of each lasting region.
    reports: Vec<AtomicU64>,
    last: AtomicU64,
    /// Churning cookies below are unregistered.
    retired: AtomicU64,
}

struct Teller<'a> {
    told: &'a Told,
    retired: u64,
}

impl Port for Teller<'_> {
    type Error = ();
    fn deliver(&mut self, records: &[Event]) -> Result<(), ()> {
        for record in records {
            if record.kind == 1 {
                self.told.last.fetch_max(record.cookie_counter, SeqCst);
            } else if record.cookie_counter >= CHURN {
                assert!(record.cookie_counter - CHURN >= self.retired, "reported after UNREGISTER returned");
            } else {
                let bounds = region(record.cookie_counter);
                assert!(record.hint_start >= bounds.start && record.hint_end <= bounds.end);
                assert!(
                    record.flags == 1 || (record.hint_start, record.hint_end) == (bounds.start, bounds.end)
                );
                self.told.reports[record.cookie_counter as usize].fetch_add(1, SeqCst);
            }
        }
        Ok(())
    }
    fn settle(&mut self, _: &Engine, _: bool) {}
}

/// A hit that must be told: region, its reports before, counter after.
type Debt = (u64, u64, u64);

fn settle(told: &Told, debts: &mut Vec<Debt>) {
    let last = told.last.load(SeqCst);
    debts.retain(|&(cookie, reports, counter)| {
        if last < counter {
            return true;
        }
        let now = told.reports[cookie as usize].load(SeqCst);
        assert!(now > reports, "LAST {last} counts hit {counter} of region {cookie}, which wasn't reported");
        false
    });
}

/// Records hits until `rounds` are over; returns the debts that are left.
fn recorder(engine: Engine, told: &Told, lasting: u64, seed: u64, rounds: u64) -> Vec<Debt> {
    let mut debts = Vec::new();
    let mut random = seed;
    for round in 0..rounds {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let cookie = random % lasting;
        let reports = told.reports[cookie as usize].load(SeqCst);
        let before = engine.counter();
        let begin = engine.begin();
        let range = region(cookie);
        let recorded = engine.record(range);
        assert_ne!(recorded, Recorded::Missed, "a lasting region was missed");
        engine.end(begin, range);
        let counter = engine.counter();
        assert!(counter > before);
        debts.push((cookie, reports, counter));
        if round % 64 == 0 {
            settle(told, &mut debts);
        }
        if round % 1000 == 0 {
            engine.invalidate_all(Reason::Requested);
        }
    }
    debts
}

fn churner(engine: Engine, told: &Told, lasting: u64, rounds: u64) {
    let host = Thread { id: 11, dead: &[] };
    let live = 20;
    for round in 0..rounds {
        // Some lie over the lasting regions and are hit with them.
        engine.register(&host, region(round % (2 * lasting)), CHURN + round).unwrap();
        if round >= live {
            engine.unregister(&host, CHURN + round - live).unwrap();
            told.retired.store(round - live + 1, SeqCst);
        }
    }
    for round in rounds.saturating_sub(live)..rounds {
        engine.unregister(&host, CHURN + round).unwrap();
    }
    told.retired.store(rounds, SeqCst);
}

fn read_once(engine: Engine, told: &Told, host: Thread, room: usize) -> bool {
    let retired = told.retired.load(SeqCst);
    match engine.read(&host, room, &mut Teller { told, retired }) {
        Ok(_) => true,
        Err(ReadError::NotReadable) => false,
        Err(error) => panic!("{error:?}"),
    }
}

fn stress(lasting: u64, recorders: u64, rounds: u64) {
    let (memory, mirror) = Memory::twice();
    let (engine, other) = (memory.create(), mirror.attach());
    let host = Thread { id: 12, dead: &[] };
    for cookie in 0..lasting {
        engine.register(&host, region(cookie), cookie).unwrap();
    }
    let told = Told {
        reports: (0..lasting).map(|_| AtomicU64::new(0)).collect(),
        last: AtomicU64::new(0),
        retired: AtomicU64::new(0),
    };
    let running = AtomicU64::new(recorders + 1);
    let mut debts = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..recorders)
            .map(|n| {
                let engine = if n % 2 == 0 { engine } else { other };
                let (told, running) = (&told, &running);
                scope.spawn(move || {
                    let debts = recorder(engine, told, lasting, 0x1234_5678_9abc + n, rounds);
                    running.fetch_sub(1, SeqCst);
                    debts
                })
            })
            .collect();
        let (told, running) = (&told, &running);
        scope.spawn(move || {
            churner(engine, told, lasting, rounds);
            running.fetch_sub(1, SeqCst);
        });
        let mut room = 1;
        while running.load(SeqCst) > 0 {
            room = room % 130 + 7;
            if !read_once(other, told, host, room) {
                std::thread::yield_now();
            }
        }
        let debts: Vec<Debt> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        debts
    });
    while read_once(other, &told, host, 128) {}
    assert_eq!(told.last.load(SeqCst), engine.counter());
    assert!(!engine.is_readable() && !other.is_readable());
    settle(&told, &mut debts);
    assert!(debts.is_empty());
    assert_eq!(engine.regions(), lasting);
    let statistics = engine.statistics();
    assert_eq!(statistics.everything(Reason::TakenOver) + statistics.everything(Reason::Corrupt), 0);
    for reason in Reason::ALL {
        std::println!("{}: {}", reason.name(), statistics.everything(reason));
    }
}

#[test]
fn nothing_is_missed_when_recorders_fight_over_few_regions() {
    stress(3, 3, 150_000);
}

#[test]
fn nothing_is_missed_among_many_regions() {
    stress(200, 2, 150_000);
}

#[test]
fn another_process_records_into_the_same_arena() {
    let (memory, mirror) = Memory::twice();
    let engine = memory.create();
    let host = Thread { id: 12, dead: &[] };
    for cookie in 0..100 {
        engine.register(&host, region(cookie), cookie).unwrap();
    }
    let child = super::memory::Child::start(move || {
        let engine = mirror.attach();
        for round in 0..10_000 {
            if engine.record(region(round % 100)) != Recorded::Hit {
                return false;
            }
        }
        true
    });
    let mut invals = 0;
    let mut reads = || {
        let mut port = Buffer::default();
        let result = engine.read(&host, 128, &mut port);
        invals += port.records.iter().filter(|event| event.kind == 0).count();
        result.is_ok()
    };
    while !child.ended() {
        if !reads() {
            std::thread::yield_now();
        }
    }
    while reads() {}
    assert!(child.succeeded());
    assert_eq!(engine.counter(), 10_000);
    assert!(invals >= 100);
}

#[test]
fn a_process_killed_while_it_registers_leaves_a_context_that_works() {
    let mut taken = 0;
    for round in 0..60u64 {
        let (memory, mirror) = Memory::twice();
        let engine = memory.create();
        let host = Thread { id: 12, dead: &[99] };
        for cookie in 0..50 {
            engine.register(&host, region(cookie), cookie).unwrap();
        }
        let child = super::memory::Child::start(move || {
            let engine = mirror.attach();
            let host = Thread { id: 99, dead: &[] };
            let mut port = Box::new(Buffer::default());
            for cookie in 0.. {
                let _ = engine.register(&host, region(cookie % 200), 1000 + cookie);
                let _ = engine.unregister(&host, (960 + cookie).max(1000));
                engine.record(region(cookie % 50));
                port.records.clear();
                let _ = engine.read(&host, 5, &mut *port);
            }
            false
        });
        std::thread::sleep(std::time::Duration::from_micros(500 + 37 * round));
        assert!(child.kill(), "it ended before");
        for cookie in 0..50 {
            assert_ne!(engine.record(region(cookie)), Recorded::Missed);
        }
        let mut reported = Vec::new();
        loop {
            let mut port = Buffer::default();
            match engine.read(&host, 128, &mut port) {
                Ok(_) => reported.extend(port.records),
                Err(ReadError::NotReadable) => break,
                Err(error) => panic!("{error:?}"),
            }
        }
        for cookie in 0..50 {
            assert!(reported.iter().any(|event| event.kind == 0 && event.cookie_counter == cookie));
        }
        assert_eq!(reported.last().map(|event| event.cookie_counter), Some(engine.counter()));
        taken += engine.statistics().everything(Reason::TakenOver);
        assert_eq!(engine.statistics().everything(Reason::Corrupt), 0);
        for cookie in 0..50 {
            engine.unregister(&host, cookie).unwrap();
        }
    }
    std::println!("lock taken over in {taken} of 60 rounds");
}
