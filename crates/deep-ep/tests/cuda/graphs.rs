//! Recorded calls, replayed with other contents.

use deep_ep::{
    Buffer, CombineInput, CombineOutput, DType, Dispatched, Landing, Result, cuda::Graph,
};

use crate::{
    batch::{Batch, check},
    ranks::{Rank, run},
};

const CAPACITY: usize = 256;

fn record(rank: &Rank, batch: &Batch) -> Graph<Dispatched> {
    let buffer: &Buffer = &rank.buffer;
    let call =
        || -> Result<Dispatched> { buffer.dispatch(batch.input(rank, Landing::Loan))?.finish() };
    // The kernel is loaded before anything is recorded.
    drop(call().expect("an eager call"));
    rank.settle();
    rank.gpu.capture(&rank.stream, call).expect("a recording")
}

fn replay(rank: &Rank, graph: &mut Graph<Dispatched>, tokens: usize, call: usize) {
    // SAFETY: batch, buffer and results live until the stream is synchronised by `settle`, and all
    // ranks replay the same.
    unsafe { graph.launch(&rank.stream) }.expect("a replay");
    rank.settle();
    let results = graph.results();
    let idx = results.topk_idx.as_ref().expect("choices travel");
    check(rank, &results.x.as_tensor(), &idx.as_tensor(), tokens, call);
}

#[test]
fn a_graph_of_256_tokens_is_replayed_with_256_1_and_no_tokens() {
    run(4, None, |rank| {
        let mut batch = Batch::new(rank, CAPACITY, CAPACITY, 0);
        let mut graph = record(rank, &batch);
        for (call, tokens) in [256, 1, 0, 256, 17].into_iter().enumerate() {
            batch.change(rank, tokens, call);
            replay(rank, &mut graph, tokens, call);
        }
        rank.settle();
    });
}

#[test]
fn two_graphs_and_eager_calls_alternate_1000_times() {
    run(2, None, |rank| {
        let mut batches = [32, 5].map(|capacity| Batch::new(rank, capacity, capacity, 0));
        let mut graphs = batches.each_ref().map(|batch| record(rank, batch));
        for call in 0..1000 {
            let which = call % 2;
            let tokens = [32, 5][which];
            batches[which].change(rank, tokens, call);
            replay(rank, &mut graphs[which], tokens, call);
            if call % 7 == 0 {
                let input = batches[which].input(rank, Landing::Loan);
                let done = rank.buffer.dispatch(input).unwrap().finish().unwrap();
                rank.settle();
                let idx = done.topk_idx.as_ref().unwrap();
                check(rank, &done.x.as_tensor(), &idx.as_tensor(), tokens, call);
            }
        }
        rank.settle();
    });
}

#[test]
fn a_dispatch_and_its_combine_are_one_graph() {
    run(2, None, |rank| {
        let batch = Batch::new(rank, CAPACITY, CAPACITY, 3);
        let shape = [CAPACITY, 4];
        let rows = [rank.ranks * CAPACITY, 4];
        let ones = vec![1f32; rows[0] * 4];
        let ones = deep_ep::Tensor::new(&ones, &rows).unwrap();
        let ones = rank.gpu.upload(&ones, &rank.stream).unwrap();
        let mut sums = rank.gpu.zeros(DType::F32, &shape, &rank.stream).unwrap();
        let mut call = || -> Result<Dispatched> {
            let done = rank
                .buffer
                .dispatch(batch.input(rank, Landing::Loan))?
                .finish()?;
            let input = CombineInput {
                stream: rank.stream.as_stream(),
                ..CombineInput::new(ones.as_tensor(), &done.handle)
            };
            let out = CombineOutput::new(sums.as_tensor_mut());
            rank.buffer.combine(input)?.finish_into(out)?;
            Ok(done)
        };
        drop(call().unwrap());
        rank.settle();
        let mut graph = rank.gpu.capture(&rank.stream, call).unwrap();
        for _ in 0..3 {
            rank.gpu
                .fill(&mut sums.as_tensor_mut(), 0xff, &rank.stream)
                .unwrap();
            replay(rank, &mut graph, CAPACITY, 3);
            let found = rank.gpu.download(&sums.as_tensor(), &rank.stream).unwrap();
            for (token, sum) in found.as_slice::<f32>().unwrap().chunks_exact(4).enumerate() {
                let mut to = crate::batch::choices(rank.ranks, rank.rank, token, 3)
                    .map(|expert| expert as usize / crate::batch::LOCAL)
                    .to_vec();
                to.dedup();
                assert_eq!(sum, [to.len() as f32; 4], "token {token}");
            }
        }
        rank.settle();
    });
}
