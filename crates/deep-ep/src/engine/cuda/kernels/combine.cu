// High-throughput combine. The protocol is described in engine/mod.rs.
//
// Constants: DTYPE, the element type; RANKS and ROW_BYTES, each 0 if known only at run time.

#include "announce.cuh"
#include "combine_params.cuh"
#include "rows.cuh"
#include "sum.cuh"

constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / 32;
// The last warp publishes what the others have sent.
constexpr u32 DATA_WARPS = WARPS - 1;
// Ranks that a lane looks after.
constexpr u32 PER_LANE = RANKS == 0 || RANKS > 32 ? 2 : 1;
// 16-byte words of a row that a lane sums at a time.
constexpr int SUM_UNROLL = DTYPE == DTYPE_F32 ? 2 : 4;

struct Shape {
    u32 ranks, row_bytes;

    __device__ explicit Shape(const CombineParams& p)
        : ranks(RANKS ? RANKS : p.group.ranks), row_bytes(ROW_BYTES ? ROW_BYTES : p.row_bytes) {}
};

// Dynamic shared memory. `shared_bytes` in engine/combine.rs sizes it.
struct Shared {
    Announced all;
    // `[ranks]` rows sent to each rank and its first row in this rank's landing block; `[ranks + 1]`
    // first row here from each rank.
    u32* sent;
    u32* first_back;
    u32* first_from;
    // `[units]`
    u32* done;
    // `[1]`: rows of this rank that share a flag.
    u32* grain;

    __device__ Shared(u8* memory, const CombineParams& p, const Shape& shape) {
        u32* at = reinterpret_cast<u32*>(memory);
        const auto take = [&](u32 count) {
            u32* taken = at;
            at += count;
            return taken;
        };
        all.ranks = shape.ranks;
        all.length = WORD_COUNTS + 2 * shape.ranks;
        all.words = take(shape.ranks * all.length);
        all.verdict = VERDICT_OK;
        all.verdict_rank = 0;
        sent = take(shape.ranks);
        first_back = take(shape.ranks);
        first_from = take(shape.ranks + 1);
        grain = take(1);
        done = take(p.units);
    }
};

// What the handle says. All threads.
__device__ inline void read_handle(const CombineParams& p, const Shape& shape, const Shared& shared) {
    const bool given = !(p.phases & PHASE_REJECT);
    const u32 me = p.group.rank;
    for (u32 r = threadIdx.x; r <= shape.ranks; r += THREADS) {
        const i32* prefix = reinterpret_cast<const i32*>(p.rank_prefix);
        shared.first_from[r] = !given || r == 0 ? 0 : u32(prefix[(r - 1) * shape.ranks + me]);
        if (r < shape.ranks) shared.sent[r] = given ? reinterpret_cast<const u32*>(p.sent_rows)[r] : 0;
    }
    __syncthreads();
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) {
        u32 sum = 0;
        for (u32 s = 0; s < r; s++) sum += s == me ? 0 : shared.sent[s];
        shared.first_back[r] = sum;
    }
    if (threadIdx.x == 0) {
        // As many units as the sending blocks share evenly, and no more of an owner than it has flags
        // and the host has made counters for.
        u32 rows = 0, most = 0;
        for (u32 r = 0; r < shape.ranks; r++) {
            const u32 count = r == me ? 0 : shared.first_from[r + 1] - shared.first_from[r];
            rows += count;
            most = max(most, count);
        }
        const u32 each = (rows + 32 * p.send_blocks - 1) / (32 * p.send_blocks);
        const u32 units = max(each, 1u) * p.send_blocks;
        const u32 counted = shape.ranks > 1 ? p.units * p.send_blocks / (shape.ranks - 1) : 1;
        const u32 owned = max(min(p.group.flags, counted), 1u);
        *shared.grain = max(max((rows + units - 1) / units, (most + owned - 1) / owned), 1u);
    }
    __syncthreads();
}

// Tells every rank, this one included, where this rank wants its rows back. One block.
__device__ inline void announce(const CombineParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 status = p.phases & PHASE_REJECT ? STATUS_HOST : STATUS_OK;
    if (status != STATUS_OK) {
        const u8* text = reinterpret_cast<const u8*>(p.reject_text);
        for (u32 i = threadIdx.x; i < shape.ranks * TEXT_BYTES; i += THREADS) {
            group.text(i / TEXT_BYTES, p.group.rank)[i % TEXT_BYTES] = text[i % TEXT_BYTES];
        }
        __syncthreads();
        // The text of all threads is there before what each of them announces.
        fence_acq_rel_sys();
    }
    const u32 length = shared.all.length;
    for (u32 i = threadIdx.x; i < shape.ranks * length; i += THREADS) {
        const u32 to = i / length, w = i % length, r = w - WORD_COUNTS;
        const u32 value = w == WORD_TERMS       ? p.terms
                          : w == WORD_ROW_BYTES ? shape.row_bytes
                          : w == WORD_LANDING   ? p.landing
                          : w == WORD_CAPACITY  ? p.capacity
                          : w == WORD_TOKENS    ? shared.first_back[to]
                          : w == WORD_STATUS    ? status
                          : w == WORD_GRAIN     ? *shared.grain
                          : w < WORD_COUNTS     ? 0
                          : r < shape.ranks     ? shared.sent[r]
                                                : shared.first_from[r - shape.ranks + 1] - shared.first_from[r - shape.ranks];
        st_relaxed_sys(group.announcement(to, p.group.rank) + w, group.word(value));
    }
}

// Units of rows that go back, of all owners in turn; a block has every gridDim-th.
struct Units {
    const CombineParams& p;
    const Shape& shape;
    const Shared& shared;

    // Of the unit that is the block's `local`-th: its owner, first row among the owner's, and rows;
    // no rows if there is no such unit.
    __device__ u32 find(u32 local, u32& owner, u32& first, u32& index) const {
        const u32 unit = blockIdx.x + local * gridDim.x;
        index = unit / (shape.ranks - 1);
        owner = (p.group.rank + 1 + unit % (shape.ranks - 1)) % shape.ranks;
        const u32 rows = shared.first_from[owner + 1] - shared.first_from[owner];
        const u32 grain = *shared.grain;
        const u64 begin = u64(index) * grain;
        first = u32(begin);
        return begin < rows ? min(grain, rows - u32(begin)) : 0;
    }
};

// Publishes the units of this block as they become complete. The last warp.
__device__ inline void publish(const CombineParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const Units units{p, shape, shared};
    const u32 lane = threadIdx.x % 32;
    for (u32 unit = 0; unit < p.units; unit++) {
        u32 owner, first, index;
        const u32 rows = units.find(unit, owner, first, index);
        if (rows == 0) continue;
        while (ld_acquire_shared(&shared.done[unit]) < rows) __nanosleep(20);
        if (lane != 0) continue;
        // Rows were written by other warps, whose counts were acquired above.
        fence_acq_rel_sys();
        u64* flag = group.flag(owner, p.group.rank, index);
        st_relaxed_sys(flag, group.word(first));
        st_relaxed_sys(flag + 1, group.word(first + rows));
    }
}

// Sends one row to its owner. All lanes.
__device__ inline void send_row(const CombineParams& p, const Shape& shape, const Shared& shared, const Group& group,
                                u32 owner, u32 index) {
    const u32 lane = threadIdx.x % 32;
    const u32 row = shared.first_from[owner] + index;
    if (row >= p.x_rows) return;
    u8* landing = group.base(owner) + u64(shared.all.word(owner, WORD_LANDING)) * LANDING_UNIT;
    const u32 capacity = shared.all.word(owner, WORD_CAPACITY);
    const u64 place = u64(shared.all.word(owner, WORD_TOKENS)) + index;
    const Landing to(landing, capacity, 0, u64(p.top_k) * 4, 0);
    copy_row<false>(to.rows + place * shape.row_bytes, reinterpret_cast<const u8*>(p.x) + row * p.x_stride,
                    shape.row_bytes);
    if (p.weights && lane < p.top_k) {
        const float* weights = reinterpret_cast<const float*>(p.weights) + row * p.weights_stride;
        reinterpret_cast<float*>(to.weights)[place * p.top_k + lane] = weights[lane];
    }
}

// Sends this block's share.
__device__ inline void move(const CombineParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (shape.ranks == 1) return;
    for (u32 i = threadIdx.x; i < p.units; i += THREADS) shared.done[i] = 0;
    __syncthreads();
    if (warp == DATA_WARPS) {
        publish(p, shape, shared, group);
        return;
    }
    const Units units{p, shape, shared};
    // The warp's next row, counted from the beginning of `unit`.
    u32 offset = warp;
    for (u32 unit = 0; unit < p.units; unit++) {
        u32 owner, first, index;
        const u32 rows = units.find(unit, owner, first, index);
        for (; offset < rows; offset += DATA_WARPS) {
            send_row(p, shape, shared, group, owner, first + offset);
            __syncwarp();
            if (lane == 0) red_release_shared(&shared.done[unit], 1);
        }
        offset -= rows;
    }
}

// The rows that make up a token: lane l has those of ranks l and l + 32.
struct Parts {
    u64 row[PER_LANE];
    u64 weights[PER_LANE];
    u32 lanes[PER_LANE];
};

// Finds a token's rows and waits until they are here. All lanes.
__device__ inline bool find_parts(const CombineParams& p, const Shape& shape, const Shared& shared, const Group& group,
                                  u32 token, const Landing& landing, Parts& parts) {
    const u32 lane = threadIdx.x % 32;
    bool here = true;
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) {
        const u32 rank = lane + 32 * i;
        i32 slot = -1;
        if (rank < shape.ranks) slot = reinterpret_cast<const i32*>(p.slots)[u64(token) * shape.ranks + rank];
        if (slot >= 0 && u32(slot) >= shared.sent[rank]) slot = -1;
        parts.row[i] = parts.weights[i] = 0;
        if (slot >= 0 && rank == p.group.rank) {
            const u64 row = shared.first_from[rank] + u32(slot);
            if (row >= p.x_rows) {
                slot = -1;
            } else {
                parts.row[i] = p.x + row * p.x_stride;
                parts.weights[i] = p.weights + row * p.weights_stride * 4;
            }
        } else if (slot >= 0) {
            const u64 row = u64(shared.first_back[rank]) + u32(slot);
            parts.row[i] = reinterpret_cast<u64>(landing.rows) + row * shape.row_bytes;
            parts.weights[i] = reinterpret_cast<u64>(landing.weights) + row * p.top_k * 4;
            const u64* flag = group.flag(p.group.rank, rank, u32(slot) / max(shared.all.word(rank, WORD_GRAIN), 1u));
            u32 polls = 0, first, end;
            while (here && !group.test_flag(flag, first, end)) here = group.patient(polls, STAGE_ROWS, rank);
        }
        parts.lanes[i] = __ballot_sync(~0u, slot >= 0);
    }
    // What the flags said is there is there for all lanes.
    const bool all = __all_sync(~0u, here);
    __syncwarp();
    return all;
}

// Calls `visit` with the rows, and with their weights, in ascending rank order. All lanes.
template <class Visit>
__device__ __forceinline__ void for_each_part(const Parts& parts, const Visit& visit) {
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) {
        for (u32 rest = parts.lanes[i]; rest != 0; rest &= rest - 1) {
            const u32 lane = __ffs(rest) - 1;
            visit(__shfl_sync(~0u, parts.row[i], lane), __shfl_sync(~0u, parts.weights[i], lane));
        }
    }
}

// Sums a token whose rows are not all aligned to 16 bytes, an element at a time.
__device__ inline void sum_elements(const CombineParams& p, const Shape& shape, u32 token, const Parts& parts) {
    const u32 lane = threadIdx.x % 32, elements = shape.row_bytes / ELEMENT_BYTES;
    u8* out = reinterpret_cast<u8*>(p.out_x) + token * p.out_stride;
    for (u32 first = 0; first < elements; first += 32) {
        const u32 i = first + lane;
        float sum = 0.0f;
        for (int b = 0; b < 2; b++) {
            if (!p.bias[b] || i >= elements) continue;
            sum += load_element(reinterpret_cast<const u8*>(p.bias[b]) + token * p.bias_stride[b], i);
        }
        for_each_part(parts, [&](u64 row, u64) {
            if (i < elements) sum += load_element(reinterpret_cast<const u8*>(row), i);
        });
        if (i < elements) store_element(out, i, sum);
    }
}

// 16-byte words of one row, SUM_UNROLL per lane.
struct Words {
    uint4 value[SUM_UNROLL];

    __device__ __forceinline__ void load(u64 row, u32 first, u32 count) {
        const uint4* words = reinterpret_cast<const uint4*>(row) + first;
#pragma unroll
        for (int k = 0; k < SUM_UNROLL; k++) {
            const u32 i = k * 32 + threadIdx.x % 32;
            value[k] = first + i < count ? ld_landed(words + i) : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ void add_to(float (*sum)[WORD_ELEMENTS]) const {
#pragma unroll
        for (int k = 0; k < SUM_UNROLL; k++) add_word(sum[k], value[k]);
    }
};

// Sums a token: biases, then rows in ascending rank order. The next row is loaded while one is added.
__device__ inline void sum_token(const CombineParams& p, const Shape& shape, u32 token, const Parts& parts) {
    const u32 lane = threadIdx.x % 32, count = shape.row_bytes / 16;
    uint4* out = reinterpret_cast<uint4*>(p.out_x + token * p.out_stride);
#pragma unroll 1
    for (u32 first = 0; first < count; first += SUM_UNROLL * 32) {
        float sum[SUM_UNROLL][WORD_ELEMENTS];
#pragma unroll
        for (int k = 0; k < SUM_UNROLL; k++) {
#pragma unroll
            for (int e = 0; e < WORD_ELEMENTS; e++) sum[k][e] = 0.0f;
        }
        Words now;
        bool loaded = false;
        const auto add = [&](u64 row, u64) {
            Words next;
            next.load(row, first, count);
            if (loaded) now.add_to(sum);
            now = next;
            loaded = true;
        };
        for (int b = 0; b < 2; b++) {
            if (p.bias[b]) add(p.bias[b] + token * p.bias_stride[b], 0);
        }
        for_each_part(parts, add);
        if (loaded) now.add_to(sum);
#pragma unroll
        for (int k = 0; k < SUM_UNROLL; k++) {
            const u32 i = first + k * 32 + lane;
            if (i < count) out[i] = round_word(sum[k]);
        }
    }
}

// Sums what came back, a token per warp at a time.
__device__ inline void receive(const CombineParams& p, const Shape& shape, const Shared& shared, const Group& group) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* base = group.base(p.group.rank) + u64(p.landing) * LANDING_UNIT;
    const Landing landing(base, p.capacity, 0, u64(p.top_k) * 4, 0);
    u64 strides = p.x | p.x_stride | p.out_x | p.out_stride;
    for (int b = 0; b < 2; b++) strides |= p.bias[b] ? p.bias[b] | p.bias_stride[b] : 0;
    const bool aligned = strides % 16 == 0;
    for (u64 token = u64(warp) * gridDim.x + blockIdx.x; token < p.tokens; token += u64(gridDim.x) * WARPS) {
        Parts parts;
        if (!find_parts(p, shape, shared, group, u32(token), landing, parts)) return;
        if (p.discard) continue;
        if (aligned) {
            sum_token(p, shape, u32(token), parts);
        } else {
            sum_elements(p, shape, u32(token), parts);
        }
        if (p.out_weights) {
            float sum = 0.0f;
            for_each_part(parts, [&](u64, u64 weights) {
                if (lane < p.top_k) sum += reinterpret_cast<const volatile float*>(weights)[lane];
            });
            if (lane < p.top_k) reinterpret_cast<float*>(p.out_weights)[token * p.top_k + lane] = canonical(sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) combine(const __grid_constant__ CombineParams p) {
    extern __shared__ __align__(16) u8 memory[];
    const Shape shape(p);
    Shared shared(memory, p, shape);
    const Group group(p.group);
    read_handle(p, shape, shared);
    if (p.phases & (PHASE_COUNT | PHASE_REJECT) && blockIdx.x == 0) announce(p, shape, shared, group);
    if (p.phases & (PHASE_MOVE | PHASE_RECEIVE) || p.phases == PHASE_REJECT) {
        const bool here = gather(group, shared.all);
        if (here) {
            judge(group, shared.all, COUNTS_COMBINE, false);
            if (p.phases & PHASE_MOVE && blockIdx.x == 0 && threadIdx.x == 0) tell_verdict(group, shared.all, nullptr, 0);
            if (shared.all.verdict == VERDICT_OK) {
                if (p.phases & PHASE_MOVE) move(p, shape, shared, group);
                if (p.phases & PHASE_RECEIVE) receive(p, shape, shared, group);
            }
        }
    }
    leave(group);
}
