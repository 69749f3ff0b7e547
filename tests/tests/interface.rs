//! The interface suite of `tests/c/interface`, through the emulated device: every numbered rule, every row of
//! the table of calls, processes, ordering and departures is a C function that carries its name.
//!
//! The same program runs unchanged on the kernel module, without `--emulated`.

use std::collections::BTreeSet;
use std::time::Duration;
use ummunotify_abi::config::ENV_TRAP;
use ummunotify_tests::{Account, Client, Mode, Stage, say, skip};

/// The suite is one program; it is also the other programs that its tests execute.
fn suite() -> Client {
    const SOURCES: &[&str] = &[
        "interface/check.c",
        "interface/device.c",
        "interface/rules.c",
        "interface/call_open.c",
        "interface/call_ioctl.c",
        "interface/call_read.c",
        "interface/call_block.c",
        "interface/call_poll.c",
        "interface/call_mmap.c",
        "interface/share.c",
        "interface/proc.c",
        "interface/order.c",
        "interface/corners.c",
        "interface/emulated.c",
    ];
    // As distributions build their programs: the fortified entry points are used where sizes are known. In the
    // order of the sources, so that the tests run in it.
    Client::program("interface-suite", SOURCES)
        .flag("-O2")
        .flag("-D_FORTIFY_SOURCE=2")
        .flag("-fno-toplevel-reorder")
}

/// Checks that can't be made, by name. Any other skip is a failure.
const KNOWN_SKIPS: &[&str] = &["call_register_no_memory.enomem", "call_close_range_cloexec_keeps_it.call"];

/// Fewer checks than this mean that a part of the suite was lost. It has some hundred more.
const LEAST_CHECKS: usize = 1500;

/// The one test that takes seconds; once for each mode is enough.
const MILLION: &str = "departure_3_a_million_regions";

/// Runs the suite with these arguments; fails with the failing lines and the functions that they belong to.
/// Returns the number of checks that were made.
fn run(mode: Mode, account: Account, layer: &str, args: &[&str]) -> usize {
    let stage = Stage::new();
    let suite = stage.client(&suite());
    let program = stage.program(mode, account, &suite).env(ENV_TRAP, layer).args(args);
    let outcome = program.limit(Duration::from_secs(240)).run();
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
        "{layer}, {mode:?}, {account:?}: {} checks failed in {rules:?}:\n{}\nstderr:\n{}",
        failures.len(),
        failures.join("\n"),
        outcome.stderr
    );
    outcome.assert_success();
    let total = outcome.stdout.lines().last().unwrap_or_default();
    say(&format!("interface, {layer}, {mode:?}, {account:?}: {total} in {:.1?}", outcome.elapsed));
    checks
}

fn run_all(mode: Mode, account: Account, layer: &str) {
    if account == Account::Root && !Account::is_superuser() {
        skip("the interface suite as root", "the tests run without privileges");
        return;
    }
    let checks = run(mode, account, layer, &["--emulated", "--without", MILLION]);
    assert!(checks >= LEAST_CHECKS, "only {checks} checks were made");
}

#[test]
fn interface_holds_under_run_for_root() {
    run_all(Mode::Run, Account::Root, "notify");
}

#[test]
fn interface_holds_under_run_for_an_ordinary_user() {
    run_all(Mode::Run, Account::Ordinary, "notify");
}

#[test]
fn interface_holds_under_preload_for_root() {
    run_all(Mode::Preload, Account::Root, "notify");
}

#[test]
fn interface_holds_under_preload_for_an_ordinary_user() {
    run_all(Mode::Preload, Account::Ordinary, "notify");
}

#[test]
fn interface_holds_by_trace_under_run_for_an_ordinary_user() {
    run_all(Mode::Run, Account::Ordinary, "trace");
}

#[test]
fn interface_holds_by_trace_under_preload_for_root() {
    run_all(Mode::Preload, Account::Root, "trace");
}

#[test]
fn a_million_regions_are_held_under_run() {
    assert!(run(Mode::Run, Account::Ordinary, "notify", &[MILLION]) >= 12);
}

#[test]
fn a_million_regions_are_held_under_preload() {
    assert!(run(Mode::Preload, Account::Ordinary, "notify", &[MILLION]) >= 12);
}

/// A program without the device sees the failure that a host without the module gives: the suite can fail.
#[test]
fn suite_fails_without_the_device() {
    if std::path::Path::new(ummunotify_abi::device::PATH).exists() {
        skip("the suite without the device", "this host has the device");
        return;
    }
    let stage = Stage::new();
    let suite = stage.client(&suite());
    let outcome = stage.program(Mode::Native, Account::Ordinary, &suite).arg("rule_").run();
    assert_eq!(outcome.code(), Some(1), "{outcome}");
    assert!(outcome.stdout.contains("FAIL rule_05_counter.open: expected success, got ENOENT"), "{outcome}");
    assert!(!outcome.stdout.contains("\nok "), "{outcome}");
}
