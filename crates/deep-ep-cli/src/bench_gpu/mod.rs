//! `deep-ep bench --engine cuda`: device tensors, timed by the GPUs.
//!
//! Every rank is a thread with a stream of its own, rank r on GPU r modulo the GPUs. An operation's
//! run is several calls: where the host waits for nothing they are recorded in a graph, which is
//! launched between two events, else they are made one after the other. A graph that is not timed
//! goes first, so that all ranks are at work. The slowest rank counts, and of the runs the median.

mod floor;
mod high_throughput;
mod low_latency;
mod rank;
mod report;
mod timing;

use std::process::ExitCode;

use anyhow::{Context, Result};
use deep_ep::{
    Settings,
    cuda::{Gpu, limit},
};

use crate::{
    Failure,
    args::{BenchArgs, check},
    launch,
    options::{EngineChoice, Mode, Options, Outputs, RowType},
    output::{JsonLines, print},
    source::{Input, Source},
    workload::Workload,
};

/// SM counts of the high-throughput calls unless others are asked for.
const DEFAULT_SMS: [u32; 3] = [8, 16, 24];

/// Fewest runs of which the median is taken.
const FEWEST_RUNS: usize = 5;

/// One combination of sizes; families, landings and SM counts are measured within it.
pub(crate) struct Configuration {
    pub(crate) workload: Workload,
    pub(crate) ranks: usize,
    pub(crate) dtype: RowType,
}

/// What is measured in every configuration.
pub(crate) struct Plan {
    pub(crate) modes: Vec<Mode>,
    pub(crate) landings: Vec<Outputs>,
    pub(crate) counts: Vec<crate::options::Counts>,
    pub(crate) sms: Vec<u32>,
    /// Runs of each operation.
    pub(crate) runs: usize,
    /// Graphs that go before each run.
    pub(crate) warmup: usize,
    /// Calls of a run.
    pub(crate) calls: usize,
    pub(crate) timeout: Option<std::time::Duration>,
    pub(crate) gpus: usize,
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, Failure> {
    let gpus = Gpu::count().map_err(|error| Failure::Job(error.into()))?;
    let plan = Plan::new(args, gpus);
    let configurations = configurations(args, &plan).map_err(Failure::Usage)?;
    let mut json = JsonLines::open(args.common.json.as_deref()).map_err(Failure::Usage)?;
    let link = match args.limit {
        true => {
            let link = link().map_err(Failure::Job)?;
            print(json.takes_stdout(), &link.text())?;
            Some(link)
        }
        false => None,
    };
    for configuration in &configurations {
        if !args.no_verify {
            verify(configuration, args).with_context(|| configuration.describe())?;
        }
        let report = measure(configuration, &plan, link.as_ref())
            .with_context(|| configuration.describe())?;
        json.write(&report)?;
        print(json.takes_stdout(), &report.text())?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Plan {
    fn new(args: &BenchArgs, gpus: usize) -> Self {
        let sms = match (args.sms.is_empty(), args.common.num_sms) {
            (false, _) => args.sms.clone(),
            (true, Some(sms)) => vec![u32::try_from(sms).unwrap_or(u32::MAX)],
            (true, None) => DEFAULT_SMS.to_vec(),
        };
        Self {
            modes: args.mode.clone(),
            landings: args.outputs.clone(),
            counts: args.counts.clone(),
            sms,
            runs: args.common.iters.max(FEWEST_RUNS),
            warmup: args.common.warmup.max(1),
            calls: args.calls,
            timeout: args.common.timeout,
            gpus,
        }
    }
}

/// The speed of the links, measured now.
fn link() -> Result<floor::Link> {
    let settings = Settings::from_env()?;
    Ok(floor::Link::new(&limit::measure(
        &settings,
        &limit::Config::default(),
    )?))
}

/// All combinations, each checked before anything is measured.
fn configurations(args: &BenchArgs, plan: &Plan) -> Result<Vec<Configuration>> {
    let mut all = Vec::new();
    for workload in crate::bench::workloads(args)? {
        for &ranks in &args.ranks {
            for &dtype in &args.dtype {
                let mut workload = workload.clone();
                let tokens = workload.sizes.tokens.checked_mul(ranks);
                workload.sizes.tokens = tokens.context("--tokens is too large")?;
                let configuration = Configuration {
                    workload,
                    ranks,
                    dtype,
                };
                for &mode in &plan.modes {
                    let options = configuration.options(args, mode);
                    check(&configuration.workload.sizes, &options)?;
                }
                all.push(configuration);
            }
        }
    }
    Ok(all)
}

impl Configuration {
    fn options(&self, args: &BenchArgs, mode: Mode) -> Options {
        Options {
            engine: Some(EngineChoice::Cuda),
            warmup: 0,
            iters: 1,
            ..args
                .common
                .options(self.ranks, mode, self.dtype, Outputs::Caller)
        }
    }

    fn describe(&self) -> String {
        let sizes = self.workload.sizes;
        format!(
            "{}, {} ranks, {} x {}, top-{} of {}",
            self.dtype,
            self.ranks,
            sizes.tokens / self.ranks,
            sizes.hidden,
            sizes.top_k,
            sizes.experts
        )
    }
}

/// Makes the same calls once with host tensors and compares them with the reference.
fn verify(configuration: &Configuration, args: &BenchArgs) -> Result<()> {
    let input = Source::Generated(configuration.workload.clone()).open()?;
    for &mode in &args.mode {
        let options = configuration.options(args, mode);
        for report in launch::threads(&input, &options)? {
            let mismatch = report.check.and_then(|check| check.mismatch);
            if let Some(mismatch) = mismatch {
                anyhow::bail!("{mode} differs from the reference: {mismatch}");
            }
        }
    }
    Ok(())
}

fn measure(
    configuration: &Configuration,
    plan: &Plan,
    link: Option<&floor::Link>,
) -> Result<report::Report> {
    let input: Input = Source::Generated(configuration.workload.clone()).open()?;
    let ranks = launch::each(configuration.ranks, |communicator| {
        rank::run(communicator, &input, configuration, plan)
    })?;
    report::Report::new(configuration, plan, &ranks, link)
}
