//! Starts the ranks of a job, as threads or as processes, and gathers their reports; or starts the ranks
//! of someone else's program.

mod processes;
pub(crate) mod program;
mod rendezvous;
mod threads;

use std::fmt;

use anyhow::Result;

pub(crate) use processes::serve;
pub(crate) use threads::{each, run as threads};

use crate::{
    options::{Launch, Options},
    report::RankReport,
    source::{Input, Source},
};

/// Runs a job to its end. Nothing of it is left when this returns.
pub(crate) fn run(
    launch: Launch,
    source: &Source,
    input: &Input,
    options: &Options,
) -> Result<Vec<RankReport>> {
    match launch {
        Launch::Threads => threads(input, options),
        Launch::Processes => processes::run(source, options),
    }
}

/// Why a rank failed. The causes are sorted: what comes first explains what comes later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    /// The rank died.
    Died,
    /// The rank itself found something wrong.
    Own,
    /// Another rank was missing or had failed.
    Peer,
}

impl Cause {
    fn of(error: &anyhow::Error) -> Self {
        use deep_ep::Error;
        match error.downcast_ref::<Error>() {
            Some(
                Error::PeerLost { .. }
                | Error::Aborted { .. }
                | Error::Timeout { .. }
                | Error::PeerRejected { .. },
            ) => Self::Peer,
            _ => Self::Own,
        }
    }
}

/// A rank that failed.
#[derive(Debug)]
struct Failure {
    rank: usize,
    cause: Cause,
    message: String,
}

/// The failures of a job, the one that explains the others first.
#[derive(Debug)]
struct Failures(Vec<Failure>);

impl Failures {
    fn new(mut failures: Vec<Failure>) -> Self {
        failures.sort_by_key(|f| (f.cause, f.rank));
        Self(failures)
    }
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown: Vec<&str> = Vec::new();
        for failure in &self.0 {
            // All ranks often fail for the same reason.
            if shown.contains(&failure.message.as_str()) {
                continue;
            }
            if !shown.is_empty() {
                writeln!(f)?;
            }
            write!(f, "rank {}: {}", failure.rank, failure.message)?;
            shown.push(&failure.message);
        }
        Ok(())
    }
}

impl std::error::Error for Failures {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_named_before_its_consequences() {
        let failure = |rank, cause, message: &str| Failure {
            rank,
            cause,
            message: message.into(),
        };
        let failures = Failures::new(vec![
            failure(0, Cause::Peer, "lost rank 2"),
            failure(1, Cause::Peer, "lost rank 2"),
            failure(2, Cause::Died, "killed by signal 9"),
        ]);
        assert_eq!(
            failures.to_string(),
            "rank 2: killed by signal 9\nrank 0: lost rank 2"
        );
    }
}
