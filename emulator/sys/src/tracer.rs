//! A resident tracer: seize, wait, look at calls, let run (ptrace(2)).
//!
//! All of it belongs to one thread: the kernel takes requests only from the task that seized. The requests here
//! are those that `nix` can't make: it knows no PTRACE_LISTEN, no real-time signals, and its PTRACE_GET_SYSCALL_INFO
//! passes no size, so that nothing is written.

use std::io;

use nix::errno::Errno;
use nix::sys::ptrace::Options;
use nix::unistd::Pid;

use crate::check;

/// What a system call looks like at its entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// `AUDIT_ARCH_*` of the entry that was used.
    pub arch: u32,
    /// The number.
    pub nr: u32,
    /// The argument registers.
    pub args: [u64; 6],
    /// Data of the filter that stopped it (`SECCOMP_RET_DATA`); `None` at a plain stop.
    pub data: Option<u32>,
}

/// Where in a system call a task has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// Before it.
    Entry(Entry),
    /// Behind it.
    Exit,
    /// In none.
    None,
}

/// What became of a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// It is gone, and was reaped.
    Ended,
    /// It stopped at the entry or the exit of a call (PTRACE_SYSCALL).
    Call,
    /// A filter's SECCOMP_RET_TRACE stopped it at an entry.
    Filter,
    /// It has made another task, which is traced as well.
    Child,
    /// It runs another program, and has become the first and only thread of its process.
    Exec,
    /// A new task before its first instruction, or a PTRACE_INTERRUPT, or the end of a job-control stop.
    Trap,
    /// A job-control stop: it stays stopped until SIGCONT, unless it is let run.
    Stopped,
    /// A signal is about to be delivered.
    Signal(i32),
}

/// How a stopped task is let run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Run {
    /// To the next event (PTRACE_CONT).
    On,
    /// To the next entry or exit of a call (PTRACE_SYSCALL).
    ToCall,
}

/// Begins to trace a task, which runs on. `fatal`: the end of the tracer is the end of the task.
///
/// # Errors
/// EPERM: it is traced already, or the tracer lacks the right (Yama, another user's, not dumpable). ESRCH: no such
/// task.
pub fn seize(tid: u32, fatal: bool) -> nix::Result<()> {
    nix::sys::ptrace::seize(pid(tid)?, options(fatal))
}

/// Sets for a stopped task whether the end of the tracer is its end; what it creates later inherits that.
///
/// # Errors
/// ESRCH: it isn't stopped, or gone.
pub fn set_fatal(tid: u32, fatal: bool) -> nix::Result<()> {
    nix::sys::ptrace::setoptions(pid(tid)?, options(fatal))
}

fn options(fatal: bool) -> Options {
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACESECCOMP
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACEEXEC;
    if fatal { options | Options::PTRACE_O_EXITKILL } else { options }
}

/// Makes a running task stop soon, with [`Event::Trap`] if nothing else comes first.
///
/// # Errors
/// ESRCH: it is gone, or not ours.
pub fn interrupt(tid: u32) -> nix::Result<()> {
    nix::sys::ptrace::interrupt(pid(tid)?)
}

/// Lets a stopped task run, and delivers `signal` to it unless that is 0.
///
/// # Errors
/// ESRCH: it was killed meanwhile.
pub fn run(tid: u32, how: Run, signal: i32) -> nix::Result<()> {
    let request = match how {
        Run::On => libc::PTRACE_CONT,
        Run::ToCall => libc::PTRACE_SYSCALL,
    };
    plain(request, tid, signal)
}

/// Traces a stopped task no longer: it runs, and `signal` is delivered to it unless that is 0.
///
/// # Errors
/// ESRCH: it was killed meanwhile.
pub fn let_go(tid: u32, signal: i32) -> nix::Result<()> {
    plain(libc::PTRACE_DETACH, tid, signal)
}

/// Leaves a task in its job-control stop, and hears of its end (PTRACE_LISTEN).
///
/// # Errors
/// ESRCH: it was killed meanwhile. EIO: it is in no such stop any more.
pub fn listen(tid: u32) -> nix::Result<()> {
    plain(libc::PTRACE_LISTEN, tid, 0)
}

fn plain(request: libc::c_uint, tid: u32, signal: i32) -> nix::Result<()> {
    let tid = pid(tid)?.as_raw();
    // SAFETY: these requests pass no memory.
    Errno::result(unsafe { libc::ptrace(request, tid, 0usize, signal as usize) }).map(drop)
}

/// What a task has stopped at (PTRACE_GET_SYSCALL_INFO, Linux 5.3).
///
/// # Errors
/// ESRCH: it was killed meanwhile.
pub fn call(tid: u32) -> nix::Result<Call> {
    let tid = pid(tid)?.as_raw();
    // SAFETY: zero is a valid value of every field.
    let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of_val(&info);
    // SAFETY: the kernel writes at most `size` bytes to `info`.
    Errno::result(unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, tid, size, &raw mut info) })?;
    Ok(match info.op {
        libc::PTRACE_SYSCALL_INFO_ENTRY => {
            // SAFETY: `op` says which member the kernel has written; any bytes are valid ones.
            let entry = unsafe { info.u.entry };
            Call::Entry(Entry { arch: info.arch, nr: entry.nr as u32, args: entry.args, data: None })
        }
        libc::PTRACE_SYSCALL_INFO_SECCOMP => {
            // SAFETY: as above.
            let entry = unsafe { info.u.seccomp };
            let data = Some(entry.ret_data);
            Call::Entry(Entry { arch: info.arch, nr: entry.nr as u32, args: entry.args, data })
        }
        libc::PTRACE_SYSCALL_INFO_EXIT => Call::Exit,
        _ => Call::None,
    })
}

/// At the exit of a call: sets what the call returns.
///
/// # Errors
/// ESRCH: it was killed meanwhile.
pub fn set_result(tid: u32, value: i64) -> nix::Result<()> {
    let mut registers = nix::sys::ptrace::getregs(pid(tid)?)?;
    registers.rax = value.cast_unsigned();
    nix::sys::ptrace::setregs(pid(tid)?, registers)
}

/// The number of the call that a task has stopped at, as the kernel keeps it.
///
/// # Errors
/// ESRCH: it was killed meanwhile.
pub fn number(tid: u32) -> nix::Result<i64> {
    nix::sys::ptrace::read_user(pid(tid)?, NUMBER_OFFSET as nix::sys::ptrace::AddressType)
}

/// At the entry of a call: changes its number. -1 stands for none, and then it fails with ENOSYS.
///
/// # Errors
/// ESRCH: it was killed meanwhile.
pub fn set_number(tid: u32, number: i64) -> nix::Result<()> {
    nix::sys::ptrace::write_user(pid(tid)?, NUMBER_OFFSET as nix::sys::ptrace::AddressType, number)
}

/// Where PTRACE_PEEKUSER finds the number.
const NUMBER_OFFSET: usize =
    std::mem::offset_of!(libc::user, regs) + std::mem::offset_of!(libc::user_regs_struct, orig_rax);

/// At the entry of a call: it isn't made, and returns `value` (seccomp(2), SECCOMP_RET_TRACE).
///
/// # Errors
/// ESRCH: it was killed meanwhile.
pub fn skip(tid: u32, value: i64) -> nix::Result<()> {
    let mut registers = nix::sys::ptrace::getregs(pid(tid)?)?;
    registers.orig_rax = u64::MAX;
    registers.rax = value.cast_unsigned();
    nix::sys::ptrace::setregs(pid(tid)?, registers)
}

/// After [`Event::Exec`] the thread id that the task had before; after [`Event::Child`] the other's.
///
/// # Errors
/// ESRCH: it was killed meanwhile.
pub fn message(tid: u32) -> nix::Result<u32> {
    nix::sys::ptrace::getevent(pid(tid)?).map(|id| id as u32)
}

/// Tasks of the calling thread, of all kinds, and of it alone.
const MINE: libc::c_int = libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG;

/// The next event of a task that this thread traces; `Ok(None)` if there is none now. ECHILD: it traces none.
///
/// # Errors
/// See above.
pub fn next() -> io::Result<Option<(u32, Event)>> {
    let mut status = 0;
    // Not nix's: that one refuses stops by real-time signals.
    // SAFETY: `status` is writable.
    let tid = check(unsafe { libc::waitpid(-1, &raw mut status, MINE) }.into())?;
    Ok((tid != 0).then(|| (tid as u32, event(status))))
}

fn event(status: i32) -> Event {
    if !libc::WIFSTOPPED(status) {
        return Event::Ended;
    }
    let signal = libc::WSTOPSIG(status);
    match status >> 16 {
        0 if signal == libc::SIGTRAP | 0x80 => Event::Call,
        0 => Event::Signal(signal),
        libc::PTRACE_EVENT_SECCOMP => Event::Filter,
        libc::PTRACE_EVENT_EXEC => Event::Exec,
        // Of these only job control stops a task by another signal than SIGTRAP.
        libc::PTRACE_EVENT_STOP if signal != libc::SIGTRAP => Event::Stopped,
        libc::PTRACE_EVENT_STOP => Event::Trap,
        _ => Event::Child,
    }
}

fn pid(tid: u32) -> nix::Result<Pid> {
    i32::try_from(tid).map(Pid::from_raw).map_err(|_| Errno::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_is_told_apart() {
        let stopped = |signal: i32, event: i32| signal << 8 | event << 16 | 0x7f;
        assert_eq!(event(0), Event::Ended);
        assert_eq!(event(9), Event::Ended);
        assert_eq!(event(stopped(libc::SIGTRAP | 0x80, 0)), Event::Call);
        assert_eq!(event(stopped(libc::SIGTRAP, 0)), Event::Signal(libc::SIGTRAP));
        assert_eq!(event(stopped(libc::SIGSTOP, 0)), Event::Signal(libc::SIGSTOP));
        assert_eq!(event(stopped(64, 0)), Event::Signal(64));
        assert_eq!(event(stopped(libc::SIGTRAP, 7)), Event::Filter);
        assert_eq!(event(stopped(libc::SIGTRAP, 4)), Event::Exec);
        assert_eq!(event(stopped(libc::SIGTRAP, 128)), Event::Trap);
        assert_eq!(event(stopped(libc::SIGTTIN, 128)), Event::Stopped);
        for made in 1..=3 {
            assert_eq!(event(stopped(libc::SIGTRAP, made)), Event::Child);
        }
    }
}
