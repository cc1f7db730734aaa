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

// Writes a token's row to every rank it goes to; to this one only if rows are not copied out. `slots`
// are its slots.
__device__ inline void send_token(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group,
                                  const i32* slots, u64 token) {
    const u32 lane = threadIdx.x % 32;
    const u8* row = reinterpret_cast<const u8*>(p.x) + token * p.x_stride;
    Travels travels;
    travels.load(p, shape, token);
    for (u32 first = 0; first < shape.ranks; first += 32) {
        const u32 rank = first + lane;
        i32 slot = -1;
        u64 to = 0;
        u32 place = 0;
        const Crew crew(p);
        const bool mine = rank == p.group.rank ? crew.own && !p.copy_rows : crew.remote;
        if (rank < shape.ranks && mine) slot = slots[rank];
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

__device__ __forceinline__ u32 unit_tokens(const DispatchParams& p, u32 unit) {
    return min(p.grain, p.tokens - unit * p.grain);
}

// Finds the slots of a unit's tokens. One warp.
__device__ inline void find_slots(const DispatchParams& p, const Shape& shape, const Shared& shared, u32 unit,
                                  i32* slots) {
    const u64 begin = u64(unit) * p.grain, end = begin + unit_tokens(p, unit);
    if (p.route_source == ROUTES_HANDLE) {
        const u32 count = u32(end - begin) * shape.ranks;
        for (u32 i = threadIdx.x % 32; i < count; i += 32) slots[i] = handle_slots(p)[begin * shape.ranks + i];
        return;
    }
    const u32 chunk = u32(begin / chunk_tokens(p));
    PerRank rows = rows_before(shape, shared, chunk);
    walk_chunk(p, shape, chunk, end, rows, [&](u64 token, u32 rank, i32 slot) {
        if (token >= begin) slots[u32(token - begin) * shape.ranks + rank] = slot;
    });
}

// Tells every other rank which of its rows a unit was. One warp, behind a fence that is behind the rows.
__device__ inline void publish(const DispatchParams& p, const Shape& shape, const Group& group, u32 unit,
                               const i32* slots) {
    const u32 lane = threadIdx.x % 32, tokens = unit_tokens(p, unit);
    for (u32 r = 0; r < shape.ranks; r++) {
        if (r == p.group.rank) continue;
        u32 first = ~0u, rows = 0;
        for (u32 at = 0; at < tokens; at += 32) {
            const i32 slot = at + lane < tokens ? slots[(at + lane) * shape.ranks + r] : -1;
            const u32 ballot = __ballot_sync(~0u, slot >= 0);
            if (ballot && first == ~0u) first = __shfl_sync(~0u, slot, __ffs(ballot) - 1);
            rows += __popc(ballot);
        }
        if (first == ~0u) first = 0;
        if (lane < 2) {
            u64* flag = group.flag(r, p.group.rank, unit) + lane;
            st_relaxed_sys(flag, group.word(lane == 0 ? first : first + rows));
        }
    }
}

// Takes units for the other warps and publishes them. The last warp.
__device__ inline void lead_units(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const Crew crew(p);
    const auto slots = [&](u32 k) { return shared.slots + k % RING * p.grain * shape.ranks; };
    lead(
        shared.ring,
        [&](u32 k) {
            const u32 unit = crew.take(p, k);
            if (u64(unit) * p.grain >= p.tokens) return NO_UNIT;
            find_slots(p, shape, shared, unit, slots(k));
            return unit;
        },
        [&](u32 unit) { return unit_tokens(p, unit); },
        [&](u32 k, u32 unit) {
            if (crew.remote) publish(p, shape, group, unit, slots(k));
        });
}

// Sends this block's units.
__device__ inline void move(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 warp = threadIdx.x / 32;
    shared.ring.clear();
    __syncthreads();
    if (warp == DATA_WARPS) {
        lead_units(p, shape, shared, group);
        return;
    }
    u32 unit;
    bool gone;
    for (u32 k = 0; shared.ring.wait(k, unit, gone); k++) {
        // The warp that has a unit's first token is another one for each.
        for (u32 i = (warp + k * (DATA_WARPS - p.grain % DATA_WARPS)) % DATA_WARPS; !gone; i += DATA_WARPS) {
            if (i >= unit_tokens(p, unit)) break;
            const i32* slots = shared.slots + (k % RING * p.grain + i) * shape.ranks;
            send_token(p, shape, shared, group, slots, u64(unit) * p.grain + i);
            shared.ring.finish(k);
        }
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
