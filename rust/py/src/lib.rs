//! The Python face of `ecpool-core`: thin classes, one error table, with other programs' memory as the only `unsafe`.

mod buffer;
mod cache;
mod convert;
#[cfg(feature = "crash-points")]
mod crash;
mod directory;
mod dlpack;
mod entry;
mod error;
mod region;
mod tracker;

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The Rust core of ecpool; import its classes from `ecpool`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("LAYOUT_VERSION", ecpool_core::geometry::LAYOUT_VERSION)?;
    let dtypes = PyDict::new(py);
    for dtype in ecpool_core::dtype::DTYPES {
        dtypes.set_item(dtype.name, dtype.size)?;
    }
    module.add("DTYPES", dtypes)?;
    module.add_class::<region::Region>()?;
    module.add_class::<cache::EmbeddingCache>()?;
    module.add_class::<entry::CacheEntry>()?;
    module.add_class::<entry::Transfer>()?;
    module.add_class::<tracker::StepTracker>()?;
    #[cfg(feature = "crash-points")]
    module.add_function(wrap_pyfunction!(crash::arm_crash, module)?)?;
    module.add_function(wrap_pyfunction!(directory::scan_regions, module)?)?;
    module.add_function(wrap_pyfunction!(directory::remove_dead_regions, module)?)?;
    module.add_function(wrap_pyfunction!(directory::remove_region, module)?)?;
    Ok(())
}
