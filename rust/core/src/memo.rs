//! Digests of the keys that this thread named a moment ago.
//!
//! One decision about an item is several calls with the same key: look, allocate, mark, pin. Hashing it once for all of
//! them halves what a short call costs. Keys are compared in full, so what is remembered is never somebody else's.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Items of one step, roughly.
const PLACES: usize = 16;
/// Longer keys are hashed each time.
const LONGEST: usize = 96;

/// Whose digests they are: equal keys of two namespaces have nothing in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner(u64);

impl Owner {
    /// One that no other is equal to.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

#[derive(Clone, Copy)]
struct Place {
    owner: u64,
    len: usize,
    key: [u8; LONGEST],
    digest: [u64; 4],
}

const EMPTY: Place = Place { owner: 0, len: 0, key: [0; LONGEST], digest: [0; 4] };

thread_local! {
    static PLACES_OF_THREAD: RefCell<[Place; PLACES]> = const { RefCell::new([EMPTY; PLACES]) };
}

/// The digest of `key`: remembered, or what `hash` says.
pub(crate) fn digest(owner: Owner, key: &[u8], hash: impl FnOnce() -> [u64; 4]) -> [u64; 4] {
    if key.len() > LONGEST {
        return hash();
    }
    PLACES_OF_THREAD.with_borrow_mut(|places| {
        let place = &mut places[place_of(key)];
        if place.owner != owner.0 || place.key[..place.len] != *key {
            place.digest = hash();
            (place.owner, place.len) = (owner.0, key.len());
            place.key[..key.len()].copy_from_slice(key);
        }
        place.digest
    })
}

/// Keys are hashes themselves, mostly, so that their last bytes are as good as any; a bad choice costs a hash.
fn place_of(key: &[u8]) -> usize {
    let tail = key.last_chunk::<8>().map_or(key.len() as u64, |tail| u64::from_le_bytes(*tail));
    (tail.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(owner: Owner, key: &str, answer: u64) -> u64 {
        digest(owner, key.as_bytes(), || [answer; 4])[0]
    }

    #[test]
    fn a_key_is_hashed_once_and_again_when_its_place_was_taken() {
        let owner = Owner::new();
        assert_eq!(ask(owner, "a", 1), 1);
        assert_eq!(ask(owner, "a", 2), 1);
        // As long, so in the same place.
        assert_eq!(ask(owner, "b", 3), 3);
        assert_eq!(ask(owner, "a", 4), 4);
    }

    #[test]
    fn neither_prefixes_nor_other_owners_are_taken_for_the_key() {
        let (one, other) = (Owner::new(), Owner::new());
        let long = "x".repeat(80);
        for len in (0..80).rev() {
            let key = &long[..len];
            assert_eq!(ask(one, key, len as u64), len as u64);
            assert_eq!(ask(other, key, 1000 + len as u64), 1000 + len as u64);
        }
    }

    #[test]
    fn long_keys_are_not_remembered() {
        let (owner, key) = (Owner::new(), "k".repeat(LONGEST + 1));
        assert_eq!(ask(owner, &key, 1), 1);
        assert_eq!(ask(owner, &key, 2), 2);
    }
}
