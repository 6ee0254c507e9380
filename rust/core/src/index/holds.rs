//! Holds: the records that keep an entry where it is.
//!
//! A hold's id is its generation and number: an id that ended is never met again, so late and repeated words about it
//! change nothing. Holding an entry keeps its blocks its own; it does not make their bytes consistent.

use super::commit::{Commit, Table};
use super::records::{ClientRef, Hold, Links, hold_kind, slot_state};
use super::{Checked, Damaged, Index, deref, increment, reference};

/// The number of a hold and the generation in which it is meant, in one word that is never 0.
pub(super) fn hold_id(number: u32, generation: u32) -> u64 {
    (u64::from(generation) << 32) | u64::from(number)
}

impl Index<'_> {
    /// Takes a hold record, if one is free.
    pub(super) fn take_hold(&mut self) -> Checked<Option<u32>> {
        let hold = match deref(self.root.free_hold, self.holds.len())? {
            Some(hold) => {
                self.root.free_hold = std::mem::take(&mut self.hold_mut(hold)?.next_in_slot);
                hold
            }
            None if (self.root.holds_touched as usize) < self.holds.len() => {
                self.root.holds_touched += 1;
                self.root.holds_touched - 1
            }
            None => return Ok(None),
        };
        increment(&mut self.root.holds_used)?;
        Ok(Some(hold))
    }

    pub(super) fn has_free_hold(&self) -> bool {
        (self.root.holds_used as usize) < self.holds.len()
    }

    pub(super) fn give_hold(&mut self, hold: u32) -> Checked<()> {
        let next = self.root.free_hold;
        let record = self.hold_mut(hold)?;
        (record.next_in_slot, record.prev_in_slot) = (next, 0);
        self.root.free_hold = hold + 1;
        self.root.holds_used = self.root.holds_used.checked_sub(1).ok_or(Damaged(&"too few holds in use"))?;
        Ok(())
    }

    /// Commits a hold of `kind` on the slot and returns its id.
    pub(super) fn commit_hold(
        &mut self,
        hold: u32,
        kind: u8,
        (slot, slot_generation): (u32, u32),
        owner: ClientRef,
        participants: u64,
    ) -> Checked<u64> {
        let record = self.hold_mut(hold)?;
        let old = record.commit.load_or_free(Table::Holds.record(hold));
        (record.slot, record.slot_generation, record.owner) = (slot, slot_generation, owner);
        (record.participants, record.claimed, record.completed) = (participants, 0, 0);
        (record.pins, record.failed) = (u32::from(kind == hold_kind::PIN), 0);
        let commit = old.next_generation(kind);
        record.commit.raise(Table::Holds.record(hold), commit);
        self.link_hold(hold, kind)?;
        Ok(hold_id(hold, commit.generation))
    }

    /// Chains a committed hold to its slot and counts it there.
    pub(super) fn link_hold(&mut self, hold: u32, kind: u8) -> Checked<()> {
        let slot = self.hold(hold)?.slot;
        let head = self.links(slot)?.hold_head;
        if let Some(head) = deref(head, self.holds.len())? {
            self.hold_mut(head)?.prev_in_slot = hold + 1;
        }
        let record = self.hold_mut(hold)?;
        (record.next_in_slot, record.prev_in_slot) = (head, 0);
        let links = self.links_mut(slot)?;
        links.hold_head = hold + 1;
        increment(if kind == hold_kind::LEASE { &mut links.leases } else { &mut links.firm_holds })
    }

    /// Ends a hold. What its end means for the entry is the caller's to say.
    pub(super) fn end_hold(&mut self, hold: u32) -> Checked<u32> {
        let commit = self.hold_commit(hold)?;
        let record = self.hold(hold)?;
        let (slot, next, prev) = (record.slot, record.next_in_slot, record.prev_in_slot);
        record.commit.lower(Table::Holds.record(hold), commit.with_state(hold_kind::FREE));
        let (next, prev) = (deref(next, self.holds.len())?, deref(prev, self.holds.len())?);
        if let Some(next) = next {
            self.hold_mut(next)?.prev_in_slot = reference(prev);
        }
        match prev {
            Some(prev) => self.hold_mut(prev)?.next_in_slot = reference(next),
            None => self.links_mut(slot)?.hold_head = reference(next),
        }
        self.uncount_hold(slot, commit.state)?;
        self.give_hold(hold)?;
        Ok(slot)
    }

    pub(super) fn uncount_hold(&mut self, slot: u32, kind: u8) -> Checked<()> {
        let links = self.links_mut(slot)?;
        let count = if kind == hold_kind::LEASE { &mut links.leases } else { &mut links.firm_holds };
        *count = count.checked_sub(1).ok_or(Damaged(&"a slot's holds are miscounted"))?;
        Ok(())
    }

    /// After a firm hold ended: the entry joins the queue, or goes if it was only kept by that hold.
    pub(super) fn after_firm_hold(&mut self, slot: u32) -> Checked<()> {
        let Links { leases, firm_holds, .. } = *self.links(slot)?;
        if firm_holds > 0 {
            return Ok(());
        }
        let state = self.slot_commit(slot)?.state;
        if state == slot_state::READY {
            self.enqueue(slot)?;
        }
        if leases > 0 { Ok(()) } else { self.after_last_hold(slot, state) }
    }

    /// After a lease ended, or another hold whose end does not let the entry join the queue.
    pub(super) fn after_any_hold(&mut self, slot: u32) -> Checked<()> {
        let Links { leases, firm_holds, .. } = *self.links(slot)?;
        if leases > 0 || firm_holds > 0 {
            return Ok(());
        }
        let state = self.slot_commit(slot)?.state;
        self.after_last_hold(slot, state)
    }

    fn after_last_hold(&mut self, slot: u32, state: u8) -> Checked<()> {
        match state {
            slot_state::READY => self.count_evictable(slot, true),
            slot_state::DOOMED => self.free_entry(slot),
            _ => Ok(()),
        }
    }

    /// Before the first firm hold of a READY entry: it leaves the queue.
    pub(super) fn before_firm_hold(&mut self, slot: u32) -> Checked<()> {
        let links = *self.links(slot)?;
        if links.queued == 0 {
            return Ok(());
        }
        self.dequeue(slot)?;
        if links.leases == 0 {
            self.count_evictable(slot, false)?;
        }
        Ok(())
    }

    /// The hold that `id` means, if it has not ended.
    pub(super) fn hold_by_id(&self, id: u64) -> Checked<Option<(u32, Commit)>> {
        let (number, generation) = (id as u32, (id >> 32) as u32);
        if number as usize >= self.holds.len() {
            return Ok(None);
        }
        let commit = self.hold_commit(number)?;
        let live = commit.state != hold_kind::FREE && commit.generation == generation;
        Ok(live.then_some((number, commit)))
    }

    /// The holds of a slot that `wanted` accepts, first one.
    pub(super) fn find_hold(&self, slot: u32, wanted: impl Fn(&Hold, Commit) -> bool) -> Checked<Option<u32>> {
        let mut next = self.links(slot)?.hold_head;
        for _ in 0..=self.holds.len() {
            let Some(hold) = deref(next, self.holds.len())? else { return Ok(None) };
            let record = self.hold(hold)?;
            if wanted(record, self.hold_commit(hold)?) {
                return Ok(Some(hold));
            }
            next = record.next_in_slot;
        }
        Err(Damaged(&"the holds of a slot are a ring"))
    }

    pub(super) fn hold_commit(&self, hold: u32) -> Checked<Commit> {
        self.hold(hold)?.commit.load(Table::Holds.record(hold)).ok_or(Damaged(&"a hold's check bits do not fit"))
    }

    pub(super) fn hold(&self, hold: u32) -> Checked<&Hold> {
        self.holds.get(hold as usize).ok_or(Damaged(&"a hold is out of range"))
    }

    pub(super) fn hold_mut(&mut self, hold: u32) -> Checked<&mut Hold> {
        self.holds.get_mut(hold as usize).ok_or(Damaged(&"a hold is out of range"))
    }
}
