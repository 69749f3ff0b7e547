//! A cache of memory registrations, kept right by /dev/ummunotify.
//!
//! Registering memory with an RDMA adapter is slow, so programs keep registrations under the buffer's address. When the
//! buffer is unmapped and the address comes back for other memory, such a cache gives out a registration of the old
//! pages. This one asks the device: each request compares the device's counter with the value seen last, and only if
//! they differ it reads what has become stale.
//!
//! ```
//! use ummunotify_cache::{Access, Cache, Limits, Monitor, Registrar};
//!
//! fn send<M: Monitor, R: Registrar>(cache: &Cache<M, R>, buffer: &[u8]) -> Result<(), ummunotify_cache::Error> {
//!     let (address, length) = (buffer.as_ptr() as u64, buffer.len() as u64);
//!     let handle = cache.get(address, length, Access::LOCAL_READ)?;
//!     let _key = handle.registration(); // as long as the handle lives the memory stays registered
//!     Ok(())
//! }
//! ```
//!
//! # What a request gets
//! * Entries are whole pages. A request is served by any entry that contains it and has at least its rights. Otherwise
//!   its own pages are registered, with its own rights: neighbours and overlapping entries aren't joined, for what lies
//!   between may be unmapped, read-only or the whole of memory. Entries may overlap.
//! * An entry that a new one contains, with no more rights, serves nobody any more: it is *superseded*, and given back.
//! * Two threads that miss on the same range at once both register; the later one gives its own back and takes the
//!   other's.
//! * What it gets was the memory behind the range at some moment of the call. Memory that is unmapped while the call
//!   runs may be gone when it returns; [`Handle::is_current`] tells.
//!
//! # How long an entry lives
//! Until it is stale, superseded or evicted, and no handle is left. Stale entries that are in use serve no new request,
//! and are given back by the thread that drops the last handle; if that meets the moment in which the entry becomes
//! stale, by one of the next misses. Room is made by second chance: entries that were used since the clock's hand went by
//! are passed over once. Entries in use are never evicted; if nothing else is left the request fails
//! ([`Error::Full`]).
//!
//! # What a hit costs
//! Loads: of the counter, of what the thread itself used last, else of a table of where entries begin (5 to 10 bytes for
//! each, so near memory holds it where the tree of all entries doesn't fit), else of that tree; and of the entry, in most
//! cases the only line that is far away. It makes no system call, takes no lock, and writes to the calling thread's own
//! memory alone, but for the entry's mark of use, which is written only if the clock's hand has cleared it. What a handle keeps alive is counted in that memory, too: 8 bytes
//! for each thread and entry that it used, in chunks of 512.
//!
//! # Rules for who uses it
//! * The monitor sees only the process that opened it. A forked child gets [`Error::Forked`], and gives nothing back.
//! * Nothing keeps the memory behind a handle *mapped*: a registration pins pages, not addresses.
//! * What a registrar's callbacks do must not use the same cache. They may panic, and fork.
//! * A signal's handler may not use it either, for misses take a lock. (One that interrupts hits and only hits does no
//!   harm.)
#![deny(missing_docs)]

#[cfg(all(test, not(shuttle)))]
extern crate self as ummunotify_cache;

#[cfg(all(test, not(shuttle)))]
#[path = "../tests/common/mod.rs"]
mod common;

mod access;
mod book;
mod cache;
mod chunks;
mod error;
mod fork;
mod handle;
mod hints;
mod index;
mod miss;
mod monitor;
mod registrar;
mod slot;
pub mod soft;
mod statistics;
mod sync;
mod threads;
#[cfg(feature = "rdma")]
pub mod verbs;

pub use access::Access;
pub use cache::{Cache, Limits};
pub use error::Error;
pub use handle::Handle;
pub use monitor::Monitor;
pub use registrar::{Registrar, RegistrarError};
pub use statistics::Statistics;
pub use ummunotify_abi::PageRange;
