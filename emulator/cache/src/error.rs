//! Why a request isn't served.

use crate::RegistrarError;
use std::io;
use ummunotify_abi::PageRange;

/// What was tried, what failed with which errno, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No bytes, or an end beyond the address space.
    #[error(
        "{length} bytes at {address:#x} can't be registered: no bytes, or past the end of the address space"
    )]
    Range {
        /// The address that was asked for.
        address: u64,
        /// The length, bytes.
        length: u64,
    },
    /// The cache is full of entries that are in use, at this moment at least. What other threads are registering or giving
    /// back is waited for.
    #[error(
        "no room for {}-{} ({} bytes): {used_bytes} of {max_bytes} bytes and {used_entries} of {max_entries} entries \
         are in use; drop handles, or raise the limits",
        Hex(range.start), Hex(range.end), range.len()
    )]
    Full {
        /// What was asked for, whole pages.
        range: PageRange,
        /// Bytes that entries pin which can't be evicted.
        used_bytes: u64,
        /// The limit.
        max_bytes: u64,
        /// Entries that can't be evicted.
        used_entries: usize,
        /// The limit.
        max_entries: usize,
    },
    /// More than the cache may hold at all.
    #[error(
        "{}-{} ({} bytes) is more than the {max_bytes} bytes that this cache may pin; raise the limit",
        Hex(range.start), Hex(range.end), range.len()
    )]
    TooLarge {
        /// What was asked for, whole pages.
        range: PageRange,
        /// The limit.
        max_bytes: u64,
    },
    /// The adapter refused. The cache is as it was, but for idle entries that were given back for it if it had no memory.
    #[error(transparent)]
    Registrar(#[from] RegistrarError),
    /// The monitor refused to watch the range. The same.
    #[error("watch {}-{}: {error}; {advice}", Hex(range.start), Hex(range.end), advice = monitor_advice(error))]
    Monitor {
        /// What was asked for, whole pages.
        range: PageRange,
        /// What the device answered.
        error: io::Error,
    },
    /// The monitor can't be read any more, so nothing that is cached can be trusted, for good.
    #[error(
        "read of the device: {}; nothing can be cached any more: was the supervisor killed?",
        io::Error::from_raw_os_error(*errno)
    )]
    Lost {
        /// The errno of the read; 0 if it had none.
        errno: i32,
    },
    /// This process was forked off from the one that made the cache, and its registrations are the parent's.
    #[error("this cache belongs to the process that this one was forked from; make a new one")]
    Forked,
}

/// A number in hexadecimal, with its prefix.
struct Hex(u64);

impl std::fmt::Display for Hex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

fn monitor_advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => "the device has no room for more regions: lower the cache's limit of entries",
        Some(libc::EIO | libc::ENOSYS) => "the device is gone: was the supervisor killed?",
        _ => "see the device's log",
    }
}
