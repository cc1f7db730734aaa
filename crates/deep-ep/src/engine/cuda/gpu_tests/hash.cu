// Rows whose content follows from (rank, token, call), and a look at those that came.
#include "ptx.cuh"

constexpr u32 TOP_K = 2;

struct HashParams {
    // `[tokens, words]` of 16 bytes, to fill or to look at.
    uint4* x;
    // `[tokens, TOP_K]`, to fill.
    i64* topk;
    // `[N]`, `[ranks, ranks]` of the handle.
    const i32* src_idx;
    const i32* rank_prefix;
    // Words that are wrong, rows that came, rows that were to come.
    u64* found;
    u32 words;
    u32 rank;
    u32 ranks;
    u32 tokens;
    u32 call;
    u32 local_experts;
};

__device__ u32 mix(u32 a, u32 b) {
    u32 h = (a ^ 0x9e3779b9u) * 0x85ebca6bu + b;
    h = (h ^ h >> 15) * 0xc2b2ae35u;
    return h ^ h >> 13;
}

__device__ uint4 content(u32 rank, u32 token, u32 call, u32 word) {
    const u32 h = mix(mix(mix(rank, token), call), word);
    return make_uint4(h, h * 0x9e3779b9u, h ^ 0x55555555u, ~h);
}

__device__ u32 choice(const HashParams& p, u32 rank, u32 token, u32 k) {
    return mix(mix(rank + 64, token), p.call * TOP_K + k) % (p.ranks * p.local_experts);
}

__device__ bool goes(const HashParams& p, u32 rank, u32 token, u32 to) {
    bool any = false;
    for (u32 k = 0; k < TOP_K; k++) any |= choice(p, rank, token, k) / p.local_experts == to;
    return any;
}

extern "C" __global__ void __launch_bounds__(512) fill(const HashParams p) {
    const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x, stride = u64(gridDim.x) * blockDim.x;
    for (u64 i = first; i < u64(p.tokens) * p.words; i += stride) {
        p.x[i] = content(p.rank, u32(i / p.words), p.call, u32(i % p.words));
    }
    for (u64 i = first; i < u64(p.tokens) * TOP_K; i += stride) {
        p.topk[i] = choice(p, p.rank, u32(i / TOP_K), u32(i % TOP_K));
    }
}

extern "C" __global__ void __launch_bounds__(512) check(const HashParams p) {
    const u32 rows = p.rank_prefix[(p.ranks - 1) * p.ranks + p.rank];
    u64 wrong = 0;
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        u32 source = 0;
        while (row >= u32(p.rank_prefix[source * p.ranks + p.rank])) source++;
        const u32 begin = source == 0 ? 0 : p.rank_prefix[(source - 1) * p.ranks + p.rank];
        const u32 token = p.src_idx[row];
        // Tokens come in order, and only those that chose this rank.
        if (threadIdx.x == 0) {
            wrong += row > begin && p.src_idx[row - 1] >= p.src_idx[row];
            wrong += token >= p.tokens || !goes(p, source, token, p.rank);
        }
        for (u32 w = threadIdx.x; w < p.words; w += blockDim.x) {
            const uint4 is = p.x[u64(row) * p.words + w], should = content(source, token, p.call, w);
            wrong += is.x != should.x || is.y != should.y || is.z != should.z || is.w != should.w;
        }
    }
    if (wrong) atomicAdd(p.found, wrong);
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(p.found + 1, u64(rows));
    u64 expected = 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.ranks * p.tokens; i += gridDim.x * blockDim.x) {
        expected += goes(p, i / p.tokens, i % p.tokens, p.rank);
    }
    if (expected) atomicAdd(p.found + 2, expected);
}
