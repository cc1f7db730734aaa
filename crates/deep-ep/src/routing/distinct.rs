//! Choices without repetitions, as the low-latency calls deliver them.

use super::{
    ExpertMap, MAX_TOP_K,
    indices::{ExpertIndex, TopK, check_shape},
};
use crate::{dtype::DType, error::Result, tensor::Tensor};

/// Which of one token's choices are the first of their expert: bit `k` is set if `topk_idx[k]` is
/// not negative and no earlier choice of this token names the same expert. The set bits are the
/// rows to deliver. Only the first 64 choices are looked at.
#[inline]
pub fn first_choices<I: ExpertIndex>(topk_idx: &[I]) -> u64 {
    let topk_idx = &topk_idx[..topk_idx.len().min(MAX_TOP_K)];
    let mut first = 0;
    for (k, &id) in topk_idx.iter().enumerate() {
        let earlier = &topk_idx[..k];
        let repeated = earlier
            .iter()
            .fold(false, |any, &other| any | (other == id));
        first |= u64::from(id > I::NONE && !repeated) << k;
    }
    first
}

/// How many rows each expert gets when every token sends one row to each of its distinct experts.
#[derive(Debug, Clone, Default)]
pub struct DistinctCounts {
    tokens_per_expert: Vec<u32>,
}

impl DistinctCounts {
    /// Counts of no tokens; nothing is allocated.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts the distinct choices in `topk_idx`, `i64` or `i32` `[T, K]` with any strides.
    ///
    /// # Errors
    /// As [`Routes::rebuild`](super::Routes::rebuild). After an error there are no counts.
    pub fn rebuild(&mut self, topk_idx: &Tensor<'_>, map: &ExpertMap) -> Result<()> {
        self.tokens_per_expert.clear();
        check_shape(topk_idx)?;
        match topk_idx.dtype() {
            DType::I32 => self.count(&TopK::<i32>::new(topk_idx, map.experts())?, map),
            _ => self.count(&TopK::<i64>::new(topk_idx, map.experts())?, map),
        }
        Ok(())
    }

    fn count<I: ExpertIndex>(&mut self, topk: &TopK<'_, I>, map: &ExpertMap) {
        let counts = &mut self.tokens_per_expert;
        counts.resize(map.experts(), 0);
        topk.for_each_row(|_, row| {
            let mut first = first_choices(row);
            while first != 0 {
                let k = first.trailing_zeros() as usize;
                counts[row[k].widen() as usize] += 1;
                first &= first - 1;
            }
        });
    }

    /// `[E]`: the number of tokens that chose the expert at least once.
    pub fn tokens_per_distinct_expert(&self) -> &[u32] {
        &self.tokens_per_expert
    }
}
