// Units of rows that the blocks of a launch take in turn: who is faster takes more, since links do not
// serve all SMs alike. The last warp of a block takes units for the others and publishes them.
#pragma once

#include "group.cuh"

// Units that a block has taken at a time: those that its warps work on, and the next.
constexpr u32 RING = 3;
// Which unit a word says, and above that how many the block has taken by then.
constexpr u32 UNIT_BITS = 16, NO_UNIT = (1u << UNIT_BITS) - 1;

// The units that a block has taken, in shared memory. Entry k % RING is that of the k-th, until it was
// published, which is when all its rows were done.
struct Ring {
    // `[RING]`: the units, and how many of their rows were sent.
    u32* posted;
    u32* done;

    // The threads from 0 on; the barrier is the caller's.
    __device__ __forceinline__ void clear() const {
        if (threadIdx.x < RING) posted[threadIdx.x] = 0;
    }

    __device__ __forceinline__ u32 unit(u32 k) const { return posted[k % RING] & NO_UNIT; }

    // Waits for the k-th unit. False: there is no more; `gone`: it was done without this warp.
    __device__ __forceinline__ bool wait(u32 k, u32& unit, bool& gone) const {
        u32 word;
        while ((word = ld_acquire_shared(&posted[k % RING])) >> UNIT_BITS <= k) __nanosleep(20);
        unit = word & NO_UNIT;
        gone = word >> UNIT_BITS != k + 1;
        return gone || unit != NO_UNIT;
    }

    // Lets the other warps have the k-th unit, or know that there is none. One warp.
    __device__ __forceinline__ void post(u32 k, u32 unit) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            done[k % RING] = 0;
            st_release_shared(&posted[k % RING], (k + 1) << UNIT_BITS | unit);
        }
        __syncwarp();
    }

    // A row of the k-th unit was sent by this warp.
    __device__ __forceinline__ void finish(u32 k) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) red_release_shared(&done[k % RING], 1);
    }
};

// How many units were taken before by this launch's blocks of a crew, beside the first ones. One warp.
__device__ __forceinline__ u32 take_unit(const GroupParams& p, u32 crew) {
    u32 before = 0;
    if (threadIdx.x % 32 == 0) before = atomicAdd(&p.state->taken[crew], 1);
    return __shfl_sync(~0u, before, 0);
}

// Takes units and publishes those whose rows were all sent, behind one fence for all that are ready.
// `next(k)` finds the k-th unit and makes it ready, or says NO_UNIT; `rows(unit)` says how many it has;
// `publish(k, unit)` tells the peers. The last warp.
template <class Next, class Rows, class Publish>
__device__ __forceinline__ void lead(const Ring& ring, const Next& next, const Rows& rows, const Publish& publish) {
    // Units that were taken, and published.
    u32 taken = 0, published = 0;
    bool more = true;
    while (more || published < taken) {
        if (more && taken - published < RING) {
            const u32 unit = next(taken);
            more = unit != NO_UNIT;
            ring.post(taken, unit);
            taken += more;
        }
        u32 complete = published;
        for (; complete < taken; complete++) {
            if (ld_acquire_shared(&ring.done[complete % RING]) < rows(ring.unit(complete))) break;
        }
        // All lanes have read the counts before they are cleared, and go on with what the first one saw.
        complete = __shfl_sync(~0u, complete, 0);
        if (complete == published) {
            __nanosleep(20);
            continue;
        }
        // Rows were written by other warps, whose counts were acquired above.
        fence_acq_rel_sys();
        for (; published < complete; published++) publish(published, ring.unit(published));
        __syncwarp();
    }
}
