//! AVX2: bf16 and fp8. Functions here are sound to call where AVX2, FMA and F16C exist; pointers
//! come from array references or from checked lengths.

mod sum;

use std::arch::x86_64::*;

use half::bf16;

pub(super) use sum::{sum_bf16, sum_f16, sum_f32, weighted_sum_bf16, weighted_sum_f32};

use crate::codec::fp8::{
    BlockScale, E4M3_MIN_NORMAL, E4M3_NORMAL_ROUNDER, E4M3_SUBNORMAL_ROUNDER, SCALE_BLOCK,
    quantize_block,
};

/// Bits of the NaN that results have.
const NAN: i32 = 0x7fff_ffff;

/// Vectors of 16 bf16 in a block that shares a scale.
const BLOCK_VECTORS: usize = SCALE_BLOCK / 16;

/// bf16 in both halves of each lane, from f32 values for the low (`even`) and high (`odd`) halves:
/// nearest, ties to even, NaN as `0x7fff`.
#[inline]
#[target_feature(enable = "avx2")]
fn round_pairs(even: __m256, odd: __m256) -> __m256i {
    let even = _mm256_srli_epi32::<16>(rounded_up(even));
    _mm256_blend_epi16::<0b1010_1010>(even, rounded_up(odd))
}

/// Bits of `x` plus what rounds them to bf16 in the upper half of each lane.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded_up(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    _mm256_castps_si256(without_nan(x, _mm256_castsi256_ps(bits)))
}

/// `result`, with the NaN that results have where `x` is NaN.
#[inline]
#[target_feature(enable = "avx2")]
fn without_nan(x: __m256, result: __m256) -> __m256 {
    let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
    let nan = _mm256_castsi256_ps(_mm256_set1_epi32(NAN));
    _mm256_blendv_ps(result, nan, is_nan)
}

/// `x` with NaN replaced by the one that results have.
#[inline]
#[target_feature(enable = "avx2")]
fn canonical(x: __m256) -> __m256 {
    without_nan(x, x)
}

/// The f32 values of the low and the high halves of each lane.
#[inline]
#[target_feature(enable = "avx2")]
fn widen_pairs(x: __m256i) -> [__m256; 2] {
    let high = _mm256_set1_epi32(0xffff_0000u32 as i32);
    [
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)),
        _mm256_castsi256_ps(_mm256_and_si256(x, high)),
    ]
}

/// bf16 in memory order from two vectors of f32 in memory order.
#[inline]
#[target_feature(enable = "avx2")]
fn round_in_order(low: __m256, high: __m256) -> __m256i {
    let low = _mm256_srli_epi32::<16>(rounded_up(low));
    let high = _mm256_srli_epi32::<16>(rounded_up(high));
    // Packing takes 128-bit lanes of both in turn; the permutation undoes that.
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high))
}

#[target_feature(enable = "avx2")]
pub(super) fn f32_to_bf16(x: &[f32], out: &mut [bf16]) -> usize {
    let (x, out) = (x.as_chunks::<16>().0, out.as_chunks_mut::<16>().0);
    for (x, out) in x.iter().zip(out.iter_mut()) {
        // SAFETY: 16 values of 4 bytes, from a reference; 16 of 2 bytes, likewise.
        unsafe {
            let low = _mm256_loadu_ps(x.as_ptr());
            let high = _mm256_loadu_ps(x.as_ptr().add(8));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), round_in_order(low, high));
        }
    }
    16 * x.len().min(out.len())
}

#[target_feature(enable = "avx2")]
pub(super) fn bf16_to_f32(x: &[bf16], out: &mut [f32]) -> usize {
    let (x, out) = (x.as_chunks::<8>().0, out.as_chunks_mut::<8>().0);
    for (x, out) in x.iter().zip(out.iter_mut()) {
        // SAFETY: 8 values of 2 bytes, from a reference; 8 of 4 bytes, likewise.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_slli_epi32::<16>(bits));
        }
    }
    8 * x.len().min(out.len())
}

/// E4M3 codes, without sign, of f32 values from 0 to what rounds to 448.
#[inline]
#[target_feature(enable = "avx2")]
fn e4m3_magnitudes(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<20>(bits), _mm256_set1_epi32(1));
    let rounder = _mm256_set1_epi32(E4M3_NORMAL_ROUNDER as i32);
    let normal = _mm256_add_epi32(_mm256_add_epi32(bits, rounder), odd);
    let normal = _mm256_castsi256_ps(_mm256_srli_epi32::<20>(normal));
    let rounder = _mm256_set1_ps(E4M3_SUBNORMAL_ROUNDER);
    let small = _mm256_castps_si256(_mm256_add_ps(x, rounder));
    let small = _mm256_sub_epi32(small, _mm256_castps_si256(rounder));
    let is_small = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(E4M3_MIN_NORMAL));
    _mm256_castps_si256(_mm256_blendv_ps(
        normal,
        _mm256_castsi256_ps(small),
        is_small,
    ))
}

/// The largest magnitude among the bf16 of a block, as bits of a bf16.
#[inline]
#[target_feature(enable = "avx2")]
fn max_magnitude(x: &[__m256i; BLOCK_VECTORS]) -> u16 {
    let magnitude = _mm256_set1_epi16(0x7fff);
    let max = x.iter().fold(_mm256_setzero_si256(), |max, x| {
        _mm256_max_epu16(max, _mm256_and_si256(*x, magnitude))
    });
    let max = _mm_max_epu16(
        _mm256_castsi256_si128(max),
        _mm256_extracti128_si256::<1>(max),
    );
    // There is an instruction for the least of eight, so look for the least complement.
    let least = _mm_minpos_epu16(_mm_xor_si128(max, _mm_set1_epi16(-1)));
    !(_mm_cvtsi128_si32(least) as u16)
}

#[target_feature(enable = "avx2")]
pub(super) fn quantize(
    x: &[bf16],
    codes: &mut [u8],
    scales: &mut [f32],
    power_of_two: bool,
) -> usize {
    let x = x.as_chunks::<SCALE_BLOCK>().0;
    let codes = codes.as_chunks_mut::<SCALE_BLOCK>().0;
    let blocks = x.len().min(codes.len()).min(scales.len());
    for ((x, codes), scale) in x.iter().zip(codes).zip(scales) {
        // SAFETY: eight times 16 values of 2 bytes, from a reference to 128.
        let values: [_; BLOCK_VECTORS] =
            std::array::from_fn(|i| unsafe { _mm256_loadu_si256(x.as_ptr().add(16 * i).cast()) });
        let max = max_magnitude(&values);
        if max >= bf16::INFINITY.to_bits() {
            *scale = quantize_block(x, codes, power_of_two);
            continue;
        }
        let block = BlockScale::new(f32::from_bits(u32::from(max) << 16), power_of_two);
        *scale = block.scale;
        let factor = _mm256_set1_ps(block.factor);
        for (i, pair) in values.as_chunks::<2>().0.iter().enumerate() {
            let codes32 = _mm256_packus_epi16(encode(pair[0], factor), encode(pair[1], factor));
            // Packing takes 128-bit lanes of both in turn; the permutation undoes that.
            let codes32 = _mm256_permute4x64_epi64::<0b11_01_10_00>(codes32);
            // SAFETY: 32 bytes at a multiple of 32 below 128, in a reference to 128.
            unsafe { _mm256_storeu_si256(codes.as_mut_ptr().add(32 * i).cast(), codes32) };
        }
    }
    SCALE_BLOCK * blocks
}

/// E4M3 codes, each in 16 bits, of 16 finite bf16 times `factor`, which leaves none above what
/// rounds to 448.
#[inline]
#[target_feature(enable = "avx2")]
fn encode(x: __m256i, factor: __m256) -> __m256i {
    let [even, odd] = widen_pairs(_mm256_and_si256(x, _mm256_set1_epi16(0x7fff)));
    let even = e4m3_magnitudes(_mm256_mul_ps(even, factor));
    let odd = e4m3_magnitudes(_mm256_mul_ps(odd, factor));
    let magnitudes = _mm256_or_si256(even, _mm256_slli_epi32::<16>(odd));
    let sign = _mm256_and_si256(_mm256_srli_epi16::<8>(x), _mm256_set1_epi16(0x80));
    _mm256_or_si256(magnitudes, sign)
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [bf16]) -> usize {
    let codes = codes.as_chunks::<SCALE_BLOCK>().0;
    let out = out.as_chunks_mut::<SCALE_BLOCK>().0;
    let blocks = codes.len().min(out.len()).min(scales.len());
    for ((codes, out), scale) in codes.iter().zip(out).zip(scales) {
        let scale = _mm256_set1_ps(*scale);
        for (codes, out) in codes
            .as_chunks::<16>()
            .0
            .iter()
            .zip(out.as_chunks_mut::<16>().0)
        {
            // SAFETY: 16 bytes, from a reference.
            let codes = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
            let [low, high] = decode(codes).map(|x| canonical(_mm256_mul_ps(x, scale)));
            // SAFETY: 16 values of 2 bytes, from a reference.
            unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), round_in_order(low, high)) };
        }
    }
    SCALE_BLOCK * blocks
}

/// The values of 16 E4M3 codes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn decode(codes: __m128i) -> [__m256; 2] {
    // The same bits in an IEEE half (bias 15, not 7) are 2^-8 of the value, subnormal ones too.
    let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(codes));
    let half = _mm256_and_si256(wide, _mm256_set1_epi16(0xbfffu16 as i16));
    let largest = _mm256_set1_epi16(0x7f << 7);
    let is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, _mm256_set1_epi16(0x7fff)), largest);
    // All ones where the code is NaN: a NaN as well.
    let half = _mm256_or_si256(half, is_nan);
    [
        _mm256_castsi256_si128(half),
        _mm256_extracti128_si256::<1>(half),
    ]
    .map(|half| _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0)))
}
