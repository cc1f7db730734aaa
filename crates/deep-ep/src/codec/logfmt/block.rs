//! One block: which form it takes, its header and its payload.
//!
//! Everything is inlined into functions that are compiled once per instruction set; the loops are
//! plain, so that the compiler makes vectors of them.

use half::bf16;

use super::{LOGFMT_BLOCK, curve};
use crate::codec::{bf16_to_f32, f32_to_bf16};

/// Steps between the lowest and the highest level.
const STEPS: f32 = 510.0;

/// Octaves that levels span at most, as a difference of upper f32 halves.
const SPAN: u16 = 8 << 7;

/// The lowest `high`: with `SPAN` below it, and half of that, levels are still normal numbers.
const HIGH_MIN: u16 = SPAN + 0x0100;

/// The highest `high`: the largest finite bf16.
const HIGH_MAX: u16 = 0x7f7f;

/// One value in so many may be below the lowest level.
const FEW: usize = 16;

/// Header of a raw block.
const RAW: u32 = u32::MAX;

/// How a block travels.
#[derive(Clone, Copy)]
pub(super) enum Form {
    /// Only zeros.
    Zero,
    /// As bf16.
    Raw,
    /// As codes between these levels (upper halves of their f32 bits).
    Log { high: u16, low: u16 },
}

impl Form {
    /// The form for the values `x`.
    #[inline(always)]
    pub(super) fn choose(x: &[f32]) -> Self {
        let (mut max, mut min_less_one) = (0, u32::MAX);
        for x in x {
            let magnitude = x.to_bits() & 0x7fff_ffff;
            max = max.max(magnitude);
            // Zero becomes the largest number and never the least.
            min_less_one = min_less_one.min(magnitude.wrapping_sub(1));
        }
        if max == 0 {
            return Self::Zero;
        }
        let high = (max >> 16) as u16 + u16::from(max & 0xffff != 0);
        if !(HIGH_MIN..=HIGH_MAX).contains(&high) {
            return Self::Raw;
        }
        let min = min_less_one.wrapping_add(1);
        let low = ((min >> 16) as u16).max(high - SPAN);
        let form = Self::Log { high, low };
        let level = u32::from(low) << 16;
        let mut below = 0;
        for x in x {
            let magnitude = x.to_bits() & 0x7fff_ffff;
            below += u32::from(magnitude < level && magnitude != 0);
        }
        let no_gain = form.payload_bytes(x.len()) >= Self::Raw.payload_bytes(x.len());
        if below as usize * FEW > x.len() || no_gain {
            return Self::Raw;
        }
        form
    }

    /// The header that says so.
    #[inline(always)]
    pub(super) fn header(self) -> u32 {
        match self {
            Self::Zero => 0,
            Self::Raw => RAW,
            Self::Log { high, low } => u32::from(high) << 16 | u32::from(low),
        }
    }

    /// What a header says, if it says anything.
    #[inline(always)]
    pub(super) fn parse(header: u32) -> Option<Self> {
        let (high, low) = ((header >> 16) as u16, header as u16);
        match header {
            0 => Some(Self::Zero),
            RAW => Some(Self::Raw),
            _ if (HIGH_MIN..=HIGH_MAX).contains(&high) && (high - SPAN..=high).contains(&low) => {
                Some(Self::Log { high, low })
            }
            _ => None,
        }
    }

    /// Bytes of the payload of `n` values, filling included.
    #[inline(always)]
    pub(super) fn payload_bytes(self, n: usize) -> usize {
        match self {
            Self::Zero => 0,
            Self::Raw => (2 * n).next_multiple_of(16),
            Self::Log { .. } => (n + n / 4).next_multiple_of(16),
        }
    }

    /// Writes the payload of `x` to all of `out`, which is as long as [`Form::payload_bytes`] says.
    #[inline(always)]
    pub(super) fn write(self, x: &[f32], out: &mut [u8]) {
        match self {
            Self::Zero => {}
            Self::Raw => {
                let (values, filling) = out.split_at_mut(2 * x.len());
                for (x, out) in x.iter().zip(values.as_chunks_mut().0) {
                    *out = f32_to_bf16(*x).to_le_bytes();
                }
                filling.fill(0);
            }
            Self::Log { high, low } => {
                let (codes, filling) = out.split_at_mut(x.len() + x.len() / 4);
                Levels::new(high, low).write(x, codes);
                filling.fill(0);
            }
        }
    }

    /// Reads a payload, which is as long as [`Form::payload_bytes`] says for `out`.
    #[inline(always)]
    pub(super) fn read(self, payload: &[u8], out: &mut [f32]) {
        match self {
            Self::Zero => out.fill(0.0),
            Self::Raw => {
                for (bytes, out) in payload.as_chunks().0.iter().zip(out) {
                    *out = bf16_to_f32(bf16::from_le_bytes(*bytes));
                }
            }
            Self::Log { high, low } => Levels::new(high, low).read(payload, out),
        }
    }
}

/// The levels of a logarithmic block.
struct Levels {
    /// Bits of half the lowest level: magnitudes below become zero.
    half_low: u32,
    /// Logarithm of the lowest level.
    start: f32,
    /// From the lowest to the highest.
    range: f32,
}

/// The lowest bit of each byte.
const ONES: u64 = 0x0101_0101_0101_0101;

impl Levels {
    #[inline(always)]
    fn new(high: u16, low: u16) -> Self {
        let start = curve::log2(u32::from(low) << 16);
        Self {
            half_low: (u32::from(low) << 16) - (1 << 23),
            start,
            range: curve::log2(u32::from(high) << 16) - start,
        }
    }

    /// Writes the three planes of codes; `out` is 10/8 as long as `x`.
    #[inline(always)]
    fn write(&self, x: &[f32], out: &mut [u8]) {
        let per_octave = if self.range > 0.0 {
            STEPS / self.range
        } else {
            0.0
        };
        // Bits 0 to 8 the code, bit 9 the sign.
        let mut codes = [0u16; LOGFMT_BLOCK];
        for (x, code) in x.iter().zip(&mut codes) {
            *code = self.code(x.to_bits(), per_octave);
        }
        let (lows, highs) = out.split_at_mut(x.len());
        let (bits8, signs) = highs.split_at_mut(x.len() / 8);
        let mut rest = [0u8; LOGFMT_BLOCK];
        for ((code, low), rest) in codes.iter().zip(lows).zip(&mut rest) {
            (*low, *rest) = (*code as u8, (code >> 8) as u8);
        }
        let rest = rest.as_chunks::<8>().0;
        for ((rest, bit8), sign) in rest.iter().zip(bits8).zip(signs) {
            let rest = u64::from_le_bytes(*rest);
            *bit8 = gather(rest & ONES);
            *sign = gather(rest >> 1 & ONES);
        }
    }

    #[inline(always)]
    fn code(&self, bits: u32, per_octave: f32) -> u16 {
        /// 2^23: adding it to a smaller number rounds that to an integer, in the low bits.
        const ROUNDER: f32 = 8_388_608.0;
        let magnitude = bits & 0x7fff_ffff;
        let step = (curve::log2(magnitude) - self.start) * per_octave;
        let step = if step > 0.0 { step } else { 0.0 };
        let step = if step < STEPS { step } else { STEPS };
        let level = ((step + ROUNDER).to_bits() - ROUNDER.to_bits()) + 1;
        let code = if magnitude < self.half_low { 0 } else { level };
        (code | bits >> 31 << 9) as u16
    }

    /// Reads the three planes of codes; `payload` is at least 10/8 as long as `out`.
    #[inline(always)]
    fn read(&self, payload: &[u8], out: &mut [f32]) {
        let (lows, highs) = payload.split_at(out.len());
        let (bits8, signs) = highs.split_at(out.len() / 8);
        let mut rest = [0u8; LOGFMT_BLOCK];
        for ((rest, bit8), sign) in (rest.as_chunks_mut().0.iter_mut().zip(bits8)).zip(signs) {
            *rest = (spread(*bit8) | spread(*sign) << 1).to_le_bytes();
        }
        let step = self.range * (1.0 / STEPS);
        for ((rest, low), out) in rest.iter().zip(lows).zip(out) {
            let rest = u32::from(*rest);
            let code = u32::from(*low) | (rest & 1) << 8;
            let steps = (code as i32 - 1) as f32;
            let level = curve::exp2(self.start + steps * step).to_bits();
            let magnitude = if code == 0 { 0 } else { level };
            *out = f32::from_bits(magnitude | rest >> 1 << 31);
        }
    }
}

/// The lowest bits of eight bytes, as a byte; the other bits of `bytes` are 0.
#[inline(always)]
fn gather(bytes: u64) -> u8 {
    // Bit 8i is multiplied by 2^(56 - 7i) and lands in bit 56 + i; no two products meet.
    (bytes.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8
}

/// The inverse of [`gather`].
#[inline(always)]
fn spread(bits: u8) -> u64 {
    // Byte i keeps only bit i, then becomes 1 if that is set.
    let alone = (u64::from(bits) * ONES) & 0x8040_2010_0804_0201;
    (alone + 0x7f7f_7f7f_7f7f_7f7f) >> 7 & ONES
}
