//! The CUDA engine: kernels that write rows into each other's memory.
//!
//! # Protocol of the high-throughput calls
//!
//! Every rank maps every rank's region (`control.rs` says where words are). A call has a
//! number `n`, the same on all ranks, which each GPU counts in its own memory, so that a replayed
//! graph counts on. Words are 64 bits: the low half of `n` above, 32 bits of value below; a word is
//! whole, says of which call it is, and is never cleared.
//!
//! ```text
//! dispatch, rank s to rank d                                                kernel
//!   s  every block counts some chunks of tokens and tells the others          send
//!   s -> all  announcement: terms, rows for every rank, where rows for s land send
//!   s  waits for all announcements; all ranks conclude the same               send
//!   s  rows and what travels with them to base(d) + slot of d's landing block send
//!   s -> d  flag: rows first..end of a unit of tokens are there               send
//!   d  waits for flags; rows are at their place (loan), or are copied out     receive
//! combine, rank d to owner s
//!   s -> all  announcement: terms, rows it sent and got, where they land      send
//!   d  waits for all announcements                                            send
//!   d  rows of s to their place in s's landing block                          send
//!   d -> s  flag: rows first..end of a unit                                   send
//!   s  waits for the flags of a token's rows, sums them in rank order         receive
//! ```
//!
//! *Two kernels.* When outputs are the caller's, the receiving half is a launch of its own on the
//! caller's stream, beside the sending one, which the buffer has put on a stream of its own, behind
//! what the caller's had; with a loan one launch does both. A sender waits for
//! announcements, and a launch's blocks for what the others of it have counted, never for a receiver;
//! so it does not matter when, or whether at the same time, the receiving half runs. Ranks that share a
//! GPU share out its SMs, so that all their blocks are resident.
//!
//! *Counting.* A chunk is 32 tokens, or a unit if that is more. A block stores the rows of its chunks
//! for each rank in tagged words of this rank's memory, and reads those of all chunks: the slots before a
//! chunk are their prefix sums, and slots within one are found again by who needs them. No word is
//! written twice in a call but with the same value, and both launches of a call have words of their own.
//!
//! *Units* of tokens share a flag. A block's first one is fixed, the next are taken from a counter,
//! since links do not serve all SMs alike; where a row goes does not depend on who sends it. The last
//! warp of a block takes them, finds slots for the others in a ring in shared memory (release of an
//! entry, acquire by each warp), and gives an entry free only when all rows of its unit are counted. A
//! warp that comes to an entry which holds a later unit had no row in the one it looks for. The counter
//! is cleared by the last block to leave the launch.
//!
//! *Ordering.* A rank's announcement is stored behind everything that its earlier kernels did, as
//! launches of a buffer run in order; so it also says that the landing block it names is not read any
//! more. The acquire that sees it comes before the first row is stored. Warps that store a row count it
//! in shared memory with release; one warp acquires the count, issues one system fence for the unit and
//! stores the flag. The receiver acquires the flag before it reads the rows.
//!
//! *Reuse.* Announcements have two places, used by turns: a rank announces `n + 2` only after its own
//! kernels of call `n + 1`, which waited for every rank's announcement `n + 1`, which that rank stored
//! after it had read those of call `n`. Flags need one place: a rank stores flags of call `n + 1` only
//! after the receiver's announcement of it, which follows the receiver's last look at a flag of `n`.
//! Blocks of symmetric memory are given back on the host at once: who uses them next comes later in
//! the order of launches, and peers write there only when an announcement has named them again.
//! Blocks that a recorded graph uses stay until the buffer goes.
//!
//! *Room.* A rank announces how many rows its block holds. If those of some rank do not fit, all ranks
//! conclude so and no row moves: with a worst case that is an error; otherwise all hosts, which wait
//! for the counts, call again, and the rank that lacked room has taken more before.
//!
//! *Rejects.* A status in the announcement ends the call on every rank, with a text or numbers beside
//! it. Ids out of range are found while counting. Hosts that wait are told at once; others by
//! [`Buffer::check`](crate::Buffer::check).
//!
//! *Calls that are given up.* Their rows come all the same, so a small launch waits for them and lets
//! them go before the block is used again.
//!
//! *Dead peers.* Every wait has a deadline by the GPU's timer and looks at the region's abort word, and at
//! a word in which the host marks ranks whose bootstrap connection is lost, and at one that a rank
//! writes into every region when it drops its buffer, after its last kernel. Who gives up notes stage
//! and ranks, tells every region for whom it waited, then raises its abort word, and returns: no trap,
//! the context stays usable. After that no block is given back, since a slow peer may still write.

mod combine;
mod control;
mod core;
mod dispatch;
mod failures;
pub(crate) mod keys;
mod landing;
mod launch;
pub(crate) mod low_latency;
pub(crate) mod params;
mod progress;
mod split;

use std::sync::Arc;

use self::{
    control::Control,
    core::Core,
    low_latency::{Area, LowLatency},
    params::{LayoutParams, Matrix},
};
use super::driver::{context::Context, device::Device as Gpu};
use crate::{
    bootstrap::Communicator,
    buffer::{
        BufferConfig, CombineInput, DeviceLayout, DispatchInput, Layout, Loan,
        LowLatencyCombineInput, LowLatencyDispatchInput, LowLatencyHandle, Statistics, Stream,
    },
    dtype::DType,
    engine::{
        CombineCall, DispatchCall, Engine, LowLatencyCombineCall, LowLatencyDispatchCall, Operation,
    },
    error::{Error, Reject, Result},
    memory::heap::Purpose,
    tensor::{Device, Shape, Tensor},
    topology::Rank,
};

/// The CUDA engine of one rank.
pub(crate) struct CudaEngine {
    core: Arc<Core>,
    low_latency: Arc<LowLatency>,
    device: Device,
}

impl CudaEngine {
    /// Makes and exchanges the regions. Collective.
    pub(crate) fn new(communicator: &Communicator, config: &BufferConfig) -> Result<Self> {
        communicator.check_agreement(&agreement(config))?;
        let context = communicator.all_succeed(open(communicator, config))?;
        let device = Device::Cuda(context.device.ordinal as u32);
        let ranks = communicator.size();
        let area = Control::new(ranks, config.num_experts)
            .and_then(|control| Area::new(control.bytes, ranks, config.low_latency.as_ref()));
        let area = communicator.all_succeed(area)?;
        let core = Arc::new(Core::new(communicator, config, context, area.bytes)?);
        let low_latency = communicator.all_succeed(LowLatency::new(&core, area, device))?;
        Ok(Self {
            core,
            low_latency: Arc::new(low_latency),
            device,
        })
    }

    /// The GPU's number among those that this process sees.
    pub(crate) fn ordinal(&self) -> usize {
        self.core.context.device.ordinal
    }
}

/// The GPU that a rank uses.
fn open(communicator: &Communicator, config: &BufferConfig) -> Result<Arc<Context>> {
    let gpus = Gpu::all()?;
    let ordinal = config
        .device
        .unwrap_or_else(|| communicator.local_rank() % gpus.len().max(1));
    let gpu = gpus.get(ordinal).ok_or_else(|| {
        Error::invalid(
            "device",
            ordinal,
            format!(
                "must be below the {} GPUs that this process sees",
                gpus.len()
            ),
        )
    })?;
    Context::new(*gpu)
}

/// What must be the same on all ranks.
fn agreement(config: &BufferConfig) -> Vec<(&'static str, String)> {
    let text = |value: Option<usize>| value.map_or("not set".into(), |value| value.to_string());
    let low_latency = config.low_latency.map_or("none".into(), |c| {
        format!(
            "num_max_dispatch_tokens_per_rank {}, hidden {}, num_experts {}, exact_top_k {}",
            c.max_tokens_per_rank,
            c.hidden,
            c.num_experts,
            text(c.exact_top_k)
        )
    });
    vec![
        ("engine", "cuda".into()),
        ("num_experts", text(config.num_experts)),
        ("hidden", text(config.hidden)),
        ("top_k", text(config.top_k)),
        ("low_latency", low_latency),
        ("enable_shrink", config.enable_shrink.to_string()),
        ("split_launches", config.split_launches.to_string()),
    ]
}

impl Engine for CudaEngine {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn takes(&self, device: Device) -> bool {
        device == self.device
    }

    fn layout(&self, topk_idx: Tensor<'_>, num_experts: usize, stream: Stream) -> Result<Layout> {
        let (core, tokens) = (&self.core, topk_idx.shape()[0]);
        let on = core.begin(stream)?;
        let sizes = [core.ranks * 4, num_experts * 4, tokens * core.ranks];
        let mut bytes = 0;
        let at = sizes.map(|size| {
            let at = bytes;
            bytes += (size as u64).next_multiple_of(256);
            at
        });
        let block = Arc::new(core.block(bytes, Purpose::Metadata)?);
        let params = LayoutParams {
            topk: Matrix::of(Some(&topk_idx)),
            rank_counts: block.address() + at[0],
            expert_counts: block.address() + at[1],
            is_token_in_rank: block.address() + at[2],
            tokens: tokens as u32,
            top_k: topk_idx.shape()[1] as u32,
            index_bytes: topk_idx.dtype().size() as u32,
            experts: num_experts as u32,
            ranks: core.ranks as u32,
            reserved: 0,
        };
        let kernel = core.kernels.get(keys::ANY_DISPATCH, c"dispatch_layout")?;
        let blocks = (tokens as u32).div_ceil(256).clamp(1, core.sms(None));
        let shape = core.kernels.shape(blocks, 256, 0, "topk_idx")?;
        // SAFETY: the block is ours and large enough; the struct is the kernel's parameter, and the
        // caller keeps its tensor.
        unsafe {
            on.stream.zero(block.address(), at[2])?;
            kernel.launch(&on.stream, shape, &params)?;
        }
        on.end()?;
        if on.recorded {
            block.keep();
        }
        let tensor = |part: usize, dtype: DType, shape: &[usize]| {
            landing::device_tensor(
                block.address() + at[part],
                dtype,
                shape,
                self.device,
                &block,
            )
        };
        Layout::from_device_parts(DeviceLayout {
            num_tokens_per_rank: tensor(0, DType::I32, &[core.ranks])?,
            num_tokens_per_expert: tensor(1, DType::I32, &[num_experts])?,
            is_token_in_rank: tensor(2, DType::U8, &[tokens, core.ranks])?,
        })
    }

    fn reject(&self, operation: Operation, reject: &Reject) {
        let text = || self.core.reject_text(reject);
        let done = match operation {
            Operation::Combine => combine::reject(&self.core, text()),
            Operation::LowLatencyDispatch | Operation::LowLatencyCombine => {
                self.low_latency.reject(operation, reject)
            }
            _ => dispatch::reject(&self.core, text()),
        };
        // If the call cannot even begin, the group has ended and the peers know.
        if let Err(error) = done {
            tracing::warn!(%error, "a reject could not be sent");
        }
    }

    fn dispatch(&self, input: &DispatchInput<'_>) -> Result<Box<dyn DispatchCall>> {
        dispatch::begin(&self.core, input)
    }

    fn combine(&self, input: &CombineInput<'_>) -> Result<Box<dyn CombineCall>> {
        combine::begin(&self.core, input)
    }

    fn low_latency_dispatch(
        &self,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<Box<dyn LowLatencyDispatchCall>> {
        self.low_latency.dispatch(input)
    }

    fn low_latency_combine(
        &self,
        input: &mut LowLatencyCombineInput<'_>,
    ) -> Result<Box<dyn LowLatencyCombineCall>> {
        self.low_latency.combine(input)
    }

    fn barrier(&self) -> Result<()> {
        match self.core.enable_shrink {
            true => self.low_latency.barrier(),
            false => self.core.barrier(),
        }
    }

    fn loan(&self, dtype: DType, shape: &[usize]) -> Result<Loan> {
        self.core.failures.check_failed()?;
        let dense = Shape::dense(dtype, shape)?;
        let block = Arc::new(
            self.core
                .block(dense.bytes() as u64, Purpose::CombineLoan)?,
        );
        let memory = landing::CudaLoan::new(&block, 0, self.device);
        Ok(Loan::new(Box::new(memory), dtype, shape))
    }

    fn low_latency_combine_buffer(&self, handle: &LowLatencyHandle, hidden: usize) -> Result<Loan> {
        let local = handle.num_experts() / self.core.ranks;
        let rows = self.core.ranks * handle.max_tokens_per_rank();
        self.loan(DType::Bf16, &[local, rows, hidden])
    }

    fn reserve(&self, bytes: usize) -> Result<()> {
        self.core.reserve(bytes as u64)
    }

    fn masks(&self) -> Vec<bool> {
        self.low_latency.masks()
    }

    fn set_mask(&self, rank: Rank, masked: bool) {
        if let Err(error) = self.low_latency.set_mask(rank, masked) {
            tracing::warn!(%error, "rank {rank} could not be masked or taken back");
        }
    }

    fn check(&self) -> Result<()> {
        self.core.failures.check()
    }

    fn statistics(&self) -> Statistics {
        Statistics {
            calls: self.core.calls(),
            wire_bytes: self.low_latency.wire_bytes(),
            memory: self.core.memory_use(vec![
                ("control words", self.core.control.bytes),
                ("low-latency slots", self.low_latency.area().bytes),
            ]),
            ..Statistics::default()
        }
    }

    #[cfg(test)]
    fn take_seen_sms(&self) -> Result<u32> {
        self.core.take_seen_sms()
    }
}
