//! High-throughput: everything is the same bit for bit.

use anyhow::Result;
use bytemuck::cast_slice;
use deep_ep::{
    DType, DispatchHandle, ReceivedCounts, Tensor,
    codec::SCALE_BLOCK,
    reference::high_throughput::{
        CombineRoutes, Dispatched, RankInput, Scales, combine_at, dispatch_to,
    },
};
use half::bf16;

use super::{Shard, Verifier, first_difference};
use crate::{batch::Sizes, expert, options::ExpertWork, report::Check};

/// What a rank received, wherever it is.
pub(crate) struct Received<'a> {
    /// `[N, H]`, bf16 or FP8 codes.
    pub(crate) x: &'a [u8],
    /// `[N, H/128]` with FP8.
    pub(crate) scales: Option<&'a [f32]>,
    /// `[N, K]`.
    pub(crate) topk_idx: Tensor<'a>,
    /// `[N, K]`.
    pub(crate) topk_weights: &'a [f32],
    pub(crate) counts: &'a ReceivedCounts,
    pub(crate) handle: &'a DispatchHandle,
}

impl Received<'_> {
    /// The bytes of row `n`.
    pub(crate) fn row(&self, n: usize) -> &[u8] {
        let bytes = self.x.len() / self.counts.output_rows;
        &self.x[n * bytes..][..bytes]
    }

    /// The scales of row `n`.
    pub(crate) fn row_scales(&self, n: usize) -> Option<&[f32]> {
        let scales = self.scales?;
        let blocks = scales.len() / self.counts.output_rows;
        Some(&scales[n * blocks..][..blocks])
    }

    /// `(local expert or -1, weight)` of row `n`.
    pub(crate) fn choices(&self, n: usize) -> impl Iterator<Item = (i64, f32)> + '_ {
        let top_k = self.topk_idx.shape()[1];
        (0..top_k).map(move |k| (self.local(n, k), self.topk_weights[n * top_k + k]))
    }

    fn local(&self, n: usize, k: usize) -> i64 {
        match self.topk_idx.dtype() {
            DType::I32 => self.topk_idx.at::<i32>(n, k).into(),
            _ => self.topk_idx.at::<i64>(n, k),
        }
    }
}

impl Verifier<'_> {
    /// Rows, indices, weights, counts and source tokens, and the combined result.
    pub(crate) fn high_throughput(
        &self,
        received: &Received<'_>,
        combined: &[bf16],
    ) -> Result<Check> {
        let mut check = Check::default();
        let counts = received.counts;
        let mut tokens_per_expert = vec![0; self.sizes().experts / self.ranks()];
        let mut begin = 0;
        for source in 0..self.ranks() {
            let shard = self.shard(source);
            let right = dispatch_to(
                self.rank,
                &self.only(source, &shard),
                self.sizes().experts,
                1,
            );
            let (rows, right_rows) = (counts.rows_from.get(source).copied(), right.rows());
            check.expect(rows == Some(right_rows), || {
                format!("{rows:?} rows came from rank {source}, it should be {right_rows}")
            });
            // Behind a wrong count everything is in another place.
            if check.mismatch.is_some() || counts.output_rows < begin + right_rows {
                break;
            }
            self.compare_rows(&mut check, received, begin, &right)?;
            tokens_per_expert
                .iter_mut()
                .zip(&right.tokens_per_expert)
                .for_each(|(sum, n)| *sum += n);
            begin += right_rows;
        }
        check.expect(counts.rows == Some(begin), || {
            format!("{:?} rows came, it should be {begin}", counts.rows)
        });
        let is = &counts.tokens_per_expert;
        check.expect(*is == tokens_per_expert, || {
            format!("tokens per expert are {is:?}, they should be {tokens_per_expert:?}")
        });
        self.compare_combined(&mut check, combined);
        Ok(check)
    }

    /// Inputs of all ranks of which only one has tokens.
    fn only<'b>(&self, rank: usize, shard: &'b Shard) -> Vec<RankInput<'b>> {
        let Sizes { hidden, top_k, .. } = self.sizes();
        let per_row = hidden / SCALE_BLOCK;
        let (row_bytes, x, scales) = match &shard.fp8 {
            None => (hidden * size_of::<bf16>(), cast_slice(&shard.batch.x), None),
            Some(rows) => (
                hidden,
                rows.code_bytes(),
                Some(Scales {
                    per_row,
                    data: rows.scale_bits(),
                }),
            ),
        };
        let empty = RankInput {
            tokens: 0,
            row_bytes,
            x: &[],
            scales: scales.map(|_| Scales { per_row, data: &[] }),
            top_k,
            topk_idx: &[],
            topk_weights: Some(&[]),
        };
        let mut inputs = vec![empty; self.ranks()];
        inputs[rank] = RankInput {
            tokens: shard.batch.tokens(),
            x,
            scales,
            topk_idx: &shard.ids,
            topk_weights: Some(&shard.batch.topk_weights),
            ..empty
        };
        inputs
    }

    /// The rows from `begin` on against those of one source.
    fn compare_rows(
        &self,
        check: &mut Check,
        received: &Received<'_>,
        begin: usize,
        right: &Dispatched<'_>,
    ) -> Result<()> {
        let source_tokens = received.handle.recv_src_idx().as_slice::<i32>()?;
        let top_k = self.sizes().top_k;
        let weights = right.topk_weights.as_deref().unwrap_or(&[]);
        for n in 0..right.rows() {
            let row = begin + n;
            let (source, token) = (right.src_rank[n], right.src_idx[n]);
            let place = || format!("of row {row} (token {token} of rank {source})");
            if let Some(byte) = first_difference(received.row(row), right.x[n]) {
                check.expect(false, || format!("byte {byte} {} is wrong", place()));
            }
            if let Some(right) = right.scales.as_ref().map(|scales| scales[n]) {
                let scales = received.row_scales(row).unwrap_or(&[]);
                check.expect(cast_slice::<f32, u32>(scales) == right, || {
                    format!("scales {} are wrong: {scales:?}", place())
                });
            }
            let said = source_tokens.get(row).copied();
            check.expect(
                said.is_some_and(|said| i64::from(said) == i64::from(token)),
                || format!("the source {} is said to be token {said:?}", place()),
            );
            for (k, (local, weight)) in received.choices(row).enumerate() {
                let (right_local, right_weight) =
                    (right.topk_idx[n * top_k + k], weights[n * top_k + k]);
                check.expect(local == right_local, || {
                    format!(
                        "index {k} {} is {local}, it should be {right_local}",
                        place()
                    )
                });
                check.expect(weight.to_bits() == right_weight.to_bits(), || {
                    format!(
                        "weight {k} {} is {weight}, it should be {right_weight}",
                        place()
                    )
                });
            }
        }
        Ok(())
    }

    fn compare_combined(&self, check: &mut Check, combined: &[bf16]) {
        let Sizes {
            hidden, experts, ..
        } = self.sizes();
        let shard = self.own_shard(check);
        let batch = &shard.batch;
        let routes = CombineRoutes::of(self.rank, &self.only(self.rank, &shard), experts);
        let per_rank = experts / self.ranks();
        let right = combine_at(&routes, hidden, &[], |rank, token| {
            if self.options.expert_work == ExpertWork::None {
                return shard.arrived(token).to_vec();
            }
            let choices = batch
                .ids(token)
                .zip(batch.weights(token))
                .filter(|&(id, _)| id >= 0 && id as usize / per_rank == rank)
                .map(|(id, &weight)| (id as usize, weight));
            let mut out = vec![bf16::ZERO; hidden];
            expert::weighted_sum(
                &shard.arrived(token),
                choices,
                experts,
                &mut Vec::new(),
                &mut out,
            );
            out
        });
        for (at, (value, right)) in combined.iter().zip(&right).enumerate() {
            if value.to_bits() != right.to_bits() {
                check.error(value.to_f64(), right.to_f64());
                let (token, i) = (at / hidden, at % hidden);
                check.expect(false, || {
                    format!("combined[{token}, {i}] is {value}, it should be {right}")
                });
            }
        }
        let (is, right) = (combined.len(), right.len());
        check.expect(is == right, || {
            format!("combined has {is} elements, it should have {right}")
        });
    }
}
