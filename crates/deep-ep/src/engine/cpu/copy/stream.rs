//! Non-temporal copies on x86-64.
//!
//! The destination is written in whole cache lines: the bytes before its first line and after its
//! last one go through ordinary stores. The source may have any alignment.

use std::{arch::x86_64::*, ptr};

/// Bytes of a cache line.
const LINE: usize = 64;

/// How far ahead of the loads the source is prefetched, in bytes. The processor's own prefetching
/// stops at the end of each 4 KiB page. Measured beside no prefetching, 14 KiB rows: 1.17 times as
/// fast for 4 MiB, 1.09 for 16, 1.06 for 64, no gain for 256.
const AHEAD: usize = 512;

/// Asks for the source's line [`AHEAD`] of `src`, which may lie behind its end: prefetching never
/// faults.
#[inline]
fn prefetch(src: *const u8) {
    // SAFETY: a prefetch accesses nothing, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(AHEAD).cast()) };
}

/// The widest non-temporal store that is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Isa {
    /// 64 bytes.
    Avx512,
    /// 32 bytes.
    Avx,
    /// 16 bytes; every x86-64 processor.
    Sse2,
}

impl Isa {
    /// What this processor has. The standard library remembers the answer.
    #[inline]
    pub(super) fn detect() -> Self {
        if is_x86_feature_detected!("avx512f") {
            Self::Avx512
        } else if is_x86_feature_detected!("avx") {
            Self::Avx
        } else {
            Self::Sse2
        }
    }

    /// All that this processor has.
    #[cfg(test)]
    pub(super) fn available() -> Vec<Self> {
        let best = Self::detect();
        let all = [Self::Avx512, Self::Avx, Self::Sse2];
        let from = all.iter().position(|&isa| isa == best).unwrap_or(2);
        all[from..].to_vec()
    }
}

/// Copies `len` bytes, streaming the whole cache lines of `dst`.
///
/// # Safety
///
/// The contract of [`super::copy`]; the processor has `isa`.
#[inline]
pub(super) unsafe fn copy(isa: Isa, dst: *mut u8, src: *const u8, len: usize) {
    let head = dst.addr().wrapping_neg() % LINE;
    if len < head + LINE {
        // SAFETY: the caller's contract.
        return unsafe { ptr::copy_nonoverlapping(src, dst, len) };
    }
    let lines = (len - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: head, lines and tail together are the `len` bytes of the caller's contract; `dst +
    // head` is a multiple of 64.
    unsafe {
        ptr::copy_nonoverlapping(src, dst, head);
        let (to, from) = (dst.add(head), src.add(head));
        match isa {
            Isa::Avx512 => lines_avx512(to, from, lines),
            Isa::Avx => lines_avx(to, from, lines),
            Isa::Sse2 => lines_sse2(to, from, lines),
        }
        ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), len - tail);
    }
}

/// # Safety
///
/// `src` is readable and `dst`, a multiple of 64, writable for `lines` cache lines; AVX-512F.
#[target_feature(enable = "avx512f")]
unsafe fn lines_avx512(mut dst: *mut u8, mut src: *const u8, lines: usize) {
    for _ in 0..lines / 4 {
        (0..4).for_each(|line| prefetch(src.wrapping_add(line * LINE)));
        // SAFETY: four more lines of the caller's ranges.
        unsafe {
            let a = _mm512_loadu_si512(src.cast());
            let b = _mm512_loadu_si512(src.add(LINE).cast());
            let c = _mm512_loadu_si512(src.add(2 * LINE).cast());
            let d = _mm512_loadu_si512(src.add(3 * LINE).cast());
            _mm512_stream_si512(dst.cast(), a);
            _mm512_stream_si512(dst.add(LINE).cast(), b);
            _mm512_stream_si512(dst.add(2 * LINE).cast(), c);
            _mm512_stream_si512(dst.add(3 * LINE).cast(), d);
            (dst, src) = (dst.add(4 * LINE), src.add(4 * LINE));
        }
    }
    for _ in 0..lines % 4 {
        // SAFETY: one more line of the caller's ranges.
        unsafe {
            _mm512_stream_si512(dst.cast(), _mm512_loadu_si512(src.cast()));
            (dst, src) = (dst.add(LINE), src.add(LINE));
        }
    }
}

/// # Safety
///
/// `src` is readable and `dst`, a multiple of 64, writable for `lines` cache lines; AVX.
#[target_feature(enable = "avx")]
unsafe fn lines_avx(mut dst: *mut u8, mut src: *const u8, lines: usize) {
    for _ in 0..lines {
        prefetch(src);
        // SAFETY: one more line of the caller's ranges.
        unsafe {
            let a = _mm256_loadu_si256(src.cast());
            let b = _mm256_loadu_si256(src.add(32).cast());
            _mm256_stream_si256(dst.cast(), a);
            _mm256_stream_si256(dst.add(32).cast(), b);
            (dst, src) = (dst.add(LINE), src.add(LINE));
        }
    }
}

/// # Safety
///
/// `src` is readable and `dst`, a multiple of 64, writable for `lines` cache lines.
unsafe fn lines_sse2(mut dst: *mut u8, mut src: *const u8, lines: usize) {
    for _ in 0..lines {
        prefetch(src);
        // SAFETY: one more line of the caller's ranges.
        unsafe {
            let a = _mm_loadu_si128(src.cast());
            let b = _mm_loadu_si128(src.add(16).cast());
            let c = _mm_loadu_si128(src.add(32).cast());
            let d = _mm_loadu_si128(src.add(48).cast());
            _mm_stream_si128(dst.cast(), a);
            _mm_stream_si128(dst.add(16).cast(), b);
            _mm_stream_si128(dst.add(32).cast(), c);
            _mm_stream_si128(dst.add(48).cast(), d);
            (dst, src) = (dst.add(LINE), src.add(LINE));
        }
    }
}
