//! The low-latency calls of a job.

use anyhow::{Context, Result};
use deep_ep::{
    CombineRows, DType, Loan, LowLatencyCombineInput, LowLatencyDispatchInput,
    LowLatencyDispatchOutput, LowLatencyHandle, OwnedTensor, RowFormat, TensorMut,
    codec::{SCALE_BLOCK, ScaleFormat},
};
use half::bf16;

use super::{Rank, capacity, rows::as_bf16};
use crate::{
    batch::Sizes,
    expert,
    options::{Outputs, RowType},
    report::Check,
    source::Input,
    verify::{LowLatencyReceived, Verifier},
};

pub(super) struct Calls<'a> {
    rank: Rank<'a>,
    sizes: Sizes,
    /// `M`.
    capacity: usize,
    /// Outputs of dispatch: `[E/R, R*M, H]`, of which only rows in use take memory.
    x: OwnedTensor,
    /// Scales of FP8 rows.
    scales: Option<Scales>,
    received: Option<(OwnedTensor, LowLatencyHandle)>,
    /// Combine's input; a loan is good for one call.
    loan: Option<Loan>,
    /// `[E/R, R*M, H]` in the caller's memory.
    outputs: Option<OwnedTensor>,
    combined: Vec<bf16>,
}

/// `[E/R, R*M, H/128]` in the layout that kernels like: the scales of neighbouring rows are next to
/// each other, and a column begins at a multiple of 16 bytes.
struct Scales {
    memory: Vec<f32>,
    shape: [usize; 3],
    strides: [usize; 3],
}

impl Scales {
    fn new(shape: [usize; 3]) -> Self {
        let column = shape[1].next_multiple_of(4);
        let strides = [shape[2] * column, 1, column];
        Self {
            memory: vec![0.0; shape[0] * strides[0]],
            shape,
            strides,
        }
    }

    fn tensor(&mut self) -> Result<TensorMut<'_>> {
        Ok(TensorMut::strided(
            &mut self.memory,
            &self.shape,
            &self.strides,
        )?)
    }
}

impl<'a> Calls<'a> {
    pub(super) fn new(rank: Rank<'a>, input: &Input) -> Result<Self> {
        let sizes = rank.batch.sizes;
        let capacity = capacity(input, rank.options);
        let ranks = rank.options.ranks;
        let shape = |last| [sizes.experts / ranks, ranks * capacity, last];
        let fp8 = rank.options.dtype == RowType::Fp8;
        let caller = rank.options.outputs == Outputs::Caller;
        let rows = |dtype| OwnedTensor::zeros(dtype, &shape(sizes.hidden));
        Ok(Self {
            rank,
            sizes,
            capacity,
            x: rows(if fp8 { DType::F8E4M3 } else { DType::Bf16 })?,
            scales: fp8.then(|| Scales::new(shape(sizes.hidden / SCALE_BLOCK))),
            received: None,
            loan: None,
            outputs: match caller {
                true => Some(rows(DType::Bf16)?),
                false => None,
            },
            combined: vec![bf16::ZERO; rank.batch.x.len()],
        })
    }

    fn view(&self) -> Result<LowLatencyReceived<'_>> {
        let (recv_count, handle) = self
            .received
            .as_ref()
            .context("nothing was dispatched yet")?;
        Ok(LowLatencyReceived {
            x: match self.x.dtype() {
                DType::Bf16 => bytemuck::cast_slice(self.x.as_slice::<bf16>()?),
                _ => bytemuck::cast_slice(self.x.as_slice::<deep_ep::F8E4M3>()?),
            },
            scales: self.scales.as_ref().map(|s| (&*s.memory, s.strides)),
            rows: self.rank.options.ranks * self.capacity,
            hidden: self.sizes.hidden,
            recv_count: recv_count.as_slice()?,
            handle,
        })
    }
}

impl super::Calls for Calls<'_> {
    fn reset(&mut self, spoil: bool) -> Result<()> {
        self.received = None;
        self.loan = None;
        if spoil {
            self.combined.fill(bf16::from_bits(0x7fa5));
        }
        Ok(())
    }

    fn dispatch(&mut self) -> Result<()> {
        let batch = self.rank.batch;
        let mut input = LowLatencyDispatchInput::new(
            batch.x()?,
            batch.topk_idx()?,
            self.capacity,
            self.sizes.experts,
        );
        input.at_once = true;
        if self.scales.is_some() {
            input.format = RowFormat::Fp8(ScaleFormat::F32);
        }
        let pending = self.rank.buffer.low_latency_dispatch(input)?;
        let output = LowLatencyDispatchOutput {
            x: self.x.as_tensor_mut(),
            scales: self.scales.as_mut().map(Scales::tensor).transpose()?,
        };
        self.received = Some(pending.finish_into(output)?);
        Ok(())
    }

    fn experts(&mut self) -> Result<()> {
        let hidden = self.sizes.hidden;
        let (mut outputs, mut loan) = (self.outputs.take(), None);
        let received = self.view()?;
        let out = match &mut outputs {
            Some(memory) => memory.as_mut_slice::<bf16>()?,
            None => {
                let buffer = self.rank.buffer;
                loan = Some(buffer.next_low_latency_combine_buffer(received.handle, hidden)?);
                loan.as_mut().context("no loan")?.as_mut_slice::<bf16>()?
            }
        };
        let first = self.rank.rank * self.sizes.experts / self.rank.options.ranks;
        let mut scratch = vec![bf16::ZERO; hidden];
        for (local, out) in out.chunks_exact_mut(received.rows * hidden).enumerate() {
            let count = received.recv_count[local] as usize;
            for (row, out) in out.chunks_exact_mut(hidden).take(count).enumerate() {
                let scales = received.row_scales(local, row);
                let x = as_bf16(received.row(local, row), scales.as_deref(), &mut scratch);
                expert::scale(x, first + local, self.sizes.experts, out);
            }
        }
        (self.outputs, self.loan) = (outputs, loan);
        Ok(())
    }

    fn combine(&mut self) -> Result<()> {
        let batch = self.rank.batch;
        let shape = [batch.tokens(), self.sizes.hidden];
        let (_, handle) = self
            .received
            .as_ref()
            .context("nothing was dispatched yet")?;
        let rows = match (&self.loan, &self.outputs) {
            (Some(loan), _) => CombineRows::Loan(loan),
            (None, Some(memory)) => CombineRows::Caller(memory.as_tensor()),
            (None, None) => anyhow::bail!("the experts did not run"),
        };
        let mut input =
            LowLatencyCombineInput::new(rows, batch.topk_idx()?, batch.topk_weights()?, handle);
        input.at_once = true;
        let pending = self.rank.buffer.low_latency_combine(input)?;
        pending.finish_into(TensorMut::new(&mut self.combined, &shape)?)?;
        Ok(())
    }

    fn check(&self, verifier: &Verifier<'_>) -> Result<Check> {
        verifier.low_latency(&self.view()?, &self.combined)
    }

    fn expert_load(&self) -> Vec<usize> {
        self.received.as_ref().map_or(Vec::new(), |(counts, _)| {
            let counts = counts.as_slice::<i32>().unwrap_or_default();
            counts.iter().map(|&n| n as usize).collect()
        })
    }

    fn received_rows(&self) -> usize {
        self.expert_load().iter().sum()
    }

    fn sent_rows(&self) -> usize {
        let batch = self.rank.batch;
        (0..batch.tokens()).map(|t| batch.distinct(t, 1)).sum()
    }

    fn take_combined(self) -> Vec<bf16> {
        self.combined
    }
}
