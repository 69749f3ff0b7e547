//! Moves an open context to the kernel module and back, while its clients go on.
//!
//! There: the opener's threads are asked for the device (a word in the arena, and everything invalid so that some
//! thread comes), for the module watches the address space in which it was opened. Under the recorder lock the
//! module takes the counter and all regions over; then everything is invalid once more, and trapped calls are let
//! go unrecorded. Both record in between.
//!
//! Back: trapped calls are recorded again; the module stays until each task whose call wasn't recorded was seen
//! outside of it. Then, under the lock, the module goes, and only after it everything is invalid: what it alone
//! has seen (another process that truncates a file) and nobody has read goes with it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags};
use ummunotify_abi::arena::ELSEWHERE_KMOD;
use ummunotify_abi::device::Register;
use ummunotify_abi::wire::Hurdle;
use ummunotify_engine::Reason;
use ummunotify_sys::device::Device;

use super::context::Context;
use super::host::SupervisorHost;
use super::log;
use super::main_loop::Source;
use super::recorder::Recorder;
use super::settle;
use super::shared::Shared;
use super::space::Space;

/// How often a wait looks whether the process is still there.
const LOOK: Duration = Duration::from_millis(100);

/// Why a context didn't move. It is where it was, and nothing is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure {
    /// What is in the way.
    pub hurdle: Hurdle,
    /// What it answered.
    pub errno: Errno,
}

impl Failure {
    fn new(hurdle: Hurdle, errno: Errno) -> Self {
        Self { hurdle, errno }
    }

    fn io(hurdle: Hurdle) -> impl Fn(std::io::Error) -> Self {
        move |e| Self::new(hurdle, e.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    }
}

/// A switch of a context and the request for its device: one at a time.
#[derive(Debug, Default)]
pub struct Turn {
    taken: bool,
    /// Number of the request that stands; 0 if there is none.
    wanted: u32,
    /// Requests so far.
    requests: u32,
    device: Option<Result<OwnedFd, Errno>>,
}

/// The right to move a context.
struct Taken<'a>(&'a Context);

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.0.turn().taken = false;
        self.0.turned.notify_all();
    }
}

fn take_turn<'a>(space: &Space, context: &'a Context, due: Instant) -> Result<Taken<'a>, Failure> {
    let mut turn = context.turn();
    while turn.taken {
        turn = context.wait_turn(turn, slice(space, due, Failure::new(Hurdle::Busy, Errno::EBUSY))?);
    }
    turn.taken = true;
    drop(turn);
    Ok(Taken(context))
}

/// How long to wait before the next look; `late` if there is no time left.
fn slice(space: &Space, due: Instant, late: Failure) -> Result<Duration, Failure> {
    if has_ended(space) {
        return Err(Failure::new(Hurdle::Ended, Errno::ESRCH));
    }
    let left = due.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(late) } else { Ok(left.min(LOOK)) }
}

fn has_ended(space: &Space) -> bool {
    space.is_gone() || !space.process_alive()
}

/// The opener has answered the request of that number, if it still stands.
pub fn deliver(context: &Context, number: u32, device: Result<OwnedFd, Errno>) -> nix::Result<()> {
    let mut turn = context.turn();
    if number == 0 || turn.wanted != number {
        return Err(Errno::ESTALE);
    }
    turn.wanted = 0;
    turn.device = Some(device);
    drop(turn);
    context.turned.notify_all();
    Ok(())
}

/// Moves a context to the module; false if it was there. `asked` is called when the opener was asked to enter.
pub fn to_module(
    shared: &Shared,
    space: &Arc<Space>,
    context: &Arc<Context>,
    due: Instant,
    asked: impl FnOnce(),
) -> Result<bool, Failure> {
    let _turn = take_turn(space, context, due)?;
    if matches!(*context.recorder(), Recorder::Module(_)) {
        return Ok(false);
    }
    let start = Instant::now();
    let device = ask(space, context, due, asked)?;
    let given = start.elapsed();
    let host = SupervisorHost::new(Arc::clone(space), Arc::clone(context));
    let mut recorder = context.recorder();
    device.adopt(context.shared_memory()[1]).map_err(Failure::io(Hurdle::Adopt))?;
    if let Err(failure) = enter(shared, context, &host, &device) {
        // Until here trapped calls were recorded as ever. What the module has counted is nobody's any more.
        let _ = shared.epoll.delete(device.as_fd());
        drop(device);
        context.invalidate_all(Reason::Switched);
        let _ = context.engine.clear_elsewhere(&host, ELSEWHERE_KMOD);
        return Err(failure);
    }
    context.invalidate_all(Reason::Switched);
    context.watch().record(false);
    *recorder = Recorder::Module(device);
    let number = context.number;
    log::info!(
        "context {number} of process {}: the kernel module records now (the device came after {given:?}, the rest took {:?})",
        space.pid,
        start.elapsed() - given
    );
    Ok(true)
}

/// Asks the opener for the real device, and waits for it.
fn ask(space: &Space, context: &Context, due: Instant, asked: impl FnOnce()) -> Result<Device, Failure> {
    let number = {
        let mut turn = context.turn();
        turn.requests = turn.requests.wrapping_add(1).max(1);
        turn.wanted = turn.requests;
        turn.device = None;
        turn.wanted
    };
    context.engine.ask_for_device(number);
    // Whoever waits for the context, or compares its counter, enters soon.
    context.invalidate_all(Reason::Switched);
    asked();
    let late = Failure::new(Hurdle::Silent, Errno::ETIMEDOUT);
    let mut turn = context.turn();
    let answer = loop {
        if let Some(device) = turn.device.take() {
            break device.map_err(|e| Failure::new(Hurdle::Open, e));
        }
        match slice(space, due, late) {
            Ok(time) => turn = context.wait_turn(turn, time),
            Err(failure) => break Err(failure),
        }
    };
    turn.wanted = 0;
    context.engine.withdraw_request();
    answer.map(Device::new)
}

/// Gives the module all regions, while every call waits.
fn enter(shared: &Shared, context: &Context, host: &SupervisorHost, device: &Device) -> Result<(), Failure> {
    let broken = |_| Failure::new(Hurdle::Arena, Errno::EIO);
    context.engine.set_elsewhere(host, ELSEWHERE_KMOD).map_err(broken)?;
    let mut regions = Vec::new();
    context.engine.visit(host, |region| regions.push(region)).map_err(broken)?;
    // In their order: among equal starts the module reports the later one first.
    regions.sort_unstable_by_key(|region| region.number);
    for region in regions {
        let (start, end) = (region.range.start, region.range.end);
        let region = Register { start, end, cookie: region.cookie, flags: 0, reserved: 0 };
        device.register(&region).map_err(Failure::io(Hurdle::Regions))?;
    }
    // Each wake-up once, whether or not somebody reads: as the module itself wakes and signals.
    let wakes =
        EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, Source::Module(context.number).word());
    shared.epoll.add(device.as_fd(), wakes).map_err(|e| Failure::new(Hurdle::Watch, e))
}

/// Moves a context back to this supervisor; false if it was here.
pub fn to_supervisor(
    shared: &Shared,
    space: &Arc<Space>,
    context: &Arc<Context>,
    due: Instant,
) -> Result<bool, Failure> {
    let _turn = take_turn(space, context, due)?;
    let host = SupervisorHost::new(Arc::clone(space), Arc::clone(context));
    let moves = matches!(*context.recorder(), Recorder::Module(_));
    if moves {
        let start = Instant::now();
        context.watch().record(true);
        if !settle::settle_loose(shared, context, due, || has_ended(space)) {
            context.watch().record(false);
            return Err(Failure::new(Hurdle::Threads, Errno::ETIMEDOUT));
        }
        let settled = start.elapsed();
        let mut recorder = context.recorder();
        if let Recorder::Module(device) = std::mem::replace(&mut *recorder, Recorder::Supervisor) {
            let _ = shared.epoll.delete(device.as_fd());
            drop(device);
        }
        context.invalidate_all(Reason::Switched);
        log::info!(
            "context {} of process {}: recorded here again (all calls had ended after {settled:?}, the rest took {:?})",
            context.number,
            space.pid,
            start.elapsed() - settled
        );
    }
    // Where the lock doesn't come free, clients go on asking us, and the next switch tries again.
    let _recorder = context.recorder();
    if context.engine.elsewhere() & ELSEWHERE_KMOD != 0 {
        context
            .engine
            .clear_elsewhere(&host, ELSEWHERE_KMOD)
            .map_err(|_| Failure::new(Hurdle::Arena, Errno::EIO))?;
    }
    Ok(moves)
}
