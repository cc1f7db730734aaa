//! What ranks report, and what a job's results are: the objects of `--json`.

use deep_ep::Statistics;
use half::bf16;
use serde::{Deserialize, Serialize};

use crate::{
    batch::Sizes,
    options::{ExpertWork, Launch, Mode, Options, Outputs, RowType},
};

/// One rank's results.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RankReport {
    /// Engine in use.
    pub(crate) engine: String,
    /// This rank's tokens.
    pub(crate) tokens: usize,
    /// Rows that this rank sent, own ones included; combine brings as many back.
    pub(crate) sent_rows: usize,
    /// Rows that this rank received, own ones included.
    pub(crate) received_rows: usize,
    /// Bytes of a dispatched row without its scales.
    pub(crate) dispatch_row_bytes: usize,
    /// Bytes of a dispatched row's scales.
    pub(crate) scale_bytes: usize,
    /// Bytes of a combined row.
    pub(crate) combine_row_bytes: usize,
    /// Choices of each local expert.
    pub(crate) expert_load: Vec<usize>,
    /// Nanoseconds of dispatch in each measured iteration.
    pub(crate) dispatch_ns: Vec<u64>,
    /// Nanoseconds of combine in each measured iteration.
    pub(crate) combine_ns: Vec<u64>,
    /// Copied in all measured dispatches.
    pub(crate) dispatch_copied: Copied,
    /// Copied in all measured combines.
    pub(crate) combine_copied: Copied,
    /// Symmetric memory at the end.
    pub(crate) memory: Memory,
    /// Against the reference, if that was asked for.
    pub(crate) check: Option<Check>,
    /// `[T, H]`, if it was asked for; travels beside the report.
    #[serde(skip)]
    pub(crate) combined: Option<Vec<bf16>>,
}

/// The outcome of the comparison with the reference.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Check {
    /// Largest difference of a combined element from the reference.
    pub(crate) max_abs_error: f64,
    /// The first thing that is wrong.
    pub(crate) mismatch: Option<String>,
}

/// Bytes by kind of copy, as the engine counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Copied {
    /// Rows written by copies.
    pub(crate) row_bytes: u64,
    /// Indices, weights and scales written by copies.
    pub(crate) metadata_bytes: u64,
    /// Rows read to be summed.
    pub(crate) bytes_summed: u64,
    /// Written to peers by low-latency calls.
    pub(crate) wire_bytes: u64,
}

impl Copied {
    /// What was copied between two readings.
    pub(crate) fn between(before: &Statistics, after: &Statistics) -> Self {
        Self {
            row_bytes: after.row_bytes_copied - before.row_bytes_copied,
            metadata_bytes: after.metadata_bytes_copied - before.metadata_bytes_copied,
            bytes_summed: after.bytes_summed - before.bytes_summed,
            wire_bytes: after.wire_bytes - before.wire_bytes,
        }
    }

    /// Adds another interval.
    pub(crate) fn add(&mut self, other: Self) {
        self.row_bytes += other.row_bytes;
        self.metadata_bytes += other.metadata_bytes;
        self.bytes_summed += other.bytes_summed;
        self.wire_bytes += other.wire_bytes;
    }
}

/// Symmetric memory of one rank, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// Address range (costs no memory).
    pub(crate) reserved: u64,
    /// Taken from the system.
    pub(crate) committed: u64,
    /// Most that was in use at once, fixed parts included: what the job required.
    pub(crate) required: u64,
    /// Most in use at once for each purpose; their sum may be more than was in use at once.
    pub(crate) required_by_purpose: Vec<Purpose>,
    /// Fixed parts.
    pub(crate) fixed: Vec<Purpose>,
}

/// Bytes for one purpose.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Purpose {
    pub(crate) purpose: String,
    pub(crate) bytes: u64,
}

impl From<&Statistics> for Memory {
    fn from(statistics: &Statistics) -> Self {
        let list = |items: &[(&'static str, u64)]| {
            items
                .iter()
                .map(|&(purpose, bytes)| Purpose {
                    purpose: purpose.into(),
                    bytes,
                })
                .collect()
        };
        let memory = &statistics.memory;
        Self {
            reserved: memory.reserved,
            committed: memory.committed,
            required: memory.peak + memory.fixed.iter().map(|fixed| fixed.1).sum::<u64>(),
            required_by_purpose: list(&memory.peak_by_purpose),
            fixed: list(&memory.fixed),
        }
    }
}

/// The result of a job over all ranks: one object of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct JobReport {
    pub(crate) engine: String,
    pub(crate) mode: Mode,
    pub(crate) launch: Launch,
    pub(crate) ranks: usize,
    /// Over all ranks.
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) top_k: usize,
    pub(crate) experts: usize,
    pub(crate) dtype: RowType,
    pub(crate) output: Outputs,
    /// What the experts did in between.
    pub(crate) expert_work: ExpertWork,
    /// Whether everything was compared with the reference and agrees.
    pub(crate) verified: bool,
    /// Largest difference from the reference; null without a comparison.
    pub(crate) max_abs_error: Option<f64>,
    /// What is wrong, by rank; empty if nothing is.
    pub(crate) mismatches: Vec<String>,
    pub(crate) received_rows: Vec<usize>,
    pub(crate) dispatch: Operation,
    pub(crate) combine: Operation,
    pub(crate) warmup: usize,
    pub(crate) iters: usize,
    pub(crate) tokens_per_rank: Vec<usize>,
    pub(crate) sent_rows: Vec<usize>,
    pub(crate) expert_load: Load,
    /// Symmetric memory of each rank.
    pub(crate) memory: Vec<Memory>,
    /// Where the tokens came from.
    pub(crate) input: String,
    /// Parameters of generated input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) workload: Option<Generated>,
    #[serde(skip)]
    pub(crate) dispatch_row_bytes: usize,
    #[serde(skip)]
    pub(crate) combine_row_bytes: usize,
}

/// What shaped generated input, besides its sizes.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Generated {
    pub(crate) groups: usize,
    pub(crate) top_groups: usize,
    pub(crate) skew: f64,
    pub(crate) seed: u64,
}

/// Time and traffic of dispatch or combine. A time is the largest over the ranks in an iteration.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Operation {
    pub(crate) median_us: f64,
    pub(crate) min_us: f64,
    /// Received over all ranks in one iteration, own tokens included.
    pub(crate) bytes: u64,
    /// `bytes` over the median time, in 10^9 bytes per second.
    pub(crate) gbps: f64,
    /// Copied over all ranks in one iteration.
    pub(crate) copied: Copied,
    /// Row bytes copied per row byte received (scales are no row bytes). In high-throughput mode
    /// these are the copies per (token, rank).
    pub(crate) copies_per_row: f64,
}

impl Operation {
    /// `bytes` of rows with their scales, `row_bytes` without.
    fn new(
        times: &[&[u64]],
        (bytes, row_bytes): (u64, u64),
        copied: impl Iterator<Item = Copied>,
    ) -> Self {
        let iters = times.first().map_or(0, |t| t.len());
        let mut slowest: Vec<u64> = (0..iters)
            .map(|i| times.iter().map(|rank| rank[i]).max().unwrap_or(0))
            .collect();
        slowest.sort_unstable();
        let median_ns = median(&slowest);
        let mut sum = Copied::default();
        copied.for_each(|c| sum.add(c));
        let per_iteration = |total: u64| total / iters.max(1) as u64;
        let copied = Copied {
            row_bytes: per_iteration(sum.row_bytes),
            metadata_bytes: per_iteration(sum.metadata_bytes),
            bytes_summed: per_iteration(sum.bytes_summed),
            wire_bytes: per_iteration(sum.wire_bytes),
        };
        let over = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        Self {
            median_us: median_ns / 1e3,
            min_us: slowest.first().map_or(0.0, |&ns| ns as f64 / 1e3),
            bytes,
            gbps: over(bytes as f64, median_ns),
            copied,
            copies_per_row: over(copied.row_bytes as f64, row_bytes as f64),
        }
    }
}

/// Of sorted values; 0 of none.
fn median(sorted: &[u64]) -> f64 {
    match (sorted.len(), sorted.len() / 2) {
        (0, _) => 0.0,
        (n, half) if n % 2 == 1 => sorted[half] as f64,
        (_, half) => (sorted[half - 1] as f64 + sorted[half] as f64) / 2.0,
    }
}

/// Choices per expert.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Load {
    pub(crate) min: usize,
    pub(crate) mean: f64,
    pub(crate) max: usize,
}

impl Load {
    fn new(loads: impl Iterator<Item = usize> + Clone) -> Self {
        let (sum, count) = (loads.clone().sum::<usize>(), loads.clone().count());
        Self {
            min: loads.clone().min().unwrap_or(0),
            mean: sum as f64 / count.max(1) as f64,
            max: loads.max().unwrap_or(0),
        }
    }
}

impl JobReport {
    /// From the reports of all ranks, in order.
    pub(crate) fn new(
        ranks: &[RankReport],
        sizes: Sizes,
        options: &Options,
        launch: Launch,
        input: String,
    ) -> Self {
        let checks: Option<Vec<&Check>> = ranks.iter().map(|r| r.check.as_ref()).collect();
        let mismatches: Vec<String> = ranks
            .iter()
            .enumerate()
            .filter_map(|(rank, r)| {
                Some(format!(
                    "rank {rank}: {}",
                    r.check.as_ref()?.mismatch.as_ref()?
                ))
            })
            .collect();
        let per_rank = |get: fn(&RankReport) -> usize| ranks.iter().map(get).collect::<Vec<_>>();
        let bytes = |get: fn(&RankReport) -> usize| ranks.iter().map(|r| get(r) as u64).sum();
        fn times(ranks: &[RankReport], get: fn(&RankReport) -> &[u64]) -> Vec<&[u64]> {
            ranks.iter().map(get).collect()
        }
        Self {
            engine: ranks.first().map_or(String::new(), |r| r.engine.clone()),
            mode: options.mode,
            launch,
            ranks: options.ranks,
            tokens: sizes.tokens,
            hidden: sizes.hidden,
            top_k: sizes.top_k,
            experts: sizes.experts,
            dtype: options.dtype,
            output: options.outputs,
            expert_work: options.expert_work,
            verified: checks.is_some() && mismatches.is_empty(),
            max_abs_error: checks.map(|c| c.iter().map(|c| c.max_abs_error).fold(0.0, f64::max)),
            mismatches,
            received_rows: per_rank(|r| r.received_rows),
            dispatch: Operation::new(
                &times(ranks, |r| &r.dispatch_ns),
                (
                    bytes(|r| r.received_rows * (r.dispatch_row_bytes + r.scale_bytes)),
                    bytes(|r| r.received_rows * r.dispatch_row_bytes),
                ),
                ranks.iter().map(|r| r.dispatch_copied),
            ),
            combine: Operation::new(
                &times(ranks, |r| &r.combine_ns),
                (
                    bytes(|r| r.sent_rows * r.combine_row_bytes),
                    bytes(|r| r.sent_rows * r.combine_row_bytes),
                ),
                ranks.iter().map(|r| r.combine_copied),
            ),
            warmup: options.warmup,
            iters: options.iters,
            tokens_per_rank: per_rank(|r| r.tokens),
            sent_rows: per_rank(|r| r.sent_rows),
            expert_load: Load::new(ranks.iter().flat_map(|r| r.expert_load.iter().copied())),
            memory: ranks.iter().map(|r| r.memory.clone()).collect(),
            input,
            workload: None,
            dispatch_row_bytes: ranks
                .first()
                .map_or(0, |r| r.dispatch_row_bytes + r.scale_bytes),
            combine_row_bytes: ranks.first().map_or(0, |r| r.combine_row_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_the_largest_over_ranks_in_an_iteration() {
        let operation = Operation::new(
            &[&[1000, 9000, 3000], &[2000, 1000, 4000]],
            (8000, 8000),
            [].into_iter(),
        );
        assert_eq!((operation.median_us, operation.min_us), (4.0, 2.0));
        assert_eq!(operation.gbps, 2.0);
    }

    #[test]
    fn medians_of_even_counts_lie_between_the_middle_two() {
        assert_eq!(median(&[1, 2, 4, 9]), 3.0);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn load_counts_idle_experts() {
        assert_eq!(
            Load::new([0, 4, 2].into_iter()),
            Load {
                min: 0,
                mean: 2.0,
                max: 4
            }
        );
    }
}
