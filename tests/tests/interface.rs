//! The interface suite of `tests/c/interface`, through the emulated device: every numbered rule, every row of
//! the table of calls, processes, ordering and departures is a C function that carries its name.
//!
//! The same program runs unchanged on the kernel module, without `--emulated`.

use std::collections::BTreeSet;
use std::time::Duration;
use ummunotify_tests::{Account, Client, Mode, Stage, say, skip};

/// Checks that can't be made, by name. Any other skip is a failure.
const KNOWN_SKIPS: &[&str] = &["call_register_no_memory.enomem", "call_close_range_cloexec_keeps_it.call"];

/// Fewer checks than this mean that a part of the suite was lost. It has some hundred more.
const LEAST_CHECKS: usize = 1500;

/// The one test that takes seconds; once for each mode is enough.
const MILLION: &str = "departure_3_a_million_regions";

/// Runs the suite with these arguments; fails with the failing lines and the functions that they belong to.
/// Returns the number of checks that were made.
fn run(mode: Mode, layers: &str, account: Account, args: &[&str]) -> usize {
    let stage = Stage::new();
    let suite = stage.client(&Client::interface_suite());
    let outcome =
        stage.program(mode, account, &suite).args(args).layers(layers).limit(Duration::from_secs(240)).run();
    let failures: Vec<&str> = outcome.stdout.lines().filter(|line| line.starts_with("FAIL ")).collect();
    let checks = outcome.stdout.lines().filter(|line| line.starts_with("ok ")).count();
    for line in outcome.stdout.lines().filter_map(|line| line.strip_prefix("skip ")) {
        let (name, reason) = line.split_once(": ").unwrap_or((line, "no reason given"));
        assert!(KNOWN_SKIPS.contains(&name), "{name} was skipped: {reason}");
        skip(name, reason);
    }
    let rules: BTreeSet<&str> = failures.iter().filter_map(|line| line[5..].split('.').next()).collect();
    assert!(
        failures.is_empty(),
        "{layers}, {mode:?}, {account:?}: {} checks failed in {rules:?}:\n{}\nstderr:\n{}",
        failures.len(),
        failures.join("\n"),
        outcome.stderr
    );
    outcome.assert_success();
    let total = outcome.stdout.lines().last().unwrap_or_default();
    say(&format!("interface, {layers}, {mode:?}, {account:?}: {total} in {:.1?}", outcome.elapsed));
    checks
}

fn run_all(mode: Mode, layers: &str, account: Account) {
    if account == Account::Root && !Account::is_superuser() {
        skip("the interface suite as root", "the tests run without privileges");
        return;
    }
    let checks = run(mode, layers, account, &["--emulated", "--without", MILLION]);
    assert!(checks >= LEAST_CHECKS, "only {checks} checks were made");
}

#[test]
fn interface_holds_under_run_for_root() {
    run_all(Mode::Run, "notify", Account::Root);
}

#[test]
fn interface_holds_under_run_for_an_ordinary_user() {
    run_all(Mode::Run, "notify", Account::Ordinary);
}

#[test]
fn interface_holds_under_preload_for_root() {
    run_all(Mode::Preload, "notify", Account::Root);
}

#[test]
fn interface_holds_under_preload_for_an_ordinary_user() {
    run_all(Mode::Preload, "notify", Account::Ordinary);
}

#[test]
fn interface_holds_inline_for_root() {
    run_all(Mode::Preload, "inline,notify", Account::Root);
}

#[test]
fn interface_holds_inline_for_an_ordinary_user() {
    run_all(Mode::Run, "inline,notify", Account::Ordinary);
}

#[test]
fn interface_holds_by_trace_under_run_for_an_ordinary_user() {
    run_all(Mode::Run, "trace", Account::Ordinary);
}

#[test]
fn interface_holds_by_trace_under_preload_for_root() {
    run_all(Mode::Preload, "trace", Account::Root);
}

#[test]
fn a_million_regions_are_held_under_run() {
    assert!(run(Mode::Run, "notify", Account::Ordinary, &[MILLION]) >= 12);
}

#[test]
fn a_million_regions_are_held_under_preload() {
    assert!(run(Mode::Preload, "inline,notify", Account::Ordinary, &[MILLION]) >= 12);
}

/// A program without the device sees the failure that a host without the module gives: the suite can fail.
#[test]
fn suite_fails_without_the_device() {
    if std::path::Path::new(ummunotify_abi::device::PATH).exists() {
        skip("the suite without the device", "this host has the device");
        return;
    }
    let stage = Stage::new();
    let suite = stage.client(&Client::interface_suite());
    let outcome = stage.program(Mode::Native, Account::Ordinary, &suite).arg("rule_").run();
    assert_eq!(outcome.code(), Some(1), "{outcome}");
    assert!(outcome.stdout.contains("FAIL rule_05_counter.open: expected success, got ENOENT"), "{outcome}");
    assert!(!outcome.stdout.contains("\nok "), "{outcome}");
}
