//! Moving the rows of a dispatch: pushed to their final place, or staged and pulled.

use std::time::Instant;

use super::{InFlight, OPERATION, metadata::Metadata};
use crate::{
    buffer::DispatchInput,
    engine::cpu::{
        announce::{ACCEPTED, Announcement, NO_MEMORY, note_reject},
        control::Kind,
        copy::RowUse,
        core::{Counters, Turn},
        group::{Absent, At, Stage},
        rows::{Rows, RowsMut, copy_each},
    },
    error::{Error, Result},
    memory::heap::{Block, Purpose},
    routing::exclusive_prefix_sum,
    topology::Rank,
};

/// Kinds of delivery.
const PUSHED: u64 = 0;
pub(super) const STAGED: u64 = 1;

impl InFlight {
    /// Memory for this rank's rows, one for each token.
    pub(super) fn staging(&self) -> Result<Block> {
        let bytes = self.own.tokens * self.own.terms.row_bytes;
        self.member.core.alloc(bytes, Purpose::DispatchStaging)
    }

    /// Copies the rows that other ranks want to `block`, a row's place being its token.
    pub(super) fn stage(&mut self, turn: &mut Turn<'_>, input: &DispatchInput<'_>, block: Block) {
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
            .store(row, self.own.tokens * row, RowUse::Staging);
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
    pub(super) fn deliver(&self, turn: &mut Turn<'_>, kind: impl Fn(usize) -> u64) {
        let group = &self.member.core.group;
        for peer in group.peers() {
            let note = [ACCEPTED, kind(peer), self.staged.unwrap_or(0)];
            group.post(peer, Kind::Delivered, self.call, &note);
        }
        turn.paid(Kind::Delivered);
    }

    /// Moves all rows: this rank's to the others and theirs to `to`. `landing` is where `to` is in
    /// this rank's region, if it is there, so that others can push into it.
    pub(super) fn transfer(
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
        let store = core.workers.store(row, to.bytes(), RowUse::Output);
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
            .store(row, total as usize * row, RowUse::Output);
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
        let store = core.workers.store(row, to.bytes(), RowUse::Output);
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

    pub(super) fn refuse_landing(&self, turn: &mut Turn<'_>, error: &Error) {
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
