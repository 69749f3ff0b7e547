//! `ummunotify bench`: the figures of a run, its reports, and what it says where it can't measure. No figure is judged
//! here.

use std::fs;
use std::process::Command;

use ummunotify_tests::{Account, Mode, Stage, skip};

#[test]
fn every_contender_gets_figures_and_both_reports_are_written() {
    for account in Account::available() {
        let stage = Stage::new();
        // The ordinary user may write there.
        let folder = stage.work();
        let (json, html) = (folder.join("r.json"), folder.join("r.html"));
        let outcome = stage
            .program(Mode::Native, account, stage.binary())
            .args(["bench", "--rounds", "3", "--regions", "0", "--regions", "64"])
            .args(["--against", "notify", "--against", "inline,notify", "--against", "static"])
            .args(["--work", "getppid", "--work", "hit", "--work", "counter", "--json"])
            .arg(&json)
            .arg("--html")
            .arg(&html)
            .run();
        outcome.assert_success();
        let text = fs::read_to_string(&json).expect("the report was written");
        let report: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
        let lines = report["lines"].as_array().expect("lines");
        let names = |line: &serde_json::Value| -> Vec<String> {
            let cells = line["cells"].as_array().expect("cells");
            for cell in cells {
                let time = |which: &str| cell["time"][which].as_f64().expect("a time");
                assert!(
                    0.0 < time("least") && time("least") <= time("median") && time("median") <= time("most")
                );
            }
            cells.iter().map(|cell| cell["contender"].as_str().expect("a name").to_owned()).collect()
        };
        assert_eq!(lines.len(), 4, "getppid, counter, and hit twice: {text}");
        assert_eq!(names(&lines[0]), ["native", "notify", "inline,notify", "static"]);
        assert_eq!(names(&lines[1]), ["notify", "inline,notify"], "the counter is the device's");
        assert_eq!(lines[3]["regions"], 64);
        let page = fs::read_to_string(&html).expect("the page was written");
        for shown in ["native", "inline,notify", "64 regions elsewhere", "<svg"] {
            assert!(page.contains(shown) && !page.contains("<script"), "{shown}: {page}");
            assert!(shown == "<svg" || outcome.stdout.contains(shown), "{shown}: {outcome}");
        }
        stage.assert_nothing_left();
    }
}

#[test]
fn what_cannot_be_measured_is_a_sentence() {
    let stage = Stage::new();
    let bench = |arguments: &[&str]| {
        stage.program(Mode::Native, Account::Ordinary, stage.binary()).arg("bench").args(arguments).run()
    };
    for (arguments, code, words) in [
        (&["--work", "nothing"][..], 2, "there is getppid"),
        (&["--against", "magic"], 2, "not `magic`"),
        (&["--against", "kmod"], 1, "the kernel module isn't loaded"),
        (&["--peer", "x=/no/such/file"], 2, "/no/such/file"),
        (&["--peer", "x"], 2, "NAME=LIBRARY"),
        (&["--rounds", "2"], 2, "a number from 3"),
        (&["--regions", "1000001"], 2, "1000000"),
        (&["--json", "/no/such/folder/r.json"], 1, "/no/such/folder/r.json: can't be written"),
        (
            &["--html", "/dev/full", "--work", "getppid", "--against", "notify", "--rounds", "3"],
            1,
            "can't be written",
        ),
    ] {
        if words.contains("isn't loaded") && std::path::Path::new("/dev/ummunotify").exists() {
            skip("a comparison with a module that isn't there", "it is there");
            continue;
        }
        let outcome = bench(arguments);
        assert_eq!(outcome.code(), Some(code), "{arguments:?}: {outcome}");
        assert!(outcome.stderr.contains(words), "{arguments:?}: {outcome}");
        assert!(!outcome.stderr.contains("panicked"), "{outcome}");
    }
}

/// A library that doesn't do what it is preloaded for ends the process that works: that is said, and nothing stays.
#[test]
fn a_process_that_dies_at_work_leaves_something() {
    let stage = Stage::new();
    let deadly = stage.client(&ummunotify_tests::Client::library("deadly", &["programs/deadly.c"]));
    let outcome = stage
        .program(Mode::Native, Account::Ordinary, stage.binary())
        .args(["bench", "--against", "notify", "--work", "getppid", "--peer"])
        .arg(format!("deadly={}", deadly.display()))
        .run();
    assert_eq!(outcome.code(), Some(1), "{outcome}");
    assert!(outcome.stderr.contains("the process that works ended"), "{outcome}");
    stage.assert_nothing_left();
}

/// The peer of `make bench-peers`: UCX's hooks.
#[test]
fn a_peer_that_sees_nothing_is_compared() {
    let Ok(found) = Command::new("sh").args(["-c", "ldconfig -p | grep -q libucs.so.0"]).status() else {
        return;
    };
    if !found.success() {
        return skip("UCX as a peer in bench", "it isn't installed (Debian package libucx0)");
    }
    let stage = Stage::new();
    let ucx =
        stage.client(&ummunotify_tests::Client::library("ucx", &["../../benches/peers/ucx.c"]).link("-ldl"));
    let outcome = stage
        .program(Mode::Native, Account::Ordinary, stage.binary())
        .args([
            "bench",
            "--rounds",
            "3",
            "--against",
            "notify",
            "--work",
            "munmap",
            "--regions",
            "0",
            "--peer",
        ])
        .arg(format!("ucx={}", ucx.display()))
        .run();
    outcome.assert_success();
    assert!(outcome.stdout.contains("    ucx "), "{outcome}");
}
