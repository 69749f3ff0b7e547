//! What the engine needs of a client thread.

use core::sync::atomic::AtomicU32;

use ummunotify_abi::wire::SUPERVISOR_LOCK_ID;
use ummunotify_engine::Host;

use crate::section::Section;
use crate::{bell, sys, table};

/// The calling thread.
pub struct ClientHost {
    id: u32,
}

impl ClientHost {
    /// The calling thread.
    pub fn new() -> Self {
        Self { id: sys::gettid() }
    }

    /// The same without asking the kernel, as a rule.
    #[inline(always)]
    pub fn inside(section: &Section) -> Self {
        Self { id: section.task() }
    }
}

impl Host for ClientHost {
    fn id(&self) -> u32 {
        self.id
    }

    fn wait(&self, word: &AtomicU32, seen: u32) {
        sys::futex_wait(word.as_ptr(), seen, 10_000_000);
    }

    fn wake(&self, word: &AtomicU32) {
        sys::futex_wake(word.as_ptr());
    }

    fn is_client(&self) -> bool {
        true
    }

    fn gone(&self, id: u32) -> bool {
        // A supervisor's thread can be of a pid namespace that we don't see.
        id & SUPERVISOR_LOCK_ID == 0 && sys::no_such_task(id)
    }

    fn has_abandoned(&self, lock: &AtomicU32, id: u32) -> bool {
        // It closes the pipe by its end alone. Where no number is known to be the context's, it isn't known to be dead.
        id & SUPERVISOR_LOCK_ID != 0 && table::holder(lock.as_ptr() as usize).is_some_and(bell::is_abandoned)
    }
}
