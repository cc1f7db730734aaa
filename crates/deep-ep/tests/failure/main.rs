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

use std::thread;

use deep_ep::{Buffer, BufferConfig, Communicator};

/// Runs `body` on a thread for each rank of a new group; its results in order.
fn on_ranks<V: Send>(
    ranks: usize,
    config: &BufferConfig,
    body: impl Fn(Buffer) -> V + Sync,
) -> Vec<thread::Result<V>> {
    let group = Communicator::local(ranks).unwrap();
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = group
            .into_iter()
            .map(|end| {
                scope.spawn(move || {
                    // The thread keeps only the buffer, which keeps the communicator.
                    let buffer = Buffer::new(&end, config.clone()).unwrap();
                    drop(end);
                    body(buffer)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect()
    })
}
