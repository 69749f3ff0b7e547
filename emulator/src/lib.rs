//! The ummunotify interface in user space: the emulator's library.
//!
//! * [`attach`]: bringing a running process under the emulator
//! * [`client`]: the device as a registration cache uses it, on either backend
//! * [`cache`]: a registration cache that uses it
//! * [`backend`]: the backends, and whether this host lets one work
//! * [`available`]: whether this host lets a layer that traps work
//! * [`coverage`]: what each layer sees and misses
//! * [`patch`]: lets a process look at its own calls before they are trapped
//! * [`shimfile`]: where the preloadable library is
//! * [`trap`]: the filter, and what a trapped call does to mappings
//! * [`target`]: what a look at a process tells
//! * [`supervisor`]: the process that answers trapped calls
//! * [`switch`]: moving an open context to the other backend
//!
//! Data flows one way: application -> trap ([`trap`], [`target`]) -> engine (crate `ummunotify-engine`) ->
//! shared-memory arena -> client. Traps touch the arena only through the engine; the engine knows no trap.
#![deny(missing_docs)]

pub mod attach;
pub mod available;
pub mod backend;
pub mod client;
pub mod coverage;
pub mod patch;
pub mod shimfile;
pub mod supervisor;
pub mod switch;
pub mod target;
pub mod trap;

pub use ummunotify_cache as cache;
