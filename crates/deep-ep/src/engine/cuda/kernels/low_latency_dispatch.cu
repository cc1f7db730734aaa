// Low-latency dispatch. The protocol is described in engine/low_latency/mod.rs.
//
// Constants, each 0 if it is known only at run time: RANKS, TOP_K, HIDDEN, FORMAT.

#include "fp8.cuh"
#include "low_latency.cuh"

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

// The tagged words of a token of `source` in the region of `at`: for each of its choices the place at
// the rank's expert, or NO_PLACE.
__device__ __forceinline__ u64* header_of(const Call& call, const Shape& shape, u32 at, u32 source, u32 token) {
    const u64 message = u64(source) * call.p.max_tokens + token;
    return reinterpret_cast<u64*>(call.tagged(at)) + message * shape.top_k;
}

// Dynamic shared memory. `shared_bytes` in engine/low_latency/dispatch.rs sizes it.
struct Shared {
    // Sending.
    Counters counters;
    // Receiving: `[ranks][WORD_COUNTS]`; `[ranks][local_experts]` counts, then where ranges begin.
    u32* words;
    u32* begin;

    __device__ Shared(u32* memory, u64* bad, const LowLatencyParams& p, const Shape& shape) {
        words = memory;
        begin = counters.experts = memory + shape.ranks * WORD_COUNTS;
        counters.bad = bad;
    }
};

// The tokens of this block.
struct Chunk {
    u32 begin, end;

    __device__ explicit Chunk(const LowLatencyParams& p)
        : begin(min(blockIdx.x * p.chunk_tokens, p.tokens)), end(min(begin + p.chunk_tokens, p.tokens)) {}
};

// Where this GPU sees the landed rows of all ranks: lane l knows those of ranks l and l + 32.
struct Landings {
    u64 low, high;

    __device__ Landings(const Call& call, const Shape& shape) : low(0), high(0) {
        const u32 lane = threadIdx.x % 32;
        if (lane < shape.ranks) low = reinterpret_cast<u64>(call.rows(lane));
        if (!(RANKS && RANKS <= 32) && lane + 32 < shape.ranks) high = reinterpret_cast<u64>(call.rows(lane + 32));
    }

    // All lanes, of one rank.
    __device__ __forceinline__ u8* of(u32 rank) const {
        const u64 at = __shfl_sync(~0u, (RANKS && RANKS <= 32) || rank < 32 ? low : high, rank % 32);
        return reinterpret_cast<u8*>(at);
    }
};

// A word of a row, 8 channels, cast.
struct Cast {
    uint4 word;
    float scale;

    // All lanes of a scale's block.
    __device__ Cast(const Wire& wire, uint4 channels) : word(channels), scale(0.0f) {
#if __CUDA_ARCH__ >= 890
        if (wire.format == FORMAT_BF16) return;
        const BlockScale block = block_scale(largest_of_block(largest_magnitude(channels)), wire.format != FORMAT_FP8);
        const uint2 codes = cast_word(channels, block.factor);
        word.x = codes.x, word.y = codes.y;
        scale = block.scale;
#endif
    }

    // Writes it as word `index` of the row at `to`.
    __device__ __forceinline__ void store(const Wire& wire, u8* to, u32 index) const {
        if (wire.format == FORMAT_BF16) {
            reinterpret_cast<uint4*>(to)[index] = word;
            return;
        }
        reinterpret_cast<uint2*>(to)[index] = make_uint2(word.x, word.y);
        if (threadIdx.x % SCALE_LANES != 0) return;
        u8* scales = to + wire.row_bytes;
        if (wire.format == FORMAT_FP8_UE8M0) {
            scales[index / SCALE_LANES] = u8(__float_as_uint(scale) >> 23);
        } else {
            reinterpret_cast<float*>(scales)[index / SCALE_LANES] = scale;
        }
    }
};

// The rows of this block's tokens on their way to the ranks that the tokens chose. That needs only a
// token's own choices, so they are off before tokens are counted.
struct OwnRows {
    const LowLatencyDispatchParams& params;
    const Shape& shape;
    Team team;
    bool aligned;
    u32 token, end;
    // Of the team's next token, on their way: the lane's choice and its first word.
    i64 id;
    uint4 word;

    __device__ OwnRows(const LowLatencyDispatchParams& params, const Shape& shape, const Chunk& chunk)
        : params(params),
          shape(shape),
          team(shape.hidden / 8, WARPS, WARPS),
          aligned(ALIGNED || (params.x | params.x_stride) % 16 == 0),
          token(chunk.begin + team.index),
          end(team.works() ? chunk.end : 0) {
        look();
    }

    __device__ __forceinline__ uint4 load(u32 of, u32 index) const {
        const u8* row = reinterpret_cast<const u8*>(params.x) + of * params.x_stride;
        return index < shape.hidden / 8 ? load_word(row, index, aligned) : make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void look() {
        id = -1;
        if (token >= end) return;
        const u32 lane = threadIdx.x % 32;
        if (lane < shape.top_k) id = choice_at(params.common, token, lane);
        word = load(token, team.first + lane);
    }

    // All lanes of all warps.
    __device__ __forceinline__ void store(const Call& call, const Wire& wire, const Landings& landings) {
        const LowLatencyParams& p = params.common;
        const u32 words = shape.hidden / 8;
#pragma unroll 1
        while (token < end) {
            const u32 sent = token;
            const u64 at = (u64(call.me()) * p.max_tokens + sent) * p.row_stride;
            const u64 ranks = ranks_of_lanes(rank_of(p, shape, id)) & ~call.masked;
            uint4 channels = word;
            token += team.count;
            look();
            for (u32 first = team.first; first < words; first += team.stride()) {
                const u32 index = first + threadIdx.x % 32;
                if (first != team.first) channels = load(sent, index);
                const Cast cast(wire, channels);
#pragma unroll 1
                for (u64 rest = ranks; rest != 0; rest &= rest - 1) {
                    u8* to = landings.of(__ffsll(rest) - 1) + at;
                    if (index < words) cast.store(wire, to, index);
                }
            }
        }
    }
};

// Writes the tagged words of this block's tokens to every rank, and counts the tokens. One warp,
// behind a barrier that is behind the count of the tokens before.
__device__ inline void write_headers(const Call& call, const Shape& shape, const Shared& shared, const Chunk& chunk) {
    const LowLatencyParams& p = call.p;
    const u32 lane = threadIdx.x % 32;
    const Wire wire(p, shape);
    const Place place(shape);
    const auto look = [&](u32 token) { return look_at(p, place, token, min(token + 1, chunk.end)); };
    u32 messages = 0;
    i64 id = look(chunk.begin);
#pragma unroll 1
    for (u32 token = chunk.begin; token < chunk.end; token++) {
        const i64 next = look(token + 1);
        const Places places(p, shape, shared.counters, place, token, id);
        const Choices& choices = places.choices;
        messages += __popcll(ranks_of_lanes(choices.rank) & ~call.masked);
        for_each_rank(call, shape, [&](u32 to) {
            if (lane >= shape.top_k) return;
            const u32 value = choices.leads_expert() && choices.rank == to ? places.place(p, shape) : NO_PLACE;
            st_relaxed_sys(header_of(call, shape, to, call.me(), token) + lane, call.group.word(value));
        });
        id = next;
    }
    if (lane != 0 || chunk.begin == chunk.end) return;
    const u32 headers = (chunk.end - chunk.begin) * __popcll(Sources::everyone(shape) & ~call.masked);
    const u64 row_bytes = u64(messages) * (wire.row_bytes + wire.scale_bytes);
    atomicAdd(&p.shared->wire_bytes, row_bytes + u64(headers) * shape.top_k * 8);
}

// Lets every rank know that the block's rows are there. One warp, behind a barrier that is behind the
// rows.
__device__ inline void publish(const Call& call, const Shape& shape, const Chunk& chunk) {
    if (chunk.begin == chunk.end) return;
    for (u32 r = threadIdx.x % 32; r < shape.ranks; r += 32) {
        if (call.is_masked(r)) continue;
        // The block's rows come first.
        fence_acq_rel_sys();
        st_relaxed_sys(call.flag(r, call.me(), blockIdx.x), call.group.word(0), call.group.word(0));
    }
}

// Writes this block's tokens to the ranks they go to, and announces. Waits for nobody. The last warp
// is busy with the flags for as long as the rows need to arrive; the others go on. All threads.
__device__ inline void send(const LowLatencyDispatchParams& params, const Call& call, const Shape& shape,
                            const Shared& shared) {
    const LowLatencyParams& p = call.p;
    const Chunk chunk(p);
    // What this block reads is on its way before it is needed.
    OwnRows rows(params, shape, chunk);
    CountBefore count(p, shape, chunk.begin);
    const Landings landings(call, shape);
    shared.counters.clear(p);
    // Rows wait for no other warp.
    rows.store(call, Wire(p, shape), landings);
    __syncthreads();
    count.run(p, shape, shared.counters);
    __syncthreads();
    if (p.shrink) {
        // Who has seen the flags of a rank must not wait for it any more, so headers come first.
        if (threadIdx.x < 32) write_headers(call, shape, shared, chunk);
        __syncthreads();
    }
    if (threadIdx.x >= RECEIVERS) {
        publish(call, shape, chunk);
        enter_call(call);
        return;
    }
    if (!p.shrink && threadIdx.x < 32) write_headers(call, shape, shared, chunk);
    // The counters' memory is used again.
    meet_receivers();
    if (blockIdx.x != gridDim.x - 1) return;
    // The last block has counted all tokens.
    announce(call, shape, *shared.counters.bad, shared.counters.experts);
    meet_receivers();
}

// Ranges begin behind those of the sources before. `thread` of so many.
__device__ inline void place_ranges(const Shape& shape, const Shared& shared, const Sources& sources, u32 thread,
                                    u32 threads) {
    for (u32 e = thread; e < shape.local_experts; e += threads) {
        u32 sum = 0;
#pragma unroll 4
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
    for (u32 e = threadIdx.x; e < shape.local_experts; e += RECEIVERS) {
        u32 sum = 0;
#pragma unroll 1
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

// Where the copies of a message go, as the lanes of a warp see it.
struct Copies {
    // Lanes that have one.
    u32 lanes;
    u64 row, scales;
    // Index in src_info.
    u64 index;

    // Waits for the tagged words of a token. False: a wait gave up. All lanes.
    __device__ __forceinline__ bool find(const LowLatencyDispatchParams& params, const Call& call, const Shape& shape,
                                         const Shared& shared, u32 source, u32 token) {
        const u32 lane = threadIdx.x % 32, most = call.p.max_tokens;
        u32 place = NO_PLACE;
        bool here = true;
        if (lane < shape.top_k) {
            here = call.wait_word(header_of(call, shape, call.me(), source, token) + lane, place, STAGE_ROWS, source);
        }
        if (!__all_sync(~0u, here)) return false;
        const u32 expert = place / most;
        u32 at = ~0u;
        if (place != NO_PLACE && expert < shape.local_experts) {
            at = shared.begin[source * shape.local_experts + expert] + place % most;
        }
        // A peer that wrote nonsense makes no place outside the output.
        const bool some = at < shape.rows;
        lanes = __ballot_sync(~0u, some);
        row = some ? params.out_x.data + expert * params.out_x.strides[0] + at * params.out_x.strides[1] : 0;
        scales = some ? params.out_scales.data + expert * params.out_scales.strides[0] + at * params.out_scales.strides[1]
                      : 0;
        index = u64(expert) * shape.rows + at;
        return true;
    }
};

// Puts a message where its token's experts read it. All lanes of all warps of the team.
__device__ inline void put_row(const LowLatencyDispatchParams& params, const Wire& wire, const Team& team,
                               const Copies& copies, const u8* from, bool aligned) {
    const u32 lane = threadIdx.x % 32, words = wire.row_bytes / 16, columns = wire.scale_bytes / 4;
    const u32* scales = reinterpret_cast<const u32*>(from + wire.row_bytes);
    // There are fewer scales than words.
#pragma unroll 1
    for (u32 first = team.first; first < words; first += team.stride()) {
        const u32 i = first + lane;
        uint4 value = make_uint4(0, 0, 0, 0);
        u32 scale = 0;
        if (i < words) value = ld_landed(reinterpret_cast<const uint4*>(from) + i);
        if (i < columns) scale = *reinterpret_cast<const volatile u32*>(scales + i);
#pragma unroll 1
        for (u32 rest = copies.lanes; rest != 0; rest &= rest - 1) {
            const u32 c = __ffs(rest) - 1;
            u8* to = reinterpret_cast<u8*>(__shfl_sync(~0u, copies.row, c));
            if (i < words) store_word(to, i, value, aligned);
            if (first >= columns) continue;
            const u64 scale_to = __shfl_sync(~0u, copies.scales, c) + i * params.out_scales.strides[2];
            if (i < columns) *reinterpret_cast<u32*>(scale_to) = scale;
        }
    }
}

// A team's way through the tokens of all sources. A block's turns are the sources, other ranks first,
// once for each of its chunks; its teams take the tokens of all turns in turn.
struct Walk {
    const Call& call;
    const Shape& shape;
    const Sources& sources;
    u32 chunk, step, row;
    // Whether the turn's flag was seen.
    bool known;

    // Goes to token `row` of the turn, or of one behind it. False: there is no such turn.
    __device__ __forceinline__ bool advance() {
        for (; row >= sources.most_tokens && chunk < sources.most_chunks; row -= sources.most_tokens) {
            known = false;
            if (++step < shape.ranks) continue;
            step = 0;
            chunk += gridDim.x;
        }
        return chunk < sources.most_chunks;
    }

    // Whether the turn has such a token.
    __device__ __forceinline__ bool find(u32& source, u32& token) const {
        source = call.me() + 1 + step;
        if (source >= shape.ranks) source -= shape.ranks;
        if (!(sources.present >> source & 1) || chunk >= sources.chunks[source]) return false;
        const u32 grain = sources.all.word(source, WORD_CHUNK);
        const u64 at = u64(chunk) * grain + row;
        token = u32(at);
        return row < grain && at < min(sources.all.word(source, WORD_TOKENS), call.p.max_tokens);
    }
};

// Waits for the chunks of all sources and puts their rows. False: a wait gave up.
__device__ inline bool put_rows(const LowLatencyDispatchParams& params, const Call& call, const Shape& shape,
                                const Shared& shared, Sources& sources) {
    const LowLatencyParams& p = call.p;
    const Wire wire(p, shape);
    const Team team(wire.row_bytes / 16, RECEIVERS / 64, RECEIVERS / 32);
    if (!team.works()) return true;
    const u32 lane = threadIdx.x % 32;
    const bool aligned =
        ALIGNED || (params.out_x.data | params.out_x.strides[0] | params.out_x.strides[1]) % 16 == 0;
    const i64 start = clock64();
    for (Walk walk{call, shape, sources, blockIdx.x, 0, team.index, false}; walk.advance(); walk.row += team.count) {
        u32 source, token;
        if (!walk.find(source, token)) continue;
        // Headers are there before the rows: their places are known when the flag comes.
        Copies copies;
        if (!copies.find(params, call, shape, shared, source, token)) return false;
        if (copies.lanes == 0) continue;
        if (team.first == 0 && copies.lanes >> lane & 1) {
            reinterpret_cast<u32*>(params.src_info)[copies.index] = token;
        }
        if (!walk.known) {
            bool here = true;
            if (lane == 0) {
                u32 first, second;
                here = call.wait_flag(call.flag(call.me(), source, walk.chunk), first, second, STAGE_ROWS, source);
                if (source != call.me()) atomicMax(&sources.waited_rows[source], clock64() - start);
            }
            if (!__shfl_sync(~0u, here, 0)) return false;
            // Every lane reads what lane 0 has seen published.
            __syncwarp();
            walk.known = true;
        }
        const u8* from = call.rows(call.me()) + (u64(source) * p.max_tokens + token) * p.row_stride;
        put_row(params, wire, team, copies, from, aligned);
    }
    return true;
}

// Waits for all ranks and puts what came for each expert. False: a wait gave up. The threads that
// receive.
__device__ inline bool receive(const LowLatencyDispatchParams& params, const Call& call, const Shape& shape,
                               const Shared& shared, Sources& sources) {
    const LowLatencyParams& p = call.p;
    if (!gather(call, shape, sources, shared.words, p.discard ? nullptr : shared.begin, [] {})) return false;
    // One block needs the counts for longer, and with `shrink` it is not known yet who takes part.
    const bool tabulates = blockIdx.x == gridDim.x - 1, early = !p.shrink && !p.discard && !tabulates;
    if (threadIdx.x < 32) {
        judge(call, shape, sources);
    } else if (early) {
        place_ranges(shape, shared, sources, threadIdx.x - 32, RECEIVERS - 32);
    }
    meet_receivers();
    if (blockIdx.x == 0) tell(call, sources);
    if (p.discard) return true;
    const bool any = sources.all.verdict == VERDICT_OK;
    if (!settle(call, shape, sources, [&](u32 s) { return any ? sources.chunks[s] : 0; })) return false;
    if (tabulates) write_tables(params, shape, shared, sources, any);
    if (!any) return true;
    if (!early) {
        meet_receivers();
        place_ranges(shape, shared, sources, threadIdx.x, RECEIVERS);
        meet_receivers();
    }
    return put_rows(params, call, shape, shared, sources);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    low_latency_dispatch(const __grid_constant__ LowLatencyDispatchParams params) {
    extern __shared__ __align__(16) u32 memory[];
    __shared__ Sources sources;
    __shared__ u64 bad;
    const LowLatencyParams& p = params.common;
    const Shape shape(p);
    Call call(p);
    const Shared shared(memory, &bad, p, shape);
    call.heed_exclusions();
    sources.clear(call, shape, shared.words);
    if (p.phases & LL_SEND && !(p.phases & LL_REJECT)) {
        send(params, call, shape, shared);
    } else {
        __syncthreads();
    }
    bool here = true;
    if (threadIdx.x < RECEIVERS) {
        if (p.phases & LL_REJECT) {
            here = reject(call, shape, sources, shared.words);
        } else if (p.phases & LL_RECEIVE) {
            here = receive(params, call, shape, shared, sources);
        }
    }
    leave_call(call, !here);
    add_waits(call, shape, sources, params.wait_stats);
}
