//! The thread that reads the events of a userfaultfd.
//!
//! A thread of the target sleeps until its event is read, and no longer. So all that must come before it goes on
//! comes before the read, when the event's range isn't known yet:
//! * The event may be the end of a trapped call that was let go, and there is nothing that goes past the filter:
//!   then the calls on their way have been recorded, and their ends are recorded now, for regions that were
//!   registered or dequeued meanwhile. After the read nothing is left to do.
//! * The same where no call is on its way, but the process's own threads let calls pass that hit nothing (the inline
//!   layer): the event is of memory that nobody has registered, or that somebody registered while the call ran, which
//!   its thread reports at its end.
//! * Else the counter is moved for it, the event is read, and its range is recorded; whoever reads the device in
//!   between waits with LAST. Where calls are on their way as well the event may turn out to be one of theirs, and
//!   then the counter has moved once too often: events carry no thread. Sleepers in a pipe's read aren't waited for: they
//!   are woken with records, and those are known after the read only. So who polls at once may come before the byte.
//!
//! One event is read at a time, since a read lets all threads go whose events it takes. Nothing here waits for a
//! target, for a lock that is held across such a wait, or for memory of the client.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use ummunotify_abi::PageRange;
use ummunotify_engine::{Announced, Begin, Engine, Host, Reason, Recorded};
use ummunotify_sys::uffd::Watch;

use super::calls::{Calls, range_of};
use super::context::Context;
use super::log;
use super::space::Space;

/// Starts the thread.
pub fn start(space: Arc<Space>, watch: Arc<Watch>, stop: Arc<EventFd>) -> io::Result<()> {
    std::thread::Builder::new().name("watcher".into()).stack_size(256 * 1024).spawn(move || {
        if let Err(e) = run(&space, &watch, &stop) {
            log::warning!("process {}: userfaultfd can't be read any more: {e}", space.pid);
            space.fault.end();
            space.tell_recorders();
            space.invalidate_all(Reason::Unreadable);
        }
    })?;
    Ok(())
}

fn run(space: &Space, watch: &Watch, stop: &EventFd) -> nix::Result<()> {
    loop {
        let mut both =
            [PollFd::new(watch.as_fd(), PollFlags::POLLIN), PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
        match poll(&mut both, PollTimeout::NONE) {
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(e) => return Err(e),
        }
        let ready = |i: usize| both.get(i).and_then(PollFd::revents).unwrap_or(PollFlags::empty());
        if !ready(1).is_empty() {
            return Ok(());
        }
        if ready(0).contains(PollFlags::POLLIN) {
            event(space, watch)?;
        } else if !ready(0).is_empty() {
            return Err(Errno::EIO);
        }
    }
}

/// Takes one event.
fn event(space: &Space, watch: &Watch) -> nix::Result<()> {
    let contexts = space.contexts();
    let doubtful = end_calls(space, &contexts) && !space.is_inline() || space.fault.bypass();
    let announced: Vec<(&Arc<Context>, Announced)> =
        contexts.iter().filter(|c| doubtful && c.engine.regions() > 0).map(|c| (c, announce(c))).collect();
    // What is registered once the thread goes on isn't what the event is about.
    let begins: Vec<(&Arc<Context>, Begin)> = contexts.iter().map(|c| (c, c.engine.begin())).collect();
    let change = watch.next();
    let mut range = None;
    if let Ok(Some(change)) = &change {
        let explained = space.fault.happened(change);
        // Moving a length of 0 makes a second mapping of a shared one, and changes nothing of the first.
        range = Some(range_of(change)).filter(|range| !range.is_empty() && !explained);
        log::debug!(
            "process {}: {change:x?}, {}",
            space.pid,
            if explained { "explained" } else { "by itself" }
        );
    }
    for (context, announced) in announced {
        fulfil(context, announced, range);
    }
    let change = match change {
        Ok(Some(change)) => change,
        // The thread that waited was killed.
        Ok(None) => {
            space.fault.with_calls(Calls::done);
            return Ok(());
        }
        Err(e) => return Err(e.raw_os_error().map_or(Errno::EIO, Errno::from_raw)),
    };
    if let (false, Some(range)) = (doubtful, range)
        && begins.iter().any(|(context, begin)| context.engine.may_have_hit(*begin, range))
    {
        // Somebody goes past the filter of whom nobody knew. From here on nothing is taken for granted.
        space.fault.set_bypass();
        space.record(&[range], &[]);
        log::info!("process {}: {change:x?} by no trapped call", space.pid);
    }
    Ok(())
}

/// Moves the counter for something that isn't over yet, or isn't known; readers wait with LAST.
pub(super) fn announce(context: &Context) -> Announced {
    let announced = context.engine.announce();
    context.ring();
    announced
}

/// Tells what it was.
pub(super) fn fulfil(context: &Context, announced: Announced, range: Option<PageRange>) {
    match context.engine.fulfil(&Waker, announced, range) {
        Recorded::Missed => {}
        Recorded::Hit | Recorded::Everything => context.ring(),
    }
}

/// Records the ends of all calls that are on their way: which of them the event belongs to isn't known before it is
/// read. True if there are none.
fn end_calls(space: &Space, contexts: &[Arc<Context>]) -> bool {
    space.fault.with_calls(|calls| {
        let calls = calls.read();
        let none = calls.len() == 0;
        for call in calls {
            for context in contexts {
                // A context that was opened since has only regions that are newer.
                let begin = call.begins.get(&context.number).copied().unwrap_or(Begin::EVER);
                call.begins.insert(context.number, context.engine.begin());
                for range in &call.reach {
                    end(context, begin, *range);
                }
            }
        }
        none
    })
}

/// Hits what was registered or dequeued since.
pub(super) fn end(context: &Context, begin: Begin, range: PageRange) {
    let engine: &Engine = &context.engine;
    match engine.end(begin, range) {
        Recorded::Missed => {}
        Recorded::Hit | Recorded::Everything => context.ring(),
    }
}

/// All that is needed of it is that it wakes.
struct Waker;

impl Host for Waker {
    fn id(&self) -> u32 {
        ummunotify_sys::process::gettid() | super::host::SUPERVISOR_ID
    }

    fn wait(&self, word: &AtomicU32, seen: u32) {
        ummunotify_sys::futex::wait(word, seen, std::time::Duration::from_millis(10));
    }

    fn wake(&self, word: &AtomicU32) {
        ummunotify_sys::futex::wake(word);
    }

    fn gone(&self, _: u32) -> bool {
        false
    }
}
