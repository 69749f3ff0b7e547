//! A machine small enough to look at: a memory of a few page frames, and an adapter that pins them.
//!
//! The frames are the pages of a memfd, so that a frame can be mapped twice: once where the application sees
//! it, once where the adapter does. The adapter's own mapping is its pin: like an RDMA adapter's, it names
//! physical memory and takes no notice of what the application does to its addresses.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr::NonNull;

use anyhow::{Context as _, ensure};
use nix::sys::memfd::{MFdFlags, memfd_create};
use ummunotify_abi::PageRange;
use ummunotify_abi::range::PAGE_SIZE;

/// Bytes of a frame that are used and shown.
pub(super) const SHOWN: usize = 16;
const PAGE: usize = PAGE_SIZE as usize;

/// The memory of the machine.
#[derive(Debug)]
pub(super) struct Memory {
    frames: File,
}

/// Some frame, mapped at some address.
#[derive(Debug)]
pub(super) struct Mapping {
    address: NonNull<u8>,
}

/// What the adapter got at a registration: the frame that lay behind the address at that moment.
#[derive(Debug)]
pub(super) struct Pin {
    pub(super) frame: u64,
    window: Mapping,
}

impl Memory {
    pub(super) fn new(frames: u64) -> anyhow::Result<Self> {
        let name = c"ummunotify-demo";
        let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC).context("memfd_create")?);
        file.set_len(frames * PAGE_SIZE).context("ftruncate of a memfd")?;
        let memory = Self { frames: file };
        for frame in 0..frames {
            memory.write(frame, "")?;
        }
        Ok(memory)
    }

    /// What a frame holds, past every mapping.
    pub(super) fn read(&self, frame: u64) -> anyhow::Result<String> {
        let mut bytes = [0u8; SHOWN];
        self.frames.read_exact_at(&mut bytes, frame * PAGE_SIZE).context("pread of a frame")?;
        Ok(shown(&bytes))
    }

    fn write(&self, frame: u64, text: &str) -> anyhow::Result<()> {
        self.frames.write_all_at(&padded(text), frame * PAGE_SIZE).context("pwrite of a frame")
    }

    /// Maps a frame, at a free address of the kernel's choice or at the one that is asked for.
    pub(super) fn map(&self, frame: u64, at: Option<PageRange>) -> anyhow::Result<Mapping> {
        let (hint, fixed) = at.map_or((0, 0), |r| (r.start, libc::MAP_FIXED_NOREPLACE));
        // SAFETY: a new mapping that replaces none: without an address, or with NOREPLACE.
        let page = unsafe {
            libc::mmap(
                hint as *mut libc::c_void,
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | fixed,
                self.frames.as_raw_fd(),
                (frame * PAGE_SIZE) as libc::off_t,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("mmap of a frame");
        }
        let mapping = Mapping { address: NonNull::new(page.cast()).context("mmap answered 0")? };
        let got = mapping.range();
        // Before Linux 4.17 NOREPLACE is a mere wish.
        ensure!(at.is_none_or(|r| r == got), "mmap gave {:#x} instead of the address asked for", got.start);
        Ok(mapping)
    }

    /// Registers an address with the adapter: finds the frame behind it, as the kernel does when it pins, and
    /// keeps it.
    pub(super) fn pin(&self, range: PageRange) -> anyhow::Result<Pin> {
        let frame = self.frame_behind(range)?;
        Ok(Pin { frame, window: self.map(frame, None)? })
    }

    /// The frame that is mapped at an address now, by the kernel's own account.
    pub(super) fn frame_behind(&self, range: PageRange) -> anyhow::Result<u64> {
        let inode = self.frames.metadata().context("fstat of a memfd")?.ino();
        let maps = std::fs::read_to_string("/proc/self/maps").context("read /proc/self/maps")?;
        maps.lines()
            .find_map(|line| frame_in(line, range.start, inode))
            .with_context(|| format!("no frame is mapped at {:#x}", range.start))
    }
}

/// The frame that a line of the mapping table puts at `address`: `start-end perms offset device inode name`.
fn frame_in(line: &str, address: u64, inode: u64) -> Option<u64> {
    let mut fields = line.split_ascii_whitespace();
    let hex = |s: &str| u64::from_str_radix(s, 16).ok();
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (hex(start)?, hex(end)?);
    let offset = hex(fields.nth(1)?)?;
    let same_file = fields.nth(1)? == inode.to_string();
    (same_file && start <= address && address < end).then(|| (offset + (address - start)) / PAGE_SIZE)
}

impl Mapping {
    pub(super) fn range(&self) -> PageRange {
        let start = self.address.addr().get() as u64;
        PageRange::new(start, start + PAGE_SIZE)
    }

    /// What a program reads at this address.
    pub(super) fn read(&self) -> String {
        // SAFETY: the page is mapped as long as self lives; others write to it, hence a volatile read.
        shown(&unsafe { self.address.as_ptr().cast::<[u8; SHOWN]>().read_volatile() })
    }

    fn write(&self, text: &str) {
        // SAFETY: as above; no reference to these bytes exists.
        unsafe { self.address.as_ptr().cast::<[u8; SHOWN]>().write_volatile(padded(text)) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `Memory::map`; nothing points there but self.
        unsafe { libc::munmap(self.address.as_ptr().cast(), PAGE) };
    }
}

impl Pin {
    /// A message arrives: the adapter writes it to the frame that it pinned, wherever the application is by now.
    pub(super) fn receive(&self, message: &str) {
        self.window.write(message);
    }
}

/// Dots stand for bytes that nobody wrote.
fn padded(text: &str) -> [u8; SHOWN] {
    let mut bytes = [b'.'; SHOWN];
    bytes.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
    bytes
}

fn shown(bytes: &[u8; SHOWN]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_adapter_writes_to_the_frame_it_pinned_and_to_no_other() {
        let memory = Memory::new(2).unwrap();
        let buffer = memory.map(0, None).unwrap();
        let range = buffer.range();
        let pin = memory.pin(range).unwrap();
        pin.receive("one");
        assert_eq!((pin.frame, buffer.read().as_str()), (0, "one............."));
        drop(buffer);
        let buffer = memory.map(1, Some(range)).unwrap();
        pin.receive("two");
        assert_eq!(buffer.range(), range);
        assert_eq!(buffer.read(), "................");
        assert_eq!(memory.read(0).unwrap(), "two.............");
        assert_eq!(memory.pin(range).unwrap().frame, 1);
    }

    #[test]
    fn lines_of_the_mapping_table_are_understood() {
        let line = "7f0000003000-7f0000005000 rw-s 00001000 00:01 77   /memfd:ummunotify-demo (deleted)";
        assert_eq!(frame_in(line, 0x7f00_0000_4000, 77), Some(2));
        assert_eq!(frame_in(line, 0x7f00_0000_5000, 77), None);
        assert_eq!(frame_in(line, 0x7f00_0000_4000, 7), None);
        assert_eq!(frame_in("", 0, 0), None);
    }
}
