//! Puts the filter on a process that runs.
//!
//! One thread of the process is stopped for a moment and makes the calls ([`Errand`]): all its threads get the filter by
//! that (TSYNC), the others without noticing. What of their calls began before is waited for when the process opens the
//! device ([`super::attachment::Attachment::settle`]).
//!
//! If the supervisor is killed meanwhile, the process goes on as it was, but for one moment: between the call that puts
//! the filter on and the one by which the supervisor takes its listener, which follows at once. Then the process closes
//! the listener itself, and trapped calls fail with ENOSYS, as under any dead supervisor.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::uio::RemoteIoVec;
use ummunotify_abi::wire;
use ummunotify_sys::errand::{Errand, Place};
use ummunotify_sys::notify::Listener;
use ummunotify_sys::{process, ptrace};

use super::clerk::errno_of;
use super::log;
use super::shared::{Message, Shared};
use super::socket::Door;
use super::task;
use crate::attach::{AttachError, Subject, why_forbidden};
use crate::target::memory;
use crate::trap::Filter;
use crate::trap::policy::Policy;

/// How long the stop of one thread is waited for, before another is tried.
const STOP: Duration = Duration::from_millis(500);
/// How long threads are tried.
const PATIENCE: Duration = Duration::from_secs(20);

/// What an attach has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attached {
    /// The filter is on.
    #[allow(missing_docs)]
    Now { supervisor: u32, stopped: Duration, no_new_privs: bool },
    /// It was there already: it is that of the supervisor with this token.
    #[allow(missing_docs)]
    Inherited { token: u64 },
}

/// Puts the filter on the process.
///
/// # Errors
/// Why it couldn't be; the process goes on as before.
pub fn attach(shared: &Arc<Shared>, subject: &Subject) -> Result<Attached, AttachError> {
    let pid = subject.pid;
    let target = process::pidfd_open(pid).map_err(|_| AttachError::Gone(pid))?;
    if task::born(pid).ok() != Some(subject.born) {
        return Err(AttachError::Gone(pid));
    }
    // Held until the end: two errands at a time would be in each other's way.
    let _alone = alone(&target, subject)?;
    // Where that is forbidden, the listener couldn't be had afterwards. No process has so large a number.
    match process::pidfd_getfd(&target, i32::MAX).map_err(|e| e.raw_os_error()) {
        Err(Some(libc::EBADF)) | Ok(_) => {}
        Err(Some(libc::ESRCH)) => return Err(AttachError::Gone(pid)),
        Err(Some(libc::EPERM)) => return Err(why_forbidden(pid, pid)),
        Err(errno) => {
            return Err(AttachError::Call {
                pid,
                what: "copy a descriptor of it (pidfd_getfd)",
                errno: errno.map_or(Errno::EIO, Errno::from_raw),
                help: "Linux 5.6 has that; a container may forbid it",
            });
        }
    }
    let place = place(pid, &target).map_err(|error| match error {
        AttachError::NoRoom(_) if is_ending(pid, &target) => AttachError::Gone(pid),
        error => error,
    })?;
    let due = Instant::now() + PATIENCE;
    let mut refused = AttachError::Unstoppable(pid, PATIENCE.as_secs());
    while Instant::now() < due {
        for tid in by_disturbance(pid) {
            let done = ptrace::apart(|| by_thread(shared, subject, &target, place, tid));
            match done.unwrap_or_else(|e| Err(Trial::Failed(failed(pid, "start a thread", &e, "try again"))))
            {
                Ok(attached) => return Ok(attached),
                Err(Trial::Failed(error)) => return Err(error),
                Err(Trial::Next(Some(error))) => refused = error,
                Err(Trial::Next(None)) => {}
            }
            if !process::pidfd_alive(&target) {
                return Err(AttachError::Gone(pid));
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(refused)
}

fn failed(pid: u32, what: &'static str, error: &io::Error, help: &'static str) -> AttachError {
    AttachError::Call { pid, what, errno: errno_of(error), help }
}

/// An address that one process at a time can have for this target.
fn alone(target: &OwnedFd, subject: &Subject) -> Result<Door, AttachError> {
    // Since 6.9 each process has a pidfd inode of its own; before, the time alone must do.
    let inode = nix::sys::stat::fstat(target).map(|stat| stat.st_ino).unwrap_or(0);
    let name = format!("ummunotify-att-{inode:x}-{:x}", subject.born);
    Door::open(name.as_bytes()).map_err(|e| match e {
        Errno::EADDRINUSE => AttachError::Busy(subject.pid),
        errno => AttachError::Call {
            pid: subject.pid,
            what: "keep others from attaching at the same time (bind)",
            errno,
            help: "try again",
        },
    })
}

/// Where the instructions go.
fn place(pid: u32, target: &OwnedFd) -> Result<Place, AttachError> {
    let none = || AttachError::NoRoom(pid);
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    // A process that is about to end has no memory any more.
    if maps.is_empty() {
        return Err(AttachError::Gone(pid));
    }
    let line = maps.lines().find(|line| line.ends_with("[vdso]")).ok_or_else(none)?;
    let (start, rest) = line.split_once('-').ok_or_else(none)?;
    let address = |text: &str| u64::from_str_radix(text, 16).ok();
    let start = address(start).ok_or_else(none)?;
    let end = rest.split_once(' ').and_then(|(end, _)| address(end)).ok_or_else(none)?;
    // A vDSO has a few pages.
    let len =
        usize::try_from(end.saturating_sub(start)).ok().filter(|len| *len <= 1 << 20).ok_or_else(none)?;
    let mut image = vec![0; len];
    memory::read(pid.cast_signed(), start, &mut image).map_err(|errno| match errno {
        Errno::ESRCH => AttachError::Gone(pid),
        errno => AttachError::Call {
            pid,
            what: "read its vDSO (process_vm_readv)",
            errno,
            help: "a container may forbid that",
        },
    })?;
    let place = Place::in_vdso(&image, start).ok_or_else(none)?;
    if Place::is_left_behind(&image) {
        log::info!("process {pid}: somebody died who attached to it");
        vacate(pid, target, place)?;
    }
    Ok(place)
}

/// Whether the process is about to end: what it has mapped goes bit by bit.
fn is_ending(pid: u32, target: &OwnedFd) -> bool {
    let start = Instant::now();
    while start.elapsed() < STOP {
        if !process::pidfd_alive(target)
            || fs::read(format!("/proc/{pid}/maps")).map_or(true, |m| m.is_empty())
        {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// Waits until each thread was seen elsewhere.
fn vacate(pid: u32, target: &OwnedFd, place: Place) -> Result<(), AttachError> {
    let due = Instant::now() + PATIENCE;
    let mut left = match task::threads(pid) {
        Ok(threads) => threads,
        Err(e) if task::is_gone(&e) => return Err(AttachError::Gone(pid)),
        Err(e) => return Err(failed(pid, "list its threads", &e, "try again")),
    };
    while !left.is_empty() {
        left.retain(|&tid| is_inside(pid, tid, place));
        if !process::pidfd_alive(target) {
            return Err(AttachError::Gone(pid));
        }
        if Instant::now() > due {
            return Err(AttachError::Unstoppable(pid, PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Whether a thread may be at the place: by where it sleeps (proc_pid_syscall(5)), or by a stop.
fn is_inside(pid: u32, tid: u32, place: Place) -> bool {
    let text = match fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")) {
        Ok(text) => text,
        Err(e) => return !matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)),
    };
    let last = text.split_ascii_whitespace().last().unwrap_or_default();
    if let Ok(at) = u64::from_str_radix(last.trim_start_matches("0x"), 16) {
        return place.has(at);
    }
    let seen = ptrace::apart(|| {
        let stopped = stop(tid)?;
        let at = stopped.registers()?.rip;
        stopped.detach()?;
        io::Result::Ok(at)
    });
    !matches!(seen, Ok(Ok(at)) if !place.has(at))
}

fn stop(tid: u32) -> io::Result<ptrace::Stopped> {
    let start = Instant::now();
    let seized = task::seize(tid)?;
    seized.interrupt()?;
    seized.stopped(Some(&|| start.elapsed() > STOP))
}

/// The threads, that first which minds a stop least.
fn by_disturbance(pid: u32) -> Vec<u32> {
    let mut threads: Vec<(u8, u32)> =
        task::threads(pid).unwrap_or_default().into_iter().map(|tid| (disturbance(pid, tid), tid)).collect();
    threads.sort_unstable();
    threads.into_iter().map(|(_, tid)| tid).collect()
}

/// How much a stop disturbs a thread: not, as a call is made again, by EINTR; or it can't be stopped.
fn disturbance(pid: u32, tid: u32) -> u8 {
    const IO_PGETEVENTS: i64 = 333;
    /// Calls that a stop ends with EINTR (signal(7)), sockets with a timeout among them, or when a part is written; and
    /// those that wait on.
    const INTERRUPTED: [i64; 22] = [
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2,
        libc::SYS_semop,
        libc::SYS_semtimedop,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_io_getevents,
        IO_PGETEVENTS,
        libc::SYS_io_uring_enter,
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_recvfrom,
        libc::SYS_recvmsg,
        libc::SYS_recvmmsg,
        libc::SYS_sendto,
        libc::SYS_sendmsg,
        libc::SYS_sendmmsg,
        libc::SYS_connect,
        libc::SYS_write,
        libc::SYS_writev,
        libc::SYS_sendfile,
        libc::SYS_splice,
    ];
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")) else { return 3 };
    match text.split_ascii_whitespace().next().unwrap_or_default().parse::<i64>() {
        // It runs, or waits for a page.
        Err(_) | Ok(-1) => 0,
        Ok(libc::SYS_vfork | libc::SYS_clone | libc::SYS_clone3) => 3,
        Ok(number) if INTERRUPTED.contains(&number) => 2,
        Ok(_) => 1,
    }
}

/// Why it isn't done by this thread.
enum Trial {
    /// Another one may do it; the reason if none does.
    Next(Option<AttachError>),
    /// No other can do it either.
    Failed(AttachError),
}

impl From<AttachError> for Trial {
    fn from(error: AttachError) -> Self {
        Self::Failed(error)
    }
}

/// Has one thread put the filter on all.
fn by_thread(
    shared: &Arc<Shared>,
    subject: &Subject,
    target: &OwnedFd,
    place: Place,
    tid: u32,
) -> Result<Attached, Trial> {
    let pid = subject.pid;
    let start = Instant::now();
    let stopped = match stop(tid) {
        Ok(stopped) => stopped,
        Err(e) if e.raw_os_error() == Some(libc::EPERM) && !matches!(task::is_zombie(tid), Ok(true)) => {
            return Err(Trial::Failed(why_forbidden(pid, tid)));
        }
        // It has ended, or doesn't stop.
        Err(_) => return Err(Trial::Next(None)),
    };
    let mut errand = match Errand::begin(stopped, place) {
        Ok(errand) => errand,
        Err(e) if e.raw_os_error() == Some(libc::ENOEXEC) => {
            return Err(Trial::Next(Some(AttachError::Narrow(pid))));
        }
        Err(_) => return Err(Trial::Next(None)),
    };
    let done = run(shared, subject, target, tid, &mut errand);
    // Whatever came of it. That it has ended shows at the next one.
    let finished = errand.finish();
    let stopped = start.elapsed();
    match done {
        Ok(Ok(Done::On { no_new_privs })) => {
            log::info!("process {pid}: attached by thread {tid} in {stopped:?}");
            Ok(Attached::Now { supervisor: std::process::id(), stopped, no_new_privs })
        }
        Ok(Ok(Done::Inherited { token })) => Ok(Attached::Inherited { token }),
        Ok(Err(error)) => Err(Trial::Failed(error)),
        Err(e) => {
            log::info!("process {pid}, thread {tid}: {e}; {finished:?}");
            Err(Trial::Next(None))
        }
    }
}

enum Done {
    On { no_new_privs: bool },
    Inherited { token: u64 },
}

/// The calls. The outer error is of the errand: the thread has ended.
fn run(
    shared: &Arc<Shared>,
    subject: &Subject,
    target: &OwnedFd,
    tid: u32,
    errand: &mut Errand,
) -> io::Result<Result<Done, AttachError>> {
    let pid = subject.pid;
    let aside = if subject.filtered { set_filters_aside(errand) } else { false };
    if subject.filtered && !aside && !subject.despite_filter {
        return Ok(Err(AttachError::Filtered(pid)));
    }
    // With filters set aside nobody would answer.
    if !aside {
        match hello(errand)? {
            Hello::Token(token) => return Ok(Ok(Done::Inherited { token })),
            Hello::OtherVersion => return Ok(Err(AttachError::Version(pid))),
            Hello::Nobody => {}
        }
    }
    let filter = Filter::bytes(&Filter::build(&Policy { gate: None, device: shared.device }));
    let Scratch { address: scratch, len } = match put(errand, tid, &filter)? {
        Ok(scratch) => scratch,
        Err((what, errno)) => {
            let help = "its memory is full, or a filter forbids the call";
            return Ok(Err(AttachError::Call { pid, what, errno, help }));
        }
    };
    let installed = install(shared, pid, target, errand, scratch)?;
    // The filter traps this one already, and the main loop answers.
    errand.call(libc::SYS_munmap, [scratch, len, 0, 0, 0, 0])?;
    let error = match installed {
        Ok(no_new_privs) => return Ok(Ok(Done::On { no_new_privs })),
        Err(Install::Listener(error)) => failed(
            pid,
            "take the filter's listener over; its trapped calls fail now (ENOSYS)",
            &error,
            "attach again",
        ),
        Err(Install::Refused(libc::EBUSY)) => {
            if aside && errand.set_options(libc::PTRACE_O_TRACESYSGOOD).is_ok() {
                // A listener's filter, perhaps ours, lets it be asked.
                if let Hello::Token(token) = hello(errand)? {
                    return Ok(Ok(Done::Inherited { token }));
                }
            }
            AttachError::Listened(pid)
        }
        Err(Install::Refused(libc::ESRCH)) => AttachError::Divided(pid),
        Err(Install::Refused(errno)) => AttachError::Call {
            pid,
            what: "put a filter with a listener on it (seccomp)",
            errno: Errno::from_raw(errno),
            help: match errno {
                libc::EMFILE => "it needs one free descriptor for a moment (ulimit -n)",
                libc::EPERM | libc::EACCES | libc::ENOSYS => "a filter or a container forbids that",
                _ => "Linux 5.7 has what this needs: see ummunotify doctor",
            },
        },
    };
    Ok(Err(error))
}

/// Keeps the thread's filters from seeing the errand's calls; only root can, where the kernel has it (4.3).
fn set_filters_aside(errand: &mut Errand) -> bool {
    const PTRACE_O_SUSPEND_SECCOMP: i32 = 1 << 21;
    errand.set_options(libc::PTRACE_O_TRACESYSGOOD | PTRACE_O_SUSPEND_SECCOMP).is_ok()
}

/// What is answered to who asks whether the process is under a filter of ours.
enum Hello {
    /// By nobody of ours. Or by a dead supervisor's filter (ENOSYS): a new listener wins over that.
    Nobody,
    /// By the supervisor of that token.
    Token(u64),
    /// By one that we can't talk to.
    OtherVersion,
}

fn hello(errand: &mut Errand) -> io::Result<Hello> {
    let arguments = [wire::HELLO_PRCTL, u64::from(wire::WIRE_VERSION), wire::HELLO_FROM_OUTSIDE, 0, 0, 0];
    Ok(match errand.call(libc::SYS_prctl, arguments)? {
        token if token > 0 => Hello::Token(token.cast_unsigned()),
        errno if errno == -i64::from(libc::EPROTONOSUPPORT) => Hello::OtherVersion,
        _ => Hello::Nobody,
    })
}

/// Bytes of `struct sock_fprog`.
const HEAD: usize = 16;

/// Memory that is unmapped in the end.
struct Scratch {
    address: u64,
    len: u64,
}

/// Puts the program into memory of the process's own: the address of its `struct sock_fprog`, and bytes to unmap.
fn put(errand: &mut Errand, tid: u32, filter: &[u8]) -> io::Result<Result<Scratch, (&'static str, Errno)>> {
    const PAGE: usize = 4096;
    let len = (HEAD + filter.len()).next_multiple_of(PAGE);
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let at = errand.call(libc::SYS_mmap, [0, len as u64, prot as u64, flags as u64, u64::MAX, 0])?;
    if at < 0 {
        let errno = Errno::from_raw(i32::try_from(-at).unwrap_or(libc::ENOMEM));
        return Ok(Err(("map a page in it (mmap)", errno)));
    }
    let address = at.cast_unsigned();
    let mut bytes = Vec::with_capacity(HEAD + filter.len());
    bytes.extend(((filter.len() / size_of::<libc::sock_filter>()) as u64).to_le_bytes());
    bytes.extend((address + HEAD as u64).to_le_bytes());
    bytes.extend(filter);
    let remote = [RemoteIoVec { base: address as usize, len: bytes.len() }];
    match memory::write(tid.cast_signed(), &remote, &bytes) {
        Ok(()) => Ok(Ok(Scratch { address, len: len as u64 })),
        Err(errno) => {
            errand.call(libc::SYS_munmap, [address, len as u64, 0, 0, 0, 0])?;
            Ok(Err(("write to its memory (process_vm_writev)", errno)))
        }
    }
}

enum Install {
    /// The kernel said no: an errno.
    Refused(i32),
    /// The filter is on, and its listener lost.
    Listener(io::Error),
}

/// Puts the filter on and takes its listener; whether no_new_privs was set for it.
fn install(
    shared: &Arc<Shared>,
    pid: u32,
    target: &OwnedFd,
    errand: &mut Errand,
    program: u64,
) -> io::Result<Result<bool, Install>> {
    const TSYNC_ESRCH: u64 = 1 << 4;
    const WAIT_KILLABLE_RECV: u64 = 1 << 5;
    let all = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_TSYNC | TSYNC_ESRCH;
    let mut flags = all | WAIT_KILLABLE_RECV;
    let mut no_new_privs = false;
    loop {
        let arguments = [u64::from(libc::SECCOMP_SET_MODE_FILTER), flags, program, 0, 0, 0];
        let done = errand.call_for_descriptor(libc::SYS_seccomp, arguments, |fd| {
            let listener = process::pidfd_getfd(target, fd).and_then(Listener::new)?;
            shared.gate.listener.set(listener).map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
            // Before anybody can be told of us.
            shared.attachment.serve();
            if let Err(e) = shared.attachment.admit(pid) {
                log::info!("process {pid}: ends at once: {e}");
            }
            // From here on calls are answered; the process closes its own copy next.
            shared.tell(Message::Serve);
            io::Result::Ok(())
        })?;
        match done {
            Ok(Ok(())) => return Ok(Ok(no_new_privs)),
            Ok(Err(error)) => return Ok(Err(Install::Listener(error))),
            Err(libc::EINVAL) if flags & WAIT_KILLABLE_RECV != 0 => flags = all,
            Err(libc::EACCES) if !no_new_privs => {
                let set = [libc::PR_SET_NO_NEW_PRIVS as u64, 1, 0, 0, 0, 0];
                no_new_privs = errand.call(libc::SYS_prctl, set)? == 0;
                if !no_new_privs {
                    return Ok(Err(Install::Refused(libc::EACCES)));
                }
            }
            Err(errno) => return Ok(Err(Install::Refused(errno))),
        }
    }
}
