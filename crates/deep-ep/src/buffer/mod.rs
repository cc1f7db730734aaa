//! [`Buffer`]: what callers hold. It checks arguments and hands them to the engine.

mod check;
mod combine;
mod config;
mod dispatch;
mod handle;
mod layout;
mod loan;
mod low_latency;
mod statistics;

use std::sync::Arc;

pub(crate) use check::{
    combine_output as check_combine_output, dispatch_output as check_dispatch_output,
    low_latency_combined as check_low_latency_combined,
    low_latency_output as check_low_latency_output,
};
pub use combine::{CombineInput, CombineOutput, CombineRows, Combined, PendingCombine};
pub use config::{BufferConfig, LowLatencyConfig, Stream};
pub use dispatch::{
    DispatchInput, DispatchOutput, Dispatched, Landing, PendingDispatch, ReceivedCounts, Routes,
    TopK,
};
pub use handle::{DeviceRoutes, DispatchHandle, LowLatencyHandle};
pub(crate) use handle::{SendPlan, pack_range};
pub use layout::{DeviceLayout, Layout};
pub use loan::Loan;
pub use low_latency::{
    CombineWire, LowLatencyCombineInput, LowLatencyDispatchInput, LowLatencyDispatchOutput,
    LowLatencyDispatched, PendingLowLatencyCombine, PendingLowLatencyDispatch, RowFormat,
};
pub use statistics::{MemoryUse, Statistics};

use crate::{
    bootstrap::Communicator,
    dtype::DType,
    engine::{
        Engine, Operation,
        cpu::CpuEngine,
        cuda::{Gpu, bridge::HostBridge, engine::CudaEngine},
    },
    error::{Error, Reject, Result},
    settings::EngineChoice,
    tensor::{Shape, Tensor},
    topology::{Rank, Topology},
};

/// Moves rows between the ranks of a communicator.
///
/// Making one is collective, and so are its calls: every rank makes the same calls on it in the same
/// order. It may be used from several threads, one at a time. Dropping it is not collective and
/// never waits for a peer.
pub struct Buffer {
    engine: Arc<dyn Engine>,
    communicator: Communicator,
    config: BufferConfig,
}

/// A call that all ranks make together, see [`Buffer::refuse`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// [`Buffer::dispatch`].
    Dispatch,
    /// [`Buffer::combine`].
    Combine,
    /// [`Buffer::low_latency_dispatch`].
    LowLatencyDispatch,
    /// [`Buffer::low_latency_combine`].
    LowLatencyCombine,
}

impl Call {
    fn operation(self) -> Operation {
        match self {
            Self::Dispatch => Operation::Dispatch,
            Self::Combine => Operation::Combine,
            Self::LowLatencyDispatch => Operation::LowLatencyDispatch,
            Self::LowLatencyCombine => Operation::LowLatencyCombine,
        }
    }
}

impl Buffer {
    /// Makes a buffer. Collective: settings that must agree are exchanged, and every rank maps the
    /// symmetric memory of its peers.
    ///
    /// # Errors
    /// A setting is not usable or differs between ranks; ranks are on other hosts; memory could not
    /// be had; the engine is not available here.
    pub fn new(communicator: &Communicator, config: BufferConfig) -> Result<Self> {
        let usable = config
            .check(communicator.size())
            .and_then(|()| Topology::single_node(communicator.size()));
        // A rank that cannot begin tells the others, which would otherwise wait for it.
        communicator.all_succeed(usable)?;
        let on_gpu = match config.engine {
            EngineChoice::Auto => config.device.is_some(),
            EngineChoice::Cpu => false,
            EngineChoice::Cuda => true,
        };
        let engine: Arc<dyn Engine> = if on_gpu {
            let engine = CudaEngine::new(communicator, &config)?;
            let bridge =
                Gpu::new(engine.ordinal()).and_then(|gpu| HostBridge::new(Arc::new(engine), gpu));
            Arc::new(communicator.all_succeed(bridge)?)
        } else {
            Arc::new(CpuEngine::new(communicator, &config)?)
        };
        Ok(Self {
            engine,
            communicator: communicator.clone(),
            config,
        })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.communicator.rank()
    }

    /// Ranks of the group, `R`.
    pub fn num_ranks(&self) -> usize {
        self.communicator.size()
    }

    /// What it was made with.
    pub fn config(&self) -> &BufferConfig {
        &self.config
    }

    /// Name of the engine in use.
    pub fn engine(&self) -> &'static str {
        self.engine.name()
    }

    /// SMs that high-throughput calls have used since this was last asked; nothing may be running.
    #[cfg(test)]
    pub(crate) fn take_seen_sms(&self) -> Result<u32> {
        self.engine.take_seen_sms()
    }

    /// Bytes copied and memory used so far on this rank.
    pub fn statistics(&self) -> Statistics {
        self.engine.statistics()
    }

    /// Counts and routes of a batch: `topk_idx` `[T, K]` i64 or i32, `num_experts` is `E`. Local.
    ///
    /// # Errors
    /// `E` is not a multiple of the ranks, or an id is `E` or above. On a GPU, where nobody waits
    /// for the counting, ids out of range are found by the dispatch that is given the choices.
    pub fn dispatch_layout(&self, topk_idx: Tensor<'_>, num_experts: usize) -> Result<Layout> {
        self.dispatch_layout_on(topk_idx, num_experts, Stream::HOST)
    }

    /// As [`dispatch_layout`](Self::dispatch_layout), ordered on a stream.
    ///
    /// # Errors
    /// As [`dispatch_layout`](Self::dispatch_layout).
    pub fn dispatch_layout_on(
        &self,
        topk_idx: Tensor<'_>,
        num_experts: usize,
        stream: Stream,
    ) -> Result<Layout> {
        check::layout(&topk_idx, num_experts, self)?;
        self.engine.layout(topk_idx, num_experts, stream)
    }

    /// What went wrong on this rank in calls for which nobody has waited, once: on a GPU a call that
    /// does not wait for its counts returns before its work is done. Call it after the stream was
    /// synchronised. A group that was aborted stays so.
    ///
    /// # Errors
    /// The first thing that went wrong since the last call.
    pub fn check(&self) -> Result<()> {
        self.engine.check()
    }

    /// Begins to send each row to every rank that hosts one of its experts.
    ///
    /// # Errors
    /// An argument is not usable: the peers' calls end with
    /// [`Error::PeerRejected`], and the buffer stays usable. Or a wait failed.
    pub fn dispatch<'io>(&self, input: DispatchInput<'io>) -> Result<PendingDispatch<'io>> {
        self.checked(Operation::Dispatch, check::dispatch(&input, self))?;
        Ok(PendingDispatch {
            call: self.engine.dispatch(&input)?,
            input,
        })
    }

    /// Begins to bring rows back to their owners, where they are summed.
    ///
    /// # Errors
    /// As [`Buffer::dispatch`].
    pub fn combine<'io>(&self, input: CombineInput<'io>) -> Result<PendingCombine<'io>> {
        self.checked(Operation::Combine, check::combine(&input, self))?;
        Ok(PendingCombine {
            call: self.engine.combine(&input)?,
            input,
        })
    }

    /// Sends rows to the chosen experts with a fixed capacity; the receive half is the returned
    /// call's.
    ///
    /// # Errors
    /// As [`Buffer::dispatch`]; besides more tokens or larger rows than the buffer was made for.
    pub fn low_latency_dispatch<'io>(
        &self,
        input: LowLatencyDispatchInput<'io>,
    ) -> Result<PendingLowLatencyDispatch<'io>> {
        self.checked(
            Operation::LowLatencyDispatch,
            check::low_latency_dispatch(&input, self),
        )?;
        Ok(PendingLowLatencyDispatch {
            call: self.engine.low_latency_dispatch(&input)?,
            input,
        })
    }

    /// Sends expert outputs back to the owners of their tokens; the receive half is the returned
    /// call's. Waits for the peers' sends of the same call (their weights), never for their
    /// receives.
    ///
    /// # Errors
    /// As [`Buffer::low_latency_dispatch`].
    pub fn low_latency_combine<'io>(
        &self,
        mut input: LowLatencyCombineInput<'io>,
    ) -> Result<PendingLowLatencyCombine<'io>> {
        self.checked(
            Operation::LowLatencyCombine,
            check::low_latency_combine(&input, self),
        )?;
        Ok(PendingLowLatencyCombine {
            call: self.engine.low_latency_combine(&mut input)?,
            input,
        })
    }

    /// A dense tensor in symmetric memory to be filled and passed to [`Buffer::combine`], which then
    /// need not stage it. Local.
    ///
    /// # Errors
    /// `shape` does not have 1 to 3 dimensions; memory could not be had.
    pub fn loan(&self, dtype: DType, shape: &[usize]) -> Result<Loan> {
        Shape::dense(dtype, shape)?;
        self.engine.loan(dtype, shape)
    }

    /// As [`loan`](Self::loan), where the engine works: on the GPU with the CUDA engine, whose loans
    /// otherwise can be read and written on the host and are copied.
    ///
    /// # Errors
    /// As [`loan`](Self::loan).
    pub fn device_loan(&self, dtype: DType, shape: &[usize]) -> Result<Loan> {
        Shape::dense(dtype, shape)?;
        self.engine.device_loan(dtype, shape)
    }

    /// A tensor `[E/R, R*M, H]` bf16 in symmetric memory for the outputs of the experts of `handle`,
    /// for a [`Buffer::low_latency_combine`] without a copy. Only rows in use take memory. Local.
    ///
    /// # Errors
    /// Memory could not be had.
    pub fn next_low_latency_combine_buffer(
        &self,
        handle: &LowLatencyHandle,
        hidden: usize,
    ) -> Result<Loan> {
        self.engine.low_latency_combine_buffer(handle, hidden)
    }

    /// Grows this rank's symmetric memory to at least `bytes` now. Local.
    ///
    /// # Errors
    /// Memory could not be had, or `bytes` is above the limit.
    pub fn reserve(&self, bytes: usize) -> Result<()> {
        self.engine.reserve(bytes)
    }

    /// Waits for all ranks; with `enable_shrink` a rank that does not come is masked.
    ///
    /// # Errors
    /// A wait failed.
    pub fn barrier(&self) -> Result<()> {
        self.engine.barrier()
    }

    /// Masks `rank` (or takes it back): low-latency calls neither send to it nor wait for it, and
    /// choices of its experts are dropped.
    ///
    /// # Errors
    /// The buffer was made without `enable_shrink`, or `rank` is this rank or out of range.
    pub fn set_mask(&self, rank: Rank, masked: bool) -> Result<()> {
        self.check_shrink()?;
        if rank.0 >= self.num_ranks() || rank == self.rank() {
            return Err(Error::invalid(
                "rank_to_mask",
                rank,
                format!("must be another rank below {}", self.num_ranks()),
            ));
        }
        self.engine.set_mask(rank, masked);
        Ok(())
    }

    /// Whether each rank is masked, `[R]`.
    ///
    /// # Errors
    /// The buffer was made without `enable_shrink`.
    pub fn masks(&self) -> Result<Vec<bool>> {
        self.check_shrink()?;
        Ok(self.engine.masks())
    }

    /// Takes all masks back.
    ///
    /// # Errors
    /// The buffer was made without `enable_shrink`.
    pub fn clear_masks(&self) -> Result<()> {
        self.check_shrink()?;
        for rank in 0..self.num_ranks() {
            self.engine.set_mask(Rank(rank), false);
        }
        Ok(())
    }

    /// Takes part in `call` only to tell the peers that this rank cannot make it, so that they do not
    /// wait for it: for front ends that find something unusable before it is a tensor.
    pub fn refuse(&self, call: Call, reject: &Reject) {
        self.engine.reject(call.operation(), reject);
    }

    fn check_shrink(&self) -> Result<()> {
        if !self.config.enable_shrink {
            return Err(Error::invalid(
                "enable_shrink",
                false,
                "must be true for masks",
            ));
        }
        Ok(())
    }

    /// Tells the peers when an argument of this rank was not accepted.
    fn checked(&self, operation: Operation, checked: Result<(), Reject>) -> Result<()> {
        checked.map_err(|reject| {
            self.engine.reject(operation, &reject);
            reject.into()
        })
    }
}
