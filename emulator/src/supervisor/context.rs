//! A context: one open file description of the device.
//!
//! Its parts: the arena (regions and events, shared with the opener), the counter page (shared with the
//! opener and, read-only, with clients) and the bell, the write end of the pipe whose read end is the device
//! descriptor. The pipe's read end is held by clients only: when the last one closes it, the bell polls
//! `POLLERR`, wherever the copies were (dup, fork, `SCM_RIGHTS`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crossbeam_channel::Sender;
use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, OFlag, SealFlag};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::memfd::MFdFlags;
use nix::sys::stat::Mode;
use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;
use ummunotify_abi::wire::{self, MAX_ADDRESS};
use ummunotify_engine::{ARENA_BYTES, Begin, Engine, Reason, Recorded, Recorder as Hand};
use ummunotify_sys::pipe;

use super::recorder::{Recorder, Watch};
use super::sleepers::{GoOn, Ring, Sleeper, Sleepers, Slept};
use super::socket::Door;
use super::spare;
use super::switch::Turn;
use crate::target::{Device, Mapping};
use crate::trap::operation::Reach;

/// How long a reader waits for the waker to end.
pub const WAKING: Duration = Duration::from_secs(2);

/// One context.
#[derive(Debug)]
pub struct Context {
    /// Names it on the wire.
    pub number: u64,
    /// Inode of the pipe: its identity among processes.
    pub inode: u64,
    /// It was opened by a shim, which works on the arena too; else only the supervisor does.
    pub is_shims: bool,
    /// Regions and events.
    pub engine: Engine,
    /// What the engine points into: arena and counter.
    _mappings: [MmapRaw; 2],
    arena_fd: OwnedFd,
    counter_fd: OwnedFd,
    counter_identity: FileName,
    bell: OwnedFd,
    /// Who sleeps in a read of the pipe; held by whoever writes to it or takes out of it.
    sleepers: Mutex<Sleepers>,
    /// Told when the waker is done.
    awake: Condvar,
    /// Calls the waker; only where readers can sleep so.
    alarm: Option<Sender<u64>>,
    door: Option<Door>,
    /// Where the opener still maps the counter after the last descriptor was closed.
    lingering: Mutex<Option<PageRange>>,
    recorder: Mutex<Recorder>,
    watch: Mutex<Watch>,
    turn: Mutex<Turn>,
    /// The turn has changed.
    pub(super) turned: Condvar,
}

impl Context {
    /// Makes a context and the device descriptor to hand out. `alarm`: for a program without a shim.
    pub fn create(number: u64, nonblocking: bool, alarm: Option<Sender<u64>>) -> io::Result<(Self, OwnedFd)> {
        let _spare = spare::leave();
        let (device, bell) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        // O_NONBLOCK belongs to each end's own file description.
        nix::fcntl::fcntl(&bell, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        if nonblocking {
            nix::fcntl::fcntl(&device, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        // A help for holders that can't ask us; nothing else rests on it.
        if let Err(e) = nix::sys::stat::fchmod(&device, Mode::from_bits_truncate(wire::PIPE_MODE)) {
            super::log::debug!("context {number}: fchmod: {e}");
        }
        let inode = nix::sys::stat::fstat(&device)?.st_ino;
        let arena_fd = sealed_memfd(c"ummunotify-arena", ARENA_BYTES as u64)?;
        let counter_fd = sealed_memfd(c"ummunotify-counter", PAGE_SIZE)?;
        let counter_identity = FileName::of(&counter_fd)?;
        let arena = MmapOptions::new().map_raw(&arena_fd)?;
        let counter = MmapOptions::new().map_raw(&counter_fd)?;
        let base = NonNull::new(arena.as_mut_ptr()).ok_or(io::ErrorKind::OutOfMemory)?;
        let word = NonNull::new(counter.as_mut_ptr()).ok_or(io::ErrorKind::OutOfMemory)?.cast();
        // SAFETY: both mappings are fresh, zeroed, writable, page-aligned, of the sizes stated, sealed against
        // resizing, and live as long as this context, which owns the engine's only copies here.
        let engine = unsafe { Engine::create(base, arena.len(), word) }
            .map_err(|e| io::Error::other(format!("a fresh arena was refused: {e:?}")))?;
        let mut name = [0; MAX_ADDRESS];
        let length = wire::context_address(&mut name, inode);
        // Without it only the opener can use the descriptor; that much is still served.
        let door = match Door::open(&name[..length]) {
            Ok(door) => Some(door),
            Err(e) => {
                super::log::warning!("context {number}: other holders can't be served: bind: {e}");
                None
            }
        };
        let context = Self {
            number,
            inode,
            is_shims: alarm.is_none(),
            engine,
            _mappings: [arena, counter],
            arena_fd,
            counter_fd,
            counter_identity,
            bell,
            sleepers: Mutex::new(Sleepers::default()),
            awake: Condvar::new(),
            alarm,
            door,
            lingering: Mutex::new(None),
            recorder: Mutex::new(Recorder::Supervisor),
            watch: Mutex::default(),
            turn: Mutex::default(),
            turned: Condvar::new(),
        };
        Ok((context, device))
    }

    /// The arena and the counter, for the opener.
    pub fn shared_memory(&self) -> [BorrowedFd<'_>; 2] {
        [self.arena_fd.as_fd(), self.counter_fd.as_fd()]
    }

    /// The counter reopened read-only: mapped MAP_SHARED it can't be made writable, by anyone, later
    /// (mmap(2): EACCES).
    pub fn read_only_counter(&self) -> io::Result<OwnedFd> {
        Ok(File::open(format!("/proc/self/fd/{}", self.counter_fd.as_raw_fd()))?.into())
    }

    /// Whether a mapping is one of the counter.
    pub fn is_counter(&self, mapping: &Mapping) -> bool {
        self.counter_identity.is_mapped_by(mapping)
    }

    /// Whether a call that reaches so far may hit a region.
    pub fn may_be_hit(&self, reach: Reach) -> bool {
        match reach {
            Reach::Nothing => false,
            Reach::Ranges(..) => reach.ranges().any(|range| self.engine.may_hit(range)),
            Reach::AnyFileMapping | Reach::Everything => self.engine.regions() > 0,
        }
    }

    /// Records one invalidation.
    pub fn record(&self, piece: PageRange) {
        match self.engine.record(piece) {
            Recorded::Missed => {}
            Recorded::Hit | Recorded::Everything => self.ring(),
        }
    }

    /// Records the end of an operation: see [`Engine::end`].
    pub fn record_after(&self, begin: Begin, piece: PageRange) {
        match self.engine.end(begin, piece) {
            Recorded::Missed => {}
            Recorded::Hit | Recorded::Everything => self.ring(),
        }
    }

    /// Records that everything may be invalid.
    pub fn invalidate_all(&self, reason: Reason) {
        self.engine.invalidate_all(reason);
        self.ring();
    }

    /// Makes the device descriptor readable, and wakes and signals who waits. The counter has moved before. Where
    /// somebody sleeps in the pipe's own read, that comes later: see [`super::sleepers`].
    pub fn ring(&self) {
        self.ring_among(&mut lock(&self.sleepers));
    }

    fn ring_among(&self, sleepers: &mut Sleepers) {
        match sleepers.ring() {
            Ring::Now => self.write_byte(),
            Ring::Later => {}
            // The channel has no bound, and its other end lives as long as the process.
            Ring::Wake => drop(self.alarm.as_ref().map(|alarm| alarm.send(self.number))),
        }
    }

    fn write_byte(&self) {
        // Before the byte: whoever takes bytes out takes the note back first.
        self.engine.rung();
        // EAGAIN: the pipe is full, so the descriptor is readable and every sleeper was woken. EPIPE: nobody
        // holds the descriptor any more. Neither is an error.
        let _ = nix::unistd::write(&self.bell, &[1]);
    }

    /// Makes the descriptor not readable, after a read has left nothing to report.
    pub fn hush(&self, engine: &Engine) {
        let mut sleepers = lock(&self.sleepers);
        self.drain();
        // A recorder that rang between the read and the drain lost its byte; it moved the counter first.
        if engine.is_readable() {
            self.ring_among(&mut sleepers);
        }
    }

    /// Lets a task sleep in the pipe's own read until something is to be read.
    pub fn sleep(&self, sleeper: Sleeper) -> Slept {
        let sleepers = lock(&self.sleepers);
        // Not beside a waker, whose byte would end this sleep.
        let awake = self.awake.wait_timeout_while(sleepers, WAKING, |s| s.is_waking());
        let (mut sleepers, late) = awake.unwrap_or_else(std::sync::PoisonError::into_inner);
        if late.timed_out() {
            return Slept::No;
        }
        // Under the lock nobody rings: whoever records now, has moved the counter, or will find this sleeper.
        if self.engine.is_readable() {
            return Slept::Readable;
        }
        if !self.drain() {
            return Slept::No;
        }
        sleepers.add(sleeper);
        Slept::Yes
    }

    /// Waits until the descriptor is readable if there is something to read, for at most that time. Who was told of it,
    /// and what goes on, may poll at once. Not with the recorder held, which the waker needs.
    pub fn await_waker(&self, limit: Duration) {
        let sleepers = lock(&self.sleepers);
        if sleepers.will_ring() && self.engine.is_readable() {
            drop(self.awake.wait_timeout_while(sleepers, limit, |s| s.will_ring()));
        }
    }

    /// The task does something else.
    pub fn left(&self, tid: u32) {
        lock(&self.sleepers).forget(tid);
    }

    /// Has the sleepers woken that a ring found, then rings; what `wake` returns is dropped only then.
    pub fn wake<T>(&self, wake: impl FnOnce(Vec<Arc<Sleeper>>) -> T) {
        let sleeping = lock(&self.sleepers).take();
        let held = wake(sleeping);
        let mut sleepers = lock(&self.sleepers);
        let (rings, calls) = sleepers.woken();
        for _ in 0..rings {
            self.write_byte();
        }
        if !self.engine.is_readable() {
            // The woken have read everything meanwhile.
            self.drain();
        }
        drop(sleepers);
        self.awake.notify_all();
        drop(held);
        drop(calls);
    }

    /// Lets the calls go on that wait for a ring.
    pub fn hurry(&self) {
        let calls = lock(&self.sleepers).overdue();
        self.awake.notify_all();
        drop(calls);
    }

    /// Keeps a call waiting for as long as a ring that was made before is on its way.
    pub fn delay(&self, call: &Arc<GoOn>) {
        lock(&self.sleepers).delay(call);
    }

    /// Takes every byte out of the pipe, for a reader that can't do it itself: through a passing second read
    /// end, since a permanent one would hide that the clients have closed theirs. False if some may be left.
    fn drain(&self) -> bool {
        self.engine.hush();
        // Mostly there is none, and where no descriptor is left this can still be told.
        if matches!(pipe::pending(self.bell.as_fd()), Ok(0)) {
            return true;
        }
        let drained = spare::with(|| {
            let end = nix::fcntl::open(
                format!("/proc/self/fd/{}", self.bell.as_raw_fd()).as_str(),
                OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC,
                Mode::empty(),
            )?;
            let mut bytes = [0; 4096];
            while matches!(nix::unistd::read(&end, &mut bytes), Ok(n) if n == bytes.len()) {}
            Ok(())
        });
        if let Err(e) = &drained {
            super::log::debug!("context {}: drain: {e}", self.number);
        }
        drained.is_ok()
    }

    /// Nobody has a descriptor or the counter any more: tells the opener, whose threads may still look at the arena. A
    /// read that slept when the last descriptor was closed still finds its records there.
    pub fn retire(&self) {
        self.engine.set_recorder(Hand::Nobody);
    }

    /// The bell, for polling.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Where other holders ask.
    pub fn door(&self) -> Option<&Door> {
        self.door.as_ref()
    }

    /// Whether every descriptor of the context is closed: nobody can call anything on it (POLLERR, poll(2)).
    pub fn is_closed(&self) -> bool {
        let mut bell = [PollFd::new(self.bell.as_fd(), PollFlags::empty())];
        let seen = nix::poll::poll(&mut bell, PollTimeout::ZERO);
        seen.is_ok() && bell[0].any().unwrap_or(false)
    }

    /// Who records, and the right to call it: held by a clerk for the length of a client's call.
    pub fn recorder(&self) -> MutexGuard<'_, Recorder> {
        lock(&self.recorder)
    }

    /// Ends it for good: everything is invalid, nothing is recorded any more, and every call is told so. Whoever
    /// registers at this moment does so before, and is told that it is invalid, or fails.
    pub fn end(&self) {
        let mut recorder = self.recorder();
        if !matches!(*recorder, Recorder::Supervisor) {
            return;
        }
        *recorder = Recorder::Ended;
        self.invalidate_all(Reason::Detached);
        // Not before: a call that isn't recorded finds the counter moved when it returns.
        self.watch().end();
    }

    /// See [`Self::end`].
    pub fn is_ended(&self) -> bool {
        matches!(*self.recorder(), Recorder::Ended)
    }

    /// Which trapped calls are recorded here.
    pub fn watch(&self) -> MutexGuard<'_, Watch> {
        lock(&self.watch)
    }

    /// The state of a switch.
    pub(super) fn turn(&self) -> MutexGuard<'_, Turn> {
        lock(&self.turn)
    }

    /// Waits until the turn has changed, or for that time.
    pub(super) fn wait_turn<'a>(
        &'a self,
        turn: MutexGuard<'a, Turn>,
        time: Duration,
    ) -> MutexGuard<'a, Turn> {
        self.turned.wait_timeout(turn, time).unwrap_or_else(std::sync::PoisonError::into_inner).0
    }

    /// Remembers where the counter is still mapped, or that it no longer is.
    pub fn set_lingering(&self, at: Option<PageRange>) {
        *lock(&self.lingering) = at;
    }

    /// Where the counter was last seen mapped after the last close.
    pub fn lingering(&self) -> Option<PageRange> {
        *lock(&self.lingering)
    }
}

/// A memfd as mapping tables name it.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileName {
    device: Device,
    inode: u64,
}

impl FileName {
    /// Of an open file.
    pub fn of(fd: &OwnedFd) -> nix::Result<Self> {
        let stat = nix::sys::stat::fstat(fd)?;
        Ok(Self { device: Device::from_stat(stat.st_dev), inode: stat.st_ino })
    }

    /// Whether the mapping is one of this file.
    pub fn is_mapped_by(self, mapping: &Mapping) -> bool {
        mapping.inode == self.inode && mapping.device == self.device
    }
}

/// Locks, whatever became of another thread that held it: the data behind our locks is replaced whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A memfd of fixed size: nobody, a hostile client neither, can shrink it under our mapping (that would be a
/// SIGBUS here).
pub(super) fn sealed_memfd(name: &std::ffi::CStr, bytes: u64) -> io::Result<OwnedFd> {
    let fd = nix::sys::memfd::memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    nix::unistd::ftruncate(&fd, i64::try_from(bytes).map_err(io::Error::other)?)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    nix::fcntl::fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::spent::without_descriptors;
    use std::time::Instant;

    /// A call that is let go without being recorded must find that everything is invalid already.
    #[test]
    fn who_ends_says_so_before_calls_are_let_go() {
        let (context, _device) = Context::create(1, true, None).expect("a context");
        let before = context.engine.counter();
        std::thread::scope(|scope| {
            let watch = context.watch();
            let ending = scope.spawn(|| context.end());
            let start = Instant::now();
            while context.engine.counter() == before {
                assert!(start.elapsed() < Duration::from_secs(20), "it waits for the watch first");
                std::thread::yield_now();
            }
            drop(watch);
            ending.join().expect("it ends");
        });
        assert!(!context.watch().admits(10) && context.is_ended());
    }

    #[test]
    fn a_byte_that_cannot_be_taken_out_ends_a_sleep() {
        let (alarm, _calls) = crossbeam_channel::unbounded();
        let (context, _device) = Context::create(1, true, Some(alarm)).expect("a context");
        let sleeper = || Sleeper::new(ummunotify_sys::process::gettid(), 0);
        let sleep = || context.sleep(sleeper());
        assert_eq!(without_descriptors(sleep), Slept::Yes, "no byte, no need to take it out");
        lock(&context.sleepers).take();
        context.ring();
        assert_eq!(without_descriptors(sleep), Slept::No);
        assert_eq!(sleep(), Slept::Yes);
    }

    #[test]
    fn a_waker_at_work_is_not_waited_for_where_something_is_left() {
        let (alarm, _calls) = crossbeam_channel::unbounded();
        let (context, _device) = Context::create(1, true, Some(alarm)).expect("a context");
        assert_eq!(context.sleep(Sleeper::new(1 << 23, 0)), Slept::Yes);
        context.invalidate_all(Reason::Requested);
        let byte = || pipe::pending(context.bell()).expect("it is a pipe");
        let start = Instant::now();
        context.await_waker(Duration::from_millis(20));
        assert!(start.elapsed() >= Duration::from_millis(20) && byte() == 0, "there is no waker yet");
        std::thread::scope(|scope| {
            scope.spawn(|| context.wake(|_| std::thread::sleep(Duration::from_millis(20))));
            context.await_waker(Duration::from_secs(20));
            assert_eq!(byte(), 1);
        });
    }
}
