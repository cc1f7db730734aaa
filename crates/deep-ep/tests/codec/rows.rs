//! Rows of test values.

use half::bf16;

/// A small deterministic generator (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// Uniform between -1 and 1.
    pub(crate) fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Standard normal (Box-Muller).
    pub(crate) fn normal(&mut self) -> f32 {
        let [u, v] = [(); 2].map(|()| ((self.bits() >> 11) as f64 + 0.5) / (1u64 << 53) as f64);
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }

    /// A value of the kind that `mix` allows: 0 normal numbers only, 1 with zeros and numbers of
    /// any size, 2 with infinities and NaN of any payload, 3 any bits.
    pub(crate) fn value(&mut self, mix: u8) -> f32 {
        let any = f32::from_bits(self.bits() as u32);
        match (mix, self.below(64)) {
            (3, _) => any,
            (2.., 0) => [f32::INFINITY, f32::NEG_INFINITY][self.below(2)],
            (2.., 1) => f32::from_bits(any.to_bits() | 0x7f80_0000),
            (1.., 2) => [0.0, -0.0][self.below(2)],
            (1.., 3) if any.is_finite() => any,
            (1.., 4) => f32::from_bits(any.to_bits() & 0x807f_ffff),
            _ => self.normal(),
        }
    }

    pub(crate) fn f32_row(&mut self, length: usize, mix: u8) -> Vec<f32> {
        (0..length).map(|_| self.value(mix)).collect()
    }

    /// Upper halves, so that NaN payloads and subnormal numbers stay what they are.
    pub(crate) fn bf16_row(&mut self, length: usize, mix: u8) -> Vec<bf16> {
        (0..length)
            .map(|_| bf16::from_bits((self.value(mix).to_bits() >> 16) as u16))
            .collect()
    }
}

/// Bits of a row, for comparisons in which NaN counts.
pub(crate) fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}

/// Bits of a row of bf16.
pub(crate) fn bits16(row: &[bf16]) -> Vec<u16> {
    row.iter().map(|x| x.to_bits()).collect()
}
