//! A region from its creation to its end, within one process: several clients, lifetimes, what stays and what goes.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ecpool_core::Error;
use ecpool_core::geometry::MAX_CLIENTS;
use ecpool_core::region::{Lifetime, OpenRequest, Phase, Region, State};

mod region_support;
use region_support::*;

const NOW: Duration = Duration::ZERO;
const SOON: Duration = Duration::from_millis(50);

#[test]
fn the_second_client_sees_what_the_first_wrote() {
    let directory = scratch();
    let a = open(directory.path(), "r", Lifetime::Shared).unwrap();
    let b = open(directory.path(), "r", Lifetime::Shared).unwrap();
    assert!(a.created() && !b.created());
    assert_eq!(a.geometry(), b.geometry());
    assert_eq!(a.seed(), b.seed());
    assert_ne!(a.client(), b.client());
    assert!(a.is_client_alive(b.client().index) && b.is_client_alive(a.client().index));
    assert!(!a.is_client_alive(MAX_CLIENTS) && !a.is_client_alive(MAX_CLIENTS - 1));
    assert_eq!(a.client_generation(b.client().index), Some(b.client().generation));

    a.lock(SOON).unwrap().index_bytes()[17] = 42;
    assert_eq!(b.lock(SOON).unwrap().index_bytes()[17], 42);
    a.write_pieces(&[(100, 3)], b"abc").unwrap();
    let mut read = [0; 3];
    b.read_pieces(&[(100, 3)], &mut read).unwrap();
    assert_eq!(&read, b"abc");
}

#[test]
fn a_new_region_is_all_zeros_and_its_data_begin_at_a_huge_page() {
    let directory = scratch();
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    assert_eq!(region.data_ptr().addr() % (2 << 20), 0);
    let mut bytes = vec![1; MIB as usize];
    region.read_pieces(&[(0, MIB)], &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    let mut guard = region.lock(SOON).unwrap();
    assert!(!guard.is_dirty());
    assert_eq!(guard.index_bytes().len() as u64, region.geometry().index_len);
    assert!(guard.index_bytes().iter().all(|&byte| byte == 0));
    assert_eq!(guard.index_bytes().as_ptr().addr() % 4096, 0);
}

#[test]
fn the_last_to_leave_a_shared_region_removes_it() {
    let parent = scratch();
    let directory = parent.path().join("pools");
    let a = open(&directory, "r", Lifetime::Shared).unwrap();
    let b = open(&directory, "r", Lifetime::Shared).unwrap();
    a.close();
    a.close();
    assert_eq!(files_in(&directory).len(), 2);
    assert!(!b.is_client_alive(a.client().index));
    drop(b);
    assert_eq!(files_in(&directory), [""; 0]);
    drop(a);
    assert!(open(&directory, "r", Lifetime::Shared).unwrap().created());
}

#[test]
fn who_leaves_late_does_not_remove_a_successor_of_the_same_name() {
    let directory = scratch();
    let old = open(directory.path(), "r", Lifetime::Shared).unwrap();
    for file in files_in(directory.path()) {
        std::fs::remove_file(directory.path().join(file)).unwrap();
    }
    let new = open(directory.path(), "r", Lifetime::Shared).unwrap();
    assert!(new.created());
    drop(old);
    assert_eq!(files_in(directory.path()).len(), 2);
}

#[test]
fn a_region_whose_file_was_removed_by_hand_goes_on_and_a_new_one_can_be_made() {
    let directory = scratch();
    let old = open(directory.path(), "r", Lifetime::Shared).unwrap();
    std::fs::remove_file(region_file(directory.path(), "r")).unwrap();
    let new = open(directory.path(), "r", Lifetime::Shared).unwrap();
    assert!(new.created());
    old.lock(SOON).unwrap().index_bytes()[0] = 1;
    assert_eq!(new.lock(SOON).unwrap().index_bytes()[0], 0);
    drop(old);
    assert_eq!(files_in(directory.path()).len(), 2);
}

#[test]
fn a_private_region_loses_its_name_when_all_have_attached() {
    let parent = scratch();
    let directory = parent.path().join("pools");
    let private = Lifetime::Private { expected_clients: 2 };
    let a = open(&directory, "r", private).unwrap();
    assert_eq!(files_in(&directory).len(), 2);
    let b = open(&directory, "r", private).unwrap();
    assert_eq!(files_in(&directory), [""; 0]);
    assert!(a.is_client_alive(b.client().index), "liveness goes on without a name");
    a.lock(SOON).unwrap().index_bytes()[0] = 9;
    assert_eq!(b.lock(SOON).unwrap().index_bytes()[0], 9);
    let c = open(&directory, "r", private).unwrap();
    assert!(c.created(), "who comes later gets one of his own");
    drop(b);
    assert!(!a.is_client_alive(1));
    assert_eq!(files_in(&directory).len(), 2);
}

#[test]
fn a_private_region_whose_clients_leave_before_the_last_came_is_removed() {
    let directory = scratch();
    drop(open(directory.path(), "r", Lifetime::Private { expected_clients: 2 }).unwrap());
    assert!(files_in(directory.path()).is_empty());
}

#[test]
fn a_tool_that_attaches_is_not_one_of_the_expected_clients() {
    let directory = scratch();
    let private = Lifetime::Private { expected_clients: 2 };
    let _a = open(directory.path(), "r", private).unwrap();
    let tool = Region::attach(Some(directory.path()), "r", &mut go_on).unwrap();
    assert_eq!(files_in(directory.path()).len(), 2);
    drop(tool);
    assert!(!open(directory.path(), "r", private).unwrap().created());
    assert!(files_in(directory.path()).is_empty());
}

#[test]
fn a_persistent_region_keeps_its_bytes_without_clients() {
    let directory = scratch();
    let first = open(directory.path(), "r", Lifetime::Persistent).unwrap();
    let (seed, tag) = (first.seed(), first.client());
    first.write_pieces(&[(0, 1)], b"x").unwrap();
    first.counter(tag.index, 5).fetch_add(3, Ordering::Relaxed);
    drop(first);
    assert_eq!(Region::remove_dead(Some(directory.path())).unwrap(), [""; 0]);
    assert_eq!(Region::scan(Some(directory.path())).unwrap()[0].state, State::Idle);

    let second = open(directory.path(), "r", Lifetime::Persistent).unwrap();
    assert!(!second.created());
    assert_eq!(second.seed(), seed);
    assert_eq!(second.client().index, tag.index);
    assert_ne!(second.client().generation, tag.generation, "the place is the same, the client is not");
    let mut read = [0];
    second.read_pieces(&[(0, 1)], &mut read).unwrap();
    assert_eq!(&read, b"x");
    assert_eq!(second.counter(tag.index, 5).load(Ordering::Relaxed), 0);
    assert_eq!(second.totals(5).load(Ordering::Relaxed), 3);
}

#[test]
fn what_differs_from_the_region_in_use_is_refused_with_both_values() {
    let directory = scratch();
    let _a = open_sized(directory.path(), "r", Lifetime::Shared, 4 * MIB).unwrap();
    let refused = |lifetime, capacity, parts: &[&str]| {
        let error = open_sized(directory.path(), "r", lifetime, capacity).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "{error} lacks {part:?}");
        }
    };
    refused(Lifetime::Shared, 8 * MIB, &["blocks 256", "512 was asked for"]);
    refused(Lifetime::Persistent, 4 * MIB, &["is shared", "persistent was asked for"]);
    assert_eq!(files_in(directory.path()).len(), 2);
}

#[test]
fn bad_requests_leave_no_trace() {
    let parent = scratch();
    let directory = parent.path().join("pools");
    for (name, lifetime, capacity) in [
        ("../r", Lifetime::Shared, MIB),
        (".r", Lifetime::Shared, MIB),
        ("", Lifetime::Shared, MIB),
        ("r", Lifetime::Private { expected_clients: 0 }, MIB),
        ("r", Lifetime::Shared, 0),
        ("r", Lifetime::Shared, 100),
    ] {
        let error = open_sized(&directory, name, lifetime, capacity).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    }
    assert_eq!(files_in(&directory), [""; 0]);
}

#[test]
fn after_closing_every_call_fails_and_views_live_on() {
    let directory = scratch();
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    region.write_pieces(&[(0, 1)], b"v").unwrap();
    let view = region.data_ptr();
    assert!(!region.is_closed());
    region.close();
    region.close();
    assert!(region.is_closed());
    assert!(files_in(directory.path()).is_empty());
    assert!(matches!(region.lock(NOW), Err(Error::Closed(_))));
    assert!(matches!(region.try_lock(), Err(Error::Closed(_))));
    assert!(matches!(region.write_pieces(&[(0, 1)], b"w"), Err(Error::Closed(_))));
    assert!(matches!(region.read_pieces(&[(0, 1)], &mut [0]), Err(Error::Closed(_))));
    assert!(matches!(region.populate(1, &mut go_on), Err(Error::Closed(_))));
    assert!(matches!(region.collapse_huge_pages(&mut go_on), Err(Error::Closed(_))));
    #[allow(unsafe_code, reason = "a view is a raw pointer")]
    // SAFETY: the region lives, so its data area is mapped.
    let byte = unsafe { view.read_volatile() };
    assert_eq!(byte, b'v');
}

#[test]
fn a_region_closed_under_a_guard_is_left_when_the_guard_goes() {
    let directory = scratch();
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    let other = open(directory.path(), "r", Lifetime::Shared).unwrap();
    let mut guard = region.lock(SOON).unwrap();
    region.close();
    assert!(other.is_client_alive(region.client().index));
    assert!(matches!(other.lock(SOON), Err(Error::Busy { .. })), "not robbed of the lock");
    guard.index_bytes()[0] = 1;
    drop(guard);
    assert!(!other.is_client_alive(region.client().index));
    assert!(!other.lock(SOON).unwrap().is_dirty());
}

#[test]
fn who_waits_for_the_lock_while_its_region_is_closed_is_turned_away_at_the_door() {
    let directory = scratch();
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    let other = open(directory.path(), "r", Lifetime::Shared).unwrap();
    let guard = other.lock(SOON).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| region.lock(PATIENCE).map(drop));
        eventually("the wait", || other.lock_counts().waited == 1);
        region.close();
        assert!(!other.is_client_alive(region.client().index), "nobody of it was inside");
        drop(guard);
        assert!(matches!(waiter.join().unwrap(), Err(Error::Closed(_))));
    });
    assert!(other.try_lock().unwrap().is_some());
}

#[test]
fn closing_while_threads_use_the_lock_robs_nobody() {
    let directory = scratch();
    let other = open(directory.path(), "r", Lifetime::Shared).unwrap();
    for _ in 0..100 {
        let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
        let ends = Instant::now() + Duration::from_millis(4);
        std::thread::scope(|scope| {
            for user in [&region, &region, &region, &other] {
                scope.spawn(move || {
                    while Instant::now() < ends {
                        let Ok(mut guard) = user.lock(PATIENCE) else { break };
                        assert_eq!(std::mem::replace(&mut guard.index_bytes()[0], 1), 0, "two inside");
                        // Long enough for another to look for a dead holder.
                        (0..100).for_each(|_| std::hint::spin_loop());
                        guard.index_bytes()[0] = 0;
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(2));
            region.close();
        });
        assert!(!other.is_client_alive(region.client().index));
    }
    assert_eq!(other.lock(SOON).unwrap().index_bytes()[0], 0);
}

#[test]
fn threads_of_one_client_exclude_each_other_and_give_up_at_the_deadline() {
    let directory = scratch();
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    let guard = region.lock(SOON).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(region.try_lock().unwrap().is_none());
            let Err(Error::Busy { waited }) = region.lock(SOON) else { panic!("had the lock") };
            assert!(waited >= SOON, "{waited:?}");
        });
    });
    drop(guard);
    assert!(region.try_lock().unwrap().is_some());
    let counts = region.lock_counts();
    assert_eq!((counts.waited, counts.gave_up, counts.taken_over), (1, 1, 0));
}

#[test]
fn a_panic_under_the_lock_gives_it_back_dirty() {
    let directory = scratch();
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    let panicked = std::thread::scope(|scope| {
        let panics = scope.spawn(|| {
            let _guard = region.lock(SOON).unwrap();
            panic!("as planned");
        });
        panics.join().is_err()
    });
    assert!(panicked);
    assert_eq!(region.lock_counts().panicked, 1);
    let mut guard = region.lock(NOW).unwrap();
    assert!(guard.is_dirty());
    guard.clear_dirty();
    drop(guard);
    let mut guard = region.lock(NOW).unwrap();
    assert!(!guard.is_dirty());
    guard.mark_dirty();
    drop(guard);
    assert!(region.lock(NOW).unwrap().is_dirty());
}

#[test]
fn every_place_can_be_taken_and_no_more() {
    let directory = scratch();
    let mut clients: Vec<Region> =
        (0..MAX_CLIENTS).map(|_| open(directory.path(), "r", Lifetime::Shared).unwrap()).collect();
    let full = open(directory.path(), "r", Lifetime::Shared).unwrap_err();
    assert!(matches!(full, Error::ClientsFull { limit: 256 }), "{full}");
    let freed = clients.swap_remove(100).client();
    let next = open(directory.path(), "r", Lifetime::Shared).unwrap();
    assert_eq!(next.client().index, freed.index);
    assert_eq!(next.client().generation, freed.generation + 1);
    clients.clear();
    assert_eq!(files_in(directory.path()).len(), 2);
    drop(next);
    assert!(files_in(directory.path()).is_empty());
}

#[test]
fn populating_and_huge_pages_change_no_byte_and_tell_their_progress() {
    let directory = scratch();
    let region = open_sized(directory.path(), "r", Lifetime::Shared, 70 * MIB).unwrap();
    let pattern: Vec<u8> = (0..70 * MIB).map(|i| (i % 251) as u8).collect();
    region.write_pieces(&[(0, 70 * MIB)], &pattern).unwrap();
    let mut seen = Vec::new();
    let mut note = |phase, done, total| {
        seen.push((phase, done, total));
        ControlFlow::Continue(())
    };
    assert_eq!(region.populate(2, &mut note).unwrap(), region.geometry().file_len);
    let collapsed = region.collapse_huge_pages(&mut note).unwrap();
    assert!(collapsed <= 70 * MIB && collapsed.is_multiple_of(2 << 20));
    eprintln!("{collapsed} bytes became huge pages");
    assert!(seen.iter().any(|&(phase, done, total)| phase == Phase::Populating && done == total));
    assert!(seen.iter().any(|&(phase, ..)| phase == Phase::Collapsing));
    assert!(seen.iter().all(|&(_, done, total)| done <= total));
    let mut read = vec![0; pattern.len()];
    region.read_pieces(&[(0, 70 * MIB)], &mut read).unwrap();
    assert!(read == pattern);
}

#[test]
fn long_calls_stop_when_asked_to_and_leave_no_file() {
    let directory = scratch();
    let mut stop = |_, _, _| ControlFlow::Break(());
    let request = OpenRequest {
        directory: Some(directory.path()),
        name: "r",
        geometry: geometry(MIB),
        lifetime: Lifetime::Shared,
    };
    let error = Region::open(&request, &mut stop).unwrap_err();
    assert!(matches!(error, Error::Interrupted { .. }), "{error}");
    assert!(files_in(directory.path()).is_empty());
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    assert!(matches!(region.populate(1, &mut stop), Err(Error::Interrupted { .. })));
    assert!(matches!(
        open_sized(directory.path(), "big", Lifetime::Shared, 4 * MIB).unwrap().collapse_huge_pages(&mut stop),
        Err(Error::Interrupted { .. })
    ));
}

#[test]
fn pieces_are_filled_in_order_and_checked_before_a_byte_moves() {
    let directory = scratch();
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    region.write_pieces(&[(10, 4), (2, 4)], b"abcdef").unwrap();
    let mut all = [0; 16];
    region.read_pieces(&[(0, 16)], &mut all).unwrap();
    assert_eq!(&all, b"\0\0ef\0\0\0\0\0\0abcd\0\0");
    let mut back = [0; 5];
    region.read_pieces(&[(10, 4), (2, 4)], &mut back).unwrap();
    assert_eq!(&back, b"abcde");
    for (pieces, bytes) in [(&[(0, 2)][..], &b"xyz"[..]), (&[(0, 1), (MIB - 1, 2)], b"xyz"), (&[(u64::MAX, 1)], b"x")] {
        assert!(matches!(region.write_pieces(pieces, bytes), Err(Error::InvalidArgument(_))));
    }
    region.read_pieces(&[(0, 1)], &mut all[..1]).unwrap();
    assert_eq!(all[0], 0);
    region.write_pieces(&[], b"").unwrap();
}

#[test]
fn a_region_stays_out_of_core_dumps() {
    let directory = scratch();
    let region = open(directory.path(), "dumpless", Lifetime::Shared).unwrap();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut ours = 0;
    let mut inside = false;
    for line in maps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            assert!(!inside || flags.split(' ').any(|flag| flag == "dd"), "{flags}");
            ours += usize::from(inside);
            inside = false;
        } else if line.contains("/dumpless.v") {
            inside = true;
        }
    }
    assert_eq!(ours, 2, "control and data");
    drop(region);
}

#[test]
fn a_region_is_removed_by_its_name_only_if_nobody_uses_it() {
    let parent = scratch();
    let directory = parent.path().join("pools");
    let kept = open(&directory, "kept", Lifetime::Persistent).unwrap();
    let gone = open(&directory, "gone", Lifetime::Persistent).unwrap();
    assert!(matches!(Region::remove(Some(&directory), "kept"), Err(Error::InvalidArgument(_))));
    assert!(matches!(Region::remove(Some(&directory), "none"), Err(Error::Region { .. })));
    gone.close();
    Region::remove(Some(&directory), "gone").unwrap();
    assert!(Region::scan(Some(&directory)).unwrap().iter().all(|found| found.name == "kept"));
    kept.close();
    Region::remove(Some(&directory), "kept").unwrap();
    assert_eq!(files_in(&directory), [""; 0]);
    assert!(matches!(Region::remove(Some(&directory), "kept"), Err(Error::Region { .. })));
}
