//! What a job does, as the command line says it and as the launcher tells its rank processes.

use std::{fmt, time::Duration};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Declares an enum of the command line that prints as it is spelled there.
macro_rules! choice {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
        pub(crate) enum $name {
            $($(#[$doc])* #[value(name = $text)] #[serde(rename = $text)] $variant),*
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $(Self::$variant => $text),* })
            }
        }
    };
}

choice! {
    /// The two families of calls.
    Mode {
        /// Training and prefill: thousands of tokens, exact sizes
        HighThroughput = "high-throughput",
        /// Decode: few tokens, fixed capacity
        LowLatency = "low-latency",
    }
}

choice! {
    /// How dispatched rows travel.
    RowType {
        /// bfloat16, bit for bit
        Bf16 = "bf16",
        /// FP8 E4M3 with a scale per 128 channels
        Fp8 = "fp8",
    }
}

choice! {
    /// The engine asked for.
    EngineChoice {
        /// The best that this machine has
        Auto = "auto",
        /// Threads and shared memory
        Cpu = "cpu",
        /// NVIDIA GPUs
        Cuda = "cuda",
    }
}

choice! {
    /// What a rank is.
    Launch {
        /// Each rank is a process of its own
        Processes = "processes",
        /// All ranks are threads of this process
        Threads = "threads",
    }
}

choice! {
    /// Where dispatched rows and combine's input are.
    Outputs {
        /// In symmetric memory, lent to the caller
        Loan = "loan",
        /// In the caller's own memory
        Caller = "caller",
    }
}

choice! {
    /// How a GPU's dispatch learns how many rows come.
    Counts {
        /// Outputs have room for all tokens, and the host waits for nothing
        Worst = "worst",
        /// The host waits for the counts, and outputs have exactly as many rows
        Exact = "exact",
    }
}

choice! {
    /// What the experts do between dispatch and combine.
    ExpertWork {
        /// Expert e scales its rows by 1 + e/E; a row's weighted sum over its local experts is formed
        Scale = "scale",
        /// Nothing: combine reads the received rows as they are (high-throughput; with fp8, cast back once)
        None = "none",
    }
}

/// One job: what every rank of it must know besides its rank and its input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Options {
    pub(crate) ranks: usize,
    pub(crate) mode: Mode,
    pub(crate) dtype: RowType,
    /// `None`: as the environment says.
    pub(crate) engine: Option<EngineChoice>,
    pub(crate) outputs: Outputs,
    pub(crate) expert_work: ExpertWork,
    /// Bound on SMs or worker threads per rank; `None`: the library's.
    pub(crate) num_sms: Option<usize>,
    /// Deadline of every wait; `None`: as the environment says.
    pub(crate) timeout: Option<Duration>,
    /// Iterations that are not measured.
    pub(crate) warmup: usize,
    /// Iterations that are.
    pub(crate) iters: usize,
    /// Compare with the reference.
    pub(crate) verify: bool,
    /// Return the combined rows.
    pub(crate) keep_combined: bool,
}
