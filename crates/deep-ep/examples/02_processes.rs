//! Lesson 2. The same with one process per rank, as a launcher such as torchrun starts them.
//!
//! Started without `RANK` it launches two copies of itself, which find each other by the variables
//! that torchrun sets. Run with `cargo run --release -p deep-ep --example 02_processes`.

use std::{error::Error, net::TcpListener, process::Command};

use deep_ep::{
    Buffer, BufferConfig, CombineInput, Communicator, DispatchInput, Routes, Tensor, TopK,
};
use half::bf16;

const RANKS: usize = 2;
const TOKENS: usize = 4;
const HIDDEN: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::var_os("RANK").is_some() {
        return Ok(work(&Communicator::from_env()?)?);
    }
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            Command::new(std::env::current_exe()?)
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("WORLD_SIZE", RANKS.to_string())
                .env("MASTER_PORT", port.to_string())
                .spawn()
        })
        .collect::<Result<_, _>>()?;
    for mut rank in ranks {
        if !rank.wait()?.success() {
            return Err("a rank failed".into());
        }
    }
    Ok(())
}

fn work(communicator: &Communicator) -> deep_ep::Result<()> {
    let me = communicator.rank();
    let buffer = Buffer::new(communicator, BufferConfig::from_env()?)?;

    // One expert per rank; every token goes to both.
    let x = vec![bf16::from_f32(1.0 + me.0 as f32); TOKENS * HIDDEN];
    let topk_idx = [0i32, 1].repeat(TOKENS);
    let topk = TopK {
        idx: Tensor::new(&topk_idx, &[TOKENS, 2])?,
        weights: None,
    };
    let routes = Routes::TopK {
        topk,
        num_experts: RANKS,
    };
    let x = Tensor::new(&x, &[TOKENS, HIDDEN])?;

    // Rows come from the other process through memory that both map: one copy.
    let received = buffer.dispatch(DispatchInput::new(x, routes))?.finish()?;
    let first: Vec<_> = received
        .x
        .as_slice::<bf16>()?
        .chunks(HIDDEN)
        .map(|row| row[0])
        .collect();
    println!(
        "rank {me} in process {}: rows {first:?}",
        std::process::id()
    );

    // The same routes again, without counting.
    let again = Routes::Handle(&received.handle);
    let received = buffer.dispatch(DispatchInput::new(x, again))?.finish()?;
    let combined = buffer
        .combine(CombineInput::new(&received.x, &received.handle))?
        .finish()?;
    assert_eq!(
        combined.x.as_slice::<bf16>()?[0].to_f32(),
        2.0 * (1.0 + me.0 as f32)
    );
    Ok(())
}
