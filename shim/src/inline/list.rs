//! The contexts of this address space whose invalidations our threads record, on the page that fork wipes.
//!
//! Whoever changes it makes the generation odd first, and whoever reads it takes nothing from a list whose
//! generation is odd or has moved: the call is trapped then. An arena that was listed stays mapped for good, or
//! until another context's is mapped in its place, since a thread may still be looking at it. Looking at the wrong
//! one does no harm: it hits regions too many, and none were there when that thread's call began.

use core::ffi::c_int;
use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use ummunotify_abi::PageRange;
use ummunotify_engine::{Engine, Look};
use ummunotify_inline::has_large_page;

use super::FULL;
use crate::owner::PAGE;
use crate::sys;

/// Contexts that can be listed.
const ROOM: usize = 64;
/// How often a list that moves is tried, with a [`pause`] between.
const PATIENCE: u32 = 1000;
/// Mappings that wait to be used again.
const SPARE: usize = ROOM;

/// See the module.
#[repr(C, align(64))]
pub struct List {
    generation: AtomicU64,
    count: AtomicU32,
    /// [`MUNMAP_HITS`].
    flags: AtomicU32,
    entries: [Entry; ROOM],
    spare: [Place; SPARE],
}

/// Offset of the generation.
pub const GENERATION: usize = offset_of!(List, generation);
/// Offset of the first context's arena.
pub const FIRST_ARENA: usize =
    offset_of!(List, entries) + offset_of!(Entry, place) + offset_of!(Place, arena);

/// A listed context.
#[repr(C)]
pub struct Entry {
    place: Place,
    /// Of its pipe.
    inode: AtomicU64,
}

/// Where a context is mapped; the arena is 0 where none is.
#[repr(C)]
struct Place {
    arena: AtomicUsize,
    counter: AtomicUsize,
}

/// What a munmap invalidates is the range and nothing else, whatever memory lies there.
pub const MUNMAP_HITS: u32 = 1;

impl Place {
    const fn new() -> Self {
        Self { arena: AtomicUsize::new(0), counter: AtomicUsize::new(0) }
    }

    fn engine(&self) -> Option<Engine> {
        let arena = NonNull::new(self.arena.load(Ordering::Acquire) as *mut u8)?;
        let counter = NonNull::new(self.counter.load(Ordering::Acquire) as *mut AtomicU64)?;
        // SAFETY: what was listed was attached before, and stays mapped (see the module).
        Some(unsafe { Engine::again(arena, counter) })
    }

    #[inline(always)]
    fn look(&self) -> Option<Look> {
        let arena = NonNull::new(self.arena.load(Ordering::Acquire) as *mut u8)?;
        // SAFETY: as above.
        Some(unsafe { Look::again(arena) })
    }

    fn set(&self, arena: usize, counter: usize) {
        self.arena.store(arena, Ordering::Release);
        self.counter.store(counter, Ordering::Release);
    }

    fn get(&self) -> (usize, usize) {
        (self.arena.load(Ordering::Acquire), self.counter.load(Ordering::Acquire))
    }
}

impl Entry {
    /// The context's engine.
    pub fn engine(&self) -> Option<Engine> {
        self.place.engine()
    }

    /// The same, to look alone.
    #[inline(always)]
    pub fn look(&self) -> Option<Look> {
        self.place.look()
    }

    /// The inode of the context's pipe.
    pub fn inode(&self) -> u64 {
        self.inode.load(Ordering::Acquire)
    }
}

impl List {
    /// An empty one, as fork makes it.
    pub const fn new() -> Self {
        Self {
            generation: AtomicU64::new(0),
            count: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            entries: [const { Entry { place: Place::new(), inode: AtomicU64::new(0) } }; ROOM],
            spare: [const { Place::new() }; SPARE],
        }
    }

    /// Moves whenever the list changes; odd while it does.
    #[inline(always)]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// How many contexts are listed.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// The context of that number, below [`List::count`].
    #[inline(always)]
    pub fn entry(&self, n: u32) -> Option<&Entry> {
        self.entries.get(n as usize)
    }

    /// Whether a munmap of that range, if it hits, may be recorded here: it invalidates the range and nothing else.
    pub fn records_munmap(&self, range: PageRange) -> bool {
        self.flags.load(Ordering::Acquire) & MUNMAP_HITS != 0 || !has_large_page(range)
    }

    /// Looks at the list until it has kept still meanwhile. One that a killed thread has left odd is looked at as it is,
    /// in the end.
    pub fn settled(&self, mut look: impl FnMut(u64, &Self)) {
        for _ in 0..PATIENCE {
            let now = self.generation();
            look(now, self);
            if now & 1 == 0 && self.generation() == now {
                return;
            }
            pause();
        }
    }

    /// Changes the list. `None`, and nothing is changed, if another thread has been at it for too long: one that
    /// was killed meanwhile (a vfork child can be) leaves it odd for ever, and all calls to the traps.
    fn change<T>(&self, change: impl FnOnce(&Self) -> T) -> Option<T> {
        for _ in 0..PATIENCE {
            let now = self.generation();
            let free = now & 1 == 0;
            if free
                && self.generation.compare_exchange(now, now + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok()
            {
                let result = change(self);
                self.generation.store(now + 2, Ordering::SeqCst);
                return Some(result);
            }
            pause();
        }
        None
    }
}

/// 0.1 ms.
fn pause() {
    let pause = libc::timespec { tv_sec: 0, tv_nsec: 100_000 };
    // SAFETY: a timespec of ours.
    unsafe { sys::call(libc::SYS_nanosleep, &raw const pause as usize, 0, 0, 0, 0, 0) };
}

/// Lists a context. The caller has all signals blocked.
///
/// # Errors
/// ENFILE if there is no room.
pub fn add(arena: usize, counter: usize, inode: u64, flags: u32) -> Result<(), c_int> {
    let added = PAGE.list.change(|list| {
        let count = list.count();
        let entry = list.entry(count)?;
        entry.place.set(arena, counter);
        entry.inode.store(inode, Ordering::Release);
        list.flags.store(flags, Ordering::Release);
        list.count.store(count + 1, Ordering::Release);
        Some(())
    });
    added.flatten().ok_or(FULL)
}

/// Takes a context off the list; its mappings are to be given to [`keep`]. The caller has all signals blocked.
pub fn remove(arena: usize) {
    PAGE.list.change(|list| {
        let count = list.count();
        let Some(at) = (0..count).find(|&n| list.entry(n).is_some_and(|entry| entry.place.get().0 == arena))
        else {
            return;
        };
        let (Some(entry), Some(last)) = (list.entry(at), list.entry(count - 1)) else { return };
        let (last_arena, last_counter) = last.place.get();
        entry.place.set(last_arena, last_counter);
        entry.inode.store(last.inode(), Ordering::Release);
        list.count.store(count - 1, Ordering::Release);
    });
}

/// Keeps the mappings of a context that was listed for another to be mapped over, by whoever comes first: the caller
/// has nothing to do with them any more. The caller has all signals blocked.
pub fn keep(arena: usize, counter: usize) {
    PAGE.list.change(|list| {
        // Without room they stay mapped and unused.
        if let Some(spare) = list.spare.iter().find(|place| place.get().0 == 0) {
            spare.set(arena, counter);
        }
    });
}

/// Addresses of an arena and a counter that were listed before, to map others over. The caller has all signals
/// blocked.
pub fn take_spare() -> Option<(usize, usize)> {
    let taken = PAGE.list.change(|list| {
        let spare = list.spare.iter().find(|place| place.get().0 != 0)?;
        let taken = spare.get();
        spare.set(0, 0);
        Some(taken)
    });
    taken.flatten()
}
