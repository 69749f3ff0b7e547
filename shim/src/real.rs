//! The next definition of each function that we define ourselves: libc's, or another hooker's.
//!
//! They are found by `dlsym(RTLD_NEXT)` and not called as raw system calls, which would bypass sanitizers'
//! interceptors and thread cancellation.

use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::sys;

// The default version of dlsym is GLIBC_2.34 on a build host that new; with it the library wouldn't load on an
// older one. The old name is kept by every glibc, in libdl before 2.34 (see build.rs).
core::arch::global_asm!(
    ".symver ummunotify_dlsym, dlsym@GLIBC_2.2.5",
    ".symver ummunotify_dlvsym, dlvsym@GLIBC_2.2.5",
);

unsafe extern "C" {
    fn ummunotify_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn ummunotify_dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// One next definition.
pub struct Next {
    name: &'static CStr,
    address: AtomicUsize,
}

/// [`Next::address`] of a function that doesn't exist.
const MISSING: usize = 1;

/// Thread that is inside dlsym. dlsym may allocate, and an allocator preloaded in front may map memory: that
/// call comes back to us.
static RESOLVING: AtomicUsize = AtomicUsize::new(0);

impl Next {
    /// The function of that name.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicUsize::new(0) }
    }

    /// Its address; `None` if it doesn't exist or is being looked for by this very thread: the caller then
    /// makes the system call itself.
    #[inline(always)]
    pub fn get(&self) -> Option<usize> {
        match self.address.load(Ordering::Relaxed) {
            0 => self.resolve(),
            MISSING => None,
            address => Some(address),
        }
    }

    /// The same if it has been found before.
    #[inline(always)]
    pub fn found(&self) -> Option<usize> {
        let address = self.address.load(Ordering::Relaxed);
        (address > MISSING).then_some(address)
    }

    #[cold]
    #[inline(never)]
    fn resolve(&self) -> Option<usize> {
        let me = sys::thread_pointer();
        let before = RESOLVING.swap(me, Ordering::AcqRel);
        if before == me {
            return None;
        }
        // SAFETY: terminated names. RTLD_NEXT is judged by the caller's address, which is here.
        let mut found = unsafe { ummunotify_dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if found.is_null() {
            // dlsym finds default versions only; __xstat and its kin have none since glibc 2.33.
            // SAFETY: as above.
            found =
                unsafe { ummunotify_dlvsym(libc::RTLD_NEXT, self.name.as_ptr(), c"GLIBC_2.2.5".as_ptr()) };
        }
        // Another thread may have come in between: then its own mark goes too early, and at worst it asks once
        // more.
        RESOLVING.store(0, Ordering::Release);
        let address = if found.is_null() { MISSING } else { found as usize };
        self.address.store(address, Ordering::Relaxed);
        (address != MISSING).then_some(address)
    }
}

/// Calls the next definition of a function: `next!(NAME as fn type; arguments; otherwise)`, where the last
/// is evaluated if there is none; `next!(in ADDRESS => as ...)` where [`Next`] was asked for it already.
#[macro_export]
macro_rules! next {
    ($name:literal as fn($($kind:ty),* $(; $($variadic:ty),*)?) -> $result:ty; ($($argument:expr),*), ($($tail:expr),*); $otherwise:expr) => {{
        static NEXT: $crate::real::Next = $crate::real::Next::new($name);
        match NEXT.get() {
            Some(address) => {
                type Function = unsafe extern "C" fn($($kind),*, ...) -> $result;
                // SAFETY: the function found by this name has this type; the arguments are the caller's own.
                unsafe { core::mem::transmute::<usize, Function>(address)($($argument),*, $($tail),*) }
            }
            None => $otherwise,
        }
    }};
    ($name:literal as fn($($kind:ty),*) -> $result:ty; ($($argument:expr),*); $otherwise:expr) => {{
        static NEXT: $crate::real::Next = $crate::real::Next::new($name);
        $crate::next!(in NEXT.get() => as fn($($kind),*) -> $result; ($($argument),*); $otherwise)
    }};
    (in $address:expr => as fn($($kind:ty),*) -> $result:ty; ($($argument:expr),*); $otherwise:expr) => {
        match $address {
            Some(address) => {
                type Function = unsafe extern "C" fn($($kind),*) -> $result;
                // SAFETY: the function found by this name has this type; the arguments are the caller's own.
                unsafe { core::mem::transmute::<usize, Function>(address)($($argument),*) }
            }
            None => $otherwise,
        }
    };
}
