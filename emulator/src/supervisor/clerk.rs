//! Serves one connection: opens, and calls by holders that can't use the arena themselves.
//!
//! Each connection has a thread of its own, since a request may wait: for the lock of an arena, for a mapping
//! table, for the peer. The peer is distrusted; it gets only what the descriptor that it shows entitles it to.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use ummunotify_abi::PageRange;
use ummunotify_abi::device::{Event, MAX_RECORDS};
use ummunotify_abi::wire::Op;
use ummunotify_engine::{Engine, Port, ReadError, RegisterError, UnregisterError};

use super::context::Context;
use super::host::SupervisorHost;
use super::log;
use super::settle;
use super::shared::{Message, Shared};
use super::socket::{Asked, Connection, Peer};
use super::space::Space;
use super::task;
use crate::target::maps;
use crate::trap::filter::Filter;
use crate::trap::policy::Policy;
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
            Op::Listener | Op::Closed => Err(Errno::EPERM),
            Op::Counter => with_context(shared, &asked, |context, _| {
                let counter = context.read_only_counter().map_err(|_| Errno::ENOMEM)?;
                connection.reply(0, [0; 6], &[], &[counter.as_fd()])
            }),
            Op::Attach => with_context(shared, &asked, |context, space| {
                attach(shared, connection, peer, context, space)
            }),
            Op::Features | Op::Register | Op::Unregister | Op::Read => {
                with_context(shared, &asked, |context, space| call(connection, context, space, &asked))
            }
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
    let [flags, needs_filter, ..] = asked.args;
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
    let filter =
        if needs_filter != 0 { Filter::bytes(&Filter::build(&Policy::default())) } else { Vec::new() };
    let [arena, counter] = context.shared_memory();
    let fds = [device.as_fd(), arena, counter, space.marker()];
    let args = [context.number, context.inode, shared.token, u64::from(new), 0, std::process::id().into()];
    shared.add(&space, &context);
    log::info!("process {}: opened context {}", peer.pid, context.number);
    connection.reply(0, args, &filter, &fds[..if new { 4 } else { 3 }])
}

fn listener(shared: &Shared, connection: &Connection, asked: Asked) -> nix::Result<()> {
    let Ok([fd]) = <[OwnedFd; 1]>::try_from(asked.fds) else { return Err(Errno::EPROTO) };
    let listener = Listener::new(fd).map_err(|e| errno_of(&e))?;
    if shared.listener.set(listener).is_err() {
        return Err(Errno::EBUSY);
    }
    connection.reply(0, [0; 6], &[], &[])
}

/// The client has closed its own copy of the listener: from here on, calls are answered, and the open may
/// return once no thread is left in a call that began before the filter.
fn closed(shared: &Shared, connection: &Connection, peer: Peer, asked: &Asked) -> nix::Result<()> {
    if shared.listener.get().is_none() {
        return Err(Errno::EPROTO);
    }
    shared.tell(Message::Serve);
    if asked.args[0] == 1 {
        // It executes its program next; nothing has been opened.
        return connection.reply(0, [0; 6], &[], &[]);
    }
    let left = settle::settle(peer.pid);
    let (space, _) = shared.space_of(peer.pid).map_err(|e| errno_of(&e))?;
    if let Ok(table) = task::mappings(peer.pid, &shared.kernel) {
        space.set_heap_end(maps::heap_end(&table).unwrap_or(0));
    }
    connection.reply(0, [0; 6], &[], &[])?;
    if !left.is_empty() {
        log::warning!(
            "process {}: {} threads stay inside calls from before the filter",
            peer.pid,
            left.len()
        );
        settle::follow(peer.pid, left);
        space.invalidate_all(ummunotify_engine::Reason::LateThread);
    }
    Ok(())
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
    let opener = context.is_shims
        && !space.is_gone()
        && task::mappings(peer.pid, &shared.kernel)
            .is_ok_and(|table| table.iter().any(|m| space.is_marker(m)));
    let args = [u64::from(opener), context.number, context.inode, 0, 0, 0];
    let fds = context.shared_memory();
    connection.reply(0, args, &[], if opener { &fds } else { &[] })
}

/// A call of the device by somebody else than the opener.
fn call(
    connection: &Connection,
    context: &Arc<Context>,
    space: &Arc<Space>,
    asked: &Asked,
) -> nix::Result<()> {
    let host = SupervisorHost::new(Arc::clone(space), Arc::clone(context));
    let [first, second, third, ..] = asked.args;
    let done = |result: nix::Result<()>| match result {
        Ok(()) => connection.reply(0, [0; 6], &[], &[]),
        Err(e) => connection.refuse(e),
    };
    match asked.op {
        Op::Features => done(context.engine.exchange_features().map_err(|_| Errno::EINVAL)),
        Op::Register => {
            done(context.engine.register(&host, PageRange::new(first, second), third).map_err(|e| match e {
                RegisterError::CookieInUse => Errno::EINVAL,
                RegisterError::NoMemory => Errno::ENOMEM,
                RegisterError::Broken => Errno::EIO,
            }))
        }
        Op::Unregister => done(context.engine.unregister(&host, first).map_err(|e| match e {
            UnregisterError::UnknownCookie => Errno::EINVAL,
            UnregisterError::Broken => Errno::EIO,
        })),
        Op::Read => {
            let room = usize::try_from(first).unwrap_or(MAX_RECORDS).min(MAX_RECORDS);
            let mut port = RemotePort { connection, context };
            match context.engine.read(&host, room, &mut port) {
                Ok(0) => connection.reply(0, [0; 6], &[], &[]),
                Ok(n) => connection.reply(i64::try_from(n).unwrap_or(0), [0; 6], &[], &[]),
                Err(ReadError::NotReadable) => connection.refuse(Errno::EAGAIN),
                Err(ReadError::Port(e)) => connection.refuse(e),
                Err(ReadError::Broken) => connection.refuse(Errno::EIO),
            }
        }
        Op::Open | Op::Listener | Op::Closed | Op::Counter | Op::Attach | Op::Commit => Err(Errno::EPROTO),
    }
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
