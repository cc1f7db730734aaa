//! One rank of a measurement: its GPU, its tensors, and its operations one after the other.

use anyhow::{Context, Result};
use deep_ep::{
    Buffer, BufferConfig, Communicator, EngineChoice, LowLatencyConfig, OwnedTensor, Routes,
    Tensor, TopK,
    cuda::{Gpu, GpuStream},
};
use half::bf16;

use super::{
    Configuration, Plan, high_throughput, low_latency,
    timing::{Runs, Timer},
};
use crate::{
    batch::{Batch, Sizes},
    fp8::Fp8Rows,
    options::{Counts, Mode, Outputs, RowType},
    source::Input,
};

/// What one rank measured.
pub(super) struct RankResult {
    pub(super) gpu: String,
    /// Rows to each rank: tokens with a choice there.
    pub(super) sent: Vec<u64>,
    /// In the same order on every rank.
    pub(super) lines: Vec<Line>,
}

/// One operation in one way.
pub(super) struct Line {
    pub(super) operation: Operation,
    pub(super) landing: Outputs,
    /// High-throughput calls only.
    pub(super) counts: Option<Counts>,
    /// High-throughput calls only.
    pub(super) sms: Option<u32>,
    pub(super) runs: Runs,
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Dispatch,
    Combine,
    LowLatencyDispatch,
    LowLatencyDispatchSend,
    LowLatencyDispatchReceive,
    LowLatencyCombine,
    LowLatencyCombineSend,
    LowLatencyCombineReceive,
}

/// What the operations of a rank share.
pub(super) struct RankContext<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) stream: &'a GpuStream,
    pub(super) buffer: &'a Buffer,
    pub(super) timer: Timer<'a>,
    pub(super) batch: &'a Batch,
    pub(super) tensors: &'a Tensors,
    pub(super) dtype: RowType,
    pub(super) plan: &'a Plan,
}

/// A rank's tokens on its GPU.
pub(super) struct Tensors {
    /// `[T, H]` bf16, which low-latency dispatch takes.
    pub(super) rows: OwnedTensor,
    /// `[T, H]` fp8 codes and `[T, H/128]` scales.
    pub(super) fp8: Option<(OwnedTensor, OwnedTensor)>,
    /// `[T, K]`.
    pub(super) topk_idx: OwnedTensor,
    /// `[T, K]`.
    pub(super) topk_weights: OwnedTensor,
}

impl Tensors {
    fn new(batch: &Batch, dtype: RowType, gpu: &Gpu, stream: &GpuStream) -> Result<Self> {
        let up = |tensor: Tensor<'_>| gpu.upload(&tensor, stream);
        let fp8 = (dtype == RowType::Fp8).then(|| Fp8Rows::of(batch));
        Ok(Self {
            rows: up(batch.x()?)?,
            fp8: match &fp8 {
                Some(rows) => Some((up(rows.codes()?)?, up(rows.scales()?)?)),
                None => None,
            },
            topk_idx: up(batch.topk_idx()?)?,
            topk_weights: up(batch.topk_weights()?)?,
        })
    }

    /// Rows and scales as high-throughput dispatch takes them.
    pub(super) fn dispatched(&self) -> (Tensor<'_>, Option<Tensor<'_>>) {
        match &self.fp8 {
            Some((codes, scales)) => (codes.as_tensor(), Some(scales.as_tensor())),
            None => (self.rows.as_tensor(), None),
        }
    }

    pub(super) fn routes(&self, num_experts: usize) -> Routes<'_> {
        Routes::TopK {
            topk: TopK {
                idx: self.topk_idx.as_tensor(),
                weights: Some(self.topk_weights.as_tensor()),
            },
            num_experts,
        }
    }
}

pub(super) fn run(
    communicator: Communicator,
    input: &Input,
    configuration: &Configuration,
    plan: &Plan,
) -> Result<RankResult> {
    if let Some(timeout) = plan.timeout {
        communicator.set_timeout(timeout);
    }
    let (rank, ranks) = (communicator.rank().0, communicator.size());
    let batch = input.shard(rank, ranks);
    let gpu = Gpu::new(rank % plan.gpus)?;
    // Before the tensors and the buffer, so that it goes after them.
    let stream = gpu.stream()?;
    let buffer = Buffer::new(&communicator, config(configuration, plan, gpu.ordinal())?)?;
    let tensors = Tensors::new(&batch, configuration.dtype, &gpu, &stream)?;
    let context = RankContext {
        gpu: &gpu,
        stream: &stream,
        buffer: &buffer,
        timer: Timer {
            communicator: &communicator,
            gpu: &gpu,
            stream: &stream,
            plan,
        },
        batch: &batch,
        tensors: &tensors,
        dtype: configuration.dtype,
        plan,
    };
    let mut lines = Vec::new();
    for mode in &plan.modes {
        match mode {
            Mode::HighThroughput => high_throughput::measure(&context, &mut lines)?,
            Mode::LowLatency => {
                let capacity = input.sizes().largest_shard(ranks).max(1);
                low_latency::measure(&context, capacity, &mut lines)?;
            }
        }
    }
    buffer.check().context("a call went wrong on the GPU")?;
    // Nobody leaves while another rank may still read this one's memory.
    buffer.barrier()?;
    Ok(RankResult {
        gpu: gpu.name()?,
        sent: sent(&batch, ranks),
        lines,
    })
}

fn config(configuration: &Configuration, plan: &Plan, gpu: usize) -> Result<BufferConfig> {
    let Sizes {
        hidden,
        top_k,
        experts,
        ..
    } = configuration.workload.sizes;
    let mut config = BufferConfig::from_env()?;
    config.engine = EngineChoice::Cuda;
    config.device = Some(gpu);
    config.num_experts = Some(experts);
    config.hidden = Some(hidden);
    config.top_k = Some(top_k);
    config.num_sms = plan.sms.iter().copied().max().unwrap_or(1) as usize;
    if let Some(timeout) = plan.timeout {
        config.timeout = timeout;
    }
    if plan.modes.contains(&Mode::LowLatency) {
        let sizes = configuration.workload.sizes;
        config.low_latency = Some(LowLatencyConfig {
            max_tokens_per_rank: sizes.largest_shard(configuration.ranks).max(1),
            hidden,
            num_experts: experts,
            exact_top_k: None,
        });
    }
    Ok(config)
}

/// Rows of a batch to each rank.
fn sent(batch: &Batch, ranks: usize) -> Vec<u64> {
    let per_rank = batch.sizes.experts / ranks;
    let mut sent = vec![0; ranks];
    for token in 0..batch.tokens() {
        let mut to: Vec<usize> = batch
            .ids(token)
            .filter(|&id| id >= 0)
            .map(|id| id as usize / per_rank)
            .collect();
        to.sort_unstable();
        to.dedup();
        to.into_iter().for_each(|rank| sent[rank] += 1);
    }
    sent
}

impl RankContext<'_> {
    /// `[shape]` bf16 on the GPU with the values of this rank's tokens, over and over.
    pub(super) fn some_rows(&self, shape: &[usize]) -> Result<OwnedTensor> {
        let count = shape.iter().product();
        let values: Vec<bf16> = match self.batch.x.is_empty() {
            true => vec![bf16::ONE; count],
            false => self.batch.x.iter().copied().cycle().take(count).collect(),
        };
        let host = Tensor::new(&values, shape)?;
        Ok(self.gpu.upload(&host, self.stream)?)
    }

    /// The bits of a device tensor, to compare.
    pub(super) fn bits(&self, tensor: &OwnedTensor) -> Result<Vec<u16>> {
        let host = self.gpu.download(&tensor.as_tensor(), self.stream)?;
        Ok(bytemuck::cast_slice(host.as_slice::<bf16>()?).to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Ids;

    #[test]
    fn a_token_is_sent_to_each_of_its_ranks_once() {
        let batch = Batch {
            sizes: Sizes {
                tokens: 2,
                hidden: 1,
                top_k: 3,
                experts: 6,
            },
            x: vec![bf16::ONE; 2],
            topk_idx: Ids::I64(vec![0, 1, 5, -1, 3, 2]),
            topk_weights: vec![0.0; 6],
        };
        assert_eq!(sent(&batch, 3), [1, 1, 1]);
        assert_eq!(sent(&batch, 2), [2, 2]);
    }
}
