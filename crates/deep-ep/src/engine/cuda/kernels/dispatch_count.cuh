// The first part of a dispatch: counting, slots, and the announcement.
#pragma once

#include "dispatch_shared.cuh"

// The ranks that a token goes to, as bits.
#if RANKS > 0 && RANKS <= 32
using RankBits = u32;
#else
using RankBits = u64;
#endif

// Choices that a thread loads at once, and what stands for no rank.
constexpr u32 CHOICES_AHEAD = 16;
constexpr u8 NOBODY = 0xff;

// The rank of each choice of `tokens` tokens from `first` on, in shared memory: neighbouring threads
// read neighbouring choices. All threads.
__device__ inline void find_ranks(const DispatchParams& p, const Shape& shape, const Shared& shared, u32 first,
                                  u32 tokens, u64* bad) {
    const u32 choices = tokens * shape.top_k;
    const u64 before = u64(first) * shape.top_k;
    const bool dense = p.topk.column_stride == 1 && p.topk.row_stride == shape.top_k;
    const Divisor local(shape.local_experts, p.experts);
    u8* ranks = shared.choice_ranks(p, shape);
    u32 lowest_bad = ~0u;
#pragma unroll 1
    for (u32 start = threadIdx.x; start < choices; start += CHOICES_AHEAD * THREADS) {
        i64 id[CHOICES_AHEAD];
#pragma unroll
        for (u32 c = 0; c < CHOICES_AHEAD; c++) {
            const u32 i = start + c * THREADS;
            if (i >= choices) continue;
            id[c] = dense ? flat_index_at(p.topk, p.index_bytes, before + i)
                          : index_at(p.topk, p.index_bytes, first + i / shape.top_k, i % shape.top_k);
        }
#pragma unroll
        for (u32 c = 0; c < CHOICES_AHEAD; c++) {
            const u32 i = start + c * THREADS;
            if (i >= choices) continue;
            if (id[c] >= i64(p.experts)) lowest_bad = min(lowest_bad, i);
            const bool some = id[c] >= 0 && id[c] < i64(p.experts);
            ranks[i] = some ? u8(local.divide(u32(id[c]))) : NOBODY;
        }
    }
    if (lowest_bad != ~0u) atomicMin(bad, before + lowest_bad);
}

// The ranks that the `i`-th of these tokens goes to.
__device__ __forceinline__ RankBits ranks_of(const DispatchParams& p, const Shape& shape, const Shared& shared,
                                             u32 token, u32 i) {
    RankBits ranks = 0;
    if (p.route_source == ROUTES_MASK) {
        const u8* mask = reinterpret_cast<const u8*>(p.routes[0]) + u64(token) * shape.ranks;
        for (u32 r = 0; r < shape.ranks; r++) ranks |= RankBits(mask[r] != 0) << r;
        return ranks;
    }
    const u8* choices = shared.choice_ranks(p, shape) + i * shape.top_k;
#pragma unroll 8
    for (u32 k = 0; k < shape.top_k; k++) {
        const u8 rank = choices[k];
        if (rank != NOBODY) ranks |= RankBits(1) << rank;
    }
    return ranks;
}

// Finds the rows before each warp's chunk for each rank, and adds all to `sent`. All threads.
__device__ inline void scan_chunks(const Shape& shape, const Shared& shared) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr u32 PER_LANE = CHUNKS * WARPS / 32;
    for (u32 r = warp; r < shape.ranks; r += WARPS) {
        u32 rows[PER_LANE], sum = 0;
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++) {
            rows[i] = shared.warp_rows[(lane * PER_LANE + i) * shape.ranks + r];
            sum += rows[i];
        }
        u32 before = sum;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 lower = __shfl_up_sync(~0u, before, step);
            if (lane >= step) before += lower;
        }
        const u32 total = __shfl_sync(~0u, before, 31), base = shared.sent[r];
        before += base - sum;
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++) {
            shared.warp_rows[(lane * PER_LANE + i) * shape.ranks + r] = before;
            before += rows[i];
        }
        __syncwarp();
        if (lane == 0) shared.sent[r] = base + total;
    }
}

// Counts this rank's rows for every rank, and finds the slots of this block's tokens: every block
// looks at all tokens, which is faster than asking the others. `bad` gets the lowest place of an id
// out of range. All threads.
__device__ inline void count_tokens(const DispatchParams& p, const Shape& shape, const Shared& shared, u64* bad) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Share share(p);
    const Divisor grain(share.grain, p.tokens), blocks(share.blocks, p.tokens);
    i32* slots = reinterpret_cast<i32*>(p.slots);
    u8* mask = reinterpret_cast<u8*>(p.is_token_in_rank);
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) shared.sent[r] = 0;
    __syncthreads();
#pragma unroll 1
    for (u32 first = 0; first < p.tokens; first += CHUNKS * THREADS) {
        if (p.route_source == ROUTES_TOPK) {
            find_ranks(p, shape, shared, first, min(p.tokens - first, CHUNKS * THREADS), bad);
            __syncthreads();
        }
        RankBits ranks[CHUNKS];
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            const u32 i = c * THREADS + threadIdx.x, token = first + i;
            ranks[c] = token < p.tokens ? ranks_of(p, shape, shared, token, i) : 0;
        }
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
#pragma unroll 1
            for (u32 r = 0; r < shape.ranks; r++) {
                const u32 ballot = __ballot_sync(~0u, ranks[c] >> r & 1);
                if (lane == 0) shared.warp_rows[(c * WARPS + warp) * shape.ranks + r] = __popc(ballot);
            }
        }
        __syncthreads();
        scan_chunks(shape, shared);
        __syncthreads();
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            const u32 token = first + c * THREADS + threadIdx.x;
            u32 i = 0;
            const bool mine = token < p.tokens && share.find(token, grain, blocks, i);
#pragma unroll 1
            for (u32 r = 0; r < shape.ranks; r++) {
                const bool goes = ranks[c] >> r & 1;
                const u32 ballot = __ballot_sync(~0u, goes);
                if (!mine) continue;
                const u32 before = shared.warp_rows[(c * WARPS + warp) * shape.ranks + r];
                const i32 slot = goes ? i32(before + __popc(ballot & ((1u << lane) - 1))) : -1;
                if (p.slot_tokens) shared.slots[i * shape.ranks + r] = slot;
                slots[u64(token) * shape.ranks + r] = slot;
                mask[u64(token) * shape.ranks + r] = goes;
            }
        }
        __syncthreads();
    }
}

// Takes counts and slots from a handle. All threads.
__device__ inline void read_handle(const DispatchParams& p, const Shape& shape, const Shared& shared) {
    const Share share(p);
    const i32* slots = reinterpret_cast<const i32*>(p.routes[0]);
    for (u32 i = threadIdx.x; i < p.slot_tokens * shape.ranks; i += THREADS) {
        const u64 token = share.token(i / shape.ranks);
        if (token < p.tokens) shared.slots[i] = slots[token * shape.ranks + i % shape.ranks];
    }
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) {
        shared.sent[r] = reinterpret_cast<const u32*>(p.routes[1])[r];
    }
    __syncthreads();
}

// The slot of the block's `i`-th token, which is `token`, among the rows for `rank`.
__device__ __forceinline__ i32 slot_of(const DispatchParams& p, const Shape& shape, const Shared& shared, u32 i,
                                       u64 token, u32 rank) {
    if (p.slot_tokens) return shared.slots[i * shape.ranks + rank];
    const u64 slots = p.route_source == ROUTES_HANDLE ? p.routes[0] : p.slots;
    return reinterpret_cast<const volatile i32*>(slots)[token * shape.ranks + rank];
}

// Ids that travel along other routes are checked, too. All threads.
__device__ inline void check_ids(const DispatchParams& p, const Shape& shape, u64* bad) {
    for (u64 i = threadIdx.x; i < u64(p.tokens) * shape.top_k; i += THREADS) {
        const u32 token = u32(i / shape.top_k), k = u32(i % shape.top_k);
        if (index_at(p.topk, p.index_bytes, token, k) >= i64(p.experts)) atomicMin(bad, i);
    }
    __syncthreads();
}

// Writes the text that a reject comes with into every rank's region: numbers for a bad id, the
// host's text otherwise. All threads of one block.
__device__ inline u32 announce_status(const DispatchParams& p, const Shape& shape, const Group& group, u64 bad) {
    const u32 status = p.phases & PHASE_REJECT ? u32(STATUS_HOST) : bad == ~u64(0) ? u32(STATUS_OK) : u32(STATUS_EXPERT_ID);
    if (status == STATUS_OK) return status;
    u64 id = 0;
    if (status == STATUS_EXPERT_ID) {
        id = u64(index_at(p.topk, p.index_bytes, u32(bad / shape.top_k), u32(bad % shape.top_k)));
    }
    const u8* host = reinterpret_cast<const u8*>(p.reject_text);
    const u64 place = id_place(bad, shape.top_k);
    for (u32 i = threadIdx.x; i < shape.ranks * TEXT_BYTES; i += THREADS) {
        const u32 at = i % TEXT_BYTES;
        const u8 value = status == STATUS_HOST ? host[at]
                         : at < 8              ? u8(place >> (at * 8))
                         : at < 16             ? u8(id >> (at % 8 * 8))
                                               : u8(0);
        group.text(i / TEXT_BYTES, p.group.rank)[at] = value;
    }
    __syncthreads();
    // The text of all threads is there before what each of them announces.
    fence_acq_rel_sys();
    return status;
}

// Tells every rank, this one included, what this rank sends and where it wants its rows. One block.
__device__ inline void announce(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group,
                                u64 bad) {
    const u32 status = announce_status(p, shape, group, bad);
    const bool rejects = p.phases & PHASE_REJECT, cached = p.route_source == ROUTES_HANDLE;
    // As many words as anybody waits for, whatever ranks differ in.
    const u32 length = WORD_COUNTS + 2 * shape.ranks;
    for (u32 i = threadIdx.x; i < shape.ranks * length; i += THREADS) {
        const u32 to = i / length, w = i % length, r = w - WORD_COUNTS;
        // Where others have expected rows, counts of experts follow.
        if (!cached && !rejects && !p.worst && w >= WORD_COUNTS + shape.ranks && r - shape.ranks < shape.local_experts) {
            continue;
        }
        const u32 value = w == WORD_TERMS       ? p.terms
                          : w == WORD_ROW_BYTES ? shape.row_bytes
                          : w == WORD_EXPERTS   ? p.experts
                          : w == WORD_SCALES    ? p.scale_words
                          : w == WORD_LANDING   ? p.landing
                          : w == WORD_CAPACITY  ? p.capacity
                          : w == WORD_TOKENS    ? p.tokens
                          : w == WORD_STATUS    ? status
                          : w == WORD_GRAIN     ? p.grain
                          : rejects             ? 0
                          : r < shape.ranks     ? shared.sent[r]
                          : cached              ? shared.expected(p, r - shape.ranks, shape.ranks)
                                                : 0;
        st_relaxed_sys(group.announcement(to, p.group.rank) + w, group.word(value));
    }
    if (rejects || cached) return;
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) {
        reinterpret_cast<u32*>(p.sent_rows)[r] = shared.sent[r];
        reinterpret_cast<u32*>(p.channel_starts)[r] = 0;
    }
}

// Counts the choices of every expert and tells them to the expert's rank, for hosts that wait. One
// block, when nothing else is urgent.
__device__ inline void announce_experts(const DispatchParams& p, const Shape& shape, const Shared& shared,
                                        const Group& group) {
    const u32* given = reinterpret_cast<const u32*>(p.routes[1]);
    const bool counts = p.route_source == ROUTES_TOPK;
    __syncthreads();
    if (counts) {
        for (u32 e = threadIdx.x; e < p.experts; e += THREADS) shared.experts[e] = 0;
        __syncthreads();
        for (u64 i = threadIdx.x; i < u64(p.tokens) * shape.top_k; i += THREADS) {
            const i64 id = index_at(p.topk, p.index_bytes, u32(i / shape.top_k), u32(i % shape.top_k));
            if (id >= 0 && id < i64(p.experts)) atomicAdd(&shared.experts[id], 1);
        }
        __syncthreads();
    }
    for (u32 e = threadIdx.x; e < p.experts; e += THREADS) {
        u64* words = group.announcement(e / shape.local_experts, p.group.rank);
        const u32 count = counts ? shared.experts[e] : given[e];
        st_relaxed_sys(words + WORD_COUNTS + shape.ranks + e % shape.local_experts, group.word(count));
    }
    __syncthreads();
}

// Counts, and announces if this launch does. All blocks.
__device__ inline void count(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    __shared__ u64 bad;
    const bool first = blockIdx.x == 0, last = blockIdx.x == gridDim.x - 1;
    if (threadIdx.x == 0) bad = ~u64(0);
    __syncthreads();
    if (p.phases & PHASE_REJECT) {
        if (first) announce(p, shape, shared, group, bad);
        return;
    }
    if (p.route_source == ROUTES_HANDLE) {
        read_handle(p, shape, shared);
    } else {
        count_tokens(p, shape, shared, &bad);
    }
    if (!(p.phases & PHASE_COUNT)) return;
    if (first) {
        if (p.route_source == ROUTES_MASK && p.topk.data) check_ids(p, shape, &bad);
        announce(p, shape, shared, group, bad);
    }
    if (last && !p.worst && p.route_source != ROUTES_HANDLE) announce_experts(p, shape, shared, group);
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
