//! What came out: for programs as JSON, for a terminal as a table.

use std::fs;
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::contender::Absent;
use super::spread::Spread;

/// Everything that was measured, and where. All times are nanoseconds for a repetition.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Version of the program.
    pub version: &'static str,
    /// When the measurements began: seconds since 1970.
    pub began: u64,
    /// The machine.
    pub machine: Machine,
    /// The only processor that everything was on, supervisors too; `None` where the kernel chose.
    pub processor: Option<usize>,
    /// Rounds; in each, every contender had its turn.
    pub rounds: usize,
    /// Names of what was compared.
    pub contenders: Vec<String>,
    /// What wasn't, contenders and works, and why.
    pub absent: Vec<Absent>,
    /// A line for each work and number of regions.
    pub lines: Vec<Line>,
}

/// The machine, as far as figures depend on it.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// The processor's name (`/proc/cpuinfo`).
    pub processor: String,
    /// Processors that this process may use.
    pub processors: usize,
    /// The kernel's release (`uname -r`).
    pub kernel: String,
    /// Load averages (`/proc/loadavg`) when the measurements began; ours were not among it.
    pub load: String,
}

/// One kind of work.
#[derive(Debug, Serialize)]
pub struct Line {
    /// Its short name.
    pub work: &'static str,
    /// What was timed.
    pub what: &'static str,
    /// Regions that were registered elsewhere; `None` where that isn't varied.
    pub regions: Option<u64>,
    /// What was measured of whom.
    pub cells: Vec<Cell>,
}

/// One contender's times of one work.
#[derive(Debug, Serialize)]
pub struct Cell {
    /// Its name.
    pub contender: String,
    /// Nanoseconds for a repetition.
    pub time: Spread,
    /// The same as a multiple of native's in the same round; `None` where native doesn't do it.
    pub ratio: Option<Spread>,
    /// Nanoseconds beyond native's in the same round; `None` where native doesn't do it.
    pub extra: Option<Spread>,
    /// Nanoseconds of each round, in their order.
    pub times: Vec<f64>,
}

impl Machine {
    /// This one.
    pub fn here() -> Self {
        let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let release = nix::sys::utsname::uname().ok();
        Self {
            processor: name.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned()),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: release.map_or_else(String::new, |name| name.release().to_string_lossy().into_owned()),
            load: fs::read_to_string("/proc/loadavg")
                .map(|text| text.split(' ').take(3).collect::<Vec<_>>().join(" "))
                .unwrap_or_default(),
        }
    }
}

impl Report {
    /// An empty one that begins now.
    pub fn new(
        rounds: usize,
        processor: Option<usize>,
        contenders: Vec<String>,
        absent: Vec<Absent>,
    ) -> Self {
        let began = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let version = env!("CARGO_PKG_VERSION");
        let machine = Machine::here();
        Self { version, began, machine, processor, rounds, contenders, absent, lines: Vec::new() }
    }

    /// What a reader must know of the figures, line by line.
    pub fn preface(&self) -> Vec<String> {
        let Machine { processor, processors, kernel, load } = &self.machine;
        let mut lines = vec![
            format!("ummunotify {}, {}", self.version, utc(self.began)),
            format!("{processor}, {processors} processors, Linux {kernel}, load {load}"),
            format!(
                "{} rounds in turns; medians in ns a repetition (quartiles); ratio: of the same round's native",
                self.rounds
            ),
        ];
        if let Some(processor) = self.processor {
            lines.push(format!("everything on processor {processor}"));
        }
        lines.extend(
            self.absent.iter().map(|absent| format!("not compared: {}: {}", absent.name, absent.reason)),
        );
        lines
    }
}

impl Line {
    /// What was timed, among how many regions.
    pub fn title(&self) -> String {
        match self.regions {
            None => self.what.to_owned(),
            Some(regions) => format!("{}, {regions} regions elsewhere", self.what),
        }
    }

    /// Prints it as a block of a table.
    pub fn print(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "{:<11} {}", self.work, self.title())?;
        for Cell { contender, time, ratio, .. } in &self.cells {
            let quartiles = format!("({:.1} to {:.1})", time.lower, time.upper);
            write!(out, "    {contender:<14} {:>11.1} {quartiles:<24}", time.median)?;
            match ratio {
                Some(ratio) if contender != "native" => {
                    writeln!(out, " {:6.2} ({:.2} to {:.2})", ratio.median, ratio.lower, ratio.upper)?;
                }
                _ => writeln!(out)?,
            }
        }
        Ok(())
    }
}

/// Seconds since 1970 as a date and time of day, by the proleptic Gregorian calendar.
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86400, seconds % 86400);
    let (mut year, mut day) = (1970, days);
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02} {:02}:{:02} UTC", day + 1, rest / 3600, rest / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(utc(1_798_761_599), "2026-12-31 23:59 UTC");
        assert_eq!(utc(4_107_542_400), "2100-03-01 00:00 UTC");
    }

    #[test]
    fn a_report_is_valid_json_and_says_what_it_lacks() {
        let absent = Absent { name: "kmod".into(), reason: "open \"/dev/ummunotify\": ENOENT".into() };
        let mut report = Report::new(3, Some(1), vec!["native".into()], vec![absent]);
        let time = Spread::of(vec![1.0, 2.0, 3.0]).unwrap();
        let cell = Cell {
            contender: "native".into(),
            time,
            ratio: Some(time),
            extra: None,
            times: vec![1.0, 2.0, 3.0],
        };
        report.lines.push(Line { work: "munmap", what: "munmap", regions: Some(64), cells: vec![cell] });
        let text = serde_json::to_string(&report).unwrap();
        let back: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(back["lines"][0]["cells"][0]["time"]["median"], 2.0);
        assert_eq!(back["absent"][0]["name"], "kmod");
        assert!(report.preface().iter().any(|line| line.starts_with("not compared: kmod: ")));
        assert!(report.preface().iter().any(|line| line == "everything on processor 1"));
        let mut shown = Vec::new();
        report.lines[0].print(&mut shown).unwrap();
        let shown = String::from_utf8(shown).unwrap();
        assert!(shown.contains("64 regions elsewhere") && shown.contains("native"), "{shown}");
    }
}
