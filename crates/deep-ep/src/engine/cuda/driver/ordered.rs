//! Device memory that is taken and given back without waiting for kernels that run.
//!
//! `cuMemAlloc` and `cuMemFree` may wait for all work of a GPU. When ranks share a GPU, a kernel of
//! one may be waiting for a kernel that another is about to launch, and neither would go on. The
//! stream-ordered calls wait for their own stream only, on which nothing else is enqueued here.

use std::sync::Arc;

use super::{
    checked::call,
    stream::Stream,
    sys::{CUdeviceptr, code},
};
use crate::error::{Error, Result, Text};

/// An allocation in a GPU's memory, with undefined contents.
#[derive(Debug)]
pub(crate) struct OrderedMemory {
    stream: Arc<Stream>,
    address: CUdeviceptr,
    /// Whether the driver took it in the stream's order.
    ordered: bool,
}

impl OrderedMemory {
    /// At least one byte. Every stream may use it at once.
    ///
    /// `stream` must have nothing but such memory, and waits for events, enqueued.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] with this purpose.
    pub(crate) fn new(stream: &Arc<Stream>, bytes: usize, purpose: &'static str) -> Result<Self> {
        let driver = stream.context.device.driver;
        let bytes = bytes.max(1);
        let (mut address, mut ordered) = (0, true);
        let entered = stream.context.enter()?;
        let mut done = match (driver.api.cuMemAllocAsync, driver.api.cuMemFreeAsync) {
            // SAFETY: the pointer is valid for the call, and the stream is alive.
            (Some(alloc), Some(_)) => unsafe { alloc(&mut address, bytes, stream.raw) },
            _ => code::NOT_SUPPORTED,
        };
        if done == code::NOT_SUPPORTED {
            ordered = false;
            // SAFETY: the pointer is valid for the call, and a context is current.
            done = unsafe { (driver.api.cuMemAlloc_v2)(&mut address, bytes) };
        }
        drop(entered);
        if done == code::OUT_OF_MEMORY {
            return Err(Error::OutOfMemory {
                purpose: Text::from(purpose),
                requested: bytes as u64,
                limit: stream.context.device.memory()?,
            });
        }
        driver.check("cuMemAllocAsync", done)?;
        let this = Self {
            stream: Arc::clone(stream),
            address,
            ordered,
        };
        // Other streams may use it only when the allocation was reached.
        this.stream.synchronize()?;
        Ok(this)
    }

    /// Its address on its GPU.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for OrderedMemory {
    fn drop(&mut self) {
        let driver = self.stream.context.device.driver;
        let Ok(_entered) = self.stream.context.enter() else {
            return;
        };
        match driver.api.cuMemFreeAsync {
            // SAFETY: it is ours and not used again; it was taken by the matching call.
            Some(free) if self.ordered => unsafe {
                let _ = free(self.address, self.stream.raw);
            },
            // SAFETY: as above. The driver waits for kernels that run.
            _ => unsafe {
                let _ = call!(driver, cuMemFree_v2(self.address));
            },
        }
    }
}
