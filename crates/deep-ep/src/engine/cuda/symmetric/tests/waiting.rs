//! A kernel that waits for an address and reads what is there.

use std::sync::Arc;

use bytemuck::NoUninit;

use crate::{
    engine::cuda::{
        driver::{
            checked::Driver,
            context::Context,
            memory::Pinned,
            module::{Function, Module, Shape},
            nvrtc::{Nvrtc, Places, Program, Search},
            stream::Stream,
        },
        jit::Target,
    },
    settings::Settings,
};

/// Waits until a word is an address, at most 20 seconds, and stores the byte that is there.
const WAITS: &str = r#"
struct Params { unsigned long long word, found; };
extern "C" __global__ void waits(const Params p) {
    volatile unsigned long long* word = reinterpret_cast<volatile unsigned long long*>(p.word);
    volatile unsigned long long* found = reinterpret_cast<volatile unsigned long long*>(p.found);
    unsigned long long begun, now, address;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    do {
        address = *word;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (address == 0 && now - begun < 20000000000ull);
    *found = address == 0 ? 0xdead : *reinterpret_cast<volatile unsigned char*>(address);
}
"#;

#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Params {
    word: u64,
    found: u64,
}

fn compiler() -> Option<Nvrtc> {
    let settings = Settings::from_env().unwrap();
    let places = Places::of_process(settings.nvrtc.value);
    let newest = Driver::get().unwrap().version;
    let found = Search::run(&places, Some(newest)).found;
    found.map_err(|error| println!("skipped: {error}")).ok()
}

/// The kernel of one rank, which waits.
pub(super) struct Waiting {
    stream: Stream,
    kernel: Function,
    word: Pinned<u64>,
    found: Pinned<u64>,
}

impl Waiting {
    /// Everything but the launch; `None` without a compiler.
    pub(super) fn new(context: &Arc<Context>) -> Option<Self> {
        let nvrtc = compiler()?;
        let target = Target::with(context.device.compute_capability().unwrap(), &nvrtc).unwrap();
        let program = Program {
            name: "waits.cu",
            source: WAITS,
            headers: &[],
        };
        let options = [format!("--gpu-architecture={}", target.architecture)];
        let (image, _) = nvrtc.compile(program, &options, target.image()).unwrap();
        // SAFETY: NVRTC made the image.
        let module = unsafe { Module::load(context, &image) }.unwrap();
        Some(Self {
            stream: Stream::new(context).unwrap(),
            kernel: module.function(c"waits", 0).unwrap(),
            word: Pinned::new(context, 0).unwrap(),
            found: Pinned::new(context, 0).unwrap(),
        })
    }

    pub(super) fn launch(&self) {
        let shape = Shape {
            blocks: 1,
            threads: 1,
            shared_bytes: 0,
            cooperative: false,
        };
        let params = Params {
            word: self.word.address(),
            found: self.found.address(),
        };
        // SAFETY: the parameter is laid out as the kernel's, and both words live until it ended:
        // they are given back by calls that wait for it.
        unsafe { self.kernel.launch(&self.stream, shape, &params) }.unwrap();
    }

    /// The byte at this address, which the kernel reads.
    pub(super) fn end(&self, address: u64) -> u64 {
        assert_eq!(
            self.found.load(),
            0,
            "the kernel ended before memory had grown"
        );
        self.word.store(address);
        self.stream.synchronize().unwrap();
        self.found.load()
    }
}
