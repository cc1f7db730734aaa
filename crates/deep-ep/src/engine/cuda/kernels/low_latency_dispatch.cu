// Low-latency dispatch. The protocol is described in engine/low_latency/mod.rs.
//
// Constants, each 0 if it is known only at run time: RANKS, TOP_K, HIDDEN, FORMAT.

#include "fp8.cuh"
#include "low_latency.cuh"

// Tokens whose places a block knows at a time.
constexpr u32 BATCH = 8;

// How rows travel: codes or channels, then scales.
struct Wire {
    u32 format;
    // Bytes of a row, and behind them of its scales.
    u32 row_bytes, scale_bytes;

    __device__ Wire(const LowLatencyParams& p, const Shape& shape) : format(FORMAT ? FORMAT : p.format) {
        const u32 blocks = shape.hidden / SCALE_BLOCK;
        row_bytes = format == FORMAT_BF16 ? shape.hidden * 2 : shape.hidden;
        scale_bytes = format == FORMAT_BF16 ? 0 : format == FORMAT_FP8_UE8M0 ? blocks : blocks * 4;
    }
};

// Bytes of the tagged words of a message: source token, experts, then a place for each expert.
__device__ __forceinline__ u32 header_bytes(const Shape& shape) { return (2 + shape.top_k + shape.top_k % 2) * 8; }

// Dynamic shared memory. `shared_bytes` in engine/low_latency/dispatch.rs sizes it.
struct Shared {
    // Sending: `[BATCH][top_k]` where a token's row goes, `[BATCH]` to how many ranks.
    u64* targets;
    u32* target_count;
    Counters counters;
    // `[ranks]`: the slots before this block's, and before the next one's.
    u32* first_slot;
    u32* last_slot;

    // Receiving: `[ranks][WORD_COUNTS]`; `[ranks][local_experts]` counts, then where ranges begin.
    u32* words;
    u32* begin;

    __device__ Shared(u64* memory, u64* bad, const LowLatencyParams& p, const Shape& shape) {
        targets = memory;
        u32* at = reinterpret_cast<u32*>(memory + BATCH * shape.top_k);
        const auto take = [&](u32 count) {
            u32* taken = at;
            at += count;
            return taken;
        };
        target_count = take(BATCH);
        counters.experts = take(p.experts);
        counters.ranks = last_slot = take(shape.ranks);
        counters.bad = bad;
        first_slot = take(shape.ranks);
        words = take(shape.ranks * WORD_COUNTS);
        begin = counters.experts;
    }
};

// Finds the places of a token, notes where its row goes and writes the tagged words of its messages.
// `id` is the lane's choice. Returns how many messages there are. One warp.
__device__ inline u32 place_token(const Call& call, const Shape& shape, const Shared& shared, const Place& place,
                                  u32 token, u32 index, i64 id) {
    const LowLatencyParams& p = call.p;
    const u32 lane = threadIdx.x % 32, before = (1u << lane) - 1;
    const Places places(p, shape, shared.counters, place, token, id);
    const Choices& choices = places.choices;
    const u32 leaders = __ballot_sync(~0u, choices.leads_expert());
    const bool sent = choices.same_expert != 0 && !call.is_masked(choices.rank) && places.slot < p.max_tokens;
    const bool targets = sent && choices.leads_rank();
    const u32 target_lanes = __ballot_sync(~0u, targets);
    if (lane == 0) shared.target_count[index] = __popc(target_lanes);
    if (!sent) return __popc(target_lanes);
    const u64 message = u64(call.me()) * p.max_tokens + places.slot;
    u64* header = reinterpret_cast<u64*>(call.tagged(choices.rank) + message * header_bytes(shape));
    const u32 mine = choices.same_rank & leaders;
    if (targets) {
        shared.targets[index * shape.top_k + __popc(target_lanes & before)] =
            reinterpret_cast<u64>(call.rows(choices.rank)) + message * p.row_stride;
        st_relaxed_sys(header, call.group.word(token), call.group.word(__popc(mine)));
    }
    if (leaders >> lane & 1) {
        st_relaxed_sys(header + 2 + __popc(mine & before), call.group.word(places.place(p, shape)));
    }
    return __popc(target_lanes);
}

// A token's row, 8 channels per thread.
struct Row {
    uint4 word;

    __device__ __forceinline__ void load(const LowLatencyDispatchParams& p, u32 token, u32 index, bool aligned) {
        word = load_word(reinterpret_cast<const u8*>(p.x) + token * p.x_stride, index, aligned);
    }

    // Writes it, cast, to each target. All lanes of a scale's block.
    __device__ __forceinline__ void store(const Wire& wire, const u64* targets, u32 count, u32 index) const {
        if (wire.format == FORMAT_BF16) {
            for (u32 i = 0; i < count; i++) reinterpret_cast<uint4*>(targets[i])[index] = word;
            return;
        }
#if __CUDA_ARCH__ >= 890
        const bool power_of_two = wire.format != FORMAT_FP8;
        const BlockScale block = block_scale(largest_of_block(largest_magnitude(word)), power_of_two);
        const uint2 codes = cast_word(word, block.factor);
        const bool leads = threadIdx.x % SCALE_LANES == 0;
        for (u32 i = 0; i < count; i++) {
            reinterpret_cast<uint2*>(targets[i])[index] = codes;
            u8* scales = reinterpret_cast<u8*>(targets[i]) + wire.row_bytes;
            if (leads && wire.format == FORMAT_FP8_UE8M0) {
                scales[index / SCALE_LANES] = u8(__float_as_uint(block.scale) >> 23);
            } else if (leads) {
                reinterpret_cast<float*>(scales)[index / SCALE_LANES] = block.scale;
            }
        }
#endif
    }
};

// The tokens of this block.
struct Chunk {
    u32 begin, end;

    __device__ explicit Chunk(const LowLatencyParams& p)
        : begin(min(blockIdx.x * p.chunk_tokens, p.tokens)), end(min(begin + p.chunk_tokens, p.tokens)) {}
};

// Counts, announces and writes this block's tokens to the ranks they go to. Waits for nobody. They
// are to be published behind it.
__device__ inline void send(const LowLatencyDispatchParams& params, const Call& call, const Shape& shape,
                            const Shared& shared) {
    const LowLatencyParams& p = call.p;
    const Wire wire(p, shape);
    const Chunk chunk(p);
    const u32 begin = chunk.begin, end = chunk.end, words = shape.hidden / 8;
    const bool aligned = ALIGNED || (params.x | params.x_stride) % 16 == 0;
    const Place place(shape);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // The first choices and rows are on their way while places are found.
    i64 id = warp == 0 ? look_at(p, place, begin, min(begin + 1, end)) : -1;
    Row row;
    row.word = make_uint4(0, 0, 0, 0);
    const u32 first_items = min(BATCH, end - begin) * words;
    if (threadIdx.x < first_items) row.load(params, begin + threadIdx.x / words, threadIdx.x % words, aligned);
    count_before(p, shape, shared.counters, begin);
    __syncthreads();
    enter_call(call);
    u32 messages = 0;
    for (u32 r = lane; r < shape.ranks && warp == 0; r += 32) shared.first_slot[r] = shared.counters.ranks[r];
    __syncwarp();
    for (u32 batch = begin; batch < end; batch += BATCH) {
        const u32 tokens = min(BATCH, end - batch);
        for (u32 i = 0; i < tokens && warp == 0; i++) {
            const u32 token = batch + i;
            const i64 next = look_at(p, place, token + 1, min(token + 2, end));
            messages += place_token(call, shape, shared, place, token, i, id);
            id = next;
        }
        __syncthreads();
        for (u32 item = threadIdx.x; item < tokens * words; item += THREADS) {
            const u32 i = item / words, index = item % words;
            if (batch != begin || item >= THREADS) row.load(params, batch + i, index, aligned);
            row.store(wire, shared.targets + i * shape.top_k, shared.target_count[i], index);
        }
        __syncthreads();
    }
    // The last block has counted all tokens.
    if (blockIdx.x == gridDim.x - 1) {
        announce(call, shape, *shared.counters.bad, shared.counters.experts);
        // The counters' memory is used again.
        __syncthreads();
    }
    const u32 message_bytes = (2 + shape.top_k) * 8 + wire.row_bytes + wire.scale_bytes;
    if (threadIdx.x == 0 && messages) atomicAdd(&p.shared->wire_bytes, u64(messages) * message_bytes);
}

// Lets every rank know which of its slots the block has filled. One warp, behind a barrier that is
// behind the rows.
__device__ inline void publish(const Call& call, const Shape& shape, const Shared& shared) {
    const Chunk chunk(call.p);
    if (chunk.begin == chunk.end) return;
    for (u32 r = threadIdx.x % 32; r < shape.ranks; r += 32) {
        if (call.is_masked(r)) continue;
        // The block's rows come first.
        fence_acq_rel_sys();
        st_relaxed_sys(call.flag(r, call.me(), blockIdx.x), call.group.word(shared.first_slot[r]),
                       call.group.word(shared.last_slot[r]));
    }
}

// Ranges begin behind those of the sources before. `thread` of so many.
__device__ inline void place_ranges(const Shape& shape, const Shared& shared, const Sources& sources, u32 thread,
                                    u32 threads) {
    for (u32 e = thread; e < shape.local_experts; e += threads) {
        u32 sum = 0;
        for (u32 s = 0; s < shape.ranks; s++) {
            u32* range = &shared.begin[s * shape.local_experts + e];
            const u32 count = sources.present >> s & 1 ? *range : 0;
            *range = sum;
            sum += count;
        }
    }
}

// Writes what the caller is told about the rows, before counts become begins. One block.
__device__ inline void write_tables(const LowLatencyDispatchParams& params, const Shape& shape, const Shared& shared,
                                    const Sources& sources, bool any) {
    for (u32 e = threadIdx.x; e < shape.local_experts; e += THREADS) {
        u32 sum = 0;
        for (u32 s = 0; s < shape.ranks; s++) {
            const bool here = any && sources.present >> s & 1;
            const u32 count = here ? shared.begin[s * shape.local_experts + e] : 0;
            reinterpret_cast<u64*>(params.layout_range)[e * shape.ranks + s] = u64(sum) << 32 | count;
            sum += count;
        }
        reinterpret_cast<u32*>(params.recv_count)[e] = sum;
        if (params.recv_stats) reinterpret_cast<u32*>(params.recv_stats)[e] += sum;
    }
}

// Where the copies of a message go: lane i has the i-th.
struct Copies {
    u32 count;
    u32 token;
    u64 row, scales;
    // Index in src_info.
    u64 index;

    // Reads the tagged words of a message. All lanes.
    __device__ Copies(const LowLatencyDispatchParams& params, const Shape& shape, const Shared& shared, u32 source,
                      const u64* header) {
        const u32 lane = threadIdx.x % 32;
        u64 first, second;
        ld_relaxed_sys(header, first, second);
        const u32 place = lane < shape.top_k ? u32(ld_relaxed_sys(header + 2 + lane)) : 0;
        token = u32(first);
        count = min(u32(second), shape.top_k);
        const u32 most = params.common.max_tokens;
        const u32 expert = place / most, position = place % most;
        bool valid = lane < count && expert < shape.local_experts;
        u32 at = 0;
        if (valid) at = shared.begin[source * shape.local_experts + expert] + position;
        // A peer that wrote nonsense makes no place outside the output.
        if (at >= shape.rows) valid = false;
        count = __ffs(~__ballot_sync(~0u, valid)) - 1u;
        // 32 valid lanes.
        if (count == ~0u) count = 32;
        row = valid ? params.out_x.data + expert * params.out_x.strides[0] + at * params.out_x.strides[1] : 0;
        scales = valid ? params.out_scales.data + expert * params.out_scales.strides[0] + at * params.out_scales.strides[1]
                       : 0;
        index = u64(expert) * shape.rows + at;
    }
};

// Puts a message where its token's experts read it; `ahead` are the lanes' first words. All lanes of all warps of the team.
__device__ inline void put_row(const LowLatencyDispatchParams& params, const Wire& wire, const Team& team,
                               const Copies& copies, const u8* from, uint4 ahead, bool aligned) {
    const u32 lane = threadIdx.x % 32, words = wire.row_bytes / 16;
    for (u32 first = team.first; first < words; first += team.stride()) {
        const u32 i = first + lane;
        uint4 value = ahead;
        if (first != team.first && i < words) value = ld_landed(reinterpret_cast<const uint4*>(from) + i);
        for (u32 c = 0; c < copies.count; c++) {
            u8* to = reinterpret_cast<u8*>(__shfl_sync(~0u, copies.row, c));
            if (i < words) store_word(to, i, value, aligned);
        }
    }
    const u32 columns = wire.scale_bytes / 4;
    const volatile u32* scales = reinterpret_cast<const volatile u32*>(from + wire.row_bytes);
    for (u32 first = team.first; first < columns; first += team.stride()) {
        const u32 i = first + lane;
        const u32 value = i < columns ? scales[i] : 0;
        for (u32 c = 0; c < copies.count; c++) {
            const u64 to = __shfl_sync(~0u, copies.scales, c) + i * params.out_scales.strides[2];
            if (i < columns) *reinterpret_cast<u32*>(to) = value;
        }
    }
}

// Waits for the chunks of all sources and puts their rows. False: a wait gave up.
__device__ inline bool put_rows(const LowLatencyDispatchParams& params, const Call& call, const Shape& shape,
                                const Shared& shared, Sources& sources) {
    const LowLatencyParams& p = call.p;
    const Wire wire(p, shape);
    const Team team(wire.row_bytes / 16, 16, WARPS);
    if (!team.works()) return true;
    const u32 lane = threadIdx.x % 32, word = team.first + lane;
    const bool aligned =
        ALIGNED || (params.out_x.data | params.out_x.strides[0] | params.out_x.strides[1]) % 16 == 0;
    const u32 most_rows = sources.most_tokens, most_chunks = sources.most_chunks;
    const i64 start = clock64();
    // A block's turns are the sources, other ranks first, once for each of its chunks. Its teams take
    // the rows of all turns in turn.
    u32 chunk = blockIdx.x, step = 0, row = team.index;
    u32 first = 0, end = 0;
    bool known = false;
    for (;;) {
        for (; row >= most_rows && chunk < most_chunks; row -= most_rows) {
            known = false;
            if (++step < shape.ranks) continue;
            step = 0;
            chunk += gridDim.x;
        }
        if (chunk >= most_chunks) return true;
        const u32 source = (call.me() + 1 + step) % shape.ranks;
        const bool some = sources.present >> source & 1 && chunk < sources.chunks[source];
        if (some && !known) {
            bool here = true;
            if (lane == 0) {
                here = call.wait_flag(call.flag(call.me(), source, chunk), first, end, STAGE_ROWS, source);
                if (source != call.me()) atomicMax(&sources.waited[source], clock64() - start);
            }
            if (!__shfl_sync(~0u, here, 0)) return false;
            first = __shfl_sync(~0u, first, 0), end = min(__shfl_sync(~0u, end, 0), p.max_tokens);
            // Every lane reads what lane 0 has seen announced.
            __syncwarp();
            known = true;
        }
        if (some && first + row < end) {
            const u64 message = u64(source) * p.max_tokens + first + row;
            const u64* header = reinterpret_cast<const u64*>(call.tagged(call.me()) + message * header_bytes(shape));
            const u8* from = call.rows(call.me()) + message * p.row_stride;
            // The row's first words are on their way while the header says where they go.
            uint4 ahead = make_uint4(0, 0, 0, 0);
            if (word < wire.row_bytes / 16) ahead = ld_landed(reinterpret_cast<const uint4*>(from) + word);
            const Copies copies(params, shape, shared, source, header);
            if (team.first == 0 && lane < copies.count) {
                reinterpret_cast<u32*>(params.src_info)[copies.index] = copies.token;
            }
            put_row(params, wire, team, copies, from, ahead, aligned);
        }
        row += team.count;
    }
}

// Waits for all ranks and puts what came for each expert. False: a wait gave up.
__device__ inline bool receive(const LowLatencyDispatchParams& params, const Call& call, const Shape& shape,
                               const Shared& shared, Sources& sources) {
    const LowLatencyParams& p = call.p;
    const auto instead = [&] {
        if (call.is_whole()) publish(call, shape, shared);
    };
    if (!gather(call, shape, sources, shared.words, p.discard ? nullptr : shared.begin, instead)) return false;
    // One block needs the counts for longer, and with `shrink` it is not known yet who takes part.
    const bool tabulates = blockIdx.x == gridDim.x - 1, early = !p.shrink && !p.discard && !tabulates;
    if (threadIdx.x < 32) {
        judge(call, shape, sources);
    } else if (early) {
        place_ranges(shape, shared, sources, threadIdx.x - 32, THREADS - 32);
    }
    __syncthreads();
    if (blockIdx.x == 0) tell(call, sources);
    if (p.discard) return true;
    const bool any = sources.all.verdict == VERDICT_OK;
    if (!settle(call, shape, sources, [&](u32 s) { return any ? sources.chunks[s] : 0; })) return false;
    if (tabulates) write_tables(params, shape, shared, sources, any);
    if (!any) return true;
    if (!early) {
        __syncthreads();
        place_ranges(shape, shared, sources, threadIdx.x, THREADS);
        __syncthreads();
    }
    const bool here = put_rows(params, call, shape, shared, sources);
    if (blockIdx.x != 0) return here;
    __syncthreads();
    add_waits(shape, sources, params.wait_stats);
    return here;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    low_latency_dispatch(const __grid_constant__ LowLatencyDispatchParams params) {
    extern __shared__ __align__(16) u64 memory[];
    __shared__ Sources sources;
    __shared__ u64 bad;
    const LowLatencyParams& p = params.common;
    const Shape shape(p);
    Call call(p);
    if (threadIdx.x == 0) bad = ~u64(0);
    const Shared shared(memory, &bad, p, shape);
    call.heed_exclusions();
    sources.clear(call, shape, shared.words);
    bool here = true;
    if (p.phases & LL_REJECT) {
        here = reject(call, shape, sources, shared.words);
    } else {
        if (p.phases & LL_SEND) {
            send(params, call, shape, shared);
        } else {
            __syncthreads();
        }
        if (p.phases & LL_RECEIVE) {
            here = receive(params, call, shape, shared, sources);
        } else if (threadIdx.x < 32) {
            publish(call, shape, shared);
        }
    }
    leave_call(call, !here);
}
