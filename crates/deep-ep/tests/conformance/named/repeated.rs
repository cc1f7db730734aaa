//! Many calls with equal routing: nothing of an earlier call is taken for one of this.

use std::time::Duration;

use deep_ep::{
    Buffer, CombineInput, Communicator, DispatchInput, Landing, LowLatencyCombineInput,
    LowLatencyConfig, LowLatencyDispatchInput, Routes, Tensor, TopK,
};
use half::bf16;

use crate::{
    launch::{Launch, Params, config, run},
    random::Random,
};

/// Tokens of each rank, each of which goes to all ranks.
const TOKENS: usize = 3;
/// Elements of a low-latency row; high-throughput rows have half as many, of 4 bytes.
const HIDDEN: usize = 8;

/// Now and then one of the ranks is late.
struct Delays {
    random: Random,
    ranks: usize,
    rank: usize,
}

impl Delays {
    fn maybe(&mut self) {
        // All ranks draw the same numbers.
        let late = self.random.below(self.ranks) == self.rank;
        let (chance, micros) = (self.random.below(100), self.random.below(300));
        if late && chance < 10 {
            std::thread::sleep(Duration::from_micros(micros as u64));
        }
    }
}

/// Calls by turns, with payloads that carry the number of the call.
pub(crate) fn numbered_calls(communicator: &Communicator, params: &Params) {
    let ranks = communicator.size();
    let config = deep_ep::BufferConfig {
        low_latency: Some(LowLatencyConfig {
            max_tokens_per_rank: TOKENS,
            hidden: HIDDEN,
            num_experts: ranks,
            exact_top_k: None,
        }),
        ..config()
    };
    let buffer = Buffer::new(communicator, config).expect("a buffer");
    let seed = params.get("seed").unwrap_or(1);
    let mut delays = Delays {
        random: Random::new(&[seed]),
        ranks,
        rank: buffer.rank().0,
    };
    // The same on all ranks, so that they make the same calls.
    let mut kinds = Random::new(&[seed, 1]);
    let calls = params.get("calls").expect("a number of calls");
    let mut call = 0;
    while call < calls {
        let kind = kinds.below(4);
        match kind {
            0 | 1 => {
                let landing = if kind == 0 {
                    Landing::Loan
                } else {
                    Landing::Caller
                };
                high_throughput(&buffer, landing, call, &mut delays);
            }
            _ => low_latency(&buffer, call, &mut delays),
        }
        call += 2;
    }
    assert_eq!(buffer.statistics().calls, calls as u64);
}

/// Every token to every rank.
fn choices(ranks: usize) -> Vec<i64> {
    (0..TOKENS * ranks).map(|i| (i % ranks) as i64).collect()
}

fn high_throughput(buffer: &Buffer, landing: Landing, call: usize, delays: &mut Delays) {
    let (rank, ranks) = (buffer.rank().0, buffer.num_ranks());
    let row = |call: usize, rank: usize, token: usize| [call, rank, token, !call].map(|n| n as i32);
    let x: Vec<i32> = (0..TOKENS)
        .flat_map(|token| row(call, rank, token))
        .collect();
    let idx = choices(ranks);
    let idx = Tensor::new(&idx, &[TOKENS, ranks]).unwrap();
    let routes = Routes::TopK {
        topk: TopK { idx, weights: None },
        num_experts: ranks,
    };
    let input = DispatchInput::new(Tensor::new(&x, &[TOKENS, 4]).unwrap(), routes);
    delays.maybe();
    let pending = buffer
        .dispatch(DispatchInput { landing, ..input })
        .expect("accepted");
    delays.maybe();
    let received = pending.finish().expect("every rank dispatches");
    let found = received.x.as_slice::<i32>().unwrap();
    let expected: Vec<i32> = (0..ranks)
        .flat_map(|source| (0..TOKENS).flat_map(move |token| row(call, source, token)))
        .collect();
    assert_eq!(found, expected, "rows of call {call} on rank {rank}");

    // Small numbers, so that sums are exact.
    let value = |owner: usize, token: usize| (call % 1000 * 64 + owner * 8 + token) as f32;
    let y =
        (0..ranks).flat_map(|owner| (0..TOKENS).flat_map(move |token| [value(owner, token); 4]));
    let y: Vec<f32> = y.collect();
    delays.maybe();
    let y = Tensor::new(&y, &[ranks * TOKENS, 4]).unwrap();
    let pending = buffer
        .combine(CombineInput::new(y, &received.handle))
        .expect("accepted");
    delays.maybe();
    let sums = pending.finish().expect("every rank combines").x;
    let expected: Vec<f32> = (0..TOKENS)
        .flat_map(|token| [value(rank, token) * ranks as f32; 4])
        .collect();
    assert_eq!(
        sums.as_slice::<f32>().unwrap(),
        expected,
        "sums of call {call} on rank {rank}"
    );
}

fn low_latency(buffer: &Buffer, call: usize, delays: &mut Delays) {
    let (rank, ranks) = (buffer.rank().0, buffer.num_ranks());
    let row = |rank: usize, token: usize| {
        let half = |n: usize| bf16::from_bits(n as u16);
        [half(call), half(call >> 16), half(rank), half(token)].repeat(HIDDEN / 4)
    };
    let x: Vec<bf16> = (0..TOKENS).flat_map(|token| row(rank, token)).collect();
    let x = Tensor::new(&x, &[TOKENS, HIDDEN]).unwrap();
    let idx = choices(ranks);
    let idx = Tensor::new(&idx, &[TOKENS, ranks]).unwrap();
    let input = LowLatencyDispatchInput::new(x, idx, TOKENS, ranks);
    delays.maybe();
    let pending = buffer.low_latency_dispatch(input).expect("accepted");
    delays.maybe();
    let received = pending.finish().expect("every rank dispatches");
    let found = received.x.as_slice::<bf16>().unwrap();
    let expected: Vec<bf16> = (0..ranks)
        .flat_map(|source| (0..TOKENS).flat_map(move |token| row(source, token)))
        .collect();
    let bits = bytemuck::cast_slice::<bf16, u16>;
    assert_eq!(
        bits(found),
        bits(&expected),
        "low-latency rows of call {call} on rank {rank}"
    );

    // Numbers and sums that bf16 has exactly.
    let value =
        |owner: usize, token: usize| bf16::from_f32(((call / 2 + owner * 3 + token) % 32) as f32);
    let y = (0..ranks)
        .flat_map(|owner| (0..TOKENS).flat_map(move |token| [value(owner, token); HIDDEN]));
    let y: Vec<bf16> = y.collect();
    let y = Tensor::new(&y, &[1, ranks * TOKENS, HIDDEN]).unwrap();
    let weights = vec![1f32; TOKENS * ranks];
    let weights = Tensor::new(&weights, &[TOKENS, ranks]).unwrap();
    let input = LowLatencyCombineInput::new(y, idx, weights, &received.handle);
    delays.maybe();
    let pending = buffer.low_latency_combine(input).expect("accepted");
    delays.maybe();
    let sums = pending.finish().expect("every rank combines");
    let expected: Vec<f32> = (0..TOKENS)
        .flat_map(|token| [value(rank, token).to_f32() * ranks as f32; HIDDEN])
        .collect();
    let sums: Vec<f32> = sums
        .as_slice::<bf16>()
        .unwrap()
        .iter()
        .map(|x| x.to_f32())
        .collect();
    assert_eq!(
        sums, expected,
        "low-latency sums of call {call} on rank {rank}"
    );
}

/// The same loan is filled and combined again and again while other ranks may still read it.
pub(crate) fn one_loan(communicator: &Communicator, params: &Params) {
    let buffer = Buffer::new(communicator, config()).expect("a buffer");
    let (rank, ranks) = (buffer.rank().0, buffer.num_ranks());
    let mut delays = Delays {
        random: Random::new(&[5]),
        ranks,
        rank,
    };
    let idx = choices(ranks);
    let idx = Tensor::new(&idx, &[TOKENS, ranks]).unwrap();
    let routes = Routes::TopK {
        topk: TopK { idx, weights: None },
        num_experts: ranks,
    };
    let x = vec![0f32; TOKENS * 4];
    let x = Tensor::new(&x, &[TOKENS, 4]).unwrap();
    let dispatched = buffer.dispatch(DispatchInput::new(x, routes)).unwrap();
    let mut received = dispatched.finish().unwrap();
    for call in 0..params.get("calls").expect("a number of calls") {
        let rows = received.x.as_mut_slice::<f32>().expect("readers finish");
        rows.fill((call * (rank + 1)) as f32);
        let input = CombineInput::new(&received.x, &received.handle);
        let pending = buffer.combine(input).expect("accepted");
        delays.maybe();
        let sums = pending.finish().expect("every rank combines").x;
        let sum = (call * ranks * (ranks + 1) / 2) as f32;
        let right = sums.as_slice::<f32>().unwrap().iter().all(|&x| x == sum);
        assert!(
            right,
            "sums of call {call} on rank {rank} are not {sum}: {sums:?}"
        );
    }
}

#[test]
fn a_loan_is_written_again_only_when_it_was_read() {
    let params = Params::default().with("calls", 2_000);
    run(Launch::Threads, 3, "one_loan", params.clone());
    run(Launch::Processes, 2, "one_loan", params);
}

#[test]
fn nothing_is_stale_in_10_000_calls_with_late_ranks() {
    let params = Params::default().with("calls", 10_000);
    run(Launch::Threads, 3, "numbered_calls", params.clone());
    run(
        Launch::Processes,
        2,
        "numbered_calls",
        params.with("seed", 2),
    );
}

#[test]
fn nothing_is_stale_with_more_ranks_than_cores() {
    let params = Params::default().with("calls", 1_000).with("seed", 3);
    run(Launch::Threads, 8, "numbered_calls", params);
}
