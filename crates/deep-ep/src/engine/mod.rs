//! Engines: what moves the rows. Everything that differs between CPU and GPU is behind
//! [`Engine`]; the buffer above has checked shapes and types before an engine sees them.
//!
//! A call is begun and later finished. An engine keeps no borrow of the caller's memory between the
//! two: it is given the same input again, so a call that is forgotten cannot leave it a dangling
//! pointer. Dropping an unfinished call abandons it.

pub(crate) mod cpu;
pub mod cuda;

use crate::{
    buffer::{
        CombineInput, CombineOutput, DispatchHandle, DispatchInput, DispatchOutput, Dispatched,
        Layout, Loan, LowLatencyCombineInput, LowLatencyDispatchInput, LowLatencyDispatchOutput,
        LowLatencyHandle, ReceivedCounts, Statistics, Stream,
    },
    dtype::DType,
    error::{Reject, Result},
    tensor::{Device, OwnedTensor, Tensor, TensorMut},
    topology::Rank,
};

/// An operation that all ranks take part in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Operation {
    Dispatch = 1,
    Combine = 2,
    LowLatencyDispatch = 3,
    LowLatencyCombine = 4,
    Barrier = 5,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::LowLatencyDispatch => "low_latency_dispatch",
            Self::LowLatencyCombine => "low_latency_combine",
            Self::Barrier => "barrier",
        }
    }

    pub(crate) fn from_code(code: u64) -> Option<Self> {
        [
            Self::Dispatch,
            Self::Combine,
            Self::LowLatencyDispatch,
            Self::LowLatencyCombine,
            Self::Barrier,
        ]
        .into_iter()
        .find(|op| *op as u64 == code)
    }
}

/// Moves rows between the ranks of one group. Calls of one engine are made one at a time and in the
/// same order on all ranks.
pub(crate) trait Engine: Send + Sync {
    /// `cpu` or `cuda`.
    fn name(&self) -> &'static str;
    /// Whether tensors on `device` can be passed.
    fn takes(&self, device: Device) -> bool;
    /// Counts and routes of a batch.
    fn layout(&self, topk_idx: Tensor<'_>, num_experts: usize, stream: Stream) -> Result<Layout>;
    /// Takes part in a call only to tell the peers that this rank's arguments were not accepted.
    fn reject(&self, operation: Operation, reject: &Reject);
    /// Routes, announces counts and moves what can be moved without a peer.
    fn dispatch(&self, input: &DispatchInput<'_>) -> Result<Box<dyn DispatchCall>>;
    /// Announces, and puts rows where their owners can read them.
    fn combine(&self, input: &CombineInput<'_>) -> Result<Box<dyn CombineCall>>;
    /// Sends.
    fn low_latency_dispatch(
        &self,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<Box<dyn LowLatencyDispatchCall>>;
    /// Sends.
    fn low_latency_combine(
        &self,
        input: &mut LowLatencyCombineInput<'_>,
    ) -> Result<Box<dyn LowLatencyCombineCall>>;
    /// Waits until all ranks that are not masked are here; with `enable_shrink` masks absent ones.
    fn barrier(&self) -> Result<()>;
    /// A block of symmetric memory for the caller to fill.
    fn loan(&self, dtype: DType, shape: &[usize]) -> Result<Loan>;
    /// As [`loan`](Self::loan), on the device of an engine that takes host tensors besides.
    fn device_loan(&self, dtype: DType, shape: &[usize]) -> Result<Loan> {
        self.loan(dtype, shape)
    }
    /// Room for `[E/R, R*M, H]` bf16 of which only the rows in use, as `handle` says, take memory.
    fn low_latency_combine_buffer(&self, handle: &LowLatencyHandle, hidden: usize) -> Result<Loan>;
    /// Grows symmetric memory to at least this many bytes now.
    fn reserve(&self, bytes: usize) -> Result<()>;
    /// Whether each rank is masked.
    fn masks(&self) -> Vec<bool>;
    /// Masks a rank or takes it back.
    fn set_mask(&self, rank: Rank, masked: bool);
    /// What went wrong in calls whose results nobody has waited for, once.
    fn check(&self) -> Result<()>;
    /// Counters and memory use.
    fn statistics(&self) -> Statistics;
    /// SMs that launches of high-throughput calls have used since this was last asked.
    #[cfg(test)]
    fn take_seen_sms(&self) -> Result<u32> {
        Ok(0)
    }
}

/// A dispatch in flight.
pub(crate) trait DispatchCall: Send {
    fn counts(&mut self, input: &DispatchInput<'_>) -> Result<&ReceivedCounts>;
    fn finish(&mut self, input: &DispatchInput<'_>) -> Result<Dispatched>;
    fn finish_into(
        &mut self,
        input: &DispatchInput<'_>,
        out: &mut DispatchOutput<'_>,
    ) -> Result<(ReceivedCounts, DispatchHandle)>;
}

/// A combine in flight.
pub(crate) trait CombineCall: Send {
    fn finish_into(&mut self, input: &CombineInput<'_>, out: &mut CombineOutput<'_>) -> Result<()>;
}

/// A low-latency dispatch in flight.
pub(crate) trait LowLatencyDispatchCall: Send {
    /// Memory for the rows and scales.
    fn allocate(
        &self,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<(OwnedTensor, Option<OwnedTensor>)>;
    /// What [`finish_into`](Self::finish_into) will fill and return, if that can be known before.
    fn tables(
        &mut self,
        _input: &LowLatencyDispatchInput<'_>,
    ) -> Result<Option<(OwnedTensor, LowLatencyHandle)>> {
        Ok(None)
    }
    fn finish_into(
        &mut self,
        input: &mut LowLatencyDispatchInput<'_>,
        out: &mut LowLatencyDispatchOutput<'_>,
    ) -> Result<(OwnedTensor, LowLatencyHandle)>;
}

/// A low-latency combine in flight.
pub(crate) trait LowLatencyCombineCall: Send {
    fn finish_into(
        &mut self,
        input: &mut LowLatencyCombineInput<'_>,
        out: TensorMut<'_>,
    ) -> Result<()>;
}

/// The memory of a loan. Dropping it gives the block back when the last reader is done, without
/// waiting.
pub(crate) trait LoanMemory: Send + Sync + std::any::Any {
    /// Its address, on its device.
    fn as_ptr(&self) -> *const u8;
    /// Where it lies.
    fn device(&self) -> Device {
        Device::Host
    }
    /// Waits until no peer reads the block.
    fn wait_unread(&self) -> Result<()>;
    fn as_any(&self) -> &dyn std::any::Any;
}
