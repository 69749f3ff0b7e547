//! Regions, events and the generation counter of one context, in shared memory, without system calls.
//!
//! The process that opened the device and its supervisor both map the context's arena (layout:
//! [`ummunotify_abi::arena`]) and its counter page, and both run this code on it:
//!
//! * [`Engine::register`], [`Engine::unregister`] and [`Engine::read`] take a lock, O(log n) each. They wait for
//!   a bounded time, and take the lock over from a dead owner.
//! * Recording ([`Engine::record`], [`Engine::begin`], [`Engine::end`], [`Engine::may_hit`],
//!   [`Engine::invalidate_all`]) is lock-free and bounded, O(log n + hits): it works in a signal handler, on any
//!   stack, next to a stopped or dead writer. What it can't record exactly it records as "everything is invalid",
//!   counted by [`Reason`].
//!
//! # Trust
//! Whoever else maps the arena may be hostile. Whatever stands in it, no call panics, leaves the mapping, or
//! runs without bound; the answers then are worth what the arena is worth.
//!
//! # Lock order
//! There is one lock, and nothing is waited for under it. [`Port`]'s methods are called with it held.
#![no_std]
#![deny(missing_docs)]
#![deny(unsafe_code)]

#[cfg(test)]
extern crate std;

mod arena;
mod cookies;
mod elsewhere;
mod error;
mod hook;
mod host;
mod index;
mod inline;
mod lock;
mod lookup;
mod queue;
mod read;
mod record;
mod registry;
mod repair;
mod statistics;
#[cfg(test)]
mod tests;
mod word;

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

pub use elsewhere::Region;
pub use error::{AlreadyUsed, BadArena, ReadError, RegisterError, Stuck, UnregisterError};
pub use host::{Host, Port};
pub use inline::{EPOCH, Look, Recorder};
pub use read::Ending;
use record::When;
pub use record::{Announced, Begin, Recorded};
pub use statistics::{Reason, Statistics};
pub use ummunotify_abi::PageRange;
pub use ummunotify_abi::arena::{ARENA_BYTES, MAX_REGIONS};
pub use ummunotify_abi::device::Event;

use arena::Arena;

/// One context, seen through one mapping of its arena.
#[derive(Clone, Copy, Debug)]
pub struct Engine {
    pub(crate) arena: Arena,
}

impl Engine {
    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// EXCHANGE_FEATURES: fails if the context was used before, and marks it used.
    pub fn exchange_features(&self) -> Result<(), AlreadyUsed> {
        match self.arena.header().used.swap(1, AcqRel) {
            0 => Ok(()),
            _ => Err(AlreadyUsed),
        }
    }

    /// Marks the context used, as a REGISTER_REGION or read does even when it fails later. [`Engine::register`]
    /// and [`Engine::read`] do it themselves.
    pub fn mark_used(&self) {
        self.arena.header().used.store(1, Relaxed);
    }

    /// REGISTER_REGION: an invalidation that starts after the return is reported.
    pub fn register(&self, host: &impl Host, region: PageRange, cookie: u64) -> Result<(), RegisterError> {
        registry::register(&self.arena, host, region, cookie, false)
    }

    /// As [`Engine::register`], of a region each page of which is mapped: see [`Engine::is_known_mapped`].
    pub fn register_mapped(
        &self,
        host: &impl Host,
        region: PageRange,
        cookie: u64,
    ) -> Result<(), RegisterError> {
        registry::register(&self.arena, host, region, cookie, true)
    }

    /// UNREGISTER_REGION: after the return nothing of the region is reported. Returns where it was.
    pub fn unregister(&self, host: &impl Host, cookie: u64) -> Result<PageRange, UnregisterError> {
        registry::unregister(&self.arena, host, cookie)
    }

    /// Reads up to `room` records (at most 128) into `port`; the number of records.
    ///
    /// Not being readable comes before any look at `room`; with no room, a readable context gives 0 and keeps
    /// everything. [`Port::settle`] is called, still under the lock, after records were consumed and when there
    /// was nothing to report, but not when there was no room or the port refused.
    pub fn read<P: Port>(
        &self,
        host: &impl Host,
        room: usize,
        port: &mut P,
    ) -> Result<usize, ReadError<P::Error>> {
        read::read(self, host, room, port, Ending::Now)
    }

    /// As [`Engine::read`], with LAST as the caller says: for a context into which somebody else counts too, whose
    /// hits the caller has queued first ([`Engine::requeue`]).
    pub fn read_up_to<P: Port>(
        &self,
        host: &impl Host,
        room: usize,
        port: &mut P,
        ending: Ending,
    ) -> Result<usize, ReadError<P::Error>> {
        read::read(self, host, room, port, ending)
    }

    /// True if a read would report something: an event is queued, or the counter isn't the last LAST's.
    /// May be true too early, while something is being recorded; never false too late.
    pub fn is_readable(&self) -> bool {
        let header = self.arena.header();
        self.counter() != header.reported.load(Acquire)
            || header.everything.load(Acquire) != 0
            || queue::is_pending(&self.arena)
    }

    /// The generation counter.
    #[inline]
    pub fn counter(&self) -> u64 {
        self.arena.counter().load(Acquire)
    }

    /// False if an invalidation of `range` hits no region; true if it does, or if that can't be said now.
    #[inline]
    pub fn may_hit(&self, range: PageRange) -> bool {
        record::may_hit(&self.arena, range)
    }

    /// Records one invalidation.
    #[inline]
    pub fn record(&self, range: PageRange) -> Recorded {
        record::sweep(&self.arena, range, When::Before)
    }

    /// True if something is surely mapped in `range`, for a region lies there that was
    /// [registered so](Engine::register_mapped) and that nothing has hit since.
    pub fn is_known_mapped(&self, range: PageRange) -> bool {
        record::is_known_mapped(&self.arena, range)
    }

    /// [`Engine::record`] if something is [known to be mapped](Engine::is_known_mapped) there, by one look for both; `None`,
    /// and nothing is recorded, if not, or if more than eight regions may be hit. What is registered after the look isn't
    /// hit: [`Engine::end`] does that. Of the processor's vector registers only the low halves of the first 16 are used.
    pub fn record_known(&self, range: PageRange) -> Option<Recorded> {
        record::sweep_known(&self.arena, range)
    }

    /// As [`Engine::may_hit`], of the regions alone that were registered before `begin`.
    pub fn may_have_hit(&self, begin: Begin, range: PageRange) -> bool {
        record::may_have_hit(&self.arena, begin, range)
    }

    /// Begins an operation: to be called before its invalidations are recorded, and before anything is tested
    /// on whose account recording may be left out.
    #[inline]
    pub fn begin(&self) -> Begin {
        Begin { epoch: self.arena.header().epoch.load(Acquire) }
    }

    /// Ends an operation, after the mapping has changed: regions that were registered or dequeued since `begin`
    /// and that `range` overlaps are hit (once more), as one more invalidation.
    ///
    /// If nothing was registered or dequeued meanwhile this is one load and a comparison.
    #[inline]
    pub fn end(&self, begin: Begin, range: PageRange) -> Recorded {
        if self.arena.header().epoch.load(Acquire) == begin.epoch {
            return Recorded::Missed;
        }
        record::sweep(&self.arena, range, When::After(begin.epoch))
    }

    /// Moves the counter for an invalidation that is certain to come while its range isn't known yet: the causing
    /// thread goes on as soon as one asks which it is. Until [`Self::fulfil`] a read waits with LAST, for a second
    /// at most; then everything is invalid.
    pub fn announce(&self) -> Announced {
        record::announce(&self.arena)
    }

    /// Tells what was announced; `None` if it was nothing. Moves the counter again only if it hits a region that
    /// was registered or dequeued since the announcement, or if a read has given up on it.
    pub fn fulfil(&self, host: &impl Host, announced: Announced, range: Option<PageRange>) -> Recorded {
        record::fulfil(&self.arena, host, announced, range)
    }

    /// Makes every region invalid: all that are registered now are queued without hint. The counter goes up by
    /// one.
    pub fn invalidate_all(&self, reason: Reason) {
        record::everything(&self.arena, reason);
    }

    /// What happened so far.
    pub fn statistics(&self) -> Statistics {
        Statistics::of(&self.arena)
    }

    /// The number of live regions.
    pub fn regions(&self) -> u64 {
        u64::from(self.arena.header().regions.load(Relaxed))
    }
}
