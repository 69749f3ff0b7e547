//! The main loop: notifications in, answers out.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::epoll::{EpollEvent, EpollFlags, EpollTimeout};
use ummunotify_abi::PageRange;
use ummunotify_abi::wire::{self, MAX_ADDRESS};
use ummunotify_engine::{Reason, Statistics};
use ummunotify_sys::notify::{Listener, Notification};
use ummunotify_sys::process;

use super::clerk::{self, Entrance};
use super::context::Context;
use super::crowded::CrowdedTarget;
use super::desk::Desk;
use super::fault;
use super::log;
use super::shared::{Message, Shared};
use super::sleepers::GoOn;
use super::socket::{Connection, Door};
use super::space::Space;
use super::task;
use super::worker::{Finding, Job};
use crate::target::{ProcessTarget, Target as _};
use crate::trap::device::DeviceCall;
use crate::trap::effect::{Effect, effect};
use crate::trap::operation::{Decoded, Operation, Reach, Syscall};
use crate::trap::{FaultLayer, Rings};

/// What an epoll event is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// A message.
    Wake,
    /// A trapped call, or the end of the filter.
    Listener,
    /// A descendant connects.
    Door,
    /// Nobody holds the descriptor of that context any more.
    Bell(u64),
    /// A holder of that context's descriptor connects.
    ContextDoor(u64),
    /// That process ends.
    Process(u32),
    /// The kernel module has recorded something for that context.
    Module(u64),
}

impl Source {
    /// As epoll carries it.
    pub const fn word(self) -> u64 {
        match self {
            Self::Wake => 0,
            Self::Listener => 1,
            Self::Door => 2,
            Self::Bell(n) => 3 | n << 3,
            Self::ContextDoor(n) => 4 | n << 3,
            Self::Process(pid) => 5 | (pid as u64) << 3,
            Self::Module(n) => 6 | n << 3,
        }
    }

    const fn of(word: u64) -> Option<Self> {
        Some(match word & 7 {
            0 => Self::Wake,
            1 => Self::Listener,
            2 => Self::Door,
            3 => Self::Bell(word >> 3),
            4 => Self::ContextDoor(word >> 3),
            5 => Self::Process((word >> 3) as u32),
            6 => Self::Module(word >> 3),
            _ => return None,
        })
    }
}

/// Where a task lives.
#[derive(Debug)]
enum Home {
    /// In this space.
    Space(Arc<Space>),
    /// In none that we know.
    Elsewhere,
    /// In one of these or elsewhere: its mapping table must show.
    Perhaps(Vec<Arc<Space>>),
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
    watched_processes: HashSet<u32>,
    /// Tasks that were seen in a space. A wrong entry costs a spurious invalidation while there is one space; with
    /// more of them it would miss one, so then it isn't used: the number may have come back in another space.
    members: HashMap<u32, Arc<Space>>,
    /// Processes (by first task) that were seen in no space. A wrong entry would miss invalidations: each use
    /// asks the pidfd, opened before that was seen, whether it still is that process.
    strangers: HashMap<u32, OwnedFd>,
    pending: VecDeque<Arc<Job>>,
    desk: Desk,
    serving: bool,
    hung_up: bool,
    /// When to look again whether closed contexts' counters are still mapped.
    recheck: Option<Instant>,
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
            watched_processes: HashSet::new(),
            members: HashMap::new(),
            strangers: HashMap::new(),
            pending: VecDeque::new(),
            desk: Desk::new(),
            serving: false,
            hung_up: false,
            recheck: None,
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

    /// Runs until nobody needs us.
    pub fn run(&mut self) -> anyhow::Result<()> {
        let mut events = [EpollEvent::empty(); 32];
        while !self.finished() {
            let ready = match self.shared.epoll.wait(&mut events, self.timeout()) {
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
                    Some(Source::Listener) => self.listener(event.events()),
                    Some(Source::Door) => self.accept(None),
                    Some(Source::Bell(number)) => self.last_closed(number),
                    Some(Source::ContextDoor(number)) => self.accept(Some(number)),
                    Some(Source::Process(pid)) => self.process_ended(pid),
                    Some(Source::Module(number)) => {
                        if let Some((_, context)) = self.contexts.get(&number) {
                            context.ring();
                        }
                    }
                    None => {}
                }
            }
            self.deadlines();
            self.findings();
            if self.recheck.is_some_and(|at| at <= Instant::now()) {
                self.recheck = None;
                self.recheck_lingering();
            }
        }
        log::info!("nobody needs this supervisor any more");
        Ok(())
    }

    fn finished(&self) -> bool {
        let filtered = self.shared.listener.get().is_some() && !self.hung_up;
        !filtered
            && self.contexts.is_empty()
            && self.clerks.load(Ordering::Acquire) == 0
            && self.shared.inbox.is_empty()
    }

    fn timeout(&self) -> EpollTimeout {
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
                Message::CounterSeen(number, at) => self.counter_seen(number, at),
                Message::Ended => {}
                Message::Ordinary(call) => {
                    if let Some(listener) = self.shared.clone().listener.get() {
                        self.ordinary(listener, &call);
                    }
                }
            }
        }
    }

    fn watch(&mut self, space: Arc<Space>, context: Arc<Context>) {
        // POLLERR on a pipe's write end: nobody has the read end any more (poll(2)).
        let bell = EpollEvent::new(EpollFlags::EPOLLERR, Source::Bell(context.number).word());
        if let Err(e) = self.shared.epoll.add(context.bell(), bell) {
            log::warning!("context {}: can't be watched for its end: {e}", context.number);
        }
        if let Some(door) = context.door() {
            let asked = EpollEvent::new(EpollFlags::EPOLLIN, Source::ContextDoor(context.number).word());
            if let Err(e) = self.shared.epoll.add(door.as_fd(), asked) {
                log::warning!("context {}: other holders can't be served: {e}", context.number);
            }
        }
        if self.watched_processes.insert(space.pid) {
            let ended = EpollEvent::new(EpollFlags::EPOLLIN, Source::Process(space.pid).word());
            if let Err(e) = self.shared.epoll.add(space.pidfd(), ended) {
                log::warning!("process {}: can't be watched for its end: {e}", space.pid);
            }
        }
        // What was found out before this open is old.
        self.findings();
        // A process that opens anew after execve, or a forked child that opens, was a stranger before.
        self.strangers.clear();
        self.members.clear();
        self.contexts.insert(context.number, (space, context));
    }

    fn start_serving(&mut self) {
        let Some(listener) = self.shared.listener.get() else { return };
        if self.serving {
            return;
        }
        match self
            .shared
            .epoll
            .add(listener.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, Source::Listener.word()))
        {
            Ok(()) => self.serving = true,
            Err(e) => log::warning!("can't serve the filter: {e}"),
        }
    }

    fn accept(&mut self, context: Option<u64>) {
        if self.clerks.load(Ordering::Acquire) >= MAX_CLERKS {
            // Level-triggered: it comes again when a clerk has gone. Yielding keeps this from spinning hard.
            std::thread::sleep(Duration::from_micros(200));
            return;
        }
        let connection = match context {
            None => self.door.accept(),
            Some(number) => self.contexts.get(&number).and_then(|(_, c)| c.door()).and_then(Door::accept),
        };
        if let Some(connection) = connection {
            self.serve_connection(connection, Entrance::Door);
        }
    }

    /// Every descriptor of the context is closed. It goes, unless its counter is still mapped: such a counter
    /// must go on counting.
    fn last_closed(&mut self, number: u64) {
        let Some((space, context)) = self.contexts.get(&number) else { return };
        let _ = self.shared.epoll.delete(context.bell());
        self.look_for_counter(space, context);
    }

    /// Looks for the counter in the opener's mapping table, on a thread of its own, since that can wait.
    fn look_for_counter(&self, space: &Arc<Space>, context: &Arc<Context>) {
        let number = context.number;
        let (shared, look) = (Arc::clone(&self.shared), (Arc::clone(space), Arc::clone(context)));
        let started =
            std::thread::Builder::new().name("look".into()).stack_size(256 * 1024).spawn(move || {
                let (space, context) = look;
                let alive = !space.is_gone() && space.process_alive();
                let at = if alive { mapped_counter(&shared, &space, &context) } else { None };
                shared.tell(Message::CounterSeen(number, at));
            });
        if let Err(e) = started {
            log::warning!("context {number}: can't look whether its counter is mapped: {e}");
        }
    }

    fn counter_seen(&mut self, number: u64, at: Option<PageRange>) {
        let Some((space, context)) = self.contexts.get(&number) else { return };
        // The process may have ended since it was seen, and its end been handled before this message.
        let at = at.filter(|_| space.process_alive());
        let before = context.lingering();
        context.set_lingering(at);
        space.tell_recorders();
        if at.is_none() {
            self.free(number);
        } else if before.is_none() && space.is_inline() {
            // The process's own threads, whose calls weren't trapped until now, may have unmapped it meanwhile.
            self.recheck = Some(Instant::now() + Duration::from_millis(10));
        }
    }

    fn free(&mut self, number: u64) {
        let Some((space, context)) = self.contexts.remove(&number) else { return };
        if let Some(door) = context.door() {
            let _ = self.shared.epoll.delete(door.as_fd());
        }
        if std::env::var(ummunotify_abi::config::ENV_STATS).is_ok_and(|v| v == "1") {
            super::log::print(format_args!(
                "process {}, context {number}: {}{}",
                space.pid,
                summary(&context.engine.statistics()),
                unwatched(&space)
            ));
        }
        log::info!("context {number} of process {} is closed", space.pid);
        if space.is_inline() {
            context.retire();
        }
        self.shared.remove(number);
    }

    /// Looks again at contexts whose counter was still mapped.
    fn recheck_lingering(&self) {
        for (space, context) in self.contexts.values() {
            if context.lingering().is_some() {
                self.look_for_counter(space, context);
            }
        }
    }

    fn process_ended(&mut self, pid: u32) {
        self.watched_processes.remove(&pid);
        for space in self.shared.spaces() {
            if space.pid == pid {
                let _ = self.shared.epoll.delete(space.pidfd());
            }
        }
        self.recheck_lingering();
        self.shared.sweep();
        self.members.clear();
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
            if job.claim() {
                log::warning!("task {}: {:?} took too long to look at: all invalid", job.tid, job.operation);
                for space in &job.candidates {
                    space.stuck.store(true, Ordering::Release);
                }
                self.give_up(&job.candidates, job.id, job.tid, &job.spared);
            }
        }
        self.desk.deadlines(&self.shared);
    }

    fn give_up(&self, spaces: &[Arc<Space>], id: u64, tid: u32, spared: &[u64]) {
        let call = GoOn::new(&self.shared.listener, id);
        for space in spaces {
            space.invalidate_all_but(Reason::Deadline, spared);
            space.fault.recorded(tid, &[PageRange::ALL]);
            space.delay(&call);
        }
    }

    fn proceed(&self, id: u64) {
        if let Some(listener) = self.shared.listener.get()
            && let Err(e) = listener.proceed(id)
        {
            log::warning!("a trapped call can't go on: {e}");
        }
    }

    fn listener(&mut self, events: EpollFlags) {
        let shared = Arc::clone(&self.shared);
        let Some(listener) = shared.listener.get() else { return };
        if events.contains(EpollFlags::EPOLLIN) {
            match listener.receive() {
                Ok(Some(notification)) => {
                    // An open that was over before this call began must be known to it.
                    self.messages();
                    self.notification(listener, &notification);
                }
                Ok(None) => {}
                Err(e) => log::warning!("can't receive a notification: {e}"),
            }
        } else if events.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
            // The last task under the filter is gone.
            let _ = self.shared.epoll.delete(listener.as_fd());
            self.hung_up = true;
        }
    }

    fn notification(&mut self, listener: &Listener, call: &Notification) {
        let registers = Syscall { arch: call.arch, nr: call.nr, args: call.args };
        // A task without a number here can't be looked at.
        if let Some(band) = self.shared.device
            && call.tid != 0
            && let Some(asks) = DeviceCall::new(&registers, band)
        {
            self.desk.submit(&self.shared, *call, asks);
            return;
        }
        self.ordinary(listener, call);
    }

    /// A call that is none of the device's.
    fn ordinary(&mut self, listener: &Listener, call: &Notification) {
        let decoded = Decoded::new(&Syscall { arch: call.arch, nr: call.nr, args: call.args });
        if let Decoded::Hello { version } = decoded {
            let answer = if version == u64::from(wire::WIRE_VERSION) {
                self.shared.token.cast_signed()
            } else {
                -i64::from(libc::EPROTONOSUPPORT)
            };
            if let Err(e) = listener.answer(call.id, answer) {
                log::warning!("task {}: can't answer its hello: {e}", call.tid);
            }
            return;
        }
        if let Decoded::Ring { inode } = decoded {
            self.ring(call.tid, inode);
            if let Err(e) = listener.answer(call.id, 0) {
                log::warning!("task {}: can't answer its ring: {e}", call.tid);
            }
            return;
        }
        if let Decoded::Fork(_) = decoded {
            // Numbers of threads that have ended may come back as the child's.
            self.members.clear();
        }
        if decoded == Decoded::NewRing && self.shared.rings == Rings::Deny {
            log::info!("task {}: io_uring_setup is denied", call.tid);
            if let Err(e) = listener.answer(call.id, -i64::from(libc::EPERM)) {
                log::warning!("task {}: can't deny it a ring: {e}", call.tid);
            }
            return;
        }
        let home = self.home(call.tid);
        match (decoded, home) {
            (Decoded::NewRing, Home::Space(space)) => self.before_ring(call.id, vec![space]),
            (Decoded::NewRing, Home::Perhaps(spaces)) => self.before_ring(call.id, spaces),
            (Decoded::OwnWatch { argument }, Home::Space(space)) => {
                self.before_own_watch(call, argument, vec![space]);
            }
            (Decoded::OwnWatch { argument }, Home::Perhaps(spaces)) => {
                self.before_own_watch(call, argument, spaces);
            }
            (Decoded::Exec, home) => {
                self.before_exec(call.tid, home);
                self.proceed(call.id);
            }
            (Decoded::NewTask, Home::Space(space)) => {
                space.set_many_tasks();
                self.proceed(call.id);
            }
            (Decoded::NewTask, Home::Perhaps(spaces)) => {
                spaces.iter().for_each(|s| s.set_many_tasks());
                self.proceed(call.id);
            }
            (Decoded::Operation(operation) | Decoded::Fork(operation), Home::Space(space)) => {
                self.operation(call, vec![space], false, operation);
            }
            (Decoded::Operation(operation) | Decoded::Fork(operation), Home::Perhaps(spaces)) => {
                self.operation(call, spaces, true, operation);
            }
            (_, Home::Elsewhere) | (Decoded::Ignore | Decoded::Hello { .. } | Decoded::Ring { .. }, _) => {
                self.proceed(call.id);
            }
        }
    }

    /// A thread of an opener has recorded a hit: the descriptor must become readable. Anybody may say so of a
    /// context of their own address space.
    fn ring(&mut self, tid: u32, inode: u64) {
        let spaces = match self.home(tid) {
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
    fn operation(&mut self, call: &Notification, spaces: Vec<Arc<Space>>, proof: bool, operation: Operation) {
        for space in spaces.iter().filter(|_| self.shared.layers.fault != FaultLayer::Off) {
            let reach = operation.reach_with_heap(space.heap_limit());
            space.fault.begin(call.tid, &operation, reach, &space.contexts());
        }
        // Before anything is decided by it: who is spared now is spared until the call is let go.
        let mut spared = Vec::new();
        spaces.iter().for_each(|s| s.spare(call.tid, &mut spared));
        // What the heap may cover before this call; a growing one reaches further only afterwards.
        let may_hit = spaces.iter().any(|s| may_hit(s, operation.reach_with_heap(s.heap_limit()), &spared));
        if let Operation::Brk { end } = operation {
            spaces.iter().for_each(|s| s.heap_asked(end));
        }
        self.note_lingering(&spaces, operation.reach());
        let in_the_way = self.shared.layers.fault != FaultLayer::Off
            && spaces.iter().any(|s| !s.fault.passes(call.tid, &operation));
        if !may_hit && !in_the_way {
            self.proceed(call.id);
            return;
        }
        if let ([space], false) = (spaces.as_slice(), proof || in_the_way)
            && let Some(pieces) = self.known_at_once(call.tid, space, &operation)
        {
            log::debug!("task {}: {operation:?}: {pieces:x?}", call.tid);
            space.record(&pieces, &spared);
            space.fault.recorded(call.tid, &pieces);
            space.delay(&GoOn::new(&self.shared.listener, call.id));
            return;
        }
        if spaces.iter().any(|s| s.stuck.load(Ordering::Acquire)) {
            self.give_up(&spaces, call.id, call.tid, &spared);
            return;
        }
        let job = Arc::new(Job::new(call.id, call.tid, spaces, proof, operation, spared));
        if job.candidates.first().is_some_and(|s| s.submit(Arc::clone(&job))) {
            self.pending.push_back(job);
        } else {
            self.give_up(&job.candidates, call.id, call.tid, &job.spared);
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

    /// A ring is about to be set up: the call waits until userfaultfd watches. That can wait for the target's
    /// mapping lock, as the call's own mappings would.
    fn before_ring(&self, id: u64, spaces: Vec<Arc<Space>>) {
        if self.shared.layers.fault == FaultLayer::Off
            || spaces.iter().all(|s| s.fault.is_on() && s.fault.bypass())
        {
            self.proceed(id);
            return;
        }
        self.aside(id, move |shared| {
            for space in &spaces {
                if let Err(e) = space.expect_bypass(&shared.kernel) {
                    let errno = e.raw_os_error().map_or(nix::Error::EIO, nix::Error::from_raw);
                    fault::say_missing(space, errno, "it sets up an io_uring ring");
                }
            }
        });
    }

    /// A userfaultfd of the application is about to watch something: ours steps aside, for a range can have one only.
    fn before_own_watch(&self, call: &Notification, argument: u64, spaces: Vec<Arc<Space>>) {
        if spaces.iter().all(|s| !s.fault.is_on()) {
            self.proceed(call.id);
            return;
        }
        let tid = call.tid;
        self.aside(call.id, move |shared| {
            let mut target = ProcessTarget::new(tid.cast_signed(), true, &shared.kernel);
            let mut words = [0u8; 16];
            let range = match target.read_memory(argument, &mut words) {
                Ok(()) => {
                    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| words[at + i]));
                    PageRange::new(word(0), word(0).saturating_add(word(8)))
                }
                Err(_) => PageRange::ALL,
            };
            for space in &spaces {
                if space.give_away(range, &shared.kernel) {
                    log::warning!(
                        "process {}: a userfaultfd of its own watches [{:#x},{:#x}): ours doesn't any more, and what \
                         io_uring changes there goes unseen",
                        space.pid,
                        range.start,
                        range.end
                    );
                }
            }
        });
    }

    /// Does something that can wait for a target on a thread of its own, before a call goes on.
    fn aside(&self, id: u64, work: impl FnOnce(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        let started =
            std::thread::Builder::new().name("aside".into()).stack_size(256 * 1024).spawn(move || {
                work(&shared);
                if let Some(Err(e)) = shared.listener.get().map(|listener| listener.proceed(id)) {
                    log::warning!("a trapped call can't go on: {e}");
                }
            });
        if let Err(e) = started {
            log::warning!("can't start a thread: {e}; userfaultfd may miss what is to come");
            self.proceed(id);
        }
    }

    /// A closed context whose counter may be unmapped by this call is looked at again soon.
    fn note_lingering(&mut self, spaces: &[Arc<Space>], reach: Reach) {
        let touched = spaces
            .iter()
            .any(|space| space.any(|c| c.lingering().is_some_and(|at| reach.ranges().any(|r| r.hits(at)))));
        if touched {
            self.recheck = Some(Instant::now() + Duration::from_millis(10));
        }
    }

    fn before_exec(&mut self, tid: u32, home: Home) {
        match home {
            Home::Elsewhere => {}
            Home::Space(space) => self.member_execs(tid, &space),
            Home::Perhaps(spaces) => spaces.iter().for_each(|space| self.member_execs(tid, space)),
        }
    }

    fn member_execs(&mut self, tid: u32, space: &Space) {
        // A vfork child that calls execve leaves the space to its parent.
        if task::process_of(tid) == Some(space.pid) {
            space.set_executing(tid);
        }
        self.members.clear();
    }

    /// Where the task lives. No step here can wait for a target's mapping lock.
    fn home(&mut self, tid: u32) -> Home {
        let spaces = self.shared.spaces();
        if spaces.len() == 1
            && let Some(space) = self.members.get(&tid)
        {
            return Home::Space(Arc::clone(space));
        }
        if let Some(pidfd) = self.strangers.get(&tid) {
            if process::pidfd_alive(pidfd) {
                return Home::Elsewhere;
            }
            self.strangers.remove(&tid);
        }
        let pidfd = process::pidfd_open(tid);
        let pid = task::process_of(tid);
        let mut perhaps = Vec::new();
        for space in spaces {
            if space.is_gone() || space.is_idle() {
                continue;
            }
            if space.executing().is_some() && (pid == Some(space.pid) || pid.is_none()) {
                perhaps.push(space);
            } else if pid == Some(space.pid) && space.process_alive() {
                self.members.insert(tid, Arc::clone(&space));
                return Home::Space(space);
            } else {
                match process::same_address_space(tid, space.pid) {
                    Ok(true) => {
                        self.members.insert(tid, Arc::clone(&space));
                        return Home::Space(space);
                    }
                    // A first thread that has ended has no memory to compare with.
                    Ok(false) if task::is_zombie(space.pid) => perhaps.push(space),
                    Ok(false) => {}
                    Err(_) => perhaps.push(space),
                }
            }
        }
        if !perhaps.is_empty() {
            return Home::Perhaps(perhaps);
        }
        // A pidfd can be had of a process's first task only; other tasks of strangers are looked up each time.
        if let (Ok(pidfd), Some(pid)) = (pidfd, pid)
            && pid == tid
        {
            if self.strangers.len() >= 4096 {
                self.strangers.clear();
            }
            self.strangers.insert(tid, pidfd);
        }
        Home::Elsewhere
    }
}

/// Whether the call may hit a region of the space in a context that isn't spared.
fn may_hit(space: &Space, reach: Reach, spared: &[u64]) -> bool {
    match reach {
        Reach::Nothing => false,
        Reach::Ranges(..) => reach.ranges().any(|range| space.may_hit(range, spared)),
        Reach::AnyFileMapping | Reach::Everything => {
            space.any(|c| !spared.contains(&c.number) && c.engine.regions() > 0)
        }
    }
}

/// Where a client still maps the context's counter; the shim's own mapping is the shared and writable one.
fn mapped_counter(shared: &Shared, space: &Space, context: &Context) -> Option<PageRange> {
    match task::mappings(space.pid, &shared.kernel) {
        Ok(table) => {
            table.iter().find(|m| context.is_counter(m) && !(m.shared && m.prot & 2 != 0)).map(|m| m.range)
        }
        Err(e) => {
            log::debug!("process {}: {e}", space.pid);
            None
        }
    }
}

/// The statistics in one line; what made everything invalid is named with its count.
fn summary(statistics: &Statistics) -> String {
    let mut line = format!(
        "{} regions registered, {} unregistered, {} invalidations recorded, {} of them hit, {} events read",
        statistics.registered,
        statistics.unregistered,
        statistics.invalidations,
        statistics.hits,
        statistics.reported
    );
    if statistics.announced > 0 {
        line += &format!(
            "; {} told by userfaultfd alone, {} of them hit nothing",
            statistics.announced, statistics.vain
        );
    }
    for reason in Reason::ALL {
        let times = statistics.everything(reason);
        if times > 0 {
            line += &format!("; everything invalid {times} times: {}", reason.name());
        }
    }
    line
}

fn unwatched(space: &Space) -> String {
    match space.fault.unwatched() {
        0 => String::new(),
        n => format!("; userfaultfd couldn't watch {n} times"),
    }
}
