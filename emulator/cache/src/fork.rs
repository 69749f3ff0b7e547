//! Whether this is the process that it was: a forked child must not give back what its parent registered.

#[cfg(not(shuttle))]
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};

/// A byte that is 1 in the process that made it, and in whoever shares its memory, and 0 in a forked child: the kernel
/// clears it (`MADV_WIPEONFORK`, Linux 4.14).
#[cfg(not(shuttle))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner(&'static AtomicU8);

#[cfg(not(shuttle))]
impl Owner {
    /// The calling process.
    ///
    /// # Errors
    /// No memory, or a kernel that is too old.
    pub(crate) fn this() -> std::io::Result<Self> {
        // No lock: another thread may have held it when this process was forked.
        static BYTE: AtomicPtr<AtomicU8> = AtomicPtr::new(core::ptr::null_mut());
        let known = BYTE.load(Acquire);
        // SAFETY: null, or from `wiped_byte` in this process or one that it was forked from, hence mapped for good.
        if let Some(byte) = unsafe { known.as_ref() }.filter(|byte| byte.load(Relaxed) == 1) {
            return Ok(Self(byte));
        }
        // Also in a child that makes a cache of its own: its parent's byte is 0 there, and stays it.
        let byte = wiped_byte()?;
        byte.store(1, Relaxed);
        // Who is second at this moment keeps a page of its own.
        let _ = BYTE.compare_exchange(known, core::ptr::from_ref(byte).cast_mut(), AcqRel, Relaxed);
        Ok(Self(byte))
    }

    #[inline(always)]
    pub(crate) fn is_gone(self) -> bool {
        self.0.load(Relaxed) == 0
    }
}

/// A byte on a page of its own, mapped for good.
#[cfg(not(shuttle))]
fn wiped_byte() -> std::io::Result<&'static AtomicU8> {
    let page = ummunotify_abi::range::PAGE_SIZE as usize;
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let at = unsafe { libc::mmap(core::ptr::null_mut(), page, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the page that was mapped just now.
    if unsafe { libc::madvise(at, page, libc::MADV_WIPEONFORK) } != 0 {
        let error = std::io::Error::last_os_error();
        // SAFETY: as above; nobody knows it yet.
        unsafe { libc::munmap(at, page) };
        return Err(error);
    }
    // SAFETY: mapped, zero, aligned, and never unmapped from here on.
    Ok(unsafe { &*at.cast::<AtomicU8>() })
}

/// A model checker has no processes.
#[cfg(shuttle)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner;

#[cfg(shuttle)]
impl Owner {
    pub(crate) fn this() -> std::io::Result<Self> {
        Ok(Self)
    }

    pub(crate) fn is_gone(self) -> bool {
        false
    }
}
