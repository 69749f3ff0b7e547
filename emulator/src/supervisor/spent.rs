//! For tests: what is done where no descriptor is left.

use std::fs::File;

use nix::sched::{CloneFlags, unshare};

/// Runs `work` in a thread that can open nothing more: its table of descriptors is its own, and full.
pub(super) fn without_descriptors<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let spent = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FILES).expect("a table of its own");
            let null = File::open("/dev/null").expect("it is there");
            let copies: Vec<_> = std::iter::from_fn(|| null.try_clone().ok()).collect();
            let done = work();
            drop(copies);
            done
        });
        spent.join().expect("it ends")
    })
}
