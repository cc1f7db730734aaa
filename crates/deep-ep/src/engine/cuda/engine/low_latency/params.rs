//! Structs that the low-latency kernels and the host share. `kernels/low_latency_params.cuh`
//! declares the same, and a test compares the two.

use bytemuck::{NoUninit, Pod, Zeroable};

use super::super::{
    keys,
    params::{GroupParams, Matrix},
};
use crate::{
    engine::cuda::jit::LowLatencyKey,
    tensor::{Tensor, TensorMut},
};

/// `LowLatencyPhase`: parts of a call.
pub(crate) mod phase {
    pub(crate) const SEND: u32 = 1;
    pub(crate) const PARTIALS: u32 = 2;
    pub(crate) const RECEIVE: u32 = 4;
    pub(crate) const REJECT: u32 = 8;
}

/// `LowLatencyState`: in device memory of the rank.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct LowLatencyState {
    pub(crate) wire_bytes: u64,
    pub(crate) verdict: u64,
    pub(crate) decisions: [u64; 64],
}

/// `Cube`: a 3-D tensor with strides in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Cube {
    pub(crate) data: u64,
    pub(crate) strides: [u64; 3],
}

impl Cube {
    pub(super) fn of(tensor: &Tensor<'_>) -> Self {
        let bytes = tensor.dtype().size();
        let stride = |i: usize| tensor.strides().get(i).map_or(0, |n| (n * bytes) as u64);
        Self {
            data: tensor.as_ptr() as u64,
            strides: [stride(0), stride(1), stride(2)],
        }
    }

    pub(super) fn of_mut(tensor: &mut TensorMut<'_>) -> Self {
        Self {
            data: tensor.as_mut_ptr() as u64,
            ..Self::of(&tensor.as_tensor())
        }
    }

    /// Whether every row begins at a multiple of 16 bytes.
    pub(super) fn is_aligned(&self) -> bool {
        (self.data | self.strides[0] | self.strides[1]).is_multiple_of(16)
    }
}

/// `LowLatencyParams`: what both calls are told.
#[repr(C)]
#[derive(Debug, Clone, Copy, NoUninit)]
pub(crate) struct LowLatencyParams {
    pub(crate) group: GroupParams,
    pub(crate) shared: u64,
    pub(crate) masks: u64,
    pub(crate) tagged_at: u64,
    pub(crate) tagged_half: u64,
    pub(crate) rows_at: u64,
    pub(crate) rows_half: u64,
    pub(crate) excluded_at: u64,
    pub(crate) topk: Matrix,
    pub(crate) reject_text: u64,
    pub(crate) tokens: u32,
    pub(crate) top_k: u32,
    pub(crate) index_bytes: u32,
    pub(crate) experts: u32,
    pub(crate) max_tokens: u32,
    pub(crate) hidden: u32,
    pub(crate) format: u32,
    pub(crate) row_stride: u32,
    pub(crate) terms: u32,
    pub(crate) phases: u32,
    pub(crate) chunk_tokens: u32,
    pub(crate) shrink: u32,
    pub(crate) discard: u32,
    pub(crate) reserved: u32,
}

impl LowLatencyParams {
    /// The program for this call, whose rows are or are not `aligned` to 16 bytes.
    pub(super) fn key(&self, aligned: bool) -> LowLatencyKey {
        let shape = LowLatencyKey {
            ranks: self.group.ranks,
            top_k: self.top_k,
            hidden: self.hidden,
            format: self.format,
        };
        keys::low_latency(shape, aligned)
    }
}

/// `LowLatencyDispatchParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, NoUninit)]
pub(crate) struct LowLatencyDispatchParams {
    pub(crate) common: LowLatencyParams,
    pub(crate) x: u64,
    pub(crate) x_stride: u64,
    pub(crate) out_x: Cube,
    pub(crate) out_scales: Cube,
    pub(crate) src_info: u64,
    pub(crate) layout_range: u64,
    pub(crate) recv_count: u64,
    pub(crate) recv_stats: u64,
    pub(crate) wait_stats: u64,
}

/// `LowLatencyCombineParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, NoUninit)]
pub(crate) struct LowLatencyCombineParams {
    pub(crate) common: LowLatencyParams,
    pub(crate) x: Cube,
    pub(crate) weights: Matrix,
    pub(crate) src_info: u64,
    pub(crate) layout_range: u64,
    pub(crate) out: u64,
    pub(crate) out_stride: u64,
    pub(crate) wait_stats: u64,
}

/// `LowLatencyBarrierParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, NoUninit)]
pub(crate) struct LowLatencyBarrierParams {
    pub(crate) group: GroupParams,
    pub(crate) masks: u64,
    pub(crate) barrier_at: u64,
    pub(crate) excluded_at: u64,
    pub(crate) shrink: u32,
    pub(crate) reserved: u32,
}

/// CUDA source that compiles only if the structs are laid out as here; see
/// [`super::super::params::assertions`].
#[cfg(test)]
pub(crate) fn assertions() -> String {
    macro_rules! layout {
        ($($type:ident { $($field:ident),* $(,)? })*) => {
            [$(
                format!(
                    "static_assert(sizeof({}) == {});\n",
                    stringify!($type),
                    size_of::<$type>()
                ),
                $(format!(
                    "static_assert(__INTADDR__(&(({}*)0)->{}) == {});\n",
                    stringify!($type),
                    stringify!($field),
                    std::mem::offset_of!($type, $field)
                ),)*
            )*]
        };
    }
    layout! {
        LowLatencyState { wire_bytes, verdict, decisions }
        Cube { data, strides }
        LowLatencyParams {
            group, shared, masks, tagged_at, tagged_half, rows_at, rows_half, excluded_at, topk,
            reject_text, tokens, top_k, index_bytes, experts, max_tokens, hidden, format,
            row_stride, terms, phases, chunk_tokens, shrink, discard,
        }
        LowLatencyDispatchParams {
            common, x, x_stride, out_x, out_scales, src_info, layout_range, recv_count, recv_stats,
            wait_stats,
        }
        LowLatencyCombineParams {
            common, x, weights, src_info, layout_range, out, out_stride, wait_stats,
        }
        LowLatencyBarrierParams { group, masks, barrier_at, excluded_at, shrink }
    }
    .concat()
}
