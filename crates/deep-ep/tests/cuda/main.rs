//! What only a GPU has: device tensors, streams and graphs. Ranks are threads, dealt to the GPUs that
//! are here in turn. Without a GPU these tests say that they were left out.
//!
//! Run with `--test-threads=1` and `CUDA_DEVICE_MAX_CONNECTIONS=32`: ranks that share a GPU share its
//! SMs, and two tests at once would want more than there are.

mod batch;
mod graphs;
mod low_latency;
mod ranks;
mod streams;
