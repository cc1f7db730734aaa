//! FP8 E4M3 with one scale per token and 128 channels.
//!
//! The cast of a block of 128 bf16 channels, in f32 arithmetic without fused operations:
//!
//! ```text
//! amax  = max(1e-4, |x| of every channel that is not NaN)
//! F32:                 scale = amax * f32(1/448)                      code = e4m3(x * (448 / amax))
//! PowerOfTwo, Ue8m0:   scale = 2^e, e = ceil(log2(amax * f32(1/448))) code = e4m3(x * 2^-e)
//! ```
//!
//! What follows from that arithmetic in the corners:
//!
//! - a block of zeros has the scale of `amax = 1e-4`, and zero codes that keep their sign;
//! - a NaN channel gets code `0x7f`; the other channels are as if it were absent;
//! - an infinite channel makes the scale infinite and the factor 0: finite channels get a zero
//!   code with their sign, and the infinity itself, `inf * 0`, gets code `0x7f`. All of the block
//!   is NaN when it is cast back (`0 * inf`), so that a receiver sees that something was wrong.

use half::bf16;

use super::{
    NAN, bf16_to_f32, canonical, f32_to_bf16,
    simd::{self, Simd},
};

/// Channels that share a scale.
pub const SCALE_BLOCK: usize = 128;

/// The largest E4M3 number.
pub const E4M3_MAX: f32 = 448.0;

/// `amax` is at least this, so that a block of zeros has a scale.
const AMAX_MIN: f32 = 1e-4;

/// Smallest normal E4M3 number, 2^-6.
pub(super) const E4M3_MIN_NORMAL: f32 = 0.015625;

/// 2^14: the last mantissa bit of an f32 of this size is worth 2^-9, as all of E4M3's subnormal
/// numbers are. Adding it rounds a small number to a multiple of 2^-9, which is then its code.
pub(super) const E4M3_SUBNORMAL_ROUNDER: f32 = 16384.0;

/// What rounds the bits of a normal f32 (together with the parity of bit 20, for ties to even) and
/// moves its exponent from bias 127 to bias 7, before a shift by 20 cuts the mantissa.
pub(super) const E4M3_NORMAL_ROUNDER: u32 = 0x7_ffffu32.wrapping_sub((127 - 7) << 23);

/// How the scales of a row are chosen and stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleFormat {
    /// `amax / 448`, as f32.
    F32,
    /// The power of two at or above `amax / 448`, as f32.
    PowerOfTwo,
    /// The same power of two, to be stored as its exponent ([`pack_ue8m0`]).
    Ue8m0,
}

impl ScaleFormat {
    /// Whether scales are powers of two.
    pub const fn is_power_of_two(self) -> bool {
        !matches!(self, Self::F32)
    }
}

/// `x` as an E4M3 code: nearest, ties to even; beyond 448 (infinities too) it saturates at ±448;
/// NaN of either sign becomes `0x7f`. Zeros, and what rounds to zero, keep their sign.
#[inline]
pub const fn f32_to_e4m3(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let bits = x.to_bits();
    let sign = ((bits >> 24) & 0x80) as u8;
    let magnitude = bits & 0x7fff_ffff;
    let code = if magnitude >= E4M3_MAX.to_bits() {
        0x7e
    } else if magnitude >= E4M3_MIN_NORMAL.to_bits() {
        let odd = (magnitude >> 20) & 1;
        magnitude
            .wrapping_add(E4M3_NORMAL_ROUNDER)
            .wrapping_add(odd)
            >> 20
    } else {
        (f32::from_bits(magnitude) + E4M3_SUBNORMAL_ROUNDER).to_bits()
            - E4M3_SUBNORMAL_ROUNDER.to_bits()
    };
    sign | code as u8
}

/// The number that an E4M3 code stands for. Exact; `0x7f` and `0xff` give NaN.
#[inline]
pub const fn e4m3_to_f32(code: u8) -> f32 {
    let (exponent, mantissa) = ((code as u32 >> 3) & 0xf, code as u32 & 7);
    let magnitude = if code & 0x7f == 0x7f {
        return NAN;
    } else if exponent == 0 {
        mantissa as f32 * (1.0 / 512.0)
    } else {
        f32::from_bits((exponent + 127 - 7) << 23 | mantissa << 20)
    };
    if code & 0x80 != 0 {
        -magnitude
    } else {
        magnitude
    }
}

/// Scale of a block, and the factor that its values are multiplied by.
#[derive(Clone, Copy)]
pub(super) struct BlockScale {
    pub(super) scale: f32,
    pub(super) factor: f32,
}

impl BlockScale {
    /// For the largest magnitude `amax` of a block (not NaN).
    #[inline(always)]
    pub(super) fn new(amax: f32, power_of_two: bool) -> Self {
        let amax = if amax > AMAX_MIN { amax } else { AMAX_MIN };
        let scale = amax * (1.0 / E4M3_MAX);
        if !power_of_two {
            let factor = E4M3_MAX / amax;
            return Self { scale, factor };
        }
        // A positive normal number or infinity: counting up the exponent if any mantissa bit is
        // set gives the power of two at or above it.
        let ceiling = (scale.to_bits() + 0x7f_ffff) & 0xff80_0000;
        let factor = if ceiling == f32::INFINITY.to_bits() {
            0.0
        } else {
            f32::from_bits(((2 * 127) << 23) - ceiling)
        };
        Self {
            scale: f32::from_bits(ceiling),
            factor,
        }
    }
}

/// Casts at most [`SCALE_BLOCK`] channels and returns their scale: the definition of the cast.
pub(super) fn quantize_block(x: &[bf16], codes: &mut [u8], power_of_two: bool) -> f32 {
    let amax = x
        .iter()
        .map(|x| bf16_to_f32(*x).abs())
        .filter(|x| !x.is_nan())
        .fold(0.0, f32::max);
    let BlockScale { scale, factor } = BlockScale::new(amax, power_of_two);
    for (x, code) in x.iter().zip(codes) {
        *code = f32_to_e4m3(bf16_to_f32(*x) * factor);
    }
    scale
}

/// Casts at most [`SCALE_BLOCK`] f32 values with one scale, `amax / 448`, which it returns: the same
/// cast as that of bf16 channels. `x` and `codes` have the same length.
pub fn quantize_f32_block(x: &[f32], codes: &mut [u8]) -> f32 {
    let finite = x.iter().map(|x| x.abs()).filter(|x| !x.is_nan());
    let BlockScale { scale, factor } = BlockScale::new(finite.fold(0.0, f32::max), false);
    for (x, code) in x.iter().zip(codes) {
        *code = f32_to_e4m3(x * factor);
    }
    scale
}

/// Casts a row of `H` bf16 channels to E4M3 with one scale per 128 channels.
///
/// `x` and `codes` are `[H]`, `scales` is `[ceil(H / 128)]` and always holds f32 values, powers of
/// two unless `format` is [`ScaleFormat::F32`]; see [`pack_ue8m0`]. A last block of less than 128
/// channels has a scale of its own.
///
/// # Panics
/// If the lengths do not fit together.
pub fn quantize_row(x: &[bf16], codes: &mut [u8], scales: &mut [f32], format: ScaleFormat) {
    quantize_row_with(Simd::detect(), x, codes, scales, format);
}

/// [`quantize_row`] with the given instruction set.
///
/// # Panics
/// If the lengths do not fit together.
pub fn quantize_row_with(
    level: Simd,
    x: &[bf16],
    codes: &mut [u8],
    scales: &mut [f32],
    format: ScaleFormat,
) {
    check_row(x.len(), codes.len(), scales.len());
    let power_of_two = format.is_power_of_two();
    let done = simd::quantize(level, x, codes, scales, power_of_two);
    let blocks = x[done..].chunks(SCALE_BLOCK);
    let codes = codes[done..].chunks_mut(SCALE_BLOCK);
    for ((x, codes), scale) in blocks.zip(codes).zip(&mut scales[done / SCALE_BLOCK..]) {
        *scale = quantize_block(x, codes, power_of_two);
    }
}

/// Casts a row back: `bf16(f32(code) * scale)`, the product rounded to f32 first.
///
/// `codes` and `out` are `[H]`, `scales` is `[ceil(H / 128)]`.
///
/// # Panics
/// If the lengths do not fit together.
pub fn dequantize_row(codes: &[u8], scales: &[f32], out: &mut [bf16]) {
    dequantize_row_with(Simd::detect(), codes, scales, out);
}

/// [`dequantize_row`] with the given instruction set.
///
/// # Panics
/// If the lengths do not fit together.
pub fn dequantize_row_with(level: Simd, codes: &[u8], scales: &[f32], out: &mut [bf16]) {
    check_row(out.len(), codes.len(), scales.len());
    let done = simd::dequantize(level, codes, scales, out);
    let blocks = codes[done..].chunks(SCALE_BLOCK);
    let out = out[done..].chunks_mut(SCALE_BLOCK);
    for ((codes, out), scale) in blocks.zip(out).zip(&scales[done / SCALE_BLOCK..]) {
        for (code, out) in codes.iter().zip(out) {
            *out = f32_to_bf16(canonical(e4m3_to_f32(*code) * scale));
        }
    }
}

#[track_caller]
fn check_row(hidden: usize, codes: usize, scales: usize) {
    assert_eq!(codes, hidden, "the row and its codes differ in length");
    assert_eq!(
        scales,
        hidden.div_ceil(SCALE_BLOCK),
        "a row of {hidden} channels has one scale per {SCALE_BLOCK}"
    );
}

/// The UE8M0 byte of a scale: its exponent plus 127.
///
/// `scale` is a power of two from 2^-127 to 2^127, or infinite; infinity (and NaN) is 255, which
/// the MX specification calls NaN. Of any other number only the exponent is kept, rounded down; 0
/// and what is below 2^-127 give 0 (2^-127).
#[inline]
pub const fn ue8m0_from_scale(scale: f32) -> u8 {
    (scale.to_bits() >> 23) as u8
}

/// The scale of a UE8M0 byte: 2^(byte - 127), and infinity for 255.
///
/// The MX specification has NaN for 255. Infinity is what [`quantize_row`] put there, and no
/// difference to what is cast back: the codes of such a block are zeros and NaN, and give NaN.
#[inline]
pub const fn ue8m0_to_scale(byte: u8) -> f32 {
    if byte == 0 {
        f32::from_bits(1 << 22)
    } else {
        f32::from_bits((byte as u32) << 23)
    }
}

/// Packs power-of-two scales, four UE8M0 bytes per word, least significant byte first.
///
/// `scales` is `[H / 128]`, `words` is `[H / 512]`; `H` is a multiple of 512.
///
/// # Panics
/// If `scales` is not four times as long as `words`.
pub fn pack_ue8m0(scales: &[f32], words: &mut [i32]) {
    assert_eq!(scales.len(), 4 * words.len(), "four scales make a word");
    for (scales, word) in scales.as_chunks().0.iter().zip(words) {
        *word = i32::from_le_bytes(scales.map(ue8m0_from_scale));
    }
}

/// Unpacks what [`pack_ue8m0`] packed.
///
/// # Panics
/// If `scales` is not four times as long as `words`.
pub fn unpack_ue8m0(words: &[i32], scales: &mut [f32]) {
    assert_eq!(scales.len(), 4 * words.len(), "a word makes four scales");
    for (word, scales) in words.iter().zip(scales.as_chunks_mut().0) {
        *scales = word.to_le_bytes().map(ue8m0_to_scale);
    }
}
