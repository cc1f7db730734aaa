//! bf16 from and to f32.

use half::bf16;

use super::simd::{self, Simd};

/// `x` rounded to bf16: to nearest, ties to even; too large becomes infinite; NaN becomes `0x7fff`.
#[inline(always)]
pub const fn f32_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return bf16::from_bits(0x7fff);
    }
    // Half of what is cut off, less one unless the kept part is odd: ties go to even. A carry out
    // of the mantissa counts up the exponent, as it should.
    let odd = (bits >> 16) & 1;
    bf16::from_bits(((bits + 0x7fff + odd) >> 16) as u16)
}

/// The same value as f32. Exact; a NaN keeps its sign and payload.
#[inline(always)]
pub const fn bf16_to_f32(x: bf16) -> f32 {
    f32::from_bits((x.to_bits() as u32) << 16)
}

/// [`f32_to_bf16`] of every element.
///
/// # Panics
/// If the lengths differ.
pub fn f32_to_bf16_slice(x: &[f32], out: &mut [bf16]) {
    f32_to_bf16_slice_with(Simd::detect(), x, out);
}

/// [`f32_to_bf16_slice`] with the given instruction set.
///
/// # Panics
/// If the lengths differ.
pub fn f32_to_bf16_slice_with(level: Simd, x: &[f32], out: &mut [bf16]) {
    assert_eq!(x.len(), out.len(), "x and out differ in length");
    let done = simd::f32_to_bf16(level, x, out);
    for (x, out) in x[done..].iter().zip(&mut out[done..]) {
        *out = f32_to_bf16(*x);
    }
}

/// [`bf16_to_f32`] of every element.
///
/// # Panics
/// If the lengths differ.
pub fn bf16_to_f32_slice(x: &[bf16], out: &mut [f32]) {
    bf16_to_f32_slice_with(Simd::detect(), x, out);
}

/// [`bf16_to_f32_slice`] with the given instruction set.
///
/// # Panics
/// If the lengths differ.
pub fn bf16_to_f32_slice_with(level: Simd, x: &[bf16], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "x and out differ in length");
    let done = simd::bf16_to_f32(level, x, out);
    for (x, out) in x[done..].iter().zip(&mut out[done..]) {
        *out = bf16_to_f32(*x);
    }
}
