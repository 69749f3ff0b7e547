//! No registration cache that trusts the counter page answers for memory that went to somebody else.

use std::env;
use std::time::Duration;
use ummunotify_tests::{Account, Client, Mode, Outcome, Stage, say, skip};

/// Rounds of the default runs; `UMMUNOTIFY_RACE_ROUNDS` sets another number (a million for the long run).
const ROUNDS: u64 = 50_000;
const VALIDATING_ROUNDS: u64 = 20_000;

/// Longer than a race goes on that shows too little (tests/c/bout.h), which it says by its figures.
const PATIENCE: Duration = Duration::from_secs(90);

fn rounds(default: u64) -> u64 {
    match env::var("UMMUNOTIFY_RACE_ROUNDS") {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("UMMUNOTIFY_RACE_ROUNDS={text}: {e}")),
        Err(_) => default,
    }
}

/// The race by each set of layers, once for each account: as the superuser under `run`, as an ordinary user under plain
/// preload, and fewer rounds where both are run, for it takes its time; as few by trace.
#[test]
fn a_cache_entry_is_stale_while_the_counter_says_that_it_is_current() {
    let rounds = rounds(ROUNDS);
    let stage = Stage::new();
    let race = stage.client(&Client::program("race", &["race/race.c"]));
    let mut runs = Vec::new();
    for (nth, account) in Account::available().into_iter().enumerate() {
        let (mode, rounds) = (Mode::EMULATED[nth % 2], if nth == 0 { rounds } else { rounds / 5 });
        runs.extend(["notify", "inline,notify"].map(|layers| (layers, mode, account, rounds)));
        if nth == 0 {
            runs.push(("trace", Mode::Run, account, rounds / 5));
        }
    }
    for (layers, mode, account, rounds) in runs {
        let limit = PATIENCE + Duration::from_millis(rounds);
        // Rounds prove nothing in which nobody was given the address.
        let least = rounds / 100;
        let program = stage.program(mode, account, &race).layers(layers);
        let outcome = program.args([rounds, least].map(|n| n.to_string())).limit(limit).run();
        outcome.assert_success();
        say(&format!(
            "{layers} {mode:?} {account:?}: {} in {:?}",
            outcome.stdout.trim_end(),
            outcome.elapsed
        ));
        let figure = |name| figure(&outcome, name);
        assert_eq!(figure("stale"), 0, "{outcome}");
        assert!(figure("rounds") >= rounds / 4 * 4, "{outcome}");
        assert!(figure("reused") >= least, "too few rounds reused an address: {outcome}");
        // Nor where the entry wasn't current to begin with.
        assert!(
            figure("current") * 10 >= figure("rounds") * 9,
            "too few entries were ever current: {outcome}"
        );
    }
}

/// Re-validates `rounds` times under these layers, and until so many rounds as `until` says have shown something;
/// returns how many old pages were pinned again, and how many of those stayed in the cache as current.
fn revalidate(layers: &str, mode: Mode, account: Account, rounds: u64, until: &[&str]) -> (u64, u64) {
    let stage = Stage::new();
    let race = stage.client(&Client::program("repin", &["race/repin.c"]));
    let limit = PATIENCE + Duration::from_millis(2 * rounds);
    let program = stage.program(mode, account, &race).layers(layers).arg(rounds.to_string());
    let outcome = program.args(until).limit(limit).run();
    let (raced, stale) = (figure(&outcome, "raced"), figure(&outcome, "stale"));
    assert!(figure(&outcome, "rounds") >= rounds, "{outcome}");
    assert_eq!(outcome.code(), Some(i32::from(stale > 0)), "{outcome}");
    let said = outcome.stdout.trim_end().replace('\n', "; ");
    say(&format!("{layers} {mode:?} {account:?}: {said} in {:?}", outcome.elapsed));
    (raced, stale)
}

/// `UMMUNOTIFY_REVALIDATE_ROUNDS` sets another number of rounds (a million for the long run).
fn revalidations() -> u64 {
    match env::var("UMMUNOTIFY_REVALIDATE_ROUNDS") {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("UMMUNOTIFY_REVALIDATE_ROUNDS={text}: {e}")),
        Err(_) => 10_000,
    }
}

/// Under layers that see the end of each call.
fn stays_stale(layers: &str) {
    let rounds = revalidations();
    for (nth, account) in Account::available().into_iter().enumerate() {
        let rounds = if nth == 0 { rounds } else { rounds / 5 };
        let least = rounds / 20;
        let (raced, stale) =
            revalidate(layers, Mode::EMULATED[nth % 2], account, rounds, &[&least.to_string()]);
        assert_eq!(stale, 0, "{stale} of {raced}");
        assert!(raced >= least, "only {raced} re-validated in time");
    }
}

#[test]
fn a_registration_made_during_an_operation_stays_stale_under_trace() {
    stays_stale("trace");
}

/// Whichever of libc's calls it is: who makes it sees its end.
#[test]
fn a_registration_made_during_an_operation_stays_stale_under_inline() {
    stays_stale("inline,notify");
}

/// A munmap in the process is over before another processor could do anything: here it is stopped behind its event. By
/// notify the same is stale, or it would tell nothing.
#[test]
fn a_registration_made_amid_a_munmap_stays_stale_under_inline() {
    if !Account::available().contains(&Account::Root) {
        return skip("a munmap that is stopped behind its event", "SCHED_FIFO is root's");
    }
    let run = |layers, rounds, least: u64| {
        revalidate(layers, Mode::Run, Account::Root, rounds, &[&least.to_string(), "nap"])
    };
    let stage = Stage::new();
    let race = stage.client(&Client::program("repin", &["race/repin.c"]));
    let outcome =
        stage.program(Mode::Run, Account::Root, &race).args(["0", "0", "nap"]).limit(PATIENCE).run();
    if outcome.code() == Some(77) {
        return skip("a munmap that is stopped behind its event", outcome.stdout.trim_end());
    }
    let (raced, stale) = run("notify", 100, 0);
    assert!(stale > 0 && stale <= raced, "{stale} of {raced}");
    let rounds = revalidations() / 4;
    let least = rounds / 500;
    let (raced, stale) = run("inline,notify", rounds, least);
    assert_eq!(stale, 0, "{stale} of {raced}");
    assert!(raced >= least, "only {raced} re-validated in time");
}

/// Notify sees no end of an operation. If the race didn't show that, it would tell nothing about other layers.
#[test]
fn the_window_of_notify_does_not_show() {
    let (raced, stale) = revalidate("notify", Mode::Run, Account::Ordinary, 10_000, &["1", "lose"]);
    assert!(stale > 0 && stale <= raced, "{stale} of {raced}");
}

/// The same by bare instructions, and in a process and a child of it at once.
#[test]
fn a_cache_entry_is_stale_by_raw_calls_or_in_a_forked_child() {
    let stage = Stage::new();
    let race = stage.client(&Client::program("race", &["race/race.c"]));
    let rounds: u64 =
        env::var("UMMUNOTIFY_RACE_ROUNDS").map_or(ROUNDS / 10, |text| text.parse().unwrap_or(ROUNDS));
    for (nth, account) in Account::available().into_iter().enumerate() {
        let limit = PATIENCE + Duration::from_millis(rounds * 2);
        let least = rounds / 100;
        let program = stage.program(Mode::EMULATED[nth % 2], account, &race);
        let outcome =
            program.args([rounds, least].map(|n| n.to_string())).args(["raw", "fork"]).limit(limit).run();
        outcome.assert_success();
        say(&format!(
            "raw, beside a child: {account:?}: {} in {:?}",
            outcome.stdout.trim_end(),
            outcome.elapsed
        ));
        assert_eq!(figure(&outcome, "stale"), 0, "{outcome}");
        assert!(figure(&outcome, "reused") >= least, "too few rounds reused an address: {outcome}");
    }
}

/// A device that never reports anything must lose the race, or the race tells nothing.
#[test]
fn a_device_that_reports_nothing_wins_the_race() {
    let stage = Stage::new();
    let race = stage.client(&Client::program("race", &["race/race.c"]));
    let blind = stage.client(&Client::library("blind", &["race/blind.c"]));
    let program = stage.program(Mode::Native, Account::Ordinary, &race).preload(blind);
    let outcome = program.args(["20000", "1", "lose"]).limit(PATIENCE).run();
    assert_eq!(outcome.code(), Some(1), "{outcome}");
    assert!(figure(&outcome, "stale") > 0, "{outcome}");
}

/// Another thread registers and pins again as soon as it has read the event: only who sees the end of a call can tell
/// it that it was too early. The inline layer does, for the calls of libc, and so does a tracer, for all.
#[test]
fn a_page_that_was_pinned_while_it_was_unmapped_is_believed() {
    let rounds = rounds(VALIDATING_ROUNDS);
    let stage = Stage::new();
    let race = stage.client(&Client::program("revalidate", &["race/revalidate.c"]));
    for (nth, account) in Account::available().into_iter().enumerate() {
        let rounds = if nth == 0 { rounds } else { rounds / 5 };
        let limit = PATIENCE + Duration::from_millis(2 * rounds);
        let least = rounds / 100;
        for layers in ["inline,notify", "trace"] {
            let program = stage.program(Mode::EMULATED[nth % 2], account, &race).layers(layers);
            let outcome = program.args([rounds, least].map(|n| n.to_string())).limit(limit).run();
            outcome.assert_success();
            say(&format!("{layers} {account:?}: {} in {:?}", outcome.stdout.trim_end(), outcome.elapsed));
            assert_eq!(figure(&outcome, "stale"), 0, "{outcome}");
            assert!(figure(&outcome, "believed") >= least, "too little was ever believed: {outcome}");
        }
    }
    let blind = stage.client(&Client::library("blind", &["race/blind.c"]));
    let program = stage.program(Mode::Native, Account::Ordinary, &race).preload(blind);
    let outcome = program.args(["20000", "1", "lose"]).limit(PATIENCE).run();
    assert!(figure(&outcome, "stale") > 0, "a device that reports nothing wins: {outcome}");
}

/// One of the numbers that the race prints.
fn figure(outcome: &Outcome, name: &str) -> u64 {
    let mut fields = outcome.stdout.split_whitespace();
    let value = fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name}: {outcome}"))
}
