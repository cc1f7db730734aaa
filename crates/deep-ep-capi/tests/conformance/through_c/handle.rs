//! Handles.

use std::{fmt, sync::Arc};

use deep_ep_c::handle::{
    HandleObject, HandleTensors, LowLatencyHandleObject, LowLatencyHandleTensors,
    deep_ep_handle_free, deep_ep_handle_from_tensors, deep_ep_handle_get_tensors,
    deep_ep_low_latency_handle_free, deep_ep_low_latency_handle_from_tensors,
    deep_ep_low_latency_handle_get_tensors,
};
use library::{Rank, Result, Tensor};

use super::{
    Owned, c, made,
    memory::{tensor, view},
};

/// The routes of a high-throughput dispatch.
#[derive(Clone)]
pub(crate) struct DispatchHandle(Arc<Owned<HandleObject>>);

impl DispatchHandle {
    pub(crate) fn new(pointer: *mut HandleObject) -> Self {
        Self(Arc::new(Owned::new(pointer, deep_ep_handle_free)))
    }

    pub(crate) fn from_parts(
        rank: Rank,
        rank_prefix_matrix: Tensor<'_>,
        recv_src_idx: Tensor<'_>,
        is_token_in_rank: Tensor<'_>,
    ) -> Result<Self> {
        let mut tensors = made!(HandleTensors);
        tensors.rank = rank.0;
        tensors.rank_prefix_matrix = view(&rank_prefix_matrix);
        tensors.recv_src_idx = view(&recv_src_idx);
        tensors.is_token_in_rank = view(&is_token_in_rank);
        let mut handle = std::ptr::null_mut();
        c!(rank.0, deep_ep_handle_from_tensors(&tensors, &mut handle))?;
        Ok(Self::new(handle))
    }

    pub(crate) fn pointer(&self) -> *const HandleObject {
        self.0.pointer
    }

    fn tensors(&self) -> HandleTensors {
        let mut tensors = made!(HandleTensors);
        c!(0, deep_ep_handle_get_tensors(self.pointer(), &mut tensors)).expect("a handle");
        tensors
    }

    pub(crate) fn rank(&self) -> Rank {
        Rank(self.tensors().rank)
    }

    pub(crate) fn num_ranks(&self) -> usize {
        self.tensors().num_ranks
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.tensors().num_tokens
    }

    pub(crate) fn num_recv_rows(&self) -> usize {
        self.tensors().num_recv_tokens
    }

    pub(crate) fn rank_prefix_matrix(&self) -> Tensor<'_> {
        tensor(&self.tensors().rank_prefix_matrix, self)
    }

    pub(crate) fn recv_src_idx(&self) -> Tensor<'_> {
        tensor(&self.tensors().recv_src_idx, self)
    }

    pub(crate) fn is_token_in_rank(&self) -> Tensor<'_> {
        tensor(&self.tensors().is_token_in_rank, self)
    }

    pub(crate) fn send_head(&self) -> Tensor<'_> {
        tensor(&self.tensors().send_head, self)
    }
}

/// As the library shows its own, which messages name.
impl fmt::Debug for DispatchHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DispatchHandle")
            .field("rank", &self.rank())
            .field("num_ranks", &self.num_ranks())
            .field("num_tokens", &self.num_tokens())
            .field("num_recv_rows", &self.num_recv_rows())
            .finish()
    }
}

/// The routes of a low-latency dispatch.
#[derive(Clone)]
pub(crate) struct LowLatencyHandle(Arc<Owned<LowLatencyHandleObject>>);

impl LowLatencyHandle {
    pub(crate) fn new(pointer: *mut LowLatencyHandleObject) -> Self {
        Self(Arc::new(Owned::new(
            pointer,
            deep_ep_low_latency_handle_free,
        )))
    }

    pub(crate) fn from_parts(
        src_info: Tensor<'_>,
        layout_range: Tensor<'_>,
        max_tokens_per_rank: usize,
        hidden: usize,
        num_experts: usize,
    ) -> Result<Self> {
        let mut tensors = made!(LowLatencyHandleTensors);
        tensors.src_info = view(&src_info);
        tensors.layout_range = view(&layout_range);
        tensors.num_max_dispatch_tokens_per_rank = max_tokens_per_rank;
        tensors.hidden = hidden;
        tensors.num_experts = num_experts;
        let mut handle = std::ptr::null_mut();
        c!(
            0,
            deep_ep_low_latency_handle_from_tensors(&tensors, &mut handle)
        )?;
        Ok(Self::new(handle))
    }

    pub(crate) fn pointer(&self) -> *const LowLatencyHandleObject {
        self.0.pointer
    }

    /// What keeps `recv_count`.
    pub(crate) fn keep(&self) -> Arc<dyn std::any::Any + Send + Sync> {
        self.0.clone()
    }

    fn tensors(&self) -> LowLatencyHandleTensors {
        let mut tensors = made!(LowLatencyHandleTensors);
        let get = deep_ep_low_latency_handle_get_tensors;
        c!(0, get(self.pointer(), &mut tensors)).expect("a handle");
        tensors
    }

    pub(crate) fn src_info(&self) -> Tensor<'_> {
        tensor(&self.tensors().src_info, self)
    }

    pub(crate) fn layout_range(&self) -> Tensor<'_> {
        tensor(&self.tensors().layout_range, self)
    }

    pub(crate) fn max_tokens_per_rank(&self) -> usize {
        self.tensors().num_max_dispatch_tokens_per_rank
    }

    pub(crate) fn hidden(&self) -> usize {
        self.tensors().hidden
    }

    pub(crate) fn num_experts(&self) -> usize {
        self.tensors().num_experts
    }
}

impl fmt::Debug for LowLatencyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "handle of {:?}", self.src_info())
    }
}
