//! High-throughput combine: its input, the call in flight, and what it returns.

use crate::{
    buffer::{DispatchHandle, Loan, Stream},
    engine::CombineCall,
    error::Result,
    tensor::{OwnedTensor, Tensor, TensorMut},
};

/// Rows that go back to their owners.
#[derive(Debug, Clone, Copy)]
pub enum CombineRows<'io> {
    /// In the caller's memory: rows of other ranks' tokens are copied to symmetric memory first.
    Caller(Tensor<'io>),
    /// In symmetric memory: read by their owners where they are.
    Loan(&'io Loan),
}

impl<'io> From<Tensor<'io>> for CombineRows<'io> {
    fn from(rows: Tensor<'io>) -> Self {
        Self::Caller(rows)
    }
}

impl<'io> From<&'io Loan> for CombineRows<'io> {
    fn from(rows: &'io Loan) -> Self {
        Self::Loan(rows)
    }
}

impl CombineRows<'_> {
    /// The rows, wherever they are.
    pub fn as_tensor(&self) -> Tensor<'_> {
        match self {
            Self::Caller(tensor) => *tensor,
            Self::Loan(loan) => loan.as_tensor(),
        }
    }
}

/// Input of [`Buffer::combine`](crate::Buffer::combine).
#[derive(Debug, Clone, Copy)]
pub struct CombineInput<'io> {
    /// `[N, H]` bf16, f32 or f16 in the order of dispatch's rows; more rows than `N` (worst-case
    /// outputs) are allowed and not read.
    pub x: CombineRows<'io>,
    /// The handle of the dispatch whose rows go back.
    pub handle: &'io DispatchHandle,
    /// `[N, K]` f32, summed over ranks per token.
    pub topk_weights: Option<Tensor<'io>>,
    /// Up to two `[T, H]` tensors of the type of `x` that the sum starts with.
    pub bias: [Option<Tensor<'io>>; 2],
    /// Bound on SMs or worker threads of this call; `None`: the buffer's.
    pub num_sms: Option<usize>,
    /// Stream that the call is ordered on.
    pub stream: Stream,
}

impl<'io> CombineInput<'io> {
    /// `x` back along the routes of `handle`, with defaults for everything else.
    pub fn new(x: impl Into<CombineRows<'io>>, handle: &'io DispatchHandle) -> Self {
        Self {
            x: x.into(),
            handle,
            topk_weights: None,
            bias: [None, None],
            num_sms: None,
            stream: Stream::HOST,
        }
    }
}

/// Outputs in the caller's memory for [`PendingCombine::finish_into`].
#[derive(Debug)]
pub struct CombineOutput<'o> {
    /// `[T, H]`, of the type of the input rows; rows may be apart.
    pub x: TensorMut<'o>,
    /// `[T, K]` f32; needed exactly when the input has weights.
    pub topk_weights: Option<TensorMut<'o>>,
}

impl<'o> CombineOutput<'o> {
    /// Only the rows.
    pub fn new(x: TensorMut<'o>) -> Self {
        Self {
            x,
            topk_weights: None,
        }
    }
}

/// What [`PendingCombine::finish`] returns.
#[derive(Debug)]
pub struct Combined {
    /// `[T, H]`: the sum over the ranks that the token went to, in ascending order, after the bias.
    pub x: OwnedTensor,
    /// `[T, K]`: the same sum of the weights, if the input had any.
    pub topk_weights: Option<OwnedTensor>,
}

/// A combine that was begun: this rank's rows are where their owners can read them.
///
/// Borrows and rules as for [`PendingDispatch`](crate::PendingDispatch).
#[must_use = "a combine that is not finished is abandoned"]
pub struct PendingCombine<'io> {
    pub(crate) call: Box<dyn CombineCall>,
    pub(crate) input: CombineInput<'io>,
}

impl PendingCombine<'_> {
    /// Completes the call into newly allocated memory.
    ///
    /// # Errors
    /// A rank rejected the call, settings differ, the handles of two ranks do not belong together,
    /// or a wait failed.
    pub fn finish(mut self) -> Result<Combined> {
        let handle = self.input.handle;
        let x = self.input.x.as_tensor();
        let mut combined = Combined {
            x: OwnedTensor::zeros(x.dtype(), &[handle.num_tokens(), x.shape()[1]])?,
            topk_weights: match &self.input.topk_weights {
                None => None,
                Some(w) => Some(OwnedTensor::zeros(
                    w.dtype(),
                    &[handle.num_tokens(), w.shape()[1]],
                )?),
            },
        };
        let mut out = CombineOutput {
            x: combined.x.as_tensor_mut(),
            topk_weights: combined
                .topk_weights
                .as_mut()
                .map(OwnedTensor::as_tensor_mut),
        };
        self.call.finish_into(&self.input, &mut out)?;
        Ok(combined)
    }

    /// Completes the call into the caller's memory.
    ///
    /// # Errors
    /// As [`finish`](Self::finish); besides an output of another shape or type.
    pub fn finish_into(mut self, mut out: CombineOutput<'_>) -> Result<()> {
        self.call.finish_into(&self.input, &mut out)
    }
}
