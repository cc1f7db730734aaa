//! A caller's own transport, for frameworks that already have one.

use std::sync::Mutex;

use super::lock;
use crate::{
    error::{Error, Result},
    topology::Rank,
};

/// An exchange between all ranks that the caller supplies, for example over
/// `torch.distributed` or MPI.
///
/// Deadlines are the transport's own business, as is noticing that a rank is gone.
pub trait AllGather: Send + Sync {
    /// Sends `mine` to every rank and returns what every rank sent, in the order of ranks, this
    /// rank's own included. Contributions may differ in length and may be empty. Never called by
    /// two threads at once.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from completing; the error is passed on to the caller.
    fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>>;
}

/// Checks what a caller's transport returns before anything relies on it.
pub(super) struct Custom {
    transport: Mutex<Box<dyn AllGather>>,
    rank: Rank,
    size: usize,
}

impl Custom {
    pub(super) fn new(rank: Rank, size: usize, transport: Box<dyn AllGather>) -> Self {
        Self {
            transport: Mutex::new(transport),
            rank,
            size,
        }
    }

    pub(super) fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let all = lock(&self.transport).all_gather(mine)?;
        let reason = if all.len() != self.size {
            format!(
                "the supplied all_gather returned {} contributions for {} ranks",
                all.len(),
                self.size
            )
        } else if all[self.rank.0] != mine {
            format!(
                "the supplied all_gather did not return rank {}'s own contribution at its place: \
                 the order must be that of the ranks",
                self.rank
            )
        } else {
            return Ok(all);
        };
        Err(Error::Bootstrap {
            stage: "exchange".into(),
            reason,
        })
    }
}
