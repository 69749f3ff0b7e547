//! The surroundings that the engine asks the supervisor for.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use ummunotify_engine::Host;
use ummunotify_sys::process;

use super::context::Context;
use super::space::Space;
use super::task;

/// Set in every lock id of the supervisor: its thread ids and a client's can be of different pid namespaces,
/// and must never look the same. Thread ids stay below 2^22 (proc(5), pid_max).
pub const SUPERVISOR_ID: u32 = ummunotify_abi::wire::SUPERVISOR_LOCK_ID;

/// The supervisor as a user of one context.
#[derive(Debug)]
pub struct SupervisorHost {
    space: Arc<Space>,
    context: Arc<Context>,
    same_namespace: bool,
}

impl SupervisorHost {
    /// For a context of `space`.
    pub fn new(space: Arc<Space>, context: Arc<Context>) -> Self {
        let same_namespace = task::in_our_pid_namespace(space.pid);
        Self { space, context, same_namespace }
    }

    /// For a context whose arena no client maps: the lock is always our own.
    pub fn alone(space: Arc<Space>, context: Arc<Context>) -> Self {
        Self { space, context, same_namespace: false }
    }
}

impl Host for SupervisorHost {
    fn id(&self) -> u32 {
        process::gettid() | SUPERVISOR_ID
    }

    fn wait(&self, word: &AtomicU32, seen: u32) {
        ummunotify_sys::futex::wait(word, seen, Duration::from_millis(10));
    }

    fn wake(&self, word: &AtomicU32) {
        ummunotify_sys::futex::wake(word);
    }

    fn invalidated(&self) {
        self.context.ring();
    }

    fn gone(&self, id: u32) -> bool {
        if id & SUPERVISOR_ID != 0 {
            return !process::has_thread(std::process::id(), id & !SUPERVISOR_ID);
        }
        // After the process's end or its execve no client thread that held the lock is left.
        self.space.is_gone()
            || !self.space.process_alive()
            || self.same_namespace && !process::has_thread(self.space.pid, id)
    }
}
