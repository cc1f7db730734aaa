//! The state of one collective after the other, as one place sees it.
//!
//! A round is complete when every rank's contribution is there; then the next begins. It fails,
//! and with it every later one, when a rank is gone or when a rank gave up. What counts is the
//! order in which contributions, departures and aborts are recorded: a round that was complete
//! before a rank went stays complete.

use std::sync::Arc;

use crate::{
    error::{Error, Text},
    topology::Rank,
};

/// A rank's decision to give up, which ends the group's collectives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Abort {
    /// The rank that gave up.
    pub(super) by: Rank,
    /// The ranks whose contribution it missed.
    pub(super) missing: Vec<Rank>,
}

/// Why no further round can complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    Aborted(Abort),
    Gone(Vec<Rank>),
}

impl Failure {
    /// The error of `operation` in `stage`.
    pub(super) fn into_error(self, operation: Text, stage: Text) -> Error {
        match self {
            Self::Aborted(abort) => Error::Aborted {
                by: abort.by,
                operation,
                stage,
                ranks: abort.missing,
            },
            Self::Gone(ranks) => Error::PeerLost {
                operation,
                stage,
                ranks,
            },
        }
    }
}

/// Why a contribution was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Nothing can complete any more.
    Failed(Failure),
    /// The rank has contributed already, or there is no such rank.
    OutOfTurn,
}

/// The contributions of all ranks to one round, by rank.
pub(super) type Gathered<T> = Arc<[T]>;

pub(super) struct Round<T> {
    sequence: u64,
    slots: Vec<Option<T>>,
    missing: usize,
    finished: Option<Gathered<T>>,
    gone: Vec<Rank>,
    abort: Option<Abort>,
}

impl<T> Round<T> {
    pub(super) fn new(size: usize) -> Self {
        Self {
            sequence: 0,
            slots: (0..size).map(|_| None).collect(),
            missing: size,
            finished: None,
            gone: Vec::new(),
            abort: None,
        }
    }

    /// The number of the round that collects contributions now.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Takes `rank`'s contribution to the current round; gives all of them if it was the last.
    pub(super) fn put(&mut self, rank: Rank, value: T) -> Result<Option<Gathered<T>>, Refused> {
        if let Some(failure) = self.failure() {
            return Err(Refused::Failed(failure));
        }
        match self.slots.get_mut(rank.0) {
            Some(slot @ None) => *slot = Some(value),
            _ => return Err(Refused::OutOfTurn),
        }
        self.missing -= 1;
        if self.missing > 0 {
            return Ok(None);
        }
        let gathered: Gathered<T> = self.slots.iter_mut().filter_map(Option::take).collect();
        self.missing = self.slots.len();
        self.sequence += 1;
        self.finished = Some(gathered.clone());
        Ok(Some(gathered))
    }

    /// How round `sequence` ended, if it did. Asked by a rank that contributed to it, so at most
    /// one round has ended since.
    pub(super) fn outcome(&self, sequence: u64) -> Option<Result<Gathered<T>, Failure>> {
        match &self.finished {
            Some(gathered) if self.sequence == sequence + 1 => Some(Ok(gathered.clone())),
            _ => self.failure().map(Err),
        }
    }

    /// Whether `rank` has contributed to the current round.
    pub(super) fn has_put(&self, rank: Rank) -> bool {
        self.slots.get(rank.0).is_some_and(Option::is_some)
    }

    /// The ranks that have not contributed to the current round.
    pub(super) fn missing(&self) -> Vec<Rank> {
        let slots = self.slots.iter().enumerate();
        slots
            .filter(|(_, slot)| slot.is_none())
            .map(|(rank, _)| Rank(rank))
            .collect()
    }

    /// Records that `rank` is gone; false if that was known.
    pub(super) fn depart(&mut self, rank: Rank) -> bool {
        match self.gone.binary_search(&rank) {
            Ok(_) => false,
            Err(place) => {
                self.gone.insert(place, rank);
                true
            }
        }
    }

    /// Records that a rank gave up; the first to do so is remembered.
    pub(super) fn abort(&mut self, abort: Abort) {
        self.abort.get_or_insert(abort);
    }

    /// Why nothing can complete any more, if so.
    pub(super) fn failure(&self) -> Option<Failure> {
        if let Some(abort) = &self.abort {
            Some(Failure::Aborted(abort.clone()))
        } else if !self.gone.is_empty() {
            Some(Failure::Gone(self.gone.clone()))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_completes_with_the_last_contribution() {
        let mut round = Round::new(2);
        assert_eq!(round.put(Rank(1), 'b'), Ok(None));
        assert_eq!(round.missing(), [Rank(0)]);
        assert_eq!(round.put(Rank(1), 'x'), Err(Refused::OutOfTurn));
        assert_eq!(round.put(Rank(2), 'x'), Err(Refused::OutOfTurn));
        assert_eq!(round.outcome(0), None);
        let all = round.put(Rank(0), 'a').unwrap().unwrap();
        assert_eq!(&*all, &['a', 'b']);
        assert_eq!(round.outcome(0), Some(Ok(all)));
        assert_eq!((round.sequence(), round.missing().len()), (1, 2));
    }

    #[test]
    fn a_departure_fails_the_open_round_but_not_the_finished_one() {
        let mut round = Round::new(1);
        round.put(Rank(0), ()).unwrap();
        assert!(round.depart(Rank(0)) && !round.depart(Rank(0)));
        assert!(round.outcome(0).unwrap().is_ok());
        let gone = Failure::Gone(vec![Rank(0)]);
        assert_eq!(round.put(Rank(0), ()), Err(Refused::Failed(gone)));
    }
}
