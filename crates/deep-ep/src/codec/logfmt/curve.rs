//! Logarithm and power to base 2, the same bits everywhere.
//!
//! Library functions differ between systems in their last bits, so these are polynomials of a fixed
//! form: f32 additions, subtractions and multiplications in the order written, each rounded to
//! nearest, none fused, and integer operations on the bits. They are part of the format: another
//! implementation takes the coefficients and the order from here. They are minimax fits.

/// 1.5 * 2^23: adding it to a number below 2^22 rounds that to an integer, in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// log2 of the number with the bits `bits` (positive, normal), within 1.6e-5, and exact for powers
/// of two. What it gives for zero and subnormal numbers is below -126.
///
/// With the number as `2^e * (1 + t)`: `e + (t + t * (1 - t) * q(t))`.
#[inline(always)]
pub(super) fn log2(bits: u32) -> f32 {
    const Q: [f32; 4] = [0.441_917_03, -0.267_179_34, 0.148_426_47, -0.045_148_93];
    let exponent = ((bits >> 23) as i32 - 127) as f32;
    let t = f32::from_bits(bits & 0x7f_ffff | 0x3f80_0000) - 1.0;
    let q = Q[0] + t * (Q[1] + t * (Q[2] + t * Q[3]));
    exponent + (t + (t * (1.0 - t)) * q)
}

/// 2^y for y from -126 to 128, within 4e-6 of it, and exact for integers.
///
/// With y as an integer plus f, |f| at most 1/2: `2^integer * (1 + f * p(f))`.
#[inline(always)]
pub(super) fn exp2(y: f32) -> f32 {
    const P: [f32; 4] = [0.693_121_55, 0.240_220_2, 0.055_919_71, 0.009_681_91];
    let rounded = y + ROUNDER;
    let integer = rounded.to_bits().wrapping_sub(ROUNDER.to_bits());
    let f = y - (rounded - ROUNDER);
    let p = 1.0 + f * (P[0] + f * (P[1] + f * (P[2] + f * P[3])));
    f32::from_bits(p.to_bits().wrapping_add(integer << 23))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_are_as_close_as_they_say() {
        for bits in (0x0080_0000..0x7f80_0000u32).step_by(4099) {
            let x = f64::from(f32::from_bits(bits));
            // Besides the polynomial's error, the result's own last bit.
            let tolerance = 1.6e-5 + x.log2().abs() * f64::from(f32::EPSILON);
            assert!(
                (f64::from(log2(bits)) - x.log2()).abs() < tolerance,
                "log2({x})"
            );
        }
        for i in 0..=254_000 {
            let y = (i - 126_000) as f32 / 1000.0;
            let exact = f64::from(y).exp2();
            assert!(
                (f64::from(exp2(y)) / exact - 1.0).abs() < 4e-6 || y >= 127.999,
                "exp2({y})"
            );
        }
        for e in -126..=127 {
            let power = 2f32.powi(e);
            assert_eq!((log2(power.to_bits()), exp2(e as f32)), (e as f32, power));
        }
    }

    #[test]
    fn the_logarithm_does_not_fall_where_it_must_not() {
        // On the bf16 grid, on which a block's limits lie, and across octaves.
        let mut last = f32::NEG_INFINITY;
        for half in 0x0080..0x7f80u32 {
            let now = log2(half << 16);
            assert!(now > last);
            last = now;
        }
    }
}
