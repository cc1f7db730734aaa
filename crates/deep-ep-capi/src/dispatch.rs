//! High-throughput dispatch.

use std::{ffi::c_void, sync::Arc};

use deep_ep::{
    Call, DispatchHandle, DispatchInput, DispatchOutput, Dispatched, Landing, ReceivedCounts,
    Result, Routes, Tensor, TopK,
};

use crate::{
    boundary,
    buffer::{self, BufferObject, given},
    handle::HandleObject,
    layout::LayoutObject,
    loan::LoanObject,
    objects,
    pending::{Half, Held, Kept, PendingObject, lasting},
    pointers::{self, Out, OutStruct, Versioned},
    status::Status,
    tensor::TensorView,
};

/// What a dispatch sends. Made by `deep_ep_dispatch_input()`. Routes come from `handle` if it is set, else
/// from `layout`, else from `topk_idx` with `num_experts`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DispatchArguments {
    /// Set by `deep_ep_dispatch_input()`.
    pub struct_size: usize,
    /// `[T, H]` of any element type; a row is a multiple of 16 bytes. Rows may be apart.
    pub x: TensorView,
    /// `[T, S]` of a 4-byte type with any strides, travelling with `x`, whose elements then have 1
    /// byte; or none.
    pub scales: TensorView,
    /// int64 or int32 `[T, K]`: global expert ids, negative for no choice. They travel with the rows.
    /// Needed without `layout` and `handle`; not allowed with `handle`.
    pub topk_idx: TensorView,
    /// fp32 `[T, K]`, or none. What stands where there is no choice may be anything.
    pub topk_weights: TensorView,
    /// Experts over all ranks, a multiple of the ranks; used with `topk_idx` alone.
    pub num_experts: usize,
    /// Routes that were computed before, or NULL.
    pub layout: *const LayoutObject,
    /// Routes of an earlier dispatch, or NULL: nothing is counted, no choices travel.
    pub handle: *const HandleObject,
    /// Multiple to which counts per expert are rounded up; 0: 1.
    pub expert_alignment: usize,
    /// Outputs have so many rows, and more received rows are an error; 0: as many as come.
    pub num_worst_tokens: usize,
    /// Bound on the SMs, or worker threads, of this call; 0: the buffer's.
    pub num_sms: usize,
    /// Not 0: outputs will be memory of the caller. Set by `deep_ep_dispatch()`; a hint when the call
    /// is begun and finished by itself.
    pub into_caller_memory: i32,
    /// 0; room for later.
    pub reserved: i32,
    /// Stream of the GPU that the call is ordered on (a CUstream or cudaStream_t), NULL on the host.
    pub stream: *mut c_void,
}

// SAFETY: see the trait; all zeros are numbers, NULL pointers and no tensors.
unsafe impl Versioned for DispatchArguments {
    const NAME: &'static str = "deep_ep_dispatch_input_t";
}

/// Memory of the caller for what a dispatch receives. Made by `deep_ep_dispatch_output()`. All have
/// `output_rows` rows of the counts.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DispatchOutputs {
    /// Set by `deep_ep_dispatch_output()`.
    pub struct_size: usize,
    /// `[N, H]`, of the type of the input.
    pub x: TensorView,
    /// `[N, S]`, dense; needed exactly when the input has scales.
    pub scales: TensorView,
    /// `[N, K]`, of the type of the input's choices: local expert numbers, -1 for others. May be left
    /// out.
    pub topk_idx: TensorView,
    /// fp32 `[N, K]`, 0 where the index is -1. May be left out.
    pub topk_weights: TensorView,
}

// SAFETY: see the trait; all zeros are no tensors.
unsafe impl Versioned for DispatchOutputs {
    const NAME: &'static str = "deep_ep_dispatch_output_t";
}

/// How many rows come.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Counts {
    /// Rows that this rank receives, its own included; -1 where the host does not wait for it.
    pub rows: i64,
    /// Rows that outputs must have: that number, or `num_worst_tokens`.
    pub output_rows: usize,
    /// Rows from each source rank, `num_ranks` numbers.
    pub rows_from: *const usize,
    /// Numbers in `rows_from`; 0 where `rows` is -1.
    pub num_ranks: usize,
    /// Choices of each local expert, rounded up to `expert_alignment`, `num_local_experts` numbers.
    pub num_recv_tokens_per_expert: *const usize,
    /// Numbers in `num_recv_tokens_per_expert`; 0 with `num_worst_tokens` and with a handle.
    pub num_local_experts: usize,
}

impl Counts {
    fn of(counts: &ReceivedCounts) -> Self {
        Self {
            rows: counts.rows.map_or(-1, |rows| rows as i64),
            output_rows: counts.output_rows,
            rows_from: pointers::first(&counts.rows_from),
            num_ranks: counts.rows_from.len(),
            num_recv_tokens_per_expert: pointers::first(&counts.tokens_per_expert),
            num_local_experts: counts.tokens_per_expert.len(),
        }
    }
}

/// What a dispatch received. Made by `deep_ep_dispatched()`. Rows are ordered by source rank, then source
/// token.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Received {
    /// Set by `deep_ep_dispatched()`.
    pub struct_size: usize,
    /// `[N, H]`: the caller's memory if he passed any, else memory of `loan`.
    pub x: TensorView,
    /// `[N, S]`, or none.
    pub scales: TensorView,
    /// `[N, K]` local expert numbers, -1 for experts elsewhere or not chosen; or none.
    pub topk_idx: TensorView,
    /// fp32 `[N, K]`, 0 where the index is -1; or none.
    pub topk_weights: TensorView,
    /// Row counts; its pointers live as long as `handle`.
    pub counts: Counts,
    /// For the combine, and for dispatching again along the same routes. The caller's to free.
    pub handle: *mut HandleObject,
    /// The memory of the tensors above, for a combine without a copy; NULL if the caller passed
    /// memory. The caller's to free.
    pub loan: *mut LoanObject,
}

// SAFETY: see the trait; all zeros are numbers, NULL pointers and no tensors.
unsafe impl Versioned for Received {
    const NAME: &'static str = "deep_ep_dispatched_t";
}

impl DispatchArguments {
    fn kept(&self, buffer: Arc<BufferObject>) -> Result<Kept> {
        Ok(Kept {
            buffer: Some(buffer),
            layout: objects::get_optional(self.layout, "layout")?,
            handle: objects::get_optional(self.handle, "handle")?,
            ..Kept::default()
        })
    }

    fn routes(&self, kept: &Kept) -> Result<Routes<'static>> {
        let weights = self.topk_weights.read_optional("topk_weights")?;
        let given = |idx| TopK { idx, weights };
        let topk = self.topk_idx.read_optional("topk_idx")?.map(given);
        if let Some(handle) = &kept.handle {
            if topk.is_some() || weights.is_some() {
                let limit = "must not be given with a handle: no choices travel";
                return Err(deep_ep::Error::invalid("topk_idx", "a tensor", limit));
            }
            return Ok(Routes::Handle(&lasting(handle).handle));
        }
        if let Some(layout) = &kept.layout {
            if topk.is_none() && weights.is_some() {
                let limit = "must be given only with topk_idx";
                return Err(deep_ep::Error::invalid("topk_weights", "a tensor", limit));
            }
            let layout = &lasting(layout).0;
            return Ok(Routes::Layout { layout, topk });
        }
        Ok(Routes::TopK {
            topk: given(self.topk_idx.read("topk_idx")?),
            num_experts: self.num_experts,
        })
    }

    fn input(&self, buffer: &BufferObject, kept: &Kept) -> Result<DispatchInput<'static>> {
        Ok(DispatchInput {
            scales: self.scales.read_optional("scales")?,
            expert_alignment: given(self.expert_alignment).unwrap_or(1),
            num_worst_tokens: given(self.num_worst_tokens),
            landing: match self.into_caller_memory {
                0 => Landing::Loan,
                _ => Landing::Caller,
            },
            num_sms: buffer.num_sms(self.num_sms),
            stream: buffer::stream(self.stream),
            ..DispatchInput::new(self.x.read("x")?, self.routes(kept)?)
        })
    }
}

/// Begins a dispatch. A failure is told to the peers.
fn begin(buffer: Arc<BufferObject>, arguments: Result<DispatchArguments>) -> Result<PendingObject> {
    let prepared = arguments.and_then(|arguments| {
        let kept = arguments.kept(buffer.clone())?;
        Ok((arguments.input(&buffer, &kept)?, kept))
    });
    let (input, kept) = buffer.prepared(Call::Dispatch, prepared)?;
    let call = buffer.inner.dispatch(input)?;
    Ok(PendingObject::new(Half::Dispatch(Held {
        call,
        _kept: kept,
    })))
}

/// Finishes a dispatch into the caller's memory, or into a loan.
fn finish(pending: &PendingObject, output: Option<DispatchOutputs>) -> Result<Received> {
    let held = pending.take("a dispatch", |half| match half {
        Half::Dispatch(held) => Ok(held),
        other => Err(Box::new(other)),
    })?;
    let Some(output) = output else {
        return Ok(lend(held.call.finish()?));
    };
    let into = DispatchOutput {
        x: output.x.write("recv_x")?,
        scales: output.scales.write_optional("recv_x_scales")?,
        topk_idx: output.topk_idx.write_optional("recv_topk_idx")?,
        topk_weights: output.topk_weights.write_optional("recv_topk_weights")?,
    };
    let (counts, handle) = held.call.finish_into(into)?;
    let (handle, counts) = give_handle(handle, counts);
    Ok(Received {
        struct_size: size_of::<Received>(),
        x: output.x,
        scales: output.scales,
        topk_idx: output.topk_idx,
        topk_weights: output.topk_weights,
        counts,
        handle,
        loan: std::ptr::null_mut(),
    })
}

fn give_handle(handle: DispatchHandle, counts: ReceivedCounts) -> (*mut HandleObject, Counts) {
    let object = Arc::new(HandleObject {
        handle,
        counts: Some(counts),
    });
    let counts = object.counts.as_ref().map(Counts::of);
    let counts = counts.expect("set above");
    (objects::give_shared(object), counts)
}

fn lend(dispatched: Dispatched) -> Received {
    let Dispatched {
        x,
        scales,
        topk_idx,
        topk_weights,
        counts,
        handle,
    } = dispatched;
    let view = |tensor: Option<Tensor<'_>>| TensorView::of_optional(tensor);
    let (handle, counts) = give_handle(handle, counts);
    // The tensors' memory does not move with them.
    let mut received = Received {
        struct_size: size_of::<Received>(),
        x: TensorView::of(&x.as_tensor()),
        scales: view(scales.as_ref().map(|tensor| tensor.as_tensor())),
        topk_idx: view(topk_idx.as_ref().map(|tensor| tensor.as_tensor())),
        topk_weights: view(topk_weights.as_ref().map(|tensor| tensor.as_tensor())),
        counts,
        handle,
        loan: std::ptr::null_mut(),
    };
    let rest = [scales, topk_idx, topk_weights]
        .into_iter()
        .flatten()
        .collect();
    received.loan = objects::give(LoanObject::new(Some(x), rest));
    received
}

/// Begins to send each row to every rank that hosts one of its experts. What `input` names must stay as
/// it is until the call is finished or freed, on a GPU until its work on the stream is done. All
/// ranks make the same calls in the same order. `*pending` is the caller's to free. One thread at a
/// time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_dispatch_begin(
    buffer: *const BufferObject,
    input: *const DispatchArguments,
    pending: *mut *mut PendingObject,
) -> Status {
    boundary::call(|| {
        let buffer = buffer::get(buffer)?;
        let out = buffer.prepared(Call::Dispatch, Out::new(pending, "pending"))?;
        out.set(objects::give(begin(
            buffer,
            pointers::read(input, "input"),
        )?));
        Ok(())
    })
}

/// Waits until it is known how many rows come. The pointers in `*counts` live until `pending` is freed.
/// One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_dispatch_counts(
    pending: *const PendingObject,
    counts: *mut Counts,
) -> Status {
    boundary::call(|| {
        let out = Out::new(counts, "counts")?;
        let pending = objects::get(pending, "pending")?;
        out.set(Counts::of(pending.counts()?));
        Ok(())
    })
}

/// Completes a dispatch: into the memory that `output` names, or, if it is NULL, into a loan. `pending` is
/// used up, also by a failure, but must still be freed. `result` was made by
/// `deep_ep_dispatched()`.
/// One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_dispatch_finish(
    pending: *const PendingObject,
    output: *const DispatchOutputs,
    result: *mut Received,
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

/// A whole dispatch: `deep_ep_dispatch_begin()` and `deep_ep_dispatch_finish()`. With memory of the caller
/// `output` must have exactly the rows that come; where that is not known, begin the call and ask
/// for its counts, or pass NULL.
/// One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_dispatch(
    buffer: *const BufferObject,
    input: *const DispatchArguments,
    output: *const DispatchOutputs,
    result: *mut Received,
) -> Status {
    boundary::call(|| {
        let buffer = buffer::get(buffer)?;
        let places = OutStruct::new(result, "result")
            .and_then(|out| Ok((out, pointers::read_optional(output, "output")?)));
        let (out, output) = buffer.prepared(Call::Dispatch, places)?;
        let arguments = pointers::read(input, "input").map(|input| DispatchArguments {
            into_caller_memory: output.is_some().into(),
            ..input
        });
        out.set(finish(&begin(buffer, arguments)?, output)?);
        Ok(())
    })
}

/// Frees the handle and the loan of a result, and sets both to NULL. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_dispatched_free(result: *mut Received) -> Status {
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
