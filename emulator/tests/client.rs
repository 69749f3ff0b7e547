//! The Rust client API on the emulated device: each test runs itself again under `ummunotify run`.

use std::os::fd::AsFd;
use std::process::Command;
use std::ptr::NonNull;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ummunotify::backend::{Backend, Kmod};
use ummunotify::client::{Generation, Invalidation, Notifier, PageRange, Place, Recording, SwitchError};
use ummunotify_abi::wire::Hurdle;

const INSIDE: &str = "UMMUNOTIFY_TEST_INSIDE";
const PAGE: usize = 4096;

/// Runs `body` in a process that has the emulated device: this test, executed once more.
fn on_the_device(test: &str, body: fn()) {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_ummunotify"))
        .args(["run", "--backend", "emulated", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{}: {said}", output.status);
}

/// Pages of anonymous memory that were written to. They are never unmapped but by the tests: somebody else's
/// mapping may lie in the holes by then.
struct Pages {
    start: NonNull<libc::c_void>,
    count: usize,
}

impl Pages {
    fn new(count: usize) -> Self {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory at an address of the kernel's choice, written within its bounds.
        let start = unsafe {
            let start = libc::mmap(std::ptr::null_mut(), count * PAGE, protection, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            start.write_bytes(1, count * PAGE);
            start
        };
        Self { start: NonNull::new(start).unwrap(), count }
    }

    fn range(&self, first: usize, count: usize) -> PageRange {
        let start = self.start.addr().get() + first * PAGE;
        PageRange::new(start as u64, (start + count * PAGE) as u64)
    }

    fn unmap(&self, first: usize, count: usize) {
        assert!(first + count <= self.count);
        // SAFETY: within the mapping, to which no reference exists.
        assert_eq!(unsafe { libc::munmap(self.start.as_ptr().byte_add(first * PAGE), count * PAGE) }, 0);
    }
}

fn drain(notifier: &Notifier) -> (Vec<Invalidation>, Option<u64>) {
    let mut events = notifier.events();
    let list = events.by_ref().map(Result::unwrap).collect();
    (list, events.generation().map(Generation::get))
}

#[test]
fn an_unmapped_page_is_reported_once_with_its_range() {
    on_the_device("an_unmapped_page_is_reported_once_with_its_range", || {
        let notifier = Notifier::open_nonblocking().unwrap();
        let pages = Pages::new(3);
        for page in 0..3 {
            notifier.register(pages.range(page, 1), page as u64).unwrap();
        }
        let before = notifier.counter().generation();
        assert_eq!((before.get(), drain(&notifier)), (0, (vec![], None)));
        pages.unmap(1, 1);
        assert_ne!(notifier.counter().generation(), before);
        let hit = Invalidation { cookie: 1, range: pages.range(1, 1), hint: true };
        assert_eq!(drain(&notifier), (vec![hit], Some(1)));
        assert_eq!(drain(&notifier), (vec![], None));
        notifier.unregister(0).unwrap();
        pages.unmap(0, 1);
        assert_eq!(notifier.counter().generation().get(), 1);
    });
}

#[test]
fn cookies_are_taken_once_and_given_back_once() {
    on_the_device("cookies_are_taken_once_and_given_back_once", || {
        let notifier = Notifier::open().unwrap();
        let range = PageRange::new(0x1000, 0x2000);
        notifier.register(range, 5).unwrap();
        assert_eq!(notifier.register(range, 5).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        notifier.unregister(5).unwrap();
        assert_eq!(notifier.unregister(5).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    });
}

#[test]
fn nothing_of_an_unregistered_region_is_handed_out_even_if_it_was_read() {
    on_the_device("nothing_of_an_unregistered_region_is_handed_out_even_if_it_was_read", || {
        let notifier = Notifier::open_nonblocking().unwrap();
        let pages = Pages::new(2);
        notifier.register(pages.range(0, 1), 1).unwrap();
        notifier.register(pages.range(1, 1), 2).unwrap();
        pages.unmap(0, 2);
        let mut events = notifier.events();
        assert_eq!(events.next().unwrap().unwrap().cookie, 1);
        notifier.unregister(2).unwrap(); // its record lies in the iterator's buffer by now
        assert!(events.next().is_none());
        assert_eq!(events.generation().unwrap().get(), 1);
    });
}

#[test]
fn a_blocking_reader_sleeps_until_another_thread_unmaps() {
    on_the_device("a_blocking_reader_sleeps_until_another_thread_unmaps", || {
        let notifier = Notifier::open().unwrap();
        let pages = Pages::new(1);
        notifier.register(pages.range(0, 1), 9).unwrap();
        let range = pages.range(0, 1);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| drain(&notifier));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!reader.is_finished());
            // SAFETY: the page above, to which no reference exists.
            assert_eq!(unsafe { libc::munmap(range.start as *mut libc::c_void, PAGE) }, 0);
            let (list, last) = reader.join().unwrap();
            assert_eq!((list[0].cookie, last), (9, Some(1)));
        });
    });
}

#[test]
fn the_descriptor_polls_and_contexts_share_nothing() {
    on_the_device("the_descriptor_polls_and_contexts_share_nothing", || {
        let (one, two) = (Notifier::open_nonblocking().unwrap(), Notifier::open_nonblocking().unwrap());
        let pages = Pages::new(1);
        one.register(pages.range(0, 1), 1).unwrap();
        let ready = |n: &Notifier| {
            poll(&mut [PollFd::new(n.as_fd(), PollFlags::POLLIN)], PollTimeout::from(0u8)).unwrap() == 1
        };
        // The first poll arms the descriptor: it may be woken for nothing, and a read then settles it.
        let _ = (ready(&one), drain(&one));
        assert!(!ready(&one) && !ready(&two));
        pages.unmap(0, 1);
        assert!(ready(&one) && !ready(&two));
        assert_eq!(two.counter().generation().get(), 0);
        assert_eq!(drain(&one).1, Some(1));
        assert!(!ready(&one));
        let counter = one.share_counter();
        drop(one);
        assert_eq!(counter.generation().get(), 1);
    });
}

/// Without the module the switch is refused, and the context goes on where it was; with it, it moves.
#[test]
fn a_context_switches_itself_or_says_why_not() {
    on_the_device("a_context_switches_itself_or_says_why_not", || {
        let notifier = Notifier::open_nonblocking().unwrap();
        let pages = Pages::new(2);
        notifier.register(pages.range(0, 2), 5).unwrap();
        assert_eq!(notifier.backend(), Ok(Recording::Emulated));
        assert_eq!(notifier.switch(Place::Emulated, Duration::from_secs(5)), Ok(false));
        assert_eq!(notifier.counter().generation().get(), 0);
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = descriptors();
        match notifier.switch(Place::Kmod, Duration::from_secs(5)) {
            Err(SwitchError::Refused { hurdle: Hurdle::Open, errno: Errno::ENOENT }) => {
                assert!(Kmod.check().is_err());
                assert_eq!(notifier.backend(), Ok(Recording::Emulated));
            }
            answer => {
                assert_eq!(answer, Ok(true));
                assert_eq!(notifier.backend(), Ok(Recording::Kmod));
            }
        }
        assert_eq!(descriptors(), before);
        let everything = [Invalidation { cookie: 5, range: pages.range(0, 2), hint: false }];
        assert_eq!(drain(&notifier).0, everything);
        pages.unmap(0, 1);
        assert_eq!(drain(&notifier).0, [Invalidation { cookie: 5, range: pages.range(0, 1), hint: true }]);
    });
}
