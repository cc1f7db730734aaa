//! Ranks that are processes and meet over TCP.
//!
//! # Protocol
//!
//! A star. Rank 0, the hub, listens on the port until all have come, then closes it; what follows
//! runs on the connections made by then.
//!
//! ```text
//!   member r (1..R)                    rank 0
//!   ---------------------------------- ----------------------------------------------------
//!   connect, again until the deadline  accept; one thread examines one connection
//!     <------ HELLO, CHALLENGE, PROOF, VERDICT: see auth ------->
//!     <- Waiting (who is missing)      4 times a second
//!     <- Start                         all are there; the port is closed, the secret's file gone
//!      | or Failed (why)               the deadline passed
//!
//!   Contribution n ->                  collects number n of all, its own too
//!     <- Gathered n: 0, 1, .. R-1      to everybody, once all are there
//!
//!   GiveUp n ->                        this member's deadline for n has passed
//!     <- Abort (by, who was missing)   to everybody, also when rank 0's own has
//!     <- Gone (r, left or lost)        to everybody, when member r is gone
//!   Bye ->                             member leaves; rank 0 closes
//!     <- Bye                           rank 0 leaves; member closes
//! ```
//!
//! **Who is admitted.** Only who proves to know the secret, has the same protocol version and world
//! size and a rank that is not there yet; others are told why and closed. Who sends anything else,
//! or nothing, is closed, after three seconds at the latest. See `listen`.
//!
//! **What is bounded.** A contribution, 16 MiB; every other frame, see `frame::Kind`; a reason, 512
//! bytes; handshakes, fixed sizes. Lengths are checked before memory is taken, and memory grows
//! with what has come. A member has at most one contribution under way, so rank 0 keeps at most R
//! contributions and, while they are sent, one copy of them. Ranks, sequence numbers and
//! lengths in frames are checked against what this side knows; a peer that breaks the protocol is
//! disconnected and counts as lost.
//!
//! **What a dead peer looks like.** A process that dies is closed by its system at once: end of
//! file, or a reset, without a `Bye` before it. Rank 0 sees that and tells the others; members see
//! it of rank 0. A host that dies is noticed by TCP keep-alive, or by bytes that stay
//! unacknowledged, after about 15 seconds. Rank 0 is the only one who sees all: once it is gone,
//! members learn nothing more about each other. A process that is stopped, or busy elsewhere, is
//! not gone; only deadlines tell.
//!
//! **Time.** One thread for each communicator does all reading and writing, without ever
//! blocking; callers wait with a deadline. Leaving sends `Bye` behind what is queued and waits for
//! the peers to close, a second at most.

mod auth;
mod connection;
mod frame;
mod join;
mod link;
mod listen;
mod secret_file;
#[cfg(test)]
mod tests;

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use self::{
    connection::Waker,
    frame::{Block, Frame, Kind},
    link::{Early, LEAVING, Link, Shared, State},
};
use super::{
    check_rank, deadline_after,
    liveness::Liveness,
    lock,
    round::{Abort, Failure, Gathered, Refused},
};
use crate::{
    error::{Error, Result},
    settings::Secret,
    topology::Rank,
};

/// How long a member whose deadline has passed waits for rank 0 to say who was missing.
const ACCOUNT: Duration = Duration::from_millis(500);

/// How to meet over TCP: [`Communicator::tcp`](super::Communicator::tcp).
#[derive(Debug, Clone)]
pub struct TcpConfig {
    /// This rank, below `world_size`.
    pub rank: usize,
    /// The number of ranks, the same on all.
    pub world_size: usize,
    /// This rank's number on its host.
    pub local_rank: usize,
    /// The host of rank 0, a name or an address. Rank 0 listens there if it is an address of
    /// its host, else on all.
    pub address: String,
    /// The port on which rank 0 listens, not 0.
    pub port: u16,
    /// What all ranks know and nobody else. May be left out if `address` is a loopback address
    /// (or `localhost`): rank 0 then leaves one in a file that only its user can read.
    pub secret: Option<Secret>,
    /// The deadline of the rendezvous, and of each collective call unless
    /// [`Communicator::set_timeout`](super::Communicator::set_timeout) says otherwise.
    pub timeout: Duration,
}

impl TcpConfig {
    /// Checks what this rank alone can check.
    pub(super) fn check(&self) -> Result<()> {
        check_rank(self.rank, self.world_size)?;
        if self.world_size == 1 {
            return Ok(());
        }
        if self.port == 0 {
            return Err(Error::invalid("port", 0, "must be 1 to 65535"));
        }
        if self.timeout.is_zero() {
            return Err(Error::invalid("timeout", "0 s", "must be above 0 s"));
        }
        if self.secret.is_none() && loopback(&self.address).is_none() {
            return Err(Error::invalid(
                "DEEP_EP_SECRET",
                "not set",
                format!(
                    "must be set, to the same random text on all ranks, where rank 0 is not on a \
                     loopback address: MASTER_ADDR is {:?}",
                    self.address
                ),
            ));
        }
        Ok(())
    }
}

/// The loopback address that `address` literally is. What a name resolves to may differ between
/// hosts, so only `localhost` counts.
fn loopback(address: &str) -> Option<IpAddr> {
    if address.eq_ignore_ascii_case("localhost") {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    address.parse().ok().filter(IpAddr::is_loopback)
}

/// `listed` are some of the `count` ranks that are missing.
fn missing_text(listed: &[Rank], count: usize, waited: Duration) -> String {
    const SHOWN: usize = 16;
    let shown = &listed[..listed.len().min(SHOWN)];
    let mut text = shown
        .iter()
        .map(Rank::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if count > shown.len() {
        text += &format!(" and {} more", count - shown.len());
    }
    if text.is_empty() {
        return format!("rank 0 did not start the job within {waited:.1?}");
    }
    format!("ranks {text} did not come within {waited:.1?}")
}

/// This process's end of the star.
pub(super) struct Tcp {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Held during a collective: clones of a communicator take turns.
    turn: Mutex<()>,
}

impl Tcp {
    /// Meets the others.
    pub(super) fn connect(config: TcpConfig, liveness: Arc<Liveness>) -> Result<Self> {
        let shared = Arc::new(Shared {
            rank: Rank(config.rank),
            size: config.world_size,
            state: Mutex::new(State::new(config.world_size)),
            changed: Condvar::new(),
            waker: Waker::new().map_err(|error| Error::io("making an eventfd", error))?,
            liveness,
        });
        let (peers, early) = if config.rank == 0 {
            (listen::gather(&config)?, Early::default())
        } else {
            let (connection, early) = join::join(&config)?;
            (vec![(Rank(0), connection)], early)
        };
        let link = Link::new(shared.clone(), peers);
        let thread = thread::Builder::new()
            .name("deep-ep-bootstrap".into())
            .spawn(move || link.run(early))
            .map_err(|error| Error::io("starting the bootstrap thread", error))?;
        Ok(Self {
            shared,
            thread: Some(thread),
            turn: Mutex::new(()),
        })
    }

    pub(super) fn all_gather(
        &self,
        operation: &'static str,
        mine: &[u8],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        let _turn = lock(&self.turn);
        let begun = Instant::now();
        let deadline = deadline_after(begun, timeout);
        let failed = |failure: Failure| failure.into_error(operation.into(), "exchange".into());
        let sequence = self.contribute(operation, mine.into())?;
        let outcome = match self.wait(sequence, deadline) {
            Some(outcome) => outcome,
            None => self.give_up(sequence),
        };
        if outcome.is_ok() && self.shared.is_hub() {
            self.wait_flushed(sequence);
        }
        match outcome {
            Ok(all) => Ok(all.iter().map(|bytes| bytes.to_vec()).collect()),
            Err(Failure::Aborted(abort)) if abort.by == self.shared.rank => Err(Error::Timeout {
                operation: operation.into(),
                stage: "exchange".into(),
                ranks: abort.missing,
                waited: begun.elapsed(),
            }),
            Err(failure) => Err(failed(failure)),
        }
    }

    /// Puts this rank's part into the current round, whose number is returned.
    fn contribute(&self, operation: &'static str, mine: Block) -> Result<u64> {
        let mut state = lock(&self.shared.state);
        let sequence = state.round.sequence();
        match state.round.put(self.shared.rank, mine.clone()) {
            Ok(Some(all)) => state.send_gathered(sequence, &all),
            Ok(None) if self.shared.is_hub() => {}
            Ok(None) => state.send([Frame {
                sequence,
                ..Frame::about(Kind::Contribution, self.shared.rank, mine)
            }]),
            Err(Refused::Failed(failure)) => {
                return Err(failure.into_error(operation.into(), "exchange".into()));
            }
            Err(Refused::OutOfTurn) => {
                return Err(Error::Bootstrap {
                    stage: "exchange".into(),
                    reason: format!("this rank contributed twice to one {operation}"),
                });
            }
        }
        drop(state);
        self.shared.waker.wake();
        Ok(sequence)
    }

    /// Waits for the end of round `sequence`; `None` at the deadline.
    fn wait(
        &self,
        sequence: u64,
        deadline: Instant,
    ) -> Option<std::result::Result<Gathered<Block>, Failure>> {
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(outcome) = state.round.outcome(sequence) {
                return Some(outcome);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until the system has taken over the results of round `sequence`: then they reach the
    /// members even if this process ends right away. A member that takes nothing is not waited for
    /// any longer than when leaving.
    fn wait_flushed(&self, sequence: u64) {
        let state = lock(&self.shared.state);
        let unsent = |state: &mut State| state.flushed <= sequence;
        drop(
            self.shared
                .changed
                .wait_timeout_while(state, LEAVING, unsent),
        );
    }

    /// Ends the group's collectives because this rank's deadline has passed. The round may still
    /// complete meanwhile.
    fn give_up(&self, sequence: u64) -> std::result::Result<Gathered<Block>, Failure> {
        let me = self.shared.rank;
        if !self.shared.is_hub() {
            // Only rank 0 knows who is missing, and its word counts: ask.
            lock(&self.shared.state).send([Frame {
                sequence,
                ..Frame::bare(Kind::GiveUp)
            }]);
            self.shared.waker.wake();
            if let Some(outcome) = self.wait(sequence, Instant::now() + ACCOUNT) {
                return outcome;
            }
        }
        let mut state = lock(&self.shared.state);
        if let Some(outcome) = state.round.outcome(sequence) {
            return outcome;
        }
        let missing = if self.shared.is_hub() {
            state.round.missing()
        } else {
            vec![Rank(0)]
        };
        state.give_up(me, missing.clone(), self.shared.is_hub());
        drop(state);
        self.shared.changed.notify_all();
        self.shared.waker.wake();
        Err(Failure::Aborted(Abort { by: me, missing }))
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        lock(&self.shared.state).leaving = true;
        self.shared.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A callback about a departed rank may drop the last clone, on the thread itself.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
