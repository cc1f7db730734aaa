//! One rank's work: dispatch, experts, combine, measured and compared with the reference. All use
//! of the library's calls is in here.

mod high_throughput;
mod low_latency;
mod rows;

use std::time::Instant;

use anyhow::Result;
use deep_ep::{
    Buffer, BufferConfig, Communicator, EngineChoice as Engine, LowLatencyConfig,
    codec::SCALE_BLOCK,
};
use half::bf16;

use crate::{
    batch::Batch,
    options::{EngineChoice, Mode, Options, RowType},
    report::{Check, Copied, Memory, RankReport},
    source::Input,
    verify::Verifier,
};

/// Does the job of the communicator's rank.
pub(crate) fn run(
    communicator: Communicator,
    input: &Input,
    options: &Options,
) -> Result<RankReport> {
    run_against(communicator, input, input, options)
}

/// Compares with what the reference makes of `right`, which differs from `input` in tests only.
fn run_against(
    communicator: Communicator,
    input: &Input,
    right: &Input,
    options: &Options,
) -> Result<RankReport> {
    if let Some(timeout) = options.timeout {
        communicator.set_timeout(timeout);
    }
    let rank = communicator.rank().0;
    let batch = input.shard(rank, options.ranks);
    let buffer = Buffer::new(&communicator, config(input, options)?)?;
    let verifier = options.verify.then(|| Verifier::new(rank, right, options));
    let rank = Rank {
        rank,
        batch: &batch,
        buffer: &buffer,
        options,
    };
    let report = match options.mode {
        Mode::HighThroughput => rank.measure(high_throughput::Calls::new(rank)?, verifier),
        Mode::LowLatency => rank.measure(low_latency::Calls::new(rank, input)?, verifier),
    }?;
    // Nobody leaves while another rank may still read this one's memory.
    buffer.barrier()?;
    Ok(report)
}

fn config(input: &Input, options: &Options) -> Result<BufferConfig> {
    let sizes = input.sizes();
    let mut config = BufferConfig::from_env()?;
    if let Some(engine) = options.engine {
        config.engine = match engine {
            EngineChoice::Auto => Engine::Auto,
            EngineChoice::Cpu => Engine::Cpu,
            EngineChoice::Cuda => Engine::Cuda,
        };
    }
    if let Some(timeout) = options.timeout {
        config.timeout = timeout;
    }
    if let Some(num_sms) = options.num_sms {
        config.num_sms = num_sms;
    }
    config.num_experts = Some(sizes.experts);
    config.hidden = Some(sizes.hidden);
    config.top_k = Some(sizes.top_k);
    if options.mode == Mode::LowLatency {
        config.low_latency = Some(LowLatencyConfig {
            max_tokens_per_rank: capacity(input, options),
            hidden: sizes.hidden,
            num_experts: sizes.experts,
            exact_top_k: None,
        });
    }
    Ok(config)
}

/// `M` of low-latency calls: the largest shard.
fn capacity(input: &Input, options: &Options) -> usize {
    input.sizes().largest_shard(options.ranks).max(1)
}

/// What the calls of either family need.
#[derive(Clone, Copy)]
struct Rank<'a> {
    rank: usize,
    batch: &'a Batch,
    buffer: &'a Buffer,
    options: &'a Options,
}

/// The calls of one family and the memory they use again in every iteration.
trait Calls {
    /// Gives back what the last iteration received, and spoils outputs that will be written again,
    /// so that a row left over from the last iteration is noticed.
    fn reset(&mut self, spoil: bool) -> Result<()>;
    /// Measured.
    fn dispatch(&mut self) -> Result<()>;
    /// The experts' work, from the received rows to combine's input.
    fn experts(&mut self) -> Result<()>;
    /// Measured.
    fn combine(&mut self) -> Result<()>;
    /// Compares what was received with the reference.
    fn check(&self, verifier: &Verifier<'_>) -> Result<Check>;
    /// Choices of each local expert.
    fn expert_load(&self) -> Vec<usize>;
    /// `N`.
    fn received_rows(&self) -> usize;
    /// Rows that this rank sends.
    fn sent_rows(&self) -> usize;
    /// `[T, H]`.
    fn take_combined(self) -> Vec<bf16>;
}

impl Rank<'_> {
    fn measure(self, mut calls: impl Calls, verifier: Option<Verifier<'_>>) -> Result<RankReport> {
        let Options { warmup, iters, .. } = *self.options;
        let last = warmup + iters - 1;
        let (mut dispatch, mut combine) = (Measured::default(), Measured::default());
        let mut check: Option<Check> = None;
        for iteration in 0..=last {
            let checked = verifier
                .as_ref()
                .filter(|_| iteration == 0 || iteration == last);
            calls.reset(checked.is_some())?;
            let timed = iteration >= warmup;
            dispatch.time(self.buffer, timed, || calls.dispatch())?;
            calls.experts()?;
            combine.time(self.buffer, timed, || calls.combine())?;
            if let Some(verifier) = checked {
                check.get_or_insert_default().merge(calls.check(verifier)?);
            }
        }
        let (hidden, fp8) = (self.batch.sizes.hidden, self.options.dtype == RowType::Fp8);
        Ok(RankReport {
            engine: self.buffer.engine().into(),
            tokens: self.batch.tokens(),
            sent_rows: calls.sent_rows(),
            received_rows: calls.received_rows(),
            dispatch_row_bytes: hidden * if fp8 { 1 } else { size_of::<bf16>() },
            scale_bytes: if fp8 {
                hidden / SCALE_BLOCK * size_of::<f32>()
            } else {
                0
            },
            combine_row_bytes: hidden * size_of::<bf16>(),
            expert_load: calls.expert_load(),
            dispatch_ns: dispatch.ns,
            combine_ns: combine.ns,
            dispatch_copied: dispatch.copied,
            combine_copied: combine.copied,
            memory: Memory::from(&self.buffer.statistics()),
            check,
            combined: self.options.keep_combined.then(|| calls.take_combined()),
        })
    }
}

/// Times and copies of one operation.
#[derive(Default)]
struct Measured {
    ns: Vec<u64>,
    copied: Copied,
}

impl Measured {
    /// Runs `call` when all ranks are ready for it; keeps its time if `timed`.
    fn time(
        &mut self,
        buffer: &Buffer,
        timed: bool,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let before = buffer.statistics();
        buffer.barrier()?;
        let start = Instant::now();
        call()?;
        let elapsed = start.elapsed();
        if timed {
            self.ns.push(elapsed.as_nanos() as u64);
            self.copied
                .add(Copied::between(&before, &buffer.statistics()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        batch::{Batch, Ids, Sizes},
        options::Outputs,
        workload::Workload,
    };

    fn batch() -> Batch {
        let sizes = Sizes {
            tokens: 24,
            hidden: 128,
            top_k: 2,
            experts: 4,
        };
        Workload {
            sizes,
            groups: 1,
            top_groups: 1,
            skew: 0.0,
            seed: 3,
        }
        .make(0..24)
    }

    /// The first mismatch and the largest error when `sent` is compared with [`batch`].
    fn mismatch(sent: &Batch, mode: Mode, dtype: RowType) -> Option<(String, f64)> {
        let options = Options {
            ranks: 2,
            mode,
            dtype,
            engine: None,
            outputs: Outputs::Caller,
            expert_work: crate::options::ExpertWork::Scale,
            num_sms: None,
            timeout: None,
            warmup: 0,
            iters: 1,
            verify: true,
            keep_combined: false,
        };
        let (input, right) = (Input::Whole(sent.clone()), Input::Whole(batch()));
        let (input, right, options) = (&input, &right, &options);
        let checks: Vec<Check> = std::thread::scope(|scope| {
            let ranks: Vec<_> = Communicator::local(2)
                .unwrap()
                .into_iter()
                .map(|c| scope.spawn(move || run_against(c, input, right, options).unwrap()))
                .collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().unwrap().check.unwrap())
                .collect()
        });
        checks
            .into_iter()
            .find_map(|c| Some((c.mismatch?, c.max_abs_error)))
    }

    #[test]
    fn what_differs_from_the_reference_is_named() {
        for mode in [Mode::HighThroughput, Mode::LowLatency] {
            for dtype in [RowType::Bf16, RowType::Fp8] {
                assert_eq!(mismatch(&batch(), mode, dtype), None);

                let mut row = batch();
                row.x[20 * 128 + 5] += bf16::ONE;
                let (text, _) = mismatch(&row, mode, dtype).unwrap();
                assert!(
                    text.contains("byte") && text.contains("token 8 of rank 1"),
                    "{text}"
                );

                let mut swapped = batch();
                let (a, b) = swapped.x.split_at_mut(128);
                a.swap_with_slice(&mut b[..128]);
                assert!(mismatch(&swapped, mode, dtype).is_some());

                let mut id = batch();
                if let Ids::I64(ids) = &mut id.topk_idx {
                    ids[7] = -1;
                }
                assert!(mismatch(&id, mode, dtype).is_some());

                let mut weight = batch();
                weight.topk_weights[9] += 0.5;
                let (text, error) = mismatch(&weight, mode, dtype).unwrap();
                let place = if mode == Mode::HighThroughput {
                    "weight 1 of row"
                } else {
                    "combined[4, "
                };
                assert!(text.contains(place), "{text}");
                assert!(error > 0.0 || mode == Mode::HighThroughput, "{error}");
            }
        }
    }
}
