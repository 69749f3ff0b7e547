//! Who tells what has become stale.

use std::io;
use ummunotify_abi::PageRange;

/// A context of /dev/ummunotify, as the cache uses it: `ummunotify::client::Notifier` is one.
///
/// # Contract
/// 1. An invalidation that starts after [`Monitor::register`] returned and that overlaps the range adds to the counter,
///    and [`Monitor::events`] tells it, before any thread can be given the addresses for other memory.
/// 2. A range that was registered, or told, while an invalidation that overlaps it was under way is told again when
///    that has ended, as far as the monitor sees ends at all. Without this a thread that registers while another
///    unmaps can be left with pages that are gone.
/// 3. After [`Monitor::unregister`] returned, nothing of that cookie is told.
///
/// The cache is the only one that reads the events of its monitor.
pub trait Monitor: Send + Sync {
    /// Watches `range`, bytes, half-open, under the name `cookie`.
    ///
    /// # Errors
    /// Whatever the device answers; after `ENOMEM` the cache gives back what is idle, and tries again.
    fn register(&self, range: PageRange, cookie: u64) -> io::Result<()>;

    /// Stops watching what was registered under `cookie`.
    ///
    /// # Errors
    /// Whatever the device answers.
    fn unregister(&self, cookie: u64) -> io::Result<()>;

    /// The counter now: one load, with acquire ordering.
    fn generation(&self) -> u64;

    /// Calls `stale` with the cookie of everything that was hit since it was last told, and returns the value of the
    /// counter for which that was all; `None` where there was nothing to tell.
    ///
    /// # Errors
    /// `EINTR` makes the caller try again; after any other one the monitor is given up.
    fn events(&self, stale: &mut dyn FnMut(u64)) -> io::Result<Option<u64>>;
}

impl<M: Monitor + ?Sized> Monitor for std::sync::Arc<M> {
    fn register(&self, range: PageRange, cookie: u64) -> io::Result<()> {
        (**self).register(range, cookie)
    }

    fn unregister(&self, cookie: u64) -> io::Result<()> {
        (**self).unregister(cookie)
    }

    fn generation(&self) -> u64 {
        (**self).generation()
    }

    fn events(&self, stale: &mut dyn FnMut(u64)) -> io::Result<Option<u64>> {
        (**self).events(stale)
    }
}
