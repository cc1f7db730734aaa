//! Ranks that stay away, leave or panic.

use std::{
    panic::resume_unwind,
    rc::Rc,
    thread,
    time::{Duration, Instant},
};

use deep_ep::{Buffer, BufferConfig, Error, Rank, interrupt};

use super::{
    Meeting, on_ends, on_ranks,
    player::Cast,
    work::{self, Kind, STEPS},
};

const RANKS: usize = 4;
const VICTIM: usize = 3;

fn config(timeout: Duration) -> BufferConfig {
    BufferConfig {
        timeout,
        ..work::config(RANKS)
    }
}

/// Does rounds until the first error; the victim stops before step `stop` of the second round and
/// stays until the others are done.
fn errors_when_the_victim_stops_at(kind: Kind, stop: &'static str) -> Vec<(Error, Duration)> {
    let done = Meeting::new(RANKS);
    let outcomes = on_ranks(RANKS, &config(Duration::from_secs(2)), |buffer| {
        work::round(&buffer, kind, 1, &mut |_| ()).unwrap();
        let me = buffer.rank().0;
        let mut step = |name| {
            if me == VICTIM && name == stop {
                done.wait();
                // Ends this round without another call.
                resume_unwind(Box::new("the victim's part is over"));
            }
        };
        let start = Instant::now();
        let error = (2..).find_map(|call| work::round(&buffer, kind, call, &mut step).err());
        let took = start.elapsed();
        done.wait();
        (error.unwrap(), took)
    });
    let outcomes = outcomes.into_iter().take(VICTIM);
    outcomes.map(|outcome| outcome.unwrap()).collect()
}

#[test]
fn a_rank_that_stays_away_is_named_with_operation_and_stage_after_the_deadline() {
    thread::scope(|scope| {
        for kind in Kind::ALL {
            for stop in STEPS {
                scope.spawn(move || {
                    for (error, took) in errors_when_the_victim_stops_at(kind, stop) {
                        println!("{kind:?}, silent before {stop}: {took:?}: {error}");
                        assert_eq!(work::ranks_named(&error), [VICTIM], "{error}");
                        assert!(took < Duration::from_secs(3), "{took:?}: {error}");
                        let (Error::Timeout {
                            operation, stage, ..
                        }
                        | Error::Aborted {
                            operation, stage, ..
                        }) = &error
                        else {
                            panic!("{error}");
                        };
                        assert!(operation.contains("dispatch") || operation.contains("combine"));
                        assert!(!stage.is_empty() && stage != "unknown");
                    }
                });
            }
        }
    });
}

#[test]
fn a_rank_that_stays_away_from_a_barrier_is_named() {
    let done = Meeting::new(RANKS);
    let outcomes = on_ranks(RANKS, &config(Duration::from_millis(500)), |buffer| {
        buffer.barrier().unwrap();
        let outcome = (buffer.rank().0 != VICTIM).then(|| buffer.barrier().unwrap_err());
        done.wait();
        outcome
    });
    for outcome in outcomes.into_iter().take(VICTIM) {
        let error = outcome.unwrap().unwrap();
        assert_eq!(work::ranks_named(&error), [VICTIM], "{error}");
        assert!(error.to_string().contains("barrier"), "{error}");
    }
}

#[test]
fn a_rank_that_drops_its_buffer_is_named_at_once() {
    for kind in Kind::ALL {
        for also_the_end in [false, true] {
            let done = Meeting::new(RANKS);
            let outcomes = on_ends(RANKS, |end| {
                let buffer = Buffer::new(&end, config(Duration::from_secs(60))).unwrap();
                // Without its communicator too, or with that kept.
                let kept = (!also_the_end).then_some(end);
                work::round(&buffer, kind, 1, &mut |_| ()).unwrap();
                // Nobody is in the second round, which ends the group, while another is in the first.
                done.wait();
                if buffer.rank().0 == VICTIM {
                    drop(buffer);
                    done.wait();
                    return None;
                }
                let start = Instant::now();
                let error = work::round(&buffer, kind, 2, &mut |_| ()).unwrap_err();
                let took = start.elapsed();
                done.wait();
                drop(kept);
                Some((error, took))
            });
            for outcome in outcomes.into_iter().take(VICTIM) {
                let (error, took) = outcome.unwrap().unwrap();
                assert_eq!(work::ranks_named(&error), [VICTIM], "{error}");
                assert!(took < Duration::from_secs(2), "{took:?}: {error}");
            }
        }
    }
}

/// Who gives up on a rank that is gone does not name others that have not come yet either.
#[test]
fn ranks_that_are_merely_late_are_not_named() {
    for kind in Kind::ALL {
        let done = Meeting::new(RANKS);
        let outcomes = on_ranks(RANKS, &config(Duration::from_secs(60)), |buffer| {
            work::round(&buffer, kind, 1, &mut |_| ()).unwrap();
            done.wait();
            let me = buffer.rank().0;
            if me == VICTIM {
                drop(buffer);
                done.wait();
                return None;
            }
            // Rank 0 is alone with the loss.
            if me != 0 {
                thread::sleep(Duration::from_millis(100));
            }
            let error = work::round(&buffer, kind, 2, &mut |_| ()).unwrap_err();
            done.wait();
            Some(error)
        });
        for outcome in outcomes.into_iter().take(VICTIM) {
            let error = outcome.unwrap().unwrap();
            assert_eq!(work::ranks_named(&error), [VICTIM], "{kind:?}: {error}");
        }
    }
}

#[test]
fn a_rank_that_panics_between_any_two_steps_is_named_at_once() {
    for kind in Kind::ALL {
        for stop in STEPS {
            let outcomes = on_ranks(RANKS, &config(Duration::from_secs(60)), |buffer| {
                work::round(&buffer, kind, 1, &mut |_| ()).unwrap();
                let start = Instant::now();
                let me = buffer.rank().0;
                let mut step = |name| {
                    if me == VICTIM && name == stop {
                        resume_unwind(Box::new("a panic without its message"));
                    }
                };
                let error =
                    (2..).find_map(|call| work::round(&buffer, kind, call, &mut step).err());
                (error.unwrap(), start.elapsed())
            });
            for outcome in outcomes.into_iter().take(VICTIM) {
                let (error, took) = outcome.unwrap();
                println!("{kind:?}, panics before {stop}: {took:?}: {error}");
                assert_eq!(work::ranks_named(&error), [VICTIM], "{error}");
                assert!(took < Duration::from_secs(2), "{took:?}: {error}");
            }
        }
    }
}

/// A deadline that passes ends one group, and neither the process nor its GPU.
#[test]
fn after_a_deadline_new_buffers_work_in_the_same_process() {
    for kind in Kind::ALL {
        for (error, took) in errors_when_the_victim_stops_at(kind, STEPS[0]) {
            assert_eq!(work::ranks_named(&error), [VICTIM], "{error}");
            assert!(took < Duration::from_secs(3), "{took:?}: {error}");
        }
        let outcomes = on_ranks(RANKS, &config(Duration::from_secs(10)), |buffer| {
            for (call, kind) in Kind::ALL.into_iter().cycle().take(9).enumerate() {
                work::round(&buffer, kind, call as u64, &mut |_| ()).unwrap();
            }
        });
        outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    }
}

#[test]
fn the_deadline_comes_from_the_environment() {
    let mut players = Cast {
        timeout: "1.5",
        ..Cast::new(3, Kind::Caller)
    }
    .start();
    let start = Instant::now();
    // Rank 2 lives, and does nothing.
    for player in &mut players[..2] {
        player.go(40);
    }
    for player in &players[..2] {
        let (named, error) = player.until_error();
        let took = start.elapsed();
        assert_eq!(named, "[2]", "{error}");
        assert!(took >= Duration::from_millis(1450), "{took:?}: {error}");
        assert!(took < Duration::from_millis(2500), "{took:?}: {error}");
    }
}

#[test]
fn a_rank_that_is_asked_to_stop_ends_the_call_of_all_ranks() {
    for kind in Kind::ALL {
        let start = Instant::now();
        let done = Meeting::new(RANKS);
        let outcomes = on_ranks(RANKS, &config(Duration::from_secs(60)), |buffer| {
            work::round(&buffer, kind, 1, &mut |_| ()).unwrap();
            let me = buffer.rank().0;
            let round = || work::round(&buffer, kind, 2, &mut |_| ()).unwrap_err();
            let asked = Rc::new(move || start.elapsed() > Duration::from_millis(200));
            let error = match me {
                VICTIM => None,
                0 => Some(interrupt::with_check(asked, round)),
                _ => Some(round()),
            };
            done.wait();
            error
        });
        for outcome in outcomes.into_iter().take(VICTIM) {
            let error = outcome.unwrap().unwrap();
            assert!(
                matches!(error, Error::Aborted { by: Rank(0), .. }),
                "{error}"
            );
            assert_eq!(work::ranks_named(&error), [VICTIM], "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
