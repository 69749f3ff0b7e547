//! Asking the supervisors of this host about a process.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ummunotify_abi::wire::{self, Hurdle, MAX_ADDRESS, Op, parking};

use super::{AttachError, owner};
use crate::switch::{Connection, SwitchError, supervisors};

/// How long a supervisor may take to answer, in seconds: it looks at nothing that could keep it waiting.
const ANSWER: i64 = 20;

/// What a supervisor is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// Nothing but tell.
    Tell,
    /// Serve the process again.
    Serve,
    /// End its contexts and let its calls go by.
    Park,
}

/// How a supervisor has had a process until now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// It served it.
    #[allow(missing_docs)]
    Served { supervisor: u32, ended: u64 },
    /// It was parked.
    #[allow(missing_docs)]
    Parked { supervisor: u32 },
    /// The process has the device without having been attached to.
    Own,
}

/// Asks every supervisor of this network namespace, or the one of a token that a descendant was told, about the process
/// of a pidfd. `None`: nobody knows it; then how many couldn't be asked.
///
/// # Errors
/// Forbidden, or the supervisor that knows it doesn't answer.
pub fn ask(
    pid: u32,
    process: &OwnedFd,
    wanted: Wanted,
    token: Option<u64>,
) -> Result<Result<Presence, usize>, AttachError> {
    let me = nix::unistd::geteuid().as_raw();
    // Where it can't be looked into root's: whom we trust all the same.
    let users = [me, owner(pid).unwrap_or(me)];
    let names = match token {
        None => supervisors(),
        Some(token) => {
            let mut name = [0; MAX_ADDRESS];
            let length = wire::supervisor_address(&mut name, token);
            std::iter::once(name.get(1..length).unwrap_or_default().to_vec()).collect()
        }
    };
    let word = match wanted {
        Wanted::Tell => parking::TELL,
        Wanted::Serve => parking::SERVE,
        Wanted::Park => parking::PARK,
    };
    let mut others = 0;
    let mut asked = Vec::new();
    for name in names {
        let told = Connection::to(&name, &users).and_then(|connection| {
            connection.limit(ANSWER)?;
            connection.tell(Op::Parking, [word, token.unwrap_or(0), 0, 0, 0, 0], process.as_fd())?;
            Ok(connection)
        });
        match told {
            Ok(connection) => asked.push(connection),
            Err(error) => others += usize::from(is_silent(pid, token, &error)?),
        }
    }
    // Whoever knows it answers; another one may be stopped, or be slow.
    let due = Instant::now() + Duration::from_secs(ANSWER.unsigned_abs());
    while !asked.is_empty() {
        let mut ready: Vec<_> = asked.iter().map(|c| PollFd::new(c.as_fd(), PollFlags::POLLIN)).collect();
        let left = due.saturating_duration_since(Instant::now());
        match poll(&mut ready, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Ok(0) => {
                others += asked.len();
                break;
            }
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(errno) => return Err(AttachError::Unreachable(pid, errno)),
        }
        let Some(next) = ready.iter().position(|fd| fd.any().unwrap_or(true)) else { continue };
        let connection = asked.swap_remove(next);
        match connection.answer() {
            Ok((before, [ended, supervisor, ..])) => {
                let supervisor = u32::try_from(supervisor).unwrap_or(0);
                return Ok(Ok(match before {
                    parking::SERVED => Presence::Served { supervisor, ended },
                    parking::PARKED => Presence::Parked { supervisor },
                    _ => Presence::Own,
                }));
            }
            Err(error) => others += usize::from(is_silent(pid, token, &error)?),
        }
    }
    Ok(Err(others))
}

/// Whether that is a supervisor of which isn't known whether it knows the process.
fn is_silent(pid: u32, token: Option<u64>, error: &SwitchError) -> Result<bool, AttachError> {
    match error {
        SwitchError::Refused { hurdle: Hurdle::Forbidden, .. } => {
            Err(AttachError::Foreign { pid, owner: owner(pid).unwrap_or(0) })
        }
        SwitchError::Unreachable(_, errno, _) if token.is_some() => {
            Err(AttachError::Unreachable(pid, *errno))
        }
        // One that ended at this moment had no process any more.
        SwitchError::Unreachable(_, Errno::ECONNREFUSED | Errno::ECONNRESET | Errno::EPIPE, _) => Ok(false),
        SwitchError::Unreachable(..) => Ok(true),
        _ => Ok(false),
    }
}
