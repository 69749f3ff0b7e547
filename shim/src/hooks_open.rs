//! open and its kin.
//!
//! The kernel gets each call first: a bad path pointer is EFAULT and not a crash of ours, and a call that has
//! nothing to do with us is what it always was. Only a failed open has its path compared (a successful one, too,
//! but it matters only where the emulated backend is forced).

use core::ffi::{c_char, c_int, c_uint};

use crate::environment::{Backend, backend};
use ummunotify_abi::config;

use crate::log::{self, Part};
use crate::{activate, next, path, sys};

/// Opens by `real`, or the emulated device.
///
/// # Safety
/// `path` is what the application passed.
pub unsafe fn open_or_emulate(path: *const c_char, flags: c_int, real: impl FnOnce() -> c_int) -> c_int {
    if flags & libc::O_CREAT != 0 && !is_emulated_creation(path) {
        return real();
    }
    let before = sys::errno();
    let fd = if flags & libc::O_CREAT != 0 || is_unwanted(path) { fail(libc::ENOENT) } else { real() };
    let errno = sys::errno();
    let gone = matches!(
        errno,
        libc::ENOENT | libc::ENOTDIR | libc::ENXIO | libc::ENODEV | libc::EACCES | libc::EPERM | libc::EBUSY
    );
    if fd < 0 && !gone {
        return fd;
    }
    // SAFETY: the kernel has read the path: the errors that it gives without having done so were let out above.
    if !unsafe { path::is_device(path) } {
        return fd;
    }
    match backend() {
        Backend::Kmod => return fd,
        Backend::Auto if fd >= 0 && is_node(fd) => return fd,
        Backend::Auto | Backend::Emulated | Backend::Unknown(_) => {}
    }
    if fd >= 0 {
        sys::close(fd);
    }
    if let Backend::Unknown(name) = backend() {
        log::error(&[
            Part::Text("can't open /dev/ummunotify: "),
            Part::Text(config::ENV_BACKEND),
            Part::Text(" is "),
            Part::Bytes(name),
            Part::Text("; it can be auto, kmod or emulated"),
        ]);
        return fail(libc::EINVAL);
    }
    match emulated(flags) {
        Ok(fd) => {
            sys::set_errno(before);
            fd
        }
        Err(errno) => fail(errno),
    }
}

/// Whether the kernel opened a device. Under a filter that serves static executables it is the emulated one, a
/// pipe, which is ours to open in a cheaper way.
fn is_node(fd: c_int) -> bool {
    sys::fstat(fd).is_some_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFCHR)
}

fn fail(errno: c_int) -> c_int {
    sys::set_errno(errno);
    -1
}

/// True for an open with O_CREAT of the device where there is none: the kernel would make a file of that name.
fn is_emulated_creation(path: *const c_char) -> bool {
    // SAFETY: the kernel has just read the path.
    sys::access(path, libc::F_OK) == -(libc::ENOENT as isize)
        && unsafe { path::is_device(path) }
        && backend() != Backend::Kmod
}

/// True for the kernel's own device where the emulated one is forced. It isn't opened: once it was, the kernel looks for
/// listeners at each mapping call for as long as the address space exists (`mm_has_notifiers`).
fn is_unwanted(path: *const c_char) -> bool {
    // SAFETY: the kernel has just read the path.
    backend() == Backend::Emulated && sys::access(path, libc::F_OK) == 0 && unsafe { path::is_device(path) }
}

/// The emulated device, with the checks that the kernel makes for a character device of mode 0666, and the
/// driver's own.
fn emulated(flags: c_int) -> Result<c_int, c_int> {
    if flags & libc::O_PATH != 0 {
        if flags & libc::O_DIRECTORY != 0 {
            return Err(libc::ENOTDIR);
        }
        // Such a descriptor knows no driver: any character device serves.
        let fd = sys::open(b"/dev/null\0", libc::O_PATH | flags & libc::O_CLOEXEC);
        return if fd < 0 { Err(-fd as c_int) } else { Ok(fd as c_int) };
    }
    if flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL {
        return Err(libc::EEXIST);
    }
    if flags & libc::O_DIRECTORY != 0 {
        return Err(libc::ENOTDIR);
    }
    if flags & libc::O_ACCMODE != libc::O_RDONLY {
        return Err(libc::EINVAL);
    }
    activate::open(flags)
}

macro_rules! open_hooks {
    ($($hook:ident $name:literal $extra:expr;)*) => {$(
        /// open(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
            let real = || next!($name as fn(*const c_char, c_int; c_uint) -> c_int; (path, flags), (mode);
                openat_raw(libc::AT_FDCWD, path, flags | $extra, mode));
            // SAFETY: the application's own path.
            unsafe { open_or_emulate(path, flags, real) }
        }
    )*};
}

open_hooks! {
    open c"open" 0;
    open64 c"open64" libc::O_LARGEFILE;
}

macro_rules! openat_hooks {
    ($($hook:ident $name:literal $extra:expr;)*) => {$(
        /// openat(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
            let real = || next!($name as fn(c_int, *const c_char, c_int; c_uint) -> c_int;
                (directory, path, flags), (mode); openat_raw(directory, path, flags | $extra, mode));
            // SAFETY: the application's own path.
            unsafe { open_or_emulate(path, flags, real) }
        }
    )*};
}

openat_hooks! {
    openat c"openat" 0;
    openat64 c"openat64" libc::O_LARGEFILE;
}

macro_rules! fortified_open_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// open(2) as _FORTIFY_SOURCE calls it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(path: *const c_char, flags: c_int) -> c_int {
            let real = || next!($name as fn(*const c_char, c_int) -> c_int; (path, flags);
                openat_raw(libc::AT_FDCWD, path, flags, 0));
            // libc ends the program for O_CREAT and O_TMPFILE: that is its business.
            if flags & (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) != 0 {
                return real();
            }
            // SAFETY: the application's own path.
            unsafe { open_or_emulate(path, flags, real) }
        }
    )*};
}

fortified_open_hooks! {
    __open_2 c"__open_2";
    __open64_2 c"__open64_2";
}

macro_rules! fortified_openat_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// openat(2) as _FORTIFY_SOURCE calls it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
            let real = || next!($name as fn(c_int, *const c_char, c_int) -> c_int; (directory, path, flags);
                openat_raw(directory, path, flags, 0));
            if flags & (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) != 0 {
                return real();
            }
            // SAFETY: the application's own path.
            unsafe { open_or_emulate(path, flags, real) }
        }
    )*};
}

fortified_openat_hooks! {
    __openat_2 c"__openat_2";
    __openat64_2 c"__openat64_2";
}

/// openat as a raw system call.
pub fn openat_raw(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the kernel checks the pointer.
    let result = unsafe {
        sys::call(libc::SYS_openat, directory as usize, path as usize, flags as usize, mode as usize, 0, 0)
    };
    sys::libc_result(result) as c_int
}
