//! A rank killed with SIGKILL at every stage of a call.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{
    player::{Cast, free_port},
    work::{Kind, STEPS},
};

/// Where everybody is when the rank is killed.
struct Moment {
    what: &'static str,
    /// Steps that all ranks have completed.
    all: usize,
    /// Further steps that the victim was let do. It cannot complete a finish without the others.
    victim: usize,
    /// Further steps that the others were let do.
    others: usize,
}

const fn moment(what: &'static str, all: usize, victim: usize, others: usize) -> Moment {
    Moment {
        what,
        all,
        victim,
        others,
    }
}

const MOMENTS: [Moment; 13] = [
    moment("before its first call", 0, 0, 0),
    moment("before its first call, others in finish", 0, 0, 2),
    moment("dispatch begun, others not", 0, 1, 0),
    moment("dispatch begun, others in finish", 0, 1, 2),
    moment("in the finish of dispatch, others not begun", 0, 2, 0),
    moment("in the finish of dispatch, others begun", 1, 1, 0),
    moment("before combine", 2, 0, 0),
    moment("before combine, others in it", 2, 0, 2),
    moment("combine begun, others not", 2, 1, 0),
    moment("combine begun, others in it", 2, 1, 2),
    moment("in combine, others not begun", 2, 2, 0),
    moment("in combine, others begun", 3, 1, 0),
    moment("between two rounds, others in the next", 4, 0, 2),
];

fn kill_at_every_moment(kind: Kind) {
    let ranks = 3;
    for (i, moment) in MOMENTS.iter().enumerate() {
        let victim = i % ranks;
        let mut players = Cast::new(ranks, kind).start();
        for step in 1..=moment.all {
            players.iter_mut().for_each(|player| player.go(1));
            for player in &mut players {
                player.expect_at(STEPS[step % STEPS.len()]);
            }
        }
        let mut dead = players.remove(victim);
        dead.go(moment.victim);
        players
            .iter_mut()
            .for_each(|player| player.go(moment.others));
        thread::sleep(Duration::from_millis(60));
        let killed = Instant::now();
        dead.child.kill().unwrap();
        players.iter_mut().for_each(|player| player.go(40));
        for player in &players {
            let (named, error) = player.until_error();
            let took = killed.elapsed();
            println!(
                "{kind:?}, rank {victim} killed {}: {took:?}: {error}",
                moment.what
            );
            assert_eq!(named, format!("[{victim}]"), "{}: {error}", moment.what);
            assert!(took < Duration::from_secs(2), "{}: {took:?}", moment.what);
        }
        let port = free_port();
        for (rank, player) in players.iter_mut().enumerate() {
            player.tell(&format!("regroup {rank} {} {port}\n", ranks - 1));
        }
        for player in &players {
            assert_eq!(player.hear(), "works");
        }
    }
}

#[test]
fn loans_a_killed_rank_is_named_at_once_and_survivors_regroup() {
    kill_at_every_moment(Kind::Loan);
}

#[test]
fn callers_memory_a_killed_rank_is_named_at_once_and_survivors_regroup() {
    kill_at_every_moment(Kind::Caller);
}

#[test]
fn low_latency_a_killed_rank_is_named_at_once_and_survivors_regroup() {
    kill_at_every_moment(Kind::LowLatency);
}

/// Survivors that get their errors one after the other, each leaving at once, still all name the
/// rank that died and not one that left because of it.
#[test]
fn a_survivor_that_leaves_is_not_taken_for_the_dead() {
    for run in 0..6 {
        let mut players = Cast::new(5, Kind::ALL[run % 3]).start();
        let victim = run % 5;
        let mut dead = players.remove(victim);
        players.iter_mut().for_each(|player| player.go(40));
        dead.child.kill().unwrap();
        for player in &players {
            assert_eq!(player.until_error().0, format!("[{victim}]"));
        }
    }
}
