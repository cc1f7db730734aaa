//! High-throughput dispatch: its input, the call in flight, and what it returns.

use crate::{
    buffer::{DispatchHandle, Layout, Loan, Stream},
    engine::DispatchCall,
    error::Result,
    tensor::{OwnedTensor, Tensor, TensorMut},
};

/// The router's choices of this rank's tokens.
#[derive(Debug, Clone, Copy)]
pub struct TopK<'io> {
    /// `[T, K]` i64 or i32: global expert ids; a negative id is no choice.
    pub idx: Tensor<'io>,
    /// `[T, K]` f32; what stands where there is no choice is never read into a result.
    pub weights: Option<Tensor<'io>>,
}

/// Where rows go.
#[derive(Debug, Clone, Copy)]
pub enum Routes<'io> {
    /// From the router's choices; `num_experts` is `E`, a multiple of the ranks.
    TopK {
        /// The choices, which travel with the rows.
        topk: TopK<'io>,
        /// Experts over all ranks.
        num_experts: usize,
    },
    /// From a layout that was computed before; the choices travel if given.
    Layout {
        /// Counts and `is_token_in_rank`.
        layout: &'io Layout,
        /// The choices.
        topk: Option<TopK<'io>>,
    },
    /// The routes of an earlier dispatch: nothing is counted, no choices travel.
    Handle(&'io DispatchHandle),
}

/// Where the receiver wants its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Landing {
    /// In symmetric memory, at their final place, as a [`Loan`]: each row is written once. Rows move
    /// while the call is finished, so calls of several buffers that are in flight at once must be
    /// finished in the same order on all ranks.
    #[default]
    Loan,
    /// In memory of the caller: a remote row is copied once more. Calls of several buffers may be
    /// finished in any order.
    Caller,
}

/// Input of [`Buffer::dispatch`](crate::Buffer::dispatch).
#[derive(Debug, Clone, Copy)]
pub struct DispatchInput<'io> {
    /// `[T, H]` of any element type; a row is a multiple of 16 bytes. Rows may be apart.
    pub x: Tensor<'io>,
    /// `[T, S]` of a 4-byte type with any strides, travelling with `x`, whose elements then are
    /// bytes.
    pub scales: Option<Tensor<'io>>,
    /// Where rows go.
    pub routes: Routes<'io>,
    /// Multiple to which the returned per-expert counts are rounded up.
    pub expert_alignment: usize,
    /// Worst-case mode: outputs have this many rows, and more received rows are an error.
    pub num_worst_tokens: Option<usize>,
    /// Where the rows will be wanted: whether `finish` or `finish_into` will be called. Either
    /// works after either; the other one costs a copy.
    pub landing: Landing,
    /// Bound on SMs or worker threads of this call; `None`: the buffer's.
    pub num_sms: Option<usize>,
    /// Stream that the call is ordered on.
    pub stream: Stream,
}

impl<'io> DispatchInput<'io> {
    /// `x` along `routes`, with defaults for everything else.
    pub fn new(x: Tensor<'io>, routes: Routes<'io>) -> Self {
        Self {
            x,
            scales: None,
            routes,
            expert_alignment: 1,
            num_worst_tokens: None,
            landing: Landing::default(),
            num_sms: None,
            stream: Stream::HOST,
        }
    }
}

/// How many rows come, known before they are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedCounts {
    /// `N`: rows that this rank receives, its own included. `None` where the host does not wait for
    /// it: on a GPU in worst-case mode, unless [`PendingDispatch::counts`] was called.
    pub rows: Option<usize>,
    /// Rows that outputs must have: `N`, or the worst case if that was asked for.
    pub output_rows: usize,
    /// Rows from each source rank, `[R]`; empty where `rows` is `None`.
    pub rows_from: Vec<usize>,
    /// Choices of each local expert, `[E/R]`, rounded up to `expert_alignment`. Empty in worst-case
    /// mode and with a handle.
    pub tokens_per_expert: Vec<usize>,
}

/// Outputs in the caller's memory for [`PendingDispatch::finish_into`]. All have
/// [`ReceivedCounts::output_rows`] rows.
#[derive(Debug)]
pub struct DispatchOutput<'o> {
    /// `[N, H]`, of the type of the input.
    pub x: TensorMut<'o>,
    /// `[N, S]`, dense; needed exactly when the input has scales.
    pub scales: Option<TensorMut<'o>>,
    /// `[N, K]`, of the type of the input's choices: local expert numbers, `-1` for others. May be
    /// left out.
    pub topk_idx: Option<TensorMut<'o>>,
    /// `[N, K]` f32, 0 where the index is `-1`. May be left out.
    pub topk_weights: Option<TensorMut<'o>>,
}

impl<'o> DispatchOutput<'o> {
    /// Only the rows.
    pub fn new(x: TensorMut<'o>) -> Self {
        Self {
            x,
            scales: None,
            topk_idx: None,
            topk_weights: None,
        }
    }
}

/// What [`PendingDispatch::finish`] returns. Rows are ordered by source rank, then source token.
#[derive(Debug)]
pub struct Dispatched {
    /// `[N, H]` received rows, in symmetric memory.
    pub x: Loan,
    /// `[N, S]` their scales, dense, if the input had any.
    pub scales: Option<OwnedTensor>,
    /// `[N, K]` local expert numbers, `-1` for experts elsewhere or not chosen, if choices
    /// travelled.
    pub topk_idx: Option<OwnedTensor>,
    /// `[N, K]` weights, 0 where the index is `-1`, if weights travelled.
    pub topk_weights: Option<OwnedTensor>,
    /// Row counts.
    pub counts: ReceivedCounts,
    /// For combine, and for dispatching again along the same routes.
    pub handle: DispatchHandle,
}

/// A dispatch that was begun: this rank's part that does not depend on others is done.
///
/// It borrows the input until [`finish`](Self::finish) or [`finish_into`](Self::finish_into).
/// Forgetting it is harmless to memory; dropping it, or beginning another call on the buffer first,
/// abandons the call, and peers that wait for this rank's rows end theirs with an error.
#[must_use = "a dispatch that is not finished is abandoned"]
pub struct PendingDispatch<'io> {
    pub(crate) call: Box<dyn DispatchCall>,
    pub(crate) input: DispatchInput<'io>,
}

impl PendingDispatch<'_> {
    /// Waits until the row counts of all ranks are known.
    ///
    /// # Errors
    /// A rank rejected the call, settings differ, more rows than `num_worst_tokens` on some rank,
    /// or a wait failed.
    pub fn counts(&mut self) -> Result<&ReceivedCounts> {
        self.call.counts(&self.input)
    }

    /// Completes the call; rows stay in symmetric memory, the rest is allocated.
    ///
    /// # Errors
    /// As [`counts`](Self::counts); besides no memory for the rows.
    pub fn finish(mut self) -> Result<Dispatched> {
        self.call.finish(&self.input)
    }

    /// Completes the call into the caller's memory.
    ///
    /// # Errors
    /// As [`counts`](Self::counts); besides an output of another shape or type than
    /// [`DispatchOutput`] says, which abandons the call.
    pub fn finish_into(
        mut self,
        mut out: DispatchOutput<'_>,
    ) -> Result<(ReceivedCounts, DispatchHandle)> {
        self.call.finish_into(&self.input, &mut out)
    }
}
