//! The ummunotify interface in user space.
#![deny(missing_docs)]

pub mod target;
pub mod trap;
