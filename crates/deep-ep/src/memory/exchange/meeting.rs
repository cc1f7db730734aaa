//! Every rank of a domain asks every other for its file, and answers.
//!
//! The protocol is the parent's; what the file is, and what is done with it, is the caller's.

use std::{
    collections::VecDeque,
    os::fd::{BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use super::{
    AllGather,
    card::{Card, Token},
    socket::{self, Greeting, Kind, Received},
};
use crate::{
    error::{Error, Result, Text},
    topology::Rank,
};

/// How long a connection may stay without a valid request.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long to wait before connecting again.
pub(super) const RETRY: Duration = Duration::from_millis(5);

/// Connections without a request that are kept besides one for each peer.
pub(super) const STRANGERS: usize = 64;

/// The stage that errors name.
const STAGE: &str = "memory exchange";

/// Who meets, and what this rank gives to the others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Meeting<'a> {
    /// This rank.
    pub rank: Rank,
    /// The ranks that meet, this one included; the same on all of them.
    pub domain: &'a [Rank],
    /// Bytes of addresses of this rank's memory, for the peers to know.
    pub reserve: u64,
    /// What each peer gets.
    pub file: BorrowedFd<'a>,
    /// How long it may take, without the gathering.
    pub timeout: Duration,
}

/// What came from a peer, and the two connections with it, which stay usable.
#[derive(Debug)]
pub(crate) struct Met<T> {
    pub rank: Rank,
    /// What was made of its file.
    pub value: T,
    /// This rank asked here and got the peer's file.
    pub asked: OwnedFd,
    /// The peer asked here and was sent this rank's file.
    pub answered: OwnedFd,
}

/// Makes something of a peer's file: rank, its reserve, the file.
pub(crate) type Take<'a, T> = dyn FnMut(Rank, u64, OwnedFd) -> Result<T> + 'a;

impl Meeting<'_> {
    /// Meets all other ranks of the domain; the answers are in its order. All ranks of the group
    /// call this, since all take part in `all_gather`.
    ///
    /// # Errors
    ///
    /// As [`Exchange::run`](super::Exchange::run), and those of `take`; where it says
    /// [`Error::InvalidArgument`], the peer sent nonsense.
    pub(crate) fn run<T>(
        &self,
        all_gather: AllGather<'_>,
        take: &mut Take<'_, T>,
    ) -> Result<Vec<Met<T>>> {
        let own = Card::new(self.reserve)?;
        let listener = socket::listen_on(&own.name)
            .map_err(|error| Error::io("listening on an abstract socket", error))?;
        let gathered = all_gather(&own.encode())?;
        let peers = self.peers(&own, &gathered)?;
        let mut progress = Progress {
            meeting: self,
            own,
            listener,
            waiting: VecDeque::new(),
            start: Instant::now(),
            peers,
        };
        progress.run(take)?;
        Ok(progress.met())
    }

    /// The peers of the domain with their cards, checked.
    fn peers<T>(&self, own: &Card, gathered: &[Vec<u8>]) -> Result<Vec<Peer<T>>> {
        let mut peers = Vec::new();
        for &rank in self.domain.iter().filter(|&&rank| rank != self.rank) {
            let bytes = gathered.get(rank.0).map_or(&[][..], Vec::as_slice);
            let card = Card::decode(bytes)
                .ok_or_else(|| bootstrap(format!("rank {rank} sent no valid memory card")))?;
            peers.push(Peer {
                rank,
                card,
                answered: None,
                fetch: Fetch::Connect(Instant::now()),
            });
        }
        self.reachable(own, &peers)?;
        Ok(peers)
    }

    fn reachable<T>(&self, own: &Card, peers: &[Peer<T>]) -> Result<()> {
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
struct Peer<T> {
    rank: Rank,
    card: Card,
    /// Where it was sent this rank's file.
    answered: Option<OwnedFd>,
    fetch: Fetch<T>,
}

/// How far this rank is with a peer's file.
#[derive(Debug)]
enum Fetch<T> {
    /// Connect at this time.
    Connect(Instant),
    /// The request is sent.
    Reply(OwnedFd),
    /// Taken.
    Done(T, OwnedFd),
}

/// The loop of one rank.
struct Progress<'a, T> {
    meeting: &'a Meeting<'a>,
    own: Card,
    listener: OwnedFd,
    /// Accepted connections without a request, oldest first, and when they are dropped.
    waiting: VecDeque<(OwnedFd, Instant)>,
    start: Instant,
    peers: Vec<Peer<T>>,
}

impl<T> Progress<'_, T> {
    fn run(&mut self, take: &mut Take<'_, T>) -> Result<()> {
        loop {
            self.connect()?;
            self.collect(take)?;
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
                from: self.meeting.rank.0 as u32,
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
    fn collect(&mut self, take: &mut Take<'_, T>) -> Result<()> {
        let token = self.own.token;
        for peer in &mut self.peers {
            let again = Fetch::Connect(Instant::now() + RETRY);
            peer.fetch = match std::mem::replace(&mut peer.fetch, again) {
                Fetch::Reply(socket) => match socket::receive(&socket) {
                    Received::Nothing => Fetch::Reply(socket),
                    Received::Closed => continue,
                    Received::Garbage => return Err(peer.nonsense("an invalid record")),
                    Received::Greeting(reply, files) => {
                        Fetch::Done(peer.take(&token, &reply, files, take)?, socket)
                    }
                },
                other => other,
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
                Received::Greeting(request, _files) => self.answer(socket, &request),
                Received::Nothing | Received::Closed | Received::Garbage => {}
            }
        }
    }

    /// Gives this rank's memory to a peer that has shown both tokens.
    fn answer(&mut self, socket: OwnedFd, request: &Greeting) {
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
            from: self.meeting.rank.0 as u32,
            to_token: peer.card.token,
            from_token: own.token,
        };
        // The record waits in the peer's socket, also after this end is closed. If it could not
        // be sent the peer sees a closed connection and asks again.
        if socket::send(&socket, &reply, Some(self.meeting.file)).is_ok() {
            peer.answered = Some(socket);
        }
    }

    /// Sleeps until something can be done, or says who did not come in time.
    fn sleep(&self) -> Result<()> {
        let now = Instant::now();
        let waited = now - self.start;
        if waited >= self.meeting.timeout {
            return Err(Error::Timeout {
                operation: OPERATION,
                stage: STAGE.into(),
                ranks: self.missing(),
                waited,
            });
        }
        let mut until = now + (self.meeting.timeout - waited).min(PATIENCE);
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        for (socket, end) in &self.waiting {
            fds.push(PollFd::new(socket, PollFlags::IN));
            until = until.min(*end);
        }
        for peer in &self.peers {
            match &peer.fetch {
                Fetch::Connect(when) => until = until.min(*when),
                Fetch::Reply(socket) => fds.push(PollFd::new(socket, PollFlags::IN)),
                Fetch::Done(..) => {}
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
        let open =
            |peer: &&Peer<T>| peer.answered.is_none() || !matches!(peer.fetch, Fetch::Done(..));
        self.peers
            .iter()
            .filter(open)
            .map(|peer| peer.rank)
            .collect()
    }

    /// What came, in the domain's order. Called when none is missing.
    fn met(self) -> Vec<Met<T>> {
        let met = self.peers.into_iter().filter_map(|peer| match peer.fetch {
            Fetch::Done(value, asked) => Some(Met {
                rank: peer.rank,
                value,
                asked,
                answered: peer.answered?,
            }),
            _ => None,
        });
        met.collect()
    }
}

impl<T> Peer<T> {
    /// Takes what came with a reply.
    fn take(
        &self,
        own_token: &Token,
        reply: &Greeting,
        mut files: Vec<OwnedFd>,
        take: &mut Take<'_, T>,
    ) -> Result<T> {
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
        match take(self.rank, self.card.reserve, file) {
            Err(Error::InvalidArgument(reject)) => Err(self.nonsense(&reject.to_string())),
            taken => taken,
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
