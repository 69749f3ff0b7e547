//! Sections in which no signal handler runs, without a system call.
//!
//! A handler that interrupts a holder of the arena's lock could use the device and wait for that lock, leave by
//! siglongjmp and hold it for ever, fork a process that goes on without the arena, or keep other threads waiting. To
//! block all signals takes two system calls. Instead a word says that the thread is inside; the handlers that were
//! installed through libc are entered by a stub that looks at it ([`crate::hooks_signal`]). If it is set the stub blocks
//! all signals, keeps what the kernel said of this one ([`crate::held`]), and goes on with the code that was interrupted.
//! The end of the section enters the handler: to it, the signal came a little later. Stack, order, and what it is told are
//! as they were.
//!
//! What this doesn't hold back is a handler that a program installs by a system call instruction of its own. The engine
//! stands it: a lock that its own owner asks for is taken over, and everything is invalid.
//!
//! A wait in a section may end with EINTR for the sake of a handler that then does nothing. Who talks to the supervisor
//! blocks the signals.

use core::ptr::with_exposed_provenance;
use core::sync::atomic::{Ordering, compiler_fence};

use crate::thread::{self, Thread};
use crate::{held, hooks_signal, sys};

/// How far below its beginning a section may use the stack.
const DEPTH: usize = 32 << 10;

/// As long as it lives this thread runs no handler.
pub struct Section(By);

/// What keeps handlers out.
enum By {
    /// The word.
    Word(&'static Thread),
    /// Blocked signals: somebody is inside already who has the same storage, such as what was interrupted by a handler
    /// that wasn't held back; or the caller isn't the thread whose storage it is.
    Mask(#[expect(dead_code, reason = "undone when it goes")] sys::SignalsBlocked),
}

impl Section {
    /// Begins one.
    #[inline(always)]
    pub fn enter() -> Self {
        let thread = thread::current();
        let here = sys::stack_pointer();
        if thread.is_known(here) && begin(thread, here) {
            return Self(By::Word(thread));
        }
        Self::enter_slowly(thread, here)
    }

    #[cold]
    #[inline(never)]
    fn enter_slowly(thread: &'static Thread, here: usize) -> Self {
        if thread.learn(here) {
            // A section that was left by siglongjmp, by a handler that couldn't be held back. Should it be one that such
            // a handler has interrupted on another stack, no other is held back until its end.
            if let Some(held) = held(thread) {
                thread.section.store(0, Ordering::Relaxed);
                hooks_signal::enter(held);
            } else if thread.section.load(Ordering::Relaxed) < here {
                thread.section.store(0, Ordering::Relaxed);
            }
            if begin(thread, here) {
                return Self(By::Word(thread));
            }
        }
        Self(By::Mask(sys::SignalsBlocked::new()))
    }

    /// The kernel's id of the calling task.
    #[inline(always)]
    pub fn task(&self) -> u32 {
        match &self.0 {
            By::Word(thread) => thread.id(),
            By::Mask(_) => sys::gettid(),
        }
    }
}

#[inline(always)]
fn begin(thread: &Thread, here: usize) -> bool {
    thread.section.compare_exchange(0, here, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// The signal that is held back for a thread, to be entered at once.
#[inline(always)]
fn held(thread: &Thread) -> Option<&held::Held> {
    let held = thread.held.load(Ordering::Relaxed);
    // SAFETY: what is held back for this thread is held until it has been entered.
    (held != 0).then(|| unsafe { &*with_exposed_provenance(held) })
}

impl Drop for Section {
    #[inline(always)]
    fn drop(&mut self) {
        if let By::Word(thread) = &self.0 {
            thread.section.store(0, Ordering::Release);
            compiler_fence(Ordering::SeqCst);
            if let Some(held) = held(thread) {
                hooks_signal::enter(held);
            }
        }
    }
}

/// True if a signal has interrupted the code of a section, at `code` with that stack pointer.
pub fn is_interrupted(code: usize, stack: usize) -> bool {
    let begun = thread::current().section.load(Ordering::Relaxed);
    // Another task has the same storage, or somebody has left a section by siglongjmp: the word isn't about this code.
    // What waits in the kernel for others isn't inside either, unless it is our own call.
    stack <= begun && begun - stack < DEPTH && (is_ours(code) || !is_behind_syscall(code))
}

// Ours, not the program's.
core::arch::global_asm!(".hidden etext", ".hidden __ehdr_start");

fn is_ours(code: usize) -> bool {
    unsafe extern "C" {
        #[link_name = "__ehdr_start"]
        static START: u8;
        #[link_name = "etext"]
        static END: u8;
    }
    ((&raw const START).addr()..(&raw const END).addr()).contains(&code)
}

fn is_behind_syscall(code: usize) -> bool {
    // SAFETY: the instruction before the one that was interrupted, or bytes in front of it: code is mapped by pages, and
    // a function doesn't begin with the first two bytes of a mapping that follows nothing (an ELF header lies there).
    unsafe { (code as *const [u8; 2]).sub(1).read() == [0x0f, 0x05] }
}
