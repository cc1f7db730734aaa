//! Batches whose contents follow from (rank, token, call), on the host and on a GPU.

use deep_ep::{
    DispatchInput, Landing, OwnedTensor, Routes, Tensor, TopK,
    cuda::{Gpu, GpuStream},
};

use crate::ranks::Rank;

pub(crate) const TOP_K: usize = 2;
/// Words of a row.
pub(crate) const WORDS: usize = 4;
/// Experts of a rank.
pub(crate) const LOCAL: usize = 4;

/// The experts that a token chooses.
pub(crate) fn choices(ranks: usize, rank: usize, token: usize, call: usize) -> [i64; TOP_K] {
    let experts = ranks * LOCAL;
    let first = (rank * 7 + token * 3 + call) % experts;
    [
        first as i64,
        ((first + 1 + token % (experts - 1)) % experts) as i64,
    ]
}

/// The row of a token.
pub(crate) fn row(rank: usize, token: usize, call: usize) -> [i32; WORDS] {
    [call as i32, rank as i32, token as i32, !(call as i32)]
}

/// The inputs of a rank on its GPU, with room for `capacity` tokens.
pub(crate) struct Batch {
    pub(crate) x: OwnedTensor,
    pub(crate) idx: OwnedTensor,
    capacity: usize,
}

/// The same on the host: tokens from `tokens` on choose nothing.
fn host(rank: &Rank, capacity: usize, tokens: usize, call: usize) -> (Vec<i32>, Vec<i64>) {
    let x = (0..capacity).flat_map(|token| row(rank.rank, token, call));
    let idx = (0..capacity).flat_map(|token| match token < tokens {
        true => choices(rank.ranks, rank.rank, token, call),
        false => [-1; TOP_K],
    });
    (x.collect(), idx.collect())
}

impl Batch {
    pub(crate) fn new(rank: &Rank, capacity: usize, tokens: usize, call: usize) -> Self {
        let (x, idx) = host(rank, capacity, tokens, call);
        let up = |tensor: &Tensor<'_>| rank.gpu.upload(tensor, &rank.stream).expect("room");
        Self {
            x: up(&Tensor::new(&x, &[capacity, WORDS]).expect("whole rows")),
            idx: up(&Tensor::new(&idx, &[capacity, TOP_K]).expect("whole rows")),
            capacity,
        }
    }

    /// Other contents in the same memory.
    pub(crate) fn change(&mut self, rank: &Rank, tokens: usize, call: usize) {
        let (x, idx) = host(rank, self.capacity, tokens, call);
        let put = |from: Tensor<'_>, to: &mut OwnedTensor| {
            rank.gpu
                .upload_into(&from, &mut to.as_tensor_mut(), &rank.stream)
                .expect("the same shape");
        };
        put(
            Tensor::new(&x, &[self.capacity, WORDS]).expect("whole rows"),
            &mut self.x,
        );
        put(
            Tensor::new(&idx, &[self.capacity, TOP_K]).expect("whole rows"),
            &mut self.idx,
        );
    }

    /// A dispatch of it in worst-case mode.
    pub(crate) fn input<'a>(&'a self, rank: &Rank, landing: Landing) -> DispatchInput<'a> {
        let topk = TopK {
            idx: self.idx.as_tensor(),
            weights: None,
        };
        let routes = Routes::TopK {
            topk,
            num_experts: rank.ranks * LOCAL,
        };
        DispatchInput {
            landing,
            num_worst_tokens: Some(rank.ranks * self.capacity),
            stream: rank.stream.as_stream(),
            ..DispatchInput::new(self.x.as_tensor(), routes)
        }
    }
}

/// Rows that came, with the indices of worst-case outputs, against what every rank sent.
#[track_caller]
pub(crate) fn check(rank: &Rank, x: &Tensor<'_>, idx: &Tensor<'_>, tokens: usize, call: usize) {
    let (gpu, stream): (&Gpu, &GpuStream) = (&rank.gpu, &rank.stream);
    let x = gpu.download(x, stream).expect("a copy");
    let idx = gpu.download(idx, stream).expect("a copy");
    let (x, idx) = (x.as_slice::<i32>().unwrap(), idx.as_slice::<i64>().unwrap());
    let first = (rank.rank * LOCAL) as i64;
    let hosted = |expert: i64| (first..first + LOCAL as i64).contains(&expert);
    let mut at = 0;
    for source in 0..rank.ranks {
        for token in 0..tokens {
            let chosen = choices(rank.ranks, source, token, call);
            if !chosen.iter().any(|&expert| hosted(expert)) {
                continue;
            }
            let found = &x[at * WORDS..][..WORDS];
            assert_eq!(found, row(source, token, call), "row {at} of call {call}");
            let local = chosen.map(|expert| if hosted(expert) { expert - first } else { -1 });
            assert_eq!(idx[at * TOP_K..][..TOP_K], local, "choices of row {at}");
            at += 1;
        }
    }
    assert!(
        idx[at * TOP_K..].iter().all(|&choice| choice == -1),
        "rows from {at} on have no choices"
    );
}
