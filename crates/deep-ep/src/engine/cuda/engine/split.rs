//! Split launches: no kernel waits for one that has not ended. Every part of a call is a launch of
//! its own, the host waits for it, and all ranks meet before the next. For compute-sanitizer and
//! debuggers, which run one kernel at a time.

use crate::{
    bootstrap::Communicator, buffer::BufferConfig, engine::cuda::driver::stream::Stream,
    error::Result,
};

/// The ranks that meet between the parts.
pub(crate) struct Split {
    communicator: Communicator,
}

impl Split {
    pub(crate) fn from_config(communicator: &Communicator, config: &BufferConfig) -> Option<Self> {
        config.split_launches.then(|| Self {
            communicator: communicator.clone(),
        })
    }

    /// Waits until all ranks have done what they have enqueued.
    pub(crate) fn meet(&self, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        self.communicator.barrier()
    }
}
