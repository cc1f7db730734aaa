//! Virtual memory of a GPU: addresses reserved once, memory mapped behind them piece by piece.
//!
//! A [`Chunk`] is memory without an address, a [`Space`] is addresses without memory; mapping brings
//! them together. Memory lives as long as somebody, in any process, holds it: the chunk, a file made
//! of it, or a mapping.

use std::{
    ffi::{c_int, c_void},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::Arc,
};

use super::{
    checked::{call, call_optional},
    context::Context,
    device::Device,
    stream::Stream,
    sys::{
        CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationFlags,
        CUmemAllocationGranularity_flags as Granularity, CUmemAllocationHandleType as HandleType,
        CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation,
        CUmemLocationType, code,
    },
};
use crate::error::{Error, Result, Text};

/// Who can map a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// This process.
    Process,
    /// Also other processes of this host, which are passed a file descriptor.
    Host,
}

impl Sharing {
    /// The kind of handle that a chunk can be exported as. The only place where it is chosen.
    fn handle_type(self) -> HandleType {
        match self {
            Self::Process => HandleType::CU_MEM_HANDLE_TYPE_NONE,
            Self::Host => HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        }
    }

    /// Whether this device can give such memory.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] saying what is not there.
    pub(crate) fn check(self, device: &Device) -> Result<()> {
        let cannot = |what: &str| {
            Err(Error::Unsupported {
                feature: "symmetric GPU memory".into(),
                why: format!(
                    "GPU {} ({}) or its driver {what}",
                    device.ordinal,
                    device.pci_address()?
                ),
            })
        };
        if !device.virtual_memory()? {
            return cannot("has no virtual memory management");
        }
        match self {
            Self::Host if !device.file_handles()? => {
                cannot("cannot pass memory to another process as a file descriptor")
            }
            Self::Process | Self::Host => Ok(()),
        }
    }

    /// Sizes and addresses of chunks on this device are multiples of this, a power of two.
    pub(crate) fn granularity(self, device: &Device) -> Result<u64> {
        let properties = self.properties(device);
        let flag = Granularity::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: the pointers are valid for the call.
        let bytes: usize = unsafe {
            device.driver.out(|bytes| {
                call_optional!(
                    device.driver,
                    cuMemGetAllocationGranularity(bytes, &properties, flag)
                )
            })?
        };
        Ok((bytes as u64).max(1).next_power_of_two())
    }

    fn properties(self, device: &Device) -> CUmemAllocationProp {
        CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: self.handle_type(),
            location: location(device),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: CUmemAllocationFlags {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }
}

fn location(device: &Device) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.raw,
    }
}

/// Memory of a GPU, without an address.
#[derive(Debug)]
pub(crate) struct Chunk {
    context: Arc<Context>,
    raw: CUmemGenericAllocationHandle,
    bytes: u64,
}

impl Chunk {
    /// `bytes` of memory, a multiple of the [granularity](Sharing::granularity), with undefined
    /// contents.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] with this purpose.
    pub(crate) fn new(
        context: &Arc<Context>,
        bytes: u64,
        sharing: Sharing,
        purpose: impl Into<Text>,
    ) -> Result<Self> {
        let driver = context.device.driver;
        let Some(create) = driver.api.cuMemCreate else {
            return Err(driver.lacks("cuMemCreate"));
        };
        let _entered = context.enter()?;
        let properties = sharing.properties(&context.device);
        let mut raw = 0;
        // SAFETY: the pointers are valid for the call; the only flag that exists is 0.
        match unsafe { create(&mut raw, bytes as usize, &properties, 0) } {
            code::OUT_OF_MEMORY => Err(Error::OutOfMemory {
                purpose: purpose.into(),
                requested: bytes,
                limit: context.device.memory()?,
            }),
            done => driver.check("cuMemCreate", done).map(|()| Self {
                context: Arc::clone(context),
                raw,
                bytes,
            }),
        }
    }

    /// The memory behind a file of another process, to be mapped for this context's GPU. That it
    /// has so many bytes is noticed when it is mapped.
    pub(crate) fn import(context: &Arc<Context>, bytes: u64, file: BorrowedFd<'_>) -> Result<Self> {
        let driver = context.device.driver;
        let _entered = context.enter()?;
        // The call takes the number itself in place of a pointer.
        let file = file.as_raw_fd() as usize as *mut c_void;
        let kind = Sharing::Host.handle_type();
        // SAFETY: the pointer is valid for the call, and the file is open. The driver keeps its
        // own reference, so the file may be closed afterwards.
        let raw = unsafe {
            driver.out(|raw| {
                call_optional!(driver, cuMemImportFromShareableHandle(raw, file, kind))
            })?
        };
        Ok(Self {
            context: Arc::clone(context),
            raw,
            bytes,
        })
    }

    /// A file that another process can import, if it was made to be shared with the host.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let driver = self.context.device.driver;
        let _entered = self.context.enter()?;
        let kind = Sharing::Host.handle_type();
        let mut file: c_int = -1;
        let to = std::ptr::from_mut(&mut file).cast();
        // SAFETY: for this kind of handle the call writes one file descriptor, an `int`.
        unsafe {
            call_optional!(driver, cuMemExportToShareableHandle(to, self.raw, kind, 0))?;
        }
        if file < 0 {
            let source = std::io::Error::from(std::io::ErrorKind::InvalidData);
            return Err(Error::io("exporting GPU memory as a file", source));
        }
        // SAFETY: the descriptor is new and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        // Programs that this process starts must not hold the memory.
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC)
            .map_err(|error| Error::io("closing a file of GPU memory on exec", error))?;
        Ok(file)
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the handle is ours and not used again; mappings of it stay.
            unsafe {
                let _ = call_optional!(self.context.device.driver, cuMemRelease(self.raw));
            }
        }
    }
}

/// A range of addresses of this process, with chunks mapped behind its beginning.
#[derive(Debug)]
pub(crate) struct Space {
    context: Arc<Context>,
    base: CUdeviceptr,
    reserved: u64,
    /// Bytes of each mapped chunk, in order.
    chunks: Vec<u64>,
    mapped: u64,
}

impl Space {
    /// Reserves `bytes` of addresses, a multiple of the power of two `alignment`.
    pub(crate) fn reserve(context: &Arc<Context>, bytes: u64, alignment: u64) -> Result<Self> {
        let driver = context.device.driver;
        let _entered = context.enter()?;
        // SAFETY: the pointer is valid for the call; any address will do, and the only flag that
        // exists is 0.
        let base = unsafe {
            driver.out(|base| {
                call_optional!(
                    driver,
                    cuMemAddressReserve(base, bytes as usize, alignment as usize, 0, 0)
                )
            })?
        };
        Ok(Self {
            context: Arc::clone(context),
            base,
            reserved: bytes,
            chunks: Vec::new(),
            mapped: 0,
        })
    }

    /// The first address.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Sets every mapped byte to zero, in the stream's order.
    pub(crate) fn clear(&self, stream: &Stream) -> Result<()> {
        let _entered = stream.context.enter()?;
        // SAFETY: the range is mapped, and the caller orders streams that use it.
        unsafe {
            call!(
                self.context.device.driver,
                cuMemsetD8Async(self.base, 0, self.mapped as usize, stream.raw)
            )
        }
    }

    /// Maps a chunk behind what is mapped, readable and writable by these devices' kernels. Kernels
    /// may be running; what was mapped before is not touched.
    pub(crate) fn map(&mut self, chunk: &Chunk, devices: &[Device]) -> Result<()> {
        if chunk.bytes > self.reserved - self.mapped {
            return Err(Error::OutOfMemory {
                purpose: "mapping GPU memory".into(),
                requested: self.mapped.saturating_add(chunk.bytes),
                limit: self.reserved,
            });
        }
        let driver = self.context.device.driver;
        let _entered = self.context.enter()?;
        let (address, bytes) = (self.base + self.mapped, chunk.bytes as usize);
        let access: Vec<_> = devices
            .iter()
            .map(|device| CUmemAccessDesc {
                location: location(device),
                flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        // SAFETY: the range is reserved by this and has no memory yet.
        unsafe { call_optional!(driver, cuMemMap(address, bytes, 0, chunk.raw, 0))? };
        // SAFETY: the range was just mapped, and the list has so many entries.
        let allowed = unsafe {
            call_optional!(
                driver,
                cuMemSetAccess(address, bytes, access.as_ptr(), access.len())
            )
        };
        if let Err(error) = allowed {
            // SAFETY: it was mapped above, and nobody could use it.
            unsafe { call_optional!(driver, cuMemUnmap(address, bytes))? };
            return Err(error);
        }
        self.chunks.push(chunk.bytes);
        self.mapped += chunk.bytes;
        Ok(())
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        let driver = self.context.device.driver;
        let Ok(_entered) = self.context.enter() else {
            return;
        };
        let mut address = self.base;
        for &bytes in &self.chunks {
            // SAFETY: one of the chunks that were mapped, whole. Owners let no kernel of this
            // process use the addresses any more.
            unsafe {
                let _ = call_optional!(driver, cuMemUnmap(address, bytes as usize));
            }
            address += bytes;
        }
        // SAFETY: reserved by `reserve`, and nothing is mapped there any more.
        unsafe {
            let _ = call_optional!(driver, cuMemAddressFree(self.base, self.reserved as usize));
        }
    }
}
