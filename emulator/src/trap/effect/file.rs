//! Calls that take pages out of a file, and with them out of every mapping of the file.
//!
//! Which mappings these are is proved or assumed, never hoped: see [`matches`].

use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

use super::advice::word;
use super::{Pieces, View, huge_page, huge_range};
use crate::target::maps::Mapping;
use crate::target::{FileIdentity, FileKind, PathTarget, Target};
use crate::trap::operation::{
    AT_FDCWD, Operation, PUNCH_HOLE, Reach, ZERO_RANGE, page_down, page_up, truncates,
};
use crate::trap::policy::KEEP_SIZE;

/// Whether a mapping may be one of the file.
///
/// Equal device and inode are the same file. Where file systems are stacked, `stat` and the mapping table may
/// name different devices, or different files altogether: overlayfs up to 6.7 shows the file below in the
/// table, later ones the inode above with a device that `stat` doesn't answer; btrfs answers one device for
/// each subvolume. So equal inodes alone count, any mapping on a stacked file system counts, and for a file on
/// a stacked file system any mapping of a file counts. The kernel's own tmpfs and hugetlbfs (memfd, SysV,
/// shared anonymous memory) lie below nothing.
fn matches(target: &mut dyn Target, file: &FileIdentity, m: &Mapping) -> bool {
    if !m.is_file() {
        return false;
    }
    if m.device == file.device && m.inode == file.inode {
        return true;
    }
    if target.kernel().own_device(file.device).is_some() {
        return false;
    }
    if file.kind == FileKind::Stacked {
        return target.kernel().own_device(m.device).is_none();
    }
    m.inode == file.inode || target.device_kind(m.device) == FileKind::Stacked
}

/// The parts of mappings that show the bytes `[from, to)` of the file, in the order in which the kernel finds
/// them: by the offset at which a mapping begins. Among equals the older comes first, which in an address space
/// that fills from the top is the higher.
pub(super) fn mapped(
    target: &mut dyn Target,
    view: &View,
    file: &FileIdentity,
    from: u64,
    to: u64,
) -> Vec<PageRange> {
    let mut found: Vec<&Mapping> = view.maps.iter().filter(|m| matches(target, file, m)).collect();
    found.sort_by_key(|m| (m.offset, std::cmp::Reverse(m.range.start)));
    let mut out = Vec::new();
    for m in found {
        // Offsets of odd devices may be anything.
        let end = m.offset.saturating_add(m.range.len());
        let (first, last) = (from.max(m.offset), to.min(end));
        if first < last {
            let start = m.range.start + (first - m.offset);
            let piece = PageRange::new(start, start + (last - first));
            out.push(if huge_page(target, m).is_some() { huge_range(m, piece) } else { piece });
        }
    }
    out
}

/// Appends what a hole punch invalidates: the whole pages inside; where there is a disk, also those that it covers
/// in part, whose rest a file system may clean (ext4 on 6.12).
pub(super) fn punch(
    target: &mut dyn Target,
    view: &View,
    file: &FileIdentity,
    offset: u64,
    len: u64,
    out: &mut Vec<PageRange>,
) {
    let end = offset.saturating_add(len);
    let (from, to) = match file.kind {
        FileKind::Hugetlb(size) => (offset.checked_next_multiple_of(size), end - end % size),
        // A hole that ends inside the first page: `unmap_end` of truncate_pagecache_range and
        // shmem_fallocate is -1 and passes their unsigned comparison, and everything is unmapped from the
        // hole's rounded start to the end of the file. Seen on 6.18.
        FileKind::Tmpfs if end < PAGE_SIZE => (page_up(offset), u64::MAX),
        FileKind::Tmpfs => (page_up(offset), page_down(end)),
        _ if end < PAGE_SIZE => (Some(page_down(offset)), u64::MAX),
        _ => (Some(page_down(offset)), page_up(end).unwrap_or(u64::MAX)),
    };
    if let Some(from) = from
        && from < to
    {
        out.extend(mapped(target, view, file, from, to));
    }
}

/// Appends what giving the file the size `len` invalidates: two passes from the first page that goes, to the
/// ends of the mappings (`truncate_pagecache`: the second catches private copies made meanwhile); one on
/// hugetlbfs.
fn resize(target: &mut dyn Target, view: &View, file: &FileIdentity, len: u64, out: &mut Vec<PageRange>) {
    let Some(from) = page_up(len) else { return };
    let passes = match file.kind {
        FileKind::Hugetlb(size) if view.alone && !len.is_multiple_of(size) => return,
        FileKind::Hugetlb(_) => 1,
        // shmem_setattr looks first. Disk file systems cut even where nothing is left to cut, which only
        // mappings beyond the end of the file show.
        FileKind::Tmpfs if view.alone && file.size <= from => return,
        _ => 2,
    };
    let pieces = mapped(target, view, file, from, u64::MAX);
    for _ in 0..passes {
        out.extend_from_slice(&pieces);
    }
}

/// What any operation on a file that can't be told invalidates: every mapping of a file, twice as a
/// truncation would.
fn any_file(view: &View) -> Vec<PageRange> {
    let files = || view.maps.iter().filter(|m| m.is_file()).map(|m| m.range);
    files().chain(files()).collect()
}

/// The file behind a descriptor that must be writable.
enum Behind {
    File(FileIdentity),
    /// The call fails.
    Nothing,
    /// Any file.
    Unknown,
}

fn behind(target: &mut dyn Target, alone: bool, fd: i32) -> Behind {
    match target.descriptor(fd) {
        // Another thread may open, close or replace it before the call looks.
        Ok(None) if !alone => Behind::Unknown,
        Ok(Some(descriptor)) if descriptor.writable => descriptor.file.map_or(Behind::Nothing, Behind::File),
        Ok(_) => Behind::Nothing,
        Err(_) => Behind::Unknown,
    }
}

pub(super) fn fallocate(target: &mut dyn Target, fd: i32, mode: u32, offset: u64, len: u64) -> Pieces {
    let view = View::new(target)?;
    let mut out = Vec::new();
    let file = match behind(target, view.alone, fd) {
        Behind::File(file) => file,
        Behind::Nothing => return Ok(out),
        Behind::Unknown => return Ok(any_file(&view)),
    };
    match mode {
        m if m == PUNCH_HOLE | KEEP_SIZE && file.kind != FileKind::Stacked => {
            punch(target, &view, &file, offset, len, &mut out);
        }
        m if m & !KEEP_SIZE == ZERO_RANGE || m == PUNCH_HOLE | KEEP_SIZE => {
            let end = page_up(offset.saturating_add(len)).unwrap_or(u64::MAX);
            out.extend(mapped(target, &view, &file, page_down(offset), end));
        }
        // Parts of the file move, or something is asked that this code doesn't know.
        _ => out.extend(mapped(target, &view, &file, page_down(offset), u64::MAX)),
    }
    Ok(out)
}

/// `struct space_resv`: type, whence (16 bits each), start, length, and fields that aren't used.
pub(super) fn space_ioctl(target: &mut dyn Target, fd: i32, mode: u32, argument: u64) -> Pieces {
    let mut bytes = [0; 24];
    target.read_memory(argument, &mut bytes)?;
    let whence = u16::from_le_bytes([bytes[2], bytes[3]]);
    if whence != 0 {
        // Relative to the position or the end: anywhere in the file.
        return fallocate(target, fd, u32::MAX, 0, u64::MAX);
    }
    let (offset, len) = (word(&bytes, 8), word(&bytes, 16));
    match (Operation::Fallocate { fd, mode, offset, len }).reach() {
        Reach::Nothing => Ok(Vec::new()),
        _ => fallocate(target, fd, mode, offset, len),
    }
}

pub(super) fn ftruncate(target: &mut dyn Target, fd: i32, len: u64) -> Pieces {
    let view = View::new(target)?;
    let mut out = Vec::new();
    match behind(target, view.alone, fd) {
        Behind::File(file) => resize(target, &view, &file, len, &mut out),
        Behind::Nothing => {}
        Behind::Unknown => return Ok(any_file(&view)),
    }
    Ok(out)
}

/// truncate, and opening with O_TRUNC (from a directory).
pub(super) fn truncate_path(target: &mut dyn Target, directory: Option<i32>, path: u64, len: u64) -> Pieces {
    let view = View::new(target)?;
    if !view.maps.iter().any(|m| m.is_file() && target.watches(m.range)) {
        return Ok(Vec::new());
    }
    if !view.alone {
        // Another thread may change what the path leads to.
        return Ok(any_file(&view));
    }
    match target.resolve_path(directory.unwrap_or(AT_FDCWD), path) {
        Ok(PathTarget::File(file)) => {
            let mut out = Vec::new();
            resize(target, &view, &file, len, &mut out);
            Ok(out)
        }
        Ok(PathTarget::NoFile) => Ok(Vec::new()),
        Ok(PathTarget::Unknown) | Err(_) => Ok(any_file(&view)),
    }
}

/// `struct open_how` begins with the flags.
pub(super) fn openat2(target: &mut dyn Target, directory: i32, path: u64, how: u64) -> Pieces {
    let mut bytes = [0; 8];
    if target.read_memory(how, &mut bytes).is_ok() && !truncates(word(&bytes, 0)) {
        return Ok(Vec::new());
    }
    truncate_path(target, Some(directory), path, 0)
}
