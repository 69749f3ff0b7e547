//! The mapping table: `/proc/PID/maps`, read or asked, and `/proc/PID/smaps`.
//!
//! The texts are parsed as bytes. Names can't break lines: the kernel writes a newline in a path as `\012`
//! (`seq_file_path`), and names of anonymous memory are printable. Anything else in a name is possible,
//! among it text that looks like the start of a line.

use std::sync::Arc;

use ummunotify_abi::PageRange;
use ummunotify_sys::maps::{Answer, Table};

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
    /// True if `next` could be the rest of the same mapping.
    fn continues_in(&self, next: &Self) -> bool {
        let follows = self.range.end == next.range.start
            && (!self.is_file() || self.offset.wrapping_add(self.range.len()) == next.offset);
        let same = |m: &Self| (m.prot, m.shared, m.device, m.inode, m.name, m.flags);
        follows && same(self) == same(next)
    }

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

/// Asks for the mappings that overlap `ranges`; `None` if it doesn't answer, or there are so many that the text is read
/// sooner. Answers that other threads' changes come between are made of several tables, as the text is.
pub fn ask(table: &mut Table, ranges: &[PageRange]) -> Option<Arc<[Mapping]>> {
    let mut ranges: Vec<_> = ranges.iter().filter(|range| !range.is_empty()).collect();
    ranges.sort_by_key(|range| range.start);
    let mut out: Vec<Mapping> = Vec::new();
    let mut questions = 0..MOST_QUESTIONS;
    for range in ranges {
        let mut at = out.last().map_or(range.start, |last| range.start.max(last.range.end));
        while at < range.end {
            questions.next()?;
            let Some(answer) = table.at_or_above(at).ok()? else { break };
            // What doesn't lie ahead is no answer.
            if answer.end <= at {
                return None;
            }
            if answer.start >= range.end {
                break;
            }
            at = answer.end;
            push(&mut out, Mapping::from(answer));
        }
    }
    Some(out.into())
}

/// A question takes as long as some lines of the text.
const MOST_QUESTIONS: usize = 64;

impl From<Answer<'_>> for Mapping {
    fn from(answer: Answer<'_>) -> Self {
        let (major, minor) = answer.device;
        Self {
            range: PageRange::new(answer.start, answer.end),
            prot: answer.prot,
            shared: answer.shared,
            offset: answer.offset,
            device: Device { major, minor },
            inode: answer.inode,
            name: name(answer.name, answer.inode),
            flags: None,
        }
    }
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

/// True if every page of the bytes from `start` to `end` is mapped with the rights `prot` (PROT_READ, PROT_WRITE).
pub fn allow(mappings: &[Mapping], start: u64, end: u64, prot: i32) -> bool {
    let prot = prot as u8;
    let mut at = start;
    for mapping in overlapping(mappings, PageRange::new(start, end)) {
        if mapping.range.start > at || mapping.prot & prot != prot {
            return false;
        }
        at = mapping.range.end;
    }
    at >= end
}

/// The mappings that overlap `range`.
pub fn overlapping(mappings: &[Mapping], range: PageRange) -> &[Mapping] {
    let first = mappings.partition_point(|m| m.range.end <= range.start);
    let rest = &mappings[first..];
    &rest[..rest.partition_point(|m| m.range.start < range.end)]
}

/// The table as it would be without the seams: neighbours that differ in nothing that it shows become one where
/// `seam` says that it was the emulator that parted them.
pub fn join(mappings: &[Mapping], seam: &dyn Fn(u64) -> bool) -> Arc<[Mapping]> {
    let mut out: Vec<Mapping> = Vec::with_capacity(mappings.len());
    for m in mappings {
        match out.last_mut() {
            Some(last) if last.continues_in(m) && seam(m.range.start) => last.range.end = m.range.end,
            _ => out.push(*m),
        }
    }
    out.into()
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAPS: &[u8] = b"\
00400000-0048a000 r-xp 00001000 fd:03 960637       /bin/a b\n\
01f5b000-01f7c000 rw-p 00000000 00:00 0            [heap]\n\
7f1000000000-7f1000004000 rw-s 00002000 00:01 1043 /memfd:name with (deleted) (deleted)\n\
7f1000004000-7f1000008000 r--s 00000000 00:01 5    /SYSV00000000 (deleted)\n\
7f1000008000-7f1000009000 ---p 00000000 00:00 0 \n\
7f1000009000-7f100000a000 rw-p 00000000 00:00 0    [anon:[heap]]\n\
7f100000a000-7f100000b000 rw-p 00000000 00:05 4    /dev/zero\n\
7f100000b000-7f100000c000 rw-p 00000000 08:01 12   /tmp/\\0127f10-7f11 rw-p [heap]\n\
7f100000c000-7f100000d000 rw-p 00000000 08:01 13   [heap]x\n\
7ffd0f163000-7ffd0f184000 rw-p 00000000 00:00 0    [stack]\n\
7ffd0f1a0000-7ffd0f1a2000 r-xp 00000000 00:00 0    [vdso]\n\
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0    [vsyscall]\n";

    #[test]
    fn every_kind_of_line() {
        let maps = parse(MAPS).unwrap();
        let names: Vec<Name> = maps.iter().map(|m| m.name).collect();
        use Name::*;
        let expected = [Path, Heap, Path, SysV, None, Anonymous, Zero, Path, Path, Stack, Special, Special];
        assert_eq!(names, expected);
        assert_eq!(maps[0].range, PageRange::new(0x40_0000, 0x48_a000));
        assert_eq!((maps[0].prot, maps[0].shared), (5, false));
        assert_eq!(maps[0].device, Device { major: 0xfd, minor: 3 });
        assert_eq!((maps[2].offset, maps[2].inode, maps[2].shared), (0x2000, 1043, true));
        assert!(maps[2].is_file() && !maps[5].is_file());
        assert_eq!(maps[11].range.end, 0xffff_ffff_ff60_1000);
        assert_eq!(heap_end(&maps), Some(0x1f7_c000));
    }

    #[test]
    fn flags_of_smaps() {
        let text = b"\
7f1000000000-7f1000004000 rw-p 00000000 00:00 0 \n\
Size:                 16 kB\n\
KernelPageSize:        4 kB\n\
VmFlags: rd wr mr mw me lo dc ac sd \n\
7f1000004000-7f1000008000 rw-s 00000000 00:0f 9    /anon_hugepage (deleted)\n\
Size:                 16 kB\n\
ProtectionKey:         0\n\
VmFlags: rd wr sh mr mw me ms wf ht pf\n";
        let maps = parse_smaps(text).unwrap();
        let flags = VmFlags { locked: true, dont_copy: true, ..VmFlags::default() };
        assert_eq!(maps[0].flags, Some(flags));
        let flags = VmFlags { wipe_on_fork: true, hugetlb: true, pfn_map: true, ..VmFlags::default() };
        assert_eq!(maps[1].flags, Some(flags));
        // Cut short: a mapping without flags would be taken for one that has none.
        let cut = &text[..text.len() - 40];
        assert_eq!(parse_smaps(cut), Err(BAD_SMAPS));
        assert_eq!(parse_smaps(&MAPS[..200]), Err(BAD_SMAPS));
    }

    /// A line that isn't understood is an error, not a mapping less.
    #[test]
    fn broken_lines_are_errors() {
        let good = "7f00-8000 rw-p 00000000 00:00 0";
        assert!(parse(good.as_bytes()).is_ok());
        for bad in [
            "7f00-8000",
            "7f00 8000 rw-p 00000000 00:00 0",
            "-8000 rw-p 00000000 00:00 0",
            "7f00-8000 rwzp 00000000 00:00 0",
            "7f00-8000 rw-x 00000000 00:00 0",
            "7f00-8000 rw-p 00000000 00:00 ",
            "7f00-8000 rw-p 00000000 0000 0",
            "7F00-8000 rw-p 00000000 00:00 0",
            "10000000000000000-20000000000000000 rw-p 00000000 00:00 0",
            "7f00-8000 rw-p 00000000 00:00 99999999999999999999999",
        ] {
            assert_eq!(parse(bad.as_bytes()), Err(BAD), "{bad}");
        }
    }

    /// A table read while it changes can repeat a part; what is returned is ascending all the same.
    #[test]
    fn repeated_parts_are_cut() {
        let text = b"1000-5000 rw-p 00000000 00:01 7\n3000-8000 rw-p 00002000 00:01 7\n4000-6000 rw-p 00000000 00:00 0\n";
        let maps = parse(text).unwrap();
        let ranges: Vec<_> = maps.iter().map(|m| (m.range.start, m.range.end, m.offset)).collect();
        assert_eq!(ranges, [(0x1000, 0x5000, 0), (0x5000, 0x8000, 0x4000)]);
    }

    #[test]
    fn overlapping_is_what_overlaps() {
        let maps = parse(MAPS).unwrap();
        let over = |start, end| overlapping(&maps, PageRange::new(start, end)).len();
        assert_eq!(over(0, 0x40_0000), 0);
        assert_eq!(over(0, 0x40_0001), 1);
        assert_eq!(over(0x7f10_0000_3fff, 0x7f10_0000_4001), 2);
        assert_eq!(over(0, u64::MAX), maps.len());
        assert_eq!(over(0x48_a000, 0x1f5_b000), 0);
    }

    /// This process's own tables are understood, and agree.
    #[test]
    fn own_tables() {
        let maps = parse(&std::fs::read("/proc/self/maps").unwrap()).unwrap();
        let smaps = parse_smaps(&std::fs::read("/proc/self/smaps").unwrap()).unwrap();
        for table in [&maps, &smaps] {
            assert!(table.iter().any(|m| m.name == Name::Stack));
            assert!(table.windows(2).all(|pair| pair[0].range.end <= pair[1].range.start));
            let here = MAPS.as_ptr() as u64;
            let m = overlapping(table, PageRange::new(here, here + 1));
            assert!(m.len() == 1 && m[0].is_file());
        }
        assert!(smaps.iter().all(|m| m.flags.is_some()));
    }

    /// Answers and text say the same, and whatever doesn't overlap is left out.
    #[test]
    fn what_is_asked_is_what_is_read() {
        let mut table = Table::new(std::fs::File::open("/proc/self/maps").unwrap());
        if let Err(e) = table.at_or_above(0) {
            println!("SKIPPED single mappings out of a table: {e}");
            return;
        }
        // Other tests map meanwhile: what stands still is this program's file, and what lies around it.
        let text = || parse(&std::fs::read("/proc/self/maps").unwrap()).unwrap();
        let mut still = 0;
        for m in text().iter().filter(|m| m.range.end < 1 << 56) {
            let PageRange { start, end } = m.range;
            let inside = PageRange::new(start + 4096.min((end - start) / 2), end);
            let twice = [inside, PageRange::new(start, start + 1)];
            let asked = [ask(&mut table, &[m.range]), ask(&mut table, &[inside]), ask(&mut table, &twice)];
            if overlapping(&text(), m.range) == [*m] {
                still += 1;
                assert!(asked.iter().all(|asked| asked.as_deref() == Some(&[*m])), "{m:x?}: {asked:x?}");
            }
        }
        assert!(still > 10, "{still}");
        assert_eq!(
            ask(&mut table, &[PageRange::new(0, 4096), PageRange::new(4096, 4096)]).as_deref(),
            Some(&[][..])
        );
        assert_eq!(ask(&mut table, &[PageRange::new((1 << 56) - 4096, 1 << 56)]).as_deref(), Some(&[][..]));
    }

    prop_compose! {
        fn mapping()(gap in 0_u64..4, pages in 1_u64..9, prot in 0_u8..8, shared: bool, offset in 0_u64..1 << 40,
                     major in 0_u32..4096, minor in 0_u32..1 << 20, inode: u64, name in "[ -~]{0,20}")
            -> (u64, u64, u8, bool, u64, u32, u32, u64, String) {
            (gap, pages, prot, shared, offset << 12, major, minor, inode, name)
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(list in prop::collection::vec(mapping(), 0..20)) {
            let (mut text, mut at, mut expected) = (String::new(), 0x10_0000, Vec::new());
            for (gap, pages, prot, shared, offset, major, minor, inode, name) in list {
                let start = at + gap * 4096;
                at = start + pages * 4096;
                let bit = |i: u8, c: char| if prot & 1 << i != 0 { c } else { '-' };
                text += &format!(
                    "{start:08x}-{at:08x} {}{}{}{} {offset:08x} {major:02x}:{minor:02x} {inode}    {name}\n",
                    bit(0, 'r'), bit(1, 'w'), bit(2, 'x'), if shared { 's' } else { 'p' },
                );
                expected.push((PageRange::new(start, at), prot, shared, offset, Device { major, minor }, inode));
            }
            let got: Vec<_> = parse(text.as_bytes()).unwrap().iter()
                .map(|m| (m.range, m.prot, m.shared, m.offset, m.device, m.inode)).collect();
            prop_assert_eq!(got, expected);
        }

        #[test]
        fn garbage_never_panics(text in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&text);
            let _ = parse_smaps(&text);
        }

        #[test]
        fn nearly_right_never_panics(mut text in Just(MAPS.to_vec()), at in 0..MAPS.len(), byte: u8) {
            text[at] = byte;
            if let Ok(maps) = parse(&text) {
                prop_assert!(maps.windows(2).all(|pair| pair[0].range.end <= pair[1].range.start));
                prop_assert!(maps.iter().all(|m| !m.range.is_empty()));
            }
            let _ = parse_smaps(&text);
        }
    }
}
