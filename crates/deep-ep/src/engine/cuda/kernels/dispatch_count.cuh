// The first part of a dispatch: counting, slots, and the announcement.
#pragma once

#include "dispatch_shared.cuh"

// The ranks that a token goes to, as bits.
#if RANKS > 0 && RANKS <= 32
using RankBits = u32;
#else
using RankBits = u64;
#endif

// `bad` is set if an id is out of range.
__device__ inline RankBits ranks_of(const DispatchParams& p, const Shape& shape, u64 token, bool& bad) {
    RankBits ranks = 0;
    if (p.route_source == ROUTES_MASK) {
        const u8* mask = reinterpret_cast<const u8*>(p.routes[0]) + token * shape.ranks;
        for (u32 r = 0; r < shape.ranks; r++) ranks |= RankBits(mask[r] != 0) << r;
        return ranks;
    }
    const Divisor local(shape.local_experts, p.experts);
#pragma unroll 8
    for (u32 k = 0; k < shape.top_k; k++) {
        const i64 id = index_at(p.topk, p.index_bytes, u32(token), k);
        bad |= id >= i64(p.experts);
        if (id >= 0 && id < i64(p.experts)) ranks |= RankBits(1) << local.divide(u32(id));
    }
    return ranks;
}

// A number for each rank: lane l has those of ranks l and l + 32.
struct PerRank {
    u32 low, high;

    __device__ __forceinline__ u32 of(u32 rank) const { return __shfl_sync(~0u, (RANKS && RANKS <= 32) || rank < 32 ? low : high, rank % 32); }

    __device__ __forceinline__ void add(u32 rank, u32 rows) {
        if (threadIdx.x % 32 != rank % 32) return;
        if ((RANKS && RANKS <= 32) || rank < 32) {
            low += rows;
        } else {
            high += rows;
        }
    }
};

// Goes through the tokens of a chunk, before `end`, 32 at a time, with the rows before the chunk in
// `rows`: `put(token, rank, slot)` for every token and rank, -1 where the token does not go to the
// rank. Adds the chunk's rows. True: an id is out of range. One warp.
template <class Put>
__device__ __forceinline__ bool walk_chunk(const DispatchParams& p, const Shape& shape, u32 chunk, u64 end,
                                           PerRank& rows, const Put& put) {
    const u32 lane = threadIdx.x % 32, before = (1u << lane) - 1;
    bool bad = false;
#pragma unroll 1
    for (u64 first = u64(chunk) * chunk_tokens(p); first < end; first += 32) {
        const u64 token = first + lane;
        const RankBits ranks = token < end ? ranks_of(p, shape, token, bad) : 0;
#pragma unroll 1
        for (u32 r = 0; r < shape.ranks; r++) {
            const bool goes = ranks >> r & 1;
            const u32 ballot = __ballot_sync(~0u, goes), base = rows.of(r);
            if (token < end) put(token, r, goes ? i32(base + __popc(ballot & before)) : -1);
            rows.add(r, __popc(ballot));
        }
    }
    return __any_sync(~0u, bad);
}

__device__ __forceinline__ u64 chunk_end(const DispatchParams& p, u32 chunk) {
    return min(u64(chunk + 1) * chunk_tokens(p), u64(p.tokens));
}

// The slots before a chunk.
__device__ __forceinline__ PerRank rows_before(const Shape& shape, const Shared& shared, u32 chunk) {
    const u32 lane = threadIdx.x % 32;
    const u32* first = shared.chunk_first + chunk * shape.ranks;
    return {lane < shape.ranks ? first[lane] : 0, lane + 32 < shape.ranks ? first[lane + 32] : 0};
}

// `look(chunk)` for the chunks of this block: each warp has others.
template <class Look>
__device__ __forceinline__ void for_own_chunks(const DispatchParams& p, const Look& look) {
    const u32 chunks = chunks_of(p);
    for (u32 c = threadIdx.x / 32 * gridDim.x + blockIdx.x; c < chunks; c += WARPS * gridDim.x) look(c);
}

// In a chunk's words: an id is out of range.
constexpr u32 CHUNK_BAD = 1u << 31;

// Counts the rows of this block's chunks and tells the other blocks. All threads.
__device__ inline void count_chunks(const DispatchParams& p, const Shape& shape, const Group& group, u64* words) {
    const u32 lane = threadIdx.x % 32;
    for_own_chunks(p, [&](u32 chunk) {
        PerRank rows{0, 0};
        const bool bad = walk_chunk(p, shape, chunk, chunk_end(p, chunk), rows, [](u64, u32, i32) {});
        const u32 flag = bad ? CHUNK_BAD : 0;
        u64* of = words + u64(chunk) * shape.ranks;
        if (lane < shape.ranks) st_relaxed_sys(of + lane, group.word(rows.low | flag));
        if (lane + 32 < shape.ranks) st_relaxed_sys(of + lane + 32, group.word(rows.high | flag));
    });
}

// Waits for what all blocks have counted. Notes the first chunk with an id out of range. False: a wait
// gave up. All threads.
__device__ inline bool collect_chunks(const DispatchParams& p, const Shape& shape, const Shared& shared,
                                      const Group& group, const u64* words, u32* bad_chunk) {
    constexpr u32 AHEAD = 4;
    const u32 count = chunks_of(p) * shape.ranks;
    bool here = true;
#pragma unroll 1
    for (u32 first = threadIdx.x; first < count; first += AHEAD * THREADS) {
        u64 word[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            if (first + i * THREADS < count) word[i] = ld_relaxed_sys(words + first + i * THREADS);
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            const u32 at = first + i * THREADS;
            if (at >= count) continue;
            u32 polls = 0;
            while (here && u32(word[i] >> 32) != group.tag()) {
                here = group.patient(polls, STAGE_BLOCKS, p.group.rank);
                word[i] = ld_relaxed_sys(words + at);
            }
            if (u32(word[i]) & CHUNK_BAD) atomicMin(bad_chunk, at / shape.ranks);
            shared.chunk_first[at] = u32(word[i]) & ~CHUNK_BAD;
        }
    }
    return __syncthreads_and(here);
}

// Makes the rows of chunks the slots before them, and all of them `sent`. All threads.
__device__ inline void place_chunks(const DispatchParams& p, const Shape& shape, const Shared& shared) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = chunks_of(p);
    for (u32 r = warp; r < shape.ranks; r += WARPS) {
        u32 total = 0;
        for (u32 first = 0; first < chunks; first += 32) {
            const u32 at = (first + lane) * shape.ranks + r;
            const u32 rows = first + lane < chunks ? shared.chunk_first[at] : 0;
            u32 sum = rows;
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 lower = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += lower;
            }
            if (first + lane < chunks) shared.chunk_first[at] = total + sum - rows;
            total += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) shared.sent[r] = total;
    }
    __syncthreads();
}

// What a handle is told of this block's chunks, when nothing is urgent. All threads.
__device__ inline void write_slots(const DispatchParams& p, const Shape& shape, const Shared& shared) {
    if (p.route_source == ROUTES_HANDLE) return;
    for_own_chunks(p, [&](u32 chunk) {
        PerRank rows = rows_before(shape, shared, chunk);
        walk_chunk(p, shape, chunk, chunk_end(p, chunk), rows, [&](u64 token, u32 rank, i32 slot) {
            reinterpret_cast<i32*>(p.slots)[token * shape.ranks + rank] = slot;
            reinterpret_cast<u8*>(p.is_token_in_rank)[token * shape.ranks + rank] = slot >= 0;
        });
    });
}

// The slots of a handle: `[tokens][ranks]`.
__device__ __forceinline__ const volatile i32* handle_slots(const DispatchParams& p) {
    return reinterpret_cast<const volatile i32*>(p.routes[0]);
}

// Takes counts from a handle. All threads.
__device__ inline void read_handle(const DispatchParams& p, const Shape& shape, const Shared& shared) {
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) {
        shared.sent[r] = reinterpret_cast<const u32*>(p.routes[1])[r];
    }
    __syncthreads();
}

// Finds the lowest place of an id out of range in a chunk. All threads of a block.
__device__ inline void find_bad_id(const DispatchParams& p, const Shape& shape, u32 chunk, u64* bad) {
    const u64 end = chunk_end(p, chunk) * shape.top_k;
    for (u64 i = u64(chunk) * chunk_tokens(p) * shape.top_k + threadIdx.x; i < end; i += THREADS) {
        const i64 id = index_at(p.topk, p.index_bytes, u32(i / shape.top_k), u32(i % shape.top_k));
        if (id >= i64(p.experts)) atomicMin(bad, i);
    }
    __syncthreads();
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

// Counts, and announces if this launch does. False: a wait gave up. All blocks.
__device__ inline bool count(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    __shared__ u64 bad;
    __shared__ u32 bad_chunk;
    const bool first = blockIdx.x == 0, last = blockIdx.x == gridDim.x - 1;
    if (threadIdx.x == 0) bad = ~u64(0), bad_chunk = ~0u;
    u64* words = p.group.state->chunk_words;
    __syncthreads();
    if (p.phases & PHASE_REJECT) {
        if (first) announce(p, shape, shared, group, bad);
        return true;
    }
    if (p.route_source == ROUTES_HANDLE) {
        read_handle(p, shape, shared);
    } else {
        count_chunks(p, shape, group, words);
        if (!collect_chunks(p, shape, shared, group, words, &bad_chunk)) return false;
        place_chunks(p, shape, shared);
    }
    if (!(p.phases & PHASE_COUNT)) return true;
    if (first) {
        if (bad_chunk != ~0u) find_bad_id(p, shape, bad_chunk, &bad);
        if (p.route_source == ROUTES_MASK && p.topk.data) check_ids(p, shape, &bad);
        announce(p, shape, shared, group, bad);
    }
    if (last && !p.worst && p.route_source != ROUTES_HANDLE) announce_experts(p, shape, shared, group);
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
