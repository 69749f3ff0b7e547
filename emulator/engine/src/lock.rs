//! The lock of register, unregister and read: one word that *is* the owner's kernel thread id, taken by one
//! compare-and-swap, so that there is no moment at which it is held by nobody knows whom.
//!
//! An owner that is proven dead, or that is the caller itself, left the lock behind (killed, or by siglongjmp
//! out of a signal handler that had interrupted it). Whoever takes it over trusts nothing that was half
//! written: index and cookie tables are made anew from the slots, and everything is invalid.
//!
//! A handler that interrupted the owner and calls the engine itself can't be told from that. Such an owner goes on
//! afterwards, finds by `tenure` that its lock was taken over, and repairs once more; until then it may write
//! to the retired bank of the index, to the slot it had in hand (which the repair leaves alone), and to
//! nothing else that a lookup reads.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use crate::arena::Arena;
use crate::error::Stuck;
use crate::hook::step;
use crate::host::Host;
use crate::repair;
use crate::statistics::Reason;

const WAITERS: u32 = 1 << 31;
const OWNER: u32 = !WAITERS;
/// Turns without sleep: writers are short.
const SPINS: u32 = 100;
/// Sleeps, 10 ms or less each, without any sign of life from other writers.
const SLEEPS: u32 = 2000;
/// Sleeps in all, whatever others do.
const ALL_SLEEPS: u32 = 5 * SLEEPS;
/// Turns in all, whatever others do.
const TURNS: u32 = 1 << 20;

/// The lock is held by this thread. Dropping it doesn't release it: a thread that dies doesn't either.
#[derive(Debug)]
pub(crate) struct Guard {
    id: u32,
    tenure: u64,
    /// Everything was made invalid on this call's own account.
    pub(crate) raised: bool,
}

impl Guard {
    /// False if somebody has taken the lock over.
    pub(crate) fn holds(&self, arena: &Arena) -> bool {
        let header = arena.header();
        header.lock.load(Acquire) & OWNER == self.id && header.tenure.load(Acquire) == self.tenure
    }
}

/// Takes the lock, waiting for a bounded time.
pub(crate) fn lock(arena: &Arena, host: &impl Host) -> Result<Guard, Stuck> {
    let id = host.id() & OWNER;
    if id == 0 {
        return Err(Stuck);
    }
    let word = &arena.header().lock;
    if word.compare_exchange(0, id, AcqRel, Relaxed).is_ok() {
        return Ok(enter(arena, id));
    }
    lock_contended(arena, host, id)
}

fn enter(arena: &Arena, id: u32) -> Guard {
    step();
    let tenure = arena.header().tenure.fetch_add(1, AcqRel).wrapping_add(1);
    Guard { id, tenure, raised: false }
}

#[cold]
fn lock_contended(arena: &Arena, host: &impl Host, id: u32) -> Result<Guard, Stuck> {
    let header = arena.header();
    let word = &header.lock;
    let (mut spins, mut sleeps, mut all_sleeps, mut tenure, mut waiters) = (0, 0, 0, 0, 0);
    for _ in 0..TURNS {
        let seen = word.load(Acquire);
        let owner = seen & OWNER;
        let swap = |new: u32| word.compare_exchange(seen, new, AcqRel, Relaxed).is_ok();
        if owner == 0 {
            if swap(id | waiters) {
                return Ok(enter(arena, id));
            }
            continue;
        }
        if owner == id {
            if swap(id | WAITERS) {
                return Ok(take_over(arena, id, true));
            }
            continue;
        }
        if spins < SPINS {
            spins += 1;
            core::hint::spin_loop();
            continue;
        }
        if host.gone(owner) || host.has_abandoned(word, owner) {
            if swap(id | WAITERS) {
                return Ok(take_over(arena, id, false));
            }
            continue;
        }
        if seen & WAITERS == 0 && !swap(seen | WAITERS) {
            continue;
        }
        waiters = WAITERS;
        let now = header.tenure.load(Relaxed);
        if now != tenure {
            (tenure, sleeps) = (now, 0);
        }
        if sleeps == SLEEPS || all_sleeps == ALL_SLEEPS {
            break;
        }
        sleeps += 1;
        all_sleeps += 1;
        host.wait(word, seen | WAITERS);
    }
    Err(Stuck)
}

fn take_over(arena: &Arena, id: u32, own: bool) -> Guard {
    let mut guard = enter(arena, id);
    repair::repair(arena, own, Reason::TakenOver);
    guard.raised = true;
    guard
}

/// Gives the lock back. If it was taken over meanwhile, two writers were at work: repairs once more.
pub(crate) fn release(arena: &Arena, host: &impl Host, guard: Guard) {
    let mut raised = guard.raised || arena.header().everything.load(Acquire) != 0;
    if !unlock(arena, host, guard)
        && let Ok(guard) = lock(arena, host)
    {
        repair::repair(arena, true, Reason::TakenOver);
        raised = true;
        unlock(arena, host, guard);
    }
    if raised {
        host.invalidated();
    }
}

/// False if the lock had been taken over.
fn unlock(arena: &Arena, host: &impl Host, guard: Guard) -> bool {
    let word = &arena.header().lock;
    step();
    // Only waiters change the word of a held lock, and each once.
    for _ in 0..TURNS {
        let seen = word.load(Acquire);
        if seen & OWNER != guard.id || !guard.holds(arena) {
            return false;
        }
        if word.compare_exchange(seen, 0, AcqRel, Relaxed).is_ok() {
            if seen & WAITERS != 0 {
                host.wake(word);
            }
            return true;
        }
    }
    false
}
