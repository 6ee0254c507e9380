//! A crash between any two stores of any operation, followed by a rebuild.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;

use super::harness::{Harness, digest, ready_entries};
use super::operations::{Operation, operation};
use crate::index::crash::{Crash, CrashKind, arm};

/// Runs the operation and stops it at its n-th crash point; false if it ended before.
fn crash_at(harness: &mut Harness, operation: &Operation, n: u64) -> bool {
    arm(Some((n, CrashKind::Panic)));
    let outcome = catch_unwind(AssertUnwindSafe(|| harness.do_to_index(operation)));
    arm(None);
    match outcome {
        Ok(()) => false,
        Err(payload) => {
            assert!(payload.is::<Crash>(), "{operation:?} panicked by itself");
            true
        }
    }
}

/// Keys that the operation may rightly change: its own, and for one that needs room whatever can be evicted.
fn may_change(harness: &Harness, operation: &Operation) -> Vec<u64> {
    let own = |key: u8| vec![digest(key)[1]];
    match *operation {
        Operation::Alloc { .. } | Operation::BeginSave { .. } => {
            harness.model.evictable().iter().map(|n| digest(harness.model.entry(*n).key)[1]).collect()
        }
        Operation::Lease { key, .. } | Operation::MarkReady { key, .. } | Operation::Discard { key, .. } => own(key),
        Operation::Flush => (0..=u64::from(u8::MAX)).collect(),
        _ => vec![],
    }
}

fn crash_everywhere(harness: &Harness, operation: &Operation) {
    let before = ready_entries(&harness.clone().memory.index());
    let changeable = may_change(harness, operation);
    for n in 0.. {
        let mut crashed = harness.clone();
        if !crash_at(&mut crashed, operation, n) {
            break;
        }
        let mut index = crashed.memory.index();
        index.rebuild(0x5eed).unwrap();
        assert_eq!(index.violations(), Vec::<String>::new(), "{operation:?} stopped at point {n}");
        let after = ready_entries(&index);
        for entry in before.iter().filter(|entry| !changeable.contains(&entry.0)) {
            assert!(after.contains(entry), "{operation:?} stopped at point {n} lost or moved {entry:?}");
        }
        everything_comes_back(&mut crashed);
    }
}

fn everything_comes_back(crashed: &mut Harness) {
    let namespace = crashed.namespace();
    let clients = crashed.clients;
    let mut index = crashed.memory.index();
    for client in clients {
        index.deregister_client(client).unwrap();
    }
    index.reclaim(10, 5, &mut |_, _| false).unwrap();
    index.reclaim(20, 5, &mut |_, _| false).unwrap();
    index.raise_epoch(&namespace).unwrap();
    index.sweep_flushed(namespace.row, 0, 1000).unwrap();
    let stats = index.stats();
    assert_eq!((stats.free_blocks, stats.entries, stats.holds), (24, 0, 0));
    assert_eq!(index.violations(), Vec::<String>::new());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn a_crash_between_any_two_stores_costs_at_most_what_was_being_done(
        operations in prop::collection::vec(operation(), 1..40),
    ) {
        let mut harness = Harness::new();
        for operation in &operations {
            crash_everywhere(&harness, operation);
            harness.apply(operation);
        }
    }

    #[test]
    fn a_rebuild_that_is_itself_stopped_can_be_done_again(
        operations in prop::collection::vec(operation(), 1..40),
        point in 0..40u64,
    ) {
        let mut harness = Harness::new();
        for operation in &operations {
            harness.apply(operation);
        }
        let mut stopped = harness.clone();
        arm(Some((point, CrashKind::Panic)));
        let _ = catch_unwind(AssertUnwindSafe(|| stopped.memory.index().rebuild(0x5eed)));
        arm(None);
        stopped.memory.index().rebuild(0x5eed).unwrap();
        stopped.compare();
    }
}
