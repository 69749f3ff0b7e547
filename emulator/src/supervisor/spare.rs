//! A descriptor that is kept for the moment when no other is left.
//!
//! Clients can have this process use up all that it may have. What must not fail by that, and is over at once, then uses
//! the number of this one.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::context::lock;

/// Tries before another thread is let have the number.
const TRIES: usize = 8;

static KEPT: AtomicBool = AtomicBool::new(false);
static SPARE: Mutex<Option<OwnedFd>> = Mutex::new(None);

/// From now on one is kept.
pub fn keep() {
    KEPT.store(true, Ordering::Release);
    fill(&mut lock(&SPARE));
}

fn fill(spare: &mut Option<OwnedFd>) {
    if spare.is_none() && KEPT.load(Ordering::Acquire) {
        *spare = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).ok().map(OwnedFd::from);
    }
}

/// As long as the result lives nobody uses the spare one, so that what is opened meanwhile and stays open doesn't take its
/// number.
pub fn leave() -> impl Drop {
    lock(&SPARE)
}

/// Does something for which a descriptor is opened and closed again. It must not wait for a target: all who find no other
/// descriptor wait for it.
pub fn with<T>(work: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let is_spent = |done: &io::Result<T>| matches!(done, Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)));
    let mut done = work();
    if !is_spent(&done) {
        return done;
    }
    let mut spare = lock(&SPARE);
    fill(&mut spare);
    for _ in 0..TRIES {
        // Somebody else may be faster, who gives the number back at once.
        spare.take();
        done = work();
        if !is_spent(&done) {
            break;
        }
    }
    fill(&mut spare);
    done
}
