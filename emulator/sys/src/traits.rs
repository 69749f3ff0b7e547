//! Small experiments that tell how the running kernel behaves, on memory of their own, and one question that
//! only a raw call answers. Safe to call from any thread at any time.

use std::io;
use std::ptr::null_mut;

const PAGE: usize = 4096;

/// Pages of anonymous memory, unmapped on drop.
struct Scratch {
    at: *mut libc::c_void,
    len: usize,
}

impl Scratch {
    fn new(pages: usize) -> io::Result<Self> {
        let len = pages * PAGE;
        // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe {
            libc::mmap(
                null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { at, len }) }
    }

    fn page(&self, n: usize) -> *mut libc::c_void {
        assert!(n * PAGE < self.len);
        self.at.wrapping_byte_add(n * PAGE)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own, and nothing refers into it: the experiments hand out no
        // references. Parts that were moved away lie inside another Scratch, parts that are gone are holes.
        unsafe { libc::munmap(self.at, self.len) };
    }
}

/// Whether one mremap moves several mappings at once (6.17): tried on a range of two.
pub fn mremap_moves_several() -> io::Result<bool> {
    let (source, target) = (Scratch::new(2)?, Scratch::new(2)?);
    // SAFETY: both ranges are scratch memory of this function; the move replaces the target, which stays inside
    // the range that `target` unmaps.
    let moved = unsafe {
        if libc::mprotect(source.page(1), PAGE, libc::PROT_READ) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::mremap(
            source.page(0),
            2 * PAGE,
            2 * PAGE,
            libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
            target.page(0),
        )
    };
    Ok(moved != libc::MAP_FAILED)
}

/// Whether madvise knows `advice`: a length of 0 passes the check of the advice and does nothing.
pub fn advice_known(advice: i32) -> io::Result<bool> {
    let scratch = Scratch::new(1)?;
    // SAFETY: a length of 0 changes no memory.
    Ok(unsafe { libc::madvise(scratch.page(0), 0, advice) } == 0)
}

/// Whether process_madvise takes MADV_DONTNEED for the caller's own process (6.13).
pub fn process_madvise_own() -> io::Result<bool> {
    let scratch = Scratch::new(1)?;
    // SAFETY: pidfd_open has no memory arguments.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
    if pidfd < 0 {
        return Err(io::Error::last_os_error());
    }
    let vector = libc::iovec { iov_base: scratch.page(0), iov_len: PAGE };
    // SAFETY: the advice concerns scratch memory only; `pidfd` was just opened here.
    let done = unsafe {
        let done =
            libc::syscall(libc::SYS_process_madvise, pidfd, &raw const vector, 1, libc::MADV_DONTNEED, 0);
        libc::close(pidfd as i32);
        done
    };
    Ok(done >= 0)
}

/// The size in bytes of the SysV segment `id` in the caller's IPC namespace.
pub fn shm_segment_size(id: i32) -> io::Result<u64> {
    // SAFETY: shmid_ds consists of integers, for which zero is a value.
    let mut info: libc::shmid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: IPC_STAT writes one shmid_ds.
    if unsafe { libc::shmctl(id, libc::IPC_STAT, &raw mut info) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(info.shm_segsz as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An experiment that failed to run would be taken for a kernel without the feature.
    #[test]
    fn experiments_run() {
        mremap_moves_several().unwrap();
        process_madvise_own().unwrap();
        assert!(advice_known(libc::MADV_DONTNEED).unwrap());
        assert!(!advice_known(77).unwrap());
        assert_eq!(shm_segment_size(-1).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
