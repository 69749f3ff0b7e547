//! Failures that users of registration caches, hooks and memory monitors reported elsewhere, as small programs
//! (`tests/c/cases`): none of them happens here. Each name says what would go wrong; the report is named beside it.

use std::time::Duration;
use ummunotify_tests::{Account, Client, Mode, Stage, say, skip};

/// Nothing may hang: what takes longer than this does.
const LIMIT: Duration = Duration::from_secs(60);

fn cases() -> Client {
    let sources = ["cases", "crash", "deadlock", "stale", "growth"].map(|name| format!("cases/{name}.c"));
    // The search path of the program itself: what only it finds must be found with the device open.
    Client::program("cases", &sources.each_ref().map(String::as_str)).flag("-Wl,-rpath,$ORIGIN").link("-ldl")
}

/// Runs one case for each account, in both modes, and once more with the inline layer.
fn run(name: &str, args: &[&str]) {
    run_within(LIMIT, name, args);
}

fn run_within(limit: Duration, name: &str, args: &[&str]) {
    let stage = Stage::new();
    let client = stage.client(&cases());
    let _plugin = stage.client(&plugin());
    let ways = [(Mode::Run, "notify"), (Mode::Preload, "notify"), (Mode::Run, "inline,notify")];
    for account in Account::available() {
        for (mode, layers) in ways {
            let program = stage.program(mode, account, &client).arg(name).args(args);
            let outcome = program.layers(layers).limit(limit).run();
            outcome.assert_success();
            let (last, figures) =
                outcome.stdout.lines().rev().fold((None, Vec::new()), |(last, mut rest), line| {
                    if last.is_some() {
                        rest.insert(0, line);
                    }
                    (last.or(Some(line)), rest)
                });
            assert_eq!(last, Some(format!("ok {name}").as_str()), "{outcome}");
            say(&format!(
                "{name}: {mode:?} {layers} {account:?} {:.1?}: {}",
                outcome.elapsed,
                figures.join("; ")
            ));
        }
    }
}

fn plugin() -> Client {
    Client::library("case-plugin", &["cases/plugin.c"])
}

const PLUGIN: &str = "case-plugin.so";

/// libfabric#10943, ucx#5855, ucx#11647.
#[test]
fn an_open_under_load_crashes_or_takes_a_second() {
    // A second, but for machines that are busy with other tests as well.
    run("open_under_load", &["1000", "3"]);
}

/// ucx#8820: the fifth argument of mremap, and its like.
#[test]
fn an_argument_of_a_variadic_call_is_lost() {
    run("variadic", &[]);
}

/// ucx#3831.
#[test]
fn allocation_in_many_threads_grows_or_errs() {
    run("malloc_storm", &[]);
}

/// ucx#3210, ucx#7865.
#[test]
fn a_raw_call_of_a_static_library_is_missed() {
    run("raw_calls", &[]);
}

/// ucx#8092.
#[test]
fn the_shim_loaded_late_and_locally_half_works() {
    let stage = Stage::new();
    let client = stage.client(&cases());
    for account in Account::available() {
        let shim = stage.shim();
        let late = stage.program(Mode::Native, account, &client).arg("loaded_late").arg(&shim).limit(LIMIT);
        let outcome = late.run();
        outcome.assert_success();
        let said = outcome.stdout.lines().next();
        assert!(
            said == Some("works")
                || said.is_some_and(|said| said.starts_with("refused") && !outcome.stderr.is_empty()),
            "neither works nor says why not: {outcome}"
        );
        say(&format!("the shim loaded late: {account:?}: {}", said.unwrap_or_default()));
    }
}

/// MPI.jl#298.
#[test]
fn a_plugin_is_not_found_once_the_device_is_open() {
    run("plugins", &[PLUGIN]);
}

/// libfabric#9594.
#[test]
fn an_allocator_that_advises_under_its_lock_deadlocks() {
    run("allocator", &["2"]);
}

/// open-mpi#4509.
#[test]
fn trimming_an_arena_while_others_register_deadlocks_or_is_missed() {
    run("trimmed", &["2"]);
}

/// libfabric#6310.
#[test]
fn sbrk_and_malloc_in_turn_deadlock() {
    run("sbrk_and_malloc", &[]);
}

/// libfabric#9003.
#[test]
fn a_lock_joins_the_registering_thread_and_the_unmapping_one() {
    run("locks", &["2"]);
}

/// libfabric#5867, daos#4619.
#[test]
fn an_address_returns_before_the_counter_moved() {
    run("address_returns", &[]);
}

/// libfabric#5880.
#[test]
fn a_hit_among_thousands_of_overlapping_regions_is_missed_or_made_up() {
    run("overlapping", &[]);
}

/// libfabric#6244.
#[test]
fn a_freed_block_or_a_closed_library_is_missed() {
    run("blocks_and_libraries", &[PLUGIN]);
}

/// open-mpi#299.
#[test]
fn a_call_by_a_pointer_taken_before_the_open_is_missed() {
    run("taken_before", &[]);
}

/// open-mpi#3685.
#[test]
fn a_discarded_page_is_missed() {
    run("discarded", &[]);
}

/// libfabric-cray#1000.
#[test]
fn a_shrinking_heap_is_missed() {
    run("heap_shrinks", &[]);
}

/// ucx#2732.
#[test]
fn memory_that_is_mapped_over_is_missed() {
    run("replaced", &[]);
}

/// ucx#3490.
#[test]
fn an_unmapping_by_a_library_loaded_later_is_missed() {
    run("loaded_later", &[PLUGIN]);
}

/// What no monitor sees today.
#[test]
fn holes_truncation_guards_and_their_like_are_missed() {
    run("unseen_elsewhere", &[]);
}

/// The rest of it: io_uring carries operations out by itself.
#[test]
fn a_request_of_a_ring_is_missed() {
    let stage = Stage::new();
    let client = stage.client(&cases());
    let ways = [
        (Mode::Run, "auto"),
        (Mode::Preload, "auto"),
        (Mode::Run, "notify,fault"),
        (Mode::Run, "inline,notify,fault"),
        (Mode::Preload, "inline,auto"),
        (Mode::Run, "trace,fault"),
    ];
    for account in Account::available() {
        for (mode, layers) in ways {
            let program = stage.program(mode, account, &client).arg("requests_of_a_ring").layers(layers);
            let outcome = program.limit(LIMIT).run();
            if outcome.code() == Some(77) {
                return skip("requests of an io_uring ring", outcome.stdout.trim_end());
            }
            outcome.assert_success();
            assert_eq!(
                outcome.stdout.lines().last(),
                Some("ok requests_of_a_ring"),
                "{mode:?} {layers}: {outcome}"
            );
        }
        // Who doesn't watch sees nothing of it, so that the others don't pass by chance.
        let outcome = stage
            .program(Mode::Run, account, &client)
            .arg("requests_of_a_ring")
            .layers("notify")
            .limit(LIMIT)
            .run();
        assert!(outcome.code().is_some_and(|code| code != 0), "{outcome}");
    }
}

/// vllm#32181, nixl#1210. A million rounds: `UMMUNOTIFY_GROWTH_ROUNDS=1000000`.
#[test]
fn rounds_of_registration_grow() {
    let rounds = std::env::var("UMMUNOTIFY_GROWTH_ROUNDS").unwrap_or_else(|_| "10000".to_owned());
    let patience = rounds.parse().map_or(LIMIT, |rounds: u64| LIMIT + Duration::from_millis(rounds / 2));
    run_within(patience, "rounds", &[&rounds]);
}

/// ucx#5131.
#[test]
fn a_client_that_never_reads_grows_or_gets_wrong_records() {
    run("never_reads", &["10000"]);
}

/// libfabric#5662.
#[test]
fn memory_of_some_kind_cannot_be_registered_or_hangs() {
    run("kinds", &[]);
}
