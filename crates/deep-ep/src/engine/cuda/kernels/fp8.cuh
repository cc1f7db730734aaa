// The cast to FP8 E4M3 with a scale per 128 channels, bit for bit that of `codec/fp8.rs`, where the
// arithmetic is described. A block of 128 is 16 lanes with 8 channels each.
#pragma once

#include "ptx.cuh"

constexpr float E4M3_MAX = 448.0f;
// Channels that share a scale, and those of a lane.
constexpr u32 SCALE_BLOCK = 128;
constexpr u32 SCALE_LANES = SCALE_BLOCK / 8;

// Of a block: what is stored beside the codes, and what its values are multiplied by.
struct BlockScale {
    float scale;
    float factor;
};

// The largest magnitude of a lane's 8 bf16 channels that are not NaN.
__device__ __forceinline__ float largest_magnitude(uint4 word) {
    const u32 magnitudes = 0x7fff7fffu;
    const u32 a = max_bf16x2(word.x & magnitudes, word.y & magnitudes);
    const u32 b = max_bf16x2(word.z & magnitudes, word.w & magnitudes);
    const u32 both = max_bf16x2(a, b);
    // If all are NaN, so is the result, which gives way here.
    return fmaxf(1e-4f, fmaxf(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)));
}

// The largest magnitude of the block. All lanes of the block.
__device__ __forceinline__ float largest_of_block(float amax) {
    const u32 lanes = 0xffffu << (threadIdx.x % 32 / SCALE_LANES * SCALE_LANES);
#pragma unroll
    for (u32 step = SCALE_LANES / 2; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, step));
    return amax;
}

__device__ __forceinline__ BlockScale block_scale(float amax, bool power_of_two) {
    const float scale = amax * (1.0f / E4M3_MAX);
    if (!power_of_two) return {scale, __fdiv_rn(E4M3_MAX, amax)};
    // A positive normal number or infinity: counting up the exponent if any mantissa bit is set
    // gives the power of two at or above it.
    const u32 ceiling = (__float_as_uint(scale) + 0x7fffffu) & 0xff800000u;
    const u32 factor = ceiling == 0x7f800000u ? 0 : (254u << 23) - ceiling;
    return {__uint_as_float(ceiling), __uint_as_float(factor)};
}

#if __CUDA_ARCH__ >= 890
// The codes of a lane's 8 channels.
__device__ __forceinline__ uint2 cast_word(uint4 word, float factor) {
    const u32 part[4] = {word.x, word.y, word.z, word.w};
    u32 code[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float low = __uint_as_float(part[i] << 16), high = __uint_as_float(part[i] & 0xffff0000u);
        code[i] = cvt_e4m3x2(low * factor, high * factor);
    }
    return make_uint2(code[0] | code[1] << 16, code[2] | code[3] << 16);
}
#endif
