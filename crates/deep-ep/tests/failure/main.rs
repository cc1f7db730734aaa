//! What happens when ranks die, stay away, leave or panic: the others get an error that says whom
//! they waited for, in bounded time, and can go on in another group; or, in low-latency calls of a
//! buffer made so, go on without them.

mod chaos;
mod killed;
mod leftovers;
mod masks;
mod player;
mod silent;
mod work;

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use deep_ep::{Buffer, BufferConfig, Communicator};

/// Runs `body` on a thread for each rank of a new group; its results in order. Dropping the buffer
/// leaves the group.
fn on_ranks<V: Send>(
    ranks: usize,
    config: &BufferConfig,
    body: impl Fn(Buffer) -> V + Sync,
) -> Vec<thread::Result<V>> {
    on_ends(ranks, |end| {
        let buffer = Buffer::new(&end, config.clone()).unwrap();
        drop(end);
        body(buffer)
    })
}

/// Runs `body` on a thread for each end of a new group; its results in order.
fn on_ends<V: Send>(
    ranks: usize,
    body: impl Fn(Communicator) -> V + Sync,
) -> Vec<thread::Result<V>> {
    let group = Communicator::local(ranks).unwrap();
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = group
            .into_iter()
            .map(|end| scope.spawn(move || body(end)))
            .collect();
        threads
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect()
    })
}

/// A barrier of a test's own, at which a rank that has failed keeps nobody for ever.
struct Meeting {
    ranks: usize,
    came: AtomicUsize,
}

impl Meeting {
    fn new(ranks: usize) -> Self {
        Self {
            ranks,
            came: AtomicUsize::new(0),
        }
    }

    /// Waits until all ranks have come, each as many times as this one.
    fn wait(&self) {
        let before = self.came.fetch_add(1, Ordering::AcqRel);
        let all = (before / self.ranks + 1) * self.ranks;
        let start = Instant::now();
        while self.came.load(Ordering::Acquire) < all {
            assert!(
                start.elapsed() < Duration::from_secs(15),
                "a rank did not come"
            );
            thread::sleep(Duration::from_millis(1));
        }
    }
}
