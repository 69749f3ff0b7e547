//! A task's memory, read and written from outside.
//!
//! By process_vm_readv(2) and process_vm_writev(2), which see what the task itself could read and write. The profiles of
//! some containers keep these calls away, but not `/proc/PID/mem`, which asks for the same right
//! (PTRACE_MODE_ATTACH_FSCREDS in mem_open). That file reads and writes what the task itself may not, too (FOLL_FORCE in
//! mem_rw, proc_pid_mem(5)): so the mapping table is asked first.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;

use super::maps::{self, Mapping};

/// Copies bytes from the memory of the task `tid`: all of them.
///
/// # Errors
/// EFAULT if not all can be read; EPERM if this process may not; ESRCH if the task is gone.
pub fn read(tid: i32, address: u64, buffer: &mut [u8]) -> nix::Result<()> {
    let remote =
        [RemoteIoVec { base: usize::try_from(address).map_err(|_| Errno::EFAULT)?, len: buffer.len() }];
    match process_vm_readv(Pid::from_raw(tid), &mut [IoSliceMut::new(&mut *buffer)], &remote) {
        Ok(got) if got == buffer.len() => Ok(()),
        Ok(_) => Err(Errno::EFAULT),
        Err(Errno::EPERM | Errno::ENOSYS) => read_by_file(tid, address, buffer),
        Err(errno) => Err(errno),
    }
}

fn read_by_file(tid: i32, address: u64, buffer: &mut [u8]) -> nix::Result<()> {
    let memory = File::open(format!("/proc/{tid}/mem")).map_err(|e| errno_of(&e))?;
    may(&mappings(tid)?, address, buffer.len(), libc::PROT_READ)?;
    memory.read_exact_at(buffer, address).map_err(|e| errno_of(&e))
}

fn mappings(tid: i32) -> nix::Result<Arc<[Mapping]>> {
    let table = std::fs::read(format!("/proc/{tid}/maps")).map_err(|e| errno_of(&e))?;
    maps::parse(&table).map_err(|e| Errno::from_raw(e.errno))
}

fn may(table: &[Mapping], from: u64, len: usize, prot: i32) -> nix::Result<()> {
    let allowed = from.checked_add(len as u64).is_some_and(|to| maps::allow(table, from, to, prot));
    if allowed { Ok(()) } else { Err(Errno::EFAULT) }
}

/// Copies bytes into segments of the memory of the task `tid`, one after the other; all, or an error.
///
/// # Errors
/// EFAULT if the task itself couldn't write to all of them: some of the bytes may have been copied then. EPERM if this
/// process may not; ESRCH if the task is gone.
pub fn write(tid: i32, segments: &[RemoteIoVec], bytes: &[u8]) -> nix::Result<()> {
    let mut left = bytes.len();
    let mut remote = Vec::new();
    for segment in segments {
        // The kernel would check the whole of a segment that is used in part.
        let len = segment.len.min(left);
        if len > 0 {
            remote.push(RemoteIoVec { base: segment.base, len });
        }
        left -= len;
    }
    match process_vm_writev(Pid::from_raw(tid), &[IoSlice::new(bytes)], &remote) {
        Ok(done) if done == bytes.len() => Ok(()),
        Ok(_) => Err(Errno::EFAULT),
        Err(Errno::EPERM | Errno::ENOSYS) => write_by_file(tid, &remote, bytes),
        Err(errno) => Err(errno),
    }
}

fn write_by_file(tid: i32, remote: &[RemoteIoVec], mut bytes: &[u8]) -> nix::Result<()> {
    let memory = OpenOptions::new().write(true).open(format!("/proc/{tid}/mem")).map_err(|e| errno_of(&e))?;
    let table = mappings(tid)?;
    for segment in remote {
        let from = segment.base as u64;
        may(&table, from, segment.len, libc::PROT_WRITE)?;
        let (now, rest) = bytes.split_at_checked(segment.len).ok_or(Errno::EFAULT)?;
        memory.write_all_at(now, from).map_err(|e| errno_of(&e))?;
        bytes = rest;
    }
    if bytes.is_empty() { Ok(()) } else { Err(Errno::EFAULT) }
}

/// Of the file: a page that isn't there answers EIO, an address space that is gone the end of the file.
fn errno_of(error: &io::Error) -> Errno {
    match error.raw_os_error() {
        Some(libc::EIO) | None => Errno::EFAULT,
        Some(errno) => Errno::from_raw(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three pages, the second read-only and the third inaccessible, by which all ways are tried on this process itself.
    fn pages() -> std::ptr::NonNull<u8> {
        use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect};
        let len = std::num::NonZeroUsize::new(3 * 4096).unwrap();
        let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: new memory, of which only protections change.
        unsafe {
            let at = mmap_anonymous(None, len, both, MapFlags::MAP_PRIVATE).unwrap();
            mprotect(at.byte_add(4096), 4096, ProtFlags::PROT_READ).unwrap();
            mprotect(at.byte_add(8192), 4096, ProtFlags::PROT_NONE).unwrap();
            at.cast()
        }
    }

    type Way = fn(i32, u64, &mut [u8]) -> nix::Result<()>;

    #[test]
    fn the_file_writes_what_the_task_could_write() {
        let tid = nix::unistd::gettid().as_raw();
        let at = pages().addr().get();
        let vec = |base: usize, len| RemoteIoVec { base, len };
        let read_ways: [Way; 2] = [read, read_by_file];
        for way in [write_by_file, write] {
            way(tid, &[vec(at + 4090, 3), vec(at + 4093, 3)], b"abcdef").unwrap();
            for read in read_ways {
                let mut back = [0; 6];
                read(tid, at as u64 + 4090, &mut back).unwrap();
                assert_eq!(&back, b"abcdef");
            }
            for beyond in [vec(at + 4093, 6), vec(at + 4096, 6), vec(at + 3 * 4096 + (1 << 40), 6), vec(8, 6)]
            {
                assert_eq!(way(tid, &[beyond], b"ghijkl"), Err(Errno::EFAULT), "{beyond:?}");
            }
        }
        for read in read_ways {
            for beyond in [8, at as u64 + 8190, 1 << 63] {
                assert_eq!(read(tid, beyond, &mut [0; 4]), Err(Errno::EFAULT), "{beyond:#x}");
            }
        }
        assert_eq!(read(i32::MAX, at as u64, &mut [0; 4]), Err(Errno::ESRCH));
    }
}
