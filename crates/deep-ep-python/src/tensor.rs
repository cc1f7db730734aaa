//! Tensors that Python passes.

use std::{any::Any, sync::Arc};

use deep_ep::{DType, Device, Error, OwnedTensor, Result, Shape, Tensor, TensorMut};
use pyo3::prelude::*;

/// A tensor as the Python package describes it: `(address, dtype, shape, strides, device)`.
///
/// Strides are in elements; `device` is -1 for the host, else the ordinal of a CUDA device. Element
/// types go by the names that torch and `ml_dtypes` share.
#[derive(FromPyObject)]
pub(crate) struct Spec(usize, String, Vec<usize>, Vec<isize>, i32);

/// Element types by name.
const NAMES: [(&str, DType); 9] = [
    ("bfloat16", DType::Bf16),
    ("float16", DType::F16),
    ("float32", DType::F32),
    ("float8_e4m3fn", DType::F8E4M3),
    ("uint8", DType::U8),
    ("bool", DType::U8),
    ("int8", DType::I8),
    ("int32", DType::I32),
    ("int64", DType::I64),
];

pub(crate) fn dtype(name: &str) -> Result<DType> {
    let found = NAMES.iter().find(|(known, _)| *known == name);
    found.map(|(_, dtype)| *dtype).ok_or_else(|| {
        let known: Vec<_> = NAMES.iter().map(|(name, _)| *name).collect();
        Error::invalid(
            "dtype",
            name,
            format!("must be one of {}", known.join(", ")),
        )
    })
}

pub(crate) fn dtype_name(dtype: DType) -> &'static str {
    let found = NAMES.iter().find(|(_, known)| *known == dtype);
    found.map_or("uint8", |(name, _)| name)
}

impl Spec {
    fn shape(&self, argument: &'static str) -> Result<(usize, Shape, Device)> {
        let Self(address, name, dims, strides, device) = self;
        let dtype = dtype(name).map_err(|error| match error {
            Error::InvalidArgument(why) => Error::invalid(argument, why.value, why.limit),
            other => other,
        })?;
        // A stride that is never taken may be anything.
        let taken = strides.iter().zip(dims).map(|(&stride, &n)| match n {
            0 | 1 => Some(stride.unsigned_abs()),
            _ => stride.try_into().ok(),
        });
        let strides: Option<Vec<usize>> = taken.collect();
        let strides = strides.ok_or_else(|| {
            Error::invalid(
                argument,
                format!("of strides {:?}", self.3),
                "must not have negative strides",
            )
        })?;
        // Strides of a tensor without elements are anything.
        let empty = dims.contains(&0);
        let shape = if empty {
            Shape::dense(dtype, dims)
        } else {
            Shape::strided(dtype, dims, &strides)
        };
        let shape = shape.map_err(|_| {
            Error::invalid(
                argument,
                format!("{name} {dims:?}"),
                "must have 1 to 3 dimensions and span fewer than 2^63 bytes",
            )
        })?;
        if !empty && (*address == 0 || !address.is_multiple_of(dtype.size())) {
            return Err(Error::invalid(
                argument,
                format!("at address {address:#x}"),
                format!("must be aligned to {} bytes", dtype.size()),
            ));
        }
        let device = match u32::try_from(*device) {
            Ok(ordinal) => Device::Cuda(ordinal),
            Err(_) => Device::Host,
        };
        // A tensor without elements may have any address, null included, which no reference may.
        Ok((if empty { 64 } else { *address }, shape, device))
    }

    /// Whether two elements may share memory: sorted by stride, each dimension must step over all
    /// that the smaller ones reach.
    fn overlaps(&self) -> bool {
        let mut steps: Vec<_> = self.3.iter().copied().zip(&self.2).collect();
        steps.retain(|(_, n)| **n > 1);
        steps.sort_unstable();
        let mut reach = 0isize;
        !self.2.contains(&0)
            && steps.into_iter().any(|(stride, &n)| {
                let shared = stride <= reach;
                reach = reach.saturating_add(stride.saturating_mul(n as isize - 1));
                shared
            })
    }

    /// The tensor, for reading.
    ///
    /// # Safety
    /// The description must be true, and the memory must be neither freed nor written while `'a`
    /// lasts.
    pub(crate) unsafe fn read<'a>(&self, argument: &'static str) -> Result<Tensor<'a>> {
        let (address, shape, device) = self.shape(argument)?;
        // SAFETY: the caller's promise.
        Ok(unsafe { Tensor::from_raw(address as *const u8, shape, device) })
    }

    /// The tensor, for writing.
    ///
    /// # Safety
    /// As [`Spec::read`], and nobody else may read the memory.
    pub(crate) unsafe fn write<'a>(&self, argument: &'static str) -> Result<TensorMut<'a>> {
        let (address, shape, device) = self.shape(argument)?;
        if self.overlaps() {
            return Err(Error::invalid(
                argument,
                format!("{:?} of strides {:?}", self.2, self.3),
                "must not have elements that share memory: it is written",
            ));
        }
        // SAFETY: the caller's promise.
        Ok(unsafe { TensorMut::from_raw(address as *mut u8, shape, device) })
    }
}

impl Spec {
    /// Whether it is on a GPU.
    pub(crate) fn on_device(&self) -> bool {
        self.4 >= 0
    }

    /// A device tensor that holds on to `owner`, for handles and layouts.
    ///
    /// # Safety
    /// As [`Spec::read`], for as long as `owner` lives.
    pub(crate) unsafe fn owned(&self, argument: &'static str, owner: Owner) -> Result<OwnedTensor> {
        let (address, shape, device) = self.shape(argument)?;
        // SAFETY: the caller's promise.
        Ok(unsafe { OwnedTensor::from_device(address as *mut u8, shape, device, owner) })
    }
}

/// What keeps tensors of Python alive.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// An optional tensor for reading.
///
/// # Safety
/// As [`Spec::read`].
pub(crate) unsafe fn read_optional<'a>(
    spec: &Option<Spec>,
    argument: &'static str,
) -> Result<Option<Tensor<'a>>> {
    // SAFETY: the caller's promise.
    spec.as_ref()
        .map(|spec| unsafe { spec.read(argument) })
        .transpose()
}

/// An optional tensor for writing.
///
/// # Safety
/// As [`Spec::write`].
pub(crate) unsafe fn write_optional<'a>(
    spec: &Option<Spec>,
    argument: &'static str,
) -> Result<Option<TensorMut<'a>>> {
    // SAFETY: the caller's promise.
    spec.as_ref()
        .map(|spec| unsafe { spec.write(argument) })
        .transpose()
}
