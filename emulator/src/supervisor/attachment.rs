//! The processes that a supervisor was attached to while they ran, and whether it serves them.
//!
//! A filter can't be removed. Detached from, a process is *parked*: what it had of the device is ended, its opens of
//! the device are as if there were none, and its other calls are let go at once. Attached to again, it is served again.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ummunotify_sys::process;

use super::clerk;
use super::context::lock;
use super::log;
use super::settle;
use super::shared::Shared;
use super::space::Space;

/// The processes of this supervisor that were attached to, and whether they are served.
#[derive(Debug, Default)]
pub struct Attachment {
    members: Mutex<Vec<Member>>,
    /// Those that `run` has put the filter around before their program began: it isn't ours to park.
    enclosed: Mutex<Vec<Member>>,
    /// How often it began to serve them.
    round: AtomicU64,
    parked: AtomicBool,
    /// Somebody below a member was started by `run` or with the library since: it is served in any case.
    hailed: AtomicBool,
}

#[derive(Debug)]
struct Member {
    pid: u32,
    pidfd: OwnedFd,
}

impl Attachment {
    /// Whether a process was attached to.
    pub fn has(&self, pid: u32) -> bool {
        let mut members = lock(&self.members);
        members.retain(|member| process::pidfd_alive(&member.pidfd));
        members.iter().any(|member| member.pid == pid)
    }

    /// `run` has put the filter around that process.
    pub fn enclose(&self, pid: u32) -> io::Result<()> {
        let pidfd = process::pidfd_open(pid)?;
        lock(&self.enclosed).push(Member { pid, pidfd });
        Ok(())
    }

    /// Whether it has the device by `run`.
    pub fn encloses(&self, pid: u32) -> bool {
        lock(&self.enclosed).iter().any(|member| member.pid == pid && process::pidfd_alive(&member.pidfd))
    }

    /// Whether this is a supervisor of attached processes at all.
    pub fn is_one(&self) -> bool {
        self.round.load(Ordering::Acquire) > 0
    }

    /// From now on the process is one of them.
    pub fn admit(&self, pid: u32) -> io::Result<()> {
        if !self.has(pid) {
            let pidfd = process::pidfd_open(pid)?;
            lock(&self.members).push(Member { pid, pidfd });
        }
        Ok(())
    }

    /// Whether they are parked.
    pub fn is_parked(&self) -> bool {
        self.parked.load(Ordering::Acquire)
    }

    /// Whether no process below is to have the device, so that nothing need be looked at as long as no context is open.
    pub fn is_silent(&self) -> bool {
        self.is_parked() && !self.hailed.load(Ordering::Acquire)
    }

    /// A program that has the library, or `run`, was told how to find us.
    pub fn hail(&self) {
        self.hailed.store(true, Ordering::Release);
    }

    /// Whether an open of the device by that process is as if there were none.
    pub fn refuses(&self, pid: u32) -> bool {
        self.is_parked() && (self.is_silent() || self.has(pid))
    }

    /// Serves them (again).
    pub fn serve(&self) {
        self.round.fetch_add(1, Ordering::AcqRel);
        self.parked.store(false, Ordering::Release);
    }

    /// Parks them; the contexts that were ended.
    pub fn park(&self, shared: &Shared) -> u64 {
        // An open is over, with its context among the others, or comes later, and is refused.
        let _opening = lock(&shared.opening);
        self.parked.store(true, Ordering::Release);
        let silent = self.is_silent();
        let mut ended = 0;
        for space in shared.spaces() {
            if silent || self.has(space.pid) {
                for context in space.contexts().iter().filter(|c| !c.is_shims && !c.is_ended()) {
                    context.end();
                    ended += 1;
                }
            }
        }
        ended
    }

    /// Before the first open of a process since it is served: waits until each thread was seen outside the calls that
    /// began before that. Those that take too long make everything invalid when they come out.
    pub fn settle(&self, shared: &Shared, space: &Arc<Space>, pid: u32) {
        let round = self.round.load(Ordering::Acquire);
        if space.settled.swap(round, Ordering::AcqRel) == round {
            return;
        }
        let left = settle::settle(shared, pid);
        if !left.is_nobody() {
            log::warning!("process {pid}: {left} inside calls from before");
            clerk::follow(pid, Arc::clone(space), left);
        }
    }
}
