//! `ummunotify bench`: the figures of a run, its reports, and what it says where it can't measure. No figure is judged
//! here.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use ummunotify_tests::{Account, Mode, Outcome, Stage, skip};

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

/// A script of the benches.
fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches").join(name)
}

/// A script that stands for another program in a test.
fn stands_for(stage: &Stage, name: &str, text: &str) -> PathBuf {
    let path = stage.work().join(name);
    fs::create_dir_all(path.parent().expect("a folder")).expect("the stage's own folder");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("the stage's own folder");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("an own file");
    path
}

/// The peers of `make bench-peers`, those that can be had here.
#[test]
fn a_peer_that_sees_nothing_is_compared() {
    let stage = Stage::new();
    let folder = stage.work().join("peers");
    let built = stage.program(Mode::Native, Account::Ordinary, script("peers/build.sh")).arg(&folder).run();
    built.assert_success();
    built.stdout.lines().for_each(ummunotify_tests::say);
    let list = fs::read_to_string(folder.join("list")).expect("it was written");
    let peers: Vec<_> = list.lines().filter_map(|line| line.strip_prefix("peer ")).collect();
    assert!(peers.iter().any(|peer| peer.starts_with("bare=")), "what needs no package is there: {built}");
    let mut bench = stage
        .program(Mode::Native, Account::Ordinary, stage.binary())
        .args(["bench", "--rounds", "3", "--against", "notify", "--regions", "0"])
        .args(["--work", "munmap", "--work", "raw-munmap"]);
    for peer in &peers {
        bench = bench.args(["--peer", peer]);
    }
    let outcome = bench.run();
    outcome.assert_success();
    for (name, _) in peers.iter().filter_map(|peer| peer.split_once('=')) {
        let lines = outcome.stdout.lines().filter(|line| line.trim_start().starts_with(&format!("{name} ")));
        assert_eq!(lines.count(), 2, "{name}: {outcome}");
    }
    stage.assert_nothing_left();
}

#[test]
fn a_peer_that_cannot_be_built_goes_unsaid() {
    let stage = Stage::new();
    let cc = stands_for(&stage, "bin/cc", "echo 'x.c:1: error: no such header' >&2; exit 1");
    let path = format!("{}:/usr/bin:/bin", cc.parent().expect("a folder").display());
    let folder = stage.work().join("peers");
    let build = |argument: &[&Path]| {
        stage
            .program(Mode::Native, Account::Ordinary, script("peers/build.sh"))
            .args(argument)
            .env("PATH", &path)
            .run()
    };
    let outcome = build(&[&folder]);
    outcome.assert_success();
    for name in ["bare", "bare-flags", "bare-gate", "bare-exec", "ucx", "memhooks", "userfaultfd"] {
        let line = format!("SKIPPED {name} as a peer: it isn't built: x.c:1: error: no such header");
        assert!(outcome.stdout.lines().any(|said| said == line), "{name}: {outcome}");
    }
    assert_eq!(fs::read_to_string(folder.join("list")).expect("it was written"), "");
    assert_eq!(build(&[]).code(), Some(2));
}

/// Works of all kinds: whole programs, others without a library in them, calls by an instruction; on one processor.
#[test]
fn whole_programs_are_measured_on_one_processor() {
    let stage = Stage::new();
    let json = stage.work().join("r.json");
    let works = ["mmap", "raw-mmap", "raw-munmap", "malloc", "epoll-hit", "run-true", "register-random"];
    let mut bench = stage
        .program(Mode::Native, Account::Ordinary, stage.binary())
        .args(["bench", "--one-processor", "--rounds", "3", "--regions", "64", "--against", "inline,notify"])
        .arg("--json")
        .arg(&json);
    for work in works {
        bench = bench.args(["--work", work]);
    }
    let outcome = bench.run();
    outcome.assert_success();
    assert!(outcome.stdout.contains("everything on processor "), "{outcome}");
    let text = fs::read_to_string(&json).expect("the report was written");
    let report: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    assert!(report["processor"].is_u64(), "{text}");
    for work in works {
        let lines = report["lines"].as_array().expect("lines");
        let line = lines.iter().find(|line| line["work"] == work).unwrap_or_else(|| panic!("{work}: {text}"));
        let cells = line["cells"].as_array().expect("cells");
        let ours = cells.iter().find(|cell| cell["contender"] == "inline,notify").expect("it takes part");
        let native = work != "register-random";
        assert_eq!(ours["extra"].is_object(), native, "{work}: what native does is compared: {text}");
    }
    stage.assert_nothing_left();
}

#[test]
fn a_work_without_its_program_is_a_sentence() {
    let stage = Stage::new();
    let bench = |work: &[&str]| {
        stage
            .program(Mode::Native, Account::Ordinary, stage.binary())
            .args(["bench", "--rounds", "3", "--against", "notify"])
            .args(work)
            .env("PATH", "/nowhere")
            .run()
    };
    for work in ["cc", "python3"] {
        let outcome = bench(&["--work", work]);
        assert_eq!(outcome.code(), Some(1), "{outcome}");
        let words = format!("{work} can't be measured: {work} isn't installed");
        assert!(outcome.stderr.contains(&words), "{outcome}");
    }
}

/// Calls that the filter traps are counted: `make report` tells those of an exec.
#[test]
fn the_number_of_trapped_calls_is_wrong() {
    let stage = Stage::new();
    let log = stage.work().join("log");
    let trapped = |programs: u32| {
        let _ = fs::remove_file(&log);
        let script = format!(
            "exec 3</dev/ummunotify; n=0; while [ $n -lt {programs} ]; do /bin/true; n=$((n + 1)); done"
        );
        stage
            .program(Mode::Native, Account::Ordinary, stage.binary())
            .args(["run", "--backend", "emulated", "--trap", "notify", "--stats", "--log-file"])
            .arg(&log)
            .args(["--", "sh", "-c", &script])
            .run()
            .assert_success();
        stage.assert_nothing_left();
        let said = fs::read_to_string(&log).expect("the log was written");
        let number = said.split_once("the filter trapped ").and_then(|(_, rest)| rest.split(' ').next());
        number.and_then(|number| number.parse::<u32>().ok()).unwrap_or_else(|| panic!("no number: {said}"))
    };
    let (few, many) = (trapped(1), trapped(11));
    // Each is started by a fork, and its loader maps what it needs.
    assert!(many >= few + 20, "{few} with one program, {many} with eleven");
}

/// count.sh with that script in place of the guest: `$stage` is the folder that both sides see.
fn count(stage: &Stage, guest: &str, settings: &[(&str, &str)]) -> (Outcome, PathBuf) {
    let fake = stands_for(stage, "guest", &format!("eval \"set -- $1\"\nstage=$2\n{guest}"));
    let json = stage.work().join("counts.json");
    let mut program = stage
        .program(Mode::Native, Account::available()[0], script("guest/count.sh"))
        .arg(&json)
        .env("GUEST_RUN", &fake)
        .env("GUEST_CACHE", stage.work().join("cache"))
        .env("UMMUNOTIFY", stage.binary());
    for (name, value) in settings {
        program = program.env(name, value);
    }
    (program.run(), json)
}

/// What the guest leaves of a contender.
fn counted(name: &str, counts: &str, errors: &str, code: u8) -> String {
    format!(
        "echo '{counts}' >$stage/{name}.counts; printf '{errors}' >$stage/{name}.errors; echo {code} >$stage/{name}.code"
    )
}

#[test]
fn counts_of_a_guest_hide_how_it_ended() {
    let stage = Stage::new();
    let native = counted("native", "munmap - 8448 8453", "", 0);
    let kmod = counted("kmod", "munmap 10 9339 9790", "", 0);
    let (outcome, json) = count(&stage, &format!("echo kernel 6.1.0; {native}; {kmod}"), &[]);
    outcome.assert_success();
    let text = fs::read_to_string(&json).expect("it was written");
    let report: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    assert_eq!(report["kernel"], "6.1.0");
    assert_eq!(report["counts"][0]["contender"], "kmod");
    assert_eq!(report["counts"][0]["regions"], 10);
    assert_eq!(report["counts"][1]["layouts"], serde_json::json!([8448, 8453]));

    let skipped = count(&stage, "echo 'guest: SKIPPED: no apt-get' >&2; exit 77", &[]).0;
    assert_eq!(skipped.code(), Some(77), "{skipped}");
    assert!(skipped.stdout.contains("SKIPPED instruction counts in the guest: no apt-get"), "{skipped}");

    let failing = counted("kmod", "", "no such device", 1);
    let fallen_back = counted("notify", "munmap 10 1 1", "the inline layer is not used", 0);
    for (guest, words) in [
        (&format!("{native}; {failing}"), "not counted: kmod"),
        (&format!("{native}; {fallen_back}"), "not counted: notify"),
        (&"echo panic; exit 70".to_owned(), "not counted: the guest ended with 70"),
        (&"true".to_owned(), "not counted: nothing was counted"),
    ] {
        let (outcome, _) = count(&stage, guest, &[]);
        assert_eq!(outcome.code(), Some(1), "{outcome}");
        assert!(outcome.stderr.contains(words), "{words}: {outcome}");
    }
    for (setting, words) in [(("LAYERS", "magic"), "no set 'magic'"), (("REGIONS", "ten"), "not 'ten'")] {
        let (outcome, _) = count(&stage, "true", &[setting]);
        assert_eq!(outcome.code(), Some(2), "{outcome}");
        assert!(outcome.stderr.contains(words), "{outcome}");
    }
    assert!(
        fs::read_dir(stage.work().join("cache")).expect("it was made").next().is_none(),
        "a stage was left"
    );
}

#[test]
fn a_report_that_cannot_be_made_is_a_sentence() {
    let stage = Stage::new();
    let folder = stage.work().join("reports");
    let report = |rounds: &str, folder: Option<&Path>| {
        stage
            .program(Mode::Native, Account::Ordinary, script("report.sh"))
            .args(folder)
            .env("ROUNDS", rounds)
            .env("CARGO_TARGET_DIR", stage.work().join("target"))
            .run()
    };
    for (rounds, folder, code, words) in [
        ("15", None, 2, "usage: report.sh"),
        ("2", Some(&*folder), 2, "a number from 3; not '2'"),
        ("15", Some(&*folder), 1, "run make report"),
    ] {
        let outcome = report(rounds, folder);
        assert_eq!(outcome.code(), Some(code), "{outcome}");
        assert!(outcome.stderr.contains(words), "{words}: {outcome}");
    }
}
