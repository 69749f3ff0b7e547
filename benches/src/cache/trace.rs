//! What a program does with memory that it communicates from, as lines of text:
//!
//! ```text
//! # anything
//! map ADDRESS BYTES          memory comes to these addresses (mmap, or a large malloc)
//! unmap ADDRESS BYTES        it goes
//! use ADDRESS BYTES RIGHTS   a transfer begins: the memory must be registered from here on
//! done ADDRESS BYTES         the oldest such transfer has ended
//! ```
//!
//! Numbers are decimal, or hexadecimal with 0x. RIGHTS: `r` the adapter reads, `w` it writes, `R` and `W` the peer does.
//! Addresses are the program's own; a replay has others. Memory that is used without having been mapped (a heap that
//! was there before) counts as mapped from then on.

use anyhow::{Context as _, Result, bail};
use ummunotify::cache::Access;

/// A line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    Map { address: u64, bytes: u64 },
    Unmap { address: u64, bytes: u64 },
    Use { address: u64, bytes: u64, access: Access },
    Done { address: u64, bytes: u64 },
}

/// All events of a text.
pub(crate) fn parse(text: &str) -> Result<Vec<Event>> {
    let lines =
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    lines.map(|(n, line)| parse_line(line).with_context(|| format!("line {}: {line}", n + 1))).collect()
}

fn parse_line(line: &str) -> Result<Event> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (&what, rest) = words.split_first().context("nothing")?;
    let address = number(rest.first().context("no address")?)?;
    let bytes = number(rest.get(1).context("no number of bytes")?)?;
    address.checked_add(bytes).context("past the end of the address space")?;
    if bytes == 0 {
        bail!("no bytes");
    }
    Ok(match (what, rest.get(2)) {
        ("map", None) => Event::Map { address, bytes },
        ("unmap", None) => Event::Unmap { address, bytes },
        ("use", Some(rights)) => Event::Use { address, bytes, access: rights_of(rights)? },
        ("done", None) => Event::Done { address, bytes },
        _ => bail!("not a line of a trace"),
    })
}

fn number(text: &str) -> Result<u64> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.with_context(|| format!("not a number: {text}"))
}

fn rights_of(text: &str) -> Result<Access> {
    text.chars().try_fold(Access::LOCAL_READ, |rights, letter| match letter {
        'r' => Ok(rights),
        'w' => Ok(rights | Access::LOCAL_WRITE),
        'R' => Ok(rights | Access::REMOTE_READ),
        'W' => Ok(rights | Access::REMOTE_WRITE),
        other => bail!("no right '{other}'"),
    })
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Map { address, bytes } => write!(f, "map {address:#x} {bytes}"),
            Self::Unmap { address, bytes } => write!(f, "unmap {address:#x} {bytes}"),
            Self::Done { address, bytes } => write!(f, "done {address:#x} {bytes}"),
            Self::Use { address, bytes, access } => {
                let letters =
                    [(Access::LOCAL_WRITE, 'w'), (Access::REMOTE_READ, 'R'), (Access::REMOTE_WRITE, 'W')];
                let rights: String =
                    letters.iter().filter(|(r, _)| access.contains(*r)).map(|(_, l)| l).collect();
                write!(f, "use {address:#x} {bytes} r{rights}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_otherwise_than_written() {
        let text = "# a comment\n\nmap 0x1000 8192\nuse 0x1010 100 rwW\ndone 4112 100\nunmap 0x1000 8192\n";
        let events = parse(text).unwrap();
        let again: String = events.iter().map(|event| format!("{event}\n")).collect();
        assert_eq!(parse(&again).unwrap(), events);
        assert_eq!(events.len(), 4);
    }

    #[test]
    fn nonsense_is_read_without_a_word_of_where() {
        for bad in [
            "map",
            "map 1",
            "map x 1",
            "map 1 0",
            "use 1 1",
            "use 1 1 q",
            "go 1 1",
            "map 0xffffffffffffffff 2",
        ] {
            let error = format!("{:#}", parse(&format!("map 1 1\n{bad}")).unwrap_err());
            assert!(error.starts_with("line 2: "), "{error}");
        }
    }
}
