//! Finding sites: by pattern, then by decoding the function that holds it.

use iced_x86::{Code, Decoder, DecoderOptions, Register};
use ummunotify_abi::PageRange;
use ummunotify_inline::NUMBERS;

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
        let site = Site { at: image.text.start + offset as u64, number };
        if NUMBERS.contains(&number)
            && let Some(function) = image.bounds.function(site.at, image)
            && is_sound(&site, function, image.text, text)
        {
            sites.push(site);
        }
    }
    sites
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

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0x1000;

    fn sound(code: &[u8], at: u64) -> bool {
        let text = PageRange::new(AT, AT + code.len() as u64);
        is_sound(&Site { at, number: 11 }, text, text, code)
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
