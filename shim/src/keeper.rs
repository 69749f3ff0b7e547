//! Starting a supervisor that no wait() of the client ever sees.
//!
//! A child with exit signal 0 is invisible to wait(), but only until it executes a program, which sets the signal
//! to SIGCHLD (begin_new_exec); and an orphan is reaped by subreapers and by pid 1. So the supervisor's parent is
//! a child with exit signal 0 that never executes anything: the keeper. It gives up all that it copied from the
//! client, descriptors and memory, and waits.
//!
//! Three steps, each in a process of its own:
//! * the *launcher* shares the client's memory (the client's thread sleeps), makes the keeper and ends. It is
//!   there because fork copies a registration for restartable sequences, which the kernel then writes to, while
//!   a CLONE_VM child has none (rseq_fork): the keeper has no memory left to write to, and would die of it.
//! * the *keeper* is a copy of the launcher, and by CLONE_PARENT the client's child.
//! * the *supervisor* is executed by a vfork child of the keeper.
//!
//! All of it happens with all signals blocked, by raw system calls.

use core::arch::{asm, global_asm};
use core::ffi::{c_char, c_int, c_void};
use core::mem::size_of;

use ummunotify_abi::config::SUPERVISE_FD;
use ummunotify_abi::wire::{self, Reply};

use crate::door::{self, Owned};
use crate::sys;

/// Bytes of each stack.
pub const STACK: usize = 16384;

/// What the three processes need to know, in the client's memory.
#[repr(C)]
pub struct Launch {
    /// Path of the supervisor's program.
    pub program: *const c_char,
    /// Its arguments.
    pub arguments: *const *const c_char,
    /// Its environment.
    pub environment: *const *const c_char,
    /// Its end of the control socket.
    pub socket: c_int,
    /// Its standard error is the client's.
    pub keeps_stderr: bool,
    /// End of the stack that the supervisor's process uses before it executes.
    pub stack_top: *mut c_void,
    /// The keeper's pid or a negative errno.
    pub result: isize,
}

/// Starts keeper and supervisor. `socket` is closed here.
///
/// # Errors
/// The errno of clone. What fails later arrives as a reply on the control socket, or as its end.
///
/// # Safety
/// `launch` holds valid pointers and two stacks that nobody else uses.
pub unsafe fn start(
    launch: &mut Launch,
    socket: Owned,
    launcher_stack_top: *mut c_void,
) -> Result<(), c_int> {
    launch.socket = socket.get();
    launch.result = -(libc::EAGAIN as isize);
    let argument = (&raw mut *launch).cast();
    // SAFETY: the launcher uses raw system calls alone, on its own stack.
    let pid = unsafe { sys::vfork_on(launcher_stack_top, 0, 0, launcher, argument) };
    if pid < 0 {
        return Err(-pid as c_int);
    }
    // Somebody who waits with __WALL could be faster; then it is reaped as well.
    // SAFETY: no memory is involved.
    sys::again(|| unsafe { sys::call(libc::SYS_wait4, pid as usize, 0, libc::__WCLONE as usize, 0, 0, 0) });
    // The launcher wrote it.
    // SAFETY: a valid reference.
    let result = unsafe { (&raw const launch.result).read_volatile() };
    if result < 0 { Err(-result as c_int) } else { Ok(()) }
}

unsafe extern "C" fn launcher(argument: *mut c_void) -> ! {
    let launch = argument.cast::<Launch>();
    // With CLONE_PARENT the exit signal is the launcher's own: 0 (copy_process).
    // SAFETY: the copy stays in `keeper`.
    let pid = unsafe { sys::fork_raw(libc::CLONE_PARENT | libc::CLONE_UNTRACED) };
    // SAFETY: the client's thread, which owns it, sleeps until we end; the keeper has its own copy.
    unsafe {
        if pid == 0 {
            keeper(&*launch);
        }
        (&raw mut (*launch).result).write_volatile(pid);
    }
    sys::exit_process(0)
}

fn keeper(launch: &Launch) -> ! {
    // A process group of its own, but in the client's session: see the supervisor's `detach`.
    // SAFETY: terminated strings and integers.
    let pid = unsafe {
        sys::call(libc::SYS_setpgid, 0, 0, 0, 0, 0, 0);
        sys::call(
            libc::SYS_prctl,
            libc::PR_SET_NAME as usize,
            c"ummunotify-keep".as_ptr() as usize,
            0,
            0,
            0,
            0,
        );
        let argument = (&raw const *launch).cast_mut().cast();
        sys::vfork_on(launch.stack_top, 0, libc::SIGCHLD, supervisor, argument)
    };
    if pid < 0 {
        report(launch.socket, pid);
    }
    // Not earlier: the supervisor's paths may be relative to the client's directory.
    // SAFETY: a terminated string.
    unsafe { sys::call(libc::SYS_chdir, c"/".as_ptr() as usize, 0, 0, 0, 0, 0) };
    close_from(0);
    if pid < 0 {
        sys::exit_process(1);
    }
    // SAFETY: nothing of this copy is used any more, and the code below stays on its own page.
    unsafe { asm!("jmp {keep}", keep = sym ummunotify_keep, in("rdi") pid, options(noreturn)) }
}

/// The supervisor's process before it executes. It shares the keeper's memory.
unsafe extern "C" fn supervisor(argument: *mut c_void) -> ! {
    // SAFETY: the keeper sleeps until we execute or end.
    let launch = unsafe { &*argument.cast::<Launch>() };
    arrange_descriptors(launch);
    raise_descriptor_limit();
    reset_signals();
    // SAFETY: the client prepared terminated strings and arrays.
    let failed = unsafe {
        sys::call(
            libc::SYS_execve,
            launch.program as usize,
            launch.arguments as usize,
            launch.environment as usize,
            0,
            0,
            0,
        )
    };
    report(SUPERVISE_FD, failed);
    sys::exit_process(127)
}

/// The control socket at its number, /dev/null below it, nothing above it.
fn arrange_descriptors(launch: &Launch) {
    let (socket, control) = (launch.socket as usize, SUPERVISE_FD as usize);
    // SAFETY: no memory is involved.
    unsafe {
        if socket == control {
            sys::fcntl(SUPERVISE_FD, libc::F_SETFD, 0);
        } else {
            sys::call(libc::SYS_dup3, socket, control, 0, 0, 0, 0);
        }
    }
    let mut nothing = sys::open(b"/dev/null\0", libc::O_RDWR);
    if nothing < 0 {
        // The numbers must be taken, or the supervisor's own descriptors would become its standard ones.
        nothing = sys::open(b"/\0", libc::O_RDONLY);
    }
    for standard in 0..3 {
        if standard == 2 && launch.keeps_stderr && sys::fcntl(2, libc::F_GETFD, 0) >= 0 {
            continue;
        }
        // SAFETY: no memory is involved.
        unsafe { sys::call(libc::SYS_dup2, nothing as usize, standard, 0, 0, 0, 0) };
    }
    close_from(SUPERVISE_FD as usize + 1);
}

/// A client's soft limit is made for the client.
fn raise_descriptor_limit() {
    let mut limit = sys::descriptor_limit();
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one rlimit.
    unsafe {
        sys::call(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE as usize, &raw const limit as usize, 0, 0, 0);
    }
}

fn close_from(first: usize) {
    // SAFETY: descriptors of a process of our own.
    let result = unsafe { sys::call(libc::SYS_close_range, first, u32::MAX as usize, 0, 0, 0, 0) };
    if result < 0 {
        // Before Linux 5.9, or forbidden.
        for fd in first..65536 {
            sys::close(fd as c_int);
        }
    }
}

/// What a program expects: handlers go by themselves, ignored signals and the mask don't.
fn reset_signals() {
    // The kernel's structure, which is shorter than libc's: handler, flags, restorer, mask.
    let default = [0u64; 4];
    let none = 0u64;
    for signal in 1..=64usize {
        // SAFETY: structures of the size that the kernel reads; SIGKILL and SIGSTOP are refused.
        unsafe { sys::call(libc::SYS_rt_sigaction, signal, default.as_ptr() as usize, 0, 8, 0, 0) };
    }
    // SAFETY: as above.
    unsafe {
        sys::call(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK as usize, &raw const none as usize, 0, 8, 0, 0);
    }
}

/// Tells the client why there is no supervisor.
fn report(socket: c_int, failed: isize) {
    let reply =
        Reply { magic: wire::MAGIC, version: wire::WIRE_VERSION, result: failed as i64, args: [0; 6] };
    // Nobody is left to tell if that fails; the client sees the socket's end.
    let _ = door::send(socket, (&raw const reply).cast(), size_of::<Reply>(), &[]);
}

unsafe extern "C" {
    /// Unmaps everything but its own page and waits for the process `pid`, its child; then ends.
    fn ummunotify_keep(pid: usize) -> !;
}

// Position-independent and without a stack. Aligned so that it lies within one page.
//
// munmap refuses a range with a sealed mapping in it (mseal, Linux 6.10: EPERM, nothing is unmapped); a libc or
// a kernel that seals text and vdso leaves us that. Then the address space is walked by 1 GiB, and what is
// refused or holds our page by 2 MiB and by 4 KiB.
global_asm!(
    ".pushsection .text.ummunotify_keep,\"ax\",@progbits",
    ".p2align 9",
    ".type ummunotify_keep,@function",
    "ummunotify_keep:",
    "mov r12, rdi",
    "lea rbx, [rip + ummunotify_keep]",
    "and rbx, -4096",
    // Below.
    "mov eax, 11",
    "xor edi, edi",
    "mov rsi, rbx",
    "syscall",
    "mov r15, rax",
    // Above: with five levels of page tables, else (EINVAL) with four.
    "mov eax, 11",
    "lea rdi, [rbx + 4096]",
    "mov rsi, 0x00fffffffffff000",
    "sub rsi, rdi",
    "syscall",
    "test rax, rax",
    "jz 2f",
    "mov eax, 11",
    "lea rdi, [rbx + 4096]",
    "mov rsi, 0x00007ffffffff000",
    "sub rsi, rdi",
    "syscall",
    "2:",
    "or r15, rax",
    "jz 9f",
    "xor r13d, r13d",
    "mov r14d, 1 << 30",
    "3:",
    "mov rax, 0x00007ffffffff000",
    "cmp r13, rax",
    "jae 9f",
    "lea rax, [r13 + r14]",
    "cmp rbx, r13",
    "jb 4f",
    "cmp rbx, rax",
    "jb 6f",
    "4:",
    "mov eax, 11",
    "mov rdi, r13",
    "mov rsi, r14",
    "syscall",
    "test rax, rax",
    "jz 7f",
    "6:",
    "cmp r14, 4096",
    "je 7f",
    "shr r14, 9",
    "jmp 3b",
    "7:",
    "add r13, r14",
    "8:",
    "cmp r14, 1 << 30",
    "jae 3b",
    "mov rax, r14",
    "shl rax, 9",
    "lea rdx, [rax - 1]",
    "test r13, rdx",
    "jnz 3b",
    "mov r14, rax",
    "jmp 8b",
    // wait4(pid, NULL, __WALL, NULL), again after EINTR (a stop and go on).
    "9:",
    "mov eax, 61",
    "mov rdi, r12",
    "xor esi, esi",
    "mov edx, 0x40000000",
    "xor r10d, r10d",
    "syscall",
    "cmp rax, -4",
    "je 9b",
    "mov eax, 231",
    "xor edi, edi",
    "syscall",
    "hlt",
    ".size ummunotify_keep, . - ummunotify_keep",
    ".popsection",
);

const _: () = assert!(libc::SYS_munmap == 11 && libc::SYS_wait4 == 61 && libc::SYS_exit_group == 231);
