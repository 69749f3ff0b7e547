//! Pipes.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check;

/// Bytes in a pipe, asked at either end (FIONREAD, pipe(7)).
pub fn pending(end: BorrowedFd<'_>) -> io::Result<usize> {
    let mut count: libc::c_int = 0;
    // SAFETY: the call writes one int.
    check(unsafe { libc::ioctl(end.as_raw_fd(), libc::FIONREAD, &raw mut count) }.into())?;
    usize::try_from(count).map_err(io::Error::other)
}
