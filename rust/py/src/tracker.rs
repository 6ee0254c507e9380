//! `StepTracker` for Python.

use std::hash::{Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ecpool_core::tracker::OwnHash;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySet, PyString};

use crate::error::{invalid, to_py};

/// A request's id as Python has it, with the hash that Python keeps in the string: nothing is copied or hashed here.
struct RequestId {
    text: Py<PyString>,
    hash: u64,
}

impl RequestId {
    fn new(text: &Bound<'_, PyString>) -> PyResult<Self> {
        Ok(Self { hash: text.hash()? as u64, text: text.clone().unbind() })
    }
}

impl PartialEq for RequestId {
    fn eq(&self, other: &Self) -> bool {
        self.text.is(&other.text)
            || self.hash == other.hash
                && Python::attach(|py| match (self.text.to_str(py), other.text.to_str(py)) {
                    (Ok(own), Ok(others)) => own == others,
                    _ => false,
                })
    }
}

impl Eq for RequestId {}

impl Hash for RequestId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// Collects an iterable of strings. Most steps end no request, and keys mostly come in a list: neither needs an iterator.
fn strings<'py, T>(
    iterable: &Bound<'py, PyAny>,
    make: impl Fn(Bound<'py, PyString>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let string = |each: Bound<'py, PyAny>| make(each.cast_into::<PyString>()?);
    if iterable.is_exact_instance_of::<PyList>() {
        return iterable.cast::<PyList>()?.iter().map(string).collect();
    }
    let size = if iterable.is_exact_instance_of::<PySet>() { Some(iterable.cast::<PySet>()?.len()) } else { None };
    if size == Some(0) {
        return Ok(Vec::new());
    }
    let mut strings = Vec::with_capacity(size.unwrap_or(0));
    for each in iterable.try_iter()? {
        strings.push(string(each?)?);
    }
    Ok(strings)
}

type Tracker = ecpool_core::tracker::StepTracker<Py<PyString>, RequestId, OwnHash>;

/// The clock of engine steps: what was added comes back after N steps, or as soon as its request finishes.
///
/// Behaves as vLLM 0.26's class of this name. Each added key comes back exactly once. O(1) for each key added
/// and for each key returned. Safe to call from several threads, though steps only make sense from one.
#[pyclass(frozen, module = "ecpool._native")]
pub(crate) struct StepTracker {
    tracker: Mutex<Tracker>,
}

impl StepTracker {
    fn lock(&self) -> MutexGuard<'_, Tracker> {
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl StepTracker {
    /// max_concurrent_batches: steps after which a key expires, at least 1; else InvalidArgumentError.
    #[new]
    fn new(max_concurrent_batches: i64) -> PyResult<Self> {
        let delay = usize::try_from(max_concurrent_batches).map_err(|_| {
            invalid(format!("max_concurrent_batches is {max_concurrent_batches}, but must be at least 1"))
        })?;
        let tracker = Tracker::new(delay).map_err(to_py)?;
        Ok(Self { tracker: Mutex::new(tracker) })
    }

    /// Adds a key on behalf of a request. The same key can be added any number of times.
    fn add(&self, mm_hash: Py<PyString>, request_id: &Bound<'_, PyString>) -> PyResult<()> {
        let request = RequestId::new(request_id)?;
        self.lock().add(mm_hash, request);
        Ok(())
    }

    /// Adds several keys on behalf of one request, in their order: `add` for each, in one call.
    fn add_many(&self, mm_hashes: &Bound<'_, PyAny>, request_id: &Bound<'_, PyString>) -> PyResult<()> {
        let keys = strings(mm_hashes, |key| Ok(key.unbind()))?;
        let request = RequestId::new(request_id)?;
        self.lock().add_many(keys, request);
        Ok(())
    }

    /// Ends a step; returns the keys of the finished requests, then those added max_concurrent_batches steps ago.
    fn step(&self, finished_req_ids: &Bound<'_, PyAny>) -> PyResult<Vec<Py<PyString>>> {
        let finished = strings(finished_req_ids, |id| RequestId::new(&id))?;
        Ok(self.lock().step(finished))
    }

    /// Returns every key that still waits, and forgets all.
    fn drain_all(&self) -> Vec<Py<PyString>> {
        self.lock().drain_all()
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }

    fn __repr__(&self) -> String {
        format!("StepTracker(waiting={})", self.lock().len())
    }
}
