//! Calls that take mappings away or change their protection.

use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

use super::{Pieces, View, huge_page, huge_range};
use crate::target::maps::{self, Mapping, Name};
use crate::target::{FileKind, Target};
use crate::trap::operation::{
    ADDRESS_END, HUGE_1G, HUGE_2M, MAP_ANONYMOUS, MAP_HUGETLB, MREMAP_DONTUNMAP, MREMAP_FIXED,
    PROT_GROWSDOWN, Reach, page_up,
};

const PROT_READ: u64 = 1;
const PROT_EXEC: u64 = 4;

/// Appends what unmapping `range` invalidates: the whole range once if anything is mapped there. Up to 6.1
/// each hugetlb mapping in it adds one (`__unmap_hugepage_range`).
fn unmap(target: &mut dyn Target, view: &View, range: PageRange, out: &mut Vec<PageRange>) {
    if !view.occupied(range) {
        return;
    }
    out.push(range);
    if target.kernel().hugetlb_twice {
        for m in view.over(range) {
            if huge_page(target, m).is_some()
                && let Some(piece) = m.range.intersection(range)
            {
                out.push(huge_range(m, piece));
            }
        }
    }
}

pub(super) fn munmap(target: &mut dyn Target, start: u64, len: u64) -> Pieces {
    let Some(range) = PageRange::pages(start, len) else { return Ok(Vec::new()) };
    if !target.single_task()? && !target.kernel().hugetlb_twice {
        return Ok(vec![range]);
    }
    let view = View::of(target, &[range])?;
    let mut out = Vec::new();
    unmap(target, &view, range, &mut out);
    Ok(out)
}

pub(super) fn mmap_fixed(target: &mut dyn Target, start: u64, len: u64, flags: u64, fd: i32) -> Pieces {
    let alone = target.single_task()?;
    // The length of a hugetlb mapping is rounded up to its pages.
    let mut unit = PAGE_SIZE;
    if flags & MAP_ANONYMOUS == 0 {
        match target.descriptor(fd) {
            // EBADF, before anything is unmapped.
            Ok(None) if alone => return Ok(Vec::new()),
            Ok(Some(descriptor)) => {
                if let Some(FileKind::Hugetlb(size)) = descriptor.file.map(|file| file.kind) {
                    unit = size;
                }
            }
            // The longest that it may be.
            Ok(None) | Err(_) => {
                let units = [HUGE_1G, HUGE_2M];
                unit = units.into_iter().find(|unit| start.is_multiple_of(*unit)).unwrap_or(PAGE_SIZE);
            }
        }
    } else if flags & MAP_HUGETLB != 0 {
        // Six bits hold the logarithm of the page size; 0 is the default size.
        let log = (flags >> 26) & 0x3f;
        unit = if log == 0 { target.kernel().huge_page } else { 1 << log };
    }
    let rounded = len.checked_next_multiple_of(unit.max(PAGE_SIZE));
    let Some(range) = rounded.and_then(|len| PageRange::pages(start, len)) else { return Ok(Vec::new()) };
    let view = View::of(target, &[range])?;
    let mut out = Vec::new();
    unmap(target, &view, range, &mut out);
    Ok(out)
}

/// Appends what moving `old` away invalidates: the move of the page tables, and the unmapping of what stays.
fn moved(target: &mut dyn Target, view: &View, old: PageRange, keep: bool, out: &mut Vec<PageRange>) {
    if old.is_empty() {
        return;
    }
    out.push(old);
    if !keep {
        unmap(target, view, old, out);
    }
}

pub(super) fn mremap(
    target: &mut dyn Target,
    start: u64,
    old_len: u64,
    new_len: u64,
    flags: u64,
    destination: u64,
) -> Pieces {
    let (mut old_len, mut new_len) = (page_up(old_len).unwrap_or(0), page_up(new_len).unwrap_or(0));
    let (fixed, keep) = (flags & MREMAP_FIXED != 0, flags & MREMAP_DONTUNMAP != 0);
    let span = |at: u64, len: u64| PageRange::new(at, at.saturating_add(len));
    let places = [span(start, old_len.max(new_len)), span(destination, new_len)];
    let mut view = View::of(target, &places[..if fixed { 2 } else { 1 }])?;
    let first = view.at(start).copied();
    if first.is_none() && view.alone {
        // EFAULT, before anything else.
        return Ok(Vec::new());
    }
    if let Some(size) = first.and_then(|m| huge_page(target, &m)) {
        // Its lengths are rounded up.
        view = View::new(target)?;
        if view.alone && !start.is_multiple_of(size) {
            return Ok(Vec::new());
        }
        old_len = old_len.checked_next_multiple_of(size).unwrap_or(old_len);
        new_len = new_len.checked_next_multiple_of(size).unwrap_or(new_len);
        if view.alone && new_len > old_len {
            // Huge pages don't grow.
            return Ok(Vec::new());
        }
    }
    let mut out = Vec::new();
    if fixed && old_len == new_len && target.kernel().mremap_moves_several {
        move_several(target, &view, span(start, old_len), destination, keep, &mut out);
        return Ok(out);
    }
    // What moves must lie in one mapping, else EFAULT; a private mapping can't be duplicated.
    let old = span(start, old_len.min(new_len));
    let fails = first.is_some_and(|m| old.end > m.range.end || (old_len == 0 && !m.shared));
    if fixed || keep {
        // Since 6.17 that is found out at the start (seen on 6.18), before when destination and tail were gone.
        if view.alone && fails && target.kernel().mremap_moves_several {
            return Ok(out);
        }
        if fixed {
            unmap(target, &view, span(destination, new_len), &mut out);
        }
        if old_len > new_len {
            unmap(target, &view, span(start + new_len, old_len - new_len), &mut out);
        }
        if !view.alone || !fails {
            moved(target, &view, old, keep, &mut out);
        }
        return Ok(out);
    }
    if old_len >= new_len {
        unmap(target, &view, span(start + new_len, old_len - new_len), &mut out);
        return Ok(out);
    }
    // It grows, and may move.
    if view.alone
        && let Some(m) = first
    {
        let more = PageRange::new(m.range.end, start.saturating_add(new_len));
        let in_place = old.end == m.range.end && view.over(more).is_empty() && more.end <= LOW_ADDRESS_END;
        if fails || in_place {
            return Ok(out);
        }
    }
    moved(target, &view, old, false, &mut out);
    Ok(out)
}

/// Where addresses end with four-level page tables. A mapping that can't grow beyond this moves instead;
/// with five levels it could grow if a hint asked for that, so that the worst is an invalidation too many.
const LOW_ADDRESS_END: u64 = (1 << 47) - PAGE_SIZE;

/// `remap_move` (6.17): each mapping of the range by itself, keeping the distances; the destination of each is
/// unmapped before it moves, what lies in the gaps of the destination stays.
fn move_several(
    target: &mut dyn Target,
    view: &View,
    old: PageRange,
    destination: u64,
    keep: bool,
    out: &mut Vec<PageRange>,
) {
    for (piece, _) in view.cut(old) {
        let at = destination.saturating_add(piece.start - old.start);
        unmap(target, view, PageRange::new(at, at.saturating_add(piece.len())), out);
        moved(target, view, piece, keep, out);
    }
}

pub(super) fn mprotect(
    target: &mut dyn Target,
    start: u64,
    len: u64,
    prot: u64,
    pkey: Option<i32>,
) -> Pieces {
    let Some(mut range) = PageRange::pages(start, len) else { return Ok(Vec::new()) };
    let down = prot & PROT_GROWSDOWN != 0;
    let view = if down { View::new(target)? } else { View::of(target, &[range])? };
    if down && let Some(m) = view.over(range).first() {
        // The range begins where the mapping does, at the end of the stack for instance.
        range.start = if view.alone { m.range.start } else { m.range.start.min(start) };
    }
    let mut out = Vec::new();
    let mut at = range.start;
    for (piece, mapping) in view.cut(range) {
        if view.alone && piece.start != at {
            // ENOMEM at the first hole; what came before it is changed.
            break;
        }
        at = piece.end;
        let changes = mapping.is_none_or(|m| changes(target, m, prot, pkey));
        if !view.alone || changes {
            out.push(mapping.map_or(piece, |m| match huge_page(target, m) {
                Some(_) => huge_range(m, piece),
                None => piece,
            }));
        }
    }
    Ok(out)
}

/// Whether mprotect changes a mapping's flags (`newflags == oldflags` in `mprotect_fixup`).
fn changes(target: &mut dyn Target, mapping: &Mapping, prot: u64, pkey: Option<i32>) -> bool {
    let wanted = prot & 0x7;
    if pkey.is_some() || wanted != u64::from(mapping.prot) || wanted == PROT_EXEC {
        // Keys don't show in the table; execute-only memory gets one of its own.
        return true;
    }
    // What the table shows as readable may be about to become executable too.
    wanted & (PROT_READ | PROT_EXEC) == PROT_READ && target.read_implies_exec().unwrap_or(true)
}

pub(super) fn brk(target: &mut dyn Target, end: u64) -> Pieces {
    let view = View::new(target)?;
    let Some(new) = page_up(end) else { return Ok(Vec::new()) };
    if !view.alone {
        // Up to the next mapping beyond the heap: where it ends when the call acts isn't known.
        let heap = maps::heap_end(&view.maps).unwrap_or(0).max(new);
        let next = view.maps.iter().map(|m| m.range.start).find(|start| *start >= heap);
        let range = PageRange::new(new, next.unwrap_or(ADDRESS_END).max(heap));
        return Ok(if range.is_empty() { Vec::new() } else { vec![range] });
    }
    if target.heap_floor().is_ok_and(|floor| end < floor) {
        // Refused: it answers the old end.
        return Ok(Vec::new());
    }
    let old = maps::heap_end(&view.maps).or_else(|| {
        // No mapping bears the heap's name: grown from nothing, or what was the heap is mapped over.
        let first = view.maps.iter().position(|m| m.range.start <= new && new < m.range.end)?;
        Some(maps::run_end(&view.maps, first))
    });
    let mut out = Vec::new();
    if let Some(old) = old {
        unmap(target, &view, PageRange::new(new, old), &mut out);
    }
    Ok(out)
}

pub(super) fn shmdt(target: &mut dyn Target, start: u64) -> Pieces {
    let view = View::new(target)?;
    let mut out = Vec::new();
    let mut segment = None;
    // A mapping of the attachment lies as far from its start as it lies in the segment; mprotect and munmap
    // may have left several, each unmapped by itself. The first one found says which segment it is.
    for m in view.over(PageRange::new(start, ADDRESS_END)) {
        let file = (m.device, m.inode);
        if m.name == Name::SysV
            && m.range.start.checked_sub(start) == Some(m.offset)
            && *segment.get_or_insert(file) == file
        {
            unmap(target, &view, m.range, &mut out);
        }
    }
    if out.is_empty() && !view.alone {
        // Attached since? How far isn't known.
        out.push(PageRange::new(start, ADDRESS_END));
    }
    Ok(out)
}

pub(super) fn shmat_remap(target: &mut dyn Target, id: i32, start: u64) -> Pieces {
    let view = View::new(target)?;
    if start == 0 {
        // SHM_REMAP needs an address.
        return Ok(Vec::new());
    }
    let end = match target.shm_size(id) {
        Ok(None) if view.alone => return Ok(Vec::new()),
        Ok(Some(size)) => PageRange::pages(start, size).map(|range| range.end),
        // Another IPC namespace, or no permission: as long as it may be.
        Ok(None) | Err(_) => None,
    };
    let mut out = Vec::new();
    unmap(target, &view, PageRange::new(start, end.unwrap_or(ADDRESS_END)), &mut out);
    Ok(out)
}

pub(super) fn remap_file_pages(target: &mut dyn Target, reach: Reach) -> Pieces {
    let view = View::new(target)?;
    let mut out = Vec::new();
    for range in reach.ranges() {
        unmap(target, &view, range, &mut out);
    }
    Ok(out)
}
