//! What a buffer is made with.

use std::time::Duration;

use crate::{
    engine::cpu::low_latency_half_bytes,
    error::{Error, Result},
    routing::ExpertMap,
    settings::{EngineChoice, Settings},
};

/// The stream on which a call's work is ordered. The CPU engine works in the calling thread, so
/// there only [`Stream::HOST`] exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stream(usize);

impl Stream {
    /// The calling thread.
    pub const HOST: Self = Self(0);

    /// A stream of a device, by its driver handle.
    ///
    /// # Safety
    /// The handle must stay valid until the calls made with it are done.
    pub unsafe fn from_raw(handle: usize) -> Self {
        Self(handle)
    }

    /// The driver handle, 0 for the host.
    pub fn as_raw(self) -> usize {
        self.0
    }
}

/// Fixed capacity of the low-latency calls. All ranks must pass the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LowLatencyConfig {
    /// Most tokens that a rank sends in a call, `M`.
    pub max_tokens_per_rank: usize,
    /// Hidden size `H`, in elements.
    pub hidden: usize,
    /// Experts over all ranks, `E`.
    pub num_experts: usize,
    /// Set to the largest `K` to make room for `exact` combines, which send one row per choice.
    pub exact_top_k: Option<usize>,
}

impl LowLatencyConfig {
    /// Bytes of landing memory that each of `ranks` ranks needs for this capacity.
    ///
    /// # Errors
    /// The capacity needs 2^62 bytes or more.
    pub fn bytes(&self, ranks: usize) -> Result<usize> {
        let half = low_latency_half_bytes(ranks, self).ok_or_else(|| {
            Error::invalid(
                "low_latency",
                format!("{self:?}"),
                "must need fewer than 2^62 bytes of landing memory",
            )
        })?;
        Ok(2 * half)
    }

    /// A capacity of at least `bytes` bytes of landing memory, for callers who know only those: any
    /// shape whose own [`bytes`](Self::bytes) are not more fits it.
    ///
    /// # Errors
    /// `bytes` is 2^61 or more.
    pub fn from_bytes(ranks: usize, bytes: usize) -> Result<Self> {
        let of_tokens = |max_tokens_per_rank| Self {
            max_tokens_per_rank,
            hidden: 8,
            num_experts: ranks,
            exact_top_k: None,
        };
        let enough = |tokens| Ok::<_, Error>(of_tokens(tokens).bytes(ranks)? >= bytes);
        // Doubled until it is enough, then narrowed down.
        let (mut below, mut tokens) = (0, 1);
        while !enough(tokens)? {
            (below, tokens) = (tokens, tokens * 2);
        }
        while below + 1 < tokens {
            let middle = below + (tokens - below) / 2;
            if enough(middle)? {
                tokens = middle;
            } else {
                below = middle;
            }
        }
        Ok(of_tokens(tokens))
    }
}

/// How a [`Buffer`](crate::Buffer) is made.
///
/// `BufferConfig::default()` has no environment in it; [`BufferConfig::from_env`] starts from the
/// variables that `deep-ep doctor` lists.
#[derive(Debug, Clone)]
pub struct BufferConfig {
    /// Engine to use.
    pub engine: EngineChoice,
    /// GPU of the CUDA engine, by its number among those that this process sees. `None`: with
    /// engine `cuda` the rank's number modulo the GPUs; with engine `auto` the CPU engine is used.
    pub device: Option<usize>,
    /// Bytes of symmetric memory to start with for the high-throughput calls; it grows.
    pub scale_up_bytes: usize,
    /// Most bytes that this rank's symmetric memory may grow to; `None`: the machine's memory.
    pub max_bytes: Option<usize>,
    /// Capacity of the low-latency calls; `None`: there are none.
    pub low_latency: Option<LowLatencyConfig>,
    /// Bound on the SMs, or on the CPU engine the worker threads, that this rank uses.
    pub num_sms: usize,
    /// Deadline of every wait.
    pub timeout: Duration,
    /// In low-latency calls, mask a rank that misses its deadline instead of failing.
    pub enable_shrink: bool,
    /// CUDA engine: launches every part of a call on its own, waits for it and for all ranks, so that
    /// no kernel waits for another; for compute-sanitizer and debuggers. Slow; calls cannot be
    /// recorded in graphs, and all ranks must make each call at the same time.
    pub split_launches: bool,
    /// When set, `E` that all ranks must agree on and every call must use.
    pub num_experts: Option<usize>,
    /// When set, `H` (elements) that all ranks must agree on and every call must use.
    pub hidden: Option<usize>,
    /// When set, `K` that all ranks must agree on and every call must use.
    pub top_k: Option<usize>,
}

impl Default for BufferConfig {
    fn default() -> Self {
        Self {
            engine: EngineChoice::Auto,
            device: None,
            scale_up_bytes: 0,
            max_bytes: None,
            low_latency: None,
            num_sms: 20,
            timeout: Duration::from_secs(300),
            enable_shrink: false,
            split_launches: false,
            num_experts: None,
            hidden: None,
            top_k: None,
        }
    }
}

impl BufferConfig {
    /// Defaults changed by the environment: `DEEP_EP_ENGINE`, `DEEP_EP_TIMEOUT_SECS`,
    /// `DEEP_EP_SPLIT_LAUNCHES`.
    ///
    /// # Errors
    /// A variable's value is not usable; the error names it.
    pub fn from_env() -> Result<Self> {
        let settings = Settings::from_env()?;
        Ok(Self {
            engine: settings.engine.value,
            timeout: settings.timeout.value,
            split_launches: settings.split_launches.value,
            ..Self::default()
        })
    }

    pub(crate) fn check(&self, ranks: usize) -> Result<()> {
        if self.num_sms == 0 {
            return Err(Error::invalid("num_sms", 0, "must be at least 1"));
        }
        if let Some(low_latency) = &self.low_latency {
            ExpertMap::new(low_latency.num_experts, ranks)?;
            if low_latency.hidden == 0 || !low_latency.hidden.is_multiple_of(8) {
                return Err(Error::invalid(
                    "low_latency.hidden",
                    low_latency.hidden,
                    "must be a multiple of 8, so that rows are multiples of 16 bytes",
                ));
            }
        }
        if self.timeout.is_zero() {
            return Err(Error::invalid("timeout", "0 s", "must be longer than 0"));
        }
        if let (Some(max), start) = (self.max_bytes, self.scale_up_bytes)
            && start > max
        {
            return Err(Error::invalid(
                "scale_up_bytes",
                start,
                format!("must not exceed max_bytes = {max}"),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_by_bytes_holds_the_shape_whose_bytes_they_are() {
        for (ranks, tokens, hidden) in [(1, 1, 8), (2, 128, 7168), (12, 77, 2048)] {
            let wanted = LowLatencyConfig {
                max_tokens_per_rank: tokens,
                hidden,
                num_experts: 2 * ranks,
                exact_top_k: None,
            };
            let bytes = wanted.bytes(ranks).unwrap();
            let found = LowLatencyConfig::from_bytes(ranks, bytes).unwrap();
            let have = found.bytes(ranks).unwrap();
            assert!((bytes..bytes + (1 << 20)).contains(&have), "{bytes} {have}");
        }
        assert!(LowLatencyConfig::from_bytes(2, usize::MAX).is_err());
    }
}
