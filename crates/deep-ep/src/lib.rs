//! Expert-parallel dispatch and combine for Mixture-of-Experts models.

#[cfg(not(target_os = "linux"))]
compile_error!("deep-ep needs Linux: it shares memory by memfd and waits on futexes");

pub mod bootstrap;
mod buffer;
pub mod codec;
pub mod dtype;
pub(crate) mod engine;
mod error;
pub mod memory;
pub mod reference;
pub mod routing;
pub mod settings;
pub mod tensor;
pub mod topology;

pub use bootstrap::Communicator;
pub use buffer::{
    Buffer, BufferConfig, CombineInput, CombineOutput, CombineRows, CombineWire, Combined,
    DispatchHandle, DispatchInput, DispatchOutput, Dispatched, Landing, Layout, Loan,
    LowLatencyCombineInput, LowLatencyConfig, LowLatencyDispatchInput, LowLatencyDispatchOutput,
    LowLatencyDispatched, LowLatencyHandle, MemoryUse, PendingCombine, PendingDispatch,
    PendingLowLatencyCombine, PendingLowLatencyDispatch, ReceivedCounts, Routes, RowFormat,
    Statistics, Stream, TopK,
};
pub use dtype::{DType, Element, F8E4M3};
pub use error::{Error, Reject, Result, Text};
pub use settings::{EngineChoice, Settings};
pub use tensor::{Device, OwnedTensor, Shape, Tensor, TensorMut};
pub use topology::{Rank, Topology};
