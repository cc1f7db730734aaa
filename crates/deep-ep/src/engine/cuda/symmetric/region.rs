//! The regions of all ranks, as this process maps them.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use super::{Memory, PURPOSE};
use crate::{
    engine::cuda::driver::{
        context::Context,
        device::Device,
        stream::Stream,
        vmm::{Chunk, Sharing, Space},
    },
    error::{Error, Result},
    topology::Rank,
};

/// One rank's region in this process's addresses.
#[derive(Debug)]
pub(super) struct Region {
    context: Arc<Context>,
    sharing: Sharing,
    /// The GPUs of this process whose kernels use it.
    devices: Vec<Device>,
    pub(super) base: u64,
    space: Mutex<Space>,
}

impl Region {
    /// Addresses without memory. `bytes` is a multiple of `unit`.
    pub(super) fn reserve(
        context: &Arc<Context>,
        sharing: Sharing,
        devices: &[Device],
        bytes: u64,
        unit: u64,
    ) -> Result<Self> {
        let space = Space::reserve(context, bytes, unit)?;
        Ok(Self {
            context: context.clone(),
            sharing,
            devices: devices.to_vec(),
            base: space.base(),
            space: Mutex::new(space),
        })
    }

    /// Adds new memory of the context's GPU; gives the file that lets other processes map it.
    pub(super) fn grow(&self, bytes: u64) -> Result<Option<OwnedFd>> {
        let chunk = Chunk::new(&self.context, bytes, self.sharing, PURPOSE)?;
        let file = match self.sharing {
            Sharing::Process => None,
            Sharing::Host => Some(chunk.export()?),
        };
        self.map(&chunk)?;
        Ok(file)
    }

    /// Adds memory that another process made.
    pub(super) fn import(&self, bytes: u64, file: &OwnedFd) -> Result<()> {
        let chunk = Chunk::import(&self.context, bytes, file.as_fd())?;
        self.map(&chunk)
    }

    /// Sets all memory to zero and waits for it.
    pub(super) fn clear(&self) -> Result<()> {
        let stream = Stream::new(&self.context)?;
        self.space
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear(&stream)?;
        stream.synchronize()
    }

    fn map(&self, chunk: &Chunk) -> Result<()> {
        self.space
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .map(chunk, &self.devices)
    }
}

/// The regions of all ranks.
#[derive(Debug)]
pub(super) struct Regions {
    /// This rank.
    pub(super) own: Rank,
    pub(super) by_rank: Vec<Arc<Region>>,
}

impl Memory for Regions {
    fn grow(&self, bytes: u64) -> Result<Option<OwnedFd>> {
        self.by_rank[self.own.0].grow(bytes)
    }

    fn import(&self, peer: Rank, bytes: u64, file: OwnedFd) -> Result<()> {
        let region = self.by_rank.get(peer.0).filter(|_| peer != self.own);
        let region = region.ok_or_else(|| {
            let limit = format!("must be another one of {}", self.by_rank.len());
            Error::invalid("rank", peer, limit)
        })?;
        region.import(bytes, &file)
    }
}
