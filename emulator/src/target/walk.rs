//! Looks a path up as another task would.
//!
//! openat2 can do this from the task's root (RESOLVE_IN_ROOT) but not from a directory below it, and it follows
//! `/proc/self` to whoever calls it: `/dev/fd/5` would be looked for among the supervisor's descriptors, and
//! not found. So the walk goes component by component and gives up where procfs begins.

use std::collections::VecDeque;
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, readlinkat};
use nix::sys::stat::{Mode, SFlag, fstat};
use nix::sys::statfs::{FsType, PROC_SUPER_MAGIC, fstatfs};

/// `MAXSYMLINKS`.
const MAX_LINKS: usize = 40;

/// Opens what `path` names from the directory `at` under `root`, with O_PATH, following symbolic links. None
/// if there is certainly nothing; an error if it can't be said.
pub(super) fn walk(root: OwnedFd, mut at: OwnedFd, path: &[u8]) -> nix::Result<Option<OwnedFd>> {
    if path.is_empty() {
        return Ok(None);
    }
    let mut rest: VecDeque<Vec<u8>> = components(path).collect();
    let mut links = 0;
    differs_by_task(&at, true)?;
    while let Some(name) = rest.pop_front() {
        if name == b".." && same(&root, &at)? {
            continue;
        }
        let name = CString::new(name).map_err(|_| Errno::EINVAL)?;
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let next = match openat(&at, name.as_c_str(), flags, Mode::empty()) {
            Ok(next) => next,
            Err(Errno::ENOENT) => {
                differs_by_task(&at, false)?;
                return Ok(None);
            }
            Err(Errno::ENOTDIR) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        differs_by_task(&next, true)?;
        if kind(&next)? != SFlag::S_IFLNK {
            at = next;
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Errno::ELOOP);
        }
        // An empty name reads the link that the descriptor is.
        let target = readlinkat(&next, c"")?.into_encoded_bytes();
        if target.starts_with(b"/") {
            at = root.try_clone().map_err(|_| Errno::EMFILE)?;
        }
        for name in components(&target).collect::<Vec<_>>().into_iter().rev() {
            rest.push_front(name);
        }
    }
    Ok(Some(at))
}

fn components(path: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    path.split(|b| *b == b'/').filter(|name| !name.is_empty() && *name != b".").map(<[u8]>::to_vec)
}

fn kind(fd: &OwnedFd) -> nix::Result<SFlag> {
    Ok(SFlag::from_bits_truncate(fstat(fd)?.st_mode) & SFlag::S_IFMT)
}

fn same(a: &OwnedFd, b: &OwnedFd) -> nix::Result<bool> {
    let (a, b) = (fstat(a)?, fstat(b)?);
    Ok((a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}

/// Gives up on file systems that show each task something else. What is found on a file system that a server
/// runs is there; that something isn't there may hold for this process alone.
fn differs_by_task(fd: &impl AsFd, found: bool) -> nix::Result<()> {
    /// FUSE, autofs, AFS.
    const SERVED: [FsType; 4] =
        [FsType(0x6573_5546), FsType(0x0187), FsType(0x5346_414f), FsType(0x6b41_4653)];
    let system = fstatfs(fd)?.filesystem_type();
    if system == PROC_SUPER_MAGIC || (!found && SERVED.contains(&system)) {
        return Err(Errno::EXDEV);
    }
    Ok(())
}
