//! Layout of a context's arena: the shared memory that the opener and its supervisor both map, each at an
//! address of its own. Every field is an atomic, and all references are numbers, never pointers: the other
//! side may write anything at any time, so whoever reads checks.
//!
//! The file is sparse: only what is used is ever touched. What a recording reads first (header and the first
//! index nodes) lies in the first page, for after an unmap each page touched costs a TLB miss.
//!
//! | offset | what | bytes |
//! |---|---|---|
//! | 0 | [`Header`], padded to three node sizes | 1536 |
//! | 1536 | index [`Node`]s, numbered by offset / 512 | up to 256 MiB |
//! | [`SLOTS_OFFSET`] | region [`Slot`]s, from number 1 | 128 MiB |
//! | [`COOKIES_OFFSET`] | cookie hash tables: one of n entries lies at entries n..2n | 32 MiB |
//! | [`RINGS_OFFSET`] | rings of queued slots: one of n cells lies at cells n..2n | 64 MiB |

use core::sync::atomic::{AtomicU32, AtomicU64};

/// First word of an arena, written last when it is made.
pub const ARENA_MAGIC: u64 = 0x616e_6572_4155_4d4d;
/// Version of everything in this module.
pub const LAYOUT_VERSION: u32 = 3;

/// Entries in an index node.
pub const FANOUT: usize = 16;
/// Nodes the arena has room for, counting the ones that the header covers.
pub const NODES: u32 = 1 << 19;
/// Number of the first node behind the header.
pub const FIRST_NODE: u32 = 3;
/// Slots that the arena has room for; slot 0 is "none".
pub const SLOTS: u32 = 1 << 21;
/// Regions that may be registered at once: a ring of the largest size then always has room to spare.
pub const MAX_REGIONS: u32 = SLOTS - 512;
/// Binary logarithm of the smallest cookie table.
pub const COOKIES_MIN_LOG: u32 = 10;
/// Binary logarithm of the largest cookie table.
pub const COOKIES_MAX_LOG: u32 = 22;
/// Binary logarithm of the smallest ring.
pub const RING_MIN_LOG: u32 = 10;
/// Number of ring sizes, each twice the one before.
pub const RING_LEVELS: usize = 13;

/// Byte offset of the slots.
pub const SLOTS_OFFSET: usize = NODES as usize * size_of::<Node>();
/// Byte offset of the cookie tables.
pub const COOKIES_OFFSET: usize = SLOTS_OFFSET + SLOTS as usize * size_of::<Slot>();
/// Entries in all cookie tables.
pub const COOKIE_ENTRIES: usize = 2 << COOKIES_MAX_LOG;
/// Byte offset of the rings.
pub const RINGS_OFFSET: usize = COOKIES_OFFSET + COOKIE_ENTRIES * size_of::<AtomicU32>();
/// Cells in all rings.
pub const RING_CELLS: usize = 1 << (RING_MIN_LOG as usize + RING_LEVELS);
/// Bytes of the whole arena.
pub const ARENA_BYTES: usize = RINGS_OFFSET + RING_CELLS * size_of::<AtomicU64>();

/// Flag of [`Header::elsewhere`]: the kernel module records for this context. Register, unregister and read are
/// the supervisor's, which does them there and here.
pub const ELSEWHERE_KMOD: u32 = 1;
/// Flag of [`Header::elsewhere`]: the supervisor must see each registered range, to arm something on it. Register
/// and unregister are the supervisor's.
pub const ELSEWHERE_FAULT: u32 = 2;
/// [`Header::recorder`]: the traps record everything.
pub const TRAPS_RECORD: u32 = 0;
/// [`Header::recorder`]: the opener's threads record what they can before they make a call that isn't trapped.
pub const OPENER_RECORDS: u32 = 1;
/// [`Header::recorder`]: the opener's threads may let pass what hits nothing; whatever hits is to be trapped, since
/// userfaultfd tells of it too, and takes it for the trapped call's.
pub const OPENER_PASSES: u32 = 3;
/// [`Header::recorder`]: the context is over, its descriptors and counter mappings are gone.
pub const NOBODY_RECORDS: u32 = 2;

/// Number of statistics words.
pub const STATISTICS: usize = 32;

/// Where an index keeps its nodes. There are two, used in turns: a rebuild makes the other one, so that a
/// writer that was declared dead too early writes into an index that nobody reads.
#[repr(C)]
#[derive(Debug)]
pub struct Bank {
    /// Least start of any region.
    pub span_start: AtomicU64,
    /// Largest end of any region; equal to `span_start` when there is none.
    pub span_end: AtomicU64,
    /// The root node, 0 if there is none.
    pub root: AtomicU32,
    /// Nodes ever taken from this bank.
    pub used: AtomicU32,
    /// First of the free nodes, chained by `ids[0]`; 0 if there is none.
    pub free: AtomicU32,
    /// Not 0: the index isn't complete, every lookup answers "don't know".
    pub broken: AtomicU32,
}

/// The control fields.
///
/// Fields marked L are written by the holder of `lock` only.
#[repr(C)]
#[derive(Debug)]
pub struct Header {
    /// [`ARENA_MAGIC`].
    pub magic: AtomicU64,
    /// [`LAYOUT_VERSION`].
    pub layout: AtomicU32,
    /// [`SLOTS`].
    pub slots: AtomicU32,
    /// [`ARENA_BYTES`].
    pub bytes: AtomicU64,
    /// Not 0 once the context was used (EXCHANGE_FEATURES is refused from then on).
    pub used: AtomicU32,
    reserved0: [AtomicU32; 9],

    /// L. Odd while the index changes: recorders read the index between two equal even values.
    pub sequence: AtomicU64,
    /// L. Moves on each REGISTER and each dequeue.
    pub epoch: AtomicU64,
    /// Not 0: every region counts as invalid without hint; set by anyone, taken back under the lock.
    pub everything: AtomicU32,
    /// L. The bank that holds the index: 0 or 1.
    pub bank: AtomicU32,
    /// L. The ring that recorders append to.
    pub level: AtomicU32,
    /// Who records what the opener's threads do: [`TRAPS_RECORD`], [`OPENER_RECORDS`], [`OPENER_PASSES`] or
    /// [`NOBODY_RECORDS`]. Written by the supervisor.
    pub recorder: AtomicU32,
    /// Contexts of the opener's address space, as the supervisor counts them: an opener that knows fewer leaves
    /// recording to the traps.
    pub siblings: AtomicU32,
    /// Not 0: a byte lies in the device's pipe, so that nobody needs to write one for a further hit unless
    /// `armed` says so. Set by whoever wrote it, taken back by whoever takes bytes out.
    pub rung: AtomicU32,
    /// Not 0: somebody waits for each hit (SIGIO, edge-triggered epoll). Never taken back.
    pub armed: AtomicU32,
    /// Invalidations that the counter has moved for and that aren't recorded yet, in the low 16 bits: a read waits with
    /// LAST. The next 8 move with each that was recorded, the others whenever a read has given up on all of them.
    pub announced: AtomicU32,
    /// Registrations in a row that looked in vain whether their region was mapped. Kept by the opener's threads.
    pub vain_looks: AtomicU32,
    reserved1: [AtomicU32; 3],

    /// L. The two banks of index nodes.
    pub banks: [Bank; 2],

    /// Kernel thread id of the writer, bit 31 set if somebody waits; 0 when free.
    pub lock: AtomicU32,
    /// L. Slot that is being made or unmade.
    pub in_hand: AtomicU32,
    /// L. Counts the lock's acquisitions: a holder whose lock was taken over finds out.
    pub tenure: AtomicU64,
    /// L. Counter value of the last LAST.
    pub reported: AtomicU64,
    /// L. Live regions.
    pub regions: AtomicU32,
    /// L. Slots ever used.
    pub slots_used: AtomicU32,
    /// L. First free slot, chained by `start`; 0 if there is none.
    pub slots_free: AtomicU32,
    /// L. Binary logarithm of the cookie table.
    pub cookies_log: AtomicU32,
    /// L. Not 0: the smaller table of this logarithm is being emptied into the present one.
    pub cookies_old: AtomicU32,
    /// L. How far the old table is emptied.
    pub cookies_next: AtomicU32,
    /// L. Queued entries of regions that are no more.
    pub stale: AtomicU32,
    /// L. Flags: what the opener's own threads may not do here, but have to ask the supervisor for.
    pub elsewhere: AtomicU32,
    /// Not 0: the supervisor asks the opener to open the real device and hand it over under this number. Set and
    /// withdrawn by the supervisor, taken by whichever of the opener's threads enters first.
    pub request: AtomicU32,
    reserved2: AtomicU32,

    /// Tickets taken, for each ring.
    pub tails: [AtomicU64; 16],
    /// L. Tickets consumed, for each ring.
    pub heads: [AtomicU64; 16],

    /// Counts for people; nothing depends on them.
    pub statistics: [AtomicU64; STATISTICS],
}

/// One region.
#[repr(C)]
#[derive(Debug)]
pub struct Slot {
    /// First byte. In a free slot the number of the next free one.
    pub start: AtomicU64,
    /// First byte after it.
    pub end: AtomicU64,
    /// The client's name for it.
    pub cookie: AtomicU64,
    /// The epoch of its registration: unique, and the second half of its place in the index.
    pub seq: AtomicU64,
    /// State (4 bits) and a stamp that counts the slot's uses and queueings (60 bits).
    pub word: AtomicU64,
    /// The epoch of its registration or last dequeue.
    pub epoch: AtomicU64,
    /// First page of the hint (52 bits) and low bits of the stamp (12 bits).
    pub hint_start: AtomicU64,
    /// Page after the hint, likewise. Until the first hit: whether the region was mapped when it was registered.
    pub hint_end: AtomicU64,
}

/// A node of the index: a B+tree over regions by ascending start, among equal starts the later first.
/// In a leaf an entry is a region, in others a child: a lower bound of its places, its largest end, its number.
#[repr(C)]
#[derive(Debug)]
pub struct Node {
    /// Entries in use.
    pub count: AtomicU32,
    /// 0 in a leaf, else one more than the children's.
    pub level: AtomicU32,
    reserved: [AtomicU64; 7],
    /// Starts.
    pub starts: [AtomicU64; FANOUT],
    /// Ends.
    pub ends: [AtomicU64; FANOUT],
    /// Registration epochs.
    pub seqs: [AtomicU64; FANOUT],
    /// Slot or node numbers.
    pub ids: [AtomicU32; FANOUT],
}

const _: () = assert!(size_of::<Bank>() == 32);
const _: () = assert!(size_of::<Slot>() == 64 && size_of::<Node>() == 512);
const _: () = assert!(size_of::<Header>() == 768);
const _: () = assert!(size_of::<Header>() <= FIRST_NODE as usize * size_of::<Node>());
const _: () = assert!(core::mem::offset_of!(Header, sequence) == 64);
const _: () = assert!(core::mem::offset_of!(Header, banks) == 128);
const _: () = assert!(core::mem::offset_of!(Header, lock) == 192);
const _: () = assert!(core::mem::offset_of!(Header, tails) == 256);
const _: () = assert!(RING_LEVELS <= 16);
const _: () = assert!(ARENA_BYTES == 480 << 20);
