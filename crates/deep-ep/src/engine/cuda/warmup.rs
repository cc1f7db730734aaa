//! Kernels compiled ahead of time, so that the first call of a shape finds them.

use std::{
    collections::HashSet,
    num::NonZeroUsize,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    driver::{
        checked::Driver,
        device::{ComputeCapability, Device},
        nvrtc::{Places, Search},
    },
    engine::keys::{CallSizes, MAX_RANKS, of_calls},
    jit::{Jit, Key, Target},
};
use crate::{
    dtype::DType,
    error::{Error, Result},
    routing::MAX_TOP_K,
    settings::Settings,
};

/// What to compile for: every combination of the lists.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WarmupConfig {
    /// Hidden sizes, in elements.
    pub hidden: Vec<usize>,
    /// Experts over all ranks. Every number of ranks must divide it; programs are the same for any.
    pub experts: usize,
    /// Choices of a token.
    pub top_k: Vec<usize>,
    /// Ranks of a group.
    pub ranks: Vec<usize>,
    /// Element types of dispatched rows: [`DType::Bf16`], [`DType::F8E4M3`], or both, which is the
    /// default. Combined rows are bf16.
    pub dtypes: Vec<DType>,
    /// Compute capabilities of the GPUs; [`architectures`] has those of this machine.
    pub architectures: Vec<ComputeCapability>,
    /// Threads that compile; at least 1. Default: as many as there are processors.
    pub jobs: usize,
}

impl Default for WarmupConfig {
    fn default() -> Self {
        Self {
            hidden: Vec::new(),
            experts: 0,
            top_k: Vec::new(),
            ranks: Vec::new(),
            dtypes: vec![DType::Bf16, DType::F8E4M3],
            architectures: Vec::new(),
            jobs: thread::available_parallelism().map_or(1, NonZeroUsize::get),
        }
    }
}

/// A program that is in the cache now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warmed {
    /// Its file's name, as `dispatch.cu`.
    pub program: &'static str,
    /// What it was compiled for, as the compiler spells it: `sm_90a`, or `compute_90` for PTX, which
    /// the driver compiles further.
    pub architecture: String,
    /// The constants that it was compiled with; 0: known only at run time.
    pub constants: Vec<(&'static str, u64)>,
    /// It was there before.
    pub cached: bool,
    /// The time that compiling, or finding it, took.
    pub took: Duration,
}

/// The compute capabilities of the GPUs that this process sees, each once, in ascending order.
///
/// # Errors
///
/// [`Error::Unsupported`] if there is no driver or no GPU.
pub fn architectures() -> Result<Vec<ComputeCapability>> {
    let gpus = Device::all()?;
    let capabilities: Result<Vec<_>> = gpus.iter().map(Device::compute_capability).collect();
    let mut capabilities = capabilities?;
    capabilities.sort_unstable();
    capabilities.dedup();
    if capabilities.is_empty() {
        return Err(Error::Unsupported {
            feature: "CUDA".into(),
            why: "this process sees no GPU".into(),
        });
    }
    Ok(capabilities)
}

/// Compiles the programs that calls of these shapes use into the cache folder of the settings, unless
/// they are there. Those that calls of every shape use are among them. No GPU is needed; another
/// machine finds them if it uses the same folder, version of this library and version of NVRTC.
///
/// `done` is told of every program when it is there, from the thread that compiled it. Returns all of
/// them, in an order that depends on the shapes alone.
///
/// # Errors
///
/// [`Error::InvalidArgument`] for shapes that no call has; [`Error::Unsupported`] without NVRTC, for
/// GPUs that are too old, and for a cache folder that is not set or cannot be written;
/// [`Error::Cuda`] if the compiler fails. Programs that were compiled before an error stay.
pub fn warmup(
    settings: &Settings,
    config: &WarmupConfig,
    done: &(dyn Fn(&Warmed) + Sync),
) -> Result<Vec<Warmed>> {
    let shapes = shapes(config)?;
    let Some(folder) = settings.cache_dir.value.clone() else {
        return Err(Error::Unsupported {
            feature: "keeping compiled kernels".into(),
            why: "there is no cache folder; set DEEP_EP_CACHE_DIR".into(),
        });
    };
    // The one that the engine would choose here.
    let newest = Driver::get().ok().map(|driver| driver.version);
    let places = Places::of_process(settings.nvrtc.value.clone());
    let nvrtc = Search::run(&places, newest).found?;
    let jit = Jit::with(nvrtc, Some(folder));
    compile(&jit, &programs(&jit, config, &shapes)?, config.jobs, done)
}

/// Every combination of the lists.
fn shapes(config: &WarmupConfig) -> Result<Vec<CallSizes>> {
    let mut shapes = Vec::new();
    for &ranks in &config.ranks {
        check("ranks", ranks, MAX_RANKS)?;
        if config.experts == 0 || !config.experts.is_multiple_of(ranks) {
            let limit = format!("must be a positive multiple of {ranks} ranks");
            return Err(Error::invalid("experts", config.experts, limit));
        }
        for &top_k in &config.top_k {
            check("top_k", top_k, MAX_TOP_K)?;
            for &hidden in &config.hidden {
                check("hidden", hidden, i32::MAX as usize)?;
                for &dtype in &config.dtypes {
                    shapes.push(CallSizes {
                        ranks: ranks as u32,
                        top_k: top_k as u32,
                        hidden: hidden as u32,
                        fp8: is_fp8(dtype, hidden)?,
                    });
                }
            }
        }
    }
    let lists = [
        ("hidden", config.hidden.len()),
        ("top_k", config.top_k.len()),
        ("ranks", config.ranks.len()),
        ("dtypes", config.dtypes.len()),
        ("architectures", config.architectures.len()),
    ];
    match lists.into_iter().find(|(_, length)| *length == 0) {
        Some((name, _)) => Err(Error::invalid(name, "empty", "must have a value")),
        None => Ok(shapes),
    }
}

fn check(name: &'static str, value: usize, most: usize) -> Result<()> {
    match (1..=most).contains(&value) {
        true => Ok(()),
        false => Err(Error::invalid(
            name,
            value,
            format!("must be from 1 to {most}"),
        )),
    }
}

/// Whether rows of this type are FP8.
fn is_fp8(dtype: DType, hidden: usize) -> Result<bool> {
    let grain = match dtype {
        DType::Bf16 => 8,
        DType::F8E4M3 => 128,
        _ => return Err(Error::invalid("dtypes", dtype, "must be bf16 or FP8 E4M3")),
    };
    match hidden.is_multiple_of(grain) {
        true => Ok(dtype == DType::F8E4M3),
        false => Err(Error::invalid(
            "hidden",
            hidden,
            format!("must be a multiple of {grain} for rows of {dtype}"),
        )),
    }
}

/// The programs of these shapes, each once.
fn programs(jit: &Jit, config: &WarmupConfig, shapes: &[CallSizes]) -> Result<Vec<(Target, Key)>> {
    let (mut programs, mut seen) = (Vec::new(), HashSet::new());
    for &gpu in &config.architectures {
        let target = Target::with(gpu, jit.nvrtc())?;
        let keys = shapes.iter().flat_map(|&sizes| of_calls(sizes, gpu));
        let new = keys.map(|key| (target.clone(), key));
        programs.extend(new.filter(|program| seen.insert(program.clone())));
    }
    Ok(programs)
}

/// Compiles programs in several threads, which take the next one by turns.
fn compile(
    jit: &Jit,
    programs: &[(Target, Key)],
    jobs: usize,
    done: &(dyn Fn(&Warmed) + Sync),
) -> Result<Vec<Warmed>> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<Result<Warmed>>>> = Mutex::new(vec![None; programs.len()]);
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some((target, key)) = programs.get(at) else {
                return;
            };
            let warmed = one(jit, target, *key);
            match &warmed {
                Ok(warmed) => done(warmed),
                // What is not begun is left.
                Err(_) => next.store(programs.len(), Ordering::Relaxed),
            }
            results.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(warmed);
        }
    };
    thread::scope(|scope| {
        for _ in 1..jobs.clamp(1, programs.len().max(1)) {
            scope.spawn(work);
        }
        work();
    });
    let results = results.into_inner();
    let results = results.unwrap_or_else(PoisonError::into_inner);
    results.into_iter().flatten().collect()
}

fn one(jit: &Jit, target: &Target, key: Key) -> Result<Warmed> {
    let start = Instant::now();
    let cached = jit.keep(target, key)?;
    Ok(Warmed {
        program: key.program().name,
        architecture: target.architecture.clone(),
        constants: key.constants(),
        cached,
        took: start.elapsed(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cuda::jit::{nvrtc, test_folder::TestFolder};

    fn config() -> WarmupConfig {
        WarmupConfig {
            hidden: vec![2048],
            experts: 16,
            top_k: vec![4],
            ranks: vec![2],
            dtypes: vec![DType::Bf16],
            architectures: vec![ComputeCapability { major: 9, minor: 0 }],
            ..WarmupConfig::default()
        }
    }

    /// Settings with this compiler and cache folder.
    fn settings(nvrtc: &str, folder: &str) -> Settings {
        Settings::from_lookup(|name| match name {
            "DEEP_EP_NVRTC" => Some(nvrtc.into()),
            "DEEP_EP_CACHE_DIR" => Some(folder.into()),
            _ => None,
        })
        .unwrap()
    }

    #[test]
    fn a_second_warmup_finds_everything() {
        let Some(nvrtc) = nvrtc() else { return };
        let folder = TestFolder::new("warmup");
        let settings = settings(nvrtc.file.to_str().unwrap(), folder.to_str().unwrap());
        let told = Mutex::new(Vec::new());
        let run = |config: &WarmupConfig| {
            told.lock().unwrap().clear();
            warmup(&settings, config, &|warmed| {
                told.lock().unwrap().push(warmed.clone());
            })
            .unwrap()
        };
        let first = run(&config());
        assert!(first.iter().all(|warmed| !warmed.cached), "{first:?}");
        assert_eq!(told.lock().unwrap().len(), first.len());
        let second = run(&config());
        assert!(second.iter().all(|warmed| warmed.cached), "{second:?}");
        assert_eq!(told.lock().unwrap().len(), first.len());
        let names = |all: &[Warmed]| -> Vec<_> {
            let name = |warmed: &Warmed| (warmed.program, warmed.constants.clone());
            all.iter().map(name).collect()
        };
        assert_eq!(names(&first), names(&second));
        // A folder that is not one is an error, not silence.
        let settings = self::settings(nvrtc.file.to_str().unwrap(), "/proc/self/nowhere");
        let one = WarmupConfig {
            jobs: 1,
            ..config()
        };
        let error = warmup(&settings, &one, &|_| ()).unwrap_err().to_string();
        assert!(error.contains("DEEP_EP_CACHE_DIR"), "{error}");
    }

    #[test]
    fn shapes_that_no_call_has_are_named() {
        type Change = fn(&mut WarmupConfig);
        let settings = settings("/nowhere/libnvrtc.so", "/nowhere");
        let bad: [(&str, Change); 9] = [
            ("hidden", |c| c.hidden = vec![2048, 0]),
            ("hidden", |c| c.hidden = vec![2052]),
            ("hidden", |c| {
                c.hidden = vec![2056];
                c.dtypes = vec![DType::F8E4M3];
            }),
            ("hidden", |c| c.hidden = vec![]),
            ("top_k", |c| c.top_k = vec![65]),
            ("ranks", |c| c.ranks = vec![65]),
            ("experts", |c| c.ranks = vec![3]),
            ("dtypes", |c| c.dtypes = vec![DType::F16]),
            ("architectures", |c| c.architectures = vec![]),
        ];
        for (name, change) in bad {
            let mut config = config();
            change(&mut config);
            match warmup(&settings, &config, &|_| ()) {
                Err(Error::InvalidArgument(reject)) => assert_eq!(reject.argument, name),
                other => panic!("{name}: {other:?}"),
            }
        }
        let error = warmup(&settings, &config(), &|_| ())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("compiling kernels is not supported"),
            "{error}"
        );
    }
}
