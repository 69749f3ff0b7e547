//! The scripts that let the module judge the emulator say how it went, also where it didn't go.
//!
//! What takes a guest is `make conformance`; here a script stands in for the guest.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use ummunotify_tests::{Account, Mode, Outcome, Stage};

/// A file of `tests/guest`.
fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("guest").join(name)
}

/// Runs conformance.sh with that script in place of the guest: `$stage` is the folder that both sides see.
fn conformance(stage: &Stage, guest: &str, layers: &str) -> Outcome {
    let fake = stage.work().join("guest");
    fs::write(&fake, format!("#!/bin/sh\neval \"set -- $1\"\nstage=$2\n{guest}\n"))
        .expect("the stage's own folder");
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755)).expect("an own file");
    stage
        .program(Mode::Native, Account::available()[0], script("conformance.sh"))
        .arg("differential")
        .env("GUEST_RUN", &fake)
        .env("GUEST_CACHE", stage.work().join("cache"))
        .env("CARGO_TARGET_DIR", stage.work().join("target"))
        .env("UMMUNOTIFY", stage.binary())
        .env("KERNELS", "6.1")
        .env("LAYERS", layers)
        .run()
}

/// What the guest leaves of a program that ended with `code`.
fn left(code: u8) -> String {
    format!(
        "echo all the same >$stage/results/differential-notify; echo {code} >$stage/results/differential-notify.code"
    )
}

/// Exit code, last line, and a line in between that says why.
fn assert_says(outcome: &Outcome, code: i32, last: &str, why: &str) {
    assert_eq!(outcome.code(), Some(code), "{outcome}");
    assert_eq!(outcome.stdout.lines().last(), Some(last), "{outcome}");
    assert!(outcome.stdout.contains(why), "no `{why}`: {outcome}");
}

#[test]
fn conformance_hides_how_it_ended() {
    let stage = Stage::new();
    let passes = conformance(&stage, &left(0), "notify");
    assert_says(&passes, 0, "conformance: 1 passed, 0 failed, 0 skipped", "all the same");
    let kept = stage.work().join("target/conformance/6.1/differential-notify");
    assert!(kept.exists(), "CARGO_TARGET_DIR isn't heeded: no {}", kept.display());

    let skipped = conformance(&stage, "echo 'guest: SKIPPED: no apt-get' >&2; exit 77", "notify");
    let last = "conformance: 0 passed, 0 failed, 1 skipped";
    assert_says(&skipped, 77, last, "SKIPPED conformance on 6.1: no apt-get\n");

    let unfit = conformance(&stage, "echo 'guest: error: no such suite' >&2; exit 1", "notify");
    let last = "conformance: 0 passed, 2 failed, 0 skipped";
    assert_says(
        &unfit,
        1,
        last,
        "not as it must be: 6.1: no guest could be run, or its script failed (1): no such suite,",
    );

    let fails = conformance(&stage, &left(9), "notify");
    let last = "conformance: 0 passed, 1 failed, 0 skipped";
    assert_says(&fails, 1, last, "differential-notify: exit code 9; its last lines:\n    all the same");
    assert_says(&fails, 1, last, "not as it must be: 6.1: differential\n");

    let last = "conformance: 0 passed, 2 failed, 0 skipped";
    let dies = conformance(&stage, "echo panic; exit 70", "notify");
    assert_says(&dies, 1, last, "the guest died, or took longer than 1800 s; what it said last");
    assert_says(&dies, 1, last, "differential-notify: not run");
    assert_says(&dies, 1, last, "not as it must be: 6.1: the guest died");

    let warns = conformance(&stage, &format!("{}; exit 71", left(0)), "notify");
    assert_says(&warns, 1, "conformance: 1 passed, 1 failed, 0 skipped", "the kernel's log holds a warning");

    let unknown = conformance(&stage, &left(0), "notify magic");
    assert_eq!(unknown.code(), Some(1), "{unknown}");
    assert!(unknown.stderr.contains("LAYERS: no set 'magic'"), "{unknown}");
    assert!(
        fs::read_dir(stage.work().join("cache")).expect("it was made").next().is_none(),
        "a stage was left"
    );
}

/// Compares two walks of one row each, given as its line and its records.
fn compare(module: &str, emulated: &str) -> Outcome {
    let stage = Stage::new();
    let file = |name: &str, rows: &str| {
        let path = stage.work().join(name);
        fs::write(&path, format!("======== by libc\n== a table\n{rows}\n")).expect("the stage's own folder");
        path
    };
    stage
        .program(Mode::Native, Account::available()[0], "awk")
        .arg("-f")
        .arg(script("compare.awk"))
        .arg(file("module", module))
        .arg(file("emulated", emulated))
        .run()
}

#[test]
fn differences_between_module_and_emulator_pass() {
    // A row that is the same, without which there would be nothing to compare.
    let row = |class: &str, records: &str| {
        format!(
            "ok   exact     first                                                   n=0\nrecords exact n=0\n\
             ok   {class:<9} munmap                                                  n=1\nrecords {class} {records}"
        )
    };
    let whole = "n=1 #0[A-2,A+6) #3[A+0,A+1) #4[A+1,A+2)";
    let half = "n=1 #0[A-2,A+1) #3[A+0,A+1)";
    let wide = "n=2 #0[A-2,A+6)* #3[A+0,A+1)* #4[A+1,A+2) #5[A+2,A+3)";
    for class in ["exact", "covered", "free"] {
        let outcome = compare(&row(class, whole), &row(class, whole));
        assert_eq!(outcome.code(), Some(0), "{outcome}");
    }
    assert_eq!(compare(&row("covered", whole), &row("covered", wide)).code(), Some(0), "more is allowed");
    assert_eq!(compare(&row("free", whole), &row("free", "n=0")).code(), Some(0), "needn't be seen");
    for (class, got) in [("exact", wide), ("exact", half), ("covered", half), ("covered", "n=0")] {
        let outcome = compare(&row(class, whole), &row(class, got));
        assert_eq!(outcome.code(), Some(1), "{outcome}");
        assert!(outcome.stdout.contains("DIFFERENT ======== by libc == a table munmap: "), "{outcome}");
        let left_and_right =
            |line: &str| line.starts_with("  !  ") && line.contains(whole.split(' ').next_back().unwrap());
        assert!(
            outcome.stdout.contains("module                                       emulated"),
            "{outcome}"
        );
        assert!(got == wide || outcome.stdout.lines().any(left_and_right), "{outcome}");
    }
    let skipped = row("free", whole)
        .replace("ok   free  ", "skip free  ")
        .replace(&format!("\nrecords free {whole}"), "");
    for (module, emulated, performer) in
        [(row("free", whole), skipped.clone(), "module"), (skipped, row("free", whole), "emulated device")]
    {
        let outcome = compare(&module, &emulated);
        assert_eq!(outcome.code(), Some(1), "{outcome}");
        assert!(outcome.stdout.contains(&format!("only the {performer} performed it")), "{outcome}");
    }
}
