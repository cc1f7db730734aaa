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
    __device__ __forceinline__ bool find(u32 token, u32& i) const {
        const u32 unit = token / grain;
        i = unit / blocks * grain + token % grain;
        return unit % blocks == block;
    }
};

__device__ __forceinline__ i64 index_at(const Matrix& topk, u32 bytes, u32 row, u32 column) {
    const u64 at = row * topk.row_stride + column * topk.column_stride;
    return bytes == 8 ? reinterpret_cast<const i64*>(topk.data)[at] : i64(reinterpret_cast<const i32*>(topk.data)[at]);
}

// The ranks that a token goes to, as bits.
#if RANKS > 0 && RANKS <= 32
using RankBits = u32;
#else
using RankBits = u64;
#endif

__device__ inline RankBits ranks_of(const DispatchParams& p, const Shape& shape, u32 token, u64* bad) {
    RankBits ranks = 0;
    if (p.route_source == ROUTES_MASK) {
        const u8* mask = reinterpret_cast<const u8*>(p.routes[0]) + u64(token) * shape.ranks;
        for (u32 r = 0; r < shape.ranks; r++) ranks |= RankBits(mask[r] != 0) << r;
        return ranks;
    }
#pragma unroll 8
    for (u32 k = 0; k < shape.top_k; k++) {
        const i64 id = index_at(p.topk, p.index_bytes, token, k);
        if (id >= i64(p.experts)) atomicMin(bad, u64(token) * shape.top_k + k);
        if (id >= 0 && id < i64(p.experts)) ranks |= RankBits(1) << (u32(id) / shape.local_experts);
    }
    return ranks;
}

// Tokens that a thread looks at before anybody waits.
constexpr u32 CHUNKS = 4;

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
    i32* slots = reinterpret_cast<i32*>(p.slots);
    u8* mask = reinterpret_cast<u8*>(p.is_token_in_rank);
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) shared.sent[r] = 0;
    __syncthreads();
    for (u32 first = 0; first < p.tokens; first += CHUNKS * THREADS) {
        RankBits ranks[CHUNKS];
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            const u32 token = first + c * THREADS + threadIdx.x;
            ranks[c] = token < p.tokens ? ranks_of(p, shape, token, bad) : 0;
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
            const bool mine = token < p.tokens && share.find(token, i);
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

// Where the parts of one row go.
struct RowTarget {
    u64 topk, weights, scales, src_idx;
};

// What travels with a token's row, as one lane holds it. Loaded before the row, so that both are on
// their way at once.
struct Travels {
    i64 id;
    u32 weight;
    u32 scales[2];

    __device__ __forceinline__ void load(const DispatchParams& p, const Shape& shape, u64 token) {
        const u32 lane = threadIdx.x % 32;
        id = -1, weight = 0, scales[0] = scales[1] = 0;
        if (p.topk.data && lane < shape.top_k && p.route_source != ROUTES_HANDLE) {
            id = index_at(p.topk, p.index_bytes, u32(token), lane);
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
        const i64 local = id - i64(rank) * shape.local_experts;
        const bool hosted = id >= 0 && local >= 0 && local < shape.local_experts;
        if (lane < shape.top_k && to.topk) {
            if (p.index_bytes == 8) {
                reinterpret_cast<i64*>(to.topk)[lane] = hosted ? local : -1;
            } else {
                reinterpret_cast<i32*>(to.topk)[lane] = hosted ? i32(local) : -1;
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

// Copies one of this rank's own tokens, the block's `i`-th, from the input to the output.
__device__ inline void keep_token(const DispatchParams& p, const Shape& shape, const Shared& shared, u32 i, u64 token) {
    const i32 slot = slot_of(p, shape, shared, i, token, p.group.rank);
    if (slot < 0) return;
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

// A warp's way through the units of all other ranks, ranks in turn.
struct Arrivals {
    const DispatchParams& p;
    const Shape& shape;
    const Shared& shared;
    u32 most;
    u64 at, step;
    u32 source, index;

    __device__ Arrivals(const DispatchParams& params, const Shape& s, const Shared& sh, u64 first, u64 stride)
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

    __device__ bool more() const { return at < u64(most) * (shape.ranks - 1); }

    __device__ void next() {
        at += step;
        settle();
    }

    // Moves on to a unit that exists.
    __device__ void settle() {
        for (; more(); at += step) {
            index = u32(at / (shape.ranks - 1));
            source = (p.group.rank + 1 + u32(at % (shape.ranks - 1))) % shape.ranks;
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

// Waits for everything that comes to this rank, and puts it and its own rows where they are wanted.
__device__ inline void receive(const DispatchParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 rank = p.group.rank;
    const Share share(p);
    const Landing landing = landing_of(p, shape, shared, group, rank);
    // The warps of a block copy a unit together; without copies each takes units of its own.
    const bool copies = p.copy_rows && !p.discard;
    const u64 warps = u64(gridDim.x) * WARPS;
    Arrivals arrivals(p, shape, shared, copies ? blockIdx.x : u64(warp) * gridDim.x + blockIdx.x,
                      copies ? gridDim.x : warps);
    // The warp's next token of the block's share.
    u64 own = warp;
    const auto more_own = [&] { return copies && share.token(own - own % share.grain) < p.tokens; };
    u32 polls = 0;
    while (arrivals.more() || more_own()) {
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
        } else if (more_own()) {
            const u64 token = share.token(own);
            if (token < p.tokens) keep_token(p, shape, shared, u32(own), token);
            own += WARPS;
        } else {
            bool stay = true;
            if (lane == 0) stay = group.patient(polls, STAGE_ROWS, arrivals.source);
            if (!__shfl_sync(~0u, stay, 0)) return;
        }
    }
    if (p.discard) return;
    if (!p.copy_rows && p.src_idx) {
        for (u64 i = threadIdx.x; share.token(i - i % share.grain) < p.tokens; i += THREADS) {
            const u64 token = share.token(i);
            if (token >= p.tokens) continue;
            const i32 slot = slot_of(p, shape, shared, u32(i), token, rank);
            if (slot >= 0) reinterpret_cast<u32*>(p.src_idx)[shared.first_from[rank] + u32(slot)] = u32(token);
        }
    }
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(16) u8 memory[];
    const Shape shape(p);
    Shared shared(memory, p, shape);
    const Group group(p.group);
    // Slots are found by every launch that needs them.
    if (p.phases != PHASE_RECEIVE || !p.discard) count(p, shape, shared, group);
    if (p.phases & (PHASE_MOVE | PHASE_RECEIVE) || p.phases == PHASE_REJECT) {
        if (gather(group, shared.all)) {
            place_rows(p, shape, shared);
            const Counts counts = p.route_source == ROUTES_HANDLE ? COUNTS_CACHED : COUNTS_DISPATCH;
            judge(group, shared.all, counts, p.worst);
            if (p.phases & PHASE_MOVE && blockIdx.x == 0) {
                write_prefix(p, shape, shared);
                tell_counts(p, shape, shared, group);
            }
            if (shared.all.verdict == VERDICT_OK) {
                if (p.phases & PHASE_MOVE) move(p, shape, shared, group);
                if (p.phases & PHASE_RECEIVE) receive(p, shape, shared, group);
            }
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
