//! The one error type of the library.
//!
//! Errors carry fields, not prepared sentences: the message is made by `Display`, and a caller can
//! match on what went wrong. A message about an input names the argument, its value and the limit.

use std::{borrow::Cow, fmt, sync::Arc, time::Duration};

use crate::topology::Rank;

/// Result of this library's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A short text that is usually a constant.
pub type Text = Cow<'static, str>;

/// What went wrong.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of this call is not usable. Nothing was sent except a reject word, with which
    /// the peers end the same call; the buffer stays usable.
    #[error(transparent)]
    InvalidArgument(#[from] Reject),

    /// Another rank rejected this call, so no rows moved. The buffer stays usable.
    #[error("rank {rank} rejected the call: {reason}")]
    PeerRejected {
        /// The rank that rejected.
        rank: Rank,
        /// Why it did.
        reason: Reject,
    },

    /// Ranks passed different values where they must agree. Raised on every rank.
    #[error(
        "{setting} differs between ranks: rank {this_rank} has {this_value}, rank {other_rank} has {other_value}"
    )]
    SettingsDiffer {
        /// The setting, as it is called in the interface.
        setting: Text,
        /// This rank.
        this_rank: Rank,
        /// This rank's value.
        this_value: String,
        /// The first rank that has another value.
        other_rank: Rank,
        /// That rank's value.
        other_value: String,
    },

    /// A wait reached its deadline. The group is aborted: this buffer's later calls fail.
    #[error("{operation} timed out after {waited:?} in stage {stage}, waiting for ranks {}", list(.ranks))]
    Timeout {
        /// The operation, for example `dispatch`.
        operation: Text,
        /// The stage in it, for example `counts`.
        stage: Text,
        /// The ranks whose message did not come.
        ranks: Vec<Rank>,
        /// How long this rank waited.
        waited: Duration,
    },

    /// Another rank gave up on this group (its deadline passed), so this one leaves too.
    #[error("rank {by} aborted {operation} in stage {stage}, where it waited for ranks {}", list(.ranks))]
    Aborted {
        /// The rank that gave up first, as far as this rank knows.
        by: Rank,
        /// The operation in which it waited.
        operation: Text,
        /// The stage in which it waited.
        stage: Text,
        /// The ranks it waited for.
        ranks: Vec<Rank>,
    },

    /// Ranks are gone (their process died, or they dropped the buffer) before they did their part.
    #[error("{operation} cannot complete in stage {stage}: ranks {} are gone", list(.ranks))]
    PeerLost {
        /// The operation, for example `combine`.
        operation: Text,
        /// The stage in it.
        stage: Text,
        /// The ranks that are gone.
        ranks: Vec<Rank>,
    },

    /// The call was given up on this rank: another call was begun before it was finished.
    #[error("{operation} was abandoned: another call was begun before it was finished")]
    Abandoned {
        /// The operation.
        operation: Text,
    },

    /// What was asked for exists, but not here.
    #[error("{feature} is not supported here: {why}")]
    Unsupported {
        /// What was asked for.
        feature: Text,
        /// Why it cannot be had and what to do.
        why: String,
    },

    /// Memory could not be had. Raised before anything is sent where that is possible.
    #[error("no memory for {purpose}: {requested} bytes wanted, limit {limit} bytes")]
    OutOfMemory {
        /// What the memory was for.
        purpose: Text,
        /// Bytes wanted in all.
        requested: u64,
        /// The limit that stands against it, in bytes.
        limit: u64,
    },

    /// The ranks could not find each other, or lost each other while exchanging settings.
    #[error("bootstrap failed in stage {stage}: {reason}")]
    Bootstrap {
        /// The stage, for example `rendezvous`.
        stage: Text,
        /// What happened, with addresses and missing ranks where they are known.
        reason: String,
    },

    /// CUDA refused: the driver, or the compiler NVRTC.
    #[error("{call} failed: {name} ({code}): {message}")]
    Cuda {
        /// The function that was called.
        call: Text,
        /// What it returned.
        code: u32,
        /// The code's name, as `CUDA_ERROR_ILLEGAL_ADDRESS`.
        name: String,
        /// What it means; the compiler's log if a kernel could not be compiled.
        message: String,
    },

    /// The operating system refused.
    #[error("{context}: {source}")]
    Io {
        /// What was tried.
        context: Text,
        /// The system's answer.
        source: Arc<std::io::Error>,
    },
}

/// Why a call was not accepted: `argument` is `value`, which `limit` does not allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reject {
    /// The argument, with an index where one applies: `topk_idx[17, 3]`.
    pub argument: Text,
    /// Its value.
    pub value: String,
    /// The limit it breaks, as the end of a sentence: `must be below num_experts = 256`.
    pub limit: Text,
}

impl Reject {
    /// A reject of `argument`, whose `value` breaks `limit`.
    pub fn new(
        argument: impl Into<Text>,
        value: impl fmt::Display,
        limit: impl Into<Text>,
    ) -> Self {
        Self {
            argument: argument.into(),
            value: value.to_string(),
            limit: limit.into(),
        }
    }
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is {}, but it {}",
            self.argument, self.value, self.limit
        )
    }
}

impl std::error::Error for Reject {}

impl Error {
    /// An argument error: `argument` is `value`, but it `limit`.
    pub fn invalid(
        argument: impl Into<Text>,
        value: impl fmt::Display,
        limit: impl Into<Text>,
    ) -> Self {
        Reject::new(argument, value, limit).into()
    }

    /// Wraps an error of the operating system.
    pub fn io(context: impl Into<Text>, source: impl Into<std::io::Error>) -> Self {
        Self::Io {
            context: context.into(),
            source: Arc::new(source.into()),
        }
    }
}

/// `0, 2, 5`, shortened after 16 ranks.
fn list(ranks: &[Rank]) -> String {
    let mut text = ranks
        .iter()
        .take(16)
        .map(Rank::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if ranks.len() > 16 {
        text += &format!(" and {} more", ranks.len() - 16);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_argument_its_value_and_the_limit() {
        let error = Error::invalid("topk_idx[17, 3]", 256, "must be below num_experts = 256");
        assert_eq!(
            error.to_string(),
            "topk_idx[17, 3] is 256, but it must be below num_experts = 256"
        );
    }

    #[test]
    fn a_timeout_names_operation_stage_and_ranks() {
        let error = Error::Timeout {
            operation: "dispatch".into(),
            stage: "counts".into(),
            ranks: vec![Rank(1), Rank(3)],
            waited: Duration::from_secs(2),
        };
        assert_eq!(
            error.to_string(),
            "dispatch timed out after 2s in stage counts, waiting for ranks 1, 3"
        );
    }
}
