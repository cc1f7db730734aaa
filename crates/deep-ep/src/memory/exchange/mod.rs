//! The processes of a host give each other their regions.
//!
//! ```text
//!  every rank                    rank i                              rank j
//!  ----------                    ------                              ------
//!  listen on a random name
//!  all_gather(card)  ........    knows name and token of j           knows token of i
//!                                connect, check uid      ----------> accept, check uid
//!                                request (i, token of j, token of i) check both tokens
//!                                check both tokens       <---------- reply (j, ..) + memfd
//!                                map the memfd
//! ```
//!
//! Each rank does both sides for all its peers in one loop that never blocks on one connection, so
//! the order in which ranks come does not matter. A rank leaves when it has every peer's memory
//! and every peer has its own.
//!
//! Strangers: the socket's name is random, another user's connections are closed at once, and one
//! without the right tokens gets nothing. Whoever connects and stays silent, or sends something
//! else, holds one place in a bounded list for [`PATIENCE`]; a peer that is crowded out comes back.
//!
//! Names are abstract and files are memfds: nothing is left behind, whatever dies.

mod card;
mod socket;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use self::{
    card::Card,
    socket::{Greeting, Kind, Received},
};
use super::region::{PeerRegion, Region, Window};
use crate::{
    error::{Error, Result, Text},
    topology::Rank,
};

/// How long a connection may stay without a valid request.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long to wait before connecting again.
const RETRY: Duration = Duration::from_millis(5);

/// Connections without a request that are kept besides one for each peer.
const STRANGERS: usize = 64;

/// The stage that errors name.
const STAGE: &str = "memory exchange";

/// Gathers a message of every rank, in rank order; every rank calls it.
pub(crate) type AllGather<'a> = &'a dyn Fn(&[u8]) -> Result<Vec<Vec<u8>>>;

/// Who exchanges what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exchange<'a> {
    /// This rank.
    pub rank: Rank,
    /// The ranks that map each other, this one included; the same on all of them.
    pub domain: &'a [Rank],
    /// This rank's region; a memfd.
    pub region: &'a Arc<Region>,
    /// How long it may take, without the gathering.
    pub timeout: Duration,
}

impl Exchange<'_> {
    /// Maps the regions of all ranks in the domain, in the domain's order. All ranks of the group
    /// call this, since all take part in `all_gather`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] names ranks that this one cannot reach by a Unix socket,
    /// [`Error::PeerLost`] those that went away, [`Error::Timeout`] those that did not come in
    /// time, [`Error::Bootstrap`] one that sent nonsense.
    pub(crate) fn run(&self, all_gather: AllGather<'_>) -> Result<Vec<Window>> {
        if self.region.file().is_none() {
            let limit = "must be a memfd to be shared between processes";
            return Err(Error::invalid("region", "private memory", limit));
        }
        let own = Card::new(self.region.reserve())?;
        let listener = socket::listen_on(&own.name)
            .map_err(|error| Error::io("listening on an abstract socket", error))?;
        let gathered = all_gather(&own.encode())?;
        let peers = self.peers(&own, &gathered)?;
        let mut meeting = Meeting {
            exchange: self,
            own,
            listener,
            waiting: VecDeque::new(),
            start: Instant::now(),
            peers,
        };
        meeting.run()?;
        Ok(meeting.windows())
    }

    /// The peers of the domain with their cards, checked.
    fn peers(&self, own: &Card, gathered: &[Vec<u8>]) -> Result<Vec<Peer>> {
        let mut peers = Vec::new();
        for &rank in self.domain.iter().filter(|&&rank| rank != self.rank) {
            let bytes = gathered.get(rank.0).map_or(&[][..], Vec::as_slice);
            let card = Card::decode(bytes)
                .ok_or_else(|| bootstrap(format!("rank {rank} sent no valid memory card")))?;
            peers.push(Peer {
                rank,
                card,
                served: false,
                fetch: Fetch::Connect(Instant::now()),
            });
        }
        self.reachable(own, &peers)?;
        Ok(peers)
    }

    fn reachable(&self, own: &Card, peers: &[Peer]) -> Result<()> {
        let mut why = Vec::new();
        for peer in peers {
            if let Some(place) = own.host.differs_by(&peer.card.host) {
                why.push(format!("rank {} runs on {place}", peer.rank));
            } else if own.uid != peer.card.uid {
                why.push(format!(
                    "rank {} runs as user {}, this one as user {}",
                    peer.rank, peer.card.uid, own.uid
                ));
            }
        }
        if why.is_empty() {
            return Ok(());
        }
        Err(Error::Unsupported {
            feature: "shared memory between these ranks".into(),
            why: why.join(", "),
        })
    }
}

/// One peer in this rank's eyes.
#[derive(Debug)]
struct Peer {
    rank: Rank,
    card: Card,
    /// It has got this rank's memory.
    served: bool,
    fetch: Fetch,
}

/// How far this rank is with a peer's memory.
#[derive(Debug)]
enum Fetch {
    /// Connect at this time.
    Connect(Instant),
    /// The request is sent.
    Reply(OwnedFd),
    /// Mapped.
    Done(Arc<PeerRegion>),
}

/// The loop of one rank.
struct Meeting<'a> {
    exchange: &'a Exchange<'a>,
    own: Card,
    listener: OwnedFd,
    /// Accepted connections without a request, oldest first, and when they are dropped.
    waiting: VecDeque<(OwnedFd, Instant)>,
    start: Instant,
    peers: Vec<Peer>,
}

impl Meeting<'_> {
    fn run(&mut self) -> Result<()> {
        loop {
            self.connect()?;
            self.collect()?;
            self.accept()?;
            self.serve();
            if self.missing().is_empty() {
                return Ok(());
            }
            self.sleep()?;
        }
    }

    /// Connects to the peers whose time has come and sends them a request.
    fn connect(&mut self) -> Result<()> {
        let now = Instant::now();
        let mut lost = Vec::new();
        for peer in &mut self.peers {
            if !matches!(peer.fetch, Fetch::Connect(when) if when <= now) {
                continue;
            }
            let request = Greeting {
                kind: Kind::Request,
                from: self.exchange.rank.0 as u32,
                to_token: peer.card.token,
                from_token: self.own.token,
            };
            let sent = socket::connect_to(&peer.card.name)
                .and_then(|socket| socket::send(&socket, &request, None).map(|()| socket));
            peer.fetch = match sent {
                Ok(socket) => Fetch::Reply(socket),
                // Every rank listens before it gathers, so who does not listen now is gone.
                Err(Errno::CONNREFUSED) => {
                    lost.push(peer.rank);
                    Fetch::Connect(now + RETRY)
                }
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::PERM)) => {
                    return Err(Error::io(
                        format!("connecting to rank {}", peer.rank),
                        error,
                    ));
                }
                Err(_) => Fetch::Connect(now + RETRY),
            };
        }
        if lost.is_empty() {
            return Ok(());
        }
        Err(Error::PeerLost {
            operation: OPERATION,
            stage: STAGE.into(),
            ranks: lost,
        })
    }

    /// Takes the replies that have come.
    fn collect(&mut self) -> Result<()> {
        let token = self.own.token;
        for peer in &mut self.peers {
            let Fetch::Reply(socket) = &peer.fetch else {
                continue;
            };
            peer.fetch = match socket::receive(socket) {
                Received::Nothing => continue,
                Received::Closed => Fetch::Connect(Instant::now() + RETRY),
                Received::Garbage => return Err(peer.nonsense("an invalid record")),
                Received::Greeting(reply, files) => Fetch::Done(peer.map(&token, &reply, files)?),
            };
        }
        Ok(())
    }

    /// Accepts what has come. A full list loses its oldest connections: if one of them was a
    /// peer's, the peer comes back.
    fn accept(&mut self) -> Result<()> {
        while let Some(socket) = socket::accept_from(&self.listener)
            .map_err(|error| Error::io("accepting a peer's connection", error))?
        {
            self.waiting.push_back((socket, Instant::now() + PATIENCE));
            if self.waiting.len() > STRANGERS + self.peers.len() {
                // A request that is already there is served, not dropped.
                self.serve();
                while self.waiting.len() > STRANGERS + self.peers.len() {
                    self.waiting.pop_front();
                }
            }
        }
        Ok(())
    }

    /// Answers the requests that have come and drops connections that sent something else or
    /// nothing for too long.
    fn serve(&mut self) {
        let now = Instant::now();
        for (socket, until) in std::mem::take(&mut self.waiting) {
            match socket::receive(&socket) {
                Received::Nothing if now < until => self.waiting.push_back((socket, until)),
                Received::Greeting(request, _files) => self.answer(&socket, &request),
                Received::Nothing | Received::Closed | Received::Garbage => {}
            }
        }
    }

    /// Gives this rank's memory to a peer that has shown both tokens.
    fn answer(&mut self, socket: &OwnedFd, request: &Greeting) {
        let own = &self.own;
        let peer = self.peers.iter_mut().find(|peer| {
            request.kind == Kind::Request
                && u32::try_from(peer.rank.0) == Ok(request.from)
                && own.token.matches(&request.to_token.0)
                && peer.card.token.matches(&request.from_token.0)
        });
        let Some(peer) = peer else {
            tracing::warn!("a process without the right token asked for this rank's memory");
            return;
        };
        let reply = Greeting {
            kind: Kind::Reply,
            from: self.exchange.rank.0 as u32,
            to_token: peer.card.token,
            from_token: own.token,
        };
        // The record waits in the peer's socket, also after this end is closed. If it could not
        // be sent the peer sees a closed connection and asks again.
        if socket::send(socket, &reply, self.exchange.region.file()).is_ok() {
            peer.served = true;
        }
    }

    /// Sleeps until something can be done, or says who did not come in time.
    fn sleep(&self) -> Result<()> {
        let now = Instant::now();
        let waited = now - self.start;
        if waited >= self.exchange.timeout {
            return Err(Error::Timeout {
                operation: OPERATION,
                stage: STAGE.into(),
                ranks: self.missing(),
                waited,
            });
        }
        let mut until = now + (self.exchange.timeout - waited).min(PATIENCE);
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        for (socket, end) in &self.waiting {
            fds.push(PollFd::new(socket, PollFlags::IN));
            until = until.min(*end);
        }
        for peer in &self.peers {
            match &peer.fetch {
                Fetch::Connect(when) => until = until.min(*when),
                Fetch::Reply(socket) => fds.push(PollFd::new(socket, PollFlags::IN)),
                Fetch::Done(_) => {}
            }
        }
        let limit = Timespec::try_from(until.saturating_duration_since(now)).ok();
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(Error::io("waiting for peers", error)),
        }
    }

    /// The ranks whose memory is not here, or which do not have this rank's.
    fn missing(&self) -> Vec<Rank> {
        let open = |peer: &&Peer| !peer.served || !matches!(peer.fetch, Fetch::Done(_));
        self.peers
            .iter()
            .filter(open)
            .map(|peer| peer.rank)
            .collect()
    }

    /// The regions in the domain's order. Called when none is missing.
    fn windows(self) -> Vec<Window> {
        let exchange = self.exchange;
        let mut mapped = self.peers.into_iter().filter_map(|peer| match peer.fetch {
            Fetch::Done(region) => Some(Window::Mapped(region)),
            _ => None,
        });
        exchange
            .domain
            .iter()
            .filter_map(|&rank| {
                if rank == exchange.rank {
                    Some(Window::Local(exchange.region.clone()))
                } else {
                    mapped.next()
                }
            })
            .collect()
    }
}

impl Peer {
    /// Maps what came with a reply.
    fn map(
        &self,
        own_token: &card::Token,
        reply: &Greeting,
        mut files: Vec<OwnedFd>,
    ) -> Result<Arc<PeerRegion>> {
        let genuine = reply.kind == Kind::Reply
            && u32::try_from(self.rank.0) == Ok(reply.from)
            && own_token.matches(&reply.to_token.0)
            && self.card.token.matches(&reply.from_token.0);
        if !genuine {
            return Err(self.nonsense("a reply with wrong tokens"));
        }
        let (Some(file), true) = (files.pop(), files.is_empty()) else {
            return Err(self.nonsense("a reply without exactly one file"));
        };
        match PeerRegion::map(file, self.card.reserve) {
            Ok(region) => Ok(Arc::new(region)),
            Err(Error::InvalidArgument(reject)) => Err(self.nonsense(&reject.to_string())),
            Err(error) => Err(error),
        }
    }

    fn nonsense(&self, what: &str) -> Error {
        bootstrap(format!("rank {}: {what}", self.rank))
    }
}

/// The operation that errors name.
const OPERATION: Text = Text::Borrowed("connect");

fn bootstrap(reason: String) -> Error {
    Error::Bootstrap {
        stage: STAGE.into(),
        reason,
    }
}
