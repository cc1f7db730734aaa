//! One GPU of the measurement: its memory, its kernels, its runs.

use std::{sync::Arc, time::Duration};

use bytemuck::Zeroable;

use super::{
    Method,
    params::{CopyParams, RoundTrip, RoundTripParams},
};
use crate::{
    engine::cuda::{
        driver::{
            context::Context,
            device::Device,
            graph::Graph,
            memory::{DeviceMemory, Pinned},
            module::{Function, Shape},
            stream::{Event, Stream},
        },
        jit::{Jit, Key, LimitKey},
    },
    error::{Error, Result},
};

/// Bytes of one launch: 16,384 rows of 7,168 bf16, several times what a GPU's cache holds.
pub(super) const BYTES: usize = 16_384 * 14_336;

/// Launches between the events of a run.
pub(super) const TIMED: u32 = 4;

/// Threads of a block that copies by plain stores.
const STORE_THREADS: u32 = 1024;

/// Bytes between the two flags of a GPU, so that they do not share a cache line.
const FLAG_STRIDE: usize = 256;

/// A GPU with what it copies.
pub(super) struct Gpu {
    pub(super) context: Arc<Context>,
    pub(super) stream: Stream,
    key: LimitKey,
    source: DeviceMemory,
    target: DeviceMemory,
    flags: DeviceMemory,
    store: Function,
    bulk: Option<Function>,
    round_trip: Function,
    /// Bytes of shared memory with which a block has its SM to itself.
    whole_sm: u32,
}

impl Gpu {
    pub(super) fn new(device: Device, jit: &Jit, constants: LimitKey) -> Result<Self> {
        let context = Context::new(device)?;
        let module = jit.module(&context, Key::Limit(constants))?;
        let shared = constants.shared_bytes();
        let whole_sm = device.shared_memory()?;
        let bulk = device.compute_capability()?.major >= 9 && whole_sm >= shared;
        let this = Self {
            stream: Stream::new(&context)?,
            key: constants,
            source: DeviceMemory::new(&context, BYTES, "the source of copies")?,
            target: DeviceMemory::new(&context, BYTES, "the target of copies")?,
            flags: DeviceMemory::new(&context, 2 * FLAG_STRIDE, "flags")?,
            store: module.function(c"store_copy", 0)?,
            bulk: match bulk {
                true => Some(module.function(c"bulk_copy", shared)?),
                false => None,
            },
            round_trip: module.function(c"round_trip", whole_sm)?,
            whole_sm,
            context,
        };
        this.source.upload(&this.stream, &pattern(device.ordinal))?;
        Ok(this)
    }

    /// Whether it can copy in bulk.
    pub(super) fn has_bulk(&self) -> bool {
        self.bulk.is_some()
    }

    /// Forgets what was copied before.
    pub(super) fn clear_target(&self) -> Result<()> {
        self.target.fill(&self.stream, 0xff)?;
        self.stream.synchronize()
    }

    /// Whether this GPU's target is the other's source.
    pub(super) fn compare_with(&self, from: &Self, method: Method, sms: Option<u32>) -> Result<()> {
        let (from, to) = (from.context.device.ordinal, self.context.device.ordinal);
        let copied = self.target.download(&self.stream)?;
        let wanted = pattern(from);
        match copied.iter().zip(&wanted).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(Error::Cuda {
                call: "copy".into(),
                code: 0,
                name: "wrong bytes".into(),
                message: format!(
                    "{method:?} with {sms:?} SMs from GPU {from} to GPU {to} went wrong at byte {at}"
                ),
            }),
        }
    }

    /// Enqueues one copy of this GPU's source to the target of `to`.
    ///
    /// # Safety
    ///
    /// Both must live, and `to` be accessible, until the copy has ended.
    unsafe fn copy(
        &self,
        stream: &Stream,
        to: &Self,
        method: Method,
        sms: Option<u32>,
    ) -> Result<()> {
        let params = CopyParams {
            target: to.target.address(),
            source: self.source.address(),
            bytes: BYTES as u64,
        };
        let blocks = sms.unwrap_or(1);
        let shape = |threads, shared_bytes| Shape {
            blocks,
            threads,
            shared_bytes,
            cooperative: false,
        };
        match (method, &self.bulk) {
            // SAFETY: `CopyParams` is the kernel's parameter; the memory stays, as the caller says.
            (Method::Store, _) => unsafe {
                self.store.launch(stream, shape(STORE_THREADS, 0), &params)
            },
            // SAFETY: as above.
            (Method::Bulk, Some(bulk)) => unsafe {
                let shape = shape(32 * self.key.warps, self.key.shared_bytes());
                bulk.launch(stream, shape, &params)
            },
            (Method::Bulk, None) => Err(Error::Unsupported {
                feature: "bulk copies".into(),
                why: "the GPU is older than Hopper".into(),
            }),
            (Method::CopyEngine, _) => to.target.copy_from(stream, &self.source),
        }
    }

    /// Sets both flags to 0.
    pub(super) fn clear_flags(&self) -> Result<()> {
        self.flags.fill(&self.stream, 0)?;
        self.stream.synchronize()
    }

    /// Bounces a flag between two SMs of this GPU.
    pub(super) fn round_trip(&self, trips: u32, timeout: Duration) -> Result<Duration> {
        self.clear_flags()?;
        let second = self.flags.address() + FLAG_STRIDE as u64;
        self.bounce(second, &self.result()?, trips, timeout, true)
    }

    /// A place for the result of [`Self::ask`]. It must be there before the other side waits:
    /// taking pinned memory may wait for kernels of every GPU.
    pub(super) fn result(&self) -> Result<Pinned<RoundTrip>> {
        Pinned::new(&self.context, RoundTrip::zeroed())
    }

    /// Begins to bounce a flag with `other`, which answers.
    pub(super) fn ask(
        &self,
        other: &Self,
        result: &Pinned<RoundTrip>,
        trips: u32,
        timeout: Duration,
    ) -> Result<Duration> {
        self.bounce(other.flags.address(), result, trips, timeout, false)
    }

    fn bounce(
        &self,
        theirs: u64,
        result: &Pinned<RoundTrip>,
        trips: u32,
        timeout: Duration,
        both_here: bool,
    ) -> Result<Duration> {
        result.store(RoundTrip::zeroed());
        let params = RoundTripParams {
            mine: self.flags.address(),
            theirs,
            result: result.address(),
            timeout: nanoseconds(timeout),
            trips,
            begins: 1,
        };
        let shape = Shape {
            blocks: if both_here { 2 } else { 1 },
            threads: 32,
            // Two blocks are to be on different SMs.
            shared_bytes: if both_here { self.whole_sm } else { 0 },
            // They wait for each other, so both must be resident.
            cooperative: both_here,
        };
        // SAFETY: the struct is the kernel's parameter. The flags live as long as their GPUs, and
        // the result until the stream is synchronised below or, if that fails, the context is lost.
        unsafe { self.round_trip.launch(&self.stream, shape, &params)? };
        self.stream.synchronize()?;
        let result = result.load();
        match result.state {
            RoundTrip::COMPLETE => Ok(Duration::from_nanos(result.nanoseconds) / trips.max(1)),
            RoundTrip::TIMED_OUT => Err(failure(
                result.state,
                "timed out",
                format!("the flag did not come back in trip {}", result.trips + 1),
            )),
            state => Err(failure(
                state,
                "no result",
                "the kernel ended without writing its result".to_owned(),
            )),
        }
    }

    /// Enqueues the answers to `other`, which asks.
    pub(super) fn answer(&self, other: &Self, trips: u32, timeout: Duration) -> Result<()> {
        let params = RoundTripParams {
            mine: self.flags.address(),
            theirs: other.flags.address(),
            // Only the side that begins writes a result.
            result: 0,
            timeout: nanoseconds(timeout),
            trips,
            begins: 0,
        };
        let shape = Shape {
            blocks: 1,
            threads: 32,
            shared_bytes: 0,
            cooperative: false,
        };
        // SAFETY: the struct is the kernel's parameter, and the flags live as long as both GPUs,
        // which the caller keeps until this stream is synchronised.
        unsafe { self.round_trip.launch(&self.stream, shape, &params) }
    }
}

/// What a round trip came to instead of a time.
fn failure(code: u32, name: &str, message: String) -> Error {
    Error::Cuda {
        call: "round_trip".into(),
        code,
        name: name.into(),
        message,
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The source of a GPU: words that differ from each other and between GPUs.
fn pattern(gpu: usize) -> Vec<u8> {
    let words =
        (0..BYTES as u64 / 8).map(|i| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ gpu as u64);
    words.flat_map(u64::to_le_bytes).collect()
}

/// One method from one GPU to another, recorded and ready to be timed again and again.
pub(super) struct Run<'a> {
    from: &'a Gpu,
    once: Graph,
    timed: Graph,
    start: Event,
    end: Event,
    /// The graphs write to its memory.
    _to: &'a Gpu,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        from: &'a Gpu,
        to: &'a Gpu,
        method: Method,
        sms: Option<u32>,
    ) -> Result<Self> {
        let record = |launches| {
            from.stream.capture(|stream| {
                (0..launches).try_for_each(|_| {
                    // SAFETY: both GPUs are borrowed for as long as the graph lives, and `time`
                    // waits until its launches have ended.
                    unsafe { from.copy(stream, to, method, sms) }
                })
            })
        };
        Ok(Self {
            once: record(1)?,
            timed: record(TIMED)?,
            start: Event::new(&from.context)?,
            end: Event::new(&from.context)?,
            from,
            _to: to,
        })
    }

    /// The time of all timed launches together.
    pub(super) fn time(&mut self) -> Result<Duration> {
        let stream = &self.from.stream;
        // SAFETY: `new` says why the recorded launches are sound; the stream is waited for below.
        unsafe {
            self.once.launch(stream)?;
            self.start.record(stream)?;
            self.timed.launch(stream)?;
            self.end.record(stream)?;
            self.once.launch(stream)?;
        }
        stream.synchronize()?;
        self.end.since(&self.start)
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        // After an error launches may be under way, which use memory of both GPUs.
        let _ = self.from.stream.synchronize();
    }
}
