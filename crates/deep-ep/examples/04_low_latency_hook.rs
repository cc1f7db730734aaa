//! Lesson 4. Decoding: fixed capacity, no waiting for counts, and work between send and receive.
//!
//! Run with `cargo run --release -p deep-ep --example 04_low_latency_hook`.

use deep_ep::{
    Buffer, BufferConfig, Communicator, LowLatencyCombineInput, LowLatencyConfig,
    LowLatencyDispatchInput, Result, Tensor,
};
use half::bf16;

const MAX_TOKENS: usize = 32;
const HIDDEN: usize = 256;
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
    let mut config = BufferConfig::from_env()?;
    config.low_latency = Some(LowLatencyConfig {
        max_tokens_per_rank: MAX_TOKENS,
        hidden: HIDDEN,
        num_experts: EXPERTS,
        exact_top_k: None,
    });
    let buffer = Buffer::new(communicator, config)?;

    // Ranks may have different numbers of tokens, up to MAX_TOKENS, also none.
    let tokens = 8 * me.0;
    let x = vec![bf16::from_f32(1.0); tokens * HIDDEN];
    let topk_idx: Vec<i64> = (0..tokens * TOP_K).map(|i| (i % EXPERTS) as i64).collect();
    let weights = vec![0.5f32; tokens * TOP_K];
    let x = Tensor::new(&x, &[tokens, HIDDEN])?;
    let topk_idx = Tensor::new(&topk_idx, &[tokens, TOP_K])?;
    let weights = Tensor::new(&weights, &[tokens, TOP_K])?;

    let send = LowLatencyDispatchInput::new(x, topk_idx, MAX_TOKENS, EXPERTS);
    let receive = buffer.low_latency_dispatch(send)?.hook();
    let other_work: f32 = (0..1000).map(|i| (i as f32).sqrt()).sum();
    let received = receive()?;
    println!(
        "rank {me}: rows of its two experts {:?} (meanwhile computed {other_work:.0})",
        received.recv_count.as_slice::<i32>()?
    );

    // The experts write their outputs where combine reads them: zero copy.
    let mut outputs = buffer.next_low_latency_combine_buffer(&received.handle, HIDDEN)?;
    let rows = received.x.as_slice::<bf16>()?;
    outputs.as_mut_slice::<bf16>()?.copy_from_slice(rows);
    let combine = LowLatencyCombineInput::new(&outputs, topk_idx, weights, &received.handle);
    let combined = buffer.low_latency_combine(combine)?.finish()?;
    let combined = combined.as_slice::<bf16>()?;
    assert!(combined.iter().all(|value| value.to_f32() == 1.0));
    Ok(())
}
