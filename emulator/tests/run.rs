//! `ummunotify run` as a user meets it: bad use gets a short error and the exit code that shells use, and a
//! command that runs is what it would have been without.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const BINARY: &str = env!("CARGO_BIN_EXE_ummunotify");
const SHIM: &str = ummunotify_abi::config::SHIM_FILE;

/// A folder of the test's own, gone at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ummunotify-run-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// An executable file.
    fn program(&self, name: &str, content: &[u8]) -> PathBuf {
        let (data, path) = (self.0.join(format!("{name}.data")), self.0.join(name));
        fs::write(&data, content).unwrap();
        copy(&data, &path);
        path
    }

    /// The binary, copied to where nothing else of the project stands, and with a cache of its own.
    fn lonely(&self, directory: &str) -> Command {
        let bin = self.0.join(directory);
        fs::create_dir_all(&bin).unwrap();
        let copy = bin.join("ummunotify");
        self::copy(Path::new(BINARY), &copy);
        let mut command = Command::new(copy);
        command.env("XDG_CACHE_HOME", self.0.join("cache")).env("HOME", "/nonexistent");
        command
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes an executable by another process's hand: had this one the file open for writing, a child that another
/// test's thread forks meanwhile would hold it open, and executing it would answer ETXTBSY.
fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg(from).arg(to).status().unwrap().success());
    fs::set_permissions(to, fs::Permissions::from_mode(0o755)).unwrap();
}

fn run(arguments: &[&str]) -> Output {
    Command::new(BINARY).arg("run").args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// One line, from this program, with that word in it.
#[track_caller]
fn assert_refused(output: &Output, code: i32, word: &str) {
    let text = said(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.starts_with("ummunotify: ") && text.contains(word), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[test]
fn a_command_that_cannot_be_executed_gets_the_exit_code_that_shells_use() {
    let scratch = Scratch::new("codes");
    assert_refused(&run(&[]), 2, "run needs a command");
    assert_refused(&run(&["--"]), 2, "run needs a command");
    assert_refused(&run(&["no-such-command-here"]), 127, "no-such-command-here");
    assert_refused(&run(&["/no/such/file"]), 127, "No such file");
    assert_refused(&run(&["/etc/passwd"]), 126, "chmod +x");
    assert_refused(&run(&["/"]), 126, "directory");
    let script = scratch.program("script", b"#!/no/such/interpreter\n");
    assert_refused(&run(&[script.to_str().unwrap()]), 126, "/no/such/interpreter");
    let unknown = run(&["--unknown", "--", "true"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(said(&unknown).contains("--unknown"));
}

#[test]
fn options_that_mean_nothing_are_refused() {
    let there_are = "there are the layers inline, notify, fault, trace, and auto";
    assert_refused(&run(&["--trap", "inner", "--", "true"]), 2, there_are);
    assert_refused(&run(&["--trap", "inline", "--", "true"]), 2, "inline needs notify");
    assert_refused(&run(&["--trap", "inline,fault", "--", "true"]), 2, "inline needs notify");
    assert_refused(
        &run(&["--trap", "trace,notify", "--", "true"]),
        2,
        "trace and notify would stop the same calls",
    );
    assert_refused(&run(&["--trap", "inline,trace", "--", "true"]), 2, "can't be had with trace");
    assert_refused(&run(&["--io-uring", "no", "--", "true"]), 2, "watch, deny");
    assert_refused(&run(&["--log-file", "/no/such/folder/x", "--", "true"]), 125, "can't be written");
    for arguments in [["--backend", "module"], ["--log", "loud"]] {
        let output = Command::new(BINARY).arg("run").args(arguments).args(["--", "true"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(arguments[1]));
    }
    let output =
        Command::new(BINARY).args(["run", "true"]).env("UMMUNOTIFY_BACKEND", "module").output().unwrap();
    assert_refused(&output, 2, "UMMUNOTIFY_BACKEND");
    if !Path::new(ummunotify_abi::device::PATH).exists() {
        assert_refused(&run(&["--backend", "kmod", "true"]), 125, "isn't loaded");
    }
}

/// The head of an ELF file without program headers.
fn elf(class: u8, machine: u8) -> Vec<u8> {
    let mut bytes = vec![0u8; 64];
    bytes[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1, 1]);
    bytes[16..20].copy_from_slice(&[2, 0, machine, 0]);
    bytes
}

#[test]
fn programs_for_other_machines_are_refused_with_a_sentence() {
    let scratch = Scratch::new("foreign");
    let i386 = scratch.program("i386", &elf(1, 3));
    assert_refused(&run(&[i386.to_str().unwrap()]), 126, "is a 32-bit program");
    let arm = scratch.program("arm64", &elf(2, 183));
    assert_refused(&run(&[arm.to_str().unwrap()]), 126, "another machine");
}

/// A whole static program: `exit(7)`.
fn static_program() -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    let code = [0xb8, 60, 0, 0, 0, 0xbf, 7, 0, 0, 0, 0x0f, 0x05]; // mov $60,%eax; mov $7,%edi; syscall
    let mut bytes = elf(2, 62);
    bytes[20] = 1;
    bytes[24..32].copy_from_slice(&(BASE + 120).to_le_bytes()); // entry
    bytes[32] = 64; // program headers behind this one
    bytes[52] = 64;
    bytes[54] = 56;
    bytes[56] = 1;
    let size = 120 + code.len() as u64;
    let mut header = vec![1, 0, 0, 0, 5, 0, 0, 0]; // PT_LOAD, readable and executable
    for field in [0, BASE, BASE, size, size, 0x1000] {
        header.extend(field.to_le_bytes());
    }
    bytes.extend(header);
    bytes.extend(code);
    bytes
}

#[test]
fn a_static_program_runs_as_it_is() {
    let scratch = Scratch::new("static");
    let program = scratch.program("static", &static_program());
    let output = run(&["--backend", "emulated", program.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert!(output.stderr.is_empty() && output.stdout.is_empty(), "{output:?}");
}

#[test]
fn a_set_user_id_program_runs_after_a_notice() {
    let scratch = Scratch::new("setuid");
    let program = scratch.program("true", &fs::read("/bin/true").unwrap());
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED set-user-ID notice: only root can make a file that belongs to somebody else");
        return;
    }
    std::os::unix::fs::chown(&program, Some(65534), None).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    let output = run(&[program.to_str().unwrap()]);
    assert_refused(&output, 0, "set-user-ID");
}

/// What a classic filter does to seccomp(2).
fn filter(program: &mut [libc::sock_filter], flags: libc::c_ulong) -> std::io::Result<()> {
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the filter lives across the calls, which concern this process alone.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let set = libc::SECCOMP_SET_MODE_FILTER;
        let answer = libc::syscall(libc::SYS_seccomp, set, flags, &raw const program);
        if answer < 0 {
            return Err(std::io::Error::last_os_error());
        }
        if flags & libc::SECCOMP_FILTER_FLAG_NEW_LISTENER != 0 {
            libc::fcntl(answer as i32, libc::F_SETFD, 0); // it would be gone after exec
        }
    }
    Ok(())
}

fn op(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

/// This program where these system calls answer that errno.
fn where_calls_answer(calls: [i64; 2], errno: i32, arguments: &[&str]) -> Output {
    let mut command = Command::new(BINARY);
    command.args(arguments);
    let mut program = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, 0, calls[0] as u32),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, calls[1] as u32),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: two system calls, which may be made between fork and exec.
    unsafe { command.pre_exec(move || filter(&mut program, 0)) };
    command.output().unwrap()
}

/// This program where seccomp(2) answers that errno.
fn where_seccomp_answers(errno: i32, arguments: &[&str]) -> Output {
    where_calls_answer([libc::SYS_seccomp; 2], errno, arguments)
}

#[test]
fn a_kernel_without_user_notification_is_told_with_what_to_do() {
    let run = ["run", "--backend", "emulated", "--trap", "notify", "true"];
    let refused = where_seccomp_answers(libc::EPERM, &run);
    assert_refused(&refused, 125, "allow seccomp(2)");
    assert!(said(&refused).contains("EPERM"));
    let absent = where_seccomp_answers(libc::ENOSYS, &run);
    assert_refused(&absent, 125, "Linux 5.5 or newer");
    assert!(said(&absent).contains("ENOSYS"));
    // Where nothing else was asked for, the other layer does it; where that can't be had either, both are named.
    let run = ["run", "--backend", "emulated", "true"];
    assert_eq!(where_seccomp_answers(libc::EPERM, &run).status.code(), Some(0));
    let neither = where_calls_answer([libc::SYS_seccomp, libc::SYS_ptrace], libc::EPERM, &run);
    assert_refused(&neither, 125, "allow seccomp(2)");
    assert!(said(&neither).contains("allow ptrace(2)"), "{}", said(&neither));
}

#[test]
fn doctor_says_whether_run_works_here() {
    let output = Command::new(BINARY).arg("doctor").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("\n`ummunotify run` works here"), "{text}");
    if !Path::new(ummunotify_abi::device::PATH).exists() {
        let output = where_seccomp_answers(libc::EPERM, &["doctor"]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0), "{text}");
        assert!(text.contains("with the emulator, layer trace") && text.contains("no: EPERM"), "{text}");
        let calls = [libc::SYS_seccomp, libc::SYS_ptrace];
        let output = where_calls_answer(calls, libc::EPERM, &["doctor"]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("doesn't work here. Missing: listener"), "{text}");
    }
}

#[test]
fn somebody_elses_listener_is_told_with_what_to_do() {
    let mut command = Command::new(BINARY);
    command.args(["run", "--backend", "emulated", "--trap", "notify", "true"]);
    let mut program = [op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW)];
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    // SAFETY: two system calls, which may be made between fork and exec.
    unsafe { command.pre_exec(move || filter(&mut program, flags)) };
    let output = command.output().unwrap();
    assert_refused(&output, 125, "already holds the one seccomp listener");
    assert!(said(&output).contains("EBUSY"));
}

#[test]
fn the_one_file_is_enough() {
    let scratch = Scratch::new("lonely");
    for _ in 0..2 {
        let output = scratch.lonely("bin").args(["run", "sh", "-c", "echo $LD_PRELOAD"]).output().unwrap();
        assert_eq!(said(&output), "");
        let preloaded = String::from_utf8(output.stdout).unwrap();
        let path = Path::new(preloaded.trim());
        assert!(path.starts_with(scratch.0.join("cache/ummunotify")) && path.ends_with(SHIM), "{preloaded}");
        assert_eq!(fs::read(path).unwrap(), ummunotify::shimfile::EMBEDDED);
    }
    let blank = scratch.lonely("a b").args(["run", "true"]).output().unwrap();
    assert_eq!((blank.status.code(), said(&blank)), (Some(0), String::new()));
}

#[test]
fn an_unusable_library_is_an_error_and_not_silence() {
    let scratch = Scratch::new("unusable");
    let mut command = scratch.lonely("bin");
    let beside = scratch.0.join("bin").join(SHIM);
    fs::write(&beside, "not a library").unwrap();
    let output = command.args(["run", "true"]).output().unwrap();
    assert_refused(&output, 125, "isn't an x86-64 ELF library");
    fs::write(&beside, ummunotify::shimfile::EMBEDDED).unwrap();
    fs::set_permissions(&beside, fs::Permissions::from_mode(0o0)).unwrap();
    let mut command = Command::new(scratch.0.join("bin/ummunotify"));
    command.args(["run", "true"]);
    if nix::unistd::geteuid().is_root() {
        fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o755)).unwrap();
        command.uid(65534).gid(65534); // root may read anything
    }
    assert_refused(&command.output().unwrap(), 125, "Permission denied");
}

/// What the shell says about itself, without and with `run`.
fn both(script: &str) -> (Output, Output) {
    let plain = Command::new("sh").args(["-c", script]).output().unwrap();
    let under = Command::new(BINARY).args(["run", "sh", "-c", script]).output().unwrap();
    (plain, under)
}

#[test]
fn signals_descriptors_limits_and_exit_codes_are_inherited_untouched() {
    for script in [
        "grep -E '^(SigBlk|SigIgn|SigCgt|NoNewPrivs|Seccomp|Threads|TracerPid)' /proc/self/status",
        "ls /proc/self/fd",
        "ulimit -a; umask; pwd",
        "exit 42",
    ] {
        let (plain, under) = both(script);
        assert_eq!(under, plain, "{script}");
    }
    let (plain, under) = both("kill -TERM $$");
    assert_eq!((plain.status.signal(), under.status.signal()), (Some(15), Some(15)));
}

#[test]
fn the_command_keeps_the_pid() {
    let mut command = Command::new(BINARY);
    let child = command.args(["run", "sh", "-c", "echo $$"]).stdout(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), pid.to_string());
}

#[test]
fn a_file_without_a_first_line_runs_in_the_shell() {
    let scratch = Scratch::new("text");
    let script = scratch.program("text", b"echo $1; exit 3\n");
    let output = run(&[script.to_str().unwrap(), "--word"]);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(3), &b"--word\n"[..]));
}

#[test]
fn what_was_preloaded_before_stays() {
    let output = Command::new(BINARY)
        .args(["run", "--backend", "emulated", "--log", "info", "--stats", "env"])
        .env("LD_PRELOAD", "libc.so.6 libm.so.6")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let value =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(&format!("{name}="))).unwrap_or("");
    assert!(value("LD_PRELOAD").ends_with(&format!("{SHIM}:libc.so.6:libm.so.6")), "{text}");
    assert_eq!(value("UMMUNOTIFY_BACKEND"), "emulated");
    assert_eq!(value("UMMUNOTIFY_LOG"), "info");
    assert_eq!(value("UMMUNOTIFY_STATS"), "1");
    assert_eq!(value("UMMUNOTIFY_BINARY"), fs::canonicalize(BINARY).unwrap().to_str().unwrap());
}
