//! What interception costs: each figure as a ratio to native, measured in turns.
//!
//! Four processes run this program: one native, three under `ummunotify run` with the device open and other layers.
//! For each round the parent asks one after the other for a batch of one kind of work, so that drifts of the machine
//! meet all; the medians over all rounds, their quotients and the spread are printed. The figures say nothing about
//! another machine.

use std::fs::File;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use memmap2::MmapMut;
use ummunotify::client::Notifier;
use ummunotify_abi::PageRange;

/// Rounds; odd, so that a median is a measured value.
const ROUNDS: usize = 15;

/// One kind of work.
#[derive(Clone, Copy)]
struct Work {
    name: &'static str,
    what: &'static str,
    /// Repetitions in a batch.
    batch: u32,
    /// Only in the processes that have the device.
    device_only: bool,
    /// Does a batch; the time of what is measured of it.
    run: fn(&mut Bench, u32) -> Duration,
}

/// Without regarding how many regions there are.
const WORKS: &[Work] = &[
    Work {
        name: "getppid",
        what: "an unrelated system call",
        batch: 20_000,
        device_only: false,
        run: |bench, n| timed(bench, n, getppid),
    },
    Work {
        name: "read",
        what: "a read of an ordinary file",
        batch: 20_000,
        device_only: false,
        run: |bench, n| timed(bench, n, read),
    },
    Work {
        name: "open",
        what: "open and close of an ordinary file",
        batch: 1_000,
        device_only: false,
        run: |bench, n| timed(bench, n, open),
    },
    Work {
        name: "map",
        what: "plain mmap of 4 KiB, munmap included",
        batch: 500,
        device_only: false,
        run: |bench, n| timed(bench, n, map),
    },
    Work {
        name: "large",
        what: "mmap, touch, munmap of 64 KiB",
        batch: 200,
        device_only: false,
        run: |bench, n| timed(bench, n, large),
    },
    Work {
        name: "counter",
        what: "the check of the generation counter",
        batch: 1_000_000,
        device_only: true,
        run: |bench, n| timed(bench, n, counter),
    },
    Work {
        name: "register",
        what: "register and unregister a region",
        batch: 20_000,
        device_only: true,
        run: |bench, n| timed(bench, n, register),
    },
];

/// With so many regions elsewhere, below and above what is touched.
const COUNTS: [u64; 4] = [0, 64, 1000, 1_000_000];

/// Each with all those numbers of regions.
const AMONG_REGIONS: &[Work] = &[
    Work {
        name: "munmap",
        what: "munmap of a touched page",
        batch: 512,
        device_only: false,
        run: unmap_missing,
    },
    Work {
        name: "hit",
        what: "munmap of a page that is a region",
        batch: 512,
        device_only: false,
        run: unmap_hitting,
    },
    Work {
        name: "madvise",
        what: "MADV_DONTNEED of a touched page",
        batch: 512,
        device_only: false,
        run: discard,
    },
    Work {
        name: "free",
        what: "free of 33 MiB, which malloc always maps",
        batch: 64,
        device_only: false,
        run: release,
    },
];

struct Bench {
    notifier: Option<Notifier>,
    zero: File,
    /// Regions elsewhere.
    elsewhere: u64,
}

fn timed(bench: &mut Bench, batch: u32, once: fn(&mut Bench)) -> Duration {
    let start = Instant::now();
    for _ in 0..batch {
        once(bench);
    }
    start.elapsed()
}

fn getppid(_: &mut Bench) {
    black_box(std::os::unix::process::parent_id());
}

fn read(bench: &mut Bench) {
    let mut bytes = [0; 64];
    black_box((&bench.zero).read(&mut bytes).is_ok());
}

fn open(_: &mut Bench) {
    black_box(File::open("/dev/zero").is_ok());
}

fn map(_: &mut Bench) {
    drop(black_box(MmapMut::map_anon(4096)));
}

fn large(_: &mut Bench) {
    if let Ok(mut pages) = MmapMut::map_anon(16 * 4096) {
        pages.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        black_box(&pages);
    }
}

/// Touched pages, each a mapping of its own: every second one of the places is another mapping's.
fn pages(batch: u32) -> Vec<MmapMut> {
    let mut pages: Vec<_> = (0..2 * batch).filter_map(|_| MmapMut::map_anon(4096).ok()).collect();
    let mut keep = false;
    pages.retain(|_| {
        keep = !keep;
        keep
    });
    pages.iter_mut().for_each(|page| page[0] = 1);
    pages
}

fn unmap_missing(_: &mut Bench, batch: u32) -> Duration {
    let pages = pages(batch);
    let start = Instant::now();
    drop(black_box(pages));
    start.elapsed()
}

fn unmap_hitting(bench: &mut Bench, batch: u32) -> Duration {
    let pages = pages(batch);
    if let Some(notifier) = &bench.notifier {
        for (page, cookie) in pages.iter().zip(1..) {
            let start = page.as_ptr() as u64;
            let _ = notifier.register(PageRange::new(start, start + 4096), cookie);
        }
    }
    let start = Instant::now();
    drop(black_box(pages));
    let took = start.elapsed();
    if let Some(notifier) = &bench.notifier {
        for cookie in 1..=u64::from(batch) {
            let _ = notifier.unregister(cookie);
        }
    }
    took
}

fn discard(_: &mut Bench, batch: u32) -> Duration {
    let mut pages = pages(batch);
    let start = Instant::now();
    for page in &pages {
        // SAFETY: nobody looks at what is in the page.
        let _ = unsafe { page.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }
    let took = start.elapsed();
    pages.clear();
    took
}

fn release(_: &mut Bench, batch: u32) -> Duration {
    let mut blocks: Vec<_> = (0..batch).map(|_| Vec::<u8>::with_capacity(33 << 20)).collect();
    for block in &mut blocks {
        block.extend([1; 64]);
    }
    let start = Instant::now();
    drop(black_box(blocks));
    start.elapsed()
}

fn counter(bench: &mut Bench) {
    if let Some(notifier) = &bench.notifier {
        black_box(notifier.counter().generation());
    }
}

fn register(bench: &mut Bench) {
    if let Some(notifier) = &bench.notifier {
        let _ = notifier.register(PageRange::new(4096, 8192), u64::MAX);
        let _ = notifier.unregister(u64::MAX);
    }
}

impl Bench {
    /// Sees to it that there are `count` regions elsewhere: half of them below everything, half above.
    fn fill(&mut self, count: u64) -> Result<()> {
        let Some(notifier) = &self.notifier else { return Ok(()) };
        for n in self.elsewhere..count {
            let low = 0x10_0000 + n * 8192;
            let start = if n % 2 == 0 { low } else { 0x7fff_ffff_0000 + low };
            notifier.register(PageRange::new(start, start + 4096), 1 << 32 | n).context("REGISTER_REGION")?;
        }
        self.elsewhere = self.elsewhere.max(count);
        Ok(())
    }
}

/// A process that answers the name of a work with nanoseconds per repetition.
struct Worker {
    child: Child,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    fn start(mut command: Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let ask = child.stdin.take().context("no pipe to the worker")?;
        let answers = BufReader::new(child.stdout.take().context("no pipe from the worker")?);
        Ok(Self { child, ask, answers })
    }

    fn measure(&mut self, work: &Work) -> Result<f64> {
        self.ask(work.name)?.trim().parse().with_context(|| format!("no figure of {}", work.name))
    }

    /// Has the worker register that many regions elsewhere.
    fn fill(&mut self, count: u64) -> Result<()> {
        self.ask(&count.to_string()).map(|_| ())
    }

    fn ask(&mut self, question: &str) -> Result<String> {
        writeln!(self.ask, "{question}")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the worker ended at {question}");
        Ok(line)
    }

    fn finish(self) -> Result<()> {
        let Self { mut child, ask, .. } = self;
        drop(ask);
        ensure!(child.wait()?.success(), "a worker failed");
        Ok(())
    }
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("--worker") => serve(None),
        Some("--device-worker") => {
            let notifier = Notifier::open_nonblocking().context("open /dev/ummunotify")?;
            serve(Some(notifier))
        }
        Some(other) => anyhow::bail!("unknown argument {other}; start it without one"),
        None => compare(),
    }
}

/// Answers until the parent closes the pipe: a work's name with its time, a number once there are so many regions.
fn serve(notifier: Option<Notifier>) -> Result<()> {
    let mut bench = Bench { notifier, zero: File::open("/dev/zero")?, elsewhere: 0 };
    for line in std::io::stdin().lines() {
        let name = line?;
        if let Ok(count) = name.parse() {
            bench.fill(count)?;
            println!("filled");
            continue;
        }
        let work = WORKS.iter().chain(AMONG_REGIONS).find(|w| w.name == name).context("no such work")?;
        let took = (work.run)(&mut bench, work.batch);
        println!("{}", took.as_nanos() as f64 / f64::from(work.batch));
    }
    Ok(())
}

/// The layers that are compared with no layer at all.
const LAYERS: [&str; 3] = ["inline,notify", "notify", "trace"];

fn compare() -> Result<()> {
    let this = std::env::current_exe()?;
    let emulator: PathBuf = this.with_file_name("ummunotify");
    ensure!(emulator.exists(), "{} is missing; build the workspace first", emulator.display());
    let mut native = Command::new(&this);
    native.arg("--worker");
    let mut native = Worker::start(native)?;
    let mut emulated = Vec::new();
    for layers in LAYERS {
        let mut command = Command::new(&emulator);
        command.args(["run", "--backend", "emulated", "--trap", layers, "--"]);
        command.arg(&this).arg("--device-worker");
        emulated.push(Worker::start(command)?);
    }

    println!("{ROUNDS} rounds in turns, medians, ns a repetition (least to most); ratios to native");
    for work in WORKS {
        measure(work, "", &mut native, &mut emulated, &LAYERS)?;
    }
    for count in COUNTS {
        for worker in &mut emulated {
            worker.fill(count)?;
        }
        for work in AMONG_REGIONS {
            measure(work, &format!(", {count} regions elsewhere"), &mut native, &mut emulated, &LAYERS)?;
        }
    }
    emulated.into_iter().try_for_each(Worker::finish)?;
    // The loader is itself a program without an interpreter, and gets what such a one gets: a filter before exec.
    let mut enclosed = Command::new(&emulator);
    enclosed.args(["run", "--backend", "emulated", "--", LOADER]).arg(&this).arg("--worker");
    let mut enclosed = [Worker::start(enclosed)?];
    println!("\nwhat a static program pays under run, without the device");
    for work in WORKS.iter().filter(|work| !work.device_only && work.name != "hit") {
        measure(work, "", &mut native, &mut enclosed, &["static"])?;
    }
    native.finish()?;
    enclosed.into_iter().try_for_each(Worker::finish)
}

/// The dynamic loader of x86-64 (System V ABI).
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";

/// Measures one work in turns and prints what came out, each of `emulated` under its name.
fn measure(
    work: &Work,
    among: &str,
    native: &mut Worker,
    emulated: &mut [Worker],
    names: &[&str],
) -> Result<()> {
    let mut natives = Vec::new();
    let mut ours = vec![Vec::new(); emulated.len()];
    for _ in 0..ROUNDS {
        if !work.device_only {
            natives.push(native.measure(work)?);
        }
        for (times, worker) in ours.iter_mut().zip(emulated.iter_mut()) {
            times.push(worker.measure(work)?);
        }
        // A pause lets another process have its turn between rounds rather than within one.
        std::thread::sleep(Duration::from_millis(2));
    }
    println!("{:<9} {}{among}", work.name, work.what);
    let native = (!work.device_only).then(|| Spread::of(natives));
    if let Some(native) = &native {
        println!("    {:<14} {}", "native", native.text());
    }
    for (layers, times) in names.iter().zip(ours) {
        let ours = Spread::of(times);
        print!("    {layers:<14} {}", ours.text());
        match &native {
            Some(native) => println!("   ratio {:.2}", ours.median / native.median),
            None => println!(),
        }
    }
    Ok(())
}

struct Spread {
    least: f64,
    median: f64,
    most: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self { least: values[0], median: values[values.len() / 2], most: values[values.len() - 1] }
    }

    fn text(&self) -> String {
        format!("{:9.1} ({:.1} to {:.1})", self.median, self.least, self.most)
    }
}
