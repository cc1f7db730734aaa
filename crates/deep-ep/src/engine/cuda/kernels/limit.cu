// What the memory and the links of a GPU can do: the kernels of `deep-ep bench --limit`.
//
// Constants: CHUNK_BYTES, WARPS, BUFFERS and LAG of bulk_copy, UNROLL of store_copy.

#include "limit_params.cuh"
#include "ptx.cuh"

// Copies by plain 16-byte loads and stores, UNROLL of them in flight per thread.
extern "C" __global__ void __launch_bounds__(1024, 1) store_copy(const CopyParams p) {
    uint4* target = reinterpret_cast<uint4*>(p.target);
    const uint4* source = reinterpret_cast<const uint4*>(p.source);
    const u64 count = p.bytes / 16;
    const u64 stride = u64(gridDim.x) * blockDim.x;
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + (UNROLL - 1) * stride < count; i += UNROLL * stride) {
        uint4 value[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) value[k] = source[i + k * stride];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) target[i + k * stride] = value[k];
    }
    for (; i < count; i += stride) target[i] = source[i];
}

#if __CUDA_ARCH__ >= 900

// Copies by bulk loads into shared memory and bulk stores out of it. Each warp has BUFFERS chunks;
// its first lane keeps BUFFERS - LAG loads ahead of the store that is issued, and up to LAG stores
// reading their buffer.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) bulk_copy(const CopyParams p) {
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr u32 AHEAD = BUFFERS - LAG;
    if (threadIdx.x % 32 != 0) return;
    const u32 warp = threadIdx.x / 32;
    const u32 buffers = shared_address(shared) + warp * BUFFERS * CHUNK_BYTES;
    const u32 barriers = shared_address(shared) + WARPS * BUFFERS * CHUNK_BYTES + warp * BUFFERS * 8;
    for (u32 b = 0; b < BUFFERS; b++) mbarrier_init(barriers + b * 8, 1);
    fence_mbarrier_init();

    const u64 chunks = p.bytes / CHUNK_BYTES;
    const u64 first = u64(blockIdx.x) * WARPS + warp;
    const u64 stride = u64(gridDim.x) * WARPS;
    const auto load = [&](u64 chunk, u32 buffer) {
        const u32 barrier = barriers + buffer * 8;
        mbarrier_arrive_expect_tx(barrier, CHUNK_BYTES);
        cp_async_bulk_load(buffers + buffer * CHUNK_BYTES, p.source + chunk * CHUNK_BYTES, CHUNK_BYTES, barrier);
    };
    // The next chunk to load and its buffer.
    u64 next = first;
    u32 next_buffer = 0;
    for (; next_buffer < AHEAD && next < chunks; next += stride) load(next, next_buffer++);
    u32 buffer = 0, parity = 0;
    // Whether the buffers of loads have been used before.
    bool reused = next_buffer == BUFFERS;
    if (reused) next_buffer = 0;
    for (u64 chunk = first; chunk < chunks; chunk += stride) {
        while (!mbarrier_try_wait_parity(barriers + buffer * 8, parity)) {
        }
        cp_async_bulk_store(p.target + chunk * CHUNK_BYTES, buffers + buffer * CHUNK_BYTES, CHUNK_BYTES);
        cp_async_bulk_commit_group();
        if (++buffer == BUFFERS) buffer = 0, parity ^= 1;
        if (next < chunks) {
            // The store of LAG chunks ago was the last to read this buffer.
            if (reused) cp_async_bulk_wait_group_read<LAG>();
            load(next, next_buffer);
            next += stride;
            if (++next_buffer == BUFFERS) next_buffer = 0, reused = true;
        }
    }
    // Shared memory must not go to another block, nor the kernel end, before the writes are done.
    cp_async_bulk_wait_group<0>();
}

#endif

// Waits until `*flag` is `value`; false if `deadline` passes first.
__device__ __forceinline__ bool wait_for(const u32* flag, u32 value, u64 deadline) {
    // The timer is looked at now and then, so that it does not slow the polling.
    for (u32 polls = 1; ld_acquire_sys(flag) != value; polls++) {
        if (polls % 256 == 0 && globaltimer() > deadline) return false;
    }
    return true;
}

// One thread per side bounces a flag: a release store into the other side's memory, an acquire
// poll of the own. Between two GPUs each runs one block; on one GPU block 1 is the other side.
extern "C" __global__ void __launch_bounds__(32, 1) round_trip(const RoundTripParams p) {
    if (threadIdx.x != 0) return;
    const bool second = blockIdx.x != 0;
    u32* mine = second ? p.theirs : p.mine;
    u32* theirs = second ? p.mine : p.theirs;
    const bool begins = (p.begins != 0) != second;
    const u64 start = globaltimer();
    u32 trip = 0;
    while (trip < p.trips) {
        if (begins) st_release_sys(theirs, trip + 1);
        if (!wait_for(mine, trip + 1, start + p.timeout)) break;
        if (!begins) st_release_sys(theirs, trip + 1);
        trip++;
    }
    if (!begins) return;
    p.result->nanoseconds = globaltimer() - start;
    p.result->trips = trip;
    // The host reads it after the kernel has ended.
    p.result->state = trip == p.trips ? 1 : 2;
}
