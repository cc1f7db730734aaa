//! AVX-512: bf16 and fp8. Functions here are sound to call where F, BW, DQ, VL, AVX2, FMA and F16C
//! exist; pointers come from array references or from checked lengths.

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

/// Both 16-bit halves of each 32-bit lane.
const fn twice(half: u16) -> i32 {
    (half as u32 * 0x1_0001) as i32
}

/// bf16 in both halves of each lane, from f32 values for the low (`even`) and high (`odd`) halves:
/// nearest, ties to even, NaN as `0x7fff`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn round_pairs(even: __m512, odd: __m512) -> __m512i {
    let high = _mm512_set1_epi32(0xffff_0000u32 as i32);
    // even >> 16 | odd & high
    let even = _mm512_srli_epi32::<16>(rounded_up(even));
    _mm512_ternarylogic_epi32::<0xf8>(even, rounded_up(odd), high)
}

/// Bits of `x` plus what rounds them to bf16 in the upper half of each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn rounded_up(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(NAN))
}

/// The f32 values of the low and the high halves of each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn widen_pairs(x: __m512i) -> [__m512; 2] {
    let high = _mm512_set1_epi32(0xffff_0000u32 as i32);
    [
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)),
        _mm512_castsi512_ps(_mm512_and_si512(x, high)),
    ]
}

/// `x` with NaN replaced by the one that results have.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn canonical(x: __m512) -> __m512 {
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    _mm512_mask_mov_ps(x, nan, _mm512_castsi512_ps(_mm512_set1_epi32(NAN)))
}

/// bf16 in memory order from two vectors of f32 in memory order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn round_in_order(low: __m512, high: __m512) -> __m512i {
    let low = _mm512_srli_epi32::<16>(rounded_up(low));
    let high = _mm512_srli_epi32::<16>(rounded_up(high));
    // Packing takes 128-bit lanes of both in turn; the permutation undoes that.
    let mixed = _mm512_packus_epi32(low, high);
    _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), mixed)
}

#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn f32_to_bf16(x: &[f32], out: &mut [bf16]) -> usize {
    let (x, out) = (x.as_chunks::<32>().0, out.as_chunks_mut::<32>().0);
    for (x, out) in x.iter().zip(out.iter_mut()) {
        // SAFETY: 32 values of 4 bytes, from a reference; 32 of 2 bytes, likewise.
        unsafe {
            let low = _mm512_loadu_ps(x.as_ptr());
            let high = _mm512_loadu_ps(x.as_ptr().add(16));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), round_in_order(low, high));
        }
    }
    32 * x.len().min(out.len())
}

#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn bf16_to_f32(x: &[bf16], out: &mut [f32]) -> usize {
    let (x, out) = (x.as_chunks::<16>().0, out.as_chunks_mut::<16>().0);
    for (x, out) in x.iter().zip(out.iter_mut()) {
        // SAFETY: 16 values of 2 bytes, from a reference; 16 of 4 bytes, likewise.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_slli_epi32::<16>(bits));
        }
    }
    16 * x.len().min(out.len())
}

/// E4M3 codes, without sign, of f32 values from 0 to what rounds to 448.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn e4m3_magnitudes(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<20>(bits), _mm512_set1_epi32(1));
    let rounder = _mm512_set1_epi32(E4M3_NORMAL_ROUNDER as i32);
    let normal = _mm512_add_epi32(_mm512_add_epi32(bits, rounder), odd);
    let normal = _mm512_srli_epi32::<20>(normal);
    let rounder = _mm512_set1_ps(E4M3_SUBNORMAL_ROUNDER);
    let small = _mm512_castps_si512(_mm512_add_ps(x, rounder));
    let is_small = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, _mm512_set1_ps(E4M3_MIN_NORMAL));
    _mm512_mask_sub_epi32(normal, is_small, small, _mm512_castps_si512(rounder))
}

/// The largest magnitude among the bf16 of four vectors, as bits of a bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx2,sse4.1")]
fn max_magnitude(x: &[__m512i; 4]) -> u16 {
    let magnitude = _mm512_set1_epi16(0x7fff);
    let [a, b, c, d] = x.map(|x| _mm512_and_si512(x, magnitude));
    let max = _mm512_max_epu16(_mm512_max_epu16(a, b), _mm512_max_epu16(c, d));
    let max = _mm256_max_epu16(
        _mm512_castsi512_si256(max),
        _mm512_extracti64x4_epi64::<1>(max),
    );
    let max = _mm_max_epu16(
        _mm256_castsi256_si128(max),
        _mm256_extracti128_si256::<1>(max),
    );
    // There is an instruction for the least of eight, so look for the least complement.
    let least = _mm_minpos_epu16(_mm_xor_si128(max, _mm_set1_epi16(-1)));
    !(_mm_cvtsi128_si32(least) as u16)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx2,sse4.1")]
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
        let from = x.as_ptr();
        // SAFETY: four times 32 values of 2 bytes, from a reference to 128.
        let values = unsafe {
            [
                _mm512_loadu_si512(from.cast()),
                _mm512_loadu_si512(from.add(32).cast()),
                _mm512_loadu_si512(from.add(64).cast()),
                _mm512_loadu_si512(from.add(96).cast()),
            ]
        };
        let max = max_magnitude(&values);
        if max >= bf16::INFINITY.to_bits() {
            *scale = quantize_block(x, codes, power_of_two);
            continue;
        }
        let block = BlockScale::new(f32::from_bits(u32::from(max) << 16), power_of_two);
        *scale = block.scale;
        let factor = _mm512_set1_ps(block.factor);
        for (i, value) in values.into_iter().enumerate() {
            let codes32 = encode(value, factor);
            // SAFETY: 32 bytes at a multiple of 32 below 128, in a reference to 128.
            unsafe { _mm256_storeu_si256(codes.as_mut_ptr().add(32 * i).cast(), codes32) };
        }
    }
    SCALE_BLOCK * blocks
}

/// E4M3 codes of 32 finite bf16 times `factor`, which leaves none above what rounds to 448.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn encode(x: __m512i, factor: __m512) -> __m256i {
    let [even, odd] = widen_pairs(_mm512_and_si512(x, _mm512_set1_epi16(0x7fff)));
    let even = e4m3_magnitudes(_mm512_mul_ps(even, factor));
    let odd = e4m3_magnitudes(_mm512_mul_ps(odd, factor));
    let magnitudes = _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd));
    // magnitudes | x >> 8 & sign
    let sign = _mm512_set1_epi32(twice(0x80));
    let codes = _mm512_ternarylogic_epi32::<0xf8>(magnitudes, _mm512_srli_epi16::<8>(x), sign);
    _mm512_cvtepi16_epi8(codes)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
pub(super) fn dequantize(codes: &[u8], scales: &[f32], out: &mut [bf16]) -> usize {
    let codes = codes.as_chunks::<SCALE_BLOCK>().0;
    let out = out.as_chunks_mut::<SCALE_BLOCK>().0;
    let blocks = codes.len().min(out.len()).min(scales.len());
    for ((codes, out), scale) in codes.iter().zip(out).zip(scales) {
        let scale = _mm512_set1_ps(*scale);
        for (codes, out) in codes
            .as_chunks::<32>()
            .0
            .iter()
            .zip(out.as_chunks_mut::<32>().0)
        {
            // SAFETY: 32 bytes, from a reference.
            let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
            let [low, high] = decode(codes).map(|x| canonical(_mm512_mul_ps(x, scale)));
            // SAFETY: 32 values of 2 bytes, from a reference.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), round_in_order(low, high)) };
        }
    }
    SCALE_BLOCK * blocks
}

/// The values of 32 E4M3 codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2")]
fn decode(codes: __m256i) -> [__m512; 2] {
    // The same bits in an IEEE half (bias 15, not 7) are 2^-8 of the value, subnormal ones too.
    let wide = _mm512_slli_epi16::<7>(_mm512_cvtepi8_epi16(codes));
    let half = _mm512_and_si512(wide, _mm512_set1_epi16(0xbfffu16 as i16));
    let magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
    let nan = _mm256_cmpeq_epi8_mask(magnitude, _mm256_set1_epi8(0x7f));
    let half = _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7fff));
    [
        _mm512_castsi512_si256(half),
        _mm512_extracti64x4_epi64::<1>(half),
    ]
    .map(|half| _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0)))
}
