//! The cross-process lock with real processes that are killed, stopped, or in another pid namespace.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ecpool_core::Error;
use ecpool_core::region::{Guard, Lifetime, Region};
use rustix::process::{Signal, getpid, kill_process};

mod region_support;
use region_support::*;

const SOON: Duration = Duration::from_millis(100);

fn join(directory: &Path) -> Region {
    open(directory, "r", Lifetime::Shared).unwrap()
}

#[test]
fn child_role() {
    let Some(role) = my_role() else { return };
    let region = join(Path::new(&role[1]));
    match role[0].as_str() {
        "hold" => hold(&region),
        "wait" => {
            let _guard = wait(&region);
            listen();
        }
        "wait and die" => {
            let _guard = wait(&region);
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        "count" => count(&region, role[2].parse().unwrap()),
        "observe" => observe(&region),
        other => panic!("unknown role {other}"),
    }
}

/// Takes the lock and stays in it until told, with a mark in the index meanwhile.
fn hold(region: &Region) {
    let mut guard = region.lock(SOON).unwrap();
    guard.index_bytes()[0] = 1;
    say(&format!("holding as {}", std::process::id()));
    listen();
    guard.index_bytes()[0] = 0;
    drop(guard);
    say("done");
    listen();
}

fn wait(region: &Region) -> Guard<'_> {
    say("waiting");
    let guard = region.lock(PATIENCE).unwrap();
    say(if guard.is_dirty() { "dirty" } else { "clean" });
    guard
}

/// Tells pid, whether the lock can be had at once, and, when told to go on, once more.
fn observe(region: &Region) {
    for _ in 0..2 {
        let seen = match region.lock(SOON) {
            Err(Error::Busy { .. }) => "busy",
            Err(other) => panic!("{other}"),
            Ok(guard) if guard.is_dirty() => "dirty",
            Ok(_) => "clean",
        };
        say(&format!("{seen} as {}", std::process::id()));
        listen();
    }
}

const MARK: usize = 0;
const ENTRIES: usize = 8;
const LAPSES: usize = 16;

fn number(guard: &mut Guard<'_>, at: usize) -> u64 {
    u64::from_ne_bytes(guard.index_bytes()[at..at + 8].try_into().unwrap())
}

fn set_number(guard: &mut Guard<'_>, at: usize, value: u64) {
    guard.index_bytes()[at..at + 8].copy_from_slice(&value.to_ne_bytes());
}

/// Adds one to a plain number under the lock, so many times and until all are told to stop. A mark says that somebody
/// is inside: finding it without being told of a death is a lapse of the lock.
fn count(region: &Region, rounds: u64) {
    say("counting");
    let me = u64::from(region.client().index) + 1;
    for round in 0.. {
        if round >= rounds && is_over(region) {
            break;
        }
        let mut guard = region.lock(PATIENCE).unwrap();
        let mark = number(&mut guard, MARK);
        if mark != 0 && !guard.is_dirty() {
            let lapses = number(&mut guard, LAPSES);
            set_number(&mut guard, LAPSES, lapses + 1);
        }
        guard.clear_dirty();
        set_number(&mut guard, MARK, me);
        let entries = number(&mut guard, ENTRIES);
        set_number(&mut guard, ENTRIES, entries + 1);
        region.counter(region.client().index, 0).fetch_add(1, Ordering::Relaxed);
        if number(&mut guard, MARK) != me {
            let lapses = number(&mut guard, LAPSES);
            set_number(&mut guard, LAPSES, lapses + 1);
        }
        set_number(&mut guard, MARK, 0);
    }
    say("counted");
    listen();
}

/// The first byte of the data says that counting is over.
fn is_over(region: &Region) -> bool {
    let mut over = [0];
    region.read_pieces(&[(0, 1)], &mut over).unwrap();
    over[0] != 0
}

#[test]
fn a_killed_holder_is_taken_over_from_and_the_next_one_knows() {
    let directory = scratch();
    let region = join(directory.path());
    let mut holder = Actor::start("hold", &[directory.path().to_str().unwrap()]);
    assert!(holder.hear().unwrap().starts_with("holding"));
    assert!(matches!(region.lock(SOON), Err(Error::Busy { .. })), "not while it lives");
    holder.kill();
    let begun = Instant::now();
    let mut guard = region.lock(PATIENCE).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert!(guard.is_dirty());
    assert_eq!(guard.index_bytes()[0], 1);
    guard.clear_dirty();
    drop(guard);
    assert!(!region.lock(SOON).unwrap().is_dirty());
    assert_eq!(region.lock_counts().taken_over, 1);
}

#[test]
fn a_dead_holder_is_found_even_by_a_caller_that_does_not_wait() {
    let directory = scratch();
    let region = join(directory.path());
    let mut holder = Actor::start("hold", &[directory.path().to_str().unwrap()]);
    holder.hear().unwrap();
    assert!(region.try_lock().unwrap().is_none());
    holder.kill();
    assert!(region.try_lock().unwrap().unwrap().is_dirty());
}

#[test]
fn a_place_taken_again_does_not_make_a_dead_holder_look_alive() {
    let directory = scratch();
    let region = join(directory.path());
    let mut holder = Actor::start("hold", &[directory.path().to_str().unwrap()]);
    holder.hear().unwrap();
    assert!(region.is_client_alive(1));
    holder.kill();
    assert!(!region.is_client_alive(1));
    let successor = join(directory.path());
    assert_eq!(successor.client().index, 1);
    for client in [&region, &successor] {
        let guard = client.try_lock().unwrap().unwrap();
        assert!(guard.is_dirty());
    }
    assert_eq!(region.lock_counts().taken_over, 1);
}

#[test]
fn sleepers_are_served_when_a_holder_dies_and_when_a_sleeper_dies() {
    let directory = scratch();
    let path = directory.path().to_str().unwrap();
    let region = join(directory.path());
    let mut holder = Actor::start("hold", &[path]);
    holder.hear().unwrap();
    let mut waiters: Vec<Actor> = (0..3).map(|_| Actor::start("wait and die", &[path])).collect();
    for waiter in &mut waiters {
        waiter.expect("waiting");
    }
    std::thread::sleep(Duration::from_millis(20));
    // One of those that sleep on the word dies; then the holder does.
    waiters.pop().unwrap().kill();
    holder.kill();
    // Whichever comes first dies with the lock in its hand, too.
    for waiter in &mut waiters {
        waiter.expect("dirty");
        assert!(!waiter.wait().success());
    }
    assert!(region.lock(PATIENCE).unwrap().is_dirty());
}

#[test]
fn a_waiter_killed_between_wake_and_work_costs_a_slice_at_most() {
    let directory = scratch();
    let path = directory.path().to_str().unwrap();
    let region = join(directory.path());
    for _ in 0..20 {
        let guard = region.lock(SOON).unwrap();
        let mut waiter = Actor::start("wait", &[path]);
        waiter.expect("waiting");
        std::thread::sleep(Duration::from_millis(1));
        // It may be woken and die before it runs.
        waiter.signal(Signal::STOP);
        drop(guard);
        waiter.kill();
        let begun = Instant::now();
        let mut guard = region.lock(PATIENCE).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        guard.clear_dirty();
    }
}

#[test]
fn a_stopped_holder_is_never_robbed_and_goes_on_when_it_may() {
    let directory = scratch();
    let region = join(directory.path());
    let mut holder = Actor::start("hold", &[directory.path().to_str().unwrap()]);
    holder.hear().unwrap();
    holder.signal(Signal::STOP);
    for _ in 0..3 {
        let begun = Instant::now();
        let Err(Error::Busy { waited }) = region.lock(SOON) else { panic!("robbed") };
        assert!(waited >= SOON, "{waited:?}");
        assert!(begun.elapsed() < SOON * 10, "{:?}", begun.elapsed());
    }
    assert!(region.is_client_alive(1));
    holder.signal(Signal::CONT);
    holder.tell();
    holder.expect("done");
    let mut guard = region.lock(SOON).unwrap();
    assert!(!guard.is_dirty());
    assert_eq!(guard.index_bytes()[0], 0);
}

#[test]
fn liveness_means_the_same_in_every_pid_namespace() {
    let unshare = ["unshare", "--pid", "--fork", "--kill-child"];
    if !can_run(&[&unshare[..], &["true"]].concat(), "pid namespaces") {
        return;
    }
    let directory = scratch();
    let path = directory.path().to_str().unwrap();
    let region = join(directory.path());
    // Both are process 1, so a lock that names processes would take one for the other.
    let mut holder = Actor::spawn(Actor::command_by(&unshare, "hold", &[path]));
    holder.expect("holding as 1");
    let mut observer = Actor::spawn(Actor::command_by(&unshare, "observe", &[path]));
    observer.expect("busy as 1");
    holder.kill();
    eventually("the holder's death", || !region.is_client_alive(1));
    assert!(region.is_client_alive(2));
    observer.tell();
    observer.expect("dirty as 1");
}

#[test]
fn counters_stay_exact_while_processes_are_killed_at_random() {
    const ROUNDS: u64 = 100_000;
    const KILLS: u64 = 60;
    let directory = scratch();
    let path = directory.path().to_str().unwrap();
    let region = join(directory.path());
    let start = || {
        let mut actor = Actor::start("count", &[path, &ROUNDS.to_string()]);
        actor.expect("counting");
        actor
    };
    let mut actors: Vec<Actor> = (0..4).map(|_| start()).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15u64 ^ u64::from(std::process::id());
    for _ in 0..KILLS {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        std::thread::sleep(Duration::from_micros((random >> 40) % 5000));
        let victim = (random >> 60) as usize % actors.len();
        actors[victim].kill();
        actors[victim] = start();
    }
    region.write_pieces(&[(0, 1)], &[1]).unwrap();
    for actor in &mut actors {
        actor.expect("counted");
    }
    let mut guard = region.lock(PATIENCE).unwrap();
    assert_eq!(number(&mut guard, LAPSES), 0);
    let entries = number(&mut guard, ENTRIES);
    let said: u64 = (0..ecpool_core::geometry::MAX_CLIENTS)
        .map(|client| region.counter(client, 0).load(Ordering::Relaxed))
        .sum::<u64>()
        + region.totals(0).load(Ordering::Relaxed);
    eprintln!("{entries} entries, {said} told of, {:?}", region.lock_counts());
    assert!(said >= 4 * ROUNDS);
    // Each of the killed may have counted once without telling.
    assert!((said..=said + KILLS).contains(&entries), "{entries} entries, {said} told of");
}

#[test]
#[ignore = "prints a measurement"]
fn cost_of_an_uncontended_lock() {
    const ROUNDS: u32 = 2_000_000;
    let directory = scratch();
    let region = join(directory.path());
    for _ in 0..3 {
        let begun = Instant::now();
        for _ in 0..ROUNDS {
            drop(std::hint::black_box(region.lock(SOON).unwrap()));
        }
        let lock = begun.elapsed() / ROUNDS;
        let begun = Instant::now();
        for _ in 0..ROUNDS / 10 {
            std::hint::black_box(region.is_client_alive(7));
        }
        let probe = begun.elapsed() / (ROUNDS / 10);
        println!("lock and unlock {lock:?}, probe of a client {probe:?}");
    }
}
