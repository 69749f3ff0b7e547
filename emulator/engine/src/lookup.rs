//! Looking regions up without the lock: a bounded walk through the index between two equal even values of
//! `sequence`. What is found is only a slot number and the registration it had; the slot's state decides.

use core::sync::atomic::Ordering::{Acquire, Relaxed};
use core::sync::atomic::fence;
use ummunotify_abi::PageRange;
use ummunotify_abi::arena::{FANOUT, Node};

use crate::arena::Arena;
use crate::hook::step;
use crate::index::{Key, MAX_DEPTH, count, end, id, key, start};

/// How long a lookup puts up with a changing index, in turns of a spin loop: some 50 us, many times what a
/// running writer needs, and far less than a stopped one would take.
const PATIENCE: u32 = 1024;
/// What a walk that turned out to be torn counts.
const TORN: u32 = 16;

/// A region that was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) slot: u32,
    pub(crate) key: Key,
}

/// Up to `N` regions that were found, in the index's order.
#[derive(Debug)]
pub(crate) struct Chunk<const N: usize> {
    found: [Found; N],
    len: usize,
    /// There may be more behind the last one.
    pub(crate) more: bool,
}

impl<const N: usize> Chunk<N> {
    #[inline]
    pub(crate) fn new() -> Self {
        Self { found: [Found { slot: 0, key: Key { start: 0, seq: 0 } }; N], len: 0, more: false }
    }

    pub(crate) fn found(&self) -> &[Found] {
        self.found.get(..self.len).unwrap_or(&[])
    }

    pub(crate) fn last(&self) -> Option<Key> {
        self.found().last().map(|found| found.key)
    }
}

/// Why nothing can be said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unknown {
    /// The index kept changing, or stayed half-changed.
    Busy,
    /// The index contradicts itself.
    Corrupt,
}

/// True if `range` certainly hits nothing, by the bounds of all regions alone.
#[inline]
pub(crate) fn misses(arena: &Arena, range: PageRange) -> bool {
    let header = arena.header();
    let sequence = header.sequence.load(Acquire);
    let bank = arena.bank();
    let outside = range.end <= bank.span_start.load(Relaxed) || range.start >= bank.span_end.load(Relaxed);
    let whole = bank.broken.load(Relaxed) == 0;
    fence(Acquire);
    outside && whole && sequence & 1 == 0 && header.sequence.load(Relaxed) == sequence
}

/// What `look` finds in a tree that wasn't changed meanwhile; a bounded number of tries.
#[inline(always)]
fn settled<T>(arena: &Arena, mut look: impl FnMut() -> Result<T, Unknown>) -> Result<T, Unknown> {
    let header = arena.header();
    let mut patience = PATIENCE;
    while patience > 0 {
        let sequence = header.sequence.load(Acquire);
        if sequence & 1 == 1 {
            patience -= 1;
            core::hint::spin_loop();
            continue;
        }
        let found = look();
        step();
        fence(Acquire);
        if header.sequence.load(Relaxed) == sequence {
            return found;
        }
        patience = patience.saturating_sub(TORN);
    }
    Err(Unknown::Busy)
}

/// Whether `range` hits a region.
///
/// One way down the tree, by the ends alone: the first region in order that ends behind the range's start lies in the first
/// child whose largest end does. All before it end too early. If it starts behind the range's end, all after it do; else it
/// is hit.
/// No array and no copy: the inline layer runs this where vector registers aren't its own.
#[inline(always)]
pub(crate) fn exists(arena: &Arena, range: PageRange) -> Result<bool, Unknown> {
    settled(arena, || descend(arena, range))
}

/// The same by one look; `None` if the index changed meanwhile, or contradicts itself.
#[inline(always)]
pub(crate) fn exists_now(arena: &Arena, range: PageRange) -> Option<bool> {
    let header = arena.header();
    let sequence = header.sequence.load(Acquire);
    if sequence & 1 == 1 {
        return None;
    }
    let found = descend(arena, range);
    step();
    fence(Acquire);
    if header.sequence.load(Relaxed) == sequence { found.ok() } else { None }
}

#[inline(always)]
fn descend(arena: &Arena, range: PageRange) -> Result<bool, Unknown> {
    let bank = arena.bank();
    if bank.broken.load(Relaxed) != 0 {
        return Err(Unknown::Corrupt);
    }
    if range.end <= bank.span_start.load(Relaxed) || range.start >= bank.span_end.load(Relaxed) {
        return Ok(false);
    }
    // Without a root there is no region, and the bounds have said so.
    let mut at = bank.root.load(Relaxed);
    let mut above = MAX_DEPTH as u32;
    loop {
        let node = arena.node(at).ok_or(Unknown::Corrupt)?;
        let (n, level) = (node.count.load(Relaxed) as usize, node.level.load(Relaxed));
        if n > FANOUT || level >= above {
            return Err(Unknown::Corrupt);
        }
        if above < MAX_DEPTH as u32 && is_forged(node) {
            return Err(Unknown::Corrupt);
        }
        above = level;
        let mut i = 0;
        loop {
            if i == n {
                // The bounds, or the node above, have said that one does.
                return Err(Unknown::Corrupt);
            }
            if end(node, i) > range.start {
                break;
            }
            i += 1;
        }
        if level == 0 {
            return Ok(start(node, i) < range.end);
        }
        at = id(node, i);
    }
}

/// Has the lines of a node come together that are needed one after the other: below the root they are seldom in the cache.
/// A load of each is what makes that sure (prefetching gained half as much), and this is something that all of them are
/// needed for: false, but in a forged node. A value on the stack would make calls of the tail calls around it.
#[inline(always)]
fn is_forged(node: &Node) -> bool {
    let id = u64::from(id(node, 0)) | !u64::from(u32::MAX);
    end(node, FANOUT / 2) & start(node, 0) & id == u64::MAX
}

/// Finds the regions behind `after` that `range` hits; without a range, all of them.
pub(crate) fn collect<const N: usize>(
    arena: &Arena,
    range: Option<PageRange>,
    after: Option<Key>,
    chunk: &mut Chunk<N>,
) -> Result<(), Unknown> {
    settled(arena, || walk(arena, range, after, chunk))
}

/// The walk itself. Each node it enters lies on the path to its starting point or to its end, or holds a
/// region that is found; so the number of steps is bounded by that of regions, and a walk that takes more is
/// in a torn or forged tree.
fn walk<const N: usize>(
    arena: &Arena,
    range: Option<PageRange>,
    after: Option<Key>,
    chunk: &mut Chunk<N>,
) -> Result<(), Unknown> {
    chunk.len = 0;
    chunk.more = false;
    let bank = arena.bank();
    if bank.broken.load(Relaxed) != 0 {
        return Err(Unknown::Corrupt);
    }
    let mut at = bank.root.load(Relaxed);
    if at == 0 {
        return Ok(());
    }
    let mut stack = [(0u32, 0usize); MAX_DEPTH];
    let mut depth = 0;
    let mut i = 0;
    let mut budget = MAX_DEPTH * (N + 4);
    loop {
        let node = arena.node(at).ok_or(Unknown::Corrupt)?;
        let (n, level) = (count(node), node.level.load(Relaxed));
        let mut child = 0;
        while i < n {
            // Most entries lie below, and are stepped over in few instructions.
            if range.is_some_and(|range| end(node, i) <= range.start) {
                i += 1;
                continue;
            }
            let place = key(node, i);
            if range.is_some_and(|range| place.start >= range.end) {
                return Ok(());
            }
            let here = i;
            i += 1;
            if level != 0 {
                if after.is_some_and(|after| i < n && !after.precedes(key(node, i))) {
                    continue;
                }
                child = id(node, here);
                break;
            }
            if after.is_some_and(|after| !after.precedes(place)) {
                continue;
            }
            let Some(free) = chunk.found.get_mut(chunk.len) else {
                chunk.more = true;
                return Ok(());
            };
            *free = Found { slot: id(node, here), key: place };
            chunk.len += 1;
        }
        if child != 0 {
            let below = arena.node(child).ok_or(Unknown::Corrupt)?;
            budget = budget.saturating_sub(1);
            if budget == 0 || below.level.load(Relaxed) != level - 1 {
                return Err(Unknown::Corrupt);
            }
            *stack.get_mut(depth).ok_or(Unknown::Corrupt)? = (at, i);
            depth += 1;
            (at, i) = (child, 0);
        } else if i < n {
            return Err(Unknown::Corrupt);
        } else if let Some(&above) = depth.checked_sub(1).and_then(|up| stack.get(up)) {
            depth -= 1;
            (at, i) = above;
        } else {
            return Ok(());
        }
    }
}
