//! The rendezvous of the ranks that are not rank 0.

use std::{
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use super::{
    super::deadline_after,
    TcpConfig,
    auth::{self, Trouble, VERSION},
    connection::{Connection, poll_until},
    frame::{Kind, Sender, decode_ranks, decode_text},
    link::Early,
    loopback, missing_text, secret_file,
};
use crate::error::{Error, Result};

/// The most time for one attempt to connect, and for one handshake.
const CONNECTING: Duration = Duration::from_secs(2);
const HANDSHAKE: Duration = Duration::from_secs(5);
/// The pause between attempts, which doubles from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LAST_PAUSE: Duration = Duration::from_millis(200);
/// How long beyond its own deadline a rank waits for rank 0's account of what is missing.
const GRACE: Duration = Duration::from_millis(400);

/// Why an attempt failed.
enum Attempt {
    /// Rank 0 may not be there yet.
    Again(String),
    /// It will not get better.
    Hopeless(String),
}

/// Connects to rank 0, trying again until the deadline, and waits until all ranks are there.
/// Returns the connection and what came on it behind the start.
pub(super) fn join(config: &TcpConfig) -> Result<(Connection, Early)> {
    let begun = Instant::now();
    let deadline = deadline_after(begun, config.timeout);
    let mut pause = FIRST_PAUSE;
    loop {
        let place = format!("rank 0 at {}:{}", config.address, config.port);
        let reason = match attempt(config, deadline) {
            Ok(connection) => return await_start(connection, config, begun, deadline),
            Err(Attempt::Hopeless(reason)) => return Err(failed(format!("{place}: {reason}"))),
            Err(Attempt::Again(reason)) => reason,
        };
        if Instant::now() + pause >= deadline {
            return Err(failed(format!(
                "{place} could not be joined within {:?}: {reason}",
                config.timeout
            )));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

fn failed(reason: String) -> Error {
    Error::Bootstrap {
        stage: "rendezvous".into(),
        reason,
    }
}

fn attempt(config: &TcpConfig, deadline: Instant) -> std::result::Result<Connection, Attempt> {
    let again = |reason: String| Attempt::Again(reason);
    // Read at every attempt: an old one may have been there the last time.
    let secret = match &config.secret {
        Some(secret) => secret.clone(),
        None => secret_file::read(config.port)
            .map_err(|error| again(format!("its secret cannot be read: {error}")))?,
    };
    let stream = connect(config, deadline).map_err(again)?;
    let handshake_by = deadline.min(Instant::now() + HANDSHAKE);
    // The check of the configuration keeps both far below 2^32.
    let who = (config.rank as u32, config.world_size as u32);
    let hub = Sender::Hub {
        size: config.world_size,
    };
    match auth::present(&stream, &secret, who, handshake_by) {
        Ok(()) => Connection::new(stream, hub)
            .map_err(|error| again(format!("setting up the connection: {error}"))),
        Err(Trouble::Peer(reason)) => Err(again(format!("no handshake: {reason}"))),
        Err(Trouble::Version(version)) => Err(Attempt::Hopeless(format!(
            "it has protocol version {version}, this rank has {VERSION}: all ranks need the same \
             deep-ep"
        ))),
        // The file may be a stale one, which rank 0 is about to replace.
        Err(Trouble::Secret) if config.secret.is_none() => Err(again(
            "it refused the secret it left in its file".to_owned(),
        )),
        Err(Trouble::Secret) => Err(Attempt::Hopeless(
            "it refused this rank: DEEP_EP_SECRET is not the same on both".to_owned(),
        )),
        Err(Trouble::Refused(reason)) => {
            Err(Attempt::Hopeless(format!("it refused this rank: {reason}")))
        }
    }
}

fn connect(config: &TcpConfig, deadline: Instant) -> std::result::Result<TcpStream, String> {
    let addresses: Vec<SocketAddr> = match loopback(&config.address) {
        Some(ip) => vec![(ip, config.port).into()],
        None => (config.address.as_str(), config.port)
            .to_socket_addrs()
            .map_err(|error| format!("the address is not known: {error}"))?
            .collect(),
    };
    let mut reason = "the address is not known".to_owned();
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = left.clamp(Duration::from_millis(1), CONNECTING);
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) if is_own(&stream, address) => {
                reason = "nobody is listening".to_owned();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => reason = error.to_string(),
        }
    }
    Err(reason)
}

/// A connection to a port of this host on which nobody listens can, by chance, get that very port
/// as its own and so connect to itself.
fn is_own(stream: &TcpStream, address: SocketAddr) -> bool {
    stream.local_addr().is_ok_and(|own| own == address)
}

/// Waits, admitted, for the others.
fn await_start(
    mut connection: Connection,
    config: &TcpConfig,
    begun: Instant,
    deadline: Instant,
) -> Result<(Connection, Early)> {
    let mut scratch = vec![0; 4096];
    let mut frames = Vec::new();
    let mut missing = (Vec::new(), 0);
    loop {
        let broken = connection.receive(&mut scratch, &mut frames).err();
        let mut behind = std::mem::take(&mut frames).into_iter();
        while let Some(frame) = behind.next() {
            match frame.kind {
                Kind::Start => {
                    let frames = behind.collect();
                    return Ok((connection, Early { frames, broken }));
                }
                Kind::Waiting => {
                    let listed = decode_ranks(&frame.payload, config.world_size);
                    missing = (listed, (frame.rank as usize).min(config.world_size));
                }
                Kind::Failed => return Err(failed(decode_text(&frame.payload))),
                _ => return Err(failed("rank 0 broke the protocol".to_owned())),
            }
        }
        if let Some(broken) = broken {
            return Err(failed(format!(
                "rank 0 was lost while this rank waited for the others: {broken}"
            )));
        }
        if Instant::now() >= deadline + GRACE {
            return Err(failed(missing_text(&missing.0, missing.1, begun.elapsed())));
        }
        let mut fds = [PollFd::new(&connection, PollFlags::IN)];
        poll_until(&mut fds, Some(deadline + GRACE));
    }
}
