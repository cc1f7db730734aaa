//! What holds however the ranks came together, and what only threads of one process have.

use std::{
    sync::{Arc, mpsc::channel},
    thread,
    time::{Duration, Instant},
};

use deep_ep::{
    Error, Rank, Result,
    bootstrap::{AllGather, Communicator, Departure, MAX_CONTRIBUTION},
};

use super::{both_kinds, run};

#[test]
fn contributions_come_back_in_the_order_of_ranks() {
    for size in 1..=8 {
        for group in both_kinds(size) {
            run(group, |end| {
                for call in 0..20_usize {
                    // Lengths differ, and some are empty.
                    let of = |rank: usize| vec![rank as u8; (rank * 37 + call * 11) % 100];
                    let all = end.all_gather(&of(end.rank().0)).unwrap();
                    assert_eq!(all, (0..size).map(of).collect::<Vec<_>>());
                }
                end.barrier().unwrap();
                assert_eq!(end.size(), size);
            });
        }
    }
}

#[test]
fn contributions_up_to_the_limit_pass_and_longer_ones_are_refused() {
    for group in both_kinds(2) {
        run(group, |end| {
            let error = end.all_gather(&vec![0; MAX_CONTRIBUTION + 1]).unwrap_err();
            assert!(matches!(&error, Error::InvalidArgument(_)), "{error}");
            let mine = vec![end.rank().0 as u8 + 1; MAX_CONTRIBUTION];
            let all = end.all_gather(&mine).unwrap();
            assert!(all.iter().all(|bytes| bytes.len() == MAX_CONTRIBUTION));
            assert!(all[0].iter().all(|byte| *byte == 1) && all[1].iter().all(|byte| *byte == 2));
        });
    }
}

#[test]
fn clones_take_turns() {
    for group in both_kinds(3) {
        run(group, |end| {
            thread::scope(|scope| {
                for _ in 0..3 {
                    let end = end.clone();
                    scope.spawn(move || {
                        for _ in 0..50 {
                            let mine = [end.rank().0 as u8];
                            assert_eq!(end.all_gather(&mine).unwrap(), [[0], [1], [2]]);
                        }
                    });
                }
            });
        });
    }
}

#[test]
fn a_rank_that_never_calls_is_named_and_the_group_ends() {
    for group in both_kinds(4) {
        let (done, finished) = channel();
        let finished = std::sync::Mutex::new(finished);
        run(group, |end| {
            if end.rank() == Rank(2) {
                // Is there, but late: waits until the three others have their error.
                let finished = finished.lock().unwrap();
                finished.iter().take(3).for_each(drop);
                let error = end.barrier().unwrap_err();
                assert!(matches!(error, Error::Aborted { .. }), "{error}");
                return;
            }
            end.set_timeout(Duration::from_millis(300));
            let error = end.barrier().unwrap_err();
            match &error {
                Error::Timeout { ranks, .. } | Error::Aborted { ranks, .. } => {
                    assert_eq!(*ranks, [Rank(2)], "{error}");
                }
                other => panic!("{other}"),
            }
            assert!(error.to_string().contains("barrier"), "{error}");
            done.send(()).unwrap();
            // Kept until the late rank has seen the abort, and not the departure.
            let again = end.barrier().unwrap_err();
            assert!(matches!(again, Error::Aborted { .. }), "{again}");
            thread::sleep(Duration::from_millis(300));
        });
    }
}

#[test]
fn a_rank_that_leaves_frees_those_who_wait_for_it() {
    for size in [2, 5] {
        for leaver in [0, 1, size - 1] {
            for group in both_kinds(size) {
                run(group, |end| {
                    end.barrier().unwrap();
                    if end.rank().0 == leaver {
                        return;
                    }
                    let begun = Instant::now();
                    let error = end.all_gather(b"x").unwrap_err();
                    match &error {
                        // Others that saw it first may have left as well by now.
                        Error::PeerLost { ranks, .. } => assert!(!ranks.is_empty()),
                        other => panic!("{other}"),
                    }
                    assert!(begun.elapsed() < Duration::from_secs(5));
                });
            }
        }
    }
}

#[test]
fn what_was_complete_stays_complete_though_a_rank_leaves_at_once() {
    for _ in 0..20 {
        for group in both_kinds(4) {
            run(group, |end| {
                let all = end.all_gather(&vec![end.rank().0 as u8; 30_000]).unwrap();
                assert!((0..4).all(|rank| all[rank] == vec![rank as u8; 30_000]));
            });
        }
    }
}

#[test]
fn departures_are_told_once_and_can_be_asked_for() {
    for group in both_kinds(3) {
        let (send, told) = channel();
        let mut group = group;
        let subscriptions: Vec<_> = group[..2]
            .iter()
            .map(|end| {
                let (send, me) = (send.clone(), end.rank());
                let callback = move |gone| send.send((me, gone)).unwrap();
                end.liveness().subscribe(Box::new(callback))
            })
            .collect();
        drop(group.pop());
        let limit = Duration::from_secs(5);
        let mut first: Vec<_> = (0..2).map(|_| told.recv_timeout(limit).unwrap()).collect();
        first.sort();
        assert_eq!(first, [(Rank(0), Rank(2)), (Rank(1), Rank(2))]);
        for end in &group {
            assert!(end.liveness().is_gone(Rank(2)) && !end.liveness().is_gone(end.rank()));
            assert_eq!(end.liveness().departure(Rank(2)), Some(Departure::Left));
        }
        drop(subscriptions);
        drop(group);
        drop(send);
        assert_eq!(told.iter().count(), 0);
    }
}

#[test]
fn a_thread_that_panics_is_lost() {
    let mut group = Communicator::local(2).unwrap();
    let one = group.pop().unwrap();
    let zero = group.pop().unwrap();
    let panics = thread::spawn(move || {
        let _one = one;
        panic!("on purpose");
    });
    let error = zero.barrier().unwrap_err();
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
    assert!(panics.join().is_err());
    assert_eq!(zero.liveness().departure(Rank(1)), Some(Departure::Lost));
}

#[test]
fn settings_that_differ_are_named_with_both_values_on_every_rank() {
    for group in both_kinds(4) {
        run(group, |end| {
            let hidden = if end.rank() == Rank(2) { 4096 } else { 7168 };
            let settings = [
                ("num_experts", "8".to_owned()),
                ("hidden", hidden.to_string()),
            ];
            end.check_agreement(&settings[..1]).unwrap();
            let error = end.check_agreement(&settings).unwrap_err();
            let Error::SettingsDiffer {
                setting,
                this_rank,
                this_value,
                other_rank,
                other_value,
            } = &error
            else {
                panic!("{error}");
            };
            assert_eq!((&**setting, *this_rank), ("hidden", end.rank()));
            let other = if end.rank() == Rank(2) {
                Rank(0)
            } else {
                Rank(2)
            };
            assert_eq!(*other_rank, other);
            let mut values = [this_value.as_str(), other_value.as_str()];
            values.sort_unstable();
            assert_eq!(values, ["4096", "7168"]);
            // The group itself is unharmed.
            end.barrier().unwrap();
        });
    }
}

#[test]
fn shared_passes_pointers_between_threads_only() {
    let group = Communicator::local(3).unwrap();
    let pointers = run(group, |end| {
        assert!(end.in_process());
        let mine = Arc::new(end.rank().0);
        let all = end.shared(mine.clone()).unwrap();
        assert!(Arc::ptr_eq(&all[end.rank().0], &mine));
        assert_eq!(all.iter().map(|v| **v).collect::<Vec<_>>(), [0, 1, 2]);
        all.iter()
            .map(|v| Arc::as_ptr(v) as usize)
            .collect::<Vec<_>>()
    });
    assert!(pointers.iter().all(|list| *list == pointers[0]));

    run(super::tcp_group(2), |end| {
        assert!(!end.in_process());
        let error = end.shared(Arc::new(1)).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    });
}

#[test]
fn different_kinds_of_calls_that_meet_are_an_error_on_all() {
    run(Communicator::local(2).unwrap(), |end| {
        let error = match end.rank().0 {
            0 => end.shared(Arc::new(1_u8)).unwrap_err(),
            _ => end.barrier().unwrap_err(),
        };
        assert!(matches!(error, Error::Bootstrap { .. }), "{error}");
    });
    run(Communicator::local(2).unwrap(), |end| {
        let error = match end.rank().0 {
            0 => end.shared(Arc::new(1_u8)).unwrap_err(),
            _ => end.shared(Arc::new(1_u16)).unwrap_err(),
        };
        assert!(matches!(error, Error::Bootstrap { .. }), "{error}");
    });
}

#[test]
fn group_sizes_out_of_range_are_refused() {
    for size in [0, 65_537] {
        let error = Communicator::local(size).unwrap_err().to_string();
        assert!(error.contains(&size.to_string()), "{error}");
    }
}

/// A caller's transport: the in-process one, with a fault on demand.
struct Relay {
    inner: Communicator,
    fault: fn(&mut Vec<Vec<u8>>),
}

impl AllGather for Relay {
    fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut all = self.inner.all_gather(mine)?;
        (self.fault)(&mut all);
        Ok(all)
    }
}

#[test]
fn a_callers_transport_is_used_and_checked() {
    let over = |fault: fn(&mut Vec<Vec<u8>>)| {
        run(Communicator::local(2).unwrap(), move |inner| {
            let rank = inner.rank().0;
            let relay = Box::new(Relay { inner, fault });
            let end = Communicator::from_all_gather(rank, 2, relay).unwrap();
            assert_eq!(
                (end.rank(), end.size(), end.in_process()),
                (Rank(rank), 2, false)
            );
            end.all_gather(&[rank as u8])
        })
    };
    for result in over(|_| {}) {
        assert_eq!(result.unwrap(), [[0], [1]]);
    }
    for result in over(|all| all.truncate(1)) {
        assert!(
            result
                .unwrap_err()
                .to_string()
                .contains("1 contributions for 2 ranks")
        );
    }
    for result in over(|all| all.reverse()) {
        assert!(result.unwrap_err().to_string().contains("order"));
    }
    let relay = Relay {
        inner: Communicator::local(1).unwrap().remove(0),
        fault: |_| {},
    };
    assert!(Communicator::from_all_gather(2, 2, Box::new(relay)).is_err());
}
