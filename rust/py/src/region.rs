//! `Region` for Python.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ecpool_core::client::{Client, Introduction};
use ecpool_core::geometry::{Geometry, GeometryRequest};
use ecpool_core::index::{IndexStats, Role, label_of};
use ecpool_core::region::{self as core, Lifetime, OpenRequest, Phase, Piece};
use ecpool_core::{Error, Result};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::buffer;
use crate::convert::counters_dict;
use crate::error::{invalid, to_py};

/// One client's attachment to a region: a file of shared memory that holds encoder outputs and the books about them.
///
/// Make one with Region.open or Region.attach. Each is a client of its own, also if one process makes several. Its data area
/// is a buffer: torch.frombuffer(region, dtype=torch.uint8) sees the bytes, block i at i * block_size, and keeps the mapping
/// alive, also after close(). Safe to call from any thread; in a forked child every call raises ClosedError.
#[pyclass(frozen, module = "ecpool._native", weakref)]
pub(crate) struct Region {
    client: Arc<Client>,
    name: String,
}

impl Region {
    /// The client, if the region is still open.
    pub(crate) fn open_client(&self) -> PyResult<Arc<Client>> {
        let region = self.region();
        if region.is_forked() {
            return Err(to_py(Error::Closed("this process is a fork of the one that opened the region: open it anew")));
        }
        if region.is_closed() {
            return Err(to_py(Error::Closed("the region was closed")));
        }
        Ok(Arc::clone(&self.client))
    }

    fn region(&self) -> &core::Region {
        self.client.region().expect("a Region is made from a region")
    }

    fn geometry(&self) -> &Geometry {
        self.region().geometry()
    }

    fn introduce(region: core::Region, name: &str, introduction: &Introduction<'_>) -> Result<Self> {
        let client = Client::in_region(region, introduction)?;
        Ok(Self { client: Arc::new(client), name: name.to_owned() })
    }

    fn pieces(&self, extents: &[(u32, u32)]) -> Vec<Piece> {
        let block_size = self.geometry().block_size;
        extents.iter().map(|(first, len)| (u64::from(*first) * block_size, u64::from(*len) * block_size)).collect()
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Waiting => "waiting",
        Phase::Reserving => "reserving",
        Phase::Populating => "populating",
        Phase::Collapsing => "collapsing",
    }
}

/// Reports a long call's progress to a Python callable, and stops the call when that or a signal handler raises.
struct Reporter {
    callback: Option<Py<PyAny>>,
    raised: Mutex<Option<PyErr>>,
}

impl Reporter {
    fn new(callback: Option<Py<PyAny>>) -> Self {
        Self { callback, raised: Mutex::new(None) }
    }

    fn report(&self, phase: Phase, done: u64, total: u64) -> ControlFlow<()> {
        let outcome = Python::attach(|py| {
            py.check_signals()?;
            match &self.callback {
                Some(callback) => callback.call1(py, (phase_name(phase), done, total)).map(drop),
                None => Ok(()),
            }
        });
        match outcome {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    /// The result of the call, or what its callback raised.
    fn settle<T>(self, outcome: Result<T>) -> PyResult<T> {
        match self.raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => outcome.map_err(to_py),
        }
    }
}

fn role_of(role: &str) -> PyResult<Role> {
    Role::by_name(role).ok_or_else(|| {
        invalid(format!("role is {role:?}, but must be one of \"scheduler\", \"worker\", \"pool\", \"tool\""))
    })
}

fn lifetime_of(lifetime: &str, expected_clients: u32) -> PyResult<Lifetime> {
    match lifetime {
        "private" => Ok(Lifetime::Private { expected_clients }),
        "shared" => Ok(Lifetime::Shared),
        "persistent" => Ok(Lifetime::Persistent),
        _ => Err(invalid(format!(
            "lifetime is {lifetime:?}, but must be one of \"private\", \"shared\", \"persistent\""
        ))),
    }
}

fn unsigned(what: &str, value: i64) -> PyResult<u64> {
    u64::try_from(value).map_err(|_| invalid(format!("{what} is {value}, but must be at least 0")))
}

fn small(what: &str, value: i64) -> PyResult<u32> {
    u32::try_from(value).map_err(|_| invalid(format!("{what} is {value}, but must be from 0 to 2^32 - 1")))
}

#[pymethods]
impl Region {
    /// Creates the region `name`, or attaches to it where it is in use.
    ///
    /// capacity: bytes of data, rounded down to whole blocks. block_size: bytes, a power of two of at least 4096.
    /// slots: entries at the most; by default a quarter of the blocks. segment_size: bytes, a power of two; no item's run of
    /// blocks crosses the border between segments, which are also the units of device registration.
    /// lifetime: "private" (its file loses its name once expected_clients clients have attached), "shared" (the last client to
    /// leave removes it) or "persistent" (it stays). role, rank: what the client is. group: a name that all clients of one
    /// engine share. directory: where the files are; by default ecpool-<uid> in /dev/shm.
    /// progress(phase, done, total) is called from time to time while waiting or reserving memory; what it raises ends the call.
    ///
    /// Raises InvalidArgumentError, NoSpaceError (with no file left behind), RegionError, RegionFormatError, PoolBusyError.
    #[staticmethod]
    #[pyo3(signature = (name, *, capacity, block_size=16384, slots=None, segment_size=34_359_738_368, lifetime="shared",
                        role="pool", group="", rank=0, expected_clients=0, directory=None, progress=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keyword arguments")]
    fn open(
        py: Python<'_>,
        name: &str,
        capacity: i64,
        block_size: i64,
        slots: Option<i64>,
        segment_size: i64,
        lifetime: &str,
        role: &str,
        group: &str,
        rank: i64,
        expected_clients: i64,
        directory: Option<PathBuf>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let request = OpenRequest {
            directory: directory.as_deref(),
            name,
            geometry: GeometryRequest {
                capacity: unsigned("capacity", capacity)?,
                block_size: unsigned("block_size", block_size)?,
                segment_size: unsigned("segment_size", segment_size)?,
                num_slots: slots.map(|slots| small("slots", slots)).transpose()?,
            },
            lifetime: lifetime_of(lifetime, small("expected_clients", expected_clients)?)?,
        };
        let introduction = Introduction { role: role_of(role)?, rank: small("rank", rank)?, group };
        let reporter = Reporter::new(progress);
        let opened = py.detach(|| {
            let region = core::Region::open(&request, &mut |p, d, t| reporter.report(p, d, t))?;
            Self::introduce(region, name, &introduction)
        });
        reporter.settle(opened)
    }

    /// Attaches to the region `name`, whatever its size. Raises RegionError where there is none, RegionFormatError for a file
    /// that is no region of this layout, and as open() does.
    #[staticmethod]
    #[pyo3(signature = (name, *, role="tool", group="", rank=0, directory=None, progress=None))]
    fn attach(
        py: Python<'_>,
        name: &str,
        role: &str,
        group: &str,
        rank: i64,
        directory: Option<PathBuf>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let introduction = Introduction { role: role_of(role)?, rank: small("rank", rank)?, group };
        let reporter = Reporter::new(progress);
        let attached = py.detach(|| {
            let directory: Option<&Path> = directory.as_deref();
            let region = core::Region::attach(directory, name, &mut |p, d, t| reporter.report(p, d, t))?;
            Self::introduce(region, name, &introduction)
        });
        reporter.settle(attached)
    }

    /// The region's name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The region's file; after it was unlinked, the name that it had.
    #[getter]
    fn path(&self) -> String {
        self.region().path().display().to_string()
    }

    /// Whether this client created the file.
    #[getter]
    fn created(&self) -> bool {
        self.region().created()
    }

    /// Whether this client has left, or this process is a fork of the one that opened it.
    #[getter]
    fn closed(&self) -> bool {
        self.region().is_closed() || self.region().is_forked()
    }

    /// Bytes of a block.
    #[getter]
    fn block_size(&self) -> u64 {
        self.geometry().block_size
    }

    /// Blocks of data.
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.geometry().num_blocks
    }

    /// Entries at the most.
    #[getter]
    fn num_slots(&self) -> u32 {
        self.geometry().num_slots
    }

    /// Bytes of a segment.
    #[getter]
    fn segment_size(&self) -> u64 {
        self.geometry().segment_size
    }

    /// Bytes of data.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.geometry().data_len
    }

    /// Bytes of the whole file.
    #[getter]
    fn file_nbytes(&self) -> u64 {
        self.geometry().file_len
    }

    /// The address of the data area in this process; valid as long as this object lives.
    #[getter]
    fn data_ptr(&self) -> usize {
        self.region().data_ptr() as usize
    }

    /// This client's place, from 0 to 255.
    #[getter]
    fn client(&self) -> u16 {
        self.region().client().index
    }

    /// The segments as (offset in the data area, length), in bytes: what to register with a device, one by one.
    fn segments(&self) -> Vec<(u64, u64)> {
        let geometry = self.geometry();
        let starts = (0..geometry.data_len).step_by(usize::try_from(geometry.segment_size).unwrap_or(usize::MAX));
        starts.map(|start| (start, geometry.segment_size.min(geometry.data_len - start))).collect()
    }

    /// Fills the page tables, so that first copies need no page faults; returns the bytes. Never changes a byte.
    /// threads: 0 for as many as make sense. progress as in open(). Other Python threads run meanwhile.
    #[pyo3(signature = (*, threads=0, progress=None))]
    fn populate(&self, py: Python<'_>, threads: usize, progress: Option<Py<PyAny>>) -> PyResult<u64> {
        let reporter = Reporter::new(progress);
        let populated = py.detach(|| self.region().populate(threads, &mut |p, d, t| reporter.report(p, d, t)));
        reporter.settle(populated)
    }

    /// Makes huge pages of the data where the system can; returns the bytes. Takes seconds a GiB. progress as in open().
    #[pyo3(signature = (*, progress=None))]
    fn collapse_huge_pages(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<u64> {
        let reporter = Reporter::new(progress);
        let collapsed = py.detach(|| self.region().collapse_huge_pages(&mut |p, d, t| reporter.report(p, d, t)));
        reporter.settle(collapsed)
    }

    /// Copies a C-contiguous buffer into extents, (first_block, num_blocks) each, in order; the last may stay partly as it was.
    /// Instead of a buffer it may be a contiguous tensor in the host's memory, of any library that speaks DLPack; nobody may
    /// resize that meanwhile.
    /// The blocks must be those of a save that the caller has claimed. Large copies let other Python threads run.
    /// Raises InvalidArgumentError if the bytes do not fit, ClosedError.
    fn write(&self, py: Python<'_>, extents: Vec<(u32, u32)>, source: &Bound<'_, PyAny>) -> PyResult<()> {
        buffer::write(py, &self.client, &self.pieces(&extents), source)
    }

    /// Fills a writable C-contiguous buffer, or a tensor as in write(), from extents, in order. The blocks must be held: leased,
    /// pinned or loading. Raises as write() does.
    fn read(&self, py: Python<'_>, extents: Vec<(u32, u32)>, destination: &Bound<'_, PyAny>) -> PyResult<()> {
        buffer::read(py, &self.client, &self.pieces(&extents), destination)
    }

    /// The checksum (XXH3, 64 bits) of an item of nbytes bytes in these extents, in order. Lets other Python threads run.
    /// Raises InvalidArgumentError if the extents are shorter, ClosedError.
    fn checksum(&self, py: Python<'_>, extents: Vec<(u32, u32)>, nbytes: u64) -> PyResult<u64> {
        let pieces = self.pieces(&extents);
        py.detach(|| self.region().checksum(&pieces, nbytes)).map_err(to_py)
    }

    /// The counters of all clients that ever were, summed by name. Takes no lock.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        counters_dict(py, &self.client.total_counters())
    }

    /// What is in the region: sums, clients, namespaces. Raises PoolBusyError, ClosedError.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let client = self.open_client()?;
        let (stats, (clients, namespaces)) = py.detach(|| Ok((client.stats()?, client.people()?))).map_err(to_py)?;
        let status = stats_dict(py, &stats)?;
        let client_list = PyList::empty(py);
        for info in clients {
            let dict = PyDict::new(py);
            dict.set_item("role", info.role.map_or("unknown", Role::name))?;
            dict.set_item("rank", info.rank)?;
            dict.set_item("pid", info.pid)?;
            dict.set_item("group", info.label)?;
            dict.set_item("live", info.live)?;
            dict.set_item("place", info.byte)?;
            dict.set_item("attached_at", info.attached_at_unix)?;
            client_list.append(dict)?;
        }
        status.set_item("clients", client_list)?;
        let namespace_list = PyList::empty(py);
        for info in namespaces {
            let dict = PyDict::new(py);
            dict.set_item("name", info.label)?;
            dict.set_item("epoch", info.epoch)?;
            dict.set_item("blocks", info.blocks_used)?;
            dict.set_item("entries", info.entries)?;
            namespace_list.append(dict)?;
        }
        status.set_item("namespaces", namespace_list)?;
        Ok(status)
    }

    /// Checks every invariant of the index; returns what is wrong, in words. Slow: for tests and tools.
    fn check(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let client = self.open_client()?;
        py.detach(|| client.violations()).map_err(to_py)
    }

    /// Takes back what dead clients left behind, as far as that is safe yet; returns what was done, by name.
    fn reclaim<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let client = self.open_client()?;
        let reclaimed = py.detach(|| client.reclaim()).map_err(to_py)?;
        let dict = PyDict::new(py);
        dict.set_item("died", reclaimed.died)?;
        dict.set_item("released", reclaimed.released)?;
        dict.set_item("waiting", reclaimed.waiting)?;
        dict.set_item("holds_ended", reclaimed.holds_ended)?;
        Ok(dict)
    }

    /// Flushes the namespace of this name, or every one for None, for all processes: nothing that was stored before is found
    /// again. Of a name only the first 96 bytes count, which are what status() shows. Returns (name, entries dropped) of each.
    /// Raises PoolBusyError, with nothing flushed; ClosedError.
    #[pyo3(signature = (namespace=None))]
    fn flush(&self, py: Python<'_>, namespace: Option<&str>) -> PyResult<Vec<(String, u64)>> {
        let client = self.open_client()?;
        let wanted = namespace.map(label_of);
        let flushed = py.detach(|| client.flush(|label| wanted.is_none_or(|w| w == label))).map_err(to_py)?;
        Ok(flushed.into_iter().map(|each| (each.label, each.dropped)).collect())
    }

    /// Leaves: ends this client's holds; the last client to leave a shared region removes its file. Views stay valid.
    /// Further calls raise ClosedError; closing again does nothing.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.client.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (exc_type, exc, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) {
        let _ = (exc_type, exc, traceback);
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let geometry = self.geometry();
        format!(
            "Region(name={:?}, num_blocks={}, block_size={}, closed={})",
            self.name,
            geometry.num_blocks,
            geometry.block_size,
            if self.closed() { "True" } else { "False" }
        )
    }

    #[allow(unsafe_code, reason = "the signature is the buffer protocol's")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: std::ffi::c_int) -> PyResult<()> {
        let (start, len) = {
            let region = slf.get().region();
            (region.data_ptr(), region.geometry().data_len)
        };
        // SAFETY: Python passed `view`; the data area stays mapped as long as the `Region` object, which owns it, lives.
        unsafe { buffer::fill_view(slf.into_any(), view, flags, start, len) }
    }
}

/// Sums over an index, by name.
pub(crate) fn stats_dict<'py>(py: Python<'py>, stats: &IndexStats) -> PyResult<Bound<'py, PyDict>> {
    let pairs = [
        ("num_blocks", stats.num_blocks),
        ("free_blocks", stats.free_blocks),
        ("evictable_blocks", stats.evictable_blocks),
        ("evictable_entries", stats.evictable_entries),
        ("num_slots", stats.num_slots),
        ("entries", stats.entries),
        ("writing", stats.writing),
        ("ready", stats.ready),
        ("doomed", stats.doomed),
        ("orphaned", stats.orphaned),
        ("num_holds", stats.num_holds),
        ("holds", stats.holds),
    ];
    let dict = PyDict::new(py);
    for (name, value) in pairs {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}
