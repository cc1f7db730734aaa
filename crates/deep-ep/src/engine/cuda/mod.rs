//! NVIDIA GPUs: what is here ([`Report`]), how fast memory and links are ([`limit`]), kernels compiled
//! ahead of time ([`warmup`](fn@warmup)), where an address lies ([`place_of`]), and memory, streams and graphs for programs that have no
//! framework ([`Gpu`]).
//!
//! CUDA's driver and its compiler NVRTC are loaded at run time. Without them everything here answers
//! with an [`Error::Unsupported`](crate::Error::Unsupported) that says what is missing.

pub(crate) mod bridge;
pub(crate) mod driver;
pub(crate) mod engine;
mod gpu;
#[cfg(test)]
mod gpu_tests;
pub(crate) mod jit;
pub mod limit;
mod place;
mod report;
pub(crate) mod symmetric;
mod warmup;

pub use driver::{checked::Version, device::ComputeCapability};
pub use gpu::{Gpu, GpuEvent, GpuStream, Graph};
pub use place::place_of;
pub use report::{Cache, Compiler, DriverFacts, GpuFacts, Peer, Report, Tried};
pub use warmup::{Warmed, WarmupConfig, architectures, warmup};
