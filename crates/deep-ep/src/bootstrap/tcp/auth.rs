//! The handshake: who is there, and does each side know the secret.
//!
//! ```text
//!   member                                   rank 0
//!     HELLO     magic version rank size nonce  ->
//!                          <-  CHALLENGE  magic version nonce
//!     PROOF     HMAC(secret, "member" HELLO CHALLENGE)  ->
//!                          <-  VERDICT    code, reason, HMAC(secret, "rank 0" all of the above)
//! ```
//!
//! HMAC is HMAC-SHA256 (RFC 2104). The nonces are 32 random bytes each, so no message of an
//! earlier handshake can be used again. The side that connects proves itself first: a stranger
//! who reaches the port gets nothing computed from the secret. Both proofs are compared in
//! constant time. A verdict "wrong secret" cannot be verified by its receiver and is believed
//! nevertheless; every other verdict is verified.
//!
//! The secret keeps strangers out of the group. It does not encrypt what is sent afterwards:
//! whoever can alter packets on the way is not kept out.
//!
//! The first twelve bytes of HELLO and CHALLENGE stay the same in all versions, so that two
//! versions can tell that they differ. Integers are little-endian.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::frame::{MAX_TEXT, cut, decode_text};
use crate::settings::Secret;

/// Changes with every change of what is sent.
pub(super) const VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"deep-ep\n";
const PREFIX: usize = 12;
const NONCE: usize = 32;
const HELLO: usize = PREFIX + 8 + NONCE;
const CHALLENGE: usize = PREFIX + NONCE;
const MAC: usize = 32;

/// Rank 0's answer to a rank that wants to join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Welcome.
    Admitted = 0,
    /// The proof is not one of this job's secret.
    WrongSecret = 1,
    /// The secret is right, but this rank cannot take part.
    Refused = 2,
}

/// What went wrong in a handshake.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The peer is not of this protocol, went away, or is too slow.
    Peer(String),
    /// The peer speaks another version.
    Version(u16),
    /// The peer does not know the secret (or this side does not).
    Secret,
    /// Rank 0 refused, with this reason.
    Refused(String),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Peer(match error.kind() {
            io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                "it did not answer in time".to_owned()
            }
            _ => error.to_string(),
        })
    }
}

/// A rank whose proof was right, waiting for its verdict.
pub(super) struct Applicant {
    pub(super) rank: u32,
    pub(super) size: u32,
    transcript: Vec<u8>,
}

/// Rank 0's side, up to the verdict on the secret. A wrong one is answered here.
pub(super) fn receive(
    stream: &TcpStream,
    secret: &Secret,
    deadline: Instant,
) -> Result<Applicant, Trouble> {
    let mut hello = [0; HELLO];
    // The beginning on its own, so that a stranger is recognised by its first bytes.
    read(stream, &mut hello[..PREFIX], deadline)?;
    check_magic(&hello)?;
    let mut transcript = prefix().to_vec();
    transcript.extend(nonce()?);
    write(stream, &transcript, deadline)?;
    check_version(&hello)?;
    read(stream, &mut hello[PREFIX..], deadline)?;
    let challenge = std::mem::replace(&mut transcript, hello.to_vec());
    transcript.extend(challenge);

    let mut proof = [0; MAC];
    read(stream, &mut proof, deadline)?;
    let expected = mac(secret, b"member", &[&transcript])?;
    let right = expected.verify_slice(&proof).is_ok();
    transcript.extend(proof);
    let applicant = Applicant {
        rank: word(&hello, PREFIX),
        size: word(&hello, PREFIX + 4),
        transcript,
    };
    if !right {
        answer(stream, &applicant, None, Verdict::WrongSecret, "", deadline)?;
        return Err(Trouble::Secret);
    }
    Ok(applicant)
}

/// Rank 0's answer to an applicant. `secret` is left out only where the peer does not know it.
pub(super) fn answer(
    stream: &TcpStream,
    applicant: &Applicant,
    secret: Option<&Secret>,
    verdict: Verdict,
    reason: &str,
    deadline: Instant,
) -> Result<(), Trouble> {
    let reason = cut(reason).as_bytes();
    // `cut` keeps the length far below 2^16.
    let length = (reason.len() as u16).to_le_bytes();
    let head = [verdict as u8, 0, length[0], length[1]];
    let mut message = head.to_vec();
    match secret {
        Some(secret) => {
            let proof = mac(secret, b"rank 0", &[&applicant.transcript, &head, reason])?;
            message.extend(proof.finalize().into_bytes());
        }
        None => message.extend([0; MAC]),
    }
    message.extend(reason);
    Ok(write(stream, &message, deadline)?)
}

/// The side of a rank that joins. Returns once rank 0 has admitted it.
pub(super) fn present(
    stream: &TcpStream,
    secret: &Secret,
    (rank, size): (u32, u32),
    deadline: Instant,
) -> Result<(), Trouble> {
    let mut transcript = prefix().to_vec();
    transcript.extend(rank.to_le_bytes());
    transcript.extend(size.to_le_bytes());
    transcript.extend(nonce()?);
    write(stream, &transcript, deadline)?;

    let mut challenge = [0; CHALLENGE];
    read(stream, &mut challenge[..PREFIX], deadline)?;
    check_magic(&challenge)?;
    check_version(&challenge)?;
    read(stream, &mut challenge[PREFIX..], deadline)?;
    transcript.extend(challenge);
    let proof = mac(secret, b"member", &[&transcript])?
        .finalize()
        .into_bytes();
    transcript.extend(proof);
    write(stream, &proof, deadline)?;

    let mut head = [0; 4];
    let mut theirs = [0; MAC];
    read(stream, &mut head, deadline)?;
    read(stream, &mut theirs, deadline)?;
    let length = usize::from(u16::from_le_bytes([head[2], head[3]]));
    if length > MAX_TEXT {
        return Err(Trouble::Peer("its answer is too long".to_owned()));
    }
    let mut reason = vec![0; length];
    read(stream, &mut reason, deadline)?;
    if head[0] == Verdict::WrongSecret as u8 {
        return Err(Trouble::Secret);
    }
    let expected = mac(secret, b"rank 0", &[&transcript, &head, &reason])?;
    if expected.verify_slice(&theirs).is_err() {
        return Err(Trouble::Peer("it does not know the secret".to_owned()));
    }
    match head[0] {
        code if code == Verdict::Admitted as u8 => Ok(()),
        _ => Err(Trouble::Refused(decode_text(&reason))),
    }
}

fn prefix() -> [u8; PREFIX] {
    let mut prefix = [0; PREFIX];
    prefix[..8].copy_from_slice(&MAGIC);
    prefix[8..10].copy_from_slice(&VERSION.to_le_bytes());
    prefix
}

fn check_magic(message: &[u8]) -> Result<(), Trouble> {
    if message.starts_with(&MAGIC) {
        Ok(())
    } else {
        Err(Trouble::Peer("it does not speak this protocol".to_owned()))
    }
}

fn check_version(message: &[u8]) -> Result<(), Trouble> {
    match u16::from_le_bytes([message[8], message[9]]) {
        VERSION => Ok(()),
        other => Err(Trouble::Version(other)),
    }
}

fn word(message: &[u8; HELLO], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&message[at..at + 4]);
    u32::from_le_bytes(word)
}

/// Random bytes from the operating system.
pub(super) fn nonce() -> io::Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(nonce)
}

/// The MAC of `label` and `parts`. All parts but the last have a fixed length, so that different
/// parts never make the same bytes.
fn mac(secret: &Secret, label: &[u8; 6], parts: &[&[u8]]) -> io::Result<Hmac<Sha256>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.bytes())
        .map_err(|error| io::Error::other(error.to_string()))?;
    mac.update(label);
    for part in parts {
        mac.update(part);
    }
    Ok(mac)
}

/// Reads exactly `buffer`; a peer that sends slowly has no more time than one that does not.
fn read(mut stream: &TcpStream, mut buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => buffer = &mut buffer[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes a message, which is far smaller than any send buffer.
fn write(mut stream: &TcpStream, message: &[u8], deadline: Instant) -> io::Result<()> {
    stream.set_write_timeout(Some(left(deadline)?))?;
    stream.write_all(message)
}

/// The time left, which as a socket's timeout must not be zero.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left.max(Duration::from_millis(1)))
}
