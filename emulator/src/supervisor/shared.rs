//! What the supervisor's threads share.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use nix::sys::epoll::{Epoll, EpollCreateFlags};
use nix::sys::eventfd::EventFd;
use ummunotify_abi::PageRange;
use ummunotify_sys::notify::Notification;

use super::attachment::Attachment;
use super::context::{Context, lock};
use super::gate::Gate;
use super::sleepers::Alarm;
use super::space::Space;
use super::task;
use super::worker::{self, Finding};
use crate::target::KernelTraits;
use crate::trap::policy::{self, Band};
use crate::trap::{Layers, Rings};

/// What other threads tell the main loop.
#[derive(Debug)]
pub enum Message {
    /// A context was opened in a space: watch it.
    Opened(Arc<Space>, Arc<Context>),
    /// The listener may be served.
    Serve,
    /// Trace every thread of that process; the answer says whether that was possible.
    Seize(u32, Sender<nix::Result<()>>),
    /// The seized processes are under a filter that stops them at the calls that matter; or (false) under none, and
    /// are to be stopped at each call. Answered once every thread's next return to user mode is a stop.
    Traced(bool, Sender<()>),
    /// Tell when that traced task was seen outside the call that it is in now, unless that was recorded; the sender goes if
    /// the task ends.
    Outside(u32, Sender<()>),
    /// Where the counter of that closed context is still mapped.
    CounterSeen(u64, Option<PageRange>),
    /// A connection has ended.
    Ended,
    /// This call is none of the device's.
    Ordinary(Notification),
}

/// State of the whole supervisor.
#[derive(Debug)]
pub struct Shared {
    /// The word that descendants ask for and find us by.
    pub token: u64,
    /// The numbers of the device's descriptors in programs without a shim, if the filter serves such.
    pub device: Option<Band>,
    /// The instructions of the inline layer that the filter lets through, decided with the filter.
    pub let_through: OnceLock<Option<policy::Gate>>,
    /// Where trapped calls wait.
    pub gate: Arc<Gate>,
    /// What this kernel does where kernels differ.
    pub kernel: KernelTraits,
    /// Which layers are to trap.
    pub layers: Layers,
    /// What is done about io_uring.
    pub rings: Rings,
    spaces: Mutex<Vec<Arc<Space>>>,
    numbers: AtomicU64,
    outbox: Sender<Message>,
    /// The main loop's end of it.
    pub inbox: Receiver<Message>,
    findings_in: Sender<Finding>,
    /// What the workers found out.
    pub findings: Receiver<Finding>,
    /// Wakes the main loop.
    pub wake: Arc<EventFd>,
    /// What the main loop waits for.
    pub epoll: Epoll,
    /// Held from the look for a space to the mapping of its marker, by opens that trapped calls ask for; and from
    /// the choice of a number of the band to its use.
    pub opening: Mutex<()>,
    /// Rings where readers sleep in the pipe's own read.
    pub alarm: Alarm,
    /// The processes that were attached to while they ran.
    pub attachment: Attachment,
}

impl Shared {
    /// An empty state; see [`Self::device`].
    pub fn new(device: Option<Band>, layers: Layers, rings: Rings) -> io::Result<Self> {
        let (outbox, inbox) = unbounded();
        let (findings_in, findings) = unbounded();
        let wake = Arc::new(EventFd::from_flags(
            nix::sys::eventfd::EfdFlags::EFD_CLOEXEC | nix::sys::eventfd::EfdFlags::EFD_NONBLOCK,
        )?);
        Ok(Self {
            // Positive, so that it can be the result of a system call. See `wire::serves_static`.
            token: (ummunotify_sys::process::random_u64()? >> 2).max(2) & !1 | u64::from(device.is_some()),
            device,
            let_through: OnceLock::new(),
            gate: Arc::new(Gate::new(Arc::clone(&wake))),
            kernel: KernelTraits::probe(),
            layers,
            rings,
            spaces: Mutex::new(Vec::new()),
            numbers: AtomicU64::new(1),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            outbox,
            inbox,
            findings_in,
            findings,
            wake,
            opening: Mutex::new(()),
            alarm: Alarm::new(),
            attachment: Attachment::default(),
        })
    }

    /// Tells the main loop.
    pub fn tell(&self, message: Message) {
        // Both fail only when the main loop has ended, and with it the process ends.
        let _ = self.outbox.send(message);
        let _ = self.wake.write(1);
    }

    /// A number for a new context.
    pub fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// The known address spaces.
    pub fn spaces(&self) -> Vec<Arc<Space>> {
        lock(&self.spaces).clone()
    }

    /// Whether there is one address space alone.
    pub fn has_one_space(&self) -> bool {
        lock(&self.spaces).len() == 1
    }

    /// Adds an opened context to its space.
    pub fn add(&self, space: &Arc<Space>, context: &Arc<Context>) {
        space.add(Arc::clone(context));
        self.tell(Message::Opened(Arc::clone(space), Arc::clone(context)));
    }

    /// Forgets a context, and its space with the last one if the process is gone.
    pub fn remove(&self, number: u64) {
        for space in self.spaces() {
            if !space.remove(number) || !space.fault.is_there() {
                continue;
            }
            let kernel = self.kernel.clone();
            // It can wait for the target.
            let started = std::thread::Builder::new()
                .name("disarm".into())
                .stack_size(256 * 1024)
                .spawn(move || space.context_removed(&kernel));
            if let Err(e) = started {
                super::log::warning!("context {number}: its ranges stay watched for a while: {e}");
            }
        }
        self.sweep();
    }

    /// Forgets the spaces that have neither a context nor a process.
    pub fn sweep(&self) {
        lock(&self.spaces).retain(|s| {
            let kept = !s.is_idle() || !s.is_gone() && s.process_alive();
            if !kept || !s.process_alive() {
                s.fault.end();
            }
            kept
        });
    }

    /// The first context that `wanted` accepts, and its space.
    pub fn find(&self, wanted: impl Fn(&Context) -> bool) -> Option<(Arc<Space>, Arc<Context>)> {
        lock(&self.spaces).iter().find_map(|space| {
            let context = space.contexts().into_iter().find(|c| wanted(c))?;
            Some((Arc::clone(space), context))
        })
    }

    /// The known address space of process `pid`, if that still runs in it.
    pub fn live_space(&self, pid: u32) -> Option<Arc<Space>> {
        self.spaces().into_iter().find(|space| {
            let same = space.pid == pid
                || ummunotify_sys::process::same_address_space(pid, space.pid).unwrap_or(false);
            same && !space.is_gone() && space.process_alive()
        })
    }

    /// The address space in which process `pid` runs, and whether its marker is to be mapped. A space that has called
    /// execve meanwhile isn't its any more.
    pub fn space_of(&self, pid: u32) -> io::Result<(Arc<Space>, bool)> {
        loop {
            let known = self.spaces();
            let live: Vec<_> = known.iter().filter(|s| !s.is_gone()).collect();
            if !live.is_empty() {
                let awaits = live.iter().find(|s| s.is_of(pid) && s.awaits_marker());
                let table = task::mappings(pid, &self.kernel).map_err(io::Error::other)?;
                if let Some(space) = live.iter().find(|s| s.owns(&table)) {
                    return Ok((Arc::clone(space), false));
                }
                // Another thread is about to map it. Twice is as good as once, and whoever is first returns first.
                if let Some(space) = awaits {
                    return Ok((Arc::clone(space), true));
                }
            }
            for space in live.into_iter().filter(|s| s.pid == pid) {
                // The number is that of a space whose marker isn't mapped any more: exec, or a later process.
                space.set_gone();
            }
            let (jobs, queue) = bounded(worker::QUEUE);
            let space = Arc::new(Space::new(pid, jobs)?);
            let (gate, kernel, findings) =
                (Arc::clone(&self.gate), self.kernel.clone(), self.findings_in.clone());
            std::thread::Builder::new()
                .name(format!("worker-{pid}"))
                .stack_size(512 * 1024)
                .spawn(move || worker::run(&queue, &gate, &kernel, &findings))?;
            let mut spaces = lock(&self.spaces);
            let is_known = |space: &Arc<Space>| known.iter().any(|k| Arc::ptr_eq(k, space));
            // Unless another thread's open was faster.
            if !spaces.iter().any(|s| !is_known(s) && s.is_of(pid)) {
                spaces.push(Arc::clone(&space));
                return Ok((space, true));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    fn shared() -> Shared {
        Shared::new(None, Layers::default(), Rings::default()).expect("a state")
    }

    /// A process that executes another program once it is told to.
    fn process() -> Child {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "read word; exec sleep 600"]).stdin(Stdio::piped()).spawn().expect("a process")
    }

    fn end(mut child: Child) {
        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
    }

    #[test]
    fn a_space_is_gone_before_its_marker_was_mapped() {
        let (shared, mut child) = (shared(), process());
        let (first, new) = shared.space_of(child.id()).expect("a space");
        assert!(new);
        let (second, new) = shared.space_of(child.id()).expect("a space");
        assert!(new && Arc::ptr_eq(&first, &second), "whoever comes second maps it too");
        // Perhaps one that fails.
        first.set_executing(child.id());
        let (third, new) = shared.space_of(child.id()).expect("a space");
        assert!(new && Arc::ptr_eq(&first, &third) && !first.is_gone());

        child.stdin.take().expect("a pipe").write_all(b"go on\n").expect("it reads");
        let (name, start) = (format!("/proc/{}/comm", child.id()), Instant::now());
        while std::fs::read_to_string(&name).expect("its name") != "sleep\n" {
            assert!(start.elapsed() < Duration::from_secs(20), "it doesn't execute it");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (next, new) = shared.space_of(child.id()).expect("a space");
        assert!(new && first.is_gone() && !Arc::ptr_eq(&first, &next), "it has executed another program");
        // From when it was seen, it must be there.
        next.set_marked();
        let (other, new) = shared.space_of(child.id()).expect("a space");
        assert!(new && next.is_gone() && !Arc::ptr_eq(&next, &other));
        end(child);
    }

    #[test]
    fn two_opens_at_once_make_two_spaces_of_one() {
        for _ in 0..20 {
            let (shared, child) = (shared(), process());
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| shared.space_of(child.id()).expect("a space"));
                }
            });
            assert_eq!(shared.spaces().len(), 1);
            end(child);
        }
    }
}
