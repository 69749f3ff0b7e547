//! The supervisor's log.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Mutex, OnceLock};

use ummunotify_abi::config;

/// How much is logged; each level contains the ones before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// Nothing.
    Off,
    /// What stops the emulator.
    Error,
    /// What costs coverage or exactness.
    Warn,
    /// Contexts and processes that come and go.
    Info,
    /// Every trapped call that could hit a region.
    Debug,
}

impl Level {
    /// The level of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "off" => Self::Off,
            "error" => Self::Error,
            "warn" => Self::Warn,
            "info" => Self::Info,
            "debug" => Self::Debug,
            _ => return None,
        })
    }
}

struct Log {
    level: Level,
    file: Mutex<Option<File>>,
}

static LOG: OnceLock<Log> = OnceLock::new();

/// Reads [`config::ENV_LOG`] and [`config::ENV_LOG_FILE`]. A file that can't be opened is said once on
/// standard error, and the log goes there instead.
pub fn init() {
    let level = std::env::var(config::ENV_LOG).ok().and_then(|v| Level::parse(&v)).unwrap_or(Level::Warn);
    let file = std::env::var_os(config::ENV_LOG_FILE).filter(|p| !p.is_empty()).and_then(|path| {
        match OpenOptions::new().create(true).append(true).open(&path) {
            Ok(file) => Some(file),
            Err(e) => {
                eprintln!(
                    "ummunotify: can't open the log {}: {e}; logging to standard error",
                    path.display()
                );
                None
            }
        }
    });
    // A second call finds it set, which is as good.
    let _ = LOG.set(Log { level, file: Mutex::new(file) });
}

/// True if lines of `level` are wanted.
pub fn wants(level: Level) -> bool {
    LOG.get().is_some_and(|log| level <= log.level)
}

/// Writes one line, best effort: a full disk must not stop the supervisor.
pub fn line(level: Level, text: std::fmt::Arguments<'_>) {
    let Some(log) = LOG.get() else { return };
    if level > log.level || level == Level::Off {
        return;
    }
    print(text);
}

/// Writes one line whatever the level, for what was asked for by name (statistics).
pub fn print(text: std::fmt::Arguments<'_>) {
    let line = format!("ummunotify[{}]: {text}\n", std::process::id());
    let file = LOG.get().and_then(|log| log.file.lock().ok());
    // Errors end here: there is no better place to report them.
    let _ = match file.as_deref() {
        Some(Some(file)) => (&*file).write_all(line.as_bytes()),
        _ => std::io::stderr().write_all(line.as_bytes()),
    };
}

/// Logs at warn.
macro_rules! warning {
    ($($arg:tt)*) => { $crate::supervisor::log::line($crate::supervisor::log::Level::Warn, format_args!($($arg)*)) };
}
/// Logs at info.
macro_rules! info {
    ($($arg:tt)*) => { $crate::supervisor::log::line($crate::supervisor::log::Level::Info, format_args!($($arg)*)) };
}
/// Logs at debug, without formatting unless wanted.
macro_rules! debug {
    ($($arg:tt)*) => {
        if $crate::supervisor::log::wants($crate::supervisor::log::Level::Debug) {
            $crate::supervisor::log::line($crate::supervisor::log::Level::Debug, format_args!($($arg)*))
        }
    };
}
pub(crate) use {debug, info, warning};
