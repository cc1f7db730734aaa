//! Pinned host memory through which copies between host and device go.
//!
//! The driver copies pageable memory by itself, too, but holds its locks while it waits for the
//! stream. A stream may be waiting for a kernel that another thread is about to launch.

use std::{ffi::c_void, ptr::NonNull, sync::Arc};

use super::{checked::call, context::Context, stream::Stream, sys::CUdeviceptr};
use crate::error::{Error, Result};

/// Bytes of pinned host memory.
#[derive(Debug)]
pub(crate) struct PinnedBytes {
    context: Arc<Context>,
    host: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its memory, which is not tied to a thread.
unsafe impl Send for PinnedBytes {}

impl PinnedBytes {
    /// Zeros. Taking them may wait for kernels that run.
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let driver = context.device.driver;
        let _entered = context.enter()?;
        // SAFETY: the pointer is valid for the call, and a context is current.
        let raw: *mut c_void =
            unsafe { driver.out(|raw| call!(driver, cuMemHostAlloc(raw, bytes, 0)))? };
        let host = NonNull::new(raw.cast::<u8>()).ok_or_else(|| Error::OutOfMemory {
            purpose: "pinned host memory".into(),
            requested: bytes as u64,
            limit: 0,
        })?;
        // SAFETY: the allocation has that many bytes.
        unsafe { host.as_ptr().write_bytes(0, bytes) };
        Ok(Self {
            context: Arc::clone(context),
            host,
            bytes,
        })
    }

    /// How many bytes there are.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Copies `data`, at most [`len`](Self::len) bytes, to `address` in the stream's order, and waits.
    ///
    /// # Safety
    ///
    /// `address` must have room for it on the stream's GPU, and nothing else may use that memory
    /// outside the stream's order.
    pub(crate) unsafe fn upload(
        &mut self,
        stream: &Stream,
        address: CUdeviceptr,
        data: &[u8],
    ) -> Result<()> {
        let bytes = data.len().min(self.bytes);
        let _entered = stream.context.enter()?;
        // SAFETY: both ranges have `bytes` bytes; the last copy through this memory was waited for.
        unsafe {
            self.host
                .as_ptr()
                .copy_from_nonoverlapping(data.as_ptr(), bytes);
            let host = self.host.as_ptr().cast_const().cast();
            call!(
                stream.context.device.driver,
                cuMemcpyHtoDAsync_v2(address, host, bytes, stream.raw)
            )?;
        }
        stream.synchronize()
    }

    /// Copies as many bytes from `address` as `data` has, at most [`len`](Self::len), in the stream's
    /// order, and waits.
    ///
    /// # Safety
    ///
    /// `address` must have as many bytes on the stream's GPU.
    pub(crate) unsafe fn download(
        &mut self,
        stream: &Stream,
        address: CUdeviceptr,
        data: &mut [u8],
    ) -> Result<()> {
        let bytes = data.len().min(self.bytes);
        let _entered = stream.context.enter()?;
        // SAFETY: both ranges have `bytes` bytes.
        unsafe {
            call!(
                stream.context.device.driver,
                cuMemcpyDtoHAsync_v2(self.host.as_ptr().cast(), address, bytes, stream.raw)
            )?;
        }
        stream.synchronize()?;
        // SAFETY: as above, and the copy has ended.
        unsafe {
            data.as_mut_ptr()
                .copy_from_nonoverlapping(self.host.as_ptr(), bytes);
        }
        Ok(())
    }
}

impl Drop for PinnedBytes {
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
