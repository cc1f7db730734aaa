//! What a rank tells all others about itself before they connect.
//!
//! A card is [`CARD_BYTES`] long, numbers in little-endian order:
//!
//! | bytes | field |
//! | --- | --- |
//! | 8 | `DEEPEPM1` |
//! | 36 | boot id of the kernel (`/proc/sys/kernel/random/boot_id`) |
//! | 8, 8 | device and inode of the network namespace (`/proc/self/ns/net`) |
//! | 4 | effective user id |
//! | 8 | reserve of the region in bytes |
//! | 32 | token |
//! | 1, 64 | length of the socket's name, the name, zeros |

use std::fmt;

use rustix::process::geteuid;

use crate::error::{Error, Result};

/// Length of a card.
pub(super) const CARD_BYTES: usize = 8 + 36 + 8 + 8 + 4 + 8 + TOKEN_BYTES + 1 + NAME_MAX;

/// Length of a token.
pub(super) const TOKEN_BYTES: usize = 32;

const MAGIC: &[u8; 8] = b"DEEPEPM1";
const NAME_MAX: usize = 64;

/// A random number that only the ranks of a group know.
#[derive(Clone, Copy)]
pub(super) struct Token(pub [u8; TOKEN_BYTES]);

impl Token {
    pub(super) fn random() -> Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        fill_random(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// Whether `bytes` are this token; takes the same time wherever they differ.
    pub(super) fn matches(&self, bytes: &[u8]) -> bool {
        let pairs = self.0.iter().zip(bytes);
        let difference = pairs.fold(0, |sum, (a, b)| sum | (a ^ b));
        bytes.len() == TOKEN_BYTES && difference == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The kernel and the network namespace that a process runs in. Two processes reach each other's
/// abstract sockets when both agree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Host {
    pub boot_id: [u8; 36],
    /// Device and inode.
    pub namespace: (u64, u64),
}

impl Host {
    pub(super) fn here() -> Result<Self> {
        let path = "/proc/sys/kernel/random/boot_id";
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::io(format!("reading {path}"), error))?;
        let mut boot_id = [0; 36];
        for (to, from) in boot_id.iter_mut().zip(text.trim().bytes()) {
            *to = from;
        }
        let path = "/proc/self/ns/net";
        let stat =
            rustix::fs::stat(path).map_err(|error| Error::io(format!("reading {path}"), error))?;
        Ok(Self {
            boot_id,
            namespace: (stat.st_dev, stat.st_ino),
        })
    }

    /// What keeps two hosts apart, in words.
    pub(super) fn differs_by(&self, other: &Self) -> Option<&'static str> {
        if self.boot_id != other.boot_id {
            Some("another host")
        } else if self.namespace != other.namespace {
            Some("another network namespace of this host")
        } else {
            None
        }
    }
}

/// A rank's card.
#[derive(Debug, Clone)]
pub(super) struct Card {
    pub host: Host,
    pub uid: u32,
    pub reserve: u64,
    pub token: Token,
    /// Name of the abstract socket that the rank listens on.
    pub name: Vec<u8>,
}

impl Card {
    /// A card of this process, with a new token and a name that nobody has.
    pub(super) fn new(reserve: u64) -> Result<Self> {
        let mut random = [0; 16];
        fill_random(&mut random)?;
        let mut name = format!("deep-ep-{}-", std::process::id());
        random
            .iter()
            .for_each(|byte| name.push_str(&format!("{byte:02x}")));
        Ok(Self {
            host: Host::here()?,
            uid: geteuid().as_raw(),
            reserve,
            token: Token::random()?,
            name: name.into_bytes(),
        })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(CARD_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.host.boot_id);
        bytes.extend_from_slice(&self.host.namespace.0.to_le_bytes());
        bytes.extend_from_slice(&self.host.namespace.1.to_le_bytes());
        bytes.extend_from_slice(&self.uid.to_le_bytes());
        bytes.extend_from_slice(&self.reserve.to_le_bytes());
        bytes.extend_from_slice(&self.token.0);
        let name = &self.name[..self.name.len().min(NAME_MAX)];
        bytes.push(name.len() as u8);
        bytes.extend_from_slice(name);
        bytes.resize(CARD_BYTES, 0);
        bytes
    }

    /// Reads a card; `None` if the bytes are none.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != CARD_BYTES {
            return None;
        }
        let mut rest = bytes;
        if take::<8>(&mut rest)? != *MAGIC {
            return None;
        }
        let host = Host {
            boot_id: take(&mut rest)?,
            namespace: (
                u64::from_le_bytes(take(&mut rest)?),
                u64::from_le_bytes(take(&mut rest)?),
            ),
        };
        let uid = u32::from_le_bytes(take(&mut rest)?);
        let reserve = u64::from_le_bytes(take(&mut rest)?);
        let token = Token(take(&mut rest)?);
        let [length] = take(&mut rest)?;
        let name = rest.get(..usize::from(length))?.to_vec();
        (!name.is_empty()).then_some(Self {
            host,
            uid,
            reserve,
            token,
            name,
        })
    }
}

/// Splits `N` bytes off the front.
pub(super) fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (front, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*front)
}

fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|error| {
        let source = std::io::Error::other(error.to_string());
        Error::io("reading random bytes", source)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_card_survives_the_wire() {
        let card = Card::new(12 << 20).unwrap();
        let bytes = card.encode();
        assert_eq!(bytes.len(), CARD_BYTES);
        let read = Card::decode(&bytes).unwrap();
        assert_eq!(read.host.differs_by(&card.host), None);
        assert_eq!(
            (read.uid, read.reserve, &read.name),
            (card.uid, 12 << 20, &card.name)
        );
        assert!(read.token.matches(&card.token.0));
        assert!(!read.token.matches(&card.token.0[..31]));
        assert!(!read.token.matches(&[0; 32]));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_card_or_none(mut bytes in prop::collection::vec(any::<u8>(), CARD_BYTES)) {
            Card::decode(&bytes);
            bytes[..8].copy_from_slice(MAGIC);
            if let Some(card) = Card::decode(&bytes) {
                prop_assert!(card.name.len() <= NAME_MAX);
            }
            prop_assert!(Card::decode(&bytes[1..]).is_none());
        }
    }
}
