//! Calls by a bare `syscall` instruction, as static libraries and compilers at run time make them: no hook of a library is in
//! their way.

use std::arch::asm;
use std::mem;

use memmap2::MmapMut;

/// Private anonymous memory, which is mapped and unmapped by the instruction.
#[derive(Debug)]
pub struct Mapping {
    start: usize,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes; `None` if the kernel refuses.
    pub fn new(len: usize) -> Option<Self> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, wherever there is room for it.
        let start = unsafe { call(libc::SYS_mmap, [0, len, access as usize, flags as usize, usize::MAX, 0]) };
        usize::try_from(start).ok().map(|start| Self { start, len })
    }
}

impl From<MmapMut> for Mapping {
    fn from(memory: MmapMut) -> Self {
        let mapping = Self { start: memory.as_ptr() as usize, len: memory.len() };
        mem::forget(memory);
        mapping
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was ours alone, and nobody has a reference into it.
        unsafe { call(libc::SYS_munmap, [self.start, self.len, 0, 0, 0, 0]) };
    }
}

/// Makes a system call; the kernel's answer, an error as its negative number.
///
/// # Safety
/// As for that system call.
#[inline(always)]
unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> isize {
    let answer;
    // SAFETY: the caller's business; the kernel clobbers rcx and r11 only.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_mapped(start: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (range, _) = line.split_once(' ').unwrap();
            let (from, to) = range.split_once('-').unwrap();
            let of = |text| usize::from_str_radix(text, 16).unwrap();
            (of(from)..of(to)).contains(&start)
        })
    }

    #[test]
    fn memory_comes_and_goes() {
        let mapping = Mapping::new(1 << 30).unwrap();
        let start = mapping.start;
        assert!(is_mapped(start));
        drop(mapping);
        assert!(!is_mapped(start));
        let mapping = Mapping::from(MmapMut::map_anon(1 << 30).unwrap());
        let start = mapping.start;
        assert!(is_mapped(start));
        drop(mapping);
        assert!(!is_mapped(start));
        assert!(Mapping::new(0).is_none());
    }
}
