//! Structs that kernels and host share. `kernels/{group,dispatch_params,combine_params}.cuh` declare
//! the same, and a test compares the two.

use bytemuck::{NoUninit, Pod, Zeroable};

use crate::{
    engine::Operation,
    tensor::{Device, Tensor},
};

/// `CallState`: the progress of one kind of launch, in device memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct CallState {
    /// Calls that are over.
    pub(crate) calls: u64,
    /// Ranks that a wait gave up on.
    pub(crate) missing: u64,
    /// The address of words in which blocks tell each other what they counted.
    pub(crate) chunk_words: u64,
    /// Blocks at the grid barrier.
    pub(crate) arrived: u32,
    /// Blocks that are done.
    pub(crate) left: u32,
    /// Stage in which a wait gave up, or 0.
    pub(crate) failed: u32,
    /// Units that were taken by each crew of blocks.
    pub(crate) taken: [u32; 2],
    pub(crate) reserved: u32,
}

/// Bytes of the text that comes with a reject.
pub(crate) const TEXT_BYTES: usize = 512;

/// `Report`: what went wrong, in pinned memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Report {
    pub(crate) failed: u32,
    pub(crate) operation: u32,
    pub(crate) stage: u32,
    pub(crate) reserved: u32,
    pub(crate) missing: u64,
    pub(crate) abort: u64,
    pub(crate) abort_missing: u64,
    pub(crate) verdict: u32,
    pub(crate) verdict_rank: u32,
    pub(crate) verdict_operation: u32,
    pub(crate) verdict_status: u32,
    pub(crate) verdict_detail: [u64; 2],
    pub(crate) text: [[u8; 32]; TEXT_BYTES / 32],
}

/// `GroupParams`: what every kernel of a call is told about its group.
#[repr(C)]
#[derive(Debug, Clone, Copy, NoUninit)]
pub(crate) struct GroupParams {
    pub(crate) bases: u64,
    pub(crate) state: u64,
    pub(crate) second_state: u64,
    pub(crate) report: u64,
    pub(crate) gone: u64,
    pub(crate) seen_sms: u64,
    pub(crate) timeout: u64,
    pub(crate) abort_at: u64,
    pub(crate) missing_at: u64,
    pub(crate) dropped_at: u64,
    pub(crate) announce_at: u64,
    pub(crate) announce_stride: u64,
    pub(crate) text_at: u64,
    pub(crate) flags_at: u64,
    pub(crate) flags: u32,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) operation: u32,
    pub(crate) advance: u32,
    pub(crate) reserved: u32,
}

/// `Matrix`: an optional 2-D tensor with strides in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct Matrix {
    pub(crate) data: u64,
    pub(crate) row_stride: u64,
    pub(crate) column_stride: u64,
}

impl Matrix {
    /// A tensor of two dimensions on a device; without elements it may have any address.
    pub(crate) fn of(tensor: Option<&Tensor<'_>>) -> Self {
        tensor.map_or(Self::zeroed(), |tensor| {
            debug_assert!(tensor.device() != Device::Host);
            Self {
                data: tensor.as_ptr() as u64,
                row_stride: tensor.strides()[0] as u64,
                column_stride: tensor.strides()[1] as u64,
            }
        })
    }
}

/// `DispatchPhase`: parts of a dispatch or a combine.
pub(crate) mod phase {
    pub(crate) const COUNT: u32 = 1;
    pub(crate) const REJECT: u32 = 2;
    pub(crate) const MOVE: u32 = 4;
    pub(crate) const RECEIVE: u32 = 8;
}

/// `RouteSource`.
pub(crate) mod route_source {
    pub(crate) const TOPK: u32 = 0;
    pub(crate) const MASK: u32 = 1;
    pub(crate) const HANDLE: u32 = 2;
}

/// `Verdict`.
pub(crate) mod verdict {
    pub(crate) const DIFFER: u32 = 2;
    pub(crate) const HANDLE: u32 = 3;
    pub(crate) const OVERFLOW: u32 = 4;
    pub(crate) const GROW: u32 = 5;
    pub(crate) const OK: u32 = 0xff;
}

/// `Status`.
pub(crate) mod status {
    pub(crate) const EXPERT_ID: u32 = 2;
}

/// `ResultWord`.
pub(crate) mod result_word {
    pub(crate) const VERDICT: usize = 0;
    pub(crate) const RANK: usize = 1;
    pub(crate) const STATUS: usize = 2;
    pub(crate) const DETAIL: usize = 3;
    pub(crate) const ROWS: usize = 7;
}

/// `LANDING_UNIT`, bytes.
pub(crate) const LANDING_UNIT: u64 = 256;

/// `DispatchParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, NoUninit)]
pub(crate) struct DispatchParams {
    pub(crate) group: GroupParams,
    pub(crate) x: u64,
    pub(crate) x_stride: u64,
    pub(crate) scales: Matrix,
    pub(crate) topk: Matrix,
    pub(crate) weights: Matrix,
    pub(crate) routes: [u64; 3],
    pub(crate) slots: u64,
    pub(crate) is_token_in_rank: u64,
    pub(crate) rank_prefix: u64,
    pub(crate) sent_rows: u64,
    pub(crate) channel_starts: u64,
    pub(crate) src_idx: u64,
    pub(crate) out_x: u64,
    pub(crate) out_stride: u64,
    pub(crate) out_topk: u64,
    pub(crate) out_weights: u64,
    pub(crate) out_scales: u64,
    pub(crate) result: u64,
    pub(crate) reject_text: u64,
    pub(crate) landing: u32,
    pub(crate) capacity: u32,
    pub(crate) tokens: u32,
    pub(crate) row_bytes: u32,
    pub(crate) scale_words: u32,
    pub(crate) top_k: u32,
    pub(crate) index_bytes: u32,
    pub(crate) experts: u32,
    pub(crate) out_rows: u32,
    pub(crate) route_source: u32,
    pub(crate) terms: u32,
    pub(crate) phases: u32,
    pub(crate) ticket: u32,
    pub(crate) grain: u32,
    pub(crate) remote_blocks: u32,
    pub(crate) copy_rows: u32,
    pub(crate) discard: u32,
    pub(crate) worst: u32,
}

/// `LayoutParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, NoUninit)]
pub(crate) struct LayoutParams {
    pub(crate) topk: Matrix,
    pub(crate) rank_counts: u64,
    pub(crate) expert_counts: u64,
    pub(crate) is_token_in_rank: u64,
    pub(crate) tokens: u32,
    pub(crate) top_k: u32,
    pub(crate) index_bytes: u32,
    pub(crate) experts: u32,
    pub(crate) ranks: u32,
    pub(crate) reserved: u32,
}

/// `CombineParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, NoUninit)]
pub(crate) struct CombineParams {
    pub(crate) group: GroupParams,
    pub(crate) x: u64,
    pub(crate) x_stride: u64,
    pub(crate) weights: u64,
    pub(crate) weights_stride: u64,
    pub(crate) bias: [u64; 2],
    pub(crate) bias_stride: [u64; 2],
    pub(crate) slots: u64,
    pub(crate) sent_rows: u64,
    pub(crate) rank_prefix: u64,
    pub(crate) out_x: u64,
    pub(crate) out_stride: u64,
    pub(crate) out_weights: u64,
    pub(crate) reject_text: u64,
    pub(crate) landing: u32,
    pub(crate) capacity: u32,
    pub(crate) tokens: u32,
    pub(crate) x_rows: u32,
    pub(crate) row_bytes: u32,
    pub(crate) top_k: u32,
    pub(crate) terms: u32,
    pub(crate) phases: u32,
    pub(crate) discard: u32,
    pub(crate) send_blocks: u32,
    pub(crate) units: u32,
    pub(crate) reserved: u32,
}

/// The word in which ranks must agree about a high-throughput call, see `WORD_TERMS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Terms {
    pub(crate) operation: u8,
    pub(crate) top_k: u8,
    /// Choices are 8 bytes wide.
    pub(crate) wide_index: bool,
    pub(crate) weights: bool,
    /// Choices travel.
    pub(crate) choices: bool,
    /// Along a handle's routes.
    pub(crate) cached: bool,
    pub(crate) worst: bool,
    /// Element type of summed rows, as `DTYPE_*`; in a low-latency call how rows travel, from 0.
    pub(crate) dtype: u8,
    /// Number of a call that hosts wait for, its lowest bits: a call that one host makes again for
    /// lack of room must not meet another call of a host that has given it up.
    pub(crate) attempt: u16,
}

impl Terms {
    pub(crate) fn word(self) -> u32 {
        let bit = |set: bool, at: u32| u32::from(set) << at;
        u32::from(self.operation)
            | u32::from(self.top_k) << 8
            | bit(self.wide_index, 16)
            | bit(self.weights, 17)
            | bit(self.choices, 18)
            | bit(self.cached, 19)
            | bit(self.worst, 20)
            | u32::from(self.dtype & 3) << 21
            | u32::from(self.attempt & 0x1ff) << 23
    }

    /// How the rows of a low-latency call travel.
    pub(crate) fn format_name(self) -> &'static str {
        let combines = self.operation == Operation::LowLatencyCombine as u8;
        match (combines, self.dtype) {
            (_, 0) => "bf16",
            (false, 1) => "fp8",
            (false, 2) => "fp8 with power-of-two scales",
            (false, _) => "fp8 with UE8M0 scales",
            (true, 1) => "LogFMT",
            (true, _) => "exact",
        }
    }

    pub(crate) fn of_word(word: u32) -> Self {
        let bit = |at: u32| word >> at & 1 != 0;
        Self {
            operation: word as u8,
            top_k: (word >> 8) as u8,
            wide_index: bit(16),
            weights: bit(17),
            choices: bit(18),
            cached: bit(19),
            worst: bit(20),
            dtype: (word >> 21 & 3) as u8,
            attempt: (word >> 23) as u16,
        }
    }
}

/// CUDA source that compiles only if the structs are laid out as here. NVRTC has no `offsetof`;
/// `__INTADDR__` is what its front end makes of it elsewhere.
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
        CallState { calls, missing, chunk_words, arrived, left, failed, taken }
        Report {
            failed, operation, stage, missing, abort, verdict, verdict_rank, verdict_operation,
            verdict_status, verdict_detail, text,
        }
        GroupParams {
            bases, state, second_state, report, gone, seen_sms, timeout, abort_at, missing_at, dropped_at, announce_at,
            announce_stride, text_at, flags_at, flags, rank, ranks, operation, advance,
        }
        Matrix { data, row_stride, column_stride }
        DispatchParams {
            group, x, x_stride, scales, topk, weights, routes, slots, is_token_in_rank, rank_prefix, sent_rows, channel_starts,
            src_idx, out_x, out_stride, out_topk, out_weights, out_scales, result, reject_text,
            landing, capacity, tokens, row_bytes, scale_words, top_k, index_bytes, experts,
            out_rows, route_source, terms, phases, ticket, grain, remote_blocks, copy_rows,
            discard, worst,
        }
        LayoutParams {
            topk, rank_counts, expert_counts, is_token_in_rank, tokens, top_k, index_bytes,
            experts, ranks,
        }
        CombineParams {
            group, x, x_stride, weights, weights_stride, bias, bias_stride, slots, sent_rows,
            rank_prefix, out_x, out_stride, out_weights, reject_text, landing, capacity, tokens,
            x_rows, row_bytes, top_k, terms, phases, discard, send_blocks, units,
        }
    }
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_survive_their_word() {
        let terms = Terms {
            operation: 2,
            top_k: 32,
            wide_index: true,
            weights: false,
            choices: true,
            cached: false,
            worst: true,
            dtype: 2,
            attempt: 0x155,
        };
        assert_eq!(Terms::of_word(terms.word()), terms);
        assert_eq!(Terms::of_word(0), Terms::default());
    }
}
