//! `ummunotify switch` on a host without the kernel module: what is refused, in what words, and that the program
//! that was asked notices nothing. The moves themselves are made in the guest (tests/guest).

use nix::sys::signal::Signal;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use ummunotify_tests::{Account, Client, Mode, Outcome, Running, Stage, skip};

fn switching(stage: &Stage) -> PathBuf {
    stage.client(&Client::program("switching", &["switch/switching.c"]))
}

/// `ummunotify switch ARGS`, by `account`.
fn switch(stage: &Stage, account: Account, args: &[&str]) -> Outcome {
    stage.program(Mode::Native, account, stage.binary()).arg("switch").args(args).run()
}

fn refused(outcome: &Outcome, words: &[&str]) {
    assert_eq!(outcome.code(), Some(1), "{outcome}");
    assert!(outcome.stdout.is_empty(), "{outcome}");
    // One line, whole.
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome}");
    for word in words {
        assert!(outcome.stderr.contains(word), "no '{word}': {outcome}");
    }
}

/// Starts `switching WHAT`, emulated.
fn start<'a>(stage: &'a Stage, mode: Mode, account: Account, what: &str) -> (Running<'a>, String) {
    let mut client = stage
        .program(mode, account, switching(stage))
        .arg(what)
        .env("UMMUNOTIFY_BACKEND", "emulated")
        .limit(Duration::from_secs(90))
        .spawn();
    client.wait_for_line(if what == "quiet" { "quiet" } else { "process" });
    let pid = client.pid().to_string();
    (client, pid)
}

fn module_is_here(what: &str) -> bool {
    let here = Path::new("/dev/ummunotify").exists();
    if here {
        skip(what, "the kernel module is loaded here");
    }
    here
}

#[test]
fn without_the_module_a_switch_is_refused_and_nobody_notices() {
    if module_is_here("the refusal of a switch without the module") {
        return;
    }
    let stage = Stage::new();
    for account in Account::available() {
        for mode in Mode::EMULATED {
            for what in ["load", "waiters"] {
                let (client, pid) = start(&stage, mode, account, what);
                for _ in 0..5 {
                    let outcome = switch(&stage, account, &[&pid, "kmod"]);
                    refused(
                        &outcome,
                        &["open /dev/ummunotify in the process: ENOENT", "load the kernel module"],
                    );
                }
                sleep(Duration::from_millis(100));
                client.signal(Signal::SIGTERM);
                let outcome = client.finish();
                outcome.assert_success();
                assert!(outcome.stdout.ends_with("ok: 0 failures\n"), "{outcome}");
            }
        }
    }
}

#[test]
fn a_request_that_nobody_answers_is_withdrawn() {
    let stage = Stage::new();
    for mode in Mode::EMULATED {
        let (mut client, pid) = start(&stage, mode, Account::Ordinary, "quiet");
        let began = Instant::now();
        let outcome = switch(&stage, Account::Ordinary, &[&pid, "kmod", "--deadline", "1"]);
        refused(&outcome, &["wait for a call of the process on its device: ETIMEDOUT", "withdrawn"]);
        assert!((1..10).contains(&began.elapsed().as_secs()), "{outcome}");
        client.write_line("go on");
        let outcome = client.finish();
        outcome.assert_success();
        // One declaration that everything is invalid, and no second one for a device that came late.
        assert!(outcome.stdout.contains("counter 1\n"), "{outcome}");
    }
}

#[test]
fn two_switches_of_one_context_take_turns() {
    let stage = Stage::new();
    let (mut client, pid) = start(&stage, Mode::Run, Account::Ordinary, "quiet");
    let first = stage
        .program(Mode::Native, Account::Ordinary, stage.binary())
        .args(["switch", &pid, "kmod", "--deadline", "100"])
        .spawn();
    // Which of two comes first is left to the machine; the second one that comes while the first waits is told.
    let busy = "another switch of the same context: EBUSY";
    let told = (0..30).any(|_| {
        let outcome = switch(&stage, Account::Ordinary, &[&pid, "kmod", "--deadline", "1"]);
        assert_eq!(outcome.code(), Some(1), "{outcome}");
        outcome.stderr.contains(busy)
    });
    assert!(told, "nobody was told `{busy}`");
    first.signal(Signal::SIGKILL);
    first.finish();
    client.write_line("go on");
    client.finish().assert_success();
}

#[test]
fn where_the_contexts_are_already_is_no_error() {
    let stage = Stage::new();
    let (mut client, pid) = start(&stage, Mode::Run, Account::Ordinary, "quiet");
    for account in Account::available() {
        let outcome = switch(&stage, account, &[&pid, "emulated"]);
        outcome.assert_success();
        assert_eq!(outcome.stdout, format!("process {pid}: 1 context on emulated already\n"));
    }
    // Nothing was declared invalid for it: the client fails, and says so.
    client.write_line("go on");
    let outcome = client.finish();
    assert!(outcome.stdout.contains("counter 0\n"), "{outcome}");
}

#[test]
fn another_users_process_is_not_switched() {
    if !Account::is_superuser() {
        skip("a switch of another user's process", "the tests run without privileges");
        return;
    }
    let stage = Stage::new();
    let (mut client, pid) = start(&stage, Mode::Run, Account::Root, "quiet");
    let words = ["switch another user's process: EPERM", "be that user, or root"];
    for backend in ["kmod", "emulated"] {
        refused(&switch(&stage, Account::Ordinary, &[&pid, backend]), &words);
    }
    client.write_line("go on");
    let outcome = client.finish();
    assert!(outcome.stdout.contains("counter 0\n"), "{outcome}");
}

#[test]
fn what_cannot_switch_is_told_why() {
    let stage = Stage::new();
    let nothing = stage.program(Mode::Native, Account::Ordinary, "sleep").arg("60").spawn();
    let pid = nothing.pid().to_string();
    let outcome = switch(&stage, Account::Ordinary, &[&pid, "kmod"]);
    refused(&outcome, &["no supervisor here serves process", "hasn't opened /dev/ummunotify"]);
    drop(nothing);
    refused(&switch(&stage, Account::Ordinary, &["4194305", "kmod"]), &["process 4194305: ESRCH"]);

    for args in [&["1"][..], &["1", "module"], &["no", "kmod"], &["1", "kmod", "--deadline", "3601"]] {
        assert_eq!(switch(&stage, Account::Ordinary, args).code(), Some(2), "{args:?}");
    }
}

/// Whoever dies, the rest goes on or ends, at once.
#[test]
fn deaths_during_a_switch_hang_nobody() {
    let stage = Stage::new();
    let begin = |pid: &str| {
        let program = stage.program(Mode::Native, Account::Ordinary, stage.binary());
        let running = program.args(["switch", pid, "kmod", "--deadline", "50"]).spawn();
        sleep(Duration::from_millis(500));
        running
    };

    // The process.
    let (client, pid) = start(&stage, Mode::Run, Account::Ordinary, "quiet");
    let asking = begin(&pid);
    let killed = Instant::now();
    client.signal(Signal::SIGKILL);
    refused(&asking.finish(), &["reach the process: ESRCH"]);
    drop(client);
    stage.assert_nothing_left();
    assert!(killed.elapsed() < Duration::from_secs(10));

    // The supervisor.
    let (client, pid) = start(&stage, Mode::Run, Account::Ordinary, "quiet");
    let asking = begin(&pid);
    let killed = Instant::now();
    let others = [client.pid(), asking.pid()];
    for supervisor in stage.supervisors().into_iter().filter(|pid| !others.contains(pid)) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(supervisor), Signal::SIGKILL).unwrap();
    }
    refused(&asking.finish(), &["no supervisor here serves process"]);
    assert!(killed.elapsed() < Duration::from_secs(10));
    drop(client);

    // Whoever asks: the request stands until its deadline, or the process's end.
    let (client, pid) = start(&stage, Mode::Run, Account::Ordinary, "quiet");
    drop(begin(&pid));
    client.signal(Signal::SIGKILL);
    drop(client);
    stage.assert_nothing_left();
}
