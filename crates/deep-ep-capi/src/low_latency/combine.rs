//! Low-latency combine.

use std::{ffi::c_void, sync::Arc};

use deep_ep::{Call, CombineWire, Error, LowLatencyCombineInput, Result, TensorMut};

use crate::{
    boundary,
    buffer::{self, BufferObject},
    combine::rows,
    handle::LowLatencyHandleObject,
    loan::LoanObject,
    objects,
    pending::{Half, Held, Kept, PendingObject, lasting},
    pointers::{self, Out, Versioned},
    status::Status,
    tensor::TensorView,
};

/// How rows of a low-latency combine travel.
#[repr(C)]
#[allow(non_camel_case_types, clippy::upper_case_acronyms)]
pub enum WireName {
    /// One bf16 partial sum for each token and rank.
    DEEP_EP_WIRE_BF16 = 0,
    /// The same with about 10 bits for each value (DeepEP's `use_logfmt`).
    DEEP_EP_WIRE_LOGFMT = 1,
    /// One bf16 row for each choice, summed by the owner in fp32 in the order of the choices: the same bits
    /// on every engine. Needs `exact_top_k` in the buffer's settings.
    DEEP_EP_WIRE_EXACT = 2,
}

/// What a low-latency combine sends back. Made by `deep_ep_low_latency_combine_input()`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LowLatencyCombineArguments {
    /// Set by `deep_ep_low_latency_combine_input()`.
    pub struct_size: usize,
    /// bf16 `[E/R, R*M, H]`: outputs of the local experts, rows where the dispatch put them. Or none, if
    /// `loan` is set.
    pub x: TensorView,
    /// That of `deep_ep_get_next_low_latency_combine_buffer()`, for a combine without a copy; or NULL.
    pub loan: *const LoanObject,
    /// Choices of this rank's tokens `[T, K]`, as passed to the dispatch.
    pub topk_idx: TensorView,
    /// fp32 `[T, K]`.
    pub topk_weights: TensorView,
    /// The handle of the dispatch; it may be used several times.
    pub handle: *const LowLatencyHandleObject,
    /// A value of `deep_ep_wire`.
    pub wire: i32,
    /// Not 0: nothing is to run between the halves. The CUDA engine makes one launch of both when the call
    /// is finished, which is faster, and gives all its errors then. Ranks may differ in it.
    pub at_once: i32,
    /// int64 `[R]`: clock cycles waited for each rank are added to it; or none.
    pub combine_wait_recv_cost_stats: TensorView,
    /// Stream of the GPU that the call is ordered on, NULL on the host.
    pub stream: *mut c_void,
}

// SAFETY: see the trait; all zeros are numbers, NULL pointers and no tensors.
unsafe impl Versioned for LowLatencyCombineArguments {
    const NAME: &'static str = "deep_ep_low_latency_combine_input_t";
}

impl LowLatencyCombineArguments {
    fn wire(&self) -> Result<CombineWire> {
        Ok(match self.wire {
            0 => CombineWire::Bf16,
            1 => CombineWire::LogFmt,
            2 => CombineWire::Exact,
            other => {
                let limit = "must be a value of deep_ep_wire";
                return Err(Error::invalid("wire", other, limit));
            }
        })
    }

    fn held(&self, buffer: &Arc<BufferObject>) -> Result<(LowLatencyCombineInput<'static>, Kept)> {
        let handle = objects::get(self.handle, "handle")?;
        let mut loan = None;
        let x = rows(&self.x, self.loan, &mut loan)?;
        let stats = "combine_wait_recv_cost_stats";
        let input = LowLatencyCombineInput {
            wire: self.wire()?,
            at_once: self.at_once != 0,
            wait_stats: self.combine_wait_recv_cost_stats.write_optional(stats)?,
            stream: buffer::stream(self.stream),
            ..LowLatencyCombineInput::new(
                x,
                self.topk_idx.read("topk_idx")?,
                self.topk_weights.read("topk_weights")?,
                &lasting(&handle).handle,
            )
        };
        let kept = Kept {
            buffer: Some(buffer.clone()),
            low_latency_handle: Some(handle),
            loan,
            ..Kept::default()
        };
        Ok((input, kept))
    }
}

/// Sends. A failure is told to the peers.
fn begin(
    buffer: Arc<BufferObject>,
    arguments: Result<LowLatencyCombineArguments>,
) -> Result<PendingObject> {
    let prepared = arguments.and_then(|arguments| arguments.held(&buffer));
    let (input, kept) = buffer.prepared(Call::LowLatencyCombine, prepared)?;
    let call = buffer.inner.low_latency_combine(input)?;
    Ok(PendingObject::new(Half::LowLatencyCombine(Held {
        call,
        _kept: kept,
    })))
}

fn place<'a>(out: *const TensorView) -> Result<TensorMut<'a>> {
    pointers::slice(out, 1, "out")?[0].write("out")
}

fn finish(pending: &PendingObject, out: TensorMut<'_>) -> Result<()> {
    let held = pending.take("a low-latency combine", |half| match half {
        Half::LowLatencyCombine(held) => Ok(held),
        other => Err(Box::new(other)),
    })?;
    held.call.finish_into(out)
}

/// Sends expert outputs back to the owners of their tokens. Waits for the peers' sends of the same call,
/// never for their receives. The receive half is `deep_ep_low_latency_combine_finish()`, the hook.
/// What `input` names must stay as it is until then, on a GPU until the work on the stream is done.
/// `*pending` is the caller's to free. One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_combine_begin(
    buffer: *const BufferObject,
    input: *const LowLatencyCombineArguments,
    pending: *mut *mut PendingObject,
) -> Status {
    boundary::call(|| {
        let buffer = buffer::get(buffer)?;
        let out = buffer.prepared(Call::LowLatencyCombine, Out::new(pending, "pending"))?;
        out.set(objects::give(begin(
            buffer,
            pointers::read(input, "input"),
        )?));
        Ok(())
    })
}

/// Receives into `out`, bf16 `[T, H]` of the caller, whose rows may be apart: the sum of each token's expert
/// outputs with the weights of the input. `pending` is used up unless `out` itself cannot be read,
/// but must still be freed.
/// One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_combine_finish(
    pending: *const PendingObject,
    out: *const TensorView,
) -> Status {
    boundary::call(|| finish(&*objects::get(pending, "pending")?, place(out)?))
}

/// A whole low-latency combine: send and receive.
/// One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_low_latency_combine(
    buffer: *const BufferObject,
    input: *const LowLatencyCombineArguments,
    out: *const TensorView,
) -> Status {
    boundary::call(|| {
        let buffer = buffer::get(buffer)?;
        let out = buffer.prepared(Call::LowLatencyCombine, place(out))?;
        finish(&begin(buffer, pointers::read(input, "input"))?, out)
    })
}
