//! Calls in a stream's order, without the host.

use deep_ep::{DType, DispatchOutput, Landing};

use crate::{
    batch::{Batch, TOP_K, WORDS, check},
    ranks::run,
};

#[test]
fn outputs_filled_just_before_are_written_after() {
    run(2, None, |rank| {
        let batch = Batch::new(rank, 300, 300, 5);
        let rows = rank.ranks * 300;
        let zeros = |dtype, columns| rank.gpu.zeros(dtype, &[rows, columns], &rank.stream);
        let mut x = zeros(DType::I32, WORDS).unwrap();
        let mut idx = zeros(DType::I64, TOP_K).unwrap();
        for _ in 0..20 {
            // All ones, which are NaN in any float: the call comes behind it in the stream.
            rank.gpu
                .fill(&mut x.as_tensor_mut(), 0xff, &rank.stream)
                .unwrap();
            rank.gpu
                .fill(&mut idx.as_tensor_mut(), 0x7f, &rank.stream)
                .unwrap();
            let pending = rank
                .buffer
                .dispatch(batch.input(rank, Landing::Caller))
                .unwrap();
            let mut out = DispatchOutput::new(x.as_tensor_mut());
            out.topk_idx = Some(idx.as_tensor_mut());
            pending.finish_into(out).unwrap();
            rank.settle();
            check(rank, &x.as_tensor(), &idx.as_tensor(), 300, 5);
        }
    });
}

#[test]
fn routing_may_be_overwritten_right_after_the_call() {
    run(3, None, |rank| {
        let mut batch = Batch::new(rank, 64, 64, 0);
        for call in 0..100 {
            batch.change(rank, 64, call);
            let done = rank
                .buffer
                .dispatch(batch.input(rank, Landing::Loan))
                .unwrap()
                .finish()
                .unwrap();
            // In the stream's order, so behind the call.
            rank.gpu
                .fill(&mut batch.idx.as_tensor_mut(), 0xff, &rank.stream)
                .unwrap();
            rank.gpu
                .fill(&mut batch.x.as_tensor_mut(), 0, &rank.stream)
                .unwrap();
            rank.settle();
            let idx = done.topk_idx.as_ref().unwrap();
            check(rank, &done.x.as_tensor(), &idx.as_tensor(), 64, call);
        }
    });
}

#[test]
fn a_hundred_calls_follow_each_other_without_the_host() {
    run(4, None, |rank| {
        let batches: Vec<_> = (0..4)
            .map(|call| Batch::new(rank, 128, 128, call))
            .collect();
        let mut last = None;
        for call in 0..100 {
            let input = batches[call % 4].input(rank, Landing::Loan);
            last = Some((
                call % 4,
                rank.buffer.dispatch(input).unwrap().finish().unwrap(),
            ));
        }
        rank.settle();
        let (call, done) = last.expect("a hundred calls");
        let idx = done.topk_idx.as_ref().unwrap();
        check(rank, &done.x.as_tensor(), &idx.as_tensor(), 128, call);
    });
}
