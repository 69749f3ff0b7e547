//! From cookie to slot: an open-addressed hash table with linear probing. Deletion shifts back, so nothing is
//! left behind by it; growth moves a few entries at each insertion, so no call pays for all. Under the lock.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;
use ummunotify_abi::arena::{COOKIES_MAX_LOG, COOKIES_MIN_LOG, SLOTS};

use crate::arena::Arena;
use crate::hook::step;
use crate::word::{State, Word};

/// Old entries looked at per insertion. An old table of n entries holds 5/8 n and must be empty before as many
/// more have come: 13/8 n looks in 5/8 n insertions, so 3 would do.
const MOVES: usize = 8;
const SLOT_BITS: u32 = SLOTS.trailing_zeros();

/// The table contradicts itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Corrupt;

/// An entry's table and its place there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    log: u32,
    i: usize,
    /// The slot the entry names.
    pub(crate) slot: u32,
}

/// The writer's view of the tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cookies<'a> {
    arena: &'a Arena,
}

/// A bijection that spreads cookies, which are often pointers, over all bits (the finalizer of MurmurHash3).
fn mix(cookie: u64) -> u64 {
    let mut x = cookie;
    x = (x ^ x >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ x >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ x >> 33
}

fn home(cookie: u64, log: u32) -> usize {
    (mix(cookie) >> (64 - log)) as usize
}

/// Slot number, and bits of the hash that spare most looks at slots.
fn entry(cookie: u64, slot: u32) -> u32 {
    (mix(cookie) as u32) << SLOT_BITS | slot
}

impl<'a> Cookies<'a> {
    pub(crate) fn new(arena: &'a Arena) -> Self {
        Self { arena }
    }

    fn log(&self) -> u32 {
        self.arena.header().cookies_log.load(Relaxed).clamp(COOKIES_MIN_LOG, COOKIES_MAX_LOG)
    }

    /// The table that is being emptied.
    fn old(&self) -> Option<u32> {
        let old = self.arena.header().cookies_old.load(Relaxed);
        (COOKIES_MIN_LOG..COOKIES_MAX_LOG).contains(&old).then_some(old)
    }

    fn at(&self, log: u32, i: usize) -> Result<&'a AtomicU32, Corrupt> {
        let size = 1usize << log;
        self.arena.cookie(size + (i & (size - 1))).ok_or(Corrupt)
    }

    fn cookie_of(&self, entry: u32) -> u64 {
        self.arena.slot(entry % SLOTS).map_or(0, |slot| slot.cookie.load(Relaxed))
    }

    /// The live region of that cookie.
    pub(crate) fn find(&self, cookie: u64) -> Result<Option<Place>, Corrupt> {
        for log in [Some(self.log()), self.old()].into_iter().flatten() {
            let first = home(cookie, log);
            for i in first..first + (1 << log) {
                let found = self.at(log, i)?.load(Relaxed);
                if found == 0 {
                    break;
                }
                let number = found % SLOTS;
                if found != entry(cookie, number) {
                    continue;
                }
                let slot = self.arena.slot(number).ok_or(Corrupt)?;
                if slot.cookie.load(Relaxed) == cookie && Word::load(slot).state() != State::Free {
                    return Ok(Some(Place { log, i, slot: number }));
                }
            }
        }
        Ok(None)
    }

    /// Takes an entry out. The slots of all entries still hold their cookies.
    pub(crate) fn remove(&self, place: Place) -> Result<(), Corrupt> {
        let Place { log, i: first, .. } = place;
        let mask = (1usize << log) - 1;
        let mut hole = first;
        for j in first + 1..first + mask {
            let moved = self.at(log, j)?.load(Relaxed);
            if moved == 0 {
                break;
            }
            let way = j.wrapping_sub(home(self.cookie_of(moved), log)) & mask;
            if way >= j - hole {
                self.at(log, hole)?.store(moved, Relaxed);
                hole = j;
                step();
            }
        }
        self.at(log, hole)?.store(0, Relaxed);
        Ok(())
    }

    fn put(&self, cookie: u64, slot: u32) -> Result<(), Corrupt> {
        let log = self.log();
        let first = home(cookie, log);
        for i in first..first + (1 << log) {
            let at = self.at(log, i)?;
            if at.load(Relaxed) == 0 {
                at.store(entry(cookie, slot), Relaxed);
                return Ok(());
            }
        }
        Err(Corrupt)
    }

    /// Looks at up to `n` places of the old table and moves what is there; true when none is left.
    fn advance(&self, n: usize) -> Result<bool, Corrupt> {
        let header = self.arena.header();
        let Some(old) = self.old() else { return Ok(true) };
        for _ in 0..n {
            let i = header.cookies_next.load(Relaxed) as usize;
            if i >= 1 << old {
                header.cookies_old.store(0, Relaxed);
                return Ok(true);
            }
            let moved = self.at(old, i)?.load(Relaxed);
            if moved == 0 {
                header.cookies_next.store(i as u32 + 1, Relaxed);
                continue;
            }
            self.put(self.cookie_of(moved), moved % SLOTS)?;
            step();
            self.remove(Place { log: old, i, slot: moved % SLOTS })?;
        }
        Ok(false)
    }

    /// Adds the cookie of a live slot; `live` regions have entries already.
    pub(crate) fn insert(&self, cookie: u64, slot: u32, live: u32) -> Result<(), Corrupt> {
        let header = self.arena.header();
        let log = self.log();
        if u64::from(live) + 1 > (5 << log) / 8 && log < COOKIES_MAX_LOG {
            if !self.advance(4 << log)? {
                return Err(Corrupt);
            }
            header.cookies_next.store(0, Relaxed);
            header.cookies_old.store(log, Relaxed);
            step();
            header.cookies_log.store(log + 1, Relaxed);
        }
        self.put(cookie, slot)?;
        self.advance(MOVES)?;
        Ok(())
    }

    /// Empties the tables in use; the others are empty.
    pub(crate) fn clear(&self) {
        for log in [Some(self.log()), self.old()].into_iter().flatten() {
            for i in 0..1 << log {
                if let Ok(at) = self.at(log, i) {
                    at.store(0, Relaxed);
                }
            }
        }
        self.arena.header().cookies_old.store(0, Relaxed);
    }
}
