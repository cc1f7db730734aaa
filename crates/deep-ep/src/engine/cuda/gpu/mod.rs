//! GPUs for programs that have no framework: memory, streams, events and graphs.
//!
//! The calls of a [`Buffer`](crate::Buffer) take device tensors wherever they come from. A program
//! that uses PyTorch passes its tensors and streams; one that does not makes them here.

mod pool;
pub(super) mod runs;
mod stream;

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use pool::Pool;
use runs::Runs;
pub use stream::{GpuEvent, GpuStream, Graph};

use super::driver::{
    checked::call,
    context::Context,
    device::Device as DriverDevice,
    staging::PinnedBytes,
    stream::{Event, Stream},
};
use crate::{
    dtype::DType,
    error::{Error, Result},
    tensor::{Device, OwnedTensor, Shape, Tensor, TensorMut},
};

/// Bytes that go through pinned memory at a time.
const STAGING: usize = 8 << 20;

/// A GPU of this process, with memory that is used again. Cloning is cheap.
///
/// # Memory
///
/// A tensor belongs to the stream that it was made on. Dropping it never waits: its memory goes to
/// the next tensor of the same stream, whose work comes after what the stream was given before.
/// **So a tensor may be dropped while work of its own stream still uses it, but not while work of
/// another stream does**: let its stream [`wait`](GpuStream::wait) for that work first, or keep the
/// tensor until it is done. Work of a graph counts whenever the graph is launched. The driver gets
/// the memory back when the last clone, stream and tensor are gone, without waiting for kernels
/// (except with drivers and GPUs that have no stream-ordered memory).
///
/// # Threads
///
/// Ranks that are threads may share a GPU, each with a `Gpu` of its own or with clones of one. Then
/// set `CUDA_DEVICE_MAX_CONNECTIONS=32` before the first CUDA call: kernels of one rank wait for
/// those of another, which must not be queued behind them.
#[derive(Clone)]
pub struct Gpu(Arc<Shared>);

struct Shared {
    context: Arc<Context>,
    pool: Arc<Pool>,
    /// Pinned memory that no copy uses now.
    staging: Mutex<Vec<PinnedBytes>>,
}

impl Shared {
    fn ordinal(&self) -> usize {
        self.context.device.ordinal
    }
}

impl Gpu {
    /// How many GPUs this process sees.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without a driver or a GPU.
    pub fn count() -> Result<usize> {
        Ok(DriverDevice::all()?.len())
    }

    /// The GPU of this number, below [`count`](Self::count).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is none of this number; [`Error::Unsupported`] without a
    /// driver or a GPU; [`Error::Cuda`] if it cannot be used.
    pub fn new(ordinal: usize) -> Result<Self> {
        let devices = DriverDevice::all()?;
        let device = devices.get(ordinal).copied().ok_or_else(|| {
            Error::invalid(
                "device",
                ordinal,
                format!("must be below the {} GPUs that are here", devices.len()),
            )
        })?;
        let context = Context::new(device)?;
        let pool = Pool::new(Stream::new(&context)?);
        // Taken now, because taking it may wait for kernels that run.
        let staging = PinnedBytes::new(&context, STAGING)?;
        Ok(Self(Arc::new(Shared {
            context,
            pool,
            staging: Mutex::new(vec![staging]),
        })))
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal()
    }

    /// Where its tensors are.
    pub fn device(&self) -> Device {
        Device::Cuda(self.ordinal() as u32)
    }

    /// As the driver calls it.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn name(&self) -> Result<String> {
        self.0.context.device.name()
    }

    /// Its streaming multiprocessors.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn sms(&self) -> Result<u32> {
        self.0.context.device.sms()
    }

    /// A new stream, which does not wait for the legacy default stream.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn stream(&self) -> Result<GpuStream> {
        GpuStream::new(&self.0, true)
    }

    /// A stream whose handle nobody keeps beyond it.
    pub(crate) fn own_stream(&self) -> Result<GpuStream> {
        GpuStream::new(&self.0, false)
    }

    /// A new event, which has not come yet.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn event(&self) -> Result<GpuEvent> {
        Event::new(&self.0.context).map(GpuEvent)
    }

    /// A copy of a host tensor on this GPU, with its shape and strides; made when this returns.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the tensor is not on the host, or the stream is of another GPU
    /// or being captured; [`Error::OutOfMemory`]; [`Error::Cuda`].
    pub fn upload(&self, tensor: &Tensor<'_>, stream: &GpuStream) -> Result<OwnedTensor> {
        on(Device::Host, "tensor", tensor)?;
        let mut copy = self.empty(tensor.dtype(), tensor.shape(), tensor.strides(), stream)?;
        let runs = Runs::new(tensor.dtype(), tensor.shape(), tensor.strides());
        let to = copy.as_tensor_mut().as_mut_ptr().addr() as u64;
        if runs.is_one() {
            // SAFETY: a single run is all of the tensor's memory, which is borrowed.
            let from = unsafe { std::slice::from_raw_parts(host(tensor, &runs), runs.span()) };
            // SAFETY: the copy has the same span, and nothing uses it yet.
            unsafe { self.copy_in(from, to, stream)? };
            return Ok(copy);
        }
        // What lies between the elements may be another's, so only they are read.
        let mut bytes = vec![0u8; runs.span()];
        for at in runs.offsets() {
            // SAFETY: a run consists of elements of the tensor, which is borrowed.
            let run = unsafe { std::slice::from_raw_parts(tensor.as_ptr().add(at), runs.run()) };
            bytes[at..][..runs.run()].copy_from_slice(run);
        }
        // SAFETY: as above.
        unsafe { self.copy_in(&bytes, to, stream)? };
        Ok(copy)
    }

    /// Copies a dense host tensor to a dense tensor on this GPU of the same type and shape, in the
    /// stream's order; waits for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if type, shape or place do not fit, a tensor is not dense, or the
    /// stream is of another GPU or being captured; [`Error::Cuda`].
    pub fn upload_into(
        &self,
        tensor: &Tensor<'_>,
        to: &mut TensorMut<'_>,
        stream: &GpuStream,
    ) -> Result<()> {
        on(Device::Host, "tensor", tensor)?;
        on(self.device(), "the copy", &to.as_tensor())?;
        let same = tensor.dtype() == to.dtype() && tensor.shape() == to.shape();
        if !same || !tensor.is_dense() || !to.is_dense() {
            return Err(Error::invalid(
                "the copy",
                format!("{to:?}"),
                format!("must be dense, as {tensor:?}"),
            ));
        }
        let runs = Runs::new(tensor.dtype(), tensor.shape(), tensor.strides());
        // SAFETY: a dense tensor is one run of all of its memory, which is borrowed.
        let from = unsafe { std::slice::from_raw_parts(host(tensor, &runs), runs.span()) };
        // SAFETY: the copy has the same span and is borrowed exclusively; its memory goes to others
        // in the order of its stream, as `Gpu` says.
        unsafe { self.copy_in(from, to.as_mut_ptr().addr() as u64, stream) }
    }

    /// A copy on the host of a tensor on this GPU, with its shape and strides, as it is after
    /// everything that the stream was given before; waits for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the tensor is not on this GPU or elements share memory, or the
    /// stream is of another GPU or being captured; [`Error::OutOfMemory`]; [`Error::Cuda`].
    pub fn download(&self, tensor: &Tensor<'_>, stream: &GpuStream) -> Result<OwnedTensor> {
        let mut copy =
            OwnedTensor::zeros_strided(tensor.dtype(), tensor.shape(), tensor.strides())?;
        self.download_into(tensor, &mut copy.as_tensor_mut(), stream)?;
        Ok(copy)
    }

    /// As [`download`](Self::download), into a host tensor of the same type, shape and strides.
    ///
    /// # Errors
    /// As [`download`](Self::download), and if type, shape or strides differ.
    pub fn download_into(
        &self,
        tensor: &Tensor<'_>,
        to: &mut TensorMut<'_>,
        stream: &GpuStream,
    ) -> Result<()> {
        on(self.device(), "tensor", tensor)?;
        on(Device::Host, "the copy", &to.as_tensor())?;
        self.owns(stream)?;
        stream.not_capturing("a download")?;
        let runs = Runs::new(tensor.dtype(), tensor.shape(), tensor.strides());
        let same = tensor.dtype() == to.dtype() && tensor.shape() == to.shape();
        if !same || (tensor.strides() != to.strides() && runs.span() > 0) {
            return Err(Error::invalid(
                "the copy",
                format!("{to:?} with strides {:?}", to.strides()),
                format!("must be as {tensor:?} with strides {:?}", tensor.strides()),
            ));
        }
        let from = tensor.as_ptr().addr() as u64;
        if runs.is_one() && runs.span() > 0 {
            // SAFETY: a single run is all of the tensor's memory, which is borrowed exclusively.
            let to = unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr(), runs.span()) };
            // SAFETY: the device tensor has the same span.
            return unsafe { self.copy_out(from, to, stream) };
        }
        let mut bytes = vec![0u8; runs.span()];
        // SAFETY: as above.
        unsafe { self.copy_out(from, &mut bytes, stream)? };
        for at in runs.offsets() {
            // SAFETY: a run consists of elements of the tensor, which is borrowed exclusively.
            unsafe {
                let run = to.as_mut_ptr().add(at);
                run.copy_from_nonoverlapping(bytes[at..].as_ptr(), runs.run());
            }
        }
        Ok(())
    }

    /// A dense tensor of zeros on this GPU, in the stream's order.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn zeros(&self, dtype: DType, shape: &[usize], stream: &GpuStream) -> Result<OwnedTensor> {
        let mut tensor = self.dense(dtype, shape, stream)?;
        self.fill(&mut tensor.as_tensor_mut(), 0, stream)?;
        Ok(tensor)
    }

    /// Sets every byte of a tensor's elements, in the stream's order. One command for each run of
    /// neighbouring elements.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the tensor is not on this GPU or the stream is of another;
    /// [`Error::Cuda`].
    pub fn fill(&self, tensor: &mut TensorMut<'_>, byte: u8, stream: &GpuStream) -> Result<()> {
        on(self.device(), "tensor", &tensor.as_tensor())?;
        self.owns(stream)?;
        let runs = Runs::new(tensor.dtype(), tensor.shape(), tensor.strides());
        let (to, driver) = (tensor.as_mut_ptr().addr(), self.0.context.device.driver);
        let _entered = self.0.context.enter()?;
        for at in runs.offsets() {
            let (address, raw) = ((to + at) as u64, stream.stream.raw);
            // SAFETY: a run consists of elements of the tensor, which is borrowed exclusively; the
            // tensor's memory goes to others in the order of its stream, as `Gpu` says.
            unsafe { call!(driver, cuMemsetD8Async(address, byte, runs.run(), raw))? };
        }
        Ok(())
    }

    /// Records what `work` gives to `stream`, without running it. Memory cannot be taken, uploaded
    /// or downloaded meanwhile.
    ///
    /// # Errors
    /// Those of `work`, and [`Error::Cuda`] if something cannot be recorded.
    pub fn capture<T>(
        &self,
        stream: &GpuStream,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<Graph<T>> {
        Graph::new(self, stream, work)
    }

    /// A dense tensor with undefined contents.
    pub(crate) fn dense(
        &self,
        dtype: DType,
        shape: &[usize],
        stream: &GpuStream,
    ) -> Result<OwnedTensor> {
        let strides: Vec<usize> = (1..=shape.len())
            .map(|i| {
                shape[i..]
                    .iter()
                    .fold(1, |n: usize, &m| n.saturating_mul(m.max(1)))
            })
            .collect();
        self.empty(dtype, shape, &strides, stream)
    }

    /// A tensor with undefined contents.
    pub(crate) fn empty(
        &self,
        dtype: DType,
        shape: &[usize],
        strides: &[usize],
        stream: &GpuStream,
    ) -> Result<OwnedTensor> {
        self.owns(stream)?;
        stream.not_capturing("taking memory")?;
        let layout = Shape::strided(dtype, shape, strides)?;
        let span = Runs::new(dtype, shape, strides).span();
        let block = self.0.pool.take(span, stream.number)?;
        let address = std::ptr::without_provenance_mut(block.address() as usize);
        let device = self.device();
        // SAFETY: the block has that many bytes on this GPU, is the tensor's alone, and goes to
        // another only when the owner is dropped.
        Ok(unsafe { OwnedTensor::from_device(address, layout, device, Arc::new(block)) })
    }

    /// Copies bytes to an address of this GPU, in the stream's order, and waits.
    ///
    /// # Safety
    /// The address must have room for them, and nothing outside the stream's order may use it.
    pub(crate) unsafe fn copy_in(&self, from: &[u8], to: u64, stream: &GpuStream) -> Result<()> {
        self.owns(stream)?;
        stream.not_capturing("an upload")?;
        self.staged(|staging| {
            let mut to = to;
            from.chunks(staging.len()).try_for_each(|chunk| {
                // SAFETY: a part of what the caller vouches for.
                unsafe { staging.upload(&stream.stream, to, chunk)? };
                to += chunk.len() as u64;
                Ok(())
            })
        })
    }

    /// Copies bytes from an address of this GPU, in the stream's order, and waits.
    ///
    /// # Safety
    /// The address must have as many bytes, and nothing outside the stream's order may write them.
    pub(crate) unsafe fn copy_out(
        &self,
        from: u64,
        to: &mut [u8],
        stream: &GpuStream,
    ) -> Result<()> {
        self.owns(stream)?;
        stream.not_capturing("a download")?;
        self.staged(|staging| {
            let mut from = from;
            to.chunks_mut(staging.len()).try_for_each(|chunk| {
                // SAFETY: a part of what the caller vouches for.
                unsafe { staging.download(&stream.stream, from, chunk)? };
                from += chunk.len() as u64;
                Ok(())
            })
        })
    }

    /// Lends pinned memory. Nothing is locked meanwhile, since the copy may wait for another thread.
    fn staged(&self, copy: impl FnOnce(&mut PinnedBytes) -> Result<()>) -> Result<()> {
        let idle = || {
            self.0
                .staging
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let taken = idle().pop();
        let mut staging = match taken {
            Some(staging) => staging,
            None => PinnedBytes::new(&self.0.context, STAGING)?,
        };
        let copied = copy(&mut staging);
        idle().push(staging);
        copied
    }

    fn owns(&self, stream: &GpuStream) -> Result<()> {
        let of = stream.gpu.ordinal();
        if of != self.ordinal() {
            return Err(Error::invalid(
                "stream",
                format!("of GPU {of}"),
                format!("must be of GPU {}", self.ordinal()),
            ));
        }
        Ok(())
    }
}

/// A host tensor's first byte; one of no elements may have any address.
fn host(tensor: &Tensor<'_>, runs: &Runs) -> *const u8 {
    match runs.span() {
        0 => std::ptr::dangling(),
        _ => tensor.as_ptr(),
    }
}

fn on(device: Device, name: &'static str, tensor: &Tensor<'_>) -> Result<()> {
    if tensor.device() != device {
        let limit = format!("must be on {device:?}");
        return Err(Error::invalid(name, format!("{tensor:?}"), limit));
    }
    Ok(())
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {}", self.ordinal())
    }
}
