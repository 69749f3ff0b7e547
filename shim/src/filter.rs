//! Putting the supervisor's filter on all threads of this process.

use core::ffi::c_int;

use crate::sys;

/// SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (Linux 6.0): without it a signal that arrives while the supervisor is at
/// work makes munmap return EINTR.
const WAIT_KILLABLE_RECV: usize = 1 << 5;

/// With a listener. TSYNC_ESRCH: the id of a thread that couldn't follow has no place in the result then.
pub const LISTENER: usize =
    (libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH) as usize;

/// Installs the program (of `struct sock_filter`s) on all threads. `extra` is [`LISTENER`] or 0; returns the
/// listener's descriptor, or 0.
///
/// # Errors
/// EBUSY: there is another listener. ESRCH: a thread has a filter of its own. EPERM, EACCES: forbidden. ENOSYS,
/// EINVAL: the kernel can't.
pub fn install(program: &[u8], extra: usize) -> Result<c_int, c_int> {
    let len = u16::try_from(program.len() / size_of::<libc::sock_filter>()).map_err(|_| libc::EPROTO)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    let install = |flags: usize| {
        // SAFETY: a program of the length stated.
        unsafe {
            sys::call(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER as usize,
                flags | libc::SECCOMP_FILTER_FLAG_TSYNC as usize,
                &raw const program as usize,
                0,
                0,
                0,
            )
        }
    };
    let best = || match install(extra | if extra == LISTENER { WAIT_KILLABLE_RECV } else { 0 }) {
        invalid if invalid == -(libc::EINVAL as isize) => install(extra),
        result => result,
    };
    let mut result = best();
    if result == -(libc::EACCES as isize) {
        // Without CAP_SYS_ADMIN a filter needs it, and for its price (set-uid programs that the client starts keep
        // its rights) it isn't set where the capability is there.
        // SAFETY: integers.
        unsafe { sys::call(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0, 0) };
        result = best();
    }
    match result {
        // Without a listener: the thread that couldn't follow.
        thread if thread > 0 && extra == 0 => Err(libc::ESRCH),
        fd if fd >= 0 => Ok(fd as c_int),
        errno => Err(-errno as c_int),
    }
}
