//! The hidden command that the shim starts.

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};

use ummunotify_abi::config::SUPERVISE_FD;

use super::{EXIT_USAGE, complain};

/// Serves the control socket that the shim left at [`SUPERVISE_FD`], until nothing needs it any more.
pub(super) fn main() -> i32 {
    let Some(control) = control_socket() else {
        complain(
            "supervise is started by the preloaded library; what you want is: ummunotify run -- COMMAND",
        );
        return EXIT_USAGE;
    };
    ready_for_service();
    match ummunotify::supervisor::run(control, None) {
        Ok(()) => 0,
        Err(error) => {
            complain(&format!("supervisor: {error:#}"));
            1
        }
    }
}

/// The socket, if there is one.
fn control_socket() -> Option<OwnedFd> {
    let mut kind: libc::c_int = 0;
    let mut size = libc::socklen_t::try_from(size_of_val(&kind)).ok()?;
    // SAFETY: both pointers name initialised variables of the sizes that are given.
    let answer = unsafe {
        libc::getsockopt(SUPERVISE_FD, libc::SOL_SOCKET, libc::SO_TYPE, (&raw mut kind).cast(), &raw mut size)
    };
    // SAFETY: the descriptor is open, a packet socket, and the shim left it to this process.
    (answer == 0 && kind == libc::SOCK_SEQPACKET).then(|| unsafe { OwnedFd::from_raw_fd(SUPERVISE_FD) })
}

/// What the Rust runtime would have done (see main.rs), and a service needs: a peer that went away is an error
/// to handle, and descriptors 0 to 2 are never something else's.
fn ready_for_service() {
    // SAFETY: ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    while let Ok(null) = OpenOptions::new().read(true).write(true).open("/dev/null") {
        if null.as_raw_fd() > 2 {
            break;
        }
        // It stays open as the standard descriptor that was missing.
        let _ = null.into_raw_fd();
    }
}
