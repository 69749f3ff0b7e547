//! The lock between threads.

use core::cell::Cell;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;
use ummunotify_abi::arena::Header;

use super::memory::Memory;
use super::{Buffer, ME};
use crate::{Engine, Host, PageRange, ReadError, Reason, RegisterError, UnregisterError};

const LOCK: usize = core::mem::offset_of!(Header, lock);
const REGION: PageRange = PageRange::new(0x1000, 0x2000);

/// A thread that notes what it is asked, and may let the lock go while it waits.
#[derive(Default)]
struct Witness {
    id: u32,
    waits: Cell<u32>,
    wakes: Cell<u32>,
    raised: Cell<u32>,
    free_after: Option<u32>,
    dead_after: Option<u32>,
}

impl Host for Witness {
    fn id(&self) -> u32 {
        self.id
    }
    fn wait(&self, word: &AtomicU32, seen: u32) {
        assert_eq!(seen, word.load(Relaxed), "nobody else changes it here");
        assert_ne!(seen & 1 << 31, 0, "the owner must know that somebody waits");
        self.waits.set(self.waits.get() + 1);
        if self.free_after == Some(self.waits.get()) {
            word.store(0, Relaxed);
        }
    }
    fn wake(&self, _: &AtomicU32) {
        self.wakes.set(self.wakes.get() + 1);
    }
    fn gone(&self, id: u32) -> bool {
        assert_eq!(id, 99);
        self.dead_after.is_some_and(|n| self.waits.get() >= n)
    }
    fn invalidated(&self) {
        self.raised.set(self.raised.get() + 1);
    }
}

fn held() -> (Memory, Engine) {
    let memory = Memory::private();
    let engine = memory.create();
    engine.register(&ME, REGION, 1).unwrap();
    memory.word(LOCK).fetch_add(99, Relaxed);
    (memory, engine)
}

#[test]
fn a_lock_that_comes_free_is_taken_without_harm() {
    let (_memory, engine) = held();
    let host = Witness { id: 5, free_after: Some(3), ..Witness::default() };
    engine.register(&host, REGION, 2).unwrap();
    assert_eq!((host.waits.get(), host.wakes.get(), host.raised.get()), (3, 1, 0));
    assert_eq!(engine.counter(), 0);
}

#[test]
fn a_dead_owners_lock_is_taken_over_and_told() {
    let (_memory, engine) = held();
    let host = Witness { id: 5, dead_after: Some(2), ..Witness::default() };
    engine.register(&host, REGION, 2).unwrap();
    assert_eq!((host.waits.get(), host.raised.get()), (2, 1));
    assert_eq!(engine.statistics().everything(Reason::TakenOver), 1);
    assert_eq!(engine.counter(), 1);
    let records = super::read(&engine, 128).unwrap();
    assert_eq!((records.len(), records[0].cookie_counter, records[0].flags), (2, 1, 0));
}

#[test]
fn a_lock_that_never_comes_free_is_an_error() {
    let (_memory, engine) = held();
    let host = Witness { id: 5, ..Witness::default() };
    assert_eq!(engine.register(&host, REGION, 2), Err(RegisterError::Broken));
    assert_eq!(engine.unregister(&host, 1), Err(UnregisterError::Broken));
    assert_eq!(engine.read(&host, 1, &mut Buffer::default()), Err(ReadError::Broken));
    assert!(engine.may_hit(REGION), "recording needs no lock");
    engine.record(REGION);
    assert_eq!(engine.counter(), 1);
}

#[test]
fn a_thread_without_id_is_refused() {
    let memory = Memory::private();
    let engine = memory.create();
    assert_eq!(engine.register(&Witness::default(), REGION, 2), Err(RegisterError::Broken));
}

#[test]
fn recording_next_to_a_stopped_writer_falls_back_in_bounded_time() {
    let (memory, engine) = held();
    memory.word(core::mem::offset_of!(Header, sequence)).fetch_add(1, Relaxed);
    let began = std::time::Instant::now();
    assert_eq!(engine.record(REGION), crate::Recorded::Everything);
    assert!(engine.may_hit(PageRange::new(0x8000, 0x9000)), "it can't tell");
    assert!(began.elapsed() < std::time::Duration::from_secs(1));
    assert_eq!(engine.statistics().everything(Reason::IndexBusy), 1);
    assert!(engine.is_readable());
}
