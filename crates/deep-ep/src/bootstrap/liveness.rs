//! Which ranks are gone, and who wants to be told.

use std::{
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, Weak},
};

use super::lock;
use crate::topology::Rank;

/// How a rank went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// It dropped its communicator.
    Left,
    /// Its process died, its thread panicked, its connection broke, or it broke the protocol.
    Lost,
}

type Callback = dyn Fn(Rank) + Send + Sync;

/// Which ranks of a [`Communicator`](super::Communicator) are gone.
///
/// A rank that is gone never comes back. Over TCP, rank 0 tells the others; once rank 0 itself is
/// gone, nothing more is learned about the rest. With a caller's own transport
/// ([`Communicator::from_all_gather`](super::Communicator::from_all_gather)) nothing is ever
/// learned.
pub struct Liveness {
    registry: Arc<Mutex<Registry>>,
}

struct Registry {
    gone: Vec<Option<Departure>>,
    next_id: u64,
    subscribers: BTreeMap<u64, Arc<Callback>>,
}

impl Liveness {
    /// All of `size` ranks are there.
    pub(super) fn new(size: usize) -> Self {
        Self {
            registry: Arc::new(Mutex::new(Registry {
                gone: vec![None; size],
                next_id: 0,
                subscribers: BTreeMap::new(),
            })),
        }
    }

    /// Whether `rank` is gone. A rank outside the group is not.
    pub fn is_gone(&self, rank: Rank) -> bool {
        self.departure(rank).is_some()
    }

    /// How `rank` went, if it is gone.
    pub fn departure(&self, rank: Rank) -> Option<Departure> {
        lock(&self.registry).gone.get(rank.0).copied().flatten()
    }

    /// The ranks that are gone, ascending.
    pub fn gone(&self) -> Vec<Rank> {
        lock(&self.registry).gone_ranks()
    }

    /// Calls `callback` once for every rank that goes, and at once for those already gone.
    ///
    /// It is called on a thread of the communicator (or on the leaving thread, between threads of
    /// one process), so it must be short and must not wait for other ranks: set a flag, wake
    /// someone. If it panics, that is logged and ends that one call only.
    ///
    /// Dropping the [`Subscription`] ends this. A call that has begun on another thread by then
    /// may still be running, so what it uses must be its own (`Arc`).
    #[must_use = "dropping the subscription ends it"]
    pub fn subscribe(&self, callback: Box<dyn Fn(Rank) + Send + Sync>) -> Subscription {
        let callback: Arc<Callback> = callback.into();
        let (id, gone) = {
            let mut registry = lock(&self.registry);
            let id = registry.next_id;
            registry.next_id += 1;
            registry.subscribers.insert(id, callback.clone());
            (id, registry.gone_ranks())
        };
        for rank in gone {
            call(&*callback, rank);
        }
        Subscription {
            registry: Arc::downgrade(&self.registry),
            id,
        }
    }

    /// Records that `rank` is gone. The result tells those who are to be told, if this is news;
    /// in between, the caller can free those who wait for the rank.
    pub(super) fn record(&self, rank: Rank, how: Departure) -> News {
        let mut registry = lock(&self.registry);
        let callbacks = match registry.gone.get_mut(rank.0) {
            Some(slot @ None) => {
                *slot = Some(how);
                registry.subscribers.values().cloned().collect()
            }
            _ => Vec::new(),
        };
        News { rank, callbacks }
    }
}

/// Who is to be told of a departure.
#[must_use]
pub(super) struct News {
    rank: Rank,
    callbacks: Vec<Arc<Callback>>,
}

impl News {
    /// Calls them. No lock of this module is held, so a callback may ask who is gone, or drop its
    /// subscription.
    pub(super) fn tell(self) {
        for callback in self.callbacks {
            call(&*callback, self.rank);
        }
    }
}

impl Registry {
    fn gone_ranks(&self) -> Vec<Rank> {
        let gone = self.gone.iter().enumerate();
        gone.filter(|(_, how)| how.is_some())
            .map(|(rank, _)| Rank(rank))
            .collect()
    }
}

impl fmt::Debug for Liveness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Liveness")
            .field("gone", &self.gone())
            .finish_non_exhaustive()
    }
}

/// Runs a callback; a panic in it must not take down the thread that watches the peers.
fn call(callback: &Callback, rank: Rank) {
    if catch_unwind(AssertUnwindSafe(|| callback(rank))).is_err() {
        tracing::error!(%rank, "a callback about a departed rank panicked");
    }
}

/// Keeps a callback of [`Liveness::subscribe`] registered until dropped.
pub struct Subscription {
    registry: Weak<Mutex<Registry>>,
    id: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(registry) = self.registry.upgrade() {
            // The callback is dropped after the lock is released: its captures may end up here.
            let callback = lock(&registry).subscribers.remove(&self.id);
            drop(callback);
        }
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn every_departure_is_told_once_also_to_those_who_come_late() {
        let liveness = Liveness::new(4);
        let (send, told) = channel();
        let early_send = send.clone();
        let early = liveness.subscribe(Box::new(move |rank| {
            early_send.send(("early", rank.0)).unwrap()
        }));
        liveness.record(Rank(2), Departure::Lost).tell();
        liveness.record(Rank(2), Departure::Left).tell();
        let late = liveness.subscribe(Box::new(move |rank| send.send(("late", rank.0)).unwrap()));
        drop(early);
        liveness.record(Rank(1), Departure::Left).tell();
        liveness.record(Rank(9), Departure::Left).tell();
        drop(late);
        assert_eq!(
            told.iter().collect::<Vec<_>>(),
            [("early", 2), ("late", 2), ("late", 1)]
        );
        assert_eq!(liveness.departure(Rank(2)), Some(Departure::Lost));
        assert_eq!(liveness.gone(), [Rank(1), Rank(2)]);
        assert!(!liveness.is_gone(Rank(0)) && !liveness.is_gone(Rank(9)));
    }

    #[test]
    fn a_callback_may_panic_or_unsubscribe_itself() {
        let liveness = Liveness::new(2);
        let held = Arc::new(Mutex::new(None::<Subscription>));
        let inner = held.clone();
        let itself = liveness.subscribe(Box::new(move |_| drop(lock(&inner).take())));
        *lock(&held) = Some(itself);
        let _panics = liveness.subscribe(Box::new(|_| panic!("on purpose")));
        liveness.record(Rank(1), Departure::Lost).tell();
        assert!(lock(&held).is_none());
    }
}
