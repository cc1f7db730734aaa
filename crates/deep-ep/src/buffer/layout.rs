//! Layouts: where a batch's tokens go, computed before the dispatch.

use std::sync::Arc;

use crate::{
    dtype::DType,
    error::{Error, Result},
    routing::{ExpertMap, Routes},
    tensor::{Device, OwnedTensor, Tensor},
    topology::Topology,
};

/// Counts and routes of a batch, as [`Buffer::dispatch_layout`](crate::Buffer::dispatch_layout)
/// computes them.
#[derive(Debug, Clone)]
pub struct Layout(Data);

#[derive(Debug, Clone)]
enum Data {
    Host(Arc<HostLayout>),
    Device(Arc<DeviceLayout>),
}

#[derive(Debug, Clone)]
pub(crate) struct HostLayout {
    pub(crate) routes: Routes,
    pub(crate) tokens_per_expert: Vec<u32>,
    tokens_per_node: Option<Vec<u32>>,
}

/// The tensors of a layout on a GPU.
#[derive(Debug)]
pub struct DeviceLayout {
    /// `[R]` i32: tokens that go to each rank.
    pub num_tokens_per_rank: OwnedTensor,
    /// `[E]` i32: choices of each expert.
    pub num_tokens_per_expert: OwnedTensor,
    /// `[T, R]` u8, 0 or 1.
    pub is_token_in_rank: OwnedTensor,
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
        Ok(Self(Data::Host(Arc::new(HostLayout {
            routes,
            tokens_per_expert,
            tokens_per_node,
        }))))
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
        Ok(Self(Data::Host(Arc::new(HostLayout {
            routes,
            tokens_per_expert,
            tokens_per_node: None,
        }))))
    }

    /// A layout from its tensors on a GPU.
    ///
    /// # Errors
    /// A shape or type differs, a tensor is not dense, they lie on different devices, or the experts
    /// are not a multiple of the ranks. Contents are not looked at.
    pub fn from_device_parts(parts: DeviceLayout) -> Result<Self> {
        let mask = &parts.is_token_in_rank;
        let &[_, ranks] = mask.shape() else {
            return Err(Error::invalid(
                "is_token_in_rank",
                format!("{mask:?}"),
                "must be u8 [T, R]",
            ));
        };
        let experts = parts.num_tokens_per_expert.shape()[0];
        ExpertMap::new(experts, ranks)?;
        for (name, tensor, dtype, shape) in [
            ("is_token_in_rank", mask, DType::U8, mask.shape()),
            (
                "num_tokens_per_rank",
                &parts.num_tokens_per_rank,
                DType::I32,
                &[ranks][..],
            ),
            (
                "num_tokens_per_expert",
                &parts.num_tokens_per_expert,
                DType::I32,
                &[experts],
            ),
        ] {
            let fits = tensor.dtype() == dtype
                && tensor.shape() == shape
                && tensor.is_dense()
                && tensor.device() == mask.device()
                && mask.device() != Device::Host;
            if !fits {
                return Err(Error::invalid(
                    name,
                    format!("{tensor:?}"),
                    format!("must be dense {dtype} {shape:?} on {:?}", mask.device()),
                ));
            }
        }
        Ok(Self(Data::Device(Arc::new(parts))))
    }

    /// Where its tensors lie.
    pub fn device(&self) -> Device {
        self.is_token_in_rank().device()
    }

    /// The host routes. A buffer checks that a layout fits its engine before an engine sees it.
    pub(crate) fn host(&self) -> &HostLayout {
        match &self.0 {
            Data::Host(layout) => layout,
            Data::Device(_) => unreachable!("engines see layouts of their own device only"),
        }
    }

    /// `[R]` i32: tokens that go to each rank.
    pub fn num_tokens_per_rank(&self) -> Tensor<'_> {
        match &self.0 {
            Data::Host(layout) => vector(layout.routes.tokens_per_rank()),
            Data::Device(parts) => parts.num_tokens_per_rank.as_tensor(),
        }
    }

    /// `[nodes]` i32: tokens that go to each node; `None` inside one node.
    pub fn num_tokens_per_node(&self) -> Option<Tensor<'_>> {
        match &self.0 {
            Data::Host(layout) => layout.tokens_per_node.as_deref().map(vector),
            Data::Device(_) => None,
        }
    }

    /// `[E]` i32: choices of each expert.
    pub fn num_tokens_per_expert(&self) -> Tensor<'_> {
        match &self.0 {
            Data::Host(layout) => vector(&layout.tokens_per_expert),
            Data::Device(parts) => parts.num_tokens_per_expert.as_tensor(),
        }
    }

    /// `[T, R]` u8, 0 or 1.
    pub fn is_token_in_rank(&self) -> Tensor<'_> {
        match &self.0 {
            Data::Host(layout) => {
                let shape = [layout.routes.tokens(), layout.routes.ranks()];
                Tensor::new(layout.routes.is_token_in_rank(), &shape)
                    .expect("routes have a byte for each token and rank")
            }
            Data::Device(parts) => parts.is_token_in_rank.as_tensor(),
        }
    }
}

fn vector(counts: &[u32]) -> Tensor<'_> {
    Tensor::new(bytemuck::cast_slice::<u32, i32>(counts), &[counts.len()])
        .expect("a vector of its own length")
}
