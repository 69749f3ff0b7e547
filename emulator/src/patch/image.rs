//! The objects whose sites are worth patching, as they lie in a process.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

use super::bounds::Bounds;
use crate::target::{Mapping, maps};

const PT_LOAD: u32 = 1;
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
const PF_X: u32 = 1;
const PROT_EXEC: u8 = 4;
const ET_DYN: u16 = 3;
const EM_X86_64: u16 = 62;
/// No object of those is larger.
const LARGEST: u64 = 64 << 20;

/// One object: its file, and where it is loaded.
#[derive(Debug)]
pub(super) struct Image {
    file: Vec<u8>,
    /// Address in the process, less the address in the file.
    bias: u64,
    /// Parts of the file: address in the process, place in the file, bytes.
    parts: Vec<(u64, usize, usize)>,
    /// Its code.
    pub(super) text: PageRange,
    /// Behind the code in its last page: zeroes that nobody uses.
    pub(super) room: PageRange,
    /// Its functions.
    pub(super) bounds: Bounds,
}

/// Finds libc and the loader (and libpthread of an old libc) of process `pid`, in every namespace of the loader.
/// `text` is the process's mapping table. What can't be read is left out.
pub(super) fn find(pid: u32, text: &[u8]) -> Vec<Image> {
    let Ok(table) = maps::parse(text) else { return Vec::new() };
    let firsts = table.iter().filter(|m| m.is_file() && m.offset == 0 && !m.shared);
    firsts
        .filter_map(|first| {
            Image::read(first.range.start, read_file(pid, path(text, first)?, first)?, &table)
        })
        .collect()
}

/// The path of a mapping whose file's name is one of those that are wanted.
fn path<'a>(text: &'a [u8], mapping: &Mapping) -> Option<&'a OsStr> {
    let start = format!("{:08x}-", mapping.range.start);
    let line = text.split(|&b| b == b'\n').find(|line| line.starts_with(start.as_bytes()))?;
    let path = line.get(line.iter().position(|&b| b == b'/')?..)?;
    let name = path.rsplit(|&b| b == b'/').next()?;
    ["libc.so.6", "libc-2.", "ld-linux-x86-64.so", "ld-2.", "libpthread"]
        .iter()
        .any(|wanted| name.starts_with(wanted.as_bytes()))
        .then(|| OsStr::from_bytes(path))
}

/// The file that is mapped, by its path as the process sees it.
fn read_file(pid: u32, path: &OsStr, mapping: &Mapping) -> Option<Vec<u8>> {
    let mut full = OsString::from(format!("/proc/{pid}/root"));
    full.push(path);
    let file = File::open(full).ok()?;
    let about = file.metadata().ok()?;
    // The device's number isn't the table's on stacked file systems; the bytes are compared before any is changed.
    if about.ino() != mapping.inode || about.len() > LARGEST {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(LARGEST).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

impl Image {
    fn read(base: u64, file: Vec<u8>, table: &[Mapping]) -> Option<Self> {
        let fits = file.starts_with(b"\x7fELF\x02\x01")
            && half(&file, 16)? == ET_DYN
            && half(&file, 18)? == EM_X86_64
            && half(&file, 54)? == 56;
        let (at, count) = (usize::try_from(long(&file, 32)?).ok()?, usize::from(half(&file, 56)?));
        if !fits {
            return None;
        }
        let headers = file.get(at..at.checked_add(count * 56)?)?;
        let (mut text, mut frames, mut bias) = (None, None, None);
        let mut parts = Vec::new();
        for entry in headers.chunks_exact(56) {
            let (kind, flags) = (word(entry, 0)?, word(entry, 4)?);
            let (offset, address, size) = (long(entry, 8)?, long(entry, 16)?, long(entry, 32)?);
            if size > LARGEST {
                return None;
            }
            match kind {
                PT_LOAD => {
                    if offset == 0 {
                        bias = Some(base.wrapping_sub(address));
                    }
                    if flags & PF_X != 0 && text.is_none() {
                        text = Some((address, size));
                    }
                    parts.push((address, usize::try_from(offset).ok()?, usize::try_from(size).ok()?));
                }
                PT_GNU_EH_FRAME => frames = Some((address, size)),
                _ => {}
            }
        }
        let (bias, (address, size), (frames, frames_size)) = (bias?, text?, frames?);
        for part in &mut parts {
            part.0 = part.0.wrapping_add(bias);
        }
        let start = bias.wrapping_add(address);
        let text = PageRange::new(start, start.checked_add(size)?);
        let end = text.end.checked_next_multiple_of(PAGE_SIZE)?;
        // All of it one executable mapping.
        let whole = table
            .iter()
            .any(|m| m.prot & PROT_EXEC != 0 && m.range.start <= text.start && m.range.end >= end);
        if !whole {
            return None;
        }
        let room = PageRange::new(text.end, end);
        let bounds = Bounds { entries: Vec::new() };
        let mut image = Self { file, bias, parts, text, room, bounds };
        image.bounds = Bounds::read(image.bias.wrapping_add(frames), frames_size, &image)?;
        Some(image)
    }

    /// Bytes of the file, by their address in the process.
    pub(super) fn bytes(&self, at: u64, len: usize) -> Option<&[u8]> {
        self.parts.iter().find_map(|(start, offset, size)| {
            let from = usize::try_from(at.checked_sub(*start)?).ok()?;
            let end = from.checked_add(len)?;
            if end > *size {
                return None;
            }
            self.file.get(offset.checked_add(from)?..offset.checked_add(end)?)
        })
    }
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
