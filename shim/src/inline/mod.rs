//! The inline layer: calls that libc's own code makes are looked at in the process that makes them.
//!
//! The supervisor replaces the `mov $number,%eax` in front of a `syscall` by a jump to a stub, which comes here
//! ([`entry`]). If the call hits no region of any context of this address space, or if the hit could be recorded, the
//! call is made by the *gate*: the one instruction whose return address the filter lets through. Then whatever was
//! registered or dequeued meanwhile is hit again. Everything else is made by another instruction and trapped as
//! ever: this layer saves the trap where it surely can be saved, and nothing rests on it.
//!
//! When it may be saved is decided by what lies in shared memory: our list must be stable and hold as many contexts
//! as the supervisor counts, each of which says that its opener records. A list that is being changed, a context
//! that another copy of this library opened, or one whose descriptor is gone while its counter is still mapped:
//! then calls are trapped. So are those of forked children, whose list is wiped. Where userfaultfd watches too, a call
//! that hits is trapped: the supervisor, which hears of it twice, then takes it for one.
//!
//! Two calls that touch nothing in the usual case come here as well, so that they aren't trapped then: clone3, by which
//! glibc makes threads and posix_spawn's children, and execve by such a child. The new task has a stack of its own, so
//! clone3 is made by another gate, which finds its way back by a register.
//!
//! The rules of the code in section `.text.ummunotify_inline` ([`entry`], [`fast`]), which runs at the application's
//! expense: no vector register, no call out of the section, no array copied, no write to memory that other threads
//! write; exact unwind tables at each instruction. `tests/tests/inline.rs` reads its disassembly.
//!
//! The library is linked to an address of its own so that the gate is at the same place in every process under the
//! same filter, and is part of an image that unwinders know.

mod entry;
mod fast;
mod list;
mod slow;

use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ummunotify_abi::wire::Op;
use ummunotify_inline::{IMAGE_BASE, IMAGE_SPAN};

use crate::door::{Buffer, Connection};
use crate::environment::Inline;
use crate::log::{self, Part};
use crate::sys;

pub use entry::call;
pub use list::List;
pub use list::{MUNMAP_HITS, add, keep, remove, take_spare};
pub use slow::finish;

/// 1 once the sites of this image were patched; a forked copy inherits both.
static PATCHED: AtomicU32 = AtomicU32::new(0);

/// The addresses of our gates to be offered to the supervisor, that for calls and that for tasks; 0 if this layer
/// can't work, or isn't to.
pub fn offer(inline: Inline) -> [u64; 2] {
    if inline == Inline::Off {
        return [0; 2];
    }
    let gates = entry::gates();
    let reason = if !gates.iter().all(|gate| (IMAGE_BASE..IMAGE_BASE + IMAGE_SPAN).contains(gate)) {
        "the library isn't at its address (something else lies there, or it is loaded twice)"
    } else if !cpu_fits() {
        "the processor saves its vector registers in a way that isn't known"
    } else {
        return gates;
    };
    if inline == Inline::Wanted {
        log::warning(&[Part::Text("the inline layer isn't used: "), Part::Text(reason)]);
    }
    [0; 2]
}

/// Lets the supervisor patch the sites, unless that was done. A failure leaves the traps.
pub fn patch(connection: &Connection, inline: Inline) {
    if PATCHED.swap(1, Ordering::AcqRel) != 0 {
        return;
    }
    let entry = entry::address();
    let gently = if inline == Inline::Welcome { sys::gettid().into() } else { 0 };
    let asked = connection.ask(Op::Patch, [entry, gently, 0, 0, 0, 0], None, &mut Buffer::<0>::new());
    serialize();
    match asked {
        Ok(_) => {}
        Err(errno) => {
            PATCHED.store(0, Ordering::Release);
            if inline == Inline::Wanted {
                log::warning(&[
                    Part::Text("the inline layer isn't used: patching this process failed with "),
                    Part::Errno(errno),
                ]);
            }
        }
    }
}

/// What was prefetched of the text that was patched meanwhile is thrown away (Intel SDM volume 3, "Serializing
/// Instructions").
fn serialize() {
    let _ = __cpuid_count(0, 0);
}

/// Bits of the state components that [`entry`] saves: x87, SSE, AVX and AVX-512. Code of ours and of libc's memcpy
/// uses no others.
const COMPONENTS: u64 = 0xe7;
/// Bytes that they take at most; a multiple of 64.
const VECTORS: usize = 2752;

/// Whether the processor has XSAVEC, which saves only what is in use.
static COMPACT: AtomicBool = AtomicBool::new(false);

/// Whether XSAVE puts those components into the room that there is, and LAHF exists.
fn cpu_fits() -> bool {
    const XSAVE_ENABLED: u32 = 1 << 27;
    const LAHF: u32 = 1;
    const XSAVEC: u32 = 1 << 1;
    let features = __cpuid_count(1, 0).ecx;
    let more = __cpuid_count(0x8000_0001, 0).ecx;
    if features & XSAVE_ENABLED == 0 || more & LAHF == 0 {
        return false;
    }
    COMPACT.store(__cpuid_count(0xd, 1).eax & XSAVEC != 0, Ordering::Relaxed);
    let (low, high): (u32, u32);
    // SAFETY: the bit above says that the instruction is enabled; it reads a register.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack)) };
    let enabled = (u64::from(high) << 32 | u64::from(low)) & COMPONENTS;
    (2..8).filter(|n| enabled >> n & 1 == 1).all(|n| {
        let component = __cpuid_count(0xd, n);
        (component.ebx + component.eax) as usize <= VECTORS
    })
}

/// Who is told that a context's descriptor must become readable: the supervisor, by a trapped call.
pub fn ring(inode: u64) {
    use ummunotify_abi::wire::{HELLO_PRCTL, RING_PRCTL};
    sys::again(|| {
        // SAFETY: integers; no kernel knows the option.
        unsafe {
            sys::call(libc::SYS_prctl, HELLO_PRCTL as usize, RING_PRCTL as usize, inode as usize, 0, 0, 0)
        }
    });
}

/// An errno that says that the list has no room.
const FULL: c_int = libc::ENFILE;
