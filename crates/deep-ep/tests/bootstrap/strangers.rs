//! Connections to the port that are not ranks.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use deep_ep::bootstrap::Communicator;

use super::{config, free_port, run};

/// Connects once rank 0 listens.
fn dial(port: u16) -> TcpStream {
    loop {
        if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
            return stream;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// A job of three whose last rank comes only after `disturb` has begun to disturb it.
fn job_is_not_disturbed(disturb: impl FnOnce(u16) -> Vec<TcpStream>) -> Vec<TcpStream> {
    let port = free_port();
    thread::scope(|scope| {
        let first = [0, 1]
            .map(|rank| scope.spawn(move || Communicator::tcp(config(rank, 3, port)).unwrap()));
        let strangers = disturb(port);
        let last = Communicator::tcp(config(2, 3, port)).unwrap();
        let mut group: Vec<_> = first.map(|t| t.join().unwrap()).into_iter().collect();
        group.push(last);
        run(group, |end| {
            assert_eq!(
                end.all_gather(&[end.rank().0 as u8]).unwrap(),
                [[0], [1], [2]]
            );
        });
        strangers
    })
}

#[test]
fn garbage_closes_only_its_own_connection() {
    let mut strangers = job_is_not_disturbed(|port| {
        let lines: [&[u8]; 4] = [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            &[0; 4096],
            &[0xff; 100_000],
            // The right beginning, then nonsense.
            b"deep-ep\n\x01\x00\x00\x00 and then some more that is no proof of anything, long \
              enough for all that is read in a handshake, and more besides. More. And more yet.",
        ];
        let strangers = lines.map(|line| {
            let mut stream = dial(port);
            let _ = stream.write_all(line);
            stream
        });
        strangers.into()
    });
    for stream in &mut strangers {
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        // Closed by now, orderly or not.
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() < 200);
    }
}

#[test]
fn half_open_connections_hold_up_nobody() {
    let begun = Instant::now();
    // More than are examined at once; half of them closed on their side.
    let held = job_is_not_disturbed(|port| {
        (0..200)
            .map(|n| {
                let mut stream = dial(port);
                if n % 3 == 0 {
                    let _ = stream.write_all(b"deep-ep\n");
                } else if n % 3 == 1 {
                    let _ = stream.shutdown(Shutdown::Write);
                }
                stream
            })
            .collect()
    });
    assert_eq!(held.len(), 200);
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_scanner_that_connects_without_end_does_not_keep_ranks_out() {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        job_is_not_disturbed(|port| {
            for _ in 0..2 {
                let stop = &stop;
                scope.spawn(move || {
                    let mut held = Vec::new();
                    // Until the port is closed, or for want of descriptors.
                    while !stop.load(Ordering::Relaxed) && held.len() < 300 {
                        match TcpStream::connect(("127.0.0.1", port)) {
                            Ok(stream) => held.push(stream),
                            Err(_) => thread::sleep(Duration::from_millis(1)),
                        }
                    }
                });
            }
            thread::sleep(Duration::from_millis(50));
            Vec::new()
        });
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn the_port_is_closed_once_all_are_there() {
    let port = free_port();
    let group = super::on_threads((0..2).map(|rank| config(rank, 2, port)).collect(), |end| {
        end.unwrap()
    });
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    drop(group);
}
