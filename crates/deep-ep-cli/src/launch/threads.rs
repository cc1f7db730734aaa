//! Ranks as threads of this process.

use std::thread;

use anyhow::{Context, Result};
use deep_ep::Communicator;

use super::{Cause, Failure, Failures};
use crate::{job, options::Options, report::RankReport, source::Input};

/// Does a job.
pub(crate) fn run(input: &Input, options: &Options) -> Result<Vec<RankReport>> {
    each(options.ranks, |communicator| {
        job::run(communicator, input, options)
    })
}

/// Does `work` in a thread for each rank; the results are in their order.
pub(crate) fn each<T: Send>(
    ranks: usize,
    work: impl Fn(Communicator) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let communicators = Communicator::local(ranks)?;
    let work = &work;
    let outcomes = thread::scope(|scope| {
        let threads = communicators
            .into_iter()
            .enumerate()
            .map(|(rank, communicator)| {
                thread::Builder::new()
                    .name(format!("rank {rank}"))
                    .spawn_scoped(scope, move || work(communicator))
                    .with_context(|| format!("cannot start the thread of rank {rank}"))
            })
            .collect::<Result<Vec<_>>>()?;
        Ok::<_, anyhow::Error>(
            threads
                .into_iter()
                .map(thread::ScopedJoinHandle::join)
                .collect::<Vec<_>>(),
        )
    })?;

    let mut reports = Vec::with_capacity(ranks);
    let mut failures = Vec::new();
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(Ok(report)) => reports.push(report),
            Ok(Err(error)) => failures.push(Failure {
                rank,
                cause: Cause::of(&error),
                message: crate::explain(&error),
            }),
            Err(_) => failures.push(Failure {
                rank,
                cause: Cause::Died,
                message: "its thread panicked".into(),
            }),
        }
    }
    match failures.is_empty() {
        true => Ok(reports),
        false => Err(Failures::new(failures).into()),
    }
}
