//! The limits, and what of the measurements is held against them.

use crate::row::{Row, Unit};
use crate::source::{Bench, Sources, Spread};

/// The contender that the limits are for: libc's calls looked at in the process, the filter as the net.
const OURS: &str = "inline,notify";
/// The one by which calls are trapped that no hook sees.
const NET: &str = "notify";
/// Those whose hooks are compared, as `make report` calls them.
const PEERS: [&str; 2] = ["ucx", "memhooks"];
/// The supervisor that only lets calls go; filters of the same that let something go (benches/peers/bare.c).
const BARE: &str = "bare";
const BARE_FLAGS: &str = "bare-flags";
const BARE_GATE: &str = "bare-gate";
const BARE_EXEC: &str = "bare-exec";

const MILLION: u64 = 1_000_000;

/// All figures.
pub fn rows(sources: &Sources) -> Vec<Row> {
    let mut rows = Vec::new();
    unrelated(&mut rows, sources);
    misses(&mut rows, sources);
    hits(&mut rows, sources);
    told_of_hits(&mut rows, sources);
    others(&mut rows, sources);
    device(&mut rows, sources);
    table_and_memory(&mut rows, sources);
    programs(&mut rows, sources);
    guest(&mut rows, sources);
    rows
}

type Pick = fn(&Bench, &str, Option<u64>) -> Option<Spread>;

fn time(bench: &Bench, work: &str, regions: Option<u64>) -> Option<Spread> {
    bench.cell(work, regions, OURS).map(|cell| cell.time)
}

fn ratio(bench: &Bench, work: &str, regions: Option<u64>) -> Option<Spread> {
    bench.cell(work, regions, OURS)?.ratio
}

fn extra(bench: &Bench, work: &str, regions: Option<u64>) -> Option<Spread> {
    bench.cell(work, regions, OURS)?.extra
}

fn picked(bench: Option<&Bench>, pick: Pick, work: &str, regions: Option<u64>) -> Option<Spread> {
    bench.and_then(|bench| pick(bench, work, regions))
}

/// Instructions of a contender beyond another's.
fn beyond(sources: &Sources, work: &str, regions: u64, who: &str, whom: &str) -> Option<Spread> {
    sources.guest.as_ref()?.paired(work, regions, [who, whom], |ours, theirs| ours - theirs)
}

/// The same as a multiple.
fn multiple(sources: &Sources, work: &str, regions: u64, who: &str, whom: &str) -> Option<Spread> {
    sources.guest.as_ref()?.paired(work, regions, [who, whom], |ours, theirs| ours / theirs)
}

fn instructions(sources: &Sources, work: &str, regions: u64, who: &str) -> Option<Spread> {
    Spread::of_median(sources.guest.as_ref()?.layouts(work, regions, who)?.to_vec())
}

fn unrelated(rows: &mut Vec<Row>, sources: &Sources) {
    let bench = sources.bench.as_ref();
    rows.push(
        Row::at_most("check of the counter", Unit::Nanoseconds, 3.0)
            .spread(picked(bench, time, "counter", None)),
    );
    for who in ["kmod", OURS] {
        rows.push(
            Row::told(format!("check of the counter, {who}, guest"), Unit::Instructions)
                .spread(instructions(sources, "counter", 0, who)),
        );
    }
    for work in ["getppid", "read", "write"] {
        rows.push(
            Row::at_most(format!("{work}, beyond native"), Unit::Nanoseconds, 25.0)
                .spread(picked(bench, extra, work, None)),
        );
        rows.push(
            Row::at_most(format!("{work}, beyond native, guest"), Unit::Instructions, 160.0)
                .spread(beyond(sources, work, 0, OURS, "native")),
        );
        floor(rows, sources, work, BARE, &format!("{work}, beyond native, a filter for munmap alone"));
    }
    for work in ["mmap", "raw-mmap"] {
        let by = if work == "mmap" { "libc" } else { "an instruction" };
        rows.push(
            Row::at_most(format!("plain mmap by {by}, beyond native"), Unit::Nanoseconds, 25.0)
                .spread(picked(bench, extra, work, None)),
        );
        rows.push(
            Row::at_most(format!("plain mmap by {by}, beyond native, guest"), Unit::Instructions, 250.0)
                .spread(beyond(sources, work, 0, OURS, "native")),
        );
        for (who, what) in [(BARE, "for munmap alone"), (BARE_FLAGS, "that reads mmap's flags")] {
            let figure = format!("plain mmap by {by}, beyond native, a filter {what}");
            floor(rows, sources, work, who, &figure);
        }
    }
}

/// What a filter costs that lets the call go.
fn floor(rows: &mut Vec<Row>, sources: &Sources, work: &str, who: &str, figure: &str) {
    let cell = sources.bench.as_ref().and_then(|bench| bench.cell(work, None, who));
    rows.push(Row::told(figure, Unit::Nanoseconds).spread(cell.and_then(|cell| cell.extra)));
    rows.push(
        Row::told(format!("{figure}, guest"), Unit::Instructions)
            .spread(beyond(sources, work, 0, who, "native")),
    );
}

fn misses(rows: &mut Vec<Row>, sources: &Sources) {
    let bench = sources.bench.as_ref();
    for work in ["munmap", "free", "madvise"] {
        for regions in [0, MILLION] {
            rows.push(
                Row::at_most(
                    format!("{work} that hits nothing, {regions} regions elsewhere"),
                    Unit::Ratio,
                    1.10,
                )
                .spread(picked(bench, ratio, work, Some(regions))),
            );
        }
        for regions in [10, MILLION] {
            rows.push(
                Row::at_most(
                    format!("{work} that hits nothing, {regions} regions elsewhere, beyond native, guest"),
                    Unit::Instructions,
                    450.0,
                )
                .spread(beyond(sources, work, regions, OURS, "native")),
            );
        }
        rows.push(
            Row::told(
                format!("{work} that hits nothing, without us, where more is mapped elsewhere, beyond native, guest"),
                Unit::Instructions,
            )
            .spread(beyond(sources, work, 0, "crowded", "native")),
        );
        let figure = format!("{work}, a filter that lets libc's go by where it comes from");
        let cell = bench.and_then(|bench| bench.cell(work, Some(0), BARE_GATE));
        rows.push(Row::told(figure.clone(), Unit::Ratio).spread(cell.and_then(|cell| cell.ratio)));
        rows.push(
            Row::told(format!("{figure}, beyond native, guest"), Unit::Instructions)
                .spread(beyond(sources, work, 0, BARE_GATE, "native")),
        );
    }
}

fn hits(rows: &mut Vec<Row>, sources: &Sources) {
    let bench = sources.bench.as_ref();
    for (work, what, regions, limit) in [
        ("hit", "munmap of a page that is a region, 0 regions elsewhere", Some(0), 1.18),
        ("hit", "munmap of a page that is a region, 64 regions elsewhere", Some(64), 1.18),
        ("hit", "munmap of a page that is a region, 1000000 regions elsewhere", Some(MILLION), 1.35),
        ("hit-64k", "munmap of 64 KiB that is a region", None, 1.07),
        ("epoll-hit", "munmap of a page that is a region, in an epoll set", None, 1.40),
    ] {
        rows.push(Row::at_most(what, Unit::Ratio, limit).spread(picked(bench, ratio, work, regions)));
    }
}

/// What has no limit, beside what has.
fn told_of_hits(rows: &mut Vec<Row>, sources: &Sources) {
    let bench = sources.bench.as_ref();
    for (work, what) in [
        ("waited-hit", "munmap of a page that is a region, a thread waiting for it"),
        ("contexts-8", "munmap that hits nothing, 8 contexts open"),
    ] {
        rows.push(Row::told(what, Unit::Ratio).spread(picked(bench, ratio, work, None)));
    }
    for (work, what) in [
        ("first-hit", "munmap of a page that is a region, everything read before"),
        ("discard", "madvise of a page that is a region"),
    ] {
        let figure = format!("{what}, 10 regions elsewhere, against our module's, guest, instructions");
        rows.push(Row::told(figure, Unit::Ratio).spread(multiple(sources, work, 10, OURS, "kmod")));
    }
}

fn others(rows: &mut Vec<Row>, sources: &Sources) {
    let faster = sources.bench.as_ref().and_then(|bench| {
        let ratios =
            PEERS.iter().filter_map(|peer| Some((bench.cell("munmap", Some(0), peer)?.ratio?.median, *peer)));
        ratios.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, peer)| peer)
    });
    rows.push(
        Row::at_most(
            format!("munmap of a page that nobody watches, against the faster of {}", PEERS.join(" and ")),
            Unit::Ratio,
            1.07,
        )
        .spread(faster.and_then(|peer| sources.bench.as_ref()?.paired("munmap", Some(0), OURS, peer))),
    );
    for who in [OURS, PEERS[0], PEERS[1], "userfaultfd"] {
        let cell = sources.bench.as_ref().and_then(|bench| bench.cell("munmap", Some(0), who));
        rows.push(
            Row::told(format!("munmap of a page that nobody watches, {who}"), Unit::Ratio)
                .spread(cell.and_then(|cell| cell.ratio)),
        );
        rows.push(
            Row::told(
                format!("munmap of a page that nobody watches, {who}, beyond native, guest"),
                Unit::Instructions,
            )
            .spread(beyond(sources, "munmap", 10, who, "native")),
        );
    }
    for (bench, placed) in [
        (&sources.bench, "supervisors where the kernel puts them"),
        (&sources.one_processor, "one processor"),
    ] {
        let bare = bench.as_ref().and_then(|bench| bench.paired("raw-munmap", None, NET, BARE));
        rows.push(
            Row::at_most(
                format!("munmap by an instruction, against a supervisor that only lets it go, {placed}"),
                Unit::Ratio,
                1.15,
            )
            .spread(bare),
        );
    }
    rows.push(
        Row::told(
            "munmap by an instruction, against a supervisor that only lets it go, guest, instructions",
            Unit::Ratio,
        )
        .spread(multiple(sources, "raw-munmap", 10, NET, BARE)),
    );
}

fn device(rows: &mut Vec<Row>, sources: &Sources) {
    let bench = sources.bench.as_ref();
    for (what, work, regions, limit) in [
        ("register and unregister, 10 regions elsewhere", "register", Some(10), 300.0),
        ("register and unregister, 1000000 regions elsewhere", "register", Some(MILLION), 1_000.0),
        (
            "register and unregister at random, 1000000 regions elsewhere",
            "register-random",
            Some(MILLION),
            3_000.0,
        ),
        ("read of an event and LAST", "events-1", None, 400.0),
        ("read of 100 events and LAST", "events-100", None, 10_300.0),
    ] {
        rows.push(Row::at_most(what, Unit::Nanoseconds, limit).spread(picked(bench, time, work, regions)));
    }
}

fn table_and_memory(rows: &mut Vec<Row>, sources: &Sources) {
    for (what, words, limit) in [
        ("away from all regions", "miss far away", Some(5.0)),
        ("among neighbours, one place", "miss among neighbours, one place", Some(60.0)),
        ("among neighbours, at random", "miss among neighbours, random places", Some(400.0)),
        ("at random, a load a node alone", "loads alone, one a node, random places", None),
        ("at random, three loads a node alone", "loads alone, three a node, random places", None),
    ] {
        let lines = sources.engine.iter().flatten();
        let mut fitting = lines.filter(|line| line.regions == MILLION && line.what.ends_with(words));
        let figure = format!("look at the table, 1000000 regions, {what}");
        let row = match limit {
            Some(limit) => Row::at_most(figure, Unit::Nanoseconds, limit),
            None => Row::told(figure, Unit::Nanoseconds),
        };
        rows.push(row.value(fitting.next().map(|line| line.median)));
    }
    let number = |name: &str| sources.numbers.as_ref()?.get(name).copied();
    for (what, name, limit) in [
        ("memory of a region, after 1000000 registrations at random", "memory-region", 160.0),
        ("memory that a context touches", "memory-context", 256.0 * 1024.0),
        ("resident memory of library and supervisor", "memory-resident", 6.0 * 1024.0 * 1024.0),
    ] {
        rows.push(Row::at_most(what, Unit::Bytes, limit).value(number(name)));
    }
}

fn programs(rows: &mut Vec<Row>, sources: &Sources) {
    let (free, one) = (sources.bench.as_ref(), sources.one_processor.as_ref());
    rows.push(
        Row::at_most("run of true, beyond true", Unit::Nanoseconds, 1e7)
            .spread(picked(free, extra, "run-true", None)),
    );
    for (what, work, bench, limit) in [
        ("a thread made and joined, one processor", "thread", one, 1.4),
        ("a thread made and joined", "thread", free, 2.0),
        ("fork and exec of true without our library, one processor", "exec-bare", one, 1.15),
        ("fork and exec of true without our library", "exec-bare", free, 1.5),
    ] {
        rows.push(Row::at_most(what, Unit::Ratio, limit).spread(picked(bench, ratio, work, None)));
    }
    let bare = one.and_then(|one| one.cell("exec-bare", None, BARE_EXEC)?.ratio);
    let figure = "fork and exec of true, one processor, a supervisor that only lets the same calls go";
    rows.push(Row::told(figure, Unit::Ratio).spread(bare));
    let bare = one.and_then(|one| one.paired("exec-bare", None, OURS, BARE_EXEC));
    let figure = "fork and exec of true without our library, one processor, against a supervisor that only lets the same calls go";
    rows.push(Row::told(figure, Unit::Ratio).spread(bare));
    for (what, work, bench) in [
        ("fork and exec of true with our library, one processor", "exec", one),
        ("fork and exec of true with our library", "exec", free),
        ("malloc and free", "malloc", free),
        ("python3, which allocates", "python3", free),
        ("compilation of a small file", "cc", free),
    ] {
        rows.push(Row::told(what, Unit::Ratio).spread(picked(bench, ratio, work, None)));
    }
    for (what, work, who, whom) in [
        ("a thread made and joined", "thread", OURS, "native"),
        ("fork and exec of true without our library", "exec-bare", OURS, "native"),
        (
            "fork and exec of true, a supervisor that only lets the same calls go",
            "exec-bare",
            BARE_EXEC,
            "native",
        ),
        (
            "fork and exec of true without our library, against a supervisor that only lets the same calls go",
            "exec-bare",
            OURS,
            BARE_EXEC,
        ),
    ] {
        rows.push(
            Row::told(format!("{what}, guest, instructions"), Unit::Ratio)
                .spread(multiple(sources, work, 0, who, whom)),
        );
    }
    let number = |name: String| sources.numbers.as_ref()?.get(&name).copied();
    for who in [NET, OURS] {
        for (work, what) in [("exec", "with"), ("exec-bare", "without")] {
            rows.push(
                Row::told(
                    format!("calls told to the supervisor by fork and exec {what} our library, {who}"),
                    Unit::Calls,
                )
                .value(number(format!("calls-{work} {who}"))),
            );
        }
    }
}

fn guest(rows: &mut Vec<Row>, sources: &Sources) {
    for (work, what) in
        [("register", "register"), ("unregister", "unregister"), ("events-1", "read of an event and LAST")]
    {
        let theirs = instructions(sources, work, 10, "kmod").map(|theirs| theirs.median);
        rows.push(Row {
            limit: theirs,
            below: true,
            ..Row::told(format!("{what} by the Rust client, against our module's, guest"), Unit::Instructions)
                .spread(theirs.and_then(|_| instructions(sources, work, 10, OURS)))
        });
        for who in [OURS, "kmod"] {
            rows.push(
                Row::told(format!("{what} by a system call, {who}, guest"), Unit::Instructions)
                    .spread(instructions(sources, &format!("{work}-call"), 10, who)),
            );
        }
    }
    rows.push(
        Row::told(
            format!("register by the Rust client while regions are hit (looks whether they are mapped), {OURS}, guest"),
            Unit::Instructions,
        )
        .spread(instructions(sources, "register-hit", 10, OURS)),
    );
    for (work, what) in [("munmap", "that hits nothing"), ("hit", "of a page that is a region")] {
        for (regions, limit) in [(10, 1.10), (1_000, 1.15), (MILLION, 1.15)] {
            let figure = format!(
                "munmap {what}, {regions} regions elsewhere, against our module's, guest, instructions"
            );
            rows.push(
                Row::at_most(figure, Unit::Ratio, limit)
                    .spread(multiple(sources, work, regions, OURS, "kmod")),
            );
        }
    }
}
