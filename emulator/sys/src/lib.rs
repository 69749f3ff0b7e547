//! The unsafe system layer.
#![deny(missing_docs)]
