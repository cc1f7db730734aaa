//! High-throughput dispatch and combine with device tensors.

use anyhow::{Context, Result, ensure};
use deep_ep::{
    CombineInput, CombineOutput, CombineRows, DType, DispatchHandle, DispatchInput, DispatchOutput,
    Dispatched, Landing, Loan, OwnedTensor,
};

use super::rank::{Line, Operation, RankContext};
use crate::options::{Counts, Outputs, RowType};

/// Measures every landing, way of counting and SM count.
pub(super) fn measure(context: &RankContext<'_>, lines: &mut Vec<Line>) -> Result<()> {
    for &landing in &context.plan.landings {
        for &counts in &context.plan.counts {
            for &sms in &context.plan.sms {
                let case = Case {
                    context,
                    landing,
                    counts,
                    sms,
                };
                case.dispatch(lines)?;
                case.combine(lines)?;
            }
        }
    }
    Ok(())
}

struct Case<'a> {
    context: &'a RankContext<'a>,
    landing: Outputs,
    counts: Counts,
    sms: u32,
}

/// Outputs of dispatch in the caller's memory.
struct Memory {
    x: OwnedTensor,
    scales: Option<OwnedTensor>,
    topk_idx: OwnedTensor,
    topk_weights: OwnedTensor,
}

impl Memory {
    fn new(context: &RankContext<'_>, rows: usize) -> Result<Self> {
        let (gpu, stream) = (context.gpu, context.stream);
        let (x, scales) = context.tensors.dispatched();
        let zeros = |dtype, columns| gpu.zeros(dtype, &[rows, columns], stream);
        let top_k = context.batch.sizes.top_k;
        Ok(Self {
            x: zeros(x.dtype(), x.shape()[1])?,
            scales: match scales {
                Some(scales) => Some(zeros(scales.dtype(), scales.shape()[1])?),
                None => None,
            },
            topk_idx: zeros(context.tensors.topk_idx.dtype(), top_k)?,
            topk_weights: zeros(DType::F32, top_k)?,
        })
    }

    fn output(&mut self) -> DispatchOutput<'_> {
        DispatchOutput {
            x: self.x.as_tensor_mut(),
            scales: self.scales.as_mut().map(OwnedTensor::as_tensor_mut),
            topk_idx: Some(self.topk_idx.as_tensor_mut()),
            topk_weights: Some(self.topk_weights.as_tensor_mut()),
        }
    }
}

impl Case<'_> {
    fn input(&self) -> DispatchInput<'_> {
        let context = self.context;
        let (x, scales) = context.tensors.dispatched();
        let routes = context.tensors.routes(context.batch.sizes.experts);
        DispatchInput {
            scales,
            num_worst_tokens: match self.counts {
                Counts::Worst => Some(self.worst()),
                Counts::Exact => None,
            },
            landing: match self.landing {
                Outputs::Loan => Landing::Loan,
                Outputs::Caller => Landing::Caller,
            },
            num_sms: Some(self.sms as usize),
            stream: context.stream.as_stream(),
            ..DispatchInput::new(x, routes)
        }
    }

    /// Rows if all tokens of all ranks come: ranks have equally many tokens.
    fn worst(&self) -> usize {
        self.context.batch.tokens() * self.context.buffer.num_ranks()
    }

    /// One dispatch, whose rows are as all later ones'.
    fn first(&self) -> Result<Dispatched> {
        let buffer = self.context.buffer;
        let mut pending = buffer.dispatch(self.input())?;
        if self.counts == Counts::Exact {
            pending.counts()?;
        }
        let dispatched = pending.finish()?;
        self.settle()?;
        Ok(dispatched)
    }

    fn settle(&self) -> Result<()> {
        self.context.stream.synchronize()?;
        self.context
            .buffer
            .check()
            .context("a call went wrong on the GPU")
    }

    fn dispatch(&self, lines: &mut Vec<Line>) -> Result<()> {
        let context = self.context;
        let rows = self.first()?.counts.output_rows;
        let mut memory = match self.landing {
            Outputs::Caller => Some(Memory::new(context, rows)?),
            Outputs::Loan => None,
        };
        // What a graph writes lives as long as it: loans are kept until all runs are done. Made one
        // at a time, a call gives back what the last one got.
        let mut kept: Vec<Dispatched> = Vec::new();
        let mut call = |kept: &mut Vec<Dispatched>| {
            let mut pending = context.buffer.dispatch(self.input())?;
            if self.counts == Counts::Exact {
                pending.counts()?;
            }
            match &mut memory {
                Some(memory) => drop(pending.finish_into(memory.output())?),
                None => kept.push(pending.finish()?),
            }
            Ok(())
        };
        let runs = match self.counts {
            Counts::Worst => context.timer.graph(|| {
                // Eager calls come before the recording, whose loans then are the last ones.
                if !context.stream.is_capturing()? {
                    kept.clear();
                }
                call(&mut kept)
            })?,
            Counts::Exact => context.timer.eager(|| {
                kept.clear();
                call(&mut kept)
            })?,
        };
        self.settle()?;
        lines.push(self.line(Operation::Dispatch, runs));
        Ok(())
    }

    fn combine(&self, lines: &mut Vec<Line>) -> Result<()> {
        let context = self.context;
        let dispatched = self.first()?;
        let (handle, rows) = (&dispatched.handle, dispatched.counts.output_rows);
        let hidden = context.batch.sizes.hidden;
        let (mut memory, mut loan): (Option<OwnedTensor>, Option<Loan>) = (None, None);
        let rows = match (self.landing, context.dtype) {
            (Outputs::Caller, _) => {
                let memory = memory.insert(context.some_rows(&[rows, hidden])?);
                CombineRows::Caller(memory.as_tensor())
            }
            // The received rows themselves, as if the experts had worked in place.
            (Outputs::Loan, RowType::Bf16) => CombineRows::Loan(&dispatched.x),
            (Outputs::Loan, RowType::Fp8) => {
                let room = context.buffer.device_loan(DType::Bf16, &[rows, hidden])?;
                CombineRows::Loan(loan.insert(room))
            }
        };
        let shape = [context.batch.tokens(), hidden];
        let mut combined = context.gpu.zeros(DType::Bf16, &shape, context.stream)?;
        self.combine_once(rows, handle, &mut combined)?;
        self.settle()?;
        let right = context.bits(&combined)?;
        let call = || self.combine_once(rows, handle, &mut combined);
        // Whatever the dispatch waited for, a combine waits for nothing.
        let runs = context.timer.graph(call)?;
        self.settle()?;
        ensure!(
            context.bits(&combined)? == right,
            "combine gave other rows when it was repeated"
        );
        lines.push(self.line(Operation::Combine, runs));
        Ok(())
    }

    fn combine_once(
        &self,
        rows: CombineRows<'_>,
        handle: &DispatchHandle,
        combined: &mut OwnedTensor,
    ) -> deep_ep::Result<()> {
        let input = CombineInput {
            num_sms: Some(self.sms as usize),
            stream: self.context.stream.as_stream(),
            ..CombineInput::new(rows, handle)
        };
        let output = CombineOutput::new(combined.as_tensor_mut());
        self.context.buffer.combine(input)?.finish_into(output)
    }

    fn line(&self, operation: Operation, runs: super::timing::Runs) -> Line {
        Line {
            operation,
            landing: self.landing,
            counts: Some(self.counts),
            sms: Some(self.sms),
            runs,
        }
    }
}
