//! Processes by descriptor, and which of them share an address space.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use crate::check;

/// A descriptor of the process `pid` (pidfd_open(2), Linux 5.3): readable once every thread of it is gone.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The process that a pidfd stands for, as this process's /proc numbers it; `None` if the descriptor is something
/// else, and if the process is gone or not visible here (proc_pid_fdinfo(5)).
pub fn pidfd_process(fd: &OwnedFd) -> Option<u32> {
    use std::os::fd::AsRawFd;
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
    let pid: i64 = text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
    u32::try_from(pid).ok().filter(|&pid| pid != 0)
}

/// Whether the process behind a pidfd still has a task that runs. A zombie has none: its pidfd is readable
/// (pidfd_open(2)), while a signal 0 finds it until somebody reaps it.
pub fn pidfd_alive(fd: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    ready <= 0
}

/// Whether two tasks share an address space (kcmp(2), `KCMP_VM`). Containers may forbid it (EPERM) and
/// kernels may lack it (ENOSYS); ESRCH if either is gone.
pub fn same_address_space(a: u32, b: u32) -> io::Result<bool> {
    const KCMP_VM: i32 = 1;
    // SAFETY: no memory is passed.
    check(unsafe { libc::syscall(libc::SYS_kcmp, a, b, KCMP_VM, 0, 0) }).map(|order| order == 0)
}

/// Whether process `pid` has a thread `tid` (tgkill(2) with signal 0).
pub fn has_thread(pid: u32, tid: u32) -> bool {
    // SAFETY: no memory is passed; signal 0 only checks.
    let ret = unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, 0) };
    // EPERM means that it exists.
    ret == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
}

/// The calling thread's kernel id.
pub fn gettid() -> u32 {
    // SAFETY: no memory is passed; it can't fail.
    unsafe { libc::gettid() }.cast_unsigned()
}

/// Random bits (getrandom(2)).
pub fn random_u64() -> io::Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is valid for its eight bytes.
    let n = check(
        unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) }.try_into().unwrap_or(-1),
    )?;
    if n != 8 {
        return Err(io::Error::other("getrandom gave too few bytes"));
    }
    Ok(u64::from_ne_bytes(bytes))
}

/// Makes this process ignore `signal` (sigaction(2)).
pub fn ignore_signal(signal: i32) {
    // SAFETY: SIG_IGN installs no code of ours.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

/// As long as it lives, this process ignores a signal that its own calls can cause.
#[derive(Debug)]
pub struct Ignored {
    signal: i32,
    before: libc::sighandler_t,
}

impl Ignored {
    /// Ignores `signal`. What it did before comes back with the end, also if that was to ignore it.
    pub fn new(signal: i32) -> Self {
        // SAFETY: SIG_IGN installs no code of ours.
        Self { signal, before: unsafe { libc::signal(signal, libc::SIG_IGN) } }
    }
}

impl Drop for Ignored {
    fn drop(&mut self) {
        if self.before != libc::SIG_ERR {
            // SAFETY: what stood there before.
            unsafe { libc::signal(self.signal, self.before) };
        }
    }
}

/// Raises the soft limit on the size of files (and of a memfd) to the hard one; failing is no harm, the
/// `ftruncate` that needs it then says so.
pub fn raise_file_size_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for both calls.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit);
        }
    }
}

/// A copy of another process's descriptor: the same open file (pidfd_getfd(2), Linux 5.6).
pub fn pidfd_getfd(pidfd: &OwnedFd, fd: i32) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    // SAFETY: no memory is passed.
    let copy = check(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0) })?;
    let copy = i32::try_from(copy).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// How many descriptors the calling process may have now (the soft limit).
pub fn descriptor_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for the call.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur
}

/// Raises the soft limit of descriptors to the hard one.
pub fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for both calls.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// A copy of the calling process that no wait() of it sees: its exit signal is 0, for as long as it executes
/// no program (wait(2), `__WCLONE`). `None` in the copy.
///
/// # Safety
/// The caller has one thread. The copy must not return into what its original goes on with.
pub unsafe fn fork_hidden() -> io::Result<Option<u32>> {
    // A debugger would take a child without an exit signal for a thread.
    let flags = libc::CLONE_UNTRACED;
    // SAFETY: without CLONE_VM and without a new stack the copy goes on here with memory of its own.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) })?;
    Ok(u32::try_from(pid).ok().filter(|pid| *pid != 0))
}

/// Closes every descriptor above 2 but `kept` (close_range(2), Linux 5.9; before, one by one).
///
/// # Safety
/// Nothing of this process uses one of them any more.
pub unsafe fn close_all_but(kept: i32) {
    let close = |first: u32, last: u32| {
        // SAFETY: passed on to the caller.
        if first <= last && unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
            for fd in first..=last.min(65_535) {
                // SAFETY: as above.
                unsafe { libc::close(fd.cast_signed()) };
            }
        }
    };
    let kept = kept.cast_unsigned();
    close(3, kept.saturating_sub(1));
    close(kept.max(2) + 1, u32::MAX);
}

/// Lets process `pid` look into this one where Yama would allow that to ancestors only (`PR_SET_PTRACER`). It
/// holds beyond execve, for this process alone. Without Yama there is nothing to allow.
pub fn allow_tracer(pid: u32) {
    const PR_SET_PTRACER: i32 = 0x5961_6d61;
    // SAFETY: no memory is passed.
    unsafe { libc::prctl(PR_SET_PTRACER, libc::c_ulong::from(pid), 0, 0, 0) };
}

/// Blocks no signal, and resets every handler and every ignored signal.
pub fn reset_signals() {
    // SAFETY: the set is initialised by the first call; SIG_DFL installs no code of ours.
    unsafe {
        let mut none = std::mem::MaybeUninit::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}
