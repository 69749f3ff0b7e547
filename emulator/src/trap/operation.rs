//! What a trapped system call is about, from its registers alone.

use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

use crate::trap::policy::{
    self, ARCH_I386, ARCH_X86_64, CLONE_THREAD, CLONE_VFORK, CLONE_VM, KEEP_SIZE, MAP_FIXED,
    MAP_FIXED_NOREPLACE, MPOL_MOVE, O_TRUNC, SHM_REMAP, UNSHARE_RANGE, X32_BIT, i386, nr, request,
};

/// Where user addresses end at the most (five-level page tables). Nothing can be mapped from here on.
pub const ADDRESS_END: u64 = (1 << 56) - PAGE_SIZE;

/// Large pages of x86-64.
pub(crate) const HUGE_2M: u64 = 2 << 20;
pub(crate) const HUGE_1G: u64 = 1 << 30;

pub(crate) const MAP_SHARED_VALIDATE: u64 = 3;
pub(crate) const MAP_ANONYMOUS: u64 = 0x20;
pub(crate) const MAP_HUGETLB: u64 = 0x4_0000;
pub(crate) const MREMAP_MAYMOVE: u64 = 1;
pub(crate) const MREMAP_FIXED: u64 = 2;
pub(crate) const MREMAP_DONTUNMAP: u64 = 4;
pub(crate) const PROT_GROWSDOWN: u64 = 0x0100_0000;
pub(crate) const PROT_GROWSUP: u64 = 0x0200_0000;
pub(crate) const PUNCH_HOLE: u32 = 0x2;
pub(crate) const ZERO_RANGE: u32 = 0x10;
pub(crate) const AT_FDCWD: i32 = -100;

const O_CREAT: u64 = 0o100;
const O_EXCL: u64 = 0o200;
const O_PATH: u64 = 0o10_000_000;

/// A system call at its entry, as `struct seccomp_data` shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Syscall {
    /// `AUDIT_ARCH_*`.
    pub arch: u32,
    /// The number.
    pub nr: u32,
    /// The arguments.
    pub args: [u64; 6],
}

/// What a call means to the supervisor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decoded {
    /// Nothing: it can't invalidate anything.
    Ignore,
    /// A shim asks for its supervisor.
    Hello {
        /// The wire version that it speaks.
        version: u64,
    },
    /// The caller is about to run another program.
    Exec,
    /// A task with an address space of its own, or (clone3, whose flags lie in memory) perhaps a thread. The
    /// operation tells what that invalidates in the caller; a task of another process carries the filter on.
    Fork(Operation),
    /// Another task on the same address space that is neither a thread nor a vfork child: no invalidation, but
    /// the caller's process isn't alone any more.
    NewTask,
    /// An operation on mappings.
    Operation(Operation),
}

/// Something that invalidates mappings of the caller. Addresses are those that the kernel will use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// munmap.
    #[allow(missing_docs)]
    Munmap { start: u64, len: u64 },
    /// mmap with MAP_FIXED.
    #[allow(missing_docs)]
    MmapFixed { start: u64, len: u64, flags: u64, fd: i32, offset: u64 },
    /// mremap.
    #[allow(missing_docs)]
    Mremap { start: u64, old_len: u64, new_len: u64, flags: u64, destination: u64 },
    /// mprotect; pkey_mprotect with a key.
    #[allow(missing_docs)]
    Mprotect { start: u64, len: u64, prot: u64, pkey: Option<i32> },
    /// madvise with one of the advices that invalidate.
    #[allow(missing_docs)]
    Madvise { start: u64, len: u64, advice: i32 },
    /// process_madvise, likewise.
    #[allow(missing_docs)]
    ProcessMadvise { pidfd: i32, vector: u64, count: u64, advice: i32 },
    /// brk to a new end.
    #[allow(missing_docs)]
    Brk { end: u64 },
    /// shmdt.
    #[allow(missing_docs)]
    Shmdt { start: u64 },
    /// shmat with SHM_REMAP.
    #[allow(missing_docs)]
    ShmatRemap { id: i32, start: u64 },
    /// fallocate that isn't plain allocation.
    #[allow(missing_docs)]
    Fallocate { fd: i32, mode: u32, offset: u64, len: u64 },
    /// The ioctls that the VFS turns into fallocate; `argument` points to a `struct space_resv`.
    #[allow(missing_docs)]
    SpaceIoctl { fd: i32, mode: u32, argument: u64 },
    /// ftruncate.
    #[allow(missing_docs)]
    Ftruncate { fd: i32, len: u64 },
    /// truncate.
    #[allow(missing_docs)]
    Truncate { path: u64, len: u64 },
    /// open, openat, creat with O_TRUNC.
    #[allow(missing_docs)]
    OpenTruncate { directory: i32, path: u64 },
    /// openat2: its flags lie in memory.
    #[allow(missing_docs)]
    Openat2 { directory: i32, path: u64, how: u64, size: u64 },
    /// remap_file_pages.
    #[allow(missing_docs)]
    RemapFilePages { start: u64, len: u64 },
    /// fork, and clone without CLONE_VM.
    Fork,
    /// clone3: its flags lie in memory.
    #[allow(missing_docs)]
    Clone3 { arguments: u64, size: u64 },
    /// mbind with a MOVE flag.
    #[allow(missing_docs)]
    Mbind { start: u64, len: u64 },
    /// move_pages that moves.
    #[allow(missing_docs)]
    MovePages { pid: i32, count: u64, pages: u64 },
    /// migrate_pages.
    #[allow(missing_docs)]
    MigratePages { pid: i32 },
    /// ioctl PAGEMAP_SCAN.
    #[allow(missing_docs)]
    PagemapScan { argument: u64 },
    /// ioctl UFFDIO_WRITEPROTECT or UFFDIO_UNREGISTER: both begin with `struct uffdio_range`.
    #[allow(missing_docs)]
    UffdRange { argument: u64 },
    /// ioctl UFFDIO_MOVE.
    #[allow(missing_docs)]
    UffdMove { argument: u64 },
    /// A call whose arguments this code doesn't read: 32-bit entry, or an x32 call with compat structures.
    #[allow(missing_docs)]
    Foreign { arch: u32, nr: u32 },
}

/// The widest ranges that an operation may touch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// None: the call fails before it acts, or can't invalidate.
    Nothing,
    /// One range, or two.
    Ranges(PageRange, Option<PageRange>),
    /// Any mapping of a file (memfd, SysV and shared anonymous memory are files too).
    AnyFileMapping,
    /// Any mapping.
    Everything,
}

impl Reach {
    /// Its ranges; none for [`Reach::Nothing`], every address for what isn't bound to ranges.
    pub fn ranges(self) -> impl Iterator<Item = PageRange> {
        match self {
            Self::Nothing => [None, None],
            Self::Ranges(a, b) => [Some(a), b],
            Self::AnyFileMapping | Self::Everything => [Some(PageRange::ALL), None],
        }
        .into_iter()
        .flatten()
    }
}

impl Decoded {
    /// Reads a call.
    pub fn new(call: &Syscall) -> Self {
        match call.arch {
            ARCH_X86_64 if call.nr & X32_BIT != 0 => Self::x32(call.nr & !X32_BIT, &call.args),
            ARCH_X86_64 => Self::native(call.nr, &call.args),
            ARCH_I386 => Self::i386(call.nr, &call.args),
            _ => Self::Operation(Operation::Foreign { arch: call.arch, nr: call.nr }),
        }
    }

    fn native(number: u32, a: &[u64; 6]) -> Self {
        let int = |i: usize| a[i] as i32;
        Self::Operation(match number {
            nr::MUNMAP => Operation::Munmap { start: untagged(a[0]), len: a[1] },
            nr::MMAP if replaces(a[3]) => {
                Operation::MmapFixed { start: a[0], len: a[1], flags: a[3], fd: int(4), offset: a[5] }
            }
            nr::MREMAP => Operation::Mremap {
                start: untagged(a[0]),
                old_len: a[1],
                new_len: a[2],
                flags: a[3],
                destination: a[4],
            },
            nr::MPROTECT => Operation::Mprotect { start: untagged(a[0]), len: a[1], prot: a[2], pkey: None },
            nr::PKEY_MPROTECT => Operation::Mprotect {
                start: untagged(a[0]),
                len: a[1],
                prot: a[2],
                pkey: (int(3) != -1).then_some(int(3)),
            },
            nr::MADVISE if policy::advice::WATCHED.contains(&int(2)) => {
                Operation::Madvise { start: untagged(a[0]), len: a[1], advice: int(2) }
            }
            // Flags must be 0.
            nr::PROCESS_MADVISE if policy::advice::WATCHED.contains(&int(3)) && int(4) == 0 => {
                Operation::ProcessMadvise { pidfd: int(0), vector: a[1], count: a[2], advice: int(3) }
            }
            nr::BRK if a[0] != 0 => Operation::Brk { end: a[0] },
            nr::SHMDT => Operation::Shmdt { start: a[0] },
            nr::SHMAT if a[2] as u32 & SHM_REMAP != 0 => {
                // SHM_RND rounds down to SHMLBA, which is a page.
                const SHM_RND: u32 = 0x2000;
                let start = if a[2] as u32 & SHM_RND != 0 { page_down(a[1]) } else { a[1] };
                Operation::ShmatRemap { id: int(0), start }
            }
            nr::FALLOCATE if deallocates(a[1] as u32) => {
                Operation::Fallocate { fd: int(0), mode: a[1] as u32, offset: a[2], len: a[3] }
            }
            nr::FTRUNCATE => Operation::Ftruncate { fd: int(0), len: a[1] },
            nr::TRUNCATE => Operation::Truncate { path: a[0], len: a[1] },
            nr::CREAT => Operation::OpenTruncate { directory: AT_FDCWD, path: a[0] },
            nr::OPEN if truncates(a[1]) => Operation::OpenTruncate { directory: AT_FDCWD, path: a[0] },
            nr::OPENAT if truncates(a[2]) => Operation::OpenTruncate { directory: int(0), path: a[1] },
            nr::OPENAT2 => Operation::Openat2 { directory: int(0), path: a[1], how: a[2], size: a[3] },
            nr::REMAP_FILE_PAGES => Operation::RemapFilePages { start: a[0], len: a[1] },
            nr::FORK => return Self::Fork(Operation::Fork),
            nr::CLONE => return Self::clone(a[0] as u32),
            nr::CLONE3 => return Self::Fork(Operation::Clone3 { arguments: a[0], size: a[1] }),
            nr::EXECVE | nr::EXECVEAT => return Self::Exec,
            nr::MBIND if a[5] as u32 & MPOL_MOVE != 0 => {
                Operation::Mbind { start: untagged(a[0]), len: a[1] }
            }
            nr::MOVE_PAGES if a[3] != 0 => Operation::MovePages { pid: int(0), count: a[1], pages: a[2] },
            nr::MIGRATE_PAGES => Operation::MigratePages { pid: int(0) },
            nr::IOCTL => match a[1] as u32 {
                request::PAGEMAP_SCAN => Operation::PagemapScan { argument: a[2] },
                request::UFFDIO_WRITEPROTECT | request::UFFDIO_UNREGISTER => {
                    Operation::UffdRange { argument: a[2] }
                }
                request::UFFDIO_MOVE => Operation::UffdMove { argument: a[2] },
                request::UNRESVSP | request::UNRESVSP64 => {
                    Operation::SpaceIoctl { fd: int(0), mode: PUNCH_HOLE | KEEP_SIZE, argument: a[2] }
                }
                request::ZERO_RANGE => Operation::SpaceIoctl { fd: int(0), mode: ZERO_RANGE, argument: a[2] },
                _ => return Self::Ignore,
            },
            nr::PRCTL if a[0] as u32 == ummunotify_abi::wire::HELLO_PRCTL as u32 => {
                return Self::Hello { version: a[1] };
            }
            _ => return Self::Ignore,
        })
    }

    fn x32(number: u32, a: &[u64; 6]) -> Self {
        match number {
            // struct iovec and arrays of pointers have 32-bit fields under x32.
            nr::PROCESS_MADVISE | nr::X32_MOVE_PAGES => {
                Self::Operation(Operation::Foreign { arch: ARCH_X86_64, nr: number | X32_BIT })
            }
            nr::X32_IOCTL => Self::native(nr::IOCTL, a),
            nr::X32_EXECVE | nr::X32_EXECVEAT => Self::Exec,
            _ => Self::native(number, a),
        }
    }

    /// 32-bit entry: what concerns tasks is told apart, everything else is taken as a change of anything.
    fn i386(number: u32, a: &[u64; 6]) -> Self {
        match number {
            i386::FORK => Self::Fork(Operation::Fork),
            i386::CLONE => Self::clone(a[0] as u32),
            i386::CLONE3 => Self::Fork(Operation::Clone3 { arguments: a[0], size: a[1] }),
            i386::EXECVE | i386::EXECVEAT => Self::Exec,
            _ if policy::I386.iter().any(|rule| rule.nr == number) => {
                Self::Operation(Operation::Foreign { arch: ARCH_I386, nr: number })
            }
            _ => Self::Ignore,
        }
    }

    /// clone's flags; the kernel takes their low word (`lower_32_bits`).
    fn clone(flags: u32) -> Self {
        if flags & CLONE_VM == 0 {
            Self::Fork(Operation::Fork)
        } else if flags & (CLONE_THREAD | CLONE_VFORK) == 0 {
            Self::NewTask
        } else {
            Self::Ignore
        }
    }
}

impl Operation {
    /// The widest ranges that the operation may touch, from registers alone.
    pub fn reach(&self) -> Reach {
        match *self {
            Self::Munmap { start, len } => one(user_pages(start, len)),
            Self::MmapFixed { start, len, flags, offset, .. } => {
                // Refused before anything is unmapped: do_mmap looks at offset, length and type first.
                let anonymous = flags & MAP_ANONYMOUS != 0;
                let kind = flags & 0xf;
                let valid = matches!(kind, 1 | 2 | 8) || (kind == MAP_SHARED_VALIDATE && !anonymous);
                if !offset.is_multiple_of(PAGE_SIZE) || !valid {
                    return Reach::Nothing;
                }
                let huge = !anonymous || flags & MAP_HUGETLB != 0;
                one(if huge { huge_pages(start, len) } else { user_pages(start, len) })
            }
            Self::Mremap { start, old_len, new_len, flags, destination } => {
                mremap_reach(start, old_len, new_len, flags, destination)
            }
            Self::Mprotect { start, len, prot, .. } => {
                // arch_validate_prot: read, write, exec, and the never used PROT_SEM.
                let known = 0xf | PROT_GROWSDOWN | PROT_GROWSUP;
                let Some(range) = PageRange::pages(start, len) else { return Reach::Nothing };
                if prot & !known != 0 || prot & PROT_GROWSUP != 0 {
                    // No mapping of x86 grows up.
                    return Reach::Nothing;
                }
                // PROT_GROWSDOWN begins at the start of the mapping, wherever that is.
                let start = if prot & PROT_GROWSDOWN != 0 { 0 } else { range.start };
                Reach::Ranges(PageRange::new(start, range.end), None)
            }
            Self::Madvise { start, len, advice } => {
                let Some(range) = PageRange::pages(start, len) else { return Reach::Nothing };
                match advice {
                    policy::advice::REMOVE => Reach::AnyFileMapping,
                    // They unmap a file's pages wherever these are mapped.
                    policy::advice::COLLAPSE | policy::advice::HWPOISON | policy::advice::SOFT_OFFLINE => {
                        Reach::Everything
                    }
                    _ => Reach::Ranges(range, None),
                }
            }
            Self::ProcessMadvise { count, .. } if count == 0 || count > MAX_VECTORS => Reach::Nothing,
            Self::Brk { end } => one(page_up(end).map(|end| PageRange::new(end, u64::MAX))),
            Self::Shmdt { start } | Self::ShmatRemap { start, .. } => {
                if start.is_multiple_of(PAGE_SIZE) && start < ADDRESS_END {
                    Reach::Ranges(PageRange::new(start, u64::MAX), None)
                } else {
                    Reach::Nothing
                }
            }
            Self::Fallocate { mode, offset, len, .. } => {
                let bad = (offset as i64) < 0 || (len as i64) <= 0 || (offset + len) as i64 <= 0;
                // A hole punch must keep the size.
                if bad || (mode & PUNCH_HOLE != 0 && mode & KEEP_SIZE == 0) {
                    Reach::Nothing
                } else {
                    Reach::AnyFileMapping
                }
            }
            Self::Ftruncate { len, .. } | Self::Truncate { len, .. } if (len as i64) < 0 => Reach::Nothing,
            // 24 bytes are the structure's first version.
            Self::Openat2 { size, .. } if size < 24 => Reach::Nothing,
            Self::SpaceIoctl { .. }
            | Self::Ftruncate { .. }
            | Self::Truncate { .. }
            | Self::OpenTruncate { .. }
            | Self::Openat2 { .. } => Reach::AnyFileMapping,
            Self::RemapFilePages { start, len } => {
                let (start, len) = (page_down(start), page_down(len));
                one((len != 0)
                    .then(|| start.checked_add(len))
                    .flatten()
                    .map(|end| PageRange::new(start, end)))
            }
            // 64 bytes are the structure's first version, a page its longest.
            Self::Clone3 { size, .. } if !(64..=PAGE_SIZE).contains(&size) => Reach::Nothing,
            Self::Mbind { start, len } => {
                // The large pages that the ends lie in move as a whole.
                one(PageRange::pages(start, len).map(|r| around(r, HUGE_1G)))
            }
            Self::MovePages { count: 0, .. } => Reach::Nothing,
            Self::ProcessMadvise { .. }
            | Self::Fork
            | Self::Clone3 { .. }
            | Self::MovePages { .. }
            | Self::MigratePages { .. }
            | Self::PagemapScan { .. }
            | Self::UffdRange { .. }
            | Self::UffdMove { .. }
            | Self::Foreign { .. } => Reach::Everything,
        }
    }

    /// [`Operation::reach`] for a caller that knows that the heap never lay above `heap_end`: what
    /// [`crate::target::maps::heap_end`] said when the first region was registered, or the highest
    /// [`Operation::Brk`] seen since, whichever is higher. A growing heap then reaches nothing, and a
    /// shrinking one no mapping beyond it.
    pub fn reach_with_heap(&self, heap_end: u64) -> Reach {
        match (self, self.reach()) {
            (Self::Brk { .. }, Reach::Ranges(range, None)) => {
                let end = page_up(heap_end).unwrap_or(u64::MAX);
                one(range.intersection(PageRange::new(0, end)))
            }
            (_, reach) => reach,
        }
    }
}

/// `UIO_MAXIOV`.
pub(crate) const MAX_VECTORS: u64 = 1024;

fn mremap_reach(start: u64, old_len: u64, new_len: u64, flags: u64, destination: u64) -> Reach {
    let fixed = flags & MREMAP_FIXED != 0;
    let moves = flags & MREMAP_MAYMOVE != 0;
    let keeps = flags & MREMAP_DONTUNMAP != 0;
    let (Some(old), Some(new)) = (page_up(old_len), page_up(new_len)) else { return Reach::Nothing };
    if flags & !(MREMAP_FIXED | MREMAP_MAYMOVE | MREMAP_DONTUNMAP) != 0
        || ((fixed || keeps) && !moves)
        || (keeps && old_len != new_len)
        || !start.is_multiple_of(PAGE_SIZE)
        || new == 0
    {
        return Reach::Nothing;
    }
    let source = huge_pages(start, old);
    if fixed || keeps {
        let Some(target) = user_pages(destination, new) else { return Reach::Nothing };
        let overlap = start.saturating_add(old) > target.start && target.end > start;
        if overlap {
            return Reach::Nothing;
        }
        let target = if fixed { huge_pages(destination, new) } else { None };
        return match (target, source) {
            (Some(target), source) => Reach::Ranges(target, source),
            (None, source) => one(source),
        };
    }
    if old > new {
        // A shrink needs no more than a mapping at its start; the tail is unmapped whatever lies there.
        one(source.map(|s| PageRange::new(start.saturating_add(new), s.end)))
    } else if old < new && moves {
        one(source)
    } else {
        Reach::Nothing
    }
}

fn one(range: Option<PageRange>) -> Reach {
    match range {
        Some(range) if !range.is_empty() => Reach::Ranges(range, None),
        _ => Reach::Nothing,
    }
}

/// Whole pages that lie below the end of user addresses; None where the kernel refuses.
fn user_pages(start: u64, len: u64) -> Option<PageRange> {
    PageRange::pages(start, len).filter(|range| range.end <= ADDRESS_END)
}

/// The same, rounded up to the large page that `start` may be the first byte of: lengths of hugetlb mappings
/// are, and registers don't tell what is a hugetlb mapping.
fn huge_pages(start: u64, len: u64) -> Option<PageRange> {
    let range = user_pages(start, len)?;
    let unit = [HUGE_1G, HUGE_2M].into_iter().find(|unit| start.is_multiple_of(*unit)).unwrap_or(PAGE_SIZE);
    Some(PageRange::new(start, start + range.len().next_multiple_of(unit)))
}

/// The range, widened to multiples of `unit`.
pub(crate) fn around(range: PageRange, unit: u64) -> PageRange {
    let end = range.end.checked_next_multiple_of(unit).unwrap_or(u64::MAX);
    PageRange::new(range.start - range.start % unit, end)
}

pub(crate) const fn page_down(address: u64) -> u64 {
    address & !(PAGE_SIZE - 1)
}

pub(crate) const fn page_up(address: u64) -> Option<u64> {
    match address.checked_add(PAGE_SIZE - 1) {
        Some(padded) => Some(page_down(padded)),
        None => None,
    }
}

/// Calls that take tagged addresses drop the tag (`untagged_addr`) in processes that switched Linear Address
/// Masking on (6.4). That isn't known here; an address with a tag is no address otherwise, so that the worst
/// is one invalidation too many.
fn untagged(address: u64) -> u64 {
    if address >> 63 == 0 { address & ((1 << 57) - 1) } else { address }
}

fn replaces(flags: u64) -> bool {
    flags as u32 & MAP_FIXED != 0 && flags as u32 & MAP_FIXED_NOREPLACE == 0
}

fn deallocates(mode: u32) -> bool {
    ![0, KEEP_SIZE, UNSHARE_RANGE].contains(&mode)
}

/// O_PATH drops O_TRUNC; O_CREAT with O_EXCL makes a new file or fails.
pub(crate) fn truncates(flags: u64) -> bool {
    flags & u64::from(O_TRUNC) != 0 && flags & O_PATH == 0 && flags & (O_CREAT | O_EXCL) != (O_CREAT | O_EXCL)
}
