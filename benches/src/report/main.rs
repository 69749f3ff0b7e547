//! All figures beside their limits: which hold, which don't, which weren't measured.
//!
//! ```text
//! ummunotify-report --guest guest.json                            a table of what can be told from that
//! ummunotify-report --bench b.json --one-processor o.json --guest g.json --engine e.txt --out reports/today
//! ```
//!
//! Judged are medians; a limit that lies between the quartiles is said to be within the spread.

mod judge;
mod render;
mod row;
mod source;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;

use self::source::{Bench, Sources};

#[derive(Parser, Debug)]
#[command(about = "All figures beside their limits: which hold, which don't, which weren't measured")]
struct Arguments {
    /// What `ummunotify bench --json` wrote; of several, what the first doesn't have is added
    #[arg(long, value_name = "FILE")]
    bench: Vec<PathBuf>,
    /// The same of a run with --one-processor
    #[arg(long, value_name = "FILE")]
    one_processor: Option<PathBuf>,
    /// What benches/guest/count.sh wrote
    #[arg(long, value_name = "FILE")]
    guest: Option<PathBuf>,
    /// What the engine's example `figures` printed
    #[arg(long, value_name = "FILE")]
    engine: Option<PathBuf>,
    /// Lines of a name, a blank and a number: memory in bytes, notified calls
    #[arg(long, value_name = "FILE")]
    numbers: Option<PathBuf>,
    /// Write NAME.md and NAME.json; without it a table is printed
    #[arg(long, value_name = "NAME")]
    out: Option<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut bench: Option<Bench> = None;
    for path in &arguments.bench {
        let more: Option<Bench> = json(Some(path))?;
        match (&mut bench, more) {
            (Some(bench), Some(more)) => bench.lines.extend(more.lines),
            (_, more) => bench = more,
        }
    }
    let sources = Sources {
        bench,
        one_processor: json(arguments.one_processor.as_deref())?,
        guest: json(arguments.guest.as_deref())?,
        engine: text(arguments.engine.as_deref())?.map(|text| source::engine_lines(&text)),
        numbers: text(arguments.numbers.as_deref())?.map(|text| source::numbers(&text)).transpose()?,
    };
    ensure!(sources.any(), "nothing to judge: name at least one file (--help)");
    let rows = judge::rows(&sources);
    let Some(out) = arguments.out else {
        print!("{}", render::table(&rows));
        return Ok(());
    };
    let named = |extension: &str| PathBuf::from(format!("{}.{extension}", out.display()));
    write(&named("md"), &render::page(&sources, &rows))?;
    let everything = serde_json::json!({ "rows": rows, "sources": sources });
    write(&named("json"), &(serde_json::to_string_pretty(&everything)? + "\n"))
}

fn text(path: Option<&Path>) -> Result<Option<String>> {
    let read = |path: &Path| fs::read_to_string(path).with_context(|| path.display().to_string());
    path.map(read).transpose()
}

fn json<T: serde::de::DeserializeOwned>(path: Option<&Path>) -> Result<Option<T>> {
    let Some((path, text)) = path.zip(text(path)?) else { return Ok(None) };
    let parsed = serde_json::from_str(&text);
    parsed.map(Some).with_context(|| format!("{}: not what a measurement writes", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| path.display().to_string())?;
    println!("{}", path.display());
    Ok(())
}
