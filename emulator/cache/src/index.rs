//! Which entry begins last before an address: a B+tree that is changed under a lock and read without one.
//!
//! Nodes are never freed, only used again. A reader that meets a change may be led to a wrong slot or to none; so
//! whoever follows an answer looks at the slot itself, and whoever finds nothing asks once more under the lock.
//! Every number that is read from a node is checked, and a descent ends after so many steps.

use crate::chunks::Chunks;
use crate::sync::{Acquire, AtomicU32, AtomicU64, Relaxed, Release};

/// Entries of a node; small for a model checker, which should see nodes being split and joined.
const FANOUT: usize = if cfg!(shuttle) { 4 } else { 32 };
/// No node but the root stays below this if a neighbour has room for what it holds.
const THIN: usize = FANOUT / 4;
/// Levels beyond any that a tree of 2^32 entries has.
const LEVELS: usize = 16;

/// In a leaf `values` are what was put in; above that node numbers, and `keys` the least key of each.
#[derive(Debug)]
struct Node {
    len: AtomicU32,
    /// 0 for a leaf.
    level: AtomicU32,
    keys: [AtomicU64; FANOUT],
    values: [AtomicU32; FANOUT],
}

impl Default for Node {
    fn default() -> Self {
        Self {
            len: AtomicU32::new(0),
            level: AtomicU32::new(0),
            keys: [const { AtomicU64::new(0) }; FANOUT],
            values: [const { AtomicU32::new(0) }; FANOUT],
        }
    }
}

impl Node {
    #[inline(always)]
    fn len(&self) -> usize {
        (self.len.load(Acquire) as usize).min(FANOUT)
    }

    fn set_len(&self, len: usize) {
        self.len.store(len as u32, Release);
    }

    #[inline(always)]
    fn key(&self, at: usize) -> u64 {
        self.keys.get(at).map_or(0, |key| key.load(Relaxed))
    }

    #[inline(always)]
    fn value(&self, at: usize) -> u32 {
        self.values.get(at).map_or(u32::MAX, |value| value.load(Acquire))
    }

    fn set(&self, at: usize, key: u64, value: u32) {
        if let (Some(k), Some(v)) = (self.keys.get(at), self.values.get(at)) {
            k.store(key, Relaxed);
            v.store(value, Release);
        }
    }

    fn set_key(&self, at: usize, key: u64) {
        if let Some(k) = self.keys.get(at) {
            k.store(key, Relaxed);
        }
    }

    /// How many keys aren't above `key`. Without a branch that depends on a key: it would be guessed wrong.
    #[inline(always)]
    fn not_above(&self, key: u64) -> usize {
        let (mut base, mut size) = (0, self.len());
        while size > 0 {
            let half = size.div_ceil(2);
            base += if self.key(base + half - 1) <= key { half } else { 0 };
            size -= half;
        }
        base
    }

    fn insert(&self, at: usize, key: u64, value: u32) {
        let len = self.len();
        for i in (at..len).rev() {
            self.set(i + 1, self.key(i), self.value(i));
        }
        self.set(at, key, value);
        self.set_len(len + 1);
    }

    fn remove(&self, at: usize) {
        let len = self.len();
        for i in at + 1..len {
            self.set(i - 1, self.key(i), self.value(i));
        }
        self.set_len(len.saturating_sub(1));
    }

    /// Appends what `from` holds from `at` on, and takes it from there.
    fn take_from(&self, from: &Self, at: usize) {
        let (len, end) = (self.len(), from.len());
        for i in at..end {
            self.set(len + i - at, from.key(i), from.value(i));
        }
        self.set_len(len + end - at);
        from.set_len(at);
    }
}

/// The tree.
#[derive(Debug)]
pub(crate) struct Index {
    root: AtomicU32,
    nodes: Chunks<Node>,
}

/// What only the holder of the lock has: which nodes are free.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    free: Vec<u32>,
    used: u32,
}

/// No node is left: the index is sized so that this can't be while it holds no more than it was made for.
#[derive(Debug)]
pub(crate) struct Exhausted;

impl Index {
    /// For up to `entries` entries.
    pub(crate) fn new(entries: usize) -> (Self, Writer) {
        // At least half of the nodes hold a quarter of what they could, or more.
        let nodes = entries.saturating_mul(2).div_ceil(THIN.max(1)).saturating_add(4 * LEVELS);
        let index = Self { root: AtomicU32::new(0), nodes: Chunks::new(nodes) };
        let mut writer = Writer::default();
        // Node 0: the empty root.
        let _ = index.allocate(&mut writer, 0);
        (index, writer)
    }

    fn allocate(&self, writer: &mut Writer, level: u32) -> Result<(u32, &Node), Exhausted> {
        let number = writer.free.pop().unwrap_or_else(|| {
            writer.used += 1;
            writer.used - 1
        });
        let node = self.nodes.make(number).ok_or(Exhausted)?;
        node.set_len(0);
        node.level.store(level, Release);
        Ok((number, node))
    }

    /// The value of the greatest key that isn't above `key`. Without the lock it may be another value, or `None`.
    #[inline]
    pub(crate) fn last_not_above(&self, key: u64) -> Option<u32> {
        let mut node = self.nodes.get(self.root.load(Acquire))?;
        for _ in 0..LEVELS {
            let value = node.value(node.not_above(key).checked_sub(1)?);
            if node.level.load(Relaxed) == 0 {
                return Some(value);
            }
            node = self.nodes.get(value)?;
        }
        None
    }

    /// The value of the least key from `key` on, with its key. Under the lock.
    pub(crate) fn first_from(&self, _: &Writer, key: u64) -> Option<(u64, u32)> {
        self.first_below(self.root.load(Relaxed), key)
    }

    fn first_below(&self, number: u32, key: u64) -> Option<(u64, u32)> {
        let node = self.nodes.get(number)?;
        if node.level.load(Relaxed) == 0 {
            let at = key.checked_sub(1).map_or(0, |before| node.not_above(before));
            return (at < node.len()).then(|| (node.key(at), node.value(at)));
        }
        let at = node.not_above(key).saturating_sub(1);
        (at..node.len()).take(2).find_map(|at| self.first_below(node.value(at), key))
    }

    /// Puts `value` under `key`, which isn't there.
    pub(crate) fn insert(&self, writer: &mut Writer, key: u64, value: u32) -> Result<(), Exhausted> {
        let root = self.root.load(Relaxed);
        let Some((right_key, right)) = self.insert_below(writer, root, key, value)? else { return Ok(()) };
        let old = self.nodes.get(root).ok_or(Exhausted)?;
        let (number, node) = self.allocate(writer, old.level.load(Relaxed) + 1)?;
        node.set(0, old.key(0), root);
        node.set(1, right_key, right);
        node.set_len(2);
        self.root.store(number, Release);
        Ok(())
    }

    /// The node's new right neighbour with its least key, if it had to be split.
    fn insert_below(
        &self,
        writer: &mut Writer,
        number: u32,
        key: u64,
        value: u32,
    ) -> Result<Option<(u64, u32)>, Exhausted> {
        let node = self.nodes.get(number).ok_or(Exhausted)?;
        let level = node.level.load(Relaxed);
        let (mut at, mut entry) = (node.not_above(key), (key, value));
        if level > 0 {
            at = at.max(1);
            let split = self.insert_below(writer, node.value(at - 1), key, value)?;
            // The first key of all is less than the parents knew.
            if key < node.key(at - 1) {
                node.set_key(at - 1, key);
            }
            match split {
                Some(right) => entry = right,
                None => return Ok(None),
            }
        }
        let len = node.len();
        if len < FANOUT {
            node.insert(at, entry.0, entry.1);
            return Ok(None);
        }
        let (number, right) = self.allocate(writer, level)?;
        // Ascending keys, as they come from mmap and malloc, fill nodes better if the split follows them.
        let half = if at == len { len - THIN.max(1) } else { len / 2 };
        right.take_from(node, half);
        if at <= half {
            node.insert(at, entry.0, entry.1)
        } else {
            right.insert(at - half, entry.0, entry.1)
        }
        Ok(Some((right.key(0), number)))
    }

    /// Takes `key` out; false if it isn't there.
    pub(crate) fn remove(&self, writer: &mut Writer, key: u64) -> bool {
        let number = self.root.load(Relaxed);
        let found = self.remove_below(writer, number, key);
        if let Some(root) =
            self.nodes.get(number).filter(|root| root.level.load(Relaxed) > 0 && root.len() == 1)
        {
            self.root.store(root.value(0), Release);
            writer.free.push(number);
        }
        found
    }

    fn remove_below(&self, writer: &mut Writer, number: u32, key: u64) -> bool {
        let Some(node) = self.nodes.get(number) else { return false };
        let Some(at) = node.not_above(key).checked_sub(1) else { return false };
        if node.level.load(Relaxed) == 0 {
            let found = node.key(at) == key;
            if found {
                node.remove(at);
            }
            return found;
        }
        let below = node.value(at);
        if !self.remove_below(writer, below, key) {
            return false;
        }
        let Some(child) = self.nodes.get(below) else { return true };
        if child.len() > 0 {
            node.set_key(at, child.key(0));
        }
        if child.len() <= THIN {
            self.join(writer, node, at);
        }
        true
    }

    /// Joins the child at `at` with a neighbour that has room for both.
    fn join(&self, writer: &mut Writer, node: &Node, at: usize) {
        for left in [Some(at), at.checked_sub(1)].into_iter().flatten().filter(|left| left + 1 < node.len()) {
            let (Some(a), Some(b)) = (self.nodes.get(node.value(left)), self.nodes.get(node.value(left + 1)))
            else {
                continue;
            };
            if a.len() + b.len() <= FANOUT {
                let number = node.value(left + 1);
                a.take_from(b, 0);
                node.set_key(left, a.key(0));
                node.remove(left + 1);
                writer.free.push(number);
                return;
            }
        }
    }

    /// The bytes of the nodes in use, for a test that compares them.
    #[cfg(all(test, not(shuttle)))]
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let all = (0..).map_while(|number| self.nodes.get(number));
        let words = all.flat_map(|node| {
            let ends = [u64::from(node.len.load(Relaxed)), u64::from(node.level.load(Relaxed))];
            let entries = (0..FANOUT).flat_map(|at| [node.key(at), u64::from(node.value(at))]);
            ends.into_iter().chain(entries).collect::<Vec<_>>()
        });
        words.flat_map(u64::to_ne_bytes).collect()
    }

    /// All that is in it, in order, with every rule of the tree checked.
    #[cfg(all(test, not(shuttle)))]
    fn check(&self) -> Vec<(u64, u32)> {
        fn walk(index: &Index, number: u32, root: bool, out: &mut Vec<(u64, u32)>) -> u32 {
            let node = index.nodes.get(number).unwrap();
            let level = node.level.load(Relaxed);
            assert!((1..node.len()).all(|i| node.key(i - 1) < node.key(i)));
            assert!(root || node.len() > 0, "an empty node");
            for i in 0..node.len() {
                if level == 0 {
                    out.push((node.key(i), node.value(i)));
                } else {
                    let before = out.len();
                    assert_eq!(walk(index, node.value(i), false, out) + 1, level);
                    assert_eq!(out[before].0, node.key(i), "a separator isn't the least key");
                }
            }
            level
        }
        let mut out = Vec::new();
        walk(self, self.root.load(Relaxed), true, &mut out);
        out
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64),
        Remove(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![3 => (0..2000u64).prop_map(Step::Insert), 2 => (0..2000u64).prop_map(Step::Remove)]
    }

    fn same(index: &Index, writer: &Writer, model: &BTreeMap<u64, u32>, key: u64) {
        assert_eq!(index.last_not_above(key), model.range(..=key).next_back().map(|(_, v)| *v), "{key}");
        assert_eq!(index.first_from(writer, key), model.range(key..).next().map(|(k, v)| (*k, *v)), "{key}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn the_tree_differs_from_an_ordered_map(steps in prop::collection::vec(step(), 1..3000)) {
            let (index, mut writer) = Index::new(2000);
            let mut model = BTreeMap::new();
            for (nth, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(key) => if model.insert(key, nth as u32).is_none() {
                        index.insert(&mut writer, key, nth as u32).unwrap();
                    } else {
                        assert!(index.remove(&mut writer, key));
                        index.insert(&mut writer, key, nth as u32).unwrap();
                    },
                    Step::Remove(key) => assert_eq!(index.remove(&mut writer, key), model.remove(&key).is_some()),
                }
                same(&index, &writer, &model, nth as u64 % 2000);
            }
            assert_eq!(index.check(), model.iter().map(|(k, v)| (*k, *v)).collect::<Vec<_>>());
            for key in 0..2000 {
                same(&index, &writer, &model, key);
            }
        }
    }

    #[test]
    fn nodes_run_out_below_the_size_that_was_asked_for() {
        // In order, in reverse, and so that every node is left as thin as can be.
        for entries in [1usize, 100, 20_000] {
            let (index, mut writer) = Index::new(entries);
            for turn in 0..6u64 {
                let all: Vec<u64> = match turn % 2 {
                    0 => (0..entries as u64).collect(),
                    _ => (0..entries as u64).rev().collect(),
                };
                for &key in &all {
                    index.insert(&mut writer, key * 100, key as u32).unwrap();
                }
                let keep = |key: u64| key.is_multiple_of(8 + turn);
                for &key in all.iter().filter(|key| !keep(**key)) {
                    assert!(index.remove(&mut writer, key * 100));
                }
                // What was freed goes to other places.
                for &key in all.iter().filter(|key| !keep(**key)) {
                    index.insert(&mut writer, key * 100 + 1, key as u32).unwrap();
                }
                assert_eq!(index.check().len(), entries);
                for &key in &all {
                    assert!(index.remove(&mut writer, key * 100 + u64::from(!keep(key))));
                }
                assert!(index.check().is_empty());
            }
        }
    }
}
