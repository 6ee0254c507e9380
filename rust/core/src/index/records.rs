//! The records of the index, as they lie in a region.
//!
//! *Truth* is what a rebuild starts from: slots with their details, extents, holds, clients, namespaces.
//! *Derived* is what it makes anew: links, buckets, free runs, bins, and the sums in the root.
//! What one operation touches together lies together: in a large index each line is a fetch from memory.
//! A reference to another record is its number plus one, so that zero bytes mean "none" and a fresh file is an
//! empty index.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::MAX_CLIENT_RECORDS;
use super::commit::{Commit, CommitWord, Table, Whose};
use crate::geometry::MAX_NAMESPACES;

/// Dimensions that an entry's shape can have.
pub const MAX_DIMS: usize = 8;
/// Bytes of a key that are kept for people to read.
pub(crate) const KEY_PREFIX_LEN: usize = 96;
/// Bytes of a label (client, namespace) that are kept for people to read.
pub(crate) const LABEL_LEN: usize = 96;
/// Modalities per namespace whose row size is remembered.
pub(crate) const LEARNED_ROWS: usize = 8;
/// Size classes of free runs.
pub(crate) const NUM_BINS: usize = 256;

/// States of a slot; see the life of an entry in the crate's documentation.
pub(crate) mod slot_state {
    pub(crate) const FREE: u8 = 0;
    pub(crate) const WRITING: u8 = 1;
    pub(crate) const READY: u8 = 2;
    pub(crate) const DOOMED: u8 = 3;
    pub(crate) const ORPHANED: u8 = 4;
}

/// Kinds of hold, which are the states of a hold record.
pub(crate) mod hold_kind {
    pub(crate) const FREE: u8 = 0;
    pub(crate) const LEASE: u8 = 1;
    pub(crate) const PIN: u8 = 2;
    pub(crate) const LOAD: u8 = 3;
    pub(crate) const SAVE: u8 = 4;
}

/// States of a client record.
pub(crate) mod client_state {
    pub(crate) const FREE: u8 = 0;
    pub(crate) const LIVE: u8 = 1;
    pub(crate) const DYING: u8 = 2;
}

/// States of a namespace row.
pub(crate) mod namespace_state {
    pub(crate) const FREE: u8 = 0;
    pub(crate) const USED: u8 = 1;
}

/// A slot: what it holds, and where it is chained. In two lines side by side, of which the first is what a lookup touches.
#[derive(Debug, FromBytes, IntoBytes, KnownLayout)]
#[repr(C, align(64))]
pub(crate) struct Slot {
    pub(crate) commit: CommitWord,
    pub(crate) digest: [u64; 4],
    pub(crate) epoch: u64,
    /// The reference to the entry's first extent.
    pub(crate) first_block: u32,
    pub(crate) num_blocks: u32,
    /// 1 where that extent is the only one. The check bits of the commit word vouch for these three.
    pub(crate) in_one_run: u16,
    pub(crate) namespace: u16,
    pub(crate) modality: u32,
    /// Derived; the rest of the slot is truth.
    pub(crate) links: Links,
    /// When the entry last became evictable, on the index's own clock.
    pub(crate) sequence: u64,
    pub(crate) nbytes: u64,
    pub(crate) checksum: u64,
    pub(crate) dtype: u8,
    pub(crate) ndim: u8,
    pub(crate) has_checksum: u8,
    pub(crate) reserved: [u8; 1],
    /// The incarnation of the region in which the checksum was last known to fit.
    pub(crate) verified_in: u32,
}

impl Slot {
    /// What the check bits of its commit word depend on, this being slot `number`.
    fn whose(&self, number: u32) -> Whose {
        let place = u64::from(self.num_blocks) << 32 | u64::from(self.first_block);
        Whose { table: Table::Slots, index: number, also: place ^ u64::from(self.in_one_run).rotate_right(1) }
    }

    /// What the commit word says, or `None` where its check bits do not fit.
    pub(crate) fn load(&self, number: u32) -> Option<Commit> {
        self.commit.load(self.whose(number))
    }

    /// [`CommitWord::lower`] of this slot's word.
    pub(crate) fn lower(&self, number: u32, commit: Commit) {
        self.commit.lower(self.whose(number), commit);
    }

    /// [`CommitWord::raise`] of this slot's word.
    pub(crate) fn raise(&self, number: u32, commit: Commit) {
        self.commit.raise(self.whose(number), commit);
    }
}

/// What of a slot is seldom asked for.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, align(64))]
pub(crate) struct Details {
    /// Sizes; the slot says how many of them count.
    pub(crate) shape: [u64; MAX_DIMS],
    pub(crate) owner: ClientRef,
    pub(crate) key_len: u32,
    pub(crate) spare: [u8; 20],
    pub(crate) key_prefix: [u8; KEY_PREFIX_LEN],
}

/// A client record and the generation in which it is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ClientRef {
    pub(crate) record: u32,
    pub(crate) generation: u32,
}

/// Derived chains and counts of a slot.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Links {
    pub(crate) bucket_next: u32,
    pub(crate) queue_prev: u32,
    /// Also the chain of free slots.
    pub(crate) queue_next: u32,
    pub(crate) hold_head: u32,
    pub(crate) leases: u32,
    /// Pins, loads and saves: the holds that take an entry out of the eviction queue.
    pub(crate) firm_holds: u32,
    pub(crate) queued: u32,
    pub(crate) scratch: u32,
}

/// A record at an extent's first block. Only chains that start in a live slot count.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Extent {
    pub(crate) len: u32,
    pub(crate) next: u32,
    pub(crate) owner: u32,
    pub(crate) owner_generation: u32,
}

/// What is known of a block: an extent or a free run that begins or ends there.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Block {
    pub(crate) extent: Extent,
    pub(crate) run: FreeRun,
}

/// Derived: a free run is described at its first block (`len`, bin chain) and at its last one (`head`).
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct FreeRun {
    pub(crate) len: u32,
    pub(crate) prev: u32,
    pub(crate) next: u32,
    pub(crate) head: u32,
}

/// What keeps an entry in place.
#[derive(Debug, FromBytes, IntoBytes, KnownLayout)]
#[repr(C)]
pub(crate) struct Hold {
    pub(crate) commit: CommitWord,
    pub(crate) slot: u32,
    pub(crate) slot_generation: u32,
    pub(crate) owner: ClientRef,
    /// Ranks that take part in a transfer, one bit each; 0 for a save that its owner writes by itself.
    pub(crate) participants: u64,
    pub(crate) claimed: u64,
    pub(crate) completed: u64,
    pub(crate) pins: u32,
    pub(crate) failed: u32,
    pub(crate) next_in_slot: u32,
    pub(crate) prev_in_slot: u32,
}

/// One attachment to the region.
#[derive(Debug, FromBytes, IntoBytes, KnownLayout)]
#[repr(C)]
pub(crate) struct ClientRecord {
    pub(crate) commit: CommitWord,
    pub(crate) group: u64,
    pub(crate) attached_at_unix: u64,
    /// When the whole group was first seen gone, in nanoseconds of the monotonic clock; 0 before.
    pub(crate) gone_at: u64,
    /// The liveness byte of the lock file, and its generation.
    pub(crate) byte: u32,
    pub(crate) byte_generation: u32,
    pub(crate) role: u32,
    pub(crate) rank: u32,
    pub(crate) pid: u32,
    pub(crate) label_len: u32,
    pub(crate) label: [u8; LABEL_LEN],
}

/// The row size in bytes that items of one modality were seen to have.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct LearnedRow {
    pub(crate) modality: u32,
    pub(crate) row_bytes: u32,
}

/// One namespace.
#[derive(Debug, FromBytes, IntoBytes, KnownLayout)]
#[repr(C)]
pub(crate) struct NamespaceRow {
    pub(crate) commit: CommitWord,
    pub(crate) digest: [u64; 4],
    pub(crate) epoch: u64,
    /// Derived.
    pub(crate) blocks_used: u64,
    /// Derived.
    pub(crate) entries: u64,
    pub(crate) learned: [LearnedRow; LEARNED_ROWS],
    pub(crate) label_len: u32,
    pub(crate) next_learned: u32,
    pub(crate) label: [u8; LABEL_LEN],
}

/// Derived sums and list heads.
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, align(64))]
pub(crate) struct Root {
    pub(crate) initialised: u64,
    pub(crate) seed: u64,
    pub(crate) next_sequence: u64,
    pub(crate) free_blocks: u32,
    pub(crate) evictable_blocks: u32,
    pub(crate) evictable_entries: u32,
    pub(crate) queue_head: u32,
    pub(crate) queue_tail: u32,
    pub(crate) free_slot: u32,
    /// Slots below this number were in use at least once.
    pub(crate) slots_touched: u32,
    pub(crate) slots_used: u32,
    pub(crate) free_hold: u32,
    pub(crate) holds_touched: u32,
    pub(crate) holds_used: u32,
    /// How often a client attached while no other lived. Not derived: a rebuild leaves it.
    pub(crate) incarnation: u32,
    pub(crate) doomed: u32,
    pub(crate) reserved: [u32; 13],
}

/// Derived heads of the size classes of free runs, and which are not empty.
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, align(64))]
pub(crate) struct Bins {
    pub(crate) used: [u64; NUM_BINS / 64],
    pub(crate) reserved: [u64; 4],
    pub(crate) heads: [u32; NUM_BINS],
}

/// The records whose number is the same in every index.
#[derive(Debug, FromBytes, IntoBytes, KnownLayout)]
#[repr(C, align(64))]
pub(crate) struct Fixed {
    pub(crate) root: Root,
    pub(crate) bins: Bins,
    pub(crate) namespaces: [NamespaceRow; MAX_NAMESPACES as usize],
    pub(crate) clients: [ClientRecord; MAX_CLIENT_RECORDS as usize],
}

const _: () = {
    assert!(size_of::<Slot>() == 128);
    assert!(std::mem::offset_of!(Slot, links) == 64);
    assert!(size_of::<Details>() == 192);
    assert!(size_of::<Links>() == 32);
    assert!(size_of::<Block>() == 32);
    assert!(size_of::<Hold>() == 64);
    assert!(size_of::<Root>().is_multiple_of(64));
    assert!(size_of::<Bins>().is_multiple_of(64));
};
