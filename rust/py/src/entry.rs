//! What Python gets to see of one entry or transfer.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use ecpool_core::client::Client;
use ecpool_core::dtype;
use ecpool_core::index::{EntryInfo, EntryPlace};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::cache::EmbeddingCache;
use crate::convert::{extents_tuple, relay};

/// One entry as `alloc` or `get` found it.
///
/// Equal to any other object for the same entry. `ready` and `evictable` ask the cache each time; once the
/// entry was evicted both are False for good, whatever is stored under its key later.
#[pyclass(frozen, module = "ecpool._native")]
pub(crate) struct CacheEntry {
    cache: Py<EmbeddingCache>,
    place: EntryPlace,
}

impl CacheEntry {
    pub(crate) fn new(cache: Py<EmbeddingCache>, place: EntryPlace) -> Self {
        Self { cache, place }
    }

    fn client(&self) -> &Arc<Client> {
        self.cache.get().core().client()
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.client(), other.client()) && self.place.handle == other.place.handle
    }
}

#[pymethods]
impl CacheEntry {
    /// The numbers of the entry's blocks, in the order in which its bytes fill them. Made anew at each call: O(blocks).
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let ids: Vec<u32> = self.place.extents.as_slice().iter().flat_map(|(first, len)| *first..first + len).collect();
        PyTuple::new(py, ids)
    }

    /// The entry's runs of blocks as (first_block, num_blocks), in the order in which its bytes fill them.
    #[getter]
    fn extents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        extents_tuple(py, self.place.extents.as_slice())
    }

    /// Whether the entry's bytes can be read. Raises PoolBusyError if a region's lock cannot be had.
    #[getter]
    fn ready(&self, py: Python<'_>) -> PyResult<bool> {
        let cache = self.cache.get();
        relay(py, cache.deadline(), |wait| cache.core().is_ready(wait, self.place.handle))
    }

    /// Whether the entry could be evicted now. Raises PoolBusyError if a region's lock cannot be had.
    #[getter]
    fn evictable(&self, py: Python<'_>) -> PyResult<bool> {
        let cache = self.cache.get();
        relay(py, cache.deadline(), |wait| cache.core().is_evictable(wait, self.place.handle))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| self.is_same(other.get()))
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (Arc::as_ptr(self.client()), self.place.handle).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let extents = self.place.extents.as_slice();
        format!("CacheEntry(num_blocks={}, extents={extents:?})", self.place.num_blocks)
    }
}

type LoadParts<'py> = (u64, Bound<'py, PyTuple>, Bound<'py, PyTuple>, &'static str);

/// A lease, load or save, as the scheduler got it: everything that a worker must know to copy.
#[pyclass(frozen, module = "ecpool._native")]
pub(crate) struct Transfer {
    info: EntryInfo,
}

impl Transfer {
    pub(crate) fn new(info: EntryInfo) -> Self {
        Self { info }
    }
}

#[pymethods]
impl Transfer {
    /// The id under which ranks claim and complete it; greater than 0, and never used again.
    #[getter]
    fn id(&self) -> u64 {
        self.info.id
    }

    /// Where the bytes lie: runs of blocks as (first_block, num_blocks), in the order in which the item fills them.
    #[getter]
    fn extents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        extents_tuple(py, self.info.extents.as_slice())
    }

    /// Blocks in all.
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.info.num_blocks
    }

    /// Bytes of the item; 0 for a save that no rank has claimed yet.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.info.nbytes
    }

    /// The item's sizes; empty for a save that no rank has claimed yet.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.info.shape[..usize::from(self.info.ndim)])
    }

    /// The element type's name in torch, such as "bfloat16"; empty for a save that no rank has claimed yet.
    #[getter]
    fn dtype(&self) -> &'static str {
        dtype::by_code(self.info.dtype).map_or("", |d| d.name)
    }

    /// The checksum that the bytes must be compared with before they are used (`Region.checksum`, `EmbeddingCache.confirm`),
    /// or None where that is not needed: the item has none, or it was done since the pool was last without clients.
    #[getter]
    fn unverified(&self) -> Option<u64> {
        self.info.unverified
    }

    /// `(id, extents, shape, dtype)`: what a worker has to know of a load, in one call.
    #[getter]
    fn as_load<'py>(&self, py: Python<'py>) -> PyResult<LoadParts<'py>> {
        Ok((self.id(), self.extents(py)?, self.shape(py)?, self.dtype()))
    }

    /// `(id, extents)`: what a worker has to know of a save, in one call.
    #[getter]
    fn as_save<'py>(&self, py: Python<'py>) -> PyResult<(u64, Bound<'py, PyTuple>)> {
        Ok((self.id(), self.extents(py)?))
    }

    fn __repr__(&self) -> String {
        format!("Transfer(id={}, extents={:?})", self.info.id, self.info.extents.as_slice())
    }
}
