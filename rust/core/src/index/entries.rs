//! The verbs of vLLM's `EmbeddingCache`: get, alloc, mark ready, pin, unpin, discard.

use super::commit::Commit;
use super::namespaces::NamespaceKey;
use super::records::{ClientRef, Hold, hold_kind, slot_state};
use super::transfers::{BeginSave, SaveRequest, SaveSkip};
use super::{Checked, EntryPlace, Index};

/// An entry as it was once found: its slot, and the generation in which it is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EntryHandle {
    /// The slot's number.
    pub slot: u32,
    /// The slot's generation.
    pub generation: u32,
}

/// Why a verb does not fit the entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unfit {
    /// There is no entry of this key.
    Missing,
    /// The entry is being written.
    Writing,
    /// The entry is ready.
    Ready,
    /// The entry is being written by another client, or by ranks that say themselves when they are done.
    WrittenByOthers,
    /// This client has no pin on it.
    NotPinned,
    /// This client still has a pin on an earlier entry of this key, which was flushed.
    PinnedBeforeFlush,
    /// Every hold record is in use.
    NoHold,
}

impl Index<'_> {
    /// The WRITING or READY entry of this digest.
    pub fn get(&mut self, digest: &[u64; 4], namespace: &NamespaceKey) -> Checked<Option<EntryPlace>> {
        match self.find(digest, namespace)? {
            Some(slot) => self.entry_place(slot, 0).map(Some),
            None => Ok(None),
        }
    }

    /// Whether a READY entry of this digest is there.
    pub fn contains(&mut self, digest: &[u64; 4], namespace: &NamespaceKey) -> Checked<bool> {
        match self.find(digest, namespace)? {
            Some(slot) => Ok(self.slot_commit(slot)?.state == slot_state::READY),
            None => Ok(false),
        }
    }

    /// Whether an entry of this digest is being written by another client than `me`.
    pub fn is_written_elsewhere(
        &mut self,
        digest: &[u64; 4],
        namespace: &NamespaceKey,
        me: ClientRef,
    ) -> Checked<bool> {
        let Some(slot) = self.find(digest, namespace)? else { return Ok(false) };
        if self.slot_commit(slot)?.state != slot_state::WRITING {
            return Ok(false);
        }
        let others = self.find_hold(slot, |hold, commit| commit.state == hold_kind::SAVE && hold.owner != me)?;
        Ok(others.is_some())
    }

    /// Makes a WRITING entry of `num_blocks` blocks that its owner fills and then marks ready.
    pub fn alloc(
        &mut self,
        request: &SaveRequest<'_>,
        namespace: &NamespaceKey,
        num_blocks: u64,
    ) -> Checked<BeginSave<EntryPlace>> {
        // Verbs by key could not tell this entry from an earlier one that was flushed while it was written.
        let is_own = |hold: &Hold, commit: Commit| {
            commit.state == hold_kind::SAVE && hold.owner == request.owner && hold.participants == 0
        };
        if self.find_hold_of_doomed(&request.digest, is_own)?.is_some() {
            return Ok(BeginSave::Skipped(SaveSkip::Exists));
        }
        match self.begin_write(request, namespace, num_blocks)? {
            Ok((slot, id)) => self.entry_place(slot, id).map(BeginSave::Begun),
            Err(skip) => Ok(BeginSave::Skipped(skip)),
        }
    }

    /// The owner's word on the entry that it writes: its bytes are there (`filled`), or never will be.
    pub fn end_writing(
        &mut self,
        digest: &[u64; 4],
        namespace: &NamespaceKey,
        owner: ClientRef,
        filled: bool,
    ) -> Checked<Result<(), Unfit>> {
        match self.own_writing(digest, namespace, owner)? {
            Ok(hold) => self.resolve_save(hold, filled).map(Ok),
            Err(unfit) => Ok(Err(unfit)),
        }
    }

    fn own_writing(
        &mut self,
        digest: &[u64; 4],
        namespace: &NamespaceKey,
        owner: ClientRef,
    ) -> Checked<Result<u32, Unfit>> {
        let is_own = |hold: &Hold, commit: Commit| {
            commit.state == hold_kind::SAVE && hold.owner == owner && hold.participants == 0
        };
        let found = self.find(digest, namespace)?;
        if let Some(slot) = found
            && let Some(hold) = self.find_hold(slot, is_own)?
        {
            return Ok(Ok(hold));
        }
        if let Some(hold) = self.find_hold_of_doomed(digest, is_own)? {
            return Ok(Ok(hold));
        }
        Ok(Err(match found {
            None => Unfit::Missing,
            Some(slot) if self.slot_commit(slot)?.state == slot_state::READY => Unfit::Ready,
            Some(_) => Unfit::WrittenByOthers,
        }))
    }

    /// Keeps a READY entry in place until as many unpins as pins.
    pub fn pin(&mut self, digest: &[u64; 4], namespace: &NamespaceKey, owner: ClientRef) -> Checked<Result<(), Unfit>> {
        let Some(slot) = self.find(digest, namespace)? else { return Ok(Err(Unfit::Missing)) };
        let commit = self.slot_commit(slot)?;
        if commit.state != slot_state::READY {
            return Ok(Err(Unfit::Writing));
        }
        let own = self.find_hold(slot, |hold, commit| commit.state == hold_kind::PIN && hold.owner == owner)?;
        if let Some(hold) = own {
            let pins = &mut self.hold_mut(hold)?.pins;
            *pins = pins.saturating_add(1);
            return Ok(Ok(()));
        }
        let is_own = |hold: &Hold, commit: Commit| commit.state == hold_kind::PIN && hold.owner == owner;
        if self.find_hold_of_doomed(digest, is_own)?.is_some() {
            return Ok(Err(Unfit::PinnedBeforeFlush));
        }
        let Some(hold) = self.take_hold()? else { return Ok(Err(Unfit::NoHold)) };
        self.before_firm_hold(slot)?;
        self.commit_hold(hold, hold_kind::PIN, (slot, commit.generation), owner, 0)?;
        Ok(Ok(()))
    }

    /// Ends one of this client's pins; the last one puts the entry at the queue's end.
    pub fn unpin(
        &mut self,
        digest: &[u64; 4],
        namespace: &NamespaceKey,
        owner: ClientRef,
    ) -> Checked<Result<(), Unfit>> {
        let found = self.find(digest, namespace)?;
        let is_own = |hold: &Hold, commit: Commit| commit.state == hold_kind::PIN && hold.owner == owner;
        let own = match found {
            Some(slot) => self.find_hold(slot, is_own)?,
            None => None,
        };
        let own = if own.is_none() { self.find_hold_of_doomed(digest, is_own)? } else { own };
        let Some(hold) = own else { return self.not_pinned(found).map(Err) };
        let pins = &mut self.hold_mut(hold)?.pins;
        *pins = pins.saturating_sub(1);
        if *pins == 0 {
            let slot = self.end_hold(hold)?;
            self.after_firm_hold(slot)?;
        }
        Ok(Ok(()))
    }

    fn not_pinned(&self, found: Option<u32>) -> Checked<Unfit> {
        Ok(match found {
            None => Unfit::Missing,
            Some(slot) if self.slot_commit(slot)?.state == slot_state::WRITING => Unfit::Writing,
            Some(_) => Unfit::NotPinned,
        })
    }

    /// An entry that was flushed or replaced is no longer found by key, but its writer and its pins must still end.
    fn find_hold_of_doomed(&self, digest: &[u64; 4], wanted: impl Fn(&Hold, Commit) -> bool) -> Checked<Option<u32>> {
        if self.root.doomed == 0 {
            return Ok(None);
        }
        for number in 0..self.root.holds_touched.min(self.layout.num_holds()) {
            let (record, commit) = (self.hold(number)?, self.hold_commit(number)?);
            let doomed = wanted(record, commit) && self.state_of(record.slot) == slot_state::DOOMED;
            if doomed && self.slot(record.slot)?.digest == *digest {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Whether the entry that the handle means is READY.
    pub fn is_ready(&self, handle: EntryHandle) -> Checked<bool> {
        let commit = self.slot_of_generation(handle.slot, handle.generation)?;
        Ok(commit.is_some_and(|c| c.state == slot_state::READY))
    }

    /// Whether the entry that the handle means could be evicted now.
    pub fn is_evictable(&self, handle: EntryHandle) -> Checked<bool> {
        let links = self.links(handle.slot)?;
        Ok(self.is_ready(handle)? && links.leases == 0 && links.firm_holds == 0)
    }

    /// Whether any entry is being written, pinned, leased or loaded.
    pub fn has_held_entries(&self) -> bool {
        self.root.slots_used != self.root.evictable_entries
    }

    /// The state of a slot where its check bits fit, else FREE.
    pub(super) fn state_of(&self, slot: u32) -> u8 {
        self.slots.get(slot as usize).map_or(slot_state::FREE, |s| s.load(slot).unwrap_or_default().state)
    }
}
