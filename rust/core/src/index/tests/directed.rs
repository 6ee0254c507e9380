//! Cases that random tests meet too seldom, or that deserve a name.

use super::harness::{BLOCK, Harness, digest, registration};
use super::model::Model;
use super::operations::{Operation, shape};
use crate::index::{BeginSave, ClaimOutcome, Expected, Index, Role, SaveSkip};

fn save(harness: &mut Harness, key: u8, rows: u64) -> u64 {
    let (request, namespace) = (harness.request(0, key, rows, 1), harness.namespace());
    match harness.memory.index().begin_save(&request, &namespace).unwrap() {
        BeginSave::Begun(info) => info.id,
        BeginSave::Skipped(skip) => panic!("{skip:?}"),
    }
}

fn save_ready(harness: &mut Harness, key: u8, rows: u64) {
    let id = save(harness, key, rows);
    assert_eq!(harness.memory.index().claim_save(0, id, &shape(rows)).unwrap(), ClaimOutcome::Claimed);
    harness.memory.index().complete(0, id, true).unwrap();
}

#[test]
fn a_promised_entry_outlives_an_allocation_that_needs_all_room() {
    let mut harness = Harness::new();
    save_ready(&mut harness, 1, 12);
    let (namespace, owner) = (harness.namespace(), harness.clients[0]);
    let lease = harness
        .memory
        .index()
        .lease(&digest(1), &namespace, &Expected { rows: Some(12), ..Expected::default() }, owner)
        .unwrap()
        .unwrap();
    let request = harness.request(0, 2, 1, 1);
    let begun = harness.memory.index().begin_save(&request, &namespace).unwrap();
    assert!(matches!(begun, BeginSave::Skipped(SaveSkip::NoRoom)));
    harness.memory.index().end_lease(lease.id).unwrap();
    let begun = harness.memory.index().begin_save(&request, &namespace).unwrap();
    assert!(matches!(begun, BeginSave::Begun(_)));
}

#[test]
fn scattered_blocks_are_gathered_when_no_run_is_long_enough() {
    let mut harness = Harness::new();
    (0..6).for_each(|key| save_ready(&mut harness, key, 2));
    let namespace = harness.namespace();
    for key in [1, 3, 5] {
        let owner = harness.clients[0];
        harness.memory.index().pin(&digest(key), &namespace, owner).unwrap().unwrap();
    }
    let request = harness.request(0, 8, 6, 1);
    let BeginSave::Begun(info) = harness.memory.index().begin_save(&request, &namespace).unwrap() else {
        panic!("twelve blocks are evictable")
    };
    assert_eq!(info.num_blocks, 12);
    assert_eq!(info.extents.as_slice().len(), 3);
    assert_eq!(harness.memory.index().violations(), Vec::<String>::new());
}

#[test]
fn no_extent_crosses_a_segment() {
    let mut harness = Harness::new();
    let namespace = harness.namespace();
    let request = harness.request(0, 1, 0, 0);
    let BeginSave::Begun(info) = harness.memory.index().alloc(&request, &namespace, 24).unwrap() else {
        panic!("all blocks are free")
    };
    let mut extents = info.extents.as_slice().to_vec();
    extents.sort_unstable();
    assert_eq!(extents, [(0, 8), (8, 8), (16, 8)]);
}

#[test]
fn an_item_that_is_larger_than_its_blocks_is_not_copied_and_its_size_is_learned() {
    let mut harness = Harness::new();
    let namespace = harness.namespace();
    let request = crate::index::SaveRequest { modality: 5, row_bytes: BLOCK, ..harness.request(0, 1, 2, 1) };
    let begin = |harness: &mut Harness| match harness.memory.index().begin_save(&request, &namespace).unwrap() {
        BeginSave::Begun(info) => info,
        BeginSave::Skipped(skip) => panic!("{skip:?}"),
    };
    let first = begin(&mut harness);
    assert_eq!(first.num_blocks, 2);
    assert_eq!(harness.memory.index().claim_save(0, first.id, &shape(2)).unwrap(), ClaimOutcome::TooLarge);
    assert_eq!(harness.memory.index().stats().free_blocks, 24);
    let second = begin(&mut harness);
    assert_eq!(second.num_blocks, 4);
    assert_eq!(harness.memory.index().claim_save(0, second.id, &shape(2)).unwrap(), ClaimOutcome::Claimed);
}

#[test]
fn a_dead_schedulers_claimed_save_is_nobodys_until_its_group_is_gone_and_the_quarantine_is_over() {
    let mut harness = Harness::new();
    let mut index = harness.memory.index();
    let scheduler = index.register_client(&registration(Role::Scheduler, 9)).unwrap().unwrap();
    let worker = index
        .register_client(&crate::index::Registration { byte: 1, ..registration(Role::Worker, 9) })
        .unwrap()
        .unwrap();
    harness.clients[0] = scheduler;
    let id = save(&mut harness, 1, 12);
    let mut index = harness.memory.index();
    assert_eq!(index.claim_save(0, id, &shape(12)).unwrap(), ClaimOutcome::Claimed);
    let mut worker_lives = |byte: u32, _| byte == 1;
    for now in [100, 200, 300] {
        let reclaimed = index.reclaim(now, 50, &mut worker_lives).unwrap();
        assert_eq!(reclaimed.waiting, 1);
    }
    assert_eq!((index.stats().orphaned, index.stats().free_blocks), (1, 0));
    assert!(index.is_registered(worker).unwrap());
    let mut nobody = |_, _| false;
    index.reclaim(400, 50, &mut nobody).unwrap();
    index.reclaim(449, 50, &mut nobody).unwrap();
    assert_eq!(index.stats().free_blocks, 0, "still in quarantine");
    index.reclaim(450, 50, &mut nobody).unwrap();
    assert_eq!((index.stats().orphaned, index.stats().free_blocks), (0, 24));
}

#[test]
fn a_worker_that_outlives_its_scheduler_gives_the_blocks_back_by_completing() {
    let mut harness = Harness::new();
    let id = save(&mut harness, 1, 12);
    let scheduler = harness.clients[0];
    let mut index = harness.memory.index();
    assert_eq!(index.claim_save(0, id, &shape(12)).unwrap(), ClaimOutcome::Claimed);
    index.deregister_client(scheduler).unwrap();
    assert_eq!(index.stats().orphaned, 1);
    index.complete(0, id, true).unwrap();
    assert_eq!((index.stats().orphaned, index.stats().ready, index.stats().free_blocks), (0, 0, 24));
}

#[test]
fn a_save_of_the_same_key_can_begin_beside_an_orphan() {
    let mut harness = Harness::new();
    let id = save(&mut harness, 1, 2);
    let scheduler = harness.clients[0];
    assert_eq!(harness.memory.index().claim_save(0, id, &shape(2)).unwrap(), ClaimOutcome::Claimed);
    harness.memory.index().deregister_client(scheduler).unwrap();
    harness.clients[0] = harness.clients[1];
    save_ready(&mut harness, 1, 2);
    let stats = harness.memory.index().stats();
    assert_eq!((stats.orphaned, stats.ready), (1, 1));
}

#[test]
fn a_load_ends_with_the_last_rank_and_replayed_words_change_nothing() {
    let mut harness = Harness::new();
    save_ready(&mut harness, 1, 2);
    let (namespace, owner) = (harness.namespace(), harness.clients[0]);
    let mut index = harness.memory.index();
    let lease = index.lease(&digest(1), &namespace, &Expected::default(), owner).unwrap().unwrap();
    index.dispatch_load(lease.id, 0b11).unwrap();
    for rank in [0, 1] {
        assert_eq!(index.claim_load(rank, lease.id).unwrap(), ClaimOutcome::Claimed);
    }
    assert_eq!(index.claim_load(2, lease.id).unwrap(), ClaimOutcome::Refused);
    for _ in 0..3 {
        index.complete(0, lease.id, true).unwrap();
        index.complete(2, lease.id, true).unwrap();
        assert_eq!(index.stats().evictable_entries, 0, "rank 1 still copies");
    }
    index.complete(1, lease.id, true).unwrap();
    assert_eq!(index.stats().evictable_entries, 1);
    let again = index.lease(&digest(1), &namespace, &Expected::default(), owner).unwrap().unwrap();
    index.dispatch_load(again.id, 0b1).unwrap();
    index.complete(0, lease.id, true).unwrap();
    assert_eq!(index.stats().evictable_entries, 0, "a word about the first load does not end the second");
}

#[test]
fn namespaces_are_reused_only_when_they_are_empty() {
    let mut harness = Harness::new();
    save_ready(&mut harness, 1, 2);
    let mut index = harness.memory.index();
    for number in 1..200u64 {
        assert!(index.resolve_namespace(&[9, 9, 9, number], "other").unwrap().is_some());
    }
    assert!(index.namespace(harness.namespace).is_some(), "it has an entry");
    assert_eq!(index.violations(), Vec::<String>::new());
}

#[test]
fn the_model_itself_evicts_oldest_first() {
    let mut model = Model::new(2, 8, 8);
    for key in [1, 2] {
        let id = u64::from(key);
        model.begin(key, 1, id, 0, std::collections::BTreeSet::new());
        model.resolve_save(id, true);
    }
    model.begin(3, 1, 3, 0, std::collections::BTreeSet::new());
    assert!(model.find(1).is_none() && model.find(2).is_some());
}

#[test]
fn dying_twice_is_dying_once() {
    let mut harness = Harness::new();
    let gone = harness.clients[1];
    harness.apply(&Operation::Die { client: 1 });
    harness.memory.index().deregister_client(gone).unwrap();
    harness.memory.index().deregister_client(gone).unwrap();
    assert_eq!(harness.memory.index().violations(), Vec::<String>::new());
}

#[test]
fn a_checksum_is_asked_for_once_after_a_time_without_clients() {
    let mut harness = Harness::new();
    let id = save(&mut harness, 1, 2);
    let (namespace, owner) = (harness.namespace(), harness.clients[0]);
    let mut index = harness.memory.index();
    index.claim_save(0, id, &shape(2)).unwrap();
    index.set_checksum(id, 77).unwrap();
    index.complete(0, id, true).unwrap();
    let lease = index.lease(&digest(1), &namespace, &Expected::default(), owner).unwrap().unwrap();
    assert_eq!(lease.unverified, None, "whoever wrote it knows it");
    index.end_lease(lease.id).unwrap();
    for client in harness.clients {
        index.deregister_client(client).unwrap();
    }
    let owner = index.register_client(&registration(Role::Pool, 0)).unwrap().unwrap();
    let lease = index.lease(&digest(1), &namespace, &Expected::default(), owner).unwrap().unwrap();
    assert_eq!(lease.unverified, Some(77));
    index.confirm(lease.id, true).unwrap();
    let second = index.lease(&digest(1), &namespace, &Expected::default(), owner).unwrap().unwrap();
    assert_eq!(second.unverified, None);
    index.end_lease(second.id).unwrap();
    index.confirm(lease.id, false).unwrap();
    assert_eq!((index.stats().free_blocks, index.stats().holds), (24, 0), "what does not fit goes");
    assert_eq!(index.violations(), Vec::<String>::new());
}

#[test]
fn being_written_by_another_client_is_told_from_being_written_by_oneself() {
    let mut harness = Harness::new();
    let id = save(&mut harness, 1, 2);
    let namespace = harness.namespace();
    let [writer, other] = harness.clients;
    let mut index = harness.memory.index();
    assert!(index.is_written_elsewhere(&digest(1), &namespace, other).unwrap());
    assert!(!index.is_written_elsewhere(&digest(1), &namespace, writer).unwrap());
    assert!(!index.is_written_elsewhere(&digest(2), &namespace, other).unwrap());
    index.claim_save(0, id, &shape(2)).unwrap();
    index.complete(0, id, true).unwrap();
    assert!(!index.is_written_elsewhere(&digest(1), &namespace, other).unwrap());
}

#[test]
fn an_entry_of_another_modality_is_not_what_was_asked_for() {
    let modalities = [(5, Some(5), true), (5, Some(6), false), (5, None, true), (0, Some(6), true)];
    for (stored, modality, fits) in modalities {
        let mut harness = Harness::new();
        let namespace = harness.namespace();
        let request = crate::index::SaveRequest { modality: stored, ..harness.request(0, 1, 2, 1) };
        let owner = harness.clients[0];
        let mut index = harness.memory.index();
        let BeginSave::Begun(save) = index.begin_save(&request, &namespace).unwrap() else { panic!("all is free") };
        index.claim_save(0, save.id, &shape(2)).unwrap();
        index.complete(0, save.id, true).unwrap();
        let expected = Expected { modality, ..Expected::default() };
        assert_eq!(index.lease(&digest(1), &namespace, &expected, owner).unwrap().is_some(), fits);
        assert_eq!(index.contains(&digest(1), &namespace).unwrap(), fits, "one that does not fit goes");
    }
}

#[test]
fn when_every_namespace_has_entries_the_one_used_longest_ago_makes_room_for_a_new_one() {
    let mut memory = super::harness::Memory::new(200, 200, 100, 200);
    let mut index = memory.index();
    let owner = index.register_client(&registration(Role::Pool, 0)).unwrap().unwrap();
    let rows: Vec<_> = (0..64)
        .map(|number| {
            let row = index.resolve_namespace(&[number, 9, 9, 9], "old").unwrap().unwrap();
            let namespace = index.namespace(row).unwrap();
            let digest = [number, number, 1, 1];
            let key = "key";
            let request =
                crate::index::SaveRequest { key, digest, rows: 0, row_bytes: 0, modality: 0, participants: 0, owner };
            assert!(matches!(index.alloc(&request, &namespace, 1).unwrap(), BeginSave::Begun(_)));
            index.end_writing(&digest, &namespace, owner, true).unwrap().unwrap();
            (row, namespace, digest)
        })
        .collect();
    index.pin(&rows[0].2, &rows[0].1, owner).unwrap().unwrap();
    assert!(index.resolve_namespace(&[99, 9, 9, 9], "new").unwrap().is_some());
    assert!(index.namespace(rows[0].0).is_some(), "something of it is pinned");
    assert!(index.namespace(rows[1].0).is_none(), "it was used longest ago");
    assert!(index.namespace(rows[2].0).is_some());
    assert_eq!((index.tally.evictions, index.stats().entries), (1, 63));
    assert_eq!(index.violations(), Vec::<String>::new());
}

#[test]
fn an_entry_whose_description_contradicts_itself_is_never_promised() {
    type Damage = fn(&mut Index<'_>, u32);
    let damages: [Damage; 4] = [
        |index, slot| index.details[slot as usize].shape[1] = 1 << 40,
        |index, slot| index.slots[slot as usize].dtype = 99,
        |index, slot| index.slots[slot as usize].ndim = 200,
        |index, slot| index.slots[slot as usize].nbytes += 1,
    ];
    for damage in damages {
        let mut harness = Harness::new();
        save_ready(&mut harness, 1, 2);
        let (namespace, owner) = (harness.namespace(), harness.clients[0]);
        let mut index = harness.memory.index();
        let slot = index.find_any_epoch(&digest(1)).unwrap().unwrap();
        damage(&mut index, slot);
        assert_eq!(index.lease(&digest(1), &namespace, &Expected::default(), owner).unwrap(), None);
        assert_eq!(index.stats().free_blocks, 24);
        assert_eq!(index.violations(), Vec::<String>::new());
    }
}

#[test]
fn verbs_by_key_never_reach_the_entry_that_came_after_a_flush() {
    let mut harness = Harness::new();
    let owner = harness.clients[0];
    let request = harness.request(0, 1, 0, 0);
    let namespace = harness.namespace();
    let mut index = harness.memory.index();
    assert!(matches!(index.alloc(&request, &namespace, 2).unwrap(), BeginSave::Begun(_)));
    index.raise_epoch(&namespace).unwrap();
    index.sweep_flushed(namespace.row, 0, 1000).unwrap();
    let namespace = harness.namespace();
    let mut index = harness.memory.index();
    let again = index.alloc(&request, &namespace, 2).unwrap();
    assert!(matches!(again, BeginSave::Skipped(SaveSkip::Exists)), "its first writer has yet to end");
    index.end_writing(&digest(1), &namespace, owner, true).unwrap().unwrap();
    assert!(!index.contains(&digest(1), &namespace).unwrap(), "what was flushed stays so");
    assert!(matches!(index.alloc(&request, &namespace, 2).unwrap(), BeginSave::Begun(_)));
}
