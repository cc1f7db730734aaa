// Low-latency combine. The protocol is described in engine/low_latency/mod.rs.
//
// Constants, each 0 if it is known only at run time: RANKS, TOP_K, HIDDEN, WIRE.

// Registers are short here.
#define COLD inline

#include "logfmt.cuh"
#include "low_latency.cuh"

// Warps that receive; the last one publishes.
constexpr u32 DATA_WARPS = RECEIVERS / 32;
// Rows that a lane loads before it adds the first: of this rank's experts, and sums of ranks.
#if __CUDA_ARCH__ < 900
constexpr int PARTS_AHEAD = WIRE == WIRE_LOGFMT ? 1 : 2;
#else
// Several ranks share a token's choices.
constexpr int PARTS_AHEAD = WIRE == WIRE_LOGFMT ? 2 : TOP_K > 8 || RANKS > 2 ? 3 : 4;
#endif
constexpr int SUMS_AHEAD = 4;
// Whether rows are looked for before all announcements are there. For later GPUs the compiler has no
// registers for it.
constexpr bool GUESSES = __CUDA_ARCH__ < 1000;

__device__ __forceinline__ u32 wire_of(const LowLatencyParams& p) { return WIRE ? WIRE : p.format; }

// Adds to a word in shared memory; the block sees what this thread wrote before, if it looks, and this
// thread what those wrote that have added before.
__device__ __forceinline__ u32 atom_acq_rel_shared(u32* address, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(shared_address(address)), "r"(value)
                 : "memory");
    return before;
}

// Dynamic shared memory. `shared_bytes` in engine/low_latency/combine.rs sizes it.
struct Shared {
    // Sending.
    Counters counters;
    // `[local_experts][ranks]`: where the rows of each source begin.
    u32* begin;
    // `[ranks][WORD_COUNTS]`
    u32* words;
    // `[turns][ranks]`: warps that have written a token's sum.
    u32* done;

    __device__ Shared(u32* at, u64* bad, const LowLatencyParams& p, const Shape& shape) {
        const auto take = [&](u32 count) {
            u32* taken = at;
            at += count;
            return taken;
        };
        words = take(shape.ranks * WORD_COUNTS);
        counters.experts = take(p.experts);
        counters.bad = bad;
        begin = take(p.experts);
        done = take(turns(p) * shape.ranks);
    }

    // Chunks of a source that a block works on, at most.
    static __device__ __forceinline__ u32 turns(const LowLatencyParams& p) {
        return (p.group.flags + gridDim.x - 1) / gridDim.x;
    }
};

// Announces, and tells every rank the weights of this rank's choices and where the rows are that
// they belong to. Waits for nobody.
__device__ inline void send(const LowLatencyCombineParams& params, const Call& call, const Shape& shape,
                            const Shared& shared) {
    const LowLatencyParams& p = call.p;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 begin = min(blockIdx.x * p.chunk_tokens, p.tokens);
    const u32 end = min(begin + p.chunk_tokens, p.tokens);
    const Place place(shape);
    const auto weight_of = [&](u32 token) {
        if (lane >= shape.top_k || warp != 0 || token >= end) return 0u;
        const u64 at = token * params.weights.row_stride + lane * params.weights.column_stride;
        return reinterpret_cast<const u32*>(params.weights.data)[at];
    };
    // A token's choices and weights are on their way while those before are looked at.
    i64 next_id = warp == 0 ? look_at(p, place, begin, min(begin + 1, end)) : -1;
    u32 next_weight = weight_of(begin);
    CountBefore count(p, shape, begin);
    shared.counters.clear(p);
    __syncthreads();
    count.run(p, shape, shared.counters);
    __syncthreads();
    if (warp == 0) {
        for (u32 token = begin; token < end; token++) {
            const i64 id = next_id;
            const u32 weight = next_weight;
            next_id = look_at(p, place, token + 1, min(token + 2, end));
            next_weight = weight_of(token + 1);
            const Places places(p, shape, shared.counters, place, token, id);
            if (lane >= shape.top_k) continue;
            const u32 row = places.place(p, shape);
            const u64 entry = ((u64(call.me()) * p.max_tokens + token) * shape.top_k + lane) * 2;
            for_each_rank(call, shape, [&](u32 to) {
                st_relaxed_sys(reinterpret_cast<u64*>(call.tagged(to)) + entry,
                               call.group.word(places.choices.rank == to ? row : NO_PLACE), call.group.word(weight));
            });
        }
    }
    if (threadIdx.x == 0) {
        atomicAdd(&p.shared->wire_bytes, u64(end - begin) * shape.ranks * shape.top_k * 16);
    }
    if (blockIdx.x != gridDim.x - 1) return;
    __syncthreads();
    // The last block has counted all tokens.
    if (threadIdx.x < RECEIVERS) announce(call, shape, *shared.counters.bad, nullptr);
}

// The tagged words of a token's choices in this rank's landing memory.
__device__ __forceinline__ const u64* choice_words(const Call& call, const Shape& shape, u32 owner, u32 token) {
    const u64 entry = ((u64(owner) * call.p.max_tokens + token) * shape.top_k + threadIdx.x % 32) * 2;
    return reinterpret_cast<const u64*>(call.tagged(call.me())) + entry;
}

// The rows of this rank's experts for a token, in its lanes' order of choices.
struct Parts {
    // Where the row should be, or 0; its weight; the token that the row is of.
    u64 row;
    float weight;
    u32 found;
    // Lanes with a choice of this rank's experts, and of those the ones with a row.
    u32 chosen, lanes;

    __device__ __forceinline__ u64 row_of(u32 lane) const { return __shfl_sync(~0u, row, lane); }
    __device__ __forceinline__ float weight_of(u32 lane) const { return __shfl_sync(~0u, weight, lane); }

    __device__ __forceinline__ void locate(const LowLatencyCombineParams& params, u32 expert, u32 number, bool some) {
        row = some ? params.x.data + expert * params.x.strides[0] + number * params.x.strides[1] : 0;
        lanes = __ballot_sync(~0u, some);
    }

    // Whether every row is its owner's token's. All lanes.
    __device__ __forceinline__ bool verified(u32 token) const {
        return !__any_sync(~0u, (chosen >> threadIdx.x % 32 & 1) && found != token);
    }

    // Finds the rows, to be verified, from the lane's choice. All lanes.
    __device__ __forceinline__ void find(const LowLatencyCombineParams& params, const Call& call, const Shape& shape,
                                         const Shared& shared, u32 owner, u32 place) {
        const u32 most = call.p.max_tokens, expert = place / most;
        const bool some = place != NO_PLACE && expert < shape.local_experts;
        const u32 number = some ? shared.begin[expert * shape.ranks + owner] + place % most : ~0u;
        const bool inside = number < shape.rows;
        found = ~0u;
        if (inside) found = reinterpret_cast<const volatile u32*>(params.src_info)[u64(expert) * shape.rows + number];
        chosen = __ballot_sync(~0u, some);
        locate(params, expert, number, inside);
    }

    // Looks for rows that are not where their owner expects them, because its choices were others
    // when the token was dispatched. All lanes.
    __device__ void search(const LowLatencyCombineParams& params, const Call& call, const Shape& shape, u32 owner,
                           u32 token) {
        u32 expert = 0, number = 0;
        bool some = false;
        if (chosen >> threadIdx.x % 32 & 1) {
            expert = u32(ld_relaxed_sys(choice_words(call, shape, owner, token))) / call.p.max_tokens;
            const u64 at = u64(expert) * shape.ranks + owner;
            const u64 range = expert < shape.local_experts
                                  ? reinterpret_cast<const volatile u64*>(params.layout_range)[at]
                                  : 0;
            const volatile u32* info = reinterpret_cast<const volatile u32*>(params.src_info) + u64(expert) * shape.rows;
            const u32 end = u32(min((range >> 32) + u32(range), u64(shape.rows)));
            number = u32(range >> 32);
            while (number < end && info[number] != token) number++;
            some = number < end;
        }
        __syncwarp();
        locate(params, expert, number, some);
        found = token;
    }
};

// Looks once at the lane's choice of a token and its weight. False: they are not there yet.
__device__ __forceinline__ bool look_at_choice(const Call& call, const Shape& shape, u32 owner, u32 token, u32& place,
                                               float& weight) {
    place = NO_PLACE;
    weight = 0.0f;
    if (threadIdx.x % 32 >= shape.top_k) return true;
    u64 first, second;
    ld_relaxed_sys(choice_words(call, shape, owner, token), first, second);
    if (u32(first >> 32) != call.group.tag() || u32(second >> 32) != call.group.tag()) return false;
    place = u32(first);
    weight = __uint_as_float(u32(second));
    return true;
}

// Waits for a token's weights and finds its rows, to be verified. False: a wait gave up. All lanes.
__device__ inline bool find_parts(const LowLatencyCombineParams& params, const Call& call, const Shape& shape,
                                  const Shared& shared, u32 owner, u32 token, Parts& parts) {
    u32 place, polls = 0;
    bool here = true;
    while (here && !look_at_choice(call, shape, owner, token, place, parts.weight)) {
        here = call.patient(polls, STAGE_WEIGHTS, owner);
    }
    if (!__all_sync(~0u, here)) return false;
    parts.find(params, call, shape, shared, owner, place);
    return true;
}

// sum = fma(weight, word, sum)
__device__ __forceinline__ void add_weighted(float* sum, uint4 word, float weight) {
    const u32 part[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = __fmaf_rn(weight, __uint_as_float(part[i] << 16), sum[2 * i]);
        sum[2 * i + 1] = __fmaf_rn(weight, __uint_as_float(part[i] & 0xffff0000u), sum[2 * i + 1]);
    }
}

__device__ __forceinline__ uint4 round_word(const float* sum) {
    return make_uint4(cvt_bf16x2(sum[0], sum[1]), cvt_bf16x2(sum[2], sum[3]), cvt_bf16x2(sum[4], sum[5]),
                      cvt_bf16x2(sum[6], sum[7]));
}

// Words of the rows of the lowest lanes of `lanes`, which it takes off: AHEAD of them are loaded
// before the first is added.
template <int AHEAD>
struct Batch {
    u32 taken;
    uint4 value[AHEAD];

    // `word(lane, some)` loads one, if there is `some`. All lanes.
    template <class Word>
    __device__ __forceinline__ void load(u32& lanes, const Word& word) {
        taken = lanes;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            value[i] = word((__ffs(lanes) - 1) & 31, lanes != 0);
            lanes &= lanes - 1;
        }
    }

    // Adds each with its `weight(lane)`. All lanes.
    template <class Weight>
    __device__ __forceinline__ void add_to(float* sum, const Weight& weight) const {
        u32 lanes = taken;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const float by = weight((__ffs(lanes) - 1) & 31);
            if (lanes != 0) add_weighted(sum, value[i], by);
            lanes &= lanes - 1;
        }
    }
};

// Writes the sum of a token's rows to `to`. False: a row is not the token's, nothing was written. All
// lanes of all warps of the team.
__device__ inline bool write_sum(const Shape& shape, const Team& team, const Parts& parts, u32 token, u8* to,
                                 bool aligned, u32 wire, u32* written) {
    const u32 words = shape.hidden / 8;
    u32 word = team.first + threadIdx.x % 32;
    const auto load = [&](u32 lane, bool some) {
        const u8* row = reinterpret_cast<const u8*>(parts.row_of(lane));
        return some && word < words ? load_word(row, word, aligned) : make_uint4(0, 0, 0, 0);
    };
    const auto weight = [&](u32 lane) { return parts.weight_of(lane); };
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    u32 rest = parts.lanes;
    bool verified = false;
    for (;;) {
        Batch<PARTS_AHEAD> batch;
        batch.load(rest, load);
        // The first words are on their way while rows are verified.
        if (!verified && !parts.verified(token)) return false;
        verified = true;
        batch.add_to(sum, weight);
        if (rest != 0) continue;
        if (wire == WIRE_LOGFMT) {
            logfmt_encode(to, word, shape.hidden, sum, written);
        } else if (word < words) {
            reinterpret_cast<uint4*>(to)[word] = round_word(sum);
        }
        word += team.stride();
        if (word - threadIdx.x % 32 >= words) return true;
        rest = parts.lanes;
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = 0.0f;
    }
}

// Copies each row to its choice's slot; a row that is not there counts as zeros. All lanes of all
// warps of the team.
__device__ inline void write_rows(const LowLatencyCombineParams& params, const Call& call, const Shape& shape,
                                  const Team& team, Parts& parts, u32 owner, u32 token, u8* to, bool aligned) {
    const u32 words = shape.hidden / 8, lane = threadIdx.x % 32;
    const u64 stride = params.common.row_stride;
    if (!parts.verified(token)) parts.search(params, call, shape, owner, token);
    for (u32 rest = parts.chosen; rest != 0; rest &= rest - 1) {
        const u32 k = __ffs(rest) - 1;
        const u8* row = reinterpret_cast<const u8*>(parts.row_of(k));
        for (u32 word = team.first + lane; word < words; word += team.stride()) {
            const uint4 value = row ? load_word(row, word, aligned) : make_uint4(0, 0, 0, 0);
            reinterpret_cast<uint4*>(to + k * stride)[word] = value;
        }
    }
}

// A block's turns at the chunks of all owners, in the order in which it works on them: other ranks'
// first. `turn` counts chunks of one owner.
struct Turns {
    const Call& call;
    const Shape& shape;
    const Sources& sources;

    __device__ __forceinline__ bool has(u32 turn) const {
        return blockIdx.x + turn / shape.ranks * gridDim.x < sources.most_chunks;
    }

    // Tokens of the turn's chunk; 0 if there is none.
    __device__ u32 find(u32 turn, u32& owner, u32& chunk, u32& first) const {
        owner = (call.me() + 1 + turn % shape.ranks) % shape.ranks;
        chunk = blockIdx.x + turn / shape.ranks * gridDim.x;
        if (!(sources.present >> owner & 1) || chunk >= call.p.group.flags) return 0;
        const u32 grain = sources.all.word(owner, WORD_CHUNK);
        const u32 tokens = min(sources.all.word(owner, WORD_TOKENS), call.p.max_tokens);
        const u64 begin = u64(chunk) * grain;
        first = u32(begin);
        return begin < tokens ? min(grain, tokens - first) : 0;
    }
};

// Of the warps of a block, in shared memory.
struct Progress {
    // Warps whose wait gave up.
    u32 stopped;
    // Bytes of sums.
    u32 written;
    // Warps that have all announcements that they wait for, and warps that have written their sums.
    u32 announced, finished;
};

// Publishes other ranks' chunks as they become complete: all that are, behind one fence. The last warp.
__device__ inline void publish(const Call& call, const Shared& shared, const Turns& turns, const Team& team,
                               const Progress& block) {
    const u32 lane = threadIdx.x % 32;
    for (u32 first = 0; turns.has(first);) {
        u32 end = first;
        // Lane l looks at turn first + l.
        u32 owner = 0, chunk = 0, token;
        const u32 turn = first + lane;
        const bool exists = turns.has(turn);
        const u32 tokens = exists ? turns.find(turn, owner, chunk, token) : 0;
        while (end == first) {
            const bool over = exists && ld_acquire_shared(&shared.done[turn]) >= tokens * team.warps;
            const u32 pending = ~__ballot_sync(~0u, over);
            end = first + (pending == 0 ? 32 : __ffs(pending) - 1);
            if (end == first && __shfl_sync(~0u, ld_acquire_shared(&block.stopped), 0)) return;
        }
        if (turn < end && tokens != 0 && owner != call.me()) {
            // Sums were written by other warps, whose counts were acquired above.
            fence_acq_rel_sys();
            st_relaxed_sys(call.flag(owner, call.me(), chunk), call.group.word(0), call.group.word(0));
        }
        __syncwarp();
        first = end;
    }
    if (lane == 0) atomicAdd(&call.p.shared->wire_bytes, u64(block.written));
}

// A warp has written all its sums. The last one of the block publishes its chunks of this rank's own
// tokens: who reads them is on this GPU, so that it need not wait for what goes over the link. All
// lanes.
__device__ inline void publish_own(const Call& call, const Sources& sources, const Team& team, Progress& block) {
    const u32 me = call.me(), lane = threadIdx.x % 32;
    u32 before = 0;
    if (lane == 0) before = atom_acq_rel_shared(&block.finished, 1);
    if (__shfl_sync(~0u, before, 0) + 1 != team.count * team.warps || !(sources.present >> me & 1)) return;
    // All lanes publish what lane 0 has seen counted.
    __syncwarp();
    for (u32 chunk = blockIdx.x + lane * gridDim.x; chunk < sources.chunks[me]; chunk += 32 * gridDim.x) {
        fence_acq_rel_gpu();
        st_relaxed_sys(call.flag(me, me, chunk), call.group.word(0), call.group.word(0));
    }
}

// The rows of one token, found by a warp: those of token `message % max_tokens` of rank
// `message / max_tokens`, if it is not NONE.
struct Found {
    static constexpr u32 NONE = ~0u;
    u32 message;
    Parts parts;

    // Looks for what is probably the team's first token while announcements are still to come: it is, if
    // chunks of the other ranks are as large as here. Does not wait longer than they do. All lanes.
    __device__ __forceinline__ void guess(const LowLatencyCombineParams& params, const Call& call, const Shape& shape,
                                          const Shared& shared, const Team& team, const Progress& block) {
        message = NONE;
        const u32 grain = call.p.chunk_tokens;
        u32 owner = call.me() + 1, index = team.index;
        for (; index >= grain; index -= grain) owner++;
        const u32 token = blockIdx.x * grain + index;
        if (!team.works() || owner > call.me() + shape.ranks || token >= call.p.max_tokens) return;
        if (owner >= shape.ranks) owner -= shape.ranks;
        u32 place;
        bool seen;
        while (!(seen = look_at_choice(call, shape, owner, token, place, parts.weight))) {
            if (ld_acquire_shared(&block.announced) == DATA_WARPS) break;
        }
        if (!__all_sync(~0u, seen)) return;
        parts.find(params, call, shape, shared, owner, place);
        message = owner * call.p.max_tokens + token;
    }
};

// Teams of warps that write sums: two words per lane, so that two tokens of the usual size are in work.
__device__ __forceinline__ Team data_team(const Shape& shape) {
    return Team((shape.hidden / 8 + 1) / 2, DATA_WARPS, DATA_WARPS);
}

// Sums this block's share of all ranks' tokens; `found` may be the first. False: a wait gave up. The
// threads that receive.
__device__ inline bool write_partials(const LowLatencyCombineParams& params, const Call& call, const Shape& shape,
                                      const Shared& shared, const Turns& turns, Found& found, Progress& block) {
    const LowLatencyParams& p = call.p;
    const u32 wire = wire_of(p), words = shape.hidden / 8;
    const Team team = data_team(shape);
    if (!team.works()) return true;
    const u32 lane = threadIdx.x % 32;
    const bool aligned = ALIGNED || (params.x.data | params.x.strides[0] | params.x.strides[1]) % 16 == 0;
    Parts& parts = found.parts;
    // Teams take the tokens of all turns in turn.
    u32 turn = 0;
#pragma unroll 1
    for (u32 index = team.index;; index += team.count) {
        for (; index >= turns.sources.most_tokens && turns.has(turn); index -= turns.sources.most_tokens) turn++;
        if (!turns.has(turn)) break;
        u32 owner, chunk, first;
        if (index >= turns.find(turn, owner, chunk, first)) continue;
        const u32 token = first + index;
        bool here = GUESSES && found.message == owner * p.max_tokens + token;
        // The rows of the next token take the place of what was guessed.
        found.message = Found::NONE;
        if (!here) here = find_parts(params, call, shape, shared, owner, token, parts);
        if (!here) {
            // A rank that went away gets nothing more.
            if (call.goes_on()) {
                if (lane == 0) call.exclude(owner);
                parts.chosen = 0;
            } else {
                if (lane == 0) red_release_shared(&block.stopped, 1);
                return false;
            }
        }
        if (parts.chosen != 0 && wire == WIRE_EXACT) {
            u8* to = call.rows(owner) + u64(token) * shape.top_k * p.row_stride;
            write_rows(params, call, shape, team, parts, owner, token, to, aligned);
        } else if (parts.chosen != 0) {
            u8* to = call.rows(owner) + (u64(call.me()) * p.max_tokens + token) * p.row_stride;
            for (;;) {
                if (write_sum(shape, team, parts, token, to, aligned, wire, &block.written)) break;
                parts.search(params, call, shape, owner, token);
            }
        }
        if (wire != WIRE_LOGFMT && team.first == 0 && lane == 0) {
            atomicAdd(&block.written, (wire == WIRE_EXACT ? __popc(parts.chosen) : u32(parts.chosen != 0)) * words * 16);
        }
        __syncwarp();
        if (lane == 0) red_release_shared(&shared.done[turn], 1);
    }
    publish_own(call, turns.sources, team, block);
    return true;
}

// Makes shared memory ready for the sums. All threads; the barrier is the caller's.
__device__ inline void prepare(const LowLatencyCombineParams& params, const Shape& shape, const Shared& shared,
                               Progress& block) {
    if (threadIdx.x == 0) block.stopped = block.written = block.announced = block.finished = 0;
    const u32 ranges = shape.local_experts * shape.ranks;
    // By the last warps first: the first one writes choices.
    for (u32 i = THREADS - 1 - threadIdx.x; i < ranges; i += THREADS) {
        shared.begin[i] = u32(reinterpret_cast<const u64*>(params.layout_range)[i] >> 32);
    }
    for (u32 i = threadIdx.x; i < Shared::turns(params.common) * shape.ranks; i += THREADS) shared.done[i] = 0;
}

// What block 0 does when it knows what all have announced. All threads.
__device__ inline void conclude_call(const Call& call, const Shape& shape, const Sources& sources) {
    tell(call, sources);
    // The receiving launch of this rank reads it.
    if (threadIdx.x == 0) call.p.shared->verdict = call.group.word(sources.all.verdict);
    if (!call.p.shrink) return;
    for (u32 r = threadIdx.x; r < shape.ranks; r += THREADS) {
        if (sources.lost >> r & 1) call.exclude(r);
    }
}

// Waits for all ranks' weights and writes the sums of this rank's experts. False: a wait of this warp
// gave up. The last warp comes back when all is published, the others when they have written their
// part. All threads.
__device__ inline bool partials(const LowLatencyCombineParams& params, const Call& call, const Shape& shape,
                                const Shared& shared, Sources& sources) {
    __shared__ Progress block;
    prepare(params, shape, shared, block);
    __syncthreads();
    Found found;
    if (threadIdx.x >= RECEIVERS) {
        enter_call(call);
    } else {
        const bool here = gather(call, shape, sources, shared.words, nullptr, [&] {
            if (threadIdx.x % 32 == 0) red_release_shared(&block.announced, 1);
            if (GUESSES) found.guess(params, call, shape, shared, data_team(shape), block);
        });
        if (here && threadIdx.x < 32) judge(call, shape, sources);
    }
    __syncthreads();
    if (sources.failed) return false;
    if (blockIdx.x == 0) conclude_call(call, shape, sources);
    if (sources.all.verdict != VERDICT_OK) return true;
    const Turns turns{call, shape, sources};
    if (threadIdx.x < RECEIVERS) return write_partials(params, call, shape, shared, turns, found, block);
    publish(call, shared, turns, data_team(shape), block);
    return true;
}

// The ranks that have a sum for a token, as bits, and this lane's choice.
struct Expected {
    u64 ranks;
    // Lanes whose choice counts.
    u32 lanes;

    __device__ Expected(const LowLatencyParams& p, const Shape& shape, u64 present, u32 token) {
        const u32 lane = threadIdx.x % 32;
        const u32 rank = lane < shape.top_k ? rank_of(p, shape, choice_at(p, token, lane)) : 64;
        const bool counts = rank < 64 && present >> rank & 1;
        lanes = __ballot_sync(~0u, counts);
        ranks = ranks_of_lanes(counts ? rank : 64);
    }
};

// Waits for the sums of a token. False: a wait gave up. All lanes.
__device__ inline bool wait_parts(const Call& call, Sources& sources, u64 ranks, u32 token, i64 start) {
    const u32 lane = threadIdx.x % 32;
    bool here = true;
    for (u32 r = lane; r < (RANKS ? RANKS : call.p.group.ranks) && here; r += 32) {
        if (!(ranks >> r & 1)) continue;
        u32 first, second;
        here = call.wait_flag(call.flag(call.me(), r, token / call.p.chunk_tokens), first, second, STAGE_ROWS, r);
        if (blockIdx.x == 0 && r != call.me()) atomicMax(&sources.waited_rows[r], clock64() - start);
    }
    here = __all_sync(~0u, here);
    // What lanes have seen published, all read.
    __syncwarp();
    return here;
}

// Sums what came back for a token. All lanes of all warps of the team.
__device__ inline void sum_token(const LowLatencyCombineParams& params, const Call& call, const Shape& shape,
                                 const Team& team, const Expected& expected, u32 token, bool aligned) {
    const LowLatencyParams& p = call.p;
    const u32 wire = wire_of(p), words = shape.hidden / 8, lane = threadIdx.x % 32;
    const u8* rows = call.rows(call.me());
    u8* out = reinterpret_cast<u8*>(params.out) + token * params.out_stride;
    float weight = 0.0f;
    if (wire == WIRE_EXACT && lane < shape.top_k) {
        const u64 at = token * params.weights.row_stride + lane * params.weights.column_stride;
        weight = reinterpret_cast<const float*>(params.weights.data)[at];
    }
#pragma unroll 1
    for (u32 first = team.first; first < words; first += team.stride()) {
        const u32 word = first + lane;
        float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        if (wire == WIRE_LOGFMT) {
            for (u64 rest = word < words ? expected.ranks : 0; rest != 0; rest &= rest - 1) {
                const u32 rank = __ffsll(rest) - 1;
                logfmt_add(rows + (u64(rank) * p.max_tokens + token) * p.row_stride, word, shape.hidden, sum);
            }
        } else if (wire == WIRE_EXACT) {
            const auto load = [&](u32 k, bool some) {
                const u8* row = rows + (u64(token) * shape.top_k + k) * p.row_stride;
                return some && word < words ? ld_landed(reinterpret_cast<const uint4*>(row) + word)
                                            : make_uint4(0, 0, 0, 0);
            };
            for (u32 rest = expected.lanes; rest != 0;) {
                Batch<SUMS_AHEAD> batch;
                batch.load(rest, load);
                batch.add_to(sum, [&](u32 k) { return __shfl_sync(~0u, weight, k); });
            }
        } else {
            for (u32 base = 0; base < shape.ranks; base += 32) {
                const auto load = [&](u32 rank, bool some) {
                    const u8* row = rows + (u64(base + rank) * p.max_tokens + token) * p.row_stride;
                    return some && word < words ? ld_landed(reinterpret_cast<const uint4*>(row) + word)
                                                : make_uint4(0, 0, 0, 0);
                };
                for (u32 rest = u32(expected.ranks >> base); rest != 0;) {
                    Batch<SUMS_AHEAD> batch;
                    batch.load(rest, load);
                    batch.add_to(sum, [](u32) { return 1.0f; });
                }
            }
        }
        if (word < words) store_word(out, word, round_word(sum), aligned);
    }
}

// Waits for the sums of this rank's tokens and adds them up. False: a wait gave up. The threads that
// receive.
__device__ inline bool receive(const LowLatencyCombineParams& params, const Call& call, const Shape& shape,
                               Sources& sources) {
    const LowLatencyParams& p = call.p;
    // The send has waited for all ranks, so a call that was given up needs nothing more. A verdict of
    // an earlier call: the send failed.
    if (p.discard) return true;
    const bool came_about = p.phases & LL_PARTIALS
                                ? sources.all.verdict == VERDICT_OK
                                : ld_relaxed_sys(&p.shared->verdict) == call.group.word(VERDICT_OK);
    if (!came_about) return true;
    const i64 start = clock64();
    if (p.shrink) {
        // A rank that was late for the partials may have come.
        if (threadIdx.x == 0) {
            sources.present = Sources::everyone(shape) & ~call.masked;
            sources.lost = 0;
        }
        meet_receivers();
        const u32 chunks = (p.tokens + p.chunk_tokens - 1) / p.chunk_tokens;
        if (!settle(call, shape, sources, [&](u32) { return chunks; })) return false;
    }
    const Team team(shape.hidden / 8, DATA_WARPS, DATA_WARPS);
    const bool aligned = ALIGNED || (params.out | params.out_stride) % 16 == 0;
    const u64 stride = u64(team.count) * gridDim.x;
    bool here = true;
    for (u64 at = u64(team.index) * gridDim.x + blockIdx.x; team.works() && at < p.tokens && here; at += stride) {
        const Expected expected(p, shape, sources.present, u32(at));
        here = p.shrink || wait_parts(call, sources, expected.ranks, u32(at), start);
        if (here) sum_token(params, call, shape, team, expected, u32(at), aligned);
    }
    return here;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    low_latency_combine(const __grid_constant__ LowLatencyCombineParams params) {
    extern __shared__ __align__(16) u32 memory[];
    __shared__ Sources sources;
    __shared__ u64 bad;
    // The call's number: no register has to hold it while sums are written.
    __shared__ u64 number;
    const LowLatencyParams& p = params.common;
    const Shape shape(p);
    Call call(p);
    const Shared shared(memory, &bad, p, shape);
    if (threadIdx.x == 0) number = call.group.call;
    call.heed_exclusions();
    sources.clear(call, shape, shared.words);
    bool here = true;
    if (p.phases & LL_REJECT) {
        __syncthreads();
        if (threadIdx.x < RECEIVERS) here = reject(call, shape, sources, shared.words);
    } else {
        if (p.phases & LL_SEND) send(params, call, shape, shared);
        if (p.phases & LL_PARTIALS) {
            here = partials(params, call, shape, shared, sources);
            call.group.call = number;
        }
        if (p.phases & LL_RECEIVE) {
            // A warp goes on when it has written its sums, and does not wait until all are published.
            // With `shrink` all must agree first who takes part; a launch that only receives begins here.
            bool stops = !here;
            if (p.shrink || !(p.phases & LL_PARTIALS)) stops = __syncthreads_or(stops);
            if (!stops && threadIdx.x < RECEIVERS) here = receive(params, call, shape, sources);
        }
    }
    leave_call(call, !here);
    add_waits(call, shape, sources, params.wait_stats);
}
