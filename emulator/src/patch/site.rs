//! Finding sites: by pattern, then by decoding the function that holds it.

use iced_x86::{Code, Decoder, DecoderOptions, Mnemonic, Register};
use ummunotify_abi::PageRange;
use ummunotify_inline::{NUMBERS, TASKS, nr};

use super::image::Image;

/// Larger functions aren't looked at: none that makes a mapping call comes near.
const LARGEST_FUNCTION: u64 = 64 << 10;

/// A `mov $number,%eax` with a `syscall` behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Site {
    /// Where the mov is.
    pub(super) at: u64,
    /// The call's number.
    pub(super) number: u32,
    /// The arithmetic flags that the call comes with are overwritten before anything reads them.
    pub(super) forgets_flags: bool,
}

impl Site {
    /// The mov.
    pub(super) fn bytes(&self) -> [u8; 5] {
        let [a, b, c, d] = self.number.to_le_bytes();
        [0xb8, a, b, c, d]
    }
}

/// The sites of the calls that are patched, in ascending order.
pub(super) fn find(image: &Image) -> Vec<Site> {
    let text = image.bytes(image.text.start, image.text.len() as usize).unwrap_or_default();
    let mut sites = Vec::new();
    for (offset, window) in text.windows(7).enumerate() {
        if window[0] != 0xb8 || window[5..] != [0x0f, 0x05] {
            continue;
        }
        let number = u32::from_le_bytes([window[1], window[2], window[3], window[4]]);
        let at = image.text.start + offset as u64;
        let forgets_flags = forgets_flags(text.get(offset + window.len()..).unwrap_or_default());
        let site = Site { at, number, forgets_flags };
        if (NUMBERS.contains(&number) || TASKS.contains(&number))
            && let Some(function) = image.bounds.function(site.at, image)
            && if number == nr::CLONE3 {
                makes_tasks(&site, function, image.text, text)
            } else {
                is_sound(&site, function, image.text, text)
            }
        {
            sites.push(site);
        }
    }
    sites
}

/// Whether code, but for moves, begins with a comparison: it sets all flags, and moves read none.
fn forgets_flags(code: &[u8]) -> bool {
    let instructions = Decoder::new(64, code, DecoderOptions::NONE).into_iter().take(4);
    let next = instructions.map(|i| i.mnemonic()).find(|m| !matches!(m, Mnemonic::Mov | Mnemonic::Lea));
    matches!(next, Some(Mnemonic::Cmp | Mnemonic::Test))
}

/// Whether the function decodes to its end, with these two instructions in it, and none of its branches leads
/// into the bytes that are replaced.
fn is_sound(site: &Site, function: PageRange, text: PageRange, bytes: &[u8]) -> bool {
    if function.start < text.start || function.end > text.end || function.len() > LARGEST_FUNCTION {
        return false;
    }
    let (from, to) = ((function.start - text.start) as usize, (function.end - text.start) as usize);
    let Some(code) = bytes.get(from..to) else { return false };
    let mut seen = 0;
    for instruction in Decoder::with_ip(64, code, function.start, DecoderOptions::NONE) {
        if instruction.is_invalid() {
            return false;
        }
        // 0 where it is none.
        let target = instruction.near_branch_target();
        if target > site.at && target < site.at + 5 {
            return false;
        }
        if instruction.ip() == site.at {
            let fits = instruction.code() == Code::Mov_r32_imm32
                && instruction.op0_register() == Register::EAX
                && instruction.len() == 5;
            seen += u32::from(fits);
        }
        if instruction.ip() == site.at + 5 {
            seen += u32::from(instruction.code() == Code::Syscall);
        }
    }
    seen == 2
}

/// The same of glibc's clone3, whose unwind table ends behind the mov, since the new task has another stack. It must not
/// use r9, by which that task finds its way back: up to the return that follows the end of such a task.
fn makes_tasks(site: &Site, function: PageRange, text: PageRange, bytes: &[u8]) -> bool {
    const R9: [Register; 4] = [Register::R9, Register::R9D, Register::R9W, Register::R9L];
    /// glibc's has 53 bytes.
    const LARGEST: usize = 160;
    if function.start < text.start || function.end != site.at + 5 {
        return false;
    }
    let from = (function.start - text.start) as usize;
    let Some(code) = bytes.get(from..bytes.len().min(from + LARGEST)) else { return false };
    let (mut seen, mut calls) = (false, 0);
    for instruction in Decoder::with_ip(64, code, function.start, DecoderOptions::NONE) {
        let target = instruction.near_branch_target();
        let registers = (0..instruction.op_count()).map(|n| instruction.op_register(n));
        let mut used = registers.chain([instruction.memory_base(), instruction.memory_index()]);
        if instruction.is_invalid()
            || target > site.at && target < site.at + 5
            || used.any(|register| R9.contains(&register))
        {
            return false;
        }
        seen |= instruction.ip() == site.at && instruction.code() == Code::Mov_r32_imm32;
        if instruction.code() == Code::Syscall {
            if calls == 0 && instruction.ip() != site.at + 5 {
                return false;
            }
            calls += 1;
        }
        if calls == 2 && instruction.code() == Code::Retnq {
            return seen;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0x1000;

    fn sound(code: &[u8], at: u64) -> bool {
        let text = PageRange::new(AT, AT + code.len() as u64);
        is_sound(&Site { at, number: 11, forgets_flags: false }, text, text, code)
    }

    /// As glibc 2.36 has it.
    const CLONE3: [u8; 53] = [
        0xb8, 0xb3, 1, 0, 0, 0x0f, 0x05, 0x48, 0x85, 0xc0, 0x7c, 0x18, 0x74, 0x01, 0xc3, 0x31, 0xed, 0x48,
        0x83, 0xe4, 0xf0, 0x4c, 0x89, 0xc7, 0xff, 0xd2, 0x48, 0x89, 0xc7, 0xb8, 0x3c, 0, 0, 0, 0x0f, 0x05,
        0x48, 0x8b, 0x0d, 0xe3, 0x94, 0x0c, 0, 0xf7, 0xd8, 0x64, 0x89, 0x01, 0x48, 0x83, 0xc8, 0xff, 0xc3,
    ];

    #[test]
    fn tasks_find_back_by_a_register_that_is_used() {
        let site = Site { at: AT, number: nr::CLONE3, forgets_flags: true };
        let (function, text) = (PageRange::new(AT, AT + 5), PageRange::new(AT, AT + 53));
        assert!(makes_tasks(&site, function, text, &CLONE3));
        assert!(!is_sound(&site, function, text, &CLONE3));
        // mov %r9,%rdi instead of mov %r8,%rdi.
        let mut other = CLONE3;
        other[21..24].copy_from_slice(&[0x4c, 0x89, 0xcf]);
        assert!(!makes_tasks(&site, function, text, &other));
        // Cut short.
        assert!(!makes_tasks(&site, function, text, &CLONE3[..40]));
        // Another function than the one that is known.
        assert!(!makes_tasks(&site, PageRange::new(AT, AT + 10), text, &CLONE3));
    }

    #[test]
    fn flags_that_are_read_behind_a_call_are_lost() {
        // cmp $-4096,%rax as in glibc; with a mov before; test %eax,%eax.
        for code in
            [&[0x48, 0x3d, 0, 0xf0, 0xff, 0xff][..], &[0x89, 0xc2, 0x3d, 0, 0xf0, 0xff, 0xff], &[0x85, 0xc0]]
        {
            assert!(forgets_flags(code), "{code:x?}");
        }
        // jz; setz %dl; adc; cmovz; inc, which leaves the carry; call; ret; pushf; nothing.
        for code in [
            &[0x74, 0][..],
            &[0x0f, 0x94, 0xc2],
            &[0x48, 0x83, 0xd0, 0],
            &[0x48, 0x0f, 0x44, 0xc2],
            &[0xff, 0xc0],
            &[0xe8, 0, 0, 0, 0],
            &[0xc3],
            &[0x9c],
            &[],
        ] {
            assert!(!forgets_flags(code), "{code:x?}");
        }
    }

    #[test]
    fn only_whole_instructions_are_sites() {
        let plain = [0xb8, 11, 0, 0, 0, 0x0f, 0x05, 0xc3];
        assert!(sound(&plain, AT));
        // The same bytes as the immediate of another instruction.
        let hidden = [0x48, 0xb8, 0xb8, 11, 0, 0, 0, 0x0f, 0x05, 0xc3];
        assert!(!sound(&hidden, AT + 2));
        // A branch into the replaced bytes: jmp to AT + 3.
        let entered = [0xb8, 11, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xfa];
        assert!(!sound(&entered, AT));
        // One to the syscall is none of ours: jmp to AT + 5.
        let behind = [0xb8, 11, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xfc];
        assert!(sound(&behind, AT));
        let broken = [0xb8, 11, 0, 0, 0, 0x0f, 0x05, 0x06];
        assert!(!sound(&broken, AT));
    }
}
