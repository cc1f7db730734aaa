//! High-throughput combine.

use std::{ffi::c_void, sync::Arc};

use deep_ep::{Call, CombineInput, CombineOutput, CombineRows, Error, Loan, Result};

use crate::{
    boundary,
    buffer::{self, BufferObject},
    handle::HandleObject,
    loan::LoanObject,
    objects,
    pending::{Half, Held, Kept, PendingObject, lasting},
    pointers::{self, Out, Versioned},
    status::Status,
    tensor::TensorView,
};

/// What a combine sends back. Made by `deep_ep_combine_input()`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CombineArguments {
    /// Set by `deep_ep_combine_input()`.
    pub struct_size: usize,
    /// `[N, H]` bf16, fp32 or fp16 in the order of the dispatch's rows, in the caller's memory; rows may
    /// be apart, and more than N. Or none, if `loan` is set.
    pub x: TensorView,
    /// The rows in symmetric memory: they are not copied. Or NULL, if `x` is set.
    pub loan: *const LoanObject,
    /// The handle of the dispatch whose rows go back.
    pub handle: *const HandleObject,
    /// fp32 `[N, K]`, summed over ranks for each token; or none.
    pub topk_weights: TensorView,
    /// Up to two `[T, H]` tensors of the type of the rows that the sum begins with.
    pub bias: [TensorView; 2],
    /// Bound on the SMs, or worker threads, of this call; 0: the buffer's.
    pub num_sms: usize,
    /// Stream of the GPU that the call is ordered on, NULL on the host.
    pub stream: *mut c_void,
}

// SAFETY: see the trait; all zeros are numbers, NULL pointers and no tensors.
unsafe impl Versioned for CombineArguments {
    const NAME: &'static str = "deep_ep_combine_input_t";
}

/// Memory of the caller for what a combine gives. Made by `deep_ep_combine_output()`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CombineOutputs {
    /// Set by `deep_ep_combine_output()`.
    pub struct_size: usize,
    /// `[T, H]`, of the type of the rows: the sum over the ranks that the token went to, ascending, after
    /// the bias. Rows may be apart.
    pub x: TensorView,
    /// fp32 `[T, K]`: the same sum of the weights; needed exactly when the input has weights.
    pub topk_weights: TensorView,
}

// SAFETY: see the trait; all zeros are no tensors.
unsafe impl Versioned for CombineOutputs {
    const NAME: &'static str = "deep_ep_combine_output_t";
}

impl CombineOutputs {
    fn output<'a>(&self) -> Result<CombineOutput<'a>> {
        Ok(CombineOutput {
            x: self.x.write("combined_x")?,
            topk_weights: self.topk_weights.write_optional("combined_topk_weights")?,
        })
    }
}

/// Rows that come as a tensor or as a loan, which is kept.
pub(crate) fn rows(
    x: &TensorView,
    loan: *const LoanObject,
    kept: &mut Option<Arc<Loan>>,
) -> Result<CombineRows<'static>> {
    match (objects::get_optional(loan, "loan")?, x.is_some()) {
        (Some(_), true) => {
            let limit = "must not be given with a loan: the rows are one or the other";
            Err(Error::invalid("x", "a tensor", limit))
        }
        (Some(loan), false) => Ok(CombineRows::Loan(lasting(kept.insert(loan.rows()?)))),
        (None, _) => Ok(CombineRows::Caller(x.read("x")?)),
    }
}

impl CombineArguments {
    fn held(&self, buffer: &Arc<BufferObject>) -> Result<(CombineInput<'static>, Kept)> {
        let handle = objects::get(self.handle, "handle")?;
        let mut loan = None;
        let x = rows(&self.x, self.loan, &mut loan)?;
        let input = CombineInput {
            topk_weights: self.topk_weights.read_optional("topk_weights")?,
            bias: [
                self.bias[0].read_optional("bias[0]")?,
                self.bias[1].read_optional("bias[1]")?,
            ],
            num_sms: buffer.num_sms(self.num_sms),
            stream: buffer::stream(self.stream),
            ..CombineInput::new(x, &lasting(&handle).handle)
        };
        let kept = Kept {
            buffer: Some(buffer.clone()),
            handle: Some(handle),
            loan,
            ..Kept::default()
        };
        Ok((input, kept))
    }
}

/// Begins a combine. A failure is told to the peers.
fn begin(buffer: Arc<BufferObject>, arguments: Result<CombineArguments>) -> Result<PendingObject> {
    let prepared = arguments.and_then(|arguments| arguments.held(&buffer));
    let (input, kept) = buffer.prepared(Call::Combine, prepared)?;
    let call = buffer.inner.combine(input)?;
    Ok(PendingObject::new(Half::Combine(Held {
        call,
        _kept: kept,
    })))
}

fn finish(pending: &PendingObject, output: CombineOutput<'_>) -> Result<()> {
    let held = pending.take("a combine", |half| match half {
        Half::Combine(held) => Ok(held),
        other => Err(Box::new(other)),
    })?;
    held.call.finish_into(output)
}

/// Begins to bring rows back to their owners, where they are summed. What `input` names must stay as it
/// is until the call is finished or freed, on a GPU until its work on the stream is done.
/// `*pending` is the caller's to free. One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_combine_begin(
    buffer: *const BufferObject,
    input: *const CombineArguments,
    pending: *mut *mut PendingObject,
) -> Status {
    boundary::call(|| {
        let buffer = buffer::get(buffer)?;
        let out = buffer.prepared(Call::Combine, Out::new(pending, "pending"))?;
        out.set(objects::give(begin(
            buffer,
            pointers::read(input, "input"),
        )?));
        Ok(())
    })
}

/// Completes a combine. `pending` is used up unless `output` itself cannot be read, but must still be
/// freed.
/// One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_combine_finish(
    pending: *const PendingObject,
    output: *const CombineOutputs,
) -> Status {
    boundary::call(|| {
        let pending = objects::get(pending, "pending")?;
        finish(&pending, pointers::read(output, "output")?.output()?)
    })
}

/// A whole combine: `deep_ep_combine_begin()` and `deep_ep_combine_finish()`.
/// One thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_combine(
    buffer: *const BufferObject,
    input: *const CombineArguments,
    output: *const CombineOutputs,
) -> Status {
    boundary::call(|| {
        let buffer = buffer::get(buffer)?;
        let output = pointers::read(output, "output").and_then(|output| output.output());
        let output = buffer.prepared(Call::Combine, output)?;
        finish(&begin(buffer, pointers::read(input, "input"))?, output)
    })
}
