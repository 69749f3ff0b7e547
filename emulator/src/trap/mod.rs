//! From a trapped system call to the exact list of invalidations.
//!
//! [`policy`] says which calls are trapped and [`filter`] makes the seccomp program of it; [`operation`] reads a
//! trapped call's registers; [`mod@effect`] computes, with the help of what [`crate::target`] can learn about the
//! process, which ranges the call will invalidate, in the kernel's order. [`device`] reads the device's own calls, where
//! those are trapped. [`layers`] says which layers do all that. Nothing here knows of regions: what is hit is the
//! engine's matter.

pub mod bpf;
pub mod device;
pub mod effect;
pub mod filter;
#[cfg(test)]
mod inline_agrees;
pub mod layers;
pub mod operation;
pub mod policy;

pub use device::DeviceCall;
pub use effect::{Effect, Reason, effect};
pub use filter::Filter;
pub use layers::{FaultLayer, Layers, Net, Rings};
pub use operation::{Decoded, Operation, Reach, Syscall};
pub use policy::Policy;
