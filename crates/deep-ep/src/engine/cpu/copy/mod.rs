//! The one way in which the CPU engine moves bytes.
//!
//! Every row that goes from one memory to another goes through here; [`rows`](super::rows) counts
//! the bytes.
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

use std::ptr;

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

/// Outputs are streamed when a thread moves more than this many second-level caches in one call:
/// below, whoever reads them next still finds them in the third level.
const OUTPUT_CACHES: u64 = 16;

/// Staged rows are read once, by other cores, so they are streamed earlier.
const STAGING_CACHES: u64 = 6;

/// What becomes of rows that are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RowUse {
    /// The caller works on them.
    Output,
    /// Other ranks read them once.
    Staging,
}

impl Store {
    /// How to store rows of `row_bytes`, of which each thread moves `thread_bytes` in one call,
    /// on cores with `l2_bytes` of second-level cache (see
    /// [`second_level_cache`](crate::memory::system::second_level_cache)).
    ///
    /// Measured on 2 cores of an Intel Xeon with AVX-512, 2 MiB of second level and a large shared
    /// third, 2 ranks, rows of 14,336 bytes: a dispatch and the combine that reads its rows take
    /// 1.4 times as long with streaming at 14 MiB, and 0.95 times as long at 56 MiB. A dispatch that
    /// stages 28 MiB takes 0.77 times as long when those are streamed.
    pub(crate) fn for_rows(
        row_bytes: usize,
        thread_bytes: u64,
        row_use: RowUse,
        l2_bytes: u64,
    ) -> Self {
        let caches = match row_use {
            RowUse::Output => OUTPUT_CACHES,
            RowUse::Staging => STAGING_CACHES,
        };
        if row_bytes >= SHORTEST_STREAM && thread_bytes > l2_bytes.saturating_mul(caches) {
            Self::Streaming
        } else {
            Self::Cached
        }
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
