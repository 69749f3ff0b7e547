//! Putting the supervisor's filter on all threads of this process.

use core::ffi::c_int;

use crate::door::Owned;
use crate::log::{self, Part};
use crate::sys;

/// SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (Linux 6.0): without it a signal that arrives while the supervisor is at
/// work makes munmap return EINTR.
const WAIT_KILLABLE_RECV: usize = 1 << 5;

/// Installs the program (of `struct sock_filter`s) and returns the listener.
///
/// # Errors
/// EBUSY, ESRCH, EPERM, ENOSYS, EINVAL: each was explained on standard error.
pub fn install(program: &[u8]) -> Result<Owned, c_int> {
    let len = u16::try_from(program.len() / size_of::<libc::sock_filter>()).map_err(|_| libc::EPROTO)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    // TSYNC_ESRCH: with a listener asked for, the id of a thread that couldn't follow has no place in the result.
    let flags = (libc::SECCOMP_FILTER_FLAG_TSYNC
        | libc::SECCOMP_FILTER_FLAG_NEW_LISTENER
        | libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH) as usize;
    let install = |flags: usize| {
        // SAFETY: a program of the length stated.
        unsafe {
            sys::call(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER as usize,
                flags,
                &raw const program as usize,
                0,
                0,
                0,
            )
        }
    };
    let best = || match install(flags | WAIT_KILLABLE_RECV) {
        invalid if invalid == -(libc::EINVAL as isize) => install(flags),
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
    if result >= 0 {
        return Ok(Owned::new(result as c_int));
    }
    let errno = -result as c_int;
    log::error(&[
        Part::Text("can't open /dev/ummunotify: a seccomp filter with a listener was refused with "),
        Part::Errno(errno),
        Part::Text(match errno {
            libc::EBUSY => {
                ": another program already listens to this process; start the client without it, or use the kernel module"
            }
            libc::ESRCH => {
                ": a thread has installed a filter of its own; open the device before it does, or use the kernel module"
            }
            libc::EPERM | libc::EACCES => {
                ": the surroundings (a container's seccomp profile?) forbid it; allow seccomp(2) there, or use the kernel module"
            }
            libc::ENOSYS | libc::EINVAL => {
                ": this kernel has no seccomp user notification with TSYNC (Linux 5.7); use the kernel module"
            }
            _ => "; use the kernel module",
        }),
    ]);
    Err(errno)
}
