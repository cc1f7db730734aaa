//! The rendezvous over TCP among well-behaved, late, missing and misconfigured ranks.

use std::{
    thread,
    time::{Duration, Instant},
};

use deep_ep::{
    Error, Rank,
    bootstrap::{Communicator, TcpConfig},
    settings::{Secret, Settings},
};

use super::{config, free_port, on_threads, run, tcp_group};

fn names_bootstrap(error: &Error, parts: &[&str]) {
    assert!(matches!(error, Error::Bootstrap { .. }), "{error}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// The ranks of a job on one host where nobody set a secret.
fn without_secret(size: usize, port: u16) -> Vec<TcpConfig> {
    (0..size)
        .map(|rank| TcpConfig {
            secret: None,
            address: "localhost".into(),
            ..config(rank, size, port)
        })
        .collect()
}

#[test]
fn one_rank_needs_no_network() {
    let only = TcpConfig {
        address: "nowhere.invalid".into(),
        local_rank: 3,
        ..config(0, 1, 1)
    };
    let end = Communicator::tcp(only).unwrap();
    assert!(end.in_process());
    assert_eq!(end.local_rank(), 3);
    assert_eq!(end.all_gather(b"me").unwrap(), [b"me"]);
}

#[test]
fn without_a_secret_in_the_environment_rank_0_leaves_one() {
    on_threads(without_secret(4, free_port()), |end| {
        end.unwrap().barrier().unwrap()
    });
}

#[test]
fn ranks_may_come_before_rank_0() {
    let port = free_port();
    let mut configs = without_secret(3, port);
    let first = configs.remove(0);
    thread::scope(|scope| {
        let others = scope.spawn(|| on_threads(configs, |end| end.unwrap().barrier().unwrap()));
        thread::sleep(Duration::from_millis(300));
        Communicator::tcp(first).unwrap().barrier().unwrap();
        others.join().unwrap();
    });
}

#[test]
fn two_jobs_on_two_ports_do_not_meet() {
    let (a, b) = (free_port(), free_port());
    thread::scope(|scope| {
        for port in [a, b] {
            scope.spawn(move || {
                on_threads(without_secret(3, port), |end| {
                    let end = end.unwrap();
                    let all = end.all_gather(&port.to_le_bytes()).unwrap();
                    assert!(all.iter().all(|bytes| *bytes == port.to_le_bytes()));
                });
            });
        }
    });
}

#[test]
fn groups_can_be_made_on_one_port_one_after_the_other() {
    let port = free_port();
    on_threads(without_secret(3, port), |first| {
        let first = first.unwrap();
        let again = without_secret(3, port).remove(first.rank().0);
        let second = Communicator::tcp(again).unwrap();
        second.barrier().unwrap();
        first.barrier().unwrap();
    });
}

#[test]
fn a_missing_rank_is_named_by_all() {
    let port = free_port();
    let begun = Instant::now();
    let mut configs: Vec<_> = (0..4).map(|rank| config(rank, 4, port)).collect();
    configs.remove(2);
    for config in &mut configs {
        config.timeout = Duration::from_millis(700);
    }
    for error in on_threads(configs, |end| end.unwrap_err()) {
        names_bootstrap(&error, &["rendezvous", "ranks 2 did not come"]);
    }
    assert!(begun.elapsed() < Duration::from_secs(4));
}

#[test]
fn a_missing_rank_0_is_reported_with_its_address() {
    let port = free_port();
    let alone = TcpConfig {
        timeout: Duration::from_millis(300),
        ..config(1, 2, port)
    };
    let error = Communicator::tcp(alone).unwrap_err();
    names_bootstrap(&error, &[&format!("rank 0 at 127.0.0.1:{port}"), "refused"]);
}

/// A job of two with a third process that does not fit; both must be unharmed.
fn misfit_is_refused(misfit: impl Fn(&mut TcpConfig), parts: &[&str]) {
    let port = free_port();
    let mut third = config(1, 2, port);
    misfit(&mut third);
    thread::scope(|scope| {
        let zero = scope.spawn(move || Communicator::tcp(config(0, 2, port)).unwrap());
        names_bootstrap(&Communicator::tcp(third).unwrap_err(), parts);
        let one = Communicator::tcp(config(1, 2, port)).unwrap();
        let zero = zero.join().unwrap();
        run(vec![zero, one], |end| end.barrier().unwrap());
    });
}

#[test]
fn a_wrong_secret_is_refused() {
    misfit_is_refused(
        |config| config.secret = Some(Secret::new("another").unwrap()),
        &["refused", "DEEP_EP_SECRET"],
    );
}

#[test]
fn a_wrong_world_size_is_refused_and_named() {
    misfit_is_refused(
        |config| config.world_size = 3,
        &["refused", "rank 1 has world size 3, but rank 0 has 2"],
    );
}

#[test]
fn a_duplicate_rank_is_refused() {
    let port = free_port();
    let results = thread::scope(|scope| {
        let zero = scope.spawn(move || Communicator::tcp(config(0, 3, port)).unwrap());
        let twins: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(move || {
                    let end = Communicator::tcp(config(1, 3, port));
                    if end.is_err() {
                        // One of the two was refused: now the missing one may come.
                        Communicator::tcp(config(2, 3, port))
                            .unwrap()
                            .barrier()
                            .unwrap();
                    }
                    end.and_then(|end| end.barrier()).err()
                })
            })
            .collect();
        zero.join().unwrap().barrier().unwrap();
        twins
            .into_iter()
            .map(|t| t.join().unwrap())
            .collect::<Vec<_>>()
    });
    let errors: Vec<_> = results.into_iter().flatten().collect();
    assert_eq!(errors.len(), 1);
    names_bootstrap(&errors[0], &["refused", "rank 1 is there already"]);
}

#[test]
fn rank_0_reports_whom_it_refused() {
    let port = free_port();
    let zero = TcpConfig {
        timeout: Duration::from_millis(600),
        ..config(0, 2, port)
    };
    thread::scope(|scope| {
        let zero = scope.spawn(|| Communicator::tcp(zero).unwrap_err());
        let stranger = TcpConfig {
            secret: Some(Secret::new("another").unwrap()),
            ..config(1, 2, port)
        };
        Communicator::tcp(stranger).unwrap_err();
        let error = zero.join().unwrap();
        names_bootstrap(
            &error,
            &["ranks 1 did not come", "127.0.0.1 has another secret"],
        );
    });
}

#[test]
fn a_port_in_use_is_named() {
    let port = free_port();
    let _other = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let zero = TcpConfig {
        timeout: Duration::from_millis(200),
        ..config(0, 2, port)
    };
    let error = Communicator::tcp(zero).unwrap_err().to_string();
    assert!(
        error.contains(&port.to_string()) && error.contains("DEEP_EP_PORT"),
        "{error}"
    );
}

#[test]
fn configurations_that_cannot_work_are_refused_at_once() {
    let refused = |change: fn(&mut TcpConfig), part: &str| {
        let mut bad = config(0, 2, 9999);
        change(&mut bad);
        let error = Communicator::tcp(bad).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    };
    refused(|c| c.rank = 2, "rank is 2");
    refused(|c| c.port = 0, "port is 0");
    refused(|c| c.timeout = Duration::ZERO, "timeout is 0 s");
    let remote = |c: &mut TcpConfig| {
        c.address = "10.1.2.3".into();
        c.secret = None;
    };
    refused(remote, "DEEP_EP_SECRET is not set");
    let settings = Settings::from_lookup(|name| (name == "WORLD_SIZE").then(|| "2".into()));
    let error = Communicator::from_settings(&settings.unwrap()).unwrap_err();
    assert!(error.to_string().contains("RANK is not set"), "{error}");
}

#[test]
fn leaving_takes_bounded_time_though_nobody_else_leaves() {
    for leaver in [0, 3] {
        let mut group = tcp_group(4);
        let begun = Instant::now();
        drop(group.remove(leaver));
        assert!(begun.elapsed() < Duration::from_secs(2));
        for end in &group {
            let error = end.barrier().unwrap_err();
            let Error::PeerLost { ranks, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!(*ranks, [Rank(leaver)]);
        }
    }
}
