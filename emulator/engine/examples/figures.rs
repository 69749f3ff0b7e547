//! What the engine's calls cost, in nanoseconds: least and median of several rounds on this machine.
//!
//! `cargo run --release -p ummunotify-engine --example figures`

mod alone;

use std::hint::black_box;
use std::time::Instant;

use alone::{Alone, PAGE, Sink, engine};
use ummunotify_engine::{Engine, PageRange};

/// Rounds are short, so that some aren't interrupted where others want the processor too.
const ROUNDS: usize = 301;

/// Least and median time of one of `n` calls.
fn time(n: u64, mut call: impl FnMut(u64)) -> [f64; 2] {
    let times = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        (0..n).for_each(&mut call);
        start.elapsed().as_nanos() as f64 / n as f64
    });
    spread(times.collect())
}

fn spread(mut times: Vec<f64>) -> [f64; 2] {
    times.sort_by(f64::total_cmp);
    [times[0], times[times.len() / 2]]
}

/// Region `n` of many with gaps between them.
fn region(n: u64) -> PageRange {
    PageRange::new((n + 1) * 8 * PAGE, ((n + 1) * 8 + 4) * PAGE)
}

/// The gap behind region `n`.
fn gap(n: u64) -> PageRange {
    PageRange::new(((n + 1) * 8 + 5) * PAGE, ((n + 1) * 8 + 6) * PAGE)
}

fn record(engine: &Engine, range: PageRange) {
    black_box(engine.record(range));
}

/// Memory like an index of so many regions: levels of nodes of 512 bytes, each as full as insertion at random leaves it.
struct Levels(Vec<Vec<[u64; 64]>>);

impl Levels {
    fn of(regions: u64) -> Self {
        const ENTRIES: usize = 11;
        let mut levels = Vec::new();
        let mut nodes = regions as usize;
        while nodes > 1 {
            nodes = nodes.div_ceil(ENTRIES);
            levels.push(vec![[0; 64]; nodes]);
        }
        // Pages that were never written are one and the same.
        levels.iter_mut().flatten().for_each(|node| *node = black_box([0; 64]));
        levels.reverse();
        Self(levels)
    }

    /// Loads words at `places` in a node of each level, each load from where the one before says.
    fn descend(&self, random: u64, places: &[usize]) {
        let mut read = 0;
        for level in &self.0 {
            let node = &level[((u128::from(random + read as u64) * level.len() as u128) >> 63) as usize];
            for place in places {
                read = black_box(node[place + read] as usize);
            }
        }
    }
}

/// The look that comes before any recording.
fn look(engine: &Engine, range: PageRange) {
    black_box(engine.hits(black_box(range)));
}

fn figures(regions: u64) {
    let engine = engine();
    let mut order: Vec<u64> = (0..regions).collect();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    for i in (1..order.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order.swap(i, (random % (i as u64 + 1)) as usize);
    }
    for &n in &order {
        engine.register(&Alone, region(n), n).expect("room for all");
    }
    let pick = |i: u64| order[(i % regions) as usize];
    let line = |what: &str, [least, median]: [f64; 2]| {
        println!("{regions:>9} regions  {what:<46} {least:>8.1} {median:>8.1} ns");
    };

    line("register + unregister, one place", {
        time(1_000, |_| {
            engine.register(&Alone, gap(regions / 2), u64::MAX).expect("room");
            engine.unregister(&Alone, u64::MAX).expect("it was registered");
        })
    });
    // Each place once: in a second round its nodes would lie in the cache.
    let mut at = 0;
    line("unregister + register, random places", {
        time(1_000, |_| {
            at += 1;
            let n = pick(at);
            engine.unregister(&Alone, n).expect("it was registered");
            engine.register(&Alone, region(n), n).expect("room");
        })
    });
    line("look, miss far away", time(2_000, |_| look(&engine, PageRange::new(1 << 45, 1 << 46))));
    line("look, miss among neighbours, one place", time(2_000, |_| look(&engine, gap(regions / 2))));
    line("look, miss among neighbours, random places", {
        time(1_000, |_| {
            at += 1;
            look(&engine, gap(pick(at)));
        })
    });
    // What memory alone takes of that: an end, a start and a child's number lie in three lines of a node.
    let levels = Levels::of(regions);
    let mut descents = |places: &[usize]| {
        time(1_000, |_| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            levels.descend(random >> 1, places);
        })
    };
    line("loads alone, one a node, random places", descents(&[24]));
    line("loads alone, three a node, random places", descents(&[24, 8, 56]));
    drop(levels);
    line("begin + record + end, hit of a queued region", {
        time(2_000, |_| {
            let begin = engine.begin();
            black_box(engine.record(region(regions / 2)));
            black_box(engine.end(begin, region(regions / 2)));
        })
    });
    line("record, hit + read of the event and LAST", {
        time(1_000, |_| {
            black_box(engine.record(region(regions / 2)));
            let _ = engine.read(&Alone, 128, &mut Sink);
        })
    });
    line("record, hit of an idle region, random places", {
        let n = regions.min(1_000);
        let times = (0..ROUNDS as u64).map(|round| {
            while engine.read(&Alone, 128, &mut Sink).is_ok() {}
            let start = Instant::now();
            (0..n).for_each(|i| record(&engine, region(pick(i + round * n))));
            start.elapsed().as_nanos() as f64 / n as f64
        });
        spread(times.collect())
    });
    while engine.read(&Alone, 128, &mut Sink).is_ok() {}
    let (mut hits, mut reads) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS.min(15) {
        let start = Instant::now();
        engine.record(PageRange::ALL);
        hits.push(start.elapsed().as_nanos() as f64 / regions as f64);
        let start = Instant::now();
        while engine.read(&Alone, 128, &mut Sink).is_ok() {}
        reads.push(start.elapsed().as_nanos() as f64 / regions as f64);
    }
    line("record, hit of all, for each region", spread(hits));
    line("read of all, for each region", spread(reads));
}

fn main() {
    figures(10);
    figures(1_000);
    figures(1_000_000);
}
