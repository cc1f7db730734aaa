// LogFMT-10 with the levels, codes and fallbacks of `codec/logfmt`, where they are described, and a
// layout of its own: every block of 128 values has a fixed place, so that no lane needs to know what
// other blocks take. Of a place only the bytes in use are written.
//
//   headers   u32 per block, as there
//   places    256 bytes per block: raw: bf16; codes: 128 low bytes, 16 bytes of bits 8, 16 of signs
//
// A block is 16 lanes with 8 values each.
#pragma once

#include "ptx.cuh"

constexpr u32 LOGFMT_BLOCK = 128;
constexpr u32 LOGFMT_PLACE = 2 * LOGFMT_BLOCK;
constexpr u32 LOGFMT_BITS8 = LOGFMT_BLOCK;
constexpr u32 LOGFMT_SIGNS = LOGFMT_BLOCK + LOGFMT_BLOCK / 8;
constexpr float LOGFMT_STEPS = 510.0f;
constexpr u32 LOGFMT_SPAN = 8 << 7;
constexpr u32 LOGFMT_HIGH_MIN = LOGFMT_SPAN + 0x0100;
constexpr u32 LOGFMT_HIGH_MAX = 0x7f7f;
constexpr u32 LOGFMT_RAW = ~0u;

__device__ __forceinline__ u32 logfmt_header_bytes(u32 hidden) {
    return ((hidden + LOGFMT_BLOCK - 1) / LOGFMT_BLOCK * 4 + 15) / 16 * 16;
}

__device__ __forceinline__ float logfmt_log2(u32 bits) {
    const float exponent = float(i32(bits >> 23) - 127);
    const float t = __uint_as_float((bits & 0x7fffffu) | 0x3f800000u) - 1.0f;
    const float q = 0.44191703f + t * (-0.26717934f + t * (0.14842647f + t * -0.04514893f));
    return exponent + (t + (t * (1.0f - t)) * q);
}

__device__ __forceinline__ float logfmt_exp2(float y) {
    const float rounder = 12582912.0f;
    const float rounded = y + rounder;
    const u32 integer = __float_as_uint(rounded) - __float_as_uint(rounder);
    const float f = y - (rounded - rounder);
    const float p = 1.0f + f * (0.69312155f + f * (0.2402202f + f * (0.05591971f + f * 0.00968191f)));
    return __uint_as_float(__float_as_uint(p) + (integer << 23));
}

// Levels of a block with codes.
struct Levels {
    float start, range;
    u32 half_low;

    __device__ __forceinline__ explicit Levels(u32 header) {
        const u32 low = header << 16;
        start = logfmt_log2(low);
        range = logfmt_log2(header & 0xffff0000u) - start;
        half_low = low - (1u << 23);
    }

    __device__ __forceinline__ u32 code(float value, float per_octave) const {
        const float rounder = 8388608.0f;
        const u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
        float step = (logfmt_log2(magnitude) - start) * per_octave;
        step = step > 0.0f ? step : 0.0f;
        step = step < LOGFMT_STEPS ? step : LOGFMT_STEPS;
        const u32 level = __float_as_uint(step + rounder) - __float_as_uint(rounder) + 1;
        return (magnitude < half_low ? 0 : level) | bits >> 31 << 9;
    }

    __device__ __forceinline__ float value(u32 code, u32 sign, float step) const {
        const u32 level = __float_as_uint(logfmt_exp2(start + float(i32(code) - 1) * step));
        return __uint_as_float((code == 0 ? 0 : level) | sign << 31);
    }
};

// The header that suits a block of which this lane has 8 values; lanes with `some` false have none.
// All lanes of the warp.
__device__ __forceinline__ u32 logfmt_choose(const float* x, bool some, u32 values) {
    u32 most = 0, least = ~0u;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
        if (!some) continue;
        most = max(most, magnitude);
        // Zero becomes the largest number and never the least.
        least = min(least, magnitude - 1);
    }
#pragma unroll
    for (u32 step = 8; step > 0; step /= 2) {
        most = max(most, __shfl_xor_sync(~0u, most, step));
        least = min(least, __shfl_xor_sync(~0u, least, step));
    }
    const u32 high = (most >> 16) + ((most & 0xffffu) != 0);
    const u32 low = max((least + 1) >> 16, high - LOGFMT_SPAN);
    u32 below = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
        if (some && magnitude < low << 16 && magnitude != 0) below++;
    }
#pragma unroll
    for (u32 step = 8; step > 0; step /= 2) below += __shfl_xor_sync(~0u, below, step);
    if (most == 0) return 0;
    if (high < LOGFMT_HIGH_MIN || high > LOGFMT_HIGH_MAX) return LOGFMT_RAW;
    // Codes of so few values are not smaller.
    const bool gains = values > 16;
    return below * 16 > values || !gains ? LOGFMT_RAW : high << 16 | low;
}

// Writes values 8 * word.. of a row of `hidden`. All lanes of the warp, `word` ascending by one from
// a multiple of 16 for lanes 0 and 16. Adds the bytes to `written`, in shared memory.
__device__ __forceinline__ void logfmt_encode(u8* row, u32 word, u32 hidden, const float* x, u32* written) {
    const bool some = word * 8 < hidden;
    const u32 block = word / 16, lane = word % 16;
    const u32 values = min(LOGFMT_BLOCK, hidden - min(hidden, block * LOGFMT_BLOCK));
    const u32 header = logfmt_choose(x, some, values);
    if (!some) return;
    if (lane == 0) {
        reinterpret_cast<u32*>(row)[block] = header;
        atomicAdd(written, 4 + (header == LOGFMT_RAW ? 2 * values : header == 0 ? 0 : values + values / 4));
    }
    u8* place = row + logfmt_header_bytes(hidden) + block * LOGFMT_PLACE;
    if (header == LOGFMT_RAW) {
        reinterpret_cast<uint4*>(place)[lane] = make_uint4(cvt_bf16x2(x[0], x[1]), cvt_bf16x2(x[2], x[3]),
                                                           cvt_bf16x2(x[4], x[5]), cvt_bf16x2(x[6], x[7]));
        return;
    }
    if (header == 0) return;
    const Levels levels(header);
    const float per_octave = levels.range > 0.0f ? LOGFMT_STEPS / levels.range : 0.0f;
    u32 low[2] = {0, 0}, bits8 = 0, signs = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 code = levels.code(x[i], per_octave);
        low[i / 4] |= (code & 0xff) << (i % 4 * 8);
        bits8 |= (code >> 8 & 1) << i;
        signs |= (code >> 9) << i;
    }
    reinterpret_cast<uint2*>(place)[lane] = make_uint2(low[0], low[1]);
    place[LOGFMT_BITS8 + lane] = u8(bits8);
    place[LOGFMT_SIGNS + lane] = u8(signs);
}

// Adds values 8 * word.. of a row to `sum`. Headers that mean nothing, which no peer writes, count
// as zeros.
__device__ __forceinline__ void logfmt_add(const u8* row, u32 word, u32 hidden, float* sum) {
    const u32 block = word / 16, lane = word % 16;
    const u32 header = reinterpret_cast<const volatile u32*>(row)[block];
    const u8* place = row + logfmt_header_bytes(hidden) + block * LOGFMT_PLACE;
    if (header == LOGFMT_RAW) {
        const uint4 raw = ld_landed(reinterpret_cast<const uint4*>(place) + lane);
        const u32 part[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[2 * i] += __uint_as_float(part[i] << 16);
            sum[2 * i + 1] += __uint_as_float(part[i] & 0xffff0000u);
        }
        return;
    }
    const u32 high = header >> 16, least = header & 0xffff;
    if (high < LOGFMT_HIGH_MIN || high > LOGFMT_HIGH_MAX || least > high || least < high - LOGFMT_SPAN) return;
    const Levels levels(header);
    const float step = levels.range * (1.0f / LOGFMT_STEPS);
    const u32 first = reinterpret_cast<const volatile u32*>(place)[2 * lane];
    const u32 second = reinterpret_cast<const volatile u32*>(place)[2 * lane + 1];
    const u32 bits8 = reinterpret_cast<const volatile u8*>(place)[LOGFMT_BITS8 + lane];
    const u32 signs = reinterpret_cast<const volatile u8*>(place)[LOGFMT_SIGNS + lane];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 low = (i < 4 ? first : second) >> (i % 4 * 8) & 0xff;
        sum[i] += levels.value(low | (bits8 >> i & 1) << 8, signs >> i & 1, step);
    }
}
