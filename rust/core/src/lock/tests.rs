use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::*;

/// Clients of which some are dead.
struct Living<'a>(&'a [AtomicBool]);

impl Owners for Living<'_> {
    fn is_alive(&self, owner: Owner) -> bool {
        owner.index().and_then(|index| self.0.get(usize::from(index))).is_some_and(|alive| alive.load(Ordering::SeqCst))
    }
}

fn owner(index: u16) -> Owner {
    Owner::new(ClientTag { index, generation: 1 })
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_millis(20))
}

#[test]
fn a_word_names_index_and_generation_and_hides_the_waiters_bit() {
    let me = Owner::new(ClientTag { index: 255, generation: 0xfff8_0001 });
    assert_eq!(me.index(), Some(255));
    assert_eq!(me.generation(), 1);
    assert_eq!(Owner::of_word(me.0 | WAITERS), me);
    assert_eq!(Owner::of_word(WAITERS).index(), None);
    assert_ne!(me.0, 0);
}

#[test]
fn a_live_holder_is_never_robbed() {
    let word = AtomicU32::new(0);
    let alive = [AtomicBool::new(true), AtomicBool::new(true)];
    assert!(try_take(&word, owner(0)));
    assert!(!try_take(&word, owner(0)), "nor by another thread of the same client");
    assert_eq!(try_take_over(&word, owner(1), &Living(&alive)), None);
    assert_eq!(take_by(&word, owner(1), &Living(&alive), soon()), None);
    give_back(&word);
    assert_eq!(take_by(&word, owner(1), &Living(&alive), soon()), Some(Taken::Free));
}

#[test]
fn a_dead_holder_is_taken_over_from_at_once_and_the_waiters_bit_survives() {
    let alive = [AtomicBool::new(false), AtomicBool::new(true)];
    for waiters in [0, WAITERS] {
        let word = AtomicU32::new(owner(0).0 | waiters);
        assert_eq!(try_take_over(&word, owner(1), &Living(&alive)), Some(Taken::FromDead));
        assert_eq!(word.load(Ordering::SeqCst), owner(1).0 | waiters);
        word.store(owner(0).0 | waiters, Ordering::SeqCst);
        let past = Some(Instant::now());
        assert_eq!(take_by(&word, owner(1), &Living(&alive), past), Some(Taken::FromDead));
        assert_eq!(word.load(Ordering::SeqCst), owner(1).0 | waiters);
    }
}

#[test]
fn any_content_of_the_word_is_survived() {
    let alive = [const { AtomicBool::new(true) }; 2];
    for junk in [WAITERS, 0xfff, 1 << 12, u32::MAX, 0x7000_0abc] {
        let word = AtomicU32::new(junk);
        assert_eq!(take_by(&word, owner(1), &Living(&alive), soon()), Some(Taken::FromDead));
        give_back(&word);
        assert_eq!(word.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn backing_out_leaves_another_holder_alone() {
    let word = AtomicU32::new(owner(0).0 | WAITERS);
    back_out(&word, owner(1));
    assert!(is_held_by(&word, owner(0)));
    back_out(&word, owner(0));
    assert_eq!(word.load(Ordering::SeqCst), 0);
}

#[test]
fn a_wake_that_nobody_sent_costs_one_slice() {
    let word = AtomicU32::new(owner(0).0);
    let alive = [const { AtomicBool::new(true) }; 2];
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let begun = Instant::now();
            let taken = take_by(&word, owner(1), &Living(&alive), None);
            (taken, begun.elapsed())
        });
        while word.load(Ordering::SeqCst) & WAITERS == 0 {
            std::thread::yield_now();
        }
        // As if the holder had been killed between its swap and its wake.
        word.store(0, Ordering::SeqCst);
        let (taken, waited) = waiter.join().unwrap();
        assert_eq!(taken, Some(Taken::Free));
        assert!(waited < Duration::from_secs(1), "{waited:?}");
    });
}

#[test]
fn threads_of_several_clients_never_meet_inside_and_dead_ones_block_nobody() {
    const CLIENTS: u16 = 4;
    const ROUNDS: u32 = 3000;
    let word = AtomicU32::new(0);
    let alive = [const { AtomicBool::new(true) }; CLIENTS as usize];
    let inside = AtomicU32::new(0);
    let total = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for index in 0..CLIENTS {
            let (word, alive, inside, total) = (&word, &alive, &inside, &total);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    take_by(word, owner(index), &Living(alive), None).unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    total.store(total.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    inside.fetch_sub(1, Ordering::SeqCst);
                    if index == 0 && round == ROUNDS / 2 {
                        // Dies under the lock.
                        alive[0].store(false, Ordering::SeqCst);
                        return;
                    }
                    give_back(word);
                }
            });
        }
    });
    let expected = u64::from(ROUNDS) * 3 + u64::from(ROUNDS) / 2 + 1;
    assert_eq!(total.load(Ordering::Relaxed), expected);
}
