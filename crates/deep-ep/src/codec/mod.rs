//! Number formats of rows on the wire, and the sums that combine takes over them.
//!
//! Everything here is pure: slices in, slices out, no I/O, and the same bits on every machine. Each
//! function has plain scalar code that defines its result; AVX2 and AVX-512 code, chosen at run
//! time ([`Simd`]), gives the same bits faster. A `_with` variant takes the instruction set.
//!
//! | format | what it is | source |
//! | --- | --- | --- |
//! | bf16 | the upper half of an IEEE binary32 | |
//! | E4M3 | sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinities; `0x7f` and `0xff` are NaN; largest 448, smallest 2^-9 | OCP 8-bit Floating Point Specification (OFP8), revision 1.0 |
//! | UE8M0 | 8 exponent bits (bias 127) and nothing else: the scale 2^(byte - 127) | OCP Microscaling Formats (MX) Specification, version 1.0, where it is called E8M0 |
//! | LogFMT-10 | sign and a 9-bit logarithmic code per value, blocks of 128 | this crate, see [`logfmt`] |
//!
//! **Rounding** is to nearest, ties to even, everywhere, and subnormal numbers are kept.
//!
//! **NaN.** A result that is NaN is always the positive NaN with all mantissa bits set: `0x7f`,
//! `0x7fff`, `0x7fff_ffff`. Processors differ in what they do with the sign and payload of a NaN;
//! this one choice (the one NVIDIA GPUs make in hardware) keeps all engines bit-identical. Only
//! [`bf16_to_f32`], which moves bits and calculates nothing, keeps a NaN as it is.

mod bf16;
mod fp8;
pub mod logfmt;
mod simd;
mod sum;

pub use bf16::{
    bf16_to_f32, bf16_to_f32_slice, bf16_to_f32_slice_with, f32_to_bf16, f32_to_bf16_slice,
    f32_to_bf16_slice_with,
};
pub use fp8::{
    E4M3_MAX, SCALE_BLOCK, ScaleFormat, dequantize_row, dequantize_row_with, e4m3_to_f32,
    f32_to_e4m3, pack_ue8m0, quantize_f32_block, quantize_row, quantize_row_with, ue8m0_from_scale,
    ue8m0_to_scale, unpack_ue8m0,
};
pub use simd::{Simd, store_fence};
pub use sum::{
    SumElement, WeightedRow, sum_rows, sum_rows_with, weighted_sum, weighted_sum_bf16,
    weighted_sum_bf16_with, weighted_sum_with,
};

/// The NaN that calculations return.
const NAN: f32 = f32::from_bits(0x7fff_ffff);

/// `x`, with any NaN replaced by the one NaN that results have.
#[inline(always)]
const fn canonical(x: f32) -> f32 {
    if x.is_nan() { NAN } else { x }
}
