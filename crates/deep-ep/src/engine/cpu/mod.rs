//! The CPU engine: threads and SIMD.

pub(crate) mod copy;
