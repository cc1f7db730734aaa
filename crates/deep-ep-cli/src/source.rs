//! Where a job's tokens come from, and how a rank gets its part.

use std::path::PathBuf;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::{
    batch::{Batch, Sizes},
    input,
    workload::Workload,
};

/// Where tokens come from; what a rank process is told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Source {
    /// The trace that ships with the program.
    Trace { experts: Option<usize> },
    /// A safetensors file.
    File {
        path: PathBuf,
        experts: Option<usize>,
    },
    /// Made up on each rank.
    Generated(Workload),
}

/// Tokens at hand.
#[derive(Debug)]
pub(crate) enum Input {
    /// All tokens in memory.
    Whole(Batch),
    /// Made when they are asked for.
    Generated(Workload),
}

impl Source {
    /// Reads what there is to read, and checks it.
    pub(crate) fn open(&self) -> Result<Input> {
        Ok(match self {
            Self::Trace { experts } => Input::Whole(input::trace(*experts)?),
            Self::File { path, experts } => Input::Whole(input::read(path, *experts)?),
            Self::Generated(workload) => {
                workload.check()?;
                Input::Generated(workload.clone())
            }
        })
    }

    /// For the table.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Trace { .. } => "the trace that ships with deep-ep".into(),
            Self::File { path, .. } => path.display().to_string(),
            Self::Generated(workload) => format!("generated, seed {}", workload.seed),
        }
    }
}

impl Input {
    pub(crate) fn sizes(&self) -> Sizes {
        match self {
            Self::Whole(batch) => batch.sizes,
            Self::Generated(workload) => workload.sizes,
        }
    }

    /// The tokens of one rank.
    pub(crate) fn shard(&self, rank: usize, ranks: usize) -> Batch {
        let range = self.sizes().shard(rank, ranks);
        match self {
            Self::Whole(batch) => batch.slice(range),
            Self::Generated(workload) => workload.make(range),
        }
    }
}
