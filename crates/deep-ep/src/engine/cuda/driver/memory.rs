//! Device memory, and pinned host memory that kernels read and write.

use std::{
    ffi::c_void,
    ptr::NonNull,
    sync::{Arc, atomic::AtomicU64},
};

use bytemuck::Pod;

use super::{
    checked::call,
    context::Context,
    stream::Stream,
    sys::{CUdeviceptr, code},
};
use crate::error::{Error, Result, Text};

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all contexts; `CU_MEMHOSTALLOC_DEVICEMAP`: mapped on GPUs.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

/// An allocation in a GPU's memory.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    context: Arc<Context>,
    address: CUdeviceptr,
    bytes: usize,
}

impl DeviceMemory {
    /// `bytes` of memory, at least one, with undefined contents.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] with this purpose.
    pub(crate) fn new(
        context: &Arc<Context>,
        bytes: usize,
        purpose: impl Into<Text>,
    ) -> Result<Self> {
        let driver = context.device.driver;
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is valid for the call, and a context is current.
        match unsafe { (driver.api.cuMemAlloc_v2)(&mut address, bytes) } {
            code::OUT_OF_MEMORY => Err(Error::OutOfMemory {
                purpose: purpose.into(),
                requested: bytes as u64,
                limit: context.device.memory()?,
            }),
            done => driver.check("cuMemAlloc", done).map(|()| Self {
                context: Arc::clone(context),
                address,
                bytes,
            }),
        }
    }

    /// Its address on every GPU that may access it.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Sets every byte, in the stream's order.
    pub(crate) fn fill(&self, stream: &Stream, byte: u8) -> Result<()> {
        let _entered = stream.context.enter()?;
        // SAFETY: the range is this allocation's, and the caller orders streams that use it.
        unsafe {
            call!(
                self.context.device.driver,
                cuMemsetD8Async(self.address, byte, self.bytes, stream.raw)
            )
        }
    }

    /// Copies `data` to its beginning and waits.
    pub(crate) fn upload(&self, stream: &Stream, data: &[u8]) -> Result<()> {
        let bytes = data.len().min(self.bytes);
        let _entered = stream.context.enter()?;
        // SAFETY: both ranges have `bytes` bytes, and `data` is borrowed until the copy is done.
        unsafe {
            call!(
                self.context.device.driver,
                cuMemcpyHtoDAsync_v2(self.address, data.as_ptr().cast(), bytes, stream.raw)
            )?;
        }
        stream.synchronize()
    }

    /// Its contents, after everything that the stream was given before.
    pub(crate) fn download(&self, stream: &Stream) -> Result<Vec<u8>> {
        let mut data = vec![0u8; self.bytes];
        let _entered = stream.context.enter()?;
        // SAFETY: both ranges have `bytes` bytes, and `data` lives until the copy is done or, if
        // waiting for it fails, the context that would do it is lost.
        unsafe {
            call!(
                self.context.device.driver,
                cuMemcpyDtoHAsync_v2(
                    data.as_mut_ptr().cast(),
                    self.address,
                    self.bytes,
                    stream.raw
                )
            )?;
        }
        stream.synchronize()?;
        Ok(data)
    }

    /// Copies all of `source` to the beginning of this memory by a copy engine, in the stream's
    /// order. They may lie on different GPUs if the stream's may access both.
    pub(crate) fn copy_from(&self, stream: &Stream, source: &Self) -> Result<()> {
        let bytes = source.bytes.min(self.bytes);
        let _entered = stream.context.enter()?;
        // SAFETY: both ranges have `bytes` bytes; the caller orders streams that use them.
        unsafe {
            call!(
                self.context.device.driver,
                cuMemcpyDtoDAsync_v2(self.address, source.address, bytes, stream.raw)
            )
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: it is ours and not used again. The driver waits for kernels that run.
            unsafe {
                let _ = call!(self.context.device.driver, cuMemFree_v2(self.address));
            }
        }
    }
}

/// One `T` in pinned host memory that kernels of every GPU can read and write.
#[derive(Debug)]
pub(crate) struct Pinned<T: Pod> {
    context: Arc<Context>,
    host: NonNull<T>,
    device: CUdeviceptr,
}

// SAFETY: it owns its memory, which is not tied to a thread.
unsafe impl<T: Pod + Send> Send for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// A value, with `value` in it.
    pub(crate) fn new(context: &Arc<Context>, value: T) -> Result<Self> {
        let driver = context.device.driver;
        let _entered = context.enter()?;
        // SAFETY: the pointers are valid for the calls, and a context is current.
        let raw: *mut c_void = unsafe {
            driver.out(|raw| {
                call!(
                    driver,
                    cuMemHostAlloc(raw, size_of::<T>(), PORTABLE_AND_MAPPED)
                )
            })?
        };
        let host = NonNull::new(raw.cast()).ok_or_else(|| Error::OutOfMemory {
            purpose: "pinned host memory".into(),
            requested: size_of::<T>() as u64,
            limit: 0,
        })?;
        let mut this = Self {
            context: Arc::clone(context),
            host,
            device: 0,
        };
        // SAFETY: as above; the memory was allocated as mapped.
        this.device = unsafe {
            driver.out(|device| call!(driver, cuMemHostGetDevicePointer_v2(device, raw, 0)))?
        };
        this.store(value);
        Ok(this)
    }

    /// What is there now; a kernel that runs may be writing it.
    pub(crate) fn load(&self) -> T {
        // SAFETY: the memory is ours, page-aligned, and every pattern of bits is a `T`. Kernels
        // write words of at most 8 aligned bytes; a volatile read is not assumed to be stable.
        unsafe { self.host.as_ptr().read_volatile() }
    }

    /// Replaces it.
    pub(crate) fn store(&self, value: T) {
        // SAFETY: as in `load`; `Pinned` is not `Sync`, so no other thread stores.
        unsafe { self.host.as_ptr().write_volatile(value) }
    }

    /// Its address for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.device
    }

    /// Its address for the host. Kernels may be writing there.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.host.as_ptr()
    }
}

impl<T: Pod> Drop for Pinned<T> {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: it is ours and not used again.
            unsafe {
                let _ = call!(
                    self.context.device.driver,
                    cuMemFreeHost(self.host.as_ptr().cast())
                );
            }
        }
    }
}

/// Words in pinned host memory that kernels of every GPU and several threads read and write, each
/// on its own.
#[derive(Debug)]
pub(crate) struct PinnedWords {
    context: Arc<Context>,
    host: NonNull<AtomicU64>,
    device: CUdeviceptr,
    len: usize,
}

// SAFETY: it owns its memory, which is not tied to a thread and is only accessed as atomic words.
unsafe impl Send for PinnedWords {}
// SAFETY: as above.
unsafe impl Sync for PinnedWords {}

impl PinnedWords {
    /// `len` words, at least one, of 0.
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Self> {
        let driver = context.device.driver;
        let bytes = len.max(1) * 8;
        let _entered = context.enter()?;
        // SAFETY: the pointers are valid for the calls, and a context is current.
        let raw: *mut c_void = unsafe {
            driver.out(|raw| call!(driver, cuMemHostAlloc(raw, bytes, PORTABLE_AND_MAPPED)))?
        };
        let host = NonNull::new(raw.cast::<AtomicU64>()).ok_or_else(|| Error::OutOfMemory {
            purpose: "pinned host memory".into(),
            requested: bytes as u64,
            limit: 0,
        })?;
        // SAFETY: the memory was just allocated, `bytes` long, and nobody else has it.
        unsafe { host.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        let mut this = Self {
            context: Arc::clone(context),
            host,
            device: 0,
            len: len.max(1),
        };
        // SAFETY: as above; the memory was allocated as mapped.
        this.device = unsafe {
            driver.out(|device| call!(driver, cuMemHostGetDevicePointer_v2(device, raw, 0)))?
        };
        Ok(this)
    }

    /// The words.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the memory is ours, aligned to a page, initialised, and as long as said.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), self.len) }
    }

    /// Their address for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.device
    }

    /// Copies them to `to` by a copy engine, in the stream's order.
    ///
    /// # Safety
    ///
    /// As many words at `to` are memory that the stream's GPU may write, until the copy is done.
    pub(crate) unsafe fn copy_to(&self, stream: &Stream, to: u64) -> Result<()> {
        let _entered = stream.context.enter()?;
        // SAFETY: the source is ours; the caller vouches for the rest.
        unsafe {
            call!(
                self.context.device.driver,
                cuMemcpyHtoDAsync_v2(to, self.host.as_ptr().cast(), self.len * 8, stream.raw)
            )
        }
    }
}

impl Drop for PinnedWords {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: it is ours and not used again.
            unsafe {
                let _ = call!(
                    self.context.device.driver,
                    cuMemFreeHost(self.host.as_ptr().cast())
                );
            }
        }
    }
}
