//! Which ranges an operation will invalidate, in the kernel's order.
//!
//! The kernel's own order and repeats matter: the first hit of a region carries a hint, a second one takes it
//! away, and the counter moves once for each. Three rules stand above the single operations:
//! 1. That nothing will happen is concluded from the mapping table (a hole, unchanged protection, growth in
//!    place) only while a single task runs on the address space. Plain mmap isn't trapped, so another thread
//!    could fill the hole between the look and the act. With more tasks holes are pieces of their own.
//! 2. A call that will fail may act before it does: every piece up to the failing one is reported.
//! 3. When unsure, report.

mod advice;
#[cfg(test)]
mod fake;
mod file;
mod memory;
#[cfg(test)]
mod recordings;
#[cfg(test)]
mod rules;
mod task;

use std::sync::Arc;

use ummunotify_abi::PageRange;

use crate::target::maps::{self, Mapping};
use crate::target::{FileKind, Source, Target, Unreadable};
use crate::trap::operation::{HUGE_1G, Operation, Reach, around};

/// What an operation invalidates.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// These ranges, one invalidation each, in this order; a range may stand there twice.
    Pieces(Vec<PageRange>),
    /// It can't be told: every region must count as invalid.
    All(Reason),
}

/// Why an effect can't be told.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reason {
    /// A read of the process failed.
    Unreadable(Source),
    /// The call came by an entry whose arguments aren't read (32-bit, or compat structures).
    Foreign,
    /// migrate_pages moves any page of the process.
    MigratePages,
    /// More addresses are named than are worth reading.
    TooMany,
}

impl Reason {
    /// Every reason, for tables of counters.
    pub const ALL: [Self; 9] = [
        Self::Unreadable(Source::Status),
        Self::Unreadable(Source::Maps),
        Self::Unreadable(Source::Smaps),
        Self::Unreadable(Source::Descriptor),
        Self::Unreadable(Source::Memory),
        Self::Unreadable(Source::Other),
        Self::Foreign,
        Self::MigratePages,
        Self::TooMany,
    ];

    /// A short name, for statistics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unreadable(Source::Status) => "status-unreadable",
            Self::Unreadable(Source::Maps) => "maps-unreadable",
            Self::Unreadable(Source::Smaps) => "smaps-unreadable",
            Self::Unreadable(Source::Descriptor) => "descriptor-unreadable",
            Self::Unreadable(Source::Memory) => "memory-unreadable",
            Self::Unreadable(Source::Other) => "process-unreadable",
            Self::Foreign => "foreign-entry",
            Self::MigratePages => "migrate-pages",
            Self::TooMany => "too-many-addresses",
        }
    }
}

impl From<Unreadable> for Reason {
    fn from(failed: Unreadable) -> Self {
        Self::Unreadable(failed.source)
    }
}

/// What `operation` will invalidate in the address space of `target`, which waits in it.
pub fn effect(operation: &Operation, target: &mut dyn Target) -> Effect {
    if operation.reach() == Reach::Nothing {
        return Effect::Pieces(Vec::new());
    }
    match pieces(operation, target) {
        Ok(pieces) => Effect::Pieces(pieces),
        Err(reason) => Effect::All(reason),
    }
}

type Pieces = Result<Vec<PageRange>, Reason>;

fn pieces(operation: &Operation, target: &mut dyn Target) -> Pieces {
    match *operation {
        Operation::Munmap { start, len } => memory::munmap(target, start, len),
        Operation::MmapFixed { start, len, flags, fd, .. } => {
            memory::mmap_fixed(target, start, len, flags, fd)
        }
        Operation::Mremap { start, old_len, new_len, flags, destination } => {
            memory::mremap(target, start, old_len, new_len, flags, destination)
        }
        Operation::Mprotect { start, len, prot, pkey } => memory::mprotect(target, start, len, prot, pkey),
        Operation::Brk { end } => memory::brk(target, end),
        Operation::Shmdt { start } => memory::shmdt(target, start),
        Operation::ShmatRemap { id, start } => memory::shmat_remap(target, id, start),
        Operation::RemapFilePages { .. } => memory::remap_file_pages(target, operation.reach()),
        Operation::Madvise { start, len, advice } => advice::madvise(target, start, len, advice),
        Operation::ProcessMadvise { pidfd, vector, count, advice } => {
            advice::process_madvise(target, pidfd, vector, count, advice)
        }
        Operation::Mbind { start, len } => advice::mbind(target, start, len),
        Operation::MovePages { pid, count, pages } => advice::move_pages(target, pid, count, pages),
        Operation::MigratePages { pid } => advice::migrate_pages(target, pid),
        Operation::PagemapScan { argument } => advice::pagemap_scan(target, argument),
        Operation::UffdRange { argument } => advice::uffd_range(target, argument),
        Operation::UffdMove { argument } => advice::uffd_move(target, argument),
        Operation::Fallocate { fd, mode, offset, len } => file::fallocate(target, fd, mode, offset, len),
        Operation::SpaceIoctl { fd, mode, argument } => file::space_ioctl(target, fd, mode, argument),
        Operation::Ftruncate { fd, len } => file::ftruncate(target, fd, len),
        Operation::Truncate { path, len } => file::truncate_path(target, None, path, len),
        Operation::OpenTruncate { directory, path } => file::truncate_path(target, Some(directory), path, 0),
        Operation::Openat2 { directory, path, how, .. } => file::openat2(target, directory, path, how),
        Operation::Fork => task::fork(target),
        Operation::Clone3 { arguments, .. } => task::clone3(target, arguments),
        Operation::Foreign { .. } => Err(Reason::Foreign),
    }
}

/// The mapping table or a part of it, and whether it can change under us.
struct View {
    maps: Arc<[Mapping]>,
    /// What is known of it: nothing is concluded from what isn't found elsewhere.
    known: Vec<PageRange>,
    /// A single task: what the table says stays true until the call acts.
    alone: bool,
}

impl View {
    fn new(target: &mut dyn Target) -> Result<Self, Reason> {
        Ok(Self { alone: target.single_task()?, maps: target.mappings()?, known: vec![PageRange::ALL] })
    }

    /// Only of what overlaps these ranges, which is much less work. Each mapping is seen whole.
    fn of(target: &mut dyn Target, ranges: &[PageRange]) -> Result<Self, Reason> {
        let alone = target.single_task()?;
        Ok(Self { alone, maps: target.mappings_over(ranges)?, known: ranges.to_vec() })
    }

    /// With flags where they matter and can be had: only what is concluded from a flag needs it.
    fn with_flags(target: &mut dyn Target) -> Result<Self, Reason> {
        let alone = target.single_task()?;
        let maps = target.mappings_with_flags().or_else(|_| target.mappings())?;
        Ok(Self { maps, alone, known: vec![PageRange::ALL] })
    }

    /// Mappings that overlap `range`.
    fn over(&self, range: PageRange) -> &[Mapping] {
        debug_assert!(self.knows(range), "{range:x?} of {:x?}", self.known);
        maps::overlapping(&self.maps, range)
    }

    /// The mapping that holds `address`.
    fn at(&self, address: u64) -> Option<&Mapping> {
        self.over(PageRange::new(address, address.checked_add(1)?)).first()
    }

    /// Whether all mappings of `range` are known.
    fn knows(&self, range: PageRange) -> bool {
        range.is_empty()
            || self.known.iter().any(|known| known.start <= range.start && range.end <= known.end)
    }

    /// True unless certainly nothing is mapped in `range` when the call acts.
    fn occupied(&self, range: PageRange) -> bool {
        !range.is_empty() && (!self.alone || !self.knows(range) || !self.over(range).is_empty())
    }

    /// The parts of `range`, one for each mapping, in order. Unless alone, holes are parts too.
    fn cut(&self, range: PageRange) -> Vec<(PageRange, Option<&Mapping>)> {
        let mut out = Vec::new();
        let mut at = range.start;
        for m in self.over(range) {
            let Some(piece) = m.range.intersection(range) else { continue };
            if at < piece.start && !self.alone {
                out.push((PageRange::new(at, piece.start), None));
            }
            out.push((piece, Some(m)));
            at = piece.end;
        }
        if at < range.end && !self.alone {
            out.push((PageRange::new(at, range.end), None));
        }
        out
    }
}

/// The page size of a hugetlb mapping; None if it is none.
fn huge_page(target: &mut dyn Target, mapping: &Mapping) -> Option<u64> {
    if !mapping.is_file() {
        return None;
    }
    match target.device_kind(mapping.device) {
        FileKind::Hugetlb(size) => Some(size.max(ummunotify_abi::range::PAGE_SIZE)),
        _ => None,
    }
}

/// The range of an invalidation of `piece` of a hugetlb mapping: page tables of shared ones may be shared by
/// several mappings, and then go as a whole (`adjust_range_if_pmd_sharing_possible`).
fn huge_range(mapping: &Mapping, piece: PageRange) -> PageRange {
    let first = mapping.range.start.next_multiple_of(HUGE_1G);
    let last = mapping.range.end - mapping.range.end % HUGE_1G;
    if !mapping.shared || last <= first || piece.end <= first || piece.start >= last {
        return piece;
    }
    let wide = around(piece, HUGE_1G);
    PageRange::new(
        if piece.start > first { wide.start } else { piece.start },
        if piece.end < last { wide.end } else { piece.end },
    )
}
