//! What the engine's calls take in instructions. Each `count_` function makes [`TURNS`] calls of one kind; a tool that
//! counts instructions tells them apart by name:
//!
//! `valgrind --tool=callgrind --dump-before='*::count_*' --dump-after='*::count_*' target/release/examples/counts`
//!
//! The test `counts` holds the figures against bounds.

mod alone;

use std::hint::black_box;

use alone::{Alone, PAGE, Sink, engine};
use ummunotify_engine::{Engine, PageRange};

/// Calls in each measurement.
const TURNS: u64 = 1000;
/// Regions elsewhere.
const REGIONS: u64 = 1000;

/// Region `n` of many with gaps between them.
fn region(n: u64) -> PageRange {
    PageRange::new((n + 1) * 8 * PAGE, ((n + 1) * 8 + 4) * PAGE)
}

/// The gap behind region `n`.
fn gap(n: u64) -> PageRange {
    PageRange::new(((n + 1) * 8 + 5) * PAGE, ((n + 1) * 8 + 6) * PAGE)
}

#[inline(never)]
fn count_register(engine: &Engine) {
    for n in 0..TURNS {
        engine.register(&Alone, gap(n % REGIONS), REGIONS + n).expect("room");
    }
}

#[inline(never)]
fn count_unregister(engine: &Engine) {
    for n in 0..TURNS {
        engine.unregister(&Alone, REGIONS + n).expect("it was registered");
    }
}

#[inline(never)]
fn count_counter_check(engine: &Engine) {
    for _ in 0..TURNS {
        black_box(black_box(engine).counter() == 0);
    }
}

#[inline(never)]
fn count_miss_far(engine: &Engine) {
    for _ in 0..TURNS {
        black_box(engine.hits(black_box(PageRange::new(1 << 45, 1 << 46))));
    }
}

#[inline(never)]
fn count_miss_near(engine: &Engine) {
    for n in 0..TURNS {
        black_box(engine.hits(black_box(gap(n % REGIONS))));
    }
}

#[inline(never)]
fn count_hit(engine: &Engine) {
    for n in 0..TURNS {
        let begin = engine.begin();
        black_box(engine.record(black_box(region(n % REGIONS))));
        black_box(engine.unmoved(begin));
    }
}

#[inline(never)]
fn count_hit_again(engine: &Engine) {
    for n in 0..TURNS {
        black_box(engine.record(black_box(region(n % REGIONS))));
    }
}

#[inline(never)]
fn count_read_many(engine: &Engine) {
    let mut records = 0;
    while let Ok(n) = engine.read(&Alone, 128, &mut Sink) {
        records += n as u64;
    }
    assert_eq!(records, REGIONS + 1, "all regions, and LAST");
}

#[inline(never)]
fn count_read_one(engine: &Engine) {
    for n in 0..TURNS {
        black_box(engine.record(region(n)));
        assert_eq!(engine.read(&Alone, 128, &mut Sink), Ok(2), "one region, and LAST");
    }
}

fn main() {
    let engine = engine();
    for n in 0..REGIONS {
        engine.register(&Alone, region(n), n).expect("room for all");
    }
    // Twice: the first time the tables grow.
    for _ in 0..2 {
        count_register(&engine);
        count_unregister(&engine);
    }
    count_counter_check(&engine);
    count_miss_far(&engine);
    count_miss_near(&engine);
    count_hit(&engine);
    count_hit_again(&engine);
    count_read_many(&engine);
    count_read_one(&engine);
}
