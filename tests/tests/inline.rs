//! The inline layer: calls of libc are looked at in the process that makes them. What it reports is tested with the
//! operations, the interface, the cases, the storm and the race; here is what it does to the process.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ummunotify_tests::{Account, Client, Mode, Outcome, Program, Stage, say, skip};

const INLINE: &str = "inline,notify";

/// First openings of the device under load; `UMMUNOTIFY_LOAD_ROUNDS` sets another number (a thousand for the long
/// run).
const LOADS: u32 = 8;

fn client(name: &str) -> Client {
    Client::program(&format!("inline-{name}"), &[&format!("inline/{name}.c")])
}

/// Runs a client of `tests/c/inline` in both modes, by the accounts in turn.
fn run(name: &str) -> Vec<Outcome> {
    let stage = Stage::new();
    let client = stage.client(&client(name));
    let ways = Account::available().into_iter().cycle().zip(Mode::EMULATED);
    ways.map(|(account, mode)| {
        let outcome = stage.program(mode, account, &client).layers(INLINE).run();
        outcome.assert_success();
        say(&format!("{name}: {mode:?} {account:?}: {}", outcome.stdout.trim_end().replace('\n', "; ")));
        outcome
    })
    .collect()
}

/// Registers, flags, red zone, and the way of an unwinder at each instruction.
#[test]
fn a_patched_call_changes_more_than_the_call_does() {
    for outcome in run("exact") {
        assert!(outcome.stdout.contains(", 0 failures"), "{outcome}");
    }
}

#[test]
fn contexts_that_come_and_go_lose_invalidations() {
    run("contexts");
}

/// Runs a client of `tests/c/inline`, and reads how many calls the filter says that it trapped.
fn counted(stage: &Stage, account: Account, name: &str, args: &[&str]) -> (Outcome, u32) {
    let log = stage.work().join("log");
    let program = stage.program(Mode::Run, account, stage.client(&client(name))).layers(INLINE).args(args);
    let options = ["--backend", "emulated", "--stats", "--log-file"];
    let program = options.into_iter().fold(program, Program::run_option).run_option(&log);
    let outcome = program.run();
    stage.assert_nothing_left();
    let said = std::fs::read_to_string(&log).expect("the log was written");
    std::fs::remove_file(&log).expect("the log is there");
    let number = said.split_once("the filter trapped ").and_then(|(_, rest)| rest.split(' ').next());
    let trapped =
        number.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no number: {said}, {outcome}"));
    (outcome, trapped)
}

/// The same of a client that does well, told how often it does what it does, and whatever else it wants to know.
fn trapped(name: &str, arguments: &[u32]) -> u32 {
    let stage = Stage::new();
    let arguments: Vec<String> = arguments.iter().map(u32::to_string).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (outcome, trapped) = counted(&stage, Account::Ordinary, name, &arguments);
    outcome.assert_success();
    say(&format!("{name} {arguments:?}: {trapped} calls were trapped"));
    trapped
}

/// A call that is made in the process isn't trapped. The client is told of its calls, the contexts that it opens, and how many
/// of them it keeps.
#[test]
fn contexts_that_were_closed_have_all_calls_trapped_for_good() {
    // The supervisor that answers trapped calls also learns of the closing, so some are, until it has.
    assert!(trapped("crowd", &[5000, 12, 1]) < 2500);
}

#[test]
fn a_few_contexts_have_all_calls_trapped() {
    for contexts in [1, 2, 8] {
        assert!(trapped("crowd", &[5000, contexts, contexts]) < 500);
    }
    // The measure of it: with one more they are.
    assert!(trapped("crowd", &[500, 9, 9]) >= 500);
}

/// Since glibc 2.34 both come by clone3, whose flags the filter doesn't see.
#[test]
fn a_thread_or_the_start_of_a_program_is_trapped() {
    const TIMES: u32 = 200;
    // Five programs begin, each with some 15 calls.
    assert!(trapped("tasks", &[TIMES]) < TIMES);
}

/// Memory that threads share is read-only while calls are made that hit nothing. The filter's number shows that they
/// were made in the process; a hit, which writes, shows that a write would have been seen.
#[test]
fn a_miss_writes_to_memory_that_threads_share() {
    const CALLS: u32 = 8000;
    let stage = Stage::new();
    for account in Account::available() {
        let (outcome, trapped) = counted(&stage, account, "readonly", &[&CALLS.to_string()]);
        outcome.assert_success();
        say(&format!("{account:?}: {}, {trapped} calls were trapped", outcome.stdout.trim_end()));
        // Those that make memory read-only, and the few around the open.
        assert!(trapped < CALLS / 40, "{trapped} of {CALLS}");
        let (outcome, _) = counted(&stage, account, "readonly", &[&CALLS.to_string(), "hit"]);
        assert_eq!(outcome.signal(), Some(Signal::SIGSEGV as i32), "{outcome}");
    }
}

/// What isn't trapped works without a supervisor, and is recorded; what is trapped fails then.
#[test]
fn a_call_of_libc_needs_the_supervisor() {
    let stage = Stage::new();
    let client = stage.client(&client("alone"));
    for account in Account::available() {
        let mut running = stage.program(Mode::Run, account, &client).layers(INLINE).spawn();
        running.wait_for_line("ready");
        let supervisors = stage.supervisors();
        assert_eq!(supervisors.len(), 1, "{supervisors:?}");
        kill(Pid::from_raw(supervisors[0]), Signal::SIGKILL).expect("the supervisor runs");
        let deadline = Instant::now() + Duration::from_secs(5);
        while !stage.supervisors().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        running.write_line("go");
        let outcome = running.finish();
        outcome.assert_success();
        for line in [
            "madvise: ok",
            "mprotect: ok",
            "mmap fixed: ok",
            "mremap: ok",
            "munmap: ok",
            "syscall(3): ok",
            "free: ok",
            "munmap of a region: ok",
            "counted: 1",
            "instruction: ENOSYS",
        ] {
            assert!(outcome.stdout.lines().any(|said| said == line), "expected `{line}`: {outcome}");
        }
    }
}

#[test]
fn the_first_open_under_load_crashes_a_thread() {
    let rounds = env::var("UMMUNOTIFY_LOAD_ROUNDS").map_or(LOADS, |text| text.parse().expect("a number"));
    let stage = Stage::new();
    let client = stage.client(&client("load"));
    let ways: Vec<_> = Account::available().into_iter().zip(Mode::EMULATED).collect();
    let mut patched = 0;
    for (_, (account, mode)) in (0..rounds).zip(ways.iter().cycle()) {
        let outcome = stage.program(*mode, *account, &client).layers(INLINE).run();
        outcome.assert_success();
        assert!(outcome.stdout.contains(" 0 wrong"), "{outcome}");
        // On a machine that is busy with other things a thread may take too long to stop: that is said, and the
        // calls stay trapped.
        let is_patched = outcome.stdout.starts_with("patched");
        assert!(is_patched || outcome.stderr.contains("the inline layer isn't used"), "{outcome}");
        patched += u32::from(is_patched);
    }
    say(&format!("{patched} of {rounds} processes were patched under load"));
    assert!(patched > 0, "no process was patched");
}

/// Under gcc's AddressSanitizer, whose own allocator and wrappers make the calls, and its ThreadSanitizer, which ends a
/// program that has something mapped where it doesn't expect it.
#[test]
fn a_sanitized_program_differs() {
    let stage = Stage::new();
    // They want to be the first library, and the first says so otherwise.
    for (sanitizer, library, variable, options) in [
        ("address", "libasan.so", "ASAN_OPTIONS", "verify_asan_link_order=0:detect_leaks=0"),
        ("thread", "libtsan.so", "TSAN_OPTIONS", "report_bugs=0"),
    ] {
        let probe = Command::new("cc").arg(format!("-print-file-name={library}")).output().expect("cc runs");
        if !String::from_utf8_lossy(&probe.stdout).trim().starts_with('/') {
            skip(
                &format!("a program with -fsanitize={sanitizer}"),
                &format!("this compiler has no {library}"),
            );
            continue;
        }
        let sanitized = Client::program(&format!("inline-{sanitizer}"), &["inline/load.c"]);
        let client = stage.client(&sanitized.flag(&format!("-fsanitize={sanitizer}")));
        for account in Account::available() {
            let program = stage.program(Mode::Run, account, &client).layers(INLINE);
            let outcome = program.env(variable, options).run();
            outcome.assert_success();
            assert!(outcome.stdout.contains(" 0 wrong"), "{outcome}");
        }
    }
}

/// Others that patch libc's functions themselves, and make the calls by syscall(3) then. What each hears when it is
/// alone it hears beside us, whoever comes first, and no call is missed.
fn another_hooker(stage: &Stage, name: &str, library: &Path) {
    let client = stage.client(&client("hooker").link("-ldl"));
    let program =
        |mode, account, order: &str| stage.program(mode, account, &client).arg(name).arg(library).arg(order);
    let alone = program(Mode::Native, Account::Ordinary, "alone").run();
    alone.assert_success();
    assert!(alone.stdout.starts_with("munmap 200\n"), "it hears nothing: {alone}");
    for (account, mode) in Account::available().into_iter().cycle().zip(Mode::EMULATED) {
        for layers in ["notify", INLINE] {
            for order in ["before", "after"] {
                let outcome = program(mode, account, order).layers(layers).run();
                outcome.assert_success();
                assert_eq!(outcome.stdout, alone.stdout, "{outcome}\nalone: {alone}");
                let heard = outcome.stdout.trim_end().replace('\n', ", ");
                say(&format!("{name} {order}, {layers}, {mode:?} {account:?}: heard {heard}"));
            }
        }
    }
}

#[test]
fn ucx_is_unheard_or_makes_us_deaf() {
    let library = Path::new("/usr/lib/x86_64-linux-gnu/libucs.so.0");
    if !library.exists() {
        return skip("UCX's memory hooks", "it isn't installed (Debian package libucx0)");
    }
    another_hooker(&Stage::new(), "ucx", library);
}

#[test]
fn open_mpi_is_unheard_or_makes_us_deaf() {
    let library = Path::new("/usr/lib/x86_64-linux-gnu/libopen-pal.so.40");
    if !library.exists() {
        return skip("Open MPI's memory hooks", "it isn't installed (Debian package libopenmpi3)");
    }
    another_hooker(&Stage::new(), "openmpi", library);
}

#[test]
fn libfabric_is_unheard_or_makes_us_deaf() {
    if !Path::new("/usr/lib/x86_64-linux-gnu/libfabric.a").exists() {
        return skip("libfabric's memory monitor", "it isn't installed (Debian package libfabric-dev)");
    }
    let stage = Stage::new();
    let map = concat!("-Wl,--version-script=", env!("CARGO_MANIFEST_DIR"), "/../benches/peers/libfabric.map");
    let monitor = Client::library("memhooks", &["../../benches/peers/libfabric.c"]);
    let monitor = ["-l:libfabric.a", "-Wl,-z,defs", map, "-ldl"].into_iter().fold(monitor, Client::link);
    another_hooker(&stage, "libfabric", &stage.client(&monitor));
}

/// What every call of libc pays: no vector register, which holds the application's values; no call that leaves the
/// page; one page, for after an unmapping each costs a look into the page tables.
/// Each function of the library: addresses and instructions.
fn disassembly(stage: &Stage) -> BTreeMap<String, Vec<(u64, String)>> {
    let listing = Command::new("objdump")
        .args(["--disassemble", "--no-show-raw-insn", "--section=.text"])
        .arg(stage.shim())
        .output()
        .expect("objdump, which comes with the compiler");
    let listing = String::from_utf8(listing.stdout).expect("objdump writes text");
    let mut functions: BTreeMap<String, Vec<(u64, String)>> = BTreeMap::new();
    let mut name = String::new();
    for line in listing.lines() {
        if let Some((_, symbol)) = line.strip_suffix(">:").and_then(|line| line.split_once(" <")) {
            // The gates and others are labels in the entry.
            let starts = ["ummunotify_inline_entry", "ummunotify_inline_hit"].contains(&symbol);
            if starts || !symbol.starts_with("ummunotify_inline_") {
                symbol.clone_into(&mut name);
            }
        } else if let Some((at, code)) = line.split_once(":\t") {
            let at = u64::from_str_radix(at.trim(), 16).expect("an address");
            functions.entry(name.clone()).or_default().push((at, code.trim().to_owned()));
        }
    }
    functions
}

#[test]
fn the_fast_path_uses_what_is_not_its_own() {
    let mut functions = disassembly(&Stage::new());
    functions.retain(|name, _| name.contains("6inline4fast") || name == "ummunotify_inline_entry");
    assert_eq!(functions.len(), 4, "the entry, begin, what it leaves, and end: {:?}", functions.keys());
    let mut pages: Vec<u64> = functions.values().flatten().map(|(at, _)| at >> 12).collect();
    pages.dedup();
    assert_eq!(pages.len(), 1, "pages {pages:x?}");
    for (name, code) in &functions {
        for (at, instruction) in code {
            let vector = ["xmm", "ymm", "zmm", "%mm", "%st"].iter().any(|part| instruction.contains(part));
            assert!(!vector, "{name} at {at:#x}: {instruction}");
            let ours = ["6inline4", "ummunotify_inline_hit"].iter().any(|part| instruction.contains(part));
            let leaves = instruction.starts_with("call") && !ours;
            assert!(!leaves, "{name} at {at:#x}: {instruction}");
        }
        if name != "ummunotify_inline_entry" {
            assert!(code.iter().all(|(_, i)| !i.starts_with("call")), "{name} calls");
        }
    }
    say(&format!("{} instructions in one page", functions.values().map(Vec::len).sum::<usize>()));
}

/// What records a hit runs where only the low halves of 16 vector registers were saved: it uses nothing else of them,
/// nothing of the other units, and calls nothing that isn't known to do the same.
#[test]
fn a_hit_is_recorded_by_registers_that_were_not_saved() {
    let functions = disassembly(&Stage::new());
    let saves = &functions["ummunotify_inline_hit"];
    let moves = |to_memory: bool| {
        let is = |code: &str| code.starts_with("movaps %xmm") == to_memory;
        saves.iter().filter(|(_, code)| code.starts_with("movaps") && is(code)).count()
    };
    assert_eq!((moves(true), moves(false)), (16, 16), "saved and restored");
    let first =
        functions.keys().find(|name| name.contains("6inline4slow3hit")).expect("what records").clone();
    let (mut reached, mut instructions) = (BTreeSet::new(), 0);
    let mut left = vec![first];
    while let Some(name) = left.pop() {
        if !reached.insert(name.clone()) {
            continue;
        }
        let code = functions.get(&name).unwrap_or_else(|| panic!("{name} isn't the library's"));
        instructions += code.len();
        for (at, instruction) in code {
            let (operation, operands) = instruction.split_once(' ').unwrap_or((instruction, ""));
            // With a v in front the upper halves are zeroed.
            let foreign = ["%ymm", "%zmm", "%mm", "%st", "%k"].iter().any(|part| operands.contains(part));
            let zeroes = operation.starts_with('v') && operands.contains("%xmm");
            assert!(!foreign && !zeroes, "{name} at {at:#x}: {instruction}");
            assert!(!operation.ends_with("mxcsr"), "{name} at {at:#x}: {instruction}");
            let jumps = operation.starts_with('j') || operation.starts_with("call");
            if jumps && operands.trim_start().starts_with('*') {
                // The table of a match; a tail call by a pointer would be one of another function's.
                assert!(
                    !operation.starts_with("call") && !operands.contains('('),
                    "{name} at {at:#x}: {instruction}"
                );
            } else if jumps && let Some((_, target)) = operands.split_once('<') {
                left.push(target.trim_end_matches('>').split('+').next().unwrap_or_default().to_owned());
            }
        }
    }
    say(&format!("{instructions} instructions in {} functions", reached.len()));
}

/// What patches a process without being asked for disturbs none of its threads, and leaves it alone where it would.
#[test]
fn a_sleeping_thread_notices_that_the_device_is_opened() {
    let stage = Stage::new();
    let client = stage.client(&client("asleep"));
    let kinds =
        [("write", "not patched"), ("epoll", "not patched"), ("futex", "patched"), ("poll", "patched")];
    for (account, mode) in Account::available().into_iter().cycle().zip(Mode::EMULATED) {
        for (kind, expected) in kinds {
            let outcome = stage.program(mode, account, &client).arg(kind).layers("auto").run();
            outcome.assert_success();
            let expected = format!("{expected}, the thread saw nothing\n");
            assert_eq!(outcome.stdout, expected, "{kind}: {outcome}");
            assert_eq!(outcome.stderr, "", "{kind}");
        }
        let outcome = stage.program(mode, account, &client).arg("epoll").layers(INLINE).run();
        outcome.assert_success();
        assert!(outcome.stdout.starts_with("patched, "), "it was asked for: {outcome}");
    }
}
