//! The unsafe system layer.
#![deny(missing_docs)]

pub mod traits;
