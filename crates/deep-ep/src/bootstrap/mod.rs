//! How ranks find each other and exchange small things before, and beside, the fast paths.
//!
//! A [`Communicator`] is one rank's end of a group. It offers an `all_gather` of bytes, a barrier,
//! a comparison of settings, and [`Liveness`]: who is gone. Everything above is built from these,
//! so that it does not matter how the ranks came together:
//!
//! ```text
//!   Communicator::local            threads of this process: one mutex       (threads)
//!   Communicator::from_env, ::tcp  processes: rank 0 is the hub of a star   (tcp)
//!   Communicator::from_all_gather  the caller's own transport               (custom)
//! ```
//!
//! # Rules of all three
//!
//! - Collective calls ([`all_gather`](Communicator::all_gather), `barrier`, `shared`,
//!   `check_agreement`) are numbered: the n-th call of one rank meets the n-th of every other, so
//!   all ranks must make the same calls in the same order. Clones share the numbering and take
//!   turns.
//! - A call completes for all ranks or fails on all that have not completed it. It fails when a
//!   rank is gone ([`Error::PeerLost`]), when this rank's deadline passes ([`Error::Timeout`],
//!   naming the ranks that did not call), or when another rank's did ([`Error::Aborted`]). After
//!   that every later call on the group fails the same way: the ranks no longer agree on the
//!   number of the call.
//! - A contribution has at most [`MAX_CONTRIBUTION`] bytes.
//! - Dropping the last clone leaves the group, in bounded time whatever the others do. Who waits
//!   for a rank that left gets an error at once.

mod agreement;
mod custom;
mod liveness;
mod round;
mod tcp;
mod threads;

use std::{
    any::Any,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

pub use custom::AllGather;
pub use liveness::{Departure, Liveness, Subscription};
pub use tcp::TcpConfig;

use self::{
    custom::Custom,
    tcp::Tcp,
    threads::{Contribution, Threads},
};
use crate::{
    error::{Error, Reject, Result},
    settings::{MAX_RANKS, Origin, Settings},
    topology::Rank,
};

/// The most bytes one rank may contribute to one [`Communicator::all_gather`]: 16 MiB.
pub const MAX_CONTRIBUTION: usize = 16 << 20;

/// One rank's end of a group of ranks. See the [module](self) for the rules.
///
/// Clones are the same end; the last to be dropped leaves the group.
#[derive(Clone)]
pub struct Communicator {
    inner: Arc<Inner>,
    local_rank: usize,
}

struct Inner {
    rank: Rank,
    size: usize,
    /// In nanoseconds.
    timeout: AtomicU64,
    liveness: Arc<Liveness>,
    transport: Transport,
}

enum Transport {
    Threads(Threads),
    Tcp(Tcp),
    Custom(Custom),
}

impl Communicator {
    /// A group of `ranks` threads of this process; the n-th is for the thread that plays rank n.
    ///
    /// The deadline of waits is `DEEP_EP_TIMEOUT_SECS`, see [`Communicator::set_timeout`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `ranks` is 0 or above 65,536, or if that variable is bad.
    pub fn local(ranks: usize) -> Result<Vec<Self>> {
        Self::threads(ranks, Settings::timeout_from_env()?)
    }

    /// The group of processes that the environment describes; see
    /// [`Settings`] for the variables (those that torchrun sets).
    /// `WORLD_SIZE` absent or 1 gives a group of one, without network.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a bad variable, or if ranks are on several hosts and
    /// `DEEP_EP_SECRET` is not set; otherwise as [`Communicator::tcp`].
    pub fn from_env() -> Result<Self> {
        Self::from_settings(&Settings::from_env()?)
    }

    /// As [`Communicator::from_env`], with settings already read.
    ///
    /// # Errors
    ///
    /// As [`Communicator::from_env`].
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        let size = settings.world_size.value;
        if size > 1 && settings.rank.origin == Origin::Default {
            return Err(Error::invalid(
                "RANK",
                "not set",
                format!("must be set where WORLD_SIZE = {size}"),
            ));
        }
        // Without a secret the ranks must meet on the loopback, which on a single host they can,
        // whatever name the launcher gave it.
        let address = if settings.single_host() && settings.secret.value.is_none() {
            "127.0.0.1".to_owned()
        } else {
            settings.master_addr.value.clone()
        };
        Self::tcp(TcpConfig {
            rank: settings.rank.value,
            world_size: size,
            local_rank: settings.local_rank.value,
            address,
            port: settings.port.value,
            secret: settings.secret.value.clone(),
            timeout: settings.timeout.value,
        })
    }

    /// A group of processes that meet at a TCP port of rank 0. Returns when all are there.
    ///
    /// # Errors
    ///
    /// - [`Error::InvalidArgument`] if the configuration is not usable.
    /// - [`Error::Bootstrap`] if the ranks did not all come before the deadline (it names those
    ///   missing, and who was refused and why), or if rank 0 refused this rank: wrong secret,
    ///   another world size, a rank that is already there, another protocol version.
    /// - [`Error::Io`] if the port cannot be opened.
    pub fn tcp(config: TcpConfig) -> Result<Self> {
        config.check()?;
        let (local_rank, timeout) = (config.local_rank, config.timeout);
        if config.world_size == 1 {
            let mut only = Self::threads(1, timeout)?;
            return only
                .pop()
                .map(|only| only.with_local_rank(local_rank))
                .ok_or_else(|| Error::invalid("world_size", 0, "must be at least 1"));
        }
        let (rank, size) = (Rank(config.rank), config.world_size);
        let liveness = Arc::new(Liveness::new(size));
        let tcp = Tcp::connect(config, liveness.clone())?;
        Ok(
            Self::new(rank, size, timeout, liveness, Transport::Tcp(tcp))
                .with_local_rank(local_rank),
        )
    }

    /// A group whose exchange the caller supplies. [`Communicator::local_rank`] is `rank` unless
    /// [`Communicator::with_local_rank`] says otherwise.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `size` is 0 or above 65,536, or `rank` is not below it.
    pub fn from_all_gather(
        rank: usize,
        size: usize,
        transport: Box<dyn AllGather>,
    ) -> Result<Self> {
        check_rank(rank, size)?;
        let rank = Rank(rank);
        let custom = Custom::new(rank, size, transport);
        let liveness = Arc::new(Liveness::new(size));
        let timeout = Settings::timeout_from_env()?;
        Ok(Self::new(
            rank,
            size,
            timeout,
            liveness,
            Transport::Custom(custom),
        ))
    }

    fn threads(ranks: usize, timeout: Duration) -> Result<Vec<Self>> {
        check_rank(0, ranks)?;
        let ends = Threads::group(ranks).into_iter().enumerate();
        Ok(ends
            .map(|(rank, end)| {
                let liveness = end.liveness().clone();
                Self::new(
                    Rank(rank),
                    ranks,
                    timeout,
                    liveness,
                    Transport::Threads(end),
                )
            })
            .collect())
    }

    fn new(
        rank: Rank,
        size: usize,
        timeout: Duration,
        liveness: Arc<Liveness>,
        transport: Transport,
    ) -> Self {
        let inner = Inner {
            rank,
            size,
            timeout: AtomicU64::new(nanos(timeout)),
            liveness,
            transport,
        };
        Self {
            inner: Arc::new(inner),
            local_rank: rank.0,
        }
    }

    /// This end with another [`Communicator::local_rank`]; clones made before keep theirs.
    pub fn with_local_rank(mut self, local_rank: usize) -> Self {
        self.local_rank = local_rank;
        self
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.inner.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// This rank's number among those of its host, which says which device it uses.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The deadline of each collective call.
    pub fn timeout(&self) -> Duration {
        Duration::from_nanos(self.inner.timeout.load(Ordering::Relaxed))
    }

    /// Sets the deadline of collective calls that begin from now on, on this rank. A caller's own
    /// transport has its own.
    pub fn set_timeout(&self, timeout: Duration) {
        self.inner.timeout.store(nanos(timeout), Ordering::Relaxed);
    }

    /// Whether all ranks are threads of this process (true for a group of one without network).
    pub fn in_process(&self) -> bool {
        matches!(self.inner.transport, Transport::Threads(_))
    }

    /// Who is gone.
    pub fn liveness(&self) -> &Liveness {
        &self.inner.liveness
    }

    /// Sends `mine` to all and returns what every rank sent, by rank. Lengths may differ.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `mine` is longer than [`MAX_CONTRIBUTION`] (nothing was sent);
    /// [`Error::PeerLost`], [`Error::Timeout`] or [`Error::Aborted`] as the [module](self) says;
    /// [`Error::Bootstrap`] if another rank made another kind of call.
    pub fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.gather("all_gather", mine)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_gather`].
    pub fn barrier(&self) -> Result<()> {
        self.gather("barrier", &[]).map(|_| ())
    }

    fn gather(&self, operation: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        if mine.len() > MAX_CONTRIBUTION {
            return Err(Error::invalid(
                "all_gather contribution",
                format_args!("{} bytes", mine.len()),
                format!("must have at most {MAX_CONTRIBUTION} bytes"),
            ));
        }
        match &self.inner.transport {
            Transport::Threads(threads) => {
                let mine = Contribution::Bytes(mine.into());
                let all = threads.exchange(operation, mine, self.timeout())?;
                self.unwrap_each(operation, &all, |contribution| match contribution {
                    Contribution::Bytes(bytes) => Some(bytes.to_vec()),
                    Contribution::Shared(_) => None,
                })
            }
            Transport::Tcp(tcp) => tcp.all_gather(operation, mine, self.timeout()),
            Transport::Custom(custom) => custom.all_gather(mine),
        }
    }

    /// An `all_gather` of shared values between threads of one process.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] unless [`Communicator::in_process`]; [`Error::Bootstrap`] if ranks
    /// share values of different types; otherwise as [`Communicator::all_gather`].
    pub fn shared<T: Send + Sync + 'static>(&self, mine: Arc<T>) -> Result<Vec<Arc<T>>> {
        const OPERATION: &str = "shared";
        let Transport::Threads(threads) = &self.inner.transport else {
            return Err(Error::Unsupported {
                feature: "sharing values by pointer".into(),
                why: "the ranks are not threads of one process; use all_gather".into(),
            });
        };
        let mine: Arc<dyn Any + Send + Sync> = mine;
        let all = threads.exchange(OPERATION, Contribution::Shared(mine), self.timeout())?;
        self.unwrap_each(OPERATION, &all, |contribution| match contribution {
            Contribution::Shared(value) => value.clone().downcast().ok(),
            Contribution::Bytes(_) => None,
        })
    }

    /// What each rank contributed; an error if one contributed something of another kind.
    fn unwrap_each<V>(
        &self,
        operation: &'static str,
        all: &[Contribution],
        unwrap: impl Fn(&Contribution) -> Option<V>,
    ) -> Result<Vec<V>> {
        let each = all.iter().enumerate().map(|(rank, contribution)| {
            unwrap(contribution).ok_or_else(|| Error::Bootstrap {
                stage: "exchange".into(),
                reason: format!(
                    "rank {rank} made another kind of call, or shared another type, than rank {} \
                     in {operation}",
                    self.inner.rank
                ),
            })
        });
        each.collect()
    }

    /// Ends a step that every rank takes: gives `mine` when the step succeeded on all, else this
    /// rank's error or the first of another rank's.
    ///
    /// # Errors
    ///
    /// `mine`; [`Error::PeerRejected`]; otherwise as [`Communicator::all_gather`].
    pub(crate) fn all_succeed<T>(&self, mine: Result<T>) -> Result<T> {
        let reject = match &mine {
            Ok(_) => None,
            Err(Error::InvalidArgument(reject)) => Some(reject.clone()),
            Err(error) => Some(Reject::new(
                "its buffer",
                format!("not to be had ({error})"),
                "must be had on every rank",
            )),
        };
        let text = reject.map(|r| format!("{}\0{}\0{}", r.argument, r.value, r.limit));
        let all = self.all_gather(text.unwrap_or_default().as_bytes());
        let mine = mine?;
        let all = all?;
        let Some(rank) = all.iter().position(|text| !text.is_empty()) else {
            return Ok(mine);
        };
        let text = String::from_utf8_lossy(&all[rank]);
        let mut parts = text.splitn(3, '\0').map(str::to_owned);
        let mut next = || parts.next().unwrap_or_default();
        Err(Error::PeerRejected {
            rank: Rank(rank),
            reason: Reject::new(next(), next(), next()),
        })
    }

    /// Compares `settings`, the version of this library and the byte order with all ranks.
    ///
    /// Every rank that has a value another one has not gets the error, so all do. Ranks may list
    /// the settings in any order; names must not repeat.
    ///
    /// # Errors
    ///
    /// [`Error::SettingsDiffer`] naming the first setting that differs, this rank's value, and the
    /// first rank with another and its value; [`Error::Bootstrap`] if a rank sent something else
    /// than settings; otherwise as [`Communicator::all_gather`].
    pub fn check_agreement(&self, settings: &[(&'static str, String)]) -> Result<()> {
        let mine = agreement::encode(&agreement::with_implicit(settings));
        let all = self
            .gather("check_agreement", &mine)?
            .into_iter()
            .enumerate();
        let all = all.map(|(rank, bytes)| {
            agreement::decode(&bytes).ok_or_else(|| Error::Bootstrap {
                stage: "exchange".into(),
                reason: format!("rank {rank} sent no settings where they are compared"),
            })
        });
        agreement::compare(self.inner.rank, &all.collect::<Result<Vec<_>>>()?)
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.inner.rank)
            .field("size", &self.inner.size)
            .field("local_rank", &self.local_rank)
            .field("in_process", &self.in_process())
            .field("liveness", &self.inner.liveness)
            .finish_non_exhaustive()
    }
}

/// Checks a rank and the size of its group.
fn check_rank(rank: usize, size: usize) -> Result<()> {
    if size == 0 || size > MAX_RANKS {
        return Err(Error::invalid(
            "world_size",
            size,
            format!("must be 1 to {MAX_RANKS}"),
        ));
    }
    if rank >= size {
        return Err(Error::invalid(
            "rank",
            rank,
            format!("must be below world_size = {size}"),
        ));
    }
    Ok(())
}

/// Locks, whether or not a thread panicked while it held the lock: no code under these locks
/// leaves a value half changed.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// `timeout` from `begun` on; a year for what a clock cannot express.
fn deadline_after(begun: Instant, timeout: Duration) -> Instant {
    begun
        .checked_add(timeout)
        .unwrap_or_else(|| begun + Duration::from_secs(365 * 86_400))
}
