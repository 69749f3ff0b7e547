//! Serves one connection: opens, and calls by holders that can't use the arena themselves.
//!
//! Each connection has a thread of its own, since a request may wait: for the lock of an arena, for a mapping
//! table, for the peer. The peer is distrusted; it gets only what the descriptor that it shows entitles it to.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use ummunotify_abi::PageRange;
use ummunotify_abi::device::{Event, MAX_RECORDS};
use ummunotify_abi::wire::{self, Hurdle, NOTICE_RING, Op, WANTS_USERFAULTFD};
use ummunotify_engine::{Engine, Port};

use super::context::{Context, WAKING};
use super::fault;
use super::host::SupervisorHost;
use super::log;
use super::recorder::Recorder;
use super::rings;
use super::settle::{self, Late};
use super::shared::{Message, Shared};
use super::socket::{Asked, Connection, Peer};
use super::space::Space;
use super::switch::{self, Failure};
use super::task;
use crate::target::maps;
use crate::trap::filter::Filter;
use crate::trap::policy::{Gate, Policy};
use crate::trap::{FaultLayer, Net};
use ummunotify_inline::{IMAGE_BASE, IMAGE_SPAN};
use ummunotify_sys::notify::Listener;

/// How a peer reached us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entrance {
    /// By the socket that we were started with: the client that started us.
    Control,
    /// By an address that every process of the user may connect to. Nobody who comes this way hands us a filter.
    Door,
}

/// Serves a connection to its end. `crowded` tells whether others may need the place: then a peer that says
/// nothing for a second has to go.
pub fn serve(shared: &Shared, connection: &Connection, entrance: Entrance, crowded: impl Fn() -> bool) {
    let Ok(peer) = connection.peer() else { return };
    let ours = nix::unistd::getuid().as_raw();
    if peer.uid != ours && peer.uid != 0 && ours != 0 {
        log::warning!("process {} of user {} was refused", peer.pid, peer.uid);
        let _ = connection.refuse(Errno::EPERM);
        return;
    }
    if connection.limit(1).is_err() {
        return;
    }
    loop {
        let asked = match connection.receive() {
            Ok(Some(asked)) => asked,
            Ok(None) => return,
            Err(Errno::EAGAIN) if entrance == Entrance::Control || !crowded() => continue,
            Err(e @ (Errno::EPROTO | Errno::EPROTONOSUPPORT)) => {
                log::warning!("process {}: its shim doesn't speak this supervisor's version", peer.pid);
                let _ = connection.refuse(e);
                return;
            }
            Err(_) => return,
        };
        let op = asked.op;
        let done = match op {
            Op::Open => open(shared, connection, peer, &asked),
            Op::Listener if entrance == Entrance::Control => listener(shared, connection, asked),
            Op::Closed if entrance == Entrance::Control => closed(shared, connection, peer, &asked),
            Op::Seize if entrance == Entrance::Control => seize(shared, connection, peer),
            Op::Traced if entrance == Entrance::Control => traced(shared, connection, peer, &asked),
            Op::Listener | Op::Closed | Op::Seize | Op::Traced => Err(Errno::EPERM),
            Op::Counter => with_context(shared, &asked, |context, _| {
                let counter = context.read_only_counter().map_err(|_| Errno::ENOMEM)?;
                connection.reply(0, [0; 6], &[], &[counter.as_fd()])
            }),
            Op::Attach => with_context(shared, &asked, |context, space| {
                attach(shared, connection, peer, context, space)
            }),
            Op::Patch => patch(shared, connection, peer, &asked),
            Op::Arm => with_context(shared, &asked, |context, _| {
                context.engine.arm();
                connection.reply(0, [0; 6], &[], &[])
            }),
            Op::Features | Op::Register | Op::Unregister | Op::Read => {
                with_context(shared, &asked, |context, space| {
                    call(shared, connection, context, space, &asked)
                })
            }
            Op::Userfaultfd => userfaultfd(shared, connection, peer, asked),
            Op::Switch => switch(shared, connection, peer, asked),
            Op::Device => device(shared, connection, peer, asked),
            Op::Whereabouts => whereabouts(shared, connection, peer, &asked),
            Op::Parking => parking(shared, connection, peer, &asked),
            Op::Commit => Err(Errno::EPROTO),
        };
        if let Err(e) = done {
            log::debug!("process {}: {op:?} refused: {e}", peer.pid);
            if connection.refuse(e).is_err() {
                return;
            }
        }
    }
}

/// Finds the context whose descriptor was shown.
fn with_context(
    shared: &Shared,
    asked: &Asked,
    serve: impl FnOnce(&Arc<Context>, &Arc<Space>) -> nix::Result<()>,
) -> nix::Result<()> {
    let [device] = asked.fds.as_slice() else { return Err(Errno::EPROTO) };
    let inode = pipe_inode(device)?;
    let (space, context) = shared.find(|context| context.inode == inode).ok_or(Errno::ENODEV)?;
    serve(&context, &space)
}

/// The inode of a descriptor that is a pipe.
fn pipe_inode(fd: &OwnedFd) -> nix::Result<u64> {
    let stat = nix::sys::stat::fstat(fd)?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFIFO {
        return Err(Errno::EBADF);
    }
    Ok(stat.st_ino)
}

fn open(shared: &Shared, connection: &Connection, peer: Peer, asked: &Asked) -> nix::Result<()> {
    let [flags, needs_filter, calls, tasks, ..] = asked.args;
    if peer.pid == 0 {
        log::warning!("a process that isn't visible in the supervisor's pid namespace was refused");
        return Err(Errno::ESRCH);
    }
    let nonblocking = flags & libc::O_NONBLOCK as u64 != 0;
    let (context, device) = Context::create(shared.next_number(), nonblocking, None).map_err(|e| {
        log::warning!("process {}: can't make a context: {e}", peer.pid);
        errno_of(&e)
    })?;
    let context = Arc::new(context);
    let (space, new) = shared.space_of(peer.pid).map_err(|e| errno_of(&e))?;
    let image = IMAGE_BASE..IMAGE_BASE + IMAGE_SPAN;
    let offered = (image.contains(&calls) && image.contains(&tasks)).then_some(Gate { calls, tasks });
    let filter = if needs_filter != 0 && shared.layers.net != Net::None {
        let gate = *shared.let_through.get_or_init(|| offered);
        Filter::bytes(&Filter::build(&Policy { gate, device: None }))
    } else {
        Vec::new()
    };
    // Only the gates that the filter lets through.
    let mut granted = 0;
    if offered.is_some() && shared.let_through.get() == Some(&offered) && !shared.gate.is_traced() {
        space.set_inline(true);
        granted = wire::INLINE_GRANTED;
        if !shared.kernel.hugetlb_twice {
            granted |= wire::INLINE_MUNMAP;
        }
    }
    let [arena, counter] = context.shared_memory();
    let fds = [device.as_fd(), arena, counter, space.marker()];
    shared.add(&space, &context);
    let wants = shared.layers.fault != FaultLayer::Off && space.lacks_userfaultfd();
    space.watch_context(&context, &shared.kernel);
    if wants {
        granted |= WANTS_USERFAULTFD;
    }
    if needs_filter == 0 {
        // Else when it is on.
        settle::learn_heap(&space, peer.pid, &shared.kernel);
    }
    let args =
        [context.number, context.inode, shared.token, u64::from(new), granted, std::process::id().into()];
    log::info!("process {}: opened context {}", peer.pid, context.number);
    connection.reply(0, args, &filter, &fds[..if new { 4 } else { 3 }])
}

/// Patches the peer's process.
fn patch(shared: &Shared, connection: &Connection, peer: Peer, asked: &Asked) -> nix::Result<()> {
    let (space, _) = shared.space_of(peer.pid).map_err(|e| errno_of(&e))?;
    if !space.is_inline() {
        return Err(Errno::EPERM);
    }
    // Tasks that share the memory and aren't threads of it can't be stopped; a vfork child's parent is one.
    let parent = task::parent_of(peer.pid).unwrap_or(0);
    let shares = ummunotify_sys::process::same_address_space(peer.pid, parent).unwrap_or(false);
    if space.pid != peer.pid || space.many_tasks() || shares {
        log::info!("process {}: not patched, others share its memory", peer.pid);
        return Err(Errno::EBUSY);
    }
    let alone = std::fs::read_dir(format!("/proc/{}/task", peer.pid)).is_ok_and(|tasks| tasks.count() == 1);
    if asked.args[1] != 0 && !alone && !crate::patch::is_sound(peer.pid, asked.args[1] as u32) {
        log::info!("process {}: not patched, a thread may notice the stop", peer.pid);
        return Err(Errno::EBUSY);
    }
    let start = std::time::Instant::now();
    let sites = crate::patch::patch(peer.pid, asked.args[0], alone).map_err(|e| {
        log::info!("process {}: not patched: {e}", peer.pid);
        errno_of(&e)
    })?;
    log::info!("process {}: {sites} sites patched in {:.1?}", peer.pid, start.elapsed());
    connection.reply(0, [0; 6], &[], &[])
}

fn listener(shared: &Shared, connection: &Connection, asked: Asked) -> nix::Result<()> {
    let Ok([fd]) = <[OwnedFd; 1]>::try_from(asked.fds) else { return Err(Errno::EPROTO) };
    let listener = Listener::new(fd).map_err(|e| errno_of(&e))?;
    if shared.gate.listener.set(listener).is_err() {
        return Err(Errno::EBUSY);
    }
    connection.reply(0, [0; 6], &[], &[])
}

/// The client has closed its own copy of the listener: from here on, calls are answered, and the open may
/// return once no thread is left in a call that began before the filter.
fn closed(shared: &Shared, connection: &Connection, peer: Peer, asked: &Asked) -> nix::Result<()> {
    if shared.gate.listener.get().is_none() {
        return Err(Errno::EPROTO);
    }
    shared.tell(Message::Serve);
    if asked.args[0] == 1 {
        // It executes its program next; nothing has been opened.
        if let Err(e) = shared.attachment.enclose(peer.pid) {
            log::debug!("process {}: {e}", peer.pid);
        }
        return connection.reply(0, [0; 6], &[], &[]);
    }
    trap_is_set(shared, connection, peer)
}

/// Traces the client, and gives it the filter to install. That one lets nothing through: what was granted of the
/// inline layer is taken back.
fn seize(shared: &Shared, connection: &Connection, peer: Peer) -> nix::Result<()> {
    if shared.device.is_some() || shared.gate.listener.get().is_some() {
        return Err(Errno::EBUSY);
    }
    let (answer, seized) = crossbeam_channel::bounded(1);
    shared.tell(Message::Seize(peer.pid, answer));
    seized.recv().map_err(|_| Errno::EIO)??;
    shared.gate.set_traced();
    shared.spaces().iter().for_each(|space| space.set_inline(false));
    let filter = Filter::bytes(&Filter::tracing(&Policy::default()));
    connection.reply(0, [0; 6], &filter, &[])
}

/// The client has installed the filter, or none: from here on its calls are stopped.
fn traced(shared: &Shared, connection: &Connection, peer: Peer, asked: &Asked) -> nix::Result<()> {
    if !shared.gate.is_traced() {
        return Err(Errno::EPROTO);
    }
    let (answer, begun) = crossbeam_channel::bounded(1);
    shared.tell(Message::Traced(asked.args[0] == 1, answer));
    begun.recv().map_err(|_| Errno::EIO)?;
    trap_is_set(shared, connection, peer)
}

/// Calls are trapped from now on. The open may return once no thread is left in a call that began before.
fn trap_is_set(shared: &Shared, connection: &Connection, peer: Peer) -> nix::Result<()> {
    let left = settle::settle(shared, peer.pid);
    let (space, _) = shared.space_of(peer.pid).map_err(|e| errno_of(&e))?;
    // Only now no thread can get a ring unseen.
    expect_ring(shared, &space);
    if left.is_nobody()
        && let Ok(table) = task::mappings(peer.pid, &shared.kernel)
    {
        space.set_heap_end(maps::heap_end(&table).unwrap_or(0));
    }
    connection.reply(0, [0; 6], &[], &[])?;
    if !left.is_nobody() {
        log::warning!("process {}: {left} inside calls from before the filter", peer.pid);
        follow(peer.pid, space, left);
    }
    Ok(())
}

/// Invalidates everything once the threads that were late have come out: apart from this connection, whose client
/// may ask for more at once.
pub(super) fn follow(pid: u32, space: Arc<Space>, left: Late) {
    let late = Arc::new((space, left));
    let follow = move |late: &(Arc<Space>, Late)| {
        settle::follow(pid, late.1.clone());
        late.0.invalidate_all(ummunotify_engine::Reason::LateThread);
    };
    let theirs = Arc::clone(&late);
    let started = std::thread::Builder::new()
        .name("follow".into())
        .stack_size(256 * 1024)
        .spawn(move || follow(&theirs));
    if started.is_err() {
        follow(&late);
    }
}

/// A client gives the userfaultfd of its address space, or says that it has none to give.
fn userfaultfd(shared: &Shared, connection: &Connection, peer: Peer, asked: Asked) -> nix::Result<()> {
    let (space, _) = shared.space_of(peer.pid).map_err(|e| errno_of(&e))?;
    let adopted = match <[OwnedFd; 1]>::try_from(asked.fds) {
        Ok([fd]) => space.fault.adopt(fd).map_err(|e| errno_of(&e)),
        Err(_) => Err(Errno::from_raw(i32::try_from(asked.args[0]).unwrap_or(libc::EPROTO))),
    };
    let mut missing = 0;
    match (adopted, shared.layers.fault) {
        (Ok(()), FaultLayer::On) => space.watch_registered(&shared.kernel).map_err(|e| errno_of(&e))?,
        (Err(e), FaultLayer::On) => {
            fault::say_missing(&space, e, "the layer fault was asked for");
            if shared.layers.net == Net::None {
                return Err(e);
            }
            missing = e as u64;
        }
        // Whether it matters shows when there is a ring.
        (Ok(()) | Err(_), _) => {}
    }
    expect_ring(shared, &space);
    connection.reply(0, [notice(&space), missing, 0, 0, 0, 0], &[], &[])
}

/// Puts the fault layer on if the process has a ring already.
fn expect_ring(shared: &Shared, space: &Arc<Space>) {
    if shared.layers.fault == FaultLayer::Off || !rings::has_ring(space.pid) {
        return;
    }
    if let Err(e) = space.expect_bypass(&shared.kernel) {
        fault::say_missing(space, errno_of(&e), "it has an io_uring ring");
    }
}

fn notice(space: &Space) -> u64 {
    if space.fault.take_notice() { NOTICE_RING } else { 0 }
}

/// Tells a holder what it holds; the opener also gets back what it needs to use the arena itself.
fn attach(
    shared: &Shared,
    connection: &Connection,
    peer: Peer,
    context: &Arc<Context>,
    space: &Arc<Space>,
) -> nix::Result<()> {
    // Where readers sleep in calls that only the supervisor knows of, it alone works on the arena.
    let opener = context.is_shims && is_opener(shared, peer, space);
    let args = [u64::from(opener), context.number, context.inode, 0, 0, 0];
    if !opener {
        // Where the descriptor went somebody may take bytes out without a word to us.
        context.engine.arm();
    }
    let fds = context.shared_memory();
    connection.reply(0, args, &[], if opener { &fds } else { &[] })
}

/// Whether the peer runs in the address space that opened the device.
fn is_opener(shared: &Shared, peer: Peer, space: &Space) -> bool {
    !space.is_gone() && task::mappings(peer.pid, &shared.kernel).is_ok_and(|table| space.owns(&table))
}

/// A call of the device by somebody else than the opener, or while the opener may not do it itself.
fn call(
    shared: &Shared,
    connection: &Connection,
    context: &Arc<Context>,
    space: &Arc<Space>,
    asked: &Asked,
) -> nix::Result<()> {
    let host = SupervisorHost::new(Arc::clone(space), Arc::clone(context));
    let [first, second, third, ..] = asked.args;
    if asked.op == Op::Register {
        space.await_calls(PageRange::new(first, second));
    }
    let recorder = context.recorder();
    let done = |result: nix::Result<()>| match result {
        Ok(()) => connection.reply(0, [0; 6], &[], &[]),
        Err(e) => connection.refuse(e),
    };
    match asked.op {
        Op::Features => done(context.engine.exchange_features().map_err(|_| Errno::EINVAL)),
        Op::Register => {
            let region = PageRange::new(first, second);
            match recorder.register(context, &host, region, third) {
                Ok(()) => {
                    space.region_added(region, &shared.kernel);
                    connection.reply(0, [notice(space), 0, 0, 0, 0, 0], &[], &[])
                }
                Err(e) => connection.refuse(e),
            }
        }
        Op::Unregister => done(recorder.unregister(context, &host, first).map(|region| {
            space.region_removed(region, &shared.kernel);
        })),
        Op::Read => {
            let room = usize::try_from(first).unwrap_or(MAX_RECORDS).min(MAX_RECORDS);
            let read = recorder.read(context, &host, room, &mut RemotePort { connection, context });
            // The waker reads under it.
            drop(recorder);
            context.await_waker(WAKING);
            match read {
                Ok(n) => connection.reply(i64::try_from(n).unwrap_or(0), [0; 6], &[], &[]),
                Err(e) => connection.refuse(e),
            }
        }
        _ => Err(Errno::EPROTO),
    }
}

/// A context and the address space that opened it.
type Home = (Arc<Space>, Arc<Context>);

/// The contexts that a request is about: that of the device descriptor that is shown, or all open ones of the
/// process whose pidfd it is.
fn contexts_of(shared: &Shared, peer: Peer, shown: &[OwnedFd]) -> Result<Vec<Home>, Failure> {
    let unknown = Failure { hurdle: Hurdle::NoContext, errno: Errno::ESRCH };
    let [shown] = shown else { return Err(Failure { errno: Errno::EPROTO, ..unknown }) };
    if let Ok(inode) = pipe_inode(shown) {
        return shared.find(|context| context.inode == inode).map(|found| vec![found]).ok_or(unknown);
    }
    let pid = ummunotify_sys::process::pidfd_process(shown).ok_or(unknown)?;
    let space = shared.live_space(pid).ok_or(unknown)?;
    if peer.uid != 0 && !task::belongs_to(pid, peer.uid) {
        log::warning!("user {} may not switch process {pid}", peer.uid);
        return Err(Failure { hurdle: Hurdle::Forbidden, errno: Errno::EPERM });
    }
    let open = space.contexts().into_iter().filter(|context| !context.is_closed() && !context.is_ended());
    let found: Vec<_> = open.map(|context| (Arc::clone(&space), context)).collect();
    if found.is_empty() { Err(unknown) } else { Ok(found) }
}

/// How many seconds an opener may take to close its copy of the device.
const CLOSE_SECONDS: i64 = 5;

/// The longest that a switch may wait.
const MAX_PATIENCE: Duration = Duration::from_secs(3600);

/// Moves contexts to another backend.
fn switch(shared: &Shared, connection: &Connection, peer: Peer, asked: Asked) -> nix::Result<()> {
    let [kmod, patience, ..] = asked.args;
    let due = Instant::now() + Duration::from_millis(patience).min(MAX_PATIENCE);
    let found = contexts_of(shared, peer, &asked.fds);
    // A device descriptor that we hold hides that the clients have closed theirs.
    drop(asked.fds);
    let (mut moved, mut there) = (0, 0);
    let done = found.and_then(|contexts| {
        contexts.iter().try_for_each(|(space, context)| {
            let moves = match kmod {
                0 => switch::to_supervisor(shared, space, context, due)?,
                // Whoever asked may be gone by now: what was begun is brought to its end all the same.
                _ => switch::to_module(shared, space, context, due, || {
                    let _ = connection.reply(1, [context.number, 0, 0, 0, 0, 0], &[], &[]);
                })?,
            };
            *(if moves { &mut moved } else { &mut there }) += 1;
            Ok(())
        })
    });
    match done {
        Ok(()) => connection.reply(0, [moved, there, 0, 0, 0, 0], &[], &[]),
        Err(Failure { hurdle, errno }) => {
            log::info!("a switch for process {} failed: {hurdle:?}, {errno}", peer.pid);
            let args = [hurdle as u64, moved, 0, 0, 0, 0];
            connection.reply(-i64::from(errno as i32), args, &[], &[])
        }
    }
}

fn whereabouts(shared: &Shared, connection: &Connection, peer: Peer, asked: &Asked) -> nix::Result<()> {
    match contexts_of(shared, peer, &asked.fds) {
        Ok(contexts) => {
            let on_module =
                contexts.iter().filter(|(_, c)| matches!(*c.recorder(), Recorder::Module(_))).count();
            connection.reply(0, [contexts.len() as u64, on_module as u64, 0, 0, 0, 0], &[], &[])
        }
        Err(Failure { hurdle, errno }) => {
            connection.reply(-i64::from(errno as i32), [hurdle as u64, 0, 0, 0, 0, 0], &[], &[])
        }
    }
}

/// About a process that was attached to: tells of it, serves it again, or parks it.
fn parking(shared: &Shared, connection: &Connection, peer: Peer, asked: &Asked) -> nix::Result<()> {
    use wire::parking::{OWN, PARK, PARKED, SERVE, SERVED};
    let attachment = &shared.attachment;
    let refuse = |hurdle: Hurdle, errno: Errno| {
        connection.reply(-i64::from(errno as i32), [hurdle as u64, 0, 0, 0, 0, 0], &[], &[])
    };
    let [shown] = asked.fds.as_slice() else { return Err(Errno::EPROTO) };
    let [wanted, token, ..] = asked.args;
    let Some(pid) = ummunotify_sys::process::pidfd_process(shown) else {
        return refuse(Hurdle::NoContext, Errno::ESRCH);
    };
    if peer.uid != 0 && !task::belongs_to(pid, peer.uid) {
        return refuse(Hurdle::Forbidden, Errno::EPERM);
    }
    // The token is told to those under the filter, and to who asked on their behalf.
    if token == shared.token && attachment.is_one() {
        attachment.admit(pid).map_err(|e| errno_of(&e))?;
    }
    if !attachment.has(pid) {
        // By its number: two processes that end look as if they shared their memory.
        let serves = |space: &Arc<Space>| space.pid == pid && !space.is_gone() && space.process_alive();
        let own = token == shared.token || attachment.encloses(pid) || shared.spaces().iter().any(serves);
        return match own {
            true => connection.reply(OWN, [0; 6], &[], &[]),
            false => refuse(Hurdle::NoContext, Errno::ESRCH),
        };
    }
    let before = if attachment.is_parked() { PARKED } else { SERVED };
    let mut ended = 0;
    match (wanted, before) {
        (SERVE, PARKED) => attachment.serve(),
        (PARK, SERVED) => ended = attachment.park(shared),
        _ => {}
    }
    if wanted != wire::parking::TELL {
        log::info!("process {pid}: {wanted:?} after {before}, {ended} contexts ended");
    }
    connection.reply(before, [ended, std::process::id().into(), 0, 0, 0, 0], &[], &[])
}

/// The opener hands the real device over. Another process's device would watch the wrong address space.
fn device(shared: &Shared, connection: &Connection, peer: Peer, asked: Asked) -> nix::Result<()> {
    let [number, errno, ..] = asked.args;
    let mut fds = asked.fds.into_iter();
    let inode = pipe_inode(&fds.next().ok_or(Errno::EPROTO)?)?;
    let (space, context) = shared.find(|context| context.inode == inode).ok_or(Errno::ENODEV)?;
    if !is_opener(shared, peer, &space) {
        return Err(Errno::EPERM);
    }
    let opened = match (i32::try_from(errno).unwrap_or(libc::EIO), fds.next()) {
        (0, Some(device)) => Ok(device),
        (0, None) => return Err(Errno::EPROTO),
        (errno, _) => Err(Errno::from_raw(errno)),
    };
    // With its connection it has closed its copy of the device. One more reference would outlive the switch
    // back, and go on counting where nobody rings.
    connection.limit(CLOSE_SECONDS)?;
    if !matches!(connection.receive(), Ok(None)) {
        return Err(Errno::EPROTO);
    }
    switch::deliver(&context, u32::try_from(number).unwrap_or(0), opened)
}

/// Where the records of a read by another process go: to its shim, which says whether they reached the
/// caller's buffer. That wait is under the arena's lock, so it is short; a peer that doesn't answer gets
/// nothing, and nothing is consumed.
struct RemotePort<'a> {
    connection: &'a Connection,
    context: &'a Context,
}

impl Port for RemotePort<'_> {
    type Error = Errno;

    fn deliver(&mut self, records: &[Event]) -> Result<(), Errno> {
        let mut payload = Vec::with_capacity(size_of_val(records));
        for r in records {
            payload.extend(r.kind.to_ne_bytes());
            payload.extend(r.flags.to_ne_bytes());
            payload.extend(r.hint_start.to_ne_bytes());
            payload.extend(r.hint_end.to_ne_bytes());
            payload.extend(r.cookie_counter.to_ne_bytes());
        }
        self.connection.reply(i64::try_from(records.len()).unwrap_or(0), [0; 6], &payload, &[])?;
        match self.connection.receive()? {
            Some(Asked { op: Op::Commit, args: [1, ..], .. }) => Ok(()),
            Some(Asked { op: Op::Commit, .. }) => Err(Errno::EFAULT),
            _ => Err(Errno::EPROTO),
        }
    }

    fn settle(&mut self, engine: &Engine, readable: bool) {
        if !readable {
            self.context.hush(engine);
        }
    }
}

/// The errno of an I/O error; EIO if it has none.
pub(super) fn errno_of(e: &std::io::Error) -> Errno {
    e.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
