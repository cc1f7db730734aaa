//! The ranks of a buffer: their regions, and waiting for them.
//!
//! Every wait has a deadline and ends early when the group is aborted or a rank that is waited for
//! is gone. Whoever gives up aborts the group, so that nobody waits for a rank that has left.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    control::{Control, Kind, Layout},
    sync::Mail,
};
use crate::{
    bootstrap::{Communicator, Subscription},
    engine::Operation,
    error::{Error, Result},
    interrupt,
    memory::{
        futex,
        region::{Region, Window},
    },
    topology::Rank,
};

/// Where in an operation a rank waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Stage {
    /// For peers to finish the call before last, whose words this call uses again.
    Reuse = 1,
    /// For the peers' announcements.
    Counts = 2,
    /// For the peers to say where they want rows.
    Landing = 3,
    /// For rows.
    Rows = 4,
    /// For the weights of a low-latency combine.
    Weights = 5,
    /// For peers to have read a loan.
    LoanReaders = 6,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Reuse => "reuse",
            Self::Counts => "counts",
            Self::Landing => "landing",
            Self::Rows => "rows",
            Self::Weights => "weights",
            Self::LoanReaders => "loan readers",
        }
    }

    fn from_code(code: u64) -> &'static str {
        [
            Self::Reuse,
            Self::Counts,
            Self::Landing,
            Self::Rows,
            Self::Weights,
            Self::LoanReaders,
        ]
        .into_iter()
        .find(|stage| *stage as u64 == code)
        .map_or("unknown", Self::name)
    }
}

/// A place to wait at.
#[derive(Debug, Clone, Copy)]
pub(super) struct At {
    pub(super) operation: Operation,
    pub(super) stage: Stage,
}

/// What to do about ranks that do not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absent {
    /// Abort the group.
    Fail,
    /// Mask them and go on.
    Mask,
}

/// The ranks of one buffer.
pub(super) struct Group {
    rank: usize,
    layout: Layout,
    memories: Vec<Window>,
    timeout: Duration,
    spins: u32,
    /// Ranks whose process or communicator is gone.
    gone: Arc<Vec<AtomicBool>>,
    masks: Vec<AtomicBool>,
    _liveness: Subscription,
}

impl Group {
    /// `memories` are those of all ranks; at least their control areas are committed and were zero.
    pub(super) fn new(
        communicator: &Communicator,
        own: &Arc<Region>,
        memories: Vec<Window>,
        timeout: Duration,
    ) -> Self {
        let ranks = memories.len();
        let rank = communicator.rank().0;
        let layout = Layout::new(ranks);
        let gone: Arc<Vec<_>> = Arc::new((0..ranks).map(|_| AtomicBool::new(false)).collect());
        let liveness = {
            let (gone, own) = (gone.clone(), own.clone());
            communicator
                .liveness()
                .subscribe(Box::new(move |lost: Rank| {
                    gone[lost.0].store(true, Ordering::Release);
                    // SAFETY: the region lives as long as this closure holds it, and its control area
                    // is only accessed through `Control`.
                    let doorbell = unsafe { Control::new(own.base().as_ptr(), layout) }.doorbell();
                    doorbell.ring(|| {
                        futex::wake_all(doorbell.rings);
                    });
                }))
        };
        // Where every rank has a core, a message comes within a spin; where ranks share cores,
        // spinning keeps the sender from running.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if ranks <= cores { 4000 } else { 64 };
        let masks = (0..ranks).map(|_| AtomicBool::new(false)).collect();
        Self {
            rank,
            layout,
            memories,
            timeout,
            spins,
            gone,
            masks,
            _liveness: liveness,
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn ranks(&self) -> usize {
        self.memories.len()
    }

    /// All other ranks that are not masked.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.ranks()).filter(|&rank| rank != self.rank && !self.is_masked(rank))
    }

    pub(super) fn memory(&self, rank: usize) -> &Window {
        &self.memories[rank]
    }

    /// The control area of `rank`'s region.
    fn control(&self, rank: usize) -> Control<'_> {
        // SAFETY: every region holds a committed control area of this layout that was zero at first
        // and that all ranks access through `Control`; the mapping lives as long as `self`.
        unsafe { Control::new(self.memories[rank].base().as_ptr(), self.layout) }
    }

    pub(super) fn is_masked(&self, rank: usize) -> bool {
        self.masks[rank].load(Ordering::Acquire)
    }

    pub(super) fn set_mask(&self, rank: usize, masked: bool) {
        self.masks[rank].store(masked, Ordering::Release);
        if !masked {
            self.control(rank).excluded(self.rank).advance(0);
        }
    }

    /// Masks the ranks that have masked this one because it did not come. They are in later calls
    /// by now, whose landing memory must not be written for this rank's call.
    pub(super) fn heed_exclusions(&self) {
        let own = self.control(self.rank);
        let excluders: Vec<_> = self
            .peers()
            .filter(|&peer| own.excluded(peer).finished() != 0)
            .collect();
        if !excluders.is_empty() {
            tracing::warn!(?excluders, "masking ranks that went on without this one");
            excluders.iter().for_each(|&rank| self.set_mask(rank, true));
        }
    }

    fn ring(&self, rank: usize) {
        let doorbell = self.control(rank).doorbell();
        doorbell.ring(|| {
            futex::wake_all(doorbell.rings);
        });
    }

    /// Posts a message to one peer.
    pub(super) fn post(&self, to: usize, kind: Kind, call: u64, payload: &[u64]) {
        self.control(to)
            .mailbox(kind, call, self.rank)
            .post(call, payload);
        self.ring(to);
    }

    /// Looks for a message from one peer.
    pub(super) fn look(&self, from: usize, kind: Kind, call: u64) -> Result<Option<Message<'_>>> {
        let mailbox = self.control(self.rank).mailbox(kind, call, from);
        match mailbox.look(call) {
            Mail::NotYet => Ok(None),
            Mail::Here => Ok(Some(Message(mailbox))),
            Mail::Overtaken => Err(Error::PeerLost {
                operation: "this call".into(),
                stage: "overtaken: that rank has masked this one".into(),
                ranks: vec![Rank(from)],
            }),
        }
    }

    /// Tells all peers that this rank is done with all calls up to `call`.
    pub(super) fn finish(&self, call: u64) {
        for peer in (0..self.ranks()).filter(|&rank| rank != self.rank) {
            self.control(peer).finished(self.rank).advance(call);
            self.ring(peer);
        }
    }

    /// Calls up to this one are finished at `peer`.
    pub(super) fn finished(&self, peer: usize) -> u64 {
        self.control(self.rank).finished(peer).finished()
    }

    /// Calls up to this one are finished at every peer: nobody reads or writes anything for them any
    /// more. Masked ranks count unless they have left: they may only be slow.
    pub(super) fn finished_by_all(&self) -> u64 {
        (0..self.ranks())
            .filter(|&rank| rank != self.rank)
            .filter(|&rank| !self.is_masked(rank) || self.lost(&[rank]).is_empty())
            .map(|peer| self.finished(peer))
            .min()
            .unwrap_or(u64::MAX)
    }

    /// Waits until nobody reads or writes anything for `call` any more.
    pub(super) fn wait_unused(&self, at: At, call: u64, absent: Absent) -> Result<()> {
        self.wait_finished(at, call, absent)?;
        let using: Vec<_> = (0..self.ranks())
            .filter(|&rank| rank != self.rank && self.finished(rank) < call)
            .filter(|&rank| self.lost(&[rank]).is_empty())
            .map(Rank)
            .collect();
        if using.is_empty() {
            return Ok(());
        }
        Err(Error::PeerLost {
            operation: at.operation.name().into(),
            stage: format!("{}, where ranks are masked but not gone", at.stage.name()).into(),
            ranks: using,
        })
    }

    /// Waits until every peer has finished `call`.
    pub(super) fn wait_finished(&self, at: At, call: u64, absent: Absent) -> Result<()> {
        self.wait(at, self.peers().collect(), absent, |peer| {
            Ok(self.finished(peer) >= call)
        })
        .map(drop)
    }

    /// Tells all peers that this rank's buffer is no more.
    pub(super) fn close(&self) {
        for peer in (0..self.ranks()).filter(|&rank| rank != self.rank) {
            self.control(peer).closed(self.rank).advance(1);
            self.ring(peer);
        }
    }

    /// The error that ended this group, if one did.
    pub(super) fn check_abort(&self) -> Result<()> {
        let abort = self.control(self.rank).abort();
        let Some(by) = abort.raised() else {
            return Ok(());
        };
        let ranks = (0..self.ranks())
            .filter(|rank| abort.word(2 + rank / 64) >> (rank % 64) & 1 == 1)
            .map(Rank)
            .collect();
        Err(Error::Aborted {
            by: Rank(by),
            operation: Operation::from_code(abort.word(0))
                .map_or("unknown", Operation::name)
                .into(),
            stage: Stage::from_code(abort.word(1)).into(),
            ranks,
        })
    }

    /// Tells everybody that this rank gives up, and for whom it waited.
    pub(super) fn abort(&self, at: At, missing: &[usize]) {
        let mut payload = vec![at.operation as u64, at.stage as u64];
        payload.resize(2 + self.ranks().div_ceil(64), 0);
        for rank in missing {
            payload[2 + rank / 64] |= 1 << (rank % 64);
        }
        for rank in 0..self.ranks() {
            self.control(rank).abort().raise(self.rank, &payload);
            if rank != self.rank {
                self.ring(rank);
            }
        }
    }

    /// Waits until `ready` holds for each of `ranks`; it is asked again and again, in no order, and
    /// never again for a rank for which it held. Returns the ranks that were masked instead.
    pub(super) fn wait(
        &self,
        at: At,
        ranks: Vec<usize>,
        absent: Absent,
        mut ready: impl FnMut(usize) -> Result<bool>,
    ) -> Result<Vec<usize>> {
        let start = Instant::now();
        let mut missing = ranks;
        let mut masked = vec![];
        while !missing.is_empty() {
            masked.append(&mut self.wait_for_some(at, &mut missing, absent, start, &mut ready)?);
        }
        Ok(masked)
    }

    /// Waits until `ready` holds for some of `missing`, and takes those out of it. Returns the
    /// ranks that were masked and taken out instead. The deadline counts from `start`.
    pub(super) fn wait_for_some(
        &self,
        at: At,
        missing: &mut Vec<usize>,
        absent: Absent,
        start: Instant,
        ready: &mut impl FnMut(usize) -> Result<bool>,
    ) -> Result<Vec<usize>> {
        let before = missing.len();
        let mut pass = |missing: &mut Vec<usize>| {
            let mut failed = Ok(());
            missing.retain(|&rank| {
                failed.is_ok()
                    && !ready(rank).unwrap_or_else(|error| {
                        failed = Err(error);
                        false
                    })
            });
            failed.map(|()| missing.len() < before || before == 0)
        };
        loop {
            for _ in 0..self.spins {
                if pass(missing)? {
                    return Ok(vec![]);
                }
                std::hint::spin_loop();
            }
            // A rank that gave up raises the abort before it leaves: looked at in this order, it is
            // not taken for the reason.
            let lost = self.lost(missing);
            self.check_abort()?;
            // What a rank did before it left counts: look once more, now that it cannot change.
            if !lost.is_empty() && pass(missing)? {
                return Ok(vec![]);
            }
            let waited = start.elapsed();
            let timed_out = waited >= self.timeout;
            let absentees = if timed_out { missing.clone() } else { lost };
            if !absentees.is_empty() {
                self.give_up(at, &absentees, absent, timed_out.then_some(waited))?;
                missing.retain(|rank| !absentees.contains(rank));
                return Ok(absentees);
            }
            if interrupt::requested() {
                self.abort(at, missing);
                self.check_abort()?;
            }
            // Whatever rings the doorbell is looked for once more before sleeping.
            self.sleep(interrupt::slice(self.timeout - waited), || {
                Ok(pass(missing)? || self.has_ended(missing))
            })?;
        }
    }

    /// Whether the group was aborted, or one of `ranks` has left.
    fn has_ended(&self, ranks: &[usize]) -> bool {
        self.control(self.rank).abort().raised().is_some() || !self.lost(ranks).is_empty()
    }

    /// Sleeps until the doorbell rings, at most for `left`, unless `ready`.
    fn sleep(&self, left: Duration, mut ready: impl FnMut() -> Result<bool>) -> Result<()> {
        let doorbell = self.control(self.rank).doorbell();
        let mut found = Ok(false);
        doorbell.wait(
            || {
                found = ready();
                !matches!(found, Ok(false))
            },
            |expected| {
                futex::wait(doorbell.rings, expected, Some(left));
            },
        );
        found.map(drop)
    }

    /// Those of `ranks` that have left.
    fn lost(&self, ranks: &[usize]) -> Vec<usize> {
        let own = self.control(self.rank);
        let lost = |&rank: &usize| {
            self.gone[rank].load(Ordering::Acquire) || own.closed(rank).finished() != 0
        };
        ranks.iter().copied().filter(lost).collect()
    }

    /// Masks the ranks that did not come, or aborts the group.
    fn give_up(
        &self,
        at: At,
        missing: &[usize],
        absent: Absent,
        timed_out: Option<Duration>,
    ) -> Result<()> {
        if absent == Absent::Mask {
            tracing::warn!(
                operation = at.operation.name(),
                ?missing,
                "masking absent ranks"
            );
            for &rank in missing {
                self.control(rank).excluded(self.rank).advance(1);
                self.set_mask(rank, true);
            }
            return Ok(());
        }
        self.abort(at, missing);
        let (operation, stage) = (at.operation.name().into(), at.stage.name().into());
        let ranks = missing.iter().copied().map(Rank).collect();
        Err(match timed_out {
            Some(waited) => Error::Timeout {
                operation,
                stage,
                ranks,
                waited,
            },
            None => Error::PeerLost {
                operation,
                stage,
                ranks,
            },
        })
    }
}

/// A message that has arrived.
pub(super) struct Message<'a>(super::sync::Mailbox<'a, std::sync::atomic::AtomicU64>);

impl Message<'_> {
    pub(super) fn word(&self, i: usize) -> u64 {
        self.0.word(i)
    }

    pub(super) fn words(&self, range: std::ops::Range<usize>) -> Vec<u64> {
        range.map(|i| self.word(i)).collect()
    }
}
