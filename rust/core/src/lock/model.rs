//! The protocol itself, run through every interleaving of a few threads by a model checker.

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::{Owner, Owners, Taken, give_back, take_by, try_take, try_take_over};
use crate::liveness::ClientTag;
use crate::sync::Word;

/// A word whose sleeps end at any time, as if their slices were over.
struct Restless(AtomicU32);

impl Word for Restless {
    const SPINS: u32 = 0;

    fn load(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    fn compare_exchange(&self, current: u32, new: u32) -> Result<u32, u32> {
        self.0.compare_exchange(current, new, Ordering::SeqCst, Ordering::Relaxed)
    }

    fn swap(&self, new: u32) -> u32 {
        self.0.swap(new, Ordering::SeqCst)
    }

    fn wait(&self, _: u32, _: Duration) {
        thread::yield_now();
    }

    fn wake_one(&self) {}

    fn pause(&self) {
        thread::yield_now();
    }
}

/// A word whose sleeps end by a wake only: where no holder dies, no wake may be missing, slices or not.
struct Patient {
    word: AtomicU32,
    queue: Mutex<()>,
    wake: Condvar,
}

impl Word for Patient {
    const SPINS: u32 = 0;

    fn load(&self) -> u32 {
        self.word.load(Ordering::SeqCst)
    }

    fn compare_exchange(&self, current: u32, new: u32) -> Result<u32, u32> {
        self.word.compare_exchange(current, new, Ordering::SeqCst, Ordering::Relaxed)
    }

    fn swap(&self, new: u32) -> u32 {
        self.word.swap(new, Ordering::SeqCst)
    }

    fn wait(&self, expected: u32, _: Duration) {
        let queue = self.queue.lock().unwrap();
        // As in the kernel: compared while nobody can wake.
        if self.word.load(Ordering::SeqCst) == expected {
            drop(self.wake.wait(queue).unwrap());
        }
    }

    fn wake_one(&self) {
        let _queue = self.queue.lock().unwrap();
        self.wake.notify_one();
    }

    fn pause(&self) {
        thread::yield_now();
    }
}

/// A word, what it guards, and who lives.
struct Shared<W> {
    word: W,
    /// The checker fails if two threads are in here at once, or one without having seen the other's changes.
    guarded: UnsafeCell<u32>,
    alive: Vec<AtomicBool>,
}

impl Shared<Restless> {
    fn restless(clients: usize) -> Arc<Self> {
        Self::new(Restless(AtomicU32::new(0)), clients)
    }
}

impl Shared<Patient> {
    fn patient(clients: usize) -> Arc<Self> {
        let word = Patient { word: AtomicU32::new(0), queue: Mutex::new(()), wake: Condvar::new() };
        Self::new(word, clients)
    }
}

impl<W> Shared<W> {
    fn new(word: W, clients: usize) -> Arc<Self> {
        Arc::new(Self {
            word,
            guarded: UnsafeCell::new(0),
            alive: (0..clients).map(|_| AtomicBool::new(true)).collect(),
        })
    }

    fn change(&self) {
        #[allow(unsafe_code, reason = "the model's cell")]
        // SAFETY: the checker fails the test if the access is not exclusive.
        self.guarded.with_mut(|value| unsafe { *value += 1 });
    }

    fn read(&self) -> u32 {
        #[allow(unsafe_code, reason = "the model's cell")]
        // SAFETY: as above.
        self.guarded.with(|value| unsafe { *value })
    }

    /// The last thing a client does; the kernel's own lock orders it before what others see.
    fn die(&self, index: u16) {
        self.alive[usize::from(index)].store(false, Ordering::Release);
    }
}

impl<W> Owners for Shared<W> {
    fn is_alive(&self, owner: Owner) -> bool {
        owner.index().is_some_and(|index| self.alive[usize::from(index)].load(Ordering::Acquire))
    }
}

fn owner(index: u16) -> Owner {
    Owner::new(ClientTag { index, generation: 1 })
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn clients_and_threads_of_one_client_exclude_each_other_and_all_are_served() {
    check(|| {
        let shared = Shared::patient(2);
        let threads: Vec<_> = [0, 0, 1]
            .into_iter()
            .map(|index| {
                let shared = shared.clone();
                thread::spawn(move || {
                    assert_eq!(take_by(&shared.word, owner(index), &*shared, None), Some(Taken::Free));
                    shared.change();
                    give_back(&shared.word);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(shared.read(), 3);
    });
}

#[test]
fn of_several_who_find_the_holder_dead_one_is_told_and_the_rest_exclude_each_other() {
    check(|| {
        let shared = Shared::restless(3);
        let dying = {
            let shared = shared.clone();
            thread::spawn(move || {
                assert!(try_take(&shared.word, owner(0)));
                shared.change();
                shared.die(0);
            })
        };
        dying.join().unwrap();
        let waiter = {
            let shared = shared.clone();
            thread::spawn(move || {
                let taken = take_by(&shared.word, owner(1), &*shared, None);
                shared.change();
                give_back(&shared.word);
                taken
            })
        };
        let mine = try_take_over(&shared.word, owner(2), &*shared);
        if mine.is_some() {
            shared.change();
            give_back(&shared.word);
        }
        let others = waiter.join().unwrap();
        let told = [mine, others].iter().filter(|taken| **taken == Some(Taken::FromDead)).count();
        assert_eq!(told, 1);
        assert_eq!(shared.read(), 2 + u32::from(mine.is_some()));
    });
}

#[test]
fn a_holder_that_dies_at_any_moment_leaves_nobody_waiting_and_nothing_unseen() {
    check(|| {
        let shared = Shared::restless(2);
        let dying = {
            let shared = shared.clone();
            thread::spawn(move || {
                if try_take(&shared.word, owner(0)) {
                    shared.change();
                    shared.die(0);
                }
            })
        };
        let taken = take_by(&shared.word, owner(1), &*shared, None);
        shared.change();
        let changes = shared.read();
        assert_eq!(changes, if taken == Some(Taken::FromDead) { 2 } else { 1 });
        give_back(&shared.word);
        dying.join().unwrap();
    });
}
