//! Ranks that are threads of one process.
//!
//! All share one [`Round`] behind a mutex. A rank contributes, the last one wakes everybody.
//! A communicator that is dropped, by a thread that returned or panicked, counts as gone and wakes
//! those who wait for it.

use std::{
    any::Any,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use super::{
    deadline_after,
    liveness::{Departure, Liveness},
    lock,
    round::{Abort, Gathered, Refused, Round},
};
use crate::{
    error::{Error, Result},
    topology::Rank,
};

/// What a rank contributes.
#[derive(Clone)]
pub(super) enum Contribution {
    /// To `all_gather`.
    Bytes(Arc<[u8]>),
    /// To `shared`.
    Shared(Arc<dyn Any + Send + Sync>),
}

/// What the ranks share.
struct Group {
    round: Mutex<Round<Contribution>>,
    changed: Condvar,
    /// One for each rank, so that each has its own subscribers.
    liveness: Vec<Arc<Liveness>>,
}

/// One rank's end.
pub(super) struct Threads {
    group: Arc<Group>,
    rank: Rank,
    /// Held during a collective: clones of a communicator take turns.
    turn: Mutex<()>,
}

impl Threads {
    /// The ends of a group of `size` ranks, in order.
    pub(super) fn group(size: usize) -> Vec<Self> {
        let group = Arc::new(Group {
            round: Mutex::new(Round::new(size)),
            changed: Condvar::new(),
            liveness: (0..size).map(|_| Arc::new(Liveness::new(size))).collect(),
        });
        (0..size)
            .map(|rank| Self {
                group: group.clone(),
                rank: Rank(rank),
                turn: Mutex::new(()),
            })
            .collect()
    }

    pub(super) fn liveness(&self) -> &Arc<Liveness> {
        &self.group.liveness[self.rank.0]
    }

    /// Everyone's contribution to the same call, by rank.
    pub(super) fn exchange(
        &self,
        operation: &'static str,
        mine: Contribution,
        timeout: Duration,
    ) -> Result<Gathered<Contribution>> {
        let _turn = lock(&self.turn);
        let begun = Instant::now();
        let deadline = deadline_after(begun, timeout);
        let mut round = lock(&self.group.round);
        let sequence = round.sequence();
        match round.put(self.rank, mine) {
            Ok(None) => {}
            Ok(Some(all)) => {
                self.group.changed.notify_all();
                return Ok(all);
            }
            Err(Refused::Failed(failure)) => {
                return Err(failure.into_error(operation.into(), "exchange".into()));
            }
            Err(Refused::OutOfTurn) => {
                return Err(Error::Bootstrap {
                    stage: "exchange".into(),
                    reason: format!("rank {} contributed twice to one {operation}", self.rank),
                });
            }
        }
        loop {
            if let Some(outcome) = round.outcome(sequence) {
                return outcome.map_err(|f| f.into_error(operation.into(), "exchange".into()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let ranks = round.missing();
                round.abort(Abort {
                    by: self.rank,
                    missing: ranks.clone(),
                });
                self.group.changed.notify_all();
                return Err(Error::Timeout {
                    operation: operation.into(),
                    stage: "exchange".into(),
                    ranks,
                    waited: begun.elapsed(),
                });
            }
            round = match self.group.changed.wait_timeout(round, left) {
                Ok((round, _)) => round,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let how = if std::thread::panicking() {
            Departure::Lost
        } else {
            Departure::Left
        };
        let others = self.group.liveness.iter().enumerate();
        let news: Vec<_> = others
            .filter(|(other, _)| *other != self.rank.0)
            .map(|(_, liveness)| liveness.record(self.rank, how))
            .collect();
        lock(&self.group.round).depart(self.rank);
        self.group.changed.notify_all();
        for news in news {
            news.tell();
        }
    }
}
