//! Compares what a rank received and combined with `deep_ep::reference`.
//!
//! A rank needs the inputs of all ranks for that. They are taken one source at a time: the
//! reference is asked for what comes from one source alone, so that no more than one foreign batch
//! is in memory.

mod high_throughput;
mod low_latency;

use std::sync::LazyLock;

pub(crate) use high_throughput::Received;
pub(crate) use low_latency::LowLatencyReceived;

use deep_ep::{
    codec::SCALE_BLOCK,
    reference::{
        Number,
        fp8::{ScaleFormat, cast_row, decode},
    },
};
use half::bf16;

use crate::{
    batch::{Batch, Sizes},
    fp8::Fp8Rows,
    options::{Options, RowType},
    report::Check,
    source::Input,
};

/// The reference's view of one rank.
pub(crate) struct Verifier<'a> {
    rank: usize,
    input: &'a Input,
    options: &'a Options,
}

impl<'a> Verifier<'a> {
    pub(crate) fn new(rank: usize, input: &'a Input, options: &'a Options) -> Self {
        Self {
            rank,
            input,
            options,
        }
    }

    fn ranks(&self) -> usize {
        self.options.ranks
    }

    fn sizes(&self) -> Sizes {
        self.input.sizes()
    }

    fn shard(&self, rank: usize) -> Shard {
        let batch = self.input.shard(rank, self.ranks());
        let ids = (0..batch.topk_idx.len())
            .map(|at| batch.topk_idx.get(at))
            .collect();
        let fp8 = (self.options.dtype == RowType::Fp8).then(|| Fp8Rows::of(&batch));
        Shard { batch, ids, fp8 }
    }

    /// This rank's tokens. Each rank compares its own rows cast to FP8 with the reference's, which
    /// takes its time, so that foreign rows need not be.
    fn own_shard(&self, check: &mut Check) -> Shard {
        let shard = self.shard(self.rank);
        if let Some(rows) = &shard.fp8 {
            for token in 0..shard.batch.tokens() {
                let right = cast_row(shard.batch.row(token), ScaleFormat::F32);
                let (codes, scales) = rows.row(token);
                check.expect(
                    codes == right.codes && same_bits(scales, &right.scales),
                    || format!("the FP8 cast of token {token} is wrong"),
                );
            }
        }
        shard
    }
}

/// The tokens of one rank as the reference wants them.
struct Shard {
    batch: Batch,
    ids: Vec<i64>,
    /// As they travel, if not as bf16.
    fp8: Option<Fp8Rows>,
}

impl Shard {
    /// A row as an expert sees it: as it is, or cast to FP8 and back by the reference.
    fn arrived(&self, token: usize) -> Vec<bf16> {
        let Some(rows) = &self.fp8 else {
            return self.batch.row(token).to_vec();
        };
        static DECODED: LazyLock<[f32; 256]> =
            LazyLock::new(|| std::array::from_fn(|code| decode(code as u8)));
        let decoded = &*DECODED;
        let (codes, scales) = rows.row(token);
        let blocks = codes.chunks(SCALE_BLOCK).zip(scales);
        let values = blocks
            .flat_map(|(codes, scale)| codes.iter().map(move |&c| decoded[usize::from(c)] * scale));
        values.map(<bf16 as Number>::from_f32).collect()
    }
}

impl Check {
    /// What a second comparison found, added to the first.
    pub(crate) fn merge(&mut self, other: Self) {
        self.max_abs_error = self.max_abs_error.max(other.max_abs_error);
        if self.mismatch.is_none() {
            self.mismatch = other.mismatch;
        }
    }

    /// Keeps the first mismatch.
    fn expect(&mut self, right: bool, message: impl FnOnce() -> String) {
        if !right && self.mismatch.is_none() {
            self.mismatch = Some(message());
        }
    }

    /// Notes the difference of a combined value from the right one. A NaN where there should be
    /// none (or the reverse) counts as the largest number, as JSON knows no infinity.
    fn error(&mut self, value: f64, right: f64) {
        let error = match (value.is_nan(), right.is_nan()) {
            (true, true) => 0.0,
            _ if value == right => 0.0,
            _ => (value - right).abs(),
        };
        let error = if error.is_finite() { error } else { f64::MAX };
        self.max_abs_error = self.max_abs_error.max(error);
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.iter()
        .map(|a| a.to_bits())
        .eq(b.iter().map(|b| b.to_bits()))
}

/// Where two slices differ first.
fn first_difference<T: PartialEq>(a: &[T], b: &[T]) -> Option<usize> {
    match a.len() == b.len() {
        // The fast way first: rows are long and mostly right.
        true if a == b => None,
        true => a.iter().zip(b).position(|(a, b)| a != b),
        false => Some(a.len().min(b.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_stay_numbers_that_json_can_hold() {
        let mut check = Check::default();
        check.error(f64::NAN, f64::NAN);
        check.error(f64::INFINITY, f64::INFINITY);
        assert_eq!(check.max_abs_error, 0.0);
        check.error(1.0, 1.5);
        assert_eq!(check.max_abs_error, 0.5);
        check.error(f64::NAN, 1.0);
        let json = serde_json::to_string(&check).unwrap();
        assert_eq!(serde_json::from_str::<Check>(&json).unwrap(), check);
    }

    #[test]
    fn the_first_mismatch_is_kept() {
        let mut check = Check::default();
        check.expect(true, || unreachable!());
        check.expect(false, || "first".into());
        check.merge(Check {
            max_abs_error: 2.0,
            mismatch: Some("second".into()),
        });
        assert_eq!(
            check,
            Check {
                max_abs_error: 2.0,
                mismatch: Some("first".into())
            }
        );
    }
}
