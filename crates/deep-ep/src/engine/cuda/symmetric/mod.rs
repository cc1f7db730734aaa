//! Symmetric memory of GPUs: one region per rank, which the kernels of every rank load and store.
//!
//! ```text
//!  region of rank r:   0                     committed                         reserved
//!                      | memory of r's GPU   | addresses without memory        |
//! ```
//!
//! Addresses are reserved once, as many as the GPU has memory unless the caller wants fewer, and
//! memory is mapped behind them chunk by chunk; so no address ever changes. Between threads there is
//! one range for each rank, which all ranks use. A process has a range of its own for every rank.
//!
//! This needs CUDA's virtual memory management and, between processes, memory that can be exported
//! as a file descriptor. There is no other way yet (no CUDA IPC, no fabric handles): a GPU without
//! them gets [`Error::Unsupported`].
//!
//! # Making it, together
//!
//! ```text
//!  every rank                                     may fail on one rank, then all give up
//!  ----------                                     --------------------------------------
//!  what its GPU is and can, what it wants         no such memory here
//!  all_gather
//!  may every GPU access every other?              two cannot
//!  reserve own range, map the first chunk, clear  out of memory
//!  threads:   share the range
//!  processes: meet (memory::exchange), give the   a rank on another host, of another user,
//!             first chunk's file, map the peers'  one that died or sent nonsense
//! ```
//!
//! Memory that a rank begins with is zero before any rank returns. Ranks that have the same GPU are
//! found by its UUID: ordinals differ between processes.
//!
//! # Growing, alone
//!
//! The owner decides, at any time, whatever kernels run. Between threads it makes a chunk and maps it
//! for all GPUs of the group, which is all. Between processes each ordered pair of ranks has kept the
//! connection over which the first chunk came, and each rank has one thread that reads from these:
//!
//! ```text
//!  owner, in commit                               service thread of each peer
//!  ----------------                               ---------------------------
//!  make a chunk, map it
//!  offer (offset, bytes) + file      -----------> is it the next part, within the reserve?
//!  wait, with a deadline                          import, map behind the range's end
//!  take the answers                  <----------- answer (end, mapped or why not)
//!  committed = end; return
//! ```
//!
//! * When `commit` returns, every peer that is alive can use the new part, so its offsets may be
//!   announced. A service thread never waits for anything but its connections and the driver, so
//!   any number of ranks may grow at the same time.
//! * A peer is gone when its connection is closed: it died or dropped its end. `commit` does not wait
//!   for it, since nobody is there who would use the memory; the engine learns of the death
//!   elsewhere. What it had given stays mapped at the others: memory lives as long as one maps it.
//! * A peer that does not answer in time gives [`Error::Timeout`]. The chunk stays, the offer stays
//!   open, and the next `commit` waits for the rest of the answers before it says that anything is
//!   committed.
//! * A peer that cannot map, or answers nonsense, fails this `commit` and every later one of this
//!   owner: its view of the region has a gap for good.
//! * An owner that offers something else than the next part is told so; one that sends something
//!   else than an offer is cut off. Its region stays mapped as it was.
//!
//! # Leaving
//!
//! Dropping is not collective. It stops the service thread, in bounded time, and lets go of all
//! ranges; between threads, the last rank to drop unmaps. Kernels of this rank must not be using the
//! memory any more; those of other processes have mappings of their own.

mod facts;
mod owner;
mod record;
mod region;
mod service;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

pub(crate) use self::facts::Gpu;
use self::{
    facts::Facts,
    owner::Owner,
    region::{Region, Regions},
    service::{Service, Source},
};
use super::driver::{context::Context, device::Device, vmm::Sharing};
use crate::{
    bootstrap::Communicator,
    error::{Error, Result, Text},
    memory::exchange::{Meeting, Met},
    topology::Rank,
};

/// What errors say that the memory was for.
const PURPOSE: Text = Text::Borrowed("symmetric memory");

/// The operation that errors of growth name.
const OPERATION: Text = Text::Borrowed("growth of symmetric memory");

/// What the protocol needs of memory: the driver's, or in tests something that pretends.
trait Memory: fmt::Debug + Send + Sync {
    /// Adds `bytes` to this rank's region; gives the file that lets other processes map it, if
    /// there are any.
    fn grow(&self, bytes: u64) -> Result<Option<OwnedFd>>;

    /// Maps `bytes` that `peer` added to its region.
    fn import(&self, peer: Rank, bytes: u64, file: OwnedFd) -> Result<()>;
}

/// One rank's device region and its view of the peers'.
#[derive(Debug)]
pub(crate) struct Symmetric {
    /// Goes first: its thread maps into the regions.
    _service: Option<Service>,
    owner: Mutex<Owner>,
    regions: Arc<Regions>,
    committed: AtomicU64,
    reserved: u64,
    timeout: Duration,
    gpus: Vec<Gpu>,
    on_this_gpu: Vec<usize>,
}

impl Symmetric {
    /// Makes a region on the context's GPU, with `commit` bytes of zeros (at least one), and maps
    /// those of all ranks. Collective: every rank calls it, with sizes of its own. `reserve` is in
    /// bytes of addresses, 0 for as many as the GPU has memory. Both are rounded up to what the
    /// GPUs can map. `timeout` is the deadline of the meeting here and of every
    /// [`Symmetric::commit`]; the rest goes by the communicator's.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] without virtual memory management, if two GPUs cannot access each
    /// other (it names them and their ranks), or for a rank that is not on this host or not of this
    /// user; [`Error::OutOfMemory`]; [`Error::PeerRejected`] if another rank had an error;
    /// [`Error::Timeout`], [`Error::PeerLost`] or [`Error::Bootstrap`] if ranks do not come.
    pub(crate) fn new(
        communicator: &Communicator,
        context: &Arc<Context>,
        reserve: u64,
        commit: u64,
        timeout: Duration,
    ) -> Result<Self> {
        let sharing = match communicator.in_process() {
            true => Sharing::Process,
            false => Sharing::Host,
        };
        let mine = Facts::of(&context.device, sharing, reserve, commit);
        let mine = communicator.all_succeed(mine)?;
        let plan = Plan::new(&communicator.all_gather(&mine.encode())?, context, sharing);
        let plan = communicator.all_succeed(plan)?;
        let own = communicator.all_succeed(plan.own(communicator.rank()))?;
        let made = match sharing {
            Sharing::Process => plan.threads(communicator, own, timeout),
            Sharing::Host => plan.processes(communicator, own, timeout),
        };
        communicator.all_succeed(made)
    }

    /// The address at which this process sees the region of `rank`, the same for all of its GPUs.
    /// It never changes.
    pub(crate) fn base(&self, rank: usize) -> u64 {
        self.regions.by_rank[rank].base
    }

    /// Bytes of this rank's region that all ranks can use.
    pub(crate) fn committed(&self) -> u64 {
        self.committed.load(Ordering::Acquire)
    }

    /// Bytes that this rank's region can grow to.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Grows this rank's region to at least `bytes` in all, by memory with undefined contents. Not
    /// collective; kernels of any rank may be running. When it returns, every peer that is alive has
    /// mapped the new part.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] if the GPU has not enough or the reserve is passed;
    /// [`Error::Timeout`] naming the ranks that did not answer; [`Error::Bootstrap`] naming one that
    /// could not map the memory.
    pub(crate) fn commit(&self, bytes: u64) -> Result<()> {
        if bytes <= self.committed() {
            return Ok(());
        }
        let mut owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        let committed = owner.commit(&*self.regions, bytes, self.timeout)?;
        self.committed.store(committed, Ordering::Release);
        Ok(())
    }

    /// The ranks whose region lies on this rank's GPU, this one included, ascending.
    pub(crate) fn ranks_on_this_gpu(&self) -> &[usize] {
        &self.on_this_gpu
    }

    /// The GPU of `rank`, for reports.
    pub(crate) fn gpu_of(&self, rank: usize) -> &Gpu {
        &self.gpus[rank]
    }
}

/// What every rank knows of all before memory is made.
struct Plan {
    context: Arc<Context>,
    sharing: Sharing,
    facts: Vec<Facts>,
    /// All sizes are multiples of this: the largest granularity of all ranks.
    unit: u64,
    /// The GPUs of this process that ranks of the group use.
    devices: Vec<Device>,
}

impl Plan {
    fn new(gathered: &[Vec<u8>], context: &Arc<Context>, sharing: Sharing) -> Result<Self> {
        let facts = gathered.iter().enumerate().map(|(rank, bytes)| {
            Facts::decode(bytes).ok_or_else(|| Error::Bootstrap {
                stage: PURPOSE,
                reason: format!("rank {rank} sent nothing valid about its GPU"),
            })
        });
        let facts: Vec<_> = facts.collect::<Result<_>>()?;
        let visible = visible()?;
        let find = |facts: &Facts| {
            let same = |(uuid, _): &&([u8; 16], Device)| *uuid == facts.gpu.uuid;
            visible.iter().find(same).map(|&(_, device)| device)
        };
        check_access(&facts, &find)?;
        // Another process uses its own mappings, so only threads bring more GPUs.
        let mut devices = vec![context.device];
        if sharing == Sharing::Process {
            devices.extend(facts.iter().filter_map(find));
            devices.sort_by_key(|device| device.ordinal);
            devices.dedup_by_key(|device| device.ordinal);
        }
        Ok(Self {
            context: context.clone(),
            sharing,
            unit: facts
                .iter()
                .map(|facts| facts.granularity)
                .max()
                .unwrap_or(1),
            facts,
            devices,
        })
    }

    fn reserved(&self, rank: Rank) -> u64 {
        self.facts[rank.0].reserve.next_multiple_of(self.unit)
    }

    fn committed(&self, rank: Rank) -> u64 {
        self.facts[rank.0].commit.next_multiple_of(self.unit)
    }

    fn reserve(&self, rank: Rank) -> Result<Region> {
        let bytes = self.reserved(rank);
        Region::reserve(&self.context, self.sharing, &self.devices, bytes, self.unit)
    }

    /// The region of this rank, with its first chunk and, for processes, the file of that.
    fn own(&self, rank: Rank) -> Result<(Arc<Region>, Option<OwnedFd>)> {
        let region = self.reserve(rank)?;
        let file = region.grow(self.committed(rank))?;
        region.clear()?;
        Ok((Arc::new(region), file))
    }

    fn threads(
        self,
        communicator: &Communicator,
        (own, _): (Arc<Region>, Option<OwnedFd>),
        timeout: Duration,
    ) -> Result<Symmetric> {
        let regions = Regions {
            own: communicator.rank(),
            by_rank: communicator.shared(own)?,
        };
        Ok(self.symmetric(Arc::new(regions), vec![], None, timeout))
    }

    fn processes(
        self,
        communicator: &Communicator,
        (own, file): (Arc<Region>, Option<OwnedFd>),
        timeout: Duration,
    ) -> Result<Symmetric> {
        let rank = communicator.rank();
        let domain: Vec<_> = (0..communicator.size()).map(Rank).collect();
        let met = match &file {
            None => Err(Error::Unsupported {
                feature: PURPOSE,
                why: "memory without a file cannot be shared with other processes".into(),
            }),
            Some(file) => {
                let meeting = Meeting {
                    rank,
                    domain: &domain,
                    reserve: self.reserved(rank),
                    file: std::os::fd::AsFd::as_fd(file),
                    timeout,
                };
                meeting.run(
                    &|card| communicator.all_gather(card),
                    &mut |peer, _, file| {
                        let region = self.reserve(peer)?;
                        region.import(self.committed(peer), &file)?;
                        Ok(Arc::new(region))
                    },
                )
            }
        }?;
        self.connected(rank, own, met, timeout)
    }

    /// All regions are mapped: what is left is to keep the connections.
    fn connected(
        self,
        rank: Rank,
        own: Arc<Region>,
        met: Vec<Met<Arc<Region>>>,
        timeout: Duration,
    ) -> Result<Symmetric> {
        let mut by_rank = Vec::with_capacity(met.len() + 1);
        let (mut peers, mut sources) = (vec![], vec![]);
        for met in met {
            by_rank.push(met.value);
            peers.push(owner::Peer::new(met.rank, met.answered));
            sources.push(Source {
                rank: met.rank,
                socket: met.asked,
                mapped: self.committed(met.rank),
                reserved: self.reserved(met.rank),
                unit: self.unit,
            });
        }
        by_rank.insert(rank.0, own);
        let regions = Arc::new(Regions { own: rank, by_rank });
        let service = Service::start(regions.clone(), sources)?;
        Ok(self.symmetric(regions, peers, Some(service), timeout))
    }

    fn symmetric(
        self,
        regions: Arc<Regions>,
        peers: Vec<owner::Peer>,
        service: Option<Service>,
        timeout: Duration,
    ) -> Symmetric {
        let rank = regions.own;
        let (reserved, mapped) = (self.reserved(rank), self.committed(rank));
        let own = self.facts[rank.0].gpu.uuid;
        let on_this_gpu = (0..self.facts.len()).filter(|&rank| self.facts[rank].gpu.uuid == own);
        Symmetric {
            _service: service,
            on_this_gpu: on_this_gpu.collect(),
            owner: Mutex::new(Owner {
                unit: self.unit,
                reserved,
                mapped,
                peers,
            }),
            regions,
            committed: AtomicU64::new(mapped),
            reserved,
            timeout,
            gpus: self.facts.into_iter().map(|facts| facts.gpu).collect(),
        }
    }
}

/// The GPUs that this process sees, by UUID.
fn visible() -> Result<Vec<([u8; 16], Device)>> {
    let devices = Device::all()?.into_iter();
    devices.map(|device| Ok((device.uuid()?, device))).collect()
}

/// Checks every pair of ranks whose GPUs this process sees; other pairs are tried when memory is
/// mapped, by the processes that see them.
fn check_access(facts: &[Facts], find: &dyn Fn(&Facts) -> Option<Device>) -> Result<()> {
    let devices: Vec<_> = facts.iter().map(find).collect();
    for (rank, device) in devices.iter().enumerate() {
        for (other_rank, other) in devices.iter().enumerate() {
            let (Some(device), Some(other)) = (device, other) else {
                continue;
            };
            if device.ordinal != other.ordinal && !device.can_access(other)? {
                return Err(Error::Unsupported {
                    feature: PURPOSE,
                    why: format!(
                        "{} of rank {rank} cannot access the memory of {} of rank {other_rank}",
                        facts[rank].gpu, facts[other_rank].gpu
                    ),
                });
            }
        }
    }
    Ok(())
}
