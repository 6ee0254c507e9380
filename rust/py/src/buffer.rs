//! Other programs' memory, in and out.
#![allow(unsafe_code, reason = "the buffer protocol and other programs' buffers are raw pointers")]

use std::ffi::{c_int, c_void};

use ecpool_core::client::Client;
use ecpool_core::region::Piece;
use ecpool_core::{Error, Result};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::dlpack::LentTensor;
use crate::error::{invalid, to_py};

/// From this many bytes on, other Python threads may run during a copy; below, letting them costs more than it gives.
const LET_OTHERS_RUN: usize = 128 << 10;

/// A pointer that is used by one copy while its buffer is held.
struct CopyPointer(*mut u8);

// SAFETY: the pointer is only passed to the closure that runs the copy, in this same thread, and the buffer behind it is held
// by the caller's frame until the copy is over.
unsafe impl Send for CopyPointer {}

// SAFETY: as above; the closure does not share it with any other thread.
unsafe impl Sync for CopyPointer {}

impl CopyPointer {
    fn get(&self) -> *mut u8 {
        self.0
    }
}

/// A caller's contiguous memory, which stays where it is until this is dropped.
enum Memory<'a> {
    Buffer(PyUntypedBuffer),
    Tensor(LentTensor<'a>),
}

impl<'a> Memory<'a> {
    fn of(object: &'a Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        // SAFETY: the object is valid.
        let is_buffer = unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } != 0;
        if !is_buffer && let Some(tensor) = LentTensor::of(object, what)? {
            return Ok(Self::Tensor(tensor));
        }
        let buffer = PyUntypedBuffer::get(object)?;
        if buffer.is_c_contiguous() {
            return Ok(Self::Buffer(buffer));
        }
        Err(invalid(format!("{what} is not C-contiguous, but must be")))
    }

    fn is_writable(&self) -> bool {
        match self {
            Self::Buffer(buffer) => !buffer.readonly(),
            // This form of the protocol has no word for it: libraries refuse to lend what must not be written to.
            Self::Tensor(_) => true,
        }
    }

    fn begin(&self) -> CopyPointer {
        match self {
            Self::Buffer(buffer) => CopyPointer(buffer.buf_ptr().cast()),
            Self::Tensor(tensor) => CopyPointer(tensor.begin()),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Buffer(buffer) => buffer.len_bytes(),
            Self::Tensor(tensor) => tensor.len(),
        }
    }
}

/// Copies the source's bytes into the pieces, in order.
pub(crate) fn write(py: Python<'_>, client: &Client, pieces: &[Piece], source: &Bound<'_, PyAny>) -> PyResult<()> {
    let memory = Memory::of(source, "source")?;
    let (pointer, len) = (memory.begin(), memory.len());
    copy(py, len, || {
        let region = client.region().ok_or(Error::Closed("a cache on the heap has no data"))?;
        // SAFETY: `memory` keeps `len` bytes readable until after this call. Python code of another thread could write them
        // meanwhile, as it could during any read of a shared buffer; the bytes have no meaning to Rust, and are copied as such.
        unsafe { region.write_pieces_from(pieces, pointer.get(), len) }
    })
}

/// Fills the destination with the bytes of the pieces, in order.
pub(crate) fn read(py: Python<'_>, client: &Client, pieces: &[Piece], destination: &Bound<'_, PyAny>) -> PyResult<()> {
    let memory = Memory::of(destination, "destination")?;
    if !memory.is_writable() {
        return Err(invalid("destination is read-only, but must be writable"));
    }
    let (pointer, len) = (memory.begin(), memory.len());
    copy(py, len, || {
        let region = client.region().ok_or(Error::Closed("a cache on the heap has no data"))?;
        // SAFETY: `memory` is writable and keeps its `len` bytes in place until after this call; see `write` for other threads.
        unsafe { region.read_pieces_into(pieces, pointer.get(), len) }
    })
}

fn copy(py: Python<'_>, len: usize, run: impl FnOnce() -> Result<()> + Send) -> PyResult<()> {
    let outcome = if len >= LET_OTHERS_RUN { py.detach(run) } else { run() };
    outcome.map_err(to_py)
}

/// Fills `view` with the data area of `owner`'s region; the view keeps `owner`, and so the mapping, alive.
///
/// # Safety
/// - `view` is the pointer that Python's buffer protocol passed to `__getbuffer__`.
/// - `start` is valid for reads and writes of `len` bytes for as long as `owner` lives.
pub(crate) unsafe fn fill_view(
    owner: Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    start: *mut u8,
    len: u64,
) -> PyResult<()> {
    let len = ffi::Py_ssize_t::try_from(len).map_err(|_| PyBufferError::new_err("the data area is too large"))?;
    // SAFETY: `view` is valid by this function's contract; `PyBuffer_FillInfo` fills it, and takes a reference to `owner` that is
    // given back when the view is released.
    let status = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start.cast::<c_void>(), len, 0, flags) };
    if status == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}
