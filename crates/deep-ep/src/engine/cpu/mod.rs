//! The CPU engine: threads that copy and sum rows in memory that all ranks map.
//!
//! # Protocol
//!
//! Ranks speak through mailboxes in each other's regions ([`control`], [`sync`]). A call has a
//! number `n`, the same on all ranks; its messages carry it, so nothing is ever cleared.
//!
//! ```text
//! high-throughput dispatch, rank s to rank d
//!   begin    s  metadata (source tokens, choices, weights, scales) into s's own heap
//!            s -> all  Announce   terms, rows for every rank, where the metadata is, pushes or not
//!            s  rows into s's own heap, once per token            } only if s does
//!            s -> all  Delivered  staged at an offset of s        } not push
//!   finish   d  waits for all Announce, so it knows N and every row's final place
//!            d -> s    Landing    final place in d's heap, or none    } only if s pushes
//!            s  rows to their final place at d                        }
//!            s -> d    Delivered  pushed; or staged, if d gave no place }
//!            d  waits for all Delivered, copies staged rows from s to their final place
//!            d -> all  Finished   n
//! high-throughput combine, rank d to owner s
//!   begin    d -> all  Announce   terms, rows of every rank
//!            d  rows of other ranks' tokens into d's own heap, unless they are in a loan of it
//!            d -> s    Delivered  where s's rows are
//!   finish   s  waits for all Delivered, sums a token at a time straight from where rows are
//!            s -> all  Finished   n
//! low-latency dispatch
//!   send     s  a header (source token, local experts) and a row into d's landing slot
//!            s -> all  Announce   terms, rows for every rank
//!   receive  d  waits for all Announce, copies each row to its local experts
//!            d -> all  Finished   n
//! low-latency combine
//!   send     s  (expert, weight) of its tokens into d's landing memory
//!            s -> all  Announce   terms
//!            d  waits for s's Announce, sums its experts' rows per token into s's slot
//!            d -> s    Delivered
//!   receive  s  waits for all Delivered, sums the ranks' partial sums
//!            s -> all  Finished   n
//! ```
//!
//! *Who pushes.* A rank that wants its own rows as a loan expects that the others do too, and
//! pushes: each row is written once. Otherwise rows wait in their source's memory, once per token,
//! for receivers to pull: nothing that `begin` does waits for a peer's same call, so calls on
//! several buffers may be finished in any order.
//!
//! *Ordering.* Everything a message speaks of is written before the message is posted with release,
//! streamed rows behind a store fence; the reader acquires the message first.
//!
//! *Reuse.* A mailbox or landing half of call `n` was last used by call `n - 2`; a rank begins call
//! `n` only when every peer has posted Finished `n - 2` or later. Blocks of the heap that peers may
//! read in call `n` are given back when every peer has posted Finished `n`. So a Finished is posted
//! only when a rank neither reads nor writes any peer's memory for that call any more.
//!
//! *Rejects and abandoned calls.* A rank that does not accept a call's arguments posts a reject in
//! place of its Announce. A verdict about a call is given only when all Announce are there, so all
//! ranks give the same one. A call that is dropped in between posts *abandoned* in place of the
//! messages it still owes.
//!
//! *Masked peers.* A rank that did not come in time is told (`excluded` in [`control`]) that others
//! go on without it; it looks before it writes to them for a call, and masks them too. So a rank
//! that is late does not write to landing memory that is used for later calls; one that is stopped
//! for the rest of its peers' deadline in the middle of its writes may. Heap blocks are not used
//! again while a masked rank that is not gone may still read them.
//!
//! *Dead peers.* Every wait has a deadline, ends when the bootstrap connection of a rank waited for
//! is lost, and ends when the abort word is raised, which whoever gives up does in all regions.
//! After that no memory is given back, since a slow peer may still write, and every call fails.

mod announce;
mod combine;
mod control;
mod copy;
mod core;
mod dispatch;
mod group;
mod low_latency;
mod rows;
mod sync;
mod workers;

use std::sync::{Arc, atomic::Ordering};

pub(crate) use self::low_latency::half_bytes as low_latency_half_bytes;

use self::{
    announce::{Announcement, Terms, gather},
    control::Layout as ControlLayout,
    core::{Core, CpuLoan, Member},
    group::{Absent, Group},
    low_latency::Area,
    workers::Workers,
};
use crate::{
    bootstrap::Communicator,
    buffer::{
        BufferConfig, CombineInput, DispatchInput, Layout, Loan, LowLatencyCombineInput,
        LowLatencyDispatchInput, LowLatencyHandle, MemoryUse, Statistics, Stream,
    },
    dtype::DType,
    engine::{
        CombineCall, DispatchCall, Engine, LoanMemory, LowLatencyCombineCall,
        LowLatencyDispatchCall, Operation,
    },
    error::{Error, Reject, Result},
    memory::{
        exchange::Exchange,
        heap::{Heap, Purpose},
        region::{Backing, MAX_RESERVE, Region, Window},
    },
    routing::ExpertMap,
    tensor::{Device, OwnedTensor, Tensor},
    topology::{Rank, Topology},
};

/// The CPU engine of one rank.
pub(crate) struct CpuEngine {
    member: Arc<Member>,
    fixed: Vec<(&'static str, u64)>,
}

impl CpuEngine {
    /// Makes and exchanges the regions. Collective.
    pub(crate) fn new(communicator: &Communicator, config: &BufferConfig) -> Result<Self> {
        communicator.check_agreement(&agreement(config))?;
        let ranks = communicator.size();
        let layout = ControlLayout::new(ranks);
        let area = config
            .low_latency
            .map(|low_latency| Area::new(layout.bytes(), ranks, &low_latency));
        let area = area.transpose()?;
        let fixed = layout.bytes() + area.as_ref().map_or(0, Area::bytes);
        // A rank that fails tells the others, which would otherwise wait for it.
        let region = communicator.all_succeed(Self::region(communicator, config, fixed))?;
        let windows = Self::windows(communicator, config, &region);
        let parts = windows.and_then(|windows| Ok((windows, Workers::new(config.num_sms, ranks)?)));
        // Nobody posts into a region before everybody has mapped it.
        let (windows, workers) = communicator.all_succeed(parts)?;
        let group = Group::new(communicator, &region, windows, config.timeout);
        let heap = Heap::new(fixed as u64, region.committed(), region.reserve());
        let absent = if config.enable_shrink {
            Absent::Mask
        } else {
            Absent::Fail
        };
        let mut named = vec![("control words", layout.bytes() as u64)];
        named.extend(
            area.as_ref()
                .map(|area| ("low-latency landing", area.bytes() as u64)),
        );
        let core = Arc::new(Core::new(group, region, heap, workers, area, absent));
        Ok(Self {
            member: Arc::new(Member { core }),
            fixed: named,
        })
    }

    fn region(
        communicator: &Communicator,
        config: &BufferConfig,
        fixed: usize,
    ) -> Result<Arc<Region>> {
        let backing = if communicator.in_process() {
            Backing::Anonymous
        } else {
            Backing::Memfd
        };
        let start = fixed.saturating_add(config.scale_up_bytes) as u64;
        let reserve = match config.max_bytes {
            Some(max) => (max as u64).min(MAX_RESERVE).max(fixed as u64),
            None => Region::default_reserve(communicator.size())?,
        };
        let region = Region::new(backing, reserve)?;
        region.commit(start)?;
        Ok(Arc::new(region))
    }

    fn windows(
        communicator: &Communicator,
        config: &BufferConfig,
        region: &Arc<Region>,
    ) -> Result<Vec<Window>> {
        if communicator.in_process() {
            let regions = communicator.shared(region.clone())?;
            return Ok(regions.into_iter().map(Window::Local).collect());
        }
        let domain: Vec<_> = (0..communicator.size()).map(Rank).collect();
        Exchange {
            rank: communicator.rank(),
            domain: &domain,
            region,
            timeout: config.timeout,
        }
        .run(&|mine| communicator.all_gather(mine))
    }

    fn core(&self) -> &Core {
        &self.member.core
    }
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
        ("engine", "cpu".into()),
        ("num_experts", text(config.num_experts)),
        ("hidden", text(config.hidden)),
        ("top_k", text(config.top_k)),
        ("low_latency", low_latency),
        ("enable_shrink", config.enable_shrink.to_string()),
    ]
}

impl Engine for CpuEngine {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn takes(&self, device: Device) -> bool {
        device == Device::Host
    }

    fn layout(&self, topk_idx: Tensor<'_>, num_experts: usize, _: Stream) -> Result<Layout> {
        let ranks = self.core().group.ranks();
        let map = ExpertMap::new(num_experts, ranks)?;
        Layout::from_topk(topk_idx, &map, &Topology::single_node(ranks)?)
    }

    fn check(&self) -> Result<()> {
        self.core().group.check_abort()
    }

    fn reject(&self, operation: Operation, reject: &Reject) {
        // If the call cannot even begin, the group has ended and the peers know.
        if let Ok(turn) = self.core().begin(operation) {
            turn.reject(reject);
        }
    }

    fn dispatch(&self, input: &DispatchInput<'_>) -> Result<Box<dyn DispatchCall>> {
        dispatch::begin(&self.member, input)
    }

    fn combine(&self, input: &CombineInput<'_>) -> Result<Box<dyn CombineCall>> {
        combine::begin(&self.member, input)
    }

    fn low_latency_dispatch(
        &self,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<Box<dyn LowLatencyDispatchCall>> {
        low_latency::dispatch::send(&self.member, input)
    }

    fn low_latency_combine(
        &self,
        input: &mut LowLatencyCombineInput<'_>,
    ) -> Result<Box<dyn LowLatencyCombineCall>> {
        low_latency::combine::send(&self.member, input)
    }

    fn barrier(&self) -> Result<()> {
        let core = self.core();
        let turn = core.begin(Operation::Barrier)?;
        let terms = Terms::new(Operation::Barrier);
        let own = Announcement::new(terms, core.group.ranks());
        own.post(&core.group, turn.call);
        let done = gather(&core.group, turn.call, &own, core.absent, None).map(drop);
        turn.finish(done)
    }

    fn loan(&self, dtype: DType, shape: &[usize]) -> Result<Loan> {
        let core = &self.member.core;
        core.group.check_abort()?;
        let bytes = shape
            .iter()
            .try_fold(dtype.size(), |bytes, &n| bytes.checked_mul(n));
        let bytes = bytes.ok_or_else(|| {
            Error::invalid(
                "shape",
                format!("{shape:?}"),
                "must span fewer than 2^63 bytes",
            )
        })?;
        let block = core.alloc(bytes, Purpose::CombineLoan)?;
        Ok(Loan::new(
            Box::new(CpuLoan::new(core.clone(), block)),
            dtype,
            shape,
        ))
    }

    /// The sums that leave are formed here from the experts' rows, so rows need not be in symmetric
    /// memory: pages of a private tensor come when they are written.
    fn low_latency_combine_buffer(&self, handle: &LowLatencyHandle, hidden: usize) -> Result<Loan> {
        let local = handle.num_experts() / self.core().group.ranks();
        let rows = self.core().group.ranks() * handle.max_tokens_per_rank();
        let shape = [local, rows, hidden];
        let tensor = OwnedTensor::zeros(DType::Bf16, &shape)?;
        Ok(Loan::new(
            Box::new(PrivateLoan(tensor)),
            DType::Bf16,
            &shape,
        ))
    }

    fn reserve(&self, bytes: usize) -> Result<()> {
        self.core().reserve(bytes as u64)
    }

    fn masks(&self) -> Vec<bool> {
        let group = &self.core().group;
        (0..group.ranks())
            .map(|rank| group.is_masked(rank))
            .collect()
    }

    fn set_mask(&self, rank: Rank, masked: bool) {
        self.core().group.set_mask(rank.0, masked);
    }

    fn statistics(&self) -> Statistics {
        let core = self.core();
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let heap = core.heap().stats();
        Statistics {
            row_bytes_copied: read(&core.counters.rows),
            metadata_bytes_copied: read(&core.counters.metadata),
            bytes_summed: read(&core.counters.summed),
            wire_bytes: read(&core.counters.wire),
            calls: core.calls(),
            memory: MemoryUse {
                reserved: core.region().reserve(),
                committed: core.region().committed(),
                in_use: heap.total.in_use + heap.total.quarantined,
                peak: heap.total.peak,
                peak_by_purpose: Purpose::ALL
                    .into_iter()
                    .zip(heap.by_purpose)
                    .filter(|(_, usage)| usage.peak > 0)
                    .map(|(purpose, usage)| (purpose.name(), usage.peak))
                    .collect(),
                fixed: self.fixed.clone(),
            },
        }
    }
}

/// A loan that no peer reads.
struct PrivateLoan(OwnedTensor);

impl LoanMemory for PrivateLoan {
    fn as_ptr(&self) -> *const u8 {
        self.0.as_tensor().as_ptr()
    }

    fn wait_unread(&self) -> Result<()> {
        Ok(())
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
