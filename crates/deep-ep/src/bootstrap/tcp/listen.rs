//! Rank 0's side of the rendezvous.
//!
//! One thread, the caller's, accepts; each connection is then examined on a thread of its own, so
//! that a stranger who sends nothing, or garbage, holds up nobody. At most [`AT_ONCE`] are examined
//! at the same time, each for at most [`EXAMINATION`]; when all places are taken, the oldest is
//! turned out once it is older than [`FAIR_SHARE`], which a rank never needs (and a rank that is
//! turned out on a crowded host comes again). The port is closed as soon as all ranks are there.

use std::{
    collections::VecDeque,
    io,
    net::{
        IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs,
    },
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use super::{
    super::{deadline_after, lock},
    TcpConfig,
    auth::{self, Trouble, Verdict},
    connection::{Connection, Waker, poll_until},
    frame::{Frame, Kind, MAX_LISTED, Sender, encode, encode_ranks},
    loopback,
    secret_file::SecretFile,
};
use crate::{
    error::{Error, Result},
    settings::Secret,
    topology::Rank,
};

/// The most connections under examination at once.
const AT_ONCE: usize = 64;
/// The longest examination.
const EXAMINATION: Duration = Duration::from_secs(3);
/// The time that an examination has even when others wait.
const FAIR_SHARE: Duration = Duration::from_millis(300);
/// How often waiting ranks are told who is missing.
const REPORT_EVERY: Duration = Duration::from_millis(250);
/// How long to wait for a port that is in use: an earlier job may be just leaving it.
const PORT_PATIENCE: Duration = Duration::from_secs(3);
/// The most reasons of refusals that are remembered.
const MAX_REFUSALS: usize = 8;

/// Who has come.
struct Roster {
    size: usize,
    secret: Secret,
    waker: Waker,
    state: Mutex<RosterState>,
}

struct RosterState {
    /// By rank; rank 0's place stays empty.
    admitted: Vec<Option<Connection>>,
    /// Why others were refused.
    refusals: Vec<String>,
    /// Nobody is admitted any more.
    closed: bool,
}

/// A connection under examination.
struct Visitor {
    stream: TcpStream,
    address: SocketAddr,
    since: Instant,
    done: AtomicBool,
}

/// Opens the port, waits for all other ranks, closes the port and starts them. Returns their
/// connections.
pub(super) fn gather(config: &TcpConfig) -> Result<Vec<(Rank, Connection)>> {
    let begun = Instant::now();
    let deadline = deadline_after(begun, config.timeout);
    let listener = bind(config, deadline)?;
    // After the port is ours: only its owner writes the file.
    let file = match config.secret {
        Some(_) => None,
        None => Some(SecretFile::create(config.port)?),
    };
    let secret = match (&config.secret, &file) {
        (Some(secret), _) => secret.clone(),
        (None, Some(file)) => file.secret().clone(),
        (None, None) => return Err(Error::invalid("secret", "not set", "must be set")),
    };
    let context = "waking the rendezvous";
    let roster = Arc::new(Roster {
        size: config.world_size,
        secret,
        waker: Waker::new().map_err(|error| Error::io(context, error))?,
        state: Mutex::new(RosterState {
            admitted: (0..config.world_size).map(|_| None).collect(),
            refusals: Vec::new(),
            closed: false,
        }),
    });
    let mut visitors = Visitors::default();
    let complete = accept_all(&listener, &roster, &mut visitors, deadline);
    drop(listener);
    let mut state = lock(&roster.state);
    state.closed = true;
    if !complete {
        let reason = state.why_incomplete(begun.elapsed());
        state.broadcast([Frame::text(Kind::Failed, &reason)]);
        return Err(Error::Bootstrap {
            stage: "rendezvous".into(),
            reason,
        });
    }
    state.broadcast([Frame::bare(Kind::Start)]);
    let admitted = std::mem::take(&mut state.admitted).into_iter().enumerate();
    Ok(admitted
        .filter_map(|(rank, connection)| Some((Rank(rank), connection?)))
        .collect())
}

/// Accepts until all are there (true) or the deadline has passed (false).
fn accept_all(
    listener: &TcpListener,
    roster: &Arc<Roster>,
    visitors: &mut Visitors,
    deadline: Instant,
) -> bool {
    let mut next_report = Instant::now() + REPORT_EVERY;
    loop {
        let mut state = lock(&roster.state);
        let now = Instant::now();
        if now >= next_report || state.is_complete() {
            state.forget_departed();
        }
        if state.is_complete() {
            return true;
        }
        if now >= deadline {
            return false;
        }
        if now >= next_report {
            state.report();
            next_report = now + REPORT_EVERY;
        }
        let room = visitors.make_room(&state);
        drop(state);

        let retry = !room || accept(listener, roster, visitors);
        let mut wake_at = next_report.min(deadline);
        if retry {
            wake_at = wake_at.min(now + Duration::from_millis(20));
        }
        let mut fds = [
            PollFd::new(&roster.waker, PollFlags::IN),
            PollFd::new(
                listener,
                if retry {
                    PollFlags::empty()
                } else {
                    PollFlags::IN
                },
            ),
        ];
        poll_until(&mut fds, Some(wake_at));
        roster.waker.reset();
    }
}

/// Accepts those who are waiting, as far as there is room. True if more should be tried soon
/// although the listener may be ready at once.
fn accept(listener: &TcpListener, roster: &Arc<Roster>, visitors: &mut Visitors) -> bool {
    while visitors.0.len() < AT_ONCE {
        match listener.accept() {
            Ok((stream, address)) => {
                let visitor = Arc::new(Visitor {
                    stream,
                    address,
                    since: Instant::now(),
                    done: AtomicBool::new(false),
                });
                let (roster, examined) = (roster.clone(), visitor.clone());
                let spawned = thread::Builder::new()
                    .name("deep-ep-handshake".into())
                    .spawn(move || examine(&roster, &examined));
                match spawned {
                    Ok(_) => visitors.0.push_back(visitor),
                    // The visitor is dropped and comes again.
                    Err(error) => {
                        tracing::warn!(%error, "no thread for a handshake");
                        return true;
                    }
                }
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return false,
                // It hung up while it was waiting.
                io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                _ => {
                    tracing::warn!(%error, "accepting a connection failed");
                    return true;
                }
            },
        }
    }
    true
}

/// Connections under examination, the oldest first. Turned out when dropped.
#[derive(Default)]
struct Visitors(VecDeque<Arc<Visitor>>);

impl Visitors {
    /// Whether there is room for another, if need be by turning out the oldest. Nobody is admitted
    /// while the caller holds the roster, so none of the admitted is turned out.
    fn make_room(&mut self, _roster: &RosterState) -> bool {
        self.0
            .retain(|visitor| !visitor.done.load(Ordering::Relaxed));
        if self.0.len() < AT_ONCE {
            return true;
        }
        match self.0.front() {
            Some(oldest) if oldest.since.elapsed() > FAIR_SHARE => {
                let _ = oldest.stream.shutdown(Shutdown::Both);
                self.0.pop_front();
                true
            }
            _ => false,
        }
    }
}

impl Drop for Visitors {
    fn drop(&mut self) {
        for visitor in &self.0 {
            // An admitted one's stream belongs to its connection now.
            if !visitor.done.load(Ordering::Acquire) {
                let _ = visitor.stream.shutdown(Shutdown::Both);
            }
        }
    }
}

/// Examines one connection, on its own thread.
fn examine(roster: &Roster, visitor: &Visitor) {
    let deadline = visitor.since + EXAMINATION;
    let applicant = auth::receive(&visitor.stream, &roster.secret, deadline);
    let outcome = applicant.and_then(|applicant| roster.judge(visitor, &applicant, deadline));
    visitor.done.store(true, Ordering::Release);
    let refusal = match outcome {
        Ok(()) => None,
        Err(Trouble::Peer(reason)) => {
            tracing::debug!(address = %visitor.address, reason, "a connection was not a rank");
            None
        }
        Err(Trouble::Version(version)) => Some(format!("has protocol version {version}")),
        Err(Trouble::Secret) => Some("has another secret".to_owned()),
        Err(Trouble::Refused(reason)) => Some(reason),
    };
    if let Some(reason) = refusal {
        tracing::warn!(address = %visitor.address, reason, "refused");
        let refusals = &mut lock(&roster.state).refusals;
        let text = format!("{} {reason}", visitor.address.ip());
        if refusals.len() < MAX_REFUSALS && !refusals.contains(&text) {
            refusals.push(text);
        }
    }
    roster.waker.wake();
}

impl Roster {
    /// Answers a rank that knows the secret, and admits it if it fits.
    fn judge(
        &self,
        visitor: &Visitor,
        applicant: &auth::Applicant,
        deadline: Instant,
    ) -> std::result::Result<(), Trouble> {
        let answer = |verdict, reason: &str| {
            let secret = Some(&self.secret);
            auth::answer(
                &visitor.stream,
                applicant,
                secret,
                verdict,
                reason,
                deadline,
            )
        };
        let refuse = |reason: String| {
            answer(Verdict::Refused, &reason)?;
            Err(Trouble::Refused(reason))
        };
        let (rank, size) = (applicant.rank as usize, applicant.size as usize);
        if size != self.size {
            return refuse(format!(
                "rank {rank} has world size {size}, but rank 0 has {}",
                self.size
            ));
        }
        if rank == 0 || rank >= size {
            return refuse(format!("there is no place for a rank {rank} of {size}"));
        }
        let mut state = lock(&self.state);
        if state.closed {
            return Err(Trouble::Peer("it came too late".to_owned()));
        }
        if state.admitted[rank]
            .as_ref()
            .is_some_and(|earlier| !earlier.is_hung_up())
        {
            drop(state);
            return refuse(format!("rank {rank} is there already"));
        }
        // Under the lock, so that nothing else is sent on the connection before. It cannot block:
        // the send buffer is empty.
        answer(Verdict::Admitted, "")?;
        let connection = Connection::new(visitor.stream.try_clone()?, Sender::Member)?;
        state.admitted[rank] = Some(connection);
        visitor.done.store(true, Ordering::Release);
        Ok(())
    }
}

impl RosterState {
    fn missing(&self) -> Vec<Rank> {
        let others = self.admitted.iter().enumerate().skip(1);
        others
            .filter(|(_, connection)| connection.is_none())
            .map(|(rank, _)| Rank(rank))
            .collect()
    }

    fn is_complete(&self) -> bool {
        self.admitted.iter().skip(1).all(Option::is_some)
    }

    /// Frees the places of ranks that went away again: they may come back.
    fn forget_departed(&mut self) {
        for place in &mut self.admitted {
            if place.as_ref().is_some_and(Connection::is_hung_up) {
                *place = None;
            }
        }
    }

    /// Tells those who wait how many are missing.
    fn report(&mut self) {
        let missing = self.missing();
        let listed = encode_ranks(&missing[..missing.len().min(MAX_LISTED)]);
        let count = Rank(missing.len());
        self.broadcast([Frame::about(Kind::Waiting, count, listed)]);
    }

    fn broadcast(&mut self, frames: impl IntoIterator<Item = Frame>) {
        let mut blocks = Vec::new();
        encode(frames, &mut blocks);
        for connection in self.admitted.iter_mut().flatten() {
            for block in &blocks {
                connection.queue(block.clone());
            }
            connection.flush();
        }
    }

    fn why_incomplete(&self, waited: Duration) -> String {
        let mut reason = super::missing_text(&self.missing(), self.missing().len(), waited);
        if !self.refusals.is_empty() {
            reason += "; refused were: ";
            reason += &self.refusals.join("; ");
        }
        reason
    }
}

/// Opens the port on the address that the others were given, if it is one of this host.
fn bind(config: &TcpConfig, deadline: Instant) -> Result<TcpListener> {
    let addresses = listen_addresses(&config.address, config.port);
    let patience = deadline.min(Instant::now() + PORT_PATIENCE);
    loop {
        let error = match TcpListener::bind(&*addresses) {
            Ok(listener) => {
                return match listener.set_nonblocking(true) {
                    Ok(()) => Ok(listener),
                    Err(error) => Err(Error::io("making the port non-blocking", error)),
                };
            }
            Err(error) => error,
        };
        if error.kind() != io::ErrorKind::AddrInUse || Instant::now() >= patience {
            return Err(Error::io(
                format!(
                    "listening on port {} at {} (if another program uses it, set DEEP_EP_PORT)",
                    config.port, config.address
                ),
                error,
            ));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Where to listen, in order of preference: the first that works is taken.
fn listen_addresses(address: &str, port: u16) -> Vec<SocketAddr> {
    if let Some(ip) = loopback(address) {
        return vec![(ip, port).into()];
    }
    // A host's own name often resolves to a loopback address on the host itself, and to another
    // one elsewhere; and a name may not resolve yet.
    let resolved = (address, port).to_socket_addrs();
    let mut addresses: Vec<SocketAddr> = match resolved {
        Ok(found) => found.filter(|found| !found.ip().is_loopback()).collect(),
        Err(_) => Vec::new(),
    };
    let any: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
    addresses.extend(any.map(|any| SocketAddr::from((any, port))));
    addresses
}
