//! Lesson 1. Four ranks in one process: send tokens to their experts, let the experts work, bring
//! the results back.
//!
//! Run with `cargo run --release -p deep-ep --example 01_hello_dispatch`.

use deep_ep::{
    Buffer, BufferConfig, CombineInput, Communicator, DispatchInput, Result, Routes, Tensor, TopK,
};
use half::bf16;

const TOKENS: usize = 6;
const HIDDEN: usize = 16;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;

fn main() -> Result<()> {
    let ranks = Communicator::local(4)?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| scope.spawn(move || work(&rank)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("a rank panicked"))
    })
}

fn work(communicator: &Communicator) -> Result<()> {
    let me = communicator.rank();
    let buffer = Buffer::new(communicator, BufferConfig::from_env()?)?;

    // This rank's tokens, and the two experts that the router chose for each.
    let x = vec![bf16::from_f32(1.0 + me.0 as f32); TOKENS * HIDDEN];
    let topk_idx: Vec<i64> = (0..TOKENS * TOP_K)
        .map(|i| ((i * 3 + me.0) % EXPERTS) as i64)
        .collect();
    let topk = TopK {
        idx: Tensor::new(&topk_idx, &[TOKENS, TOP_K])?,
        weights: None,
    };

    // Rows of all ranks whose tokens chose one of this rank's two experts.
    let x = Tensor::new(&x, &[TOKENS, HIDDEN])?;
    let routes = Routes::TopK {
        topk,
        num_experts: EXPERTS,
    };
    let mut received = buffer.dispatch(DispatchInput::new(x, routes))?.finish()?;
    println!(
        "rank {me}: {} rows, choices per expert {:?}",
        received.counts.output_rows, received.counts.tokens_per_expert
    );

    // The experts work in place, here by doubling.
    for value in received.x.as_mut_slice::<bf16>()? {
        *value = bf16::from_f32(value.to_f32() * 2.0);
    }

    // Each token's rows come back and are summed.
    let combined = buffer
        .combine(CombineInput::new(&received.x, &received.handle))?
        .finish()?;
    println!(
        "rank {me}: token 0 is now {}",
        combined.x.as_slice::<bf16>()?[0]
    );
    Ok(())
}
