//! Buffers: settings, making them, and what is asked of them besides calls.

use std::{
    ffi::{c_char, c_void},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use deep_ep::{
    Buffer, BufferConfig, Call, Communicator, EngineChoice, Error, LowLatencyConfig, Reject,
    Result, Statistics, Stream,
};

use crate::{
    boundary,
    communicator::{CommunicatorObject, timeout},
    objects::{self, Object},
    pointers::{self, Out, OutStruct, Versioned},
    status::Status,
};

/// Which engine moves the rows.
#[repr(C)]
#[allow(non_camel_case_types, clippy::upper_case_acronyms)]
pub enum EngineName {
    /// As DEEP_EP_ENGINE says, or DEEP_EP_ENGINE_AUTO.
    DEEP_EP_ENGINE_DEFAULT = 0,
    /// CUDA if a device is set, else the CPU.
    DEEP_EP_ENGINE_AUTO = 1,
    /// The CPU.
    DEEP_EP_ENGINE_CPU = 2,
    /// CUDA.
    DEEP_EP_ENGINE_CUDA = 3,
}

/// A call that all ranks make together, see `deep_ep_refuse()`.
#[repr(C)]
#[allow(non_camel_case_types, clippy::upper_case_acronyms)]
pub enum CallName {
    /// deep_ep_dispatch().
    DEEP_EP_CALL_DISPATCH = 0,
    /// deep_ep_combine().
    DEEP_EP_CALL_COMBINE = 1,
    /// deep_ep_low_latency_dispatch().
    DEEP_EP_CALL_LOW_LATENCY_DISPATCH = 2,
    /// deep_ep_low_latency_combine().
    DEEP_EP_CALL_LOW_LATENCY_COMBINE = 3,
}

/// Fixed capacity of the low-latency calls, the same on all ranks. All zeros: no such calls.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LowLatencyCapacity {
    /// Most tokens that a rank sends in a call, `M`.
    pub num_max_dispatch_tokens_per_rank: usize,
    /// Elements of a row, `H`.
    pub hidden: usize,
    /// Experts over all ranks, `E`.
    pub num_experts: usize,
    /// Set to the largest number of choices of a token to make room for combines of
    /// DEEP_EP_WIRE_EXACT; 0: there are none.
    pub exact_top_k: usize,
}

/// How a buffer is made. Made by `deep_ep_buffer_config()`; all zeros are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BufferSettings {
    /// Set by `deep_ep_buffer_config()`.
    pub struct_size: usize,
    /// A value of `deep_ep_engine`.
    pub engine: i32,
    /// DEEP_EP_CUDA(n): the GPU to use. 0: with the CUDA engine the rank's number modulo the GPUs.
    pub device: i32,
    /// Bytes of symmetric memory to start with for the high-throughput calls; it grows.
    pub scale_up_bytes: usize,
    /// Most bytes that this rank's symmetric memory may grow to; 0: the machine's memory.
    pub max_bytes: usize,
    /// Capacity of the low-latency calls.
    pub low_latency: LowLatencyCapacity,
    /// Bytes of that capacity, for callers who know only those; 0: not used.
    pub low_latency_bytes: usize,
    /// Bound on the SMs, on the CPU engine on the worker threads, of this rank; 0: 20.
    pub num_sms: usize,
    /// Deadline of every wait; 0: DEEP_EP_TIMEOUT_SECS, or 300.
    pub timeout_seconds: f64,
    /// Not 0: in low-latency calls, mask a rank that misses its deadline instead of failing.
    pub enable_shrink: i32,
    /// Not 0: CUDA engine, every part of a call is a launch of its own; for compute-sanitizer.
    pub split_launches: i32,
    /// Experts that all ranks must agree on and every call must use; 0: any.
    pub num_experts: usize,
    /// Elements of a row that all ranks must agree on and every call must use; 0: any.
    pub hidden: usize,
    /// Choices of a token that all ranks must agree on and every call must use; 0: any.
    pub top_k: usize,
}

// SAFETY: see the trait; all fields are numbers.
unsafe impl Versioned for BufferSettings {
    const NAME: &'static str = "deep_ep_buffer_config_t";
}

/// 0 is C's way to say nothing.
pub(crate) fn given(number: usize) -> Option<usize> {
    (number != 0).then_some(number)
}

impl LowLatencyCapacity {
    fn is_given(&self) -> bool {
        let numbers = [
            self.num_max_dispatch_tokens_per_rank,
            self.hidden,
            self.num_experts,
            self.exact_top_k,
        ];
        numbers != [0; 4]
    }

    pub(crate) fn config(&self) -> LowLatencyConfig {
        LowLatencyConfig {
            max_tokens_per_rank: self.num_max_dispatch_tokens_per_rank,
            hidden: self.hidden,
            num_experts: self.num_experts,
            exact_top_k: given(self.exact_top_k),
        }
    }
}

impl BufferSettings {
    /// As all zeros.
    pub(crate) fn defaults() -> Self {
        // SAFETY: all fields are numbers.
        unsafe { std::mem::zeroed() }
    }

    pub(crate) fn config(&self, ranks: usize) -> Result<BufferConfig> {
        let base = BufferConfig::from_env()?;
        let engine = match self.engine {
            0 => base.engine,
            1 => EngineChoice::Auto,
            2 => EngineChoice::Cpu,
            3 => EngineChoice::Cuda,
            other => {
                let limit = "must be a value of deep_ep_engine";
                return Err(Error::invalid("engine", other, limit));
            }
        };
        if self.device < 0 {
            let limit = "must be DEEP_EP_CUDA(n), or 0";
            return Err(Error::invalid("device", self.device, limit));
        }
        let low_latency = match (self.low_latency.is_given(), self.low_latency_bytes) {
            (true, _) => Some(self.low_latency.config()),
            (false, 0) => None,
            (false, bytes) => Some(LowLatencyConfig::from_bytes(ranks, bytes)?),
        };
        Ok(BufferConfig {
            engine,
            device: given(self.device as usize).map(|number| number - 1),
            scale_up_bytes: self.scale_up_bytes,
            max_bytes: given(self.max_bytes),
            low_latency,
            num_sms: given(self.num_sms).unwrap_or(base.num_sms),
            timeout: timeout(self.timeout_seconds)?,
            enable_shrink: self.enable_shrink != 0,
            split_launches: self.split_launches != 0 || base.split_launches,
            num_experts: given(self.num_experts),
            hidden: given(self.hidden),
            top_k: given(self.top_k),
        })
    }
}

/// Moves rows between the ranks of a communicator.
pub struct BufferObject {
    pub(crate) inner: Buffer,
    /// Bound on the SMs of calls that set none; 0: the buffer's own.
    num_sms: AtomicUsize,
}

impl Object for BufferObject {
    const NAME: &'static str = "deep_ep_buffer_t";
}

impl BufferObject {
    /// Makes a buffer. What this rank cannot use becomes a setting that fails on all ranks, which
    /// would wait otherwise.
    pub(crate) fn new(communicator: &Communicator, config: Result<BufferConfig>) -> Result<Self> {
        let unusable = || BufferConfig {
            num_sms: 0,
            ..BufferConfig::default()
        };
        let (config, failed) = match config {
            Ok(config) => (config, None),
            Err(error) => (unusable(), Some(error)),
        };
        let made = Buffer::new(communicator, config);
        let inner = failed.map_or(made, Err)?;
        Ok(Self {
            inner,
            num_sms: AtomicUsize::new(0),
        })
    }

    /// What must be known before a call can be begun: a failure is told to the peers, which would
    /// wait for this rank's call.
    pub(crate) fn prepared<R>(&self, call: Call, prepared: Result<R>) -> Result<R> {
        match &prepared {
            Ok(_) => {}
            Err(Error::InvalidArgument(reject)) => self.inner.refuse(call, reject),
            Err(error) => {
                let reject = Reject::new("its call", error, "must be possible on every rank");
                self.inner.refuse(call, &reject);
            }
        }
        prepared
    }

    pub(crate) fn set_num_sms(&self, num_sms: usize) {
        self.num_sms.store(num_sms, Ordering::Relaxed);
    }

    /// The bound of a call that sets `of_call`, 0 for none.
    pub(crate) fn num_sms(&self, of_call: usize) -> Option<usize> {
        given(of_call).or_else(|| given(self.num_sms.load(Ordering::Relaxed)))
    }
}

pub(crate) fn get(buffer: *const BufferObject) -> Result<Arc<BufferObject>> {
    objects::get(buffer, "buffer")
}

/// The stream that C passed.
pub(crate) fn stream(stream: *mut c_void) -> Stream {
    // SAFETY: the header says that a stream must be good until calls made with it are done.
    unsafe { Stream::from_raw(stream.addr()) }
}

/// Makes a buffer. `config` was made by `deep_ep_buffer_config()`; NULL: defaults. Collective: all ranks
/// make their buffers in the same order. The communicator may be freed afterwards. `*buffer` is the
/// caller's to free.
/// Any thread; one at a time for each communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_buffer_create(
    communicator: *const CommunicatorObject,
    config: *const BufferSettings,
    buffer: *mut *mut BufferObject,
) -> Status {
    boundary::call(|| {
        let communicator = &objects::get(communicator, "communicator")?.0;
        let out = Out::new(buffer, "buffer");
        let settings = pointers::read_optional(config, "config");
        let config = out.as_ref().map_err(Clone::clone).and_then(|_| {
            let settings = settings?.unwrap_or_else(BufferSettings::defaults);
            settings.config(communicator.size())
        });
        let made = BufferObject::new(communicator, config)?;
        out?.set(objects::give(made));
        Ok(())
    })
}

/// Frees a buffer: never waits for a peer. Handles and loans stay good; a call that was begun keeps what
/// it needs until it is finished or freed. NULL is allowed. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_buffer_free(buffer: *mut BufferObject) -> Status {
    boundary::call(|| objects::take(buffer, "buffer"))
}

/// This rank. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_buffer_rank(
    buffer: *const BufferObject,
    rank: *mut usize,
) -> Status {
    boundary::call(|| {
        let out = Out::new(rank, "rank")?;
        out.set(get(buffer)?.inner.rank().0);
        Ok(())
    })
}

/// Number of ranks. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_buffer_num_ranks(
    buffer: *const BufferObject,
    num_ranks: *mut usize,
) -> Status {
    boundary::call(|| {
        let out = Out::new(num_ranks, "num_ranks")?;
        out.set(get(buffer)?.inner.num_ranks());
        Ok(())
    })
}

/// `*engine` becomes "cpu" or "cuda", a constant. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_buffer_engine(
    buffer: *const BufferObject,
    engine: *mut *const c_char,
) -> Status {
    boundary::call(|| {
        let out = Out::new(engine, "engine")?;
        out.set(match get(buffer)?.inner.engine() {
            "cuda" => c"cuda".as_ptr(),
            _ => c"cpu".as_ptr(),
        });
        Ok(())
    })
}

/// Bounds the SMs, on the CPU engine the worker threads, of high-throughput calls that set no bound of
/// their own; 0: the bound that the buffer was made with. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_buffer_set_num_sms(
    buffer: *const BufferObject,
    num_sms: usize,
) -> Status {
    boundary::call(|| {
        get(buffer)?.set_num_sms(num_sms);
        Ok(())
    })
}

/// What went wrong on this rank in calls for which nobody has waited, once: on a GPU a call may return
/// before its work is done. Call it after the stream was synchronised. One thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_buffer_check(buffer: *const BufferObject) -> Status {
    boundary::call(|| get(buffer)?.inner.check())
}

/// Grows this rank's symmetric memory to at least `bytes` now. Local. One thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_buffer_reserve(
    buffer: *const BufferObject,
    bytes: usize,
) -> Status {
    boundary::call(|| get(buffer)?.inner.reserve(bytes))
}

/// Waits for all ranks; with `enable_shrink` a rank that does not come is masked. Collective. One
/// thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_buffer_barrier(buffer: *const BufferObject) -> Status {
    boundary::call(|| get(buffer)?.inner.barrier())
}

/// Takes part in a call only to tell the peers that this rank cannot make it, because `argument` is
/// `value`, which `limit` ("must be ...") does not allow: they end that call with
/// DEEP_EP_EPEER_REJECTED. `call` is a value of `deep_ep_call`. For callers that find something
/// unusable before they can make the call. One thread at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_refuse(
    buffer: *const BufferObject,
    call: i32,
    argument: *const c_char,
    value: *const c_char,
    limit: *const c_char,
) -> Status {
    boundary::call(|| {
        let buffer = get(buffer)?;
        let call = match call {
            0 => Call::Dispatch,
            1 => Call::Combine,
            2 => Call::LowLatencyDispatch,
            3 => Call::LowLatencyCombine,
            other => {
                let limit = "must be a value of deep_ep_call";
                return Err(Error::invalid("call", other, limit));
            }
        };
        let text = |pointer, name| {
            Ok::<_, Error>(pointers::text_optional(pointer, name)?.unwrap_or_default())
        };
        let (argument, value) = (text(argument, "argument")?, text(value, "value")?);
        let reject = Reject::new(argument, value, text(limit, "limit")?);
        buffer.inner.refuse(call, &reject);
        Ok(())
    })
}

/// Bytes copied and memory used by one rank since its buffer was made. On a GPU only memory is counted.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Counters {
    /// Set by `deep_ep_statistics()`.
    pub struct_size: usize,
    /// Bytes of rows written by this rank's copies.
    pub row_bytes_copied: u64,
    /// Bytes of indices, weights and scales copied.
    pub metadata_bytes_copied: u64,
    /// Bytes that were read to be summed.
    pub bytes_summed: u64,
    /// Bytes that low-latency calls wrote to peers.
    pub wire_bytes: u64,
    /// Calls made.
    pub calls: u64,
    /// Symmetric memory: address range reserved, which costs no memory.
    pub memory_reserved: u64,
    /// Symmetric memory taken from the system.
    pub memory_committed: u64,
    /// Symmetric memory in use now.
    pub memory_in_use: u64,
    /// Most that was in use at once.
    pub memory_peak: u64,
}

// SAFETY: see the trait; all fields are numbers.
unsafe impl Versioned for Counters {
    const NAME: &'static str = "deep_ep_statistics_t";
}

/// Bytes copied and memory used so far on this rank. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_buffer_statistics(
    buffer: *const BufferObject,
    statistics: *mut Counters,
) -> Status {
    boundary::call(|| {
        let out = OutStruct::new(statistics, "statistics")?;
        let Statistics {
            row_bytes_copied,
            metadata_bytes_copied,
            bytes_summed,
            wire_bytes,
            calls,
            memory,
        } = get(buffer)?.inner.statistics();
        out.set(Counters {
            struct_size: size_of::<Counters>(),
            row_bytes_copied,
            metadata_bytes_copied,
            bytes_summed,
            wire_bytes,
            calls,
            memory_reserved: memory.reserved,
            memory_committed: memory.committed,
            memory_in_use: memory.in_use,
            memory_peak: memory.peak,
        });
        Ok(())
    })
}

/// Bytes of landing memory per rank that low-latency calls of these sizes need; for
/// `low_latency_bytes` of the settings. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_get_low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: usize,
    hidden: usize,
    num_ranks: usize,
    num_experts: usize,
    bytes: *mut usize,
) -> Status {
    boundary::call(|| {
        let out = Out::new(bytes, "bytes")?;
        let capacity = LowLatencyCapacity {
            num_max_dispatch_tokens_per_rank,
            hidden,
            num_experts,
            exact_top_k: 0,
        };
        out.set(capacity.config().bytes(num_ranks)?);
        Ok(())
    })
}
