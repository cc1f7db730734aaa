//! Low-latency dispatch and combine with device tensors: both halves together, and each alone.

use anyhow::{Context, Result, ensure};
use deep_ep::{
    CombineRows, DType, Loan, LowLatencyCombineInput, LowLatencyDispatchInput,
    LowLatencyDispatchOutput, LowLatencyHandle, OwnedTensor, RowFormat, codec::ScaleFormat,
};

use super::{
    rank::{Line, Operation, RankContext},
    timing::Runs,
};
use crate::options::{Outputs, RowType};

/// Measures dispatch, and combine with every landing of its input.
pub(super) fn measure(
    context: &RankContext<'_>,
    capacity: usize,
    lines: &mut Vec<Line>,
) -> Result<()> {
    let case = Case { context, capacity };
    let first = context
        .buffer
        .low_latency_dispatch(case.input(true))?
        .finish()?;
    case.settle()?;
    let (mut x, mut scales) = (first.x, first.scales);
    case.dispatch(&mut x, &mut scales, lines)?;
    for &landing in &context.plan.landings {
        case.combine(landing, &first.handle, lines)?;
    }
    Ok(())
}

struct Case<'a> {
    context: &'a RankContext<'a>,
    /// `M`.
    capacity: usize,
}

impl<'a> Case<'a> {
    fn input(&self, at_once: bool) -> LowLatencyDispatchInput<'a> {
        let context = self.context;
        LowLatencyDispatchInput {
            format: match context.dtype {
                RowType::Bf16 => RowFormat::Bf16,
                RowType::Fp8 => RowFormat::Fp8(ScaleFormat::F32),
            },
            at_once,
            stream: context.stream.as_stream(),
            ..LowLatencyDispatchInput::new(
                context.tensors.rows.as_tensor(),
                context.tensors.topk_idx.as_tensor(),
                self.capacity,
                context.batch.sizes.experts,
            )
        }
    }

    fn settle(&self) -> Result<()> {
        self.context.stream.synchronize()?;
        self.context
            .buffer
            .check()
            .context("a call went wrong on the GPU")
    }

    fn dispatch(
        &self,
        x: &mut OwnedTensor,
        scales: &mut Option<OwnedTensor>,
        lines: &mut Vec<Line>,
    ) -> Result<()> {
        let (timer, buffer) = (&self.context.timer, self.context.buffer);
        let both = timer.graph(|| {
            let pending = buffer.low_latency_dispatch(self.input(true))?;
            pending.finish_into(output(x, scales)).map(drop)
        })?;
        self.settle()?;
        let [send, receive] = timer.halves(
            || buffer.low_latency_dispatch(self.input(false)),
            |pending| pending.finish_into(output(x, scales)).map(drop),
        )?;
        self.settle()?;
        for (operation, runs) in [
            (Operation::LowLatencyDispatch, both),
            (Operation::LowLatencyDispatchSend, send),
            (Operation::LowLatencyDispatchReceive, receive),
        ] {
            // Dispatch's rows arrive in the caller's memory, whatever combine's input is.
            lines.push(line(operation, Outputs::Caller, runs));
        }
        Ok(())
    }

    fn combine(
        &self,
        landing: Outputs,
        handle: &LowLatencyHandle,
        lines: &mut Vec<Line>,
    ) -> Result<()> {
        let context = self.context;
        let (timer, buffer) = (&context.timer, context.buffer);
        let sizes = context.batch.sizes;
        let (mut memory, mut loan): (Option<OwnedTensor>, Option<Loan>) = (None, None);
        let rows = match landing {
            Outputs::Caller => {
                let ranks = buffer.num_ranks();
                let shape = [sizes.experts / ranks, ranks * self.capacity, sizes.hidden];
                CombineRows::Caller(memory.insert(context.some_rows(&shape)?).as_tensor())
            }
            Outputs::Loan => {
                let room = buffer.next_low_latency_combine_buffer(handle, sizes.hidden)?;
                CombineRows::Loan(loan.insert(room))
            }
        };
        let input = |at_once: bool| LowLatencyCombineInput {
            at_once,
            stream: context.stream.as_stream(),
            ..LowLatencyCombineInput::new(
                rows,
                context.tensors.topk_idx.as_tensor(),
                context.tensors.topk_weights.as_tensor(),
                handle,
            )
        };
        let shape = [context.batch.tokens(), sizes.hidden];
        let mut combined = context.gpu.zeros(DType::Bf16, &shape, context.stream)?;
        buffer
            .low_latency_combine(input(true))?
            .finish_into(combined.as_tensor_mut())?;
        self.settle()?;
        let right = context.bits(&combined)?;
        let both = timer.graph(|| {
            let pending = buffer.low_latency_combine(input(true))?;
            pending.finish_into(combined.as_tensor_mut())
        })?;
        self.settle()?;
        let [send, receive] = timer.halves(
            || buffer.low_latency_combine(input(false)),
            |pending| pending.finish_into(combined.as_tensor_mut()),
        )?;
        self.settle()?;
        ensure!(
            context.bits(&combined)? == right,
            "low-latency combine gave other rows when it was repeated"
        );
        for (operation, runs) in [
            (Operation::LowLatencyCombine, both),
            (Operation::LowLatencyCombineSend, send),
            (Operation::LowLatencyCombineReceive, receive),
        ] {
            lines.push(line(operation, landing, runs));
        }
        Ok(())
    }
}

fn output<'o>(
    x: &'o mut OwnedTensor,
    scales: &'o mut Option<OwnedTensor>,
) -> LowLatencyDispatchOutput<'o> {
    LowLatencyDispatchOutput {
        x: x.as_tensor_mut(),
        scales: scales.as_mut().map(OwnedTensor::as_tensor_mut),
    }
}

fn line(operation: Operation, landing: Outputs, runs: Runs) -> Line {
    Line {
        operation,
        landing,
        counts: None,
        sms: None,
        runs,
    }
}
