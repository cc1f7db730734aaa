//! The high-throughput calls of a job.

use anyhow::{Context, Result};
use deep_ep::{
    CombineInput, CombineOutput, CombineRows, DType, DispatchHandle, DispatchInput, DispatchOutput,
    F8E4M3, Landing, Loan, OwnedTensor, ReceivedCounts, Routes, Tensor, TensorMut, TopK,
    codec::SCALE_BLOCK,
};
use half::bf16;

use super::{
    Rank,
    rows::{as_bf16, at_least},
};
use crate::{
    batch::{Ids, Sizes},
    expert,
    fp8::Fp8Rows,
    options::{ExpertWork, Outputs, RowType},
    report::Check,
    verify::{Received, Verifier},
};

pub(super) struct Calls<'a> {
    rank: Rank<'a>,
    sizes: Sizes,
    /// The rows to send, if they are not bf16.
    fp8: Option<Fp8Rows>,
    /// What the current iteration received, without its rows if those are in `memory`.
    received: Option<Arrived>,
    /// Outputs of dispatch in the caller's memory.
    memory: Memory,
    /// Combine's input.
    outputs: ExpertOutputs,
    /// Whether the experts wrote outputs.
    written: bool,
    combined: Vec<bf16>,
}

/// Metadata of a dispatch, and its rows if they are lent.
struct Arrived {
    counts: ReceivedCounts,
    handle: DispatchHandle,
    lent: Option<Lent>,
}

struct Lent {
    x: Loan,
    scales: Option<OwnedTensor>,
    topk_idx: OwnedTensor,
    topk_weights: OwnedTensor,
}

/// Caller's memory, at least as large as the largest iteration needed.
#[derive(Default)]
struct Memory {
    x: Vec<bf16>,
    codes: Vec<F8E4M3>,
    scales: Vec<f32>,
    idx32: Vec<i32>,
    idx64: Vec<i64>,
    weights: Vec<f32>,
}

/// Where the experts write.
enum ExpertOutputs {
    Loan(Option<Loan>),
    Caller(Vec<bf16>),
}

impl<'a> Calls<'a> {
    pub(super) fn new(rank: Rank<'a>) -> Result<Self> {
        let batch = rank.batch;
        Ok(Self {
            rank,
            sizes: batch.sizes,
            fp8: (rank.options.dtype == RowType::Fp8).then(|| Fp8Rows::of(batch)),
            received: None,
            memory: Memory::default(),
            outputs: match rank.options.outputs {
                Outputs::Loan => ExpertOutputs::Loan(None),
                Outputs::Caller => ExpertOutputs::Caller(Vec::new()),
            },
            written: false,
            combined: vec![bf16::ZERO; batch.x.len()],
        })
    }

    fn arrived(&self) -> Result<&Arrived> {
        self.received.as_ref().context("nothing was dispatched yet")
    }

    /// The received rows, wherever they are.
    fn view(&self) -> Result<Received<'_>> {
        let arrived = self.arrived()?;
        let n = arrived.counts.output_rows;
        let Sizes { hidden, top_k, .. } = self.sizes;
        let fp8 = self.fp8.is_some();
        let (x, scales, topk_idx, topk_weights) = match &arrived.lent {
            Some(lent) => (
                lent.x.as_bytes()?,
                lent.scales
                    .as_ref()
                    .map(|s| s.as_slice::<f32>())
                    .transpose()?,
                lent.topk_idx.as_tensor(),
                lent.topk_weights.as_slice::<f32>()?,
            ),
            None => {
                let memory = &self.memory;
                let x: &[u8] = match fp8 {
                    true => bytemuck::cast_slice(&memory.codes[..n * hidden]),
                    false => bytemuck::cast_slice(&memory.x[..n * hidden]),
                };
                let scales = fp8.then(|| &memory.scales[..n * hidden / SCALE_BLOCK]);
                let idx = match &self.rank.batch.topk_idx {
                    Ids::I32(_) => Tensor::new(&memory.idx32, &[n, top_k])?,
                    Ids::I64(_) => Tensor::new(&memory.idx64, &[n, top_k])?,
                };
                (x, scales, idx, &memory.weights[..n * top_k])
            }
        };
        Ok(Received {
            x,
            scales,
            topk_idx,
            topk_weights,
            counts: &arrived.counts,
            handle: &arrived.handle,
        })
    }
}

impl Memory {
    /// Makes room for `n` rows and returns it as outputs.
    fn output(
        &mut self,
        n: usize,
        sizes: Sizes,
        fp8: bool,
        ids: &Ids,
    ) -> Result<DispatchOutput<'_>> {
        let Sizes { hidden, top_k, .. } = sizes;
        let blocks = hidden / SCALE_BLOCK;
        let (x, scales) = if fp8 {
            at_least(&mut self.codes, n * hidden, F8E4M3(0));
            at_least(&mut self.scales, n * blocks, 0.0);
            (
                TensorMut::new(&mut self.codes, &[n, hidden])?,
                Some(TensorMut::new(&mut self.scales, &[n, blocks])?),
            )
        } else {
            at_least(&mut self.x, n * hidden, bf16::ZERO);
            (TensorMut::new(&mut self.x, &[n, hidden])?, None)
        };
        let topk_idx = match ids {
            Ids::I32(_) => {
                at_least(&mut self.idx32, n * top_k, 0);
                TensorMut::new(&mut self.idx32, &[n, top_k])?
            }
            Ids::I64(_) => {
                at_least(&mut self.idx64, n * top_k, 0);
                TensorMut::new(&mut self.idx64, &[n, top_k])?
            }
        };
        at_least(&mut self.weights, n * top_k, 0.0);
        let topk_weights = TensorMut::new(&mut self.weights, &[n, top_k])?;
        Ok(DispatchOutput {
            x,
            scales,
            topk_idx: Some(topk_idx),
            topk_weights: Some(topk_weights),
        })
    }

    /// Values that no row has.
    fn spoil(&mut self) {
        self.x.fill(bf16::from_bits(0x7fa5));
        self.codes.fill(F8E4M3(0x7f));
        self.scales.fill(-1.0);
        self.idx32.fill(i32::MIN);
        self.idx64.fill(i64::MIN);
        self.weights.fill(-1.0);
    }
}

impl super::Calls for Calls<'_> {
    fn reset(&mut self, spoil: bool) -> Result<()> {
        self.received = None;
        if spoil {
            self.memory.spoil();
            self.combined.fill(bf16::from_bits(0x7fa5));
        }
        Ok(())
    }

    fn dispatch(&mut self) -> Result<()> {
        let batch = self.rank.batch;
        let topk = TopK {
            idx: batch.topk_idx()?,
            weights: Some(batch.topk_weights()?),
        };
        let routes = Routes::TopK {
            topk,
            num_experts: self.sizes.experts,
        };
        let mut input = match &self.fp8 {
            None => DispatchInput::new(batch.x()?, routes),
            Some(rows) => DispatchInput {
                scales: Some(rows.scales()?),
                ..DispatchInput::new(rows.codes()?, routes)
            },
        };
        let caller = self.rank.options.outputs == Outputs::Caller;
        if caller {
            input.landing = Landing::Caller;
        }
        let mut pending = self.rank.buffer.dispatch(input)?;
        self.received = Some(if caller {
            let rows = pending.counts()?.output_rows;
            let output =
                self.memory
                    .output(rows, self.sizes, self.fp8.is_some(), &batch.topk_idx)?;
            let (counts, handle) = pending.finish_into(output)?;
            Arrived {
                counts,
                handle,
                lent: None,
            }
        } else {
            let received = pending.finish()?;
            let lent = Lent {
                x: received.x,
                scales: received.scales,
                topk_idx: received
                    .topk_idx
                    .context("dispatch returned no top-k indices")?,
                topk_weights: received
                    .topk_weights
                    .context("dispatch returned no top-k weights")?,
            };
            Arrived {
                counts: received.counts,
                handle: received.handle,
                lent: Some(lent),
            }
        });
        Ok(())
    }

    fn experts(&mut self) -> Result<()> {
        let idle = self.rank.options.expert_work == ExpertWork::None;
        // Every iteration receives the same rows, so idle experts' outputs are the same, too.
        if idle && (self.fp8.is_none() || self.written) {
            return Ok(());
        }
        let hidden = self.sizes.hidden;
        // Taken out while the received rows are borrowed.
        let mut outputs = std::mem::replace(&mut self.outputs, ExpertOutputs::Loan(None));
        let received = self.view()?;
        let n = received.counts.output_rows;
        let out = match &mut outputs {
            ExpertOutputs::Caller(memory) => {
                at_least(memory, n * hidden, bf16::ZERO);
                &mut memory[..n * hidden]
            }
            ExpertOutputs::Loan(loan) => {
                if loan.as_ref().is_none_or(|loan| loan.shape()[0] != n) {
                    // Returned before the next is taken.
                    *loan = None;
                    *loan = Some(self.rank.buffer.loan(DType::Bf16, &[n, hidden])?);
                }
                loan.as_mut().context("no loan")?.as_mut_slice::<bf16>()?
            }
        };
        let first = self.rank.rank * self.sizes.experts / self.rank.options.ranks;
        let mut scratch = vec![bf16::ZERO; hidden];
        let mut parts = Vec::new();
        for (row, out) in out.chunks_exact_mut(hidden).enumerate() {
            let choices = received
                .choices(row)
                .filter(|(local, _)| *local >= 0)
                .map(|(local, weight)| (first + local as usize, weight));
            let x = as_bf16(received.row(row), received.row_scales(row), &mut scratch);
            match idle {
                true => out.copy_from_slice(x),
                false => expert::weighted_sum(x, choices, self.sizes.experts, &mut parts, out),
            }
        }
        self.outputs = outputs;
        self.written = true;
        Ok(())
    }

    fn combine(&mut self) -> Result<()> {
        let shape = [self.rank.batch.tokens(), self.sizes.hidden];
        let arrived = self
            .received
            .as_ref()
            .context("nothing was dispatched yet")?;
        let rows = match &self.outputs {
            // Idle experts' outputs are the received rows.
            _ if !self.written => match &arrived.lent {
                Some(lent) => CombineRows::Loan(&lent.x),
                None => CombineRows::Caller(Tensor::new(
                    &self.memory.x,
                    &[arrived.counts.output_rows, self.sizes.hidden],
                )?),
            },
            ExpertOutputs::Loan(loan) => CombineRows::Loan(loan.as_ref().context("no loan")?),
            ExpertOutputs::Caller(memory) => CombineRows::Caller(Tensor::new(
                memory,
                &[arrived.counts.output_rows, self.sizes.hidden],
            )?),
        };
        let pending = self
            .rank
            .buffer
            .combine(CombineInput::new(rows, &arrived.handle))?;
        pending.finish_into(CombineOutput::new(TensorMut::new(
            &mut self.combined,
            &shape,
        )?))?;
        Ok(())
    }

    fn check(&self, verifier: &Verifier<'_>) -> Result<Check> {
        verifier.high_throughput(&self.view()?, &self.combined)
    }

    fn expert_load(&self) -> Vec<usize> {
        self.received
            .as_ref()
            .map(|r| r.counts.tokens_per_expert.clone())
            .unwrap_or_default()
    }

    fn received_rows(&self) -> usize {
        self.received.as_ref().map_or(0, |r| r.counts.output_rows)
    }

    fn sent_rows(&self) -> usize {
        let batch = self.rank.batch;
        let per_rank = self.sizes.experts / self.rank.options.ranks;
        (0..batch.tokens())
            .map(|t| batch.distinct(t, per_rank))
            .sum()
    }

    fn take_combined(self) -> Vec<bf16> {
        self.combined
    }
}
