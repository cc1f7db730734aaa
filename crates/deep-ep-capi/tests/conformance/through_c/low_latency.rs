//! Low-latency calls.

use std::marker::PhantomData;

use deep_ep_c::{
    loan::{LoanObject, deep_ep_loan_free},
    low_latency::{
        combine::{
            LowLatencyCombineArguments, deep_ep_low_latency_combine_begin,
            deep_ep_low_latency_combine_finish,
        },
        dispatch::{
            LowLatencyDispatchArguments, LowLatencyDispatchOutputs, LowLatencyReceived,
            deep_ep_low_latency_dispatch_begin, deep_ep_low_latency_dispatch_finish,
        },
    },
    pending::{PendingObject, deep_ep_pending_free},
};
use library::{
    CombineWire, DType, LowLatencyDispatchInput, LowLatencyDispatchOutput, Result, RowFormat,
    Tensor, TensorMut, codec::ScaleFormat,
};

use super::{
    Buffer, CombineRows, LowLatencyHandle, Owned, OwnedTensor, c, made,
    memory::{view, view_mut, view_mut_optional},
};

fn dispatch_arguments(input: &mut LowLatencyDispatchInput<'_>) -> LowLatencyDispatchArguments {
    let mut arguments = made!(LowLatencyDispatchArguments);
    arguments.x = view(&input.x);
    arguments.topk_idx = view(&input.topk_idx);
    arguments.num_max_dispatch_tokens_per_rank = input.max_tokens_per_rank;
    arguments.num_experts = input.num_experts;
    arguments.at_once = input.at_once.into();
    arguments.row_format = match input.format {
        RowFormat::Bf16 => 0,
        RowFormat::Fp8(ScaleFormat::F32) => 1,
        RowFormat::Fp8(ScaleFormat::PowerOfTwo) => 2,
        RowFormat::Fp8(ScaleFormat::Ue8m0) => 3,
    };
    arguments.cumulative_local_expert_recv_stats = view_mut_optional(&mut input.recv_stats);
    arguments.dispatch_wait_recv_cost_stats = view_mut_optional(&mut input.wait_stats);
    arguments
}

/// What a dispatch gave.
#[derive(Debug)]
pub(crate) struct LowLatencyDispatched {
    pub(crate) x: OwnedTensor,
    pub(crate) scales: Option<OwnedTensor>,
    pub(crate) recv_count: OwnedTensor,
    pub(crate) handle: LowLatencyHandle,
}

/// A dispatch whose send is done.
pub(crate) struct PendingLowLatencyDispatch<'io> {
    object: Owned<PendingObject>,
    rank: usize,
    input: PhantomData<LowLatencyDispatchInput<'io>>,
}

impl Buffer {
    pub(crate) fn low_latency_dispatch<'io>(
        &self,
        mut input: LowLatencyDispatchInput<'io>,
    ) -> Result<PendingLowLatencyDispatch<'io>> {
        let (rank, mut pending) = (self.rank().0, std::ptr::null_mut());
        let arguments = dispatch_arguments(&mut input);
        let begin = deep_ep_low_latency_dispatch_begin;
        c!(rank, begin(self.pointer(), &arguments, &mut pending))?;
        Ok(PendingLowLatencyDispatch {
            object: Owned::new(pending, deep_ep_pending_free),
            rank,
            input: PhantomData,
        })
    }

    pub(crate) fn low_latency_combine<'io>(
        &self,
        mut input: LowLatencyCombineInput<'io>,
    ) -> Result<PendingLowLatencyCombine<'io>> {
        let (rank, mut pending) = (self.rank().0, std::ptr::null_mut());
        let arguments = input.arguments();
        let begin = deep_ep_low_latency_combine_begin;
        c!(rank, begin(self.pointer(), &arguments, &mut pending))?;
        Ok(PendingLowLatencyCombine {
            object: Owned::new(pending, deep_ep_pending_free),
            rank,
            input,
        })
    }
}

impl<'io> PendingLowLatencyDispatch<'io> {
    fn end(self, output: *const LowLatencyDispatchOutputs) -> Result<LowLatencyReceived> {
        let mut result = made!(LowLatencyReceived);
        let finish = deep_ep_low_latency_dispatch_finish;
        c!(self.rank, finish(self.object.pointer, output, &mut result))?;
        Ok(result)
    }

    pub(crate) fn finish(self) -> Result<LowLatencyDispatched> {
        let received = self.end(std::ptr::null())?;
        let memory: Owned<LoanObject> = Owned::new(received.loan, deep_ep_loan_free);
        let memory: std::sync::Arc<dyn std::any::Any + Send + Sync> = std::sync::Arc::new(memory);
        let handle = LowLatencyHandle::new(received.handle);
        Ok(LowLatencyDispatched {
            x: OwnedTensor::of(received.x, &memory),
            scales: OwnedTensor::of_optional(received.scales, &memory),
            recv_count: OwnedTensor::of(received.recv_count, &handle.keep()),
            handle,
        })
    }

    pub(crate) fn finish_into(
        self,
        mut out: LowLatencyDispatchOutput<'_>,
    ) -> Result<(OwnedTensor, LowLatencyHandle)> {
        let mut output = made!(LowLatencyDispatchOutputs);
        output.x = view_mut(&mut out.x);
        output.scales = view_mut_optional(&mut out.scales);
        let received = self.end(&output)?;
        assert!(received.loan.is_null(), "no memory of the library");
        let handle = LowLatencyHandle::new(received.handle);
        Ok((OwnedTensor::of(received.recv_count, &handle.keep()), handle))
    }

    pub(crate) fn hook(self) -> impl FnOnce() -> Result<LowLatencyDispatched> + 'io {
        move || self.finish()
    }
}

/// Input of a combine.
pub(crate) struct LowLatencyCombineInput<'io> {
    pub(crate) x: CombineRows<'io>,
    pub(crate) topk_idx: Tensor<'io>,
    pub(crate) topk_weights: Tensor<'io>,
    pub(crate) handle: &'io LowLatencyHandle,
    pub(crate) wire: CombineWire,
    pub(crate) wait_stats: Option<TensorMut<'io>>,
    pub(crate) at_once: bool,
}

impl<'io> LowLatencyCombineInput<'io> {
    pub(crate) fn new(
        x: impl Into<CombineRows<'io>>,
        topk_idx: Tensor<'io>,
        topk_weights: Tensor<'io>,
        handle: &'io LowLatencyHandle,
    ) -> Self {
        Self {
            x: x.into(),
            topk_idx,
            topk_weights,
            handle,
            wire: CombineWire::default(),
            wait_stats: None,
            at_once: false,
        }
    }

    fn arguments(&mut self) -> LowLatencyCombineArguments {
        let mut arguments = made!(LowLatencyCombineArguments);
        match &self.x {
            CombineRows::Caller(x) => arguments.x = view(x),
            CombineRows::Loan(loan) => arguments.loan = loan.pointer(),
        }
        arguments.topk_idx = view(&self.topk_idx);
        arguments.topk_weights = view(&self.topk_weights);
        arguments.handle = self.handle.pointer();
        arguments.at_once = self.at_once.into();
        arguments.wire = match self.wire {
            CombineWire::Bf16 => 0,
            CombineWire::LogFmt => 1,
            CombineWire::Exact => 2,
        };
        arguments.combine_wait_recv_cost_stats = view_mut_optional(&mut self.wait_stats);
        arguments
    }
}

/// A combine whose send is done.
pub(crate) struct PendingLowLatencyCombine<'io> {
    object: Owned<PendingObject>,
    rank: usize,
    input: LowLatencyCombineInput<'io>,
}

impl<'io> PendingLowLatencyCombine<'io> {
    pub(crate) fn finish(self) -> Result<OwnedTensor> {
        let tokens = self.input.topk_idx.shape()[0];
        let hidden = self.input.x.as_tensor().shape()[2];
        let mut out = OwnedTensor::zeros(DType::Bf16, &[tokens, hidden])?;
        self.finish_into(out.as_tensor_mut())?;
        Ok(out)
    }

    pub(crate) fn finish_into(self, mut out: TensorMut<'_>) -> Result<()> {
        let finish = deep_ep_low_latency_combine_finish;
        c!(self.rank, finish(self.object.pointer, &view_mut(&mut out)))
    }

    pub(crate) fn hook(self) -> impl FnOnce() -> Result<OwnedTensor> + 'io {
        move || self.finish()
    }
}
