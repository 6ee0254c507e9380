//! Small conversions that several classes share.

use std::time::Duration;

use ecpool_core::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::to_py;

/// Tries `operation` at once while other Python threads stand still, and only if the lock is contended lets them run and waits:
/// giving the interpreter lock away each time costs far more than the operation.
pub(crate) fn relay<T: Send>(
    py: Python<'_>,
    deadline: Duration,
    operation: impl Fn(Duration) -> Result<T> + Send + Sync,
) -> PyResult<T> {
    match operation(Duration::ZERO) {
        Err(Error::Busy { .. }) => py.detach(|| operation(deadline)),
        outcome => outcome,
    }
    .map_err(to_py)
}

/// Extents as a tuple of `(first_block, num_blocks)`.
pub(crate) fn extents_tuple<'py>(py: Python<'py>, extents: &[(u32, u32)]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, extents.iter().copied())
}

/// Pairs of name and number as a dict.
pub(crate) fn counters_dict<'py>(py: Python<'py>, counters: &[(&'static str, u64)]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in counters {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// Collects an iterable of ids.
pub(crate) fn ids_of(ids: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Ok(ids) = ids.extract::<Vec<u64>>() {
        return Ok(ids);
    }
    ids.try_iter()?.map(|id| id?.extract::<u64>()).collect()
}
