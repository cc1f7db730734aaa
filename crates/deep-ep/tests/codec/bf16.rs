//! bf16 against `half`.

use deep_ep::codec::{bf16_to_f32, f32_to_bf16};
use half::bf16;

#[test]
fn rounding_agrees_with_half_and_nan_is_canonical() {
    let check = |bits: u32| {
        let x = f32::from_bits(bits);
        let rounded = f32_to_bf16(x).to_bits();
        if x.is_nan() {
            assert_eq!(rounded, 0x7fff, "{bits:#x}");
        } else {
            assert_eq!(rounded, bf16::from_f32(x).to_bits(), "{bits:#x}");
        }
    };
    for upper in 0..=0xffffu32 {
        // Exact, just off, at and around the tie, and the last before the next.
        for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            check(upper << 16 | lower);
        }
    }
    (0..=u32::MAX).step_by(251).for_each(check);
}

#[test]
fn widening_keeps_all_bits() {
    for bits in 0..=u16::MAX {
        assert_eq!(
            bf16_to_f32(bf16::from_bits(bits)).to_bits(),
            u32::from(bits) << 16
        );
    }
}
