//! Low-latency calls of a buffer with `enable_shrink` go on without ranks that are absent.

use std::time::{Duration, Instant};

use deep_ep::{
    BufferConfig, Error, LowLatencyCombineInput, LowLatencyConfig, LowLatencyDispatchInput, Rank,
    Tensor,
};
use half::bf16;

use super::{
    Meeting, on_ranks,
    player::Cast,
    work::{self, Kind, STEPS},
};

const RANKS: usize = 4;
const VICTIM: usize = 2;
const TIMEOUT: Duration = Duration::from_secs(1);

fn config() -> BufferConfig {
    BufferConfig {
        timeout: TIMEOUT,
        enable_shrink: true,
        ..work::config(RANKS)
    }
}

fn only_the_victim() -> Vec<bool> {
    (0..RANKS).map(|rank| rank == VICTIM).collect()
}

#[test]
fn an_absent_rank_is_masked_after_the_deadline_and_never_waited_for_again() {
    let done = Meeting::new(RANKS);
    let outcomes = on_ranks(RANKS, &config(), |buffer| {
        let round = |call| work::round(&buffer, Kind::LowLatency, call, &mut |_| ());
        round(1).unwrap();
        round(2).unwrap();
        assert_eq!(buffer.masks().unwrap(), [false; RANKS]);
        if buffer.rank().0 != VICTIM {
            let start = Instant::now();
            // Received rows are checked: none come from the victim.
            round(3).unwrap();
            let took = start.elapsed();
            assert!(took >= TIMEOUT.mul_f64(0.95), "{took:?}");
            assert!(took < TIMEOUT * 2, "{took:?}");
            assert_eq!(buffer.masks().unwrap(), only_the_victim());
            let start = Instant::now();
            for call in 4..104 {
                round(call).unwrap();
            }
            buffer.barrier().unwrap();
            assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
        }
        done.wait();
        // A rank that comes too late gets what was sent before it was masked, then misses the others
        // and goes on alone.
        if buffer.rank().0 == VICTIM {
            let start = Instant::now();
            round(3).unwrap();
            assert!(start.elapsed() < TIMEOUT * 2, "{:?}", start.elapsed());
            let others: Vec<_> = only_the_victim().iter().map(|victim| !victim).collect();
            assert_eq!(buffer.masks().unwrap(), others);
            (4..10).for_each(|call| round(call).unwrap());
            assert!(start.elapsed() < TIMEOUT * 2, "{:?}", start.elapsed());
        }
        done.wait();
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn a_barrier_masks_absent_ranks() {
    let done = Meeting::new(RANKS);
    let outcomes = on_ranks(RANKS, &config(), |buffer| {
        buffer.barrier().unwrap();
        if buffer.rank().0 != VICTIM {
            buffer.barrier().unwrap();
            assert_eq!(buffer.masks().unwrap(), only_the_victim());
            let start = Instant::now();
            buffer.barrier().unwrap();
            assert!(start.elapsed() < TIMEOUT / 2);
        }
        done.wait();
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn a_rank_that_drops_its_buffer_is_masked_without_waiting() {
    let long = BufferConfig {
        timeout: Duration::from_secs(60),
        ..config()
    };
    let done = Meeting::new(RANKS);
    let outcomes = on_ranks(RANKS, &long, |buffer| {
        work::round(&buffer, Kind::LowLatency, 1, &mut |_| ()).unwrap();
        if buffer.rank().0 == VICTIM {
            drop(buffer);
        } else {
            let start = Instant::now();
            for call in 2..20 {
                work::round(&buffer, Kind::LowLatency, call, &mut |_| ()).unwrap();
            }
            let took = start.elapsed();
            assert!(took < Duration::from_secs(3), "{took:?}");
            assert_eq!(buffer.masks().unwrap(), only_the_victim());
        }
        done.wait();
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn masks_set_by_hand_split_the_group_until_they_are_taken_back() {
    // Ranks 0 and 1 mask the victim and rank 3, and the other way round; all keep calling.
    let outcomes = on_ranks(RANKS, &config(), |buffer| {
        let me = buffer.rank().0;
        let round = |call| work::round(&buffer, Kind::LowLatency, call, &mut |_| ());
        round(1).unwrap();
        for rank in (0..RANKS).filter(|rank| (rank < &VICTIM) != (me < VICTIM)) {
            buffer.set_mask(Rank(rank), true).unwrap();
        }
        let start = Instant::now();
        (2..8).for_each(|call| round(call).unwrap());
        assert!(start.elapsed() < TIMEOUT);
        assert_eq!(
            buffer
                .masks()
                .unwrap()
                .iter()
                .filter(|&&masked| masked)
                .count(),
            2
        );
        buffer.set_mask(Rank(RANKS - 1 - me), false).unwrap();
        assert_eq!(
            buffer
                .masks()
                .unwrap()
                .iter()
                .filter(|&&masked| masked)
                .count(),
            1
        );
        buffer.clear_masks().unwrap();
        assert_eq!(buffer.masks().unwrap(), [false; RANKS]);
        (8..20).for_each(|call| round(call).unwrap());
        assert_eq!(buffer.masks().unwrap(), [false; RANKS]);
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn masks_need_enable_shrink_and_another_rank() {
    let outcomes = on_ranks(2, &work::config(2), |buffer| {
        assert!(buffer.masks().is_err() && buffer.clear_masks().is_err());
        assert!(buffer.set_mask(Rank(1 - buffer.rank().0), true).is_err());
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    let shrink = BufferConfig {
        enable_shrink: true,
        ..work::config(2)
    };
    let outcomes = on_ranks(2, &shrink, |buffer| {
        for rank in [buffer.rank(), Rank(2), Rank(usize::MAX)] {
            let error = buffer.set_mask(rank, true).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        }
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn a_killed_rank_is_masked_at_every_step_and_the_others_go_on() {
    for (i, step) in STEPS.iter().enumerate() {
        let victim = i % 3;
        let mut players = Cast {
            shrink: true,
            ..Cast::new(3, Kind::LowLatency)
        }
        .start();
        // The second round, up to this step.
        for at in 1..=STEPS.len() + i {
            players.iter_mut().for_each(|player| player.go(1));
            for player in &mut players {
                assert_eq!(player.expect_at(STEPS[at % STEPS.len()]), "000");
            }
        }
        let start = Instant::now();
        let mut dead = players.remove(victim);
        dead.child.kill().unwrap();
        dead.child.wait().unwrap();
        let mut masked = vec!['0'; 3];
        masked[victim] = '1';
        let masked: String = masked.into_iter().collect();
        // Ten rounds on, which check what they receive.
        players.iter_mut().for_each(|player| player.go(40));
        for player in &mut players {
            let masks: Vec<_> = (1..=40)
                .map(|at| player.expect_at(STEPS[(i + at) % STEPS.len()]))
                .collect();
            assert_eq!(masks.last(), Some(&masked), "killed before {step}");
        }
        assert!(start.elapsed() < Duration::from_secs(3));
    }
}

/// A rank that was masked while it was late sends into landing memory that the others use for calls
/// of another kind by then, unless it heeds that it was masked.
#[test]
fn a_masked_rank_that_comes_late_does_not_disturb_the_others() {
    const TOKENS: usize = 1024;
    const HIDDEN: usize = 512;
    const TOP_K: usize = 6;
    let experts = 2 * RANKS;
    let late = Meeting::new(RANKS);
    let done = Meeting::new(RANKS);
    let config = BufferConfig {
        low_latency: Some(LowLatencyConfig {
            max_tokens_per_rank: TOKENS,
            hidden: HIDDEN,
            num_experts: experts,
            exact_top_k: None,
        }),
        ..config()
    };
    let idx: Vec<i64> = (0..TOKENS * TOP_K)
        .map(|i| ((i / TOP_K + i % TOP_K) % experts) as i64)
        .collect();
    let idx = Tensor::new(&idx, &[TOKENS, TOP_K]).unwrap();
    let weights = vec![1f32; TOKENS * TOP_K];
    let weights = Tensor::new(&weights, &[TOKENS, TOP_K]).unwrap();
    let outcomes = on_ranks(RANKS, &config, |buffer| {
        let is_victim = buffer.rank().0 == VICTIM;
        let x = vec![bf16::from_f32(if is_victim { 777.0 } else { 1.0 }); TOKENS * HIDDEN];
        let x = Tensor::new(&x, &[TOKENS, HIDDEN]).unwrap();
        let send = || {
            let input = LowLatencyDispatchInput::new(x, idx, TOKENS, experts);
            buffer
                .low_latency_dispatch(input)
                .unwrap()
                .finish()
                .unwrap()
        };
        if is_victim {
            late.wait();
            send();
            assert_eq!(buffer.masks().unwrap().iter().filter(|&&m| m).count(), 3);
            done.wait();
            return;
        }
        let received = send();
        late.wait();
        for _ in 0..20 {
            // So that each combine has the half that the victim's dispatch would have.
            buffer.barrier().unwrap();
            let input =
                LowLatencyCombineInput::new(received.x.as_tensor(), idx, weights, &received.handle);
            let sums = buffer.low_latency_combine(input).unwrap().finish().unwrap();
            for (token, sums) in (sums.as_slice::<bf16>().unwrap().chunks_exact(HIDDEN)).enumerate()
            {
                let ids = (0..TOP_K).map(|k| idx.at::<i64>(token, k) as usize);
                let here = ids.filter(|id| id / 2 != VICTIM).count() as f32;
                assert!(sums.iter().all(|sum| sum.to_f32() == here), "token {token}");
            }
        }
        done.wait();
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
