//! The FP8 cast of the low-latency dispatch, by search instead of bit arithmetic.

use half::bf16;

/// Channels that share a scale.
const BLOCK: usize = 128;

/// How scales are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleFormat {
    /// `amax / 448` as f32.
    F32,
    /// The smallest power of two that is at least `amax / 448`, as f32 or (see
    /// [`Fp8Row::ue8m0_words`]) as its exponent.
    PowerOfTwo,
}

/// A row cast to FP8.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Row {
    /// `[H]`: E4M3 codes. A NaN is `0x7f`.
    pub codes: Vec<u8>,
    /// `[H/128]`: what to multiply the decoded values of each block with.
    pub scales: Vec<f32>,
}

impl Fp8Row {
    /// `[H/512]`: power-of-two scales as UE8M0 (the exponent plus 127; 255 for an infinite scale),
    /// four in a word, the first in the least significant byte.
    pub fn ue8m0_words(&self) -> Vec<u32> {
        let exponent = |&scale: &f32| match scale.is_finite() {
            true => scale.log2() as i32 + 127,
            false => 255,
        };
        let exponents: Vec<i32> = self.scales.iter().map(exponent).collect();
        exponents
            .chunks_exact(4)
            .map(|four| u32::from_le_bytes(std::array::from_fn(|i| four[i] as u8)))
            .collect()
    }
}

/// Casts a row `[H]`, `H` a multiple of 128, block by block, in f32 arithmetic: `amax` is the
/// largest magnitude in the block, NaN ignored, and at least 1e-4.
///
/// - [`ScaleFormat::F32`]: scale `amax * (1/448)`, codes of `x * (448/amax)`.
/// - [`ScaleFormat::PowerOfTwo`]: scale `2^e` with `e = ceil(log2(amax * (1/448)))`, codes of
///   `x * 2^-e`.
///
/// With an infinity in the block the scale is infinite, finite values become zeros that keep their
/// sign, and the infinity becomes NaN.
pub fn cast_row(x: &[bf16], format: ScaleFormat) -> Fp8Row {
    let values = positive_values();
    let mut row = Fp8Row {
        codes: Vec::new(),
        scales: Vec::new(),
    };
    for block in x.chunks_exact(BLOCK) {
        let magnitudes = block.iter().map(|x| x.to_f32().abs());
        let amax = magnitudes.filter(|x| !x.is_nan()).fold(1e-4, f32::max);
        let quotient = amax * (1.0 / 448.0);
        let (scale, factor) = match format {
            ScaleFormat::F32 => (quotient, 448.0 / amax),
            ScaleFormat::PowerOfTwo => power_of_two(quotient),
        };
        row.scales.push(scale);
        let codes = block.iter().map(|x| encode(x.to_f32() * factor, &values));
        row.codes.extend(codes);
    }
    row
}

/// `2^e` and `2^-e` for the smallest power of two that is at least `quotient`. As `amax` is at least
/// 1e-4, `e` is above -23.
fn power_of_two(quotient: f32) -> (f32, f32) {
    if quotient.is_infinite() {
        return (f32::INFINITY, 0.0);
    }
    let mut exponent = -23;
    while 2f64.powi(exponent) < f64::from(quotient) {
        exponent += 1;
    }
    (2f64.powi(exponent) as f32, 2f64.powi(-exponent) as f32)
}

/// The number that an E4M3 code stands for (OCP FP8 specification, revision 1.0): a sign, four
/// bits of exponent with bias 7, three bits of mantissa, subnormal numbers, no infinities; all ones
/// but the sign is NaN.
pub fn decode(code: u8) -> f32 {
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    let exponent = i32::from(code >> 3 & 0xf);
    let mantissa = f32::from(code & 7);
    match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa / 8.0 * 2f32.powi(-6),
        _ => sign * (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    }
}

/// Code `c` in `0..=126` stands for the `c`-th of these, from 0 to 448, ascending.
fn positive_values() -> Vec<f32> {
    (0..=126).map(decode).collect()
}

/// The code nearest to `value`; of two equally near the even one. Beyond 448 it is 448.
fn encode(value: f32, values: &[f32]) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = f64::from(value.abs());
    let above = values.partition_point(|&v| f64::from(v) < magnitude);
    if above == 0 || above == values.len() {
        return sign | above.min(values.len() - 1) as u8;
    }
    let below = above - 1;
    let to_above = f64::from(values[above]) - magnitude;
    let to_below = magnitude - f64::from(values[below]);
    let nearer_above = to_above < to_below || (to_above == to_below && above % 2 == 0);
    sign | if nearer_above { above } else { below } as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(value: f32) -> u8 {
        encode(value, &positive_values())
    }

    #[test]
    fn codes_decode_to_the_numbers_of_the_specification() {
        assert_eq!(decode(0x00), 0.0);
        assert_eq!(decode(0x01), 2f32.powi(-9));
        assert_eq!(decode(0x08), 2f32.powi(-6));
        assert_eq!(decode(0x38), 1.0);
        assert_eq!(decode(0x3c), 1.5);
        assert_eq!(decode(0xb8), -1.0);
        assert_eq!(decode(0x7e), 448.0);
        assert!(decode(0x7f).is_nan() && decode(0xff).is_nan());
        assert!(positive_values().is_sorted());
    }

    #[test]
    fn codes_are_the_nearest_with_ties_to_even() {
        for c in (0..=126).chain(128..=254) {
            assert_eq!(code(decode(c)), c);
        }
        // 1.0 is 0x38, 1.125 is 0x39, 1.25 is 0x3a.
        assert_eq!(code(1.0625), 0x38);
        assert_eq!(code(1.0626), 0x39);
        assert_eq!(code(1.1875), 0x3a);
        assert_eq!(code(2f32.powi(-10)), 0x00);
        assert_eq!(code(2f32.powi(-10) * 1.01), 0x01);
        assert_eq!(code(-1e-30), 0x80);
        assert_eq!(code(464.0), 0x7e);
        assert_eq!(code(1e30), 0x7e);
        assert_eq!(code(f32::NEG_INFINITY), 0xfe);
        assert_eq!(code(f32::NAN), 0x7f);
    }

    #[test]
    fn codes_agree_with_an_independent_crate() {
        for bits in (0..=u32::from(u16::MAX)).map(|high| high << 16 | 0x8000) {
            let value = f32::from_bits(bits);
            // That crate makes NaN of what is out of range.
            if value.abs() <= 448.0 {
                assert_eq!(
                    code(value),
                    float8::F8E4M3::from_f32(value).to_bits(),
                    "{value}"
                );
            }
        }
    }

    #[test]
    fn a_block_is_scaled_by_its_largest_magnitude() {
        let mut x = [bf16::ZERO; 256];
        (x[0], x[1], x[2]) = (bf16::from_f32(-7.0), bf16::from_f32(3.5), bf16::NAN);
        let row = cast_row(&x, ScaleFormat::F32);
        assert_eq!(row.codes[..4], [0xfe, 0x76, 0x7f, 0x00]);
        assert_eq!(row.scales, [7.0 * (1.0 / 448.0), 1e-4 * (1.0 / 448.0)]);
        // 7/448 is 2^-6: -7 * 2^6 = -448.
        let row = cast_row(&x, ScaleFormat::PowerOfTwo);
        assert_eq!(row.codes[..4], [0xfe, 0x76, 0x7f, 0x00]);
        // 1e-4/448 is 2.2e-7, between 2^-23 and 2^-22.
        assert_eq!(row.scales, [2f32.powi(-6), 2f32.powi(-22)]);
        // Just above a power of two: the next one, so codes halve.
        x[0] = bf16::from_bits(x[0].to_bits() + 1);
        let row = cast_row(&x, ScaleFormat::PowerOfTwo);
        assert_eq!((row.codes[0], row.scales[0]), (0xf6, 2f32.powi(-5)));
    }

    #[test]
    fn an_infinity_makes_its_block_zeros_and_nan() {
        let mut x = [bf16::ONE; 512];
        (x[0], x[1]) = (bf16::INFINITY, bf16::NEG_ONE);
        for format in [ScaleFormat::F32, ScaleFormat::PowerOfTwo] {
            let row = cast_row(&x, format);
            assert_eq!(row.codes[..3], [0x7f, 0x80, 0x00]);
            assert_eq!(row.scales[0], f32::INFINITY);
        }
        // 1/448 lies between 2^-9 and 2^-8.
        let words = cast_row(&x, ScaleFormat::PowerOfTwo).ue8m0_words();
        assert_eq!(words, [u32::from_le_bytes([255, 119, 119, 119])]);
    }
}
