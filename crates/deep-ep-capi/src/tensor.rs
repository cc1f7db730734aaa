//! Tensors that C passes and gets.

use std::ffi::c_void;

use deep_ep::{DType, Device, Error, OwnedTensor, Result, Shape, Tensor, TensorMut};

/// An element type: a value of `deep_ep_dtype`.
pub type DTypeCode = i32;

/// Element types.
#[repr(C)]
#[allow(non_camel_case_types, clippy::upper_case_acronyms)]
pub enum DTypeName {
    /// No tensor.
    DEEP_EP_NO_TENSOR = 0,
    /// bfloat16.
    DEEP_EP_BF16 = 1,
    /// IEEE half precision.
    DEEP_EP_FP16 = 2,
    /// IEEE single precision.
    DEEP_EP_FP32 = 3,
    /// FP8 E4M3 without infinities.
    DEEP_EP_FP8 = 4,
    /// Unsigned byte, also for what is 0 or 1.
    DEEP_EP_UINT8 = 5,
    /// Signed byte.
    DEEP_EP_INT8 = 6,
    /// 32-bit signed integer.
    DEEP_EP_INT32 = 7,
    /// 64-bit signed integer.
    DEEP_EP_INT64 = 8,
}

/// A tensor in memory of the host or of a GPU. All zeros is no tensor. Made by
/// `deep_ep_tensor_1d()`, `deep_ep_tensor_2d()` and `deep_ep_tensor_3d()`, or by hand.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TensorView {
    /// Address of the first element, aligned to the element's size. May be NULL where a dimension is
    /// 0.
    pub data: *mut c_void,
    /// Element type, a value of `deep_ep_dtype`.
    pub dtype: DTypeCode,
    /// DEEP_EP_HOST, or DEEP_EP_CUDA(n) for the GPU with the number n.
    pub device: i32,
    /// Number of dimensions, 1 to 3.
    pub ndim: usize,
    /// Extent of each dimension.
    pub shape: [usize; 3],
    /// Distance between neighbours in each dimension, in elements; all 0 for dense rows.
    pub strides: [usize; 3],
}

impl TensorView {
    /// What says that there is no tensor.
    pub(crate) const NONE: Self = Self {
        data: std::ptr::null_mut(),
        dtype: 0,
        device: 0,
        ndim: 0,
        shape: [0; 3],
        strides: [0; 3],
    };

    /// A view of a tensor of the library.
    pub(crate) fn of(tensor: &Tensor<'_>) -> Self {
        let mut this = Self {
            data: tensor.as_ptr().cast_mut().cast(),
            dtype: code(tensor.dtype()),
            device: match tensor.device() {
                Device::Host => 0,
                Device::Cuda(ordinal) => ordinal as i32 + 1,
            },
            ndim: tensor.shape().len(),
            ..Self::NONE
        };
        this.shape[..this.ndim].copy_from_slice(tensor.shape());
        this.strides[..this.ndim].copy_from_slice(tensor.strides());
        this
    }

    /// As [`of`](Self::of), if there is one.
    pub(crate) fn of_optional(tensor: Option<Tensor<'_>>) -> Self {
        tensor.as_ref().map_or(Self::NONE, Self::of)
    }

    pub(crate) fn is_some(&self) -> bool {
        self.dtype != 0
    }

    pub(crate) fn on_device(&self) -> bool {
        self.device > 0
    }

    fn parts(&self, argument: &'static str) -> Result<(*mut u8, Shape, Device)> {
        if !self.is_some() {
            return Err(Error::invalid(argument, "absent", "must be given"));
        }
        let dtype = dtype(self.dtype, argument)?;
        let limit = "must have 1 to 3 dimensions and span fewer than 2^63 bytes";
        let invalid = |limit: &'static str| {
            let n = self.ndim.min(3);
            let shown = format!("{dtype} {:?} of {} dimensions", &self.shape[..n], self.ndim);
            Error::invalid(argument, shown, limit)
        };
        if self.ndim == 0 || self.ndim > 3 {
            return Err(invalid(limit));
        }
        let (dims, strides) = (&self.shape[..self.ndim], &self.strides[..self.ndim]);
        let empty = dims.contains(&0);
        // Strides of a tensor without elements may be anything.
        let shape = match empty || strides.iter().all(|&stride| stride == 0) {
            true => Shape::dense(dtype, dims),
            false => Shape::strided(dtype, dims, strides),
        };
        let shape = shape.map_err(|_| invalid(limit))?;
        if self.device < 0 {
            return Err(invalid("must be on DEEP_EP_HOST or DEEP_EP_CUDA(n)"));
        }
        let device = match self.device {
            0 => Device::Host,
            number => Device::Cuda(number as u32 - 1),
        };
        if empty {
            return Ok((std::ptr::without_provenance_mut(64), shape, device));
        }
        if self.data.is_null() || !self.data.addr().is_multiple_of(dtype.size()) {
            return Err(Error::invalid(
                argument,
                format!("at address {:p}", self.data),
                format!("must be an address that is a multiple of {}", dtype.size()),
            ));
        }
        Ok((self.data.cast(), shape, device))
    }

    /// The tensor, for reading. The header says how long C must keep it.
    pub(crate) fn read<'a>(&self, argument: &'static str) -> Result<Tensor<'a>> {
        let (data, shape, device) = self.parts(argument)?;
        // SAFETY: the caller has such a tensor there, and leaves it alone until the call is done.
        Ok(unsafe { Tensor::from_raw(data, shape, device) })
    }

    /// The tensor, for reading, if there is one.
    pub(crate) fn read_optional<'a>(&self, argument: &'static str) -> Result<Option<Tensor<'a>>> {
        self.is_some().then(|| self.read(argument)).transpose()
    }

    /// The tensor, for writing.
    pub(crate) fn write<'a>(&self, argument: &'static str) -> Result<TensorMut<'a>> {
        let (data, shape, device) = self.parts(argument)?;
        if shape.has_shared_elements() {
            return Err(Error::invalid(
                argument,
                format!("{shape:?}"),
                "must not have elements that share memory: it is written",
            ));
        }
        // SAFETY: as in `read`, and nobody else uses it meanwhile.
        Ok(unsafe { TensorMut::from_raw(data, shape, device) })
    }

    /// The tensor, for writing, if there is one.
    pub(crate) fn write_optional<'a>(
        &self,
        argument: &'static str,
    ) -> Result<Option<TensorMut<'a>>> {
        self.is_some().then(|| self.write(argument)).transpose()
    }

    /// A device tensor that a handle or layout is made of; C keeps the memory until that is freed.
    pub(crate) fn lasting(&self, argument: &'static str) -> Result<OwnedTensor> {
        let (data, shape, device) = self.parts(argument)?;
        // SAFETY: the header says that C keeps it as long as what is made of it.
        Ok(unsafe { OwnedTensor::from_device(data, shape, device, std::sync::Arc::new(())) })
    }
}

/// The element type with this code.
pub(crate) fn dtype(code: DTypeCode, argument: &'static str) -> Result<DType> {
    Ok(match code {
        1 => DType::Bf16,
        2 => DType::F16,
        3 => DType::F32,
        4 => DType::F8E4M3,
        5 => DType::U8,
        6 => DType::I8,
        7 => DType::I32,
        8 => DType::I64,
        other => {
            let value = format!("of element type {other}");
            let limit = "must have an element type of deep_ep_dtype";
            return Err(Error::invalid(argument, value, limit));
        }
    })
}

pub(crate) fn code(dtype: DType) -> DTypeCode {
    dtype as DTypeCode
}

/// Bytes of an element of type `dtype`, 0 for an unknown one. Any thread, any time.
#[unsafe(no_mangle)]
pub extern "C" fn deep_ep_dtype_size(dtype: DTypeCode) -> usize {
    self::dtype(dtype, "dtype").map_or(0, DType::size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_librarys_numbers() {
        for code in 1..=8 {
            assert_eq!(self::code(dtype(code, "x").unwrap()), code);
        }
        assert!(dtype(0, "x").is_err() && dtype(9, "x").is_err());
        assert_eq!(DTypeName::DEEP_EP_INT64 as i32, code(DType::I64));
        assert_eq!(DTypeName::DEEP_EP_FP8 as i32, code(DType::F8E4M3));
    }
}
