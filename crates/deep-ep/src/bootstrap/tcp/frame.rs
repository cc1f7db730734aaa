//! Frames on an established connection, and their decoder.
//!
//! A frame is a header of 20 bytes and a payload:
//!
//! ```text
//!   offset 0    kind          u8
//!          1    zero          3 bytes
//!          4    rank          u32     whom it is about; see Kind
//!          8    sequence      u64     the number of the collective; 0 where none applies
//!         16    length        u32     of the payload, in bytes
//!         20    payload
//! ```
//!
//! Integers are little-endian. The length is checked against the limit of the kind before a byte
//! of the payload is kept, and memory grows with the bytes that have come, not with those announced.

use std::sync::Arc;

use super::super::MAX_CONTRIBUTION;
use crate::topology::Rank;

/// The length of a header, in bytes.
pub(super) const HEADER: usize = 20;

/// The longest text in a frame or a verdict, in bytes.
pub(super) const MAX_TEXT: usize = 512;

/// The most missing ranks that a [`Kind::Waiting`] lists.
pub(super) const MAX_LISTED: usize = 16;

/// What a frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Rank 0: everybody is there. Nothing else.
    Start = 1,
    /// Rank 0: still waiting. `rank`: how many are missing; payload: some of them, `u32` each.
    Waiting = 2,
    /// Rank 0: the rendezvous failed. Payload: why, as text.
    Failed = 3,
    /// To rank 0: the payload is the sender's contribution to `sequence`.
    Contribution = 4,
    /// Rank 0: the payload is `rank`'s contribution to `sequence`.
    Gathered = 5,
    /// Rank 0: `rank` is gone. Payload: one byte, 0 if it left, 1 if it was lost.
    Gone = 6,
    /// Rank 0: `rank` gave up. Payload: the ranks it missed, `u32` each.
    Abort = 7,
    /// To rank 0: the sender's deadline for `sequence` has passed.
    GiveUp = 8,
    /// The sender leaves; nothing follows.
    Bye = 9,
}

/// Who sends on a connection, which says what kinds may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sender {
    /// Rank 0, in a group of so many ranks.
    Hub {
        /// The number of ranks.
        size: usize,
    },
    /// Another rank.
    Member,
}

impl Kind {
    /// The kind with this code, if `sender` may send it, and the most bytes of its payload.
    fn of(code: u8, sender: Sender) -> Option<(Self, usize)> {
        Some(match (sender, code) {
            (Sender::Hub { .. }, 1) => (Self::Start, 0),
            (Sender::Hub { .. }, 2) => (Self::Waiting, 4 * MAX_LISTED),
            (Sender::Hub { .. }, 3) => (Self::Failed, MAX_TEXT),
            (Sender::Member, 4) => (Self::Contribution, MAX_CONTRIBUTION),
            (Sender::Hub { .. }, 5) => (Self::Gathered, MAX_CONTRIBUTION),
            (Sender::Hub { .. }, 6) => (Self::Gone, 1),
            (Sender::Hub { size }, 7) => (Self::Abort, 4 * size),
            (Sender::Member, 8) => (Self::GiveUp, 0),
            (_, 9) => (Self::Bye, 0),
            _ => return None,
        })
    }
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    /// As it came: not checked against the size of the group.
    pub(super) rank: u32,
    pub(super) sequence: u64,
    pub(super) payload: Arc<[u8]>,
}

impl Frame {
    /// A frame of this kind with nothing else.
    pub(super) fn bare(kind: Kind) -> Self {
        Self {
            kind,
            rank: 0,
            sequence: 0,
            payload: Arc::default(),
        }
    }

    /// A frame about `rank`, which is below [`MAX_RANKS`](crate::settings::MAX_RANKS).
    pub(super) fn about(kind: Kind, rank: Rank, payload: impl Into<Arc<[u8]>>) -> Self {
        Self {
            rank: rank.0 as u32,
            payload: payload.into(),
            ..Self::bare(kind)
        }
    }

    /// A frame with a text, cut to [`MAX_TEXT`] bytes.
    pub(super) fn text(kind: Kind, text: &str) -> Self {
        Self::about(kind, Rank(0), cut(text).as_bytes())
    }

    fn header(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[0] = self.kind as u8;
        header[4..8].copy_from_slice(&self.rank.to_le_bytes());
        header[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        // Whoever makes a payload keeps to the limit of its kind.
        header[16..].copy_from_slice(&(self.payload.len() as u32).to_le_bytes());
        header
    }
}

/// Bytes to send, shared by all connections they go to.
pub(super) type Block = Arc<[u8]>;

/// The bytes of `frames`. Small payloads are gathered into few blocks, large ones are not copied.
pub(super) fn encode(frames: impl IntoIterator<Item = Frame>, blocks: &mut Vec<Block>) {
    const SMALL: usize = 64 << 10;
    let mut small = Vec::new();
    for frame in frames {
        small.extend(frame.header());
        if frame.payload.len() < SMALL {
            small.extend(&*frame.payload);
        }
        let large = frame.payload.len() >= SMALL;
        if large || small.len() >= SMALL {
            blocks.push(std::mem::take(&mut small).into());
        }
        if large {
            blocks.push(frame.payload);
        }
    }
    if !small.is_empty() {
        blocks.push(small.into());
    }
}

/// Ranks as a payload.
pub(super) fn encode_ranks(ranks: &[Rank]) -> Vec<u8> {
    let ranks = ranks.iter().map(|rank| (rank.0 as u32).to_le_bytes());
    ranks.flatten().collect()
}

/// The ranks in a payload; those outside the group of `size` are left out.
pub(super) fn decode_ranks(payload: &[u8], size: usize) -> Vec<Rank> {
    let (words, _) = payload.as_chunks::<4>();
    words
        .iter()
        .filter_map(|word| usize::try_from(u32::from_le_bytes(*word)).ok())
        .filter(|rank| *rank < size)
        .map(Rank)
        .collect()
}

/// A text that came from a peer, fit to stand in a message.
pub(super) fn decode_text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.replace(|c: char| c.is_control(), " ")
}

/// The first [`MAX_TEXT`] bytes of `text`, at a boundary of characters.
pub(super) fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Why bytes are not frames. The connection cannot be used further.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a frame of unknown or unexpected kind {0}")]
    Kind(u8),
    #[error("a {kind:?} frame of {length} bytes, where at most {limit} are allowed")]
    TooLong {
        kind: Kind,
        length: usize,
        limit: usize,
    },
    #[error("a frame with bits set that must be zero")]
    Reserved,
}

/// Cuts a stream of bytes, as it comes in pieces, into frames.
pub(super) struct Decoder {
    sender: Sender,
    /// The header as far as it has come.
    header: [u8; HEADER],
    header_len: usize,
    /// The frame whose payload is coming, and the payload's length.
    open: Option<(Frame, usize)>,
    payload: Vec<u8>,
}

impl Decoder {
    pub(super) fn new(sender: Sender) -> Self {
        Self {
            sender,
            header: [0; HEADER],
            header_len: 0,
            open: None,
            payload: Vec::new(),
        }
    }

    /// Takes the next bytes and appends the frames they complete. After an error nothing more may
    /// be fed.
    pub(super) fn feed(
        &mut self,
        mut bytes: &[u8],
        frames: &mut Vec<Frame>,
    ) -> Result<(), FrameError> {
        loop {
            match self.open.take() {
                None => {
                    let wanted = (HEADER - self.header_len).min(bytes.len());
                    let (now, rest) = bytes.split_at(wanted);
                    self.header[self.header_len..][..wanted].copy_from_slice(now);
                    self.header_len += wanted;
                    bytes = rest;
                    if self.header_len < HEADER {
                        return Ok(());
                    }
                    self.header_len = 0;
                    self.open = Some(self.parse_header()?);
                }
                Some((mut frame, length)) => {
                    let wanted = (length - self.payload.len()).min(bytes.len());
                    let (now, rest) = bytes.split_at(wanted);
                    self.payload.extend_from_slice(now);
                    bytes = rest;
                    if self.payload.len() < length {
                        self.open = Some((frame, length));
                        return Ok(());
                    }
                    frame.payload = std::mem::take(&mut self.payload).into();
                    frames.push(frame);
                }
            }
        }
    }

    fn parse_header(&self) -> Result<(Frame, usize), FrameError> {
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&self.header[at..at + 4]);
            u32::from_le_bytes(word)
        };
        let code = self.header[0];
        let (kind, limit) = Kind::of(code, self.sender).ok_or(FrameError::Kind(code))?;
        if self.header[1..4] != [0; 3] {
            return Err(FrameError::Reserved);
        }
        let length = usize::try_from(word(16)).unwrap_or(usize::MAX);
        if length > limit {
            return Err(FrameError::TooLong {
                kind,
                length,
                limit,
            });
        }
        let frame = Frame {
            kind,
            rank: word(4),
            sequence: u64::from(word(8)) | u64::from(word(12)) << 32,
            payload: Arc::default(),
        };
        Ok((frame, length))
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const HUB: Sender = Sender::Hub { size: 4 };

    fn bytes_of(frames: &[Frame]) -> Vec<u8> {
        let mut blocks = Vec::new();
        encode(frames.iter().cloned(), &mut blocks);
        blocks.concat()
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_anything_is_kept() {
        let mut decoder = Decoder::new(Sender::Member);
        let mut header = Frame::bare(Kind::Contribution).header();
        header[16..].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = decoder.feed(&header, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("4294967295"), "{error}");
        assert_eq!(decoder.payload.capacity(), 0);

        // The largest announcement that is allowed costs no memory until bytes come.
        header[16..].copy_from_slice(&(MAX_CONTRIBUTION as u32).to_le_bytes());
        let mut decoder = Decoder::new(Sender::Member);
        decoder.feed(&header, &mut Vec::new()).unwrap();
        assert_eq!(decoder.payload.capacity(), 0);
    }

    #[test]
    fn members_may_not_send_what_only_rank_0_may() {
        let bytes = bytes_of(&[Frame::about(Kind::Gone, Rank(1), [1])]);
        let mut frames = Vec::new();
        let error = Decoder::new(Sender::Member).feed(&bytes, &mut frames);
        assert_eq!(error, Err(FrameError::Kind(6)));
        assert_eq!(Decoder::new(HUB).feed(&bytes, &mut frames), Ok(()));
    }

    #[test]
    fn texts_are_cut_between_characters_and_made_printable() {
        assert_eq!(cut(&"é".repeat(300)).len(), 512);
        assert_eq!(cut(&format!("a{}", "é".repeat(300))).len(), 511);
        assert_eq!(decode_text(b"a\x1b[2Jb\xff"), "a [2Jb\u{fffd}");
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            payloads in vec((any::<u32>(), any::<u64>(), vec(any::<u8>(), 0..200)), 0..8),
            large in 0_usize..200_000,
            piece in 1_usize..100,
        ) {
            let mut frames: Vec<_> = payloads.into_iter().map(|(rank, sequence, payload)| Frame {
                kind: Kind::Gathered, rank, sequence, payload: payload.into(),
            }).collect();
            frames.insert(frames.len() / 2, Frame::about(Kind::Gathered, Rank(1), vec![7; large]));
            let mut decoder = Decoder::new(HUB);
            let mut decoded = Vec::new();
            for piece in bytes_of(&frames).chunks(piece) {
                decoder.feed(piece, &mut decoded).unwrap();
            }
            prop_assert_eq!(decoded, frames);
        }

        #[test]
        fn any_bytes_neither_panic_nor_allocate_more_than_they_are(
            pieces in vec(vec(any::<u8>(), 0..64), 0..64),
            code in 0_u8..12,
            hub: bool,
        ) {
            let mut decoder = Decoder::new(if hub { HUB } else { Sender::Member });
            let mut frames = Vec::new();
            let mut fed = 4;
            // A plausible beginning, so that more than the first check is reached.
            let start = [code, 0, 0, 0];
            for piece in std::iter::once(&start[..]).chain(pieces.iter().map(Vec::as_slice)) {
                fed += piece.len();
                if decoder.feed(piece, &mut frames).is_err() {
                    break;
                }
                prop_assert!(decoder.payload.capacity() <= 2 * fed);
            }
            prop_assert!(frames.iter().map(|f| HEADER + f.payload.len()).sum::<usize>() <= fed);
        }
    }
}
