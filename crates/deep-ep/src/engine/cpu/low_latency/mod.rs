//! Low-latency calls: landing memory of a fixed size, two halves used by turns.
//!
//! A half belongs to one call. Its owner's peers write it; every address in it is computed here.
//!
//! ```text
//! dispatch   headers  [R][M]      source token i32, then K local experts i32, -1 padded
//!            rows     [R][M]      bf16, or fp8 codes and their f32 scales
//! combine    choices  [R][M][K]   expert i32 (-1: none), weight f32: those of the source's tokens
//!            stamps   [R][M]      number of the call that wrote the row (exact: [M][K])
//!            rows     [R][M]      partial sums from each rank (exact: rows [M][K] per choice)
//! ```

pub(super) mod combine;
pub(super) mod dispatch;

use crate::{
    buffer::LowLatencyConfig,
    codec::logfmt::max_encoded_bytes,
    error::{Error, Result},
};

/// The most choices of a token that the capacity is computed for.
const MAX_TOP_K: usize = 32;
/// Every array in a half begins at a multiple of this.
const ALIGN: usize = 64;

/// The landing memory of one rank.
pub(in crate::engine::cpu) struct Area {
    offset: usize,
    half: usize,
}

impl Area {
    pub(super) fn new(offset: usize, ranks: usize, config: &LowLatencyConfig) -> Result<Self> {
        let half = half_bytes(ranks, config).ok_or_else(|| {
            Error::invalid(
                "low_latency",
                format!("{config:?}"),
                "must need fewer than 2^62 bytes of landing memory",
            )
        })?;
        Ok(Self { offset, half })
    }

    /// Bytes of both halves.
    pub(super) fn bytes(&self) -> usize {
        2 * self.half
    }

    /// Offset of the half that `call` uses.
    fn half_of(&self, call: u64) -> usize {
        self.offset + (call % 2) as usize * self.half
    }
}

/// Bytes of one half: room for a dispatch, and for a combine, of the largest shape.
pub(crate) fn half_bytes(ranks: usize, config: &LowLatencyConfig) -> Option<usize> {
    let (tokens, hidden) = (config.max_tokens_per_rank, config.hidden);
    let dispatch = DispatchHalf::new(ranks, tokens, MAX_TOP_K, hidden.checked_mul(2)?)?.bytes;
    let combine = CombineHalf::new(ranks, tokens, MAX_TOP_K, hidden, false)?.bytes;
    let exact = match config.exact_top_k {
        Some(top_k) => CombineHalf::new(ranks, tokens, top_k, hidden, true)?.bytes,
        None => 0,
    };
    let half = dispatch
        .max(combine)
        .max(exact)
        .checked_next_multiple_of(4096)?;
    (half < 1 << 61).then_some(half)
}

/// Lays arrays one behind the other.
struct Layer(usize);

impl Layer {
    fn array(&mut self, counts: &[usize]) -> Option<usize> {
        let start = self.0;
        let bytes = counts
            .iter()
            .try_fold(1usize, |bytes, &n| bytes.checked_mul(n))?;
        self.0 = start.checked_add(bytes)?.checked_next_multiple_of(ALIGN)?;
        Some(start)
    }
}

/// Addresses in a half that a dispatch uses.
#[derive(Debug, Clone, Copy)]
struct DispatchHalf {
    tokens: usize,
    header: usize,
    headers: usize,
    row: usize,
    rows: usize,
    bytes: usize,
}

impl DispatchHalf {
    fn new(ranks: usize, tokens: usize, top_k: usize, row_bytes: usize) -> Option<Self> {
        let mut layer = Layer(0);
        let header = (4 + 4 * top_k).next_multiple_of(16);
        let row = row_bytes.checked_next_multiple_of(ALIGN)?;
        let headers = layer.array(&[ranks, tokens, header])?;
        let rows = layer.array(&[ranks, tokens, row])?;
        Some(Self {
            tokens,
            header,
            headers,
            row,
            rows,
            bytes: layer.0,
        })
    }

    fn header_at(&self, source: usize, slot: usize) -> usize {
        self.headers + (source * self.tokens + slot) * self.header
    }

    fn row_at(&self, source: usize, slot: usize) -> usize {
        self.rows + (source * self.tokens + slot) * self.row
    }
}

/// Addresses in a half that a combine uses.
#[derive(Debug, Clone, Copy)]
struct CombineHalf {
    tokens: usize,
    top_k: usize,
    choices: usize,
    stamps: usize,
    row: usize,
    rows: usize,
    bytes: usize,
}

impl CombineHalf {
    fn new(ranks: usize, tokens: usize, top_k: usize, hidden: usize, exact: bool) -> Option<Self> {
        let mut layer = Layer(0);
        let (across, within) = if exact { (1, top_k) } else { (ranks, 1) };
        let row = match exact {
            true => hidden.checked_mul(2)?,
            false => max_encoded_bytes(hidden.min(1 << 40)).max(hidden.checked_mul(2)?),
        };
        let row = row.checked_next_multiple_of(ALIGN)?;
        let choices = layer.array(&[ranks, tokens, top_k, 8])?;
        let stamps = layer.array(&[across, tokens, within, 8])?;
        let rows = layer.array(&[across, tokens, within, row])?;
        Some(Self {
            tokens,
            top_k,
            choices,
            stamps,
            row,
            rows,
            bytes: layer.0,
        })
    }

    /// The choices of all tokens of `source`.
    fn choices_at(&self, source: usize) -> usize {
        self.choices + source * self.tokens * self.top_k * 8
    }

    /// Index of the partial sum of `rank` for `token`.
    fn partial(&self, rank: usize, token: usize) -> usize {
        rank * self.tokens + token
    }

    /// Index of the row of choice `k` of `token` in an exact combine.
    fn choice(&self, token: usize, k: usize) -> usize {
        token * self.top_k + k
    }

    fn stamp_at(&self, index: usize) -> usize {
        self.stamps + index * 8
    }

    fn row_at(&self, index: usize) -> usize {
        self.rows + index * self.row
    }
}

/// The landing memory of all ranks for one call.
struct Halves<'a> {
    core: &'a super::core::Core,
    half: usize,
    len: usize,
}

impl<'a> Halves<'a> {
    /// The halves for `call`, which needs `bytes` of each.
    fn new(core: &'a super::core::Core, call: u64, bytes: Option<usize>) -> Result<Self> {
        let have = core.area.as_ref().map_or(0, |area| area.half);
        match (&core.area, bytes) {
            (Some(area), Some(needed)) if needed <= have => Ok(Self {
                core,
                half: area.half_of(call),
                len: have,
            }),
            _ => Err(Error::invalid(
                "low_latency",
                format!("{have} bytes of landing memory"),
                format!(
                    "must be {} bytes for this call's tokens, hidden size, top-k and wire format; \
                     it is fixed when the buffer is made",
                    bytes.map_or("fewer than 2^63".into(), |needed| needed.to_string())
                ),
            )),
        }
    }

    /// The address of `len` bytes at `offset` of the half in `rank`'s region.
    fn at(&self, rank: usize, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.len, "an address inside the half");
        let base = self.core.group.memory(rank).base().as_ptr();
        // Both halves are in the part of the region that was committed before ranks mapped it.
        base.wrapping_add(self.half + offset)
    }
}

/// Clock cycles, or nanoseconds where there is no cycle counter.
pub(super) fn cycles() -> i64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction exists on every x86-64 processor.
    unsafe {
        std::arch::x86_64::_rdtsc() as i64
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        use std::{sync::OnceLock, time::Instant};
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_not_multiplied_by_the_experts() {
        let config = LowLatencyConfig {
            max_tokens_per_rank: 128,
            hidden: 7168,
            num_experts: 256,
            exact_top_k: None,
        };
        let header = 8 * MAX_TOP_K + 8;
        let row = 7168 * 2;
        for ranks in [2, 8] {
            let both = 2 * half_bytes(ranks, &config).unwrap();
            assert!(both as f64 <= 2.1 * (ranks * 128 * (row + header)) as f64);
        }
    }

    #[test]
    fn absurd_shapes_have_no_size() {
        let config = LowLatencyConfig {
            max_tokens_per_rank: usize::MAX / 2,
            hidden: usize::MAX / 4,
            num_experts: 8,
            exact_top_k: Some(usize::MAX),
        };
        assert_eq!(half_bytes(8, &config), None);
    }
}
