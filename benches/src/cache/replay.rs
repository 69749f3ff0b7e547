//! Does what a trace says with real memory and a cache, and tells what became of it.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use super::trace::{Event, parse};
use anyhow::{Context as _, Result, ensure};
use memmap2::MmapMut;
use ummunotify::cache::{Access, Cache, Handle, Limits, Registrar, RegistrarError};
use ummunotify::client::{Notifier, PageRange};

/// An adapter that takes anything at once: what is measured is the cache, what it pins is counted.
struct Counting;

impl Registrar for Counting {
    type Registration = ();

    fn register(&self, _: PageRange, _: Access) -> Result<(), RegistrarError> {
        Ok(())
    }

    fn deregister(&self, (): ()) -> Result<(), RegistrarError> {
        Ok(())
    }
}

/// The program's memory: by the trace's addresses, with what stands for it here.
#[derive(Default)]
struct Memory(BTreeMap<u64, MmapMut>);

impl Memory {
    fn map(&mut self, address: u64, bytes: u64) -> Result<()> {
        let mut block = MmapMut::map_anon(usize::try_from(bytes)?).context("mmap")?;
        block.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        self.0.insert(address, block);
        Ok(())
    }

    /// All blocks that lie in the range go whole: a trace's unmapping of a part is an unmapping of the block.
    fn unmap(&mut self, address: u64, bytes: u64) {
        let inside: Vec<u64> = self.0.range(..address + bytes).rev().map(|(&start, _)| start).collect();
        for start in inside {
            let end = start + self.0.get(&start).map_or(0, |block| block.len() as u64);
            if end <= address {
                break;
            }
            self.0.remove(&start);
        }
    }

    /// Where the bytes lie here.
    fn find(&mut self, address: u64, bytes: u64) -> Result<u64> {
        let holds = |(start, block): (&u64, &MmapMut)| {
            let inside = address + bytes <= start + block.len() as u64;
            inside.then(|| block.as_ptr().addr() as u64 + (address - start))
        };
        if let Some(place) = self.0.range(..=address).next_back().and_then(holds) {
            return Ok(place);
        }
        self.map(address, bytes)?;
        self.0
            .get(&address)
            .map(|block| block.as_ptr().addr() as u64)
            .context("a block that was mapped just now")
    }
}

type TestHandle<'c> = Handle<'c, Notifier, Counting>;

pub(crate) fn run(path: &Path, limits: Limits, rows: usize, series: bool) -> Result<()> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let events = parse(&text).with_context(|| format!("{}", path.display()))?;
    ensure!(!events.is_empty(), "{}: no events", path.display());
    let notifier = Notifier::open_nonblocking()
        .context("open /dev/ummunotify (start this with `ummunotify run --`, or load the module)")?;
    let cache = Cache::new(notifier, Counting, limits)?;
    let mut memory = Memory::default();
    let mut under_way: BTreeMap<(u64, u64), VecDeque<TestHandle<'_>>> = BTreeMap::new();
    let mut spent = Duration::ZERO;
    let mut pinned = Vec::with_capacity(events.len());
    for (nth, event) in events.iter().enumerate() {
        match *event {
            Event::Map { address, bytes } => {
                memory.unmap(address, bytes);
                memory.map(address, bytes)?;
            }
            Event::Unmap { address, bytes } => memory.unmap(address, bytes),
            Event::Use { address, bytes, access } => {
                let place = memory.find(address, bytes)?;
                let start = Instant::now();
                let handle = cache.get(place, bytes, access);
                spent += start.elapsed();
                let handle = handle.with_context(|| format!("event {}: {event}", nth + 1))?;
                under_way.entry((address, bytes)).or_default().push_back(handle);
            }
            Event::Done { address, bytes } => {
                let handle = under_way.get_mut(&(address, bytes)).and_then(VecDeque::pop_front);
                let handle =
                    handle.with_context(|| format!("event {}: {event}: no such transfer", nth + 1))?;
                let start = Instant::now();
                drop(handle);
                spent += start.elapsed();
            }
        }
        pinned.push(cache.statistics().bytes);
    }
    drop(under_way);
    let s = cache.statistics();
    if series {
        pinned.iter().enumerate().for_each(|(nth, bytes)| println!("{} {bytes}", nth + 1));
        return Ok(());
    }
    let requests = s.hits + s.misses;
    println!("{} events, {requests} transfers", events.len());
    println!(
        "{} hits ({:.1} %), {} registrations, {} became stale, {} evicted, {} superseded",
        s.hits,
        100.0 * s.hits as f64 / requests.max(1) as f64,
        s.misses,
        s.invalidated,
        s.evicted,
        s.superseded
    );
    println!("in the cache: {:.0} ns a transfer", spent.as_nanos() as f64 / requests.max(1) as f64);
    println!("pinned bytes over the events (most {}):", s.peak_bytes);
    let rows = rows.clamp(1, pinned.len());
    for row in 0..rows {
        let part = pinned.get(row * pinned.len() / rows..(row + 1) * pinned.len() / rows).unwrap_or_default();
        let most = part.iter().copied().max().unwrap_or(0);
        let bar = "#".repeat((most as f64 / s.peak_bytes.max(1) as f64 * 50.0) as usize);
        println!("{:>9} {most:>14} {bar}", (row + 1) * pinned.len() / rows);
    }
    Ok(())
}
