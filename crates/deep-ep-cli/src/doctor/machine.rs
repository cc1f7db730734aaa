//! Facts about the machine. Nothing is loaded or started to find them out.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use anyhow::Result;
use deep_ep::{codec::Simd, memory::system::MemoryFacts};
use serde::Serialize;

#[derive(Debug, Serialize)]
pub(super) struct Cpu {
    /// Its name, if the system tells.
    pub(super) model: Option<String>,
    /// Cores that are online.
    pub(super) online: usize,
    /// Cores that this process may use (affinity and control group).
    pub(super) usable: usize,
    /// Instruction sets for which there is code, or that matter to it.
    pub(super) simd: Vec<&'static str>,
    /// What the codec uses: `scalar`, `avx2` or `avx512`.
    pub(super) codec: &'static str,
}

impl Cpu {
    pub(super) fn look() -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| {
            line.strip_prefix("model name")?
                .split_once(':')
                .map(|(_, name)| name.trim().to_owned())
        });
        let usable = thread::available_parallelism().map_or(1, usize::from);
        let online = info
            .lines()
            .filter(|line| line.starts_with("processor"))
            .count();
        Self {
            model,
            online: online.max(usable),
            usable,
            simd: simd(),
            codec: match Simd::detect() {
                Simd::Scalar => "scalar",
                Simd::Avx2 => "avx2",
                Simd::Avx512 => "avx512",
            },
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn simd() -> Vec<&'static str> {
    macro_rules! present {
        ($($name:tt),*) => {
            [$(($name, is_x86_feature_detected!($name))),*]
        };
    }
    let all = present!(
        "sse4.2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512bf16"
    );
    all.into_iter()
        .filter(|(_, here)| *here)
        .map(|(name, _)| name)
        .collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn simd() -> Vec<&'static str> {
    Vec::new()
}

#[derive(Debug, Serialize)]
pub(super) struct Memory {
    /// Bytes of physical memory.
    pub(super) total: u64,
    /// Bytes that this process could use if nobody else used any.
    pub(super) limit: u64,
    /// Bytes that can be had now.
    pub(super) obtainable: u64,
    /// Control groups that limit this process.
    pub(super) cgroups: Vec<Cgroup>,
    /// Bytes of a page.
    pub(super) page: u64,
    /// Transparent huge pages of private memory: always, madvise, never.
    pub(super) huge_pages: Option<String>,
    /// The same of shared memory: always, within_size, advise, never, deny, force.
    pub(super) shared_huge_pages: Option<String>,
    /// Limit of the address space (`ulimit -v`), in bytes.
    pub(super) address_space: Option<u64>,
    /// Limit of locked memory (`ulimit -l`), in bytes.
    pub(super) locked: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Cgroup {
    pub(super) path: PathBuf,
    pub(super) limit: u64,
    pub(super) used: u64,
}

impl Memory {
    pub(super) fn look() -> Result<Self> {
        let facts = MemoryFacts::read()?;
        Ok(Self {
            total: facts.total,
            limit: facts.limit(),
            obtainable: facts.obtainable(),
            cgroups: facts
                .cgroups
                .iter()
                .map(|g| Cgroup {
                    path: g.path.clone(),
                    limit: g.limit,
                    used: g.used,
                })
                .collect(),
            page: facts.page_size,
            huge_pages: facts.huge_pages,
            shared_huge_pages: facts.shared_huge_pages,
            address_space: facts.address_space,
            locked: facts.locked_memory,
        })
    }
}

/// Looks for a shared library where the loader would, and where CUDA is usually installed.
pub(super) fn library(name: &str) -> Option<String> {
    let from_environment = std::env::var_os("LD_LIBRARY_PATH");
    let listed = from_environment.iter().flat_map(std::env::split_paths);
    let configured = loader_directories(Path::new("/etc/ld.so.conf"), 0);
    let usual = [
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib/aarch64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/lib64",
        "/usr/lib64",
        "/lib",
        "/usr/lib",
        "/usr/local/lib",
        "/usr/local/cuda/lib64",
        "/usr/local/nvidia/lib64",
        "/opt/amazon/efa/lib64",
        "/opt/amazon/efa/lib",
    ];
    listed
        .chain(configured)
        .chain(usual.into_iter().map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
        .map(|path| path.display().to_string())
}

/// The directories that `ld.so.conf` names, with the files that it includes.
fn loader_directories(conf: &Path, depth: usize) -> Vec<PathBuf> {
    let text = fs::read_to_string(conf).unwrap_or_default();
    let mut directories = Vec::new();
    for line in text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
    {
        match line.strip_prefix("include ") {
            // A pattern such as /etc/ld.so.conf.d/*.conf; nobody nests deeper.
            Some(pattern) if depth == 0 => {
                let pattern = Path::new(pattern.trim());
                let directory = pattern.parent().unwrap_or(Path::new("/etc/ld.so.conf.d"));
                let mut files: Vec<_> = entries(directory)
                    .filter(|path| path.extension().is_some_and(|e| e == "conf"))
                    .collect();
                files.sort();
                directories.extend(
                    files
                        .iter()
                        .flat_map(|file| loader_directories(file, depth + 1)),
                );
            }
            Some(_) => {}
            None if line.starts_with('/') => directories.push(PathBuf::from(line)),
            None => {}
        }
    }
    directories
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}
