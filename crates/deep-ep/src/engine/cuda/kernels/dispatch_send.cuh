// The second part of a dispatch: rows to the ranks they go to, flags, and what the host is told.
#pragma once

#include "dispatch_count.cuh"
#include "rows.cuh"

// Where the parts of one row go.
struct RowTarget {
    u64 topk, weights, scales, src_idx;
};

// What travels with a token's row, as one lane holds it. Loaded before the row, so that both are on
// their way at once.
struct Travels {
    // -1: none.
    i32 id;
    u32 weight;
    u32 scales[2];

    __device__ __forceinline__ void load(const DispatchParams& p, const Shape& shape, u64 token) {
        const u32 lane = threadIdx.x % 32;
        id = -1, weight = 0, scales[0] = scales[1] = 0;
        if (p.topk.data && lane < shape.top_k && p.route_source != ROUTES_HANDLE) {
            const i64 expert = index_at(p.topk, p.index_bytes, u32(token), lane);
            id = expert < 0 ? -1 : i32(expert);
            const u64 at = token * p.weights.row_stride + lane * p.weights.column_stride;
            if (p.weights.data) weight = reinterpret_cast<const u32*>(p.weights.data)[at];
        }
        const u32* from = reinterpret_cast<const u32*>(p.scales.data) + token * p.scales.row_stride;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 column = lane + 32 * i;
            if (column < p.scale_words) scales[i] = from[column * p.scales.column_stride];
        }
    }

    // Writes it where a row for `rank` goes. All lanes.
    __device__ __forceinline__ void store(const DispatchParams& p, const Shape& shape, u64 token, u32 rank,
                                          const RowTarget& to) const {
        const u32 lane = threadIdx.x % 32;
        // A rank's experts come one after another; calls with an id out of range were rejected.
        const i32 local = id - i32(rank * shape.local_experts);
        const bool hosted = id >= 0 && local >= 0 && local < i32(shape.local_experts);
        if (lane < shape.top_k && to.topk) {
            if (p.index_bytes == 8) {
                reinterpret_cast<i64*>(to.topk)[lane] = hosted ? i64(local) : -1;
            } else {
                reinterpret_cast<i32*>(to.topk)[lane] = hosted ? local : -1;
            }
        }
        if (lane < shape.top_k && to.weights) reinterpret_cast<u32*>(to.weights)[lane] = hosted ? weight : 0;
        if (to.scales) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 column = lane + 32 * i;
                if (column < p.scale_words) reinterpret_cast<u32*>(to.scales)[column] = scales[i];
            }
            const u32* from = reinterpret_cast<const u32*>(p.scales.data) + token * p.scales.row_stride;
            for (u32 column = lane + 64; column < p.scale_words; column += 32) {
                reinterpret_cast<u32*>(to.scales)[column] = from[column * p.scales.column_stride];
            }
        }
        if (to.src_idx && lane == 0) *reinterpret_cast<u32*>(to.src_idx) = u32(token);
    }
};

__device__ __forceinline__ Landing landing_of(const DispatchParams& p, const Shape& shape, const Shared& shared,
                                              const Group& group, u32 rank) {
    u8* base = group.base(rank) + u64(shared.all.word(rank, WORD_LANDING)) * LANDING_UNIT;
    return Landing(base, shared.all.word(rank, WORD_CAPACITY), u64(shape.top_k) * p.index_bytes, u64(shape.top_k) * 4,
                   u64(p.scale_words) * 4);
}

__device__ __forceinline__ RowTarget target_in(const DispatchParams& p, const Shape& shape, const Landing& landing,
                                               u64 row) {
    const bool travels = p.topk.data && p.route_source != ROUTES_HANDLE;
    RowTarget to;
    to.topk = travels ? reinterpret_cast<u64>(landing.topk + row * shape.top_k * p.index_bytes) : 0;
    to.weights = travels && p.weights.data ? reinterpret_cast<u64>(landing.weights + row * shape.top_k * 4) : 0;
    to.scales = p.scale_words ? reinterpret_cast<u64>(landing.scales + row * p.scale_words * 4) : 0;
    to.src_idx = reinterpret_cast<u64>(landing.src_idx + row * 4);
    return to;
}

// Writes the row of the block's `i`-th token to every rank it goes to; to this one only if rows are
// not copied out.
__device__ inline void send_token(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group,
                                  const Share& share, u32 i, u64 token) {
    const u32 lane = threadIdx.x % 32;
    const u8* row = reinterpret_cast<const u8*>(p.x) + token * p.x_stride;
    Travels travels;
    travels.load(p, shape, token);
    for (u32 first = 0; first < shape.ranks; first += 32) {
        const u32 rank = first + lane;
        i32 slot = -1;
        u64 to = 0;
        u32 place = 0;
        const bool mine = rank == p.group.rank ? share.own && !p.copy_rows : share.remote;
        if (rank < shape.ranks && mine) {
            slot = slot_of(p, shape, shared, i, token, rank);
        }
        if (slot >= 0) {
            place = shared.first_at[rank] + u32(slot);
            const Landing landing = landing_of(p, shape, shared, group, rank);
            to = reinterpret_cast<u64>(landing.rows) + u64(place) * shape.row_bytes;
        }
        const u32 lanes = __ballot_sync(~0u, slot >= 0);
        if (lanes == 0) continue;
        copy_row_to_each<false>(to, lanes, row, shape.row_bytes);
        for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
            const u32 target = __ffs(rest) - 1;
            const u32 at = __shfl_sync(~0u, place, target);
            const Landing landing = landing_of(p, shape, shared, group, first + target);
            travels.store(p, shape, token, first + target, target_in(p, shape, landing, at));
        }
    }
}

// Publishes the units of this block as they become complete: which rows of each rank they are. The
// last warp.
__device__ inline void publish(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 lane = threadIdx.x % 32;
    const Share share(p);
    for (u32 unit = 0; unit < p.units; unit++) {
        const u32 index = share.block + unit * share.blocks;
        const u64 begin = share.token(u64(unit) * share.grain);
        if (begin >= p.tokens) break;
        const u32 tokens = min(share.grain, p.tokens - u32(begin));
        while (ld_acquire_shared(&shared.done[unit]) < tokens) __nanosleep(20);
        __syncwarp();
        // Rows were written by other warps, whose counts were acquired above.
        fence_acq_rel_sys();
        for (u32 r = 0; r < shape.ranks; r++) {
            if (r == p.group.rank) continue;
            u32 first = ~0u, rows = 0;
            for (u32 at = 0; at < tokens; at += 32) {
                const u32 i = unit * share.grain + at + lane;
                const i32 slot = at + lane < tokens ? slot_of(p, shape, shared, i, begin + at + lane, r) : -1;
                const u32 ballot = __ballot_sync(~0u, slot >= 0);
                if (ballot && first == ~0u) first = __shfl_sync(~0u, slot, __ffs(ballot) - 1);
                rows += __popc(ballot);
            }
            if (first == ~0u) first = 0;
            if (lane < 2) {
                u64* flag = group.flag(r, p.group.rank, index) + lane;
                st_relaxed_sys(flag, group.word(lane == 0 ? first : first + rows));
            }
        }
    }
}

// Sends this block's share.
__device__ inline void move(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 i = threadIdx.x; i < p.units; i += THREADS) shared.done[i] = 0;
    __syncthreads();
    const Share share(p);
    if (warp == DATA_WARPS) {
        if (share.remote) publish(p, shape, shared, group);
        return;
    }
    for (u64 i = warp; share.token(i - i % share.grain) < p.tokens; i += DATA_WARPS) {
        const u64 token = share.token(i);
        if (token >= p.tokens) continue;
        send_token(p, shape, shared, group, share, u32(i), token);
        __syncwarp();
        if (lane == 0) red_release_shared(&shared.done[i / share.grain], 1);
    }
}

// What the host wants to know, as soon as it is known. One block.
__device__ inline void tell_counts(const DispatchParams& p, const Shape& shape, const Shared& shared,
                                   const Group& group) {
    u64* result = reinterpret_cast<u64*>(p.result);
    bool here = true;
    if (result && shared.all.verdict != VERDICT_REJECTED && shared.all.verdict != VERDICT_DIFFER) {
        const auto tell = [&](u32 at, u32 value) { st_relaxed_sys(result + at, u64(p.ticket) << 32 | value); };
        for (u32 i = threadIdx.x; i < shape.ranks; i += THREADS) {
            tell(RESULT_ROWS + i, shared.all.rows(i, p.group.rank));
            tell(RESULT_ROWS + shape.ranks + i, shared.all.rows(p.group.rank, i));
            tell(RESULT_ROWS + 2 * shape.ranks + i, shared.all.rows_before(shape.ranks, i));
        }
        const u32 experts = p.route_source == ROUTES_HANDLE ? 0 : shape.local_experts;
        for (u32 e = threadIdx.x; e < experts && here; e += THREADS) {
            u32 sum = 0;
            for (u32 s = 0; s < shape.ranks && here; s++) {
                u32 value = 0;
                const u64* words = group.announcement(p.group.rank, s);
                here = group.wait_word(words + WORD_COUNTS + shape.ranks + e, value, STAGE_COUNTS, s);
                sum += value;
            }
            tell(RESULT_ROWS + 3 * shape.ranks + e, sum);
        }
    }
    here = __syncthreads_and(here);
    if (threadIdx.x == 0 && here) tell_verdict(group, shared.all, result, p.ticket);
}

// The prefix sums that a handle has. One block.
__device__ inline void write_prefix(const DispatchParams& p, const Shape& shape, const Shared& shared) {
    if (!p.rank_prefix) return;
    i32* matrix = reinterpret_cast<i32*>(p.rank_prefix);
    for (u32 i = threadIdx.x; i < shape.ranks * shape.ranks; i += THREADS) {
        const bool mine = i % shape.ranks == p.group.rank;
        matrix[i] = mine ? i32(shared.first_from[i / shape.ranks + 1]) : 0;
    }
}
