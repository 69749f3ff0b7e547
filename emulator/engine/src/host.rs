//! What the engine needs of its surroundings, since it makes no system call.

use core::sync::atomic::AtomicU32;
use ummunotify_abi::device::Event;

use crate::Engine;

/// The caller's thread and how it sleeps.
///
/// The engine's lock belongs to threads. A caller whose signal handlers may call [`Engine::register`],
/// [`Engine::unregister`] or [`Engine::read`] on the same context blocks signals around these calls: a handler
/// that finds its own thread's lock takes it over (it can't tell the interrupted call from one that was left by
/// siglongjmp), which invalidates everything. Recording needs no such care.
pub trait Host {
    /// Kernel thread id of the caller, never 0, below 2^31.
    fn id(&self) -> u32;
    /// Sleeps for a bounded time (at most 10 ms) while `*word == seen`; a shared futex.
    fn wait(&self, word: &AtomicU32, seen: u32);
    /// Wakes those who sleep on `word`, at least one.
    fn wake(&self, word: &AtomicU32);
    /// True only if that thread is proven dead.
    fn gone(&self, id: u32) -> bool;
    /// As [`Host::gone`], told the `lock` that the thread holds: for who knows of its process only by what the arena
    /// belongs to.
    fn has_abandoned(&self, lock: &AtomicU32, id: u32) -> bool {
        let _ = (lock, id);
        false
    }
    /// True for the opener's own threads: what [`Header::elsewhere`](ummunotify_abi::arena::Header::elsewhere) names
    /// isn't theirs to do. The supervisor is never turned away.
    fn is_client(&self) -> bool {
        false
    }
    /// Called after a register, unregister or read that found everything invalid or made it so, for example
    /// because it took the lock over from a dead thread: the counter may have moved without a recorder, so the
    /// descriptor must become readable. Not under the lock.
    fn invalidated(&self) {}
}

/// Where a read's records go, and who is told whether the descriptor stays readable. Both are called while the
/// engine's lock is held: they must not call the engine but for [`Engine::is_readable`] and
/// [`Engine::counter`].
pub trait Port {
    /// Why records couldn't be delivered.
    type Error;
    /// Takes all records or none. After an error nothing was consumed.
    fn deliver(&mut self, records: &[Event]) -> Result<(), Self::Error>;
    /// The read consumed something, or found nothing to report: the descriptor now is `readable` or isn't.
    fn settle(&mut self, engine: &Engine, readable: bool);
}
