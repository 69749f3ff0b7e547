//! The binary interfaces of the project, in one crate that both sides of each boundary compile:
//! the device as a client sees it ([`device`]) and a short way to it for ours ([`direct`]), ranges ([`range`]), the
//! shared memory of a context ([`arena`]), what the shim and the supervisor say to each other ([`wire`]), and the
//! names that configure them ([`config`]).
//!
//! Nothing here makes a system call or allocates.
#![no_std]
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod arena;
pub mod config;
pub mod device;
pub mod direct;
pub mod range;
pub mod wire;

pub use range::PageRange;
