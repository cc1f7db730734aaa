//! The CPU engine: threads and SIMD.

// The rest of the engine is the user; tests of this module reach every item.
#[allow(dead_code)]
pub(crate) mod copy;
