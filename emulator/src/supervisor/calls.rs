//! The trapped calls of one address space that were let go and may be followed by events of its userfaultfd.
//!
//! Reading an event lets its thread go, and the thread's next call may come before the event was looked at. So a
//! call that was on its way when a read began is kept until the event is explained, even if its task has made
//! another since.

use std::collections::HashMap;

use ummunotify_abi::PageRange;
use ummunotify_engine::Begin;
use ummunotify_sys::uffd::Change;

use super::task;
use crate::trap::operation::Operation;

/// A trapped call that was let go and may be followed by events.
#[derive(Debug)]
pub struct Call {
    /// What it does.
    pub operation: Operation,
    /// The widest ranges that it may touch.
    pub reach: Vec<PageRange>,
    /// Where each context stood before anything of it was recorded, by the context's number.
    pub begins: HashMap<u64, Begin>,
    /// What was recorded for it. In a context without regions there, that is all it may touch.
    pub recorded: Vec<PageRange>,
}

/// A call, and whether it came while an event was being read, which is another call's then.
#[derive(Debug)]
struct Entry {
    call: Call,
    late: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Calls {
    /// The last one of each task, if it may cause events.
    last: HashMap<u32, Entry>,
    /// Those that were on their way when the read of an event began, and whose tasks have made another since.
    before: Vec<Call>,
    /// An event is being read.
    reading: bool,
    /// How many there may be before those of tasks that have ended are dropped.
    crowded: usize,
}

/// Calls that are kept without a look at who made them.
pub(super) const CALLS: usize = 256;

impl Calls {
    /// Task `tid` makes a call, by which its last one is over. `None`: one that causes no events.
    pub fn begin(&mut self, tid: u32, call: Option<Call>) {
        let reading = self.reading;
        let last = match call {
            Some(call) => self.last.insert(tid, Entry { call, late: reading }),
            None => self.last.remove(&tid),
        };
        // The task of a late one that waits for an event can't have made another.
        self.before.extend(last.filter(|last| reading && !last.late).map(|last| last.call));
        if self.last.len() > self.crowded.max(CALLS) {
            self.last.retain(|tid, _| task::exists(*tid));
            self.crowded = 2 * self.last.len();
        }
    }

    /// What was recorded for the call of task `tid`.
    pub fn recorded(&mut self, tid: u32, pieces: &[PageRange]) {
        if let Some(last) = self.last.get_mut(&tid) {
            last.call.recorded = pieces.to_vec();
        }
    }

    /// An event is about to be read, and may be of any of these.
    pub fn read(&mut self) -> impl ExactSizeIterator<Item = &mut Call> {
        self.done();
        self.reading = true;
        self.last.values_mut().map(|last| &mut last.call)
    }

    /// Whether an event is being read.
    pub const fn is_reading(&self) -> bool {
        self.reading
    }

    /// The tasks whose calls on their way may touch `pages`.
    pub fn reaching(&self, pages: PageRange) -> Vec<u32> {
        let reaches = |entry: &Entry| entry.call.reach.iter().any(|range| range.hits(pages));
        self.last.iter().filter(|(_, entry)| reaches(entry)).map(|(tid, _)| *tid).collect()
    }

    /// The event was read and explained, or there was none.
    pub fn done(&mut self) {
        self.reading = false;
        self.before.clear();
        self.last.values_mut().for_each(|last| last.late = false);
    }

    /// Whether a call on its way has recorded this change: then every region there was hit when the call began, or is
    /// newer and was hit when the read began, whoever causes the change. While nothing goes past the filter, as
    /// `trusted` says, the change is the call's own, and what was found out about it stands: a call that fails has an
    /// event as well. A call whose last event it is, is over.
    pub fn explain(&mut self, change: &Change, trusted: bool) -> bool {
        let range = range_of(change);
        let covers = |piece: &PageRange| piece.start <= range.start && range.end <= piece.end;
        // The end of one that came late wasn't recorded. But where all events are of calls, it is the cause if the
        // thread whose event was expected was killed.
        let may = |last: &Entry| trusted || !last.late;
        let records = |call: &Call| call.recorded.iter().any(covers);
        let mut explained = self.before.iter().any(records)
            || self.last.values().any(|last| may(last) && records(&last.call));
        if !explained && trusted {
            let reaches = |call: &Call| call.reach.iter().any(covers);
            // One event each: what comes after it is somebody else's.
            explained = self.before.iter().any(reaches) || {
                let by = |late: bool| {
                    let mut of = self.last.iter();
                    of.find(|(_, last)| last.late == late && reaches(&last.call)).map(|(tid, _)| *tid)
                };
                let by = by(false).or_else(|| by(true));
                by.and_then(|tid| self.last.remove(&tid)).is_some()
            };
        }
        if matches!(change, Change::Unmapped { .. }) {
            self.last.retain(|_, last| match last.call.operation {
                Operation::Munmap { start, .. } | Operation::MmapFixed { start, .. } => {
                    last.late || start != range.start
                }
                _ => true,
            });
        }
        self.done();
        explained
    }
}

/// Which range an event is of.
pub(super) fn range_of(change: &Change) -> PageRange {
    match *change {
        Change::Unmapped { start, end } | Change::Dropped { start, end } => PageRange::new(start, end),
        Change::Moved { from, len, .. } => PageRange::new(from, from.saturating_add(len)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PageRange = PageRange { start: 0x10_000, end: 0x14_000 };
    const B: PageRange = PageRange { start: 0x10_000, end: 0x11_000 };

    fn unmapping(range: PageRange) -> Call {
        let operation = Operation::Munmap { start: range.start, len: range.end - range.start };
        Call { operation, reach: vec![range], begins: HashMap::new(), recorded: vec![range] }
    }

    fn unmapped(range: PageRange) -> Change {
        Change::Unmapped { start: range.start, end: range.end }
    }

    #[test]
    fn the_next_call_of_a_task_hides_the_one_whose_event_is_read() {
        for next in [Some(unmapping(B)), None] {
            let mut calls = Calls::default();
            calls.begin(1, Some(unmapping(A)));
            assert_eq!(calls.read().len(), 1);
            // Its thread was let go.
            calls.begin(1, next);
            assert!(calls.explain(&unmapped(A), true));
            // No later event is of it.
            let _ = calls.read();
            assert!(!calls.explain(&unmapped(A), true));
        }
    }

    #[test]
    fn a_call_on_the_same_range_is_over_before_it_acted() {
        let mut calls = Calls::default();
        calls.begin(1, Some(unmapping(A)));
        let _ = calls.read();
        calls.begin(1, Some(unmapping(A)));
        assert!(calls.explain(&unmapped(A), true));
        assert_eq!(calls.read().len(), 1);
        assert!(calls.explain(&unmapped(A), true));
        assert_eq!(calls.read().len(), 0);
    }

    #[test]
    fn a_call_whose_end_was_not_recorded_explains_what_goes_past_the_filter() {
        let mut calls = Calls::default();
        let _ = calls.read();
        calls.begin(1, Some(unmapping(A)));
        assert!(!calls.explain(&unmapped(B), false));
        let _ = calls.read();
        assert!(calls.explain(&unmapped(B), false));
    }

    #[test]
    fn a_read_of_nothing_leaves_something_behind() {
        let mut calls = Calls::default();
        calls.begin(1, Some(unmapping(A)));
        let _ = calls.read();
        calls.begin(1, None);
        calls.done();
        let _ = calls.read();
        assert!(!calls.explain(&unmapped(A), true));
    }
}
