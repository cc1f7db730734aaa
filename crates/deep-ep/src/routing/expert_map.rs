//! Which rank hosts which expert.

use std::ops::Range;

use crate::{
    error::{Error, Result},
    topology::Rank,
};

/// `E` experts in equal blocks on `R` ranks: rank `r` hosts `[r * E/R, (r + 1) * E/R)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertMap {
    experts: u32,
    ranks: u32,
    per_rank: u32,
    // `expert / per_rank` is `expert * reciprocal >> shift`; see `new`.
    reciprocal: u32,
    shift: u32,
}

impl ExpertMap {
    /// `num_experts` experts on `num_ranks` ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are no ranks, no experts, 2^31 experts or more, or
    /// `num_experts` is no multiple of `num_ranks`.
    pub fn new(num_experts: usize, num_ranks: usize) -> Result<Self> {
        if num_ranks == 0 {
            return Err(Error::invalid("num_ranks", num_ranks, "must be at least 1"));
        }
        if num_experts == 0 || num_experts >= 1 << 31 {
            return Err(Error::invalid(
                "num_experts",
                num_experts,
                "must be at least 1 and below 2^31",
            ));
        }
        if !num_experts.is_multiple_of(num_ranks) {
            return Err(Error::invalid(
                "num_experts",
                num_experts,
                format!("must be a multiple of num_ranks = {num_ranks}"),
            ));
        }
        // With d = per_rank, L = ceil(log2 d) and m = ceil(2^(31 + L) / d), the excess
        // m * d - 2^(31 + L) is below d <= 2^L, so n * m >> (31 + L) is n / d for every n < 2^31
        // (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994,
        // theorem 4.2). As d > 2^(L - 1), m fits in 32 bits and n * m in 63.
        let per_rank = num_experts / num_ranks;
        let shift = 31 + per_rank.next_power_of_two().trailing_zeros();
        let reciprocal = (1u64 << shift).div_ceil(per_rank as u64);
        Ok(Self {
            experts: num_experts as u32,
            ranks: num_ranks as u32,
            per_rank: per_rank as u32,
            reciprocal: reciprocal as u32,
            shift,
        })
    }

    /// `E`, the number of experts on all ranks.
    pub fn experts(&self) -> usize {
        self.experts as usize
    }

    /// `R`, the number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks as usize
    }

    /// `E/R`, the number of experts on each rank.
    pub fn experts_per_rank(&self) -> usize {
        self.per_rank as usize
    }

    /// The experts of `rank`, by their numbers on all ranks.
    pub fn experts_of(&self, rank: Rank) -> Range<usize> {
        let first = rank.0 * self.experts_per_rank();
        first..first + self.experts_per_rank()
    }

    /// The rank that hosts `expert`, without a division. `expert` must be below `E`.
    #[inline]
    pub fn rank_of(&self, expert: usize) -> Rank {
        debug_assert!(expert < self.experts());
        Rank(self.block_of(expert))
    }

    /// The number of `expert` on its own rank, `0..E/R`. `expert` must be below `E`.
    #[inline]
    pub fn local_of(&self, expert: usize) -> usize {
        expert - self.rank_of(expert).0 * self.experts_per_rank()
    }

    /// `expert / (E/R)` for any `expert < 2^31`; `E` itself gives `R`.
    #[inline]
    pub(super) fn block_of(&self, expert: usize) -> usize {
        ((expert as u64 * u64::from(self.reciprocal)) >> self.shift) as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn blocks_of_six_experts_on_three_ranks() {
        let map = ExpertMap::new(6, 3).unwrap();
        let ranks: Vec<_> = (0..6).map(|expert| map.rank_of(expert).0).collect();
        let locals: Vec<_> = (0..6).map(|expert| map.local_of(expert)).collect();
        assert_eq!(ranks, [0, 0, 1, 1, 2, 2]);
        assert_eq!(locals, [0, 1, 0, 1, 0, 1]);
        assert_eq!(map.experts_of(Rank(1)), 2..4);
    }

    #[test]
    fn the_largest_numbers_divide_exactly() {
        let largest = (1usize << 31) - 1;
        for ranks in [1, largest] {
            let map = ExpertMap::new(largest, ranks).unwrap();
            assert_eq!(
                map.rank_of(largest - 1).0,
                (largest - 1) / (largest / ranks)
            );
        }
    }

    #[test]
    fn unusable_sizes_are_named() {
        let message = |experts, ranks| ExpertMap::new(experts, ranks).unwrap_err().to_string();
        assert_eq!(
            message(10, 4),
            "num_experts is 10, but it must be a multiple of num_ranks = 4"
        );
        assert!(message(0, 4).starts_with("num_experts is 0"));
        assert!(message(1 << 31, 1).starts_with("num_experts is 2147483648"));
        assert!(message(8, 0).starts_with("num_ranks is 0"));
        assert!(message(2, 4).contains("multiple"));
    }

    proptest! {
        #[test]
        fn blocks_are_quotients(per_rank in 1usize..1 << 31, near in any::<u32>(), off in 0usize..3) {
            let ranks = ((1usize << 31) - 1) / per_rank;
            let map = ExpertMap::new(per_rank * ranks, ranks).unwrap();
            // Quotients go wrong next to multiples first.
            let multiple = near as usize % (ranks + 1) * per_rank;
            for expert in [multiple.saturating_sub(off), multiple + off, near as usize >> 1] {
                let expert = expert.min((1 << 31) - 1);
                prop_assert_eq!(map.block_of(expert), expert / per_rank);
            }
        }
    }
}
