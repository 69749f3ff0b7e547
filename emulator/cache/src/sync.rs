//! What threads share. The code is written against this module alone, so that a model checker runs what is shipped:
//! with `--cfg shuttle` every lock and atomic is shuttle's, which chooses the interleavings.

#[cfg(not(shuttle))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64, fence},
};

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64, fence},
};

#[cfg(shuttle)]
pub(crate) use shuttle::thread::yield_now;
#[cfg(not(shuttle))]
pub(crate) use std::thread::yield_now;

/// Filled once, by whoever comes first; nothing that fills one waits for another thread.
pub(crate) use std::sync::OnceLock;
pub(crate) use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// A lock whose holder panicked guards data that is consistent between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Lets the lock go until `condition` is signalled, or for no reason.
pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}
