//! The tokens of each destination, ascending, from what is known about each token.
//!
//! Two ways with one result. Both run without data-dependent branches, which random routing would
//! mispredict for every token.
//!
//! - Few ranks: a bit mask for each token, scanned once for each rank. The scan writes every token
//!   and advances only past those that go to the rank.
//! - Many ranks: the `(rank, token)` pairs in token order, scattered to their lists.

/// The most ranks for which scanning masks is faster than scattering pairs.
pub(super) const MAX_MASK_RANKS: usize = 16;

/// For each rank the ascending tokens that go there, one list behind the other.
#[derive(Debug, Clone, Default)]
pub(super) struct Lists {
    /// All lists.
    tokens: Vec<u32>,
    /// `[R + 1]`: list `r` is `tokens[offsets[r]..offsets[r + 1]]`.
    offsets: Vec<usize>,
    /// Where the next token of each rank goes while pairs are scattered.
    next: Vec<usize>,
}

impl Lists {
    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.offsets.clear();
    }

    /// `[R + 1]`; empty before the first build.
    pub(super) fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    pub(super) fn all(&self) -> &[u32] {
        &self.tokens
    }

    /// List `rank`; empty if there is no such rank.
    pub(super) fn of(&self, rank: usize) -> &[u32] {
        match self.offsets.get(rank..=rank + 1) {
            Some(&[begin, end]) => &self.tokens[begin..end],
            _ => &[],
        }
    }

    /// From `masks[t]`, whose bit `r` says that token `t` goes to rank `r`. A token goes to at most
    /// `most` ranks.
    pub(super) fn build_from_masks(&mut self, masks: &[u32], ranks: usize, most: usize) {
        // One more: the scan writes one token past the end of the list that it is building.
        let room = masks.len() * most.min(ranks) + 1;
        self.tokens.resize(room, 0);
        self.offsets.clear();
        self.offsets.push(0);
        let mut end = 0;
        for rank in 0..ranks {
            for (t, mask) in masks.iter().enumerate() {
                self.tokens[end] = t as u32;
                end += (mask >> rank & 1) as usize;
            }
            self.offsets.push(end);
        }
        self.tokens.truncate(end);
    }

    /// From the `(rank, token)` pairs in token order, and the number of pairs of each rank.
    pub(super) fn build_from_pairs(&mut self, pairs: &[(u32, u32)], tokens_per_rank: &[u32]) {
        self.offsets.clear();
        self.offsets.push(0);
        let mut end = 0;
        for &count in tokens_per_rank {
            end += count as usize;
            self.offsets.push(end);
        }
        self.next.clear();
        self.next.extend_from_slice(&self.offsets);
        self.tokens.resize(pairs.len(), 0);
        for &(rank, token) in pairs {
            let next = &mut self.next[rank as usize];
            self.tokens[*next] = token;
            *next += 1;
        }
    }
}

/// Writes `is_token_in_rank [T, ranks]`, a byte of 0 or 1 for each bit, from `masks [T]`.
pub(super) fn spread_masks(masks: &[u32], ranks: usize, bytes: &mut Vec<u8>) {
    // Eight bytes at a time; what is written past a row belongs to the next row, written after it,
    // and past the last row to the slack.
    let len = masks.len() * ranks;
    bytes.resize(len + MAX_MASK_RANKS, 0);
    for (t, &mask) in masks.iter().enumerate() {
        let row = &mut bytes[t * ranks..][..MAX_MASK_RANKS];
        row[..8].copy_from_slice(&spread_eight(mask as u8).to_le_bytes());
        if ranks > 8 {
            row[8..].copy_from_slice(&spread_eight((mask >> 8) as u8).to_le_bytes());
        }
    }
    bytes.truncate(len);
}

/// Bit `i` of `bits` as byte `i`.
fn spread_eight(bits: u8) -> u64 {
    // The product puts copies of the low seven bits at distances of seven: bit i of copy i lands on
    // bit 8 * i, and no two copies overlap.
    let low = u64::from(bits & 0x7f).wrapping_mul(0x0002_0408_1020_4081) & 0x0101_0101_0101_0101;
    low | u64::from(bits >> 7) << 56
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bits_become_eight_bytes() {
        for bits in 0..=255u8 {
            let bytes = spread_eight(bits).to_le_bytes();
            for (i, byte) in bytes.into_iter().enumerate() {
                assert_eq!(byte, bits >> i & 1, "bit {i} of {bits:#x}");
            }
        }
    }

    #[test]
    fn both_ways_give_the_same_lists() {
        let mut lists = Lists::default();
        lists.build_from_masks(&[0b101, 0b000, 0b111], 3, 3);
        assert_eq!(lists.all(), [0, 2, 2, 0, 2]);
        assert_eq!(lists.offsets(), [0, 2, 3, 5]);
        lists.build_from_pairs(&[(0, 0), (2, 0), (0, 2), (1, 2), (2, 2)], &[2, 1, 2]);
        assert_eq!(lists.all(), [0, 2, 2, 0, 2]);
        assert_eq!(lists.offsets(), [0, 2, 3, 5]);
        assert_eq!(lists.of(2), [0, 2]);
        assert_eq!(lists.of(3), []);
    }
}
