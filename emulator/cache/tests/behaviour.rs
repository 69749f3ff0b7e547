//! What the cache promises beside being right: nothing is lost or left, whatever fails.
#![cfg(not(shuttle))]

mod common;

use common::{BASE, Machine, PAGE, SeqCst};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64};
use ummunotify_cache::{Access, Cache, Error, Limits, Monitor, PageRange, Registrar, RegistrarError};

type TestCache = Cache<Arc<Machine>, Arc<Machine>>;

fn cache(machine: &Arc<Machine>, entries: usize, bytes: u64) -> TestCache {
    Cache::new(machine.clone(), machine.clone(), Limits { entries, bytes }).unwrap()
}

fn at(page: u64) -> u64 {
    BASE + page * PAGE
}

fn nothing_is_left(machine: &Machine) {
    assert_eq!((machine.pinned().len(), machine.watched()), (0, 0));
}

#[test]
fn a_panic_at_a_registration_leaves_something() {
    let machine = Machine::new(4);
    let cache = cache(&machine, 4, 2 * PAGE);
    for _ in 0..10 {
        machine.panic_at_register.store(true, SeqCst);
        catch_unwind(AssertUnwindSafe(|| cache.get(at(0), PAGE, Access::LOCAL_READ).map(drop))).unwrap_err();
    }
    nothing_is_left(&machine);
    let statistics = cache.statistics();
    assert_eq!((statistics.entries, statistics.bytes, statistics.failed), (0, 0, 10));
    // No room was lost.
    let (_one, _two) = (
        cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap(),
        cache.get(at(1), PAGE, Access::LOCAL_READ).unwrap(),
    );
}

#[test]
fn a_panic_at_a_deregistration_keeps_others_from_theirs() {
    let machine = Machine::new(8);
    let cache = cache(&machine, 8, u64::MAX);
    for page in 0..8 {
        drop(cache.get(at(page), PAGE, Access::LOCAL_READ).unwrap());
    }
    machine.panic_at_deregister.store(true, SeqCst);
    catch_unwind(AssertUnwindSafe(|| cache.clear())).unwrap_err();
    nothing_is_left(&machine);
    assert_eq!((cache.statistics().entries, cache.statistics().deregistration_failures), (0, 1));
    // The same where the last handle of a stale entry is dropped, and at the cache's own end.
    let handle = cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap();
    machine.remap(0..1);
    cache.sweep().unwrap();
    machine.panic_at_deregister.store(true, SeqCst);
    catch_unwind(AssertUnwindSafe(|| drop(handle))).unwrap_err();
    for page in 0..8 {
        drop(cache.get(at(page), PAGE, Access::LOCAL_READ).unwrap());
    }
    machine.panic_at_deregister.store(true, SeqCst);
    catch_unwind(AssertUnwindSafe(|| drop(cache))).unwrap_err();
    nothing_is_left(&machine);
}

#[test]
fn a_panic_at_a_deregistration_takes_the_room_of_the_request_that_met_it() {
    let machine = Machine::new(4);
    let cache = cache(&machine, 2, u64::MAX);
    for _ in 0..10 {
        drop(cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap());
        machine.remap(0..1);
        machine.panic_at_deregister.store(true, SeqCst);
        catch_unwind(AssertUnwindSafe(|| cache.get(at(1), PAGE, Access::LOCAL_READ).map(drop))).unwrap_err();
        assert_eq!((cache.statistics().entries, cache.statistics().bytes), (0, 0));
        nothing_is_left(&machine);
    }
    let one = cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap();
    let two = cache.get(at(1), PAGE, Access::LOCAL_READ).unwrap();
    assert!(one.is_current() && two.is_current());
}

#[test]
fn the_end_of_the_cache_leaves_registrations() {
    let machine = Machine::new(8);
    let cache = cache(&machine, 8, u64::MAX);
    for page in 0..8 {
        drop(cache.get(at(page), PAGE, Access::LOCAL_READ).unwrap());
    }
    // One that is stale and waits for a handle that is never dropped.
    std::mem::forget(cache.get(at(3), PAGE, Access::LOCAL_READ).unwrap());
    machine.remap(2..5);
    cache.sweep().unwrap();
    assert_eq!((machine.pinned().len(), cache.statistics().waiting), (6, 1));
    drop(cache);
    nothing_is_left(&machine);
}

#[test]
fn what_is_in_use_is_given_back() {
    let machine = Machine::new(4);
    let cache = cache(&machine, 4, u64::MAX);
    let old = cache.get(at(0), 2 * PAGE, Access::LOCAL_READ).unwrap();
    assert!(old.is_current());
    machine.remap(1..2);
    assert!(!old.is_current());
    let new = cache.get(at(0), 2 * PAGE, Access::LOCAL_READ).unwrap();
    assert_ne!(old.registration().number, new.registration().number);
    assert!(new.is_current() && machine.pinned().contains_key(&old.registration().number));
    assert_eq!((cache.statistics().waiting, cache.statistics().deferred), (1, 1));
    std::thread::scope(|scope| scope.spawn(|| drop(old)).join().unwrap());
    assert_eq!((machine.pinned().len(), cache.statistics().waiting), (1, 0));
}

#[test]
fn what_was_used_lately_makes_room_first() {
    let machine = Machine::new(8);
    let cache = cache(&machine, 4, u64::MAX);
    let get = |page| cache.get(at(page), PAGE, Access::LOCAL_READ).unwrap();
    (0..4).for_each(|page| drop(get(page)));
    drop(get(4));
    let kept: Vec<u64> = machine.pinned().values().map(|p| (p.range.start - BASE) / PAGE).collect();
    let used = *kept.iter().find(|page| **page < 4).unwrap();
    drop(get(used));
    drop(get(5));
    drop(get(6));
    let now: Vec<u64> = machine.pinned().values().map(|p| (p.range.start - BASE) / PAGE).collect();
    assert!(now.contains(&used), "{used} was used since, and isn't of {now:?}");
    assert_eq!(cache.statistics().evicted, 3);
}

#[test]
fn a_full_cache_evicts_what_is_in_use_or_says_little() {
    let machine = Machine::new(8);
    let cache = cache(&machine, 8, 3 * PAGE);
    let held =
        (cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap(), cache.get(at(1), PAGE, Access::LOCAL_READ));
    let text = cache.get(at(4), 2 * PAGE, Access::LOCAL_READ).unwrap_err().to_string();
    for part in ["0x7f0000004000-0x7f0000006000", "8192 of 12288 bytes", "2 of 8 entries", "raise the limits"]
    {
        assert!(text.contains(part), "no '{part}': {text}");
    }
    let text = cache.get(at(0), 4 * PAGE, Access::LOCAL_READ).unwrap_err().to_string();
    assert!(text.contains("more than the 12288 bytes"), "{text}");
    drop(held);
    drop(cache.get(at(4), 2 * PAGE, Access::LOCAL_READ).unwrap());
    assert_eq!(machine.pinned_bytes(), 3 * PAGE);
}

#[test]
fn an_adapter_that_refuses_leaves_traces() {
    let machine = Machine::new(16);
    let cache = cache(&machine, 16, u64::MAX);
    let held = cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap();
    for errno in [libc::EFAULT, libc::EINVAL, libc::EIO, libc::ENODEV] {
        machine.refuse.store(errno as u64, SeqCst);
        let error = cache.get(at(3), 2 * PAGE, Access::REMOTE_WRITE).unwrap_err();
        let text = error.to_string();
        let os = std::io::Error::from_raw_os_error(errno).to_string();
        for part in ["pin of 0x7f0000003000-0x7f0000005000 (8192 bytes)", &os, "take a bigger machine"] {
            assert!(text.contains(part), "no '{part}': {text}");
        }
        assert!(matches!(error, Error::Registrar(e) if e.errno == errno));
        assert!(held.is_current());
        assert_eq!((machine.pinned().len(), machine.watched(), cache.statistics().bytes), (1, 1, PAGE));
        // What is there goes on being served.
        assert_eq!(
            cache.get(at(0), 8, Access::LOCAL_READ).unwrap().registration().number,
            held.registration().number
        );
    }
    machine.refuse.store(0, SeqCst);
    drop(cache.get(at(3), 2 * PAGE, Access::REMOTE_WRITE).unwrap());
    // A registration that can't be given back is counted, and forgotten.
    machine.fail_deregister.store(true, SeqCst);
    drop(held);
    cache.clear().unwrap();
    assert_eq!((cache.statistics().entries, cache.statistics().deregistration_failures), (0, 2));
    assert_eq!(machine.watched(), 0);
}

#[test]
fn a_limit_of_the_adapter_is_met_while_something_is_idle() {
    let machine = Machine::new(16);
    let cache = cache(&machine, 16, u64::MAX);
    machine.refuse_from.store(4 * PAGE, SeqCst);
    machine.refuse.store(libc::ENOMEM as u64, SeqCst);
    let held = cache.get(at(15), PAGE, Access::LOCAL_READ).unwrap();
    for page in 0..14 {
        drop(cache.get(at(page), PAGE, Access::LOCAL_READ).unwrap());
    }
    drop(cache.get(at(4), 3 * PAGE, Access::LOCAL_READ).unwrap());
    assert!(machine.pinned_bytes() <= 4 * PAGE && held.is_current());
    let error = cache.get(at(4), 4 * PAGE, Access::LOCAL_READ).unwrap_err();
    assert!(error.to_string().contains("Cannot allocate memory"), "{error}");
    assert_eq!((machine.pinned().len(), machine.watched()), (1, 1));
}

#[test]
fn a_device_that_fails_is_trusted() {
    let machine = Machine::new(4);
    let cache = cache(&machine, 4, u64::MAX);
    let held = cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap();
    drop(cache.get(at(1), PAGE, Access::LOCAL_READ).unwrap());
    machine.watch_errno.store(libc::ENOMEM as u64, SeqCst);
    let text = cache.get(at(2), PAGE, Access::LOCAL_READ).unwrap_err().to_string();
    assert!(
        text.contains("watch 0x7f0000002000-0x7f0000003000") && text.contains("lower the cache's"),
        "{text}"
    );
    // What was idle made way before the device was believed.
    assert_eq!((machine.pinned().len(), machine.watched()), (1, 1));
    machine.watch_errno.store(0, SeqCst);
    // The counter moved, and nothing can be read: never again is anything that was registered given out.
    machine.device_errno.store(libc::EIO as u64, SeqCst);
    machine.remap(3..4);
    machine.move_counter();
    for _ in 0..2 {
        let text = cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap_err().to_string();
        assert!(text.contains("Input/output error") && text.contains("supervisor"), "{text}");
        assert!(!held.is_current());
        assert_eq!(machine.pinned().len(), 1);
    }
    drop(held);
    drop(cache);
    nothing_is_left(&machine);
}

#[test]
fn a_counter_that_moved_without_a_word_is_believed() {
    let machine = Machine::new(4);
    let cache = cache(&machine, 4, u64::MAX);
    let number = cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap().registration().number;
    machine.mute.store(true, SeqCst);
    machine.move_counter();
    assert_ne!(cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap().registration().number, number);
    assert_eq!(cache.statistics().blind_drains, 1);
}

/// An adapter for memory that needn't exist.
struct Anywhere;

impl Registrar for Anywhere {
    type Registration = PageRange;

    fn register(&self, range: PageRange, _: Access) -> Result<PageRange, RegistrarError> {
        Ok(range)
    }

    fn deregister(&self, _: PageRange) -> Result<(), RegistrarError> {
        Ok(())
    }
}

#[test]
fn nonsense_is_registered() {
    let machine = Machine::new(4);
    let cache = cache(&machine, 4, u64::MAX);
    for (address, length) in
        [(at(0), 0), (u64::MAX, 1), (u64::MAX - 5, 10), (at(0), u64::MAX), (u64::MAX, u64::MAX)]
    {
        let error = cache.get(address, length, Access::LOCAL_READ).unwrap_err();
        assert!(matches!(error, Error::Range { .. }), "{error}");
    }
    // Nor what the limits have no room for; and the ends of the address space are like any other place.
    let error = self::cache(&machine, 1, 0).get(at(0), 1, Access::LOCAL_READ).unwrap_err();
    assert!(matches!(error, Error::TooLarge { max_bytes: 0, .. }), "{error}");
    nothing_is_left(&machine);
    let cache = Cache::new(machine.clone(), Anywhere, Limits { entries: 8, bytes: u64::MAX }).unwrap();
    let all = [
        (0, 1),
        (0, 1 << 47),
        (u64::MAX - 2 * PAGE, PAGE),
        (PAGE, u64::MAX - 2 * PAGE),
        (0, u64::MAX - PAGE),
    ];
    for (address, length) in all {
        let handle = cache.get(address, length, Access::REMOTE_ATOMIC).unwrap();
        let range = handle.range();
        assert!(range.start <= address && address + length <= range.end, "{range:?}");
        assert_eq!((*handle.registration(), handle.access()), (range, Access::REMOTE_ATOMIC));
        drop(handle);
        let again = cache.get(address, length, Access::REMOTE_ATOMIC).unwrap();
        assert_eq!(again.range(), range);
    }
    // The last contains all the others.
    assert_eq!(cache.get(u64::MAX - 2 * PAGE, 1, Access::LOCAL_READ).unwrap().range().start, 0);
    assert_eq!((cache.statistics().misses, cache.statistics().entries), (5, 1));
    for entries in [0, Limits::MOST_ENTRIES + 1] {
        let error = Cache::new(machine.clone(), machine.clone(), Limits { entries, bytes: 1 }).unwrap_err();
        assert!(error.to_string().contains("1 to 16777215 entries"), "{error}");
    }
}

/// The child's copy gives nothing back and serves nothing; a cache of its own works.
#[test]
fn a_forked_child_gives_its_parents_registrations_back() {
    let machine = Machine::new(4);
    let cache = cache(&machine, 4, u64::MAX);
    let handle = cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap();
    let elsewhere = Machine::new(1);
    let other = self::cache(&elsewhere, 4, u64::MAX);
    drop(other.get(at(0), PAGE, Access::LOCAL_READ).unwrap());
    // SAFETY: the child touches its own memory alone, takes no lock that another thread of the parent may have held
    // (the machine's are this test's own), and ends by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let verdict = catch_unwind(AssertUnwindSafe(|| {
            let forked = |result: Result<(), Error>| matches!(result, Err(Error::Forked));
            assert!(!handle.is_current());
            drop(handle);
            assert!(forked(cache.get(at(0), PAGE, Access::LOCAL_READ).map(drop)));
            assert!(forked(cache.sweep()) && forked(cache.clear()));
            assert_eq!(cache.statistics().entries, 0);
            drop(other);
            assert_eq!((machine.pinned().len(), elsewhere.pinned().len()), (1, 1));
            let fresh = Machine::new(2);
            let own = self::cache(&fresh, 4, u64::MAX);
            drop(own.get(at(1), PAGE, Access::LOCAL_READ).unwrap());
            assert_eq!(fresh.pinned().len(), 1);
            drop(own);
            nothing_is_left(&fresh);
        }));
        // SAFETY: ends this process at once.
        unsafe { libc::_exit(i32::from(verdict.is_err())) };
    }
    let mut status = 0;
    // SAFETY: the child of this thread, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed");
    assert!(handle.is_current());
    drop(handle);
    drop(cache);
    nothing_is_left(&machine);
}

/// An adapter whose callback forks, once, and lets the child come back from it.
struct Forking {
    machine: Arc<Machine>,
    at_register: AtomicBool,
    at_deregister: AtomicBool,
    child: AtomicI32,
}

impl Forking {
    fn fork_if(&self, told: &AtomicBool) {
        if told.swap(false, SeqCst) {
            // SAFETY: as in the test above.
            self.child.store(unsafe { libc::fork() }, SeqCst);
        }
    }

    /// In the child: ends it, with what `verdict` says. In the parent: waits, and expects that it was right.
    fn end(&self, verdict: impl FnOnce() -> bool) {
        let child = self.child.load(SeqCst);
        if child == 0 {
            let right = catch_unwind(AssertUnwindSafe(verdict)).unwrap_or(false);
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(i32::from(!right)) };
        }
        let mut status = 0;
        // SAFETY: the child of this thread, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child failed");
    }
}

impl Registrar for &Forking {
    type Registration = common::Pin;

    fn register(&self, range: PageRange, access: Access) -> Result<common::Pin, RegistrarError> {
        self.fork_if(&self.at_register);
        Registrar::register(&self.machine, range, access)
    }

    fn deregister(&self, pin: common::Pin) -> Result<(), RegistrarError> {
        self.fork_if(&self.at_deregister);
        self.machine.deregister(pin)
    }
}

#[test]
fn a_child_that_comes_back_from_a_callback_goes_on_for_its_parent() {
    let machine = Machine::new(8);
    let forking = Forking {
        machine: machine.clone(),
        at_register: AtomicBool::new(true),
        at_deregister: AtomicBool::new(false),
        child: AtomicI32::new(-1),
    };
    let cache = Cache::new(machine.clone(), &forking, Limits { entries: 8, bytes: u64::MAX }).unwrap();
    let got = cache.get(at(0), PAGE, Access::LOCAL_READ);
    forking.end(|| matches!(got, Err(Error::Forked)));
    drop(got.unwrap());
    for page in 1..5 {
        drop(cache.get(at(page), PAGE, Access::LOCAL_READ).unwrap());
    }
    assert_eq!(machine.pinned().len(), 5);
    // What the callback of the child gave back itself is its own affair; the others are the parent's.
    forking.at_deregister.store(true, SeqCst);
    let swept = cache.clear();
    forking.end(|| machine.pinned().len() == 4);
    swept.unwrap();
    // Nor does a request register in the child that made room first.
    machine.remap(0..8);
    for page in 0..8 {
        drop(cache.get(at(page), PAGE, Access::LOCAL_READ).unwrap());
    }
    forking.at_deregister.store(true, SeqCst);
    let got = cache.get(at(0), 2 * PAGE, Access::LOCAL_READ);
    forking.end(|| matches!(got, Err(Error::Forked)) && machine.pinned().len() == 7);
    drop(got.unwrap());
    drop(cache);
    nothing_is_left(&machine);
}

/// A monitor whose reads are interrupted so many times.
struct Interrupted(Arc<Machine>, AtomicI32);

impl Monitor for Interrupted {
    fn register(&self, range: PageRange, cookie: u64) -> std::io::Result<()> {
        Monitor::register(&self.0, range, cookie)
    }

    fn unregister(&self, cookie: u64) -> std::io::Result<()> {
        self.0.unregister(cookie)
    }

    fn generation(&self) -> u64 {
        self.0.generation()
    }

    fn events(&self, stale: &mut dyn FnMut(u64)) -> std::io::Result<Option<u64>> {
        if self.1.fetch_sub(1, SeqCst) > 0 {
            return Err(std::io::ErrorKind::Interrupted.into());
        }
        self.0.events(stale)
    }
}

#[test]
fn a_signal_during_a_read_of_the_device_fails_something() {
    let machine = Machine::new(2);
    let monitor = Interrupted(machine.clone(), AtomicI32::new(5));
    let cache = Cache::new(monitor, machine.clone(), Limits::default()).unwrap();
    let number = cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap().registration().number;
    machine.remap(1..2);
    machine.remap(0..1);
    cache.monitor().1.store(5, SeqCst);
    assert_ne!(cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap().registration().number, number);
    assert_eq!((cache.statistics().blind_drains, cache.statistics().invalidated), (0, 1));
}

/// A device that is full: idle entries go, and without any its errno is the answer.
#[test]
fn a_full_device_refuses_while_something_is_idle() {
    let machine = Machine::new(16);
    let cache = cache(&machine, 16, u64::MAX);
    machine.room_to_watch.store(3, SeqCst);
    let held = cache.get(at(15), PAGE, Access::LOCAL_READ).unwrap();
    for page in 0..14 {
        drop(cache.get(at(page), PAGE, Access::LOCAL_READ).unwrap());
        assert!(machine.watched() <= 3);
    }
    let _two = [1, 2].map(|page| cache.get(at(page), PAGE, Access::LOCAL_READ).unwrap());
    let before = cache.statistics();
    let error = cache.get(at(9), PAGE, Access::LOCAL_READ).unwrap_err();
    assert!(
        matches!(&error, Error::Monitor { error, .. } if error.raw_os_error() == Some(libc::ENOMEM)),
        "{error}"
    );
    let now = cache.statistics();
    assert_eq!((now.entries, now.bytes, now.evicted), (3, 3 * PAGE, before.evicted));
    assert!(held.is_current() && machine.pinned().len() == 3);
}

/// A thousand threads, of which most share a shard, and come and go.
#[test]
fn threads_beyond_the_shards_lose_uses() {
    let machine = Machine::new(4);
    let cache = cache(&machine, 4, u64::MAX);
    for _ in 0..3 {
        let barrier = std::sync::Barrier::new(333);
        std::thread::scope(|scope| {
            for thread in 0..333 {
                let (cache, barrier, machine) = (&cache, &barrier, &machine);
                scope.spawn(move || {
                    // All at once, though there is room for four: some wait for what others register.
                    let got = cache.get(at(thread % 4), PAGE, Access::LOCAL_READ);
                    barrier.wait();
                    // Everybody holds one of the four, whoever asks for them to be given back.
                    let cleared = cache.clear();
                    let pinned = machine.pinned();
                    barrier.wait();
                    cleared.unwrap();
                    let number = got.unwrap_or_else(|e| panic!("{e}")).registration().number;
                    assert!(pinned.contains_key(&number));
                });
            }
        });
        assert_eq!(machine.pinned().len(), 4);
        cache.clear().unwrap();
        nothing_is_left(&machine);
    }
}

/// Entries that a signal's handler asks for, wherever the thread is in a request of its own for them.
#[test]
fn a_signals_handler_loses_the_use_that_it_interrupts() {
    static CACHE: AtomicPtr<TestCache> = AtomicPtr::new(std::ptr::null_mut());
    static HANDLED: AtomicU64 = AtomicU64::new(0);
    extern "C" fn handler(_: libc::c_int) {
        // SAFETY: null, or the cache below, which outlives the thread that gets the signal.
        if let Some(cache) = unsafe { CACHE.load(SeqCst).as_ref() } {
            drop(cache.get(at(0), PAGE, Access::LOCAL_READ));
            HANDLED.fetch_add(1, SeqCst);
        }
    }
    let machine = Machine::new(1);
    let mut cache = cache(&machine, 4, u64::MAX);
    drop(cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap());
    CACHE.store(&mut cache, SeqCst);
    let cache = &cache;
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let (send, receive) = std::sync::mpsc::channel();
        let running = &running;
        scope.spawn(move || {
            // SAFETY: a handler that does the same as this thread: hits, which take no lock.
            unsafe { libc::signal(libc::SIGUSR1, handler as *const () as libc::sighandler_t) };
            drop(cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap());
            // SAFETY: a question.
            send.send(unsafe { libc::pthread_self() }).unwrap();
            while running.load(SeqCst) {
                drop(cache.get(at(0), PAGE, Access::LOCAL_READ).unwrap());
            }
        });
        let thread = receive.recv().unwrap();
        while HANDLED.load(SeqCst) < 10_000 {
            // SAFETY: a thread of this scope, which runs until it is told to end.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            std::thread::sleep(std::time::Duration::from_micros(1));
        }
        running.store(false, SeqCst);
    });
    CACHE.store(std::ptr::null_mut(), SeqCst);
    assert_eq!(cache.statistics().misses, 1);
    cache.clear().unwrap();
    nothing_is_left(&machine);
}

/// With a filter that kills the process for any system call but its exit.
#[test]
fn a_hit_makes_a_system_call() {
    const ENTRIES: u64 = 1000;
    let machine = Machine::new(2 * ENTRIES);
    // SAFETY: as in the test above.
    let run = |work: &dyn Fn()| unsafe {
        let child = libc::fork();
        if child == 0 {
            work();
            libc::_exit(3);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        status
    };
    let confined = |hits: bool| {
        // A cache of the child's own: its parent's would refuse.
        let cache =
            Cache::new(machine.clone(), machine.clone(), Limits { entries: 1000, bytes: u64::MAX }).unwrap();
        for n in 0..ENTRIES {
            drop(cache.get(at(2 * n), PAGE, Access::LOCAL_READ).unwrap());
        }
        for n in 0..ENTRIES {
            drop(cache.get(at(2 * n) + 8, 8, Access::LOCAL_READ).unwrap());
        }
        let before = cache.statistics();
        confine();
        for n in 0..ENTRIES * 1000 {
            let page = 2 * (n * 7919 % ENTRIES);
            match cache.get(at(page) + 100, 1000, Access::LOCAL_READ) {
                Ok(handle) if handle.registration().pinned.range.start == at(page) => {}
                _ => exit(1),
            }
        }
        if !hits {
            // SAFETY: a question about nothing, which the filter doesn't allow.
            unsafe { libc::syscall(libc::SYS_getppid) };
        }
        let after = cache.statistics();
        exit(i32::from(after.hits - before.hits != ENTRIES * 1000 || after.misses != before.misses));
    };
    let status = run(&|| confined(true));
    assert_eq!(status, 0, "killed by {} for a system call, or exit code {}", status & 0x7f, status >> 8);
    // And the filter does kill.
    assert_eq!(run(&|| confined(false)) & 0x7f, libc::SIGSYS);
}

fn exit(code: i32) -> ! {
    // SAFETY: ends the process at once.
    unsafe { libc::_exit(code) }
}

/// From here on the calling process dies of any system call but exit_group.
fn confine() {
    let jump = |k: u32, jt: u8, jf: u8| libc::sock_filter { code: 0x15, jt, jf, k };
    let answer = |k: u32| libc::sock_filter { code: 0x06, jt: 0, jf: 0, k };
    let filter = [
        libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 }, // load the number
        jump(libc::SYS_exit_group as u32, 0, 1),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the filter is read and copied by the second call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
    }
}

/// Threads that hit, miss, remap and hand handles to each other, with real parallelism and a small cache.
#[test]
fn threads_get_memory_that_was_gone_or_lose_registrations() {
    const PAGES: u64 = 64;
    let rounds: u64 = std::env::var("UMMUNOTIFY_RACE_ROUNDS").map_or(50_000, |text| text.parse().unwrap());
    let machine = Machine::new(PAGES);
    let cache = cache(&machine, 24, 40 * PAGE);
    let completed: Vec<_> = (0..PAGES).map(|_| common::AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (machine, cache, completed) = (&machine, &cache, &completed);
            scope.spawn(move || {
                let mut random = thread + 1;
                let mut held = Vec::new();
                for _ in 0..rounds / 4 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let page = (random >> 33) % (PAGES - 2);
                    let pages = 1 + (random >> 20) % 2;
                    if random >> 60 == 0 {
                        // Each page is remapped by one thread, so that `completed` counts whole remaps.
                        let page = page / 4 * 4 + thread;
                        machine.remap(page..page + 1);
                        completed[page as usize].fetch_add(1, SeqCst);
                        continue;
                    }
                    let oldest: Vec<u64> =
                        (page..page + pages).map(|p| completed[p as usize].load(SeqCst)).collect();
                    let Ok(handle) = cache.get(at(page), pages * PAGE, Access::LOCAL_READ) else { continue };
                    let pinned = &handle.registration().pinned;
                    for (nth, oldest) in oldest.into_iter().enumerate() {
                        let place = (at(page) - pinned.range.start) / PAGE + nth as u64;
                        let got = pinned.versions[place as usize];
                        assert!(
                            got >= oldest && got <= machine.version(page + nth as u64),
                            "stale: {got} < {oldest}"
                        );
                    }
                    assert!(
                        random >> 50 & 15 != 0
                            || machine.pinned().contains_key(&handle.registration().number)
                    );
                    held.push(handle);
                    if held.len() > 4 {
                        drop(held.swap_remove((random >> 40) as usize % 4));
                    }
                }
            });
        }
    });
    let statistics = cache.statistics();
    println!("{statistics:?}");
    assert!(
        statistics.hits > rounds / 100 && statistics.evicted > 0 && statistics.invalidated > 0,
        "{statistics:?}"
    );
    cache.clear().unwrap();
    cache.clear().unwrap();
    assert_eq!(cache.statistics().entries, 0);
    nothing_is_left(&machine);
}
