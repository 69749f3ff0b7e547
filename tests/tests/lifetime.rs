//! What is left when somebody dies, and what is paid before anybody lives.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};
use ummunotify_tests::{Account, Client, Mode, Running, Stage, say, skip};

/// Nothing may hang: what takes longer than this does.
const BOUND: Duration = Duration::from_secs(20);

/// Waits until `done` says so.
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + BOUND;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: not after {BOUND:?}");
        sleep(Duration::from_millis(10));
    }
}

/// Kills the supervisor of a client that runs on this stage.
fn kill_supervisor(stage: &Stage, client: &Running<'_>) {
    let supervisors: Vec<i32> = stage.supervisors().into_iter().filter(|pid| *pid != client.pid()).collect();
    assert!(!supervisors.is_empty(), "no supervisor is there");
    for pid in supervisors {
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("the supervisor can be killed");
    }
    wait_until("the supervisor's death", || stage.supervisors().iter().all(|pid| *pid == client.pid()));
}

/// The device's failure is said once by "everything is invalid", and then by EIO. Trapped calls answer ENOSYS,
/// and nothing hangs.
#[test]
fn the_death_of_the_supervisor_hangs_its_client() {
    let stage = Stage::new();
    let survivor = stage.client(&Client::program("survivor", &["programs/survivor.c"]));
    // A call that hits nothing isn't trapped by inline.
    for (layers, munmap) in [("notify", "munmap after: ENOSYS"), ("inline,notify", "munmap after: ok")] {
        for (account, mode) in Account::available().into_iter().flat_map(|a| Mode::EMULATED.map(|m| (a, m))) {
            let program = stage.program(mode, account, &survivor).layers(layers);
            let mut client = program.limit(BOUND).spawn();
            client.wait_for_line("ready");
            kill_supervisor(&stage, &client);
            client.write_line("go on");
            let outcome = client.finish();
            outcome.assert_success();
            for line in [
                "munmap before: ok",
                munmap,
                "mprotect after: ENOSYS",
                "getppid after: ok",
                "first: read 1 2 3 LAST",
                "counter moved: yes",
                "second: read EIO",
                "third: read EIO",
            ] {
                assert!(outcome.stdout.lines().any(|said| said == line), "{layers}, no '{line}': {outcome}");
            }
            assert!(!outcome.stdout.contains("open after: ok"), "a device without a supervisor: {outcome}");
        }
    }
}

#[test]
fn the_death_of_the_supervisor_hangs_a_blocking_read() {
    let stage = Stage::new();
    let survivor = stage.client(&Client::program("survivor", &["programs/survivor.c"]));
    for account in Account::available() {
        for mode in Mode::EMULATED {
            let mut client = stage.program(mode, account, &survivor).arg("blocking").limit(BOUND).spawn();
            client.wait_for_line("ready");
            // Time to fall asleep in; a client that doesn't yet sleep finds the same.
            sleep(Duration::from_millis(200));
            kill_supervisor(&stage, &client);
            let outcome = client.finish();
            outcome.assert_success();
            assert!(outcome.stdout.contains("first: read 1 2 3 LAST\n"), "{outcome}");
            assert!(outcome.stdout.contains("second: read EIO\n"), "{outcome}");
        }
    }
}

/// Abstract unix sockets of the emulator, and what lies in the folder of POSIX shared memory.
fn traces() -> BTreeSet<String> {
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let sockets = sockets
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .filter(|name| name.starts_with("@ummunotify-"));
    let shared = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let shared = shared.map(|entry| entry.file_name().to_string_lossy().into_owned());
    sockets.map(str::to_owned).chain(shared.filter(|name| name.contains("ummunotify"))).collect()
}

/// The client is killed; its child, under the inherited filter, goes on working; with that child's end the last
/// process, socket and file of the emulator is gone.
#[test]
fn a_killed_client_leaves_something_or_takes_its_children_along() {
    let stage = Stage::new();
    let parent = stage.client(&Client::program("parent", &["programs/parent.c"]));
    for account in Account::available() {
        for mode in Mode::EMULATED {
            let before = traces();
            let mut client = stage.program(mode, account, &parent).limit(BOUND).spawn();
            client.wait_for_line("ready");
            let meanwhile = traces();
            client.signal(Signal::SIGKILL);
            let result = stage.work().join("result");
            // The shell holds the client's output, so the client's end isn't the end of its pipes.
            let outcome = client.finish();
            assert_eq!(outcome.signal(), Some(Signal::SIGKILL as i32), "{outcome}");
            wait_until("the child's work", || result.exists());
            assert_eq!(fs::read_to_string(&result).expect("it was just there"), "1\n");
            fs::remove_file(&result).expect("the work folder is ours");
            stage.assert_nothing_left();
            let ours: BTreeSet<String> = meanwhile.difference(&before).cloned().collect();
            wait_until("the end of sockets and shared memory", || traces().is_disjoint(&ours));
        }
    }
}

/// Closing the device while its counter is mapped, and ending right after, leaves nothing either.
#[test]
fn a_client_that_ends_with_its_counter_mapped_leaves_a_supervisor() {
    let stage = Stage::new();
    let leaver = stage.client(&Client::program("leaver", &["programs/leaver.c"]));
    for account in Account::available() {
        for mode in Mode::EMULATED {
            stage.program(mode, account, &leaver).arg("200").run().assert_success();
            stage.assert_nothing_left();
        }
    }
}

/// A process that has had the device, and one whose last descriptor is closed, are watched as any other.
#[test]
fn a_while_without_the_device_misses_invalidations_or_leaves_a_supervisor() {
    let stage = Stage::new();
    let idle = Client::program("idle", &["programs/idle.c"]);
    let (fixed, idle) = (stage.client(&idle.clone().fixed()), stage.client(&idle));
    for account in Account::available() {
        for layers in ["notify", "inline,notify", "trace"] {
            for mode in Mode::EMULATED {
                for way in ["heap", "hidden", "again"] {
                    let program = stage.program(mode, account, &idle).layers(layers).arg(way).limit(BOUND);
                    program.run().assert_success();
                }
                stage.assert_nothing_left();
            }
        }
        for way in ["heap", "hidden", "again"] {
            let program = stage.program(Mode::Run, account, &fixed).layers("notify").arg(way).limit(BOUND);
            program.run().assert_success();
        }
        stage.assert_nothing_left();
    }
}

/// The end of a process's first thread isn't the end of the process.
#[test]
fn a_process_without_its_first_thread_misses_invalidations() {
    let stage = Stage::new();
    let headless = stage.client(&Client::program("headless", &["programs/headless.c"]));
    for account in Account::available() {
        for mode in Mode::EMULATED {
            let outcome = stage.program(mode, account, &headless).limit(BOUND).run();
            outcome.assert_success();
            assert_eq!(outcome.stdout, "first 1 second 1\nfirst after close 2\n", "{outcome}");
        }
    }
}

/// How often a program makes each system call.
type Calls = BTreeMap<String, i64>;

/// System calls of a program with all its processes, as strace sees them.
fn system_calls(stage: &Stage, library: &Path, program: &Path, args: &[&str]) -> Calls {
    let strace = stage.program(Mode::Native, Account::Ordinary, "strace");
    let strace =
        strace.args(["-f", "-qq", "-o", "trace", "-E"]).arg(format!("LD_PRELOAD={}", library.display()));
    let outcome = strace.arg(program).args(args).run();
    outcome.assert_success();
    // A library that the loader can't use costs nothing, and says so here.
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("done\n", ""), "{outcome}");
    let path = stage.work().join("trace");
    let trace = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    fs::remove_file(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut calls = Calls::new();
    for line in trace.lines() {
        // "12345 name(...) = result"; a call that another process interrupts goes on in a line of its own.
        let Some(call) = line.split_once(' ').map(|(_, call)| call.trim_start()) else { continue };
        if call.starts_with("<...") || call.starts_with("+++") || call.starts_with("---") {
            continue;
        }
        if let Some((name, _)) = call.split_once('(') {
            *calls.entry(name.to_owned()).or_default() += 1;
        }
    }
    calls
}

/// What `more` has more than `less`, by name.
fn excess(more: &Calls, less: &Calls) -> Calls {
    let names = more.keys().chain(less.keys()).cloned().collect::<BTreeSet<_>>();
    let count = |calls: &Calls, name: &str| calls.get(name).copied().unwrap_or(0);
    let differences = names.into_iter().map(|name| (count(more, &name) - count(less, &name), name));
    differences
        .filter(|(difference, _)| *difference != 0)
        .map(|(difference, name)| (name, difference))
        .collect()
}

/// The program does everything that the library wraps, but for opening the device: it may notice the library by
/// one system call beyond what it takes to load any library.
#[test]
fn a_program_that_never_opens_the_device_pays_for_it() {
    if !Path::new("/usr/bin/strace").exists() {
        return skip("the cost before the first open", "strace isn't installed (Debian package strace)");
    }
    /// What the loader does for a library and for what it depends on.
    const LOADING: [&str; 8] =
        ["openat", "read", "pread64", "newfstatat", "fstat", "mmap", "mprotect", "close"];
    let stage = Stage::new();
    let ordinary = stage.client(&Client::program("ordinary", &["programs/ordinary.c"]));
    let trivial = stage.client(&Client::library("trivial", &["programs/trivial.c"]));

    let loading = excess(
        &system_calls(&stage, &stage.shim(), &ordinary, &["idle"]),
        &system_calls(&stage, &trivial, &ordinary, &["idle"]),
    );
    let both = excess(
        &system_calls(&stage, &stage.shim(), &ordinary, &[]),
        &system_calls(&stage, &trivial, &ordinary, &[]),
    );
    let working = excess(&both, &loading);
    say(&format!("beyond loading a library that does nothing: {loading:?}; beyond that in use: {working:?}"));
    let at_start: i64 =
        loading.iter().filter(|(name, _)| !LOADING.contains(&name.as_str())).map(|(_, n)| n).sum();
    let in_use: i64 = working.values().sum();
    assert!(
        at_start + in_use <= 1,
        "more than one system call: {loading:?} at the start, {working:?} in use"
    );
}
