//! System calls made by a stopped thread of another process, which works on whatever becomes of its tracer.
//!
//! A tracer that sets a thread's registers and dies leaves them so. Here the thread makes each call by a few
//! instructions that put everything back by themselves: its registers, its blocked signals, and the call that the stop
//! interrupted, which is made again. They lie in the process's vDSO, behind the end of the ELF image, where the last
//! page is empty and nobody looks; the page becomes the process's own copy by that, and is emptied again in the end.
//! The tracer stops the thread after each call and takes it to the next one; registers are set in one step, so at
//! every moment the thread either has not begun, or ends by putting everything back.
//!
//! What a tracer that lives does better: a signal that came meanwhile ends the interrupted call as it would have
//! without us; where the instructions make the call again, its handler runs before that.
//!
//! Two of these at a time would overwrite each other's instructions: whoever begins one must keep others away.

use std::io;

use crate::check;
use crate::ptrace::{Registers, Stopped, about_to_call, is_interrupted};

/// Bytes that the instructions take at most.
const ROOM: usize = 256;

/// `cs` of a thread that runs 64-bit code (`__USER_CS`).
const CODE_64: u64 = 0x33;

/// Where the instructions go: an address in the process's vDSO.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place(u64);

impl Place {
    /// Finds room in a vDSO, of which `image` is a copy, mapped at `base`. `None`: it isn't one, or is full.
    pub fn in_vdso(image: &[u8], base: u64) -> Option<Self> {
        let word = |at: usize, n: usize| {
            let bytes = image.get(at..at + n)?;
            Some(bytes.iter().rev().fold(0usize, |sum, b| sum << 8 | usize::from(*b)))
        };
        if image.get(..5)? != b"\x7fELF\x02" {
            return None;
        }
        // The section headers end a vDSO: e_shoff, e_shentsize, e_shnum.
        let sections = word(0x28, 8)?.checked_add(word(0x3a, 2)? * word(0x3c, 2)?)?;
        let programs = word(0x20, 8)?.checked_add(word(0x36, 2)? * word(0x38, 2)?)?;
        // What a dead tracer left behind lies in the last bytes, and is no part of the image.
        let start = image.len().checked_sub(ROOM)?;
        let end = sections.max(programs).max(image.get(..start)?.iter().rposition(|b| *b != 0)? + 1);
        (end <= start).then_some(Self(base + start as u64))
    }

    /// Whether an instruction there is one of these.
    pub fn has(self, address: u64) -> bool {
        (self.0..self.0 + ROOM as u64).contains(&address)
    }

    /// Whether the copy of the vDSO shows that a tracer has died in an errand: before another one begins, each thread
    /// must be seen elsewhere.
    pub fn is_left_behind(image: &[u8]) -> bool {
        image.iter().rev().take(ROOM).any(|b| *b != 0)
    }
}

/// A thread that makes calls for us. Ended in any way but by [`Errand::finish`], the thread goes on by itself as
/// soon as the tracing thread ends.
#[derive(Debug)]
pub struct Errand {
    stopped: Stopped,
    place: Place,
    /// As they were, and are to be in the end.
    before: Registers,
    blocked: u64,
}

impl Errand {
    /// Begins: nothing of the thread has changed when this returns.
    ///
    /// # Errors
    /// ENOEXEC: the thread runs 32-bit code. EAGAIN: it is about to end an errand of a tracer that died. What ptrace
    /// fails with.
    pub fn begin(stopped: Stopped, place: Place) -> io::Result<Self> {
        let mut before = stopped.registers()?;
        if place.has(before.rip) {
            stopped.detach()?;
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        if before.cs != CODE_64 {
            return Err(io::Error::from_raw_os_error(libc::ENOEXEC));
        }
        if before.orig_rax.cast_signed() < 0
            && let Some(aborted) = rseq_abort(&stopped, before.rip)
        {
            before.rip = aborted;
        }
        let blocked = stopped.blocked()?;
        let mut errand = Self { stopped, place, before, blocked };
        let program = program(&errand.before, blocked, place.0);
        errand.write(&program)?;
        Ok(errand)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        for (i, word) in bytes.chunks(8).enumerate() {
            let mut full = [0; 8];
            full[..word.len()].copy_from_slice(word);
            let value = u64::from_le_bytes(full);
            // SAFETY: the request writes one word to the tracee's memory, none of ours.
            check(unsafe {
                libc::ptrace(libc::PTRACE_POKEDATA, self.stopped.tid, self.place.0 + 8 * i as u64, value)
            })?;
        }
        Ok(())
    }

    /// Has the thread make a call; what the kernel returned: a value or a negative errno.
    ///
    /// # Errors
    /// ESRCH: the thread has ended.
    pub fn call(&mut self, number: i64, arguments: [u64; 6]) -> io::Result<i64> {
        self.start(PLAIN, number, arguments)?;
        self.stopped.run_to_call()?;
        self.stopped.run_to_call()?;
        Ok(self.stopped.registers()?.rax.cast_signed())
    }

    /// The same for a call that makes a descriptor: `take` gets its number, and then the thread closes it, whether we
    /// live or not. The outer result is of the errand, the inner one of the call.
    pub fn call_for_descriptor<T>(
        &mut self,
        number: i64,
        arguments: [u64; 6],
        take: impl FnOnce(i32) -> T,
    ) -> io::Result<Result<T, i32>> {
        self.start(DESCRIPTOR, number, arguments)?;
        self.stopped.run_to_call()?;
        self.stopped.run_to_call()?;
        let result = self.stopped.registers()?.rax.cast_signed();
        let taken = i32::try_from(result).ok().filter(|fd| *fd >= 0).map(take);
        self.stopped.run_to_call()?;
        self.stopped.run_to_call()?;
        Ok(taken.ok_or(i32::try_from(-result).unwrap_or(libc::EIO)))
    }

    fn start(&mut self, entry: u64, number: i64, arguments: [u64; 6]) -> io::Result<()> {
        let registers = about_to_call(&self.before, self.place.0 + entry, number, arguments);
        // From here on the instructions bring the thread back. Blocked signals come after that: those they restore.
        self.stopped.set_registers(&registers)?;
        self.stopped.block(u64::MAX)
    }

    /// Options of the trace (`PTRACE_O_*`), instead of those that it was begun with.
    pub fn set_options(&mut self, options: i32) -> io::Result<()> {
        // SAFETY: no memory is passed.
        check(unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, self.stopped.tid, 0, options) }).map(drop)
    }

    /// Lets the thread go as it was.
    ///
    /// # Errors
    /// ESRCH: the thread has ended.
    pub fn finish(mut self) -> io::Result<()> {
        if is_interrupted(&self.before) {
            // The kernel makes a call again only on the way out of the stop of a signal.
            self.stopped.stop_again()?;
        }
        // In this order: until the registers are set, the instructions restore both.
        self.stopped.block(self.blocked)?;
        let before = self.before;
        self.stopped.set_registers(&before)?;
        self.write(&[0; ROOM])?;
        self.stopped.detach()
    }
}

/// Where a call begins that makes a descriptor, and any other.
const DESCRIPTOR: u64 = 0;
const PLAIN: u64 = 9;

/// The instructions, for the address `at`.
fn program(before: &Registers, blocked: u64, at: u64) -> Vec<u8> {
    let mut code = Vec::with_capacity(ROOM);
    // DESCRIPTOR: syscall; mov edi, eax; mov eax, SYS_close. An errno is no descriptor, and closing it does nothing.
    code.extend([0x0f, 0x05, 0x89, 0xc7, 0xb8]);
    code.extend((libc::SYS_close as u32).to_le_bytes());
    // PLAIN: syscall.
    debug_assert_eq!(code.len() as u64, PLAIN);
    code.extend([0x0f, 0x05]);
    // rt_sigprocmask(SIG_SETMASK, the mask, NULL, 8), the mask being the last word of the room.
    let set = |code: &mut Vec<u8>, register: [u8; 2], value: u64| {
        code.extend(register);
        code.extend(value.to_le_bytes());
    };
    const RAX: [u8; 2] = [0x48, 0xb8];
    const RDI: [u8; 2] = [0x48, 0xbf];
    const RSI: [u8; 2] = [0x48, 0xbe];
    const RDX: [u8; 2] = [0x48, 0xba];
    const RCX: [u8; 2] = [0x48, 0xb9];
    const R8: [u8; 2] = [0x49, 0xb8];
    const R9: [u8; 2] = [0x49, 0xb9];
    const R10: [u8; 2] = [0x49, 0xba];
    const R11: [u8; 2] = [0x49, 0xbb];
    set(&mut code, RAX, libc::SYS_rt_sigprocmask.cast_unsigned());
    set(&mut code, RDI, libc::SIG_SETMASK as u64);
    set(&mut code, RSI, at + ROOM as u64 - 8);
    set(&mut code, RDX, 0);
    set(&mut code, R10, 8);
    code.extend([0x0f, 0x05]);
    // The flags, without the stack, of which nothing below may be touched: mov eax, ...; add al, 0x7f (overflows for
    // 1, not for 0); sahf; cld or std.
    let overflow = before.eflags >> 11 & 1;
    code.push(0xb8);
    code.extend(((before.eflags as u32 & 0xff) << 8 | overflow as u32).to_le_bytes());
    code.extend([0x04, 0x7f, 0x9e]);
    code.push(if before.eflags >> 10 & 1 == 1 { 0xfd } else { 0xfc });
    // The registers that calls use; the others keep their values all the time.
    let (rip, rax) = go_on(before);
    let registers = [
        (RAX, rax),
        (RDI, before.rdi),
        (RSI, before.rsi),
        (RDX, before.rdx),
        (RCX, before.rcx),
        (R8, before.r8),
        (R9, before.r9),
        (R10, before.r10),
        (R11, before.r11),
    ];
    for (register, value) in registers {
        set(&mut code, register, value);
    }
    // jmp [rip]
    code.extend([0xff, 0x25, 0, 0, 0, 0]);
    code.extend(rip.to_le_bytes());
    debug_assert!(code.len() <= ROOM - 8);
    code.resize(ROOM - 8, 0);
    code.extend(blocked.to_le_bytes());
    code
}

/// Where the thread goes on, and with what in rax: an interrupted call is made again, as the kernel does it.
fn go_on(before: &Registers) -> (u64, u64) {
    const ERESTART_RESTARTBLOCK: i64 = 516;
    if !is_interrupted(before) {
        return (before.rip, before.rax);
    }
    let number = match before.rax.cast_signed() {
        errno if errno == -ERESTART_RESTARTBLOCK => libc::SYS_restart_syscall.cast_unsigned(),
        _ => before.orig_rax,
    };
    (before.rip.wrapping_sub(2), number)
}

/// Where a thread must go on that was stopped at `at` inside a restartable sequence (rseq(2)): the kernel, seeing it
/// elsewhere, no longer watches over the sequence. `None`: it isn't inside one, or the kernel can't tell (before 5.13).
fn rseq_abort(stopped: &Stopped, at: u64) -> Option<u64> {
    const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
    /// `struct ptrace_rseq_configuration`: address, size, signature, flags, padding.
    #[repr(C)]
    #[derive(Default)]
    struct Configuration {
        address: u64,
        size: u32,
        signature: u32,
        flags: u32,
        pad: u32,
    }
    let mut configuration = Configuration::default();
    // SAFETY: the request writes at most as many bytes as its address argument says.
    let got = check(unsafe {
        libc::ptrace(
            PTRACE_GET_RSEQ_CONFIGURATION,
            stopped.tid,
            size_of::<Configuration>(),
            &raw mut configuration,
        )
    });
    if got.is_err() || configuration.address == 0 {
        return None;
    }
    // `struct rseq`: cpu_id_start, cpu_id, rseq_cs; `struct rseq_cs`: version, flags, start, length, abort.
    let sequence = stopped.peek(configuration.address + 8)?;
    if sequence == 0 {
        return None;
    }
    let (start, length, abort) =
        (stopped.peek(sequence + 8)?, stopped.peek(sequence + 16)?, stopped.peek(sequence + 24)?);
    (at.wrapping_sub(start) < length).then_some(abort)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptrace::{apart, seize};
    use std::time::{Duration, Instant};

    /// Of this process, and so of each child, which is mapped where ours is.
    fn place() -> Place {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let line = maps.lines().find(|line| line.ends_with("[vdso]")).expect("a vDSO");
        let (start, rest) = line.split_once('-').expect("a range");
        let number = |text: &str| u64::from_str_radix(text, 16).expect("a number");
        let (start, end) = (number(start), number(rest.split_once(' ').expect("a range").0));
        // SAFETY: mapped and readable, for the kernel's own code.
        let image = unsafe { std::slice::from_raw_parts(start as *const u8, (end - start) as usize) };
        Place::in_vdso(image, start).expect("room in the vDSO")
    }

    /// A child that checks its registers and flags for as long as it lives; exit code 7 if one is wrong.
    fn steady() -> i32 {
        // SAFETY: the child runs nothing but the instructions below, and never returns.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid > 0 {
            return pid;
        }
        // SAFETY: as above; rsp is never used.
        unsafe {
            core::arch::asm!(
                "mov rax, 101",
                "mov rbx, 102",
                "mov rcx, 103",
                "mov rdx, 104",
                "mov rsi, 105",
                "mov rdi, 106",
                "mov rbp, 107",
                "mov r8, 108",
                "mov r9, 109",
                "mov r10, 110",
                "mov r11, 111",
                "mov r12, 112",
                "mov r13, 113",
                "mov r14, 114",
                "mov r15, 115",
                "2:",
                "cmp rax, 101",
                "jne 3f",
                "cmp rbx, 102",
                "jne 3f",
                "cmp rcx, 103",
                "jne 3f",
                "cmp rdx, 104",
                "jne 3f",
                "cmp rsi, 105",
                "jne 3f",
                "cmp rdi, 106",
                "jne 3f",
                "cmp rbp, 107",
                "jne 3f",
                "cmp r8, 108",
                "jne 3f",
                "cmp r9, 109",
                "jne 3f",
                "cmp r10, 110",
                "jne 3f",
                "cmp r11, 111",
                "jne 3f",
                "cmp r12, 112",
                "jne 3f",
                "cmp r13, 113",
                "jne 3f",
                "cmp r14, 114",
                "jne 3f",
                "cmp r15, 115",
                "jne 3f",
                // Carry, overflow, direction and what `cmp` sets, over some instructions each.
                "stc",
                "nop",
                "nop",
                "nop",
                "nop",
                "jnc 3f",
                "clc",
                "nop",
                "nop",
                "nop",
                "nop",
                "jc 3f",
                "mov al, 127",
                "add al, 1",
                "nop",
                "nop",
                "nop",
                "jno 3f",
                "jns 3f",
                "mov al, 1",
                "add al, 1",
                "nop",
                "nop",
                "nop",
                "jo 3f",
                "js 3f",
                "jz 3f",
                "mov al, 101",
                "jmp 2b",
                "3:",
                "mov edi, 7",
                "mov eax, 231",
                "syscall",
                options(noreturn)
            )
        }
    }

    fn stopped(tid: u32) -> Stopped {
        let start = Instant::now();
        // The end of an earlier tracer may still be on its way.
        let seized = loop {
            match seize(tid) {
                Err(e) if e.raw_os_error() == Some(libc::EPERM) && start.elapsed().as_secs() < 5 => {}
                done => break done.expect("seized"),
            }
        };
        seized.interrupt().expect("interrupted");
        seized.stopped(Some(&|| start.elapsed() > Duration::from_secs(5))).expect("stopped")
    }

    fn begun(tid: u32) -> Errand {
        loop {
            match Errand::begin(stopped(tid), place()) {
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {}
                done => return done.expect("begun"),
            }
        }
    }

    /// How far a tracer gets before it dies.
    const STEPS: u32 = 9;

    /// Does the errand up to that step; the end of this thread is the tracer's death.
    fn die_at(tid: u32, step: u32) {
        let mut errand = begun(tid);
        let none = [0; 6];
        match step {
            0 => {}
            1 => errand.start(PLAIN, libc::SYS_getpid, none).expect("registers"),
            2..=3 => {
                errand.start(PLAIN, libc::SYS_getpid, none).expect("registers");
                for _ in 1..step {
                    errand.stopped.run_to_call().expect("a call");
                }
            }
            4..=7 => {
                errand.start(DESCRIPTOR, libc::SYS_epoll_create1, none).expect("registers");
                for _ in 3..step {
                    errand.stopped.run_to_call().expect("a call");
                }
            }
            _ => {
                assert_eq!(errand.call(libc::SYS_getpid, none).expect("a call"), i64::from(tid));
                errand.stopped.stop_again().expect("stopped");
                errand.stopped.block(errand.blocked).expect("signals");
            }
        }
    }

    fn is_alive(pid: i32) -> bool {
        // SAFETY: no memory is passed.
        unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) == 0 }
    }

    fn end(pid: i32) {
        // SAFETY: a child of ours that isn't reaped yet.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
    }

    fn signals(pid: i32) -> String {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
        status.lines().find(|line| line.starts_with("SigBlk:")).expect("signals").to_owned()
    }

    #[test]
    fn whenever_the_tracer_dies_the_registers_are_as_they_were() {
        let pid = steady();
        let before = signals(pid);
        let tid = pid.cast_unsigned();
        for round in 0..900 {
            if round % 3 == 0 {
                apart(|| {
                    let mut errand = begun(tid);
                    assert_eq!(errand.call(libc::SYS_getpid, [0; 6]).expect("a call"), i64::from(pid));
                    let taken =
                        errand.call_for_descriptor(libc::SYS_epoll_create1, [0; 6], |fd| fd).expect("a call");
                    assert!(taken.is_ok_and(|fd| fd > 2));
                    let refused = errand
                        .call_for_descriptor(libc::SYS_epoll_create1, [1, 0, 0, 0, 0, 0], |fd| fd)
                        .expect("a call");
                    assert_eq!(refused, Err(libc::EINVAL));
                    errand.finish().expect("finished");
                })
                .expect("a thread");
            } else {
                apart(|| die_at(tid, round % STEPS)).expect("a thread");
            }
            assert!(is_alive(pid), "the registers were wrong after round {round}");
        }
        std::thread::sleep(Duration::from_millis(20));
        assert!(is_alive(pid));
        assert_eq!(signals(pid), before);
        let left = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors");
        let ours = std::fs::read_dir("/proc/self/fd").expect("descriptors");
        assert!(left.count() <= ours.count(), "a descriptor of ours was left open");
        end(pid);
    }

    #[test]
    fn whenever_the_tracer_dies_a_sleeper_sleeps_on() {
        let start = Instant::now();
        let mut child = std::process::Command::new("sleep").arg("1").spawn().expect("sleep");
        let tid = child.id();
        let asleep = || {
            std::fs::read_to_string(format!("/proc/{tid}/syscall"))
                .is_ok_and(|text| text.starts_with(&format!("{} ", libc::SYS_clock_nanosleep)))
        };
        while !asleep() {
            assert!(start.elapsed() < Duration::from_secs(1), "sleep doesn't sleep");
            std::thread::yield_now();
        }
        // It has executed a program since it was our child: its vDSO lies elsewhere.
        let maps = std::fs::read_to_string(format!("/proc/{tid}/maps")).expect("maps");
        let line = maps.lines().find(|line| line.ends_with("[vdso]")).expect("a vDSO");
        let (_, rest) = line.split_once('-').expect("a range");
        let end = u64::from_str_radix(rest.split_once(' ').expect("a range").0, 16).expect("a number");
        for step in 0..4 {
            apart(|| {
                let place = Place(end - ROOM as u64);
                let mut errand = loop {
                    match Errand::begin(stopped(tid), place) {
                        Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {}
                        done => break done.expect("begun"),
                    }
                };
                if step > 0 {
                    errand.start(PLAIN, libc::SYS_getpid, [0; 6]).expect("registers");
                }
                for _ in 1..step {
                    errand.stopped.run_to_call().expect("a call");
                }
            })
            .expect("a thread");
        }
        assert!(child.wait().expect("sleep").success());
        assert!(start.elapsed() >= Duration::from_secs(1), "the sleep was cut short: {:?}", start.elapsed());
    }

    #[test]
    fn a_full_or_a_strange_image_has_no_room() {
        assert_eq!(Place::in_vdso(&[], 0x1000), None);
        assert_eq!(Place::in_vdso(&[0x7f; 4096], 0x1000), None);
        let mut image = vec![0; 4096];
        image[..5].copy_from_slice(b"\x7fELF\x02");
        assert_eq!(Place::in_vdso(&image, 0x1000), Some(Place(0x1f00)));
        // A table of 2 entries of 64 bytes that ends beyond the room.
        image[0x28..0x2a].copy_from_slice(&3800u16.to_le_bytes());
        (image[0x3a], image[0x3c]) = (64, 2);
        assert_eq!(Place::in_vdso(&image, 0x1000), None);
    }
}
