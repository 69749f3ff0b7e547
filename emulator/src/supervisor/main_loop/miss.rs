//! A trapped call that hits nothing: most of them, and the one thing that each of them pays for is the way through here.
//! So nothing is allocated, and little touched: after the switch between two processes each page costs.

use super::{MainLoop, Trapped};
use crate::trap::operation::{Decoded, Operation};

impl MainLoop {
    /// Whether the call can go on with nothing recorded or remembered of it: what [`MainLoop::trapped`] would come to, where
    /// that is known at a glance. False when in doubt.
    pub(super) fn misses(&self, trapped: &Trapped) -> bool {
        let Decoded::Operation(operation) = Decoded::new(&trapped.call) else { return false };
        // As in `home`.
        let member = self.members.get(&trapped.tid).filter(|_| self.shared.has_one_space());
        let Some(space) = member else {
            return self.strangers.has(trapped.tid);
        };
        // Which calls are on their way matters to whoever begins to watch: of some even if nobody watches yet.
        if operation.fails_on_watched().is_some() || !space.fault.is_quiet() {
            return false;
        }
        let missed = space.is_missed(trapped.tid, operation.reach_with_heap(space.heap_limit()));
        if let (true, Operation::Brk { end }) = (missed, operation) {
            space.heap_asked(end);
        }
        missed
    }
}
