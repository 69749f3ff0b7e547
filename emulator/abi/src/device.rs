//! /dev/ummunotify as its clients see it: ioctl numbers and records.
//!
//! Source: the ummunotify driver as posted to the Linux kernel mailing list in 2010 (version 2).

/// The path that clients open.
pub const PATH: &str = "/dev/ummunotify";

/// `_IOWR('U', 1, u32)`: exchanges feature bits; none are defined, so 0 comes back.
pub const EXCHANGE_FEATURES: u32 = 0xc004_5501;
/// `_IOW('U', 2, struct ummunotify_register_ioctl)`.
pub const REGISTER_REGION: u32 = 0x4020_5502;
/// `_IOW('U', 3, u64)`: the argument points to the cookie.
pub const UNREGISTER_REGION: u32 = 0x4008_5503;

/// `_IOW('U', 0x20, s32)`: the kernel module alone has it, for a context that moves there. The argument points to
/// a memfd of one page, sealed against resizing and not against writing, into which it counts from then on.
pub const ADOPT_COUNTER: u32 = 0x4004_5520;

/// [`Event::kind`] of an invalidated region.
pub const EVENT_INVAL: u32 = 0;
/// [`Event::kind`] of the record that closes a complete read; carries the counter.
pub const EVENT_LAST: u32 = 1;
/// [`Event::flags`]: the hint fields name the one range that was invalidated.
pub const FLAG_HINT: u32 = 1;

/// Records in the largest read: one page of them.
pub const MAX_RECORDS: usize = 128;

/// `struct ummunotify_register_ioctl`, the argument of [`REGISTER_REGION`].
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Register {
    /// First byte of the region.
    pub start: u64,
    /// First byte after the region.
    pub end: u64,
    /// Names the region in events and in [`UNREGISTER_REGION`].
    pub cookie: u64,
    /// Ignored.
    pub flags: u32,
    /// Ignored.
    pub reserved: u32,
}

/// `struct ummunotify_event`, one record of a read.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Event {
    /// [`EVENT_INVAL`] or [`EVENT_LAST`].
    pub kind: u32,
    /// [`FLAG_HINT`] or 0.
    pub flags: u32,
    /// First byte of the hint; without a hint the region's own start; 0 in LAST.
    pub hint_start: u64,
    /// First byte after the hint; without a hint the region's own end; 0 in LAST.
    pub hint_end: u64,
    /// The cookie of the region; in LAST the value of the counter.
    pub cookie_counter: u64,
}

const _: () = assert!(size_of::<Register>() == 32 && align_of::<Register>() == 8);
const _: () = assert!(size_of::<Event>() == 32 && align_of::<Event>() == 8);
