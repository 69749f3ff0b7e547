//! Real programs behave with an open device as they do without: same output, exit code and descriptor numbers.
//!
//! A preloaded library, the activator, opens the device in every process of the program. The comparison is a run
//! without the emulator in which the same library opens /dev/null instead.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ummunotify_abi::config::ENV_TRAP;
use ummunotify_tests::{Account, Client, Mode, Outcome, Program, Stage, say, skip};

const LIMIT: Duration = Duration::from_secs(120);

/// The device, and what stands for it in the run without the emulator.
const DEVICE: &str = "/dev/ummunotify";
const NO_DEVICE: &str = "/dev/null";

/// The ways in which each program is run; some also in others.
const WAYS: [(Mode, &str); 3] =
    [(Mode::Run, "notify"), (Mode::Preload, "notify"), (Mode::Run, "inline,notify")];

/// A program that is run in every mode.
struct Comparison<'a> {
    stage: &'a Stage,
    program: PathBuf,
    args: Vec<String>,
    /// Preloaded behind the activator.
    preload: Option<PathBuf>,
    env: Vec<(&'static str, &'static str)>,
    /// Modes and layers to compare with.
    ways: Vec<(Mode, &'static str)>,
    /// Made by the program in the work folder: compared as well, and removed between runs.
    files: Vec<&'static str>,
    /// What differs from run to run natively, such as process numbers, is taken out of the output.
    normalise: fn(&str) -> String,
}

impl<'a> Comparison<'a> {
    fn new(stage: &'a Stage, program: impl AsRef<Path>, args: &[&str]) -> Self {
        Self {
            stage,
            program: program.as_ref().to_owned(),
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            preload: None,
            env: Vec::new(),
            ways: WAYS.to_vec(),
            files: Vec::new(),
            normalise: str::to_owned,
        }
    }

    /// Compares with the trace layer, too.
    fn traced(mut self) -> Self {
        self.ways.push((Mode::Run, "trace"));
        self
    }

    fn program(&self, mode: Mode, layers: &str, account: Account) -> Program<'_> {
        let activator = self.stage.client(&Client::library("activator", &["programs/activator.c"]));
        let device = if mode == Mode::Native { NO_DEVICE } else { DEVICE };
        let mut program = self
            .stage
            .program(mode, account, &self.program)
            .args(&self.args)
            .preload(activator)
            .env("ACTIVATOR_PATH", device)
            .env("ACTIVATOR_LOG", self.log())
            .env("LC_ALL", "C")
            .layers(layers)
            .limit(LIMIT);
        if let Some(library) = &self.preload {
            program = program.preload(library);
        }
        for (name, value) in &self.env {
            program = program.env(name, value);
        }
        program
    }

    fn log(&self) -> PathBuf {
        self.stage.work().join("activator.log")
    }

    /// One run: how it ended, the files it made, and how many processes opened what they had to open.
    fn run(&self, mode: Mode, layers: &str, account: Account) -> (Outcome, Vec<Vec<u8>>, usize) {
        let outcome = self.program(mode, layers, account).run();
        let files = self.files.iter().map(|name| {
            let path = self.stage.work().join(name);
            let content = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}: {outcome}", path.display()));
            fs::remove_file(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            content
        });
        let files = files.collect();
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let _ = fs::remove_file(self.log());
        let device = if mode == Mode::Native { NO_DEVICE } else { DEVICE };
        (outcome, files, log.lines().filter(|line| line.starts_with(device)).count())
    }

    /// Runs natively and in both emulated modes, and insists that they can't be told apart.
    fn check(&self, account: Account) -> Outcome {
        let (native, native_files, native_opens) = self.run(Mode::Native, "", account);
        assert!(native_opens > 0, "the activator wasn't there: {native}");
        assert!(!native.timed_out, "{native}");
        for &(mode, layers) in &self.ways {
            let (emulated, files, opens) = self.run(mode, layers, account);
            assert!(!emulated.timed_out && !emulated.output_held, "{emulated}");
            assert!(opens > 0, "the device was never opened: {emulated}");
            assert_eq!(opens, native_opens, "not every process opened the device: {emulated}");
            assert_eq!(emulated.status, native.status, "{emulated}\nnative: {native}");
            let normalise = self.normalise;
            assert_eq!(normalise(&emulated.stdout), normalise(&native.stdout), "{emulated}");
            assert_eq!(normalise(&emulated.stderr), normalise(&native.stderr), "{emulated}");
            for ((name, emulated), native) in self.files.iter().zip(&files).zip(&native_files) {
                assert!(emulated == native, "{name} differs under {layers} {mode:?}");
            }
            say(&format!(
                "{}: {mode:?} {layers} {account:?}, {opens} processes with the device, {:.1?} (native {:.1?})",
                self.program.display(),
                emulated.elapsed,
                native.elapsed
            ));
        }
        native
    }

    fn check_all(&self) {
        for account in Account::available() {
            self.check(account);
        }
    }
}

/// The file, or `None` and a word about what wasn't tested.
fn installed(path: &str, package: &str) -> Option<PathBuf> {
    let found = Path::new(path);
    if !found.exists() {
        skip(path, &format!("it isn't installed (Debian package {package})"));
        return None;
    }
    Some(found.to_owned())
}

#[test]
fn python_with_large_arrays_differs() {
    let Some(python) = installed("/usr/bin/python3", "python3") else { return };
    let stage = Stage::new();
    let script = r#"
import array, ctypes, hashlib, mmap, os, subprocess, sys, threading, zlib
print("descriptors", os.open("/dev/null", os.O_RDONLY), *os.pipe(), os.dup(1))
total = 0
for size in (1 << 16, 1 << 20, 1 << 24, 1 << 26):
    for _ in range(4):
        a = bytearray(size)
        a[::4096] = b"x" * (size // 4096)
        b = array.array("Q", range(min(size // 64, 1 << 17)))
        c = (ctypes.c_ubyte * size)()
        ctypes.memset(c, 7, size)
        total = zlib.crc32(a, total)
        total = zlib.crc32(b.tobytes(), total)
        total = zlib.crc32(bytes(c), total)
        del a, b, c
print("sum", total)
grown = bytearray()
for i in range(64):
    grown += bytes([i]) * 100000
print(hashlib.sha256(grown).hexdigest())
m = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
m.resize(1 << 21)
m[-1] = 5
print(m[-1])
m.close()
results = [0] * 4
def work(n):
    for i in range(20):
        results[n] = zlib.crc32(bytearray(os.urandom(1)) * (1 << 20)) and results[n] + 1
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(results)
pid = os.fork()
if pid == 0:
    x = bytearray(1 << 24)
    os._exit(13)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(subprocess.run(["/bin/sh", "-c", "echo from a child; exit 4"], stdout=subprocess.PIPE))
try:
    os.wait()
except ChildProcessError as e:
    print("no child left:", e)
print("descriptors", os.open("/dev/null", os.O_RDONLY))
print("open below 100:", sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) < 100))
print("open from 100 on:", sum(int(fd) >= 100 for fd in os.listdir("/proc/self/fd")) <= 1)
sys.exit(3)
"#;
    fs::write(stage.work().join("arrays.py"), script).expect("the work folder takes a file");
    let comparison = Comparison::new(&stage, python, &["arrays.py"]).traced();
    for account in Account::available() {
        let native = comparison.check(account);
        assert_eq!(native.code(), Some(3), "{native}");
    }
}

#[test]
fn gcc_compiles_something_else() {
    let Some(gcc) = installed("/usr/bin/gcc", "gcc") else { return };
    let stage = Stage::new();
    let mut source = String::from("#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n");
    for i in 0..300 {
        source += &format!(
            "static int f{i}(int x) {{ char b[64]; snprintf(b, sizeof b, \"%d\", x * {i}); return atoi(b) + (int)strlen(b); }}\n"
        );
    }
    source += "int main(void) { int unused_on_purpose; int s = 0;\n";
    for i in 0..300 {
        source += &format!("s += f{i}(s & 255);\n");
    }
    source += "printf(\"%d\\n\", s); return s & 63; }\n";
    fs::write(stage.work().join("program.c"), source).expect("the work folder takes a file");
    let mut comparison =
        Comparison::new(&stage, gcc, &["-Wall", "-O2", "-o", "program", "program.c"]).traced();
    comparison.files = vec!["program"];
    for account in Account::available() {
        let native = comparison.check(account);
        assert!(
            native.stderr.contains("unused_on_purpose"),
            "the warning is part of the comparison: {native}"
        );
    }
}

#[test]
fn a_program_under_jemalloc_differs() {
    let Some(jemalloc) = installed("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "libjemalloc2") else {
        return;
    };
    let stage = Stage::new();
    let allocate = stage.client(&Client::program("allocate", &["programs/allocate.c"]));
    let mut comparison = Comparison::new(&stage, allocate, &[]);
    comparison.preload = Some(jemalloc);
    // Pages are given back at once, so that its munmap and madvise run all the time.
    comparison.env = vec![("MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0,retain:false")];
    comparison.check_all();
}

#[test]
fn a_program_under_tcmalloc_differs() {
    let path = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4";
    let Some(tcmalloc) = installed(path, "libtcmalloc-minimal4") else { return };
    let stage = Stage::new();
    let allocate = stage.client(&Client::program("allocate", &["programs/allocate.c"]));
    let mut comparison = Comparison::new(&stage, allocate, &[]);
    comparison.preload = Some(tcmalloc);
    // As above: each span is given back, by madvise, and asked for again.
    comparison.env = vec![("TCMALLOC_RELEASE_RATE", "10000"), ("TCMALLOC_AGGRESSIVE_DECOMMIT", "1")];
    comparison.check_all();
}

#[test]
fn a_program_under_glibc_malloc_differs() {
    let stage = Stage::new();
    let allocate = stage.client(&Client::program("allocate", &["programs/allocate.c"]));
    let comparison = Comparison::new(&stage, allocate, &[]);
    for account in Account::available() {
        let native = comparison.check(account);
        assert_eq!(native.code(), Some(42), "{native}");
    }
}

#[test]
fn sort_of_a_large_file_differs() {
    let stage = Stage::new();
    let path = stage.work().join("unsorted");
    let file = fs::File::create(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut file = BufWriter::new(file);
    // 100 MB in lines of 100 bytes, from a fixed sequence.
    let mut state = 1u64;
    for _ in 0..1_000_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        writeln!(file, "{:016x}{:083}", state, state >> 40).expect("the disk holds 100 MB");
    }
    file.flush().expect("the disk holds 100 MB");
    drop(file);
    let args =
        ["--buffer-size=30M", "--parallel=2", "--temporary-directory=.", "--output=sorted", "unsorted"];
    let mut comparison = Comparison::new(&stage, "/usr/bin/sort", &args);
    comparison.files = vec!["sorted"];
    // The same file as another user would tell nothing new.
    comparison.check(*Account::available().last().expect("somebody runs the tests"));
}

#[test]
fn bash_pipelines_differ() {
    let Some(bash) = installed("/bin/bash", "bash") else { return };
    let stage = Stage::new();
    let script = r#"
seq 20000 | sort -r | grep 7 | awk '{ s += $1 } END { print s }'
false | true | (exit 3); echo "${PIPESTATUS[@]}"
diff <(seq 5) <(seq 6); echo "diff $?"
x=$(for i in 1 2 3; do echo "$i"; done | tr '\n' ,); echo "$x"
sleep 0.1 & sleep 0.05 & wait; echo "waited $?"
(sleep 0.1; exit 7) & wait $!; echo "job $?"
exec 7< /etc/passwd; ls -l /proc/self/fd | awk '{ print $9 }' | sort -n | tr '\n' ' '; echo
trap 'echo got USR1' USR1; kill -USR1 $$
head -c 3000000 /dev/zero | gzip -9 | gunzip | wc -c
yes | head -n 100000 | tail -n 1
nosuchcommand; echo "missing $?"
kill -9 $BASHPID
"#;
    fs::write(stage.work().join("pipelines.sh"), script).expect("the work folder takes a file");
    let mut comparison = Comparison::new(&stage, bash, &["pipelines.sh"]).traced();
    // "line 13: 12345 Killed" names no process that outlives it.
    comparison.normalise = without_numbers_of_processes;
    for account in Account::available() {
        let native = comparison.check(account);
        assert_eq!(native.status.to_string(), "signal: 9 (SIGKILL)", "{native}");
    }
}

#[test]
fn a_debugger_on_a_client_differs() {
    let Some(gdb) = installed("/usr/bin/gdb", "gdb") else { return };
    let stage = Stage::new();
    let client = stage.client(&Client::program("debugged", &["programs/debugged.c"]));
    let name = client.to_str().expect("the stage's name is text").to_owned();
    let commands = [
        "set startup-with-shell off",
        "set disable-randomization off",
        "break reached",
        "run",
        "print value",
        "backtrace",
        "watch answer",
        "continue",
        "print answer",
        "delete",
        "catch syscall munmap",
        "continue",
        "delete",
        "continue",
    ];
    let mut args = vec!["-batch", "-nx"];
    for command in &commands {
        args.extend(["-ex", command]);
    }
    args.extend(["--args", &name]);
    let mut comparison = Comparison::new(&stage, gdb, &args);
    // It shows at which instruction a call was made: the library's own with the inline layer.
    comparison.ways.retain(|(_, layers)| !layers.contains("inline"));
    comparison.env = vec![("DEBUGINFOD_URLS", "")];
    comparison.normalise = without_numbers_of_processes;
    for account in Account::available() {
        let native = comparison.check(account);
        assert!(native.stdout.contains("exited with code 05"), "{native}");
    }
}

/// Takes out what differs from run to run: decimal numbers of three digits and more (ids begin at 300 when they begin anew), and addresses.
fn without_numbers_of_processes(text: &str) -> String {
    let mut out = String::new();
    let mut word = String::new();
    for c in text.chars().chain(['\n']) {
        if c.is_ascii_alphanumeric() {
            word.push(c);
            continue;
        }
        let number = word.len() >= 3 && word.chars().all(|c| c.is_ascii_digit());
        let address = word.starts_with("0x") && word.len() > 10;
        out.push_str(if number || address { "#" } else { &word });
        word.clear();
        out.push(c);
    }
    out
}

/// A client that waits for any child must see its own and never the supervisor.
#[test]
fn wait_sees_the_supervisor() {
    let stage = Stage::new();
    let waiter = stage.client(&Client::program("waiter", &["programs/waiter.c"]));
    for account in Account::available() {
        for mode in Mode::EMULATED {
            for role in ["plain", "reaper"] {
                for layer in ["notify", "trace"] {
                    let program = stage.program(mode, account, &waiter).env(ENV_TRAP, layer);
                    program.arg(role).run().assert_success();
                }
            }
        }
    }
}

/// As pid 1 of a pid namespace every orphan is its child. Where the /proc that it sees isn't its namespace's, the
/// emulator either copes or says what is missing.
#[test]
fn wait_sees_the_supervisor_as_pid_1() {
    if !Account::is_superuser() {
        return skip("a client that is pid 1", "a pid namespace takes privileges");
    }
    let stage = Stage::new();
    let waiter = stage.client(&Client::program("waiter", &["programs/waiter.c"]));
    for own_proc in [true, false] {
        let mut unshare = vec!["--pid", "--fork", "--kill-child"];
        if own_proc {
            unshare.push("--mount-proc");
        }
        let under_run =
            stage.program(Mode::Native, Account::Root, "unshare").args(&unshare).arg(stage.binary());
        let under_run = under_run.args(["run", "--"]).arg(&waiter);
        let preloaded = stage.program(Mode::Preload, Account::Root, "unshare").args(&unshare).arg(&waiter);
        for program in [under_run, preloaded] {
            let outcome = program.run();
            if !own_proc && outcome.code() == Some(1) && outcome.stderr.contains("/proc") {
                skip("a client that is pid 1 and sees another namespace's /proc", outcome.stderr.trim_end());
                continue;
            }
            outcome.assert_success();
            assert!(outcome.stdout.contains("pid 1: yes"), "{outcome}");
        }
    }
}

/// By notify a handler without SA_RESTART can end a trapped call with EINTR in the moment before the supervisor
/// looks at it (README); the tracer's stops can't be interrupted.
#[test]
fn job_control_or_a_storm_of_signals_is_disturbed_by_trace() {
    let stage = Stage::new();
    let jobs = stage.client(&Client::program("jobs", &["programs/jobs.c"]));
    for account in Account::available() {
        for mode in Mode::EMULATED {
            for who in ["own", "inherited"] {
                let outcome = stage.program(mode, account, &jobs).env(ENV_TRAP, "trace").arg(who).run();
                outcome.assert_success();
                assert_eq!(outcome.stdout, "well\n", "{outcome}");
            }
        }
    }
}

/// Only one tracer is allowed at a time. Who has asked for this layer hears that; by itself it isn't chosen.
#[test]
fn a_debugger_keeps_trace_out_without_a_word() {
    let Some(strace) = installed("/usr/bin/strace", "strace") else { return };
    let stage = Stage::new();
    let client = stage.client(&Client::program("badly-used-open_once", &["badly_used/open_once.c"]));
    for (layer, code) in [("trace", 125), ("auto", 0)] {
        let outcome = stage
            .program(Mode::Native, Account::Ordinary, &strace)
            .args(["-f", "-o", "/dev/null"])
            .arg(stage.binary())
            .args(["run", "--trap", layer, "--"])
            .arg(&client)
            .run();
        assert_eq!(outcome.code(), Some(code), "{outcome}");
        assert_eq!(
            outcome.stderr.contains("a debugger or another tracer is attached"),
            code != 0,
            "{outcome}"
        );
    }
}

/// A filter of the client that wants a tracer isn't ours; a thread with one of its own takes no other.
#[test]
fn a_filter_of_the_client_is_in_the_way_of_trace() {
    let stage = Stage::new();
    let client = stage.client(&Client::program("own-filter", &["programs/own_filter.c"]));
    for account in Account::available() {
        for (whose, layer) in [("tracer", "trace"), ("thread", "trace"), ("thread", "auto")] {
            let program = stage.program(Mode::Run, account, &client).env(ENV_TRAP, layer);
            let outcome = program.arg(whose).run();
            outcome.assert_success();
            assert_eq!(outcome.stdout, "well\n", "{outcome}");
            // Every call is stopped only where it must be, and that is said.
            assert_eq!(outcome.stderr.contains("every system call"), whose == "thread", "{outcome}");
        }
    }
}
