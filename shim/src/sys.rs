//! Raw system calls: they touch neither errno nor any lock, aren't cancellation points, and work in a signal
//! handler, between fork and exec and in a process whose libc isn't ready.
//!
//! Each returns what the kernel returned: a value, or a negative errno.

use core::arch::asm;
use core::ffi::{c_char, c_int, c_void};
use core::mem::MaybeUninit;

use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

/// A system call with six arguments.
///
/// # Safety
/// Whatever the call demands of its arguments.
#[inline(always)]
pub unsafe fn call(number: i64, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let result: isize;
    // SAFETY: the kernel clobbers rax, rcx and r11 alone; the caller vouches for the arguments.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a, in("rsi") b, in("rdx") c,
             in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// Turns a raw result into what libc's wrapper returns: errno is set on failure only.
pub fn libc_result(result: isize) -> isize {
    if (-4095..0).contains(&result) {
        set_errno(-result as c_int);
        return -1;
    }
    result
}

/// errno of this thread.
pub fn errno() -> c_int {
    // SAFETY: libc returns a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() }
}

/// Sets errno of this thread.
pub fn set_errno(value: c_int) {
    // SAFETY: libc returns a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = value }
}

/// `close`.
pub fn close(fd: c_int) -> isize {
    // SAFETY: no memory is involved.
    unsafe { call(libc::SYS_close, fd as usize, 0, 0, 0, 0, 0) }
}

/// `fcntl` with an integer argument.
pub fn fcntl(fd: c_int, command: c_int, argument: usize) -> isize {
    // SAFETY: the callers use commands that take no pointer.
    unsafe { call(libc::SYS_fcntl, fd as usize, command as usize, argument, 0, 0, 0) }
}

/// `getpid`, of the address space's process or of a vfork child that runs in it.
pub fn getpid() -> u32 {
    // SAFETY: no arguments.
    unsafe { call(libc::SYS_getpid, 0, 0, 0, 0, 0, 0) as u32 }
}

/// `gettid`.
pub fn gettid() -> u32 {
    // SAFETY: no arguments.
    unsafe { call(libc::SYS_gettid, 0, 0, 0, 0, 0, 0) as u32 }
}

/// Where the calling task's list of robust locks begins; 0 if it has none.
pub fn robust_list() -> usize {
    let (mut head, mut len) = (0usize, 0usize);
    // SAFETY: room for both.
    unsafe {
        call(libc::SYS_get_robust_list, 0, &raw mut head as usize, &raw mut len as usize, 0, 0, 0);
    }
    head
}

/// What tells libc's threads apart without a system call: the address of the thread control block, which stands
/// at its own start (System V ABI, x86-64 TLS). A raw clone may share its creator's.
pub fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: libc has set the fs base before it runs any library's code.
    unsafe { asm!("mov {}, fs:[0]", out(reg) pointer, options(nostack, readonly, preserves_flags)) };
    pointer
}

/// The stack pointer of the function that this stands in.
#[inline(always)]
pub fn stack_pointer() -> usize {
    let pointer: usize;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rsp", out(reg) pointer, options(nomem, nostack, preserves_flags)) };
    pointer
}

/// Makes a call again for as long as it is interrupted. With all signals blocked only a stop interrupts, by SIGSTOP
/// or by a debugger or supervisor that looks at the thread: calls on sockets with a timeout, and a few more, then
/// answer EINTR although there was no handler (signal(7)).
pub fn again(mut call: impl FnMut() -> isize) -> isize {
    loop {
        let result = call();
        if result != -(libc::EINTR as isize) {
            return result;
        }
    }
}

/// `fstat`; `None` if the descriptor isn't open.
pub fn fstat(fd: c_int) -> Option<libc::stat> {
    let mut out = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `out` is as large as the kernel's structure.
    let result = unsafe { call(libc::SYS_fstat, fd as usize, out.as_mut_ptr() as usize, 0, 0, 0, 0) };
    // SAFETY: on success the kernel filled all of it.
    (result == 0).then(|| unsafe { out.assume_init() })
}

/// Private anonymous memory, or shared memory of a descriptor.
pub fn mmap(len: usize, protection: c_int, flags: c_int, fd: c_int) -> isize {
    // SAFETY: without a fixed address no existing mapping is touched.
    unsafe { call(libc::SYS_mmap, 0, len, protection as usize, flags as usize, fd as isize as usize, 0) }
}

/// Shared memory of a descriptor in place of what is mapped at `address`.
///
/// # Safety
/// What was mapped there is ours to replace.
pub unsafe fn mmap_over(address: usize, len: usize, protection: c_int, flags: c_int, fd: c_int) -> isize {
    let flags = flags | libc::MAP_FIXED;
    // SAFETY: passed on to the caller.
    unsafe {
        call(libc::SYS_mmap, address, len, protection as usize, flags as usize, fd as isize as usize, 0)
    }
}

/// `munmap`.
///
/// # Safety
/// Nobody may use the range any more.
pub unsafe fn munmap(address: usize, len: usize) -> isize {
    // SAFETY: passed on to the caller.
    unsafe { call(libc::SYS_munmap, address, len, 0, 0, 0, 0) }
}

/// `madvise` with an advice that changes no contents.
pub fn madvise(address: usize, len: usize, advice: c_int) -> isize {
    // SAFETY: the callers pass DONTFORK, DONTDUMP and WIPEONFORK on mappings of their own.
    unsafe { call(libc::SYS_madvise, address, len, advice as usize, 0, 0, 0) }
}

/// `mprotect`.
pub fn mprotect(address: usize, len: usize, protection: c_int) -> isize {
    // SAFETY: the caller passes a mapping of its own that nobody uses yet.
    unsafe { call(libc::SYS_mprotect, address, len, protection as usize, 0, 0, 0) }
}

/// True if every page that the range touches is mapped. MS_ASYNC has nothing to do but to look, and touches no page
/// (msync(2): ENOMEM for memory that isn't mapped); where it can't be had nothing is known.
pub fn is_mapped(range: PageRange) -> bool {
    let start = range.start & !(PAGE_SIZE - 1);
    let len = range.end.saturating_sub(start);
    // SAFETY: no memory is read or written.
    let result =
        unsafe { call(libc::SYS_msync, start as usize, len as usize, libc::MS_ASYNC as usize, 0, 0, 0) };
    result == 0
}

/// How many descriptors this process may have.
pub fn descriptor_limit() -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is as large as the kernel's structure.
    unsafe {
        call(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE as usize, 0, &raw mut limit as usize, 0, 0);
    }
    limit
}

/// `write`.
pub fn write(fd: c_int, bytes: &[u8]) -> isize {
    // SAFETY: the slice is valid for its length.
    unsafe { call(libc::SYS_write, fd as usize, bytes.as_ptr() as usize, bytes.len(), 0, 0, 0) }
}

/// `read` into a buffer of ours.
pub fn read(fd: c_int, buffer: &mut [u8]) -> isize {
    // SAFETY: the slice is valid for its length.
    unsafe { call(libc::SYS_read, fd as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0) }
}

/// The same at an offset.
pub fn pread(fd: c_int, buffer: &mut [u8], offset: usize) -> isize {
    // SAFETY: the slice is valid for its length.
    unsafe { call(libc::SYS_pread64, fd as usize, buffer.as_mut_ptr() as usize, buffer.len(), offset, 0, 0) }
}

/// `openat` of a path of ours, which ends in a zero byte; an absolute one ignores the directory.
pub fn open(path: &[u8], flags: c_int) -> isize {
    debug_assert!(path.last() == Some(&0));
    // SAFETY: the path is terminated.
    unsafe {
        call(libc::SYS_openat, libc::AT_FDCWD as usize, path.as_ptr() as usize, flags as usize, 0, 0, 0)
    }
}

/// `access`; 0 or the negative errno. The kernel itself checks the pointer.
pub fn access(path: *const c_char, mode: c_int) -> isize {
    // SAFETY: reads a path, nothing else.
    unsafe { call(libc::SYS_faccessat, libc::AT_FDCWD as usize, path as usize, mode as usize, 0, 0, 0) }
}

/// Sleeps while `*word == seen`, at most `nanoseconds`.
pub fn futex_wait(word: *const u32, seen: u32, nanoseconds: i64) {
    let timeout = libc::timespec { tv_sec: 0, tv_nsec: nanoseconds };
    // SAFETY: the kernel reads the word and answers EFAULT if it can't. Not FUTEX_PRIVATE: arenas are shared.
    unsafe {
        call(
            libc::SYS_futex,
            word as usize,
            libc::FUTEX_WAIT as usize,
            seen as usize,
            &raw const timeout as usize,
            0,
            0,
        );
    }
}

/// Wakes one sleeper of [`futex_wait`].
pub fn futex_wake(word: *const u32) {
    // SAFETY: only the address matters.
    unsafe { call(libc::SYS_futex, word as usize, libc::FUTEX_WAKE as usize, 1, 0, 0, 0) };
}

/// True if no task of that id exists in our pid namespace.
pub fn no_such_task(id: u32) -> bool {
    // SAFETY: signal 0 only asks.
    let result = unsafe { call(libc::SYS_tkill, id as usize, 0, 0, 0, 0, 0) };
    result == -(libc::ESRCH as isize)
}

/// All signals of this thread are blocked while it lives (those that can be). A handler that interrupted us
/// could use the device and wait for a lock that this thread holds, or leave by siglongjmp and hold it for ever.
pub struct SignalsBlocked {
    before: u64,
}

impl SignalsBlocked {
    /// See [`block_signals`].
    pub fn new() -> Self {
        Self { before: block_signals() }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        restore_signals(self.before);
    }
}

/// Blocks all signals; the mask before. libc's sigprocmask leaves its own two out; a cancellation is one of them.
pub fn block_signals() -> u64 {
    let mut before = 0u64;
    let all = u64::MAX;
    // SAFETY: both pointers are to 8 bytes, the size that is passed.
    unsafe {
        call(
            libc::SYS_rt_sigprocmask,
            libc::SIG_BLOCK as usize,
            &raw const all as usize,
            &raw mut before as usize,
            8,
            0,
            0,
        );
    }
    before
}

/// Undoes [`block_signals`].
pub fn restore_signals(before: u64) {
    // SAFETY: the pointer is to 8 bytes, the size that is passed.
    unsafe {
        call(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK as usize, &raw const before as usize, 0, 8, 0, 0);
    }
}

/// Starts a process that shares our memory and runs `entry(argument)` on a stack of its own while this thread
/// sleeps until it ended or executed. Returns its pid or a negative errno. `exit_signal` 0 hides it from wait().
///
/// # Safety
/// `stack_top` is the end of writable memory that nobody else uses; `entry` may do only what a vfork child may.
pub unsafe fn vfork_on(
    stack_top: *mut c_void,
    extra_flags: c_int,
    exit_signal: c_int,
    entry: unsafe extern "C" fn(*mut c_void) -> !,
    argument: *mut c_void,
) -> isize {
    // CLONE_UNTRACED: a debugger that follows forks must not be handed a process it never heard of.
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_UNTRACED | extra_flags | exit_signal;
    let top = (stack_top as usize) & !15;
    let result: isize;
    // SAFETY: the child leaves this block by a call on its own stack and never comes back, so the frame of the
    // parent is untouched; the registers that it reads were set before the call.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone as isize => result,
            in("rdi") flags as usize, in("rsi") top, in("rdx") 0usize, in("r10") 0usize, in("r8") 0usize,
            in("r12") entry, in("r13") argument,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// A copy of this process (as fork), by the flags given: 0 in the copy.
///
/// # Safety
/// The copy may use nothing but raw system calls, and must not return to the application.
#[inline(always)]
pub unsafe fn fork_raw(flags: c_int) -> isize {
    // SAFETY: without CLONE_VM and without a new stack the child goes on with a copy of this one.
    unsafe { call(libc::SYS_clone, flags as usize, 0, 0, 0, 0, 0) }
}

/// Ends the calling process.
pub fn exit_process(status: c_int) -> ! {
    loop {
        // SAFETY: doesn't return.
        unsafe { call(libc::SYS_exit_group, status as usize, 0, 0, 0, 0, 0) };
    }
}
