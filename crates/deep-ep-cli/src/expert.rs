//! The experts of a job: expert `e` of `E` scales its rows by `1 + e/E`.
//!
//! This is the caller's work between dispatch and combine. It is the same code for the measured
//! job and for what it is compared with: not the experts are under test, but the way to them and
//! back.

use deep_ep::codec;
use half::bf16;

/// What expert `e` of `experts` multiplies with.
pub(crate) fn factor(e: usize, experts: usize) -> f32 {
    1.0 + e as f32 / experts as f32
}

/// High-throughput: the row's weighted sum over the `(expert, weight)` pairs of this rank,
/// `out = bf16(sum w * (1 + e/E) * x)`, summed in f32 in the order of `choices`.
pub(crate) fn weighted_sum(
    x: &[bf16],
    choices: impl Iterator<Item = (usize, f32)>,
    experts: usize,
    parts: &mut Vec<f32>,
    out: &mut [bf16],
) {
    parts.clear();
    parts.extend(choices.map(|(e, weight)| weight * factor(e, experts)));
    let mut rows = [(x, 0f32); MAX_TOP_K];
    match parts.len() {
        n if n <= MAX_TOP_K => {
            rows.iter_mut()
                .zip(&*parts)
                .for_each(|(row, part)| row.1 = *part);
            codec::weighted_sum_bf16(&rows[..n], out);
        }
        _ => {
            let rows: Vec<_> = parts.iter().map(|part| (x, *part)).collect();
            codec::weighted_sum_bf16(&rows, out);
        }
    }
}

/// Choices that [`weighted_sum`] takes without an allocation.
const MAX_TOP_K: usize = 32;

/// Low-latency: one row of one expert, `out = bf16((1 + e/E) * x)`.
pub(crate) fn scale(x: &[bf16], e: usize, experts: usize, out: &mut [bf16]) {
    codec::weighted_sum_bf16(&[(x, factor(e, experts))], out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_summed_over_its_local_experts() {
        let x = [1f32, -2., 0.5].map(bf16::from_f32);
        let mut out = [bf16::ZERO; 3];
        let choices = [(0, 0.5), (2, 2.0)];
        weighted_sum(&x, choices.into_iter(), 4, &mut Vec::new(), &mut out);
        // 0.5 * 1 + 2 * 1.5 = 3.5
        assert_eq!(out, [3.5f32, -7., 1.75].map(bf16::from_f32));
        scale(&x, 1, 4, &mut out);
        assert_eq!(out, [1.25f32, -2.5, 0.625].map(bf16::from_f32));
    }
}
