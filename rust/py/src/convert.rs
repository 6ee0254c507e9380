//! Small conversions that several classes share.

use std::time::Duration;

use ecpool_core::{Error, Result};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::{invalid, to_py};

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

/// A transfer's id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Id(pub(crate) u64);

/// A rank within an engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rank(pub(crate) u32);

/// Ranks of an engine, one bit each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranks(pub(crate) u64);

impl<'a, 'py> FromPyObject<'a, 'py> for Id {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        in_range("an id", object, object.extract(), "from 1 to 2^64 - 1").map(Self)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Rank {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        in_range("rank", object, object.extract(), "from 0 to 63").map(Self)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Ranks {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        in_range("ranks", object, object.extract(), "64 bits, one for each rank").map(Self)
    }
}

/// The number, or an `InvalidArgumentError` in place of Python's `OverflowError`, which is no `ValueError`.
fn in_range<T>(what: &str, object: Borrowed<'_, '_, PyAny>, number: PyResult<T>, allowed: &str) -> PyResult<T> {
    number.map_err(|error| match error.is_instance_of::<PyOverflowError>(object.py()) {
        true => invalid(format!("{what} is {}, but must be {allowed}", object.as_any())),
        false => error,
    })
}

/// Collects an iterable of ids. An iterator is used up by it: collect once.
pub(crate) fn ids_of(ids: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    ids.try_iter()?.map(|id| Ok(id?.extract::<Id>()?.0)).collect()
}
