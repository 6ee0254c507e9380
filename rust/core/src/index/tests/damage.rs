//! Bytes that nobody wrote on purpose: an error or a rebuild, never a hang, a panic or a block with two owners.

use proptest::prelude::*;

use super::harness::{Harness, Memory, digest, registration};
use super::operations::{Operation, operation, shape};
use crate::index::{Expected, Index, NamespaceKey, Role, SaveRequest};

fn poke_everything(index: &mut Index<'_>) {
    let namespace = NamespaceKey { row: 0, epoch: 0 };
    let owner = index.register_client(&registration(Role::Pool, 1)).ok().flatten().unwrap_or_default();
    for key in 0..9 {
        let request = SaveRequest {
            key: "k",
            digest: digest(key),
            rows: 1,
            row_bytes: 9000,
            modality: 1,
            participants: 1,
            owner,
        };
        let _ = index.get(&digest(key), &namespace);
        let _ = index.lease(&digest(key), &namespace, &Expected { rows: Some(1), ..Expected::default() }, owner);
        let _ = index.begin_save(&request, &namespace);
        let _ = index.pin(&digest(key), &namespace, owner);
        let _ = index.unpin(&digest(key), &namespace, owner);
    }
    for number in 0..12u64 {
        for generation in 0..3u64 {
            let id = (generation << 32) | number;
            let _ = index.claim_save(0, id, &shape(1));
            let _ = index.claim_load(0, id);
            let _ = index.complete(0, id, true);
            let _ = index.close_unclaimed(id);
        }
    }
    let _ = index.sweep_flushed(0, 0, u32::MAX);
    let _ = index.reclaim(10, 5, &mut |_, _| false);
    let _ = (index.stats(), index.violations(), index.client_infos(), index.namespace_infos());
}

fn heals(memory: &mut Memory) {
    poke_everything(&mut memory.index());
    let mut index = memory.index();
    index.rebuild(1).unwrap();
    assert_eq!(index.violations(), Vec::<String>::new());
    poke_everything(&mut index);
    assert_eq!(index.violations(), Vec::<String>::new(), "after a rebuild nothing meets damage again");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 500, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_are_survived(seed in any::<u64>()) {
        let mut memory = Memory::new(24, 8, 6, 10);
        let mut state = seed | 1;
        for byte in memory.bytes() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *byte = state as u8;
        }
        heals(&mut memory);
    }

    #[test]
    fn flipped_bytes_are_survived(
        operations in prop::collection::vec(operation(), 1..40),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
    ) {
        let mut harness = Harness::new();
        for operation in operations.iter().filter(|o| !matches!(o, Operation::Die { .. })) {
            harness.apply(operation);
        }
        let bytes = harness.memory.bytes();
        for (at, value) in flips {
            bytes[at.index(bytes.len())] = value;
        }
        heals(&mut harness.memory);
    }
}
