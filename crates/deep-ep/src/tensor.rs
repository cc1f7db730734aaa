//! Borrowed and owned tensors: an address, an element type, a shape and strides.
//!
//! [`Tensor`] and [`TensorMut`] borrow memory. On the host they are made safely from slices; memory
//! of a device enters through the `unsafe` constructors, whose contract says who keeps what alive.
//! [`OwnedTensor`] is memory, of the host or of a device, that the library made for a result.

use std::{any::Any, fmt, marker::PhantomData, sync::Arc};

use crate::{
    dtype::{DType, Element},
    error::{Error, Result, Text},
};

/// The most dimensions a tensor can have here.
pub const MAX_DIMS: usize = 3;

/// Where a tensor's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Device {
    /// Ordinary memory.
    #[default]
    Host,
    /// Memory of the CUDA device with this ordinal.
    Cuda(u32),
}

/// Element type, shape and strides (in elements) of a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    dtype: DType,
    device: Device,
    dims: [usize; MAX_DIMS],
    strides: [usize; MAX_DIMS],
    ndim: usize,
}

impl Shape {
    /// A dense row-major shape. At most [`MAX_DIMS`] dimensions.
    pub fn dense(dtype: DType, shape: &[usize]) -> Result<Self> {
        Self::strided(dtype, shape, &dense_strides(shape))
    }

    /// A shape with the given strides, in elements.
    pub fn strided(dtype: DType, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let ndim = shape.len();
        if ndim == 0 || ndim > MAX_DIMS || strides.len() != ndim {
            return Err(Error::invalid(
                "shape",
                format!("{shape:?} with strides {strides:?}"),
                "must have 1 to 3 dimensions and one stride for each",
            ));
        }
        let mut this = Self {
            dtype,
            device: Device::Host,
            dims: [1; MAX_DIMS],
            strides: [0; MAX_DIMS],
            ndim,
        };
        this.dims[..ndim].copy_from_slice(shape);
        this.strides[..ndim].copy_from_slice(strides);
        this.span_checked().ok_or_else(|| {
            Error::invalid(
                "shape",
                format!("{shape:?}"),
                "must span fewer than 2^63 bytes",
            )
        })?;
        Ok(this)
    }

    /// Elements from the first to one past the last that the shape reaches.
    fn span_checked(&self) -> Option<usize> {
        if self.dims[..self.ndim].contains(&0) {
            return Some(0);
        }
        let mut last = 0usize;
        for (&n, &stride) in self.dims[..self.ndim].iter().zip(&self.strides) {
            last = last.checked_add((n - 1).checked_mul(stride)?)?;
        }
        let span = last.checked_add(1)?;
        (span.checked_mul(self.dtype.size())? < isize::MAX as usize).then_some(span)
    }

    /// Bytes from the first element to the end of the last.
    pub fn bytes(&self) -> usize {
        self.span() * self.dtype.size()
    }

    /// Whether two elements lie at the same place, which an output must not have.
    pub fn has_shared_elements(&self) -> bool {
        check_no_overlap(self).is_err()
    }

    fn span(&self) -> usize {
        self.span_checked().expect("checked at construction")
    }
}

fn dense_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1].saturating_mul(shape[i + 1].max(1));
    }
    strides
}

macro_rules! shape_accessors {
    () => {
        /// Element type.
        pub fn dtype(&self) -> DType {
            self.shape.dtype
        }

        /// Extent of each dimension.
        pub fn shape(&self) -> &[usize] {
            &self.shape.dims[..self.shape.ndim]
        }

        /// Distance between neighbours in each dimension, in elements.
        pub fn strides(&self) -> &[usize] {
            &self.shape.strides[..self.shape.ndim]
        }

        /// Where the memory is.
        pub fn device(&self) -> Device {
            self.shape.device
        }

        /// Whether elements are dense and row-major.
        pub fn is_dense(&self) -> bool {
            self.shape().contains(&0)
                || self
                    .shape()
                    .iter()
                    .zip(self.strides())
                    .zip(dense_strides(self.shape()))
                    .all(|((&n, &stride), dense)| n == 1 || stride == dense)
        }
    };
}

/// Tensor memory that the library reads while `'a` lasts.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    data: *const u8,
    shape: Shape,
    memory: PhantomData<&'a [u8]>,
}

/// Tensor memory that the library writes while `'a` lasts.
pub struct TensorMut<'a> {
    data: *mut u8,
    shape: Shape,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `Tensor` is a shared borrow of plain bytes.
unsafe impl Send for Tensor<'_> {}
// SAFETY: as above.
unsafe impl Sync for Tensor<'_> {}
// SAFETY: a `TensorMut` is an exclusive borrow of plain bytes.
unsafe impl Send for TensorMut<'_> {}
// SAFETY: as above; `&TensorMut` gives reads only.
unsafe impl Sync for TensorMut<'_> {}

fn check_len(len: usize, shape: &Shape) -> Result<()> {
    if shape.span() > len {
        return Err(Error::invalid(
            "data",
            format!("{len} elements long"),
            format!(
                "must hold the {} elements that shape and strides reach",
                shape.span()
            ),
        ));
    }
    Ok(())
}

impl<'a> Tensor<'a> {
    /// A dense row-major tensor over `data`, which may be longer than the shape needs.
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Self::with_shape(data, Shape::dense(T::DTYPE, shape)?)
    }

    /// A tensor over `data` with strides in elements.
    pub fn strided<T: Element>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        Self::with_shape(data, Shape::strided(T::DTYPE, shape, strides)?)
    }

    fn with_shape<T: Element>(data: &'a [T], shape: Shape) -> Result<Self> {
        check_len(data.len(), &shape)?;
        Ok(Self {
            data: data.as_ptr().cast(),
            shape,
            memory: PhantomData,
        })
    }

    /// A dense tensor of any element type over raw bytes.
    ///
    /// # Errors
    /// `bytes` is too short or not aligned to the element size.
    pub fn from_bytes(bytes: &'a [u8], dtype: DType, shape: &[usize]) -> Result<Self> {
        let shape = Shape::dense(dtype, shape)?;
        check_alignment(bytes.as_ptr(), dtype)?;
        check_len(bytes.len() / dtype.size(), &shape)?;
        Ok(Self {
            data: bytes.as_ptr(),
            shape,
            memory: PhantomData,
        })
    }

    /// A tensor over memory that Rust does not know, on `device`.
    ///
    /// # Safety
    /// Every element that `shape` reaches from `data` must be readable on `device`, aligned to its
    /// size, and neither freed nor written until `'a` ends and, for a call that is asynchronous on
    /// a stream, until the work of that call on the stream is done.
    pub unsafe fn from_raw(data: *const u8, mut shape: Shape, device: Device) -> Self {
        shape.device = device;
        Self {
            data,
            shape,
            memory: PhantomData,
        }
    }

    shape_accessors!();

    /// Address of the first element.
    pub fn as_ptr(&self) -> *const u8 {
        self.data
    }

    /// The elements of a dense host tensor.
    ///
    /// # Errors
    /// The tensor has another element type, is strided, or is not on the host.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        check_slice::<T>(self.dtype(), self.is_dense(), self.device())?;
        // Zero elements may come with any pointer.
        Ok(match self.shape.span() {
            0 => &[],
            // SAFETY: a dense host tensor of `T` reaches `n` elements from `data`, all of them
            // borrowed for 'a.
            n => unsafe { std::slice::from_raw_parts(self.data.cast(), n) },
        })
    }

    /// Row `i` of the first dimension, which must be dense within itself, as bytes.
    ///
    /// # Panics
    /// If `i` is out of range, the row is not dense or the tensor is not on the host; engines check
    /// both when they accept an argument.
    pub fn row(&self, i: usize) -> &'a [u8] {
        assert!(i < self.shape()[0] && self.rows_are_dense() && self.device() == Device::Host);
        let bytes = self.row_bytes();
        // SAFETY: row `i` lies inside the borrowed memory; offsets are 64-bit.
        unsafe {
            std::slice::from_raw_parts(
                self.data
                    .add(i * self.shape.strides[0] * self.dtype().size()),
                bytes,
            )
        }
    }

    /// Element `[i, j]` of a two-dimensional host tensor, with any strides.
    ///
    /// # Panics
    /// If an index is out of range or `T` is not the element type.
    pub fn at<T: Element>(&self, i: usize, j: usize) -> T {
        assert!(
            self.shape.ndim == 2
                && i < self.shape.dims[0]
                && j < self.shape.dims[1]
                && T::DTYPE == self.dtype()
                && self.device() == Device::Host
        );
        // SAFETY: the index is in range, so the element lies inside the borrowed memory.
        unsafe {
            self.data
                .cast::<T>()
                .add(i * self.shape.strides[0] + j * self.shape.strides[1])
                .read_unaligned()
        }
    }

    /// Bytes of one row of the first dimension.
    pub fn row_bytes(&self) -> usize {
        row_bytes(&self.shape)
    }

    /// Whether each row of the first dimension is dense (rows themselves may be apart).
    pub fn rows_are_dense(&self) -> bool {
        rows_are_dense(&self.shape)
    }
}

impl<'a> TensorMut<'a> {
    /// A dense row-major tensor over `data`, which may be longer than the shape needs.
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        let shape = Shape::dense(T::DTYPE, shape)?;
        check_len(data.len(), &shape)?;
        Ok(Self {
            data: data.as_mut_ptr().cast(),
            shape,
            memory: PhantomData,
        })
    }

    /// A tensor over `data` with strides in elements.
    ///
    /// # Errors
    /// `data` is too short, or two elements would share memory.
    pub fn strided<T: Element>(
        data: &'a mut [T],
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self> {
        let shape = Shape::strided(T::DTYPE, shape, strides)?;
        check_len(data.len(), &shape)?;
        check_no_overlap(&shape)?;
        Ok(Self {
            data: data.as_mut_ptr().cast(),
            shape,
            memory: PhantomData,
        })
    }

    /// A dense tensor of any element type over raw bytes.
    ///
    /// # Errors
    /// `bytes` is too short or not aligned to the element size.
    pub fn from_bytes(bytes: &'a mut [u8], dtype: DType, shape: &[usize]) -> Result<Self> {
        let shape = Shape::dense(dtype, shape)?;
        check_alignment(bytes.as_ptr(), dtype)?;
        check_len(bytes.len() / dtype.size(), &shape)?;
        Ok(Self {
            data: bytes.as_mut_ptr(),
            shape,
            memory: PhantomData,
        })
    }

    /// A tensor over memory that Rust does not know, on `device`.
    ///
    /// # Safety
    /// As [`Tensor::from_raw`]; besides, nobody else may read or write the elements meanwhile, and
    /// no two elements may share memory.
    pub unsafe fn from_raw(data: *mut u8, mut shape: Shape, device: Device) -> Self {
        shape.device = device;
        Self {
            data,
            shape,
            memory: PhantomData,
        }
    }

    shape_accessors!();

    /// Address of the first element.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.data
    }

    /// The elements of a dense host tensor.
    ///
    /// # Errors
    /// The tensor has another element type, is strided, or is not on the host.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        check_slice::<T>(self.dtype(), self.is_dense(), self.device())?;
        Ok(match self.shape.span() {
            0 => &mut [],
            // SAFETY: as in `Tensor::as_slice`, and the borrow is exclusive.
            n => unsafe { std::slice::from_raw_parts_mut(self.data.cast(), n) },
        })
    }

    /// A shared view.
    pub fn as_tensor(&self) -> Tensor<'_> {
        Tensor {
            data: self.data,
            shape: self.shape,
            memory: PhantomData,
        }
    }

    /// A shorter borrow of the same memory.
    pub fn reborrow(&mut self) -> TensorMut<'_> {
        TensorMut {
            data: self.data,
            shape: self.shape,
            memory: PhantomData,
        }
    }

    /// Bytes of one row of the first dimension.
    pub fn row_bytes(&self) -> usize {
        row_bytes(&self.shape)
    }

    /// Whether each row of the first dimension is dense (rows themselves may be apart).
    pub fn rows_are_dense(&self) -> bool {
        rows_are_dense(&self.shape)
    }
}

fn row_bytes(shape: &Shape) -> usize {
    // Without rows a row may have any length, also one that no memory could hold.
    shape.dims[1..shape.ndim]
        .iter()
        .fold(shape.dtype.size(), |bytes, &n| bytes.saturating_mul(n))
}

fn rows_are_dense(shape: &Shape) -> bool {
    let inner = &shape.dims[1..shape.ndim];
    inner
        .iter()
        .zip(&shape.strides[1..shape.ndim])
        .zip(dense_strides(inner))
        .all(|((&n, &stride), dense)| n <= 1 || stride == dense)
}

fn check_alignment(data: *const u8, dtype: DType) -> Result<()> {
    if !data.addr().is_multiple_of(dtype.size()) {
        return Err(Error::invalid(
            "bytes",
            format!("at {:#x}", data.addr()),
            Text::from(format!("must be aligned to {} bytes", dtype.size())),
        ));
    }
    Ok(())
}

fn check_no_overlap(shape: &Shape) -> Result<()> {
    if shape.dims[..shape.ndim].contains(&0) {
        return Ok(());
    }
    // Sorted by stride, each dimension must step over all that the smaller ones reach.
    let mut order: Vec<_> = (0..shape.ndim).filter(|&i| shape.dims[i] > 1).collect();
    order.sort_by_key(|&i| shape.strides[i]);
    let mut reach = 1;
    for i in order {
        if shape.strides[i] < reach {
            return Err(Error::invalid(
                "strides",
                format!("{:?}", &shape.strides[..shape.ndim]),
                "must not let two elements of an output share memory",
            ));
        }
        reach += shape.strides[i] * (shape.dims[i] - 1);
    }
    Ok(())
}

fn check_slice<T: Element>(dtype: DType, dense: bool, device: Device) -> Result<()> {
    if T::DTYPE != dtype {
        return Err(Error::invalid(
            "dtype",
            dtype,
            format!("must be {}", T::DTYPE),
        ));
    }
    if !dense {
        return Err(Error::invalid("tensor", "strided", "must be dense"));
    }
    if device != Device::Host {
        return Err(Error::invalid(
            "device",
            format!("{device:?}"),
            "must be the host",
        ));
    }
    Ok(())
}

macro_rules! debug_as_shape {
    ($($type:ty),*) => {$(
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} {:?} on {:?}", self.dtype(), self.shape(), self.device())
            }
        }
    )*};
}

debug_as_shape!(Tensor<'_>, TensorMut<'_>, OwnedTensor);

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.ndim;
        write!(
            f,
            "{} {:?} strides {:?}",
            self.dtype,
            &self.dims[..n],
            &self.strides[..n]
        )
    }
}

/// A tensor that the library made for a result.
///
/// On the host it is zero-filled until written: the memory is aligned to 64 bytes and comes zeroed
/// from the system, so rows that nobody writes cost no physical memory. On a device it is a part of
/// a block that is given back when its last owner is gone; what was not written is undefined.
pub struct OwnedTensor {
    data: *mut u8,
    /// What keeps the memory.
    _memory: Memory,
    shape: Shape,
}

/// The owner of a tensor's memory.
#[expect(dead_code, reason = "owners are held, not used")]
enum Memory {
    Host(Zeroed),
    Device(Arc<dyn Any + Send + Sync>),
}

// SAFETY: the memory is plain bytes that the tensor owns, or shares with tensors of other bytes.
unsafe impl Send for OwnedTensor {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for OwnedTensor {}

impl OwnedTensor {
    /// A dense tensor of zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the allocation fails.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Result<Self> {
        Self::with_shape(Shape::dense(dtype, shape)?)
    }

    /// Zeros with the given strides, in elements. No two elements may share memory.
    pub fn zeros_strided(dtype: DType, shape: &[usize], strides: &[usize]) -> Result<Self> {
        let shape = Shape::strided(dtype, shape, strides)?;
        check_no_overlap(&shape)?;
        Self::with_shape(shape)
    }

    fn with_shape(shape: Shape) -> Result<Self> {
        let memory = Zeroed::new(shape.span() * shape.dtype.size())?;
        Ok(Self {
            data: memory.data,
            _memory: Memory::Host(memory),
            shape,
        })
    }

    /// A tensor in memory of a device that `owner` keeps.
    ///
    /// # Safety
    /// Every element that `shape` reaches from `data` lies in memory of `device` that stays valid
    /// while `owner` lives, and nothing else writes it while the tensor is read.
    pub unsafe fn from_device(
        data: *mut u8,
        mut shape: Shape,
        device: Device,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        shape.device = device;
        Self {
            data,
            _memory: Memory::Device(owner),
            shape,
        }
    }

    shape_accessors!();

    /// A shared view.
    pub fn as_tensor(&self) -> Tensor<'_> {
        Tensor {
            data: self.data,
            shape: self.shape,
            memory: PhantomData,
        }
    }

    /// An exclusive view.
    pub fn as_tensor_mut(&mut self) -> TensorMut<'_> {
        TensorMut {
            data: self.data,
            shape: self.shape,
            memory: PhantomData,
        }
    }

    /// The elements. Errors as [`Tensor::as_slice`].
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.as_tensor().as_slice()
    }

    /// The elements. Errors as [`TensorMut::as_mut_slice`].
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        check_slice::<T>(self.dtype(), self.is_dense(), self.device())?;
        Ok(match self.shape.span() {
            0 => &mut [],
            // SAFETY: as in `TensorMut::as_mut_slice`.
            n => unsafe { std::slice::from_raw_parts_mut(self.data.cast(), n) },
        })
    }
}

/// Zeroed bytes aligned to 64.
struct Zeroed {
    /// The first byte that is a multiple of 64, inside the allocation.
    data: *mut u8,
    allocation: *mut u8,
    layout: std::alloc::Layout,
}

// SAFETY: plain owned bytes.
unsafe impl Send for Zeroed {}
// SAFETY: plain owned bytes; shared access only reads.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    /// Alignment of the first byte.
    const ALIGN: usize = 64;

    /// The allocator is asked for less alignment than is wanted: only then does it take zeroed pages
    /// from the system instead of writing zeros, which would give all of them memory.
    fn new(bytes: usize) -> Result<Self> {
        let out_of_memory = || Error::OutOfMemory {
            purpose: "an output tensor".into(),
            requested: bytes as u64,
            limit: isize::MAX as u64,
        };
        let padded = bytes.checked_add(Self::ALIGN).ok_or_else(out_of_memory)?;
        let layout = std::alloc::Layout::from_size_align(padded, 8).map_err(|_| out_of_memory())?;
        // SAFETY: the layout's size is not zero.
        let allocation = unsafe { std::alloc::alloc_zeroed(layout) };
        if allocation.is_null() {
            return Err(out_of_memory());
        }
        let data = allocation.wrapping_add(allocation.align_offset(Self::ALIGN));
        Ok(Self {
            data,
            allocation,
            layout,
        })
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { std::alloc::dealloc(self.allocation, self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_must_fit_its_memory() {
        let data = [0i32; 11];
        assert!(Tensor::new(&data, &[3, 4]).is_err());
        assert!(Tensor::strided(&data, &[2, 3], &[8, 1]).is_ok());
        assert!(Tensor::strided(&data, &[2, 4], &[8, 1]).is_err());
        assert!(Tensor::new(&data, &[0, usize::MAX]).is_ok());
        assert!(Tensor::new(&data, &[usize::MAX, usize::MAX]).is_err());
        assert!(Tensor::new(&data, &[usize::MAX, usize::MAX, 2]).is_err());
        let none = Tensor::new(&data, &[0, usize::MAX, usize::MAX]).unwrap();
        assert!(none.rows_are_dense() && none.row_bytes() == usize::MAX);
    }

    #[test]
    fn outputs_may_not_overlap_themselves() {
        let mut data = [0f32; 12];
        assert!(TensorMut::strided(&mut data, &[3, 4], &[0, 1]).is_err());
        assert!(TensorMut::strided(&mut data, &[3, 4], &[1, 3]).is_ok());
        assert!(TensorMut::strided(&mut data, &[2, 0, 4], &[0, 1, 0]).is_ok());
    }

    #[test]
    fn owned_tensors_are_aligned_and_cost_nothing_until_written() {
        let resident_pages = || -> usize {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            statm.split(' ').nth(1).unwrap().parse().unwrap()
        };
        let before = resident_pages();
        let tensor = OwnedTensor::zeros(DType::F32, &[1 << 16, 1 << 15]).unwrap();
        assert!(tensor.as_tensor().as_ptr().addr().is_multiple_of(64));
        assert_eq!(tensor.as_tensor().at::<f32>(65_535, 32_767), 0.0);
        // 8 GiB would be 2 million pages.
        assert!(resident_pages() < before + 500_000);
    }

    #[test]
    fn strided_elements_are_found() {
        let data: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let columns = Tensor::strided(&data, &[3, 4], &[1, 3]).unwrap();
        assert_eq!(columns.at::<f32>(2, 1), 5.0);
        assert!(!columns.rows_are_dense());
    }
}
