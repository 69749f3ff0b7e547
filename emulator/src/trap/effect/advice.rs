//! madvise and its kin: calls that drop or move pages and leave the mappings.

use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

use super::{Pieces, Reason, View, file, huge_page, huge_range};
use crate::target::maps::{Mapping, Name};
use crate::target::{FileIdentity, Target};
use crate::trap::operation::{HUGE_2M, MAX_VECTORS, around};
use crate::trap::policy::advice;

/// Most addresses of a move_pages that are read one by one.
const MAX_ADDRESSES: u64 = 1 << 16;

pub(super) fn madvise(target: &mut dyn Target, start: u64, len: u64, advice: i32) -> Pieces {
    let mut out = Vec::new();
    if let Some(view) = view_for(target, advice, PageRange::pages(start, len))? {
        advise(target, &view, start, len, advice, &mut out);
    }
    Ok(out)
}

/// The mapping table, with flags if memory is locked and the advice cares, or of it what overlaps `range` if the advice
/// ends there; None if the advice isn't known.
fn view_for(target: &mut dyn Target, advice: i32, range: Option<PageRange>) -> Result<Option<View>, Reason> {
    if !target.kernel().knows_advice(advice) {
        return Ok(None);
    }
    let cares = matches!(advice, advice::DONTNEED | advice::FREE | advice::REMOVE);
    let alone = target.single_task()?;
    // Nothing stops at a lock unless the table can be trusted, so it needn't be read then.
    let flags = cares && alone && target.locked_kib()? > 0;
    if flags {
        return View::with_flags(target).map(Some);
    }
    // These reach other mappings of a file.
    let far = [advice::REMOVE, advice::COLLAPSE, advice::HWPOISON, advice::SOFT_OFFLINE];
    match range.filter(|_| !far.contains(&advice)) {
        Some(range) => View::of(target, &[range]).map(Some),
        None => View::new(target).map(Some),
    }
}

/// Appends what one madvise invalidates: each mapping in turn, past holes, up to one that refuses. False if
/// the call fails.
fn advise(
    target: &mut dyn Target,
    view: &View,
    start: u64,
    len: u64,
    advice: i32,
    out: &mut Vec<PageRange>,
) -> bool {
    if len == 0 {
        return start.is_multiple_of(PAGE_SIZE);
    }
    let Some(range) = PageRange::pages(start, len) else { return false };
    let mut mapped = 0;
    for (piece, mapping) in view.cut(range) {
        let Some(m) = mapping else {
            out.push(piece);
            continue;
        };
        mapped += piece.len();
        if view.alone && refuses(target, m, piece, advice) {
            return false;
        }
        match advice {
            advice::DONTNEED | advice::DONTNEED_LOCKED => zap(target, view, m, piece, out),
            advice::REMOVE => {
                let kind = target.device_kind(m.device);
                let identity = FileIdentity { device: m.device, inode: m.inode, size: u64::MAX, kind };
                if m.is_file() {
                    let offset = m.offset.saturating_add(piece.start - m.range.start);
                    file::punch(target, view, &identity, offset, piece.len(), out);
                }
            }
            advice::COLLAPSE | advice::HWPOISON | advice::SOFT_OFFLINE => {
                out.push(whole_pages(target, m, piece));
                if m.is_file() {
                    elsewhere(target, view, m, piece, out);
                }
            }
            _ => out.push(piece),
        }
    }
    mapped == range.len()
}

/// Whether a mapping makes the call fail there, so that neither it nor anything behind it is touched.
fn refuses(target: &mut dyn Target, m: &Mapping, piece: PageRange, advice: i32) -> bool {
    let flags = m.flags.unwrap_or_default();
    let huge = huge_page(target, m);
    match advice {
        advice::DONTNEED | advice::DONTNEED_LOCKED => match huge {
            Some(size) => !target.kernel().hugetlb_dontneed() || !piece.start.is_multiple_of(size),
            None => flags.pfn_map || (flags.locked && advice == advice::DONTNEED),
        },
        // Anonymous memory only. A private mapping of /dev/zero is that, and has a name.
        advice::FREE => {
            let named = m.is_file() && (m.shared || m.name != Name::Zero);
            flags.locked || flags.pfn_map || named || m.name == Name::Special
        }
        advice::REMOVE => !m.is_file() || !m.shared || flags.locked,
        _ => false,
    }
}

/// Appends what dropping the pages of `piece` invalidates (`zap_page_range_single`).
fn zap(target: &mut dyn Target, view: &View, m: &Mapping, mut piece: PageRange, out: &mut Vec<PageRange>) {
    let Some(size) = huge_page(target, m) else {
        out.push(piece);
        return;
    };
    if view.alone {
        // Whole pages only, rounded down.
        piece.end -= piece.end % size;
        if piece.is_empty() {
            return;
        }
    }
    let range = huge_range(m, piece);
    out.push(range);
    if target.kernel().hugetlb_twice {
        out.push(range);
    }
}

/// The range, widened to whole pages of a hugetlb mapping.
fn whole_pages(target: &mut dyn Target, m: &Mapping, piece: PageRange) -> PageRange {
    match huge_page(target, m) {
        Some(size) => around(piece, size).intersection(m.range).unwrap_or(piece),
        None => piece,
    }
}

/// Appends every mapping of that part of the file but this one: pages that are collapsed or given up leave all
/// of them.
fn elsewhere(target: &mut dyn Target, view: &View, m: &Mapping, piece: PageRange, out: &mut Vec<PageRange>) {
    let kind = target.device_kind(m.device);
    let identity = FileIdentity { device: m.device, inode: m.inode, size: u64::MAX, kind };
    let from = m.offset.saturating_add(piece.start - m.range.start);
    let part = around(PageRange::new(from, from.saturating_add(piece.len())), HUGE_2M);
    for range in file::mapped(target, view, &identity, part.start, part.end) {
        if range.intersection(piece) != Some(range) {
            out.push(range);
        }
    }
}

pub(super) fn process_madvise(
    target: &mut dyn Target,
    pidfd: i32,
    vector: u64,
    count: u64,
    advice: i32,
) -> Pieces {
    let mut out = Vec::new();
    let alone = target.single_task()?;
    // Unreadable: taken for the process itself. With more tasks the descriptor may be replaced meanwhile.
    if alone && !target.pidfd_is_self(pidfd).unwrap_or(true) {
        return Ok(out);
    }
    // Before 6.13 these were the only ones, for oneself as for others.
    let old = matches!(advice, advice::PAGEOUT | advice::COLLAPSE);
    if !old && !target.kernel().process_madvise_own {
        return Ok(out);
    }
    let Some(view) = view_for(target, advice, None)? else { return Ok(out) };
    let mut bytes = vec![0; 16 * count.min(MAX_VECTORS) as usize];
    target.read_memory(vector, &mut bytes)?;
    for entry in bytes.chunks_exact(16) {
        let (start, len) = (word(entry, 0), word(entry, 8));
        if !advise(target, &view, start, len, advice, &mut out) && view.alone {
            // The vector ends at the first range that fails.
            break;
        }
    }
    Ok(out)
}

/// Appends a range with the large pages that its ends lie in, as far as the mappings reach: these move as a
/// whole.
fn with_large_pages(target: &mut dyn Target, view: &View, range: PageRange) -> PageRange {
    let mut out = range;
    for (m, at_start) in [(view.at(range.start), true), (view.at(range.end - 1), false)] {
        let Some(m) = m else { continue };
        let unit = huge_page(target, m).unwrap_or(HUGE_2M);
        let wide = around(range, unit);
        if at_start {
            out.start = wide.start.max(m.range.start);
        } else {
            out.end = wide.end.min(m.range.end);
        }
    }
    out
}

pub(super) fn mbind(target: &mut dyn Target, start: u64, len: u64) -> Pieces {
    let Some(range) = PageRange::pages(start, len) else { return Ok(Vec::new()) };
    let view = View::new(target)?;
    if !view.occupied(range) {
        return Ok(Vec::new());
    }
    Ok(vec![with_large_pages(target, &view, range)])
}

pub(super) fn move_pages(target: &mut dyn Target, pid: i32, count: u64, pages: u64) -> Pieces {
    if !target.pid_is_self(pid)? {
        return Ok(Vec::new());
    }
    if count > MAX_ADDRESSES {
        return Err(Reason::TooMany);
    }
    let view = View::new(target)?;
    let mut bytes = vec![0; 8 * count as usize];
    target.read_memory(pages, &mut bytes)?;
    let mut out = Vec::new();
    for entry in bytes.chunks_exact(8) {
        let start = word(entry, 0) & !(PAGE_SIZE - 1);
        let Some(page) = PageRange::pages(start, PAGE_SIZE) else { continue };
        if view.occupied(page) {
            out.push(with_large_pages(target, &view, page));
        }
    }
    Ok(out)
}

pub(super) fn migrate_pages(target: &mut dyn Target, pid: i32) -> Pieces {
    if target.pid_is_self(pid)? { Err(Reason::MigratePages) } else { Ok(Vec::new()) }
}

/// `struct pm_scan_arg`: size, flags, start, end. Only PM_SCAN_WP_MATCHING (bit 0) changes anything.
pub(super) fn pagemap_scan(target: &mut dyn Target, argument: u64) -> Pieces {
    let mut bytes = [0; 32];
    target.read_memory(argument, &mut bytes)?;
    let range = around(PageRange::new(word(&bytes, 16), word(&bytes, 24)), PAGE_SIZE);
    Ok(if word(&bytes, 8) & 1 == 0 || range.is_empty() { Vec::new() } else { vec![range] })
}

/// `struct uffdio_range`: start, length.
pub(super) fn uffd_range(target: &mut dyn Target, argument: u64) -> Pieces {
    let mut bytes = [0; 16];
    target.read_memory(argument, &mut bytes)?;
    Ok(PageRange::pages(word(&bytes, 0), word(&bytes, 8)).into_iter().collect())
}

/// `struct uffdio_move`: destination, source, length. The source loses its pages; the destination has none.
pub(super) fn uffd_move(target: &mut dyn Target, argument: u64) -> Pieces {
    let mut bytes = [0; 24];
    target.read_memory(argument, &mut bytes)?;
    Ok(PageRange::pages(word(&bytes, 8), word(&bytes, 16)).into_iter().collect())
}

/// The word at `at`.
pub(super) fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}
