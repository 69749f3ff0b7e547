//! Every memory operation is reported as the kernel module would report it.
//!
//! The table of operations and what recordings of real kernels say of each stand in `tests/c/operations`; the
//! program there performs them all and compares. Here it is run in every mode and by every account.

use std::collections::BTreeSet;
use std::time::Duration;
use ummunotify_tests::{Account, Client, HugePages, Mode, Outcome, Program, Stage, say, skip};

/// Rows that the walk has at least; far fewer would mean that it stopped looking.
const LEAST_ROWS: usize = 500;

/// How long a walk may take: with userfaultfd each registration is a message to the supervisor.
const WALK: Duration = Duration::from_secs(400);

/// Huge pages that one row needs, and as many that the one before it may still hold.
const HUGE_PAGES: u64 = 8;

/// Puts the walk and the library that it closes on the stage.
fn walk(stage: &Stage) -> std::path::PathBuf {
    stage.client(&Client::library("walk-plugin", &["operations/plugin.c"]));
    stage.client(&Client::walk())
}

/// The emulator's own table of what it sees with these layers, changed by `change`, as a file.
fn coverage(stage: &Stage, layers: &str, change: impl Fn(&str) -> String) -> std::path::PathBuf {
    let doctor = stage.program(Mode::Native, Account::Ordinary, stage.binary());
    let outcome = doctor.args(["doctor", "--coverage", "--trap", layers]).run();
    outcome.assert_success();
    let changed: String = outcome.stdout.lines().map(|line| change(line) + "\n").collect();
    let file = stage.folder().join("coverage");
    std::fs::write(&file, changed).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    file
}

/// Lines of the walk's output that start with `mark`, each row once, whatever the pass.
fn rows(outcome: &Outcome, mark: &str) -> BTreeSet<String> {
    outcome.stdout.lines().filter(|line| line.starts_with(mark)).map(str::to_owned).collect()
}

/// The rows that failed, each after what the walk says of the difference, under the heading of their pass.
fn failures(outcome: &Outcome) -> String {
    let (mut failures, mut heading, mut details) = (String::new(), "", String::new());
    for line in outcome.stdout.lines() {
        if line.starts_with("=====") {
            heading = line;
        } else if line.starts_with("     ") {
            details += line;
            details += "\n";
        } else {
            if line.starts_with("FAIL") {
                failures += &format!("{heading}\n{details}{line}\n");
            }
            details.clear();
        }
    }
    failures
}

/// The number in front of `word` in the walk's last line.
fn tally(outcome: &Outcome, word: &str) -> usize {
    let last = outcome.stdout.lines().last().unwrap_or_default();
    let mut words =
        last.split([' ', ',']).filter(|part| !part.is_empty()).rev().skip_while(|part| *part != word);
    words
        .nth(if word == "ok" { 2 } else { 1 })
        .and_then(|n| n.parse().ok())
        .unwrap_or_else(|| panic!("{outcome}"))
}

/// Walks in one mode by every account.
fn walk_in(mode: Mode, layers: &str) {
    walk_by(&Account::available(), mode, layers);
}

/// Walks in one mode by these accounts, under these layers.
fn walk_by(accounts: &[Account], mode: Mode, layers: &str) {
    let huge = HugePages::reserve(HUGE_PAGES);
    if let Err(reason) = &huge {
        skip("rows of huge pages (hugetlb)", reason);
    }
    let stage = Stage::new();
    let walk = walk(&stage);
    let coverage = coverage(&stage, layers, str::to_owned);
    for &account in accounts {
        let program = stage.program(mode, account, &walk).arg("--coverage").arg(&coverage).layers(layers);
        assert_walked(&stage, program, &format!("{layers} {mode:?} {account:?}"), LEAST_ROWS);
    }
}

/// Insists that each row is reported rightly, and that there are so many.
fn assert_walked(stage: &Stage, program: Program<'_>, how: &str, least: usize) {
    let outcome = program.env("LD_LIBRARY_PATH", stage.folder().join("bin")).limit(WALK).run();
    for line in rows(&outcome, "skip").into_iter().chain(rows(&outcome, "gap ")) {
        say(&format!("{how}: {line}"));
    }
    let failed = failures(&outcome);
    assert!(failed.is_empty(), "{how}: rows that were reported wrongly:\n{failed}");
    outcome.assert_success();
    let ok = tally(&outcome, "ok");
    assert!(ok >= least, "only {ok} rows: {outcome}");
    say(&format!("{how}: {} in {:.1?}", outcome.stdout.lines().last().unwrap_or_default(), outcome.elapsed));
}

#[test]
fn operations_are_missed_or_misreported_under_run() {
    walk_in(Mode::Run, "auto");
}

#[test]
fn operations_are_missed_or_misreported_under_preload() {
    walk_in(Mode::Preload, "notify");
}

#[test]
fn operations_are_missed_or_misreported_inline() {
    walk_in(Mode::Run, "inline,notify");
}

/// A kernel before 6.11 isn't asked for single mappings: whole tables are read.
#[test]
fn operations_are_misreported_where_whole_tables_are_read() {
    let huge = HugePages::reserve(HUGE_PAGES);
    if let Err(reason) = &huge {
        skip("rows of huge pages (hugetlb)", reason);
    }
    let stage = Stage::new();
    let (walk, coverage) = (walk(&stage), coverage(&stage, "notify", str::to_owned));
    let confine = stage.client(&Client::program("badly-used-confine", &["badly_used/confine.c"]));
    for account in Account::available() {
        let program = stage
            .program(Mode::Native, account, &confine)
            .arg("unasked")
            .arg(stage.binary())
            .args(["run", "--trap", "notify", "--"])
            .arg(&walk)
            .arg("--coverage")
            .arg(&coverage);
        assert_walked(&stage, program, &format!("whole tables {account:?}"), LEAST_ROWS);
    }
}

/// With userfaultfd each registration is a message to the supervisor, so a walk takes long: by one account each.
#[test]
fn operations_are_misreported_by_all_layers_together() {
    let accounts = Account::available();
    walk_by(&accounts[..1], Mode::Run, "inline,notify,fault");
}

/// userfaultfd beside the filter adds the end of operations, and changes nothing of what is reported of each.
#[test]
fn operations_are_misreported_beside_userfaultfd() {
    let accounts = Account::available();
    walk_by(&accounts[accounts.len() - 1..], Mode::Preload, "notify,fault");
}

/// Alone it sees what the table claims of it.
#[test]
fn userfaultfd_alone_misses_what_it_claims() {
    let stage = Stage::new();
    let walk = walk(&stage);
    let coverage = coverage(&stage, "fault", str::to_owned);
    let outcome = stage
        .program(Mode::Run, Account::Ordinary, &walk)
        .layers("fault")
        .args(["--partial", "--coverage"])
        .arg(&coverage)
        .env("LD_LIBRARY_PATH", stage.folder().join("bin"))
        .limit(Duration::from_secs(400))
        .run();
    // Several mappings don't move at once where one is watched (the call fails), and what is mapped into a region
    // later isn't watched.
    let known = ["mremap FIXED 6p: VMA, hole, VMA", "brk grows by 4p, is written and shrinks back"];
    let unknown: Vec<String> = rows(&outcome, "FAIL")
        .into_iter()
        .filter(|line| !known.iter().any(|name| line.contains(name)))
        .collect();
    assert!(unknown.is_empty(), "{unknown:#?}\n{}", failures(&outcome));
    assert!(!outcome.timed_out && matches!(outcome.code(), Some(0 | 1)), "{outcome}");
    assert!(tally(&outcome, "ok") >= 300, "{outcome}");
    for seen in [
        "munmap populated 4p",
        "MAP_FIXED over populated 4p",
        "mremap FIXED populated 4p into a hole",
        "MADV_DONTNEED populated",
        "brk shrinks by 4p populated",
        "free of a posix_memalign block of 1 MiB",
    ] {
        assert!(has_row(&outcome.stdout, "ok", seen), "{seen}: {outcome}");
    }
    for not_claimed in ["mprotect RW -> R populated", "ftruncate 8p -> 4p", "fork, child alive"] {
        let line = outcome.stdout.lines().find(|line| line.contains(&format!(" {not_claimed}  ")));
        assert!(
            line.is_some_and(|line| line.starts_with("----") && line.contains(" n=0")),
            "{not_claimed}: {line:?}: {outcome}"
        );
    }
    say(&format!("fault: {}", outcome.stdout.lines().last().unwrap_or_default()));
}

#[test]
fn operations_are_missed_or_misreported_under_run_by_trace() {
    walk_in(Mode::Run, "trace");
}

#[test]
fn operations_are_missed_or_misreported_under_preload_by_trace() {
    walk_in(Mode::Preload, "trace");
}

/// Where no filter can be had every call is stopped, and none is overlooked. It takes its time, so not all tables.
#[test]
fn operations_are_missed_or_misreported_without_seccomp() {
    let stage = Stage::new();
    let walk = walk(&stage);
    let confine = stage.client(&Client::program("badly-used-confine", &["badly_used/confine.c"]));
    let coverage = coverage(&stage, "trace", str::to_owned);
    let account = *Account::available().last().expect("somebody runs the tests");
    for table in ["map", "advise", "process"] {
        let program = stage.program(Mode::Native, account, &confine).arg("enosys").arg(stage.binary());
        let program = program.args(["run", "--"]).arg(&walk).arg("--coverage").arg(&coverage);
        let program = program.args(["--table", table]);
        assert_walked(&stage, program, &format!("without seccomp, {table}"), 100);
    }
}

/// Which files a call names can't always be told on a stacked file system: all of them count there.
#[test]
fn operations_are_missed_on_a_stacked_file_system() {
    if !Account::is_superuser() {
        return skip("files on a stacked file system", "mounting one takes privileges");
    }
    let stage = Stage::new();
    let walk = walk(&stage);
    let script = "mkdir lower upper work merged && mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work \
                  overlay merged && cd merged && exec \"$0\" run -- \"$1\" --coverage \"$2\" --table disk";
    let outcome = stage
        .program(Mode::Native, Account::Root, "unshare")
        .args(["--mount", "sh", "-c", script])
        .arg(stage.binary())
        .arg(&walk)
        .arg(coverage(&stage, "auto", str::to_owned))
        .run();
    if outcome.stdout.is_empty() {
        return skip("files on a stacked file system", &outcome.stderr);
    }
    let failed = failures(&outcome);
    assert!(failed.is_empty(), "rows that were reported wrongly:\n{failed}");
    outcome.assert_success();
    assert!(has_row(&outcome.stdout, "ok", "open O_TRUNC, mapped twice"), "{outcome}");
    assert!(
        !rows(&outcome, "ok   covered   ftruncate 8p -> 4p ").is_empty(),
        "not judged as stacked: {outcome}"
    );
}

/// A coverage table that claims too much, or too little, must not pass: neither what is missed though it is called
/// seen, nor what is reported though it is called unseen, nor a promise below the specification's.
#[test]
fn the_walk_lets_a_wrong_coverage_table_pass() {
    let stage = Stage::new();
    let walk = walk(&stage);
    let ring = "io_uring FALLOCATE PUNCH_HOLE";
    for (key, claim, table, row, complaint) in [
        (
            "munmap",
            "unseen",
            "mapping and unmapping",
            "munmap populated 4p",
            "although the coverage table calls",
        ),
        (
            "munmap",
            "covered",
            "mapping and unmapping",
            "munmap populated 4p",
            "the specification asks for exact",
        ),
        ("fork", "beyond", "brk, processes", "fork, child alive", "the specification asks for covered"),
        ("io-uring", "covered", "io_uring", ring, "the counter did not move"),
    ] {
        let wrong = coverage(&stage, "auto", |line| {
            let mut words: Vec<&str> = line.split('\t').collect();
            if words[0] == key {
                words[1] = claim;
            }
            words.join("\t")
        });
        let outcome = stage
            .program(Mode::Run, Account::Ordinary, &walk)
            .args(["--table", table, "--coverage"])
            .arg(wrong)
            .run();
        if key == "io-uring" && !rows(&outcome, &format!("skip gap       {ring}")).is_empty() {
            skip("a coverage table that calls io_uring seen", "there is no io_uring here");
            continue;
        }
        assert_eq!(outcome.code(), Some(1), "{key} called {claim}: {outcome}");
        assert!(has_row(&outcome.stdout, "FAIL", row), "{key} called {claim}: {outcome}");
        assert!(outcome.stdout.contains(complaint), "{key} called {claim}: {outcome}");
    }
}

/// In containers, and where single calls that the emulator could use are denied: all is seen that is seen elsewhere.
#[test]
fn operations_are_missed_or_misreported_in_containers() {
    let stage = Stage::new();
    let (walk, confine) =
        (walk(&stage), stage.client(&Client::program("confine", &["badly_used/confine.c"])));
    let surroundings = [
        ("docker", "auto"),
        ("podman", "auto"),
        ("deny=userfaultfd,io_uring_setup", "auto"),
        ("deny=ptrace,process_vm_readv,kcmp", "auto"),
        ("deny=process_vm_readv,kcmp", "trace"),
        // Without a listener: by trace, and nothing is patched.
        ("einval", "inline,auto"),
    ];
    for (nth, (how, layers)) in surroundings.into_iter().enumerate() {
        let accounts = Account::available();
        let account = accounts[nth % accounts.len()];
        let outcome = stage
            .program(Mode::Native, account, &confine)
            .arg(how)
            .arg(stage.binary())
            .args(["run", "--trap", layers, "--"])
            .arg(&walk)
            .arg("--coverage")
            .arg(coverage(&stage, layers, str::to_owned))
            .env("LD_LIBRARY_PATH", stage.folder().join("bin"))
            .limit(WALK)
            .run();
        let failed = failures(&outcome);
        assert!(failed.is_empty(), "{how} {layers} {account:?}: rows that were reported wrongly:\n{failed}");
        outcome.assert_success();
        assert!(tally(&outcome, "ok") >= LEAST_ROWS - 30, "{outcome}");
        say(&format!("{how} {layers} {account:?}: {}", outcome.stdout.lines().last().unwrap_or_default()));
    }
}

/// A library that merely wraps libc's mapping calls, complete as it may look, isn't enough: if the walk let it
/// pass, it wouldn't be able to tell that the filter is missing.
#[test]
fn the_walk_lets_a_build_without_a_filter_pass() {
    let stage = Stage::new();
    let walk = walk(&stage);
    let wrap_only = stage.client(&Client::library("wrap-only", &["operations/wrap_only.c"]));
    let account = Account::Ordinary;
    let outcome = stage
        .program(Mode::Native, account, &walk)
        .arg("--coverage")
        .arg(coverage(&stage, "auto", str::to_owned))
        .preload(wrap_only)
        .env("LD_LIBRARY_PATH", stage.folder().join("bin"))
        .limit(Duration::from_secs(120))
        .run();
    assert_eq!(outcome.code(), Some(1), "{outcome}");

    // What goes through libc's symbols is seen by it: so the rows below fail because of the way of the call.
    let libc_pass = outcome.stdout.split("======== by syscall(3)").next().expect("a first pass");
    let syscall_pass = &outcome.stdout[libc_pass.len()..];
    for seen in [
        "munmap populated 4p",
        "MAP_FIXED over populated 4p",
        "mprotect RW -> R populated",
        "MADV_DONTNEED populated",
    ] {
        assert!(has_row(libc_pass, "ok", seen), "{seen}: {outcome}");
        assert!(has_row(syscall_pass, "FAIL", seen), "{seen}: {outcome}");
    }
    for missed in [
        "munmap through a pointer taken before the open",
        "free of a posix_memalign block of 1 MiB",
        "malloc_trim of freed blocks",
        "dlclose of a library with registered data",
        "stack of a thread that ends",
        "brk shrinks by 4p populated",
        "sbrk shrinks by 4p",
        "shmdt populated 6p",
        "ftruncate 8p -> 4p",
        "fork, child alive",
    ] {
        assert!(has_row(libc_pass, "FAIL", missed), "{missed}: {outcome}");
    }
}

/// True if the row of that name came out with that mark.
fn has_row(output: &str, mark: &str, name: &str) -> bool {
    output.lines().any(|line| {
        // "ok   exact     NAME          n=..."
        let mut words = line.splitn(2, ' ');
        words.next() == Some(mark)
            && words.next().is_some_and(|rest| {
                let row = rest.trim_start();
                let row = row.split_once(' ').map_or("", |(_class, row)| row.trim_start());
                row.strip_prefix(name)
                    .is_some_and(|after| after.starts_with("  ") || after.trim_start().starts_with("n="))
            })
    })
}
