//! What a cache has done so far.

/// Counts since the cache was made, and what it holds now. Taken while others use it, the numbers may be of slightly
/// different moments.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Requests that an entry served, without the lock or with it.
    pub hits: u64,
    /// Of these, those that found the entry only under the lock, since another thread was changing the index.
    pub second_looks: u64,
    /// Requests that registered.
    pub misses: u64,
    /// Misses that found another thread's entry when they were done, and gave their own back.
    pub duplicates: u64,
    /// Misses whose pages became stale before they were done: served once, and not kept.
    pub stale_at_birth: u64,
    /// Entries that the monitor called stale.
    pub invalidated: u64,
    /// Entries that had to make room.
    pub evicted: u64,
    /// Entries that a wider one replaced.
    pub superseded: u64,
    /// Entries that were in use when they became stale or superseded: given back when their last handle goes.
    pub deferred: u64,
    /// Times that the monitor's events were read.
    pub drains: u64,
    /// Times that the monitor's counter had moved and it had nothing to tell, so that everything was taken for stale.
    pub blind_drains: u64,
    /// Registrations that the adapter or the monitor refused.
    pub failed: u64,
    /// Registrations that the adapter failed to take back: whatever it pinned for them may stay pinned.
    pub deregistration_failures: u64,
    /// Entries now, those included that wait for their users.
    pub entries: usize,
    /// Of these, those that serve no request any more.
    pub waiting: usize,
    /// Bytes that are registered now, counted as often as they are registered.
    pub bytes: u64,
    /// The most that `bytes` ever was.
    pub peak_bytes: u64,
}
