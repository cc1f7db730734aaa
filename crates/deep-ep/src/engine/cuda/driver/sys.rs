//! Raw layer: the driver's functions as a table, with the types of `cudarc`'s bindings.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

pub(crate) use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUcontext, CUdevice, CUdevice_P2PAttribute, CUdevice_attribute, CUdeviceptr,
    CUevent, CUevent_flags, CUfunction, CUfunction_attribute, CUgraph, CUgraphExec,
    CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig,
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1 as CUmemAllocationFlags, CUmemAllocationType,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUmemorytype, CUmodule,
    CUpointer_attribute, CUstream, CUstream_flags, CUstreamCaptureMode, CUstreamCaptureStatus,
    CUuuid,
};

use cudarc::driver::sys;

use super::library::table;

table! {
    /// The functions of `libcuda.so.1` that this library calls.
    Api from sys, code CUresult {
        required {
            fn cuInit(c_uint);
            fn cuDriverGetVersion(*mut c_int);
            fn cuDeviceGetCount(*mut c_int);
            fn cuDeviceGet(*mut CUdevice, c_int);
            fn cuDeviceGetName(*mut c_char, c_int, CUdevice);
            fn cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
            fn cuDeviceTotalMem_v2(*mut usize, CUdevice);
            fn cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
            fn cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
            fn cuDeviceGetP2PAttribute(*mut c_int, CUdevice_P2PAttribute, CUdevice, CUdevice);
            fn cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
            fn cuDevicePrimaryCtxRelease_v2(CUdevice);
            fn cuCtxPushCurrent_v2(CUcontext);
            fn cuCtxPopCurrent_v2(*mut CUcontext);
            fn cuCtxEnablePeerAccess(CUcontext, c_uint);
            fn cuStreamCreate(*mut CUstream, c_uint);
            fn cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
            fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
            fn cuStreamDestroy_v2(CUstream);
            fn cuStreamSynchronize(CUstream);
            fn cuStreamQuery(CUstream);
            fn cuStreamWaitEvent(CUstream, CUevent, c_uint);
            fn cuStreamIsCapturing(CUstream, *mut CUstreamCaptureStatus);
            fn cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
            fn cuStreamEndCapture(CUstream, *mut CUgraph);
            fn cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
            fn cuGraphLaunch(CUgraphExec, CUstream);
            fn cuGraphExecDestroy(CUgraphExec);
            fn cuGraphDestroy(CUgraph);
            fn cuEventCreate(*mut CUevent, c_uint);
            fn cuEventDestroy_v2(CUevent);
            fn cuEventRecord(CUevent, CUstream);
            fn cuEventQuery(CUevent);
            fn cuEventSynchronize(CUevent);
            fn cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);
            fn cuMemAlloc_v2(*mut CUdeviceptr, usize);
            fn cuMemFree_v2(CUdeviceptr);
            fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
            fn cuMemFreeHost(*mut c_void);
            fn cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
            fn cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
            fn cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
            fn cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
            fn cuMemcpy2DAsync_v2(*const CUDA_MEMCPY2D, CUstream);
            fn cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
            fn cuModuleLoadData(*mut CUmodule, *const c_void);
            fn cuModuleUnload(CUmodule);
            fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
            fn cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
            fn cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
            fn cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
        }
        optional {
            // CUDA 12.4
            fn cuFuncLoad(CUfunction);
            // CUDA 11.4
            fn cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
            // CUDA 10.2, but not on every platform
            fn cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
            fn cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
            fn cuMemAddressFree(CUdeviceptr, usize);
            fn cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
            fn cuMemRelease(CUmemGenericAllocationHandle);
            fn cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong);
            fn cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);
            fn cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
            fn cuMemUnmap(CUdeviceptr, usize);
            fn cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
            // Where the GPU has memory pools.
            fn cuMemAllocAsync(*mut CUdeviceptr, usize, CUstream);
            fn cuMemFreeAsync(CUdeviceptr, CUstream);
        }
        unchecked {
            // The name before CUDA 12.8, which newer drivers keep.
            fn cuEventElapsedTime(*mut f32, CUevent, CUevent);
            fn cuGetErrorName(c_uint, *mut *const c_char);
            fn cuGetErrorString(c_uint, *mut *const c_char);
        }
    }
}

/// Codes that are not errors everywhere.
pub(crate) mod code {
    use std::ffi::c_uint;

    pub(crate) const SUCCESS: c_uint = 0;
    pub(crate) const INVALID_VALUE: c_uint = 1;
    pub(crate) const OUT_OF_MEMORY: c_uint = 2;
    pub(crate) const NO_DEVICE: c_uint = 100;
    pub(crate) const NOT_READY: c_uint = 600;
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: c_uint = 704;
    pub(crate) const NOT_SUPPORTED: c_uint = 801;
}
