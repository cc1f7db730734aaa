//! The native module `deep_ep._native`.
//!
//! Thin: it turns what the Python package passes (tensors as addresses, element types, shapes and
//! strides) into calls of the library, waits with the interpreter released, and turns errors into
//! `deep_ep.Error`s. Allocation, streams and defaults are the Python package's.
//!
//! A tensor enters as a tuple `(address, dtype, shape, strides, device)`, see module `tensor`; whoever
//! passes it keeps it alive until the call, or the pending call it went into, is done. Memory of the
//! library leaves as `memory::Memory`, which keeps it alive.

mod blocking;
mod buffer;
mod dlpack;
mod errors;
mod group;
mod high_throughput;
mod lot;
mod low_latency;
mod memory;
mod tensor;

use pyo3::prelude::*;

/// `deep_ep._native`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::buffer::Buffer;
    #[pymodule_export]
    use super::dlpack::{Foreign, from_dlpack};
    #[pymodule_export]
    use super::group::Group;
    #[pymodule_export]
    use super::lot::Dropped;
    #[pymodule_export]
    use super::low_latency::{
        PendingLowLatencyCombine, PendingLowLatencyDispatch, low_latency_bytes,
    };
    #[pymodule_export]
    use super::memory::{Loan, Memory, empty};

    /// Version of the library.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
