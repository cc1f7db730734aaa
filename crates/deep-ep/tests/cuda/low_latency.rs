//! Low-latency calls in graphs.

use bytemuck::cast_slice;
use deep_ep::{
    DType, LowLatencyConfig, LowLatencyDispatchInput, LowLatencyDispatchOutput, OwnedTensor,
    Result, Tensor,
};
use half::bf16;

use crate::{
    batch::{LOCAL, TOP_K, choices},
    ranks::{Rank, run},
};

const TOKENS: usize = 16;
const HIDDEN: usize = 64;

fn config(ranks: usize) -> LowLatencyConfig {
    LowLatencyConfig {
        max_tokens_per_rank: TOKENS,
        hidden: HIDDEN,
        num_experts: ranks * LOCAL,
        exact_top_k: None,
    }
}

/// Inputs, and outputs that every call writes.
struct Case {
    at_once: bool,
    x: OwnedTensor,
    idx: OwnedTensor,
    out: OwnedTensor,
    count: Vec<OwnedTensor>,
}

fn value(rank: usize, token: usize) -> bf16 {
    bf16::from_bits((rank * 256 + token + 1) as u16)
}

impl Case {
    fn new(rank: &Rank, at_once: bool) -> Self {
        let x: Vec<bf16> = (0..TOKENS)
            .flat_map(|token| [value(rank.rank, token); HIDDEN])
            .collect();
        let idx: Vec<i64> = (0..TOKENS)
            .flat_map(|token| choices(rank.ranks, rank.rank, token, 0))
            .collect();
        let up = |tensor: Tensor<'_>| rank.gpu.upload(&tensor, &rank.stream).unwrap();
        let shape = [LOCAL, rank.ranks * TOKENS, HIDDEN];
        Self {
            at_once,
            x: up(Tensor::new(&x, &[TOKENS, HIDDEN]).unwrap()),
            idx: up(Tensor::new(&idx, &[TOKENS, TOP_K]).unwrap()),
            out: rank.gpu.zeros(DType::Bf16, &shape, &rank.stream).unwrap(),
            count: vec![],
        }
    }

    fn call(&mut self, rank: &Rank) -> Result<()> {
        let (x, idx) = (self.x.as_tensor(), self.idx.as_tensor());
        let mut input = LowLatencyDispatchInput::new(x, idx, TOKENS, rank.ranks * LOCAL);
        input.stream = rank.stream.as_stream();
        input.at_once = self.at_once;
        let out = LowLatencyDispatchOutput {
            x: self.out.as_tensor_mut(),
            scales: None,
        };
        let (count, _) = rank.buffer.low_latency_dispatch(input)?.finish_into(out)?;
        self.count = vec![count];
        Ok(())
    }

    #[track_caller]
    fn check(&self, rank: &Rank) {
        let down = |tensor: &OwnedTensor| rank.gpu.download(&tensor.as_tensor(), &rank.stream);
        let (out, count) = (down(&self.out).unwrap(), down(&self.count[0]).unwrap());
        let out: &[u16] = cast_slice(out.as_slice::<bf16>().unwrap());
        for local in 0..LOCAL {
            let expert = (rank.rank * LOCAL + local) as i64;
            let expected: Vec<u16> = (0..rank.ranks)
                .flat_map(|source| (0..TOKENS).map(move |token| (source, token)))
                .filter(|&(source, token)| choices(rank.ranks, source, token, 0).contains(&expert))
                .map(|(source, token)| value(source, token).to_bits())
                .collect();
            let counted = count.as_slice::<i32>().unwrap()[local] as usize;
            assert_eq!(counted, expected.len(), "rows of expert {expert}");
            let rows = &out[local * rank.ranks * TOKENS * HIDDEN..];
            for (row, value) in rows.chunks_exact(HIDDEN).zip(&expected) {
                assert!(row.iter().all(|x| x == value), "rows of expert {expert}");
            }
        }
    }
}

#[test]
fn graphs_of_1_and_3_calls_alternate_with_eager_ones() {
    const RANKS: usize = 2;
    run(RANKS, Some(config(RANKS)), |rank| {
        // Launches of one half and of both follow each other, and meet each other across ranks.
        let ways = [true, false, rank.rank == 1];
        let mut cases = ways.map(|at_once| Case::new(rank, at_once));
        for case in &mut cases {
            case.call(rank).unwrap();
            rank.settle();
        }
        let [one, three, eager] = &mut cases;
        let mut graphs = [
            rank.gpu.capture(&rank.stream, || one.call(rank)).unwrap(),
            rank.gpu
                .capture(&rank.stream, || (0..3).try_for_each(|_| three.call(rank)))
                .unwrap(),
        ];
        for turn in 0..60 {
            let graph = turn % 2;
            // SAFETY: tensors and buffer live until the stream is synchronised by `settle`, and all
            // ranks replay the same.
            unsafe { graphs[graph].launch(&rank.stream) }.unwrap();
            if turn % 3 == 0 {
                eager.call(rank).unwrap();
            }
            rank.settle();
            [&*one, &*three][graph].check(rank);
            eager.check(rank);
        }
    });
}
