//! Patterns that MPI programs have, as traces.

use std::io::{BufWriter, Write};

use super::trace::Event;
use anyhow::Result;
use clap::ValueEnum;
use ummunotify::cache::Access;

/// What the program does at each step.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Pattern {
    /// Exchange of borders: the same buffers for ever, a send and a receive with each neighbour
    Halo,
    /// A temporary buffer for each message, allocated, sent from and freed
    Temporary,
    /// All to all from one large array, a piece of it for each peer, and now and then a new array
    AllToAll,
}

/// Where the made-up program's memory begins.
const BASE: u64 = 0x7f00_0000_0000;

pub(crate) fn run(pattern: Pattern, steps: u64, peers: u64, bytes: u64) -> Result<()> {
    let mut out = BufWriter::new(std::io::stdout().lock());
    writeln!(out, "# {pattern:?}, {steps} steps, {peers} peers, {bytes} bytes a message")?;
    for event in events(pattern, steps, peers, bytes) {
        writeln!(out, "{event}")?;
    }
    Ok(out.flush()?)
}

/// The trace.
pub(crate) fn events(pattern: Pattern, steps: u64, peers: u64, bytes: u64) -> Vec<Event> {
    let bytes = bytes.max(1);
    let room = bytes.next_multiple_of(4096);
    let sent = |address| Event::Use { address, bytes, access: Access::LOCAL_READ };
    let received = |address| Event::Use { address, bytes, access: Access::LOCAL_WRITE };
    let done = |address| Event::Done { address, bytes };
    let mut all = Vec::new();
    match pattern {
        Pattern::Halo => {
            let buffers: Vec<u64> = (0..2 * peers).map(|n| BASE + n * (room + 4096)).collect();
            all.extend(buffers.iter().map(|&address| Event::Map { address, bytes: room }));
            for _ in 0..steps {
                let pairs = buffers.chunks(2).filter_map(|pair| Some((*pair.first()?, *pair.last()?)));
                all.extend(pairs.flat_map(|(from, to)| [sent(from), received(to)]));
                all.extend(buffers.iter().map(|&address| done(address)));
            }
            all.extend(buffers.iter().map(|&address| Event::Unmap { address, bytes: room }));
        }
        Pattern::Temporary => {
            for _ in 0..steps {
                for peer in 0..peers {
                    // What was freed last is given out first, as malloc and mmap do.
                    let address = BASE + (peer % 2) * (room + 4096);
                    all.extend([Event::Map { address, bytes: room }, sent(address), done(address)]);
                    all.push(Event::Unmap { address, bytes: room });
                }
            }
        }
        Pattern::AllToAll => {
            let array = Event::Map { address: BASE, bytes: room * peers.max(1) };
            all.push(array);
            for step in 1..=steps {
                let pieces = || (0..peers).map(|peer| BASE + peer * bytes);
                all.extend(pieces().map(sent));
                all.extend(pieces().map(done));
                if step % 50 == 0 {
                    all.extend([Event::Unmap { address: BASE, bytes: room * peers.max(1) }, array]);
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_pattern_uses_memory_that_is_not_mapped() {
        for pattern in Pattern::value_variants() {
            let (mut mapped, mut used) = (BTreeMap::new(), 0);
            for event in events(*pattern, 120, 3, 10_000) {
                match event {
                    Event::Map { address, bytes } => assert!(mapped.insert(address, bytes).is_none()),
                    Event::Unmap { address, bytes } => assert_eq!(mapped.remove(&address), Some(bytes)),
                    Event::Use { address, bytes, .. } => {
                        let (start, length) = mapped.range(..=address).next_back().unwrap();
                        assert!(address + bytes <= start + length);
                        used += 1;
                    }
                    Event::Done { .. } => used -= 1,
                }
            }
            assert_eq!(used, 0);
        }
    }
}
