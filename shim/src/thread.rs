//! What is kept for each of libc's threads.
//!
//! A task that wasn't made by libc (a vfork child, a raw clone without CLONE_SETTLS) has its creator's
//! thread-local storage, so all of it may be used by two tasks at once.

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::{owner, sys};

/// Bytes of a thread control block that libc's list of robust locks may lie in.
const CONTROL_BLOCK: usize = 8192;

/// Zero in a new thread.
#[repr(C, align(64))]
pub struct Thread {
    /// Stack pointer of who is inside a [section](crate::section), 0 if nobody is.
    pub section: AtomicUsize,
    /// The signal that waits for its end: a [`Held`](crate::held::Held), 0 if there is none.
    pub held: AtomicUsize,
    /// The kernel's id of the thread.
    id: AtomicU32,
    /// The [generation](owner::generation) in which that was so.
    id_of: AtomicU32,
    /// Its stack pointer when it was asked for.
    stack: AtomicUsize,
    /// 1 while it may be cancelled at any instruction.
    cancelled_anywhere: AtomicU32,
}

/// Byte offset for assembler code.
pub const SECTION: usize = core::mem::offset_of!(Thread, section);

const _: () = assert!(size_of::<Thread>() == 64);

// In the storage that each thread has from its start: nothing is allocated at the first use.
global_asm!(
    ".pushsection .tbss.ummunotify_thread,\"awT\",@nobits",
    ".p2align 6",
    ".globl ummunotify_thread",
    ".hidden ummunotify_thread",
    ".type ummunotify_thread,@object",
    "ummunotify_thread:",
    ".zero 64",
    ".size ummunotify_thread, 64",
    ".popsection",
);

/// The calling thread's.
#[inline(always)]
pub fn current() -> &'static Thread {
    let at: usize;
    // SAFETY: the fs base's first word is its own address (System V ABI, x86-64 TLS).
    unsafe {
        asm!("mov {0}, fs:[0]", "add {0}, qword ptr [rip + ummunotify_thread@GOTTPOFF]", out(reg) at,
             options(nostack, readonly, pure));
    }
    // SAFETY: the storage is there as long as the thread is; nobody else is handed the reference.
    unsafe { &*(at as *const Thread) }
}

/// How far from where it was asked for a thread's id is believed. Another task with the same storage has another stack.
const NEAR: usize = 256 << 10;

impl Thread {
    /// True if the caller, whose stack pointer is `here`, surely is the thread that owns this storage, and its id known.
    #[inline(always)]
    pub fn is_known(&self, here: usize) -> bool {
        let generation = owner::generation();
        let from = self.stack.load(Ordering::Relaxed).wrapping_sub(NEAR);
        generation != 0
            && self.id_of.load(Ordering::Relaxed) == generation
            && here.wrapping_sub(from) < 2 * NEAR
    }

    /// The kernel's id of the thread, if it [is known](Self::is_known).
    #[inline(always)]
    pub fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }

    /// Notes whether it may be cancelled at any instruction (pthread_setcanceltype(3)). libc's signal for that can't be held
    /// back: the thread [isn't known](Self::is_known) meanwhile, and blocks it.
    pub fn set_cancelled_anywhere(&self, anywhere: bool) {
        self.cancelled_anywhere.store(u32::from(anywhere), Ordering::Relaxed);
        self.id_of.store(0, Ordering::Relaxed);
    }

    /// Asks the kernel; false if the caller isn't the thread that owns this storage, or that can't be told.
    pub fn learn(&self, here: usize) -> bool {
        let generation = owner::generation();
        // libc tells the kernel of its list of robust locks in each thread that it makes, and after its fork; a task that
        // others make has none (futex_init_task in kernel/fork.c).
        let owns = generation != 0
            && self.cancelled_anywhere.load(Ordering::Relaxed) == 0
            && sys::robust_list().wrapping_sub(sys::thread_pointer()) < CONTROL_BLOCK;
        if owns {
            self.id.store(sys::gettid(), Ordering::Relaxed);
            self.id_of.store(generation, Ordering::Relaxed);
            self.stack.store(here, Ordering::Relaxed);
        }
        owns
    }
}
