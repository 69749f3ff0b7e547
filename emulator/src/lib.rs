//! The ummunotify interface in user space: the device is emulated by a preloaded library (the shim) and a
//! supervisor process that traps mapping changes.
//!
//! Data flows one way: application -> trap ([`trap`], [`target`]) -> engine (crate `ummunotify-engine`) ->
//! shared-memory arena -> client. Traps touch the arena only through the engine; the engine knows no trap.
#![deny(missing_docs)]
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "creates engines on freshly mapped memory")]
pub mod supervisor;
pub mod target;
pub mod trap;
