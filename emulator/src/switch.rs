//! Moving open contexts between the emulator and the kernel module, while their clients go on.
//!
//! A context that was opened emulated can move: it keeps its descriptor, its counter's mapping and its cookies, and
//! everything is reported as invalid, without hint, at each move. One that was opened on the module's device itself
//! never does: nothing of ours stands between it and its client.
//!
//! The process's supervisor does the work; here it is found and asked. Its opener takes part: at its next call on
//! the context it opens the device for the supervisor, for the module watches whoever opens it.

use core::fmt;
use core::str::FromStr;
use std::collections::BTreeSet;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sockopt,
};
use nix::sys::time::TimeVal;
use ummunotify_abi::device;
use ummunotify_abi::wire::{self, Hurdle, MAX_ADDRESS, Op, Reply, Request};

/// Where a switchable context's invalidations are recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// By the emulator's supervisor.
    Emulated,
    /// By the kernel module.
    Kmod,
}

impl Place {
    /// The word that stands for it on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Emulated => "emulated",
            Self::Kmod => "kmod",
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        [Self::Emulated, Self::Kmod]
            .into_iter()
            .find(|place| place.name() == word)
            .ok_or_else(|| format!("a context can move to kmod or emulated; not to `{word}`"))
    }
}

/// What a switch has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Moved {
    /// Contexts that moved.
    pub moved: u64,
    /// Contexts that were there already.
    pub already: u64,
}

/// Why nothing, or not all, was switched. The context in question is where it was, and no invalidation is lost.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SwitchError {
    /// No such process.
    #[error("process {0}: {1}; give the id of a running process (not of a thread)")]
    NoProcess(u32, Errno),
    /// The context was opened on the kernel module's device.
    #[error(
        "the device was opened on the kernel module directly: such a context never switches; start the program with \
         --backend emulated to be able to"
    )]
    Direct,
    /// No supervisor that can be reached knows the process; so many could not be asked.
    #[error(
        "no supervisor here serves process {pid}: it doesn't run under ummunotify, hasn't opened /dev/ummunotify or has \
         closed it, or lives in another network namespace (enter that first, with nsenter -n){}", unasked(*others)
    )]
    NotServed {
        /// The process.
        pid: u32,
        /// Supervisors that couldn't be asked.
        others: usize,
    },
    /// The supervisor, or what stands at its address, can't be talked to.
    #[error("{0}: {1}; {2}")]
    Unreachable(&'static str, Errno, &'static str),
    /// The supervisor tried.
    #[error("{}: {errno}; {}", tried(*hurdle), help(*hurdle, *errno))]
    Refused {
        /// What is in the way.
        hurdle: Hurdle,
        /// What it answered.
        errno: Errno,
    },
}

fn unasked(n: usize) -> String {
    match n {
        0 => String::new(),
        1 => "; 1 supervisor is of another version or doesn't answer: use the binary that started it"
            .to_owned(),
        n => format!(
            "; {n} supervisors are of another version or don't answer: use the binary that started them"
        ),
    }
}

const fn tried(hurdle: Hurdle) -> &'static str {
    match hurdle {
        Hurdle::Forbidden => "switch another user's process",
        Hurdle::NoContext => "find an open context of the process",
        Hurdle::Busy => "wait for another switch of the same context",
        Hurdle::Silent => "wait for a call of the process on its device",
        Hurdle::Open => "open /dev/ummunotify in the process",
        Hurdle::Adopt => "let the device count into the context's counter",
        Hurdle::Regions => "register the regions with the kernel module",
        Hurdle::Watch => "watch the kernel module's device",
        Hurdle::Arena => "lock the context's shared memory",
        Hurdle::Threads => "see every thread outside of calls that only the module has recorded",
        Hurdle::Ended => "reach the process",
    }
}

const fn help(hurdle: Hurdle, errno: Errno) -> &'static str {
    match (hurdle, errno) {
        (Hurdle::Forbidden, _) => "be that user, or root",
        (Hurdle::NoContext, _) => "the process must have opened /dev/ummunotify emulated, and not closed it",
        (Hurdle::Busy, _) => "try again, with a longer --deadline if the other one has one",
        (Hurdle::Silent, _) => {
            "the request is withdrawn: the process has to call ioctl or read on the device, or wait for it, within \
             the deadline"
        }
        (Hurdle::Open, Errno::ENOENT | Errno::ENXIO | Errno::ENODEV) => {
            "load the kernel module (see kmod-compat), and make its device visible to the process"
        }
        (Hurdle::Open, Errno::EACCES | Errno::EPERM) => {
            "let the process's user read the device (see the udev rule in kmod-compat)"
        }
        (Hurdle::Open, Errno::EMFILE) => "the process needs three free descriptors for a moment",
        (Hurdle::Open, _) => "the process must be able to open the device",
        (Hurdle::Adopt, Errno::ENOTTY) => {
            "the device is that of an older module, without UMMUNOTIFY_ADOPT_COUNTER, or no ummunotify device: load \
             this project's"
        }
        (Hurdle::Adopt | Hurdle::Regions, _) => "the module refuses; the kernel's log may say more",
        (Hurdle::Watch, _) => {
            "the supervisor has no descriptor or no watch left (ulimit -n, max_user_watches)"
        }
        (Hurdle::Arena, _) => "a stopped thread holds its lock (SIGCONT lets it go on), or it is broken",
        (Hurdle::Threads, _) => {
            "the context stays with the kernel module; try again when the process isn't stopped, or with a longer \
             --deadline"
        }
        (Hurdle::Ended, _) => "it has ended, or executed another program",
    }
}

/// Moves all contexts that process `pid` opened emulated. `patience` bounds the wait for the process to take part.
///
/// # Errors
/// See [`SwitchError`].
pub fn switch_process(pid: u32, to: Place, patience: Duration) -> Result<Moved, SwitchError> {
    let process =
        ummunotify_sys::process::pidfd_open(pid).map_err(|e| SwitchError::NoProcess(pid, errno_of(&e)))?;
    let owner =
        std::fs::metadata(format!("/proc/{pid}")).map(|meta| std::os::unix::fs::MetadataExt::uid(&meta));
    let me = nix::unistd::geteuid().as_raw();
    // The owner that /proc shows is root where the process can't be looked at.
    let owner = owner.map_err(|e| SwitchError::NoProcess(pid, errno_of(&e)))?;
    let mut others = 0;
    for name in supervisors() {
        let Ok(connection) = Connection::to(&name, &[me, owner]) else { continue };
        match connection.switch(process.as_fd(), to, patience, || {}) {
            Err(SwitchError::Refused { hurdle: Hurdle::NoContext, .. }) => {}
            Err(SwitchError::Unreachable(..)) => others += 1,
            answer => return answer,
        }
    }
    if opened_directly(pid) {
        return Err(SwitchError::Direct);
    }
    if me != 0 && owner != me {
        return Err(SwitchError::Refused { hurdle: Hurdle::Forbidden, errno: Errno::EPERM });
    }
    Err(SwitchError::NotServed { pid, others })
}

/// Whether the process holds a descriptor of the real device.
fn opened_directly(pid: u32) -> bool {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    entries.flatten().any(|e| std::fs::read_link(e.path()).is_ok_and(|p| p.as_os_str() == device::PATH))
}

/// The addresses of the supervisors in this network namespace.
pub(crate) fn supervisors() -> BTreeSet<Vec<u8>> {
    let table = std::fs::read("/proc/net/unix").unwrap_or_default();
    let names = table.split(|&b| b == b'\n').filter_map(|line| line.rsplit(|&b| b == b' ').next());
    // An accepted connection has its listener's name.
    names
        .filter_map(|name| name.strip_prefix(b"@"))
        .filter(|name| name.starts_with(wire::SUPERVISOR_PREFIX))
        .map(<[u8]>::to_vec)
        .collect()
}

/// Moves the context of a descriptor. `asked` runs when the opener has been asked to make a call on it.
pub(crate) fn switch_descriptor(
    fd: BorrowedFd<'_>,
    to: Place,
    patience: Duration,
    asked: impl FnMut(),
) -> Result<bool, SwitchError> {
    let done = Connection::to_context(fd)?.switch(fd, to, patience, asked)?;
    Ok(done.moved > 0)
}

/// Where the context of a descriptor is.
pub(crate) fn whereabouts(fd: BorrowedFd<'_>) -> Result<Place, SwitchError> {
    let connection = Connection::to_context(fd)?;
    connection.tell(Op::Whereabouts, [0; 6], fd)?;
    let (_, [_, on_module, ..]) = connection.answer()?;
    Ok(if on_module > 0 { Place::Kmod } else { Place::Emulated })
}

fn errno_of(e: &std::io::Error) -> Errno {
    e.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn unreachable(errno: Errno) -> SwitchError {
    let help = match errno {
        Errno::ECONNREFUSED => "it is dead, or lives in another network namespace",
        Errno::EPROTONOSUPPORT => "it is of another version: use the binary that started it",
        Errno::EPERM => "another user listens at its address",
        _ => "try again; its log may say more",
    };
    SwitchError::Unreachable("ask the supervisor", errno, help)
}

/// How long connecting may take, and how much longer than asked for an answer, in seconds: the supervisor waits as
/// long for a lock that a stopped thread holds.
const MARGIN: i64 = 30;

/// A connection to a supervisor.
pub(crate) struct Connection(OwnedFd);

impl Connection {
    /// To the one that listens at that abstract address, if it is root's or one of those users'.
    pub(crate) fn to(name: &[u8], users: &[u32]) -> Result<Self, SwitchError> {
        let open = || -> nix::Result<OwnedFd> {
            let fd = socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
            // It bounds connect too (unix(7)).
            socket::setsockopt(&fd, sockopt::SendTimeout, &TimeVal::new(MARGIN, 0))?;
            socket::connect(fd.as_raw_fd(), &UnixAddr::new_abstract(name)?)?;
            // Anybody can bind an abstract address.
            let uid = socket::getsockopt(&fd, sockopt::PeerCredentials)?.uid();
            if uid == 0 || users.contains(&uid) { Ok(fd) } else { Err(Errno::EPERM) }
        };
        open().map(Self).map_err(unreachable)
    }

    /// To the supervisor of the context of that descriptor.
    fn to_context(fd: BorrowedFd<'_>) -> Result<Self, SwitchError> {
        let stat = nix::sys::stat::fstat(fd).map_err(unreachable)?;
        match stat.st_mode & libc::S_IFMT {
            libc::S_IFIFO => {}
            libc::S_IFCHR => return Err(SwitchError::Direct),
            _ => return Err(unreachable(Errno::EBADF)),
        }
        let mut name = [0; MAX_ADDRESS];
        let length = wire::context_address(&mut name, stat.st_ino);
        let users = [nix::unistd::getuid().as_raw(), nix::unistd::geteuid().as_raw()];
        Self::to(name.get(1..length).unwrap_or_default(), &users)
    }

    /// For polling.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Bounds the wait for an answer.
    pub(crate) fn limit(&self, seconds: i64) -> Result<(), SwitchError> {
        socket::setsockopt(&self.0, sockopt::ReceiveTimeout, &TimeVal::new(seconds, 0)).map_err(unreachable)
    }

    fn switch(
        &self,
        shown: BorrowedFd<'_>,
        to: Place,
        patience: Duration,
        mut asked: impl FnMut(),
    ) -> Result<Moved, SwitchError> {
        let seconds = i64::try_from(patience.as_secs()).unwrap_or(i64::MAX).saturating_add(MARGIN);
        self.limit(seconds)?;
        let milliseconds = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        self.tell(Op::Switch, [u64::from(to == Place::Kmod), milliseconds, 0, 0, 0, 0], shown)?;
        loop {
            match self.answer()? {
                (0, [moved, already, ..]) => return Ok(Moved { moved, already }),
                _ => asked(),
            }
        }
    }

    /// Sends a request about the descriptor that is shown.
    pub(crate) fn tell(&self, op: Op, args: [u64; 6], shown: BorrowedFd<'_>) -> Result<(), SwitchError> {
        let mut bytes = Vec::with_capacity(size_of::<Request>());
        for word in [wire::MAGIC, wire::WIRE_VERSION, op as u32, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        for arg in args {
            bytes.extend(arg.to_ne_bytes());
        }
        let fds: [RawFd; 1] = [shown.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&fds)];
        socket::sendmsg::<()>(
            self.0.as_raw_fd(),
            &[IoSlice::new(&bytes)],
            &rights,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
        .map_err(unreachable)?;
        Ok(())
    }

    /// Result and arguments of the next reply.
    pub(crate) fn answer(&self) -> Result<(i64, [u64; 6]), SwitchError> {
        let mut bytes = [0u8; size_of::<Reply>()];
        let packet = loop {
            match ummunotify_sys::socket::receive(&self.0, &mut bytes, 1) {
                Err(Errno::EINTR) => {}
                answer => break answer.map_err(unreachable)?,
            }
        };
        if packet.length == 0 {
            return Err(unreachable(Errno::ECONNRESET));
        }
        let word = |at: usize| -> [u8; 8] {
            bytes.get(at..).and_then(|b| b.first_chunk()).copied().unwrap_or_default()
        };
        let head = u64::from_ne_bytes(word(0));
        if packet.length < bytes.len() || head as u32 != wire::MAGIC {
            return Err(unreachable(Errno::EPROTO));
        }
        if (head >> 32) as u32 != wire::WIRE_VERSION {
            return Err(unreachable(Errno::EPROTONOSUPPORT));
        }
        let result = i64::from_ne_bytes(word(8));
        let args = core::array::from_fn(|i| u64::from_ne_bytes(word(16 + 8 * i)));
        if result >= 0 {
            return Ok((result, args));
        }
        let errno = Errno::from_raw(i32::try_from(-result).unwrap_or(libc::EPROTO));
        match Hurdle::from_u64(args[0]) {
            Some(hurdle) => Err(SwitchError::Refused { hurdle, errno }),
            None => Err(unreachable(errno)),
        }
    }
}
