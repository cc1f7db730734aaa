//! Low-latency dispatch: launches.

use std::sync::Arc;

use bytemuck::Zeroable;

use super::{
    CallShape, Discard, LowLatency, is_whole,
    params::{Cube, LowLatencyDispatchParams, phase},
    receiving, threads,
};
use crate::engine::cuda::engine::control::ANNOUNCE_WORDS;
use crate::{
    buffer::{
        LowLatencyDispatchInput, LowLatencyDispatchOutput, LowLatencyHandle, RowFormat,
        check_low_latency_output,
    },
    codec::{SCALE_BLOCK, ScaleFormat},
    dtype::DType,
    engine::{
        LowLatencyDispatchCall, Operation,
        cuda::{
            engine::core::{OnStream, Piece},
            engine::keys,
            engine::landing::device_tensor,
            engine::progress::Progress,
            jit::{Key, LowLatencyKey},
        },
    },
    error::{Error, Result},
    memory::heap::Purpose,
    tensor::{OwnedTensor, Shape},
};

const OPERATION: Operation = Operation::LowLatencyDispatch;

/// A dispatch whose send was launched, unless its parameters say that all is one launch.
struct InFlight {
    low_latency: Arc<LowLatency>,
    on: OnStream,
    params: LowLatencyDispatchParams,
    progress: Arc<Progress>,
    /// Where the tables are, once they are.
    tables: Option<Arc<Piece>>,
}

/// Bytes of a row on the wire, scales included.
fn row_bytes(format: RowFormat, hidden: usize) -> u64 {
    let blocks = hidden / SCALE_BLOCK;
    let bytes = match format {
        RowFormat::Bf16 => hidden * 2,
        RowFormat::Fp8(ScaleFormat::Ue8m0) => hidden + blocks,
        RowFormat::Fp8(_) => hidden + blocks * 4,
    };
    bytes as u64
}

/// Types of received rows and of scales, and the scales' columns.
fn output(format: RowFormat, hidden: usize) -> (DType, Option<(DType, usize)>) {
    let blocks = hidden / SCALE_BLOCK;
    match format {
        RowFormat::Bf16 => (DType::Bf16, None),
        RowFormat::Fp8(ScaleFormat::Ue8m0) => (DType::F8E4M3, Some((DType::I32, blocks / 4))),
        RowFormat::Fp8(_) => (DType::F8E4M3, Some((DType::F32, blocks))),
    }
}

fn blank(low_latency: &LowLatency) -> LowLatencyDispatchParams {
    LowLatencyDispatchParams {
        common: low_latency.common(OPERATION),
        x: 0,
        x_stride: 0,
        out_x: Cube::zeroed(),
        out_scales: Cube::zeroed(),
        src_info: 0,
        layout_range: 0,
        recv_count: 0,
        recv_stats: 0,
        wait_stats: 0,
    }
}

/// Launches the send, unless all is to be one launch.
pub(super) fn begin(
    low_latency: &Arc<LowLatency>,
    input: &LowLatencyDispatchInput<'_>,
) -> Result<Box<dyn LowLatencyDispatchCall>> {
    let core = &low_latency.core;
    let quantised = matches!(input.format, RowFormat::Fp8(_));
    let capability = core.context.device.compute_capability()?;
    if quantised && capability < keys::FP8_SINCE {
        return Err(Error::invalid(
            "use_fp8",
            format!("true on a GPU of compute capability {capability}"),
            format!("must be false before {}", keys::FP8_SINCE),
        ));
    }
    let hidden = input.x.shape()[1];
    let mut params = blank(low_latency);
    low_latency.describe(
        &mut params.common,
        &CallShape {
            topk: input.topk_idx,
            experts: input.num_experts,
            max_tokens: input.max_tokens_per_rank,
            hidden,
            row_bytes: row_bytes(input.format, hidden),
            format: keys::row_format(input.format),
            exact: false,
        },
    )?;
    params.x = input.x.as_ptr() as u64;
    params.x_stride = (input.x.strides()[0] * input.x.dtype().size()) as u64;
    let on = core.begin(input.stream)?;
    low_latency.give_up_open(&on)?;
    if input.at_once && core.split.is_none() {
        params.common.phases = phase::SEND | phase::RECEIVE;
    } else {
        launch(low_latency, &on, &params, low_latency.blocks())?;
    }
    let progress = Arc::<Progress>::default();
    low_latency.set_open(&progress, Discard::Dispatch(Box::new(params)));
    on.end()?;
    if let Some(split) = &core.split {
        split.meet(&on.stream)?;
    }
    Ok(Box::new(InFlight {
        low_latency: Arc::clone(low_latency),
        on,
        params,
        progress,
        tables: None,
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

/// Launches what is left of a call that was given up: it sends, and waits for the announcements.
pub(super) fn discard(
    low_latency: &LowLatency,
    on: &OnStream,
    mut params: LowLatencyDispatchParams,
) -> Result<()> {
    if is_whole(&params.common) {
        params.common.phases = phase::SEND;
        launch(low_latency, on, &params, low_latency.blocks())?;
    }
    receiving(&low_latency.core, &mut params.common);
    params.common.discard = 1;
    launch(low_latency, on, &params, 1)?;
    on.end()
}

/// The program for a shape.
fn key(params: &LowLatencyDispatchParams) -> LowLatencyKey {
    let common = &params.common;
    let inputs = (params.x | params.x_stride).is_multiple_of(16);
    let aligned = inputs && params.out_x.is_aligned();
    common.key(aligned)
}

/// Bytes of dynamic shared memory, see `Shared` in low_latency_dispatch.cu.
fn shared_bytes(params: &LowLatencyDispatchParams) -> u64 {
    let common = &params.common;
    (u64::from(common.experts) + ANNOUNCE_WORDS * u64::from(common.group.ranks)) * 4
}

fn launch(
    low_latency: &LowLatency,
    on: &OnStream,
    params: &LowLatencyDispatchParams,
    blocks: u32,
) -> Result<()> {
    let kernels = &low_latency.core.kernels;
    let key = key(params);
    let function = kernels.get(Key::LowLatencyDispatch(key), c"low_latency_dispatch")?;
    let shape = kernels.shape(blocks, threads(key), shared_bytes(params), "num_experts")?;
    // SAFETY: the struct is the kernel's parameter. Its addresses are the caller's tensors, which the
    // caller keeps, blocks that are not used otherwise before this launch has ended, and memory that
    // lives as long as the buffer.
    unsafe { function.launch(&on.stream, shape, params) }
}

/// What a receive fills and returns.
struct Tables {
    src_info: OwnedTensor,
    layout_range: OwnedTensor,
    recv_count: OwnedTensor,
}

impl Tables {
    /// As a call returns them.
    fn returned(
        self,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<(OwnedTensor, LowLatencyHandle)> {
        let (max_tokens, hidden) = (input.max_tokens_per_rank, input.x.shape()[1]);
        let (info, layout) = (self.src_info, self.layout_range);
        let handle = LowLatencyHandle::from_device_parts(info, layout, max_tokens, hidden)?;
        Ok((self.recv_count, handle))
    }
}

impl InFlight {
    /// A block of device memory that tensors lie in.
    fn memory(&self, bytes: u64, purpose: Purpose) -> Result<Arc<Piece>> {
        self.low_latency.core.block(bytes, purpose).map(Arc::new)
    }

    /// Keeps memory that a recorded graph uses. Its tensors know their addresses already.
    fn keep(&self, memory: &Piece) {
        if self.on.recorded {
            memory.keep();
        }
    }

    /// The tables, always the same.
    fn tables(&mut self) -> Result<Tables> {
        let common = &self.params.common;
        let ranks = common.group.ranks as usize;
        let local = common.experts as usize / ranks;
        let rows = ranks * common.max_tokens as usize;
        let mut bytes = 0;
        let at = [local * rows * 4, local * ranks * 8, local * 4].map(|size| {
            let at = bytes;
            bytes += (size as u64).next_multiple_of(256);
            at
        });
        let memory = match self.tables.take() {
            Some(memory) => memory,
            None => {
                let memory = self.memory(bytes, Purpose::Metadata)?;
                self.keep(&memory);
                memory
            }
        };
        self.tables = Some(Arc::clone(&memory));
        let (base, device) = (memory.address(), self.low_latency.device);
        let tensor = |part: usize, dtype: DType, shape: &[usize]| {
            device_tensor(base + at[part], dtype, shape, device, &memory)
        };
        Ok(Tables {
            src_info: tensor(0, DType::I32, &[local, rows])?,
            layout_range: tensor(1, DType::I64, &[local, ranks])?,
            recv_count: tensor(2, DType::I32, &[local])?,
        })
    }
}

impl LowLatencyDispatchCall for InFlight {
    fn allocate(
        &self,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<(OwnedTensor, Option<OwnedTensor>)> {
        let (ranks, hidden) = (self.low_latency.core.ranks, input.x.shape()[1]);
        let local = input.num_experts / ranks;
        let rows = ranks * input.max_tokens_per_rank;
        let (dtype, scales) = output(input.format, hidden);
        let x = Shape::dense(dtype, &[local, rows, hidden])?;
        let scales = match scales {
            None => None,
            Some((dtype, columns)) => {
                let column = rows.next_multiple_of(4);
                let strides = [columns * column, 1, column];
                Some(Shape::strided(dtype, &[local, rows, columns], &strides)?)
            }
        };
        let scales_at = (x.bytes() as u64).next_multiple_of(256);
        let scale_bytes = scales.map_or(0, |scales| scales.bytes());
        let memory = self.memory(scales_at + scale_bytes as u64, Purpose::DispatchLoan)?;
        let base = memory.address();
        let tensor = |at: u64, shape: Shape| {
            let owner: Arc<dyn std::any::Any + Send + Sync> = memory.clone();
            // SAFETY: the shape fits its part of the block, which is nobody else's while it is held.
            unsafe {
                OwnedTensor::from_device(
                    (base + at) as *mut u8,
                    shape,
                    self.low_latency.device,
                    owner,
                )
            }
        };
        let out = (tensor(0, x), scales.map(|scales| tensor(scales_at, scales)));
        self.keep(&memory);
        Ok(out)
    }

    fn tables(
        &mut self,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<Option<(OwnedTensor, LowLatencyHandle)>> {
        InFlight::tables(self)?.returned(input).map(Some)
    }

    fn finish_into(
        &mut self,
        input: &mut LowLatencyDispatchInput<'_>,
        out: &mut LowLatencyDispatchOutput<'_>,
    ) -> Result<(OwnedTensor, LowLatencyHandle)> {
        let hidden = input.x.shape()[1];
        let (dtype, scales) = output(input.format, hidden);
        let ranks = self.low_latency.core.ranks;
        check_low_latency_output(input, ranks, out, dtype, scales)?;
        let tables = InFlight::tables(self)?;
        let low_latency = &self.low_latency;
        let mut params = self.params;
        if !is_whole(&params.common) {
            receiving(&low_latency.core, &mut params.common);
        }
        params.out_x = Cube::of_mut(&mut out.x);
        params.out_scales = out.scales.as_mut().map_or(Cube::zeroed(), Cube::of_mut);
        params.src_info = tables.src_info.as_tensor().as_ptr() as u64;
        params.layout_range = tables.layout_range.as_tensor().as_ptr() as u64;
        params.recv_count = tables.recv_count.as_tensor().as_ptr() as u64;
        let address = |stats: &mut Option<crate::TensorMut<'_>>| {
            stats.as_mut().map_or(0, |stats| stats.as_mut_ptr() as u64)
        };
        params.recv_stats = address(&mut input.recv_stats);
        params.wait_stats = address(&mut input.wait_stats);
        if self.progress.receive(OPERATION)? {
            launch(low_latency, &self.on, &params, low_latency.blocks())?;
            self.on.end()?;
            if let Some(split) = &low_latency.core.split {
                split.meet(&self.on.stream)?;
            }
        }
        tables.returned(input)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.progress.abandon() {
            return;
        }
        if let Err(error) = discard(&self.low_latency, &self.on, self.params) {
            tracing::warn!(%error, "a low-latency dispatch that was not finished");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_on_the_wire_are_as_long_as_their_format_says() {
        assert_eq!(row_bytes(RowFormat::Bf16, 7168), 14336);
        assert_eq!(
            row_bytes(RowFormat::Fp8(ScaleFormat::F32), 7168),
            7168 + 224
        );
        assert_eq!(
            row_bytes(RowFormat::Fp8(ScaleFormat::Ue8m0), 7168),
            7168 + 56
        );
    }
}
