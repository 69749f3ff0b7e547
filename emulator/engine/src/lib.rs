//! Regions, events and the generation counter.
#![no_std]
#![deny(missing_docs)]
