//! Offsets beyond 2^31.

use deep_ep::{
    Buffer, BufferConfig, CombineInput, CombineOutput, Communicator, DType, DispatchInput,
    LowLatencyCombineInput, LowLatencyConfig, LowLatencyDispatchInput, OwnedTensor, Rank, Routes,
    Tensor, TopK,
};
use half::bf16;

use super::buffer;
use crate::{
    launch::{Launch, Params, config, run},
    random::Random,
};

const HIDDEN: usize = 7168;
/// Elements from one row of the input to the next: rows overlap, and each is different.
const STEP: usize = 8;

/// Memory for the overlapping rows of `tokens` tokens of `rank`.
fn overlapping(rank: usize, tokens: usize) -> Vec<bf16> {
    let mut random = Random::new(&[rank, tokens]);
    let bits = (0..tokens * STEP + HIDDEN).map(|_| bf16::from_bits(random.next() as u16 & 0x7f7f));
    bits.collect()
}

fn rows(memory: &[bf16], tokens: usize) -> Tensor<'_> {
    Tensor::strided(memory, &[tokens, HIDDEN], &[STEP, 1]).expect("as long as the shape")
}

/// All tokens go to rank 0, which returns them as they are.
pub(crate) fn all_rows_to_one_rank(communicator: &Communicator, params: &Params) {
    let (me, ranks) = (communicator.rank(), communicator.size());
    let tokens = params.get("tokens").expect("tokens of a rank");
    let buffer = buffer(communicator);
    let memory = overlapping(me.0, tokens);
    let x = rows(&memory, tokens);
    let idx = vec![0i32; tokens];
    let topk = TopK {
        idx: Tensor::new(&idx, &[tokens, 1]).unwrap(),
        weights: None,
    };
    let routes = Routes::TopK {
        topk,
        num_experts: ranks,
    };
    let received = buffer
        .dispatch(DispatchInput::new(x, routes))
        .unwrap()
        .finish()
        .unwrap();
    if me == Rank(0) {
        assert_eq!(received.counts.rows, Some(ranks * tokens));
        for source in 0..ranks {
            let memory = overlapping(source, tokens);
            let sent = rows(&memory, tokens);
            for token in 0..tokens {
                let found = received.x.as_tensor().row(source * tokens + token);
                assert!(
                    found == sent.row(token),
                    "token {token} of rank {source} differs"
                );
            }
        }
        let token = received.handle.recv_src_idx().as_slice::<i32>().unwrap()[ranks * tokens - 1];
        assert_eq!(token as usize, tokens - 1);
    } else {
        assert_eq!(received.counts.rows, Some(0));
    }
    let pending = buffer
        .combine(CombineInput::new(&received.x, &received.handle))
        .unwrap();
    // One after the other, so that the sums of one rank only are in memory.
    let mut pending = Some(pending);
    for turn in 0..ranks {
        if turn == me.0 {
            let mut sums = OwnedTensor::zeros(DType::Bf16, &[tokens, HIDDEN]).unwrap();
            let out = CombineOutput::new(sums.as_tensor_mut());
            pending.take().expect("one turn").finish_into(out).unwrap();
            for token in 0..tokens {
                let right = sums.as_tensor().row(token) == x.row(token);
                assert!(right, "the sum of token {token} of rank {me} differs");
            }
        }
        communicator.barrier().unwrap();
    }
}

#[test]
#[ignore = "needs 7 GB of memory, and release mode for its speed"]
fn one_rank_receives_320_000_rows_of_7168_bf16() {
    let params = Params::default().with("tokens", 80_000);
    run(Launch::Threads, 4, "all_rows_to_one_rank", params);
}

#[test]
fn one_rank_receives_all_rows() {
    let params = Params::default().with("tokens", 300);
    run(Launch::Threads, 4, "all_rows_to_one_rank", params);
}

/// Outputs of more than 2^31 elements, of which few are used.
pub(crate) fn many_experts(communicator: &Communicator, _: &Params) {
    const CAPACITY: usize = 2048;
    const LOCAL: usize = 80;
    const TOKENS: usize = 5;
    let (me, ranks) = (communicator.rank().0, communicator.size());
    let low_latency = LowLatencyConfig {
        max_tokens_per_rank: CAPACITY,
        hidden: HIDDEN,
        num_experts: LOCAL * ranks,
        exact_top_k: None,
    };
    let config = BufferConfig {
        low_latency: Some(low_latency),
        ..config()
    };
    let buffer = Buffer::new(communicator, config).unwrap();
    let memory = overlapping(me, TOKENS);
    // The last expert of each rank.
    let idx: Vec<i64> = (0..TOKENS)
        .flat_map(|_| (1..=ranks).map(|rank| (rank * LOCAL - 1) as i64))
        .collect();
    let idx = Tensor::new(&idx, &[TOKENS, ranks]).unwrap();
    let x = rows(&memory, TOKENS);
    let input = LowLatencyDispatchInput::new(x, idx, CAPACITY, LOCAL * ranks);
    let received = buffer
        .low_latency_dispatch(input)
        .unwrap()
        .finish()
        .unwrap();
    let counts = received.recv_count.as_slice::<i32>().unwrap();
    assert_eq!(counts[LOCAL - 1] as usize, ranks * TOKENS);
    let first = (LOCAL - 1) * ranks * CAPACITY;
    assert!(first * HIDDEN > 1 << 31);
    let mut y = buffer
        .next_low_latency_combine_buffer(&received.handle, HIDDEN)
        .unwrap();
    let (found, to) = (
        received.x.as_slice::<bf16>().unwrap(),
        y.as_mut_slice::<bf16>().unwrap(),
    );
    for source in 0..ranks {
        let memory = overlapping(source, TOKENS);
        for token in 0..TOKENS {
            let at = (first + source * TOKENS + token) * HIDDEN;
            let row = &memory[token * STEP..][..HIDDEN];
            assert!(
                found[at..][..HIDDEN] == *row,
                "token {token} of rank {source} differs"
            );
            to[at..][..HIDDEN].copy_from_slice(row);
        }
    }
    let mut weights = vec![0f32; TOKENS * ranks];
    weights
        .iter_mut()
        .step_by(ranks)
        .for_each(|weight| *weight = 1.0);
    let weights = Tensor::new(&weights, &[TOKENS, ranks]).unwrap();
    let input = LowLatencyCombineInput::new(&y, idx, weights, &received.handle);
    let sums = buffer.low_latency_combine(input).unwrap().finish().unwrap();
    for token in 0..TOKENS {
        assert!(
            sums.as_tensor().row(token) == x.row(token),
            "the sum of token {token} differs"
        );
    }
}

#[test]
fn low_latency_outputs_reach_beyond_2_pow_31_elements() {
    run(Launch::Threads, 2, "many_experts", Params::default());
}
