//! High-throughput: everything is the same bit for bit.

use anyhow::Result;
use bytemuck::cast_slice;
use deep_ep::{
    DType, DispatchHandle, ReceivedCounts, Tensor,
    codec::SCALE_BLOCK,
    reference::{
        fp8::{ScaleFormat, cast_row},
        high_throughput::{CombineRoutes, Dispatched, RankInput, combine_at, dispatch_to},
    },
};
use half::bf16;

use super::{Verifier, cast_back, first_difference};
use crate::{batch::Sizes, expert, report::Check};

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
        let bytes = self.x.len() / self.counts.rows;
        &self.x[n * bytes..][..bytes]
    }

    /// The scales of row `n`.
    pub(crate) fn row_scales(&self, n: usize) -> Option<&[f32]> {
        let scales = self.scales?;
        let blocks = scales.len() / self.counts.rows;
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
        let source_tokens = received.handle.recv_src_idx().as_slice::<i32>()?;
        let mut tokens_per_expert = vec![0; self.sizes().experts / self.ranks()];
        let mut begin = 0;
        for source in 0..self.ranks() {
            let (batch, ids) = self.shard(source);
            let inputs = self.only(
                source,
                self.rank_input(
                    batch.tokens(),
                    cast_slice(&batch.x),
                    &ids,
                    &batch.topk_weights,
                ),
            );
            let right = dispatch_to(self.rank, &inputs, self.sizes().experts, 1);
            let rows = received.counts.rows_from.get(source).copied().unwrap_or(0);
            check.expect(rows == right.rows(), || {
                format!(
                    "{rows} rows came from rank {source}, it should be {}",
                    right.rows()
                )
            });
            if check.mismatch.is_some() || received.counts.rows < begin + rows {
                break;
            }
            for n in 0..rows {
                self.compare_row(&mut check, received, begin + n, &right, (source, n));
                let token = right.src_idx[n];
                let said = source_tokens.get(begin + n).copied();
                check.expect(said.is_some_and(|said| i64::from(said) == i64::from(token)), || {
                    format!("row {} is said to be token {said:?} of rank {source}, it should be {token}", begin + n)
                });
            }
            tokens_per_expert
                .iter_mut()
                .zip(&right.tokens_per_expert)
                .for_each(|(sum, n)| *sum += n);
            begin += rows;
        }
        let counts = received.counts;
        check.expect(counts.rows == begin, || {
            format!("{} rows came, it should be {begin}", counts.rows)
        });
        check.expect(counts.tokens_per_expert == tokens_per_expert, || {
            format!(
                "tokens per expert are {:?}, they should be {tokens_per_expert:?}",
                counts.tokens_per_expert
            )
        });
        self.compare_combined(&mut check, combined);
        Ok(check)
    }

    fn rank_input<'b>(
        &self,
        tokens: usize,
        x: &'b [u8],
        ids: &'b [i64],
        weights: &'b [f32],
    ) -> RankInput<'b> {
        let Sizes { hidden, top_k, .. } = self.sizes();
        RankInput {
            tokens,
            row_bytes: hidden * size_of::<bf16>(),
            x,
            scales: None,
            top_k,
            topk_idx: ids,
            topk_weights: Some(weights),
        }
    }

    /// Inputs of all ranks of which only one has tokens.
    fn only<'b>(&self, rank: usize, input: RankInput<'b>) -> Vec<RankInput<'b>> {
        let mut inputs = vec![self.rank_input(0, &[], &[], &[]); self.ranks()];
        inputs[rank] = input;
        inputs
    }

    /// Row `at` of all against row `n` of those from `source`.
    fn compare_row(
        &self,
        check: &mut Check,
        received: &Received<'_>,
        at: usize,
        right: &Dispatched<'_>,
        (source, n): (usize, usize),
    ) {
        let token = right.src_idx[n];
        let place = || format!("of row {at} (token {token} of rank {source})");
        if self.fp8() {
            let cast = cast_row(cast_slice(right.x[n]), ScaleFormat::F32);
            if let Some(i) = first_difference(received.row(at), &cast.codes) {
                let code = received.row(at).get(i).copied();
                check.expect(false, || {
                    format!(
                        "code {i} {} is {code:?}, it should be {}",
                        place(),
                        cast.codes[i]
                    )
                });
            }
            let bits = |scales: &[f32]| scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
            let scales = received.row_scales(at).unwrap_or(&[]);
            check.expect(bits(scales) == bits(&cast.scales), || {
                format!(
                    "scales {} are {scales:?}, they should be {:?}",
                    place(),
                    cast.scales
                )
            });
        } else if received.row(at) != right.x[n] {
            let (row, right): (&[bf16], &[bf16]) =
                (cast_slice(received.row(at)), cast_slice(right.x[n]));
            let i = first_difference(row, right).unwrap_or(0);
            check.expect(false, || {
                format!(
                    "element {i} {} is {}, it should be {}",
                    place(),
                    row[i],
                    right[i]
                )
            });
        }
        let top_k = self.sizes().top_k;
        let weights = right.topk_weights.as_deref().unwrap_or(&[]);
        for (k, (local, weight)) in received.choices(at).enumerate() {
            let expected = right.topk_idx[n * top_k + k];
            check.expect(local == expected, || {
                format!("index {k} {} is {local}, it should be {expected}", place())
            });
            let expected = weights[n * top_k + k];
            check.expect(weight.to_bits() == expected.to_bits(), || {
                format!(
                    "weight {k} {} is {weight}, it should be {expected}",
                    place()
                )
            });
        }
    }

    fn compare_combined(&self, check: &mut Check, combined: &[bf16]) {
        let Sizes {
            hidden, experts, ..
        } = self.sizes();
        let (batch, ids) = self.shard(self.rank);
        let inputs = self.only(
            self.rank,
            self.rank_input(
                batch.tokens(),
                cast_slice(&batch.x),
                &ids,
                &batch.topk_weights,
            ),
        );
        let routes = CombineRoutes::of(self.rank, &inputs, experts);
        let per_rank = experts / self.ranks();
        let right = combine_at(&routes, hidden, &[], |rank, token| {
            let choices = batch
                .ids(token)
                .zip(batch.weights(token))
                .filter(|&(id, _)| id >= 0 && id as usize / per_rank == rank)
                .map(|(id, &weight)| (id as usize, weight));
            let mut out = vec![bf16::ZERO; hidden];
            let x = match self.fp8() {
                false => batch.row(token).to_vec(),
                true => cast_back(&cast_row(batch.row(token), ScaleFormat::F32)),
            };
            expert::weighted_sum(&x, choices, experts, &mut Vec::new(), &mut out);
            out
        });
        for (at, (value, right)) in combined.iter().zip(&right).enumerate() {
            if value.to_bits() != right.to_bits() {
                check.error(value.to_f64(), right.to_f64());
                check.expect(false, || {
                    format!(
                        "combined[{}, {}] is {value}, it should be {right}",
                        at / hidden,
                        at % hidden
                    )
                });
            }
        }
        check.expect(combined.len() == right.len(), || {
            format!(
                "combined has {} elements, it should have {}",
                combined.len(),
                right.len()
            )
        });
    }
}

// FP8 blocks of the reference and of the codec are the same.
const _: () = assert!(SCALE_BLOCK == 128);
