//! Calls that were begun.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use deep_ep::{
    Error, Loan, PendingCombine, PendingDispatch, PendingLowLatencyCombine,
    PendingLowLatencyDispatch, ReceivedCounts, Result,
};

use crate::{
    boundary,
    buffer::BufferObject,
    handle::{HandleObject, LowLatencyHandleObject},
    layout::LayoutObject,
    objects::{self, Object},
    status::Status,
};

/// What a call borrows besides the caller's memory.
#[derive(Default)]
#[expect(dead_code, reason = "some are held, not used")]
pub(crate) struct Kept {
    pub(crate) buffer: Option<Arc<BufferObject>>,
    pub(crate) layout: Option<Arc<LayoutObject>>,
    pub(crate) handle: Option<Arc<HandleObject>>,
    pub(crate) low_latency_handle: Option<Arc<LowLatencyHandleObject>>,
    pub(crate) loan: Option<Arc<Loan>>,
}

/// A borrow of what [`Kept`] holds, for a call that is dropped before it.
pub(crate) fn lasting<T>(kept: &Arc<T>) -> &'static T {
    // SAFETY: the call that gets it lies in a `Held` with the same `Arc`, which drops the call first;
    // what is in an `Arc` does not move.
    unsafe { &*Arc::as_ptr(kept) }
}

/// A call and what it borrows, which is dropped after it.
pub(crate) struct Held<P> {
    pub(crate) call: P,
    pub(crate) _kept: Kept,
}

/// The halves that are left.
pub(crate) enum Half {
    Dispatch(Held<PendingDispatch<'static>>),
    Combine(Held<PendingCombine<'static>>),
    LowLatencyDispatch(Held<PendingLowLatencyDispatch<'static>>),
    LowLatencyCombine(Held<PendingLowLatencyCombine<'static>>),
    Done,
}

impl Half {
    fn name(&self) -> &'static str {
        match self {
            Self::Dispatch(_) => "a dispatch",
            Self::Combine(_) => "a combine",
            Self::LowLatencyDispatch(_) => "a low-latency dispatch",
            Self::LowLatencyCombine(_) => "a low-latency combine",
            Self::Done => "finished",
        }
    }
}

/// A call that was begun.
pub struct PendingObject {
    half: Mutex<Half>,
    /// Row counts, once they were asked for.
    counts: OnceLock<ReceivedCounts>,
}

impl Object for PendingObject {
    const NAME: &'static str = "deep_ep_pending_t";
}

impl PendingObject {
    pub(crate) fn new(half: Half) -> Self {
        Self {
            half: Mutex::new(half),
            counts: OnceLock::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Half> {
        self.half.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The row counts of a dispatch; waits for them.
    pub(crate) fn counts(&self) -> Result<&ReceivedCounts> {
        if let Some(counts) = self.counts.get() {
            return Ok(counts);
        }
        let mut half = self.lock();
        let Half::Dispatch(held) = &mut *half else {
            return Err(wrong(&half, "a dispatch"));
        };
        let counts = held.call.counts()?.clone();
        Ok(self.counts.get_or_init(|| counts))
    }

    /// Takes the half that is left, if it is of the kind that `select` picks out; only once.
    pub(crate) fn take<P>(
        &self,
        expected: &'static str,
        select: impl FnOnce(Half) -> std::result::Result<P, Box<Half>>,
    ) -> Result<P> {
        let mut half = self.lock();
        match select(std::mem::replace(&mut *half, Half::Done)) {
            Ok(taken) => Ok(taken),
            Err(other) => {
                *half = *other;
                Err(wrong(&half, expected))
            }
        }
    }
}

fn wrong(half: &Half, expected: &'static str) -> Error {
    let limit = format!("must be {expected} that was not finished before");
    Error::invalid("pending", half.name(), limit)
}

/// Frees a call that was begun; if it was not finished it is abandoned, and peers that wait for this
/// rank's rows end theirs with an error. NULL is allowed. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_pending_free(pending: *mut PendingObject) -> Status {
    boundary::call(|| objects::take(pending, "pending"))
}
