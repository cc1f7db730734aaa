//! Faults that compute-sanitizer must find, in a kernel made of what ours are made of. Run by
//! `gpu-test --sanitize` under its tools: elsewhere a fault shows in nothing, or ends the process's
//! context. No test here fails by itself; the tool's report decides.

use bytemuck::NoUninit;

use super::{Source, gpus};
use crate::engine::cuda::driver::{
    context::Context, memory::DeviceMemory, module::Shape, stream::Stream,
};

const fn source(plant: &'static [(&'static str, u64)]) -> Source {
    Source {
        name: "planted.cu",
        text: include_str!("planted.cu"),
        constants: plant,
    }
}

/// The kernel without a fault, and with each.
pub(super) const SOURCES: [Source; 4] = [
    source(&[("PLANT", 0)]),
    source(&[("PLANT", 1)]),
    source(&[("PLANT", 2)]),
    source(&[("PLANT", 3)]),
];

/// `PlantedParams`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Params {
    to: u64,
    from: u64,
    rows: u32,
    row_bytes: u32,
}

/// Runs the kernel with a fault, or 0 for none.
fn plant(fault: usize) {
    const ROWS: u32 = 8;
    const ROW_BYTES: u32 = 1024;
    let Some((_turn, gpus)) = gpus(1) else { return };
    let context = Context::new(gpus[0]).unwrap();
    let stream = Stream::new(&context).unwrap();
    let kernel = SOURCES[fault]
        .load(&context)
        .function(c"planted", 0)
        .unwrap();
    let bytes = (ROWS * ROW_BYTES) as usize;
    let memory = |bytes| DeviceMemory::new(&context, bytes, "rows").unwrap();
    let from = memory(bytes + ROW_BYTES as usize);
    let to = memory(bytes);
    // Nobody's memory lies behind the rows.
    drop(memory(bytes));
    // All but the last row, which only a fault reads. A fault of another kind finds a whole one.
    let given = bytes + if fault == 1 { ROW_BYTES as usize } else { 0 };
    from.upload(&stream, &vec![7; given]).unwrap();
    let params = Params {
        to: to.address(),
        from: from.address(),
        rows: ROWS,
        row_bytes: ROW_BYTES,
    };
    let shape = Shape {
        blocks: 1,
        threads: 256,
        shared_bytes: 0,
        cooperative: false,
    };
    // SAFETY: the struct is the kernel's parameter, and the memory lives until the stream is done.
    // With a fault, the tool that is looking for it keeps the kernel from doing harm.
    let done =
        unsafe { kernel.launch(&stream, shape, &params) }.and_then(|()| stream.synchronize());
    println!("the kernel with fault {fault}: {done:?}");
}

#[test]
#[ignore = "for compute-sanitizer"]
fn nothing() {
    plant(0);
}

#[test]
#[ignore = "for compute-sanitizer: its memcheck must find it"]
fn out_of_bounds() {
    plant(1);
}

#[test]
#[ignore = "for compute-sanitizer: its racecheck must find it"]
fn race() {
    plant(2);
}

#[test]
#[ignore = "for compute-sanitizer: its initcheck must find it"]
fn uninitialised() {
    plant(3);
}
