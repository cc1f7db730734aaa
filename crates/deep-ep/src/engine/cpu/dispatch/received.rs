//! What comes with received rows: their indices, weights and scales, into the outputs.

use super::{
    super::announce::{Announcement, Terms},
    metadata::{HAS_TOPK, HAS_WEIGHTS, Metadata},
};
use crate::{
    buffer::DispatchOutput,
    dtype::DType,
    error::Result,
    tensor::{OwnedTensor, TensorMut},
};

/// Where indices, weights and scales of received rows go; dense, one behind the other.
pub(super) struct Received<'o> {
    topk_idx: Ids<'o>,
    topk_weights: Option<&'o mut [f32]>,
    scales: Option<&'o mut [u32]>,
}

/// Indices have the type that the choices came in.
enum Ids<'o> {
    None,
    Narrow(&'o mut [i32]),
    Wide(&'o mut [i64]),
}

impl<'o> Received<'o> {
    /// Those of the caller's outputs, whose types and shapes were checked.
    pub(super) fn into_caller(out: &'o mut DispatchOutput<'_>) -> Result<Self> {
        Self::new(
            out.topk_idx.as_mut(),
            out.topk_weights.as_mut(),
            out.scales.as_mut(),
        )
    }

    fn new(
        topk_idx: Option<&'o mut TensorMut<'_>>,
        topk_weights: Option<&'o mut TensorMut<'_>>,
        scales: Option<&'o mut TensorMut<'_>>,
    ) -> Result<Self> {
        Ok(Self {
            topk_idx: match topk_idx {
                None => Ids::None,
                Some(ids) if ids.dtype() == DType::I64 => Ids::Wide(ids.as_mut_slice()?),
                Some(ids) => Ids::Narrow(ids.as_mut_slice()?),
            },
            topk_weights: topk_weights.map(TensorMut::as_mut_slice).transpose()?,
            scales: match scales {
                None => None,
                Some(scales) if scales.dtype() == DType::F32 => {
                    Some(bytemuck::cast_slice_mut(scales.as_mut_slice::<f32>()?))
                }
                Some(scales) => Some(bytemuck::cast_slice_mut(scales.as_mut_slice::<i32>()?)),
            },
        })
    }

    /// Rows from `first` on, of `tokens` of the sender of `metadata`, for `rank` of `ranks`.
    pub(super) fn receive(
        &mut self,
        first: usize,
        tokens: &[u32],
        metadata: &Metadata<'_>,
        from: &Announcement,
        (rank, ranks): (usize, usize),
    ) {
        let (k, columns) = (from.terms.top_k, from.terms.scale_columns);
        let experts = (from.terms.num_experts / ranks) as i32;
        let begin = rank as i32 * experts;
        let local = |id: i32| match id.wrapping_sub(begin) {
            local if id >= 0 && (0..experts).contains(&local) => local,
            _ => -1,
        };
        for (i, &token) in tokens.iter().enumerate() {
            let (row, token) = (first + i, token as usize);
            let ids = metadata
                .topk_idx
                .get(token * k..(token + 1) * k)
                .unwrap_or_default();
            match &mut self.topk_idx {
                Ids::None => {}
                Ids::Narrow(out) => write(&mut out[row * k..], ids, local),
                Ids::Wide(out) => write(&mut out[row * k..], ids, |id| i64::from(local(id))),
            }
            if let Some(out) = &mut self.topk_weights {
                let weights = &metadata.weights[token * k..][..k];
                for (out, (&id, &weight)) in out[row * k..].iter_mut().zip(ids.iter().zip(weights))
                {
                    *out = if local(id) >= 0 { weight } else { 0.0 };
                }
            }
            if let Some(out) = &mut self.scales {
                let scales = &metadata.scales[token * columns..][..columns];
                out[row * columns..][..columns].copy_from_slice(scales);
            }
        }
    }

    /// Rows from `first` on, into which nothing was received, have no experts.
    pub(super) fn pad(&mut self, first: usize, k: usize) {
        match &mut self.topk_idx {
            Ids::None => {}
            Ids::Narrow(out) => out[first * k..].fill(-1),
            Ids::Wide(out) => out[first * k..].fill(-1),
        }
    }
}

fn write<T>(out: &mut [T], ids: &[i32], value: impl Fn(i32) -> T) {
    for (out, &id) in out.iter_mut().zip(ids) {
        *out = value(id);
    }
}

/// Outputs that are allocated for the caller.
pub(super) struct OwnedReceived {
    pub(super) scales: Option<OwnedTensor>,
    pub(super) topk_idx: Option<OwnedTensor>,
    pub(super) topk_weights: Option<OwnedTensor>,
}

impl OwnedReceived {
    /// For `rows` rows of a call with these terms; ids and scales have the given types.
    pub(super) fn new(
        terms: &Terms,
        rows: usize,
        ids: Option<DType>,
        scales: Option<DType>,
    ) -> Result<Self> {
        let make = |dtype: Option<DType>, columns: usize| {
            dtype
                .map(|dtype| OwnedTensor::zeros(dtype, &[rows, columns]))
                .transpose()
        };
        let weights = (terms.format & HAS_WEIGHTS != 0).then_some(DType::F32);
        let ids = ids.filter(|_| terms.format & HAS_TOPK != 0);
        Ok(Self {
            scales: make(scales, terms.scale_columns)?,
            topk_idx: make(ids, terms.top_k)?,
            topk_weights: make(weights, terms.top_k)?,
        })
    }

    /// Calls `work` with the outputs.
    pub(super) fn fill<T>(
        &mut self,
        work: impl FnOnce(&mut Received<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut ids = self.topk_idx.as_mut().map(OwnedTensor::as_tensor_mut);
        let mut weights = self.topk_weights.as_mut().map(OwnedTensor::as_tensor_mut);
        let mut scales = self.scales.as_mut().map(OwnedTensor::as_tensor_mut);
        work(&mut Received::new(
            ids.as_mut(),
            weights.as_mut(),
            scales.as_mut(),
        )?)
    }
}
