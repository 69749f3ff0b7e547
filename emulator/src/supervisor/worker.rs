//! The thread that may wait for a target.
//!
//! Reading a process's mapping table or memory can block for as long as a file system or a userfaultfd that
//! backs it wants (the reader needs the target's mapping lock, or its pages). So it happens on a thread of
//! its own per address space, and each call that it works on has a deadline: after it the main loop records
//! everything as invalid and lets the call run. A stuck target delays no other process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use ummunotify_abi::PageRange;
use ummunotify_engine::Reason;

use super::fault::{Begins, Untold};
use super::gate::{Gate, Held};
use super::log;
use super::space::Space;
use super::task;
use crate::target::{KernelTraits, ProcessTarget, maps};
use crate::trap::effect::{Effect, effect};
use crate::trap::operation::Operation;

/// How long a target may keep its call waiting.
pub const DEADLINE: Duration = Duration::from_secs(2);

/// Calls that may wait for one worker; beyond it, everything is invalid at once.
pub const QUEUE: usize = 1024;

/// A trapped call that may hit regions.
#[derive(Debug)]
pub struct Job {
    /// Where the call waits.
    pub held: Held,
    /// The task that made it.
    pub tid: u32,
    /// The address spaces that the task may belong to.
    pub candidates: Vec<Arc<Space>>,
    /// Whether the mapping table must show which of them it is.
    pub proof: bool,
    /// What the call does.
    pub operation: Operation,
    /// Numbers of the contexts for which the kernel module records it.
    pub spared: Vec<u64>,
    /// When the call must go on.
    pub due: Instant,
    claimed: AtomicBool,
}

impl Job {
    /// A job that is due [`DEADLINE`] from now.
    pub fn new(
        held: Held,
        tid: u32,
        candidates: Vec<Arc<Space>>,
        proof: bool,
        operation: Operation,
        spared: Vec<u64>,
    ) -> Self {
        Self {
            held,
            tid,
            candidates,
            proof,
            operation,
            spared,
            due: Instant::now() + DEADLINE,
            claimed: AtomicBool::new(false),
        }
    }

    /// True for whoever asks first: that one records and answers.
    pub fn claim(&self) -> bool {
        !self.claimed.swap(true, Ordering::AcqRel)
    }

    /// Whether somebody has claimed it.
    pub fn is_claimed(&self) -> bool {
        self.claimed.load(Ordering::Acquire)
    }
}

/// What a worker tells the main loop.
#[derive(Debug)]
pub enum Finding {
    /// This task's process is in none of the spaces; the pidfd was open before that was seen.
    Stranger(u32, std::os::fd::OwnedFd),
}

/// The worker's loop; ends when the space is dropped.
pub fn run(jobs: &Receiver<Arc<Job>>, gate: &Gate, kernel: &KernelTraits, findings: &Sender<Finding>) {
    for job in jobs {
        if job.is_claimed() {
            unstick(&job);
            continue;
        }
        let spaces = if job.proof { prove(&job, kernel, findings) } else { job.candidates.clone() };
        // What is registered from here on may not be among what the look finds worth telling.
        let begins: Vec<Begins> = spaces.iter().map(|space| space.begins()).collect();
        let effect = match spaces.as_slice() {
            [] => Effect::Pieces(Vec::new()),
            [first, others @ ..] => {
                let watches = |range| spaces.iter().any(|s| s.may_hit(range, &job.spared));
                let many = !others.is_empty() || first.many_tasks();
                let seam = |address| spaces.iter().any(|s| s.fault.is_seam(address));
                let mut target = ProcessTarget::new(job.tid.cast_signed(), many, kernel)
                    .owned_by(first.pid.cast_signed())
                    .watching(&watches)
                    .without_seams(&seam);
                effect(&job.operation, &mut target)
            }
        };
        if !job.claim() {
            log::debug!("task {}: {:?} was answered at its deadline", job.tid, job.operation);
            unstick(&job);
            continue;
        }
        log::debug!("task {}: {:?}: {:x?}", job.tid, job.operation, effect);
        let mut aside = Vec::new();
        for (space, begins) in spaces.iter().zip(&begins) {
            let off = untold(space, &job, kernel);
            match &effect {
                Effect::Pieces(pieces) => {
                    match off {
                        Some(call) => space.take_off(job.tid, call, pieces, begins, &job.spared, kernel),
                        None => space.record(pieces, &job.spared),
                    }
                    space.fault.recorded(job.tid, pieces);
                }
                Effect::All(_) => {
                    space.invalidate_all_but(Reason::Unreadable, &job.spared);
                    if let Some(call) = off {
                        space.take_off(job.tid, call, &[PageRange::ALL], begins, &job.spared, kernel);
                    }
                    space.fault.recorded(job.tid, &[PageRange::ALL]);
                }
            }
            aside.extend(off.map(|_| Arc::clone(space)));
        }
        match &effect {
            Effect::Pieces(pieces) => gate.recorded_elsewhere(job.held, &spaces, pieces),
            Effect::All(_) => gate.recorded_elsewhere(job.held, &spaces, &[PageRange::ALL]),
        }
        aside.into_iter().for_each(|s| s.tend(kernel));
    }
}

/// Whether no event would come on the end of the call: the watch must be taken off for it, or it isn't on all that is
/// registered there.
fn untold(space: &Arc<Space>, job: &Job, kernel: &KernelTraits) -> Option<Untold> {
    if !space.fault.is_on() {
        return None;
    }
    space.fault.await_reading();
    let fails = in_the_way(space, job, kernel).map(|over| Untold { over, fails: true });
    fails.or_else(|| {
        let reach = job.operation.reach_with_heap(space.heap_limit());
        let hits = reach.ranges().any(|range| space.may_hit(range, &job.spared));
        space.fault.untold(&job.operation, reach).filter(|_| hits)
    })
}

/// The range that userfaultfd must be taken off for a call that would fail, since the watch parts mappings; `None` if
/// it isn't in the way.
fn in_the_way(space: &Arc<Space>, job: &Job, kernel: &KernelTraits) -> Option<PageRange> {
    let range = job.operation.fails_on_watched()?;
    if space.fault.passes(job.tid, &job.operation) {
        return None;
    }
    let is_whole = || {
        let table = task::mappings(job.tid, kernel);
        table.is_ok_and(|table| maps::overlapping(&table, range).len() <= 1)
    };
    // Where it is one mapping as before, nothing is in the way.
    if matches!(job.operation, Operation::Mremap { .. }) && space.fault.passes_whole(job.tid, range, is_whole)
    {
        return None;
    }
    Some(range)
}

/// The worker is back from a job that was answered at its deadline. Jobs that expired behind it in the queue say
/// so as well, since the mark may have been set anew for each.
fn unstick(job: &Job) {
    job.candidates.iter().for_each(|s| s.stuck.store(false, Ordering::Release));
}

/// Which of the candidates the task belongs to, by the marker page in its mapping table. A table that can't
/// be read proves nothing: then it may be each of them.
fn prove(job: &Job, kernel: &KernelTraits, findings: &Sender<Finding>) -> Vec<Arc<Space>> {
    // Opened before the look, so that what was seen holds for this process and no later one of that number.
    let pidfd = ummunotify_sys::process::pidfd_open(job.tid);
    let awaits: Vec<bool> = job.candidates.iter().map(|space| space.still_awaits_marker(kernel)).collect();
    let Ok(table) = task::mappings(job.tid, kernel) else { return job.candidates.clone() };
    let mut members = Vec::new();
    for (space, awaits) in job.candidates.iter().zip(awaits) {
        if space.owns(&table) {
            space.exec_failed(job.tid);
            members.push(Arc::clone(space));
        } else if awaits {
            // Its open is under way: that the marker isn't there proves nothing.
            members.push(Arc::clone(space));
        } else if space.pid == job.tid && space.executing().is_some() {
            // The process's first task runs without the marker: the execve has succeeded.
            log::info!("process {}: has called execve; its contexts never fire again", space.pid);
            space.set_gone();
        }
    }
    if let (true, Ok(pidfd)) = (members.is_empty(), pidfd) {
        // The main loop is gone only when the process ends.
        let _ = findings.send(Finding::Stranger(job.tid, pidfd));
    }
    members
}
