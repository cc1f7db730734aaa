//! Rows in either type, and memory that is used again.

use anyhow::Result;
use bytemuck::{cast_slice, cast_slice_mut};
use deep_ep::{
    F8E4M3, Tensor,
    codec::{self, SCALE_BLOCK, ScaleFormat},
};
use half::bf16;

use crate::batch::Batch;

/// FP8 rows with a scale per 128 channels.
pub(super) struct Fp8Rows {
    codes: Vec<F8E4M3>,
    scales: Vec<f32>,
    shape: [usize; 2],
}

impl Fp8Rows {
    /// The rows of a batch, whose hidden size is a multiple of 128.
    pub(super) fn of(batch: &Batch) -> Self {
        let (tokens, hidden) = (batch.tokens(), batch.sizes.hidden);
        let blocks = hidden / SCALE_BLOCK;
        let mut codes = vec![F8E4M3(0); tokens * hidden];
        let mut scales = vec![0.0; tokens * blocks];
        for ((t, codes), scales) in (0..tokens)
            .zip(codes.chunks_exact_mut(hidden))
            .zip(scales.chunks_exact_mut(blocks))
        {
            codec::quantize_row(
                batch.row(t),
                cast_slice_mut(codes),
                scales,
                ScaleFormat::F32,
            );
        }
        Self {
            codes,
            scales,
            shape: [tokens, hidden],
        }
    }

    /// `[T, H]`.
    pub(super) fn codes(&self) -> Result<Tensor<'_>> {
        Ok(Tensor::new(&self.codes, &self.shape)?)
    }

    /// `[T, H/128]`.
    pub(super) fn scales(&self) -> Result<Tensor<'_>> {
        Ok(Tensor::new(
            &self.scales,
            &[self.shape[0], self.shape[1] / SCALE_BLOCK],
        )?)
    }
}

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
