//! GPUs and what they can do. Asking needs no context and allocates nothing on them.

use std::{
    ffi::{CStr, c_char, c_int},
    fmt,
};

use super::{
    checked::{Driver, call, call_optional},
    sys::{CUdevice, CUdevice_P2PAttribute as P2p, CUdevice_attribute as Attribute, CUuuid},
};
use crate::error::Result;

/// A GPU's compute capability: 9.0 is Hopper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// Before the point.
    pub major: u32,
    /// Behind the point.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A GPU of this process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Device {
    pub(crate) driver: &'static Driver,
    /// Its number among those that this process sees.
    pub(crate) ordinal: usize,
    pub(crate) raw: CUdevice,
}

impl Device {
    /// All GPUs that this process sees.
    pub(crate) fn all() -> Result<Vec<Self>> {
        let driver = Driver::get()?;
        // SAFETY: the pointer is valid for the call.
        let count: c_int = unsafe { driver.out(|n| call!(driver, cuDeviceGetCount(n)))? };
        (0..count)
            .map(|ordinal| {
                // SAFETY: as above; the ordinal is below the count.
                let raw = unsafe { driver.out(|raw| call!(driver, cuDeviceGet(raw, ordinal)))? };
                Ok(Self {
                    driver,
                    ordinal: ordinal as usize,
                    raw,
                })
            })
            .collect()
    }

    pub(crate) fn name(&self) -> Result<String> {
        self.string(|text, length| {
            // SAFETY: `text` has room for `length` characters.
            unsafe { call!(self.driver, cuDeviceGetName(text, length, self.raw)) }
        })
    }

    /// For example `0000:1A:00.0`.
    pub(crate) fn pci_address(&self) -> Result<String> {
        self.string(|text, length| {
            // SAFETY: as in `name`.
            unsafe { call!(self.driver, cuDeviceGetPCIBusId(text, length, self.raw)) }
        })
    }

    /// What tells it from every other GPU, also in other processes.
    pub(crate) fn uuid(&self) -> Result<[u8; 16]> {
        // SAFETY: the pointer is valid for the call, and zeros are a UUID.
        let uuid: CUuuid = unsafe {
            self.driver
                .out(|uuid| call_optional!(self.driver, cuDeviceGetUuid_v2(uuid, self.raw)))?
        };
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    fn string(&self, get: impl FnOnce(*mut c_char, c_int) -> Result<()>) -> Result<String> {
        let mut text = [0u8; 256];
        get(text.as_mut_ptr().cast(), 255)?;
        // The last byte was not given away, so there is a NUL.
        Ok(CStr::from_bytes_until_nul(&text)
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned())
    }

    /// Bytes of its memory.
    pub(crate) fn memory(&self) -> Result<u64> {
        // SAFETY: the pointer is valid for the call.
        let bytes: usize = unsafe {
            self.driver
                .out(|bytes| call!(self.driver, cuDeviceTotalMem_v2(bytes, self.raw)))?
        };
        Ok(bytes as u64)
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        // SAFETY: as above.
        let value: c_int = unsafe {
            self.driver.out(|value| {
                call!(
                    self.driver,
                    cuDeviceGetAttribute(value, attribute, self.raw)
                )
            })?
        };
        Ok(value.max(0) as u32)
    }

    fn has(&self, attribute: Attribute) -> Result<bool> {
        Ok(self.attribute(attribute)? != 0)
    }

    /// Streaming multiprocessors.
    pub(crate) fn sms(&self) -> Result<u32> {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    pub(crate) fn compute_capability(&self) -> Result<ComputeCapability> {
        Ok(ComputeCapability {
            major: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        })
    }

    /// Bytes of shared memory that one block may use.
    pub(crate) fn shared_memory(&self) -> Result<u32> {
        self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }

    /// Memory can be mapped page by page, as symmetric memory needs it.
    pub(crate) fn virtual_memory(&self) -> Result<bool> {
        self.has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
    }

    /// Memory can be passed to another process as a file descriptor.
    pub(crate) fn file_handles(&self) -> Result<bool> {
        self.has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    }

    /// Memory can be passed to another host of the same NVLink fabric.
    pub(crate) fn fabric_handles(&self) -> Result<bool> {
        self.has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)
    }

    /// Network cards can read and write its memory.
    pub(crate) fn gpudirect(&self) -> Result<bool> {
        self.has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)
    }

    /// Kernels of this GPU can load and store the memory of `other`.
    pub(crate) fn can_access(&self, other: &Self) -> Result<bool> {
        // SAFETY: the pointer is valid for the call.
        let can: c_int = unsafe {
            self.driver
                .out(|can| call!(self.driver, cuDeviceCanAccessPeer(can, self.raw, other.raw)))?
        };
        Ok(can != 0)
    }

    /// Atomic operations on the memory of `other` are done where it lies, as over NVLink.
    pub(crate) fn native_atomics(&self, other: &Self) -> Result<bool> {
        let attribute = P2p::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        // SAFETY: as above.
        let native: c_int = unsafe {
            self.driver.out(|value| {
                call!(
                    self.driver,
                    cuDeviceGetP2PAttribute(value, attribute, self.raw, other.raw)
                )
            })?
        };
        Ok(native != 0)
    }
}
