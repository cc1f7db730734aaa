//! Streams, events and graphs of a GPU.

use std::{fmt, sync::Arc, time::Duration};

use super::{Gpu, Shared};
use crate::{
    engine::cuda::driver::{
        graph::Graph as DriverGraph,
        stream::{Event, Stream},
    },
    error::{Error, Result},
};

/// A stream: what it is given is done in order, besides what other streams are given.
///
/// Tensors that were made on a stream belong to it, see [`Gpu`].
pub struct GpuStream {
    pub(super) gpu: Arc<Shared>,
    pub(super) stream: Arc<Stream>,
    pub(super) number: u64,
    /// Whether its handle was given away.
    public: bool,
}

impl GpuStream {
    pub(super) fn new(gpu: &Arc<Shared>, public: bool) -> Result<Self> {
        let stream = Arc::new(Stream::new(&gpu.context)?);
        Ok(Self {
            gpu: Arc::clone(gpu),
            number: gpu.pool.enter(&stream),
            stream,
            public,
        })
    }

    /// For the `stream` of a call's input. The driver's stream outlives this value, so that the
    /// handle stays valid.
    pub fn as_stream(&self) -> crate::Stream {
        // SAFETY: a stream whose handle can be had is never destroyed; the bridge, which has others,
        // ends its calls before it drops them.
        unsafe { crate::Stream::from_raw(self.stream.raw as usize) }
    }

    /// Waits until everything that the stream was given is done.
    ///
    /// # Errors
    /// [`Error::Cuda`]: also what went wrong in a kernel before.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Lets what the stream is given from now on wait for `event`.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn wait(&self, event: &GpuEvent) -> Result<()> {
        self.stream.wait(&event.0)
    }

    /// Whether what the stream is given is recorded into a graph.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn is_capturing(&self) -> Result<bool> {
        self.stream.is_capturing()
    }

    /// An error if the stream is being captured: `what` cannot be recorded.
    pub(super) fn not_capturing(&self, what: &str) -> Result<()> {
        match self.stream.is_capturing()? {
            false => Ok(()),
            true => Err(Error::invalid(
                "stream",
                "being captured",
                format!("must not be: {what} cannot be recorded"),
            )),
        }
    }
}

impl Drop for GpuStream {
    fn drop(&mut self) {
        self.gpu.pool.leave(self.number, &self.stream);
        if self.public {
            // Copies of its handle may still be used.
            std::mem::forget(Arc::clone(&self.stream));
        }
    }
}

impl fmt::Debug for GpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "stream {:#x} of GPU {}",
            self.stream.raw.addr(),
            self.gpu.ordinal()
        )
    }
}

/// A point in a stream, with its time.
#[derive(Debug)]
pub struct GpuEvent(pub(super) Event);

impl GpuEvent {
    /// Puts the event behind what the stream was given so far.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn record(&self, stream: &GpuStream) -> Result<()> {
        self.0.record(&stream.stream)
    }

    /// Waits until everything before the event is done.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn synchronize(&self) -> Result<()> {
        self.0.synchronize()
    }

    /// GPU time from `start` to this event; both must have come.
    ///
    /// # Errors
    /// [`Error::Cuda`], also if one was not recorded or has not come.
    pub fn elapsed(&self, start: &Self) -> Result<Duration> {
        self.0.since(&start.0)
    }
}

/// Work that was recorded once and can be launched many times, with what recording it returned.
pub struct Graph<T = ()> {
    graph: DriverGraph,
    results: T,
}

impl<T> Graph<T> {
    pub(super) fn new(
        gpu: &Gpu,
        stream: &GpuStream,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<Self> {
        gpu.owns(stream)?;
        let mut results = None;
        let graph = stream.stream.capture(|_| {
            results = Some(work()?);
            Ok(())
        })?;
        match results {
            Some(results) => Ok(Self { graph, results }),
            None => unreachable!("a capture without an error ran its work"),
        }
    }

    /// Gives the recorded work to a stream.
    ///
    /// # Safety
    /// Until the work is done, everything that it reads or writes must live: tensors, loans, handles
    /// and the buffers whose calls it has. What recording made is kept in the graph if the recording
    /// returned it. Nothing else may use that memory meanwhile. Calls of a [`Buffer`](crate::Buffer)
    /// in it are collective: every rank must launch the same, in the same order.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub unsafe fn launch(&mut self, stream: &GpuStream) -> Result<()> {
        // SAFETY: as the caller says.
        unsafe { self.graph.launch(&stream.stream) }
    }

    /// What recording returned, for example the outputs of the recorded calls.
    pub fn results(&self) -> &T {
        &self.results
    }
}

impl<T> fmt::Debug for Graph<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("graph")
    }
}
