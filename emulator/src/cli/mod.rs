//! The command line.

mod attach;
mod bench;
mod command;
mod demo;
mod doctor;
mod enclosure;
mod probe;
mod run;
mod supervise;
mod switch;
mod trial;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use ummunotify::backend::Choice;
use ummunotify::switch::Place;
use ummunotify_abi::config::SUPERVISE_COMMAND;

/// Bad use of the command line.
const EXIT_USAGE: i32 = 2;

const EXAMPLES: &str = "\
Examples:
  ummunotify demo                     see the accident that this device prevents, step by step
  ummunotify doctor                   what this host allows, and what would be missed
  ummunotify run -- ./client          run a program that opens /dev/ummunotify
  ummunotify run --stats -- mpirun -n 1 ./app
  ummunotify run --log debug --log-file /tmp/u.log -- ./client
  ummunotify bench --html report.html what interception costs here
  ummunotify switch 4711 kmod         the kernel module records for process 4711 from now on
  ummunotify attach 4711              process 4711, which runs, finds the device from now on

A client opens /dev/ummunotify, registers address ranges, and learns from a counter in its own memory, before \
munmap returns, that one of them became stale. See README.md for a C client of thirty lines.";

/// The /dev/ummunotify device in user space: tells a program which of its registered memory was unmapped.
#[derive(Parser, Debug)]
#[command(name = "ummunotify", version, after_help = EXAMPLES, disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run a program that finds the device at /dev/ummunotify
    Run(RunArguments),
    /// Show the stale-registration accident, first without and then with the device
    Demo(DemoArguments),
    /// Try what this host allows, layer by layer, and say what is lost
    Doctor(DoctorArguments),
    /// Measure what interception costs on this machine, backends and layers against each other
    Bench(BenchArguments),
    /// Move a running program's contexts to the kernel module, or back to the emulator
    Switch(SwitchArguments),
    /// Give a process that runs already the device, without restarting it
    Attach(AttachArguments),
    /// Take the device from a process that was attached to
    Detach(DetachArguments),
}

const RUN_HELP: &str = "\
The program runs in this process: its pid, terminal, signals and exit code are its own. Until it opens the device \
it pays nothing. A static program can't be preloaded into: a filter is put around it from the beginning, and each \
open of a file costs it some 10 microseconds.

Exit code: the program's own; 127 if there is no such program, 126 if it can't be executed, 125 if the emulator \
can't work here, 2 for bad use.";

/// Options of `run`.
#[derive(Args, Debug, Default)]
#[command(after_help = RUN_HELP, override_usage = "ummunotify run [OPTIONS] [--] COMMAND [ARGUMENTS]...")]
struct RunArguments {
    /// auto (the kernel module if it is loaded, else the emulator), kmod or emulated
    #[arg(long, value_name = "BACKEND")]
    backend: Option<Choice>,
    /// Layers that trap memory operations, separated by commas: auto (notify, with inline where that can be had, or trace if
    /// notify can't; and fault once the program uses io_uring), notify (seccomp) or trace (ptrace); fault: userfaultfd on
    /// what is registered, beside them or alone; inline, with notify: libc's own calls are looked at in the process and
    /// trapped only if need be
    #[arg(long, value_name = "LAYERS")]
    trap: Option<String>,
    /// What is done when the program sets up a ring: watch, or deny (io_uring_setup answers EPERM) [default: watch]
    #[arg(long, value_name = "WHAT")]
    io_uring: Option<String>,
    /// How much the supervisor logs [default: warn]
    #[arg(long, value_name = "LEVEL")]
    log: Option<LogLevel>,
    /// Where the log goes [default: standard error]
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
    /// Print statistics when a process that opened the device ends (where the log goes)
    #[arg(long)]
    stats: bool,
    /// The preloaded library starts a static program so, in place of one of this name: as well as it goes
    #[arg(long, hide = true, value_name = "NAME")]
    instead_of: Option<OsString>,
    /// The program and its arguments
    #[arg(value_name = "COMMAND", trailing_var_arg = true)]
    command: Vec<OsString>,
}

const SWITCH_HELP: &str = "\
Moves every context that the process opened emulated. It keeps its descriptor, its counter and its regions; \
everything is reported as invalid once or twice, and nothing is missed. The process takes part: it opens the kernel \
module's device at its next call on the context. A context that was opened on that device itself never switches.

For the process's own user and root. Exit code: 0 if all its contexts are there now, 1 if not (the reason is said), \
2 for bad use.";

/// Options of `switch`.
#[derive(Args, Clone, Copy, Debug)]
#[command(after_help = SWITCH_HELP)]
struct SwitchArguments {
    /// The process
    #[arg(value_name = "PID")]
    pid: u32,
    /// kmod (the kernel module) or emulated
    #[arg(value_name = "BACKEND")]
    backend: Place,
    /// Seconds to wait for the process to take part
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(..=3600))]
    deadline: u64,
    /// Move that many times, there and back in turns, for tests
    #[arg(long, hide = true, default_value_t = 1)]
    times: u64,
}

const ATTACH_HELP: &str = "\
One thread of the process is stopped for about a millisecond, and puts a seccomp filter over all of them. From then on \
the process, whether dynamic or static, opens /dev/ummunotify as a static program under `run` does, at the same price, \
from the attach on: each open of a file, for one, costs some 10 microseconds more.

A filter can't be removed, and without privileges no_new_privs must be set for it: both are said before it is done. \
`detach` parks the filter; attaching again uses it again. A call of the stopped thread that signal(7) lists as \
interrupted by stops (epoll_wait, sockets with a timeout) may end with EINTR.

For the process's own user, where Yama lets that one trace it, and root. Exit code: 0 if it is attached to now, 1 if not \
(the reason is said, and it goes on as before), 2 for bad use.";

/// Options of `attach`.
#[derive(Args, Debug)]
#[command(after_help = ATTACH_HELP)]
struct AttachArguments {
    /// The process
    #[arg(value_name = "PID")]
    pid: u32,
    /// How much its supervisor logs [default: warn]
    #[arg(long, value_name = "LEVEL", requires = "log_file")]
    log: Option<LogLevel>,
    /// Where the log goes [default: nowhere]
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
    /// Print statistics when the process closes the device (where the log goes)
    #[arg(long, requires = "log_file")]
    stats: bool,
    /// Try also where the process has a seccomp filter of its own, which may kill it for that
    #[arg(long)]
    despite_filter: bool,
}

const DETACH_HELP: &str = "\
What the process has open of the device reports everything as invalid, and then fails with ENODEV, as does each further \
call on it: it can't take anything for valid that nobody watches. The filter stays, parked, until the process and what it \
started have ended: its calls that were trapped still are, and are let go at once.

For whoever may attach. Exit code: 0 if it is detached from now, 1 if not (the reason is said), 2 for bad use.";

/// Options of `detach`.
#[derive(Args, Debug)]
#[command(after_help = DETACH_HELP)]
struct DetachArguments {
    /// The process
    #[arg(value_name = "PID")]
    pid: u32,
}

/// Options of `demo`.
#[derive(Args, Debug)]
struct DemoArguments {
    /// Wait for Enter between the steps
    #[arg(long)]
    step: bool,
    /// Set when the demonstration runs under its own shim
    #[arg(long, hide = true)]
    inside: bool,
}

const BENCH_HELP: &str = "\
One process for each contender works in turns with the others: native (no device), kmod (the kernel module, where it is \
loaded), the emulator with a set of layers each, and static (what a static program pays that doesn't open the device). \
Printed are medians over the rounds and their quartiles, and ratios to native's figure of the same round. A quiet \
machine gives a small spread; a wide one says that the figures mean little.

  ummunotify bench --json report.json --html report.html
  ummunotify bench --against notify --against inline,notify --work munmap --work hit --rounds 101
  ummunotify bench --one-processor --work thread --work exec     a supervisor that needs no other processor

Exit code: 0, 1 if something couldn't be measured, 2 for bad use.";

/// Options of `bench`.
#[derive(Args, Debug)]
#[command(after_help = BENCH_HELP)]
struct BenchArguments {
    /// What to compare with native, each by a --against: kmod, static, or layers as `run --trap` takes them
    /// [default: all of them that can be had here]
    #[arg(long, value_name = "CONTENDER")]
    against: Vec<String>,
    /// Compare also a process with that library preloaded, under that name: other interception
    #[arg(long, value_name = "NAME=LIBRARY")]
    peer: Vec<String>,
    /// What to measure, each by a --work [default: everything]
    #[arg(long, value_name = "NAME")]
    work: Vec<String>,
    /// Regions elsewhere, where that is varied, each by a --regions [default: 0, 64, 1000, 1000000]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    regions: Vec<u64>,
    /// Keep everything on one processor, supervisors too
    #[arg(long)]
    one_processor: bool,
    /// How often each is measured
    #[arg(long, value_name = "NUMBER", default_value_t = 15, value_parser = rounds)]
    rounds: usize,
    /// Write all figures there
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with plots there, for any browser, without a network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Is one of the processes that work
    #[arg(long, hide = true)]
    worker: Option<BenchWorker>,
}

/// One of the processes of `bench`.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum BenchWorker {
    Plain,
    Device,
}

/// A number of rounds.
fn rounds(text: &str) -> Result<usize, String> {
    let fits = |n: &usize| (3..=10_001).contains(n);
    text.parse().ok().filter(fits).ok_or_else(|| "a number from 3 to 10001".to_owned())
}

/// Options of `doctor`.
#[derive(Args, Debug)]
struct DoctorArguments {
    /// Print only what `run` would use here, as a JSON object for scripts
    #[arg(long, conflicts_with = "coverage")]
    json: bool,
    /// Only print what is seen, for scripts: key, exact|covered|unseen|beyond and operation, separated by tabs
    #[arg(long)]
    coverage: bool,
    /// With --coverage: the layers that trap, separated by commas [default: all]
    #[arg(long, value_name = "LAYERS", requires = "coverage")]
    trap: Option<String>,
}

/// How much is logged.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
}

impl LogLevel {
    const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }
}

/// Runs the command line; returns the exit code.
pub(crate) fn main() -> i32 {
    // The shim starts the supervisor: no need to build the parser for that.
    if std::env::args_os().nth(1).is_some_and(|a| a == SUPERVISE_COMMAND) {
        return supervise::main();
    }
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Nobody is left to tell if that can't be printed.
            let _ = error.print();
            return error.exit_code();
        }
    };
    let answer = match arguments.command {
        Command::Run(options) => run::main(&options),
        Command::Demo(options) => demo::main(&options),
        Command::Bench(options) => bench::main(&options),
        Command::Doctor(options) => doctor::main(&options),
        Command::Switch(options) => switch::main(&options),
        Command::Attach(options) => attach::main(&options),
        Command::Detach(options) => attach::detach(&options),
    };
    answer.unwrap_or_else(|failure| {
        complain(&format!("{:#}", failure.error));
        failure.code
    })
}

/// An error and the exit code that goes with it.
#[derive(Debug)]
struct Failure {
    error: anyhow::Error,
    code: i32,
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { error: error.into(), code: 1 }
    }
}

impl Failure {
    fn new(code: i32, message: impl Into<String>) -> Self {
        Self { error: anyhow::Error::msg(message.into()), code }
    }
}

/// Says something to the user, as this program.
fn complain(message: &str) {
    // Standard error may be closed or full; then there is no way to say it.
    let _ = writeln!(std::io::stderr(), "ummunotify: {message}");
}
