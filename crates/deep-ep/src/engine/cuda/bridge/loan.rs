//! Loans that a host caller can read and write.
//!
//! Such a loan has bytes on the host and the engine's loan on the device. They are the same when a
//! dispatch returns it. Whoever gets the host bytes for writing makes them newer; the next combine
//! copies them to the engine's loan first, which is what is combined.

use std::{
    any::Any,
    sync::atomic::{AtomicBool, Ordering},
};

use super::lane::Lane;
use crate::{
    buffer::{CombineRows, Loan},
    engine::LoanMemory,
    error::Result,
    tensor::OwnedTensor,
};

pub(super) struct HostLoan {
    host: OwnedTensor,
    device: Loan,
    /// The host bytes may differ from the device's.
    newer: AtomicBool,
}

impl LoanMemory for HostLoan {
    fn as_ptr(&self) -> *const u8 {
        self.host.as_tensor().as_ptr()
    }

    /// Called when the host bytes are about to be written.
    fn wait_unread(&self) -> Result<()> {
        self.device.memory.wait_unread()?;
        // The writer has the loan to itself; a combine on another thread sees what it was handed.
        self.newer.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A loan whose rows a dispatch has brought.
pub(super) fn received(lane: &Lane, device: Loan) -> Result<Loan> {
    let host = lane.down(&device.as_tensor())?;
    Ok(wrap(host, device, false))
}

/// A loan that the caller is to fill; zeros until then.
pub(super) fn fresh(device: Loan) -> Result<Loan> {
    let host = OwnedTensor::zeros(device.dtype(), device.shape())?;
    Ok(wrap(host, device, true))
}

fn wrap(host: OwnedTensor, device: Loan, newer: bool) -> Loan {
    let (dtype, shape) = (device.dtype(), device.shape().to_vec());
    let memory = HostLoan {
        host,
        device,
        newer: AtomicBool::new(newer),
    };
    Loan::new(Box::new(memory), dtype, &shape)
}

impl HostLoan {
    /// The bridge's memory of a combine's rows, if they are a loan of a bridge.
    pub(super) fn of<'a>(rows: &CombineRows<'a>) -> Option<&'a Self> {
        match rows {
            CombineRows::Loan(loan) => loan.memory.as_any().downcast_ref(),
            CombineRows::Caller(_) => None,
        }
    }

    /// The engine's loan.
    pub(super) fn device(&self) -> &Loan {
        &self.device
    }

    /// Copies all host bytes to the engine's loan if they are newer. Peers do not read it now: that
    /// was waited for when the host bytes were lent for writing.
    pub(super) fn update(&self, lane: &Lane) -> Result<()> {
        if !self.newer.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let elements: usize = self.host.shape().iter().product();
        let flat = [1, elements.min(1), elements];
        let copied = self.copy(lane, &flat, &[1]);
        if copied.is_err() {
            self.newer.store(true, Ordering::Relaxed);
        }
        copied
    }

    /// Copies the first `counts[e]` rows of each expert of `[E, rows, H]` if the host bytes are newer.
    /// Other rows stay as they are, so that the bytes remain newer.
    pub(super) fn update_rows(&self, lane: &Lane, counts: &[usize]) -> Result<()> {
        match self.newer.load(Ordering::Relaxed) {
            true => self.copy(lane, self.host.shape(), counts),
            false => Ok(()),
        }
    }

    /// Copies rows of both seen as dense tensors of this shape.
    fn copy(&self, lane: &Lane, shape: &[usize], counts: &[usize]) -> Result<()> {
        let host = self.host.as_tensor();
        let layout = crate::Shape::dense(host.dtype(), shape)?;
        // SAFETY: the host tensor is dense and has as many elements.
        let host = unsafe { crate::Tensor::from_raw(host.as_ptr(), layout, host.device()) };
        // SAFETY: no peer reads the loan, and this rank's calls use it in the order of the stream.
        unsafe { lane.rows_up(&host, &self.device.as_tensor(), counts) }
    }
}
