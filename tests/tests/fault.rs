//! userfaultfd as a layer: what it adds to the filter, how far it goes alone, and that it is in nobody's way.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ummunotify_abi::config::{ENV_IO_URING, ENV_TRAP};
use ummunotify_tests::{Account, Client, Mode, Outcome, Program, Stage, say, skip};

/// Nothing may hang: what takes longer than this does.
const BOUND: Duration = Duration::from_secs(60);

/// Longer than a race goes on that shows too little (tests/c/bout.h), which it says by its figures.
const PATIENCE: Duration = Duration::from_secs(90);

/// Exit code of a client that can't have what it needs here.
const MISSING: i32 = 77;

/// Rounds of each re-validation race; `UMMUNOTIFY_RACE_ROUNDS` sets another number.
const ROUNDS: u64 = 5_000;

/// With the filter beside it.
const BOTH: &str = "notify,fault";

fn client(stage: &Stage, name: &str) -> PathBuf {
    client_of(stage, name, |client| client)
}

/// The same, made otherwise.
fn client_of(stage: &Stage, name: &str, how: impl Fn(Client) -> Client) -> PathBuf {
    stage.client(&how(Client::program(&format!("fault-{name}"), &[&format!("fault/{name}.c")])))
}

/// A program under these layers; in the environment, as both modes take them from there.
fn under<'a>(
    stage: &'a Stage,
    mode: Mode,
    account: Account,
    layers: Option<&str>,
    path: &PathBuf,
) -> Program<'a> {
    let program = stage.program(mode, account, path).limit(BOUND);
    match layers {
        Some(layers) => program.env(ENV_TRAP, layers),
        None => program,
    }
}

/// One of the numbers that a client prints.
fn figure(outcome: &Outcome, name: &str) -> u64 {
    let mut fields = outcome.stdout.split_whitespace();
    let value = fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name}: {outcome}"))
}

fn rounds() -> u64 {
    match env::var("UMMUNOTIFY_RACE_ROUNDS") {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("UMMUNOTIFY_RACE_ROUNDS={text}: {e}")),
        Err(_) => ROUNDS,
    }
}

/// Whether it went as it must; false, and said, where there is no io_uring.
fn went_well(outcome: &Outcome, what: &str) -> bool {
    if outcome.code() == Some(MISSING) {
        skip(what, outcome.stdout.trim_end());
        return false;
    }
    outcome.assert_success();
    true
}

#[test]
fn requests_of_a_ring_are_missed() {
    let stage = Stage::new();
    let watched = client(&stage, "watched");
    for (nth, account) in Account::available().into_iter().enumerate() {
        for layers in [None, Some(BOTH)] {
            for scenario in ["ring-before", "ring-after", "ring-without-descriptor"] {
                let mode = Mode::EMULATED[nth % 2];
                let outcome = under(&stage, mode, account, layers, &watched).arg(scenario).run();
                if !went_well(&outcome, "requests of an io_uring ring") {
                    return;
                }
                // What isn't seen is named once, at whose process it matters.
                assert_eq!(outcome.stderr.matches("uses io_uring").count(), 1, "{outcome}");
                assert!(outcome.stderr.contains("--io-uring=deny"), "{outcome}");
            }
        }
    }
}

/// A program that nothing can be preloaded into is made to give us a userfaultfd.
#[test]
fn requests_of_a_ring_by_a_static_program_are_missed() {
    let stage = Stage::new();
    let watched = client_of(&stage, "watched", Client::fixed);
    let reuse = client_of(&stage, "reuse", Client::fixed);
    for account in Account::available() {
        for layers in [None, Some(BOTH)] {
            for scenario in ["ring-before", "ring-after", "ring-without-descriptor"] {
                let outcome = under(&stage, Mode::Run, account, layers, &watched).arg(scenario).run();
                if !went_well(&outcome, "requests of an io_uring ring by a static program") {
                    return;
                }
                assert_eq!(outcome.stderr.matches("uses io_uring").count(), 1, "{outcome}");
            }
        }
        let outcome =
            under(&stage, Mode::Run, account, None, &reuse).args(["2000", "1"]).limit(PATIENCE).run();
        outcome.assert_success();
        assert!(figure(&outcome, "dropped") > 0, "nobody saw a dropped page: {outcome}");
        let denied = under(&stage, Mode::Run, account, None, &watched).run_option("--io-uring=deny");
        denied.arg("denied").run().assert_success();
    }
    let alone = under(&stage, Mode::Run, Account::Ordinary, Some("fault"), &watched).arg("ring-after").run();
    assert_eq!(alone.code(), Some(125), "{alone}");
    assert!(alone.stderr.contains("the layer fault gives the device to dynamic programs only"), "{alone}");
}

#[test]
fn a_ring_is_had_although_rings_are_denied() {
    let stage = Stage::new();
    let watched = client(&stage, "watched");
    for (nth, account) in Account::available().into_iter().enumerate() {
        let program = under(&stage, Mode::EMULATED[nth % 2], account, None, &watched).arg("denied");
        program.env(ENV_IO_URING, "deny").run().assert_success();
    }
    // Under run no ring comes before the device, nor by a layer without a filter of its own.
    for account in Account::available() {
        for layers in [None, Some("inline,notify"), Some("trace"), Some("fault")] {
            let program = under(&stage, Mode::Run, account, layers, &watched).run_option("--io-uring=deny");
            // The layer fault watches without a ring.
            let then = if layers == Some("fault") { "only-registered" } else { "denied" };
            program.args(["denied-before", then]).run().assert_success();
        }
    }
}

/// What is watched is what is registered, as long as it is, and without harm to a mapping of which it is a part.
#[test]
fn more_is_watched_than_is_registered_or_longer() {
    let stage = Stage::new();
    let watched = client(&stage, "watched");
    for (nth, account) in Account::available().into_iter().enumerate() {
        for scenario in ["only-registered", "parted-mappings", "parted-by-many", "forks"] {
            let mode = Mode::EMULATED[nth % 2];
            under(&stage, mode, account, Some(BOTH), &watched).arg(scenario).run().assert_success();
        }
    }
}

#[test]
fn an_application_cannot_have_its_own_userfaultfd() {
    let stage = Stage::new();
    let watched = client(&stage, "watched");
    for (nth, account) in Account::available().into_iter().enumerate() {
        let program = under(&stage, Mode::EMULATED[nth % 2], account, Some(BOTH), &watched);
        let log = stage.work().join(format!("log-{nth}"));
        let outcome = program.env(ummunotify_abi::config::ENV_LOG_FILE, &log).arg("own-userfaultfd").run();
        outcome.assert_success();
        // The coverage that it costs is named.
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        assert!(log.contains("a userfaultfd of its own watches"), "{log}");
    }
}

/// Threads that wait for an event to be read, or for an answer to a trapped call, when nobody is left to do either.
#[test]
fn the_death_of_the_supervisor_under_load_hangs_somebody() {
    let stage = Stage::new();
    let load = client(&stage, "load");
    for account in Account::available() {
        for layers in [BOTH, "fault"] {
            let mut program = under(&stage, Mode::Run, account, Some(layers), &load).spawn();
            program.wait_for_line("ready");
            let supervisors: Vec<i32> =
                stage.supervisors().into_iter().filter(|pid| *pid != program.pid()).collect();
            assert!(!supervisors.is_empty(), "no supervisor is there");
            for pid in supervisors {
                kill(Pid::from_raw(pid), Signal::SIGKILL).expect("the supervisor can be killed");
            }
            program.write_line("go on");
            let outcome = program.finish();
            outcome.assert_success();
            assert!(outcome.elapsed < BOUND / 2, "{outcome}");
        }
    }
    stage.assert_nothing_left();
}

#[test]
fn what_a_host_refuses_goes_unsaid() {
    let stage = Stage::new();
    let watched = client(&stage, "watched");
    let confine = stage.client(&Client::program("confine", &["badly_used/confine.c"]));
    let account = Account::Ordinary;
    let run = |denied: &str, options: &[&str], scenario: &str| {
        stage
            .program(Mode::Native, account, &confine)
            .arg(format!("deny={denied}"))
            .arg(stage.binary())
            .arg("run")
            .args(options)
            .arg("--")
            .arg(&watched)
            .arg(scenario)
            .limit(BOUND)
            .run()
    };
    // Asked for by name.
    let outcome = run("userfaultfd", &["--trap", BOTH], "denied");
    assert!(outcome.stderr.contains("userfaultfd can't be had here"), "{outcome}");
    assert!(outcome.stderr.contains("goes unseen"), "{outcome}");
    // There is nothing else.
    let outcome = run("userfaultfd", &["--trap", "fault"], "denied");
    assert_eq!(outcome.code(), Some(125), "{outcome}");
    assert!(outcome.stderr.contains("userfaultfd: Operation not permitted"), "{outcome}");
    // By default it matters where there can be a ring.
    let outcome = run("userfaultfd", &[], "ring-after");
    if !outcome.stdout.contains("io_uring_setup:") {
        assert!(outcome.stderr.contains("Programs may use io_uring"), "{outcome}");
    }
    let outcome = run("userfaultfd,io_uring_setup", &[], "denied");
    outcome.assert_success();
    assert!(!outcome.stderr.contains("userfaultfd"), "{outcome}");
    // And who has denied rings has no such gap.
    let outcome = run("userfaultfd", &["--io-uring", "deny"], "denied");
    outcome.assert_success();
    assert!(!outcome.stderr.contains("userfaultfd"), "{outcome}");
}

/// The same under plain preload, where no `run` looks first.
#[test]
fn a_preloaded_program_is_not_told_that_userfaultfd_is_missing() {
    let stage = Stage::new();
    let watched = client(&stage, "watched");
    let confine = stage.client(&Client::program("confine", &["badly_used/confine.c"]));
    let preloaded = |layers: &str| {
        stage
            .program(Mode::Native, Account::Ordinary, &confine)
            .arg("deny=userfaultfd,io_uring_setup")
            .arg(&watched)
            .arg("denied")
            .env("CONFINED_PRELOAD", stage.shim())
            .env(ummunotify_abi::config::ENV_BINARY, stage.binary())
            .env(ENV_TRAP, layers)
            .limit(BOUND)
            .run()
    };
    let outcome = preloaded(BOTH);
    outcome.assert_success();
    assert!(outcome.stderr.contains("userfaultfd can't be had here, errno 1 (EPERM)"), "{outcome}");
    let outcome = preloaded("fault");
    assert_eq!(outcome.code(), Some(1), "{outcome}");
    assert!(outcome.stderr.contains("userfaultfd, without which nothing would be seen"), "{outcome}");
    let outcome = preloaded("fault,magic");
    assert_eq!(outcome.code(), Some(1), "{outcome}");
    assert!(outcome.stderr.contains("UMMUNOTIFY_TRAP is fault,magic"), "{outcome}");
}

/// Alone it is late, and says so: others can see that the memory is gone before the counter moves. It has moved when
/// the call returns. With the filter beside it nobody sees that.
#[test]
fn the_fault_layer_alone_is_in_time() {
    let stage = Stage::new();
    let late = client(&stage, "late");
    for (nth, account) in Account::available().into_iter().enumerate() {
        let outcome =
            under(&stage, Mode::Run, account, Some("fault"), &late).args(["2000", "1"]).limit(PATIENCE).run();
        outcome.assert_success();
        say(&format!("fault {account:?}: {}", outcome.stdout.trim_end()));
        assert!(
            figure(&outcome, "window") > 0,
            "its window isn't seen, so the next test means nothing: {outcome}"
        );
        assert!(outcome.stderr.contains("hears of an operation only when the memory is gone"), "{outcome}");
        let outcome =
            under(&stage, Mode::EMULATED[nth % 2], account, Some(BOTH), &late).args(["2000", "0"]).run();
        outcome.assert_success();
        assert_eq!((figure(&outcome, "late"), figure(&outcome, "window")), (0, 0), "{outcome}");
    }
}

/// Memory that is registered again between the notice of an operation and its end is reported at its end.
#[test]
fn what_is_registered_again_too_early_stays_stale() {
    let stage = Stage::new();
    let revalidate = client(&stage, "revalidate");
    let rounds = rounds();
    let limit = PATIENCE + Duration::from_millis(15 * rounds);
    for (nth, account) in Account::available().into_iter().enumerate() {
        let rounds = if nth == 0 { rounds } else { rounds / 10 };
        for kind in ["unmap", "move", "parted", "bare"] {
            let program = under(&stage, Mode::EMULATED[nth % 2], account, Some(BOTH), &revalidate);
            // Rounds prove nothing in which the page wasn't taken in before its end.
            let least = rounds / 20;
            let outcome = program.args([kind, &rounds.to_string(), &least.to_string()]).limit(limit).run();
            say(&format!("{BOTH} {account:?}: {}", outcome.stdout.trim_end()));
            outcome.assert_success();
            assert_eq!(figure(&outcome, "stale"), 0, "{outcome}");
            assert!(figure(&outcome, "rounds") >= rounds, "{outcome}");
            assert!(figure(&outcome, "current") >= least, "too few were ever current: {outcome}");
        }
    }
    // Pages are dropped after the event, which therefore is no end: measured, not claimed.
    let measure = |layers: &str, kind: &str, until: &[&str]| {
        let program = under(&stage, Mode::Run, Account::Ordinary, Some(layers), &revalidate);
        let outcome = program.args([kind, &(rounds / 10).to_string()]).args(until).limit(limit).run();
        say(&format!("{layers}: {}", outcome.stdout.trim_end()));
        figure(&outcome, "stale")
    };
    measure(BOTH, "discard", &["0"]);
    // Who tells of the beginning alone must lose, or the race tells nothing.
    for kind in ["unmap", "move", "parted", "discard"] {
        assert!(
            measure("notify", kind, &["1", "lose"]) > 0,
            "a layer that sees no end wins the race: {kind}"
        );
    }
}

/// A page that a request drops is never current in a cache that trusts the counter page.
#[test]
fn a_cache_entry_is_stale_after_a_request_of_a_ring() {
    let stage = Stage::new();
    let reuse = client(&stage, "reuse");
    let rounds = rounds();
    for (nth, account) in Account::available().into_iter().enumerate() {
        let layers = [None, Some(BOTH)][nth % 2];
        let program = under(&stage, Mode::EMULATED[nth % 2], account, layers, &reuse);
        let rounds = if nth == 0 { rounds } else { rounds / 4 };
        let limit = PATIENCE + Duration::from_millis(15 * rounds);
        let outcome = program.args([&rounds.to_string(), "1"]).limit(limit).run();
        if !went_well(&outcome, "the reuse race with io_uring") {
            return;
        }
        say(&format!("{layers:?} {account:?}: {}", outcome.stdout.trim_end()));
        assert!(figure(&outcome, "dropped") > 0, "nobody saw a dropped page: {outcome}");
    }
    // A layer that sees nothing of rings must lose.
    let program = under(&stage, Mode::Run, Account::Ordinary, Some("notify"), &reuse);
    let outcome = program.args(["2000", "1", "lose"]).limit(PATIENCE).run();
    assert_eq!(outcome.code(), Some(1), "{outcome}");
    assert!(figure(&outcome, "stale") > 0, "{outcome}");
}
