//! The first message of a call: its settings, what the sender sends to whom, or why it will not.
//!
//! ```text
//! 0        status: 0 accepted, 1 rejected (text follows), 2 abandoned
//! 1 ..= 7  terms, which must agree between ranks
//! 8 ..     what only this sender knows (see `Announcement`)
//! 16 .. R  rows for each rank
//! then     the text of a reject: length, then bytes
//! ```

use super::{
    control::{FIXED_WORDS, Kind, TEXT_WORDS},
    group::{Absent, At, Group, Message, Stage},
    low_latency::cycles,
};
use crate::{
    engine::Operation,
    error::{Error, Reject, Result, Text},
    tensor::TensorMut,
    topology::Rank,
};

const STATUS: usize = 0;
const TERMS: usize = 1;
const OWN: usize = 8;

/// Rows from one rank to another are fewer than this: tokens are counted in 31 bits.
const MAX_ROWS: u64 = 1 << 31;

/// Status words of all messages.
pub(super) const ACCEPTED: u64 = 0;
pub(super) const REJECTED: u64 = 1;
pub(super) const ABANDONED: u64 = 2;
pub(super) const NO_MEMORY: u64 = 3;

/// Settings of a call that all ranks must have passed alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) operation: Operation,
    pub(super) num_experts: usize,
    /// Bytes of a row.
    pub(super) row_bytes: usize,
    pub(super) top_k: usize,
    pub(super) scale_columns: usize,
    /// Most tokens of a rank; 0 where there is no such bound.
    pub(super) max_tokens: usize,
    /// Format and optional parts, as the operation numbers them.
    pub(super) format: u64,
}

impl Terms {
    /// Terms of an operation without any.
    pub(super) fn new(operation: Operation) -> Self {
        Self {
            operation,
            num_experts: 0,
            row_bytes: 0,
            top_k: 0,
            scale_columns: 0,
            max_tokens: 0,
            format: 0,
        }
    }

    const NAMES: [&str; 7] = [
        "the operation",
        "num_experts",
        "the bytes of a row",
        "top-k",
        "the columns of scales",
        "num_max_dispatch_tokens_per_rank",
        "the format or an optional tensor",
    ];

    fn words(&self) -> [u64; 7] {
        [
            self.operation as u64,
            self.num_experts as u64,
            self.row_bytes as u64,
            self.top_k as u64,
            self.scale_columns as u64,
            self.max_tokens as u64,
            self.format,
        ]
    }

    fn value(i: usize, word: u64) -> String {
        match (i, Operation::from_code(word)) {
            (0, Some(operation)) => operation.name().into(),
            _ => word.to_string(),
        }
    }
}

/// The first message of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Announcement {
    pub(super) terms: Terms,
    /// Tokens of the sender.
    pub(super) tokens: usize,
    /// Most rows that the sender can receive; `u64::MAX` for any number.
    pub(super) worst_rows: u64,
    /// Where the sender's metadata block is in its region.
    pub(super) metadata: u64,
    pub(super) metadata_len: u64,
    /// Dispatch: 1 when the sender will push rows to their landing, 0 when they are to be pulled.
    pub(super) pushes: bool,
    /// Dispatch: rows for each rank. Combine: rows of each rank.
    pub(super) rows: Vec<u64>,
}

impl Announcement {
    /// No tokens and no rows.
    pub(super) fn new(terms: Terms, ranks: usize) -> Self {
        Self {
            terms,
            tokens: 0,
            worst_rows: u64::MAX,
            metadata: 0,
            metadata_len: 0,
            pushes: false,
            rows: vec![0; ranks],
        }
    }

    pub(super) fn post(&self, group: &Group, call: u64) {
        let mut words = vec![ACCEPTED];
        words.extend(self.terms.words());
        words.extend([
            self.tokens as u64,
            self.worst_rows,
            self.metadata,
            self.metadata_len,
            u64::from(self.pushes),
        ]);
        words.resize(FIXED_WORDS, 0);
        words.extend(&self.rows);
        for peer in group.peers() {
            group.post(peer, Kind::Announce, call, &words);
        }
    }

    /// The announcement in `message`, which came from `from`.
    pub(super) fn read(
        message: &Message<'_>,
        terms: &Terms,
        from: usize,
        group: &Group,
    ) -> Result<Self> {
        if message.word(STATUS) != ACCEPTED {
            return Err(Error::PeerRejected {
                rank: Rank(from),
                reason: read_reject(message, group),
            });
        }
        for (i, mine) in terms.words().into_iter().enumerate() {
            let other = message.word(TERMS + i);
            if other != mine {
                return Err(Error::SettingsDiffer {
                    setting: Terms::NAMES[i].into(),
                    this_rank: Rank(group.rank()),
                    this_value: Terms::value(i, mine),
                    other_rank: Rank(from),
                    other_value: Terms::value(i, other),
                });
            }
        }
        let rows = message.words(FIXED_WORDS..FIXED_WORDS + group.ranks());
        let tokens = message.word(OWN);
        if let Some(absurd) = rows.iter().chain([&tokens]).find(|&&n| n >= MAX_ROWS) {
            return Err(Error::invalid(
                format!("a number of rows that rank {from} announced"),
                absurd,
                format!("must be below {MAX_ROWS}"),
            ));
        }
        Ok(Self {
            terms: *terms,
            tokens: tokens as usize,
            worst_rows: message.word(OWN + 1),
            metadata: message.word(OWN + 2),
            metadata_len: message.word(OWN + 3),
            pushes: message.word(OWN + 4) != 0,
            rows,
        })
    }
}

/// Waits for the announcements of all ranks; `own` stands for this rank's, and `None` for those of
/// masked ranks. Only when all are there are they looked into, so every rank comes to the same
/// verdict about the call. Clock cycles waited for each rank are added to `stats`, `[R]` i64.
pub(super) fn gather(
    group: &Group,
    call: u64,
    own: &Announcement,
    absent: Absent,
    stats: Option<&mut TensorMut<'_>>,
) -> Result<Vec<Option<Announcement>>> {
    let at = At {
        operation: own.terms.operation,
        stage: Stage::Counts,
    };
    let start = cycles();
    let mut waited = vec![0; group.ranks()];
    group.wait(at, group.peers().collect(), absent, |peer| {
        let here = group.look(peer, Kind::Announce, call)?.is_some();
        if here {
            waited[peer] = cycles() - start;
        }
        Ok(here)
    })?;
    if let Some(stats) = stats {
        for (sum, waited) in stats.as_mut_slice::<i64>()?.iter_mut().zip(waited) {
            *sum = sum.wrapping_add(waited);
        }
    }
    let read = |rank| {
        if rank == group.rank() {
            return Ok(Some(own.clone()));
        }
        if group.is_masked(rank) {
            return Ok(None);
        }
        let message = group.look(rank, Kind::Announce, call)?;
        message
            .map(|message| Announcement::read(&message, &own.terms, rank, group))
            .transpose()
    };
    (0..group.ranks()).map(read).collect()
}

/// [`gather`] for operations that need every rank.
pub(super) fn gather_all(
    group: &Group,
    call: u64,
    own: &Announcement,
) -> Result<Vec<Announcement>> {
    let all = gather(group, call, own, Absent::Fail, None)?;
    all.into_iter()
        .enumerate()
        .map(|(rank, announced)| {
            announced.ok_or_else(|| Error::PeerLost {
                operation: own.terms.operation.name().into(),
                stage: "counts, where it is masked".into(),
                ranks: vec![Rank(rank)],
            })
        })
        .collect()
}

/// Posts a reject in place of an announcement.
pub(super) fn post_reject(group: &Group, call: u64, reject: &Reject) {
    let mut text = format!("{}\0{}\0{}", reject.argument, reject.value, reject.limit).into_bytes();
    text.truncate((TEXT_WORDS - 1) * 8);
    let mut words = vec![REJECTED];
    words.resize(FIXED_WORDS + group.ranks(), 0);
    words.push(text.len() as u64);
    text.resize(text.len().next_multiple_of(8), 0);
    words.extend(
        text.chunks_exact(8)
            .map(|chunk| u64::from_le_bytes(chunk.try_into().expect("8 bytes"))),
    );
    for peer in group.peers() {
        group.post(peer, Kind::Announce, call, &words);
    }
}

fn read_reject(message: &Message<'_>, group: &Group) -> Reject {
    if message.word(STATUS) != REJECTED {
        return note_reject(message.word(STATUS), 0, 0);
    }
    let start = FIXED_WORDS + group.ranks();
    let len = (message.word(start) as usize).min((TEXT_WORDS - 1) * 8);
    let bytes: Vec<u8> = message
        .words(start + 1..start + 1 + len.div_ceil(8))
        .into_iter()
        .flat_map(u64::to_le_bytes)
        .take(len)
        .collect();
    let text = String::from_utf8_lossy(&bytes);
    let mut parts = text.splitn(3, '\0').map(str::to_owned);
    let mut next = || parts.next().unwrap_or_default();
    Reject {
        argument: Text::from(next()),
        value: next(),
        limit: Text::from(next()),
    }
}

/// The reason in the status of a later message.
pub(super) fn note_reject(status: u64, requested: u64, limit: u64) -> Reject {
    match status {
        NO_MEMORY => Reject::new(
            "memory for received rows",
            format!("{requested} bytes"),
            format!("must fit the limit of {limit} bytes"),
        ),
        _ => Reject::new("the call", "abandoned", "must be finished by every rank"),
    }
}
