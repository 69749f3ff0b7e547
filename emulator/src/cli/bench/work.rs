//! What is measured: batches of one kind of call, each batch timed as a whole.

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use memmap2::{MmapMut, UncheckedAdvice};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::EventFd;
use ummunotify::client::{Notifier, PageRange};

use super::raw;
use crate::cli::command;

/// Bytes of a page.
const PAGE: usize = 4096;

/// When a work can be measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Needs {
    /// In every process.
    Nothing,
    /// Only where the device is open.
    Device,
}

/// One kind of work.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Short, unique.
    pub name: &'static str,
    /// What is timed.
    pub what: &'static str,
    /// Repetitions in a batch.
    pub batch: u32,
    /// See [`Needs`].
    pub needs: Needs,
    /// Whether it is measured with several numbers of regions elsewhere.
    pub among: bool,
    /// The program without which it can't be measured.
    pub program: Option<&'static str>,
    /// What is done.
    pub run: Run,
}

/// What a work consists of.
#[derive(Clone, Copy, Debug)]
pub enum Run {
    /// The process that works does a batch: the time of what is measured of it.
    Batch(fn(&mut Bench, u32) -> Duration),
    /// That command is run from its start to its end, by itself or by `ummunotify run`. It is told as its last argument
    /// whether there is a `device` or it has to be `plain`.
    Whole(&'static [&'static str]),
}

const fn work(
    name: &'static str,
    what: &'static str,
    batch: u32,
    run: fn(&mut Bench, u32) -> Duration,
) -> Work {
    Work { name, what, batch, needs: Needs::Nothing, among: false, program: None, run: Run::Batch(run) }
}

const fn whole(name: &'static str, what: &'static str, batch: u32, command: &'static [&'static str]) -> Work {
    let program = Some(command[0]);
    Work { name, what, batch, needs: Needs::Nothing, among: false, program, run: Run::Whole(command) }
}

const fn with(program: &'static str, work: Work) -> Work {
    Work { program: Some(program), ..work }
}

const fn device(work: Work) -> Work {
    Work { needs: Needs::Device, ..work }
}

const fn among(work: Work) -> Work {
    Work { among: true, ..work }
}

/// All of them, in the order in which they are measured.
pub const WORKS: &[Work] = &[
    work("getppid", "an unrelated system call", 20_000, |b, n| b.timed(n, getppid)),
    work("read", "read(2) of 64 bytes of /dev/zero", 20_000, |b, n| b.timed(n, read)),
    work("write", "write(2) of 64 bytes to /dev/null", 20_000, |b, n| b.timed(n, write)),
    work("open", "open and close of a file", 1_000, |b, n| b.timed(n, open)),
    work("map", "plain mmap of 4 KiB and munmap, untouched", 500, |b, n| b.timed(n, map)),
    work("mmap", "plain mmap of 4 KiB", 500, |_, n| map_alone(n, || MmapMut::map_anon(PAGE).ok())),
    work("raw-mmap", "plain mmap of 4 KiB by an instruction", 500, |_, n| {
        map_alone(n, || raw::Mapping::new(PAGE))
    }),
    work("raw-munmap", "munmap of a touched page by an instruction", 512, |_, n| raw_unmap(n)),
    work("touch-64k", "mmap, touch and munmap of 64 KiB", 200, |b, n| b.timed(n, touch)),
    work("thread", "a thread that is made and joined", 50, |b, n| b.timed(n, thread)),
    with("true", work("exec", "fork and exec of true, and its end", 70, |b, n| b.timed(n, exec))),
    with(
        "true",
        work("exec-bare", "the same without a preloaded library in it", 70, |b, n| b.timed(n, exec_bare)),
    ),
    work("malloc", "malloc and free of 16 bytes to 1 MiB, some 256 blocks at once", 5_000, |_, n| churn(n)),
    with("cc", work("cc", "compilation of a small file", 1, |b, n| b.timed(n, compile))),
    whole("python3", "a Python program that allocates, with the device open", 1, &["python3", "-c", PYTHON]),
    whole("run-true", "run of true, from start to end", 5, &["true"]),
    work("threads-4", "munmap of a touched page by each of 4 threads", 256, |_, n| by_threads(4, n)),
    work("threads-16", "munmap of a touched page by each of 16 threads", 64, |_, n| by_threads(16, n)),
    device(work("counter", "the check of the generation counter", 1_000_000, |b, n| b.timed(n, counter))),
    work("contexts-8", "munmap of a touched page that is no region, 8 contexts open", 512, among_contexts),
    work("waited-hit", "munmap of a page that is a region, a thread waiting for it", 256, waited_hit),
    work("epoll-hit", "munmap of a page that is a region, the descriptor in an epoll set", 256, epoll_hit),
    device(among(work("register", "register and unregister a region", 10_000, |b, n| b.timed(n, register)))),
    device(among(work(
        "register-random",
        "unregister and register one of the regions elsewhere at random",
        2_000,
        |b, n| b.timed(n, register_random),
    ))),
    device(work("events-1", "read of an event and LAST", 256, |b, n| events(b, n, 1))),
    device(work("events-100", "read of 100 events and LAST", 16, |b, n| events(b, n, 100))),
    among(work("munmap", "munmap of a touched page that is no region", 512, |b, n| unmap(b, n, 1, false))),
    among(work("hit", "munmap of a touched page that is a region", 512, |b, n| unmap(b, n, 1, true))),
    work("munmap-64k", "munmap of 64 KiB that is no region", 128, |b, n| unmap(b, n, 16, false)),
    work("hit-64k", "munmap of 64 KiB that is a region", 128, |b, n| unmap(b, n, 16, true)),
    work("munmap-1m", "munmap of 1 MiB that is no region", 32, |b, n| unmap(b, n, 256, false)),
    work("hit-1m", "munmap of 1 MiB that is a region", 32, |b, n| unmap(b, n, 256, true)),
    work("munmap-16m", "munmap of 16 MiB that is no region", 4, |b, n| unmap(b, n, 4096, false)),
    work("hit-16m", "munmap of 16 MiB that is a region", 4, |b, n| unmap(b, n, 4096, true)),
    among(work("madvise", "MADV_DONTNEED of a touched page that is no region", 512, |b, n| {
        discard(b, n, false)
    })),
    among(work("discard", "MADV_DONTNEED of a touched page that is a region", 512, |b, n| {
        discard(b, n, true)
    })),
    among(work("free", "free of 33 MiB, which malloc always maps", 64, release)),
];

/// Lists, dictionaries and buffers that come and go; a region is registered all the while.
const PYTHON: &str = "\
import fcntl, os, struct, sys
if sys.argv[1] == 'device':
    device = os.open('/dev/ummunotify', os.O_RDONLY | os.O_NONBLOCK)
    fcntl.ioctl(device, 0x40205502, struct.pack('QQQII', 4096, 8192, 1, 0, 0))
for turn in range(20):
    buffers = [bytearray(n * 3989 % 600000) for n in range(100)]
    words = {n: str(n) * 3 for n in range(10000)}
    lists = [[n] * 50 for n in range(2000)]
";

/// The work of that name.
pub fn find(name: &str) -> Option<&'static Work> {
    WORKS.iter().find(|work| work.name == name)
}

impl Work {
    /// What keeps it from being measured here, in a sentence; `None` if nothing does.
    pub fn obstacle(&self) -> Option<String> {
        let program = self.program?;
        command::find(program.as_ref()).is_err().then(|| format!("{program} isn't installed"))
    }
}

/// A process that works.
#[derive(Debug)]
pub struct Bench {
    notifier: Option<Notifier>,
    zero: File,
    null: File,
    /// Regions elsewhere.
    elsewhere: u64,
    random: Random,
}

/// Numbers in an order without a pattern, the same in every process (Marsaglia's xorshift).
#[derive(Clone, Copy, Debug)]
struct Random(u64);

impl Random {
    const fn new() -> Self {
        Self(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Region `n` elsewhere: half of them below everything, half above.
const fn elsewhere(n: u64) -> PageRange {
    let low = 0x10_0000 + n * 8192;
    let start = if n.is_multiple_of(2) { low } else { 0x7fff_ffff_0000 + low };
    PageRange::new(start, start + PAGE as u64)
}

/// Its cookie.
const fn cookie(n: u64) -> u64 {
    1 << 32 | n
}

impl Bench {
    /// With the device open, or without.
    pub fn new(notifier: Option<Notifier>) -> anyhow::Result<Self> {
        let zero = File::open("/dev/zero").context("/dev/zero")?;
        let null = OpenOptions::new().write(true).open("/dev/null").context("/dev/null")?;
        Ok(Self { notifier, zero, null, elsewhere: 0, random: Random::new() })
    }

    /// Nanoseconds for each repetition of a batch; `None` of what isn't done in this process.
    pub fn measure(&mut self, work: &Work) -> Option<f64> {
        let Run::Batch(run) = work.run else { return None };
        Some(run(self, work.batch).as_nanos() as f64 / f64::from(work.batch))
    }

    fn timed(&mut self, batch: u32, once: fn(&mut Self)) -> Duration {
        let start = Instant::now();
        for _ in 0..batch {
            once(self);
        }
        start.elapsed()
    }

    /// Sees to it that there are `count` regions elsewhere.
    pub fn fill(&mut self, count: u64) -> anyhow::Result<()> {
        let Some(notifier) = &self.notifier else { return Ok(()) };
        for n in self.elsewhere..count {
            notifier
                .register(elsewhere(n), cookie(n))
                .with_context(|| format!("registering region {n} of {count}"))?;
        }
        self.elsewhere = self.elsewhere.max(count);
        Ok(())
    }

    fn watch(&self, pages: &[MmapMut]) {
        let Some(notifier) = &self.notifier else { return };
        for (page, cookie) in pages.iter().zip(1..) {
            let start = page.as_ptr() as u64;
            // What isn't registered is measured as what it is: `hit` without the device is native.
            let _ = notifier.register(PageRange::new(start, start + page.len() as u64), cookie);
        }
    }

    fn forget(&self, count: u32) {
        let Some(notifier) = &self.notifier else { return };
        for cookie in 1..=u64::from(count) {
            let _ = notifier.unregister(cookie);
        }
    }
}

fn getppid(_: &mut Bench) {
    black_box(std::os::unix::process::parent_id());
}

fn read(bench: &mut Bench) {
    let mut bytes = [0; 64];
    black_box((&bench.zero).read(&mut bytes).is_ok());
}

fn write(bench: &mut Bench) {
    black_box((&bench.null).write(&[0; 64]).is_ok());
}

fn open(_: &mut Bench) {
    black_box(File::open("/dev/zero").is_ok());
}

fn map(_: &mut Bench) {
    drop(black_box(MmapMut::map_anon(PAGE)));
}

/// The time of mapping alone.
fn map_alone<T>(batch: u32, map: fn() -> Option<T>) -> Duration {
    let mut mapped = Vec::with_capacity(batch as usize);
    let start = Instant::now();
    for _ in 0..batch {
        mapped.extend(map());
    }
    let took = start.elapsed();
    drop(black_box(mapped));
    took
}

fn raw_unmap(batch: u32) -> Duration {
    let blocks: Vec<_> = blocks(batch, 1).into_iter().map(raw::Mapping::from).collect();
    let start = Instant::now();
    drop(black_box(blocks));
    start.elapsed()
}

fn touch(_: &mut Bench) {
    if let Ok(mut pages) = MmapMut::map_anon(16 * PAGE) {
        pages.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
        black_box(&pages);
    }
}

fn thread(_: &mut Bench) {
    let _ = std::thread::spawn(|| black_box(1)).join();
}

fn exec(_: &mut Bench) {
    black_box(Command::new("true").stdout(Stdio::null()).status().is_ok());
}

fn exec_bare(_: &mut Bench) {
    let mut command = Command::new("true");
    black_box(command.env_remove("LD_PRELOAD").stdout(Stdio::null()).status().is_ok());
}

fn compile(_: &mut Bench) {
    const SOURCE: &[u8] = b"#include <stdio.h>\nint main(void) { return puts(\"hello\") < 0; }\n";
    let Ok((source, mut pipe)) = std::io::pipe() else { return };
    // There is room for it in the pipe.
    let _ = pipe.write_all(SOURCE);
    drop(pipe);
    let mut command = Command::new("cc");
    command.args(["-O1", "-c", "-x", "c", "-", "-o", "/dev/null"]).stdin(source);
    black_box(command.status().is_ok());
}

/// Blocks that come and go in no order; one in 16 is large.
fn churn(batch: u32) -> Duration {
    let mut random = Random::new();
    let mut blocks: Vec<Vec<u8>> = vec![Vec::new(); 256];
    let start = Instant::now();
    for _ in 0..batch {
        let most = if random.below(16) == 0 { 1 << 20 } else { 1 << 12 };
        let mut block = Vec::with_capacity(16 + random.below(most) as usize);
        block.push(1);
        let place = random.below(256) as usize;
        blocks[place] = black_box(block);
    }
    drop(blocks);
    start.elapsed()
}

/// Touched blocks of so many pages, each a mapping of its own: every second one of the places is another mapping's.
fn blocks(count: u32, pages: usize) -> Vec<MmapMut> {
    let mut blocks: Vec<_> = (0..2 * count).filter_map(|_| MmapMut::map_anon(pages * PAGE).ok()).collect();
    let mut keep = false;
    blocks.retain(|_| {
        keep = !keep;
        keep
    });
    for block in &mut blocks {
        block.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
    }
    blocks
}

fn unmap(bench: &mut Bench, batch: u32, pages: usize, hit: bool) -> Duration {
    let blocks = blocks(batch, pages);
    if hit {
        bench.watch(&blocks);
    }
    let start = Instant::now();
    drop(black_box(blocks));
    let took = start.elapsed();
    if hit {
        bench.forget(batch);
    }
    took
}

fn discard(bench: &mut Bench, batch: u32, hit: bool) -> Duration {
    let blocks = blocks(batch, 1);
    if hit {
        bench.watch(&blocks);
    }
    let start = Instant::now();
    for block in &blocks {
        // SAFETY: nobody looks at what is in the page.
        let _ = unsafe { block.unchecked_advise(UncheckedAdvice::DontNeed) };
    }
    let took = start.elapsed();
    if hit {
        bench.forget(batch);
    }
    took
}

fn release(_: &mut Bench, batch: u32) -> Duration {
    let mut blocks: Vec<_> = (0..batch).map(|_| Vec::<u8>::with_capacity(33 << 20)).collect();
    for block in &mut blocks {
        block.extend([1; 64]);
    }
    let start = Instant::now();
    drop(black_box(blocks));
    start.elapsed()
}

/// The time that one thread takes, by the mean of all, which work at once.
fn by_threads(threads: u32, batch: u32) -> Duration {
    let barrier = std::sync::Barrier::new(threads as usize);
    let sum: Duration = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let blocks = blocks(batch, 1);
                    barrier.wait();
                    let start = Instant::now();
                    drop(black_box(blocks));
                    start.elapsed()
                })
            })
            .collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).sum()
    });
    sum / threads
}

fn counter(bench: &mut Bench) {
    if let Some(notifier) = &bench.notifier {
        black_box(notifier.counter().generation());
    }
}

fn register(bench: &mut Bench) {
    if let Some(notifier) = &bench.notifier {
        let _ = notifier.register(PageRange::new(4096, 8192), u64::MAX);
        let _ = notifier.unregister(u64::MAX);
    }
}

fn register_random(bench: &mut Bench) {
    let Some(last) = bench.elsewhere.checked_sub(1) else { return register(bench) };
    let n = bench.random.below(last + 1);
    if let Some(notifier) = &bench.notifier {
        let _ = notifier.unregister(cookie(n));
        let _ = notifier.register(elsewhere(n), cookie(n));
    }
}

fn among_contexts(bench: &mut Bench, batch: u32) -> Duration {
    let one = bench.notifier.is_some();
    let more: Vec<_> = (1..8).filter_map(|_| one.then(Notifier::open_nonblocking)?.ok()).collect();
    let took = unmap(bench, batch, 1, false);
    drop(more);
    took
}

/// Another thread sleeps until there is an event, and reads it.
fn waited_hit(bench: &mut Bench, batch: u32) -> Duration {
    let Ok(stop) = EventFd::new() else { return Duration::ZERO };
    std::thread::scope(|scope| {
        if let Some(notifier) = &bench.notifier {
            scope.spawn(|| {
                let mut both = [
                    PollFd::new(notifier.as_fd(), PollFlags::POLLIN),
                    PollFd::new(stop.as_fd(), PollFlags::POLLIN),
                ];
                while poll(&mut both, PollTimeout::NONE).is_ok() && both[1].any() == Some(false) {
                    let _ = notifier.events().count();
                }
            });
        }
        let blocks = blocks(batch, 1);
        bench.watch(&blocks);
        let start = Instant::now();
        drop(black_box(blocks));
        let took = start.elapsed();
        bench.forget(batch);
        let _ = stop.write(1);
        took
    })
}

fn epoll_hit(bench: &mut Bench, batch: u32) -> Duration {
    let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).ok();
    if let (Some(set), Some(notifier)) = (&set, &bench.notifier) {
        let _ = set.add(notifier.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, 0));
    }
    let took = unmap(bench, batch, 1, true);
    if let Some(notifier) = &bench.notifier {
        let _ = notifier.events().count();
    }
    took
}

fn events(bench: &mut Bench, batch: u32, count: u32) -> Duration {
    let mut took = Duration::ZERO;
    if let Some(notifier) = &bench.notifier {
        let _ = notifier.events().count();
    }
    for _ in 0..batch {
        let blocks = blocks(count, 1);
        bench.watch(&blocks);
        drop(blocks);
        if let Some(notifier) = &bench.notifier {
            let start = Instant::now();
            black_box(notifier.events().count());
            took += start.elapsed();
        }
        bench.forget(count);
    }
    took
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_work_takes_time() {
        let mut bench = Bench::new(None).unwrap();
        for (n, work) in WORKS.iter().enumerate() {
            assert!(WORKS[..n].iter().all(|other| other.name != work.name), "{}", work.name);
            assert_eq!(find(work.name).map(|found| found.what), Some(work.what));
            if let (Needs::Nothing, Run::Batch(run), None) = (work.needs, work.run, work.obstacle()) {
                assert!(run(&mut bench, 2) > Duration::ZERO, "{}", work.name);
            }
        }
        assert!(find("nothing of the kind").is_none());
    }

    #[test]
    fn a_work_without_its_program_says_which() {
        let work = whole("none", "nothing", 1, &["/no/such/program"]);
        assert_eq!(work.obstacle().unwrap(), "/no/such/program isn't installed");
        assert_eq!(Bench::new(None).unwrap().measure(&work), None);
    }
}
