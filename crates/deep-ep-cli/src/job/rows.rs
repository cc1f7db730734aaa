//! Received rows in either type, and memory that is used again.

use bytemuck::cast_slice;
use deep_ep::codec;
use half::bf16;

/// Received row `n` as bf16: itself, or cast back into `scratch`.
pub(super) fn as_bf16<'a>(
    row: &'a [u8],
    scales: Option<&[f32]>,
    scratch: &'a mut [bf16],
) -> &'a [bf16] {
    match scales {
        None => cast_slice(row),
        Some(scales) => {
            codec::dequantize_row(row, scales, scratch);
            scratch
        }
    }
}

/// A vector that only grows, so that no iteration but the first allocates.
pub(super) fn at_least<T: Copy>(memory: &mut Vec<T>, len: usize, fill: T) {
    if memory.len() < len {
        memory.resize(len, fill);
    }
}
