//! Layouts.

use deep_ep_c::layout::{
    LayoutObject, LayoutTensors, deep_ep_layout_free, deep_ep_layout_from_tensors,
    deep_ep_layout_get_tensors,
};
use library::{Result, Tensor};

use super::{
    Owned, c, made,
    memory::{tensor, view},
};

/// Counts and routes of a batch.
pub(crate) struct Layout(Owned<LayoutObject>);

impl Layout {
    pub(crate) fn new(pointer: *mut LayoutObject) -> Self {
        Self(Owned::new(pointer, deep_ep_layout_free))
    }

    pub(crate) fn from_parts(
        is_token_in_rank: Tensor<'_>,
        num_tokens_per_rank: Tensor<'_>,
        num_tokens_per_expert: Tensor<'_>,
    ) -> Result<Self> {
        let mut tensors = made!(LayoutTensors);
        tensors.is_token_in_rank = view(&is_token_in_rank);
        tensors.num_tokens_per_rank = view(&num_tokens_per_rank);
        tensors.num_tokens_per_expert = view(&num_tokens_per_expert);
        let mut layout = std::ptr::null_mut();
        c!(0, deep_ep_layout_from_tensors(&tensors, &mut layout))?;
        Ok(Self::new(layout))
    }

    pub(crate) fn pointer(&self) -> *const LayoutObject {
        self.0.pointer
    }

    fn tensors(&self) -> LayoutTensors {
        let mut tensors = made!(LayoutTensors);
        c!(0, deep_ep_layout_get_tensors(self.pointer(), &mut tensors)).expect("a layout");
        tensors
    }

    pub(crate) fn num_tokens_per_rank(&self) -> Tensor<'_> {
        tensor(&self.tensors().num_tokens_per_rank, self)
    }

    pub(crate) fn num_tokens_per_node(&self) -> Option<Tensor<'_>> {
        let nodes = self.tensors().num_tokens_per_rdma_rank;
        (nodes.dtype != 0).then(|| tensor(&nodes, self))
    }

    pub(crate) fn num_tokens_per_expert(&self) -> Tensor<'_> {
        tensor(&self.tensors().num_tokens_per_expert, self)
    }

    pub(crate) fn is_token_in_rank(&self) -> Tensor<'_> {
        tensor(&self.tensors().is_token_in_rank, self)
    }
}

impl std::fmt::Debug for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "layout of {:?}", self.is_token_in_rank())
    }
}
