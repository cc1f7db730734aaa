//! What memory and links of the GPUs of this host can do at most: the floor under every operation.
//!
//! Copies of one block of memory per launch, by three methods (plain 16-byte stores, bulk stores
//! from shared memory, copy engines), along three paths (within each GPU, from the first GPU to the
//! second, from every GPU to its next). Every GPU has a thread of its own; a run is an untimed
//! launch, timed launches between two events, and an untimed launch, so that all GPUs are at work
//! while any is timed. The slowest GPU counts. What was copied is compared with its source.
//!
//! A flag is bounced between the first two GPUs and between two blocks of one.

mod gpu;
pub(crate) mod params;

use std::{sync::Barrier, thread, time::Duration};

use gpu::{BYTES, Gpu, Run, TIMED};

use super::{
    driver::{checked::Driver, device::Device},
    jit::{Jit, LimitKey},
};
use crate::{
    error::{Error, Result},
    settings::Settings,
};

/// The kernels' constants: 4 warps with 7 chunks of half a row of 7168 bf16 each fill the shared
/// memory of an SM of Hopper (227 KiB).
pub(crate) const KEY: LimitKey = LimitKey {
    chunk_bytes: 7168,
    warps: 4,
    buffers: 7,
    lag: 3,
    unroll: 4,
};

/// SM counts that are measured unless others are asked for.
pub const DEFAULT_SMS: [u32; 6] = [4, 8, 16, 24, 32, 64];

/// Round trips of a flag.
const TRIPS: u32 = 2_000;

/// A flag that does not come back within this time never does.
const ROUND_TRIP_TIMEOUT: Duration = Duration::from_secs(5);

/// What to measure.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// SM counts; empty: those of [`DEFAULT_SMS`] that the GPUs have.
    pub sms: Vec<u32>,
    /// Runs of each measurement, of which the median counts; at least 1. Default: 5.
    pub runs: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            sms: Vec::new(),
            runs: 5,
        }
    }
}

/// Where the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// From a GPU's memory to the same, all GPUs at a time.
    Local,
    /// From the first GPU to the second, nothing else moving.
    OneWay,
    /// From every GPU to its next, the last one's next being the first: with two GPUs, both
    /// directions of their link are busy.
    BothWays,
}

/// What moves them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Threads load and store 16 bytes at a time, 1024 threads per SM.
    Store,
    /// Bulk copies through shared memory (TMA), several in flight per warp.
    Bulk,
    /// The GPU's copy engines; no SM.
    CopyEngine,
}

/// The speed of one method along one path.
#[derive(Debug, Clone)]
pub struct Bandwidth {
    /// Where the bytes go.
    pub path: Path,
    /// What moves them.
    pub method: Method,
    /// SMs of each GPU; `None` for copy engines.
    pub sms: Option<u32>,
    /// Bytes per second and GPU that were copied, in each run, ascending. Within one GPU the memory
    /// moves twice that, since it is read and written.
    pub bytes_per_second: Vec<f64>,
}

impl Bandwidth {
    /// The median of the runs, in bytes per second.
    pub fn median(&self) -> f64 {
        let speeds = &self.bytes_per_second;
        match speeds.len() {
            0 => 0.0,
            n if n % 2 == 1 => speeds[n / 2],
            n => (speeds[n / 2 - 1] + speeds[n / 2]) / 2.0,
        }
    }
}

/// What was measured.
#[derive(Debug, Clone)]
pub struct Limit {
    /// Names of the GPUs, by their number.
    pub gpus: Vec<String>,
    /// Bytes of one launch.
    pub bytes: u64,
    /// Every path, method and SM count.
    pub bandwidths: Vec<Bandwidth>,
    /// A flag to another SM of the same GPU and back.
    pub round_trip_local: Duration,
    /// A flag from the first GPU to the second and back.
    pub round_trip_link: Option<Duration>,
    /// Why nothing between GPUs was measured, if nothing was.
    pub no_link: Option<String>,
}

/// Measures. Takes seconds, 450 MiB of memory on each GPU, and the GPUs to itself.
///
/// # Errors
///
/// [`Error::Unsupported`] without CUDA, saying what is missing; [`Error::InvalidArgument`] for an
/// SM count that a GPU does not have; [`Error::OutOfMemory`]; [`Error::Cuda`] otherwise, also if a
/// copy differs from its source or a flag does not come back.
pub fn measure(settings: &Settings, config: &Config) -> Result<Limit> {
    let devices = Device::all()?;
    let counts = sm_counts(config, &devices)?;
    let jit = Jit::new(settings, Driver::get()?)?;
    let mut gpus = devices
        .iter()
        .map(|device| Gpu::new(*device, &jit, KEY))
        .collect::<Result<Vec<_>>>()?;
    let no_link = link(&gpus).err().map(|error| error.to_string());
    let mut paths = vec![Path::Local];
    if no_link.is_none() {
        paths.extend([Path::OneWay, Path::BothWays]);
    }
    let mut bandwidths = Vec::new();
    for path in paths {
        let work = targets(path, &gpus);
        for method in [Method::Store, Method::Bulk, Method::CopyEngine] {
            if method == Method::Bulk && !gpus.iter().all(Gpu::has_bulk) {
                continue;
            }
            let counts: Vec<_> = match method {
                Method::CopyEngine => vec![None],
                _ => counts.iter().copied().map(Some).collect(),
            };
            for sms in counts {
                let runs = runs(&mut gpus, &work, method, sms, config.runs)?;
                bandwidths.push(Bandwidth {
                    path,
                    method,
                    sms,
                    bytes_per_second: runs,
                });
            }
        }
    }
    Ok(Limit {
        gpus: devices.iter().map(Device::name).collect::<Result<_>>()?,
        bytes: BYTES as u64,
        bandwidths,
        round_trip_local: gpus[0].round_trip(TRIPS, ROUND_TRIP_TIMEOUT)?,
        round_trip_link: match no_link {
            None => Some(round_trip_link(&gpus)?),
            Some(_) => None,
        },
        no_link,
    })
}

fn sm_counts(config: &Config, devices: &[Device]) -> Result<Vec<u32>> {
    let sms = devices
        .iter()
        .map(Device::sms)
        .collect::<Result<Vec<_>>>()?;
    let most = sms.into_iter().min().unwrap_or(0);
    if config.sms.is_empty() {
        return Ok(DEFAULT_SMS.into_iter().filter(|&n| n <= most).collect());
    }
    match config.sms.iter().find(|&&n| n == 0 || n > most) {
        Some(bad) => Err(Error::invalid("sms", bad, format!("must be 1 to {most}"))),
        None => Ok(config.sms.clone()),
    }
}

/// Lets every GPU write to its next, and the second to the first.
fn link(gpus: &[Gpu]) -> Result<()> {
    if gpus.len() < 2 {
        return Err(Error::Unsupported {
            feature: "a link between GPUs".into(),
            why: "this process sees one GPU".into(),
        });
    }
    for (i, gpu) in gpus.iter().enumerate() {
        gpu.context
            .enable_peer(&gpus[(i + 1) % gpus.len()].context)?;
    }
    gpus[1].context.enable_peer(&gpus[0].context)
}

/// The GPU that each GPU writes to; `None` if it does nothing.
fn targets(path: Path, gpus: &[Gpu]) -> Vec<Option<usize>> {
    let n = gpus.len();
    (0..n)
        .map(|i| match path {
            Path::Local => Some(i),
            Path::OneWay => (i == 0).then_some(1),
            Path::BothWays => Some((i + 1) % n),
        })
        .collect()
}

/// Measures one method with one SM count: bytes per second of the slowest GPU, ascending.
fn runs(
    gpus: &mut [Gpu],
    work: &[Option<usize>],
    method: Method,
    sms: Option<u32>,
    count: usize,
) -> Result<Vec<f64>> {
    for target in work.iter().flatten() {
        gpus[*target].clear_target()?;
    }
    let mut speeds = Vec::with_capacity(count.max(1));
    {
        let prepare = |(i, target): (usize, &Option<usize>)| {
            target.map(|target| Run::new(&gpus[i], &gpus[target], method, sms))
        };
        let mut prepared = work
            .iter()
            .enumerate()
            .filter_map(prepare)
            .collect::<Result<Vec<_>>>()?;
        for _ in 0..count.max(1) {
            let slowest = together(&mut prepared)?;
            speeds.push((TIMED as usize * BYTES) as f64 / slowest.as_secs_f64().max(1e-9));
        }
    }
    for (i, target) in work.iter().enumerate() {
        if let Some(target) = *target {
            gpus[target].compare_with(&gpus[i], method, sms)?;
        }
    }
    speeds.sort_by(f64::total_cmp);
    Ok(speeds)
}

/// Runs all at the same time, each in a thread of its own; the longest time.
fn together(runs: &mut [Run<'_>]) -> Result<Duration> {
    let barrier = Barrier::new(runs.len());
    let times = thread::scope(|scope| {
        let threads: Vec<_> = runs
            .iter_mut()
            .map(|run| {
                let barrier = &barrier;
                scope.spawn(move || {
                    // Nothing before this can fail, so nobody waits for ever.
                    barrier.wait();
                    run.time()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect::<Result<Vec<_>>>()
    })?;
    Ok(times.into_iter().max().unwrap_or_default())
}

/// A flag between the first two GPUs.
fn round_trip_link(gpus: &[Gpu]) -> Result<Duration> {
    let (first, second) = (&gpus[0], &gpus[1]);
    first.clear_flags()?;
    second.clear_flags()?;
    let result = first.result()?;
    second.answer(first, TRIPS, ROUND_TRIP_TIMEOUT)?;
    let asked = first.ask(second, &result, TRIPS, ROUND_TRIP_TIMEOUT);
    // Whatever became of it, the other side ends by itself: by the last flag or by its deadline.
    second.stream.synchronize()?;
    asked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_fill_the_shared_memory_of_hopper() {
        assert!((190 << 10..=227 << 10).contains(&KEY.shared_bytes()));
        assert_eq!(KEY.chunk_bytes % 128, 0);
        assert!((1..KEY.buffers).contains(&KEY.lag));
        assert_eq!(BYTES % KEY.chunk_bytes as usize, 0);
    }

    #[test]
    fn the_median_is_in_the_middle() {
        let mut bandwidth = Bandwidth {
            path: Path::Local,
            method: Method::Store,
            sms: Some(4),
            bytes_per_second: vec![1.0, 2.0, 9.0],
        };
        assert_eq!(bandwidth.median(), 2.0);
        bandwidth.bytes_per_second.push(10.0);
        assert_eq!(bandwidth.median(), 5.5);
        bandwidth.bytes_per_second.clear();
        assert_eq!(bandwidth.median(), 0.0);
    }

    #[test]
    fn without_cuda_the_answer_says_so() {
        if Driver::get().is_ok() {
            return;
        }
        let settings = Settings::from_lookup(|_| None).unwrap();
        let error = measure(&settings, &Config::default()).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
}
