//! Host tensors on a GPU engine: for getting started, tests and the command line, not for speed.
//!
//! A call whose tensors are on the GPU goes through unchanged. One whose tensors are on the host
//! works on copies:
//!
//! ```text
//!   begin    inputs are copied to device tensors, which the call keeps; the engine begins its call
//!            on them, on the bridge's own stream
//!   finish   the engine finishes; the stream is waited for; `check` says what went wrong in it;
//!            results are copied to host tensors, handles and layouts are made on the host again
//! ```
//!
//! So such a call is synchronous at its finish and returns its own errors there. A low-latency
//! combine is waited for at its begin, too: its send waits for the peers' sends on every engine, and
//! what they reject is its error.
//!
//! A loan of the bridge has bytes on the host besides the engine's loan, see [`loan`].

mod combine;
mod dispatch;
mod handles;
mod lane;
mod loan;
mod low_latency;

use std::sync::Arc;

use lane::Lane;

use super::gpu::Gpu;
use crate::{
    buffer::{
        CombineInput, DispatchInput, Layout, Loan, LowLatencyCombineInput, LowLatencyDispatchInput,
        LowLatencyHandle, Statistics, Stream,
    },
    dtype::DType,
    engine::{
        CombineCall, DispatchCall, Engine, LowLatencyCombineCall, LowLatencyDispatchCall, Operation,
    },
    error::{Reject, Result},
    routing::{ExpertMap, Routes},
    tensor::{Device, Tensor},
    topology::Rank,
};

/// A GPU engine that takes host tensors, too.
pub(crate) struct HostBridge {
    lane: Arc<Lane>,
}

impl HostBridge {
    /// `inner` works on the memory of `gpu`.
    ///
    /// # Errors
    /// No stream could be made.
    pub(crate) fn new(inner: Arc<dyn Engine>, gpu: Gpu) -> Result<Self> {
        Ok(Self {
            lane: Arc::new(Lane::new(inner, gpu)?),
        })
    }

    fn inner(&self) -> &dyn Engine {
        &*self.lane.inner
    }

    /// What copying the inputs gave. If they could not be copied, the peers are told, which would
    /// otherwise wait for this rank.
    fn copied<T>(&self, operation: Operation, inputs: Result<T>) -> Result<T> {
        inputs.inspect_err(|error| {
            let reject = Reject::new("the inputs", error, "must fit the GPU's memory");
            self.inner().reject(operation, &reject);
        })
    }
}

impl Engine for HostBridge {
    fn name(&self) -> &'static str {
        self.inner().name()
    }

    fn takes(&self, device: Device) -> bool {
        device == Device::Host || self.inner().takes(device)
    }

    fn layout(&self, topk_idx: Tensor<'_>, num_experts: usize, stream: Stream) -> Result<Layout> {
        if topk_idx.device() != Device::Host {
            return self.inner().layout(topk_idx, num_experts, stream);
        }
        // The GPU finds ids out of range only in a dispatch; here they are an error at once.
        Routes::new().rebuild(&topk_idx, &ExpertMap::new(num_experts, 1)?)?;
        let idx = self.lane.up(&topk_idx)?;
        let layout =
            self.inner()
                .layout(idx.as_tensor(), num_experts, self.lane.stream.as_stream())?;
        self.lane.settle()?;
        self.lane.host_layout(&layout)
    }

    fn reject(&self, operation: Operation, reject: &Reject) {
        self.inner().reject(operation, reject);
    }

    fn dispatch(&self, input: &DispatchInput<'_>) -> Result<Box<dyn DispatchCall>> {
        if input.x.device() != Device::Host {
            return self.inner().dispatch(input);
        }
        let inputs = self.copied(
            Operation::Dispatch,
            dispatch::Inputs::new(&self.lane, input),
        )?;
        Ok(Box::new(dispatch::Call::new(&self.lane, inputs, input)?))
    }

    fn combine(&self, input: &CombineInput<'_>) -> Result<Box<dyn CombineCall>> {
        if input.x.as_tensor().device() != Device::Host {
            return self.inner().combine(input);
        }
        let inputs = self.copied(Operation::Combine, combine::Inputs::new(&self.lane, input))?;
        Ok(Box::new(combine::Call::new(&self.lane, inputs, input)?))
    }

    fn low_latency_dispatch(
        &self,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<Box<dyn LowLatencyDispatchCall>> {
        if input.x.device() != Device::Host {
            return self.inner().low_latency_dispatch(input);
        }
        let inputs = self.copied(
            Operation::LowLatencyDispatch,
            low_latency::dispatch::Inputs::new(&self.lane, input),
        )?;
        let call = low_latency::dispatch::Call::new(&self.lane, inputs, input)?;
        Ok(Box::new(call))
    }

    fn low_latency_combine(
        &self,
        input: &mut LowLatencyCombineInput<'_>,
    ) -> Result<Box<dyn LowLatencyCombineCall>> {
        if input.x.as_tensor().device() != Device::Host {
            return self.inner().low_latency_combine(input);
        }
        let inputs = self.copied(
            Operation::LowLatencyCombine,
            low_latency::combine::Inputs::new(&self.lane, input),
        )?;
        let call = low_latency::combine::Call::new(&self.lane, inputs, input)?;
        Ok(Box::new(call))
    }

    fn barrier(&self) -> Result<()> {
        self.inner().barrier()
    }

    fn loan(&self, dtype: DType, shape: &[usize]) -> Result<Loan> {
        loan::fresh(self.inner().loan(dtype, shape)?)
    }

    fn device_loan(&self, dtype: DType, shape: &[usize]) -> Result<Loan> {
        self.inner().device_loan(dtype, shape)
    }

    fn low_latency_combine_buffer(&self, handle: &LowLatencyHandle, hidden: usize) -> Result<Loan> {
        if handle.device() != Device::Host {
            return self.inner().low_latency_combine_buffer(handle, hidden);
        }
        let handle = self.lane.device_low_latency_handle(handle)?;
        loan::fresh(self.inner().low_latency_combine_buffer(&handle, hidden)?)
    }

    fn reserve(&self, bytes: usize) -> Result<()> {
        self.inner().reserve(bytes)
    }

    fn masks(&self) -> Vec<bool> {
        self.inner().masks()
    }

    fn set_mask(&self, rank: Rank, masked: bool) {
        self.inner().set_mask(rank, masked);
    }

    fn check(&self) -> Result<()> {
        self.inner().check()
    }

    fn statistics(&self) -> Statistics {
        self.inner().statistics()
    }

    #[cfg(test)]
    fn take_seen_sms(&self) -> Result<u32> {
        self.inner().take_seen_sms()
    }
}
