//! Prefix sums and alignment of counts.

use std::ops::Add;

/// `value` rounded up to a multiple of `alignment`. An alignment of 0 is taken as 1. A result that
/// does not fit saturates.
pub fn align_up(value: usize, alignment: usize) -> usize {
    value
        .checked_next_multiple_of(alignment.max(1))
        .unwrap_or(usize::MAX)
}

/// Rounds each count up to a multiple of `alignment`, in place, as `expert_alignment` asks for.
/// An alignment of 0 is taken as 1.
pub fn align_counts(counts: &mut [usize], alignment: usize) {
    for count in counts {
        *count = align_up(*count, alignment);
    }
}

/// Replaces each value by the sum of itself and all before it, in place: `[2, 0, 3]` becomes
/// `[2, 2, 5]`. For `u64` and `usize`.
pub fn inclusive_prefix_sum<N: Copy + Default + Add<Output = N>>(values: &mut [N]) {
    let mut sum = N::default();
    for value in values {
        sum = sum + *value;
        *value = sum;
    }
}

/// Replaces each value by the sum of all before it, in place, and returns the sum of all:
/// `[2, 0, 3]` becomes `[0, 2, 2]` and gives 5. For `u64` and `usize`.
pub fn exclusive_prefix_sum<N: Copy + Default + Add<Output = N>>(values: &mut [N]) -> N {
    let mut sum = N::default();
    for value in values {
        let next = sum + *value;
        *value = sum;
        sum = next;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_small_lists() {
        let mut values = [2u64, 0, 3];
        inclusive_prefix_sum(&mut values);
        assert_eq!(values, [2, 2, 5]);
        let mut values = [2usize, 0, 3];
        assert_eq!(exclusive_prefix_sum(&mut values), 5);
        assert_eq!(values, [0, 2, 2]);
        assert_eq!(exclusive_prefix_sum::<u64>(&mut []), 0);
    }

    #[test]
    fn sums_do_not_wrap_at_32_bits() {
        let mut values = [u64::from(u32::MAX); 3];
        assert_eq!(exclusive_prefix_sum(&mut values), 3 * u64::from(u32::MAX));
    }

    #[test]
    fn counts_are_rounded_up_and_empty_ones_stay_empty() {
        let mut counts = [0, 1, 128, 129];
        align_counts(&mut counts, 128);
        assert_eq!(counts, [0, 128, 128, 256]);
        assert_eq!(align_up(7, 0), 7);
        assert_eq!(align_up(7, 1), 7);
        assert_eq!(align_up(usize::MAX, 2), usize::MAX);
    }
}
