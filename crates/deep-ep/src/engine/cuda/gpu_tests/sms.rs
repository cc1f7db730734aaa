//! A call uses no more SMs than it was allowed, all of its launches taken together.

use super::{Rank, Setup, run};
use crate::{
    buffer::{
        BufferConfig, CombineInput, CombineOutput, DispatchHandle, DispatchInput, DispatchOutput,
        Landing, Routes, TopK,
    },
    dtype::DType,
    tensor::{OwnedTensor, Tensor},
};

const TOKENS: usize = 768;
/// f32 values of a row.
const HIDDEN: usize = 1024;
const TOP_K: usize = 2;
const LOCAL: usize = 4;

/// The experts that a token chooses.
fn choices(ranks: usize, rank: usize, token: usize) -> [i64; TOP_K] {
    let experts = ranks * LOCAL;
    let first = (rank * 7 + token * 3) % experts;
    [
        first as i64,
        ((first + 1 + token % (experts - 1)) % experts) as i64,
    ]
}

/// The ranks that a token goes to.
fn destinations(ranks: usize, rank: usize, token: usize) -> Vec<usize> {
    let mut to = choices(ranks, rank, token)
        .map(|expert| expert as usize / LOCAL)
        .to_vec();
    to.sort_unstable();
    to.dedup();
    to
}

/// Small integers, so that sums are exact.
fn value(rank: usize, token: usize, h: usize) -> f32 {
    (rank * 100_000 + token * 64 + h % 61) as f32
}

/// A way to dispatch.
#[derive(Debug, Clone, Copy)]
struct Way {
    landing: Landing,
    worst: bool,
    along_handle: bool,
}

const fn way(landing: Landing, worst: bool, along_handle: bool) -> Way {
    Way {
        landing,
        worst,
        along_handle,
    }
}

const WAYS: [Way; 6] = [
    way(Landing::Loan, false, false),
    way(Landing::Caller, false, false),
    way(Landing::Loan, true, false),
    way(Landing::Caller, true, false),
    way(Landing::Loan, false, true),
    way(Landing::Caller, false, true),
];

struct Batch<'a> {
    rank: &'a Rank,
    x: OwnedTensor,
    idx: OwnedTensor,
    sums: OwnedTensor,
    handle: Option<DispatchHandle>,
}

impl<'a> Batch<'a> {
    fn new(rank: &'a Rank) -> Self {
        let x: Vec<f32> = (0..TOKENS * HIDDEN)
            .map(|i| value(rank.rank, i / HIDDEN, i % HIDDEN))
            .collect();
        let idx: Vec<i64> = (0..TOKENS)
            .flat_map(|token| choices(rank.ranks, rank.rank, token))
            .collect();
        let up = |tensor: Tensor<'_>| rank.gpu.upload(&tensor, &rank.stream).unwrap();
        Self {
            rank,
            x: up(Tensor::new(&x, &[TOKENS, HIDDEN]).unwrap()),
            idx: up(Tensor::new(&idx, &[TOKENS, TOP_K]).unwrap()),
            sums: rank
                .gpu
                .zeros(DType::F32, &[TOKENS, HIDDEN], &rank.stream)
                .unwrap(),
            handle: None,
        }
    }

    /// Dispatches, and combines what came. SMs of the two calls.
    fn call(&mut self, way: Way, num_sms: usize) -> [u32; 2] {
        let rank = self.rank;
        let handle = self.handle.clone();
        let routes = match handle.as_ref().filter(|_| way.along_handle) {
            Some(handle) => Routes::Handle(handle),
            None => Routes::TopK {
                topk: TopK {
                    idx: self.idx.as_tensor(),
                    weights: None,
                },
                num_experts: rank.ranks * LOCAL,
            },
        };
        let input = DispatchInput {
            landing: way.landing,
            num_worst_tokens: way.worst.then_some(rank.ranks * TOKENS),
            num_sms: Some(num_sms),
            stream: rank.stream.as_stream(),
            ..DispatchInput::new(self.x.as_tensor(), routes)
        };
        rank.buffer.take_seen_sms().unwrap();
        rank.communicator.barrier().unwrap();
        let mut pending = rank.buffer.dispatch(input).unwrap();
        match way.landing {
            Landing::Loan => {
                let done = pending.finish().unwrap();
                rank.settle();
                let dispatch = rank.buffer.take_seen_sms().unwrap();
                self.check_rows(&done.x.as_tensor());
                let input = CombineInput::new(&done.x, &done.handle);
                let combine = combine(rank, input, num_sms, &mut self.sums);
                self.check_sums();
                if !way.worst {
                    self.handle = Some(done.handle);
                }
                [dispatch, combine]
            }
            Landing::Caller => {
                let rows = pending.counts().unwrap().output_rows;
                let zeros = |dtype, columns| rank.gpu.zeros(dtype, &[rows, columns], &rank.stream);
                let mut x = zeros(DType::F32, HIDDEN).unwrap();
                let mut idx = zeros(DType::I64, TOP_K).unwrap();
                let mut out = DispatchOutput::new(x.as_tensor_mut());
                out.topk_idx = (!way.along_handle).then(|| idx.as_tensor_mut());
                let (_, handle) = pending.finish_into(out).unwrap();
                rank.settle();
                let dispatch = rank.buffer.take_seen_sms().unwrap();
                let input = CombineInput::new(x.as_tensor(), &handle);
                let combine = combine(rank, input, num_sms, &mut self.sums);
                self.check_rows(&x.as_tensor());
                self.check_sums();
                [dispatch, combine]
            }
        }
    }

    /// Rows in the order of their sources.
    #[track_caller]
    fn check_rows(&self, rows: &Tensor<'_>) {
        let (me, ranks) = (self.rank.rank, self.rank.ranks);
        let rows = self.rank.gpu.download(rows, &self.rank.stream).unwrap();
        let mut rows = rows.as_slice::<f32>().unwrap().chunks_exact(HIDDEN);
        for source in 0..ranks {
            for token in (0..TOKENS).filter(|&t| destinations(ranks, source, t).contains(&me)) {
                let row = rows.next().expect("as many rows as tokens come");
                let right = (0..HIDDEN).all(|h| row[h] == value(source, token, h));
                assert!(right, "token {token} of rank {source}");
            }
        }
    }

    #[track_caller]
    fn check_sums(&self) {
        let (me, ranks) = (self.rank.rank, self.rank.ranks);
        let sums = self
            .rank
            .gpu
            .download(&self.sums.as_tensor(), &self.rank.stream);
        let sums = sums.unwrap();
        let sums = sums.as_slice::<f32>().unwrap().chunks_exact(HIDDEN);
        for (token, sum) in sums.enumerate() {
            let times = destinations(ranks, me, token).len() as f32;
            let right = (0..HIDDEN).all(|h| sum[h] == times * value(me, token, h));
            assert!(right, "the sum of token {token}");
        }
    }
}

fn combine(rank: &Rank, input: CombineInput<'_>, num_sms: usize, sums: &mut OwnedTensor) -> u32 {
    let input = CombineInput {
        num_sms: Some(num_sms),
        stream: rank.stream.as_stream(),
        ..input
    };
    let out = CombineOutput::new(sums.as_tensor_mut());
    rank.buffer
        .combine(input)
        .unwrap()
        .finish_into(out)
        .unwrap();
    rank.settle();
    rank.buffer.take_seen_sms().unwrap()
}

#[test]
fn a_call_uses_no_more_sms_than_it_may() {
    let setup = Setup {
        ranks: 2,
        config: BufferConfig::default(),
        source: None,
    };
    run(1, &setup, |rank| {
        let mut batch = Batch::new(rank);
        // Memory grows and kernels are loaded before.
        for way in WAYS {
            batch.call(way, 8);
        }
        for num_sms in [4, 8, 24] {
            for way in WAYS {
                let seen = batch.call(way, num_sms);
                if rank.rank == 0 {
                    println!(
                        "{num_sms} SMs, {way:?}: dispatch used {}, combine {}",
                        seen[0], seen[1]
                    );
                }
                for seen in seen {
                    assert!(
                        (1..=num_sms as u32).contains(&seen),
                        "{way:?}: {seen} of {num_sms}"
                    );
                }
            }
        }
        rank.settle();
    });
}
