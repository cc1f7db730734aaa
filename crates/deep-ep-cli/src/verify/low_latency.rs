//! Low-latency: dispatch is the same bit for bit, combine within the tolerance of the reference.

use anyhow::Result;
use bytemuck::cast_slice;
use deep_ep::{
    LowLatencyHandle,
    reference::low_latency::{CombineInput, ExpertRows, RankInput, combine_bound, dispatch_to},
};
use half::bf16;

use super::{Shard, Verifier, first_difference, same_bits};
use crate::{batch::Sizes, expert, report::Check};

/// What a rank received.
pub(crate) struct LowLatencyReceived<'a> {
    /// `[E/R, rows, H]`, bf16 or FP8 codes.
    pub(crate) x: &'a [u8],
    /// `[E/R, rows, H/128]` with these strides, with FP8.
    pub(crate) scales: Option<(&'a [f32], [usize; 3])>,
    /// `R*M`.
    pub(crate) rows: usize,
    pub(crate) hidden: usize,
    /// `[E/R]`.
    pub(crate) recv_count: &'a [i32],
    pub(crate) handle: &'a LowLatencyHandle,
}

impl LowLatencyReceived<'_> {
    /// The bytes of a row.
    pub(crate) fn row(&self, local: usize, row: usize) -> &[u8] {
        let bytes = match self.scales {
            None => self.hidden * size_of::<bf16>(),
            Some(_) => self.hidden,
        };
        &self.x[(local * self.rows + row) * bytes..][..bytes]
    }

    /// The scales of a row.
    pub(crate) fn row_scales(&self, local: usize, row: usize) -> Option<Vec<f32>> {
        let (scales, strides) = self.scales?;
        let first = local * strides[0] + row * strides[1];
        Some(
            (0..self.hidden / 128)
                .map(|block| scales[first + block * strides[2]])
                .collect(),
        )
    }
}

impl Verifier<'_> {
    /// Rows, counts, source tokens and ranges, and the combined result.
    pub(crate) fn low_latency(
        &self,
        received: &LowLatencyReceived<'_>,
        combined: &[bf16],
    ) -> Result<Check> {
        let Sizes {
            hidden,
            top_k,
            experts,
            ..
        } = self.sizes();
        let mut check = Check::default();
        let source_tokens = received.handle.src_info().as_slice::<i32>()?;
        let ranges = received.handle.layout_range().as_slice::<i64>()?;
        let empty = RankInput {
            tokens: 0,
            hidden,
            x: &[],
            top_k,
            topk_idx: &[],
        };
        let mut filled = vec![0; experts / self.ranks()];
        for source in 0..self.ranks() {
            let shard = self.shard(source);
            let mut inputs = vec![empty; self.ranks()];
            inputs[source] = RankInput {
                tokens: shard.batch.tokens(),
                hidden,
                x: &shard.batch.x,
                top_k,
                topk_idx: &shard.ids,
            };
            let right = dispatch_to(self.rank, &inputs, experts, &vec![false; self.ranks()]);
            for (local, rows) in right.experts.iter().enumerate() {
                let begin = filled[local];
                let range = (begin as i64) << 32 | rows.x.len() as i64;
                let is = ranges[local * self.ranks() + source];
                check.expect(is == range, || {
                    format!("layout_range[{local}, {source}] is {is:#x}, it should be {range:#x}")
                });
                let info = &source_tokens[local * received.rows + begin..][..rows.x.len()];
                check.expect(info == rows.src_info, || {
                    format!("source tokens of local expert {local} from rank {source} are {info:?}, they should be {:?}", rows.src_info)
                });
                self.compare_expert_rows(&mut check, received, (local, begin), rows, &shard);
                filled[local] += rows.x.len();
            }
        }
        check.expect(
            filled
                .iter()
                .zip(received.recv_count)
                .all(|(&a, &b)| a as i64 == i64::from(b)),
            || {
                format!(
                    "rows per local expert are {:?}, they should be {filled:?}",
                    received.recv_count
                )
            },
        );
        self.compare_weighted(&mut check, combined);
        Ok(check)
    }

    fn compare_expert_rows(
        &self,
        check: &mut Check,
        received: &LowLatencyReceived<'_>,
        (local, begin): (usize, usize),
        right: &ExpertRows<'_>,
        shard: &Shard,
    ) {
        for (n, x) in right.x.iter().enumerate() {
            let row = begin + n;
            let bytes = received.row(local, row);
            let (byte, same_scales) = match (&shard.fp8, received.row_scales(local, row)) {
                (Some(rows), Some(scales)) => {
                    let (codes, right) = rows.row(right.src_info[n] as usize);
                    (first_difference(bytes, codes), same_bits(&scales, right))
                }
                _ => (first_difference(bytes, cast_slice(x)), true),
            };
            let place = || {
                format!(
                    "row {row} of local expert {local} (token {} of rank {})",
                    right.src_info[n], right.src_rank[n]
                )
            };
            if let Some(byte) = byte {
                check.expect(false, || format!("byte {byte} of {} is wrong", place()));
            }
            check.expect(same_scales, || format!("scales of {} are wrong", place()));
        }
    }

    fn compare_weighted(&self, check: &mut Check, combined: &[bf16]) {
        let Sizes {
            hidden,
            top_k,
            experts,
            ..
        } = self.sizes();
        let shard = self.own_shard(check);
        let masked = vec![false; self.ranks()];
        let input = CombineInput {
            tokens: shard.batch.tokens(),
            hidden,
            top_k,
            topk_idx: &shard.ids,
            topk_weights: &shard.batch.topk_weights,
            num_experts: experts,
            masked: &masked,
        };
        for (token, combined) in combined.chunks_exact(hidden).enumerate() {
            let x = shard.arrived(token);
            let bounds = combine_bound(&input, token, |_, e| {
                let mut out = vec![bf16::ZERO; hidden];
                expert::scale(&x, e, experts, &mut out);
                out
            });
            for (at, (value, bound)) in combined.iter().zip(bounds).enumerate() {
                check.error(value.to_f64(), bound.sum);
                check.expect(bound.allows(*value), || {
                    format!(
                        "combined[{token}, {at}] is {value}, it should be {} within {}",
                        bound.sum, bound.tolerance
                    )
                });
            }
        }
    }
}
