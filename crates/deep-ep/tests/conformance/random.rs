//! Random numbers that are the same on every rank.

use deep_ep::reference::Number;

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// A stream of its own for each list of numbers.
    pub(crate) fn new(of: &[usize]) -> Self {
        let mut this = Self(0x5851_f42d_4c95_7f2d);
        for &number in of {
            this.0 = this.next() ^ number as u64;
        }
        this.next();
        this
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// Whether something of that chance happens.
    pub(crate) fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    /// Between -1 and 1.
    pub(crate) fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// Normally distributed (Box and Muller: A note on the generation of random normal deviates,
    /// 1958).
    pub(crate) fn normal(&mut self) -> f32 {
        let uniform = |bits: u64| ((bits >> 40) + 1) as f32 / (1u32 << 24) as f32;
        let (radius, angle) = (uniform(self.next()), uniform(self.next()));
        (-2.0 * radius.ln()).sqrt() * (std::f32::consts::TAU * angle).cos()
    }

    /// Of various magnitudes, so that sums depend on the order.
    pub(crate) fn value(&mut self) -> f32 {
        let power = self.below(12) as i32 - 8;
        self.signed() * 2f32.powi(power)
    }

    /// As [`value`](Self::value), now and then something that is not a normal number.
    pub(crate) fn any_value(&mut self) -> f32 {
        match self.below(400) {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            3 => -0.0,
            4 => f32::from_bits(0x0012_0000),
            5 => 3e38,
            _ => self.value(),
        }
    }

    /// A row of values.
    pub(crate) fn row<V: Number>(&mut self, len: usize) -> Vec<V> {
        (0..len).map(|_| V::from_f32(self.any_value())).collect()
    }

    /// A row of normal numbers.
    pub(crate) fn tame_row<V: Number>(&mut self, len: usize) -> Vec<V> {
        (0..len).map(|_| V::from_f32(self.value())).collect()
    }
}
