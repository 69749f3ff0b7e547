//! What a client's threads may not do themselves.

use core::sync::atomic::{AtomicU32, Ordering};

use ummunotify_abi::arena::{ELSEWHERE_FAULT, ELSEWHERE_KMOD};

use super::memory::Memory;
use super::{Buffer, ME, Thread, read};
use crate::{Ending, Event, Host, PageRange, ReadError, RegisterError, Stuck, UnregisterError};

/// A thread of the opener.
#[derive(Clone, Copy)]
struct Client(Thread);

const CLIENT: Client = Client(Thread { id: 8, dead: &[] });
const REGION: PageRange = PageRange::new(0x1000, 0x2000);

impl Host for Client {
    fn id(&self) -> u32 {
        self.0.id
    }
    fn wait(&self, word: &AtomicU32, seen: u32) {
        // A writer that doesn't run for a while is no dead one.
        if word.load(Ordering::Acquire) == seen {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    fn wake(&self, word: &AtomicU32) {
        self.0.wake(word);
    }
    fn gone(&self, id: u32) -> bool {
        self.0.gone(id)
    }
    fn is_client(&self) -> bool {
        true
    }
}

#[test]
fn on_the_module_a_client_does_nothing_itself() {
    let memory = Memory::private();
    let engine = memory.create();
    engine.register(&CLIENT, REGION, 1).unwrap();
    engine.set_elsewhere(&ME, ELSEWHERE_KMOD).unwrap();
    assert_eq!(engine.register(&CLIENT, REGION, 2), Err(RegisterError::Elsewhere));
    assert_eq!(engine.unregister(&CLIENT, 1).map(drop), Err(UnregisterError::Elsewhere));
    engine.record(REGION);
    let mut buffer = Buffer::default();
    assert_eq!(engine.read(&CLIENT, 128, &mut buffer), Err(ReadError::Elsewhere));
    assert!(buffer.records.is_empty() && buffer.settled.is_none());

    // The supervisor does, and nothing was lost.
    engine.register(&ME, REGION, 2).unwrap();
    assert_eq!(read(&engine, 128).unwrap().len(), 2);
    engine.unregister(&ME, 1).unwrap();

    engine.clear_elsewhere(&ME, ELSEWHERE_KMOD).unwrap();
    assert_eq!(engine.elsewhere(), 0);
    engine.unregister(&CLIENT, 2).unwrap();
    assert_eq!(engine.regions(), 0);
    assert_eq!(engine.read(&CLIENT, 128, &mut buffer), Err(ReadError::NotReadable));
}

#[test]
fn with_something_armed_a_client_still_reads() {
    let memory = Memory::private();
    let engine = memory.create();
    engine.register(&CLIENT, REGION, 1).unwrap();
    engine.set_elsewhere(&ME, ELSEWHERE_FAULT).unwrap();
    assert_eq!(engine.register(&CLIENT, REGION, 2), Err(RegisterError::Elsewhere));
    assert_eq!(engine.unregister(&CLIENT, 1).map(drop), Err(UnregisterError::Elsewhere));
    engine.record(REGION);
    let mut buffer = Buffer::default();
    assert_eq!(engine.read(&CLIENT, 128, &mut buffer), Ok(2));

    // The flags stand and fall apart.
    engine.set_elsewhere(&ME, ELSEWHERE_KMOD).unwrap();
    engine.clear_elsewhere(&ME, ELSEWHERE_FAULT).unwrap();
    assert_eq!(engine.elsewhere(), ELSEWHERE_KMOD);
    assert_eq!(engine.register(&CLIENT, REGION, 2), Err(RegisterError::Elsewhere));
}

#[test]
fn a_lock_that_is_held_keeps_the_flags() {
    let memory = Memory::private();
    let engine = memory.create();
    // A client that was stopped inside a call: alive, and holding on.
    memory.word(192).store(9, Ordering::Release);
    assert_eq!(engine.set_elsewhere(&ME, ELSEWHERE_KMOD), Err(Stuck));
    assert_eq!(engine.elsewhere(), 0);
}

/// Setting the flag parts a client's calls into those that are complete and those that are turned away.
#[test]
fn no_registration_gets_in_afterwards() {
    let memory = Memory::private();
    let engine = memory.create();
    let (live, calls) = (&AtomicU32::new(0), &AtomicU32::new(0));
    for round in 0..200u64 {
        let before = calls.load(Ordering::Acquire);
        std::thread::scope(|scope| {
            for n in 0..3u32 {
                let client = Client(Thread { id: 10 + n, dead: &[] });
                scope.spawn(move || {
                    for i in 0u64.. {
                        let cookie = round << 40 | u64::from(n) << 32 | i;
                        match engine.register(&client, REGION, cookie) {
                            Ok(()) => live.fetch_add(1, Ordering::AcqRel),
                            Err(error) => return assert_eq!(error, RegisterError::Elsewhere),
                        };
                        calls.fetch_add(1, Ordering::AcqRel);
                        if i % 16 != 0 {
                            match engine.unregister(&client, cookie) {
                                Ok(_) => live.fetch_sub(1, Ordering::AcqRel),
                                Err(error) => return assert_eq!(error, UnregisterError::Elsewhere),
                            };
                        }
                    }
                });
            }
            while calls.load(Ordering::Acquire) < before + 8 {
                std::thread::yield_now();
            }
            engine.set_elsewhere(&ME, ELSEWHERE_KMOD).unwrap();
            let regions = engine.regions();
            std::thread::sleep(std::time::Duration::from_micros(100));
            assert_eq!(engine.regions(), regions);
        });
        assert_eq!(engine.regions(), u64::from(live.load(Ordering::Acquire)));
        engine.clear_elsewhere(&ME, ELSEWHERE_KMOD).unwrap();
    }
}

fn inval(cookie: u64, hint: Option<PageRange>) -> Event {
    let bounds = hint.unwrap_or(REGION);
    let flags = u32::from(hint.is_some());
    Event { kind: 0, flags, hint_start: bounds.start, hint_end: bounds.end, cookie_counter: cookie }
}

fn last(counter: u64) -> Event {
    Event { kind: 1, cookie_counter: counter, ..Event::default() }
}

const WIDE: PageRange = PageRange::new(0x1_0000, 0x2_0000);
const PART: PageRange = PageRange::new(0x1_2000, 0x1_3000);

#[test]
fn what_others_report_keeps_order_and_hints() {
    let memory = Memory::private();
    let engine = memory.create();
    for cookie in [1, 2, 3] {
        engine.register(&ME, WIDE, cookie).unwrap();
    }
    // By pieces, as reads of the module come; 99 was unregistered, LAST is none of ours.
    engine.requeue(&ME, &[inval(2, Some(PART)), inval(99, None)]).unwrap();
    engine.requeue(&ME, &[inval(1, None), inval(3, Some(WIDE)), inval(3, Some(WIDE)), last(5)]).unwrap();
    assert_eq!(engine.counter(), 0);
    let bare = |cookie| Event { hint_start: WIDE.start, hint_end: WIDE.end, ..inval(cookie, None) };
    let mut buffer = Buffer::default();
    assert_eq!(engine.read_up_to(&ME, 128, &mut buffer, Ending::At(5)), Ok(4));
    assert_eq!(buffer.records, [inval(2, Some(PART)), bare(1), bare(3), last(5)]);
}

#[test]
fn a_hit_of_ours_and_one_of_theirs_leave_no_hint() {
    let memory = Memory::private();
    let engine = memory.create();
    engine.register(&ME, WIDE, 1).unwrap();
    engine.record(PART);
    engine.requeue(&ME, &[inval(1, Some(PART))]).unwrap();
    let bare = Event { hint_start: WIDE.start, hint_end: WIDE.end, ..inval(1, None) };
    assert_eq!(read(&engine, 128), Ok(std::vec![bare, last(1)]));
}

#[test]
fn hints_of_empty_and_inverted_regions_come_through() {
    let (empty, inverted) = (PageRange::new(0x9000, 0x9000), PageRange::new(0x9000, 0x5000));
    let memory = Memory::private();
    let engine = memory.create();
    engine.register(&ME, empty, 1).unwrap();
    engine.register(&ME, inverted, 2).unwrap();
    let records = [inval(1, Some(empty)), inval(2, Some(inverted))];
    engine.requeue(&ME, &records).unwrap();
    let mut buffer = Buffer::default();
    assert_eq!(engine.read_up_to(&ME, 2, &mut buffer, Ending::Open), Ok(2));
    assert_eq!(buffer.records, records);
}

/// LAST carries the value up to which the other side was emptied. What was counted since is still to be reported.
#[test]
fn a_read_up_to_a_value_leaves_the_rest_readable() {
    let memory = Memory::private();
    let engine = memory.create();
    engine.register(&ME, REGION, 1).unwrap();
    engine.requeue(&ME, &[inval(1, None)]).unwrap();
    memory.counter_word().fetch_add(2, Ordering::AcqRel);
    let mut buffer = Buffer::default();
    assert_eq!(engine.read_up_to(&ME, 128, &mut buffer, Ending::At(1)), Ok(2));
    assert_eq!(buffer.records.last(), Some(&last(1)));
    assert_eq!(buffer.settled, Some(true));
    assert!(engine.is_readable());
    // Nothing more up to that value, although there is beyond.
    assert_eq!(engine.read_up_to(&ME, 128, &mut buffer, Ending::At(1)), Err(ReadError::NotReadable));
    assert_eq!(buffer.settled, Some(true));
    assert_eq!(engine.read_up_to(&ME, 128, &mut buffer, Ending::Open), Err(ReadError::NotReadable));
    assert_eq!(read(&engine, 128), Ok(std::vec![last(2)]));
    assert!(!engine.is_readable());
}

#[test]
fn everything_is_reported_whatever_the_ending() {
    for (ending, expected) in [(Ending::At(1), 3), (Ending::Open, 2)] {
        let memory = Memory::private();
        let engine = memory.create();
        engine.register(&ME, REGION, 1).unwrap();
        engine.register(&ME, REGION, 2).unwrap();
        engine.invalidate_all(crate::Reason::Switched);
        let mut buffer = Buffer::default();
        assert_eq!(engine.read_up_to(&ME, 128, &mut buffer, ending), Ok(expected));
    }
}

#[test]
fn regions_are_visited_as_they_are() {
    let memory = Memory::private();
    let engine = memory.create();
    for cookie in 1..=1000 {
        engine.register(&ME, PageRange::new(cookie, 2 * cookie), cookie).unwrap();
    }
    for cookie in (1..=1000).step_by(2) {
        engine.unregister(&ME, cookie).unwrap();
    }
    engine.record(PageRange::ALL);
    let mut seen = std::vec::Vec::new();
    engine.visit(&ME, |region| seen.push(region)).unwrap();
    seen.sort_by_key(|region| region.number);
    let cookies: std::vec::Vec<u64> = seen.iter().map(|region| region.cookie).collect();
    assert_eq!(cookies, (2..=1000).step_by(2).collect::<std::vec::Vec<u64>>());
    assert!(seen.iter().all(|r| r.range == PageRange::new(r.cookie, 2 * r.cookie)));
}

#[test]
fn a_request_is_taken_once() {
    let memory = Memory::private();
    let engine = memory.create();
    assert_eq!(engine.take_request(), None);
    engine.ask_for_device(7);
    assert_eq!(engine.take_request(), Some(7));
    assert_eq!(engine.take_request(), None);
    engine.ask_for_device(8);
    engine.withdraw_request();
    assert_eq!(engine.take_request(), None);
}
