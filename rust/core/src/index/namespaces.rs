//! Namespaces: whose keys are whose, and what a flush makes unfindable.

use super::commit::Table;
use super::records::{LABEL_LEN, LEARNED_ROWS, LearnedRow, NamespaceRow, namespace_state, slot_state};
use super::{Checked, Damaged, Index};
use crate::geometry::MAX_NAMESPACES;

/// A namespace's row and the generation in which it is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NamespaceRef {
    /// The row's number.
    pub row: u32,
    /// The row's generation; 0 is never used.
    pub generation: u32,
}

/// A namespace as one operation sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceKey {
    /// The row's number.
    pub row: u32,
    /// The epoch, which each flush raises.
    pub epoch: u64,
}

/// A namespace as people see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// What it was called when it was made, cut to 96 bytes.
    pub label: String,
    /// How often it was flushed.
    pub epoch: u64,
    /// Blocks of its entries.
    pub blocks_used: u64,
    /// Its entries, those included that are only kept by holds.
    pub entries: u64,
}

impl Index<'_> {
    /// The namespace that `reference` means, unless its row was given to another one.
    pub fn namespace(&self, reference: NamespaceRef) -> Option<NamespaceKey> {
        let row = self.namespaces.get(reference.row as usize)?;
        let commit = row.commit.load(Table::Namespaces.record(reference.row))?;
        let same = commit.state == namespace_state::USED && commit.generation == reference.generation;
        same.then_some(NamespaceKey { row: reference.row, epoch: row.epoch })
    }

    /// The row of the namespace with this digest, made where there is none; `None` where all rows are in use.
    ///
    /// A row without entries can be given to another namespace: nothing but the row size learned for it is lost.
    pub fn resolve_namespace(&mut self, digest: &[u64; 4], label: &str) -> Checked<Option<NamespaceRef>> {
        if let Some(row) = self.find_namespace(digest)? {
            let generation = self.namespace_commit(row)?.generation;
            return Ok(Some(NamespaceRef { row, generation }));
        }
        let Some(row) = self.spare_namespace()? else { return Ok(None) };
        let commit = self.namespace_commit(row)?;
        let record = self.namespace_mut(row)?;
        record.commit.lower(Table::Namespaces.record(row), commit.with_state(namespace_state::FREE));
        record.digest = *digest;
        (record.epoch, record.blocks_used, record.entries) = (0, 0, 0);
        (record.learned, record.next_learned) = ([LearnedRow::default(); LEARNED_ROWS], 0);
        record.label_len = store_label(&mut record.label, label);
        let commit = commit.next_generation(namespace_state::USED);
        record.commit.raise(Table::Namespaces.record(row), commit);
        Ok(Some(NamespaceRef { row, generation: commit.generation }))
    }

    /// The namespace with this digest, if there is one.
    pub fn namespace_by_digest(&self, digest: &[u64; 4]) -> Checked<Option<NamespaceKey>> {
        let row = self.find_namespace(digest)?;
        row.map(|row| Ok(NamespaceKey { row, epoch: self.namespace_row(row)?.epoch })).transpose()
    }

    fn find_namespace(&self, digest: &[u64; 4]) -> Checked<Option<u32>> {
        for row in 0..self.namespaces.len() as u32 {
            let used = self.namespace_commit(row)?.state == namespace_state::USED;
            if used && self.namespaces[row as usize].digest == *digest {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }

    fn spare_namespace(&mut self) -> Checked<Option<u32>> {
        let mut empty = None;
        for row in 0..self.namespaces.len() as u32 {
            if self.namespace_commit(row)?.state == namespace_state::FREE {
                return Ok(Some(row));
            }
            if empty.is_none() && self.namespaces[row as usize].entries == 0 {
                empty = Some(row);
            }
        }
        match empty {
            Some(row) => Ok(Some(row)),
            None => self.clear_stalest_namespace(),
        }
    }

    /// Evicts all of the namespace that was used longest ago among those of which nothing is held.
    fn clear_stalest_namespace(&mut self) -> Checked<Option<u32>> {
        let mut evictable = [(0u64, 0u64); MAX_NAMESPACES as usize];
        for slot in 0..self.root.slots_touched.min(self.layout.num_slots) {
            let links = self.links(slot)?;
            if self.state_of(slot) == slot_state::READY && links.leases == 0 && links.firm_holds == 0 {
                let row = usize::from(self.slot(slot)?.namespace);
                let (count, newest) = evictable.get_mut(row).ok_or(Damaged(&"a namespace is out of range"))?;
                (*count, *newest) = (*count + 1, (*newest).max(self.slot(slot)?.sequence));
            }
        }
        let idle = |row: &u32| evictable[*row as usize].0 == self.namespaces[*row as usize].entries;
        let rows = (0..self.namespaces.len() as u32).filter(idle);
        let Some(row) = rows.min_by_key(|row| evictable[*row as usize].1) else { return Ok(None) };
        for slot in 0..self.root.slots_touched.min(self.layout.num_slots) {
            if self.state_of(slot) == slot_state::READY && u32::from(self.slot(slot)?.namespace) == row {
                self.tally.evictions += 1;
                self.tally.evicted_blocks += u64::from(self.slot(slot)?.num_blocks);
                self.free_entry(slot)?;
            }
        }
        Ok(Some(row))
    }

    /// Makes every entry of the namespace unfindable. They are dropped by [`Self::sweep_flushed`], and until then on sight.
    pub fn raise_epoch(&mut self, namespace: &NamespaceKey) -> Checked<()> {
        let row = self.namespace_mut(namespace.row)?;
        row.epoch = row.epoch.wrapping_add(1);
        Ok(())
    }

    /// Drops the flushed entries among the next `count` slots from `from` on; returns how many were dropped and where to
    /// go on, until all slots were seen.
    pub fn sweep_flushed(&mut self, row: u32, from: u32, count: u32) -> Checked<(u64, Option<u32>)> {
        let end = from.saturating_add(count).min(self.root.slots_touched);
        let mut dropped = 0;
        for slot in from..end {
            let live = matches!(self.slot_commit(slot)?.state, slot_state::WRITING | slot_state::READY);
            if live
                && u32::from(self.slot(slot)?.namespace) == row
                && self.slot(slot)?.epoch != self.namespace_row(row)?.epoch
            {
                self.drop_entry(slot)?;
                dropped += 1;
            }
        }
        self.tally.flushed += dropped;
        Ok((dropped, (end < self.root.slots_touched).then_some(end)))
    }

    /// The row size that items of this modality were last seen to have in the namespace.
    pub(super) fn learned_row(&self, row: u32, modality: u32) -> Checked<Option<u32>> {
        let row = self.namespace_row(row)?;
        Ok(row.learned.iter().find(|l| l.modality == modality && l.row_bytes > 0).map(|l| l.row_bytes))
    }

    pub(super) fn learn_row(&mut self, row: u32, modality: u32, row_bytes: u32) -> Checked<()> {
        let row = self.namespace_mut(row)?;
        let known = row.learned.iter().position(|l| l.modality == modality);
        let at = known.unwrap_or(row.next_learned as usize % LEARNED_ROWS);
        if known.is_none() {
            row.next_learned = row.next_learned.wrapping_add(1);
        }
        row.learned[at] = LearnedRow { modality, row_bytes };
        Ok(())
    }

    /// Every namespace in use.
    pub fn namespace_infos(&self) -> Vec<NamespaceInfo> {
        let used = |(row, record): &(usize, &NamespaceRow)| {
            record.commit.load_or_free(Table::Namespaces.record(*row as u32)).state == namespace_state::USED
        };
        let info = |(_, record): (usize, &NamespaceRow)| NamespaceInfo {
            label: read_label(&record.label, record.label_len),
            epoch: record.epoch,
            blocks_used: record.blocks_used,
            entries: record.entries,
        };
        self.namespaces.iter().enumerate().filter(used).map(info).collect()
    }

    /// The namespaces in use whose label `wanted` accepts.
    pub fn namespaces_by_label(&self, wanted: impl Fn(&str) -> bool) -> Vec<(NamespaceKey, String)> {
        let mut found = Vec::new();
        for (row, record) in (0u32..).zip(self.namespaces.iter()) {
            let label = read_label(&record.label, record.label_len);
            let used = record.commit.load_or_free(Table::Namespaces.record(row)).state == namespace_state::USED;
            if used && wanted(&label) {
                found.push((NamespaceKey { row, epoch: record.epoch }, label));
            }
        }
        found
    }

    pub(super) fn namespace_commit(&self, row: u32) -> Checked<super::commit::Commit> {
        let commit = self.namespace_row(row)?.commit.load(Table::Namespaces.record(row));
        commit.ok_or(Damaged(&"a namespace's check bits do not fit"))
    }

    pub(super) fn namespace_row(&self, row: u32) -> Checked<&NamespaceRow> {
        self.namespaces.get(row as usize).ok_or(Damaged(&"a namespace is out of range"))
    }

    pub(super) fn namespace_mut(&mut self, row: u32) -> Checked<&mut NamespaceRow> {
        self.namespaces.get_mut(row as usize).ok_or(Damaged(&"a namespace is out of range"))
    }
}

/// The label of a namespace of this name: as much of it as is kept for people.
pub fn label_of(name: &str) -> &str {
    &name[..name.floor_char_boundary(LABEL_LEN)]
}

/// Copies as much of `text` as fits; returns how many bytes that was.
pub(super) fn store_label(label: &mut [u8; LABEL_LEN], text: &str) -> u32 {
    let text = label_of(text);
    label.fill(0);
    label[..text.len()].copy_from_slice(text.as_bytes());
    text.len() as u32
}

pub(super) fn read_label(label: &[u8], len: u32) -> String {
    let len = (len as usize).min(label.len());
    String::from_utf8_lossy(&label[..len]).into_owned()
}
