// What every kernel of a call knows about its group: where control words are, who the ranks are, how
// long to wait. `engine/params.rs` declares the same structs; `engine/mod.rs` has the protocol.
#pragma once

#include "ptx.cuh"

// Words of an announcement, in front of its counts. Every word is 64 bits: the low half of the call
// number above, 32 bits of value below, so a word that is there is whole and of this call.
enum AnnounceWord {
    // Operation, flags and top-k, see `terms_word` in engine/params.rs.
    WORD_TERMS = 0,
    // Bytes of a row.
    WORD_ROW_BYTES = 1,
    // Experts over all ranks.
    WORD_EXPERTS = 2,
    // 4-byte words of scales of a row.
    WORD_SCALES = 3,
    // Where the rank's landing block begins in its region, in units of LANDING_UNIT.
    WORD_LANDING = 4,
    // Rows that the block has room for.
    WORD_CAPACITY = 5,
    // dispatch: tokens of the rank. combine: first row of the reader's part of the landing block.
    WORD_TOKENS = 6,
    // 0, or why the call is rejected.
    WORD_STATUS = 7,
    // Tokens that share a flag.
    WORD_GRAIN = 8,
    // Rows for every rank.
    WORD_COUNTS = 9,
};

constexpr u32 LANDING_UNIT = 256;

// Values of WORD_STATUS.
enum Status {
    STATUS_OK = 0,
    // The host did not accept the arguments; the text says why.
    STATUS_HOST = 1,
    // An expert id is not below the number of experts; the text area holds where and which.
    STATUS_EXPERT_ID = 2,
};

// Token and choice of element `index` of a `[tokens, top_k]` tensor, as a reject's text has them.
__device__ __forceinline__ u64 id_place(u64 index, u32 top_k) {
    return top_k == 0 ? index : index / top_k << 8 | index % top_k;
}

// What all ranks conclude from all announcements. Smaller is stronger.
enum Verdict {
    VERDICT_REJECTED = 1,
    VERDICT_DIFFER = 2,
    VERDICT_HANDLE = 3,
    // A worst case was exceeded.
    VERDICT_OVERFLOW = 4,
    // A landing block is too small: the hosts make it larger and call again.
    VERDICT_GROW = 5,
    VERDICT_OK = 0xff,
};

// Where a kernel waits, for errors.
enum Stage {
    STAGE_NONE = 0,
    STAGE_COUNTS = 2,
    STAGE_ROWS = 4,
    STAGE_WEIGHTS = 5,
    STAGE_BLOCKS = 7,
    STAGE_BARRIER = 8,
};

constexpr u32 TEXT_BYTES = 512;

// Of one kind of launch (send or receive), in device memory of the rank.
struct CallState {
    // Calls that are over.
    u64 calls;
    // Ranks that a wait gave up on.
    u64 missing;
    // Tagged words in which the blocks of a high-throughput launch tell each other what they counted.
    u64* chunk_words;
    // Blocks at the grid barrier. Zero between launches.
    u32 arrived;
    // Blocks that are done, and LEFT_EARLY if a wait gave up. Zero between launches.
    u32 left;
    // Stage in which a wait gave up, or STAGE_NONE.
    u32 failed;
    // Units that were taken by blocks that send to other ranks, or do everything, and by the rest. Zero
    // between launches.
    u32 taken[2];
    u32 reserved;
};

// In pinned host memory: what went wrong. The host clears `state` of a reject that it has read.
struct Report {
    // 1: a wait of this rank passed its deadline; 2: another rank gave up (`abort` says who);
    // 3: a rank that it waited for is gone.
    u32 failed;
    u32 operation;
    u32 stage;
    u32 reserved;
    u64 missing;
    u64 abort;
    // Ranks that the one who gave up had waited for.
    u64 abort_missing;
    // A verdict other than VERDICT_OK of a call that nobody waits for.
    u32 verdict;
    u32 verdict_rank;
    u32 verdict_operation;
    u32 verdict_status;
    // As in a result.
    u64 verdict_detail[2];
    u8 text[TEXT_BYTES];
};

constexpr u32 SEEN_SMS_WORDS = 8;

struct GroupParams {
    // Where this GPU sees the region of every rank: u64[ranks] in device memory.
    const u64* bases;
    CallState* state;
    // The state that this launch brings forward too, because it does both halves of the call; or 0.
    CallState* second_state;
    Report* report;
    // In pinned memory: a bit for every rank that the host has seen go.
    const u64* gone;
    // A bit for every SM that a block of a high-throughput launch ran on. 0 but in tests.
    u64* seen_sms;
    // Nanoseconds that a wait may take.
    u64 timeout;
    // Offsets in every region: the abort word; `[ranks]` for whom each rank waited when it gave up, and
    // whether it has dropped its buffer; announcements `[2][ranks]`, so far apart; texts of rejects
    // `[2][ranks]`; flags `[ranks][flags]` of 16 bytes.
    u64 abort_at;
    u64 missing_at;
    u64 dropped_at;
    u64 announce_at;
    u64 announce_stride;
    u64 text_at;
    u64 flags_at;
    // Flags of one source.
    u32 flags;
    u32 rank;
    u32 ranks;
    u32 operation;
    // 1: the call is over after this launch.
    u32 advance;
    u32 reserved;
};

// How functions are compiled that waits call when something went wrong. A call needs registers of its
// own around it.
#ifndef COLD
#define COLD __noinline__
#endif

__device__ __forceinline__ u8* region_of(const GroupParams& p, u32 rank) { return reinterpret_cast<u8*>(p.bases[rank]); }

__device__ __forceinline__ u64* abort_word_of(const GroupParams& p, u32 at) {
    return reinterpret_cast<u64*>(region_of(p, at) + p.abort_at);
}

// For whom `source` waited when it gave up, in the region of `at`.
__device__ __forceinline__ u64* missing_word_of(const GroupParams& p, u32 at, u32 source) {
    return reinterpret_cast<u64*>(region_of(p, at) + p.missing_at) + source;
}

// Whether a rank writes nothing more: this rank's host has seen it go, or it has dropped its buffer.
// What it wrote before is seen by who asks first and looks then.
__device__ COLD bool is_gone(const GroupParams& p, u32 rank) {
    if (ld_relaxed_sys(p.gone) >> rank & 1) return true;
    const u64* dropped = reinterpret_cast<const u64*>(region_of(p, p.rank) + p.dropped_at) + rank;
    return ld_relaxed_sys(dropped) != 0;
}

// Set in CallState::left by whoever gives up.
constexpr u32 LEFT_EARLY = 1u << 31;

// Set in a wait's count of looks when the peer has been found missing.
constexpr u32 GONE = 1u << 31;

// Whether a rank is gone, and not because the group is over: a rank that gives up, or follows one that
// did, may leave at once, and is none that anybody waited for in vain.
__device__ COLD bool is_missing(const GroupParams& p, u32 rank) {
    if (!is_gone(p, rank)) return false;
    // Abort words were raised before anybody left because of them.
    fence_acq_rel_sys();
    return ld_relaxed_sys(abort_word_of(p, p.rank)) == 0;
}

// Somebody gave up while this thread, which has looked `polls` times, waited for `peer`.
__device__ COLD void follow_abort(const GroupParams& p, u32 stage, u32 peer, u32 polls, u64 deadline) {
    atomicOr(&p.state->left, LEFT_EARLY);
    // If it was another thread of this launch, its error names this thread's peer too, but only one that
    // is as late as the other's: the deadline is as good as over, or the peer was found missing before.
    if (atomicAdd(&p.state->failed, 0) != stage) return;
    if (polls < GONE && globaltimer() + p.timeout / 64 < deadline) return;
    atomicOr(&p.state->missing, u64(1) << peer);
}

// This thread has waited for `peer` in vain: tells all ranks to leave. Does not wait.
__device__ COLD void give_up(const GroupParams& p, u32 stage, u32 peer) {
    atomicOr(&p.state->left, LEFT_EARLY);
    atomicCAS(&p.state->failed, u32(STAGE_NONE), stage);
    const u64 bit = u64(1) << peer;
    const u64 missing = atomicOr(&p.state->missing, bit) | bit;
    fence_acq_rel_gpu();
    for (u32 r = 0; r < p.ranks; r++) st_relaxed_sys(missing_word_of(p, r, p.rank), missing);
    fence_acq_rel_sys();
    const u64 word = u64(1) << 63 | u64(p.rank) << 32 | p.operation << 8 | stage;
    for (u32 r = 0; r < p.ranks; r++) st_relaxed_sys(abort_word_of(p, r), word);
}

// Tells the host that a wait gave up.
__device__ __noinline__ void report_failure(const GroupParams& p) {
    Report* report = p.report;
    const u32 stage = atomicAdd(&p.state->failed, 0);
    const u64 missing = atomicOr(&p.state->missing, 0), abort = ld_relaxed_sys(abort_word_of(p, p.rank));
    report->operation = p.operation;
    report->stage = stage;
    report->missing = missing;
    report->abort = abort;
    // Written before the abort word that was seen.
    fence_acq_rel_sys();
    report->abort_missing = ld_relaxed_sys(missing_word_of(p, p.rank, u32(abort >> 32) % 64 % p.ranks));
    bool gone = false;
    for (u64 rest = missing; rest != 0; rest &= rest - 1) gone |= is_gone(p, __ffsll(rest) - 1);
    fence_acq_rel_sys();
    st_relaxed_sys(&report->failed, stage == STAGE_NONE ? 2u : gone ? 3u : 1u);
}

// The group in the eyes of one thread.
struct Group {
    const GroupParams& p;
    u64 call;
    u64 deadline;

    __device__ explicit Group(const GroupParams& params)
        : p(params), call(ld_relaxed_sys(&params.state->calls) + 1), deadline(globaltimer() + params.timeout) {}

    __device__ __forceinline__ u32 tag() const { return u32(call); }

    __device__ __forceinline__ u64 word(u32 value) const { return u64(tag()) << 32 | value; }

    __device__ __forceinline__ u8* base(u32 rank) const { return region_of(p, rank); }

    // The announcement of `source` in the region of `at`.
    __device__ __forceinline__ u64* announcement(u32 at, u32 source) const {
        const u64 place = (call & 1) * p.ranks + source;
        return reinterpret_cast<u64*>(base(at) + p.announce_at + place * p.announce_stride);
    }

    __device__ __forceinline__ u8* text(u32 at, u32 source) const {
        const u64 place = (call & 1) * p.ranks + source;
        return base(at) + p.text_at + place * TEXT_BYTES;
    }

    // Flag `index` of `source` in the region of `at`: two words.
    __device__ __forceinline__ u64* flag(u32 at, u32 source, u32 index) const {
        return reinterpret_cast<u64*>(base(at) + p.flags_at + (u64(source) * p.flags + index) * 16);
    }

    // Whether a rank of the group gave up.
    __device__ __forceinline__ bool is_over() const { return ld_relaxed_sys(abort_word_of(p, p.rank)) != 0; }

    // Called between two looks at a word that is not there yet. False: leave.
    __device__ bool patient(u32& polls, u32 stage, u32 peer) const {
        polls++;
        if (polls % 32 == 0 && is_over()) {
            follow_abort(p, stage, peer, polls, deadline);
            return false;
        }
        if (polls % 512 != 0) return true;
        const bool gone = is_missing(p, peer);
        // What a rank wrote before it went is there by the next time.
        if (gone && polls < GONE) {
            polls |= GONE;
            return true;
        }
        if (!gone && globaltimer() < deadline) return true;
        give_up(p, stage, peer);
        return false;
    }

    // Waits until `*address` belongs to this call; its value, or false.
    __device__ bool wait_word(const u64* address, u32& value, u32 stage, u32 peer) const {
        u32 polls = 0;
        u64 word;
        while (u32((word = ld_acquire_sys(address)) >> 32) != tag()) {
            if (!patient(polls, stage, peer)) return false;
        }
        value = u32(word);
        return true;
    }

    // Looks at a flag once; on success its two values.
    __device__ __forceinline__ bool test_flag(const u64* address, u32& first, u32& second) const {
        u64 a, b;
        ld_acquire_sys(address, a, b);
        first = u32(a), second = u32(b);
        return u32(a >> 32) == tag() && u32(b >> 32) == tag();
    }
};

// All blocks of the launch are here. `last` is set in every thread of the block that came last.
// False: a wait gave up. Called by all threads.
__device__ inline bool grid_barrier(const Group& group, bool& last) {
    __shared__ u32 ticket;
    __syncthreads();
    if (threadIdx.x == 0) {
        fence_acq_rel_gpu();
        ticket = atomicAdd(&group.p.state->arrived, 1);
        fence_acq_rel_gpu();
    }
    __syncthreads();
    last = ticket == gridDim.x - 1;
    bool here = true;
    if (threadIdx.x == 0 && !last) {
        u32 polls = 0;
        while (here && ld_acquire_gpu(&group.p.state->arrived) < gridDim.x) {
            here = group.patient(polls, STAGE_BLOCKS, group.p.rank);
        }
    }
    return __syncthreads_and(here);
}

// Ends a launch; called by all threads of all blocks, whatever happened. The last block brings the
// state forward and tells the host of a failure.
__device__ inline void leave(const Group& group) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    const GroupParams& p = group.p;
    if (p.seen_sms) atomicOr(p.seen_sms + smid() / 64 % SEEN_SMS_WORDS, u64(1) << smid() % 64);
    fence_acq_rel_gpu();
    const u32 left = atomicAdd(&p.state->left, 1);
    if ((left & ~LEFT_EARLY) != gridDim.x - 1) return;
    fence_acq_rel_gpu();
    p.state->arrived = 0;
    p.state->left = 0;
    p.state->taken[0] = p.state->taken[1] = 0;
    if (left & LEFT_EARLY) report_failure(p);
    if (p.advance) {
        p.state->calls = group.call;
        if (p.second_state) p.second_state->calls = group.call;
    }
}
