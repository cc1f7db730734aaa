//! NVIDIA GPUs: what is here ([`Report`]) and how fast memory and links are ([`limit`]).
//!
//! CUDA's driver and its compiler NVRTC are loaded at run time. Without them everything here answers
//! with an [`Error::Unsupported`](crate::Error::Unsupported) that says what is missing.

pub(crate) mod driver;
pub(crate) mod engine;
pub(crate) mod jit;
pub mod limit;
mod report;
#[allow(dead_code)] // Until the engine's calls use it.
pub(crate) mod symmetric;

pub use driver::{checked::Version, device::ComputeCapability};
pub use report::{Cache, Compiler, DriverFacts, Gpu, Peer, Report, Tried};
