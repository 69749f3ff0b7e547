//! Calls that hit, calls that make tasks and programs, and whatever else the fast path leaves. The application's vector
//! registers are saved: before [`hit`] what code for any x86-64 processor uses, before the others all that there are.

use ummunotify_abi::PageRange;
use ummunotify_engine::{Begin, Engine, Recorded};
use ummunotify_inline::{nr, shares_memory};

use super::fast::{self, Frame, GATE, PASS, SLOW, TASK, TRAP};
use super::list::Entry;
use super::{entry, ring};
use crate::owner::PAGE;
use crate::{context, owner, sys};

/// Records what a munmap hits, where nothing but that is to be done; else leaves it to [`begin`]. Calls nothing of libc,
/// which may use more registers than were saved (`tests/tests/inline.rs` reads the disassembly).
pub extern "C" fn hit(frame: &mut Frame) -> u32 {
    let list = &PAGE.list;
    let range = frame.ranges[0];
    if frame.looked.count != 1 || !list.records_munmap(range) {
        return SLOW;
    }
    let Some(engine) = list.entry(0).and_then(Entry::engine) else { return SLOW };
    if !engine.opener_records() || engine.wants_bell() {
        return SLOW;
    }
    let Some(done) = engine.record_known(range) else { return SLOW };
    recorded(frame, 0, engine, done);
    GATE
}

/// Decides how a call is made that neither [`super::fast::begin`] nor [`hit`] could decide on.
pub extern "C" fn begin(frame: &mut Frame) -> u32 {
    match frame.number as u32 {
        nr::CLONE3 => return clone3(frame.args),
        // The program of the one that opened the device is the supervisor's business, nobody else's is.
        nr::EXECVE => return if owner::is_guest() { GATE } else { PASS },
        _ => {}
    }
    let list = &PAGE.list;
    if frame.looked.count == 0 {
        // A context says that it doesn't want our records. If that is because it is over, it goes off the list.
        let over = |n| list.entry(n).and_then(Entry::engine).is_some_and(|engine| engine.is_over());
        if (0..list.count()).any(over) {
            let _blocked = sys::SignalsBlocked::new();
            context::sweep();
        }
        return TRAP;
    }
    let range = frame.ranges[0];
    let known = (0..u32::from(frame.looked.count)).filter_map(|n| Some((n, list.entry(n)?.engine()?)));
    let ours = frame.number as u32 == nr::MUNMAP
        && list.records_munmap(range)
        && known.clone().all(|(_, engine)| engine.opener_records());
    if !ours || known.clone().any(|(_, engine)| engine.wants_bell()) {
        // Whoever is woken for the hit must find the call at its end: a handler of ours that reads the event would
        // else look like a thread that raced with the call. And no handler may jump away before the byte is written.
        block(frame);
    }
    let only = if frame.looked.count == 1 { known.clone().next() } else { None };
    if ours
        && let Some((n, engine)) = only
        && let Some(done) = engine.record_known(range)
    {
        recorded(frame, n, engine, done);
        return GATE;
    }
    let is_mapped = || {
        only.is_none() && known.clone().any(|(_, engine)| engine.is_known_mapped(range))
            || sys::is_mapped(range)
    };
    if !ours || !is_mapped() {
        block(frame);
        return TRAP;
    }
    for (n, engine) in known {
        recorded(frame, n, engine, engine.record(range));
    }
    GATE
}

fn clone3([arguments, size, ..]: [u64; 6]) -> u32 {
    if (size as usize) < size_of::<u64>() {
        return PASS;
    }
    // SAFETY: its one site is in code that only libc itself calls, with arguments of its own.
    let flags = unsafe { (arguments as *const u64).read_unaligned() };
    if shares_memory(flags) { TASK } else { PASS }
}

/// Sees to what is due for what was recorded in context `n`: whether a byte is to be written.
fn recorded(frame: &mut Frame, n: u32, engine: Engine, done: Recorded) {
    if done == Recorded::Missed {
        return;
    }
    engine.hit_in_process();
    if engine.wants_bell() {
        // Without `block`: bytes were taken out in between.
        block(frame);
        frame.looked.ring |= 1 << n;
    }
}

fn block(frame: &mut Frame) {
    if frame.looked.blocked == 0 {
        frame.mask = sys::block_signals();
        frame.looked.blocked = 1;
    }
}

/// Hits what was registered or dequeued while the call ran, and has the bytes written that are due.
pub extern "C" fn end(frame: &mut Frame) {
    block(frame);
    PAGE.list.settled(|generation, list| {
        // The contexts may be others than those that were looked at: then all their regions are hit.
        let same = generation == frame.generation;
        for n in 0..list.count() {
            let Some(entry) = list.entry(n) else { continue };
            let begin = frame.begins.get(n as usize).filter(|_| same).copied().unwrap_or(Begin::EVER);
            let due = !same || frame.looked.ring.checked_shr(n).unwrap_or(0) & 1 == 1;
            let ranges = frame.ranges.get(..usize::from(frame.looked.ranges)).unwrap_or_default();
            end_in(entry, begin, ranges, due);
        }
    });
    sys::restore_signals(frame.mask);
}

/// Looks at the end of the call that a signal has come behind, if it has: its handler may leave it by siglongjmp, and then
/// nobody would. If the handler returns it is looked at once more.
pub fn finish(code: usize, stack: usize) {
    let Some(frame) = entry::made(code, stack) else { return };
    // SAFETY: the frame of the code that was interrupted, which goes on with it.
    let mut frame = unsafe { frame.read() };
    if fast::end(&frame) != 0 {
        end(&mut frame);
    }
}

fn end_in(entry: &Entry, begin: Begin, ranges: &[PageRange], mut due: bool) {
    let Some(engine) = entry.engine() else { return };
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        due |= engine.end(begin, *range) != Recorded::Missed && engine.wants_bell();
    }
    if due {
        ring(entry.inode());
    }
}
