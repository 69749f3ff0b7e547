//! A process as `/proc` shows it.
//!
//! Every read goes by the id of the task that waits (which may be any thread), so that its own descriptors,
//! root and working directory are seen even where it doesn't share them. Reads may block on file systems that
//! user space serves; whoever calls this does so with a deadline.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, lstat, stat};
use nix::sys::statfs::{FsType, Statfs, fstatfs, statfs};
use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;
use ummunotify_sys::maps::Table;
use ummunotify_sys::process;

use super::maps::{self, Mapping};
use super::walk;
use super::{
    Descriptor, Device, FileIdentity, FileKind, KernelTraits, PathTarget, Result, Source, Target, Unreadable,
};
use crate::trap::operation::AT_FDCWD;

/// Longest path, with its end (`PATH_MAX`).
const PATH_MAX: usize = 4096;

/// A waiting task and its process, read as needed; each table once.
pub struct ProcessTarget<'a> {
    tid: i32,
    shares: bool,
    owner: Option<i32>,
    kernel: &'a KernelTraits,
    watches: Option<&'a dyn Fn(PageRange) -> bool>,
    seam: Option<&'a dyn Fn(u64) -> bool>,
    status: OnceCell<Status>,
    maps: OnceCell<Arc<[Mapping]>>,
    smaps: OnceCell<Arc<[Mapping]>>,
    devices: OnceCell<BTreeMap<Device, FileKind>>,
}

impl fmt::Debug for ProcessTarget<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessTarget").field("tid", &self.tid).field("shares", &self.shares).finish()
    }
}

#[derive(Clone, Copy, Debug)]
struct Status {
    tgid: i32,
    /// Thread and process as the innermost pid namespace counts.
    inner_tid: i32,
    inner_tgid: i32,
    threads: u64,
    locked_kib: u64,
}

impl<'a> ProcessTarget<'a> {
    /// The task `tid`, as this process's `/proc` counts. `shares`: another process is known to run on the same
    /// address space (a vfork child calls, or a task was made with CLONE_VM and without CLONE_THREAD).
    pub fn new(tid: i32, shares: bool, kernel: &'a KernelTraits) -> Self {
        Self {
            tid,
            shares,
            owner: None,
            kernel,
            watches: None,
            seam: None,
            status: OnceCell::new(),
            maps: OnceCell::new(),
            smaps: OnceCell::new(),
            devices: OnceCell::new(),
        }
    }

    /// The address space is that of process `pid`: a task of another process on it (vfork, CLONE_VM) has company
    /// by its nature.
    pub fn owned_by(mut self, pid: i32) -> Self {
        self.owner = Some(pid);
        self
    }

    /// Asks `watches` whether a range matters before the slowest reads.
    pub fn watching(mut self, watches: &'a dyn Fn(PageRange) -> bool) -> Self {
        self.watches = Some(watches);
        self
    }

    /// Shows the mapping table without the borders between mappings that `seam` claims: without those that
    /// watching a part of a mapping makes.
    pub fn without_seams(mut self, seam: &'a dyn Fn(u64) -> bool) -> Self {
        self.seam = Some(seam);
        self
    }

    fn joined(&self, table: Arc<[Mapping]>) -> Arc<[Mapping]> {
        self.seam.map_or(table.clone(), |seam| maps::join(&table, seam))
    }

    /// Some of the mapping table, by questions; `None` if they won't do.
    fn ask(&self, ranges: &[PageRange]) -> Option<Arc<[Mapping]>> {
        if !self.kernel.maps_answer {
            return None;
        }
        let found = maps::ask(&mut Table::new(File::open(self.path("maps")).ok()?), ranges)?;
        // What was one mapping before is seen in the whole table alone.
        let seam = |m: &Mapping| self.seam.is_some_and(|seam| seam(m.range.start) || seam(m.range.end));
        (!found.iter().any(seam)).then_some(found)
    }

    fn path(&self, rest: &str) -> String {
        format!("/proc/{}/{rest}", self.tid)
    }

    fn read(&self, name: &str, room: usize, source: Source) -> Result<Vec<u8>> {
        let mut text = Vec::with_capacity(room);
        File::open(self.path(name))
            .and_then(|mut file| file.read_to_end(&mut text))
            .map_err(|error| Unreadable { source, errno: error.raw_os_error().unwrap_or(0) })?;
        if text.is_empty() {
            // The tables of a task that has lost its address space are empty.
            return Err(Unreadable { source, errno: libc::ESRCH });
        }
        Ok(text)
    }

    fn status(&self) -> Result<Status> {
        if let Some(status) = self.status.get() {
            return Ok(*status);
        }
        let text = self.read("status", 4096, Source::Status)?;
        let status = Status::parse(&text).ok_or(Unreadable { source: Source::Status, errno: 0 })?;
        Ok(*self.status.get_or_init(|| status))
    }

    /// Whether another process is on the address space; true when in doubt.
    fn shares(&self) -> bool {
        self.shares || self.owner.is_some_and(|owner| self.status().map_or(true, |s| s.tgid != owner))
    }

    fn devices(&self) -> &BTreeMap<Device, FileKind> {
        self.devices.get_or_init(|| {
            // Unreadable: no device is known, so each counts as stacked.
            let text = self.read("mountinfo", 16384, Source::Other).unwrap_or_default();
            mounts(&text, self.kernel.huge_page)
        })
    }

    fn identity(&self, stat: &FileStat, system: Option<&Statfs>) -> Option<FileIdentity> {
        let kind = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
        let kind = if kind == SFlag::S_IFREG {
            system.map_or(FileKind::Stacked, kind_of)
        } else if kind == SFlag::S_IFBLK {
            // One disk under many nodes.
            FileKind::Stacked
        } else {
            return None;
        };
        Some(FileIdentity {
            device: Device::from_stat(stat.st_dev),
            inode: stat.st_ino,
            size: stat.st_size as u64,
            kind,
        })
    }

    /// The path string, without its end.
    fn string(&mut self, mut address: u64) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(128);
        while out.len() < PATH_MAX {
            // Up to the end of the page: the next one may not exist.
            let room = (PAGE_SIZE - address % PAGE_SIZE) as usize;
            let at = out.len();
            out.resize(at + room.min(256), 0);
            self.read_memory(address, &mut out[at..])?;
            if let Some(end) = out[at..].iter().position(|b| *b == 0) {
                out.truncate(at + end);
                return Ok(out);
            }
            address = address.wrapping_add((out.len() - at) as u64);
        }
        Err(Unreadable { source: Source::Memory, errno: libc::ENAMETOOLONG })
    }

    /// Where this task looks paths up from.
    fn walk(&self, directory: i32, path: &[u8]) -> nix::Result<Option<OwnedFd>> {
        let open = |base: &str| {
            let flags = OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_DIRECTORY;
            nix::fcntl::open(self.path(base).as_str(), flags, Mode::empty())
        };
        let base = match directory {
            _ if path.starts_with(b"/") => "root".into(),
            AT_FDCWD => "cwd".into(),
            fd => format!("fd/{fd}"),
        };
        walk::walk(open("root")?, open(&base)?, path)
    }
}

impl Status {
    fn parse(text: &[u8]) -> Option<Self> {
        // The name may hold anything but a newline and stands first; keys are looked for at line starts only.
        let field = |key: &[u8]| {
            let line = text.split(|b| *b == b'\n').skip(1).find_map(|line| line.strip_prefix(key))?;
            std::str::from_utf8(line).ok().map(str::trim)
        };
        let last = |key| field(key)?.split_ascii_whitespace().next_back()?.parse().ok();
        Some(Self {
            tgid: field(b"Tgid:")?.parse().ok()?,
            inner_tgid: last(b"NStgid:")?,
            inner_tid: last(b"NSpid:")?,
            threads: field(b"Threads:")?.parse().ok()?,
            locked_kib: field(b"VmLck:")?.strip_suffix("kB")?.trim().parse().ok()?,
        })
    }
}

impl Target for ProcessTarget<'_> {
    fn watches(&self, range: PageRange) -> bool {
        self.watches.is_none_or(|watches| watches(range))
    }

    fn mappings(&mut self) -> Result<Arc<[Mapping]>> {
        if let Some(known) = self.smaps.get().or(self.maps.get()) {
            return Ok(known.clone());
        }
        let table = maps::parse(&self.read("maps", 1 << 15, Source::Maps)?)?;
        Ok(self.maps.get_or_init(|| self.joined(table)).clone())
    }

    fn mappings_over(&mut self, ranges: &[PageRange]) -> Result<Arc<[Mapping]>> {
        let unread = self.smaps.get().is_none() && self.maps.get().is_none();
        match unread.then(|| self.ask(ranges)).flatten() {
            Some(asked) => Ok(asked),
            None => self.mappings(),
        }
    }

    fn mappings_with_flags(&mut self) -> Result<Arc<[Mapping]>> {
        if let Some(known) = self.smaps.get() {
            return Ok(known.clone());
        }
        let table = maps::parse_smaps(&self.read("smaps", 1 << 17, Source::Smaps)?)?;
        Ok(self.smaps.get_or_init(|| self.joined(table)).clone())
    }

    fn locked_kib(&mut self) -> Result<u64> {
        Ok(self.status()?.locked_kib)
    }

    fn single_task(&mut self) -> Result<bool> {
        if let (Some(owner), false, None) = (self.owner, self.shares, self.status.get())
            && self.kernel.links_count_threads
            && process::has_thread(owner.cast_unsigned(), self.tid.cast_unsigned())
            && let Ok(task) = stat(self.path("task").as_str())
        {
            // A twentieth of the work that the whole status is.
            return Ok(task.st_nlink == 2 + 1);
        }
        Ok(self.status()?.threads == 1 && !self.shares())
    }

    fn descriptor(&mut self, fd: i32) -> Result<Option<Descriptor>> {
        if fd < 0 {
            return Ok(None);
        }
        let path = self.path(&format!("fd/{fd}"));
        let fail = |errno: Errno| Unreadable { source: Source::Descriptor, errno: errno as i32 };
        // The link's own permissions are the descriptor's access mode (proc_fd_link).
        let link = match lstat(path.as_str()) {
            Err(Errno::ENOENT) => return Ok(None),
            other => other.map_err(fail)?,
        };
        let file = stat(path.as_str()).map_err(fail)?;
        let system = statfs(path.as_str()).ok();
        Ok(Some(Descriptor {
            file: self.identity(&file, system.as_ref()),
            readable: link.st_mode & libc::S_IRUSR != 0,
            writable: link.st_mode & libc::S_IWUSR != 0,
        }))
    }

    fn read_memory(&mut self, address: u64, buffer: &mut [u8]) -> Result<()> {
        let fail = |errno| Unreadable { source: Source::Memory, errno };
        super::memory::read(self.tid, address, buffer).map_err(|errno| fail(errno as i32))
    }

    fn resolve_path(&mut self, directory: i32, path: u64) -> Result<PathTarget> {
        let path = self.string(path)?;
        let fd = match self.walk(directory, &path) {
            Ok(Some(fd)) => fd,
            Ok(None) => return Ok(PathTarget::NoFile),
            Err(_) => return Ok(PathTarget::Unknown),
        };
        let Ok(file) = fstat(&fd) else { return Ok(PathTarget::Unknown) };
        let system = fstatfs(&fd).ok();
        Ok(self.identity(&file, system.as_ref()).map_or(PathTarget::NoFile, PathTarget::File))
    }

    fn shm_size(&mut self, id: i32) -> Result<Option<u64>> {
        let fail = |errno| Unreadable { source: Source::Other, errno };
        // Segment ids mean something in one IPC namespace only.
        let namespace = |of: &str| stat(of).map(|s| s.st_ino).map_err(|errno| fail(errno as i32));
        if namespace(&self.path("ns/ipc"))? != namespace("/proc/self/ns/ipc")? {
            return Err(fail(libc::EXDEV));
        }
        match ummunotify_sys::traits::shm_segment_size(id) {
            Ok(size) => Ok(Some(size)),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINVAL | libc::EIDRM) => Ok(None),
                errno => Err(fail(errno.unwrap_or(0))),
            },
        }
    }

    fn pidfd_is_self(&mut self, fd: i32) -> Result<bool> {
        // PIDFD_SELF and kin (6.14) are large negative numbers; others are no descriptors.
        if fd < 0 {
            return Ok(fd <= -100);
        }
        let text = match self.read(&format!("fdinfo/{fd}"), 512, Source::Descriptor) {
            Err(Unreadable { errno: libc::ENOENT, .. }) => return Ok(false),
            other => other?,
        };
        let pid = text.split(|b| *b == b'\n').find_map(|line| line.strip_prefix(b"Pid:"));
        let pid = pid.and_then(|pid| std::str::from_utf8(pid).ok()?.trim().parse::<i32>().ok());
        let Some(pid) = pid else { return Ok(false) };
        if pid == self.status()?.tgid || self.shares() {
            return Ok(true);
        }
        Ok(stat(self.path(&format!("task/{pid}")).as_str()).is_ok())
    }

    fn pid_is_self(&mut self, pid: i32) -> Result<bool> {
        let status = self.status()?;
        // Other threads' ids are translated by nothing cheap: any pid may be one of them.
        Ok(pid == 0
            || pid == status.inner_tid
            || pid == status.inner_tgid
            || status.threads > 1
            || self.shares())
    }

    fn heap_floor(&mut self) -> Result<u64> {
        let fail = Unreadable { source: Source::Other, errno: 0 };
        let text = self.read("stat", 1024, Source::Other)?;
        // The name in parentheses may hold anything; the third field follows the last of them.
        let end = text.iter().rposition(|b| *b == b')').ok_or(fail)?;
        let rest = std::str::from_utf8(&text[end + 1..]).map_err(|_| fail)?;
        let mut fields = rest.split_ascii_whitespace().skip(46 - 3);
        let mut next = || fields.next()?.parse::<u64>().ok().filter(|n| *n != 0);
        // Where the heap's place isn't randomised, brk accepts what lies above the data.
        let (data_end, heap_start) = (next().ok_or(fail)?, next().ok_or(fail)?);
        Ok(data_end.min(heap_start))
    }

    fn read_implies_exec(&mut self) -> Result<bool> {
        let text = self.read("personality", 16, Source::Other)?;
        let text = std::str::from_utf8(&text).unwrap_or_default();
        let bits = u32::from_str_radix(text.trim(), 16);
        let bits = bits.map_err(|_| Unreadable { source: Source::Other, errno: 0 })?;
        Ok(bits & libc::READ_IMPLIES_EXEC as u32 != 0)
    }

    fn device_kind(&mut self, device: Device) -> FileKind {
        let own = self.kernel.own_device(device);
        own.or_else(|| self.devices().get(&device).copied()).unwrap_or(FileKind::Stacked)
    }

    fn kernel(&self) -> &KernelTraits {
        self.kernel
    }
}

/// The kind of a file system by what statfs says.
fn kind_of(system: &Statfs) -> FileKind {
    /// `f_type` of file systems whose files have one identity: ext, xfs, btrfs, f2fs, nfs, fat, exfat,
    /// ramfs, jfs, zfs.
    const DISKS: [u64; 10] = [
        0xef53,
        0x5846_5342,
        0x9123_683e,
        0xf2f5_2010,
        0x6969,
        0x4d44,
        0x2011_bab0,
        0x8584_58f6,
        0x3153_464a,
        0x2fc1_2fc1,
    ];
    match system.filesystem_type() {
        FsType(0x0102_1994) => FileKind::Tmpfs,
        FsType(0x9584_58f6) => FileKind::Hugetlb(system.block_size() as u64),
        FsType(other) if DISKS.contains(&(other as u64)) => FileKind::Disk,
        _ => FileKind::Stacked,
    }
}

/// The devices of `mountinfo`: `id parent major:minor root mount-point options ... - type source options`.
fn mounts(text: &[u8], huge_page: u64) -> BTreeMap<Device, FileKind> {
    let mut out = BTreeMap::new();
    // Blanks in names are written as \040.
    for line in text.split(|b| *b == b'\n') {
        let Some((device, kind)) = mount(line, huge_page) else { continue };
        out.insert(device, kind);
    }
    out
}

fn mount(line: &[u8], huge_page: u64) -> Option<(Device, FileKind)> {
    let line = String::from_utf8_lossy(line);
    let mut fields = line.split(' ');
    let (major, minor) = fields.nth(2)?.split_once(':')?;
    let device = Device { major: major.parse().ok()?, minor: minor.parse().ok()? };
    fields.find(|field| *field == "-")?;
    let kind = match fields.next()? {
        "tmpfs" | "devtmpfs" => FileKind::Tmpfs,
        "hugetlbfs" => {
            let size = fields.nth(1).and_then(|options| {
                let size = options.split(',').find_map(|o| o.strip_prefix("pagesize="))?;
                let (digits, unit) = size.split_at(size.find(|c: char| !c.is_ascii_digit())?);
                let shift = match unit {
                    "K" => 10,
                    "M" => 20,
                    "G" => 30,
                    _ => return None,
                };
                Some(digits.parse::<u64>().ok()? << shift)
            });
            FileKind::Hugetlb(size.filter(|size| size.is_power_of_two()).unwrap_or(huge_page))
        }
        "ext2" | "ext3" | "ext4" | "xfs" | "btrfs" | "f2fs" | "nfs" | "nfs4" | "vfat" | "msdos" | "exfat"
        | "ramfs" | "jfs" | "zfs" | "proc" | "sysfs" => FileKind::Disk,
        _ => FileKind::Stacked,
    };
    Some((device, kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::fd::AsRawFd;

    fn own(kernel: &KernelTraits) -> ProcessTarget<'_> {
        ProcessTarget::new(nix::unistd::gettid().as_raw(), false, kernel)
    }

    #[test]
    fn status_of_a_process_with_an_odd_name() {
        let text = b"Name:\tThreads:\t9\nUmask:\t0022\nTgid:\t70\nNgid:\t0\nPid:\t71\nNStgid:\t70\t3\nNSpid:\t71\t4\n\
            VmLck:\t      16 kB\nThreads:\t1\n";
        let status = Status::parse(text).unwrap();
        assert_eq!((status.tgid, status.inner_tgid, status.inner_tid), (70, 3, 4));
        assert_eq!((status.threads, status.locked_kib), (1, 16));
        // A zombie has no memory lines.
        assert!(Status::parse(b"Name:\tx\nTgid:\t70\nNStgid:\t70\nNSpid:\t70\nThreads:\t1\n").is_none());
    }

    #[test]
    fn kinds_of_mounts() {
        let text = b"\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
23 22 0:20 / /proc rw - proc proc rw\n\
24 22 0:21 /sub /dev/shm rw shared:2 master:3 - tmpfs tm\\040pfs rw,size=1k\n\
25 22 0:22 / /huge rw - hugetlbfs none rw,seclabel,pagesize=1024M\n\
26 22 0:23 / /huge2 rw - hugetlbfs none rw\n\
27 22 0:24 / /c rw - overlay overlay rw,lowerdir=/a\n\
28 22 0:25 / /d rw - fuse.sshfs x rw\nbroken line\n";
        let mounts = mounts(text, 2 << 20);
        let kind = |minor| mounts[&Device { major: 0, minor }];
        assert_eq!(mounts[&Device { major: 8, minor: 1 }], FileKind::Disk);
        assert_eq!(kind(21), FileKind::Tmpfs);
        assert_eq!(kind(22), FileKind::Hugetlb(1 << 30));
        assert_eq!(kind(23), FileKind::Hugetlb(2 << 20));
        assert_eq!(kind(24), FileKind::Stacked);
        assert_eq!(kind(25), FileKind::Stacked);
        assert_eq!(mounts.len(), 7);
    }

    /// A descriptor is seen as what it is, and the mapping of it bears the same identity.
    #[test]
    fn descriptors() {
        let kernel = KernelTraits::probe();
        let mut target = own(&kernel);
        let memfd = nix::sys::memfd::memfd_create(c"test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&memfd, 8192).unwrap();
        let seen = target.descriptor(memfd.as_raw_fd()).unwrap().unwrap();
        let file = seen.file.unwrap();
        assert_eq!((seen.readable, seen.writable), (true, true));
        assert_eq!((file.size, file.kind, Some(file.device)), (8192, FileKind::Tmpfs, kernel.shm_device));
        let file_of = File::from(memfd);
        // SAFETY: the memfd is this test's own and isn't changed while it is mapped.
        let map = unsafe { memmap2::MmapMut::map_mut(&file_of) }.unwrap();
        let at = map.as_ptr() as u64;
        let maps = target.mappings().unwrap();
        let m = maps::overlapping(&maps, PageRange::new(at, at + 1))[0];
        assert_eq!((m.device, m.inode, m.shared), (file.device, file.inode, true));

        let null = File::open("/dev/null").unwrap();
        let seen = target.descriptor(null.as_raw_fd()).unwrap().unwrap();
        assert_eq!((seen.file, seen.readable, seen.writable), (None, true, false));
        assert_eq!(target.descriptor(1_000_000).unwrap(), None);
        assert_eq!(target.descriptor(-1).unwrap(), None);
    }

    #[test]
    fn memory_and_paths() {
        let kernel = KernelTraits::probe();
        let mut target = own(&kernel);
        let words = [1_u64, 2, 3];
        let mut bytes = [0; 24];
        target.read_memory(words.as_ptr() as u64, &mut bytes).unwrap();
        assert_eq!(bytes[8..16], 2_u64.to_le_bytes());
        assert_eq!(target.read_memory(8, &mut bytes).unwrap_err().errno, libc::EFAULT);
        assert!(target.read_memory(u64::MAX - 8, &mut bytes).is_err());

        let mut resolve =
            |directory, path: &std::ffi::CStr| target.resolve_path(directory, path.as_ptr() as u64);
        let here = stat("/proc/self/exe").unwrap();
        let exe = std::fs::read_link("/proc/self/exe").unwrap();
        let exe = CString::new(exe.into_os_string().into_encoded_bytes()).unwrap();
        let Ok(PathTarget::File(file)) = resolve(AT_FDCWD, &exe) else { panic!("{exe:?} not found") };
        assert_eq!((file.inode, file.size), (here.st_ino, here.st_size as u64));
        let name = CString::new(exe.as_bytes().rsplit(|b| *b == b'/').next().unwrap()).unwrap();
        let folder = std::path::Path::new(exe.to_str().unwrap()).parent().unwrap();
        let folder = File::open(folder).unwrap();
        assert_eq!(resolve(folder.as_raw_fd(), &name), Ok(PathTarget::File(file)));
        let up = CString::new([b"../deps/", name.as_bytes()].concat()).unwrap();
        assert_eq!(resolve(folder.as_raw_fd(), &up), Ok(PathTarget::File(file)));
        assert_eq!(resolve(AT_FDCWD, c"/nowhere/at/all"), Ok(PathTarget::NoFile));
        assert_eq!(resolve(AT_FDCWD, c"/dev/null"), Ok(PathTarget::NoFile));
        // These mean this process when another resolves them.
        assert_eq!(resolve(AT_FDCWD, c"/proc/self/fd/0"), Ok(PathTarget::Unknown));
        assert_eq!(resolve(AT_FDCWD, c"/dev/fd/0"), Ok(PathTarget::Unknown));
        assert!(resolve(AT_FDCWD, c"/proc/self/exe").is_ok_and(|p| p == PathTarget::Unknown));
    }

    #[test]
    fn facts_about_the_process() {
        let kernel = KernelTraits::probe();
        let mut target = own(&kernel);
        // The test runner has threads; so have most programs that run tests.
        assert!(!target.single_task().unwrap());
        assert!(target.pid_is_self(0).unwrap());
        assert!(!target.read_implies_exec().unwrap());
        let heap = target.mappings().unwrap().iter().find(|m| m.name == maps::Name::Heap).copied();
        let floor = target.heap_floor().unwrap();
        assert!(floor > 0 && heap.is_none_or(|heap| floor <= heap.range.end));
        assert_eq!(target.shm_size(i32::MAX).unwrap(), None);
        assert!(target.mappings_with_flags().unwrap().iter().all(|m| m.flags.is_some()));
        assert!(!target.pidfd_is_self(0).unwrap());
        assert!(target.pidfd_is_self(-10_000).unwrap(), "PIDFD_SELF");
        assert!(!target.pidfd_is_self(-1).unwrap());
    }

    /// One task is one only if no other process runs on its memory.
    #[test]
    fn alone_or_not() {
        let kernel = KernelTraits::probe();
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let target = |shares| ProcessTarget::new(child.id() as i32, shares, &kernel);
        let (single, shared) = (target(false).single_task(), target(true).single_task());
        // By the links, by the status since that was read, and of a process that isn't the owner's.
        let [pid, parent] = [child.id(), std::process::id()].map(u32::cast_signed);
        let linked = target(false).owned_by(pid).single_task();
        let mut read = target(false).owned_by(pid);
        let stated = read.locked_kib().and_then(|_| read.single_task());
        let foreign = target(false).owned_by(parent).single_task();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((single, shared), (Ok(true), Ok(false)));
        assert_eq!((linked, stated, foreign), (Ok(true), Ok(true), Ok(false)));
        // The test runner has threads.
        assert_eq!(own(&kernel).owned_by(parent).single_task(), Ok(false));
    }

    /// The table is the same, whether it is asked or read, and what was read isn't asked for.
    #[test]
    fn asked_or_read() {
        let kernel = KernelTraits::probe();
        let here = asked_or_read as *const () as u64;
        let here = PageRange::new(here, here + 1);
        let unasked = KernelTraits { maps_answer: false, ..kernel.clone() };
        let read = own(&unasked).mappings_over(&[here]).unwrap();
        assert!(read.len() > 1, "the whole of it");
        let expected = maps::overlapping(&read, here);
        if kernel.maps_answer {
            assert_eq!(&*own(&kernel).mappings_over(&[here]).unwrap(), expected);
        } else {
            println!("SKIPPED a table that is asked: this kernel has none");
        }
        let mut target = own(&kernel);
        let whole = target.mappings().unwrap();
        assert!(Arc::ptr_eq(&whole, &target.mappings_over(&[here]).unwrap()));
        // A border that may be ours is looked at in the whole.
        let edge = |address| address == expected[0].range.start;
        let seamed = own(&kernel).without_seams(&edge).mappings_over(&[here]).unwrap();
        assert!(seamed.len() > 1);
        let mut gone = ProcessTarget::new(i32::MAX, false, &kernel);
        assert_eq!(gone.mappings_over(&[here]).unwrap_err().source, Source::Maps);
    }

    /// A task that is gone is an error at each read, not a process without mappings.
    #[test]
    fn a_task_that_is_gone() {
        let kernel = KernelTraits::probe();
        let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
        let tid = child.id() as i32;
        child.wait().unwrap();
        let mut target = ProcessTarget::new(tid, false, &kernel);
        assert_eq!(target.mappings().unwrap_err().source, Source::Maps);
        assert_eq!(target.mappings_with_flags().unwrap_err().source, Source::Smaps);
        assert_eq!(target.single_task().unwrap_err().source, Source::Status);
        assert_eq!(target.read_memory(4096, &mut [0]).unwrap_err().source, Source::Memory);
    }
}
