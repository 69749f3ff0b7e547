//! Packets with descriptors on the supervisor's sockets.
//!
//! What comes in is hostile until checked: sizes, magic, version and operation are verified here, so that the
//! rest of the supervisor sees only well-formed requests.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::sys::socket::{self, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr};
use ummunotify_abi::wire::{self, MAX_PAYLOAD, Op, Reply, Request};

/// One end of a connection.
#[derive(Debug)]
pub struct Connection(OwnedFd);

/// A well-formed request.
#[derive(Debug)]
pub struct Asked {
    /// What is asked for.
    pub op: Op,
    /// Its arguments.
    pub args: [u64; 6],
    /// The descriptors that came along.
    pub fds: Vec<OwnedFd>,
}

/// Who is at the other end.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// Process id (of the thread group) in our pid namespace; 0 if it isn't visible there.
    pub pid: u32,
    /// User id in our user namespace.
    pub uid: u32,
}

/// Descriptors that one request may carry.
const MAX_FDS: usize = 4;

impl Connection {
    /// Takes a connected `SOCK_SEQPACKET` socket.
    pub fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// The next request; `Ok(None)` when the peer has closed. EPROTO for a malformed packet.
    pub fn receive(&self) -> nix::Result<Option<Asked>> {
        let mut bytes = [0u8; size_of::<Request>()];
        let ummunotify_sys::socket::Packet { length, truncated, fds } =
            ummunotify_sys::socket::receive(&self.0, &mut bytes, MAX_FDS)?;
        if length == 0 {
            return Ok(None);
        }
        if length != bytes.len() || truncated {
            return Err(nix::Error::EPROTO);
        }
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if word(0) != wire::MAGIC {
            return Err(nix::Error::EPROTO);
        }
        if word(4) != wire::WIRE_VERSION {
            return Err(nix::Error::EPROTONOSUPPORT);
        }
        let op = Op::from_u32(word(8)).ok_or(nix::Error::EPROTO)?;
        let mut args = [0; 6];
        for (i, arg) in args.iter_mut().enumerate() {
            *arg = u64::from(word(16 + 8 * i)) | u64::from(word(20 + 8 * i)) << 32;
        }
        Ok(Some(Asked { op, args, fds }))
    }

    /// Sends a reply.
    pub fn reply(
        &self,
        result: i64,
        args: [u64; 6],
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> nix::Result<()> {
        debug_assert!(payload.len() <= MAX_PAYLOAD);
        let mut bytes = Vec::with_capacity(size_of::<Reply>() + payload.len());
        bytes.extend(wire::MAGIC.to_ne_bytes());
        bytes.extend(wire::WIRE_VERSION.to_ne_bytes());
        bytes.extend(result.to_ne_bytes());
        for arg in args {
            bytes.extend(arg.to_ne_bytes());
        }
        bytes.extend(payload);
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let rights: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
        socket::sendmsg::<()>(
            self.0.as_raw_fd(),
            &[IoSlice::new(&bytes)],
            rights,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )?;
        Ok(())
    }

    /// Sends an error.
    pub fn refuse(&self, errno: nix::Error) -> nix::Result<()> {
        self.reply(-i64::from(errno as i32), [0; 6], &[], &[])
    }

    /// Who connected (`SO_PEERCRED`: as it was at connect or socketpair).
    pub fn peer(&self) -> nix::Result<Peer> {
        let who = socket::getsockopt(&self.0, socket::sockopt::PeerCredentials)?;
        Ok(Peer { pid: who.pid().cast_unsigned(), uid: who.uid() })
    }

    /// Bounds how long [`Self::receive`] and [`Self::reply`] may wait for the peer.
    pub fn limit(&self, seconds: i64) -> nix::Result<()> {
        let time = nix::sys::time::TimeVal::new(seconds, 0);
        socket::setsockopt(&self.0, socket::sockopt::ReceiveTimeout, &time)?;
        socket::setsockopt(&self.0, socket::sockopt::SendTimeout, &time)
    }
}

/// An abstract address that we listen at. It vanishes with the descriptor.
#[derive(Debug)]
pub struct Door(OwnedFd);

impl Door {
    /// Listens at the abstract address `name` (with its leading zero byte).
    pub fn open(name: &[u8]) -> nix::Result<Self> {
        let fd = socket::socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )?;
        let address = UnixAddr::new_abstract(name.strip_prefix(&[0]).unwrap_or(name))?;
        socket::bind(fd.as_raw_fd(), &address)?;
        socket::listen(&fd, socket::Backlog::new(64)?)?;
        Ok(Self(fd))
    }

    /// The next connection; `None` if nobody waits any more.
    pub fn accept(&self) -> Option<Connection> {
        ummunotify_sys::socket::accept(&self.0).ok().map(Connection)
    }

    /// For polling.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
