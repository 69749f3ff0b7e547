//! The filter around a program that nothing can be preloaded into.
//!
//! Nobody inside such a program could install a filter or start a supervisor, so `run` does both before it becomes
//! the program. From then on this process and what descends from it make no mapping call, and no call of the device,
//! that the supervisor doesn't see.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};

use anyhow::Context as _;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use ummunotify::trap::policy::Band;
use ummunotify::trap::{Filter, Policy};
use ummunotify_abi::config;
use ummunotify_abi::wire::{self, Op};
use ummunotify_sys::{process, seccomp};

use super::complain;

/// What there is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Around {
    /// No filter of ours: ours comes.
    Nothing,
    /// One that serves such programs.
    Fit,
    /// One that serves only programs with the shim, and a second one can't be had (EBUSY).
    Narrow,
}

/// Encloses this process. It must have one thread, and execute the program next.
///
/// # Errors
/// What the kernel refused, or the supervisor.
pub(super) fn enclose(name: &str) -> anyhow::Result<()> {
    match around()? {
        Around::Fit => Ok(()),
        Around::Narrow => {
            complain(&format!(
                "notice: {name} is statically linked, and runs without the device: the filter around it was made for \
                 dynamic programs; start it outside of the program that opened the device, by ummunotify run"
            ));
            Ok(())
        }
        Around::Nothing => build(),
    }
}

/// Asks the kernel, by the call that is answered only under a filter of ours.
fn around() -> anyhow::Result<Around> {
    // Not libc's prctl: that returns an int, and a token is larger.
    // SAFETY: integers; no kernel knows the option (EINVAL).
    let token = unsafe {
        libc::syscall(libc::SYS_prctl, wire::HELLO_PRCTL, libc::c_ulong::from(wire::WIRE_VERSION), 0, 0, 0)
    };
    let errno = io::Error::last_os_error().raw_os_error();
    match token {
        token if token > 0 => {
            Ok(if wire::serves_static(token.cast_unsigned()) { Around::Fit } else { Around::Narrow })
        }
        _ if errno == Some(libc::ENOSYS) => {
            anyhow::bail!("the supervisor whose filter this process is under is dead; start afresh")
        }
        _ if errno == Some(libc::EPROTONOSUPPORT) => {
            anyhow::bail!("the supervisor whose filter this process is under is of another version")
        }
        _ => Ok(Around::Nothing),
    }
}

fn build() -> anyhow::Result<()> {
    let limit = process::descriptor_limit();
    let band = Band::below(limit)
        .with_context(|| format!("a limit of {limit} descriptors is too low (ulimit -n)"))?;
    let program = Filter::bytes(&Filter::build(&Policy { gate: None, device: Some(band) }));
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
        .context("socket pair for the supervisor")?;
    // SAFETY: this program has one thread here, and the copy ends in `supervise`.
    match unsafe { process::fork_hidden() }.context("new process for the supervisor (ulimit -u?)")? {
        None => supervise(theirs, band),
        Some(pid) => process::allow_tracer(pid),
    }
    drop(theirs);
    let (listen, closed) = (request(Op::Listener, 0), request(Op::Closed, 1));
    let mut reply = [0; size_of::<wire::Reply>()];
    // From here until the last answer: no allocation, nothing that the filter traps.
    let listener = seccomp::install(&program).context("a seccomp filter with a listener")?;
    let handed = seccomp::exchange(ours.as_fd(), &listen, Some(listener.as_fd()), &mut reply);
    // As long as we hold a copy, the death of the supervisor would hang every trapped call.
    drop(listener);
    handed
        .and_then(|_| seccomp::exchange(ours.as_fd(), &closed, None, &mut reply))
        .context("handing the filter over to the supervisor (--log-file shows why)")?;
    let result = reply[8..].first_chunk().map_or(0, |bytes| i64::from_ne_bytes(*bytes));
    anyhow::ensure!(result == 0, "the supervisor refused the filter: errno {}", -result);
    Ok(())
}

/// A request without a payload.
fn request(op: Op, argument: u64) -> [u8; size_of::<wire::Request>()] {
    let mut bytes = [0; size_of::<wire::Request>()];
    bytes[..4].copy_from_slice(&wire::MAGIC.to_ne_bytes());
    bytes[4..8].copy_from_slice(&wire::WIRE_VERSION.to_ne_bytes());
    bytes[8..12].copy_from_slice(&(op as u32).to_ne_bytes());
    bytes[16..24].copy_from_slice(&argument.to_ne_bytes());
    bytes
}

/// The copy of this process that becomes the supervisor. It executes nothing: that would make it a child that the
/// command's wait() sees.
fn supervise(control: OwnedFd, band: Band) -> ! {
    // Before the descriptors go: the log file may be named by a path that means something here only.
    let keeps_stderr = keeps_stderr();
    let control = off_the_standard(control);
    arrange_descriptors(&control, keeps_stderr);
    process::reset_signals();
    process::raise_descriptor_limit();
    let code = match ummunotify::supervisor::run(control, Some(band)) {
        Ok(()) => 0,
        Err(error) => {
            complain(&format!("supervisor: {error:#}"));
            1
        }
    };
    std::process::exit(code)
}

/// The supervisor writes to the command's standard error only where it was asked to; otherwise it would hold a
/// pipeline open.
fn keeps_stderr() -> bool {
    let is = |name: &str, values: &[&str]| std::env::var(name).is_ok_and(|v| values.contains(&v.as_str()));
    std::env::var_os(config::ENV_LOG_FILE).is_none_or(|path| path.is_empty())
        && (is(config::ENV_STATS, &["1"]) || is(config::ENV_LOG, &["info", "debug"]))
}

/// The socket has a standard descriptor's number where those were closed.
fn off_the_standard(control: OwnedFd) -> OwnedFd {
    match fcntl(&control, FcntlArg::F_DUPFD_CLOEXEC(3)) {
        // SAFETY: the kernel has just made it for us.
        Ok(copy) => unsafe { OwnedFd::from_raw_fd(copy) },
        Err(_) => control,
    }
}

/// Leaves this process the one descriptor, and nothing of whoever started it.
pub(super) fn arrange_descriptors(control: &OwnedFd, keeps_stderr: bool) {
    if let Ok(nothing) = OpenOptions::new().read(true).write(true).open("/dev/null") {
        for standard in 0..3 {
            // SAFETY: asks for a flag.
            let is_open = unsafe { libc::fcntl(standard, libc::F_GETFD) } >= 0;
            if standard == 2 && keeps_stderr && is_open {
                continue;
            }
            // SAFETY: the standard descriptors of a process of our own.
            unsafe { libc::dup2(nothing.as_raw_fd(), standard) };
        }
        // Closed below, or one of the three.
        let _ = nothing.into_raw_fd();
    }
    // SAFETY: this copy uses none but the control socket.
    unsafe { process::close_all_but(control.as_raw_fd()) };
}
