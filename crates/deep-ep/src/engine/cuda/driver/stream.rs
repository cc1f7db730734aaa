//! Streams and the events that time them.

use std::{sync::Arc, time::Duration};

use super::{
    checked::call,
    context::Context,
    sys::{
        CUDA_MEMCPY2D, CUevent, CUevent_flags, CUmemorytype, CUstream, CUstream_flags,
        CUstreamCaptureStatus, code,
    },
};
use crate::error::Result;

/// A stream: one of its own, which does not wait for the legacy default stream, or a caller's.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: CUstream,
    owned: bool,
}

// SAFETY: any thread may enqueue into a stream; the driver locks it.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        let driver = context.device.driver;
        let _entered = context.enter()?;
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is valid for the call, and a context is current.
        let raw = unsafe { driver.out(|raw| call!(driver, cuStreamCreate(raw, flags)))? };
        Ok(Self {
            context: Arc::clone(context),
            raw,
            owned: true,
        })
    }

    /// As [`new`](Self::new), served before streams of the usual priority where both could run.
    pub(crate) fn urgent(context: &Arc<Context>) -> Result<Self> {
        let driver = context.device.driver;
        let _entered = context.enter()?;
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the pointers are valid for the calls, and a context is current.
        let raw = unsafe {
            call!(
                driver,
                cuCtxGetStreamPriorityRange(&mut least, &mut greatest)
            )?;
            driver.out(|raw| call!(driver, cuStreamCreateWithPriority(raw, flags, greatest)))?
        };
        Ok(Self {
            context: Arc::clone(context),
            raw,
            owned: true,
        })
    }

    /// A caller's stream; 0 is the legacy default stream.
    ///
    /// # Safety
    ///
    /// `raw` must be a stream of `context` that outlives what is enqueued here.
    pub(crate) unsafe fn borrowed(context: &Arc<Context>, raw: usize) -> Self {
        Self {
            context: Arc::clone(context),
            raw: raw as CUstream,
            owned: false,
        }
    }

    /// Lets what is enqueued from now on wait for `event`.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: both are alive; the only flag that exists is 0 for streams that are not captured.
        unsafe {
            call!(
                self.context.device.driver,
                cuStreamWaitEvent(self.raw, event.raw, 0)
            )
        }
    }

    /// Whether what is enqueued is recorded into a graph instead of run.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let driver = self.context.device.driver;
        let _entered = self.context.enter()?;
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive, and the pointer is valid for the call.
        unsafe { call!(driver, cuStreamIsCapturing(self.raw, &mut status))? };
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Whether everything that was enqueued is done.
    ///
    /// # Errors
    ///
    /// Also what went wrong in a kernel before.
    pub(crate) fn is_done(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        let driver = self.context.device.driver;
        // SAFETY: the stream is alive.
        match unsafe { (driver.api.cuStreamQuery)(self.raw) } {
            code::NOT_READY => Ok(false),
            done => driver.check("cuStreamQuery", done).map(|()| true),
        }
    }

    /// Enqueues a copy of `rows` rows of `bytes` by a copy engine. Places are an address and how far
    /// rows are apart.
    ///
    /// # Safety
    ///
    /// Both places must be memory of this process's GPUs that holds the rows until the copy is done.
    pub(crate) unsafe fn copy_rows(
        &self,
        to: (u64, u64),
        from: (u64, u64),
        bytes: u64,
        rows: usize,
    ) -> Result<()> {
        let driver = self.context.device.driver;
        let _entered = self.context.enter()?;
        if to.1 == bytes && from.1 == bytes {
            // SAFETY: as the caller says; rows lie behind one another.
            return unsafe {
                let all = bytes as usize * rows;
                call!(driver, cuMemcpyDtoDAsync_v2(to.0, from.0, all, self.raw))
            };
        }
        let copy = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: from.0,
            srcArray: std::ptr::null_mut(),
            srcPitch: from.1 as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: to.0,
            dstArray: std::ptr::null_mut(),
            dstPitch: to.1 as usize,
            WidthInBytes: bytes as usize,
            Height: rows,
        };
        // SAFETY: as the caller says.
        unsafe { call!(driver, cuMemcpy2DAsync_v2(&copy, self.raw)) }
    }

    /// Enqueues setting `bytes` bytes at `address` to 0.
    ///
    /// # Safety
    ///
    /// The memory must be this process's, and stay until that is done.
    pub(crate) unsafe fn zero(&self, address: u64, bytes: u64) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: as the caller says.
        unsafe {
            call!(
                self.context.device.driver,
                cuMemsetD8Async(address, 0, bytes as usize, self.raw)
            )
        }
    }

    /// Waits until everything that was enqueued is done.
    ///
    /// # Errors
    ///
    /// Also what went wrong in a kernel before.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is ours.
        unsafe { call!(self.context.device.driver, cuStreamSynchronize(self.raw)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: it is ours and not used again; the driver keeps it until its work is done.
            unsafe {
                let _ = call!(self.context.device.driver, cuStreamDestroy_v2(self.raw));
            }
        }
    }
}

/// A point in a stream, with its time.
#[derive(Debug)]
pub(crate) struct Event {
    context: Arc<Context>,
    raw: CUevent,
}

// SAFETY: any thread may record and query an event; the driver locks it.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that can be timed.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        Self::with_flags(context, CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// An event that only orders streams, which costs less.
    pub(crate) fn untimed(context: &Arc<Context>) -> Result<Self> {
        Self::with_flags(context, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(context: &Arc<Context>, flags: CUevent_flags) -> Result<Self> {
        let driver = context.device.driver;
        let _entered = context.enter()?;
        let flags = flags as u32;
        // SAFETY: the pointer is valid for the call, and a context is current.
        let raw = unsafe { driver.out(|raw| call!(driver, cuEventCreate(raw, flags)))? };
        Ok(Self {
            context: Arc::clone(context),
            raw,
        })
    }

    /// Puts the event behind what the stream has been given so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: both are alive.
        unsafe {
            call!(
                self.context.device.driver,
                cuEventRecord(self.raw, stream.raw)
            )
        }
    }

    /// Whether everything before it is done.
    pub(crate) fn is_done(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        let driver = self.context.device.driver;
        // SAFETY: the event is alive.
        match unsafe { (driver.api.cuEventQuery)(self.raw) } {
            code::NOT_READY => Ok(false),
            done => driver.check("cuEventQuery", done).map(|()| true),
        }
    }

    /// Waits until everything before it is done.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is alive.
        unsafe { call!(self.context.device.driver, cuEventSynchronize(self.raw)) }
    }

    /// GPU time from `start` to this event; both must be complete.
    pub(crate) fn since(&self, start: &Self) -> Result<Duration> {
        let driver = self.context.device.driver;
        let _entered = self.context.enter()?;
        // SAFETY: both are alive, and the pointer is valid for the call.
        let milliseconds: f32 =
            unsafe { driver.out(|ms| call!(driver, cuEventElapsedTime(ms, start.raw, self.raw)))? };
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) * 1e-3).unwrap_or_default())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: it is ours and not used again.
            unsafe {
                let _ = call!(self.context.device.driver, cuEventDestroy_v2(self.raw));
            }
        }
    }
}
