//! Memory for arenas.
#![allow(unsafe_code)]

use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicU64;

use crate::{ARENA_BYTES, BadArena, Engine};

const LEN: usize = ARENA_BYTES + 4096;

/// An arena and, behind it, its counter page.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
}

// SAFETY: it owns its mapping.
unsafe impl Send for Memory {}
// SAFETY: it hands out engines only, which use atomics.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(flags: i32, fd: i32) -> Self {
        // SAFETY: a new mapping.
        let base = unsafe {
            libc::mmap(
                null_mut(),
                LEN,
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_NORESERVE,
                fd,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        // SAFETY: the mapping made above.
        unsafe { libc::madvise(base, LEN, libc::MADV_NOHUGEPAGE) };
        Self { base: NonNull::new(base.cast()).expect("mmap gave address 0") }
    }

    /// Zeroed memory of this process alone.
    pub(crate) fn private() -> Self {
        Self::map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// The same zeroed memory at two addresses.
    pub(crate) fn twice() -> (Self, Self) {
        // SAFETY: plain system calls; the descriptor is closed once, after both mappings.
        unsafe {
            let fd = libc::memfd_create(c"arena".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0 && libc::ftruncate(fd, LEN as i64) == 0);
            let both = (Self::map(libc::MAP_SHARED, fd), Self::map(libc::MAP_SHARED, fd));
            libc::close(fd);
            both
        }
    }

    fn counter(&self) -> NonNull<AtomicU64> {
        // SAFETY: inside the mapping.
        unsafe { self.base.add(ARENA_BYTES) }.cast()
    }

    /// The counter, for somebody who counts without the engine.
    pub(crate) fn counter_word(&self) -> &AtomicU64 {
        self.word(ARENA_BYTES)
    }

    pub(crate) fn try_create(&self) -> Result<Engine, BadArena> {
        // SAFETY: the mapping outlives the tests' engines, and is touched through atomics.
        unsafe { Engine::create(self.base, ARENA_BYTES, self.counter()) }
    }

    pub(crate) fn create(&self) -> Engine {
        self.try_create().expect("memory isn't zeroed")
    }

    pub(crate) fn try_attach(&self) -> Result<Engine, BadArena> {
        // SAFETY: as above.
        unsafe { Engine::attach(self.base, ARENA_BYTES, self.counter()) }
    }

    pub(crate) fn attach(&self) -> Engine {
        self.try_attach().expect("no arena")
    }

    /// Zeroes private memory.
    pub(crate) fn zero(&self) {
        // SAFETY: our own mapping; no reference into it is held across the call.
        unsafe { libc::madvise(self.base.as_ptr().cast(), LEN, libc::MADV_DONTNEED) };
    }

    /// A word of the memory.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= LEN && offset.is_multiple_of(8));
        // SAFETY: inside the mapping and aligned.
        unsafe { self.base.add(offset).cast::<AtomicU64>().as_ref() }
    }

    /// Pages of the arena that are in memory.
    pub(crate) fn resident_pages(&self) -> usize {
        let mut map = std::vec![0u8; ARENA_BYTES / 4096];
        // SAFETY: our own mapping; the vector has a byte for each page.
        let result = unsafe { libc::mincore(self.base.as_ptr().cast(), ARENA_BYTES, map.as_mut_ptr()) };
        assert_eq!(result, 0);
        map.iter().filter(|&&byte| byte & 1 != 0).count()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.base.as_ptr().cast(), LEN) };
    }
}

/// A forked process.
#[derive(Debug)]
pub(crate) struct Child {
    pid: i32,
    status: std::cell::Cell<Option<i32>>,
}

impl Child {
    /// Runs `body` in a forked process; it must not allocate much or take locks, for other threads of the tests
    /// may have held them.
    pub(crate) fn start(body: impl FnOnce() -> bool) -> Self {
        // SAFETY: the child runs the body, which is made for it, and ends without returning.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            // SAFETY: ends the process.
            unsafe { libc::_exit(if matches!(result, Ok(true)) { 0 } else { 1 }) };
        }
        Self { pid, status: std::cell::Cell::new(None) }
    }

    fn reap(&self, flags: i32) -> bool {
        if self.status.get().is_none() {
            let mut status = 0;
            // SAFETY: our own child.
            if unsafe { libc::waitpid(self.pid, &mut status, flags) } == self.pid {
                self.status.set(Some(status));
            }
        }
        self.status.get().is_some()
    }

    pub(crate) fn ended(&self) -> bool {
        self.reap(libc::WNOHANG)
    }

    pub(crate) fn succeeded(&self) -> bool {
        self.reap(0) && self.status.get() == Some(0)
    }

    /// Kills it and waits for its end; false if it had ended before.
    pub(crate) fn kill(&self) -> bool {
        // SAFETY: our own child, which wasn't waited for.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        self.reap(0) && self.status.get() == Some(libc::SIGKILL)
    }
}
