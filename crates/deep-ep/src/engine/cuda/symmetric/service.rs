//! The peer's side of growth: a thread that maps what the owners of other regions offer.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    io::Errno,
};

use super::{
    Memory,
    record::{Answer, OFFER_BYTES, Offer},
};
use crate::{
    error::{Error, Result},
    memory::exchange::socket::{Record, receive_record, send_record},
    topology::Rank,
};

/// How long to wait for the thread to end, which may be inside the driver.
const PATIENCE: Duration = Duration::from_secs(5);

/// A peer's region, as this rank maps it.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) rank: Rank,
    /// Where its owner sends offers.
    pub(super) socket: OwnedFd,
    /// Bytes that are mapped here.
    pub(super) mapped: u64,
    /// Bytes of addresses that are reserved here.
    pub(super) reserved: u64,
    /// Offers are multiples of this.
    pub(super) unit: u64,
}

/// The thread. Dropping this stops it.
#[derive(Debug)]
pub(super) struct Service {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    /// Closed when the thread has let go of everything.
    ended: Mutex<Receiver<()>>,
}

impl Service {
    pub(super) fn start(memory: Arc<dyn Memory>, sources: Vec<Source>) -> Result<Self> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("making an event", error))?;
        let stop = Arc::new(stop);
        let (end, ended): (Sender<()>, _) = channel();
        let serve = {
            let stop = stop.clone();
            move || {
                serve(memory, sources, &stop);
                drop(end);
            }
        };
        let thread = thread::Builder::new()
            .name("deep-ep memory".into())
            .spawn(serve)
            .map_err(|error| Error::io("starting a thread that maps memory", error))?;
        Ok(Self {
            stop,
            thread: Some(thread),
            ended: Mutex::new(ended),
        })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // A counter that was 0 has room for 1.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        match ended.recv_timeout(PATIENCE) {
            Err(RecvTimeoutError::Timeout) => {
                // It owns what it uses, and ends when the driver lets it.
                tracing::warn!("the driver does not come back from mapping a peer's memory");
            }
            Ok(()) | Err(RecvTimeoutError::Disconnected) => {
                if let Some(thread) = self.thread.take() {
                    let _ = thread.join();
                }
            }
        }
    }
}

/// Maps and answers until it is told to stop. A source that is lost stays mapped.
fn serve(memory: Arc<dyn Memory>, mut sources: Vec<Source>, stop: &OwnedFd) {
    loop {
        let ready = match wait(&sources, stop) {
            Ok(Some(ready)) => ready,
            Ok(None) => return,
            Err(Errno::INTR) => continue,
            Err(error) => {
                tracing::error!(%error, "waiting for peers that add memory");
                return;
            }
        };
        let mut ready = ready.into_iter();
        sources.retain_mut(|source| match ready.next() {
            Some(true) => source.serve(&*memory),
            _ => true,
        });
    }
}

/// Which sources sent something, or closed; `None`: it is time to stop.
fn wait(sources: &[Source], stop: &OwnedFd) -> Result<Option<Vec<bool>>, Errno> {
    let sockets = sources.iter().map(|source| &source.socket);
    let mut fds: Vec<_> = std::iter::once(stop)
        .chain(sockets)
        .map(|fd| PollFd::new(fd, PollFlags::IN))
        .collect();
    poll(&mut fds, None)?;
    let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
    if ready.next() == Some(true) {
        return Ok(None);
    }
    Ok(Some(ready.collect()))
}

impl Source {
    /// Takes one record; `false` if the connection is of no use any more.
    fn serve(&mut self, memory: &dyn Memory) -> bool {
        let rank = self.rank;
        let (bytes, files) = match receive_record::<OFFER_BYTES>(&self.socket) {
            Record::Nothing => return true,
            Record::Closed => {
                tracing::debug!(%rank, "a peer's memory cannot grow any more: it is gone");
                return false;
            }
            Record::Other => {
                tracing::warn!(%rank, "a peer sent an invalid record");
                return false;
            }
            Record::Whole(bytes, files) => (bytes, files),
        };
        let Some(offer) = Offer::decode(&bytes) else {
            tracing::warn!(%rank, "a peer sent an invalid record");
            return false;
        };
        let mapped = self.map(offer, files, memory);
        let refused = mapped.err().map(|error| error.to_string());
        if let Some(why) = &refused {
            tracing::warn!(%rank, why, "a peer's memory could not be mapped");
        }
        let answer = Answer {
            end: offer.end().unwrap_or(u64::MAX),
            refused,
        };
        // There is room unless the owner never reads; then it has no use for answers.
        send_record(&self.socket, &answer.encode(), None).is_ok()
    }

    fn map(&mut self, offer: Offer, mut files: Vec<OwnedFd>, memory: &dyn Memory) -> Result<()> {
        let bad = |what: &str, value: u64, limit: String| {
            Err(Error::invalid(what.to_owned(), value, limit))
        };
        if offer.offset != self.mapped {
            return bad("offset", offer.offset, format!("must be {}", self.mapped));
        }
        if offer.bytes == 0 || !offer.bytes.is_multiple_of(self.unit) {
            let limit = format!("must be a multiple of {}", self.unit);
            return bad("size", offer.bytes, limit);
        }
        let end = offer.end().filter(|&end| end <= self.reserved);
        let Some(end) = end else {
            let limit = format!("must end within {}", self.reserved);
            return bad("size", offer.bytes, limit);
        };
        let count = files.len() as u64;
        let (Some(file), true) = (files.pop(), files.is_empty()) else {
            return bad("number of files", count, "must be 1".into());
        };
        memory.import(self.rank, offer.bytes, file)?;
        self.mapped = end;
        Ok(())
    }
}
