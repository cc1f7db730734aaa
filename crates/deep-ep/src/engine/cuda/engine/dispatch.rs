//! High-throughput dispatch: launches, and what the caller gets.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use bytemuck::Zeroable;

use super::{
    control::{ANNOUNCE_WORDS, FLAGS},
    core::{Core, Discard, Half, OnStream, Open, Piece, Progress},
    failures::Concluded,
    keys,
    landing::{CudaLoan, LandingLayout, device_tensor},
    params::{
        DispatchParams, GroupParams, LANDING_UNIT, Matrix, Terms, phase, result_word, route_source,
        verdict,
    },
};
use crate::engine::cuda::driver::{
    module::{Function, Shape},
    stream::Stream,
};
use crate::{
    buffer::{
        DeviceRoutes, DispatchHandle, DispatchInput, DispatchOutput, Dispatched, Landing, Loan,
        ReceivedCounts, Routes, TopK, check_dispatch_output,
    },
    dtype::DType,
    engine::{DispatchCall, Operation},
    error::{Error, Result},
    memory::heap::Purpose,
    tensor::{Device, OwnedTensor, Tensor},
    topology::Rank,
};

/// Threads of a block, as in dispatch.cu.
const THREADS: u32 = 512;
/// Choices of a token that travel, at most: one for each lane of a warp.
pub(super) const MAX_TOP_K: u32 = 32;
/// Warps of a block.
const WARPS: u64 = 16;
/// Tokens that a thread looks at before anybody waits, as in dispatch.cu.
const CHUNKS: u64 = 4;
/// From so many blocks on, some send to other ranks and the rest keep this rank's rows.
const CREWS_FROM: u32 = 20;
/// Slots that a block keeps in shared memory at most.
const SLOTS: usize = 8192;

/// Choices that travel with rows.
fn choices<'a>(input: &DispatchInput<'a>) -> Option<TopK<'a>> {
    match input.routes {
        Routes::TopK { topk, .. } => Some(topk),
        Routes::Layout { topk, .. } => topk,
        Routes::Handle(_) => None,
    }
}

/// A dispatch that was launched.
pub(super) struct InFlight {
    core: Arc<Core>,
    number: u64,
    on: OnStream,
    params: DispatchParams,
    device: Device,
    landing: Arc<Piece>,
    layout: LandingLayout,
    handle: Option<HandleParts>,
    /// Source tokens of worst-case outputs along a given handle.
    padding: Option<Arc<Piece>>,
    counts: Option<ReceivedCounts>,
    expert_alignment: usize,
    worst: Option<usize>,
    sms: Sms,
    /// Both halves are one launch.
    fused: bool,
    progress: Arc<Progress>,
}

/// SMs of a call: in all, and of each half.
#[derive(Debug, Clone, Copy)]
struct Sms {
    total: u32,
    send: u32,
    receive: u32,
}

impl Sms {
    /// A link is full with a third of what the copies on this side need.
    fn of(total: u32, fused: bool) -> Self {
        let send = if fused { total } else { (total / 3).max(1) };
        let receive = if fused { total } else { (total - send).max(1) };
        Self {
            total,
            send,
            receive,
        }
    }
}

/// The block of a handle's tensors, and where they are in it.
struct HandleParts {
    block: Arc<Piece>,
    tokens: usize,
    ranks: usize,
    offsets: [u64; 6],
}

impl HandleParts {
    fn new(core: &Arc<Core>, tokens: usize, rows: usize) -> Result<Self> {
        let ranks = core.ranks;
        let sizes = [
            tokens * ranks * 4,
            tokens * ranks,
            ranks * ranks * 4,
            ranks * 4,
            ranks * 4,
            rows * 4,
        ];
        let mut bytes = 0u64;
        let offsets = sizes.map(|size| {
            let at = bytes;
            bytes += (size as u64).next_multiple_of(256);
            at
        });
        Ok(Self {
            block: Arc::new(core.block(bytes, Purpose::Metadata)?),
            tokens,
            ranks,
            offsets,
        })
    }

    fn address(&self, part: usize) -> u64 {
        self.block.address() + self.offsets[part]
    }

    fn describe(&self, params: &mut DispatchParams) {
        params.slots = self.address(0);
        params.is_token_in_rank = self.address(1);
        params.rank_prefix = self.address(2);
        params.sent_rows = self.address(3);
        params.channel_starts = self.address(4);
        params.src_idx = self.address(5);
    }

    fn handle(
        &self,
        rank: usize,
        device: Device,
        rows: usize,
        remote_rows: Option<usize>,
    ) -> Result<DispatchHandle> {
        let (tokens, ranks) = (self.tokens, self.ranks);
        let tensor = |part: usize, dtype: DType, shape: &[usize]| {
            device_tensor(self.address(part), dtype, shape, device, &self.block)
        };
        DispatchHandle::from_device_parts(DeviceRoutes {
            rank: Rank(rank),
            rank_prefix_matrix: tensor(2, DType::I32, &[ranks, ranks])?,
            channel_prefix_matrix: tensor(3, DType::I32, &[ranks, 1])?,
            recv_channel_prefix_matrix: tensor(4, DType::I32, &[ranks, 1])?,
            recv_src_idx: tensor(5, DType::I32, &[rows])?,
            is_token_in_rank: tensor(1, DType::U8, &[tokens, ranks])?,
            send_head: tensor(0, DType::I32, &[tokens, ranks])?,
            remote_rows,
        })
    }
}

/// Launches what can be launched before the outputs are known.
pub(super) fn begin(core: &Arc<Core>, input: &DispatchInput<'_>) -> Result<Box<dyn DispatchCall>> {
    let on = core.begin(input.stream)?;
    if on.recorded && input.num_worst_tokens.is_none() {
        return Err(Error::invalid(
            "num_worst_tokens",
            "None",
            "must be given while a graph is recorded: nobody can wait for counts then",
        ));
    }
    // What goes wrong on this rank alone is told to the others, which would wait for it.
    let mut call = InFlight::new(core, on, input).inspect_err(|error| tell(core, error))?;
    call.launch_send()?;
    Ok(Box::new(call))
}

/// Rejects a call that this rank cannot make.
fn tell(core: &Arc<Core>, error: &Error) {
    if let Some(text) = core.reason(error)
        && let Err(other) = reject(core, text)
    {
        tracing::warn!(%other, "a reject could not be sent");
    }
}

/// Enqueues the receiving half of a call that was given up: it waits for the rows and lets them go.
pub(super) fn discard(on: &OnStream, mut params: DispatchParams) -> Result<()> {
    params.group.state = on.core.state(Half::Receive);
    params.group.advance = 1;
    params.phases = phase::RECEIVE;
    params.discard = 1;
    launch(&on.core, on, &params, 1, None)?;
    on.join()?;
    on.end()
}

/// Takes part in a call only to reject it.
pub(super) fn reject(core: &Arc<Core>, text: u64) -> Result<()> {
    core.skip_number();
    let on = core.begin_aside()?;
    let mut params = blank(core.group(Operation::Dispatch, Half::Send, true));
    params.group.second_state = core.state(Half::Receive);
    params.experts = core.ranks as u32;
    params.reject_text = text;
    params.phases = phase::REJECT;
    match &core.split {
        None => launch(core, &on, &params, 1, None)?,
        Some(split) => {
            // The announcement, then a look at the others'.
            params.group.advance = 0;
            params.phases = phase::REJECT | phase::COUNT;
            launch(core, &on, &params, 1, None)?;
            split.meet(&on.stream)?;
            params.group.advance = 1;
            params.phases = phase::REJECT;
            launch(core, &on, &params, 1, None)?;
            split.meet(&on.stream)?;
        }
    }
    on.end()
}

fn blank(group: GroupParams) -> DispatchParams {
    let none = Matrix::zeroed();
    DispatchParams {
        group,
        x: 0,
        x_stride: 0,
        scales: none,
        topk: none,
        weights: none,
        routes: [0; 3],
        slots: 0,
        is_token_in_rank: 0,
        rank_prefix: 0,
        sent_rows: 0,
        channel_starts: 0,
        src_idx: 0,
        out_x: 0,
        out_stride: 0,
        out_topk: 0,
        out_weights: 0,
        out_scales: 0,
        result: 0,
        reject_text: 0,
        landing: 0,
        capacity: 0,
        tokens: 0,
        row_bytes: 0,
        scale_words: 0,
        top_k: 0,
        index_bytes: 0,
        experts: 0,
        out_rows: 0,
        route_source: 0,
        terms: 0,
        phases: 0,
        ticket: 0,
        grain: 1,
        units: 1,
        slot_tokens: 0,
        remote_blocks: 0,
        copy_rows: 0,
        discard: 0,
        worst: 0,
    }
}

/// Bytes of dynamic shared memory, see `Shared` in dispatch.cu.
fn shared_bytes(params: &DispatchParams) -> u64 {
    let ranks = u64::from(params.group.ranks);
    let words = ranks * (ANNOUNCE_WORDS + 2 * ranks)
        + 3 * ranks
        + 1
        + u64::from(params.units)
        + u64::from(params.slot_tokens) * ranks
        + (CHUNKS * WARPS * ranks).max(params.experts.into());
    words * 4
}

/// The kernel for a launch of so many blocks, its shape, and what of the parameters depends on them.
fn prepare(
    core: &Core,
    params: &DispatchParams,
    blocks: u32,
) -> Result<(Arc<Function>, Shape, DispatchParams)> {
    let mut params = *params;
    let keeps = params.phases & phase::MOVE != 0 && params.copy_rows == 0;
    params.remote_blocks = if keeps {
        remote_blocks(core, blocks)
    } else {
        0
    };
    // The smaller crew has the longer shares.
    let crew = match params.remote_blocks {
        0 => blocks,
        remote => remote.min(blocks - remote),
    };
    params.units = params.tokens.div_ceil(params.grain).div_ceil(crew).max(1);
    let tokens = params.units as usize * params.grain as usize;
    let fits = tokens * core.ranks <= SLOTS;
    params.slot_tokens = if fits { tokens as u32 } else { 0 };
    let key = keys::dispatch(params.group.ranks, params.top_k, params.row_bytes);
    let function = core.kernels.get(key, c"dispatch")?;
    let bytes = shared_bytes(&params);
    let shape = core.kernels.shape(blocks, THREADS, bytes, "num_experts")?;
    Ok((function, shape, params))
}

/// Enqueues one launch, on the call's stream or another.
fn launch(
    core: &Core,
    on: &OnStream,
    params: &DispatchParams,
    blocks: u32,
    stream: Option<&Stream>,
) -> Result<()> {
    let (function, shape, params) = prepare(core, params, blocks)?;
    // SAFETY: the struct is the kernel's parameter. Its addresses are the caller's tensors, which
    // the caller keeps, and blocks that are not used otherwise before what is enqueued here has
    // ended.
    unsafe { function.launch(stream.unwrap_or(&on.stream), shape, &params) }
}

impl InFlight {
    fn new(core: &Arc<Core>, on: OnStream, input: &DispatchInput<'_>) -> Result<Self> {
        let recorded = on.recorded;
        let fused = input.landing == Landing::Loan;
        let sms = Sms::of(core.sms(input.num_sms), fused);
        let mut params = describe(core, input, sms.send)?;
        let rows = input
            .num_worst_tokens
            .unwrap_or_else(|| core.expected_rows(input.x.shape()[0]));
        let layout = LandingLayout::of(&params);
        let landing = core.block(layout.bytes(rows), purpose(input.landing))?;
        let (mut handle, mut padding) = (None, None);
        if !matches!(input.routes, Routes::Handle(_)) {
            let parts = HandleParts::new(core, input.x.shape()[0], rows)?;
            parts.describe(&mut params);
            handle = Some(parts);
        } else if input.num_worst_tokens.is_some() {
            let block = core.block(rows as u64 * 4, Purpose::Metadata)?;
            params.src_idx = block.address();
            padding = Some(Arc::new(block));
        }
        if recorded {
            // Whatever the caller keeps, the graph writes there whenever it is replayed.
            landing.keep();
            handle.iter().for_each(|parts| parts.block.keep());
            padding.iter().for_each(|block| block.keep());
        }
        // Whatever a launch needs besides memory is here before anything is sent.
        let sending = DispatchParams {
            phases: phase::COUNT | phase::MOVE,
            copy_rows: u32::from(!fused),
            ..params
        };
        prepare(core, &sending, sms.send)?;
        prepare(core, &params, sms.receive)?;
        let number = core.number();
        if input.num_worst_tokens.is_none() {
            let terms = Terms::of_word(params.terms);
            let attempt = (number & 0x1ff) as u16;
            params.terms = Terms { attempt, ..terms }.word();
        }
        let mut this = Self {
            core: Arc::clone(core),
            number,
            on,
            params,
            device: input.x.device(),
            landing: Arc::new(landing),
            layout,
            handle,
            padding,
            counts: None,
            expert_alignment: input.expert_alignment,
            worst: input.num_worst_tokens,
            sms,
            fused,
            progress: Arc::default(),
        };
        this.place(rows);
        Ok(this)
    }

    /// Tells the kernels where rows land, and where they stay if they are not copied out.
    fn place(&mut self, rows: usize) {
        self.params.landing = (self.landing.offset() / LANDING_UNIT) as u32;
        self.params.capacity = rows as u32;
        self.params.out_rows = rows as u32;
        self.params.copy_rows = u32::from(!self.fused);
        let base = self.landing.address();
        let parts = self.layout.parts(rows);
        self.params.out_x = base + parts.rows;
        self.params.out_stride = u64::from(self.params.row_bytes);
        let part = |travels: bool, at: u64| if travels { base + at } else { 0 };
        self.params.out_topk = part(self.layout.topk_bytes > 0, parts.topk);
        self.params.out_weights = part(self.layout.weighs, parts.weights);
        self.params.out_scales = part(self.layout.scale_bytes > 0, parts.scales);
    }

    fn launch_send(&mut self) -> Result<()> {
        let mut params = self.params;
        if self.worst.is_none() {
            params.ticket = self.core.ticket();
            self.params.ticket = params.ticket;
            params.result = self.core.results.address();
        }
        match &self.core.split {
            None => {
                params.phases = phase::COUNT | phase::MOVE;
                if self.fused {
                    params.phases |= phase::RECEIVE;
                    params.group.second_state = self.core.state(Half::Receive);
                }
                // The receiving half comes on the caller's stream, behind what the caller does with its
                // outputs before.
                let aside = if self.beside() {
                    Some(self.on.aside()?)
                } else {
                    None
                };
                launch(&self.core, &self.on, &params, self.sms.send, aside)?;
            }
            Some(split) => {
                params.group.advance = 0;
                params.phases = phase::COUNT;
                launch(&self.core, &self.on, &params, self.sms.send, None)?;
                split.meet(&self.on.stream)?;
                params.group.advance = 1;
                params.phases = phase::MOVE;
                launch(&self.core, &self.on, &params, self.sms.send, None)?;
                split.meet(&self.on.stream)?;
                if self.fused {
                    self.launch_receive(self.params)?;
                }
            }
        }
        if self.fused {
            self.progress.receive(Operation::Dispatch)?;
        } else {
            self.core.set_open(Open {
                progress: Arc::clone(&self.progress),
                recorded: self.on.recorded,
                discard: Discard::Dispatch(Box::new(self.params)),
            });
        }
        self.on.end()
    }

    /// Launches the receiving half.
    fn launch_receive(&self, mut params: DispatchParams) -> Result<()> {
        params.group.state = self.core.state(Half::Receive);
        params.group.advance = 1;
        params.phases = phase::RECEIVE;
        launch(&self.core, &self.on, &params, self.sms.receive, None)?;
        if self.beside() {
            self.on.join()?;
        }
        self.on.end()
    }

    /// Whether the two halves run beside each other.
    fn beside(&self) -> bool {
        let sms = self.sms;
        !self.fused && self.core.split.is_none() && sms.receive + sms.send <= sms.total
    }

    /// Waits for the counts; makes room and calls again if rows do not fit somewhere.
    fn wait_counts(&mut self) -> Result<&ReceivedCounts> {
        while self.counts.is_none() {
            self.core.check_current(self.number, Operation::Dispatch)?;
            let (verdict, counts) = self.wait_result()?;
            if verdict == verdict::OK {
                self.core.saw_rows(counts.rows.unwrap_or(0));
                self.counts = Some(counts);
                break;
            }
            self.grow(counts.rows.unwrap_or(0))?;
        }
        Ok(self.counts.as_ref().expect("just counted"))
    }

    /// Ends the call that did not fit, and makes another with enough room.
    fn grow(&mut self, rows: usize) -> Result<()> {
        self.give_up()?;
        self.progress = Arc::default();
        if rows > self.params.capacity as usize {
            let purpose = match self.fused {
                true => Purpose::DispatchLoan,
                false => Purpose::DispatchStaging,
            };
            let core = Arc::clone(&self.core);
            let bytes = self.layout.bytes(rows);
            // All ranks call again; one that cannot tells the others.
            let tells = |error: &Error| tell(&core, error);
            let landing = core.block(bytes, purpose).inspect_err(tells)?;
            if let Some(handle) = &mut self.handle {
                *handle = HandleParts::new(&core, handle.tokens, rows).inspect_err(tells)?;
                handle.describe(&mut self.params);
            }
            self.landing = Arc::new(landing);
            self.place(rows);
        }
        self.launch_send()
    }

    /// Polls the words that the kernel writes for the host.
    fn wait_result(&self) -> Result<(u32, ReceivedCounts)> {
        let ranks = self.core.ranks;
        let start = Instant::now();
        let words = self.core.results.words();
        let read = |at: usize| -> Result<u32> {
            let mut polls = 0u32;
            loop {
                let word = words[at].load(Ordering::Acquire);
                if (word >> 32) as u32 == self.params.ticket {
                    return Ok(word as u32);
                }
                polls = polls.wrapping_add(1);
                if polls.is_multiple_of(1024) {
                    self.core.failures.check_failed()?;
                    let stream = if self.beside() {
                        &self.core.side
                    } else {
                        &self.on.stream
                    };
                    self.core.check_stuck(stream, start)?;
                    if polls > 1 << 16 {
                        std::thread::yield_now();
                    }
                }
                std::hint::spin_loop();
            }
        };
        let found = read(result_word::VERDICT)?;
        if found != verdict::OK && found != verdict::GROW {
            let number = |at: usize| -> Result<u64> {
                Ok(u64::from(read(at)?) | u64::from(read(at + 1)?) << 32)
            };
            return Err(self.core.failures.concluded(Concluded {
                operation: Operation::Dispatch as u32,
                verdict: found,
                rank: read(result_word::RANK)?,
                status: read(result_word::STATUS)?,
                detail: [
                    number(result_word::DETAIL)?,
                    number(result_word::DETAIL + 2)?,
                ],
                num_experts: self.params.experts as usize,
            }));
        }
        let rows_from = (0..ranks)
            .map(|rank| Ok(read(result_word::ROWS + rank)? as usize))
            .collect::<Result<Vec<_>>>()?;
        let local = match self.handle {
            Some(_) => self.params.experts as usize / ranks,
            None => 0,
        };
        let tokens_per_expert = (0..local)
            .map(|expert| {
                let count = read(result_word::ROWS + 3 * ranks + expert)? as usize;
                Ok(count.next_multiple_of(self.expert_alignment))
            })
            .collect::<Result<Vec<_>>>()?;
        let rows = rows_from.iter().sum();
        Ok((
            found,
            ReceivedCounts {
                rows: Some(rows),
                output_rows: rows,
                rows_from,
                tokens_per_expert,
            },
        ))
    }

    /// What a caller is told who does not wait.
    fn worst_counts(&self, rows: usize) -> ReceivedCounts {
        ReceivedCounts {
            rows: None,
            output_rows: rows,
            rows_from: vec![],
            tokens_per_expert: vec![],
        }
    }

    fn known_counts(&mut self) -> Result<ReceivedCounts> {
        self.core.check_current(self.number, Operation::Dispatch)?;
        match self.worst {
            Some(rows) => Ok(self.worst_counts(rows)),
            None => self.wait_counts().cloned(),
        }
    }

    /// Waits on the GPU for what is on its way, and lets it go.
    fn give_up(&self) -> Result<()> {
        if !self.on.is_recorded_as_begun() {
            tracing::warn!("a recorded dispatch was left unfinished: its graph cannot be replayed");
        } else if self.progress.abandon() {
            discard(&self.on, self.params)?;
        }
        Ok(())
    }

    fn made_handle(&self, input: &DispatchInput<'_>, rows: usize) -> Result<DispatchHandle> {
        if let Routes::Handle(handle) = input.routes {
            let Some(block) = &self.padding else {
                return Ok(handle.clone());
            };
            let (at, device) = (block.address(), self.device);
            let src_idx = device_tensor(at, DType::I32, &[rows], device, block)?;
            return Ok(handle.padded(src_idx));
        }
        let parts = self.handle.as_ref().expect("made with the call");
        parts.handle(self.core.rank, self.device, rows, None)
    }

    /// A tensor in the landing block.
    fn landed(&self, at: u64, dtype: DType, shape: &[usize]) -> Result<OwnedTensor> {
        let address = self.landing.address() + at;
        device_tensor(address, dtype, shape, self.device, &self.landing)
    }
}

fn purpose(landing: Landing) -> Purpose {
    match landing {
        Landing::Loan => Purpose::DispatchLoan,
        Landing::Caller => Purpose::DispatchStaging,
    }
}

/// Everything about a call but its memory.
fn describe(core: &Core, input: &DispatchInput<'_>, send_sms: u32) -> Result<DispatchParams> {
    let mut params = blank(core.group(Operation::Dispatch, Half::Send, true));
    let tokens = input.x.shape()[0];
    let choices = choices(input);
    let topk = choices.map(|choices| choices.idx);
    params.x = input.x.as_ptr() as u64;
    params.x_stride = (input.x.strides()[0] * input.x.dtype().size()) as u64;
    params.scales = Matrix::of(input.scales.as_ref());
    params.topk = Matrix::of(topk.as_ref());
    params.weights = Matrix::of(choices.and_then(|choices| choices.weights).as_ref());
    params.tokens = tokens as u32;
    params.row_bytes = u32::try_from(input.x.row_bytes())
        .map_err(|_| Error::invalid("x", input.x.row_bytes(), "must have rows below 4 GiB"))?;
    params.scale_words = input
        .scales
        .as_ref()
        .map_or(0, |scales| scales.shape()[1] as u32);
    params.top_k = topk.as_ref().map_or(0, |idx| idx.shape()[1] as u32);
    params.index_bytes = topk.as_ref().map_or(0, |idx| idx.dtype().size() as u32);
    params.worst = input.num_worst_tokens.is_some().into();
    let experts = match &input.routes {
        Routes::TopK { num_experts, .. } => {
            params.route_source = route_source::TOPK;
            *num_experts
        }
        Routes::Layout { layout, .. } => {
            params.route_source = route_source::MASK;
            params.routes[0] = layout.is_token_in_rank().as_ptr() as u64;
            params.routes[1] = layout.num_tokens_per_expert().as_ptr() as u64;
            layout.num_tokens_per_expert().shape()[0]
        }
        Routes::Handle(handle) => {
            params.route_source = route_source::HANDLE;
            params.routes[0] = handle.send_head().as_ptr() as u64;
            params.routes[1] = handle.channel_prefix_matrix().as_ptr() as u64;
            params.routes[2] = handle.rank_prefix_matrix().as_ptr() as u64;
            core.ranks
        }
    };
    let most = core.control.local_experts as usize * core.ranks;
    if experts > most {
        return Err(Error::invalid(
            "num_experts",
            experts,
            format!("must be at most {most}, or set when the buffer is made"),
        ));
    }
    if params.top_k > MAX_TOP_K {
        return Err(Error::invalid(
            "topk_idx",
            format!("{} choices a token", params.top_k),
            format!("must have at most {MAX_TOP_K} on a GPU"),
        ));
    }
    params.experts = experts as u32;
    params.terms = terms(input, &params, topk.as_ref()).word();
    let senders = match (input.landing, remote_blocks(core, send_sms)) {
        (Landing::Caller, _) | (Landing::Loan, 0) => send_sms,
        (Landing::Loan, remote) => remote,
    };
    params.grain = grain(tokens as u32, senders);
    Ok(params)
}

/// Blocks of a launch that send to other ranks only, while the rest keep this rank's rows; 0: all do
/// both.
fn remote_blocks(core: &Core, blocks: u32) -> u32 {
    match core.ranks > 1 && blocks >= CREWS_FROM {
        true => blocks / 2,
        false => 0,
    }
}

/// Tokens that share a flag: about 32, so that all blocks have as many units, and no more units
/// than there are flags.
fn grain(tokens: u32, blocks: u32) -> u32 {
    let each = tokens
        .div_ceil(32 * blocks)
        .clamp(1, (FLAGS as u32 / blocks).max(1));
    tokens
        .div_ceil(blocks * each)
        .max(tokens.div_ceil(FLAGS as u32))
        .max(1)
}

fn terms(input: &DispatchInput<'_>, params: &DispatchParams, topk: Option<&Tensor<'_>>) -> Terms {
    Terms {
        operation: Operation::Dispatch as u8,
        top_k: params.top_k as u8,
        wide_index: topk.is_some_and(|idx| idx.dtype() == DType::I64),
        weights: choices(input).is_some_and(|choices| choices.weights.is_some()),
        choices: topk.is_some(),
        cached: matches!(input.routes, Routes::Handle(_)),
        worst: input.num_worst_tokens.is_some(),
        dtype: 0,
        attempt: 0,
    }
}

impl DispatchCall for InFlight {
    fn counts(&mut self, _: &DispatchInput<'_>) -> Result<&ReceivedCounts> {
        if let (Some(rows), None) = (self.worst, &self.counts) {
            self.counts = Some(self.worst_counts(rows));
            return Ok(self.counts.as_ref().expect("just set"));
        }
        self.wait_counts()
    }

    fn finish(&mut self, input: &DispatchInput<'_>) -> Result<Dispatched> {
        let counts = self.known_counts()?;
        let rows = counts.output_rows;
        if self.progress.receive(Operation::Dispatch)? {
            // Rows stay where they land; only this rank's own are still to be put there.
            self.launch_receive(self.params)?;
        }
        let parts = self.layout.parts(self.params.capacity as usize);
        let row_bytes = u64::from(self.params.row_bytes);
        if !self.on.recorded {
            self.landing.shrink(parts.rows + rows as u64 * row_bytes);
        }
        let choices = choices(input);
        let part = |wanted: Option<(DType, usize)>, at: u64| -> Result<Option<OwnedTensor>> {
            wanted
                .map(|(dtype, columns)| self.landed(at, dtype, &[rows, columns]))
                .transpose()
        };
        let columns = |tensor: Tensor<'_>| (tensor.dtype(), tensor.shape()[1]);
        Ok(Dispatched {
            x: Loan::new(
                Box::new(CudaLoan::new(&self.landing, parts.rows, self.device)),
                input.x.dtype(),
                &[rows, input.x.shape()[1]],
            ),
            scales: part(input.scales.map(columns), parts.scales)?,
            topk_idx: part(choices.map(|c| columns(c.idx)), parts.topk)?,
            topk_weights: part(choices.and_then(|c| c.weights).map(columns), parts.weights)?,
            handle: self.made_handle(input, rows)?,
            counts,
        })
    }

    fn finish_into(
        &mut self,
        input: &DispatchInput<'_>,
        out: &mut DispatchOutput<'_>,
    ) -> Result<(ReceivedCounts, DispatchHandle)> {
        let counts = self.known_counts()?;
        let rows = counts.output_rows;
        check_dispatch_output(input, out, rows)?;
        let address = |tensor: &mut Option<crate::TensorMut<'_>>| {
            tensor
                .as_mut()
                .map_or(0, |tensor| tensor.as_mut_ptr() as u64)
        };
        let mut params = self.params;
        params.out_rows = rows as u32;
        params.out_x = out.x.as_mut_ptr() as u64;
        params.out_stride = (out.x.strides()[0] * out.x.dtype().size()) as u64;
        params.out_topk = address(&mut out.topk_idx);
        params.out_weights = address(&mut out.topk_weights);
        params.out_scales = address(&mut out.scales);
        if self.progress.receive(Operation::Dispatch)? {
            self.launch_receive(params)?;
        } else {
            self.copy_out(&params, rows)?;
        }
        Ok((counts, self.made_handle(input, rows)?))
    }
}

impl InFlight {
    /// Copies what landed at its final place to the caller's memory after all.
    fn copy_out(&self, params: &DispatchParams, rows: usize) -> Result<()> {
        let parts = self.layout.parts(self.params.capacity as usize);
        let base = self.landing.address();
        let copies = [
            (
                params.out_x,
                params.out_stride,
                base + parts.rows,
                u64::from(params.row_bytes),
            ),
            (
                params.out_topk,
                self.layout.topk_bytes,
                base + parts.topk,
                self.layout.topk_bytes,
            ),
            (
                params.out_weights,
                self.layout.weight_bytes,
                base + parts.weights,
                self.layout.weight_bytes,
            ),
            (
                params.out_scales,
                self.layout.scale_bytes,
                base + parts.scales,
                self.layout.scale_bytes,
            ),
        ];
        for (to, to_stride, from, bytes) in copies {
            if to == 0 || rows == 0 {
                continue;
            }
            // SAFETY: both hold `rows` rows of so many bytes; the caller keeps its memory.
            unsafe {
                self.on
                    .stream
                    .copy_rows((to, to_stride), (from, bytes), bytes, rows)?;
            }
        }
        self.on.end()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // A call that was not finished still takes its rows, into nothing.
        if let Err(error) = self.give_up() {
            tracing::warn!(%error, "a dispatch that was not finished");
        }
    }
}
