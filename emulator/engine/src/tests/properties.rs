//! Random sequences of calls: the engine and the model must agree after each.

use proptest::prelude::*;
use std::vec;
use std::vec::Vec;

use super::memory::Memory;
use super::model::{Model, Refusal};
use super::{Buffer, Fault, ME};
use crate::{Engine, PageRange, ReadError, Reason, Recorded, RegisterError, UnregisterError};

/// One call.
#[derive(Clone, Debug)]
enum Call {
    Exchange,
    Register(PageRange, u64),
    /// That many regions of one size, a step apart.
    RegisterMany {
        start: u64,
        step: u64,
        len: u64,
        n: u64,
    },
    Unregister(u64),
    /// The live region of that place in the order of registration.
    UnregisterLive(usize),
    UnregisterMany(usize),
    Record(PageRange),
    MayHit(PageRange),
    Begin(usize),
    End(usize, PageRange),
    InvalidateAll,
    Read {
        room: usize,
        fault: bool,
    },
    Drain,
}

const PAGE: u64 = 4096;

/// Addresses that meet often, and the edges of the address space.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        12 => (0u64..24).prop_map(|page| page * PAGE),
        2 => (0u64..24, 0u64..PAGE).prop_map(|(page, byte)| page * PAGE + byte),
        1 => Just(0),
        1 => Just(u64::MAX),
        1 => Just(!(2 * PAGE - 1)),
        1 => any::<u64>(),
    ]
}

/// Anything a client may register: tiny, huge, empty, inverted, with equal starts.
fn region() -> impl Strategy<Value = PageRange> {
    prop_oneof![
        6 => (address(), 0u64..6 * PAGE).prop_map(|(start, len)| PageRange::new(start, start.saturating_add(len))),
        2 => (address(), address()).prop_map(|(start, end)| PageRange::new(start, end)),
        1 => Just(PageRange::ALL),
    ]
}

/// What the kernel invalidates: whole pages; and everything.
fn range() -> impl Strategy<Value = PageRange> {
    prop_oneof![
        8 => (0u64..24, 1u64..4).prop_map(|(page, n)| PageRange::new(page * PAGE, (page + n) * PAGE)),
        2 => (0u64..24, 1u64..24).prop_map(|(page, n)| PageRange::new(page * PAGE, (page + n) * PAGE)),
        1 => (0u64..1 << 50, 1u64..1 << 50).prop_map(|(page, n)| PageRange::new(page * PAGE, (page + n) * PAGE)),
        1 => (0u64..24, 0u64..24).prop_map(|(s, e)| PageRange::new(s * PAGE, e * PAGE)),
        1 => Just(PageRange::ALL),
    ]
}

fn room() -> impl Strategy<Value = usize> {
    prop_oneof![6 => 0usize..8, 2 => 0usize..=130, 2 => 126usize..=130]
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        1 => Just(Call::Exchange),
        14 => (region(), 0u64..24).prop_map(|(region, cookie)| Call::Register(region, cookie)),
        2 => (0u64..24, 0u64..3, 0u64..4, 1u64..50).prop_map(|(start, step, len, n)| {
            Call::RegisterMany { start: start * PAGE, step: step * PAGE, len: len * PAGE, n }
        }),
        3 => (0u64..24).prop_map(Call::Unregister),
        6 => any::<usize>().prop_map(Call::UnregisterLive),
        1 => (1usize..60).prop_map(Call::UnregisterMany),
        20 => range().prop_map(Call::Record),
        3 => range().prop_map(Call::MayHit),
        3 => (0usize..2).prop_map(Call::Begin),
        4 => (0usize..2, range()).prop_map(|(which, range)| Call::End(which, range)),
        2 => Just(Call::InvalidateAll),
        12 => (room(), prop::bool::weighted(0.2)).prop_map(|(room, fault)| Call::Read { room, fault }),
        2 => Just(Call::Drain),
    ]
}

fn agree_read(engine: &Engine, model: &mut Model, room: usize, fault: bool) -> Option<usize> {
    let mut buffer = Buffer { refuse: fault, ..Buffer::default() };
    let result = engine.read(&ME, room, &mut buffer);
    match model.read(room, fault) {
        Ok(records) => {
            assert_eq!(result, Ok(records.len()));
            assert_eq!(buffer.records, records);
            let expected = (!records.is_empty()).then_some(model.is_readable());
            assert_eq!(buffer.settled, expected, "settle");
            Some(records.len())
        }
        Err(Refusal::NotReadable) => {
            assert_eq!(result, Err(ReadError::NotReadable));
            assert_eq!(buffer.settled, Some(false));
            None
        }
        Err(Refusal::Fault) => {
            assert_eq!(result, Err(ReadError::Port(Fault)));
            assert_eq!(buffer.settled, None);
            None
        }
    }
}

/// Reads until nothing is left.
fn agree_drain(engine: &Engine, model: &mut Model) {
    let mut reads = 0;
    while agree_read(engine, model, 128, false).is_some() {
        reads += 1;
        assert!(reads < 10_000);
    }
    assert_eq!(model.counter, model.reported);
}

fn recorded(hit: bool) -> Recorded {
    if hit { Recorded::Hit } else { Recorded::Missed }
}

fn agree_register(engine: &Engine, model: &mut Model, region: PageRange, cookie: u64) {
    let expected = if model.register(region, cookie) { Ok(()) } else { Err(RegisterError::CookieInUse) };
    assert_eq!(engine.register(&ME, region, cookie), expected);
}

fn agree_unregister(engine: &Engine, model: &mut Model, cookie: u64) {
    let expected = if model.unregister(cookie) { Ok(()) } else { Err(UnregisterError::UnknownCookie) };
    assert_eq!(engine.unregister(&ME, cookie).map(drop), expected);
}

/// Runs the calls on both.
fn agree(engine: &Engine, calls: &[Call]) {
    let mut model = Model::default();
    let mut begins = [(engine.begin(), model.begin()); 2];
    let mut next = 1000;
    for call in calls {
        match *call {
            Call::Exchange => assert_eq!(engine.exchange_features().is_ok(), model.exchange_features()),
            Call::Register(region, cookie) => agree_register(engine, &mut model, region, cookie),
            Call::RegisterMany { start, step, len, n } => {
                for i in 0..n {
                    let start = start + i * step;
                    agree_register(engine, &mut model, PageRange::new(start, start + len), next);
                    next += 1;
                }
            }
            Call::Unregister(cookie) => agree_unregister(engine, &mut model, cookie),
            Call::UnregisterLive(which) => {
                let cookies = model.cookies();
                if !cookies.is_empty() {
                    agree_unregister(engine, &mut model, cookies[which % cookies.len()]);
                }
            }
            Call::UnregisterMany(n) => {
                for (i, cookie) in model.cookies().into_iter().enumerate() {
                    if i % 3 != 0 && i < n {
                        agree_unregister(engine, &mut model, cookie);
                    }
                }
            }
            Call::Record(range) => assert_eq!(engine.record(range), recorded(model.record(range))),
            Call::MayHit(range) => assert_eq!(engine.may_hit(range), model.may_hit(range)),
            Call::Begin(which) => begins[which] = (engine.begin(), model.begin()),
            Call::End(which, range) => {
                let (begin, time) = begins[which];
                assert_eq!(engine.end(begin, range), recorded(model.end(time, range)));
            }
            Call::InvalidateAll => {
                engine.invalidate_all(Reason::Requested);
                model.invalidate_all();
            }
            Call::Read { room, fault } => {
                agree_read(engine, &mut model, room, fault);
            }
            Call::Drain => agree_drain(engine, &mut model),
        }
        assert_eq!(engine.counter(), model.counter);
        assert_eq!(engine.is_readable(), model.is_readable());
        assert_eq!(engine.regions(), model.cookies().len() as u64);
    }
    agree_drain(engine, &mut model);
    let statistics = engine.statistics();
    for reason in Reason::ALL {
        if reason != Reason::Requested {
            assert_eq!(statistics.everything(reason), 0, "{}", reason.name());
        }
    }
}

fn run(cases: u32, calls: impl Strategy<Value = Vec<Call>>) {
    let memory = Memory::private();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let result = runner.run(&calls, |calls| {
        memory.zero();
        agree(&memory.create(), &calls);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn engine_and_model_agree_on_100_000_short_sequences() {
    run(100_000, prop::collection::vec(call(), 1..40));
}

#[test]
fn engine_and_model_agree_on_long_sequences() {
    run(200, prop::collection::vec(call(), 300..500));
}
