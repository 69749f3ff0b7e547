//! Models of the clients that used the 2010 driver, each as that client used it, while other threads unmap,
//! move and discard its buffers: none may use a stale registration, spin for ever, or end otherwise than well.

use std::time::Duration;
use ummunotify_abi::config::ENV_TRAP;
use ummunotify_tests::{Account, Client, Mode, Stage, say, skip};

/// Runs one client in both modes for one account.
fn run(name: &str, account: Account) {
    if account == Account::Root && !Account::is_superuser() {
        skip(&format!("{name} as root"), "the tests run without privileges");
        return;
    }
    let stage = Stage::new();
    let sources = [format!("clients/{name}.c"), "clients/application.c".to_owned()];
    let client = Client::program(&format!("client-{name}"), &[&sources[0], &sources[1]]);
    let client = stage.client(&client);
    // By trace in the mode that the other account doesn't use: half of the combinations.
    let traced = Mode::EMULATED[usize::from(account == Account::Root)];
    for (mode, layer) in [(Mode::Run, "notify"), (Mode::Preload, "notify"), (traced, "trace")] {
        let program = stage.program(mode, account, &client).env(ENV_TRAP, layer);
        let outcome = program.arg("1500").limit(Duration::from_secs(60)).run();
        let failures: Vec<&str> = outcome.stdout.lines().filter(|line| line.starts_with("FAIL ")).collect();
        assert!(
            failures.is_empty(),
            "{name}, {layer}, {mode:?}, {account:?}: {}\n{outcome}",
            failures.join("\n")
        );
        outcome.assert_success();
        assert!(outcome.stdout.lines().filter(|line| line.starts_with("ok ")).count() >= 6, "{outcome}");
        if let Some(figures) = outcome.stdout.lines().find(|line| line.contains(" uses, ")) {
            say(&format!("{figures} ({layer}, {mode:?}, {account:?})"));
        }
    }
}

#[test]
fn driver_test_ends_well_for_root() {
    run("driver_test", Account::Root);
}

#[test]
fn driver_test_ends_well_for_an_ordinary_user() {
    run("driver_test", Account::Ordinary);
}

#[test]
fn open_mpi_is_never_stale_for_root() {
    run("open_mpi", Account::Root);
}

#[test]
fn open_mpi_is_never_stale_for_an_ordinary_user() {
    run("open_mpi", Account::Ordinary);
}

#[test]
fn portals_never_spins_for_ever_for_root() {
    run("portals", Account::Root);
}

#[test]
fn portals_never_spins_for_ever_for_an_ordinary_user() {
    run("portals", Account::Ordinary);
}

#[test]
fn zhpe_is_never_stale_for_root() {
    run("zhpe", Account::Root);
}

#[test]
fn zhpe_is_never_stale_for_an_ordinary_user() {
    run("zhpe", Account::Ordinary);
}
