// What the low-latency kernels have in common. The protocol is described in
// engine/low_latency/mod.rs.
//
// Constants, each 0 if it is known only at run time: RANKS, TOP_K, HIDDEN. Where HIDDEN is known, the
// caller's rows are aligned to 16 bytes.
#pragma once

#include "announce.cuh"
#include "low_latency_params.cuh"

// A kernel for any shape needs more registers. `threads` in engine/low_latency/mod.rs is the same.
constexpr u32 THREADS = HIDDEN == 0 ? 512 : 1024;
constexpr u32 WARPS = THREADS / 32;
// Threads that receive: the last warp publishes instead what all have written.
constexpr u32 RECEIVERS = THREADS - 32;
constexpr bool ALIGNED = HIDDEN != 0;
// No expert: nothing of a choice concerns the rank that reads it.
constexpr u32 NO_PLACE = ~0u;

// A barrier of the threads that receive, beside that of all threads.
__device__ __forceinline__ void meet_receivers() {
    asm volatile("bar.sync 1, %0;" ::"n"(RECEIVERS) : "memory");
}

// Words 0 to 3 of an announcement must agree. Those behind, for these calls:
constexpr u32 WORD_CHUNK = WORD_CAPACITY;

// The shape, from constants where they are known.
struct Shape {
    u32 ranks, top_k, hidden, local_experts, rows;

    __device__ explicit Shape(const LowLatencyParams& p)
        : ranks(RANKS ? RANKS : p.group.ranks),
          top_k(TOP_K ? TOP_K : p.top_k),
          hidden(HIDDEN ? HIDDEN : p.hidden),
          local_experts(p.experts / ranks),
          rows(ranks * p.max_tokens) {}
};

// A call in the eyes of one thread.
struct Call {
    const LowLatencyParams& p;
    Group group;
    // Masked when the launch began.
    u64 masked;

    __device__ explicit Call(const LowLatencyParams& params)
        : p(params), group(params.group), masked(params.shrink ? ld_relaxed_sys(params.masks) : 0) {}

    __device__ __forceinline__ u32 me() const { return p.group.rank; }

    __device__ __forceinline__ u64 half() const { return group.call & 1; }

    // Whether the launch does all of the call.
    __device__ __forceinline__ bool is_whole() const { return p.phases & LL_SEND && p.phases & LL_RECEIVE; }

    __device__ __forceinline__ bool is_masked(u32 rank) const { return masked >> rank & 1; }

    // Words that this call's number is in, in the region of `at`.
    __device__ __forceinline__ u8* tagged(u32 at) const {
        return group.base(at) + p.tagged_at + half() * p.tagged_half;
    }

    __device__ __forceinline__ u8* rows(u32 at) const { return group.base(at) + p.rows_at + half() * p.rows_half; }

    // The flag of a chunk of `source`.
    __device__ __forceinline__ u64* flag(u32 at, u32 source, u32 chunk) const {
        return group.flag(at, u32(half()) * p.group.ranks + source, chunk);
    }

    // Called between two looks at a word that is not there yet. False: leave, or with `shrink`, if
    // nobody gave up the buffer, go on without the peer.
    __device__ __forceinline__ bool patient(u32& polls, u32 stage, u32 peer) const {
        if (!p.shrink) return group.patient(polls, stage, peer);
        polls++;
        if (polls % 32 == 0 && group.is_over()) return false;
        if (polls % 512 != 0) return true;
        const bool gone = ::is_gone(p.group, peer);
        // What a rank wrote before it went is there by the next time.
        if (gone && polls < GONE) {
            polls |= GONE;
            return true;
        }
        return !gone && globaltimer() < group.deadline;
    }

    // Whether a wait that failed concerns only the peer.
    __device__ __forceinline__ bool goes_on() const {
        return p.shrink && !group.is_over();
    }

    __device__ __forceinline__ bool wait_word(const u64* address, u32& value, u32 stage, u32 peer) const {
        u32 polls = 0;
        u64 word;
        while (u32((word = ld_relaxed_sys(address)) >> 32) != group.tag()) {
            if (!patient(polls, stage, peer)) return false;
        }
        value = u32(word);
        return true;
    }

    // Waits for word `w` of an announcement, behind its fixed words: 0 if the rank rejects the call, makes
    // another one or counts other experts, since then there may be no such word.
    __device__ __forceinline__ bool wait_count(const u64* announcement, u32 w, u32& value, u32 peer) const {
        u32 polls = 0;
        u64 word;
        while (u32((word = ld_relaxed_sys(announcement + w)) >> 32) != group.tag()) {
            const u64 status = ld_relaxed_sys(announcement + WORD_STATUS);
            const u64 experts = ld_relaxed_sys(announcement + WORD_EXPERTS);
            const u64 terms = ld_relaxed_sys(announcement + WORD_TERMS);
            const auto is = [&](u64 word, u32 value) { return word == group.word(value); };
            const auto known = [&](u64 word) { return u32(word >> 32) == group.tag(); };
            if (known(status) && known(experts) && known(terms) &&
                !(is(status, STATUS_OK) && is(experts, p.experts) && is(terms, p.terms))) {
                value = 0;
                return true;
            }
            if (!patient(polls, STAGE_COUNTS, peer)) return false;
        }
        value = u32(word);
        return true;
    }

    // Waits for a flag: what was written before it is seen afterwards.
    __device__ __forceinline__ bool wait_flag(const u64* flag, u32& first, u32& end, u32 stage, u32 peer) const {
        u32 polls = 0;
        while (!group.test_flag(flag, first, end)) {
            if (!patient(polls, stage, peer)) return false;
        }
        return true;
    }

    // Lets a rank know that the others go on without it.
    __device__ void exclude(u32 rank) const {
        atomicOr(p.masks, u64(1) << rank);
        st_relaxed_sys(reinterpret_cast<u64*>(group.base(rank) + p.excluded_at) + me(), 1);
    }

    // Masks the ranks that go on without this one: they may use their landing memory for later
    // calls. All threads.
    __device__ void heed_exclusions() {
        if (!p.shrink) return;
        const u64 before = masked;
        const u64* words = reinterpret_cast<const u64*>(group.base(me()) + p.excluded_at);
        for (u32 r = 0; r < p.group.ranks; r++) {
            if (r != me() && ld_relaxed_sys(words + r) != 0) masked |= u64(1) << r;
        }
        if (blockIdx.x == 0 && threadIdx.x == 0 && masked != before) atomicOr(p.masks, masked);
    }

    // What all blocks of a launch conclude about `rank`: the first to say something decides.
    __device__ bool decide(u32 rank, bool here) const {
        u64* decision = &p.shared->decisions[rank];
        const u64 mine = group.call << 1 | here;
        const u64 old = ld_relaxed_sys(decision);
        u64 decided = old;
        if (old >> 1 != group.call) {
            decided = atomicCAS(decision, old, mine);
            if (decided == old) {
                decided = mine;
                if (!here) exclude(rank);
            }
        }
        return decided & 1;
    }
};

// The block's place in the order in which blocks have read the call's number.
__shared__ u32 place_entered;

// A launch that does all of a call reads the number that it writes itself: the last block to have
// read it writes it. Notes the block's place among them, behind a barrier that is behind all reads of
// the block. It is not needed before the end, so the last warp does it when it has time.
__device__ inline void enter_call(const Call& call) {
    if (!call.is_whole() || threadIdx.x != THREADS - 1) return;
    fence_acq_rel_gpu();
    place_entered = atomicAdd(&call.p.group.state->arrived, 1);
}

// Ends a launch; called by all threads of all blocks. Unless it does all of a call, no thread of a
// launch reads the number that the launch writes (a receive reads what its send wrote and the next
// send what the receive wrote), so it needs no block to wait for another.
__device__ inline void leave_call(const Call& call, bool failed) {
    if (__syncthreads_or(failed) && threadIdx.x == 0) {
        fence_acq_rel_gpu();
        report_failure(call.p.group);
    }
    const GroupParams& p = call.p.group;
    if (call.is_whole()) {
        if (threadIdx.x != THREADS - 1 || place_entered != gridDim.x - 1) return;
        p.state->arrived = 0;
        p.state->calls = call.group.call;
        return;
    }
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const u64 before = ld_relaxed_sys(&p.state->calls);
    const bool over = call.p.phases & LL_RECEIVE || call.p.phases == LL_REJECT;
    p.second_state->calls = over ? before + 1 : before;
    // A reject has one block, and no other launch reads its number.
    if (over && call.p.phases & LL_REJECT) p.state->calls = before + 1;
}

__device__ __forceinline__ i64 choice_at(const LowLatencyParams& p, u32 token, u32 k) {
    const u64 at = token * p.topk.row_stride + k * p.topk.column_stride;
    return p.index_bytes == 8 ? reinterpret_cast<const i64*>(p.topk.data)[at]
                              : i64(reinterpret_cast<const i32*>(p.topk.data)[at]);
}

// The rank whose expert a choice is; 64: none.
__device__ __forceinline__ u32 rank_of(const LowLatencyParams& p, const Shape& shape, i64 id) {
    return id >= 0 && id < p.experts ? u32(id) / shape.local_experts : 64;
}

// Ranks below 64 that lanes have, as bits. All lanes.
__device__ __forceinline__ u64 ranks_of_lanes(u32 rank) {
    const u32 low = __reduce_or_sync(~0u, rank < 32 ? 1u << rank : 0u);
    if (RANKS && RANKS <= 32) return low;
    const u32 high = __reduce_or_sync(~0u, rank >= 32 && rank < 64 ? 1u << (rank - 32) : 0u);
    return u64(high) << 32 | low;
}

// Counters in shared memory, of the tokens before the one that is looked at.
struct Counters {
    // `[experts]`: tokens that chose each.
    u32* experts;
    // Lowest place of an id that is out of range.
    u64* bad;

    // Made ready. All threads; the barrier is the caller's.
    __device__ __forceinline__ void clear(const LowLatencyParams& p) const {
        for (u32 i = threadIdx.x; i < p.experts; i += THREADS) experts[i] = 0;
        if (threadIdx.x == 0) *bad = ~u64(0);
    }
};

// Where a lane's choice is: lanes look at up to 32 / top_k tokens side by side.
struct Place {
    u32 slot, k;
    // Tokens that a warp looks at.
    u32 tokens;

    __device__ explicit Place(const Shape& shape)
        : slot(threadIdx.x % 32 / shape.top_k), k(threadIdx.x % 32 % shape.top_k), tokens(32 / shape.top_k) {}
};

// The choices of tokens as the lanes of a warp see them.
struct Choices {
    // -1: none.
    i32 expert;
    u32 rank;
    // Lanes with the same token and expert. 0: no choice.
    u32 same_expert;

    // The lane has choice `id` of `token`, or of none if that is negative. All lanes.
    __device__ Choices(const LowLatencyParams& p, const Shape& shape, const Counters& counters, const Place& place,
                       u32 token, i64 id)
        : same_expert(0) {
        const bool valid = id >= 0 && id < p.experts;
        if (id >= i64(p.experts)) atomicMin(counters.bad, u64(token) * shape.top_k + place.k);
        expert = valid ? i32(id) : -1;
        rank = rank_of(p, shape, id);
        const u32 lane = place.slot * shape.top_k;
#pragma unroll 8
        for (u32 k = 0; k < shape.top_k; k++) {
            same_expert |= u32(__shfl_sync(~0u, expert, lane + k) == expert) << k;
        }
        same_expert = valid ? same_expert << lane : 0;
    }

    // Whether this lane is the first of those with the same expert.
    __device__ __forceinline__ bool leads_expert() const {
        return same_expert != 0 && u32(__ffs(same_expert)) - 1 == threadIdx.x % 32;
    }
};

// The lane's choice of the tokens from `first` on, before `end`.
__device__ __forceinline__ i64 look_at(const LowLatencyParams& p, const Place& place, u32 first, u32 end) {
    const u32 token = first + place.slot;
    return place.slot < place.tokens && token < end ? choice_at(p, token, place.k) : -1;
}

// Counts the tokens before a block's own. All threads.
struct CountBefore {
    Place place;
    u32 begin, end;
    // The lane's first choice, on its way.
    i64 id;

    __device__ CountBefore(const LowLatencyParams& p, const Shape& shape, u32 end)
        : place(shape), begin(threadIdx.x / 32 * place.tokens), end(end), id(look_at(p, place, begin, end)) {}

    // Behind a barrier that is behind `clear`; the barrier behind which counters can be read is the
    // caller's.
    __device__ __forceinline__ void run(const LowLatencyParams& p, const Shape& shape, const Counters& counters) {
        const u32 stride = WARPS * place.tokens;
#pragma unroll 1
        for (u32 first = begin; first < end; first += stride) {
            const i64 next = look_at(p, place, first + stride, end);
            const Choices choices(p, shape, counters, place, first + place.slot, id);
            if (choices.leads_expert()) atomicAdd(&counters.experts[choices.expert], 1);
            id = next;
        }
    }
};

// The choices of a token in one warp, and its places: how many rows this rank's tokens before have at
// each chosen expert. Counts the token. All lanes.
struct Places {
    Choices choices;
    u32 position;

    // `id` is the lane's choice.
    __device__ Places(const LowLatencyParams& p, const Shape& shape, const Counters& counters, const Place& place,
                      u32 token, i64 id)
        : choices(p, shape, counters, place, token, id) {
        position = choices.same_expert != 0 ? counters.experts[choices.expert] : 0;
        __syncwarp();
        if (choices.leads_expert()) counters.experts[choices.expert] = position + 1;
        __syncwarp();
    }

    // Local expert and position as one number.
    __device__ __forceinline__ u32 place(const LowLatencyParams& p, const Shape& shape) const {
        return (u32(choices.expert) - choices.rank * shape.local_experts) * p.max_tokens + position;
    }
};

// Calls `write(rank)` for every rank that is not masked: other ranks first, so that what is written
// is on its way while this rank's own is.
template <class Write>
__device__ __forceinline__ void for_each_rank(const Call& call, const Shape& shape, const Write& write) {
#pragma unroll 1
    for (u32 i = 1; i <= shape.ranks; i++) {
        u32 to = call.me() + i;
        if (to >= shape.ranks) to -= shape.ranks;
        if (!call.is_masked(to)) write(to);
    }
}

// Tells every rank, this one included, the terms of the call, and what it gets for each of its
// experts if `counts` is not 0. One block, its threads that receive.
__device__ inline void announce(const Call& call, const Shape& shape, u64 bad, const u32* counts) {
    const LowLatencyParams& p = call.p;
    const u32 status = p.phases & LL_REJECT ? u32(STATUS_HOST) : bad == ~u64(0) ? u32(STATUS_OK) : u32(STATUS_EXPERT_ID);
    if (status != STATUS_OK) {
        const u8* host = reinterpret_cast<const u8*>(p.reject_text);
        const u64 value =
            status == STATUS_HOST ? 0 : u64(choice_at(p, u32(bad / shape.top_k), u32(bad % shape.top_k)));
        const u64 place = id_place(bad, shape.top_k);
        for (u32 i = threadIdx.x; i < shape.ranks * TEXT_BYTES; i += RECEIVERS) {
            const u32 at = i % TEXT_BYTES, to = i / TEXT_BYTES;
            if (call.is_masked(to)) continue;
            call.group.text(to, call.me())[at] = status == STATUS_HOST ? host[at]
                                                 : at < 8              ? u8(place >> (at * 8))
                                                 : at < 16             ? u8(value >> (at % 8 * 8))
                                                                       : u8(0);
        }
        fence_acq_rel_sys();
        meet_receivers();
        fence_acq_rel_sys();
    }
    const u32 length = WORD_COUNTS + (counts ? shape.local_experts : 0);
    for (u32 i = threadIdx.x; i < shape.ranks * length; i += RECEIVERS) {
        const u32 to = i / length, w = i % length;
        if (call.is_masked(to)) continue;
        const u32 value = w == WORD_TERMS       ? p.terms
                          : w == WORD_ROW_BYTES ? shape.hidden * 2
                          : w == WORD_EXPERTS   ? p.experts
                          : w == WORD_SCALES    ? p.max_tokens
                          : w == WORD_CHUNK     ? p.chunk_tokens
                          : w == WORD_TOKENS    ? p.tokens
                          : w == WORD_STATUS    ? status
                          : w >= WORD_COUNTS    ? counts[to * shape.local_experts + w - WORD_COUNTS]
                                                : 0;
        st_relaxed_sys(call.group.announcement(to, call.me()) + w, call.group.word(value));
    }
}

// All announcements as one block sees them, in shared memory.
struct Sources {
    Announced all;
    // Ranks that were waited for in vain; ranks that take part.
    u64 lost;
    u64 present;
    u32 failed;
    // The most chunks of a source that takes part, and the most tokens of one.
    u32 most_chunks, most_tokens;
    // Chunks of each source's tokens.
    u32 chunks[64];
    // Clock cycles waited for the announcement of each, and for its rows.
    i64 waited[64], waited_rows[64];

    // Made ready for `gather`. All threads; the barrier is the caller's.
    __device__ void clear(const Call& call, const Shape& shape, u32* words) {
        if (threadIdx.x < 64) waited[threadIdx.x] = waited_rows[threadIdx.x] = 0;
        if (threadIdx.x != 0) return;
        all.words = words;
        all.ranks = shape.ranks;
        all.length = WORD_COUNTS;
        lost = 0;
        failed = 0;
        present = everyone(shape) & ~call.masked;
    }

    static __device__ __forceinline__ u64 everyone(const Shape& shape) {
        return shape.ranks == 64 ? ~u64(0) : (u64(1) << shape.ranks) - 1;
    }
};

// Waits for the announcements; `counts`, if not 0, is in shared memory and gets those `[ranks]
// [local_experts]` behind. A warp that has its words calls `meanwhile()`, which may not wait for
// longer than the others. False: a wait gave up. Called by the threads that receive, behind a barrier
// that is behind `Sources::clear`.
template <class Meanwhile>
__device__ inline bool gather(const Call& call, const Shape& shape, Sources& sources, u32* words, u32* counts,
                              const Meanwhile& meanwhile) {
    const u32 length = WORD_COUNTS + (counts ? shape.local_experts : 0);
    const i64 start = clock64();
    for (u32 i = threadIdx.x; i < shape.ranks * length; i += RECEIVERS) {
        const u32 source = i / length, w = i % length;
        u32 value = 0;
        bool here = !call.is_masked(source);
        if (here) {
            const u64* words_of = call.group.announcement(call.me(), source);
            here = w >= WORD_COUNTS ? call.wait_count(words_of, w, value, source)
                                    : call.wait_word(words_of + w, value, STAGE_COUNTS, source);
            if (!here) {
                atomicOr(&sources.lost, u64(1) << source);
                if (!call.goes_on()) sources.failed = 1;
            }
            if (w == WORD_STATUS && source != call.me()) sources.waited[source] = clock64() - start;
        }
        if (w >= WORD_COUNTS) {
            counts[source * shape.local_experts + w - WORD_COUNTS] = here ? value : 0;
        } else {
            words[source * WORD_COUNTS + w] = value;
        }
    }
    __syncwarp();
    meanwhile();
    meet_receivers();
    if (!call.p.shrink) return sources.failed == 0;
    // Ranks that are not there do not disagree.
    for (u32 i = threadIdx.x; i < shape.ranks * WORD_COUNTS; i += RECEIVERS) {
        const u32 source = i / WORD_COUNTS, w = i % WORD_COUNTS;
        if (!call.is_masked(source) && !(sources.lost >> source & 1)) continue;
        words[i] = w <= WORD_SCALES ? words[call.me() * WORD_COUNTS + w] : 0;
    }
    if (threadIdx.x == 0) sources.present &= ~sources.lost;
    meet_receivers();
    return sources.failed == 0;
}

// What all ranks conclude from the announcements, and how much they bring. One warp.
__device__ inline void judge(const Call& call, const Shape& shape, Sources& sources) {
    Announced& all = sources.all;
    const u32 lane = threadIdx.x % 32;
    u32 strongest = ~0u, chunks = 0, tokens = 0, first = ~0u;
    for (u32 r = lane; r < shape.ranks; r += 32) {
        if (all.word(r, WORD_STATUS) == STATUS_OK) first = min(first, r);
    }
    // A rank that rejects the call has no terms, so it is not compared.
    first = __reduce_min_sync(~0u, first);
    for (u32 r = lane; r < shape.ranks; r += 32) {
        bool differs = false;
        const bool rejects = all.word(r, WORD_STATUS) != STATUS_OK;
        for (u32 w = WORD_TERMS; w <= WORD_SCALES && !rejects; w++) differs |= all.word(r, w) != all.word(first, w);
        if (rejects || differs) strongest = min(strongest, (rejects ? VERDICT_REJECTED : VERDICT_DIFFER) << 8 | r);
        const u32 chunk = all.word(r, WORD_CHUNK), count = all.word(r, WORD_TOKENS);
        // No more than have a flag: a peer that wrote nonsense makes no flag outside them.
        sources.chunks[r] = chunk == 0 ? 0 : min((count + chunk - 1) / chunk, call.p.group.flags);
        chunks = max(chunks, sources.chunks[r]);
        tokens = max(tokens, min(chunk, call.p.max_tokens));
    }
    strongest = __reduce_min_sync(~0u, strongest);
    chunks = __reduce_max_sync(~0u, chunks);
    tokens = __reduce_max_sync(~0u, tokens);
    if (lane != 0) return;
    all.verdict = strongest == ~0u ? u32(VERDICT_OK) : strongest >> 8;
    all.verdict_rank = strongest == ~0u ? 0 : strongest & 0xff;
    sources.most_chunks = chunks;
    sources.most_tokens = tokens;
}

// With `shrink`: waits for everything that every rank sends and agrees with the other blocks about
// who takes part, so that all put rows at the same places. `wanted` are ranks whose flags are
// expected, and how many chunks each has. False: a wait gave up. Called by the threads that receive.
template <class Chunks>
__device__ inline bool settle(const Call& call, const Shape& shape, Sources& sources, const Chunks& chunks) {
    if (!call.p.shrink) return true;
    for (u32 s = 0; s < shape.ranks; s++) {
        if (!(sources.present >> s & 1)) continue;
        const u32 count = chunks(s);
        for (u32 c = threadIdx.x; c < count; c += RECEIVERS) {
            u32 first, end;
            if (call.wait_flag(call.flag(call.me(), s, c), first, end, STAGE_ROWS, s)) continue;
            atomicOr(&sources.lost, u64(1) << s);
            if (!call.goes_on()) sources.failed = 1;
        }
    }
    meet_receivers();
    if (sources.failed) return false;
    u64 present = 0;
    for (u32 s = threadIdx.x; s < shape.ranks; s += RECEIVERS) {
        if (call.is_masked(s)) continue;
        if (call.decide(s, !(sources.lost >> s & 1))) present |= u64(1) << s;
    }
    if (threadIdx.x == 0) sources.present = 0;
    meet_receivers();
    if (present) atomicOr(&sources.present, present);
    meet_receivers();
    return true;
}

// Adds what block 0 waited for each rank. A call that was given up has no caller whose statistics these
// are. Called by all threads, behind the barrier of `leave_call`.
__device__ inline void add_waits(const Call& call, const Shape& shape, const Sources& sources, u64 stats) {
    const u32 r = threadIdx.x;
    if (!stats || call.p.discard || blockIdx.x != 0 || r >= shape.ranks) return;
    reinterpret_cast<i64*>(stats)[r] += sources.waited[r] + sources.waited_rows[r];
}

// Leaves a verdict for the host to find. One block.
__device__ inline void tell(const Call& call, const Sources& sources) {
    if (threadIdx.x != 0) return;
    // The text of a reject was written before the words that were seen.
    if (sources.all.verdict == VERDICT_REJECTED) fence_acq_rel_sys();
    tell_verdict(call.group, sources.all, nullptr, 0);
}

// Takes part in a call that this rank rejects. One block, its threads that receive.
__device__ inline bool reject(const Call& call, const Shape& shape, Sources& sources, u32* words) {
    if (!(call.p.phases & LL_RECEIVE)) announce(call, shape, 0, nullptr);
    if (call.p.phases & LL_SEND) return true;
    if (!gather(call, shape, sources, words, nullptr, [] {})) return false;
    if (threadIdx.x < 32) judge(call, shape, sources);
    meet_receivers();
    tell(call, sources);
    return true;
}

// Warps that work on one row of so many 16-byte words, and which of them this one is.
struct Team {
    u32 warps, count, index, first;

    __device__ Team(u32 words, u32 most, u32 available) {
        warps = min(max((words + 31) / 32, 1u), most);
        count = available / warps;
        index = threadIdx.x / 32 / warps;
        first = (threadIdx.x / 32 % warps) * 32;
    }

    __device__ __forceinline__ bool works() const { return index < count; }
    __device__ __forceinline__ u32 stride() const { return warps * 32; }
};

// 16 bytes of a caller's row, which may lie at any even address.
__device__ __forceinline__ uint4 load_word(const u8* row, u32 word, bool aligned) {
    if (aligned) return ld_input(reinterpret_cast<const uint4*>(row) + word);
    const volatile u16* from = reinterpret_cast<const volatile u16*>(row) + word * 8;
    u32 part[4];
#pragma unroll
    for (int i = 0; i < 4; i++) part[i] = u32(from[2 * i]) | u32(from[2 * i + 1]) << 16;
    return make_uint4(part[0], part[1], part[2], part[3]);
}

// The same for storing, at any address.
__device__ __forceinline__ void store_word(u8* row, u32 word, uint4 value, bool aligned) {
    if (aligned) {
        reinterpret_cast<uint4*>(row)[word] = value;
        return;
    }
    const u32 part[4] = {value.x, value.y, value.z, value.w};
    u8* to = row + u64(word) * 16;
#pragma unroll
    for (int i = 0; i < 16; i++) to[i] = u8(part[i / 4] >> (i % 4 * 8));
}
