//! stat, access and their kin: the device's path exists, whether or not a node is there.

use core::ffi::{c_char, c_int, c_uint};
use core::mem::zeroed;

use crate::environment::{Backend, backend};
use crate::{next, path, sys};

/// Major number of miscellaneous devices, where the driver registers itself.
const MAJOR: c_uint = 10;
/// A dynamic minor number (below 255, which means "choose one").
const MINOR: c_uint = 63;
/// What a udev rule for an unprivileged device gives.
const MODE: u32 = libc::S_IFCHR | 0o666;

/// True if the kernel found nothing at a path that is ours.
///
/// # Safety
/// The kernel has just read the path, if `result` is a failure with ENOENT.
unsafe fn is_missing_device(result: c_int, path: *const c_char) -> bool {
    // SAFETY: ENOENT is the answer to a path that was read (or, with AT_EMPTY_PATH, to an empty one).
    result < 0
        && sys::errno() == libc::ENOENT
        && unsafe { path::is_device(path) }
        && backend() != Backend::Kmod
}

/// What stat shows.
fn node() -> libc::stat {
    // SAFETY: zero is a valid value of every field.
    let mut stat: libc::stat = unsafe { zeroed() };
    // The directory lends its device and times.
    // SAFETY: a terminated path and room for the result.
    unsafe {
        sys::call(
            libc::SYS_newfstatat,
            libc::AT_FDCWD as usize,
            c"/dev".as_ptr() as usize,
            &raw mut stat as usize,
            0,
            0,
            0,
        );
    }
    stat.st_ino = u64::from(MAJOR << 8 | MINOR);
    stat.st_mode = MODE;
    stat.st_nlink = 1;
    stat.st_uid = 0;
    stat.st_gid = 0;
    stat.st_rdev = libc::makedev(MAJOR, MINOR);
    stat.st_size = 0;
    stat.st_blksize = 4096;
    stat.st_blocks = 0;
    stat
}

/// The result of a stat call, or the device instead of ENOENT. `before` is errno as it was.
///
/// # Safety
/// The arguments are those of the call that returned `result`.
unsafe fn or_node(result: c_int, before: c_int, path: *const c_char, out: *mut libc::stat) -> c_int {
    // SAFETY: passed on.
    if !unsafe { is_missing_device(result, path) } {
        return result;
    }
    // SAFETY: stat's caller passes room for one.
    unsafe { out.write(node()) };
    sys::set_errno(before);
    0
}

fn raw_stat(directory: c_int, path: *const c_char, out: *mut libc::stat, flags: c_int) -> c_int {
    // SAFETY: the application's own arguments.
    sys::libc_result(unsafe {
        sys::call(libc::SYS_newfstatat, directory as usize, path as usize, out as usize, flags as usize, 0, 0)
    }) as c_int
}

macro_rules! stat_hooks {
    ($($hook:ident $name:literal $flags:expr;)*) => {$(
        /// stat(2). Before glibc 2.33 programs call `__xstat` and its kin instead.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(path: *const c_char, out: *mut libc::stat) -> c_int {
            let before = sys::errno();
            let result = next!($name as fn(*const c_char, *mut libc::stat) -> c_int; (path, out);
                raw_stat(libc::AT_FDCWD, path, out, $flags));
            // SAFETY: the application's own arguments.
            unsafe { or_node(result, before, path, out) }
        }
    )*};
}

stat_hooks! {
    stat c"stat" 0;
    stat64 c"stat64" 0;
    lstat c"lstat" libc::AT_SYMLINK_NOFOLLOW;
    lstat64 c"lstat64" libc::AT_SYMLINK_NOFOLLOW;
}

macro_rules! fstatat_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// fstatat(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(
            directory: c_int, path: *const c_char, out: *mut libc::stat, flags: c_int,
        ) -> c_int {
            let before = sys::errno();
            let result = next!($name as fn(c_int, *const c_char, *mut libc::stat, c_int) -> c_int;
                (directory, path, out, flags); raw_stat(directory, path, out, flags));
            // SAFETY: the application's own arguments.
            unsafe { or_node(result, before, path, out) }
        }
    )*};
}

fstatat_hooks! {
    fstatat c"fstatat";
    fstatat64 c"fstatat64";
}

macro_rules! xstat_hooks {
    ($($hook:ident $name:literal $flags:expr;)*) => {$(
        /// stat(2) of programs built before glibc 2.33.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(version: c_int, path: *const c_char, out: *mut libc::stat) -> c_int {
            let before = sys::errno();
            let result = next!($name as fn(c_int, *const c_char, *mut libc::stat) -> c_int; (version, path, out);
                raw_stat(libc::AT_FDCWD, path, out, $flags));
            // SAFETY: the application's own arguments.
            unsafe { or_node(result, before, path, out) }
        }
    )*};
}

xstat_hooks! {
    __xstat c"__xstat" 0;
    __xstat64 c"__xstat64" 0;
    __lxstat c"__lxstat" libc::AT_SYMLINK_NOFOLLOW;
    __lxstat64 c"__lxstat64" libc::AT_SYMLINK_NOFOLLOW;
}

macro_rules! fxstatat_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// fstatat(2) of programs built before glibc 2.33.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(
            version: c_int, directory: c_int, path: *const c_char, out: *mut libc::stat, flags: c_int,
        ) -> c_int {
            let before = sys::errno();
            let result = next!($name as fn(c_int, c_int, *const c_char, *mut libc::stat, c_int) -> c_int;
                (version, directory, path, out, flags); raw_stat(directory, path, out, flags));
            // SAFETY: the application's own arguments.
            unsafe { or_node(result, before, path, out) }
        }
    )*};
}

fxstatat_hooks! {
    __fxstatat c"__fxstatat";
    __fxstatat64 c"__fxstatat64";
}

/// statx(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn statx(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    out: *mut libc::statx,
) -> c_int {
    let before = sys::errno();
    let result = next!(c"statx" as fn(c_int, *const c_char, c_int, c_uint, *mut libc::statx) -> c_int;
        (directory, path, flags, mask, out);
        // SAFETY: the application's own arguments.
        sys::libc_result(unsafe {
            sys::call(libc::SYS_statx, directory as usize, path as usize, flags as usize, mask as usize,
                      out as usize, 0)
        }) as c_int);
    // SAFETY: the application's own arguments.
    unsafe {
        if !is_missing_device(result, path) {
            return result;
        }
        out.write(extended(&node()));
    }
    sys::set_errno(before);
    0
}

fn extended(node: &libc::stat) -> libc::statx {
    // SAFETY: zero is a valid value of every field.
    let mut out: libc::statx = unsafe { zeroed() };
    out.stx_mask = libc::STATX_BASIC_STATS;
    out.stx_blksize = node.st_blksize as u32;
    out.stx_nlink = node.st_nlink as u32;
    out.stx_mode = node.st_mode as u16;
    out.stx_ino = node.st_ino;
    out.stx_rdev_major = MAJOR;
    out.stx_rdev_minor = MINOR;
    out.stx_dev_major = libc::major(node.st_dev);
    out.stx_dev_minor = libc::minor(node.st_dev);
    for (to, seconds) in [
        (&mut out.stx_atime, node.st_atime),
        (&mut out.stx_mtime, node.st_mtime),
        (&mut out.stx_ctime, node.st_ctime),
    ] {
        to.tv_sec = seconds;
    }
    out
}

/// The result of an access call, or the device's permissions instead of ENOENT.
///
/// # Safety
/// The arguments are those of the call that returned `result`.
unsafe fn or_permitted(result: c_int, before: c_int, path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: passed on.
    if !unsafe { is_missing_device(result, path) } {
        return result;
    }
    if mode & libc::X_OK != 0 {
        sys::set_errno(libc::EACCES);
        return -1;
    }
    sys::set_errno(before);
    0
}

fn raw_access(directory: c_int, path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the application's own arguments.
    sys::libc_result(unsafe {
        sys::call(libc::SYS_faccessat, directory as usize, path as usize, mode as usize, 0, 0, 0)
    }) as c_int
}

macro_rules! access_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// access(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(path: *const c_char, mode: c_int) -> c_int {
            let before = sys::errno();
            let result = next!($name as fn(*const c_char, c_int) -> c_int; (path, mode);
                raw_access(libc::AT_FDCWD, path, mode));
            // SAFETY: the application's own arguments.
            unsafe { or_permitted(result, before, path, mode) }
        }
    )*};
}

access_hooks! {
    access c"access";
    eaccess c"eaccess";
    euidaccess c"euidaccess";
}

/// faccessat(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn faccessat(
    directory: c_int,
    path: *const c_char,
    mode: c_int,
    flags: c_int,
) -> c_int {
    let before = sys::errno();
    let result = next!(c"faccessat" as fn(c_int, *const c_char, c_int, c_int) -> c_int; (directory, path, mode, flags);
        raw_access(directory, path, mode));
    // SAFETY: the application's own arguments.
    unsafe { or_permitted(result, before, path, mode) }
}
