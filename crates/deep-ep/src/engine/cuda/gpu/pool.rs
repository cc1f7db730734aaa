//! Device memory that is taken from the driver once and used again.
//!
//! A block belongs to the stream that it was taken for. When its tensor is dropped, the block is
//! given to the next tensor of that stream: what the stream was given before still comes first.
//! Another stream gets it only when its own is gone and has done all its work. So neither taking a
//! block that is here nor giving one back calls the driver.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use crate::{
    engine::cuda::driver::{
        ordered::OrderedMemory,
        stream::{Event, Stream},
    },
    error::{Error, Result},
};

/// Blocks are multiples of this, as cache lines and bulk copies like it.
const GRAIN: usize = 512;

#[derive(Debug)]
pub(super) struct Pool {
    /// Memory is taken and given back in its order.
    stream: Arc<Stream>,
    idle: Mutex<Idle>,
}

#[derive(Debug, Default)]
struct Idle {
    /// Blocks without a tensor, by their size, each with the number of its stream.
    blocks: HashMap<usize, Vec<(u64, OrderedMemory)>>,
    streams: HashMap<u64, Origin>,
    made: u64,
}

/// The stream whose blocks they are.
#[derive(Debug)]
enum Origin {
    Alive(Weak<Stream>),
    /// It is gone, and this was the end of its work.
    Ended(Event),
}

impl Origin {
    fn is_done(&self) -> bool {
        match self {
            Self::Alive(_) => false,
            Self::Ended(event) => event.is_done().unwrap_or(false),
        }
    }
}

impl Pool {
    /// `stream` is for the pool alone.
    pub(super) fn new(stream: Stream) -> Arc<Self> {
        Arc::new(Self {
            stream: Arc::new(stream),
            idle: Mutex::default(),
        })
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        // Nothing in here can be left half changed.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a stream.
    pub(super) fn enter(&self, stream: &Arc<Stream>) -> u64 {
        let mut idle = self.idle();
        idle.made += 1;
        let number = idle.made;
        idle.streams
            .insert(number, Origin::Alive(Arc::downgrade(stream)));
        number
    }

    /// The stream of that number is given nothing any more.
    pub(super) fn leave(&self, number: u64, stream: &Stream) {
        let ended = Event::untimed(&stream.context).and_then(|event| {
            event.record(stream)?;
            Ok(event)
        });
        // Without an event the blocks stay idle until the pool goes.
        if let Ok(event) = ended {
            self.idle().streams.insert(number, Origin::Ended(event));
        }
    }

    /// A block of at least `bytes` for the stream of that number.
    pub(super) fn take(self: &Arc<Self>, bytes: usize, stream: u64) -> Result<Block> {
        let size = size_of_block(bytes);
        let block = |memory| Block {
            pool: Arc::clone(self),
            memory: Some(memory),
            size,
            stream,
        };
        if let Some(memory) = self.idle().take(size, stream) {
            return Ok(block(memory));
        }
        let taken = match OrderedMemory::new(&self.stream, size, "a tensor") {
            Err(Error::OutOfMemory { .. }) => {
                self.trim()?;
                OrderedMemory::new(&self.stream, size, "a tensor")
            }
            taken => taken,
        };
        taken.map(block)
    }

    /// Gives idle blocks back to the driver, when what was enqueued so far is done.
    fn trim(&self) -> Result<()> {
        let mut idle = self.idle();
        for origin in idle.streams.values() {
            match origin {
                Origin::Ended(event) => self.stream.wait(event)?,
                Origin::Alive(stream) => {
                    if let Some(stream) = stream.upgrade() {
                        let event = Event::untimed(&stream.context)?;
                        event.record(&stream)?;
                        self.stream.wait(&event)?;
                    }
                }
            }
        }
        idle.blocks.clear();
        idle.streams
            .retain(|_, origin| matches!(origin, Origin::Alive(_)));
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // All streams are gone, since they hold the pool; what they were given may still run.
        let _ = self.trim();
    }
}

impl Idle {
    fn take(&mut self, size: usize, stream: u64) -> Option<OrderedMemory> {
        let blocks = self.blocks.get_mut(&size)?;
        let at = blocks
            .iter()
            .position(|(of, _)| *of == stream)
            .or_else(|| {
                let done = |of| self.streams.get(of).is_some_and(Origin::is_done);
                blocks.iter().position(|(of, _)| done(of))
            })?;
        Some(blocks.swap_remove(at).1)
    }
}

/// The size that is taken for `bytes`: few different ones, and at most a quarter too much.
fn size_of_block(bytes: usize) -> usize {
    let step = (bytes.max(1).next_power_of_two() / 8).max(GRAIN);
    bytes.max(1).next_multiple_of(step)
}

/// A block with its tensor.
#[derive(Debug)]
pub(super) struct Block {
    pool: Arc<Pool>,
    memory: Option<OrderedMemory>,
    size: usize,
    stream: u64,
}

impl Block {
    pub(super) fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, OrderedMemory::address)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            let mut idle = self.pool.idle();
            let blocks = idle.blocks.entry(self.size).or_default();
            blocks.push((self.stream, memory));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_few_and_hardly_larger() {
        assert_eq!(size_of_block(0), 512);
        assert_eq!(size_of_block(513), 1024);
        for bytes in [5_000, 58_720_256, 58_720_257, 1 << 40, (1 << 40) + 1] {
            let size = size_of_block(bytes);
            assert!(size >= bytes && size - bytes <= bytes / 4, "{bytes} {size}");
        }
    }
}
