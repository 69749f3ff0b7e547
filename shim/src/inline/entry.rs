//! Where patched sites arrive, and the gates.
//!
//! A stub comes with the call's number in eax and the address behind the site's `syscall` in r11; all other
//! registers are the application's, but for rcx, which the call would overwrite as it overwrites rax and r11. The
//! stack below rsp may be the site's red zone. Unwinders see a frame that was called by the site.

use core::arch::{asm, global_asm};
use core::mem::offset_of;

use ummunotify_engine::EPOCH;
use ummunotify_inline::{MAP_FIXED, nr};

use super::fast::Frame;
use super::{COMPACT, COMPONENTS, VECTORS, fast, list, slow};
use crate::owner::{PAGE, Page};
use crate::sys;

/// Bytes of the room for [`fast::Frame`].
pub const FRAME: usize = 208;
/// In [`PAGE`].
const GENERATION: usize = offset_of!(Page, list) + list::GENERATION;
const FIRST_ARENA: usize = offset_of!(Page, list) + list::FIRST_ARENA;

unsafe extern "C" {
    fn ummunotify_inline_entry();
    fn ummunotify_inline_gate();
    fn ummunotify_inline_tasks();
}

/// Where stubs jump to.
pub fn address() -> u64 {
    ummunotify_inline_entry as *const () as u64
}

/// The return addresses of the gates' `syscall`: that for calls, and that for tasks.
pub fn gates() -> [u64; 2] {
    [ummunotify_inline_gate as *const () as u64, ummunotify_inline_tasks as *const () as u64]
}

/// The call of a thread that was interrupted at `code` with that stack pointer, if it has been made by the gate and its
/// end wasn't looked at: nothing but instructions of [`entry`](self) in between.
pub fn made(code: usize, stack: usize) -> Option<*const Frame> {
    unsafe extern "C" {
        fn ummunotify_inline_ended();
        fn ummunotify_inline_look();
        fn ummunotify_inline_looked();
    }
    let between = |from: unsafe extern "C" fn(), to: unsafe extern "C" fn()| {
        (from as *const () as usize..to as *const () as usize).contains(&code)
    };
    let unlooked = between(ummunotify_inline_gate, ummunotify_inline_ended)
        || between(ummunotify_inline_look, ummunotify_inline_looked);
    unlooked.then(|| core::ptr::with_exposed_provenance(stack))
}

/// Makes a call as a patched site does: this is one.
///
/// # Safety
/// Whatever the call demands of its arguments.
pub unsafe fn call(number: i64, args: [usize; 6]) -> isize {
    let result: isize;
    let [a, b, c, d, e, f] = args;
    if PAGE.list.count() == 0 {
        // It would be trapped anyway; and whether the processor fits was asked before anything was listed.
        // SAFETY: passed on to the caller.
        return unsafe { sys::call(number, a, b, c, d, e, f) };
    }
    // SAFETY: the entry comes back behind the instruction, or to it, with all registers but rax, rcx and r11.
    unsafe {
        asm!(
            "lea r11, [rip + 2f]",
            "jmp {entry}",
            "syscall",
            "2:",
            entry = sym ummunotify_inline_entry,
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

global_asm!(
    // Makes room for the vector registers below the frame and saves them there; those that are in use, where the
    // processor can. XRSTOR wants a header of zeroes where nothing is written.
    ".macro ummunotify_save_vectors",
    "lea rsp, [rsp - {vectors}]",
    "xor eax, eax",
    "mov [rsp + 512], rax",
    "mov [rsp + 520], rax",
    "mov [rsp + 528], rax",
    "mov [rsp + 536], rax",
    "mov [rsp + 544], rax",
    "mov [rsp + 552], rax",
    "mov [rsp + 560], rax",
    "mov [rsp + 568], rax",
    "mov eax, {components}",
    "xor edx, edx",
    "cmp byte ptr [rip + {compact}], 0",
    "je 20f",
    "xsavec64 [rsp]",
    "jmp 21f",
    "20:",
    "xsave64 [rsp]",
    "21:",
    ".endm",
    ".macro ummunotify_restore_vectors",
    "mov eax, {components}",
    "xor edx, edx",
    "xrstor64 [rsp]",
    "add rsp, {vectors}",
    ".endm",
    // Has the flags, the stack and rbp as the site had them, rcx in rax, and in the register where the site goes on.
    ".macro ummunotify_leave behind",
    "mov rax, [rbp - 8]",
    "add al, 127",
    "sahf",
    "mov rax, rcx",
    ".cfi_remember_state",
    "mov rsp, rbp",
    ".cfi_def_cfa rsp, 144",
    "pop rbp",
    ".cfi_def_cfa_offset 136",
    ".cfi_same_value rbp",
    "pop \\behind",
    ".cfi_def_cfa_offset 128",
    ".cfi_register rip, \\behind",
    "lea rsp, [rsp + 128]",
    ".cfi_def_cfa_offset 0",
    ".endm",
    ".pushsection .text.ummunotify_inline,\"ax\",@progbits",
    ".p2align 12",
    ".type ummunotify_inline_entry,@function",
    "ummunotify_inline_entry:",
    ".cfi_startproc simple",
    ".cfi_def_cfa rsp, 0",
    ".cfi_register rip, r11",
    "endbr64",
    // The arithmetic flags; the number goes to rcx meanwhile.
    "mov ecx, eax",
    "lahf",
    "seto al",
    // mmap without MAP_FIXED isn't watched: back to the site's own instruction.
    "cmp ecx, {mmap}",
    "jne 1f",
    "test r10d, {fixed}",
    "jnz 1f",
    "add al, 127",
    "sahf",
    "mov eax, ecx",
    "lea r11, [r11 - 2]",
    "notrack jmp r11",
    "1:",
    // The red zone.
    "lea rsp, [rsp - 128]",
    ".cfi_def_cfa_offset 128",
    "push r11",
    ".cfi_def_cfa_offset 136",
    ".cfi_offset rip, -136",
    "push rbp",
    ".cfi_def_cfa_offset 144",
    ".cfi_offset rbp, -144",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "push rax",
    "lea rsp, [rsp - {frame}]",
    "and rsp, -64",
    "mov [rsp], rcx",
    "mov [rsp + 8], rdi",
    "mov [rsp + 16], rsi",
    "mov [rsp + 24], rdx",
    "mov [rsp + 32], r10",
    "mov [rsp + 40], r8",
    "mov [rsp + 48], r9",
    "mov qword ptr [rsp + 72], 0",
    "mov r8, rsp",
    "call {begin}",
    "2:",
    "mov rdi, [rsp + 8]",
    "mov rsi, [rsp + 16]",
    "mov rdx, [rsp + 24]",
    "mov r10, [rsp + 32]",
    "mov r8, [rsp + 40]",
    "mov r9, [rsp + 48]",
    "cmp eax, 1",
    "jne 5f",
    // GATE.
    "mov rax, [rsp]",
    "syscall",
    "ummunotify_inline_gate:",
    "3:",
    // As `end` has it, for one context; whose arena stays mapped, if the list has moved since.
    "cmp qword ptr [rsp + 72], {by_one}",
    "jne 9f",
    "mov rcx, [rip + {page} + {generation}]",
    "cmp rcx, [rsp + {frame_generation}]",
    "jne 9f",
    "mov rcx, [rip + {page} + {first_arena}]",
    "mov rcx, [rcx + {epoch}]",
    "cmp rcx, [rsp + {frame_begin}]",
    "jne 9f",
    "mov rcx, rax",
    ".globl ummunotify_inline_ended",
    ".hidden ummunotify_inline_ended",
    "ummunotify_inline_ended:",
    "10:",
    "ummunotify_leave r11",
    "notrack jmp r11",
    ".cfi_restore_state",
    ".globl ummunotify_inline_look",
    ".hidden ummunotify_inline_look",
    "ummunotify_inline_look:",
    "9:",
    "mov [rsp + 56], rax",
    "mov rdi, rsp",
    "call {end}",
    "test eax, eax",
    "jnz 8f",
    ".globl ummunotify_inline_looked",
    ".hidden ummunotify_inline_looked",
    "ummunotify_inline_looked:",
    "4:",
    "mov rdi, [rsp + 8]",
    "mov rsi, [rsp + 16]",
    "mov rdx, [rsp + 24]",
    "mov r10, [rsp + 32]",
    "mov r8, [rsp + 40]",
    "mov r9, [rsp + 48]",
    "mov rcx, [rsp + 56]",
    "jmp 10b",
    // PASS, TRAP or SLOW.
    "5:",
    "jb 6f",
    "cmp eax, 2",
    "jne 7f",
    "mov rax, [rsp]",
    "syscall",
    "jmp 3b",
    // PASS: back to the site's own instruction.
    "6:",
    "mov rcx, [rsp]",
    "ummunotify_leave r11",
    "lea r11, [r11 - 2]",
    "notrack jmp r11",
    ".cfi_restore_state",
    // TASK: r9, which no code at such a site uses, leads back, by the new task's stack as well.
    "12:",
    "mov rcx, [rsp]",
    "ummunotify_leave r9",
    "syscall",
    "ummunotify_inline_tasks:",
    "notrack jmp r9",
    ".cfi_restore_state",
    // SLOW.
    "7:",
    "cmp eax, 4",
    "je 12b",
    "cmp dword ptr [rsp], {munmap}",
    "jne 13f",
    "mov rdi, rsp",
    "call ummunotify_inline_hit",
    "cmp eax, 3",
    "jne 2b",
    "13:",
    "ummunotify_save_vectors",
    "lea rdi, [rsp + {vectors}]",
    "call {slow_begin}",
    "mov [rsp + {vectors} + 64], eax",
    "ummunotify_restore_vectors",
    "mov eax, [rsp + 64]",
    "jmp 2b",
    "8:",
    "ummunotify_save_vectors",
    "lea rdi, [rsp + {vectors}]",
    "call {slow_end}",
    "ummunotify_restore_vectors",
    "jmp 4b",
    ".cfi_endproc",
    ".size ummunotify_inline_entry, . - ummunotify_inline_entry",
    ".popsection",
    // XSAVE and XRSTOR cost as much as a system call. What a hit needs touches the low halves of 16 registers, if any, by
    // instructions that leave the others alone.
    ".pushsection .text.ummunotify_inline_hit,\"ax\",@progbits",
    ".p2align 6",
    ".type ummunotify_inline_hit,@function",
    "ummunotify_inline_hit:",
    ".cfi_startproc",
    "sub rsp, 264",
    ".cfi_adjust_cfa_offset 264",
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "movaps [rsp + 16 * \\n], xmm\\n",
    ".endr",
    "call {hit}",
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "movaps xmm\\n, [rsp + 16 * \\n]",
    ".endr",
    "add rsp, 264",
    ".cfi_adjust_cfa_offset -264",
    "ret",
    ".cfi_endproc",
    ".size ummunotify_inline_hit, . - ummunotify_inline_hit",
    ".popsection",
    mmap = const nr::MMAP,
    munmap = const nr::MUNMAP,
    fixed = const MAP_FIXED,
    by_one = const fast::BY_ONE,
    page = sym PAGE,
    generation = const GENERATION,
    first_arena = const FIRST_ARENA,
    epoch = const EPOCH,
    frame_generation = const offset_of!(Frame, generation),
    frame_begin = const offset_of!(Frame, begins),
    frame = const FRAME,
    vectors = const VECTORS,
    components = const COMPONENTS,
    compact = sym COMPACT,
    begin = sym fast::begin,
    end = sym fast::end,
    hit = sym slow::hit,
    slow_begin = sym slow::begin,
    slow_end = sym slow::end,
);
