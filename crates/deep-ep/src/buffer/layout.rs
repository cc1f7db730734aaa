//! Layouts: where a batch's tokens go, computed before the dispatch.

use crate::{
    error::{Error, Result},
    routing::{ExpertMap, Routes},
    tensor::Tensor,
    topology::Topology,
};

/// Counts and routes of a batch, as [`Buffer::dispatch_layout`](crate::Buffer::dispatch_layout)
/// computes them.
#[derive(Debug, Clone)]
pub struct Layout {
    pub(crate) routes: Routes,
    pub(crate) tokens_per_expert: Vec<u32>,
    tokens_per_node: Option<Vec<u32>>,
}

impl Layout {
    pub(crate) fn from_topk(
        topk_idx: Tensor<'_>,
        map: &ExpertMap,
        topology: &Topology,
    ) -> Result<Self> {
        let mut routes = Routes::new();
        routes.rebuild(&topk_idx, map)?;
        let tokens_per_expert = routes.tokens_per_expert().to_vec();
        let mut tokens_per_node = None;
        if topology.nodes() > 1 {
            routes.tokens_per_node(topology, tokens_per_node.insert(vec![]))?;
        }
        Ok(Self {
            routes,
            tokens_per_expert,
            tokens_per_node,
        })
    }

    /// A layout from its tensors: `is_token_in_rank` `[T, R]` u8, `num_tokens_per_rank` `[R]` i32
    /// and `num_tokens_per_expert` `[E]` i32.
    ///
    /// # Errors
    /// A shape or type differs, or `num_tokens_per_rank` is not the column sums of
    /// `is_token_in_rank`.
    pub fn from_parts(
        is_token_in_rank: Tensor<'_>,
        num_tokens_per_rank: Tensor<'_>,
        num_tokens_per_expert: Tensor<'_>,
    ) -> Result<Self> {
        let mut routes = Routes::new();
        routes.rebuild_from_ranks(&is_token_in_rank, num_tokens_per_rank.shape()[0])?;
        let per_rank = num_tokens_per_rank.as_slice::<i32>()?;
        for (rank, &counted) in routes.tokens_per_rank().iter().enumerate() {
            let passed = per_rank.get(rank).copied();
            if passed != Some(counted as i32) {
                return Err(Error::invalid(
                    format!("num_tokens_per_rank[{rank}]"),
                    passed.map_or("missing".into(), |n| n.to_string()),
                    format!("must be {counted}, as is_token_in_rank says"),
                ));
            }
        }
        let per_expert = num_tokens_per_expert.as_slice::<i32>()?;
        ExpertMap::new(per_expert.len(), routes.ranks())?;
        if let Some(at) = per_expert.iter().position(|&n| n < 0) {
            return Err(Error::invalid(
                format!("num_tokens_per_expert[{at}]"),
                per_expert[at],
                "must not be negative",
            ));
        }
        let tokens_per_expert = per_expert.iter().map(|&n| n as u32).collect();
        Ok(Self {
            routes,
            tokens_per_expert,
            tokens_per_node: None,
        })
    }

    /// `[R]` i32: tokens that go to each rank.
    pub fn num_tokens_per_rank(&self) -> Tensor<'_> {
        vector(self.routes.tokens_per_rank())
    }

    /// `[nodes]` i32: tokens that go to each node; `None` inside one node.
    pub fn num_tokens_per_node(&self) -> Option<Tensor<'_>> {
        self.tokens_per_node.as_deref().map(vector)
    }

    /// `[E]` i32: choices of each expert.
    pub fn num_tokens_per_expert(&self) -> Tensor<'_> {
        vector(&self.tokens_per_expert)
    }

    /// `[T, R]` u8, 0 or 1.
    pub fn is_token_in_rank(&self) -> Tensor<'_> {
        let shape = [self.routes.tokens(), self.routes.ranks()];
        Tensor::new(self.routes.is_token_in_rank(), &shape)
            .expect("routes have a byte for each token and rank")
    }
}

fn vector(counts: &[u32]) -> Tensor<'_> {
    Tensor::new(bytemuck::cast_slice::<u32, i32>(counts), &[counts.len()])
        .expect("a vector of its own length")
}
