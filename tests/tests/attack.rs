//! What a hostile or merely busy program does to the emulator: nothing is missed, nothing hangs, nothing is left.

use std::time::Duration;
use ummunotify_abi::config::{ENV_STATS, ENV_TRAP};
use ummunotify_tests::{Account, Client, Mode, Stage, say, skip};

/// Invalidations that each owner makes in a storm; beside userfaultfd, where each takes its time.
const ROUNDS: &str = "4000";
const ROUNDS_BESIDE: &str = "1000";

#[test]
fn an_invalidation_is_missed_while_tasks_come_and_go() {
    let stage = Stage::new();
    let storm = stage.client(&Client::program("storm", &["attack/storm.c"]));
    for (nth, account) in Account::available().into_iter().enumerate() {
        for layers in ["notify", "inline,notify", "trace", "notify,fault"] {
            // Once each way for each layer.
            let mode = Mode::EMULATED[(nth + usize::from(layers == "trace")) % 2];
            let rounds = if layers.ends_with("fault") { ROUNDS_BESIDE } else { ROUNDS };
            let program = stage.program(mode, account, &storm).arg(rounds).layers(layers);
            let program = if nth == 0 { program.arg("restart") } else { program };
            let outcome = program.limit(Duration::from_secs(120)).run();
            outcome.assert_success();
            say(&format!("{layers} {mode:?} {account:?}: {}", outcome.stdout.trim_end()));
            assert!(outcome.stdout.contains("missed=0 "), "{outcome}");
            // Nothing interrupts a call that a tracer has stopped.
            assert!(layers != "trace" || outcome.stdout.contains("interruptions=0"), "{outcome}");
        }
    }
}

#[test]
fn noise_on_its_sockets_disturbs_the_supervisor() {
    let stage = Stage::new();
    let noise = stage.client(&Client::program("noise", &["attack/noise.c"]));
    for account in Account::available() {
        stage.program(Mode::Run, account, &noise).limit(Duration::from_secs(60)).run().assert_success();
    }
}

/// The place where a process's memory is looked at has a deadline, and is its own.
#[test]
fn a_process_that_cannot_be_looked_at_delays_another_one() {
    let stage = Stage::new();
    let stuck = stage.client(&Client::program("stuck", &["attack/stuck.c"]));
    let accounts = Account::available();
    let traced = accounts.first().map(|account| (*account, "trace"));
    let ways = accounts.iter().map(|account| (*account, "notify")).chain(traced);
    for (nth, (account, layer)) in ways.enumerate() {
        let outcome = stage.program(Mode::EMULATED[nth % 2], account, &stuck).env(ENV_TRAP, layer).run();
        if outcome.code() == Some(77) {
            skip(&format!("a process that can't be looked at, {account:?}"), outcome.stdout.trim());
            continue;
        }
        outcome.assert_success();
        say(&format!("{layer} {account:?}: {}", outcome.stdout.trim_end().replace('\n', "; ")));
    }
}

/// A handler that comes in the midst of a call is held back until its end, whatever it does; and one that can't be held
/// back finds a lock that its own thread has, which is taken over.
#[test]
fn a_signal_in_the_midst_of_a_call_is_lost_or_breaks_it() {
    let stage = Stage::new();
    let signals = Client::program("signals", &["attack/signals.c"]).link("-ldl");
    let signals = stage.client(&signals);
    let figure = |outcome: &str, name: &str| {
        let figure = outcome.split_whitespace().find_map(|word| word.strip_prefix(name));
        figure.and_then(|figure| figure.strip_prefix('=')?.parse::<u64>().ok())
    };
    for account in Account::available() {
        let ways = [("notify", "calls"), ("inline,notify", "calls"), ("notify", "forks"), ("notify", "raw")];
        for (layers, way) in ways {
            let least = if way == "raw" { 5 } else { 50 };
            let program = stage.program(Mode::Run, account, &signals);
            let program = program.args(["2000", &least.to_string(), way]);
            let outcome = program.layers(layers).limit(Duration::from_secs(120)).run();
            outcome.assert_success();
            say(&format!("{way} {layers} {account:?}: {}", outcome.stdout.trim_end()));
            let (moved, held) = (figure(&outcome.stdout, "counter"), figure(&outcome.stdout, "held"));
            match way {
                "raw" => assert!(moved >= Some(least), "{outcome}"),
                // A fork is reported as more than it changes.
                "forks" => assert!(held >= Some(least), "{outcome}"),
                _ => assert!(held >= Some(least) && moved == Some(0), "{outcome}"),
            }
        }
    }
}

/// Tasks that share what a thread keeps, handlers that leave it, and threads that end in the midst of a call.
#[test]
fn a_twin_takes_a_lock_or_a_time_limit_loses_signals_or_a_cancelled_thread_leaves_something() {
    let stage = Stage::new();
    let twins = stage.client(&Client::program("twins", &["attack/twins.c"]));
    let limit = stage.client(&Client::program("limit", &["attack/limit.c"]).flag("-std=c99"));
    let cancelled = stage.client(&Client::program("cancelled", &["attack/cancelled.c"]));
    for account in Account::available() {
        for layers in ["notify", "inline,notify"] {
            for program in [&twins, &limit, &cancelled] {
                let program = stage.program(Mode::Run, account, program).layers(layers).env(ENV_STATS, "1");
                let outcome = program.limit(Duration::from_secs(120)).run();
                outcome.assert_success();
                // A lock that is left behind is taken over; an index that a stopped thread is changing may be busy.
                assert!(!outcome.stderr.contains("taken over"), "{layers} {account:?}: {outcome}");
                say(&format!("{layers} {account:?}: {}", outcome.stdout.trim_end()));
            }
        }
    }
}

#[test]
fn the_smallest_stack_of_a_thread_is_too_small_for_a_call() {
    let stage = Stage::new();
    let shallow = stage.client(&Client::program("shallow", &["attack/shallow.c"]));
    for account in Account::available() {
        for layers in ["notify", "inline,notify", "trace"] {
            let outcome = stage.program(Mode::Run, account, &shallow).layers(layers).run();
            outcome.assert_success();
            say(&format!("{layers} {account:?}: {}", outcome.stdout.trim_end()));
        }
    }
}

/// By the layers that see the end of a call.
#[test]
fn a_call_that_is_left_by_a_handler_misses_a_registration() {
    const LEAST: u64 = 10;
    let stage = Stage::new();
    let left = stage.client(&Client::program("left", &["attack/left.c"]));
    for account in Account::available() {
        for layers in ["inline,notify", "trace"] {
            let program = stage.program(Mode::Run, account, &left).args(["20", &LEAST.to_string()]);
            let outcome = program.layers(layers).limit(Duration::from_secs(120)).run();
            outcome.assert_success();
            say(&format!("{layers} {account:?}: {}", outcome.stdout.trim_end()));
            let shown = outcome.stdout.split_whitespace().find_map(|word| word.strip_prefix("left="));
            assert!(shown.and_then(|shown| shown.parse().ok()) >= Some(LEAST), "{outcome}");
        }
    }
}

/// The copy inherits what its parent is known by.
#[test]
fn a_copy_that_is_forked_amid_an_open_misses_invalidations() {
    let stage = Stage::new();
    let amid = stage.client(&Client::program("amid", &["attack/amid.c"]));
    for (nth, account) in Account::available().into_iter().enumerate() {
        for layers in ["notify", "inline,notify"] {
            let program = stage.program(Mode::EMULATED[nth % 2], account, &amid).arg("fork").layers(layers);
            let outcome = program.limit(Duration::from_secs(90)).run();
            outcome.assert_success();
            let recorded = "stopped=1 acted=1 opener=1 other=1\n";
            assert_eq!(outcome.stdout, recorded, "{layers} {account:?}: {outcome}");
        }
    }
}

/// What one thread has seen under a number says nothing of the device that another one has put there since.
#[test]
fn a_number_that_becomes_the_devices_is_taken_for_what_it_was() {
    let stage = Stage::new();
    let renumbered = stage.client(&Client::program("renumbered", &["attack/renumbered.c"]));
    for account in Account::available() {
        let outcome = stage.program(Mode::Run, account, &renumbered).run();
        outcome.assert_success();
        assert_eq!(outcome.stdout, "register: ok\nread: 2 events\n", "{outcome}");
    }
}

/// A client of `deprived.c`, by each layer.
fn deprived(way: &str, expected: &str) {
    let stage = Stage::new();
    let deprived = stage.client(&Client::program("deprived", &["attack/deprived.c"]));
    for account in Account::available() {
        for layers in ["notify", "inline,notify"] {
            let program = stage.program(Mode::Run, account, &deprived).arg(way).layers(layers);
            let outcome = program.limit(Duration::from_secs(100)).run();
            outcome.assert_success();
            assert_eq!(outcome.stdout, expected, "{layers} {account:?}: {outcome}");
        }
    }
}

/// A lock that is taken over makes everything invalid: whoever waits must learn of it.
#[test]
fn a_lock_is_taken_over_unheard_where_no_descriptor_is_left() {
    deprived("descriptors", "poll: 1\n");
}

/// The pipe's bytes aren't for a holder that can't ask the supervisor, and the opener is woken by its next hit.
#[test]
fn a_holder_that_cannot_ask_takes_the_byte_that_the_opener_waits_for() {
    deprived("exec", "read: EIO\npoll: 1\n");
}

#[test]
fn a_lock_that_a_killed_supervisor_held_keeps_the_opener_waiting() {
    deprived("kill", "register: ok\nunregister: ok\npoll: 1\nread: records\ntook: no time\n");
}
