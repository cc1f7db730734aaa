//! Counters of a buffer.

/// Bytes copied and memory used by one rank since its buffer was made. On a GPU, where the host does
/// not learn of every row, only memory is counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes of rows written by this rank's copies, counted at the copy primitive. With loans it is
    /// one row per (token, rank).
    pub row_bytes_copied: u64,
    /// Bytes of indices, weights and scales copied.
    pub metadata_bytes_copied: u64,
    /// Bytes that were read to be summed.
    pub bytes_summed: u64,
    /// Bytes that low-latency calls wrote to peers, headers and scales included.
    pub wire_bytes: u64,
    /// Calls made.
    pub calls: u64,
    /// Symmetric memory of this rank.
    pub memory: MemoryUse,
}

/// Symmetric memory of one rank, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Address range reserved (costs no memory).
    pub reserved: u64,
    /// Memory taken from the system.
    pub committed: u64,
    /// In blocks now, those that peers may still read included.
    pub in_use: u64,
    /// Most that was in blocks at once.
    pub peak: u64,
    /// Most that was in blocks at once for each purpose.
    pub peak_by_purpose: Vec<(&'static str, u64)>,
    /// Fixed: control words and the landing memory of the low-latency calls.
    pub fixed: Vec<(&'static str, u64)>,
}
