//! Half-open ranges of addresses.

/// A half-open range of addresses `[start, end)`, in bytes.
///
/// Regions may be anything a client passes (unaligned, empty, inverted); invalidations are page-aligned and
/// not empty.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageRange {
    /// First byte of the range.
    pub start: u64,
    /// First byte after the range.
    pub end: u64,
}

/// The page size of x86-64, in bytes.
pub const PAGE_SIZE: u64 = 4096;

impl PageRange {
    /// Every address.
    pub const ALL: Self = Self { start: 0, end: u64::MAX };

    /// The range `[start, end)`.
    pub const fn new(start: u64, end: u64) -> Self {
        Self { start, end }
    }

    /// `len` bytes from `start`, rounded up to whole pages as the kernel does for munmap; `None` where the
    /// kernel would refuse: unaligned start, zero length, or a sum that leaves the address space.
    pub const fn pages(start: u64, len: u64) -> Option<Self> {
        if !start.is_multiple_of(PAGE_SIZE) || len == 0 {
            return None;
        }
        let Some(padded) = len.checked_add(PAGE_SIZE - 1) else { return None };
        let Some(end) = start.checked_add(padded & !(PAGE_SIZE - 1)) else { return None };
        Some(Self { start, end })
    }

    /// True if no byte lies in the range.
    pub const fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Bytes in the range.
    pub const fn len(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Rule 2 of the interface: an invalidation `self` hits `region` iff `region.start < self.end` and
    /// `self.start < region.end`, unsigned, whatever the region looks like.
    pub const fn hits(self, region: Self) -> bool {
        region.start < self.end && self.start < region.end
    }

    /// The part of `self` that lies in `other`; `None` if that is empty.
    pub fn intersection(self, other: Self) -> Option<Self> {
        let both = Self { start: self.start.max(other.start), end: self.end.min(other.end) };
        (!both.is_empty()).then_some(both)
    }
}
