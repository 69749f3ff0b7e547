//! Putting a filter on the calling process, and handing its listener over (seccomp(2)).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::check;

/// `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV` (Linux 6.0): without it a signal that arrives while the supervisor is
/// at work makes munmap return EINTR.
const WAIT_KILLABLE_RECV: libc::c_ulong = 1 << 5;

/// Installs `program` (`struct sock_filter`s) on the calling thread and whatever it becomes; returns the listener.
/// no_new_privs is set only where the filter can't be had without.
///
/// # Errors
/// EBUSY: somebody listens to this process already. EPERM, EACCES, ENOSYS, EINVAL: forbidden or unknown here.
pub fn install(program: &[u8]) -> io::Result<OwnedFd> {
    let install = |flags| set_filter(program, flags | libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
    let fd = match install(WAIT_KILLABLE_RECV) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => install(0),
        done => done,
    };
    let fd = i32::try_from(fd?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Installs `program`, which asks nobody, on the calling thread and whatever it becomes. no_new_privs as above.
///
/// # Errors
/// EPERM, EACCES, ENOSYS, EINVAL: forbidden or unknown here.
pub fn restrict(program: &[u8]) -> io::Result<()> {
    set_filter(program, 0).map(drop)
}

fn set_filter(program: &[u8], flags: libc::c_ulong) -> io::Result<i64> {
    let len = u16::try_from(program.len() / size_of::<libc::sock_filter>()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    let set = || {
        // SAFETY: a program of the length stated; the kernel copies it, from any alignment.
        check(unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
        })
    };
    match set() {
        Err(e) if e.raw_os_error() == Some(libc::EACCES) => {
            // SAFETY: sets a flag of this task alone.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            set()
        }
        done => done,
    }
}

/// Sends a packet, with a descriptor if one is given, and receives one. It allocates nothing: a call that the filter
/// traps, as malloc makes them, would wait for an answer that only the end of this exchange brings.
///
/// # Errors
/// ECONNRESET: the other side has ended. What sendmsg and recv fail with.
pub fn exchange(
    socket: BorrowedFd<'_>,
    packet: &[u8],
    passed: Option<BorrowedFd<'_>>,
    reply: &mut [u8],
) -> io::Result<usize> {
    #[repr(C, align(8))]
    struct Control([u8; 24]);
    let mut control = Control([0; 24]);
    let mut part = libc::iovec { iov_base: packet.as_ptr().cast_mut().cast(), iov_len: packet.len() };
    // SAFETY: integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if let Some(fd) = passed {
        message.msg_control = (&raw mut control).cast();
        // SAFETY: the buffer has room for one header and one int; CMSG_FIRSTHDR points into it.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size_of::<i32>() as u32) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<i32>() as u32) as usize;
            libc::CMSG_DATA(header).cast::<i32>().write_unaligned(fd.as_raw_fd());
        }
    }
    let again = |call: &mut dyn FnMut() -> isize| {
        loop {
            match check(call() as i64) {
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                done => return done,
            }
        }
    };
    // SAFETY: the message and what it points to outlive the call.
    again(&mut || unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) })?;
    // SAFETY: the buffer is valid for its length.
    let got =
        again(&mut || unsafe { libc::recv(socket.as_raw_fd(), reply.as_mut_ptr().cast(), reply.len(), 0) })?;
    match usize::try_from(got) {
        Ok(0) | Err(_) => Err(io::Error::from_raw_os_error(libc::ECONNRESET)),
        Ok(got) => Ok(got),
    }
}
