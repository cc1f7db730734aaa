//! How ranks find each other, agree, and notice that one is gone.

mod processes;
mod strangers;
mod tcp;
mod threads;

use std::{
    net::TcpListener,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use deep_ep::{
    Result,
    bootstrap::{Communicator, TcpConfig},
    settings::Secret,
};

/// A port that nobody uses. Below the range from which the system takes ports for outgoing
/// connections, so that no test running at the same time gets it by chance.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let n = std::process::id() * 97 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (n % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Rank `rank` of `world_size` at `port` of this host, with a secret of the environment's kind.
fn config(rank: usize, world_size: usize, port: u16) -> TcpConfig {
    TcpConfig {
        rank,
        world_size,
        local_rank: rank,
        address: "127.0.0.1".into(),
        port,
        secret: Some(Secret::new("the secret of these tests").unwrap()),
        timeout: Duration::from_secs(15),
    }
}

/// Runs `body` on a thread for each configuration; its results in order.
fn on_threads<V: Send>(
    configs: Vec<TcpConfig>,
    body: impl Fn(Result<Communicator>) -> V + Sync,
) -> Vec<V> {
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = configs
            .into_iter()
            .map(|config| scope.spawn(move || body(Communicator::tcp(config))))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// The communicators of a group over TCP, all in this process.
fn tcp_group(size: usize) -> Vec<Communicator> {
    let port = free_port();
    let configs = (0..size).map(|rank| config(rank, size, port)).collect();
    on_threads(configs, |end| end.unwrap())
}

/// A group of threads, and one over TCP, of this size.
fn both_kinds(size: usize) -> [Vec<Communicator>; 2] {
    [Communicator::local(size).unwrap(), tcp_group(size)]
}

/// Runs `body` for every rank on a thread of its own; its results in order.
fn run<V: Send>(group: Vec<Communicator>, body: impl Fn(Communicator) -> V + Sync) -> Vec<V> {
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = group
            .into_iter()
            .map(|end| scope.spawn(move || body(end)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
