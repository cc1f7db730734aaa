// What the blocks of a dispatch know and share: its shape, tables in shared memory, who sends what.
#pragma once

#include "announce.cuh"
#include "dispatch_params.cuh"

constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / 32;
// The last warp publishes what the others have sent.
constexpr u32 DATA_WARPS = WARPS - 1;
// Tokens that a thread looks at before anybody waits.
constexpr u32 CHUNKS = 4;

// Division by a number that is not known to the compiler.
struct Divisor {
    u32 by, factor;

    // Of numbers below `limit`.
    __device__ Divisor(u32 divisor, u32 limit)
        : by(divisor), factor(divisor > 1 && divisor <= 65536 && limit <= 65536 ? ~0u / divisor + 1 : 0) {}

    // The factor exceeds 2^32 / by by less than 1, so that the product exceeds the quotient by less
    // than number / 2^32, and the next multiple of 1 / by is further away: by * limit <= 2^32.
    __device__ __forceinline__ u32 divide(u32 number) const {
        return by == 1 ? number : factor ? __umulhi(number, factor) : number / by;
    }
};

// The shape, from constants where they are known.
struct Shape {
    u32 ranks, top_k, row_bytes, local_experts;

    __device__ explicit Shape(const DispatchParams& p)
        : ranks(RANKS ? RANKS : p.group.ranks),
          top_k(TOP_K ? TOP_K : p.top_k),
          row_bytes(ROW_BYTES ? ROW_BYTES : p.row_bytes),
          local_experts(p.experts / ranks) {}
};

// Dynamic shared memory. `shared_bytes` in engine/dispatch/plan.rs sizes it.
struct Shared {
    Announced all;
    // `[ranks]`: rows of this rank for each.
    u32* sent;
    // `[ranks]`: this rank's first row at each rank, and each rank's first row here.
    u32* first_at;
    u32* first_from;
    // `[units]`: tokens of each unit of this block that were sent.
    u32* done;
    // `[slot_tokens][ranks]`: slots of this block's tokens; without room for them they are read
    // where they were written, in the handle.
    i32* slots;
    // `[CHUNKS * WARPS][ranks]`
    u32* warp_rows;
    // `[experts]`, at the same place: it is used later.
    u32* experts;
    // i32 `[ranks, ranks]` in device memory, of a handle.
    const i32* own_prefix;

    __device__ Shared(u8* memory, const DispatchParams& p, const Shape& shape) {
        u32* at = reinterpret_cast<u32*>(memory);
        const auto take = [&](u32 count) {
            u32* taken = at;
            at += count;
            return taken;
        };
        all.ranks = shape.ranks;
        // With a handle ranks also say what they expect.
        all.length = WORD_COUNTS + (p.route_source == ROUTES_HANDLE ? 2 : 1) * shape.ranks;
        all.words = take(shape.ranks * (WORD_COUNTS + 2 * shape.ranks));
        all.verdict = VERDICT_OK;
        all.verdict_rank = 0;
        sent = take(shape.ranks);
        first_at = take(shape.ranks);
        first_from = take(shape.ranks + 1);
        done = take(p.units);
        slots = reinterpret_cast<i32*>(take(p.slot_tokens * shape.ranks));
        warp_rows = experts = at;
        own_prefix = reinterpret_cast<const i32*>(p.routes[2]);
    }

    // `[CHUNKS * THREADS][top_k]`: the rank of each choice, behind everything else.
    __device__ __forceinline__ u8* choice_ranks(const DispatchParams& p, const Shape& shape) const {
        return reinterpret_cast<u8*>(warp_rows + max(CHUNKS * WARPS * shape.ranks, p.experts));
    }

    // Rows that the handle says come from `source`.
    __device__ u32 expected(const DispatchParams& p, u32 source, u32 ranks) const {
        const u32 me = p.group.rank;
        const i32 before = source == 0 ? 0 : own_prefix[(source - 1) * ranks + me];
        return u32(own_prefix[source * ranks + me] - before);
    }
};

// The tokens of a block: units of p.grain neighbours, in turn with the other blocks that do the
// same. With p.remote_blocks that many blocks send to other ranks, and the rest keep this rank's own
// rows: stores over a link and to memory hold each other up less on different SMs.
struct Share {
    u32 grain, block, blocks;
    bool remote, own;

    __device__ explicit Share(const DispatchParams& p)
        : grain(p.grain), block(blockIdx.x), blocks(gridDim.x), remote(true), own(true) {
        if (p.remote_blocks == 0) return;
        remote = blockIdx.x < p.remote_blocks;
        own = !remote;
        blocks = remote ? p.remote_blocks : gridDim.x - p.remote_blocks;
        if (own) block -= p.remote_blocks;
    }

    // The block's `i`-th token; it is past the last one where there is none.
    __device__ __forceinline__ u64 token(u64 i) const {
        return (block + i / grain * blocks) * u64(grain) + i % grain;
    }

    // Which of this block's tokens it is; false if it is another block's.
    __device__ __forceinline__ bool find(u32 token, const Divisor& by_grain, const Divisor& by_blocks, u32& i) const {
        const u32 unit = by_grain.divide(token), turn = by_blocks.divide(unit);
        i = turn * grain + token - unit * grain;
        return unit - turn * blocks == block;
    }
};

// The index at a place of a dense matrix.
__device__ __forceinline__ i64 flat_index_at(const Matrix& topk, u32 bytes, u64 at) {
    return bytes == 8 ? reinterpret_cast<const i64*>(topk.data)[at] : i64(reinterpret_cast<const i32*>(topk.data)[at]);
}

__device__ __forceinline__ i64 index_at(const Matrix& topk, u32 bytes, u32 row, u32 column) {
    return flat_index_at(topk, bytes, row * topk.row_stride + column * topk.column_stride);
}
