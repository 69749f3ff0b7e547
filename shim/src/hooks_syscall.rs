//! syscall(3): the calls that have a hook go through it, all others straight to the kernel.
//!
//! The straight way is libc's own code, without a frame: some callers use it for calls that return on another
//! stack or twice.

use core::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};

use crate::{hooks_device, hooks_fd, hooks_open, inline, sys};

/// Calls with numbers below this may have a hook.
const NUMBERS: usize = 448;

/// Bit n: call n goes through `hooked`.
static HOOKED: [u64; NUMBERS / 64] = bits();

const fn bits() -> [u64; NUMBERS / 64] {
    let calls = [
        libc::SYS_open,
        libc::SYS_openat,
        libc::SYS_openat2,
        libc::SYS_ioctl,
        libc::SYS_read,
        libc::SYS_readv,
        libc::SYS_pread64,
        libc::SYS_preadv,
        libc::SYS_preadv2,
        libc::SYS_mmap,
        libc::SYS_close,
        libc::SYS_close_range,
        libc::SYS_dup,
        libc::SYS_dup2,
        libc::SYS_dup3,
        libc::SYS_fcntl,
        libc::SYS_epoll_ctl,
        libc::SYS_recvmsg,
        libc::SYS_recvmmsg,
        libc::SYS_pwrite64,
        libc::SYS_pwritev,
        libc::SYS_munmap,
        libc::SYS_mprotect,
        libc::SYS_mremap,
        libc::SYS_madvise,
    ];
    let mut bits = [0; NUMBERS / 64];
    let mut i = 0;
    while i < calls.len() {
        let n = calls[i] as usize;
        bits[n / 64] |= 1 << (n % 64);
        i += 1;
    }
    bits
}

/// syscall(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    core::arch::naked_asm!(
        "endbr64",
        "cmp rdi, {numbers}",
        "jae 2f",
        "lea rax, [rip + {hooked_bits}]",
        "bt qword ptr [rax], rdi",
        "jc {hooked}",
        "2:",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "cmp rax, -4095",
        "jae 3f",
        "ret",
        "3:",
        "mov rdi, rax",
        "jmp {failed}",
        numbers = const NUMBERS,
        hooked_bits = sym HOOKED,
        hooked = sym hooked,
        failed = sym failed,
    )
}

extern "C" fn failed(result: c_long) -> c_long {
    sys::libc_result(result as isize) as c_long
}

/// The hooks return what syscall(3) returns: a value, or -1 and errno.
unsafe extern "C" fn hooked(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    let fd = a as c_int;
    // SAFETY: the application's own arguments, as it would have passed them to the function.
    unsafe {
        match number {
            libc::SYS_open => c_long::from(hooks_open::open64(a as *const c_char, b as c_int, c as c_uint)),
            libc::SYS_openat => {
                c_long::from(hooks_open::openat64(fd, b as *const c_char, c as c_int, d as c_uint))
            }
            libc::SYS_openat2 => c_long::from(openat2(fd, b, c, d)),
            libc::SYS_ioctl => c_long::from(hooks_device::ioctl(fd, b as c_ulong, c as *mut c_void)),
            libc::SYS_read => hooks_device::read(fd, b as *mut c_void, c as usize) as c_long,
            libc::SYS_readv => hooks_device::readv(fd, b as *const libc::iovec, c as c_int) as c_long,
            libc::SYS_pread64 => hooks_device::pread64(fd, b as *mut c_void, c as usize, d) as c_long,
            libc::SYS_preadv => hooks_device::preadv64(fd, b as *const libc::iovec, c as c_int, d) as c_long,
            libc::SYS_preadv2 => {
                hooks_device::preadv64v2(fd, b as *const libc::iovec, c as c_int, d, f as c_int) as c_long
            }
            libc::SYS_mmap => {
                let (at, len) = (a as *mut c_void, b as usize);
                hooks_device::mmap_by_syscall(at, len, c as c_int, d as c_int, e as c_int, f) as c_long
            }
            libc::SYS_pwrite64 => hooks_device::pwrite64(fd, b as *const c_void, c as usize, d) as c_long,
            libc::SYS_pwritev => {
                hooks_device::pwritev64(fd, b as *const libc::iovec, c as c_int, d) as c_long
            }
            libc::SYS_munmap | libc::SYS_mprotect | libc::SYS_mremap | libc::SYS_madvise => {
                let args = [a, b, c, d, e, f].map(|arg| arg as usize);
                failed(inline::call(number, args) as c_long)
            }
            libc::SYS_close => c_long::from(hooks_fd::close(fd)),
            libc::SYS_close_range => {
                c_long::from(hooks_fd::close_range(a as c_uint, b as c_uint, c as c_int))
            }
            libc::SYS_dup => c_long::from(hooks_fd::dup(fd)),
            libc::SYS_dup2 => c_long::from(hooks_fd::dup2(fd, b as c_int)),
            libc::SYS_dup3 => c_long::from(hooks_fd::dup3(fd, b as c_int, c as c_int)),
            libc::SYS_fcntl => c_long::from(hooks_fd::fcntl64(fd, b as c_int, c as *mut c_void)),
            libc::SYS_epoll_ctl => {
                c_long::from(hooks_fd::epoll_ctl(fd, b as c_int, c as c_int, d as *mut c_void))
            }
            libc::SYS_recvmsg => hooks_fd::recvmsg(fd, b as *mut libc::msghdr, c as c_int) as c_long,
            libc::SYS_recvmmsg => c_long::from(hooks_fd::recvmmsg(
                fd,
                b as *mut libc::mmsghdr,
                c as c_uint,
                d as c_int,
                e as *mut libc::timespec,
            )),
            _ => failed(sys::call(
                number, a as usize, b as usize, c as usize, d as usize, e as usize, f as usize,
            ) as c_long),
        }
    }
}

/// openat2(2), which has no function in libc.
unsafe fn openat2(directory: c_int, path: c_long, how: c_long, size: c_long) -> c_int {
    let real = || {
        // SAFETY: the application's own arguments.
        let result = unsafe {
            sys::call(libc::SYS_openat2, directory as usize, path as usize, how as usize, size as usize, 0, 0)
        };
        sys::libc_result(result) as c_int
    };
    // The first field is the flags. A bad pointer is for the kernel to refuse.
    match crate::memory::read::<u64>(how as *const c_void) {
        // SAFETY: the application's own path.
        Ok(flags) => unsafe { hooks_open::open_or_emulate(path as *const c_char, flags as c_int, real) },
        Err(_) => real(),
    }
}
