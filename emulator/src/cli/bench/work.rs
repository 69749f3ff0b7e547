//! What is measured: batches of one kind of call, each batch timed as a whole.

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use memmap2::{MmapMut, UncheckedAdvice};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use ummunotify::client::{Notifier, PageRange};

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
    /// Does a batch; the time of what is measured of it.
    run: fn(&mut Bench, u32) -> Duration,
}

const fn work(
    name: &'static str,
    what: &'static str,
    batch: u32,
    run: fn(&mut Bench, u32) -> Duration,
) -> Work {
    Work { name, what, batch, needs: Needs::Nothing, among: false, run }
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
    work("touch-64k", "mmap, touch and munmap of 64 KiB", 200, |b, n| b.timed(n, touch)),
    work("thread", "a thread that is made and joined", 50, |b, n| b.timed(n, thread)),
    work("exec", "fork and exec of true, and its end", 10, |b, n| b.timed(n, exec)),
    work("threads-4", "munmap of a touched page by each of 4 threads", 256, |_, n| by_threads(4, n)),
    work("threads-16", "munmap of a touched page by each of 16 threads", 64, |_, n| by_threads(16, n)),
    device(work("counter", "the check of the generation counter", 1_000_000, |b, n| b.timed(n, counter))),
    device(work(
        "epoll-hit",
        "munmap of a page that is a region, the descriptor in an epoll set",
        256,
        epoll_hit,
    )),
    device(among(work("register", "register and unregister a region", 10_000, |b, n| b.timed(n, register)))),
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

/// The work of that name.
pub fn find(name: &str) -> Option<&'static Work> {
    WORKS.iter().find(|work| work.name == name)
}

/// A process that works.
#[derive(Debug)]
pub struct Bench {
    notifier: Option<Notifier>,
    zero: File,
    null: File,
    /// Regions elsewhere.
    elsewhere: u64,
}

impl Bench {
    /// With the device open, or without.
    pub fn new(notifier: Option<Notifier>) -> anyhow::Result<Self> {
        let zero = File::open("/dev/zero").context("/dev/zero")?;
        let null = OpenOptions::new().write(true).open("/dev/null").context("/dev/null")?;
        Ok(Self { notifier, zero, null, elsewhere: 0 })
    }

    /// Nanoseconds for each repetition of a batch.
    pub fn measure(&mut self, work: &Work) -> f64 {
        (work.run)(self, work.batch).as_nanos() as f64 / f64::from(work.batch)
    }

    fn timed(&mut self, batch: u32, once: fn(&mut Self)) -> Duration {
        let start = Instant::now();
        for _ in 0..batch {
            once(self);
        }
        start.elapsed()
    }

    /// Sees to it that there are `count` regions elsewhere: half of them below everything, half above.
    pub fn fill(&mut self, count: u64) -> anyhow::Result<()> {
        let Some(notifier) = &self.notifier else { return Ok(()) };
        for n in self.elsewhere..count {
            let low = 0x10_0000 + n * 8192;
            let start = if n % 2 == 0 { low } else { 0x7fff_ffff_0000 + low };
            notifier
                .register(PageRange::new(start, start + PAGE as u64), 1 << 32 | n)
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
            if work.needs == Needs::Nothing {
                assert!((work.run)(&mut bench, 2) > Duration::ZERO, "{}", work.name);
            }
        }
        assert!(find("nothing of the kind").is_none());
    }
}
