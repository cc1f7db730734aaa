//! A batch of tokens with the router's choices, and its split over ranks.

use std::ops::Range;

use anyhow::Result;
use deep_ep::Tensor;
use half::bf16;

/// Expert ids of either width; they are dispatched as they came.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ids {
    I32(Vec<i32>),
    I64(Vec<i64>),
}

impl Ids {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::I32(ids) => ids.len(),
            Self::I64(ids) => ids.len(),
        }
    }

    pub(crate) fn get(&self, at: usize) -> i64 {
        match self {
            Self::I32(ids) => ids[at].into(),
            Self::I64(ids) => ids[at],
        }
    }

    fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::I32(ids) => Self::I32(ids[range].to_vec()),
            Self::I64(ids) => Self::I64(ids[range].to_vec()),
        }
    }

    pub(crate) fn tensor(&self, shape: &[usize]) -> Result<Tensor<'_>> {
        Ok(match self {
            Self::I32(ids) => Tensor::new(ids, shape)?,
            Self::I64(ids) => Tensor::new(ids, shape)?,
        })
    }
}

/// Sizes of a batch over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Sizes {
    /// Tokens over all ranks.
    pub(crate) tokens: usize,
    /// Hidden size, in elements.
    pub(crate) hidden: usize,
    /// Choices of a token.
    pub(crate) top_k: usize,
    /// Experts over all ranks.
    pub(crate) experts: usize,
}

impl Sizes {
    /// The tokens of `rank`: contiguous blocks whose lengths differ by at most one.
    pub(crate) fn shard(&self, rank: usize, ranks: usize) -> Range<usize> {
        let at = |rank: usize| (self.tokens as u128 * rank as u128 / ranks as u128) as usize;
        at(rank)..at(rank + 1)
    }

    /// The most tokens of any rank.
    pub(crate) fn largest_shard(&self, ranks: usize) -> usize {
        self.tokens.div_ceil(ranks)
    }
}

/// Tokens of one rank, or of all.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Batch {
    /// Sizes; `tokens` are those in this batch.
    pub(crate) sizes: Sizes,
    /// `[T, H]`.
    pub(crate) x: Vec<bf16>,
    /// `[T, K]`.
    pub(crate) topk_idx: Ids,
    /// `[T, K]`.
    pub(crate) topk_weights: Vec<f32>,
}

impl Batch {
    /// A copy of the tokens in `range`.
    pub(crate) fn slice(&self, range: Range<usize>) -> Self {
        let Sizes { hidden, top_k, .. } = self.sizes;
        let choices = range.start * top_k..range.end * top_k;
        Self {
            sizes: Sizes {
                tokens: range.len(),
                ..self.sizes
            },
            x: self.x[range.start * hidden..range.end * hidden].to_vec(),
            topk_idx: self.topk_idx.slice(choices.clone()),
            topk_weights: self.topk_weights[choices].to_vec(),
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.sizes.tokens
    }

    /// `x` as `[T, H]` bf16.
    pub(crate) fn x(&self) -> Result<Tensor<'_>> {
        Ok(Tensor::new(
            &self.x,
            &[self.sizes.tokens, self.sizes.hidden],
        )?)
    }

    /// `topk_idx` as `[T, K]` of the width it came with.
    pub(crate) fn topk_idx(&self) -> Result<Tensor<'_>> {
        self.topk_idx.tensor(&[self.sizes.tokens, self.sizes.top_k])
    }

    /// `topk_weights` as `[T, K]` f32.
    pub(crate) fn topk_weights(&self) -> Result<Tensor<'_>> {
        Ok(Tensor::new(
            &self.topk_weights,
            &[self.sizes.tokens, self.sizes.top_k],
        )?)
    }

    /// Row of token `t`.
    pub(crate) fn row(&self, t: usize) -> &[bf16] {
        &self.x[t * self.sizes.hidden..][..self.sizes.hidden]
    }

    /// Expert ids of token `t`, negative ones included.
    pub(crate) fn ids(&self, t: usize) -> impl Iterator<Item = i64> + '_ {
        let k = self.sizes.top_k;
        (t * k..(t + 1) * k).map(|at| self.topk_idx.get(at))
    }

    /// How many blocks of `size` neighbouring experts token `t` has a choice in: the ranks it goes
    /// to, if a rank has `size` experts.
    pub(crate) fn distinct(&self, t: usize, size: usize) -> usize {
        let block = |id: i64| id / size as i64;
        self.ids(t)
            .enumerate()
            .filter(|&(k, id)| {
                id >= 0
                    && !self
                        .ids(t)
                        .take(k)
                        .any(|other| other >= 0 && block(other) == block(id))
            })
            .count()
    }

    /// Weights of token `t`.
    pub(crate) fn weights(&self, t: usize) -> &[f32] {
        &self.topk_weights[t * self.sizes.top_k..][..self.sizes.top_k]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_contiguous_and_even() {
        let sizes = Sizes {
            tokens: 10,
            hidden: 8,
            top_k: 1,
            experts: 4,
        };
        let shards: Vec<_> = (0..4).map(|rank| sizes.shard(rank, 4)).collect();
        assert_eq!(shards, [0..2, 2..5, 5..7, 7..10]);
        assert_eq!(sizes.largest_shard(4), 3);
        let none = Sizes { tokens: 0, ..sizes };
        assert_eq!((none.shard(3, 4), none.largest_shard(4)), (0..0, 0));
    }
}
