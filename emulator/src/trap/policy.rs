//! Which system calls are watched, by number and arguments: the table that the filter is built from.
//!
//! A call is watched if it can invalidate mappings that exist, or if the supervisor must know of it (a new
//! task, exec). A call that only adds mappings isn't. `int` arguments are compared in their low word, because
//! the kernel drops the high one; registers hold whatever the caller left there.

/// `AUDIT_ARCH_X86_64`; x32 calls carry it too, with [`X32_BIT`] in the number.
pub const ARCH_X86_64: u32 = 0xc000_003e;
/// `AUDIT_ARCH_I386`: `int 0x80`, also from a 64-bit process.
pub const ARCH_I386: u32 = 0x4000_0003;
/// `__X32_SYSCALL_BIT`.
pub const X32_BIT: u32 = 0x4000_0000;

/// What is trapped beside the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Policy {
    /// 64-bit calls that come from there are let through.
    pub gate: Option<Gate>,
    /// The device's own calls are trapped too, for programs into which nothing can be preloaded. What reads and
    /// maps is told by the descriptor's number, which lies in this band.
    pub device: Option<Band>,
}

/// Return addresses of the `syscall` instructions of the inline layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gate {
    /// Of the one whose calls were recorded before they are made.
    pub calls: u64,
    /// Of the one by which clone3 is made where it makes a thread or a vfork child.
    pub tasks: u64,
}

/// Numbers that are kept for descriptors of the device: `first` up to and with `last`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Band {
    /// The lowest.
    pub first: u32,
    /// The highest.
    pub last: u32,
}

impl Band {
    /// The band for a process that may have `limit` descriptors: 64 numbers below 1024, where select reaches
    /// them, and at most a quarter of what there is. `None` if there is too little to divide.
    pub fn below(limit: u64) -> Option<Self> {
        let end = u32::try_from(limit.min(1024)).ok().filter(|end| *end >= 16)?;
        Some(Self { first: end - (end / 4).min(64), last: end - 1 })
    }

    /// Whether a descriptor lies in it.
    pub const fn has(self, fd: i32) -> bool {
        fd >= 0 && fd as u32 >= self.first && fd as u32 <= self.last
    }
}

/// A condition on the arguments of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Test {
    /// Always.
    Always,
    /// Some bit of the mask is set in the argument's low word.
    AnyBit(u8, u32),
    /// No bit of the mask is set in the argument's low word.
    NoBit(u8, u32),
    /// The argument's low word is one of these.
    OneOf(u8, &'static [u32]),
    /// The argument's low word is none of these.
    NoneOf(u8, &'static [u32]),
    /// The argument isn't 0, all 64 bits of it.
    NotZero(u8),
    /// The argument's low word lies in the band of [`Policy::device`].
    InBand(u8),
    /// The second argument isn't [`ummunotify_abi::wire::PRESENT`]: such a call the filter answers by itself.
    NotPresence,
    /// Each of these.
    Each(&'static [Test]),
    /// At least one of these.
    Some(&'static [Test]),
}

/// A watched call.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Its number.
    pub nr: u32,
    /// When it is watched.
    pub test: Test,
}

const fn rule(nr: u32, test: Test) -> Rule {
    Rule { nr, test }
}

pub(crate) const MAP_FIXED: u32 = 0x10;
pub(crate) const MAP_FIXED_NOREPLACE: u32 = 0x10_0000;
const MAP_ANONYMOUS: u32 = 0x20;
pub(crate) const SHM_REMAP: u32 = 0x4000;
pub(crate) const O_TRUNC: u32 = 0x200;
pub(crate) const CLONE_VM: u32 = 0x100;
pub(crate) const CLONE_VFORK: u32 = 0x4000;
pub(crate) const CLONE_THREAD: u32 = 0x1_0000;
/// `MPOL_MF_MOVE | MPOL_MF_MOVE_ALL`.
pub(crate) const MPOL_MOVE: u32 = 0x6;
/// `FALLOC_FL_KEEP_SIZE`.
pub(crate) const KEEP_SIZE: u32 = 0x1;
/// `FALLOC_FL_UNSHARE_RANGE`.
pub(crate) const UNSHARE_RANGE: u32 = 0x40;

/// `ioctl` numbers.
pub(crate) mod request {
    pub(crate) const PAGEMAP_SCAN: u32 = 0xc060_6610;
    pub(crate) const UFFDIO_WRITEPROTECT: u32 = 0xc018_aa06;
    pub(crate) const UFFDIO_REGISTER: u32 = 0xc020_aa00;
    pub(crate) const UFFDIO_UNREGISTER: u32 = 0x8010_aa01;
    pub(crate) const UFFDIO_MOVE: u32 = 0xc028_aa05;
    /// `FS_IOC_UNRESVSP`, of any file system: the VFS makes a hole punch of it (`ioctl_preallocate`).
    pub(crate) const UNRESVSP: u32 = 0x4030_5829;
    /// `FS_IOC_UNRESVSP64`: likewise.
    pub(crate) const UNRESVSP64: u32 = 0x4030_582b;
    /// `FS_IOC_ZERO_RANGE`: likewise, FALLOC_FL_ZERO_RANGE.
    pub(crate) const ZERO_RANGE: u32 = 0x4030_5839;
    /// The same by 32-bit entries (`FS_IOC_UNRESVSP_32` and so on).
    pub(crate) const UNRESVSP_32: u32 = 0x402c_5829;
    pub(crate) const UNRESVSP64_32: u32 = 0x402c_582b;
    pub(crate) const ZERO_RANGE_32: u32 = 0x402c_5839;
}

/// Advices of `madvise`.
pub(crate) mod advice {
    pub(crate) const DONTNEED: i32 = 4;
    pub(crate) const FREE: i32 = 8;
    pub(crate) const REMOVE: i32 = 9;
    pub(crate) const UNMERGEABLE: i32 = 13;
    pub(crate) const PAGEOUT: i32 = 21;
    pub(crate) const DONTNEED_LOCKED: i32 = 24;
    pub(crate) const COLLAPSE: i32 = 25;
    pub(crate) const HWPOISON: i32 = 100;
    pub(crate) const SOFT_OFFLINE: i32 = 101;
    pub(crate) const GUARD_INSTALL: i32 = 102;

    /// Those that invalidate.
    pub(crate) const WATCHED: [i32; 10] = [
        DONTNEED,
        FREE,
        REMOVE,
        UNMERGEABLE,
        PAGEOUT,
        DONTNEED_LOCKED,
        COLLAPSE,
        HWPOISON,
        SOFT_OFFLINE,
        GUARD_INSTALL,
    ];
}

const ADVICES: &[u32] = &{
    let mut out = [0; advice::WATCHED.len()];
    let mut i = 0;
    while i < out.len() {
        out[i] = advice::WATCHED[i] as u32;
        i += 1;
    }
    out
};

const REQUESTS: &[u32] = &[
    request::PAGEMAP_SCAN,
    request::UFFDIO_WRITEPROTECT,
    request::UFFDIO_REGISTER,
    request::UFFDIO_UNREGISTER,
    request::UFFDIO_MOVE,
    request::UNRESVSP,
    request::UNRESVSP64,
    request::ZERO_RANGE,
];

/// By the entries whose `struct space_resv` is packed, which makes other numbers.
const COMPAT_REQUESTS: &[u32] = &[
    request::PAGEMAP_SCAN,
    request::UFFDIO_WRITEPROTECT,
    request::UFFDIO_REGISTER,
    request::UFFDIO_UNREGISTER,
    request::UFFDIO_MOVE,
    request::UNRESVSP_32,
    request::UNRESVSP64_32,
    request::ZERO_RANGE_32,
];

/// MAP_FIXED alone replaces; with MAP_FIXED_NOREPLACE the kernel refuses to (4.17).
pub(crate) const REPLACES: Test =
    Test::Each(&[Test::AnyBit(3, MAP_FIXED), Test::NoBit(3, MAP_FIXED_NOREPLACE)]);
/// A copy of the address space, or a task on it that is neither a thread nor waited for.
const COPIES_OR_SHARES: Test =
    Test::Some(&[Test::NoBit(0, CLONE_VM), Test::NoBit(0, CLONE_THREAD | CLONE_VFORK)]);
/// Anything but plain allocation.
const DEALLOCATES: Test = Test::NoneOf(1, &[0, KEEP_SIZE, UNSHARE_RANGE]);
const HELLO: Test =
    Test::Each(&[Test::OneOf(0, &[ummunotify_abi::wire::HELLO_PRCTL as u32]), Test::NotPresence]);

/// Requests of ioctl that the VFS answers for any file: FIONCLEX, FIOCLEX, FIONBIO, FIOASYNC.
const ANY_FILES: &[u32] = &[0x5450, 0x5451, 0x5421, 0x5452];
/// The device's own, on whatever descriptor.
const DEVICE_REQUESTS: &[u32] = &[
    ummunotify_abi::device::EXCHANGE_FEATURES,
    ummunotify_abi::device::REGISTER_REGION,
    ummunotify_abi::device::UNREGISTER_REGION,
];
/// F_DUPFD, F_DUPFD_CLOEXEC, and the size of a pipe, which the device isn't: F_SETPIPE_SZ, F_GETPIPE_SZ.
const COPIES_OR_SIZES: &[u32] = &[0, 1030, 1031, 1032];
/// Neither the wait of a shim nor a descriptor of something else.
const READS: Test =
    Test::Each(&[Test::InBand(0), Test::NoneOf(2, &[ummunotify_abi::wire::WAIT_LENGTH as u32])]);

/// What is trapped beside [`X86_64`], or instead of what stands there for the same number, where the device's own
/// calls are trapped.
pub const DEVICE: &[Rule] = &[
    rule(nr::READ, READS),
    rule(nr::OPEN, Test::Always),
    rule(nr::MMAP, Test::Some(&[REPLACES, Test::Each(&[Test::InBand(4), Test::NoBit(3, MAP_ANONYMOUS)])])),
    rule(
        nr::IOCTL,
        Test::Some(&[
            Test::OneOf(1, REQUESTS),
            Test::OneOf(1, DEVICE_REQUESTS),
            Test::Each(&[Test::InBand(0), Test::NoneOf(1, ANY_FILES)]),
        ]),
    ),
    rule(nr::PREAD64, Test::InBand(0)),
    rule(nr::PWRITE64, Test::InBand(0)),
    rule(nr::READV, Test::InBand(0)),
    rule(nr::DUP, Test::InBand(0)),
    rule(nr::DUP2, Test::InBand(0)),
    rule(nr::FCNTL, Test::Each(&[Test::InBand(0), Test::OneOf(1, COPIES_OR_SIZES)])),
    rule(nr::OPENAT, Test::Always),
    rule(nr::DUP3, Test::InBand(0)),
    rule(nr::PREADV, Test::InBand(0)),
    rule(nr::PWRITEV, Test::InBand(0)),
    rule(nr::PREADV2, Test::InBand(0)),
    rule(nr::PWRITEV2, Test::InBand(0)),
];

/// Numbers of the calls, x86-64.
pub(crate) mod nr {
    #![allow(missing_docs)]
    pub const READ: u32 = 0;
    pub const PREAD64: u32 = 17;
    pub const PWRITE64: u32 = 18;
    pub const READV: u32 = 19;
    pub const DUP: u32 = 32;
    pub const DUP2: u32 = 33;
    pub const DUP3: u32 = 292;
    pub const FCNTL: u32 = 72;
    pub const PREADV: u32 = 295;
    pub const PWRITEV: u32 = 296;
    pub const PREADV2: u32 = 327;
    pub const PWRITEV2: u32 = 328;
    pub const OPEN: u32 = 2;
    pub const MMAP: u32 = 9;
    pub const MPROTECT: u32 = 10;
    pub const MUNMAP: u32 = 11;
    pub const BRK: u32 = 12;
    pub const IOCTL: u32 = 16;
    pub const MREMAP: u32 = 25;
    pub const MADVISE: u32 = 28;
    pub const SHMAT: u32 = 30;
    pub const CLONE: u32 = 56;
    pub const FORK: u32 = 57;
    pub const EXECVE: u32 = 59;
    pub const SHMDT: u32 = 67;
    pub const TRUNCATE: u32 = 76;
    pub const FTRUNCATE: u32 = 77;
    pub const CREAT: u32 = 85;
    pub const PRCTL: u32 = 157;
    pub const REMAP_FILE_PAGES: u32 = 216;
    pub const MBIND: u32 = 237;
    pub const MIGRATE_PAGES: u32 = 256;
    pub const OPENAT: u32 = 257;
    pub const MOVE_PAGES: u32 = 279;
    pub const FALLOCATE: u32 = 285;
    pub const EXECVEAT: u32 = 322;
    pub const PKEY_MPROTECT: u32 = 329;
    pub const IO_URING_SETUP: u32 = 425;
    pub const CLONE3: u32 = 435;
    pub const OPENAT2: u32 = 437;
    pub const PROCESS_MADVISE: u32 = 440;

    pub const X32_IOCTL: u32 = 514;
    pub const X32_EXECVE: u32 = 520;
    pub const X32_MOVE_PAGES: u32 = 533;
    pub const X32_EXECVEAT: u32 = 545;
}

/// x86-64, by ascending number.
pub const X86_64: &[Rule] = &[
    rule(nr::OPEN, Test::AnyBit(1, O_TRUNC)),
    rule(nr::MMAP, REPLACES),
    rule(nr::MPROTECT, Test::Always),
    rule(nr::MUNMAP, Test::Always),
    rule(nr::BRK, Test::NotZero(0)),
    rule(nr::IOCTL, Test::OneOf(1, REQUESTS)),
    rule(nr::MREMAP, Test::Always),
    rule(nr::MADVISE, Test::OneOf(2, ADVICES)),
    rule(nr::SHMAT, Test::AnyBit(2, SHM_REMAP)),
    rule(nr::CLONE, COPIES_OR_SHARES),
    rule(nr::FORK, Test::Always),
    rule(nr::EXECVE, Test::Always),
    rule(nr::SHMDT, Test::Always),
    rule(nr::TRUNCATE, Test::Always),
    rule(nr::FTRUNCATE, Test::Always),
    rule(nr::CREAT, Test::Always),
    rule(nr::PRCTL, HELLO),
    rule(nr::REMAP_FILE_PAGES, Test::Always),
    rule(nr::MBIND, Test::AnyBit(5, MPOL_MOVE)),
    rule(nr::MIGRATE_PAGES, Test::Always),
    rule(nr::OPENAT, Test::AnyBit(2, O_TRUNC)),
    rule(nr::MOVE_PAGES, Test::NotZero(3)),
    rule(nr::FALLOCATE, DEALLOCATES),
    rule(nr::EXECVEAT, Test::Always),
    rule(nr::PKEY_MPROTECT, Test::Always),
    rule(nr::IO_URING_SETUP, Test::Always),
    rule(nr::CLONE3, Test::Always),
    rule(nr::OPENAT2, Test::Always),
    rule(nr::PROCESS_MADVISE, Test::OneOf(3, ADVICES)),
];

/// x32's own numbers (with [`X32_BIT`] taken off), by ascending number; the others are x86-64's.
pub const X32_OWN: &[Rule] = &[
    rule(nr::X32_IOCTL, Test::OneOf(1, COMPAT_REQUESTS)),
    rule(nr::X32_EXECVE, Test::Always),
    rule(nr::X32_MOVE_PAGES, Test::NotZero(3)),
    rule(nr::X32_EXECVEAT, Test::Always),
];

/// Numbers of the calls, i386.
pub(crate) mod i386 {
    #![allow(missing_docs)]
    pub const FORK: u32 = 2;
    pub const OPEN: u32 = 5;
    pub const CREAT: u32 = 8;
    pub const EXECVE: u32 = 11;
    pub const BRK: u32 = 45;
    pub const IOCTL: u32 = 54;
    pub const MMAP: u32 = 90;
    pub const MUNMAP: u32 = 91;
    pub const TRUNCATE: u32 = 92;
    pub const FTRUNCATE: u32 = 93;
    pub const IPC: u32 = 117;
    pub const CLONE: u32 = 120;
    pub const MPROTECT: u32 = 125;
    pub const MREMAP: u32 = 163;
    pub const MMAP2: u32 = 192;
    pub const TRUNCATE64: u32 = 193;
    pub const FTRUNCATE64: u32 = 194;
    pub const MADVISE: u32 = 219;
    pub const REMAP_FILE_PAGES: u32 = 257;
    pub const MBIND: u32 = 274;
    pub const MIGRATE_PAGES: u32 = 294;
    pub const OPENAT: u32 = 295;
    pub const MOVE_PAGES: u32 = 317;
    pub const FALLOCATE: u32 = 324;
    pub const EXECVEAT: u32 = 358;
    pub const PKEY_MPROTECT: u32 = 380;
    pub const SHMAT: u32 = 397;
    pub const SHMDT: u32 = 398;
    pub const IO_URING_SETUP: u32 = 425;
    pub const CLONE3: u32 = 435;
    pub const OPENAT2: u32 = 437;
    pub const PROCESS_MADVISE: u32 = 440;
}

/// i386, by ascending number. Old mmap's arguments lie behind a pointer, ipc's call has a version beside it:
/// always.
pub const I386: &[Rule] = &[
    rule(i386::FORK, Test::Always),
    rule(i386::OPEN, Test::AnyBit(1, O_TRUNC)),
    rule(i386::CREAT, Test::Always),
    rule(i386::EXECVE, Test::Always),
    rule(i386::BRK, Test::NotZero(0)),
    rule(i386::IOCTL, Test::OneOf(1, COMPAT_REQUESTS)),
    rule(i386::MMAP, Test::Always),
    rule(i386::MUNMAP, Test::Always),
    rule(i386::TRUNCATE, Test::Always),
    rule(i386::FTRUNCATE, Test::Always),
    rule(i386::IPC, Test::Always),
    rule(i386::CLONE, COPIES_OR_SHARES),
    rule(i386::MPROTECT, Test::Always),
    rule(i386::MREMAP, Test::Always),
    rule(i386::MMAP2, REPLACES),
    rule(i386::TRUNCATE64, Test::Always),
    rule(i386::FTRUNCATE64, Test::Always),
    rule(i386::MADVISE, Test::OneOf(2, ADVICES)),
    rule(i386::REMAP_FILE_PAGES, Test::Always),
    rule(i386::MBIND, Test::AnyBit(5, MPOL_MOVE)),
    rule(i386::MIGRATE_PAGES, Test::Always),
    rule(i386::OPENAT, Test::AnyBit(2, O_TRUNC)),
    rule(i386::MOVE_PAGES, Test::NotZero(3)),
    rule(i386::FALLOCATE, DEALLOCATES),
    rule(i386::EXECVEAT, Test::Always),
    rule(i386::PKEY_MPROTECT, Test::Always),
    rule(i386::SHMAT, Test::AnyBit(2, SHM_REMAP)),
    rule(i386::SHMDT, Test::Always),
    rule(i386::IO_URING_SETUP, Test::Always),
    rule(i386::CLONE3, Test::Always),
    rule(i386::OPENAT2, Test::Always),
    rule(i386::PROCESS_MADVISE, Test::OneOf(3, ADVICES)),
];
