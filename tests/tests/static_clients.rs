//! Programs that nothing can be preloaded into: linked statically against glibc or musl, in Go, without any library.
//! Under `ummunotify run` they find the whole device.

use nix::sys::signal::Signal;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};
use ummunotify_tests::{Account, Client, HugePages, Mode, Outcome, Stage, go, say, skip};

/// Tests of the interface suite that don't hold here, and the named gap that each stands for.
const GAPS: [(&str, &str); 7] = [
    ("call_open_lowest_free_number", "the device's descriptors have numbers of their own"),
    ("call_open_path_looks_like_a_device", "stat and access of the path"),
    ("call_scm_rights_in_flight_is_a_reference", "a descriptor that was received"),
    ("call_scm_rights_to_a_child", "a descriptor that was received"),
    ("call_scm_rights_to_another_program", "a descriptor that was received"),
    ("call_scm_rights_to_oneself", "a descriptor that was received"),
    ("proc_spawned_program_has_it_as_standard_input", "a copy at a number of the program's choice"),
];

/// Checks that can't be made, by name. Any other skip is a failure.
const KNOWN_SKIPS: [&str; 2] = ["call_register_no_memory.enomem", "call_close_range_cloexec_keeps_it.call"];

/// Fewer checks than this mean that a part of the suite was lost.
const LEAST_CHECKS: usize = 1900;

/// Rows of the walk that there are at least.
const LEAST_ROWS: usize = 500;

fn lines<'a>(outcome: &'a Outcome, start: &'a str) -> impl Iterator<Item = &'a str> {
    outcome.stdout.lines().filter_map(move |line| line.strip_prefix(start))
}

fn interface(account: Account) {
    if account == Account::Root && !Account::is_superuser() {
        return skip("the interface suite as root", "the tests run without privileges");
    }
    let stage = Stage::new();
    let suite = stage.client(&Client::interface_suite().fixed());
    let million = "departure_3_a_million_regions";
    let outcome = stage
        .program(Mode::Run, account, &suite)
        .args(["--emulated", "--numbers", "960", "--without", million])
        .limit(Duration::from_secs(240))
        .run();
    for line in lines(&outcome, "skip ") {
        let (name, reason) = line.split_once(": ").unwrap_or((line, "no reason given"));
        assert!(KNOWN_SKIPS.contains(&name), "{name} was skipped: {reason}");
    }
    let failed: BTreeSet<&str> = lines(&outcome, "FAIL ").filter_map(|line| line.split('.').next()).collect();
    let gaps: BTreeSet<&str> = GAPS.iter().map(|(test, _)| *test).collect();
    let failures: Vec<&str> = lines(&outcome, "FAIL ")
        .filter(|line| !gaps.contains(line.split('.').next().unwrap_or_default()))
        .collect();
    assert!(failures.is_empty(), "{account:?}: {}\nstderr:\n{}", failures.join("\n"), outcome.stderr);
    // A gap that is none any more is one too many in the documentation.
    let closed: Vec<_> = gaps.difference(&failed).collect();
    assert!(closed.is_empty(), "{account:?}: these gaps aren't there: {closed:?}");
    assert!(!outcome.timed_out && !outcome.output_held, "{outcome}");
    let checks = lines(&outcome, "ok ").count();
    assert!(checks >= LEAST_CHECKS, "only {checks} checks were made");
    say(&format!("static, {account:?}: {checks} checks ok in {:.1?}, gaps: {gaps:?}", outcome.elapsed));
}

#[test]
fn the_interface_holds_for_a_static_program_of_root() {
    interface(Account::Root);
}

#[test]
fn the_interface_holds_for_a_static_program_of_an_ordinary_user() {
    interface(Account::Ordinary);
}

/// The table that the walk judges by.
fn coverage(stage: &Stage) -> std::path::PathBuf {
    let table =
        stage.program(Mode::Native, Account::Ordinary, stage.binary()).args(["doctor", "--coverage"]).run();
    table.assert_success();
    let coverage = stage.folder().join("coverage");
    std::fs::write(&coverage, &table.stdout).unwrap_or_else(|e| panic!("{}: {e}", coverage.display()));
    coverage
}

/// Walks as each of the accounts.
fn walk(stage: &Stage, walk: &Path, what: &str, least: usize) {
    let coverage = coverage(stage);
    for account in Account::available() {
        let outcome = stage
            .program(Mode::Run, account, walk)
            .arg("--coverage")
            .arg(&coverage)
            .env("LD_LIBRARY_PATH", stage.folder().join("bin"))
            .limit(Duration::from_secs(300))
            .run();
        let failed: Vec<&str> = lines(&outcome, "FAIL").collect();
        assert!(failed.is_empty(), "{what}, {account:?}: {}\n{outcome}", failed.join("\n"));
        outcome.assert_success();
        let ok = lines(&outcome, "ok ").count();
        assert!(ok >= least, "only {ok} rows: {outcome}");
        say(&format!("{what}, {account:?}: {}", outcome.stdout.lines().last().unwrap_or_default()));
    }
}

#[test]
fn operations_of_a_static_program_are_missed_or_misreported() {
    let huge = HugePages::reserve(8);
    if let Err(reason) = &huge {
        skip("rows of huge pages (hugetlb) in a static program", reason);
    }
    let stage = Stage::new();
    stage.client(&Client::library("walk-plugin", &["operations/plugin.c"]));
    let program = stage.client(&Client::walk().fixed());
    walk(&stage, &program, "static", LEAST_ROWS);
}

#[test]
fn operations_of_a_program_with_musl_are_missed_or_misreported() {
    if !is_there("musl-gcc") {
        return skip("the operations by a program with musl", "no musl-gcc: install musl-tools");
    }
    let stage = Stage::new();
    let program = stage.client(&musl(Client::walk().fixed()));
    walk(&stage, &program, "musl", LEAST_ROWS);
}

/// Every call is made by the instruction of Go's own runtime. Its threads are company, so what isn't to be reported at all
/// of a program that is alone may be reported here.
#[test]
fn operations_of_a_go_program_are_missed() {
    if !go::is_available() {
        return skip("the operations by a program in Go", "no go: install golang-go");
    }
    let stage = Stage::new();
    let object = Client::walk_for_go();
    let program = stage.go_program("walk.go", Some(&object));
    walk(&stage, &program, "go", LEAST_ROWS);
}

/// In containers, and where single calls that the supervisor could use are denied: all is seen. Where ptrace is denied
/// there is no device, and a sentence says why.
#[test]
fn a_static_program_loses_something_in_a_container() {
    let stage = Stage::new();
    let suite = stage.client(&Client::interface_suite().fixed());
    stage.client(&Client::library("walk-plugin", &["operations/plugin.c"]));
    let walk = stage.client(&Client::walk().fixed());
    let confine = stage.client(&Client::program("confine", &["badly_used/confine.c"]));
    let coverage = coverage(&stage);
    let confined = |account: Account, how: &str, program: &Path| {
        stage
            .program(Mode::Native, account, &confine)
            .arg(how)
            .arg(stage.binary())
            .args(["run", "--"])
            .arg(program)
            .env("LD_LIBRARY_PATH", stage.folder().join("bin"))
            .limit(Duration::from_secs(240))
    };
    let served =
        ["docker", "deny=userfaultfd,io_uring_setup", "deny=process_vm_readv,process_vm_writev,kcmp"];
    for (nth, how) in served.into_iter().enumerate() {
        let accounts = Account::available();
        let account = accounts[nth % accounts.len()];
        let outcome = confined(account, how, &walk).arg("--coverage").arg(&coverage).run();
        let failed: Vec<&str> = lines(&outcome, "FAIL").collect();
        assert!(failed.is_empty(), "{how} {account:?}: {}\n{outcome}", failed.join("\n"));
        outcome.assert_success();
        assert!(lines(&outcome, "ok ").count() >= LEAST_ROWS - 30, "{outcome}");
        say(&format!("static, {how} {account:?}: {}", outcome.stdout.lines().last().unwrap_or_default()));
    }
    // Records and answers go the other way, where /proc/PID/mem would write to what the program itself can't.
    let how = "deny=process_vm_readv,process_vm_writev";
    let outcome = confined(Account::Ordinary, how, &suite)
        .args(["--emulated", "--numbers", "960", "--without", "departure_3_a_million_regions"])
        .run();
    let gaps: BTreeSet<&str> = GAPS.iter().map(|(test, _)| *test).collect();
    let failures: Vec<&str> = lines(&outcome, "FAIL ")
        .filter(|line| !gaps.contains(line.split('.').next().unwrap_or_default()))
        .collect();
    assert!(failures.is_empty(), "{how}: {}\nstderr:\n{}", failures.join("\n"), outcome.stderr);
    assert!(lines(&outcome, "ok ").count() >= LEAST_CHECKS, "{outcome}");

    for how in ["podman", "deny=ptrace"] {
        let outcome = confined(Account::Ordinary, how, &walk).arg("--coverage").arg(&coverage).run();
        assert_ne!(outcome.code(), Some(0), "{how}: {outcome}");
        assert!(!outcome.timed_out && outcome.stderr.contains("ptrace"), "{how}: {outcome}");
    }
}

/// The models of real clients, with threads, against either C library.
fn clients(compiler: &str, accounts: &[Account]) {
    let stage = Stage::new();
    for name in ["driver_test", "open_mpi", "portals", "zhpe"] {
        let sources = [format!("clients/{name}.c"), "clients/application.c".to_owned()];
        let client = Client::program(&format!("client-{name}"), &[&sources[0], &sources[1]]).fixed();
        let client = if compiler == "cc" { client } else { musl(client) };
        let client = stage.client(&client);
        for account in accounts {
            let outcome = stage.program(Mode::Run, *account, &client).arg("1500").run();
            assert_eq!(lines(&outcome, "FAIL ").count(), 0, "{compiler}, {account:?}: {outcome}");
            outcome.assert_success();
            assert!(lines(&outcome, "ok ").count() >= 6, "{outcome}");
        }
    }
}

/// The kernel's headers aren't where this compiler looks.
fn musl(client: Client) -> Client {
    client.compiler("musl-gcc").flag("-idirafter/usr/include").flag("-idirafter/usr/include/x86_64-linux-gnu")
}

fn is_there(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
        || Command::new(program).arg("version").output().is_ok()
}

#[test]
fn clients_that_are_linked_statically_against_glibc_are_stale() {
    clients("cc", &Account::available());
}

#[test]
fn clients_that_are_linked_statically_against_musl_are_stale() {
    if !is_there("musl-gcc") {
        return skip("static clients with musl", "no musl-gcc: install musl-tools");
    }
    clients("musl-gcc", &[Account::Ordinary]);
}

#[test]
fn a_program_without_any_library_finds_the_device() {
    let stage = Stage::new();
    let plain = Client::program("bare", &["static/bare.S"]).flag("-nostdlib");
    // Once at a fixed address, once at any.
    let pie = Client::program("bare-pie", &["static/bare.S"]).flag("-nostdlib").flag("-static-pie");
    for client in [plain.fixed(), pie] {
        let client = stage.client(&client);
        for account in Account::available() {
            let outcome = stage.program(Mode::Run, account, &client).run();
            assert_eq!(outcome.code(), Some(0), "the step that failed is the exit code: {outcome}");
        }
    }
}

/// What the coverage table calls a gap is one: if it were closed, the table would be wrong.
#[test]
fn the_device_by_the_32_bit_entry_is_no_gap() {
    let stage = Stage::new();
    // At addresses that 32 bits hold.
    let foreign = Client::program("foreign", &["static/foreign.c"])
        .flag("-no-pie")
        .flag("-DUMMUNOTIFY_PATH=\"/dev/ummunotify\"");
    let foreign = stage.client(&foreign.fixed());
    let outcome = stage.program(Mode::Run, Account::Ordinary, &foreign).run();
    if outcome.code() == Some(3) || outcome.signal() == Some(Signal::SIGSEGV as i32) {
        return skip("the device by the 32-bit entry", "this kernel has none");
    }
    outcome.assert_success();
}

#[test]
fn a_go_program_finds_the_device() {
    if !go::is_available() {
        return skip("a client in Go", "no go: install golang-go");
    }
    let stage = Stage::new();
    let client = stage.go_program("client.go", None);
    for account in Account::available() {
        for _ in 0..3 {
            let outcome = stage.program(Mode::Run, account, &client).run();
            outcome.assert_success();
            assert_eq!(outcome.stdout, "ok\n", "{outcome}");
        }
    }
}

#[test]
fn blocking_reads_lose_something_under_a_storm_of_signals() {
    let stage = Stage::new();
    let sleepers = stage.client(&Client::program("sleepers", &["static/sleepers.c"]).fixed());
    for account in Account::available() {
        for handler in [&[][..], &["restart"]] {
            let outcome = stage.program(Mode::Run, account, &sleepers).arg("1000").args(handler).run();
            outcome.assert_success();
            say(&format!("static, {account:?}, {handler:?}: {}", outcome.stdout.trim_end()));
        }
    }
}

/// ptrace belongs to the tracer then: a blocking read ends all the same.
#[test]
fn a_blocking_read_hangs_under_a_tracer() {
    if !is_there("strace") {
        return skip("a traced static client", "no strace: install strace");
    }
    let stage = Stage::new();
    let client = stage.client(&Client::program("traced", &["static/traced.c"]).fixed());
    let name = stage.client(&Client::program("name", &["static/name.c"]).fixed());
    for account in Account::available() {
        let mut client = stage.program(Mode::Run, account, &client).spawn();
        client.wait_for_line("ready");
        let pid = client.pid();
        let mut tracer = Command::new("strace")
            .args(["-f", "-o", "/dev/null", "-p"])
            .arg(pid.to_string())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("strace runs");
        let start = Instant::now();
        let status = format!("/proc/{pid}/status");
        while std::fs::read_to_string(&status).is_ok_and(|status| status.contains("TracerPid:\t0\n")) {
            assert!(start.elapsed() < Duration::from_secs(20), "strace doesn't attach");
            sleep(Duration::from_millis(10));
        }
        client.write_line("go on");
        let outcome = client.finish();
        let _ = tracer.wait();
        outcome.assert_success();
        assert_eq!(outcome.stdout, "ready\nread EINTR\nread records\n", "{outcome}");

        // One that is traced from the beginning can't open it, and is told why.
        let outcome = stage
            .program(Mode::Native, account, "strace")
            .args(["-f", "-o", "/dev/null"])
            .arg(stage.binary())
            .args(["run", "--backend", "emulated", "--"])
            .arg(&name)
            .run();
        assert!(outcome.stdout.ends_with(" 1 none\n"), "{outcome}");
        assert!(outcome.stderr.contains("made to map a page by ptrace"), "{outcome}");
    }
}

/// Takes from a process of that account all descriptors that it hasn't opened yet.
fn spend_descriptors(stage: &Stage, account: Account, pid: i32) {
    let open: BTreeSet<u32> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("it runs")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    let free = (0..).find(|number| !open.contains(number)).unwrap_or_default();
    stage
        .program(Mode::Native, account, "prlimit")
        .args(["--pid", &pid.to_string(), &format!("--nofile={free}:")])
        .run()
        .assert_success();
}

#[test]
fn a_blocking_read_returns_a_byte_when_the_supervisor_has_no_descriptor_left() {
    if !is_there("prlimit") {
        return skip("a supervisor without descriptors", "no prlimit: install util-linux");
    }
    let stage = Stage::new();
    let spent = stage.client(&Client::program("spent", &["static/spent.c"]).fixed());
    for account in Account::available() {
        let mut client = stage.program(Mode::Run, account, &spent).limit(Duration::from_secs(30)).spawn();
        client.wait_for_line("ready");
        stage.supervisors().into_iter().for_each(|pid| spend_descriptors(&stage, account, pid));
        client.write_line("go on");
        client.finish().assert_success();
    }
}

#[test]
fn records_end_up_in_a_read_of_another_file() {
    let stage = Stage::new();
    let number = stage.client(&Client::program("number", &["static/number.c"]).fixed());
    for account in Account::available() {
        stage.program(Mode::Run, account, &number).run().assert_success();
    }
}

#[test]
fn an_invalidation_is_missed_while_tasks_of_a_static_program_come_and_go() {
    let stage = Stage::new();
    let storm = stage.client(&Client::program("storm", &["attack/storm.c"]).fixed());
    let race = stage.client(&Client::program("race", &["race/race.c"]).fixed());
    for account in Account::available() {
        let outcome = stage
            .program(Mode::Run, account, &storm)
            .args(["1000", "restart"])
            .limit(Duration::from_secs(120))
            .run();
        outcome.assert_success();
        assert!(outcome.stdout.contains("missed=0 "), "{outcome}");
        let outcome =
            stage.program(Mode::Run, account, &race).args(["4000", "1"]).limit(Duration::from_secs(90)).run();
        outcome.assert_success();
        assert!(outcome.stdout.contains("stale=0"), "{outcome}");
    }
}

/// Nobody's wait() sees a process that isn't its own; what is started inherits the filter and works; whatever is
/// killed leaves nothing.
#[test]
fn processes_of_a_static_program_are_as_they_would_be() {
    let stage = Stage::new();
    let program = |name: &str| stage.client(&Client::program(name, &[&format!("programs/{name}.c")]).fixed());
    let (waiter, leaver, headless) = (program("waiter"), program("leaver"), program("headless"));
    let shell = stage.client(&Client::program("shell", &["static/shell.c"]).fixed());
    let dynamic = stage
        .client(&Client::program("client-driver_test", &["clients/driver_test.c", "clients/application.c"]));
    let fixed = stage.client(
        &Client::program("client-driver_test", &["clients/driver_test.c", "clients/application.c"]).fixed(),
    );
    for account in Account::available() {
        stage.program(Mode::Run, account, &waiter).run().assert_success();
        stage.program(Mode::Run, account, &leaver).arg("50").run().assert_success();
        stage.program(Mode::Run, account, &headless).run().assert_success();
        for inner in [&dynamic, &fixed] {
            let outcome = stage.program(Mode::Run, account, &shell).arg(inner).run();
            outcome.assert_success();
            let failed = lines(&outcome, "FAIL ").count();
            assert!(failed == 0 && lines(&outcome, "ok ").count() >= 18, "{outcome}");
        }
        stage.assert_nothing_left();
    }
}

/// Whatever way a dynamic program starts a static one, that one has the device, and its own name, process and
/// arguments.
#[test]
fn a_static_program_that_a_dynamic_one_starts_has_no_device() {
    let stage = Stage::new();
    let name = stage.client(&Client::program("name", &["static/name.c"]).fixed());
    let folder = name.parent().expect("a file lies in a folder").display().to_string();
    let path = name.display().to_string();
    // In each, %P is the path and %F its folder; what is printed begins with the process number, which for an
    // exec is the command's own.
    let ways = [
        ("sh", "exec %P one 'two three'", "%P", true),
        ("sh", "%P one 'two three'; true", "%P", false),
        ("sh", "cd %F && PATH=.:$PATH exec name-static one 'two three'", "name-static", true),
        ("sh", "exec env %P one 'two three'", "%P", true),
        ("python3", "import os; os.execv('%P', ['other', 'one', 'two three'])", "other", true),
        ("python3", "import os; os.execvp('%P', ['other', 'one', 'two three'])", "other", true),
        (
            "python3",
            "import os; p = os.posix_spawn('%P', ['other', 'one', 'two three'], os.environ); os.waitpid(p, 0)",
            "other",
            false,
        ),
        ("python3", "import subprocess; subprocess.run(['%P', 'one', 'two three'], check=True)", "%P", false),
    ];
    for account in Account::available() {
        for (interpreter, script, shown, same) in ways {
            let fill = |text: &str| text.replace("%P", &path).replace("%F", &folder);
            let running = stage.program(Mode::Run, account, interpreter).arg("-c").arg(fill(script)).spawn();
            let pid = running.pid();
            let outcome = running.finish();
            outcome.assert_success();
            let (number, rest) = outcome.stdout.split_once(' ').unwrap_or_default();
            assert_eq!(rest, format!("{} 3 one two three device\n", fill(shown)), "{script}: {outcome}");
            assert_eq!(number == pid.to_string(), same, "{script}: {outcome}");
            assert!(outcome.stderr.is_empty(), "{script}: {outcome}");
        }
        // Where the environment was cleared, or the library taken from it, all is as without `run`.
        for cleared in [&["-i"][..], &["-u", "LD_PRELOAD"], &["LD_PRELOAD=libm.so.6"]] {
            let outcome = stage.program(Mode::Run, account, "env").args(cleared).arg(&name).run();
            assert!(outcome.stdout.ends_with(" 1 none\n"), "{cleared:?}: {outcome}");
        }
    }
}

/// Threads with the least stack there can be, and handlers of crashes, start dynamic programs and static ones, and open
/// the device before anybody else did.
#[test]
fn a_small_stack_is_too_small_to_start_a_program_or_open_the_device() {
    let stage = Stage::new();
    let small = stage.client(&Client::program("small", &["programs/small.c"]));
    let name = stage.client(&Client::program("name", &["static/name.c"]).fixed());
    for stack in ["thread", "handler"] {
        for way in ["execve", "execv", "execvp", "execvpe", "posix_spawn", "posix_spawnp"] {
            let run = || stage.program(Mode::Run, Account::Ordinary, &small).args([stack, way]);
            let shell = if way.contains('p') && way != "posix_spawn" { "sh" } else { "/bin/sh" };
            let outcome = run().args([shell, "-c", "exit 7"]).run();
            assert_eq!(outcome.code(), Some(7), "{stack} {way}: {outcome}");
            let outcome = run().arg(&name).arg("one").run();
            outcome.assert_success();
            assert!(outcome.stdout.ends_with(" 2 one device\n"), "{stack} {way}: {outcome}");
        }
    }
    for stack in ["thread", "handler"] {
        for layers in ["notify", "inline,notify", "trace", "notify,fault"] {
            let run = stage.program(Mode::Run, Account::Ordinary, &small).layers(layers);
            let outcome = run.args([stack, "open", "/dev/ummunotify"]).run();
            assert_eq!(outcome.code(), Some(0), "{stack}, {layers}: {outcome}");
        }
    }
    // As many arguments as may be, and one more: that one is started plainly.
    for (count, seen) in [(31, "device"), (32, "device"), (499, "device"), (500, "none")] {
        let run = stage.program(Mode::Run, Account::Ordinary, &small).args(["thread", "execv"]);
        let outcome = run.arg(&name).args((0..count).map(|n| n.to_string())).run();
        outcome.assert_success();
        let end = format!(" {} {seen}\n", count - 1);
        assert!(outcome.stdout.ends_with(&end), "{count}: {outcome}");
    }
}

#[test]
fn a_killed_static_client_leaves_something() {
    let stage = Stage::new();
    let parent = stage.client(&Client::program("parent", &["programs/parent.c"]).fixed());
    let survivor = stage.client(&Client::program("survivor", &["programs/survivor.c"]).fixed());
    for account in Account::available() {
        let mut client = stage.program(Mode::Run, account, &parent).spawn();
        client.wait_for_line("ready");
        client.signal(Signal::SIGKILL);
        let result = stage.work().join("result");
        let outcome = client.finish();
        assert_eq!(outcome.signal(), Some(Signal::SIGKILL as i32), "{outcome}");
        let start = Instant::now();
        while !result.exists() {
            assert!(start.elapsed() < Duration::from_secs(20), "the child under the filter doesn't work");
            sleep(Duration::from_millis(10));
        }
        std::fs::remove_file(&result).expect("the work folder is ours");
        stage.assert_nothing_left();

        // One that sleeps in a read.
        let mut client = stage.program(Mode::Run, account, &survivor).arg("blocking").spawn();
        client.wait_for_line("ready");
        sleep(Duration::from_millis(100));
        client.signal(Signal::SIGKILL);
        assert_eq!(client.finish().signal(), Some(Signal::SIGKILL as i32));
        stage.assert_nothing_left();
    }
}

/// What is no static program pays nothing for this: no filter before the device is opened.
#[test]
fn a_dynamic_program_gets_a_filter_before_it_opens_the_device() {
    let stage = Stage::new();
    let outcome = stage
        .program(Mode::Run, Account::Ordinary, "grep")
        .args(["Seccomp_filters:", "/proc/self/status"])
        .run();
    outcome.assert_success();
    let native = stage
        .program(Mode::Native, Account::Ordinary, "grep")
        .args(["Seccomp_filters:", "/proc/self/status"])
        .run();
    assert_eq!(outcome.stdout, native.stdout);
}

/// The supervisor answers their calls of the device through a listener, which trace has not.
#[test]
fn a_static_program_is_let_run_blind_by_trace() {
    let stage = Stage::new();
    let fixed = stage.client(&Client::program("open-once-fixed", &["badly_used/open_once.c"]).fixed());
    let confine = stage.client(&Client::program("confine", &["badly_used/confine.c"]));
    let binary = stage.binary();
    for account in Account::available() {
        let native = || stage.program(Mode::Native, account, &binary);
        let outcome = native().args(["run", "--trap", "trace", "--"]).arg(&fixed).run();
        assert_eq!((outcome.code(), outcome.stdout.as_str()), (Some(125), ""), "{outcome}");
        assert!(
            outcome.stderr.contains("the layer trace gives the device to dynamic programs only"),
            "{outcome}"
        );
        // Without a listener there is trace alone.
        let program = stage.program(Mode::Native, account, &confine).arg("einval").arg(&binary);
        let outcome = program.args(["run", "--"]).arg(&fixed).run();
        assert_eq!((outcome.code(), outcome.stdout.as_str()), (Some(125), ""), "{outcome}");
        assert!(
            outcome.stderr.contains("statically linked")
                && outcome.stderr.contains("a listener: Invalid argument"),
            "{outcome}"
        );
        stage.assert_nothing_left();
        // What a traced program starts, whether or not it has opened the device, finds none, as without us.
        let outcome = native()
            .args(["run", "--trap", "trace", "--", "/bin/sh", "-c", "\"$0\"; exit 5"])
            .arg(&fixed)
            .run();
        assert_eq!(outcome.code(), Some(5), "{outcome}");
        assert!(outcome.stdout.starts_with("open: ENOENT\n"), "{outcome}");
        assert!(!outcome.stderr.contains("ummunotify:"), "{outcome}");
    }
}

#[test]
fn a_copy_that_is_forked_amid_an_open_of_a_static_program_misses_invalidations() {
    let stage = Stage::new();
    let amid = stage.client(&Client::program("amid", &["attack/amid.c"]).fixed());
    for account in Account::available() {
        let program = stage.program(Mode::Run, account, &amid).args(["forks", "5"]);
        let outcome = program.limit(Duration::from_secs(90)).run();
        outcome.assert_success();
        say(&format!("static, {account:?}: {}", outcome.stdout.trim_end()));
        assert!(outcome.stdout.ends_with(" missed=0 failed=0\n"), "{outcome}");
        assert!(!outcome.stdout.contains(" inherited=0 "), "{outcome}");
    }
}

/// The second one finds that what the process is known by isn't there, and means that it has executed another program.
#[test]
fn an_open_amid_another_one_makes_that_miss_invalidations() {
    let stage = Stage::new();
    let shell = stage.client(&Client::program("shell", &["static/shell.c"]).fixed());
    let amid = stage.client(&Client::program("amid", &["attack/amid.c"]));
    for account in Account::available() {
        let program = stage.program(Mode::Run, account, &shell).arg(&amid).arg("open");
        let outcome = program.limit(Duration::from_secs(90)).run();
        outcome.assert_success();
        // Once as the child of the static one, once in its place.
        let recorded = "stopped=1 acted=1 opener=1 other=1\n";
        assert_eq!(outcome.stdout, recorded.repeat(2), "{outcome}");
    }
}
