//! Low-latency combine: launches.

use std::sync::Arc;

use bytemuck::Zeroable;

use super::{
    CallShape, Discard, LowLatency,
    area::{FLAGS, logfmt_bytes},
    is_whole,
    params::{Cube, LowLatencyCombineParams, phase},
    receiving, threads,
};
use crate::engine::cuda::engine::control::ANNOUNCE_WORDS;
use crate::{
    buffer::{CombineWire, LowLatencyCombineInput, check_low_latency_combined},
    engine::{
        LowLatencyCombineCall, Operation,
        cuda::{
            engine::{core::OnStream, keys, params::Matrix, progress::Progress},
            jit::{Key, LowLatencyKey},
        },
    },
    error::Result,
    tensor::TensorMut,
};

const OPERATION: Operation = Operation::LowLatencyCombine;

/// A combine whose send was launched, unless its parameters say that all is one launch.
struct InFlight {
    low_latency: Arc<LowLatency>,
    on: OnStream,
    params: LowLatencyCombineParams,
    progress: Arc<Progress>,
}

fn blank(low_latency: &LowLatency) -> LowLatencyCombineParams {
    LowLatencyCombineParams {
        common: low_latency.common(OPERATION),
        x: Cube::zeroed(),
        weights: Matrix::zeroed(),
        src_info: 0,
        layout_range: 0,
        out: 0,
        out_stride: 0,
        wait_stats: 0,
    }
}

/// Launches the send, unless all is to be one launch.
pub(super) fn begin(
    low_latency: &Arc<LowLatency>,
    input: &mut LowLatencyCombineInput<'_>,
) -> Result<Box<dyn LowLatencyCombineCall>> {
    let core = &low_latency.core;
    let x = input.x.as_tensor();
    let hidden = x.shape()[2];
    let mut params = blank(low_latency);
    low_latency.describe(
        &mut params.common,
        &CallShape {
            topk: input.topk_idx,
            experts: input.handle.num_experts(),
            max_tokens: input.handle.max_tokens_per_rank(),
            hidden,
            row_bytes: match input.wire {
                CombineWire::LogFmt => logfmt_bytes(hidden as u64),
                CombineWire::Bf16 | CombineWire::Exact => hidden as u64 * 2,
            },
            format: keys::combine_wire(input.wire),
            exact: input.wire == CombineWire::Exact,
        },
    )?;
    params.x = Cube::of(&x);
    params.weights = Matrix::of(Some(&input.topk_weights));
    params.src_info = input.handle.src_info().as_ptr() as u64;
    params.layout_range = input.handle.layout_range().as_ptr() as u64;
    params.wait_stats = input
        .wait_stats
        .as_mut()
        .map_or(0, |stats| stats.as_mut_ptr() as u64);
    let on = core.begin(input.stream)?;
    low_latency.give_up_open(&on)?;
    let blocks = low_latency.blocks();
    match &core.split {
        None if input.at_once => {
            params.common.phases = phase::SEND | phase::PARTIALS | phase::RECEIVE;
        }
        None => {
            params.common.phases = phase::SEND | phase::PARTIALS;
            launch(low_latency, &on, &params, blocks)?;
        }
        Some(split) => {
            for part in [phase::SEND, phase::PARTIALS] {
                params.common.phases = part;
                launch(low_latency, &on, &params, blocks)?;
                split.meet(&on.stream)?;
            }
        }
    }
    let progress = Arc::<Progress>::default();
    low_latency.set_open(&progress, Discard::Combine(Box::new(params)));
    on.end()?;
    Ok(Box::new(InFlight {
        low_latency: Arc::clone(low_latency),
        on,
        params,
        progress,
    }))
}

/// Takes part in a call only to reject it.
pub(super) fn reject(
    low_latency: &LowLatency,
    on: &OnStream,
    text: u64,
    phases: u32,
) -> Result<()> {
    let mut params = blank(low_latency);
    params.common.reject_text = text;
    params.common.phases = phases;
    launch(low_latency, on, &params, 1)
}

/// Launches what is left of a call that was given up.
pub(super) fn discard(
    low_latency: &LowLatency,
    on: &OnStream,
    mut params: LowLatencyCombineParams,
) -> Result<()> {
    // The caller's statistics may be gone.
    params.wait_stats = 0;
    if is_whole(&params.common) {
        params.common.phases = phase::SEND | phase::PARTIALS;
        launch(low_latency, on, &params, low_latency.blocks())?;
    }
    receiving(&low_latency.core, &mut params.common);
    params.common.discard = 1;
    launch(low_latency, on, &params, 1)?;
    on.end()
}

/// The program for a shape. Where rows are summed is known when they are received; a launch for
/// rows that are not aligned uses the program for all shapes.
fn key(params: &LowLatencyCombineParams) -> LowLatencyKey {
    let common = &params.common;
    let aligned = params.x.is_aligned() && (params.out | params.out_stride).is_multiple_of(16);
    common.key(aligned)
}

/// Bytes of dynamic shared memory, see `Shared` in low_latency_combine.cu.
fn shared_bytes(params: &LowLatencyCombineParams, blocks: u32) -> u64 {
    let common = &params.common;
    let ranks = u64::from(common.group.ranks);
    let turns = u64::from(FLAGS.div_ceil(blocks));
    (ANNOUNCE_WORDS * ranks + 2 * u64::from(common.experts) + turns * ranks) * 4
}

fn launch(
    low_latency: &LowLatency,
    on: &OnStream,
    params: &LowLatencyCombineParams,
    blocks: u32,
) -> Result<()> {
    let kernels = &low_latency.core.kernels;
    let key = key(params);
    let function = kernels.get(Key::LowLatencyCombine(key), c"low_latency_combine")?;
    let bytes = shared_bytes(params, blocks);
    let shape = kernels.shape(blocks, threads(key), bytes, "num_experts")?;
    // SAFETY: the struct is the kernel's parameter. Its addresses are the caller's tensors, which the
    // caller keeps, and memory that lives as long as the buffer.
    unsafe { function.launch(&on.stream, shape, params) }
}

impl LowLatencyCombineCall for InFlight {
    fn finish_into(
        &mut self,
        input: &mut LowLatencyCombineInput<'_>,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        let low_latency = &self.low_latency;
        check_low_latency_combined(input, &out)?;
        if !self.progress.receive(OPERATION)? {
            return Ok(());
        }
        let mut params = self.params;
        if !is_whole(&params.common) {
            receiving(&low_latency.core, &mut params.common);
        }
        params.out_stride = (out.strides()[0] * out.dtype().size()) as u64;
        params.out = out.as_mut_ptr() as u64;
        launch(low_latency, &self.on, &params, low_latency.blocks())?;
        self.on.end()?;
        if let Some(split) = &low_latency.core.split {
            split.meet(&self.on.stream)?;
        }
        Ok(())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.progress.abandon() {
            return;
        }
        if let Err(error) = discard(&self.low_latency, &self.on, self.params) {
            tracing::warn!(%error, "a low-latency combine that was not finished");
        }
    }
}
