//! Contexts from their open to their end, which their counter's last mapping can put off.

use std::collections::hash_map::Entry;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{EpollEvent, EpollFlags};
use ummunotify_abi::PageRange;
use ummunotify_engine::{Reason, Statistics};

use super::{MainLoop, Source, wants_statistics};
use crate::supervisor::context::Context;
use crate::supervisor::shared::{Message, Shared};
use crate::supervisor::space::Space;
use crate::supervisor::{log, task};
use crate::trap::operation::Reach;

impl MainLoop {
    pub(super) fn watch(&mut self, space: Arc<Space>, context: Arc<Context>) {
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
        if let Entry::Vacant(place) = self.watched_processes.entry(space.pid) {
            let ended = EpollEvent::new(EpollFlags::EPOLLIN, Source::Process(space.pid).word());
            let pidfd = space.pidfd().try_clone_to_owned();
            let watched = pidfd.and_then(|pidfd| {
                self.shared.epoll.add(pidfd.as_fd(), ended)?;
                Ok(pidfd)
            });
            match watched {
                Ok(pidfd) => drop(place.insert(pidfd)),
                Err(e) => log::warning!("process {}: can't be watched for its end: {e}", space.pid),
            }
        }
        // What was found out before this open is old.
        self.findings();
        // A process that opens anew after execve, or a forked child that opens, was a stranger before.
        self.strangers.clear();
        self.members.clear();
        self.contexts.insert(context.number, (space, context));
    }

    /// Every descriptor of the context is closed. It goes, unless its counter is still mapped: such a counter
    /// must go on counting.
    pub(super) fn last_closed(&mut self, number: u64) {
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

    pub(super) fn counter_seen(&mut self, number: u64, at: Option<PageRange>) {
        let Some((space, context)) = self.contexts.get(&number) else { return };
        // The process may have ended since it was seen, and its end been handled before this message.
        let at = at.filter(|_| space.process_alive());
        let before = context.lingering();
        context.set_lingering(at);
        space.tell_recorders();
        if at.is_none() {
            self.free(number);
        } else if at == Some(PageRange::ALL) {
            self.recheck = Some(Instant::now() + LOOK_AGAIN);
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
        if wants_statistics() {
            log::print(format_args!(
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
    pub(super) fn recheck_lingering(&self) {
        for (space, context) in self.contexts.values() {
            if context.lingering().is_some() {
                self.look_for_counter(space, context);
            }
        }
    }

    pub(super) fn process_ended(&mut self, pid: u32) {
        if let Some(pidfd) = self.watched_processes.remove(&pid) {
            let _ = self.shared.epoll.delete(pidfd.as_fd());
        }
        self.recheck_lingering();
        self.shared.sweep();
        self.members.clear();
    }

    /// A closed context whose counter may be unmapped by this call is looked at again soon.
    pub(super) fn note_lingering(&mut self, spaces: &[Arc<Space>], reach: Reach) {
        let touched = spaces
            .iter()
            .any(|space| space.any(|c| c.lingering().is_some_and(|at| reach.ranges().any(|r| r.hits(at)))));
        if touched {
            self.recheck = Some(Instant::now() + Duration::from_millis(10));
        }
    }
}

/// When to look again for a counter if that failed.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Where a client still maps the context's counter; the shim's own mapping is the shared and writable one. Anywhere, if
/// it can't be told.
fn mapped_counter(shared: &Shared, space: &Space, context: &Context) -> Option<PageRange> {
    match task::mappings(space.pid, &shared.kernel) {
        Ok(table) => {
            table.iter().find(|m| context.is_counter(m) && !(m.shared && m.prot & 2 != 0)).map(|m| m.range)
        }
        Err(e) => {
            log::debug!("process {}: {e}", space.pid);
            let alive = !space.is_gone() && space.process_alive();
            (alive && !matches!(e.errno, libc::ENOENT | libc::ESRCH)).then_some(PageRange::ALL)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::spent::without_descriptors;
    use crate::trap::{Layers, Rings};

    #[test]
    fn a_counter_that_cannot_be_looked_for_is_taken_for_unmapped() {
        let shared = Shared::new(None, Layers::default(), Rings::default()).expect("what they share");
        let (jobs, _queue) = crossbeam_channel::bounded(1);
        let space = Space::new(std::process::id(), jobs).expect("a space");
        let (context, _device) = Context::create(1, true, None).expect("a context");
        let look = || mapped_counter(&shared, &space, &context);
        assert_eq!(without_descriptors(look), Some(PageRange::ALL));
        assert_eq!(look(), None);
    }
}
