//! The allocator of a region: blocks of the committed part, behind the control words.
//!
//! Blocks of a page and more are whole pages; smaller ones are multiples of a cache line, so two
//! blocks never share a line. The free block with the lowest address that fits is taken (first
//! fit), which keeps the end of the region free and growth rare; neighbours merge when freed.
//!
//! A block that peers may still read cannot be reused at once: [`Heap::free_after`] keeps it in
//! quarantine with the number of the last call that used it, and [`Heap::reap`] lets go of it when
//! all peers have consumed that call.
//!
//! The heap's books live in ordinary memory of the owner: nothing that a peer stores can break
//! them.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// Blocks of at least this many bytes are aligned to it.
pub(crate) const PAGE: u64 = 4096;

/// Smaller blocks are aligned to this, a cache line.
pub(crate) const LINE: u64 = 64;

/// What a block is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Purpose {
    /// Counts, indices, weights, scales and other words about rows.
    Metadata,
    /// Rows of a dispatch that will be copied to the caller's tensors.
    DispatchStaging,
    /// Rows of a dispatch that the caller holds as a loan.
    DispatchLoan,
    /// Rows of a combine that land at the token's owner.
    CombineStaging,
    /// Rows that the caller writes as a combine's input.
    CombineLoan,
    /// The double-buffered slots of the low-latency calls.
    LowLatency,
}

impl Purpose {
    /// How many there are.
    pub(crate) const COUNT: usize = 6;

    /// All purposes, in the order of [`Usage`] arrays.
    pub(crate) const ALL: [Self; Self::COUNT] = [
        Self::Metadata,
        Self::DispatchStaging,
        Self::DispatchLoan,
        Self::CombineStaging,
        Self::CombineLoan,
        Self::LowLatency,
    ];

    /// The name that reports and errors use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Metadata => "metadata",
            Self::DispatchStaging => "dispatch staging",
            Self::DispatchLoan => "dispatch loans",
            Self::CombineStaging => "combine staging",
            Self::CombineLoan => "combine loans",
            Self::LowLatency => "low-latency slots",
        }
    }
}

/// A block in use. It is given back by [`Heap::free`] or [`Heap::free_after`]; one that is dropped
/// instead stays in use until the heap goes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a block that is dropped stays in use"]
pub(crate) struct Block {
    offset: u64,
    len: u64,
    purpose: Purpose,
}

impl Block {
    /// Bytes from the region's base.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes, at least as many as asked for.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    #[cfg(test)]
    fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// Bytes of one purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Usage {
    /// Held by somebody.
    pub in_use: u64,
    /// Given back, but peers may still read it.
    pub quarantined: u64,
    /// The most that both together ever were.
    pub peak: u64,
}

impl Usage {
    fn take(&mut self, len: u64) {
        self.in_use += len;
        self.peak = self.peak.max(self.in_use + self.quarantined);
    }
}

/// Where a heap's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct HeapStats {
    /// Bytes of the region that have memory, the control words included.
    pub committed: u64,
    /// All purposes together.
    pub total: Usage,
    /// By purpose, in the order of [`Purpose::ALL`].
    pub by_purpose: [Usage; Purpose::COUNT],
}

/// The books of one region.
#[derive(Debug)]
pub(crate) struct Heap {
    /// The first byte behind the control words.
    start: u64,
    /// The first byte without memory.
    end: u64,
    /// The first byte without an address.
    reserve: u64,
    /// Free blocks, length by offset; no two touch.
    free: BTreeMap<u64, u64>,
    /// Blocks by the last call that used them.
    quarantine: BTreeMap<u64, Vec<Block>>,
    total: Usage,
    by_purpose: [Usage; Purpose::COUNT],
}

impl Heap {
    /// A heap over `start..reserve` of a region of which `committed` bytes have memory.
    pub(crate) fn new(start: u64, committed: u64, reserve: u64) -> Self {
        let start = start.next_multiple_of(LINE).min(reserve);
        let end = committed.clamp(start, reserve);
        let mut free = BTreeMap::new();
        if end > start {
            free.insert(start, end - start);
        }
        Self {
            start,
            end,
            reserve,
            free,
            quarantine: BTreeMap::new(),
            total: Usage::default(),
            by_purpose: [Usage::default(); Purpose::COUNT],
        }
    }

    /// Takes a block of at least `len` bytes (0 counts as 1).
    ///
    /// Where no free block fits, `grow` is called with the length that the region's committed part
    /// must reach; it says how much is committed then. Blocks in quarantine are not waited for:
    /// call [`reap`](Self::reap) first.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] if the reserve is too small; what `grow` returns. The heap is then as
    /// it was.
    pub(crate) fn alloc(
        &mut self,
        len: u64,
        purpose: Purpose,
        grow: &mut dyn FnMut(u64) -> Result<u64>,
    ) -> Result<Block> {
        let (len, align) = rounded(len).ok_or_else(|| self.too_small(purpose, len))?;
        if self.fit(len, align).is_none() {
            let needed = self.committed_for(len, align);
            let needed = needed.ok_or_else(|| self.too_small(purpose, len))?;
            let committed = grow(needed)?;
            self.extend(committed);
        }
        let offset = self.fit(len, align);
        // Only a `grow` that grew less than it was asked for leads here.
        let offset = offset.ok_or_else(|| self.too_small(purpose, len))?;
        self.carve(offset, len);
        self.total.take(len);
        self.by_purpose[purpose as usize].take(len);
        Ok(Block {
            offset,
            len,
            purpose,
        })
    }

    /// Tells the heap that the region has grown to `committed` bytes.
    pub(crate) fn extend(&mut self, committed: u64) {
        let committed = committed.min(self.reserve);
        if committed > self.end {
            let (offset, len) = (self.end, committed - self.end);
            self.end = committed;
            self.insert_free(offset, len);
        }
    }

    /// Gives a block back that no peer reads any more.
    pub(crate) fn free(&mut self, block: Block) {
        self.total.in_use -= block.len;
        self.by_purpose[block.purpose as usize].in_use -= block.len;
        self.insert_free(block.offset, block.len);
    }

    /// Gives the end of a block back, all but `len` bytes or a little more.
    pub(crate) fn shrink(&mut self, block: &mut Block, len: u64) {
        let align = if block.len >= PAGE { PAGE } else { LINE };
        let keep = len.max(1).next_multiple_of(align);
        if keep >= block.len {
            return;
        }
        let rest = block.len - keep;
        block.len = keep;
        self.total.in_use -= rest;
        self.by_purpose[block.purpose as usize].in_use -= rest;
        self.insert_free(block.offset + keep, rest);
    }

    /// Gives a block back that peers may read until they have consumed call `call`.
    pub(crate) fn free_after(&mut self, block: Block, call: u64) {
        for usage in [
            &mut self.total,
            &mut self.by_purpose[block.purpose as usize],
        ] {
            usage.in_use -= block.len;
            usage.quarantined += block.len;
        }
        self.quarantine.entry(call).or_default().push(block);
    }

    /// Releases the blocks that were given back for calls up to and including `consumed`; says how
    /// many bytes.
    pub(crate) fn reap(&mut self, consumed: u64) -> u64 {
        let mut released = 0;
        while let Some(entry) = self.quarantine.first_entry() {
            if *entry.key() > consumed {
                break;
            }
            for block in entry.remove() {
                released += block.len;
                self.total.quarantined -= block.len;
                self.by_purpose[block.purpose as usize].quarantined -= block.len;
                self.insert_free(block.offset, block.len);
            }
        }
        released
    }

    /// Where the bytes are.
    pub(crate) fn stats(&self) -> HeapStats {
        HeapStats {
            committed: self.end,
            total: self.total,
            by_purpose: self.by_purpose,
        }
    }

    /// The lowest offset at which a free block has `len` bytes.
    fn fit(&self, len: u64, align: u64) -> Option<u64> {
        self.free.iter().find_map(|(&offset, &size)| {
            let aligned = offset.next_multiple_of(align);
            let end = aligned.checked_add(len)?;
            (end <= offset + size).then_some(aligned)
        })
    }

    /// The committed length with which a block of `len` bytes fits at the end: behind the last
    /// block that is not free.
    fn committed_for(&self, len: u64, align: u64) -> Option<u64> {
        let last = self.free.last_key_value();
        let tail = last
            .filter(|(offset, size)| *offset + *size == self.end)
            .map_or(self.end, |(offset, _)| *offset);
        let end = tail.checked_next_multiple_of(align)?.checked_add(len)?;
        (end <= self.reserve).then_some(end)
    }

    /// Takes `offset .. offset + len` out of the free block that holds it.
    fn carve(&mut self, offset: u64, len: u64) {
        let holder = self.free.range(..=offset).next_back();
        let Some((start, size)) = holder.map(|(&start, &size)| (start, size)) else {
            return;
        };
        self.free.remove(&start);
        if offset > start {
            self.free.insert(start, offset - start);
        }
        let rest = start + size - (offset + len);
        if rest > 0 {
            self.free.insert(offset + len, rest);
        }
    }

    /// Adds a free block and merges it with its neighbours.
    fn insert_free(&mut self, mut offset: u64, mut len: u64) {
        if let Some((&before, &size)) = self.free.range(..offset).next_back()
            && before + size == offset
        {
            self.free.remove(&before);
            offset = before;
            len += size;
        }
        if let Some(size) = self.free.remove(&(offset + len)) {
            len += size;
        }
        self.free.insert(offset, len);
    }

    fn too_small(&self, purpose: Purpose, len: u64) -> Error {
        Error::OutOfMemory {
            purpose: purpose.name().into(),
            requested: self.total.in_use.saturating_add(len),
            limit: self.reserve - self.start,
        }
    }
}

/// The length and alignment of a block for `len` bytes.
fn rounded(len: u64) -> Option<(u64, u64)> {
    let align = if len >= PAGE { PAGE } else { LINE };
    Some((len.max(1).checked_next_multiple_of(align)?, align))
}

#[cfg(test)]
mod tests;
