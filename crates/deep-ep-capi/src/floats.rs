//! Floats that C passes without saying where they are: on the host, or on a GPU, from and to which they are
//! copied.

use deep_ep::{
    Device, Result, Shape, Tensor, TensorMut,
    cuda::{Gpu, GpuStream, place_of},
    dtype::DType,
};

use crate::pointers;

/// A GPU, with a stream for copies.
fn gpu(ordinal: u32) -> Result<(Gpu, GpuStream)> {
    let gpu = Gpu::new(ordinal as usize)?;
    let stream = gpu.stream()?;
    Ok((gpu, stream))
}

/// The GPU that has `pointer`, if one has and the engine works on GPUs.
fn ordinal(pointer: *const f32, len: usize, on_gpus: bool) -> Result<Option<u32>> {
    if !on_gpus || len == 0 || pointer.is_null() {
        return Ok(None);
    }
    Ok(match place_of(pointer.addr())? {
        Device::Host => None,
        Device::Cuda(ordinal) => Some(ordinal),
    })
}

/// Floats to read.
pub(crate) enum Input<'a> {
    Host(&'a [f32]),
    Copied(Vec<f32>),
}

impl<'a> Input<'a> {
    pub(crate) fn new(pointer: *const f32, len: usize, on_gpus: bool) -> Result<Self> {
        let Some(ordinal) = ordinal(pointer, len, on_gpus)? else {
            return pointers::slice(pointer, len, "input").map(Self::Host);
        };
        let (gpu, stream) = gpu(ordinal)?;
        let shape = Shape::dense(DType::F32, &[len])?;
        // SAFETY: the driver says that the address is on that GPU, and the caller has `len` floats there.
        let there = unsafe { Tensor::from_raw(pointer.cast(), shape, gpu.device()) };
        let mut here = vec![0.0; len];
        gpu.download_into(&there, &mut TensorMut::new(&mut here, &[len])?, &stream)?;
        Ok(Self::Copied(here))
    }

    pub(crate) fn floats(&self) -> &[f32] {
        match self {
            Self::Host(floats) => floats,
            Self::Copied(floats) => floats,
        }
    }
}

/// Floats to write.
pub(crate) enum Output<'a> {
    Host(&'a mut [f32]),
    Copied {
        here: Vec<f32>,
        there: *mut f32,
        gpu: Gpu,
        stream: GpuStream,
    },
}

impl<'a> Output<'a> {
    pub(crate) fn new(pointer: *mut f32, len: usize, on_gpus: bool) -> Result<Self> {
        let Some(ordinal) = ordinal(pointer, len, on_gpus)? else {
            return pointers::slice_mut(pointer, len, "output").map(Self::Host);
        };
        let (gpu, stream) = gpu(ordinal)?;
        Ok(Self::Copied {
            here: vec![0.0; len],
            there: pointer,
            gpu,
            stream,
        })
    }

    pub(crate) fn floats(&mut self) -> &mut [f32] {
        match self {
            Self::Host(floats) => floats,
            Self::Copied { here, .. } => here,
        }
    }

    /// Brings what was written to where C wants it.
    pub(crate) fn finish(self) -> Result<()> {
        let Self::Copied {
            here,
            there,
            gpu,
            stream,
        } = self
        else {
            return Ok(());
        };
        let shape = Shape::dense(DType::F32, &[here.len()])?;
        // SAFETY: as for the input, and nobody else uses it during the call.
        let mut there = unsafe { TensorMut::from_raw(there.cast(), shape, gpu.device()) };
        gpu.upload_into(&Tensor::new(&here, &[here.len()])?, &mut there, &stream)
    }
}
