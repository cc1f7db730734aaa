//! High-throughput dispatch. The protocol is described in the module above.

use std::{sync::Arc, time::Instant};

use super::{
    announce::{ACCEPTED, Announcement, NO_MEMORY, Terms, gather_all, note_reject},
    control::Kind,
    copy::NextRead,
    core::{Counters, CpuLoan, Member, Turn},
    group::{Absent, At, Stage},
    metadata::{HAS_TOPK, HAS_WEIGHTS, Metadata, MetadataMut, Sections},
    rows::{Rows, RowsMut, copy_each},
};
use crate::{
    buffer::{
        DispatchHandle, DispatchInput, DispatchOutput, Dispatched, Landing, Loan, ReceivedCounts,
        Routes as InputRoutes, SendPlan, TopK,
    },
    dtype::DType,
    engine::{DispatchCall, Operation},
    error::{Error, Result},
    memory::heap::{Block, Purpose},
    routing::{ExpertMap, Routes, align_up, exclusive_prefix_sum},
    tensor::{OwnedTensor, Tensor, TensorMut},
    topology::Rank,
};

const OPERATION: Operation = Operation::Dispatch;

/// Kinds of delivery.
const PUSHED: u64 = 0;
const STAGED: u64 = 1;

/// A dispatch between its two halves.
struct InFlight {
    member: Arc<Member>,
    call: u64,
    plan: Arc<SendPlan>,
    own: Announcement,
    /// Where this rank's rows are staged, once they are.
    staged: Option<u64>,
    /// What all ranks announced, and what follows from it.
    arrived: Option<(Vec<Announcement>, ReceivedCounts)>,
}

/// Routes the tokens, announces counts and metadata, and stages rows if they are to be pulled.
pub(super) fn begin(
    member: &Arc<Member>,
    input: &DispatchInput<'_>,
) -> Result<Box<dyn DispatchCall>> {
    let mut turn = member.core.begin(OPERATION)?;
    let prepared = prepare(member, input, &mut turn);
    let (plan, own) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return Err(turn.reject_for(error)),
    };
    let mut this = InFlight {
        member: member.clone(),
        call: turn.call,
        plan,
        own,
        staged: None,
        arrived: None,
    };
    if this.own.pushes || member.core.group.ranks() == 1 {
        this.announce(&mut turn);
        return Ok(Box::new(this));
    }
    let stage = match this.staging() {
        Ok(stage) => stage,
        Err(error) => return Err(turn.reject_for(error)),
    };
    this.announce(&mut turn);
    this.stage(&mut turn, input, stage);
    this.deliver(&mut turn, |_| STAGED);
    Ok(Box::new(this))
}

/// The routes, and this rank's announcement with its metadata block filled.
fn prepare(
    member: &Member,
    input: &DispatchInput<'_>,
    turn: &mut Turn<'_>,
) -> Result<(Arc<SendPlan>, Announcement)> {
    let core = &member.core;
    let ranks = core.group.ranks();
    let (plan, topk, tokens_per_expert): (_, _, &[u32]) = match &input.routes {
        InputRoutes::TopK { topk, num_experts } => {
            let mut routes = Routes::new();
            routes.rebuild(&topk.idx, &ExpertMap::new(*num_experts, ranks)?)?;
            (SendPlan::new(routes), Some(topk), &[])
        }
        InputRoutes::Layout { layout, topk } => (
            SendPlan::new(layout.routes.clone()),
            topk.as_ref(),
            &layout.tokens_per_expert,
        ),
        InputRoutes::Handle(handle) => (handle.plan().clone(), None, &[]),
    };
    let tokens_per_expert = match &input.routes {
        InputRoutes::TopK { .. } => plan.routes.tokens_per_expert(),
        _ => tokens_per_expert,
    };
    let mut own = Announcement {
        terms: terms(input, topk, tokens_per_expert.len()),
        tokens: input.x.shape()[0],
        worst_rows: input.num_worst_tokens.map_or(u64::MAX, |rows| rows as u64),
        metadata: 0,
        metadata_len: 0,
        pushes: input.landing == Landing::Loan && ranks > 1,
        rows: plan.rows(),
    };
    let sections = Sections::of(&own).ok_or_else(|| {
        Error::invalid(
            "x",
            format!("{:?}", input.x),
            "must have fewer tokens for its choices",
        )
    })?;
    let block = core.alloc(sections.bytes(), Purpose::Metadata)?;
    own.metadata = block.offset();
    own.metadata_len = sections.bytes() as u64;
    // SAFETY: the block was just allocated, so nobody else accesses it.
    let metadata = unsafe { MetadataMut::new(core.at(&block), &sections) };
    turn.hold(block);
    fill(
        metadata,
        &plan.routes,
        topk,
        tokens_per_expert,
        input.scales.as_ref(),
    );
    Counters::add(&core.counters.metadata, sections.bytes());
    Ok((plan, own))
}

fn terms(input: &DispatchInput<'_>, topk: Option<&TopK<'_>>, num_experts: usize) -> Terms {
    let weights = topk.and_then(|topk| topk.weights);
    Terms {
        operation: OPERATION,
        num_experts,
        row_bytes: input.x.row_bytes(),
        top_k: topk.map_or(0, |topk| topk.idx.shape()[1]),
        scale_columns: input.scales.map_or(0, |scales| scales.shape()[1]),
        max_tokens: 0,
        format: topk.map_or(0, |_| HAS_TOPK) | weights.map_or(0, |_| HAS_WEIGHTS),
    }
}

fn fill(
    to: MetadataMut<'_>,
    routes: &Routes,
    topk: Option<&TopK<'_>>,
    tokens_per_expert: &[u32],
    scales: Option<&Tensor<'_>>,
) {
    to.lists.copy_from_slice(routes.tokens_of_ranks().0);
    to.experts.copy_from_slice(tokens_per_expert);
    if let Some(topk) = topk {
        let k = topk.idx.shape()[1];
        for (i, id) in to.topk_idx.iter_mut().enumerate() {
            // Ids were checked to lie below the number of experts, which is below 2^31.
            *id = match topk.idx.dtype() {
                DType::I64 => topk.idx.at::<i64>(i / k, i % k).max(-1) as i32,
                _ => topk.idx.at::<i32>(i / k, i % k).max(-1),
            };
        }
        if let Some(weights) = &topk.weights {
            for (i, weight) in to.weights.iter_mut().enumerate() {
                *weight = weights.at::<f32>(i / k, i % k);
            }
        }
    }
    if let Some(scales) = scales {
        let columns = scales.shape()[1];
        for (i, bits) in to.scales.iter_mut().enumerate() {
            *bits = match scales.dtype() {
                DType::F32 => scales.at::<f32>(i / columns, i % columns).to_bits(),
                _ => scales.at::<i32>(i / columns, i % columns) as u32,
            };
        }
    }
}

impl InFlight {
    fn announce(&self, turn: &mut Turn<'_>) {
        let group = &self.member.core.group;
        if group.ranks() > 1 {
            turn.owe(Kind::Landing);
            turn.owe(Kind::Delivered);
            self.own.post(group, self.call);
        }
    }

    /// Memory for this rank's rows, one for each token.
    fn staging(&self) -> Result<Block> {
        let bytes = self.own.tokens * self.own.terms.row_bytes;
        self.member.core.alloc(bytes, Purpose::DispatchStaging)
    }

    /// Copies the rows that other ranks want to `block`, a row's place being its token.
    fn stage(&mut self, turn: &mut Turn<'_>, input: &DispatchInput<'_>, block: Block) {
        let core = &self.member.core;
        let row = self.own.terms.row_bytes;
        let me = core.group.rank();
        // SAFETY: the block was just allocated and holds a row for each token.
        let to = unsafe { RowsMut::new(core.at(&block), row, self.own.tokens, row) };
        let leaves = |token: usize| {
            self.plan
                .slots(token)
                .iter()
                .enumerate()
                .any(|(to, &slot)| to != me && slot >= 0)
        };
        let store = core
            .workers
            .store(row, self.own.tokens * row, NextRead::Soon);
        let copied = copy_each(
            &core.workers,
            input.num_sms,
            self.own.tokens,
            row,
            |token, copier| {
                if leaves(token) {
                    copier.copy(input.x.row(token), to.row(token), store);
                }
            },
        );
        Counters::add(&core.counters.rows, copied);
        self.staged = Some(block.offset());
        turn.hold(block);
    }

    /// Tells every peer how this rank's rows come to it.
    fn deliver(&self, turn: &mut Turn<'_>, kind: impl Fn(usize) -> u64) {
        let group = &self.member.core.group;
        for peer in group.peers() {
            let note = [ACCEPTED, kind(peer), self.staged.unwrap_or(0)];
            group.post(peer, Kind::Delivered, self.call, &note);
        }
        turn.paid(Kind::Delivered);
    }

    /// Learns what all ranks announced.
    fn arrive(&mut self, input: &DispatchInput<'_>) -> Result<()> {
        if self.arrived.is_some() {
            return Ok(());
        }
        let group = &self.member.core.group;
        let announced = gather_all(group, self.call, &self.own)?;
        for rank in 0..group.ranks() {
            let rows: u64 = announced.iter().map(|from| from.rows[rank]).sum();
            let worst = announced[rank].worst_rows;
            if rows > worst {
                let reject = crate::Reject::new(
                    "num_worst_tokens",
                    worst,
                    format!("must be at least the {rows} rows that rank {rank} receives"),
                );
                return Err(match rank == group.rank() {
                    true => reject.into(),
                    false => Error::PeerRejected {
                        rank: Rank(rank),
                        reason: reject,
                    },
                });
            }
        }
        let counts = self.count(&announced, input)?;
        self.arrived = Some((announced, counts));
        Ok(())
    }

    fn count(
        &self,
        announced: &[Announcement],
        input: &DispatchInput<'_>,
    ) -> Result<ReceivedCounts> {
        let group = &self.member.core.group;
        let me = group.rank();
        let rows_from: Vec<_> = announced
            .iter()
            .map(|from| from.rows[me] as usize)
            .collect();
        if let InputRoutes::Handle(handle) = &input.routes
            && handle.rows_from() != rows_from
        {
            return Err(Error::invalid(
                "handle",
                format!("one with rows {:?} from each rank", handle.rows_from()),
                format!("must have rows {rows_from:?}, as the peers' handles say"),
            ));
        }
        let mut tokens_per_expert = vec![];
        if !matches!(input.routes, InputRoutes::Handle(_)) && input.num_worst_tokens.is_none() {
            let local = self.own.terms.num_experts / group.ranks();
            tokens_per_expert = vec![0; local];
            for (rank, from) in announced.iter().enumerate() {
                let experts = &Metadata::of(group, rank, from)?.experts[me * local..][..local];
                for (sum, &count) in tokens_per_expert.iter_mut().zip(experts) {
                    *sum += count as usize;
                }
            }
            for count in &mut tokens_per_expert {
                *count = align_up(*count, input.expert_alignment);
            }
        }
        let rows = rows_from.iter().sum();
        let output_rows = input.num_worst_tokens.unwrap_or(rows);
        Ok(ReceivedCounts {
            rows,
            output_rows,
            rows_from,
            tokens_per_expert,
        })
    }

    /// Moves all rows: this rank's to the others and theirs to `to`. `landing` is where `to` is in
    /// this rank's region, if it is there, so that others can push into it.
    fn transfer(
        &mut self,
        turn: &mut Turn<'_>,
        input: &DispatchInput<'_>,
        to: RowsMut,
        landing: Option<u64>,
    ) -> Result<()> {
        let (announced, _) = self.arrived.as_ref().expect("counts come before rows");
        let announced = announced.clone();
        let group = &self.member.core.group;
        for peer in group.peers().filter(|&peer| announced[peer].pushes) {
            let note = [ACCEPTED, u64::from(landing.is_some()), landing.unwrap_or(0)];
            group.post(peer, Kind::Landing, self.call, &note);
        }
        turn.paid(Kind::Landing);
        let pushed = if self.own.pushes {
            self.push(turn, input, &announced, to)
        } else {
            self.copy_own(input, &announced, to);
            Ok(())
        };
        let pulled = self.pull(input, &announced, to);
        pushed.and(pulled)
    }

    /// First row from each source at rank `rank`.
    fn first_rows(announced: &[Announcement], rank: usize) -> Vec<usize> {
        let mut rows: Vec<_> = announced
            .iter()
            .map(|from| from.rows[rank] as usize)
            .collect();
        exclusive_prefix_sum(&mut rows);
        rows
    }

    /// Copies rows that stay on this rank from the input to their place.
    fn copy_own(&self, input: &DispatchInput<'_>, announced: &[Announcement], to: RowsMut) {
        let core = &self.member.core;
        let me = core.group.rank();
        let first = Self::first_rows(announced, me)[me];
        let tokens = self.plan.routes.tokens_of_rank(Rank(me));
        let row = self.own.terms.row_bytes;
        let store = core.workers.store(row, to.bytes(), NextRead::Later);
        let copied = copy_each(
            &core.workers,
            input.num_sms,
            tokens.len(),
            row,
            |i, copier| {
                copier.copy(input.x.row(tokens[i] as usize), to.row(first + i), store);
            },
        );
        Counters::add(&core.counters.rows, copied);
    }

    /// Writes this rank's rows to their final places everywhere; for peers that want to pull, stages
    /// them. Serves every peer before it reports that one of them gave up.
    fn push(
        &mut self,
        turn: &mut Turn<'_>,
        input: &DispatchInput<'_>,
        announced: &[Announcement],
        own: RowsMut,
    ) -> Result<()> {
        let core = self.member.core.clone();
        let group = &core.group;
        let row = self.own.terms.row_bytes;
        let mut places: Vec<Option<RowsMut>> = vec![None; group.ranks()];
        let mut pulls = vec![false; group.ranks()];
        let mut failed = Ok(());
        places[group.rank()] =
            Some(own.rows_from(Self::first_rows(announced, group.rank())[group.rank()]));
        let at = At {
            operation: OPERATION,
            stage: Stage::Landing,
        };
        group.wait(at, group.peers().collect(), Absent::Fail, |peer| {
            let Some(note) = group.look(peer, Kind::Landing, self.call)? else {
                return Ok(false);
            };
            if note.word(0) != ACCEPTED {
                let reason = note_reject(note.word(0), note.word(1), note.word(2));
                failed = Err(Error::PeerRejected {
                    rank: Rank(peer),
                    reason,
                });
            } else if note.word(1) == 0 {
                pulls[peer] = true;
            } else {
                let rows: u64 = announced.iter().map(|from| from.rows[peer]).sum();
                let base = group
                    .memory(peer)
                    .checked(note.word(2), rows * row as u64)?;
                // SAFETY: the peer offers room for all its rows there, which was checked to exist;
                // each rank writes only the rows that the counts give it.
                let all = unsafe { RowsMut::new(base, row, rows as usize, row) };
                places[peer] = Some(all.rows_from(Self::first_rows(announced, peer)[group.rank()]));
            }
            Ok(true)
        })?;
        let total: u64 = self.own.rows.iter().sum();
        let store = core
            .workers
            .store(row, total as usize * row, NextRead::Later);
        let copied = copy_each(
            &core.workers,
            input.num_sms,
            self.own.tokens,
            row,
            |token, copier| {
                let slots = self.plan.slots(token).iter().zip(&places);
                let targets = slots.filter(|(slot, _)| **slot >= 0);
                let targets =
                    targets.filter_map(|(&slot, place)| place.map(|p| p.row(slot as usize)));
                copier.copy_to_each(input.x.row(token), targets, store);
            },
        );
        Counters::add(&core.counters.rows, copied);
        if pulls.contains(&true) {
            match self.staging() {
                Ok(block) => self.stage(turn, input, block),
                Err(error) => {
                    self.refuse_delivery(turn, &pulls, &error);
                    return Err(error);
                }
            }
        }
        self.deliver(turn, |peer| if pulls[peer] { STAGED } else { PUSHED });
        failed
    }

    /// Delivers to those whose rows were pushed, and tells the others that there was no memory.
    fn refuse_delivery(&self, turn: &mut Turn<'_>, pulls: &[bool], error: &Error) {
        let group = &self.member.core.group;
        let (requested, limit) = match error {
            Error::OutOfMemory {
                requested, limit, ..
            } => (*requested, *limit),
            _ => (0, 0),
        };
        for peer in group.peers() {
            let note = if pulls[peer] {
                [NO_MEMORY, requested, limit]
            } else {
                [ACCEPTED, PUSHED, 0]
            };
            group.post(peer, Kind::Delivered, self.call, &note);
        }
        turn.paid(Kind::Delivered);
    }

    /// Waits for the peers' rows, and copies those that are staged at their source. Waits for every
    /// peer, so that nobody writes to this rank's memory when the call has ended.
    fn pull(
        &self,
        input: &DispatchInput<'_>,
        announced: &[Announcement],
        to: RowsMut,
    ) -> Result<()> {
        let core = &self.member.core;
        let group = &core.group;
        let firsts = Self::first_rows(announced, group.rank());
        let at = At {
            operation: OPERATION,
            stage: Stage::Rows,
        };
        let mut missing: Vec<_> = group.peers().collect();
        let mut failed = Ok(());
        while !missing.is_empty() {
            let mut arrived = vec![];
            let start = Instant::now();
            group.wait_for_some(at, &mut missing, Absent::Fail, start, &mut |peer| {
                let Some(note) = group.look(peer, Kind::Delivered, self.call)? else {
                    return Ok(false);
                };
                arrived.push((peer, [note.word(0), note.word(1), note.word(2)]));
                Ok(true)
            })?;
            for (peer, [status, kind, offset]) in arrived {
                if status != ACCEPTED {
                    let reason = note_reject(status, kind, offset);
                    failed = Err(Error::PeerRejected {
                        rank: Rank(peer),
                        reason,
                    });
                } else if kind == STAGED {
                    let to = to.rows_from(firsts[peer]);
                    failed = failed.and(self.pull_from(peer, offset, input, &announced[peer], to));
                }
            }
        }
        failed
    }

    fn pull_from(
        &self,
        peer: usize,
        offset: u64,
        input: &DispatchInput<'_>,
        from: &Announcement,
        to: RowsMut,
    ) -> Result<()> {
        let core = &self.member.core;
        let row = self.own.terms.row_bytes;
        let tokens = Metadata::of(&core.group, peer, from)?.tokens_for(core.group.rank(), from)?;
        let base = core
            .group
            .memory(peer)
            .checked(offset, (from.tokens * row) as u64)?;
        // SAFETY: the peer staged a row for each token there and leaves them alone until this rank
        // has finished the call.
        let rows = unsafe { Rows::new(base, row, from.tokens, row) };
        let store = core.workers.store(row, to.bytes(), NextRead::Later);
        let copied = copy_each(
            &core.workers,
            input.num_sms,
            tokens.len(),
            row,
            |i, copier| {
                copier.copy(rows.row(tokens[i] as usize), to.row(i), store);
            },
        );
        Counters::add(&core.counters.rows, copied);
        Ok(())
    }

    /// Copies indices, weights and scales of received rows, and returns the source tokens.
    fn receive_metadata(&self, out: &mut MetadataOutput<'_>) -> Result<Vec<i32>> {
        let group = &self.member.core.group;
        let (announced, counts) = self.arrived.as_ref().expect("counts come before metadata");
        let mut src_idx = vec![-1; counts.output_rows];
        let mut row = 0;
        for (rank, from) in announced.iter().enumerate() {
            let metadata = Metadata::of(group, rank, from)?;
            for &token in metadata.tokens_for(group.rank(), from)? {
                src_idx[row] = token as i32;
                out.receive(
                    row,
                    token as usize,
                    &metadata,
                    from,
                    group.rank(),
                    group.ranks(),
                );
                row += 1;
            }
        }
        out.pad(row..counts.output_rows);
        Counters::add(&self.member.core.counters.metadata, row * out.row_bytes());
        Ok(src_idx)
    }

    fn finish_with(
        &mut self,
        turn: &mut Turn<'_>,
        input: &DispatchInput<'_>,
        to: RowsMut,
        landing: Option<u64>,
        out: &mut MetadataOutput<'_>,
    ) -> Result<(ReceivedCounts, DispatchHandle)> {
        self.transfer(turn, input, to, landing)?;
        let src_idx = self.receive_metadata(out)?;
        let (_, counts) = self.arrived.take().expect("counts come before rows");
        let rank = Rank(self.member.core.group.rank());
        let handle = DispatchHandle::new(rank, self.plan.clone(), &counts.rows_from, src_idx);
        Ok((counts, handle))
    }

    fn loaned(&mut self, turn: &mut Turn<'_>, input: &DispatchInput<'_>) -> Result<Dispatched> {
        self.arrive(input)?;
        let core = self.member.core.clone();
        let (_, counts) = self.arrived.as_ref().expect("they arrived");
        let rows = counts.output_rows;
        let row = self.own.terms.row_bytes;
        let block = match core.alloc(rows * row, Purpose::DispatchLoan) {
            Ok(block) => block,
            Err(error) => {
                self.refuse_landing(turn, &error);
                return Err(error);
            }
        };
        let offset = block.offset();
        // SAFETY: the block was just allocated; peers write only the rows that the counts give them.
        let to = unsafe { RowsMut::new(core.at(&block), row, rows, row) };
        let loan = Loan::new(
            Box::new(CpuLoan::new(core, block)),
            input.x.dtype(),
            &[rows, input.x.shape()[1]],
        );
        let mut out = OwnedMetadata::new(&self.own.terms, rows, input)?;
        let (counts, handle) =
            self.finish_with(turn, input, to, Some(offset), &mut out.as_output())?;
        let OwnedMetadata {
            scales,
            topk_idx,
            topk_weights,
        } = out;
        Ok(Dispatched {
            x: loan,
            scales,
            topk_idx,
            topk_weights,
            counts,
            handle,
        })
    }

    fn refuse_landing(&self, turn: &mut Turn<'_>, error: &Error) {
        if let Error::OutOfMemory {
            requested, limit, ..
        } = error
        {
            let group = &self.member.core.group;
            for peer in group.peers() {
                group.post(
                    peer,
                    Kind::Landing,
                    self.call,
                    &[NO_MEMORY, *requested, *limit],
                );
            }
            turn.paid(Kind::Landing);
        }
    }
}

impl DispatchCall for InFlight {
    fn counts(&mut self, input: &DispatchInput<'_>) -> Result<&ReceivedCounts> {
        let core = self.member.core.clone();
        let turn = core.resume(OPERATION, self.call)?;
        if let Err(error) = self.arrive(input) {
            return turn.finish(Err(error));
        }
        Ok(&self.arrived.as_ref().expect("they arrived").1)
    }

    fn finish(&mut self, input: &DispatchInput<'_>) -> Result<Dispatched> {
        let core = self.member.core.clone();
        let mut turn = core.resume(OPERATION, self.call)?;
        let done = self.loaned(&mut turn, input);
        turn.finish(done)
    }

    fn finish_into(
        &mut self,
        input: &DispatchInput<'_>,
        out: &mut DispatchOutput<'_>,
    ) -> Result<(ReceivedCounts, DispatchHandle)> {
        let core = self.member.core.clone();
        let mut turn = core.resume(OPERATION, self.call)?;
        let done = self.arrive(input).and_then(|()| {
            let (_, counts) = self.arrived.as_ref().expect("they arrived");
            crate::buffer::check_dispatch_output(input, out, counts.output_rows)?;
            let to = RowsMut::of(&mut out.x);
            let mut metadata = MetadataOutput::of(out);
            self.finish_with(&mut turn, input, to, None, &mut metadata)
        });
        turn.finish(done)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.member.core.abandon(self.call);
    }
}

/// Where indices, weights and scales of received rows go.
struct MetadataOutput<'o> {
    scales: Option<TensorMut<'o>>,
    topk_idx: Option<TensorMut<'o>>,
    topk_weights: Option<TensorMut<'o>>,
}

impl<'o> MetadataOutput<'o> {
    fn of(out: &'o mut DispatchOutput<'_>) -> Self {
        Self {
            scales: out.scales.as_mut().map(TensorMut::reborrow),
            topk_idx: out.topk_idx.as_mut().map(TensorMut::reborrow),
            topk_weights: out.topk_weights.as_mut().map(TensorMut::reborrow),
        }
    }

    fn row_bytes(&self) -> usize {
        [&self.scales, &self.topk_idx, &self.topk_weights]
            .into_iter()
            .flatten()
            .map(TensorMut::row_bytes)
            .sum()
    }

    /// Row `row` from `token` of the sender of `metadata`.
    fn receive(
        &mut self,
        row: usize,
        token: usize,
        metadata: &Metadata<'_>,
        from: &Announcement,
        rank: usize,
        ranks: usize,
    ) {
        let k = from.terms.top_k;
        let experts = (from.terms.num_experts / ranks) as i32;
        let local = |id: i32| match id - rank as i32 * experts {
            local if id >= 0 && (0..experts).contains(&local) => local,
            _ => -1,
        };
        if let Some(out) = &mut self.topk_idx {
            let ids = &metadata.topk_idx[token * k..][..k];
            match out.dtype() {
                DType::I64 => write(out, row, k, |j| i64::from(local(ids[j]))),
                _ => write(out, row, k, |j| local(ids[j])),
            }
        }
        if let Some(out) = &mut self.topk_weights {
            let ids = &metadata.topk_idx[token * k..][..k];
            let weights = &metadata.weights[token * k..][..k];
            write(out, row, k, |j| {
                if local(ids[j]) >= 0 { weights[j] } else { 0.0 }
            });
        }
        if let Some(out) = &mut self.scales {
            let columns = from.terms.scale_columns;
            let scales = &metadata.scales[token * columns..][..columns];
            match out.dtype() {
                DType::F32 => write(out, row, columns, |j| f32::from_bits(scales[j])),
                _ => write(out, row, columns, |j| scales[j] as i32),
            }
        }
    }

    /// Rows that nothing was received into have no experts.
    fn pad(&mut self, rows: std::ops::Range<usize>) {
        if let Some(out) = &mut self.topk_idx {
            let k = out.shape()[1];
            for row in rows {
                match out.dtype() {
                    DType::I64 => write(out, row, k, |_| -1i64),
                    _ => write(out, row, k, |_| -1i32),
                }
            }
        }
    }
}

/// Fills row `row` of a dense tensor; type and shape were checked when it was accepted.
fn write<T: crate::Element>(
    out: &mut TensorMut<'_>,
    row: usize,
    n: usize,
    value: impl Fn(usize) -> T,
) {
    if let Ok(all) = out.as_mut_slice::<T>() {
        for (j, element) in all[row * n..][..n].iter_mut().enumerate() {
            *element = value(j);
        }
    }
}

/// The same, allocated for the caller.
struct OwnedMetadata {
    scales: Option<OwnedTensor>,
    topk_idx: Option<OwnedTensor>,
    topk_weights: Option<OwnedTensor>,
}

impl OwnedMetadata {
    fn new(terms: &Terms, rows: usize, input: &DispatchInput<'_>) -> Result<Self> {
        let make = |wanted: Option<DType>, columns: usize| {
            wanted
                .map(|dtype| OwnedTensor::zeros(dtype, &[rows, columns]))
                .transpose()
        };
        let topk = match &input.routes {
            InputRoutes::TopK { topk, .. } => Some(topk),
            InputRoutes::Layout { topk, .. } => topk.as_ref(),
            InputRoutes::Handle(_) => None,
        };
        Ok(Self {
            scales: make(
                input.scales.map(|scales| scales.dtype()),
                terms.scale_columns,
            )?,
            topk_idx: make(topk.map(|topk| topk.idx.dtype()), terms.top_k)?,
            topk_weights: make(
                topk.and_then(|topk| topk.weights).map(|_| DType::F32),
                terms.top_k,
            )?,
        })
    }

    fn as_output(&mut self) -> MetadataOutput<'_> {
        MetadataOutput {
            scales: self.scales.as_mut().map(OwnedTensor::as_tensor_mut),
            topk_idx: self.topk_idx.as_mut().map(OwnedTensor::as_tensor_mut),
            topk_weights: self.topk_weights.as_mut().map(OwnedTensor::as_tensor_mut),
        }
    }
}
