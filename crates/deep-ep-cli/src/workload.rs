//! Generated input: random rows, and a router with groups and uneven load.
//!
//! Every token is made from `(seed, token)` alone, so that a rank can make any part of the batch
//! without the rest, and a batch does not depend on how it is split.

use std::ops::Range;

use anyhow::{Result, ensure};
use half::bf16;
use serde::{Deserialize, Serialize};

use crate::batch::{Batch, Ids, Sizes};

/// What to generate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Workload {
    pub(crate) sizes: Sizes,
    /// Groups of neighbouring experts.
    pub(crate) groups: usize,
    /// Groups that a token may choose from: those whose two best experts score highest.
    pub(crate) top_groups: usize,
    /// Exponent of a Zipf-like distribution of the experts' popularity; 0 is even.
    pub(crate) skew: f64,
    pub(crate) seed: u64,
}

impl Workload {
    /// Whether the parameters fit each other.
    pub(crate) fn check(&self) -> Result<()> {
        let Self {
            sizes:
                Sizes {
                    hidden,
                    top_k,
                    experts,
                    ..
                },
            groups,
            top_groups,
            skew,
            ..
        } = *self;
        ensure!(experts > 0, "--experts must be at least 1");
        ensure!(top_k > 0, "--top-k must be at least 1");
        ensure!(hidden > 0, "--hidden must be at least 8");
        ensure!(
            groups > 0 && experts % groups == 0,
            "--groups is {groups}, but it must divide --experts {experts}"
        );
        ensure!(
            (1..=groups).contains(&top_groups),
            "--top-groups is {top_groups}, but it must be 1 to --groups {groups}"
        );
        ensure!(
            top_k <= experts / groups * top_groups,
            "--top-k is {top_k}, but only {} experts can be chosen from ({top_groups} groups of {})",
            experts / groups * top_groups,
            experts / groups
        );
        ensure!(
            skew.is_finite() && skew >= 0.0,
            "--skew is {skew}, but it must be 0 or more"
        );
        Ok(())
    }

    /// The tokens in `range`.
    pub(crate) fn make(&self, range: Range<usize>) -> Batch {
        let Sizes { hidden, top_k, .. } = self.sizes;
        let tokens = range.len();
        let mut x = Vec::with_capacity(tokens * hidden);
        let mut idx = Vec::with_capacity(tokens * top_k);
        let mut weights = Vec::with_capacity(tokens * top_k);
        let (router, values) = (Router::new(self), SumValues::new());
        let mut scores = Vec::new();
        for token in range {
            let mut random = Random::new(self.seed, token as u64);
            router.choose(&mut random, &mut scores);
            let sum: f32 = scores[..top_k].iter().map(|s| sigmoid(s.0)).sum();
            idx.extend(scores[..top_k].iter().map(|s| s.1 as i64));
            weights.extend(scores[..top_k].iter().map(|s| sigmoid(s.0) / sum));
            random.row(&values, hidden, &mut x);
        }
        Batch {
            sizes: Sizes {
                tokens,
                ..self.sizes
            },
            x,
            topk_idx: Ids::I64(idx),
            topk_weights: weights,
        }
    }
}

fn sigmoid(score: f32) -> f32 {
    1.0 / (1.0 + (-score).exp())
}

/// Chooses experts without repetition, each draw in proportion to the experts' popularity: adding
/// Gumbel noise to log-probabilities and taking the largest does exactly that.
struct Router<'a> {
    workload: &'a Workload,
    log_popularity: Vec<f32>,
}

impl<'a> Router<'a> {
    fn new(workload: &'a Workload) -> Self {
        let experts = workload.sizes.experts;
        // Popular experts lie anywhere, not all on the first rank.
        let mut order: Vec<usize> = (0..experts).collect();
        let mut random = Random::new(workload.seed, u64::MAX);
        for at in (1..experts).rev() {
            order.swap(at, (random.next() % (at as u64 + 1)) as usize);
        }
        let mut log_popularity = vec![0.0; experts];
        for (place, expert) in order.into_iter().enumerate() {
            log_popularity[expert] = (-workload.skew * ((place + 1) as f64).ln()) as f32;
        }
        Self {
            workload,
            log_popularity,
        }
    }

    /// Leaves `(score, expert)` in `scores`, the chosen ones first and best first.
    fn choose(&self, random: &mut Random, scores: &mut Vec<(f32, usize)>) {
        let Workload {
            groups, top_groups, ..
        } = *self.workload;
        let size = self.log_popularity.len() / groups;
        scores.clear();
        scores.extend(
            self.log_popularity
                .iter()
                .enumerate()
                .map(|(expert, p)| (p + random.gumbel(), expert)),
        );
        if top_groups < groups {
            let mut best: Vec<(f32, usize)> = scores
                .chunks_exact(size)
                .map(|group| best_two(group.iter().map(|s| s.0)))
                .zip(0..)
                .collect();
            best.sort_by(|a, b| b.0.total_cmp(&a.0));
            let mut keep = vec![false; groups];
            best[..top_groups]
                .iter()
                .for_each(|&(_, group)| keep[group] = true);
            scores.retain(|&(_, expert)| keep[expert / size]);
        }
        let order = |a: &(f32, usize), b: &(f32, usize)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let top_k = self.workload.sizes.top_k;
        if top_k < scores.len() {
            scores.select_nth_unstable_by(top_k, order);
        }
        scores[..top_k].sort_unstable_by(order);
    }
}

/// The sum of the two largest, or the only one.
fn best_two(scores: impl Iterator<Item = f32>) -> f32 {
    let mut best = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for score in scores {
        if score > best.0 {
            best = (score, best.0);
        } else if score > best.1 {
            best.1 = score;
        }
    }
    if best.1 == f32::NEG_INFINITY {
        best.0
    } else {
        best.0 + best.1
    }
}

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
struct Random(u64);

impl Random {
    fn new(seed: u64, stream: u64) -> Self {
        let mut this = Self(seed ^ stream.wrapping_mul(0xd6e8_feb8_6659_fd93));
        this.0 = this.next();
        this
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn gumbel(&mut self) -> f32 {
        // Uniform in (0, 1), both ends excluded.
        let uniform = ((self.next() >> 41) as f32 + 0.5) / (1u32 << 23) as f32;
        -(-uniform.ln()).ln()
    }

    /// Appends a row: each value is a sum of four random bytes.
    fn row(&mut self, values: &SumValues, hidden: usize, x: &mut Vec<bf16>) {
        const EVEN_BYTES: u64 = 0x00ff_00ff_00ff_00ff;
        for at in (0..hidden).step_by(2) {
            let bytes = self.next();
            // Four lanes of 16 bits, each the sum of two bytes; then two lanes of 32 bits.
            let pairs = (bytes & EVEN_BYTES) + (bytes >> 8 & EVEN_BYTES);
            let sums = pairs + (pairs >> 16);
            let two = [
                values.0[sums as usize & 0x3ff],
                values.0[(sums >> 32) as usize & 0x3ff],
            ];
            x.extend_from_slice(&two[..(hidden - at).min(2)]);
        }
    }
}

/// The value that a sum of four bytes stands for: roughly normal, with mean 0 and variance 1.
struct SumValues(Box<[bf16; 1024]>);

impl SumValues {
    fn new() -> Self {
        // Of the sum of four uniform bytes.
        const MEAN: f32 = 510.0;
        const DEVIATION: f32 = 147.8;
        let value = |sum: usize| bf16::from_f32((sum as f32 - MEAN) / DEVIATION);
        Self(Box::new(std::array::from_fn(value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload() -> Workload {
        Workload {
            sizes: Sizes {
                tokens: 400,
                hidden: 33,
                top_k: 4,
                experts: 32,
            },
            groups: 8,
            top_groups: 2,
            skew: 0.0,
            seed: 7,
        }
    }

    fn load(batch: &Batch) -> Vec<usize> {
        let mut load = vec![0; batch.sizes.experts];
        (0..batch.topk_idx.len()).for_each(|at| load[batch.topk_idx.get(at) as usize] += 1);
        load
    }

    #[test]
    fn a_part_of_a_batch_is_what_the_whole_has_there() {
        let workload = workload();
        let whole = workload.make(0..400);
        assert_eq!(whole.slice(100..150), workload.make(100..150));
        assert_ne!(
            whole,
            Workload {
                seed: 8,
                ..workload
            }
            .make(0..400)
        );
    }

    #[test]
    fn choices_are_distinct_and_within_the_best_groups() {
        let batch = workload().make(0..400);
        for token in 0..400 {
            let mut ids: Vec<_> = batch.ids(token).collect();
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), 4);
            let mut groups: Vec<_> = ids.iter().map(|id| id / 4).collect();
            groups.dedup();
            assert!(groups.len() <= 2);
            assert!((batch.weights(token).iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
        assert!(load(&batch).iter().all(|&n| n > 0));
    }

    #[test]
    fn skew_makes_some_experts_popular() {
        let even = Workload {
            groups: 1,
            top_groups: 1,
            ..workload()
        };
        let skewed = Workload {
            skew: 1.5,
            ..even.clone()
        };
        let most = |w: &Workload| *load(&w.make(0..400)).iter().max().unwrap();
        assert!(
            most(&even) < 100 && most(&skewed) > 300,
            "{} {}",
            most(&even),
            most(&skewed)
        );
    }

    #[test]
    fn rows_have_mean_0_and_variance_1() {
        let x = workload().make(0..400).x;
        let n = x.len() as f64;
        let mean = x.iter().map(|v| v.to_f64()).sum::<f64>() / n;
        let variance = x.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / n;
        assert!(
            mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05,
            "{mean} {variance}"
        );
    }

    #[test]
    fn impossible_parameters_are_named() {
        let error = |w: Workload| w.check().unwrap_err().to_string();
        let w = workload();
        assert!(w.check().is_ok());
        assert!(
            error(Workload {
                groups: 5,
                ..w.clone()
            })
            .contains("--groups is 5")
        );
        assert!(
            error(Workload {
                top_groups: 9,
                ..w.clone()
            })
            .contains("--top-groups is 9")
        );
        assert!(
            error(Workload {
                sizes: Sizes {
                    top_k: 9,
                    ..w.sizes
                },
                ..w.clone()
            })
            .contains("--top-k is 9")
        );
        assert!(
            error(Workload {
                skew: f64::NAN,
                ..w
            })
            .contains("--skew")
        );
    }
}
