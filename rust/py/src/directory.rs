//! What lies in a directory of regions, without attaching to any.

use std::path::PathBuf;

use ecpool_core::region::{Lifetime, Region, State};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error::to_py;

fn lifetime_name(lifetime: Lifetime) -> &'static str {
    match lifetime {
        Lifetime::Private { .. } => "private",
        Lifetime::Shared => "shared",
        Lifetime::Persistent => "persistent",
    }
}

/// The regions in a directory (default: the user's own) as dicts: name, layout, path, bytes, lifetime (or None), state
/// ("alive", "busy", "idle", "dead") and clients. Attaches to none of them. Raises RegionError.
#[pyfunction]
#[pyo3(signature = (directory=None))]
pub(crate) fn scan_regions(py: Python<'_>, directory: Option<PathBuf>) -> PyResult<Bound<'_, PyList>> {
    let found = py.detach(|| Region::scan(directory.as_deref())).map_err(to_py)?;
    let list = PyList::empty(py);
    for region in found {
        let (state, clients) = match region.state {
            State::Alive { clients } => ("alive", clients),
            State::Busy => ("busy", 0),
            State::Idle => ("idle", 0),
            State::Dead => ("dead", 0),
        };
        let dict = PyDict::new(py);
        dict.set_item("name", region.name)?;
        dict.set_item("layout", region.layout)?;
        dict.set_item("path", region.path.display().to_string())?;
        dict.set_item("bytes", region.bytes)?;
        dict.set_item("lifetime", region.lifetime.map(lifetime_name))?;
        dict.set_item("state", state)?;
        dict.set_item("clients", clients)?;
        list.append(dict)?;
    }
    Ok(list)
}

/// Removes the files of regions that nobody uses any more; persistent ones stay. Returns their names. Raises RegionError.
#[pyfunction]
#[pyo3(signature = (directory=None))]
pub(crate) fn remove_dead_regions(py: Python<'_>, directory: Option<PathBuf>) -> PyResult<Vec<String>> {
    py.detach(|| Region::remove_dead(directory.as_deref())).map_err(to_py)
}

/// Removes the files of the region of this name, persistent or not. Raises InvalidArgumentError if somebody uses it,
/// RegionError if there is none.
#[pyfunction]
#[pyo3(signature = (name, directory=None))]
pub(crate) fn remove_region(py: Python<'_>, name: &str, directory: Option<PathBuf>) -> PyResult<()> {
    py.detach(|| Region::remove(directory.as_deref(), name)).map_err(to_py)
}
