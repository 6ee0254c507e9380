//! What is counted, under which name, and where.

/// A counter of one client. The numbers are part of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Leases given.
    Hits = 0,
    /// Leases asked for and not given.
    Misses = 1,
    /// Bytes of the leases given.
    HitBytes = 2,
    /// Saves begun.
    Saves = 3,
    /// Bytes of the saves that a rank claimed.
    SavedBytes = 4,
    /// Saves that became ready.
    SavesCompleted = 5,
    /// Saves that were dropped: failed, withdrawn, closed.
    SavesDropped = 6,
    /// Loads dispatched.
    Loads = 7,
    /// Loads that every rank completed.
    LoadsCompleted = 8,
    /// Items not saved because an entry was there already.
    SkippedExists = 9,
    /// Items not saved because they are larger than the pool.
    SkippedTooLarge = 10,
    /// Items not saved because too little was free or evictable.
    SkippedNoRoom = 11,
    /// Items not saved because they have no bytes.
    SkippedEmpty = 12,
    /// Entries evicted to make room.
    Evictions = 13,
    /// Blocks of those.
    EvictedBlocks = 14,
    /// Entries dropped because their rows or element type were not what a request expects.
    Mismatches = 15,
    /// Entries dropped by a flush.
    Flushed = 16,
    /// Claims refused.
    ClaimsRefused = 17,
    /// Times the lock was not had within the deadline.
    LockTimeouts = 18,
    /// Operations put off because the lock was not free, and done later.
    Deferred = 19,
    /// Times the index was rebuilt.
    Rebuilds = 20,
    /// Clients found dead.
    DeadClients = 21,
    /// Copies that failed, as ranks said.
    CopiesFailed = 22,
    /// Entries dropped because their bytes did not fit their checksum.
    Corrupted = 23,
    /// Claims of loads that were put off: their copies go on, on leases alone.
    ClaimsPutOff = 24,
    /// Those of them that are recorded now.
    ClaimsMadeLate = 25,
}

/// Every counter with the name that tools and metrics use.
pub const COUNTERS: &[(Counter, &str)] = &[
    (Counter::Hits, "hits"),
    (Counter::Misses, "misses"),
    (Counter::HitBytes, "hit_bytes"),
    (Counter::Saves, "saves"),
    (Counter::SavedBytes, "saved_bytes"),
    (Counter::SavesCompleted, "saves_completed"),
    (Counter::SavesDropped, "saves_dropped"),
    (Counter::Loads, "loads"),
    (Counter::LoadsCompleted, "loads_completed"),
    (Counter::SkippedExists, "skipped_exists"),
    (Counter::SkippedTooLarge, "skipped_too_large"),
    (Counter::SkippedNoRoom, "skipped_no_room"),
    (Counter::SkippedEmpty, "skipped_empty"),
    (Counter::Evictions, "evictions"),
    (Counter::EvictedBlocks, "evicted_blocks"),
    (Counter::Mismatches, "mismatches"),
    (Counter::Flushed, "flushed"),
    (Counter::ClaimsRefused, "claims_refused"),
    (Counter::LockTimeouts, "lock_timeouts"),
    (Counter::Deferred, "deferred"),
    (Counter::Rebuilds, "rebuilds"),
    (Counter::DeadClients, "dead_clients"),
    (Counter::CopiesFailed, "copies_failed"),
    (Counter::Corrupted, "corrupted"),
    (Counter::ClaimsPutOff, "claims_put_off"),
    (Counter::ClaimsMadeLate, "claims_made_late"),
];

const _: () = assert!(COUNTERS.len() <= crate::geometry::COUNTERS_PER_CLIENT);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counter_stands_at_its_number() {
        for (number, (counter, _)) in COUNTERS.iter().enumerate() {
            assert_eq!(*counter as usize, number);
        }
    }
}
