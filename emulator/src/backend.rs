//! The two backends, and whether this host lets one work.
//!
//! Which backend an open of the device gets is decided per open, by the shim, from [`Choice`]; here is what
//! `run` and `doctor` ask beforehand. Every answer comes from trying, none from the kernel's version.

use core::fmt;
use core::str::FromStr;
use nix::errno::Errno;
use ummunotify_abi::device;
use ummunotify_abi::wire::{HELLO_PRCTL, WIRE_VERSION};

use crate::available;
use crate::trap::layers::Net;

/// What the user wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// The kernel module where the device is there and answers, else the emulator.
    #[default]
    Auto,
    /// The kernel module or nothing.
    Kmod,
    /// The emulator, even where the module is loaded.
    Emulated,
}

impl Choice {
    /// The word that stands for it on the command line and in the environment.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Kmod => "kmod",
            Self::Emulated => "emulated",
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        [Self::Auto, Self::Kmod, Self::Emulated]
            .into_iter()
            .find(|c| c.name() == word)
            .ok_or_else(|| format!("there are the backends auto, kmod and emulated; not `{word}`"))
    }
}

/// Why a backend can't work here: what was tried, what the kernel answered, and what helps.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{tried}: {answer}; {help}")]
pub struct Obstacle {
    /// What was tried.
    pub tried: &'static str,
    /// What came back.
    pub answer: Errno,
    /// What to do about it.
    pub help: &'static str,
}

/// One way to provide the device.
pub trait Backend: fmt::Debug {
    /// Its name in options and messages.
    fn name(&self) -> &'static str;

    /// Tries whether it works on this host, for this user, now.
    ///
    /// # Errors
    /// The first thing that is in the way.
    fn check(&self) -> Result<(), Obstacle>;
}

/// The kernel module.
#[derive(Clone, Copy, Debug)]
pub struct Kmod;

impl Backend for Kmod {
    fn name(&self) -> &'static str {
        "kmod"
    }

    fn check(&self) -> Result<(), Obstacle> {
        raw::device_answers().map_err(|(tried, answer)| {
            let help = match answer {
                Errno::ENOENT | Errno::ENXIO | Errno::ENODEV => {
                    "the kernel module isn't loaded (see kmod-compat), or use --backend emulated"
                }
                Errno::EACCES | Errno::EPERM => {
                    "let this user read the device (see the udev rule in kmod-compat), or use --backend emulated"
                }
                _ => "what stands at that path isn't the ummunotify device; use --backend emulated",
            };
            Obstacle { tried, answer, help }
        })
    }
}

/// The emulator of this project.
#[derive(Clone, Copy, Debug)]
pub struct Emulated;

impl Backend for Emulated {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn check(&self) -> Result<(), Obstacle> {
        match available::check(Net::Auto) {
            Ok(_) => Ok(()),
            // The better layer's.
            Err(obstacles) => obstacles.into_iter().next().map_or(Ok(()), Err),
        }
    }
}

/// Tries whether a seccomp listener can be had.
///
/// # Errors
/// What is in the way.
pub fn check_notify() -> Result<(), Obstacle> {
    user_notification_known()?;
    match try_listener(0) {
        // A nested run shares the listener.
        Err(Obstacle { answer: Errno::EBUSY, .. }) if under_our_filter() => Ok(()),
        answer => answer,
    }
}

/// The sentence for a kernel that refuses user notification.
fn refused(answer: Errno) -> Obstacle {
    let help = match answer {
        Errno::EPERM | Errno::EACCES => {
            "a seccomp profile around this process forbids it (a container's, most likely): allow seccomp(2) \
             there, or use --backend kmod"
        }
        Errno::EBUSY => {
            "another program (a container manager, a tracer) already holds the one seccomp listener that a \
             process tree can have: start outside of it, or use --backend kmod"
        }
        _ => {
            "the emulator needs seccomp user notification (CONFIG_SECCOMP_FILTER, Linux 5.5 or newer, and no \
             sandbox that hides it): use such a kernel, or --backend kmod"
        }
    };
    Obstacle { tried: "seccomp user notification", answer, help }
}

/// Asks the kernel whether it knows SECCOMP_RET_USER_NOTIF.
fn user_notification_known() -> Result<(), Obstacle> {
    let action: u32 = libc::SECCOMP_RET_USER_NOTIF;
    // SAFETY: the call reads one u32 behind the pointer and changes nothing.
    let answer =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) };
    Errno::result(answer).map(drop).map_err(refused)
}

/// True if this process runs under a filter of this project: a supervisor answers the hello.
pub fn under_our_filter() -> bool {
    // SAFETY: an option that no kernel knows; a supervisor only answers it.
    let token = unsafe { libc::syscall(libc::SYS_prctl, HELLO_PRCTL, u64::from(WIRE_VERSION), 0, 0, 0) };
    token > 0
}

/// Installs a filter with a listener in a child that ends at once. `flags` are added to NEW_LISTENER.
///
/// # Errors
/// What seccomp(2) answered, or that no child could be made.
pub fn try_listener(flags: libc::c_ulong) -> Result<(), Obstacle> {
    // SAFETY: the child makes raw system calls on its own stack and ends by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = match raw::install_listener(flags) {
            Ok(()) => 0,
            Err(errno) => errno as i32,
        };
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(code) };
    }
    let answer = Errno::result(child).and_then(exit_code).map_err(no_child)?;
    if answer == 0 { Ok(()) } else { Err(refused(Errno::from_raw(answer))) }
}

/// The sentence for a process that can't be made.
pub(crate) fn no_child(answer: Errno) -> Obstacle {
    Obstacle {
        tried: "start a process to try things in",
        answer,
        help: "the limit of processes (ulimit -u, or the container's) or the memory is used up: raise it",
    }
}

/// Waits for exactly that child.
pub(crate) fn exit_code(child: libc::pid_t) -> Result<i32, Errno> {
    let mut status = 0;
    loop {
        // SAFETY: status is writable.
        match Errno::result(unsafe { libc::waitpid(child, &raw mut status, 0) }) {
            Err(Errno::EINTR) => {}
            Err(e) => return Err(e),
            Ok(_) if libc::WIFEXITED(status) => return Ok(libc::WEXITSTATUS(status)),
            Ok(_) => return Err(Errno::ECHILD), // killed by somebody
        }
    }
}

/// System calls that no preloaded library sees.
mod raw {
    use super::{Errno, device};

    /// Opens the real device and exchanges features with it.
    pub(super) fn device_answers() -> Result<(), (&'static str, Errno)> {
        const PATH: &core::ffi::CStr = c"/dev/ummunotify";
        let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let at = libc::AT_FDCWD as usize;
        let fd = system_call(libc::SYS_openat, [at, PATH.as_ptr() as usize, flags as usize])
            .map_err(|e| ("open /dev/ummunotify", e))?;
        let mut features = 0u32;
        let pointer = &raw mut features as usize;
        // Under a filter that serves static executables this open gets the emulated one, a pipe.
        let is_node = is_character_device(fd);
        let answer = system_call(libc::SYS_ioctl, [fd, device::EXCHANGE_FEATURES as usize, pointer]);
        let answer = if is_node { answer } else { Err(Errno::ENXIO) };
        // A descriptor of our own that is closed once: nothing to do about an error.
        let _ = system_call(libc::SYS_close, [fd, 0, 0]);
        answer.map(drop).map_err(|e| ("ioctl EXCHANGE_FEATURES on /dev/ummunotify", e))
    }

    fn is_character_device(fd: usize) -> bool {
        // SAFETY: integers, for which zero is a value.
        let mut stat: libc::stat = unsafe { core::mem::zeroed() };
        // SAFETY: fstat writes one `struct stat`.
        let answer = unsafe { libc::fstat(fd as libc::c_int, &raw mut stat) };
        answer == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFCHR
    }

    /// A filter that lets everything through, with a listener that nobody reads.
    pub(super) fn install_listener(flags: libc::c_ulong) -> Result<(), Errno> {
        let allow = libc::sock_filter {
            code: (libc::BPF_RET | libc::BPF_K) as u16,
            jt: 0,
            jf: 0,
            k: libc::SECCOMP_RET_ALLOW,
        };
        let mut program = [allow];
        let program = libc::sock_fprog { len: 1, filter: program.as_mut_ptr() };
        // SAFETY: sets a flag of this task alone.
        Errno::result(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
        // SAFETY: the program lives across the call; the kernel copies it.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags | libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
                &raw const program,
            )
        };
        Errno::result(answer).map(drop)
    }

    #[cfg(target_arch = "x86_64")]
    fn system_call(number: libc::c_long, args: [usize; 3]) -> Result<usize, Errno> {
        let answer: isize;
        // SAFETY: openat, ioctl and close with the arguments that `device_answers` gives them; the kernel
        // clobbers rcx and r11 only.
        unsafe {
            core::arch::asm!(
                "syscall",
                inlateout("rax") number as isize => answer,
                in("rdi") args[0],
                in("rsi") args[1],
                in("rdx") args[2],
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        usize::try_from(answer).map_err(|_| Errno::from_raw(answer.unsigned_abs() as i32))
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn system_call(number: libc::c_long, args: [usize; 3]) -> Result<usize, Errno> {
        // SAFETY: as above; no shim exists for this architecture that could be in the way.
        Errno::result(unsafe { libc::syscall(number, args[0], args[1], args[2]) }).map(|n| n as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_words() {
        for choice in [Choice::Auto, Choice::Kmod, Choice::Emulated] {
            assert_eq!(choice.name().parse(), Ok(choice));
        }
        assert!("module".parse::<Choice>().unwrap_err().contains("`module`"));
        assert!("".parse::<Choice>().is_err());
    }

    #[test]
    fn no_device_is_said_to_be_no_device() {
        if std::path::Path::new(device::PATH).exists() {
            println!("skipped: the kernel module is loaded");
            return;
        }
        let obstacle = Kmod.check().unwrap_err();
        assert_eq!(obstacle.answer, Errno::ENOENT);
        assert!(obstacle.to_string().contains("isn't loaded"), "{obstacle}");
    }

    #[test]
    fn a_flag_that_no_kernel_knows_is_refused() {
        // That the probe can fail: otherwise `doctor` would find everything everywhere.
        assert_eq!(try_listener(1 << 30).map_err(|o| o.answer), Err(Errno::EINVAL));
    }
}
