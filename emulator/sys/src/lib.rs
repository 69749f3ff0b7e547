//! The unsafe system layer: what the emulator needs of the kernel and `nix` doesn't offer.
//!
//! Each item says which kernel brought it and where that is documented.
#![deny(missing_docs)]

pub mod device;
pub mod errand;
pub mod futex;
pub mod halt;
pub mod maps;
pub mod notify;
pub mod pipe;
pub mod process;
pub mod ptrace;
pub mod seccomp;
pub mod socket;
pub mod tracer;
pub mod traits;
pub mod uffd;

use std::io;

/// Turns the return value of a libc call into a result.
pub(crate) fn check(ret: i64) -> io::Result<i64> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}
