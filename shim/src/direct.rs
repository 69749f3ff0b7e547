//! The way around the descriptor table for the Rust client: see [`ummunotify_abi::direct`].

use core::ffi::c_int;

use ummunotify_abi::PageRange;
use ummunotify_abi::device::{Event, MAX_RECORDS};
use ummunotify_abi::direct::{Direct, Lease, NOT_HERE};
use ummunotify_engine::Engine;

use crate::context::Ticket;
use crate::device::{self, Refusal};
use crate::host::ClientHost;
use crate::memory::Target;
use crate::section::Section;
use crate::{owner, sys, table};

/// What a lease is.
struct Leased {
    ticket: Ticket,
    engine: Engine,
    /// The address space that the ticket is of.
    generation: u32,
}

const _: () =
    assert!(size_of::<Leased>() <= size_of::<Lease>() && align_of::<Leased>() <= align_of::<Lease>());

/// The functions.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name of a symbol")]
pub static ummunotify_direct_1: Direct = Direct { lease, release, register, unregister, read, settle };

unsafe extern "C" fn lease(fd: c_int, lease: *mut Lease) -> isize {
    let _blocked = sys::SignalsBlocked::new();
    let Some(ticket) = table::lookup(fd) else { return NOT_HERE };
    let Some(engine) = ticket.engine() else { return NOT_HERE };
    // SAFETY: room of that size, as the caller promises.
    unsafe { lease.cast::<Leased>().write(Leased { ticket, engine, generation: owner::generation() }) };
    0
}

unsafe extern "C" fn release(lease: *mut Lease) {
    let _section = Section::enter();
    // SAFETY: filled by `lease`, and used no more.
    let Leased { ticket, generation, .. } = unsafe { lease.cast::<Leased>().read() };
    if generation != owner::generation() {
        ticket.forget();
    }
}

/// Does something with the engine of a lease.
///
/// # Safety
/// The lease was filled by [`lease`] and not given back.
#[inline(always)]
unsafe fn with(
    lease: *const Lease,
    act: impl FnOnce(&Engine, &ClientHost) -> Result<usize, Refusal>,
) -> isize {
    let section = Section::enter();
    // SAFETY: promised by the caller.
    let held = unsafe { &*lease.cast::<Leased>() };
    if held.generation != owner::generation() || held.engine.is_requested() {
        return NOT_HERE;
    }
    match act(&held.engine, &ClientHost::inside(&section)) {
        Ok(result) => result as isize,
        Err(Refusal::Errno(errno)) => -(errno as isize),
        Err(Refusal::Elsewhere) => NOT_HERE,
    }
}

unsafe extern "C" fn register(lease: *const Lease, fd: c_int, start: u64, end: u64, cookie: u64) -> isize {
    let range = PageRange::new(start, end);
    // SAFETY: promised by the caller.
    unsafe { with(lease, |engine, host| device::register_here(engine, host, fd, range, cookie).map(|()| 0)) }
}

unsafe extern "C" fn unregister(lease: *const Lease, fd: c_int, cookie: u64) -> isize {
    // SAFETY: promised by the caller.
    unsafe { with(lease, |engine, host| device::unregister_here(engine, host, fd, cookie).map(|()| 0)) }
}

unsafe extern "C" fn read(
    lease: *const Lease,
    fd: c_int,
    records: *mut Event,
    room: usize,
    polled: bool,
) -> isize {
    let room = room.min(MAX_RECORDS);
    let target = Target::Given(records.cast(), room * size_of::<Event>());
    let read = |engine: &Engine, host: &ClientHost| {
        device::read_here(Some(fd), engine, host, room, target, polled).map_err(|refusal| match refusal {
            // Whether to wait, and what else may be the matter, is the ordinary call's business.
            Refusal::Errno(libc::EAGAIN) => Refusal::Elsewhere,
            other => other,
        })
    };
    // SAFETY: promised by the caller.
    unsafe { with(lease, read) }
}

unsafe extern "C" fn settle(lease: *const Lease, fd: c_int) -> isize {
    let nothing = Target::Given(core::ptr::null_mut(), 0);
    // SAFETY: promised by the caller.
    unsafe {
        with(lease, |engine, host| match device::read_here(Some(fd), engine, host, 0, nothing, true) {
            Err(Refusal::Errno(libc::EAGAIN)) => Ok(0),
            other => other,
        })
    }
}
