//! userfaultfd: which mappings of an address space go away (userfaultfd(2), ioctl_userfaultfd(2); the events are
//! of Linux 4.11, write-protect mode of 5.7).
//!
//! Ranges are watched in write-protect mode with nothing protected: no fault is ever delivered, only events. The
//! descriptor belongs to the address space of the process that made it; whoever holds it reads the events and may
//! watch and unwatch. The last close lets all waiters go and forgets all ranges.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use nix::errno::Errno;
use userfaultfd::{Error, Event, FeatureFlags, RegisterMode, Uffd};

use crate::check;

/// `UFFDIO_API` and `USERFAULTFD_IOC_NEW` of linux/userfaultfd.h: the crate makes these calls only for a
/// descriptor of its own process.
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xaa00;
/// Version of the interface.
const API: u64 = 0xaa;
/// `UFFD_USER_MODE_ONLY` (5.11): what needs no privilege, and events are all of it that is used.
pub const USER_MODE_ONLY: u64 = 1;

/// What every level needs: the events of unmapping, moving and dropping.
pub const EVENTS: u64 =
    FeatureFlags::EVENT_REMAP.bits() | FeatureFlags::EVENT_REMOVE.bits() | FeatureFlags::EVENT_UNMAP.bits();
/// `UFFD_FEATURE_PAGEFAULT_FLAG_WP` (5.7): anonymous memory in write-protect mode.
const WP: u64 = FeatureFlags::PAGEFAULT_FLAG_WP.bits();
/// `UFFD_FEATURE_WP_HUGETLBFS_SHMEM` (5.19), which the crate doesn't know.
const WP_SHARED: u64 = 1 << 12;
/// `UFFD_FEATURE_WP_ASYNC` (6.7), likewise: any memory.
const WP_ASYNC: u64 = 1 << 15;

/// Ways to get a userfaultfd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The system call for faults of user mode only: no privilege is needed.
    UserModeOnly,
    /// The plain system call.
    Plain,
    /// /dev/userfaultfd (6.1), by its permissions.
    Device,
}

/// A fresh userfaultfd of the calling process, close-on-exec, without features yet.
pub fn open(way: Way) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let fd = match way {
        // SAFETY: takes flags only.
        Way::Plain => check(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) })?,
        Way::UserModeOnly => {
            let flags = flags | USER_MODE_ONLY as i32;
            // SAFETY: as above.
            check(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) })?
        }
        Way::Device => {
            let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")?;
            // SAFETY: takes flags only.
            check(unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) }.into())?
        }
    };
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Asks for features, once in a userfaultfd's life. EINVAL: the kernel has some of them not, and others can be
/// asked for.
pub fn ask_for(fd: BorrowedFd<'_>, features: u64) -> io::Result<()> {
    // struct uffdio_api: api, features, ioctls.
    let mut api = [API, features, 0];
    // SAFETY: the call reads and writes three u64 behind the pointer.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) }.into())?;
    if api[1] & features == features { Ok(()) } else { Err(Errno::EINVAL.into()) }
}

/// Which memory can be watched.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Memory {
    /// Private anonymous memory.
    Anonymous,
    /// That, shared memory and huge pages of hugetlbfs.
    AnonymousAndShared,
    /// Any: mapped files, text and SysV segments too.
    Any,
}

/// What happens to watched mappings. The causing thread sleeps until the event is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// `[start, end)` was unmapped: munmap, mmap MAP_FIXED, mremap, brk. The whole range of the call.
    Unmapped {
        /// First byte.
        start: u64,
        /// First byte after it.
        end: u64,
    },
    /// A mapping was moved. Its new place is watched.
    Moved {
        /// Where it was.
        from: u64,
        /// Where it is.
        to: u64,
        /// Its length before, in bytes.
        len: u64,
    },
    /// The pages of `[start, end)` are about to be dropped: MADV_DONTNEED, FREE, REMOVE and their kin, for one
    /// mapping.
    Dropped {
        /// First byte.
        start: u64,
        /// First byte after it.
        end: u64,
    },
}

/// A userfaultfd in use.
#[derive(Debug)]
pub struct Watch {
    uffd: Uffd,
    memory: Memory,
}

impl Watch {
    /// Takes a fresh userfaultfd, of any process, and asks for as much as the kernel has. EBADF: it isn't one.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // It came from somebody else, and ioctls of other kinds of files may do anything.
        let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        if name.as_os_str() != "anon_inode:[userfaultfd]" {
            return Err(Errno::EBADF.into());
        }
        // A blocking one answers poll with POLLERR (userfaultfd_poll).
        let flags = nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_SETFL(flags))?;
        let levels = [
            (EVENTS | WP_ASYNC, Memory::Any),
            (EVENTS | WP | WP_SHARED, Memory::AnonymousAndShared),
            (EVENTS | WP, Memory::Anonymous),
        ];
        let mut refused = io::Error::from(Errno::EINVAL);
        for (features, memory) in levels {
            match ask_for(fd.as_fd(), features) {
                Ok(()) => {
                    // SAFETY: the descriptor is given up here and closed by the new owner.
                    let uffd = unsafe { Uffd::from_raw_fd(fd.into_raw_fd()) };
                    return Ok(Self { uffd, memory });
                }
                Err(e) => refused = e,
            }
        }
        Err(refused)
    }

    /// What it can watch.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Watches what is mapped in a range of whole pages. May wait for the address space's mapping lock.
    ///
    /// All of it or nothing: EINVAL nothing is mapped there or something that can't be watched, EPERM something
    /// mapped from a file that can't be written, EBUSY something that another userfaultfd watches, ENOMEM no more
    /// mappings, or the address space is gone. Holes are no error.
    pub fn arm(&self, start: u64, len: u64) -> io::Result<()> {
        self.uffd
            .register_with_mode(pointer(start), size(len)?, RegisterMode::WRITE_PROTECT)
            .map(drop)
            .map_err(into_io)
    }

    /// Ends that. EINVAL as for [`Self::arm`], without harm to what is watched elsewhere.
    pub fn disarm(&self, start: u64, len: u64) -> io::Result<()> {
        self.uffd.unregister(pointer(start), size(len)?).map_err(into_io)
    }

    /// Reads one event; the thread that caused it goes on at once. `None`: nobody waits any more, or it was none
    /// of a mapping.
    pub fn next(&self) -> io::Result<Option<Change>> {
        let address = |pointer: *mut c_void| pointer.addr() as u64;
        Ok(match self.uffd.read_event().map_err(into_io)? {
            Some(Event::Unmap { start, end }) => {
                Some(Change::Unmapped { start: address(start), end: address(end) })
            }
            Some(Event::Remap { from, to, len }) => {
                Some(Change::Moved { from: address(from), to: address(to), len: len as u64 })
            }
            Some(Event::Remove { start, end }) => {
                Some(Change::Dropped { start: address(start), end: address(end) })
            }
            // Not asked for, so never sent; a child's descriptor would close here.
            Some(Event::Fork { .. } | Event::Pagefault { .. }) | None => None,
        })
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

/// An address of another process: never followed here.
fn pointer(address: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(address as usize)
}

fn size(len: u64) -> io::Result<usize> {
    usize::try_from(len).map_err(|_| Errno::EINVAL.into())
}

fn into_io(error: Error) -> io::Error {
    match error {
        // Of another version of nix.
        Error::SystemError(errno) => io::Error::from_raw_os_error(errno as i32),
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    const PAGE: usize = 4096;

    fn watch() -> Option<Watch> {
        match open(Way::UserModeOnly).and_then(Watch::new) {
            Ok(watch) => Some(watch),
            Err(e) => {
                println!("SKIPPED tests of userfaultfd: it can't be had here: {e}");
                None
            }
        }
    }

    fn map(pages: usize) -> u64 {
        // SAFETY: a new mapping touches nothing that exists.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                pages * PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        at.addr() as u64
    }

    /// Does something to mappings on another thread, and reads the one event that it waits for.
    fn event_of(watch: &Arc<Watch>, act: impl FnOnce() + Send + 'static) -> Change {
        let actor = thread::spawn(act);
        let mut poll = [nix::poll::PollFd::new(watch.as_fd(), nix::poll::PollFlags::POLLIN)];
        assert_eq!(nix::poll::poll(&mut poll, 10_000u16), Ok(1), "no event came");
        thread::sleep(Duration::from_millis(20));
        assert!(!actor.is_finished(), "it didn't wait for its event to be read");
        let change = watch.next().unwrap().unwrap();
        actor.join().unwrap();
        assert_eq!(watch.next().unwrap(), None);
        change
    }

    #[test]
    fn an_event_holds_its_thread_until_it_is_read() {
        let Some(watch) = watch().map(Arc::new) else { return };
        let (at, len) = (map(4), 4 * PAGE as u64);
        watch.arm(at, len).unwrap();
        let page = PAGE as u64;
        let dropped = event_of(&watch, move || {
            // SAFETY: the range is this test's own, and nothing refers into it.
            unsafe { libc::madvise(pointer(at + page), PAGE, libc::MADV_DONTNEED) };
        });
        assert_eq!(dropped, Change::Dropped { start: at + page, end: at + 2 * page });
        let unmapped = event_of(&watch, move || {
            // SAFETY: as above.
            unsafe { libc::munmap(pointer(at), 4 * PAGE) };
        });
        assert_eq!(unmapped, Change::Unmapped { start: at, end: at + len });
    }

    #[test]
    fn what_is_not_watched_causes_no_event() {
        let Some(watch) = watch() else { return };
        let at = map(2);
        watch.arm(at, 2 * PAGE as u64).unwrap();
        watch.disarm(at, 2 * PAGE as u64).unwrap();
        // SAFETY: the range is this test's own; it would hang if it were watched.
        assert_eq!(unsafe { libc::munmap(pointer(at), 2 * PAGE) }, 0);
        assert_eq!(watch.next().unwrap(), None);
        assert_eq!(watch.arm(at, 1).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn the_last_close_lets_waiters_go() {
        let Some(watch) = watch() else { return };
        let at = map(1);
        watch.arm(at, PAGE as u64).unwrap();
        let actor = thread::spawn(move || {
            // SAFETY: the range is this test's own.
            unsafe { libc::munmap(pointer(at), PAGE) }
        });
        let mut poll = [nix::poll::PollFd::new(watch.as_fd(), nix::poll::PollFlags::POLLIN)];
        assert_eq!(nix::poll::poll(&mut poll, 10_000u16), Ok(1), "no event came");
        drop(watch);
        assert_eq!(actor.join().unwrap(), 0);
    }

    #[test]
    fn files_can_be_watched_where_any_memory_can() {
        let Some(watch) = watch() else { return };
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        // SAFETY: a new private mapping of a file.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        let armed = watch.arm(at.addr() as u64, PAGE as u64);
        assert_eq!(armed.is_ok(), watch.memory() == Memory::Any, "{armed:?}");
        drop(watch);
        // SAFETY: the mapping is this test's own.
        unsafe { libc::munmap(at, PAGE) };
    }

    #[test]
    fn something_else_is_not_taken_for_a_userfaultfd() {
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert_eq!(Watch::new(null).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
