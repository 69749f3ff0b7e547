//! The listener of a seccomp filter: notifications in, answers out (seccomp_unotify(2), Linux 5.0;
//! CONTINUE since 5.5).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::check;

/// `_IOWR('!', 0, struct seccomp_notif)` and `_IOWR('!', 1, struct seccomp_notif_resp)` of linux/seccomp.h.
const NOTIF_RECV: libc::Ioctl = 0xc050_2100_u32 as libc::Ioctl;
const NOTIF_SEND: libc::Ioctl = 0xc018_2101_u32 as libc::Ioctl;
/// `_IOW('!', 2, u64)`, and as kernels before 5.17 alone know it, `_IOR`.
const NOTIF_ID_VALID: [libc::Ioctl; 2] = [0x4008_2102, 0x8008_2102_u32 as libc::Ioctl];
/// `_IOW('!', 3, struct seccomp_notif_addfd)`.
const NOTIF_ADDFD: libc::Ioctl = 0x4018_2103;
/// `_IOW('!', 4, u64)`, Linux 6.6.
const NOTIF_SET_FLAGS: libc::Ioctl = 0x4008_2104;
/// `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`: who makes a call and who answers it wake each other on their own processor.
const SYNC_WAKE_UP: u64 = 1;

const _: () = assert!(size_of::<libc::seccomp_notif_addfd>() == 0x18);
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

/// What [`Listener::wait`] has seen.
#[derive(Debug, Default, Clone, Copy)]
pub struct Ready {
    /// A call waits to be received.
    pub call: bool,
    /// No task has the filter any more.
    pub over: bool,
    /// The other descriptor is readable.
    pub beside: bool,
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
        // Older kernels wake them anywhere.
        // SAFETY: the argument is an integer.
        unsafe { libc::ioctl(fd.as_raw_fd(), NOTIF_SET_FLAGS, SYNC_WAKE_UP) };
        Ok(Self(fd))
    }

    /// Waits until a call can be received, no task has the filter any more, or `beside` is readable; at most `timeout`
    /// milliseconds, without end if it is negative. Nothing may be ready: a signal has come. By poll(2), since on its way
    /// through an epoll set the wake-up forgets on which processor it was to be.
    pub fn wait(&self, beside: BorrowedFd<'_>, timeout: i32) -> io::Result<Ready> {
        let of = |fd: BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut polled = [of(self.as_fd()), of(beside)];
        // SAFETY: the kernel reads and writes that many `pollfd`s.
        let ret = unsafe { libc::syscall(libc::SYS_poll, polled.as_mut_ptr(), polled.len(), timeout) };
        match check(ret) {
            Ok(_) => Ok(Ready {
                call: polled[0].revents & libc::POLLIN != 0,
                // Not POLLERR, which says that a signal came.
                over: polled[0].revents & libc::POLLHUP != 0,
                beside: polled[1].revents != 0,
            }),
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => Ok(Ready::default()),
            Err(e) => Err(e),
        }
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

    /// Whether the call still waits, so that the task is still the one that made it.
    pub fn is_waiting(&self, id: u64) -> bool {
        NOTIF_ID_VALID.into_iter().any(|request| {
            // SAFETY: the ioctl reads one u64.
            unsafe { libc::ioctl(self.0.as_raw_fd(), request, &raw const id) == 0 }
        })
    }

    /// Gives the waiting task a copy of `fd`, close-on-exec or not, at the number `at` (whatever was there is
    /// closed) or at its lowest free one; returns the number (Linux 5.9). EMFILE or EBADF: its limit of
    /// descriptors.
    pub fn inject(&self, id: u64, fd: BorrowedFd<'_>, at: Option<i32>, cloexec: bool) -> io::Result<i32> {
        self.add(id, fd, at, cloexec, 0)
    }

    /// The same, and the answer to the call is the number, in one step (Linux 5.14; before, in two).
    pub fn inject_answer(
        &self,
        id: u64,
        fd: BorrowedFd<'_>,
        at: Option<i32>,
        cloexec: bool,
    ) -> io::Result<i32> {
        match self.add(id, fd, at, cloexec, libc::SECCOMP_ADDFD_FLAG_SEND as u32) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                let number = self.add(id, fd, at, cloexec, 0)?;
                self.answer(id, number.into())?;
                Ok(number)
            }
            done => done,
        }
    }

    fn add(
        &self,
        id: u64,
        fd: BorrowedFd<'_>,
        at: Option<i32>,
        cloexec: bool,
        flags: u32,
    ) -> io::Result<i32> {
        let mut request = libc::seccomp_notif_addfd {
            id,
            flags: flags | if at.is_some() { libc::SECCOMP_ADDFD_FLAG_SETFD as u32 } else { 0 },
            srcfd: fd.as_raw_fd().cast_unsigned(),
            newfd: at.unwrap_or(0).cast_unsigned(),
            newfd_flags: if cloexec { libc::O_CLOEXEC.cast_unsigned() } else { 0 },
        };
        // SAFETY: the ioctl reads one `seccomp_notif_addfd`, whose size is part of its number.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), NOTIF_ADDFD, &raw mut request) }.into())
            .and_then(|number| i32::try_from(number).map_err(io::Error::other))
    }

    /// Lets the call run. The kernel reads its arguments anew: what lies behind pointers may have changed.
    pub fn proceed(&self, id: u64) -> io::Result<()> {
        self.send(id, 0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32).map(drop)
    }

    /// Answers the call with `value` instead of running it.
    pub fn answer(&self, id: u64, value: i64) -> io::Result<()> {
        self.send(id, value, 0, 0).map(drop)
    }

    /// The same; false if nobody waits for the answer any more.
    pub fn answered(&self, id: u64, value: i64) -> io::Result<bool> {
        self.send(id, value, 0, 0)
    }

    /// Ends the wait as a signal does: the call is made again, or fails with EINTR, as the handler's flags want
    /// it. Only for a task that has a signal, or a ptrace stop, to take: otherwise it would see the errno 512.
    pub fn interrupt(&self, id: u64) -> io::Result<()> {
        const ERESTARTSYS: i32 = 512;
        self.send(id, 0, -ERESTARTSYS, 0).map(drop)
    }

    fn send(&self, id: u64, val: i64, error: i32, flags: u32) -> io::Result<bool> {
        let mut answer = libc::seccomp_notif_resp { id, val, error, flags };
        // SAFETY: the ioctl reads one `seccomp_notif_resp`, whose size `new` compared with the kernel's.
        let ret = unsafe { libc::ioctl(self.0.as_raw_fd(), NOTIF_SEND, &raw mut answer) };
        match check(ret.into()) {
            Ok(_) => Ok(true),
            // ENOENT: the task was killed or interrupted; nobody waits for this answer.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
