//! Access to the shared memory: the only module with unsafe code.
//!
//! Everything in the arena is an atomic, so a shared reference to it is sound whatever the other side writes.
//! Every number is checked before it becomes a reference.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};
use ummunotify_abi::arena::{
    ARENA_BYTES, ARENA_MAGIC, Bank, COOKIE_ENTRIES, COOKIES_MIN_LOG, COOKIES_OFFSET, FIRST_NODE, Header,
    LAYOUT_VERSION, NODES, Node, RING_CELLS, RINGS_OFFSET, SLOTS, SLOTS_OFFSET, Slot,
};

use crate::error::BadArena;
use crate::{Engine, Look};

/// A mapping of one context's arena and of its counter page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arena {
    base: NonNull<u8>,
    counter: NonNull<AtomicU64>,
}

// SAFETY: both pointers lead to memory that is mapped for as long as the value is used (promised by whoever
// called `new`) and that is accessed through atomics only.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// # Safety
    /// `base` leads to `len` bytes of readable and writable shared memory and `counter` to a counter page; both
    /// stay mapped while the value or a copy of it is used, and this process accesses them through atomics only.
    pub(crate) unsafe fn new(
        base: NonNull<u8>,
        len: usize,
        counter: NonNull<AtomicU64>,
    ) -> Result<Self, BadArena> {
        if len < ARENA_BYTES {
            return Err(BadArena::Size);
        }
        if !base.addr().get().is_multiple_of(size_of::<Node>()) || !counter.is_aligned() {
            return Err(BadArena::Alignment);
        }
        Ok(Self { base, counter })
    }

    /// Fills in the header of zeroed memory.
    pub(crate) fn format(&self) -> Result<(), BadArena> {
        let header = self.header();
        if header.magic.load(Relaxed) != 0 {
            return Err(BadArena::InUse);
        }
        header.layout.store(LAYOUT_VERSION, Relaxed);
        header.slots.store(SLOTS, Relaxed);
        header.bytes.store(ARENA_BYTES as u64, Relaxed);
        header.cookies_log.store(COOKIES_MIN_LOG, Relaxed);
        header.slots_used.store(1, Relaxed);
        header.banks[0].used.store(FIRST_NODE, Relaxed);
        header.banks[1].used.store(NODES / 2, Relaxed);
        header.magic.store(ARENA_MAGIC, Release);
        Ok(())
    }

    /// Compares magic, version and sizes.
    pub(crate) fn check(&self) -> Result<(), BadArena> {
        let header = self.header();
        if header.magic.load(Acquire) != ARENA_MAGIC {
            return Err(BadArena::Magic);
        }
        if header.layout.load(Relaxed) != LAYOUT_VERSION {
            return Err(BadArena::Version);
        }
        if header.slots.load(Relaxed) != SLOTS || header.bytes.load(Relaxed) != ARENA_BYTES as u64 {
            return Err(BadArena::Size);
        }
        Ok(())
    }

    /// `T` at `offset`; callers have checked that it lies inside the arena.
    fn at<T>(&self, offset: usize) -> &T {
        debug_assert!(offset + size_of::<T>() <= ARENA_BYTES && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: private to this module, called with types made of atomics alone, at an offset that lies inside
        // the ARENA_BYTES mapped bytes and is a multiple of the type's alignment; the base is aligned to 512.
        unsafe { self.base.add(offset).cast::<T>().as_ref() }
    }

    #[inline]
    pub(crate) fn header(&self) -> &Header {
        self.at(0)
    }

    /// The generation counter.
    #[inline]
    pub(crate) fn counter(&self) -> &AtomicU64 {
        // SAFETY: mapped and aligned, see `new`.
        unsafe { self.counter.as_ref() }
    }

    /// The bank that holds the index now.
    #[inline]
    pub(crate) fn bank(&self) -> &Bank {
        let header = self.header();
        &header.banks[(header.bank.load(Relaxed) & 1) as usize]
    }

    #[inline]
    pub(crate) fn slot(&self, n: u32) -> Option<&Slot> {
        (n != 0 && n < SLOTS).then(|| self.at(SLOTS_OFFSET + n as usize * size_of::<Slot>()))
    }

    #[inline]
    pub(crate) fn node(&self, n: u32) -> Option<&Node> {
        (FIRST_NODE..NODES).contains(&n).then(|| self.at(n as usize * size_of::<Node>()))
    }

    /// An entry of the cookie tables.
    #[inline]
    pub(crate) fn cookie(&self, n: usize) -> Option<&AtomicU32> {
        (n < COOKIE_ENTRIES).then(|| self.at(COOKIES_OFFSET + n * size_of::<AtomicU32>()))
    }

    /// A cell of the rings.
    #[inline]
    pub(crate) fn cell(&self, n: usize) -> Option<&AtomicU64> {
        (n < RING_CELLS).then(|| self.at(RINGS_OFFSET + n * size_of::<AtomicU64>()))
    }
}

impl Engine {
    /// Makes an arena of zeroed memory.
    ///
    /// # Safety
    /// `arena` leads to `len` bytes of readable and writable shared memory, `counter` to a writable counter
    /// page. Both stay mapped while the engine or a copy of it is used, and this process accesses them through
    /// engines and atomics only.
    pub unsafe fn create(
        arena: NonNull<u8>,
        len: usize,
        counter: NonNull<AtomicU64>,
    ) -> Result<Self, BadArena> {
        // SAFETY: promised by the caller.
        let arena = unsafe { Arena::new(arena, len, counter) }?;
        arena.format()?;
        Ok(Self { arena })
    }

    /// Uses an arena that was made by [`Engine::create`], here or in another process.
    ///
    /// # Safety
    /// As for [`Engine::create`]. Other processes may write anything at any time.
    pub unsafe fn attach(
        arena: NonNull<u8>,
        len: usize,
        counter: NonNull<AtomicU64>,
    ) -> Result<Self, BadArena> {
        // SAFETY: promised by the caller.
        let arena = unsafe { Arena::new(arena, len, counter) }?;
        arena.check()?;
        Ok(Self { arena })
    }
    /// Uses an arena that was attached before in this process, without looking at it.
    ///
    /// # Safety
    /// As for [`Engine::attach`], which has accepted these very addresses, or zeroed memory of that size was put in
    /// the arena's place: that is an arena without regions.
    #[inline(always)]
    pub unsafe fn again(arena: NonNull<u8>, counter: NonNull<AtomicU64>) -> Self {
        Self { arena: Arena { base: arena, counter } }
    }
}

impl Look {
    /// The part of such an engine that needs no counter.
    ///
    /// # Safety
    /// As for [`Engine::again`].
    #[inline(always)]
    pub unsafe fn again(arena: NonNull<u8>) -> Self {
        // Nothing that looks touches it.
        Self { arena: Arena { base: arena, counter: NonNull::dangling() } }
    }
}
