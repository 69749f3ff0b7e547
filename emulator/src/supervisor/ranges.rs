//! A set of addresses, as ranges that don't touch.

use std::collections::BTreeMap;

use ummunotify_abi::PageRange;

/// Ascending ranges with a gap between any two.
#[derive(Clone, Default, Debug)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range.
    pub fn insert(&mut self, range: PageRange) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        // Those that overlap or touch become one with it.
        while let Some((&s, &e)) = self.0.range(..=end).next_back()
            && e >= start
        {
            self.0.remove(&s);
            (start, end) = (start.min(s), end.max(e));
        }
        self.0.insert(start, end);
    }

    /// Takes a range out.
    pub fn remove(&mut self, range: PageRange) {
        for piece in self.over(range) {
            self.0.remove(&piece.start);
            self.insert(PageRange::new(piece.start, range.start.min(piece.end)));
            self.insert(PageRange::new(range.end.max(piece.start), piece.end));
        }
    }

    /// The ranges that overlap `range`, whole.
    pub fn over(&self, range: PageRange) -> Vec<PageRange> {
        if range.is_empty() {
            return Vec::new();
        }
        let mut out: Vec<_> = self
            .0
            .range(..range.end)
            .rev()
            .map(|(&start, &end)| PageRange::new(start, end))
            .take_while(|r| r.end > range.start)
            .collect();
        out.reverse();
        out
    }

    /// All ranges.
    pub fn all(&self) -> Vec<PageRange> {
        self.over(PageRange::ALL)
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if some range overlaps `range`.
    pub fn touches(&self, range: PageRange) -> bool {
        !range.is_empty() && self.0.range(..range.end).next_back().is_some_and(|(_, &end)| end > range.start)
    }

    /// True if a range begins or ends at `address`.
    pub fn has_edge(&self, address: u64) -> bool {
        let before = self.0.range(..=address).next_back();
        before.is_some_and(|(&start, &end)| {
            start == address
                || end == address
                || self.0.range(..start).next_back().is_some_and(|(_, &e)| e == address)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn r(start: u64, end: u64) -> PageRange {
        PageRange::new(start, end)
    }

    fn set(ranges: &[PageRange]) -> Ranges {
        let mut set = Ranges::default();
        ranges.iter().for_each(|range| set.insert(*range));
        set
    }

    #[test]
    fn ranges_that_touch_become_one() {
        assert_eq!(set(&[r(1, 2), r(3, 4), r(2, 3)]).all(), [r(1, 4)]);
        assert_eq!(set(&[r(1, 9), r(3, 4)]).all(), [r(1, 9)]);
        assert_eq!(set(&[r(3, 4), r(1, 9)]).all(), [r(1, 9)]);
        assert_eq!(set(&[r(1, 2), r(4, 5), r(8, 9), r(2, 8)]).all(), [r(1, 9)]);
        assert_eq!(set(&[r(5, 5), r(7, 6)]).all(), []);
    }

    #[test]
    fn what_is_taken_out_leaves_the_rest() {
        let mut all = set(&[r(0, 10), r(20, 30)]);
        all.remove(r(3, 4));
        all.remove(r(8, 22));
        all.remove(r(29, 99));
        all.remove(r(5, 5));
        assert_eq!(all.all(), [r(0, 3), r(4, 8), r(22, 29)]);
        assert_eq!(all.over(r(2, 5)), [r(0, 3), r(4, 8)]);
        assert!(all.touches(r(7, 9)) && !all.touches(r(8, 22)) && !all.touches(r(3, 4)));
    }

    #[test]
    fn edges_are_where_ranges_begin_and_end() {
        let all = set(&[r(1, 3), r(5, 7)]);
        let edges: Vec<u64> = (0..9).filter(|a| all.has_edge(*a)).collect();
        assert_eq!(edges, [1, 3, 5, 7]);
    }
}
