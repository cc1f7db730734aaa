//! Speeds per instruction set, printed and not asserted:
//! `cargo test --release -p deep-ep --test codec -- --ignored --nocapture speed`.

use std::{hint::black_box, time::Instant};

use deep_ep::codec::{
    ScaleFormat, Simd, bf16_to_f32_slice_with, dequantize_row_with, f32_to_bf16_slice_with,
    logfmt::{decode_row_with, encode_row_with, max_encoded_bytes},
    quantize_row_with, sum_rows_with, weighted_sum_bf16_with,
};
use half::bf16;

use crate::rows::Random;

const HIDDEN: usize = 7168;

/// Best of many short runs, in GB of `bytes` per second.
fn gbps(bytes: usize, mut run: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..50 {
        let start = Instant::now();
        (0..20).for_each(|_| run());
        best = best.min(start.elapsed().as_secs_f64() / 20.0);
    }
    bytes as f64 / best / 1e9
}

#[test]
#[ignore = "prints speeds"]
fn speed() {
    let mut random = Random(1);
    let x = random.bf16_row(HIDDEN, 0);
    let y = random.bf16_row(HIDDEN, 0);
    let wide = random.f32_row(HIDDEN, 0);
    let (mut out, mut wide_out) = (vec![bf16::ZERO; HIDDEN], vec![0f32; HIDDEN]);
    let (mut codes, mut scales) = (vec![0; HIDDEN], vec![0.0; HIDDEN / 128]);
    let mut bytes = vec![0; max_encoded_bytes(HIDDEN)];
    let row = 2 * HIDDEN;
    println!("GB/s of bf16 read (written where it is the only side), rows of {HIDDEN} in cache");
    for level in Simd::available() {
        let show = |name: &str, gbps: f64| println!("{level:?} {name}: {gbps:.1}");
        for format in [ScaleFormat::F32, ScaleFormat::PowerOfTwo] {
            let speed = gbps(row, || {
                quantize_row_with(level, black_box(&x), &mut codes, &mut scales, format);
            });
            show(&format!("quantize_row {format:?}"), speed);
        }
        let speed = gbps(row, || {
            dequantize_row_with(level, black_box(&codes), &scales, &mut out)
        });
        show("dequantize_row", speed);
        let speed = gbps(row, || {
            f32_to_bf16_slice_with(level, black_box(&wide), &mut out)
        });
        show("f32_to_bf16_slice", speed);
        let speed = gbps(row, || {
            bf16_to_f32_slice_with(level, black_box(&x), &mut wide_out)
        });
        show("bf16_to_f32_slice", speed);
        for count in [2, 8, 16] {
            let parts: Vec<&[bf16]> = (0..count).map(|i| [&x[..], &y[..]][i % 2]).collect();
            let speed = gbps(count * row, || {
                sum_rows_with(level, &[], black_box(&parts), &mut out, false);
            });
            show(&format!("sum_rows, {count} parts"), speed);
        }
        let parts = [(&x[..], 0.25f32), (&y[..], 0.75)].repeat(4);
        let speed = gbps(8 * row, || {
            weighted_sum_bf16_with(level, black_box(&parts), &mut out)
        });
        show("weighted_sum_bf16, 8 parts", speed);
        let mut used = 0;
        let speed = gbps(row, || {
            used = encode_row_with(level, black_box(&wide), &mut bytes)
        });
        show("logfmt encode_row", speed);
        let speed = gbps(row, || {
            let _ = black_box(decode_row_with(
                level,
                black_box(&bytes[..used]),
                &mut wide_out,
            ));
        });
        show("logfmt decode_row", speed);
    }
}
