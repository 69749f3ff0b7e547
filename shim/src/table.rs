//! Which descriptors are the device.
//!
//! The table is a cache that hooks keep right, and whatever it says is checked before it is acted on: a number
//! can be closed and reused behind our back (by a raw system call, by libc's own internals, by a vfork child,
//! which shares the table but not the descriptors). "Unknown" is always safe: it is looked up by inode. Only "not
//! ours" is believed, so it is set only where the number was just seen to be something else, and never by a
//! vfork child.
//!
//! Between the look and the note another thread can give the number to the device. So who looks at an unknown number
//! says so first (`LOOKED_AT`), and notes only where nobody has taken that back.

use core::ffi::c_int;
use core::sync::atomic::{AtomicU16, AtomicU32, Ordering};

use ummunotify_abi::wire::{Op, PIPE_MODE};

use crate::context::{self, Identity, Ticket};
use crate::door::{Buffer, Connection};
use crate::{owner, sys};

/// Nothing is known.
const UNKNOWN: u16 = 0;
/// Something else.
const NOT_OURS: u16 = 1;
/// Nothing is known, and somebody is looking.
const LOOKED_AT: u16 = 2;
/// First entry that names a slot.
const SLOTS: u16 = 3;

/// Numbers that have an entry. Higher ones are looked up each time.
const SIZE: usize = 65536;

/// Untouched pages of it cost nothing.
static TABLE: [AtomicU16; SIZE] = [const { AtomicU16::new(UNKNOWN) }; SIZE];
/// One above the highest number whose entry was ever set.
static USED: AtomicU32 = AtomicU32::new(0);
/// 1 as soon as this process may hold a device descriptor; until then every hook passes straight through.
static ACTIVE: AtomicU32 = AtomicU32::new(0);

/// From now on descriptors may be ours.
pub fn activate() {
    ACTIVE.store(1, Ordering::Release);
}

/// True if no descriptor can be ours.
#[inline(always)]
pub fn is_idle() -> bool {
    ACTIVE.load(Ordering::Relaxed) == 0
}

fn entry(fd: c_int) -> Option<&'static AtomicU16> {
    TABLE.get(usize::try_from(fd).ok()?)
}

/// True if the descriptor surely isn't the device.
#[inline(always)]
pub fn is_foreign(fd: c_int) -> bool {
    is_idle() || fd < 0 || is_known(fd)
}

/// True if it is something else, by one look.
#[inline(always)]
pub fn is_known(fd: c_int) -> bool {
    entry(fd).is_some_and(|entry| entry.load(Ordering::Relaxed) == NOT_OURS)
}

fn set(fd: c_int, value: u16) {
    let Some(entry) = entry(fd) else { return };
    if value != UNKNOWN {
        USED.fetch_max(fd as u32 + 1, Ordering::AcqRel);
    }
    if value >= SLOTS {
        context::retain(value - SLOTS);
    }
    let before = entry.swap(value, Ordering::AcqRel);
    if before >= SLOTS {
        context::release(before - SLOTS);
    }
}

/// Notes that the descriptor refers to the slot.
pub fn note(fd: c_int, ticket: &Ticket) {
    if owner::at_home() {
        set(fd, ticket.index() + SLOTS);
    }
}

/// The context of a descriptor; `None` if it isn't the device. The caller has blocked all signals.
pub fn lookup(fd: c_int) -> Option<Ticket> {
    if is_foreign(fd) { None } else { resolve(fd) }
}

/// The pipe behind a descriptor; `None` if it isn't open or something else.
pub fn identity(fd: c_int) -> Option<Identity> {
    let stat = sys::fstat(fd)?;
    (stat.st_mode & libc::S_IFMT == libc::S_IFIFO)
        .then_some(Identity { device: stat.st_dev, inode: stat.st_ino })
}

/// As [`lookup`], in a process that has held no device descriptor before.
pub fn resolve(fd: c_int) -> Option<Ticket> {
    let known = look(fd);
    let Some(identity) = identity(fd) else {
        // A number that isn't open is unknown: nothing was seen there.
        if sys::fcntl(fd, libc::F_GETFD, 0) >= 0 {
            refuse(fd, known);
        }
        return None;
    };
    if known >= SLOTS
        && let Some(ticket) = context::enter(known - SLOTS, identity)
    {
        return Some(ticket);
    }
    let ticket = match context::find(identity) {
        Some(ticket) => ticket,
        None => match ask(fd, identity) {
            Asked::Ours(ticket) => ticket,
            Asked::Foreign => {
                refuse(fd, known);
                return None;
            }
            Asked::Unclear => return None,
        },
    };
    activate();
    note(fd, &ticket);
    Some(ticket)
}

/// The entry of a number that is about to be looked at, for [`refuse`].
fn look(fd: c_int) -> u16 {
    let Some(entry) = entry(fd) else { return UNKNOWN };
    let known = entry.load(Ordering::Acquire);
    // In a process that never had one the table stays untouched.
    if known != UNKNOWN || is_idle() || !owner::at_home() {
        return known;
    }
    USED.fetch_max(fd as u32 + 1, Ordering::AcqRel);
    match entry.compare_exchange(UNKNOWN, LOOKED_AT, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => LOOKED_AT,
        Err(now) => now,
    }
}

/// Notes that the descriptor isn't ours, if its entry is what it was before it was looked at. A slot gives way to
/// nothing more than "unknown": the number may have become the same slot's again.
fn refuse(fd: c_int, known: u16) {
    let Some(entry) = entry(fd) else { return };
    let next = match known {
        LOOKED_AT => NOT_OURS,
        SLOTS.. => UNKNOWN,
        _ => return,
    };
    if owner::at_home()
        && entry.compare_exchange(known, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        && known >= SLOTS
    {
        context::release(known - SLOTS);
    }
}

enum Asked {
    Ours(Ticket),
    Foreign,
    Unclear,
}

/// Whether it is a pipe that a supervisor has made for a device.
fn is_marked(fd: c_int) -> bool {
    sys::fstat(fd).is_some_and(|stat| stat.st_mode == libc::S_IFIFO | PIPE_MODE)
}

/// True if a descriptor for which [`lookup`] found nothing is the device all the same: its supervisor couldn't be asked,
/// and the pipe's own call would take bytes out that others wait for.
#[cold]
pub fn is_unanswered(fd: c_int) -> bool {
    !is_foreign(fd) && is_marked(fd)
}

/// Asks whether a pipe that we don't know is the device: then a supervisor listens at its inode's address.
fn ask(fd: c_int, identity: Identity) -> Asked {
    let connection = match Connection::to_context(identity.inode) {
        Ok(connection) => connection,
        Err(libc::ECONNREFUSED | libc::EPERM) if !is_marked(fd) => return Asked::Foreign,
        Err(_) => return Asked::Unclear,
    };
    let mut buffer = Buffer::<0>::new();
    let Ok(mut answer) = connection.ask(Op::Attach, [0; 6], Some(fd), &mut buffer) else {
        return Asked::Unclear;
    };
    let ticket = if answer.args[0] == 1 {
        // The arena and the counter come last.
        let mut fds = [answer.fds.take(0), answer.fds.take(1), answer.fds.take(2)].into_iter().flatten();
        let (Some(first), Some(second)) = (fds.next(), fds.next()) else { return Asked::Unclear };
        let (arena, counter) = match fds.next() {
            Some(third) => (second, third),
            None => (first, second),
        };
        context::add_owned(identity, &arena, &counter, None)
    } else {
        context::add_remote(identity)
    };
    ticket.map_or(Asked::Unclear, Asked::Ours)
}

/// A descriptor of the context in whose arena that address lies. The caller is inside it, with all signals held back.
#[cold]
pub fn holder(address: usize) -> Option<c_int> {
    let numbers = 0..USED.load(Ordering::Acquire) as c_int;
    numbers.into_iter().find(|&fd| {
        let known = entry(fd).map_or(UNKNOWN, |entry| entry.load(Ordering::Acquire));
        known >= SLOTS
            && identity(fd)
                .and_then(|identity| context::enter(known - SLOTS, identity))
                .is_some_and(|ticket| ticket.maps(address))
    })
}

/// The number is being closed, or was given to something else.
pub fn forget(fd: c_int) {
    if is_idle() || fd < 0 {
        return;
    }
    match entry(fd) {
        Some(entry) => match entry.load(Ordering::Acquire) {
            UNKNOWN => {}
            NOT_OURS | LOOKED_AT => {
                let _ = entry.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |now| {
                    matches!(now, NOT_OURS | LOOKED_AT).then_some(UNKNOWN)
                });
            }
            // In a vfork child the parent's descriptor stays open.
            _ if owner::at_home() => {
                let _blocked = sys::SignalsBlocked::new();
                set(fd, UNKNOWN);
            }
            _ => {}
        },
        None => {
            let _blocked = sys::SignalsBlocked::new();
            if let Some(identity) = identity(fd)
                && owner::at_home()
            {
                context::release_unlisted(identity);
            }
        }
    }
}

/// All numbers of a range are being closed.
pub fn forget_range(first: u32, last: u32) {
    if is_idle() {
        return;
    }
    // Above the table there are few, if any, and what they refer to is given up at the process's end.
    for fd in first..=last.min(USED.load(Ordering::Acquire).saturating_sub(1)) {
        forget(fd as c_int);
    }
}

/// `new` has become a copy of `old`.
pub fn copied(old: c_int, new: c_int) {
    if is_idle() || old == new || new < 0 {
        return;
    }
    let known = entry(old).map_or(UNKNOWN, |entry| entry.load(Ordering::Acquire));
    if known >= SLOTS && owner::at_home() {
        let _blocked = sys::SignalsBlocked::new();
        set(new, known);
    } else {
        forget(new);
    }
}
