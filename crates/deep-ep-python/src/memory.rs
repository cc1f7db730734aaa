//! Memory of the library that Python holds as a tensor.

use std::{any::Any, sync::Arc};

use deep_ep::{Device, OwnedTensor, Tensor};
use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::{
    dlpack,
    errors::raise,
    lot::Lot,
    tensor::{Owner, dtype, dtype_name},
};

/// Where a tensor is, without a borrow.
#[derive(Clone)]
pub(crate) struct View {
    pub(crate) address: usize,
    /// Element type by name.
    pub(crate) dtype: &'static str,
    /// Bytes of an element.
    pub(crate) item: usize,
    pub(crate) shape: Vec<i64>,
    /// In elements.
    pub(crate) strides: Vec<i64>,
    /// -1 for the host, else the ordinal of a CUDA device.
    pub(crate) device: i32,
}

impl View {
    pub(crate) fn of(tensor: &Tensor<'_>) -> Self {
        let signed = |values: &[usize]| values.iter().map(|&value| value as i64).collect();
        Self {
            address: tensor.as_ptr().addr(),
            dtype: dtype_name(tensor.dtype()),
            item: tensor.dtype().size(),
            shape: signed(tensor.shape()),
            strides: signed(tensor.strides()),
            device: match tensor.device() {
                Device::Host => -1,
                Device::Cuda(ordinal) => ordinal as i32,
            },
        }
    }
}

/// A tensor in memory of the library, which lives as long as this object or a tensor made of it.
///
/// Arrays are made of it by DLPack (any element type), on the host also by numpy's array interface
/// (types that numpy lacks appear as unsigned integers of their size), on a GPU by CUDA's.
#[pyclass(frozen, module = "deep_ep._native")]
pub(crate) struct Memory {
    pub(crate) view: View,
    pub(crate) owner: Arc<dyn Any + Send + Sync>,
}

impl Memory {
    /// `view` must be memory that lives as long as `owner`.
    pub(crate) fn new(view: View, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { view, owner }
    }

    /// The same memory with FP8 codes as bytes, which every version of every library takes.
    pub(crate) fn into_plain(mut self) -> Self {
        if self.view.dtype == "float8_e4m3fn" {
            self.view.dtype = "uint8";
        }
        self
    }

    /// A dictionary of numpy's array interface, version 3, which CUDA's shares.
    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let View { item, dtype, .. } = self.view;
        let kind = match dtype {
            "float32" | "float16" => 'f',
            "int8" | "int32" | "int64" => 'i',
            _ => 'u',
        };
        let order = if item == 1 { '|' } else { '<' };
        let strides = self.view.strides.iter().map(|stride| stride * item as i64);
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", format!("{order}{kind}{item}"))?;
        interface.set_item("shape", PyTuple::new(py, &self.view.shape)?)?;
        interface.set_item("strides", PyTuple::new(py, strides.collect::<Vec<_>>())?)?;
        interface.set_item("data", (self.view.address, false))?;
        Ok(interface)
    }
}

#[pymethods]
impl Memory {
    /// `(address, dtype, shape, strides, device)`, as calls take tensors.
    #[getter]
    fn spec(&self) -> (usize, &'static str, Vec<i64>, Vec<i64>, i32) {
        let View {
            address,
            dtype,
            shape,
            strides,
            device,
            ..
        } = self.view.clone();
        (address, dtype, shape, strides, device)
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        require(self.view.device < 0, "__array_interface__")?;
        self.interface(py)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        require(self.view.device >= 0, "__cuda_array_interface__")?;
        self.interface(py)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::device(self.view.device)
    }

    /// A DLPack capsule. Work on the memory is done when a `Memory` is handed out, so `stream` needs
    /// no wait.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = stream;
        let here = dl_device.is_none_or(|device| device == self.__dlpack_device__());
        if !here || copy == Some(true) {
            let why = "this memory can only be exported where it is, without a copy";
            return Err(pyo3::exceptions::PyBufferError::new_err(why));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::export(py, &self.view, self.owner.clone(), versioned)
    }
}

/// Protocols are found by their attributes: one that does not apply must not be there.
fn require(holds: bool, name: &'static str) -> PyResult<()> {
    match holds {
        true => Ok(()),
        false => Err(pyo3::exceptions::PyAttributeError::new_err(name)),
    }
}

/// New zeroed host memory of the library, aligned to 64 bytes. `strides` are in elements; none: dense
/// and row-major.
#[pyfunction]
#[pyo3(signature = (dtype_name, shape, strides=None))]
pub(crate) fn empty(
    py: Python<'_>,
    dtype_name: &str,
    shape: Vec<usize>,
    strides: Option<Vec<usize>>,
) -> PyResult<Memory> {
    let made = dtype(dtype_name).and_then(|dtype| match &strides {
        Some(strides) => OwnedTensor::zeros_strided(dtype, &shape, strides),
        None => OwnedTensor::zeros(dtype, &shape),
    });
    let owner = Arc::new(made.map_err(|error| raise(py, &error))?);
    let view = View::of(&owner.as_tensor());
    Ok(Memory::new(view, owner))
}

/// A tensor in symmetric memory.
#[pyclass(frozen, module = "deep_ep._native")]
pub(crate) struct Loan {
    pub(crate) loan: Arc<deep_ep::Loan>,
    /// What tensors of it hold.
    owner: Owner,
    view: View,
}

impl Loan {
    /// On the host waits until nobody reads the loan, which for a new one is at once.
    pub(crate) fn new(mut loan: deep_ep::Loan, lot: &Lot) -> deep_ep::Result<Self> {
        if loan.device() == Device::Host {
            loan.as_bytes_mut()?;
        }
        let view = View::of(&loan.as_tensor());
        let loan = Arc::new(loan);
        let owner = lot.owner(view.device, loan.clone());
        Ok(Self { loan, owner, view })
    }
}

#[pymethods]
impl Loan {
    /// The memory, for reading and writing.
    pub(crate) fn memory(&self) -> Memory {
        Memory::new(self.view.clone(), self.owner.clone())
    }
}
