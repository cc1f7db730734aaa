// Parameters of the kernels in limit.cu; `limit/params.rs` declares the same.
#pragma once

#include "ptx.cuh"

struct CopyParams {
    unsigned char* target;
    const unsigned char* source;
    // A multiple of 16, and for bulk_copy of CHUNK_BYTES.
    u64 bytes;
};

struct RoundTrip {
    u64 nanoseconds;
    // Round trips that were made.
    u32 trips;
    // 1: all of them; 2: the deadline passed.
    u32 state;
};

struct RoundTripParams {
    // Where the other side stores, and where this side does; both hold 0 at first.
    u32* mine;
    u32* theirs;
    // Pinned host memory.
    RoundTrip* result;
    // Nanoseconds after which a side gives up.
    u64 timeout;
    u32 trips;
    // 1 if block 0 is the side that begins.
    u32 begins;
};
