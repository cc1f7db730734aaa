//! The one way in which the CPU engine moves bytes.
//!
//! Every row and every piece of metadata that goes from one memory to another goes through here,
//! so what is counted here ([`CopyStats`]) is all that is copied.
//!
//! [`Store::Streaming`] writes around the caches (non-temporal stores): the destination's lines
//! are not read first, which saves a third of the memory traffic, and the rows do not push other
//! things out of the caches. It pays for rows that nobody reads soon; see
//! [`Store::for_rows`].
//!
//! **Ordering.** Streaming stores are weakly ordered, also on x86: a release store does not wait
//! for them. Whoever publishes streamed rows calls [`store_fence`] after the last copy and before
//! the release store of the flag, on the thread that copied.

#[cfg(test)]
mod measure;
#[cfg(target_arch = "x86_64")]
mod stream;
#[cfg(test)]
mod tests;

use std::{
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

/// How bytes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Store {
    /// Through the caches.
    Cached,
    /// Around them, where the processor can; call [`store_fence`] before publishing.
    Streaming,
}

/// Rows shorter than this are never streamed: too many of their cache lines are partial.
const SHORTEST_STREAM: usize = 1024;

/// A longer source is copied to several destinations in pieces of this many bytes, so that it is
/// read from memory once and from the first-level cache afterwards.
const PIECE: usize = 16 << 10;

impl Store {
    /// How to store rows of `row_bytes` when a call moves `total_bytes` and nobody reads them
    /// before they leave a cache of `cache_bytes` (what the writing thread can call its own: its
    /// second-level cache).
    pub(crate) fn for_rows(row_bytes: usize, total_bytes: u64, cache_bytes: u64) -> Self {
        if row_bytes >= SHORTEST_STREAM && total_bytes > cache_bytes {
            Self::Streaming
        } else {
            Self::Cached
        }
    }
}

/// Bytes copied, by kind. Counted once per chunk of rows, not per row, so that threads do not
/// fight for the counter's line.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct CopyStats {
    /// Bytes of rows (the data of tokens and their scales).
    pub rows_bytes: AtomicU64,
    /// Bytes of everything about rows: indices, weights, counts.
    pub metadata_bytes: AtomicU64,
}

impl CopyStats {
    /// Counts bytes of rows.
    pub(crate) fn add_rows(&self, bytes: u64) {
        self.rows_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes of metadata.
    pub(crate) fn add_metadata(&self, bytes: u64) {
        self.metadata_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Copies `len` bytes. Counts nothing: the caller does, a chunk at a time.
///
/// # Safety
///
/// `src` can be read and `dst` written for `len` bytes; the two do not overlap; no other thread or
/// process writes to either range, or reads `dst`, until this thread has published it.
#[inline]
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize, store: Store) {
    match store {
        // SAFETY: the caller's contract.
        Store::Cached => unsafe { ptr::copy_nonoverlapping(src, dst, len) },
        // SAFETY: the caller's contract.
        Store::Streaming => unsafe { stream(dst, src, len) },
    }
}

/// Copies `len` bytes to each of `dsts`, reading the source from memory once.
///
/// # Safety
///
/// As for [`copy`], for each destination; the destinations do not overlap each other.
pub(crate) unsafe fn copy_to_many(dsts: &[*mut u8], src: *const u8, len: usize, store: Store) {
    let mut at = 0;
    while at < len {
        let piece = PIECE.min(len - at);
        for &dst in dsts {
            // SAFETY: `at + piece <= len`, so both stay inside the caller's ranges.
            unsafe { copy(dst.add(at), src.add(at), piece, store) };
        }
        at += piece;
    }
}

/// Copies rows of `row_bytes` from `src + from` to `dst + to` for each `(to, from)` of `rows`
/// (offsets in bytes), and counts them together.
///
/// # Safety
///
/// As for [`copy`], for each row.
pub(crate) unsafe fn copy_rows(
    dst: *mut u8,
    src: *const u8,
    row_bytes: usize,
    rows: impl IntoIterator<Item = (usize, usize)>,
    store: Store,
    stats: &CopyStats,
) {
    let mut copied = 0;
    for (to, from) in rows {
        // SAFETY: the caller's contract.
        unsafe { copy(dst.add(to), src.add(from), row_bytes, store) };
        copied += row_bytes as u64;
    }
    stats.add_rows(copied);
}

/// Copies `src` to `dst`, both `len` bytes of metadata, and counts them.
///
/// # Safety
///
/// As for [`copy`].
pub(crate) unsafe fn copy_metadata(dst: *mut u8, src: *const u8, len: usize, stats: &CopyStats) {
    // SAFETY: the caller's contract.
    unsafe { copy(dst, src, len, Store::Cached) };
    stats.add_metadata(len as u64);
}

/// Copies a slice of rows to another of the same length, and counts it.
///
/// # Panics
///
/// If the lengths differ, like [`slice::copy_from_slice`].
pub(crate) fn copy_slice(dst: &mut [u8], src: &[u8], store: Store, stats: &CopyStats) {
    assert_eq!(dst.len(), src.len(), "slices of one copy differ in length");
    // SAFETY: both slices have this length, and a mutable one overlaps no other.
    unsafe { copy(dst.as_mut_ptr(), src.as_ptr(), src.len(), store) };
    if store == Store::Streaming {
        // Safe code may hand the slice to another thread right away.
        store_fence();
    }
    stats.add_rows(src.len() as u64);
}

/// Makes this thread's streaming stores visible before its later stores.
#[inline]
pub(crate) fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    // Elsewhere [`stream`] uses ordinary stores, which the release store that follows orders.
}

/// # Safety
///
/// As for [`copy`].
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn stream(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's contract.
    unsafe { stream::copy(stream::Isa::detect(), dst, src, len) }
}

/// # Safety
///
/// As for [`copy`].
#[cfg(not(target_arch = "x86_64"))]
#[inline]
unsafe fn stream(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's contract.
    unsafe { ptr::copy_nonoverlapping(src, dst, len) }
}
