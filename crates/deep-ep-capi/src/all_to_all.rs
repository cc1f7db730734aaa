//! Exchanges of equal blocks of fp32 on the default buffer.

use bytemuck::{cast_slice, cast_slice_mut};
use deep_ep::{
    Call, DispatchInput, Dispatched, Error, F8E4M3, LowLatencyConfig, LowLatencyDispatchInput,
    Result, Routes, Tensor, TopK,
    codec::{self, SCALE_BLOCK},
};
use half::bf16;

use crate::{
    boundary,
    buffer::BufferObject,
    default_buffer::{self, exchange_capacity},
    floats::{Input, Output},
    status::Status,
    tensor::{DTypeCode, DTypeName},
};

/// How fp32 travel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Fp8,
    Bf16,
    Fp32,
}

impl Format {
    fn new(code: DTypeCode) -> Result<Self> {
        const FP8: i32 = DTypeName::DEEP_EP_FP8 as i32;
        const BF16: i32 = DTypeName::DEEP_EP_BF16 as i32;
        const FP32: i32 = DTypeName::DEEP_EP_FP32 as i32;
        match code {
            FP8 => Ok(Self::Fp8),
            BF16 => Ok(Self::Bf16),
            FP32 => Ok(Self::Fp32),
            other => {
                let limit = "must be DEEP_EP_FP8, DEEP_EP_BF16 or DEEP_EP_FP32";
                Err(Error::invalid("dtype", other, limit))
            }
        }
    }

    /// Elements of a row, which is a multiple of 16 bytes, for a block of `n`.
    fn padded(self, n: usize) -> usize {
        n.next_multiple_of(match self {
            Self::Fp8 => 16,
            Self::Bf16 => 8,
            Self::Fp32 => 4,
        })
    }
}

/// Input and output that C passed: as many blocks as ranks.
struct Blocks<'a> {
    input: Input<'a>,
    output: Output<'a>,
}

impl Blocks<'_> {
    fn new(buffer: &BufferObject, input: *const f32, output: *mut f32, len: usize) -> Result<Self> {
        // Checked before there are slices of both.
        let (from, to) = (input.addr(), output.addr());
        let bytes = len.saturating_mul(size_of::<f32>());
        if len > 0 && from < to.saturating_add(bytes) && to < from.saturating_add(bytes) {
            let limit = format!("must not lie in the {len} values of input");
            return Err(Error::invalid("output", format!("{output:p}"), limit));
        }
        let on_gpus = buffer.inner.engine() == "cuda";
        Ok(Self {
            input: Input::new(input, len, on_gpus)?,
            output: Output::new(output, len, on_gpus)?,
        })
    }
}

/// Blocks as rows: one for each rank.
enum Rows {
    Fp8(Vec<F8E4M3>, Vec<f32>),
    Bf16(Vec<bf16>),
    Fp32(Vec<f32>),
}

/// Casts fp32 to FP8, each 128 with a scale of their own; the last may be fewer.
fn quantize(values: &[f32], codes: &mut [F8E4M3], scales: &mut [f32]) {
    let groups = values
        .chunks(SCALE_BLOCK)
        .zip(codes.chunks_mut(SCALE_BLOCK));
    for ((values, codes), scale) in groups.zip(scales) {
        let codes: &mut [u8] = cast_slice_mut(codes);
        *scale = codec::quantize_f32_block(values, &mut codes[..values.len()]);
    }
}

impl Rows {
    fn new(format: Format, input: &[f32], ranks: usize) -> Self {
        let n = input.len() / ranks;
        let padded = format.padded(n);
        let blocks = input.chunks_exact(n);
        match format {
            Format::Fp8 => {
                let groups = n.div_ceil(SCALE_BLOCK);
                let mut codes = vec![F8E4M3(0); ranks * padded];
                let mut scales = vec![0f32; ranks * groups];
                let rows = codes
                    .chunks_exact_mut(padded)
                    .zip(scales.chunks_exact_mut(groups));
                for (block, (codes, scales)) in blocks.zip(rows) {
                    quantize(block, &mut codes[..n], scales);
                }
                Self::Fp8(codes, scales)
            }
            Format::Bf16 => {
                let mut rows = vec![bf16::ZERO; ranks * padded];
                for (block, row) in blocks.zip(rows.chunks_exact_mut(padded)) {
                    codec::f32_to_bf16_slice(block, &mut row[..n]);
                }
                Self::Bf16(rows)
            }
            Format::Fp32 => {
                let mut rows = vec![0f32; ranks * padded];
                for (block, row) in blocks.zip(rows.chunks_exact_mut(padded)) {
                    row[..n].copy_from_slice(block);
                }
                Self::Fp32(rows)
            }
        }
    }

    fn tensors(&self, ranks: usize) -> Result<(Tensor<'_>, Option<Tensor<'_>>)> {
        Ok(match self {
            Self::Fp8(codes, scales) => (
                Tensor::new(codes, &[ranks, codes.len() / ranks])?,
                Some(Tensor::new(scales, &[ranks, scales.len() / ranks])?),
            ),
            Self::Bf16(rows) => (Tensor::new(rows, &[ranks, rows.len() / ranks])?, None),
            Self::Fp32(rows) => (Tensor::new(rows, &[ranks, rows.len() / ranks])?, None),
        })
    }
}

/// Received rows as blocks of fp32.
fn unpack(received: &Dispatched, format: Format, output: &mut [f32], ranks: usize) -> Result<()> {
    let n = output.len() / ranks;
    let padded = format.padded(n);
    let blocks = output.chunks_exact_mut(n);
    match format {
        Format::Fp8 => {
            let groups = n.div_ceil(SCALE_BLOCK);
            let codes: &[u8] = cast_slice(received.x.as_slice::<F8E4M3>()?);
            let scales = received
                .scales
                .as_ref()
                .map(|scales| scales.as_slice::<f32>());
            let scales = scales.transpose()?.unwrap_or_default().chunks_exact(groups);
            for ((block, row), scales) in blocks.zip(codes.chunks_exact(padded)).zip(scales) {
                for (i, (value, &code)) in block.iter_mut().zip(row).enumerate() {
                    *value = codec::e4m3_to_f32(code) * scales[i / SCALE_BLOCK];
                }
            }
        }
        Format::Bf16 => {
            let rows = received.x.as_slice::<bf16>()?.chunks_exact(padded);
            blocks
                .zip(rows)
                .for_each(|(block, row)| codec::bf16_to_f32_slice(&row[..n], block));
        }
        Format::Fp32 => {
            let rows = received.x.as_slice::<f32>()?.chunks_exact(padded);
            blocks
                .zip(rows)
                .for_each(|(block, row)| block.copy_from_slice(&row[..n]));
        }
    }
    Ok(())
}

/// Row r goes to rank r alone: every rank has one expert.
fn exchange(buffer: &BufferObject, mut blocks: Blocks<'_>, format: Format) -> Result<()> {
    let ranks = buffer.inner.num_ranks();
    if blocks.input.floats().is_empty() {
        return buffer.inner.barrier();
    }
    let rows = Rows::new(format, blocks.input.floats(), ranks);
    let to: Vec<i64> = (0..ranks as i64).collect();
    let topk = TopK {
        idx: Tensor::new(&to, &[ranks, 1])?,
        weights: None,
    };
    let routes = Routes::TopK {
        topk,
        num_experts: ranks,
    };
    let (x, scales) = rows.tensors(ranks)?;
    let input = DispatchInput {
        scales,
        num_sms: buffer.num_sms(0),
        ..DispatchInput::new(x, routes)
    };
    let received = buffer.inner.dispatch(input)?.finish()?;
    unpack(&received, format, blocks.output.floats(), ranks)?;
    blocks.output.finish()
}

/// Sends block r of `input` to rank r; block s of `output` becomes what rank s sent. Both have `size` fp32,
/// all blocks together, a multiple of the ranks, and may not overlap. They travel as `dtype` says:
/// DEEP_EP_FP8 with a scale for each 128 of a block (the last group may be short), DEEP_EP_BF16 or
/// DEEP_EP_FP32. All ranks pass the same `size` and `dtype`. Both are on the host, or with the CUDA engine
/// on a GPU, where work on them must be done before the call. On the default buffer, which is made if
/// there is none. Collective; one thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_all_to_all(
    input: *const f32,
    output: *mut f32,
    size: usize,
    dtype: DTypeCode,
) -> Status {
    boundary::call(|| {
        let default = default_buffer::get()?;
        let buffer = &default.buffer;
        let ranks = buffer.inner.num_ranks();
        let prepared = Format::new(dtype).and_then(|format| {
            if !size.is_multiple_of(ranks) {
                let limit = format!("must be a multiple of the {ranks} ranks");
                return Err(Error::invalid("size", size, limit));
            }
            Ok((format, Blocks::new(buffer, input, output, size)?))
        });
        let (format, blocks) = buffer.prepared(Call::Dispatch, prepared)?;
        exchange(buffer, blocks, format)
    })
}

/// The floats of an exchange of `batch_size` rows for each rank.
fn low_latency_len(asked: &LowLatencyConfig, batch_size: usize, ranks: usize) -> Result<usize> {
    if batch_size > asked.max_tokens_per_rank {
        let most = asked.max_tokens_per_rank;
        let limit = format!("must be at most num_max_dispatch_tokens_per_rank = {most}");
        return Err(Error::invalid("batch_size", batch_size, limit));
    }
    Ok(ranks * batch_size * asked.hidden)
}

fn low_latency_exchange(
    buffer: &BufferObject,
    asked: &LowLatencyConfig,
    mut blocks: Blocks<'_>,
) -> Result<()> {
    let ranks = buffer.inner.num_ranks();
    let capacity = exchange_capacity(asked, ranks)?;
    let (most, hidden) = (capacity.max_tokens_per_rank, capacity.hidden);
    // An fp32 travels as two bf16, which are moved bit for bit.
    let x: &[bf16] = cast_slice(blocks.input.floats());
    let tokens = x.len() / hidden;
    let batch = tokens / ranks;
    let to: Vec<i64> = (0..tokens).map(|token| (token / batch) as i64).collect();
    let mut input = LowLatencyDispatchInput::new(
        Tensor::new(x, &[tokens, hidden])?,
        Tensor::new(&to, &[tokens, 1])?,
        most,
        ranks,
    );
    input.at_once = true;
    let pending = buffer.inner.low_latency_dispatch(input)?;
    // Rows come packed: as many from each rank, in the order of ranks.
    let received = pending.finish()?;
    let rows = received.x.as_tensor();
    let ranges = received.handle.layout_range();
    for (rank, range) in ranges.as_slice::<i64>()?.iter().enumerate() {
        let sent = (range & 0xffff_ffff) as usize;
        if sent != batch {
            let limit = format!("must be the same on all ranks: rank {rank} sent {sent} rows");
            return Err(Error::invalid("batch_size", batch, limit));
        }
    }
    let rows = rows.as_slice::<bf16>()?;
    let output: &mut [bf16] = cast_slice_mut(blocks.output.floats());
    output.copy_from_slice(&rows[..tokens * hidden]);
    blocks.output.finish()
}

/// As `deep_ep_all_to_all()` on the low-latency path: `query` and `result` have `batch_size` rows for each
/// rank, of as many fp32 as `hidden` in the `low_latency` settings that `deep_ep_init()` was given;
/// rows for rank r are the r-th block. They arrive bit for bit. All ranks pass the same `batch_size`,
/// at most `num_max_dispatch_tokens_per_rank` of those settings. Collective; one thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_all_to_all(
    query: *const f32,
    result: *mut f32,
    batch_size: usize,
) -> Status {
    boundary::call(|| {
        let default = default_buffer::get()?;
        let buffer = &default.buffer;
        let ranks = buffer.inner.num_ranks();
        let prepared = default.low_latency.ok_or_else(|| {
            let limit = "must be set in the settings that deep_ep_init() is given";
            Error::invalid("low_latency", "not set", limit)
        });
        let prepared = prepared.and_then(|asked| {
            let len = low_latency_len(&asked, batch_size, ranks)?;
            Ok((asked, Blocks::new(buffer, query, result, len)?))
        });
        let (asked, blocks) = buffer.prepared(Call::LowLatencyDispatch, prepared)?;
        match blocks.input.floats().is_empty() {
            true => buffer.inner.barrier(),
            false => low_latency_exchange(buffer, &asked, blocks),
        }
    })
}
