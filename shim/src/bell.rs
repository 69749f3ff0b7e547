//! The pipe behind a device descriptor: that it is readable whenever the context is.
//!
//! Who records an invalidation queues the hits, adds to the counter and *then* writes a byte, one for each
//! invalidation that hit. poll, select, epoll and SIGIO are the pipe's own and need no hook: the supervisor
//! writes its bytes whether or not anybody waits.
//!
//! Bytes are taken out only under the lock of the arena, by a reader that has just found the context not
//! readable. A byte of a later invalidation must never be among them, or its waiter sleeps for ever. So the
//! bytes are counted first, then the context is asked again, and only if it still isn't readable exactly that
//! many bytes are taken:
//! * a byte that was counted was written before the count, so its counter was added to before, and the look at
//!   the context, which comes after the count, saw it reported;
//! * a byte written after the count stays, since a pipe gives the oldest bytes first. If its invalidation was
//!   reported all the same, it is one byte too many: somebody is woken in vain, and the next read takes it out.
//!
//! So the descriptor is never, for good, silent while the context is readable.
//!
//! Our own threads, which record without the supervisor, have no byte written where one lies in the pipe anyway. A
//! note in the arena says so ([`Engine::wants_bell`]); it is taken back between the count and the second look. For
//! waiters that one byte wouldn't wake again and again (SIGIO, edge-triggered epoll) the context is *armed*.

use core::ffi::c_int;
use core::sync::atomic::{Ordering, fence};

use ummunotify_engine::Engine;

use crate::door::Owned;
use crate::{inline, sys, table};

/// Bytes in the pipe.
fn pending(fd: c_int) -> usize {
    let mut count: c_int = 0;
    // SAFETY: room for an int.
    let result = unsafe {
        sys::call(libc::SYS_ioctl, fd as usize, libc::FIONREAD as usize, &raw mut count as usize, 0, 0, 0)
    };
    if result < 0 { 0 } else { usize::try_from(count).unwrap_or(0) }
}

/// To be called under the lock of the arena after a read left the context not readable.
pub fn hush(fd: c_int, engine: &Engine) {
    let count = pending(fd);
    engine.hush();
    if count == 0 {
        return;
    }
    if engine.is_readable() {
        // They stay.
        engine.rung();
    } else {
        take(fd, count);
    }
}

/// To be called where the context may have become readable without anybody's byte. One byte too many, where its
/// recorder was about to write it, does no harm.
pub fn ensure(fd: c_int, engine: &Engine) {
    fence(Ordering::SeqCst);
    if engine.is_readable() && pending(fd) == 0 {
        ring(fd);
    }
}

/// True if nobody holds the write end any more: the supervisor is dead, whatever bytes it left.
pub fn is_abandoned(fd: c_int) -> bool {
    let mut poll = libc::pollfd { fd, events: 0, revents: 0 };
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one pollfd and a timespec.
    let ready =
        unsafe { sys::call(libc::SYS_ppoll, &raw mut poll as usize, 1, &raw const now as usize, 0, 8, 0) };
    ready == 1 && poll.revents & libc::POLLHUP != 0
}

/// Takes that many bytes out.
fn take(fd: c_int, count: usize) {
    const FEW: usize = 64;
    if count <= FEW { take_into::<1, FEW>(fd, count) } else { take_into::<32, 512>(fd, count) }
}

/// The same by a buffer of `SEGMENT` bytes that `SEGMENTS` parts of a read go into, one over the other. Another reader of
/// the pipe, in a process that doesn't know the device, could have been faster: nothing here may wait. Many a thread's stack
/// is small.
#[inline(never)]
fn take_into<const SEGMENTS: usize, const SEGMENT: usize>(fd: c_int, mut count: usize) {
    let mut buffer = [0u8; SEGMENT];
    let mut parts = [libc::iovec { iov_base: (&raw mut buffer).cast(), iov_len: 0 }; SEGMENTS];
    while count > 0 {
        let mut planned = 0;
        for part in &mut parts {
            part.iov_len = (count - planned).min(SEGMENT);
            planned += part.iov_len;
        }
        // The offset -1 means the current position, as for a plain readv.
        // SAFETY: every part lies in the buffer, whose contents nobody looks at.
        let mut got = unsafe {
            sys::call(
                libc::SYS_preadv2,
                fd as usize,
                parts.as_ptr() as usize,
                SEGMENTS,
                usize::MAX,
                usize::MAX,
                libc::RWF_NOWAIT as usize,
            )
        };
        if got == -(libc::EOPNOTSUPP as isize) {
            // Kernels before 6.5 know RWF_NOWAIT for files alone.
            if pending(fd) < planned {
                return;
            }
            // SAFETY: as above.
            got = unsafe {
                sys::call(libc::SYS_readv, fd as usize, parts.as_ptr() as usize, SEGMENTS, 0, 0, 0)
            };
        }
        if got <= 0 {
            return;
        }
        count = count.saturating_sub(got as usize);
    }
}

/// Has a byte written. We have no write end, but /proc gives a passing one. Where it doesn't (no descriptor is left, no
/// /proc, the user is another one) the supervisor is asked. If that one is dead or traps no calls, nothing can be done: the
/// counter alone tells, until the next byte.
#[cold]
fn ring(fd: c_int) {
    if !write_byte(fd)
        && let Some(identity) = table::identity(fd)
    {
        inline::ring(identity.inode);
    }
}

/// Writes a byte ourselves; false if that isn't possible.
fn write_byte(fd: c_int) -> bool {
    let mut path = *b"/proc/self/fd/\0\0\0\0\0\0\0\0\0\0\0";
    let mut digits = [0u8; 10];
    let mut n = fd.unsigned_abs();
    let mut len = 0;
    for digit in &mut digits {
        *digit = b'0' + (n % 10) as u8;
        n /= 10;
        len += 1;
        if n == 0 {
            break;
        }
    }
    for (to, &digit) in path.iter_mut().skip(14).zip(digits.iter().take(len).rev()) {
        *to = digit;
    }
    let end = sys::open(&path, libc::O_WRONLY | libc::O_NONBLOCK | libc::O_CLOEXEC);
    if end < 0 {
        return false;
    }
    let end = Owned::new(end as c_int);
    // A full pipe is readable, too.
    let _ = sys::write(end.get(), &[1]);
    true
}
