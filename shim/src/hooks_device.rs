//! ioctl, the read family, writes at an offset and mmap.

use core::ffi::{c_int, c_long, c_ulong, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::memory::Target;
use crate::real::Next;
use crate::{device, inline, next, sys, table};

/// What the hook returns for a result of the device.
fn returned(result: isize) -> isize {
    sys::libc_result(result)
}

/// ioctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if !table::is_foreign(fd)
        && let Some(result) = device::ioctl(fd, request, argument)
    {
        return returned(result) as c_int;
    }
    next!(c"ioctl" as fn(c_int, c_ulong; *mut c_void) -> c_int; (fd, request), (argument);
        // SAFETY: the application's own arguments.
        sys::libc_result(unsafe {
            sys::call(libc::SYS_ioctl, fd as usize, request as usize, argument as usize, 0, 0, 0)
        }) as c_int)
}

/// The device's answer to a read, if the descriptor is ours.
#[inline(always)]
fn read_ours(fd: c_int, target: Target) -> Option<isize> {
    if table::is_foreign(fd) { None } else { device::read(fd, target).map(returned) }
}

/// As [`read_ours`]; a driver without seeking ignores the offset, but the kernel refuses a negative one first.
#[inline(always)]
fn pread_ours(fd: c_int, target: Target, offset: c_long) -> Option<isize> {
    if table::is_foreign(fd) {
        return None;
    }
    if offset < 0 {
        let _blocked = sys::SignalsBlocked::new();
        return table::lookup(fd).map(|_| returned(-(libc::EINVAL as isize)));
    }
    read_ours(fd, target)
}

fn vector(parts: *const libc::iovec, count: c_int) -> Target {
    // A negative count is as wrong as one too large.
    Target::Vector(parts, usize::try_from(count).unwrap_or(usize::MAX))
}

static READ: Next = Next::new(c"read");

/// read(2). Programs call it most of all; on what is known to be no device it costs few instructions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, len: usize) -> isize {
    let next = if table::is_known(fd) { READ.found() } else { None };
    next!(in next => as fn(c_int, *mut c_void, usize) -> isize; (fd, buffer, len);
        // SAFETY: the application's own arguments.
        unsafe { read_perhaps(fd, buffer, len) })
}

#[inline(never)]
unsafe extern "C" fn read_perhaps(fd: c_int, buffer: *mut c_void, len: usize) -> isize {
    if let Some(result) = read_ours(fd, Target::Buffer(buffer, len)) {
        return result;
    }
    next!(in READ.get() => as fn(c_int, *mut c_void, usize) -> isize; (fd, buffer, len);
        // SAFETY: the application's own arguments.
        sys::libc_result(unsafe { sys::call(libc::SYS_read, fd as usize, buffer as usize, len, 0, 0, 0) }))
}

/// read(2) as _FORTIFY_SOURCE calls it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(fd: c_int, buffer: *mut c_void, len: usize, room: usize) -> isize {
    // libc ends the program for the other case.
    if len <= room
        && let Some(result) = read_ours(fd, Target::Buffer(buffer, len))
    {
        return result;
    }
    next!(c"__read_chk" as fn(c_int, *mut c_void, usize, usize) -> isize; (fd, buffer, len, room);
        // SAFETY: the application's own arguments.
        unsafe { read(fd, buffer, len.min(room)) })
}

/// readv(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, parts: *const libc::iovec, count: c_int) -> isize {
    if let Some(result) = read_ours(fd, vector(parts, count)) {
        return result;
    }
    next!(c"readv" as fn(c_int, *const libc::iovec, c_int) -> isize; (fd, parts, count);
    // SAFETY: the application's own arguments.
    sys::libc_result(unsafe {
        sys::call(libc::SYS_readv, fd as usize, parts as usize, count as usize, 0, 0, 0)
    }))
}

macro_rules! pread_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// pread(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(fd: c_int, buffer: *mut c_void, len: usize, offset: c_long) -> isize {
            if let Some(result) = pread_ours(fd, Target::Buffer(buffer, len), offset) {
                return result;
            }
            next!($name as fn(c_int, *mut c_void, usize, c_long) -> isize; (fd, buffer, len, offset);
                // SAFETY: the application's own arguments.
                sys::libc_result(unsafe {
                    sys::call(libc::SYS_pread64, fd as usize, buffer as usize, len, offset as usize, 0, 0)
                }))
        }
    )*};
}

pread_hooks! {
    pread c"pread";
    pread64 c"pread64";
}

macro_rules! fortified_pread_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// pread(2) as _FORTIFY_SOURCE calls it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(
            fd: c_int, buffer: *mut c_void, len: usize, offset: c_long, room: usize,
        ) -> isize {
            if len <= room
                && let Some(result) = pread_ours(fd, Target::Buffer(buffer, len), offset)
            {
                return result;
            }
            next!($name as fn(c_int, *mut c_void, usize, c_long, usize) -> isize; (fd, buffer, len, offset, room);
                // SAFETY: the application's own arguments.
                unsafe { pread64(fd, buffer, len.min(room), offset) })
        }
    )*};
}

fortified_pread_hooks! {
    __pread_chk c"__pread_chk";
    __pread64_chk c"__pread64_chk";
}

macro_rules! preadv_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// preadv(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(
            fd: c_int, parts: *const libc::iovec, count: c_int, offset: c_long,
        ) -> isize {
            if let Some(result) = pread_ours(fd, vector(parts, count), offset) {
                return result;
            }
            next!($name as fn(c_int, *const libc::iovec, c_int, c_long) -> isize; (fd, parts, count, offset);
                // SAFETY: the application's own arguments.
                sys::libc_result(unsafe {
                    sys::call(libc::SYS_preadv, fd as usize, parts as usize, count as usize, offset as usize, 0, 0)
                }))
        }
    )*};
}

preadv_hooks! {
    preadv c"preadv";
    preadv64 c"preadv64";
}

macro_rules! preadv2_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// preadv2(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(
            fd: c_int, parts: *const libc::iovec, count: c_int, offset: c_long, flags: c_int,
        ) -> isize {
            if !table::is_foreign(fd) {
                // The driver knows none of the flags but RWF_HIPRI, which asks for nothing. Offset -1: none.
                let ours = if flags & !libc::RWF_HIPRI != 0 {
                    let _blocked = sys::SignalsBlocked::new();
                    table::lookup(fd).map(|_| returned(-(libc::EOPNOTSUPP as isize)))
                } else {
                    pread_ours(fd, vector(parts, count), offset.max(offset.saturating_add(1)))
                };
                if let Some(result) = ours {
                    return result;
                }
            }
            next!($name as fn(c_int, *const libc::iovec, c_int, c_long, c_int) -> isize;
                (fd, parts, count, offset, flags);
                // SAFETY: the application's own arguments.
                sys::libc_result(unsafe {
                    sys::call(libc::SYS_preadv2, fd as usize, parts as usize, count as usize, offset as usize, 0,
                              flags as usize)
                }))
        }
    )*};
}

preadv2_hooks! {
    preadv2 c"preadv2";
    preadv64v2 c"preadv64v2";
}

/// The result of a write at an offset: a pipe refuses the offset (ESPIPE) where the device, which can't be written
/// to at all, says EBADF.
fn positioned_write(fd: c_int, before: c_int, result: isize) -> isize {
    if result < 0 && sys::errno() == libc::ESPIPE && !table::is_foreign(fd) {
        let _blocked = sys::SignalsBlocked::new();
        if table::lookup(fd).is_some() {
            sys::set_errno(before);
            return returned(-(libc::EBADF as isize));
        }
    }
    result
}

macro_rules! pwrite_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// pwrite(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(fd: c_int, buffer: *const c_void, len: usize, offset: c_long) -> isize {
            let before = sys::errno();
            let result = next!($name as fn(c_int, *const c_void, usize, c_long) -> isize; (fd, buffer, len, offset);
                // SAFETY: the application's own arguments.
                sys::libc_result(unsafe {
                    sys::call(libc::SYS_pwrite64, fd as usize, buffer as usize, len, offset as usize, 0, 0)
                }));
            positioned_write(fd, before, result)
        }
    )*};
}

pwrite_hooks! {
    pwrite c"pwrite";
    pwrite64 c"pwrite64";
}

macro_rules! pwritev_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// pwritev(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(
            fd: c_int, parts: *const libc::iovec, count: c_int, offset: c_long,
        ) -> isize {
            let before = sys::errno();
            let result = next!($name as fn(c_int, *const libc::iovec, c_int, c_long) -> isize;
                (fd, parts, count, offset);
                // SAFETY: the application's own arguments.
                sys::libc_result(unsafe {
                    sys::call(libc::SYS_pwritev, fd as usize, parts as usize, count as usize, offset as usize, 0, 0)
                }));
            positioned_write(fd, before, result)
        }
    )*};
}

pwritev_hooks! {
    pwritev c"pwritev";
    pwritev64 c"pwritev64";
}

/// The device's answer to an mmap, if the descriptor is ours; else `real` makes the call.
fn mmap_or(
    (len, protection, flags, fd, offset): (usize, c_int, c_int, c_int, c_long),
    real: impl Fn(c_int) -> *mut c_void,
) -> *mut c_void {
    if flags & libc::MAP_ANONYMOUS == 0
        && !table::is_foreign(fd)
        && let Some(mapped) = device::mmap(fd, len, protection, flags, offset, &real)
    {
        return mapped;
    }
    real(fd)
}

/// mmap by syscall(3). Not by libc's function: whoever has replaced that one (UCX's memory hooks) makes the call
/// itself by syscall(3), and would come back for ever.
pub unsafe fn mmap_by_syscall(
    at: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: c_long,
) -> *mut c_void {
    // SAFETY: the application's own arguments.
    mmap_or((len, protection, flags, fd, offset), |fd| unsafe { map(at, len, protection, flags, fd, offset) })
}

/// The call itself, as a patched site makes it.
unsafe fn map(
    at: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: c_long,
) -> *mut c_void {
    let args = [at as usize, len, protection as usize, flags as usize, fd as usize, offset as usize];
    // SAFETY: the caller's own arguments.
    sys::libc_result(unsafe { inline::call(libc::SYS_mmap, args) }) as *mut c_void
}

type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, c_long) -> *mut c_void;

macro_rules! mmap_hooks {
    ($($hook:ident $name:literal $plain:ident $perhaps:ident;)*) => {$(
        /// mmap(2). Of memory it costs few instructions.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(
            at: *mut c_void, len: usize, protection: c_int, flags: c_int, fd: c_int, offset: c_long,
        ) -> *mut c_void {
            if flags & libc::MAP_ANONYMOUS != 0 {
                let known = $plain.load(Ordering::Relaxed);
                // SAFETY: a function of this kind, with the application's own arguments.
                return unsafe {
                    core::mem::transmute::<*mut c_void, Mmap>(known)(at, len, protection, flags, fd, offset)
                };
            }
            // SAFETY: the application's own arguments.
            unsafe { $perhaps(at, len, protection, flags, fd, offset) }
        }

        /// The next function once it is known, and until then what looks for it: nothing is to be asked.
        static $plain: AtomicPtr<c_void> = AtomicPtr::new($perhaps as *mut c_void);

        #[inline(never)]
        unsafe extern "C" fn $perhaps(
            at: *mut c_void, len: usize, protection: c_int, flags: c_int, fd: c_int, offset: c_long,
        ) -> *mut c_void {
            static NEXT: Next = Next::new($name);
            if let Some(next) = NEXT.get() {
                $plain.store(core::ptr::with_exposed_provenance_mut(next), Ordering::Relaxed);
            }
            // SAFETY: the application's own arguments.
            unsafe { mmap_perhaps(at, len, protection, flags, fd, offset, &NEXT) }
        }
    )*};
}

unsafe fn mmap_perhaps(
    at: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: c_long,
    next: &Next,
) -> *mut c_void {
    let real = |fd| {
        next!(in next.get() => as fn(*mut c_void, usize, c_int, c_int, c_int, c_long) -> *mut c_void;
            (at, len, protection, flags, fd, offset);
            // SAFETY: the application's own arguments.
            unsafe { map(at, len, protection, flags, fd, offset) })
    };
    mmap_or((len, protection, flags, fd, offset), real)
}

mmap_hooks! {
    mmap c"mmap" PLAIN mmap_first;
    mmap64 c"mmap64" PLAIN64 mmap64_first;
}
