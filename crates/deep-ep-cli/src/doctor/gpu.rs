//! The GPUs of this machine, their driver and compiler, and the kernels that are kept.

use std::{fs, path::Path};

use deep_ep::{Settings, cuda};
use serde::Serialize;

use super::{Advice, print::Facts};
use crate::table::bytes;

#[derive(Debug, Serialize)]
pub(super) struct Gpus {
    /// Device files of NVIDIA GPUs.
    device_files: Vec<String>,
    /// Version of the kernel's driver.
    kernel_driver: Option<String>,
    /// The driver's library and the newest CUDA that it supports.
    driver: Option<Library>,
    /// Why CUDA cannot be used.
    no_driver: Option<String>,
    devices: Vec<Device>,
    /// Every pair of different GPUs.
    peers: Vec<Peer>,
    /// The run-time compiler that is used.
    nvrtc: Option<Library>,
    /// Every compiler library that was tried.
    nvrtc_tried: Vec<Tried>,
    cache: Cache,
}

#[derive(Debug, Serialize)]
struct Library {
    version: String,
    file: String,
}

#[derive(Debug, Serialize)]
struct Device {
    name: String,
    pci_address: String,
    compute_capability: String,
    sms: u32,
    memory: u64,
    shared_memory: u32,
    virtual_memory: bool,
    file_handles: bool,
    fabric_handles: bool,
    gpudirect: bool,
}

#[derive(Debug, Serialize)]
struct Peer {
    from: usize,
    to: usize,
    access: bool,
    atomics: bool,
}

#[derive(Debug, Serialize)]
struct Tried {
    place: &'static str,
    library: String,
    /// Why it is not used; `None` if it is.
    refused: Option<String>,
}

#[derive(Debug, Serialize)]
struct Cache {
    folder: Option<String>,
    /// The environment variable that named it, or `default`.
    from: String,
    writable: bool,
    files: usize,
    bytes: u64,
}

impl Gpus {
    pub(super) fn look(settings: &Settings) -> Self {
        let cuda::Report {
            driver,
            gpus,
            peers,
            compiler,
            cache,
        } = cuda::Report::new(settings);
        let no_driver = driver.as_ref().err().map(ToString::to_string);
        Self {
            device_files: device_files(),
            kernel_driver: fs::read_to_string("/sys/module/nvidia/version")
                .ok()
                .map(|version| version.trim().to_owned()),
            driver: driver.ok().map(|driver| Library {
                version: driver.version.to_string(),
                file: driver.file.display().to_string(),
            }),
            no_driver,
            devices: gpus.into_iter().map(Device::from).collect(),
            peers: peers
                .into_iter()
                .map(|peer| Peer {
                    from: peer.from,
                    to: peer.to,
                    access: peer.access,
                    atomics: peer.atomics,
                })
                .collect(),
            nvrtc: compiler.used.ok().map(|(version, file)| Library {
                version: version.to_string(),
                file: file.display().to_string(),
            }),
            nvrtc_tried: compiler
                .tried
                .into_iter()
                .map(|tried| Tried {
                    place: tried.place,
                    library: tried.library.display().to_string(),
                    refused: tried.refused,
                })
                .collect(),
            cache: Cache {
                folder: cache.folder.map(|folder| folder.display().to_string()),
                from: cache.origin.to_string(),
                writable: cache.writable,
                files: cache.files,
                bytes: cache.bytes,
            },
        }
    }

    pub(super) fn facts(&self) -> Facts {
        let library = |library: &Library| format!("{} in {}", library.version, library.file);
        let mut facts = vec![
            (
                "kernel driver",
                self.kernel_driver.clone().unwrap_or("not found".into()),
            ),
            (
                "CUDA driver",
                match &self.driver {
                    Some(driver) => library(driver),
                    None => self.no_driver.clone().unwrap_or_default(),
                },
            ),
        ];
        for (number, device) in self.devices.iter().enumerate() {
            facts.push(("GPU", format!("{number}: {}", device.describe())));
            facts.push(("", device.abilities()));
        }
        facts.extend(self.matrix());
        match &self.nvrtc {
            Some(nvrtc) => facts.push(("NVRTC", library(nvrtc))),
            None => facts.push(("NVRTC", "none that can be used".into())),
        }
        for tried in &self.nvrtc_tried {
            if let Some(why) = &tried.refused {
                let line = format!("not {} ({}): {why}", tried.library, tried.place);
                facts.push(("", line));
            }
        }
        facts.push(("kernel cache", self.cache.describe()));
        facts
    }

    /// Which GPU can access which, a line per GPU.
    fn matrix(&self) -> Facts {
        let count = self.devices.len();
        if count < 2 {
            return Vec::new();
        }
        let cell = |from, to| {
            let peer = self.peers.iter().find(|p| (p.from, p.to) == (from, to));
            match peer {
                None => "-",
                Some(peer) if !peer.access => "no",
                Some(peer) if peer.atomics => "yes",
                Some(_) => "no atomics",
            }
        };
        let mut lines = vec![(
            "peer access",
            "a line for each GPU, a column for the memory of each".to_owned(),
        )];
        for from in 0..count {
            let cells: String = (0..count)
                .map(|to| format!("{:>12}", cell(from, to)))
                .collect();
            lines.push(("", format!("{from}:{cells}")));
        }
        lines
    }

    pub(super) fn advice(&self) -> Vec<Advice> {
        let mut advice = Vec::new();
        let mut add = |what: &str, todo: &str| {
            advice.push(Advice {
                what: what.into(),
                todo: todo.into(),
            })
        };
        match &self.no_driver {
            Some(_) if self.device_files.is_empty() => add(
                "no NVIDIA GPU is visible",
                "the cpu engine is used; in a container, pass the GPUs to it (docker run --gpus all)",
            ),
            Some(why) => add(
                &format!("a GPU is visible, but {why}"),
                "install or update the NVIDIA driver, or let the container runtime mount it",
            ),
            None if self.nvrtc.is_none() => add(
                "a GPU is visible, but NVRTC is not, which compiles kernels at first use",
                "install it (pip install nvidia-cuda-nvrtc, or the CUDA toolkit) or point DEEP_EP_NVRTC at libnvrtc.so",
            ),
            None => {}
        }
        if self.driver.is_some() && !self.cache.writable {
            add(
                "compiled kernels cannot be kept on disk",
                "every process compiles them again: set DEEP_EP_CACHE_DIR to a writable folder",
            );
        }
        for device in &self.devices {
            if !device.virtual_memory || !device.file_handles {
                add(
                    &format!(
                        "{} cannot share its memory by file descriptors",
                        device.name
                    ),
                    "ranks on it must be threads of one process",
                );
            }
        }
        for peer in self.peers.iter().filter(|peer| !peer.access) {
            add(
                &format!(
                    "GPU {} cannot access the memory of GPU {}",
                    peer.from, peer.to
                ),
                "ranks on such a pair cannot be of one group; see nvidia-smi topo -p2p r",
            );
        }
        advice
    }
}

impl From<cuda::GpuFacts> for Device {
    fn from(gpu: cuda::GpuFacts) -> Self {
        Self {
            name: gpu.name,
            pci_address: gpu.pci_address,
            compute_capability: gpu.compute_capability.to_string(),
            sms: gpu.sms,
            memory: gpu.memory,
            shared_memory: gpu.shared_memory,
            virtual_memory: gpu.virtual_memory,
            file_handles: gpu.file_handles,
            fabric_handles: gpu.fabric_handles,
            gpudirect: gpu.gpudirect,
        }
    }
}

impl Device {
    fn describe(&self) -> String {
        format!(
            "{}, {}, {} SMs, {} of memory, compute capability {}",
            self.name,
            self.pci_address,
            self.sms,
            bytes(self.memory),
            self.compute_capability
        )
    }

    fn abilities(&self) -> String {
        let yes_or_no = |able| if able { "yes" } else { "no" };
        format!(
            "mapped memory {}, file handles {}, fabric handles {}, GPUDirect {}",
            yes_or_no(self.virtual_memory),
            yes_or_no(self.file_handles),
            yes_or_no(self.fabric_handles),
            yes_or_no(self.gpudirect)
        )
    }
}

impl Cache {
    fn describe(&self) -> String {
        let Some(folder) = &self.folder else {
            return "none: set DEEP_EP_CACHE_DIR to keep kernels".into();
        };
        let state = if self.writable {
            ""
        } else {
            ", cannot be written"
        };
        format!(
            "{folder} (from {}): {} kernels, {}{state}",
            self.from,
            self.files,
            bytes(self.bytes)
        )
    }
}

fn device_files() -> Vec<String> {
    let entries = fs::read_dir(Path::new("/dev"));
    let mut files: Vec<String> = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().display().to_string())
        .filter(|path| {
            path.strip_prefix("/dev/nvidia")
                .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        })
        .collect();
    files.sort();
    files
}
