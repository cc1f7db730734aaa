// Parameters of the kernel in combine.cu; `engine/params.rs` declares the same.
#pragma once

#include "dispatch_params.cuh"

struct CombineParams {
    GroupParams group;

    // Rows in the order of dispatch, of row_bytes, so far apart.
    u64 x;
    u64 x_stride;
    // f32 `[rows, top_k]`; 0: there are none. Rows so many elements apart.
    u64 weights;
    u64 weights_stride;
    // Up to two `[tokens]` rows, so far apart.
    u64 bias[2];
    u64 bias_stride[2];

    // The handle: i32 `[tokens, ranks]`, `[ranks]`, `[ranks, ranks]`.
    u64 slots;
    u64 sent_rows;
    u64 rank_prefix;

    // Outputs `[tokens]`: rows so far apart, and dense f32 `[tokens, top_k]`.
    u64 out_x;
    u64 out_stride;
    u64 out_weights;

    // Text of PHASE_REJECT, in pinned memory.
    u64 reject_text;

    // Landing block of this rank: in LANDING_UNIT, and rows.
    u32 landing;
    u32 capacity;

    u32 tokens;
    u32 x_rows;
    u32 row_bytes;
    u32 top_k;
    u32 terms;
    // PHASE_COUNT announces.
    u32 phases;
    // 1: rows are only waited for, because the call was given up.
    u32 discard;
    // Blocks of the launch that sends, and units of each at most.
    u32 send_blocks;
    u32 units;
    u32 reserved;
};
