//! The place of an entry. A slot is never freed, only used again, under another incarnation number.

use crate::Access;
use crate::sync::{Acquire, AtomicU64, Relaxed, Release, SeqCst, fence};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

/// What a slot is at the moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum State {
    /// Nothing.
    Free = 0,
    /// A thread is registering for it.
    Pending = 1,
    /// The same, and what is being registered has become stale already.
    PendingStale = 2,
    /// An entry that serves requests.
    Live = 3,
    /// An entry that serves no request any more, and waits for its users.
    Retired = 4,
    /// A thread is giving the registration back.
    Closing = 5,
}

/// A state, and which use of the slot it belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Word(u64);

impl Word {
    pub(crate) const fn new(incarnation: u32, state: State) -> Self {
        Self((incarnation as u64) << 8 | state as u64)
    }

    pub(crate) const fn incarnation(self) -> u32 {
        (self.0 >> 8) as u32
    }

    pub(crate) const fn with(self, state: State) -> Self {
        Self::new(self.incarnation(), state)
    }

    #[inline(always)]
    pub(crate) const fn is(self, state: State) -> bool {
        self.0 as u8 == state as u8
    }

    /// The name under which the monitor knows this use of slot `slot`.
    pub(crate) const fn cookie(self, slot: u32) -> u64 {
        (self.incarnation() as u64) << 32 | slot as u64
    }
}

/// Bits of an address within its page: what stands there is something else.
const LOW: u64 = PAGE_SIZE - 1;
/// In `end`: used since the clock's hand went by.
const USED: u64 = 1;

/// What hits only read, with a registration of up to 8 bytes half a line of the machine's cache: the fewer lines there
/// are, the more of them are near.
#[repr(align(32))]
pub(crate) struct Slot<T> {
    word: AtomicU64,
    /// The first byte's address, a page's, and the rights in its low bits.
    start: AtomicU64,
    /// The address behind the last byte, a page's, and USED.
    end: AtomicU64,
    /// There from `put` to `take`.
    registration: UnsafeCell<MaybeUninit<T>>,
}

impl<T> std::fmt::Debug for Slot<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot")
            .field("word", &self.word())
            .field("range", &self.range())
            .field("access", &self.access())
            .finish_non_exhaustive()
    }
}

// SAFETY: the cell is written only by who holds the slot in the states Pending or Closing, which one thread at a time
// does, and read only by who holds a use of it in the state Live, or got the use then: the rules of `put`, `take` and
// `registration`. T crosses threads and is seen by several at once.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self {
            word: AtomicU64::new(Word::new(0, State::Free).0),
            start: AtomicU64::new(0),
            end: AtomicU64::new(0),
            registration: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }
}

impl<T> Slot<T> {
    #[inline(always)]
    pub(crate) fn word(&self) -> Word {
        Word(self.word.load(Acquire))
    }

    /// Changes the state. Whoever may ask next for the users (`Uses::idle`) issues the fence that makes it known.
    pub(crate) fn set_word(&self, word: Word) {
        self.word.store(word.0, SeqCst);
    }

    #[inline(always)]
    pub(crate) fn range(&self) -> PageRange {
        PageRange::new(self.start.load(Relaxed) & !LOW, self.end.load(Relaxed) & !LOW)
    }

    #[inline(always)]
    pub(crate) fn access(&self) -> Access {
        Access::from_bits_truncate(self.start.load(Relaxed) as u8)
    }

    /// True if a request for `range` can be served. Only a word that was Live before and is the same afterwards makes
    /// the answer one about a single entry.
    #[inline(always)]
    pub(crate) fn serves(&self, range: PageRange, access: Access) -> bool {
        let own = self.range();
        own.start <= range.start && range.end <= own.end && self.access().contains(access)
    }

    /// Names what a free slot will be. Before the state leaves Free.
    pub(crate) fn describe(&self, range: PageRange, access: Access) {
        // Whoever sees one of these sees that the state is no longer Live.
        fence(Release);
        self.start.store(range.start | u64::from(access.bits()), Relaxed);
        // Not yet USED: what is never asked for again makes room first.
        self.end.store(range.end, Release);
    }

    /// Notes a use: writes only if that wasn't noted. The caller holds a use of the slot, so it isn't described anew.
    #[inline(always)]
    pub(crate) fn touch(&self) {
        let end = self.end.load(Relaxed);
        if end & USED == 0 {
            self.end.store(end | USED, Relaxed);
        }
    }

    /// Takes the note back; true if there was one.
    pub(crate) fn untouch(&self) -> bool {
        let end = self.end.load(Relaxed);
        if end & USED != 0 {
            self.end.store(end & !USED, Relaxed);
        }
        end & USED != 0
    }

    /// Stores what was registered.
    ///
    /// # Safety
    /// The slot is Pending or PendingStale, and the caller is the thread that made it so.
    pub(crate) unsafe fn put(&self, registration: T) {
        // SAFETY: nobody reads the cell before the state leaves Pending, nor writes but the caller.
        unsafe { (*self.registration.get()).write(registration) };
    }

    /// Takes out what was registered.
    ///
    /// # Safety
    /// The slot is Closing, and the caller is the thread that gives it back: the only one that calls this for this
    /// use of the slot. Whoever made it Closing found it idle; or no other thread knew the slot.
    pub(crate) unsafe fn take(&self) -> T {
        // SAFETY: `put` comes before all ways to Closing. No use is left and none can be got, so nobody reads the cell,
        // nor writes but the caller.
        unsafe { (*self.registration.get()).assume_init_read() }
    }

    /// What was registered.
    ///
    /// # Safety
    /// The caller holds a use of the slot that was acquired before the slot was seen Live, or by the thread that
    /// called `put`, for as long as the reference lives.
    pub(crate) unsafe fn registration(&self) -> &T {
        // SAFETY: it is written before the slot is Live and not again, nor taken out, before the slot is idle.
        unsafe { (*self.registration.get()).assume_init_ref() }
    }
}
