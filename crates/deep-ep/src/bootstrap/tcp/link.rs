//! The thread that moves frames and watches the peers, and what it shares with the callers.
//!
//! Everything that must keep its order goes through [`State`]: rounds, departures, aborts, and the
//! queue of what is to be sent. At rank 0 this makes one order for the whole group: a result
//! that is queued before a departure reaches every member before it.

use std::{
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use super::{
    super::{
        liveness::{Departure, Liveness},
        lock,
        round::{Abort, Gathered, Round},
    },
    connection::{Broken, Connection, Waker, poll_until},
    frame::{Block, Frame, Kind, decode_ranks, encode, encode_ranks},
};
use crate::topology::Rank;

/// The longest that leaving may take, whatever the peers do.
pub(super) const LEAVING: Duration = Duration::from_secs(1);

/// What callers and the thread share.
pub(super) struct Shared {
    pub(super) rank: Rank,
    pub(super) size: usize,
    pub(super) state: Mutex<State>,
    /// The round, or what ends it, has changed.
    pub(super) changed: Condvar,
    pub(super) waker: Waker,
    pub(super) liveness: Arc<Liveness>,
}

pub(super) struct State {
    pub(super) round: Round<Block>,
    /// To be sent to every peer, in this order.
    outgoing: Vec<Block>,
    /// The number of the first round whose results the system may not have taken over yet.
    pub(super) flushed: u64,
    pub(super) leaving: bool,
}

impl State {
    pub(super) fn new(size: usize) -> Self {
        Self {
            round: Round::new(size),
            outgoing: Vec::new(),
            flushed: 0,
            leaving: false,
        }
    }

    /// Queues frames for every peer: for rank 0 of a member, for all others of rank 0.
    pub(super) fn send(&mut self, frames: impl IntoIterator<Item = Frame>) {
        encode(frames, &mut self.outgoing);
    }

    /// Queues everyone's contributions to round `sequence`.
    pub(super) fn send_gathered(&mut self, sequence: u64, all: &Gathered<Block>) {
        let frames = all.iter().enumerate().map(|(rank, bytes)| Frame {
            sequence,
            ..Frame::about(Kind::Gathered, Rank(rank), bytes.clone())
        });
        self.send(frames);
    }

    /// Gives up on behalf of `by`, and at rank 0 tells everybody.
    pub(super) fn give_up(&mut self, by: Rank, missing: Vec<Rank>, is_hub: bool) {
        if is_hub && self.round.failure().is_none() {
            self.send([Frame::about(Kind::Abort, by, encode_ranks(&missing))]);
        }
        self.round.abort(Abort { by, missing });
    }
}

impl Shared {
    pub(super) fn is_hub(&self) -> bool {
        self.rank == Rank(0)
    }

    /// Records that `rank` is gone, frees those who wait for it, and tells those who asked.
    fn depart(&self, rank: Rank, how: Departure) {
        let news = self.liveness.record(rank, how);
        let mut state = lock(&self.state);
        if state.round.depart(rank) && self.is_hub() {
            let code = u8::from(how == Departure::Lost);
            state.send([Frame::about(Kind::Gone, rank, [code])]);
        }
        drop(state);
        self.changed.notify_all();
        news.tell();
    }
}

/// What to do with a connection after a frame.
enum Next {
    Go,
    /// The peer said goodbye.
    Left,
    /// The peer did what it must not do.
    Violation(&'static str),
}

struct Peer {
    rank: Rank,
    connection: Connection,
}

/// What came on a member's connection together with the start.
#[derive(Default)]
pub(super) struct Early {
    pub(super) frames: Vec<Frame>,
    /// What broke the connection behind them.
    pub(super) broken: Option<Broken>,
}

/// The state of the I/O thread.
pub(super) struct Link {
    shared: Arc<Shared>,
    peers: Vec<Peer>,
    scratch: Vec<u8>,
}

impl Link {
    pub(super) fn new(shared: Arc<Shared>, peers: Vec<(Rank, Connection)>) -> Self {
        let peers = peers.into_iter();
        Self {
            shared,
            peers: peers
                .map(|(rank, connection)| Peer { rank, connection })
                .collect(),
            scratch: vec![0; 64 << 10],
        }
    }

    /// Runs until the communicator is dropped.
    pub(super) fn run(mut self, early: Early) {
        if let Some(first) = self.peers.first().map(|peer| peer.rank) {
            self.take(first, early.frames, early.broken);
        }
        let mut leave_by = None;
        loop {
            let (blocks, leaving) = {
                let mut state = lock(&self.shared.state);
                if state.leaving && leave_by.is_none() {
                    leave_by = Some(Instant::now() + LEAVING);
                    state.send([Frame::bare(Kind::Bye)]);
                }
                (std::mem::take(&mut state.outgoing), state.leaving)
            };
            self.send(&blocks);
            if leaving {
                self.close_flushed();
                let late = leave_by.is_some_and(|by| Instant::now() >= by);
                if self.peers.is_empty() || late {
                    return;
                }
            }
            for (rank, events) in self.wait(leave_by) {
                if !events.is_empty() {
                    self.receive(rank);
                }
            }
        }
    }

    fn send(&mut self, blocks: &[Block]) {
        for Peer { connection, .. } in &mut self.peers {
            for block in blocks {
                connection.queue(block.clone());
            }
            connection.flush();
        }
        if self.peers.iter().all(|peer| peer.connection.is_flushed()) {
            let mut state = lock(&self.shared.state);
            if state.outgoing.is_empty() && state.flushed != state.round.sequence() {
                state.flushed = state.round.sequence();
                self.shared.changed.notify_all();
            }
        }
    }

    /// Ends the sending side where everything is sent. The receiving side is read until the peer
    /// closes as well: closing it with bytes unread would make the system throw away what the peer
    /// has not read yet.
    fn close_flushed(&mut self) {
        for Peer { connection, .. } in &mut self.peers {
            if connection.is_flushed() {
                connection.close_write();
            }
        }
    }

    /// Waits for something to do, and says what happened at each peer.
    fn wait(&self, deadline: Option<Instant>) -> Vec<(Rank, PollFlags)> {
        let peers = self.peers.iter();
        let mut fds: Vec<_> = peers
            .map(|peer| PollFd::new(&peer.connection, peer.connection.interest()))
            .collect();
        fds.push(PollFd::new(&self.shared.waker, PollFlags::IN));
        poll_until(&mut fds, deadline);
        self.shared.waker.reset();
        // What can be written again is written at the beginning of the next turn.
        let read = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        let ranks = self.peers.iter().map(|peer| peer.rank);
        ranks
            .zip(fds.iter().map(|fd| fd.revents() & read))
            .collect()
    }

    fn receive(&mut self, rank: Rank) {
        let Some(peer) = self.peers.iter_mut().find(|peer| peer.rank == rank) else {
            return;
        };
        let mut frames = Vec::new();
        let outcome = peer.connection.receive(&mut self.scratch, &mut frames);
        self.take(rank, frames, outcome.err());
    }

    /// Handles what came from `rank`, and then that its connection broke, if it did.
    fn take(&mut self, rank: Rank, frames: Vec<Frame>, broken: Option<Broken>) {
        for frame in frames {
            let next = if self.shared.is_hub() {
                self.at_hub(rank, frame)
            } else {
                self.at_member(frame)
            };
            match next {
                Next::Go => {}
                Next::Left => return self.remove(rank, Departure::Left),
                Next::Violation(what) => {
                    tracing::error!(%rank, what, "a rank broke the protocol");
                    return self.remove(rank, Departure::Lost);
                }
            }
        }
        if let Some(broken) = broken {
            if !lock(&self.shared.state).leaving {
                tracing::warn!(%rank, reason = %broken, "a rank was lost");
            }
            self.remove(rank, Departure::Lost);
        }
    }

    /// Drops a connection. Who leaves does not care any more that others do.
    fn remove(&mut self, rank: Rank, how: Departure) {
        self.peers.retain(|peer| peer.rank != rank);
        if !lock(&self.shared.state).leaving {
            self.shared.depart(rank, how);
        }
    }

    /// A frame of a member, at rank 0.
    fn at_hub(&self, from: Rank, frame: Frame) -> Next {
        let mut state = lock(&self.shared.state);
        let sequence = state.round.sequence();
        let current = frame.sequence == sequence;
        match frame.kind {
            // It did not know yet that nothing can complete.
            Kind::Contribution if state.round.failure().is_some() => Next::Go,
            Kind::Contribution => {
                if !current {
                    return Next::Violation("a contribution to another round");
                }
                match state.round.put(from, frame.payload) {
                    Ok(None) => {}
                    Ok(Some(all)) => {
                        state.send_gathered(sequence, &all);
                        self.shared.changed.notify_all();
                    }
                    Err(_) => return Next::Violation("a contribution twice"),
                }
                Next::Go
            }
            Kind::GiveUp => {
                // A round that has completed meanwhile is on its way to the sender.
                if current && state.round.failure().is_none() {
                    let missing = state.round.missing();
                    state.give_up(from, missing, true);
                    self.shared.changed.notify_all();
                }
                Next::Go
            }
            Kind::Bye => Next::Left,
            _ => Next::Violation("a frame that only rank 0 sends"),
        }
    }

    /// A frame of rank 0, at a member.
    fn at_member(&self, frame: Frame) -> Next {
        let rank = Rank(frame.rank as usize);
        let (me, size) = (self.shared.rank, self.shared.size);
        if rank.0 >= size {
            return Next::Violation("a rank outside the group");
        }
        match frame.kind {
            Kind::Gathered if rank == me => Next::Go,
            Kind::Gathered => {
                let mut state = lock(&self.shared.state);
                let asked = state.round.has_put(me);
                if state.round.failure().is_some() {
                    // This rank has given up since it asked.
                    return Next::Go;
                }
                if !asked || frame.sequence != state.round.sequence() {
                    return Next::Violation("a result out of turn");
                }
                match state.round.put(rank, frame.payload) {
                    Ok(None) => {}
                    Ok(Some(_)) => self.shared.changed.notify_all(),
                    Err(_) => return Next::Violation("a result twice"),
                }
                Next::Go
            }
            Kind::Gone if rank != me && rank != Rank(0) => {
                let how = match *frame.payload {
                    [0] => Departure::Left,
                    _ => Departure::Lost,
                };
                self.shared.depart(rank, how);
                Next::Go
            }
            Kind::Abort => {
                let missing = decode_ranks(&frame.payload, size);
                lock(&self.shared.state).give_up(rank, missing, false);
                self.shared.changed.notify_all();
                Next::Go
            }
            Kind::Bye => Next::Left,
            _ => Next::Violation("a frame that does not belong here"),
        }
    }
}

/// However the thread ends, callers do not wait for it.
impl Drop for Link {
    fn drop(&mut self) {
        let abandoned: Vec<_> = self.peers.drain(..).map(|peer| peer.rank).collect();
        if !lock(&self.shared.state).leaving {
            for rank in abandoned {
                self.shared.depart(rank, Departure::Lost);
            }
        }
    }
}
