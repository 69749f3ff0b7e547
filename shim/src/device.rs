//! The calls of the device, once a descriptor is known to be one.
//!
//! The opener's address space works on the arena itself. Any other holder asks the supervisor, and shows the
//! descriptor as proof. All results are those of a system call: at least 0, or a negative errno.

use core::ffi::{c_int, c_long, c_ulong, c_void};

use ummunotify_abi::PageRange;
use ummunotify_abi::device::{
    EXCHANGE_FEATURES, Event, MAX_RECORDS, REGISTER_REGION, Register, UNREGISTER_REGION,
};
use ummunotify_abi::wire::{Op, WAIT_LENGTH};
use ummunotify_engine::{Engine, Port, ReadError, Reason, RegisterError, UnregisterError};

use crate::context::{CleanUp, Ticket};
use crate::door::{Answer, Buffer, Connection, Owned};
use crate::host::ClientHost;
use crate::memory::{self, Target};
use crate::section::Section;
use crate::{bell, next, sys, table, userfault};

/// Bytes of a record.
const RECORD: usize = size_of::<Event>();
/// Bytes that one read returns at most.
const PAGE: usize = RECORD * MAX_RECORDS;

/// ioctl. `None`: the descriptor isn't ours, or the request is the pipe's business.
pub fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> Option<isize> {
    // As the kernel: only 32 bits count.
    let request = request as u32;
    let section = Section::enter();
    let Some(ticket) = enter(fd) else {
        let is_files = matches!(request, FIOASYNC | FIONBIO | FIONCLEX | FIOCLEX);
        return if is_files { None } else { unanswered(fd) };
    };
    let host = ClientHost::inside(&section);
    let result = match request {
        EXCHANGE_FEATURES => exchange_features(&ticket, fd, argument),
        REGISTER_REGION => {
            memory::read::<Register>(argument).and_then(|region| register(&ticket, &host, fd, &region))
        }
        UNREGISTER_REGION => {
            memory::read::<u64>(argument).and_then(|cookie| unregister(&ticket, &host, fd, cookie))
        }
        // What the VFS does for any file. FIONREAD isn't among it; that is the pipe's own.
        FIOASYNC => {
            arm_context(&ticket, fd);
            return None;
        }
        FIONBIO | FIONCLEX | FIOCLEX => return None,
        _ => Err(libc::ENOTTY),
    };
    Some(match result {
        Ok(()) => 0,
        Err(errno) => -(errno as isize),
    })
}

/// A device whose supervisor can't be asked is one that has failed.
#[cold]
fn unanswered(fd: c_int) -> Option<isize> {
    table::is_unanswered(fd).then_some(-(libc::EIO as isize))
}

/// The context of a descriptor, at the entry of a call; `None` if it isn't ours.
fn enter(fd: c_int) -> Option<Ticket> {
    let ticket = table::lookup(fd)?;
    hand_over(fd, &ticket);
    Some(ticket)
}

/// Where the supervisor asks for the real device: opens it, since the kernel module watches the address space of
/// whoever does, and hands it over. No copy stays here. If the supervisor can't be reached, its request ends by its
/// own deadline.
fn hand_over(fd: c_int, ticket: &Ticket) {
    let Some(number) = ticket.engine().and_then(|engine| engine.take_request()) else { return };
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let opened = sys::open(b"/dev/ummunotify\0", flags);
    let device = (opened >= 0).then(|| Owned::new(opened as c_int));
    let errno = if opened < 0 { -opened } else { 0 };
    let Ok(connection) = connect(ticket) else { return };
    let shown = [fd, device.as_ref().map_or(-1, Owned::get)];
    let shown = shown.get(..1 + usize::from(device.is_some())).unwrap_or_default();
    let _ = connection.tell(Op::Device, [number.into(), errno as u64, 0, 0, 0, 0], shown);
    // Before the connection, whose end tells the supervisor that it has the only one.
    drop(device);
}

/// Somebody is about to wait for each hit on the descriptor, if it is ours.
pub fn arm(fd: c_int) {
    if !table::is_foreign(fd) {
        let _blocked = sys::SignalsBlocked::new();
        if let Some(ticket) = table::lookup(fd) {
            arm_context(&ticket, fd);
        }
    }
}

/// If the supervisor can't be reached, nobody records for a context that isn't ours.
fn arm_context(ticket: &Ticket, fd: c_int) {
    match ticket.engine() {
        Some(engine) => engine.arm(),
        None => drop(remote(ticket, fd, Op::Arm, [0; 6])),
    }
}

const FIONCLEX: u32 = 0x5450;
const FIOCLEX: u32 = 0x5451;
const FIONBIO: u32 = 0x5421;
const FIOASYNC: u32 = 0x5452;

fn exchange_features(ticket: &Ticket, fd: c_int, argument: *mut c_void) -> Result<(), c_int> {
    // Before the pointer is touched.
    match ticket.engine() {
        Some(engine) => engine.exchange_features().map_err(|_| libc::EINVAL)?,
        None => remote(ticket, fd, Op::Features, [0; 6])?,
    }
    memory::read::<u32>(argument)?;
    Target::Buffer(argument, size_of::<u32>()).fill(&[0u32])
}

fn register(ticket: &Ticket, host: &ClientHost, fd: c_int, region: &Register) -> Result<(), c_int> {
    let args = [region.start, region.end, region.cookie, 0, 0, 0];
    let range = PageRange::new(region.start, region.end);
    change(ticket, fd, Op::Register, args, |engine| register_here(engine, host, fd, range, region.cookie))
}

/// REGISTER_REGION in our own mapping of the arena.
pub fn register_here(
    engine: &Engine,
    host: &ClientHost,
    fd: c_int,
    range: PageRange,
    cookie: u64,
) -> Result<(), Refusal> {
    engine.mark_used();
    // The look at what is mapped is due at the first hit, in the midst of a munmap, if it isn't taken here.
    let ahead = engine.opener_records() && !range.is_empty() && engine.looks_ahead();
    let mapped = ahead && sys::is_mapped(range);
    if ahead && !mapped {
        engine.looked_in_vain();
    }
    let counter = engine.counter();
    let done = if mapped {
        engine.register_mapped(host, range, cookie)
    } else {
        engine.register(host, range, cookie)
    };
    after_lock(counter, fd, engine);
    done.map_err(|error| match error {
        RegisterError::CookieInUse => Refusal::Errno(libc::EINVAL),
        RegisterError::NoMemory => Refusal::Errno(libc::ENOMEM),
        RegisterError::Broken => Refusal::Errno(libc::EIO),
        RegisterError::Elsewhere => Refusal::Elsewhere,
    })
}

fn unregister(ticket: &Ticket, host: &ClientHost, fd: c_int, cookie: u64) -> Result<(), c_int> {
    let args = [cookie, 0, 0, 0, 0, 0];
    change(ticket, fd, Op::Unregister, args, |engine| unregister_here(engine, host, fd, cookie))
}

/// UNREGISTER_REGION in our own mapping of the arena.
pub fn unregister_here(engine: &Engine, host: &ClientHost, fd: c_int, cookie: u64) -> Result<(), Refusal> {
    let counter = engine.counter();
    let done = engine.unregister(host, cookie);
    after_lock(counter, fd, engine);
    done.map(drop).map_err(|error| match error {
        UnregisterError::UnknownCookie => Refusal::Errno(libc::EINVAL),
        UnregisterError::Broken => Refusal::Errno(libc::EIO),
        UnregisterError::Elsewhere => Refusal::Elsewhere,
    })
}

/// Why the arena doesn't do it.
pub enum Refusal {
    /// The call fails so.
    Errno(c_int),
    /// The supervisor does it at present, here and wherever else it has to be done.
    Elsewhere,
}

/// Changes what is registered: by `here` on our own mapping of the arena, else by asking the supervisor.
fn change(
    ticket: &Ticket,
    fd: c_int,
    op: Op,
    args: [u64; 6],
    here: impl Fn(&Engine) -> Result<(), Refusal>,
) -> Result<(), c_int> {
    let Some(engine) = ticket.engine() else { return remote(ticket, fd, op, args) };
    // Twice at most: after the supervisor's end the arena is ours again.
    for _ in 0..2 {
        match here(&engine) {
            Ok(()) => return Ok(()),
            Err(Refusal::Errno(errno)) => return Err(errno),
            Err(Refusal::Elsewhere) => {}
        }
        match remote(ticket, fd, op, args) {
            Err(libc::EIO) if come_home(ticket, fd, &engine) => {}
            answer => return answer,
        }
    }
    Err(libc::EIO)
}

/// Takes a context back whose calls the supervisor was to answer, if that one is dead: nobody records any more, and
/// that is said once, as for any other context. False if it isn't known to be dead.
fn come_home(ticket: &Ticket, fd: c_int, engine: &Engine) -> bool {
    if !bell::is_abandoned(fd) || engine.clear_elsewhere(&ClientHost::new(), u32::MAX).is_err() {
        return false;
    }
    if ticket.orphan() {
        engine.invalidate_all(Reason::Supervisor);
    }
    true
}

/// The engine declares everything invalid by itself where it finds the lock left behind by a thread that died: an
/// invalidation for which nobody writes a byte. `counter` is its value before.
fn after_lock(counter: u64, fd: c_int, engine: &Engine) {
    if engine.counter() != counter {
        bell::ensure(fd, engine);
    }
}

fn remote(ticket: &Ticket, fd: c_int, op: Op, args: [u64; 6]) -> Result<(), c_int> {
    let connection = connect(ticket)?;
    connection
        .ask(op, args, Some(fd), &mut Buffer::<0>::new())
        .map(|answer| userfault::notice(answer.args[0]))
        .map_err(failed)
}

/// One that ended while it was asked has failed as well.
fn failed(errno: c_int) -> c_int {
    if errno == libc::ECONNRESET { libc::EIO } else { errno }
}

/// A supervisor that isn't there is a device that has failed.
fn connect(ticket: &Ticket) -> Result<Connection, c_int> {
    Connection::to_context(ticket.identity().inode)
        .map_err(|errno| if errno == libc::ECONNREFUSED { libc::EIO } else { errno })
}

/// read and its kin. `None`: the descriptor isn't ours.
///
/// As in the kernel, a read that sleeps keeps its context whatever becomes of the descriptor's number.
pub fn read(fd: c_int, target: Target) -> Option<isize> {
    // The ticket goes before the section ends: a handler that waits for that end may not come back.
    let mut section = Section::enter();
    let Some(ticket) = table::lookup(fd) else { return unanswered(fd) };
    let mut open = true;
    let mut rounds = 0u32;
    loop {
        if open {
            hand_over(fd, &ticket);
        }
        match read_once(open.then_some(fd), &ticket, &ClientHost::inside(&section), target) {
            Ok(bytes) => return Some(bytes as isize),
            // Without the descriptor there is nothing to wait on any more.
            Err(libc::EAGAIN) if !open => return Some(-(libc::EBADF as isize)),
            Err(libc::EAGAIN) => {}
            Err(errno) => return Some(-(errno as isize)),
        }
        let (waited, next) = wait(fd, &ticket, section);
        section = next;
        match waited {
            Waited::Readable => {}
            Waited::Failed(errno) => return Some(-(errno as isize)),
            // Nobody records any more: say once that nothing is known.
            Waited::Orphaned => match ticket.engine() {
                Some(engine) if ticket.orphan() => engine.invalidate_all(Reason::Supervisor),
                _ => return Some(-(libc::EIO as isize)),
            },
        }
        // A byte that nobody takes out (the supervisor's reader does it for other holders) must not become a
        // spin.
        rounds += 1;
        if rounds > 4 {
            let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            // SAFETY: a timespec of ours.
            unsafe { sys::call(libc::SYS_nanosleep, &raw const pause as usize, 0, 0, 0, 0, 0) };
            let flags = sys::fcntl(fd, libc::F_GETFL, 0);
            if flags >= 0 && flags as c_int & libc::O_NONBLOCK != 0 {
                return Some(-(libc::EAGAIN as isize));
            }
        }
        open = table::identity(fd) == Some(ticket.identity());
    }
}

/// One try; the bytes read. EAGAIN: not readable. `fd` unless it was closed meanwhile.
fn read_once(fd: Option<c_int>, ticket: &Ticket, host: &ClientHost, target: Target) -> Result<usize, c_int> {
    let room = target.len()?.min(PAGE) / RECORD;
    for _ in 0..ATTEMPTS {
        if let Some(engine) = ticket.engine() {
            match read_here(fd, &engine, host, room, target, true) {
                Ok(records) => return Ok(records * RECORD),
                Err(Refusal::Errno(errno)) => return Err(errno),
                Err(Refusal::Elsewhere) => {}
            }
        }
        // Without it there is nothing to show to the supervisor.
        let fd = fd.ok_or(libc::EBADF)?;
        match (read_there(fd, ticket, room, target), ticket.engine()) {
            // The arena is ours again.
            (Err(libc::EIO), Some(engine)) if come_home(ticket, fd, &engine) => {}
            (Ok(None), _) => {}
            (Ok(Some(records)), _) => return Ok(records * RECORD),
            (Err(errno), _) => return Err(errno),
        }
    }
    Err(libc::EIO)
}

/// How often a read is begun: each but one was too slow for the supervisor, or saw that one's end.
const ATTEMPTS: u32 = 8;

/// A read in our own mapping of the arena; the number of records. Unless it is `polled` the descriptor may stay readable
/// although there is nothing left to report.
pub fn read_here(
    fd: Option<c_int>,
    engine: &Engine,
    host: &ClientHost,
    room: usize,
    target: Target,
    polled: bool,
) -> Result<usize, Refusal> {
    struct Here {
        fd: Option<c_int>,
        target: Target,
    }
    impl Port for Here {
        type Error = c_int;

        fn deliver(&mut self, records: &[Event]) -> Result<(), c_int> {
            self.target.fill(records)
        }

        fn settle(&mut self, engine: &Engine, readable: bool) {
            // Copies of a closed descriptor may keep a byte too many.
            if let Some(fd) = self.fd.filter(|_| !readable) {
                bell::hush(fd, engine);
            }
        }
    }
    engine.mark_used();
    let counter = engine.counter();
    let result = engine.read(host, room, &mut Here { fd: fd.filter(|_| polled), target });
    if let Some(fd) = fd {
        after_lock(counter, fd, engine);
    }
    result.map_err(|error| match error {
        ReadError::NotReadable => Refusal::Errno(libc::EAGAIN),
        ReadError::Port(errno) => Refusal::Errno(errno),
        ReadError::Broken => Refusal::Errno(libc::EIO),
        ReadError::Elsewhere => Refusal::Elsewhere,
    })
}

/// The records that the supervisor has delivered; `None` if it was kept waiting for the answer whether they arrived:
/// then they come again.
#[cold]
#[inline(never)]
fn read_there(fd: c_int, ticket: &Ticket, room: usize, target: Target) -> Result<Option<usize>, c_int> {
    let connection = connect(ticket)?;
    let mut buffer = Buffer::<PAGE>::new();
    let answer: Answer =
        connection.ask(Op::Read, [room as u64, 0, 0, 0, 0, 0], Some(fd), &mut buffer).map_err(failed)?;
    let records = usize::try_from(answer.result).unwrap_or(0);
    if records == 0 {
        return Ok(Some(0));
    }
    let payload = buffer.payload(&answer);
    if records > room || payload.len() != records * RECORD {
        return Err(libc::EPROTO);
    }
    let filled = target.fill(payload);
    // The records are consumed only now; if the supervisor doesn't hear of it they come again.
    let committed =
        connection.ask(Op::Commit, [u64::from(filled.is_ok()), 0, 0, 0, 0, 0], None, &mut Buffer::<0>::new());
    filled?;
    match committed {
        Ok(_) => Ok(Some(records)),
        Err(libc::EAGAIN) => Ok(None),
        Err(errno) => Err(failed(errno)),
    }
}

enum Waited {
    Readable,
    Failed(c_int),
    /// Every write end is closed: the supervisor is dead.
    Orphaned,
}

/// Memory that can't be written to.
static UNWRITABLE: u8 = 0;

/// Waits as the pipe waits. The buffer lies in read-only memory: an empty pipe sleeps, or says EAGAIN, EINTR or
/// restarts after a signal handler, natively; one with bytes answers EFAULT and keeps them (pipe_read takes out
/// only what it could copy). libc's own read is called since it is a cancellation point. Meanwhile the section is over: the
/// next one is returned.
fn wait(fd: c_int, ticket: &Ticket, section: Section) -> (Waited, Section) {
    let nowhere = (&raw const UNWRITABLE).cast_mut().cast::<c_void>();
    let before = sys::errno();
    let mut note = CleanUpBuffer { words: [0; 4] };
    let (function, argument) = ticket.clean_up();
    // libc's list of what to do for a thread that is cancelled here, or that a signal handler takes away by
    // longjmp (both walk the list; the macros of pthread.h for C++ without exceptions are made of these).
    next!(c"_pthread_cleanup_push" as fn(*mut CleanUpBuffer, CleanUp, *mut c_void) -> ();
        (&raw mut note, function, argument); ());
    drop(section);
    let got = next!(c"read" as fn(c_int, *mut c_void, usize) -> isize; (fd, nowhere, WAIT_LENGTH);
        // SAFETY: the buffer isn't writable, as intended.
        sys::libc_result(unsafe { sys::call(libc::SYS_read, fd as usize, nowhere as usize, WAIT_LENGTH, 0, 0, 0) }));
    let section = Section::enter();
    next!(c"_pthread_cleanup_pop" as fn(*mut CleanUpBuffer, c_int) -> (); (&raw mut note, 0); ());
    let errno = sys::errno();
    sys::set_errno(before);
    let waited = match got {
        0 => Waited::Orphaned,
        got if got > 0 => Waited::Readable,
        _ if errno == libc::EFAULT => Waited::Readable,
        _ => Waited::Failed(errno),
    };
    (waited, section)
}

/// `struct _pthread_cleanup_buffer`: function, argument, an int, the next.
#[repr(C)]
struct CleanUpBuffer {
    words: [usize; 4],
}

/// mmap. `None`: the descriptor isn't ours. `map` is the next mmap; it returns what the call returns and sets
/// errno itself.
pub fn mmap(
    fd: c_int,
    len: usize,
    protection: c_int,
    flags: c_int,
    offset: c_long,
    map: impl FnOnce(c_int) -> *mut c_void,
) -> Option<*mut c_void> {
    let counter = {
        let _blocked = sys::SignalsBlocked::new();
        let ticket = enter(fd)?;
        counter(fd, &ticket, len, protection, flags, offset)
    };
    Some(match counter {
        Ok(counter) => map(counter.get()),
        Err(errno) => {
            sys::set_errno(errno);
            libc::MAP_FAILED
        }
    })
}

fn counter(
    fd: c_int,
    ticket: &Ticket,
    len: usize,
    protection: c_int,
    flags: c_int,
    offset: c_long,
) -> Result<Owned, c_int> {
    // In the kernel's order: length and alignment, then access, then the driver.
    if len == 0 || offset & 4095 != 0 {
        return Err(libc::EINVAL);
    }
    let shared = matches!(flags & libc::MAP_TYPE, libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE);
    if shared && protection & libc::PROT_WRITE != 0 {
        return Err(libc::EACCES);
    }
    if len > 4096 || offset != 0 {
        return Err(libc::EINVAL);
    }
    let mut answer = connect(ticket)?.ask(Op::Counter, [0; 6], Some(fd), &mut Buffer::<0>::new())?;
    answer.fds.take(0).ok_or(libc::EPROTO)
}
