// The last part of a dispatch: rows that have landed, and this rank's own, to where they are wanted.
#pragma once

#include "dispatch_send.cuh"

// Metadata of a landed row, as one lane holds it: words of indices, weights and scales.
struct Landed {
    u32 topk[2];
    u32 weight;
    u32 scales[2];

    // `words` 4-byte words of row `row`, of which a lane gets every 32nd.
    template <int N>
    static __device__ __forceinline__ void load_part(u32 (&value)[N], const u8* from, u64 row, u32 words) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const u32 at = threadIdx.x % 32 + 32 * i;
            if (at < words) value[i] = reinterpret_cast<const volatile u32*>(from)[row * words + at];
        }
    }

    template <int N>
    static __device__ __forceinline__ void store_part(const u32 (&value)[N], u64 to, u64 row, u32 words) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const u32 at = threadIdx.x % 32 + 32 * i;
            if (at < words) reinterpret_cast<u32*>(to)[row * words + at] = value[i];
        }
    }

    __device__ __forceinline__ void load(const DispatchParams& p, const Shape& shape, const Landing& from, u64 row) {
        u32 one[1] = {0};
        if (p.out_topk) load_part(topk, from.topk, row, shape.top_k * p.index_bytes / 4);
        if (p.out_weights) load_part(one, from.weights, row, shape.top_k);
        if (p.out_scales) load_part(scales, from.scales, row, p.scale_words);
        weight = one[0];
    }

    __device__ __forceinline__ void store(const DispatchParams& p, const Shape& shape, const Landing& from,
                                          u64 row) const {
        const u32 one[1] = {weight};
        if (p.out_topk) store_part(topk, p.out_topk, row, shape.top_k * p.index_bytes / 4);
        if (p.out_weights) store_part(one, p.out_weights, row, shape.top_k);
        if (!p.out_scales) return;
        store_part(scales, p.out_scales, row, p.scale_words);
        for (u32 at = threadIdx.x % 32 + 64; at < p.scale_words; at += 32) {
            const u64 place = row * p.scale_words + at;
            reinterpret_cast<u32*>(p.out_scales)[place] = reinterpret_cast<const volatile u32*>(from.scales)[place];
        }
    }
};

__device__ __forceinline__ u8* out_row(const DispatchParams& p, u32 row) {
    return reinterpret_cast<u8*>(p.out_x) + row * p.out_stride;
}

// Copies one of this rank's own tokens from the input to the output.
__device__ inline void keep_token(const DispatchParams& p, const Shape& shape, const Shared& shared, i32 slot, u64 token) {
    const u32 row = shared.first_from[p.group.rank] + u32(slot);
    if (row >= p.out_rows) return;
    Travels travels;
    travels.load(p, shape, token);
    copy_row<false>(out_row(p, row), reinterpret_cast<const u8*>(p.x) + token * p.x_stride, shape.row_bytes);
    RowTarget to;
    to.topk = p.out_topk ? p.out_topk + u64(row) * shape.top_k * p.index_bytes : 0;
    to.weights = p.out_weights ? p.out_weights + u64(row) * shape.top_k * 4 : 0;
    to.scales = p.out_scales ? p.out_scales + u64(row) * p.scale_words * 4 : 0;
    to.src_idx = p.src_idx ? p.src_idx + u64(row) * 4 : 0;
    travels.store(p, shape, token, p.group.rank, to);
}

// Where a warp begins that has nothing to do.
constexpr u32 NOTHING = 1u << 29;

// A warp's way through this rank's own tokens: a few neighbours at a time.
struct OwnTokens {
    static constexpr u32 TOKENS = 4;

    const DispatchParams& p;
    const Shape& shape;
    const Shared& shared;
    // The next neighbours.
    u32 next;
    // Lane l has the slot of token `first + l`; those to be kept, as lanes.
    u32 first;
    i32 slot;
    u32 rest;

    // In steps of so many neighbours.
    u32 step;

    // Warp `warp` of so many.
    __device__ OwnTokens(const DispatchParams& params, const Shape& s, const Shared& sh, u32 warp, u32 warps)
        : p(params), shape(s), shared(sh), next(warp * TOKENS), first(0), slot(-1), rest(0), step(warps * TOKENS) {
        settle();
    }

    __device__ __forceinline__ bool more() const { return rest != 0; }

    // Keeps one.
    __device__ void keep() {
        const u32 lane = __ffs(rest) - 1;
        keep_token(p, shape, shared, __shfl_sync(~0u, slot, lane), first + lane);
        rest &= rest - 1;
        settle();
    }

    // Looks for some where there are.
    __device__ void settle() {
        const u32 lane = threadIdx.x % 32, rank = p.group.rank;
        for (; rest == 0 && next < p.tokens; next += step) {
            const u32 end = min(next + TOKENS, p.tokens);
            slot = -1;
            if (p.route_source == ROUTES_HANDLE) {
                first = next;
                if (first + lane < end) slot = handle_slots(p)[u64(first + lane) * shape.ranks + rank];
            } else {
                const u32 chunk = next / chunk_tokens(p);
                first = next - next % 32;
                PerRank rows = rows_before(shape, shared, chunk);
                walk_chunk(p, shape, chunk, end, rows, [&](u64 token, u32 to, i32 at) {
                    if (to == rank && token >= next) slot = at;
                });
            }
            rest = __ballot_sync(~0u, slot >= 0);
        }
    }
};

// A warp's way through the units of all other ranks, ranks in turn.
struct Arrivals {
    const DispatchParams& p;
    const Shape& shape;
    const Shared& shared;
    u32 most;
    u32 at, step;
    u32 source, index;

    __device__ Arrivals(const DispatchParams& params, const Shape& s, const Shared& sh, u32 first, u32 stride)
        : p(params), shape(s), shared(sh), most(0), at(first), step(stride) {
        for (u32 r = 0; r < shape.ranks; r++) {
            if (r != p.group.rank) most = max(most, units_of(r));
        }
        settle();
    }

    __device__ u32 units_of(u32 rank) const {
        const u32 grain = shared.all.word(rank, WORD_GRAIN);
        return (shared.all.word(rank, WORD_TOKENS) + grain - 1) / grain;
    }

    __device__ bool more() const { return at < most * (shape.ranks - 1); }

    __device__ void next() {
        at += step;
        settle();
    }

    // Moves on to a unit that exists.
    __device__ void settle() {
        for (; more(); at += step) {
            index = at / (shape.ranks - 1);
            source = (p.group.rank + 1 + at % (shape.ranks - 1)) % shape.ranks;
            if (index < units_of(source)) return;
        }
    }
};

// Rows `first..end` from here have landed: copies them, with what came with them. All warps of a
// block share them.
__device__ inline void copy_landed(const DispatchParams& p, const Shape& shape, const Landing& landing, u32 first,
                                   u32 end) {
    const u32 lane = threadIdx.x % 32;
    for (u32 row = first + threadIdx.x / 32; row < end && row < p.out_rows; row += WARPS) {
        Landed metadata;
        metadata.load(p, shape, landing, row);
        const u32 source = reinterpret_cast<const volatile u32*>(landing.src_idx)[row];
        copy_row<true>(out_row(p, row), landing.rows + u64(row) * shape.row_bytes, shape.row_bytes);
        metadata.store(p, shape, landing, row);
        if (p.src_idx && lane == 0) reinterpret_cast<u32*>(p.src_idx)[row] = source;
    }
}

// The same where rows are at their place: only the handle is told their source tokens. One warp.
__device__ inline void note_landed(const DispatchParams& p, const Landing& landing, u32 first, u32 end) {
    if (!p.src_idx) return;
    for (u32 row = first + threadIdx.x % 32; row < end && row < p.out_rows; row += 32) {
        reinterpret_cast<u32*>(p.src_idx)[row] = reinterpret_cast<const volatile u32*>(landing.src_idx)[row];
    }
}

// This rank's own rows at their place: the handle is told their source tokens. All threads.
__device__ inline void note_own(const DispatchParams& p, const Shape& shape, const Shared& shared) {
    u32* src_idx = reinterpret_cast<u32*>(p.src_idx) + shared.first_from[p.group.rank];
    if (p.route_source == ROUTES_HANDLE) {
        const u64 threads = u64(gridDim.x) * THREADS;
        for (u64 token = u64(blockIdx.x) * THREADS + threadIdx.x; token < p.tokens; token += threads) {
            const i32 slot = handle_slots(p)[token * shape.ranks + p.group.rank];
            if (slot >= 0) src_idx[slot] = u32(token);
        }
        return;
    }
    for_own_chunks(p, [&](u32 chunk) {
        PerRank rows = rows_before(shape, shared, chunk);
        walk_chunk(p, shape, chunk, chunk_end(p, chunk), rows, [&](u64 token, u32 rank, i32 slot) {
            if (rank == p.group.rank && slot >= 0) src_idx[slot] = u32(token);
        });
    });
}

// Waits for everything that comes to this rank, and puts it and its own rows where they are wanted.
__device__ inline void receive(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 rank = p.group.rank;
    const Landing landing = landing_of(p, shape, shared, group, rank);
    const bool copies = p.copy_rows && !p.discard;
    // The warps of a block copy a unit together; without copies each takes units of its own.
    const u32 warps = gridDim.x * WARPS, one = warp * gridDim.x + blockIdx.x;
    Arrivals arrivals(p, shape, shared, copies ? blockIdx.x : one, copies ? gridDim.x : warps);
    OwnTokens own(p, shape, shared, copies ? one : NOTHING, warps);
    u32 polls = 0;
    while (arrivals.more() || own.more()) {
        u32 first = 0, end = 0;
        bool landed = false;
        if (arrivals.more()) {
            if (lane == 0) landed = group.test_flag(group.flag(rank, arrivals.source, arrivals.index), first, end);
            landed = __shfl_sync(~0u, landed, 0);
        }
        if (landed) {
            __syncwarp();
            const u32 before = shared.first_from[arrivals.source];
            first = before + __shfl_sync(~0u, first, 0), end = before + __shfl_sync(~0u, end, 0);
            if (copies) {
                copy_landed(p, shape, landing, first, end);
            } else if (!p.discard) {
                note_landed(p, landing, first, end);
            }
            arrivals.next();
            polls = 0;
        } else if (own.more()) {
            own.keep();
        } else {
            bool stay = true;
            if (lane == 0) stay = group.patient(polls, STAGE_ROWS, arrivals.source);
            if (!__shfl_sync(~0u, stay, 0)) return;
        }
    }
    if (p.discard) return;
    if (!p.copy_rows && p.src_idx) note_own(p, shape, shared);
    if (!p.worst) return;
    // What lies behind the rows says so.
    const u64 thread = u64(blockIdx.x) * THREADS + threadIdx.x, threads = u64(gridDim.x) * THREADS;
    for (u64 row = shared.first_from[shape.ranks] + thread; row < p.out_rows; row += threads) {
        if (p.src_idx) reinterpret_cast<i32*>(p.src_idx)[row] = -1;
        for (u32 k = 0; p.out_weights && k < shape.top_k; k++) {
            reinterpret_cast<float*>(p.out_weights)[row * shape.top_k + k] = 0.0f;
        }
        if (!p.out_topk) continue;
        for (u32 k = 0; k < shape.top_k; k++) {
            if (p.index_bytes == 8) {
                reinterpret_cast<i64*>(p.out_topk)[row * shape.top_k + k] = -1;
            } else {
                reinterpret_cast<i32*>(p.out_topk)[row * shape.top_k + k] = -1;
            }
        }
    }
}
