//! Telling an address space from its forked copies, without any hook in fork.
//!
//! One page of ours is marked MADV_WIPEONFORK (Linux 4.14): the copy that fork makes of it is zero. So a zero
//! word means "a copy that hasn't looked yet", and threads, vfork and CLONE_VM children, which share the page,
//! are the same owner. What a copy must not inherit lies on that page: the generation that owns contexts, the
//! lock of activation, which another thread may have held at the time of the fork, and the list of contexts whose
//! invalidations our own threads record.
//!
//! The page is part of our image, so that code finds it without reading where it is.

use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::inline::List;
use crate::sys;

/// The page.
#[repr(C, align(4096))]
pub struct Page {
    /// Which address space this is, among those that descend from each other by fork; never 0 once looked at.
    generation: AtomicU32,
    /// The process of it, so that a vfork child, whose descriptors aren't ours, can be told; 0 if unknown.
    process: AtomicU32,
    /// The process that opened the device first in this address space; 0 if none did.
    opener: AtomicU32,
    /// Token of the supervisor of this address space, where no filter tells it; 0 if there is none.
    supervisor: AtomicU64,
    /// Thread id of who opens the device, 0 if nobody.
    opening: AtomicU32,
    /// See [`crate::inline`].
    pub list: List,
}

const _: () = assert!(size_of::<Page>() == 4096);

/// In the part of the image that no file lies behind: only such memory can be wiped on fork.
pub static PAGE: Page = Page {
    generation: AtomicU32::new(0),
    process: AtomicU32::new(0),
    opener: AtomicU32::new(0),
    supervisor: AtomicU64::new(0),
    opening: AtomicU32::new(0),
    list: List::new(),
};
/// 1 once the page is marked.
static MARKED: AtomicU32 = AtomicU32::new(0);
/// Inherited by copies, so that each takes a number that none of its ancestors had.
static LAST_GENERATION: AtomicU32 = AtomicU32::new(0);

/// Marks the page if it isn't yet.
///
/// # Errors
/// The errno of madvise.
pub fn ensure() -> Result<&'static Page, c_int> {
    if let Some(page) = page() {
        return Ok(page);
    }
    match sys::madvise((&raw const PAGE) as usize, 4096, libc::MADV_WIPEONFORK) {
        0 => {
            MARKED.store(1, Ordering::Release);
            Ok(&PAGE)
        }
        failed => Err(-failed as c_int),
    }
}

fn page() -> Option<&'static Page> {
    (MARKED.load(Ordering::Acquire) != 0).then_some(&PAGE)
}

/// The generation of this address space; 0 while there is no page, so no context either.
pub fn generation() -> u32 {
    let Some(page) = page() else { return 0 };
    match page.generation.load(Ordering::Acquire) {
        0 => claim(page),
        generation => generation,
    }
}

#[cold]
fn claim(page: &Page) -> u32 {
    let new = LAST_GENERATION.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
    match page.generation.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            page.process.store(sys::getpid(), Ordering::Release);
            new
        }
        Err(theirs) => theirs,
    }
}

/// The caller's process is the first of this address space to open the device.
pub fn be_opener() {
    PAGE.opener.store(sys::getpid(), Ordering::Release);
}

/// True if the caller is known to be a task of another process than the one that opened the device first in this
/// address space: a vfork child of it, for one.
pub fn is_guest() -> bool {
    match PAGE.opener.load(Ordering::Acquire) {
        0 => false,
        opener => opener != sys::getpid(),
    }
}

/// True if the caller's descriptors are those that the descriptor table speaks of: false in a vfork child,
/// which shares our memory but not our descriptors. When it can't be told: false, then nothing is remembered.
pub fn at_home() -> bool {
    if generation() == 0 && ensure().is_err() {
        return false;
    }
    generation();
    page().is_some_and(|page| page.process.load(Ordering::Acquire) == sys::getpid())
}

/// Held by the one thread that opens the device. Its holder has all signals blocked.
pub struct Opening(&'static Page);

impl Opening {
    /// Waits until nobody else opens.
    ///
    /// # Errors
    /// See [`ensure`].
    pub fn begin() -> Result<Self, c_int> {
        let page = ensure()?;
        generation();
        let me = sys::gettid();
        loop {
            match page.opening.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(Self(page)),
                // A vfork child that was killed while it held the lock: its parent goes on without it.
                Err(holder) if sys::no_such_task(holder) => {
                    let _ = page.opening.compare_exchange(holder, 0, Ordering::AcqRel, Ordering::Relaxed);
                }
                Err(holder) => sys::futex_wait(page.opening.as_ptr(), holder, 10_000_000),
            }
        }
    }
}

impl Opening {
    /// The supervisor that an earlier open of this address space started without a filter; 0 if none.
    pub fn supervisor(&self) -> u64 {
        self.0.supervisor.load(Ordering::Acquire)
    }

    /// Remembers it.
    pub fn set_supervisor(&self, token: u64) {
        self.0.supervisor.store(token, Ordering::Release);
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.opening.store(0, Ordering::Release);
        sys::futex_wake(self.0.opening.as_ptr());
    }
}
