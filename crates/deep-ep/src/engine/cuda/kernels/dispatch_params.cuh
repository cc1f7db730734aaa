// Parameters of the kernels in dispatch.cu; `engine/params.rs` declares the same.
#pragma once

#include "group.cuh"

// Parts of a dispatch. A launch does those whose bits are set, in this order.
enum DispatchPhase {
    // Counts this rank's tokens for every rank and announces them.
    PHASE_COUNT = 1,
    // Tells the peers that this rank's arguments were not accepted, instead of counting. On its own
    // it also looks at what they say; with PHASE_COUNT a later launch does.
    PHASE_REJECT = 2,
    // Writes rows into the landing blocks of the ranks they go to.
    PHASE_MOVE = 4,
    // Waits for rows and puts them, and what came with them, where the caller wants them.
    PHASE_RECEIVE = 8,
};

// Where the routes come from.
enum RouteSource {
    ROUTES_TOPK = 0,
    ROUTES_MASK = 1,
    ROUTES_HANDLE = 2,
};

// An optional 2-D tensor with strides in elements; `data` is 0 if there is none.
struct Matrix {
    u64 data;
    u64 row_stride;
    u64 column_stride;
};

struct DispatchParams {
    GroupParams group;

    // Input. Rows `[tokens]` of row_bytes, so far apart.
    u64 x;
    u64 x_stride;
    // `[tokens, scale_words]` of 4-byte words.
    Matrix scales;
    // `[tokens, top_k]` of 8-byte (index_bytes) or 4-byte ids, and f32.
    Matrix topk;
    Matrix weights;
    // ROUTES_MASK: u8 `[tokens, ranks]` and i32 `[experts]`. ROUTES_HANDLE: slots i32
    // `[tokens, ranks]`, sent rows i32 `[ranks]`, prefix i32 `[ranks, ranks]`.
    u64 routes[3];

    // Handle, or 0 when one was given: i32 `[tokens, ranks]`, u8 `[tokens, ranks]`,
    // i32 `[ranks, ranks]`, i32 `[ranks]`, i32 `[ranks]`, i32 `[out_rows]`.
    u64 slots;
    u64 is_token_in_rank;
    u64 rank_prefix;
    u64 sent_rows;
    u64 channel_starts;
    u64 src_idx;

    // Outputs `[out_rows]`: rows so far apart, dense indices, weights and scales; 0 for what is not
    // wanted. With copy_rows 0 they are the landing block itself.
    u64 out_x;
    u64 out_stride;
    u64 out_topk;
    u64 out_weights;
    u64 out_scales;

    // Pinned words for the host, `ticket` above and a value below; 0: the host does not wait.
    u64 result;
    // Text of PHASE_REJECT, in pinned memory.
    u64 reject_text;

    // Landing block of this rank: in LANDING_UNIT, and rows.
    u32 landing;
    u32 capacity;

    u32 tokens;
    u32 row_bytes;
    u32 scale_words;
    u32 top_k;
    u32 index_bytes;
    u32 experts;
    u32 out_rows;
    u32 route_source;
    // See WORD_TERMS.
    u32 terms;
    u32 phases;
    u32 ticket;
    // Tokens that share a flag, a unit: a power of two, or a multiple of 32.
    u32 grain;
    // Blocks that send to other ranks only, the others keeping this rank's rows; 0: all do both.
    u32 remote_blocks;
    // 1: own rows and landed rows are copied to out_x; 0: they are at their place when they land.
    u32 copy_rows;
    // 1: nothing is put anywhere: rows are only waited for, because the call was given up.
    u32 discard;
    // 1: out_rows is a worst case; what lies behind the rows gets index -1.
    u32 worst;
};

// Results for the host, in words. `ranks` of the last three, then experts of this rank.
enum ResultWord {
    RESULT_VERDICT = 0,
    RESULT_RANK = 1,
    RESULT_STATUS = 2,
    RESULT_DETAIL = 3,   // four words: two 64-bit numbers, low half first
    RESULT_ROWS = 7,     // [ranks] rows from each source
};

struct LayoutParams {
    Matrix topk;
    // i32 `[ranks]` and `[experts]`, zero at first; u8 `[tokens, ranks]`.
    u64 rank_counts;
    u64 expert_counts;
    u64 is_token_in_rank;
    u32 tokens;
    u32 top_k;
    u32 index_bytes;
    u32 experts;
    u32 ranks;
    u32 reserved;
};
