//! Slots: finding an entry by its digest, taking a slot, dropping an entry, making room.

use super::commit::Commit;
use super::crash::crash_point;
use super::namespaces::NamespaceKey;
use super::records::{Details, KEY_PREFIX_LEN, Links, Slot, slot_state};
use super::transfers::SaveRequest;
use super::{Checked, Damaged, Index, deref, increment, reference};
use crate::policy::fifo::Queue;

impl Index<'_> {
    /// The slot of the WRITING or READY entry with this digest.
    ///
    /// An entry from before its namespace's flush is dropped on sight and not found.
    pub(super) fn find(&mut self, digest: &[u64; 4], namespace: &NamespaceKey) -> Checked<Option<u32>> {
        let Some(slot) = self.find_any_epoch(digest)? else { return Ok(None) };
        if self.slot(slot)?.epoch == namespace.epoch {
            return Ok(Some(slot));
        }
        self.tally.flushed += 1;
        self.drop_entry(slot)?;
        Ok(None)
    }

    pub(super) fn find_any_epoch(&self, digest: &[u64; 4]) -> Checked<Option<u32>> {
        let mut next = self.buckets[self.bucket_of(digest)];
        for _ in 0..=self.slots.len() {
            let Some(slot) = deref(next, self.slots.len())? else { return Ok(None) };
            if self.slot(slot)?.digest == *digest {
                return Ok(Some(slot));
            }
            next = self.links(slot)?.bucket_next;
        }
        Err(Damaged(&"a bucket is a ring"))
    }

    pub(super) fn link_bucket(&mut self, slot: u32) -> Checked<()> {
        let bucket = self.bucket_of(&self.slot(slot)?.digest);
        self.links_mut(slot)?.bucket_next = self.buckets[bucket];
        self.buckets[bucket] = slot + 1;
        Ok(())
    }

    fn unlink_bucket(&mut self, slot: u32) -> Checked<()> {
        let bucket = self.bucket_of(&self.slot(slot)?.digest);
        let after = std::mem::take(&mut self.links_mut(slot)?.bucket_next);
        if self.buckets[bucket] == slot + 1 {
            self.buckets[bucket] = after;
            return Ok(());
        }
        let mut next = self.buckets[bucket];
        for _ in 0..=self.slots.len() {
            let Some(other) = deref(next, self.slots.len())? else { break };
            let links = self.links_mut(other)?;
            if links.bucket_next == slot + 1 {
                links.bucket_next = after;
                return Ok(());
            }
            next = links.bucket_next;
        }
        Err(Damaged(&"an entry is missing from its bucket"))
    }

    /// The digest mixed with the region's random seed, so that nobody can aim keys at one bucket.
    fn bucket_of(&self, digest: &[u64; 4]) -> usize {
        let mixed = (digest[0] ^ self.root.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let bucket = (mixed >> 32) as u32 & (self.layout.num_buckets - 1);
        bucket as usize
    }

    /// Takes a free slot, without committing anything to it.
    pub(super) fn take_slot(&mut self) -> Checked<Option<u32>> {
        let slot = match deref(self.root.free_slot, self.slots.len())? {
            Some(slot) => {
                self.root.free_slot = std::mem::take(&mut self.links_mut(slot)?.queue_next);
                slot
            }
            None if (self.root.slots_touched as usize) < self.slots.len() => {
                self.root.slots_touched += 1;
                self.root.slots_touched - 1
            }
            None => return Ok(None),
        };
        increment(&mut self.root.slots_used)?;
        Ok(Some(slot))
    }

    pub(super) fn give_slot(&mut self, slot: u32) -> Checked<()> {
        let next = self.root.free_slot;
        *self.links_mut(slot)? = Links { queue_next: next, ..Links::default() };
        self.root.free_slot = slot + 1;
        self.root.slots_used = self.root.slots_used.checked_sub(1).ok_or(Damaged(&"too few slots in use"))?;
        Ok(())
    }

    /// Takes the entry out of sight: free at once if nothing holds it, else DOOMED until the last hold ends.
    pub(super) fn drop_entry(&mut self, slot: u32) -> Checked<()> {
        let commit = self.slot_commit(slot)?;
        let links = *self.links(slot)?;
        if links.leases == 0 && links.firm_holds == 0 {
            return self.free_entry(slot);
        }
        match commit.state {
            slot_state::WRITING | slot_state::READY => {}
            _ => return Ok(()),
        }
        self.slot(slot)?.lower(slot, commit.with_state(slot_state::DOOMED));
        increment(&mut self.root.doomed)?;
        self.unlink_bucket(slot)?;
        if links.queued != 0 {
            self.dequeue(slot)?;
        }
        Ok(())
    }

    /// Takes a WRITING entry whose owner is gone out of sight; its blocks stay its own.
    pub(super) fn orphan_entry(&mut self, slot: u32) -> Checked<()> {
        let commit = self.slot_commit(slot)?;
        match commit.state {
            slot_state::WRITING => self.unlink_bucket(slot)?,
            slot_state::DOOMED => self.uncount_doomed()?,
            _ => return Err(Damaged(&"only an unfinished entry can be orphaned")),
        }
        self.slot(slot)?.lower(slot, commit.with_state(slot_state::ORPHANED));
        Ok(())
    }

    fn uncount_doomed(&mut self) -> Checked<()> {
        self.root.doomed = self.root.doomed.checked_sub(1).ok_or(Damaged(&"the doomed are miscounted"))?;
        Ok(())
    }

    /// Frees an entry that nothing holds, in any state.
    pub(super) fn free_entry(&mut self, slot: u32) -> Checked<()> {
        let commit = self.slot_commit(slot)?;
        let links = *self.links(slot)?;
        if links.leases != 0 || links.firm_holds != 0 {
            return Err(Damaged(&"a held entry was to be freed"));
        }
        let Slot { first_block, num_blocks, .. } = *self.slot(slot)?;
        self.slot(slot)?.lower(slot, commit.with_state(slot_state::FREE));
        match commit.state {
            slot_state::READY => {
                self.unlink_bucket(slot)?;
                self.dequeue(slot)?;
                self.count_evictable(slot, false)?;
            }
            slot_state::WRITING => self.unlink_bucket(slot)?,
            slot_state::DOOMED => self.uncount_doomed()?,
            slot_state::FREE => return Err(Damaged(&"a free entry was to be freed")),
            _ => {}
        }
        self.count_in_namespace(slot, num_blocks, false)?;
        self.release_extents(slot, commit.generation, first_block, num_blocks)?;
        self.give_slot(slot)
    }

    /// Evicts until a slot and `num_blocks` blocks are free; false, and nothing evicted, where that cannot be.
    pub(super) fn make_room(&mut self, num_blocks: u32) -> Checked<bool> {
        let reachable = u64::from(self.root.free_blocks) + u64::from(self.root.evictable_blocks);
        if reachable < u64::from(num_blocks) {
            return Ok(false);
        }
        if !self.has_free_slot() && self.root.evictable_entries == 0 {
            return Ok(false);
        }
        while self.root.free_blocks < num_blocks || !self.has_free_slot() {
            let Some(victim) = self.queue().oldest(self.slots)? else {
                return Err(Damaged(&"fewer entries can be evicted than were counted"));
            };
            self.tally.evictions += 1;
            self.tally.evicted_blocks += u64::from(self.slot(victim)?.num_blocks);
            self.free_entry(victim)?;
        }
        Ok(true)
    }

    fn has_free_slot(&self) -> bool {
        (self.root.slots_used as usize) < self.slots.len()
    }

    fn queue(&self) -> Queue {
        Queue { head: self.root.queue_head, tail: self.root.queue_tail }
    }

    /// The entry became READY, or its last pin, load or save ended: it joins the queue's end.
    pub(super) fn enqueue(&mut self, slot: u32) -> Checked<()> {
        let sequence = self.root.next_sequence;
        self.root.next_sequence = sequence.wrapping_add(1);
        self.slot_mut(slot)?.sequence = sequence;
        self.enqueue_in_place(slot)
    }

    pub(super) fn enqueue_in_place(&mut self, slot: u32) -> Checked<()> {
        let mut queue = self.queue();
        queue.push(self.slots, slot)?;
        (self.root.queue_head, self.root.queue_tail) = (queue.head, queue.tail);
        Ok(())
    }

    pub(super) fn dequeue(&mut self, slot: u32) -> Checked<()> {
        let mut queue = self.queue();
        queue.remove(self.slots, slot)?;
        (self.root.queue_head, self.root.queue_tail) = (queue.head, queue.tail);
        Ok(())
    }

    /// Counts the entry among those that can be evicted, or no longer.
    pub(super) fn count_evictable(&mut self, slot: u32, evictable: bool) -> Checked<()> {
        let blocks = self.slot(slot)?.num_blocks;
        let root = &mut *self.root;
        let (sum, entries) = if evictable {
            (root.evictable_blocks.checked_add(blocks), root.evictable_entries.checked_add(1))
        } else {
            (root.evictable_blocks.checked_sub(blocks), root.evictable_entries.checked_sub(1))
        };
        let damage = Damaged(&"the sum of what can be evicted is wrong");
        (root.evictable_blocks, root.evictable_entries) = (sum.ok_or(damage)?, entries.ok_or(damage)?);
        Ok(())
    }

    pub(super) fn count_in_namespace(&mut self, slot: u32, num_blocks: u32, added: bool) -> Checked<()> {
        let row = u32::from(self.slot(slot)?.namespace);
        let row = self.namespaces.get_mut(row as usize).ok_or(Damaged(&"a namespace is out of range"))?;
        let damage = Damaged(&"a namespace's sums are wrong");
        let blocks = u64::from(num_blocks);
        let (sum, entries) = if added {
            (row.blocks_used.checked_add(blocks), row.entries.checked_add(1))
        } else {
            (row.blocks_used.checked_sub(blocks), row.entries.checked_sub(1))
        };
        (row.blocks_used, row.entries) = (sum.ok_or(damage)?, entries.ok_or(damage)?);
        Ok(())
    }

    /// Fills and commits a slot as a WRITING entry. Its SAVE hold exists already.
    pub(super) fn commit_writing(
        &mut self,
        slot: u32,
        commit: Commit,
        (first_block, num_blocks): (u32, u32),
        request: &SaveRequest<'_>,
        namespace: &NamespaceKey,
    ) -> Checked<()> {
        let row = u16::try_from(namespace.row).map_err(|_| Damaged(&"a namespace is out of range"))?;
        let in_one_run = self.is_one_run(first_block, num_blocks)?;
        crash_point();
        self.details_mut(slot)?.introduce(request);
        crash_point();
        let record = self.slot_mut(slot)?;
        (record.digest, record.epoch, record.sequence) = (request.digest, namespace.epoch, 0);
        (record.first_block, record.num_blocks) = (first_block, num_blocks);
        (record.namespace, record.modality) = (row, request.modality);
        record.in_one_run = u16::from(in_one_run);
        // Without dimensions none of the sizes that an earlier entry left count.
        (record.nbytes, record.dtype, record.ndim) = (0, 0, 0);
        (record.checksum, record.has_checksum, record.verified_in) = (0, 0, 0);
        record.raise(slot, commit);
        self.link_bucket(slot)?;
        self.count_in_namespace(slot, num_blocks, true)
    }

    pub(super) fn slot_commit(&self, slot: u32) -> Checked<Commit> {
        self.slot(slot)?.load(slot).ok_or(Damaged(&"a slot's check bits do not fit"))
    }

    /// The commit of the slot where the generation is still the one meant.
    pub(super) fn slot_of_generation(&self, slot: u32, generation: u32) -> Checked<Option<Commit>> {
        let commit = self.slot_commit(slot)?;
        Ok((commit.generation == generation && commit.state != slot_state::FREE).then_some(commit))
    }

    pub(super) fn slot(&self, slot: u32) -> Checked<&Slot> {
        self.slots.get(slot as usize).ok_or(Damaged(&"a slot is out of range"))
    }

    pub(super) fn slot_mut(&mut self, slot: u32) -> Checked<&mut Slot> {
        self.slots.get_mut(slot as usize).ok_or(Damaged(&"a slot is out of range"))
    }

    pub(super) fn details(&self, slot: u32) -> Checked<&Details> {
        self.details.get(slot as usize).ok_or(Damaged(&"a slot is out of range"))
    }

    pub(super) fn details_mut(&mut self, slot: u32) -> Checked<&mut Details> {
        self.details.get_mut(slot as usize).ok_or(Damaged(&"a slot is out of range"))
    }

    pub(super) fn links(&self, slot: u32) -> Checked<&Links> {
        self.slot(slot).map(|slot| &slot.links)
    }

    pub(super) fn links_mut(&mut self, slot: u32) -> Checked<&mut Links> {
        self.slot_mut(slot).map(|slot| &mut slot.links)
    }

    pub(super) fn set_queue(&mut self, head: Option<u32>, tail: Option<u32>) {
        (self.root.queue_head, self.root.queue_tail) = (reference(head), reference(tail));
    }
}

impl Details {
    /// Says whose entry it is, and of which key.
    fn introduce(&mut self, request: &SaveRequest<'_>) {
        self.owner = request.owner;
        self.key_len = u32::try_from(request.key.len()).unwrap_or(u32::MAX);
        let kept = request.key.floor_char_boundary(KEY_PREFIX_LEN);
        let (prefix, rest) = self.key_prefix.split_at_mut(kept);
        prefix.copy_from_slice(&request.key.as_bytes()[..kept]);
        rest.fill(0);
    }
}
