//! What every call at a patched site pays: see the rules in the module above.

use core::hint::black_box;

use ummunotify_abi::PageRange;
use ummunotify_engine::Begin;
use ummunotify_inline::{MADV_DONTNEED, Plan, nr, plan};

use crate::owner::PAGE;

/// What may be used of the stack, from the frame on: downwards by [`super::slow`], upwards to the site's own end.
const BELOW: u64 = 12 << 10;
const ABOVE: u64 = 1 << 10;

/// Contexts that are looked at here; with more of them calls are trapped.
pub const FEW: usize = 8;

/// A call, on its thread's stack. [`super::entry`] knows the offsets, and zeroes `looked`.
#[repr(C)]
pub struct Frame {
    /// The number.
    pub number: u64,
    /// The arguments.
    pub args: [u64; 6],
    /// What the call returned.
    pub result: u64,
    /// What [`super::slow`] decided.
    pub decision: u64,
    /// What is known of the call; zeroes if its end isn't looked at.
    pub looked: Looked,
    /// With signals blocked for this call: what they were before.
    pub mask: u64,
    /// Of the list, when the call was begun.
    pub generation: u64,
    /// What the call touches.
    pub ranges: [PageRange; 2],
    /// Taken before the look at each context.
    pub begins: [Begin; FEW],
}

/// One word, so that the compiler needs no vector register to write it.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct Looked {
    /// Contexts that were looked at.
    pub count: u16,
    /// Of [`Frame::ranges`], those that there are.
    pub ranges: u8,
    /// 1 while signals are blocked for this call.
    pub blocked: u8,
    /// Bit n: a byte is to be written for context n when the call has ended.
    pub ring: u32,
}

/// A call of one range that one context was looked at for, as [`super::entry`] compares it.
pub const BY_ONE: u64 = 1 | 1 << 16;

const _: () = assert!(core::mem::offset_of!(Frame, args) == 8);
const _: () = assert!(core::mem::offset_of!(Frame, result) == 56);
const _: () = assert!(core::mem::offset_of!(Frame, decision) == 64);
const _: () = assert!(core::mem::offset_of!(Frame, looked) == 72 && size_of::<Looked>() == 8);
const _: () = assert!(core::mem::offset_of!(Looked, ranges) == 2 && FEW <= u32::BITS as usize);
const _: () = assert!(size_of::<Frame>() <= super::entry::FRAME);

/// The site's own instruction makes the call: it isn't watched, or must not find anything of ours on the stack.
pub const PASS: u32 = 0;
/// The gate makes it.
pub const GATE: u32 = 1;
/// An instruction that is trapped makes it.
pub const TRAP: u32 = 2;
/// [`super::slow`] decides.
pub const SLOW: u32 = 3;
/// The gate for tasks makes it, with nothing of ours on the stack.
pub const TASK: u32 = 4;

/// Decides how the call of that number, with these first arguments, is made: here the usual one, a munmap or a madvise
/// that drops pages in a process with one context.
#[unsafe(link_section = ".text.ummunotify_inline")]
pub extern "C" fn begin(start: u64, len: u64, third: u64, number: u64, frame: &mut Frame) -> u32 {
    // What munmap touches, both do.
    if number as u32 != nr::MUNMAP && (number as u32 != nr::MADVISE || third as u32 != MADV_DONTNEED) {
        return any(frame);
    }
    let Plan::Within(range, _) = plan(nr::MUNMAP, &[start, len, 0, 0, 0, 0]) else { return TRAP };
    if range.hits(stack_of(frame)) {
        return PASS;
    }
    let list = &PAGE.list;
    // An odd one is no other's.
    let generation = list.generation() & !1;
    if list.count() != 1 {
        return any(frame);
    }
    let Some(look) = list.entry(0).and_then(|entry| entry.look()) else { return TRAP };
    if !look.opener_looks(1) {
        return SLOW;
    }
    // Before the look: who registers between the two is hit at the end.
    frame.begins[0] = look.begin();
    let Some(hits) = look.hits_now(range) else { return any(frame) };
    if list.generation() != generation {
        return TRAP;
    }
    frame.generation = generation;
    frame.ranges[0] = range;
    frame.looked = Looked { count: 1, ranges: 1, blocked: 0, ring: 0 };
    if hits { SLOW } else { GATE }
}

/// The same for any call and number of contexts.
#[inline(never)]
#[unsafe(link_section = ".text.ummunotify_inline")]
extern "C" fn any(frame: &mut Frame) -> u32 {
    // Asked for one by one: a table to jump by would lie in another page.
    let plan = match frame.number as u32 {
        nr::MUNMAP => plan(nr::MUNMAP, &frame.args),
        number => match black_box(number) {
            nr::MADVISE => plan(nr::MADVISE, &frame.args),
            nr::CLONE3 | nr::EXECVE => return SLOW,
            number => plan(black_box(number), &frame.args),
        },
    };
    let (first, second) = match plan {
        Plan::Pass => return PASS,
        Plan::Trap => return TRAP,
        Plan::Within(first, second) => (first, second),
    };
    let ours = stack_of(frame);
    if first.hits(ours) || second.hits(ours) {
        return PASS;
    }
    let list = &PAGE.list;
    let generation = list.generation();
    let known = list.count();
    if generation & 1 == 1 || known == 0 {
        return TRAP;
    }
    if known as usize > FEW {
        // Those that are over go off the list there.
        return SLOW;
    }
    let mut decision = GATE;
    let mut n = 0;
    while n < known {
        let Some(look) = list.entry(n).and_then(|entry| entry.look()) else { return TRAP };
        if !look.opener_looks(known) {
            return SLOW;
        }
        let begin = look.begin();
        if let Some(place) = frame.begins.get_mut(n as usize) {
            *place = begin;
        }
        let clear = look.hits(first) == Some(false)
            && (second.start >= second.end || look.hits(second) == Some(false));
        if !clear {
            decision = SLOW;
        }
        n += 1;
    }
    if list.generation() != generation {
        return TRAP;
    }
    frame.generation = generation;
    frame.ranges[0] = first;
    frame.ranges[1] = second;
    frame.looked = Looked { count: known as u16, ranges: 2, blocked: 0, ring: 0 };
    decision
}

/// What of the stack may be in use. Who discards the unused part of it doesn't know that some of it is ours. No stack
/// lies at an end of the address space.
#[inline(always)]
fn stack_of(frame: &Frame) -> PageRange {
    let here = (&raw const *frame) as u64;
    PageRange::new(here.wrapping_sub(BELOW), here.wrapping_add(ABOVE))
}

/// True if the end of the call has to be looked at.
#[unsafe(link_section = ".text.ummunotify_inline")]
pub extern "C" fn end(frame: &Frame) -> u32 {
    if frame.looked.count == 0 {
        return 0;
    }
    if frame.looked.blocked != 0 {
        return 1;
    }
    let list = &PAGE.list;
    let mut n = 0;
    while n < FEW && n < usize::from(frame.looked.count) {
        let unmoved = list
            .entry(n as u32)
            .and_then(|entry| entry.look())
            .is_some_and(|look| look.unmoved(frame.begins[n]));
        if !unmoved {
            return 1;
        }
        n += 1;
    }
    // Afterwards: then each was the one that it was looked at as.
    (list.generation() != frame.generation).into()
}
