// Sums of rows in f32 with one rounding.
#pragma once

#include "ptx.cuh"

// Element types of summed rows, values of the constant DTYPE.
#define DTYPE_BF16 0
#define DTYPE_F16 1
#define DTYPE_F32 2

constexpr u32 ELEMENT_BYTES = DTYPE == DTYPE_F32 ? 4 : 2;
// Elements of a 16-byte word.
constexpr int WORD_ELEMENTS = 16 / ELEMENT_BYTES;

// The NaN that every engine gives.
__device__ __forceinline__ float canonical(float value) {
    return value != value ? __uint_as_float(0x7fffffff) : value;
}

__device__ __forceinline__ void add_word(float* sum, uint4 word) {
    const u32 part[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if DTYPE == DTYPE_F32
        sum[i] += __uint_as_float(part[i]);
#elif DTYPE == DTYPE_F16
        sum[2 * i] += cvt_f16(u16(part[i]));
        sum[2 * i + 1] += cvt_f16(u16(part[i] >> 16));
#else
        sum[2 * i] += __uint_as_float(part[i] << 16);
        sum[2 * i + 1] += __uint_as_float(part[i] & 0xffff0000u);
#endif
    }
}

__device__ __forceinline__ uint4 round_word(const float* sum) {
    u32 part[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if DTYPE == DTYPE_F32
        part[i] = __float_as_uint(canonical(sum[i]));
#elif DTYPE == DTYPE_F16
        part[i] = cvt_f16x2(sum[2 * i], sum[2 * i + 1]);
#else
        part[i] = cvt_bf16x2(sum[2 * i], sum[2 * i + 1]);
#endif
    }
    return make_uint4(part[0], part[1], part[2], part[3]);
}

// One element, for rows that are not aligned to 16 bytes.
__device__ __forceinline__ float load_element(const u8* row, u32 index) {
#if DTYPE == DTYPE_F32
    return reinterpret_cast<const volatile float*>(row)[index];
#elif DTYPE == DTYPE_F16
    return cvt_f16(reinterpret_cast<const volatile u16*>(row)[index]);
#else
    return __uint_as_float(u32(reinterpret_cast<const volatile u16*>(row)[index]) << 16);
#endif
}

__device__ __forceinline__ void store_element(u8* row, u32 index, float value) {
#if DTYPE == DTYPE_F32
    reinterpret_cast<float*>(row)[index] = canonical(value);
#elif DTYPE == DTYPE_F16
    reinterpret_cast<u16*>(row)[index] = u16(cvt_f16x2(value, 0.0f));
#else
    reinterpret_cast<u16*>(row)[index] = u16(cvt_bf16x2(value, 0.0f));
#endif
}
