//! Random operations against the model.

use proptest::prelude::*;

use super::harness::Harness;
use super::operations::{Operation, operation};

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn the_index_does_what_the_model_does(operations in prop::collection::vec(operation(), 1..120)) {
        let mut harness = Harness::new();
        for operation in &operations {
            harness.apply(operation);
            harness.compare();
        }
        drain(&mut harness);
    }

    #[test]
    fn a_rebuild_at_any_time_changes_nothing_that_can_be_seen(
        operations in prop::collection::vec(operation(), 1..80),
    ) {
        let mut harness = Harness::new();
        for operation in &operations {
            harness.apply(operation);
            harness.memory.index().rebuild(0x5eed).unwrap();
            harness.compare();
        }
    }
}

/// When every client is gone and everything else was flushed, all blocks, slots and holds are back.
fn drain(harness: &mut Harness) {
    harness.apply(&Operation::Die { client: 0 });
    harness.apply(&Operation::Die { client: 1 });
    harness.apply(&Operation::Flush);
    harness.compare();
    let stats = harness.memory.index().stats();
    assert_eq!((stats.free_blocks, stats.entries, stats.holds), (24, 0, 0));
}
