//! The preloadable library: it gives a process /dev/ummunotify.
//!
//! What it does: it defines open, read, ioctl and their kin in front of libc. They pass everything on until the
//! process opens the device (or receives it, or inherits it); then the calls on that descriptor are answered
//! here, on the arena that is shared with the supervisor. Recording invalidations is the supervisor's, but for what
//! the inline layer may do itself.
//!
//! The rules that its code obeys:
//! * no allocation, no panic, no lock that a stopped application thread may hold, no libc function but the next
//!   definition of the one that was called (and dlsym to find it);
//! * it works before its constructor ran, in signal handlers, in vfork children and between fork and exec;
//! * errno is touched only where a call fails; no descriptor of ours outlives an exchange; no signal
//!   handler runs wherever a lock is held;
//! * its constructor makes one system call, and nothing else is paid before the first open.
#![no_std]
#![deny(missing_docs)]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu")))]
compile_error!("the preloadable library needs x86-64 Linux with glibc");

mod activate;
mod bell;
mod context;
mod device;
mod direct;
mod door;
mod environment;
mod filter;
mod held;
mod hooks_device;
mod hooks_exec;
mod hooks_fd;
mod hooks_open;
mod hooks_path;
mod hooks_signal;
mod hooks_syscall;
mod host;
mod inline;
mod keeper;
mod layer;
mod log;
mod memory;
mod owner;
mod path;
mod program;
mod real;
mod section;
mod sys;
mod table;
mod thread;
mod userfault;

/// Asks whether a supervisor's filter was inherited: then descriptors may have been, too.
extern "C" fn construct() {
    if activate::is_filtered() {
        table::activate();
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCT: extern "C" fn() = construct;

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // Unreachable by intent; a trap is the one thing that can't go unnoticed or wrong any further.
    // SAFETY: never returns.
    unsafe { core::arch::asm!("ud2", options(noreturn)) }
}
