//! Layouts: where a batch's tokens go, computed before the dispatch.

use std::ffi::c_void;

use deep_ep::{DeviceLayout, Layout};

use crate::{
    boundary,
    buffer::{self, BufferObject},
    objects::{self, Object},
    pointers::{self, Out, OutStruct, Versioned},
    status::Status,
    tensor::TensorView,
};

/// Counts and routes of a batch.
pub struct LayoutObject(pub(crate) Layout);

impl Object for LayoutObject {
    const NAME: &'static str = "deep_ep_layout_t";
}

/// The tensors of a layout. Made by `deep_ep_layout_tensors()`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LayoutTensors {
    /// Set by `deep_ep_layout_tensors()`.
    pub struct_size: usize,
    /// int32 `[R]`: tokens that go to each rank.
    pub num_tokens_per_rank: TensorView,
    /// int32 `[nodes]`: tokens that go to each node; no tensor inside one node.
    pub num_tokens_per_rdma_rank: TensorView,
    /// int32 `[E]`: choices of each expert.
    pub num_tokens_per_expert: TensorView,
    /// uint8 `[T, R]`: 0 or 1.
    pub is_token_in_rank: TensorView,
}

// SAFETY: see the trait; all zeros are no tensors.
unsafe impl Versioned for LayoutTensors {
    const NAME: &'static str = "deep_ep_layout_tensors_t";
}

/// Counts where the tokens of `topk_idx` (int64 or int32 `[T, K]`, global expert ids, negative: no
/// choice) go; `num_experts` is a multiple of the ranks. Local. `*layout` is the caller's to free. One
/// thread at a time for each buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_get_dispatch_layout(
    buffer: *const BufferObject,
    topk_idx: *const TensorView,
    num_experts: usize,
    stream: *mut c_void,
    layout: *mut *mut LayoutObject,
) -> Status {
    boundary::call(|| {
        let out = Out::new(layout, "layout")?;
        let buffer = buffer::get(buffer)?;
        let topk_idx = pointers::slice(topk_idx, 1, "topk_idx")?[0].read("topk_idx")?;
        let stream = buffer::stream(stream);
        let made = buffer
            .inner
            .dispatch_layout_on(topk_idx, num_experts, stream)?;
        out.set(objects::give(LayoutObject(made)));
        Ok(())
    })
}

/// A layout from its tensors, which on the host are copied; on a GPU the caller keeps them until the
/// layout is freed, and their contents are not looked at. Local. `*layout` is the caller's to free.
/// Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_layout_from_tensors(
    tensors: *const LayoutTensors,
    layout: *mut *mut LayoutObject,
) -> Status {
    boundary::call(|| {
        let out = Out::new(layout, "layout")?;
        let tensors = pointers::read(tensors, "tensors")?;
        let LayoutTensors {
            num_tokens_per_rank: ranks,
            num_tokens_per_expert: experts,
            is_token_in_rank: routes,
            ..
        } = tensors;
        let made = if routes.on_device() {
            Layout::from_device_parts(DeviceLayout {
                num_tokens_per_rank: ranks.lasting("num_tokens_per_rank")?,
                num_tokens_per_expert: experts.lasting("num_tokens_per_expert")?,
                is_token_in_rank: routes.lasting("is_token_in_rank")?,
            })?
        } else {
            Layout::from_parts(
                routes.read("is_token_in_rank")?,
                ranks.read("num_tokens_per_rank")?,
                experts.read("num_tokens_per_expert")?,
            )?
        };
        out.set(objects::give(LayoutObject(made)));
        Ok(())
    })
}

/// The tensors of a layout, which live as long as it does. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_layout_get_tensors(
    layout: *const LayoutObject,
    tensors: *mut LayoutTensors,
) -> Status {
    boundary::call(|| {
        let out = OutStruct::new(tensors, "tensors")?;
        let layout = objects::get(layout, "layout")?;
        out.set(LayoutTensors {
            struct_size: size_of::<LayoutTensors>(),
            num_tokens_per_rank: TensorView::of(&layout.0.num_tokens_per_rank()),
            num_tokens_per_rdma_rank: TensorView::of_optional(layout.0.num_tokens_per_node()),
            num_tokens_per_expert: TensorView::of(&layout.0.num_tokens_per_expert()),
            is_token_in_rank: TensorView::of(&layout.0.is_token_in_rank()),
        });
        Ok(())
    })
}

/// Frees a layout; a call that was begun with it keeps it. NULL is allowed. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_layout_free(layout: *mut LayoutObject) -> Status {
    boundary::call(|| objects::take(layout, "layout"))
}
