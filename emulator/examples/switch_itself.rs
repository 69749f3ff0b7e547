//! Moves its own context to the kernel module and back, while another thread maps, registers and unmaps.
//!
//! `switch_itself ROUNDS` under `ummunotify run --backend emulated`, where the module is loaded; `switch_itself direct`
//! under `--backend kmod`. The tests run both in a guest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ummunotify::client::{Notifier, PageRange, Place, Recording, SwitchError};

const PATIENCE: Duration = Duration::from_secs(10);
const PAGE: usize = 4096;

/// Two pages that were written to.
fn map() -> *mut libc::c_void {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory at an address of the kernel's choice, written within its bounds.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), 2 * PAGE, protection, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        at.write_bytes(1, 2 * PAGE);
        at
    }
}

/// Maps, registers and unmaps; each unmapping must be among the events. The number of rounds.
fn work(notifier: &Notifier, stop: &AtomicBool) -> u64 {
    let mut cookie = 0;
    while !stop.load(Ordering::Relaxed) {
        cookie += 1;
        let at = map();
        let start = at.addr() as u64;
        notifier.register(PageRange::new(start, start + 2 * PAGE as u64), cookie).expect("register");
        // What was declared invalid before is none of this region's.
        notifier.events().for_each(|event| assert!(event.is_ok(), "{event:?}"));
        let before = notifier.counter().generation();
        // SAFETY: our own mapping, to which no reference exists.
        assert_eq!(unsafe { libc::munmap(at, 2 * PAGE) }, 0);
        assert_ne!(notifier.counter().generation(), before, "the counter didn't move");
        let mut events = notifier.events();
        let seen = events.by_ref().filter(|event| event.as_ref().expect("event").cookie == cookie).count();
        assert_eq!(seen, 1, "region {cookie}");
        notifier.unregister(cookie).expect("unregister");
    }
    cookie
}

fn main() {
    let argument = std::env::args().nth(1).unwrap_or_default();
    let notifier = Notifier::open_nonblocking().expect("/dev/ummunotify");
    if argument == "direct" {
        assert_eq!(notifier.backend(), Ok(Recording::Direct));
        for to in [Place::Kmod, Place::Emulated] {
            assert_eq!(notifier.switch(to, PATIENCE), Err(SwitchError::Direct));
        }
        println!("direct: {}", SwitchError::Direct);
        return;
    }
    let rounds: u32 = argument.parse().expect("usage: switch_itself ROUNDS | direct");
    let (start, stop) = (Instant::now(), AtomicBool::new(false));
    let done = std::thread::scope(|scope| {
        let worker = scope.spawn(|| work(&notifier, &stop));
        for _ in 0..rounds {
            for (to, expected) in [(Place::Kmod, Recording::Kmod), (Place::Emulated, Recording::Emulated)] {
                assert_eq!(notifier.switch(to, PATIENCE), Ok(true));
                assert_eq!(notifier.backend(), Ok(expected));
                assert_eq!(notifier.switch(to, PATIENCE), Ok(false));
            }
        }
        stop.store(true, Ordering::Relaxed);
        worker.join().expect("the worker has failed")
    });
    // With nobody else to enter the shim: the call does it itself.
    assert_eq!(notifier.switch(Place::Kmod, PATIENCE), Ok(true));
    assert_eq!(notifier.backend(), Ok(Recording::Kmod));
    println!("{} switches of one's own in {:?}, {done} unmappings reported", 2 * rounds + 1, start.elapsed());
}
