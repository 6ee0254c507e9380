//! Promises and transfers: leases, loads and saves, and what ranks say about them.
//!
//! A lease is a promise; dispatched, it becomes a load with the same id. Ranks claim a transfer before they touch a byte
//! and complete it once the copy is over. Words about an id that ended, or by a rank that takes no part, change nothing.

use super::commit::Commit;
use super::namespaces::NamespaceKey;
use super::records::{ClientRef, MAX_DIMS, Slot, hold_kind, slot_state};
use super::{Checked, EntryInfo, Index, increment};
use crate::dtype::{self, Dtype};

/// The id of a lease or transfer: never 0, never used again.
pub type TransferId = u64;

/// What an entry must be to be promised; what is not given may be anything.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Expected {
    /// Its rows: the first size of its shape, or 1 for an item without dimensions.
    pub rows: Option<u64>,
    /// The code of its element type.
    pub dtype: Option<u8>,
    /// The number of its modality.
    pub modality: Option<u32>,
}

/// What is to be saved.
#[derive(Debug, Clone, Copy)]
pub struct SaveRequest<'k> {
    /// The key, of which a prefix is kept for people to read.
    pub key: &'k str,
    /// The key's digest in its namespace.
    pub digest: [u64; 4],
    /// Rows of the item.
    pub rows: u64,
    /// Bytes of a row, as far as the caller knows; the exact size that was seen before is preferred.
    pub row_bytes: u64,
    /// A number for the item's modality, under which its row size is remembered.
    pub modality: u32,
    /// The ranks that will write, one bit each; 0 where the owner writes by itself and says when it is done.
    pub participants: u64,
    /// Whose entry it is while it is written.
    pub owner: ClientRef,
}

/// Why an item is not saved. None of these is an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveSkip {
    /// An entry of this key is there or being written.
    Exists,
    /// It needs more blocks than there are in all.
    TooLarge,
    /// Too few blocks, slots or holds are free or evictable at the moment.
    NoRoom,
    /// It has no bytes.
    Empty,
}

/// How a save began.
#[derive(Debug)]
pub enum BeginSave<T = EntryInfo> {
    /// The blocks are the entry's; the transfer can be dispatched.
    Begun(T),
    /// It will not be saved.
    Skipped(SaveSkip),
}

/// The true shape of what a rank is about to save.
#[derive(Debug, Clone, Copy)]
pub struct SaveShape {
    /// Sizes; the first `ndim` count.
    pub shape: [u64; MAX_DIMS],
    /// How many dimensions it has.
    pub ndim: u8,
    /// Its element type.
    pub dtype: Dtype,
}

impl SaveShape {
    /// The shape with these sizes; `None` for more than eight dimensions.
    pub fn new(sizes: &[u64], dtype: Dtype) -> Option<Self> {
        let mut shape = [0; MAX_DIMS];
        shape.get_mut(..sizes.len())?.copy_from_slice(sizes);
        Some(Self { shape, ndim: sizes.len() as u8, dtype })
    }

    /// Bytes of the item; `None` where they do not fit into 64 bits.
    pub fn nbytes(&self) -> Option<u64> {
        let sizes = self.shape.get(..usize::from(self.ndim))?;
        sizes.iter().try_fold(u64::from(self.dtype.size), |bytes, size| bytes.checked_mul(*size))
    }
}

/// What became of a rank's claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// The rank may copy.
    Claimed,
    /// The rank has claimed this transfer before.
    Repeated,
    /// The transfer has ended or was closed, or the rank takes no part in it: nothing may be copied.
    Refused,
    /// The item has more bytes than its blocks; the save was dropped and the row size is known now.
    TooLarge,
}

/// The bit of a rank; ranks of 64 and more take part in nothing.
fn rank_bit(rank: u32) -> u64 {
    1u64.checked_shl(rank).unwrap_or(0)
}

impl Index<'_> {
    /// Promises a READY entry that is as `expected`.
    ///
    /// One that is not is dropped: the caller's model will make it anew.
    pub fn lease(
        &mut self,
        digest: &[u64; 4],
        namespace: &NamespaceKey,
        expected: &Expected,
        owner: ClientRef,
    ) -> Checked<Option<EntryInfo>> {
        let Some(slot) = self.find(digest, namespace)? else { return Ok(None) };
        let commit = self.slot_commit(slot)?;
        if commit.state != slot_state::READY {
            return Ok(None);
        }
        if !self.is_described_soundly(slot)? || !self.matches(slot, expected)? {
            self.tally.mismatches += 1;
            self.drop_entry(slot)?;
            return Ok(None);
        }
        let Some(hold) = self.take_hold()? else { return Ok(None) };
        let links = *self.links(slot)?;
        if links.leases == 0 && links.firm_holds == 0 {
            self.count_evictable(slot, false)?;
        }
        let id = self.commit_hold(hold, hold_kind::LEASE, (slot, commit.generation), owner, 0)?;
        self.entry_info(slot, id).map(Some)
    }

    /// Whether an entry's shape, element type, bytes and blocks fit each other. Entries that were never described do.
    pub(super) fn is_described_soundly(&self, slot: u32) -> Checked<bool> {
        let record = self.slot(slot)?;
        if (record.ndim, record.dtype, record.nbytes) == (0, 0, 0) {
            return Ok(true);
        }
        let Some(dtype) = dtype::by_code(record.dtype) else { return Ok(false) };
        let shape = SaveShape { shape: self.details(slot)?.shape, ndim: record.ndim, dtype };
        let room = u64::from(record.num_blocks) * self.layout.block_size;
        Ok(usize::from(record.ndim) <= MAX_DIMS && shape.nbytes() == Some(record.nbytes) && record.nbytes <= room)
    }

    fn matches(&self, slot: u32, expected: &Expected) -> Checked<bool> {
        let record = self.slot(slot)?;
        let rows = if record.ndim > 0 { self.details(slot)?.shape[0] } else { 1 };
        // An entry that was stored without a modality fits any.
        let of_modality = |modality| record.modality == modality || record.modality == 0;
        Ok(expected.rows.is_none_or(|r| r == rows)
            && expected.dtype.is_none_or(|d| d == record.dtype)
            && expected.modality.is_none_or(of_modality))
    }

    /// Ends a lease that was neither dispatched nor claimed; the eviction order stays as it was.
    pub fn end_lease(&mut self, id: TransferId) -> Checked<()> {
        let Some((hold, commit)) = self.hold_by_id(id)? else { return Ok(()) };
        if commit.state != hold_kind::LEASE || self.hold(hold)?.claimed != 0 {
            return Ok(());
        }
        let slot = self.end_hold(hold)?;
        self.after_any_hold(slot)
    }

    /// Makes a lease the load that it promised, with these ranks taking part.
    pub fn dispatch_load(&mut self, id: TransferId, participants: u64) -> Checked<()> {
        let Some((hold, commit)) = self.hold_by_id(id)? else { return Ok(()) };
        if commit.state != hold_kind::LEASE {
            return Ok(());
        }
        let slot = self.hold(hold)?.slot;
        self.before_firm_hold(slot)?;
        let record = self.hold_mut(hold)?;
        record.participants = participants;
        record.commit.raise(super::commit::Table::Holds.record(hold), commit.with_state(hold_kind::LOAD));
        increment(&mut self.links_mut(slot)?.firm_holds)?;
        self.uncount_hold(slot, hold_kind::LEASE)?;
        self.end_transfer_if_resolved(hold)
    }

    /// Takes blocks for an item that is about to be saved, evicting what can go.
    pub fn begin_save(&mut self, request: &SaveRequest<'_>, namespace: &NamespaceKey) -> Checked<BeginSave> {
        let row_bytes = match self.learned_row(namespace.row, request.modality)? {
            Some(learned) => u64::from(learned),
            None => request.row_bytes,
        };
        let nbytes = request.rows.saturating_mul(row_bytes);
        if nbytes == 0 {
            return Ok(BeginSave::Skipped(SaveSkip::Empty));
        }
        let num_blocks = nbytes.div_ceil(self.layout.block_size);
        match self.begin_write(request, namespace, num_blocks)? {
            Ok((slot, id)) => self.entry_info(slot, id).map(BeginSave::Begun),
            Err(skip) => Ok(BeginSave::Skipped(skip)),
        }
    }

    /// The same for a known number of blocks, 0 included; returns the slot and the save's id.
    pub(super) fn begin_write(
        &mut self,
        request: &SaveRequest<'_>,
        namespace: &NamespaceKey,
        num_blocks: u64,
    ) -> Checked<Result<(u32, TransferId), SaveSkip>> {
        if self.find(&request.digest, namespace)?.is_some() {
            return Ok(Err(SaveSkip::Exists));
        }
        let num_blocks = match u32::try_from(num_blocks) {
            Ok(blocks) if blocks <= self.layout.num_blocks => blocks,
            _ => return Ok(Err(SaveSkip::TooLarge)),
        };
        // Before anything is evicted for what then cannot begin.
        if !self.has_free_hold() || !self.make_room(num_blocks)? {
            return Ok(Err(SaveSkip::NoRoom));
        }
        let Some(hold) = self.take_hold()? else { return Ok(Err(SaveSkip::NoRoom)) };
        let Some(slot) = self.take_slot()? else {
            self.give_hold(hold)?;
            return Ok(Err(SaveSkip::NoRoom));
        };
        let commit = self.slot_commit(slot)?.next_generation(slot_state::WRITING);
        let chain = self.take_extents(slot, commit.generation, num_blocks)?;
        let id =
            self.commit_hold(hold, hold_kind::SAVE, (slot, commit.generation), request.owner, request.participants)?;
        self.commit_writing(slot, commit, (chain, num_blocks), request, namespace)?;
        Ok(Ok((slot, id)))
    }

    /// A rank's word that it is about to copy out of the entry. A lease that was not dispatched yet can be claimed too: its
    /// dispatch may be waiting for the lock.
    pub fn claim_load(&mut self, rank: u32, id: TransferId) -> Checked<ClaimOutcome> {
        let Some((hold, commit)) = self.hold_by_id(id)? else { return Ok(ClaimOutcome::Refused) };
        let bit = rank_bit(rank);
        let record = self.hold_mut(hold)?;
        let takes_part = match commit.state {
            hold_kind::LEASE => bit != 0,
            hold_kind::LOAD => record.participants & bit != 0,
            _ => false,
        };
        Ok(claim(record, bit, takes_part))
    }

    /// A rank's word that it is about to copy an item of this shape into the entry.
    pub fn claim_save(&mut self, rank: u32, id: TransferId, shape: &SaveShape) -> Checked<ClaimOutcome> {
        let Some((hold, commit)) = self.hold_by_id(id)? else { return Ok(ClaimOutcome::Refused) };
        let (slot, bit) = (self.hold(hold)?.slot, rank_bit(rank));
        let record = self.hold(hold)?;
        if commit.state != hold_kind::SAVE || record.failed != 0 || record.participants & bit == 0 {
            return Ok(ClaimOutcome::Refused);
        }
        if record.claimed & bit != 0 {
            return Ok(ClaimOutcome::Repeated);
        }
        if self.slot_commit(slot)?.state != slot_state::WRITING {
            return Ok(ClaimOutcome::Refused);
        }
        let is_first = record.claimed == 0;
        if !is_first && !self.has_shape(slot, shape)? {
            return Ok(ClaimOutcome::Refused);
        }
        if !self.describe_save(slot, shape)? {
            self.fail_save(hold)?;
            return Ok(ClaimOutcome::TooLarge);
        }
        self.hold_mut(hold)?.claimed |= bit;
        Ok(ClaimOutcome::Claimed)
    }

    fn has_shape(&self, slot: u32, shape: &SaveShape) -> Checked<bool> {
        let record = self.slot(slot)?;
        let same = record.ndim == shape.ndim && record.dtype == shape.dtype.code;
        Ok(same && self.details(slot)?.shape == shape.shape)
    }

    /// Writes the shape into the entry and remembers its row size; false where the item does not fit.
    fn describe_save(&mut self, slot: u32, shape: &SaveShape) -> Checked<bool> {
        let Some(nbytes) = shape.nbytes() else { return Ok(false) };
        let Slot { namespace: row, modality, num_blocks, .. } = *self.slot(slot)?;
        if shape.ndim > 0 && shape.shape[0] > 0 && modality != 0 {
            let row_bytes = nbytes / shape.shape[0];
            if let Ok(row_bytes) = u32::try_from(row_bytes) {
                self.learn_row(u32::from(row), modality, row_bytes)?;
            }
        }
        if nbytes > u64::from(num_blocks) * self.layout.block_size {
            return Ok(false);
        }
        self.details_mut(slot)?.shape = shape.shape;
        let record = self.slot_mut(slot)?;
        (record.ndim, record.dtype, record.nbytes) = (shape.ndim, shape.dtype.code, nbytes);
        Ok(true)
    }

    /// Records the checksum of a save's bytes, which the rank that wrote them knows before it completes the save.
    pub fn set_checksum(&mut self, id: TransferId, checksum: u64) -> Checked<()> {
        let Some((hold, commit)) = self.hold_by_id(id)? else { return Ok(()) };
        if commit.state != hold_kind::SAVE {
            return Ok(());
        }
        let (slot, incarnation) = (self.hold(hold)?.slot, self.root.incarnation);
        let record = self.slot_mut(slot)?;
        (record.checksum, record.has_checksum, record.verified_in) = (checksum, 1, incarnation);
        Ok(())
    }

    /// The holder of a lease has compared the entry's bytes with its checksum: they fit, or the entry goes.
    pub fn confirm(&mut self, id: TransferId, fits: bool) -> Checked<()> {
        let Some((hold, _)) = self.hold_by_id(id)? else { return Ok(()) };
        let (slot, incarnation) = (self.hold(hold)?.slot, self.root.incarnation);
        if fits {
            self.slot_mut(slot)?.verified_in = incarnation;
            return Ok(());
        }
        self.tally.corrupted += 1;
        self.drop_entry(slot)?;
        self.end_lease(id)
    }

    /// A rank's word that its copy is over, well or not.
    pub fn complete(&mut self, rank: u32, id: TransferId, ok: bool) -> Checked<()> {
        let Some((hold, commit)) = self.hold_by_id(id)? else { return Ok(()) };
        let bit = rank_bit(rank);
        let record = self.hold_mut(hold)?;
        if commit.state == hold_kind::SAVE && !ok && record.participants & bit != 0 {
            record.failed = 1;
            record.claimed |= bit;
        }
        record.completed |= record.claimed & bit;
        self.end_transfer_if_resolved(hold)
    }

    /// Drops a save of which no rank can know yet.
    pub fn withdraw(&mut self, id: TransferId) -> Checked<()> {
        match self.hold_by_id(id)? {
            Some((hold, commit)) if commit.state == hold_kind::SAVE && self.hold(hold)?.claimed == 0 => {
                self.fail_save(hold)
            }
            _ => Ok(()),
        }
    }

    /// Lets no further rank claim the transfer; returns whether it is still open, since some rank has.
    pub fn close_unclaimed(&mut self, id: TransferId) -> Checked<bool> {
        let Some((hold, commit)) = self.hold_by_id(id)? else { return Ok(false) };
        let record = self.hold_mut(hold)?;
        match commit.state {
            hold_kind::SAVE if record.claimed != record.participants => record.failed = 1,
            hold_kind::LOAD => record.participants &= record.claimed,
            _ => {}
        }
        self.end_transfer_if_resolved(hold)?;
        Ok(self.hold_by_id(id)?.is_some())
    }

    /// Whether some participating rank has yet to claim the transfer.
    pub fn is_unclaimed(&self, id: TransferId) -> Checked<bool> {
        let Some((hold, commit)) = self.hold_by_id(id)? else { return Ok(false) };
        let record = self.hold(hold)?;
        Ok(match commit.state {
            hold_kind::LEASE => true,
            hold_kind::LOAD | hold_kind::SAVE => record.participants & !record.claimed != 0,
            _ => false,
        })
    }

    /// Whether it is a load that some participating rank has yet to claim.
    pub fn is_unclaimed_load(&self, id: TransferId) -> Checked<bool> {
        let Some((hold, commit)) = self.hold_by_id(id)? else { return Ok(false) };
        let record = self.hold(hold)?;
        Ok(commit.state == hold_kind::LOAD && record.participants & !record.claimed != 0)
    }

    /// Declares a save ready without a word from any rank.
    pub fn finish_save(&mut self, id: TransferId) -> Checked<()> {
        match self.hold_by_id(id)? {
            Some((hold, commit)) if commit.state == hold_kind::SAVE => self.resolve_save(hold, true),
            _ => Ok(()),
        }
    }

    /// Declares a load over without a word from any rank.
    pub fn finish_load(&mut self, id: TransferId) -> Checked<()> {
        match self.hold_by_id(id)? {
            Some((hold, commit)) if commit.state == hold_kind::LOAD => self.end_load(hold),
            _ => Ok(()),
        }
    }

    fn end_transfer_if_resolved(&mut self, hold: u32) -> Checked<()> {
        let Commit { state, .. } = self.hold_commit(hold)?;
        let record = self.hold(hold)?;
        let awaited = if record.failed != 0 { record.claimed } else { record.participants };
        if awaited & !record.completed != 0 {
            return Ok(());
        }
        match state {
            hold_kind::LOAD => self.end_load(hold),
            hold_kind::SAVE if record.failed != 0 => self.resolve_save(hold, false),
            hold_kind::SAVE if record.participants != 0 => self.resolve_save(hold, true),
            _ => Ok(()),
        }
    }

    pub(super) fn end_load(&mut self, hold: u32) -> Checked<()> {
        self.tally.loads_completed += 1;
        let slot = self.end_hold(hold)?;
        self.after_firm_hold(slot)
    }

    /// Drops a save as soon as the ranks that claimed it have resolved it.
    pub(super) fn fail_save(&mut self, hold: u32) -> Checked<()> {
        self.hold_mut(hold)?.failed = 1;
        self.end_transfer_if_resolved(hold)
    }

    /// Ends a save: the entry becomes READY if it went well and is still wanted, else its blocks return.
    pub(super) fn resolve_save(&mut self, hold: u32, ok: bool) -> Checked<()> {
        let slot = self.hold(hold)?.slot;
        let commit = self.slot_commit(slot)?;
        if ok && commit.state == slot_state::WRITING {
            let ready = commit.with_state(slot_state::READY);
            self.slot(slot)?.raise(slot, ready);
            self.tally.saves_completed += 1;
            self.end_hold(hold)?;
            return self.after_firm_hold(slot);
        }
        self.tally.saves_dropped += 1;
        self.end_hold(hold)?;
        match commit.state {
            slot_state::WRITING | slot_state::ORPHANED => self.free_entry(slot),
            _ => self.after_any_hold(slot),
        }
    }
}

fn claim(record: &mut super::records::Hold, bit: u64, takes_part: bool) -> ClaimOutcome {
    if !takes_part {
        return ClaimOutcome::Refused;
    }
    if record.claimed & bit != 0 {
        return ClaimOutcome::Repeated;
    }
    record.claimed |= bit;
    ClaimOutcome::Claimed
}
