//! `StepTracker` for Python.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::{invalid, to_py};

/// The clock of engine steps: what was added comes back after N steps, or as soon as its request finishes.
///
/// Behaves as vLLM 0.26's class of this name. Each added key comes back exactly once. O(1) for each key added
/// and for each key returned. Safe to call from several threads, though steps only make sense from one.
#[pyclass(frozen, module = "ecpool._native")]
pub(crate) struct StepTracker {
    tracker: Mutex<ecpool_core::tracker::StepTracker<Py<PyString>>>,
}

impl StepTracker {
    fn lock(&self) -> MutexGuard<'_, ecpool_core::tracker::StepTracker<Py<PyString>>> {
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
        let tracker = ecpool_core::tracker::StepTracker::new(delay).map_err(to_py)?;
        Ok(Self { tracker: Mutex::new(tracker) })
    }

    /// Adds a key on behalf of a request. The same key can be added any number of times.
    fn add(&self, mm_hash: Py<PyString>, request_id: &str) {
        self.lock().add(mm_hash, request_id);
    }

    /// Ends a step; returns the keys of the finished requests, then those added max_concurrent_batches steps ago.
    fn step(&self, finished_req_ids: &Bound<'_, PyAny>) -> PyResult<Vec<Py<PyString>>> {
        let finished: Vec<Bound<'_, PyString>> =
            finished_req_ids.try_iter()?.map(|id| Ok(id?.cast_into::<PyString>()?)).collect::<PyResult<_>>()?;
        let finished: Vec<&str> = finished.iter().map(|id| id.to_str()).collect::<PyResult<_>>()?;
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
