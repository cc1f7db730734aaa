//! Landing blocks: where peers write a call's rows, and what callers hold of them.

use std::{any::Any, sync::Arc};

use super::{
    core::Piece,
    params::{DispatchParams, Terms},
};
use crate::{
    dtype::DType,
    engine::LoanMemory,
    error::Result,
    tensor::{Device, OwnedTensor, Shape},
};

/// Bytes per row of the parts of a landing block; `Landing` in rows.cuh places them in the same way.
#[derive(Debug, Clone, Copy)]
pub(super) struct LandingLayout {
    pub(super) topk_bytes: u64,
    pub(super) weight_bytes: u64,
    /// Weights travel. If not, their place is left empty.
    pub(super) weighs: bool,
    pub(super) scale_bytes: u64,
    pub(super) row_bytes: u64,
}

/// Where the parts begin, in bytes from the block's beginning.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts {
    pub(super) topk: u64,
    pub(super) weights: u64,
    pub(super) scales: u64,
    pub(super) rows: u64,
}

impl LandingLayout {
    pub(super) fn of(params: &DispatchParams) -> Self {
        let top_k = u64::from(params.top_k);
        Self {
            topk_bytes: top_k * u64::from(params.index_bytes),
            weight_bytes: top_k * 4,
            weighs: Terms::of_word(params.terms).weights,
            scale_bytes: u64::from(params.scale_words) * 4,
            row_bytes: params.row_bytes.into(),
        }
    }

    /// Of a block with room for `capacity` rows.
    pub(super) fn parts(&self, capacity: usize) -> Parts {
        let capacity = capacity as u64;
        let part = |at: u64, bytes: u64| at + (capacity * bytes).next_multiple_of(256);
        let topk = part(0, 4);
        let weights = part(topk, self.topk_bytes);
        let scales = part(weights, self.weight_bytes);
        let rows = part(scales, self.scale_bytes);
        Parts {
            topk,
            weights,
            scales,
            rows,
        }
    }

    /// Of the whole block.
    pub(super) fn bytes(&self, capacity: usize) -> u64 {
        self.parts(capacity).rows + capacity as u64 * self.row_bytes
    }
}

/// A tensor at a device address that lies in `owner`.
pub(super) fn device_tensor(
    address: u64,
    dtype: DType,
    shape: &[usize],
    device: Device,
    owner: &Arc<Piece>,
) -> Result<OwnedTensor> {
    let shape = Shape::dense(dtype, shape)?;
    let owner: Arc<dyn Any + Send + Sync> = owner.clone();
    // SAFETY: callers pass the place of a part of the block, which is as large as its shape and is
    // not given to anybody else while the block is held.
    Ok(unsafe { OwnedTensor::from_device(address as *mut u8, shape, device, owner) })
}

/// Rows in symmetric memory of a GPU.
pub(super) struct CudaLoan {
    piece: Arc<Piece>,
    at: u64,
    device: Device,
}

impl CudaLoan {
    pub(super) fn new(piece: &Arc<Piece>, at: u64, device: Device) -> Self {
        Self {
            piece: Arc::clone(piece),
            at,
            device,
        }
    }
}

impl LoanMemory for CudaLoan {
    fn as_ptr(&self) -> *const u8 {
        (self.piece.address() + self.at) as *const u8
    }

    fn device(&self) -> Device {
        self.device
    }

    /// Peers never read a loan: rows are pushed.
    fn wait_unread(&self) -> Result<()> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
