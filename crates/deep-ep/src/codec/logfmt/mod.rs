//! LogFMT-10: about ten bits per value, for rows that are summed afterwards.
//!
//! A row is cut into blocks of 128 values (the last may be shorter). Within a block a value is a
//! sign and a 9-bit code: 0 for zero, and 1 to 511 for magnitudes from the block's lowest level to
//! its highest, in equal steps of the logarithm. Steps cover what the block needs, but never more
//! than eight octaves, which makes a step at most 1.1 %; smaller values become the lowest level or
//! zero, whichever is nearer. The idea is DeepSeek's LogFMT ("Insights into DeepSeek-V3: Scaling
//! Challenges and Reflections on Hardware for AI Architectures", 2025); levels, layout and fallbacks
//! are this crate's.
//!
//! # Layout
//!
//! ```text
//! headers   one little-endian u32 per block, zeros up to a multiple of 16 bytes
//! payloads  of the blocks in turn, each filled with zeros up to a multiple of 16 bytes
//! ```
//!
//! | header | block | payload of n values |
//! | --- | --- | --- |
//! | 0 | zeros (their signs are not kept) | none |
//! | `0xffff_ffff` | raw | n bf16 (2n bytes) |
//! | `high << 16 \| low` | logarithmic | n bytes: codes' low 8 bits; n/8 bytes: their bit 8; n/8 bytes: signs (lowest bit first) |
//!
//! `high` and `low` are the upper 16 bits of the f32 values of the highest and the lowest level:
//! the largest magnitude rounded up, the smallest non-zero one rounded down, `low` not below
//! `high / 2^8`. With `log2` and `exp2` as in `curve.rs`, and all f32 operations rounded on their
//! own: `range = log2(high) - log2(low)`, and for a value that is not below `low / 2` in magnitude
//! `code = 1 + round(clamp((log2(|x|) - log2(low)) * (510 / range), 0, 510))`; it stands for
//! `exp2(log2(low) + (code - 1) * (range * (1/510)))`.
//!
//! A block is raw if it has an infinity or NaN, if its magnitudes lie where levels would not be
//! normal numbers (2^-117 or less, or beyond the largest bf16), if more than one value in 16 is
//! not zero and below the lowest level, or if it is so short that codes would not be smaller.
//! Otherwise the logarithmic form keeps `1 - 2<a,b> / (<a,a> + <b,b>)` at about 5e-6 or less.

mod block;
mod curve;

use super::simd::{self, Simd};
use block::Form;

/// Values in a block.
pub const LOGFMT_BLOCK: usize = 128;

/// What is wrong with bytes that should be an encoded row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The row ends too early.
    #[error("an encoded row needs at least {needed} bytes, but there are {got}")]
    Truncated {
        /// Bytes needed, as far as they were read.
        needed: usize,
        /// Bytes there are.
        got: usize,
    },
    /// The header of a block is none that the format has.
    #[error("the header of block {block} of an encoded row is {header:#010x}, which means nothing")]
    Header {
        /// The block.
        block: usize,
        /// Its header.
        header: u32,
    },
}

/// Bytes that a row of `hidden` values takes at most.
pub const fn max_encoded_bytes(hidden: usize) -> usize {
    let full = hidden / LOGFMT_BLOCK * (2 * LOGFMT_BLOCK);
    let rest = (2 * (hidden % LOGFMT_BLOCK)).next_multiple_of(16);
    header_bytes(hidden) + full + rest
}

/// Bytes of a row's headers.
const fn header_bytes(hidden: usize) -> usize {
    (4 * hidden.div_ceil(LOGFMT_BLOCK)).next_multiple_of(16)
}

/// Encodes a row and returns the bytes used, a multiple of 16.
///
/// `x` is `[H]`, `H` a multiple of 8; `out` has at least [`max_encoded_bytes`]`(H)` bytes.
///
/// # Panics
/// If `H` is not a multiple of 8, or `out` is too short.
pub fn encode_row(x: &[f32], out: &mut [u8]) -> usize {
    encode_row_with(Simd::detect(), x, out)
}

/// [`encode_row`] with the given instruction set.
///
/// # Panics
/// As [`encode_row`].
pub fn encode_row_with(level: Simd, x: &[f32], out: &mut [u8]) -> usize {
    assert!(x.len().is_multiple_of(8), "H is not a multiple of 8");
    let needed = max_encoded_bytes(x.len());
    assert!(out.len() >= needed, "out needs {needed} bytes");
    simd::logfmt_encode(level, x, out)
}

/// Decodes a row into `out`, `[H]` with the `H` that was encoded, and returns the bytes it took.
///
/// Any bytes may be passed: what is not an encoded row is an error, or decodes to some numbers.
///
/// # Errors
/// [`DecodeError`]; the contents of `out` are unspecified then.
///
/// # Panics
/// If `H` is not a multiple of 8.
pub fn decode_row(bytes: &[u8], out: &mut [f32]) -> Result<usize, DecodeError> {
    decode_row_with(Simd::detect(), bytes, out)
}

/// [`decode_row`] with the given instruction set.
///
/// # Errors
/// As [`decode_row`].
///
/// # Panics
/// As [`decode_row`].
pub fn decode_row_with(level: Simd, bytes: &[u8], out: &mut [f32]) -> Result<usize, DecodeError> {
    assert!(out.len().is_multiple_of(8), "H is not a multiple of 8");
    simd::logfmt_decode(level, bytes, out)
}

/// [`encode_row`]; inlined into a function for each instruction set, and compiled for it there.
#[inline(always)]
pub(super) fn encode(x: &[f32], out: &mut [u8]) -> usize {
    let (headers, payloads) = out.split_at_mut(header_bytes(x.len()));
    headers.fill(0);
    let mut headers_left = headers.as_chunks_mut().0.iter_mut();
    let mut at = 0;
    // Whole blocks apart from the short one: loops of known length make better vectors.
    let (blocks, rest) = x.as_chunks::<LOGFMT_BLOCK>();
    for (x, header) in blocks.iter().zip(&mut headers_left) {
        at += encode_block(x, header, &mut payloads[at..]);
    }
    if let (false, Some(header)) = (rest.is_empty(), headers_left.next()) {
        at += encode_block(rest, header, &mut payloads[at..]);
    }
    headers.len() + at
}

/// Encodes a block and returns the bytes of its payload.
#[inline(always)]
fn encode_block(x: &[f32], header: &mut [u8; 4], payload: &mut [u8]) -> usize {
    let form = Form::choose(x);
    *header = form.header().to_le_bytes();
    let size = form.payload_bytes(x.len());
    form.write(x, &mut payload[..size]);
    size
}

/// [`decode_row`]; inlined into a function for each instruction set, and compiled for it there.
#[inline(always)]
pub(super) fn decode(bytes: &[u8], out: &mut [f32]) -> Result<usize, DecodeError> {
    let mut at = header_bytes(out.len());
    let headers = bytes.get(..at).ok_or(DecodeError::Truncated {
        needed: at,
        got: bytes.len(),
    })?;
    let mut headers_left = headers.as_chunks().0.iter().enumerate();
    let (blocks, rest) = out.as_chunks_mut::<LOGFMT_BLOCK>();
    for (out, header) in blocks.iter_mut().zip(&mut headers_left) {
        at = decode_block(bytes, at, header, out)?;
    }
    if let (false, Some(header)) = (rest.is_empty(), headers_left.next()) {
        at = decode_block(bytes, at, header, rest)?;
    }
    Ok(at)
}

/// Decodes the block with number and header `header`, whose payload starts at `at`, and returns
/// where it ends.
#[inline(always)]
fn decode_block(
    bytes: &[u8],
    at: usize,
    (block, header): (usize, &[u8; 4]),
    out: &mut [f32],
) -> Result<usize, DecodeError> {
    let header = u32::from_le_bytes(*header);
    let form = Form::parse(header).ok_or(DecodeError::Header { block, header })?;
    let end = at + form.payload_bytes(out.len());
    let payload = bytes.get(at..end).ok_or(DecodeError::Truncated {
        needed: end,
        got: bytes.len(),
    })?;
    form.read(payload, out);
    Ok(end)
}
