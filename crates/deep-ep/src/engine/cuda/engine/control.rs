//! The control area of a region: where every word is that ranks write into each other's regions.

use super::params::{GroupParams, TEXT_BYTES};
use crate::error::{Error, Result};

/// Words of an announcement in front of its counts, `WORD_COUNTS`.
pub(crate) const ANNOUNCE_WORDS: u64 = 9;

/// Flags of one source.
pub(crate) const FLAGS: u64 = 512;

/// Ranks that a word of bits holds.
pub(crate) const MAX_RANKS: usize = 64;

/// Experts of a rank that an announcement has words for, at least.
const EXPERTS: u64 = 1024;

/// Offsets in a region, in bytes; the same on all ranks.
///
/// ```text
/// abort | missing [R] | dropped [R] | announcements [2][R] | texts [2][R] | flags [R][FLAGS] | (low-latency area) | heap
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Control {
    ranks: u64,
    /// Experts of a rank that there are words for.
    pub(crate) local_experts: u64,
    missing_at: u64,
    dropped_at: u64,
    announce_at: u64,
    announce_stride: u64,
    text_at: u64,
    flags_at: u64,
    /// Bytes of the area.
    pub(crate) bytes: u64,
}

impl Control {
    /// For so many ranks, and at least so many experts if the number is known.
    ///
    /// # Errors
    ///
    /// More ranks than a word of bits holds.
    pub(crate) fn new(ranks: usize, experts: Option<usize>) -> Result<Self> {
        if ranks > MAX_RANKS {
            return Err(Error::Unsupported {
                feature: format!("engine cuda with {ranks} ranks").into(),
                why: format!("at most {MAX_RANKS} ranks can share memory"),
            });
        }
        let ranks = ranks as u64;
        let known = experts.map_or(0, |experts| experts as u64 / ranks);
        let local_experts = known.max(EXPERTS);
        // The abort word, which waiting kernels look at, has a line of its own.
        let missing_at = 128;
        let dropped_at = missing_at + ranks * 8;
        let announce_at = (dropped_at + ranks * 8).next_multiple_of(128);
        // Behind the counts are those of experts, or another count for each rank.
        let words = ANNOUNCE_WORDS + ranks + local_experts.max(ranks);
        let announce_stride = (words * 8).next_multiple_of(128);
        let text_at = announce_at + 2 * ranks * announce_stride;
        let flags_at = text_at + 2 * ranks * TEXT_BYTES as u64;
        let bytes = (flags_at + ranks * FLAGS * 16).next_multiple_of(4096);
        Ok(Self {
            ranks,
            local_experts,
            missing_at,
            dropped_at,
            announce_at,
            announce_stride,
            text_at,
            flags_at,
            bytes,
        })
    }

    /// Where a rank says in every region that it has dropped its buffer.
    pub(crate) fn dropped_at(&self, rank: usize) -> u64 {
        self.dropped_at + rank as u64 * 8
    }

    /// Fills the offsets in.
    pub(crate) fn describe(&self, params: &mut GroupParams) {
        params.abort_at = 0;
        params.missing_at = self.missing_at;
        params.dropped_at = self.dropped_at;
        params.announce_at = self.announce_at;
        params.announce_stride = self.announce_stride;
        params.text_at = self.text_at;
        params.flags_at = self.flags_at;
        params.flags = FLAGS as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_do_not_overlap() {
        for ranks in [1, 2, 8, 64] {
            for experts in [None, Some(ranks), Some(ranks * 5000)] {
                let control = Control::new(ranks, experts).unwrap();
                let words = ANNOUNCE_WORDS + control.ranks + control.local_experts;
                assert!(control.announce_stride >= words * 8);
                assert!(control.announce_stride >= (ANNOUNCE_WORDS + 2 * control.ranks) * 8);
                let announcements = 2 * control.ranks * control.announce_stride;
                assert!(control.dropped_at >= control.missing_at + control.ranks * 8);
                assert!(control.announce_at >= control.dropped_at + control.ranks * 8);
                assert!(control.text_at >= control.announce_at + announcements);
                assert!(control.flags_at >= control.text_at + 2 * control.ranks * 512);
                assert!(control.bytes >= control.flags_at + control.ranks * FLAGS * 16);
                assert_eq!(control.flags_at % 16, 0);
            }
        }
        assert!(Control::new(65, None).is_err());
    }
}
