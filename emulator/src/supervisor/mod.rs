//! The supervisor: a process of its own that answers the trapped calls of its clients.
//!
//! Threads: the main loop receives trapped calls, from the filter's listener or as tracer, and answers all that
//! need no look at the target; a worker per address space looks at targets ([`worker`]); a clerk per connection
//! serves shims ([`clerk`]); the desk serves trapped calls of the device, of programs without a shim ([`desk`]), and
//! wakes those who sleep in one ([`sleepers`]); where the fault layer is on, a watcher per address space reads its
//! events ([`watcher`]). They share [`shared::Shared`] and talk by channels; [`gate`] lets calls go on. Nothing of a
//! target, and nothing in an arena, is trusted.
//!
//! Life: it ends when no task has the filter any more (the listener reports `POLLHUP`), none is traced, and the
//! last reference of every context is gone; not when the client that started it dies, since descendants still
//! need it: their trapped calls would answer ENOSYS.
//!
//! Lock order: the list of spaces, then a space's list of contexts, then a context's watch; none of these is
//! held while waiting for a target or a peer. A context's recorder lock is held for a client's call or a move to
//! another backend ([`switch`]), over the arena's lock and the wait for a reader's answer; the main loop never
//! takes it.

mod attach;
mod attachment;
mod caller;
mod calls;
mod clerk;
mod context;
mod crowded;
mod desk;
mod device_call;
mod fault;
mod gate;
mod host;
pub mod log;
mod main_loop;
mod open_call;
mod ranges;
mod recorder;
mod rings;
mod settle;
mod shared;
mod sleepers;
mod socket;
mod space;
mod spare;
#[cfg(test)]
mod spent;
mod switch;
mod task;
mod watcher;
mod worker;

use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use attach::Attached;
pub(crate) use task::born;

use nix::mount::{MsFlags, mount};
use ummunotify_abi::config;

use crate::attach::{AttachError, Subject};
use crate::trap::policy::Band;
use crate::trap::{Layers, Rings};

/// The name that the process shows.
pub const NAME: &str = "ummunotify-sup";

/// Runs the supervisor on a fresh control socket until nobody needs it any more. `device`: its filter traps the
/// device's own calls too, for programs without a shim; these are the numbers of their descriptors.
///
/// # Errors
/// What the kernel refused at start; a client is told by the socket's end.
pub fn run(control: OwnedFd, device: Option<Band>) -> anyhow::Result<()> {
    // A log file's path may be relative to the client's directory.
    log::init();
    detach();
    main_loop::block_child_signal();
    spare::keep();
    see_own_processes()?;
    let (layers, rings) = (setting(config::ENV_TRAP)?, setting(config::ENV_IO_URING)?);
    let shared = Arc::new(shared::Shared::new(device, layers, rings)?);
    let mut main_loop = main_loop::MainLoop::new(Arc::clone(&shared))?;
    main_loop.serve_connection(socket::Connection::new(control), clerk::Entrance::Control);
    main_loop.run()
}

/// Attaches to a running process, says what came of it, and serves it until nobody needs that any more. It is over at
/// once if the process couldn't be attached to.
///
/// # Errors
/// What the kernel refused at start; then `report` isn't called.
pub fn run_attached(
    subject: Subject,
    report: impl FnOnce(Result<Attached, AttachError>) + Send + 'static,
) -> anyhow::Result<()> {
    log::init();
    // Whoever attaches isn't who is attached to.
    let _ = nix::unistd::setsid();
    detach();
    main_loop::block_child_signal();
    spare::keep();
    see_own_processes()?;
    let (layers, rings) = (Layers::default(), Rings::default());
    let shared = Arc::new(shared::Shared::new(Some(subject.band), layers, rings)?);
    let mut main_loop = main_loop::MainLoop::new(Arc::clone(&shared))?;
    main_loop.busy_with("attach", move |shared| report(attach::attach(shared, &subject)))?;
    main_loop.run()
}

/// What a variable says; its default without it.
fn setting<T: Default + std::str::FromStr<Err = String>>(name: &str) -> anyhow::Result<T> {
    match std::env::var(name) {
        Ok(text) if !text.is_empty() => text.parse().map_err(|e| anyhow::anyhow!("{name}: {e}")),
        _ => Ok(T::default()),
    }
}

/// Makes sure that /proc shows the pid namespace that we count in. In a container whose /proc is another
/// namespace's, every look at a process would be a look at a wrong one. A mount of our own helps, in a mount
/// namespace that nobody else sees; it must come before any thread, since it changes the calling one alone.
fn see_own_processes() -> anyhow::Result<()> {
    let fits =
        || std::fs::read_link("/proc/self").is_ok_and(|p| p.as_os_str() == &*std::process::id().to_string());
    if fits() {
        return Ok(());
    }
    let none = None::<&str>;
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)
        .and_then(|()| mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none))
        .and_then(|()| mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), none))
        .map_err(|e| {
            anyhow::anyhow!(
                "/proc isn't this pid namespace's, and mounting a private one failed: {e}; mount one for the \
                 namespace (unshare --mount-proc does)"
            )
        })?;
    anyhow::ensure!(fits(), "/proc doesn't show this pid namespace, not even a fresh one");
    Ok(())
}

/// Leaves the client's surroundings: its process group, directory and signals. SIGTERM and its kin are ignored, since
/// they are sent to whole groups: a supervisor that goes before its clients breaks them. So are those of a terminal, which
/// it may write its log to.
///
/// It stays in the client's session: to the scheduler sessions are groups of their own (autogroup, sched(7)), between which
/// each switch takes longer, and whose tasks are kept apart from each other.
fn detach() {
    let this = nix::unistd::Pid::from_raw(0);
    let _ = nix::unistd::setpgid(this, this);
    let _ = nix::unistd::chdir("/");
    let _ = nix::sys::prctl::set_name(c"ummunotify-sup");
    let (groups, terminals) = (
        [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM],
        [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU],
    );
    for signal in groups.into_iter().chain(terminals).chain([libc::SIGPIPE, libc::SIGXFSZ]) {
        ummunotify_sys::process::ignore_signal(signal);
    }
    ummunotify_sys::process::raise_file_size_limit();
}
