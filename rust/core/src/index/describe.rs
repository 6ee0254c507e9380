//! What the index tells others about its entries and itself.

use super::entries::EntryHandle;
use super::extents::Walk;
use super::records::{MAX_DIMS, Slot, slot_state};
use super::transfers::TransferId;
use super::{Checked, Damaged, Index, deref};

/// Extents as `(first_block, num_blocks)`, in the order in which an item fills them.
#[derive(Debug, Clone, Default)]
pub struct ExtentList(Extents);

/// Nearly every entry has one; a list of several is worth an allocation, a copy of room for several is not.
#[derive(Debug, Clone, Default)]
enum Extents {
    #[default]
    None,
    One((u32, u32)),
    Several(Vec<(u32, u32)>),
}

impl ExtentList {
    fn push(&mut self, extent: (u32, u32)) {
        match &mut self.0 {
            Extents::None => self.0 = Extents::One(extent),
            Extents::One(first) => self.0 = Extents::Several(vec![*first, extent]),
            Extents::Several(extents) => extents.push(extent),
        }
    }

    /// The extents.
    pub fn as_slice(&self) -> &[(u32, u32)] {
        match &self.0 {
            Extents::None => &[],
            Extents::One(extent) => std::slice::from_ref(extent),
            Extents::Several(extents) => extents,
        }
    }
}

impl PartialEq for ExtentList {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

/// One entry, as far as one needs to know it who fills it or looks where it lies.
#[derive(Debug, Clone, PartialEq)]
pub struct EntryPlace {
    /// Which entry it is.
    pub handle: EntryHandle,
    /// The save under which it was made; 0 where it was only looked for.
    pub id: TransferId,
    /// Where its bytes lie.
    pub extents: ExtentList,
    /// Blocks of it.
    pub num_blocks: u32,
}

/// One entry.
#[derive(Debug, Clone, PartialEq)]
pub struct EntryInfo {
    /// Which entry it is.
    pub handle: EntryHandle,
    /// The lease or transfer under which it was asked for; 0 where there is none.
    pub id: TransferId,
    /// Where its bytes lie.
    pub extents: ExtentList,
    /// Blocks of it.
    pub num_blocks: u32,
    /// Bytes of the item; 0 until a save was claimed.
    pub nbytes: u64,
    /// Sizes; the first `ndim` count.
    pub shape: [u64; MAX_DIMS],
    /// How many dimensions it has.
    pub ndim: u8,
    /// The code of its element type; 0 until a save was claimed.
    pub dtype: u8,
    /// The checksum that its bytes must be compared with before they are used, if that has not been done since the pool was
    /// last without clients.
    pub unverified: Option<u64>,
}

/// Sums over the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexStats {
    /// Blocks of data.
    pub num_blocks: u32,
    /// Blocks that no entry owns.
    pub free_blocks: u32,
    /// Blocks of entries that can be evicted.
    pub evictable_blocks: u32,
    /// Entries that can be evicted.
    pub evictable_entries: u32,
    /// Entries at the most.
    pub num_slots: u32,
    /// Entries in any state.
    pub entries: u32,
    /// Entries being written.
    pub writing: u32,
    /// Entries that can be loaded.
    pub ready: u32,
    /// Entries that are only kept by holds.
    pub doomed: u32,
    /// Unfinished entries of dead owners.
    pub orphaned: u32,
    /// Holds at the most.
    pub num_holds: u32,
    /// Holds in use.
    pub holds: u32,
}

impl Index<'_> {
    /// Which entry is in this slot, and where.
    pub(super) fn entry_place(&self, slot: u32, id: TransferId) -> Checked<EntryPlace> {
        let generation = self.slot_commit(slot)?.generation;
        let num_blocks = self.slot(slot)?.num_blocks;
        let extents = self.extents_of(slot, generation)?;
        Ok(EntryPlace { handle: EntryHandle { slot, generation }, id, extents, num_blocks })
    }

    fn extents_of(&self, slot: u32, generation: u32) -> Checked<ExtentList> {
        let Slot { first_block, num_blocks, in_one_run, .. } = *self.slot(slot)?;
        if in_one_run == 1 {
            // All of it is known here: the block's own record would be one more fetch from memory.
            return self.one_run(first_block, num_blocks);
        }
        let mut extents = ExtentList::default();
        let mut walk = Walk::new(first_block, num_blocks);
        while let Some(extent) = walk.next(self.blocks, slot, generation)? {
            extents.push(extent);
        }
        Ok(extents)
    }

    fn one_run(&self, reference: u32, num_blocks: u32) -> Checked<ExtentList> {
        match deref(reference, self.blocks.len())? {
            Some(first) if num_blocks > 0 && num_blocks as usize <= self.blocks.len() - first as usize => {
                Ok(ExtentList(Extents::One((first, num_blocks))))
            }
            _ => Err(Damaged(&"an extent is out of range")),
        }
    }

    /// Describes the entry in this slot.
    pub(super) fn entry_info(&self, slot: u32, id: TransferId) -> Checked<EntryInfo> {
        let EntryPlace { handle, id, extents, num_blocks } = self.entry_place(slot, id)?;
        let record = self.slot(slot)?;
        let ndim = record.ndim.min(MAX_DIMS as u8);
        let mut shape = [0; MAX_DIMS];
        if ndim > 0 {
            let known = usize::from(ndim);
            shape[..known].copy_from_slice(&self.details(slot)?.shape[..known]);
        }
        let unverified = record.has_checksum != 0 && record.verified_in != self.root.incarnation;
        Ok(EntryInfo {
            handle,
            id,
            extents,
            num_blocks,
            nbytes: record.nbytes,
            shape,
            ndim,
            dtype: record.dtype,
            unverified: unverified.then_some(record.checksum),
        })
    }

    /// Sums over the index. Those by state take a walk over all slots ever used.
    pub fn stats(&self) -> IndexStats {
        let touched = self.root.slots_touched.min(self.layout.num_slots);
        let count = |state| (0..touched).filter(|slot| self.state_of(*slot) == state).count() as u32;
        IndexStats {
            num_blocks: self.layout.num_blocks,
            free_blocks: self.root.free_blocks,
            evictable_blocks: self.root.evictable_blocks,
            evictable_entries: self.root.evictable_entries,
            num_slots: self.layout.num_slots,
            entries: self.root.slots_used,
            writing: count(slot_state::WRITING),
            ready: count(slot_state::READY),
            doomed: count(slot_state::DOOMED),
            orphaned: count(slot_state::ORPHANED),
            num_holds: self.layout.num_holds,
            holds: self.root.holds_used,
        }
    }
}
