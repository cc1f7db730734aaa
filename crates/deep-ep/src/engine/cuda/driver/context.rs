//! The primary context of a GPU, which every library of the process shares, and access to peers.

use std::sync::Arc;

use super::{
    checked::call,
    device::Device,
    sys::{CUcontext, code},
};
use crate::error::{Error, Result};

/// A GPU's primary context, held until the last owner is gone.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: Device,
    raw: CUcontext,
}

// SAFETY: a context may be used by any thread; the driver locks it itself.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn new(device: Device) -> Result<Arc<Self>> {
        let driver = device.driver;
        // SAFETY: the pointer is valid for the call; `drop` gives the context back.
        let raw =
            unsafe { driver.out(|raw| call!(driver, cuDevicePrimaryCtxRetain(raw, device.raw)))? };
        Ok(Arc::new(Self { device, raw }))
    }

    /// Makes it this thread's context until the guard is dropped. The context that was current
    /// before, for example a framework's, comes back then.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context is retained.
        unsafe { call!(self.device.driver, cuCtxPushCurrent_v2(self.raw))? };
        Ok(Entered {
            context: self,
            _this_thread: std::marker::PhantomData,
        })
    }

    /// Lets kernels of this GPU load and store memory of the other's context.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], naming both GPUs, if the hardware cannot.
    pub(crate) fn enable_peer(&self, other: &Self) -> Result<()> {
        let driver = self.device.driver;
        if !self.device.can_access(&other.device)? {
            return Err(Error::Unsupported {
                feature: "peer access".into(),
                why: format!(
                    "GPU {} ({}) cannot access the memory of GPU {} ({})",
                    self.device.ordinal,
                    self.device.pci_address()?,
                    other.device.ordinal,
                    other.device.pci_address()?
                ),
            });
        }
        let _entered = self.enter()?;
        // SAFETY: both contexts are retained; the only flag that exists is 0.
        let done = unsafe { (driver.api.cuCtxEnablePeerAccess)(other.raw, 0) };
        match done {
            // Another library of the process did it.
            code::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            done => driver.check("cuCtxEnablePeerAccess", done),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once by `new`. At the end of a process the driver may be gone
        // already and refuse, which harms nothing.
        unsafe {
            let _ = call!(
                self.device.driver,
                cuDevicePrimaryCtxRelease_v2(self.device.raw)
            );
        }
    }
}

/// While this lives, the context is the thread's current one.
pub(crate) struct Entered<'a> {
    context: &'a Context,
    /// The thread that pushed the context must pop it.
    _this_thread: std::marker::PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let driver = self.context.device.driver;
        // SAFETY: `enter` pushed one in this thread.
        unsafe {
            let _ = driver.out(|raw| call!(driver, cuCtxPopCurrent_v2(raw)));
        }
    }
}
