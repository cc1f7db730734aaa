//! Lesson 5. A rank dies: the others learn which one and where, and go on without it.
//!
//! Run with `cargo run --release -p deep-ep --example 05_dead_rank`.

use std::time::{Duration, Instant};

use deep_ep::{
    Buffer, BufferConfig, Communicator, DispatchInput, Error, LowLatencyConfig,
    LowLatencyDispatchInput, Result, Routes, Tensor, TopK,
};
use half::bf16;

const TOKENS: usize = 4;
const HIDDEN: usize = 64;
const EXPERTS: usize = 3;

fn main() -> Result<()> {
    println!("Without masks, the call ends with an error that names the rank:");
    run(false)?;
    println!("With enable_shrink, low-latency calls mask the rank and complete:");
    run(true)
}

fn run(enable_shrink: bool) -> Result<()> {
    let ranks = Communicator::local(3)?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| scope.spawn(move || work(&rank, enable_shrink)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("a rank panicked"))
    })
}

fn work(communicator: &Communicator, enable_shrink: bool) -> Result<()> {
    let me = communicator.rank();
    let mut config = BufferConfig::from_env()?;
    config.timeout = Duration::from_secs(2);
    config.enable_shrink = enable_shrink;
    config.low_latency = Some(LowLatencyConfig {
        max_tokens_per_rank: TOKENS,
        hidden: HIDDEN,
        num_experts: EXPERTS,
        exact_top_k: None,
    });
    let buffer = Buffer::new(communicator, config)?;
    if me.0 == 2 {
        return Ok(()); // Rank 2 goes without a word.
    }

    let x = vec![bf16::ONE; TOKENS * HIDDEN];
    let topk_idx: Vec<i64> = (0..TOKENS).map(|token| (token % EXPERTS) as i64).collect();
    let x = Tensor::new(&x, &[TOKENS, HIDDEN])?;
    let idx = Tensor::new(&topk_idx, &[TOKENS, 1])?;
    let start = Instant::now();
    if enable_shrink {
        let send = LowLatencyDispatchInput::new(x, idx, TOKENS, EXPERTS);
        let received = buffer.low_latency_dispatch(send)?.finish()?;
        println!(
            "  rank {me}: {:?} rows, masked {:?}, after {:.1?}",
            received.recv_count.as_slice::<i32>()?,
            buffer.masks()?,
            start.elapsed()
        );
        return Ok(());
    }
    let topk = TopK { idx, weights: None };
    let routes = Routes::TopK {
        topk,
        num_experts: EXPERTS,
    };
    let done = buffer
        .dispatch(DispatchInput::new(x, routes))
        .and_then(|pending| pending.finish());
    match done {
        Err(error @ (Error::PeerLost { .. } | Error::Aborted { .. })) => {
            println!("  rank {me}: {error}, after {:.1?}", start.elapsed());
            Ok(())
        }
        Err(error) => Err(error),
        Ok(_) => unreachable!("rank 2 took no part"),
    }
}
