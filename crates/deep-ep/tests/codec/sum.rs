//! Sums against the same sum written per element.

use deep_ep::codec::{SumElement, sum_rows, weighted_sum, weighted_sum_bf16};
use half::{bf16, f16};

use crate::rows::Random;

fn check<T: SumElement + PartialEq + std::fmt::Debug>(
    random: &mut Random,
    widen: fn(T) -> f32,
    round: fn(f32) -> T,
) {
    for hidden in [0, 1, 8, 136, 2048, 7168] {
        for (biases, parts) in [
            (0, 0),
            (0, 1),
            (1, 0),
            (2, 0),
            (0, 2),
            (1, 3),
            (2, 8),
            (0, 130),
        ] {
            let rows: Vec<Vec<T>> = (0..biases + parts)
                .map(|_| (0..hidden).map(|_| round(random.normal())).collect())
                .collect();
            let rows: Vec<&[T]> = rows.iter().map(Vec::as_slice).collect();
            let mut out = vec![round(7.0); hidden];
            sum_rows(&rows[..biases], &rows[biases..], &mut out, parts % 2 == 1);
            for (i, out) in out.iter().enumerate() {
                let sum = rows.iter().fold(0f32, |sum, row| sum + widen(row[i]));
                assert_eq!(*out, round(sum), "{biases} + {parts} rows, element {i}");
            }
        }
    }
}

#[test]
fn rows_are_added_in_order_and_rounded_once() {
    let mut random = Random(1);
    check::<bf16>(&mut random, bf16::to_f32, bf16::from_f32);
    check::<f16>(&mut random, f16::to_f32, f16::from_f32);
    check::<f32>(&mut random, |x| x, |x| x);
}

#[test]
fn order_counts_and_bias_comes_first() {
    let [big, small] = [1e8f32, 1.0].map(|x| vec![x; 64]);
    let minus = vec![-1e8f32; 64];
    let mut out = vec![0.0; 64];
    sum_rows(&[&big], &[&small, &minus], &mut out, false);
    assert_eq!(out, vec![0.0; 64], "1 is lost beside 1e8");
    sum_rows(&[&big, &minus], &[&small], &mut out, false);
    assert_eq!(out, vec![1.0; 64]);
}

#[test]
fn a_sum_starts_from_positive_zero() {
    let row = vec![bf16::NEG_ZERO; 72];
    let mut out = vec![bf16::ONE; 72];
    sum_rows(&[], &[&row], &mut out, false);
    assert!(out.iter().all(|x| x.to_bits() == 0));
    sum_rows::<bf16>(&[], &[], &mut out, false);
    assert!(out.iter().all(|x| x.to_bits() == 0));
}

#[test]
fn weighted_sums_are_fused() {
    let mut random = Random(2);
    for hidden in [8, 136, 7168] {
        for count in [0, 1, 2, 8, 33] {
            let rows: Vec<_> = (0..count).map(|_| random.bf16_row(hidden, 0)).collect();
            let parts: Vec<_> = rows.iter().map(|row| (&row[..], random.normal())).collect();
            let mut out = vec![7.0; hidden];
            weighted_sum(&parts, &mut out);
            let mut rounded = vec![bf16::ONE; hidden];
            weighted_sum_bf16(&parts, &mut rounded);
            for i in 0..hidden {
                // In f64 the product is exact, and its sum with f32 is as good as exact unless it
                // is a tie, which random weights do not give; so this rounds once, as fused does.
                let sum = parts.iter().fold(0f32, |sum, (row, weight)| {
                    (f64::from(*weight) * row[i].to_f64() + f64::from(sum)) as f32
                });
                assert_eq!(out[i].to_bits(), sum.to_bits());
                assert_eq!(rounded[i], bf16::from_f32(sum));
            }
        }
    }
}

#[test]
fn weighted_sums_do_not_round_the_product() {
    // (1 + 2^-7)(1 + 2^-23) - (1 + 2^-7) is 0 or 2^-23 if the product is rounded on its own.
    let x = vec![bf16::from_f32(1.0078125); 64];
    let mut out = vec![0.0; 64];
    weighted_sum(&[(&x, -1.0), (&x, 1.0 + f32::EPSILON)], &mut out);
    assert_eq!(out, vec![1.0078125 * f32::EPSILON; 64]);
}
