//! How the running kernel behaves where kernels differ.

use ummunotify_sys::maps::Table;
use ummunotify_sys::traits;

use super::{Device, FileKind};
use crate::trap::policy::advice;

/// Answers found by trying, once per supervisor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelTraits {
    /// One mremap moves several mappings (6.17): two invalidations for each.
    pub mremap_moves_several: bool,
    /// process_madvise on the caller's own process takes every advice (6.13).
    pub process_madvise_own: bool,
    /// Advices that madvise knows, among those that invalidate.
    pub advices: Vec<i32>,
    /// Zapping hugetlb pages invalidates a second time (up to 6.1).
    pub hugetlb_twice: bool,
    /// Device of the kernel's own tmpfs, where memfd, SysV and shared anonymous memory live. No other file
    /// system is stacked on it, so its inodes are identities.
    pub shm_device: Option<Device>,
    /// Devices of the kernel's own hugetlbfs mounts, and their page sizes.
    pub hugetlb_devices: Vec<(Device, u64)>,
    /// Page size of a hugetlbfs whose mount options name none.
    pub huge_page: u64,
    /// The mapping table can be asked for single mappings (6.11).
    pub maps_answer: bool,
    /// The links of `/proc/PID/task` are its threads and two more (`proc_task_getattr`).
    pub links_count_threads: bool,
}

impl KernelTraits {
    /// Asks the running kernel. What can't be found out is set to what over-reports.
    pub fn probe() -> Self {
        let known = |a: &i32| traits::advice_known(*a).unwrap_or(true);
        Self {
            mremap_moves_several: traits::mremap_moves_several().unwrap_or(true),
            process_madvise_own: traits::process_madvise_own().unwrap_or(true),
            advices: advice::WATCHED.into_iter().filter(known).collect(),
            hugetlb_twice: hugetlb_twice(),
            shm_device: memfd_device(0),
            hugetlb_devices: [(21, 2 << 20), (30, 1 << 30)]
                .into_iter()
                .filter_map(|(log, size)| memfd_device(libc::MFD_HUGETLB | log << 26).map(|d| (d, size)))
                .collect(),
            huge_page: huge_page().unwrap_or(2 << 20),
            maps_answer: maps_answer(),
            links_count_threads: links_count_threads(),
        }
    }

    /// Whether madvise knows an advice.
    pub fn knows_advice(&self, advice: i32) -> bool {
        self.advices.contains(&advice)
    }

    /// Whether MADV_DONTNEED works on hugetlb memory: both came with 5.18.
    pub fn hugetlb_dontneed(&self) -> bool {
        self.knows_advice(advice::DONTNEED_LOCKED)
    }

    /// The kind of a device that is the kernel's own.
    pub fn own_device(&self, device: Device) -> Option<FileKind> {
        if self.shm_device == Some(device) {
            return Some(FileKind::Tmpfs);
        }
        self.hugetlb_devices.iter().find(|(d, _)| *d == device).map(|(_, size)| FileKind::Hugetlb(*size))
    }
}

/// The duplicate went with "hugetlb: remove duplicate mmu notifications" (6.2). Nothing that user space can
/// try shows it, so this one answer comes from the version. A kernel that carries the change under an older
/// version makes one invalidation here too many, never one too few.
fn hugetlb_twice() -> bool {
    let Ok(name) = nix::sys::utsname::uname() else { return true };
    version(&name.release().to_string_lossy()).is_none_or(|version| version < (6, 2))
}

/// Major and minor number of a release like `6.1.0-40-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

/// Device of a memfd with these flags.
fn memfd_device(flags: u32) -> Option<Device> {
    let flags = nix::sys::memfd::MFdFlags::from_bits_retain(flags | libc::MFD_CLOEXEC);
    let fd = nix::sys::memfd::memfd_create(c"ummunotify-probe", flags).ok()?;
    Some(Device::from_stat(nix::sys::stat::fstat(&fd).ok()?.st_dev))
}

/// Whether our own table answers; a sandbox may refuse it.
fn maps_answer() -> bool {
    std::fs::File::open("/proc/self/maps").is_ok_and(|file| Table::new(file).at_or_above(0).is_ok())
}

/// Whether a second thread of ours shows there; another kernel's procfs, or a sandbox's, may not know of it.
fn links_count_threads() -> bool {
    let links = || nix::sys::stat::stat("/proc/self/task").map(|task| task.st_nlink).ok();
    let threads = || Some(std::fs::read_dir("/proc/self/task").ok()?.count() as u64);
    let counted = || matches!((threads(), links()), (Some(threads), Some(links)) if threads > 1 && links == threads + 2);
    std::thread::scope(|scope| {
        let second = std::thread::Builder::new().stack_size(64 * 1024).spawn_scoped(scope, counted);
        second.is_ok_and(|second| second.join().unwrap_or(false))
    })
}

/// The default size of huge pages.
fn huge_page() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_releases() {
        assert_eq!(version("6.1.0-40-amd64"), Some((6, 1)));
        assert_eq!(version("5.10.0"), Some((5, 10)));
        assert_eq!(version("7.3-rc1"), Some((7, 3)));
        assert_eq!(version("linux"), None);
    }

    /// Without these two devices files would be matched by inode alone.
    #[test]
    fn the_kernel_is_asked() {
        let traits = KernelTraits::probe();
        assert!(traits.shm_device.is_some());
        assert!(traits.knows_advice(advice::DONTNEED) && traits.knows_advice(advice::REMOVE));
        assert_eq!(traits.own_device(traits.shm_device.unwrap()), Some(FileKind::Tmpfs));
    }
}
