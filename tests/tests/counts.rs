//! What the engine's calls take in instructions: a bound for each, which no load of the machine can blur. A change that
//! makes one of them longer has to raise its bound here, and say why it is worth it.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::process::Command;

use ummunotify_tests::{say, skip};

/// Calls that each measurement of `emulator/engine/examples/counts.rs` makes.
const CALLS: u64 = 1000;

/// The most instructions that a call may take, as `make test` builds it (optimized, with its debug assertions), among
/// 1,000 other regions. Some five in a hundred more than it takes.
const BOUNDS: &[(&str, u64)] = &[
    ("counter_check", 8),
    ("miss_far", 48),
    ("miss_near", 405),
    ("register", 1_270),
    ("unregister", 1_275),
    ("hit", 970),
    ("hit_again", 885),
    // A hit is part of it.
    ("read_one", 2_330),
    // For each of 1,000 events.
    ("read_many", 295),
];

/// Instructions of each measurement. Callgrind writes a file whenever one begins, which tells the name of that one and
/// the count of the one before.
fn counts() -> Option<BTreeMap<String, u64>> {
    if let Err(error) = Command::new("valgrind").arg("--version").output() {
        skip("instruction counts", &format!("valgrind: {error}"));
        return None;
    }
    let here = env::current_exe().expect("the test has a file");
    let target = here.parent().and_then(|deps| deps.parent()).expect("target/debug/deps");
    let program = target.join("examples/counts");
    assert!(program.exists(), "{} is missing: build the workspace first", program.display());
    let folder = env::temp_dir().join(format!("ummunotify-counts-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder for callgrind's files");
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--dump-before=*::count_*"])
        .arg(format!("--callgrind-out-file={}/part", folder.display()))
        .arg(&program)
        .output()
        .expect("valgrind runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // part.1, part.2 ..., and what came after the last.
    let parts = (1..).map(|n| folder.join(format!("part.{n}"))).take_while(|part| part.exists());
    let mut counts = BTreeMap::new();
    let mut name = String::from("nothing yet");
    for part in parts.chain([folder.join("part")]) {
        let text = fs::read_to_string(&part).expect("callgrind has written it");
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
        let total = value("totals: ").expect("a total").trim().parse().expect("a number");
        counts.insert(std::mem::take(&mut name), total);
        let next = value("desc: Trigger: ").and_then(|trigger| trigger.split("count_").nth(1));
        name = next.unwrap_or("end").to_owned();
    }
    fs::remove_dir_all(&folder).expect("the folder goes");
    Some(counts)
}

#[test]
fn a_call_of_the_engine_takes_more_instructions_than_its_bound() {
    let Some(counts) = counts() else { return };
    let mut longer = Vec::new();
    for (name, bound) in BOUNDS {
        let taken = counts.get(*name).unwrap_or_else(|| panic!("no count of {name}: {counts:?}")) / CALLS;
        assert!(taken > 0, "{name} does nothing");
        say(&format!("{name}: {taken} instructions of at most {bound}"));
        if taken > *bound {
            longer.push(format!("{name}: {taken} instructions, {bound} are allowed"));
        }
    }
    assert!(longer.is_empty(), "{}", longer.join("\n"));
}
