//! A task that waits for the answer to a call of the device: its memory, its descriptors, its answer.
//!
//! Reading its memory can wait for as long as whoever backs that memory wants; only the desk's threads do it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::uio::RemoteIoVec;
use ummunotify_abi::device::Event;
use ummunotify_sys::notify::{Listener, Notification};
use ummunotify_sys::process;

use super::log;
use super::spare;
use super::task;
use crate::target::memory;
use crate::trap::device::Room;

/// Segments that a readv may have (`UIO_MAXIOV`).
const MAX_SEGMENTS: u64 = 1024;
/// Bytes of a `struct iovec`.
const SEGMENT: usize = 16;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// What it asks for, and by which registers.
    pub call: &'a Notification,
    /// Who answers.
    pub listener: &'a Listener,
}

/// A task's memory, good for as long as the task is known to be the same.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Its id.
    pub tid: u32,
}

/// Where records go, checked as far as that needs no look at the buffers.
#[derive(Debug)]
pub struct Buffers {
    segments: Vec<RemoteIoVec>,
    /// Bytes in all of them.
    pub len: u64,
}

impl Caller<'_> {
    /// Its process; `None` if it is gone.
    pub fn process(&self) -> Option<u32> {
        task::process_of(self.call.tid)
    }

    /// Its memory.
    pub fn memory(&self) -> Memory {
        Memory { tid: self.call.tid }
    }

    /// The inode of the pipe behind one of its descriptors, as [`pipe_inode`].
    pub fn pipe_inode(&self, fd: i32) -> Option<u64> {
        pipe_inode(self.call.tid, fd)
    }

    /// Whether a descriptor number is in use; true if that can't be told.
    pub fn is_open(&self, fd: i32) -> bool {
        let link = std::fs::symlink_metadata(format!("/proc/{}/fd/{fd}", self.call.tid));
        !link.is_err_and(|e| task::is_gone(&e))
    }

    /// The flags of an open file.
    ///
    /// # Errors
    /// It isn't open, or it can't be told.
    pub fn file_flags(&self, fd: i32) -> io::Result<i32> {
        let path = format!("/proc/{}/fdinfo/{fd}", self.call.tid);
        let text = spare::with(|| std::fs::read_to_string(&path))?;
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
        flags.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Whether a read by that descriptor may wait; true if that can't be told.
    pub fn blocks(&self, fd: i32) -> bool {
        self.file_flags(fd).map_or(true, |flags| flags & libc::O_NONBLOCK == 0)
    }

    /// A copy of its descriptor, the same open file (pidfd_getfd(2), Linux 5.6).
    pub fn copy(&self, fd: i32) -> io::Result<OwnedFd> {
        let process = self.process().ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
        let pidfd = process::pidfd_open(process)?;
        process::pidfd_getfd(&pidfd, fd)
    }

    /// Whether it still waits: then all that was just learned of this task was of the one that called.
    pub fn waits(&self) -> bool {
        self.listener.is_waiting(self.call.id)
    }

    /// Answers with a value or an errno. False if nobody waits for it any more.
    pub fn answer(&self, result: nix::Result<i64>) -> bool {
        let value = result.unwrap_or_else(|errno| -i64::from(errno as i32));
        self.listener.answered(self.call.id, value).unwrap_or_else(|e| {
            log::warning!("task {}: can't answer its call: {e}", self.call.tid);
            false
        })
    }

    /// Says a sentence in the log, and on the caller's standard error as a shim would, if that takes it at once.
    pub fn explain(&self, text: std::fmt::Arguments<'_>) {
        log::warning!("task {}: {text}", self.call.tid);
        if !log::wants(log::Level::Error) {
            return;
        }
        let Ok(stderr) = self.copy(2) else { return };
        let mut ready = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
        if matches!(poll(&mut ready, PollTimeout::ZERO), Ok(1)) {
            // There is no other place to say it.
            let _ = nix::unistd::write(&stderr, format!("ummunotify: {text}\n").as_bytes());
        }
    }

    /// Lets the call run.
    pub fn proceed(&self) {
        if let Err(e) = self.listener.proceed(self.call.id) {
            log::warning!("task {}: can't let its call go on: {e}", self.call.tid);
        }
    }
}

impl Memory {
    /// Copies from its memory. EFAULT if it can't be read.
    pub fn read(self, address: u64, bytes: &mut [u8]) -> nix::Result<()> {
        memory::read(self.tid.cast_signed(), address, bytes)
    }

    /// A few words of its memory.
    pub fn words<const N: usize>(self, address: u64) -> nix::Result<[u64; N]> {
        let mut words = [0u64; N];
        let mut bytes = vec![0u8; 8 * N];
        self.read(address, &mut bytes)?;
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().map_err(|_| Errno::EFAULT)?);
        }
        Ok(words)
    }

    /// Copies to its memory; a page that it can't write to itself is EFAULT.
    pub fn write(self, address: u64, bytes: &[u8]) -> nix::Result<()> {
        let len = bytes.len();
        let to = Buffers { segments: vec![RemoteIoVec { base: address as usize, len }], len: len as u64 };
        self.fill(&to, bytes)
    }

    /// Copies into buffers, as many bytes as there are; all or EFAULT.
    fn fill(self, buffers: &Buffers, bytes: &[u8]) -> nix::Result<()> {
        memory::write(self.tid.cast_signed(), &buffers.segments, bytes)
    }

    /// Copies records into buffers.
    pub fn deliver(self, buffers: &Buffers, records: &[Event]) -> nix::Result<()> {
        let mut bytes = Vec::with_capacity(size_of_val(records));
        for r in records {
            bytes.extend(r.kind.to_ne_bytes());
            bytes.extend(r.flags.to_ne_bytes());
            bytes.extend(r.hint_start.to_ne_bytes());
            bytes.extend(r.hint_end.to_ne_bytes());
            bytes.extend(r.cookie_counter.to_ne_bytes());
        }
        self.fill(buffers, &bytes)
    }

    /// The buffers of a read. EINVAL, EFAULT as of readv.
    pub fn buffers(self, room: Room) -> nix::Result<Buffers> {
        let (vector, count) = match room {
            Room::Buffer(base, len) => {
                let segments = vec![RemoteIoVec { base: base as usize, len: len as usize }];
                return Ok(Buffers { segments, len });
            }
            Room::Vector(vector, count) => (vector, count),
        };
        if count > MAX_SEGMENTS {
            return Err(Errno::EINVAL);
        }
        let mut bytes = vec![0; count as usize * SEGMENT];
        if count > 0 {
            self.read(vector, &mut bytes)?;
        }
        let mut buffers = Buffers { segments: Vec::with_capacity(count as usize), len: 0 };
        for segment in bytes.chunks_exact(SEGMENT) {
            let word = |at: usize| segment[at..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
            let (base, len) = (word(0), word(8));
            buffers.len = buffers
                .len
                .checked_add(len)
                .filter(|sum| i64::try_from(*sum).is_ok())
                .ok_or(Errno::EINVAL)?;
            buffers.segments.push(RemoteIoVec { base: base as usize, len: len as usize });
        }
        Ok(buffers)
    }
}

/// The inode of the pipe behind a task's descriptor; `None` if it isn't open or something else. Asks no file system:
/// a nameless pipe's link is made up by the kernel.
pub fn pipe_inode(tid: u32, fd: i32) -> Option<u64> {
    let link = std::fs::read_link(format!("/proc/{tid}/fd/{fd}")).ok()?;
    link.to_str()?.strip_prefix("pipe:[")?.strip_suffix(']')?.parse().ok()
}
