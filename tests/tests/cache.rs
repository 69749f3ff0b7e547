//! The registration cache on the emulated device: a stale registration is never given out.

use std::path::PathBuf;
use std::time::Duration;
use ummunotify_tests::{Account, Client, Mode, Outcome, Stage, say};

/// Rounds of the default runs; `UMMUNOTIFY_RACE_ROUNDS` sets another number (a million for the long run).
const REUSE_ROUNDS: u64 = 20_000;
const VALIDATING_ROUNDS: u64 = 3_000;

fn rounds(default: u64) -> u64 {
    match std::env::var("UMMUNOTIFY_RACE_ROUNDS") {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("UMMUNOTIFY_RACE_ROUNDS={text}: {e}")),
        Err(_) => default,
    }
}

fn race(stage: &Stage) -> PathBuf {
    stage.example("cache_race")
}

fn figure(outcome: &Outcome, name: &str) -> u64 {
    let mut fields = outcome.stdout.split_whitespace();
    let value = fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name}: {outcome}"))
}

/// Runs a race on the device.
fn run(stage: &Stage, nth: usize, account: Account, what: &[&str], layers: &str, rounds: u64) -> Outcome {
    let mode = Mode::EMULATED[nth % 2];
    let program = stage.program(mode, account, race(stage)).args(what).layers(layers);
    let outcome = program.limit(Duration::from_secs(120) + Duration::from_millis(5 * rounds)).run();
    outcome.assert_success();
    say(&format!("{mode:?} {layers} {account:?}: {} in {:?}", outcome.stdout.trim_end(), outcome.elapsed));
    assert_eq!(figure(&outcome, "stale"), 0, "{outcome}");
    outcome
}

/// The same race with a cache that is told nothing: it must lose, or the race tells nothing.
fn lost_by_a_blind_cache(stage: &Stage, what: &[&str]) {
    let program = stage.program(Mode::Native, Account::Ordinary, race(stage)).args(what).arg("blind");
    let outcome = program.run();
    assert_eq!(outcome.code(), Some(1), "{outcome}");
    assert!(figure(&outcome, "stale") > 100, "{outcome}");
}

#[test]
fn the_cache_gives_out_pages_that_were_unmapped() {
    let (rounds, stage) = (rounds(REUSE_ROUNDS), Stage::new());
    for (nth, account) in Account::available().into_iter().enumerate() {
        let rounds = if nth == 0 { rounds } else { rounds / 5 };
        for layers in ["notify", "inline,notify", "trace", "notify,fault"] {
            let outcome = run(&stage, nth, account, &["reuse", &rounds.to_string()], layers, rounds);
            // Rounds that prove nothing: a new address each time, or nothing that was believed.
            assert!(figure(&outcome, "reused") * 2 >= rounds, "{outcome}");
            assert!(figure(&outcome, "hits") * 10 >= rounds, "{outcome}");
            assert!(figure(&outcome, "invalidated") * 10 >= rounds, "{outcome}");
        }
    }
    lost_by_a_blind_cache(&stage, &["reuse", "2000"]);
}

/// With the layers that see the end of a call.
#[test]
fn the_cache_gives_out_a_page_that_it_registered_too_early() {
    let (rounds, stage) = (rounds(VALIDATING_ROUNDS), Stage::new());
    for (nth, account) in Account::available().into_iter().enumerate() {
        let rounds = if nth == 0 { rounds } else { rounds / 5 };
        let least = rounds / 4;
        let what = ["revalidate", &rounds.to_string(), &least.to_string()];
        for layers in ["inline,notify", "trace", "notify,fault"] {
            let outcome = run(&stage, nth, account, &what, layers, rounds);
            assert!(figure(&outcome, "registered") >= least, "{outcome}");
        }
    }
    lost_by_a_blind_cache(&stage, &["revalidate", "2000", "0"]);
}

/// What a program communicates from is recorded, and the cache does the same on the device.
#[test]
fn a_recorded_trace_tells_of_another_program() {
    let stage = Stage::new();
    let mpi = stage.client(&Client::library("libmpi-of-tests", &["cache/mpi.c"]));
    let recorder =
        stage.client(&Client::library("mpi-recorder", &["../../benches/recorder/mpi.c"]).link("-ldl"));
    let program = Client::program("mpi-program", &["cache/program.c"]).link("-ldl");
    let program = stage.program(Mode::Native, Account::Ordinary, stage.client(&program));
    // A mapping each, however much was freed before: glibc raises its limit otherwise.
    let program = program.preload(recorder).preload(mpi).env("MALLOC_MMAP_THRESHOLD_", "131072");
    let running = program.spawn();
    let trace = stage.work().join(format!("trace.{}", running.pid()));
    running.finish().assert_success();
    let text = std::fs::read_to_string(&trace).expect("a trace was written");
    let count =
        |what: &str| text.lines().filter(|line| line.starts_with(what) && line.contains(" 800000")).count();
    assert_eq!((count("use"), count("done")), (200, 200), "{text}");
    assert!(text.lines().filter(|line| line.starts_with("unmap")).count() >= 101, "{text}");

    let bench = stage.program_of_the_build("ummunotify-cache-bench");
    let outcome = stage.program(Mode::Run, Account::Ordinary, bench).arg("replay").arg(&trace).run();
    outcome.assert_success();
    assert!(outcome.stdout.contains("200 transfers\n"), "{outcome}");
    // The block that stays is registered once. The others go, and may come back, at the same address.
    assert!(outcome.stdout.contains("99 hits (49.5 %), 101 registrations, 100 became stale"), "{outcome}");
}
