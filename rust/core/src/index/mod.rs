//! The index: which key lies in which blocks, who holds it, and what goes next.
//!
//! It is integer arithmetic over slices that a lock's guard lends (in a region) or that a `Vec` owns (on the
//! heap, and in tests). Nothing here blocks, logs, copies data or knows of processes; allocation happens only where
//! an entry of many extents is described to a caller.
//!
//! # The life of an entry
//!
//! `FREE → WRITING → READY → FREE`, aside of which stand `DOOMED` (no longer found by key; its blocks return when
//! its last hold is resolved) and `ORPHANED` (a dead owner's unfinished entry; see the module `clients`). Every WRITING entry
//! has exactly one SAVE hold.
//!
//! # Damage
//!
//! Every number read from a record is range-checked at use and every walk is bounded. What does not fit is reported
//! as [`Damaged`]; the caller rebuilds the derived half from the truth and tries again.

mod check;
mod clients;
pub(crate) mod commit;
pub mod crash;
mod describe;
mod entries;
mod extents;
mod holds;
mod namespaces;
mod rebuild;
pub(crate) mod records;
mod runs;
mod slots;
#[cfg(test)]
mod tests;
mod transfers;

use zerocopy::{FromBytes, IntoBytes, KnownLayout};

pub use clients::{ClientInfo, Reclaimed, Registration, Role};
pub use describe::{EntryInfo, EntryPlace, ExtentList, IndexStats};
pub use entries::{EntryHandle, Unfit};
pub use namespaces::{NamespaceInfo, NamespaceKey, NamespaceRef, label_of};
pub use records::{ClientRef, MAX_DIMS};
pub use transfers::{BeginSave, ClaimOutcome, Expected, SaveRequest, SaveShape, SaveSkip, TransferId};

use crate::geometry::Geometry;
use records::{Bins, Block, ClientRecord, Details, Fixed, Hold, NamespaceRow, Root, Slot};

/// Records of clients: twice the clients that can live, since the dead keep theirs until their blocks are safe.
pub const MAX_CLIENT_RECORDS: u32 = 2 * crate::geometry::MAX_CLIENTS as u32;

/// Processors fetch lines in pairs, and a slot is one.
const ARRAY_ALIGN: usize = 128;
/// Enough that a key that is new meets an empty bucket: one in ten leads to a stranger's slot, which a large index fetches from
/// memory for nothing.
const BUCKETS_PER_SLOT: u32 = 8;
const INITIALISED: u64 = 0x6563_706f_6f6c_0001;

/// The index contradicts itself: rebuild it and try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the index contradicts itself: {0}")]
pub struct Damaged(
    /// One thin pointer, so that outcomes of operations fit into registers.
    pub(crate) &'static &'static str,
);

/// What index operations return: an outcome, or word that the index must be rebuilt.
pub type Checked<T> = Result<T, Damaged>;

/// How many records of each kind an index has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexLayout {
    num_blocks: u32,
    blocks_per_segment: u32,
    num_slots: u32,
    num_holds: u32,
    num_buckets: u32,
    block_size: u64,
}

impl IndexLayout {
    /// The layout for this many blocks, slots and holds, all blocks in one segment.
    pub(crate) fn new(num_blocks: u32, num_slots: u32, num_holds: u32) -> Self {
        let num_buckets = num_slots.next_power_of_two() * BUCKETS_PER_SLOT;
        Self { num_blocks, blocks_per_segment: num_blocks.max(1), num_slots, num_holds, num_buckets, block_size: 1 }
    }

    /// The layout of a region's index.
    pub fn of(geometry: &Geometry) -> Self {
        Self {
            blocks_per_segment: geometry.blocks_per_segment(),
            block_size: geometry.block_size,
            ..Self::new(geometry.num_blocks, geometry.num_slots, geometry.num_holds)
        }
    }

    /// The layout of an index on the heap, where all blocks are one segment.
    pub fn on_heap(num_blocks: u32, num_slots: u32, block_size: u64) -> Self {
        let num_holds = crate::geometry::default_holds(num_slots);
        Self { block_size, ..Self::new(num_blocks, num_slots, num_holds) }
    }

    /// Bytes that the index takes.
    pub fn total_len(&self) -> usize {
        padded::<Fixed>(1)
            + padded::<u32>(self.num_buckets)
            + padded::<Slot>(self.num_slots)
            + padded::<Hold>(self.num_holds)
            + padded::<Details>(self.num_slots)
            + padded::<Block>(self.num_blocks)
    }

    /// Blocks of data.
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Bytes of a block.
    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// Hold records.
    pub fn num_holds(&self) -> u32 {
        self.num_holds
    }
}

fn padded<T>(count: u32) -> usize {
    (size_of::<T>() * count as usize).next_multiple_of(ARRAY_ALIGN)
}

/// What an operation did besides its result; the caller adds it to the counters.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    /// Entries evicted to make room.
    pub evictions: u64,
    /// Blocks of those.
    pub evicted_blocks: u64,
    /// Entries dropped because their rows or element type were not what was asked for.
    pub mismatches: u64,
    /// Entries dropped because their namespace was flushed.
    pub flushed: u64,
    /// Saves that became ready.
    pub saves_completed: u64,
    /// Saves that were dropped: failed, withdrawn or never claimed.
    pub saves_dropped: u64,
    /// Loads that ended.
    pub loads_completed: u64,
    /// Entries dropped because their bytes did not fit their checksum.
    pub corrupted: u64,
}

impl Tally {
    /// Whether there is nothing to count.
    #[inline]
    pub fn is_empty(&self) -> bool {
        let Self { evictions, evicted_blocks, mismatches, flushed, .. } = *self;
        let Self { saves_completed, saves_dropped, loads_completed, corrupted, .. } = *self;
        let entries = evictions | evicted_blocks | mismatches | flushed;
        entries | saves_completed | saves_dropped | loads_completed | corrupted == 0
    }
}

/// A view of an index, valid while its guard is held.
pub struct Index<'a> {
    layout: &'a IndexLayout,
    root: &'a mut Root,
    bins: &'a mut Bins,
    namespaces: &'a mut [NamespaceRow],
    clients: &'a mut [ClientRecord],
    buckets: &'a mut [u32],
    slots: &'a mut [Slot],
    holds: &'a mut [Hold],
    details: &'a mut [Details],
    blocks: &'a mut [Block],
    /// What operations did since the view was made.
    pub tally: Tally,
}

impl<'a> Index<'a> {
    /// The index that lies in `bytes`, which must be 64-byte aligned and at least `layout.total_len()` long.
    #[inline]
    pub fn view(layout: &'a IndexLayout, bytes: &'a mut [u8]) -> Checked<Self> {
        let mut rest = bytes;
        let [fixed] = take::<Fixed>(&mut rest, 1)? else { return Err(Damaged(&"no room for the root")) };
        let buckets = take(&mut rest, layout.num_buckets)?;
        let slots = take(&mut rest, layout.num_slots)?;
        let holds = take(&mut rest, layout.num_holds)?;
        let details = take(&mut rest, layout.num_slots)?;
        let blocks = take(&mut rest, layout.num_blocks)?;
        let Fixed { root, bins, namespaces, clients } = fixed;
        let tally = Tally::default();
        Ok(Self { layout, root, bins, namespaces, clients, buckets, slots, holds, details, blocks, tally })
    }

    /// Whether a first holder has made the derived half.
    pub fn is_initialised(&self) -> bool {
        self.root.initialised == INITIALISED
    }

    /// The layout that this view was made with.
    pub fn layout(&self) -> &IndexLayout {
        self.layout
    }
}

#[inline(always)]
fn take<'a, T: FromBytes + IntoBytes + KnownLayout>(rest: &mut &'a mut [u8], count: u32) -> Checked<&'a mut [T]> {
    let len = size_of::<T>() * count as usize;
    let (bytes, tail) =
        std::mem::take(rest).split_at_mut_checked(padded::<T>(count)).ok_or(Damaged(&"the index is cut short"))?;
    *rest = tail;
    let records = bytes.get_mut(..len).and_then(|records| <[T]>::mut_from_bytes(records).ok());
    records.ok_or(Damaged(&"the index is not aligned"))
}

/// The record that a reference (number plus one; 0 is none) names.
fn deref(reference: u32, len: usize) -> Checked<Option<u32>> {
    match reference.checked_sub(1) {
        None => Ok(None),
        Some(number) if (number as usize) < len => Ok(Some(number)),
        Some(_) => Err(Damaged(&"a reference is out of range")),
    }
}

/// Adds one to a count that lies in a region.
fn increment(count: &mut u32) -> Checked<()> {
    *count = count.checked_add(1).ok_or(Damaged(&"a count overflows"))?;
    Ok(())
}

/// The reference to a record.
fn reference(number: Option<u32>) -> u32 {
    number.map_or(0, |n| n + 1)
}
