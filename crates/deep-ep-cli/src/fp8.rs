//! Rows cast to FP8 with a scale per 128 channels.

use anyhow::Result;
use bytemuck::{cast_slice, cast_slice_mut};
use deep_ep::{
    F8E4M3, Tensor,
    codec::{self, SCALE_BLOCK, ScaleFormat},
};

use crate::batch::Batch;

/// The rows of a batch whose hidden size is a multiple of 128.
pub(crate) struct Fp8Rows {
    codes: Vec<F8E4M3>,
    scales: Vec<f32>,
    shape: [usize; 2],
}

impl Fp8Rows {
    pub(crate) fn of(batch: &Batch) -> Self {
        let (tokens, hidden) = (batch.tokens(), batch.sizes.hidden);
        let blocks = hidden / SCALE_BLOCK;
        let mut codes = vec![F8E4M3(0); tokens * hidden];
        let mut scales = vec![0.0; tokens * blocks];
        let rows = codes
            .chunks_exact_mut(hidden)
            .zip(scales.chunks_exact_mut(blocks));
        for (t, (codes, scales)) in rows.enumerate() {
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
    pub(crate) fn codes(&self) -> Result<Tensor<'_>> {
        Ok(Tensor::new(&self.codes, &self.shape)?)
    }

    /// `[T, H/128]`.
    pub(crate) fn scales(&self) -> Result<Tensor<'_>> {
        Ok(Tensor::new(
            &self.scales,
            &[self.shape[0], self.shape[1] / SCALE_BLOCK],
        )?)
    }

    /// The codes of all rows.
    pub(crate) fn code_bytes(&self) -> &[u8] {
        cast_slice(&self.codes)
    }

    /// The bits of all scales.
    pub(crate) fn scale_bits(&self) -> &[u32] {
        cast_slice(&self.scales)
    }

    /// Codes and scales of token `t`.
    pub(crate) fn row(&self, t: usize) -> (&[u8], &[f32]) {
        let [_, hidden] = self.shape;
        let blocks = hidden / SCALE_BLOCK;
        (
            &self.code_bytes()[t * hidden..][..hidden],
            &self.scales[t * blocks..][..blocks],
        )
    }
}
