//! The ummunotify interface in user space.
#![deny(missing_docs)]
