//! What the demonstration prints with.

use std::io::{self, BufRead, IsTerminal, Write};

/// Standard output, with colours and pauses where they are wanted.
#[derive(Debug)]
pub(super) struct Screen {
    colours: bool,
    /// Wait for Enter between the steps.
    pauses: bool,
    step: u32,
}

/// How a text is emphasised on a terminal.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tone {
    Title,
    Good,
    Bad,
    Faint,
}

impl Tone {
    const fn code(self) -> &'static str {
        match self {
            Self::Title => "1",
            Self::Good => "1;32",
            Self::Bad => "1;31",
            Self::Faint => "2",
        }
    }
}

impl Screen {
    pub(super) fn new(pauses: bool) -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let dumb = set("TERM").is_none_or(|term| term == "dumb");
        Self { colours: io::stdout().is_terminal() && set("NO_COLOR").is_none() && !dumb, pauses, step: 0 }
    }

    pub(super) fn tone(&self, tone: Tone, text: &str) -> String {
        if self.colours { format!("\x1b[{}m{text}\x1b[0m", tone.code()) } else { text.to_owned() }
    }

    pub(super) fn line(&self, text: &str) -> io::Result<()> {
        writeln!(io::stdout(), "{text}")
    }

    /// A part of the demonstration; its steps count from 1.
    pub(super) fn part(&mut self, title: &str) -> io::Result<()> {
        self.step = 0;
        self.line(&format!("\n{}", self.tone(Tone::Title, title)))
    }

    /// A step: a line or two of explanation, after a pause if one is wanted.
    pub(super) fn step(&mut self, text: &str) -> io::Result<()> {
        if self.pauses && self.step > 0 {
            self.wait()?;
        }
        self.step += 1;
        let mut number = format!("{}.", self.step);
        self.line("")?;
        for line in text.lines() {
            self.line(&format!("{number:<4}{line}"))?;
            number.clear();
        }
        Ok(())
    }

    /// Waits for Enter; the end of the input counts as one.
    pub(super) fn wait(&self) -> io::Result<()> {
        let mut out = io::stdout();
        write!(out, "{}", self.tone(Tone::Faint, "    [Enter]"))?;
        out.flush()?;
        if io::stdin().lock().read_line(&mut String::new())? == 0 {
            self.line("")?;
        }
        Ok(())
    }

    /// A row of the drawing: who, and what.
    pub(super) fn row(&self, who: &str, what: &str) -> io::Result<()> {
        self.line(&format!("      {who:<13}{what}"))
    }
}
