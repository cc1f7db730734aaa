//! Low-latency dispatch.

use std::{ffi::c_void, sync::Arc};

use deep_ep::{
    Call, Error, LowLatencyDispatchInput, LowLatencyDispatchOutput, LowLatencyHandle, OwnedTensor,
    Result, RowFormat, codec::ScaleFormat,
};

use crate::{
    boundary,
    buffer::{self, BufferObject},
    handle::LowLatencyHandleObject,
    loan::LoanObject,
    objects,
    pending::{Half, Held, Kept, PendingObject},
    pointers::{self, Out, OutStruct, Versioned},
    status::Status,
    tensor::TensorView,
};

/// How rows of a low-latency dispatch travel and arrive.
#[repr(C)]
#[allow(non_camel_case_types, clippy::upper_case_acronyms)]
pub enum RowFormatName {
    /// bf16, bit for bit.
    DEEP_EP_ROWS_BF16 = 0,
    /// FP8 with an fp32 scale for each 128 channels (DeepEP's `use_fp8`).
    DEEP_EP_ROWS_FP8 = 1,
    /// FP8 with a power of two as the scale, stored as fp32 (`round_scale`).
    DEEP_EP_ROWS_FP8_ROUND_SCALE = 2,
    /// FP8 with the power's exponent, four in an int32, least significant byte first (`use_ue8m0`).
    DEEP_EP_ROWS_FP8_UE8M0 = 3,
}

/// What a low-latency dispatch sends. Made by `deep_ep_low_latency_dispatch_input()`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LowLatencyDispatchArguments {
    /// Set by `deep_ep_low_latency_dispatch_input()`.
    pub struct_size: usize,
    /// bf16 `[T, H]`; rows may be apart.
    pub x: TensorView,
    /// int64 or int32 `[T, K]`: global expert ids, negative for no choice.
    pub topk_idx: TensorView,
    /// Most tokens of any rank, `M`: outputs have `R*M` rows for each local expert.
    pub num_max_dispatch_tokens_per_rank: usize,
    /// Experts over all ranks, `E`.
    pub num_experts: usize,
    /// A value of `deep_ep_row_format`.
    pub row_format: i32,
    /// Not 0: nothing is to run between the halves. The CUDA engine makes one launch of both when the call
    /// is finished, which is faster, and gives all its errors then. Ranks may differ in it.
    pub at_once: i32,
    /// int32 `[E/R]`: rows received for each local expert are added to it; or none.
    pub cumulative_local_expert_recv_stats: TensorView,
    /// int64 `[R]`: clock cycles waited for each source rank are added to it; or none.
    pub dispatch_wait_recv_cost_stats: TensorView,
    /// Stream of the GPU that the call is ordered on, NULL on the host.
    pub stream: *mut c_void,
}

// SAFETY: see the trait; all zeros are numbers, NULL pointers and no tensors.
unsafe impl Versioned for LowLatencyDispatchArguments {
    const NAME: &'static str = "deep_ep_low_latency_dispatch_input_t";
}

/// Memory of the caller for what a low-latency dispatch receives. Made by
/// `deep_ep_low_latency_dispatch_output()`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LowLatencyDispatchOutputs {
    /// Set by `deep_ep_low_latency_dispatch_output()`.
    pub struct_size: usize,
    /// `[E/R, R*M, H]` bf16, or FP8 with a format of FP8.
    pub x: TensorView,
    /// With a format of FP8: fp32 `[E/R, R*M, H/128]`, or int32 `[E/R, R*M, H/512]` with packed
    /// exponents; any strides.
    pub scales: TensorView,
}

// SAFETY: see the trait; all zeros are no tensors.
unsafe impl Versioned for LowLatencyDispatchOutputs {
    const NAME: &'static str = "deep_ep_low_latency_dispatch_output_t";
}

/// What a low-latency dispatch received. Made by `deep_ep_low_latency_dispatched()`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LowLatencyReceived {
    /// Set by `deep_ep_low_latency_dispatched()`.
    pub struct_size: usize,
    /// `[E/R, R*M, H]`: the rows of local expert `e` are packed from row 0, sources ascending, then source
    /// tokens ascending. Rows from `recv_count[e]` on are undefined. The caller's memory if he
    /// passed any, else memory of `loan`.
    pub x: TensorView,
    /// The scales, or none. In memory of `loan` neighbouring rows lie next to each other; the distance
    /// of columns is `R*M` rounded up to 4.
    pub scales: TensorView,
    /// int32 `[E/R]`: rows of each local expert; lives as long as `handle`.
    pub recv_count: TensorView,
    /// For the combine. The caller's to free.
    pub handle: *mut LowLatencyHandleObject,
    /// The memory of `x` and `scales`; NULL if the caller passed memory. The caller's to free.
    pub loan: *mut LoanObject,
}

// SAFETY: see the trait; all zeros are NULL pointers and no tensors.
unsafe impl Versioned for LowLatencyReceived {
    const NAME: &'static str = "deep_ep_low_latency_dispatched_t";
}

impl LowLatencyDispatchArguments {
    fn format(&self) -> Result<RowFormat> {
        Ok(match self.row_format {
            0 => RowFormat::Bf16,
            1 => RowFormat::Fp8(ScaleFormat::F32),
            2 => RowFormat::Fp8(ScaleFormat::PowerOfTwo),
            3 => RowFormat::Fp8(ScaleFormat::Ue8m0),
            other => {
                let limit = "must be a value of deep_ep_row_format";
                return Err(Error::invalid("row_format", other, limit));
            }
        })
    }

    fn input(&self) -> Result<LowLatencyDispatchInput<'static>> {
        let (stats, wait) = (
            "cumulative_local_expert_recv_stats",
            "dispatch_wait_recv_cost_stats",
        );
        Ok(LowLatencyDispatchInput {
            format: self.format()?,
            at_once: self.at_once != 0,
            recv_stats: self
                .cumulative_local_expert_recv_stats
                .write_optional(stats)?,
            wait_stats: self.dispatch_wait_recv_cost_stats.write_optional(wait)?,
            stream: buffer::stream(self.stream),
            ..LowLatencyDispatchInput::new(
                self.x.read("x")?,
                self.topk_idx.read("topk_idx")?,
                self.num_max_dispatch_tokens_per_rank,
                self.num_experts,
            )
        })
    }
}

/// Sends. A failure is told to the peers.
fn begin(
    buffer: Arc<BufferObject>,
    arguments: Result<LowLatencyDispatchArguments>,
) -> Result<PendingObject> {
    let prepared = arguments.and_then(|arguments| arguments.input());
    let input = buffer.prepared(Call::LowLatencyDispatch, prepared)?;
    let call = buffer.inner.low_latency_dispatch(input)?;
    let kept = Kept {
        buffer: Some(buffer),
        ..Kept::default()
    };
    Ok(PendingObject::new(Half::LowLatencyDispatch(Held {
        call,
        _kept: kept,
    })))
}

/// Receives into the caller's memory, or into memory of the library.
fn finish(
    pending: &PendingObject,
    output: Option<LowLatencyDispatchOutputs>,
) -> Result<LowLatencyReceived> {
    let held = pending.take("a low-latency dispatch", |half| match half {
        Half::LowLatencyDispatch(held) => Ok(held),
        other => Err(Box::new(other)),
    })?;
    let Some(output) = output else {
        let done = held.call.finish()?;
        let x = TensorView::of(&done.x.as_tensor());
        let scales = done.scales.as_ref().map(|scales| scales.as_tensor());
        let scales = TensorView::of_optional(scales);
        let memory = [Some(done.x), done.scales].into_iter().flatten().collect();
        let loan = objects::give(LoanObject::new(None, memory));
        return Ok(received(x, scales, done.recv_count, done.handle, loan));
    };
    let into = LowLatencyDispatchOutput {
        x: output.x.write("recv_x")?,
        scales: output.scales.write_optional("recv_x_scales")?,
    };
    let (counts, handle) = held.call.finish_into(into)?;
    Ok(received(
        output.x,
        output.scales,
        counts,
        handle,
        std::ptr::null_mut(),
    ))
}

fn received(
    x: TensorView,
    scales: TensorView,
    counts: OwnedTensor,
    handle: LowLatencyHandle,
    loan: *mut LoanObject,
) -> LowLatencyReceived {
    let recv_count = TensorView::of(&counts.as_tensor());
    let handle = objects::give(LowLatencyHandleObject {
        handle,
        _recv_count: Some(counts),
    });
    LowLatencyReceived {
        struct_size: size_of::<LowLatencyReceived>(),
        x,
        scales,
        recv_count,
        handle,
        loan,
    }
}

/// Sends rows to the chosen experts with a fixed capacity. The receive half is
/// `deep_ep_low_latency_dispatch_finish()`, the hook; between the two nothing of this library runs. What
/// `input` names must stay as it is until then, on a GPU until the work on the stream is done.
/// `*pending` is the caller's to free. One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_dispatch_begin(
    buffer: *const BufferObject,
    input: *const LowLatencyDispatchArguments,
    pending: *mut *mut PendingObject,
) -> Status {
    boundary::call(|| {
        let buffer = buffer::get(buffer)?;
        let out = buffer.prepared(Call::LowLatencyDispatch, Out::new(pending, "pending"))?;
        out.set(objects::give(begin(
            buffer,
            pointers::read(input, "input"),
        )?));
        Ok(())
    })
}

/// Receives: into the memory that `output` names, or, if it is NULL, into memory of the library, where rows
/// that nobody sends cost nothing. `pending` is used up, also by a failure, but must still be freed.
/// `result` was made by `deep_ep_low_latency_dispatched()`.
/// One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_dispatch_finish(
    pending: *const PendingObject,
    output: *const LowLatencyDispatchOutputs,
    result: *mut LowLatencyReceived,
) -> Status {
    boundary::call(|| {
        let pending = objects::get(pending, "pending")?;
        let out = OutStruct::new(result, "result")?;
        out.set(finish(
            &pending,
            pointers::read_optional(output, "output")?,
        )?);
        Ok(())
    })
}

/// A whole low-latency dispatch: send and receive.
/// One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_dispatch(
    buffer: *const BufferObject,
    input: *const LowLatencyDispatchArguments,
    output: *const LowLatencyDispatchOutputs,
    result: *mut LowLatencyReceived,
) -> Status {
    boundary::call(|| {
        let buffer = buffer::get(buffer)?;
        let places = OutStruct::new(result, "result")
            .and_then(|out| Ok((out, pointers::read_optional(output, "output")?)));
        let (out, output) = buffer.prepared(Call::LowLatencyDispatch, places)?;
        out.set(finish(
            &begin(buffer, pointers::read(input, "input"))?,
            output,
        )?);
        Ok(())
    })
}

/// Frees the handle and the memory of a result, and sets both to NULL. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_dispatched_free(
    result: *mut LowLatencyReceived,
) -> Status {
    boundary::call(|| {
        let mut held = pointers::read(result.cast_const(), "result")?;
        let freed = [
            objects::take(
                std::mem::replace(&mut held.handle, std::ptr::null_mut()),
                "handle",
            ),
            objects::take(
                std::mem::replace(&mut held.loan, std::ptr::null_mut()),
                "loan",
            ),
        ];
        OutStruct::new(result, "result")?.set(held);
        freed.into_iter().collect()
    })
}
