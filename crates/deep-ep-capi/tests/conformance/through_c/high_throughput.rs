//! High-throughput calls.

use std::marker::PhantomData;

use deep_ep_c::{
    combine::{CombineArguments, CombineOutputs, deep_ep_combine_begin, deep_ep_combine_finish},
    dispatch::{
        Counts, DispatchArguments, DispatchOutputs, Received, deep_ep_dispatch_begin,
        deep_ep_dispatch_counts, deep_ep_dispatch_finish,
    },
    pending::{PendingObject, deep_ep_pending_free},
};
use library::{
    CombineOutput, DType, DispatchOutput, Landing, ReceivedCounts, Result, Stream, Tensor, TopK,
};

use super::{
    Buffer, DispatchHandle, Layout, Loan, Owned, OwnedTensor, c, made,
    memory::{view, view_mut, view_mut_optional, view_optional},
};

/// Where rows go.
#[derive(Clone, Copy)]
pub(crate) enum Routes<'io> {
    TopK {
        topk: TopK<'io>,
        num_experts: usize,
    },
    Layout {
        layout: &'io Layout,
        topk: Option<TopK<'io>>,
    },
    Handle(&'io DispatchHandle),
}

/// Input of a dispatch.
#[derive(Clone, Copy)]
pub(crate) struct DispatchInput<'io> {
    pub(crate) x: Tensor<'io>,
    pub(crate) scales: Option<Tensor<'io>>,
    pub(crate) routes: Routes<'io>,
    pub(crate) expert_alignment: usize,
    pub(crate) num_worst_tokens: Option<usize>,
    pub(crate) landing: Landing,
    pub(crate) num_sms: Option<usize>,
    pub(crate) stream: Stream,
}

impl<'io> DispatchInput<'io> {
    pub(crate) fn new(x: Tensor<'io>, routes: Routes<'io>) -> Self {
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

    fn arguments(&self) -> DispatchArguments {
        let mut arguments = made!(DispatchArguments);
        let topk = match self.routes {
            Routes::TopK { topk, num_experts } => {
                arguments.num_experts = num_experts;
                Some(topk)
            }
            Routes::Layout { layout, topk } => {
                arguments.layout = layout.pointer();
                topk
            }
            Routes::Handle(handle) => {
                arguments.handle = handle.pointer();
                None
            }
        };
        arguments.x = view(&self.x);
        arguments.scales = view_optional(&self.scales);
        arguments.topk_idx = view_optional(&topk.map(|topk| topk.idx));
        arguments.topk_weights = view_optional(&topk.and_then(|topk| topk.weights));
        arguments.expert_alignment = self.expert_alignment;
        arguments.num_worst_tokens = self.num_worst_tokens.unwrap_or(0);
        arguments.num_sms = self.num_sms.unwrap_or(0);
        arguments.into_caller_memory = (self.landing == Landing::Caller).into();
        arguments.stream = std::ptr::without_provenance_mut(self.stream.as_raw());
        arguments
    }
}

fn counts(from: &Counts, no_rows: bool) -> ReceivedCounts {
    let list = |pointer: *const usize, len: usize| match len {
        0 => vec![],
        // SAFETY: C has so many numbers there.
        _ => unsafe { std::slice::from_raw_parts(pointer, len) }.to_vec(),
    };
    ReceivedCounts {
        rows: usize::try_from(from.rows).ok(),
        output_rows: from.output_rows,
        rows_from: list(from.rows_from, from.num_ranks),
        tokens_per_expert: match no_rows {
            true => vec![],
            false => list(from.num_recv_tokens_per_expert, from.num_local_experts),
        },
    }
}

/// What a dispatch gave.
#[derive(Debug)]
pub(crate) struct Dispatched {
    pub(crate) x: Loan,
    pub(crate) scales: Option<OwnedTensor>,
    pub(crate) topk_idx: Option<OwnedTensor>,
    pub(crate) topk_weights: Option<OwnedTensor>,
    pub(crate) counts: ReceivedCounts,
    pub(crate) handle: DispatchHandle,
}

/// A dispatch that was begun.
pub(crate) struct PendingDispatch<'io> {
    object: Owned<PendingObject>,
    rank: usize,
    counts: Option<ReceivedCounts>,
    /// A worst case of 0 rows, for which C, as DeepEP, has no word: 0 is none.
    no_rows: bool,
    input: PhantomData<DispatchInput<'io>>,
}

impl Buffer {
    pub(crate) fn dispatch<'io>(&self, input: DispatchInput<'io>) -> Result<PendingDispatch<'io>> {
        let (rank, mut pending) = (self.rank().0, std::ptr::null_mut());
        let arguments = input.arguments();
        c!(
            rank,
            deep_ep_dispatch_begin(self.pointer(), &arguments, &mut pending)
        )?;
        Ok(PendingDispatch {
            object: Owned::new(pending, deep_ep_pending_free),
            rank,
            counts: None,
            no_rows: input.num_worst_tokens == Some(0),
            input: PhantomData,
        })
    }

    pub(crate) fn combine<'io>(&self, input: CombineInput<'io>) -> Result<PendingCombine<'io>> {
        let (rank, mut pending) = (self.rank().0, std::ptr::null_mut());
        let arguments = input.arguments();
        c!(
            rank,
            deep_ep_combine_begin(self.pointer(), &arguments, &mut pending)
        )?;
        Ok(PendingCombine {
            object: Owned::new(pending, deep_ep_pending_free),
            rank,
            input,
        })
    }
}

impl PendingDispatch<'_> {
    pub(crate) fn counts(&mut self) -> Result<&ReceivedCounts> {
        // SAFETY: all zeros are numbers and NULL.
        let mut found: Counts = unsafe { std::mem::zeroed() };
        c!(
            self.rank,
            deep_ep_dispatch_counts(self.object.pointer, &mut found)
        )?;
        Ok(self.counts.insert(counts(&found, self.no_rows)))
    }

    fn end(self, output: *const DispatchOutputs) -> Result<Received> {
        let mut result = made!(Received);
        c!(
            self.rank,
            deep_ep_dispatch_finish(self.object.pointer, output, &mut result)
        )?;
        Ok(result)
    }

    pub(crate) fn finish(self) -> Result<Dispatched> {
        let (rank, no_rows) = (self.rank, self.no_rows);
        let received = self.end(std::ptr::null())?;
        let x = Loan::new(received.loan, rank);
        let keep = x.keep();
        Ok(Dispatched {
            x,
            scales: OwnedTensor::of_optional(received.scales, &keep),
            topk_idx: OwnedTensor::of_optional(received.topk_idx, &keep),
            topk_weights: OwnedTensor::of_optional(received.topk_weights, &keep),
            counts: counts(&received.counts, no_rows),
            handle: DispatchHandle::new(received.handle),
        })
    }

    pub(crate) fn finish_into(
        self,
        mut out: DispatchOutput<'_>,
    ) -> Result<(ReceivedCounts, DispatchHandle)> {
        let mut output = made!(DispatchOutputs);
        output.x = view_mut(&mut out.x);
        output.scales = view_mut_optional(&mut out.scales);
        output.topk_idx = view_mut_optional(&mut out.topk_idx);
        output.topk_weights = view_mut_optional(&mut out.topk_weights);
        let no_rows = self.no_rows;
        let received = self.end(&output)?;
        assert!(received.loan.is_null(), "no memory of the library");
        let counts = counts(&received.counts, no_rows);
        Ok((counts, DispatchHandle::new(received.handle)))
    }
}

/// Rows that go back.
#[derive(Clone, Copy)]
pub(crate) enum CombineRows<'io> {
    Caller(Tensor<'io>),
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
    pub(crate) fn as_tensor(&self) -> Tensor<'_> {
        match self {
            Self::Caller(tensor) => *tensor,
            Self::Loan(loan) => loan.as_tensor(),
        }
    }
}

/// Input of a combine.
#[derive(Clone, Copy)]
pub(crate) struct CombineInput<'io> {
    pub(crate) x: CombineRows<'io>,
    pub(crate) handle: &'io DispatchHandle,
    pub(crate) topk_weights: Option<Tensor<'io>>,
    pub(crate) bias: [Option<Tensor<'io>>; 2],
    pub(crate) num_sms: Option<usize>,
}

impl<'io> CombineInput<'io> {
    pub(crate) fn new(x: impl Into<CombineRows<'io>>, handle: &'io DispatchHandle) -> Self {
        Self {
            x: x.into(),
            handle,
            topk_weights: None,
            bias: [None, None],
            num_sms: None,
        }
    }

    fn arguments(&self) -> CombineArguments {
        let mut arguments = made!(CombineArguments);
        match &self.x {
            CombineRows::Caller(x) => arguments.x = view(x),
            CombineRows::Loan(loan) => arguments.loan = loan.pointer(),
        }
        arguments.handle = self.handle.pointer();
        arguments.topk_weights = view_optional(&self.topk_weights);
        arguments.bias = [view_optional(&self.bias[0]), view_optional(&self.bias[1])];
        arguments.num_sms = self.num_sms.unwrap_or(0);
        arguments
    }
}

/// What a combine gave.
#[derive(Debug)]
pub(crate) struct Combined {
    pub(crate) x: OwnedTensor,
    pub(crate) topk_weights: Option<OwnedTensor>,
}

/// A combine that was begun.
pub(crate) struct PendingCombine<'io> {
    object: Owned<PendingObject>,
    rank: usize,
    input: CombineInput<'io>,
}

impl PendingCombine<'_> {
    pub(crate) fn finish(self) -> Result<Combined> {
        let tokens = self.input.handle.num_tokens();
        let rows = self.input.x.as_tensor();
        let mut x = OwnedTensor::zeros(rows.dtype(), &[tokens, rows.shape()[1]])?;
        let weights = self.input.topk_weights;
        let weights = weights.map(|w| OwnedTensor::zeros(DType::F32, &[tokens, w.shape()[1]]));
        let mut topk_weights = weights.transpose()?;
        let mut out = CombineOutput::new(x.as_tensor_mut());
        out.topk_weights = topk_weights.as_mut().map(OwnedTensor::as_tensor_mut);
        self.finish_into(out)?;
        Ok(Combined { x, topk_weights })
    }

    pub(crate) fn finish_into(self, mut out: CombineOutput<'_>) -> Result<()> {
        let mut output = made!(CombineOutputs);
        output.x = view_mut(&mut out.x);
        output.topk_weights = view_mut_optional(&mut out.topk_weights);
        c!(
            self.rank,
            deep_ep_combine_finish(self.object.pointer, &output)
        )
    }
}
