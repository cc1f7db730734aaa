//! The words that ranks signal each other with, generic over the atomics so that `loom` can check
//! them (`models`).
//!
//! | part | written by | read by | ordering |
//! | --- | --- | --- | --- |
//! | [`Mailbox`] | one peer | the region's owner | payload relaxed, then the call number with release; the owner acquires the call number before it reads payload, or rows that were written before the post |
//! | [`Counter`] | one peer | the owner | the number of a call, released; it only grows |
//! | [`Doorbell`] | every peer | the owner | see below |
//! | [`Abort`] | whoever gives up first | the owner | the claim by compare-exchange, then the payload, then the state with release |
//!
//! Nothing is ever cleared: a mailbox of call `n` is told from that of call `n - 2` by the number in
//! it. The writer may reuse the mailbox of call `n - 2` for call `n` once the owner's [`Counter`]
//! says that it has finished call `n - 2`.
//!
//! **Doorbell.** A waiter counts itself in `sleepers`, adds 0 to `rings`, looks at its condition once
//! more, and only then sleeps, on the condition that `rings` is still what it was. A poster changes
//! the condition, adds 1 to `rings`, then looks at `sleepers`. The two additions to `rings` are
//! ordered. If the poster's is first, the waiter's acquires it and its look finds the condition. If
//! the waiter's is first, the poster's acquires it and finds the sleeper, and wakes it; a sleep that
//! begins after the addition finds `rings` changed.

#[cfg(test)]
mod models;

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A 64-bit atomic.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64>;
}

/// A 32-bit atomic counter.
pub(super) trait Tally {
    fn load(&self, order: Ordering) -> u32;
    fn add(&self, value: u32, order: Ordering) -> u32;
    fn sub(&self, value: u32, order: Ordering) -> u32;
}

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange(current, new, AcqRel, Acquire)
    }
}

impl Tally for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }
    fn add(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_add(value, order)
    }
    fn sub(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_sub(value, order)
    }
}

/// What a look into a mailbox finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mail {
    /// Nothing for this call yet.
    NotYet,
    /// The message of this call.
    Here,
    /// The message of a later call: the sender went on without this rank, which it has masked.
    Overtaken,
}

/// A message of a few words from one peer, for one call at a time.
#[derive(Clone, Copy)]
pub(super) struct Mailbox<'a, W> {
    pub(super) call: &'a W,
    pub(super) payload: &'a [W],
}

impl<W: Word> Mailbox<'_, W> {
    /// Delivers `payload` for `call`. What this thread wrote before, rows included, is visible to
    /// whoever reads the message.
    pub(super) fn post(&self, call: u64, payload: &[u64]) {
        for (word, &value) in self.payload.iter().zip(payload) {
            word.store(value, Relaxed);
        }
        self.call.store(call, Release);
    }

    /// Looks for the message of `call`.
    pub(super) fn look(&self, call: u64) -> Mail {
        match self.call.load(Acquire) {
            found if found == call => Mail::Here,
            found if found > call => Mail::Overtaken,
            _ => Mail::NotYet,
        }
    }

    /// Word `i` of a message that [`look`](Self::look) found here.
    pub(super) fn word(&self, i: usize) -> u64 {
        self.payload[i].load(Relaxed)
    }
}

/// The last call that one peer has finished.
#[derive(Clone, Copy)]
pub(super) struct Counter<'a, W>(pub(super) &'a W);

impl<W: Word> Counter<'_, W> {
    /// Says that all calls up to `call` are finished here: none of the owner's memory is read or
    /// written for them any more.
    pub(super) fn advance(&self, call: u64) {
        self.0.store(call, Release);
    }

    /// Calls up to this one are finished at the peer.
    pub(super) fn finished(&self) -> u64 {
        self.0.load(Acquire)
    }
}

/// Wakes a rank that waits.
#[derive(Clone, Copy)]
pub(super) struct Doorbell<'a, T> {
    pub(super) rings: &'a T,
    pub(super) sleepers: &'a T,
}

impl<T: Tally> Doorbell<'_, T> {
    /// To be called after the condition was changed; `wake` wakes all sleepers on `rings`.
    pub(super) fn ring(&self, wake: impl FnOnce()) {
        self.rings.add(1, AcqRel);
        if self.sleepers.load(Relaxed) > 0 {
            wake();
        }
    }

    /// Sleeps unless `ready`; `sleep(expected)` sleeps while `rings` is `expected`. May return
    /// early. Returns whether `ready` was seen.
    pub(super) fn wait(&self, mut ready: impl FnMut() -> bool, sleep: impl FnOnce(u32)) -> bool {
        self.sleepers.add(1, Relaxed);
        let expected = self.rings.add(0, AcqRel);
        let seen = ready();
        if !seen {
            sleep(expected);
        }
        self.sleepers.sub(1, Relaxed);
        seen
    }
}

/// The reason why the group gave up, told once.
#[derive(Clone, Copy)]
pub(super) struct Abort<'a, W> {
    /// 0, then [`CLAIMED`] while the payload is being written, then 2 + the rank that gave up.
    pub(super) state: &'a W,
    pub(super) payload: &'a [W],
}

const CLAIMED: u64 = 1;

impl<W: Word> Abort<'_, W> {
    /// Tells that `rank` gave up; only the first to tell is kept.
    pub(super) fn raise(&self, rank: usize, payload: &[u64]) {
        if self.state.compare_exchange(0, CLAIMED).is_ok() {
            for (word, &value) in self.payload.iter().zip(payload) {
                word.store(value, Relaxed);
            }
            self.state.store(2 + rank as u64, Release);
        }
    }

    /// The rank that gave up, if one did.
    pub(super) fn raised(&self) -> Option<usize> {
        self.state
            .load(Acquire)
            .checked_sub(2)
            .map(|rank| rank as usize)
    }

    /// Word `i` of the reason.
    pub(super) fn word(&self, i: usize) -> u64 {
        self.payload[i].load(Relaxed)
    }
}
