//! The preloaded library's [direct](ummunotify_abi::direct) functions, where it is there.

use core::sync::atomic::{AtomicBool, Ordering};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

use ummunotify_abi::PageRange;
use ummunotify_abi::device::Event;
use ummunotify_abi::direct::{Direct, Lease, NOT_HERE, SYMBOL};

/// The way to one open device. Its methods answer `None` where the ordinary call has to be made.
#[derive(Debug)]
pub(super) struct Shortcut {
    functions: &'static Direct,
    lease: Lease,
    /// Somebody may poll the descriptor.
    polled: AtomicBool,
    /// A byte may lie in it that wakes nobody's poll rightly.
    untidy: AtomicBool,
}

impl Shortcut {
    /// For a descriptor of the emulated device that this process opened; the caller owns it, and keeps it open.
    pub(super) fn to(fd: BorrowedFd<'_>) -> Option<Self> {
        static FUNCTIONS: OnceLock<Option<&'static Direct>> = OnceLock::new();
        let functions = *FUNCTIONS.get_or_init(|| {
            // SAFETY: a terminated name.
            let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, SYMBOL.as_ptr()) }.cast::<Direct>();
            // SAFETY: what has this name is such a structure, in a library that is never unloaded.
            unsafe { found.as_ref() }
        });
        let mut lease = Lease([0; 16]);
        // SAFETY: room for a lease.
        let taken = unsafe { (functions?.lease)(fd.as_raw_fd(), &raw mut lease) };
        // Not made before it is known: dropping one gives the lease back.
        if taken != 0 {
            return None;
        }
        let [polled, untidy] = [false; 2].map(AtomicBool::new);
        Some(Self { functions: functions?, lease, polled, untidy })
    }

    pub(super) fn register(
        &self,
        fd: BorrowedFd<'_>,
        range: PageRange,
        cookie: u64,
    ) -> Option<io::Result<()>> {
        // SAFETY: the lease is filled as long as self lives, and the descriptor is open.
        let result = unsafe {
            (self.functions.register)(&raw const self.lease, fd.as_raw_fd(), range.start, range.end, cookie)
        };
        answer(result).map(|done| done.map(drop))
    }

    pub(super) fn unregister(&self, fd: BorrowedFd<'_>, cookie: u64) -> Option<io::Result<()>> {
        // SAFETY: as above.
        let result = unsafe { (self.functions.unregister)(&raw const self.lease, fd.as_raw_fd(), cookie) };
        answer(result).map(|done| done.map(drop))
    }

    /// Reads what there is; the number of records, at least one.
    pub(super) fn read(&self, fd: BorrowedFd<'_>, records: &mut [Event]) -> Option<io::Result<usize>> {
        let polled = self.polled.load(Ordering::Relaxed);
        if !polled {
            self.untidy.store(true, Ordering::Relaxed);
        }
        // SAFETY: as above, with room for that many records.
        let result = unsafe {
            (self.functions.read)(
                &raw const self.lease,
                fd.as_raw_fd(),
                records.as_mut_ptr(),
                records.len(),
                polled,
            )
        };
        answer(result)
    }

    /// Somebody gets the descriptor to see, and may poll it.
    pub(super) fn show(&self, fd: BorrowedFd<'_>) {
        if !self.polled.swap(true, Ordering::Relaxed) && self.untidy.load(Ordering::Relaxed) {
            // SAFETY: as above. Where it isn't to be had, the next ordinary read does it.
            unsafe { (self.functions.settle)(&raw const self.lease, fd.as_raw_fd()) };
        }
    }
}

impl Drop for Shortcut {
    fn drop(&mut self) {
        // SAFETY: filled by `to`, and nobody uses it any more.
        unsafe { (self.functions.release)(&raw mut self.lease) };
    }
}

fn answer(result: isize) -> Option<io::Result<usize>> {
    if result == NOT_HERE {
        return None;
    }
    Some(usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(result.unsigned_abs() as i32)))
}
