//! What a request does that no entry serves, and how registrations are given back.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::book::Book;
use crate::cache::Core;
use crate::handle::Handle;
use crate::slot::{Slot, State};
use crate::sync::{MutexGuard, lock, wait};
use crate::threads::Shard;
use crate::{Access, Error, Monitor, Registrar, RegistrarError};
use ummunotify_abi::PageRange;

/// How often a registration is tried again after idle entries were given back for it.
const RETRIES: u32 = 8;

/// What somebody's callback panicked with.
pub(crate) type Payload = Box<dyn Any + Send>;

/// Goes on with a panic that was held up until everything was in order.
pub(crate) fn go_on_panicking(payload: Option<Payload>) {
    if let Some(payload) = payload.filter(|_| !std::thread::panicking()) {
        resume_unwind(payload);
    }
}

/// Entries in the state Closing, to be given back once the lock is let go.
pub(crate) struct Work<'a, M: Monitor, R: Registrar> {
    core: &'a Core<M, R>,
    ids: Vec<u32>,
}

impl<'a, M: Monitor, R: Registrar> Work<'a, M, R> {
    pub(crate) fn new(core: &'a Core<M, R>) -> Self {
        Self { core, ids: Vec::new() }
    }

    pub(crate) fn add(&mut self, id: u32) {
        self.ids.push(id);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Gives all of them back, without the lock. A callback that panics keeps none of the others from it.
    pub(crate) fn run(&mut self) -> Option<Payload> {
        let mut first = None;
        // A callback may have forked, and the child have come back from it: nothing of this is the child's to give.
        while let Some(id) = self.ids.pop().filter(|_| !self.core.owner.is_gone()) {
            first = first.or(self.core.give_back(id));
        }
        first
    }
}

impl<M: Monitor, R: Registrar> Drop for Work<'_, M, R> {
    /// For those ways out that don't run it.
    fn drop(&mut self) {
        go_on_panicking(self.run());
    }
}

/// A slot whose registration is under way. Unless it is kept it is free again afterwards, whatever happens.
struct Birth<'a, M: Monitor, R: Registrar> {
    core: &'a Core<M, R>,
    slot: &'a Slot<R::Registration>,
    id: u32,
    watched: bool,
    kept: bool,
}

impl<'a, M: Monitor, R: Registrar> Birth<'a, M, R> {
    /// For a slot that was reserved.
    fn new(core: &'a Core<M, R>, id: u32) -> Self {
        let Some(slot) = core.slots.get(id) else { unreachable!("a reserved slot exists") };
        Self { core, slot, id, watched: false, kept: false }
    }
}

impl<M: Monitor, R: Registrar> Drop for Birth<'_, M, R> {
    fn drop(&mut self) {
        if self.kept || self.core.owner.is_gone() {
            return;
        }
        if self.watched {
            let _ = self.core.monitor.unregister(self.slot.word().cookie(self.id));
        }
        let mut book = lock(&self.core.book);
        book.statistics.failed += 1;
        self.core.set_free(&mut book, self.id);
    }
}

impl<M: Monitor, R: Registrar> Core<M, R> {
    /// Reads what has become stale, if anything has.
    pub(crate) fn catch_up(&self) -> Result<(), Error> {
        if self.is_up_to_date() {
            return Ok(());
        }
        let mut work = Work::new(self);
        let mut book = lock(&self.book);
        let drained = self.drain(&mut book, &mut work);
        drop(book);
        go_on_panicking(work.run());
        drained
    }

    pub(crate) fn sweep(&self, everything: bool) -> Result<(), Error> {
        let mut work = Work::new(self);
        let mut book = lock(&self.book);
        self.drain(&mut book, &mut work)?;
        self.look_after_waiting(&mut book, &mut work, usize::MAX);
        if everything {
            self.evict(&mut book, &mut work, u64::MAX);
        }
        drop(book);
        go_on_panicking(work.run());
        Ok(())
    }

    /// The request of a thread that found nothing, or found that the counter had moved.
    #[cold]
    #[inline(never)]
    pub(crate) fn get_slowly<'a>(
        &'a self,
        shard: Option<&'a Shard>,
        range: PageRange,
        access: Access,
    ) -> Result<Handle<'a, M, R>, Error> {
        // Dropped after the lock's guard, on every way out.
        let mut work = Work::new(self);
        let mut book = lock(&self.book);
        let birth = loop {
            self.drain(&mut book, &mut work)?;
            self.look_after_some(&mut book, &mut work);
            if let Some(handle) = self.find(shard, range, access) {
                book.statistics.second_looks += 1;
                drop(book);
                go_on_panicking(work.run());
                return Ok(handle);
            }
            if let Some(id) = self.reserve(&mut book, range, access) {
                break Birth::new(self, id);
            }
            book = self.make_room(book, &mut work, range)?;
        };
        book.statistics.misses += 1;
        drop(book);
        go_on_panicking(work.run());
        self.register(shard, birth, range, access)
    }

    /// Evicts for `range`, or waits for what others are registering and giving back.
    fn make_room<'a>(
        &'a self,
        mut book: MutexGuard<'a, Book>,
        work: &mut Work<'a, M, R>,
        range: PageRange,
    ) -> Result<MutexGuard<'a, Book>, Error> {
        if range.len() > self.limits.bytes {
            return Err(Error::TooLarge { range, max_bytes: self.limits.bytes });
        }
        let now = book.statistics();
        let missing = now.bytes.saturating_add(range.len()).saturating_sub(self.limits.bytes);
        self.look_after_waiting(&mut book, work, usize::MAX);
        // What others are registering may be what is asked for here, or fail, or be stale when it is done.
        if book.closing == 0 && !self.evict(&mut book, work, missing) && book.pending == 0 {
            return Err(Error::Full {
                range,
                used_bytes: now.bytes,
                max_bytes: self.limits.bytes,
                used_entries: now.entries,
                max_entries: self.limits.entries,
            });
        }
        if work.is_empty() {
            book.waiters += 1;
            book = wait(&self.room, book);
            book.waiters -= 1;
            return Ok(book);
        }
        drop(book);
        go_on_panicking(work.run());
        if self.owner.is_gone() {
            return Err(Error::Forked);
        }
        Ok(lock(&self.book))
    }

    /// Watches the range, then pins it: in this order nothing is missed.
    fn register<'a>(
        &'a self,
        shard: Option<&'a Shard>,
        mut birth: Birth<'a, M, R>,
        range: PageRange,
        access: Access,
    ) -> Result<Handle<'a, M, R>, Error> {
        let (slot, id) = (birth.slot, birth.id);
        self.watch(range, slot.word().cookie(id))?;
        birth.watched = true;
        let registration = self.pin(range, access)?;
        if self.owner.is_gone() {
            std::mem::forget(registration);
            return Err(Error::Forked);
        }

        let mut work = Work::new(self);
        let mut book = lock(&self.book);
        birth.kept = true;
        // SAFETY: the slot is Pending or PendingStale since this thread reserved it.
        unsafe { slot.put(registration) };
        let word = slot.word();
        if word.is(State::PendingStale) {
            // The pages were those of the range at some moment of this call: it gets them, and nobody else does.
            self.uses.acquire(shard, id);
            book.statistics.stale_at_birth += 1;
            self.retire_newborn(&mut book, id, word);
            return Ok(Handle { core: self, slot, id, word: word.with(State::Retired) });
        }
        if let Some(handle) = self.find(shard, range, access) {
            book.statistics.duplicates += 1;
            self.close_newborn(&mut book, &mut work, id, word);
            drop(book);
            go_on_panicking(work.run());
            return Ok(handle);
        }
        self.uses.acquire(shard, id);
        let handle = Handle { core: self, slot, id, word: word.with(State::Live) };
        self.publish(&mut book, &mut work, id);
        drop(book);
        go_on_panicking(work.run());
        Ok(handle)
    }

    /// Has the monitor watch the range; where that has no room for it, in exchange for idle entries.
    fn watch(&self, range: PageRange, cookie: u64) -> Result<(), Error> {
        let mut tries = 0;
        while let Err(error) = self.monitor.register(range, cookie) {
            tries += 1;
            if error.raw_os_error() != Some(libc::ENOMEM) || tries > RETRIES || !self.give_way(range) {
                return Err(Error::Monitor { range, error });
            }
        }
        Ok(())
    }

    /// Registers with the adapter; the same.
    fn pin(&self, range: PageRange, access: Access) -> Result<R::Registration, RegistrarError> {
        let mut tries = 0;
        loop {
            let error = match self.registrar.register(range, access) {
                Ok(registration) => return Ok(registration),
                Err(error) => error,
            };
            tries += 1;
            if error.errno != libc::ENOMEM || tries > RETRIES || !self.give_way(range) {
                return Err(error);
            }
        }
    }

    /// Gives idle entries of at least the range's size back; false if there are none.
    fn give_way(&self, range: PageRange) -> bool {
        if self.owner.is_gone() {
            return false;
        }
        let mut work = Work::new(self);
        let mut book = lock(&self.book);
        let found = self.evict(&mut book, &mut work, range.len());
        drop(book);
        go_on_panicking(work.run());
        found
    }

    /// Gives the registration of a Closing slot back, and frees the slot. What a callback panicked with.
    fn give_back(&self, id: u32) -> Option<Payload> {
        let slot = self.slots.get(id)?;
        let cookie = slot.word().cookie(id);
        // SAFETY: the slot is Closing, and the list that it came from is this thread's own.
        let registration = unsafe { slot.take() };
        let result = catch_unwind(AssertUnwindSafe(|| {
            let _ = self.monitor.unregister(cookie);
            self.registrar.deregister(registration)
        }));
        if self.owner.is_gone() {
            return result.err();
        }
        let mut book = lock(&self.book);
        book.statistics.deregistration_failures += u64::from(!matches!(result, Ok(Ok(()))));
        self.set_free(&mut book, id);
        result.err()
    }
}
