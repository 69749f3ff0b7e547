//! Bringing a running process under the emulator, and letting it go again.
//!
//! The process gets what a static program has under `run` from its beginning: a filter, and a supervisor that serves
//! the device's calls too. Here the process is looked at, and the supervisors are asked whether one serves it already
//! ([`ask`]); the filter is put on by the new supervisor itself ([`crate::supervisor::run_attached`]), so that it
//! matters to nobody whether the command that started it lives on.

mod ask;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use nix::errno::Errno;

use crate::trap::policy::Band;
pub use ask::{Presence, Wanted, ask};

/// Why a process can't be attached to, or detached from. It goes on as it was.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum AttachError {
    /// No such process.
    #[error("there is no process {0}: {1}; give the id of a running process")]
    NoProcess(u32, Errno),
    /// A thread's id.
    #[error(
        "{tid} is a thread of process {pid}: give that one's id; its threads are all attached to at once"
    )]
    Thread { tid: u32, pid: u32 },
    /// Us.
    #[error("process {0} is ummunotify itself, which can't wait for its own answers")]
    Oneself(u32),
    /// Process 1.
    #[error(
        "process 1 starts every other process of this system or container, and all would inherit the filter, for good; \
         attach to the process that opens /dev/ummunotify"
    )]
    Init,
    /// It has no memory.
    #[error("process {0} is a thread of the kernel: it has no memory to watch, nor can it open the device")]
    Kernel(u32),
    /// It is a zombie.
    #[error("process {0} has ended already, and waits for its parent to notice (a zombie)")]
    Ended(u32),
    /// Its first thread is a zombie.
    #[error(
        "the first thread of process {0} has ended (pthread_exit in main): Linux gives nobody the descriptors of such a \
         process, and without its filter's listener nothing works"
    )]
    Headless(u32),
    /// Another user's.
    #[error("process {pid} belongs to user {owner}: be that user, or root")]
    Foreign { pid: u32, owner: u32 },
    /// Our user's, and yet closed to us.
    #[error(
        "process {0} may not be looked into: it was set-user-ID or has capabilities, or protects itself \
         (prctl PR_SET_DUMPABLE); be root"
    )]
    Closed(u32),
    /// Somebody traces it.
    #[error(
        "process {pid} is traced by process {tracer} ({name}): end that first; it may attach again afterwards"
    )]
    Traced { pid: u32, tracer: u32, name: String },
    /// Yama.
    #[error(
        "process {pid} may not be traced: Yama's ptrace_scope is {scope} here, {}; be root{}", yama(*scope),
        if *scope == 1 { ", or set /proc/sys/kernel/yama/ptrace_scope to 0" } else { "" }
    )]
    Yama { pid: u32, scope: u32 },
    /// Not allowed, and nobody says why.
    #[error(
        "process {0} may not be traced: ptrace: EPERM; a container or a security module forbids it: be root outside of it"
    )]
    Forbidden(u32),
    /// SECCOMP_MODE_STRICT.
    #[error(
        "process {0} is in strict seccomp mode: the kernel kills it for any call but read, write and exit, also for \
         those that put a filter on it"
    )]
    Strict(u32),
    /// A filter of somebody else.
    #[error(
        "process {0} has a seccomp filter of its own, which may kill it for the calls that attaching makes (prctl, mmap, \
         seccomp, munmap); root can set it aside for that; --despite-filter tries all the same, as it may where the \
         filter is that of an earlier attach whose supervisor was killed"
    )]
    Filtered(u32),
    /// 32-bit.
    #[error("process {0} is a 32-bit program; only 64-bit x86 programs find the device")]
    Narrow(u32),
    /// It has our library.
    #[error(
        "process {0} has the preloaded library already (ummunotify run, or LD_PRELOAD): it finds /dev/ummunotify \
         without this"
    )]
    Preloaded(u32),
    /// It has our filter, but not from an attach.
    #[error("process {0} runs under ummunotify already, and finds /dev/ummunotify without this")]
    Served(u32),
    /// It isn't attached to.
    #[error("nobody has attached to process {pid}, or its supervisor lives in another network namespace{}", unasked(*others))]
    NotAttached { pid: u32, others: usize },
    /// A supervisor of another version has it.
    #[error(
        "the supervisor whose filter process {0} is under is of another version: use the binary that started it"
    )]
    Version(u32),
    /// A supervisor can't be asked.
    #[error("ask the supervisor of process {0}: {1}; try again; its log may say more")]
    Unreachable(u32, Errno),
    /// Somebody listens.
    #[error(
        "somebody listens to process {0}'s calls already: seccomp: EBUSY; a container manager that watches its calls, \
         or an ummunotify that served its parent only; there can be one listener"
    )]
    Listened(u32),
    /// Another attach.
    #[error("another ummunotify attaches to process {0} at this moment; try again")]
    Busy(u32),
    /// Filters differ.
    #[error(
        "a thread of process {0} has a seccomp filter of its own: seccomp with TSYNC: ESRCH; a filter for all threads \
         can't be had then"
    )]
    Divided(u32),
    /// No vDSO, or a full one.
    #[error(
        "process {0} has no vDSO with room for a few instructions (booted with vdso=0, or it has unmapped it)"
    )]
    NoRoom(u32),
    /// No thread can be stopped.
    #[error(
        "no thread of process {0} could be stopped within {1} seconds: it is frozen, or all wait for a device or for a \
         child of vfork; it goes on as before; try again"
    )]
    Unstoppable(u32, u64),
    /// It ended.
    #[error("process {0} ended or executed another program meanwhile")]
    Gone(u32),
    /// The descriptor limit.
    #[error(
        "process {pid} may have {limit} descriptors only, and the device needs a few of its own (ulimit -n)"
    )]
    FewDescriptors { pid: u32, limit: u64 },
    /// A call failed.
    #[error("process {pid}: {what}: {errno}; {help}")]
    Call { pid: u32, what: &'static str, errno: Errno, help: &'static str },
}

impl AttachError {
    /// Whether it is another supervisor that is in the way, and only for a moment.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Busy(_) | Self::Listened(_) => true,
            Self::Traced { name, .. } => name == crate::supervisor::NAME,
            _ => false,
        }
    }
}

const fn yama(scope: u32) -> &'static str {
    match scope {
        1 => "so only an ancestor may",
        2 => "so only root may",
        _ => "so nobody may",
    }
}

fn unasked(n: usize) -> &'static str {
    if n == 0 {
        ""
    } else {
        "; a supervisor here is of another version or doesn't answer: use the binary that started it"
    }
}

/// A process that can be attached to as far as a look tells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subject {
    /// Its id.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// When it began: with the id it names one process only.
    pub born: u64,
    /// Threads that it has just now.
    pub threads: u32,
    /// The numbers that the device's descriptors get in it.
    pub band: Band,
    /// Without privileges it needs no_new_privs for a filter, and hasn't set that.
    pub sets_no_new_privs: bool,
    /// It has filters that we don't have ourselves.
    pub filtered: bool,
    /// Attach although such a filter might kill it.
    pub despite_filter: bool,
}

/// What /proc/PID/status says under a name.
pub(crate) fn field(status: &str, name: &str) -> Option<String> {
    status.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
}

fn number(status: &str, name: &str) -> Option<u32> {
    field(status, name)?.split_ascii_whitespace().next()?.parse().ok()
}

/// Looks whether a process can be attached to. Nothing of it is touched.
///
/// # Errors
/// Why it can't.
pub fn look(pid: u32, despite_filter: bool) -> Result<Subject, AttachError> {
    let gone =
        |e: &io::Error| AttachError::NoProcess(pid, e.raw_os_error().map_or(Errno::EIO, Errno::from_raw));
    if pid == 0 {
        return Err(AttachError::NoProcess(pid, Errno::ESRCH));
    }
    // /proc shows threads too, where they aren't listed.
    let status = fs::read_to_string(format!("/proc/{pid}/status")).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => AttachError::NoProcess(pid, Errno::ESRCH),
        _ => gone(&e),
    })?;
    let process = number(&status, "Tgid").unwrap_or(pid);
    if process != pid {
        return Err(AttachError::Thread { tid: pid, pid: process });
    }
    if pid == std::process::id() || field(&status, "Name").is_some_and(|name| name == crate::supervisor::NAME)
    {
        return Err(AttachError::Oneself(pid));
    }
    if pid == 1 {
        return Err(AttachError::Init);
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).map_err(|e| gone(&e))?;
    if is_kernels(&stat) {
        return Err(AttachError::Kernel(pid));
    }
    if field(&status, "State").is_some_and(|state| state.starts_with(['Z', 'X'])) {
        let others = number(&status, "Threads").unwrap_or(1) > 1;
        return Err(if others { AttachError::Headless(pid) } else { AttachError::Ended(pid) });
    }
    let born = crate::supervisor::born(pid).map_err(|e| gone(&e))?;
    open_to_us(pid, &status)?;
    refuse_tracer(pid, &status)?;
    if number(&status, "Seccomp") == Some(1) {
        return Err(AttachError::Strict(pid));
    }
    if is_32_bit(pid) {
        return Err(AttachError::Narrow(pid));
    }
    let maps = fs::read(format!("/proc/{pid}/maps")).map_err(|e| gone(&e))?;
    let shim = ummunotify_abi::config::SHIM_FILE.as_bytes();
    if maps.windows(shim.len()).any(|window| window == shim) {
        return Err(AttachError::Preloaded(pid));
    }
    let limit = descriptor_limit(pid).unwrap_or_else(ummunotify_sys::process::descriptor_limit);
    let band = Band::below(limit).ok_or(AttachError::FewDescriptors { pid, limit })?;
    let own = fs::read_to_string("/proc/self/status").unwrap_or_default();
    // Before 5.9 the kernel doesn't say how many there are.
    let filters = |status: &str| {
        number(status, "Seccomp_filters")
            .or_else(|| number(status, "Seccomp").map(|mode| mode / 2))
            .unwrap_or(0)
    };
    Ok(Subject {
        pid,
        name: field(&status, "Name").unwrap_or_default(),
        born,
        threads: number(&status, "Threads").unwrap_or(1),
        band,
        sets_no_new_privs: number(&status, "NoNewPrivs") == Some(0) && !has_admin(&status),
        filtered: filters(&status) > filters(&own),
        despite_filter,
    })
}

/// A descriptor of the process.
///
/// # Errors
/// It is gone.
pub fn descriptor(pid: u32) -> Result<OwnedFd, AttachError> {
    ummunotify_sys::process::pidfd_open(pid)
        .map_err(|e| AttachError::NoProcess(pid, e.raw_os_error().map_or(Errno::EIO, Errno::from_raw)))
}

/// PF_KTHREAD of /proc/PID/stat (include/linux/sched.h).
fn is_kernels(stat: &str) -> bool {
    const PF_KTHREAD: u64 = 0x0020_0000;
    // The name in parentheses may hold anything; the third field follows the last of them.
    let flags = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(9 - 3)?.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & PF_KTHREAD != 0)
}

/// CAP_SYS_ADMIN among the effective capabilities.
fn has_admin(status: &str) -> bool {
    const CAP_SYS_ADMIN: u64 = 1 << 21;
    let set = field(status, "CapEff").and_then(|set| u64::from_str_radix(&set, 16).ok());
    set.is_some_and(|set| set & CAP_SYS_ADMIN != 0)
}

/// Whether we may look into it: what needs less than tracing it, but the same user.
fn open_to_us(pid: u32, status: &str) -> Result<(), AttachError> {
    match fs::read_link(format!("/proc/{pid}/exe")) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            let owner = number(status, "Uid").unwrap_or(0);
            let me = nix::unistd::geteuid().as_raw();
            Err(if owner == me { AttachError::Closed(pid) } else { AttachError::Foreign { pid, owner } })
        }
        _ => Ok(()),
    }
}

fn refuse_tracer(pid: u32, status: &str) -> Result<(), AttachError> {
    match number(status, "TracerPid") {
        None | Some(0) => Ok(()),
        Some(tracer) => {
            // A thread; of a debugger with several perhaps one that has another name.
            let status = fs::read_to_string(format!("/proc/{tracer}/status")).unwrap_or_default();
            let tracer = number(&status, "Tgid").unwrap_or(tracer);
            let name = fs::read_to_string(format!("/proc/{tracer}/comm")).unwrap_or_default();
            Err(AttachError::Traced { pid, tracer, name: name.trim_end().to_owned() })
        }
    }
}

/// Why a thread may not be traced, as far as can be told.
pub(crate) fn why_forbidden(pid: u32, tid: u32) -> AttachError {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).unwrap_or_default();
    if let Err(error) = refuse_tracer(pid, &status) {
        return error;
    }
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok();
    match scope.and_then(|text| text.trim().parse().ok()) {
        Some(scope) if scope > 0 => AttachError::Yama { pid, scope },
        _ => AttachError::Forbidden(pid),
    }
}

/// By the class of its ELF file. A file that can't be read may be of either.
fn is_32_bit(pid: u32) -> bool {
    use std::io::Read;
    let mut head = [0; 5];
    let read = fs::File::open(format!("/proc/{pid}/exe")).and_then(|mut file| file.read_exact(&mut head));
    read.is_ok() && head == *b"\x7fELF\x01"
}

/// Its soft limit of descriptors.
fn descriptor_limit(pid: u32) -> Option<u64> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let soft = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match soft.split_ascii_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

/// The user that /proc says a process belongs to; root's where it can't be looked into.
fn owner(pid: u32) -> Option<u32> {
    fs::metadata(format!("/proc/{pid}")).ok().map(|meta| meta.uid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_by_whole_names() {
        let status = "Name:\ta: b\nTgid:\t7\nSeccomp:\t2\nSeccomp_filters:\t3\nCapEff:\t0000000000200000\n";
        assert_eq!(field(status, "Name").as_deref(), Some("a: b"));
        assert_eq!(number(status, "Seccomp"), Some(2));
        assert_eq!(number(status, "Seccomp_filters"), Some(3));
        assert_eq!(number(status, "NoNewPrivs"), None);
        assert!(has_admin(status));
        assert!(!has_admin("CapEff:\t00000000a80425fb\n"));
    }

    #[test]
    fn kernel_threads_are_told_by_their_flags() {
        assert!(is_kernels("2 (kthreadd) S 0 0 0 0 -1 2129984 0 0"));
        assert!(!is_kernels("77 (a) b) c) S 1 77 77 0 -1 4194560 1234 0"));
    }

    #[test]
    fn what_can_never_be_attached_to_is_refused_by_a_look() {
        assert_eq!(look(0, false), Err(AttachError::NoProcess(0, Errno::ESRCH)));
        assert_eq!(look(std::process::id(), false), Err(AttachError::Oneself(std::process::id())));
        assert_eq!(look(1, false), Err(AttachError::Init));
        assert!(matches!(look(u32::MAX, false), Err(AttachError::NoProcess(..))));
        let tid = ummunotify_sys::process::gettid();
        if tid != std::process::id() {
            assert_eq!(look(tid, false), Err(AttachError::Thread { tid, pid: std::process::id() }));
        }
    }
}
