//! Communicators: how ranks find each other.

use std::{
    ffi::{c_char, c_void},
    time::Duration,
};

use deep_ep::{
    Communicator, Error, Result, Settings,
    bootstrap::{AllGather, TcpConfig},
    settings::Secret,
};

use crate::{
    boundary,
    objects::{self, Object},
    pointers::{self, Out, Versioned},
    status::Status,
};

/// One rank's end of a group of ranks.
pub struct CommunicatorObject(pub(crate) Communicator);

impl Object for CommunicatorObject {
    const NAME: &'static str = "deep_ep_communicator_t";
}

/// Sends the `bytes` bytes at `mine` to all ranks, and puts what every rank sent to `all`, in the order
/// of ranks (`bytes` times the number of ranks). All ranks pass the same `bytes`, as to MPI_Allgather.
/// Returns 0, or another value if it failed. Called by one thread at a time, by whatever thread makes
/// a collective call.
pub type AllGatherFunction = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        mine: *const c_void,
        bytes: usize,
        all: *mut c_void,
    ) -> i32,
>;

/// The caller's function as the library wants it: contributions of different lengths.
struct Callback {
    function: unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void) -> i32,
    context: *mut c_void,
    ranks: usize,
}

// SAFETY: the header says that the function may be called by any thread, one at a time.
unsafe impl Send for Callback {}
// SAFETY: as above.
unsafe impl Sync for Callback {}

impl Callback {
    fn gather(&self, mine: &[u8]) -> Result<Vec<u8>> {
        let mut all = vec![0u8; mine.len() * self.ranks];
        let (from, to) = (mine.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: the caller gave this function and this context to be called so; both memories have
        // the sizes that it is told.
        match unsafe { (self.function)(self.context, from, mine.len(), to) } {
            0 => Ok(all),
            code => Err(Error::Bootstrap {
                stage: "exchange".into(),
                reason: format!("the caller's all_gather returned {code}"),
            }),
        }
    }
}

impl AllGather for Callback {
    fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let lengths = self.gather(&(mine.len() as u64).to_ne_bytes())?;
        let (lengths, _) = lengths.as_chunks::<8>();
        let lengths: Vec<_> = lengths
            .iter()
            .map(|l| u64::from_ne_bytes(*l) as usize)
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest > deep_ep::bootstrap::MAX_CONTRIBUTION {
            return Err(Error::Bootstrap {
                stage: "exchange".into(),
                reason: format!("the caller's all_gather returned a length of {longest} bytes"),
            });
        }
        if longest == 0 {
            return Ok(vec![vec![]; self.ranks]);
        }
        let mut padded = mine.to_vec();
        padded.resize(longest, 0);
        let all = self.gather(&padded)?;
        let rows = all.chunks_exact(longest).zip(&lengths);
        Ok(rows.map(|(row, &length)| row[..length].to_vec()).collect())
    }
}

/// How processes meet at a TCP port of rank 0. Made by `deep_ep_tcp_config()`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TcpSettings {
    /// Set by `deep_ep_tcp_config()`.
    pub struct_size: usize,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// This rank's number on its host.
    pub local_rank: usize,
    /// Host of rank 0, a name or an address; NULL: 127.0.0.1.
    pub address: *const c_char,
    /// Port on which rank 0 listens.
    pub port: u16,
    /// What all ranks know and nobody else; may be NULL where `address` is of the loopback.
    pub secret: *const c_char,
    /// Deadline of meeting and of each exchange; 0: DEEP_EP_TIMEOUT_SECS, or 300.
    pub timeout_seconds: f64,
}

// SAFETY: see the trait; all zeros are NULL pointers and numbers.
unsafe impl Versioned for TcpSettings {
    const NAME: &'static str = "deep_ep_tcp_config_t";
}

/// A time in seconds, or what the environment says for 0.
pub(crate) fn timeout(seconds: f64) -> Result<Duration> {
    if seconds == 0.0 {
        return Ok(Settings::from_env()?.timeout.value);
    }
    let limit = "must be positive, and at most a year";
    match Duration::try_from_secs_f64(seconds) {
        Ok(timeout) if seconds <= 365.0 * 86_400.0 => Ok(timeout),
        _ => Err(Error::invalid("timeout_seconds", seconds, limit)),
    }
}

fn get(communicator: *const CommunicatorObject) -> Result<Communicator> {
    Ok(objects::get(communicator, "communicator")?.0.clone())
}

fn give(
    communicator: *mut *mut CommunicatorObject,
    make: impl FnOnce() -> Result<Communicator>,
) -> Status {
    boundary::call(|| {
        let out = Out::new(communicator, "communicator")?;
        out.set(objects::give(CommunicatorObject(make()?)));
        Ok(())
    })
}

/// This process among those of a job, as a launcher's environment describes it: RANK, WORLD_SIZE,
/// LOCAL_RANK, MASTER_ADDR, MASTER_PORT (as `deep-ep launch` and torchrun set them), DEEP_EP_SECRET.
/// Without WORLD_SIZE a group of one. Collective: returns when all ranks are there.
/// `*communicator` is the caller's to free.
/// Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_from_env(
    communicator: *mut *mut CommunicatorObject,
) -> Status {
    give(communicator, Communicator::from_env)
}

/// Processes that meet at a TCP port. Collective. `*communicator` is the caller's to free.
/// Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_tcp(
    config: *const TcpSettings,
    communicator: *mut *mut CommunicatorObject,
) -> Status {
    give(communicator, || {
        let config = pointers::read(config, "config")?;
        let address = pointers::text_optional(config.address, "address")?;
        let secret = pointers::text_optional(config.secret, "secret")?;
        Communicator::tcp(TcpConfig {
            rank: config.rank,
            world_size: config.world_size,
            local_rank: config.local_rank,
            address: address.unwrap_or_else(|| "127.0.0.1".into()),
            port: config.port,
            secret: secret.map(Secret::new).transpose()?,
            timeout: timeout(config.timeout_seconds)?,
        })
    })
}

/// `num_ranks` ranks that are threads of this process: `communicators` has room for so many, the n-th
/// is for the thread that plays rank n. Each is the caller's to free. Local.
/// Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_local(
    num_ranks: usize,
    communicators: *mut *mut CommunicatorObject,
) -> Status {
    boundary::call(|| {
        let ends = Communicator::local(num_ranks)?;
        let out = pointers::slice_mut(communicators, num_ranks, "communicators")?;
        for (out, end) in out.iter_mut().zip(ends) {
            *out = objects::give(CommunicatorObject(end));
        }
        Ok(())
    })
}

/// Ranks that exchange by the caller's own function, for example over MPI. `context` is passed to it;
/// both must be good until the communicator and all buffers made with it are freed. Deadlines, and
/// noticing that a rank is gone, are that function's business. `*communicator` is the caller's to
/// free. Local.
/// Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_from_all_gather(
    rank: usize,
    num_ranks: usize,
    all_gather: AllGatherFunction,
    context: *mut c_void,
    communicator: *mut *mut CommunicatorObject,
) -> Status {
    give(communicator, || {
        let function =
            all_gather.ok_or_else(|| Error::invalid("all_gather", "NULL", "must be a function"))?;
        let callback = Callback {
            function,
            context,
            ranks: num_ranks,
        };
        Communicator::from_all_gather(rank, num_ranks, Box::new(callback))
    })
}

/// This rank. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_rank(
    communicator: *const CommunicatorObject,
    rank: *mut usize,
) -> Status {
    boundary::call(|| {
        let out = Out::new(rank, "rank")?;
        out.set(get(communicator)?.rank().0);
        Ok(())
    })
}

/// Number of ranks. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_size(
    communicator: *const CommunicatorObject,
    size: *mut usize,
) -> Status {
    boundary::call(|| {
        let out = Out::new(size, "size")?;
        out.set(get(communicator)?.size());
        Ok(())
    })
}

/// This rank's number among those of its host, which says which GPU it uses. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_local_rank(
    communicator: *const CommunicatorObject,
    local_rank: *mut usize,
) -> Status {
    boundary::call(|| {
        let out = Out::new(local_rank, "local_rank")?;
        out.set(get(communicator)?.local_rank());
        Ok(())
    })
}

/// Sets the deadline of exchanges that begin from now on, on this rank. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_set_timeout(
    communicator: *const CommunicatorObject,
    timeout_seconds: f64,
) -> Status {
    boundary::call(|| {
        get(communicator)?.set_timeout(timeout(timeout_seconds)?);
        Ok(())
    })
}

/// Returns when every rank has called it. Collective; threads take turns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_barrier(
    communicator: *const CommunicatorObject,
) -> Status {
    boundary::call(|| get(communicator)?.barrier())
}

/// Sends the `bytes` bytes at `mine` to all ranks; `all` gets what every rank sent, in the order of
/// ranks: `bytes` times the number of ranks. All ranks pass the same `bytes`. Collective; threads take
/// turns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_all_gather(
    communicator: *const CommunicatorObject,
    mine: *const c_void,
    bytes: usize,
    all: *mut c_void,
) -> Status {
    boundary::call(|| {
        let communicator = get(communicator)?;
        let mine = pointers::slice(mine.cast::<u8>(), bytes, "mine")?;
        let total = bytes.saturating_mul(communicator.size());
        let out = pointers::slice_mut(all.cast::<u8>(), total, "all")?;
        let gathered = communicator.all_gather(mine)?;
        if let Some(rank) = gathered.iter().position(|sent| sent.len() != bytes) {
            return Err(Error::invalid(
                "bytes",
                bytes,
                format!("must be {} as on rank {rank}", gathered[rank].len()),
            ));
        }
        out.copy_from_slice(&gathered.concat());
        Ok(())
    })
}

/// Leaves the group, once buffers made with it are freed, too. NULL is allowed. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_communicator_free(
    communicator: *mut CommunicatorObject,
) -> Status {
    boundary::call(|| objects::take(communicator, "communicator"))
}
