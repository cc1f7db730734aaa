// Rows through shared memory by bulk copies: a warp's ring of buffers, with loads ahead of stores.
//
// A row is cut into chunks of a buffer's size. Lane 0 issues loads; each lane issues the stores to
// its own targets, and waits for them. Needs Hopper; without it the ring takes nothing.
#pragma once

#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
#define HAS_BULK 1
#else
#define HAS_BULK 0
#endif

// Warps of a block that have a ring, buffers of a ring, and stores that may still be reading theirs.
constexpr u32 BULK_WARPS = 4;
constexpr u32 BULK_BUFFERS = 7;
constexpr u32 BULK_LAG = 3;
constexpr u32 BULK_AHEAD = BULK_BUFFERS - BULK_LAG;
// Chunks behind the newest store that are certainly written when a warp looks.
constexpr int BULK_DONE_LAG = 8;
// Rows of a warp that are on their way: more than chunks can be, and a power of two.
constexpr u32 BULK_ROWS = 32;

// Targets of a lane: ranks `lane` and `lane + 32`.
template <u32 PER_LANE>
struct BulkShared {
    u64 barriers[BULK_WARPS][BULK_BUFFERS];
    u64 targets[BULK_WARPS][BULK_BUFFERS][PER_LANE][32];
    u32 bytes[BULK_WARPS][BULK_BUFFERS];
    // Which unit a row belongs to.
    u32 units[BULK_WARPS][BULK_ROWS];
};

// The ring of one of the first BULK_WARPS warps. All lanes make every call.
template <u32 PER_LANE>
struct BulkRing {
    BulkShared<PER_LANE>& shared;
    u32 warp, chunk, buffers;
    // Counters of units, or 0; chunks loaded and stored, rows begun, and rows that are done.
    u32* done;
    u32 loads, stores, rows, rows_done, chunks_per_row;

    // `memory` has BULK_WARPS * BULK_BUFFERS buffers of `chunk_bytes`.
    __device__ BulkRing(BulkShared<PER_LANE>& s, u8* memory, u32 chunk_bytes, u32 row_bytes, u32* counters)
        : shared(s), warp(threadIdx.x / 32), chunk(chunk_bytes), done(counters), loads(0), stores(0), rows(0), rows_done(0) {
        buffers = shared_address(memory) + warp * BULK_BUFFERS * chunk;
        chunks_per_row = (row_bytes + chunk - 1) / chunk;
    }

#if HAS_BULK
    __device__ __forceinline__ u32 barrier(u32 slot) const { return shared_address(&shared.barriers[warp][slot]); }

    __device__ void begin() {
        if (threadIdx.x % 32 == 0) {
            for (u32 slot = 0; slot < BULK_BUFFERS; slot++) mbarrier_init(barrier(slot), 1);
            fence_mbarrier_init();
        }
        __syncwarp();
    }

    // The buffers were used for something else before the block last met.
    __device__ void take_memory() const { fence_proxy_async(); }

    // Stores the oldest chunk that was loaded.
    __device__ void pop() {
        const u32 lane = threadIdx.x % 32, slot = stores % BULK_BUFFERS;
        while (!mbarrier_try_wait_parity(barrier(slot), stores / BULK_BUFFERS % 2)) {
        }
        const u32 bytes = shared.bytes[warp][slot];
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++) {
            const u64 to = shared.targets[warp][slot][i][lane];
            if (to) cp_async_bulk_store(reinterpret_cast<void*>(to), buffers + slot * chunk, bytes);
        }
        cp_async_bulk_commit_group();
        stores++;
    }

    // Rows whose chunks are all among the first `chunks` are done.
    __device__ void count_done(u32 chunks) {
        __syncwarp();
        const u32 complete = min(chunks / chunks_per_row, rows);
        if (done && threadIdx.x % 32 == 0) {
            for (u32 row = rows_done; row < complete; row++) {
                red_release_shared(&done[shared.units[warp][row % BULK_ROWS]], 1);
            }
        }
        rows_done = max(rows_done, complete);
    }

    // Copies `from`, `bytes` long, to the lane's targets that are not 0.
    __device__ void push_row(const u8* from, u32 bytes, const u64 (&to)[PER_LANE], u32 unit) {
        const u32 lane = threadIdx.x % 32;
        if (lane == 0) shared.units[warp][rows % BULK_ROWS] = unit;
        rows++;
        for (u32 at = 0; at < bytes; at += chunk) {
            const u32 size = min(chunk, bytes - at);
            if (loads - stores == BULK_AHEAD) {
                pop();
                cp_async_bulk_wait_group<BULK_DONE_LAG>();
                count_done(stores > BULK_DONE_LAG ? stores - BULK_DONE_LAG : 0);
            }
            // The store that used this buffer last has read it.
            cp_async_bulk_wait_group_read<BULK_LAG>();
            __syncwarp();
            const u32 slot = loads % BULK_BUFFERS;
#pragma unroll
            for (u32 i = 0; i < PER_LANE; i++) shared.targets[warp][slot][i][lane] = to[i] ? to[i] + at : 0;
            if (lane == 0) {
                shared.bytes[warp][slot] = size;
                mbarrier_arrive_expect_tx(barrier(slot), size);
                cp_async_bulk_load(buffers + slot * chunk, from + at, size, barrier(slot));
            }
            __syncwarp();
            loads++;
        }
    }

    // Everything is written when this returns.
    __device__ void end() {
        while (stores < loads) pop();
        cp_async_bulk_wait_group<0>();
        count_done(stores);
    }
#else
    __device__ void begin() {}
    __device__ void take_memory() const {}
    __device__ void push_row(const u8*, u32, const u64 (&)[PER_LANE], u32) {}
    __device__ void end() {}
#endif
};
