//! The Rust client API: the device as a registration cache uses it.
//!
//! It works on either backend, the kernel module and the emulator, since it goes through libc's `open`,
//! `ioctl`, `read` and `mmap` as a C client does. Without the module the program must run under
//! `ummunotify run`, or with the shim preloaded.
//!
//! ```no_run
//! use ummunotify::client::{Notifier, PageRange};
//!
//! # fn main() -> std::io::Result<()> {
//! let notifier = Notifier::open_nonblocking()?;
//! notifier.register(PageRange::new(0x7000_0000, 0x7000_4000), 1)?; // first register, then pin
//! let mut seen = notifier.counter().generation();
//! // ... before each use of the cache:
//! if notifier.counter().generation() != seen {
//!     let mut events = notifier.events();
//!     for event in events.by_ref() {
//!         let event = event?;
//!         println!("region {} is stale, in {:x?}", event.cookie, event.range);
//!     }
//!     seen = events.generation().unwrap_or(seen);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Ordering
//!
//! * Register first, then pin: an invalidation that starts after [`Notifier::register`] returned is reported.
//! * After [`Notifier::unregister`] returned, nothing of that region is reported any more, not even an event
//!   that this API had read and not handed out yet. (A thread that reads at the same moment may still get it.)
//! * The counter has moved before the mapping changes, so before the call that changes it returns. The thread
//!   that made the call sees it by program order, another one through whatever told it of the call.
//! * A region stays registered after it was reported; the next hit reports it again.

mod shortcut;

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use crate::switch::{Place, SwitchError};
use shortcut::Shortcut;
pub use ummunotify_abi::PageRange;
use ummunotify_abi::device::{self, Event as Record, Register};

/// Bytes that clients map to read the counter; the kernel rounds up to the page.
const COUNTER_BYTES: usize = 8;

/// The path of the device with its terminating zero.
const PATH: &std::ffi::CStr = c"/dev/ummunotify";

/// A value of the counter, to be compared with a later one: equal means that nothing registered has become
/// stale in between.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Generation(u64);

impl Generation {
    /// The counter's value.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The counter page, mapped read-only. It outlives the [`Notifier`], and goes on counting as long as it is
/// mapped.
#[derive(Debug)]
pub struct Counter {
    word: NonNull<AtomicU64>,
}

// SAFETY: the page is only ever read, by single aligned loads, and stays mapped until the drop.
unsafe impl Send for Counter {}
// SAFETY: as above.
unsafe impl Sync for Counter {}

impl Counter {
    /// Maps the counter of the device descriptor `fd`.
    fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let page = unsafe {
            libc::mmap(
                core::ptr::null_mut(),
                COUNTER_BYTES,
                libc::PROT_READ,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(page.cast())
            .map(|word| Self { word })
            .ok_or_else(|| io::Error::from(io::ErrorKind::Other))
    }

    /// The generation now: one aligned load.
    ///
    /// ```no_run
    /// # fn main() -> std::io::Result<()> {
    /// # let notifier = ummunotify::client::Notifier::open()?;
    /// let before = notifier.counter().generation();
    /// let hit = notifier.counter().generation() == before; // nothing became stale: no system call needed
    /// # Ok(())
    /// # }
    /// ```
    #[inline(always)]
    pub fn generation(&self) -> Generation {
        // SAFETY: the word is mapped, readable and 8-aligned (start of a page) as long as self lives. Relaxed
        // loads of this size are sound on read-only memory; the fence costs no instruction on x86-64.
        let value = unsafe { self.word.as_ref() }.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        Generation(value)
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // SAFETY: this range was mapped by `map` and nobody else knows it.
        unsafe { libc::munmap(self.word.as_ptr().cast(), COUNTER_BYTES) };
    }
}

/// Who records the invalidations of a context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recording {
    /// The emulator, for a context that can switch.
    Emulated,
    /// The kernel module, for a context that can switch.
    Kmod,
    /// The kernel module, whose device the context is.
    Direct,
}

/// A region that was hit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invalidation {
    /// The cookie under which the region was registered.
    pub cookie: u64,
    /// What became stale: with `hint` the part of the region that the one invalidation covered, else the
    /// whole region.
    pub range: PageRange,
    /// True if the region was hit exactly once, by an invalidation over `range`.
    pub hint: bool,
}

/// Records that were read and not yet handed out.
#[derive(Default, Debug)]
struct Pending {
    records: VecDeque<Record>,
    /// LAST records handed out so far, and the value of the newest.
    lasts: u64,
    generation: Option<Generation>,
}

/// An open context: a set of registered regions, their events, and the counter.
///
/// Any number per process; they share nothing. All methods take `&self` and may be called from any thread.
#[derive(Debug)]
pub struct Notifier {
    /// Before the descriptor, which it uses.
    shortcut: Option<Shortcut>,
    fd: OwnedFd,
    counter: Arc<Counter>,
    pending: Mutex<Pending>,
    /// Held around read(2), so that batches are handed out in the order in which they were read.
    reading: Mutex<()>,
    /// It was found not to block.
    nonblocking: AtomicBool,
}

impl Notifier {
    /// Opens the device. [`Notifier::events`] will sleep until there is something to report.
    ///
    /// # Errors
    /// `ENOENT`: no such device; load the module, or start the program with `ummunotify run`. Whatever else
    /// the backend answers: see its log.
    pub fn open() -> io::Result<Self> {
        Self::open_with(0)
    }

    /// Opens the device with `O_NONBLOCK`: [`Notifier::events`] ends when there is nothing to report.
    ///
    /// # Errors
    /// As [`Notifier::open`].
    pub fn open_nonblocking() -> io::Result<Self> {
        Self::open_with(libc::O_NONBLOCK)
    }

    fn open_with(flags: i32) -> io::Result<Self> {
        // SAFETY: a NUL-terminated path and flags that take no mode.
        let fd = unsafe { libc::open(PATH.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC | flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: open just returned it; nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let counter = Arc::new(Counter::map(fd.as_fd())?);
        let shortcut = Shortcut::to(fd.as_fd());
        Ok(Self::new(shortcut, fd, counter))
    }

    fn new(shortcut: Option<Shortcut>, fd: OwnedFd, counter: Arc<Counter>) -> Self {
        let (pending, reading) = (Mutex::default(), Mutex::default());
        Self { shortcut, fd, counter, pending, reading, nonblocking: AtomicBool::new(false) }
    }

    /// Watches `range` under the name `cookie`. Any range is allowed: unaligned, unmapped, empty, overlapping.
    /// A region is hit by an invalidation `[s, e)` iff `range.start < e && s < range.end`.
    ///
    /// # Errors
    /// `EINVAL`: a region with that cookie is registered. `ENOMEM`: no room.
    pub fn register(&self, range: PageRange, cookie: u64) -> io::Result<()> {
        if let Some(done) = self.shortcut.as_ref().and_then(|s| s.register(self.fd.as_fd(), range, cookie)) {
            return done;
        }
        let argument = Register { start: range.start, end: range.end, cookie, flags: 0, reserved: 0 };
        // SAFETY: the command reads one `Register` behind the pointer.
        self.ioctl(device::REGISTER_REGION, unsafe { as_argument(&argument) })
    }

    /// Stops watching the region `cookie`; an event of it that is still queued vanishes.
    ///
    /// # Errors
    /// `EINVAL`: no such region.
    pub fn unregister(&self, cookie: u64) -> io::Result<()> {
        match self.shortcut.as_ref().and_then(|s| s.unregister(self.fd.as_fd(), cookie)) {
            Some(done) => done?,
            // SAFETY: the command reads one u64 behind the pointer.
            None => self.ioctl(device::UNREGISTER_REGION, unsafe { as_argument(&cookie) })?,
        }
        let mut pending = lock(&self.pending);
        pending.records.retain(|r| r.kind != device::EVENT_INVAL || r.cookie_counter != cookie);
        Ok(())
    }

    /// The regions that were hit since they were last reported, up to the record LAST that ends the list. Then
    /// [`Events::generation`] is the counter's value for which the list was complete.
    ///
    /// Dropping the iterator early loses nothing: the next one goes on where it stopped. Several at a time
    /// share the events; each ends with the next LAST that any of them meets.
    pub fn events(&self) -> Events<'_> {
        self.events_with(Patience::AsOpened)
    }

    /// The counter.
    #[inline]
    pub fn counter(&self) -> &Counter {
        &self.counter
    }

    /// The counter, to keep beyond the notifier's life.
    pub fn share_counter(&self) -> Arc<Counter> {
        Arc::clone(&self.counter)
    }

    /// Who records for this context now.
    ///
    /// # Errors
    /// The supervisor can't be asked: see [`SwitchError`].
    pub fn backend(&self) -> Result<Recording, SwitchError> {
        match crate::switch::whereabouts(self.fd.as_fd()) {
            Ok(Place::Emulated) => Ok(Recording::Emulated),
            Ok(Place::Kmod) => Ok(Recording::Kmod),
            Err(SwitchError::Direct) => Ok(Recording::Direct),
            Err(e) => Err(e),
        }
    }

    /// Moves this context to the other backend, while other threads go on using it; false if it was there. The
    /// descriptor, the counter and the regions stay; everything is reported as invalid, without hint. `patience`
    /// bounds the wait for threads that are inside calls which change mappings.
    ///
    /// # Errors
    /// See [`SwitchError`]: the context is where it was. [`SwitchError::Direct`] for one that was opened on the
    /// kernel module's device, which never switches.
    ///
    /// ```no_run
    /// use ummunotify::client::{Notifier, Place};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let notifier = Notifier::open_nonblocking()?; // under `ummunotify run --backend emulated`
    /// notifier.switch(Place::Kmod, std::time::Duration::from_secs(5))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn switch(&self, to: Place, patience: Duration) -> Result<bool, SwitchError> {
        crate::switch::switch_descriptor(self.fd.as_fd(), to, patience, || {
            // Any call on the device will do; this one it refuses (ENOTTY).
            let _ = self.ioctl(0, core::ptr::null());
        })
    }

    fn ioctl(&self, command: u32, argument: *const libc::c_void) -> io::Result<()> {
        // SAFETY: the callers pass the argument that the command asks for; the device writes nothing to it.
        match unsafe { libc::ioctl(self.fd.as_raw_fd(), command.into(), argument) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// For who must not wait.
    fn check_nonblocking(&self) -> io::Result<()> {
        // SAFETY: a command without a pointer.
        let flags = unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_GETFL) };
        if flags & libc::O_NONBLOCK == 0 {
            let message = "a cache needs a device that doesn't block: Notifier::open_nonblocking";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        self.nonblocking.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn events_with(&self, patience: Patience) -> Events<'_> {
        let lasts = lock(&self.pending).lasts;
        Events { notifier: self, patience, lasts, generation: None, ended: false }
    }

    /// One read(2): a page of records at most.
    fn fetch(&self, patience: Patience) -> io::Result<()> {
        let _one_reader = lock(&self.reading);
        if !lock(&self.pending).records.is_empty() {
            return Ok(()); // another thread read while this one waited
        }
        let mut records = [Record::default(); device::MAX_RECORDS];
        if let Some(got) = self.shortcut.as_ref().and_then(|s| s.read(self.fd.as_fd(), &mut records)) {
            lock(&self.pending).records.extend(records.iter().take(got?));
            return Ok(());
        }
        if patience == Patience::None {
            self.check_nonblocking()?;
        }
        // SAFETY: the buffer is writable, of that size, and any bytes make valid records.
        let got =
            unsafe { libc::read(self.fd.as_raw_fd(), records.as_mut_ptr().cast(), size_of_val(&records)) };
        let Ok(got) = usize::try_from(got) else { return Err(io::Error::last_os_error()) };
        if got < size_of::<Record>() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        lock(&self.pending).records.extend(records.iter().take(got / size_of::<Record>()));
        Ok(())
    }
}

/// For a cache, which reads the events itself: the notifier must be [non-blocking](Notifier::open_nonblocking).
impl ummunotify_cache::Monitor for Notifier {
    fn register(&self, range: PageRange, cookie: u64) -> io::Result<()> {
        Notifier::register(self, range, cookie)
    }

    fn unregister(&self, cookie: u64) -> io::Result<()> {
        Notifier::unregister(self, cookie)
    }

    #[inline(always)]
    fn generation(&self) -> u64 {
        self.counter.generation().get()
    }

    fn events(&self, stale: &mut dyn FnMut(u64)) -> io::Result<Option<u64>> {
        if !self.nonblocking.load(Ordering::Relaxed) {
            self.check_nonblocking()?;
        }
        let mut events = self.events_with(Patience::None);
        for event in events.by_ref() {
            stale(event?.cookie);
        }
        Ok(events.generation().map(Generation::get))
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        if let Some(shortcut) = &self.shortcut {
            shortcut.show(self.fd.as_fd());
        }
        self.fd.as_fd()
    }
}

impl AsRawFd for Notifier {
    /// For poll, epoll and fcntl. [`Notifier::events`] may hold records that were read already, so drain it
    /// to its end before waiting.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// A pointer for ioctl.
///
/// # Safety
/// The command must read no more than a `T` there.
unsafe fn as_argument<T>(value: &T) -> *const libc::c_void {
    core::ptr::from_ref(value).cast()
}

/// A poisoned lock guards plain data that is consistent between statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Events until LAST; see [`Notifier::events`].
///
/// # Errors
/// An item may be an error: `EINTR` (a signal whose handler has no `SA_RESTART`; go on if you like), `EIO`
/// (the backend is gone), after which the iterator ends. A non-blocking device with nothing to report ends
/// the iterator without an item and without a generation.
#[derive(Debug)]
pub struct Events<'a> {
    notifier: &'a Notifier,
    patience: Patience,
    lasts: u64,
    generation: Option<Generation>,
    ended: bool,
}

/// Whether a read may sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Patience {
    /// If the device was opened so.
    AsOpened,
    /// Never: it must have been opened so.
    None,
}

impl Events<'_> {
    /// The value of the counter that came with LAST: every hit up to it has been reported. `None` while LAST
    /// wasn't reached, and where a non-blocking device had nothing to say.
    pub fn generation(&self) -> Option<Generation> {
        self.generation
    }

    fn end(&mut self, generation: Option<Generation>) -> Option<io::Result<Invalidation>> {
        self.ended = true;
        self.generation = generation;
        None
    }
}

impl Iterator for Events<'_> {
    type Item = io::Result<Invalidation>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            let record = {
                let mut pending = lock(&self.notifier.pending);
                if pending.lasts != self.lasts {
                    let generation = pending.generation; // another iterator met LAST
                    return self.end(generation);
                }
                let record = pending.records.pop_front();
                if let Some(last) = record.filter(|r| r.kind == device::EVENT_LAST) {
                    pending.lasts += 1;
                    pending.generation = Some(Generation(last.cookie_counter));
                    return self.end(Some(Generation(last.cookie_counter)));
                }
                record
            };
            match record {
                Some(r) if r.kind == device::EVENT_INVAL => {
                    return Some(Ok(Invalidation {
                        cookie: r.cookie_counter,
                        range: PageRange::new(r.hint_start, r.hint_end),
                        hint: r.flags & device::FLAG_HINT != 0,
                    }));
                }
                Some(_) => return Some(Err(io::ErrorKind::InvalidData.into())),
                None => match self.notifier.fetch(self.patience) {
                    Ok(()) => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return self.end(None),
                    Err(e) => {
                        self.ended = e.kind() != io::ErrorKind::Interrupted;
                        return Some(Err(e));
                    }
                },
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    //! A pipe stands for the device: what is read from it is what the device would say.

    use super::*;
    use std::io::Write;

    fn record(kind: u32, flags: u32, start: u64, end: u64, value: u64) -> Record {
        Record { kind, flags, hint_start: start, hint_end: end, cookie_counter: value }
    }

    fn inval(cookie: u64) -> Record {
        record(device::EVENT_INVAL, device::FLAG_HINT, 0x1000, 0x2000, cookie)
    }

    fn last(value: u64) -> Record {
        record(device::EVENT_LAST, 0, 0, 0, value)
    }

    fn bytes(records: &[Record]) -> Vec<u8> {
        let mut out = Vec::new();
        for r in records {
            out.extend(r.kind.to_ne_bytes());
            out.extend(r.flags.to_ne_bytes());
            out.extend(r.hint_start.to_ne_bytes());
            out.extend(r.hint_end.to_ne_bytes());
            out.extend(r.cookie_counter.to_ne_bytes());
        }
        out
    }

    /// A notifier on the read end of a pipe, the pipe's write end, and the word that stands for the counter.
    fn notifier() -> (Notifier, std::fs::File, std::fs::File) {
        let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_NONBLOCK).unwrap();
        let name = c"counter";
        let memory = nix::sys::memfd::memfd_create(name, nix::sys::memfd::MFdFlags::empty()).unwrap();
        let memory = std::fs::File::from(memory);
        memory.set_len(4096).unwrap();
        let counter = Arc::new(Counter::map(memory.as_fd()).unwrap());
        let n = Notifier::new(None, read, counter);
        (n, std::fs::File::from(write), memory)
    }

    #[test]
    fn events_end_at_last_and_carry_its_value() {
        let (n, mut w, _) = notifier();
        w.write_all(&bytes(&[inval(1), record(0, 0, 0x5000, 0x9000, 2), last(7), inval(3), last(8)]))
            .unwrap();
        let mut events = n.events();
        let got: Vec<_> = events.by_ref().map(Result::unwrap).collect();
        let range = PageRange::new(0x1000, 0x2000);
        assert_eq!(got[0], Invalidation { cookie: 1, range, hint: true });
        assert_eq!(got[1], Invalidation { cookie: 2, range: PageRange::new(0x5000, 0x9000), hint: false });
        assert_eq!((got.len(), events.generation().map(Generation::get)), (2, Some(7)));
        assert!(events.next().is_none());
        let rest: Vec<_> = n.events().map(|e| e.unwrap().cookie).collect();
        assert_eq!(rest, [3]);
    }

    #[test]
    fn nothing_to_report_ends_without_a_generation() {
        let (n, _w, _) = notifier();
        let mut events = n.events();
        assert!(events.next().is_none());
        assert_eq!(events.generation(), None);
    }

    #[test]
    fn dropping_the_iterator_loses_nothing() {
        let (n, mut w, _) = notifier();
        w.write_all(&bytes(&[inval(1), inval(2), last(2)])).unwrap();
        assert_eq!(n.events().next().unwrap().unwrap().cookie, 1);
        let mut events = n.events();
        assert_eq!(events.next().unwrap().unwrap().cookie, 2);
        assert!(events.next().is_none());
        assert_eq!(events.generation().unwrap().get(), 2);
    }

    #[test]
    fn an_inner_iterator_that_meets_last_ends_the_outer_one() {
        let (n, mut w, _) = notifier();
        w.write_all(&bytes(&[inval(1), inval(2), last(2)])).unwrap();
        let mut outer = n.events();
        assert_eq!(outer.next().unwrap().unwrap().cookie, 1);
        assert_eq!(n.events().count(), 1);
        assert!(outer.next().is_none());
        assert_eq!(outer.generation().unwrap().get(), 2);
    }

    #[test]
    fn a_list_longer_than_one_read_is_one_list() {
        let (n, mut w, _) = notifier();
        let mut records: Vec<_> = (0..300).map(inval).collect();
        records.push(last(300));
        w.write_all(&bytes(&records)).unwrap();
        let cookies: Vec<_> = n.events().map(|e| e.unwrap().cookie).collect();
        assert_eq!(cookies, (0..300).collect::<Vec<_>>());
    }

    #[test]
    fn a_dead_device_ends_the_list_with_an_error() {
        let (n, w, _) = notifier();
        drop(w); // read answers 0
        let mut events = n.events();
        assert_eq!(events.next().unwrap().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(events.next().is_none());
    }

    #[test]
    fn errors_of_the_device_come_through() {
        let (n, _w, _) = notifier();
        let range = PageRange::new(0, 1);
        assert_eq!(n.register(range, 1).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(n.unregister(1).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    }

    #[test]
    fn the_counter_is_read_where_it_lies_and_outlives_the_notifier() {
        use std::os::unix::fs::FileExt;
        let (n, _w, memory) = notifier();
        let before = n.counter().generation();
        assert_eq!(before.get(), 0);
        memory.write_all_at(&9u64.to_ne_bytes(), 0).unwrap();
        assert_ne!(n.counter().generation(), before);
        let counter = n.share_counter();
        drop(n);
        memory.write_all_at(&10u64.to_ne_bytes(), 0).unwrap();
        assert_eq!(counter.generation().get(), 10);
    }
}
