//! AVX2: sums over rows.
//!
//! A register block of 64 elements is summed over all rows before the next: the accumulators stay
//! in registers however many rows there are, and a row costs one pointer per 128 bytes or more.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{canonical, round_pairs, widen_pairs};
use crate::codec::{
    simd::{prefetch, shortest},
    sum::WeightedRow,
};

/// Accumulators of 16 elements. Which lane holds which element is the business of the functions
/// that load and store a type.
type Lanes = [__m256; 2];

/// Elements in [`Lanes`].
const WIDTH: usize = 16;

/// [`Lanes`] in a register block.
const BLOCK: usize = 4;

/// # Safety
/// `from` is valid for reading 16 elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_bf16(from: *const bf16) -> Lanes {
    // SAFETY: 32 bytes, says the caller.
    widen_pairs(unsafe { _mm256_loadu_si256(from.cast()) })
}

/// # Safety
/// As for [`load_bf16`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_bf16_in_order(from: *const bf16) -> Lanes {
    // SAFETY: two times 16 bytes, says the caller.
    let halves = unsafe {
        [
            _mm_loadu_si128(from.cast()),
            _mm_loadu_si128(from.add(8).cast()),
        ]
    };
    halves.map(|x| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x))))
}

/// # Safety
/// As for [`load_bf16`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_f16(from: *const f16) -> Lanes {
    // SAFETY: two times 16 bytes, says the caller.
    let halves = unsafe {
        [
            _mm_loadu_si128(from.cast()),
            _mm_loadu_si128(from.add(8).cast()),
        ]
    };
    halves.map(|x| _mm256_cvtph_ps(x))
}

/// # Safety
/// As for [`load_bf16`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_f32(from: *const f32) -> Lanes {
    // SAFETY: two times 32 bytes, says the caller.
    unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
}

/// # Safety
/// `to` is valid for writing 32 bytes, and a multiple of 32 if `streaming`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put(to: *mut __m256i, bits: __m256i, streaming: bool) {
    // SAFETY: as the caller says.
    unsafe {
        if streaming {
            _mm256_stream_si256(to, bits);
        } else {
            _mm256_storeu_si256(to, bits);
        }
    }
}

/// # Safety
/// `to` is valid for writing 16 elements, and a multiple of 32 if `streaming`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store_bf16(to: *mut bf16, [even, odd]: Lanes, streaming: bool) {
    // SAFETY: 32 bytes, says the caller.
    unsafe { put(to.cast(), round_pairs(even, odd), streaming) }
}

/// # Safety
/// As for [`store_bf16`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store_f16(to: *mut f16, lanes: Lanes, streaming: bool) {
    let [low, high] = lanes.map(|x| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(canonical(x)));
    let bits = _mm256_set_m128i(high, low);
    // SAFETY: 32 bytes, says the caller.
    unsafe { put(to.cast(), bits, streaming) }
}

/// # Safety
/// As for [`store_bf16`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store_f32(to: *mut f32, lanes: Lanes, streaming: bool) {
    let [low, high] = lanes.map(|x| _mm256_castps_si256(canonical(x)));
    // SAFETY: two times 32 bytes, says the caller.
    unsafe {
        put(to.cast(), low, streaming);
        put(to.add(8).cast(), high, streaming);
    }
}

/// Defines a sum over rows of a type.
macro_rules! sum {
    ($name:ident, $block:ident, $type:ty, $load:ident, $store:ident) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(in crate::codec::simd) fn $name(
            bias: &[&[$type]],
            parts: &[&[$type]],
            out: &mut [$type],
            streaming: bool,
        ) -> usize {
            let length = shortest(bias, shortest(parts, out.len()));
            let streaming = streaming && out.as_ptr().addr().is_multiple_of(64);
            let to = out.as_mut_ptr();
            let mut i = 0;
            while i + BLOCK * WIDTH <= length {
                // SAFETY: `out` and every row have `length` elements; the steps keep alignment.
                unsafe { $block::<BLOCK>(bias, parts, to.add(i), i, streaming) };
                i += BLOCK * WIDTH;
            }
            while i + WIDTH <= length {
                // SAFETY: as above.
                unsafe { $block::<1>(bias, parts, to.add(i), i, streaming) };
                i += WIDTH;
            }
            i
        }

        /// # Safety
        /// Every row has `B * WIDTH` elements from `i` on; `to` is valid for writing as many, and
        /// a multiple of 32 if `streaming`.
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $block<const B: usize>(
            bias: &[&[$type]],
            parts: &[&[$type]],
            to: *mut $type,
            i: usize,
            streaming: bool,
        ) {
            let mut sums = [[_mm256_setzero_ps(); 2]; B];
            for rows in [bias, parts] {
                for row in rows {
                    for (b, sums) in sums.iter_mut().enumerate() {
                        let at = row.as_ptr().wrapping_add(i + b * WIDTH);
                        prefetch(at.cast());
                        // SAFETY: inside the row, says the caller.
                        let x = unsafe { $load(at) };
                        *sums = [_mm256_add_ps(sums[0], x[0]), _mm256_add_ps(sums[1], x[1])];
                    }
                }
            }
            for (b, sums) in sums.into_iter().enumerate() {
                // SAFETY: inside `out`, says the caller.
                unsafe { $store(to.add(b * WIDTH), sums, streaming) };
            }
        }
    };
}

sum!(sum_bf16, sum_block_bf16, bf16, load_bf16, store_bf16);
sum!(sum_f16, sum_block_f16, f16, load_f16, store_f16);
sum!(sum_f32, sum_block_f32, f32, load_f32, store_f32);

/// Defines a weighted sum over rows of bf16 into a type.
macro_rules! weighted_sum {
    ($name:ident, $block:ident, $type:ty, $load:ident, $store:ident) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(in crate::codec::simd) fn $name(parts: &[WeightedRow<'_>], out: &mut [$type]) -> usize {
            let length = (parts.iter()).fold(out.len(), |length, (row, _)| length.min(row.len()));
            let to = out.as_mut_ptr();
            let mut i = 0;
            while i + BLOCK * WIDTH <= length {
                // SAFETY: `out` and every row have `length` elements.
                unsafe { $block::<BLOCK>(parts, to.add(i), i) };
                i += BLOCK * WIDTH;
            }
            while i + WIDTH <= length {
                // SAFETY: as above.
                unsafe { $block::<1>(parts, to.add(i), i) };
                i += WIDTH;
            }
            i
        }

        /// # Safety
        /// Every row has `B * WIDTH` elements from `i` on; `to` is valid for writing as many.
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $block<const B: usize>(parts: &[WeightedRow<'_>], to: *mut $type, i: usize) {
            let mut sums = [[_mm256_setzero_ps(); 2]; B];
            for (row, weight) in parts {
                let weight = _mm256_set1_ps(*weight);
                for (b, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: inside the row, says the caller.
                    let x = unsafe { $load(row.as_ptr().add(i + b * WIDTH)) };
                    *sums = [
                        _mm256_fmadd_ps(weight, x[0], sums[0]),
                        _mm256_fmadd_ps(weight, x[1], sums[1]),
                    ];
                }
            }
            for (b, sums) in sums.into_iter().enumerate() {
                // SAFETY: inside `out`, says the caller.
                unsafe { $store(to.add(b * WIDTH), sums, false) };
            }
        }
    };
}

weighted_sum!(
    weighted_sum_f32,
    weighted_block_f32,
    f32,
    load_bf16_in_order,
    store_f32
);
weighted_sum!(
    weighted_sum_bf16,
    weighted_block_bf16,
    bf16,
    load_bf16,
    store_bf16
);
