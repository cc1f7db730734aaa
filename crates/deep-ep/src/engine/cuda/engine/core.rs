//! What all calls of one rank share: the GPU, symmetric memory, the calls' states, what went wrong.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytemuck::Zeroable;

use super::{
    control::{Control, FLAGS},
    failures::Failures,
    keys,
    launch::Kernels,
    params::{CallState, GroupParams, LANDING_UNIT, TEXT_BYTES},
    progress::{Discard, Open},
    split::Split,
};
use crate::{
    bootstrap::{Communicator, Subscription},
    buffer::{BufferConfig, MemoryUse},
    engine::{
        Operation,
        cuda::{
            driver::{
                context::Context,
                memory::{DeviceMemory, PinnedWords},
                stream::{Event, Stream},
            },
            symmetric::Symmetric,
        },
    },
    error::{Error, Reject, Result},
    interrupt,
    memory::heap::{Block, Heap, Purpose},
    topology::Rank,
};

/// The kinds of launches that have a [`CallState`] of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Half {
    /// What a high-throughput call does until its rows are on their way.
    Send = 0,
    /// The rest of it.
    Receive = 1,
    /// The same of a low-latency call.
    LowLatencySend = 2,
    LowLatencyReceive = 3,
    /// Barriers.
    Barrier = 4,
}

const HALVES: usize = 5;

/// `SEEN_SMS_WORDS` of group.cuh, in bytes.
#[cfg(test)]
const SEEN_SMS_BYTES: usize = 8 * 8;

/// Rejects whose text a kernel may not have read yet.
const REJECTS: usize = 16;

/// How long a dropped buffer waits for its last call before it tells its kernels to leave, and how
/// long for them to do so.
const DROP_PATIENCE: Duration = Duration::from_secs(2);

/// One rank's side of a buffer on a GPU.
pub(crate) struct Core {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) context: Arc<Context>,
    pub(crate) control: Control,
    pub(crate) symmetric: Symmetric,
    pub(crate) kernels: Kernels,
    pub(crate) failures: Failures,
    pub(crate) split: Option<Split>,
    pub(crate) enable_shrink: bool,
    /// Where the halves of a call that run side by side take their turns.
    pub(crate) side: Stream,
    /// Words in which a kernel tells a waiting host what it knows.
    pub(crate) results: PinnedWords,
    rejects: PinnedWords,
    /// Not 0: what peers are told when this rank drops its buffer.
    dropped: PinnedWords,
    next_reject: AtomicU32,
    next_ticket: AtomicU32,
    states: DeviceMemory,
    /// Where the blocks of a launch tell each other what they counted, for each half.
    _chunk_words: DeviceMemory,
    bases: DeviceMemory,
    /// A bit for every SM that a high-throughput launch has used.
    #[cfg(test)]
    seen_sms: DeviceMemory,
    timeout: Duration,
    num_sms: u32,
    /// SMs that this rank may use without taking those of a rank that it shares the GPU with.
    own_sms: u32,
    heap: Mutex<Heap>,
    /// Blocks that a recorded graph uses whenever it is replayed.
    recorded: Mutex<Vec<Block>>,
    order: Mutex<Order>,
    open: Mutex<Option<Open>>,
    /// High-throughput calls begun.
    begun: AtomicU64,
    calls: AtomicU64,
    /// For what ranks settle on the host.
    communicator: Communicator,
    /// Most rows that a dispatch has brought.
    most_rows: AtomicUsize,
    fork: Event,
    join: Event,
    /// The side stream has something that no other stream waits for yet.
    forked: AtomicBool,
    _liveness: Subscription,
}

/// Where the last call ended.
struct Order {
    event: Event,
}

/// Bytes of the words for the chunks of a launch, of which there are as many as flags.
fn chunk_bytes(ranks: usize) -> usize {
    FLAGS as usize * ranks * 8
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// Collective. `fixed` are bytes of every region behind the control area that the low-latency
    /// calls use.
    pub(crate) fn new(
        communicator: &Communicator,
        config: &BufferConfig,
        context: Arc<Context>,
        fixed: u64,
    ) -> Result<Self> {
        let ranks = communicator.size();
        let control = Control::new(ranks, config.num_experts)?;
        let fixed = (control.bytes + fixed).next_multiple_of(4096);
        let start = fixed.saturating_add(config.scale_up_bytes as u64);
        let reserve = config.max_bytes.map_or(0, |max| (max as u64).max(fixed));
        let symmetric = Symmetric::new(communicator, &context, reserve, start, config.timeout)?;
        for rank in 0..ranks {
            tracing::debug!(rank, gpu = %symmetric.gpu_of(rank), "memory mapped");
        }
        let made = Self::with_memory(communicator, config, context, control, symmetric, fixed);
        communicator.all_succeed(made)
    }

    fn with_memory(
        communicator: &Communicator,
        config: &BufferConfig,
        context: Arc<Context>,
        control: Control,
        symmetric: Symmetric,
        fixed: u64,
    ) -> Result<Self> {
        let ranks = communicator.size();
        let device = &context.device;
        let sharing = symmetric.ranks_on_this_gpu().len().max(1) as u32;
        let side = Stream::urgent(&context)?;
        let bases: Vec<u64> = (0..ranks).map(|rank| symmetric.base(rank)).collect();
        let chunk_words = DeviceMemory::new(&context, 2 * chunk_bytes(ranks), "counts of chunks")?;
        chunk_words.fill(&side, 0)?;
        let mut states = [CallState::zeroed(); HALVES];
        for half in [Half::Send, Half::Receive] {
            let at = half as usize;
            states[at].chunk_words = chunk_words.address() + (at * chunk_bytes(ranks)) as u64;
        }
        let words = |data: &[u8], purpose: &'static str| -> Result<DeviceMemory> {
            let memory = DeviceMemory::new(&context, data.len(), purpose)?;
            memory.upload(&side, data)?;
            Ok(memory)
        };
        let failures = Failures::new(&context, communicator.rank(), config.timeout)?;
        let gone = failures.gone();
        let liveness = communicator
            .liveness()
            .subscribe(Box::new(move |lost: Rank| gone.set(lost)));
        let this = Self {
            rank: communicator.rank().0,
            ranks,
            control,
            kernels: Kernels::new(&context)?,
            split: Split::from_config(communicator, config),
            enable_shrink: config.enable_shrink,
            results: PinnedWords::new(&context, 8 + 3 * ranks + control.local_experts as usize)?,
            rejects: PinnedWords::new(&context, REJECTS * TEXT_BYTES / 8)?,
            dropped: PinnedWords::new(&context, 1)?,
            next_reject: AtomicU32::new(0),
            next_ticket: AtomicU32::new(1),
            states: words(bytemuck::cast_slice(&states), "call states")?,
            _chunk_words: chunk_words,
            bases: words(bytemuck::cast_slice(&bases), "addresses of regions")?,
            #[cfg(test)]
            seen_sms: words(&[0; SEEN_SMS_BYTES], "SMs that were used")?,
            timeout: config.timeout,
            num_sms: u32::try_from(config.num_sms).unwrap_or(u32::MAX),
            own_sms: (device.sms()? / sharing).max(1),
            heap: Mutex::new(Heap::new(
                fixed,
                symmetric.committed(),
                symmetric.reserved(),
            )),
            recorded: Mutex::default(),
            order: Mutex::new(Order {
                event: Event::untimed(&context)?,
            }),
            open: Mutex::default(),
            begun: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            communicator: communicator.clone(),
            most_rows: AtomicUsize::new(0),
            fork: Event::untimed(&context)?,
            join: Event::untimed(&context)?,
            forked: AtomicBool::new(false),
            failures,
            symmetric,
            side,
            context,
            _liveness: liveness,
        };
        this.load_common()?;
        Ok(this)
    }

    /// Loads the programs that any call may need without having said so, such as a reject: loading
    /// one later could wait for a peer's kernel that waits for this rank.
    fn load_common(&self) -> Result<()> {
        self.kernels.get(keys::ANY_DISPATCH, c"dispatch")?;
        self.kernels.get(keys::ANY_DISPATCH, c"dispatch_layout")?;
        self.kernels.get(keys::ANY_COMBINE, c"combine")?;
        Ok(())
    }

    /// What a launch of `operation` is told. It brings `half` forward if `advance`.
    pub(crate) fn group(&self, operation: Operation, half: Half, advance: bool) -> GroupParams {
        let mut params = GroupParams {
            bases: self.bases.address(),
            state: self.state(half),
            second_state: 0,
            report: self.failures.report_address(),
            gone: self.failures.gone_address(),
            seen_sms: self.seen_sms_address(),
            // The GPU adds it to its timer.
            timeout: self.timeout.as_nanos().min(u128::from(u64::MAX / 2)) as u64,
            abort_at: 0,
            missing_at: 0,
            dropped_at: 0,
            announce_at: 0,
            announce_stride: 0,
            text_at: 0,
            flags_at: 0,
            flags: 0,
            rank: self.rank as u32,
            ranks: self.ranks as u32,
            operation: operation as u32,
            advance: advance.into(),
            reserved: 0,
        };
        self.control.describe(&mut params);
        params
    }

    /// The address of a half's [`CallState`].
    pub(crate) fn state(&self, half: Half) -> u64 {
        self.states.address() + (half as usize * size_of::<CallState>()) as u64
    }

    /// Where launches note the SMs that they use; 0: nowhere, as always but in tests.
    fn seen_sms_address(&self) -> u64 {
        #[cfg(test)]
        return self.seen_sms.address();
        #[cfg(not(test))]
        0
    }

    /// How many SMs high-throughput launches have used since this was last asked. Nothing may be running.
    #[cfg(test)]
    pub(crate) fn take_seen_sms(&self) -> Result<u32> {
        let seen = self.seen_sms.download(&self.side)?;
        self.seen_sms.fill(&self.side, 0)?;
        self.side.synchronize()?;
        Ok(seen.iter().map(|byte| byte.count_ones()).sum())
    }

    /// SMs that a call may use: what it asks for, or the buffer's bound, and never those of another
    /// rank on the same GPU.
    pub(crate) fn sms(&self, asked: Option<usize>) -> u32 {
        let asked = asked.map_or(self.num_sms, |sms| u32::try_from(sms).unwrap_or(u32::MAX));
        asked.clamp(1, self.own_sms)
    }

    /// All SMs that this rank may use.
    pub(crate) fn all_sms(&self) -> u32 {
        self.own_sms
    }

    /// A number that no other call that waits for a result has.
    pub(crate) fn ticket(&self) -> u32 {
        self.next_ticket.fetch_add(1, Ordering::Relaxed) | 1 << 31
    }

    /// Puts a reject's text where a kernel reads it: three strings, each with a NUL behind it.
    pub(crate) fn reject_text(&self, reject: &Reject) -> u64 {
        let slot = self.next_reject.fetch_add(1, Ordering::Relaxed) as usize % REJECTS;
        let text = super::failures::encode_reject(reject);
        let words = &self.rejects.words()[slot * TEXT_BYTES / 8..][..TEXT_BYTES / 8];
        for (word, bytes) in words.iter().zip(text.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Release);
        }
        self.rejects.address() + (slot * TEXT_BYTES) as u64
    }

    /// The caller's stream, behind everything that this buffer's calls have enqueued before.
    pub(crate) fn begin(self: &Arc<Self>, stream: crate::Stream) -> Result<OnStream> {
        self.failures.check_failed()?;
        // SAFETY: the caller of the buffer vouches for the stream.
        let stream = unsafe { Stream::borrowed(&self.context, stream.as_raw()) };
        self.begin_on(stream)
    }

    /// As [`begin`](Self::begin), on the buffer's own stream.
    pub(crate) fn begin_aside(self: &Arc<Self>) -> Result<OnStream> {
        self.failures.check_failed()?;
        // SAFETY: the stream lives as long as the core, which the result holds.
        let side = unsafe { Stream::borrowed(&self.context, self.side.raw as usize) };
        self.begin_on(side)
    }

    /// Lets a stream wait for everything that this buffer's calls have enqueued.
    pub(crate) fn follow(&self, stream: &Stream) -> Result<()> {
        stream.wait(&lock(&self.order).event)
    }

    fn begin_on(self: &Arc<Self>, stream: Stream) -> Result<OnStream> {
        let recorded = stream.is_capturing()?;
        self.check_open(recorded)?;
        if !recorded {
            // Also on the same stream: two streams may have had the same handle.
            stream.wait(&lock(&self.order).event)?;
        }
        let on = OnStream {
            core: Arc::clone(self),
            stream,
            recorded,
        };
        let open = lock(&self.open).take();
        if let Some(open) = open.filter(|open| open.progress.abandon()) {
            match open.discard {
                Discard::Dispatch(params) => super::dispatch::discard(&on, *params)?,
                Discard::Combine(params, dtype) => super::combine::discard(&on, *params, dtype)?,
            }
        }
        Ok(on)
    }

    /// A call was begun.
    pub(crate) fn count_call(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Calls begun.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// The number of a call that begins; see [`check_current`](Self::check_current).
    pub(crate) fn number(&self) -> u64 {
        self.count_call();
        self.begun.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// # Errors
    ///
    /// [`Error::Abandoned`] if another call was begun after the one of this number.
    pub(crate) fn check_current(&self, number: u64, operation: Operation) -> Result<()> {
        if self.begun.load(Ordering::Acquire) == number {
            return Ok(());
        }
        Err(Error::Abandoned {
            operation: operation.name().into(),
        })
    }

    /// Waits until all ranks are here and this rank's calls are done.
    pub(crate) fn barrier(&self) -> Result<()> {
        lock(&self.order).event.synchronize()?;
        self.failures.check()?;
        self.communicator.barrier()
    }

    /// A call that was not made counts, too: all ranks number calls alike.
    pub(crate) fn skip_number(&self) {
        self.begun.fetch_add(1, Ordering::AcqRel);
    }

    /// The text with which to reject a call that failed here; `None` if the group has ended, so that
    /// nobody waits.
    pub(crate) fn reason(&self, error: &Error) -> Option<u64> {
        if self.failures.has_failed() {
            return None;
        }
        let reject = match error {
            Error::InvalidArgument(reject) => reject.clone(),
            other => Reject::new("the call", other, "must be possible on every rank"),
        };
        Some(self.reject_text(&reject))
    }

    /// A call that was begun is finished before recording begins or ends: its other half would be
    /// on the wrong side.
    fn check_open(&self, recorded: bool) -> Result<()> {
        match &*lock(&self.open) {
            Some(open) if open.recorded != recorded && open.progress.is_open() => {
                Err(Error::invalid(
                    "stream",
                    if recorded {
                        "recording"
                    } else {
                        "not recording"
                    },
                    "must be as when the call in flight was begun: finish that first",
                ))
            }
            _ => Ok(()),
        }
    }

    /// The call in flight. Beginning another one gives it up.
    pub(crate) fn set_open(&self, open: Open) {
        *lock(&self.open) = Some(open);
    }

    /// Rows to make room for when nobody knows how many come to a rank with `tokens`.
    pub(crate) fn expected_rows(&self, tokens: usize) -> usize {
        let most = self.most_rows.load(Ordering::Relaxed);
        (tokens.saturating_mul(self.ranks))
            .max(most + most / 8)
            .clamp(1, i32::MAX as usize)
    }

    /// So many rows came.
    pub(crate) fn saw_rows(&self, rows: usize) {
        self.most_rows.fetch_max(rows, Ordering::Relaxed);
    }

    /// An error if a host that waits since `start` for words of a kernel will not get them: the
    /// kernel has ended, or the deadline is long past.
    pub(crate) fn check_stuck(&self, stream: &Stream, start: Instant) -> Result<()> {
        self.failures.check_failed()?;
        if interrupt::requested() {
            self.failures.interrupt(self.ranks);
        }
        let ended = stream.is_done()?;
        if ended || start.elapsed() > self.timeout + Duration::from_secs(5) {
            // What it wrote last may be here by now.
            std::thread::sleep(Duration::from_millis(1));
            self.failures.check_failed()?;
            if start.elapsed() > self.timeout {
                return Err(Error::Timeout {
                    operation: Operation::Dispatch.name().into(),
                    stage: "counts on the host".into(),
                    ranks: vec![Rank(self.rank)],
                    waited: start.elapsed(),
                });
            }
        }
        Ok(())
    }

    /// A block of symmetric memory, aligned to [`LANDING_UNIT`].
    pub(crate) fn block(self: &Arc<Self>, bytes: u64, purpose: Purpose) -> Result<Piece> {
        let mut grow = |needed: u64| -> Result<u64> {
            self.symmetric.commit(needed)?;
            Ok(self.symmetric.committed())
        };
        // A page at least, so that blocks begin at one.
        let bytes = bytes.max(1).next_multiple_of(4096);
        let block = lock(&self.heap).alloc(bytes, purpose, &mut grow)?;
        debug_assert!(block.offset().is_multiple_of(LANDING_UNIT));
        Ok(Piece {
            core: Arc::clone(self),
            offset: block.offset(),
            block: Mutex::new(Some(block)),
        })
    }

    /// Grows symmetric memory to at least `bytes`.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<()> {
        self.symmetric.commit(bytes)?;
        lock(&self.heap).extend(self.symmetric.committed());
        Ok(())
    }

    /// Use of symmetric memory.
    pub(crate) fn memory_use(&self, fixed: Vec<(&'static str, u64)>) -> MemoryUse {
        let stats = lock(&self.heap).stats();
        MemoryUse {
            reserved: self.symmetric.reserved(),
            committed: self.symmetric.committed(),
            in_use: stats.total.in_use,
            peak: stats.total.peak,
            peak_by_purpose: Purpose::ALL
                .into_iter()
                .zip(stats.by_purpose)
                .filter(|(_, usage)| usage.peak > 0)
                .map(|(purpose, usage)| (purpose.name(), usage.peak))
                .collect(),
            fixed,
        }
    }

    /// Waits for the last call, in bounded time.
    fn settle(&self) {
        let done = || lock(&self.order).event.is_done().unwrap_or(true);
        let wait = |limit: Duration| {
            let start = Instant::now();
            while !done() && start.elapsed() < limit {
                std::thread::sleep(Duration::from_micros(50));
            }
            done()
        };
        if wait(DROP_PATIENCE) {
            return;
        }
        // Kernels that wait for peers leave when these are gone.
        (0..self.ranks).for_each(|rank| self.failures.gone().set(Rank(rank)));
        if !wait(DROP_PATIENCE) {
            tracing::warn!("a buffer is dropped while its last call is still running");
        }
    }

    /// Tells the peers' kernels that this rank writes nothing more. By a copy engine: a kernel might
    /// find no room beside those that wait for it.
    fn tell_dropped(&self) -> Result<()> {
        self.dropped.words()[0].store(1, Ordering::Release);
        for rank in (0..self.ranks).filter(|&rank| rank != self.rank) {
            let to = self.symmetric.base(rank) + self.control.dropped_at(self.rank);
            // SAFETY: the word lies in the peer's region, which this rank still maps.
            unsafe { self.dropped.copy_to(&self.side, to)? };
        }
        let start = Instant::now();
        while !self.side.is_done()? && start.elapsed() < DROP_PATIENCE {
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.settle();
        if let Err(error) = self.tell_dropped() {
            tracing::warn!(%error, "peers were not told that a buffer was dropped");
        }
    }
}

/// A stream on which a call's launches are enqueued.
pub(crate) struct OnStream {
    pub(crate) core: Arc<Core>,
    pub(crate) stream: Stream,
    /// A graph is being recorded.
    pub(crate) recorded: bool,
}

impl OnStream {
    /// The side stream, behind what this one was given so far: what is enqueued there runs beside
    /// what this stream is given from now on, until [`join`](Self::join).
    pub(crate) fn aside(&self) -> Result<&Stream> {
        self.core.fork.record(&self.stream)?;
        self.core.side.wait(&self.core.fork)?;
        self.core.forked.store(true, Ordering::Release);
        Ok(&self.core.side)
    }

    /// Whether what is enqueued now is recorded if, and only if, the call's beginning was.
    pub(crate) fn is_recorded_as_begun(&self) -> bool {
        self.stream
            .is_capturing()
            .is_ok_and(|now| now == self.recorded)
    }

    /// Lets this stream wait for the side stream, if that was given anything since it last did.
    pub(crate) fn join(&self) -> Result<()> {
        if !self.core.forked.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        self.core.join.record(&self.core.side)?;
        self.stream.wait(&self.core.join)
    }

    /// Lets this stream wait for what another one has joined: the sending half of a call of this one,
    /// which another call gave up.
    pub(crate) fn follow_join(&self) -> Result<()> {
        self.stream.wait(&self.core.join)
    }

    /// Everything of a call is enqueued.
    pub(crate) fn end(&self) -> Result<()> {
        if self.recorded {
            return Ok(());
        }
        let order = lock(&self.core.order);
        // A call on another stream may have come between the halves of this one.
        self.stream.wait(&order.event)?;
        order.event.record(&self.stream)
    }
}

/// A block of symmetric memory. It is given back when it is dropped: who uses it after that comes
/// behind everything that was enqueued before, since calls of a buffer do.
pub(crate) struct Piece {
    core: Arc<Core>,
    offset: u64,
    block: Mutex<Option<Block>>,
}

impl Piece {
    /// Bytes from the region's base.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Its address for this rank's kernels.
    pub(crate) fn address(&self) -> u64 {
        self.core.symmetric.base(self.core.rank) + self.offset()
    }

    /// Gives all but `bytes` back.
    pub(crate) fn shrink(&self, bytes: u64) {
        if let Some(block) = lock(&self.block).as_mut() {
            lock(&self.core.heap).shrink(block, bytes);
        }
    }

    /// Keeps it as long as the buffer: a recorded graph uses it.
    pub(crate) fn keep(&self) {
        if let Some(block) = lock(&self.block).take() {
            lock(&self.core.recorded).push(block);
        }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Some(block) = lock(&self.block).take() {
            // After a failure a slow peer may still write.
            if !self.core.failures.has_failed() {
                lock(&self.core.heap).free(block);
            }
        }
    }
}
