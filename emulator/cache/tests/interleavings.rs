//! The shipped code under shuttle, which chooses who runs next at every lock and every access to an atomic:
//! `RUSTFLAGS='--cfg shuttle' cargo test -p ummunotify-cache --test interleavings`, or `make shuttle`.
//!
//! A history is linearizable if each request got memory that was behind its range at some moment of the call: not
//! older than what had been completely remapped before it began, and not newer than what was there when it ended.
#![cfg(shuttle)]

mod common;

use common::{BASE, Machine, PAGE, SeqCst};
use std::sync::Arc;
use ummunotify_cache::{Access, Cache, Limits};

/// Schedules of each kind; `UMMUNOTIFY_SCHEDULES` sets another number.
fn schedules() -> usize {
    std::env::var("UMMUNOTIFY_SCHEDULES").map_or(2_000, |text| text.parse().expect("UMMUNOTIFY_SCHEDULES"))
}

/// Random schedules, and those that a scheduler finds which looks for rare orders (PCT).
fn check(test: fn()) {
    shuttle::check_random(test, schedules());
    for depth in [2, 3, 5] {
        shuttle::check_pct(test, schedules() / 2, depth);
    }
}

type Shared = Cache<Arc<Machine>, Arc<Machine>>;

/// One request for pages; whether it was served.
fn get(
    machine: &Machine,
    cache: &Shared,
    pages: std::ops::Range<u64>,
    completed: &[common::AtomicU64],
) -> bool {
    let oldest: Vec<u64> = pages.clone().map(|page| completed[page as usize].load(SeqCst)).collect();
    let (address, length) = (BASE + pages.start * PAGE, (pages.end - pages.start) * PAGE);
    let Ok(handle) = cache.get(address, length, Access::LOCAL_WRITE) else { return false };
    let pin = handle.registration();
    let first = (BASE + pages.start * PAGE - pin.pinned.range.start) / PAGE;
    for (nth, page) in pages.enumerate() {
        let got = pin.pinned.versions[first as usize + nth];
        let newest = machine.version(page);
        assert!(
            (oldest[nth]..=newest).contains(&got),
            "page {page}: {got} is not of {}..={newest}",
            oldest[nth]
        );
    }
    assert!(machine.pinned().contains_key(&pin.number), "a registration in use was given back");
    true
}

fn remap(machine: &Machine, pages: std::ops::Range<u64>, completed: &[common::AtomicU64]) {
    machine.remap(pages.clone());
    for page in pages {
        completed[page as usize].fetch_add(1, SeqCst);
    }
}

fn machine_and_cache(limits: Limits) -> (Arc<Machine>, Arc<Shared>, Arc<[common::AtomicU64]>) {
    let machine = Machine::new(6);
    let cache = Arc::new(Cache::new(machine.clone(), machine.clone(), limits).unwrap());
    (machine, cache, (0..6).map(|_| common::AtomicU64::new(0)).collect())
}

fn nothing_is_left(machine: &Machine, cache: Arc<Shared>) {
    cache.clear().unwrap();
    let statistics = cache.statistics();
    assert_eq!((statistics.entries, statistics.bytes), (0, 0), "{statistics:?}");
    assert_eq!((machine.pinned().len(), machine.watched()), (0, 0));
}

/// Two threads use the same pages, one remaps them.
#[test]
fn a_request_gets_memory_that_was_gone_before_it_began() {
    check(|| {
        let (machine, cache, completed) = machine_and_cache(Limits { entries: 8, bytes: u64::MAX });
        let users: Vec<_> = (0..2)
            .map(|_| {
                let (machine, cache, completed) = (machine.clone(), cache.clone(), completed.clone());
                shuttle::thread::spawn(move || {
                    for pages in [0..1, 0..2, 1..2, 0..1] {
                        assert!(get(&machine, &cache, pages, &completed));
                    }
                })
            })
            .collect();
        remap(&machine, 0..1, &completed);
        assert!(get(&machine, &cache, 0..1, &completed));
        remap(&machine, 0..2, &completed);
        assert!(get(&machine, &cache, 0..2, &completed));
        users.into_iter().for_each(|user| user.join().unwrap());
        nothing_is_left(&machine, cache);
    });
}

/// One thread remaps a page for ever, another believes in it as soon as it may.
#[test]
fn what_is_registered_while_it_is_remapped_is_believed() {
    check(|| {
        let (machine, cache, completed) = machine_and_cache(Limits { entries: 4, bytes: u64::MAX });
        let user = {
            let (machine, cache, completed) = (machine.clone(), cache.clone(), completed.clone());
            shuttle::thread::spawn(move || {
                (0..4).for_each(|_| assert!(get(&machine, &cache, 0..1, &completed)))
            })
        };
        (0..3).for_each(|_| remap(&machine, 0..1, &completed));
        user.join().unwrap();
        assert!(get(&machine, &cache, 0..1, &completed));
        nothing_is_left(&machine, cache);
    });
}

/// The counter moves once more between the reading of the events and the noting of how far that went.
#[test]
fn what_comes_between_a_reading_and_its_noting_is_lost() {
    check(|| {
        let (machine, cache, completed) = machine_and_cache(Limits { entries: 2, bytes: u64::MAX });
        assert!(get(&machine, &cache, 0..1, &completed));
        let user = {
            let (machine, cache, completed) = (machine.clone(), cache.clone(), completed.clone());
            shuttle::thread::spawn(move || {
                assert!(get(&machine, &cache, 1..2, &completed));
                assert!(get(&machine, &cache, 1..2, &completed));
            })
        };
        remap(&machine, 0..1, &completed);
        remap(&machine, 1..2, &completed);
        user.join().unwrap();
        assert!(get(&machine, &cache, 1..2, &completed));
        nothing_is_left(&machine, cache);
    });
}

/// More pages than there is room for: eviction meets hits, misses and the dropping of handles.
#[test]
fn an_evicted_entry_is_in_use_or_room_is_lost() {
    check(|| {
        let (machine, cache, completed) = machine_and_cache(Limits { entries: 2, bytes: 3 * PAGE });
        let users: Vec<_> = (0..3u64)
            .map(|user| {
                let (machine, cache, completed) = (machine.clone(), cache.clone(), completed.clone());
                shuttle::thread::spawn(move || {
                    for step in 0..3 {
                        let page = (user + step) % 4;
                        get(&machine, &cache, page..page + 1 + step % 2, &completed);
                        assert!(machine.pinned_bytes() <= 3 * PAGE);
                    }
                })
            })
            .collect();
        users.into_iter().for_each(|user| user.join().unwrap());
        // Alone, and with nothing in use, there is room.
        assert!(get(&machine, &cache, 0..3, &completed));
        nothing_is_left(&machine, cache);
    });
}

/// A handle is dropped by another thread, at the moment in which its entry becomes stale.
#[test]
fn a_handle_that_moves_keeps_its_registration_and_lets_it_go() {
    check(|| {
        let machine = Machine::new(2);
        let cache =
            Cache::new(machine.clone(), machine.clone(), Limits { entries: 4, bytes: u64::MAX }).unwrap();
        shuttle::thread::scope(|scope| {
            let handle = cache.get(BASE, PAGE, Access::LOCAL_READ).unwrap();
            let number = handle.registration().number;
            let (at, on) = (machine.clone(), &cache);
            scope.spawn(move || {
                assert!(at.pinned().contains_key(&number));
                drop(handle);
            });
            let at = machine.clone();
            scope.spawn(move || {
                at.remap(0..1);
                drop(on.get(BASE, PAGE, Access::LOCAL_READ).unwrap());
            });
        });
        // What the two missed of each other the next look at the device makes good.
        cache.sweep().unwrap();
        assert_eq!(machine.pinned().len(), 1);
        cache.clear().unwrap();
        assert_eq!((machine.pinned().len(), machine.watched()), (0, 0));
    });
}

/// Requests of different rights, one inside the other.
#[test]
fn entries_of_other_rights_get_in_each_others_way() {
    check(|| {
        let (machine, cache, completed) = machine_and_cache(Limits { entries: 8, bytes: u64::MAX });
        let other = {
            let (machine, cache) = (machine.clone(), cache.clone());
            shuttle::thread::spawn(move || {
                for access in [Access::LOCAL_WRITE | Access::REMOTE_WRITE, Access::LOCAL_READ] {
                    let handle = cache.get(BASE, 4 * PAGE, access).unwrap();
                    assert!(handle.access().contains(access));
                    assert!(machine.pinned().contains_key(&handle.registration().number));
                }
            })
        };
        for pages in [1..2, 0..4, 2..3] {
            assert!(get(&machine, &cache, pages, &completed));
        }
        remap(&machine, 1..3, &completed);
        assert!(get(&machine, &cache, 1..2, &completed));
        other.join().unwrap();
        nothing_is_left(&machine, cache);
    });
}

/// There is room for one registration, and three threads want the same: who comes too late to make it waits for it.
#[test]
fn a_request_fails_for_want_of_room_that_its_own_answer_takes() {
    check(|| {
        let (machine, cache, completed) = machine_and_cache(Limits { entries: 1, bytes: u64::MAX });
        let users: Vec<_> = (0..3)
            .map(|_| {
                let (machine, cache, completed) = (machine.clone(), cache.clone(), completed.clone());
                shuttle::thread::spawn(move || {
                    assert!(get(&machine, &cache, 0..1, &completed), "no room");
                    // And again, when another may have given it back.
                    assert!(get(&machine, &cache, 0..1, &completed), "no room");
                    cache.clear().unwrap();
                })
            })
            .collect();
        users.into_iter().for_each(|user| user.join().unwrap());
        nothing_is_left(&machine, cache);
    });
}
