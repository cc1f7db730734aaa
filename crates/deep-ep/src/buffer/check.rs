//! Checks of arguments, the same for every engine: types, shapes, strides and settings, everything
//! that can be said without looking at the elements.

use super::{
    Buffer, CombineInput, CombineOutput, CombineWire, DispatchInput, DispatchOutput,
    LowLatencyCombineInput, LowLatencyDispatchInput, LowLatencyDispatchOutput, Routes, RowFormat,
    TopK,
};
use crate::{
    codec::ScaleFormat,
    dtype::DType,
    error::{Error, Reject},
    routing::{ExpertMap, MAX_TOP_K},
    tensor::{Device, Tensor, TensorMut},
};

type Check = Result<(), Reject>;

/// Counts are kept for every expert, so their number is bounded.
const MAX_EXPERTS: usize = 1 << 20;

/// Rows are a multiple of this many bytes.
const ROW_GRAIN: usize = 16;

fn require(
    holds: bool,
    argument: &'static str,
    value: impl std::fmt::Debug,
    limit: impl FnOnce() -> String,
) -> Check {
    if holds {
        return Ok(());
    }
    Err(Reject::new(argument, format!("{value:?}"), limit()))
}

/// A tensor of the call lies where all of them do.
fn on(device: Device, name: &'static str, tensor: &Tensor<'_>) -> Check {
    require(tensor.device() == device, name, tensor, || {
        format!("must be on {device:?}, as x is")
    })
}

/// The engine works on memory of this device.
fn takes(buffer: &Buffer, name: &'static str, tensor: &Tensor<'_>) -> Check {
    require(buffer.engine.takes(tensor.device()), name, tensor, || {
        format!("must be where the engine {} works", buffer.engine())
    })
}

/// The reject in an argument error of a lower module.
fn reject(error: Error) -> Reject {
    match error {
        Error::InvalidArgument(reject) => reject,
        other => Reject::new("the call", other, "must not fail"),
    }
}

fn experts(buffer: &Buffer, num_experts: usize) -> Check {
    ExpertMap::new(num_experts, buffer.num_ranks()).map_err(reject)?;
    require(
        num_experts < MAX_EXPERTS,
        "num_experts",
        num_experts,
        || format!("must be below {MAX_EXPERTS}"),
    )?;
    agreed("num_experts", num_experts, buffer.config().num_experts)
}

fn agreed(name: &'static str, value: usize, agreed: Option<usize>) -> Check {
    require(
        agreed.is_none_or(|agreed| agreed == value),
        name,
        value,
        || {
            format!(
                "must be {}, as the buffer was made for",
                agreed.unwrap_or(value)
            )
        },
    )
}

fn rows(name: &'static str, x: &Tensor<'_>) -> Check {
    let fits = x.shape().len() == 2 && x.rows_are_dense();
    require(fits, name, x, || "must be [T, H] with dense rows".into())?;
    let bytes = x.row_bytes();
    require(
        bytes > 0 && bytes.is_multiple_of(ROW_GRAIN),
        name,
        x,
        || format!("must have rows of a multiple of {ROW_GRAIN} bytes, not {bytes}"),
    )?;
    let tokens = x.shape()[0];
    require(tokens < 1 << 31, name, x, || {
        "must have fewer than 2^31 tokens".into()
    })
}

fn topk(buffer: &Buffer, topk: &TopK<'_>, tokens: usize, device: Device) -> Check {
    let idx = &topk.idx;
    on(device, "topk_idx", idx)?;
    let integer = matches!(idx.dtype(), DType::I32 | DType::I64);
    let shaped = idx.shape().len() == 2 && idx.shape()[0] == tokens;
    require(integer && shaped, "topk_idx", idx, || {
        format!("must be i64 or i32 [{tokens}, K]")
    })?;
    let k = idx.shape()[1];
    require((1..=MAX_TOP_K).contains(&k), "topk_idx", idx, || {
        format!("must have 1 to {MAX_TOP_K} choices a token")
    })?;
    agreed("top_k", k, buffer.config().top_k)?;
    topk.weights
        .as_ref()
        .map_or(Ok(()), |weights| topk_weights(weights, tokens, k, device))
}

fn topk_weights(weights: &Tensor<'_>, tokens: usize, k: usize, device: Device) -> Check {
    on(device, "topk_weights", weights)?;
    let fits = weights.dtype() == DType::F32 && weights.shape() == [tokens, k];
    require(fits, "topk_weights", weights, || {
        format!("must be f32 [{tokens}, {k}]")
    })
}

fn num_sms(sms: Option<usize>) -> Check {
    require(sms != Some(0), "num_sms", sms, || {
        "must be at least 1".into()
    })
}

pub(super) fn layout(topk_idx: &Tensor<'_>, num_experts: usize, buffer: &Buffer) -> Check {
    takes(buffer, "topk_idx", topk_idx)?;
    experts(buffer, num_experts)?;
    let tokens = topk_idx.shape()[0];
    let choices = TopK {
        idx: *topk_idx,
        weights: None,
    };
    topk(buffer, &choices, tokens, topk_idx.device())
}

pub(super) fn dispatch(input: &DispatchInput<'_>, buffer: &Buffer) -> Check {
    takes(buffer, "x", &input.x)?;
    rows("x", &input.x)?;
    let (tokens, device) = (input.x.shape()[0], input.x.device());
    agreed("hidden", input.x.shape()[1], buffer.config().hidden)?;
    num_sms(input.num_sms)?;
    let alignment = input.expert_alignment;
    require(alignment > 0, "expert_alignment", alignment, || {
        "must be at least 1".into()
    })?;
    if let Some(scales) = &input.scales {
        on(device, "x[1] (scales)", scales)?;
        let wide = matches!(scales.dtype(), DType::F32 | DType::I32);
        let shaped =
            scales.shape().len() == 2 && scales.shape()[0] == tokens && scales.shape()[1] > 0;
        require(wide && shaped, "x[1] (scales)", scales, || {
            format!("must be f32 or i32 [{tokens}, S] with S at least 1")
        })?;
        require(input.x.dtype().size() == 1, "x[0]", input.x, || {
            "must have 1-byte elements when it has scales".into()
        })?;
    }
    let choices = match &input.routes {
        Routes::TopK {
            topk: choices,
            num_experts,
        } => {
            experts(buffer, *num_experts)?;
            Some(choices)
        }
        Routes::Layout {
            layout,
            topk: choices,
        } => {
            let mask = layout.is_token_in_rank();
            let (routed, ranks) = (mask.shape()[0], mask.shape()[1]);
            on(device, "is_token_in_rank", &mask)?;
            require(
                ranks == buffer.num_ranks(),
                "is_token_in_rank",
                ranks,
                || {
                    format!(
                        "must have a column for each of {} ranks",
                        buffer.num_ranks()
                    )
                },
            )?;
            require(routed == tokens, "is_token_in_rank", routed, || {
                format!("must have a row for each of {tokens} tokens")
            })?;
            experts(buffer, layout.num_tokens_per_expert().shape()[0])?;
            choices.as_ref()
        }
        Routes::Handle(handle) => {
            dispatch_handle(handle, buffer)?;
            on(device, "handle", &handle.send_head())?;
            require(handle.num_tokens() == tokens, "handle", handle, || {
                format!("must be of a dispatch of {tokens} tokens, as x has")
            })?;
            None
        }
    };
    if let Some(choices) = choices {
        topk(buffer, choices, tokens, device)?;
    }
    let worst = input.num_worst_tokens;
    require(
        worst.is_none() || choices.is_some() || matches!(input.routes, Routes::Handle(_)),
        "num_worst_tokens",
        worst,
        || "must come with topk_idx".into(),
    )?;
    require(
        worst.is_none_or(|rows| rows < 1 << 31),
        "num_worst_tokens",
        worst,
        || "must be below 2^31".into(),
    )
}

fn dispatch_handle(handle: &super::DispatchHandle, buffer: &Buffer) -> Check {
    let fits = handle.rank() == buffer.rank() && handle.num_ranks() == buffer.num_ranks();
    require(fits, "handle", handle, || {
        format!(
            "must be of rank {} of {}",
            buffer.rank(),
            buffer.num_ranks()
        )
    })
}

/// Outputs of a dispatch in the caller's memory, for `rows` rows.
pub(crate) fn dispatch_output(
    input: &DispatchInput<'_>,
    out: &DispatchOutput<'_>,
    rows: usize,
) -> Check {
    let hidden = input.x.shape()[1];
    let x = &out.x;
    let device = input.x.device();
    on(device, "recv_x", &x.as_tensor())?;
    let fits = x.dtype() == input.x.dtype() && x.shape() == [rows, hidden] && x.rows_are_dense();
    require(fits, "recv_x", x, || {
        format!(
            "must be {} [{rows}, {hidden}] with dense rows",
            input.x.dtype()
        )
    })?;
    let choices = match &input.routes {
        Routes::TopK { topk, .. } => Some(topk),
        Routes::Layout { topk, .. } => topk.as_ref(),
        Routes::Handle(_) => None,
    };
    let columns = |tensor: &Tensor<'_>| (tensor.dtype(), tensor.shape()[1]);
    let scales = input.scales.as_ref().map(columns);
    require(
        scales.is_some() == out.scales.is_some(),
        "recv_x[1] (scales)",
        &out.scales,
        || "must be given exactly when x has scales".into(),
    )?;
    dense(device, "recv_x[1] (scales)", &out.scales, scales, rows)?;
    dense(
        device,
        "recv_topk_idx",
        &out.topk_idx,
        choices.map(|c| columns(&c.idx)),
        rows,
    )?;
    let weights = choices.and_then(|c| c.weights.as_ref()).map(columns);
    dense(
        device,
        "recv_topk_weights",
        &out.topk_weights,
        weights,
        rows,
    )
}

/// An optional dense output of `rows` rows with the type and columns of what travels.
fn dense(
    device: Device,
    name: &'static str,
    out: &Option<TensorMut<'_>>,
    travels: Option<(DType, usize)>,
    rows: usize,
) -> Check {
    let Some(out) = out else { return Ok(()) };
    on(device, name, &out.as_tensor())?;
    let (dtype, columns) = travels.ok_or_else(|| {
        Reject::new(
            name,
            format!("{out:?}"),
            "must be left out: nothing travels for it",
        )
    })?;
    let fits = out.dtype() == dtype && out.shape() == [rows, columns] && out.is_dense();
    require(fits, name, out, || {
        format!("must be dense {dtype} [{rows}, {columns}]")
    })
}

pub(super) fn combine(input: &CombineInput<'_>, buffer: &Buffer) -> Check {
    let x = input.x.as_tensor();
    takes(buffer, "x", &x)?;
    rows("x", &x)?;
    let summable = matches!(x.dtype(), DType::Bf16 | DType::F32 | DType::F16);
    require(summable, "x", x, || "must be bf16, f32 or f16".into())?;
    dispatch_handle(input.handle, buffer)?;
    on(x.device(), "handle", &input.handle.send_head())?;
    num_sms(input.num_sms)?;
    let received = input.handle.num_recv_rows();
    require(x.shape()[0] >= received, "x", x, || {
        format!("must have the {received} rows of its handle")
    })?;
    if let Some(weights) = &input.topk_weights {
        on(x.device(), "topk_weights", weights)?;
        let k = weights.shape().get(1).copied().unwrap_or(0);
        let fits = weights.dtype() == DType::F32
            && weights.shape().len() == 2
            && weights.shape()[0] >= received
            && weights.rows_are_dense()
            && (1..=MAX_TOP_K).contains(&k);
        require(fits, "topk_weights", weights, || {
            format!("must be f32 [{received}, K] with dense rows and K at most {MAX_TOP_K}")
        })?;
    }
    let (tokens, hidden) = (input.handle.num_tokens(), x.shape()[1]);
    for bias in input.bias.iter().flatten() {
        on(x.device(), "bias", bias)?;
        let fits =
            bias.dtype() == x.dtype() && bias.shape() == [tokens, hidden] && bias.rows_are_dense();
        require(fits, "bias", bias, || {
            format!("must be {} [{tokens}, {hidden}] with dense rows", x.dtype())
        })?;
    }
    Ok(())
}

/// Outputs of a combine in the caller's memory.
pub(crate) fn combine_output(input: &CombineInput<'_>, out: &CombineOutput<'_>) -> Check {
    let (x, tokens) = (input.x.as_tensor(), input.handle.num_tokens());
    let hidden = x.shape()[1];
    on(x.device(), "combined_x", &out.x.as_tensor())?;
    let fits =
        out.x.dtype() == x.dtype() && out.x.shape() == [tokens, hidden] && out.x.rows_are_dense();
    require(fits, "combined_x", &out.x, || {
        format!("must be {} [{tokens}, {hidden}] with dense rows", x.dtype())
    })?;
    let weights = input
        .topk_weights
        .as_ref()
        .map(|weights| (DType::F32, weights.shape()[1]));
    require(
        weights.is_some() == out.topk_weights.is_some(),
        "combined_topk_weights",
        &out.topk_weights,
        || "must be given exactly when topk_weights is".into(),
    )?;
    let out = &out.topk_weights;
    dense(x.device(), "combined_topk_weights", out, weights, tokens)
}

/// `[len]` statistics of the given type.
fn stats(
    device: Device,
    name: &'static str,
    stats: &Option<TensorMut<'_>>,
    dtype: DType,
    len: usize,
) -> Check {
    let Some(stats) = stats else { return Ok(()) };
    on(device, name, &stats.as_tensor())?;
    let fits = stats.dtype() == dtype && stats.shape() == [len] && stats.is_dense();
    require(fits, name, stats, || {
        format!("must be dense {dtype} [{len}]")
    })
}

fn max_tokens(max: usize, tokens: usize) -> Check {
    require(
        max < 1 << 24,
        "num_max_dispatch_tokens_per_rank",
        max,
        || "must be below 2^24".into(),
    )?;
    require(tokens <= max, "x", tokens, || {
        format!("must have at most num_max_dispatch_tokens_per_rank = {max} tokens")
    })
}

pub(super) fn low_latency_dispatch(input: &LowLatencyDispatchInput<'_>, buffer: &Buffer) -> Check {
    takes(buffer, "x", &input.x)?;
    rows("x", &input.x)?;
    let device = input.x.device();
    require(input.x.dtype() == DType::Bf16, "x", input.x, || {
        "must be bf16".into()
    })?;
    let (tokens, hidden) = (input.x.shape()[0], input.x.shape()[1]);
    agreed("hidden", hidden, buffer.config().hidden)?;
    max_tokens(input.max_tokens_per_rank, tokens)?;
    experts(buffer, input.num_experts)?;
    topk(
        buffer,
        &TopK {
            idx: input.topk_idx,
            weights: None,
        },
        tokens,
        device,
    )?;
    let grain = match input.format {
        RowFormat::Bf16 => 1,
        RowFormat::Fp8(ScaleFormat::Ue8m0) => 512,
        RowFormat::Fp8(_) => 128,
    };
    require(hidden % grain == 0, "hidden", hidden, || {
        format!("must be a multiple of {grain} for {:?}", input.format)
    })?;
    let ranks = buffer.num_ranks();
    let stat = "cumulative_local_expert_recv_stats";
    stats(
        device,
        stat,
        &input.recv_stats,
        DType::I32,
        input.num_experts / ranks,
    )?;
    stats(
        device,
        "dispatch_wait_recv_cost_stats",
        &input.wait_stats,
        DType::I64,
        ranks,
    )
}

/// Outputs of a low-latency dispatch in the caller's memory.
pub(crate) fn low_latency_output(
    input: &LowLatencyDispatchInput<'_>,
    ranks: usize,
    out: &LowLatencyDispatchOutput<'_>,
    x: DType,
    scales: Option<(DType, usize)>,
) -> Check {
    let (local, rows) = (input.num_experts / ranks, ranks * input.max_tokens_per_rank);
    let hidden = input.x.shape()[1];
    on(input.x.device(), "recv_x", &out.x.as_tensor())?;
    let dense_rows = hidden == 1 || out.x.strides().last() == Some(&1);
    let fits = out.x.dtype() == x && out.x.shape() == [local, rows, hidden] && dense_rows;
    require(fits, "recv_x", &out.x, || {
        format!("must be {x} [{local}, {rows}, {hidden}] with dense rows")
    })?;
    require(
        scales.is_some() == out.scales.is_some(),
        "recv_x[1] (scales)",
        &out.scales,
        || "must be given exactly when rows are fp8".into(),
    )?;
    if let (Some((dtype, columns)), Some(out)) = (scales, &out.scales) {
        on(input.x.device(), "recv_x[1] (scales)", &out.as_tensor())?;
        let fits = out.dtype() == dtype && out.shape() == [local, rows, columns];
        require(fits, "recv_x[1] (scales)", out, || {
            format!("must be {dtype} [{local}, {rows}, {columns}]")
        })?;
    }
    Ok(())
}

pub(super) fn low_latency_combine(input: &LowLatencyCombineInput<'_>, buffer: &Buffer) -> Check {
    let (x, handle, ranks) = (input.x.as_tensor(), input.handle, buffer.num_ranks());
    let (max, device) = (handle.max_tokens_per_rank(), x.device());
    takes(buffer, "x", &x)?;
    on(device, "handle", &handle.src_info())?;
    experts(buffer, handle.num_experts())?;
    let (local, rows) = (handle.num_experts() / ranks, ranks * max);
    let shaped = x.shape().len() == 3 && x.shape()[..2] == [local, rows];
    let dense_rows = x.strides().last() == Some(&1);
    require(
        x.dtype() == DType::Bf16 && shaped && dense_rows,
        "x",
        x,
        || format!("must be bf16 [{local}, {rows}, H] with dense rows"),
    )?;
    let hidden = x.shape()[2];
    require(hidden > 0 && hidden % 8 == 0, "x", x, || {
        "must have rows of a multiple of 16 bytes".into()
    })?;
    let layout = handle.layout_range();
    require(layout.shape() == [local, ranks], "handle", layout, || {
        format!("must be of {local} local experts and {ranks} ranks")
    })?;
    let tokens = input.topk_idx.shape()[0];
    topk(
        buffer,
        &TopK {
            idx: input.topk_idx,
            weights: Some(input.topk_weights),
        },
        tokens,
        device,
    )?;
    max_tokens(max, tokens)?;
    let exact = input.wire == CombineWire::Exact;
    let room = buffer
        .config()
        .low_latency
        .is_some_and(|c| c.exact_top_k.is_some());
    require(!exact || room, "wire", input.wire, || {
        "must have room: set exact_top_k when the buffer is made".into()
    })?;
    stats(
        device,
        "combine_wait_recv_cost_stats",
        &input.wait_stats,
        DType::I64,
        ranks,
    )
}

/// Output of a low-latency combine in the caller's memory.
pub(crate) fn low_latency_combined(
    input: &LowLatencyCombineInput<'_>,
    out: &TensorMut<'_>,
) -> Check {
    let (tokens, hidden) = (input.topk_idx.shape()[0], input.x.as_tensor().shape()[2]);
    on(input.x.as_tensor().device(), "out", &out.as_tensor())?;
    let fits =
        out.dtype() == DType::Bf16 && out.shape() == [tokens, hidden] && out.rows_are_dense();
    require(fits, "out", out, || {
        format!("must be bf16 [{tokens}, {hidden}] with dense rows")
    })
}
