//! What it takes that the opener's own threads record, without a trap.
//!
//! They may only if they know every context of their address space, and while the supervisor, which counts the
//! contexts, agrees: else a call that isn't trapped would be missed by the others. Who records must also see to it
//! that the descriptor becomes readable. The opener has no way to write into its pipe; it asks the supervisor,
//! unless a byte lies there already and nobody waits for each hit.

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use core::sync::atomic::fence;

use ummunotify_abi::PageRange;
use ummunotify_abi::arena::{Header, NOBODY_RECORDS, OPENER_PASSES, OPENER_RECORDS, TRAPS_RECORD};

use crate::arena::Arena;
use crate::lookup::{exists, exists_now};
use crate::{Begin, Engine};

/// Where in an arena the word lies that [`Look::unmoved`] looks at.
pub const EPOCH: usize = core::mem::offset_of!(ummunotify_abi::arena::Header, epoch);

/// How many looks of registrations are in vain before the next ones don't look.
const VAIN_LOOKS: u32 = 64;

/// Counts one that was.
pub(crate) fn looked_in_vain(header: &Header) {
    let vain = header.vain_looks.load(Relaxed);
    if vain < VAIN_LOOKS {
        header.vain_looks.store(vain + 1, Relaxed);
    }
}

/// Who records what the opener's threads do.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recorder {
    /// The traps: each call is to be made where it is trapped.
    Traps = TRAPS_RECORD,
    /// The opener's threads themselves, where they can.
    Opener = OPENER_RECORDS,
    /// The traps, but for what hits nothing: that the opener's threads may let pass.
    OpenerPasses = OPENER_PASSES,
    /// Nobody: the context is over.
    Nobody = NOBODY_RECORDS,
}

/// An engine that only looks: it needs no counter.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub(crate) arena: Arena,
}

/// What each call of the inline layer asks for; no vector register is used.
impl Look {
    /// True if the opener's threads may let a call pass that hits nothing, provided that they know `known` contexts.
    #[inline(always)]
    pub fn opener_looks(&self, known: u32) -> bool {
        let header = self.arena.header();
        let recorder = header.recorder.load(Acquire);
        (recorder == OPENER_RECORDS || recorder == OPENER_PASSES) && header.siblings.load(Acquire) == known
    }

    /// As [`Engine::begin`].
    #[inline(always)]
    pub fn begin(&self) -> Begin {
        Begin { epoch: self.arena.header().epoch.load(Acquire) }
    }

    /// As [`Engine::may_hit`]; `None` if it can't be said now.
    #[inline(always)]
    pub fn hits(&self, range: PageRange) -> Option<bool> {
        exists(&self.arena, range).ok()
    }

    /// The same by one look, without patience for an index that is being changed.
    #[inline(always)]
    pub fn hits_now(&self, range: PageRange) -> Option<bool> {
        exists_now(&self.arena, range)
    }

    /// True if nothing was registered or dequeued since `begin`: [`Engine::end`] would find nothing.
    #[inline(always)]
    pub fn unmoved(&self, begin: Begin) -> bool {
        self.arena.header().epoch.load(Acquire) == begin.epoch
    }
}

impl Engine {
    /// What looks alone.
    #[inline(always)]
    fn look(&self) -> Look {
        Look { arena: self.arena }
    }

    /// As [`Look::hits`].
    #[inline(always)]
    pub fn hits(&self, range: PageRange) -> Option<bool> {
        self.look().hits(range)
    }

    /// As [`Look::unmoved`].
    #[inline(always)]
    pub fn unmoved(&self, begin: Begin) -> bool {
        self.look().unmoved(begin)
    }

    /// True if they may record a hit as well. To be asked after [`Look::opener_looks`].
    pub fn opener_records(&self) -> bool {
        self.arena.header().recorder.load(Acquire) == OPENER_RECORDS
    }

    /// Whether a registration is to look if its region is mapped ([`Engine::register_mapped`]). It spares the first hit that
    /// look, if the opener's threads record it, and is in vain if there is none before the region is unregistered: after 64
    /// such regions in a row none is looked at until there is a hit. Either way is right.
    pub fn looks_ahead(&self) -> bool {
        self.arena.header().vain_looks.load(Relaxed) < VAIN_LOOKS
    }

    /// Notes that a registration has looked and found that its region isn't mapped, which spares nobody anything.
    pub fn looked_in_vain(&self) {
        looked_in_vain(self.arena.header());
    }

    /// Notes that one of the opener's threads has recorded a hit: looking ahead is worth it. Rarely writes.
    #[inline]
    pub fn hit_in_process(&self) {
        let vain = &self.arena.header().vain_looks;
        if vain.load(Relaxed) > VAIN_LOOKS / 2 {
            vain.store(0, Relaxed);
        }
    }

    /// True once the context's descriptors and counter mappings are gone.
    pub fn is_over(&self) -> bool {
        self.arena.header().recorder.load(Acquire) == NOBODY_RECORDS
    }

    /// Says who records.
    pub fn set_recorder(&self, recorder: Recorder) {
        self.arena.header().recorder.store(recorder as u32, SeqCst);
    }

    /// Says how many contexts the opener's address space has.
    pub fn set_siblings(&self, contexts: u32) {
        self.arena.header().siblings.store(contexts, SeqCst);
    }

    /// Notes that a byte was written into the device's pipe, or found that there is no room for more.
    pub fn rung(&self) {
        self.arena.header().rung.store(1, SeqCst);
    }

    /// Notes that bytes are about to be taken out of the pipe. Whoever takes looks at [`Engine::is_readable`]
    /// afterwards: a recorder that still found the note has moved the counter before.
    pub fn hush(&self) {
        self.arena.header().rung.store(0, SeqCst);
        fence(SeqCst);
    }

    /// Somebody waits for each hit from now on.
    pub fn arm(&self) {
        self.arena.header().armed.store(1, SeqCst);
    }

    /// True if a byte must be written for the hit that was just recorded.
    pub fn wants_bell(&self) -> bool {
        fence(SeqCst);
        let header = self.arena.header();
        header.rung.load(SeqCst) == 0 || header.armed.load(Relaxed) != 0
    }
}
