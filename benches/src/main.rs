//! What interception costs: each figure as a ratio to native, measured in turns.
//!
//! Two processes run this program: one native, one under `ummunotify run` with the device open, with one layer
//! after the other. For each round the parent asks the one and then the other for a batch of one kind of work, so that drifts of the machine
//! meet both; the medians over all rounds, their quotient and the spread are printed. The figures say nothing
//! about another machine.

use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use memmap2::MmapMut;
use ummunotify::client::Notifier;
use ummunotify::layer::LayerChoice;
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
    /// Only in the process that has the device.
    device_only: bool,
    run: fn(&mut Bench),
}

const WORKS: &[Work] = &[
    Work {
        name: "getppid",
        what: "an unrelated system call",
        batch: 20_000,
        device_only: false,
        run: getppid,
    },
    Work {
        name: "map",
        what: "plain mmap of 4 KiB, munmap included",
        batch: 500,
        device_only: false,
        run: map,
    },
    Work {
        name: "miss",
        what: "mmap, touch, munmap of 4 KiB that no region covers",
        batch: 500,
        device_only: false,
        run: touch,
    },
    Work { name: "hit", what: "the same where a region is hit", batch: 300, device_only: false, run: hit },
    Work {
        name: "counter",
        what: "the check of the generation counter",
        batch: 1_000_000,
        device_only: true,
        run: counter,
    },
    Work {
        name: "register",
        what: "register and unregister a region",
        batch: 20_000,
        device_only: true,
        run: register,
    },
];

struct Bench {
    notifier: Option<Notifier>,
}

fn getppid(_: &mut Bench) {
    black_box(std::os::unix::process::parent_id());
}

fn map(_: &mut Bench) {
    drop(black_box(MmapMut::map_anon(4096)));
}

fn touch(_: &mut Bench) {
    if let Ok(mut page) = MmapMut::map_anon(4096) {
        page[0] = 1;
        black_box(&page);
    }
}

fn hit(bench: &mut Bench) {
    let Ok(mut page) = MmapMut::map_anon(4096) else { return };
    page[0] = 1;
    let start = page.as_ptr() as u64;
    if let Some(notifier) = &bench.notifier {
        let _ = notifier.register(PageRange::new(start, start + 4096), 1);
    }
    drop(black_box(page));
    if let Some(notifier) = &bench.notifier {
        let _ = notifier.unregister(1);
    }
}

fn counter(bench: &mut Bench) {
    if let Some(notifier) = &bench.notifier {
        black_box(notifier.counter().generation());
    }
}

fn register(bench: &mut Bench) {
    if let Some(notifier) = &bench.notifier {
        let _ = notifier.register(PageRange::new(4096, 8192), 2);
        let _ = notifier.unregister(2);
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
        writeln!(self.ask, "{}", work.name)?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        line.trim().parse().with_context(|| format!("the worker ended while it measured {}", work.name))
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
        None => [LayerChoice::Notify, LayerChoice::Trace].into_iter().try_for_each(compare),
    }
}

/// Answers until the parent closes the pipe.
fn serve(notifier: Option<Notifier>) -> Result<()> {
    let mut bench = Bench { notifier };
    for line in std::io::stdin().lines() {
        let name = line?;
        let work = WORKS.iter().find(|w| w.name == name).context("no such work")?;
        let start = Instant::now();
        for _ in 0..work.batch {
            (work.run)(&mut bench);
        }
        println!("{}", start.elapsed().as_nanos() as f64 / f64::from(work.batch));
    }
    Ok(())
}

fn compare(layer: LayerChoice) -> Result<()> {
    let this = std::env::current_exe()?;
    let emulator: PathBuf = this.with_file_name("ummunotify");
    ensure!(emulator.exists(), "{} is missing; build the workspace first", emulator.display());
    let mut native = Command::new(&this);
    native.arg("--worker");
    let mut emulated = Command::new(&emulator);
    emulated.args(["run", "--backend", "emulated", "--trap", layer.name(), "--"]);
    emulated.arg(&this).arg("--device-worker");
    let mut native = Worker::start(native)?;
    let mut emulated = Worker::start(emulated)?;

    println!("layer {layer}: {ROUNDS} rounds in turns, medians, ns a repetition (least to most)");
    for work in WORKS {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            if !work.device_only {
                theirs.push(native.measure(work)?);
            }
            ours.push(emulated.measure(work)?);
            // A pause lets another process have its turn between rounds rather than within one.
            std::thread::sleep(Duration::from_millis(2));
        }
        let ours = Spread::of(ours);
        print!("{:<9} {:<52} {}", work.name, work.what, ours.text());
        if work.device_only {
            println!();
        } else {
            let theirs = Spread::of(theirs);
            println!("   native {}   ratio {:.2}", theirs.text(), ours.median / theirs.median);
        }
    }
    native.finish()?;
    emulated.finish()
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
