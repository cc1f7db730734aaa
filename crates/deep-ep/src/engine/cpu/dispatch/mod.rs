//! High-throughput dispatch. The protocol is described in the module above.

mod metadata;
mod received;
mod transfer;

use std::sync::Arc;

use self::{
    metadata::{HAS_TOPK, HAS_WEIGHTS, Metadata, MetadataMut, Sections},
    received::{OwnedReceived, Received},
    transfer::STAGED,
};
use super::{
    announce::{Announcement, Terms, gather_all},
    control::Kind,
    core::{Counters, CpuLoan, Member, Turn},
    rows::RowsMut,
};
use crate::{
    buffer::{
        DispatchHandle, DispatchInput, DispatchOutput, Dispatched, Landing, Loan, ReceivedCounts,
        Routes as InputRoutes, SendPlan, TopK,
    },
    engine::{DispatchCall, Operation},
    error::{Error, Reject, Result},
    memory::heap::Purpose,
    routing::{ExpertMap, Routes, align_up, check_ids},
    topology::Rank,
};

const OPERATION: Operation = Operation::Dispatch;

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
    // Dropped before `this`, which waits for the end of the turn: also when something panics.
    let mut turn = turn;
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
    let topk = input_topk(input);
    let plan = match &input.routes {
        InputRoutes::TopK { topk, num_experts } => {
            let mut routes = Routes::new();
            routes.rebuild(&topk.idx, &ExpertMap::new(*num_experts, ranks)?)?;
            SendPlan::new(routes)
        }
        InputRoutes::Layout { layout, topk } => {
            if let Some(topk) = topk {
                check_ids(&topk.idx, layout.host().tokens_per_expert.len())?;
            }
            SendPlan::new(layout.host().routes.clone())
        }
        InputRoutes::Handle(handle) => handle.plan().clone(),
    };
    let tokens_per_expert = match &input.routes {
        InputRoutes::TopK { .. } => plan.routes.tokens_per_expert(),
        InputRoutes::Layout { layout, .. } => &layout.host().tokens_per_expert,
        InputRoutes::Handle(_) => &[],
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
    metadata.fill(&plan.routes, topk, tokens_per_expert, input.scales.as_ref());
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

/// The choices that travel.
fn input_topk<'a>(input: &'a DispatchInput<'_>) -> Option<&'a TopK<'a>> {
    match &input.routes {
        InputRoutes::TopK { topk, .. } => Some(topk),
        InputRoutes::Layout { topk, .. } => topk.as_ref(),
        InputRoutes::Handle(_) => None,
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
                let reject = Reject::new(
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
            rows: Some(rows),
            output_rows,
            rows_from,
            tokens_per_expert,
        })
    }

    /// Copies indices, weights and scales of received rows, and returns the source tokens.
    fn receive(&self, out: &mut Received<'_>) -> Result<Vec<i32>> {
        let group = &self.member.core.group;
        let (announced, counts) = self.arrived.as_ref().expect("counts come before metadata");
        let mut src_idx = Vec::with_capacity(counts.output_rows);
        for (rank, from) in announced.iter().enumerate() {
            let metadata = Metadata::of(group, rank, from)?;
            let tokens = metadata.tokens_for(group.rank(), from)?;
            let domain = (group.rank(), group.ranks());
            out.receive(src_idx.len(), tokens, &metadata, from, domain);
            src_idx.extend(tokens.iter().map(|&token| token as i32));
        }
        let terms = &self.own.terms;
        out.pad(src_idx.len(), terms.top_k);
        let row_bytes = (2 * terms.top_k + terms.scale_columns) * 4;
        Counters::add(
            &self.member.core.counters.metadata,
            src_idx.len() * row_bytes,
        );
        src_idx.resize(counts.output_rows, -1);
        Ok(src_idx)
    }

    fn finish_with(
        &mut self,
        turn: &mut Turn<'_>,
        input: &DispatchInput<'_>,
        to: RowsMut,
        landing: Option<u64>,
        out: &mut Received<'_>,
    ) -> Result<(ReceivedCounts, DispatchHandle)> {
        self.transfer(turn, input, to, landing)?;
        let src_idx = self.receive(out)?;
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
        let ids = input_topk(input).map(|topk| topk.idx.dtype());
        let scales = input.scales.map(|scales| scales.dtype());
        let mut out = OwnedReceived::new(&self.own.terms, rows, ids, scales)?;
        let (counts, handle) =
            out.fill(|received| self.finish_with(turn, input, to, Some(offset), received))?;
        let OwnedReceived {
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
            let mut received = Received::into_caller(out)?;
            self.finish_with(&mut turn, input, to, None, &mut received)
        });
        turn.finish(done)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.member.core.abandon(self.call);
    }
}
