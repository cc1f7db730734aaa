//! High-throughput combine. The protocol is described in the module above.

use std::sync::Arc;

use half::{bf16, f16};

use super::{
    announce::{ACCEPTED, Announcement, Terms, gather_all, note_reject},
    control::Kind,
    copy::{RowUse, Store},
    core::{Counters, CpuLoan, Member, Turn},
    group::{Absent, At, Stage},
    rows::{Rows, RowsMut, copy_each},
};
use crate::{
    buffer::{CombineInput, CombineOutput, CombineRows},
    codec,
    dtype::{DType, Element},
    engine::{CombineCall, Operation},
    error::{Error, Result},
    memory::heap::Purpose,
    tensor::Tensor,
    topology::Rank,
};

const OPERATION: Operation = Operation::Combine;

/// A combine between its two halves.
struct InFlight {
    member: Arc<Member>,
    call: u64,
    own: Announcement,
}

/// Where the rows of one rank are, for the owners of their tokens.
struct Part {
    /// Rows of this rank's tokens there, in slot order.
    rows: Rows,
    /// Their weights, in the same order; no rows when there are none.
    weights: Rows,
}

/// Announces, and puts rows and weights where their owners can read them.
pub(super) fn begin(
    member: &Arc<Member>,
    input: &CombineInput<'_>,
) -> Result<Box<dyn CombineCall>> {
    let core = &member.core;
    let mut turn = core.begin(OPERATION)?;
    let x = input.x.as_tensor();
    let own = Announcement {
        terms: Terms {
            operation: OPERATION,
            num_experts: 0,
            row_bytes: x.row_bytes(),
            top_k: input.topk_weights.map_or(0, |weights| weights.shape()[1]),
            scale_columns: 0,
            max_tokens: 0,
            format: x.dtype() as u64,
        },
        tokens: input.handle.num_tokens(),
        worst_rows: u64::MAX,
        metadata: 0,
        metadata_len: 0,
        pushes: false,
        rows: input
            .handle
            .rows_from()
            .iter()
            .map(|&rows| rows as u64)
            .collect(),
    };
    if core.group.ranks() == 1 {
        return Ok(Box::new(InFlight {
            member: member.clone(),
            call: turn.call,
            own,
        }));
    }
    let staged = match Staged::new(member, input, &mut turn) {
        Ok(staged) => staged,
        Err(error) => return Err(turn.reject_for(error)),
    };
    own.post(&core.group, turn.call);
    turn.owe(Kind::Delivered);
    staged.fill(member, input);
    for peer in core.group.peers() {
        let (rows, weights) = staged.places_for(peer, &own);
        let note = [ACCEPTED, rows, own.rows[peer], weights];
        core.group.post(peer, Kind::Delivered, turn.call, &note);
    }
    turn.paid(Kind::Delivered);
    Ok(Box::new(InFlight {
        member: member.clone(),
        call: turn.call,
        own,
    }))
}

/// Rows and weights in this rank's symmetric memory. Own rows have no place in staging: they are
/// read where the caller has them.
struct Staged {
    /// First row of each owner, and of all behind the last.
    first: Vec<usize>,
    row_bytes: usize,
    weight_bytes: usize,
    /// Offset of the row for the first token of the first owner; own rows are skipped unless the
    /// rows are the caller's loan.
    rows: u64,
    loaned: bool,
    rows_base: *mut u8,
    weights: u64,
    weights_base: *mut u8,
    me: usize,
}

impl Staged {
    fn new(member: &Member, input: &CombineInput<'_>, turn: &mut Turn<'_>) -> Result<Self> {
        let core = &member.core;
        let me = core.group.rank();
        let mut first = input.handle.first_row_from();
        first.push(input.handle.num_recv_rows());
        let remote = first[first.len() - 1] - (first[me + 1] - first[me]);
        let row_bytes = input.x.as_tensor().row_bytes();
        let weight_bytes = input.topk_weights.map_or(0, |weights| weights.row_bytes());
        let mut this = Self {
            first,
            row_bytes,
            weight_bytes,
            rows: 0,
            loaned: false,
            rows_base: std::ptr::null_mut(),
            weights: 0,
            weights_base: std::ptr::null_mut(),
            me,
        };
        if let CombineRows::Loan(loan) = &input.x
            && let Some(loan) = loan.memory.as_any().downcast_ref::<CpuLoan>()
            && let Some(offset) = loan.offset_in(core)
        {
            loan.read_in(turn.call);
            this.rows = offset;
            this.loaned = true;
        } else {
            let block = core.alloc(remote * row_bytes, Purpose::CombineStaging)?;
            (this.rows, this.rows_base) = (block.offset(), core.at(&block));
            turn.hold(block);
        }
        if weight_bytes > 0 {
            let block = core.alloc(remote * weight_bytes, Purpose::Metadata)?;
            (this.weights, this.weights_base) = (block.offset(), core.at(&block));
            turn.hold(block);
        }
        Ok(this)
    }

    /// Place of received row `i` among the staged rows; `None` for this rank's own.
    fn place(&self, i: usize) -> Option<usize> {
        let own = self.first[self.me]..self.first[self.me + 1];
        match i {
            i if own.contains(&i) => None,
            i if i >= own.end => Some(i - own.len()),
            i => Some(i),
        }
    }

    fn fill(&self, member: &Member, input: &CombineInput<'_>) {
        let core = &member.core;
        let x = input.x.as_tensor();
        let rows = self.first[self.first.len() - 1];
        let remote = rows - (self.first[self.me + 1] - self.first[self.me]);
        if !self.loaned {
            // SAFETY: the block was just allocated for that many rows.
            let to =
                unsafe { RowsMut::new(self.rows_base, self.row_bytes, remote, self.row_bytes) };
            let store = core
                .workers
                .store(self.row_bytes, to.bytes(), RowUse::Staging);
            let copied = copy_each(
                &core.workers,
                input.num_sms,
                rows,
                self.row_bytes,
                |i, copier| {
                    if let Some(place) = self.place(i) {
                        copier.copy(x.row(i), to.row(place), store);
                    }
                },
            );
            Counters::add(&core.counters.rows, copied);
        }
        if let Some(weights) = &input.topk_weights {
            let len = self.weight_bytes;
            // SAFETY: as above.
            let to = unsafe { RowsMut::new(self.weights_base, len, remote, len) };
            let copied = copy_each(&core.workers, Some(1), rows, len, |i, copier| {
                if let Some(place) = self.place(i) {
                    copier.copy(weights.row(i), to.row(place), Store::Cached);
                }
            });
            Counters::add(&core.counters.metadata, copied);
        }
    }

    /// Offsets of the rows and the weights of `owner`'s tokens in this rank's region.
    fn places_for(&self, owner: usize, own: &Announcement) -> (u64, u64) {
        let first = self.first[owner];
        let place = if own.rows[owner] == 0 {
            0
        } else {
            self.place(first).unwrap_or(0)
        };
        let row = if self.loaned { first } else { place };
        (
            self.rows + (row * self.row_bytes) as u64,
            self.weights + (place * self.weight_bytes) as u64,
        )
    }
}

// SAFETY: the pointers are to blocks of this rank's region that only this call writes, each row from
// one thread.
unsafe impl Sync for Staged {}

impl InFlight {
    /// Waits for the rows of all ranks.
    fn parts<'a>(&'a self, input: &'a CombineInput<'_>) -> Result<Vec<Part>> {
        let group = &self.member.core.group;
        let announced = gather_all(group, self.call, &self.own)?;
        let mut notes = vec![[0; 4]; group.ranks()];
        let at = At {
            operation: OPERATION,
            stage: Stage::Rows,
        };
        group.wait(at, group.peers().collect(), Absent::Fail, |peer| {
            let Some(note) = group.look(peer, Kind::Delivered, self.call)? else {
                return Ok(false);
            };
            notes[peer] = [note.word(0), note.word(1), note.word(2), note.word(3)];
            Ok(true)
        })?;
        (0..group.ranks())
            .map(|rank| self.part(rank, &announced[rank], notes[rank], input))
            .collect()
    }

    fn part(
        &self,
        rank: usize,
        from: &Announcement,
        [status, rows, _, weights]: [u64; 4],
        input: &CombineInput<'_>,
    ) -> Result<Part> {
        let group = &self.member.core.group;
        let sent = u64::from(input.handle.plan().routes.tokens_per_rank()[rank]);
        let returned = from.rows[group.rank()];
        if sent != returned {
            return Err(Error::invalid(
                "handle",
                format!("one by which {sent} rows went to rank {rank}"),
                format!("must be of the same dispatch as that rank's, which returns {returned}"),
            ));
        }
        let (row, weight) = (self.own.terms.row_bytes, self.own.terms.top_k * 4);
        if rank == group.rank() {
            let first = input.handle.first_row_from()[rank];
            let own = |tensor: &Tensor<'_>| Rows::of(tensor).rows_from(first);
            return Ok(Part {
                rows: own(&input.x.as_tensor()),
                weights: input.topk_weights.as_ref().map_or(Rows::EMPTY, own),
            });
        }
        if status != ACCEPTED {
            let reason = note_reject(status, 0, 0);
            return Err(Error::PeerRejected {
                rank: Rank(rank),
                reason,
            });
        }
        let read = |offset: u64, len: usize| -> Result<Rows> {
            let base = group.memory(rank).checked(offset, returned * len as u64)?;
            // SAFETY: the peer delivered that many rows there and leaves them alone until this rank
            // has finished the call.
            Ok(unsafe { Rows::new(base, len, returned as usize, len) })
        };
        Ok(Part {
            rows: read(rows, row)?,
            weights: if weight > 0 {
                read(weights, weight)?
            } else {
                Rows::EMPTY
            },
        })
    }

    fn sum(&self, input: &CombineInput<'_>, parts: &[Part], out: &mut CombineOutput<'_>) {
        match input.x.as_tensor().dtype() {
            DType::Bf16 => self.sum_rows::<bf16>(input, parts, out),
            DType::F16 => self.sum_rows::<f16>(input, parts, out),
            _ => self.sum_rows::<f32>(input, parts, out),
        }
        if let Some(weights) = &mut out.topk_weights
            && let Ok(weights) = weights.as_mut_slice::<f32>()
        {
            let k = self.own.terms.top_k;
            for (token, sums) in weights.chunks_exact_mut(k.max(1)).enumerate() {
                let slots = input.handle.plan().slots(token).iter().zip(parts);
                let rows: Vec<&[f32]> = slots
                    .filter(|(slot, _)| **slot >= 0)
                    .map(|(&slot, part)| typed(part.weights.row(slot as usize)))
                    .collect();
                codec::sum_rows(&[], &rows, sums, false);
            }
        }
    }

    fn sum_rows<T: Element + codec::SumElement>(
        &self,
        input: &CombineInput<'_>,
        parts: &[Part],
        out: &mut CombineOutput<'_>,
    ) {
        let core = &self.member.core;
        let row = self.own.terms.row_bytes;
        let tokens = self.own.tokens;
        let to = RowsMut::of(&mut out.x);
        let store = core.workers.store(row, tokens * row, RowUse::Output);
        let bias: Vec<_> = input.bias.iter().flatten().map(Rows::of).collect();
        let plan = input.handle.plan();
        let grain = (64 << 10) / row.max(1);
        core.workers.run(tokens, grain, input.num_sms, |range| {
            let mut rows: Vec<&[T]> = Vec::with_capacity(parts.len());
            let mut biases: Vec<&[T]> = Vec::with_capacity(bias.len());
            let mut summed = 0;
            for token in range {
                rows.clear();
                biases.clear();
                let slots = plan.slots(token).iter().zip(parts);
                rows.extend(
                    slots
                        .filter(|(slot, _)| **slot >= 0)
                        .map(|(&slot, part)| typed(part.rows.row(slot as usize))),
                );
                biases.extend(bias.iter().map(|bias| typed(bias.row(token))));
                summed += (rows.len() + biases.len()) * row;
                // SAFETY: each token's row is written by one thread only.
                let out = unsafe { to.row(token).bytes() };
                codec::sum_rows(
                    &biases,
                    &rows,
                    bytemuck::cast_slice_mut(out),
                    store == Store::Streaming,
                );
            }
            codec::store_fence();
            Counters::add(&core.counters.summed, summed);
        });
    }
}

/// Elements of a row; tensors and symmetric memory are aligned to their elements.
fn typed<T: Element>(bytes: &[u8]) -> &[T] {
    bytemuck::cast_slice(bytes)
}

impl CombineCall for InFlight {
    fn finish_into(&mut self, input: &CombineInput<'_>, out: &mut CombineOutput<'_>) -> Result<()> {
        let core = self.member.core.clone();
        let turn = core.resume(OPERATION, self.call)?;
        let done = crate::buffer::check_combine_output(input, out)
            .map_err(Error::from)
            .and_then(|()| self.parts(input))
            .map(|parts| self.sum(input, &parts, out));
        turn.finish(done)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.member.core.abandon(self.call);
    }
}
