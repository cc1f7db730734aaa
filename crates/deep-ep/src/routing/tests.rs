//! Routes against the definition, written as plainly as possible.

use proptest::prelude::*;

use super::*;
use crate::{
    dtype::DType,
    error::Result,
    tensor::{Device, Shape, Tensor},
    topology::{Rank, Topology},
};

/// A batch of choices and where its elements lie.
#[derive(Debug, Clone)]
struct Batch {
    tokens: usize,
    top_k: usize,
    ranks: usize,
    per_rank: usize,
    /// `[T, K]` row-major.
    ids: Vec<i64>,
    /// Unused elements behind each row; with `columns_first` the tensor is column-major.
    gap: usize,
    columns_first: bool,
}

impl Batch {
    fn row(&self, t: usize) -> &[i64] {
        &self.ids[t * self.top_k..][..self.top_k]
    }

    fn map(&self) -> ExpertMap {
        ExpertMap::new(self.ranks * self.per_rank, self.ranks).unwrap()
    }

    fn strides(&self) -> [usize; 2] {
        match self.columns_first {
            true => [1, self.tokens + self.gap],
            false => [self.top_k + self.gap, 1],
        }
    }

    /// Calls `with` with the choices as a strided `i64`, then as an `i32` tensor.
    fn with_tensors(&self, mut with: impl FnMut(&Tensor<'_>)) {
        let strides = self.strides();
        let len = (self.tokens + self.gap) * (self.top_k + self.gap) + 1;
        // Filled with an id that no test may see.
        let (mut wide, mut narrow) = (vec![i64::MAX; len], vec![i32::MAX; len]);
        for t in 0..self.tokens {
            for (k, &id) in self.row(t).iter().enumerate() {
                wide[t * strides[0] + k * strides[1]] = id;
                narrow[t * strides[0] + k * strides[1]] = id as i32;
            }
        }
        let shape = [self.tokens, self.top_k];
        with(&Tensor::strided(&wide, &shape, &strides).unwrap());
        with(&Tensor::strided(&narrow, &shape, &strides).unwrap());
    }

    fn goes_to(&self, t: usize, rank: usize) -> bool {
        self.row(t)
            .iter()
            .any(|&id| id >= 0 && id as usize / self.per_rank == rank)
    }

    fn is_token_in_rank(&self) -> Vec<u8> {
        (0..self.tokens)
            .flat_map(|t| (0..self.ranks).map(move |rank| u8::from(self.goes_to(t, rank))))
            .collect()
    }

    fn tokens_of_rank(&self, rank: usize) -> Vec<u32> {
        let goes = |&t: &u32| self.goes_to(t as usize, rank);
        (0..self.tokens as u32).filter(goes).collect()
    }

    fn tokens_per_expert(&self) -> Vec<u32> {
        let count = |e| self.ids.iter().filter(|&&id| id == e as i64).count() as u32;
        (0..self.ranks * self.per_rank).map(count).collect()
    }

    fn tokens_per_distinct_expert(&self) -> Vec<u32> {
        let chose = |t, e| self.row(t).contains(&(e as i64));
        (0..self.ranks * self.per_rank)
            .map(|e| (0..self.tokens).filter(|&t| chose(t, e)).count() as u32)
            .collect()
    }
}

prop_compose! {
    fn batches()(
        tokens in 0usize..200,
        top_k in 1usize..=32,
        ranks in prop_oneof![1usize..=12, 15usize..=20, Just(65)],
        per_rank in 1usize..=64,
        gap in 0usize..3,
        columns_first in any::<bool>(),
        // Out of 4: how many choices are none, and whether only few experts are drawn.
        none in 0u8..=4,
        few in any::<bool>(),
    )(
        draws in prop::collection::vec((0u8..4, any::<u32>(), 1i64..=1 << 31), tokens * top_k),
        tokens in Just(tokens),
        top_k in Just(top_k),
        ranks in Just(ranks),
        per_rank in Just(per_rank),
        gap in Just(gap),
        columns_first in Just(columns_first),
        none in Just(none),
        few in Just(few),
    ) -> Batch {
        let experts = (ranks * per_rank) as u32;
        let span = if few { experts.min(3) } else { experts };
        let id = |(part, expert, negative): (u8, u32, i64)| {
            if part < none { -negative } else { i64::from(experts - 1 - expert % span) }
        };
        let ids = draws.into_iter().map(id).collect();
        Batch { tokens, top_k, ranks, per_rank, ids, gap, columns_first }
    }
}

fn assert_same_routes(routes: &Routes, batch: &Batch) {
    assert_eq!(routes.tokens(), batch.tokens);
    assert_eq!(routes.ranks(), batch.ranks);
    assert_eq!(routes.is_token_in_rank(), batch.is_token_in_rank());
    let (all, offsets) = routes.tokens_of_ranks();
    assert_eq!(offsets.len(), batch.ranks + 1);
    assert_eq!(all.len(), offsets[batch.ranks]);
    for rank in 0..batch.ranks {
        let expected = batch.tokens_of_rank(rank);
        assert_eq!(routes.tokens_of_rank(Rank(rank)), expected);
        assert_eq!(all[offsets[rank]..offsets[rank + 1]], expected);
        assert_eq!(routes.tokens_per_rank()[rank] as usize, expected.len());
    }
    assert_eq!(routes.tokens_per_rank().len(), batch.ranks);
}

proptest! {
    #[test]
    fn routes_from_choices_follow_the_definition(batches in prop::collection::vec(batches(), 1..4)) {
        // One `Routes` for all: nothing of an earlier batch may show.
        let (mut routes, mut distinct) = (Routes::new(), DistinctCounts::new());
        for batch in &batches {
            batch.with_tensors(|topk_idx| {
                routes.rebuild(topk_idx, &batch.map()).unwrap();
                assert_same_routes(&routes, batch);
                assert_eq!(routes.top_k(), batch.top_k);
                assert_eq!(routes.tokens_per_expert(), batch.tokens_per_expert());
                distinct.rebuild(topk_idx, &batch.map()).unwrap();
                assert_eq!(
                    distinct.tokens_per_distinct_expert(),
                    batch.tokens_per_distinct_expert()
                );
            });
        }
    }

    #[test]
    fn routes_from_ranks_are_those_from_choices(batch in batches(), one in 1u8..) {
        let ranks = batch.ranks;
        let bytes: Vec<u8> = batch.is_token_in_rank().iter().map(|b| b * one).collect();
        let shape = [batch.tokens, ranks];
        let mut routes = Routes::new();
        routes.rebuild_from_ranks(&Tensor::new(&bytes, &shape).unwrap(), ranks).unwrap();
        assert_same_routes(&routes, &batch);

        let mut columns = vec![7; batch.tokens * ranks];
        for t in 0..batch.tokens {
            for rank in 0..ranks {
                columns[rank * batch.tokens + t] = bytes[t * ranks + rank];
            }
        }
        let strided = Tensor::strided(&columns, &shape, &[1, batch.tokens]).unwrap();
        routes.rebuild_from_ranks(&strided, ranks).unwrap();
        assert_same_routes(&routes, &batch);
        assert_eq!((routes.top_k(), routes.tokens_per_expert().len()), (0, 0));
    }

    #[test]
    fn a_token_counts_once_per_node(batch in batches(), divisor in 1usize..=65) {
        let per_node = (1..=batch.ranks).filter(|n| batch.ranks % n == 0).nth(divisor % 2).unwrap_or(1);
        let topology = Topology::new(batch.ranks, per_node).unwrap();
        let mut routes = Routes::new();
        let mut counts = vec![99; 3];
        batch.with_tensors(|topk_idx| {
            routes.rebuild(topk_idx, &batch.map()).unwrap();
            routes.tokens_per_node(&topology, &mut counts).unwrap();
            let goes = |t, node| topology.ranks_of_node(node).any(|rank| batch.goes_to(t, rank));
            let expected: Vec<u32> = (0..topology.nodes())
                .map(|node| (0..batch.tokens).filter(|&t| goes(t, node)).count() as u32)
                .collect();
            assert_eq!(counts, expected);
        });
    }

    #[test]
    fn the_first_id_beyond_is_named_and_nothing_is_built(
        batch in batches().prop_filter("needs tokens", |batch| batch.tokens > 0),
        places in prop::collection::vec((any::<prop::sample::Index>(), 0i64..1 << 30), 1..4),
    ) {
        let mut batch = batch;
        let experts = (batch.ranks * batch.per_rank) as i64;
        for (place, excess) in places {
            let place = place.index(batch.ids.len());
            batch.ids[place] = experts + excess;
        }
        let first = batch.ids.iter().position(|&id| id >= experts).unwrap();
        let expected = format!(
            "topk_idx[{}, {}] is {}, but it must be below num_experts = {experts}",
            first / batch.top_k, first % batch.top_k, batch.ids[first],
        );
        let mut routes = Routes::new();
        batch.with_tensors(|topk_idx| {
            let error = routes.rebuild(topk_idx, &batch.map()).unwrap_err();
            assert_eq!(error.to_string(), expected);
            assert!(routes.tokens() == 0 && routes.tokens_per_expert().is_empty());
            assert!(routes.tokens_of_rank(Rank(0)).is_empty());
            let error = DistinctCounts::new().rebuild(topk_idx, &batch.map()).unwrap_err();
            assert_eq!(error.to_string(), expected);
        });
    }

    #[test]
    fn localized_choices_are_those_of_the_rank(batch in batches(), rank in 0usize..65) {
        let rank = rank % batch.ranks;
        let map = batch.map();
        let weights: Vec<f32> = (0..batch.top_k).map(|k| k as f32 + 0.5).collect();
        for t in 0..batch.tokens {
            let row = batch.row(t);
            // NaN wherever no weight is asked for.
            let hosted = |id: i64| id >= 0 && id as usize / batch.per_rank == rank;
            let with_nan: Vec<f32> = row.iter().zip(&weights)
                .map(|(&id, &w)| if hosted(id) { w } else { f32::NAN }).collect();
            let (mut idx, mut w) = (vec![9i64; batch.top_k], vec![9f32; batch.top_k]);
            localize(row, &with_nan, &map, Rank(rank), &mut idx, &mut w);
            let narrow: Vec<i32> = row.iter().map(|&id| id as i32).collect();
            let (mut idx32, mut w32) = (vec![9i32; batch.top_k], vec![9f32; batch.top_k]);
            localize(&narrow, &with_nan, &map, Rank(rank), &mut idx32, &mut w32);
            for k in 0..batch.top_k {
                let expected = match hosted(row[k]) {
                    true => (row[k] % batch.per_rank as i64, weights[k]),
                    false => (-1, 0.0),
                };
                prop_assert_eq!((idx[k], w[k]), expected);
                prop_assert_eq!((i64::from(idx32[k]), w32[k]), expected);
            }
        }
    }

    #[test]
    fn the_first_choices_are_the_distinct_experts(ids in prop::collection::vec(-2i64..6, 1..=64)) {
        let expected = (0..ids.len())
            .filter(|&k| ids[k] >= 0 && !ids[..k].contains(&ids[k]))
            .fold(0u64, |mask, k| mask | 1 << k);
        prop_assert_eq!(first_choices(&ids), expected);
    }
}

#[test]
fn slots_are_positions_in_the_list_of_a_rank() {
    let ids = [0i64, 3, 0, 2, 1, 1];
    let mut routes = Routes::new();
    let map = ExpertMap::new(4, 2).unwrap();
    let topk_idx = Tensor::new(&ids, &[6, 1]).unwrap();
    routes.rebuild(&topk_idx, &map).unwrap();
    assert_eq!(routes.tokens_of_rank(Rank(0)), [0, 2, 4, 5]);
    assert_eq!(routes.first_slot(Rank(0), 0), 0);
    assert_eq!(routes.first_slot(Rank(0), 3), 2);
    assert_eq!(routes.first_slot(Rank(0), 6), 4);
    assert_eq!(routes.tokens_of_rank(Rank(2)), []);
}

#[test]
fn unusable_tensors_are_named() {
    let map = ExpertMap::new(4, 2).unwrap();
    let rebuild = |tensor: &Tensor<'_>| Routes::new().rebuild(tensor, &map);
    let message = |result: Result<()>| result.unwrap_err().to_string();
    let f32s = Tensor::new(&[0f32; 4], &[2, 2]).unwrap();
    assert_eq!(
        message(rebuild(&f32s)),
        "topk_idx is f32, but it must be i64 or i32"
    );
    let ids = [0i64; 130];
    for top_k in [0, 65] {
        let wide = Tensor::new(&ids, &[2, top_k]).unwrap();
        let expected = format!("top-k of topk_idx is {top_k}, but it must be 1 to 64");
        assert_eq!(message(rebuild(&wide)), expected);
    }
    assert!(rebuild(&Tensor::new(&ids, &[2, 64]).unwrap()).is_ok());
    assert!(rebuild(&Tensor::new(&ids, &[0, 8]).unwrap()).is_ok());
    let flat = Tensor::new(&ids, &[4]).unwrap();
    assert!(message(rebuild(&flat)).contains("two dimensions"));
    let huge = Tensor::strided(&ids, &[1 << 28, 16], &[0, 0]).unwrap();
    assert!(message(rebuild(&huge)).contains("2^32 choices"));
    let shape = Shape::dense(DType::I64, &[2, 2]).unwrap();
    // SAFETY: never read, as its device is refused.
    let device = unsafe { Tensor::from_raw(ids.as_ptr().cast(), shape, Device::Cuda(0)) };
    assert!(message(rebuild(&device)).contains("must be on the host"));

    let bytes = [1u8; 6];
    let ranks = Tensor::new(&bytes, &[2, 3]).unwrap();
    let message = message(Routes::new().rebuild_from_ranks(&ranks, 2));
    assert!(message.contains("[2, 3]") && message.contains("each of 2 ranks"));
    let two = Topology::single_node(2).unwrap();
    assert!(Routes::new().tokens_per_node(&two, &mut vec![]).is_err());
}

#[test]
fn a_rebuild_of_the_same_size_keeps_its_memory() {
    for ranks in [4, 32] {
        let map = ExpertMap::new(64, ranks).unwrap();
        let ids: Vec<i64> = (0..800).map(|i| (i * 7919) % 64).collect();
        let topk_idx = Tensor::new(&ids, &[100, 8]).unwrap();
        let mut routes = Routes::new();
        routes.rebuild(&topk_idx, &map).unwrap();
        let addresses = |routes: &Routes| {
            (
                routes.is_token_in_rank().as_ptr(),
                routes.tokens_per_expert().as_ptr(),
                routes.tokens_of_ranks().0.as_ptr(),
            )
        };
        let before = addresses(&routes);
        for _ in 0..3 {
            routes.rebuild(&topk_idx, &map).unwrap();
            assert_eq!(addresses(&routes), before);
        }
    }
}

/// `cargo test --release -p deep-ep --lib routing -- --ignored --nocapture` prints how long a
/// rebuild takes.
#[test]
#[ignore = "prints times; asserts nothing"]
fn time_of_a_rebuild() {
    for (tokens, ranks) in [
        (4096, 1),
        (4096, 8),
        (4096, 16),
        (4096, 32),
        (4096, 256),
        (300_000, 8),
    ] {
        let map = ExpertMap::new(256, ranks).unwrap();
        let mut state = 1u64;
        let ids: Vec<i64> = (0..tokens * 8)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                (state >> 40) as i64 % 256
            })
            .collect();
        let topk_idx = Tensor::new(&ids, &[tokens, 8]).unwrap();
        let mut routes = Routes::new();
        let mut best = std::time::Duration::MAX;
        for _ in 0..50 {
            let start = std::time::Instant::now();
            routes.rebuild(&topk_idx, &map).unwrap();
            best = best.min(start.elapsed());
        }
        println!("T={tokens} K=8 E=256 R={ranks}: {best:?}");
    }
}
