//! The clock of engine steps: what was added comes back after a number of steps, or as soon as its request finishes.
//!
//! Behaves as `StepTracker` of vLLM 0.26 (`ec_connector/cpu/scheduler/step_tracker.py`) does, in the order of what is
//! returned too. Adding costs O(1), and so does each key that comes back.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::hash::{BuildHasher, Hash, Hasher, RandomState};

use crate::error::{Error, Result};

/// No entry, no request.
const NONE: u32 = u32::MAX;

/// One key that was added: taken out by whichever comes first, its step or its request's end.
#[derive(Debug)]
struct Pending<K> {
    key: Option<K>,
    request: u32,
    /// The entry that the same request added next.
    next: u32,
}

/// A request with keys that wait, in the order in which they were added, which is the order in which they expire.
#[derive(Debug)]
struct Request<R> {
    name: Option<R>,
    hash: u64,
    first: u32,
    last: u32,
    /// The next request whose name has the same hash.
    twin: u32,
}

/// Takes a hash for what it is.
#[derive(Debug, Default, Clone, Copy)]
pub struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// For names that bring a good hash of their own, which they write as one `u64`.
pub type OwnHash = std::hash::BuildHasherDefault<Hashed>;

/// Keys that wait for `max_concurrent_batches` steps or for their request's end.
///
/// `K` is the key, `R` a request's name, `S` what hashes names. Not for use from several threads at a time.
#[derive(Debug)]
pub struct StepTracker<K, R, S = RandomState> {
    delay: usize,
    /// One batch per past step, the oldest at the front; entries are numbers in `entries`.
    steps: VecDeque<Vec<u32>>,
    current: Vec<u32>,
    entries: Vec<Pending<K>>,
    spare: Vec<u32>,
    requests: Vec<Request<R>>,
    spare_requests: Vec<u32>,
    /// The first request of each hash, as a number in `requests`.
    by_hash: HashMap<u64, u32, OwnHash>,
    hasher: S,
    waiting: usize,
}

impl<K, R: Eq + Hash, S: BuildHasher + Default> StepTracker<K, R, S> {
    /// A tracker whose keys expire after `max_concurrent_batches` steps.
    ///
    /// # Errors
    /// `InvalidArgument` for 0.
    pub fn new(max_concurrent_batches: usize) -> Result<Self> {
        if max_concurrent_batches == 0 {
            return Err(Error::invalid("max_concurrent_batches", 0, "at least 1"));
        }
        Ok(Self {
            delay: max_concurrent_batches,
            steps: VecDeque::new(),
            current: Vec::new(),
            entries: Vec::new(),
            spare: Vec::new(),
            requests: Vec::new(),
            spare_requests: Vec::new(),
            by_hash: HashMap::default(),
            hasher: S::default(),
            waiting: 0,
        })
    }

    /// Keys that wait.
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Whether no key waits.
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Adds a key on behalf of a request; the same key can be added any number of times.
    pub fn add(&mut self, key: K, request: R) {
        let request = self.request_of(request);
        self.push(key, request);
    }

    /// Adds several keys on behalf of one request, in their order.
    pub fn add_many(&mut self, keys: impl IntoIterator<Item = K>, request: R) {
        let mut keys = keys.into_iter().peekable();
        if keys.peek().is_none() {
            return;
        }
        let request = self.request_of(request);
        keys.for_each(|key| self.push(key, request));
    }

    fn push(&mut self, key: K, request: u32) {
        let entry = store(&mut self.entries, &mut self.spare, Pending { key: Some(key), request, next: NONE });
        let record = &mut self.requests[request as usize];
        match std::mem::replace(&mut record.last, entry) {
            NONE => record.first = entry,
            before => self.entries[before as usize].next = entry,
        }
        self.current.push(entry);
        self.waiting += 1;
    }

    /// The record of a request, made if it is new; the caller adds an entry to it.
    fn request_of(&mut self, name: R) -> u32 {
        let hash = self.hasher.hash_one(&name);
        let entry = self.by_hash.entry(hash);
        let mut twin = NONE;
        if let Entry::Occupied(first) = &entry {
            twin = *first.get();
            let found = find_twin(&self.requests, twin, &name);
            if found != NONE {
                return found;
            }
        }
        let request = Request { name: Some(name), hash, first: NONE, last: NONE, twin };
        let number = store(&mut self.requests, &mut self.spare_requests, request);
        entry.insert_entry(number);
        number
    }

    /// Forgets a request; what it still waited for is the caller's, as the first entry of a chain.
    fn end_request(&mut self, number: u32) -> u32 {
        let Request { hash, first, twin, .. } = self.requests[number as usize];
        if let Entry::Occupied(mut head) = self.by_hash.entry(hash) {
            let before = *head.get();
            if before != number {
                self.unlink_twin(before, number, twin);
            } else if twin == NONE {
                head.remove();
            } else {
                head.insert(twin);
            }
        }
        self.requests[number as usize].name = None;
        self.spare_requests.push(number);
        first
    }

    fn unlink_twin(&mut self, mut before: u32, number: u32, after: u32) {
        while let Some(request) = self.requests.get_mut(before as usize) {
            if request.twin == number {
                request.twin = after;
                return;
            }
            before = request.twin;
        }
    }

    /// Ends a step. Returns the keys of the finished requests, in the order given, then those that expire.
    pub fn step(&mut self, finished: impl IntoIterator<Item = R>) -> Vec<K> {
        let expired = if self.steps.len() == self.delay { self.steps.pop_front() } else { None };
        let mut due = Vec::with_capacity(expired.as_ref().map_or(0, Vec::len));
        for name in finished {
            self.finish(&name, &mut due);
        }
        let reused = expired.map(|expired| self.expire(expired, &mut due)).unwrap_or_default();
        self.steps.push_back(std::mem::replace(&mut self.current, reused));
        self.waiting -= due.len();
        due
    }

    fn finish(&mut self, name: &R, due: &mut Vec<K>) {
        let first = self.by_hash.get(&self.hasher.hash_one(name)).copied().unwrap_or(NONE);
        let number = find_twin(&self.requests, first, name);
        if number == NONE {
            return;
        }
        let mut next = self.end_request(number);
        while let Some(entry) = self.entries.get_mut(next as usize) {
            due.extend(entry.key.take());
            next = entry.next;
        }
    }

    /// Takes what is left of a step's entries; returns its list, empty, to be used again.
    fn expire(&mut self, mut expired: Vec<u32>, due: &mut Vec<K>) -> Vec<u32> {
        for number in expired.drain(..) {
            let Pending { key, request, next } = &mut self.entries[number as usize];
            if let Some(key) = key.take() {
                due.push(key);
                // Entries of one request expire in the order of its chain, so this one is its first.
                let (request, next) = (*request, *next);
                if next == NONE {
                    self.end_request(request);
                } else {
                    self.requests[request as usize].first = next;
                }
            }
            self.spare.push(number);
        }
        expired
    }

    /// Returns every key that still waits, those of the current step first and then from the newest step to the oldest,
    /// and forgets all.
    pub fn drain_all(&mut self) -> Vec<K> {
        let newest_first = std::mem::take(&mut self.current).into_iter();
        let numbers: Vec<u32> = newest_first.chain(self.steps.drain(..).rev().flatten()).collect();
        let due = numbers.into_iter().filter_map(|number| self.entries[number as usize].key.take()).collect();
        self.entries.clear();
        self.spare.clear();
        self.requests.clear();
        self.spare_requests.clear();
        self.by_hash.clear();
        self.waiting = 0;
        due
    }
}

/// The request of this name among those whose hash is `first`'s; `NONE` if it is not there.
fn find_twin<R: Eq>(requests: &[Request<R>], first: u32, name: &R) -> u32 {
    let mut found = first;
    while let Some(request) = requests.get(found as usize) {
        if request.name.as_ref() == Some(name) {
            return found;
        }
        found = request.twin;
    }
    NONE
}

/// Puts a record into a place that is free, or into a new one.
fn store<T>(records: &mut Vec<T>, spare: &mut Vec<u32>, record: T) -> u32 {
    if let Some(number) = spare.pop() {
        records[number as usize] = record;
        return number;
    }
    records.push(record);
    records.len() as u32 - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOBODY: [&str; 0] = [];

    type Tracker = StepTracker<&'static str, &'static str>;

    #[test]
    fn a_key_comes_back_after_exactly_the_delay() {
        for delay in 1..5 {
            let mut tracker = Tracker::new(delay).unwrap();
            tracker.add("k", "r");
            for _ in 0..delay {
                assert_eq!(tracker.step(NOBODY), Vec::<&str>::new());
            }
            assert_eq!(tracker.step(NOBODY), ["k"]);
            assert!(tracker.is_empty());
        }
    }

    #[test]
    fn a_finished_request_brings_its_keys_at_once_and_only_once() {
        let mut tracker = Tracker::new(3).unwrap();
        tracker.add("a", "r");
        tracker.step(NOBODY);
        tracker.add("b", "r");
        tracker.add("c", "other");
        assert_eq!(tracker.step(["r"]), ["a", "b"]);
        assert_eq!(tracker.step(["r"]), Vec::<&str>::new());
        tracker.step(NOBODY);
        assert_eq!(tracker.step(NOBODY), ["c"]);
        assert!(tracker.is_empty());
    }

    #[test]
    fn drain_returns_the_rest_from_the_newest_to_the_oldest_step() {
        let mut tracker = Tracker::new(2).unwrap();
        for (key, request) in [("a", "1"), ("b", "2")] {
            tracker.add(key, request);
            tracker.step(NOBODY);
        }
        tracker.add("c", "3");
        assert_eq!(tracker.drain_all(), ["c", "b", "a"]);
        assert_eq!(tracker.drain_all(), Vec::<&str>::new());
    }

    #[test]
    fn many_keys_at_once_are_as_good_as_one_by_one() {
        let mut tracker = Tracker::new(1).unwrap();
        tracker.add_many([], "nobody");
        tracker.add_many(["a", "b"], "r");
        tracker.add("c", "r");
        tracker.add_many(["d"], "other");
        assert_eq!(tracker.len(), 4);
        assert_eq!(tracker.step(["nobody", "r"]), ["a", "b", "c"]);
        assert_eq!(tracker.step(NOBODY), ["d"]);
        assert!(tracker.is_empty());
    }

    #[test]
    fn a_delay_of_zero_is_refused() {
        assert!(Tracker::new(0).unwrap_err().to_string().contains("max_concurrent_batches is 0"));
    }

    /// What the tracker should return, kept as a plain list of (key, request, steps to go).
    #[derive(Default)]
    struct Model(Vec<(u32, String, usize)>);

    impl Model {
        fn step(&mut self, finished: &[String], delay: usize) -> Vec<u32> {
            let mut due = Vec::new();
            for request in finished {
                let (taken, kept) = self.0.drain(..).partition(|(_, r, _)| r == request);
                self.0 = kept;
                due.extend(taken.into_iter().map(|(key, _, _): (u32, String, usize)| key));
            }
            let (expired, kept): (Vec<_>, Vec<_>) = self.0.drain(..).partition(|(_, _, age)| *age == delay);
            due.extend(expired.into_iter().map(|(key, _, _)| key));
            self.0 = kept.into_iter().map(|(key, request, age)| (key, request, age + 1)).collect();
            due
        }
    }

    /// A name whose hash is that of many others.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Crowded(u8);

    impl Hash for Crowded {
        fn hash<H: Hasher>(&self, state: &mut H) {
            state.write_u64(u64::from(self.0 % 2));
        }
    }

    proptest! {
        #[test]
        fn names_of_equal_hash_are_told_apart(
            delay in 1usize..4,
            steps in prop::collection::vec((prop::collection::vec(0u8..6, 0..5), prop::collection::vec(0u8..6, 0..3)), 1..60),
        ) {
            let mut tracker: StepTracker<u32, Crowded, OwnHash> = StepTracker::new(delay).unwrap();
            let mut model = Model::default();
            let mut next = 0;
            for (added, finished) in steps {
                for request in added {
                    tracker.add(next, Crowded(request));
                    model.0.push((next, request.to_string(), 0));
                    next += 1;
                }
                let names: Vec<String> = finished.iter().map(u8::to_string).collect();
                prop_assert_eq!(tracker.step(finished.into_iter().map(Crowded)), model.step(&names, delay));
                prop_assert_eq!(tracker.len(), model.0.len());
            }
            prop_assert_eq!(tracker.drain_all().len(), model.0.len());
            prop_assert!(tracker.by_hash.is_empty());
        }

        #[test]
        fn every_key_comes_back_once_at_its_time(
            delay in 1usize..5,
            steps in prop::collection::vec((prop::collection::vec(0u8..4, 0..4), prop::collection::vec(0u8..4, 0..3)), 1..60),
        ) {
            let mut tracker: StepTracker<u32, String> = StepTracker::new(delay).unwrap();
            let mut model = Model::default();
            let mut next = 0;
            for (added, finished) in steps {
                for request in added {
                    tracker.add(next, request.to_string());
                    model.0.push((next, request.to_string(), 0));
                    next += 1;
                }
                let finished: Vec<String> = finished.iter().map(u8::to_string).collect();
                prop_assert_eq!(tracker.step(finished.iter().cloned()), model.step(&finished, delay));
                prop_assert_eq!(tracker.len(), model.0.len());
            }
        }
    }
}
