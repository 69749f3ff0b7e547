//! The ummunotify interface in user space: the emulator's library.
//!
//! * [`client`]: the device as a registration cache uses it, on either backend
//! * [`backend`]: the backends, and whether this host lets one work
//! * [`coverage`]: what each layer sees and misses
//! * [`shimfile`]: where the preloadable library is
#![deny(missing_docs)]

pub mod backend;
pub mod client;
pub mod coverage;
pub mod shimfile;
