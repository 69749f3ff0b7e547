//! A signal that waits for the end of a [section](crate::section).
//!
//! The kernel has put its frame below the code that was interrupted, which goes on and uses that part of the stack: so
//! the frame is kept elsewhere meanwhile, unless it lies on another stack. For the handler it is built again, below the end
//! of the section; what that one's caller expects to be kept is in it, in the place of what was interrupted.

use core::ffi::c_int;
use core::mem::offset_of;
use core::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::{sys, thread};

/// Bytes of a room, and of the largest frame that it has room for: with the 8 KiB of AMX it's some 11 KiB.
const ROOM: usize = 16 << 10;
/// Rooms that are kept for others.
const ROOMS: usize = 64;

/// Rooms that nobody is in.
static FREE: [AtomicUsize; ROOMS] = [const { AtomicUsize::new(0) }; ROOMS];

/// What is kept, at the start of a room.
#[repr(C, align(64))]
pub struct Held {
    /// Where the kernel put its frame: its lowest word is the handler's return address.
    frame: usize,
    /// Bytes of the frame up to the red zone of what was interrupted; 0 if it is where it was.
    len: usize,
    /// Of the frame now.
    kept: usize,
    /// `ucontext_t`, in bytes from the frame's start.
    context: usize,
    /// `siginfo_t`, likewise.
    information: usize,
    signal: usize,
    stub: usize,
    /// The signals that are to be blocked while the handler runs.
    mask: u64,
    /// A signal that came before the others were blocked for this one, in its handler as it were: it is handled first. 0
    /// if none did.
    inner: usize,
}

/// Byte offsets for assembler code.
pub const LEN: usize = offset_of!(Held, len);
/// As above.
pub const FRAME: usize = offset_of!(Held, frame);

const _: () = {
    assert!(offset_of!(libc::ucontext_t, uc_mcontext) == 40);
    assert!(offset_of!(libc::mcontext_t, fpregs) == 184);
    assert!(libc::REG_RSP == 15 && libc::REG_RIP == 16 && libc::REG_EFL == 17);
};

/// Registers of the end of a section, as they lie on its stack; then four arguments for the stub.
#[repr(C)]
pub struct Kept {
    r15: usize,
    r14: usize,
    r13: usize,
    r12: usize,
    rbp: usize,
    rbx: usize,
    back: usize,
}

/// Keeps a signal for the end of the section; the registers to go on with. Null if there is no room for it. The caller has
/// all signals blocked, and `mask` is what was blocked before.
///
/// # Safety
/// The arguments are those of a handler, which was entered with its stack pointer at `frame`.
pub unsafe fn keep(
    signal: c_int,
    information: usize,
    context: *const libc::ucontext_t,
    stub: usize,
    frame: usize,
    mask: &mut u64,
) -> *const libc::ucontext_t {
    let thread = thread::current();
    let inner = thread.held.load(Ordering::Relaxed);
    // If that one came to this very stub it has blocked all of them already, but for the two that nobody can.
    let all = *mask | 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1) == u64::MAX;
    if inner != 0 && all {
        *mask = mask_before(inner);
    }
    let Some(room) = take_room() else { return core::ptr::null() };
    // SAFETY: promised by the caller.
    let (stack, other) =
        unsafe { ((*context).uc_mcontext.gregs[libc::REG_RSP as usize] as usize, &(*context).uc_stack) };
    // sigaltstack's, as the kernel knows it.
    let on_other = |at: usize| at.wrapping_sub(other.ss_sp.addr()) < other.ss_size;
    let place = room + size_of::<Held>() + frame % 64;
    // The red zone (System V ABI).
    let mut len = stack.wrapping_sub(128).wrapping_sub(frame);
    let mut kept = place;
    if on_other(frame) && !on_other(stack) {
        // Nobody uses that stack while all signals are blocked.
        (len, kept) = (0, frame);
    } else if len > room + ROOM - place {
        give_room(room);
        return core::ptr::null();
    }
    let context = context.addr() - frame;
    let held = Held {
        frame,
        len,
        kept,
        context,
        information: information - frame,
        signal: signal as usize,
        stub,
        mask: *mask,
        inner,
    };
    // SAFETY: a room is large enough for both, and this thread's alone.
    unsafe {
        with_exposed_provenance_mut::<Held>(room).write(held);
        move_frame(frame, kept, len, context);
    }
    thread.held.store(room, Ordering::Relaxed);
    with_exposed_provenance_mut::<libc::ucontext_t>(kept + context)
}

/// The mask of what the signal in that room has interrupted.
fn mask_before(room: usize) -> u64 {
    // SAFETY: a signal of this thread is in the room, and its frame where that says. The kernel's mask is 8 bytes.
    unsafe {
        let held = &*with_exposed_provenance::<Held>(room);
        let context = with_exposed_provenance::<libc::ucontext_t>(held.kept + held.context);
        (&raw const (*context).uc_sigmask).cast::<u64>().read()
    }
}

/// Builds the frame for the handler, and gives the room back. Called by the end of the section, on the stack below
/// `frame`. The signal that is to be handled first, if there is one: until then all are blocked.
pub extern "C" fn build(held: &Held, frame: usize, kept: *mut Kept) -> usize {
    let context = with_exposed_provenance_mut::<libc::ucontext_t>(frame + held.context);
    // SAFETY: the caller has made room at `frame`; or the frame lies there.
    unsafe { move_frame(held.kept, frame, held.len, held.context) };
    // SAFETY: the frame's context; and what the end of the section has pushed.
    unsafe {
        let registers = &mut (*context).uc_mcontext.gregs;
        let end = kept.read();
        for (register, value) in [
            (libc::REG_R15, end.r15),
            (libc::REG_R14, end.r14),
            (libc::REG_R13, end.r13),
            (libc::REG_R12, end.r12),
            (libc::REG_RBP, end.rbp),
            (libc::REG_RBX, end.rbx),
            (libc::REG_RIP, end.back),
            (libc::REG_RSP, kept.add(1).addr()),
        ] {
            registers[register as usize] = value as i64;
        }
        kept.cast::<[usize; 4]>().write([
            held.signal,
            frame + held.information,
            frame + held.context,
            held.stub,
        ]);
    }
    let (mask, inner) = (held.mask, held.inner);
    thread::current().held.store(0, Ordering::Relaxed);
    give_room((&raw const *held).addr());
    if inner == 0 {
        sys::restore_signals(mask);
    }
    inner
}

/// # Safety
/// Both places have room for a frame of that length, whose context begins at that offset.
unsafe fn move_frame(from: usize, to: usize, len: usize, context: usize) {
    if len == 0 {
        return;
    }
    let bytes = with_exposed_provenance_mut::<u8>(from).cast_const();
    let context = with_exposed_provenance_mut::<libc::ucontext_t>(to + context);
    // SAFETY: promised by the caller. The vector registers' part moves with the rest.
    unsafe {
        bytes.copy_to_nonoverlapping(with_exposed_provenance_mut(to), len);
        let vectors = (*context).uc_mcontext.fpregs;
        if !vectors.is_null() {
            (*context).uc_mcontext.fpregs =
                with_exposed_provenance_mut(vectors.addr().wrapping_sub(from).wrapping_add(to));
        }
    }
}

fn take_room() -> Option<usize> {
    if let Some(room) = FREE.iter().map(|place| place.swap(0, Ordering::Acquire)).find(|&room| room != 0) {
        return Some(room);
    }
    let made =
        sys::mmap(ROOM, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
    usize::try_from(made).ok()
}

/// With more rooms than can be listed one is lost: memory, not an invalidation.
fn give_room(room: usize) {
    for place in &FREE {
        if place.compare_exchange(0, room, Ordering::Release, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}
