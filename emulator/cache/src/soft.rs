//! For tests and demonstrations: a pretended adapter that really pins, where there is no RDMA device; and a monitor that
//! tells nothing, to show what a cache does that asks nobody.
//!
//! A registration of [`SoftAdapter`] is a pipe into which the pages were spliced (vmsplice(2)): the pipe holds the physical pages, not the
//! addresses, as an adapter does. What is read from it is what those pages hold, whatever the process has mapped there
//! by then. It can only be read: such an adapter sends.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::{Access, Monitor, Registrar, RegistrarError};
use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

/// A monitor that never tells anything. With it a cache gives out registrations of pages that are gone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nobody;

impl Monitor for Nobody {
    fn register(&self, _: PageRange, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn unregister(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn generation(&self) -> u64 {
        0
    }

    fn events(&self, _: &mut dyn FnMut(u64)) -> io::Result<Option<u64>> {
        Ok(None)
    }
}

/// The adapter. It has no state: what it pinned is with the registrations.
#[derive(Clone, Copy, Debug, Default)]
pub struct SoftAdapter;

/// Pages that are pinned: two descriptors, and memory that the kernel takes for the pipe's.
#[derive(Debug)]
pub struct Pinned {
    range: PageRange,
    pages: Pipe,
}

#[derive(Debug)]
struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

impl Pipe {
    fn new() -> io::Result<Self> {
        let mut fds = [-1; 2];
        // SAFETY: room for two descriptors.
        if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened; nobody else owns them.
        let [read, write] = fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(Self { read, write })
    }

    /// Makes room for that many pages; a pipe has it for 16.
    fn make_room(&self, pages: u64) -> io::Result<()> {
        let bytes = libc::c_int::try_from(pages * PAGE_SIZE).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a command without a pointer.
        match unsafe { libc::fcntl(self.write.as_raw_fd(), libc::F_SETPIPE_SZ, bytes) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

impl Pinned {
    /// The addresses at which the pages were found.
    pub fn range(&self) -> PageRange {
        self.range
    }

    /// What the pages hold now, from `address` on, which lay in the range when it was registered.
    ///
    /// # Errors
    /// Past the end of the range: `UnexpectedEof`; or no pipe can be had.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        let end = address.checked_add(bytes.len() as u64);
        if address < self.range.start || end.is_none_or(|end| end > self.range.end) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // A second pipe with the same pages: reading from it leaves the first as it is.
        let copy = Pipe::new()?;
        let before = address - self.range.start;
        let wanted = (before + bytes.len() as u64).div_ceil(PAGE_SIZE);
        if wanted > 16 {
            copy.make_room(wanted)?;
        }
        let length = (wanted * PAGE_SIZE) as usize;
        // SAFETY: two pipes of ours; no memory is touched.
        let teed = unsafe { libc::tee(self.pages.read.as_raw_fd(), copy.write.as_raw_fd(), length, 0) };
        if usize::try_from(teed).ok() != Some(length) {
            return Err(io::Error::last_os_error());
        }
        let mut file = std::fs::File::from(copy.read);
        io::copy(&mut (&mut file).take(before), &mut io::sink())?;
        file.read_exact(bytes)
    }
}

impl Registrar for SoftAdapter {
    type Registration = Pinned;

    fn register(&self, range: PageRange, access: Access) -> Result<Pinned, RegistrarError> {
        let failed = |call, error: io::Error| RegistrarError {
            call,
            errno: error.raw_os_error().unwrap_or(0),
            range: Some(range),
            advice: match error.raw_os_error() {
                Some(libc::EFAULT) => "is all of it mapped?",
                Some(libc::ENOMEM) => "is all of it mapped, and writable?",
                Some(libc::EMFILE | libc::ENFILE) => {
                    "each registration takes two descriptors: raise ulimit -n"
                }
                Some(libc::EPERM) => "see fs.pipe-max-size and fs.pipe-user-pages-soft (sysctl)",
                _ => "",
            },
        };
        let pages = Pipe::new().map_err(|e| failed("pipe2", e))?;
        if range.len() > 16 * PAGE_SIZE {
            pages.make_room(range.len() / PAGE_SIZE).map_err(|e| failed("F_SETPIPE_SZ", e))?;
        }
        let (address, length) = (range.start as *mut libc::c_void, range.len() as usize);
        // As an adapter does that may write: pages are made the process's own before they are pinned, or the next write
        // of the process would be to a copy. MADV_POPULATE_WRITE since Linux 5.14; before, and for memory that can't be
        // written, what is there is taken.
        // SAFETY: it changes no contents, and the kernel checks the range.
        let populated = unsafe { libc::madvise(address, length, libc::MADV_POPULATE_WRITE) };
        if populated != 0 && access != Access::LOCAL_READ {
            return Err(failed("MADV_POPULATE_WRITE", io::Error::last_os_error()));
        }
        let mut done = 0;
        while done < range.len() {
            let piece = libc::iovec {
                iov_base: (range.start + done) as *mut libc::c_void,
                iov_len: (range.len() - done) as usize,
            };
            // SAFETY: the kernel checks the range and only reads what stands there.
            match unsafe { libc::vmsplice(pages.write.as_raw_fd(), &piece, 1, 0) } {
                n if n > 0 => done += n as u64,
                _ => return Err(failed("vmsplice", io::Error::last_os_error())),
            }
        }
        Ok(Pinned { range, pages })
    }

    fn deregister(&self, _: Pinned) -> Result<(), RegistrarError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_SIZE as usize;

    fn map(pages: usize, at: u64) -> u64 {
        let flags =
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | if at == 0 { 0 } else { libc::MAP_FIXED_NOREPLACE };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping that replaces none.
        let address = unsafe { libc::mmap(at as *mut _, pages * PAGE, protection, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        address.addr() as u64
    }

    fn fill(address: u64, pages: usize, byte: u8) {
        // SAFETY: mapped by the test, and nobody has a reference to it.
        unsafe { (address as *mut u8).write_bytes(byte, pages * PAGE) };
    }

    fn unmap(address: u64, pages: usize) {
        // SAFETY: as above.
        assert_eq!(unsafe { libc::munmap(address as *mut _, pages * PAGE) }, 0);
    }

    #[test]
    fn the_pages_are_looked_up_again() {
        let address = map(20, 0);
        let range = PageRange::new(address, address + 20 * PAGE_SIZE);
        // Before anything was written: the zero page is nobody's own.
        let pinned = SoftAdapter.register(range, Access::LOCAL_WRITE).unwrap();
        let read = |pinned: &Pinned, at| {
            let mut bytes = [0; 5000];
            pinned.read(at, &mut bytes).map(|()| bytes)
        };
        fill(address, 20, 7);
        assert_eq!(read(&pinned, address).unwrap(), [7; 5000]);
        fill(address, 20, 8);
        assert_eq!(read(&pinned, address + 100).unwrap(), [8; 5000]);
        assert_eq!(read(&pinned, range.end - 5000).unwrap(), [8; 5000]);
        unmap(address, 20);
        assert_eq!(read(&pinned, address).unwrap(), [8; 5000]);
        let error = SoftAdapter.register(range, Access::LOCAL_READ).unwrap_err();
        assert!(error.to_string().contains("is all of it mapped?"), "{error}");
        map(20, address);
        fill(address, 20, 9);
        assert_eq!(read(&pinned, address).unwrap(), [8; 5000]);
        let fresh = SoftAdapter.register(range, Access::LOCAL_READ).unwrap();
        assert_eq!(read(&fresh, address).unwrap(), [9; 5000]);
        for at in [address - 1, range.end - 4999, u64::MAX] {
            assert!(read(&pinned, at).is_err());
        }
        SoftAdapter.deregister(pinned).unwrap();
        unmap(address, 20);
    }
}
