//! Making the derived half anew from the truth, whatever the truth looks like.
//!
//! Runs under the lock when its last holder died or panicked, or when an operation met a contradiction. It trusts
//! committed records only after checking each number; what does not fit is dropped, which costs cached items and never
//! hands out a wrong byte. A dead holder may have stopped between any two stores; see each pass for why that is safe.

use super::commit::{Commit, Table};
use super::extents::Walk;
use super::namespaces::NamespaceKey;
use super::records::{Bins, FreeRun, Links, NUM_BINS, client_state, hold_kind, namespace_state, slot_state};
use super::{Checked, Damaged, INITIALISED, Index, increment};

/// Chains that merge into each other, shortest first: enough for 2^32 entries.
const MERGE_LEVELS: usize = 32;

impl Index<'_> {
    /// Makes a fresh region's zero bytes an empty index. `seed` mixes the buckets.
    pub fn initialise(&mut self, seed: u64) -> Checked<()> {
        self.root.seed = seed;
        self.root.next_sequence = 1;
        self.link_all_free_runs()?;
        self.root.initialised = INITIALISED;
        Ok(())
    }

    /// Rebuilds everything derived. Afterwards every check of [`Self::violations`] holds.
    pub fn rebuild(&mut self, seed: u64) -> Checked<()> {
        self.clear_derived();
        self.root.seed = seed;
        self.repair_namespaces_and_clients()?;
        self.keep_sound_slots()?;
        self.drop_overlaps()?;
        self.keep_sound_holds()?;
        self.settle_slots()?;
        self.link_free_runs_from_gaps()?;
        self.link_queue()?;
        self.root.initialised = INITIALISED;
        Ok(())
    }

    fn clear_derived(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.links = Links::default());
        self.clear_runs();
        self.buckets.fill(0);
        *self.bins = Bins { used: [0; NUM_BINS / 64], reserved: [0; 4], heads: [0; NUM_BINS] };
        let root = &mut *self.root;
        (root.free_blocks, root.evictable_blocks, root.evictable_entries, root.doomed) = (0, 0, 0, 0);
        (root.queue_head, root.queue_tail) = (0, 0);
        (root.free_slot, root.slots_used) = (0, 0);
        (root.free_hold, root.holds_used) = (0, 0);
        root.next_sequence = 1;
        // What was never used need not be walked over, now or later.
        let touched = |last: Option<usize>| last.map_or(0, |last| last as u32 + 1);
        self.root.slots_touched = touched(self.slots.iter().rposition(|slot| !slot.commit.is_untouched()));
        self.root.holds_touched = touched(self.holds.iter().rposition(|hold| !hold.commit.is_untouched()));
    }

    fn clear_runs(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.run = FreeRun::default());
    }

    fn repair_namespaces_and_clients(&mut self) -> Checked<()> {
        for (number, row) in self.namespaces.iter_mut().enumerate() {
            let number = number as u32;
            (row.blocks_used, row.entries) = (0, 0);
            match row.commit.load(Table::Namespaces.record(number)) {
                Some(commit) if commit.state <= namespace_state::USED => {}
                _ => row.commit.lower(Table::Namespaces.record(number), freed(row.commit.raw_generation())),
            }
        }
        for (number, client) in self.clients.iter_mut().enumerate() {
            let number = number as u32;
            match client.commit.load(Table::Clients.record(number)) {
                Some(commit) if commit.state <= client_state::DYING => {}
                _ => client.commit.lower(Table::Clients.record(number), freed(client.commit.raw_generation())),
            }
        }
        Ok(())
    }

    /// Frees every slot whose own record or extents do not fit, and marks the blocks of the others.
    ///
    /// A slot is committed only after its extents were written, so an interrupted allocation left none committed.
    fn keep_sound_slots(&mut self) -> Checked<()> {
        for slot in 0..self.root.slots_touched {
            match self.slot(slot)?.load(slot) {
                Some(Commit { state: slot_state::FREE, .. }) => {}
                Some(commit) if self.is_sound(slot, commit) => self.mark_blocks(slot, commit)?,
                _ => self.free_unsound(slot)?,
            }
        }
        Ok(())
    }

    fn is_sound(&self, slot: u32, commit: Commit) -> bool {
        if commit.state > slot_state::ORPHANED {
            return false;
        }
        let Ok(record) = self.slot(slot) else { return false };
        let namespace = self.namespace_commit(u32::from(record.namespace));
        if !namespace.is_ok_and(|n| n.state == namespace_state::USED) {
            return false;
        }
        if commit.state == slot_state::READY && !self.is_described_soundly(slot).unwrap_or(false) {
            return false;
        }
        self.has_sound_extents(slot, commit).is_ok()
    }

    fn has_sound_extents(&self, slot: u32, commit: Commit) -> Checked<()> {
        let record = self.slot(slot)?;
        let mut walk = Walk::new(record.first_block, record.num_blocks);
        let mut runs = 0;
        while let Some((first, len)) = walk.next(self.blocks, slot, commit.generation)? {
            runs += 1;
            let per_segment = self.layout.blocks_per_segment;
            if first / per_segment != (first + len - 1) / per_segment {
                return Err(Damaged(&"an extent crosses a segment"));
            }
        }
        if (record.in_one_run == 1) != (runs == 1) {
            return Err(Damaged(&"a slot and its extents disagree"));
        }
        Ok(())
    }

    /// Marks each block with its owner, and both owners where a block has two.
    fn mark_blocks(&mut self, slot: u32, commit: Commit) -> Checked<()> {
        let record = self.slot(slot)?;
        let mut walk = Walk::new(record.first_block, record.num_blocks);
        while let Some((first, len)) = walk.next(self.blocks, slot, commit.generation)? {
            for block in first..first + len {
                let other = std::mem::replace(&mut self.blocks[block as usize].run.prev, slot + 1);
                if other != 0 {
                    self.links_mut(other - 1)?.scratch = 1;
                    self.links_mut(slot)?.scratch = 1;
                }
            }
        }
        Ok(())
    }

    /// Drops both owners of blocks that two entries claim: neither can be trusted.
    fn drop_overlaps(&mut self) -> Checked<()> {
        let overlapping = self.slots.iter().any(|slot| slot.links.scratch != 0);
        for slot in 0..self.root.slots_touched {
            if std::mem::take(&mut self.links_mut(slot)?.scratch) != 0 {
                self.free_unsound(slot)?;
            }
        }
        if overlapping {
            self.clear_runs();
            for slot in 0..self.root.slots_touched {
                let commit = self.slot_commit(slot)?;
                if commit.state != slot_state::FREE {
                    self.mark_blocks(slot, commit)?;
                }
            }
        }
        Ok(())
    }

    fn free_unsound(&mut self, slot: u32) -> Checked<()> {
        let record = self.slot(slot)?;
        record.lower(slot, freed(record.commit.raw_generation()));
        Ok(())
    }

    /// Frees every hold that means no live slot or no known owner, and chains the others to their slots.
    ///
    /// A hold is committed before the slot that it writes, so an interrupted allocation left at most a hold alone; it is
    /// ended after the slot became READY, so an interrupted completion left a SAVE hold on a READY slot.
    fn keep_sound_holds(&mut self) -> Checked<()> {
        for hold in (0..self.root.holds_touched).rev() {
            let kept = match self.hold(hold)?.commit.load(Table::Holds.record(hold)) {
                Some(commit) if commit.state != hold_kind::FREE => self.is_sound_hold(hold, commit)?.then_some(commit),
                Some(_) => None,
                None => {
                    let record = self.hold(hold)?;
                    record.commit.lower(Table::Holds.record(hold), freed(record.commit.raw_generation()));
                    None
                }
            };
            increment(&mut self.root.holds_used)?;
            match kept {
                Some(commit) => self.link_hold(hold, commit.state)?,
                None => self.free_unsound_hold(hold)?,
            }
        }
        Ok(())
    }

    fn is_sound_hold(&self, hold: u32, commit: Commit) -> Checked<bool> {
        let record = self.hold(hold)?;
        if commit.state > hold_kind::SAVE || record.slot as usize >= self.slots.len() {
            return Ok(false);
        }
        let slot = self.slot_commit(record.slot)?;
        let owner_known = self.client(record.owner.record).is_ok() && self.client_state(record.owner)?.is_some();
        if slot.generation != record.slot_generation || !owner_known {
            return Ok(false);
        }
        if commit.state != hold_kind::SAVE {
            return Ok(matches!(slot.state, slot_state::READY | slot_state::DOOMED));
        }
        let unfinished = matches!(slot.state, slot_state::WRITING | slot_state::DOOMED | slot_state::ORPHANED);
        let only_one = self.find_hold(record.slot, |_, other| other.state == hold_kind::SAVE)?.is_none();
        Ok(unfinished && only_one)
    }

    fn free_unsound_hold(&mut self, hold: u32) -> Checked<()> {
        let commit = self.hold_commit(hold)?;
        if commit.state != hold_kind::FREE {
            self.hold(hold)?.commit.lower(Table::Holds.record(hold), commit.with_state(hold_kind::FREE));
        }
        self.give_hold(hold)
    }

    /// Settles what each kept slot's state asks for, finds doubles, and counts.
    fn settle_slots(&mut self) -> Checked<()> {
        for slot in (0..self.root.slots_touched).rev() {
            let commit = self.slot_commit(slot)?;
            let settled = self.settled_state(slot, commit)?;
            if settled != commit.state {
                self.slot(slot)?.lower(slot, commit.with_state(settled));
            }
            increment(&mut self.root.slots_used)?;
            if settled == slot_state::FREE {
                self.unmark_blocks(slot, commit)?;
                self.give_slot(slot)?;
                continue;
            }
            self.count_in_namespace(slot, self.slot(slot)?.num_blocks, true)?;
            match settled {
                slot_state::WRITING | slot_state::READY => self.link_bucket(slot)?,
                slot_state::DOOMED => increment(&mut self.root.doomed)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn settled_state(&self, slot: u32, commit: Commit) -> Checked<u8> {
        let links = self.links(slot)?;
        let held = links.leases > 0 || links.firm_holds > 0;
        let gone = if held { slot_state::DOOMED } else { slot_state::FREE };
        Ok(match commit.state {
            slot_state::WRITING if !held => slot_state::FREE,
            slot_state::WRITING | slot_state::READY if self.is_stale_or_double(slot)? => gone,
            slot_state::DOOMED | slot_state::ORPHANED if !held => slot_state::FREE,
            state => state,
        })
    }

    fn is_stale_or_double(&self, slot: u32) -> Checked<bool> {
        let record = self.slot(slot)?;
        let row = u32::from(record.namespace);
        let namespace = NamespaceKey { row, epoch: self.namespace_row(row)?.epoch };
        Ok(record.epoch != namespace.epoch || self.find_any_epoch(&record.digest)?.is_some())
    }

    fn unmark_blocks(&mut self, slot: u32, commit: Commit) -> Checked<()> {
        if commit.state == slot_state::FREE {
            return Ok(());
        }
        let record = self.slot(slot)?;
        let mut walk = Walk::new(record.first_block, record.num_blocks);
        while let Some((first, len)) = walk.next(self.blocks, slot, commit.generation)? {
            for block in &mut self.blocks[first as usize..(first + len) as usize] {
                block.run = FreeRun::default();
            }
        }
        Ok(())
    }

    fn link_free_runs_from_gaps(&mut self) -> Checked<()> {
        let per_segment = self.layout.blocks_per_segment;
        let mut start = None;
        for block in 0..self.blocks.len() as u32 {
            let owned = std::mem::take(&mut self.blocks[block as usize].run.prev) != 0;
            if let Some(first) = start
                && (owned || block.is_multiple_of(per_segment))
            {
                self.link_run(first, block - first)?;
                start = None;
            }
            if !owned && start.is_none() {
                start = Some(block);
            }
        }
        match start {
            Some(first) => self.link_run(first, self.blocks.len() as u32 - first),
            None => Ok(()),
        }
    }

    fn link_all_free_runs(&mut self) -> Checked<()> {
        let (total, per_segment) = (self.layout.num_blocks, self.layout.blocks_per_segment);
        let mut first = 0;
        while first < total {
            let len = per_segment.min(total - first);
            self.link_run(first, len)?;
            first += len;
        }
        Ok(())
    }

    /// Queues every READY entry without a firm hold in the order in which they became evictable.
    fn link_queue(&mut self) -> Checked<()> {
        let mut chains = [0; MERGE_LEVELS];
        for slot in 0..self.root.slots_touched {
            let links = *self.links(slot)?;
            if self.state_of(slot) != slot_state::READY {
                continue;
            }
            self.root.next_sequence = self.root.next_sequence.max(self.slot(slot)?.sequence.saturating_add(1));
            if links.firm_holds == 0 {
                self.add_to_chains(&mut chains, slot)?;
            }
        }
        let mut sorted = 0;
        for chain in chains {
            sorted = self.merge_chains(sorted, chain)?;
        }
        self.queue_chain(sorted)
    }

    fn add_to_chains(&mut self, chains: &mut [u32; MERGE_LEVELS], slot: u32) -> Checked<()> {
        self.links_mut(slot)?.scratch = 0;
        let mut carry = slot + 1;
        for chain in chains.iter_mut() {
            let other = std::mem::take(chain);
            if other == 0 {
                *chain = carry;
                return Ok(());
            }
            carry = self.merge_chains(other, carry)?;
        }
        Err(Damaged(&"more slots than there can be"))
    }

    /// Merges two chains (through `scratch`) that are sorted by sequence into one.
    fn merge_chains(&mut self, mut a: u32, mut b: u32) -> Checked<u32> {
        let mut head = 0;
        let mut tail: Option<u32> = None;
        while a != 0 || b != 0 {
            let from_a = b == 0 || (a != 0 && self.slot(a - 1)?.sequence <= self.slot(b - 1)?.sequence);
            let chosen = if from_a { a - 1 } else { b - 1 };
            let next = std::mem::take(&mut self.links_mut(chosen)?.scratch);
            if from_a {
                a = next
            } else {
                b = next
            }
            match tail {
                Some(tail) => self.links_mut(tail)?.scratch = chosen + 1,
                None => head = chosen + 1,
            }
            tail = Some(chosen);
        }
        Ok(head)
    }

    fn queue_chain(&mut self, mut chain: u32) -> Checked<()> {
        self.set_queue(None, None);
        while let Some(slot) = chain.checked_sub(1) {
            chain = std::mem::take(&mut self.links_mut(slot)?.scratch);
            self.enqueue_in_place(slot)?;
            if self.links(slot)?.leases == 0 {
                self.count_evictable(slot, true)?;
            }
        }
        Ok(())
    }
}

/// A free commit of the generation after one that cannot be trusted.
fn freed(raw_generation: u32) -> Commit {
    Commit { state: 0, generation: raw_generation.wrapping_add(1).max(1) }
}
