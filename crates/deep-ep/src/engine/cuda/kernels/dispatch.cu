// High-throughput dispatch. The protocol is described in engine/mod.rs.
//
// Constants, each 0 if it is known only at run time: RANKS, TOP_K, ROW_BYTES.

#include "dispatch_receive.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(16) u8 memory[];
    const Shape shape(p);
    Shared shared(memory, p, shape);
    const Group group(p.group);
    // Slots are found by every launch that needs them.
    const bool counted = (p.phases == PHASE_RECEIVE && p.discard) || count(p, shape, shared, group);
    if (counted && p.phases & (PHASE_MOVE | PHASE_RECEIVE) || p.phases == PHASE_REJECT) {
        if (gather(group, shared.all)) {
            place_rows(p, shape, shared);
            const Counts counts = p.route_source == ROUTES_HANDLE ? COUNTS_CACHED : COUNTS_DISPATCH;
            judge(group, shared.all, counts, p.worst);
            if (p.phases & PHASE_MOVE && blockIdx.x == 0) {
                write_prefix(p, shape, shared);
                tell_counts(p, shape, shared, group);
            }
            if (shared.all.verdict == VERDICT_OK) {
                if (p.phases & PHASE_MOVE) {
                    move(p, shape, shared, group);
                    write_slots(p, shape, shared);
                }
                if (p.phases & PHASE_RECEIVE) receive(p, shape, shared, group);
            }
        }
    }
    leave(group);
}

// Counts and routes of a batch, on their own.
extern "C" __global__ void __launch_bounds__(256) dispatch_layout(const LayoutParams p) {
    const u32 local = p.experts / p.ranks;
    for (u64 token = u64(blockIdx.x) * blockDim.x + threadIdx.x; token < p.tokens; token += u64(gridDim.x) * blockDim.x) {
        u64 ranks = 0;
        for (u32 k = 0; k < p.top_k; k++) {
            const i64 id = index_at(p.topk, p.index_bytes, u32(token), k);
            if (id < 0 || id >= p.experts) continue;
            ranks |= u64(1) << (u32(id) / local);
            atomicAdd(reinterpret_cast<u32*>(p.expert_counts) + id, 1);
        }
        for (u32 r = 0; r < p.ranks; r++) {
            const bool goes = ranks >> r & 1;
            reinterpret_cast<u8*>(p.is_token_in_rank)[token * p.ranks + r] = goes;
            if (goes) atomicAdd(reinterpret_cast<u32*>(p.rank_counts) + r, 1);
        }
    }
}
