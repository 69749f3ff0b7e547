//! Steps of the engine at which a test interferes: kills the thread (a panic that unwinds; the engine has no
//! destructor that would tidy up) or does something else there, as another thread would that runs meanwhile.

use std::boxed::Box;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

std::thread_local! {
    static LEFT: Cell<u64> = const { Cell::new(0) };
    static ACT: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

struct Killed;

/// Called by the engine.
pub(crate) fn step() {
    let left = LEFT.get();
    if left == 0 {
        return;
    }
    LEFT.set(left - 1);
    if left == 1 {
        match ACT.take() {
            Some(act) => act(),
            None => resume_unwind(Box::new(Killed)),
        }
    }
}

/// Runs `body` and kills it at step `n` (from 1); false if it ended before.
pub(crate) fn killed_at(n: u64, body: impl FnOnce()) -> bool {
    LEFT.set(n);
    let result = catch_unwind(AssertUnwindSafe(body));
    LEFT.set(0);
    match result {
        Ok(()) => false,
        Err(payload) if payload.is::<Killed>() => true,
        Err(payload) => resume_unwind(payload),
    }
}

/// Runs `body` and `act` at its step `n`; false if `body` ended before.
pub(crate) fn interrupted_at(n: u64, body: impl FnOnce(), act: impl FnOnce() + 'static) -> bool {
    ACT.set(Some(Box::new(act)));
    LEFT.set(n);
    body();
    LEFT.set(0);
    ACT.take().is_none()
}
