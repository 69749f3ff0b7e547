//! Where functions begin and end, by the search table of the unwind tables (`.eh_frame_hdr`, Linux Standard Base).
//!
//! The dynamic symbols don't cover what isn't exported: none of the loader's sites.

use ummunotify_abi::PageRange;

use super::image::Image;

/// Encodings of the header's fields: four bytes, signed, from the field itself; from the header; unsigned.
const PCREL_SDATA4: u8 = 0x1b;
const DATAREL_SDATA4: u8 = 0x3b;
const UDATA4: u8 = 0x03;

/// The search table of one object.
#[derive(Debug)]
pub(super) struct Bounds {
    /// Start of each function and address of its description, ascending.
    pub(super) entries: Vec<(u64, u64)>,
}

impl Bounds {
    /// Reads the table of `size` bytes at `at`; `None` if it isn't of the usual kind.
    pub(super) fn read(at: u64, size: u64, image: &Image) -> Option<Self> {
        let bytes = image.bytes(at, usize::try_from(size).ok()?)?;
        let (head, table) = bytes.split_at_checked(12)?;
        if head[..4] != [1, PCREL_SDATA4, UDATA4, DATAREL_SDATA4] {
            return None;
        }
        let count = u32::from_le_bytes(head[8..12].try_into().ok()?) as usize;
        let offset = |bytes: &[u8]| Some(i64::from(i32::from_le_bytes(bytes.try_into().ok()?)));
        let entries: Option<Vec<_>> = table
            .chunks_exact(8)
            .take(count)
            .map(|entry| {
                let (start, description) = entry.split_at(4);
                Some((at.wrapping_add_signed(offset(start)?), at.wrapping_add_signed(offset(description)?)))
            })
            .collect();
        entries
            .filter(|entries| entries.len() == count && entries.is_sorted())
            .map(|entries| Self { entries })
    }

    /// The function that holds `address`.
    pub(super) fn function(&self, address: u64, image: &Image) -> Option<PageRange> {
        let next = self.entries.partition_point(|(start, _)| *start <= address);
        let (start, description) = *self.entries.get(next.checked_sub(1)?)?;
        // Length, reference to the common part, then start and length of the function.
        let bytes = image.bytes(description, 16)?;
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let begin = (description + 8).wrapping_add_signed(i64::from(word(8)?.cast_signed()));
        let range = PageRange::new(start, start.checked_add(u64::from(word(12)?))?);
        (begin == start && (range.start..range.end).contains(&address)).then_some(range)
    }
}
