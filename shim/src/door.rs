//! Talking to a supervisor: one socket per exchange, so that no descriptor of ours stays in the client.
//!
//! Every wait is bounded by a timeout of the socket.

use core::ffi::{c_int, c_void};
use core::mem::{size_of, size_of_val, zeroed};

use ummunotify_abi::wire::{self, MAX_ADDRESS, Op, Reply, Request};

use crate::sys;

/// How long a supervisor may take to answer, in seconds. It answers in microseconds; the first answer of a
/// fresh one waits for its start.
const PATIENCE: i64 = 30;

/// Most descriptors in a reply.
const MAX_FDS: usize = 4;

/// Room for a reply and `N` bytes of payload.
#[repr(C, align(8))]
pub struct Buffer<const N: usize> {
    head: [u8; size_of::<Reply>()],
    payload: [u8; N],
}

impl<const N: usize> Buffer<N> {
    /// An empty one.
    pub const fn new() -> Self {
        Self { head: [0; size_of::<Reply>()], payload: [0; N] }
    }

    /// The payload of the reply that was received last.
    pub fn payload(&self, answer: &Answer) -> &[u8] {
        self.payload.get(..answer.payload).unwrap_or_default()
    }
}

/// A reply that was checked.
pub struct Answer {
    /// At least 0.
    pub result: i64,
    /// Values of the operation.
    pub args: [u64; 6],
    /// Bytes of payload.
    pub payload: usize,
    /// The descriptors that came with it.
    pub fds: Fds,
}

/// Received descriptors; those that aren't taken are closed.
pub struct Fds([c_int; MAX_FDS]);

impl Fds {
    /// Takes the nth.
    pub fn take(&mut self, n: usize) -> Option<Owned> {
        let fd = core::mem::replace(self.0.get_mut(n)?, -1);
        (fd >= 0).then_some(Owned(fd))
    }
}

impl Drop for Fds {
    fn drop(&mut self) {
        for fd in self.0.into_iter().filter(|&fd| fd >= 0) {
            sys::close(fd);
        }
    }
}

/// A descriptor that is closed when it goes.
pub struct Owned(c_int);

impl Owned {
    /// Takes over a descriptor that nobody else closes.
    pub fn new(fd: c_int) -> Self {
        Self(fd)
    }

    /// Its number.
    pub fn get(&self) -> c_int {
        self.0
    }

    /// Gives it up.
    pub fn release(self) -> c_int {
        let fd = self.0;
        core::mem::forget(self);
        fd
    }

    /// The same at a high number, so that the lowest free one stays free for the device descriptor.
    pub fn lifted(self) -> Self {
        // Not higher: the kernel's table of descriptors would grow to reach it.
        let floor = sys::descriptor_limit().rlim_cur.saturating_sub(64).min(960) as usize;
        match sys::fcntl(self.0, libc::F_DUPFD_CLOEXEC, floor) {
            high if high >= 0 => Self(high as c_int),
            _ => self,
        }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        sys::close(self.0);
    }
}

/// A connection. As long as it lives all signals are blocked: no exchange is left half done.
pub struct Connection(Owned, sys::SignalsBlocked);

impl Connection {
    /// A pair: ours, and the one that a new supervisor gets.
    ///
    /// # Errors
    /// The errno of socketpair.
    pub fn pair() -> Result<(Self, Owned), c_int> {
        let blocked = sys::SignalsBlocked::new();
        let mut ends = [-1 as c_int; 2];
        // SAFETY: room for two descriptors.
        let result = unsafe {
            sys::call(
                libc::SYS_socketpair,
                libc::AF_UNIX as usize,
                SEQPACKET,
                0,
                ends.as_mut_ptr() as usize,
                0,
                0,
            )
        };
        if result < 0 {
            return Err(-result as c_int);
        }
        let [ours, theirs] = ends.map(Owned);
        let ours = Self(ours.lifted(), blocked);
        ours.be_patient();
        Ok((ours, theirs.lifted()))
    }

    /// Connects to the supervisor of that token, by a socket with a high number: a device descriptor will come.
    ///
    /// # Errors
    /// ECONNREFUSED if nobody listens; EPERM if it is another user's; else what the kernel says.
    pub fn to_supervisor(token: u64) -> Result<Self, c_int> {
        let mut name = [0; MAX_ADDRESS];
        let len = wire::supervisor_address(&mut name, token);
        let Self(socket, blocked) = Self::connect(name.get(..len).unwrap_or_default())?;
        Ok(Self(socket.lifted(), blocked))
    }

    /// Connects to the supervisor of the context with that pipe inode.
    ///
    /// # Errors
    /// As [`Self::to_supervisor`].
    pub fn to_context(inode: u64) -> Result<Self, c_int> {
        let mut name = [0; MAX_ADDRESS];
        let len = wire::context_address(&mut name, inode);
        Self::connect(name.get(..len).unwrap_or_default())
    }

    fn connect(name: &[u8]) -> Result<Self, c_int> {
        let blocked = sys::SignalsBlocked::new();
        // SAFETY: no memory is involved.
        let fd = unsafe { sys::call(libc::SYS_socket, libc::AF_UNIX as usize, SEQPACKET, 0, 0, 0, 0) };
        if fd < 0 {
            return Err(-fd as c_int);
        }
        let connection = Self(Owned(fd as c_int), blocked);
        connection.be_patient();
        // SAFETY: zero is a valid value of every field.
        let mut address: libc::sockaddr_un = unsafe { zeroed() };
        address.sun_family = libc::AF_UNIX as u16;
        for (to, &from) in address.sun_path.iter_mut().zip(name) {
            *to = from.cast_signed();
        }
        let len = size_of::<libc::sa_family_t>() + name.len();
        // SAFETY: `address` holds at least `len` bytes.
        let result = sys::again(|| unsafe {
            sys::call(libc::SYS_connect, fd as usize, &raw const address as usize, len, 0, 0, 0)
        });
        if result < 0 {
            return Err(-result as c_int);
        }
        let (_, user) = connection.peer()?;
        // SAFETY: no arguments.
        let (real, effective) = unsafe {
            (sys::call(libc::SYS_getuid, 0, 0, 0, 0, 0, 0), sys::call(libc::SYS_geteuid, 0, 0, 0, 0, 0, 0))
        };
        // Anybody can bind an abstract address first.
        if user != 0 && user != real as u32 && user != effective as u32 {
            return Err(libc::EPERM);
        }
        Ok(connection)
    }

    /// Process (0 if it isn't visible in our pid namespace) and user of who listens.
    fn peer(&self) -> Result<(u32, u32), c_int> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: room for a ucred, and its size.
        let result = unsafe {
            sys::call(
                libc::SYS_getsockopt,
                self.0.get() as usize,
                libc::SOL_SOCKET as usize,
                libc::SO_PEERCRED as usize,
                &raw mut peer as usize,
                &raw mut len as usize,
                0,
            )
        };
        if result < 0 { Err(-result as c_int) } else { Ok((peer.pid.cast_unsigned(), peer.uid)) }
    }

    fn be_patient(&self) {
        let time = libc::timeval { tv_sec: PATIENCE, tv_usec: 0 };
        for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            // SAFETY: a timeval and its size.
            unsafe {
                sys::call(
                    libc::SYS_setsockopt,
                    self.0.get() as usize,
                    libc::SOL_SOCKET as usize,
                    option as usize,
                    &raw const time as usize,
                    size_of::<libc::timeval>(),
                    0,
                );
            }
        }
    }

    /// One request and its reply.
    ///
    /// # Errors
    /// What the supervisor answers; else ECONNRESET if it has gone, EPROTONOSUPPORT if it is of another version,
    /// EPROTO if it makes no sense, EMFILE if there was no room for its descriptors, EAGAIN if it is silent.
    pub fn ask<const N: usize>(
        &self,
        op: Op,
        args: [u64; 6],
        fd: Option<c_int>,
        buffer: &mut Buffer<N>,
    ) -> Result<Answer, c_int> {
        match self.tell(op, args, fd.as_slice()) {
            // It has closed its end, but may have said why.
            Err(libc::EPIPE) => self.hear(buffer).and(Err(libc::ECONNRESET)),
            Err(errno) => Err(errno),
            Ok(()) => self.hear(buffer),
        }
    }

    /// A request alone.
    ///
    /// # Errors
    /// What sendmsg says.
    pub fn tell(&self, op: Op, args: [u64; 6], fds: &[c_int]) -> Result<(), c_int> {
        let request =
            Request { magic: wire::MAGIC, version: wire::WIRE_VERSION, op: op as u32, reserved: 0, args };
        send(self.0.get(), (&raw const request).cast(), size_of::<Request>(), fds)
    }

    /// A reply alone.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn hear<const N: usize>(&self, buffer: &mut Buffer<N>) -> Result<Answer, c_int> {
        let mut control = Control::empty();
        let mut part = libc::iovec { iov_base: (&raw mut *buffer).cast(), iov_len: size_of::<Buffer<N>>() };
        // SAFETY: zero is a valid value of every field.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of::<Control>();
        // SAFETY: the message describes memory of ours.
        let got = sys::again(|| unsafe {
            sys::call(
                libc::SYS_recvmsg,
                self.0.get() as usize,
                &raw mut message as usize,
                libc::MSG_CMSG_CLOEXEC as usize,
                0,
                0,
                0,
            )
        });
        if got < 0 {
            return Err(-got as c_int);
        }
        let fds = control.received(message.msg_controllen);
        let got = got as usize;
        if got == 0 {
            return Err(libc::ECONNRESET);
        }
        if got < size_of::<Reply>() {
            return Err(libc::EPROTO);
        }
        // SAFETY: the buffer begins with the bytes of a Reply, whose fields take any value.
        let reply = unsafe { (&raw const *buffer).cast::<Reply>().read() };
        if reply.magic != wire::MAGIC {
            return Err(libc::EPROTO);
        }
        if reply.version != wire::WIRE_VERSION {
            return Err(libc::EPROTONOSUPPORT);
        }
        if reply.result < 0 {
            let errno = c_int::try_from(-reply.result).unwrap_or(libc::EPROTO);
            return Err(if errno < 4096 { errno } else { libc::EPROTO });
        }
        if message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(libc::EMFILE);
        }
        if message.msg_flags & libc::MSG_TRUNC != 0 {
            return Err(libc::EPROTO);
        }
        Ok(Answer { result: reply.result, args: reply.args, payload: got - size_of::<Reply>(), fds })
    }
}

const SEQPACKET: usize = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as usize;

/// Sends one packet, with up to [`MAX_FDS`] descriptors.
///
/// # Errors
/// What sendmsg says.
pub fn send(socket: c_int, bytes: *const c_void, len: usize, fds: &[c_int]) -> Result<(), c_int> {
    let mut control = Control::empty();
    let mut part = libc::iovec { iov_base: bytes.cast_mut(), iov_len: len };
    // SAFETY: zero is a valid value of every field.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    let fds = fds.get(..MAX_FDS).unwrap_or(fds);
    if !fds.is_empty() {
        control.head.cmsg_len = size_of::<libc::cmsghdr>() + size_of_val(fds);
        control.head.cmsg_level = libc::SOL_SOCKET;
        control.head.cmsg_type = libc::SCM_RIGHTS;
        for (to, &from) in control.fds.iter_mut().zip(fds) {
            *to = from;
        }
        message.msg_control = (&raw mut control).cast();
        // CMSG_SPACE: whole words.
        message.msg_controllen = control.head.cmsg_len.next_multiple_of(size_of::<usize>());
    }
    // SAFETY: the message describes memory that is ours or, for `bytes`, the caller's.
    let result = sys::again(|| unsafe {
        sys::call(
            libc::SYS_sendmsg,
            socket as usize,
            &raw const message as usize,
            libc::MSG_NOSIGNAL as usize,
            0,
            0,
            0,
        )
    });
    if result < 0 { Err(-result as c_int) } else { Ok(()) }
}

/// The control data of a message with descriptors.
#[repr(C)]
struct Control {
    head: libc::cmsghdr,
    fds: [c_int; MAX_FDS],
}

impl Control {
    fn empty() -> Self {
        Self { head: libc::cmsghdr { cmsg_len: 0, cmsg_level: 0, cmsg_type: 0 }, fds: [-1; MAX_FDS] }
    }

    fn received(&self, len: usize) -> Fds {
        let mut fds = Fds([-1; MAX_FDS]);
        if len >= size_of::<libc::cmsghdr>()
            && self.head.cmsg_level == libc::SOL_SOCKET
            && self.head.cmsg_type == libc::SCM_RIGHTS
        {
            let count = self.head.cmsg_len.saturating_sub(size_of::<libc::cmsghdr>()) / size_of::<c_int>();
            for (to, &from) in fds.0.iter_mut().zip(&self.fds).take(count) {
                *to = from;
            }
        }
        fds
    }
}
