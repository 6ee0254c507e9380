//! Extents: the runs of blocks that an entry owns, chained through the records at their first blocks.

use super::crash::crash_point;
use super::records::{Block, Extent};
use super::{Checked, Damaged, Index, deref};

impl Index<'_> {
    /// Takes `num_blocks` blocks for the slot, in one run where there is one and else from the longest runs.
    ///
    /// The caller has made sure that so many are free. Returns the reference to the first extent; the blocks
    /// count as the slot's once the slot itself is committed with it.
    pub(super) fn take_extents(&mut self, slot: u32, generation: u32, num_blocks: u32) -> Checked<u32> {
        if num_blocks == 0 {
            return Ok(0);
        }
        if let Some(first) = self.take_run(num_blocks)? {
            self.write_extent(slot, generation, first, num_blocks, 0)?;
            return Ok(first + 1);
        }
        let mut missing = num_blocks;
        let mut chain = 0;
        while missing > 0 {
            let Some((first, len)) = self.take_longest_run(missing)? else {
                return Err(Damaged(&"fewer blocks are free than were counted"));
            };
            self.write_extent(slot, generation, first, len, chain)?;
            chain = first + 1;
            missing -= len;
        }
        Ok(chain)
    }

    /// Gives the blocks of a chain back. The slot that owned it is no longer committed.
    pub(super) fn release_extents(&mut self, slot: u32, generation: u32, chain: u32, num_blocks: u32) -> Checked<()> {
        let mut walk = Walk::new(chain, num_blocks);
        while let Some((first, len)) = walk.next(self.blocks, slot, generation)? {
            self.release_run(first, len)?;
        }
        Ok(())
    }

    /// Whether a chain that was just written is a single extent.
    pub(super) fn is_one_run(&self, chain: u32, num_blocks: u32) -> Checked<bool> {
        let first = deref(chain, self.blocks.len())?;
        Ok(first.is_some_and(|first| self.blocks[first as usize].extent.len == num_blocks))
    }

    fn write_extent(&mut self, slot: u32, generation: u32, first: u32, len: u32, next: u32) -> Checked<()> {
        crash_point();
        let block = self.blocks.get_mut(first as usize).ok_or(Damaged(&"an extent is out of range"))?;
        block.extent = Extent { len, next, owner: slot + 1, owner_generation: generation };
        Ok(())
    }
}

/// A walk along a chain of extents, which ends after the entry's blocks at the latest.
pub(super) struct Walk {
    next: u32,
    missing: u32,
}

impl Walk {
    pub(super) fn new(chain: u32, num_blocks: u32) -> Self {
        Self { next: chain, missing: num_blocks }
    }

    /// The next extent as `(first_block, num_blocks)`; damage where the chain is not wholly the slot's.
    pub(super) fn next(&mut self, blocks: &[Block], slot: u32, generation: u32) -> Checked<Option<(u32, u32)>> {
        let Some(first) = deref(self.next, blocks.len())? else {
            return if self.missing == 0 { Ok(None) } else { Err(Damaged(&"a chain of extents is too short")) };
        };
        let extent = blocks[first as usize].extent;
        if extent.owner != slot + 1 || extent.owner_generation != generation {
            return Err(Damaged(&"an extent belongs to another entry"));
        }
        if extent.len == 0 || extent.len as usize > blocks.len() - first as usize {
            return Err(Damaged(&"an extent is out of range"));
        }
        self.missing = self.missing.checked_sub(extent.len).ok_or(Damaged(&"a chain of extents is too long"))?;
        self.next = extent.next;
        Ok(Some((first, extent.len)))
    }
}
