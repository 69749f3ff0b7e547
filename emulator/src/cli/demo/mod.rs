//! `ummunotify demo`: the accident of the stale registration, step by step, without and with the device.
//!
//! Everything that is claimed is done and looked at: the memory is real, the events are the device's. If
//! something turns out otherwise, the demonstration says so and fails.

mod machine;
mod screen;

use anyhow::{Context as _, bail, ensure};
use std::ffi::OsString;
use ummunotify::client::{Invalidation, Notifier};
use ummunotify_abi::PageRange;

use super::run::own_path;
use super::{DemoArguments, Failure, RunArguments, run};
use machine::{Mapping, Memory, Pin};
use screen::{Screen, Tone};

const FIRST: &str = "message one";
const SECOND: &str = "message two";
/// The cookie: the number of the cache entry.
const ENTRY: u64 = 1;

/// Runs the demonstration under the shim of this very program.
pub(super) fn main(options: &DemoArguments) -> Result<i32, Failure> {
    if options.inside {
        return show(options.step).map(|()| 0).map_err(|error| Failure { error, code: 1 });
    }
    let mut command = vec![own_path()?.into_os_string(), "demo".into(), "--inside".into()];
    command.extend(options.step.then(|| OsString::from("--step")));
    run::main(&RunArguments { command, ..RunArguments::default() })
}

/// What a registration cache holds for one buffer.
struct Entry {
    range: PageRange,
    registration: Pin,
}

fn show(pauses: bool) -> anyhow::Result<()> {
    let mut screen = Screen::new(pauses);
    screen.line(&screen.tone(Tone::Title, "The stale registration, and how /dev/ummunotify prevents it"))?;
    screen.line(
        "
A network adapter that does RDMA writes to physical memory by itself. So a buffer
must be registered first: the kernel pins the pages behind its address, and the
adapter keeps them. That is slow; so programs keep a cache from address to
registration. The cache is right as long as the address still means these pages.

Here, for real: a memory of two page frames (a memfd); an application's buffer
mapped to one of them; and a pretended adapter that maps the frame it pinned a
second time, for itself, and writes there.",
    )?;
    if pauses {
        screen.wait()?;
    }
    without(&mut screen)?;
    if pauses {
        screen.wait()?;
    }
    with(&mut screen)?;
    screen.line("\nBoth parts went as told: every address, frame and counter above was read back.")?;
    Ok(())
}

/// The accident.
fn without(screen: &mut Screen) -> anyhow::Result<()> {
    screen.part("Without the device")?;
    let memory = Memory::new(2)?;

    screen.step("The application maps a buffer, registers it, and remembers the registration.")?;
    let buffer = memory.map(0, None)?;
    let entry = Entry { range: buffer.range(), registration: memory.pin(buffer.range())? };
    draw(screen, &memory, Some(&buffer), Some(&entry))?;

    first_message(screen, &buffer, &entry)?;

    screen.step(
        "The application is done and unmaps the buffer. Later it maps a new one, and the\n\
         address is the same: addresses are reused all the time. The frame is another.",
    )?;
    let buffer = map_again(&memory, buffer)?;
    draw(screen, &memory, Some(&buffer), Some(&entry))?;

    screen.step(
        "The next message. The cache has an entry for this address: a hit, so nothing is\n\
         registered. The adapter writes to the frame that it pinned back then.",
    )?;
    ensure!(entry.range == buffer.range(), "the cache should have hit");
    entry.registration.receive(SECOND);
    draw(screen, &memory, Some(&buffer), Some(&entry))?;
    let (seen, lost) = (buffer.read(), memory.read(entry.registration.frame)?);
    ensure!(!seen.starts_with(SECOND), "the message arrived; it shouldn't have");
    ensure!(lost.starts_with(SECOND), "the message isn't where the adapter wrote it");
    let verdict = format!("\"{seen}\"  {}", screen.tone(Tone::Bad, "WRONG: the message isn't there"));
    screen.row("app reads", &verdict)?;
    screen.line(
        "\n    No error, no signal. The adapter's pin keeps the old page alive, where no address\n    \
         of the application leads any more, and the message lies there.",
    )?;
    Ok(())
}

/// The same with the device.
fn with(screen: &mut Screen) -> anyhow::Result<()> {
    screen.part("With the device")?;
    let memory = Memory::new(2)?;

    screen.step(
        "The application opens /dev/ummunotify and maps its counter. It maps a buffer, tells\n\
         the device its range and a cookie of its own, and only then registers it.",
    )?;
    let notifier = Notifier::open_nonblocking().context("open /dev/ummunotify")?;
    let buffer = memory.map(0, None)?;
    notifier.register(buffer.range(), ENTRY).context("ioctl UMMUNOTIFY_REGISTER_REGION")?;
    let entry = Entry { range: buffer.range(), registration: memory.pin(buffer.range())? };
    let seen = notifier.counter().generation();
    draw(screen, &memory, Some(&buffer), Some(&entry))?;
    screen.row("device", &format!("watches {} as cookie {ENTRY}", shown(entry.range)))?;
    screen.row("counter", &seen.get().to_string())?;

    first_message(screen, &buffer, &entry)?;
    ensure!(notifier.counter().generation() == seen, "the counter moved, and nothing was unmapped");

    screen.step("It unmaps the buffer. The counter has moved before munmap returns.")?;
    let range = buffer.range();
    drop(buffer);
    let moved = notifier.counter().generation();
    draw(screen, &memory, None, Some(&entry))?;
    ensure!(moved != seen, "munmap returned, and the counter still is {}", seen.get());
    screen.row("counter", &screen.tone(Tone::Good, &format!("{} -> {}", seen.get(), moved.get())))?;

    screen.step("It maps a new buffer: the same address, another frame.")?;
    let buffer = memory.map(1, Some(range))?;
    draw(screen, &memory, Some(&buffer), Some(&entry))?;

    screen.step(
        "The next message. Before it trusts its cache it compares the counter with the value\n\
         that it remembers: one load from its own memory. They differ, so it reads the events.",
    )?;
    let stale = read_events(screen, &notifier, moved.get())?;
    ensure!(stale.range == entry.range && stale.hint, "the event should name exactly the range {range:x?}");
    screen.line("\n    Entry 1 is stale. It drops it, gives the old pin back, and registers anew.")?;
    drop(entry);
    let entry = Entry { range, registration: memory.pin(range)? };
    draw(screen, &memory, Some(&buffer), Some(&entry))?;

    screen.step("The adapter writes to the frame that is behind the address now.")?;
    entry.registration.receive(SECOND);
    draw(screen, &memory, Some(&buffer), Some(&entry))?;
    let seen = buffer.read();
    ensure!(seen.starts_with(SECOND), "the application reads \"{seen}\"");
    screen.row("app reads", &format!("\"{seen}\"  {}", screen.tone(Tone::Good, "right")))?;
    notifier.unregister(ENTRY).context("ioctl UMMUNOTIFY_UNREGISTER_REGION")
}

/// The first message, which goes well in both parts.
fn first_message(screen: &mut Screen, buffer: &Mapping, entry: &Entry) -> anyhow::Result<()> {
    screen.step("A message arrives: the adapter writes it, the application reads it.")?;
    entry.registration.receive(FIRST);
    let seen = buffer.read();
    ensure!(seen.starts_with(FIRST), "the application reads \"{seen}\"");
    screen.row("app reads", &format!("\"{seen}\"  {}", screen.tone(Tone::Good, "right")))?;
    Ok(())
}

/// Unmaps the buffer and maps the other frame at its address.
fn map_again(memory: &Memory, buffer: Mapping) -> anyhow::Result<Mapping> {
    let range = buffer.range();
    drop(buffer);
    memory.map(1, Some(range))
}

/// Reads all events, shows them, and returns the one that must be among them.
fn read_events(screen: &Screen, notifier: &Notifier, counter: u64) -> anyhow::Result<Invalidation> {
    let mut events = notifier.events();
    let mut found = None;
    for event in events.by_ref() {
        let event = event.context("read /dev/ummunotify")?;
        let hint = if event.hint { "hint" } else { "no hint, so all of" };
        screen.row("event", &format!("INVAL  cookie {}, {hint} {}", event.cookie, shown(event.range)))?;
        ensure!(event.cookie == ENTRY, "cookie {} was never registered", event.cookie);
        found = Some(event);
    }
    let Some(last) = events.generation() else { bail!("the list of events has no LAST") };
    screen.row("event", &format!("LAST   counter {}: that was all", last.get()))?;
    ensure!(last.get() == counter, "LAST says {}, the counter said {counter}", last.get());
    found.context("the counter moved, and no event names the region")
}

/// Who sees which frame, and what the frames hold.
fn draw(
    screen: &Screen,
    memory: &Memory,
    buffer: Option<&Mapping>,
    entry: Option<&Entry>,
) -> anyhow::Result<()> {
    let at = |frame| -> anyhow::Result<String> { Ok(format!("frame {frame} [{}]", memory.read(frame)?)) };
    let application = buffer.map(|b| memory.frame_behind(b.range())).transpose()?;
    let adapter = entry.map(|e| e.registration.frame);
    for frame in 0..2 {
        let left = match buffer.filter(|_| application == Some(frame)) {
            Some(b) => format!("app {:#014x} --->", b.range().start),
            None if frame == 0 && buffer.is_none() => "app (unmapped)".to_owned(),
            None => String::new(),
        };
        let right = if adapter == Some(frame) { "<--- adapter" } else { "" };
        screen.line(format!("      {left:<24}{} {right}", at(frame)?).trim_end())?;
    }
    if let Some(entry) = entry {
        let cached = format!("{:#014x} is frame {}", entry.range.start, entry.registration.frame);
        let right = application.is_none_or(|frame| frame == entry.registration.frame) && buffer.is_some();
        let note = if right { String::new() } else { format!("  {}", screen.tone(Tone::Bad, "stale")) };
        screen.row("cache", &(cached + &note))?;
    }
    Ok(())
}

fn shown(range: PageRange) -> String {
    format!("{:#x}-{:#x}", range.start, range.end)
}
