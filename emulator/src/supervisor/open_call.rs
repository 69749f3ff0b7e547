//! A trapped open, and the device for a program without a shim.
//!
//! The descriptor is injected at a number of the band. A marker page, by which the address space is known, must be
//! mapped by the program itself: it is made to, by ptrace, before the open returns.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use ummunotify_abi::device::PATH;
use ummunotify_abi::range::PAGE_SIZE;
use ummunotify_sys::{ptrace, uffd};

use super::caller::Caller;
use super::clerk::errno_of;
use super::context::{Context, lock};
use super::desk::{self, Visit};
use super::fault;
use super::log;
use super::rings;
use super::settle;
use super::shared::Shared;
use super::space::Space;
use super::task;
use crate::trap::FaultLayer;
use crate::trap::device::OpenFlags;
use crate::trap::policy::ARCH_X86_64;

/// Serves an open.
pub fn serve(shared: &Arc<Shared>, caller: &Caller<'_>, visit: &Visit, path: u64, flags: OpenFlags) {
    let is_device = is_device(caller, path);
    let flags = match flags {
        OpenFlags::Given(flags) => Ok(flags),
        // Of openat2 the kernel refuses what doesn't fit; then there is nothing for us to do.
        OpenFlags::Behind(how, _) if is_device => caller.memory().words::<1>(how).map(|[flags]| flags as i32),
        OpenFlags::Behind(..) => Ok(0),
    };
    // The answer was due while the caller's memory kept us waiting.
    if !visit.claim() {
        return;
    }
    let (true, Ok(flags)) = (is_device, flags) else { return desk::is_ordinary(shared, caller) };
    // What was read was the memory of the one that called only if it still waits.
    if !caller.waits() {
        return;
    }
    let opening = lock(&shared.opening);
    if caller.process().is_some_and(|process| shared.attachment.refuses(process)) {
        drop(opening);
        return desk::is_ordinary(shared, caller);
    }
    let opened = open(shared, caller, flags);
    drop(opening);
    match opened {
        Ok(()) => {}
        // The caller's own mistakes need no sentence.
        Err(errno @ (Errno::EEXIST | Errno::ENOTDIR | Errno::EINVAL | Errno::ENOENT)) => {
            caller.answer(Err(errno));
        }
        Err(errno) => {
            caller.explain(format_args!("can't open /dev/ummunotify: {}", reason(errno)));
            caller.answer(Err(errno));
        }
    }
}

/// Whether the path is the device's, but for doubled slashes.
fn is_device(caller: &Caller<'_>, path: u64) -> bool {
    // Room for some slashes more than there must be.
    const ROOM: usize = 64;
    let mut bytes = [0u8; ROOM];
    // The next page may not exist.
    let first = ((PAGE_SIZE - path % PAGE_SIZE) as usize).min(ROOM);
    let (head, tail) = bytes.split_at_mut(first);
    if caller.memory().read(path, head).is_err() || head.first() != Some(&b'/') {
        return false;
    }
    if !head.contains(&0) && !tail.is_empty() && caller.memory().read(path + first as u64, tail).is_err() {
        return false;
    }
    let Some(end) = bytes.iter().position(|b| *b == 0) else { return false };
    let mut path = bytes[..end].to_vec();
    path.dedup_by(|a, b| *a == b'/' && *b == b'/');
    path == PATH.as_bytes()
}

/// Opens the device and answers; the errno with which it fails instead. Under [`Shared::opening`].
fn open(shared: &Arc<Shared>, caller: &Caller<'_>, flags: i32) -> nix::Result<()> {
    // What the kernel refuses for a character device of mode 0666, then the driver.
    if flags & libc::O_PATH != 0 {
        return Err(if flags & libc::O_DIRECTORY != 0 { Errno::ENOTDIR } else { Errno::ENOENT });
    }
    if flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL {
        return Err(Errno::EEXIST);
    }
    if flags & libc::O_DIRECTORY != 0 {
        return Err(Errno::ENOTDIR);
    }
    if flags & libc::O_ACCMODE != libc::O_RDONLY {
        return Err(Errno::EINVAL);
    }
    let process = caller.process().ok_or(Errno::ESRCH)?;
    let nonblocking = flags & libc::O_NONBLOCK != 0;
    let alarm = Some(shared.alarm.caller());
    let (context, device) =
        Context::create(shared.next_number(), nonblocking, alarm).map_err(|e| errno_of(&e))?;
    let context = Arc::new(context);
    let cloexec = flags & libc::O_CLOEXEC != 0;

    let (space, new) = shared.space_of(process).map_err(|e| errno_of(&e))?;
    let at = free_number(shared, caller, 0).ok_or(Errno::EMFILE)?;
    shared.add(&space, &context);
    // Its context is there by now: whatever begins from here on is recorded.
    shared.attachment.settle(shared, &space, process);
    settle::learn_heap(&space, process, &shared.kernel);
    let has_ring = shared.layers.fault != FaultLayer::Off && rings::has_ring(process);
    let watch = (has_ring || shared.layers.fault == FaultLayer::On) && space.lacks_userfaultfd();
    if new || watch {
        let marked = ptrace::apart(|| {
            let mut held = Puppet::seize(caller)?;
            let marker = if new { Some(held.inject(space.marker(), None, true)?) } else { None };
            let number = held.inject(device.as_fd(), Some(at), cloexec)?;
            held.make_calls(|call| {
                let mut result = Ok(0);
                if let Some(marker) = marker {
                    result = mark(call, marker);
                    let _ = call(libc::SYS_close, [marker as u64, 0, 0, 0, 0, 0]);
                }
                if new && matches!(result, Ok(0)) {
                    space.set_marked();
                }
                if watch && matches!(result, Ok(0)) {
                    self::watch(shared, &space, process, has_ring, call);
                }
                match result? {
                    0 => Ok(number.into()),
                    refused => {
                        let _ = call(libc::SYS_close, [number as u64, 0, 0, 0, 0, 0]);
                        Ok(refused)
                    }
                }
            })
        });
        marked.and_then(|done| done).map_err(|e| errno_of(&e))?;
    } else {
        space.watch_context(&context, &shared.kernel);
        caller
            .listener
            .inject_answer(caller.call.id, device.as_fd(), Some(at), cloexec)
            .map_err(|e| descriptor_errno(&e))?;
    }
    say_notice(caller, &space);
    log::info!("process {process}: opened context {} at descriptor {at}", context.number);
    Ok(())
}

/// What a program with a ring is told once.
const RINGS_NOTICE: &str = "this process uses io_uring. MADVISE through its rings is seen; FALLOCATE, FTRUNCATE and OPENAT \
                            with O_TRUNC through a ring aren't, nor is a ring that another process made (run \
                            --io-uring=deny closes that)";

/// Tells a program without a shim what of its rings isn't seen, once.
pub fn say_notice(caller: &Caller<'_>, space: &Space) {
    if space.fault.take_notice() {
        caller.explain(format_args!("{RINGS_NOTICE}"));
    }
}

/// Has a program without a shim make a userfaultfd for us, and puts the fault layer on; says it if that can't be had.
/// The descriptor is closed there at once: a fork of another thread in these microseconds copies it, which matters
/// only for requests of a ring after the death of this process.
fn watch(
    shared: &Shared,
    space: &Arc<Space>,
    process: u32,
    has_ring: bool,
    call: &mut dyn FnMut(i64, [u64; 6]) -> io::Result<i64>,
) {
    let done = take_userfaultfd(process, call).and_then(|fd| space.fault.adopt(fd)).and_then(|()| {
        if has_ring { space.expect_bypass(&shared.kernel) } else { space.watch_registered(&shared.kernel) }
    });
    if let Err(e) = done {
        let why = if has_ring { "it has an io_uring ring" } else { "the layer fault was asked for" };
        fault::say_missing(space, errno_of(&e), why);
    }
}

fn take_userfaultfd(
    process: u32,
    call: &mut dyn FnMut(i64, [u64; 6]) -> io::Result<i64>,
) -> io::Result<OwnedFd> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let mut made = call(libc::SYS_userfaultfd, [flags | uffd::USER_MODE_ONLY, 0, 0, 0, 0, 0])?;
    if made < 0 {
        let first = made;
        made = call(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0])?;
        if made < 0 {
            return Err(io::Error::from_raw_os_error(-first as i32));
        }
    }
    let taken = ummunotify_sys::process::pidfd_open(process)
        .and_then(|pidfd| ummunotify_sys::process::pidfd_getfd(&pidfd, made as i32));
    call(libc::SYS_close, [made.cast_unsigned(), 0, 0, 0, 0, 0])?;
    taken
}

/// A program without a shim is about to get a ring: it is watched before it has it. Answers the call; false if that is
/// left to the caller.
pub fn before_ring(shared: &Shared, caller: &Caller<'_>, space: &Arc<Space>) -> bool {
    let Some(process) = caller.process() else { return false };
    if caller.call.arch != ARCH_X86_64 {
        // It could be made to make calls of this entry only.
        fault::say_missing(space, Errno::ENOSYS, "it sets up an io_uring ring by the 32-bit entry");
        return false;
    }
    let done = ptrace::apart(|| {
        let held = Puppet::seize(caller)?;
        held.make_calls(|call| {
            watch(shared, space, process, true, call);
            // Trapped like the first, and let go at once.
            call(caller.call.nr.into(), caller.call.args)
        })
    });
    match done.and_then(|done| done) {
        Ok(()) => {
            say_notice(caller, space);
            true
        }
        Err(e) => {
            fault::say_missing(space, errno_of(&e), "it sets up an io_uring ring");
            false
        }
    }
}

/// Maps the marker as a shim does: no forked copy has it readable, nor the next program image. 0 or a negative errno.
fn mark(call: &mut dyn FnMut(i64, [u64; 6]) -> io::Result<i64>, marker: i32) -> io::Result<i64> {
    let (none, shared) = (libc::PROT_NONE as u64, libc::MAP_SHARED as u64);
    let page = call(libc::SYS_mmap, [0, PAGE_SIZE, none, shared, marker as u64, 0])?;
    if page < 0 {
        return Ok(page);
    }
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
        let result = call(libc::SYS_madvise, [page.cast_unsigned(), PAGE_SIZE, advice as u64, 0, 0, 0])?;
        if result < 0 {
            return Ok(result);
        }
    }
    // Trapped, and let go at once.
    call(libc::SYS_mprotect, [page.cast_unsigned(), PAGE_SIZE, libc::PROT_READ as u64, 0, 0, 0])
}

/// What helps, as far as the errno tells.
fn reason(errno: Errno) -> String {
    let help = match errno {
        Errno::EPERM => {
            "; a program without the library is made to map a page by ptrace: a debugger has that for itself (attach it after the \
             open), and Yama (ptrace_scope) refuses it for children of the command"
        }
        Errno::EMFILE => {
            "; the device's descriptors need one of 64 numbers that are kept for them (ulimit -n)"
        }
        _ => "",
    };
    format!("{}{help}", errno.desc())
}

/// The lowest free number of the band from `least` on.
pub fn free_number(shared: &Shared, caller: &Caller<'_>, least: u32) -> Option<i32> {
    let band = shared.device?;
    (band.first.max(least)..=band.last).map(u32::cast_signed).find(|fd| !caller.is_open(*fd))
}

/// EBADF is what the kernel says of a number above the limit.
pub fn descriptor_errno(error: &io::Error) -> Errno {
    match errno_of(error) {
        Errno::EBADF => Errno::EMFILE,
        errno => errno,
    }
}

/// A caller that is traced, by this thread, while it waits.
pub struct Puppet<'a> {
    caller: &'a Caller<'a>,
    seized: ptrace::Seized,
}

impl<'a> Puppet<'a> {
    /// Begins.
    ///
    /// # Errors
    /// EPERM: it is traced by somebody else, or may not be. ESRCH: it is gone.
    pub fn seize(caller: &'a Caller<'a>) -> io::Result<Self> {
        Ok(Self { caller, seized: task::seize(caller.call.tid)? })
    }

    /// Gives it a descriptor.
    pub fn inject(
        &mut self,
        fd: std::os::fd::BorrowedFd<'_>,
        at: Option<i32>,
        cloexec: bool,
    ) -> io::Result<i32> {
        let id = self.caller.call.id;
        self.caller.listener.inject(id, fd, at, cloexec).map_err(|e| {
            debug_assert!(fd.as_raw_fd() >= 0);
            io::Error::from_raw_os_error(descriptor_errno(&e) as i32)
        })
    }

    /// Has it make the calls that `calls` wants; what that returns becomes the result of the call that it waits
    /// in. It goes on.
    pub fn make_calls(
        self,
        calls: impl FnOnce(&mut dyn FnMut(i64, [u64; 6]) -> io::Result<i64>) -> io::Result<i64>,
    ) -> io::Result<()> {
        // Asked to stop before it is answered, it stops before it takes a signal. Without WAIT_KILLABLE (Linux
        // before 6.0) this alone ends the wait, which is as good: the result is set below.
        self.seized.interrupt()?;
        self.caller.answer(Ok(0));
        let mut stopped = self.seized.stopped(None)?;
        let behind = self.caller.call.instruction_pointer;
        let before = stopped.registers()?;
        if before.rip != behind || before.orig_rax != u64::from(self.caller.call.nr) {
            // Interrupted before (Linux before 6.0), it is in a signal handler now. The call fails or is made again.
            stopped.detach()?;
            return Err(io::Error::from_raw_os_error(libc::EINTR));
        }
        let result = stopped.with_calls(behind, calls);
        let mut registers = stopped.registers()?;
        registers.rax = match &result {
            Ok(value) => value.cast_unsigned(),
            Err(e) => (-i64::from(errno_of(e) as i32)).cast_unsigned(),
        };
        // It isn't to be made again.
        registers.orig_rax = u64::MAX;
        stopped.set_registers(&registers)?;
        stopped.detach()?;
        // What went wrong in there is the call's result already.
        Ok(())
    }
}
