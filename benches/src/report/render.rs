//! The rows as text.

use std::fmt::Write as _;

use crate::row::{Row, Verdict};
use crate::source::Sources;

/// For a terminal.
pub fn table(rows: &[Row]) -> String {
    let mut text = String::new();
    // Writing to a String can't fail.
    for row in rows.iter().filter(|row| row.verdict() != Verdict::NotMeasured) {
        let value = row.value.map_or_else(String::new, |value| row.unit.show(value));
        let _ =
            writeln!(text, "{:<100} {value:>22} {:>22}  {}", row.figure, limit(row), row.verdict().words());
    }
    let _ = writeln!(text, "{}", sum(rows));
    text
}

/// A page of Markdown.
pub fn page(sources: &Sources, rows: &[Row]) -> String {
    let mut page = String::from("# What it costs: every figure beside its limit\n\n");
    for (bench, what) in [
        (&sources.bench, "supervisors where the kernel puts them"),
        (&sources.one_processor, "one processor"),
    ] {
        let Some(bench) = bench else { continue };
        let machine = &bench.machine;
        let _ = writeln!(
            page,
            "* `ummunotify bench`, {what}: {}, {}, {} processors, Linux {}, load {}, {} rounds in turns",
            date(bench.began),
            machine.processor,
            machine.processors,
            machine.kernel,
            machine.load,
            bench.rounds
        );
        for absent in &bench.absent {
            let _ = writeln!(page, "  * not measured: {}: {}", absent.name, absent.reason);
        }
    }
    if let Some(guest) = &sources.guest {
        let _ = writeln!(
            page,
            "* guest: {}, Linux {}, instructions counted by QEMU on one emulated processor: repeatable, but blind to caches and \
             wake-ups, so they flatter what switches between processes; compared in the same layouts of the mappings around, and in \
             brackets stand the bounds between which the median lies with 95 % confidence",
            date(guest.began),
            guest.kernel
        );
    }
    page.push_str(
        "\nRatios are to native in the same round; judged is the median, in brackets stand the quartiles. A limit that lies \
         between them is said to be within the spread.\n\n",
    );
    if let Some(load) = busy(sources) {
        let _ = writeln!(
            page,
            "**The machine was busy (load {load}): the times say little; instruction counts, calls and memory do.**\n"
        );
    }
    let _ = writeln!(page, "**{}**\n", sum(rows));
    page.push_str("| figure | measured | at most | |\n|---|---|---|---|\n");
    for row in rows {
        let value = row.value.map_or_else(String::new, |value| row.unit.show(value));
        let quartiles = row.quartiles.map_or_else(String::new, |[lower, upper]| {
            format!(" ({} to {})", row.unit.show(lower), row.unit.show(upper))
        });
        let _ = writeln!(
            page,
            "| {} | {value}{quartiles} | {} | {} |",
            row.figure,
            limit(row),
            row.verdict().words()
        );
    }
    page
}

/// The load, if others wanted the processors more than half of the time when the measurements began.
fn busy(sources: &Sources) -> Option<&str> {
    let machine = &sources.bench.as_ref()?.machine;
    let load: f64 = machine.load.split(' ').next()?.parse().ok()?;
    (load > machine.processors as f64 / 2.0).then_some(&machine.load)
}

fn limit(row: &Row) -> String {
    let less = if row.below { "less than " } else { "" };
    row.limit.map_or_else(String::new, |limit| format!("{less}{}", row.unit.show(limit)))
}

fn sum(rows: &[Row]) -> String {
    let count = |verdict: Verdict| rows.iter().filter(|row| row.verdict() == verdict).count();
    let unmeasured =
        rows.iter().filter(|row| row.verdict() == Verdict::NotMeasured && row.limit.is_some()).count();
    format!(
        "{} hold, {} exceed their limit; of {} the limit lies within the spread ({} hold by the median); {unmeasured} with a \
         limit weren't measured",
        count(Verdict::Holds),
        count(Verdict::Exceeds),
        count(Verdict::HoldsWithinSpread) + count(Verdict::ExceedsWithinSpread),
        count(Verdict::HoldsWithinSpread)
    )
}

/// The day of that many seconds since 1970 (Hinnant's days-to-civil; the era begins on 1 March of year 0).
fn date(seconds: u64) -> String {
    let days = seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{}-{month:02}-{day:02}", era * 400 + year + next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge;
    use crate::source::{Bench, Cell, Guest, engine_lines, numbers};

    #[test]
    fn days_are_those_of_the_calendar() {
        for (seconds, day) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (1_798_761_599, "2026-12-31"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date(seconds), day);
        }
    }

    fn bench(work: &str, regions: &str, contender: &str, time: f64, ratio: f64) -> Bench {
        let spread = |x: f64| format!(r#"{{"least":{x},"lower":{x},"median":{x},"upper":{x},"most":{x}}}"#);
        let text = format!(
            r#"{{"version":"1","began":0,"processor":null,"rounds":3,"contenders":[],
                "machine":{{"processor":"P","processors":2,"kernel":"6.18","load":"3 2 1"}},
                "absent":[{{"name":"cc","reason":"cc isn't installed"}}],
                "lines":[{{"work":"{work}","what":"","regions":{regions},"cells":
                    [{{"contender":"{contender}","time":{},"ratio":{},"extra":{},"times":[{time}]}}]}}]}}"#,
            spread(time),
            spread(ratio),
            spread(time)
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn others_are_compared_round_by_round() {
        let mut paired = bench("munmap", "0", "inline,notify", 300.0, 1.5);
        let other = |time, ratio| bench("munmap", "0", "ucx", time, ratio).lines.remove(0).cells.remove(0);
        paired.lines[0].cells.push(other(250.0, 1.25));
        paired.lines[0].cells.push(Cell { contender: "memhooks".into(), ..other(200.0, 1.0) });
        // The machine was slower in the second round, for both.
        for (cell, times) in
            paired.lines[0].cells.iter_mut().zip([[150.0, 600.0], [1.0, 1.0], [100.0, 400.0]])
        {
            cell.times = times.to_vec();
        }
        let rows = judge::rows(&Sources { bench: Some(paired), ..Sources::default() });
        let row = of(&rows, "munmap of a page that nobody watches, against the faster of ucx and memhooks");
        assert_eq!((row.value, row.quartiles), (Some(1.5), Some([1.5, 1.5])));
        assert_eq!(row.verdict(), Verdict::Exceeds);
    }

    fn of<'a>(rows: &'a [Row], figure: &str) -> &'a Row {
        rows.iter().find(|row| row.figure == figure).unwrap_or_else(|| panic!("no `{figure}`"))
    }

    #[test]
    fn figures_of_every_source_stand_beside_their_limits() {
        let counts = r#"{"began":86400,"kernel":"6.1.0","counts":[
            {"contender":"native","work":"munmap","regions":null,"layouts":[8000,8400,8400]},
            {"contender":"bare-gate","work":"munmap","regions":null,"layouts":[8240,8645,8645]},
            {"contender":"kmod","work":"munmap","regions":10,"layouts":[9000,9300,9300]},
            {"contender":"inline,notify","work":"munmap","regions":10,"layouts":[9000,9100,9100]},
            {"contender":"kmod","work":"register","regions":10,"layouts":[980,980,980]},
            {"contender":"inline,notify","work":"register","regions":10,"layouts":[980,980,980]},
            {"contender":"inline,notify","work":"register-call","regions":10,"layouts":[2300,2340,2340]}]}"#;
        let sources = Sources {
            bench: Some(bench("munmap", "1000000", "inline,notify", 900.0, 1.14)),
            one_processor: Some(bench("thread", "null", "inline,notify", 900.0, 1.3)),
            guest: Some(serde_json::from_str::<Guest>(counts).unwrap()),
            engine: Some(engine_lines("1000000 regions  look, miss far away  2.0 2.4 ns")),
            numbers: Some(numbers("memory-region 170").unwrap()),
        };
        let rows = judge::rows(&sources);
        for (figure, verdict) in [
            ("munmap that hits nothing, 1000000 regions elsewhere", Verdict::Exceeds),
            ("munmap that hits nothing, 0 regions elsewhere", Verdict::NotMeasured),
            ("a thread made and joined, one processor", Verdict::Holds),
            ("munmap that hits nothing, 10 regions elsewhere, beyond native, guest", Verdict::Exceeds),
            (
                "munmap that hits nothing, 10 regions elsewhere, against our module's, guest, instructions",
                Verdict::Holds,
            ),
            ("register by the Rust client, against our module's, guest", Verdict::Exceeds),
            ("register by a system call, inline,notify, guest", Verdict::Reported),
            ("look at the table, 1000000 regions, away from all regions", Verdict::Holds),
            ("memory of a region, after 1000000 registrations at random", Verdict::Exceeds),
        ] {
            assert_eq!(of(&rows, figure).verdict(), verdict, "{figure}");
        }
        let let_go = "munmap, a filter that lets libc's go by where it comes from, beyond native, guest";
        assert_eq!((of(&rows, let_go).value, of(&rows, let_go).verdict()), (Some(245.0), Verdict::Reported));
        let page = page(&sources, &rows);
        for shown in [
            "1970-01-01, P, 2 processors, Linux 6.18, load 3 2 1",
            "not measured: cc: cc isn't installed",
            "| 1.14 (1.14 to 1.14) | 1.10 | EXCEEDS |",
            "| 700 instructions (700 instructions to 1000 instructions) | 450 instructions | EXCEEDS |",
            "less than 980 instructions",
            "**The machine was busy (load 3 2 1)",
            "**3 hold, 4 exceed",
        ] {
            assert!(page.contains(shown), "{shown}: {page}");
        }
        assert!(table(&rows).contains("holds") && !table(&rows).contains("not measured\n"));
    }
}
