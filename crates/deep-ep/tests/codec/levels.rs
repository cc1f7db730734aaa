//! Code for each instruction set against the plain code, bit for bit.

use deep_ep::codec::{
    ScaleFormat, Simd, bf16_to_f32_slice_with, dequantize_row_with, f32_to_bf16_slice_with,
    logfmt::{decode_row_with, encode_row_with, max_encoded_bytes},
    quantize_row_with, sum_rows_with, weighted_sum_bf16_with, weighted_sum_with,
};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::rows::{Random, bits, bits16};

/// The results of `run` for all instruction sets here, which must be equal.
fn all_equal<R: PartialEq>(run: impl Fn(Simd) -> R) -> Result<(), TestCaseError> {
    let plain = run(Simd::Scalar);
    for level in Simd::available().skip(1) {
        prop_assert!(run(level) == plain, "{level:?} differs from plain code");
    }
    Ok(())
}

/// A length, an unaligned start, a mix of values and a seed.
fn shape() -> impl Strategy<Value = (usize, usize, u8, u64)> {
    let hidden = prop_oneof![0usize..64, 0usize..=1024].prop_map(|n| 8 * n);
    (hidden, 0usize..33, 0u8..4, any::<u64>())
}

proptest! {
    #[test]
    fn conversions((hidden, start, mix, seed) in shape()) {
        let mut random = Random(seed);
        let wide = random.f32_row(start + hidden, mix);
        let narrow = random.bf16_row(start + hidden, mix);
        all_equal(|level| {
            let mut rounded = vec![bf16::ZERO; start + hidden];
            f32_to_bf16_slice_with(level, &wide[start..], &mut rounded[start..]);
            let mut widened = vec![0.0; start + hidden];
            bf16_to_f32_slice_with(level, &narrow[start..], &mut widened[start..]);
            (bits16(&rounded), bits(&widened))
        })?;
    }

    #[test]
    fn fp8_casts((hidden, start, mix, seed) in shape(), power_of_two: bool) {
        let mut random = Random(seed);
        let x = random.bf16_row(start + hidden, mix);
        let any_codes: Vec<u8> = (0..start + hidden).map(|_| random.bits() as u8).collect();
        let any_scales = random.f32_row(hidden.div_ceil(128), mix);
        let format = if power_of_two { ScaleFormat::PowerOfTwo } else { ScaleFormat::F32 };
        all_equal(|level| {
            let mut codes = vec![0; start + hidden];
            let mut scales = vec![0.0; hidden.div_ceil(128)];
            quantize_row_with(level, &x[start..], &mut codes[start..], &mut scales, format);
            let mut back = vec![bf16::ZERO; start + hidden];
            dequantize_row_with(level, &codes[start..], &scales, &mut back[start..]);
            let mut any_back = vec![bf16::ZERO; start + hidden];
            dequantize_row_with(level, &any_codes[start..], &any_scales, &mut any_back[start..]);
            (codes, bits(&scales), bits16(&back), bits16(&any_back))
        })?;
    }

    #[test]
    fn logfmt((hidden, start, mix, seed) in shape(), smooth: bool) {
        let mut random = Random(seed);
        let mut x = random.f32_row(start + hidden, mix);
        if smooth {
            // Otherwise nearly every block with odd values travels raw.
            x.iter_mut().for_each(|x| *x = x.clamp(-3.0, 3.0));
            x.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = 0.5);
        }
        all_equal(|level| {
            let mut bytes = vec![0; max_encoded_bytes(hidden)];
            let used = encode_row_with(level, &x[start..], &mut bytes);
            let mut out = vec![0.0; start + hidden];
            assert_eq!(decode_row_with(level, &bytes[..used], &mut out[start..]), Ok(used));
            (bytes, bits(&out))
        })?;
    }

    #[test]
    fn sums((hidden, start, mix, seed) in shape(), biases in 0usize..3, parts in 0usize..12, streaming: bool) {
        let mut random = Random(seed);
        let rows: Vec<_> = (0..biases + parts)
            .map(|_| random.f32_row(start + hidden, mix))
            .collect();
        let narrow = rows.iter().map(|row| row.iter().map(|x| bf16::from_f32(*x)).collect());
        let narrow: Vec<Vec<bf16>> = narrow.collect();
        let halves = rows.iter().map(|row| row.iter().map(|x| f16::from_f32(*x)).collect());
        let halves: Vec<Vec<f16>> = halves.collect();
        let rows: Vec<_> = rows.iter().map(|row| &row[start..]).collect();
        let narrow: Vec<_> = narrow.iter().map(|row| &row[start..]).collect();
        let halves: Vec<_> = halves.iter().map(|row| &row[start..]).collect();
        all_equal(|level| {
            let mut wide = vec![0.0; start + hidden];
            sum_rows_with(level, &rows[..biases], &rows[biases..], &mut wide[start..], streaming);
            let mut out = vec![bf16::ZERO; start + hidden];
            sum_rows_with(level, &narrow[..biases], &narrow[biases..], &mut out[start..], streaming);
            let mut half = vec![f16::ZERO; start + hidden];
            sum_rows_with(level, &halves[..biases], &halves[biases..], &mut half[start..], streaming);
            let half: Vec<u16> = half.iter().map(|x| x.to_bits()).collect();
            (bits(&wide), bits16(&out), half)
        })?;
    }

    #[test]
    fn weighted_sums((hidden, start, mix, seed) in shape(), count in 0usize..12) {
        let mut random = Random(seed);
        let rows: Vec<_> = (0..count).map(|_| random.bf16_row(start + hidden, mix)).collect();
        let parts: Vec<_> = rows.iter().map(|row| (&row[start..], random.value(mix))).collect();
        all_equal(|level| {
            let mut wide = vec![0.0; start + hidden];
            weighted_sum_with(level, &parts, &mut wide[start..]);
            let mut out = vec![bf16::ZERO; start + hidden];
            weighted_sum_bf16_with(level, &parts, &mut out[start..]);
            (bits(&wide), bits16(&out))
        })?;
    }
}

/// Stores past the caches need an aligned `out`, which the property above has only by chance.
#[test]
fn streamed_sums_are_the_same() {
    let mut random = Random(1);
    let rows = [(); 3].map(|()| random.bf16_row(4096 + 72, 0));
    let rows = rows.each_ref().map(Vec::as_slice);
    for level in Simd::available() {
        let mut expected = vec![bf16::ZERO; 4096 + 72];
        sum_rows_with(level, &[], &rows, &mut expected, false);
        let mut memory = vec![bf16::ZERO; 4096 + 72 + 32];
        let start = memory.as_ptr().align_offset(64);
        let out = &mut memory[start..][..4096 + 72];
        sum_rows_with(level, &[], &rows, out, true);
        deep_ep::codec::store_fence();
        assert_eq!(bits16(out), bits16(&expected), "{level:?}");
    }
}

/// All inputs: every bf16, at every place of a vector, in blocks of any largest magnitude.
#[test]
fn fp8_casts_every_bf16() {
    let x: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    for turn in [1u16, 128, 257, 5003] {
        let x: Vec<bf16> = (0..=u16::MAX)
            .map(|i| x[usize::from(i.wrapping_mul(turn | 1))])
            .collect();
        let run = |level, format| {
            let (mut codes, mut scales) = (vec![0; x.len()], vec![0.0; x.len() / 128]);
            quantize_row_with(level, &x, &mut codes, &mut scales, format);
            (codes, bits(&scales))
        };
        for format in [ScaleFormat::F32, ScaleFormat::PowerOfTwo] {
            for level in Simd::available() {
                assert!(
                    run(level, format) == run(Simd::Scalar, format),
                    "{level:?} {format:?}"
                );
            }
        }
    }
}
