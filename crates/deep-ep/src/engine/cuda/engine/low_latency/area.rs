//! Where everything of the low-latency calls is in a region.

use crate::{
    buffer::LowLatencyConfig,
    codec::logfmt::LOGFMT_BLOCK,
    engine::cuda::engine::{
        control::ANNOUNCE_WORDS,
        params::{GroupParams, TEXT_BYTES},
    },
    error::{Error, Reject, Result},
};

/// Flags of one source and half. At most as many blocks send.
pub(super) const FLAGS: u32 = 256;
/// The most choices of a token that the capacity is computed for.
const MAX_TOP_K: u64 = 32;
/// Experts of a rank that an announcement has words for, at least.
const EXPERTS: u64 = 1024;
/// Rows begin at a multiple of this in landing memory.
pub(super) const ROW_ALIGN: u64 = 128;

/// Offsets in every region, in bytes.
///
/// ```text
/// barrier [R] | excluded [R] | announcements [2][R] | texts [2][R] | flags [2][R][FLAGS]
///   | tagged words [2] | rows [2]
/// ```
///
/// A half of the tagged words has 16 bytes per (rank, token, choice): a dispatch's headers, which take
/// 8 of them, or a combine's choices. Nothing but words with a call's number is ever written there. A half of the
/// rows has a row per (rank, token), or (token, choice) of an exact combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Area {
    pub(super) barrier_at: u64,
    pub(super) excluded_at: u64,
    announce_at: u64,
    announce_stride: u64,
    text_at: u64,
    flags_at: u64,
    pub(super) tagged_at: u64,
    pub(super) tagged_half: u64,
    pub(super) rows_at: u64,
    pub(super) rows_half: u64,
    /// Bytes of the area.
    pub(crate) bytes: u64,
    local_experts: u64,
}

fn checked_product(factors: &[u64]) -> Option<u64> {
    factors.iter().try_fold(1u64, |product, &factor| {
        product.checked_mul(factor).filter(|&n| n < 1 << 60)
    })
}

/// Bytes that a row of `hidden` elements takes in LogFMT, with a place of 256 bytes for each block;
/// see `logfmt.cuh`.
pub(super) fn logfmt_bytes(hidden: u64) -> u64 {
    let blocks = hidden.div_ceil(LOGFMT_BLOCK as u64);
    (blocks * 4).next_multiple_of(16) + blocks * 2 * LOGFMT_BLOCK as u64
}

/// Bytes from one landed row to the next, at most, for rows of `hidden` elements.
fn most_row_bytes(hidden: u64) -> Option<u64> {
    (hidden < 1 << 40).then(|| logfmt_bytes(hidden).next_multiple_of(ROW_ALIGN))
}

impl Area {
    /// Of an area that begins at `base`. Without a configuration there is no landing memory, only
    /// what barriers and rejects need.
    ///
    /// # Errors
    ///
    /// A capacity that no memory has.
    pub(crate) fn new(base: u64, ranks: usize, config: Option<&LowLatencyConfig>) -> Result<Self> {
        Self::sized(base, ranks as u64, config).ok_or_else(|| {
            Error::invalid(
                "low_latency",
                format!("{config:?}"),
                "must need fewer than 2^60 bytes of landing memory",
            )
        })
    }

    fn sized(base: u64, ranks: u64, config: Option<&LowLatencyConfig>) -> Option<Self> {
        let mut at = base;
        let mut part = |bytes: u64| -> Option<u64> {
            let start = at;
            at = at.checked_add(bytes)?.checked_next_multiple_of(256)?;
            Some(start)
        };
        let mut area = Self {
            barrier_at: part(ranks * 8)?,
            excluded_at: part(ranks * 8)?,
            announce_at: 0,
            announce_stride: 0,
            text_at: 0,
            flags_at: 0,
            tagged_at: 0,
            tagged_half: 0,
            rows_at: 0,
            rows_half: 0,
            bytes: 0,
            local_experts: 0,
        };
        let experts = config.map_or(0, |config| config.num_experts as u64);
        area.local_experts = (experts / ranks).max(EXPERTS);
        let words = ANNOUNCE_WORDS + area.local_experts;
        area.announce_stride = words.checked_mul(8)?.checked_next_multiple_of(128)?;
        area.announce_at = part(checked_product(&[2, ranks, area.announce_stride])?)?;
        area.text_at = part(2 * ranks * TEXT_BYTES as u64)?;
        area.flags_at = part(2 * ranks * u64::from(FLAGS) * 16)?;
        if let Some(config) = config {
            let (tokens, hidden) = (config.max_tokens_per_rank as u64, config.hidden as u64);
            area.tagged_half = checked_product(&[ranks, tokens, MAX_TOP_K * 16])?;
            area.tagged_half = area.tagged_half.next_multiple_of(256);
            let row = most_row_bytes(hidden)?;
            let exact = match config.exact_top_k {
                Some(top_k) => checked_product(&[tokens, top_k as u64, row])?,
                None => 0,
            };
            area.rows_half = checked_product(&[ranks, tokens, row])?.max(exact);
            area.tagged_at = part(2 * area.tagged_half)?;
            area.rows_at = part(area.rows_half.checked_mul(2)?)?;
        }
        area.bytes = at - base;
        (area.bytes < 1 << 60).then_some(area)
    }

    /// Bytes that are double-buffered: rows and the words beside them.
    pub(crate) fn landing_bytes(&self) -> u64 {
        2 * (self.tagged_half + self.rows_half)
    }

    /// Fills the offsets in.
    pub(super) fn describe(&self, params: &mut GroupParams) {
        params.announce_at = self.announce_at;
        params.announce_stride = self.announce_stride;
        params.text_at = self.text_at;
        params.flags_at = self.flags_at;
        params.flags = FLAGS;
    }

    /// Whether there is room for a call: `rows` rows of `stride` bytes and, for each of
    /// `ranks * tokens`, the words of `top_k` choices.
    pub(super) fn check(&self, shape: &Needed) -> std::result::Result<(), Reject> {
        let local = shape.experts / shape.ranks;
        if local > self.local_experts {
            return Err(Reject::new(
                "num_experts",
                shape.experts,
                format!(
                    "must be at most {}: the buffer was made for so many",
                    self.local_experts * shape.ranks
                ),
            ));
        }
        let tagged = checked_product(&[shape.ranks, shape.tokens, shape.top_k * 16]);
        let rows = checked_product(&[shape.rows, shape.stride]);
        // A place is a local expert and a row of it in 32 bits, of which all ones mean none.
        let places = checked_product(&[local, shape.tokens]).is_some_and(|n| n < u32::MAX.into());
        if tagged.is_some_and(|n| n <= self.tagged_half)
            && rows.is_some_and(|n| n <= self.rows_half)
            && places
        {
            return Ok(());
        }
        Err(Reject::new(
            "low_latency",
            format!("{} bytes of landing memory", self.landing_bytes() / 2),
            format!(
                "must have room for {} rows of {} bytes and {} tokens of {} ranks; it is fixed when \
                 the buffer is made",
                shape.rows, shape.stride, shape.tokens, shape.ranks
            ),
        ))
    }
}

/// What a call needs room for.
pub(super) struct Needed {
    pub(super) ranks: u64,
    pub(super) experts: u64,
    pub(super) tokens: u64,
    pub(super) top_k: u64,
    pub(super) rows: u64,
    pub(super) stride: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(tokens: usize, hidden: usize, exact_top_k: Option<usize>) -> LowLatencyConfig {
        LowLatencyConfig {
            max_tokens_per_rank: tokens,
            hidden,
            num_experts: 256,
            exact_top_k,
        }
    }

    #[test]
    fn memory_is_not_multiplied_by_the_experts() {
        for (hidden, ranks) in [(7168, 2), (7168, 8), (2048, 4)] {
            let area = Area::new(4096, ranks, Some(&config(128, hidden, None))).unwrap();
            let header = MAX_TOP_K * 16;
            let rows = (ranks * 128) as u64;
            let most = (rows * (hidden as u64 * 2 + header)) as f64 * 2.1;
            assert!(area.landing_bytes() as f64 <= most, "{area:?}");
        }
    }

    #[test]
    fn parts_do_not_overlap() {
        let area = Area::new(8192, 3, Some(&config(7, 72, Some(5)))).unwrap();
        let ends = [
            (area.barrier_at, 3 * 8),
            (area.excluded_at, 3 * 8),
            (area.announce_at, 2 * 3 * area.announce_stride),
            (area.text_at, 2 * 3 * TEXT_BYTES as u64),
            (area.flags_at, 2 * 3 * u64::from(FLAGS) * 16),
            (area.tagged_at, 2 * area.tagged_half),
            (area.rows_at, 2 * area.rows_half),
            (8192 + area.bytes, 0),
        ];
        for pair in ends.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{area:?}");
            assert_eq!(pair[0].0 % 256, 0);
        }
        assert_eq!(Area::new(0, 8, None).unwrap().landing_bytes(), 0);
    }

    #[test]
    fn absurd_shapes_have_no_size() {
        let absurd = config(usize::MAX / 2, usize::MAX / 4, Some(usize::MAX));
        assert!(Area::new(0, 8, Some(&absurd)).is_err());
    }

    #[test]
    fn what_fits_is_what_the_capacity_was_made_for() {
        let area = Area::new(0, 2, Some(&config(128, 7168, Some(8)))).unwrap();
        let needed = |rows: u64, tokens: u64, top_k: u64| Needed {
            ranks: 2,
            experts: 256,
            tokens,
            top_k,
            rows,
            stride: most_row_bytes(7168).unwrap(),
        };
        assert!(area.check(&needed(256, 128, 32)).is_ok());
        assert!(area.check(&needed(1024, 128, 8)).is_ok());
        assert!(area.check(&needed(1025, 128, 8)).is_err());
        assert!(area.check(&needed(256, 129, 32)).is_err());
        let experts = Needed {
            experts: 4096,
            ..needed(1, 1, 1)
        };
        assert!(area.check(&experts).is_err());
    }
}
