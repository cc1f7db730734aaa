//! Lesson 3. Half the bytes: rows as FP8 with a scale for every 128 channels, into the caller's
//! memory.
//!
//! Run with `cargo run --release -p deep-ep --example 03_fp8`.

use deep_ep::{
    Buffer, BufferConfig, Communicator, DType, DispatchInput, DispatchOutput, Landing, OwnedTensor,
    Result, Routes, Tensor, TopK,
    codec::{self, SCALE_BLOCK, ScaleFormat},
};
use half::bf16;

const TOKENS: usize = 16;
const HIDDEN: usize = 512;
const SCALES: usize = HIDDEN / SCALE_BLOCK;
const EXPERTS: usize = 4;

fn main() -> Result<()> {
    let ranks = Communicator::local(2)?;
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

    let x: Vec<_> = (0..TOKENS * HIDDEN)
        .map(|i| bf16::from_f32(((i * 37 + me.0) % 201) as f32 / 100.0 - 1.0))
        .collect();
    let mut codes = vec![0u8; TOKENS * HIDDEN];
    let mut scales = vec![0f32; TOKENS * SCALES];
    for token in 0..TOKENS {
        codec::quantize_row(
            &x[token * HIDDEN..][..HIDDEN],
            &mut codes[token * HIDDEN..][..HIDDEN],
            &mut scales[token * SCALES..][..SCALES],
            ScaleFormat::F32,
        );
    }

    let topk_idx: Vec<i64> = (0..TOKENS).map(|token| (token % EXPERTS) as i64).collect();
    let topk = TopK {
        idx: Tensor::new(&topk_idx, &[TOKENS, 1])?,
        weights: None,
    };
    let codes = Tensor::from_bytes(&codes, DType::F8E4M3, &[TOKENS, HIDDEN])?;
    let mut input = DispatchInput::new(
        codes,
        Routes::TopK {
            topk,
            num_experts: EXPERTS,
        },
    );
    input.scales = Some(Tensor::new(&scales, &[TOKENS, SCALES])?);
    input.landing = Landing::Caller;

    // Between the two halves: the counts are known, so exactly enough memory can be had.
    let mut pending = buffer.dispatch(input)?;
    let rows = pending.counts()?.output_rows;
    let mut received = OwnedTensor::zeros(DType::F8E4M3, &[rows, HIDDEN])?;
    let mut received_scales = OwnedTensor::zeros(DType::F32, &[rows, SCALES])?;
    let mut out = DispatchOutput::new(received.as_tensor_mut());
    out.scales = Some(received_scales.as_tensor_mut());
    pending.finish_into(out)?;

    let mut row = vec![bf16::ZERO; HIDDEN];
    let first = received.as_tensor();
    codec::dequantize_row(
        first.row(0),
        &received_scales.as_slice()?[..SCALES],
        &mut row,
    );
    println!(
        "rank {me}: {rows} rows of {} bytes instead of {}; row 0 begins with {:?}",
        HIDDEN + 4 * SCALES,
        2 * HIDDEN,
        &row[..4]
    );
    Ok(())
}
