//! What `deep-ep doctor` says about GPUs.

use std::path::PathBuf;

use super::{
    driver::{
        checked::{Driver, Version},
        device::{ComputeCapability, Device},
        nvrtc::{Places, Search},
    },
    jit::Disk,
};
use crate::{
    error::Result,
    settings::{Origin, Settings},
};

/// What this process can use of NVIDIA GPUs. Looking makes no context and takes no GPU memory.
#[derive(Debug, Clone)]
pub struct Report {
    /// The driver, or why there is none.
    pub driver: Result<DriverFacts>,
    /// The GPUs that this process sees, by their number.
    pub gpus: Vec<GpuFacts>,
    /// Every pair of different GPUs, by the numbers of the one that accesses and the one accessed.
    pub peers: Vec<Peer>,
    /// The run-time compiler.
    pub compiler: Compiler,
    /// Where compiled kernels are kept.
    pub cache: Cache,
}

/// The CUDA driver.
#[derive(Debug, Clone)]
pub struct DriverFacts {
    /// The newest CUDA that it supports.
    pub version: Version,
    /// The library's file.
    pub file: PathBuf,
}

/// What is known of a GPU.
#[derive(Debug, Clone)]
pub struct GpuFacts {
    /// As the driver calls it.
    pub name: String,
    /// Its address on the PCI bus, as `0000:1A:00.0`.
    pub pci_address: String,
    /// Its compute capability.
    pub compute_capability: ComputeCapability,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Bytes of its memory.
    pub memory: u64,
    /// Bytes of shared memory that one block may use.
    pub shared_memory: u32,
    /// Memory can be mapped page by page.
    pub virtual_memory: bool,
    /// Memory can be passed to another process as a file descriptor.
    pub file_handles: bool,
    /// Memory can be passed to another host of the same NVLink fabric.
    pub fabric_handles: bool,
    /// Network cards can read and write its memory.
    pub gpudirect: bool,
}

/// What one GPU can do with the memory of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The GPU whose kernels access.
    pub from: usize,
    /// The GPU whose memory it is.
    pub to: usize,
    /// Loads and stores are possible.
    pub access: bool,
    /// Atomic operations too, as over NVLink.
    pub atomics: bool,
}

/// The run-time compiler, NVRTC.
#[derive(Debug, Clone)]
pub struct Compiler {
    /// The version and file of the one that is used, or why none is.
    pub used: Result<(Version, PathBuf)>,
    /// Every library that was tried, in order.
    pub tried: Vec<Tried>,
}

/// A library that was tried.
#[derive(Debug, Clone)]
pub struct Tried {
    /// The kind of place: `DEEP_EP_NVRTC`, `already loaded`, `Python package`, `toolkit` or
    /// `loader path`.
    pub place: &'static str,
    /// The file, or the name that the loader was asked for.
    pub library: PathBuf,
    /// Why it is not used; `None` if it is.
    pub refused: Option<String>,
}

/// Where compiled kernels are kept.
#[derive(Debug, Clone)]
pub struct Cache {
    /// The folder; `None`: in memory only.
    pub folder: Option<PathBuf>,
    /// What named the folder.
    pub origin: Origin,
    /// Kernels can be added.
    pub writable: bool,
    /// Kernels in it.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Report {
    /// Looks at this machine.
    pub fn new(settings: &Settings) -> Self {
        let driver = Driver::get();
        let mut this = Self {
            driver: driver.clone().map(|driver| DriverFacts {
                version: driver.version,
                file: driver.file.clone(),
            }),
            gpus: Vec::new(),
            peers: Vec::new(),
            compiler: compiler(settings, driver.ok().map(|driver| driver.version)),
            cache: cache(settings),
        };
        if this.driver.is_ok() {
            match gpus() {
                Ok((gpus, peers)) => (this.gpus, this.peers) = (gpus, peers),
                // A driver that cannot describe its GPUs is of no use.
                Err(error) => this.driver = Err(error),
            }
        }
        this
    }
}

fn gpus() -> Result<(Vec<GpuFacts>, Vec<Peer>)> {
    let devices = Device::all()?;
    let gpus = devices.iter().map(gpu).collect::<Result<_>>()?;
    let mut peers = Vec::new();
    for from in &devices {
        for to in devices.iter().filter(|to| to.ordinal != from.ordinal) {
            peers.push(Peer {
                from: from.ordinal,
                to: to.ordinal,
                access: from.can_access(to)?,
                atomics: from.native_atomics(to)?,
            });
        }
    }
    Ok((gpus, peers))
}

fn gpu(device: &Device) -> Result<GpuFacts> {
    Ok(GpuFacts {
        name: device.name()?,
        pci_address: device.pci_address()?,
        compute_capability: device.compute_capability()?,
        sms: device.sms()?,
        memory: device.memory()?,
        shared_memory: device.shared_memory()?,
        virtual_memory: device.virtual_memory()?,
        file_handles: device.file_handles()?,
        fabric_handles: device.fabric_handles()?,
        gpudirect: device.gpudirect()?,
    })
}

fn compiler(settings: &Settings, newest: Option<Version>) -> Compiler {
    let places = Places::of_process(settings.nvrtc.value.clone());
    let search = Search::run(&places, newest);
    Compiler {
        used: search.found.map(|nvrtc| (nvrtc.version, nvrtc.file)),
        tried: search
            .attempts
            .into_iter()
            .map(|attempt| Tried {
                place: attempt.place,
                library: attempt.candidate,
                refused: attempt.refused,
            })
            .collect(),
    }
}

fn cache(settings: &Settings) -> Cache {
    let disk = Disk::new(settings.cache_dir.value.clone());
    let usage = disk.usage();
    Cache {
        folder: settings.cache_dir.value.clone(),
        origin: settings.cache_dir.origin,
        writable: disk.writable(),
        files: usage.files,
        bytes: usage.bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_described_with_and_without_gpus() {
        let settings = Settings::from_lookup(|_| None).unwrap();
        let report = Report::new(&settings);
        match &report.driver {
            Ok(_) => assert!(!report.gpus.is_empty()),
            Err(error) => {
                assert!(report.gpus.is_empty());
                assert!(error.to_string().starts_with("CUDA is not supported here"));
            }
        }
        let used = report.compiler.tried.iter().filter(|t| t.refused.is_none());
        assert_eq!(used.count(), usize::from(report.compiler.used.is_ok()));
        let pairs = report.gpus.len() * report.gpus.len().saturating_sub(1);
        assert_eq!(report.peers.len(), pairs);
        assert_eq!(report.cache.folder, None);
        assert!(!report.cache.writable);
    }
}
