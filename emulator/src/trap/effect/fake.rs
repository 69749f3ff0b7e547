//! A process made of values, for tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

use crate::target::maps::{Mapping, Name, VmFlags};
use crate::target::{
    Descriptor, Device, FileIdentity, FileKind, KernelTraits, PathTarget, Result, Source, Target, Unreadable,
};

/// First page of an operation's area. Large pages begin here.
pub(super) const A: u64 = 0x7f10_0000_0000;
/// First page of the second area. It was mapped later, so it lies lower.
pub(super) const C: u64 = 0x7e10_0000_0000;
pub(super) const P: u64 = PAGE_SIZE;

pub(super) const SHM: Device = Device { major: 0, minor: 1 };
pub(super) const HUGE: Device = Device { major: 0, minor: 15 };
pub(super) const DISK: Device = Device { major: 8, minor: 1 };
pub(super) const OVERLAY: Device = Device { major: 0, minor: 60 };
pub(super) const HUGE_SIZE: u64 = 2 << 20;

/// The kernels of the recordings.
pub(super) const KERNELS: [&str; 4] = ["5.10", "6.1", "6.12", "7.3"];

/// What those kernels do, as the recordings show.
pub(super) fn kernel(name: &str) -> KernelTraits {
    let old = matches!(name, "5.10" | "6.1");
    let mut advices = vec![4, 8, 9, 13, 21, 100];
    if name != "5.10" {
        advices.extend([24, 25, 101]);
    }
    if name == "7.3" {
        advices.push(102);
    }
    KernelTraits {
        mremap_moves_several: name == "7.3",
        process_madvise_own: name == "7.3",
        advices,
        hugetlb_twice: old,
        shm_device: Some(SHM),
        hugetlb_devices: vec![(HUGE, HUGE_SIZE)],
        huge_page: HUGE_SIZE,
        maps_answer: name == "7.3",
        links_count_threads: true,
    }
}

/// The fake. Everything may be changed by the test.
#[derive(Debug)]
pub(super) struct Fake {
    pub(super) kernel: KernelTraits,
    pub(super) maps: Vec<Mapping>,
    pub(super) alone: bool,
    pub(super) descriptors: BTreeMap<i32, Descriptor>,
    pub(super) memory: BTreeMap<u64, Vec<u8>>,
    pub(super) paths: BTreeMap<u64, PathTarget>,
    pub(super) segments: BTreeMap<i32, u64>,
    pub(super) own_pidfd: Option<i32>,
    pub(super) heap_floor: u64,
    pub(super) read_implies_exec: bool,
    /// Every read fails.
    pub(super) opaque: bool,
    /// smaps was read.
    pub(super) looked_at_flags: bool,
}

pub(super) fn anonymous(start: u64, pages: u64, prot: u8) -> Mapping {
    Mapping {
        range: PageRange::new(start, start + pages * P),
        prot,
        shared: false,
        offset: 0,
        device: Device { major: 0, minor: 0 },
        inode: 0,
        name: Name::None,
        flags: Some(VmFlags::default()),
    }
}

/// A shared mapping of a memfd from that page of it.
pub(super) fn memfd(start: u64, pages: u64, inode: u64, page: u64) -> Mapping {
    Mapping {
        shared: true,
        offset: page * P,
        device: SHM,
        inode,
        name: Name::Path,
        ..anonymous(start, pages, RW)
    }
}

pub(super) const R: u8 = 1;
pub(super) const RW: u8 = 3;
pub(super) const NONE: u8 = 0;

impl Fake {
    pub(super) fn new(kernel_name: &str, maps: &[Mapping]) -> Self {
        let mut maps = maps.to_vec();
        maps.sort_by_key(|m| m.range.start);
        Self {
            kernel: kernel(kernel_name),
            maps,
            alone: true,
            descriptors: BTreeMap::new(),
            memory: BTreeMap::new(),
            paths: BTreeMap::new(),
            segments: BTreeMap::new(),
            own_pidfd: None,
            heap_floor: 0,
            read_implies_exec: false,
            opaque: false,
            looked_at_flags: false,
        }
    }

    /// Opens `fd` for reading and writing on a file.
    pub(super) fn open(mut self, fd: i32, device: Device, inode: u64, size: u64, kind: FileKind) -> Self {
        let file = Some(FileIdentity { device, inode, size, kind });
        self.descriptors.insert(fd, Descriptor { file, readable: true, writable: true });
        self
    }

    pub(super) fn words(mut self, address: u64, words: &[u64]) -> Self {
        self.memory.insert(address, words.iter().flat_map(|w| w.to_le_bytes()).collect());
        self
    }

    fn may(&self, source: Source) -> Result<()> {
        if self.opaque { Err(Unreadable { source, errno: libc::EPERM }) } else { Ok(()) }
    }
}

impl Target for Fake {
    fn mappings(&mut self) -> Result<Arc<[Mapping]>> {
        self.may(Source::Maps)?;
        Ok(self.maps.iter().map(|m| Mapping { flags: None, ..*m }).collect())
    }

    /// No more than that.
    fn mappings_over(&mut self, ranges: &[PageRange]) -> Result<Arc<[Mapping]>> {
        let all = self.mappings()?;
        Ok(all.iter().filter(|m| ranges.iter().any(|range| range.hits(m.range))).copied().collect())
    }

    fn mappings_with_flags(&mut self) -> Result<Arc<[Mapping]>> {
        self.may(Source::Smaps)?;
        self.looked_at_flags = true;
        Ok(self.maps.clone().into())
    }

    fn locked_kib(&mut self) -> Result<u64> {
        let locked = self.maps.iter().filter(|m| m.flags.is_some_and(|flags| flags.locked));
        Ok(locked.map(|m| m.range.len() >> 10).sum())
    }

    fn single_task(&mut self) -> Result<bool> {
        self.may(Source::Status)?;
        Ok(self.alone)
    }

    fn descriptor(&mut self, fd: i32) -> Result<Option<Descriptor>> {
        self.may(Source::Descriptor)?;
        Ok(self.descriptors.get(&fd).copied())
    }

    fn read_memory(&mut self, address: u64, buffer: &mut [u8]) -> Result<()> {
        let fault = Unreadable { source: Source::Memory, errno: libc::EFAULT };
        self.may(Source::Memory)?;
        let bytes = self.memory.get(&address).and_then(|bytes| bytes.get(..buffer.len())).ok_or(fault)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }

    fn resolve_path(&mut self, _: i32, path: u64) -> Result<PathTarget> {
        Ok(self.paths.get(&path).copied().unwrap_or(PathTarget::Unknown))
    }

    fn shm_size(&mut self, id: i32) -> Result<Option<u64>> {
        Ok(self.segments.get(&id).copied())
    }

    fn pidfd_is_self(&mut self, fd: i32) -> Result<bool> {
        Ok(self.own_pidfd == Some(fd))
    }

    fn pid_is_self(&mut self, pid: i32) -> Result<bool> {
        Ok(pid == 0)
    }

    fn heap_floor(&mut self) -> Result<u64> {
        Ok(self.heap_floor)
    }

    fn read_implies_exec(&mut self) -> Result<bool> {
        Ok(self.read_implies_exec)
    }

    fn device_kind(&mut self, device: Device) -> FileKind {
        match device {
            DISK => FileKind::Disk,
            _ => self.kernel.own_device(device).unwrap_or(FileKind::Stacked),
        }
    }

    fn kernel(&self) -> &KernelTraits {
        &self.kernel
    }
}

/// Ranges as the recordings write them: `[A+0,A+4)UNMAPx2 [C+0,C+2)CLEAR`. Pages of the area; the kind of
/// an event means nothing here.
pub(super) fn recorded(text: &str) -> Vec<PageRange> {
    let mut out = Vec::new();
    for item in text.split_whitespace() {
        let (range, kind) = item.strip_prefix('[').and_then(|i| i.split_once(')')).expect("a range");
        let (start, end) = range.split_once(',').expect("two ends");
        let range = PageRange::new(place(start), place(end));
        let times = kind.rsplit_once('x').map_or(1, |(_, n)| n.parse().expect("a number"));
        out.extend(std::iter::repeat_n(range, times));
    }
    out
}

fn place(text: &str) -> u64 {
    let (base, pages) = text.split_once('+').expect("a place");
    let base = match base {
        "A" => A,
        "C" => C,
        other => panic!("unknown area {other}"),
    };
    base + pages.parse::<u64>().expect("a page number") * P
}
