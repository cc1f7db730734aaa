//! Streams and the events that time them.

use std::{sync::Arc, time::Duration};

use super::{
    checked::call,
    context::Context,
    sys::{CUevent, CUevent_flags, CUstream, CUstream_flags},
};
use crate::error::Result;

/// A stream of its own, which does not wait for the legacy default stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: CUstream,
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
        })
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
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        let driver = context.device.driver;
        let _entered = context.enter()?;
        let flags = CUevent_flags::CU_EVENT_DEFAULT as u32;
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
