//! Futexes in memory that several processes share.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `*word == seen`, at most `limit`. Returns for any reason, spuriously too (futex(2)).
pub fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let time = libc::timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    // SAFETY: `word` and `time` outlive the call, and FUTEX_WAIT only reads them. Without
    // FUTEX_PRIVATE_FLAG, since the word lies in memory that other processes map.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const time, 0, 0);
    }
}

/// Wakes every sleeper on `word`.
pub fn wake(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE uses the address as a key and doesn't touch the memory.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX, 0, 0, 0);
    }
}
