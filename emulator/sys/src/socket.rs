//! Packets and descriptors as the kernel hands them over.

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::sys::socket::{self, ControlMessageOwned, MsgFlags, SockFlag};

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// Bytes received; 0 when the peer has closed.
    pub length: usize,
    /// Data or descriptors were cut off.
    pub truncated: bool,
    /// The descriptors that came along (`SCM_RIGHTS`), close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Receives one packet into `bytes`, with up to `max_fds` descriptors; the kernel closes any beyond.
pub fn receive(fd: &OwnedFd, bytes: &mut [u8], max_fds: usize) -> nix::Result<Packet> {
    let mut control = vec![0u8; nix::sys::socket::cmsg_space::<RawFd>() * max_fds];
    let mut parts = [IoSliceMut::new(bytes)];
    let message =
        socket::recvmsg::<()>(fd.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(received) = part {
            // SAFETY: the kernel has just installed these descriptors for us; nobody else owns them.
            fds.extend(received.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    let truncated = message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC);
    Ok(Packet { length: message.bytes, truncated, fds })
}

/// Accepts a connection, close-on-exec.
pub fn accept(listener: &OwnedFd) -> nix::Result<OwnedFd> {
    let fd = socket::accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: accept4 has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
