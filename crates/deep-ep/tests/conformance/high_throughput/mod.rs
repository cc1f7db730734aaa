//! High-throughput dispatch and combine of a [`World`], compared with the reference.

mod check;
mod combine;

use bytemuck::cast_slice;
use deep_ep::{
    Buffer, DType, DispatchHandle, DispatchInput, DispatchOutput, Landing, Loan, PendingDispatch,
    Rank, ReceivedCounts, Result, Routes, Tensor, reference::high_throughput as reference,
};

use self::check::{check, layout};
pub(crate) use self::{check::check_from_choices, combine::combine};
use crate::{
    launch::plan,
    world::{Memory, World},
};

plan! {
    /// How the calls are made. Where a choice is between two, 2 means that ranks differ.
    Calls {
        /// 0: from the choices; 1: from a layout, choices travel; 2: from a layout, none travel;
        /// 3: from the handle of a dispatch before.
        routes = 0,
        /// Hint: 0 loan, 1 caller.
        landing = 0,
        /// 0: rows as a loan; 1: into the caller's memory.
        into = 0,
        /// Alignment of counts per expert.
        alignment = 1,
        /// 0: no worst case; 1: as many rows as come; more: so many more less one.
        worst = 0,
        /// Bound on worker threads, 0 for none.
        num_sms = 0,
        /// Type of rows that come back: 0 bf16, 1 f32, 2 f16.
        back_dtype = 0,
        /// Elements of rows that come back.
        back_hidden = 16,
        /// Tensors that the sum begins with.
        biases = 0,
        /// Whether weights come back.
        back_weights = 0,
        /// Rows that come back are: 0 in the caller's memory, 1 in a loan, 2 in the loan of the
        /// dispatch if they fit, 3 in the caller's memory, apart.
        back_from = 0,
        /// The sum goes: 0 where the library likes, 1 into the caller's memory.
        back_into = 0,
    }
}

/// Whether option `value` holds for this rank: 0 no, 1 yes, 2 for every other rank.
fn holds(value: usize, rank: Rank) -> bool {
    value == 1 || (value == 2 && rank.0 % 2 == 1)
}

/// Received rows.
pub(crate) enum Rows {
    Loan(Loan),
    Caller(Memory),
}

impl Rows {
    pub(crate) fn tensor(&self) -> Tensor<'_> {
        match self {
            Self::Loan(loan) => loan.as_tensor(),
            Self::Caller(memory) => memory.tensor(),
        }
    }
}

/// What a dispatch gave.
pub(crate) struct Received {
    pub(crate) x: Rows,
    pub(crate) topk_idx: Option<Vec<i64>>,
    pub(crate) topk_weights: Option<Vec<f32>>,
    scales: Option<Vec<u32>>,
    pub(crate) counts: ReceivedCounts,
    pub(crate) handle: DispatchHandle,
}

impl Received {
    /// What is needed to bring rows back along a handle alone.
    pub(crate) fn of_handle(handle: DispatchHandle) -> Self {
        Self {
            x: Rows::Caller(Memory::new(DType::Bf16, &[0, 16])),
            topk_idx: None,
            topk_weights: None,
            scales: None,
            counts: ReceivedCounts {
                rows: Some(0),
                output_rows: 0,
                rows_from: vec![],
                tokens_per_expert: vec![],
            },
            handle,
        }
    }
}

/// Choices of either type as i64.
fn wide(idx: &Tensor<'_>) -> Vec<i64> {
    match idx.dtype() {
        DType::I64 => idx.as_slice::<i64>().expect("dense").to_vec(),
        _ => {
            let ids = idx.as_slice::<i32>().expect("dense").iter();
            ids.map(|&id| i64::from(id)).collect()
        }
    }
}

fn bits(scales: &Tensor<'_>) -> Vec<u32> {
    match scales.dtype() {
        DType::F32 => cast_slice(scales.as_slice::<f32>().expect("dense")).to_vec(),
        _ => cast_slice(scales.as_slice::<i32>().expect("dense")).to_vec(),
    }
}

fn floats(weights: &Tensor<'_>) -> Vec<f32> {
    weights.as_slice::<f32>().expect("dense").to_vec()
}

/// Rows of `world` from this rank along `routes`, as `calls` says.
pub(crate) fn input<'a>(
    world: &'a World,
    rank: Rank,
    routes: Routes<'a>,
    calls: &Calls,
) -> DispatchInput<'a> {
    let data = &world.ranks[rank.0];
    let mut input = DispatchInput::new(data.x(), routes);
    input.scales = data.scales();
    input.expert_alignment = calls.alignment;
    input.landing = match holds(calls.landing, rank) {
        true => Landing::Caller,
        false => Landing::Loan,
    };
    input.num_sms = (calls.num_sms > 0).then_some(calls.num_sms);
    input
}

/// Completes a dispatch into a loan.
pub(crate) fn finish(pending: PendingDispatch<'_>) -> Result<Received> {
    let received = pending.finish()?;
    Ok(Received {
        topk_idx: received.topk_idx.as_ref().map(|idx| wide(&idx.as_tensor())),
        topk_weights: received
            .topk_weights
            .as_ref()
            .map(|w| floats(&w.as_tensor())),
        scales: received.scales.as_ref().map(|s| bits(&s.as_tensor())),
        x: Rows::Loan(received.x),
        counts: received.counts,
        handle: received.handle,
    })
}

/// Completes a dispatch of `input` into memory of the caller.
pub(crate) fn finish_into(
    mut pending: PendingDispatch<'_>,
    input: &DispatchInput<'_>,
) -> Result<Received> {
    let rows = pending.counts()?.output_rows;
    let topk = match &input.routes {
        Routes::TopK { topk, .. } => Some(*topk),
        Routes::Layout { topk, .. } => *topk,
        Routes::Handle(_) => None,
    };
    let like = |tensor: &Tensor<'_>| Memory::new(tensor.dtype(), &[rows, tensor.shape()[1]]);
    let mut x = like(&input.x);
    let mut scales = input.scales.as_ref().map(like);
    let mut idx = topk.map(|topk| like(&topk.idx));
    let mut weights = topk.and_then(|topk| topk.weights).map(|w| like(&w));
    let mut out = DispatchOutput::new(x.tensor_mut());
    out.scales = scales.as_mut().map(Memory::tensor_mut);
    out.topk_idx = idx.as_mut().map(Memory::tensor_mut);
    out.topk_weights = weights.as_mut().map(Memory::tensor_mut);
    let (counts, handle) = pending.finish_into(out)?;
    Ok(Received {
        x: Rows::Caller(x),
        topk_idx: idx.map(|idx| wide(&idx.tensor())),
        topk_weights: weights.map(|weights| floats(&weights.tensor())),
        scales: scales.map(|scales| bits(&scales.tensor())),
        counts,
        handle,
    })
}

/// Dispatches `world` from the choices as `calls` says, and compares.
pub(crate) fn dispatch(buffer: &Buffer, world: &World, calls: &Calls) -> Received {
    let data = &world.ranks[buffer.rank().0];
    let routes = Routes::TopK {
        topk: data.topk(),
        num_experts: world.experts(),
    };
    dispatch_along(buffer, world, calls, routes)
}

/// Dispatches `world` along `routes` as `calls` says, and compares.
pub(crate) fn dispatch_along(
    buffer: &Buffer,
    world: &World,
    calls: &Calls,
    routes: Routes<'_>,
) -> Received {
    let rank = buffer.rank();
    let inputs = world.inputs();
    let expected = reference::dispatch_to(rank.0, &inputs, world.experts(), calls.alignment);
    let mut input = input(world, rank, routes, calls);
    let travels = !matches!(
        routes,
        Routes::Handle(_) | Routes::Layout { topk: None, .. }
    );
    if calls.worst > 0 && !matches!(routes, Routes::Layout { topk: None, .. }) {
        input.num_worst_tokens = Some(expected.rows() + calls.worst - 1);
    }
    let pending = buffer.dispatch(input).expect("the arguments are accepted");
    let received = match holds(calls.into, rank) {
        true => finish_into(pending, &input),
        false => finish(pending),
    };
    let received = received.expect("every rank dispatches");
    check(world, rank, &expected, &received, &input, travels);
    received
}

/// A dispatch and a combine of `world` as `calls` says, both compared.
pub(crate) fn round_trip(buffer: &Buffer, world: &World, calls: &Calls) {
    let data = &world.ranks[buffer.rank().0];
    let received = match calls.routes {
        0 => dispatch(buffer, world, calls),
        1 | 2 => {
            let layout = layout(buffer, world);
            let topk = (calls.routes == 1).then(|| data.topk());
            let routes = Routes::Layout {
                layout: &layout,
                topk,
            };
            dispatch_along(buffer, world, calls, routes)
        }
        _ => {
            let first = Calls {
                worst: 0,
                ..calls.clone()
            };
            let handle = dispatch(buffer, world, &first).handle;
            let mut plan = world.plan.clone();
            plan.salt += 1_000_000;
            let other = World::new(&plan, world.ranks.len());
            dispatch_along(buffer, &other, calls, Routes::Handle(&handle))
        }
    };
    combine(buffer, world, calls, received);
}
