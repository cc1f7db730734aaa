//! Buffers.

use std::ffi::CStr;

use deep_ep_c::{
    buffer::{
        BufferObject, BufferSettings, Counters, deep_ep_buffer_create, deep_ep_buffer_engine,
        deep_ep_buffer_free, deep_ep_buffer_num_ranks, deep_ep_buffer_rank,
        deep_ep_buffer_statistics,
    },
    layout::deep_ep_get_dispatch_layout,
    loan::{deep_ep_get_next_low_latency_combine_buffer, deep_ep_loan},
    masks::{deep_ep_low_latency_query_mask_buffer, deep_ep_low_latency_update_mask_buffer},
};
use library::{BufferConfig, DType, EngineChoice, MemoryUse, Rank, Result, Statistics, Tensor};

use super::{Communicator, Layout, Loan, LowLatencyHandle, Owned, c, made, memory::view};

/// A buffer of C.
pub(crate) struct Buffer(Owned<BufferObject>);

fn settings(config: &BufferConfig) -> BufferSettings {
    let mut settings = made!(BufferSettings);
    settings.engine = match config.engine {
        // C has no such number of SMs: its way to say something unusable.
        _ if config.num_sms == 0 => 99,
        EngineChoice::Auto => 1,
        EngineChoice::Cpu => 2,
        EngineChoice::Cuda => 3,
    };
    settings.device = config.device.map_or(0, |device| device as i32 + 1);
    settings.scale_up_bytes = config.scale_up_bytes;
    settings.max_bytes = config.max_bytes.unwrap_or(0);
    if let Some(low_latency) = &config.low_latency {
        settings.low_latency.num_max_dispatch_tokens_per_rank = low_latency.max_tokens_per_rank;
        settings.low_latency.hidden = low_latency.hidden;
        settings.low_latency.num_experts = low_latency.num_experts;
        settings.low_latency.exact_top_k = low_latency.exact_top_k.unwrap_or(0);
    }
    settings.num_sms = config.num_sms;
    settings.timeout_seconds = config.timeout.as_secs_f64();
    settings.enable_shrink = config.enable_shrink.into();
    settings.split_launches = config.split_launches.into();
    settings.num_experts = config.num_experts.unwrap_or(0);
    settings.hidden = config.hidden.unwrap_or(0);
    settings.top_k = config.top_k.unwrap_or(0);
    settings
}

impl Buffer {
    pub(crate) fn new(communicator: &Communicator, config: BufferConfig) -> Result<Self> {
        let settings = settings(&config);
        let mut buffer = std::ptr::null_mut();
        c!(
            communicator.rank().0,
            deep_ep_buffer_create(communicator.pointer(), &settings, &mut buffer)
        )?;
        Ok(Self(Owned::new(buffer, deep_ep_buffer_free)))
    }

    pub(crate) fn pointer(&self) -> *const BufferObject {
        self.0.pointer
    }

    pub(crate) fn rank(&self) -> Rank {
        let mut rank = usize::MAX;
        c!(0, deep_ep_buffer_rank(self.pointer(), &mut rank)).expect("a buffer");
        Rank(rank)
    }

    pub(crate) fn num_ranks(&self) -> usize {
        let mut ranks = 0;
        c!(0, deep_ep_buffer_num_ranks(self.pointer(), &mut ranks)).expect("a buffer");
        ranks
    }

    pub(crate) fn engine(&self) -> &'static str {
        let mut engine = std::ptr::null();
        c!(0, deep_ep_buffer_engine(self.pointer(), &mut engine)).expect("a buffer");
        // SAFETY: a constant.
        unsafe { CStr::from_ptr(engine) }.to_str().expect("ASCII")
    }

    pub(crate) fn statistics(&self) -> Statistics {
        let mut counters = made!(Counters);
        c!(0, deep_ep_buffer_statistics(self.pointer(), &mut counters)).expect("a buffer");
        Statistics {
            row_bytes_copied: counters.row_bytes_copied,
            metadata_bytes_copied: counters.metadata_bytes_copied,
            bytes_summed: counters.bytes_summed,
            wire_bytes: counters.wire_bytes,
            calls: counters.calls,
            memory: MemoryUse {
                reserved: counters.memory_reserved,
                committed: counters.memory_committed,
                in_use: counters.memory_in_use,
                peak: counters.memory_peak,
                ..MemoryUse::default()
            },
        }
    }

    pub(crate) fn dispatch_layout(&self, idx: Tensor<'_>, num_experts: usize) -> Result<Layout> {
        let mut layout = std::ptr::null_mut();
        let stream = std::ptr::null_mut();
        c!(
            self.rank().0,
            deep_ep_get_dispatch_layout(
                self.pointer(),
                &view(&idx),
                num_experts,
                stream,
                &mut layout
            )
        )?;
        Ok(Layout::new(layout))
    }

    pub(crate) fn loan(&self, dtype: DType, shape: &[usize]) -> Result<Loan> {
        let (rank, mut loan) = (self.rank().0, std::ptr::null_mut());
        c!(
            rank,
            deep_ep_loan(
                self.pointer(),
                dtype as i32,
                shape.as_ptr(),
                shape.len(),
                &mut loan
            )
        )?;
        Ok(Loan::new(loan, rank))
    }

    pub(crate) fn next_low_latency_combine_buffer(
        &self,
        handle: &LowLatencyHandle,
        hidden: usize,
    ) -> Result<Loan> {
        let (rank, mut loan) = (self.rank().0, std::ptr::null_mut());
        let next = deep_ep_get_next_low_latency_combine_buffer;
        c!(
            rank,
            next(self.pointer(), handle.pointer(), hidden, &mut loan)
        )?;
        Ok(Loan::new(loan, rank))
    }

    pub(crate) fn set_mask(&self, rank: Rank, masked: bool) -> Result<()> {
        let set = deep_ep_low_latency_update_mask_buffer;
        c!(self.rank().0, set(self.pointer(), rank.0, masked.into()))
    }

    pub(crate) fn masks(&self) -> Result<Vec<bool>> {
        let mut masks = vec![-1; self.num_ranks()];
        let query = deep_ep_low_latency_query_mask_buffer;
        let ranks = masks.len();
        c!(
            self.rank().0,
            query(self.pointer(), masks.as_mut_ptr(), ranks)
        )?;
        let masks = masks.into_iter().map(|mask| match mask {
            0 => false,
            1 => true,
            other => panic!("a mask is {other}"),
        });
        Ok(masks.collect())
    }
}
