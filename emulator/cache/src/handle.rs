//! A use of an entry.

use std::fmt;

use crate::cache::Core;
use crate::slot::{Slot, State, Word};
use crate::sync::lock;
use crate::{Access, Monitor, Registrar};
use ummunotify_abi::PageRange;

/// A registration in use: it isn't given back before this is dropped. It may go to another thread.
#[must_use = "the registration may be given back as soon as the handle is dropped"]
pub struct Handle<'a, M: Monitor, R: Registrar> {
    pub(crate) core: &'a Core<M, R>,
    pub(crate) slot: &'a Slot<R::Registration>,
    pub(crate) id: u32,
    /// The state in which the use was got.
    pub(crate) word: Word,
}

impl<M: Monitor, R: Registrar> Handle<'_, M, R> {
    /// What the registrar returned.
    pub fn registration(&self) -> &R::Registration {
        // SAFETY: this handle is the use, and it was got before the slot was seen Live, or by the thread that put the
        // registration in.
        unsafe { self.slot.registration() }
    }

    /// The pages that are registered, bytes, half-open: at least those that were asked for.
    pub fn range(&self) -> PageRange {
        self.slot.range()
    }

    /// The rights it is registered with: at least those that were asked for.
    pub fn access(&self) -> Access {
        self.slot.access()
    }

    /// True if, at some moment of this call, the registration still was of the memory behind its addresses (and no
    /// other entry had replaced it). False in a forked child, and once the monitor is lost.
    pub fn is_current(&self) -> bool {
        !self.core.owner.is_gone()
            && self.core.catch_up().is_ok()
            && self.word.is(State::Live)
            // Whoever looks for room may be trying whether it is idle: not for longer than that holds the lock.
            && (self.slot.word() == self.word || {
                let _book = lock(&self.core.book);
                self.slot.word() == self.word
            })
    }
}

impl<M: Monitor, R: Registrar> Drop for Handle<'_, M, R> {
    #[inline]
    fn drop(&mut self) {
        if self.core.owner.is_gone() {
            return;
        }
        self.core.uses.release(self.core.uses.mine(), self.id);
        // Another thread's retiring may be missed here: then that thread, or the next miss, sees this release.
        if self.slot.word() != self.word.with(State::Live) {
            self.core.close_if_idle(self.id, self.word);
        }
    }
}

impl<M: Monitor, R: Registrar> fmt::Debug for Handle<'_, M, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("range", &self.range())
            .field("access", &self.access())
            .finish_non_exhaustive()
    }
}
