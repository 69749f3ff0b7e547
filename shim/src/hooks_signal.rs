//! sigaction(2) and its kin: handlers are entered by stubs, which hold them back while the thread is inside a
//! [section](crate::section).
//!
//! A stub belongs to one handler for good, whatever signals it is installed for: so nothing has to be changed when a
//! handler is installed, and a vfork child, which has dispositions of its own but our memory, disturbs nobody. A stub
//! jumps to its handler, which finds registers and stack as the kernel made them.
//!
//! A stub that has interrupted code of ours also looks at the end of a call that the inline layer has just made, since its
//! handler may leave the call by siglongjmp ([`inline::finish`]). A signal that comes during that look, which takes some
//! tens of instructions, comes too early for that.
//!
//! Left alone: faults, which can't wait, and a function that nobody uses any more (sigvec). libc's own signal, by which a
//! thread is cancelled, is let in by pthread_setcanceltype.

use core::arch::global_asm;
use core::ffi::{c_int, c_void};
use core::ptr::with_exposed_provenance;
use core::sync::atomic::{AtomicUsize, Ordering};

use ummunotify_inline::IMAGE_SPAN;

use crate::{held, inline, next, section, sys, thread};

/// Handlers beyond that number are left alone as well.
const STUBS: usize = 1024;
/// Bytes of a stub.
const STUB: usize = 16;

/// sigset(3): the signal is blocked.
const SIG_HOLD: libc::sighandler_t = 2;

/// PTHREAD_CANCEL_ASYNCHRONOUS (pthread.h).
const CANCEL_ASYNCHRONOUS: c_int = 1;

/// The handlers of the stubs, each set once.
static HANDLERS: [AtomicUsize; STUBS] = [const { AtomicUsize::new(0) }; STUBS];

unsafe extern "C" {
    fn ummunotify_signal_stubs();
}

global_asm!(
    ".pushsection .text.ummunotify_signal,\"ax\",@progbits",
    ".p2align 6",
    ".type ummunotify_signal_stubs,@function",
    "ummunotify_signal_stubs:",
    ".cfi_startproc",
    ".set ummunotify_stub, 0",
    ".rept {stubs}",
    ".p2align 4",
    "endbr64",
    "mov r11d, ummunotify_stub",
    "jmp 2f",
    ".set ummunotify_stub, ummunotify_stub + 1",
    ".endr",
    "2:",
    "mov rax, qword ptr [rip + ummunotify_thread@GOTTPOFF]",
    "cmp qword ptr fs:[rax + {section}], 0",
    "jne 4f",
    // Or code of ours was interrupted (struct sigcontext's rip).
    "mov rax, [rdx + 168]",
    "lea rcx, [rip + __ehdr_start]",
    "sub rax, rcx",
    "cmp rax, {span}",
    "jb 4f",
    "3:",
    "lea rax, [rip + {handlers}]",
    "mov r11, [rax + 8*r11]",
    // As the kernel leaves it: no vector register holds an argument.
    "xor eax, eax",
    "notrack jmp r11",
    // Up to here what the kernel said is in rdx; from here on in r9, while signals aren't blocked.
    "4:",
    "mov r9, rdx",
    ".globl ummunotify_signal_blocking",
    ".hidden ummunotify_signal_blocking",
    "ummunotify_signal_blocking:",
    "push rdi",
    ".cfi_adjust_cfa_offset 8",
    "push rsi",
    ".cfi_adjust_cfa_offset 8",
    "push rdx",
    ".cfi_adjust_cfa_offset 8",
    "push r11",
    ".cfi_adjust_cfa_offset 8",
    "push -1",
    ".cfi_adjust_cfa_offset 8",
    "mov eax, {sigprocmask}",
    "mov edi, {setmask}",
    "mov rsi, rsp",
    "mov rdx, rsp",
    "mov r10d, 8",
    "syscall",
    "mov rdi, [rsp + 32]",
    "mov rsi, [rsp + 24]",
    "mov rdx, [rsp + 16]",
    "mov rcx, [rsp + 8]",
    "lea r8, [rsp + 40]",
    "mov r9, rsp",
    "call {must_wait}",
    "test rax, rax",
    "jnz 6f",
    ".cfi_remember_state",
    "mov r9, [rsp + 16]",
    "mov eax, {sigprocmask}",
    "mov edi, {setmask}",
    "mov rsi, rsp",
    "xor edx, edx",
    "mov r10d, 8",
    "syscall",
    "lea rsp, [rsp + 8]",
    ".cfi_adjust_cfa_offset -8",
    "pop r11",
    ".cfi_adjust_cfa_offset -8",
    "pop rdx",
    ".cfi_adjust_cfa_offset -8",
    "pop rsi",
    ".cfi_adjust_cfa_offset -8",
    "pop rdi",
    ".cfi_adjust_cfa_offset -8",
    "jmp 3b",
    ".cfi_restore_state",
    ".globl ummunotify_signal_decided",
    ".hidden ummunotify_signal_decided",
    "ummunotify_signal_decided:",
    // Goes on with what was interrupted, as rt_sigreturn would, but for the mask.
    "6:",
    "mov rbx, rax",
    // The vector registers. FP_XSTATE_MAGIC1 says that there is more than FXSAVE's (struct _fpx_sw_bytes).
    "mov rcx, [rbx + 224]",
    "test rcx, rcx",
    "jz 8f",
    "cmp dword ptr [rcx + 464], 0x46505853",
    "jne 7f",
    "mov eax, [rcx + 472]",
    "mov edx, [rcx + 476]",
    "xrstor64 [rcx]",
    "jmp 8f",
    "7:",
    "fxrstor64 [rcx]",
    "8:",
    // struct sigcontext. The last two come by way of the stack, from below its red zone, where the frame was.
    "mov rcx, [rbx + 160]",
    "mov rax, [rbx + 168]",
    "mov [rcx - 136], rax",
    "mov rax, [rbx + 176]",
    "mov [rcx - 144], rax",
    "mov r8, [rbx + 40]",
    "mov r9, [rbx + 48]",
    "mov r10, [rbx + 56]",
    "mov r11, [rbx + 64]",
    "mov r12, [rbx + 72]",
    "mov r13, [rbx + 80]",
    "mov r14, [rbx + 88]",
    "mov r15, [rbx + 96]",
    "mov rdi, [rbx + 104]",
    "mov rsi, [rbx + 112]",
    "mov rbp, [rbx + 120]",
    "mov rdx, [rbx + 136]",
    "mov rax, [rbx + 144]",
    "lea rsp, [rcx - 144]",
    "mov rcx, [rbx + 152]",
    "mov rbx, [rbx + 128]",
    "popfq",
    "ret 128",
    ".cfi_endproc",
    ".size ummunotify_signal_stubs, . - ummunotify_signal_stubs",
    // Called at the end of a section with the handler that waits. Its return is the return from here.
    ".type ummunotify_signal_enter,@function",
    "ummunotify_signal_enter:",
    ".cfi_startproc",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov r12, rsp",
    // The frame's place: below us, and as far from a line's start as the kernel had it; or where it is.
    "mov rcx, [rdi + {len}]",
    "mov rax, [rdi + {frame}]",
    "test rcx, rcx",
    "jz 9f",
    "lea rdx, [rsp - 192]",
    "sub rdx, rcx",
    "and rdx, -64",
    "and eax, 63",
    "add rax, rdx",
    "9:",
    "mov rbx, rax",
    "lea rsp, [rax - 8]",
    "mov rsi, rax",
    "mov rdx, r12",
    "call {build}",
    "test rax, rax",
    "jz 10f",
    "mov rdi, rax",
    "call ummunotify_signal_enter",
    "10:",
    "mov rsp, rbx",
    "mov rdi, [r12]",
    "mov rsi, [r12 + 8]",
    "mov rdx, [r12 + 16]",
    "mov r11, [r12 + 24]",
    // As the kernel leaves it; what the program had is in the frame.
    "fninit",
    "mov dword ptr [rsp - 8], 0x1f80",
    "ldmxcsr [rsp - 8]",
    "jmp 3b",
    ".cfi_endproc",
    ".size ummunotify_signal_enter, . - ummunotify_signal_enter",
    ".popsection",
    stubs = const STUBS,
    handlers = sym HANDLERS,
    section = const thread::SECTION,
    must_wait = sym must_wait,
    span = const IMAGE_SPAN,
    sigprocmask = const libc::SYS_rt_sigprocmask,
    setmask = const libc::SIG_SETMASK,
    len = const held::LEN,
    frame = const held::FRAME,
    build = sym held::build,
);

/// Whether the handler has to wait: then the registers to go on with, else 0. All signals are blocked; but for `mask`.
extern "C" fn must_wait(
    signal: c_int,
    information: *const c_void,
    context: *const libc::ucontext_t,
    stub: usize,
    frame: usize,
    mask: &mut u64,
) -> *const libc::ucontext_t {
    // SAFETY: the stub passes on what the kernel gave it, which fills all of it, whatever the flags.
    let mut registers = unsafe { &(*context).uc_mcontext.gregs };
    while let Some(before) = undecided(registers) {
        // SAFETY: what the kernel gave to that stub, which runs above us.
        registers = unsafe { &(*before).uc_mcontext.gregs };
    }
    let [stack, code] = [libc::REG_RSP, libc::REG_RIP].map(|n| registers[n as usize] as usize);
    inline::finish(code, stack);
    if !section::is_interrupted(code, stack) {
        return core::ptr::null();
    }
    // SAFETY: as above.
    unsafe { held::keep(signal, information.addr(), context, stub, frame, mask) }
}

/// If these registers are those of a stub that hasn't decided yet, what the kernel said of the signal that it was entered
/// for: the handler that is to be, on whatever stack, has interrupted what that signal has.
fn undecided(registers: &[i64; 23]) -> Option<*const libc::ucontext_t> {
    unsafe extern "C" {
        #[link_name = "ummunotify_signal_blocking"]
        static BLOCKING: u8;
        #[link_name = "ummunotify_signal_decided"]
        static DECIDED: u8;
    }
    let register = |n: c_int| registers[n as usize] as usize;
    let code = register(libc::REG_RIP);
    let context = if (address(0)..(&raw const BLOCKING).addr()).contains(&code) {
        register(libc::REG_RDX)
    } else if ((&raw const BLOCKING).addr()..(&raw const DECIDED).addr()).contains(&code) {
        register(libc::REG_R9)
    } else {
        return None;
    };
    Some(with_exposed_provenance(context))
}

/// Enters the handler that waits, and returns when it does.
#[cold]
pub fn enter(held: &held::Held) {
    unsafe extern "C" {
        fn ummunotify_signal_enter(held: &held::Held);
    }
    // SAFETY: the signal was held back in this thread, and all are blocked.
    unsafe { ummunotify_signal_enter(held) };
}

fn address(stub: usize) -> usize {
    ummunotify_signal_stubs as *const () as usize + stub * STUB
}

/// The stub of a handler; the handler itself where it is left alone, or there are no stubs left.
fn stub_for(signal: c_int, handler: usize) -> usize {
    let fault = matches!(signal, libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE | libc::SIGSYS);
    if fault || matches!(handler, libc::SIG_DFL | libc::SIG_IGN | SIG_HOLD | libc::SIG_ERR) {
        return handler;
    }
    for (stub, place) in HANDLERS.iter().enumerate() {
        let taken = match place.load(Ordering::Acquire) {
            0 => place
                .compare_exchange(0, handler, Ordering::AcqRel, Ordering::Acquire)
                .map_or_else(|now| now, |_| handler),
            taken => taken,
        };
        if taken == handler {
            return address(stub);
        }
    }
    handler
}

/// What a program is told of the handler that the kernel has.
fn handler_of(installed: usize) -> usize {
    let offset = installed.wrapping_sub(address(0));
    if offset >= STUBS * STUB || !offset.is_multiple_of(STUB) {
        return installed;
    }
    HANDLERS.get(offset / STUB).map_or(installed, |handler| handler.load(Ordering::Acquire))
}

macro_rules! sigaction_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// sigaction(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(
            signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction,
        ) -> c_int {
            let wrapped;
            let mut passed = new;
            if !new.is_null() {
                // SAFETY: libc reads it as well.
                let action = unsafe { *new };
                wrapped = libc::sigaction { sa_sigaction: stub_for(signal, action.sa_sigaction), ..action };
                passed = &raw const wrapped;
            }
            let result = next!($name as fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;
                (signal, passed, old); { sys::set_errno(libc::ENOSYS); -1 });
            if result == 0 && !old.is_null() {
                // SAFETY: libc has written it.
                unsafe { (*old).sa_sigaction = handler_of((*old).sa_sigaction) };
            }
            result
        }
    )*};
}

sigaction_hooks! {
    sigaction c"sigaction";
    __sigaction c"__sigaction";
}

macro_rules! signal_hooks {
    ($($hook:ident $name:literal;)*) => {$(
        /// signal(2), as BSD or System V had it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $hook(signal: c_int, handler: usize) -> usize {
            handler_of(next!($name as fn(c_int, usize) -> usize; (signal, stub_for(signal, handler)); {
                sys::set_errno(libc::ENOSYS);
                libc::SIG_ERR
            }))
        }
    )*};
}

signal_hooks! {
    signal c"signal";
    bsd_signal c"bsd_signal";
    ssignal c"ssignal";
    // What signal is where a program asks for ISO C or X/Open alone.
    __sysv_signal c"__sysv_signal";
    sysv_signal c"sysv_signal";
    sigset c"sigset";
}

/// pthread_setcanceltype(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int {
    let thread = thread::current();
    // Before: one that is due already takes the thread at once.
    if kind == CANCEL_ASYNCHRONOUS {
        thread.set_cancelled_anywhere(true);
    }
    let result = next!(c"pthread_setcanceltype" as fn(c_int, *mut c_int) -> c_int; (kind, old); libc::ENOSYS);
    if result == 0 && kind != CANCEL_ASYNCHRONOUS {
        thread.set_cancelled_anywhere(false);
    }
    result
}
