//! The clock of engine steps: what was added comes back after a number of steps, or as soon as its request finishes.
//!
//! Behaves as `StepTracker` of vLLM 0.26 (`ec_connector/cpu/scheduler/step_tracker.py`) does, in the order of what is
//! returned too. Adding costs O(1), and so does each key that comes back.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::error::{Error, Result};

/// One key that was added: taken out by whichever comes first, its step or its request's end.
#[derive(Debug)]
struct Pending<K> {
    key: Option<K>,
    request: Arc<str>,
}

/// Keys that wait for `max_concurrent_batches` steps or for their request's end.
///
/// Not for use from several threads at a time.
#[derive(Debug)]
pub struct StepTracker<K> {
    delay: usize,
    /// One batch per past step, the oldest at the front; entries are numbers in `entries`.
    steps: VecDeque<Vec<u32>>,
    current: Vec<u32>,
    entries: Vec<Pending<K>>,
    spare: Vec<u32>,
    /// The entries of a request in the order in which they were added, which is the order in which they expire.
    requests: HashMap<Arc<str>, VecDeque<u32>>,
    waiting: usize,
}

impl<K> StepTracker<K> {
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
            requests: HashMap::new(),
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
    pub fn add(&mut self, key: K, request_id: &str) {
        let request = match self.requests.get_key_value(request_id) {
            Some((name, _)) => Arc::clone(name),
            None => Arc::from(request_id),
        };
        let number = self.store(Pending { key: Some(key), request: Arc::clone(&request) });
        self.requests.entry(request).or_default().push_back(number);
        self.current.push(number);
        self.waiting += 1;
    }

    fn store(&mut self, pending: Pending<K>) -> u32 {
        if let Some(number) = self.spare.pop() {
            self.entries[number as usize] = pending;
            return number;
        }
        self.entries.push(pending);
        self.entries.len() as u32 - 1
    }

    /// Ends a step. Returns the keys of the finished requests, in the order given, then those that expire.
    pub fn step<'r>(&mut self, finished: impl IntoIterator<Item = &'r str>) -> Vec<K> {
        let mut due = Vec::new();
        for request in finished {
            for number in self.requests.remove(request).unwrap_or_default() {
                due.extend(self.entries[number as usize].key.take());
            }
        }
        if self.steps.len() == self.delay {
            let expired = self.steps.pop_front().unwrap_or_default();
            self.expire(expired, &mut due);
        }
        self.steps.push_back(std::mem::take(&mut self.current));
        self.waiting -= due.len();
        due
    }

    fn expire(&mut self, expired: Vec<u32>, due: &mut Vec<K>) {
        for number in expired {
            let pending = &mut self.entries[number as usize];
            if let Some(key) = pending.key.take() {
                due.push(key);
                let request = Arc::clone(&pending.request);
                self.forget_oldest(&request);
            }
            self.spare.push(number);
        }
    }

    fn forget_oldest(&mut self, request: &Arc<str>) {
        if let Some(numbers) = self.requests.get_mut(request) {
            numbers.pop_front();
            if numbers.is_empty() {
                self.requests.remove(request);
            }
        }
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
        self.waiting = 0;
        due
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NONE: [&str; 0] = [];

    #[test]
    fn a_key_comes_back_after_exactly_the_delay() {
        for delay in 1..5 {
            let mut tracker = StepTracker::new(delay).unwrap();
            tracker.add("k", "r");
            for _ in 0..delay {
                assert_eq!(tracker.step(NONE), Vec::<&str>::new());
            }
            assert_eq!(tracker.step(NONE), ["k"]);
            assert!(tracker.is_empty());
        }
    }

    #[test]
    fn a_finished_request_brings_its_keys_at_once_and_only_once() {
        let mut tracker = StepTracker::new(3).unwrap();
        tracker.add("a", "r");
        tracker.step(NONE);
        tracker.add("b", "r");
        tracker.add("c", "other");
        assert_eq!(tracker.step(["r"]), ["a", "b"]);
        assert_eq!(tracker.step(["r"]), Vec::<&str>::new());
        tracker.step(NONE);
        assert_eq!(tracker.step(NONE), ["c"]);
        assert!(tracker.is_empty());
    }

    #[test]
    fn drain_returns_the_rest_from_the_newest_to_the_oldest_step() {
        let mut tracker = StepTracker::new(2).unwrap();
        for (key, request) in [("a", "1"), ("b", "2")] {
            tracker.add(key, request);
            tracker.step(NONE);
        }
        tracker.add("c", "3");
        assert_eq!(tracker.drain_all(), ["c", "b", "a"]);
        assert_eq!(tracker.drain_all(), Vec::<&str>::new());
    }

    #[test]
    fn a_delay_of_zero_is_refused() {
        assert!(StepTracker::<u8>::new(0).unwrap_err().to_string().contains("max_concurrent_batches is 0"));
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

    proptest! {
        #[test]
        fn every_key_comes_back_once_at_its_time(
            delay in 1usize..5,
            steps in prop::collection::vec((prop::collection::vec(0u8..4, 0..4), prop::collection::vec(0u8..4, 0..3)), 1..60),
        ) {
            let mut tracker = StepTracker::new(delay).unwrap();
            let mut model = Model::default();
            let mut next = 0;
            for (added, finished) in steps {
                for request in added {
                    tracker.add(next, &request.to_string());
                    model.0.push((next, request.to_string(), 0));
                    next += 1;
                }
                let finished: Vec<String> = finished.iter().map(u8::to_string).collect();
                prop_assert_eq!(tracker.step(finished.iter().map(String::as_str)), model.step(&finished, delay));
                prop_assert_eq!(tracker.len(), model.0.len());
            }
        }
    }
}
