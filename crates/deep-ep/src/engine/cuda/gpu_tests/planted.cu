// A kernel that moves rows as ours do, with the fault that PLANT names, for tools that look for faults.
#include "rows.cuh"

constexpr u32 PLANT_OUT_OF_BOUNDS = 1, PLANT_RACE = 2, PLANT_UNINITIALISED = 3;
constexpr u32 STAGED = 64;

struct PlantedParams {
    // `[rows, row_bytes]` each. Nobody has written the last row of `from`, which is behind these.
    u8* to;
    const u8* from;
    u32 rows;
    u32 row_bytes;
};

extern "C" __global__ void __launch_bounds__(256) planted(const PlantedParams p) {
    __shared__ uint4 staged[STAGED];
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    // The row behind the last has no place.
    const u32 rows = p.rows + (PLANT == PLANT_OUT_OF_BOUNDS);
    for (u32 row = warp; row < rows; row += warps) {
        const u32 from = row + (PLANT == PLANT_UNINITIALISED);
        copy_row<false>(p.to + u64(row) * p.row_bytes, p.from + u64(from) * p.row_bytes, p.row_bytes);
    }
    __syncthreads();
    // The words of the first row, reversed: a warp writes what another one reads.
    const u32 at = threadIdx.x;
    if (at < STAGED) staged[at] = reinterpret_cast<const uint4*>(p.from)[at];
    if (PLANT != PLANT_RACE) __syncthreads();
    if (at < STAGED) reinterpret_cast<uint4*>(p.to)[at] = staged[STAGED - 1 - at];
}
