//! `ummunotify run`: checks, sets the environment, and becomes the command.

use std::ffi::{CString, OsStr, OsString};
use std::fs::OpenOptions;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context as _;
use ummunotify::available;
use ummunotify::backend::{Backend as _, Choice, Kmod};
use ummunotify::shimfile;
use ummunotify::trap::Filter;
use ummunotify::trap::layers::{FaultLayer, Layers, Net, Rings};
use ummunotify_abi::config;
use ummunotify_sys::seccomp;

use super::command::{self, Kind, Program};
use super::enclosure;
use super::probe::host;
use super::{EXIT_USAGE, Failure, LogLevel, RunArguments, complain};

/// The emulator can't work here (the convention of env, nohup and timeout).
const EXIT_CANNOT: i32 = 125;
/// The command can't be executed.
const EXIT_NOT_EXECUTABLE: i32 = 126;

/// Never returns if all goes well: this process becomes the command.
pub(super) fn main(options: &RunArguments) -> Result<i32, Failure> {
    let Some(name) = options.command.first() else {
        return Err(Failure::new(EXIT_USAGE, "run needs a command, as in: ummunotify run -- ./client"));
    };
    if let Some(shown) = &options.instead_of {
        return Err(start_instead(options, name, shown));
    }
    let settings = Settings::new(options)?;
    let program = command::find(name).map_err(|m| Failure::new(m.exit_code(), m.to_string()))?;
    look_at(&program)?;
    let emulated = check_backend(settings.backend, settings.layers.net)
        .map_err(|message| Failure::new(EXIT_CANNOT, message))?;
    if emulated {
        settings.name_losses()?;
    }
    let binary = own_path().map_err(|error| Failure { error, code: EXIT_CANNOT })?;
    let shim = shimfile::find(&binary).map_err(|e| Failure { error: e.into(), code: EXIT_CANNOT })?;
    settings.export(&binary, &shim.path);
    if !program.gains_privileges {
        settings.deny_rings()?;
    }
    if program.kind == Kind::Static && !program.gains_privileges && settings.emulates() {
        let name = program.image.display().to_string();
        let help = "it is statically linked: see `ummunotify doctor`, or use --backend kmod";
        settings
            .enclose(&name)
            .with_context(|| format!("{name} can't be given the device; {help}"))
            .map_err(|error| Failure { error, code: EXIT_CANNOT })?;
    }
    let error = execute(&program.path, &options.command);
    Err(Failure::new(EXIT_NOT_EXECUTABLE, format!("{}: {error}", program.path.display())))
}

/// Starts a static program that another program executes. It would have run without us: so it does where we can't
/// help it.
fn start_instead(options: &RunArguments, path: &OsStr, shown: &OsStr) -> Failure {
    let enclosed = || -> anyhow::Result<()> {
        let program = command::find(path).map_err(|m| anyhow::anyhow!("{m}"))?;
        let settings = Settings::new(options).map_err(|failure| failure.error)?;
        if program.kind == Kind::Static && !program.gains_privileges && settings.emulates() {
            settings.enclose(&program.image.display().to_string())?;
        }
        Ok(())
    };
    if let Err(error) = enclosed() {
        complain(&format!("notice: {} runs without the device: {error:#}", path.display()));
    }
    let mut arguments = options.command.clone();
    arguments[0] = shown.to_owned();
    let error = execute(Path::new(path), &arguments);
    Failure::new(EXIT_NOT_EXECUTABLE, format!("{}: {error}", path.display()))
}

/// What the options and the environment say.
#[derive(Debug)]
struct Settings {
    backend: Choice,
    layers: Layers,
    rings: Rings,
    log: Option<LogLevel>,
    log_file: Option<PathBuf>,
    stats: bool,
}

impl Settings {
    fn new(options: &RunArguments) -> Result<Self, Failure> {
        let usage = |message: String| Failure::new(EXIT_USAGE, message);
        let inherited = std::env::var(config::ENV_BACKEND).ok().filter(|word| !word.is_empty());
        let backend = match (options.backend, inherited) {
            (Some(choice), _) => choice,
            (None, Some(word)) => word.parse().map_err(|e| usage(format!("{}: {e}", config::ENV_BACKEND)))?,
            (None, None) => Choice::default(),
        };
        let layers = chosen("--trap", options.trap.as_deref(), config::ENV_TRAP).map_err(usage)?;
        let rings = chosen("--io-uring", options.io_uring.as_deref(), config::ENV_IO_URING).map_err(usage)?;
        let inherited = std::env::var_os(config::ENV_LOG_FILE).filter(|path| !path.is_empty());
        let named = match (&options.log_file, &inherited) {
            (Some(path), _) => Some(("--log-file", path.as_path())),
            (None, Some(path)) => Some((config::ENV_LOG_FILE, Path::new(path))),
            (None, None) => None,
        };
        let log_file = named
            .map(|(source, path)| log_file(source, path))
            .transpose()
            .map_err(|error| Failure { error, code: EXIT_CANNOT })?;
        Ok(Self { backend, layers, rings, log: options.log, log_file, stats: options.stats })
    }

    /// True if an open of the device gets the emulated one.
    fn emulates(&self) -> bool {
        match self.backend {
            Choice::Kmod => false,
            Choice::Emulated => true,
            Choice::Auto => Kmod.check().is_err(),
        }
    }

    /// Puts a filter around a static program. The supervisor answers its calls of the device through a listener.
    fn enclose(&self, name: &str) -> anyhow::Result<()> {
        anyhow::ensure!(
            !matches!(self.layers.net, Net::Trace | Net::None),
            "the layer {} gives the device to dynamic programs only; use --trap notify",
            self.layers
        );
        enclosure::enclose(name)
    }

    /// Refuses rings to this process and all that it becomes or starts, before any can be made. The filter that comes
    /// with the first open of the device is too late for that, and the layer fault alone has none.
    fn deny_rings(&self) -> Result<(), Failure> {
        if self.rings != Rings::Deny {
            return Ok(());
        }
        match (seccomp::restrict(&Filter::bytes(&Filter::without_rings())), self.layers.net) {
            (Ok(()), _) => {}
            (Err(e), Net::None) => {
                let message =
                    format!("--io-uring=deny: a seccomp filter: {e}; allow it, or use --trap trace");
                return Err(Failure::new(EXIT_CANNOT, message));
            }
            (Err(e), _) => complain(&format!(
                "notice: --io-uring=deny: a seccomp filter: {e}. Rings are refused from the first open of the device on, \
                 not before"
            )),
        }
        Ok(())
    }

    /// Says once what can't be seen here although it was asked for, or matters.
    fn name_losses(&self) -> Result<(), Failure> {
        let Layers { net, fault, .. } = self.layers;
        if fault == FaultLayer::Off {
            return Ok(());
        }
        match (host::try_userfaultfd(), net, fault) {
            (Ok(()), Net::None, _) => complain(
                "notice: the layer fault alone hears of an operation only when the memory is gone, and of few kinds of \
                 them; doctor names which",
            ),
            (Ok(()), ..) => {}
            (Err(e), Net::None, _) => {
                let message = format!("--trap fault: userfaultfd: {e}; allow it, or use --trap notify");
                return Err(Failure::new(EXIT_CANNOT, message));
            }
            (Err(e), _, FaultLayer::On) => complain(&format!(
                "notice: userfaultfd can't be had here: {e}. The layer fault sees nothing: what changes memory through \
                 io_uring goes unseen"
            )),
            (Err(e), ..) if self.rings != Rings::Deny && host::try_io_uring().is_ok() => complain(&format!(
                "notice: userfaultfd can't be had here: {e}. Programs may use io_uring, and what changes memory through \
                 it goes unseen (--io-uring=deny closes that)"
            )),
            (Err(_), ..) => {}
        }
        Ok(())
    }

    /// Puts all of it where the shim and the supervisor look.
    fn export(&self, binary: &Path, shim: &Path) {
        let mut names = vec![
            (config::ENV_BINARY, binary.as_os_str().to_owned()),
            (config::ENV_BACKEND, self.backend.name().into()),
            (config::ENV_TRAP, self.layers.to_string().into()),
            (config::ENV_IO_URING, self.rings.name().into()),
            (config::PRELOAD, preload(shim, std::env::var_os(config::PRELOAD).as_deref())),
        ];
        names.extend(self.log.map(|level| (config::ENV_LOG, level.name().into())));
        names.extend(self.log_file.clone().map(|path| (config::ENV_LOG_FILE, path.into_os_string())));
        names.extend(self.stats.then(|| (config::ENV_STATS, OsString::from("1"))));
        for (name, value) in names {
            // SAFETY: this program has one thread.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

/// What an option says, else a variable, else the default.
fn chosen<T: Default + FromStr<Err = String>>(
    option: &str,
    given: Option<&str>,
    variable: &str,
) -> Result<T, String> {
    let inherited = std::env::var(variable).ok().filter(|text| !text.is_empty());
    let (name, text) = match (given, inherited) {
        (Some(text), _) => (option, text.to_owned()),
        (None, Some(text)) => (variable, text),
        (None, None) => return Ok(T::default()),
    };
    text.parse().map_err(|e| format!("{name}: {e}"))
}

/// An absolute path that can be written to; `source` names where the path comes from.
fn log_file(source: &str, path: &Path) -> anyhow::Result<PathBuf> {
    let full = std::path::absolute(path).with_context(|| format!("{source}: current directory"))?;
    OpenOptions::new()
        .append(true)
        .create(true)
        .open(&full)
        .with_context(|| format!("{source} {}: can't be written; choose another file", path.display()))?;
    Ok(full)
}

/// The library first, then what was there; not twice in nested runs.
fn preload(shim: &Path, before: Option<&OsStr>) -> OsString {
    let mut list = shim.as_os_str().to_owned();
    let rest = before.map_or(&b""[..], OsStr::as_bytes);
    let is_separator = |b: &u8| b" :".contains(b);
    for entry in rest.split(is_separator).filter(|e| !e.is_empty() && *e != shim.as_os_str().as_bytes()) {
        list.push(":");
        list.push(OsStr::from_bytes(entry));
    }
    list
}

/// The file of this program: the shim starts it as supervisor.
pub(super) fn own_path() -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe().context("readlink /proc/self/exe: is /proc mounted?")?;
    anyhow::ensure!(
        path.exists(),
        "{}: this program's own file is gone, and the supervisor is started from it; start the new one",
        path.display()
    );
    Ok(path)
}

/// Says what can't be done for this program, or refuses it.
fn look_at(program: &Program) -> Result<(), Failure> {
    let name = program.image.display();
    match &program.kind {
        Kind::Dynamic | Kind::Static | Kind::Text => {}
        Kind::Foreign(what) => {
            let message = format!("{name} is {what}; only 64-bit x86 programs find the device");
            return Err(Failure::new(EXIT_NOT_EXECUTABLE, message));
        }
    }
    if program.gains_privileges {
        complain(&format!(
            "notice: {name} is set-user-ID, set-group-ID or has capabilities: nothing is preloaded into it, nor a \
             filter put around it, so it runs without the device"
        ));
    }
    Ok(())
}

/// Tries the backend that an open of the device will use, and the layer; true if it is the emulator.
fn check_backend(choice: Choice, net: Net) -> Result<bool, String> {
    let module = || Kmod.check().map(|()| false).map_err(|obstacle| obstacle.to_string());
    let emulator = || {
        available::check(net).map(|_| true).map_err(|obstacles| {
            let lines: Vec<String> = obstacles.iter().map(ToString::to_string).collect();
            lines.join("; and ")
        })
    };
    match choice {
        Choice::Kmod => module(),
        Choice::Emulated => emulator(),
        Choice::Auto => module().or_else(|_| emulator()),
    }
}

/// Becomes the program, as execvp does; returns only the error.
fn execute(path: &Path, arguments: &[OsString]) -> io::Error {
    let error = exec(path, arguments);
    if error.raw_os_error() != Some(libc::ENOEXEC) {
        return error;
    }
    // Neither ELF nor #!: a script for the shell.
    let mut shell = vec![OsString::from("/bin/sh"), path.as_os_str().to_owned()];
    shell.extend_from_slice(arguments.get(1..).unwrap_or_default());
    exec(Path::new("/bin/sh"), &shell)
}

unsafe extern "C" {
    /// libc's.
    static environ: *const *const libc::c_char;
}

fn exec(path: &Path, arguments: &[OsString]) -> io::Error {
    let text = |s: &OsStr| CString::new(s.as_bytes()).map_err(io::Error::from);
    let (Ok(path), Ok(arguments)) =
        (text(path.as_os_str()), arguments.iter().map(|a| text(a)).collect::<Result<Vec<_>, _>>())
    else {
        return io::Error::from(io::ErrorKind::InvalidInput);
    };
    let mut pointers: Vec<_> = arguments.iter().map(|a| a.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // Not std's exec: that one resets the signal mask and SIGPIPE, which are the command's to inherit. Nor libc's:
    // the library, where it is preloaded into us, would send a static program here again.
    // SAFETY: NUL-terminated strings, and arrays of them that end with a null pointer.
    unsafe {
        libc::syscall(libc::SYS_execve, path.as_ptr(), pointers.as_ptr(), environ);
    }
    io::Error::last_os_error()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_comes_first_and_once() {
        let shim = Path::new("/x/shim.so");
        let list = |before: &str| preload(shim, Some(OsStr::new(before))).into_string().unwrap();
        assert_eq!(preload(shim, None), "/x/shim.so");
        assert_eq!(list(""), "/x/shim.so");
        assert_eq!(list("a.so b.so"), "/x/shim.so:a.so:b.so");
        assert_eq!(list("a.so:/x/shim.so"), "/x/shim.so:a.so");
    }

    #[test]
    fn only_layers_that_exist_are_taken() {
        let taken = |text: &str| chosen::<Layers>("--trap", Some(text), "UMMUNOTIFY_TRAP_OF_NOBODY");
        assert_eq!(taken("notify,fault").map(|layers| layers.to_string()).as_deref(), Ok("notify,fault"));
        for layers in ["", "notify,trap", "notify,"] {
            assert!(taken(layers).is_err_and(|e| e.starts_with("--trap: there are the layers")), "{layers}");
        }
        assert_eq!(chosen::<Layers>("--trap", None, "UMMUNOTIFY_TRAP_OF_NOBODY"), Ok(Layers::default()));
    }
}
