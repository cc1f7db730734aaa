//! Where the control words of a region are. Every address of the control area is computed here.
//!
//! ```text
//! line 0            magic, layout version, ranks
//! line 1            doorbell: rings u32, sleepers u32
//! abort             state, then operation, stage, and a bit mask of the ranks waited for
//! peers  [R]        one line each: calls finished, closed, excluded
//! mail   [2][R]     announce | landing | delivered, each on its own lines
//! low latency       two halves, see `low_latency`
//! heap              blocks
//! ```
//!
//! `peers` and `mail` are written by the peer they are indexed by, everything else by the owner, the
//! doorbell and the abort words by all.

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::sync::{Abort, Counter, Doorbell, Mailbox};

/// Bytes between things that different ranks write. Two cache lines: neighbours are prefetched in
/// pairs.
const LINE: usize = 128;
const WORD: usize = 8;

/// Words of a reject's text in an announcement.
pub(super) const TEXT_WORDS: usize = 40;
/// Words of an announcement that every operation has, before the per-rank words.
pub(super) const FIXED_WORDS: usize = 16;
/// Words of a landing or delivery note.
pub(super) const NOTE_WORDS: usize = 7;

/// The three messages of a call, in the order they are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Settings of the call, counts, where the sender's metadata is. Or a reject.
    Announce,
    /// Where the receiver wants rows pushed.
    Landing,
    /// Rows have been pushed, or are ready to be pulled from a place.
    Delivered,
}

/// The addresses of a control area for a number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    ranks: usize,
}

impl Layout {
    pub(super) const fn new(ranks: usize) -> Self {
        Self { ranks }
    }

    /// Words of an announcement.
    pub(super) const fn announce_words(&self) -> usize {
        FIXED_WORDS + self.ranks + TEXT_WORDS
    }

    /// Words of the mask of ranks in the abort words.
    const fn mask_words(&self) -> usize {
        self.ranks.div_ceil(64)
    }

    const fn abort_bytes(&self) -> usize {
        ((3 + self.mask_words()) * WORD).next_multiple_of(LINE)
    }

    const fn mailbox_bytes(&self, kind: Kind) -> usize {
        let words = match kind {
            Kind::Announce => self.announce_words(),
            Kind::Landing | Kind::Delivered => NOTE_WORDS,
        };
        ((1 + words) * WORD).next_multiple_of(LINE)
    }

    const fn mail_bytes(&self) -> usize {
        self.mailbox_bytes(Kind::Announce)
            + self.mailbox_bytes(Kind::Landing)
            + self.mailbox_bytes(Kind::Delivered)
    }

    const fn peers_offset(&self) -> usize {
        2 * LINE + self.abort_bytes()
    }

    const fn mail_offset(&self) -> usize {
        self.peers_offset() + self.ranks * LINE
    }

    /// Bytes of the whole control area.
    pub(super) const fn bytes(&self) -> usize {
        (self.mail_offset() + 2 * self.ranks * self.mail_bytes()).next_multiple_of(4096)
    }
}

/// The control area at the start of a mapped region.
#[derive(Clone, Copy)]
pub(super) struct Control<'a> {
    base: *mut u8,
    layout: Layout,
    memory: std::marker::PhantomData<&'a AtomicU64>,
}

// SAFETY: all access goes through atomics.
unsafe impl Send for Control<'_> {}
// SAFETY: as above.
unsafe impl Sync for Control<'_> {}

impl<'a> Control<'a> {
    /// # Safety
    /// `base` must be aligned to 8 and point to `layout.bytes()` bytes that stay mapped for `'a`, are
    /// zero at first, and that all processes access through this type only.
    pub(super) unsafe fn new(base: *mut u8, layout: Layout) -> Self {
        Self {
            base,
            layout,
            memory: std::marker::PhantomData,
        }
    }

    fn words(&self, offset: usize, count: usize) -> &'a [AtomicU64] {
        assert!(offset + count * WORD <= self.layout.bytes() && offset.is_multiple_of(WORD));
        // SAFETY: inside the area, aligned, mapped for 'a, accessed as atomics by everybody.
        unsafe { std::slice::from_raw_parts(self.base.add(offset).cast::<AtomicU64>(), count) }
    }

    fn tallies(&self) -> &'a [AtomicU32] {
        // SAFETY: as in `words`; the doorbell's line is always inside the area.
        unsafe { std::slice::from_raw_parts(self.base.add(LINE).cast::<AtomicU32>(), 2) }
    }

    /// The owner's doorbell.
    pub(super) fn doorbell(&self) -> Doorbell<'a, AtomicU32> {
        let [rings, sleepers] = self.tallies() else {
            unreachable!("two tallies")
        };
        Doorbell { rings, sleepers }
    }

    /// Why the group gave up.
    pub(super) fn abort(&self) -> Abort<'a, AtomicU64> {
        let words = self.words(2 * LINE, 3 + self.layout.mask_words());
        Abort {
            state: &words[0],
            payload: &words[1..],
        }
    }

    /// The last call that `peer` has finished.
    pub(super) fn finished(&self, peer: usize) -> Counter<'a, AtomicU64> {
        Counter(&self.words(self.layout.peers_offset() + peer * LINE, 1)[0])
    }

    /// 1 when `peer` has dropped its buffer.
    pub(super) fn closed(&self, peer: usize) -> Counter<'a, AtomicU64> {
        Counter(&self.words(self.layout.peers_offset() + peer * LINE + WORD, 1)[0])
    }

    /// 1 while `peer` goes on without this rank, which did not come.
    pub(super) fn excluded(&self, peer: usize) -> Counter<'a, AtomicU64> {
        Counter(&self.words(self.layout.peers_offset() + peer * LINE + 2 * WORD, 1)[0])
    }

    /// The mailbox in which `peer` posts messages of `kind` for `call`.
    pub(super) fn mailbox(&self, kind: Kind, call: u64, peer: usize) -> Mailbox<'a, AtomicU64> {
        let layout = &self.layout;
        let lane = (call % 2) as usize * layout.ranks + peer;
        let offset = layout.mail_offset()
            + lane * layout.mail_bytes()
            + match kind {
                Kind::Announce => 0,
                Kind::Landing => layout.mailbox_bytes(Kind::Announce),
                Kind::Delivered => {
                    layout.mailbox_bytes(Kind::Announce) + layout.mailbox_bytes(Kind::Landing)
                }
            };
        let words = match kind {
            Kind::Announce => layout.announce_words(),
            Kind::Landing | Kind::Delivered => NOTE_WORDS,
        };
        let words = self.words(offset, 1 + words);
        Mailbox {
            call: &words[0],
            payload: &words[1..],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        for ranks in [1, 2, 3, 8, 65, 130] {
            let layout = Layout::new(ranks);
            let mut memory = vec![0u64; layout.bytes() / 8];
            // SAFETY: zeroed, aligned, used only here.
            let control = unsafe { Control::new(memory.as_mut_ptr().cast(), layout) };
            let mut spans = vec![];
            let mut add = |words: &[AtomicU64]| {
                let start = words.as_ptr().addr();
                spans.push((start, start + size_of_val(words)));
            };
            add(std::slice::from_ref(control.abort().state));
            add(control.abort().payload);
            for peer in 0..ranks {
                add(std::slice::from_ref(control.finished(peer).0));
                add(std::slice::from_ref(control.closed(peer).0));
                add(std::slice::from_ref(control.excluded(peer).0));
                for call in 0..2 {
                    for kind in [Kind::Announce, Kind::Landing, Kind::Delivered] {
                        let mailbox = control.mailbox(kind, call, peer);
                        add(std::slice::from_ref(mailbox.call));
                        add(mailbox.payload);
                    }
                }
            }
            let doorbell = control.doorbell().rings as *const AtomicU32 as usize;
            spans.push((doorbell, doorbell + 8));
            spans.sort_unstable();
            assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            let end = memory.as_ptr().addr() + layout.bytes();
            assert!(spans.last().unwrap().1 <= end);
        }
    }
}
