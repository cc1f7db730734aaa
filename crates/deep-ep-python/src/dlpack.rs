//! DLPack (<https://dmlc.github.io/dlpack/>, version 1.1): tensors of other libraries, and ours for
//! them.

use std::{
    any::Any,
    ffi::{CStr, c_void},
    ptr::NonNull,
    sync::Arc,
};

use pyo3::{
    exceptions::{PyBufferError, PyTypeError},
    prelude::*,
    types::{PyCapsule, PyCapsuleMethods, PyDict, PyDictMethods},
};

use crate::memory::View;

const NAME: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

/// Bit of a managed tensor's flags.
const READ_ONLY: u64 = 1;

const CPU: i32 = 1;
const CUDA: i32 = 2;
/// Host memory that a GPU can read, and memory that moves between both.
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

/// Element types: code, bits, name.
const TYPES: [(u8, u8, &str); 9] = [
    (4, 16, "bfloat16"),
    (2, 16, "float16"),
    (2, 32, "float32"),
    (10, 8, "float8_e4m3fn"),
    (1, 8, "uint8"),
    (6, 8, "bool"),
    (0, 8, "int8"),
    (0, 32, "int32"),
    (0, 64, "int64"),
];

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    kind: i32,
    ordinal: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// DLPack's device of ours (-1 the host, else a CUDA ordinal).
pub(crate) fn device(device: i32) -> (i32, i32) {
    if device < 0 { (CPU, 0) } else { (CUDA, device) }
}

/// What an exported tensor points to. The managed tensor comes first, so that both have one address.
#[repr(C)]
struct Exported<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _owner: Arc<dyn Any + Send + Sync>,
}

/// The two layouts of a managed tensor.
trait ManagedTensor: Sized {
    const NAME: &CStr;
    fn new(tensor: DlTensor) -> Self;
    fn tensor(&mut self) -> &mut DlTensor;
}

impl ManagedTensor for Managed {
    const NAME: &CStr = NAME;

    fn new(tensor: DlTensor) -> Self {
        Self {
            tensor,
            context: std::ptr::null_mut(),
            deleter: Some(delete::<Self>),
        }
    }

    fn tensor(&mut self) -> &mut DlTensor {
        &mut self.tensor
    }
}

impl ManagedTensor for ManagedVersioned {
    const NAME: &CStr = VERSIONED;

    fn new(tensor: DlTensor) -> Self {
        Self {
            major: 1,
            minor: 1,
            context: std::ptr::null_mut(),
            deleter: Some(delete::<Self>),
            flags: 0,
            tensor,
        }
    }

    fn tensor(&mut self) -> &mut DlTensor {
        &mut self.tensor
    }
}

/// A capsule of the tensor at `view`, which keeps `owner`: of DLPack 1 if the consumer knows that.
pub(crate) fn export<'py>(
    py: Python<'py>,
    view: &View,
    owner: Arc<dyn Any + Send + Sync>,
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let known = TYPES.iter().find(|(_, _, name)| *name == view.dtype);
    let &(code, bits, _) = known.ok_or_else(|| PyBufferError::new_err(view.dtype))?;
    let (kind, ordinal) = device(view.device);
    let tensor = DlTensor {
        data: view.address as *mut c_void,
        device: DlDevice { kind, ordinal },
        ndim: view.shape.len() as i32,
        dtype: DlType {
            code,
            bits,
            lanes: 1,
        },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    match versioned {
        true => capsule::<ManagedVersioned>(py, tensor, view, owner),
        false => capsule::<Managed>(py, tensor, view, owner),
    }
}

fn capsule<'py, M: ManagedTensor>(
    py: Python<'py>,
    tensor: DlTensor,
    view: &View,
    owner: Arc<dyn Any + Send + Sync>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut exported = Box::new(Exported {
        managed: M::new(tensor),
        shape: view.shape.clone(),
        strides: view.strides.clone(),
        _owner: owner,
    });
    exported.managed.tensor().shape = exported.shape.as_mut_ptr();
    exported.managed.tensor().strides = exported.strides.as_mut_ptr();
    let pointer = NonNull::from(Box::leak(exported)).cast();
    // SAFETY: the pointer is valid until the deleter has run; the destructor accepts such capsules.
    let capsule = unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, pointer, M::NAME, Some(destroy::<M>))
    };
    Ok(capsule?.into_any())
}

/// Frees an exported tensor. Needs no interpreter.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: called once, with what `capsule` made: the first field of the box.
    drop(unsafe { Box::from_raw(managed.cast::<Exported<M>>()) });
}

/// Frees what a capsule holds unless a consumer took it, which renames the capsule.
unsafe extern "C" fn destroy<M: ManagedTensor>(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: called by the interpreter with what `capsule` made.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 1 {
            let managed = pyo3::ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr());
            delete::<M>(managed.cast());
        }
    }
}

/// `(address, dtype, shape, strides, device)` for Python.
type Described = (usize, String, Vec<i64>, Vec<i64>, i32);

/// A tensor of another library, kept until this object is dropped.
#[pyclass(frozen, module = "deep_ep._native")]
pub(crate) struct Foreign {
    managed: Taken,
    spec: Described,
}

enum Taken {
    Plain(*mut Managed),
    Versioned(*mut ManagedVersioned),
}

// SAFETY: DLPack's deleters may be called from any thread; here it is one that holds the
// interpreter.
unsafe impl Send for Taken {}
// SAFETY: shared access only reads flags.
unsafe impl Sync for Taken {}

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: taken over from a capsule, which was renamed, so nobody else frees it.
        unsafe {
            match *self {
                Self::Plain(managed) => {
                    if let Some(deleter) = (*managed).deleter {
                        deleter(managed);
                    }
                }
                Self::Versioned(managed) => {
                    if let Some(deleter) = (*managed).deleter {
                        deleter(managed);
                    }
                }
            }
        }
    }
}

#[pymethods]
impl Foreign {
    /// `(address, dtype, shape, strides, device)`, as calls take tensors.
    #[getter]
    fn spec(&self) -> Described {
        self.spec.clone()
    }

    /// Whether the library says that the tensor must not be written, which it can since DLPack 1.
    #[getter]
    fn read_only(&self) -> bool {
        match self.managed {
            Taken::Plain(_) => false,
            // SAFETY: taken over from a capsule, and kept until `self` is dropped.
            Taken::Versioned(managed) => unsafe { (*managed).flags & READ_ONLY != 0 },
        }
    }
}

/// Takes a tensor of a library that speaks DLPack, without copying it. `stream` is the stream on
/// which it will be used, as the array API's `__dlpack__` wants it.
#[pyfunction]
#[pyo3(signature = (tensor, stream=None))]
pub(crate) fn from_dlpack(tensor: &Bound<'_, PyAny>, stream: Option<isize>) -> PyResult<Foreign> {
    let arguments = PyDict::new(tensor.py());
    if stream.is_some() {
        arguments.set_item("stream", stream)?;
    }
    let plain = arguments.copy()?;
    arguments.set_item("max_version", (1, 1))?;
    // Libraries of before DLPack 1 do not know the argument.
    let capsule = match tensor.call_method("__dlpack__", (), Some(&arguments)) {
        Err(error) if error.is_instance_of::<PyTypeError>(tensor.py()) => {
            tensor.call_method("__dlpack__", (), Some(&plain))?
        }
        other => other?,
    };
    let capsule = capsule.cast_into::<PyCapsule>()?;
    let managed = take(&capsule)?;
    let tensor = match &managed {
        // SAFETY: the capsule held a valid managed tensor, which `managed` now owns.
        Taken::Plain(managed) => unsafe { &(**managed).tensor },
        // SAFETY: as above.
        Taken::Versioned(managed) => unsafe { &(**managed).tensor },
    };
    let spec = describe(tensor)?;
    Ok(Foreign { managed, spec })
}

/// Takes the tensor out of a capsule and marks that as taken.
fn take(capsule: &Bound<'_, PyCapsule>) -> PyResult<Taken> {
    let plain = capsule.is_valid_checked(Some(NAME));
    let (name, used) = if plain {
        (NAME, USED)
    } else {
        (VERSIONED, USED_VERSIONED)
    };
    let pointer = capsule.pointer_checked(Some(name))?;
    // SAFETY: a valid capsule and a name that lives for ever.
    if unsafe { pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(capsule.py()));
    }
    if plain {
        return Ok(Taken::Plain(pointer.as_ptr().cast()));
    }
    let managed: *mut ManagedVersioned = pointer.as_ptr().cast();
    let taken = Taken::Versioned(managed);
    // SAFETY: the first field, in every version.
    let major = unsafe { (*managed).major };
    if major != 1 {
        return Err(PyBufferError::new_err(format!(
            "DLPack version {major} is not known, only 1"
        )));
    }
    Ok(taken)
}

fn describe(tensor: &DlTensor) -> PyResult<Described> {
    let DlType { code, bits, lanes } = tensor.dtype;
    let known = TYPES
        .iter()
        .find(|(c, b, _)| (*c, *b, 1) == (code, bits, lanes));
    let name = known.map_or_else(
        || format!("DLPack type {code} of {bits} bits"),
        |(_, _, name)| (*name).to_owned(),
    );
    let device = match tensor.device.kind {
        CPU | CUDA_HOST => -1,
        CUDA | CUDA_MANAGED => tensor.device.ordinal,
        other => {
            return Err(PyBufferError::new_err(format!(
                "DLPack device type {other} is neither a CPU nor CUDA"
            )));
        }
    };
    let ndim = tensor.ndim as usize;
    let read = |values: *const i64| match ndim {
        0 => vec![],
        // SAFETY: DLPack says that shape and strides have `ndim` entries.
        _ => unsafe { std::slice::from_raw_parts(values, ndim) }.to_vec(),
    };
    let shape = read(tensor.shape);
    let strides = if tensor.strides.is_null() {
        // Null stands for dense and row-major.
        let inner = |i: usize| shape[i + 1..].iter().map(|&n| n.max(1)).product();
        (0..ndim).map(inner).collect()
    } else {
        read(tensor.strides)
    };
    let address = tensor.data.addr() + tensor.byte_offset as usize;
    Ok((address, name, shape, strides, device))
}
