//! Every invariant of the index, checked from scratch: after each operation in tests, on demand in production.

use std::collections::{BTreeMap, HashMap};

use super::extents::Walk;
use super::records::{hold_kind, slot_state};
use super::{Checked, Index, deref};

/// How many findings are listed before the check stops.
const MOST_FINDINGS: usize = 32;

impl Index<'_> {
    /// What is wrong with the index, in words; empty when nothing is. Costs a walk over everything, and allocates.
    pub fn violations(&self) -> Vec<String> {
        let mut found = Vec::new();
        let checks = [Self::check_slots, Self::check_blocks, Self::check_holds, Self::check_queue, Self::check_sums];
        for check in checks {
            if let Err(damaged) = check(self, &mut found) {
                found.push(damaged.to_string());
            }
        }
        found.truncate(MOST_FINDINGS);
        found
    }

    fn live_slots(&self) -> impl Iterator<Item = (u32, u8)> {
        let all = (0..self.layout.num_slots).map(|slot| (slot, self.state_of(slot)));
        all.filter(|(_, state)| *state != slot_state::FREE)
    }

    fn check_slots(&self, found: &mut Vec<String>) -> Checked<()> {
        let mut by_digest = HashMap::new();
        for (slot, state) in self.live_slots() {
            self.slot_commit(slot)?;
            let findable = matches!(state, slot_state::WRITING | slot_state::READY);
            let reached = self.find_any_epoch(&self.slot(slot)?.digest)? == Some(slot);
            if findable != reached {
                found.push(format!("slot {slot} in state {state} is found by key: {reached}"));
            }
            if findable && by_digest.insert(self.slot(slot)?.digest, slot).is_some() {
                found.push(format!("slot {slot} has the key of another findable entry"));
            }
            let saves = self.count_holds(slot, hold_kind::SAVE)?;
            let expected = match state {
                slot_state::WRITING | slot_state::ORPHANED => 1..=1,
                slot_state::READY => 0..=0,
                _ => 0..=1,
            };
            if !expected.contains(&saves) {
                found.push(format!("slot {slot} in state {state} has {saves} save holds"));
            }
            let links = self.links(slot)?;
            if state == slot_state::DOOMED && links.leases == 0 && links.firm_holds == 0 {
                found.push(format!("slot {slot} is doomed, and nothing holds it"));
            }
        }
        Ok(())
    }

    fn count_holds(&self, slot: u32, kind: u8) -> Checked<u32> {
        let count = std::cell::Cell::new(0);
        self.find_hold(slot, |_, commit| {
            count.set(count.get() + u32::from(commit.state == kind));
            false
        })?;
        Ok(count.get())
    }

    fn check_blocks(&self, found: &mut Vec<String>) -> Checked<()> {
        let mut owners = BTreeMap::new();
        for (slot, _) in self.live_slots() {
            let record = self.slot(slot)?;
            let mut walk = Walk::new(record.first_block, record.num_blocks);
            while let Some((first, len)) = walk.next(self.blocks, slot, self.slot_commit(slot)?.generation)? {
                if owners.insert(first, (len, format!("slot {slot}"))).is_some() {
                    found.push(format!("block {first} has two owners"));
                }
            }
        }
        for class in 0..self.bins.heads.len() {
            let mut next = self.bins.heads[class];
            let marked = self.bins.used[class / 64] & (1 << (class % 64)) != 0;
            if marked != (next != 0) {
                found.push(format!("class {class} is marked as used: {marked}, but its head is {next}"));
            }
            while let Some(first) = deref(next, self.blocks.len())? {
                let run = self.blocks[first as usize].run;
                if owners.insert(first, (run.len, "a free run".to_owned())).is_some() {
                    found.push(format!("block {first} is owned and free, or in two classes"));
                    break;
                }
                next = run.next;
            }
        }
        self.check_cover(&owners, found);
        Ok(())
    }

    /// Every block belongs to exactly one owner, no run crosses a segment, and free neighbours are joined.
    fn check_cover(&self, owners: &BTreeMap<u32, (u32, String)>, found: &mut Vec<String>) {
        let (mut expected, mut free_before) = (0, false);
        for (&first, (len, owner)) in owners {
            if first != expected {
                found.push(format!("blocks {expected}..{first} belong to nobody, or overlap {owner}"));
            }
            let per_segment = self.layout.blocks_per_segment;
            let end = first.saturating_add(*len);
            if *len == 0 || first / per_segment != (end - 1) / per_segment {
                found.push(format!("{owner} has a run of {len} blocks at {first}"));
            }
            let free = owner == "a free run";
            if free && free_before && !first.is_multiple_of(per_segment) {
                found.push(format!("the free run at {first} is not joined with the one before it"));
            }
            (expected, free_before) = (end, free);
        }
        if expected != self.layout.num_blocks {
            found.push(format!("the last block with an owner is {expected} of {}", self.layout.num_blocks));
        }
    }

    fn check_holds(&self, found: &mut Vec<String>) -> Checked<()> {
        let mut counts: HashMap<u32, (u32, u32)> = HashMap::new();
        let mut used = 0;
        for number in 0..self.layout.num_holds {
            let commit = self.hold_commit(number)?;
            if commit.state == hold_kind::FREE {
                continue;
            }
            used += 1;
            let hold = self.hold(number)?;
            if self.slot_of_generation(hold.slot, hold.slot_generation)?.is_none() {
                found.push(format!("hold {number} means a slot that is gone"));
            }
            if self.client_state(hold.owner)?.is_none() {
                found.push(format!("hold {number} has no owner"));
            }
            let count = counts.entry(hold.slot).or_default();
            if commit.state == hold_kind::LEASE { count.0 += 1 } else { count.1 += 1 }
        }
        if used != self.root.holds_used {
            found.push(format!("{used} holds are in use, {} are counted", self.root.holds_used));
        }
        for slot in 0..self.layout.num_slots {
            let links = self.links(slot)?;
            let (leases, firm) = counts.get(&slot).copied().unwrap_or_default();
            if (links.leases, links.firm_holds) != (leases, firm) {
                found.push(format!("slot {slot} has {leases} leases and {firm} firm holds, but counts differ"));
            }
        }
        Ok(())
    }

    fn check_queue(&self, found: &mut Vec<String>) -> Checked<()> {
        let (mut next, mut before, mut seen) = (self.root.queue_head, 0, 0u32);
        let mut last_sequence = 0;
        while let Some(slot) = deref(next, self.slots.len())? {
            let links = self.links(slot)?;
            let fits = self.state_of(slot) == slot_state::READY && links.firm_holds == 0 && links.queued == 1;
            if !fits || links.queue_prev != before {
                found.push(format!("slot {slot} should not be in the queue, or is chained wrongly"));
            }
            if self.slot(slot)?.sequence < last_sequence {
                found.push(format!("slot {slot} is out of order in the queue"));
            }
            last_sequence = self.slot(slot)?.sequence;
            (before, next, seen) = (slot + 1, links.queue_next, seen + 1);
            if seen > self.layout.num_slots {
                found.push("the queue is a ring".to_owned());
                break;
            }
        }
        let is_queued = |slot: u32| self.links(slot).is_ok_and(|l| l.firm_holds == 0);
        let expected = self.live_slots().filter(|(slot, state)| *state == slot_state::READY && is_queued(*slot));
        let expected = expected.count() as u32;
        if expected != seen || before != self.root.queue_tail {
            found.push(format!("{expected} entries should be in the queue, {seen} are"));
        }
        Ok(())
    }

    fn check_sums(&self, found: &mut Vec<String>) -> Checked<()> {
        let free: u64 = self.blocks.iter().map(|block| u64::from(block.run.len)).sum();
        if free != u64::from(self.root.free_blocks) {
            found.push(format!("{free} blocks are free, {} are counted", self.root.free_blocks));
        }
        let (mut blocks, mut entries, mut used) = (0u64, 0, 0);
        let doomed = self.live_slots().filter(|(_, state)| *state == slot_state::DOOMED).count();
        if doomed != self.root.doomed as usize {
            found.push(format!("{doomed} entries are doomed, {} are counted", self.root.doomed));
        }
        let mut by_namespace: HashMap<u32, (u64, u64)> = HashMap::new();
        for (slot, state) in self.live_slots() {
            let (links, num_blocks) = (self.links(slot)?, self.slot(slot)?.num_blocks);
            used += 1;
            let sums = by_namespace.entry(u32::from(self.slot(slot)?.namespace)).or_default();
            (sums.0, sums.1) = (sums.0 + u64::from(num_blocks), sums.1 + 1);
            if state == slot_state::READY && links.leases == 0 && links.firm_holds == 0 {
                (blocks, entries) = (blocks + u64::from(num_blocks), entries + 1);
            }
        }
        let root = &self.root;
        let counted = (u64::from(root.evictable_blocks), root.evictable_entries, root.slots_used);
        if (blocks, entries, used) != counted {
            found.push(format!(
                "{blocks} blocks of {entries} entries can be evicted and {used} slots are used, but {counted:?} are counted"
            ));
        }
        for (row, record) in self.namespaces.iter().enumerate() {
            let sums = by_namespace.get(&(row as u32)).copied().unwrap_or_default();
            if sums != (record.blocks_used, record.entries) {
                found.push(format!("namespace {row} has {sums:?} blocks and entries, but counts differ"));
            }
        }
        Ok(())
    }
}
