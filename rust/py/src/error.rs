//! The one table from core errors to Python exceptions.

use ecpool_core::Error;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The name of the class in `ecpool.errors` that this error becomes.
fn class_name(error: &Error) -> &'static str {
    match error {
        Error::InvalidArgument(_) => "InvalidArgumentError",
        Error::NoSpace(_) => "NoSpaceError",
        Error::RegionFormat { .. } | Error::Unusable(_) => "RegionFormatError",
        Error::Busy { .. } | Error::ClientsFull { .. } | Error::Exhausted { .. } => "PoolBusyError",
        Error::Closed(_) => "ClosedError",
        Error::KeyNotFound { .. } => "KeyNotFoundError",
        Error::EntryState { .. } => "EntryStateError",
        Error::TooLarge { .. } => "TooLargeError",
        _ => "RegionError",
    }
}

/// The Python exception for a core error.
pub(crate) fn to_py(error: Error) -> PyErr {
    let message = error.to_string();
    Python::attach(|py| match exception_class(py, class_name(&error)) {
        Ok(class) => PyErr::from_type(class, message),
        Err(import_error) => import_error,
    })
}

fn exception_class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("ecpool.errors").map(Bound::unbind))?;
    let class = module.bind(py).getattr(name)?;
    class.cast_into::<PyType>().map_err(|_| PyException::new_err(format!("ecpool.errors.{name} is not a class")))
}

/// An `InvalidArgumentError`.
pub(crate) fn invalid(message: impl Into<String>) -> PyErr {
    to_py(Error::InvalidArgument(message.into()))
}
