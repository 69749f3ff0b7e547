//! Reading events, under the lock.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use ummunotify_abi::PageRange;
use ummunotify_abi::arena::{ELSEWHERE_KMOD, Slot};
use ummunotify_abi::device::{EVENT_INVAL, EVENT_LAST, Event, FLAG_HINT, MAX_RECORDS};

use crate::Engine;
use crate::arena::Arena;
use crate::elsewhere;
use crate::error::ReadError;
use crate::hook::step;
use crate::host::{Host, Port};
use crate::lock::{Guard, lock, release};
use crate::queue::{self, Cursor};
use crate::record::{await_announced, everything, outstanding, settle_everything};
use crate::statistics::{Count, Reason, count};
use crate::word::{State, Word, read_hint};

/// Places for records in the usual read.
const FEW: usize = 8;

/// How often "everything" is settled in one read before it goes on without LAST.
const SETTLES: usize = 4;

/// How often a read may find a new announcement after it has waited for one, before it answers with an older value.
const TURNS: usize = 64;

/// A region whose event is being delivered.
#[derive(Clone, Copy)]
struct Taken {
    slot: u32,
    /// Its word before.
    word: Word,
    /// Its epoch before.
    epoch: u64,
}

/// With what value of the counter a read that finds the queue empty ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// Its value now.
    Now,
    /// An earlier value, for which everything that others counted was queued before the call. If the counter has
    /// moved on, the context stays readable.
    At(u64),
    /// None that is known: no LAST.
    Open,
}

/// See [`Engine::read_up_to`].
pub(crate) fn read<P: Port>(
    engine: &Engine,
    host: &impl Host,
    room: usize,
    port: &mut P,
    ending: Ending,
) -> Result<usize, ReadError<P::Error>> {
    let arena = engine.arena();
    arena.header().used.store(1, Relaxed);
    for turn in 1.. {
        let patient = turn < TURNS && await_announced(arena, host);
        let guard = lock(arena, host).map_err(|_| ReadError::Broken)?;
        let result = if host.is_client() && elsewhere::is_set(arena, ELSEWHERE_KMOD) {
            Err(Stopped::Failed(ReadError::Elsewhere))
        } else {
            read_queued(engine, &guard, room.min(MAX_RECORDS), patient, port, ending)
        };
        release(arena, host, guard);
        match result {
            Err(Stopped::Announced | Stopped::Many) => {}
            Err(Stopped::Failed(error)) => return Err(error),
            Ok(n) => return Ok(n),
        }
    }
    Err(ReadError::Broken)
}

/// Reads with as much room as what is queued needs: making room takes longer than to read a few records.
fn read_queued<P: Port>(
    engine: &Engine,
    guard: &Guard,
    room: usize,
    patient: bool,
    port: &mut P,
    ending: Ending,
) -> Result<usize, Stopped<P::Error>> {
    if room <= FEW || queue::length(engine.arena()) < FEW as u64 {
        match read_locked::<FEW, P>(engine, guard, room, patient, port, ending) {
            Err(Stopped::Many) => {}
            result => return result,
        }
    }
    read_many(engine, guard, room, patient, port, ending)
}

/// With as much room as there can be: on its own, since many a thread's stack is small. The other way isn't a call, which
/// would cost it 50 instructions.
#[inline(never)]
fn read_many<P: Port>(
    engine: &Engine,
    guard: &Guard,
    room: usize,
    patient: bool,
    port: &mut P,
    ending: Ending,
) -> Result<usize, Stopped<P::Error>> {
    read_locked::<MAX_RECORDS, P>(engine, guard, room, patient, port, ending)
}

/// Why a read under the lock came to no result.
enum Stopped<E> {
    /// Meanwhile more was queued than there are places for.
    Many,
    /// There is nothing to report but a counter whose last move isn't explained yet.
    Announced,
    /// It failed.
    Failed(ReadError<E>),
}

/// With places for `N` records, however much room there is.
fn read_locked<const N: usize, P: Port>(
    engine: &Engine,
    guard: &Guard,
    room: usize,
    patient: bool,
    port: &mut P,
    ending: Ending,
) -> Result<usize, Stopped<P::Error>> {
    let arena = engine.arena();
    let header = arena.header();

    // The value for LAST, loaded before the looks that must find nothing. A recorder that gives up raises the
    // flag before it counts: the second look sees the flag of every count in the value.
    let mut last = None;
    let mut value = 0;
    for _ in 0..SETTLES {
        if header.everything.load(Acquire) != 0 {
            settle_everything(arena);
        }
        value = match ending {
            Ending::Now => arena.counter().load(Acquire),
            Ending::At(value) => value,
            Ending::Open => break,
        };
        step();
        if header.everything.load(Acquire) == 0 {
            last = Some(value);
            break;
        }
    }
    // After the value: each addition that it counts is announced, or told and its hits are in the rings.
    let outstanding = outstanding(arena);
    let announced = patient && outstanding != 0;
    let reported = header.reported.load(Relaxed);
    if announced {
        last = None;
    } else if outstanding != 0 {
        // Each has moved the counter once, after what was reported: an older value, for which all is told. The
        // context stays readable.
        last = last.map(|value| value.saturating_sub(outstanding.into()).max(reported));
    }

    let mut cursor = Cursor::new(arena);
    let moved = value != reported;
    if room == 0 {
        if cursor.next(arena).is_some() || moved || last.is_none() {
            return Ok(0);
        }
        cursor.commit(arena);
        port.settle(engine, engine.is_readable());
        return Err(Stopped::Failed(ReadError::NotReadable));
    }

    let mut records = [Event::default(); N];
    let mut taken = [Taken { slot: 0, word: Word(0), epoch: 0 }; N];
    let mut n = 0;
    // An operation that began with an earlier epoch than this hits the regions again when it ends. It becomes
    // the epoch after the last region is taken: who begins with it finds them taken.
    let epoch = header.epoch.load(Relaxed).wrapping_add(1);
    while n < room.min(N) {
        let Some((number, _)) = cursor.next(arena) else { break };
        let Some(slot) = arena.slot(number) else { continue };
        let before = slot.epoch.load(Relaxed);
        slot.epoch.store(epoch, Release);
        step();
        if let Some((word, record)) = take(slot)
            && let (Some(to), Some(note)) = (records.get_mut(n), taken.get_mut(n))
        {
            *to = record;
            *note = Taken { slot: number, word, epoch: before };
            n += 1;
        }
    }
    step();
    let regions = n;
    if n > 0 {
        header.epoch.store(epoch, Release);
    }
    if n == N && n < room {
        put_all_back(arena, taken.get(..regions).unwrap_or(&[]));
        return Err(Stopped::Many);
    }
    if n < room {
        match last {
            Some(counter) if n > 0 || moved => {
                if let Some(to) = records.get_mut(n) {
                    *to = Event { kind: EVENT_LAST, cookie_counter: counter, ..Event::default() };
                    n += 1;
                }
            }
            Some(_) => {
                cursor.commit(arena);
                port.settle(engine, engine.is_readable());
                return Err(Stopped::Failed(ReadError::NotReadable));
            }
            None if n == 0 && announced => return Err(Stopped::Announced),
            None if n == 0 && ending == Ending::Open => return Err(Stopped::Failed(ReadError::NotReadable)),
            // Not even one region, and everything still invalid: only a forged arena does that.
            None if n == 0 => return Err(Stopped::Failed(ReadError::Broken)),
            None => last = None,
        }
    } else {
        last = None;
    }
    step();

    let taken = taken.get(..regions).unwrap_or(&[]);
    if let Err(error) = port.deliver(records.get(..n).unwrap_or(&[])) {
        put_all_back(arena, taken);
        return Err(Stopped::Failed(ReadError::Port(error)));
    }
    step();
    if !guard.holds(arena) {
        // A signal handler of this thread took the lock over and made everything invalid; `release` repairs.
        return Ok(n);
    }
    cursor.commit(arena);
    let mut compacted = false;
    for note in taken {
        finish(arena, note, &mut compacted);
    }
    if let Some(counter) = last {
        header.reported.store(counter, Release);
    }
    count(arena, Count::Reported, regions as u64);
    step();
    port.settle(engine, engine.is_readable());
    Ok(n)
}

/// Takes a queued region; its word before, and its record.
fn take(slot: &Slot) -> Option<(Word, Event)> {
    let region = PageRange::new(slot.start.load(Acquire), slot.end.load(Acquire));
    // Within one queueing the word moves twice at most.
    for _ in 0..8 {
        let word = Word::load(slot);
        if !word.is_queued() {
            return None;
        }
        let hint = if word.state() == State::Hinted { read_hint(slot, region, word.stamp()) } else { None };
        if word.swap(slot, word.with(State::Reading)) {
            let bounds = hint.unwrap_or(region);
            let record = Event {
                kind: EVENT_INVAL,
                flags: if hint.is_some() { FLAG_HINT } else { 0 },
                hint_start: bounds.start,
                hint_end: bounds.end,
                cookie_counter: slot.cookie.load(Acquire),
            };
            return Some((word, record));
        }
    }
    None
}

/// The records weren't delivered.
fn put_all_back(arena: &Arena, taken: &[Taken]) {
    for note in taken {
        put_back(arena, note);
    }
}

/// The record wasn't delivered: all as before, but for a hit that came meanwhile.
fn put_back(arena: &Arena, note: &Taken) {
    let Some(slot) = arena.slot(note.slot) else { return };
    let reading = note.word.with(State::Reading);
    let before = if note.word.state() == State::Hinted { State::Hinted } else { State::Plain };
    slot.epoch.store(note.epoch, Release);
    step();
    if !reading.swap(slot, reading.with(before)) {
        reading.with(State::Again).swap(slot, reading.with(State::Plain));
    }
}

/// The record was delivered. A hit that came meanwhile queues the region anew, for the record's bounds may not
/// hold for it.
fn finish(arena: &Arena, note: &Taken, compacted: &mut bool) {
    let Some(slot) = arena.slot(note.slot) else { return };
    let reading = note.word.with(State::Reading);
    if reading.swap(slot, reading.with(State::Idle)) {
        return;
    }
    let again = reading.with(State::Again);
    let writing = again.next(State::Writing);
    if !again.swap(slot, writing) {
        return;
    }
    step();
    let mut pushed = queue::push(arena, note.slot, writing.stamp());
    if !pushed && !core::mem::replace(compacted, true) && queue::compact(arena) {
        pushed = queue::push(arena, note.slot, writing.stamp());
    }
    if pushed {
        writing.swap(slot, writing.with(State::Plain));
    } else {
        writing.swap(slot, writing.with(State::Idle));
        everything(arena, Reason::QueueFull);
    }
}
