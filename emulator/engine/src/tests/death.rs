//! Threads that die, or are interrupted, at every single step of every call.

use std::cell::RefCell;
use std::rc::Rc;
use std::vec::Vec;

use super::hook::{interrupted_at, killed_at};
use super::memory::Memory;
use super::{Buffer, ME, Thread};
use crate::{Engine, Event, PageRange, Reason, Recorded};

const PAGE: u64 = 4096;
/// Regions of the context that each round starts with: enough for two levels of the index.
const REGIONS: u64 = 40;

/// The thread that dies.
const VICTIM: Thread = Thread { id: 9, dead: &[] };
/// The one that finds its lock.
const HEIR: Thread = Thread { id: 8, dead: &[9] };

fn region(cookie: u64) -> PageRange {
    PageRange::new(cookie * 4 * PAGE, (cookie * 4 + 2) * PAGE)
}

fn first_page(cookie: u64) -> PageRange {
    PageRange::new(region(cookie).start, region(cookie).start + PAGE)
}

fn second_page(cookie: u64) -> PageRange {
    PageRange::new(region(cookie).start + PAGE, region(cookie).end)
}

/// True if one of the records tells of the region's second page.
fn tells(records: &[Event], cookie: u64) -> bool {
    records.iter().any(|event| {
        (event.kind, event.cookie_counter, event.hint_end) == (0, cookie, second_page(cookie).end)
    })
}

fn fill(engine: &Engine) {
    for cookie in 1..=REGIONS {
        engine.register(&ME, region(cookie), cookie).unwrap();
    }
    // Some are queued, one twice, and some events are gone.
    for cookie in [3, 30, 17, 30, 5] {
        engine.record(first_page(cookie));
    }
    engine.unregister(&ME, 5).unwrap();
}

/// The cookies that [`drain_records`] reads, in order.
fn drain(engine: &Engine, host: &Thread) -> Vec<u64> {
    let records = drain_records(engine, host);
    records.iter().filter(|event| event.kind == 0).map(|event| event.cookie_counter).collect()
}

/// Reads to the end. The last record must be LAST with the counter, and nothing be left.
fn drain_records(engine: &Engine, host: &Thread) -> Vec<Event> {
    let mut records: Vec<Event> = Vec::new();
    loop {
        let mut port = Buffer::default();
        match engine.read(host, 128, &mut port) {
            Ok(_) => records.extend(port.records),
            Err(crate::ReadError::NotReadable) => break,
            Err(error) => panic!("{error:?}"),
        }
        assert!(records.len() < 10_000, "reads for ever");
    }
    assert!(!engine.is_readable());
    if let Some(last) = records.last() {
        assert_eq!((last.kind, last.cookie_counter), (1, engine.counter()));
    }
    records
}

/// Each live region but `doubtful` is hit and reported once; lookups, cookies and the FIFO work.
fn check(engine: &Engine, host: &Thread, live: &[u64], doubtful: u64) {
    drain(engine, host);
    for &cookie in live.iter().rev() {
        if cookie == doubtful {
            engine.record(region(cookie));
            continue;
        }
        let before = engine.counter();
        assert_eq!(engine.record(region(cookie)), Recorded::Hit, "region {cookie}");
        assert_eq!(engine.counter(), before + 1);
    }
    let mut reported = drain(engine, host);
    reported.retain(|&cookie| cookie != doubtful);
    let expected: Vec<u64> = live.iter().rev().copied().filter(|&cookie| cookie != doubtful).collect();
    assert_eq!(reported, expected);
    for &cookie in live {
        if cookie != doubtful {
            assert_eq!(engine.register(host, region(cookie), cookie), Err(crate::RegisterError::CookieInUse));
            assert_eq!(engine.unregister(host, cookie).map(drop), Ok(()));
            assert_eq!(engine.record(region(cookie)), Recorded::Missed);
        }
    }
    let _ = engine.unregister(host, doubtful);
    assert_eq!(engine.regions(), 0);
    for cookie in 1..=REGIONS + 2 {
        engine.register(host, region(cookie), cookie).unwrap();
    }
    engine.record(PageRange::ALL);
    assert_eq!(drain(engine, host), (1..=REGIONS + 2).collect::<Vec<_>>());
}

fn live() -> Vec<u64> {
    (1..=REGIONS).filter(|&cookie| cookie != 5).collect()
}

type Act = fn(&Engine, &Thread);

/// Calls that a thread may die or be interrupted in, and the cookie whose registration then is open.
const ACTS: [(&str, u64, Act); 8] = [
    ("register", 41, |engine, host| {
        let _ = engine.register(host, region(41), 41);
    }),
    ("register after everything", 41, |engine, host| {
        engine.invalidate_all(Reason::Requested);
        let _ = engine.register(host, region(41), 41);
    }),
    ("unregister", 20, |engine, host| {
        let _ = engine.unregister(host, 20);
    }),
    ("unregister queued", 17, |engine, host| {
        let _ = engine.unregister(host, 17);
    }),
    ("read", 0, |engine, host| {
        let _ = engine.read(host, 2, &mut Buffer::default());
    }),
    ("read to last", 0, |engine, host| {
        let _ = engine.read(host, 128, &mut Buffer::default());
    }),
    ("record", 0, |engine, _| {
        engine.record(PageRange::new(8 * PAGE, 100 * PAGE));
    }),
    ("record queued", 0, |engine, _| {
        engine.record(region(17));
    }),
];

#[test]
fn a_writer_or_reader_killed_at_any_step_costs_nothing_but_everything() {
    let memory = Memory::private();
    for (name, doubtful, act) in &ACTS[..6] {
        for n in 1.. {
            memory.zero();
            let engine = memory.create();
            fill(&engine);
            if !killed_at(n, || act(&engine, &VICTIM)) {
                assert!(n > 3, "{name} has no steps");
                break;
            }
            // A recorder goes on at once, exactly or not.
            let counter = engine.counter();
            assert_ne!(engine.record(region(1)), Recorded::Missed, "{name}, step {n}");
            assert!(engine.counter() > counter && engine.is_readable());
            let reported = drain(&engine, &HEIR);
            assert!(reported.contains(&1), "{name}, step {n}: {reported:?}");
            if engine.statistics().everything(Reason::TakenOver) != 0 {
                for cookie in live().into_iter().filter(|cookie| cookie != doubtful) {
                    assert!(reported.contains(&cookie), "{name}, step {n}: {cookie} of {reported:?}");
                }
            }
            check(&engine, &HEIR, &live(), *doubtful);
        }
    }
}

#[test]
fn a_lock_left_by_a_jump_out_of_a_handler_is_taken_by_the_same_thread() {
    let memory = Memory::private();
    for (name, doubtful, act) in &ACTS[..6] {
        for n in 1.. {
            memory.zero();
            let engine = memory.create();
            fill(&engine);
            if !killed_at(n, || act(&engine, &VICTIM)) {
                break;
            }
            let reported = drain(&engine, &VICTIM);
            if engine.statistics().everything(Reason::TakenOver) != 0 {
                for cookie in live().into_iter().filter(|cookie| cookie != doubtful) {
                    assert!(reported.contains(&cookie), "{name}, step {n}: {cookie} of {reported:?}");
                }
            }
            check(&engine, &VICTIM, &live(), *doubtful);
        }
    }
}

#[test]
fn a_recorder_killed_at_any_step_holds_nobody_up() {
    let memory = Memory::private();
    for (name, _, act) in &ACTS[6..] {
        for n in 1.. {
            memory.zero();
            let engine = memory.create();
            fill(&engine);
            if !killed_at(n, || act(&engine, &VICTIM)) {
                assert!(n > 3, "{name} has no steps");
                break;
            }
            // Another recorder's hit of the same regions relies on nothing the dead one left.
            let counter = engine.counter();
            assert_eq!(
                engine.record(PageRange::new(8 * PAGE, 100 * PAGE)),
                Recorded::Hit,
                "{name}, step {n}"
            );
            assert_eq!(engine.counter(), counter + 1);
            let reported = drain(&engine, &ME);
            for cookie in (2..25).filter(|&cookie| cookie != 5) {
                assert!(reported.contains(&cookie), "{name}, step {n}: {cookie} of {reported:?}");
            }
            assert_eq!(engine.statistics().everything(Reason::TakenOver), 0);
            check(&engine, &ME, &live(), 0);
        }
    }
}

#[test]
fn a_recorder_killed_at_any_step_does_no_harm_to_unregister() {
    let memory = Memory::private();
    for n in 1.. {
        memory.zero();
        let engine = memory.create();
        fill(&engine);
        if !killed_at(n, || ACTS[6].2(&engine, &VICTIM)) {
            break;
        }
        for cookie in live() {
            engine.unregister(&ME, cookie).unwrap();
        }
        assert_eq!(drain(&engine, &ME), []);
        for cookie in live() {
            engine.register(&ME, region(cookie), cookie).unwrap();
        }
        check(&engine, &ME, &live(), 0);
    }
}

/// Regions that are hit in the middle of a call: one that is idle then, and one that is queued with a hint that
/// doesn't cover the hit.
const TARGETS: [u64; 2] = [25, 3];

/// What another thread, or a signal handler, does in the middle of a call: records the second page of a region,
/// then perhaps reads everything.
fn intrude(
    engine: Engine,
    target: u64,
    reader: Option<Thread>,
    seen: Rc<RefCell<Vec<Event>>>,
) -> impl FnOnce() {
    move || {
        let before = engine.counter();
        assert_ne!(engine.record(second_page(target)), Recorded::Missed);
        assert!(engine.counter() > before);
        if let Some(reader) = reader {
            loop {
                let mut port = Buffer::default();
                match engine.read(&reader, 128, &mut port) {
                    Ok(_) => seen.borrow_mut().extend(port.records),
                    Err(_) => break,
                }
            }
            assert!(tells(&seen.borrow(), target));
        }
    }
}

/// A port that keeps what was read in common with the intruder's.
struct Shared(Rc<RefCell<Vec<Event>>>);

impl crate::Port for Shared {
    type Error = ();
    fn deliver(&mut self, records: &[Event]) -> Result<(), ()> {
        self.0.borrow_mut().extend_from_slice(records);
        Ok(())
    }
    fn settle(&mut self, _: &Engine, _: bool) {}
}

#[test]
fn a_hit_at_any_step_of_a_call_is_reported_before_a_last_that_counts_it() {
    let memory = Memory::private();
    for ((name, doubtful, act), target) in ACTS.iter().flat_map(|act| TARGETS.map(|target| (act, target))) {
        for n in 1.. {
            memory.zero();
            let engine = memory.create();
            fill(&engine);
            let seen = Rc::new(RefCell::new(Vec::new()));
            let hit_at = Rc::new(RefCell::new(0));
            let note = hit_at.clone();
            let intruder = intrude(engine, target, None, seen.clone());
            let reached = interrupted_at(
                n,
                || {
                    if *name == "read" || *name == "read to last" {
                        let room = if *name == "read" { 2 } else { 128 };
                        let _ = engine.read(&VICTIM, room, &mut Shared(seen.clone()));
                    } else {
                        act(&engine, &VICTIM);
                    }
                },
                move || {
                    intruder();
                    *note.borrow_mut() = engine.counter();
                },
            );
            if !reached {
                assert!(n > 3, "{name} has no steps");
                break;
            }
            // In the records of the call itself the hit may be told or not; if a LAST counts it, it must be.
            let counted = *hit_at.borrow();
            let known = seen.borrow().iter().any(|event| event.kind == 1 && event.cookie_counter >= counted);
            let inside = tells(&seen.borrow(), target);
            assert!(inside || !known, "{name}, step {n}: LAST counts a hit that wasn't reported");
            let later = drain_records(&engine, &ME);
            assert!(inside || tells(&later, target), "{name}, step {n}: hit lost");
            check(&engine, &ME, &live(), *doubtful);
        }
    }
}

#[test]
fn a_handler_that_reads_in_the_middle_of_its_threads_own_call_loses_nothing() {
    let memory = Memory::private();
    for ((name, doubtful, act), target) in ACTS.iter().flat_map(|act| TARGETS.map(|target| (act, target))) {
        for n in 1.. {
            memory.zero();
            let engine = memory.create();
            fill(&engine);
            let seen = Rc::new(RefCell::new(Vec::new()));
            let intruder = intrude(engine, target, Some(VICTIM), seen.clone());
            if !interrupted_at(n, || act(&engine, &VICTIM), intruder) {
                break;
            }
            check(&engine, &ME, &live(), *doubtful);
            assert_eq!(engine.statistics().everything(Reason::Corrupt), 0, "{name}, step {n}");
        }
    }
}

#[test]
fn a_reader_at_any_step_of_a_record_loses_nothing() {
    let memory = Memory::private();
    for n in 1.. {
        memory.zero();
        let engine = memory.create();
        fill(&engine);
        let begin = engine.begin();
        let reached = interrupted_at(
            n,
            || {
                engine.record(PageRange::new(8 * PAGE, 100 * PAGE));
            },
            move || {
                drain(&engine, &ME);
            },
        );
        if !reached {
            break;
        }
        // Whatever the reader took meanwhile is hit at the end, or still queued.
        engine.end(begin, PageRange::new(8 * PAGE, 100 * PAGE));
        let reported = drain(&engine, &ME);
        for cookie in (2..25).filter(|&cookie| cookie != 5) {
            assert!(reported.contains(&cookie), "step {n}: {cookie} of {reported:?}");
        }
        assert_eq!(Reason::ALL.map(|reason| engine.statistics().everything(reason)), [0; 13]);
        check(&engine, &ME, &live(), 0);
    }
}

#[test]
fn unregister_and_register_at_any_step_of_a_record_keep_registrations_apart() {
    let memory = Memory::private();
    for n in 1.. {
        memory.zero();
        let engine = memory.create();
        fill(&engine);
        let reached = interrupted_at(
            n,
            || {
                engine.record(region(20));
            },
            move || {
                // The slot goes to a region elsewhere, which the record must not hit.
                engine.unregister(&ME, 20).unwrap();
                engine.register(&ME, region(50), 50).unwrap();
            },
        );
        if !reached {
            assert!(n > 3);
            break;
        }
        let reported = drain(&engine, &ME);
        assert!(!reported.contains(&50) && !reported.contains(&20), "step {n}: {reported:?}");
        engine.record(region(50));
        assert_eq!(drain(&engine, &ME), [50], "step {n}");
    }
}
