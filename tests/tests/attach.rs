//! `ummunotify attach` and `detach`: a program that runs already gets the device and loses it again, and works on,
//! whatever it does meanwhile and whoever dies.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use ummunotify_tests::{Account, Client, Mode, Outcome, Program, Running, Stage, go, say, skip};

/// Attaches and detaches of each program; `make attach` takes a hundred.
fn cycles() -> u32 {
    std::env::var("UMMUNOTIFY_ATTACH_CYCLES").ok().and_then(|n| n.parse().ok()).unwrap_or(5)
}

/// Reached only by what hangs, on a busy machine.
const LIMIT: Duration = Duration::from_secs(100);

fn program(name: &str) -> Client {
    Client::program(&format!("attach-{name}"), &[&format!("attach/{name}.c")])
}

/// The command without its process.
fn command<'a>(stage: &'a Stage, account: Account, word: &str, pid: i32) -> Program<'a> {
    stage.program(Mode::Native, account, stage.binary()).arg(word).arg(pid.to_string()).limit(LIMIT)
}

fn attach(stage: &Stage, account: Account, pid: i32) -> Outcome {
    let outcome = command(stage, account, "attach", pid).run();
    outcome.assert_success();
    assert!(outcome.stderr.is_empty(), "{outcome}");
    outcome
}

fn detach(stage: &Stage, account: Account, pid: i32) -> Outcome {
    let outcome = command(stage, account, "detach", pid).run();
    outcome.assert_success();
    outcome
}

/// A refusal: one line that says these words, and nothing was announced.
fn refused(outcome: &Outcome, words: &[&str]) {
    assert_eq!(outcome.code(), Some(1), "{outcome}");
    assert!(!outcome.timed_out && !outcome.output_held, "{outcome}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome}");
    for word in words {
        assert!(outcome.stderr.contains(word), "no '{word}': {outcome}");
    }
}

fn status(pid: i32, name: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_default().trim().to_owned()
}

fn filters(pid: i32) -> u32 {
    status(pid, "Seccomp_filters").parse().unwrap_or(0)
}

/// The one that is left once those have gone that had nothing to do.
fn one_supervisor(stage: &Stage) -> i32 {
    let start = Instant::now();
    loop {
        match stage.supervisors().as_slice() {
            [one] => return *one,
            others => assert!(start.elapsed() < LIMIT, "supervisors: {others:?}"),
        }
        sleep(Duration::from_millis(1));
    }
}

/// Attaches to a running program, waits until it has found the device, detaches, waits until it has lost it; so many
/// times. Then it must end well, under one filter.
fn cycle(stage: &Stage, account: Account, mut target: Running<'_>, rounds: u32, what: &str) {
    target.wait_for_line("ready");
    let pid = target.pid();
    let (before, start) = (filters(pid), Instant::now());
    let mut stopped = String::new();
    for round in 1..=rounds {
        let outcome = attach(stage, account, pid);
        if round == 1 {
            stopped = outcome.stdout.split("stopped for ").nth(1).unwrap_or_default().to_owned();
            let again = attach(stage, account, pid);
            assert!(again.stdout.contains("attached to already"), "{again}");
        } else {
            assert!(outcome.stdout.contains("attached again"), "{outcome}");
        }
        target.wait_for_line(&format!("device {round};"));
        detach(stage, account, pid);
        target.wait_for_line(&format!("lost {round};"));
    }
    let elapsed = start.elapsed();
    assert_eq!(filters(pid), before + 1, "filters of {what}");
    one_supervisor(stage);
    target.signal(Signal::SIGTERM);
    let outcome = target.finish();
    outcome.assert_success();
    assert!(outcome.stdout.ends_with("; 0 failures\n"), "{outcome}");
    let end = outcome.stdout.lines().last().unwrap_or_default();
    say(&format!(
        "attach, {what}, {account:?}: {rounds} cycles in {elapsed:.1?}, at first {}: {end}",
        stopped.split(';').next().unwrap_or_default()
    ));
    stage.assert_nothing_left();
}

fn cycle_load(client: &Client, threads: &str) {
    let stage = Stage::new();
    let load = stage.client(client);
    for account in Account::available() {
        let target = stage
            .program(Mode::Native, account, &load)
            .arg(threads)
            .limit(LIMIT + Duration::from_secs(2) * cycles())
            .spawn();
        cycle(&stage, account, target, cycles(), &format!("{} {threads}", load.display()));
    }
}

#[test]
fn cycles_of_a_threaded_program_under_load_change_a_result() {
    cycle_load(&program("load"), "cmvrefnpwd");
}

#[test]
fn cycles_under_signals_new_threads_and_forks_change_a_result() {
    cycle_load(&program("load"), "cmvrefnpwdstk");
}

#[test]
fn cycles_of_a_static_program_change_a_result() {
    cycle_load(&program("load").fixed(), "cmvrefnpwdstk");
}

#[test]
fn cycles_of_python_change_a_result() {
    let stage = Stage::new();
    // Where every account may read it; and what PATH has may be a script around the real one.
    let script = stage.work().join("load.py");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/load.py");
    std::fs::copy(&source, &script).unwrap_or_else(|e| panic!("{}: {e}", source.display()));
    for account in Account::available() {
        let target = stage
            .program(Mode::Native, account, "python3")
            .arg(&script)
            .env("PATH", "/usr/bin:/bin")
            .limit(LIMIT + Duration::from_secs(2) * cycles())
            .spawn();
        cycle(&stage, account, target, cycles(), "python3");
    }
}

#[test]
fn cycles_of_a_go_program_change_a_result() {
    if !go::is_available() {
        return skip("attaching to a program in Go", "no go: install golang-go");
    }
    let stage = Stage::new();
    let client = stage.go_program("load.go", None);
    for account in Account::available() {
        let target = stage
            .program(Mode::Native, account, &client)
            .limit(LIMIT + Duration::from_secs(2) * cycles())
            .spawn();
        cycle(&stage, account, target, cycles(), "Go");
    }
}

#[test]
fn what_cannot_be_undone_is_not_said_before() {
    let stage = Stage::new();
    let held = stage.client(&program("held"));
    for account in Account::available() {
        let mut target = stage.program(Mode::Native, account, &held).spawn();
        target.wait_for_line("ready");
        let outcome = attach(&stage, account, target.pid());
        let mut lines = outcome.stdout.lines();
        let first = lines.next().unwrap_or_default();
        assert!(first.contains("can't be removed") && first.contains("only parks it"), "{outcome}");
        let second = lines.next().unwrap_or_default();
        // Root's processes need none.
        let needs = account == Account::Ordinary;
        assert_eq!(second.contains("no_new_privs"), needs, "{outcome}");
        assert_eq!(status(target.pid(), "NoNewPrivs") == "1", needs, "{outcome}");
        assert!(
            outcome.stdout.lines().last().unwrap_or_default().contains("by the layer notify alone"),
            "{outcome}"
        );
        target.finish().assert_success();
    }
}

/// Sends words to `held` and waits for what each brings.
struct Dialogue<'a> {
    target: Running<'a>,
    step: usize,
}

impl Dialogue<'_> {
    fn send(&mut self, word: &str) {
        self.target.write_line(word);
        self.step += 1;
    }

    fn expect(&mut self, word: &str, answer: &str) {
        self.send(word);
        let line = self.target.wait_for_line(&format!("{} {word}", self.step - 1));
        assert_eq!(line, format!("{} {word}: {answer}", self.step - 1));
    }
}

/// What is open when its process is detached from says once that all is invalid, and then that it is over. It never
/// says that anything is up to date.
#[test]
fn a_device_that_was_detached_from_lets_something_be_taken_for_valid() {
    let stage = Stage::new();
    let held = stage.client(&program("held"));
    for account in Account::available() {
        let mut target = stage.program(Mode::Native, account, &held).spawn();
        target.wait_for_line("ready");
        let pid = target.pid();
        let mut held = Dialogue { target, step: 0 };
        held.expect("open", "ENOENT");
        attach(&stage, account, pid);
        for word in ["open", "map", "register", "unmap"] {
            held.expect(word, "ok");
        }
        held.expect("counter", "moved");
        held.expect("read", "1h LAST");
        held.expect("poll", "0");
        held.send("block");
        let block = held.step - 1;
        held.target.wait_for_line(&format!("{block} block: ok"));
        sleep(Duration::from_millis(100));

        let outcome = detach(&stage, account, pid);
        assert!(outcome.stdout.contains("its open context has reported everything as invalid"), "{outcome}");
        // The reader wakes with the records, and without a LAST.
        held.target.wait_for_line(&format!("{} blocking: 1 2", block + 1));
        held.expect("joined", "ok");
        held.expect("counter", "moved");
        held.expect("poll", "1");
        held.expect("read", "ENODEV");
        held.expect("read", "ENODEV");
        held.expect("poll", "1");
        held.expect("register", "ENODEV");
        held.expect("features", "ENODEV");
        held.expect("map", "ENODEV");
        held.expect("unregister", "ok");
        let again = command(&stage, account, "detach", pid).run();
        again.assert_success();
        assert!(again.stdout.contains("detached from already"), "{again}");

        // Served again it is a new device that works; the old one stays what it is.
        attach(&stage, account, pid);
        held.expect("read", "ENODEV");
        held.expect("close", "ok");
        for word in ["open", "map", "register", "unmap"] {
            held.expect(word, "ok");
        }
        held.expect("read", "1h LAST");
        held.target.finish().assert_success();
        stage.assert_nothing_left();
    }
}

#[test]
fn what_cannot_be_attached_to_is_refused_without_a_reason() {
    let stage = Stage::new();
    let odd = stage.client(&program("odd"));
    let try_it = |account, pid: i32| command(&stage, account, "attach", pid).run();
    let me = Account::available()[0];
    refused(&try_it(me, 1), &["process 1 starts every other process"]);
    refused(&try_it(me, i32::MAX), &["there is no process", "ESRCH"]);
    // No process can be called so.
    refused(&try_it(me, 0), &["there is no process"]);
    for word in ["attach", "detach"] {
        let outcome = stage.program(Mode::Native, me, stage.binary()).args([word, "-1"]).run();
        assert_eq!(outcome.code(), Some(2), "{outcome}");
        let outcome = stage.program(Mode::Native, me, stage.binary()).args([word, "none"]).run();
        assert_eq!(outcome.code(), Some(2), "{outcome}");
    }
    // The shell becomes it, under its own number.
    let outcome =
        stage.program(Mode::Native, me, "sh").args(["-c", "exec \"$0\" attach $$"]).arg(stage.binary()).run();
    refused(&outcome, &["is ummunotify itself"]);
    match kernel_thread() {
        Some(pid) => refused(&try_it(me, pid), &["thread of the kernel"]),
        None => skip("attaching to a thread of the kernel", "none is visible here"),
    }
    for account in Account::available() {
        for (kind, words) in [
            ("zombie", &["has ended already"][..]),
            ("leaderless", &["the first thread of process"]),
            ("traced", &["is traced by process", "odd"]),
            ("strict", &["strict seccomp mode"]),
            ("listener", if account == Account::Root { &["EBUSY"] } else { &["filter of its own"] }),
            ("divided", &["ESRCH"]),
        ] {
            let mut target = stage.program(Mode::Native, account, &odd).arg(kind).spawn();
            let line = target.wait_for_line("process");
            let pid: i32 = line.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
            if kind == "leaderless" {
                let start = Instant::now();
                while !status(pid, "State").starts_with('Z') {
                    assert!(start.elapsed() < LIMIT, "its first thread doesn't end");
                    sleep(Duration::from_millis(1));
                }
            }
            if kind == "strict" {
                let start = Instant::now();
                while status(pid, "Seccomp") != "1" {
                    assert!(start.elapsed() < LIMIT, "strict mode doesn't come");
                    sleep(Duration::from_millis(1));
                }
            }
            let outcome = try_it(account, pid);
            refused(&outcome, words);
            let outcome = command(&stage, account, "detach", pid).run();
            if kind != "zombie" {
                refused(&outcome, &["nobody has attached to process"]);
            }
            if kind == "leaderless" {
                target.signal(Signal::SIGKILL);
                target.finish();
            } else {
                target.finish().assert_success();
            }
        }
        let mut target = stage.program(Mode::Native, account, &odd).arg("thread").spawn();
        target.wait_for_line("process");
        let tid = other_thread(target.pid());
        refused(&try_it(account, tid), &["is a thread of process", &target.pid().to_string()]);
        target.finish().assert_success();
    }
    if Account::is_superuser() {
        let mut target = stage.program(Mode::Native, Account::Root, &odd).spawn();
        target.wait_for_line("process");
        refused(&try_it(Account::Ordinary, target.pid()), &["belongs to user 0", "be that user, or root"]);
        target.finish().assert_success();
        let mut target = stage.program(Mode::Native, Account::Ordinary, &odd).arg("undumpable").spawn();
        target.wait_for_line("process");
        refused(&try_it(Account::Ordinary, target.pid()), &["may not be looked into", "be root"]);
        target.finish().assert_success();
    } else {
        skip("attaching to another user's process", "the tests run without privileges");
    }
}

fn other_thread(pid: i32) -> i32 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    let ids = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.max().expect("a thread")
}

fn kernel_thread() -> Option<i32> {
    let entries = std::fs::read_dir("/proc").ok()?;
    let mut pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.find(|pid| status(*pid, "Name") == "kthreadd" || status(*pid, "Name").starts_with("kworker"))
}

#[test]
fn a_32_bit_process_is_attached_to() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c/attach/narrow.S");
    let stage = Stage::new();
    let narrow = stage.folder().join("bin/narrow");
    let built =
        Command::new("cc").args(["-m32", "-nostdlib", "-static", "-o"]).args([&narrow, &source]).output();
    if !built.as_ref().is_ok_and(|built| built.status.success()) {
        return skip("attaching to a 32-bit process", "cc -m32 doesn't work here");
    }
    let runs = Command::new(&narrow).stdin(Stdio::null()).output();
    if !runs.is_ok_and(|output| output.status.success()) {
        return skip("attaching to a 32-bit process", "this kernel runs no 32-bit program");
    }
    let mut target = stage.program(Mode::Native, Account::Ordinary, &narrow).spawn();
    target.wait_for_line("ready");
    refused(&command(&stage, Account::Ordinary, "attach", target.pid()).run(), &["is a 32-bit program"]);
    target.finish().assert_success();
}

/// A filter of somebody else might kill for the calls: it is set aside, or the process left alone.
#[test]
fn a_process_with_a_filter_of_its_own_is_killed() {
    let stage = Stage::new();
    let odd = stage.client(&program("odd"));
    for kind in ["filter", "deadly"] {
        for account in Account::available() {
            let mut target = stage.program(Mode::Native, account, &odd).arg(kind).spawn();
            target.wait_for_line("process");
            let pid = target.pid();
            let outcome = command(&stage, account, "attach", pid).run();
            if account == Account::Root && outcome.code() == Some(0) {
                assert_eq!(filters(pid), 2, "{outcome}");
            } else {
                refused(&outcome, &["seccomp filter of its own", "--despite-filter"]);
                assert_eq!(filters(pid), 1, "{outcome}");
                if kind == "filter" {
                    let outcome = command(&stage, account, "attach", pid).arg("--despite-filter").run();
                    outcome.assert_success();
                    assert_eq!(filters(pid), 2, "{outcome}");
                }
            }
            target.finish().assert_success();
            stage.assert_nothing_left();
        }
    }
}

#[test]
fn a_process_that_has_the_device_is_attached_to() {
    let stage = Stage::new();
    for client in [program("held"), program("held").fixed()] {
        let held = stage.client(&client);
        for account in Account::available() {
            let mut target =
                stage.program(Mode::Run, account, &held).env("UMMUNOTIFY_BACKEND", "emulated").spawn();
            target.wait_for_line("ready");
            let pid = target.pid();
            let mut held = Dialogue { target, step: 0 };
            for opened in [false, true] {
                if opened {
                    held.expect("open", "ok");
                    held.expect("register", "ok");
                }
                let before = filters(pid);
                let outcome = command(&stage, account, "attach", pid).run();
                refused(&outcome, &["finds /dev/ummunotify without this"]);
                assert_eq!(filters(pid), before);
                let outcome = command(&stage, account, "detach", pid).run();
                assert_eq!(outcome.code(), Some(1), "{outcome}");
            }
            held.expect("unmap", "ok");
            held.expect("read", "1h LAST");
            held.target.finish().assert_success();
        }
    }
}

/// A thread that can't be stopped doesn't matter, as long as another can; nor that the process is stopped.
#[test]
fn threads_that_do_not_run_are_in_the_way() {
    let stage = Stage::new();
    let odd = stage.client(&program("odd"));
    for account in Account::available() {
        let mut target = stage.program(Mode::Native, account, &odd).arg("vfork").spawn();
        target.wait_for_line("process");
        attach(&stage, account, target.pid());
        assert_eq!(filters(other_thread(target.pid())), 1);
        detach(&stage, account, target.pid());
        target.signal(Signal::SIGKILL);
        assert_eq!(target.finish().signal(), Some(Signal::SIGKILL as i32));
        stage.assert_nothing_left();
        let held = stage.client(&program("held"));
        let mut target = stage.program(Mode::Native, account, &held).spawn();
        target.wait_for_line("ready");
        target.signal(Signal::SIGSTOP);
        let state = |pid| status(pid, "State").chars().next();
        let start = Instant::now();
        while state(target.pid()) != Some('T') {
            assert!(start.elapsed() < LIMIT, "it doesn't stop");
            sleep(Duration::from_millis(1));
        }
        attach(&stage, account, target.pid());
        let start = Instant::now();
        while state(target.pid()) != Some('T') {
            assert!(start.elapsed() < LIMIT, "it isn't stopped any more: {:?}", state(target.pid()));
            sleep(Duration::from_millis(1));
        }
        target.signal(Signal::SIGCONT);
        let mut held = Dialogue { target, step: 0 };
        held.expect("open", "ok");
        held.target.finish().assert_success();
        stage.assert_nothing_left();
    }
}

/// Whoever attaches may be killed at any moment: the program goes on, and can be attached to again.
#[test]
fn a_program_breaks_when_the_attaching_is_killed() {
    let stage = Stage::new();
    let load = stage.client(&program("load"));
    for account in Account::available() {
        let mut outcomes = [0; 3];
        // The command first, then the new supervisor, which does the work.
        for round in 0..(4 * cycles()) {
            let mut target = stage.program(Mode::Native, account, &load).arg("cnprfv").limit(LIMIT).spawn();
            target.wait_for_line("ready");
            let pid = target.pid();
            let mut attaching = command(&stage, account, "attach", pid).spawn();
            let pause = Duration::from_micros(u64::from(round / 2 % 16) * 200);
            if round % 2 == 0 {
                sleep(Duration::from_millis(1) + pause);
                attaching.signal(Signal::SIGKILL);
                attaching.finish();
            } else {
                let start = Instant::now();
                // The one that has no parent of ours: it comes as a copy of the command.
                let supervisor = loop {
                    let found = stage.supervisors().into_iter().find(|p| *p != attaching.pid());
                    match found {
                        Some(supervisor) => break Some(supervisor),
                        None if start.elapsed() > LIMIT => break None,
                        None => {}
                    }
                };
                sleep(pause);
                let supervisor = supervisor.expect("a supervisor comes");
                let _ = kill(Pid::from_raw(supervisor), Signal::SIGKILL);
                attaching.close_stdin();
                attaching.finish();
            }
            // Whatever was reached: another attach brings it to its end.
            let mut again = command(&stage, account, "attach", pid);
            if filters(pid) > 0 {
                // The filter of a dead supervisor is one that only the user knows to be harmless.
                again = again.arg("--despite-filter");
            }
            let again = again.run();
            again.assert_success();
            outcomes[filters(pid) as usize] += 1;
            target.signal(Signal::SIGTERM);
            let outcome = target.finish();
            // While nobody answered, its mapping calls failed: that it says. Nothing else may be wrong.
            let wrong: Vec<_> = outcome
                .stdout
                .lines()
                .filter(|line| line.starts_with("FAIL") && !line.contains("Function not implemented"))
                .collect();
            assert!(
                wrong.is_empty() && !outcome.timed_out && outcome.signal().is_none(),
                "round {round}: {outcome}"
            );
        }
        say(&format!(
            "attach, {account:?}: {} killed attaches; filters in the end: one {}, two {}",
            4 * cycles(),
            outcomes[1],
            outcomes[2]
        ));
        stage.assert_nothing_left();
    }
}

/// A new listener wins over a dead one.
#[test]
fn a_killed_supervisor_leaves_a_process_that_cannot_be_attached_to() {
    let stage = Stage::new();
    let held = stage.client(&program("held"));
    for account in Account::available() {
        for parked in [false, true] {
            let mut target = stage.program(Mode::Native, account, &held).spawn();
            target.wait_for_line("ready");
            let pid = target.pid();
            let mut held = Dialogue { target, step: 0 };
            attach(&stage, account, pid);
            held.expect("open", "ok");
            held.expect("register", "ok");
            if parked {
                detach(&stage, account, pid);
            }
            kill(Pid::from_raw(one_supervisor(&stage)), Signal::SIGKILL).expect("it is ours");
            let start = Instant::now();
            while !stage.supervisors().is_empty() {
                assert!(start.elapsed() < LIMIT, "it doesn't die");
                sleep(Duration::from_millis(1));
            }
            held.expect("unmap", "ENOSYS");
            held.expect("open", "ENOSYS");
            refused(&command(&stage, account, "detach", pid).run(), &["nobody has attached to process"]);
            command(&stage, account, "attach", pid).arg("--despite-filter").run().assert_success();
            for word in ["unmap", "open", "register", "map"] {
                held.expect(word, "ok");
            }
            assert_eq!(filters(pid), 2);
            detach(&stage, account, pid);
            held.expect("read", "1 2");
            held.expect("read", "ENODEV");
            held.target.finish().assert_success();
            stage.assert_nothing_left();
        }
    }
}

#[test]
fn two_who_attach_at_once_are_in_each_others_way() {
    let stage = Stage::new();
    let load = stage.client(&program("load"));
    for account in Account::available() {
        for _ in 0..(2 * cycles()) {
            let mut target = stage.program(Mode::Native, account, &load).arg("cefd").limit(LIMIT).spawn();
            target.wait_for_line("ready");
            let pid = target.pid();
            let attaching: Vec<_> = (0..3).map(|_| command(&stage, account, "attach", pid).spawn()).collect();
            let outcomes: Vec<_> = attaching.into_iter().map(Running::finish).collect();
            outcomes.iter().for_each(Outcome::assert_success);
            let first = outcomes.iter().filter(|o| o.stdout.contains("by the layer notify alone")).count();
            assert_eq!(first, 1, "{outcomes:?}");
            target.wait_for_line("device 1;");
            assert_eq!(filters(pid), 1);
            one_supervisor(&stage);
            target.signal(Signal::SIGTERM);
            target.finish().assert_success();
            stage.assert_nothing_left();
        }
    }
}

#[test]
fn a_process_that_is_killed_meanwhile_leaves_something() {
    let stage = Stage::new();
    let load = stage.client(&program("load"));
    for account in Account::available() {
        for round in 0..(4 * cycles()) {
            let mut target = stage.program(Mode::Native, account, &load).arg("cmefd").limit(LIMIT).spawn();
            target.wait_for_line("ready");
            let attaching = command(&stage, account, "attach", target.pid()).spawn();
            sleep(Duration::from_micros(1000 + u64::from(round) * 300));
            target.signal(Signal::SIGKILL);
            let outcome = attaching.finish();
            assert!(!outcome.timed_out && !outcome.output_held, "{outcome}");
            match outcome.code() {
                Some(0) => {}
                Some(1) => assert!(
                    ["ended", "no process", "was stopped"].iter().any(|word| outcome.stderr.contains(word)),
                    "{outcome}"
                ),
                _ => panic!("{outcome}"),
            }
            assert_eq!(target.finish().signal(), Some(Signal::SIGKILL as i32));
        }
        stage.assert_nothing_left();
    }
}

/// What an attached process executes, and what that starts, has the device as well; the whole interface holds for a
/// dynamic program so.
#[test]
fn a_program_that_an_attached_process_executes_lacks_something_of_the_device() {
    // As for a static program under `run`.
    const GAPS: [&str; 7] = [
        "call_open_lowest_free_number",
        "call_open_path_looks_like_a_device",
        "call_scm_rights_in_flight_is_a_reference",
        "call_scm_rights_to_a_child",
        "call_scm_rights_to_another_program",
        "call_scm_rights_to_oneself",
        "proc_spawned_program_has_it_as_standard_input",
    ];
    let stage = Stage::new();
    let suite = stage.client(&Client::interface_suite());
    let account = Account::Ordinary;
    let mut target = stage
        .program(Mode::Native, account, "sh")
        .args(["-c", "echo ready; read line; exec \"$0\" \"$@\""])
        .arg(&suite)
        .args(["--emulated", "--numbers", "960", "--without", "departure_3_a_million_regions"])
        .limit(Duration::from_secs(240))
        .spawn();
    target.wait_for_line("ready");
    attach(&stage, account, target.pid());
    target.write_line("go on");
    let outcome = target.finish();
    let failed: Vec<_> = outcome
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("FAIL "))
        .filter(|line| !GAPS.contains(&line.split('.').next().unwrap_or_default()))
        .collect();
    assert!(failed.is_empty() && !outcome.timed_out, "{}\n{}", failed.join("\n"), outcome.stderr);
    let checks = outcome.stdout.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(checks >= 1900, "only {checks} checks: {outcome}");
}

/// A process and whoever attaches to it in a pid namespace of their own.
#[test]
fn a_process_in_a_pid_namespace_cannot_be_attached_to() {
    let nested = ["--pid", "--fork", "--mount-proc", "--kill-child"];
    if !Account::is_superuser()
        || !Command::new("unshare").args(nested).arg("true").status().is_ok_and(|s| s.success())
    {
        return skip("attaching in a pid namespace", "unshare --pid --fork --mount-proc doesn't work here");
    }
    let stage = Stage::new();
    let load = stage.client(&program("load"));
    let script = "\"$1\" cvd > out & \
        until grep -q ready out; do sleep 0.01; done; \
        \"$0\" attach $! && until grep -q '^device 1;' out; do sleep 0.01; done && \
        \"$0\" detach $! && until grep -q '^lost 1;' out; do sleep 0.01; done && \
        kill $! && wait $! && tail -n 1 out";
    let outcome = stage
        .program(Mode::Native, Account::Root, "unshare")
        .args(nested)
        .args(["sh", "-c", script])
        .arg(stage.binary())
        .arg(&load)
        .limit(LIMIT)
        .run();
    outcome.assert_success();
    assert!(outcome.stdout.ends_with("; 0 failures\n"), "{outcome}");
    stage.assert_nothing_left();
}

/// Where `cost` measures, by its lines.
fn measure(target: &mut Running<'_>, round: usize) -> Vec<(String, f64)> {
    target.write_line("measure");
    let line = target.wait_for_line(&format!("{round} "));
    let words: Vec<_> = line.split(' ').skip(1).collect();
    words.chunks(2).map(|pair| (pair[0].to_owned(), pair[1].parse().expect("a figure"))).collect()
}

/// Says what an attached and what a parked process pays, as ratios to a process beside it that was never attached to.
#[test]
fn a_parked_process_pays_for_calls_that_are_not_trapped() {
    const ROUNDS: usize = 15;
    let stage = Stage::new();
    let cost: PathBuf = stage.client(&program("cost"));
    let account = Account::Ordinary;
    let spawn = || {
        let mut target = stage.program(Mode::Native, account, &cost).limit(LIMIT).spawn();
        target.wait_for_line("ready");
        target
    };
    let (mut native, mut target) = (spawn(), spawn());
    attach(&stage, account, target.pid());
    let mut round = 0;
    for state in ["attached", "parked"] {
        if state == "parked" {
            detach(&stage, account, target.pid());
        }
        let mut ratios: Vec<(String, Vec<f64>, Vec<f64>)> = Vec::new();
        for _ in 0..ROUNDS {
            let (plain, with) = (measure(&mut native, round), measure(&mut target, round));
            round += 1;
            for (i, ((name, plain), (_, with))) in plain.into_iter().zip(with).enumerate() {
                if ratios.len() <= i {
                    ratios.push((name, Vec::new(), Vec::new()));
                }
                ratios[i].1.push(with / plain);
                ratios[i].2.push(with - plain);
            }
        }
        for (name, mut ratios, mut more) in ratios {
            ratios.sort_by(f64::total_cmp);
            more.sort_by(f64::total_cmp);
            let (low, middle, high) = (ratios[ROUNDS / 4], ratios[ROUNDS / 2], ratios[3 * ROUNDS / 4]);
            say(&format!(
                "{state}: {name} {middle:.2} times native ({low:.2} to {high:.2}), {:.2} us more",
                more[ROUNDS / 2] / 1e3
            ));
        }
        // What isn't trapped passes the filter alone: it is made although nobody could let it go on.
        let supervisor = Pid::from_raw(one_supervisor(&stage));
        kill(supervisor, Signal::SIGSTOP).expect("the supervisor can be stopped");
        target.write_line("untrapped");
        target.wait_for_line("untrapped");
        kill(supervisor, Signal::SIGCONT).expect("the supervisor goes on");
    }
    native.finish().assert_success();
    target.finish().assert_success();
}
