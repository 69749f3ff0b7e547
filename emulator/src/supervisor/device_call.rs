//! A trapped call on a descriptor that may be the device's.

use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use ummunotify_abi::PageRange;
use ummunotify_abi::device::{EXCHANGE_FEATURES, Event, MAX_RECORDS, REGISTER_REGION, UNREGISTER_REGION};
use ummunotify_abi::range::PAGE_SIZE;
use ummunotify_engine::{Engine, Port, Reason};
use ummunotify_sys::ptrace;

use super::caller::{Buffers, Caller, Memory};
use super::clerk::errno_of;
use super::context::{Context, WAKING, lock};
use super::desk::{self, Visit};
use super::host::SupervisorHost;
use super::log;
use super::open_call::{Puppet, descriptor_errno, free_number, say_notice};
use super::shared::Shared;
use super::sleepers::{self, Sleeper, Slept};
use super::space::Space;
use super::task;
use crate::trap::device::{DeviceCall, Room};

/// How often a read that is held here is looked at.
const HOLD: Duration = Duration::from_millis(10);

/// A context of the device, as a caller uses it.
struct Used<'a> {
    shared: &'a Arc<Shared>,
    caller: &'a Caller<'a>,
    space: Arc<Space>,
    context: Arc<Context>,
}

/// Serves a call. It is claimed.
pub fn serve(shared: &Arc<Shared>, caller: &Caller<'_>, visit: &Arc<Visit>) {
    let found = visit.asks.fd().and_then(|fd| {
        let inode = caller.pipe_inode(fd)?;
        // A shim reads its contexts itself, by calls of the pipe.
        shared.find(|context| context.inode == inode && !context.is_shims)
    });
    let Some((space, context)) = found else { return desk::is_ordinary(shared, caller) };
    if !caller.waits() {
        return;
    }
    let used = Used { shared, caller, space, context };
    let result = match visit.asks {
        DeviceCall::Open { .. } => return,
        DeviceCall::Ioctl { request, argument, .. } => used.ioctl(request, argument).map(|()| 0),
        DeviceCall::Read { fd, room, offset, flags } => return used.read(visit, fd, room, offset, flags),
        DeviceCall::Write { .. } | DeviceCall::PipeSize { .. } => Err(Errno::EBADF),
        DeviceCall::Map { arguments, .. } => match used.map(arguments) {
            Ok(()) => return,
            Err(errno) => Err(errno),
        },
        DeviceCall::Copy { fd, least, cloexec } => match used.copy(fd, least, cloexec) {
            Ok(()) => return,
            Err(errno) => Err(errno),
        },
        DeviceCall::CopyTo { number, .. } => {
            if shared.device.is_none_or(|band| !band.has(number)) {
                log::warning!("task {}: {}", caller.call.tid, beyond(number));
            }
            return caller.proceed();
        }
    };
    caller.answer(result);
}

/// A sentence for copies that the filter doesn't know.
fn beyond(number: i32) -> String {
    format!(
        "its descriptor of the device is copied to {number}: there only a program with the shim can read or map it; \
         elsewhere keep to the numbers that open and dup return"
    )
}

impl Used<'_> {
    fn host(&self) -> SupervisorHost {
        SupervisorHost::alone(Arc::clone(&self.space), Arc::clone(&self.context))
    }

    fn ioctl(&self, request: u32, argument: u64) -> nix::Result<()> {
        let engine = &self.context.engine;
        if request == EXCHANGE_FEATURES && self.context.is_ended() {
            return Err(Errno::ENODEV);
        }
        match request {
            EXCHANGE_FEATURES => {
                // Before the pointer is touched.
                engine.exchange_features().map_err(|_| Errno::EINVAL)?;
                self.caller.memory().read(argument, &mut [0; 4])?;
                self.caller.memory().write(argument, &[0; 4])
            }
            REGISTER_REGION => {
                let [start, end, cookie, _] = self.caller.memory().words::<4>(argument)?;
                if !self.caller.waits() {
                    return Err(Errno::EINTR);
                }
                let region = PageRange::new(start, end);
                self.space.await_calls(region);
                self.context.recorder().register(&self.context, &self.host(), region, cookie)?;
                self.space.region_added(region, &self.shared.kernel);
                say_notice(self.caller, &self.space);
                Ok(())
            }
            UNREGISTER_REGION => {
                let [cookie] = self.caller.memory().words::<1>(argument)?;
                if !self.caller.waits() {
                    return Err(Errno::EINTR);
                }
                let region = self.context.recorder().unregister(&self.context, &self.host(), cookie)?;
                self.space.region_removed(region, &self.shared.kernel);
                Ok(())
            }
            _ => Err(Errno::ENOTTY),
        }
    }

    /// Answers by itself, perhaps later.
    fn read(self, visit: &Arc<Visit>, fd: i32, room: Room, offset: Option<i64>, flags: i32) {
        const KNOWN: i32 = libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_NOWAIT;
        let checked = if offset.is_some_and(|at| at < 0) {
            Err(Errno::EINVAL)
        } else if flags & !KNOWN != 0 {
            Err(Errno::EOPNOTSUPP)
        } else {
            self.caller.memory().buffers(room)
        };
        let buffers = match checked {
            Ok(buffers) => buffers,
            Err(errno) => {
                self.caller.answer(Err(errno));
                return;
            }
        };
        loop {
            let result = self.read_once(&buffers);
            let may_block = || flags & libc::RWF_NOWAIT == 0 && self.caller.blocks(fd);
            if result != Err(Errno::EAGAIN) || !may_block() {
                let read = matches!(result, Ok(n) if n > 0);
                self.context.await_waker(WAKING);
                if !self.caller.answer(result) && read && self.space.process_alive() {
                    // Interrupted after the records were consumed (Linux before 6.0).
                    self.context.invalidate_all(Reason::Requested);
                }
                return;
            }
            // A pipe knows no pread.
            if offset.is_some() || task::is_traced(self.caller.call.tid) {
                return self.hold(visit, fd, buffers);
            }
            let sleeper = Sleeper::new(self.caller.call.tid, fd);
            // Its number may be another file's when it is woken, and nobody would know whose. But whether a read may wait of
            // which we can't tell, only the pipe knows.
            if !sleeper.is_known() && self.caller.file_flags(fd).is_ok() {
                return self.hold(visit, fd, buffers);
            }
            match sleepers::sleep(self.shared, &self.context, sleeper) {
                Slept::Yes => return self.caller.proceed(),
                Slept::Readable => {}
                Slept::No => return self.hold(visit, fd, buffers),
            }
        }
    }

    fn read_once(&self, buffers: &Buffers) -> nix::Result<i64> {
        read_once(self.caller, &self.space, &self.context, buffers)
    }

    /// Keeps the call waiting, on a thread of its own.
    fn hold(self, visit: &Arc<Visit>, fd: i32, buffers: Buffers) {
        let Self { shared, caller, space, context } = self;
        let (shared, visit) = (Arc::clone(shared), Arc::clone(visit));
        let started =
            std::thread::Builder::new().name("holder".into()).stack_size(256 * 1024).spawn(move || {
                let Some(listener) = shared.gate.listener.get() else { return };
                let caller = Caller { call: &visit.call, listener };
                while caller.waits() {
                    let result = read_once(&caller, &space, &context, &buffers);
                    if result != Err(Errno::EAGAIN) || !caller.blocks(fd) {
                        context.await_waker(WAKING);
                        caller.answer(result);
                        return;
                    }
                    match task::signal_waits(caller.call.tid) {
                        task::Signal::None => std::thread::sleep(HOLD),
                        task::Signal::Thread => {
                            if let Err(e) = listener.interrupt(caller.call.id) {
                                log::warning!("task {}: can't be interrupted: {e}", caller.call.tid);
                            }
                            return;
                        }
                        // Another thread may take it: then nothing would make the call again.
                        task::Signal::Process => {
                            caller.answer(Err(Errno::EINTR));
                            return;
                        }
                    }
                }
            });
        if let Err(e) = started {
            log::warning!("can't start a thread for a read that waits: {e}");
            caller.answer(Err(Errno::ENOMEM));
        }
    }

    /// Has the caller map the counter. Answers by itself unless it fails.
    fn map(&self, arguments: [u64; 6]) -> nix::Result<()> {
        let [address, len, protection, flags, _, offset] = arguments;
        // In the kernel's order: length and alignment, then access, then the driver.
        if len == 0 || offset % PAGE_SIZE != 0 {
            return Err(Errno::EINVAL);
        }
        let kind = flags as i32 & libc::MAP_TYPE;
        let is_shared = matches!(kind, libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE);
        if is_shared && protection as i32 & libc::PROT_WRITE != 0 {
            return Err(Errno::EACCES);
        }
        if len > PAGE_SIZE || offset != 0 {
            return Err(Errno::EINVAL);
        }
        if self.context.is_ended() {
            return Err(Errno::ENODEV);
        }
        let counter = self.context.read_only_counter().map_err(|_| Errno::ENOMEM)?;
        let mapped = ptrace::apart(|| {
            let mut held = Puppet::seize(self.caller)?;
            let number = held.inject(std::os::fd::AsFd::as_fd(&counter), None, true)?;
            held.make_calls(|call| {
                let number = number as u64;
                let result = call(libc::SYS_mmap, [address, len, protection, flags, number, 0])?;
                call(libc::SYS_close, [number, 0, 0, 0, 0, 0])?;
                Ok(result)
            })
        });
        mapped.and_then(|done| done).map_err(|e| {
            self.caller.explain(format_args!(
                "can't map the counter of /dev/ummunotify: ptrace: {e}; a debugger has that for itself: attach it \
                 after the mmap"
            ));
            errno_of(&e)
        })
    }

    /// Gives the caller a copy of its descriptor in the band. Answers by itself unless it fails.
    fn copy(&self, fd: i32, least: i32, cloexec: bool) -> nix::Result<()> {
        let least = u32::try_from(least).map_err(|_| Errno::EINVAL)?;
        if self.shared.device.is_none_or(|band| least > band.last) {
            log::warning!("task {}: {}", self.caller.call.tid, beyond(least.cast_signed()));
            self.caller.proceed();
            return Ok(());
        }
        let copy = self.caller.copy(fd).map_err(|e| errno_of(&e))?;
        // Whoever chooses a number does so alone until it is taken.
        let _opening = lock(&self.shared.opening);
        let at = free_number(self.shared, self.caller, least).ok_or(Errno::EMFILE)?;
        self.caller
            .listener
            .inject_answer(self.caller.call.id, std::os::fd::AsFd::as_fd(&copy), Some(at), cloexec)
            .map(drop)
            .map_err(|e| descriptor_errno(&e))
    }
}

/// One try of a caller's read; the bytes read. EAGAIN: there is nothing.
fn read_once(
    caller: &Caller<'_>,
    space: &Arc<Space>,
    context: &Arc<Context>,
    buffers: &Buffers,
) -> nix::Result<i64> {
    read_into(caller.memory(), &|| caller.waits(), space, context, buffers)
}

/// Reads into a task's buffers, if it is `still` the same task once the records are known; the bytes read. EAGAIN:
/// there is nothing.
pub fn read_into(
    memory: Memory,
    still: &dyn Fn() -> bool,
    space: &Arc<Space>,
    context: &Arc<Context>,
    buffers: &Buffers,
) -> nix::Result<i64> {
    let most = MAX_RECORDS * size_of::<Event>();
    let room = usize::try_from(buffers.len).unwrap_or(most).min(most) / size_of::<Event>();
    let host = SupervisorHost::alone(Arc::clone(space), Arc::clone(context));
    let mut delivery = Delivery { memory, still, context, buffers };
    let records = context.recorder().read(context, &host, room, &mut delivery)?;
    Ok((records * size_of::<Event>()) as i64)
}

/// Where the records of a read go. They are consumed only if all of them arrived.
struct Delivery<'a> {
    memory: Memory,
    still: &'a dyn Fn() -> bool,
    context: &'a Context,
    buffers: &'a Buffers,
}

impl Port for Delivery<'_> {
    type Error = Errno;

    fn deliver(&mut self, records: &[Event]) -> Result<(), Errno> {
        if !(self.still)() {
            return Err(Errno::EINTR);
        }
        self.memory.deliver(self.buffers, records)
    }

    fn settle(&mut self, engine: &Engine, readable: bool) {
        if !readable {
            self.context.hush(engine);
        }
    }
}
