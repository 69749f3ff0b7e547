//! Races for a registration cache, to be run under `ummunotify run`; a line of figures, and exit code 1 if a stale
//! registration was given out.
//!
//! ```text
//! cache_race reuse ROUNDS [blind]              threads map, register, check and unmap pages, and get each other's
//!                                              addresses
//! cache_race revalidate ROUNDS LEAST [blind]   one thread unmaps and maps a page, another registers it as fast as it
//!                                              can; it goes on until that was in time LEAST times, or for a minute
//! ```
//!
//! The adapter is the pretended one, which really pins. With `blind` the cache is told nothing, and must lose.

use std::collections::HashSet;
use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ummunotify::cache::soft::{Nobody, Pinned, SoftAdapter};
use ummunotify::cache::{Access, Cache, Limits, Monitor};
use ummunotify::client::Notifier;

const PAGE: usize = 4096;
const THREADS: u64 = 8;
/// Far from where the kernel puts what has no place of its own: nobody else is to be given it while it is free.
const PLACE: u64 = 1 << 36;
/// How long a race goes on after its rounds that shows too little.
const PATIENCE: Duration = Duration::from_secs(60);

fn map(at: u64) -> u64 {
    let fixed = if at == 0 { 0 } else { libc::MAP_FIXED_NOREPLACE };
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping that replaces none.
    let page = unsafe { libc::mmap(at as *mut libc::c_void, PAGE, protection, flags | fixed, -1, 0) };
    assert!(page != libc::MAP_FAILED && (at == 0 || page.addr() as u64 == at), "mmap");
    page.addr() as u64
}

fn unmap(page: u64) {
    // SAFETY: a page of this program's own, to which no reference exists.
    assert_eq!(unsafe { libc::munmap(page as *mut libc::c_void, PAGE) }, 0);
}

fn stamp(page: u64, stamp: u64) {
    // SAFETY: a page of this thread's own.
    unsafe { (page as *mut u64).write_volatile(stamp) };
}

/// What the adapter would send.
fn sent(pinned: &Pinned, page: u64) -> u64 {
    let mut bytes = [0; 8];
    pinned.read(page, &mut bytes).expect("read of what is pinned");
    u64::from_ne_bytes(bytes)
}

fn get<M: Monitor>(cache: &Cache<M, SoftAdapter>, page: u64) -> u64 {
    let handle = cache.get(page, 8, Access::LOCAL_WRITE).unwrap_or_else(|e| panic!("get: {e}"));
    sent(handle.registration(), page)
}

/// Each page is its thread's alone, so what the cache gives for it must hold the stamp that the thread put there.
fn reuse<M: Monitor>(cache: &Cache<M, SoftAdapter>, rounds: u64) -> u64 {
    let (stale, reused) = (AtomicU64::new(0), AtomicU64::new(0));
    let addresses = Mutex::new(HashSet::new());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (stale, reused, addresses) = (&stale, &reused, &addresses);
            scope.spawn(move || {
                let mut kept = Vec::new();
                for round in 0..rounds / THREADS {
                    let page = map(0);
                    let mine = round * THREADS + thread + 1;
                    stamp(page, mine);
                    reused.fetch_add(u64::from(!addresses.lock().expect("no panic").insert(page)), SeqCst);
                    stale.fetch_add(u64::from(get(cache, page) != mine), SeqCst);
                    kept.push((page, mine));
                    // Some live for a while, and are asked for again.
                    let (page, mine) = kept[(round % 4) as usize % kept.len()];
                    stale.fetch_add(u64::from(get(cache, page) != mine), SeqCst);
                    if kept.len() > 4 {
                        unmap(kept.swap_remove((round % 5) as usize).0);
                    }
                }
                kept.into_iter().for_each(|(page, _)| unmap(page));
            });
        }
    });
    let s = cache.statistics();
    println!(
        "rounds={rounds} reused={} stale={} hits={} misses={} invalidated={} evicted={}",
        reused.into_inner(),
        stale.load(SeqCst),
        s.hits,
        s.misses,
        s.invalidated,
        s.evicted
    );
    stale.into_inner()
}

/// Set when this goes, by a panic too: somebody waits for it.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// While nothing is mapped at the place, nothing can be registered there: whatever the cache gives then is stale.
fn revalidate<M: Monitor>(cache: &Cache<M, SoftAdapter>, rounds: u64, least: u64) -> u64 {
    let (over, got) = (AtomicBool::new(false), AtomicU64::new(0));
    let (mut stale, mut registered, mut round) = (0, 0, 0);
    let mut due = None;
    let place = map(PLACE);
    stamp(place, 1);
    std::thread::scope(|scope| {
        let _over = Over(&over);
        scope.spawn(|| {
            while !over.load(SeqCst) {
                got.fetch_add(u64::from(cache.get(place, 8, Access::LOCAL_WRITE).is_ok()), SeqCst);
                std::thread::yield_now();
            }
        });
        while round < rounds
            || registered < least && Instant::now() < *due.get_or_insert_with(|| Instant::now() + PATIENCE)
        {
            unmap(place);
            // Only what is there already: asking for more would register a page that comes meanwhile.
            stale += u64::from(cache.get(place, 8, Access::LOCAL_WRITE).is_ok());
            map(place);
            stamp(place, round + 2);
            let (before, mut patience) = (got.load(SeqCst), 2000);
            // Now and then the other thread gets time to believe in it.
            while round % 2 == 0 && got.load(SeqCst) == before && patience > 0 {
                std::thread::yield_now();
                patience -= 1;
            }
            registered += u64::from(got.load(SeqCst) != before);
            if round % 2 == 0 {
                stale += u64::from(get(cache, place) != round + 2);
            }
            round += 1;
        }
    });
    let s = cache.statistics();
    println!(
        "rounds={round} registered={registered} stale={stale} hits={} misses={} stale_at_birth={}",
        s.hits, s.misses, s.stale_at_birth
    );
    black_box(stale)
}

fn race<M: Monitor>(monitor: M, what: &str, rounds: u64, least: u64) -> u64 {
    let limits = Limits { entries: 64, bytes: u64::MAX };
    let cache = Cache::new(monitor, SoftAdapter, limits).expect("a cache");
    match what {
        "reuse" => reuse(&cache, rounds),
        "revalidate" => revalidate(&cache, rounds, least),
        other => panic!("no race {other}"),
    }
}

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let usage = "usage: cache_race reuse ROUNDS [blind] | revalidate ROUNDS LEAST [blind]";
    let what = arguments.get(1).expect(usage);
    let rounds = arguments.get(2).and_then(|n| n.parse().ok()).expect(usage);
    let least =
        if what == "revalidate" { arguments.get(3).and_then(|n| n.parse().ok()).expect(usage) } else { 0 };
    let rest = if what == "revalidate" { 4 } else { 3 };
    let stale = match arguments.get(rest).map(String::as_str) {
        None => race(Notifier::open_nonblocking().expect("open /dev/ummunotify"), what, rounds, least),
        Some("blind") => race(Nobody, what, rounds, least),
        Some(_) => panic!("{usage}"),
    };
    std::process::ExitCode::from(u8::from(stale != 0))
}
