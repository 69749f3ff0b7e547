//! Giving the supervisor a userfaultfd of this address space.
//!
//! A userfaultfd belongs to the memory of who makes it, and as long as a copy of it is open anywhere, whoever unmaps
//! watched memory waits for its events to be read. So it never stands in this process's table of descriptors, where
//! a fork of another thread could copy it: it is made by a child that shares our memory and not our descriptors,
//! sent by that child, and closed with its end.

use core::ffi::{c_int, c_void};

use ummunotify_abi::wire::{NOTICE_RING, Op};

use crate::door::{Buffer, Connection};
use crate::log::{self, Part};
use crate::sys;

/// What the child needs to know.
struct Errand<'a> {
    connection: &'a Connection,
    result: c_int,
}

/// Gives the userfaultfd, or says that there is none, and waits for the answer. `stack_top` is the end of a stack
/// that nobody else uses.
///
/// # Errors
/// ENODEV and others: nothing would be seen without it. EOPNOTSUPP: the child didn't say how it went.
pub fn give(connection: &Connection, stack_top: *mut c_void) -> Result<(), c_int> {
    // What stays if the child has a copy of our memory instead, as under valgrind.
    let mut errand = Errand { connection, result: libc::EOPNOTSUPP };
    // SAFETY: the child uses raw system calls alone, on its own stack, while this thread sleeps.
    let pid = unsafe { sys::vfork_on(stack_top, 0, 0, child, (&raw mut errand).cast()) };
    if pid < 0 {
        connection.tell(Op::Userfaultfd, [pid.unsigned_abs() as u64, 0, 0, 0, 0, 0], &[])?;
    } else {
        // SAFETY: no memory is involved.
        sys::again(|| unsafe {
            sys::call(libc::SYS_wait4, pid as usize, 0, libc::__WCLONE as usize, 0, 0, 0)
        });
        // The child wrote it.
        // SAFETY: a valid reference.
        match unsafe { (&raw const errand.result).read_volatile() } {
            0 => {}
            errno => return Err(errno),
        }
    }
    let answer = connection.hear(&mut Buffer::<0>::new())?;
    if answer.args[1] != 0 {
        log::warning(&[
            Part::Text("userfaultfd can't be had here, "),
            Part::Errno(answer.args[1] as c_int),
            Part::Text(
                ": the layer fault sees nothing. What changes memory through io_uring goes unseen, and an end of an \
                 operation isn't looked at",
            ),
        ]);
    }
    notice(answer.args[0]);
    Ok(())
}

unsafe extern "C" fn child(argument: *mut c_void) -> ! {
    // SAFETY: the thread that owns it sleeps until we end.
    let errand = unsafe { &mut *argument.cast::<Errand<'_>>() };
    let made = make();
    let fds = [made as c_int];
    let (errno, fds) = if made < 0 { (made.unsigned_abs() as u64, &[][..]) } else { (0, &fds[..]) };
    errand.result = match errand.connection.tell(Op::Userfaultfd, [errno, 0, 0, 0, 0, 0], fds) {
        Ok(()) => 0,
        Err(errno) => errno,
    };
    sys::exit_process(0)
}

/// `UFFD_USER_MODE_ONLY` (Linux 5.11): without privileges.
const USER_MODE_ONLY: usize = 1;
/// `USERFAULTFD_IOC_NEW`.
const IOC_NEW: usize = 0xaa00;

/// A userfaultfd, by whichever way is open; else the errno of the first.
fn make() -> isize {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
    // SAFETY: integers.
    let call = |flags| unsafe { sys::call(libc::SYS_userfaultfd, flags, 0, 0, 0, 0, 0) };
    let first = call(flags | USER_MODE_ONLY);
    if first >= 0 {
        return first;
    }
    let plain = call(flags);
    if plain >= 0 {
        return plain;
    }
    let device = sys::open(b"/dev/userfaultfd\0", libc::O_RDWR | libc::O_CLOEXEC);
    if device < 0 {
        return first;
    }
    // SAFETY: integers; the descriptor goes with this process.
    let made = unsafe { sys::call(libc::SYS_ioctl, device as usize, IOC_NEW, flags, 0, 0, 0) };
    if made < 0 { first } else { made }
}

/// Says what the supervisor wants said.
pub fn notice(what: u64) {
    if what & NOTICE_RING != 0 {
        log::warning(&[Part::Text(
            "this process uses io_uring. MADVISE through its rings is seen; FALLOCATE, FTRUNCATE and OPENAT with \
             O_TRUNC through a ring aren't, nor is a ring that another process made (run --io-uring=deny closes that)",
        )]);
    }
}
