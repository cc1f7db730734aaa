//! Low-latency combine. The protocol is described in the engine's module.

use std::sync::Arc;

use half::bf16;

use super::{
    super::{
        announce::{ACCEPTED, Announcement, Terms, gather, note_reject},
        control::Kind,
        copy::{self, Store, store_fence},
        core::{Core, Counters, Member},
        group::{At, Stage},
        rows::RowsMut,
    },
    CombineHalf, Halves, cycles,
};
use crate::{
    buffer::{CombineWire, LowLatencyCombineInput, LowLatencyHandle},
    codec::{self, WeightedRow, logfmt},
    dtype::DType,
    engine::{LowLatencyCombineCall, Operation},
    error::{Error, Result},
    routing::ExpertMap,
    tensor::{Tensor, TensorMut},
    topology::Rank,
};

const OPERATION: Operation = Operation::LowLatencyCombine;

/// A combine between its two halves.
struct InFlight {
    member: Arc<Member>,
    call: u64,
    own: Announcement,
    half: CombineHalf,
}

/// One choice of a token, as it travels to the expert's rank.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Choice {
    expert: i32,
    weight: f32,
}

pub(in crate::engine::cpu) fn send(
    member: &Arc<Member>,
    input: &mut LowLatencyCombineInput<'_>,
) -> Result<Box<dyn LowLatencyCombineCall>> {
    let core = &member.core;
    let mut turn = core.begin(OPERATION)?;
    let ranks = core.group.ranks();
    let x = input.x.as_tensor();
    let (hidden, top_k) = (x.shape()[2], input.topk_idx.shape()[1]);
    let tokens = input.handle.max_tokens_per_rank();
    let exact = input.wire == CombineWire::Exact;
    let half = CombineHalf::new(ranks, tokens, top_k, hidden, exact);
    let prepared = Halves::new(core, turn.call, half.map(|half| half.bytes)).and_then(|halves| {
        let map = ExpertMap::new(input.handle.num_experts(), ranks)?;
        Ok((
            halves,
            choices(&input.topk_idx, &input.topk_weights, &map)?,
            map,
        ))
    });
    let (halves, choices, map) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return Err(turn.reject_for(error)),
    };
    let half = half.expect("the halves were found large enough for it");
    let mut own = Announcement::new(
        Terms {
            operation: OPERATION,
            num_experts: input.handle.num_experts(),
            row_bytes: hidden * 2,
            top_k,
            scale_columns: 0,
            max_tokens: tokens,
            format: input.wire as u64,
        },
        ranks,
    );
    own.tokens = input.topk_idx.shape()[0];
    let me = core.group.rank();
    for rank in core.group.peers().chain([me]) {
        let bytes: &[u8] = bytemuck::cast_slice(&choices);
        let to = halves.at(rank, half.choices_at(me), bytes.len());
        // SAFETY: these choices' place is this rank's in this call; they are read after the
        // announcement.
        unsafe { copy::copy(to, bytes.as_ptr(), bytes.len(), Store::Cached) };
        Counters::add(&core.counters.wire, bytes.len());
    }
    own.post(&core.group, turn.call);
    turn.owe(Kind::Delivered);
    let this = InFlight {
        member: member.clone(),
        call: turn.call,
        own,
        half,
    };
    // Dropped before `this`, which waits for the end of the turn: also when something panics.
    let mut turn = turn;
    let stats = input.wait_stats.as_mut();
    let sent =
        gather(&core.group, turn.call, &this.own, core.absent, stats).and_then(|announced| {
            this.send_sums(&halves, &x, input.handle, input.wire, &map, &announced)
        });
    if let Err(error) = sent {
        // `this` is dropped after the turn and finds the call closed.
        return turn.finish(Err(error));
    }
    turn.paid(Kind::Delivered);
    drop(turn);
    Ok(Box::new(this))
}

/// The choices of this rank's tokens, `[T, K]`.
fn choices(idx: &Tensor<'_>, weights: &Tensor<'_>, map: &ExpertMap) -> Result<Vec<Choice>> {
    let (tokens, k) = (idx.shape()[0], idx.shape()[1]);
    let mut choices = Vec::with_capacity(tokens * k);
    for i in 0..tokens * k {
        let (token, j) = (i / k, i % k);
        let id = match idx.dtype() {
            DType::I64 => idx.at::<i64>(token, j),
            _ => i64::from(idx.at::<i32>(token, j)),
        };
        if id >= map.experts() as i64 {
            return Err(Error::invalid(
                format!("topk_idx[{token}, {j}]"),
                id,
                format!("must be below num_experts = {}", map.experts()),
            ));
        }
        let none = Choice {
            expert: -1,
            weight: 0.0,
        };
        choices.push(match id {
            0.. => Choice {
                expert: id as i32,
                weight: weights.at::<f32>(token, j),
            },
            _ => none,
        });
    }
    Ok(choices)
}

impl InFlight {
    /// Sums this rank's experts' rows for the tokens of every rank and writes them to their owners,
    /// those that announced first first. Delivers to each when its rows are written.
    fn send_sums(
        &self,
        halves: &Halves<'_>,
        x: &Tensor<'_>,
        handle: &LowLatencyHandle,
        wire: CombineWire,
        map: &ExpertMap,
        announced: &[Option<Announcement>],
    ) -> Result<()> {
        let core = &self.member.core;
        let (ranks, me) = (core.group.ranks(), core.group.rank());
        let mut row_of = vec![-1i32; map.experts_per_rank() * self.half.tokens];
        // Each rank starts behind itself, so that not all write to the same one.
        for owner in (1..=ranks).map(|i| (me + i) % ranks) {
            let Some(from) = &announced[owner] else {
                continue;
            };
            if from.tokens > self.half.tokens {
                return Err(Error::invalid(
                    format!("tokens of rank {owner}"),
                    from.tokens,
                    format!("must be at most {}", self.half.tokens),
                ));
            }
            index_rows(&mut row_of, handle, owner, self.half.tokens);
            let sums = Sums {
                this: self,
                halves,
                x,
                wire,
                map,
                owner,
                row_of: &row_of,
            };
            sums.write(from.tokens);
            if owner != me && !core.group.is_masked(owner) {
                core.group
                    .post(owner, Kind::Delivered, self.call, &[ACCEPTED]);
            }
        }
        Ok(())
    }

    fn receive(
        &self,
        input: &mut LowLatencyCombineInput<'_>,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        let core = &self.member.core;
        let group = &core.group;
        let mut failed = Ok(());
        let start = cycles();
        let mut waited = vec![0i64; group.ranks()];
        let at = At {
            operation: OPERATION,
            stage: Stage::Rows,
        };
        group.wait(at, group.peers().collect(), core.absent, |peer| {
            let Some(note) = group.look(peer, Kind::Delivered, self.call)? else {
                return Ok(false);
            };
            waited[peer] = cycles() - start;
            if note.word(0) != ACCEPTED {
                let reason = note_reject(note.word(0), 0, 0);
                failed = Err(Error::PeerRejected {
                    rank: Rank(peer),
                    reason,
                });
            }
            Ok(true)
        })?;
        failed?;
        if let Some(stats) = &mut input.wait_stats {
            for (sum, waited) in stats.as_mut_slice::<i64>()?.iter_mut().zip(waited) {
                *sum = sum.wrapping_add(waited);
            }
        }
        let halves = Halves::new(core, self.call, Some(self.half.bytes))?;
        let map = ExpertMap::new(input.handle.num_experts(), group.ranks())?;
        let choices = choices(&input.topk_idx, &input.topk_weights, &map)?;
        let to = RowsMut::of(&mut out);
        let (tokens, k) = (self.own.tokens, self.half.top_k);
        let grain = (64 << 10) / self.own.terms.row_bytes.max(1);
        core.workers.run(tokens, grain, None, |range| {
            let mut reader = Reader::new(self, &halves, &map);
            for token in range {
                // SAFETY: each token's row is written by one thread only.
                let out = bytemuck::cast_slice_mut(unsafe { to.row(token).bytes() });
                let choices = &choices[token * k..][..k];
                match input.wire {
                    CombineWire::Bf16 => reader.sum_partials(token, choices, out),
                    CombineWire::LogFmt => reader.sum_encoded(token, choices, out),
                    CombineWire::Exact => reader.sum_exact(token, choices, out),
                }
            }
            store_fence();
            Counters::add(&core.counters.summed, reader.summed);
        });
        Ok(())
    }
}

/// Notes which row of each local expert belongs to each token of `owner`, -1 for none.
fn index_rows(row_of: &mut [i32], handle: &LowLatencyHandle, owner: usize, tokens: usize) {
    row_of.fill(-1);
    let rows = handle.src_info().shape()[1];
    let info = handle
        .src_info()
        .as_slice::<i32>()
        .expect("made as dense i32");
    for (expert, row_of) in row_of.chunks_exact_mut(tokens.max(1)).enumerate() {
        let (begin, count) = handle.range(expert, owner);
        for row in begin..begin + count {
            row_of[info[expert * rows + row] as usize] = row as i32;
        }
    }
}

/// What stands beside a row that was written in `call`. The bits are spread, so that what an earlier
/// call left there, which may have been rows, does not look like it.
fn stamp_of(call: u64) -> u64 {
    // Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014), the increment.
    (call ^ 0x5851_f42d_4c95_7f2d).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The sums that one owner gets.
struct Sums<'a> {
    this: &'a InFlight,
    halves: &'a Halves<'a>,
    x: &'a Tensor<'a>,
    wire: CombineWire,
    map: &'a ExpertMap,
    owner: usize,
    row_of: &'a [i32],
}

impl Sums<'_> {
    fn core(&self) -> &Core {
        &self.this.member.core
    }

    fn write(&self, tokens: usize) {
        let core = self.core();
        let half = &self.this.half;
        let len = tokens * half.top_k * size_of::<Choice>();
        let at = self
            .halves
            .at(core.group.rank(), half.choices_at(self.owner), len);
        // SAFETY: the owner wrote its choices before it announced, and leaves them alone until this
        // rank has finished the call; any bits are a `Choice`.
        let choices: &[Choice] =
            unsafe { std::slice::from_raw_parts(at.cast(), tokens * half.top_k) };
        let grain = (64 << 10) / self.this.own.terms.row_bytes.max(1);
        core.workers.run(tokens, grain, None, |range| {
            let mut parts = Vec::with_capacity(half.top_k);
            let mut wide = vec![0f32; self.x.shape()[2]];
            let mut written = 0;
            for token in range {
                parts.clear();
                for (k, choice) in choices[token * half.top_k..][..half.top_k]
                    .iter()
                    .enumerate()
                {
                    if let Some(row) = self.row(token, choice.expert) {
                        parts.push((k, (row, choice.weight)));
                    }
                }
                written += self.write_token(token, &parts, &mut wide);
            }
            store_fence();
            Counters::add(&core.counters.wire, written);
            Counters::add(&core.counters.rows, written);
        });
    }

    /// The output of `expert` for `token`, if it is one of this rank's and got the token.
    fn row(&self, token: usize, expert: i32) -> Option<&[bf16]> {
        let expert = usize::try_from(expert)
            .ok()
            .filter(|&expert| expert < self.map.experts())?;
        let me = Rank(self.core().group.rank());
        if self.map.rank_of(expert) != me {
            return None;
        }
        let local = self.map.local_of(expert);
        let row = usize::try_from(self.row_of[local * self.this.half.tokens + token]).ok()?;
        let strides = self.x.strides();
        // SAFETY: the index is inside the tensor, whose rows are dense.
        Some(unsafe {
            std::slice::from_raw_parts(
                self.x
                    .as_ptr()
                    .cast::<bf16>()
                    .add(local * strides[0] + row * strides[1]),
                self.x.shape()[2],
            )
        })
    }

    /// Writes what `token` gets from this rank; returns the bytes.
    fn write_token(
        &self,
        token: usize,
        parts: &[(usize, WeightedRow<'_>)],
        wide: &mut [f32],
    ) -> usize {
        let half = &self.this.half;
        let me = self.core().group.rank();
        if parts.is_empty() {
            return 0;
        }
        if self.wire == CombineWire::Exact {
            for (k, part) in parts {
                let row: &[u8] = bytemuck::cast_slice(part.0);
                let index = half.choice(token, *k);
                // SAFETY: see `slot`.
                unsafe { self.slot(index, row.len()).copy_from_slice(row) };
                self.stamp(index);
            }
            return parts.len() * (self.this.own.terms.row_bytes + 8);
        }
        let rows: Vec<_> = parts.iter().map(|(_, part)| *part).collect();
        let index = half.partial(me, token);
        let written = match self.wire {
            CombineWire::LogFmt => {
                codec::weighted_sum(&rows, wide);
                // SAFETY: see `slot`.
                logfmt::encode_row(wide, unsafe { self.slot(index, half.row) })
            }
            _ => {
                // SAFETY: see `slot`.
                let slot = unsafe { self.slot(index, self.this.own.terms.row_bytes) };
                codec::weighted_sum_bf16(&rows, bytemuck::cast_slice_mut(slot));
                self.this.own.terms.row_bytes
            }
        };
        self.stamp(index);
        written + 8
    }

    /// A row in the owner's landing memory.
    ///
    /// # Safety
    /// The row is this rank's (or of a choice of one of its experts) in this call, and only the
    /// thread that works on its token writes it.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slot(&self, index: usize, len: usize) -> &mut [u8] {
        let at = self
            .halves
            .at(self.owner, self.this.half.row_at(index), len);
        // SAFETY: the caller's promise; nobody reads the row before it is delivered.
        unsafe { std::slice::from_raw_parts_mut(at, len) }
    }

    fn stamp(&self, index: usize) {
        let at = self
            .halves
            .at(self.owner, self.this.half.stamp_at(index), 8);
        // SAFETY: as above; aligned to 8.
        unsafe { at.cast::<u64>().write(stamp_of(self.this.call)) };
    }
}

/// Reads the rows that came back for a token.
struct Reader<'a> {
    this: &'a InFlight,
    halves: &'a Halves<'a>,
    map: &'a ExpertMap,
    wide: Vec<f32>,
    total: Vec<f32>,
    summed: usize,
}

impl<'a> Reader<'a> {
    fn new(this: &'a InFlight, halves: &'a Halves<'a>, map: &'a ExpertMap) -> Self {
        let hidden = this.own.terms.row_bytes / 2;
        Self {
            this,
            halves,
            map,
            wide: vec![0.0; hidden],
            total: vec![0.0; hidden],
            summed: 0,
        }
    }

    /// The row at `index`, if it was written in this call.
    fn row(&self, index: usize, len: usize) -> Option<&'a [u8]> {
        let half = &self.this.half;
        let me = self.this.member.core.group.rank();
        let stamp = self.halves.at(me, half.stamp_at(index), 8).cast::<u64>();
        let row = self.halves.at(me, half.row_at(index), len);
        // SAFETY: whoever writes the stamp and the row in this call has delivered, and leaves them
        // alone until this rank has finished the call.
        unsafe {
            (stamp.read() == stamp_of(self.this.call)).then(|| std::slice::from_raw_parts(row, len))
        }
    }

    /// Ranks that the token went to, ascending.
    fn ranks(&self, choices: &[Choice]) -> Vec<usize> {
        let chosen = choices.iter().filter(|choice| choice.expert >= 0);
        let mut ranks: Vec<_> = chosen
            .map(|choice| self.map.rank_of(choice.expert as usize).0)
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    fn sum_partials(&mut self, token: usize, choices: &[Choice], out: &mut [bf16]) {
        let len = self.this.own.terms.row_bytes;
        let rows: Vec<&[bf16]> = self
            .ranks(choices)
            .into_iter()
            .filter_map(|rank| self.row(self.this.half.partial(rank, token), len))
            .map(bytemuck::cast_slice)
            .collect();
        self.summed += rows.len() * len;
        codec::sum_rows(&[], &rows, out, false);
    }

    fn sum_encoded(&mut self, token: usize, choices: &[Choice], out: &mut [bf16]) {
        self.total.fill(0.0);
        for rank in self.ranks(choices) {
            let index = self.this.half.partial(rank, token);
            let Some(row) = self.row(index, self.this.half.row) else {
                continue;
            };
            // Bytes of a peer that are no row count as nothing.
            let Ok(len) = logfmt::decode_row(row, &mut self.wide) else {
                continue;
            };
            self.summed += len;
            for (sum, value) in self.total.iter_mut().zip(&self.wide) {
                *sum += value;
            }
        }
        codec::f32_to_bf16_slice(&self.total, out);
    }

    fn sum_exact(&mut self, token: usize, choices: &[Choice], out: &mut [bf16]) {
        let len = self.this.own.terms.row_bytes;
        let rows: Vec<_> = choices
            .iter()
            .enumerate()
            .filter(|(_, choice)| choice.expert >= 0)
            .filter_map(|(k, choice)| {
                let row = self.row(self.this.half.choice(token, k), len)?;
                Some((bytemuck::cast_slice(row), choice.weight))
            })
            .collect();
        self.summed += rows.len() * len;
        codec::weighted_sum_bf16(&rows, out);
    }
}

impl LowLatencyCombineCall for InFlight {
    fn finish_into(
        &mut self,
        input: &mut LowLatencyCombineInput<'_>,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let core = self.member.core.clone();
        let turn = core.resume(OPERATION, self.call)?;
        let done = crate::buffer::check_low_latency_combined(input, &out)
            .map_err(Error::from)
            .and_then(|()| self.receive(input, out));
        turn.finish(done)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.member.core.abandon(self.call);
    }
}
