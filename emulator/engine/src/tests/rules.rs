//! The numbered rules of the interface, its table of calls and its departures, as far as they are the engine's.

use std::vec;
use std::vec::Vec;

use super::hook::interrupted_at;
use super::memory::Memory;
use super::{Buffer, Fault, ME, read};
use crate::{Engine, Event, PageRange, ReadError, Reason, Recorded, RegisterError, UnregisterError};

const PAGE: u64 = 4096;

fn pages(start: u64, end: u64) -> PageRange {
    PageRange::new(start * PAGE, end * PAGE)
}

fn inval(cookie: u64, bounds: PageRange) -> Event {
    Event { kind: 0, flags: 0, hint_start: bounds.start, hint_end: bounds.end, cookie_counter: cookie }
}

fn hinted(cookie: u64, bounds: PageRange) -> Event {
    Event { flags: 1, ..inval(cookie, bounds) }
}

fn last(counter: u64) -> Event {
    Event { kind: 1, flags: 0, hint_start: 0, hint_end: 0, cookie_counter: counter }
}

/// A context with these regions; cookies count from 1.
fn context(regions: &[PageRange]) -> (Memory, Engine) {
    let memory = Memory::private();
    let engine = memory.create();
    for (cookie, &region) in (1..).zip(regions) {
        engine.register(&ME, region, cookie).unwrap();
    }
    (memory, engine)
}

#[test]
fn rule_1_a_range_of_any_size_is_one_invalidation() {
    let (_memory, engine) = context(&[pages(1, 2), pages(100, 200), PageRange::ALL]);
    assert_eq!(engine.record(pages(1, 1 << 51)), Recorded::Hit);
    assert_eq!(engine.record(PageRange::ALL), Recorded::Hit);
    assert_eq!(engine.counter(), 2);
}

#[test]
fn rule_2_a_region_is_hit_iff_it_overlaps() {
    let cases = [
        (pages(10, 20), pages(5, 10), false),
        (pages(10, 20), pages(5, 11), true),
        (pages(10, 20), pages(19, 30), true),
        (pages(10, 20), pages(20, 30), false),
        (pages(10, 20), pages(12, 13), true),
        (pages(10, 20), pages(1, 30), true),
        // Zero length, inside and at the edges of the range.
        (pages(10, 10), pages(9, 11), true),
        (pages(10, 10), pages(10, 11), false),
        (pages(10, 10), pages(9, 10), false),
        // Inverted: start below the range's end, end above its start.
        (pages(20, 10), pages(5, 25), true),
        (pages(20, 10), pages(15, 25), false),
        (pages(20, 10), pages(5, 15), false),
        // The edges of the address space.
        (PageRange::new(0, u64::MAX), pages(0, 1), true),
        (PageRange::new(u64::MAX - 1, u64::MAX), PageRange::ALL, true),
        (PageRange::new(u64::MAX, u64::MAX), PageRange::ALL, false),
        (PageRange::new(0, 0), PageRange::ALL, false),
        (PageRange::new(10 * PAGE + 1, 10 * PAGE + 2), pages(10, 11), true),
    ];
    for (region, range, expected) in cases {
        let (_memory, engine) = context(&[region]);
        assert_eq!(engine.may_hit(range), expected, "{region:x?} {range:x?}");
        let recorded = if expected { Recorded::Hit } else { Recorded::Missed };
        assert_eq!(engine.record(range), recorded, "{region:x?} {range:x?}");
    }
}

#[test]
fn rule_3_the_first_hit_gives_a_hint_and_the_second_takes_it() {
    let (_memory, engine) = context(&[pages(10, 20)]);
    engine.record(pages(12, 13));
    assert_eq!(read(&engine, 128), Ok(vec![hinted(1, pages(12, 13)), last(1)]));
    engine.record(pages(12, 13));
    engine.record(pages(12, 13));
    assert_eq!(read(&engine, 128), Ok(vec![inval(1, pages(10, 20)), last(3)]));
    for page in [11, 12, 13] {
        engine.record(pages(page, page + 1));
    }
    assert_eq!(read(&engine, 128), Ok(vec![inval(1, pages(10, 20)), last(6)]));
}

#[test]
fn rule_3_a_second_hit_keeps_the_place_in_the_fifo() {
    let (_memory, engine) = context(&[pages(10, 20), pages(30, 40)]);
    engine.record(pages(30, 31));
    engine.record(pages(10, 11));
    engine.record(pages(30, 31));
    let expected = vec![inval(2, pages(30, 40)), hinted(1, pages(10, 11)), last(3)];
    assert_eq!(read(&engine, 128), Ok(expected));
}

#[test]
fn rule_4_hits_are_queued_by_start_and_the_later_registered_first() {
    let regions = [pages(30, 40), pages(10, 50), pages(20, 25), pages(10, 11), pages(30, 31), pages(10, 60)];
    let (_memory, engine) = context(&regions);
    engine.record(pages(0, 100));
    let order: Vec<u64> = read(&engine, 128).unwrap().iter().map(|event| event.cookie_counter).collect();
    assert_eq!(order, [6, 4, 2, 3, 5, 1, 1]);
}

#[test]
fn rule_4_holds_for_more_hits_than_one_look_collects() {
    let regions: Vec<PageRange> = (0..1000).map(|i| pages((i * 7919) % 100, 200)).collect();
    let (_memory, engine) = context(&regions);
    engine.record(pages(50, 150));
    let mut expected: Vec<(u64, u64)> =
        regions.iter().zip(1..).map(|(region, cookie)| (region.start, u64::MAX - cookie)).collect();
    expected.sort_unstable();
    let mut order = Vec::new();
    while let Ok(records) = read(&engine, 128) {
        order.extend(records.iter().filter(|event| event.kind == 0).map(|event| event.cookie_counter));
    }
    let expected: Vec<u64> = expected.iter().map(|(_, cookie)| u64::MAX - cookie).collect();
    assert_eq!(order, expected);
}

#[test]
fn rule_5_the_counter_moves_by_one_for_each_invalidation_that_hits() {
    let (_memory, engine) = context(&[pages(10, 20), pages(10, 20), pages(15, 20)]);
    engine.record(pages(10, 20));
    assert_eq!(engine.counter(), 1);
    engine.record(pages(16, 17));
    assert_eq!(engine.counter(), 2, "queued regions count as well");
    engine.record(pages(20, 30));
    assert_eq!(engine.counter(), 2, "a miss doesn't move it");
}

#[test]
fn rule_5_an_after_hit_is_an_invalidation_of_its_own() {
    let (_memory, engine) = context(&[]);
    let begin = engine.begin();
    assert_eq!(engine.record(pages(10, 12)), Recorded::Missed);
    engine.register(&ME, pages(10, 20), 1).unwrap();
    assert_eq!(engine.end(begin, pages(10, 12)), Recorded::Hit);
    assert_eq!(read(&engine, 128), Ok(vec![hinted(1, pages(10, 12)), last(1)]));
}

#[test]
fn rule_6_the_counter_has_moved_when_record_returns() {
    let (_memory, engine) = context(&[pages(10, 20)]);
    let before = engine.counter();
    engine.record(pages(10, 20));
    assert_eq!(engine.counter(), before + 1);
    engine.invalidate_all(Reason::Requested);
    assert_eq!(engine.counter(), before + 2);
}

#[test]
fn rule_7_a_reported_region_stays_registered() {
    let (_memory, engine) = context(&[pages(10, 20)]);
    for n in 1..5 {
        engine.record(pages(10, 11));
        assert_eq!(read(&engine, 128), Ok(vec![hinted(1, pages(10, 11)), last(n)]));
    }
}

#[test]
fn rule_8_hints_are_cut_to_the_region() {
    let odd = PageRange::new(10 * PAGE + 5, 20 * PAGE + 7);
    let cases = [
        (pages(10, 20), pages(5, 15), pages(10, 15)),
        (pages(10, 20), pages(15, 25), pages(15, 20)),
        (pages(10, 20), pages(12, 13), pages(12, 13)),
        (pages(10, 20), pages(10, 20), pages(10, 20)),
        (pages(10, 20), PageRange::ALL, pages(10, 20)),
        (odd, pages(10, 11), PageRange::new(odd.start, 11 * PAGE)),
        (odd, pages(20, 21), PageRange::new(20 * PAGE, odd.end)),
        (odd, pages(1, 30), odd),
        (PageRange::ALL, pages(1, 2), pages(1, 2)),
        (PageRange::ALL, PageRange::ALL, PageRange::ALL),
        (pages(10, 10), pages(9, 11), pages(10, 10)),
        (pages(20, 10), pages(5, 25), pages(20, 10)),
    ];
    for (region, range, hint) in cases {
        let (_memory, engine) = context(&[region]);
        engine.record(range);
        assert_eq!(read(&engine, 128), Ok(vec![hinted(1, hint), last(1)]), "{region:x?} {range:x?}");
    }
}

#[test]
fn rule_8_without_hint_the_bounds_are_the_regions() {
    let odd = PageRange::new(3, 20 * PAGE + 7);
    let (_memory, engine) = context(&[odd]);
    engine.record(pages(1, 2));
    engine.record(pages(1, 2));
    assert_eq!(read(&engine, 128), Ok(vec![inval(1, odd), last(2)]));
}

#[test]
fn rule_9_last_carries_the_counter() {
    let (_memory, engine) = context(&[pages(10, 20), pages(30, 40)]);
    engine.record(pages(10, 11));
    engine.record(pages(30, 31));
    assert_eq!(read(&engine, 1), Ok(vec![hinted(1, pages(10, 11))]));
    engine.record(pages(10, 12));
    let expected = vec![hinted(2, pages(30, 31)), hinted(1, pages(10, 12)), last(3)];
    assert_eq!(read(&engine, 128), Ok(expected));
}

#[test]
fn rule_10_readable_iff_queued_or_counter_not_reported() {
    let (_memory, engine) = context(&[pages(10, 20), pages(30, 40)]);
    assert!(!engine.is_readable());
    engine.record(pages(10, 40));
    assert!(engine.is_readable());
    assert_eq!(read(&engine, 2).unwrap().len(), 2);
    assert!(engine.is_readable(), "no LAST yet");
    assert_eq!(read(&engine, 2), Ok(vec![last(1)]));
    assert!(!engine.is_readable());
    assert_eq!(read(&engine, 2), Err(ReadError::NotReadable));
}

#[test]
fn row_open_a_new_context_is_empty() {
    let (_memory, engine) = context(&[]);
    assert_eq!((engine.counter(), engine.regions(), engine.is_readable()), (0, 0, false));
    assert_eq!(read(&engine, 128), Err(ReadError::NotReadable));
}

#[test]
fn row_exchange_features_is_refused_after_use() {
    let (_memory, engine) = context(&[]);
    assert!(engine.exchange_features().is_ok());
    assert!(engine.exchange_features().is_err());

    let (_memory, engine) = context(&[pages(1, 2)]);
    assert!(engine.exchange_features().is_err(), "REGISTER uses");

    let (_memory, engine) = context(&[]);
    let _ = read(&engine, 128);
    assert!(engine.exchange_features().is_err(), "read uses, also when it fails");

    let (_memory, engine) = context(&[]);
    engine.mark_used();
    assert!(engine.exchange_features().is_err());

    let (_memory, engine) = context(&[]);
    let _ = engine.unregister(&ME, 1);
    assert!(engine.exchange_features().is_ok(), "UNREGISTER doesn't use");
}

#[test]
fn row_register_checks_nothing_but_the_cookie() {
    let odd = [PageRange::ALL, pages(5, 5), pages(9, 3), PageRange::new(1, 2), pages(5, 5)];
    let (_memory, engine) = context(&odd);
    engine.register(&ME, pages(1, 2), 0).unwrap();
    engine.register(&ME, pages(1, 2), u64::MAX).unwrap();
    for cookie in [0, 1, u64::MAX] {
        assert_eq!(engine.register(&ME, pages(7, 8), cookie), Err(RegisterError::CookieInUse));
    }
    assert_eq!(engine.regions(), odd.len() as u64 + 2);
}

#[test]
fn row_unregister_takes_the_queued_event_along() {
    let (_memory, engine) = context(&[pages(10, 20), pages(10, 20), pages(10, 20)]);
    engine.record(pages(10, 20));
    engine.unregister(&ME, 2).unwrap();
    assert_eq!(engine.unregister(&ME, 2), Err(UnregisterError::UnknownCookie));
    let expected = vec![hinted(3, pages(10, 20)), hinted(1, pages(10, 20)), last(1)];
    assert_eq!(read(&engine, 128), Ok(expected));
    assert_eq!(engine.record(pages(10, 20)), Recorded::Hit);
    engine.unregister(&ME, 1).unwrap();
    engine.unregister(&ME, 3).unwrap();
    assert_eq!(engine.record(pages(10, 20)), Recorded::Missed);
}

#[test]
fn row_unregister_a_cookie_used_again_starts_unqueued() {
    let (_memory, engine) = context(&[pages(10, 20)]);
    engine.record(pages(10, 20));
    engine.unregister(&ME, 1).unwrap();
    engine.register(&ME, pages(10, 20), 1).unwrap();
    assert_eq!(read(&engine, 128), Ok(vec![last(1)]));
}

#[test]
fn row_read_not_readable_comes_before_room() {
    let (_memory, engine) = context(&[pages(10, 20)]);
    assert_eq!(read(&engine, 0), Err(ReadError::NotReadable));
    engine.record(pages(10, 20));
    assert_eq!(read(&engine, 0), Ok(vec![]));
    assert_eq!(read(&engine, 0), Ok(vec![]), "nothing was consumed");
    assert_eq!(read(&engine, 128), Ok(vec![hinted(1, pages(10, 20)), last(1)]));
    assert_eq!(read(&engine, 0), Err(ReadError::NotReadable));
}

#[test]
fn row_read_a_buffer_filled_by_invals_leaves_last_for_the_next() {
    let regions: Vec<PageRange> = (0..200).map(|i| pages(i, i + 1)).collect();
    let (_memory, engine) = context(&regions[..128]);
    engine.record(pages(0, 1000));
    assert_eq!(read(&engine, 1000).unwrap().len(), 128);
    assert!(engine.is_readable());
    assert_eq!(read(&engine, 1000), Ok(vec![last(1)]));

    let (_memory, engine) = context(&regions);
    engine.record(pages(0, 1000));
    assert!(read(&engine, 1000).unwrap().iter().all(|event| event.kind == 0), "a page of records at most");
    let rest = read(&engine, 1000).unwrap();
    assert_eq!((rest.len(), rest[72]), (73, last(1)));
}

#[test]
fn row_read_one_record_at_a_time_until_last() {
    let (_memory, engine) = context(&[pages(10, 20), pages(30, 40)]);
    engine.record(pages(0, 100));
    assert_eq!(read(&engine, 1), Ok(vec![hinted(1, pages(10, 20))]));
    assert_eq!(read(&engine, 1), Ok(vec![hinted(2, pages(30, 40))]));
    assert_eq!(read(&engine, 1), Ok(vec![last(1)]));
    assert_eq!(read(&engine, 1), Err(ReadError::NotReadable));
}

#[test]
fn row_read_settles_what_stays_readable() {
    let (_memory, engine) = context(&[pages(10, 20), pages(30, 40)]);
    let mut port = Buffer::default();
    assert_eq!(engine.read(&ME, 9, &mut port), Err(ReadError::NotReadable));
    assert_eq!(port.settled, Some(false));
    engine.record(pages(0, 100));
    assert_eq!(engine.read(&ME, 2, &mut port), Ok(2));
    assert_eq!(port.settled, Some(true));
    assert_eq!(engine.read(&ME, 2, &mut port), Ok(1));
    assert_eq!(port.settled, Some(false));
}

#[test]
fn departure_1_a_hit_whose_region_goes_unread_is_reported_by_last() {
    let (_memory, engine) = context(&[pages(10, 20)]);
    engine.record(pages(10, 20));
    engine.unregister(&ME, 1).unwrap();
    assert!(engine.is_readable());
    assert_eq!(read(&engine, 128), Ok(vec![last(1)]));
    assert!(!engine.is_readable());
}

#[test]
fn departure_2_a_read_that_faults_consumes_nothing() {
    let (_memory, engine) = context(&[pages(10, 20), pages(30, 40), pages(50, 60)]);
    engine.record(pages(10, 35));
    engine.record(pages(55, 56));
    engine.record(pages(12, 13));
    let expected = vec![inval(1, pages(10, 20)), hinted(2, pages(30, 35)), hinted(3, pages(55, 56)), last(3)];
    for room in [1, 2, 3, 4, 128] {
        let mut port = Buffer { refuse: true, ..Buffer::default() };
        assert_eq!(engine.read(&ME, room, &mut port), Err(ReadError::Port(Fault)));
        assert!(engine.is_readable());
    }
    assert_eq!(read(&engine, 128), Ok(expected));
    engine.record(pages(10, 20));
    engine.unregister(&ME, 1).unwrap();
    let mut port = Buffer { refuse: true, ..Buffer::default() };
    assert_eq!(engine.read(&ME, 128, &mut port), Err(ReadError::Port(Fault)), "LAST alone faults as well");
    assert_eq!(read(&engine, 128), Ok(vec![last(4)]));
}

#[test]
fn departure_4_what_was_registered_or_dequeued_meanwhile_is_hit_again() {
    let (_memory, engine) = context(&[pages(10, 20), pages(15, 30), pages(80, 90)]);
    let begin = engine.begin();
    engine.record(pages(10, 40));
    assert_eq!(read(&engine, 1).unwrap(), [hinted(1, pages(10, 20))]);
    engine.register(&ME, pages(35, 50), 4).unwrap();
    engine.register(&ME, pages(80, 90), 5).unwrap();
    assert_eq!(engine.end(begin, pages(10, 40)), Recorded::Hit);
    assert_eq!(engine.counter(), 2);
    let expected =
        vec![hinted(2, pages(15, 30)), hinted(1, pages(10, 20)), hinted(4, pages(35, 40)), last(2)];
    assert_eq!(read(&engine, 128), Ok(expected), "the one that stayed queued keeps its hint");
}

#[test]
fn departure_4_without_a_race_there_is_no_extra_event() {
    let (_memory, engine) = context(&[pages(10, 20)]);
    let begin = engine.begin();
    engine.record(pages(10, 40));
    assert_eq!(engine.end(begin, pages(10, 40)), Recorded::Missed);
    assert_eq!(read(&engine, 128), Ok(vec![hinted(1, pages(10, 20)), last(1)]));
    // Something moved, but nothing that overlaps.
    let begin = engine.begin();
    engine.register(&ME, pages(50, 60), 2).unwrap();
    assert_eq!(engine.end(begin, pages(10, 40)), Recorded::Missed);
    assert!(!engine.is_readable());
}

#[test]
fn departure_6_everything_queues_every_region_without_hint() {
    let regions = [pages(30, 40), pages(10, 20), pages(5, 5), PageRange::new(0, 0), pages(50, 60)];
    let (_memory, engine) = context(&regions);
    engine.record(pages(50, 51));
    engine.invalidate_all(Reason::Deadline);
    assert_eq!(engine.counter(), 2);
    engine.register(&ME, pages(1, 2), 6).unwrap();
    let expected = vec![
        inval(5, pages(50, 60)),
        inval(4, PageRange::new(0, 0)),
        inval(3, pages(5, 5)),
        inval(2, pages(10, 20)),
        inval(1, pages(30, 40)),
        last(2),
    ];
    assert_eq!(read(&engine, 128), Ok(expected), "but not what was registered later");
    assert_eq!(engine.statistics().everything(Reason::Deadline), 1);
}

#[test]
fn departure_6_everything_without_regions_still_gives_a_last() {
    let (_memory, engine) = context(&[]);
    engine.invalidate_all(Reason::Requested);
    assert!(engine.is_readable());
    assert_eq!(read(&engine, 128), Ok(vec![last(1)]));
    assert!(!engine.is_readable());
}

#[test]
fn statistics_say_what_happened() {
    let (_memory, engine) = context(&[pages(10, 20)]);
    engine.record(pages(10, 11));
    engine.record(pages(1, 2));
    engine.record(pages(100, 101));
    let begin = engine.begin();
    let _ = read(&engine, 128);
    engine.end(begin, pages(10, 11));
    engine.unregister(&ME, 1).unwrap();
    let statistics = engine.statistics();
    assert_eq!((statistics.hits, statistics.misses, statistics.invalidations), (2, 2, 4));
    assert_eq!((statistics.registered, statistics.unregistered, statistics.reported), (1, 1, 1));
    assert_eq!(statistics.after_hits, 1);
    assert!(Reason::ALL.iter().all(|&reason| statistics.everything(reason) == 0));
}

/// Few records are read with few places. What is hit at any moment of such a read must not make it end early.
#[test]
fn a_read_with_room_left_ends_with_last_whatever_is_hit_meanwhile() {
    let regions: Vec<PageRange> = (0..100).map(|n| pages(10 * n, 10 * n + 5)).collect();
    let (mut steps, mut grown) = (0, 0);
    loop {
        let (memory, engine) = context(&regions);
        engine.record(pages(0, 1));
        let mut buffer = Buffer::default();
        let interrupted = interrupted_at(
            steps + 1,
            || assert!(engine.read(&ME, 128, &mut buffer).is_ok()),
            move || assert_eq!(engine.record(pages(0, 1000)), Recorded::Hit),
        );
        if !interrupted {
            break;
        }
        steps += 1;
        let ends = buffer.records.last().map(|record| record.kind);
        assert_eq!(ends, Some(1), "step {steps}: {:?}", buffer.records);
        grown += u64::from(buffer.records.len() > 50);
        // All are reported, each once, but for the one whose record was on its way.
        let mut cookies: Vec<u64> = buffer.records.iter().map(|record| record.cookie_counter).collect();
        cookies.pop();
        while let Ok(more) = read(&engine, 128) {
            cookies.extend(more.iter().filter(|record| record.kind == 0).map(|record| record.cookie_counter));
        }
        cookies.sort_unstable();
        let twice = cookies.len() - 100;
        cookies.dedup();
        assert_eq!(cookies, (1..=100).collect::<Vec<_>>(), "step {steps}");
        assert!(twice <= 1, "step {steps}");
        assert_eq!(engine.counter(), 2);
        drop(memory);
    }
    assert!(steps > 5 && grown > 0, "{steps} steps, {grown} of them early enough");
}

#[test]
fn what_was_mapped_is_known_to_be_until_something_hits_it() {
    let (_memory, engine) = context(&[pages(10, 20)]);
    engine.register_mapped(&ME, pages(30, 40), 2).unwrap();
    let known = |from, to| engine.is_known_mapped(pages(from, to));
    assert!(known(30, 31) && known(5, 31) && known(39, 50));
    assert!(!known(10, 20) && !known(20, 30) && !known(40, 50), "nobody said so");
    engine.record(pages(39, 41));
    assert!(!known(30, 31), "it may be gone");
    let _ = read(&engine, 128);
    assert!(!known(30, 31), "still");
    engine.unregister(&ME, 2).unwrap();
    engine.register_mapped(&ME, pages(30, 40), 2).unwrap();
    assert!(known(30, 31));
    // The note isn't taken for the next region's, nor for a hint.
    for cookie in 3..9000 {
        engine.unregister(&ME, cookie - 1).unwrap();
        engine.register(&ME, pages(30, 40), cookie).unwrap();
        assert!(!known(30, 31), "cookie {cookie}");
    }
    engine.unregister(&ME, 8999).unwrap();
    engine.register_mapped(&ME, pages(30, 40), 2).unwrap();
    engine.record(pages(35, 36));
    assert_eq!(read(&engine, 128).unwrap()[0], hinted(2, pages(35, 36)));
    engine.register_mapped(&ME, pages(50, 60), 3).unwrap();
    engine.invalidate_all(Reason::Requested);
    let _ = read(&engine, 128);
    assert!(!known(50, 51));
}

#[test]
fn registrations_look_ahead_while_hits_come() {
    let (_memory, engine) = context(&[]);
    // As the opener's threads do it; true if it looked.
    let register = |n: u64, is_mapped: bool| {
        let looks = engine.looks_ahead();
        if looks && is_mapped {
            engine.register_mapped(&ME, pages(n, n + 1), n).unwrap();
        } else {
            engine.register(&ME, pages(n, n + 1), n).unwrap();
        }
        if looks && !is_mapped {
            engine.looked_in_vain();
        }
        looks
    };
    let come_and_go = |times, is_mapped| {
        let looked = (0..times).filter(|_| {
            let looked = register(1, is_mapped);
            engine.unregister(&ME, 1).unwrap();
            looked
        });
        looked.count()
    };
    let hit = |n: u64| {
        engine.record(pages(n, n + 1));
        engine.hit_in_process();
    };
    assert_eq!(come_and_go(1000, true), 64, "nothing is hit");
    assert_eq!(come_and_go(1000, true), 0);
    register(5, true);
    hit(5);
    assert_eq!(come_and_go(1000, false), 64, "nothing is mapped");
    hit(5);
    // However many are registered before the first of them is hit.
    for _ in 0..3 {
        assert!((100..600).all(|n| register(n, true)));
        (100..600).for_each(hit);
        (100..600).for_each(|n| engine.unregister(&ME, n).map(drop).unwrap());
    }
    for _ in 0..100 {
        assert_eq!(come_and_go(60, true), 60, "a hit in 60 is enough");
        hit(5);
    }
}
