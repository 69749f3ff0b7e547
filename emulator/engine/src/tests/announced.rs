//! Invalidations whose range is told after the counter has moved.

use core::sync::atomic::{AtomicU32, Ordering};
use std::vec;

use super::memory::Memory;
use super::{Buffer, ME, read};
use crate::{Begin, Engine, Event, Host, PageRange, Reason, Recorded};

const REGION: PageRange = PageRange::new(0x1000, 0x3000);
const PIECE: PageRange = PageRange::new(0x1000, 0x2000);

fn context() -> (Memory, Engine) {
    let memory = Memory::private();
    let engine = memory.create();
    engine.register(&ME, REGION, 1).unwrap();
    (memory, engine)
}

fn hinted(piece: PageRange) -> Event {
    Event { kind: 0, flags: 1, hint_start: piece.start, hint_end: piece.end, cookie_counter: 1 }
}

fn last(counter: u64) -> Event {
    Event { kind: 1, flags: 0, hint_start: 0, hint_end: 0, cookie_counter: counter }
}

/// A reader for whom `told` happens while it waits.
struct Waits<F>(F);

impl<F: Fn()> Host for Waits<F> {
    fn id(&self) -> u32 {
        ME.id
    }
    fn wait(&self, word: &AtomicU32, seen: u32) {
        assert_eq!(word.load(Ordering::SeqCst), seen);
        (self.0)();
    }
    fn wake(&self, _: &AtomicU32) {}
    fn gone(&self, _: u32) -> bool {
        false
    }
}

#[test]
fn the_counter_moves_at_once_and_once() {
    let (_memory, engine) = context();
    let announced = engine.announce();
    assert_eq!(engine.counter(), 1);
    assert_eq!(engine.fulfil(&ME, announced, Some(PIECE)), Recorded::Hit);
    assert_eq!(read(&engine, 128), Ok(vec![hinted(PIECE), last(1)]));
}

#[test]
fn a_read_waits_with_last_until_it_is_told() {
    let (_memory, engine) = context();
    let announced = engine.announce();
    assert!(engine.is_readable());
    let host = Waits(|| {
        engine.fulfil(&ME, announced, Some(PIECE));
    });
    let mut buffer = Buffer::default();
    assert_eq!(engine.read(&host, 128, &mut buffer), Ok(2));
    assert_eq!(buffer.records, vec![hinted(PIECE), last(1)]);
}

#[test]
fn one_that_is_never_told_becomes_everything() {
    let (_memory, engine) = context();
    engine.announce();
    let mut buffer = Buffer::default();
    assert_eq!(engine.read(&ME, 128, &mut buffer), Ok(2));
    let whole = Event { flags: 0, hint_end: REGION.end, ..hinted(REGION) };
    assert_eq!(buffer.records, vec![whole, last(2)]);
    assert_eq!(engine.statistics().everything(Reason::Unfulfilled), 1);
    // The next one isn't waited for.
    engine.record(PIECE);
    assert_eq!(read(&engine, 128), Ok(vec![hinted(PIECE), last(3)]));
}

#[test]
fn one_that_was_given_up_can_still_be_told() {
    let (_memory, engine) = context();
    let announced = engine.announce();
    engine.read(&ME, 128, &mut Buffer::default()).unwrap();
    assert_eq!(engine.fulfil(&ME, announced, Some(PIECE)), Recorded::Hit);
    // The reader has taken everything since: the hit moves the counter for it.
    assert_eq!(read(&engine, 128), Ok(vec![hinted(PIECE), last(3)]));
}

#[test]
fn one_that_was_nothing_moves_the_counter_alone() {
    let (_memory, engine) = context();
    let announced = engine.announce();
    assert_eq!(engine.fulfil(&ME, announced, None), Recorded::Missed);
    assert_eq!(read(&engine, 128), Ok(vec![last(1)]));
    assert_eq!((engine.statistics().announced, engine.statistics().vain), (1, 1));
}

/// What was given up doesn't stand for what was announced later.
#[test]
fn one_that_is_told_too_late_takes_no_other_back() {
    let (_memory, engine) = context();
    let late = engine.announce();
    read(&engine, 128).unwrap();
    let next = engine.announce();
    assert_eq!(engine.fulfil(&ME, late, None), Recorded::Missed);
    let waited = core::cell::Cell::new(false);
    let host = Waits(|| {
        waited.set(true);
        engine.fulfil(&ME, next, Some(PIECE));
    });
    let mut buffer = Buffer::default();
    assert_eq!(engine.read(&host, 128, &mut buffer), Ok(2));
    assert_eq!(buffer.records, vec![hinted(PIECE), last(3)]);
    assert!(waited.get() && !engine.is_readable());
}

/// Everything was invalid before it had changed anything.
#[test]
fn one_that_is_told_too_late_moves_the_counter_again() {
    let (_memory, engine) = context();
    let late = engine.announce();
    read(&engine, 128).unwrap();
    assert_eq!(engine.fulfil(&ME, late, Some(PIECE)), Recorded::Hit);
    assert_eq!(read(&engine, 128), Ok(vec![hinted(PIECE), last(3)]));
}

/// Another reader may have reported everything already.
#[test]
fn one_that_is_announced_while_a_reader_gives_up_counts() {
    let (_memory, engine) = context();
    engine.announce();
    let (waits, next) = (core::cell::Cell::new(0), core::cell::Cell::new(None));
    let host = Waits(|| {
        waits.set(waits.get() + 1);
        if waits.get() == 100 {
            next.set(Some(engine.announce()));
        }
    });
    // The wait begins anew with it, and both are given up together.
    let mut buffer = Buffer::default();
    assert_eq!(engine.read(&host, 128, &mut buffer), Ok(2));
    assert!(waits.get() > 100, "the later one wasn't waited for");
    assert_eq!(engine.fulfil(&ME, next.get().unwrap(), Some(PIECE)), Recorded::Hit);
    assert_eq!(read(&engine, 128).unwrap().len(), 2);
}

/// Its owner may have loaded the counter after the announcement.
#[test]
fn a_region_of_a_later_registration_moves_the_counter_again() {
    let (_memory, engine) = context();
    engine.unregister(&ME, 1).unwrap();
    let announced = engine.announce();
    engine.register(&ME, REGION, 1).unwrap();
    let seen = engine.counter();
    assert_eq!(engine.fulfil(&ME, announced, Some(PIECE)), Recorded::Hit);
    assert_eq!(engine.counter(), seen + 1);
}

#[test]
fn an_operation_that_began_before_everything_hits_all() {
    let (_memory, engine) = context();
    assert_eq!(engine.end(Begin::EVER, PIECE), Recorded::Hit);
    assert_eq!(engine.end(Begin::EVER, PageRange::new(0x8000, 0x9000)), Recorded::Missed);
}

/// Others are announced whenever one is told: there always is something, and no end of it.
#[test]
fn a_read_among_others_without_end_answers_with_what_is_told() {
    let (_memory, engine) = context();
    let last_one = core::cell::Cell::new(engine.announce());
    let host = Waits(|| {
        let told = last_one.replace(engine.announce());
        engine.fulfil(&ME, told, Some(PIECE));
    });
    let mut buffer = Buffer::default();
    assert_eq!(engine.read(&host, 128, &mut buffer), Ok(2));
    // All but the last is told.
    assert_eq!(buffer.records.last(), Some(&last(engine.counter() - 1)));
    assert!(engine.is_readable());
    assert_eq!(engine.statistics().everything(Reason::Unfulfilled), 0);
    // When that is told too, a read ends with the counter.
    engine.fulfil(&ME, last_one.get(), Some(PIECE));
    assert_eq!(read(&engine, 128).unwrap().last(), Some(&last(engine.counter())));
    assert!(!engine.is_readable());
}
