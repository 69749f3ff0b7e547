//! Blocking reads of programs without a shim.
//!
//! A trapped read that finds nothing, and may block, is let go on: it sleeps in the read of the (empty) pipe, where
//! signals, SA_RESTART and O_NONBLOCK are the kernel's own. A byte would end it with the result 1. So as long as
//! somebody sleeps no byte is written. Who records calls the *waker*, a thread that first stops each sleeper by ptrace and
//! reads for it: whatever became of the descriptor's number meanwhile, as in the kernel. Then the byte is written, for
//! those who poll. Only then the sleepers are let go with their results, and the call goes on that invalidates ([`GoOn`]):
//! whoever polls after either finds the descriptor readable, if a read left something.
//!
//! Where ptrace can't be had of a task (a debugger is attached) the call isn't let go on; it is answered when there
//! is something to read or a signal came.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use nix::errno::Errno;
use ummunotify_sys::notify::Listener;
use ummunotify_sys::ptrace::Registers;

use super::caller::{self, Memory};
use super::context::{Context, lock};
use super::device_call::read_into;
use super::log;
use super::shared::Shared;
use super::space::Space;
use super::task;
use crate::trap::device::Room;
use crate::trap::policy::nr;

/// Tasks that may be remembered as sleeping before the dead among them are looked for.
const BEDS: usize = 1024;

/// How long calls wait for sleepers to wake.
const PATIENCE: Duration = Duration::from_secs(2);

/// A task that was let into the read of a pipe.
#[derive(Debug)]
pub struct Sleeper {
    /// Its id.
    tid: u32,
    /// When it began, if that can be told.
    born: Option<u64>,
    /// Its descriptor.
    fd: i32,
    /// It has come to the desk again: it is on its way there no more, and can't be stopped before it is answered.
    left: AtomicBool,
}

/// What to do about a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ring {
    /// Write the byte.
    Now,
    /// Nothing: the waker is at work and will.
    Later,
    /// Call the waker.
    Wake,
}

/// The sleepers of one context.
#[derive(Debug, Default)]
pub struct Sleepers {
    sleeping: Vec<Arc<Sleeper>>,
    /// Those that the waker has taken.
    waking: Vec<Arc<Sleeper>>,
    /// Rings that the waker makes when it is done; 0 when it isn't at work.
    rings: u32,
    /// It takes too long: nobody waits for it.
    late: bool,
    /// Calls that go on after that.
    after: Vec<Arc<GoOn>>,
}

/// Lets a trapped call run when the last one who holds this lets go of it.
#[derive(Debug)]
pub struct GoOn {
    listener: Arc<OnceLock<Listener>>,
    id: u64,
}

impl GoOn {
    /// For the call of that notification.
    pub fn new(listener: &Arc<OnceLock<Listener>>, id: u64) -> Arc<Self> {
        Arc::new(Self { listener: Arc::clone(listener), id })
    }
}

impl Drop for GoOn {
    fn drop(&mut self) {
        if let Some(listener) = self.listener.get()
            && let Err(e) = listener.proceed(self.id)
        {
            log::warning!("a trapped call can't go on: {e}");
        }
    }
}

impl Sleepers {
    /// Somebody rings.
    pub fn ring(&mut self) -> Ring {
        if self.rings > 0 {
            self.rings = self.rings.saturating_add(1);
            Ring::Later
        } else if self.sleeping.is_empty() {
            Ring::Now
        } else {
            self.rings = 1;
            Ring::Wake
        }
    }

    /// Whether the waker is at work.
    pub fn is_waking(&self) -> bool {
        self.rings > 0
    }

    /// Whether the waker is about to ring.
    pub fn will_ring(&self) -> bool {
        self.is_waking() && !self.late
    }

    /// The call goes on when the waker is done, if it is at work.
    pub fn delay(&mut self, call: &Arc<GoOn>) {
        if self.will_ring() {
            self.after.push(Arc::clone(call));
        }
    }

    /// One more.
    pub fn add(&mut self, sleeper: Sleeper) {
        self.sleeping.push(Arc::new(sleeper));
    }

    /// The task was seen elsewhere.
    pub fn forget(&mut self, tid: u32) {
        self.sleeping.retain(|s| s.tid != tid);
        for sleeper in self.waking.iter().filter(|s| s.tid == tid) {
            sleeper.left.store(true, Ordering::Release);
        }
    }

    /// All of them, for the waker.
    pub fn take(&mut self) -> Vec<Arc<Sleeper>> {
        self.waking = std::mem::take(&mut self.sleeping);
        self.waking.clone()
    }

    /// The calls that were to go on when the waker is done: they needn't wait any longer.
    pub fn overdue(&mut self) -> Vec<Arc<GoOn>> {
        self.late = true;
        std::mem::take(&mut self.after)
    }

    /// The waker has woken all that it took: the rings to make, and what goes on after them. Nobody can have gone
    /// to sleep meanwhile.
    pub fn woken(&mut self) -> (u32, Vec<Arc<GoOn>>) {
        self.waking.clear();
        self.late = false;
        (std::mem::take(&mut self.rings), std::mem::take(&mut self.after))
    }
}

impl Sleeper {
    /// A task that reads from that descriptor.
    pub fn new(tid: u32, fd: i32) -> Self {
        Self { tid, born: task::born(tid).ok(), fd, left: AtomicBool::new(false) }
    }

    /// Whether it can be told from a later task of the same number.
    pub fn is_known(&self) -> bool {
        self.born.is_some()
    }

    /// Makes the task leave the pipe's read with what there is to read, if it still is there, when `hold` returns.
    fn wake(&self, space: &Arc<Space>, context: &Arc<Context>, hold: impl FnOnce()) {
        if !self.may_sleep() {
            return;
        }
        match self.stop(space, context, hold) {
            Err(e)
                if !matches!(e.raw_os_error(), Some(libc::ESRCH | libc::ETIMEDOUT)) && self.may_sleep() =>
            {
                log::warning!(
                    "task {}: sleeps in a read of the device and can't be woken by ptrace: {e}; the read may \
                     return one byte",
                    self.tid
                );
            }
            _ => {}
        }
    }

    /// To be called in a thread that ends soon: it traces.
    fn stop(&self, space: &Arc<Space>, context: &Arc<Context>, hold: impl FnOnce()) -> io::Result<()> {
        let seized = task::seize(self.tid)?;
        seized.interrupt()?;
        // Asleep or on its way it stops; where it waits for the desk's answer instead, the desk has said so.
        let mut stopped = seized.stopped(Some(&|| self.left.load(Ordering::Acquire)))?;
        let mut registers = stopped.registers()?;
        if let Some(result) = self.read(&registers, space, context) {
            registers.rax = result.unwrap_or_else(|errno| -i64::from(errno as i32)).cast_unsigned();
            // It isn't made again.
            registers.orig_rax = u64::MAX;
            stopped.set_registers(&registers)?;
        }
        hold();
        stopped.detach()
    }

    /// Reads for the stopped task. `None`: it wasn't in that call any more, or has to go on with it.
    fn read(
        &self,
        registers: &Registers,
        space: &Arc<Space>,
        context: &Arc<Context>,
    ) -> Option<nix::Result<i64>> {
        const ERESTARTSYS: i64 = 512;
        let number = u32::try_from(registers.orig_rax).ok()?;
        // A later task of the same number reads something else. Where that can't be told, who reads this device is one
        // of its readers.
        let is_same = match (self.born, task::born(self.tid)) {
            (Some(born), Ok(now)) => born == now,
            _ => caller::pipe_inode(self.tid, self.fd) == Some(context.inode),
        };
        if !is_same {
            return None;
        }
        if registers.rax.cast_signed() != -ERESTARTSYS || registers.rdi as i32 != self.fd {
            return None;
        }
        let room = match number {
            nr::READ => Room::Buffer(registers.rsi, registers.rdx),
            nr::READV | nr::PREADV2 => Room::Vector(registers.rsi, registers.rdx),
            _ => return None,
        };
        let memory = Memory { tid: self.tid };
        let result =
            memory.buffers(room).and_then(|buffers| read_into(memory, &|| true, space, context, &buffers));
        if result != Err(Errno::EAGAIN) {
            return Some(result);
        }
        // Somebody else was faster. Made again, the call must not read from another file of the same number.
        (caller::pipe_inode(self.tid, self.fd) != Some(context.inode)).then_some(Err(Errno::EBADF))
    }

    /// Whether it is in such a read, or on its way there (it shows as running); true if that can't be told, for its
    /// registers tell then.
    fn may_sleep(&self) -> bool {
        let text = match std::fs::read_to_string(format!("/proc/{}/syscall", self.tid)) {
            Ok(text) => text,
            Err(e) => return !task::is_gone(&e),
        };
        let mut words = text.split_whitespace();
        let Some(first) = words.next() else { return true };
        if first == "running" {
            return true;
        }
        let fd = words.next().and_then(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
        first.parse::<u32>().is_ok_and(|n| [nr::READ, nr::READV, nr::PREADV2].contains(&n))
            && fd.is_some_and(|fd| fd as i32 == self.fd)
    }
}

/// How the waker hears of rings.
#[derive(Debug)]
pub struct Alarm {
    calls: Sender<u64>,
    called: Receiver<u64>,
    waker: OnceLock<bool>,
    /// In which context each task sleeps, or last slept.
    beds: Mutex<HashMap<u32, Weak<Context>>>,
}

impl Alarm {
    /// Without a waker yet.
    pub fn new() -> Self {
        let (calls, called) = unbounded();
        Self { calls, called, waker: OnceLock::new(), beds: Mutex::default() }
    }

    /// The task came to the desk: it sleeps nowhere, and will not be woken on account of an earlier sleep, which
    /// may have been in a read of another context by a number that was used again.
    pub fn is_up(&self, tid: u32) {
        let bed = lock(&self.beds).remove(&tid);
        if let Some(context) = bed.and_then(|bed| bed.upgrade()) {
            context.left(tid);
        }
    }

    /// For a context, to call the waker by its number.
    pub fn caller(&self) -> Sender<u64> {
        self.calls.clone()
    }
}

/// Whether a task may sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slept {
    /// It is counted among the sleepers: it is to be let go now.
    Yes,
    /// There is something to read.
    Readable,
    /// The waker doesn't come to an end, or there is none, or a byte in the pipe would end its sleep.
    No,
}

/// Lets the task go to sleep in its read.
pub fn sleep(shared: &Arc<Shared>, context: &Arc<Context>, sleeper: Sleeper) -> Slept {
    let ready = *shared.alarm.waker.get_or_init(|| {
        let theirs = Arc::clone(shared);
        thread("waker", move || dispatch(&theirs)).is_ok()
    });
    if !ready {
        return Slept::No;
    }
    {
        let mut beds = lock(&shared.alarm.beds);
        // Tasks that have ended don't say so.
        if beds.len() >= BEDS {
            beds.retain(|tid, bed| bed.strong_count() > 0 && task::exists(*tid));
        }
        beds.insert(sleeper.tid, Arc::downgrade(context));
    }
    context.sleep(sleeper)
}

fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).stack_size(256 * 1024).spawn(work).map(drop)
}

/// Hears of rings. Each context has a thread to itself while its sleepers are woken: a target can keep that waiting.
fn dispatch(shared: &Arc<Shared>) {
    for number in &shared.alarm.called {
        let Some((space, context)) = shared.find(|c| c.number == number) else { continue };
        let theirs = Arc::clone(&context);
        if let Err(e) = thread("waker", move || theirs.wake(|sleepers| wake(sleepers, &space, &theirs))) {
            log::warning!("can't start a thread to wake readers: {e}");
            context.wake(drop);
        }
    }
}

/// Reads for all of them at once, and waits for that: a byte in the pipe would be one too early. They go on when what this
/// returns is dropped; nothing, where one kept the others waiting for too long.
fn wake(sleepers: Vec<Arc<Sleeper>>, space: &Arc<Space>, context: &Arc<Context>) -> Option<Sender<()>> {
    // Nothing is ever sent: each ends when the last one drops its end.
    let (busy, all) = bounded::<()>(0);
    let (held, go) = bounded::<()>(0);
    for sleeper in sleepers {
        let (theirs, busy) = ((Arc::clone(&sleeper), Arc::clone(space), Arc::clone(context)), busy.clone());
        let go = go.clone();
        let started = thread("tracer", move || {
            let (sleeper, space, context) = theirs;
            sleeper.wake(&space, &context, move || {
                drop(busy);
                let _ = go.recv();
            });
        });
        if let Err(e) = started {
            log::debug!("can't start a thread to wake a reader, so it is done here: {e}");
            sleeper.wake(space, context, || ());
        }
    }
    drop(busy);
    if all.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
        return Some(held);
    }
    log::warning!("context {}: a reader can't be stopped; readiness is late", context.number);
    context.hurry();
    drop(held);
    let _ = all.recv();
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::spent::without_descriptors;

    #[test]
    fn a_task_of_which_nothing_can_be_told_is_taken_for_awake() {
        let me = ummunotify_sys::process::gettid();
        let (is_known, may_sleep) = without_descriptors(|| {
            let sleeper = Sleeper::new(me, 0);
            (sleeper.is_known(), sleeper.may_sleep())
        });
        assert!(!is_known && may_sleep);
        // Above the largest id that any kernel gives (proc(5), pid_max).
        assert!(!Sleeper::new(1 << 23, 0).may_sleep());
    }

    #[test]
    fn a_waker_that_takes_too_long_is_waited_for() {
        let mut sleepers = Sleepers::default();
        let call = GoOn::new(&Arc::default(), 1);
        sleepers.add(Sleeper::new(1 << 23, 0));
        assert_eq!(sleepers.ring(), Ring::Wake);
        sleepers.delay(&call);
        assert!(sleepers.will_ring());
        assert_eq!(sleepers.overdue().len(), 1);
        sleepers.delay(&call);
        assert!(sleepers.is_waking() && !sleepers.will_ring());
        assert_eq!(sleepers.woken().1.len(), 0, "a call that came later waits as well");
        sleepers.add(Sleeper::new(1 << 23, 0));
        assert_eq!(sleepers.ring(), Ring::Wake);
        assert!(sleepers.will_ring());
    }
}
