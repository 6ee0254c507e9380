//! `EmbeddingCache` for Python.

use std::sync::Arc;
use std::time::Duration;

use ecpool_core::cache::{Item, dtype_code, modality_number};
use ecpool_core::client::{Client, Deferred};
use ecpool_core::counters::Counter;
use ecpool_core::index::{BeginSave, ClaimOutcome, Expected, MAX_DIMS, SaveShape, SaveSkip};
use ecpool_core::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::convert::{Id, Rank, Ranks, counters_dict, ids_of, relay};
use crate::entry::{CacheEntry, Transfer};
use crate::error::{invalid, to_py};
use crate::region::Region;

/// Slots of a cache on the heap: one an entry, up to this many.
const MOST_HEAP_SLOTS: u64 = 1 << 22;
const SPARE_HEAP_SLOTS: u64 = 64;

/// Encoder outputs by key: which blocks hold them, what keeps them there, what goes when room is needed (FIFO).
///
/// EmbeddingCache(num_blocks) keeps its books on the heap of this process, as vLLM's class of this name does, whose methods
/// get, alloc, mark_ready, pin and unpin it has. EmbeddingCache(region=region, namespace="...") keeps them in a region, where
/// other processes see them; its holds are those of that region's client.
///
/// Safe to call from any thread. On a region each call waits for the lock no longer than `deadline` seconds: then lookups are
/// misses (get, alloc and pin raise PoolBusyError), and what gives back is done by the next call.
#[pyclass(frozen, module = "ecpool._native")]
pub(crate) struct EmbeddingCache {
    cache: ecpool_core::cache::EmbeddingCache,
    deadline: Duration,
}

impl EmbeddingCache {
    /// The cache itself.
    pub(crate) fn core(&self) -> &ecpool_core::cache::EmbeddingCache {
        &self.cache
    }

    /// How long a call may wait for a region's lock.
    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    fn give_back(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, action: impl Fn(u64) -> Deferred) -> PyResult<()> {
        self.give_back_ids(py, &ids_of(ids)?, action)
    }

    fn give_back_ids(&self, py: Python<'_>, ids: &[u64], action: impl Fn(u64) -> Deferred) -> PyResult<()> {
        let operations: Vec<Deferred> = ids.iter().copied().map(action).collect();
        if operations.is_empty() {
            return Ok(());
        }
        relay(py, self.deadline, |wait| self.cache.give_back(wait, &operations))
    }

    /// What a step path makes of a lock that was not free in time: nothing came of it, and the engine goes on.
    fn or_busy<T>(&self, outcome: PyResult<T>, py: Python<'_>) -> PyResult<Option<T>> {
        match outcome {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_instance_of::<pyo3::exceptions::PyTimeoutError>(py) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn heap_client(num_blocks: u64, block_size: u64) -> Result<Client> {
    let blocks = u32::try_from(num_blocks).ok().filter(|blocks| *blocks <= 1 << 31);
    let blocks = blocks.ok_or_else(|| Error::invalid("num_blocks", num_blocks, "at most 2^31"))?;
    if block_size == 0 {
        return Err(Error::invalid("block_size", block_size, "at least 1"));
    }
    let slots = (num_blocks + SPARE_HEAP_SLOTS).min(MOST_HEAP_SLOTS) as u32;
    Client::on_heap(blocks, slots, block_size)
}

fn deadline_of(seconds: f64) -> PyResult<Duration> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(deadline) if !deadline.is_zero() && deadline <= Duration::from_secs(3600) => Ok(deadline),
        _ => Err(invalid(format!("deadline is {seconds}, but must be more than 0 and at most 3600 seconds"))),
    }
}

fn count_of(what: &str, value: i64) -> PyResult<u64> {
    u64::try_from(value).map_err(|_| invalid(format!("{what} is {value}, but must be at least 0")))
}

fn save_shape(sizes: &[i64], dtype: &str) -> PyResult<SaveShape> {
    let sizes: Vec<u64> = sizes.iter().map(|size| count_of("a size of the shape", *size)).collect::<PyResult<_>>()?;
    let dtype = dtype_code(dtype).map_err(to_py)?;
    SaveShape::new(&sizes, dtype)
        .ok_or_else(|| invalid(format!("shape has {} dimensions, but at most {MAX_DIMS} are allowed", sizes.len())))
}

fn outcome_name(outcome: ClaimOutcome) -> &'static str {
    match outcome {
        ClaimOutcome::Claimed => "claimed",
        ClaimOutcome::Repeated => "repeated",
        ClaimOutcome::Refused => "refused",
        ClaimOutcome::TooLarge => "too_large",
    }
}

fn skip_name(skip: SaveSkip) -> &'static str {
    match skip {
        SaveSkip::Exists => "exists",
        SaveSkip::TooLarge => "too_large",
        SaveSkip::NoRoom => "no_room",
        SaveSkip::Empty => "empty",
    }
}

#[pymethods]
impl EmbeddingCache {
    /// num_blocks: blocks of a cache on the heap; leave it out with a region.
    /// region: the Region whose index is used, as that Region's client.
    /// namespace: any text; keys of different namespaces have nothing in common.
    /// block_size: bytes of a block of a cache on the heap; a region has its own.
    /// deadline: seconds that a call may wait for a region's lock.
    /// Raises InvalidArgumentError, and ClosedError for a closed region.
    #[new]
    #[pyo3(signature = (num_blocks=None, *, region=None, namespace="", block_size=16384, deadline=0.02))]
    fn new(
        num_blocks: Option<i64>,
        region: Option<&Bound<'_, Region>>,
        namespace: &str,
        block_size: i64,
        deadline: f64,
    ) -> PyResult<Self> {
        let deadline = deadline_of(deadline)?;
        let client = match (num_blocks, region) {
            (Some(blocks), None) => {
                let (blocks, block_size) = (count_of("num_blocks", blocks)?, count_of("block_size", block_size)?);
                Arc::new(heap_client(blocks, block_size).map_err(to_py)?)
            }
            (None, Some(region)) => region.get().open_client()?,
            _ => return Err(invalid("EmbeddingCache needs either num_blocks or region, and not both")),
        };
        Ok(Self { cache: ecpool_core::cache::EmbeddingCache::new(client, namespace), deadline })
    }

    /// Blocks in all, of every namespace.
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.cache.num_blocks()
    }

    /// Bytes of a block.
    #[getter]
    fn block_size(&self) -> u64 {
        self.cache.block_size()
    }

    /// The entry of this key, ready or being written, or None. Raises PoolBusyError.
    fn get(slf: &Bound<'_, Self>, key: &str) -> PyResult<Option<CacheEntry>> {
        let this = slf.get();
        let found = relay(slf.py(), this.deadline, |wait| this.cache.get(wait, key))?;
        Ok(found.map(|place| CacheEntry::new(slf.clone().unbind(), place)))
    }

    /// Takes n_blocks blocks for key, evicting what can go, oldest first. The entry is not ready until mark_ready.
    ///
    /// Returns None, and evicts nothing, where too little is free or evictable. Raises EntryStateError if the key has an entry,
    /// TooLargeError for more blocks than there are, InvalidArgumentError for a negative number, PoolBusyError.
    fn alloc(slf: &Bound<'_, Self>, key: &str, n_blocks: i64) -> PyResult<Option<CacheEntry>> {
        let this = slf.get();
        let blocks = count_of("n_blocks", n_blocks)?;
        let entry = relay(slf.py(), this.deadline, |wait| this.cache.alloc(wait, key, blocks))?;
        Ok(entry.map(|place| CacheEntry::new(slf.clone().unbind(), place)))
    }

    /// This client has filled the entry: it can be read, and evicted. Raises KeyNotFoundError, EntryStateError.
    fn mark_ready(&self, py: Python<'_>, key: &str) -> PyResult<()> {
        relay(py, self.deadline, |wait| self.cache.mark_ready(wait, key))
    }

    /// Keeps a ready entry from being evicted until as many unpins. It does not make its bytes consistent: nobody writes a
    /// ready entry. Raises KeyNotFoundError, EntryStateError if it is not ready, PoolBusyError.
    fn pin(&self, py: Python<'_>, key: &str) -> PyResult<()> {
        relay(py, self.deadline, |wait| self.cache.pin(wait, key))
    }

    /// Ends one of this client's pins; the last one puts the entry at the end of the eviction queue.
    /// Raises KeyNotFoundError, EntryStateError if this client has no pin on it.
    fn unpin(&self, py: Python<'_>, key: &str) -> PyResult<()> {
        relay(py, self.deadline, |wait| self.cache.unpin(wait, key))
    }

    /// This client will not fill the entry: its blocks return. Raises KeyNotFoundError, EntryStateError.
    fn discard(&self, py: Python<'_>, key: &str) -> PyResult<()> {
        relay(py, self.deadline, |wait| self.cache.discard(wait, key))
    }

    /// Whether any entry is being written, pinned, leased or loaded. Raises PoolBusyError.
    fn has_held_entries(&self, py: Python<'_>) -> PyResult<bool> {
        relay(py, self.deadline, |wait| self.cache.has_held_entries(wait))
    }

    /// Whether a ready entry of this key is there; False too where the lock cannot be had.
    fn contains(&self, py: Python<'_>, key: &str) -> PyResult<bool> {
        let found = relay(py, self.deadline, |wait| self.cache.contains(wait, key));
        Ok(self.or_busy(found, py)?.unwrap_or(false))
    }

    /// Promises a ready entry: until the lease ends, or its load does, the entry is neither evicted nor flushed nor replaced.
    ///
    /// rows: the rows expected, or -1 for any; dtype: the element type expected, or None for any; modality: the modality expected,
    /// or "" for any. An entry that has others goes, and None is returned; so it is where there is none, and where the lock cannot
    /// be had. An entry that was stored without a modality fits any.
    #[pyo3(
        signature = (key, *, rows=-1, dtype=None, modality=""),
        text_signature = "(self, key, *, rows=-1, dtype=None, modality='')"
    )]
    fn lease(
        &self,
        py: Python<'_>,
        key: &str,
        rows: i64,
        dtype: Option<&str>,
        modality: &str,
    ) -> PyResult<Option<Transfer>> {
        let expected = Expected {
            rows: u64::try_from(rows).ok(),
            dtype: dtype.map(dtype_code).transpose().map_err(to_py)?.map(|d| d.code),
            modality: (!modality.is_empty()).then(|| modality_number(modality)),
        };
        let lease = relay(py, self.deadline, |wait| self.cache.lease(wait, key, &expected));
        Ok(self.or_busy(lease, py)?.flatten().map(Transfer::new))
    }

    /// Ends leases that were not dispatched; the eviction order stays as it was. Other ids change nothing.
    fn end_leases(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.give_back(py, ids, Deferred::EndLease)
    }

    /// Makes leases the loads that they promised. ranks: the ranks that take part, one bit each; a load ends when all of
    /// them have completed it. If the lock cannot be had the next call does it; the load can be copied all the same.
    #[pyo3(signature = (ids, *, ranks))]
    fn dispatch_loads(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, ranks: Ranks) -> PyResult<()> {
        let ids = ids_of(ids)?;
        self.give_back_ids(py, &ids, |id| Deferred::DispatchLoad(id, ranks.0))?;
        self.cache.client().count(Counter::Loads, ids.len() as u64);
        Ok(())
    }

    /// Takes blocks for an item that ranks will write, evicting what can go.
    ///
    /// rows: the item's rows. row_bytes: bytes of a row as far as the caller knows; what was seen before for this modality
    /// in this namespace is preferred. ranks: the ranks that will write, one bit each; 0 is not allowed here.
    /// Returns the Transfer, or why not: "exists", "too_large" (for the whole pool), "no_room", "empty", "busy" (the lock).
    #[pyo3(signature = (key, *, rows, row_bytes, modality="", ranks=Ranks(1)), text_signature = "($self, key, *, rows, row_bytes, modality='', ranks=1)")]
    fn begin_save<'py>(
        &self,
        py: Python<'py>,
        key: &str,
        rows: i64,
        row_bytes: i64,
        modality: &str,
        ranks: Ranks,
    ) -> PyResult<Bound<'py, PyAny>> {
        if ranks.0 == 0 {
            return Err(invalid("ranks is 0, but at least one rank must write"));
        }
        let (rows, row_bytes) = (rows.max(0) as u64, count_of("row_bytes", row_bytes)?);
        let item = Item { key, rows, row_bytes, modality, participants: ranks.0 };
        let begun = relay(py, self.deadline, |wait| self.cache.begin_save(wait, &item));
        match self.or_busy(begun, py)? {
            Some(BeginSave::Begun(info)) => Ok(Bound::new(py, Transfer::new(info))?.into_any()),
            Some(BeginSave::Skipped(skip)) => Ok(PyString::intern(py, skip_name(skip)).into_any()),
            None => Ok(PyString::intern(py, "busy").into_any()),
        }
    }

    /// A rank is about to copy out of these entries: "claimed", "repeated" (it claimed before) or "refused" (do not copy), one each.
    fn claim_loads(&self, py: Python<'_>, rank: Rank, ids: &Bound<'_, PyAny>) -> PyResult<Vec<&'static str>> {
        let ids = ids_of(ids)?;
        let outcomes = relay(py, self.deadline, |wait| self.cache.claim_loads(wait, rank.0, &ids))?;
        Ok(outcomes.into_iter().map(outcome_name).collect())
    }

    /// A rank is about to copy items of these (id, shape, dtype) into their entries: "claimed", or do not copy: "repeated",
    /// "refused", "too_large" (more bytes than the entry has blocks), "busy" (the lock), one each.
    fn claim_saves(
        &self,
        py: Python<'_>,
        rank: Rank,
        saves: Vec<(Id, Vec<i64>, String)>,
    ) -> PyResult<Vec<&'static str>> {
        let shapes = saves.iter().map(|(id, sizes, dtype)| Ok((id.0, save_shape(sizes, dtype)?)));
        let shapes = shapes.collect::<PyResult<Vec<_>>>()?;
        let outcomes = relay(py, self.deadline, |wait| self.cache.claim_saves(wait, rank.0, &shapes));
        match self.or_busy(outcomes, py)? {
            Some(outcomes) => Ok(outcomes.into_iter().map(outcome_name).collect()),
            None => Ok(vec!["busy"; shapes.len()]),
        }
    }

    /// A rank's copies are over, well or not. The last rank makes a save ready or ends a load; a failed save goes.
    /// Unknown, late and repeated ids change nothing.
    #[pyo3(signature = (rank, ids, *, ok=true))]
    fn complete(&self, py: Python<'_>, rank: Rank, ids: &Bound<'_, PyAny>, ok: bool) -> PyResult<()> {
        let ids = ids_of(ids)?;
        if !ok {
            self.cache.client().count(Counter::CopiesFailed, ids.len() as u64);
        }
        self.give_back_ids(py, &ids, |id| Deferred::Complete(rank.0, id, ok))
    }

    /// Records the checksums of saves, as (id, checksum), before they are completed. Unknown ids change nothing.
    fn set_checksums(&self, py: Python<'_>, checksums: Vec<(Id, u64)>) -> PyResult<()> {
        let operations: Vec<Deferred> =
            checksums.into_iter().map(|(id, sum)| Deferred::SetChecksum(id.0, sum)).collect();
        relay(py, self.deadline, |wait| self.cache.give_back(wait, &operations))
    }

    /// The bytes of a leased entry were compared with its checksum. If they do not fit, the entry goes and the lease ends.
    #[pyo3(signature = (id, *, fits))]
    fn confirm(&self, py: Python<'_>, id: Id, fits: bool) -> PyResult<()> {
        relay(py, self.deadline, |wait| self.cache.give_back(wait, &[Deferred::Confirm(id.0, fits)]))
    }

    /// Whether another client is writing an entry of this key. Raises PoolBusyError where the lock cannot be had, so that who
    /// asks often can pause.
    fn is_written_elsewhere(&self, py: Python<'_>, key: &str) -> PyResult<bool> {
        relay(py, self.deadline, |wait| self.cache.is_written_elsewhere(wait, key))
    }

    /// Drops saves of which no rank knows yet.
    fn withdraw(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.give_back(py, ids, Deferred::Withdraw)
    }

    /// Lets no further rank claim these transfers; returns the ids of those still open, since some rank has claimed them, or
    /// may have: a load is left as it is while a claim of this client's group is put off. Ask again for those.
    fn close_unclaimed(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
        let ids = ids_of(ids)?;
        relay(py, self.deadline, |wait| self.cache.close_unclaimed(wait, &ids))
    }

    /// Those of these transfers that some participating rank has yet to claim; all of them where the lock cannot be had.
    fn unclaimed(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
        let ids = ids_of(ids)?;
        let unclaimed = relay(py, self.deadline, |wait| self.cache.unclaimed(wait, &ids));
        Ok(self.or_busy(unclaimed, py)?.unwrap_or(ids))
    }

    /// Declares saves ready without a word from any rank (completion by steps).
    fn finish_saves(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.give_back(py, ids, Deferred::FinishSave)
    }

    /// Declares loads over without a word from any rank (completion by steps).
    fn finish_loads(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.give_back(py, ids, Deferred::FinishLoad)
    }

    /// Makes everything stored in this namespace so far unfindable, in all processes; returns how many entries went.
    /// Entries that are held go when they are let go. Raises PoolBusyError if the lock cannot be had in 2 s: then nothing changed.
    fn flush(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.cache.flush()).map_err(to_py)
    }

    /// Sums over the whole index, by name. Raises PoolBusyError.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.cache.client().stats()).map_err(to_py)?;
        crate::region::stats_dict(py, &stats)
    }

    /// This client's counters, by name. Takes no lock.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        counters_dict(py, &self.cache.client().counters())
    }

    /// Calls that wait for one that gets the lock: they gave something back while it was not free. Takes no lock itself.
    #[getter]
    fn num_deferred(&self) -> u64 {
        self.cache.client().deferred_len()
    }

    /// Checks every invariant of the index; returns what is wrong, in words. Slow: for tests and tools.
    fn check(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        py.detach(|| self.cache.client().violations()).map_err(to_py)
    }

    fn __repr__(&self) -> String {
        format!("EmbeddingCache(num_blocks={}, block_size={})", self.cache.num_blocks(), self.cache.block_size())
    }
}
