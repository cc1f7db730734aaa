//! The work that a rank does in these tests: rounds of dispatch and combine whose payload says which
//! rank, token and call it belongs to, so that nothing stale or misplaced goes unnoticed.

use deep_ep::{
    Buffer, BufferConfig, CombineInput, CombineOutput, DispatchInput, DispatchOutput, Landing,
    LowLatencyCombineInput, LowLatencyConfig, LowLatencyDispatchInput, OwnedTensor, Rank, Result,
    Routes, Tensor, TopK, dtype::DType,
};
use half::bf16;

pub(crate) const HIDDEN: usize = 64;
pub(crate) const TOP_K: usize = 2;
pub(crate) const MAX_TOKENS: usize = 24;
const EXPERTS_PER_RANK: usize = 2;

/// What a round does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// High-throughput, rows as loans.
    Loan,
    /// High-throughput, rows into the caller's memory.
    Caller,
    LowLatency,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Loan, Self::Caller, Self::LowLatency];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Loan => "loan",
            Self::Caller => "caller",
            Self::LowLatency => "low latency",
        }
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// The steps of every round, in order: what [`round`] passes to its hook before each.
pub(crate) const STEPS: [&str; 4] = ["dispatch", "dispatch finish", "combine", "combine finish"];

pub(crate) fn config(ranks: usize) -> BufferConfig {
    BufferConfig {
        low_latency: Some(LowLatencyConfig {
            max_tokens_per_rank: MAX_TOKENS,
            hidden: HIDDEN,
            num_experts: ranks * EXPERTS_PER_RANK,
            exact_top_k: None,
        }),
        ..BufferConfig::from_env().unwrap()
    }
}

/// A number that depends on all of `parts` and looks random.
pub(crate) fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15, |hash, part| {
        let hash = (hash ^ part).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash ^ hash >> 29
    })
}

fn tokens(rank: usize, call: u64) -> usize {
    mix(&[1, rank as u64, call]) as usize % (MAX_TOKENS + 1)
}

/// The expert that the router chose, or -1.
fn choice(rank: usize, call: u64, token: usize, k: usize, ranks: usize) -> i64 {
    let random = mix(&[2, rank as u64, call, token as u64, k as u64]);
    match random % 16 {
        0 => -1,
        _ => (random / 16 % (ranks * EXPERTS_PER_RANK) as u64) as i64,
    }
}

fn rank_of(expert: i64) -> Option<usize> {
    usize::try_from(expert).ok().map(|e| e / EXPERTS_PER_RANK)
}

/// Element `h` of a row: small integers, so that bf16 holds them and four times them exactly.
fn element(rank: usize, call: u64, token: usize, h: usize) -> f32 {
    let fields = [rank as u64, token as u64, call % 64, call / 64 % 64];
    (fields[h % 4] + (h / 4) as u64) as f32 % 64.0
}

/// The ranks that `token` goes to, ascending, each once.
fn destinations(rank: usize, call: u64, token: usize, ranks: usize) -> Vec<usize> {
    let mut to: Vec<_> = (0..TOP_K)
        .filter_map(|k| rank_of(choice(rank, call, token, k, ranks)))
        .collect();
    to.sort_unstable();
    to.dedup();
    to
}

/// The inputs of one rank for one call.
struct Batch {
    rank: usize,
    ranks: usize,
    call: u64,
    tokens: usize,
    x: Vec<bf16>,
    idx: Vec<i64>,
    weights: Vec<f32>,
}

impl Batch {
    fn new(buffer: &Buffer, call: u64) -> Self {
        let (rank, ranks) = (buffer.rank().0, buffer.num_ranks());
        let tokens = tokens(rank, call);
        let row = |token| (0..HIDDEN).map(move |h| element(rank, call, token, h));
        let choices = |token| (0..TOP_K).map(move |k| choice(rank, call, token, k, ranks));
        Self {
            rank,
            ranks,
            call,
            tokens,
            x: (0..tokens).flat_map(row).map(bf16::from_f32).collect(),
            idx: (0..tokens).flat_map(choices).collect(),
            weights: vec![1.0; tokens * TOP_K],
        }
    }

    fn x(&self) -> Tensor<'_> {
        Tensor::new(&self.x, &[self.tokens, HIDDEN]).unwrap()
    }

    fn idx(&self) -> Tensor<'_> {
        Tensor::new(&self.idx, &[self.tokens, TOP_K]).unwrap()
    }

    fn weights(&self) -> Tensor<'_> {
        Tensor::new(&self.weights, &[self.tokens, TOP_K]).unwrap()
    }

    /// (source rank, source token) of each row that this rank is to receive, in order.
    fn expected_rows(&self, to: impl Fn(usize, usize) -> bool) -> Vec<(usize, usize)> {
        (0..self.ranks)
            .flat_map(|source| (0..tokens(source, self.call)).map(move |token| (source, token)))
            .filter(|&(source, token)| to(source, token))
            .collect()
    }

    fn check_row(&self, row: &[bf16], source: usize, token: usize) {
        for (h, value) in row.iter().enumerate() {
            let expected = element(source, self.call, token, h);
            assert_eq!(
                value.to_f32(),
                expected,
                "call {}: rank {} received element {h} of token {token} of rank {source} wrongly",
                self.call,
                self.rank
            );
        }
    }

    /// Checks rows that came back, each `times(token)` times.
    fn check_combined(&self, combined: &OwnedTensor, times: impl Fn(usize) -> usize) {
        let combined = combined.as_tensor();
        assert_eq!(combined.shape(), [self.tokens, HIDDEN]);
        let values = combined.as_slice::<bf16>().unwrap();
        for (i, value) in values.iter().enumerate() {
            let (token, h) = (i / HIDDEN, i % HIDDEN);
            let expected = element(self.rank, self.call, token, h) * times(token) as f32;
            assert_eq!(
                value.to_f32(),
                expected,
                "call {}: rank {} got element {h} of its token {token} back wrongly",
                self.call,
                self.rank
            );
        }
    }
}

/// Call number `call` of this rank: dispatch, experts that return what they got, combine. Everything
/// received is checked. `step` is called before each of [`STEPS`].
///
/// Low-latency rounds take ranks that are masked at the end of a half as absent in it.
pub(crate) fn round(
    buffer: &Buffer,
    kind: Kind,
    call: u64,
    step: &mut dyn FnMut(&'static str),
) -> Result<()> {
    match kind {
        Kind::LowLatency => low_latency(buffer, call, step),
        _ => high_throughput(buffer, kind == Kind::Loan, call, step),
    }
}

fn high_throughput(
    buffer: &Buffer,
    loan: bool,
    call: u64,
    step: &mut dyn FnMut(&'static str),
) -> Result<()> {
    let batch = Batch::new(buffer, call);
    let (me, ranks) = (batch.rank, batch.ranks);
    let routes = Routes::TopK {
        topk: TopK {
            idx: batch.idx(),
            weights: None,
        },
        num_experts: ranks * EXPERTS_PER_RANK,
    };
    let expected =
        batch.expected_rows(|from, token| destinations(from, call, token, ranks).contains(&me));
    let check = |rows: &[bf16]| {
        assert_eq!(rows.len(), expected.len() * HIDDEN);
        for (row, &(source, token)) in rows.chunks_exact(HIDDEN).zip(&expected) {
            batch.check_row(row, source, token);
        }
    };
    step(STEPS[0]);
    let mut pending = buffer.dispatch(DispatchInput {
        landing: if loan { Landing::Loan } else { Landing::Caller },
        ..DispatchInput::new(batch.x(), routes)
    })?;
    step(STEPS[1]);
    let combined = if loan {
        let received = pending.finish()?;
        check(received.x.as_tensor().as_slice()?);
        step(STEPS[2]);
        let pending = buffer.combine(CombineInput::new(&received.x, &received.handle))?;
        step(STEPS[3]);
        pending.finish()?.x
    } else {
        let rows = pending.counts()?.output_rows;
        let mut received = OwnedTensor::zeros(DType::Bf16, &[rows, HIDDEN])?;
        let out = DispatchOutput::new(received.as_tensor_mut());
        let (_, handle) = pending.finish_into(out)?;
        check(received.as_tensor().as_slice()?);
        step(STEPS[2]);
        let pending = buffer.combine(CombineInput::new(received.as_tensor(), &handle))?;
        step(STEPS[3]);
        let mut combined = OwnedTensor::zeros(DType::Bf16, &[batch.tokens, HIDDEN])?;
        pending.finish_into(CombineOutput::new(combined.as_tensor_mut()))?;
        combined
    };
    batch.check_combined(&combined, |token| {
        destinations(me, call, token, ranks).len()
    });
    Ok(())
}

fn low_latency(buffer: &Buffer, call: u64, step: &mut dyn FnMut(&'static str)) -> Result<()> {
    let batch = Batch::new(buffer, call);
    let (me, ranks) = (batch.rank, batch.ranks);
    let masks = || buffer.masks().unwrap_or_else(|_| vec![false; ranks]);
    let input =
        LowLatencyDispatchInput::new(batch.x(), batch.idx(), MAX_TOKENS, ranks * EXPERTS_PER_RANK);
    step(STEPS[0]);
    let pending = buffer.low_latency_dispatch(input)?;
    step(STEPS[1]);
    let received = pending.finish()?;
    let absent = masks();
    let x = received.x.as_tensor();
    let rows = x.as_slice::<bf16>()?;
    for (local, &count) in received.recv_count.as_slice::<i32>()?.iter().enumerate() {
        let expert = (me * EXPERTS_PER_RANK + local) as i64;
        let expected = batch.expected_rows(|source, token| {
            !absent[source] && (0..TOP_K).any(|k| choice(source, call, token, k, ranks) == expert)
        });
        assert_eq!(count as usize, expected.len(), "rows of expert {expert}");
        let rows = &rows[local * ranks * MAX_TOKENS * HIDDEN..];
        for (row, &(source, token)) in rows.chunks_exact(HIDDEN).zip(&expected) {
            batch.check_row(row, source, token);
        }
        for (source, absent) in absent.iter().enumerate() {
            if *absent {
                let range = received.handle.layout_range();
                assert_eq!(range.as_slice::<i64>()?[local * ranks + source] as u32, 0);
            }
        }
    }
    step(STEPS[2]);
    let pending = buffer.low_latency_combine(LowLatencyCombineInput::new(
        x,
        batch.idx(),
        batch.weights(),
        &received.handle,
    ))?;
    step(STEPS[3]);
    let combined = pending.finish()?;
    let absent = masks();
    batch.check_combined(&combined, |token| {
        (0..TOP_K)
            .filter_map(|k| rank_of(choice(me, call, token, k, ranks)))
            .filter(|&rank| !absent[rank])
            .count()
    });
    Ok(())
}

/// The ranks that an error is about.
pub(crate) fn ranks_named(error: &deep_ep::Error) -> Vec<usize> {
    use deep_ep::Error::{Aborted, PeerLost, PeerRejected, Timeout};
    let ranks: &[Rank] = match error {
        Timeout { ranks, .. } | Aborted { ranks, .. } | PeerLost { ranks, .. } => ranks,
        PeerRejected { rank, .. } => std::slice::from_ref(rank),
        _ => &[],
    };
    ranks.iter().map(|rank| rank.0).collect()
}
