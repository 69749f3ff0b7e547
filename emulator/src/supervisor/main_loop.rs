//! The main loop: trapped calls in, answers out.

mod aside;
mod contexts;
mod home;
mod miss;
mod strangers;
mod trace;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::epoll::{EpollEvent, EpollFlags, EpollTimeout};
use ummunotify_abi::PageRange;
use ummunotify_abi::wire::{self, MAX_ADDRESS};
use ummunotify_engine::Reason;
use ummunotify_sys::notify::{Notification, Ready};
use ummunotify_sys::process;

use self::home::Home;
use self::strangers::Strangers;
use self::trace::Tracer;
pub use self::trace::block_signal as block_child_signal;
use super::clerk::{self, Entrance};
use super::context::Context;
use super::crowded::CrowdedTarget;
use super::desk::Desk;
use super::fault::Untold;
use super::gate::Held;
use super::log;
use super::shared::{Message, Shared};
use super::socket::{Connection, Door};
use super::space::Space;
use super::spare;
use super::worker::{Finding, Job};
use crate::trap::device::DeviceCall;
use crate::trap::effect::{Effect, effect};
use crate::trap::operation::{Decoded, Operation, Reach, Syscall};
use crate::trap::policy::nr;
use crate::trap::{FaultLayer, Rings};

/// What an epoll event is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// A message.
    Wake,
    /// A descendant connects.
    Door,
    /// Nobody holds the descriptor of that context any more.
    Bell(u64),
    /// A holder of that context's descriptor connects.
    ContextDoor(u64),
    /// That process ends.
    Process(u32),
    /// A traced task has something to tell.
    Tracees,
    /// The kernel module has recorded something for that context.
    Module(u64),
}

impl Source {
    /// As epoll carries it.
    pub const fn word(self) -> u64 {
        match self {
            Self::Wake => 0,
            Self::Door => 1,
            Self::Bell(n) => 2 | n << 3,
            Self::ContextDoor(n) => 3 | n << 3,
            Self::Process(pid) => 4 | (pid as u64) << 3,
            Self::Module(n) => 5 | n << 3,
            Self::Tracees => 6,
        }
    }

    const fn of(word: u64) -> Option<Self> {
        Some(match word & 7 {
            0 => Self::Wake,
            1 => Self::Door,
            2 => Self::Bell(word >> 3),
            3 => Self::ContextDoor(word >> 3),
            4 => Self::Process((word >> 3) as u32),
            5 => Self::Module(word >> 3),
            6 => Self::Tracees,
            _ => return None,
        })
    }
}

/// A call that waits at its entry.
#[derive(Clone, Copy, Debug)]
struct Trapped {
    held: Held,
    /// Kernel thread id of the task in our pid namespace; 0 if it isn't visible there.
    tid: u32,
    call: Syscall,
    /// Address behind the entry instruction; 0 where the tracer stopped it.
    behind: u64,
}

impl From<&Notification> for Trapped {
    fn from(call: &Notification) -> Self {
        Self {
            held: Held::Notified(call.id),
            tid: call.tid,
            call: Syscall { arch: call.arch, nr: call.nr, args: call.args },
            behind: call.instruction_pointer,
        }
    }
}

/// Connections served at once; further ones wait in the socket's backlog.
const MAX_CLERKS: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct MainLoop {
    shared: Arc<Shared>,
    door: Door,
    clerks: Arc<AtomicUsize>,
    contexts: HashMap<u64, (Arc<Space>, Arc<Context>)>,
    /// By their numbers. A pidfd of our own: the one of a space goes with that.
    watched_processes: HashMap<u32, OwnedFd>,
    /// Tasks that were seen in a space. A wrong entry costs a spurious invalidation while there is one space; with
    /// more of them it would miss one, so then it isn't used: the number may have come back in another space.
    members: BTreeMap<u32, Arc<Space>>,
    strangers: Strangers,
    pending: VecDeque<Arc<Job>>,
    desk: Desk,
    /// Calls come from the listener.
    serving: bool,
    hung_up: bool,
    tracer: Tracer,
    /// When to look again whether closed contexts' counters are still mapped.
    recheck: Option<Instant>,
    /// Calls that the listener told of.
    notified: u64,
}

impl MainLoop {
    /// Listens at the token's address.
    pub fn new(shared: Arc<Shared>) -> anyhow::Result<Self> {
        let mut name = [0; MAX_ADDRESS];
        let length = wire::supervisor_address(&mut name, shared.token);
        let door = Door::open(&name[..length])?;
        let add = |fd: std::os::fd::BorrowedFd<'_>, source: Source| {
            shared.epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, source.word()))
        };
        add(shared.wake.as_fd(), Source::Wake)?;
        add(door.as_fd(), Source::Door)?;
        Ok(Self {
            shared,
            door,
            clerks: Arc::new(AtomicUsize::new(0)),
            contexts: HashMap::new(),
            watched_processes: HashMap::new(),
            members: BTreeMap::new(),
            strangers: Strangers::new(process::descriptor_limit()),
            pending: VecDeque::new(),
            desk: Desk::new(),
            serving: false,
            hung_up: false,
            tracer: Tracer::default(),
            recheck: None,
            notified: 0,
        })
    }

    /// Serves a connection on a thread of its own.
    pub fn serve_connection(&self, connection: Connection, entrance: Entrance) {
        let (shared, clerks) = (Arc::clone(&self.shared), Arc::clone(&self.clerks));
        clerks.fetch_add(1, Ordering::AcqRel);
        let started =
            std::thread::Builder::new().name("clerk".into()).stack_size(512 * 1024).spawn(move || {
                // Half of the places stay free of those who say nothing.
                let crowded = || clerks.load(Ordering::Acquire) > MAX_CLERKS / 2;
                clerk::serve(&shared, &connection, entrance, crowded);
                drop(connection);
                clerks.fetch_sub(1, Ordering::AcqRel);
                shared.tell(Message::Ended);
            });
        if let Err(e) = started {
            // The connection closes with the closure, which its peer sees.
            self.clerks.fetch_sub(1, Ordering::AcqRel);
            log::warning!("can't start a thread for a connection: {e}");
        }
    }

    /// Does something on a thread of its own; the loop goes on at least until that is done.
    pub fn busy_with(
        &self,
        name: &str,
        work: impl FnOnce(&Arc<Shared>) + Send + 'static,
    ) -> std::io::Result<()> {
        let (shared, clerks) = (Arc::clone(&self.shared), Arc::clone(&self.clerks));
        clerks.fetch_add(1, Ordering::AcqRel);
        let worker = std::thread::Builder::new().name(name.into()).stack_size(512 * 1024);
        let started = worker.spawn(move || {
            work(&shared);
            clerks.fetch_sub(1, Ordering::AcqRel);
            shared.tell(Message::Ended);
        });
        started.map(drop).inspect_err(|_| {
            self.clerks.fetch_sub(1, Ordering::AcqRel);
        })
    }

    /// Runs until nobody needs us.
    pub fn run(&mut self) -> anyhow::Result<()> {
        let mut events = [EpollEvent::empty(); 32];
        while !self.finished() {
            let mut timeout = self.timeout();
            let mut beside = true;
            if self.serving {
                let seen = self.listen(timeout)?;
                let missed = seen.call && self.receive();
                // Most calls, and then nothing else is to be done.
                if missed && !seen.beside && timeout.is_none() {
                    continue;
                }
                (timeout, beside) = (EpollTimeout::ZERO, seen.beside);
            }
            let waited = beside.then(|| self.shared.epoll.wait(&mut events, timeout));
            let ready = match waited.unwrap_or(Ok(0)) {
                Ok(n) => n,
                Err(nix::Error::EINTR) => 0,
                Err(e) => return Err(e.into()),
            };
            for event in &events[..ready] {
                match Source::of(event.data()) {
                    Some(Source::Wake) => {
                        let _ = self.shared.wake.read();
                        self.messages();
                    }
                    Some(Source::Door) => self.accept(None),
                    Some(Source::Bell(number)) => self.last_closed(number),
                    Some(Source::ContextDoor(number)) => self.accept(Some(number)),
                    Some(Source::Process(pid)) => self.process_ended(pid),
                    Some(Source::Tracees) => self.tracer.signalled(),
                    Some(Source::Module(number)) => {
                        if let Some((_, context)) = self.contexts.get(&number) {
                            context.ring();
                        }
                    }
                    None => {}
                }
            }
            self.stops();
            self.deadlines();
            self.answers();
            self.findings();
            if self.recheck.is_some_and(|at| at <= Instant::now()) {
                self.recheck = None;
                self.recheck_lingering();
            }
        }
        if wants_statistics() {
            super::log::print(format_args!("supervisor: the filter trapped {} calls", self.notified));
        }
        log::info!("nobody needs this supervisor any more");
        Ok(())
    }

    fn finished(&self) -> bool {
        let filtered = self.shared.gate.listener.get().is_some() && !self.hung_up;
        !filtered
            && !self.tracer.is_needed()
            && self.contexts.is_empty()
            && self.clerks.load(Ordering::Acquire) == 0
            && self.shared.inbox.is_empty()
    }

    fn timeout(&self) -> EpollTimeout {
        if self.tracer.has_more() {
            return EpollTimeout::ZERO;
        }
        let job = self.pending.iter().find(|job| !job.is_claimed()).map(|job| job.due);
        let Some(at) = [job, self.desk.due(), self.recheck].into_iter().flatten().min() else {
            return EpollTimeout::NONE;
        };
        let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        EpollTimeout::try_from(left).unwrap_or(EpollTimeout::MAX)
    }

    fn messages(&mut self) {
        while let Ok(message) = self.shared.inbox.try_recv() {
            match message {
                Message::Opened(space, context) => self.watch(space, context),
                Message::Serve => self.start_serving(),
                Message::Seize(pid, answer) => {
                    // Who asked may have gone meanwhile.
                    let _ = answer.send(self.seize(pid));
                }
                Message::Traced(filtered, answer) => {
                    self.tracer.begin(filtered);
                    let _ = answer.send(());
                }
                Message::Outside(tid, answer) => self.tracer.ask_outside(tid, answer),
                Message::CounterSeen(number, at) => self.counter_seen(number, at),
                Message::Ended => {}
                Message::Ordinary(call) => self.trapped(Trapped::from(&call)),
            }
        }
    }

    fn start_serving(&mut self) {
        self.serving = self.shared.gate.listener.get().is_some() && !self.hung_up;
    }

    fn accept(&mut self, context: Option<u64>) {
        if self.clerks.load(Ordering::Acquire) >= MAX_CLERKS {
            // Level-triggered: it comes again when a clerk has gone. Yielding keeps this from spinning hard.
            std::thread::sleep(Duration::from_micros(200));
            return;
        }
        let connection = {
            let _spare = spare::leave();
            match context {
                None => self.door.accept(),
                Some(number) => self.contexts.get(&number).and_then(|(_, c)| c.door()).and_then(Door::accept),
            }
        };
        match connection {
            Some(connection) => self.serve_connection(connection, Entrance::Door),
            // No descriptor is left, perhaps. As above.
            None => std::thread::sleep(Duration::from_micros(200)),
        }
    }

    fn findings(&mut self) {
        while let Ok(Finding::Stranger(tid, pidfd)) = self.shared.findings.try_recv() {
            // A worker may say so late: meanwhile the process may have opened the device.
            if self.shared.spaces().iter().all(|s| s.pid != tid || s.is_gone()) {
                self.strangers.insert(tid, pidfd);
            }
        }
    }

    /// Answers the calls whose target kept us waiting too long.
    fn deadlines(&mut self) {
        while self.pending.front().is_some_and(|job| job.is_claimed()) {
            self.pending.pop_front();
        }
        let now = Instant::now();
        for job in self.pending.iter().take_while(|job| job.due <= now) {
            let stuck = |stuck| job.candidates.iter().for_each(|s| s.stuck.store(stuck, Ordering::Release));
            // Before the claim: the worker that finds it claimed takes this back.
            stuck(true);
            if !job.claim() {
                stuck(false);
            } else {
                log::warning!("task {}: {:?} took too long to look at: all invalid", job.tid, job.operation);
                self.give_up(&job.candidates, job.held, job.tid, &job.operation, &job.spared);
            }
        }
        self.desk.deadlines(&self.shared);
    }

    fn give_up(&self, spaces: &[Arc<Space>], held: Held, tid: u32, operation: &Operation, spared: &[u64]) {
        for space in spaces {
            space.invalidate_all_but(Reason::Deadline, spared);
            space.fault.recorded(tid, &[PageRange::ALL]);
        }
        let untold = |space: &Arc<Space>| {
            let fails = operation.fails_on_watched().filter(|_| !space.fault.passes(tid, operation));
            let reach = operation.reach_with_heap(space.heap_limit());
            let call = fails.map(|over| Untold { over, fails: true });
            Some((Arc::clone(space), call.or_else(|| space.fault.untold(operation, reach))?))
        };
        let off: Vec<_> = spaces.iter().filter_map(untold).collect();
        if off.is_empty() {
            self.shared.gate.recorded(held, spaces, &[PageRange::ALL]);
            return;
        }
        // It would fail, or not tell its end. This can wait for the target, and delays that one alone.
        let spared = spared.to_vec();
        self.aside(held, spaces.to_vec(), PageRange::ALL, move |shared| {
            for (space, call) in off {
                space.take_off(tid, call, &[PageRange::ALL], &space.begins(), &spared, &shared.kernel);
                space.tend(&shared.kernel);
            }
        });
    }

    /// Lets a call go on that invalidates nothing in any space.
    fn proceed(&self, held: Held) {
        self.shared.gate.answer(held, &[], &[]);
    }

    /// Waits for a trapped call, or for one of the other sources.
    fn listen(&mut self, timeout: EpollTimeout) -> std::io::Result<Ready> {
        let Some(listener) = self.shared.gate.listener.get() else { return Ok(Ready::default()) };
        let ready = listener.wait(self.shared.epoll.0.as_fd(), timeout.into())?;
        if ready.over && !ready.call {
            // The last task under the filter is gone.
            (self.serving, self.hung_up) = (false, true);
        }
        Ok(ready)
    }

    /// Handles the trapped call that the listener has told of; true if it hit nothing and was let go at once.
    fn receive(&mut self) -> bool {
        let Some(listener) = self.shared.gate.listener.get() else { return false };
        let call = match listener.receive() {
            Ok(Some(call)) => call,
            Ok(None) => return false,
            Err(e) => {
                log::warning!("can't receive a notification: {e}");
                return false;
            }
        };
        self.notified += 1;
        if !self.shared.inbox.is_empty() {
            // An open that was over before this call began must be known to it.
            self.messages();
        }
        if self.shared.attachment.is_silent() && self.contexts.is_empty() && call.nr != nr::PRCTL {
            // Nobody has the device, and nobody is to get it.
            self.proceed(Held::Notified(call.id));
            return false;
        }
        let trapped = Trapped::from(&call);
        // A task without a number here can't be looked at.
        if let Some(band) = self.shared.device
            && call.tid != 0
            && let Some(asks) = DeviceCall::new(&trapped.call, band)
            && !(self.shared.attachment.is_silent() && matches!(asks, DeviceCall::Open { .. }))
        {
            self.desk.submit(&self.shared, call, asks);
            return false;
        }
        if self.misses(&trapped) {
            self.proceed(trapped.held);
            return true;
        }
        self.trapped(trapped);
        false
    }

    /// Has one of our own calls return this. The kernel knows none of them: a traced one is made and does nothing.
    fn answer_with(&mut self, held: Held, value: i64) {
        match held {
            Held::Notified(id) => self.shared.gate.listener_says(|listener| listener.answer(id, value)),
            Held::Traced { tid, .. } => {
                self.tracer.set_result(tid, value);
                self.proceed(held);
            }
        }
    }

    /// Has a call fail that isn't made.
    fn deny(&mut self, held: Held, errno: i32) {
        match held {
            Held::Notified(id) => {
                self.shared.gate.listener_says(|listener| listener.answer(id, -i64::from(errno)));
            }
            Held::Traced { tid, .. } => {
                self.tracer.skip(tid);
                self.tracer.set_result(tid, -i64::from(errno));
                self.proceed(held);
            }
        }
    }

    /// Handles a call that is none of the device's.
    fn trapped(&mut self, trapped: Trapped) {
        let Trapped { held, tid, .. } = trapped;
        let decoded = Decoded::new(&trapped.call);
        match decoded {
            // A shim asks for its supervisor.
            Decoded::Hello { version } => {
                if trapped.call.args[2] != wire::HELLO_FROM_OUTSIDE {
                    self.shared.attachment.hail();
                }
                let known = version == u64::from(wire::WIRE_VERSION);
                let token = self.shared.token.cast_signed();
                return self.answer_with(held, if known { token } else { -i64::from(libc::EPROTONOSUPPORT) });
            }
            Decoded::Ring { inode } => {
                self.ring(tid, inode);
                return self.answer_with(held, 0);
            }
            Decoded::Present => return self.deny(held, wire::PRESENT_ERRNO),
            Decoded::Ignore => return self.proceed(held),
            // Numbers of threads that have ended may come back as the child's.
            Decoded::Fork(_) => self.members.clear(),
            _ => {}
        }
        if decoded == Decoded::NewRing && self.shared.rings == Rings::Deny {
            log::info!("task {tid}: io_uring_setup is denied");
            return self.deny(held, libc::EPERM);
        }
        let home = self.home(tid, matches!(held, Held::Traced { .. }));
        match (decoded, home) {
            (Decoded::NewRing, Home::Space(space)) => self.before_ring(&trapped, vec![space]),
            (Decoded::NewRing, Home::Perhaps(spaces)) => self.before_ring(&trapped, spaces),
            (Decoded::OwnWatch { argument }, Home::Space(space)) => {
                self.before_own_watch(&trapped, argument, vec![space]);
            }
            (Decoded::OwnWatch { argument }, Home::Perhaps(spaces)) => {
                self.before_own_watch(&trapped, argument, spaces);
            }
            (Decoded::Exec, home) => {
                // A tracer hears of the execve that has succeeded.
                if matches!(held, Held::Notified(_)) {
                    self.before_exec(tid, home);
                }
                self.proceed(held);
            }
            (Decoded::NewTask, Home::Space(space)) => {
                space.set_many_tasks();
                self.proceed(held);
            }
            (Decoded::NewTask, Home::Perhaps(spaces)) => {
                spaces.iter().for_each(|s| s.set_many_tasks());
                self.proceed(held);
            }
            (Decoded::Operation(operation) | Decoded::Fork(operation), Home::Space(space)) => {
                self.operation(trapped, vec![space], false, operation);
            }
            (Decoded::Operation(operation) | Decoded::Fork(operation), Home::Perhaps(spaces)) => {
                self.operation(trapped, spaces, true, operation);
            }
            (_, Home::Elsewhere)
            | (Decoded::Ignore | Decoded::Hello { .. } | Decoded::Present | Decoded::Ring { .. }, _) => {
                self.proceed(held);
            }
        }
    }

    /// A thread of an opener has recorded a hit: the descriptor must become readable. Anybody may say so of a
    /// context of their own address space.
    fn ring(&mut self, tid: u32, inode: u64) {
        let spaces = match self.home(tid, false) {
            Home::Space(space) => vec![space],
            Home::Perhaps(spaces) => spaces,
            Home::Elsewhere => return,
        };
        for space in spaces {
            space.any(|context| {
                let named = context.inode == inode;
                if named {
                    context.ring();
                }
                named
            });
        }
    }

    /// Lets the call run at once if it can hit nothing; else hands it to a worker.
    fn operation(&mut self, call: Trapped, spaces: Vec<Arc<Space>>, proof: bool, operation: Operation) {
        let Trapped { held, tid, .. } = call;
        for space in spaces.iter().filter(|_| self.shared.layers.fault != FaultLayer::Off) {
            let reach = operation.reach_with_heap(space.heap_limit());
            space.fault.begin(tid, &operation, reach, &space.contexts());
        }
        // Before anything is decided by it: who is spared now is spared until the call is let go.
        let mut spared = Vec::new();
        spaces.iter().for_each(|s| s.spare(tid, &mut spared));
        // What the heap may cover before this call; a growing one reaches further only afterwards.
        let heap = spaces.iter().map(|s| s.heap_limit()).max().unwrap_or(0);
        let reach = operation.reach_with_heap(heap);
        if let (Held::Traced { .. }, true) = (held, reach != Reach::Nothing) {
            // Before any region is looked for on whose absence recording is left out.
            self.tracer.begin_operation(tid, &spaces, &spared);
        }
        let may_hit = spaces.iter().any(|s| s.may_be_hit(reach, &spared));
        if let ([space], Held::Notified(_), false) = (spaces.as_slice(), held, proof)
            && may_hit
            && !lives_in(space, tid)
        {
            // The number was that of a thread which has ended, and is now another process's.
            self.members.remove(&tid);
            return self.proceed(held);
        }
        if let Operation::Brk { end } = operation {
            spaces.iter().for_each(|s| s.heap_asked(end));
        }
        self.note_lingering(&spaces, operation.reach());
        let in_the_way = self.shared.layers.fault != FaultLayer::Off
            && spaces.iter().any(|s| {
                !s.fault.passes(tid, &operation) || may_hit && s.fault.untold(&operation, reach).is_some()
            });
        if !may_hit && !in_the_way {
            let reach: Vec<_> = reach.ranges().collect();
            self.shared.gate.answer(held, &spaces, &reach);
            return;
        }
        if let ([space], false) = (spaces.as_slice(), proof || in_the_way)
            && let Some(pieces) = self.known_at_once(tid, space, &operation)
        {
            log::debug!("task {tid}: {operation:?}: {pieces:x?}");
            space.record(&pieces, &spared);
            space.fault.recorded(tid, &pieces);
            self.shared.gate.recorded(held, &spaces, &pieces);
            return;
        }
        if spaces.iter().any(|s| s.stuck.load(Ordering::Acquire)) {
            self.give_up(&spaces, held, tid, &operation, &spared);
            return;
        }
        // A switch that waits for a call which it spared must see it where it is.
        if let (Held::Traced { .. }, true) = (held, spared.is_empty()) {
            self.tracer.hold_back(tid);
        }
        let job = Arc::new(Job::new(held, tid, spaces, proof, operation, spared));
        if job.candidates.first().is_some_and(|s| s.submit(Arc::clone(&job))) {
            self.pending.push_back(job);
        } else {
            self.give_up(&job.candidates, held, tid, &job.operation, &job.spared);
        }
    }

    /// What the call invalidates, where its registers tell and no look at the mapping table could make it
    /// exact: other threads may map meanwhile. Their presence is proved by one other thread that is alive.
    fn known_at_once(
        &mut self,
        tid: u32,
        space: &Arc<Space>,
        operation: &Operation,
    ) -> Option<Vec<PageRange>> {
        let pid = space.pid;
        while let Some(other) =
            self.members.iter().find(|(t, s)| **t != tid && Arc::ptr_eq(s, space)).map(|(t, _)| *t)
        {
            if process::has_thread(pid, other) {
                let mut target = CrowdedTarget::new(&self.shared.kernel);
                return match effect(operation, &mut target) {
                    Effect::Pieces(pieces) => Some(pieces),
                    Effect::All(_) => None,
                };
            }
            self.members.remove(&other);
        }
        None
    }
}

/// Whether a task is in the space, as far as the kernel tells.
fn lives_in(space: &Space, tid: u32) -> bool {
    process::has_thread(space.pid, tid) || process::same_address_space(tid, space.pid).unwrap_or(true)
}

/// Whether the environment asks for them.
fn wants_statistics() -> bool {
    std::env::var(ummunotify_abi::config::ENV_STATS).is_ok_and(|v| v == "1")
}
