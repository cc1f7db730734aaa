//! What the ranks measured, as a table and as JSON.

use anyhow::{Result, ensure};
use serde::Serialize;

use super::{
    Configuration, Plan,
    floor::{Link, rows_over_link},
    rank::{Line, Operation, RankResult},
};
use crate::{
    options::{Counts, Outputs, RowType},
    table::table,
};

/// One JSON object. Times are microseconds of one call, the slowest rank's.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    engine: &'static str,
    /// GPU of each rank.
    gpus: Vec<String>,
    ranks: usize,
    tokens_per_rank: usize,
    hidden: usize,
    top_k: usize,
    experts: usize,
    dtype: RowType,
    groups: usize,
    top_groups: usize,
    skew: f64,
    seed: u64,
    runs: usize,
    calls_per_run: usize,
    /// Bytes per second of a GPU's link and direction, both directions busy, if it was measured.
    link_bytes_per_second: Option<f64>,
    operations: Vec<Row>,
}

/// One operation in one way.
#[derive(Debug, Serialize)]
struct Row {
    operation: &'static str,
    landing: Outputs,
    counts: Option<Counts>,
    sms: Option<u32>,
    median_us: f64,
    min_us: f64,
    max_us: f64,
    /// What the calling thread spent, if the operation was measured as whole calls.
    host_us: Option<f64>,
    /// Bytes that cross the busiest link in its busier direction.
    link_bytes: u64,
    /// The least time that those need.
    floor_us: Option<f64>,
    /// The floor over the median: 1 is as fast as the link.
    of_floor: Option<f64>,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::LowLatencyDispatch => "low-latency dispatch",
            Self::LowLatencyDispatchSend => "low-latency dispatch, send",
            Self::LowLatencyDispatchReceive => "low-latency dispatch, receive",
            Self::LowLatencyCombine => "low-latency combine",
            Self::LowLatencyCombineSend => "low-latency combine, send",
            Self::LowLatencyCombineReceive => "low-latency combine, receive",
        }
    }

    /// Bytes of one row on a link; `None` for half a call, which has no floor of its own.
    fn row_bytes(self, hidden: usize, dtype: RowType) -> Option<usize> {
        match self {
            Self::Dispatch | Self::LowLatencyDispatch => Some(match dtype {
                RowType::Bf16 => 2 * hidden,
                RowType::Fp8 => hidden + hidden / 128 * 4,
            }),
            Self::Combine | Self::LowLatencyCombine => Some(2 * hidden),
            _ => None,
        }
    }
}

impl Report {
    pub(super) fn new(
        configuration: &Configuration,
        plan: &Plan,
        ranks: &[RankResult],
        link: Option<&Link>,
    ) -> Result<Self> {
        let workload = &configuration.workload;
        let sizes = workload.sizes;
        let sent: Vec<Vec<u64>> = ranks.iter().map(|rank| rank.sent.clone()).collect();
        let rows = rows_over_link(&sent, plan.gpus);
        let lines = ranks.first().map_or(0, |rank| rank.lines.len());
        ensure!(
            ranks.iter().all(|rank| rank.lines.len() == lines),
            "ranks measured different operations"
        );
        let operations = (0..lines).map(|at| {
            let lines: Vec<&Line> = ranks.iter().map(|rank| &rank.lines[at]).collect();
            let bytes = lines[0]
                .operation
                .row_bytes(sizes.hidden, configuration.dtype);
            Row::new(&lines, rows * bytes.unwrap_or(0) as u64, link)
        });
        Ok(Self {
            engine: "cuda",
            gpus: ranks.iter().map(|rank| rank.gpu.clone()).collect(),
            ranks: configuration.ranks,
            tokens_per_rank: sizes.tokens / configuration.ranks,
            hidden: sizes.hidden,
            top_k: sizes.top_k,
            experts: sizes.experts,
            dtype: configuration.dtype,
            groups: workload.groups,
            top_groups: workload.top_groups,
            skew: workload.skew,
            seed: workload.seed,
            runs: plan.runs,
            calls_per_run: plan.calls,
            link_bytes_per_second: link.and_then(|link| link.speed),
            operations: operations.collect(),
        })
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "\n{} ranks on {} ({}), {} tokens a rank x {} hidden, top-{} of {} experts\n\n",
            self.ranks,
            self.gpus.first().map_or("no GPU", String::as_str),
            self.dtype,
            self.tokens_per_rank,
            self.hidden,
            self.top_k,
            self.experts,
        );
        let header = [
            "operation",
            "rows",
            "counts",
            "SMs",
            "median",
            "minimum",
            "maximum",
            "GB/s",
            "of floor",
            "host",
        ];
        let rows = self.operations.iter().map(Row::cells);
        text += &table(&header, 3, rows).to_string();
        text += &format!(
            "\nMicroseconds of one call, the slowest rank's, median of {} runs of {} calls. GB/s: bytes that\n\
             cross the busiest link in its busier direction over the median; of floor: how much of the\n\
             measured speed of the link that is. Host: what the calling thread spends.",
            self.runs, self.calls_per_run
        );
        text
    }
}

impl Row {
    fn new(lines: &[&Line], link_bytes: u64, link: Option<&Link>) -> Self {
        let first = lines[0];
        let gpu = slowest(lines.iter().map(|line| line.runs.gpu_us.as_slice()));
        let host = slowest(lines.iter().map(|line| line.runs.host_us.as_slice()));
        let median_us = median(&gpu);
        let floor_us = link.and_then(|link| link.floor_us(link_bytes));
        Self {
            operation: first.operation.name(),
            landing: first.landing,
            counts: first.counts,
            sms: first.sms,
            median_us,
            min_us: gpu.first().copied().unwrap_or(0.0),
            max_us: gpu.last().copied().unwrap_or(0.0),
            host_us: (!host.is_empty()).then(|| median(&host)),
            link_bytes,
            floor_us,
            of_floor: floor_us
                .filter(|_| median_us > 0.0)
                .map(|floor| floor / median_us),
        }
    }

    fn cells(&self) -> Vec<String> {
        let or_nothing = |text: Option<String>| text.unwrap_or_default();
        let speed = self.link_bytes as f64 / self.median_us / 1e3;
        vec![
            self.operation.to_owned(),
            self.landing.to_string(),
            or_nothing(self.counts.map(|counts| counts.to_string())),
            or_nothing(self.sms.map(|sms| sms.to_string())),
            format!("{:.1}", self.median_us),
            format!("{:.1}", self.min_us),
            format!("{:.1}", self.max_us),
            or_nothing((self.link_bytes > 0).then(|| format!("{speed:.1}"))),
            or_nothing(self.of_floor.map(|part| format!("{:.1} %", part * 100.0))),
            or_nothing(self.host_us.map(|us| format!("{us:.1}"))),
        ]
    }
}

/// The slowest rank of each run, ascending.
fn slowest<'a>(ranks: impl Iterator<Item = &'a [f64]>) -> Vec<f64> {
    let mut slowest: Vec<f64> = Vec::new();
    for runs in ranks {
        slowest.resize(slowest.len().max(runs.len()), 0.0);
        for (slowest, &us) in slowest.iter_mut().zip(runs) {
            *slowest = slowest.max(us);
        }
    }
    slowest.sort_by(f64::total_cmp);
    slowest
}

/// Of sorted values.
fn median(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_gpu::timing::Runs;

    #[test]
    fn the_slowest_rank_of_each_run_counts() {
        let line = |gpu_us: &[f64]| Line {
            operation: Operation::Dispatch,
            landing: Outputs::Loan,
            counts: Some(Counts::Worst),
            sms: Some(8),
            runs: Runs {
                gpu_us: gpu_us.to_vec(),
                host_us: vec![],
            },
        };
        let (a, b) = (line(&[10.0, 30.0, 20.0]), line(&[15.0, 12.0, 20.0]));
        let row = Row::new(&[&a, &b], 3_000_000, None);
        assert_eq!((row.median_us, row.min_us, row.max_us), (20.0, 15.0, 30.0));
        assert_eq!((row.floor_us, row.host_us), (None, None));
        let cells = row.cells();
        assert_eq!(cells[..4], ["dispatch", "loan", "worst", "8"]);
        assert_eq!(cells[7], "150.0");
    }

    #[test]
    fn halves_have_no_floor() {
        let bytes = |operation: Operation| operation.row_bytes(7168, RowType::Fp8);
        assert_eq!(bytes(Operation::Dispatch), Some(7168 + 224));
        assert_eq!(bytes(Operation::LowLatencyCombine), Some(14336));
        assert_eq!(bytes(Operation::LowLatencyCombineSend), None);
    }
}
