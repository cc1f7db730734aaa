//! Low-latency calls: one launch sends, another receives, and nothing runs in between.
//!
//! # Protocol
//!
//! A call has a number `n`, which is counted on the GPU, so that a recorded graph can be replayed.
//! Dispatch and combine share the numbers; high-throughput calls have their own, since one of them
//! may come between the two launches. Landing memory ([`area`]) has two halves; call `n` uses half
//! `n % 2` of every region.
//!
//! ```text
//! dispatch, rank s to rank d
//!   send     s -> d  row           of each of the block's tokens that chose d, cast in registers, to
//!                                  slot (rank s, token): only its own choices must be known
//!            s  every block counts the tokens before its own: a token's position at an expert is
//!               the number of those that chose it
//!            s -> d  header        of every token, in tagged words: local expert and position for
//!                                  each choice, or that it is not d's
//!            s -> d  announcement  terms, and rows for each of d's experts; by the last block,
//!                                  which has counted all tokens
//!            s -> d  flag          of each block: its rows are there
//!   receive  d  waits for all announcements; a prefix over sources says where each one's rows begin
//!            d  waits for each token's header, and if it is d's for the block's flag; copies the row
//!               to its experts
//! combine, rank d (experts) to owner s
//!   send     s -> d  choices       of each token: local expert and position (as in dispatch, found
//!                                  in the same way) and weight, in tagged words; announcement
//!   partials d  waits for a token's choices, reads its experts' rows, writes their weighted sum to
//!               s's slot (rank d, token); exact: each row to slot (token, choice)
//!            d -> s  flag          of each chunk of s's tokens
//!   receive  s  waits for the flags of the ranks that its tokens chose, adds their sums
//! ```
//!
//! *Tagged words.* A 64-bit word with the low half of the call's number above and a value below is
//! whole and of this call when its number is right, so it needs no fence, no flag and no clearing.
//! Announcements, choices, headers and flags consist of them, at places where nothing else is ever
//! written.
//!
//! *Flags* come behind rows: the threads of a block store, the block meets, one thread fences
//! (`fence.acq_rel.sys`, which is cumulative over the meeting) and stores the flag. The reader
//! acquires the flag, its warp meets, and all lanes read. One fence per block and not per token: it
//! takes until the link has carried the rows, and a round trip more. So the last warp of a block does
//! it, and does not receive: the others meet at a barrier of their own (`meet_receivers`) and go on
//! with headers and announcements, which need no fence. The barrier before the fence is one of all
//! threads. With masks the headers are written before that barrier, so that whoever has seen the
//! flags of a rank never waits for it any more.
//!
//! In a combine the last warp publishes chunks of other ranks' tokens when the warps of the block have
//! counted them done in shared memory (with release; it acquires the count before it fences), while
//! those go on to receive. Chunks of the rank's own tokens are published by the warp that is the last
//! to have written its sums: it and the readers are on one GPU, so `fence.acq_rel.gpu` is enough,
//! which need not wait for what is still on the link. With masks the block meets between its partials
//! and its receive.
//!
//! *Reuse of a half.* A rank writes for call `n` into memory that was last used in call `n - 2`. It
//! may, because nobody reads that any more: the rank launches call `n` behind its own receive of
//! `n - 1` (a call's receive is launched before the next call's send; if the caller does not, the
//! next call does), and in call `n - 1` it has waited for the announcement of every rank, in the
//! receive of a dispatch or in the partials of a combine. A peer announces `n - 1` behind its receive
//! of `n - 2`, with which its reads of that half ended. Announcements and flags are halved in the
//! same way. So a call never waits before it writes.
//!
//! *Numbers.* A send reads how many calls were received and writes how many came before its own; a
//! receive reads the latter and writes the former. Neither launch reads what it writes itself, so
//! blocks need not meet for it, and kernel boundaries order the rest. One launch for all of a call
//! does: of its blocks the one that is the last to have read the number writes it as it ends.
//!
//! *Positions* of a combine are where the owner's tokens would be if they were dispatched with the
//! choices of the combine, which are usually those of the dispatch. The expert's side checks each row
//! against `src_info` while the row is already on its way and searches its source's range if it is
//! another token's. A warp looks for the rows of its first token while announcements are still on
//! their way, as if all ranks had as many tokens as this one: choices are tagged, and what it reads
//! lies in this rank's memory whatever a peer wrote. What it found counts if the announcements say
//! that this token is its first.
//!
//! *Masks* (`enable_shrink`). A launch reads the mask when it begins. Where all blocks must agree who
//! takes part, because rows are packed, a block first waits for everything of every rank; the first
//! block to conclude about a rank decides for all (a compare-and-swap on a word with the call's
//! number). A rank that did not come is told (`excluded`) and masks, when it comes, the ranks that go
//! on without it. One that stops for the rest of its peers' deadline in the middle of its writes may
//! still write into a later call.
//!
//! *Verdicts.* An announcement carries the terms that all ranks must agree on, and a status. The
//! launch that waits for announcements compares them; if they differ, or a rank rejected the call,
//! no row is put anywhere, and [`check`](crate::Buffer::check) tells the host.

mod area;
mod combine;
mod dispatch;
pub(crate) mod params;

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Zeroable;

pub(crate) use self::area::Area;
use self::{
    area::{FLAGS, Needed},
    params::{
        LowLatencyBarrierParams, LowLatencyCombineParams, LowLatencyDispatchParams,
        LowLatencyParams, LowLatencyState, phase,
    },
};
use super::{
    core::{Core, Half, OnStream},
    params::{Matrix, Terms},
    progress::Progress,
};
use crate::{
    buffer::{LowLatencyCombineInput, LowLatencyDispatchInput},
    engine::{
        LowLatencyCombineCall, LowLatencyDispatchCall, Operation,
        cuda::{
            driver::{memory::DeviceMemory, stream::Stream},
            jit::{Key, LowLatencyKey},
        },
    },
    error::{Error, Reject, Result},
    tensor::{Device, Tensor},
    topology::Rank,
};

/// Threads of a block, as in low_latency.cuh.
fn threads(key: LowLatencyKey) -> u32 {
    if key.hidden == 0 { 512 } else { 1024 }
}

/// The low-latency side of one rank's engine.
pub(crate) struct LowLatency {
    core: Arc<Core>,
    area: Area,
    device: Device,
    /// A [`LowLatencyState`].
    state: DeviceMemory,
    /// A word of bits.
    masks: DeviceMemory,
    /// For what the host reads and writes of them, beside the calls.
    stream: Stream,
    open: Mutex<Option<Open>>,
}

/// A call whose receiving half was not launched yet.
struct Open {
    progress: Arc<Progress>,
    discard: Discard,
}

/// What the receiving half needs to let a call's rows go.
enum Discard {
    Dispatch(Box<LowLatencyDispatchParams>),
    Combine(Box<LowLatencyCombineParams>),
}

impl LowLatency {
    /// `area` is behind the control area.
    pub(crate) fn new(core: &Arc<Core>, area: Area, device: Device) -> Result<Self> {
        let memory = |bytes: &[u8], purpose: &'static str| -> Result<DeviceMemory> {
            let memory = DeviceMemory::new(&core.context, bytes.len(), purpose)?;
            memory.upload(&core.side, bytes)?;
            Ok(memory)
        };
        Ok(Self {
            core: Arc::clone(core),
            area,
            device,
            state: memory(
                bytemuck::bytes_of(&LowLatencyState::zeroed()),
                "low-latency state",
            )?,
            masks: memory(&[0; 8], "masks")?,
            stream: Stream::new(&core.context)?,
            open: Mutex::default(),
        })
    }

    /// Bytes of every region that the calls use.
    pub(crate) fn area(&self) -> &Area {
        &self.area
    }

    /// Sends.
    pub(crate) fn dispatch(
        self: &Arc<Self>,
        input: &LowLatencyDispatchInput<'_>,
    ) -> Result<Box<dyn LowLatencyDispatchCall>> {
        self.core.count_call();
        dispatch::begin(self, input)
            .map_err(|error| self.reject_for(Operation::LowLatencyDispatch, error))
    }

    /// Sends.
    pub(crate) fn combine(
        self: &Arc<Self>,
        input: &mut LowLatencyCombineInput<'_>,
    ) -> Result<Box<dyn LowLatencyCombineCall>> {
        self.core.count_call();
        combine::begin(self, input)
            .map_err(|error| self.reject_for(Operation::LowLatencyCombine, error))
    }

    /// Takes part in a call only to reject it.
    pub(crate) fn reject(&self, operation: Operation, reject: &Reject) -> Result<()> {
        let text = self.core.reject_text(reject);
        let on = self.core.begin_aside()?;
        self.give_up_open(&on)?;
        let combines = operation == Operation::LowLatencyCombine;
        let launch = |phases: u32| match combines {
            true => combine::reject(self, &on, text, phases),
            false => dispatch::reject(self, &on, text, phases),
        };
        match &self.core.split {
            None => launch(phase::REJECT)?,
            Some(split) => {
                // As many parts as the peers' calls have.
                launch(phase::REJECT | phase::SEND)?;
                split.meet(&on.stream)?;
                launch(phase::REJECT | phase::RECEIVE)?;
                split.meet(&on.stream)?;
                if combines {
                    split.meet(&on.stream)?;
                }
            }
        }
        on.end()
    }

    /// Tells the peers about arguments that were found unusable here.
    fn reject_for(&self, operation: Operation, error: Error) -> Error {
        if let Error::InvalidArgument(reject) = &error
            && let Err(other) = self.reject(operation, reject)
        {
            tracing::warn!(%other, "a reject could not be sent");
        }
        error
    }

    /// Waits until all ranks that are not masked are here, and masks those that do not come.
    pub(crate) fn barrier(&self) -> Result<()> {
        let core = &self.core;
        let on = core.begin_aside()?;
        let mut group = core.group(Operation::Barrier, Half::Barrier, true);
        self.area.describe(&mut group);
        let params = LowLatencyBarrierParams {
            group,
            masks: self.masks.address(),
            barrier_at: self.area.barrier_at,
            excluded_at: self.area.excluded_at,
            shrink: core.enable_shrink.into(),
            reserved: 0,
        };
        if let Some(split) = &core.split {
            return split.meet(&on.stream);
        }
        let function = core
            .kernels
            .get(Key::LowLatencyBarrier, c"low_latency_barrier")?;
        let shape = core.kernels.shape(1, 64, 0, "barrier")?;
        // SAFETY: the struct is the kernel's parameter; its addresses live as long as the buffer.
        unsafe { function.launch(&on.stream, shape, &params)? };
        on.end()?;
        on.stream.synchronize()?;
        core.failures.check_failed()
    }

    /// Whether each rank is masked, after the calls so far.
    pub(crate) fn masks(&self) -> Vec<bool> {
        let bits = self.read_masks().unwrap_or_else(|error| {
            tracing::warn!(%error, "masks could not be read");
            0
        });
        (0..self.core.ranks)
            .map(|rank| bits >> rank & 1 != 0)
            .collect()
    }

    fn read_masks(&self) -> Result<u64> {
        self.core.follow(&self.stream)?;
        let bytes = self.masks.download(&self.stream)?;
        Ok(bytemuck::pod_read_unaligned(&bytes))
    }

    /// Masks a rank, or takes it back, for the calls that follow.
    pub(crate) fn set_mask(&self, rank: Rank, masked: bool) -> Result<()> {
        let core = &self.core;
        let (bit, bits) = (1u64 << rank.0, self.read_masks()?);
        let bits = if masked { bits | bit } else { bits & !bit };
        // Nothing is launched before this is done.
        self.masks.upload(&self.stream, &bits.to_ne_bytes())?;
        if !masked {
            // It does not have to stay away any more.
            let word = |of: usize, index: usize| {
                core.symmetric.base(of) + self.area.excluded_at + index as u64 * 8
            };
            // SAFETY: both words lie in regions that are mapped as long as the buffer lives.
            unsafe {
                self.stream.zero(word(rank.0, core.rank), 8)?;
                self.stream.zero(word(core.rank, rank.0), 8)?;
            }
            self.stream.synchronize()?;
        }
        Ok(())
    }

    /// Bytes that calls have written to landing memory by now.
    pub(crate) fn wire_bytes(&self) -> u64 {
        self.state.download(&self.stream).map_or(0, |bytes| {
            bytemuck::pod_read_unaligned::<LowLatencyState>(&bytes).wire_bytes
        })
    }

    /// Launches the receiving half of a call that the caller began and left.
    fn give_up_open(&self, on: &OnStream) -> Result<()> {
        let open = self
            .open
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(open) = open.filter(|open| open.progress.abandon()) else {
            return Ok(());
        };
        self.discard(on, &open.discard)
    }

    fn discard(&self, on: &OnStream, what: &Discard) -> Result<()> {
        match what {
            Discard::Dispatch(params) => dispatch::discard(self, on, **params),
            Discard::Combine(params) => combine::discard(self, on, **params),
        }
    }

    fn set_open(&self, progress: &Arc<Progress>, discard: Discard) {
        let open = Open {
            progress: Arc::clone(progress),
            discard,
        };
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(open);
    }

    /// Blocks of a launch: all SMs of this rank, as far as there are flags for them.
    fn blocks(&self) -> u32 {
        self.core.all_sms().clamp(1, FLAGS)
    }

    /// What both calls are told, for a launch that sends.
    fn common(&self, operation: Operation) -> LowLatencyParams {
        let core = &self.core;
        let mut group = core.group(operation, Half::LowLatencyReceive, true);
        group.second_state = core.state(Half::LowLatencySend);
        self.area.describe(&mut group);
        LowLatencyParams {
            group,
            shared: self.state.address(),
            masks: self.masks.address(),
            tagged_at: self.area.tagged_at,
            tagged_half: self.area.tagged_half,
            rows_at: self.area.rows_at,
            rows_half: self.area.rows_half,
            excluded_at: self.area.excluded_at,
            topk: Matrix::zeroed(),
            reject_text: 0,
            tokens: 0,
            top_k: 1,
            index_bytes: 8,
            experts: core.ranks as u32,
            max_tokens: 1,
            hidden: 8,
            format: 1,
            row_stride: 128,
            terms: 0,
            phases: phase::SEND,
            chunk_tokens: 1,
            shrink: core.enable_shrink.into(),
            discard: 0,
            reserved: 0,
        }
    }

    /// Fills in what a call's tensors say. `format` counts from 1.
    fn describe(&self, params: &mut LowLatencyParams, call: &CallShape<'_>) -> Result<()> {
        let (tokens, top_k) = (call.topk.shape()[0], call.topk.shape()[1]);
        let ranks = self.core.ranks as u64;
        let stride = call.row_bytes.next_multiple_of(area::ROW_ALIGN);
        let rows = match call.exact {
            true => call.max_tokens as u64 * top_k as u64,
            false => call.max_tokens as u64 * ranks,
        };
        self.area.check(&Needed {
            ranks,
            experts: call.experts as u64,
            tokens: call.max_tokens as u64,
            top_k: top_k as u64,
            rows,
            stride,
        })?;
        params.topk = Matrix::of(Some(&call.topk));
        params.tokens = tokens as u32;
        params.top_k = top_k as u32;
        params.index_bytes = call.topk.dtype().size() as u32;
        params.experts = call.experts as u32;
        params.max_tokens = call.max_tokens as u32;
        params.hidden = call.hidden as u32;
        params.format = call.format;
        params.row_stride = u32::try_from(stride).map_err(|_| {
            Error::invalid("hidden", call.hidden, "must make rows of less than 4 GiB")
        })?;
        params.terms = Terms {
            operation: params.group.operation as u8,
            top_k: top_k as u8,
            dtype: (call.format - 1) as u8,
            ..Terms::default()
        }
        .word();
        params.chunk_tokens = (tokens as u32).div_ceil(self.blocks()).max(1);
        Ok(())
    }
}

/// The shape of a call.
struct CallShape<'a> {
    topk: Tensor<'a>,
    experts: usize,
    max_tokens: usize,
    hidden: usize,
    /// Bytes of a row on the wire, scales included.
    row_bytes: u64,
    format: u32,
    exact: bool,
}

/// Whether one launch does all of the call; it was not made yet.
fn is_whole(common: &LowLatencyParams) -> bool {
    common.phases & phase::SEND != 0 && common.phases & phase::RECEIVE != 0
}

/// The launch that receives: it reads the number that the send has written.
fn receiving(core: &Core, common: &mut LowLatencyParams) {
    common.group.state = core.state(Half::LowLatencySend);
    common.group.second_state = core.state(Half::LowLatencyReceive);
    common.phases = phase::RECEIVE;
}
