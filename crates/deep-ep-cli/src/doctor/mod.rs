//! `deep-ep doctor`: what this machine has, what would be used, and what to do about what is
//! missing.

mod gpu;
mod machine;
mod print;

use std::process::ExitCode;

use deep_ep::Settings;
use serde::Serialize;

use crate::{Failure, args::DoctorArgs, output};

/// Everything that is known.
#[derive(Debug, Serialize)]
struct Diagnosis {
    version: &'static str,
    cpu: machine::Cpu,
    memory: machine::Memory,
    gpu: gpu::Gpus,
    /// libfabric, the network library; `None` if it is not installed.
    libfabric: Option<String>,
    settings: Vec<Setting>,
    /// What a buffer with these settings would use, or why there would be none.
    engine: Engine,
    advice: Vec<Advice>,
}

#[derive(Debug, Serialize)]
struct Setting {
    name: &'static str,
    value: String,
    /// `default`, or the environment variable.
    from: String,
}

#[derive(Debug, Serialize)]
struct Engine {
    asked_for: String,
    /// `cpu` or `cuda`; `None` if what was asked for cannot be had.
    used: Option<&'static str>,
    why: String,
}

/// Something that is missing or could be better.
#[derive(Debug, Serialize)]
struct Advice {
    what: String,
    todo: String,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode, Failure> {
    // `main` has read the settings already, so that a bad one does not come this far.
    let settings = Settings::from_env().map_err(|error| Failure::Usage(error.into()))?;
    let diagnosis = Diagnosis::of(&settings)?;
    let text = match args.json {
        true => serde_json::to_string(&diagnosis).map_err(|error| Failure::Job(error.into()))?,
        false => print::text(&diagnosis),
    };
    output::print(false, &text)?;
    Ok(ExitCode::SUCCESS)
}

impl Diagnosis {
    fn of(settings: &Settings) -> anyhow::Result<Self> {
        let mut this = Self {
            version: env!("CARGO_PKG_VERSION"),
            cpu: machine::Cpu::look(),
            memory: machine::Memory::look()?,
            gpu: gpu::Gpus::look(settings),
            libfabric: machine::library("libfabric.so.1"),
            settings: settings
                .iter()
                .map(|s| Setting {
                    name: s.name,
                    value: s.value,
                    from: s.origin.to_string(),
                })
                .collect(),
            engine: engine(settings),
            advice: Vec::new(),
        };
        this.advice = advice(&this);
        Ok(this)
    }
}

/// Asks the library itself, with a buffer of one rank.
fn engine(settings: &Settings) -> Engine {
    let asked_for = settings.engine.value.to_string();
    let made = deep_ep::Communicator::local(1).and_then(|group| {
        let config = deep_ep::BufferConfig::from_env()?;
        deep_ep::Buffer::new(&group[0], config)
    });
    match made {
        Ok(buffer) => Engine {
            asked_for,
            used: Some(buffer.engine()),
            why: "a buffer of one rank was made with it".into(),
        },
        Err(error) => Engine {
            asked_for,
            used: None,
            why: error.to_string(),
        },
    }
}

fn advice(diagnosis: &Diagnosis) -> Vec<Advice> {
    let mut advice = Vec::new();
    let mut add = |what: &str, todo: &str| {
        advice.push(Advice {
            what: what.into(),
            todo: todo.into(),
        })
    };
    if diagnosis.engine.used.is_none() {
        add(
            "no engine can be used with these settings",
            "set DEEP_EP_ENGINE=cpu, or unset it",
        );
    }
    if diagnosis.cpu.codec == "scalar" {
        add(
            "the processor has no AVX2: sums and FP8 casts run in plain code",
            "results are the same; for speed use a processor with AVX2 or AVX-512",
        );
    }
    if diagnosis.cpu.usable < 2 {
        add(
            "this process may use one core only",
            "ranks take turns on it; allow more cores (taskset, cgroup) for speed",
        );
    }
    let memory = &diagnosis.memory;
    if memory.obtainable < 1 << 30 {
        add(
            "less than 1 GB of memory can be had",
            "symmetric memory grows with tokens x hidden x ranks: free memory or raise the control group's limit",
        );
    }
    if memory.address_space.is_some() {
        add(
            "the address space is limited (ulimit -v)",
            "a large range is reserved at construction, which costs no memory: ulimit -v unlimited",
        );
    }
    advice.extend(diagnosis.gpu.advice());
    let mut add = |what: &str, todo: &str| {
        advice.push(Advice {
            what: what.into(),
            todo: todo.into(),
        })
    };
    if diagnosis.libfabric.is_none() {
        add(
            "libfabric is not installed",
            "it is needed between hosts only: install it with the system's packages (libfabric1, libfabric)",
        );
    }
    advice
}
