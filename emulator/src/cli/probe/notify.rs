//! Probes of the notify layer: a child under a filter makes one call, getppid(2), and is answered.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg,
    socketpair,
};

use libc::seccomp_notif_resp as Response;

use super::{Answer, Outcome, checked, in_child, spawn, succeeded};

/// How long a notification may take.
const NOTIFICATION_MS: u16 = 1000;
/// What a faked getppid answers: no pid is that large.
const FAKED: i64 = 0x1234_5678;

/// `SECCOMP_IOCTL_NOTIF_*` of linux/seccomp.h.
const NOTIF_RECV: libc::c_ulong = 0xc050_2100;
const NOTIF_SEND: libc::c_ulong = 0xc018_2101;
const NOTIF_ADDFD: libc::c_ulong = 0x4018_2103;

/// A kernel may send more than it did when these were written: room for that.
#[repr(C, align(8))]
struct Notification([u8; 1024]);

/// A listener can be had.
pub(in crate::cli) fn listener() -> Answer {
    accepted(0)
}

/// One filter for all threads, with a listener, and a thread that can't take it told as such.
pub(in crate::cli) fn all_threads() -> Answer {
    accepted(libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH)
}

/// A received notification waits for its answer through everything but a deadly signal.
pub(in crate::cli) fn wait_killable() -> Answer {
    accepted(libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV)
}

fn accepted(flags: libc::c_ulong) -> Answer {
    match ummunotify::backend::try_listener(flags) {
        Ok(()) => Answer::Works,
        Err(obstacle) => Answer::Refused(obstacle.answer),
    }
}

/// A call can be let through after it was looked at.
pub(in crate::cli) fn continues() -> Answer {
    in_child(|| {
        let parent = i64::from(nix::unistd::getpid().as_raw());
        answered(
            |listener, id| {
                respond(
                    listener,
                    &Response { id, val: 0, error: 0, flags: libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32 },
                )
            },
            move |value| value == parent,
        )
    })
}

/// A descriptor can be put into the process that waits.
pub(in crate::cli) fn inject() -> Answer {
    in_child(|| {
        answered(
            |listener, id| {
                add_descriptor(listener, id, 0)?;
                respond(listener, &Response { id, val: FAKED, error: 0, flags: 0 })
            },
            |value| value == FAKED,
        )
    })
}

/// The same and the answer, the descriptor's number, in one step.
pub(in crate::cli) fn inject_and_answer() -> Answer {
    in_child(|| {
        answered(
            |listener, id| add_descriptor(listener, id, libc::SECCOMP_ADDFD_FLAG_SEND as u32),
            |value| i32::try_from(value).is_ok_and(is_open),
        )
    })
}

fn is_open(fd: i32) -> bool {
    // SAFETY: asks for a flag.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

/// A child makes a notified getppid; `answer` answers it; true if `right` likes what the child got.
fn answered(
    answer: impl FnOnce(BorrowedFd<'_>, u64) -> Result<(), Errno>,
    right: impl FnOnce(i64) -> bool,
) -> Outcome {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    let child = spawn(move || {
        let Ok(()) = filter_getppid(&theirs) else { return 1 };
        // SAFETY: getppid takes nothing and can't do harm; by number, since libc may answer by itself.
        let value = unsafe { libc::syscall(libc::SYS_getppid) };
        i32::from(!right(value))
    })?;
    let listener = receive_descriptor(&ours)?;
    let mut waiting = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    if poll(&mut waiting, PollTimeout::from(NOTIFICATION_MS))? == 0 {
        return Err(Errno::ETIMEDOUT);
    }
    let mut notification = Notification([0; 1024]);
    // SAFETY: the buffer is zeroed, as the call wants it, and larger than any kernel's notification.
    checked(unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_RECV, notification.0.as_mut_ptr()).into() })?;
    let id = notification.0.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
    answer(listener.as_fd(), id)?;
    drop(listener);
    succeeded(child)
}

/// Installs a filter that notifies of getppid and sends the listener away.
fn filter_getppid(to: &OwnedFd) -> Result<(), Errno> {
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        op(LOAD_NUMBER, 0, 0, 0),
        op(JUMP_EQUAL, 0, 1, u32::try_from(libc::SYS_getppid).unwrap_or(u32::MAX)),
        op(RETURN, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
        op(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    nix::sys::prctl::set_no_new_privs()?;
    // SAFETY: the program lives across the call; the kernel copies it.
    let listener = checked(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    })?;
    // SAFETY: the kernel just made this descriptor for us.
    let listener = unsafe { OwnedFd::from_raw_fd(listener as i32) };
    let rights = [listener.as_raw_fd()];
    let message = [ControlMessage::ScmRights(&rights)];
    sendmsg::<()>(to.as_raw_fd(), &[IoSlice::new(b"L")], &message, MsgFlags::empty(), None)?;
    Ok(())
}

fn receive_descriptor(from: &OwnedFd) -> Result<OwnedFd, Errno> {
    let mut byte = [0u8];
    let mut space = nix::cmsg_space!([i32; 1]);
    let mut parts = [IoSliceMut::new(&mut byte)];
    let message = recvmsg::<()>(from.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control
            && let Some(&fd) = fds.first()
        {
            // SAFETY: it just arrived; nobody else in this process knows it.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
    Err(Errno::ECANCELED) // the child couldn't install its filter
}

fn respond(listener: BorrowedFd<'_>, response: &Response) -> Result<(), Errno> {
    // SAFETY: the call reads one response behind the pointer.
    let answer = unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_SEND, core::ptr::from_ref(response)) };
    checked(answer.into()).map(drop)
}

/// Puts a copy of the listener itself into the waiting child.
fn add_descriptor(listener: BorrowedFd<'_>, id: u64, flags: u32) -> Result<(), Errno> {
    let fd = listener.as_raw_fd();
    let request = libc::seccomp_notif_addfd {
        id,
        flags,
        srcfd: fd as u32,
        newfd: 0,
        newfd_flags: libc::O_CLOEXEC as u32,
    };
    // SAFETY: the call reads one request behind the pointer.
    checked(unsafe { libc::ioctl(fd, NOTIF_ADDFD, &raw const request) }.into()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_answer_is_told_from_a_right_one() {
        if !listener().works() {
            println!("skipped: no seccomp listener can be had here: {}", listener());
            return;
        }
        let faked = |id| Response { id, val: FAKED, error: 0, flags: 0 };
        let right = in_child(|| answered(|l, id| respond(l, &faked(id)), |value| value == FAKED));
        let wrong = in_child(|| answered(|l, id| respond(l, &faked(id)), |value| value != FAKED));
        assert_eq!((right, wrong), (Answer::Works, Answer::Wrong));
    }
}
