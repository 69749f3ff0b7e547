//! The listener of a seccomp filter: notifications in, answers out (seccomp_unotify(2), Linux 5.0;
//! CONTINUE since 5.5).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::check;

/// `_IOWR('!', 0, struct seccomp_notif)` and `_IOWR('!', 1, struct seccomp_notif_resp)` of linux/seccomp.h.
const NOTIF_RECV: libc::Ioctl = 0xc050_2100_u32 as libc::Ioctl;
const NOTIF_SEND: libc::Ioctl = 0xc018_2101_u32 as libc::Ioctl;

const _: () =
    assert!(size_of::<libc::seccomp_notif>() == 0x50 && size_of::<libc::seccomp_notif_resp>() == 0x18);

/// The receiving end of a filter that answers `SECCOMP_RET_USER_NOTIF`.
#[derive(Debug)]
pub struct Listener(OwnedFd);

/// A task that sleeps at the entry of a system call and waits for an answer.
#[derive(Debug, Clone, Copy)]
pub struct Notification {
    /// Names the sleeping call in an answer.
    pub id: u64,
    /// Kernel thread id of the task in our pid namespace; 0 if it isn't visible there.
    pub tid: u32,
    /// `AUDIT_ARCH_*` of the entry that was used.
    pub arch: u32,
    /// Number of the system call.
    pub nr: u32,
    /// Address behind the entry instruction.
    pub instruction_pointer: u64,
    /// Argument registers.
    pub args: [u64; 6],
}

impl Listener {
    /// Takes a listener descriptor. Fails where the kernel's notification structures are larger than the
    /// ones compiled in (`SECCOMP_GET_NOTIF_SIZES`), since it would then write past our buffer.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let mut sizes =
            libc::seccomp_notif_sizes { seccomp_notif: 0, seccomp_notif_resp: 0, seccomp_data: 0 };
        // SAFETY: the operation writes one `seccomp_notif_sizes` to the address, which is valid.
        check(unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_NOTIF_SIZES, 0, &raw mut sizes) })?;
        if usize::from(sizes.seccomp_notif) > size_of::<libc::seccomp_notif>()
            || usize::from(sizes.seccomp_notif_resp) > size_of::<libc::seccomp_notif_resp>()
        {
            return Err(io::Error::other(
                "this kernel's seccomp notifications are larger than this build knows",
            ));
        }
        Ok(Self(fd))
    }

    /// Takes one notification. Blocks unless the descriptor polled readable. `Ok(None)`: the task is gone or
    /// was interrupted meanwhile (ENOENT), or a signal came (EINTR).
    pub fn receive(&self) -> io::Result<Option<Notification>> {
        // SAFETY: all-zero is a valid `seccomp_notif`, and the kernel demands a zeroed one.
        let mut raw: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the ioctl writes one `seccomp_notif`, whose size `new` compared with the kernel's.
        let ret = unsafe { libc::ioctl(self.0.as_raw_fd(), NOTIF_RECV, &raw mut raw) };
        match check(ret.into()) {
            Ok(_) => Ok(Some(Notification {
                id: raw.id,
                tid: raw.pid,
                arch: raw.data.arch,
                nr: raw.data.nr.cast_unsigned(),
                instruction_pointer: raw.data.instruction_pointer,
                args: raw.data.args,
            })),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Lets the call run. The kernel reads its arguments anew: what lies behind pointers may have changed.
    pub fn proceed(&self, id: u64) -> io::Result<()> {
        self.send(id, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32)
    }

    /// Answers the call with `value` instead of running it.
    pub fn answer(&self, id: u64, value: i64) -> io::Result<()> {
        self.send(id, value, 0)
    }

    fn send(&self, id: u64, val: i64, flags: u32) -> io::Result<()> {
        let mut answer = libc::seccomp_notif_resp { id, val, error: 0, flags };
        // SAFETY: the ioctl reads one `seccomp_notif_resp`, whose size `new` compared with the kernel's.
        let ret = unsafe { libc::ioctl(self.0.as_raw_fd(), NOTIF_SEND, &raw mut answer) };
        match check(ret.into()) {
            // ENOENT: the task was killed or interrupted; nobody waits for this answer.
            Err(e) if e.raw_os_error() != Some(libc::ENOENT) => Err(e),
            _ => Ok(()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
