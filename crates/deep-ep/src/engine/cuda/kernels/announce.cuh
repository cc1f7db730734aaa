// Announcements of a high-throughput call as one block sees them, and what follows from them.
#pragma once

#include "group.cuh"

// What a thread knows of the announcements.
struct Announced {
    // In shared memory: `[ranks][length]`
    u32* words;
    u32 ranks;
    // Words of an announcement that all ranks read.
    u32 length;
    u32 verdict;
    u32 verdict_rank;

    __device__ __forceinline__ u32 word(u32 rank, u32 index) const {
        return words[rank * length + index];
    }

    // Rows from `source` to `target`.
    __device__ __forceinline__ u32 rows(u32 source, u32 target) const {
        return word(source, WORD_COUNTS + target);
    }

    // Rows that `target` gets from ranks before `source`.
    __device__ __forceinline__ u32 rows_before(u32 source, u32 target) const {
        u32 sum = 0;
        for (u32 s = 0; s < source; s++) sum += rows(s, target);
        return sum;
    }
};

// Waits for the announcements of all ranks. False: a wait gave up. Called by all threads.
__device__ inline bool gather(const Group& group, Announced& out) {
    const u32 length = out.length;
    bool here = true;
    for (u32 i = threadIdx.x; i < out.ranks * length && here; i += blockDim.x) {
        const u32 source = i / length;
        u32 value = 0;
        here = group.wait_word(group.announcement(group.p.rank, source) + i % length, value, STAGE_COUNTS, source);
        out.words[i] = value;
    }
    return __syncthreads_and(here);
}

// Lets `verdict` of `rank` stand if no stronger one does.
__device__ __forceinline__ void conclude(u64* strongest, u32 verdict, u32 rank) {
    atomicMin(strongest, u64(verdict) << 32 | rank);
}

// What the counts of an announcement mean.
enum Counts {
    // Rows to each rank; they land at the rank.
    COUNTS_DISPATCH,
    // The same, and behind them the rows from each rank that a handle says.
    COUNTS_CACHED,
    // Rows to each rank when they were dispatched, which now come back; and, behind them, rows from
    // each rank, which go back.
    COUNTS_COMBINE,
};

// What all ranks conclude in the same way. Called by all threads.
__device__ inline void judge(const Group& group, Announced& out, Counts counts, bool worst) {
    __shared__ u64 strongest;
    if (threadIdx.x == 0) strongest = ~u64(0);
    __syncthreads();
    for (u32 r = threadIdx.x; r < out.ranks; r += blockDim.x) {
        if (out.word(r, WORD_STATUS) != STATUS_OK) {
            conclude(&strongest, VERDICT_REJECTED, r);
            continue;
        }
        // A rejecting rank has no terms, so it is not compared.
        u32 first = 0;
        while (first < r && out.word(first, WORD_STATUS) != STATUS_OK) first++;
        for (u32 w = WORD_TERMS; w <= WORD_SCALES; w++) {
            if (out.word(r, w) != out.word(first, w)) conclude(&strongest, VERDICT_DIFFER, r);
        }
        u64 rows = 0;
        for (u32 s = 0; s < out.ranks; s++) {
            if (counts != COUNTS_COMBINE) {
                rows += out.rows(s, r);
            } else if (s != r) {
                rows += out.rows(r, s);
            }
            if (counts != COUNTS_DISPATCH) {
                const bool agree = out.rows(s, r) == out.word(r, WORD_COUNTS + out.ranks + s);
                if (!agree && out.word(s, WORD_STATUS) == STATUS_OK) conclude(&strongest, VERDICT_HANDLE, r);
            }
        }
        if (rows > out.word(r, WORD_CAPACITY)) conclude(&strongest, worst ? VERDICT_OVERFLOW : VERDICT_GROW, r);
    }
    __syncthreads();
    // Every thread has its own `out`.
    out.verdict = strongest == ~u64(0) ? u32(VERDICT_OK) : u32(strongest >> 32);
    out.verdict_rank = u32(strongest);
    __syncthreads();
}

// Tells the host, which waits for `result` or else looks at the report later. One thread.
__device__ inline void tell_verdict(const Group& group, const Announced& all, u64* result, u32 ticket) {
    const u32 rank = all.verdict == VERDICT_OK ? 0 : all.verdict_rank;
    const u32 status = all.verdict == VERDICT_REJECTED ? all.word(rank, WORD_STATUS) : u32(STATUS_OK);
    u64 detail[2] = {0, 0};
    if (all.verdict == VERDICT_REJECTED) {
        const u8* text = group.text(group.p.rank, rank);
        detail[0] = reinterpret_cast<const u64*>(text)[0];
        detail[1] = reinterpret_cast<const u64*>(text)[1];
    } else if (all.verdict == VERDICT_DIFFER) {
        // Every rank hears of the first one that differs from itself: which word, whose, and both.
        const u32 me = group.p.rank;
        for (u32 r = 0; r < all.ranks && detail[0] == 0; r++) {
            for (u32 w = WORD_TERMS; w <= WORD_SCALES; w++) {
                if (all.word(r, w) == all.word(me, w)) continue;
                detail[0] = u64(1) << 63 | u64(w) << 32 | r;
                detail[1] = u64(all.word(me, w)) << 32 | all.word(r, w);
                break;
            }
        }
    } else if (all.verdict == VERDICT_OVERFLOW || all.verdict == VERDICT_GROW) {
        detail[0] = all.rows_before(all.ranks, rank);
        detail[1] = all.word(rank, WORD_CAPACITY);
    }
    Report* report = group.p.report;
    // One text at a time: that of the verdict which the host has not read.
    if (status == STATUS_HOST && (result != nullptr || report->verdict == 0)) {
        const u8* text = group.text(group.p.rank, rank);
        for (u32 i = 0; i < TEXT_BYTES; i++) report->text[i] = text[i];
    }
    // A rank knows what it rejected itself, also if another one did so too.
    const bool own = all.word(group.p.rank, WORD_STATUS) == STATUS_HOST;
    if (result == nullptr && all.verdict != VERDICT_OK && !own && report->verdict == 0) {
        report->verdict_rank = rank;
        report->verdict_operation = group.p.operation;
        report->verdict_status = status;
        report->verdict_detail[0] = detail[0];
        report->verdict_detail[1] = detail[1];
        fence_acq_rel_sys();
        st_relaxed_sys(&report->verdict, all.verdict);
    }
    if (result == nullptr) return;
    // The text is there before the host sees the verdict.
    fence_acq_rel_sys();
    const auto tell = [&](u32 at, u32 value) { st_relaxed_sys(result + at, u64(ticket) << 32 | value); };
    tell(1, rank);
    tell(2, status);
    for (u32 i = 0; i < 4; i++) tell(3 + i, u32(detail[i / 2] >> (i % 2 * 32)));
    tell(0, all.verdict);
}
