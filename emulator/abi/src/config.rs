//! Names by which `ummunotify run`, the shim and the supervisor are configured.

/// `auto` (default), `kmod` or `emulated`: which backend an open of the device gets.
pub const ENV_BACKEND: &str = "UMMUNOTIFY_BACKEND";
/// Which layers trap, separated by commas: `auto` (default: notify, with inline where that can be had, or trace if notify
/// can't), `notify` or `trace`; and `inline` before one of the first two.
pub const ENV_TRAP: &str = "UMMUNOTIFY_TRAP";
/// `watch` (default) or `deny`: what is done when a process sets up an io_uring ring.
pub const ENV_IO_URING: &str = "UMMUNOTIFY_IO_URING";
/// Path of the `ummunotify` binary that the shim starts as supervisor.
pub const ENV_BINARY: &str = "UMMUNOTIFY_BINARY";
/// `off`, `error`, `warn` (default), `info` or `debug`.
pub const ENV_LOG: &str = "UMMUNOTIFY_LOG";
/// Where the supervisor's log goes; standard error if unset.
pub const ENV_LOG_FILE: &str = "UMMUNOTIFY_LOG_FILE";
/// `1`: the supervisor prints statistics when a process that opened the device ends.
pub const ENV_STATS: &str = "UMMUNOTIFY_STATS";

/// What the loader preloads, separated by colons or spaces (ld.so(8)).
pub const PRELOAD: &str = "LD_PRELOAD";
/// File name of the preloadable library.
pub const SHIM_FILE: &str = "libummunotify_shim.so";
/// First argument that makes the binary a supervisor; the control socket is descriptor [`SUPERVISE_FD`].
pub const SUPERVISE_COMMAND: &str = "supervise";
/// Descriptor of the control socket in a supervisor that was just executed.
pub const SUPERVISE_FD: i32 = 3;
