//! The filter in the kernel, and effects computed at its stops.
//!
//! Each case forks a child that prepares memory, installs the filter, makes one call and exits. The child has
//! one task. This process answers the notifications as a supervisor would, and compares what it computes with
//! what the kernel is known to do: the values of the recordings, for a kernel as the running one turns out to be.

use std::ffi::CStr;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use ummunotify::target::{KernelTraits, ProcessTarget};
use ummunotify::trap::bpf::SockFilter;
use ummunotify::trap::{Decoded, Effect, Filter, Policy, Reason, Syscall, effect};
use ummunotify_abi::PageRange;

const P: u64 = 4096;
/// Where children put what the call is about: free in every process that the kernel lays out.
const A: u64 = 0x1000_0000_0000;
/// Another place.
const C: u64 = 0x0f00_0000_0000;
const SPAN: u64 = 1 << 30;

#[repr(C)]
#[derive(Clone, Copy)]
struct Notification {
    id: u64,
    pid: u32,
    flags: u32,
    nr: u32,
    arch: u32,
    instruction_pointer: u64,
    args: [u64; 6],
}

#[repr(C)]
struct Response {
    id: u64,
    value: i64,
    error: i32,
    flags: u32,
}

const RECEIVE: u64 = 0xc050_2100;
const SEND: u64 = 0xc018_2101;
const CONTINUE: u32 = 1;

fn sys(nr: i64, a: [u64; 6]) -> i64 {
    // SAFETY: called in a forked child only, on memory that the case made itself, or with no memory at all.
    unsafe { libc::syscall(nr, a[0], a[1], a[2], a[3], a[4], a[5]) }
}

fn check(result: i64) -> i64 {
    if result < 0 {
        // SAFETY: ends the child.
        unsafe { libc::_exit(100) }
    }
    result
}

/// Memory at a place, every page written.
fn map(at: u64, pages: u64, prot: i32) {
    map_file(at, pages, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
    if prot != libc::PROT_READ | libc::PROT_WRITE {
        check(sys(libc::SYS_mprotect, [at, pages * P, prot as u64, 0, 0, 0]));
    }
}

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const R: i32 = libc::PROT_READ;

fn map_file(at: u64, pages: u64, flags: i32, fd: i64, page: u64) {
    let flags = (flags | libc::MAP_FIXED) as u64;
    check(sys(libc::SYS_mmap, [at, pages * P, RW as u64, flags, fd as u64, page * P]));
    for page in 0..pages {
        // SAFETY: the page was just mapped writable; it lies within the file.
        unsafe { ((at + page * P) as *mut u8).write_volatile(1) };
    }
}

/// A memfd of that many pages, as descriptor 50.
fn memfd(pages: u64) -> i64 {
    let fd = check(sys(libc::SYS_memfd_create, [c"case".as_ptr() as u64, 0, 0, 0, 0, 0]));
    check(sys(libc::SYS_ftruncate, [fd as u64, pages * P, 0, 0, 0, 0]));
    check(sys(libc::SYS_dup2, [fd as u64, FD, 0, 0, 0, 0]))
}

const FD: u64 = 50;

fn install(program: &[SockFilter]) -> i64 {
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr() as *mut _ };
    check(sys(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as u64, 1, 0, 0, 0, 0]));
    let new_listener = 8;
    let mode_filter = 1;
    check(sys(libc::SYS_seccomp, [mode_filter, new_listener, &raw const program as u64, 0, 0, 0]))
}

/// What one call did: the stops, and its result (a negative errno if it failed).
struct Outcome {
    stops: Vec<(Decoded, Effect)>,
    result: i64,
}

/// Runs a case: `prepare` without the filter, then `call` under it.
fn run(kernel: &KernelTraits, prepare: fn(), call: fn() -> i64) -> Outcome {
    let program = Filter::build(&Policy::default());
    let (mut from_child, to_parent) = std::io::pipe().unwrap();
    let (from_parent, mut to_child) = std::io::pipe().unwrap();
    // SAFETY: the child makes system calls only, until it exits.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        prepare();
        let listener = install(&program);
        let tell = |value: i64| {
            let bytes = &raw const value as u64;
            sys(libc::SYS_write, [to_parent.as_raw_fd() as u64, bytes, 8, 0, 0, 0])
        };
        tell(listener);
        let mut go = 0_u8;
        sys(libc::SYS_read, [from_parent.as_raw_fd() as u64, &raw mut go as u64, 1, 0, 0, 0]);
        let mut result = call();
        if result == -1 {
            // SAFETY: errno is the child's own.
            result = -i64::from(unsafe { *libc::__errno_location() });
        }
        tell(result);
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) }
    }
    drop(to_parent);
    let mut word = [0; 8];
    from_child.read_exact(&mut word).expect("the child prepares and installs");
    let listener = take_descriptor(pid, i64::from_ne_bytes(word));
    to_child.write_all(&[1]).unwrap();
    let mut stops = Vec::new();
    while let Some(stop) = receive(&listener) {
        let decoded = Decoded::new(&Syscall { arch: stop.arch, nr: stop.nr, args: stop.args });
        let result = match decoded {
            Decoded::Operation(operation) | Decoded::Fork(operation) => {
                let mut target = ProcessTarget::new(stop.pid as i32, false, kernel);
                effect(&operation, &mut target)
            }
            _ => Effect::Pieces(Vec::new()),
        };
        stops.push((decoded, result));
        let mut response = Response { id: stop.id, value: 0, error: 0, flags: CONTINUE };
        // SAFETY: the ioctl reads one response.
        let sent = unsafe { libc::ioctl(listener.as_raw_fd(), SEND as _, &raw mut response) };
        assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
    }
    let mut status = 0;
    // SAFETY: waits for this case's own child.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child failed");
    from_child.read_exact(&mut word).expect("the child tells its result");
    Outcome { stops, result: i64::from_ne_bytes(word) }
}

fn take_descriptor(pid: i32, fd: i64) -> OwnedFd {
    // SAFETY: no memory is passed; the descriptors returned belong to nobody else.
    unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        assert!(pidfd >= 0);
        let pidfd = OwnedFd::from_raw_fd(pidfd as i32);
        let fd = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd as i32)
    }
}

/// The next stop; None once no task has the filter any more.
fn receive(listener: &OwnedFd) -> Option<Notification> {
    let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    assert!(unsafe { libc::poll(&raw mut poll, 1, 20_000) } == 1, "the child hangs");
    if poll.revents & libc::POLLIN == 0 {
        return None;
    }
    // SAFETY: a notification consists of integers; the kernel wants it zeroed, and writes one.
    unsafe {
        let mut stop: Notification = std::mem::zeroed();
        let got = libc::ioctl(listener.as_raw_fd(), RECEIVE as _, &raw mut stop);
        assert_eq!(got, 0, "{}", std::io::Error::last_os_error());
        Some(stop)
    }
}

/// `[A+0,A+4) [C+0,C+2)x2`.
fn ranges(text: &str) -> Vec<PageRange> {
    let place = |text: &str| {
        let (base, page) = text.split_once('+').unwrap();
        (if base == "A" { A } else { C }) + page.parse::<u64>().unwrap() * P
    };
    let mut out = Vec::new();
    for item in text.split_whitespace() {
        let (range, times) = item.strip_prefix('[').unwrap().split_once(')').unwrap();
        let (start, end) = range.split_once(',').unwrap();
        let times = times.strip_prefix('x').map_or(1, |n| n.parse().unwrap());
        out.extend(std::iter::repeat_n(PageRange::new(place(start), place(end)), times));
    }
    out
}

/// One call that stops once, with these pieces in the two areas.
#[track_caller]
fn case(name: &str, prepare: fn(), call: fn() -> i64, succeeds: bool, expected: &str) {
    let outcome = run(&KernelTraits::probe(), prepare, call);
    assert_eq!(outcome.result >= 0, succeeds, "{name}: result {}", outcome.result);
    let [(decoded, Effect::Pieces(pieces))] = &outcome.stops[..] else {
        panic!("{name}: {:x?}", outcome.stops)
    };
    let areas = [PageRange::new(A, A + SPAN), PageRange::new(C, C + SPAN)];
    let here: Vec<_> = pieces.iter().filter(|piece| areas.iter().any(|a| piece.hits(*a))).copied().collect();
    assert_eq!(here, ranges(expected), "{name}: {decoded:x?}");
}

fn nothing() {}

fn four() {
    map(A, 4, RW);
}

fn three() {
    map(A, 2, RW);
    map(A + 2 * P, 2, R);
    map(A + 4 * P, 2, RW);
}

fn holey() {
    map(A, 2, RW);
    map(A + 3 * P, 3, RW);
}

#[test]
fn unmapping_and_mapping_over() {
    case("munmap", four, || sys(libc::SYS_munmap, [A, 4 * P, 0, 0, 0, 0]), true, "[A+0,A+4)");
    case("munmap, middle", four, || sys(libc::SYS_munmap, [A + P, 1, 0, 0, 0, 0]), true, "[A+1,A+2)");
    case("munmap over a hole", holey, || sys(libc::SYS_munmap, [A, 6 * P, 0, 0, 0, 0]), true, "[A+0,A+6)");
    case("munmap of a hole", nothing, || sys(libc::SYS_munmap, [A, 4 * P, 0, 0, 0, 0]), true, "");
    case("munmap, unaligned", four, || sys(libc::SYS_munmap, [A + 1, 4 * P, 0, 0, 0, 0]), false, "");
    case("MAP_FIXED", four, || sys(libc::SYS_mmap, [A, 2 * P, 3, 0x32, u64::MAX, 0]), true, "[A+0,A+2)");
    case("MAP_FIXED, hole", nothing, || sys(libc::SYS_mmap, [A, 2 * P, 3, 0x32, u64::MAX, 0]), true, "");
    case("MAP_FIXED, bad descriptor", four, || sys(libc::SYS_mmap, [A, 2 * P, 3, 0x12, 99, 0]), false, "");
    fn file() {
        memfd(4);
        map(A, 4, RW);
    }
    case("MAP_FIXED of a file", file, || sys(libc::SYS_mmap, [A, 2 * P, 3, 0x11, FD, 0]), true, "[A+0,A+2)");
}

#[test]
fn remapping() {
    let several = KernelTraits::probe().mremap_moves_several;
    println!("mremap moves several mappings: {several}");
    fn both() {
        map(A, 6, RW);
        map(C, 6, RW);
    }
    fn over() {
        holey();
        map(C, 6, RW);
    }
    fn blocked() {
        map(A, 2, RW);
        map(A + 2 * P, 1, R);
    }
    fn move_to(old: u64, new: u64, flags: u64) -> i64 {
        sys(libc::SYS_mremap, [A, old * P, new * P, flags, C, 0])
    }
    case("move onto", both, || move_to(6, 6, 3), true, "[C+0,C+6) [A+0,A+6)x2");
    case("move, shrinking", both, || move_to(6, 3, 3), true, "[C+0,C+3) [A+3,A+6) [A+0,A+3)x2");
    case("DONTUNMAP", four, || move_to(4, 4, 7), true, "[A+0,A+4)");
    case("shrink", four, || move_to(4, 2, 0), true, "[A+2,A+4)");
    case("grow in place", four, || move_to(4, 6, 0), true, "");
    case("MAYMOVE, in place", four, || move_to(4, 6, 1), true, "");
    case("MAYMOVE, blocked", blocked, || move_to(2, 4, 1), true, "[A+0,A+2)x2");
    let expected = if several { "[C+0,C+2) [A+0,A+2)x2 [C+3,C+6) [A+3,A+6)x2" } else { "[C+0,C+6)" };
    case("several", over, || move_to(6, 6, 3), several, expected);
    let expected = if several { "" } else { "[C+0,C+3) [A+3,A+6)" };
    case("what moves has a hole", over, || move_to(6, 3, 3), false, expected);
    case(
        "duplicate of private memory",
        both,
        || move_to(0, 2, 3),
        false,
        if several { "" } else { "[C+0,C+2)" },
    );
}

#[test]
fn protecting_and_advising() {
    case("mprotect", four, || sys(libc::SYS_mprotect, [A, 4 * P, 1, 0, 0, 0]), true, "[A+0,A+4)");
    case("unchanged", four, || sys(libc::SYS_mprotect, [A, 4 * P, 3, 0, 0, 0]), true, "");
    let to_read: fn() -> i64 = || sys(libc::SYS_mprotect, [A, 6 * P, 1, 0, 0, 0]);
    case("middle unchanged", three, to_read, true, "[A+0,A+2) [A+4,A+6)");
    case("into a hole", holey, to_read, false, "[A+0,A+2)");
    case("pkey -1", four, || sys(libc::SYS_pkey_mprotect, [A, 4 * P, 1, u64::MAX, 0, 0]), true, "[A+0,A+4)");
    let dontneed: fn() -> i64 = || sys(libc::SYS_madvise, [A, 6 * P, 4, 0, 0, 0]);
    case("DONTNEED over three", three, dontneed, true, "[A+0,A+2) [A+2,A+4) [A+4,A+6)");
    case("DONTNEED over a hole", holey, dontneed, false, "[A+0,A+2) [A+3,A+6)");
    fn locked() {
        map(A, 6, RW);
        check(sys(libc::SYS_mlock, [A + 2 * P, 2 * P, 0, 0, 0, 0]));
    }
    case("DONTNEED to a lock", locked, dontneed, false, "[A+0,A+2)");
    let dontneed_locked: fn() -> i64 = || sys(libc::SYS_madvise, [A, 6 * P, 24, 0, 0, 0]);
    case("DONTNEED_LOCKED", locked, dontneed_locked, true, "[A+0,A+2) [A+2,A+4) [A+4,A+6)");
    fn file_between() {
        let fd = memfd(2);
        map(A, 6, RW);
        map_file(A + 2 * P, 2, libc::MAP_SHARED, fd, 0);
    }
    case(
        "FREE to a file",
        file_between,
        || sys(libc::SYS_madvise, [A, 6 * P, 8, 0, 0, 0]),
        false,
        "[A+0,A+2)",
    );
    if KernelTraits::probe().knows_advice(102) {
        let guard: fn() -> i64 = || sys(libc::SYS_madvise, [A, 4 * P, 102, 0, 0, 0]);
        case("GUARD_INSTALL", four, guard, true, "[A+0,A+4)");
    } else {
        println!("MADV_GUARD_INSTALL isn't run: this kernel doesn't know it");
    }
    fn own_pidfd() {
        four();
        let pidfd = check(sys(libc::SYS_pidfd_open, [std::process::id().into(), 0, 0, 0, 0, 0]));
        check(sys(libc::SYS_dup2, [pidfd as u64, FD, 0, 0, 0, 0]));
    }
    let process: fn() -> i64 = || {
        let vector = [A, 4 * P];
        sys(libc::SYS_process_madvise, [FD, vector.as_ptr() as u64, 1, 4, 0, 0])
    };
    let own = KernelTraits::probe().process_madvise_own;
    case("process_madvise on oneself", own_pidfd, process, own, if own { "[A+0,A+4)" } else { "" });
}

#[test]
fn the_heap_and_system_v() {
    // The heap lies where the kernel put it: its place is told by the arguments of the stop.
    fn grow() {
        let end = sys(libc::SYS_brk, [0; 6]) as u64;
        check(if sys(libc::SYS_brk, [end + 8 * P, 0, 0, 0, 0, 0]) as u64 == end + 8 * P { 0 } else { -1 });
    }
    let outcome = run(&KernelTraits::probe(), grow, || {
        let end = sys(libc::SYS_brk, [0; 6]) as u64;
        sys(libc::SYS_brk, [end - 4 * P, 0, 0, 0, 0, 0])
    });
    let new = (outcome.result as u64).next_multiple_of(P);
    let [(_, Effect::Pieces(pieces))] = &outcome.stops[..] else { panic!("{:x?}", outcome.stops) };
    assert_eq!(pieces[..], [PageRange::new(new, new + 4 * P)]);
    let outcome = run(&KernelTraits::probe(), grow, || {
        let end = sys(libc::SYS_brk, [0; 6]) as u64;
        sys(libc::SYS_brk, [end + 4 * P, 0, 0, 0, 0, 0]);
        // Refused: below the heap.
        sys(libc::SYS_brk, [P, 0, 0, 0, 0, 0])
    });
    assert_eq!(outcome.stops.len(), 2);
    for (_, effect) in outcome.stops {
        assert_eq!(effect, Effect::Pieces(Vec::new()));
    }

    fn attach(flags: u64, at: u64) -> i64 {
        let id = check(sys(libc::SYS_shmget, [0, 6 * P, 0o600 | libc::IPC_CREAT as u64, 0, 0, 0]));
        let at = sys(libc::SYS_shmat, [id as u64, at, flags, 0, 0, 0]);
        check(sys(libc::SYS_shmctl, [id as u64, libc::IPC_RMID as u64, 0, 0, 0, 0]));
        at
    }
    fn attached() {
        check(attach(0, A));
        check(sys(libc::SYS_mprotect, [A + 2 * P, 2 * P, 1, 0, 0, 0]));
    }
    let detach: fn() -> i64 = || sys(libc::SYS_shmdt, [A, 0, 0, 0, 0, 0]);
    case("shmdt of three parts", attached, detach, true, "[A+0,A+2) [A+2,A+4) [A+4,A+6)");
    case("shmdt of other memory", four, detach, false, "");
    fn eight() {
        map(A, 8, RW);
    }
    case("shmat SHM_REMAP", eight, || attach(0x4000, A), true, "[A+0,A+6)");
}

#[test]
fn files() {
    fn twice() {
        let fd = memfd(4);
        map_file(A, 4, libc::MAP_SHARED, fd, 0);
        map_file(C, 4, libc::MAP_PRIVATE, fd, 0);
    }
    fn truncate(pages: u64) -> i64 {
        sys(libc::SYS_ftruncate, [FD, pages * P, 0, 0, 0, 0])
    }
    case("ftruncate", twice, || truncate(2), true, "[A+2,A+4) [C+2,C+4) [A+2,A+4) [C+2,C+4)");
    case("ftruncate, same", twice, || truncate(4), true, "");
    case("ftruncate, growing", twice, || truncate(6), true, "");
    case("ftruncate, bad descriptor", twice, || sys(libc::SYS_ftruncate, [99, 0, 0, 0, 0, 0]), false, "");
    let punch: fn() -> i64 = || sys(libc::SYS_fallocate, [FD, 3, P + 100, 2 * P, 0, 0]);
    case("hole", twice, punch, true, "[A+2,A+3) [C+2,C+3)");
    let small: fn() -> i64 = || sys(libc::SYS_fallocate, [FD, 3, 0, 100, 0, 0]);
    case("hole inside the first page", twice, small, true, "[A+0,A+4) [C+0,C+4)");
    let remove: fn() -> i64 = || sys(libc::SYS_madvise, [A + P, 2 * P, 9, 0, 0, 0]);
    case("MADV_REMOVE", twice, remove, true, "[A+1,A+3) [C+1,C+3)");
    let unreserve: fn() -> i64 = || {
        let hole = [0_u64, P, 2 * P, 0, 0, 0];
        sys(libc::SYS_ioctl, [FD, 0x4030_582b, hole.as_ptr() as u64, 0, 0, 0])
    };
    case("FS_IOC_UNRESVSP64", twice, unreserve, true, "[A+1,A+3) [C+1,C+3)");
}

/// A file with a name on tmpfs, by absolute path, relative to a directory, and through a symbolic link.
#[test]
fn files_by_path() {
    const FOLDER: &CStr = c"/dev/shm/ummunotify-notify-stop";
    const FILE: &CStr = c"/dev/shm/ummunotify-notify-stop/file";
    const LINK: &CStr = c"/dev/shm/ummunotify-notify-stop/link";
    let folder = FOLDER.to_str().unwrap();
    if nix::sys::statfs::statfs("/dev/shm").map(|s| s.filesystem_type()) != Ok(nix::sys::statfs::TMPFS_MAGIC)
    {
        println!("files by path aren't run: /dev/shm is no tmpfs here");
        return;
    }
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir(folder).unwrap();
    std::os::unix::fs::symlink("../ummunotify-notify-stop/file", LINK.to_str().unwrap()).unwrap();
    fn mapped() {
        let flags = (libc::O_RDWR | libc::O_CREAT) as u64;
        let fd = check(sys(libc::SYS_open, [FILE.as_ptr() as u64, flags, 0o600, 0, 0, 0]));
        check(sys(libc::SYS_ftruncate, [fd as u64, 4 * P, 0, 0, 0, 0]));
        map_file(A, 4, libc::MAP_SHARED, fd, 0);
        let at = check(sys(libc::SYS_open, [FOLDER.as_ptr() as u64, libc::O_PATH as u64, 0, 0, 0, 0]));
        check(sys(libc::SYS_dup2, [at as u64, FD, 0, 0, 0, 0]));
    }
    fn open(path: &CStr) -> i64 {
        sys(libc::SYS_open, [path.as_ptr() as u64, (libc::O_WRONLY | libc::O_TRUNC) as u64, 0, 0, 0, 0])
    }
    case("O_TRUNC", mapped, || open(FILE), true, "[A+0,A+4)x2");
    case("O_TRUNC by a link", mapped, || open(LINK), true, "[A+0,A+4)x2");
    case("O_TRUNC of another", mapped, || open(c"/dev/null"), true, "");
    case("O_TRUNC of none", mapped, || open(c"/dev/shm/no/such/file"), false, "");
    case("O_TRUNC by a descriptor's name", mapped, || open(c"/proc/self/fd/50/file"), true, "[A+0,A+4)x2");
    let truncate: fn() -> i64 = || sys(libc::SYS_truncate, [FILE.as_ptr() as u64, P + 1, 0, 0, 0, 0]);
    case("truncate", mapped, truncate, true, "[A+2,A+4)x2");
    let openat: fn() -> i64 = || {
        let flags = (libc::O_WRONLY | libc::O_TRUNC) as u64;
        sys(libc::SYS_openat, [FD, c"./../ummunotify-notify-stop/file".as_ptr() as u64, flags, 0, 0, 0])
    };
    case("openat", mapped, openat, true, "[A+0,A+4)x2");
    fn openat2(flags: i32) -> i64 {
        let how = [flags as u64, 0, 0];
        sys(libc::SYS_openat2, [FD, c"file".as_ptr() as u64, how.as_ptr() as u64, 24, 0, 0])
    }
    case("openat2", mapped, || openat2(libc::O_RDWR | libc::O_TRUNC), true, "[A+0,A+4)x2");
    case("openat2, reading", mapped, || openat2(libc::O_RDONLY), true, "");
    case(
        "creat",
        mapped,
        || sys(libc::SYS_creat, [FILE.as_ptr() as u64, 0o600, 0, 0, 0, 0]),
        true,
        "[A+0,A+4)x2",
    );
    fn rooted() {
        mapped();
        check(sys(libc::SYS_chdir, [FOLDER.as_ptr() as u64, 0, 0, 0, 0, 0]));
        check(sys(libc::SYS_chroot, [FOLDER.as_ptr() as u64, 0, 0, 0, 0, 0]));
    }
    if nix::unistd::geteuid().is_root() {
        case("O_TRUNC under another root", rooted, || open(c"/file"), true, "[A+0,A+4)x2");
        case("O_TRUNC from there", rooted, || open(c"file"), true, "[A+0,A+4)x2");
        case("O_TRUNC of none there", rooted, || open(FILE), false, "");
    } else {
        println!("another root isn't run: needs root");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn new_tasks() {
    fn areas() {
        map(A, 4, RW);
        map(A + 8 * P, 4, RW);
        check(sys(libc::SYS_madvise, [A + 8 * P, 4 * P, libc::MADV_DONTFORK as u64, 0, 0, 0]));
        let fd = memfd(4);
        map_file(C, 4, libc::MAP_SHARED, fd, 0);
    }
    fn child(result: i64) -> i64 {
        if result == 0 {
            // SAFETY: ends the child's child.
            unsafe { libc::_exit(0) }
        }
        result
    }
    case("fork", areas, || child(sys(libc::SYS_fork, [0; 6])), true, "[A+0,A+4)");
    let clone: fn() -> i64 = || child(sys(libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0, 0, 0]));
    case("clone", areas, clone, true, "[A+0,A+4)");
    let clone3: fn() -> i64 = || {
        let mut args = [0_u64; 11];
        args[4] = libc::SIGCHLD as u64;
        child(sys(libc::SYS_clone3, [args.as_ptr() as u64, 88, 0, 0, 0, 0]))
    };
    case("clone3", areas, clone3, true, "[A+0,A+4)");
    let thread: fn() -> i64 = || {
        // CLONE_SIGHAND without CLONE_VM's other half fails; what counts is that the flags were read.
        let mut args = [0_u64; 11];
        args[0] = (libc::CLONE_VM | libc::CLONE_THREAD) as u64;
        sys(libc::SYS_clone3, [args.as_ptr() as u64, 88, 0, 0, 0, 0])
    };
    case("clone3 for a thread", areas, thread, false, "");
    let exec: fn() -> i64 = || sys(libc::SYS_execve, [c"/nowhere".as_ptr() as u64, 0, 0, 0, 0, 0]);
    let outcome = run(&KernelTraits::probe(), nothing, exec);
    assert!(matches!(outcome.stops[..], [(Decoded::Exec, _)]));
}

/// Calls that change nothing don't stop.
#[test]
fn uninteresting_calls_do_not_stop() {
    let outcome = run(&KernelTraits::probe(), four, || {
        let area = check(sys(libc::SYS_mmap, [0, 4 * P, 3, 0x22, u64::MAX, 0])) as u64;
        sys(libc::SYS_mmap, [A, P, 3, 0x10_0032, u64::MAX, 0]);
        for advice in [0, 1, 2, 3, 10, 11, 12, 14, 15, 16, 18, 20, 22, 23] {
            sys(libc::SYS_madvise, [area, 4 * P, advice, 0, 0, 0]);
        }
        sys(libc::SYS_brk, [0; 6]);
        sys(libc::SYS_getpid, [0; 6]);
        sys(libc::SYS_mlock, [area, P, 0, 0, 0, 0]);
        sys(libc::SYS_msync, [area, P, 4, 0, 0, 0]);
        sys(libc::SYS_fallocate, [99, 0, 0, P, 0, 0]);
        sys(libc::SYS_fallocate, [99, 1, 0, P, 0, 0]);
        sys(libc::SYS_ioctl, [0, 0x5401, 0, 0, 0, 0]);
        sys(libc::SYS_open, [c"/dev/null".as_ptr() as u64, 0, 0, 0, 0, 0]);
        sys(libc::SYS_prctl, [libc::PR_GET_DUMPABLE as u64, 0, 0, 0, 0, 0]);
        sys(libc::SYS_move_pages, [0, 0, 0, 0, 0, 0]);
        sys(libc::SYS_mbind, [area, P, 0, 0, 0, 0]);
        extern "C" fn end(_: *mut libc::c_void) -> i32 {
            0
        }
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: the child runs on pages of its own while this task waits, and ends at once.
        unsafe { libc::clone(end, (area + 4 * P) as *mut _, flags, std::ptr::null_mut()) };
        0
    });
    assert_eq!(outcome.result, 0);
    assert!(outcome.stops.is_empty(), "{:x?}", outcome.stops);
}

#[test]
fn other_entries_stop() {
    let x32: fn() -> i64 = || sys(libc::SYS_munmap | 0x4000_0000, [A, 4 * P, 0, 0, 0, 0]);
    let outcome = run(&KernelTraits::probe(), four, x32);
    let [(_, Effect::Pieces(pieces))] = &outcome.stops[..] else { panic!("{:x?}", outcome.stops) };
    assert_eq!(pieces[..], ranges("[A+0,A+4)"));

    let hello: fn() -> i64 = || sys(libc::SYS_prctl, [ummunotify_abi::wire::HELLO_PRCTL, 1, 0, 0, 0, 0]);
    let outcome = run(&KernelTraits::probe(), nothing, hello);
    assert_eq!(outcome.result, -i64::from(libc::EINVAL));
    assert!(matches!(outcome.stops[..], [(Decoded::Hello { version: 1 }, _)]));

    if !int80_works() {
        println!("int 0x80 isn't run: this kernel has no 32-bit entry");
        return;
    }
    let outcome = run(&KernelTraits::probe(), nothing, || int80(91, 0x1000_0000, 4096));
    assert_eq!(outcome.result, 0);
    let [(_, Effect::Pieces(pieces))] = &outcome.stops[..] else { panic!("{:x?}", outcome.stops) };
    assert_eq!(pieces[..], [], "a hole");
    let outcome = run(&KernelTraits::probe(), nothing, || int80(93, 99, 0));
    assert!(matches!(outcome.stops[..], [(_, Effect::All(Reason::Foreign))]), "{:x?}", outcome.stops);
    let outcome = run(&KernelTraits::probe(), nothing, || int80(20, 0, 0));
    assert!(outcome.stops.is_empty(), "32-bit getpid: {:x?}", outcome.stops);
}

/// A 32-bit call from 64-bit code.
fn int80(nr: u32, first: u32, second: u32) -> i64 {
    let result: i32;
    // SAFETY: munmap, getpid and ftruncate are the only calls made this way, on what no case uses. The entry clobbers r8 to r11; rbx
    // may not be named, so it is exchanged.
    unsafe {
        std::arch::asm!(
            "xchg rbx, {first}",
            "int 0x80",
            "xchg rbx, {first}",
            first = inout(reg) u64::from(first) => _,
            inlateout("eax") nr as i32 => result,
            in("ecx") second,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    result.into()
}

fn int80_works() -> bool {
    // SAFETY: the child makes one call and exits; without the entry it dies of a fault.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::_exit(if int80(20, 0, 0) > 0 { 0 } else { 1 });
        }
        let mut status = 0;
        libc::waitpid(pid, &raw mut status, 0) == pid && status == 0
    }
}
