//! Small examples with their results spelled out, and properties that follow from the definition.

use half::{bf16, f16};
use proptest::prelude::*;

use super::{
    high_throughput::{self, CombineRoutes, RankInput, Scales},
    low_latency,
};

fn bf16s(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}

fn input<'a>(x: &'a [u8], row_bytes: usize, topk_idx: &'a [i64], top_k: usize) -> RankInput<'a> {
    RankInput {
        tokens: topk_idx.len() / top_k,
        row_bytes,
        x,
        scales: None,
        top_k,
        topk_idx,
        topk_weights: None,
    }
}

/// Two ranks, six experts: 0, 1, 2 on rank 0 and 3, 4, 5 on rank 1. Rows of two bytes.
#[test]
fn high_throughput_dispatch_of_three_tokens() {
    let weights = [0.25, 0.75, f32::NAN, 1.0];
    let rank_0 = RankInput {
        scales: Some(Scales {
            per_row: 1,
            data: &[100, 101],
        }),
        topk_weights: Some(&weights),
        // Token 0 goes to both ranks; token 1 has one choice, whose weight is its second.
        ..input(&[10, 11, 20, 21], 2, &[4, 1, -7, 5], 2)
    };
    let rank_1 = RankInput {
        scales: Some(Scales {
            per_row: 1,
            data: &[102],
        }),
        topk_weights: Some(&[0.5, 0.5]),
        ..input(&[30, 31], 2, &[5, 5], 2)
    };
    let received = high_throughput::dispatch(&[rank_0, rank_1], 6, 4);

    let at_0 = &received[0];
    assert_eq!(at_0.x, [[10, 11]]);
    assert_eq!(at_0.scales, Some(vec![&[100u32][..]]));
    assert_eq!(at_0.topk_idx, [-1, 1]);
    assert_eq!(at_0.topk_weights, Some(vec![0.0, 0.75]));
    assert_eq!(
        (&at_0.src_rank[..], &at_0.src_idx[..]),
        (&[0][..], &[0][..])
    );
    assert_eq!(at_0.rank_prefix, [1, 1]);
    assert_eq!(at_0.tokens_per_expert, [0, 4, 0]);
    assert_eq!(at_0.is_token_in_rank, [true, true, false, true]);

    let at_1 = &received[1];
    assert_eq!(at_1.x, [[10, 11], [20, 21], [30, 31]]);
    assert_eq!(
        at_1.scales,
        Some(vec![&[100u32][..], &[101][..], &[102][..]])
    );
    assert_eq!(at_1.topk_idx, [1, -1, -1, 2, 2, 2]);
    assert_eq!(at_1.topk_weights, Some(vec![0.25, 0.0, 0.0, 1.0, 0.5, 0.5]));
    assert_eq!(at_1.src_rank, [0, 0, 1]);
    assert_eq!(at_1.src_idx, [0, 1, 0]);
    assert_eq!(at_1.rank_prefix, [2, 3]);
    // Expert 5 was chosen three times, by two tokens.
    assert_eq!(at_1.tokens_per_expert, [0, 4, 4]);
    assert_eq!(at_1.is_token_in_rank, [false, true]);
    assert_eq!(at_1.row_of(1, 0), Some(2));
    assert_eq!(at_0.row_of(0, 1), None);
}

#[test]
fn the_layout_counts_a_token_once_per_node() {
    // Four ranks on two nodes, two experts on each rank.
    let topk_idx = [0, 1, 3, /**/ 2, 7, -1, /**/ -1, -1, -1];
    let layout = high_throughput::layout(&input(&[0; 3], 1, &topk_idx, 3), 8, 4, 2);
    assert_eq!(layout.tokens_per_rank, [1, 2, 0, 1]);
    assert_eq!(layout.tokens_per_node, [2, 1]);
    assert_eq!(layout.tokens_per_expert, [1, 1, 1, 1, 0, 0, 0, 1]);
    let expected = [
        [true, true, false, false],
        [false, true, false, true],
        [false; 4],
    ];
    assert_eq!(layout.is_token_in_rank, expected.concat());
}

fn routes(owner: usize, ranks_per_node: usize, exact: bool, goes: &[bool]) -> CombineRoutes {
    CombineRoutes {
        owner,
        num_ranks: 4,
        ranks_per_node,
        exact,
        is_token_in_rank: goes.to_vec(),
    }
}

#[test]
fn combine_adds_biases_first_and_then_ranks_ascending() {
    // In f32, 1e8 + 1 is 1e8: the order shows.
    let goes = [
        true, true, false, true, /**/ false, false, false, false,
    ];
    let routes = routes(2, 4, false, &goes);
    let returned = |rank: usize, _: usize| vec![[1.0f32, 1e8, 777.0, -1e8][rank]];
    let sum = high_throughput::combine_at(&routes, 1, &[], returned);
    assert_eq!(sum, [0.0, 0.0]);
    // ((1 + -1e8) + 1) + 1e8 - 1e8, and the biases alone.
    let (first, second) = ([1.0, 0.5], [-1e8, 0.25]);
    let sum = high_throughput::combine_at(&routes, 1, &[&first, &second], returned);
    assert_eq!(sum, [((1.0f32 - 1e8) + 1.0) + 1e8 - 1e8, 0.75]);
}

#[test]
fn combine_rounds_once_to_the_type_of_the_rows() {
    let routes = routes(0, 4, false, &[true; 4]);
    // bf16 has 8 bits of mantissa: 256 + 1 is a tie to 256, but 256 + 3 rounds to 260 (once).
    let returned = |rank: usize, _: usize| bf16s(&[[256.0, 1.0, 1.0, 1.0][rank], -0.0]);
    let sum = high_throughput::combine_at(&routes, 2, &[], returned);
    assert_eq!(sum, bf16s(&[260.0, 0.0]));
    assert!(sum[1].is_sign_positive());
    let halves = high_throughput::combine_at(&routes, 1, &[], |_, _| vec![f16::from_f32(0.5)]);
    assert_eq!(halves, [f16::from_f32(2.0)]);
    let nan = high_throughput::combine_at(&routes, 1, &[], |_, _| vec![-bf16::NAN]);
    assert_eq!(nan[0].to_bits(), 0x7fff);
}

#[test]
fn combine_across_nodes_adds_the_own_node_and_then_the_others() {
    // Nodes {0, 1} and {2, 3}. As f32 the sums of the nodes are 257 and 2.
    let returned = |rank: usize, _: usize| bf16s(&[[256.0, 1.0, 1.0, 1.0][rank]]);
    let all = [true; 4];
    let sum = |owner, exact| {
        high_throughput::combine_at(&routes(owner, 2, exact, &all), 1, &[], returned)[0].to_f32()
    };
    // Owner on node 0: 257 + 2 = 259 is a tie between 258 and 260, even mantissa 260.
    assert_eq!(sum(1, false), 260.0);
    // Owner on node 1: the other node's 257 crosses as bf16, a tie to 256; 2 + 256 = 258.
    assert_eq!(sum(2, false), 258.0);
    assert_eq!(sum(2, true), 260.0);

    // The own node counts before the others, whatever its number.
    let returned = |rank: usize, _: usize| vec![[1e8f32, 0.0, 1.0, 0.0][rank]];
    let bias = [-1e8f32];
    let sum = |owner| {
        high_throughput::combine_at(&routes(owner, 2, true, &all), 1, &[&bias], returned)[0]
    };
    assert_eq!(sum(0), 1.0);
    assert_eq!(sum(3), 0.0);
}

/// Two ranks, four experts. Rows of one value that names rank and token.
#[test]
fn low_latency_dispatch_of_four_tokens() {
    let (x_0, x_1) = (bf16s(&[0.0, 1.0, 2.0]), bf16s(&[10.0]));
    let input = |x, topk_idx: &'static [i64]| low_latency::RankInput {
        tokens: topk_idx.len() / 2,
        hidden: 1,
        x,
        top_k: 2,
        topk_idx,
    };
    // Token 1 of rank 0 chose expert 3 twice.
    let inputs = [input(&x_0, &[3, 0, 3, 3, -1, 2]), input(&x_1, &[2, 3])];
    let received = &low_latency::dispatch(&inputs, 4)[1];
    assert_eq!(received.recv_count(), [2, 3]);
    let (expert_2, expert_3) = (&received.experts[0], &received.experts[1]);
    assert_eq!(expert_2.x, [&bf16s(&[2.0]), &bf16s(&[10.0])]);
    assert_eq!(expert_2.src_info, [2, 0]);
    assert_eq!(expert_2.src_rank, [0, 1]);
    assert_eq!(expert_3.x.concat(), bf16s(&[0.0, 1.0, 10.0]));
    assert_eq!(expert_3.src_info, [0, 1, 0]);
    // Per expert and source: begin and count.
    let range = |begin: i64, count: i64| begin << 32 | count;
    let expected = [range(0, 1), range(1, 1), range(0, 2), range(2, 1)];
    assert_eq!(received.layout_range, expected);
    assert_eq!(received.row_of(1, 1, 0), Some(2));

    let without_0 = low_latency::dispatch_to(1, &inputs, 4, &[true, false]);
    assert_eq!(without_0.recv_count(), [1, 1]);
    let expected = [range(0, 0), range(0, 1), range(0, 0), range(0, 1)];
    assert_eq!(without_0.layout_range, expected);
}

#[test]
fn low_latency_combine_weights_every_choice() {
    let mut input = low_latency::CombineInput {
        tokens: 2,
        hidden: 2,
        top_k: 3,
        // Expert 1 twice: both weights count. No choice for token 1.
        topk_idx: &[1, 3, 1, -1, -1, -1],
        topk_weights: &[0.5, 2.0, 0.25, f32::NAN, f32::NAN, f32::NAN],
        num_experts: 4,
        masked: &[false, false],
    };
    let output = |_: usize, expert: usize| bf16s(&[expert as f32, -4.0]);
    let combined = low_latency::combine_at(&input, output);
    // 0.5 * 1 + 2 * 3 + 0.25 * 1 and (0.5 + 2 + 0.25) * -4.
    assert_eq!(combined, bf16s(&[6.75, -11.0, 0.0, 0.0]));
    let bounds = low_latency::combine_bound(&input, 0, output);
    assert_eq!(bounds[0].sum, 6.75);
    assert_eq!(bounds[0].tolerance, 6.75 / 128.0 + 2f64.powi(-133));
    assert!(bounds[0].allows(bf16::from_f32(6.78125)) && bounds[1].allows(combined[1]));
    assert!(!bounds[0].allows(bf16::from_f32(6.8125)) && !bounds[0].allows(bf16::NAN));

    // Without rank 1, expert 3 drops out.
    input.masked = &[false, true];
    let combined = low_latency::combine_at(&input, output);
    assert_eq!(combined, bf16s(&[0.75, -3.0, 0.0, 0.0]));
}

#[test]
fn exact_combine_is_fused_and_ordered() {
    // The product (1 + 2^-23) * (1 + 2^-7) ends in 2^-30, which f32 cannot hold beside 1.
    let x = bf16::from_f32(1.0 + 2f32.powi(-7));
    let combined = |weights: [f32; 2]| {
        let input = low_latency::CombineInput {
            tokens: 1,
            hidden: 1,
            top_k: 2,
            topk_idx: &[0, 1],
            topk_weights: &weights,
            num_experts: 2,
            masked: &[false],
        };
        low_latency::combine_at(&input, |_, _| vec![x])[0].to_f32()
    };
    // Added to -x before it is rounded, it leaves 2^-23 + 2^-30; rounded first, 2^-23.
    let fused = f32::EPSILON * (1.0 + 2f32.powi(-7));
    assert_eq!(combined([-1.0, 1.0 + f32::EPSILON]), fused);
    assert_eq!(combined([1.0 + f32::EPSILON, -1.0]), f32::EPSILON);
}

#[test]
fn difference_is_zero_for_equal_tensors_only() {
    let a = bf16s(&[1.0, -2.0, 3.0]);
    assert_eq!(low_latency::difference(&a, &a), 0.0);
    let b = bf16s(&[1.0, -2.0, 0.0]);
    // 1 - 2 * 5 / (14 + 5).
    assert!((low_latency::difference(&a, &b) - 9.0 / 19.0).abs() < 1e-12);
    let zeros = bf16s(&[0.0; 3]);
    assert_eq!(low_latency::difference(&zeros, &zeros), 0.0);
    assert_eq!(low_latency::difference(&a, &zeros), 1.0);
}

/// Tokens of one rank with their choices; the row of a token is its rank and number.
#[derive(Debug, Clone)]
struct Generated {
    x: Vec<u8>,
    rows: Vec<bf16>,
    topk_idx: Vec<i64>,
    weights: Vec<f32>,
}

prop_compose! {
    /// `(per rank, E, K)`
    fn batches()(ranks in 1usize..=6, per_rank in 1usize..=5, top_k in 1usize..=6)(
        experts in Just(ranks * per_rank),
        top_k in Just(top_k),
        choices in prop::collection::vec(
            prop::collection::vec(-2i64..(ranks * per_rank) as i64, 0..8 * top_k), ranks),
    ) -> (Vec<Generated>, usize, usize) {
        let rank_of = |(rank, choices): (usize, Vec<i64>)| {
            let tokens = choices.len() / top_k;
            let names = (0..tokens).map(|t| [rank as u8, t as u8]);
            Generated {
                x: names.clone().flatten().collect(),
                rows: names.flatten().map(|byte| bf16::from_f32(byte.into())).collect(),
                topk_idx: choices[..tokens * top_k].to_vec(),
                weights: (0..tokens * top_k).map(|i| i as f32 + 1.0).collect(),
            }
        };
        (choices.into_iter().enumerate().map(rank_of).collect(), experts, top_k)
    }
}

proptest! {
    #[test]
    fn a_row_arrives_once_at_each_of_its_ranks((ranks, experts, top_k) in batches()) {
        let inputs: Vec<_> = ranks.iter().map(|g| RankInput {
            topk_weights: Some(&g.weights),
            ..input(&g.x, 2, &g.topk_idx, top_k)
        }).collect();
        let per_rank = experts / ranks.len();
        let received = high_throughput::dispatch(&inputs, experts, 1);
        for (rank, received) in received.iter().enumerate() {
            let sources: Vec<_> = received.src_rank.iter().zip(&received.src_idx).collect();
            prop_assert!(sources.is_sorted() && sources.windows(2).all(|w| w[0] != w[1]));
            let hosted = received.topk_idx.iter().filter(|&&id| id >= 0).count();
            prop_assert_eq!(received.tokens_per_expert.iter().sum::<usize>(), hosted);
            prop_assert_eq!(*received.rank_prefix.last().unwrap(), received.rows());
            let weights = received.topk_weights.as_ref().unwrap();
            for (row, &x) in received.x.iter().enumerate() {
                prop_assert_eq!(x, [*sources[row].0 as u8, *sources[row].1 as u8]);
                let input = &inputs[*sources[row].0 as usize];
                for k in 0..top_k {
                    // Back to the choice that the token made.
                    let local = received.topk_idx[row * top_k + k];
                    let place = *sources[row].1 as usize * top_k + k;
                    if local >= 0 {
                        prop_assert_eq!(local + (rank * per_rank) as i64, input.topk_idx[place]);
                        prop_assert_eq!(weights[row * top_k + k], (place + 1) as f32);
                    } else {
                        prop_assert_eq!(weights[row * top_k + k], 0.0);
                    }
                }
            }
        }
    }

    #[test]
    fn rows_of_one_come_back_as_the_number_of_ranks((ranks, experts, top_k) in batches()) {
        let inputs: Vec<_> = ranks.iter().map(|g| input(&g.x, 2, &g.topk_idx, top_k)).collect();
        let per_rank = experts / ranks.len();
        let received = high_throughput::dispatch(&inputs, experts, 1);
        let y: Vec<_> = received.iter().map(|received| vec![bf16::ONE; received.rows()]).collect();
        let combined = high_throughput::combine(&received, 1, &y);
        for (generated, combined) in ranks.iter().zip(combined) {
            for (choices, sum) in generated.topk_idx.chunks(top_k).zip(combined) {
                let mut ranks: Vec<_> = choices.iter().filter(|&&id| id >= 0)
                    .map(|&id| id as usize / per_rank).collect();
                ranks.sort_unstable();
                ranks.dedup();
                prop_assert_eq!(sum.to_f32(), ranks.len() as f32);
            }
        }
    }

    #[test]
    fn weights_come_back_where_there_was_a_choice((ranks, experts, top_k) in batches()) {
        let inputs: Vec<_> = ranks.iter().map(|g| RankInput {
            topk_weights: Some(&g.weights),
            ..input(&g.x, 2, &g.topk_idx, top_k)
        }).collect();
        let received = high_throughput::dispatch(&inputs, experts, 1);
        let weights: Vec<_> = received.iter().map(|r| r.topk_weights.clone().unwrap()).collect();
        let combined = high_throughput::combine(&received, top_k, &weights);
        for (generated, combined) in ranks.iter().zip(combined) {
            let expected: Vec<f32> = generated.topk_idx.iter().zip(&generated.weights)
                .map(|(&id, &weight)| if id >= 0 { weight } else { 0.0 }).collect();
            prop_assert_eq!(combined, expected);
        }
    }

    #[test]
    fn low_latency_delivers_a_row_per_distinct_expert((ranks, experts, top_k) in batches()) {
        let inputs: Vec<_> = ranks.iter().map(|g| low_latency::RankInput {
            tokens: g.topk_idx.len() / top_k,
            hidden: 2,
            x: &g.rows,
            top_k,
            topk_idx: &g.topk_idx,
        }).collect();
        let received = low_latency::dispatch(&inputs, experts);
        let per_rank = experts / ranks.len();
        for (rank, received) in received.iter().enumerate() {
            for (local, rows) in received.experts.iter().enumerate() {
                let sources: Vec<_> = rows.src_rank.iter().zip(&rows.src_info).collect();
                prop_assert!(sources.is_sorted() && sources.windows(2).all(|w| w[0] != w[1]));
                let expert = (rank * per_rank + local) as i64;
                let choosers = ranks.iter().flat_map(|g| g.topk_idx.chunks(top_k))
                    .filter(|choices| choices.contains(&expert)).count();
                prop_assert_eq!(rows.x.len(), choosers);
                let mut counted = 0;
                for (source, range) in received.layout_range[local * ranks.len()..][..ranks.len()].iter().enumerate() {
                    let (begin, count) = ((range >> 32) as usize, (range & 0xffff_ffff) as usize);
                    prop_assert_eq!(begin, counted);
                    prop_assert!(rows.src_rank[begin..begin + count].iter().all(|&s| s as usize == source));
                    counted += count;
                }
                prop_assert_eq!(counted, choosers);
            }
        }
    }

    #[test]
    fn exact_low_latency_combine_is_within_the_bounds((ranks, experts, top_k) in batches(), seed: u32) {
        for generated in &ranks {
            let tokens = generated.topk_idx.len() / top_k;
            let input = low_latency::CombineInput {
                tokens,
                hidden: 3,
                top_k,
                topk_idx: &generated.topk_idx,
                topk_weights: &generated.weights,
                num_experts: experts,
                masked: &vec![false; ranks.len()],
            };
            let output = |token: usize, expert: usize| {
                let noise = seed.wrapping_mul(0x9e37_79b1).wrapping_add((token * 31 + expert) as u32);
                bf16s(&[0, 1, 2].map(|i| (noise.rotate_left(7 * i) as i32) as f32 / 1e6))
            };
            let combined = low_latency::combine_at(&input, output);
            for token in 0..tokens {
                let bounds = low_latency::combine_bound(&input, token, output);
                for (bound, value) in bounds.iter().zip(&combined[token * 3..]) {
                    prop_assert!(bound.allows(*value), "{bound:?} {value}");
                }
            }
        }
    }
}
