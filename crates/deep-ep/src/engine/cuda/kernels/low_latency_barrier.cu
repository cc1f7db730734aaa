// Waits until all ranks that are not masked are here. The protocol is described in
// engine/low_latency/mod.rs.

#include "low_latency_params.cuh"

// One block, a thread per rank.
extern "C" __global__ void __launch_bounds__(64, 1) low_latency_barrier(const __grid_constant__ LowLatencyBarrierParams p) {
    const Group group(p.group);
    const u32 me = p.group.rank, rank = threadIdx.x;
    const auto word = [&](u64 at, u32 of, u32 index) { return reinterpret_cast<u64*>(group.base(of) + at) + index; };
    bool waits = rank < p.group.ranks && rank != me;
    if (p.shrink && waits) {
        waits = !(ld_relaxed_sys(p.masks) >> rank & 1) && ld_relaxed_sys(word(p.excluded_at, me, rank)) == 0;
    }
    if (waits) {
        // What was enqueued before is done before a peer goes on.
        fence_acq_rel_sys();
        st_relaxed_sys(word(p.barrier_at, rank, me), group.call);
        u32 polls = 0;
        bool here = true;
        // A peer that is ahead has written a later number.
        while (here && ld_acquire_sys(word(p.barrier_at, me, rank)) < group.call) {
            if (!p.shrink) {
                here = group.patient(polls, STAGE_BARRIER, rank);
            } else if (++polls % 64 == 0) {
                here = !group.is_gone(rank) && globaltimer() < group.deadline;
                if (here) here = ld_relaxed_sys(group.abort_word(me)) == 0;
            }
        }
        if (!here && p.shrink) {
            atomicOr(p.masks, u64(1) << rank);
            st_relaxed_sys(word(p.excluded_at, rank, me), 1);
        }
    }
    leave(group);
}
