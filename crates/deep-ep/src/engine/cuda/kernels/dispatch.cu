// High-throughput dispatch. The protocol is described in engine/mod.rs.
//
// Constants, each 0 if it is known only at run time: RANKS, TOP_K, ROW_BYTES.

#include "announce.cuh"
#include "dispatch_params.cuh"
#include "rows.cuh"

constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / 32;
// The last warp publishes what the others have sent.
constexpr u32 DATA_WARPS = WARPS - 1;

// The shape, from constants where they are known.
struct Shape {
    u32 ranks, top_k, row_bytes, local_experts;

    __device__ explicit Shape(const DispatchParams& p)
        : ranks(RANKS ? RANKS : p.group.ranks),
          top_k(TOP_K ? TOP_K : p.top_k),
          row_bytes(ROW_BYTES ? ROW_BYTES : p.row_bytes),
          local_experts(p.experts / ranks) {}
};

// Dynamic shared memory. `shared_bytes` in engine/dispatch.rs sizes it.
struct Shared {
    Announced all;
    // `[count_blocks][ranks]`: rows counted before each block, then for all in `sent`.
    u32* before;
    u32* sent;
    // `[ranks]`: this rank's first row at each rank, and each rank's first row here.
    u32* first_at;
    u32* first_from;
    // `[units]`: tokens of each unit of this block that were sent.
    u32* done;
    // `[experts]` while counting; `[WARPS][ranks]`
    u32* experts;
    u32* warp_rows;
    // i32 `[ranks, ranks]` in device memory, of a handle.
    const i32* own_prefix;

    // Rows that the handle says come from `source`.
    __device__ u32 expected(const DispatchParams& p, u32 source, u32 ranks) const {
        const u32 me = p.group.rank;
        const i32 before = source == 0 ? 0 : own_prefix[(source - 1) * ranks + me];
        return u32(own_prefix[source * ranks + me] - before);
    }

    __device__ Shared(u8* memory, const DispatchParams& p, const Shape& shape) {
        u32* at = reinterpret_cast<u32*>(memory);
        const auto take = [&](u32 count) {
            u32* taken = at;
            at += count;
            return taken;
        };
        all.words = take(shape.ranks * (WORD_COUNTS + 2 * shape.ranks));
        all.ranks = shape.ranks;
        // With a handle ranks also say what they expect.
        all.length = WORD_COUNTS + (p.route_source == ROUTES_HANDLE ? 2 : 1) * shape.ranks;
        own_prefix = reinterpret_cast<const i32*>(p.routes[2]);
        all.verdict = VERDICT_OK;
        all.verdict_rank = 0;
        before = take(p.count_blocks * shape.ranks);
        sent = take(shape.ranks);
        first_at = take(shape.ranks);
        first_from = take(shape.ranks + 1);
        done = take(p.units);
        warp_rows = take(WARPS * shape.ranks);
        experts = take(p.experts);
    }
};

__device__ __forceinline__ i64 index_at(const Matrix& topk, u32 bytes, u32 row, u32 column) {
    const u64 at = row * topk.row_stride + column * topk.column_stride;
    return bytes == 8 ? reinterpret_cast<const i64*>(topk.data)[at] : i64(reinterpret_cast<const i32*>(topk.data)[at]);
}

// The ranks that a token goes to, as bits; counts its choices in `experts` unless that is 0.
__device__ inline u64 ranks_of(const DispatchParams& p, const Shape& shape, u32 token, u32* experts) {
    u64 ranks = 0;
    if (p.route_source == ROUTES_MASK) {
        const u8* mask = reinterpret_cast<const u8*>(p.routes[0]) + u64(token) * shape.ranks;
        for (u32 r = 0; r < shape.ranks; r++) ranks |= u64(mask[r] != 0) << r;
        return ranks;
    }
    for (u32 k = 0; k < shape.top_k; k++) {
        const i64 id = index_at(p.topk, p.index_bytes, token, k);
        if (id < 0) continue;
        if (id >= p.experts) {
            atomicMin(&p.group.state->bad_id, u64(token) * shape.top_k + k);
            continue;
        }
        ranks |= u64(1) << (u32(id) / shape.local_experts);
        if (experts) atomicAdd(&experts[id], 1);
    }
    return ranks;
}

// Ids are checked although they do not decide where rows go.
__device__ inline void check_ids(const DispatchParams& p, const Shape& shape, u32 token) {
    for (u32 k = 0; k < shape.top_k; k++) {
        if (index_at(p.topk, p.index_bytes, token, k) >= i64(p.experts)) {
            atomicMin(&p.group.state->bad_id, u64(token) * shape.top_k + k);
        }
    }
}

// Counts the tokens of this block's range: slots within the range, and rows for each rank.
__device__ inline void count_range(const DispatchParams& p, const Shape& shape, const Shared& shared) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 begin = min(blockIdx.x * p.block_tokens, p.tokens);
    const u32 end = min(begin + p.block_tokens, p.tokens);
    const bool counts_experts = p.route_source == ROUTES_TOPK;
    for (u32 e = threadIdx.x; e < p.experts; e += THREADS) shared.experts[e] = 0;
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) shared.sent[r] = 0;
    __syncthreads();
    i32* slots = reinterpret_cast<i32*>(p.block_slots);
    u8* mask = reinterpret_cast<u8*>(p.is_token_in_rank);
    for (u32 first = begin; first < end; first += THREADS) {
        const u32 token = first + threadIdx.x;
        u64 ranks = 0;
        if (token < end) {
            ranks = ranks_of(p, shape, token, counts_experts ? shared.experts : nullptr);
            if (p.route_source == ROUTES_MASK && p.topk.data) check_ids(p, shape, token);
        }
        for (u32 r = 0; r < shape.ranks; r++) {
            const u32 ballot = __ballot_sync(~0u, ranks >> r & 1);
            if (lane == 0) shared.warp_rows[warp * shape.ranks + r] = __popc(ballot);
        }
        __syncthreads();
        // Rows of the warps before each, and the range's sum so far.
        for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) {
            u32 sum = shared.sent[r];
            for (u32 w = 0; w < WARPS; w++) {
                const u32 rows = shared.warp_rows[w * shape.ranks + r];
                shared.warp_rows[w * shape.ranks + r] = sum;
                sum += rows;
            }
            shared.sent[r] = sum;
        }
        __syncthreads();
        for (u32 r = 0; r < shape.ranks; r++) {
            const bool goes = ranks >> r & 1;
            const u32 ballot = __ballot_sync(~0u, goes);
            if (token >= end) continue;
            const u32 slot = shared.warp_rows[warp * shape.ranks + r] + __popc(ballot & ((1u << lane) - 1));
            slots[u64(token) * shape.ranks + r] = goes ? i32(slot) : -1;
            mask[u64(token) * shape.ranks + r] = goes;
        }
        __syncthreads();
    }
    u32* rows = reinterpret_cast<u32*>(p.block_rows);
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) rows[blockIdx.x * shape.ranks + r] = shared.sent[r];
    if (!counts_experts) return;
    u32* experts = reinterpret_cast<u32*>(p.expert_counts);
    for (u32 e = threadIdx.x; e < p.experts; e += THREADS) {
        if (shared.experts[e]) atomicAdd(&experts[e], shared.experts[e]);
    }
}

// Rows that every counting block's tokens have before them, and all rows, from what the blocks
// wrote before the grid barrier or before this launch.
__device__ inline void sum_ranges(const DispatchParams& p, const Shape& shape, const Shared& shared) {
    const bool counted = p.route_source != ROUTES_HANDLE;
    const volatile u32* rows = reinterpret_cast<const volatile u32*>(p.block_rows);
    const u32 words = p.count_blocks * shape.ranks;
    for (u32 i = threadIdx.x; i < words; i += THREADS) shared.before[i] = counted ? rows[i] : 0;
    __syncthreads();
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) {
        u32 sum = 0;
        for (u32 b = 0; b < p.count_blocks; b++) {
            const u32 count = shared.before[b * shape.ranks + r];
            shared.before[b * shape.ranks + r] = sum;
            sum += count;
        }
        shared.sent[r] = counted ? sum : reinterpret_cast<const u32*>(p.routes[1])[r];
    }
    __syncthreads();
}

// Writes the text that a reject comes with into every rank's region: numbers for a bad id, the
// host's text otherwise.
__device__ inline u32 announce_status(const DispatchParams& p, const Shape& shape, const Group& group) {
    __shared__ u32 status;
    __shared__ u64 detail[2];
    if (threadIdx.x == 0) {
        const u64 bad = atomicExch(&p.group.state->bad_id, ~u64(0));
        status = p.phases & PHASE_REJECT ? u32(STATUS_HOST) : bad == ~u64(0) ? u32(STATUS_OK) : u32(STATUS_EXPERT_ID);
        detail[0] = bad;
        detail[1] = status == STATUS_EXPERT_ID
                        ? u64(index_at(p.topk, p.index_bytes, u32(bad / shape.top_k), u32(bad % shape.top_k)))
                        : 0;
    }
    __syncthreads();
    if (status == STATUS_OK) return status;
    const u8* host = reinterpret_cast<const u8*>(p.reject_text);
    for (u32 i = threadIdx.x; i < shape.ranks * TEXT_BYTES; i += THREADS) {
        const u32 at = i % TEXT_BYTES;
        const u8 value = status == STATUS_HOST ? host[at]
                         : at < 16             ? u8(detail[at / 8] >> (at % 8 * 8))
                                               : u8(0);
        group.text(i / TEXT_BYTES, p.group.rank)[at] = value;
    }
    fence_acq_rel_sys();
    __syncthreads();
    return status;
}

// Tells every rank, this one included, what this rank sends and where it wants its rows. One block.
__device__ inline void announce(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 status = announce_status(p, shape, group);
    u32* experts = reinterpret_cast<u32*>(p.expert_counts);
    const u32* given = p.route_source == ROUTES_MASK ? reinterpret_cast<const u32*>(p.routes[1]) : nullptr;
    const bool rejects = p.phases & PHASE_REJECT, cached = p.route_source == ROUTES_HANDLE && !rejects;
    // As many words as anybody reads, whatever ranks differ in.
    const u32 length = WORD_COUNTS + shape.ranks + max(shape.ranks, rejects || cached ? 0 : shape.local_experts);
    // What this launch counted is seen by whoever sees the announcement.
    fence_acq_rel_sys();
    for (u32 i = threadIdx.x; i < shape.ranks * length; i += THREADS) {
        const u32 to = i / length, w = i % length, last = w - WORD_COUNTS - shape.ranks;
        const u32 expert = to * shape.local_experts + last;
        const u32 value = w == WORD_TERMS       ? p.terms
                          : w == WORD_ROW_BYTES ? shape.row_bytes
                          : w == WORD_EXPERTS   ? p.experts
                          : w == WORD_SCALES    ? p.scale_words
                          : w == WORD_LANDING   ? p.landing
                          : w == WORD_CAPACITY  ? p.capacity
                          : w == WORD_TOKENS    ? p.tokens
                          : w == WORD_STATUS    ? status
                          : rejects             ? 0
                          : w < WORD_COUNTS + shape.ranks ? shared.sent[w - WORD_COUNTS]
                          : cached              ? shared.expected(p, last, shape.ranks)
                          : last >= shape.local_experts ? 0
                          : given               ? given[expert]
                                                : experts[expert];
        st_relaxed_sys(group.announcement(to, p.group.rank) + w, group.word(value));
    }
    __syncthreads();
    if (rejects) return;
    for (u32 e = threadIdx.x; e < p.experts; e += THREADS) experts[e] = 0;
    if (p.route_source == ROUTES_HANDLE) return;
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) {
        reinterpret_cast<u32*>(p.sent_rows)[r] = shared.sent[r];
        reinterpret_cast<u32*>(p.channel_starts)[r] = 0;
    }
}

// Counts and announces. False: a wait gave up. All blocks.
__device__ inline bool count(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    if (p.phases & PHASE_REJECT || p.route_source == ROUTES_HANDLE) {
        if (p.phases & PHASE_REJECT) {
            if (blockIdx.x == 0) announce(p, shape, shared, group);
            return true;
        }
        // Only ids need a look, and there are none.
        sum_ranges(p, shape, shared);
        if (blockIdx.x == 0) announce(p, shape, shared, group);
        return true;
    }
    count_range(p, shape, shared);
    bool last;
    if (!grid_barrier(group, last)) return false;
    sum_ranges(p, shape, shared);
    if (last) announce(p, shape, shared, group);
    return true;
}

// First rows, from the announcements. All threads.
__device__ inline void place_rows(const DispatchParams& p, const Shape& shape, const Shared& shared) {
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) {
        shared.first_at[r] = shared.all.rows_before(p.group.rank, r);
        shared.first_from[r] = shared.all.rows_before(r, p.group.rank);
        if (r == 0) shared.first_from[shape.ranks] = shared.all.rows_before(shape.ranks, p.group.rank);
    }
    __syncthreads();
}

// The slot of a token among all rows for a rank, from its slot in its block's range.
__device__ __forceinline__ i32 final_slot(const DispatchParams& p, const Shape& shape, const Shared& shared, u32 token,
                                          u32 rank) {
    if (p.route_source == ROUTES_HANDLE) {
        return reinterpret_cast<const i32*>(p.routes[0])[u64(token) * shape.ranks + rank];
    }
    const volatile i32* slots = reinterpret_cast<const volatile i32*>(p.block_slots);
    const i32 slot = slots[u64(token) * shape.ranks + rank];
    return slot < 0 ? -1 : slot + i32(shared.before[token / p.block_tokens * shape.ranks + rank]);
}

// Where the parts of one row go.
struct RowTarget {
    u64 topk, weights, scales, src_idx;
};

// Writes what travels with a row for `rank`. All lanes.
__device__ inline void write_metadata(const DispatchParams& p, const Shape& shape, u32 token, u32 rank,
                                      const RowTarget& to) {
    const u32 lane = threadIdx.x % 32;
    if (p.topk.data && lane < shape.top_k && p.route_source != ROUTES_HANDLE) {
        const i64 id = index_at(p.topk, p.index_bytes, token, lane);
        const i64 local = id - i64(rank) * shape.local_experts;
        const bool hosted = id >= 0 && local >= 0 && local < shape.local_experts;
        if (to.topk) {
            if (p.index_bytes == 8) {
                reinterpret_cast<i64*>(to.topk)[lane] = hosted ? local : -1;
            } else {
                reinterpret_cast<i32*>(to.topk)[lane] = hosted ? i32(local) : -1;
            }
        }
        if (to.weights && p.weights.data) {
            const u64 at = token * p.weights.row_stride + lane * p.weights.column_stride;
            reinterpret_cast<u32*>(to.weights)[lane] = hosted ? reinterpret_cast<const u32*>(p.weights.data)[at] : 0;
        }
    }
    if (to.scales) {
        const u32* scales = reinterpret_cast<const u32*>(p.scales.data) + token * p.scales.row_stride;
        for (u32 i = lane; i < p.scale_words; i += 32) {
            reinterpret_cast<u32*>(to.scales)[i] = scales[i * p.scales.column_stride];
        }
    }
    if (to.src_idx && lane == 0) *reinterpret_cast<u32*>(to.src_idx) = token;
}

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

// Writes a token's row to every rank it goes to; to this one only if rows are not copied out.
__device__ inline void send_token(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group,
                                  u32 token) {
    const u32 lane = threadIdx.x % 32;
    const u8* row = reinterpret_cast<const u8*>(p.x) + token * p.x_stride;
    for (u32 first = 0; first < shape.ranks; first += 32) {
        const u32 rank = first + lane;
        i32 slot = -1;
        u64 to = 0;
        u32 place = 0;
        if (rank < shape.ranks) {
            slot = final_slot(p, shape, shared, token, rank);
            if (p.slots) reinterpret_cast<i32*>(p.slots)[u64(token) * shape.ranks + rank] = slot;
            if (rank == p.group.rank && p.copy_rows) slot = -1;
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
            write_metadata(p, shape, token, first + target, target_in(p, shape, landing, at));
        }
    }
}

// Publishes the units of this block as they become complete: which rows of each rank they are. The
// last warp.
__device__ inline void publish(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 lane = threadIdx.x % 32;
    const u32 grain = flag_grain(p.tokens, p.group.flags);
    for (u32 unit = 0; unit < p.units; unit++) {
        const u32 index = blockIdx.x + unit * gridDim.x;
        const u64 begin = u64(index) * grain;
        if (begin >= p.tokens) break;
        const u32 tokens = min(grain, p.tokens - u32(begin));
        while (ld_acquire_shared(&shared.done[unit]) < tokens) __nanosleep(40);
        __syncwarp();
        for (u32 r = 0; r < shape.ranks; r++) {
            if (r == p.group.rank) continue;
            u32 first = ~0u, rows = 0;
            for (u32 at = 0; at < tokens; at += 32) {
                const bool here = at + lane < tokens;
                const i32 slot = here ? final_slot(p, shape, shared, u32(begin) + at + lane, r) : -1;
                const u32 ballot = __ballot_sync(~0u, slot >= 0);
                if (ballot && first == ~0u) first = __shfl_sync(~0u, slot, __ffs(ballot) - 1);
                rows += __popc(ballot);
            }
            if (first == ~0u) first = 0;
            if (lane == r % 32) {
                // Rows were written by other warps, whose counts were acquired above.
                fence_acq_rel_sys();
                u64* flag = group.flag(r, p.group.rank, index);
                st_relaxed_sys(flag, group.word(first));
                st_relaxed_sys(flag + 1, group.word(first + rows));
            }
        }
    }
}

// Sends this block's share: units of consecutive tokens, in turn with the other blocks.
__device__ inline void move(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 i = threadIdx.x; i < p.units; i += THREADS) shared.done[i] = 0;
    __syncthreads();
    if (warp == DATA_WARPS) {
        publish(p, shape, shared, group);
        return;
    }
    const u32 grain = flag_grain(p.tokens, p.group.flags);
    for (u64 i = warp;; i += DATA_WARPS) {
        const u64 unit = i / grain;
        const u64 begin = (blockIdx.x + unit * gridDim.x) * grain;
        if (begin >= p.tokens) break;
        const u64 token = begin + i % grain;
        if (token >= p.tokens) continue;
        send_token(p, shape, shared, group, u32(token));
        __syncwarp();
        if (lane == 0) red_release_shared(&shared.done[unit], 1);
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

// Puts one row's metadata where the caller wants it, from this rank's landing block.
__device__ inline void copy_metadata(const DispatchParams& p, const Shape& shape, const Landing& landing, u32 row) {
    const u32 lane = threadIdx.x % 32;
    const u64 index_bytes = u64(shape.top_k) * p.index_bytes;
    const auto copy = [&](u64 to, const u8* from, u64 bytes) {
        for (u64 i = lane; i < bytes / 4; i += 32) {
            reinterpret_cast<u32*>(to + row * bytes)[i] = reinterpret_cast<const volatile u32*>(from + row * bytes)[i];
        }
    };
    if (p.out_topk) copy(p.out_topk, landing.topk, index_bytes);
    if (p.out_weights) copy(p.out_weights, landing.weights, u64(shape.top_k) * 4);
    if (p.out_scales) copy(p.out_scales, landing.scales, u64(p.scale_words) * 4);
}

__device__ __forceinline__ u8* out_row(const DispatchParams& p, u32 row) {
    return reinterpret_cast<u8*>(p.out_x) + row * p.out_stride;
}

// Copies one of this rank's own tokens from the input to the output.
__device__ inline void keep_token(const DispatchParams& p, const Shape& shape, const Shared& shared, u32 token,
                                  u32 first_row) {
    const i32 slot = final_slot(p, shape, shared, token, p.group.rank);
    if (slot < 0) return;
    const u32 row = first_row + u32(slot);
    if (row >= p.out_rows) return;
    copy_row<false>(out_row(p, row), reinterpret_cast<const u8*>(p.x) + token * p.x_stride, shape.row_bytes);
    RowTarget to;
    to.topk = p.out_topk ? p.out_topk + u64(row) * shape.top_k * p.index_bytes : 0;
    to.weights = p.out_weights ? p.out_weights + u64(row) * shape.top_k * 4 : 0;
    to.scales = p.out_scales ? p.out_scales + u64(row) * p.scale_words * 4 : 0;
    to.src_idx = p.src_idx ? p.src_idx + u64(row) * 4 : 0;
    write_metadata(p, shape, token, p.group.rank, to);
}

// A warp's way through the units of all other ranks, ranks in turn.
struct Arrivals {
    const DispatchParams& p;
    const Shape& shape;
    const Shared& shared;
    u32 most;
    u64 at;
    u32 source, index;

    __device__ Arrivals(const DispatchParams& params, const Shape& s, const Shared& sh)
        : p(params), shape(s), shared(sh), most(0), at(blockIdx.x) {
        for (u32 r = 0; r < shape.ranks; r++) {
            if (r != p.group.rank) most = max(most, units_of(r));
        }
        settle();
    }

    __device__ u32 units_of(u32 rank) const {
        const u32 tokens = shared.all.word(rank, WORD_TOKENS), grain = flag_grain(tokens, p.group.flags);
        return (tokens + grain - 1) / grain;
    }

    __device__ bool more() const { return at < u64(most) * (shape.ranks - 1); }

    __device__ void next() {
        at += gridDim.x;
        settle();
    }

    // Moves on to a unit that exists.
    __device__ void settle() {
        for (; more(); at += gridDim.x) {
            index = u32(at / (shape.ranks - 1));
            source = (p.group.rank + 1 + u32(at % (shape.ranks - 1))) % shape.ranks;
            if (index < units_of(source)) return;
        }
    }
};

// Rows `first..end` of `source` have landed: puts them where they are wanted.
__device__ inline void take_rows(const DispatchParams& p, const Shape& shape, const Landing& landing, u32 before,
                                 u32 first, u32 end) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 i = first + warp; i < end; i += WARPS) {
        const u32 row = before + i;
        if (row >= p.out_rows) return;
        if (p.copy_rows) {
            copy_row<true>(out_row(p, row), landing.rows + u64(row) * shape.row_bytes, shape.row_bytes);
            copy_metadata(p, shape, landing, row);
        }
        if (p.src_idx && lane == 0) {
            reinterpret_cast<u32*>(p.src_idx)[row] = reinterpret_cast<const volatile u32*>(landing.src_idx)[row];
        }
    }
}

// Waits for everything that comes to this rank, and puts it and its own rows where they are wanted.
__device__ inline void receive(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 rank = p.group.rank;
    const u64 warps = u64(gridDim.x) * WARPS;
    const Landing landing = landing_of(p, shape, shared, group, rank);
    const u32 own_before = shared.first_from[rank];
    Arrivals arrivals(p, shape, shared);
    u64 own = p.copy_rows && !p.discard ? u64(blockIdx.x) * WARPS + warp : p.tokens;
    u32 polls = 0;
    while (arrivals.more() || own < p.tokens) {
        u32 first = 0, end = 0;
        bool landed = false;
        if (arrivals.more()) {
            if (lane == 0) landed = group.test_flag(group.flag(rank, arrivals.source, arrivals.index), first, end);
            landed = __shfl_sync(~0u, landed, 0);
        }
        if (landed) {
            first = __shfl_sync(~0u, first, 0), end = __shfl_sync(~0u, end, 0);
            if (!p.discard) {
                take_rows(p, shape, landing, shared.first_from[arrivals.source], first, end);
            }
            arrivals.next();
            polls = 0;
        } else if (own < p.tokens) {
            keep_token(p, shape, shared, u32(own), own_before);
            own += warps;
        } else {
            bool stay = true;
            if (lane == 0) stay = group.patient(polls, STAGE_ROWS, arrivals.source);
            if (!__shfl_sync(~0u, stay, 0)) return;
        }
    }
    if (p.discard) return;
    const u64 thread = u64(blockIdx.x) * THREADS + threadIdx.x, threads = u64(gridDim.x) * THREADS;
    if (!p.copy_rows && p.src_idx) {
        for (u64 token = thread; token < p.tokens; token += threads) {
            const i32 slot = final_slot(p, shape, shared, u32(token), rank);
            if (slot >= 0) reinterpret_cast<u32*>(p.src_idx)[own_before + u32(slot)] = u32(token);
        }
    }
    if (!p.worst) return;
    // What lies behind the rows says so.
    for (u64 row = shared.first_from[shape.ranks] + thread; row < p.out_rows; row += threads) {
        if (p.src_idx) reinterpret_cast<i32*>(p.src_idx)[row] = -1;
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(16) u8 memory[];
    const Shape shape(p);
    Shared shared(memory, p, shape);
    const Group group(p.group);
    bool here = true;
    if (p.phases & (PHASE_COUNT | PHASE_REJECT)) {
        here = count(p, shape, shared, group);
    }
    if (here && (p.phases & (PHASE_MOVE | PHASE_RECEIVE) || p.phases == PHASE_REJECT)) {
        here = gather(group, shared.all);
        // The announcement of this rank says that what it counted is there.
        if (here && !(p.phases & (PHASE_COUNT | PHASE_REJECT))) sum_ranges(p, shape, shared);
        if (here) place_rows(p, shape, shared);
        const Counts counts = p.route_source == ROUTES_HANDLE ? COUNTS_CACHED : COUNTS_DISPATCH;
        if (here) judge(group, shared.all, counts, p.worst);
        if (here && p.phases & PHASE_MOVE && blockIdx.x == 0) {
            tell_counts(p, shape, shared, group);
            write_prefix(p, shape, shared);
        }
        if (here && shared.all.verdict == VERDICT_OK) {
            if (p.phases & PHASE_MOVE) move(p, shape, shared, group);
            if (p.phases & PHASE_RECEIVE) receive(p, shape, shared, group);
        }
    }
    leave(group);
}

// Counts and routes of a batch, on their own.
extern "C" __global__ void __launch_bounds__(256) dispatch_layout(const LayoutParams p) {
    const u32 local = p.experts / p.ranks;
    for (u64 token = u64(blockIdx.x) * blockDim.x + threadIdx.x; token < p.tokens; token += u64(gridDim.x) * blockDim.x) {
        u64 ranks = 0;
        for (u32 k = 0; k < p.top_k; k++) {
            const i64 id = index_at(p.topk, p.index_bytes, u32(token), k);
            if (id < 0 || id >= p.experts) continue;
            ranks |= u64(1) << (u32(id) / local);
            atomicAdd(reinterpret_cast<u32*>(p.expert_counts) + id, 1);
        }
        for (u32 r = 0; r < p.ranks; r++) {
            const bool goes = ranks >> r & 1;
            reinterpret_cast<u8*>(p.is_token_in_rank)[token * p.ranks + r] = goes;
            if (goes) atomicAdd(reinterpret_cast<u32*>(p.rank_counts) + r, 1);
        }
    }
}
