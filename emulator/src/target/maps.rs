//! The mapping table: `/proc/PID/maps` and `/proc/PID/smaps`.
//!
//! Both are parsed as bytes. Names can't break lines: the kernel writes a newline in a path as `\012`
//! (`seq_file_path`), and names of anonymous memory are printable. Anything else in a name is possible,
//! among it text that looks like the start of a line.

use std::sync::Arc;

use ummunotify_abi::PageRange;

use super::{Device, Result, Source, Unreadable};

/// A mapping: one line of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// Where it lies.
    pub range: PageRange,
    /// Readable, writable, executable: PROT_READ, PROT_WRITE, PROT_EXEC.
    pub prot: u8,
    /// Made with MAP_SHARED.
    pub shared: bool,
    /// Offset of its first byte in the file.
    pub offset: u64,
    /// The file's device.
    pub device: Device,
    /// The file's inode; 0 without a file.
    pub inode: u64,
    /// What its name tells.
    pub name: Name,
    /// Kernel flags; None unless read from smaps.
    pub flags: Option<VmFlags>,
}

impl Mapping {
    /// True if a file is mapped, memory without a name on any file system included.
    pub const fn is_file(&self) -> bool {
        self.inode != 0
    }
}

/// What the name of a mapping tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Name {
    /// No name: anonymous.
    None,
    /// `[heap]`.
    Heap,
    /// `[stack]`.
    Stack,
    /// `[anon:...]`: named by the process; `[anon_shmem:...]` too.
    Anonymous,
    /// Another name in brackets: the kernel's own pages.
    Special,
    /// `/SYSVxxxxxxxx (deleted)`: a SysV segment.
    SysV,
    /// A path that ends in `zero`: private mappings of /dev/zero are anonymous memory with a name.
    Zero,
    /// Another path.
    Path,
}

/// Flags of a mapping that matter here, from the line `VmFlags` of smaps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VmFlags {
    /// `lo`: locked.
    pub locked: bool,
    /// `dc`: not copied by fork.
    pub dont_copy: bool,
    /// `wf`: empty in the child of a fork.
    pub wipe_on_fork: bool,
    /// `pf`: pages that belong to no struct page.
    pub pfn_map: bool,
    /// `ht`: huge pages of hugetlbfs.
    pub hugetlb: bool,
}

const BAD: Unreadable = Unreadable { source: Source::Maps, errno: 0 };
const BAD_SMAPS: Unreadable = Unreadable { source: Source::Smaps, errno: 0 };

/// Parses the text of `maps`.
pub fn parse(text: &[u8]) -> Result<Arc<[Mapping]>> {
    // About 80 bytes a line.
    let mut out = Vec::with_capacity(text.len() / 80 + 1);
    for line in lines(text) {
        push(&mut out, header(line).ok_or(BAD)?);
    }
    Ok(out.into())
}

/// Parses the text of `smaps`. A mapping without a line `VmFlags` is an error: the text was cut short.
pub fn parse_smaps(text: &[u8]) -> Result<Arc<[Mapping]>> {
    let mut out: Vec<Mapping> = Vec::with_capacity(text.len() / 700 + 1);
    let mut current: Option<Mapping> = None;
    for line in lines(text) {
        if line.first().is_some_and(u8::is_ascii_uppercase) {
            // Addresses are lower-case hexadecimal, the names of values begin in upper case.
            if let Some(flags) = line.strip_prefix(b"VmFlags:") {
                let mut mapping = current.take().ok_or(BAD_SMAPS)?;
                mapping.flags = Some(vm_flags(flags));
                push(&mut out, mapping);
            }
        } else if current.replace(header(line).ok_or(BAD_SMAPS)?).is_some() {
            return Err(BAD_SMAPS);
        }
    }
    if current.is_some() { Err(BAD_SMAPS) } else { Ok(out.into()) }
}

/// Where the heap ends: the end of the run of adjacent mappings that begins with the last `[heap]`. A mapping
/// that was made over the heap's end has lost the name, but brk unmaps it all the same.
pub fn heap_end(mappings: &[Mapping]) -> Option<u64> {
    let last = mappings.iter().rposition(|m| m.name == Name::Heap)?;
    Some(run_end(mappings, last))
}

/// The end of the run of adjacent mappings that begins with the mapping of that index.
pub fn run_end(mappings: &[Mapping], first: usize) -> u64 {
    let mut end = mappings[first].range.end;
    for m in &mappings[first + 1..] {
        if m.range.start != end {
            break;
        }
        end = m.range.end;
    }
    end
}

/// The mappings that overlap `range`.
pub fn overlapping(mappings: &[Mapping], range: PageRange) -> &[Mapping] {
    let first = mappings.partition_point(|m| m.range.end <= range.start);
    let rest = &mappings[first..];
    &rest[..rest.partition_point(|m| m.range.start < range.end)]
}

/// Appends a mapping. A table that is read while other threads change it may repeat a part; the order stays.
fn push(out: &mut Vec<Mapping>, mut mapping: Mapping) {
    if let Some(last) = out.last()
        && mapping.range.start < last.range.end
    {
        let cut = last.range.end - mapping.range.start;
        mapping.range.start = last.range.end;
        mapping.offset = mapping.offset.wrapping_add(cut);
    }
    if !mapping.range.is_empty() {
        out.push(mapping);
    }
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| *b == b'\n').filter(|line| !line.is_empty())
}

/// `start-end perms offset major:minor inode   name`.
fn header(line: &[u8]) -> Option<Mapping> {
    let (start, rest) = hex(line, b'-')?;
    let (end, rest) = hex(rest, b' ')?;
    let (perms, rest) = rest.split_at_checked(5)?;
    let (offset, rest) = hex(rest, b' ')?;
    let (major, rest) = hex(rest, b':')?;
    let (minor, rest) = hex(rest, b' ')?;
    let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
    let (inode, rest) = rest.split_at(digits);
    let inode = std::str::from_utf8(inode).ok()?.parse().ok()?;
    let mut prot = 0;
    for (i, (got, bit)) in perms.iter().zip([b'r', b'w', b'x']).enumerate() {
        match *got {
            b'-' => {}
            b if b == bit => prot |= 1 << i,
            _ => return None,
        }
    }
    let shared = match perms[3] {
        b's' => true,
        b'p' => false,
        _ => return None,
    };
    Some(Mapping {
        range: PageRange::new(start, end),
        prot,
        shared,
        offset,
        device: Device { major: u32::try_from(major).ok()?, minor: u32::try_from(minor).ok()? },
        inode,
        name: name(rest.trim_ascii_start(), inode),
        flags: None,
    })
}

/// A hexadecimal number up to `stop`, and what follows that.
fn hex(text: &[u8], stop: u8) -> Option<(u64, &[u8])> {
    let mut value: u64 = 0;
    for (i, b) in text.iter().enumerate() {
        let digit = match b {
            b'0'..=b'9' => b - b'0',
            b'a'..=b'f' => b - b'a' + 10,
            b if *b == stop && i > 0 => return Some((value, &text[i + 1..])),
            _ => return None,
        };
        if value >> 60 != 0 {
            return None;
        }
        value = value << 4 | u64::from(digit);
    }
    None
}

fn name(text: &[u8], inode: u64) -> Name {
    match text {
        b"" => Name::None,
        b"[heap]" => Name::Heap,
        b"[stack]" => Name::Stack,
        // With a file the name is a path, whatever it looks like.
        _ if inode == 0 && (text.starts_with(b"[anon:") || text.starts_with(b"[anon_shmem:")) => {
            Name::Anonymous
        }
        _ if inode == 0 && text.starts_with(b"[") => Name::Special,
        _ if text.starts_with(b"/SYSV") && text.ends_with(b" (deleted)") => Name::SysV,
        _ if text.ends_with(b"zero") => Name::Zero,
        _ => Name::Path,
    }
}

fn vm_flags(text: &[u8]) -> VmFlags {
    let mut flags = VmFlags::default();
    for word in text.split(u8::is_ascii_whitespace) {
        match word {
            b"lo" => flags.locked = true,
            b"dc" => flags.dont_copy = true,
            b"wf" => flags.wipe_on_fork = true,
            b"pf" => flags.pfn_map = true,
            b"ht" => flags.hugetlb = true,
            _ => {}
        }
    }
    flags
}
