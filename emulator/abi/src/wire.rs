//! What the shim and the supervisor say to each other.
//!
//! Every exchange is one request and one reply, each one packet on a `SOCK_SEQPACKET` unix socket, possibly
//! with descriptors attached (`SCM_RIGHTS`). The shim meets its supervisor in three ways:
//! * it started the supervisor itself: a socket pair, descriptor [`crate::config::SUPERVISE_FD`] there;
//! * it runs under an inherited filter: the trapped call `prctl(HELLO_PRCTL, WIRE_VERSION)` answers with a
//!   token > 0, and the supervisor listens at the abstract address [`supervisor_address`];
//! * it holds a descriptor of a context: the supervisor listens at [`context_address`] of the pipe's inode,
//!   and believes only who shows the descriptor.

/// Version of everything in this module and of the arena's layout. Both sides refuse another's.
pub const WIRE_VERSION: u32 = 3;

/// `prctl` option that no kernel knows (`"UMMU"`): EINVAL where no supervisor's filter is inherited.
pub const HELLO_PRCTL: u64 = 0x554d_4d55;

/// In the place of the version: whether such a filter is there. It answers by itself with [`PRESENT_ERRNO`].
pub const PRESENT: u64 = 0;
/// What no kernel answers to a `prctl`: EISNAM.
pub const PRESENT_ERRNO: i32 = 120;

/// Whether the filter of the supervisor with that token traps the device's own calls too, so that programs without
/// a shim find the device.
pub const fn serves_static(token: u64) -> bool {
    token & 1 == 1
}
/// Second argument of the trapped call by which the opener's threads, which recorded a hit themselves, have a byte
/// written into the pipe of that inode (third argument): `prctl(HELLO_PRCTL, RING_PRCTL, inode)` (`"RING"`).
pub const RING_PRCTL: u64 = 0x474e_4952;

/// [`Op::Open`]'s reply: the opener's threads record what they can, and list the context for that.
pub const INLINE_GRANTED: u64 = 1;
/// [`Op::Open`]'s reply, likewise: a munmap of hugetlb memory invalidates once, so that any that hits may be recorded.
/// Without it those alone that have no room for a large page.
pub const INLINE_MUNMAP: u64 = 2;

/// Set in the lock ids of supervisor threads. Client threads use their bare thread id (below 2^22, proc(5));
/// the two may be of different pid namespaces and must never look the same.
pub const SUPERVISOR_LOCK_ID: u32 = 1 << 28;

/// Bytes that a shim asks the pipe for while it waits for a byte in it, into memory that can't be written to. No
/// client asks for as many: where reads of the device are trapped, one of this length is let through.
pub const WAIT_LENGTH: usize = 0x4d4d_5530;

/// Permissions of the device's pipe. The sticky bit means nothing there and tells it from others, where the supervisor can't
/// be asked.
pub const PIPE_MODE: u32 = 0o1600;

/// First word of each packet.
pub const MAGIC: u32 = 0x4d4d_5531;

/// What a [`Request`] asks for. Arguments are `args[0..]`, descriptors in the order named.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Open a context in the caller's address space. args: flags of open, 1 if the caller needs a filter, the
    /// addresses of its gate for calls and of that for tasks, or 0.
    /// Reply descriptors: the pipe's read end, the arena, the counter (writable) and, if reply args[3] is 1,
    /// the space marker: a page to map shared, MADV_DONTFORK, for as long as the address space exists.
    /// Reply args: context number, pipe inode, token, marker follows, [`INLINE_GRANTED`], [`INLINE_MUNMAP`] and
    /// [`WANTS_USERFAULTFD`], pid of the supervisor.
    /// Payload: the filter program (`struct sock_filter`s) if one was asked for.
    Open = 1,
    /// The filter is installed. Descriptor: the listener. The reply means that the supervisor holds it.
    Listener = 2,
    /// The caller closed its own copy of the listener. args: 1 if the filter came before the program that it is
    /// for, so that nothing has to be waited for. The reply means that every thread was seen outside
    /// the watched calls, or that everything will be invalid when the rest come out: open may return.
    Closed = 3,
    /// Give the counter, read-only. Descriptor: the device descriptor. Reply descriptor: the counter.
    Counter = 4,
    /// Attach to the context whose descriptor is shown: as [`Op::Open`] if the caller runs in the opener's
    /// address space (args: 1, context number, inode), else no descriptors and args 0, context number, inode.
    Attach = 5,
    /// EXCHANGE_FEATURES by a process that isn't the opener. Descriptor: the device descriptor.
    Features = 6,
    /// REGISTER_REGION likewise, or by the opener while the arena turns it away. args: start, end, cookie. Reply
    /// args: [`NOTICE_RING`] or 0.
    Register = 7,
    /// UNREGISTER_REGION likewise. args: cookie.
    Unregister = 8,
    /// read likewise. args: room in records. Reply: result = records, payload = the records; the request
    /// [`Op::Commit`] on the same connection consumes them.
    Read = 9,
    /// The records of the last [`Op::Read`] reached the caller's buffer (args: 1) or not (args: 0).
    Commit = 10,
    /// Trace the caller's process, which runs on. Payload of the reply: the filter program, which stops calls for
    /// the tracer. EBUSY: another tracer is there; EPERM: it isn't allowed.
    Seize = 20,
    /// After [`Op::Seize`]. args: 1 if the filter was installed, 0 if none could be and each call is to be stopped. The
    /// reply is that of [`Op::Closed`].
    Traced = 21,
    /// Move contexts to another backend. Descriptor: a context's device descriptor, or a pidfd, which means all
    /// that its process opened. args: 1 kernel module, 0 emulated; patience in milliseconds.
    /// Replies: result 1 as often as the opener is asked for the real device (it gives it at its next call on
    /// that context); then result 0, args: contexts that moved, contexts that were there already; or an errno,
    /// args: a [`Hurdle`], contexts that moved before.
    Switch = 11,
    /// The real device, opened in the opener's address space for [`crate::arena::Header::request`]. args: that
    /// number, errno of the open. Descriptors: the device descriptor and, without an errno, the real device. The
    /// sender closes its copy, then the connection: that is the end of the message. No reply.
    Device = 12,
    /// Where contexts are. Descriptor: as for [`Op::Switch`]. Reply args: contexts, those on the kernel module.
    Whereabouts = 13,
    /// Patch the sites of the caller's process. args: where stubs jump to; the caller's task if no other thread may notice:
    /// EBUSY is the answer where one might.
    Patch = 14,
    /// Somebody waits for each hit from now on. Descriptor: the device descriptor.
    Arm = 15,
    /// Descriptor: a userfaultfd of the caller's address space, which the caller doesn't keep. Without one args[0] is
    /// the errno that was had instead. Reply args: [`NOTICE_RING`] or 0; the errno if it was asked for by name and is
    /// missing, or 0. Refused where nothing would be seen without it.
    Userfaultfd = 16,
    /// About a process that the supervisor was attached to while it ran. Descriptor: its pidfd. args: what is wanted
    /// ([`parking`]), and for a descendant of such a process the token that it was told, else 0.
    /// Reply: result [`parking::SERVED`] and so on, as it was before; args: contexts that were ended, pid of the
    /// supervisor. Or an errno, args: a [`Hurdle`].
    Parking = 17,
}

/// Words of [`Op::Parking`].
pub mod parking {
    /// Only tell.
    pub const TELL: u64 = 0;
    /// Serve the process (again).
    pub const SERVE: u64 = 1;
    /// End its contexts and let its calls go by from now on.
    pub const PARK: u64 = 2;

    /// It is served.
    pub const SERVED: i64 = 1;
    /// It was detached from.
    pub const PARKED: i64 = 2;
    /// It has the device, but not because somebody attached to it: nothing was done.
    pub const OWN: i64 = 3;
}

/// Third argument of [`HELLO_PRCTL`] where it isn't a program that asks, but somebody who attaches to it.
pub const HELLO_FROM_OUTSIDE: u64 = 1;

/// What is in the way of [`Op::Switch`].
#[repr(u64)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hurdle {
    /// The process is another user's (EPERM).
    Forbidden = 1,
    /// This supervisor knows no such process, or no open context of it (ESRCH).
    NoContext = 2,
    /// Another switch of the context was under way all the time (EBUSY).
    Busy = 3,
    /// No thread of the opener has called anything on the context (ETIMEDOUT).
    Silent = 4,
    /// The opener couldn't open the real device (errno of open).
    Open = 5,
    /// The device doesn't take the counter over: ENOTTY if it is another or an older module.
    Adopt = 6,
    /// The device doesn't take the regions over (errno of REGISTER_REGION).
    Regions = 7,
    /// The supervisor can't watch the device (errno of epoll_ctl).
    Watch = 8,
    /// The context's shared memory is broken, or a stopped thread holds its lock (EIO).
    Arena = 9,
    /// Threads stay inside calls that nobody but the module has recorded (ETIMEDOUT).
    Threads = 10,
    /// The process ended, or executed another program (ESRCH).
    Ended = 11,
}

impl Hurdle {
    /// The hurdle of that number.
    pub const fn from_u64(n: u64) -> Option<Self> {
        Some(match n {
            1 => Self::Forbidden,
            2 => Self::NoContext,
            3 => Self::Busy,
            4 => Self::Silent,
            5 => Self::Open,
            6 => Self::Adopt,
            7 => Self::Regions,
            8 => Self::Watch,
            9 => Self::Arena,
            10 => Self::Threads,
            11 => Self::Ended,
            _ => return None,
        })
    }
}

/// In the reply to [`Op::Open`]: [`Op::Userfaultfd`] must follow.
pub const WANTS_USERFAULTFD: u64 = 4;
/// The process has a ring, and what of it isn't seen was said to nobody yet.
pub const NOTICE_RING: u64 = 1;

impl Op {
    /// The operation of that number.
    pub const fn from_u32(n: u32) -> Option<Self> {
        Some(match n {
            1 => Self::Open,
            2 => Self::Listener,
            3 => Self::Closed,
            4 => Self::Counter,
            5 => Self::Attach,
            6 => Self::Features,
            7 => Self::Register,
            8 => Self::Unregister,
            9 => Self::Read,
            10 => Self::Commit,
            11 => Self::Switch,
            12 => Self::Device,
            13 => Self::Whereabouts,
            14 => Self::Patch,
            15 => Self::Arm,
            16 => Self::Userfaultfd,
            17 => Self::Parking,
            20 => Self::Seize,
            21 => Self::Traced,
            _ => return None,
        })
    }
}

/// A request: 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`WIRE_VERSION`].
    pub version: u32,
    /// An [`Op`].
    pub op: u32,
    /// 0.
    pub reserved: u32,
    /// Arguments of the operation.
    pub args: [u64; 6],
}

/// A reply: 64 bytes, followed by up to [`MAX_PAYLOAD`] bytes in the same packet.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`WIRE_VERSION`].
    pub version: u32,
    /// At least 0, or a negative errno.
    pub result: i64,
    /// Values of the operation.
    pub args: [u64; 6],
}

const _: () = assert!(size_of::<Request>() == 64 && size_of::<Reply>() == 64);

/// Bytes that may follow a [`Reply`] in its packet.
pub const MAX_PAYLOAD: usize = 8192;

/// Longest abstract address below, with its leading zero byte.
pub const MAX_ADDRESS: usize = 40;

/// What abstract addresses of supervisors begin with, without the leading zero byte.
pub const SUPERVISOR_PREFIX: &[u8] = b"ummunotify-sup-";

/// Writes `prefix` and `n` in hexadecimal behind a zero byte; returns the length.
fn address(out: &mut [u8; MAX_ADDRESS], prefix: &[u8], n: u64) -> usize {
    out[0] = 0;
    let mut len = 1;
    for &b in prefix {
        out[len] = b;
        len += 1;
    }
    for i in (0..16).rev() {
        out[len] = b"0123456789abcdef"[(n >> (4 * i)) as usize & 15];
        len += 1;
    }
    len
}

/// The abstract address (with its leading zero byte) at which the supervisor of that token listens.
pub fn supervisor_address(out: &mut [u8; MAX_ADDRESS], token: u64) -> usize {
    address(out, SUPERVISOR_PREFIX, token)
}

/// The abstract address at which the supervisor of the context with that pipe inode listens.
pub fn context_address(out: &mut [u8; MAX_ADDRESS], inode: u64) -> usize {
    address(out, b"ummunotify-ctx-", inode)
}
