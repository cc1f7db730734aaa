//! The instruction sets, and which code runs on which.
//!
//! A function of this module does a leading part of the work (whole vectors, whole blocks) and
//! returns how many elements that was; its caller does the rest in plain code. On [`Simd::Scalar`],
//! and on processors other than x86-64, that leading part is empty.
//!
//! `unsafe` stays in this folder: here for calls into code for an instruction set, which
//! [`Simd::usable`] makes sound, and in the two leaf modules for loads and stores.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use std::sync::OnceLock;

use half::{bf16, f16};

use super::{
    logfmt::{self, DecodeError},
    sum::WeightedRow,
};

/// An instruction set that the codec has code for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Simd {
    /// Plain code.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL, besides those of [`Simd::Avx2`].
    Avx512,
}

impl Simd {
    /// The best that this processor has. Looked up once.
    pub fn detect() -> Self {
        static BEST: OnceLock<Simd> = OnceLock::new();
        *BEST.get_or_init(Self::look)
    }

    /// All that this processor has, the plain code first.
    pub fn available() -> impl Iterator<Item = Self> {
        [Self::Scalar, Self::Avx2, Self::Avx512]
            .into_iter()
            .filter(|level| *level <= Self::detect())
    }

    #[cfg(target_arch = "x86_64")]
    fn look() -> Self {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match (avx2, avx512) {
            (true, true) => Self::Avx512,
            (true, false) => Self::Avx2,
            (false, _) => Self::Scalar,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn look() -> Self {
        Self::Scalar
    }

    /// This one, or the best that this processor has if that is less.
    #[cfg(target_arch = "x86_64")]
    fn usable(self) -> Self {
        self.min(Self::detect())
    }
}

/// Orders non-temporal stores of this thread before its later stores.
///
/// Needed between a call with `streaming` and the store that tells another thread about it.
#[inline]
pub fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE, which every x86-64 has.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Declares functions that go to the leaf module of an instruction set, or do nothing.
macro_rules! leaves {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {$(
        $(#[$doc])*
        #[inline]
        pub(super) fn $name(level: Simd, $($arg: $type),*) -> usize {
            #[cfg(target_arch = "x86_64")]
            match level.usable() {
                // SAFETY: `usable` does not return what this processor lacks.
                Simd::Avx512 => return unsafe { avx512::$name($($arg),*) },
                // SAFETY: as above.
                Simd::Avx2 => return unsafe { avx2::$name($($arg),*) },
                Simd::Scalar => {}
            }
            let _ = (level, $($arg),*);
            0
        }
    )*};
}

leaves! {
    /// Rounds f32 to bf16.
    fn f32_to_bf16(x: &[f32], out: &mut [bf16]);

    /// Widens bf16 to f32.
    fn bf16_to_f32(x: &[bf16], out: &mut [f32]);

    /// Casts whole blocks to E4M3.
    fn quantize(x: &[bf16], codes: &mut [u8], scales: &mut [f32], power_of_two: bool);

    /// Casts whole blocks back from E4M3.
    fn dequantize(codes: &[u8], scales: &[f32], out: &mut [bf16]);

    /// Sums rows of bf16.
    fn sum_bf16(bias: &[&[bf16]], parts: &[&[bf16]], out: &mut [bf16], streaming: bool);

    /// Sums rows of f16.
    fn sum_f16(bias: &[&[f16]], parts: &[&[f16]], out: &mut [f16], streaming: bool);

    /// Sums rows of f32.
    fn sum_f32(bias: &[&[f32]], parts: &[&[f32]], out: &mut [f32], streaming: bool);

    /// Weighted sum of rows into f32.
    fn weighted_sum_f32(parts: &[WeightedRow<'_>], out: &mut [f32]);

    /// Weighted sum of rows into bf16.
    fn weighted_sum_bf16(parts: &[WeightedRow<'_>], out: &mut [bf16]);
}

/// Declares functions that exist once as plain code, compiled for each instruction set.
macro_rules! recompiled {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty = $body:path;)*) => {$(
        $(#[$doc])*
        pub(super) fn $name(level: Simd, $($arg: $type),*) -> $result {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
                fn avx512($($arg: $type),*) -> $result {
                    $body($($arg),*)
                }

                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $type),*) -> $result {
                    $body($($arg),*)
                }

                match level.usable() {
                    // SAFETY: `usable` does not return what this processor lacks.
                    Simd::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Simd::Avx2 => return unsafe { avx2($($arg),*) },
                    Simd::Scalar => {}
                }
            }
            let _ = level;
            $body($($arg),*)
        }
    )*};
}

recompiled! {
    /// Encodes a row as LogFMT-10.
    fn logfmt_encode(x: &[f32], out: &mut [u8]) -> usize = logfmt::encode;

    /// Decodes a row from LogFMT-10.
    fn logfmt_decode(bytes: &[u8], out: &mut [f32]) -> Result<usize, DecodeError> = logfmt::decode;
}

/// How far ahead of its loads a sum prefetches, in bytes. A row's end leads on to the next row where
/// rows lie one behind the other, as those from one rank do. Measured on combines of 2 x 117 MB: 512
/// to 8192 bytes take 0.89 to 0.92 of the time without, 256 bytes 0.95.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 1024;

/// Asks for the line [`AHEAD`] of `at`, which may lie behind a row's end: prefetching never faults.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch(at: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch accesses nothing, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast()) };
}

/// The length that all rows have at least, and `limit` at most.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn shortest<T>(rows: &[&[T]], limit: usize) -> usize {
    rows.iter().fold(limit, |length, row| length.min(row.len()))
}
