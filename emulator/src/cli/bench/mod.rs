//! `ummunotify bench`: what interception costs on this machine, one backend or set of layers against the other.
//!
//! Each contender is a process that works when it is asked. For each round all of them are asked in turns, so that drifts
//! of the machine meet all; medians and spread over the rounds are reported, and ratios of figures of one round.

mod contender;
mod page;
mod raw;
mod report;
mod spread;
mod work;
mod worker;

use std::fs;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use self::contender::{Absent, Contender};
use self::report::{Cell, Line, Report};
use self::spread::Spread;
use self::work::{Needs, Run, WORKS, Work};
use self::worker::Worker;
use super::run::own_path;
use super::{BenchArguments, BenchWorker, EXIT_USAGE, Failure, complain};

/// Between rounds: another process's turn comes there rather than within a round.
const PAUSE: Duration = Duration::from_millis(2);

/// Regions elsewhere, where that is varied.
const REGIONS: [u64; 4] = [0, 64, 1000, 1_000_000];

/// Runs it.
pub(super) fn main(options: &BenchArguments) -> Result<i32, Failure> {
    if let Some(kind) = options.worker {
        worker::serve(kind == BenchWorker::Device)?;
        return Ok(0);
    }
    let (works, mut lacking) = works(&options.work)?;
    let regions = if options.regions.is_empty() { REGIONS.to_vec() } else { ascending(&options.regions) };
    let (mut contenders, absent) = contenders(&options.against)?;
    for peer in &options.peer {
        contenders.push(Contender::peer(peer).map_err(|e| Failure::new(EXIT_USAGE, format!("--peer: {e}")))?);
    }
    // What can't be written to later is said before the hours of work.
    for path in options.json.iter().chain(&options.html) {
        fs::write(path, "")
            .with_context(|| format!("{}: can't be written; choose another file", path.display()))?;
    }
    let processor = options.one_processor.then(stay).transpose().context("--one-processor")?;
    let names = contenders.iter().map(Contender::name).collect();
    lacking.extend(absent);
    let mut report = Report::new(options.rounds, processor, names, lacking);
    for line in report.preface() {
        say(&line)?;
    }
    compare(&mut report, &contenders, &works, &regions)?;
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report).context("the report as JSON")?;
        save(path, &(text + "\n"))?;
    }
    if let Some(path) = &options.html {
        save(path, &page::render(&report))?;
    }
    Ok(0)
}

fn say(line: &str) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{line}")
}

fn save(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("{}: the report can't be written", path.display()))?;
    complain(&format!("the report is in {}", path.display()));
    Ok(())
}

/// Stays on one processor from now on, with all that is started.
fn stay() -> nix::Result<usize> {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this)?;
    let last = (0..CpuSet::count()).rev().find(|n| allowed.is_set(*n).unwrap_or(false)).unwrap_or(0);
    let mut one = CpuSet::new();
    one.set(last)?;
    sched_setaffinity(this, &one)?;
    Ok(last)
}

/// Those that can be measured, and the others. One that was asked for by name must be measured.
fn works(names: &[String]) -> Result<(Vec<&'static Work>, Vec<Absent>), Failure> {
    if names.is_empty() {
        let (there, absent): (Vec<_>, Vec<_>) = WORKS.iter().partition(|work| work.obstacle().is_none());
        let absent = absent
            .into_iter()
            .filter_map(|work: &Work| Some(Absent { name: work.name.to_owned(), reason: work.obstacle()? }));
        return Ok((there, absent.collect()));
    }
    let find = |name: &String| {
        work::find(name).ok_or_else(|| {
            let all: Vec<_> = WORKS.iter().map(|work| work.name).collect();
            Failure::new(EXIT_USAGE, format!("--work: there is {}; not `{name}`", all.join(", ")))
        })
    };
    let works = names.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    match works.iter().find_map(|work| Some((work.name, work.obstacle()?))) {
        Some((name, reason)) => Err(Failure::new(1, format!("{name} can't be measured: {reason}"))),
        None => Ok((works, Vec::new())),
    }
}

fn ascending(counts: &[u64]) -> Vec<u64> {
    let mut counts = counts.to_vec();
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Those that can be had, native first, and the others. One that was asked for by name must be had.
fn contenders(names: &[String]) -> Result<(Vec<Contender>, Vec<Absent>), Failure> {
    let wanted = if names.is_empty() {
        Contender::usual()
    } else {
        let named = names.iter().map(|name| Contender::named(name));
        let mut named = named
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| Failure::new(EXIT_USAGE, format!("--against: {e}")))?;
        named.retain(|contender| *contender != Contender::Native);
        named.insert(0, Contender::Native);
        named.dedup();
        named
    };
    let (mut there, mut absent) = (Vec::new(), Vec::new());
    for contender in wanted {
        match contender.obstacle() {
            None => there.push(contender),
            Some(reason) if names.is_empty() => absent.push(Absent { name: contender.name(), reason }),
            Some(reason) => {
                return Err(Failure::new(1, format!("{} can't be compared: {reason}", contender.name())));
            }
        }
    }
    Ok((there, absent))
}

/// Measures everything, and prints each line as it is there.
fn compare(
    report: &mut Report,
    contenders: &[Contender],
    works: &[&'static Work],
    regions: &[u64],
) -> anyhow::Result<()> {
    let own = own_path()?;
    let mut workers = Vec::new();
    for contender in contenders {
        let worker = Worker::start(contender.command(&own)).with_context(|| contender.name())?;
        workers.push((contender, worker));
    }
    let alone = works.iter().filter(|work| !work.among).map(|work| (*work, None));
    let counts = regions.iter().map(|count| Some(*count));
    let among =
        counts.flat_map(|count| works.iter().filter(|work| work.among).map(move |work| (*work, count)));
    let plan: Vec<_> = alone.chain(among).collect();
    let mut filled = 0;
    for (n, (work, count)) in plan.iter().enumerate() {
        if let Some(count) = count.filter(|count| *count > filled) {
            progress(&format!("registering {count} regions"));
            for (_, worker) in &mut workers {
                worker.fill(count)?;
            }
            filled = count;
        }
        progress(&format!("{} of {}: {}", n + 1, plan.len(), work.what));
        let line = measure(report.rounds, work, *count, &mut workers, &own)?;
        progress("");
        line.print(&mut io::stdout().lock())?;
        report.lines.push(line);
    }
    workers.into_iter().try_for_each(|(_, worker)| worker.finish())
}

/// Overwrites the last line of a terminal; says nothing elsewhere.
fn progress(what: &str) {
    let mut error = io::stderr();
    if error.is_terminal() {
        let _ = write!(error, "\r\x1b[K{what}");
    }
}

/// One work, of all that can do it.
fn measure(
    rounds: usize,
    work: &'static Work,
    regions: Option<u64>,
    workers: &mut [(&Contender, Worker)],
    own: &Path,
) -> anyhow::Result<Line> {
    let is_whole = matches!(work.run, Run::Whole(_));
    let takes_part = |contender: &Contender| match contender {
        Contender::Enclosed => regions.is_none() && work.needs == Needs::Nothing && !is_whole,
        contender => contender.has_device() || work.needs == Needs::Nothing,
    };
    let mut workers: Vec<_> = workers.iter_mut().filter(|(contender, _)| takes_part(contender)).collect();
    let mut times = vec![Vec::with_capacity(rounds); workers.len()];
    for round in 0..rounds {
        // Nobody is always the one behind the same other.
        for turn in 0..workers.len() {
            let n = (turn + round) % workers.len();
            let (contender, worker) = &mut workers[n];
            times[n].push(match work.run {
                Run::Batch(_) => worker.measure(work)?,
                Run::Whole(program) => whole(contender.whole(own, program), work.batch)?,
            });
        }
        std::thread::sleep(PAUSE);
    }
    let native = workers.iter().position(|(contender, _)| **contender == Contender::Native);
    let native = native.map(|n| times[n].clone());
    let mut cells = Vec::new();
    for ((contender, _), times) in workers.iter().zip(times) {
        let ratios =
            native.as_ref().map(|native| times.iter().zip(native).map(|(ours, theirs)| ours / theirs));
        let ratio = ratios.and_then(|ratios| Spread::of(ratios.collect()));
        let extras =
            native.as_ref().map(|native| times.iter().zip(native).map(|(ours, theirs)| ours - theirs));
        let extra = extras.and_then(|extras| Spread::of(extras.collect()));
        if let Some(time) = Spread::of(times.clone()) {
            cells.push(Cell { contender: contender.name(), time, ratio, extra, times });
        }
    }
    Ok(Line { work: work.name, what: work.what, regions, cells })
}

/// Nanoseconds that a command takes from its start to its end.
fn whole(mut command: Command, batch: u32) -> anyhow::Result<f64> {
    let start = Instant::now();
    for _ in 0..batch {
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
        let status = status.with_context(|| format!("{command:?}"))?;
        anyhow::ensure!(status.success(), "{command:?} failed: {status}");
    }
    Ok(start.elapsed().as_nanos() as f64 / f64::from(batch))
}
