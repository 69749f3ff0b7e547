//! Bad use and bad surroundings: each gives a short error that says what was tried, what failed, and what to do.
//! Nothing hangs and no process is left. And what holds for descriptors when the supervisor or a client dies.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use ummunotify_abi::config::{ENV_BACKEND, ENV_BINARY, ENV_LOG_FILE, ENV_TRAP};
use ummunotify_tests::{Account, Client, Mode, Outcome, Program, Stage, skip};

/// Bad use is answered at once.
const LIMIT: Duration = Duration::from_secs(20);

/// Exit code of `open_once` where the device couldn't be opened.
const NOT_OPENED: i32 = 3;

fn program(name: &str) -> Client {
    Client::program(&format!("badly-used-{name}"), &[&format!("badly_used/{name}.c")])
}

/// Without the emulator around it: `run` itself is what is tested.
fn ummunotify<'a>(stage: &'a Stage, account: Account, args: &[&str]) -> Program<'a> {
    // A PATH that every account may search: what can't be searched could hold the command.
    stage.program(Mode::Native, account, stage.binary()).args(args).env("PATH", "/usr/bin:/bin").limit(LIMIT)
}

/// A short error: on standard error, in a few lines, without a panic, with each of these words.
fn assert_complaint(outcome: &Outcome, code: i32, words: &[&str]) {
    assert_eq!(outcome.code(), Some(code), "exit code, expected {code}: {outcome}");
    assert_short(outcome);
    let said = outcome.stderr.to_lowercase();
    for word in words {
        assert!(said.contains(&word.to_lowercase()), "the error doesn't say `{word}`: {outcome}");
    }
}

fn assert_short(outcome: &Outcome) {
    assert!(!outcome.timed_out && !outcome.output_held, "{outcome}");
    let said = outcome.stderr.trim();
    assert!(!said.is_empty(), "nothing was said: {outcome}");
    assert!(said.lines().count() <= 10 && said.len() <= 1000, "not short: {outcome}");
    assert!(!said.contains("panicked") && !said.contains("RUST_BACKTRACE"), "a panic: {outcome}");
}

/// Writes a file with these permissions onto the stage.
fn write(stage: &Stage, name: &str, content: &[u8], mode: u32) -> PathBuf {
    let path = stage.work().join(name);
    fs::write(&path, content).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    permit(&path, mode);
    path
}

fn permit(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the stage's paths are text")
}

#[test]
fn run_without_a_command_says_so() {
    let stage = Stage::new();
    for args in [&["run"][..], &["run", "--"], &["run", "--stats"]] {
        let outcome = ummunotify(&stage, Account::Ordinary, args).run();
        assert_complaint(&outcome, 2, &["command", "ummunotify run -- "]);
    }
}

#[test]
fn unknown_words_are_named() {
    let stage = Stage::new();
    let rows: &[(&[&str], &[&str])] = &[
        (&["run", "--frobnicate", "--", "true"], &["--frobnicate", "--help"]),
        (&["--frobnicate"], &["--frobnicate", "--help"]),
        (&["frobnicate"], &["frobnicate", "--help"]),
        (&["run", "--backend", "frobnicate", "--", "true"], &["frobnicate", "auto", "kmod", "emulated"]),
        (&["run", "--backend"], &["--backend"]),
        (&["run", "--log", "frobnicate", "--", "true"], &["frobnicate", "debug"]),
        (
            &["run", "--trap", "frobnicate", "--", "true"],
            &["frobnicate", "inline", "notify", "trace", "auto"],
        ),
    ];
    for (args, words) in rows {
        let outcome = ummunotify(&stage, Account::Ordinary, args).run();
        assert_complaint(&outcome, 2, words);
    }
}

#[test]
fn missing_command_is_127() {
    let stage = Stage::new();
    for name in ["there-is-no-such-command", "/there/is/no/such/command", "./nor-this", ""] {
        let outcome = ummunotify(&stage, Account::Ordinary, &["run", "--", name]).run();
        assert_complaint(&outcome, 127, &[name, "path"]);
    }
}

#[test]
fn command_that_cannot_be_executed_is_126() {
    let stage = Stage::new();
    let plain = write(&stage, "plain", b"#!/bin/sh\n", 0o644);
    let script = write(&stage, "script", b"#!/there/is/no/such/interpreter\n", 0o755);
    let broken = write(&stage, "broken", b"\x7fELF and nothing else", 0o755);
    let folder = stage.work();
    let rows: [(&Path, &[&str]); 4] = [
        (&plain, &["plain", "permission denied", "chmod"]),
        (&script, &["script", "/there/is/no/such/interpreter"]),
        (&broken, &["broken"]),
        (&folder, &["work", "directory"]),
    ];
    for (path, words) in rows {
        let outcome = ummunotify(&stage, Account::Ordinary, &["run", "--", text(path)]).run();
        assert_complaint(&outcome, 126, words);
    }
}

/// The first 64 bytes of a program for a machine, which is enough to be recognised.
fn elf(class: u8, machine: u8) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    bytes[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1, 1]);
    bytes[16] = 2; // ET_EXEC
    bytes[18] = machine;
    bytes[20] = 1;
    bytes
}

#[test]
fn program_for_another_machine_is_refused_by_name() {
    const I386: u8 = 3;
    const X86_64: u8 = 62;
    const ARM64: u8 = 183;
    let stage = Stage::new();
    for (name, class, machine, words) in [
        ("i386", 1, I386, &["i386", "32-bit", "64-bit"][..]),
        ("x32", 1, X86_64, &["x32", "32-bit"]),
        ("arm64", 2, ARM64, &["arm64", "another machine"]),
    ] {
        let path = write(&stage, name, &elf(class, machine), 0o755);
        let outcome = ummunotify(&stage, Account::Ordinary, &["run", "--", text(&path)]).run();
        assert_complaint(&outcome, 126, words);
    }
}

#[test]
fn shim_that_is_missing_comes_from_the_binary() {
    let stage = Stage::new();
    let client = stage.client(&program("open_once"));
    fs::remove_file(stage.shim()).expect("the stage is ours");
    let outcome = stage.program(Mode::Run, Account::Ordinary, &client).limit(LIMIT).run();
    outcome.assert_success();
    assert!(outcome.stdout.contains("open: ok"), "{outcome}");
}

#[test]
fn shim_that_cannot_be_used_is_named() {
    let stage = Stage::new();
    let client = stage.client(&program("open_once"));
    let shim = stage.shim();
    let run = || ummunotify(&stage, Account::Ordinary, &["run", "--", text(&client)]).run();
    fs::write(&shim, b"no library").expect("the stage is ours");
    assert_complaint(&run(), 125, &[text(&shim), "ELF"]);
    fs::write(&shim, b"").expect("the stage is ours");
    assert_complaint(&run(), 125, &[text(&shim), "ELF"]);
    if Account::is_superuser() {
        // Root itself reads everything: only the ordinary user is refused.
        permit(&shim, 0o000);
        assert_complaint(&run(), 125, &[text(&shim), "permission denied", "readable"]);
    } else {
        skip("a shim that an ordinary user can't read", "the tests run as that user, who owns it");
    }
    fs::remove_file(&shim).expect("the stage is ours");
    fs::create_dir(&shim).expect("the stage is ours");
    assert_complaint(&run(), 125, &[text(&shim)]);
}

#[test]
fn preloaded_shim_without_its_binary_says_so() {
    let stage = Stage::new();
    let client = stage.client(&program("open_once"));
    let rows: [(&str, &[&str]); 3] = [
        ("/there/is/no/such/binary", &["/there/is/no/such/binary"]),
        (text(&stage.work()).to_owned().leak(), &["work"]),
        ("/bin/true", &["supervisor"]),
    ];
    for (binary, words) in rows {
        let outcome = stage
            .program(Mode::Preload, Account::Ordinary, &client)
            .env(ENV_BINARY, binary)
            .limit(LIMIT)
            .run();
        assert_complaint(&outcome, NOT_OPENED, words);
        assert_not_opened(&outcome, None);
        stage.assert_nothing_left();
    }
}

/// The client goes on, with the errno that it was to get, and without a child that it didn't make.
fn assert_not_opened(outcome: &Outcome, errno: Option<&str>) {
    assert!(outcome.stdout.contains("open: E"), "{outcome}");
    assert!(!outcome.stdout.contains("a child is left"), "{outcome}");
    assert!(!outcome.stderr.contains("munmap"), "{outcome}");
    if let Some(errno) = errno {
        assert!(outcome.stdout.contains(&format!("open: {errno}")), "expected {errno}: {outcome}");
    }
}

/// Runs the client in surroundings that `confine` makes, under `run` and preloaded, with that layer.
fn in_confinement(stage: &Stage, how: &str, account: Account, layer: &str) -> [Outcome; 2] {
    let confine = stage.client(&program("confine"));
    let client = stage.client(&program("open_once"));
    let binary = stage.binary();
    let confined = || stage.program(Mode::Native, account, &confine).env(ENV_TRAP, layer).limit(LIMIT);
    let under_run = confined().args([how, text(&binary), "run", "--", text(&client)]).run();
    stage.assert_nothing_left();
    let preloaded = confined()
        .args([how, text(&client)])
        .env("CONFINED_PRELOAD", stage.shim())
        .env(ENV_BINARY, &binary)
        .run();
    stage.assert_nothing_left();
    [under_run, preloaded]
}

/// The device can't be had there with that layer.
fn confined(how: &str, account: Account, layer: &str, errno: &str, words: &[&str]) {
    let stage = Stage::new();
    let [outcome, preloaded] = in_confinement(&stage, how, account, layer);
    if outcome.code() == Some(NOT_OPENED) {
        // What `run` couldn't know beforehand, the open says.
        assert_complaint(&outcome, NOT_OPENED, words);
        assert_not_opened(&outcome, Some(errno));
    } else {
        assert_complaint(&outcome, 125, words);
        assert!(!outcome.stdout.contains("open"), "the command was executed all the same: {outcome}");
    }
    assert_complaint(&preloaded, NOT_OPENED, words);
    assert_not_opened(&preloaded, Some(errno));
}

/// The device can be had there: by ptrace where nothing else was asked for. With each list of layers these words are on
/// standard error, once; without any word it is empty.
fn traced_instead(how: &str, account: Account, said: [(&str, &[&str]); 2]) {
    let stage = Stage::new();
    for (layers, words) in said {
        for outcome in in_confinement(&stage, how, account, layers) {
            outcome.assert_success();
            assert_eq!(outcome.stdout, "open: ok\n", "{how} {layers}: {outcome}");
            for word in words {
                let times = outcome.stderr.matches(word).count();
                assert_eq!(times, 1, "{how} {layers}: how often is `{word}` said? {outcome}");
            }
            assert!(!words.is_empty() || outcome.stderr.is_empty(), "{how} {layers}: {outcome}");
        }
    }
}

/// The surroundings themselves are not what fails.
#[test]
fn confined_by_nothing_opens() {
    let stage = Stage::new();
    let confine = stage.client(&program("confine"));
    let client = stage.client(&program("open_once"));
    for account in Account::available() {
        let outcome = stage
            .program(Mode::Native, account, &confine)
            .args(["nothing", text(&client)])
            .env("CONFINED_PRELOAD", stage.shim())
            .env(ENV_BINARY, stage.binary())
            .limit(LIMIT)
            .run();
        outcome.assert_success();
        assert_eq!(outcome.stdout, "open: ok\n", "{outcome}");
        assert_eq!(outcome.stderr, "", "{outcome}");
    }
}

#[test]
fn seccomp_forbidden_by_a_profile_is_eperm() {
    for account in Account::available() {
        confined("eperm", account, "notify", "EPERM", &["seccomp", "EPERM"]);
        traced_instead(
            "eperm",
            account,
            [
                (
                    "",
                    &["with a listener was refused with errno 1 (EPERM)", "no debugger", "every system call"],
                ),
                ("trace", &["a seccomp filter was refused with errno 1 (EPERM)", "every system call"]),
            ],
        );
    }
}

#[test]
fn kernel_without_seccomp_is_enosys() {
    for account in Account::available() {
        confined("enosys", account, "notify", "ENOSYS", &["seccomp", "ENOSYS"]);
        traced_instead(
            "enosys",
            account,
            [
                (
                    "inline,auto",
                    &[
                        "with a listener was refused with errno 38 (ENOSYS)",
                        "no debugger",
                        "every system call",
                    ],
                ),
                ("trace", &["a seccomp filter was refused with errno 38 (ENOSYS)", "every system call"]),
            ],
        );
    }
}

#[test]
fn kernel_without_user_notification_is_einval() {
    confined("einval", Account::Ordinary, "notify", "EINVAL", &["seccomp", "EINVAL"]);
    traced_instead(
        "einval",
        Account::Ordinary,
        [("", &["with a listener was refused with errno 22 (EINVAL)", "no debugger"]), ("trace", &[])],
    );
}

#[test]
fn foreign_listener_is_ebusy() {
    for account in Account::available() {
        confined("listener", account, "notify", "EBUSY", &["listener", "EBUSY"]);
        let stage = Stage::new();
        for outcome in in_confinement(&stage, "listener", account, "auto") {
            outcome.assert_success();
            assert_eq!(outcome.stdout, "open: ok\n", "{outcome}");
            // What trace doesn't see there is said, once.
            assert_eq!(outcome.stderr.matches("go unseen").count(), 1, "{outcome}");
        }
    }
}

/// There a child that is to share memory gets a copy of it.
#[test]
fn valgrind_is_a_limit_of_processes() {
    let stage = Stage::new();
    if let Err(e) = std::process::Command::new("valgrind").arg("--version").output() {
        return skip("an open under valgrind", &format!("valgrind: {e}"));
    }
    let client = stage.client(&Client::program("open_once", &["badly_used/open_once.c"]));
    let run = stage.program(Mode::Run, Account::Ordinary, "valgrind").env("PATH", "/usr/bin:/bin");
    let outcome = run.arg("-q").arg(&client).limit(LIMIT).run();
    assert_eq!((outcome.code(), outcome.stdout.as_str()), (Some(3), "open: EOPNOTSUPP\n"), "{outcome}");
    for word in ["EOPNOTSUPP", "valgrind?"] {
        assert!(outcome.stderr.contains(word), "no {word}: {outcome}");
    }
    stage.assert_nothing_left();
}

#[test]
fn ptrace_forbidden_by_a_profile_is_eperm() {
    for account in Account::available() {
        confined("deny=ptrace", account, "trace", "EPERM", &["ptrace", "EPERM", "profile"]);
        // Neither way is open: both are named.
        confined("deny=ptrace,seccomp", account, "auto", "EPERM", &["ptrace", "seccomp", "EPERM"]);
    }
}

/// Which layer comes next, whether a filter picks the calls for it, and what is lost by it.
#[test]
fn doctor_names_another_layer_than_an_open_gets() {
    let stage = Stage::new();
    let confine = stage.client(&program("confine"));
    let by_trace = "\"foreign-listener\", \"static-trace\", \"untraced\"";
    for (how, layer, filter, lost) in [
        ("nothing", "\"notify\"", "true", ""),
        ("deny=ptrace", "\"notify\"", "true", ""),
        ("deny=process_vm_readv", "\"notify\"", "true", ""),
        ("einval", "\"trace\"", "true", by_trace),
        ("listener", "\"trace\"", "true", by_trace),
        ("eperm", "\"trace\"", "false", by_trace),
        ("enosys", "\"trace\"", "false", by_trace),
        ("deny=ptrace,seccomp", "null", "null", ""),
    ] {
        let confined =
            || stage.program(Mode::Native, Account::Ordinary, &confine).arg(how).arg(stage.binary());
        let outcome = confined().args(["doctor", "--json"]).limit(LIMIT).run();
        let code = i32::from(layer == "null");
        assert_eq!(outcome.code(), Some(code), "{how}: {outcome}");
        let expected = format!("\"layer\": {layer}, \"filter\": {filter}, \"lost\": [{lost}], ");
        assert!(outcome.stdout.contains(&expected), "{how}: expected {expected}: {outcome}");
        let inline = layer == "\"notify\"";
        assert!(outcome.stdout.contains(&format!("\"inline\": {inline}, ")), "{how}: {outcome}");
        let outcome = confined().arg("doctor").limit(LIMIT).run();
        assert_eq!(outcome.code(), Some(code), "{how}: {outcome}");
        let verdict = match layer {
            _ if inline => "with the emulator, layer inline,notify.".to_owned(),
            "null" => "doesn't work here. Missing: listener".to_owned(),
            layer => format!("with the emulator, layer {}.", layer.trim_matches('"')),
        };
        assert!(outcome.stdout.contains(&verdict), "{how}: expected {verdict}: {outcome}");
    }
}

/// However few there are: the device opens, or the client gets EMFILE, which open may always answer and which
/// needs no further words. Nothing in between.
#[test]
fn too_few_descriptors_are_emfile() {
    let stage = Stage::new();
    let confine = stage.client(&program("confine"));
    let client = stage.client(&program("open_once"));
    let (mut opened, mut refused) = (0, 0);
    // With less than four the loader itself can't work.
    for (limit, layers) in (4..=26).flat_map(|limit| ["notify", "notify,fault"].map(|layers| (limit, layers)))
    {
        let how = format!("nofile={limit}");
        let outcome = stage
            .program(Mode::Native, Account::Ordinary, &confine)
            .args([&how, text(&client)])
            .env("CONFINED_PRELOAD", stage.shim())
            .env(ENV_BINARY, stage.binary())
            .env(ENV_TRAP, layers)
            .limit(LIMIT)
            .run();
        if outcome.code() == Some(0) {
            assert_eq!(outcome.stdout, "open: ok\n", "{outcome}");
            opened += 1;
        } else {
            assert_eq!(outcome.code(), Some(NOT_OPENED), "{outcome}");
            assert_not_opened(&outcome, Some("EMFILE"));
            refused += 1;
        }
        stage.assert_nothing_left();
    }
    assert!(opened > 0 && refused > 0, "{opened} opened, {refused} refused: the limits tested are no limits");
}

#[test]
fn no_further_process_is_eagain() {
    if !Account::is_superuser() {
        skip(
            "RLIMIT_NPROC 0",
            "other processes of this user run at the same time, and may not be the tests' own",
        );
        return;
    }
    confined("nproc=0", Account::Ordinary, "auto", "EAGAIN", &["EAGAIN", "process"]);
}

#[test]
fn too_small_a_file_size_is_efbig() {
    confined("fsize=1048576", Account::Ordinary, "auto", "EFBIG", &["EFBIG", "ulimit -f"]);
}

/// The first `run` of a user writes the library.
#[test]
fn a_library_that_cannot_be_written_kills_the_command() {
    let stage = Stage::new();
    let confine = stage.client(&program("confine"));
    let binary = stage.binary();
    fs::remove_file(stage.shim()).expect("the stage is ours");
    for account in Account::available() {
        let nowhere = stage.work().join(format!("cache-{account:?}"));
        fs::create_dir(&nowhere).expect("the work folder is ours");
        permit(&nowhere, 0o777);
        let outcome = stage
            .program(Mode::Native, account, &confine)
            .args(["fsize=1000", text(&binary), "run", "--", "true"])
            .env("XDG_CACHE_HOME", &nowhere)
            .limit(LIMIT)
            .run();
        // Another place may hold the library since an earlier run.
        if outcome.code() != Some(0) {
            assert_complaint(&outcome, 125, &["write", "File too large"]);
        }
    }
}

#[test]
fn too_few_addresses_are_enomem() {
    confined("as=200000000", Account::Ordinary, "auto", "ENOMEM", &["ENOMEM", "ulimit -v"]);
}

/// Whatever is opened first gets their numbers.
#[test]
fn closed_standard_descriptors_are_in_the_way() {
    let stage = Stage::new();
    let confine = stage.client(&program("confine"));
    let name = &["badly_used/open_once.c"];
    let clients = [
        stage.client(&program("open_once")),
        stage.client(&Client::program("badly-used-open_once", name).fixed()),
    ];
    let binary = stage.binary();
    for (account, client) in
        Account::available().into_iter().flat_map(|a| clients.iter().map(move |c| (a, c)))
    {
        let outcome = stage
            .program(Mode::Native, account, &confine)
            .args(["closed", text(&binary), "run", "--", text(client)])
            .limit(LIMIT)
            .run();
        outcome.assert_success();
        assert_eq!(outcome.stdout, "open: ok\n", "{outcome}");
        stage.assert_nothing_left();
    }
}

#[test]
fn backend_that_is_none_is_named() {
    let stage = Stage::new();
    let client = stage.client(&program("open_once"));
    let outcome = ummunotify(&stage, Account::Ordinary, &["run", "--", text(&client)])
        .env(ENV_BACKEND, "frobnicate")
        .run();
    assert_complaint(&outcome, 2, &[ENV_BACKEND, "frobnicate", "auto", "kmod", "emulated"]);
    let outcome = stage
        .program(Mode::Preload, Account::Ordinary, &client)
        .env(ENV_BACKEND, "frobnicate")
        .limit(LIMIT)
        .run();
    assert_complaint(&outcome, NOT_OPENED, &[ENV_BACKEND, "frobnicate"]);
    assert_not_opened(&outcome, Some("EINVAL"));
}

#[test]
fn kmod_without_the_device_says_so() {
    if Path::new(ummunotify_abi::device::PATH).exists() {
        skip("the backend kmod without the device", "this host has the device");
        return;
    }
    let stage = Stage::new();
    let client = stage.client(&program("open_once"));
    let words = ["/dev/ummunotify", "ENOENT", "module"];
    let outcome =
        ummunotify(&stage, Account::Ordinary, &["run", "--", text(&client)]).env(ENV_BACKEND, "kmod").run();
    assert_complaint(&outcome, 125, &words);
    let outcome =
        ummunotify(&stage, Account::Ordinary, &["run", "--backend", "kmod", "--", text(&client)]).run();
    assert_complaint(&outcome, 125, &words);
    let outcome =
        stage.program(Mode::Preload, Account::Ordinary, &client).env(ENV_BACKEND, "kmod").limit(LIMIT).run();
    assert_eq!(outcome.code(), Some(NOT_OPENED), "{outcome}");
    assert_not_opened(&outcome, Some("ENOENT"));
}

#[test]
fn log_file_that_cannot_be_written_is_named() {
    let stage = Stage::new();
    let client = stage.client(&program("open_once"));
    let log = "/there/is/no/such/folder/log";
    let outcome =
        ummunotify(&stage, Account::Ordinary, &["run", "--log-file", log, "--", text(&client)]).run();
    assert_complaint(&outcome, 125, &["--log-file", log, "No such file"]);
    // In the environment it is the supervisor that finds out; nobody may be left without a word.
    for mode in Mode::EMULATED {
        let outcome =
            stage.program(mode, Account::Ordinary, &client).env(ENV_LOG_FILE, log).limit(LIMIT).run();
        assert_short(&outcome);
        assert!(outcome.stderr.contains(ENV_LOG_FILE) || outcome.stderr.contains(log), "{outcome}");
        stage.assert_nothing_left();
    }
}

#[test]
fn log_file_is_written_where_it_can_be() {
    let stage = Stage::new();
    let client = stage.client(&program("open_once"));
    let log = stage.work().join("log");
    let outcome = stage
        .program(Mode::Run, Account::Ordinary, &client)
        .run_option("--log-file")
        .run_option(&log)
        .run_option("--log")
        .run_option("debug")
        .limit(LIMIT)
        .run();
    outcome.assert_success();
    assert_eq!(outcome.stderr, "", "the log went to standard error, too: {outcome}");
    stage.assert_nothing_left();
    let logged = fs::read_to_string(&log).unwrap_or_else(|e| panic!("{}: {e}", log.display()));
    assert!(!logged.is_empty(), "nothing was logged");
}

/// The supervisors of a stage: processes that execute its binary and aren't the client itself.
fn supervisors(stage: &Stage) -> Vec<i32> {
    let binary = stage.binary();
    let entries = fs::read_dir("/proc").expect("/proc is mounted");
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == binary))
        .collect()
}

/// Whether nothing is left of a process but what its parent has to reap. Its program is gone earlier: before its threads
/// have let go of their files and of whom they trace.
fn has_ended(pid: i32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| {
        fs::read_to_string(thread.path().join("status")).map_or(true, |status| {
            status.lines().any(|l| l.starts_with("State:\tZ") || l.starts_with("State:\tX"))
        })
    })
}

/// What README says of it: nothing hangs; trapped calls fail with ENOSYS; a read reports every region as invalid
/// once, and then fails with EIO.
fn supervisor_killed(mode: Mode, account: Account, layer: &str) {
    let stage = Stage::new();
    let client = stage.client(&program("orphaned"));
    let mut running = stage.program(mode, account, &client).env(ENV_TRAP, layer).limit(LIMIT).spawn();
    running.wait_for_line("ready");
    let found = supervisors(&stage);
    assert_eq!(found.len(), 1, "supervisors of one client: {found:?}");
    kill(Pid::from_raw(found[0]), Signal::SIGKILL).expect("the supervisor runs");
    let deadline = Instant::now() + Duration::from_secs(5);
    while !has_ended(found[0]) {
        assert!(Instant::now() < deadline, "a supervisor that doesn't die");
        std::thread::sleep(Duration::from_millis(1));
    }
    running.write_line("go on");
    let outcome = running.finish();
    outcome.assert_success();
    for line in [
        "sleeping read: 1 LAST",
        "sleeping poll: 1",
        "munmap: ENOSYS",
        "poll: 1",
        "first read: 2 3 LAST",
        "counter: moved",
        "second read: EIO",
        "read of the other: EIO",
        "close: 0",
        "close of the other: 0",
        "done",
    ] {
        assert!(outcome.stdout.lines().any(|said| said == line), "expected `{line}`: {outcome}");
    }
    // Registrations of a context that nobody watches must not pretend to work for ever; whether they fail at
    // once isn't said. A new context can't be had.
    assert!(
        outcome.stdout.lines().any(|said| said.starts_with("open: E")),
        "a dead device opened: {outcome}"
    );
}

#[test]
fn supervisor_killed_under_run_hangs_nobody() {
    for account in Account::available() {
        supervisor_killed(Mode::Run, account, "notify");
        supervisor_killed(Mode::Run, account, "trace");
    }
}

#[test]
fn supervisor_killed_under_preload_hangs_nobody() {
    for account in Account::available() {
        supervisor_killed(Mode::Preload, account, "notify");
        supervisor_killed(Mode::Preload, account, "trace");
    }
}

#[test]
fn client_that_is_killed_leaves_nothing() {
    let stage = Stage::new();
    let client = stage.client(&program("orphaned"));
    for mode in Mode::EMULATED {
        for account in Account::available() {
            for (signal, layer) in [
                (Signal::SIGKILL, "notify"),
                (Signal::SIGTERM, "notify"),
                (Signal::SIGSEGV, "notify"),
                (Signal::SIGKILL, "trace"),
                (Signal::SIGSEGV, "trace"),
            ] {
                let program = stage.program(mode, account, &client).env(ENV_TRAP, layer);
                let mut running = program.limit(LIMIT).spawn();
                running.wait_for_line("ready");
                assert_eq!(supervisors(&stage).len(), 1);
                running.signal(signal);
                let outcome = running.finish();
                assert_eq!(outcome.signal(), Some(signal as i32), "{outcome}");
                stage.assert_nothing_left();
            }
        }
    }
}

#[test]
fn filtered_descendants_of_a_dead_client_go_on() {
    let stage = Stage::new();
    let client = stage.client(&program("descendant"));
    for mode in Mode::EMULATED {
        for account in Account::available() {
            let ways = [
                ("exit", "notify"),
                ("kill", "notify"),
                ("exec", "notify"),
                ("kill", "trace"),
                ("exec", "trace"),
            ];
            for (how, layer) in ways {
                // The output is the descendant's, who outlives the client: it is complete when it is closed.
                let program = stage.program(mode, account, &client).env(ENV_TRAP, layer);
                let outcome = program.arg(how).limit(LIMIT).run();
                assert!(!outcome.timed_out && !outcome.output_held, "{how} {layer}: {outcome}");
                assert_eq!(outcome.stdout, "descendant: well\n", "{how} {layer}: {outcome}");
                stage.assert_nothing_left();
            }
        }
    }
}

#[test]
fn supervisor_killed_while_it_looks_lets_the_call_run() {
    let stage = Stage::new();
    let client = stage.client(&program("midway"));
    let account = Account::available()[0];
    for layer in ["notify", "trace"] {
        let mut running =
            stage.program(Mode::Run, account, &client).env(ENV_TRAP, layer).limit(LIMIT).spawn();
        let line = running.wait_for_line("");
        if line != "ready" {
            return skip("a supervisor that is killed while it looks", &line);
        }
        // Number 76 is truncate, and the tracer makes it none (-1) meanwhile. The look is given up after two seconds.
        let call = format!("/proc/{}/syscall", running.pid());
        let inside =
            || fs::read_to_string(&call).is_ok_and(|call| call.starts_with("76 ") || call.starts_with("-1 "));
        while !inside() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
        let found = supervisors(&stage);
        assert_eq!(found.len(), 1, "supervisors of one client: {found:?}");
        kill(Pid::from_raw(found[0]), Signal::SIGKILL).expect("the supervisor runs");
        let outcome = running.finish();
        assert_eq!(outcome.stdout, "ready\ntruncate: ENOSYS\n", "{layer}: {outcome}");
        stage.assert_nothing_left();
    }
}

/// Without a filter nothing would stop its calls any more, and the counter would say that all is well. So the client
/// goes with its supervisor.
#[test]
fn supervisor_killed_without_seccomp_leaves_a_client_that_is_stale() {
    for account in Account::available() {
        let stage = Stage::new();
        let (confine, client) = (stage.client(&program("confine")), stage.client(&program("orphaned")));
        let program = stage.program(Mode::Native, account, &confine).arg("enosys").arg(stage.binary());
        let mut running = program.args(["run", "--"]).arg(&client).limit(LIMIT).spawn();
        running.wait_for_line("ready");
        let found = supervisors(&stage);
        assert_eq!(found.len(), 1, "supervisors of one client: {found:?}");
        kill(Pid::from_raw(found[0]), Signal::SIGKILL).expect("the supervisor runs");
        let outcome = running.finish();
        assert_eq!(outcome.signal(), Some(Signal::SIGKILL as i32), "{outcome}");
    }
}
