//! Work recorded once and launched many times.

use std::sync::Arc;

use super::{
    checked::call,
    context::Context,
    stream::Stream,
    sys::{CUgraph, CUgraphExec, CUstreamCaptureMode},
};
use crate::error::Result;

/// An executable graph.
#[derive(Debug)]
pub(crate) struct Graph {
    context: Arc<Context>,
    raw: CUgraphExec,
}

// SAFETY: a graph may be launched by any thread, one at a time, which `&mut` ensures.
unsafe impl Send for Graph {}

impl Stream {
    /// Records what `work` enqueues into this stream, without running it.
    ///
    /// # Errors
    ///
    /// Those of `work`; the stream is usable again afterwards.
    pub(crate) fn capture(&self, work: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        let driver = self.context.device.driver;
        let _entered = self.context.enter()?;
        // Other threads may go on allocating and synchronising meanwhile.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is ours.
        unsafe { call!(driver, cuStreamBeginCapture_v2(self.raw, mode))? };
        let worked = work(self);
        // SAFETY: this thread began the capture; the pointer is valid for the call.
        let recorded: Result<CUgraph> =
            unsafe { driver.out(|graph| call!(driver, cuStreamEndCapture(self.raw, graph))) };
        if let (Err(error), Ok(graph)) = (&worked, &recorded) {
            // SAFETY: the graph, if there is one, is ours and not used.
            unsafe {
                let _ = call!(driver, cuGraphDestroy(*graph));
            }
            return Err(error.clone());
        }
        worked?;
        let graph = recorded?;
        // SAFETY: the pointer is valid for the call, and the graph is ours.
        let raw =
            unsafe { driver.out(|raw| call!(driver, cuGraphInstantiateWithFlags(raw, graph, 0))) };
        // SAFETY: the executable graph does not need the one it was made from.
        unsafe {
            let _ = call!(driver, cuGraphDestroy(graph));
        }
        Ok(Graph {
            context: Arc::clone(&self.context),
            raw: raw?,
        })
    }
}

impl Graph {
    /// Enqueues the recorded work.
    ///
    /// # Safety
    ///
    /// What the recorded launches were promised must still hold until they have ended.
    pub(crate) unsafe fn launch(&mut self, stream: &Stream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: graph and stream are alive; the caller vouches for the work in it.
        unsafe {
            call!(
                self.context.device.driver,
                cuGraphLaunch(self.raw, stream.raw)
            )
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: it is ours; the driver keeps it until its last launch has ended.
            unsafe {
                let _ = call!(self.context.device.driver, cuGraphExecDestroy(self.raw));
            }
        }
    }
}
