//! Low-latency dispatch and combine: inputs, the calls in flight, and what they return.

use crate::{
    buffer::{CombineRows, LowLatencyHandle, Stream},
    codec::ScaleFormat,
    engine::{LowLatencyCombineCall, LowLatencyDispatchCall},
    error::Result,
    tensor::{OwnedTensor, Tensor, TensorMut},
};

/// How dispatched rows travel and arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RowFormat {
    /// bf16, bit for bit.
    #[default]
    Bf16,
    /// FP8 E4M3 with one scale per 128 channels.
    Fp8(ScaleFormat),
}

/// How combined rows travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CombineWire {
    /// One bf16 partial sum per (token, rank).
    #[default]
    Bf16,
    /// The same partial sums with about 10 bits per value.
    LogFmt,
    /// One bf16 row per choice; the owner sums in fp32 in the order of the choices, so the result
    /// is the same bit for bit on every engine. Needs
    /// [`LowLatencyConfig::exact_top_k`](crate::LowLatencyConfig::exact_top_k).
    Exact,
}

/// Input of [`Buffer::low_latency_dispatch`](crate::Buffer::low_latency_dispatch).
#[derive(Debug)]
pub struct LowLatencyDispatchInput<'io> {
    /// `[T, H]` bf16; rows may be apart.
    pub x: Tensor<'io>,
    /// `[T, K]` i64 or i32 global expert ids; a negative id is no choice.
    pub topk_idx: Tensor<'io>,
    /// `M`: most tokens of any rank; outputs have `R * M` rows per local expert.
    pub max_tokens_per_rank: usize,
    /// `E`: experts over all ranks.
    pub num_experts: usize,
    /// How rows travel and arrive.
    pub format: RowFormat,
    /// `[E/R]` i32: rows received per local expert are added to it.
    pub recv_stats: Option<TensorMut<'io>>,
    /// `[R]` i64: clock cycles waited for each source rank are added to it.
    pub wait_stats: Option<TensorMut<'io>>,
    /// Nothing is to run between the halves: the CUDA engine makes one launch of both when the call
    /// is finished, which is faster, and gives all its errors then. Ranks may differ in it.
    pub at_once: bool,
    /// Stream that the call is ordered on.
    pub stream: Stream,
}

impl<'io> LowLatencyDispatchInput<'io> {
    /// `x` to the chosen experts as bf16, with defaults for everything else.
    pub fn new(
        x: Tensor<'io>,
        topk_idx: Tensor<'io>,
        max_tokens_per_rank: usize,
        num_experts: usize,
    ) -> Self {
        Self {
            x,
            topk_idx,
            max_tokens_per_rank,
            num_experts,
            format: RowFormat::default(),
            recv_stats: None,
            wait_stats: None,
            at_once: false,
            stream: Stream::HOST,
        }
    }
}

/// Outputs in the caller's memory for [`PendingLowLatencyDispatch::finish_into`].
#[derive(Debug)]
pub struct LowLatencyDispatchOutput<'o> {
    /// `[E/R, R*M, H]` bf16, or f8e4m3 with an FP8 format.
    pub x: TensorMut<'o>,
    /// With an FP8 format `[E/R, R*M, H/128]` f32, or `[E/R, R*M, H/512]` i32 with packed
    /// exponents, with any strides; see [`LowLatencyDispatched::scales`].
    pub scales: Option<TensorMut<'o>>,
}

/// What [`PendingLowLatencyDispatch::finish`] returns.
#[derive(Debug)]
pub struct LowLatencyDispatched {
    /// `[E/R, R*M, H]`: the rows of local expert `e` are packed from row 0, sources ascending, then
    /// source tokens ascending. Rows from `recv_count[e]` on are undefined.
    pub x: OwnedTensor,
    /// `[E/R, R*M, S]`, stored with neighbouring rows next to each other; the distance between two
    /// columns is `R*M` rounded up to 4.
    pub scales: Option<OwnedTensor>,
    /// `[E/R]` i32: rows of each local expert.
    pub recv_count: OwnedTensor,
    /// For combine.
    pub handle: LowLatencyHandle,
}

/// A low-latency dispatch whose send is done, or comes with the rest
/// ([`at_once`](LowLatencyDispatchInput::at_once)); nothing runs until it is finished.
#[must_use = "a dispatch that is not finished is abandoned"]
pub struct PendingLowLatencyDispatch<'io> {
    pub(crate) call: Box<dyn LowLatencyDispatchCall>,
    pub(crate) input: LowLatencyDispatchInput<'io>,
}

impl<'io> PendingLowLatencyDispatch<'io> {
    /// Receives into newly allocated memory. Rows that nobody sends cost no physical memory.
    ///
    /// # Errors
    /// A rank rejected the call, settings differ, or a wait failed.
    pub fn finish(mut self) -> Result<LowLatencyDispatched> {
        let (mut x, mut scales) = self.call.allocate(&self.input)?;
        let mut out = LowLatencyDispatchOutput {
            x: x.as_tensor_mut(),
            scales: scales.as_mut().map(OwnedTensor::as_tensor_mut),
        };
        let (recv_count, handle) = self.call.finish_into(&mut self.input, &mut out)?;
        Ok(LowLatencyDispatched {
            x,
            scales,
            recv_count,
            handle,
        })
    }

    /// `recv_count` and the handle before the call is finished, for callers that hand them on: their
    /// contents are undefined until then. `None` from engines that make them when they finish.
    ///
    /// # Errors
    /// No memory for them.
    pub fn tables(&mut self) -> Result<Option<(OwnedTensor, LowLatencyHandle)>> {
        self.call.tables(&self.input)
    }

    /// Receives into the caller's memory; returns `recv_count` `[E/R]` i32 and the handle.
    ///
    /// # Errors
    /// As [`finish`](Self::finish); besides an output of another shape or type.
    pub fn finish_into(
        mut self,
        mut out: LowLatencyDispatchOutput<'_>,
    ) -> Result<(OwnedTensor, LowLatencyHandle)> {
        self.call.finish_into(&mut self.input, &mut out)
    }

    /// The receive half as a closure, to be run when the work that overlaps it is done.
    pub fn hook(self) -> impl FnOnce() -> Result<LowLatencyDispatched> + 'io {
        move || self.finish()
    }
}

/// Input of [`Buffer::low_latency_combine`](crate::Buffer::low_latency_combine).
#[derive(Debug)]
pub struct LowLatencyCombineInput<'io> {
    /// `[E/R, R*M, H]` bf16 outputs of the local experts, rows where dispatch put them. Pass the
    /// loan of
    /// [`Buffer::next_low_latency_combine_buffer`](crate::Buffer::next_low_latency_combine_buffer)
    /// for zero copy.
    pub x: CombineRows<'io>,
    /// `[T, K]` choices of this rank's tokens, as passed to dispatch.
    pub topk_idx: Tensor<'io>,
    /// `[T, K]` f32 weights.
    pub topk_weights: Tensor<'io>,
    /// The handle of the dispatch.
    pub handle: &'io LowLatencyHandle,
    /// How rows travel.
    pub wire: CombineWire,
    /// `[R]` i64: clock cycles waited for each rank are added to it.
    pub wait_stats: Option<TensorMut<'io>>,
    /// As [`LowLatencyDispatchInput::at_once`].
    pub at_once: bool,
    /// Stream that the call is ordered on.
    pub stream: Stream,
}

impl<'io> LowLatencyCombineInput<'io> {
    /// The experts' outputs back to their owners as bf16, with defaults for everything else.
    pub fn new(
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
            stream: Stream::HOST,
        }
    }
}

/// A low-latency combine whose send is done, or comes with the rest
/// ([`at_once`](LowLatencyCombineInput::at_once)); nothing runs until it is finished.
#[must_use = "a combine that is not finished is abandoned"]
pub struct PendingLowLatencyCombine<'io> {
    pub(crate) call: Box<dyn LowLatencyCombineCall>,
    pub(crate) input: LowLatencyCombineInput<'io>,
}

impl<'io> PendingLowLatencyCombine<'io> {
    /// Receives into newly allocated memory, `[T, H]` bf16.
    ///
    /// # Errors
    /// A rank rejected the call, settings differ, or a wait failed.
    pub fn finish(mut self) -> Result<OwnedTensor> {
        let tokens = self.input.topk_idx.shape()[0];
        let hidden = self.input.x.as_tensor().shape()[2];
        let mut out = OwnedTensor::zeros(crate::DType::Bf16, &[tokens, hidden])?;
        self.call
            .finish_into(&mut self.input, out.as_tensor_mut())?;
        Ok(out)
    }

    /// Receives into the caller's memory, `[T, H]` bf16; rows may be apart.
    ///
    /// # Errors
    /// As [`finish`](Self::finish); besides an output of another shape or type.
    pub fn finish_into(mut self, out: TensorMut<'_>) -> Result<()> {
        self.call.finish_into(&mut self.input, out)
    }

    /// The receive half as a closure, to be run when the work that overlaps it is done.
    pub fn hook(self) -> impl FnOnce() -> Result<OwnedTensor> + 'io {
        move || self.finish()
    }
}
