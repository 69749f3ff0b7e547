//! A thread stopped for a moment by ptrace(2): looked at, made to do system calls, and let go as it was.
//!
//! PTRACE_SEIZE and PTRACE_INTERRUPT (Linux 3.4) are used, never PTRACE_ATTACH: nothing of them is seen by the
//! thread's parent, by job control, or by the thread itself, but for calls that a stop ends with EINTR (signal(7)).
//!
//! Only the thread that seized may go on. A stop that doesn't come in time can't be detached from; the end of
//! the tracing thread lets the tracee go whatever its state. So all of it happens in [`apart`].

use std::io;
use std::marker::PhantomData;
use std::time::Duration;

use crate::check;

/// Registers of a thread (x86-64).
pub type Registers = libc::user_regs_struct;

/// Runs `trace` in a thread of its own, whose end lets go of whatever is still traced.
///
/// # Errors
/// EAGAIN: no thread could be made.
pub fn apart<T: Send>(trace: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let tracer = std::thread::Builder::new().name("tracer".into()).stack_size(128 * 1024);
        let tracer = tracer.spawn_scoped(scope, trace)?;
        tracer.join().map_err(|_| io::Error::other("the tracing thread failed"))
    })
}

/// A thread that is traced and runs.
#[derive(Debug)]
pub struct Seized {
    tid: libc::pid_t,
    /// Tracing belongs to a thread.
    here: PhantomData<*mut ()>,
}

/// A thread that is traced and stopped. Dropped without [`Stopped::detach`] it stays so until this thread ends.
#[derive(Debug)]
pub struct Stopped {
    pub(crate) tid: libc::pid_t,
    /// Stopping signals that came meanwhile: they can't be blocked.
    deferred: Vec<i32>,
    here: PhantomData<*mut ()>,
}

/// A wait status of a stop, taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    /// PTRACE_EVENT_STOP: by PTRACE_INTERRUPT, or with the whole group.
    Event,
    /// At the entry or the exit of a system call.
    Call,
    /// Before a signal is delivered.
    Signal(i32),
}

/// Begins to trace the thread; it runs on.
///
/// # Errors
/// EPERM: it is traced already, or may not be traced. ESRCH: it is gone.
pub fn seize(tid: u32) -> io::Result<Seized> {
    let tid = libc::pid_t::try_from(tid).map_err(io::Error::other)?;
    // SAFETY: no memory is passed.
    check(unsafe { libc::ptrace(libc::PTRACE_SEIZE, tid, 0, libc::PTRACE_O_TRACESYSGOOD) })?;
    Ok(Seized { tid, here: PhantomData })
}

impl Seized {
    /// Asks the thread to stop on its way back to user mode, before it takes any signal. Asleep in a system call
    /// it wakes; the call goes on, or is made again, when it is let go.
    pub fn interrupt(&self) -> io::Result<()> {
        // SAFETY: no memory is passed.
        check(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0) }).map(drop)
    }

    /// Waits for that stop, for as long as `enough`, which is asked now and then, doesn't say that it isn't worth
    /// it any more.
    ///
    /// # Errors
    /// ETIMEDOUT: enough; ESRCH: the thread has ended.
    pub fn stopped(self, enough: Option<&dyn Fn() -> bool>) -> io::Result<Stopped> {
        loop {
            match wait(self.tid, enough)? {
                Stop::Event => {
                    return Ok(Stopped { tid: self.tid, deferred: Vec::new(), here: PhantomData });
                }
                // It was about to be delivered when the thread was seized: delivered it is.
                Stop::Signal(signal) => resume(self.tid, libc::PTRACE_CONT, signal)?,
                Stop::Call => resume(self.tid, libc::PTRACE_CONT, 0)?,
            }
        }
    }
}

impl Stopped {
    /// The registers.
    pub fn registers(&self) -> io::Result<Registers> {
        // SAFETY: integers, for which zero is a value.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        // SAFETY: the request writes one `user_regs_struct`.
        check(unsafe { libc::ptrace(libc::PTRACE_GETREGS, self.tid, 0, &raw mut registers) })?;
        Ok(registers)
    }

    /// Sets the registers.
    pub fn set_registers(&mut self, registers: &Registers) -> io::Result<()> {
        // SAFETY: the request reads one `user_regs_struct`.
        check(unsafe { libc::ptrace(libc::PTRACE_SETREGS, self.tid, 0, &raw const *registers) }).map(drop)
    }

    /// The blocked signals, bit n-1 for signal n (PTRACE_GETSIGMASK, Linux 3.11).
    pub fn blocked(&self) -> io::Result<u64> {
        let mut set = 0u64;
        // SAFETY: the request writes as many bytes as its address argument says.
        check(unsafe { libc::ptrace(libc::PTRACE_GETSIGMASK, self.tid, size_of::<u64>(), &raw mut set) })?;
        Ok(set)
    }

    /// Sets the blocked signals.
    pub fn block(&mut self, set: u64) -> io::Result<()> {
        // SAFETY: the request reads as many bytes as its address argument says.
        check(unsafe { libc::ptrace(libc::PTRACE_SETSIGMASK, self.tid, size_of::<u64>(), &raw const set) })
            .map(drop)
    }

    /// A word of the thread's memory; `None` if nothing is there.
    pub(crate) fn peek(&self, address: u64) -> Option<u64> {
        // libc's wrapper returns the word, so that -1 may be one: errno tells.
        // SAFETY: the request reads the tracee's memory; errno is this thread's.
        let word = unsafe {
            *libc::__errno_location() = 0;
            libc::ptrace(libc::PTRACE_PEEKDATA, self.tid, address, 0)
        };
        let failed = word == -1 && io::Error::last_os_error().raw_os_error().is_some_and(|e| e != 0);
        (!failed).then_some(word.cast_unsigned())
    }

    /// Whether a `syscall` instruction ends at `address`.
    fn is_behind_syscall(&self, address: u64) -> bool {
        const SYSCALL: u64 = 0x050f;
        self.peek(address.wrapping_sub(2)).is_some_and(|word| word & 0xffff == SYSCALL)
    }

    /// Has the thread make system calls by the instruction that ends at `behind`, with all signals blocked, and
    /// leaves its registers and its signals as they were. `calls` gets a function that makes one call and
    /// returns what the kernel returned: a value or a negative errno.
    ///
    /// # Errors
    /// ENOEXEC: no `syscall` instruction is there. ESRCH: the thread has ended. What `calls` fails with.
    pub fn with_calls<T>(
        &mut self,
        behind: u64,
        calls: impl FnOnce(&mut dyn FnMut(i64, [u64; 6]) -> io::Result<i64>) -> io::Result<T>,
    ) -> io::Result<T> {
        if !self.is_behind_syscall(behind) {
            return Err(io::Error::from_raw_os_error(libc::ENOEXEC));
        }
        let (registers, blocked) = (self.registers()?, self.blocked()?);
        self.block(u64::MAX)?;
        let done = calls(&mut |number, arguments| self.call(&registers, behind, number, arguments));
        if is_interrupted(&registers) {
            // The kernel makes a call again only on the way out of the stop of a signal.
            self.stop_again()?;
        }
        let restored = self.set_registers(&registers).and(self.block(blocked));
        let value = done?;
        restored.map(|()| value)
    }

    /// Stops once more, on the way back to user mode: nothing of the program runs before.
    pub(crate) fn stop_again(&mut self) -> io::Result<()> {
        // SAFETY: no memory is passed.
        check(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0) })?;
        loop {
            resume(self.tid, libc::PTRACE_CONT, 0)?;
            match wait(self.tid, None)? {
                Stop::Event => return Ok(()),
                Stop::Call => {}
                Stop::Signal(signal) => self.deferred.push(signal),
            }
        }
    }

    fn call(&mut self, at: &Registers, behind: u64, number: i64, arguments: [u64; 6]) -> io::Result<i64> {
        let registers = about_to_call(at, behind.wrapping_sub(2), number, arguments);
        loop {
            self.set_registers(&registers)?;
            self.run_to_call()?;
            self.run_to_call()?;
            let result = self.registers()?.rax.cast_signed();
            // ERESTARTSYS and its kin: a stopping signal, which can't be blocked, came while a trapped call waited.
            // It is deferred now.
            if !(-514..=-512).contains(&result) {
                return Ok(result);
            }
        }
    }

    /// Lets the thread run to the entry or the exit of a system call.
    pub(crate) fn run_to_call(&mut self) -> io::Result<()> {
        loop {
            resume(self.tid, libc::PTRACE_SYSCALL, 0)?;
            match wait(self.tid, None)? {
                Stop::Call => return Ok(()),
                Stop::Event => {}
                // A fault of the instruction itself (it was unmapped meanwhile) would come again for ever.
                Stop::Signal(signal @ (libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGTRAP)) => {
                    return Err(io::Error::other(format!("signal {signal} instead of the system call")));
                }
                Stop::Signal(signal) => self.deferred.push(signal),
            }
        }
    }

    /// Lets the thread go.
    pub fn detach(self) -> io::Result<()> {
        // SAFETY: no memory is passed.
        check(unsafe { libc::ptrace(libc::PTRACE_DETACH, self.tid, 0, 0) })?;
        for signal in self.deferred {
            // SAFETY: no memory is passed. It is gone if that fails.
            unsafe { libc::syscall(libc::SYS_tkill, self.tid, signal) };
        }
        Ok(())
    }
}

/// Whether the registers are those of a call that the kernel will make again: an errno of -512 to -516.
pub(crate) fn is_interrupted(registers: &Registers) -> bool {
    registers.orig_rax.cast_signed() >= 0 && (-516..=-512).contains(&registers.rax.cast_signed())
}

/// The registers of a thread that is to make a call at `rip`; all others are those of `before`.
pub(crate) fn about_to_call(before: &Registers, rip: u64, number: i64, arguments: [u64; 6]) -> Registers {
    let [rdi, rsi, rdx, r10, r8, r9] = arguments;
    Registers {
        rip,
        rax: number.cast_unsigned(),
        // Not inside a call: nothing is made again when it goes on.
        orig_rax: u64::MAX,
        rdi,
        rsi,
        rdx,
        r10,
        r8,
        r9,
        ..*before
    }
}

fn resume(tid: libc::pid_t, request: libc::c_uint, signal: i32) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::ptrace(request, tid, 0, signal) }).map(drop)
}

/// Waits for a stop of a tracee of this thread.
fn wait(tid: libc::pid_t, enough: Option<&dyn Fn() -> bool>) -> io::Result<Stop> {
    let flags = libc::__WALL | if enough.is_some() { libc::WNOHANG } else { 0 };
    let mut pause = Duration::from_micros(20);
    loop {
        let mut status = 0;
        // SAFETY: the call writes one int.
        match check(unsafe { libc::waitpid(tid, &raw mut status, flags) }.into()) {
            Ok(0) if enough.is_some_and(|enough| enough()) => {
                return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
            }
            Ok(0) => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(2));
            }
            Ok(_) if !libc::WIFSTOPPED(status) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
            Ok(_) if status >> 16 == libc::PTRACE_EVENT_STOP => return Ok(Stop::Event),
            Ok(_) => {
                let signal = libc::WSTOPSIG(status);
                return Ok(if signal == libc::SIGTRAP | 0x80 { Stop::Call } else { Stop::Signal(signal) });
            }
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// A sleeping process makes a call for us, and sleeps on for as long as it wanted.
    #[test]
    fn a_sleeper_makes_a_call_and_sleeps_on() {
        let start = Instant::now();
        let mut child = std::process::Command::new("sleep").arg("1").spawn().unwrap();
        let tid = child.id();
        let asleep = || {
            std::fs::read_to_string(format!("/proc/{tid}/syscall")).is_ok_and(|text| {
                text.starts_with(&format!("{} ", libc::SYS_clock_nanosleep))
                    || text.starts_with(&format!("{} ", libc::SYS_nanosleep))
            })
        };
        while !asleep() {
            assert!(start.elapsed() < Duration::from_secs(1), "sleep doesn't sleep");
            std::thread::yield_now();
        }
        for _ in 0..20 {
            let (got, before, after) = apart(|| {
                let seized = seize(tid).unwrap();
                seized.interrupt().unwrap();
                let mut stopped = seized.stopped(Some(&|| start.elapsed() > Duration::from_secs(5))).unwrap();
                let before = stopped.registers().unwrap();
                let got = stopped.with_calls(before.rip, |call| call(libc::SYS_getpid, [0; 6])).unwrap();
                let after = stopped.registers().unwrap();
                stopped.detach().unwrap();
                (got, before, after)
            })
            .unwrap();
            assert_eq!(got, i64::from(tid));
            assert_eq!((before.rip, before.rax, before.rsp), (after.rip, after.rax, after.rsp));
        }
        assert!(child.wait().unwrap().success());
        assert!(start.elapsed() >= Duration::from_secs(1), "the sleep was cut short: {:?}", start.elapsed());
    }

    #[test]
    fn a_thread_that_is_gone_is_esrch() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let tid = child.id();
        child.wait().unwrap();
        assert_eq!(apart(|| seize(tid).unwrap_err().raw_os_error()).unwrap(), Some(libc::ESRCH));
    }
}
