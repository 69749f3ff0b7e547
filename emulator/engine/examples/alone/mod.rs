//! An engine that one thread of one process uses, for measurements.

use std::hint::black_box;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicU32;

use ummunotify_engine::{ARENA_BYTES, Engine, Event, Host, Port};

/// Bytes.
pub const PAGE: u64 = 4096;

/// The only thread.
pub struct Alone;

impl Host for Alone {
    fn id(&self) -> u32 {
        1
    }
    fn wait(&self, _: &AtomicU32, _: u32) {}
    fn wake(&self, _: &AtomicU32) {}
    fn gone(&self, _: u32) -> bool {
        false
    }
}

/// Takes all records.
pub struct Sink;

impl Port for Sink {
    type Error = ();
    fn deliver(&mut self, records: &[Event]) -> Result<(), ()> {
        black_box(records);
        Ok(())
    }
    fn settle(&mut self, _: &Engine, _: bool) {}
}

/// A new one, without regions.
pub fn engine() -> Engine {
    let len = ARENA_BYTES + PAGE as usize;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, which stays; the counter's page lies behind the arena.
    unsafe {
        let base = libc::mmap(null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(base, libc::MAP_FAILED);
        let arena = NonNull::new(base.cast::<u8>()).expect("mmap gave address 0");
        Engine::create(arena, ARENA_BYTES, arena.add(ARENA_BYTES).cast()).expect("zeroed memory")
    }
}
