//! The inline layer's view of a system call: what it may touch, from its registers alone.
//!
//! A call at a patched site is first looked at here, in the process that makes it. Only what is plain is decided:
//! a call that isn't watched goes on as it is, one that touches at most two known ranges may be made without a trap
//! if no region lies there, and everything else is left to the traps. The ranges are never narrower than those that
//! the supervisor computes; the tests of the emulator hold the two against each other.
//!
//! The shim runs this where vector registers hold the application's values: no arrays are copied here.
#![no_std]
#![deny(missing_docs)]
#![forbid(unsafe_code)]

use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

/// Where the shim's image lies, so that its gate has the same address in every process of a tree: below where Linux puts
/// position-independent executables (ELF_ET_DYN_BASE). The sanitizers, which divide the address space, have that for
/// programs, too; ThreadSanitizer ends one that has anything between 0x5680_0000_0000 and 0x7b00_0000_0000.
pub const IMAGE_BASE: u64 = 0x5500_0000_0000;
/// Bytes from [`IMAGE_BASE`] in which the gate may lie.
pub const IMAGE_SPAN: u64 = 1 << 24;

/// Numbers of the calls whose sites are patched, x86-64.
pub mod nr {
    /// mmap.
    pub const MMAP: u32 = 9;
    /// mprotect.
    pub const MPROTECT: u32 = 10;
    /// munmap.
    pub const MUNMAP: u32 = 11;
    /// mremap.
    pub const MREMAP: u32 = 25;
    /// madvise.
    pub const MADVISE: u32 = 28;
    /// pkey_mprotect.
    pub const PKEY_MPROTECT: u32 = 329;
    /// execve.
    pub const EXECVE: u32 = 59;
    /// clone3.
    pub const CLONE3: u32 = 435;
}

/// The mapping calls of [`nr`]. Not brk: where the heap ends is the supervisor's to know. Never fork.
pub const NUMBERS: [u32; 6] =
    [nr::MMAP, nr::MPROTECT, nr::MUNMAP, nr::MREMAP, nr::MADVISE, nr::PKEY_MPROTECT];

/// Calls that touch no mapping of the caller's in the usual case, which doesn't show in the registers.
pub const TASKS: [u32; 2] = [nr::EXECVE, nr::CLONE3];

/// Whether a clone3 with these flags makes a thread, or a child that uses the caller's memory while the caller waits
/// for it: then nothing is copied, and nobody comes that would have to be known.
pub const fn shares_memory(flags: u64) -> bool {
    const CLONE_VM: u64 = 0x100;
    const CLONE_VFORK: u64 = 0x4000;
    const CLONE_THREAD: u64 = 0x1_0000;
    flags & CLONE_VM != 0 && flags & (CLONE_VFORK | CLONE_THREAD) != 0
}

/// What becomes of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plan {
    /// It isn't watched: the filter lets it through wherever it is made.
    Pass,
    /// It isn't plain, or can only fail: let it be trapped.
    Trap,
    /// It touches nothing outside these two ranges; the second may be empty.
    Within(PageRange, PageRange),
}

/// No range.
pub const NOWHERE: PageRange = PageRange::new(0, 0);

/// mmap without it takes nothing away.
pub const MAP_FIXED: u64 = 0x10;
const MAP_ANONYMOUS: u64 = 0x20;
const MAP_HUGETLB: u64 = 0x4_0000;
const MAP_FIXED_NOREPLACE: u64 = 0x10_0000;
const MREMAP_MAYMOVE: u64 = 1;
const MREMAP_FIXED: u64 = 2;
const MREMAP_DONTUNMAP: u64 = 4;
/// Read, write, execute, and PROT_SEM, which is never used.
const PROT_KNOWN: u64 = 0xf;
/// Drops pages: touches what a munmap would.
pub const MADV_DONTNEED: u32 = 4;
const MADV_FREE: u32 = 8;
const MADV_DONTNEED_LOCKED: u32 = 24;
const HUGE_2M: u64 = 2 << 20;
const HUGE_1G: u64 = 1 << 30;
/// Where user addresses end at the most (five-level page tables).
const ADDRESS_END: u64 = (1 << 56) - PAGE_SIZE;

/// What the call of that number with these arguments may touch.
#[inline(always)]
pub fn plan(number: u32, a: &[u64; 6]) -> Plan {
    match number {
        nr::MUNMAP => within(pages_untagged(a[0], a[1])),
        nr::MMAP => {
            let flags = a[3];
            if flags & MAP_FIXED == 0 || flags & MAP_FIXED_NOREPLACE != 0 {
                return Plan::Pass;
            }
            // What a file's mapping is rounded up to isn't known here.
            let plain = flags & MAP_ANONYMOUS != 0 && flags & MAP_HUGETLB == 0;
            within(if plain { pages(a[0], a[1]) } else { huge_pages(a[0], a[1]) })
        }
        nr::MPROTECT | nr::PKEY_MPROTECT if a[2] & !PROT_KNOWN == 0 => within(pages_untagged(a[0], a[1])),
        nr::MADVISE => match a[2] as u32 {
            MADV_DONTNEED | MADV_FREE | MADV_DONTNEED_LOCKED => within(pages_untagged(a[0], a[1])),
            // REMOVE, UNMERGEABLE, PAGEOUT, COLLAPSE, HWPOISON, SOFT_OFFLINE, GUARD_INSTALL.
            9 | 13 | 21 | 25 | 100..=102 => Plan::Trap,
            _ => Plan::Pass,
        },
        nr::MREMAP => mremap(untagged(a[0]), a[1], a[2], a[3], a[4]),
        _ => Plan::Trap,
    }
}

#[inline(always)]
fn mremap(start: u64, old: u64, new: u64, flags: u64, destination: u64) -> Plan {
    let known = flags & !(MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP) == 0;
    let (Some(source), Some(target)) = (huge_pages(start, old), huge_pages(start, new)) else {
        return Plan::Trap;
    };
    if !known {
        return Plan::Trap;
    }
    if flags & (MREMAP_FIXED | MREMAP_DONTUNMAP) != 0 {
        let Some(destination) = huge_pages(destination, new) else { return Plan::Trap };
        return if flags & MREMAP_FIXED != 0 {
            Plan::Within(source, destination)
        } else {
            Plan::Within(source, NOWHERE)
        };
    }
    if target.end < source.end {
        // A shrink takes the tail. The lengths are rounded as one, so a large page's rest is in it.
        let from = start.saturating_add(new.saturating_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1));
        return Plan::Within(PageRange::new(from, source.end), NOWHERE);
    }
    Plan::Within(source, NOWHERE)
}

#[inline(always)]
fn within(range: Option<PageRange>) -> Plan {
    match range {
        Some(range) => Plan::Within(range, NOWHERE),
        None => Plan::Trap,
    }
}

/// Whole pages that lie below the end of user addresses, as [`PageRange::pages`] has them. In few instructions: a length
/// of 0, and one that has no whole pages, come out as an end that isn't behind the start.
#[inline(always)]
fn pages(start: u64, len: u64) -> Option<PageRange> {
    let end = start.wrapping_add(len.wrapping_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1));
    if start.is_multiple_of(PAGE_SIZE) && end > start && end <= ADDRESS_END {
        Some(PageRange::new(start, end))
    } else {
        None
    }
}

/// The same of an address that may have a tag, which is rare.
#[inline(always)]
fn pages_untagged(start: u64, len: u64) -> Option<PageRange> {
    match pages(start, len) {
        None => pages(untagged(start), len),
        plain => plain,
    }
}

/// The same, rounded up to the large page that `start` may be the first byte of.
#[inline(always)]
fn huge_pages(start: u64, len: u64) -> Option<PageRange> {
    let range = pages(start, len)?;
    let unit = if start.is_multiple_of(HUGE_1G) {
        HUGE_1G
    } else if start.is_multiple_of(HUGE_2M) {
        HUGE_2M
    } else {
        PAGE_SIZE
    };
    let len = (range.end - range.start + (unit - 1)) & !(unit - 1);
    Some(PageRange::new(start, start + len))
}

/// False if a munmap of that range, which starts and ends at pages, can't take hugetlb memory away: such mappings
/// start and end at large pages, of 2 MiB at least, and are only cut there (`hugetlb_vm_op_split`), so a range without
/// a whole one holds none of it, or is refused before anything is invalidated.
pub const fn has_large_page(range: PageRange) -> bool {
    range.end & !(HUGE_2M - 1) > range.start.saturating_add(HUGE_2M - 1) & !(HUGE_2M - 1)
}

/// An address without the tag that Linear Address Masking allows.
#[inline(always)]
fn untagged(address: u64) -> u64 {
    if address >> 63 == 0 { address & ((1 << 57) - 1) } else { address }
}
