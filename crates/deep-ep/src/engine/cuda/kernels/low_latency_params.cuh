// Parameters of the low-latency kernels; `engine/low_latency/params.rs` declares the same.
#pragma once

#include "dispatch_params.cuh"

// Parts of a low-latency call. A launch does one of them, the first two, or all.
enum LowLatencyPhase {
    // dispatch: announces counts and writes rows. combine: announces, and sends the weights.
    LL_SEND = 1,
    // combine: waits for weights and writes sums.
    LL_PARTIALS = 2,
    // Waits for what the peers sent and makes the outputs.
    LL_RECEIVE = 4,
    // In a launch of one block: tells the peers that this rank's arguments were not accepted, and
    // waits for their announcements. Only the former with LL_SEND, only the latter with LL_RECEIVE.
    LL_REJECT = 8,
};

// How dispatched rows travel: values of the constant FORMAT, 0 if known at run time only.
enum RowFormat {
    FORMAT_BF16 = 1,
    FORMAT_FP8 = 2,
    FORMAT_FP8_POWER_OF_TWO = 3,
    FORMAT_FP8_UE8M0 = 4,
};

// How combined rows travel: values of the constant WIRE, 0 if known at run time only.
enum CombineWire {
    WIRE_BF16 = 1,
    WIRE_LOGFMT = 2,
    WIRE_EXACT = 3,
};

// In device memory of the rank, zero at first.
struct LowLatencyState {
    // Bytes that were written to landing memory.
    u64 wire_bytes;
    // Of the latest combine whose receive is a launch of its own: the call in the high, its verdict in the low 32 bits.
    u64 verdict;
    // The latest call in which it was decided whether a rank takes part (`call << 1 | 1`) or does
    // not come (`call << 1`).
    u64 decisions[64];
};

// A 3-D tensor: strides in bytes.
struct Cube {
    u64 data;
    u64 strides[3];
};

struct LowLatencyParams {
    // Its announcements, texts and flags are those of low-latency calls; `state` holds the number
    // of calls before this one, `second_state` is brought forward. `flags` is per source and half.
    GroupParams group;
    LowLatencyState* shared;
    // Ranks that are masked, as bits, in device memory. The host may change it between calls.
    u64* masks;

    // Offsets in every region, and bytes, of a half: tagged words; rows.
    u64 tagged_at;
    u64 tagged_half;
    u64 rows_at;
    u64 rows_half;
    // Words `[ranks]`: not 0 where that rank goes on without this one.
    u64 excluded_at;

    // `[tokens, top_k]`
    Matrix topk;
    // Text of LL_REJECT, in pinned memory.
    u64 reject_text;

    u32 tokens;
    u32 top_k;
    u32 index_bytes;
    u32 experts;
    u32 max_tokens;
    u32 hidden;
    // RowFormat or CombineWire.
    u32 format;
    // Bytes from one landed row to the next.
    u32 row_stride;
    // See WORD_TERMS.
    u32 terms;
    u32 phases;
    // Tokens that a block sends, and that share a flag.
    u32 chunk_tokens;
    // 1: a rank that does not come in time is masked, instead of an error.
    u32 shrink;
    // 1: nothing is put anywhere, the call was given up.
    u32 discard;
    u32 reserved;
};

struct LowLatencyDispatchParams {
    LowLatencyParams common;
    // `[tokens, hidden]` bf16, rows so many bytes apart.
    u64 x;
    u64 x_stride;
    // `[local_experts, ranks * max_tokens, ..]`; scales may be absent.
    Cube out_x;
    Cube out_scales;
    // i32 `[local_experts, ranks * max_tokens]`, i64 `[local_experts, ranks]`, i32 `[local_experts]`.
    u64 src_info;
    u64 layout_range;
    u64 recv_count;
    // Added to, or 0: i32 `[local_experts]` rows, i64 `[ranks]` clock cycles.
    u64 recv_stats;
    u64 wait_stats;
};

struct LowLatencyCombineParams {
    LowLatencyParams common;
    // `[local_experts, ranks * max_tokens, hidden]` bf16.
    Cube x;
    // f32 `[tokens, top_k]`.
    Matrix weights;
    u64 src_info;
    u64 layout_range;
    // `[tokens, hidden]` bf16, rows so many bytes apart.
    u64 out;
    u64 out_stride;
    // Added to, or 0: i64 `[ranks]` clock cycles.
    u64 wait_stats;
};

struct LowLatencyBarrierParams {
    GroupParams group;
    u64* masks;
    // Offsets in every region: words `[ranks]`.
    u64 barrier_at;
    u64 excluded_at;
    u32 shrink;
    u32 reserved;
};
