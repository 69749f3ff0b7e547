//! Who records the invalidations of a context: this supervisor, or the kernel module for it.
//!
//! While the module does, the context keeps its descriptor (the pipe), its arena and its counter page; the module
//! counts into that page. The opener's threads are turned away from the arena
//! ([`ELSEWHERE_KMOD`](ummunotify_abi::arena::ELSEWHERE_KMOD)), so that every call comes to a clerk, which serves it
//! here: REGISTER and UNREGISTER in both places, a read by emptying the module's queue into the arena's first.
//!
//! All of that happens under the context's recorder lock, and so does each step of a move that a call could see.

use std::collections::HashSet;

use nix::errno::Errno;
use ummunotify_abi::PageRange;
use ummunotify_abi::device::{EVENT_LAST, Event, MAX_RECORDS, Register};
use ummunotify_engine::{Ending, Port, ReadError, RegisterError, UnregisterError};
use ummunotify_sys::device::Device;

use super::context::Context;
use super::host::SupervisorHost;
use super::task;

/// Who records.
#[derive(Debug)]
pub enum Recorder {
    /// This supervisor, by what it traps.
    Supervisor,
    /// The kernel module, by this device, which the opener has opened.
    Module(Device),
    /// Nobody any more: the process was detached from. A client must not take anything for valid after that, so it
    /// never gets a LAST again; what is left to read is that everything is invalid. All else is ENODEV.
    Ended,
}

/// Looks at the module again when the counter went on during a read.
const LOOKS: usize = 4;

impl Recorder {
    /// REGISTER_REGION.
    pub fn register(
        &self,
        context: &Context,
        host: &SupervisorHost,
        range: PageRange,
        cookie: u64,
    ) -> nix::Result<()> {
        if matches!(self, Self::Ended) {
            return Err(Errno::ENODEV);
        }
        context.engine.register(host, range, cookie).map_err(|e| match e {
            RegisterError::CookieInUse => Errno::EINVAL,
            RegisterError::NoMemory => Errno::ENOMEM,
            RegisterError::Elsewhere | RegisterError::Broken => Errno::EIO,
        })?;
        let Self::Module(device) = self else { return Ok(()) };
        let region = Register { start: range.start, end: range.end, cookie, flags: 0, reserved: 0 };
        device.register(&region).map_err(|e| {
            // Where that fails too, a region stays of which nothing is promised: its registration failed.
            let _ = context.engine.unregister(host, cookie);
            match e.raw_os_error() {
                Some(libc::ENOMEM) => Errno::ENOMEM,
                _ => Errno::EIO,
            }
        })
    }

    /// UNREGISTER_REGION; where the region was.
    pub fn unregister(
        &self,
        context: &Context,
        host: &SupervisorHost,
        cookie: u64,
    ) -> nix::Result<PageRange> {
        let region = context.engine.unregister(host, cookie).map_err(|e| match e {
            UnregisterError::UnknownCookie => Errno::EINVAL,
            UnregisterError::Elsewhere | UnregisterError::Broken => Errno::EIO,
        })?;
        if let Self::Module(device) = self {
            // A region that the arena had and the module hasn't is the work of a forger.
            let _ = device.unregister(cookie);
        }
        Ok(region)
    }

    /// read(2).
    pub fn read<P: Port<Error = Errno>>(
        &self,
        context: &Context,
        host: &SupervisorHost,
        room: usize,
        port: &mut P,
    ) -> nix::Result<usize> {
        let mut looks = 0;
        loop {
            let ending = match self {
                Self::Supervisor => Ending::Now,
                Self::Ended => Ending::Open,
                Self::Module(device) => empty(device, context, host)?,
            };
            looks += 1;
            return match context.engine.read_up_to(host, room, port, ending) {
                Ok(n) => Ok(n),
                // Not up to that value; but the counter has gone on.
                Err(ReadError::NotReadable)
                    if matches!(self, Self::Module(_))
                        && ending != Ending::Now
                        && looks < LOOKS
                        && context.engine.is_readable() =>
                {
                    continue;
                }
                Err(ReadError::NotReadable) if matches!(self, Self::Ended) => Err(Errno::ENODEV),
                Err(ReadError::NotReadable) => Err(Errno::EAGAIN),
                Err(ReadError::Port(e)) => Err(e),
                Err(ReadError::Elsewhere | ReadError::Broken) => Err(Errno::EIO),
            };
        }
    }
}

/// Empties the module's queue into the arena's; the value of the counter up to which that is complete.
///
/// Only that value may end a read. A fresh load could count an invalidation whose regions the module queued
/// after the look.
fn empty(device: &Device, context: &Context, host: &SupervisorHost) -> nix::Result<Ending> {
    let mut records = [Event::default(); MAX_RECORDS];
    // An invalidation that is under way may queue each region anew as soon as it is taken out: not for ever.
    let most = 16 + 4 * context.engine.regions() as usize / MAX_RECORDS;
    for round in 0..most {
        // If the module has nothing to report afterwards, this is its last LAST, or what it found when it took
        // the counter over: the counter hasn't moved since.
        let before = context.engine.counter();
        let n = device.read(&mut records).map_err(|_| Errno::EIO)?;
        if n == 0 {
            return Ok(Ending::At(before));
        }
        if round == 0 {
            // The main loop may look for what woke it only now, and find nothing.
            context.ring();
        }
        let records = records.get(..n).unwrap_or_default();
        if context.engine.requeue(host, records).is_err() {
            // They are out of the module, and not in the arena.
            context.invalidate_all(ummunotify_engine::Reason::Switched);
            return Err(Errno::EIO);
        }
        if let Some(last) = records.last().filter(|record| record.kind == EVENT_LAST) {
            return Ok(Ending::At(last.cookie_counter));
        }
    }
    Ok(Ending::Open)
}

/// Whose trapped calls this supervisor records.
#[derive(Debug)]
pub struct Watch {
    recording: bool,
    /// Nothing is recorded any more.
    ended: bool,
    /// Tasks whose last trapped call was let go without being recorded: it may still run.
    loose: HashSet<u32>,
    /// When `loose` is next cleared of tasks that are no more.
    crowded: usize,
}

/// Tasks in [`Watch::loose`] that aren't worth a look.
const FEW: usize = 1024;

impl Default for Watch {
    fn default() -> Self {
        Self { recording: true, ended: false, loose: HashSet::new(), crowded: FEW }
    }
}

impl Watch {
    /// A trapped call of `tid` has come in: whether it is to be recorded. If not, it is remembered until the task
    /// was seen outside, which its next call shows as well.
    pub fn admits(&mut self, tid: u32) -> bool {
        if self.ended {
            return false;
        }
        if !self.loose.is_empty() {
            self.loose.remove(&tid);
        }
        // A task that isn't visible here (0) can't be looked at later.
        if self.recording || tid == 0 {
            return true;
        }
        if self.loose.len() >= self.crowded {
            self.loose.retain(|tid| task::exists(*tid));
            self.crowded = FEW.max(2 * self.loose.len());
        }
        self.loose.insert(tid);
        false
    }

    /// From the next trapped call on.
    pub fn record(&mut self, recording: bool) {
        self.recording = recording;
    }

    /// Never again.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Tasks that may still be inside a call that wasn't recorded.
    pub fn loose(&self) -> Vec<u32> {
        self.loose.iter().copied().collect()
    }

    /// The task was seen outside.
    pub fn seen_outside(&mut self, tid: u32) {
        self.loose.remove(&tid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_is_let_go_is_remembered_until_the_next() {
        let mut watch = Watch::default();
        assert!(watch.admits(10) && watch.loose().is_empty());
        watch.record(false);
        assert!(!watch.admits(10) && !watch.admits(11));
        watch.record(true);
        let mut loose = watch.loose();
        loose.sort_unstable();
        assert_eq!(loose, [10, 11]);
        // The next call is recorded, and shows that the last has ended.
        assert!(watch.admits(10));
        assert_eq!(watch.loose(), [11]);
        watch.seen_outside(11);
        assert!(watch.loose().is_empty());
    }

    #[test]
    fn a_task_that_cannot_be_looked_at_is_always_recorded() {
        let mut watch = Watch::default();
        watch.record(false);
        assert!(watch.admits(0) && watch.loose().is_empty());
    }

    #[test]
    fn tasks_that_are_no_more_are_forgotten_and_others_are_not() {
        let mut watch = Watch::default();
        watch.record(false);
        let me = ummunotify_sys::process::gettid();
        assert!(!watch.admits(me));
        // Above the largest id that any kernel gives (proc(5), pid_max).
        for tid in (1 << 23)..(1 << 23) + 5 * FEW as u32 {
            assert!(!watch.admits(tid));
        }
        assert!(watch.loose().len() <= 2 * FEW && watch.loose().contains(&me));
    }
}
