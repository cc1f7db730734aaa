// What the blocks of a dispatch know and share: its shape, tables in shared memory, who sends what.
#pragma once

#include "announce.cuh"
#include "dispatch_params.cuh"
#include "units.cuh"

constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / 32;
// The last warp publishes what the others have sent.
constexpr u32 DATA_WARPS = WARPS - 1;
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

// Tokens are counted by chunks, of a unit or of 32 tokens if that is more; a unit of less is a part of
// a chunk. The host makes so few that there are words for them.
__device__ __forceinline__ u32 chunk_tokens(const DispatchParams& p) { return max(p.grain, 32u); }
__device__ __forceinline__ u32 chunks_of(const DispatchParams& p) {
    return (p.tokens + chunk_tokens(p) - 1) / chunk_tokens(p);
}

// Dynamic shared memory. `shared_bytes` in engine/dispatch/plan.rs sizes it.
struct Shared {
    Announced all;
    // `[ranks]`: rows of this rank for each.
    u32* sent;
    // `[ranks]`: this rank's first row at each rank, and each rank's first row here.
    u32* first_at;
    u32* first_from;
    Ring ring;
    // `[RING][grain][ranks]`: the slots of their tokens.
    i32* slots;
    // `[chunks][ranks]`: the slots before each chunk.
    u32* chunk_first;
    // `[experts]`
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
        ring.posted = take(RING);
        ring.done = take(RING);
        slots = reinterpret_cast<i32*>(take(RING * p.grain * shape.ranks));
        chunk_first = at;
        experts = at + chunks_of(p) * shape.ranks;
        own_prefix = reinterpret_cast<const i32*>(p.routes[2]);
    }

    // Rows that the handle says come from `source`.
    __device__ u32 expected(const DispatchParams& p, u32 source, u32 ranks) const {
        const u32 me = p.group.rank;
        const i32 before = source == 0 ? 0 : own_prefix[(source - 1) * ranks + me];
        return u32(own_prefix[source * ranks + me] - before);
    }
};

// The blocks that take units in turn. With p.remote_blocks that many blocks send to other ranks, and the
// rest keep this rank's own rows: stores over a link and to memory hold each other up less on
// different SMs. The first unit of a block is fixed.
struct Crew {
    u32 block, blocks;
    bool remote, own;

    __device__ explicit Crew(const DispatchParams& p) : block(blockIdx.x), blocks(gridDim.x), remote(true), own(true) {
        if (p.remote_blocks == 0) return;
        remote = blockIdx.x < p.remote_blocks;
        own = !remote;
        blocks = remote ? p.remote_blocks : gridDim.x - p.remote_blocks;
        if (own) block -= p.remote_blocks;
    }

    // The block's next unit, of which it had so many; past the last one if there is none. One warp.
    __device__ __forceinline__ u32 take(const DispatchParams& p, u32 had) const {
        return had == 0 ? block : blocks + take_unit(p.group, remote ? 0 : 1);
    }
};

// The index at a place of a dense matrix.
__device__ __forceinline__ i64 flat_index_at(const Matrix& topk, u32 bytes, u64 at) {
    return bytes == 8 ? reinterpret_cast<const i64*>(topk.data)[at] : i64(reinterpret_cast<const i32*>(topk.data)[at]);
}

__device__ __forceinline__ i64 index_at(const Matrix& topk, u32 bytes, u32 row, u32 column) {
    return flat_index_at(topk, bytes, row * topk.row_stride + column * topk.column_stride);
}
