//! The index of regions: a B+tree by ascending start, among equal starts the later registered first, with the
//! largest end of each child. Changed under the lock, between an odd and an even `sequence`.
//!
//! Full nodes are split and thin ones refilled on the way down, so each change is complete in itself and one
//! that can't get a node leaves a valid tree. All numbers read from nodes are checked: the levels must go down
//! by one at each step, which bounds every descent.

use core::sync::atomic::Ordering::Relaxed;
use ummunotify_abi::arena::{Bank, FANOUT, FIRST_NODE, NODES, Node};

use crate::arena::Arena;
use crate::hook::step;

/// Fewest entries of a node that isn't the root.
const THIN: usize = FANOUT / 2;
/// Levels that a tree over all slots can't exceed.
pub(crate) const MAX_DEPTH: usize = 10;

/// A place in the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) start: u64,
    pub(crate) seq: u64,
}

impl Key {
    #[inline]
    pub(crate) fn precedes(self, other: Self) -> bool {
        self.start < other.start || self.start == other.start && self.seq > other.seq
    }
}

/// One entry of a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    pub(crate) end: u64,
    pub(crate) id: u32,
}

/// Why the index wasn't changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IndexError {
    /// No node is left.
    Full,
    /// The index contradicts itself.
    Corrupt,
}

type Path = [(u32, usize); MAX_DEPTH];

/// Entries in use; the mask of the array accesses below makes any count harmless.
#[inline]
pub(crate) fn count(node: &Node) -> usize {
    (node.count.load(Relaxed) as usize).min(FANOUT)
}

#[inline]
pub(crate) fn key(node: &Node, i: usize) -> Key {
    let i = i % FANOUT;
    Key { start: node.starts[i].load(Relaxed), seq: node.seqs[i].load(Relaxed) }
}

#[inline]
pub(crate) fn start(node: &Node, i: usize) -> u64 {
    node.starts[i % FANOUT].load(Relaxed)
}

#[inline]
pub(crate) fn id(node: &Node, i: usize) -> u32 {
    node.ids[i % FANOUT].load(Relaxed)
}

#[inline]
pub(crate) fn end(node: &Node, i: usize) -> u64 {
    node.ends[i % FANOUT].load(Relaxed)
}

fn get(node: &Node, i: usize) -> Entry {
    Entry { key: key(node, i), end: end(node, i), id: id(node, i) }
}

fn set(node: &Node, i: usize, entry: Entry) {
    let i = i % FANOUT;
    node.starts[i].store(entry.key.start, Relaxed);
    node.seqs[i].store(entry.key.seq, Relaxed);
    node.ends[i].store(entry.end, Relaxed);
    node.ids[i].store(entry.id, Relaxed);
}

fn set_key(node: &Node, i: usize, key: Key) {
    node.starts[i % FANOUT].store(key.start, Relaxed);
    node.seqs[i % FANOUT].store(key.seq, Relaxed);
}

fn max_end(node: &Node) -> u64 {
    (0..count(node)).map(|i| end(node, i)).max().unwrap_or(0)
}

fn set_count(node: &Node, n: usize) {
    node.count.store(n as u32, Relaxed);
}

/// Puts an entry at `i`; the node isn't full.
fn put(node: &Node, i: usize, entry: Entry) {
    let n = count(node).min(FANOUT - 1);
    for j in (i..n).rev() {
        set(node, j + 1, get(node, j));
    }
    set(node, i, entry);
    set_count(node, n + 1);
}

/// Takes the entry at `i` out.
fn take(node: &Node, i: usize) {
    let n = count(node);
    for j in i + 1..n {
        set(node, j - 1, get(node, j));
    }
    set_count(node, n.saturating_sub(1));
}

/// The child that `key` belongs to.
fn child_of(node: &Node, key_: Key) -> usize {
    let n = count(node);
    let mut i = 1;
    while i < n && !key_.precedes(key(node, i)) {
        i += 1;
    }
    i - 1
}

/// A writer's view of one bank's tree.
#[derive(Clone, Copy)]
pub(crate) struct Index<'a> {
    arena: &'a Arena,
    bank: &'a Bank,
    number: u32,
}

impl<'a> Index<'a> {
    pub(crate) fn current(arena: &'a Arena) -> Self {
        Self::of(arena, arena.header().bank.load(Relaxed))
    }

    pub(crate) fn of(arena: &'a Arena, number: u32) -> Self {
        Self { arena, bank: &arena.header().banks[(number & 1) as usize], number: number & 1 }
    }

    /// The node numbers of this bank.
    fn nodes(&self) -> core::ops::Range<u32> {
        if self.number == 0 { FIRST_NODE..NODES / 2 } else { NODES / 2..NODES }
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        self.bank.root.store(0, Relaxed);
        self.bank.free.store(0, Relaxed);
        self.bank.used.store(self.nodes().start, Relaxed);
        self.bank.broken.store(0, Relaxed);
        self.span(None);
    }

    fn node(&self, n: u32) -> Result<&'a Node, IndexError> {
        if !self.nodes().contains(&n) {
            return Err(IndexError::Corrupt);
        }
        self.arena.node(n).ok_or(IndexError::Corrupt)
    }

    fn level(node: &Node) -> u32 {
        node.level.load(Relaxed)
    }

    fn alloc(&self, level: u32) -> Result<u32, IndexError> {
        let mut n = self.bank.free.load(Relaxed);
        if n != 0 {
            self.bank.free.store(id(self.node(n)?, 0), Relaxed);
        } else {
            n = self.bank.used.load(Relaxed);
            if n >= self.nodes().end {
                return Err(IndexError::Full);
            }
            self.bank.used.store(n + 1, Relaxed);
        }
        let node = self.node(n)?;
        set_count(node, 0);
        node.level.store(level, Relaxed);
        Ok(n)
    }

    fn free(&self, n: u32) -> Result<(), IndexError> {
        let node = self.node(n)?;
        set_count(node, 0);
        node.ids[0].store(self.bank.free.load(Relaxed), Relaxed);
        self.bank.free.store(n, Relaxed);
        Ok(())
    }

    /// Notes the bounds of all regions, by which most invalidations miss without a look at the tree.
    fn span(&self, root: Option<&Node>) {
        let (start, end) = match root {
            Some(node) if count(node) > 0 => (key(node, 0).start, max_end(node)),
            _ => (0, 0),
        };
        self.bank.span_start.store(start, Relaxed);
        self.bank.span_end.store(end, Relaxed);
    }

    /// The same after `entry` has come, to others or as the first.
    fn widen_span(&self, entry: Entry, first: bool) {
        if first || entry.key.start < self.bank.span_start.load(Relaxed) {
            self.bank.span_start.store(entry.key.start, Relaxed);
        }
        if first || entry.end > self.bank.span_end.load(Relaxed) {
            self.bank.span_end.store(entry.end, Relaxed);
        }
    }

    /// The same after `entry` has gone; `root` isn't empty.
    fn narrow_span(&self, entry: Entry, root: &Node) {
        let bounds = entry.key.start <= self.bank.span_start.load(Relaxed)
            || entry.end >= self.bank.span_end.load(Relaxed);
        if bounds {
            self.span(Some(root));
        }
    }

    /// Splits the full child `i` of a node that isn't full.
    fn split(&self, parent: &Node, i: usize) -> Result<(), IndexError> {
        let left = self.node(id(parent, i))?;
        let number = self.alloc(Self::level(left))?;
        let right = self.node(number)?;
        for j in 0..FANOUT - THIN {
            set(right, j, get(left, THIN + j));
        }
        set_count(right, FANOUT - THIN);
        set_count(left, THIN);
        step();
        parent.ends[i % FANOUT].store(max_end(left), Relaxed);
        put(parent, i + 1, Entry { key: key(right, 0), end: max_end(right), id: number });
        Ok(())
    }

    /// Adds a region.
    pub(crate) fn insert(&self, entry: Entry) -> Result<(), IndexError> {
        let mut at = self.bank.root.load(Relaxed);
        if at == 0 {
            at = self.alloc(0)?;
            self.bank.root.store(at, Relaxed);
        }
        let root = self.node(at)?;
        let first = count(root) == 0;
        if count(root) == FANOUT {
            let level = Self::level(root).wrapping_add(1);
            if level as usize >= MAX_DEPTH {
                return Err(IndexError::Corrupt);
            }
            let number = self.alloc(level)?;
            let top = self.node(number)?;
            put(top, 0, Entry { key: key(root, 0), end: max_end(root), id: at });
            if let Err(error) = self.split(top, 0) {
                self.free(number)?;
                return Err(error);
            }
            step();
            self.bank.root.store(number, Relaxed);
            at = number;
        }

        let mut path: Path = [(0, 0); MAX_DEPTH];
        let mut depth = 0;
        let mut node = self.node(at)?;
        while Self::level(node) != 0 {
            let mut i = child_of(node, entry.key);
            if count(self.node(id(node, i))?) == FANOUT {
                self.split(node, i)?;
                if !entry.key.precedes(key(node, i + 1)) {
                    i += 1;
                }
            }
            let child = self.node(id(node, i))?;
            if Self::level(child) != Self::level(node).wrapping_sub(1) {
                return Err(IndexError::Corrupt);
            }
            *path.get_mut(depth).ok_or(IndexError::Corrupt)? = (at, i);
            depth += 1;
            at = id(node, i);
            node = child;
        }
        let n = count(node);
        let mut i = 0;
        while i < n && key(node, i).precedes(entry.key) {
            i += 1;
        }
        put(node, i, entry);
        step();
        for &(n, i) in path.iter().take(depth).rev() {
            let node = self.node(n)?;
            let i = i % FANOUT;
            if end(node, i) < entry.end {
                node.ends[i].store(entry.end, Relaxed);
            }
            if entry.key.precedes(key(node, i)) {
                set_key(node, i, entry.key);
            }
        }
        self.widen_span(entry, first);
        Ok(())
    }

    /// Gives the thin child `i` another entry, from or with a neighbour; returns its place afterwards.
    fn refill(&self, parent: &Node, i: usize) -> Result<usize, IndexError> {
        let child = self.node(id(parent, i))?;
        let left = if i > 0 { Some(self.node(id(parent, i - 1))?) } else { None };
        let right = if i + 1 < count(parent) { Some(self.node(id(parent, i + 1))?) } else { None };
        let same = |node: &Node| Self::level(node) == Self::level(child);
        if !left.is_none_or(same) || !right.is_none_or(same) {
            return Err(IndexError::Corrupt);
        }
        let ends = |j: usize, node: &Node| parent.ends[j % FANOUT].store(max_end(node), Relaxed);
        if let Some(left) = left.filter(|node| count(node) > THIN) {
            let last = count(left).saturating_sub(1);
            let entry = get(left, last);
            put(child, 0, entry);
            take(left, last);
            step();
            set_key(parent, i, entry.key);
            ends(i - 1, left);
            ends(i, child);
            Ok(i)
        } else if let Some(right) = right.filter(|node| count(node) > THIN) {
            put(child, count(child), get(right, 0));
            take(right, 0);
            step();
            set_key(parent, i + 1, key(right, 0));
            ends(i, child);
            ends(i + 1, right);
            Ok(i)
        } else if let Some(left) = left {
            self.merge(parent, i - 1, left, child)?;
            Ok(i - 1)
        } else if let Some(right) = right {
            self.merge(parent, i, child, right)?;
            Ok(i)
        } else {
            Err(IndexError::Corrupt)
        }
    }

    /// Moves all of `right`, child `i + 1`, into `left`, child `i`.
    fn merge(&self, parent: &Node, i: usize, left: &Node, right: &Node) -> Result<(), IndexError> {
        let (n, m) = (count(left), count(right));
        if n + m > FANOUT {
            return Err(IndexError::Corrupt);
        }
        for j in 0..m {
            set(left, n + j, get(right, j));
        }
        set_count(left, n + m);
        step();
        let number = id(parent, i + 1);
        parent.ends[i % FANOUT].store(max_end(left), Relaxed);
        take(parent, i + 1);
        self.free(number)
    }

    /// Takes a region out.
    pub(crate) fn remove(&self, place: Key, slot: u32) -> Result<(), IndexError> {
        let mut path: Path = [(0, 0); MAX_DEPTH];
        let mut depth = 0;
        let mut at = self.bank.root.load(Relaxed);
        let mut node = self.node(at)?;
        while Self::level(node) != 0 {
            let mut i = child_of(node, place);
            if count(self.node(id(node, i))?) <= THIN {
                i = self.refill(node, i)?;
            }
            let child = self.node(id(node, i))?;
            if Self::level(child) != Self::level(node).wrapping_sub(1) {
                return Err(IndexError::Corrupt);
            }
            *path.get_mut(depth).ok_or(IndexError::Corrupt)? = (at, i);
            depth += 1;
            at = id(node, i);
            node = child;
        }
        let found = (0..count(node)).find(|&i| key(node, i) == place && id(node, i) == slot);
        let found = found.ok_or(IndexError::Corrupt)?;
        let gone = get(node, found);
        take(node, found);
        step();
        for &(n, i) in path.iter().take(depth).rev() {
            let node = self.node(n)?;
            if end(node, i) > gone.end {
                // It is another entry's, here and further up.
                break;
            }
            let child = self.node(id(node, i))?;
            node.ends[i % FANOUT].store(max_end(child), Relaxed);
        }
        // The root may have lost its last entry, or all children but one.
        for _ in 0..MAX_DEPTH {
            let number = self.bank.root.load(Relaxed);
            let root = self.node(number)?;
            let (n, level) = (count(root), Self::level(root));
            if n > 1 || n == 1 && level == 0 {
                self.narrow_span(gone, root);
                return Ok(());
            }
            let below = if n == 1 { id(root, 0) } else { 0 };
            self.bank.root.store(below, Relaxed);
            self.free(number)?;
            if below == 0 {
                self.span(None);
                return Ok(());
            }
        }
        Err(IndexError::Corrupt)
    }

    /// Makes every lookup answer "don't know".
    pub(crate) fn mark_broken(&self) {
        self.bank.broken.store(1, Relaxed);
    }
}
