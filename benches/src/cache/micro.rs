//! What single operations cost: processor time of the thread that does them, medians of several rounds with spread.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use ummunotify::cache::{Access, Cache, Limits, Monitor, Registrar, RegistrarError};
use ummunotify::client::{Notifier, PageRange};

/// Rounds; odd, so that a median is a measured value.
const ROUNDS: usize = 9;
/// Operations of a thread in a round.
const BATCH: u64 = 200_000;
/// Entries that are used again and again in `hot`.
const HOT: u64 = 16;
/// Entries that are invalidated, or evicted, in a round.
const PIECES: u64 = 1000;
const PAGE: u64 = 4096;
const BASE: u64 = 0x6000_0000_0000;

/// An adapter that does nothing: all that a miss costs is the cache's.
struct Nothing;

impl Registrar for Nothing {
    type Registration = u64;

    fn register(&self, range: PageRange, _: Access) -> Result<u64, RegistrarError> {
        Ok(range.start)
    }

    fn deregister(&self, _: u64) -> Result<(), RegistrarError> {
        Ok(())
    }
}

/// A device of this program's own, whose calls cost nothing: a counter, and what is stale.
#[derive(Default)]
struct Own {
    counter: AtomicU64,
    cookies: Mutex<Vec<u64>>,
    stale: Mutex<Vec<u64>>,
    keep: bool,
}

impl Monitor for Own {
    fn register(&self, _: PageRange, cookie: u64) -> std::io::Result<()> {
        if self.keep {
            lock(&self.cookies).push(cookie);
        }
        Ok(())
    }

    fn unregister(&self, _: u64) -> std::io::Result<()> {
        Ok(())
    }

    fn generation(&self) -> u64 {
        self.counter.load(Ordering::Acquire)
    }

    fn events(&self, stale: &mut dyn FnMut(u64)) -> std::io::Result<Option<u64>> {
        let all = std::mem::take(&mut *lock(&self.stale));
        all.iter().copied().for_each(&mut *stale);
        Ok((!all.is_empty()).then(|| self.generation()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Processor time of the calling thread, ns.
fn clock() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: room for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn place(n: u64) -> u64 {
    BASE + 2 * n * PAGE
}

struct Row {
    what: &'static str,
    entries: u64,
    threads: u64,
    times: Vec<f64>,
}

impl Row {
    fn print(mut self) {
        self.times.sort_by(f64::total_cmp);
        let (least, most) = (self.times[0], self.times[self.times.len() - 1]);
        println!(
            "{:<12} {:>9} {:>8} {:>10.1} ({least:.1} to {most:.1})",
            self.what,
            self.entries,
            self.threads,
            self.times[self.times.len() / 2]
        );
    }
}

/// A thread's processor time for each of `BATCH` hits, the mean over the threads.
fn hits<M: Monitor>(cache: &Cache<M, Nothing>, entries: u64, threads: u64) -> f64 {
    let barrier = Barrier::new(threads as usize);
    let total = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (barrier, total) = (&barrier, &total);
            scope.spawn(move || {
                let mut random = 0x9e37_79b9 + thread;
                let mut next = || {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    // A product instead of a remainder: a division would cost as much as the hit.
                    place(((u128::from(random) * u128::from(entries)) >> 64) as u64)
                };
                let mut run = |count: u64| {
                    for _ in 0..count {
                        if let Ok(handle) = cache.get(next() + 64, 1024, Access::LOCAL_WRITE) {
                            black_box(*handle.registration());
                        }
                    }
                };
                run(BATCH / 4);
                barrier.wait();
                let start = clock();
                run(BATCH);
                total.fetch_add(clock() - start, Ordering::Relaxed);
            });
        }
    });
    total.into_inner() as f64 / (BATCH * threads) as f64
}

fn fill<M: Monitor>(cache: &Cache<M, Nothing>, pages: impl Iterator<Item = u64>) -> Result<()> {
    for n in pages {
        drop(cache.get(place(n), PAGE, Access::LOCAL_WRITE).context("fill")?);
    }
    Ok(())
}

/// The hits of all numbers of threads, and misses among so many entries.
fn measure<M: Monitor>(monitor: M, entries: u64, threads: &[u64]) -> Result<()> {
    let limits = Limits { entries: (entries + PIECES) as usize, bytes: u64::MAX };
    let cache = Cache::new(monitor, Nothing, limits)?;
    fill(&cache, 0..entries)?;
    for &threads in threads {
        let mut hot = Vec::new();
        let mut uniform = Vec::new();
        for _ in 0..ROUNDS {
            hot.push(hits(&cache, entries.min(HOT), threads));
            uniform.push(hits(&cache, entries, threads));
        }
        Row { what: "hit, hot", entries, threads, times: hot }.print();
        Row { what: "hit, uniform", entries, threads, times: uniform }.print();
    }
    // Misses: places beyond those that are there, until the room is full; then each of them evicts.
    let (mut misses, mut evictions) = (Vec::new(), Vec::new());
    let mut next = entries;
    for _ in 0..ROUNDS {
        let start = clock();
        fill(&cache, next..next + PIECES)?;
        misses.push((clock() - start) as f64 / PIECES as f64);
        next += PIECES;
        let start = clock();
        fill(&cache, next..next + PIECES)?;
        evictions.push((clock() - start) as f64 / PIECES as f64);
        next += PIECES;
        // Room again.
        cache.clear()?;
        fill(&cache, 0..entries)?;
    }
    Row { what: "miss", entries, threads: 1, times: misses }.print();
    Row { what: "evicting miss", entries, threads: 1, times: evictions }.print();
    Ok(())
}

/// A request that finds so many entries stale, for each of them.
fn invalidations(entries: u64) -> Result<()> {
    let own = Arc::new(Own { keep: true, ..Own::default() });
    let limits = Limits { entries: entries as usize + 1, bytes: u64::MAX };
    let cache = Cache::new(own.clone(), Nothing, limits)?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        fill(&cache, 0..entries)?;
        let stale = std::mem::take(&mut *lock(&own.cookies));
        let count = stale.len() as f64;
        *lock(&own.stale) = stale;
        own.counter.fetch_add(1, Ordering::AcqRel);
        let start = clock();
        cache.sweep()?;
        times.push((clock() - start) as f64 / count);
    }
    Row { what: "invalidation", entries, threads: 1, times }.print();
    Ok(())
}

pub(crate) fn run(entries: &[u64], threads: &[u64], device: bool) -> Result<()> {
    println!(
        "ns of the thread's processor time, median of {ROUNDS} (least to most); a hit includes the drop of its handle"
    );
    println!("{:<12} {:>9} {:>8} {:>10}", "", "entries", "threads", "ns");
    for &count in entries {
        if device {
            let notifier = Notifier::open_nonblocking()
                .context("open /dev/ummunotify (start this with `ummunotify run --`, or load the module)")?;
            measure(notifier, count, threads)?;
        } else {
            measure(Own::default(), count, threads)?;
            invalidations(count)?;
        }
    }
    Ok(())
}
