//! Loans: memory of the library that C holds.

use std::{
    ffi::c_void,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use deep_ep::{Device, Error, Loan, OwnedTensor, Result};

use crate::{
    boundary,
    buffer::{self, BufferObject},
    handle::LowLatencyHandleObject,
    objects::{self, Object},
    pointers::{self, Out},
    status::Status,
    tensor::{DTypeCode, TensorView, dtype},
};

/// Memory of the library that the caller holds until he frees it.
pub struct LoanObject {
    /// In symmetric memory; a combine that was begun with it holds it, too.
    lent: Mutex<Option<Arc<Loan>>>,
    /// Other memory that came with it.
    _rest: Vec<OwnedTensor>,
}

impl Object for LoanObject {
    const NAME: &'static str = "deep_ep_loan_t";
}

impl LoanObject {
    pub(crate) fn new(lent: Option<Loan>, rest: Vec<OwnedTensor>) -> Self {
        Self {
            lent: Mutex::new(lent.map(Arc::new)),
            _rest: rest,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Loan>>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rows in symmetric memory.
    pub(crate) fn rows(&self) -> Result<Arc<Loan>> {
        self.lock().clone().ok_or_else(|| {
            let limit =
                "must be of a dispatch, deep_ep_loan() or its like, not of low-latency rows";
            Error::invalid("loan", "not in symmetric memory", limit)
        })
    }

    /// Address for writing, when nobody reads it any more.
    fn writable(&self) -> Result<*mut c_void> {
        let mut lent = self.lock();
        let Some(rows) = lent.as_mut() else {
            drop(lent);
            return Err(self.rows().map(drop).unwrap_err());
        };
        if rows.device() != Device::Host {
            return Ok(rows.as_tensor().as_ptr().cast_mut().cast());
        }
        let rows = Arc::get_mut(rows).ok_or_else(|| {
            let limit = "must not be written before that combine is finished or freed";
            Error::invalid("loan", "the input of a combine that was begun", limit)
        })?;
        Ok(rows.as_bytes_mut()?.as_mut_ptr().cast())
    }
}

/// What makes a loan of a type and shape.
type Make = fn(&deep_ep::Buffer, deep_ep::DType, &[usize]) -> Result<Loan>;

fn make(
    buffer: *const BufferObject,
    code: DTypeCode,
    shape: (*const usize, usize),
    loan: *mut *mut LoanObject,
    make: Make,
) -> Status {
    boundary::call(|| {
        let out = Out::new(loan, "loan")?;
        let buffer = buffer::get(buffer)?;
        let shape = pointers::slice(shape.0, shape.1, "shape")?;
        let made = make(&buffer.inner, dtype(code, "dtype")?, shape)?;
        out.set(objects::give(LoanObject::new(Some(made), vec![])));
        Ok(())
    })
}

/// A dense tensor in symmetric memory, to be filled and passed to a combine, which then copies nothing.
/// `dtype` is a value of `deep_ep_dtype`, `shape` has `ndim` (1 to 3) numbers. It can be read and
/// written on the host whatever the engine. Local. `*loan` is the caller's to free. One thread at a
/// time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_loan(
    buffer: *const BufferObject,
    dtype: DTypeCode,
    shape: *const usize,
    ndim: usize,
    loan: *mut *mut LoanObject,
) -> Status {
    make(buffer, dtype, (shape, ndim), loan, deep_ep::Buffer::loan)
}

/// As `deep_ep_loan()`, where the engine works: on the GPU with the CUDA engine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_device_loan(
    buffer: *const BufferObject,
    dtype: DTypeCode,
    shape: *const usize,
    ndim: usize,
    loan: *mut *mut LoanObject,
) -> Status {
    make(
        buffer,
        dtype,
        (shape, ndim),
        loan,
        deep_ep::Buffer::device_loan,
    )
}

/// A bf16 tensor `[E/R, R*M, hidden]` in symmetric memory for the outputs of the experts of `handle`,
/// for a low-latency combine without a copy. Only rows in use take memory. Local. `*loan` is the
/// caller's to free. One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_get_next_low_latency_combine_buffer(
    buffer: *const BufferObject,
    handle: *const LowLatencyHandleObject,
    hidden: usize,
    loan: *mut *mut LoanObject,
) -> Status {
    boundary::call(|| {
        let out = Out::new(loan, "loan")?;
        let buffer = buffer::get(buffer)?;
        let handle = objects::get(handle, "handle")?;
        let made = buffer
            .inner
            .next_low_latency_combine_buffer(&handle.handle, hidden)?;
        out.set(objects::give(LoanObject::new(Some(made), vec![])));
        Ok(())
    })
}

/// The tensor of a loan, for reading; it lives as long as the loan. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_loan_tensor(
    loan: *const LoanObject,
    tensor: *mut TensorView,
) -> Status {
    boundary::call(|| {
        let out = Out::new(tensor, "tensor")?;
        let rows = objects::get(loan, "loan")?.rows()?;
        out.set(TensorView::of(&rows.as_tensor()));
        Ok(())
    })
}

/// The address of a loan's first element, for writing: waits until no peer reads it any more, as a combine
/// that was given this loan may still be running on another rank. On a GPU it does not wait; work
/// on the buffer's stream is in order. One thread at a time for each loan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_loan_write(
    loan: *const LoanObject,
    data: *mut *mut c_void,
) -> Status {
    boundary::call(|| {
        let out = Out::new(data, "data")?;
        out.set(objects::get(loan, "loan")?.writable()?);
        Ok(())
    })
}

/// Gives a loan back; tensors in it are gone. Never waits. A combine that was begun with it keeps it.
/// On a GPU, work on other streams that uses it must be done. NULL is allowed. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_loan_free(loan: *mut LoanObject) -> Status {
    boundary::call(|| objects::take(loan, "loan"))
}
