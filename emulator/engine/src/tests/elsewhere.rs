//! What a client's threads may not do themselves.

use core::sync::atomic::{AtomicU32, Ordering};

use ummunotify_abi::arena::{ELSEWHERE_FAULT, ELSEWHERE_KMOD};

use super::memory::Memory;
use super::{Buffer, ME, Thread, read};
use crate::{Host, PageRange, ReadError, RegisterError, Stuck, UnregisterError};

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
        self.0.wait(word, seen);
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
    assert_eq!(engine.unregister(&CLIENT, 1), Err(UnregisterError::Elsewhere));
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
    assert_eq!(engine.unregister(&CLIENT, 1), Err(UnregisterError::Elsewhere));
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
                                Ok(()) => live.fetch_sub(1, Ordering::AcqRel),
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
