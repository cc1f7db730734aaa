//! Calls between their halves: who launches the second one.

use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering},
};

use super::params::{CombineParams, DispatchParams};
use crate::{
    engine::Operation,
    error::{Error, Result},
};

/// Who launches the receiving half of a call: exactly one of finishing it, dropping it and beginning
/// another one does.
#[derive(Debug, Default)]
pub(crate) struct Progress(AtomicU8);

impl Progress {
    const OPEN: u8 = 0;
    const RECEIVED: u8 = 1;
    const ABANDONED: u8 = 2;

    fn take(&self, to: u8) -> bool {
        self.0
            .compare_exchange(Self::OPEN, to, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Whether the caller is to launch the receiving half; false if it was launched before.
    ///
    /// # Errors
    ///
    /// [`Error::Abandoned`] if another call was begun since.
    pub(crate) fn receive(&self, operation: Operation) -> Result<bool> {
        let first = self.take(Self::RECEIVED);
        if self.0.load(Ordering::Acquire) == Self::ABANDONED {
            return Err(Error::Abandoned {
                operation: operation.name().into(),
            });
        }
        Ok(first)
    }

    /// Whether nobody has launched the receiving half.
    pub(crate) fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::OPEN
    }

    /// Whether another call gave this one up.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::ABANDONED
    }

    /// Whether the caller is to launch the receiving half of a call that was given up.
    pub(crate) fn abandon(&self) -> bool {
        self.take(Self::ABANDONED)
    }
}

/// A call whose receiving half was not launched yet.
pub(crate) struct Open {
    pub(crate) progress: Arc<Progress>,
    /// Its beginning was recorded into a graph.
    pub(crate) recorded: bool,
    pub(crate) discard: Discard,
}

/// What the receiving half needs to let a call's rows go.
pub(crate) enum Discard {
    Dispatch(Box<DispatchParams>),
    Combine(Box<CombineParams>, u8),
}
