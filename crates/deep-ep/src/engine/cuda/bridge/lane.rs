//! The way between host and device: the bridge's stream, and copies in its order.

use std::sync::Arc;

use crate::{
    engine::{
        Engine,
        cuda::gpu::{Gpu, GpuStream},
    },
    error::{Error, Result},
    tensor::{Device, OwnedTensor, Tensor, TensorMut},
};

/// What every call of a bridge holds.
pub(super) struct Lane {
    pub(super) inner: Arc<dyn Engine>,
    gpu: Gpu,
    pub(super) stream: GpuStream,
}

impl Lane {
    pub(super) fn new(inner: Arc<dyn Engine>, gpu: Gpu) -> Result<Self> {
        Ok(Self {
            inner,
            stream: gpu.own_stream()?,
            gpu,
        })
    }

    /// Waits until the GPU has done what it was given, and says what went wrong there.
    pub(super) fn settle(&self) -> Result<()> {
        self.stream.synchronize()?;
        self.inner.check()
    }

    /// A device copy.
    pub(super) fn up(&self, tensor: &Tensor<'_>) -> Result<OwnedTensor> {
        self.gpu.upload(tensor, &self.stream)
    }

    /// A device copy of what there is.
    pub(super) fn up_if(&self, tensor: Option<&Tensor<'_>>) -> Result<Option<OwnedTensor>> {
        tensor.map(|tensor| self.up(tensor)).transpose()
    }

    /// A host copy.
    pub(super) fn down(&self, tensor: &Tensor<'_>) -> Result<OwnedTensor> {
        self.gpu.download(tensor, &self.stream)
    }

    /// A host copy of what there is.
    pub(super) fn down_if(&self, tensor: Option<&OwnedTensor>) -> Result<Option<OwnedTensor>> {
        tensor
            .map(|tensor| self.down(&tensor.as_tensor()))
            .transpose()
    }

    /// Copies to the host what there is; `to` is the tensor that `from` is the twin of.
    pub(super) fn down_into(
        &self,
        from: Option<&OwnedTensor>,
        to: Option<&mut TensorMut<'_>>,
    ) -> Result<()> {
        match (from, to) {
            (Some(from), Some(to)) => self.gpu.download_into(&from.as_tensor(), to, &self.stream),
            _ => Ok(()),
        }
    }

    /// A device tensor of the type, shape and strides of a host output, with undefined contents.
    pub(super) fn twin(&self, name: &'static str, of: &Tensor<'_>) -> Result<OwnedTensor> {
        if of.device() != Device::Host {
            return Err(Error::invalid(
                name,
                format!("{of:?}"),
                "must be on the host, as x is",
            ));
        }
        self.gpu
            .empty(of.dtype(), of.shape(), of.strides(), &self.stream)
    }

    /// The twin of what there is.
    pub(super) fn twin_if(
        &self,
        name: &'static str,
        of: Option<&TensorMut<'_>>,
    ) -> Result<Option<OwnedTensor>> {
        of.map(|of| self.twin(name, &of.as_tensor())).transpose()
    }

    /// A dense device tensor of the type and shape of a host tensor, with undefined contents.
    pub(super) fn dense(&self, of: &Tensor<'_>) -> Result<OwnedTensor> {
        self.gpu.dense(of.dtype(), of.shape(), &self.stream)
    }

    /// Copies the first `counts[e]` rows of each `[e]` of a host tensor `[E, rows, H]` with dense rows
    /// to a dense device tensor of its type and shape.
    ///
    /// # Safety
    /// Nothing outside the order of the bridge's stream may use those rows.
    pub(super) unsafe fn rows_up(
        &self,
        from: &Tensor<'_>,
        to: &Tensor<'_>,
        counts: &[usize],
    ) -> Result<()> {
        let blocks = Blocks::new(from, counts);
        let row = from.row_bytes() / from.shape()[1].max(1);
        for (at, bytes) in blocks.list() {
            // SAFETY: the block consists of elements of the tensor, which is borrowed.
            let block = unsafe { std::slice::from_raw_parts(from.as_ptr().add(at.offset), bytes) };
            let index = at.expert * from.shape()[1] + at.row;
            let to = to.as_ptr().addr() + index * row;
            // SAFETY: the same rows of the device tensor; the caller vouches for their use.
            unsafe { self.gpu.copy_in(block, to as u64, &self.stream)? };
        }
        Ok(())
    }

    /// Copies the first `counts[e]` rows of each `[e]` of a device tensor `[E, rows, H]` with dense
    /// rows to the host tensor that it is the twin of.
    pub(super) fn rows_down(
        &self,
        from: &OwnedTensor,
        to: &mut TensorMut<'_>,
        counts: &[usize],
    ) -> Result<()> {
        let (from, blocks) = (from.as_tensor(), Blocks::new(&to.as_tensor(), counts));
        for (at, bytes) in blocks.list() {
            // SAFETY: the block consists of elements of the tensor, which is borrowed exclusively.
            let block =
                unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().add(at.offset), bytes) };
            let from = from.as_ptr().addr() + at.offset;
            // SAFETY: the twin has the same elements at the same offsets.
            unsafe { self.gpu.copy_out(from as u64, block, &self.stream)? };
        }
        Ok(())
    }
}

/// The memory of the first rows of each expert in a tensor `[E, rows, H]` with dense rows.
struct Blocks<'a> {
    counts: &'a [usize],
    /// Rows of an expert.
    rows: usize,
    /// Bytes of a row.
    row: usize,
    /// Bytes from an expert to the next, and from a row to the next.
    strides: [usize; 2],
}

/// Where a block begins.
struct At {
    expert: usize,
    row: usize,
    /// In bytes from the first element.
    offset: usize,
}

impl<'a> Blocks<'a> {
    fn new(tensor: &Tensor<'_>, counts: &'a [usize]) -> Self {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        let size = tensor.dtype().size();
        Self {
            counts: &counts[..counts.len().min(shape[0])],
            rows: shape[1],
            row: shape[2] * size,
            strides: [strides[0] * size, strides[1] * size],
        }
    }

    /// Each block with its bytes: all rows of an expert if they are neighbours, else single rows.
    fn list(&self) -> impl Iterator<Item = (At, usize)> + '_ {
        let counts = self.counts.iter().enumerate();
        counts.flat_map(move |(expert, &count)| {
            let count = count.min(self.rows);
            let (blocks, each) = match self.strides[1] == self.row {
                true => (usize::from(count > 0), count),
                false => (count, 1),
            };
            (0..blocks).map(move |row| {
                let offset = expert * self.strides[0] + row * self.strides[1];
                let at = At {
                    expert,
                    row,
                    offset,
                };
                (at, each * self.row)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_in_use_are_copied() {
        let data = [0f32; 64];
        let offsets = |tensor: &Tensor<'_>| -> Vec<_> {
            let blocks = Blocks::new(tensor, &[2, 0, 9]);
            blocks
                .list()
                .map(|(at, bytes)| (at.expert, at.row, at.offset, bytes))
                .collect()
        };
        let dense = Tensor::new(&data, &[3, 3, 4]).unwrap();
        assert_eq!(offsets(&dense), [(0, 0, 0, 32), (2, 0, 96, 48)]);
        let apart = Tensor::strided(&data, &[3, 3, 4], &[18, 6, 1]).unwrap();
        let wanted = [
            (0, 0, 0, 16),
            (0, 1, 24, 16),
            (2, 0, 144, 16),
            (2, 1, 168, 16),
            (2, 2, 192, 16),
        ];
        assert_eq!(offsets(&apart), wanted);
    }
}
