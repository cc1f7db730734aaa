//! What goes over the connections between the processes: records of a fixed length each, numbers in
//! little-endian order.
//!
//! | bytes | field of an offer (owner to peer, with one file) |
//! | --- | --- |
//! | 8 | `DEEPEPO1` |
//! | 8 | offset of the new memory in the owner's region |
//! | 8 | bytes of it |
//!
//! | bytes | field of an answer (peer to owner) |
//! | --- | --- |
//! | 8 | `DEEPEPA1` |
//! | 8 | end of the offered memory in the owner's region |
//! | 1 | 0: mapped; 1: not, and the rest says why |
//! | 1, 238 | length of a text in UTF-8, the text, zeros |

/// "My region has grown; here is the memory."
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

pub(super) const OFFER_BYTES: usize = 24;
const OFFER: [u8; 8] = *b"DEEPEPO1";

impl Offer {
    /// Where the offered memory ends; `None` if no region is so large.
    pub(super) fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.bytes)
    }

    pub(super) fn encode(&self) -> [u8; OFFER_BYTES] {
        let mut bytes = [0; OFFER_BYTES];
        bytes[..8].copy_from_slice(&OFFER);
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// Reads an offer; `None` if the bytes are none.
    pub(super) fn decode(bytes: &[u8; OFFER_BYTES]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        let (bytes, _) = rest.split_first_chunk()?;
        (*magic == OFFER).then_some(Self {
            offset: u64::from_le_bytes(*offset),
            bytes: u64::from_le_bytes(*bytes),
        })
    }
}

/// "I can use your memory up to here", or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) end: u64,
    /// Why it could not be mapped, if it could not.
    pub(super) refused: Option<String>,
}

pub(super) const ANSWER_BYTES: usize = 256;
const ANSWER: [u8; 8] = *b"DEEPEPA1";
const TEXT: usize = 18;

impl Answer {
    pub(super) fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..8].copy_from_slice(&ANSWER);
        bytes[8..16].copy_from_slice(&self.end.to_le_bytes());
        if let Some(why) = &self.refused {
            let why = cut(why, ANSWER_BYTES - TEXT);
            bytes[16] = 1;
            bytes[17] = why.len() as u8;
            bytes[TEXT..TEXT + why.len()].copy_from_slice(why.as_bytes());
        }
        bytes
    }

    /// Reads an answer; `None` if the bytes are none.
    pub(super) fn decode(bytes: &[u8; ANSWER_BYTES]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (end, rest) = rest.split_first_chunk()?;
        let (&[state, length], text) = rest.split_first_chunk()?;
        let text = text.get(..usize::from(length))?;
        let refused = match state {
            0 => None,
            1 => Some(String::from_utf8_lossy(text).into_owned()),
            _ => return None,
        };
        (*magic == ANSWER).then_some(Self {
            end: u64::from_le_bytes(*end),
            refused,
        })
    }
}

/// As much of a text as fits into so many bytes.
pub(super) fn cut(text: &str, bytes: usize) -> &str {
    let ends = (0..=bytes.min(text.len())).rev();
    let end = ends.into_iter().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn records_survive_the_wire(offset: u64, bytes: u64, why in prop::option::of(".{0,90}")) {
            let offer = Offer { offset, bytes };
            prop_assert_eq!(Offer::decode(&offer.encode()), Some(offer));
            prop_assert_eq!(offer.end(), offset.checked_add(bytes));
            let mut answer = Answer { end: offset, refused: why };
            let read = Answer::decode(&answer.encode()).unwrap();
            // A long text arrives cut, between characters.
            if let (Some(sent), Some(came)) = (&mut answer.refused, &read.refused) {
                prop_assert!(came.len() >= sent.len().min(ANSWER_BYTES - TEXT - 3));
                sent.truncate(came.len());
            }
            prop_assert_eq!(read, answer);
        }

        #[test]
        fn any_bytes_are_a_record_or_none(
            offer: [u8; OFFER_BYTES],
            answer in prop::collection::vec(any::<u8>(), ANSWER_BYTES),
        ) {
            let mut offer = offer;
            let mut answer: [u8; ANSWER_BYTES] = answer.try_into().unwrap();
            prop_assume!(offer[..8] != OFFER && answer[..8] != ANSWER);
            prop_assert_eq!(Offer::decode(&offer), None);
            prop_assert_eq!(Answer::decode(&answer), None);
            offer[..8].copy_from_slice(&OFFER);
            answer[..8].copy_from_slice(&ANSWER);
            prop_assert!(Offer::decode(&offer).is_some());
            prop_assert_eq!(Answer::decode(&answer).is_some(), answer[16] < 2 && answer[17] <= 238);
        }
    }
}
