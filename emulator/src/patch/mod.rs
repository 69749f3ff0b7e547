//! Patching the mapping call sites of a process, and those of clone3 and execve, so that its threads look at a call before it is trapped.
//!
//! A site is a `mov $number,%eax` with a `syscall` behind it, in libc or in the loader. The mov, one instruction of
//! five bytes, is replaced by a jump to a stub, and the `syscall` stays: no thread can stand inside the five bytes,
//! and a call that the kernel restarts finds its instruction. Stubs lie in the rest of the last page of the same
//! object's text, which no function uses: nothing is mapped for them, and they go with the object.
//!
//! Sites are found in the object's file, for a look at the memory of a busy process takes long: by pattern
//! ([`site`]), inside the bounds that the unwind tables give ([`bounds`]), and believed only after the whole
//! function was decoded. The bytes are changed while all threads are stopped, if they are still those of the file.
//! What isn't as expected (another hooker was there before, there is no room for stubs) is left as it is: those
//! calls are trapped as ever. Nothing is ever changed back: without a context the stubs lead to the traps.

mod bounds;
mod image;
mod site;
mod sleep;

pub use sleep::is_sound;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use image::Image;
use site::Site;
use ummunotify_inline::{IMAGE_BASE, IMAGE_SPAN, MAP_FIXED, nr};
use ummunotify_sys::halt;

/// How long threads may take to stop.
const PATIENCE: Duration = Duration::from_millis(500);
/// Alignment of a stub, in bytes.
const STUB: u64 = 16;

/// A process's memory, by /proc/TID/mem: readable and, text included, writable for whoever may trace it.
#[derive(Debug)]
struct Memory(File);

impl Memory {
    /// By any thread that still has it: a first thread that has ended hasn't.
    fn open(pid: u32) -> io::Result<(Self, Vec<u8>)> {
        let mut failed = io::Error::from_raw_os_error(libc::ESRCH);
        for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = entry?.path();
            let opened = OpenOptions::new().read(true).write(true).open(task.join("mem"));
            match (opened, std::fs::read(task.join("maps"))) {
                (Ok(memory), Ok(table)) if !table.is_empty() => return Ok((Self(memory), table)),
                (Err(e), _) | (_, Err(e)) => failed = e,
                _ => {}
            }
        }
        Err(failed)
    }

    fn read(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.0.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }
}

/// Bytes to be replaced: if `before` stands there, `after`, which may be shorter, is put over it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Change {
    at: u64,
    before: Vec<u8>,
    after: Vec<u8>,
}

/// Patches process `pid` so that stubs jump to `entry`. If it is `alone`, its one thread sleeps until this returns.
/// The answer is the number of sites.
///
/// # Errors
/// What the kernel refused; then nothing was patched.
pub fn patch(pid: u32, entry: u64, alone: bool) -> io::Result<usize> {
    if !(IMAGE_BASE..IMAGE_BASE + IMAGE_SPAN).contains(&entry) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let (memory, table) = Memory::open(pid)?;
    let changes: Vec<_> = image::find(pid, &table).iter().flat_map(|image| plan(image, entry)).collect();
    if changes.is_empty() {
        return Ok(0);
    }
    if alone {
        apply(&memory, &changes)
    } else {
        halt::while_halted(pid, PATIENCE, || apply(&memory, &changes))
    }
}

/// The stub and the jump of each site of an image.
fn plan(image: &Image, entry: u64) -> Vec<Change> {
    let sites = site::find(image);
    let mut free = image.room.start;
    let mut changes = Vec::new();
    for site in &sites {
        let at = free.next_multiple_of(STUB);
        let (Some(stub), Some(jump)) = (stub(site, at, entry), jump(site.at, at)) else { continue };
        free = at + stub.len() as u64;
        if free > image.room.end {
            break;
        }
        changes.push(Change { at, before: vec![0; stub.len()], after: stub });
        let before = [&site.bytes()[..], &[0x0f, 0x05]].concat();
        changes.push(Change { at: site.at, before, after: jump });
    }
    changes
}

/// `mov $number,%eax; lea BEHIND(%rip),%r11; movabs $entry,%rcx; jmp *%rcx`: the call itself overwrites rcx and r11.
/// An mmap without MAP_FIXED, which nobody looks at, goes back at once: `test $MAP_FIXED,%r10b; jz SYSCALL` behind the mov.
fn stub(site: &Site, at: u64, entry: u64) -> Option<Vec<u8>> {
    let mut bytes = site.bytes().to_vec();
    if site.number == nr::MMAP && site.forgets_flags {
        bytes.extend([0x41, 0xf6, 0xc2, MAP_FIXED as u8, 0x0f, 0x84]);
        bytes.extend(relative(at + 15, site.at + 5)?);
    }
    bytes.extend([0x4c, 0x8d, 0x1d]);
    bytes.extend(relative(at + bytes.len() as u64 + 4, site.at + 7)?);
    bytes.extend([0x48, 0xb9]);
    bytes.extend(entry.to_le_bytes());
    bytes.extend([0xff, 0xe1]);
    Some(bytes)
}

fn jump(from: u64, to: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0xe9];
    bytes.extend(relative(from + 5, to)?);
    Some(bytes)
}

/// What leads from behind an instruction to `to`, in four bytes.
fn relative(behind: u64, to: u64) -> Option<[u8; 4]> {
    i32::try_from(to.wrapping_sub(behind).cast_signed()).ok().map(i32::to_le_bytes)
}

/// Makes the changes whose place is still as it was planned, stubs before the jumps that lead to them. The answer is
/// the number of sites.
fn apply(memory: &Memory, changes: &[Change]) -> io::Result<usize> {
    let stands =
        |change: &Change| memory.read(change.at, change.before.len()).is_ok_and(|b| b == change.before);
    let mut sites = 0;
    for pair in changes.chunks_exact(2) {
        let [stub, jump] = pair else { continue };
        if stands(stub) && stands(jump) {
            memory.write(stub.at, &stub.after)?;
            memory.write(jump.at, &jump.after)?;
            sites += 1;
        }
    }
    Ok(sites)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: u64 = IMAGE_BASE + 0x7000;

    /// This test's own libc, as the patcher sees it.
    #[test]
    fn sites_of_libc_are_found_and_led_to_the_entry() {
        let pid = std::process::id();
        let images = image::find(pid, &std::fs::read("/proc/self/maps").expect("maps"));
        let (memory, _) = Memory::open(pid).expect("mem");
        assert!(images.len() >= 2, "libc and the loader: {images:?}");
        let mut numbers = Vec::new();
        for image in &images {
            let changes = plan(image, ENTRY);
            for change in &changes {
                let there = memory.read(change.at, change.before.len()).expect("readable");
                assert_eq!(there, change.before, "the file is what is mapped");
            }
            for pair in changes.chunks_exact(2) {
                let [stub, jump] = pair else { continue };
                let number = u32::from_le_bytes(jump.before[1..5].try_into().expect("four bytes"));
                numbers.push(number);
                let mut decoder = iced_x86::Decoder::with_ip(64, &jump.after, jump.at, 0);
                assert_eq!(decoder.decode().near_branch_target(), stub.at);
                let decoder = iced_x86::Decoder::with_ip(64, &stub.after, stub.at, 0);
                let mut stub: Vec<_> = decoder.into_iter().collect();
                if number == nr::MMAP {
                    let [test, back] = [stub.remove(1), stub.remove(1)];
                    assert_eq!((test.op0_register(), test.immediate8()), (iced_x86::Register::R10L, 0x10));
                    assert_eq!(back.code(), iced_x86::Code::Je_rel32_64);
                    assert_eq!(back.near_branch_target(), jump.at + 5);
                }
                assert_eq!(stub.len(), 4);
                assert_eq!((stub[0].mnemonic(), stub[0].immediate32()), (iced_x86::Mnemonic::Mov, number));
                assert_eq!(stub[1].ip_rel_memory_address(), jump.at + 7);
                assert_eq!(stub[2].immediate64(), ENTRY);
                assert_eq!(stub[3].code(), iced_x86::Code::Jmp_rm64);
            }
        }
        for number in [9, 10, 11, 25, 28, 59] {
            assert!(numbers.contains(&number), "no site of call {number}: {numbers:?}");
        }
    }

    #[test]
    fn what_is_too_far_is_left() {
        assert!(jump(0, 1 << 31).is_some());
        assert!(jump(0, (1 << 31) + 5).is_none());
        assert!(jump(1 << 40, 0).is_none());
    }
}
