//! An index on plain memory with two clients, and its model beside it.

use zerocopy::IntoBytes;

use super::model::{Model, State};
use crate::index::records::slot_state;
use crate::index::{ClientRef, Index, IndexLayout, NamespaceKey, NamespaceRef, Registration, Role};

pub(super) const BLOCK: u64 = 4096;
pub(super) const NUM_KEYS: u8 = 9;

#[derive(Clone, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// The bytes of an index, aligned as a region's are.
#[derive(Clone)]
pub(super) struct Memory {
    lines: Vec<Line>,
    pub(super) layout: IndexLayout,
}

impl Memory {
    pub(super) fn new(num_blocks: u32, blocks_per_segment: u32, num_slots: u32, num_holds: u32) -> Self {
        let layout =
            IndexLayout { blocks_per_segment, block_size: BLOCK, ..IndexLayout::new(num_blocks, num_slots, num_holds) };
        let lines = vec![Line([0; 64]); layout.total_len() / 64 + 1];
        let mut memory = Self { lines, layout };
        memory.index().initialise(0x5eed).unwrap();
        memory
    }

    pub(super) fn index(&mut self) -> Index<'_> {
        Index::view(&self.layout, self.lines.as_mut_slice().as_mut_bytes()).unwrap()
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        self.lines.as_mut_slice().as_mut_bytes()
    }
}

#[derive(Clone)]
pub(super) struct Harness {
    pub(super) memory: Memory,
    pub(super) model: Model,
    pub(super) clients: [ClientRef; 2],
    pub(super) namespace: NamespaceRef,
    /// Every id that was ever handed out: late words about them must change nothing.
    pub(super) ids: Vec<u64>,
    /// Pins have ids too, which nobody gets to see; the model numbers them by itself.
    pub(super) pins_made: u64,
}

pub(super) fn digest(key: u8) -> [u64; 4] {
    [u64::from(key) * 0x1234_5678_9abc, u64::from(key), 7, 7]
}

pub(super) fn registration(role: Role, group: u64) -> Registration<'static> {
    Registration { role, rank: 0, group, label: "test", byte: 0, byte_generation: 0, pid: 1, attached_at_unix: 0 }
}

impl Harness {
    pub(super) fn new() -> Self {
        let mut memory = Memory::new(24, 8, 6, 10);
        let mut index = memory.index();
        let namespace = index.resolve_namespace(&[1, 2, 3, 4], "test").unwrap().unwrap();
        let clients =
            [Role::Scheduler, Role::Pool].map(|role| index.register_client(&registration(role, 0)).unwrap().unwrap());
        Self { memory, model: Model::new(24, 6, 10), clients, namespace, ids: vec![], pins_made: 0 }
    }

    pub(super) fn namespace(&mut self) -> NamespaceKey {
        let reference = self.namespace;
        self.memory.index().namespace(reference).unwrap()
    }

    /// Everything that can be seen of the index, compared with the model; and every invariant.
    pub(super) fn compare(&mut self) {
        let namespace = self.namespace();
        let model = self.model.clone();
        let mut index = self.memory.index();
        assert_eq!(index.violations(), Vec::<String>::new());
        let stats = index.stats();
        assert_eq!(stats.free_blocks, model.free_blocks(), "free blocks");
        let evictable: Vec<u8> = model.evictable().iter().map(|n| model.entry(*n).key).collect();
        assert_eq!(stats.evictable_entries as usize, evictable.len(), "evictable entries");
        assert_eq!(stats.holds as usize, model.holds.len(), "holds");
        let count = |state| model.entries.iter().filter(|e| e.state == state).count() as u32;
        let expected = [State::Writing, State::Ready, State::Doomed, State::Orphaned].map(count);
        assert_eq!([stats.writing, stats.ready, stats.doomed, stats.orphaned], expected, "entries by state");
        for key in 0..NUM_KEYS {
            let found = index.get(&digest(key), &namespace).unwrap();
            let expected = model.find(key);
            assert_eq!(found.as_ref().map(|e| e.num_blocks), expected.map(|e| e.blocks), "blocks of {key}");
            let ready = index.contains(&digest(key), &namespace).unwrap();
            assert_eq!(ready, expected.is_some_and(|e| e.state == State::Ready), "ready {key}");
        }
        let queue: Vec<u64> = queue_digests(&index);
        let expected: Vec<u64> = model.queue.iter().map(|n| digest(model.entry(*n).key)[1]).collect();
        assert_eq!(queue, expected, "the eviction order");
    }
}

/// The keys in the eviction queue, oldest first.
pub(super) fn queue_digests(index: &Index<'_>) -> Vec<u64> {
    let mut found = vec![];
    let mut next = index.root.queue_head;
    while let Some(slot) = next.checked_sub(1) {
        found.push(index.slots[slot as usize].digest[1]);
        next = index.slots[slot as usize].links.queue_next;
    }
    found
}

/// What each READY entry's key and blocks are.
pub(super) fn ready_entries(index: &Index<'_>) -> Vec<(u64, Vec<(u32, u32)>)> {
    let ready = (0..index.layout.num_slots).filter(|slot| index.state_of(*slot) == slot_state::READY);
    ready
        .map(|slot| {
            let info = index.entry_info(slot, 0).unwrap();
            (index.slots[slot as usize].digest[1], info.extents.as_slice().to_vec())
        })
        .collect()
}
