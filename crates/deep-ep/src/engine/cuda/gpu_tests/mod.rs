//! What only the inside of this crate can show on real GPUs, with kernels of these tests' own: which SMs
//! calls use, what runs beside them, and that compute-sanitizer finds faults in kernels as ours are.
//! Without a GPU these tests say that they were left out.

mod hash;
mod overlap;
mod planted;
mod sms;

use std::{
    ffi::CStr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use super::{
    driver::{
        checked::Driver,
        context::Context,
        device::Device,
        module::{Function, Module},
        nvrtc::Program,
        stream::Stream,
    },
    gpu::{Gpu, GpuStream},
    jit::{Jit, Key, Target},
};
use crate::{
    bootstrap::Communicator,
    buffer::{Buffer, BufferConfig},
    settings::{EngineChoice, Settings},
};

/// A program of these tests. It may include the headers of the engine's kernels.
#[derive(Clone, Copy)]
struct Source {
    name: &'static str,
    text: &'static str,
    constants: &'static [(&'static str, u64)],
}

impl Source {
    /// Compiled for a target.
    fn image(self, jit: &Jit, target: &Target) -> Vec<u8> {
        let program = Program {
            name: self.name,
            source: self.text,
            ..Key::LowLatencyBarrier.program()
        };
        let mut options = vec![
            format!("--gpu-architecture={}", target.architecture),
            "--std=c++17".to_owned(),
        ];
        let constants = self.constants.iter();
        options.extend(constants.map(|(name, value)| format!("--define-macro={name}={value}")));
        let compiled = jit.nvrtc().compile(program, &options, target.image());
        compiled.unwrap().0
    }

    /// Loaded into a GPU. This waits for kernels that run there.
    fn load(self, context: &Arc<Context>) -> Arc<Module> {
        let jit = Jit::new(&Settings::from_env().unwrap(), context.device.driver).unwrap();
        let capability = context.device.compute_capability().unwrap();
        let target = Target::with(capability, jit.nvrtc()).unwrap();
        // SAFETY: NVRTC made the image.
        unsafe { Module::load(context, &self.image(&jit, &target)) }.unwrap()
    }
}

/// One rank of a test.
struct Rank {
    rank: usize,
    ranks: usize,
    communicator: Communicator,
    buffer: Buffer,
    context: Arc<Context>,
    gpu: Gpu,
    stream: GpuStream,
    module: Option<Arc<Module>>,
}

impl Rank {
    fn new(communicator: Communicator, device: Device, setup: &Setup) -> Self {
        let context = Context::new(device).unwrap();
        // Before anything runs that loading would wait for.
        let module = setup.source.map(|source| source.load(&context));
        let gpu = Gpu::new(device.ordinal).unwrap();
        let config = BufferConfig {
            engine: EngineChoice::Cuda,
            device: Some(device.ordinal),
            timeout: Duration::from_secs(10),
            ..setup.config.clone()
        };
        Self {
            rank: communicator.rank().0,
            ranks: communicator.size(),
            buffer: Buffer::new(&communicator, config).unwrap(),
            communicator,
            context,
            stream: gpu.stream().unwrap(),
            gpu,
            module,
        }
    }

    /// A kernel of the test's program.
    fn kernel(&self, name: &CStr, shared_bytes: u32) -> Function {
        let module = self.module.as_ref().expect("the test has a program");
        module.function(name, shared_bytes).unwrap()
    }

    /// The stream as the driver's functions take it.
    fn driver_stream(&self) -> Stream {
        // SAFETY: the stream is of this GPU and lives as long as the process.
        unsafe { Stream::borrowed(&self.context, self.stream.as_stream().as_raw()) }
    }

    /// Everything that was enqueued is done and went well, on all ranks.
    #[track_caller]
    fn settle(&self) {
        self.stream.synchronize().expect("no kernel failed");
        self.buffer.check().expect("every call went well");
        self.communicator.barrier().expect("all ranks");
    }
}

/// What the ranks of a test have.
struct Setup {
    ranks: usize,
    config: BufferConfig,
    source: Option<Source>,
}

/// All GPUs, for one test at a time. `None`, said aloud, if there are fewer than `least`.
fn gpus(least: usize) -> Option<(MutexGuard<'static, ()>, Vec<Device>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let found = Driver::get()
        .and_then(|_| Device::all())
        .unwrap_or_default();
    if found.len() < least {
        let needs = ["", "a GPU", "two GPUs"][least];
        eprintln!("left out: needs {needs}");
        return None;
    }
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Some((turn, found))
}

/// Runs `work` on ranks that are threads, dealt to the GPUs in turn, if there are at least so many.
fn run(least: usize, setup: &Setup, work: impl Fn(&Rank) + Sync) {
    let Some((_turn, gpus)) = gpus(least) else {
        return;
    };
    let group = Communicator::local(setup.ranks).unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = group
            .into_iter()
            .map(|communicator| {
                let device = gpus[communicator.rank().0 % gpus.len()];
                let work = &work;
                scope.spawn(move || work(&Rank::new(communicator, device, setup)))
            })
            .collect();
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}

/// These tests' own kernels are right for the oldest GPU, as far as a compiler sees it.
#[test]
fn programs_of_tests_compile() {
    let Some(nvrtc) = super::jit::nvrtc() else {
        return;
    };
    let oldest = crate::cuda::ComputeCapability { major: 9, minor: 0 };
    let target = Target::with(oldest, &nvrtc).unwrap();
    let jit = Jit::with(nvrtc, None);
    for source in [hash::SOURCE, overlap::SOURCE]
        .iter()
        .chain(&planted::SOURCES)
    {
        assert!(!source.image(&jit, &target).is_empty());
    }
}
