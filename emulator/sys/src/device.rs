//! The real device, as the supervisor uses it for somebody else: the kernel module watches the address space of
//! whoever opened the descriptor, whoever calls it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ummunotify_abi::device::{
    ADOPT_COUNTER, Event, MAX_RECORDS, REGISTER_REGION, Register, UNREGISTER_REGION,
};

use crate::check;

/// An open /dev/ummunotify.
#[derive(Debug)]
pub struct Device(OwnedFd);

impl Device {
    /// Takes a descriptor of the device; what it is shows at the first call.
    pub fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Makes the module count into the page of `counter`. ENOTTY: the module doesn't know the call, or the
    /// descriptor is something else.
    pub fn adopt(&self, counter: BorrowedFd<'_>) -> io::Result<()> {
        let number: i32 = counter.as_raw_fd();
        // SAFETY: ADOPT_COUNTER reads one s32 behind the pointer.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), ADOPT_COUNTER.into(), &raw const number) }.into())?;
        Ok(())
    }

    /// REGISTER_REGION.
    pub fn register(&self, region: &Register) -> io::Result<()> {
        // SAFETY: REGISTER_REGION reads one `Register` behind the pointer.
        let done =
            unsafe { libc::ioctl(self.0.as_raw_fd(), REGISTER_REGION.into(), core::ptr::from_ref(region)) };
        check(done.into())?;
        Ok(())
    }

    /// UNREGISTER_REGION.
    pub fn unregister(&self, cookie: u64) -> io::Result<()> {
        // SAFETY: UNREGISTER_REGION reads one u64 behind the pointer.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), UNREGISTER_REGION.into(), &raw const cookie) };
        check(done.into())?;
        Ok(())
    }

    /// Reads what there is, a page of records at most; their number, 0 if there is nothing to report. The
    /// descriptor is asked first, since whoever else holds it may have made it a blocking one.
    pub fn read(&self, records: &mut [Event; MAX_RECORDS]) -> io::Result<usize> {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        if check(unsafe { libc::poll(&raw mut poll, 1, 0) }.into())? == 0 {
            return Ok(0);
        }
        // SAFETY: the buffer is writable, of that size, and any bytes make valid records.
        let got =
            unsafe { libc::read(self.0.as_raw_fd(), records.as_mut_ptr().cast(), size_of_val(records)) };
        match check(got as i64) {
            Ok(bytes) => Ok(usize::try_from(bytes).unwrap_or(0) / size_of::<Event>()),
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => Ok(0),
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
