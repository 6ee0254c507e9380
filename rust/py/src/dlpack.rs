//! Tensors of other libraries, by the DLPack protocol: the safe way to their memory that costs least.
//!
//! A library's tensor type may offer a table of C functions, one of which tells where a tensor is without making anything.
//! Where it does not, and for types derived from it, which may have no memory of their own, the tensor's `__dlpack__` makes
//! a capsule.
#![allow(unsafe_code, reason = "the protocol is one of raw pointers")]

use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::slice;

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};
use pyo3::{ffi, intern};

use crate::error::invalid;

const TABLE: &CStr = c"dlpack_exchange_api";
const TABLE_ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
const UNUSED: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";

/// The version of the table that is known here; minor versions only add to its end.
const MAJOR_VERSION: u32 = 1;

/// Kinds of devices whose memory the processor reaches: plain, and pinned for CUDA or ROCm.
const HOST_DEVICES: [i32; 3] = [1, 3, 11];

/// `DLTensor`.
#[repr(C)]
struct RawTensor {
    data: *mut c_void,
    device_kind: i32,
    device_id: i32,
    num_dims: i32,
    type_code: u8,
    type_bits: u8,
    type_lanes: u16,
    shape: *const i64,
    /// In elements; null for a tensor without gaps.
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct ManagedTensor {
    tensor: RawTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// `DLPackExchangeAPIHeader`.
#[repr(C)]
struct TableHeader {
    major: u32,
    minor: u32,
    /// The table of an older major version, or null.
    older: *const TableHeader,
}

/// `DLPackExchangeAPI`, as far as it is used here.
#[repr(C)]
struct Table {
    header: TableHeader,
    others: [*const c_void; 3],
    /// Fills in where a Python object's tensor is. Not 0 if it cannot, with a Python exception set.
    tensor_of: Option<unsafe extern "C" fn(*mut c_void, *mut RawTensor) -> c_int>,
}

/// The memory of a Python object's tensor, which has no gaps and lies in the host's memory, for as long as this and the
/// reference to the object live.
pub(crate) struct LentTensor<'a> {
    begin: *mut u8,
    len: usize,
    _owner: Option<Owner>,
    _object: PhantomData<&'a Bound<'a, PyAny>>,
}

impl<'a> LentTensor<'a> {
    /// None if the object is nothing that speaks the protocol. `what` names it in errors.
    pub(crate) fn of(object: &'a Bound<'_, PyAny>, what: &str) -> PyResult<Option<Self>> {
        let py = object.py();
        if let Some(table) = own_table(object)?
            && let Some(raw) = ask(&table, object)?
        {
            refuse_what_memory_does_not_say(object, what)?;
            let (begin, len) = memory_of(&raw).map_err(|why| refusal(what, why))?;
            return Ok(Some(Self { begin, len, _owner: None, _object: PhantomData }));
        }
        let Some(export) = object.getattr_opt(intern!(py, "__dlpack__"))? else { return Ok(None) };
        refuse_what_memory_does_not_say(object, what)?;
        refuse_without_storage(object, what)?;
        let owner = Owner::take(&export.call0()?)?;
        // SAFETY: the structure lives until `owner` is dropped.
        let raw = unsafe { &owner.0.as_ref().tensor };
        let (begin, len) = memory_of(raw).map_err(|why| refusal(what, why))?;
        Ok(Some(Self { begin, len, _owner: Some(owner), _object: PhantomData }))
    }

    /// The first byte; not null.
    pub(crate) fn begin(&self) -> *mut u8 {
        self.begin
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// The table of the object's own type, not of one that it is derived from.
fn own_table<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (py, kind) = (object.py(), object.get_type());
    let Some(table) = kind.getattr_opt(intern!(py, TABLE_ATTRIBUTE))? else { return Ok(None) };
    let inherited = kind.getattr(intern!(py, "__base__"))?.getattr_opt(intern!(py, TABLE_ATTRIBUTE))?;
    Ok(inherited.is_none().then_some(table))
}

/// The table tells where a tensor's memory is, and nothing of what torch does to the values when it reads them, or of who
/// counts on them. torch's `__dlpack__` refuses most such tensors, but exports one that is negated on the way.
fn refuse_what_memory_does_not_say(object: &Bound<'_, PyAny>, what: &str) -> PyResult<()> {
    let py = object.py();
    for (name, why) in [
        (intern!(py, "is_conj"), "that is conjugated on the way; call resolve_conj() first"),
        (intern!(py, "is_neg"), "that is negated on the way; call resolve_neg() first"),
    ] {
        if object.getattr_opt(name)?.map_or(Ok(false), |ask| ask.call0()?.is_truthy())? {
            return Err(refusal(what, why));
        }
    }
    if object.getattr_opt(intern!(py, "requires_grad"))?.map_or(Ok(false), |wanted| wanted.is_truthy())? {
        return Err(refusal(what, "that requires a gradient; call detach() first"));
    }
    Ok(())
}

/// Tensors that are derived from torch's may wrap others and have no memory. torch exports such a one with its offset for an
/// address.
fn refuse_without_storage(object: &Bound<'_, PyAny>, what: &str) -> PyResult<()> {
    let py = object.py();
    let Some(storage) = object.getattr_opt(intern!(py, "untyped_storage"))? else { return Ok(()) };
    let storage = storage.call0()?;
    let has_bytes = storage.call_method0(intern!(py, "nbytes"))?.is_truthy()?;
    if has_bytes && !storage.call_method0(intern!(py, "data_ptr"))?.is_truthy()? {
        return Err(refusal(what, "without memory"));
    }
    Ok(())
}

/// Asks the tensor type's own table about the object. None if that table is of a version that is not known here.
fn ask(table: &Bound<'_, PyAny>, object: &Bound<'_, PyAny>) -> PyResult<Option<RawTensor>> {
    let capsule = table.cast::<PyCapsule>()?;
    let mut header: *const TableHeader = capsule.pointer_checked(Some(TABLE))?.cast().as_ptr();
    // SAFETY: a capsule of this name holds the protocol's table, which is never freed, and `older` is one more, or null.
    while let Some(found) = unsafe { header.as_ref() } {
        if found.major != MAJOR_VERSION {
            header = found.older;
            continue;
        }
        // SAFETY: a table of this version is at least this long.
        let tensor_of = unsafe { (*header.cast::<Table>()).tensor_of };
        let Some(tensor_of) = tensor_of else { return Ok(None) };
        let mut raw = MaybeUninit::uninit();
        // SAFETY: the object is valid, and `raw` is what the function fills in. What it is not made for it refuses.
        if unsafe { tensor_of(object.as_ptr().cast(), raw.as_mut_ptr()) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: filled in, as the function says.
        return Ok(Some(unsafe { raw.assume_init() }));
    }
    Ok(None)
}

/// A tensor that was taken out of its capsule, and is given back to its library when this is dropped.
struct Owner(NonNull<ManagedTensor>);

impl Owner {
    fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let capsule = capsule.cast::<PyCapsule>()?;
        let managed = capsule.pointer_checked(Some(UNUSED))?.cast();
        // SAFETY: the capsule is valid and the name a constant. By the protocol the tensor is ours from here on.
        if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr()) } != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        Ok(Self(managed))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: `take` made this the only owner, so the structure is still there.
        let deleter = unsafe { self.0.as_ref() }.deleter;
        if let Some(deleter) = deleter {
            // SAFETY: called once, with the structure that it belongs to, which nobody uses after this.
            unsafe { deleter(self.0.as_ptr()) };
        }
    }
}

fn refusal(what: &str, why: &str) -> PyErr {
    invalid(format!("{what} is a tensor {why}"))
}

/// Where the tensor's bytes are, or what is wrong with it.
fn memory_of(raw: &RawTensor) -> Result<(*mut u8, usize), &'static str> {
    if !HOST_DEVICES.contains(&raw.device_kind) {
        return Err("of another device, but must be in the host's memory");
    }
    let len = len_of(raw)?;
    if len == 0 {
        return Ok((NonNull::dangling().as_ptr(), 0));
    }
    if raw.data.is_null() {
        return Err("without memory");
    }
    let offset = usize::try_from(raw.byte_offset).map_err(|_| "of an impossible offset")?;
    Ok((raw.data.cast::<u8>().wrapping_add(offset), len))
}

/// The tensor's bytes, if it has no gaps.
fn len_of(raw: &RawTensor) -> Result<usize, &'static str> {
    const TOO_LARGE: &str = "of an impossible size";
    let bits = usize::from(raw.type_bits) * usize::from(raw.type_lanes);
    if bits == 0 || !bits.is_multiple_of(8) {
        return Err("of elements that are no whole bytes");
    }
    let num_dims = usize::try_from(raw.num_dims).map_err(|_| TOO_LARGE)?;
    // SAFETY: by the protocol, `shape` has that many sizes.
    let shape = unsafe { sizes(raw.shape, num_dims) };
    if shape.contains(&0) {
        return Ok(0);
    }
    // SAFETY: by the protocol, so has `strides`, if there are any.
    let strides = unsafe { sizes(raw.strides, num_dims) };
    let mut elements = 1i64;
    for (place, &size) in shape.iter().enumerate().rev() {
        if size != 1 && strides.get(place).is_some_and(|&stride| stride != elements) {
            return Err("with gaps or out of order, but must be C-contiguous");
        }
        elements = elements.checked_mul(size).filter(|n| *n > 0).ok_or(TOO_LARGE)?;
    }
    let len = usize::try_from(elements).ok().and_then(|n| n.checked_mul(bits / 8));
    len.filter(|len| isize::try_from(*len).is_ok()).ok_or(TOO_LARGE)
}

/// # Safety
/// `begin` is null, or valid for reads of `count` values that do not change while the result is used.
unsafe fn sizes<'a>(begin: *const i64, count: usize) -> &'a [i64] {
    if begin.is_null() {
        return &[];
    }
    // SAFETY: by this function's contract.
    unsafe { slice::from_raw_parts(begin, count) }
}
