//! Sums over rows, as combine takes them: f32 accumulators, a fixed order, one rounding.

use half::{bf16, f16};

use super::{
    bf16_to_f32, canonical, f32_to_bf16,
    simd::{self, Simd},
};
use crate::dtype::Element;

mod kernel {
    use super::Simd;

    /// The fast code for a type: sums a leading part of the row and returns its length.
    pub trait Kernel: Sized {
        fn sum(
            level: Simd,
            bias: &[&[Self]],
            parts: &[&[Self]],
            out: &mut [Self],
            streaming: bool,
        ) -> usize;
    }
}

/// An element type that [`sum_rows`] takes: bf16, f16 or f32.
pub trait SumElement: Element + kernel::Kernel {
    /// The value as f32. Exact.
    fn widen(self) -> f32;

    /// `x` rounded to this type: to nearest, ties to even; a NaN becomes the one of
    /// [`codec`](crate::codec).
    fn round(x: f32) -> Self;
}

impl SumElement for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        bf16_to_f32(self)
    }

    #[inline(always)]
    fn round(x: f32) -> Self {
        f32_to_bf16(x)
    }
}

impl SumElement for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn round(x: f32) -> Self {
        if x.is_nan() {
            f16::from_bits(0x7fff)
        } else {
            f16::from_f32(x)
        }
    }
}

impl SumElement for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn round(x: f32) -> Self {
        canonical(x)
    }
}

macro_rules! kernels {
    ($($type:ty => $kernel:ident),* $(,)?) => {$(
        impl kernel::Kernel for $type {
            fn sum(
                level: Simd,
                bias: &[&[Self]],
                parts: &[&[Self]],
                out: &mut [Self],
                streaming: bool,
            ) -> usize {
                simd::$kernel(level, bias, parts, out, streaming)
            }
        }
    )*};
}

kernels! { bf16 => sum_bf16, f16 => sum_f16, f32 => sum_f32 }

/// Elements that the plain code sums at a time.
const CHUNK: usize = 64;

/// Sums rows: `out = round(0 + bias[0] + bias[1] + .. + parts[0] + parts[1] + ..)`.
///
/// The accumulator is f32 and starts from +0, the rows are added in the order given, and the
/// result is rounded once. All rows and `out` are `[H]`. Without any row, `out` is zero; a sum of
/// negative zeros is +0, because that is what it starts from.
///
/// With `streaming`, `out` is written past the caches if it is aligned to 64 bytes: for results
/// that nobody on this core reads soon. The caller then issues [`store_fence`](super::store_fence)
/// before it tells another thread that the row is there.
///
/// # Panics
/// If a row is not as long as `out`.
pub fn sum_rows<T: SumElement>(bias: &[&[T]], parts: &[&[T]], out: &mut [T], streaming: bool) {
    sum_rows_with(Simd::detect(), bias, parts, out, streaming);
}

/// [`sum_rows`] with the given instruction set.
///
/// # Panics
/// If a row is not as long as `out`.
pub fn sum_rows_with<T: SumElement>(
    level: Simd,
    bias: &[&[T]],
    parts: &[&[T]],
    out: &mut [T],
    streaming: bool,
) {
    let hidden = out.len();
    let fits = |row: &&[T]| row.len() == hidden;
    assert!(
        bias.iter().all(fits) && parts.iter().all(fits),
        "every row must have the {hidden} elements that out has"
    );
    let done = T::sum(level, bias, parts, out, streaming);
    for (i, out) in out[done..].chunks_mut(CHUNK).enumerate() {
        let mut sums = [0f32; CHUNK];
        for row in bias.iter().chain(parts) {
            for (sum, x) in sums.iter_mut().zip(&row[done + i * CHUNK..]) {
                *sum += x.widen();
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = T::round(sum);
        }
    }
}

/// A row and its weight.
pub type WeightedRow<'a> = (&'a [bf16], f32);

/// Weighted sum of bf16 rows in f32: `acc = fma(w, x, acc)` over `parts` in the order given, from
/// +0, with a true fused multiply-add. All rows and `out` are `[H]`. Without any row, `out` is zero.
///
/// # Panics
/// If a row is not as long as `out`.
pub fn weighted_sum(parts: &[WeightedRow<'_>], out: &mut [f32]) {
    weighted_sum_with(Simd::detect(), parts, out);
}

/// [`weighted_sum`] with the given instruction set.
///
/// # Panics
/// If a row is not as long as `out`.
pub fn weighted_sum_with(level: Simd, parts: &[WeightedRow<'_>], out: &mut [f32]) {
    check_weighted(parts, out.len());
    let done = simd::weighted_sum_f32(level, parts, out);
    weighted_rest(parts, out, done);
}

/// [`weighted_sum`], rounded once to bf16.
///
/// # Panics
/// If a row is not as long as `out`.
pub fn weighted_sum_bf16(parts: &[WeightedRow<'_>], out: &mut [bf16]) {
    weighted_sum_bf16_with(Simd::detect(), parts, out);
}

/// [`weighted_sum_bf16`] with the given instruction set.
///
/// # Panics
/// If a row is not as long as `out`.
pub fn weighted_sum_bf16_with(level: Simd, parts: &[WeightedRow<'_>], out: &mut [bf16]) {
    check_weighted(parts, out.len());
    let done = simd::weighted_sum_bf16(level, parts, out);
    weighted_rest(parts, out, done);
}

#[track_caller]
fn check_weighted(parts: &[WeightedRow<'_>], hidden: usize) {
    assert!(
        parts.iter().all(|(row, _)| row.len() == hidden),
        "every row must have the {hidden} elements that out has"
    );
}

/// The definition of the weighted sum, from element `start` on.
fn weighted_rest<T: SumElement>(parts: &[WeightedRow<'_>], out: &mut [T], start: usize) {
    for (i, out) in out[start..].chunks_mut(CHUNK).enumerate() {
        let mut sums = [0f32; CHUNK];
        for (row, weight) in parts {
            for (sum, x) in sums.iter_mut().zip(&row[start + i * CHUNK..]) {
                *sum = weight.mul_add(bf16_to_f32(*x), *sum);
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = T::round(sum);
        }
    }
}
