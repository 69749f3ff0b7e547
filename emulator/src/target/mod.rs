//! What can be learned about a process that is stopped in a system call, from outside.
//!
//! Nothing here is trusted: a process can lie about anything but its mapping table, and die between two
//! reads. Each read can fail; what follows from that is decided in [`mod@crate::trap::effect`].

pub mod kernel;
pub mod maps;
pub mod memory;
pub mod process;
mod walk;

use std::fmt;
use std::sync::Arc;

use ummunotify_abi::PageRange;

pub use kernel::KernelTraits;
pub use maps::Mapping;
pub use process::ProcessTarget;

/// A device number, as the mapping table and `stat` name it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Device {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl Device {
    /// From `st_dev`.
    pub fn from_stat(dev: u64) -> Self {
        Self { major: nix::sys::stat::major(dev) as u32, minor: nix::sys::stat::minor(dev) as u32 }
    }
}

/// How a file's system treats mappings of the file when the file shrinks, and how far its identity holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FileKind {
    /// tmpfs: memfd, SysV and shared anonymous memory too.
    Tmpfs,
    /// hugetlbfs, with the size of its pages.
    Hugetlb(u64),
    /// A file system on a disk or a server whose `stat` and mapping table agree on inodes.
    Disk,
    /// One whose `stat` and mapping table may name different files (overlayfs), or one that isn't known.
    Stacked,
}

/// Which file, and what it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileIdentity {
    /// Its device.
    pub device: Device,
    /// Its inode.
    pub inode: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Its kind.
    pub kind: FileKind,
}

/// An open descriptor of the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// The regular file (or block device) behind it, if it is one.
    pub file: Option<FileIdentity>,
    /// Open for reading.
    pub readable: bool,
    /// Open for writing.
    pub writable: bool,
}

/// What a path of the process leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathTarget {
    /// A regular file.
    File(FileIdentity),
    /// Nothing, or something that can't be truncated.
    NoFile,
    /// It can't be said from outside.
    Unknown,
}

/// Which source of knowledge failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// `/proc/TID/status`.
    Status,
    /// `/proc/TID/maps`.
    Maps,
    /// `/proc/TID/smaps`.
    Smaps,
    /// A descriptor.
    Descriptor,
    /// The process's memory.
    Memory,
    /// Anything else.
    Other,
}

/// A read that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unreadable {
    /// What was read.
    pub source: Source,
    /// The errno, or 0 if the text wasn't what it should be.
    pub errno: i32,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.source {
            Source::Status => "its status",
            Source::Maps => "its mapping table",
            Source::Smaps => "its mapping table with flags",
            Source::Descriptor => "a descriptor",
            Source::Memory => "its memory",
            Source::Other => "the process",
        };
        write!(f, "can't read {what}: {}", nix::errno::Errno::from_raw(self.errno).desc())
    }
}

impl std::error::Error for Unreadable {}

/// The result of a read.
pub type Result<T> = std::result::Result<T, Unreadable>;

/// A task that waits in a system call, and its process.
pub trait Target {
    /// Whether a region may overlap `range`: spares reads that matter to nobody. True when in doubt.
    fn watches(&self, range: PageRange) -> bool {
        let _ = range;
        true
    }

    /// The mapping table, ascending and without overlaps.
    fn mappings(&mut self) -> Result<Arc<[Mapping]>>;

    /// What of the mapping table overlaps these ranges, and perhaps more of it.
    fn mappings_over(&mut self, ranges: &[PageRange]) -> Result<Arc<[Mapping]>>;

    /// The mapping table with [`Mapping::flags`]; much slower.
    fn mappings_with_flags(&mut self) -> Result<Arc<[Mapping]>>;

    /// Locked memory (VmLck), in KiB.
    fn locked_kib(&mut self) -> Result<u64>;

    /// True only if no other task runs on the address space.
    fn single_task(&mut self) -> Result<bool>;

    /// The descriptor `fd`; None if it isn't open.
    fn descriptor(&mut self, fd: i32) -> Result<Option<Descriptor>>;

    /// Fills `buffer` from `address`.
    fn read_memory(&mut self, address: u64, buffer: &mut [u8]) -> Result<()>;

    /// Where the path string at `path` leads from `directory` (a descriptor or AT_FDCWD).
    fn resolve_path(&mut self, directory: i32, path: u64) -> Result<PathTarget>;

    /// The size of the SysV segment `id`; None if there is none.
    fn shm_size(&mut self, id: i32) -> Result<Option<u64>>;

    /// Whether the pidfd `fd` names the process itself; false if it isn't an open pidfd.
    fn pidfd_is_self(&mut self, fd: i32) -> Result<bool>;

    /// Whether `pid`, as the process itself counts, is one of its tasks. 0 is.
    fn pid_is_self(&mut self, pid: i32) -> Result<bool>;

    /// The least address that brk accepts.
    fn heap_floor(&mut self) -> Result<u64>;

    /// Whether the personality makes PROT_READ imply PROT_EXEC.
    fn read_implies_exec(&mut self) -> Result<bool>;

    /// The kind of the file system with this device: [`FileKind::Stacked`] when in doubt.
    fn device_kind(&mut self, device: Device) -> FileKind;

    /// How the running kernel behaves.
    fn kernel(&self) -> &KernelTraits;
}
