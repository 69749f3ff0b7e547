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
    /// A shim asks whether it is under a filter: where none could be had, but each call is stopped.
    Present,
    /// A thread of an opener has recorded a hit and wants the descriptor to become readable.
    Ring {
        /// Of the context's pipe.
        inode: u64,
    },
    /// The caller is about to run another program.
    Exec,
    /// A task with an address space of its own, or (clone3, whose flags lie in memory) perhaps a thread. The
    /// operation tells what that invalidates in the caller; a task of another process carries the filter on.
    Fork(Operation),
    /// Another task on the same address space that is neither a thread nor a vfork child: no invalidation, but
    /// the caller's process isn't alone any more.
    NewTask,
    /// The caller is about to get an io_uring ring.
    NewRing,
    /// The caller's own userfaultfd is about to watch a range that another may be watching: `argument` points to a
    /// `struct uffdio_register`, which begins with the range. Nothing is invalidated.
    OwnWatch {
        /// Where the range stands.
        argument: u64,
    },
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
    /// A call whose arguments this code doesn't read: structures and 64-bit values of the 32-bit entries.
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

    /// One range around all of them.
    pub fn hull(self) -> Option<PageRange> {
        self.ranges().reduce(|a, b| PageRange::new(a.start.min(b.start), a.end.max(b.end)))
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
            nr::IO_URING_SETUP => return Self::NewRing,
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
                request::UFFDIO_REGISTER => return Self::OwnWatch { argument: a[2] },
                request::UFFDIO_MOVE => Operation::UffdMove { argument: a[2] },
                request::UNRESVSP | request::UNRESVSP64 => {
                    Operation::SpaceIoctl { fd: int(0), mode: PUNCH_HOLE | KEEP_SIZE, argument: a[2] }
                }
                request::ZERO_RANGE => Operation::SpaceIoctl { fd: int(0), mode: ZERO_RANGE, argument: a[2] },
                _ => return Self::Ignore,
            },
            nr::PRCTL if a[0] as u32 == ummunotify_abi::wire::HELLO_PRCTL as u32 => {
                return match a[1] {
                    ummunotify_abi::wire::PRESENT => Self::Present,
                    ummunotify_abi::wire::RING_PRCTL => Self::Ring { inode: a[2] },
                    version => Self::Hello { version },
                };
            }
            _ => return Self::Ignore,
        })
    }

    fn x32(number: u32, a: &[u64; 6]) -> Self {
        let foreign = Self::Operation(Operation::Foreign { arch: ARCH_X86_64, nr: number | X32_BIT });
        match number {
            // struct iovec, arrays of pointers and struct space_resv are laid out as for 32-bit calls.
            nr::PROCESS_MADVISE | nr::X32_MOVE_PAGES => foreign,
            nr::X32_IOCTL if compat_space(a[1]) => foreign,
            nr::X32_IOCTL => Self::native(nr::IOCTL, a),
            nr::X32_EXECVE | nr::X32_EXECVEAT => Self::Exec,
            _ => Self::native(number, a),
        }
    }

    /// 32-bit entry. Arguments are 32 bits wide, and the kernel takes those of the plain calls as they are;
    /// calls with 64-bit values, structures or paths are taken as a change of anything.
    fn i386(number: u32, a: &[u64; 6]) -> Self {
        let a = a.map(|arg| u64::from(arg as u32));
        match number {
            i386::FORK => Self::Fork(Operation::Fork),
            i386::CLONE => Self::clone(a[0] as u32),
            i386::CLONE3 => Self::Fork(Operation::Clone3 { arguments: a[0], size: a[1] }),
            i386::EXECVE | i386::EXECVEAT => Self::Exec,
            i386::IO_URING_SETUP => Self::NewRing,
            // The structures of userfaultfd are the same for every entry.
            i386::IOCTL if a[1] as u32 == request::UFFDIO_REGISTER => Self::OwnWatch { argument: a[2] },
            i386::MUNMAP => Self::native(nr::MUNMAP, &a),
            i386::MPROTECT => Self::native(nr::MPROTECT, &a),
            i386::PKEY_MPROTECT => Self::native(nr::PKEY_MPROTECT, &a),
            i386::MREMAP => Self::native(nr::MREMAP, &a),
            i386::MADVISE => Self::native(nr::MADVISE, &a),
            i386::BRK => Self::native(nr::BRK, &a),
            i386::SHMDT => Self::native(nr::SHMDT, &a),
            // Its offset counts pages.
            i386::MMAP2 => Self::native(nr::MMAP, &[a[0], a[1], a[2], a[3], a[4], a[5] * PAGE_SIZE]),
            // ipc(call, first, second, third, pointer): the call in the low half, a version in the high one.
            i386::IPC => match a[0] & 0xffff {
                21 => Self::native(nr::SHMAT, &[a[1], a[4], a[2], 0, 0, 0]),
                22 => Self::native(nr::SHMDT, &[a[4], 0, 0, 0, 0, 0]),
                _ => Self::Ignore,
            },
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

    /// Whether userfaultfd has an event for what the operation does to watched memory.
    pub fn causes_events(&self) -> bool {
        match *self {
            Self::Munmap { .. }
            | Self::MmapFixed { .. }
            | Self::Mremap { .. }
            | Self::Brk { .. }
            | Self::Foreign { .. } => true,
            Self::Madvise { advice, .. } | Self::ProcessMadvise { advice, .. } => {
                use policy::advice::{DONTNEED, DONTNEED_LOCKED, FREE, REMOVE};
                matches!(advice, DONTNEED | DONTNEED_LOCKED | FREE | REMOVE)
            }
            _ => false,
        }
    }

    /// Whether it takes mappings away, of which userfaultfd tells when they have gone (events of the other kinds come
    /// before the operation acts).
    pub const fn ends_with_event(&self) -> bool {
        matches!(self, Self::Munmap { .. } | Self::MmapFixed { .. } | Self::Mremap { .. } | Self::Brk { .. })
    }

    /// What would fail where a part of a mapping, or all of it, is watched by userfaultfd: growing and moving a
    /// mapping that the watch has parted (EFAULT), and MADV_COLLAPSE (EINVAL).
    pub fn fails_on_watched(&self) -> Option<PageRange> {
        match *self {
            Self::Mremap { start, old_len, .. } => PageRange::pages(start, old_len),
            Self::Madvise { start, len, advice: policy::advice::COLLAPSE } => PageRange::pages(start, len),
            Self::ProcessMadvise { advice: policy::advice::COLLAPSE, .. } => Some(PageRange::ALL),
            _ => None,
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

/// The ioctls on files whose numbers differ by entry.
fn compat_space(request: u64) -> bool {
    [request::UNRESVSP_32, request::UNRESVSP64_32, request::ZERO_RANGE_32].contains(&(request as u32))
}

fn deallocates(mode: u32) -> bool {
    ![0, KEEP_SIZE, UNSHARE_RANGE].contains(&mode)
}

/// O_PATH drops O_TRUNC; O_CREAT with O_EXCL makes a new file or fails.
pub(crate) fn truncates(flags: u64) -> bool {
    flags & u64::from(O_TRUNC) != 0 && flags & O_PATH == 0 && flags & (O_CREAT | O_EXCL) != (O_CREAT | O_EXCL)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u64 = 0x7f10_0000_0000;
    const P: u64 = PAGE_SIZE;

    fn native(nr: i64, args: [u64; 6]) -> Decoded {
        Decoded::new(&Syscall { arch: ARCH_X86_64, nr: nr as u32, args })
    }

    fn reach(nr: i64, args: [u64; 6]) -> Reach {
        match native(nr, args) {
            Decoded::Operation(op) => op.reach(),
            other => panic!("{other:?}"),
        }
    }

    fn range(start: u64, end: u64) -> Reach {
        Reach::Ranges(PageRange::new(start, end), None)
    }

    /// A call that the filter traps must be decoded to something, and only such a call.
    #[test]
    fn what_is_trapped_is_decoded() {
        for (arch, bit, rules) in [
            (ARCH_X86_64, 0, policy::X86_64),
            (ARCH_X86_64, X32_BIT, policy::X32_OWN),
            (ARCH_X86_64, X32_BIT, policy::X86_64),
            (ARCH_I386, 0, policy::I386),
        ] {
            for rule in rules {
                // Words that meet each test of the table.
                let words =
                    [0, 1, 4, 0x10, 0x12, 0x200, 0x4000, 0xc060_6610, ummunotify_abi::wire::HELLO_PRCTL];
                let decoded = words.map(|w| {
                    // process_madvise's flags come fifth and must be 0.
                    let args = [w, w, w, w, if rule.nr == nr::PROCESS_MADVISE { 0 } else { w }, w];
                    Decoded::new(&Syscall { arch, nr: rule.nr | bit, args })
                });
                // ipc is told apart by its first argument alone; it has a test of its own.
                let told = arch == ARCH_I386 && rule.nr == i386::IPC;
                assert!(told || decoded.iter().any(|d| *d != Decoded::Ignore), "{arch:#x} {}", rule.nr);
            }
        }
        for nr in [0, 1, 3, 8, 13, 39, 58, 60, 202, 231, 232, 281, 334, 424, 426, 441, 600] {
            assert_eq!(native(nr, [u64::MAX; 6]), Decoded::Ignore, "{nr}");
        }
    }

    #[test]
    fn rings_and_other_userfaultfds_are_told() {
        assert_eq!(native(libc::SYS_io_uring_setup, [8, A, 0, 0, 0, 0]), Decoded::NewRing);
        let watch = |request| native(libc::SYS_ioctl, [3, request, A, 0, 0, 0]);
        assert_eq!(watch(0xc020_aa00), Decoded::OwnWatch { argument: A });
        assert!(matches!(watch(0x8010_aa01), Decoded::Operation(Operation::UffdRange { .. })));
    }

    #[test]
    fn what_a_watch_hinders_is_told() {
        let mremap = |start, old_len| {
            Operation::Mremap { start, old_len, new_len: 9 * P, flags: 0, destination: 0 }.fails_on_watched()
        };
        assert_eq!(mremap(A, 2 * P), Some(PageRange::new(A, A + 2 * P)));
        assert_eq!(mremap(A, 0), None);
        let collapse = |advice| Operation::Madvise { start: A, len: P, advice };
        assert_eq!(collapse(25).fails_on_watched(), Some(PageRange::new(A, A + P)));
        assert_eq!(collapse(4).fails_on_watched(), None);
        assert!(collapse(4).causes_events() && !collapse(25).causes_events());
    }

    #[test]
    fn arguments_decide() {
        let mmap = |flags: i32| native(libc::SYS_mmap, [A, P, 3, flags as u64, u64::MAX, 0]);
        assert_eq!(mmap(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS), Decoded::Ignore);
        assert_eq!(mmap(0x22 | libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE), Decoded::Ignore);
        assert!(matches!(mmap(0x32), Decoded::Operation(Operation::MmapFixed { fd: -1, .. })));
        let brk = |end| native(libc::SYS_brk, [end, 0, 0, 0, 0, 0]);
        assert_eq!(brk(0), Decoded::Ignore);
        assert_eq!(brk(A), Decoded::Operation(Operation::Brk { end: A }));
        // An int argument's high word is noise.
        let noise = 0xdead_beef << 32;
        let advice = native(libc::SYS_madvise, [A, P, noise | 4, 0, 0, 0]);
        assert_eq!(advice, Decoded::Operation(Operation::Madvise { start: A, len: P, advice: 4 }));
        assert_eq!(native(libc::SYS_madvise, [A, P, 3, 0, 0, 0]), Decoded::Ignore);
        let open = |flags: i32| native(libc::SYS_openat, [noise | 7, A, flags as u64, 0o600, 0, 0]);
        assert_eq!(open(libc::O_WRONLY | libc::O_CREAT), Decoded::Ignore);
        let truncate = Decoded::Operation(Operation::OpenTruncate { directory: 7, path: A });
        assert_eq!(open(libc::O_WRONLY | libc::O_TRUNC), truncate);
        assert_eq!(open(libc::O_TRUNC | libc::O_CREAT | libc::O_EXCL), Decoded::Ignore);
        assert_eq!(open(libc::O_TRUNC | libc::O_PATH), Decoded::Ignore);
        let pkey = |key: u64| native(libc::SYS_pkey_mprotect, [A, P, 1, key, 0, 0]);
        let protect = |pkey| Decoded::Operation(Operation::Mprotect { start: A, len: P, prot: 1, pkey });
        assert_eq!(pkey(u64::from(u32::MAX)), protect(None));
        assert_eq!(pkey(0), protect(Some(0)));
        let shmat = |flags: u64| native(libc::SYS_shmat, [5, A + 100, flags, 0, 0, 0]);
        let at = |start| Decoded::Operation(Operation::ShmatRemap { id: 5, start });
        assert_eq!(shmat(0x2000), Decoded::Ignore);
        assert_eq!(shmat(0x4000), at(A + 100));
        assert_eq!(shmat(0x6000), at(A));
        assert_eq!(native(libc::SYS_prctl, [0x554d_4d55, 1, 0, 0, 0, 0]), Decoded::Hello { version: 1 });
        assert_eq!(native(libc::SYS_execveat, [0; 6]), Decoded::Exec);
    }

    #[test]
    fn tasks() {
        let clone = |flags: i32| native(libc::SYS_clone, [flags as u64, 0, 0, 0, 0, 0]);
        assert_eq!(native(libc::SYS_fork, [0; 6]), Decoded::Fork(Operation::Fork));
        assert_eq!(clone(libc::SIGCHLD), Decoded::Fork(Operation::Fork));
        assert_eq!(clone(libc::CLONE_VM | libc::SIGCHLD), Decoded::NewTask);
        assert_eq!(clone(libc::CLONE_VM | libc::CLONE_VFORK), Decoded::Ignore);
        assert_eq!(clone(libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND), Decoded::Ignore);
        let clone3 = native(libc::SYS_clone3, [A, 88, 0, 0, 0, 0]);
        assert_eq!(clone3, Decoded::Fork(Operation::Clone3 { arguments: A, size: 88 }));
        let foreign = |nr| Decoded::new(&Syscall { arch: ARCH_I386, nr, args: [0x100; 6] });
        assert_eq!(foreign(2), Decoded::Fork(Operation::Fork));
        assert_eq!(foreign(120), Decoded::NewTask);
        assert_eq!(foreign(11), Decoded::Exec);
        assert_eq!(foreign(20), Decoded::Ignore);
    }

    #[test]
    fn calls_by_the_32_bit_entry() {
        let call = |nr, args| Decoded::new(&Syscall { arch: ARCH_I386, nr, args });
        let noise = 0xdead_beef << 32;
        let munmap = Decoded::Operation(Operation::Munmap { start: 0x1000_0000, len: P });
        assert_eq!(call(91, [noise | 0x1000_0000, P, 0, 0, 0, 0]), munmap);
        let mmap2 = call(192, [0x1000_0000, P, 3, 0x12, u64::from(u32::MAX), 3]);
        let expected =
            Operation::MmapFixed { start: 0x1000_0000, len: P, flags: 0x12, fd: -1, offset: 3 * P };
        assert_eq!(mmap2, Decoded::Operation(expected));
        assert_eq!(call(192, [0x1000_0000, P, 3, 0x22, 0, 0]), Decoded::Ignore);
        let shmdt = Decoded::Operation(Operation::Shmdt { start: 0x1000_0000 });
        assert_eq!(call(117, [22, 0, 0, 0, 0x1000_0000, 0]), shmdt);
        let shmat = Decoded::Operation(Operation::ShmatRemap { id: 5, start: 0x1000_0000 });
        assert_eq!(call(117, [0x1_0015, 5, 0x4000, 0, 0x1000_0000, 0]), shmat);
        assert_eq!(call(117, [21, 5, 0, 0, 0x1000_0000, 0]), Decoded::Ignore);
        assert_eq!(call(117, [1, 5, 0, 0, 0, 0]), Decoded::Ignore, "semop");
        for nr in [5, 8, 90, 92, 93, 193, 194, 257, 274, 294, 295, 317, 324, 437, 440] {
            let foreign = Decoded::Operation(Operation::Foreign { arch: ARCH_I386, nr });
            assert_eq!(call(nr, [0; 6]), foreign);
        }
        let x32 = Syscall { arch: ARCH_X86_64, nr: 514 | X32_BIT, args: [3, 0x402c_582b, A, 0, 0, 0] };
        assert!(matches!(Decoded::new(&x32), Decoded::Operation(Operation::Foreign { .. })));
    }

    #[test]
    fn x32_calls_stand_for_others() {
        let x32 = |nr: u32, args| Decoded::new(&Syscall { arch: ARCH_X86_64, nr: nr | X32_BIT, args });
        let munmap = Decoded::Operation(Operation::Munmap { start: A, len: P });
        assert_eq!(x32(11, [A, P, 0, 0, 0, 0]), munmap);
        assert_eq!(x32(520, [0; 6]), Decoded::Exec);
        let scan = Decoded::Operation(Operation::PagemapScan { argument: A });
        assert_eq!(x32(514, [3, 0xc060_6610, A, 0, 0, 0]), scan);
        assert!(matches!(x32(533, [0, 1, A, A, 0, 0]), Decoded::Operation(Operation::Foreign { .. })));
        assert!(matches!(x32(440, [0, A, 1, 4, 0, 0]), Decoded::Operation(Operation::Foreign { .. })));
    }

    /// Calls that can only fail reach nothing: they cost no look at the process.
    #[test]
    fn failing_calls_reach_nothing() {
        for args in [[A + 1, P], [A, 0], [A, u64::MAX], [A, 1 << 63], [1 << 63, P], [ADDRESS_END, P]] {
            assert_eq!(reach(libc::SYS_munmap, [args[0], args[1], 0, 0, 0, 0]), Reach::Nothing, "{args:x?}");
        }
        let mmap = |start, len, flags, offset| reach(libc::SYS_mmap, [start, len, 3, flags, 3, offset]);
        assert_eq!(mmap(A + 1, P, 0x32, 0), Reach::Nothing);
        assert_eq!(mmap(A, 0, 0x32, 0), Reach::Nothing);
        assert_eq!(mmap(A, P, 0x11, 1), Reach::Nothing);
        assert_eq!(mmap(A, P, 0x30, 0), Reach::Nothing, "neither shared nor private");
        let mremap = |old, new, flags, to| reach(libc::SYS_mremap, [A, old, new, flags as u64, to, 0]);
        assert_eq!(mremap(P, 2 * P, 0, 0), Reach::Nothing, "growth in place");
        assert_eq!(mremap(P, P, 1, 0), Reach::Nothing, "no change");
        assert_eq!(mremap(P, 0, 1, 0), Reach::Nothing);
        assert_eq!(mremap(P, P, 2, A), Reach::Nothing, "FIXED without MAYMOVE");
        assert_eq!(mremap(P, 2 * P, 5, A), Reach::Nothing, "DONTUNMAP that grows");
        assert_eq!(mremap(P, P, 8, 0), Reach::Nothing, "unknown flag");
        assert_eq!(mremap(4 * P, 4 * P, 3, A + P), Reach::Nothing, "overlap");
        assert_eq!(reach(libc::SYS_mprotect, [A, P, 0x100, 0, 0, 0]), Reach::Nothing, "unknown protection");
        assert_eq!(reach(libc::SYS_mprotect, [A, P, 1 << 32, 0, 0, 0]), Reach::Nothing);
        assert_eq!(reach(libc::SYS_fallocate, [3, 2, 0, P, 0, 0]), Reach::Nothing, "hole without KEEP_SIZE");
        assert_eq!(reach(libc::SYS_fallocate, [3, 3, u64::MAX, P, 0, 0]), Reach::Nothing);
        assert_eq!(reach(libc::SYS_fallocate, [3, 3, P, i64::MAX as u64, 0, 0]), Reach::Nothing);
        assert_eq!(reach(libc::SYS_ftruncate, [3, u64::MAX, 0, 0, 0, 0]), Reach::Nothing);
        assert_eq!(reach(libc::SYS_shmdt, [A + 8, 0, 0, 0, 0, 0]), Reach::Nothing);
        let clone3 = Decoded::Fork(Operation::Clone3 { arguments: A, size: 8 });
        assert_eq!(native(libc::SYS_clone3, [A, 8, 0, 0, 0, 0]), clone3);
        assert_eq!(Operation::Clone3 { arguments: A, size: 8 }.reach(), Reach::Nothing);
    }

    #[test]
    fn reaches_are_the_widest() {
        assert_eq!(reach(libc::SYS_munmap, [A, 1, 0, 0, 0, 0]), range(A, A + P));
        let tagged = A | 0x1f << 57;
        assert_eq!(reach(libc::SYS_munmap, [tagged, 1, 0, 0, 0, 0]), range(A, A + P), "masked address bits");
        let file = [A, P, 3, 0x11, 3, 0];
        assert_eq!(reach(libc::SYS_mmap, file), range(A, A + HUGE_1G), "a file may have huge pages");
        let odd = [A + P, P, 3, 0x11, 3, 0];
        assert_eq!(reach(libc::SYS_mmap, odd), range(A + P, A + 2 * P), "but not at this address");
        let mremap = |flags: u64| reach(libc::SYS_mremap, [A + P, 4 * P, 2 * P, flags, 2 * A + P, 0]);
        assert_eq!(mremap(0), range(A + 3 * P, A + 5 * P));
        let (target, source) = (PageRange::new(2 * A + P, 2 * A + 3 * P), PageRange::new(A + P, A + 5 * P));
        assert_eq!(mremap(3), Reach::Ranges(target, Some(source)));
        let down = [A, P, PROT_GROWSDOWN | 7, 0, 0, 0];
        assert_eq!(reach(libc::SYS_mprotect, down), range(0, A + P), "the stack, from its end on");
        assert_eq!(reach(libc::SYS_brk, [A + 1, 0, 0, 0, 0, 0]), range(A + P, u64::MAX));
        assert_eq!(reach(libc::SYS_madvise, [A, P, 9, 0, 0, 0]), Reach::AnyFileMapping);
    }

    /// A growing heap must not cost a look at every mapping above it.
    #[test]
    fn a_known_heap_narrows_brk() {
        let brk = Operation::Brk { end: A + 4 * P };
        assert_eq!(brk.reach_with_heap(A + 4 * P), Reach::Nothing);
        assert_eq!(brk.reach_with_heap(A + 2 * P), Reach::Nothing);
        assert_eq!(brk.reach_with_heap(A + 5 * P + 1), range(A + 4 * P, A + 6 * P));
        let munmap = Operation::Munmap { start: A, len: P };
        assert_eq!(munmap.reach_with_heap(0), munmap.reach());
    }
}
