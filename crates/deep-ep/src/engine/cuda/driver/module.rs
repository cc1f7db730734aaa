//! Compiled kernels: modules, functions, launches.

use std::{
    ffi::{CStr, c_int},
    sync::Arc,
};

use bytemuck::NoUninit;

use super::{
    checked::call,
    context::Context,
    stream::Stream,
    sys::{
        CUfunction, CUfunction_attribute as Attribute, CUlaunchAttribute, CUlaunchAttributeID,
        CUlaunchAttributeValue, CUlaunchConfig, CUmodule,
    },
};
use crate::error::Result;

/// A loaded image.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    raw: CUmodule,
}

// SAFETY: any thread may use a module.
unsafe impl Send for Module {}
// SAFETY: as above; the driver locks it.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin, or PTX, which the driver then compiles.
    ///
    /// # Safety
    ///
    /// `image` must be one that NVRTC made: the driver trusts the sizes in it.
    pub(crate) unsafe fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Self>> {
        let driver = context.device.driver;
        let _entered = context.enter()?;
        // PTX is text, which has to end with a NUL; a cubin knows its size.
        let image = [image, &[0]].concat();
        // SAFETY: the image is whole, as the caller says, and the driver copies it.
        let raw = unsafe {
            driver.out(|raw| call!(driver, cuModuleLoadData(raw, image.as_ptr().cast())))?
        };
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            raw,
        }))
    }

    /// A kernel of the module, ready to be launched with up to `shared_bytes` of dynamic shared
    /// memory. Its code is on the GPU when this returns, whatever `CUDA_MODULE_LOADING` says:
    /// loading it later could wait for a peer's kernel that waits for this one.
    pub(crate) fn function(self: &Arc<Self>, name: &CStr, shared_bytes: u32) -> Result<Function> {
        let driver = self.context.device.driver;
        let _entered = self.context.enter()?;
        // SAFETY: the pointers are valid for the call, and the module is loaded.
        let raw = unsafe {
            driver.out(|raw| call!(driver, cuModuleGetFunction(raw, self.raw, name.as_ptr())))?
        };
        let function = Function {
            module: Arc::clone(self),
            raw,
        };
        if let Some(load) = driver.api.cuFuncLoad {
            // SAFETY: the function is the module's.
            driver.check("cuFuncLoad", unsafe { load(raw) })?;
        }
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: as above.
        unsafe {
            call!(
                driver,
                cuFuncSetAttribute(raw, attribute, shared_bytes as c_int)
            )?;
        }
        // Compiled kernels use none; PTX that the driver compiles could.
        let local_bytes = function.local_bytes()?;
        tracing::debug!(?name, local_bytes, "kernel loaded");
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: every function of it is gone, since each holds the module.
            unsafe {
                let _ = call!(self.context.device.driver, cuModuleUnload(self.raw));
            }
        }
    }
}

/// A kernel.
#[derive(Debug)]
pub(crate) struct Function {
    module: Arc<Module>,
    raw: CUfunction,
}

// SAFETY: any thread may launch a function.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// The shape of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) blocks: u32,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
    /// All blocks must be resident at the same time, or the launch fails.
    pub(crate) cooperative: bool,
}

impl Function {
    /// Bytes of local memory of a thread: spilled registers and arrays.
    fn local_bytes(&self) -> Result<u32> {
        let driver = self.module.context.device.driver;
        let _entered = self.module.context.enter()?;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
        // SAFETY: the pointer is valid for the call, and the module is loaded.
        let bytes: c_int = unsafe {
            driver.out(|bytes| call!(driver, cuFuncGetAttribute(bytes, attribute, self.raw)))?
        };
        Ok(bytes.max(0) as u32)
    }

    /// Enqueues the kernel, whose only parameter is the struct `params`.
    ///
    /// # Safety
    ///
    /// `P` must be laid out as the kernel's parameter, and every address in it must stay valid for
    /// what the kernel does with it until the kernel has ended.
    pub(crate) unsafe fn launch<P: NoUninit>(
        &self,
        stream: &Stream,
        shape: Shape,
        params: &P,
    ) -> Result<()> {
        let _entered = stream.context.enter()?;
        let mut attributes = [CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            pad: [0; 4],
            value: CUlaunchAttributeValue {
                cooperative: c_int::from(shape.cooperative),
            },
        }];
        let config = CUlaunchConfig {
            gridDimX: shape.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: stream.raw,
            attrs: attributes.as_mut_ptr(),
            numAttrs: 1,
        };
        let mut params = [std::ptr::from_ref(params).cast_mut().cast()];
        // SAFETY: the driver copies the parameter, as many bytes as the kernel declares, which the
        // caller vouches for; the other pointers are valid for the call.
        unsafe {
            call!(
                self.module.context.device.driver,
                cuLaunchKernelEx(&config, self.raw, params.as_mut_ptr(), std::ptr::null_mut())
            )
        }
    }
}
