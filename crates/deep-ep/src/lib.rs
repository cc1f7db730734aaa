//! Expert-parallel dispatch and combine for Mixture-of-Experts models.

#[cfg(not(target_os = "linux"))]
compile_error!("deep-ep needs Linux: it shares memory by memfd and waits on futexes");

pub mod codec;
pub mod dtype;
pub(crate) mod engine;
mod error;
pub mod memory;
pub mod tensor;
pub mod topology;

pub use dtype::{DType, Element, F8E4M3};
pub use error::{Error, Reject, Result, Text};
pub use tensor::{OwnedTensor, Tensor, TensorMut};
pub use topology::Rank;
