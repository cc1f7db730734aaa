//! The library's conformance suite, unchanged, through the C interface: every call that it makes goes
//! through the functions of `deep_ep.h`.
//!
//! The suite says `deep_ep::Buffer`; here that is `through_c::Buffer`, which has the same methods and
//! calls C's functions. What only holds data (tensors, errors, the reference) is the library's own.
//! Errors are made again from the record that C has of them, so its fields are tested, too.

extern crate deep_ep as library;
extern crate self as deep_ep;

#[path = "../../../deep-ep/tests/conformance/cases.rs"]
mod cases;
#[path = "../../../deep-ep/tests/conformance/compare.rs"]
mod compare;
#[path = "../../../deep-ep/tests/conformance/high_throughput/mod.rs"]
mod high_throughput;
#[path = "../../../deep-ep/tests/conformance/launch.rs"]
mod launch;
#[path = "../../../deep-ep/tests/conformance/low_latency.rs"]
mod low_latency;
#[path = "../../../deep-ep/tests/conformance/named/mod.rs"]
mod named;
#[path = "../../../deep-ep/tests/conformance/properties.rs"]
mod properties;
#[path = "../../../deep-ep/tests/conformance/random.rs"]
mod random;
mod through_c;
#[path = "../../../deep-ep/tests/conformance/world.rs"]
mod world;

pub(crate) use library::{
    BufferConfig, CombineOutput, CombineWire, DType, Device, DispatchOutput, Element, Error,
    F8E4M3, Landing, LowLatencyConfig, LowLatencyDispatchInput, LowLatencyDispatchOutput, Rank,
    ReceivedCounts, Reject, Result, RowFormat, Shape, Tensor, TensorMut, TopK, codec, reference,
};
pub(crate) use through_c::{
    Buffer, CombineInput, CombineRows, Communicator, DispatchHandle, DispatchInput, Dispatched,
    Layout, Loan, LowLatencyCombineInput, LowLatencyDispatched, LowLatencyHandle, OwnedTensor,
    PendingDispatch, Routes,
};
