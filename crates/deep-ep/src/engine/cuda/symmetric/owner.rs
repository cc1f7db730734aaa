//! The owner's side of growth: makes memory, offers it to all peers, waits for their answers.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use super::{
    Memory, OPERATION, PURPOSE,
    record::{ANSWER_BYTES, Answer, Offer},
};
use crate::{
    error::{Error, Result},
    memory::exchange::socket::{Record, receive_record, send_record},
    topology::Rank,
};

/// The stage that errors name.
const STAGE: &str = "mapping by peers";

/// A rank's own region and the peers that map it.
#[derive(Debug)]
pub(super) struct Owner {
    /// Sizes are multiples of this, a power of two.
    pub(super) unit: u64,
    pub(super) reserved: u64,
    /// Bytes that this rank has mapped. Peers may be behind.
    pub(super) mapped: u64,
    /// Empty between threads: nobody else has to map anything.
    pub(super) peers: Vec<Peer>,
}

/// A peer that maps this rank's region.
#[derive(Debug)]
pub(super) struct Peer {
    rank: Rank,
    state: State,
    /// What it has not answered yet, oldest first.
    open: VecDeque<Arc<(Offer, OwnedFd)>>,
    /// How many of these it was sent.
    sent: usize,
}

#[derive(Debug)]
enum State {
    Connected(OwnedFd),
    /// It closed its end: nobody is there who would need the memory.
    Gone,
    /// It could not map an offer, or answered nonsense. It cannot map later ones either.
    Refused(String),
}

impl Owner {
    /// Maps at least `bytes` in all, here and at all peers that are alive, and returns how many
    /// there are. After a failure the next call waits for the answers that are still open.
    pub(super) fn commit(
        &mut self,
        memory: &dyn Memory,
        bytes: u64,
        timeout: Duration,
    ) -> Result<u64> {
        let target = bytes.checked_next_multiple_of(self.unit);
        let target = target.filter(|&target| target <= self.reserved);
        let target = target.ok_or(Error::OutOfMemory {
            purpose: PURPOSE,
            requested: bytes,
            limit: self.reserved,
        })?;
        self.nobody_refused()?;
        if target > self.mapped {
            let offer = Offer {
                offset: self.mapped,
                bytes: target - self.mapped,
            };
            let file = memory.grow(offer.bytes).map_err(|error| match error {
                Error::OutOfMemory { purpose, limit, .. } => Error::OutOfMemory {
                    purpose,
                    requested: target,
                    limit,
                },
                other => other,
            })?;
            self.mapped = target;
            self.offer(offer, file);
        }
        self.settle(timeout)?;
        Ok(self.mapped)
    }

    /// Leaves an offer with each peer. Without peers there is no file either.
    fn offer(&mut self, offer: Offer, file: Option<OwnedFd>) {
        if let Some(file) = file {
            let offer = Arc::new((offer, file));
            for peer in &mut self.peers {
                peer.open.push_back(offer.clone());
            }
        }
    }

    /// Waits until every peer that is alive has answered everything.
    fn settle(&mut self, timeout: Duration) -> Result<()> {
        let begun = Instant::now();
        loop {
            for peer in &mut self.peers {
                peer.send()?;
                peer.receive();
            }
            self.nobody_refused()?;
            let missing: Vec<_> = self.peers.iter().filter_map(Peer::missing).collect();
            if missing.is_empty() {
                return Ok(());
            }
            let waited = begun.elapsed();
            if waited >= timeout {
                return Err(Error::Timeout {
                    operation: OPERATION,
                    stage: STAGE.into(),
                    ranks: missing,
                    waited,
                });
            }
            self.sleep(timeout - waited)?;
        }
    }

    fn nobody_refused(&self) -> Result<()> {
        let refusal = self.peers.iter().find_map(Peer::refusal);
        refusal.map_or(Ok(()), Err)
    }

    fn sleep(&self, longest: Duration) -> Result<()> {
        let mut fds: Vec<_> = self.peers.iter().filter_map(Peer::awaited).collect();
        let longest = Timespec::try_from(longest).ok();
        match poll(&mut fds, longest.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(Error::io("waiting for peers to map memory", error)),
        }
    }
}

impl Peer {
    /// A peer that has mapped what there is, and how to reach it.
    pub(super) fn new(rank: Rank, socket: OwnedFd) -> Self {
        Self {
            rank,
            state: State::Connected(socket),
            open: VecDeque::new(),
            sent: 0,
        }
    }

    /// Sends what it was not sent yet, as far as there is room.
    fn send(&mut self) -> Result<()> {
        let State::Connected(socket) = &self.state else {
            self.open.clear();
            return Ok(());
        };
        while let Some(next) = self.open.get(self.sent) {
            let (offer, file) = &**next;
            match send_record(socket, &offer.encode(), Some(file.as_fd())) {
                Ok(()) => self.sent += 1,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                // An answer may still be there to be read.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(error) => {
                    let what = format!("passing memory to rank {}", self.rank);
                    return Err(Error::io(what, error));
                }
            }
        }
        Ok(())
    }

    /// Takes the answers that have come.
    fn receive(&mut self) {
        while let State::Connected(socket) = &self.state {
            match receive_record::<ANSWER_BYTES>(socket) {
                Record::Nothing => return,
                Record::Closed => self.state = State::Gone,
                Record::Other => self.refuse("it sent an invalid record".into()),
                Record::Whole(bytes, _files) => self.take(Answer::decode(&bytes)),
            }
        }
    }

    fn take(&mut self, answer: Option<Answer>) {
        let first = self.open.front().filter(|_| self.sent > 0);
        match (answer, first) {
            (Some(answer), Some(first)) if first.0.end() == Some(answer.end) => {
                self.open.pop_front();
                self.sent -= 1;
                if let Some(why) = answer.refused {
                    self.refuse(why);
                }
            }
            _ => self.refuse("it answered what it was not asked".into()),
        }
    }

    fn refuse(&mut self, why: String) {
        self.state = State::Refused(why);
        self.open.clear();
        self.sent = 0;
    }

    fn refusal(&self) -> Option<Error> {
        match &self.state {
            State::Refused(why) => Some(Error::Bootstrap {
                stage: OPERATION,
                reason: format!("rank {} could not map this rank's memory: {why}", self.rank),
            }),
            _ => None,
        }
    }

    /// Its rank, if an answer has to be waited for.
    fn missing(&self) -> Option<Rank> {
        let missing = matches!(self.state, State::Connected(_)) && !self.open.is_empty();
        missing.then_some(self.rank)
    }

    /// What to wait for.
    fn awaited(&self) -> Option<PollFd<'_>> {
        let State::Connected(socket) = &self.state else {
            return None;
        };
        self.missing()?;
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, self.sent < self.open.len());
        Some(PollFd::new(socket, flags))
    }
}
