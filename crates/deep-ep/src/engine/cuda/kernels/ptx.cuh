// Instructions that CUDA C++ has no word for, each once and named after itself.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

// The SM that this thread runs on.
__device__ __forceinline__ u32 smid() {
    u32 number;
    asm volatile("mov.u32 %0, %smid;" : "=r"(number));
    return number;
}

// Nanoseconds, the same on all SMs of a GPU. It advances in steps of up to a microsecond.
__device__ __forceinline__ u64 globaltimer() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Orders everything that this thread wrote or has seen before the store, for every GPU and the host.
__device__ __forceinline__ void st_release_sys(u32* address, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// What the storing thread wrote before its release is seen by everything after this load.
__device__ __forceinline__ u32 ld_acquire_sys(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ u64 ld_acquire_sys(const u64* address) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

// Two neighbouring words, each whole on its own.
__device__ __forceinline__ void ld_acquire_sys(const u64* address, u64& first, u64& second) {
    asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(address) : "memory");
}

// A word that another GPU or the host may write, on its own: nothing is ordered by it.
__device__ __forceinline__ u64 ld_relaxed_sys(const u64* address) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ u32 ld_relaxed_sys(const u32* address) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// A word that another GPU or the host reads, on its own: it arrives whole and orders nothing.
__device__ __forceinline__ void st_relaxed_sys(u64* address, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(u32* address, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Two words side by side, each whole on its own.
__device__ __forceinline__ void st_relaxed_sys(u64* address, u64 first, u64 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(first), "l"(second)
                 : "memory");
}

__device__ __forceinline__ void ld_relaxed_sys(const u64* address, u64& first, u64& second) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(address)
                 : "memory");
}

// What this thread wrote, and what it has seen others write, comes before what it writes now, for
// every GPU and the host; what it read so far was read before what it reads now.
__device__ __forceinline__ void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// The same for the threads of this GPU.
__device__ __forceinline__ void fence_acq_rel_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ __forceinline__ u32 ld_acquire_gpu(const u32* address) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Adds to a word in shared memory; what this thread wrote comes before, for its block.
__device__ __forceinline__ void red_release_shared(u32* address, u32 value) {
    const u32 shared = static_cast<u32>(__cvta_generic_to_shared(address));
    asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

// Stores a word in shared memory; what this thread wrote comes before, for its block.
__device__ __forceinline__ void st_release_shared(u32* address, u32 value) {
    const u32 shared = static_cast<u32>(__cvta_generic_to_shared(address));
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

__device__ __forceinline__ u32 ld_acquire_shared(const u32* address) {
    u32 value;
    const u32 shared = static_cast<u32>(__cvta_generic_to_shared(address));
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
    return value;
}

// 16 bytes that nobody writes while the kernel runs and that are read once.
__device__ __forceinline__ uint4 ld_input(const uint4* address) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

// 16 bytes that another SM or GPU wrote before a flag that was acquired; read once.
__device__ __forceinline__ uint4 ld_landed(const uint4* address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

// The larger of each of two bf16 numbers; one that is NaN gives way to the other.
__device__ __forceinline__ u32 max_bf16x2(u32 a, u32 b) {
    u32 larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

#if __CUDA_ARCH__ >= 890
// Two floats rounded to e4m3, the first in the low byte: nearest, ties to even, saturating; NaN
// becomes 0x7f.
__device__ __forceinline__ u16 cvt_e4m3x2(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}
#endif

// Two floats rounded to bf16, the first in the low half: nearest, ties to even; NaN becomes 0x7fff.
__device__ __forceinline__ u32 cvt_bf16x2(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The same for f16.
__device__ __forceinline__ u32 cvt_f16x2(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float cvt_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// A shared-memory address as the instructions below take it.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the units that complete bulk copies.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Whether the phase of this parity is over; waits a while for it in hardware.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 barrier, u32 parity) {
    u32 over;
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
    return over != 0;
}

// Global to shared memory; completes on the barrier. 16-byte alignment and size.
__device__ __forceinline__ void cp_async_bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Shared to global memory, of this GPU or a peer; belongs to the thread's next bulk group.
__device__ __forceinline__ void cp_async_bulk_store(void* global, u32 shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the thread's latest `PENDING` groups have read their shared memory.
template <int PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// All but the thread's latest `PENDING` groups are complete: their writes are done.
template <int PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif
