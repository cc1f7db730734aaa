//! Loans: rows in symmetric memory that a caller holds as a view.

use std::fmt;

use crate::{
    dtype::{DType, Element},
    engine::LoanMemory,
    error::{Error, Result},
    tensor::{Device, Shape, Tensor},
};

/// A dense tensor in this rank's symmetric memory, held until it is dropped.
///
/// [`PendingDispatch::finish`](crate::PendingDispatch::finish) returns received rows as a loan:
/// they were written once, at their final place. A loan passed to
/// [`Buffer::combine`](crate::Buffer::combine) is read by the token's owners where it is, without
/// staging. Dropping a loan never waits: its memory is used again when the last reader is done. A
/// loan outlives its buffer if it must.
///
/// On a GPU the memory may be given to the next call or loan of the buffer at once, which uses it in
/// the order of its stream: work on other streams that reads the loan must be done, or that stream
/// must wait for it, before the loan is dropped. What was recorded into a graph keeps its memory.
pub struct Loan {
    pub(crate) memory: Box<dyn LoanMemory>,
    dtype: DType,
    shape: Vec<usize>,
}

impl Loan {
    pub(crate) fn new(memory: Box<dyn LoanMemory>, dtype: DType, shape: &[usize]) -> Self {
        Self {
            memory,
            dtype,
            shape: shape.to_vec(),
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extent of each dimension; rows are dense.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// Where it lies.
    pub fn device(&self) -> Device {
        self.memory.device()
    }

    /// A view of the whole loan, on the host or on its device.
    pub fn as_tensor(&self) -> Tensor<'_> {
        let shape = Shape::dense(self.dtype, &self.shape).expect("checked when it was made");
        // SAFETY: the block is at least `len` bytes on this device, readable while it is lent.
        unsafe { Tensor::from_raw(self.memory.as_ptr(), shape, self.memory.device()) }
    }

    /// The bytes, row-major.
    ///
    /// # Errors
    /// It lies on a device; then [`as_tensor`](Self::as_tensor) has its address.
    pub fn as_bytes(&self) -> Result<&[u8]> {
        self.on_host()?;
        // SAFETY: the block is at least `len` bytes, readable, and nobody writes it while it is
        // lent: peers wrote their rows before the call that made the loan returned.
        Ok(unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.len()) })
    }

    /// The elements, row-major.
    ///
    /// # Errors
    /// `T` is not the element type, or it lies on a device.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.check::<T>()?;
        Ok(bytemuck::cast_slice(self.as_bytes()?))
    }

    /// The bytes for writing. Waits until no peer reads them any more: a combine that was given
    /// this loan may still be running on another rank.
    ///
    /// # Errors
    /// It lies on a device. Or the deadline passed or a peer is gone, so it is not known that
    /// reading has ended.
    pub fn as_bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.on_host()?;
        self.memory.wait_unread()?;
        // SAFETY: as in `as_bytes`; besides, no peer reads the block now, and a peer starts to read
        // it only in a call that borrows the loan.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().cast_mut(), self.len()) })
    }

    /// The elements for writing. Waits as [`Loan::as_bytes_mut`] does.
    ///
    /// # Errors
    /// `T` is not the element type, or as [`Loan::as_bytes_mut`].
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check::<T>()?;
        Ok(bytemuck::cast_slice_mut(self.as_bytes_mut()?))
    }

    fn on_host(&self) -> Result<()> {
        match self.device() {
            Device::Host => Ok(()),
            device => Err(Error::invalid(
                "loan",
                format!("on {device:?}"),
                "must be on the host",
            )),
        }
    }

    fn check<T: Element>(&self) -> Result<()> {
        if T::DTYPE != self.dtype {
            return Err(Error::invalid(
                "dtype",
                self.dtype,
                format!("must be {}", T::DTYPE),
            ));
        }
        Ok(())
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "loan of {} {:?}", self.dtype, self.shape)
    }
}
