//! High-throughput combine: launches.

use std::sync::Arc;

use super::{
    control::{ANNOUNCE_WORDS, FLAGS},
    core::{Core, Half, OnStream, Piece},
    keys,
    params::{CombineParams, GroupParams, LANDING_UNIT, Terms, phase},
    progress::{Discard, Open, Progress},
};
use crate::{
    buffer::{CombineInput, CombineOutput, DispatchHandle, check_combine_output},
    engine::{
        CombineCall, Operation,
        cuda::driver::{
            module::{Function, Shape},
            stream::Stream,
        },
    },
    error::{Error, Result},
    memory::heap::Purpose,
    tensor::Tensor,
};

/// Threads of a block, as in combine.cu.
const THREADS: u32 = 512;

/// A combine that was launched.
pub(super) struct InFlight {
    core: Arc<Core>,
    on: OnStream,
    params: CombineParams,
    dtype: u8,
    send_sms: u32,
    receive_sms: u32,
    total_sms: u32,
    /// Only while kernels use it.
    _landing: Piece,
    progress: Arc<Progress>,
}

/// Sends rows back to their owners.
pub(super) fn begin(core: &Arc<Core>, input: &CombineInput<'_>) -> Result<Box<dyn CombineCall>> {
    let on = core.begin(input.stream)?;
    // What goes wrong on this rank alone is told to the others, which would wait for it.
    let made = InFlight::new(core, on, input).inspect_err(|error| {
        if let Some(text) = core.reason(error)
            && let Err(other) = reject(core, text)
        {
            tracing::warn!(%other, "a reject could not be sent");
        }
    });
    let mut call = made?;
    call.launch_send()?;
    Ok(Box::new(call))
}

/// Most units of a sending block, whose grain `read_handle` in combine.cu chooses: those of the rank
/// with the most rows, as often as there are other ranks.
fn units(x: Tensor<'_>, ranks: usize, blocks: u32) -> u32 {
    let each = x.shape()[0].div_ceil(32 * blocks as usize).max(1);
    // An owner has no more units than flags.
    let most = (each * blocks as usize + 1).min(FLAGS as usize);
    (most * ranks.saturating_sub(1))
        .div_ceil(blocks as usize)
        .max(1) as u32
}

/// Rows of this rank's tokens that come back from others: what the host knows, or the most.
fn remote_rows(core: &Core, handle: &DispatchHandle) -> usize {
    let known = handle.on_device().and_then(|routes| routes.remote_rows);
    known.unwrap_or_else(|| handle.num_tokens() * (core.ranks - 1))
}

/// Takes part in a call only to reject it.
pub(super) fn reject(core: &Arc<Core>, text: u64) -> Result<()> {
    core.skip_number();
    let on = core.begin_aside()?;
    let mut params = blank(core.group(Operation::Combine, Half::Send, true));
    params.group.second_state = core.state(Half::Receive);
    params.reject_text = text;
    params.phases = phase::REJECT;
    match &core.split {
        None => launch(core, &on, &params, 0, 1, None)?,
        Some(split) => {
            // The announcement, then a look at the others'.
            params.group.advance = 0;
            params.phases = phase::REJECT | phase::COUNT;
            launch(core, &on, &params, 0, 1, None)?;
            split.meet(&on.stream)?;
            params.group.advance = 1;
            params.phases = phase::REJECT;
            launch(core, &on, &params, 0, 1, None)?;
            split.meet(&on.stream)?;
        }
    }
    on.end()
}

/// Enqueues the receiving half of a call that was given up: it waits for the rows and lets them go.
pub(super) fn discard(on: &OnStream, mut params: CombineParams, dtype: u8) -> Result<()> {
    params.group.state = on.core.state(Half::Receive);
    params.group.advance = 1;
    params.phases = phase::RECEIVE;
    params.discard = 1;
    launch(&on.core, on, &params, dtype, 1, None)?;
    on.join()?;
    on.end()
}

fn blank(group: GroupParams) -> CombineParams {
    CombineParams {
        group,
        x: 0,
        x_stride: 0,
        weights: 0,
        weights_stride: 0,
        bias: [0; 2],
        bias_stride: [0; 2],
        slots: 0,
        sent_rows: 0,
        rank_prefix: 0,
        out_x: 0,
        out_stride: 0,
        out_weights: 0,
        reject_text: 0,
        landing: 0,
        capacity: 0,
        tokens: 0,
        x_rows: 0,
        row_bytes: 0,
        top_k: 0,
        terms: 0,
        phases: 0,
        discard: 0,
        send_blocks: 1,
        units: 1,
        reserved: 0,
    }
}

fn byte_stride(tensor: &Tensor<'_>) -> u64 {
    (tensor.strides()[0] * tensor.dtype().size()) as u64
}

/// Everything about a call but its memory, and the element type as the kernel counts them.
fn describe(core: &Core, input: &CombineInput<'_>) -> Result<(CombineParams, u8)> {
    let mut params = blank(core.group(Operation::Combine, Half::Send, true));
    let x = input.x.as_tensor();
    let dtype = keys::combine_dtype(x.dtype());
    params.x = x.as_ptr() as u64;
    params.x_stride = byte_stride(&x);
    params.x_rows = u32::try_from(x.shape()[0])
        .map_err(|_| Error::invalid("x", x.shape()[0], "must have fewer than 2^32 rows"))?;
    params.row_bytes = u32::try_from(x.row_bytes())
        .map_err(|_| Error::invalid("x", x.row_bytes(), "must have rows below 4 GiB"))?;
    if let Some(weights) = &input.topk_weights {
        params.weights = weights.as_ptr() as u64;
        params.weights_stride = weights.strides()[0] as u64;
        params.top_k = weights.shape()[1] as u32;
        if params.top_k > super::dispatch::MAX_TOP_K {
            return Err(Error::invalid(
                "topk_weights",
                format!("{weights:?}"),
                format!("must have at most {} columns", super::dispatch::MAX_TOP_K),
            ));
        }
        // Rows that have no weights are not read, even if there are more rows of x.
        params.x_rows = params.x_rows.min(weights.shape()[0] as u32);
    }
    for (i, bias) in input.bias.iter().flatten().enumerate() {
        params.bias[i] = bias.as_ptr() as u64;
        params.bias_stride[i] = byte_stride(bias);
    }
    params.slots = input.handle.send_head().as_ptr() as u64;
    params.sent_rows = input.handle.channel_prefix_matrix().as_ptr() as u64;
    params.rank_prefix = input.handle.rank_prefix_matrix().as_ptr() as u64;
    params.tokens = input.handle.num_tokens() as u32;
    params.terms = Terms {
        operation: Operation::Combine as u8,
        top_k: params.top_k as u8,
        weights: input.topk_weights.is_some(),
        dtype,
        ..Terms::default()
    }
    .word();
    Ok((params, dtype))
}

/// Bytes of dynamic shared memory, see `Shared` in combine.cu.
fn shared_bytes(params: &CombineParams) -> u64 {
    let ranks = u64::from(params.group.ranks);
    (ranks * (ANNOUNCE_WORDS + 2 * ranks) + 3 * ranks + 2 + u64::from(params.units)) * 4
}

/// The kernel for a launch, and its shape.
fn prepare(
    core: &Core,
    params: &CombineParams,
    dtype: u8,
    blocks: u32,
) -> Result<(Arc<Function>, Shape)> {
    let key = keys::combine(dtype, params.group.ranks, params.row_bytes);
    let function = core.kernels.get(key, c"combine")?;
    let bytes = shared_bytes(params);
    let shape = core.kernels.shape(blocks, THREADS, bytes, "x (rows)")?;
    Ok((function, shape))
}

/// Enqueues one launch, on the call's stream or another.
fn launch(
    core: &Core,
    on: &OnStream,
    params: &CombineParams,
    dtype: u8,
    blocks: u32,
    stream: Option<&Stream>,
) -> Result<()> {
    let (function, shape) = prepare(core, params, dtype, blocks)?;
    // SAFETY: the struct is the kernel's parameter. Its addresses are the caller's tensors, which
    // the caller keeps, and blocks that are not used otherwise before what is enqueued here has
    // ended.
    unsafe { function.launch(stream.unwrap_or(&on.stream), shape, params) }
}

impl InFlight {
    fn new(core: &Arc<Core>, on: OnStream, input: &CombineInput<'_>) -> Result<Self> {
        let total = core.sms(input.num_sms);
        // An SM sends a little faster than it sums.
        let send = (total * 5 / 12).max(1);
        let receive = (total - send).max(1);
        let (mut params, dtype) = describe(core, input)?;
        let capacity = remote_rows(core, input.handle);
        let rows_at = (capacity as u64 * 4).next_multiple_of(256)
            + (capacity as u64 * u64::from(params.top_k) * 4).next_multiple_of(256);
        let bytes = rows_at + capacity as u64 * u64::from(params.row_bytes);
        params.send_blocks = send;
        params.units = units(input.x.as_tensor(), core.ranks, send);
        params.capacity = capacity as u32;
        // Whatever a launch needs besides memory is here before anything is sent.
        prepare(core, &params, dtype, receive)?;
        let landing = core.block(bytes, Purpose::CombineStaging)?;
        params.landing = (landing.offset() / LANDING_UNIT) as u32;
        if on.recorded {
            landing.keep();
        }
        core.number();
        Ok(Self {
            core: Arc::clone(core),
            on,
            params,
            dtype,
            send_sms: send,
            receive_sms: receive,
            total_sms: total,
            _landing: landing,
            progress: Arc::default(),
        })
    }

    /// Whether the two halves run beside each other.
    fn beside(&self) -> bool {
        self.core.split.is_none() && self.send_sms + self.receive_sms <= self.total_sms
    }

    fn launch_send(&mut self) -> Result<()> {
        let (core, on) = (&self.core, &self.on);
        let mut params = self.params;
        match &core.split {
            None => {
                params.phases = phase::COUNT | phase::MOVE;
                // The receiving half comes on the caller's stream, behind what the caller does with
                // its outputs before.
                let aside = if self.beside() {
                    Some(on.aside()?)
                } else {
                    None
                };
                launch(core, on, &params, self.dtype, self.send_sms, aside)?;
            }
            Some(split) => {
                params.group.advance = 0;
                params.phases = phase::COUNT;
                launch(core, on, &params, self.dtype, self.send_sms, None)?;
                split.meet(&on.stream)?;
                params.group.advance = 1;
                params.phases = phase::MOVE;
                launch(core, on, &params, self.dtype, self.send_sms, None)?;
                split.meet(&on.stream)?;
            }
        }
        core.set_open(Open {
            progress: Arc::clone(&self.progress),
            recorded: self.on.recorded,
            discard: Discard::Combine(Box::new(self.params), self.dtype),
        });
        on.end()
    }
}

impl CombineCall for InFlight {
    fn finish_into(&mut self, input: &CombineInput<'_>, out: &mut CombineOutput<'_>) -> Result<()> {
        check_combine_output(input, out)?;
        if !self.progress.receive(Operation::Combine)? {
            return Ok(());
        }
        let mut params = self.params;
        params.group.state = self.core.state(Half::Receive);
        params.phases = phase::RECEIVE;
        params.out_stride = (out.x.strides()[0] * out.x.dtype().size()) as u64;
        params.out_x = out.x.as_mut_ptr() as u64;
        params.out_weights = out
            .topk_weights
            .as_mut()
            .map_or(0, |weights| weights.as_mut_ptr() as u64);
        let (core, on) = (&self.core, &self.on);
        launch(core, on, &params, self.dtype, self.receive_sms, None)?;
        if self.beside() {
            on.join()?;
        }
        on.end()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.on.is_recorded_as_begun() {
            tracing::warn!("a recorded combine was left unfinished: its graph cannot be replayed");
            return;
        }
        if !self.progress.abandon() {
            return;
        }
        // A call that was not finished still takes its rows, into nothing.
        if let Err(error) = discard(&self.on, self.params, self.dtype) {
            tracing::warn!(%error, "a combine that was not finished");
        }
    }
}
