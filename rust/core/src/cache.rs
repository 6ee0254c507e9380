//! The cache that people use: entries by key, in one namespace, from any thread.
//!
//! Each method that takes a `wait` tries the lock once if that is zero and reports `Busy`, so that a caller can let others run
//! (Python: its interpreter lock) before it waits in earnest.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::client::{Client, Deferred, PATIENT};
use crate::counters::Counter;
use crate::dtype;
use crate::error::{Error, Result};
use crate::geometry::MAX_NAMESPACES;
use crate::index::{
    BeginSave, Checked, ClaimOutcome, EntryHandle, EntryInfo, EntryPlace, Expected, Index, NamespaceKey, NamespaceRef,
    SaveRequest, SaveShape, SaveSkip, TransferId, Unfit,
};
use crate::memo;

/// An item to be saved, in the words of those who know keys and not digests.
#[derive(Debug, Clone, Copy)]
pub struct Item<'k> {
    /// Its key.
    pub key: &'k str,
    /// Its rows.
    pub rows: u64,
    /// Bytes of a row, as far as the caller knows.
    pub row_bytes: u64,
    /// Its modality; the row size is remembered under it. Empty for none.
    pub modality: &'k str,
    /// The ranks that will write it, one bit each.
    pub participants: u64,
}

/// Entries by key, within one namespace of an index.
#[derive(Debug)]
pub struct EmbeddingCache {
    client: Arc<Client>,
    label: String,
    digest: [u64; 4],
    /// What keys are hashed with: the namespace's digest, so that equal keys of two namespaces have nothing in common.
    hash_key: [u8; 32],
    memo_owner: memo::Owner,
    /// The namespace's row and generation, as last seen.
    namespace: AtomicU64,
}

impl EmbeddingCache {
    /// The cache of the namespace that `name` means.
    pub fn new(client: Arc<Client>, name: &str) -> Self {
        let hash_key = *blake3::hash(name.as_bytes()).as_bytes();
        let namespace = AtomicU64::new(0);
        let (label, digest, memo_owner) = (name.to_owned(), words(&hash_key), memo::Owner::new());
        Self { client, label, digest, hash_key, memo_owner, namespace }
    }

    /// The client whose holds this cache takes.
    pub fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// Blocks in all, of every namespace.
    pub fn num_blocks(&self) -> u32 {
        self.client.layout().num_blocks()
    }

    /// Bytes of a block.
    pub fn block_size(&self) -> u64 {
        self.client.layout().block_size()
    }

    fn key_digest(&self, key: &str) -> [u64; 4] {
        memo::digest(self.memo_owner, key.as_bytes(), || {
            words(blake3::keyed_hash(&self.hash_key, key.as_bytes()).as_bytes())
        })
    }

    fn known_namespace(&self) -> NamespaceRef {
        let word = self.namespace.load(Ordering::Relaxed);
        NamespaceRef { row: word as u32, generation: (word >> 32) as u32 }
    }

    fn namespace_in(&self, index: &mut Index<'_>) -> Checked<Option<NamespaceKey>> {
        if let Some(key) = index.namespace(self.known_namespace()) {
            return Ok(Some(key));
        }
        let Some(found) = index.resolve_namespace(&self.digest, &self.label)? else { return Ok(None) };
        let word = (u64::from(found.generation) << 32) | u64::from(found.row);
        self.namespace.store(word, Ordering::Relaxed);
        Ok(index.namespace(found))
    }

    fn with<R>(
        &self,
        wait: Duration,
        mut operation: impl FnMut(&mut Index<'_>, &NamespaceKey) -> Checked<R>,
    ) -> Result<R> {
        let outcome = self.client.with(wait, |index| match self.namespace_in(index)? {
            Some(namespace) => operation(index, &namespace).map(Some),
            None => Ok(None),
        })?;
        match outcome {
            Some(value) => Ok(value),
            None => Err(Error::NamespacesFull { limit: MAX_NAMESPACES }),
        }
    }

    /// The entry of this key, ready or being written.
    ///
    /// # Errors
    /// `Busy`, `Closed`, `NamespacesFull`; so for every method with a `wait`.
    pub fn get(&self, wait: Duration, key: &str) -> Result<Option<EntryPlace>> {
        let digest = self.key_digest(key);
        self.with(wait, |index, namespace| index.get(&digest, namespace))
    }

    /// Whether a READY entry of this key is there.
    ///
    /// # Errors
    /// See [`Self::get`].
    pub fn contains(&self, wait: Duration, key: &str) -> Result<bool> {
        let digest = self.key_digest(key);
        self.with(wait, |index, namespace| index.contains(&digest, namespace))
    }

    /// Whether another client is writing an entry of this key. A writer that is dead does not count.
    ///
    /// # Errors
    /// See [`Self::get`].
    pub fn is_written_elsewhere(&self, wait: Duration, key: &str) -> Result<bool> {
        let digest = self.key_digest(key);
        let me = self.client.me();
        self.with(wait, |index, namespace| {
            let elsewhere = index.is_written_elsewhere(&digest, namespace, me)?;
            if elsewhere && self.client.reclaim_for_room(index)? {
                return index.is_written_elsewhere(&digest, namespace, me);
            }
            Ok(elsewhere)
        })
    }

    /// Blocks for an entry that this client fills and then marks ready, evicting what can go; `None` where too little can.
    ///
    /// # Errors
    /// `EntryState` if the key has an entry, `TooLarge` for more blocks than there are; and see [`Self::get`].
    pub fn alloc(&self, wait: Duration, key: &str, num_blocks: u64) -> Result<Option<EntryPlace>> {
        let request = self.request(&Item { key, rows: 0, row_bytes: 0, modality: "", participants: 0 });
        let begun = self.with(wait, |index, namespace| {
            self.with_room(index, |index| index.alloc(&request, namespace, num_blocks))
        })?;
        match begun {
            BeginSave::Begun(entry) => Ok(Some(entry)),
            BeginSave::Skipped(SaveSkip::Exists) => {
                Err(entry_state("alloc", key, "there already", "a key without an entry"))
            }
            BeginSave::Skipped(SaveSkip::TooLarge) => {
                Err(Error::TooLarge { key: key.to_owned(), wanted: num_blocks, capacity: u64::from(self.num_blocks()) })
            }
            BeginSave::Skipped(SaveSkip::NoRoom | SaveSkip::Empty) => Ok(None),
        }
    }

    /// Runs `begin`, and once more if it found no room and dead clients' room could be taken back.
    fn with_room<T>(
        &self,
        index: &mut Index<'_>,
        mut begin: impl FnMut(&mut Index<'_>) -> Checked<BeginSave<T>>,
    ) -> Checked<BeginSave<T>> {
        let begun = begin(index)?;
        if matches!(begun, BeginSave::Skipped(SaveSkip::NoRoom)) && self.client.reclaim_for_room(index)? {
            return begin(index);
        }
        Ok(begun)
    }

    fn request<'k>(&self, item: &Item<'k>) -> SaveRequest<'k> {
        SaveRequest {
            key: item.key,
            digest: self.key_digest(item.key),
            rows: item.rows,
            row_bytes: item.row_bytes,
            modality: modality_number(item.modality),
            participants: item.participants,
            owner: self.client.me(),
        }
    }

    /// This client's word that it has filled the entry. Done with the next call if the lock is not free in time.
    ///
    /// # Errors
    /// `KeyNotFound`; `EntryState` if the entry is ready or written by others; and see [`Self::get`].
    pub fn mark_ready(&self, wait: Duration, key: &str) -> Result<()> {
        let digest = self.key_digest(key);
        let me = self.client.me();
        let outcome = self.with(wait, |index, namespace| index.end_writing(&digest, namespace, me, true));
        self.settle("mark_ready", key, "an entry that this client is writing", wait, outcome, Deferred::MarkReady)
    }

    /// This client's word that it will not fill the entry. Done with the next call if the lock is not free in time.
    ///
    /// # Errors
    /// As [`Self::mark_ready`].
    pub fn discard(&self, wait: Duration, key: &str) -> Result<()> {
        let digest = self.key_digest(key);
        let me = self.client.me();
        let outcome = self.with(wait, |index, namespace| index.end_writing(&digest, namespace, me, false));
        self.settle("discard", key, "an entry that this client is writing", wait, outcome, Deferred::Discard)
    }

    /// Keeps a READY entry in place until as many unpins as pins.
    ///
    /// # Errors
    /// `KeyNotFound`; `EntryState` if the entry is being written; `Exhausted`; and see [`Self::get`].
    pub fn pin(&self, wait: Duration, key: &str) -> Result<()> {
        let digest = self.key_digest(key);
        let me = self.client.me();
        match self.with(wait, |index, namespace| index.pin(&digest, namespace, me))? {
            Ok(()) => Ok(()),
            Err(unfit) => Err(self.unfit_error("pin", key, "a ready entry", unfit)),
        }
    }

    /// Ends one of this client's pins. Done with the next call if the lock is not free in time.
    ///
    /// # Errors
    /// `KeyNotFound`; `EntryState` if this client has no pin on it; and see [`Self::get`].
    pub fn unpin(&self, wait: Duration, key: &str) -> Result<()> {
        let digest = self.key_digest(key);
        let me = self.client.me();
        let outcome = self.with(wait, |index, namespace| index.unpin(&digest, namespace, me));
        self.settle("unpin", key, "an entry that this client has pinned", wait, outcome, Deferred::Unpin)
    }

    /// Turns the outcome of what must not be lost into a result, or puts it off after a wait that was in earnest.
    fn settle(
        &self,
        doing: &'static str,
        key: &str,
        needed: &'static str,
        wait: Duration,
        outcome: Result<std::result::Result<(), Unfit>>,
        later: impl FnOnce([u64; 4], [u64; 4]) -> Deferred,
    ) -> Result<()> {
        match outcome {
            Ok(Ok(())) => Ok(()),
            Ok(Err(unfit)) => Err(self.unfit_error(doing, key, needed, unfit)),
            Err(Error::Busy { .. }) if !wait.is_zero() => {
                self.client.defer(later(self.key_digest(key), self.digest));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn unfit_error(&self, doing: &'static str, key: &str, needed: &'static str, unfit: Unfit) -> Error {
        match unfit {
            Unfit::Missing => Error::KeyNotFound { key: key.to_owned() },
            Unfit::Writing => entry_state(doing, key, "being written", needed),
            Unfit::Ready => entry_state(doing, key, "ready", needed),
            Unfit::WrittenByOthers => entry_state(doing, key, "being written by others", needed),
            Unfit::NotPinned => entry_state(doing, key, "not pinned by this client", needed),
            Unfit::PinnedBeforeFlush => entry_state(doing, key, "pinned from before a flush: unpin it first", needed),
            Unfit::NoHold => {
                let (key, limit) = (key.to_owned(), self.client.layout().num_holds());
                Error::Exhausted { doing, key, what: "hold records", limit }
            }
        }
    }

    /// Whether the entry that the handle means is ready.
    ///
    /// # Errors
    /// See [`Self::get`].
    pub fn is_ready(&self, wait: Duration, handle: EntryHandle) -> Result<bool> {
        self.client.with(wait, |index| index.is_ready(handle))
    }

    /// Whether the entry that the handle means could be evicted now.
    ///
    /// # Errors
    /// See [`Self::get`].
    pub fn is_evictable(&self, wait: Duration, handle: EntryHandle) -> Result<bool> {
        self.client.with(wait, |index| index.is_evictable(handle))
    }

    /// Whether any entry, of any namespace, is being written, pinned, leased or loaded.
    ///
    /// # Errors
    /// See [`Self::get`].
    pub fn has_held_entries(&self, wait: Duration) -> Result<bool> {
        self.client.with(wait, |index| Ok(index.has_held_entries()))
    }

    /// Promises a READY entry that is as `expected`. One that is not goes.
    ///
    /// # Errors
    /// See [`Self::get`].
    pub fn lease(&self, wait: Duration, key: &str, expected: &Expected) -> Result<Option<EntryInfo>> {
        let digest = self.key_digest(key);
        let me = self.client.me();
        let lease = self.with(wait, |index, namespace| index.lease(&digest, namespace, expected, me))?;
        match &lease {
            Some(entry) => {
                self.client.count(Counter::Hits, 1);
                self.client.count(Counter::HitBytes, entry.nbytes);
            }
            None => self.client.count(Counter::Misses, 1),
        }
        Ok(lease)
    }

    /// Takes blocks for an item that ranks will write, or says why not.
    ///
    /// # Errors
    /// See [`Self::get`].
    pub fn begin_save(&self, wait: Duration, item: &Item<'_>) -> Result<BeginSave> {
        let request = self.request(item);
        let begun =
            self.with(wait, |index, namespace| self.with_room(index, |index| index.begin_save(&request, namespace)))?;
        let counter = match &begun {
            BeginSave::Begun(_) => Counter::Saves,
            BeginSave::Skipped(SaveSkip::Exists) => Counter::SkippedExists,
            BeginSave::Skipped(SaveSkip::TooLarge) => Counter::SkippedTooLarge,
            BeginSave::Skipped(SaveSkip::NoRoom) => Counter::SkippedNoRoom,
            BeginSave::Skipped(SaveSkip::Empty) => Counter::SkippedEmpty,
        };
        self.client.count(counter, 1);
        Ok(begun)
    }

    /// A rank's claims of loads, one outcome each. If the lock is not free in time they count as claimed: a load is copied on
    /// its lease alone, and the book-keeping follows.
    ///
    /// # Errors
    /// `Busy` only for a zero `wait`; and see [`Self::get`].
    pub fn claim_loads(&self, wait: Duration, rank: u32, ids: &[TransferId]) -> Result<Vec<ClaimOutcome>> {
        let mut outcomes = Vec::with_capacity(ids.len());
        let claimed = self.client.with(wait, |index| {
            outcomes.clear();
            for id in ids {
                outcomes.push(index.claim_load(rank, *id)?);
            }
            Ok(())
        });
        match claimed {
            Ok(()) => {}
            Err(Error::Busy { .. }) if !wait.is_zero() => {
                ids.iter().for_each(|id| self.client.defer(Deferred::ClaimLoad(rank, *id)));
                outcomes = vec![ClaimOutcome::Claimed; ids.len()];
            }
            Err(error) => return Err(error),
        }
        self.count_refusals(&outcomes);
        Ok(outcomes)
    }

    /// A rank's claims of saves with their true shapes, one outcome each.
    ///
    /// # Errors
    /// `Busy` at the deadline: then nothing may be copied; and see [`Self::get`].
    pub fn claim_saves(
        &self,
        wait: Duration,
        rank: u32,
        saves: &[(TransferId, SaveShape)],
    ) -> Result<Vec<ClaimOutcome>> {
        let mut outcomes = Vec::with_capacity(saves.len());
        self.client.with(wait, |index| {
            outcomes.clear();
            for (id, shape) in saves {
                outcomes.push(index.claim_save(rank, *id, shape)?);
            }
            Ok(())
        })?;
        let claimed = outcomes.iter().zip(saves).filter(|(outcome, _)| **outcome == ClaimOutcome::Claimed);
        let bytes = claimed.filter_map(|(_, (_, shape))| shape.nbytes()).sum();
        self.client.count(Counter::SavedBytes, bytes);
        self.count_refusals(&outcomes);
        Ok(outcomes)
    }

    fn count_refusals(&self, outcomes: &[ClaimOutcome]) {
        let refused = outcomes.iter().filter(|o| matches!(o, ClaimOutcome::Refused | ClaimOutcome::TooLarge)).count();
        self.client.count(Counter::ClaimsRefused, refused as u64);
    }

    /// Does each operation now if the lock can be had within `wait`, and else with the next call.
    ///
    /// # Errors
    /// `Busy` only for a zero `wait`, with nothing done; `Closed`.
    pub fn give_back(&self, wait: Duration, operations: &[Deferred]) -> Result<()> {
        let outcome = self.client.with(wait, |index| {
            for operation in operations {
                self.client.perform(index, *operation)?;
            }
            Ok(())
        });
        match outcome {
            Err(Error::Busy { .. }) if !wait.is_zero() => {
                operations.iter().for_each(|operation| self.client.defer(*operation));
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Lets no further rank claim these; returns those that are still open: some rank has claimed them, or may have without
    /// that it is known yet. If the lock is not free in time, all are.
    ///
    /// # Errors
    /// `Busy` only for a zero `wait`; `Closed`.
    pub fn close_unclaimed(&self, wait: Duration, ids: &[TransferId]) -> Result<Vec<TransferId>> {
        let outcome = self.select(wait, ids, |index, id| self.client.close_unclaimed(index, id));
        match outcome {
            Err(Error::Busy { .. }) if !wait.is_zero() => {
                ids.iter().for_each(|id| self.client.defer(Deferred::CloseUnclaimed(*id)));
                Ok(ids.to_vec())
            }
            outcome => outcome,
        }
    }

    /// Those of these transfers that some participating rank has yet to claim.
    ///
    /// # Errors
    /// See [`Self::get`].
    pub fn unclaimed(&self, wait: Duration, ids: &[TransferId]) -> Result<Vec<TransferId>> {
        self.select(wait, ids, |index, id| index.is_unclaimed(id))
    }

    fn select(
        &self,
        wait: Duration,
        ids: &[TransferId],
        mut wanted: impl FnMut(&mut Index<'_>, TransferId) -> Checked<bool>,
    ) -> Result<Vec<TransferId>> {
        let mut selected = Vec::with_capacity(ids.len());
        self.client.with(wait, |index| {
            selected.clear();
            for id in ids {
                if wanted(index, *id)? {
                    selected.push(*id);
                }
            }
            Ok(())
        })?;
        Ok(selected)
    }

    /// Makes every entry of the namespace unfindable, in all processes, and drops them; returns how many. Those that are
    /// held go when they are let go.
    ///
    /// # Errors
    /// `Busy` only if the lock could not be had for the first step: then nothing has changed; `Closed`.
    pub fn flush(&self) -> Result<u64> {
        let row = self.with(PATIENT, |index, namespace| {
            index.raise_epoch(namespace)?;
            Ok(namespace.row)
        })?;
        Ok(self.client.sweep_flushed(row))
    }
}

/// The code of the element type of this name.
///
/// # Errors
/// `InvalidArgument` that lists the names there are.
pub fn dtype_code(name: &str) -> Result<dtype::Dtype> {
    dtype::by_name(name).ok_or_else(|| {
        let names: Vec<_> = dtype::DTYPES.iter().map(|d| d.name).collect();
        Error::InvalidArgument(format!("dtype is {name:?}, but must be one of {}", names.join(", ")))
    })
}

fn entry_state(doing: &'static str, key: &str, found: &'static str, needed: &'static str) -> Error {
    Error::EntryState { doing, key: key.to_owned(), found, needed }
}

fn words(bytes: &[u8; 32]) -> [u64; 4] {
    std::array::from_fn(|i| u64::from_le_bytes(std::array::from_fn(|j| bytes[i * 8 + j])))
}

/// A number for a modality's name; 0 for none.
pub fn modality_number(name: &str) -> u32 {
    if name.is_empty() {
        return 0;
    }
    let hash = name.bytes().fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    hash.max(1)
}
