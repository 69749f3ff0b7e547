//! What is changed under the lock: who is in the cache, and how many bytes that is.

use std::collections::VecDeque;

use crate::cache::{Core, key};
use crate::hints;
use crate::index::Writer;
use crate::miss::Work;
use crate::slot::{Slot, State, Word};
use crate::sync::{Release, yield_now};
use crate::{Access, Error, Monitor, Registrar, Statistics};
use ummunotify_abi::PageRange;

/// Looks at a monitor whose counter moved and that has nothing to tell, before everything is taken for stale.
const PATIENCE: u32 = if cfg!(shuttle) { 3 } else { 100 };
/// Waiting entries that a miss looks at.
const LOOKS: usize = 4;
/// No counter's value: whoever compares with it goes the slow way, and learns there that the monitor is lost.
const NEVER: u64 = u64::MAX;

/// Why entries leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cause {
    Stale,
    Evicted,
    Superseded,
    End,
}

/// The lock's data.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) writer: Writer,
    hints: hints::Writer,
    free: Vec<u32>,
    /// Slots from here on were never used.
    next: u32,
    /// The clock's hand.
    hand: u32,
    /// Slots that aren't free.
    occupied: usize,
    /// Of these, being registered.
    pub(crate) pending: usize,
    /// Of these, being given back.
    pub(crate) closing: usize,
    /// Threads that wait for `Core::room`.
    pub(crate) waiters: usize,
    bytes: u64,
    /// Live entries of each set of rights.
    of_rights: [u32; Access::SETS],
    /// Retired entries that were in use when last looked at; some of them are gone by now.
    waiting: VecDeque<(u32, Word)>,
    /// Retired entries.
    retired: usize,
    /// The errno of the read that failed for good.
    lost: Option<i32>,
    pub(crate) statistics: Statistics,
}

impl Book {
    pub(crate) fn new(writer: Writer) -> Self {
        Self {
            writer,
            hints: hints::Writer::default(),
            free: Vec::new(),
            next: 0,
            hand: 0,
            occupied: 0,
            pending: 0,
            closing: 0,
            waiters: 0,
            bytes: 0,
            of_rights: [0; Access::SETS],
            waiting: VecDeque::new(),
            retired: 0,
            lost: None,
            statistics: Statistics::default(),
        }
    }

    pub(crate) fn statistics(&self) -> Statistics {
        Statistics { entries: self.occupied, waiting: self.retired, bytes: self.bytes, ..self.statistics }
    }
}

impl<M: Monitor, R: Registrar> Core<M, R> {
    /// Reads all that the monitor tells, and retires it, if its counter moved since it was last read to the end.
    pub(crate) fn drain(&self, book: &mut Book, work: &mut Work<'_, M, R>) -> Result<(), Error> {
        for _ in 0..PATIENCE {
            if let Some(errno) = book.lost {
                return Err(Error::Lost { errno });
            }
            if self.is_up_to_date() {
                return Ok(());
            }
            book.statistics.drains += 1;
            match self.monitor.events(&mut |cookie| self.mark(book, work, cookie)) {
                // What the counter says beyond this happened while this call ran.
                Ok(Some(last)) => {
                    self.seen.store(last, Release);
                    return Ok(());
                }
                // The news may lag a moment behind the counter.
                Ok(None) => yield_now(),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => {
                    book.lost = Some(e.raw_os_error().unwrap_or(0));
                    self.seen.store(NEVER, Release);
                    self.retire_all(book, work, false);
                }
            }
        }
        let generation = self.monitor.generation();
        book.statistics.blind_drains += 1;
        self.retire_all(book, work, false);
        self.seen.store(generation, Release);
        Ok(())
    }

    /// True if all that the monitor's counter speaks of is retired.
    #[inline]
    pub(crate) fn is_up_to_date(&self) -> bool {
        self.monitor.generation() == self.seen.load(crate::sync::Acquire)
    }

    /// The monitor says that `cookie` is stale.
    fn mark(&self, book: &mut Book, work: &mut Work<'_, M, R>, cookie: u64) {
        let id = cookie as u32;
        let Some(slot) = self.slots.get(id) else { return };
        let word = slot.word();
        if word.cookie(id) != cookie {
            return; // an earlier use of this slot
        }
        if word.is(State::Pending) {
            slot.set_word(word.with(State::PendingStale));
        } else if word.is(State::Live) {
            self.retire(book, work, id, Cause::Stale);
        }
    }

    /// Takes a Live entry out of use, or one that [is left idle](Self::is_left_idle) and therefore is evicted. What is idle
    /// is given back when `work` is done.
    pub(crate) fn retire(&self, book: &mut Book, work: &mut Work<'_, M, R>, id: u32, cause: Cause) {
        let Some(slot) = self.slots.get(id) else { return };
        let (word, range, access) = (slot.word(), slot.range(), slot.access());
        self.index.remove(&mut book.writer, key(access, range.start));
        self.hints.remove(&mut book.hints, key(access, range.start), id);
        self.count_rights(book, access, false);
        slot.set_word(word.with(State::Retired));
        book.retired += 1;
        match cause {
            Cause::Stale => book.statistics.invalidated += 1,
            Cause::Evicted => book.statistics.evicted += 1,
            Cause::Superseded => book.statistics.superseded += 1,
            Cause::End => {}
        }
        if cause == Cause::Evicted {
            // It was idle when nobody could come to use it any more: who acquires it now is about to let it go.
            self.close_now(book, work, id, word);
        } else if !self.close(book, work, id, word) {
            book.statistics.deferred += 1;
            book.waiting.push_back((id, word));
        }
    }

    /// Retires everything, and what is being registered too. `end`: nobody can use it any more.
    pub(crate) fn retire_all(&self, book: &mut Book, work: &mut Work<'_, M, R>, end: bool) {
        for id in 0..book.next {
            let Some(slot) = self.slots.get(id) else { continue };
            let word = slot.word();
            if word.is(State::Live) {
                self.retire(book, work, id, if end { Cause::End } else { Cause::Stale });
            } else if word.is(State::Pending) {
                slot.set_word(word.with(State::PendingStale));
            }
            // A handle that was forgotten (mem::forget) counts for ever.
            if end && slot.word().is(State::Retired) {
                self.close_now(book, work, id, word);
            }
        }
    }

    /// Has a Retired entry given back if nobody uses it; false if somebody does, or it is another one by now.
    fn close(&self, book: &mut Book, work: &mut Work<'_, M, R>, id: u32, word: Word) -> bool {
        let Some(slot) = self.slots.get(id) else { return false };
        let retired = slot.word() == word.with(State::Retired) && self.uses.idle(id);
        if retired {
            self.close_now(book, work, id, word);
        }
        retired
    }

    /// A slot isn't pending any more, which others may wait for.
    fn born(&self, book: &mut Book) {
        book.pending -= 1;
        self.tell(book);
    }

    /// Wakes who waits for room. A system call, so only if somebody does.
    fn tell(&self, book: &Book) {
        if book.waiters > 0 {
            self.room.notify_all();
        }
    }

    /// A registration that was stale before it was done.
    pub(crate) fn retire_newborn(&self, book: &mut Book, id: u32, word: Word) {
        if let Some(slot) = self.slots.get(id) {
            self.born(book);
            slot.set_word(word.with(State::Retired));
            book.retired += 1;
            book.waiting.push_back((id, word));
        }
    }

    /// A registration that another thread was quicker with.
    pub(crate) fn close_newborn(&self, book: &mut Book, work: &mut Work<'_, M, R>, id: u32, word: Word) {
        if let Some(slot) = self.slots.get(id) {
            self.born(book);
            slot.set_word(word.with(State::Closing));
            book.closing += 1;
            work.add(id);
        }
    }

    fn close_now(&self, book: &mut Book, work: &mut Work<'_, M, R>, id: u32, word: Word) {
        if let Some(slot) = self.slots.get(id) {
            slot.set_word(word.with(State::Closing));
            book.retired -= 1;
            book.closing += 1;
            work.add(id);
        }
    }

    /// The same for whoever dropped a handle.
    #[cold]
    pub(crate) fn close_if_idle(&self, id: u32, word: Word) {
        let mut work = Work::new(self);
        let mut book = crate::sync::lock(&self.book);
        self.close(&mut book, &mut work, id, word);
        drop(book);
        crate::miss::go_on_panicking(work.run());
    }

    /// Looks at some of the entries that wait for their users: whoever dropped the last handle may have missed that
    /// the entry was retired at the same moment.
    pub(crate) fn look_after_waiting(&self, book: &mut Book, work: &mut Work<'_, M, R>, looks: usize) {
        for _ in 0..looks.min(book.waiting.len()) {
            let Some((id, word)) = book.waiting.pop_front() else { return };
            let still = self.slots.get(id).is_some_and(|slot| slot.word() == word.with(State::Retired));
            if still && !self.close(book, work, id, word) {
                book.waiting.push_back((id, word));
            }
        }
    }

    pub(crate) fn look_after_some(&self, book: &mut Book, work: &mut Work<'_, M, R>) {
        self.look_after_waiting(book, work, LOOKS);
    }

    /// A slot for what is about to be registered, if there is room.
    pub(crate) fn reserve(&self, book: &mut Book, range: PageRange, access: Access) -> Option<u32> {
        // More than can be counted is no room either.
        let bytes = book.bytes.checked_add(range.len()).filter(|bytes| *bytes <= self.limits.bytes)?;
        if book.occupied >= self.limits.entries {
            return None;
        }
        let id = book.free.pop().unwrap_or(book.next);
        let slot = self.slots.make(id)?;
        book.next = book.next.max(id + 1);
        book.occupied += 1;
        book.pending += 1;
        book.bytes = bytes;
        book.statistics.peak_bytes = book.statistics.peak_bytes.max(bytes);
        slot.describe(range, access);
        slot.set_word(Word::new(slot.word().incarnation().wrapping_add(1), State::Pending));
        Some(id)
    }

    /// The slot is nobody's any more.
    pub(crate) fn set_free(&self, book: &mut Book, id: u32) {
        let Some(slot) = self.slots.get(id) else { return };
        match slot.word().is(State::Closing) {
            true => book.closing -= 1,
            false => book.pending -= 1,
        }
        book.occupied -= 1;
        book.bytes -= slot.range().len();
        slot.set_word(slot.word().with(State::Free));
        book.free.push(id);
        self.tell(book);
    }

    /// Retires idle entries until `bytes` bytes of them are, or all have been looked at; false if none was found.
    ///
    /// Second chance: what was used since the hand went by is passed over twice at most.
    pub(crate) fn evict(&self, book: &mut Book, work: &mut Work<'_, M, R>, bytes: u64) -> bool {
        let mut gained = 0;
        let mut found = false;
        for step in 0..u64::from(book.next) * 3 {
            if found && gained >= bytes {
                break;
            }
            book.hand = if book.hand + 1 < book.next { book.hand + 1 } else { 0 };
            let id = book.hand;
            let Some(slot) = self.slots.get(id).filter(|slot| slot.word().is(State::Live)) else { continue };
            let last_turn = step >= u64::from(book.next) * 2;
            if slot.untouch() && !last_turn || !self.is_left_idle(id, slot) {
                continue;
            }
            gained += slot.range().len();
            found = true;
            self.retire(book, work, id, Cause::Evicted);
        }
        found
    }

    /// True if nobody uses a Live entry, nor will: it is Retired then. A hit that is under way at this moment keeps it
    /// Live, instead of a request being told that there is no room and none that it could have.
    fn is_left_idle(&self, id: u32, slot: &Slot<R::Registration>) -> bool {
        let word = slot.word();
        if !self.uses.idle(id) {
            return false;
        }
        slot.set_word(word.with(State::Retired));
        let idle = self.uses.idle(id);
        if !idle {
            slot.set_word(word);
        }
        idle
    }

    /// Puts a registered entry into the index, in place of those that it contains.
    pub(crate) fn publish(&self, book: &mut Book, work: &mut Work<'_, M, R>, id: u32) {
        let Some(slot) = self.slots.get(id) else { return };
        let (range, access) = (slot.range(), slot.access());
        for rights in (0..Access::SETS as u8).map(Access::from_bits_truncate) {
            let some = book.of_rights.get(usize::from(rights.bits())).is_some_and(|n| *n > 0);
            if !some || !access.contains(rights) {
                continue;
            }
            let last = key(rights, range.end);
            while let Some((at, other)) = self.index.first_from(&book.writer, key(rights, range.start)) {
                // Entries of the same rights contain none another: from the first that sticks out all do.
                let inside = at < last && self.slots.get(other).is_some_and(|s| s.range().end <= range.end);
                if !inside {
                    break;
                }
                self.retire(book, work, other, Cause::Superseded);
            }
        }
        self.count_rights(book, access, true);
        self.born(book);
        slot.set_word(slot.word().with(State::Live));
        if self.index.insert(&mut book.writer, key(access, range.start), id).is_err() {
            debug_assert!(false, "the index is too small");
        }
        let key_of = |id| {
            let slot = self.slots.get(id).filter(|slot| slot.word().is(State::Live))?;
            Some(key(slot.access(), slot.range().start))
        };
        self.hints.insert(&mut book.hints, key(access, range.start), id, book.next, key_of);
    }

    fn count_rights(&self, book: &mut Book, access: Access, more: bool) {
        let bit = 1 << access.bits();
        let Some(count) = book.of_rights.get_mut(usize::from(access.bits())) else { return };
        *count = if more { *count + 1 } else { *count - 1 };
        match (*count, more) {
            (1, true) => _ = self.present.fetch_or(bit, Release),
            (0, false) => _ = self.present.fetch_and(!bit, Release),
            _ => {}
        }
    }
}
