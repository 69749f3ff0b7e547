//! What the preloadable library offers to the Rust client ([`SYMBOL`]): the calls on an open device without the look
//! whether the descriptor still is one, which its owner vouches for. No system call is made where none is needed.
//!
//! Whatever isn't to be had this way answers [`NOT_HERE`], and nothing was done: then the ordinary call is to be made.
//! That is so in a forked child, while the context is on the kernel module, while another thread of control of the same
//! storage is inside, for a read that would find nothing, and when the supervisor wants something.

use core::ffi::CStr;

use crate::device::Event;

/// Name of the exported [`Direct`]. What has this name never changes.
pub const SYMBOL: &CStr = c"ummunotify_direct_1";

/// See the module. Other results are those of the system call: at least 0, or a negative errno.
pub const NOT_HERE: isize = isize::MIN;

/// The right to use a context of this process, by whoever owns its descriptor.
#[repr(C, align(8))]
#[derive(Debug)]
pub struct Lease(pub [u64; 16]);

/// The functions. `fd` is the descriptor that the lease was taken with, still open.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Direct {
    /// Fills a lease: 0, or [`NOT_HERE`].
    pub lease: unsafe extern "C" fn(fd: i32, lease: *mut Lease) -> isize,
    /// Gives it back, before the descriptor is closed. Nobody may use it at the same time.
    pub release: unsafe extern "C" fn(lease: *mut Lease),
    /// REGISTER_REGION of `[start, end)`.
    pub register:
        unsafe extern "C" fn(lease: *const Lease, fd: i32, start: u64, end: u64, cookie: u64) -> isize,
    /// UNREGISTER_REGION.
    pub unregister: unsafe extern "C" fn(lease: *const Lease, fd: i32, cookie: u64) -> isize,
    /// read of up to `room` records; the number of records. Unless `polled`, a byte that wakes pollers may stay in the
    /// descriptor although nothing is left to report: a further read, or [`Direct::settle`], takes it out.
    pub read: unsafe extern "C" fn(
        lease: *const Lease,
        fd: i32,
        records: *mut Event,
        room: usize,
        polled: bool,
    ) -> isize,
    /// Makes the descriptor readable if, and only if, there is something to report: 0.
    pub settle: unsafe extern "C" fn(lease: *const Lease, fd: i32) -> isize,
}
