// Copies of rows by a warp, and the parts of a landing block.
#pragma once

#include "ptx.cuh"

__device__ __forceinline__ u64 align_up(u64 value, u64 to) { return (value + to - 1) / to * to; }

// A landing block: what travels with rows, then the rows, each part aligned. Rows are last, so that
// the place of those that do not come can be given back.
struct Landing {
    u8* src_idx;
    u8* topk;
    u8* weights;
    u8* scales;
    u8* rows;

    __device__ Landing(u8* base, u64 capacity, u64 topk_bytes, u64 weight_bytes, u64 scale_bytes) {
        src_idx = base;
        topk = src_idx + align_up(capacity * 4, 256);
        weights = topk + align_up(capacity * topk_bytes, 256);
        scales = weights + align_up(capacity * weight_bytes, 256);
        rows = scales + align_up(capacity * scale_bytes, 256);
    }
};

#ifndef ROW_BYTES
#define ROW_BYTES 0
#endif

// Most 16-byte words in flight per lane. More brought nothing on an H200.
#if __CUDA_ARCH__ >= 1000
constexpr int MOST_WORDS = 7;
#else
constexpr int MOST_WORDS = 10;
#endif

// 16-byte words in flight per lane: with a known row, so many that all passes are full if they can be.
__host__ __device__ constexpr int row_unroll(int bytes) {
    const int words = (bytes + 511) / 512;
    const int passes = (words + MOST_WORDS - 1) / MOST_WORDS;
    return bytes == 0 ? 8 : (words + passes - 1) / passes;
}
constexpr int ROW_UNROLL = row_unroll(ROW_BYTES);
// Whether every lane has a word in every pass, so that none has to be checked.
constexpr bool ROW_IS_FULL = ROW_BYTES != 0 && ROW_BYTES % (ROW_UNROLL * 512) == 0;

// LANDED: the source was written by a peer and is behind a flag that was acquired.
template <bool LANDED>
__device__ __forceinline__ uint4 load_row(const uint4* address) {
    return LANDED ? ld_landed(address) : ld_input(address);
}

// Copies a row to every place that a lane of `lanes` holds in `to`: loaded once. All lanes.
template <bool LANDED>
__device__ __forceinline__ void copy_row_to_each(u64 to, u32 lanes, const u8* from, u32 bytes) {
    const u32 lane = threadIdx.x % 32, count = bytes / 16;
    const bool unaligned = __any_sync(~0u, (lanes >> lane & 1) && to % 16 != 0);
    if (unaligned || reinterpret_cast<u64>(from) % 16 != 0) {
        // Rows of a caller may lie at any address.
        for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
            u8* target = reinterpret_cast<u8*>(__shfl_sync(~0u, to, __ffs(rest) - 1));
            for (u32 i = lane; i < bytes; i += 32) target[i] = reinterpret_cast<const volatile u8*>(from)[i];
        }
        return;
    }
    const uint4* source = reinterpret_cast<const uint4*>(from) + lane;
#pragma unroll 1
    for (u32 first = 0; first < count; first += ROW_UNROLL * 32) {
        uint4 value[ROW_UNROLL];
#pragma unroll
        for (int k = 0; k < ROW_UNROLL; k++) {
            if (ROW_IS_FULL || first + k * 32 + lane < count) value[k] = load_row<LANDED>(source + first + k * 32);
        }
        for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
            uint4* target = reinterpret_cast<uint4*>(__shfl_sync(~0u, to, __ffs(rest) - 1)) + lane;
#pragma unroll
            for (int k = 0; k < ROW_UNROLL; k++) {
                if (ROW_IS_FULL || first + k * 32 + lane < count) target[first + k * 32] = value[k];
            }
        }
    }
}

// Copies a row to one place. All lanes.
template <bool LANDED>
__device__ __forceinline__ void copy_row(u8* to, const u8* from, u32 bytes) {
    copy_row_to_each<LANDED>(reinterpret_cast<u64>(to), 1, from, bytes);
}
