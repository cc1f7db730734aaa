//! What the ranks tell each other before they make memory.
//!
//! Facts are encoded as, numbers in little-endian order:
//!
//! | bytes | field |
//! | --- | --- |
//! | 8 | `DEEPEPG1` |
//! | 16 | UUID of the rank's GPU |
//! | 4 | its ordinal in the rank's process |
//! | 8 | granularity of its memory in bytes |
//! | 8, 8 | addresses to reserve and memory to commit at first, in bytes |
//! | 1, n | length of the GPU's PCI address, the address |
//! | 1, n | length of its name, the name |

use std::fmt;

use super::record;
use crate::{
    engine::cuda::driver::{device::Device, vmm::Sharing},
    error::{Error, Result},
};

/// A rank's GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// What tells it from every other.
    pub(crate) uuid: [u8; 16],
    /// Its number in the rank's process.
    pub(crate) ordinal: usize,
    /// For example `0000:1A:00.0`.
    pub(crate) pci_address: String,
    /// For example `NVIDIA H200`.
    pub(crate) name: String,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ordinal, .. } = self;
        write!(f, "GPU {ordinal} ({}, {})", self.name, self.pci_address)
    }
}

/// What one rank has and wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) gpu: Gpu,
    /// A power of two.
    pub(super) granularity: u64,
    pub(super) reserve: u64,
    pub(super) commit: u64,
}

const MAGIC: [u8; 8] = *b"DEEPEPG1";

/// No GPU has more addresses.
const MOST: u64 = 1 << 56;

impl Facts {
    /// Of this device; a `reserve` of 0 stands for as many addresses as it has memory.
    pub(super) fn of(device: &Device, sharing: Sharing, reserve: u64, commit: u64) -> Result<Self> {
        sharing.check(device)?;
        let reserve = match reserve {
            0 => device.memory()?,
            some => some,
        };
        if reserve > MOST {
            let limit = format!("must be at most {MOST} bytes");
            return Err(Error::invalid("reserve", reserve, limit));
        }
        if commit > reserve {
            return Err(Error::OutOfMemory {
                purpose: super::PURPOSE,
                requested: commit,
                limit: reserve,
            });
        }
        Ok(Self {
            gpu: Gpu {
                uuid: device.uuid()?,
                ordinal: device.ordinal,
                pci_address: device.pci_address()?,
                name: device.name()?,
            },
            granularity: sharing.granularity(device)?,
            reserve,
            // The peers want something to map.
            commit: commit.max(1),
        })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&self.gpu.uuid);
        bytes.extend_from_slice(&(self.gpu.ordinal as u32).to_le_bytes());
        for number in [self.granularity, self.reserve, self.commit] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for text in [&self.gpu.pci_address, &self.gpu.name] {
            let text = record::cut(text, 255);
            bytes.push(text.len() as u8);
            bytes.extend_from_slice(text.as_bytes());
        }
        bytes
    }

    /// Reads facts; `None` if the bytes are none, or cannot be true.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        if take::<8>(&mut rest)? != MAGIC {
            return None;
        }
        let uuid = take(&mut rest)?;
        let ordinal = u32::from_le_bytes(take(&mut rest)?) as usize;
        let [granularity, reserve, commit] =
            [take(&mut rest)?, take(&mut rest)?, take(&mut rest)?].map(u64::from_le_bytes);
        let gpu = Gpu {
            uuid,
            ordinal,
            pci_address: text(&mut rest)?,
            name: text(&mut rest)?,
        };
        let possible = granularity.is_power_of_two()
            && granularity <= MOST
            && reserve <= MOST
            && (1..=reserve).contains(&commit)
            && rest.is_empty();
        possible.then_some(Self {
            gpu,
            granularity,
            reserve,
            commit,
        })
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (front, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*front)
}

fn text(bytes: &mut &[u8]) -> Option<String> {
    let [length] = take(bytes)?;
    let (text, rest) = bytes.split_at_checked(usize::from(length))?;
    *bytes = rest;
    Some(String::from_utf8_lossy(text).into_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn facts() -> Facts {
        Facts {
            gpu: Gpu {
                uuid: *b"0123456789abcdef",
                ordinal: 3,
                pci_address: "0000:1A:00.0".into(),
                name: "NVIDIA H200".into(),
            },
            granularity: 2 << 20,
            reserve: 1 << 37,
            commit: 5,
        }
    }

    #[test]
    fn facts_survive_the_wire() {
        let facts = facts();
        assert_eq!(Facts::decode(&facts.encode()), Some(facts.clone()));
        assert_eq!(facts.gpu.to_string(), "GPU 3 (NVIDIA H200, 0000:1A:00.0)");
    }

    #[test]
    fn impossible_facts_are_none() {
        let changed = |change: fn(&mut Facts)| {
            let mut facts = facts();
            change(&mut facts);
            Facts::decode(&facts.encode())
        };
        assert!(changed(|_| {}).is_some());
        assert_eq!(changed(|facts| facts.granularity = 3), None);
        assert_eq!(changed(|facts| facts.commit = 0), None);
        assert_eq!(changed(|facts| facts.commit = facts.reserve + 1), None);
        assert_eq!(changed(|facts| facts.reserve = MOST + 1), None);
        let bytes = facts().encode();
        for length in 0..bytes.len() {
            assert_eq!(Facts::decode(&bytes[..length]), None);
        }
        assert_eq!(Facts::decode(&[bytes, vec![0]].concat()), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_facts_or_none(mut bytes in prop::collection::vec(any::<u8>(), 8..100)) {
            Facts::decode(&bytes);
            bytes[..8].copy_from_slice(&MAGIC);
            Facts::decode(&bytes);
        }
    }
}
