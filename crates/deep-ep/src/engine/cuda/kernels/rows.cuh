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

// Most 16-byte words that a lane loads at a time, while it stores as many.
constexpr int MOST_WORDS = 4;

// How many it loads: with a known row, so many that all passes are full if they can be.
__host__ __device__ constexpr int row_unroll(int bytes) {
    const int words = (bytes + 511) / 512;
    const int passes = (words + MOST_WORDS - 1) / MOST_WORDS;
    return bytes == 0 ? 4 : (words + passes - 1) / passes;
}
constexpr int ROW_UNROLL = row_unroll(ROW_BYTES);
// Whether every lane has a word in every pass, so that none has to be checked.
constexpr bool ROW_IS_FULL = ROW_BYTES != 0 && ROW_BYTES % (ROW_UNROLL * 512) == 0;

// LANDED: the source was written by a peer and is behind a flag that was acquired.
template <bool LANDED>
__device__ __forceinline__ uint4 load_row(const uint4* address) {
    return LANDED ? ld_landed(address) : ld_input(address);
}

// Some words of a row, ROW_UNROLL per lane, from the `first` one on.
struct RowPart {
    static constexpr u32 WORDS = ROW_UNROLL * 32;

    uint4 value[ROW_UNROLL];

    template <bool LANDED>
    __device__ __forceinline__ void load(const uint4* source, u32 first, u32 count) {
#pragma unroll
        for (int k = 0; k < ROW_UNROLL; k++) {
            if (has(first, k, count)) value[k] = load_row<LANDED>(source + first + k * 32);
        }
    }

    __device__ __forceinline__ void store(uint4* target, u32 first, u32 count) const {
#pragma unroll
        for (int k = 0; k < ROW_UNROLL; k++) {
            if (has(first, k, count)) target[first + k * 32] = value[k];
        }
    }

    static __device__ __forceinline__ bool has(u32 first, int k, u32 count) {
        return ROW_IS_FULL || first + k * 32 + threadIdx.x % 32 < count;
    }
};

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
    // The next words are on their way while some are stored.
    RowPart now, next;
    now.load<LANDED>(source, 0, count);
#pragma unroll 2
    for (u32 first = 0; first < count; first += RowPart::WORDS) {
        if (first + RowPart::WORDS < count) next.load<LANDED>(source, first + RowPart::WORDS, count);
        for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
            now.store(reinterpret_cast<uint4*>(__shfl_sync(~0u, to, __ffs(rest) - 1)) + lane, first, count);
        }
        now = next;
    }
}

// Copies a row to one place. All lanes.
template <bool LANDED>
__device__ __forceinline__ void copy_row(u8* to, const u8* from, u32 bytes) {
    copy_row_to_each<LANDED>(reinterpret_cast<u64>(to), 1, from, bytes);
}
