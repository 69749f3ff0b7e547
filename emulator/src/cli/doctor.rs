//! `ummunotify doctor`: what this host allows, layer by layer, and what is lost.

use std::fmt;
use std::io::{self, Write};
use std::process::Command;
use std::time::Duration;

use ummunotify::available::{self, try_trace, yama_scope};
use ummunotify::backend::{Backend as _, Kmod, Obstacle};
use ummunotify::coverage::{GAPS, Layer, ROWS, Row, Sight};
use ummunotify::shimfile::{self, Origin};
use ummunotify::trap::layers::{Layers, Net};

use super::probe::host;
use super::probe::{Answer, notify};
use super::run::own_path;
use super::trial::attempt;
use super::{DoctorArguments, EXIT_USAGE, Failure};
use ummunotify_sys::uffd::{Memory, Way};

/// Column at which the answers begin.
const ANSWERS: usize = 64;
/// How long the start of a program and its open of the device may take.
const OPENING: Duration = Duration::from_secs(10);

/// Prints the report; 0 if `ummunotify run` works here, else 1.
pub(super) fn main(options: &DoctorArguments) -> Result<i32, Failure> {
    if options.json {
        return Ok(json(&mut io::stdout().lock())?);
    }
    if options.coverage {
        let set = |list: &str| list.parse::<Layers>();
        let layers = options.trap.as_deref().map_or_else(|| Ok(Layers::default()), set);
        let layers = layers.map_err(|e| Failure::new(EXIT_USAGE, format!("--trap: {e}")))?;
        coverage(&layers.seen_by(), &mut io::stdout().lock())?;
        return Ok(0);
    }
    let mut report = Report {
        out: io::stdout().lock(),
        missing: Vec::new(),
        notify: Vec::new(),
        trace: None,
        inline: false,
    };
    report.line(
        "Each line was tried just now, in a process of its own; `since` is the kernel that brought it.\n",
    )?;
    let module = report.module()?;
    report.notify_layer()?;
    report.trace_layer()?;
    report.supervisor()?;
    report.library()?;
    report.inline_layer()?;
    let watched = report.fault_layer()?;
    report.other_layers(watched)?;
    // Without userfaultfd the gap is back.
    report.losses(if watched { Layer::ALL } else { &[Layer::Notify] })?;
    Ok(report.verdict(module)?)
}

/// What `run` would use here: backend, layer, whether a filter picks the calls, whether libc's are looked at in the process,
/// whether userfaultfd is there for rings (and whether rings are), what the emulator doesn't see with these, and what of
/// that is on account of this host alone, since a better layer can't be had.
fn json(out: &mut impl Write) -> io::Result<i32> {
    let module = Kmod.check().is_ok();
    let net = available::check(Net::Auto).ok();
    let layer = net.map(|net| if net == Net::Trace { Layer::Trace } else { Layer::Notify });
    let word = |word: Option<&str>| word.map_or_else(|| "null".to_owned(), |word| format!("\"{word}\""));
    let backend = if module { Some("kmod") } else { layer.map(|_| "emulated") };
    let filter = layer.map(|layer| layer != Layer::Trace || host::trace_action().works());
    let (fault, rings) = (host::try_userfaultfd().is_ok(), host::try_io_uring().is_ok());
    let layers: Vec<Layer> = layer.into_iter().chain(fault.then_some(Layer::Fault)).collect();
    let is_unseen = |layers: &[Layer], row: &Row| !row.by_all(layers).is_seen();
    let unseen = ROWS.iter().filter(|row| is_unseen(&layers, row)).map(|row| row.key);
    let gaps = || GAPS.iter().filter(|gap| layer.is_none_or(|layer| gap.is_of(layer)));
    // Keys are plain words: nothing in them needs an escape.
    let inline = layer == Some(Layer::Notify) && try_inline().is_ok();
    let list = |keys: &mut dyn Iterator<Item = &str>| -> String {
        keys.map(|key| word(Some(key))).collect::<Vec<_>>().join(", ")
    };
    let lost = gaps().filter(|gap| layer.is_some() && gap.by.is_some()).map(|gap| gap.key);
    let unwatched =
        ROWS.iter().filter(|row| rings && is_unseen(&layers, row) && row.by(Layer::Fault).is_seen());
    let lost = lost.chain(unwatched.filter(|_| layer.is_some()).map(|row| row.key));
    writeln!(
        out,
        "{{\"backend\": {}, \"layer\": {}, \"filter\": {}, \"lost\": [{}], \"inline\": {inline}, \"fault\": {fault}, \"io_uring\": {rings}, \
         \"unseen\": [{}]}}",
        word(backend),
        word(layer.map(Layer::name)),
        filter.map_or_else(|| "null".to_owned(), |filter| filter.to_string()),
        list(&mut { lost }),
        list(&mut unseen.chain(gaps().map(|gap| gap.key))),
    )?;
    Ok(i32::from(backend.is_none()))
}

/// A line for each row of the table, as these layers together see it.
fn coverage(layers: &[Layer], out: &mut impl Write) -> io::Result<()> {
    ROWS.iter()
        .try_for_each(|row| writeln!(out, "{}\t{}\t{}", row.key, row.by_all(layers).word(), row.operation))
}

/// What is printed, and what it comes to.
struct Report<W> {
    out: W,
    /// Things that the emulator can't do without and that this host refuses.
    missing: Vec<&'static str>,
    /// The same for the notify layer.
    notify: Vec<&'static str>,
    /// Why the trace layer can't be had.
    trace: Option<Obstacle>,
    /// The inline layer can be had with notify.
    inline: bool,
}

/// Has a process of this program open the device so; the library says on standard error what is in the way.
fn try_inline() -> Result<(), String> {
    let binary = own_path().map_err(|e| format!("{e:#}"))?;
    let mut command = Command::new(&binary);
    command
        .args(["run", "--backend", "emulated", "--trap", "inline,notify", "--log", "warn", "--"])
        .arg(&binary)
        .args(["bench", "--worker", "device"]);
    let trial = attempt(&mut command, OPENING).map_err(|e| e.to_string())?;
    if trial.success && trial.said.is_empty() { Ok(()) } else { Err(complaint(&trial.said).to_owned()) }
}

/// Of what the library said the reason.
fn complaint(said: &str) -> &str {
    let last = said.trim_end().lines().next_back().unwrap_or("it ended and said nothing");
    last.split_once("the inline layer isn't used: ").map_or(last, |(_, why)| why)
}

impl<W: Write> Report<W> {
    fn line(&mut self, text: impl fmt::Display) -> io::Result<()> {
        writeln!(self.out, "{text}")
    }

    fn probe(&mut self, what: &str, answer: impl fmt::Display) -> io::Result<()> {
        writeln!(self.out, "  {what:<ANSWERS$}{answer}")
    }

    /// A probe that the emulator depends on.
    fn needed(&mut self, what: &'static str, answer: Answer) -> io::Result<()> {
        if !answer.works() {
            self.missing.push(what);
        }
        self.probe(what, answer)
    }

    fn module(&mut self) -> io::Result<bool> {
        self.line("kmod: the kernel module, complete and cheapest; `run` prefers it where it is loaded")?;
        let answer = Kmod.check();
        match &answer {
            Ok(()) => self.probe("/dev/ummunotify answers", "yes")?,
            Err(obstacle) => {
                self.probe("/dev/ummunotify answers", format_args!("no: {:?}", obstacle.answer))?
            }
        }
        Ok(answer.is_ok())
    }

    fn notify_layer(&mut self) -> io::Result<()> {
        self.line("\nnotify: seccomp user notification, the layer that `run` prefers")?;
        for (what, answer) in [
            ("listener (since 5.0)", notify::listener()),
            ("let a call go on after a look, CONTINUE (since 5.5)", notify::continues()),
            ("all threads at once, TSYNC with a listener (since 5.7)", notify::all_threads()),
        ] {
            if !answer.works() {
                self.notify.push(what);
            }
            self.probe(what, answer)?;
        }
        self.probe("descriptor injection, ADDFD (since 5.9)", notify::inject())?;
        self.probe("the same and the answer at once, ADDFD SEND (since 5.14)", notify::inject_and_answer())?;
        let killable = notify::wait_killable();
        self.probe("signals wait for the answer, WAIT_KILLABLE (since 6.0)", killable)?;
        if !killable.works() {
            self.line(
                "    without it a signal may end a trapped munmap with EINTR, or have it trapped twice",
            )?;
        }
        Ok(())
    }

    fn trace_layer(&mut self) -> io::Result<()> {
        self.line("\ntrace: ptrace, where notify can't be had or is not wanted")?;
        self.trace = try_trace().err();
        let answer = self.trace.as_ref().map_or(Answer::Works, |obstacle| Answer::Refused(obstacle.answer));
        self.probe("trace a process that names its tracer", answer)?;
        if let Some(obstacle) = &self.trace {
            writeln!(self.out, "    {}", obstacle.help)?;
        }
        let filter = host::trace_action();
        self.probe("stop only the calls that matter, SECCOMP_RET_TRACE", filter)?;
        if !filter.works() {
            self.line(
                "    without it every system call is stopped, at some 80 times the price of a cheap one",
            )?;
        }
        self.line(
            "    it sees the ends of calls, too; but no debugger can attach to the client, and of calls that another\n    \
             program's seccomp listener is asked about it isn't told",
        )
    }

    fn supervisor(&mut self) -> io::Result<()> {
        self.line("\nsupervisor: a process that looks at the client that it serves")?;
        let scope = yama_scope();
        let scope = scope.map_or_else(|| "no Yama here".to_owned(), |n| n.to_string());
        self.probe("Yama's ptrace_scope", scope)?;
        self.probe("read the memory of a process beside it", host::read_memory(false))?;
        self.needed("the same when that one has named it, PR_SET_PTRACER", host::read_memory(true))?;
        self.needed("read the mapping table of such a process", host::read_mappings())
    }

    fn library(&mut self) -> io::Result<()> {
        self.line("\nlibrary: what is preloaded into the client")?;
        let found = own_path()
            .map_err(|e| format!("{e:#}"))
            .and_then(|binary| shimfile::find(&binary).map_err(|e| e.to_string()));
        match found {
            Ok(shim) => {
                let note = match shim.origin {
                    Origin::Installed if shim.is_embedded() => "beside this program",
                    Origin::Installed => "beside this program, of another build than the one built in",
                    Origin::Cached => "written from this program",
                };
                self.line(format_args!("  {} ({note})", shim.path.display()))
            }
            Err(error) => {
                self.missing.push("the preloadable library");
                self.line(format_args!("  {error}"))
            }
        }
    }

    fn inline_layer(&mut self) -> io::Result<()> {
        self.line("\ninline: libc's own calls are looked at in the process, with notify as the net")?;
        let answer = if self.missing.is_empty() && self.notify.is_empty() {
            try_inline()
        } else {
            Err("notify can't be had".to_owned())
        };
        self.inline = answer.is_ok();
        self.probe(
            "open the device with libc's calls patched",
            answer.err().map_or_else(|| "yes".to_owned(), |why| format!("no: {why}")),
        )
    }

    /// True if the layer can be had.
    fn fault_layer(&mut self) -> io::Result<bool> {
        self.line(
            "\nfault: userfaultfd, used once the program has an io_uring ring, or by --trap notify,fault",
        )?;
        let mut best = None;
        for (name, way) in [
            ("user mode only (since 5.11)", Way::UserModeOnly),
            ("the plain call", Way::Plain),
            ("/dev/userfaultfd (since 6.1)", Way::Device),
        ] {
            self.probe(&format!("{name}: unmap, remove and remap events"), host::userfaultfd(way))?;
            best = best.max(host::userfaultfd_memory(way));
        }
        let what = match best {
            Some(Memory::Any) => "any, by WP_ASYNC (since 6.7)",
            Some(Memory::AnonymousAndShared) => {
                "anonymous and shared, hugetlb; not files, text, SysV (WP_ASYNC, 6.7)"
            }
            Some(Memory::Anonymous) => "anonymous alone (shared and hugetlb since 5.19, others since 6.7)",
            None => "none: what changes memory through io_uring goes unseen",
        };
        self.probe("memory that can be watched", what)?;
        let alone: Vec<_> =
            ROWS.iter().filter(|r| r.by(Layer::Fault).is_seen()).map(|r| r.operation).collect();
        self.line(format_args!(
            "    alone (--trap fault) it sees no more than {}; and late:\n    the memory is gone, and may be somebody \
             else's already, when the counter moves, before the call returns.\n    Dropped pages (madvise) are told \
             before they go, without an end.",
            alone.join("; ")
        ))?;
        Ok(best.is_some())
    }

    fn other_layers(&mut self, watched: bool) -> io::Result<()> {
        self.line(
            "\nstatic programs: what they need of the above: the listener, descriptor injection and ptrace",
        )?;
        let able = self.notify.is_empty() && self.trace.is_none() && notify::inject().works();
        self.line(if able {
            "    so `ummunotify run` gives them the device; they pay for each open of any file"
        } else {
            "    so a static program can't open the device here"
        })?;
        self.line("\nio_uring: its rings change memory without a system call that seccomp sees")?;
        let rings = host::io_uring();
        self.probe("io_uring_setup", rings)?;
        self.line(match (rings.works(), watched) {
            (true, true) => {
                "    so userfaultfd watches for MADVISE through a ring; FALLOCATE, FTRUNCATE and OPENAT with O_TRUNC \
                 through\n    one go unseen (run --io-uring=deny refuses rings)"
            }
            (true, false) => {
                "    so a program that uses MADVISE or truncates through a ring goes unseen (run --io-uring=deny \
                 refuses rings)"
            }
            (false, _) => "    so this gap is closed here",
        })
    }

    fn losses(&mut self, layers: &[Layer]) -> io::Result<()> {
        self.line("\nReported wider or more often than the kernel module would (never less):")?;
        for row in ROWS.iter().filter(|r| r.by_all(layers) == Sight::Covered) {
            self.line(format_args!("  {}\n      {}", row.operation, row.note))?;
        }
        self.line("\nNot seen by the emulator:")?;
        for row in ROWS.iter().filter(|r| r.by_all(layers) == Sight::Unseen) {
            self.line(format_args!("  {}\n      {}", row.operation, row.note))?;
        }
        for gap in GAPS {
            self.line(format_args!("  {}\n      {}", gap.what, gap.note))?;
        }
        self.line("\nBeyond system calls (only the kernel module sees these):")?;
        for row in ROWS.iter().filter(|r| r.by_all(layers) == Sight::Beyond) {
            self.line(format_args!("  {}\n      {}", row.operation, row.note))?;
        }
        Ok(())
    }

    /// The layer that would be used, if one can be.
    fn layer(&self) -> Option<&'static str> {
        match (self.missing.is_empty(), self.notify.is_empty(), &self.trace) {
            (true, true, _) if self.inline => Some("inline,notify"),
            (true, true, _) => Some("notify"),
            (true, false, None) => Some("trace"),
            _ => None,
        }
    }

    fn verdict(&mut self, module: bool) -> io::Result<i32> {
        let layer = self.layer();
        let mut missing: Vec<_> = self.missing.iter().chain(&self.notify).copied().collect();
        missing.extend(self.trace.iter().map(|obstacle| obstacle.tried));
        let missing = missing.join("; ");
        match (module, layer) {
            (true, Some(layer)) => self.line(format_args!(
                "\n`ummunotify run` works here: with the kernel module; the emulator works too, layer {layer}."
            )),
            (true, None) => self.line(format_args!(
                "\n`ummunotify run` works here: with the kernel module. The emulator doesn't; missing: {missing}."
            )),
            (false, Some(layer)) => {
                self.line(format_args!("\n`ummunotify run` works here: with the emulator, layer {layer}."))
            }
            (false, None) => self.line(format_args!(
                "\n`ummunotify run` doesn't work here. Missing: {missing}.\nWhere the kernel said no, a container's \
                 seccomp profile or an old kernel is the usual\nreason; the kernel module (kmod-compat) is the \
                 other way."
            )),
        }?;
        self.out.flush()?;
        Ok(i32::from(!module && layer.is_none()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;

    fn report(missing: Vec<&'static str>) -> Report<Vec<u8>> {
        Report { out: Vec::new(), missing, notify: Vec::new(), trace: None, inline: false }
    }

    /// Inline where it can be had; without a listener trace is used if it can be had.
    #[test]
    fn the_layer_is_the_best_that_works() {
        let untraceable = || Obstacle { tried: "ptrace", answer: Errno::EPERM, help: "" };
        let mut both = report(vec![]);
        both.trace = Some(untraceable());
        assert_eq!(both.layer(), Some("notify"));
        both.inline = true;
        assert_eq!(both.layer(), Some("inline,notify"));
        both.notify = vec!["listener"];
        assert_eq!(both.layer(), None);
        assert_eq!(both.verdict(false).unwrap(), 1);
        assert!(String::from_utf8(both.out).unwrap().contains("Missing: listener; ptrace"));
        let mut trace = report(vec![]);
        trace.notify = vec!["listener"];
        assert_eq!(trace.layer(), Some("trace"));
        assert_eq!(trace.verdict(false).unwrap(), 0);
    }

    #[test]
    fn what_the_library_complains_of_is_told() {
        let said =
            "ummunotify: warning: the inline layer isn't used: patching this process failed with EPERM\n";
        assert_eq!(complaint(said), "patching this process failed with EPERM");
        assert_eq!(complaint("a\nb\n"), "b");
    }

    #[test]
    fn scripts_get_one_object() {
        let mut out = Vec::new();
        let code = json(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with("{\"backend\": ") && text.ends_with("]}\n"), "{text}");
        assert_eq!(text.contains("\"backend\": null"), code == 1, "{text}");
        let by = text.split("\"layer\": ").nth(1).unwrap().split(',').next().unwrap().trim_matches('"');
        for gap in GAPS {
            let expected = by == "null" || gap.by.is_none_or(|layer| layer.name() == by);
            assert_eq!(text.contains(&format!("\"{}\"", gap.key)), expected, "{}: {text}", gap.key);
        }
    }

    #[test]
    fn the_exit_code_says_whether_the_default_works() {
        assert_eq!(report(vec![]).verdict(false).unwrap(), 0);
        assert_eq!(report(vec!["listener"]).verdict(true).unwrap(), 0);
        let mut bad = report(vec!["listener"]);
        assert_eq!(bad.verdict(false).unwrap(), 1);
        assert!(String::from_utf8(bad.out).unwrap().contains("Missing: listener"));
    }

    #[test]
    fn scripts_get_every_row() {
        let mut out = Vec::new();
        coverage(&[Layer::Notify], &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.lines().count(), ROWS.len());
        assert!(text.contains("munmap\texact\tmunmap\n"), "{text}");
        assert!(text.lines().all(|line| line.split('\t').count() == 3), "{text}");
    }

    #[test]
    fn every_gap_is_named() {
        let mut r = report(vec![]);
        r.losses(Layer::ALL).unwrap();
        let text = String::from_utf8(r.out).unwrap();
        for row in ROWS.iter().filter(|r| r.by_all(Layer::ALL) != Sight::Exact) {
            assert!(text.contains(row.operation) && text.contains(row.note), "{}", row.key);
        }
        for gap in GAPS {
            assert!(text.contains(gap.what), "{}", gap.key);
        }
    }
}
