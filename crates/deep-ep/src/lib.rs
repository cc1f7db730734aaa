//! Expert-parallel dispatch and combine for Mixture-of-Experts models.
//!
//! Experts are spread over ranks. For every batch, **dispatch** sends each token's row to every rank
//! that hosts one of its chosen experts, and **combine** brings the experts' outputs back to the
//! token's own rank and sums them. There are two families: *high-throughput* calls for training and
//! prefill, and *low-latency* calls of a fixed capacity for decoding.
//!
//! ```
//! use deep_ep::{Buffer, BufferConfig, CombineInput, Communicator, DispatchInput, Routes, Tensor, TopK};
//! use half::bf16;
//!
//! # fn main() -> deep_ep::Result<()> {
//! let work = |rank: &Communicator| -> deep_ep::Result<f32> {
//!     let buffer = Buffer::new(rank, BufferConfig::from_env()?)?;
//!     // Six tokens of 64 channels, each with two of eight experts: two experts live on each rank.
//!     let x = vec![bf16::from_f32(1.0); 6 * 64];
//!     let topk_idx: Vec<i64> = (0..12).map(|i| (i * 3 % 8) as i64).collect();
//!     let topk = TopK { idx: Tensor::new(&topk_idx, &[6, 2])?, weights: None };
//!     let routes = Routes::TopK { topk, num_experts: 8 };
//!     let input = DispatchInput::new(Tensor::new(&x, &[6, 64])?, routes);
//!     let mut received = buffer.dispatch(input)?.finish()?;
//!     // The experts double their rows in place.
//!     for value in received.x.as_mut_slice::<bf16>()? {
//!         *value = *value + *value;
//!     }
//!     let back = buffer.combine(CombineInput::new(&received.x, &received.handle))?.finish()?;
//!     Ok(back.x.as_slice::<bf16>()?[0].to_f32())
//! };
//! let ranks = Communicator::local(4)?;
//! std::thread::scope(|scope| {
//!     let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(|| work(rank))).collect();
//!     for thread in threads {
//!         // Token 0 went to two ranks, and each sent back 2.
//!         assert_eq!(thread.join().expect("no panic")?, 4.0);
//!     }
//!     Ok(())
//! })
//! # }
//! ```
//!
//! The numbered examples are a course: threads, processes, FP8, low latency with a hook, a dead rank.
//!
//! # Where things are
//!
//! | module | what is there |
//! | --- | --- |
//! | [`Buffer`] and its inputs and outputs | the calls |
//! | [`bootstrap`] | how ranks find each other |
//! | [`tensor`] | borrowed and owned tensors |
//! | [`routing`], [`codec`], [`topology`] | pure functions: routes, FP8 and LogFMT, ranks and nodes |
//! | [`cuda`] | what NVIDIA GPUs are here, how fast their memory and links are; memory, streams and graphs for programs without a framework |
//! | [`reference`](mod@reference) | the slow and obvious definition of every call, for tests |
//! | [`settings`] | environment variables |
//! | [`interrupt`] | giving up waits on request |

#[cfg(not(target_os = "linux"))]
compile_error!("deep-ep needs Linux: it shares memory by memfd and waits on futexes");

pub mod bootstrap;
mod buffer;
pub mod codec;
pub mod dtype;
pub(crate) mod engine;
mod error;
pub mod interrupt;
pub mod memory;
pub mod reference;
pub mod routing;
pub mod settings;
pub mod tensor;
pub mod topology;

pub use bootstrap::Communicator;
pub use buffer::{
    Buffer, BufferConfig, Call, CombineInput, CombineOutput, CombineRows, CombineWire, Combined,
    DeviceLayout, DeviceRoutes, DispatchHandle, DispatchInput, DispatchOutput, Dispatched, Landing,
    Layout, Loan, LowLatencyCombineInput, LowLatencyConfig, LowLatencyDispatchInput,
    LowLatencyDispatchOutput, LowLatencyDispatched, LowLatencyHandle, MemoryUse, PendingCombine,
    PendingDispatch, PendingLowLatencyCombine, PendingLowLatencyDispatch, ReceivedCounts, Routes,
    RowFormat, Statistics, Stream, TopK,
};
pub use dtype::{DType, Element, F8E4M3};
pub use engine::cuda;
pub use error::{Error, Reject, Result, Text};
pub use settings::{EngineChoice, Settings};
pub use tensor::{Device, OwnedTensor, Shape, Tensor, TensorMut};
pub use topology::{Rank, Topology};

/// The example in the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
