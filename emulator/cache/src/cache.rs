//! The cache, and what a hit does.

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;

use crate::book::Book;
use crate::chunks::Chunks;
use crate::fork::Owner;
use crate::handle::Handle;
use crate::hints::Hints;
use crate::index::Index;
use crate::miss::Work;
use crate::slot::{Slot, State};
use crate::sync::{Acquire, AtomicU32, AtomicU64, Condvar, Mutex, lock};
use crate::threads::{Shard, Uses};
use crate::{Access, Error, Monitor, Registrar, Statistics};
use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

/// How much a cache may hold. What is in use, being registered and being given back counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Registrations; at most [`Limits::MOST_ENTRIES`].
    pub entries: usize,
    /// Bytes that they pin, counted as often as they are registered.
    pub bytes: u64,
}

impl Limits {
    /// The most entries that a cache can be made for.
    pub const MOST_ENTRIES: usize = (1 << 24) - 1;
}

impl Default for Limits {
    /// 65,536 registrations of any size.
    fn default() -> Self {
        Self { entries: 1 << 16, bytes: u64::MAX }
    }
}

/// A cache of what `R` registered, kept right by `M`. See the crate's documentation.
pub struct Cache<M: Monitor, R: Registrar> {
    core: ManuallyDrop<Core<M, R>>,
}

/// All of it. Hits read everything but `book`.
pub(crate) struct Core<M: Monitor, R: Registrar> {
    pub(crate) monitor: M,
    pub(crate) owner: Owner,
    /// The value of the counter up to which all that is stale is retired.
    pub(crate) seen: AtomicU64,
    /// Bit n: there are entries with the rights n.
    pub(crate) present: AtomicU32,
    pub(crate) hints: Hints,
    pub(crate) index: Index,
    pub(crate) slots: Chunks<Slot<R::Registration>>,
    pub(crate) uses: Uses,
    pub(crate) registrar: R,
    pub(crate) limits: Limits,
    pub(crate) book: Mutex<Book>,
    /// Signalled when a slot becomes free, or an entry that can be found, if somebody waits.
    pub(crate) room: Condvar,
}

/// The name of an entry in the index: its rights, then its first page.
pub(crate) const fn key(access: Access, start: u64) -> u64 {
    ((access.bits() as u64) << 52) | (start / PAGE_SIZE)
}

/// The whole pages around `length` bytes at `address`.
fn whole_pages(address: u64, length: u64) -> Option<PageRange> {
    let start = address & !(PAGE_SIZE - 1);
    let end = address.checked_add(length)?.checked_next_multiple_of(PAGE_SIZE)?;
    (length > 0).then_some(PageRange::new(start, end))
}

impl<M: Monitor, R: Registrar> Cache<M, R> {
    /// An empty cache. `monitor` belongs to it from now on: nobody else may read its events.
    ///
    /// # Errors
    /// The kernel gives no page that a fork clears (`MADV_WIPEONFORK`, Linux 4.14), or the monitor can't be read.
    pub fn new(monitor: M, registrar: R, limits: Limits) -> io::Result<Self> {
        if limits.entries == 0 || limits.entries > Limits::MOST_ENTRIES {
            let message =
                format!("a cache holds 1 to {} entries, not {}", Limits::MOST_ENTRIES, limits.entries);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        // All there is to know about nothing: whatever was hit before isn't an entry.
        let mut seen = monitor.generation();
        loop {
            match monitor.events(&mut |_| ()) {
                Ok(last) => seen = last.unwrap_or(seen),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            }
            break;
        }
        let (index, writer) = Index::new(limits.entries);
        let core = Core {
            monitor,
            owner: Owner::this()?,
            seen: AtomicU64::new(seen),
            present: AtomicU32::new(0),
            hints: Hints::new(),
            index,
            slots: Chunks::new(limits.entries),
            uses: Uses::new(limits.entries),
            registrar,
            limits,
            book: Mutex::new(Book::new(writer)),
            room: Condvar::new(),
        };
        Ok(Self { core: ManuallyDrop::new(core) })
    }

    /// A registration of `length` bytes at `address` with at least the rights `access`: one that is there, or a new one.
    ///
    /// # Errors
    /// See [`Error`]; the cache is as it was before.
    #[inline]
    pub fn get(&self, address: u64, length: u64, access: Access) -> Result<Handle<'_, M, R>, Error> {
        let core = &*self.core;
        if core.owner.is_gone() {
            return Err(Error::Forked);
        }
        let range = whole_pages(address, length).ok_or(Error::Range { address, length })?;
        let shard = core.uses.mine();
        if core.monitor.generation() == core.seen.load(Acquire)
            && let Some(handle) = core.find(shard, range, access)
        {
            match shard {
                Some(shard) => shard.count_hit(),
                None => core.uses.count_other_hit(),
            }
            return Ok(handle);
        }
        core.get_slowly(shard, range, access)
    }

    /// Reads what has become stale, and gives back what is stale and idle: for a program that wants its memory back
    /// before it asks for the next registration.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Forked`].
    pub fn sweep(&self) -> Result<(), Error> {
        if self.core.owner.is_gone() {
            return Err(Error::Forked);
        }
        self.core.sweep(false)
    }

    /// The same, and gives back everything else that is idle.
    ///
    /// # Errors
    /// As [`Cache::sweep`].
    pub fn clear(&self) -> Result<(), Error> {
        if self.core.owner.is_gone() {
            return Err(Error::Forked);
        }
        self.core.sweep(true)
    }

    /// What it did and holds. Takes the lock; in a forked child all zero.
    pub fn statistics(&self) -> Statistics {
        if self.core.owner.is_gone() {
            return Statistics::default();
        }
        let book = lock(&self.core.book);
        let mut statistics = book.statistics();
        statistics.hits = self.core.uses.hits() + statistics.second_looks;
        statistics
    }

    /// The limits that it was made with.
    pub fn limits(&self) -> Limits {
        self.core.limits
    }

    /// The monitor. Its events are the cache's.
    pub fn monitor(&self) -> &M {
        &self.core.monitor
    }

    /// The registrar.
    pub fn registrar(&self) -> &R {
        &self.core.registrar
    }
}

impl<M: Monitor, R: Registrar> Core<M, R> {
    /// An entry that serves the request, if there is one and no change of the index is in the way.
    #[inline]
    pub(crate) fn find<'a>(
        &'a self,
        shard: Option<&'a Shard>,
        range: PageRange,
        access: Access,
    ) -> Option<Handle<'a, M, R>> {
        let own_key = key(access, range.start);
        if let Some(id) = shard.and_then(|shard| shard.remembered(own_key))
            && let Some(handle) = self.use_of(shard, id, range, access)
        {
            return Some(handle);
        }
        let present = self.present.load(Acquire);
        let own = 1 << access.bits();
        if let Some(handle) =
            (present & own != 0).then(|| self.find_with(shard, access, range, access)).flatten()
        {
            return Some(handle);
        }
        let mut wider = present & SUPERSETS[access.bits() as usize % Access::SETS] & !own;
        while wider != 0 {
            let rights = Access::from_bits_truncate(wider.trailing_zeros() as u8);
            if let Some(handle) = self.find_with(shard, rights, range, access) {
                return Some(handle);
            }
            wider &= wider - 1;
        }
        None
    }

    /// Among the entries of exactly these rights: they contain none another, so the one that starts last before the
    /// range also ends last of all that start before it.
    #[inline]
    fn find_with<'a>(
        &'a self,
        shard: Option<&'a Shard>,
        rights: Access,
        range: PageRange,
        access: Access,
    ) -> Option<Handle<'a, M, R>> {
        let at = key(rights, range.start);
        let handle = self
            .hints
            .find(at, |id| self.use_of(shard, id, range, access))
            .or_else(|| self.use_of(shard, self.index.last_not_above(at)?, range, access))?;
        if let Some(shard) = shard {
            shard.remember(key(access, range.start), handle.id);
        }
        Some(handle)
    }

    /// A use of slot `id`, if that is an entry which serves the request.
    #[inline]
    fn use_of<'a>(
        &'a self,
        shard: Option<&'a Shard>,
        id: u32,
        range: PageRange,
        access: Access,
    ) -> Option<Handle<'a, M, R>> {
        let slot = self.slots.get(id)?;
        let word = slot.word();
        if !word.is(State::Live) || !slot.serves(range, access) {
            return None;
        }
        self.uses.acquire(shard, id);
        let handle = Handle { core: self, slot, id, word };
        // Still the same entry, and still Live: so it stays until the handle is dropped, which gives the use back.
        if slot.word() != word {
            return None;
        }
        slot.touch();
        Some(handle)
    }
}

/// For each set of rights, the sets that contain it: bit n stands for the set n.
const SUPERSETS: [u32; Access::SETS] = {
    let mut table = [0; Access::SETS];
    let mut set = 0;
    while set < Access::SETS {
        let mut other = 0;
        while other < Access::SETS {
            if other & set == set {
                table[set] |= 1 << other;
            }
            other += 1;
        }
        set += 1;
    }
    table
};

impl<M: Monitor, R: Registrar> Drop for Cache<M, R> {
    fn drop(&mut self) {
        // A forked child's copy: the registrations, and what stands behind registrar and monitor, are the parent's.
        if self.core.owner.is_gone() {
            return;
        }
        let payload = {
            let mut work = Work::new(&self.core);
            let mut book = lock(&self.core.book);
            self.core.retire_all(&mut book, &mut work, true);
            drop(book);
            work.run()
        };
        // SAFETY: nothing uses it afterwards. No handle is left, for handles borrow the cache.
        unsafe { ManuallyDrop::drop(&mut self.core) };
        crate::miss::go_on_panicking(payload);
    }
}

impl<M: Monitor, R: Registrar> fmt::Debug for Cache<M, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache")
            .field("limits", &self.core.limits)
            .field("statistics", &self.statistics())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::common::{BASE, Machine, PAGE};
    use std::sync::Arc;

    type TestCore = Core<Arc<Machine>, Arc<Machine>>;

    /// The bytes of what all threads share: the core itself, slots and index.
    fn shared(core: &TestCore) -> Vec<u8> {
        fn bytes<T>(of: &T) -> &[u8] {
            // SAFETY: initialised memory but for padding, which nobody writes to; one test looks at it, while the
            // other threads that could write are joined.
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(of).cast(), size_of::<T>()) }
        }
        let mut all = bytes(core).to_vec();
        (0..1 << 10).filter_map(|id| core.slots.get(id)).for_each(|slot| all.extend(bytes(slot)));
        all.extend(core.index.bytes());
        all.extend(core.hints.bytes());
        all
    }

    #[test]
    fn a_hit_writes_to_what_threads_share() {
        let machine = Machine::new(2000);
        let limits = Limits { entries: 1000, bytes: u64::MAX };
        let cache = Cache::new(machine.clone(), machine, limits).unwrap();
        let hits = || {
            for n in 0..1000 {
                let handle = cache.get(BASE + 2 * n * PAGE + 5, 100, Access::LOCAL_READ).unwrap();
                assert_eq!(handle.range().start, BASE + 2 * n * PAGE);
            }
        };
        hits();
        let before = std::thread::scope(|scope| {
            let (go, orders) = std::sync::mpsc::channel();
            let (done, ended) = std::sync::mpsc::channel();
            scope.spawn(move || {
                for () in orders {
                    hits();
                    done.send(()).unwrap();
                }
            });
            let other = || {
                go.send(()).unwrap();
                ended.recv().unwrap();
            };
            // A thread's first request makes its own memory known.
            other();
            let before = shared(&cache.core);
            for _ in 0..3 {
                other();
                hits();
            }
            assert!(before == shared(&cache.core), "a hit wrote to shared memory");
            drop(go);
            before
        });
        assert_eq!((cache.statistics().hits, cache.statistics().misses), (7000, 1000));
        // And what is written is seen: the clock's hand clears marks, the next hit sets one.
        let id = cache.core.index.last_not_above(key(Access::LOCAL_READ, BASE)).unwrap();
        assert!(cache.core.slots.get(id).unwrap().untouch());
        assert!(before != shared(&cache.core));
        hits();
        assert!(before == shared(&cache.core));
    }
}
