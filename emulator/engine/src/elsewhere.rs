//! A context whose calls the opener's threads may not answer themselves for a while, since the supervisor has to
//! see them: it keeps the kernel module's regions, or something armed on them, in step with the arena's.
//!
//! The flags change under the lock. So whoever sets one knows that every earlier call of a client is complete in
//! the arena, and that no later one gets in.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::Engine;
use crate::arena::Arena;
use crate::error::Stuck;
use crate::host::Host;
use crate::lock::{lock, release};

/// Whether one of the flags stands. Under the lock.
pub(crate) fn is_set(arena: &Arena, flags: u32) -> bool {
    arena.header().elsewhere.load(Relaxed) & flags != 0
}

impl Engine {
    /// Sets flags of [`Header::elsewhere`](ummunotify_abi::arena::Header::elsewhere): from the return on, the
    /// opener's threads are turned away from what they name; what they did before is done.
    ///
    /// # Errors
    /// The lock doesn't come free; the flags are as they were.
    pub fn set_elsewhere(&self, host: &impl Host, flags: u32) -> Result<(), Stuck> {
        let arena = self.arena();
        let guard = lock(arena, host)?;
        arena.header().elsewhere.fetch_or(flags, AcqRel);
        release(arena, host, guard);
        Ok(())
    }

    /// Takes flags back: from the return on, nobody is turned away on their account.
    ///
    /// # Errors
    /// As [`Engine::set_elsewhere`].
    pub fn clear_elsewhere(&self, host: &impl Host, flags: u32) -> Result<(), Stuck> {
        let arena = self.arena();
        let guard = lock(arena, host)?;
        arena.header().elsewhere.fetch_and(!flags, AcqRel);
        release(arena, host, guard);
        Ok(())
    }

    /// The flags as they stand now. Who decides by them must hold off who changes them.
    pub fn elsewhere(&self) -> u32 {
        self.arena().header().elsewhere.load(Acquire)
    }
}
