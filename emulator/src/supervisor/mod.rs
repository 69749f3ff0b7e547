//! The supervisor: a process of its own that answers the trapped calls of its clients.
//!
//! Threads: the main loop receives notifications and answers all that need no look at the target; a worker per
//! address space looks at targets ([`worker`]); a clerk per connection serves shims ([`clerk`]). They share
//! [`shared::Shared`] and talk by channels. Nothing of a target, and nothing in an arena, is trusted.
//!
//! Life: it ends when no task has the filter any more (the listener reports `POLLHUP`) and the last reference
//! of every context is gone; not when the client that started it dies, since descendants still need it: their
//! trapped calls would answer ENOSYS.
//!
//! Lock order: the list of spaces, then a space's list of contexts; no lock is held while waiting for a
//! target or a peer.

mod clerk;
mod context;
mod crowded;
mod host;
pub mod log;
mod main_loop;
mod settle;
mod shared;
mod socket;
mod space;
mod task;
mod worker;

use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Runs the supervisor on a fresh control socket until nobody needs it any more.
///
/// # Errors
/// What the kernel refused at start; a client is told by the socket's end.
pub fn run(control: OwnedFd) -> anyhow::Result<()> {
    detach();
    log::init();
    let shared = Arc::new(shared::Shared::new()?);
    let mut main_loop = main_loop::MainLoop::new(Arc::clone(&shared))?;
    main_loop.serve_connection(socket::Connection::new(control));
    main_loop.run()
}

/// Leaves the client's surroundings: its session, directory and signals. SIGTERM and its kin are ignored, since
/// they are sent to whole groups: a supervisor that goes before its clients breaks them.
fn detach() {
    // The starter has called setsid already where it can; a second time fails, which is as good.
    let _ = nix::unistd::setsid();
    let _ = nix::unistd::chdir("/");
    let _ = nix::sys::prctl::set_name(c"ummunotify-sup");
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGPIPE, libc::SIGXFSZ] {
        ummunotify_sys::process::ignore_signal(signal);
    }
    ummunotify_sys::process::raise_file_size_limit();
}
