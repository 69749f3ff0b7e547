//! Copying from and to the application's memory as the kernel does it for a driver: a bad pointer is EFAULT,
//! never a signal.
//!
//! process_vm_readv and process_vm_writev on ourselves need no privilege, but container filters forbid them by
//! name (EPERM, or ENOSYS): then a passing pipe does it.

use core::ffi::{c_int, c_void};
use core::mem::{MaybeUninit, size_of, size_of_val};

use crate::door::Owned;
use crate::sys;

/// Most segments of a vector (UIO_MAXIOV).
pub const MAX_SEGMENTS: usize = 1024;

/// Memory of the application that a read fills.
#[derive(Clone, Copy)]
pub enum Target {
    /// One buffer.
    Buffer(*mut c_void, usize),
    /// One buffer of whom the compiler has vouched for it.
    Given(*mut c_void, usize),
    /// `readv`'s vector, which may be a bad pointer itself.
    Vector(*const libc::iovec, usize),
}

impl Target {
    /// Bytes that it takes.
    ///
    /// # Errors
    /// EINVAL or EFAULT as readv.
    pub fn len(self) -> Result<usize, c_int> {
        let (vector, count) = match self {
            Self::Buffer(_, len) | Self::Given(_, len) => return Ok(len),
            Self::Vector(vector, count) => (vector, count),
        };
        if count > MAX_SEGMENTS {
            return Err(libc::EINVAL);
        }
        let mut sum = 0usize;
        for i in 0..count {
            let segment: libc::iovec = read(vector.wrapping_add(i).cast())?;
            sum = sum
                .checked_add(segment.iov_len)
                .filter(|&sum| sum <= isize::MAX as usize)
                .ok_or(libc::EINVAL)?;
        }
        Ok(sum)
    }

    /// Fills it from the start.
    ///
    /// # Errors
    /// EFAULT if not all of it could be written.
    pub fn fill<T>(self, items: &[T]) -> Result<(), c_int> {
        let len = size_of_val(items);
        let plain = match self {
            Self::Buffer(base, room) => {
                (room >= len && is_in_callers_frames(base.addr(), len, Access::Write)).then_some(base)
            }
            Self::Given(base, room) => (room >= len).then_some(base),
            Self::Vector(..) => None,
        };
        if let Some(base) = plain {
            // SAFETY: writable memory, or of this thread's stack above us, which the caller has given for this.
            unsafe { items.as_ptr().cast::<u8>().copy_to_nonoverlapping(base.cast(), len) };
            return Ok(());
        }
        let local = libc::iovec { iov_base: items.as_ptr().cast_mut().cast(), iov_len: len };
        let one;
        let (vector, count) = match self {
            // Not the whole buffer: the kernel would check all of it.
            Self::Buffer(base, room) | Self::Given(base, room) => {
                one = libc::iovec { iov_base: base, iov_len: room.min(len) };
                (&raw const one, 1)
            }
            Self::Vector(vector, count) => (vector, count),
        };
        // SAFETY: the source is the slice; the kernel checks the target.
        let done = unsafe {
            sys::call(
                libc::SYS_process_vm_writev,
                sys::gettid() as usize,
                &raw const local as usize,
                1,
                vector as usize,
                count,
                0,
            )
        };
        if is_forbidden(done) {
            return self.fill_by_pipe(local.iov_base, len, vector, count);
        }
        if done == len as isize { Ok(()) } else { Err(libc::EFAULT) }
    }

    fn fill_by_pipe(
        self,
        from: *mut c_void,
        len: usize,
        vector: *const libc::iovec,
        count: usize,
    ) -> Result<(), c_int> {
        let (reader, writer) = pipe()?;
        // SAFETY: the source is the slice of the caller, the kernel checks the target. A fresh pipe takes 64 KiB
        // without blocking; records are at most a page.
        let done = unsafe {
            if sys::call(libc::SYS_write, writer.get() as usize, from as usize, len, 0, 0, 0) != len as isize
            {
                return Err(libc::ENOMEM);
            }
            sys::call(libc::SYS_readv, reader.get() as usize, vector as usize, count, 0, 0, 0)
        };
        if done == len as isize { Ok(()) } else { Err(libc::EFAULT) }
    }
}

/// Reads a value that may have any bytes.
///
/// # Errors
/// EFAULT.
pub fn read<T: Copy>(from: *const c_void) -> Result<T, c_int> {
    let mut value = MaybeUninit::<T>::uninit();
    let len = size_of::<T>();
    if is_in_callers_frames(from.addr(), len, Access::Read) {
        // SAFETY: readable memory of this thread's stack; any bytes will do.
        return Ok(unsafe { from.cast::<T>().read_unaligned() });
    }
    let local = libc::iovec { iov_base: value.as_mut_ptr().cast(), iov_len: len };
    let remote = libc::iovec { iov_base: from.cast_mut(), iov_len: len };
    // SAFETY: the target is ours; the kernel checks the source.
    let mut done = unsafe {
        sys::call(
            libc::SYS_process_vm_readv,
            sys::gettid() as usize,
            &raw const local as usize,
            1,
            &raw const remote as usize,
            1,
            0,
        )
    };
    if is_forbidden(done) {
        let (reader, writer) = pipe()?;
        // SAFETY: as above.
        done = unsafe {
            match sys::call(libc::SYS_write, writer.get() as usize, from as usize, len, 0, 0, 0) {
                all if all == len as isize => {
                    sys::call(libc::SYS_read, reader.get() as usize, local.iov_base as usize, len, 0, 0, 0)
                }
                less => less.min(0),
            }
        };
    }
    if done != len as isize {
        return Err(libc::EFAULT);
    }
    // SAFETY: all bytes were written, and the callers use integers and structures of integers.
    Ok(unsafe { value.assume_init() })
}

/// How far above us the frames of our callers are looked for.
const FRAMES: usize = 64 << 10;

/// What is about to be done to memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// Whether the bytes lie in the stack above this call, and can be read or written: memory in use by this thread itself,
/// which nobody takes away meanwhile. There most arguments and buffers are, and a look at it costs a fifth of
/// process_vm_readv or less. What is to be written may be written to already.
fn is_in_callers_frames(from: usize, len: usize, access: Access) -> bool {
    const WORD: usize = 8;
    let marker = 0u8;
    let here = (&raw const marker).addr();
    let Some(end) = from.checked_add(len) else { return false };
    if from < here || end > here + FRAMES || len == 0 || access == Access::Write && len < WORD {
        return false;
    }
    // The stack may have ended before (that of a coroutine, with a pointer that is wrong): the kernel looks at each page
    // but the one that this frame is in. Only the mask's address is of interest, and nothing is changed: an order that
    // doesn't exist is refused, EINVAL, but only after the set has been copied (rt_sigprocmask in kernel/signal.c), and
    // without a set the mask is told.
    const NO_ORDER: usize = usize::MAX;
    let can = |word: usize| {
        let (set, told, expected) = match access {
            Access::Read => (word, 0, -(libc::EINVAL as isize)),
            Access::Write => (0, word, 0),
        };
        // SAFETY: the kernel checks the pointer; a word that it writes is one that is about to be written.
        let answer = unsafe { sys::call(libc::SYS_rt_sigprocmask, NO_ORDER, set, told, WORD, 0, 0) };
        answer == expected
    };
    let page = |at: usize| at & !4095;
    let mut at = from;
    while at < end {
        let next = page(at) + 4096;
        // A word that touches this page: of the bytes in question, or of the page where they are fewer.
        let word = if len >= WORD { at.min(end - WORD) } else { page(at) };
        if page(at) != page(here) && !can(word) {
            return false;
        }
        at = next;
    }
    true
}

fn is_forbidden(result: isize) -> bool {
    result == -(libc::EPERM as isize) || result == -(libc::ENOSYS as isize)
}

fn pipe() -> Result<(Owned, Owned), c_int> {
    let mut ends = [-1 as c_int; 2];
    // SAFETY: room for two descriptors.
    let result = unsafe {
        sys::call(libc::SYS_pipe2, ends.as_mut_ptr() as usize, libc::O_CLOEXEC as usize, 0, 0, 0, 0)
    };
    if result < 0 {
        return Err(-result as c_int);
    }
    let [reader, writer] = ends.map(Owned::new);
    Ok((reader, writer))
}
