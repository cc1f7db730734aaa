//! `deep-ep bench`: generated tokens, every combination of the lists.

use std::{io::IsTerminal, process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    Failure,
    args::{BenchArgs, check},
    batch::Sizes,
    launch,
    options::{Launch, Options},
    output::{JsonLines, print},
    report::{Generated, JobReport},
    source::Source,
    table,
    workload::Workload,
};

/// One combination.
struct Configuration {
    launch: Launch,
    workload: Workload,
    options: Options,
}

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, Failure> {
    let configurations = configurations(args).map_err(Failure::Usage)?;
    let mut json = JsonLines::open(args.common.json.as_deref()).map_err(Failure::Usage)?;
    let progress = progress(configurations.len());
    let mut reports = Vec::with_capacity(configurations.len());
    let mut failed = None;
    for configuration in &configurations {
        progress.set_message(describe(configuration));
        let done = measure(configuration).and_then(|report| {
            json.write(&report)?;
            Ok(report)
        });
        match done {
            Ok(report) => reports.push(report),
            Err(error) => {
                failed = Some(error.context(describe(configuration)));
                break;
            }
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    if !reports.is_empty() {
        print(json.takes_stdout(), &table::sweep(&reports))?;
    }
    if let Some(error) = failed {
        return Err(Failure::Job(error));
    }
    let good = args.no_verify || reports.iter().all(|report| report.verified);
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn measure(configuration: &Configuration) -> Result<JobReport> {
    let Configuration {
        launch,
        workload,
        options,
    } = configuration;
    let source = Source::Generated(workload.clone());
    let input = source.open()?;
    let ranks = launch::run(*launch, &source, &input, options)?;
    let mut report = JobReport::new(&ranks, workload.sizes, options, *launch, source.name());
    report.workload = Some(Generated {
        groups: workload.groups,
        top_groups: workload.top_groups,
        skew: workload.skew,
        seed: workload.seed,
    });
    Ok(report)
}

/// All combinations; the last list changes fastest.
fn configurations(args: &BenchArgs) -> Result<Vec<Configuration>> {
    let mut all = Vec::new();
    for workload in workloads(args)? {
        for &(ranks, mode) in &pairs(&args.ranks, &args.mode) {
            for &(dtype, launch) in &pairs(&args.dtype, &args.launch) {
                for &outputs in &args.outputs {
                    let mut workload = workload.clone();
                    let tokens = workload.sizes.tokens.checked_mul(ranks);
                    workload.sizes.tokens = tokens.context("--tokens is too large")?;
                    let options = Options {
                        expert_work: args.expert_work,
                        verify: !args.no_verify,
                        ..args.common.options(ranks, mode, dtype, outputs)
                    };
                    check(&workload.sizes, &options)?;
                    all.push(Configuration {
                        launch,
                        workload,
                        options,
                    });
                }
            }
        }
    }
    Ok(all)
}

/// Workloads whose tokens are those of one rank.
pub(crate) fn workloads(args: &BenchArgs) -> Result<Vec<Workload>> {
    let mut all = Vec::new();
    for &(tokens, hidden) in &pairs(&args.tokens, &args.hidden) {
        for &(top_k, experts) in &pairs(&args.top_k, &args.experts) {
            for &(groups, skew) in &pairs(&args.groups, &args.skew) {
                let all_groups = [groups];
                let top_groups = match args.top_groups.is_empty() {
                    true => &all_groups[..],
                    false => &args.top_groups,
                };
                for &top_groups in top_groups {
                    let sizes = Sizes {
                        tokens,
                        hidden,
                        top_k,
                        experts,
                    };
                    let workload = Workload {
                        sizes,
                        groups,
                        top_groups,
                        skew,
                        seed: args.seed,
                    };
                    workload.check()?;
                    all.push(workload);
                }
            }
        }
    }
    Ok(all)
}

fn pairs<A: Copy, B: Copy>(a: &[A], b: &[B]) -> Vec<(A, B)> {
    a.iter()
        .flat_map(|&a| b.iter().map(move |&b| (a, b)))
        .collect()
}

fn describe(configuration: &Configuration) -> String {
    let Configuration {
        launch,
        workload,
        options,
    } = configuration;
    let Sizes {
        tokens,
        hidden,
        top_k,
        experts,
    } = workload.sizes;
    format!(
        "{} {}, {} {launch}, {} x {hidden}, top-{top_k} of {experts}, {}",
        options.mode,
        options.dtype,
        options.ranks,
        tokens / options.ranks,
        options.outputs
    )
}

/// A bar on a terminal, nothing elsewhere.
fn progress(length: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
