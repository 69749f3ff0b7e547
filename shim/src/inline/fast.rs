//! What every call at a patched site pays: see the rules in the module above.

use core::hint::black_box;

use ummunotify_abi::PageRange;
use ummunotify_engine::Begin;
use ummunotify_inline::{NOWHERE, Plan, nr, plan};

use crate::owner::PAGE;

/// What may be used of the stack, from the frame on: downwards by [`super::slow`], upwards to the site's own end.
const BELOW: u64 = 12 << 10;
const ABOVE: u64 = 1 << 10;

/// Contexts that are looked at here; with more of them calls are trapped.
pub const FEW: usize = 4;

/// A call, on its thread's stack. [`super::entry`] knows the offsets, and zeroes `count`, `blocked` and `ring`: here
/// the compiler would do it with a vector register.
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
    /// Contexts that were looked at; 0 if the end isn't looked at.
    pub count: u64,
    /// 1 while signals are blocked for this call; `mask` is what they were before.
    pub blocked: u64,
    /// Bit n: a byte is to be written for context n when the call has ended.
    pub ring: u64,
    /// See `blocked`.
    pub mask: u64,
    /// Of the list, when the call was begun.
    pub generation: u64,
    /// What the call touches; the second may be empty.
    pub ranges: [PageRange; 2],
    /// Taken before the look at each context.
    pub begins: [Begin; FEW],
}

const _: () = assert!(core::mem::offset_of!(Frame, args) == 8);
const _: () = assert!(core::mem::offset_of!(Frame, result) == 56);
const _: () = assert!(core::mem::offset_of!(Frame, decision) == 64);
const _: () = assert!(core::mem::offset_of!(Frame, count) == 72);
const _: () = assert!(core::mem::offset_of!(Frame, blocked) == 80);
const _: () = assert!(core::mem::offset_of!(Frame, ring) == 88);
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

/// Decides how the call is made.
#[unsafe(link_section = ".text.ummunotify_inline")]
pub extern "C" fn begin(frame: &mut Frame) -> u32 {
    // The calls that matter most by themselves: a table to jump by would lie in another page.
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
    // Who discards the unused part of the stack doesn't know that we use some of it.
    let here = (&raw const *frame) as u64;
    let ours = PageRange::new(here.saturating_sub(BELOW), here + ABOVE);
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
        let Some(engine) = list.entry(n).and_then(|entry| entry.engine()) else { return TRAP };
        if !engine.opener_looks(known) {
            return SLOW;
        }
        // Before the look: who registers between the two is hit at the end.
        let begin = engine.begin();
        if let Some(place) = frame.begins.get_mut(n as usize) {
            *place = begin;
        }
        let clear = engine.hits(first) == Some(false)
            && (second.start >= second.end || engine.hits(second) == Some(false));
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
    frame.count = u64::from(known);
    decision
}

/// True if the end of the call has to be looked at.
#[unsafe(link_section = ".text.ummunotify_inline")]
pub extern "C" fn end(frame: &Frame) -> u32 {
    if frame.count == 0 {
        return 0;
    }
    let list = &PAGE.list;
    if frame.blocked != 0 || list.generation() != frame.generation {
        return 1;
    }
    let mut n = 0;
    while n < FEW && (n as u64) < frame.count {
        let unmoved = list
            .entry(n as u32)
            .and_then(|entry| entry.engine())
            .is_some_and(|engine| engine.unmoved(frame.begins[n]));
        if !unmoved {
            return 1;
        }
        n += 1;
    }
    0
}

const _: () = assert!(NOWHERE.is_empty());
