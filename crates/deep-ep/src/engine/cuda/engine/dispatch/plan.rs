//! What a dispatch's kernel is told, and its launches.

use std::sync::Arc;

use bytemuck::Zeroable;

use super::choices;
use crate::{
    buffer::{DispatchInput, Landing, Routes},
    dtype::DType,
    engine::{
        Operation,
        cuda::{
            driver::{
                module::{Function, Shape},
                stream::Stream,
            },
            engine::{
                control::{ANNOUNCE_WORDS, FLAGS},
                core::{Core, Half, OnStream},
                keys,
                params::{DispatchParams, GroupParams, Matrix, Terms, phase, route_source},
            },
        },
    },
    error::{Error, Result},
    memory::heap::Purpose,
    tensor::Tensor,
};

/// Threads of a block, as in dispatch.cu.
const THREADS: u32 = 512;
/// Choices of a token that travel, at most: one for each lane of a warp.
pub(in crate::engine::cuda::engine) const MAX_TOP_K: u32 = 32;
/// Units that a block has taken at a time, as in units.cuh, and tokens of a chunk at least, as in
/// dispatch_shared.cuh.
const RING: u64 = 3;
const CHUNK: u32 = 32;
/// From so many blocks on, some send to other ranks and the rest keep this rank's rows.
const CREWS_FROM: u32 = 20;
/// Bytes of rows that share a flag, about: with fewer, finding slots and fences take longer than sending.
const UNIT_BYTES: u32 = 16 * 14336;

/// SMs of a call: in all, and of each half.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sms {
    pub(super) total: u32,
    pub(super) send: u32,
    pub(super) receive: u32,
}

impl Sms {
    /// A link is full with a third of what the copies on this side need.
    pub(super) fn of(total: u32, fused: bool) -> Self {
        let send = if fused { total } else { (total / 3).max(1) };
        let receive = if fused { total } else { (total - send).max(1) };
        Self {
            total,
            send,
            receive,
        }
    }
}

pub(super) fn blank(group: GroupParams) -> DispatchParams {
    let none = Matrix::zeroed();
    DispatchParams {
        group,
        x: 0,
        x_stride: 0,
        scales: none,
        topk: none,
        weights: none,
        routes: [0; 3],
        slots: 0,
        is_token_in_rank: 0,
        rank_prefix: 0,
        sent_rows: 0,
        channel_starts: 0,
        src_idx: 0,
        out_x: 0,
        out_stride: 0,
        out_topk: 0,
        out_weights: 0,
        out_scales: 0,
        result: 0,
        reject_text: 0,
        landing: 0,
        capacity: 0,
        tokens: 0,
        row_bytes: 0,
        scale_words: 0,
        top_k: 0,
        index_bytes: 0,
        experts: 0,
        out_rows: 0,
        route_source: 0,
        terms: 0,
        phases: 0,
        ticket: 0,
        grain: 1,
        remote_blocks: 0,
        copy_rows: 0,
        discard: 0,
        worst: 0,
    }
}

/// Bytes of dynamic shared memory, see `Shared` in dispatch.cu.
fn shared_bytes(params: &DispatchParams) -> u64 {
    let ranks = u64::from(params.group.ranks);
    let chunks = params.tokens.div_ceil(params.grain.max(CHUNK));
    let words = ranks * (ANNOUNCE_WORDS + 2 * ranks)
        + 3 * ranks
        + 1
        + 2 * RING
        + RING * u64::from(params.grain) * ranks
        + u64::from(chunks) * ranks
        + u64::from(params.experts);
    words * 4
}

/// The kernel for a launch of so many blocks, its shape, and what of the parameters depends on them.
pub(super) fn prepare(
    core: &Core,
    params: &DispatchParams,
    blocks: u32,
) -> Result<(Arc<Function>, Shape, DispatchParams)> {
    let mut params = *params;
    let keeps = params.phases & phase::MOVE != 0 && params.copy_rows == 0;
    params.remote_blocks = match keeps {
        true => remote_blocks(core, blocks),
        false => 0,
    };
    let key = keys::dispatch(params.group.ranks, params.top_k, params.row_bytes);
    let function = core.kernels.get(key, c"dispatch")?;
    let bytes = shared_bytes(&params);
    let shape = core
        .kernels
        .shape(blocks, THREADS, bytes, "x (tokens) or num_experts")?;
    Ok((function, shape, params))
}

/// Enqueues one launch, on the call's stream or another.
pub(super) fn launch(
    core: &Core,
    on: &OnStream,
    params: &DispatchParams,
    blocks: u32,
    stream: Option<&Stream>,
) -> Result<()> {
    let (function, shape, params) = prepare(core, params, blocks)?;
    // SAFETY: the struct is the kernel's parameter. Its addresses are the caller's tensors, which
    // the caller keeps, and blocks that are not used otherwise before what is enqueued here has
    // ended.
    unsafe { function.launch(stream.unwrap_or(&on.stream), shape, &params) }
}

pub(super) fn purpose(landing: Landing) -> Purpose {
    match landing {
        Landing::Loan => Purpose::DispatchLoan,
        Landing::Caller => Purpose::DispatchStaging,
    }
}

/// Everything about a call but its memory.
pub(super) fn describe(
    core: &Core,
    input: &DispatchInput<'_>,
    send_sms: u32,
) -> Result<DispatchParams> {
    let mut params = blank(core.group(Operation::Dispatch, Half::Send, true));
    let tokens = input.x.shape()[0];
    let choices = choices(input);
    let topk = choices.map(|choices| choices.idx);
    params.x = input.x.as_ptr() as u64;
    params.x_stride = (input.x.strides()[0] * input.x.dtype().size()) as u64;
    params.scales = Matrix::of(input.scales.as_ref());
    params.topk = Matrix::of(topk.as_ref());
    params.weights = Matrix::of(choices.and_then(|choices| choices.weights).as_ref());
    params.tokens = tokens as u32;
    params.row_bytes = u32::try_from(input.x.row_bytes())
        .map_err(|_| Error::invalid("x", input.x.row_bytes(), "must have rows below 4 GiB"))?;
    params.scale_words = input
        .scales
        .as_ref()
        .map_or(0, |scales| scales.shape()[1] as u32);
    params.top_k = topk.as_ref().map_or(0, |idx| idx.shape()[1] as u32);
    params.index_bytes = topk.as_ref().map_or(0, |idx| idx.dtype().size() as u32);
    params.worst = input.num_worst_tokens.is_some().into();
    let experts = match &input.routes {
        Routes::TopK { num_experts, .. } => {
            params.route_source = route_source::TOPK;
            *num_experts
        }
        Routes::Layout { layout, .. } => {
            params.route_source = route_source::MASK;
            params.routes[0] = layout.is_token_in_rank().as_ptr() as u64;
            params.routes[1] = layout.num_tokens_per_expert().as_ptr() as u64;
            layout.num_tokens_per_expert().shape()[0]
        }
        Routes::Handle(handle) => {
            params.route_source = route_source::HANDLE;
            params.routes[0] = handle.send_head().as_ptr() as u64;
            params.routes[1] = handle.channel_prefix_matrix().as_ptr() as u64;
            params.routes[2] = handle.rank_prefix_matrix().as_ptr() as u64;
            core.ranks
        }
    };
    let most = core.control.local_experts as usize * core.ranks;
    if experts > most {
        return Err(Error::invalid(
            "num_experts",
            experts,
            format!("must be at most {most}, or set when the buffer is made"),
        ));
    }
    if params.top_k > MAX_TOP_K {
        return Err(Error::invalid(
            "topk_idx",
            format!("{} choices a token", params.top_k),
            format!("must have at most {MAX_TOP_K} on a GPU"),
        ));
    }
    params.experts = experts as u32;
    params.terms = terms(input, &params, topk.as_ref()).word();
    let senders = match (input.landing, remote_blocks(core, send_sms)) {
        (Landing::Caller, _) | (Landing::Loan, 0) => send_sms,
        (Landing::Loan, remote) => remote,
    };
    params.grain = grain(&params, senders);
    Ok(params)
}

/// Blocks of a launch that send to other ranks only, while the rest keep this rank's rows; 0: all do
/// both.
fn remote_blocks(core: &Core, blocks: u32) -> u32 {
    match core.ranks > 1 && blocks >= CREWS_FROM {
        true => blocks / 2,
        false => 0,
    }
}

/// Tokens that share a flag: so few that blocks end at the same time, and so many that there are flags
/// for all.
fn grain(params: &DispatchParams, blocks: u32) -> u32 {
    let tokens = params.tokens;
    let wanted = (UNIT_BYTES / params.row_bytes.max(1)).clamp(8, CHUNK);
    let each = tokens.div_ceil(blocks).clamp(1, wanted);
    let least = tokens.div_ceil(FLAGS as u32).max(1);
    match each.max(least) {
        few @ ..CHUNK => few.next_power_of_two(),
        many => many.next_multiple_of(CHUNK),
    }
}

fn terms(input: &DispatchInput<'_>, params: &DispatchParams, topk: Option<&Tensor<'_>>) -> Terms {
    Terms {
        operation: Operation::Dispatch as u8,
        top_k: params.top_k as u8,
        wide_index: topk.is_some_and(|idx| idx.dtype() == DType::I64),
        weights: choices(input).is_some_and(|choices| choices.weights.is_some()),
        choices: topk.is_some(),
        cached: matches!(input.routes, Routes::Handle(_)),
        worst: input.num_worst_tokens.is_some(),
        dtype: 0,
        attempt: 0,
    }
}
