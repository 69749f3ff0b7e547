//! The registration cache: what it costs, and what it does with the pattern of a program.
//!
//! ```text
//! ummunotify-cache-bench micro                      hit, miss, invalidation, eviction
//! ummunotify-cache-bench generate halo > halo.trace a trace of a pattern that MPI programs have
//! ummunotify run -- ummunotify-cache-bench replay halo.trace
//! ```
//!
//! Traces are described in trace.rs; benches/recorder/mpi.c records them of real programs.

mod generate;
mod micro;
mod replay;
mod trace;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "The registration cache: what it costs, and what it does with a program's pattern")]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Nanoseconds of processor time for a hit, a miss, an invalidation and an eviction
    Micro {
        /// Numbers of entries
        #[arg(long, value_delimiter = ',', default_values_t = [10, 1_000, 100_000, 1_000_000])]
        entries: Vec<u64>,
        /// Numbers of threads
        #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 16])]
        threads: Vec<u64>,
        /// Ask /dev/ummunotify, and not a counter of this program's own
        #[arg(long)]
        device: bool,
    },
    /// Write a trace to standard output
    Generate {
        /// The pattern
        pattern: generate::Pattern,
        /// Steps of the program
        #[arg(long, default_value_t = 1000)]
        steps: u64,
        /// Neighbours of the process
        #[arg(long, default_value_t = 8)]
        peers: u64,
        /// Bytes of a message
        #[arg(long, default_value_t = 256 << 10)]
        bytes: u64,
    },
    /// Do what a trace says, with a cache on /dev/ummunotify
    Replay {
        /// The file
        trace: PathBuf,
        /// Limit of entries
        #[arg(long, default_value_t = 65_536)]
        entries: usize,
        /// Limit of pinned bytes
        #[arg(long, default_value_t = u64::MAX)]
        bytes: u64,
        /// Rows of the plot of pinned bytes
        #[arg(long, default_value_t = 20)]
        rows: usize,
        /// Print the pinned bytes after each event, as lines of event, bytes
        #[arg(long)]
        series: bool,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().what {
        What::Micro { entries, threads, device } => micro::run(&entries, &threads, device),
        What::Generate { pattern, steps, peers, bytes } => generate::run(pattern, steps, peers, bytes),
        What::Replay { trace, entries, bytes, rows, series } => {
            replay::run(&trace, ummunotify::cache::Limits { entries, bytes }, rows, series)
        }
    }
}
