//! Every kernel compiled for every architecture, and the compiled ones cached. These need NVRTC but
//! no GPU; `cargo xtask kernels` brings it. Without it they say that they were left out, unless
//! `DEEP_EP_NVRTC` is set: then they fail.

use std::fs;

use super::{test_folder::TestFolder, *};
use crate::engine::cuda::{
    driver::{device::ComputeCapability, nvrtc::Image},
    limit,
};

/// A key of each kind with every combination of sizes that CI looks at, and the ones without
/// constants.
fn keys() -> Vec<Key> {
    let mut keys = vec![
        Key::Limit(limit::KEY),
        Key::Dispatch(DispatchKey::default()),
    ];
    keys.extend((0..3).map(|dtype| {
        Key::Combine(CombineKey {
            dtype,
            ..CombineKey::default()
        })
    }));
    for (hidden, ranks) in pairs([2048, 7168], [1, 2, 8]) {
        keys.push(Key::Combine(CombineKey {
            dtype: 0,
            ranks,
            row_bytes: 2 * hidden,
        }));
        // Rows of bf16, and of fp8 whatever their scales.
        for (top_k, bytes) in pairs([1, 8, 32], [2, 1]) {
            keys.push(Key::Dispatch(DispatchKey {
                ranks,
                top_k,
                row_bytes: bytes * hidden,
            }));
        }
        for (top_k, format) in pairs([1, 8, 32], [1, 2, 3, 4]) {
            let key = LowLatencyKey {
                ranks,
                top_k,
                hidden,
                format,
            };
            keys.push(Key::LowLatencyDispatch(key));
            // There is no fourth way of combining.
            if format < 4 {
                keys.push(Key::LowLatencyCombine(key));
            }
        }
    }
    keys.extend([
        Key::LowLatencyDispatch(LowLatencyKey::default()),
        Key::LowLatencyCombine(LowLatencyKey::default()),
        Key::LowLatencyBarrier,
    ]);
    keys
}

/// Whether rows travel in a form that is not looked at for the oldest GPUs.
fn is_quantised(key: Key) -> bool {
    match key {
        Key::LowLatencyDispatch(key) => key.format > 1,
        Key::LowLatencyCombine(key) => key.format == 2,
        _ => false,
    }
}

/// All pairs.
fn pairs<const N: usize, const M: usize>(a: [u32; N], b: [u32; M]) -> Vec<(u32, u32)> {
    a.into_iter()
        .flat_map(|a| b.into_iter().map(move |b| (a, b)))
        .collect()
}

/// NVRTC, unless it is not here and need not be.
pub(crate) fn nvrtc() -> Option<Nvrtc> {
    let setting = std::env::var_os("DEEP_EP_NVRTC").map(PathBuf::from);
    let required = setting.is_some();
    match Search::run(&Places::of_process(setting), None).found {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) if required => panic!("{error}"),
        Err(_) => {
            eprintln!("left out: NVRTC is not here (cargo xtask kernels brings it)");
            None
        }
    }
}

fn capability(major: u32, minor: u32) -> ComputeCapability {
    ComputeCapability { major, minor }
}

/// One kernel of the assembler's report (`ptxas -v`).
#[derive(Debug, PartialEq, Eq)]
struct Usage {
    kernel: String,
    registers: u32,
    stack: u32,
    spilled: u32,
}

fn usages(log: &str) -> Vec<Usage> {
    let number = |line: &str, behind: &str| -> u32 {
        let before = line.split(behind).next().unwrap_or_default();
        let word = before.split_whitespace().last().unwrap_or_default();
        word.parse()
            .unwrap_or_else(|_| panic!("no number before {behind:?} in {line:?}"))
    };
    let mut usages: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            usages.push(Usage {
                kernel: rest.split('\'').next().unwrap_or_default().to_owned(),
                registers: 0,
                stack: 0,
                spilled: 0,
            });
        } else if let Some(last) = usages.last_mut() {
            if line.contains("bytes stack frame") {
                last.stack = number(line, " bytes stack frame");
                last.spilled =
                    number(line, " bytes spill stores") + number(line, " bytes spill loads");
            } else if line.contains(" registers") {
                last.registers = number(line, " registers");
            }
        }
    }
    usages
}

/// The kernels of a program, in alphabetical order.
fn expected(key: Key, major: u32) -> &'static [&'static str] {
    match key {
        Key::Limit(_) if major < 9 => &["round_trip", "store_copy"],
        Key::Limit(_) => &["bulk_copy", "round_trip", "store_copy"],
        Key::Dispatch(_) => &["dispatch", "dispatch_layout"],
        Key::Combine(_) => &["combine"],
        Key::LowLatencyDispatch(_) => &["low_latency_dispatch"],
        Key::LowLatencyCombine(_) => &["low_latency_combine"],
        Key::LowLatencyBarrier => &["low_latency_barrier"],
    }
}

#[test]
fn kernels_compile_without_spills_for_every_architecture() {
    let Some(nvrtc) = nvrtc() else { return };
    println!("NVRTC {} in {}", nvrtc.version, nvrtc.file.display());
    for (major, minor) in [(8, 0), (9, 0), (10, 0)] {
        let target = Target::with(capability(major, minor), &nvrtc).unwrap();
        assert_eq!(target.image(), Image::Cubin);
        let keys: Vec<Key> = keys()
            .into_iter()
            .filter(|&key| major > 8 || !is_quantised(key))
            .collect();
        // The compiler may be used by several threads.
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for keys in keys.chunks(keys.len().div_ceil(threads)) {
                let (nvrtc, target) = (&nvrtc, &target);
                scope.spawn(move || {
                    keys.iter()
                        .for_each(|&key| check(nvrtc, target, key, major))
                });
            }
        });
    }
}

/// Compiles a program and looks at the assembler's report.
fn check(nvrtc: &Nvrtc, target: &Target, key: Key, major: u32) {
    let mut options = options(target, key);
    options.push("--ptxas-options=-v".to_owned());
    let (cubin, log) = nvrtc
        .compile(key.program(), &options, Image::Cubin)
        .unwrap();
    assert!(cubin.starts_with(b"\x7fELF"));
    assert!(!log.contains("warning"), "{log}");
    let mut usages = usages(&log);
    usages.sort_by(|a, b| a.kernel.cmp(&b.kernel));
    for usage in &usages {
        println!(
            "{:8} {:20} {:3} registers, {} bytes stack, {} bytes spilled, {key:?}",
            target.architecture, usage.kernel, usage.registers, usage.stack, usage.spilled
        );
        assert!(usage.registers > 0, "{log}");
        assert_eq!(
            (usage.stack, usage.spilled),
            (0, 0),
            "{usage:?} of {key:?} for {}",
            target.architecture
        );
    }
    let kernels: Vec<_> = usages.iter().map(|usage| &usage.kernel).collect();
    assert_eq!(kernels, expected(key, major), "{log}");
}

#[test]
fn kernels_compile_to_ptx_for_a_gpu_that_the_compiler_does_not_know() {
    let Some(nvrtc) = nvrtc() else { return };
    let target = Target::of(capability(99, 0), &[80, 90]).unwrap();
    // One of each program: what depends on constants is compiled above.
    let mut names = std::collections::HashSet::new();
    for key in keys() {
        if !names.insert(key.program().name) {
            continue;
        }
        let jit = nvrtc.compile(key.program(), &options(&target, key), target.image());
        let (ptx, _) = jit.unwrap();
        assert!(String::from_utf8_lossy(&ptx).contains(".target sm_90"));
    }
}

#[test]
fn parameters_are_laid_out_as_in_cuda() {
    let Some(nvrtc) = nvrtc() else { return };
    let target = Target::with(capability(9, 0), &nvrtc).unwrap();
    let key = Key::Limit(limit::KEY);
    let compile = |assertions: &str| {
        let source = format!(
            "#include \"limit_params.cuh\"\n#include \"combine_params.cuh\"\n#include \"low_latency_params.cuh\"\n{assertions}"
        );
        let program = Program {
            source: &source,
            ..key.program()
        };
        nvrtc.compile(program, &options(&target, key), Image::Cubin)
    };
    compile(&limit::params::assertions()).unwrap();
    compile(&crate::engine::cuda::engine::params::assertions()).unwrap();
    compile(&crate::engine::cuda::engine::low_latency::params::assertions()).unwrap();
    // The check itself: a wrong size is found.
    let error = compile("static_assert(sizeof(CopyParams) == 25);").unwrap_err();
    assert!(
        error.to_string().contains("NVRTC_ERROR_COMPILATION"),
        "{error}"
    );
}

#[test]
fn an_image_is_compiled_once_and_then_read() {
    let Some(nvrtc) = nvrtc() else { return };
    let folder = TestFolder::new("images");
    let target = Target::with(capability(9, 0), &nvrtc).unwrap();
    let key = Key::Limit(limit::KEY);
    let jit = Jit::with(nvrtc, Some(folder.to_path_buf()));
    let compiled = jit.image(&target, key).unwrap();
    let file = fs::read_dir(&*folder)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    // Memory first: the file is not needed.
    let kept = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    assert!(Arc::ptr_eq(&jit.image(&target, key).unwrap(), &compiled));
    // Then disk: what is there is taken, here with another image to tell it from a compiled one.
    let Jit { nvrtc, disk, .. } = jit;
    fs::write(&file, &kept).unwrap();
    let name = name(&nvrtc, key.program(), &options(&target, key));
    disk.store(&name, b"as good as compiled");
    let jit = Jit::with(nvrtc, Some(folder.to_path_buf()));
    assert_eq!(&*jit.image(&target, key).unwrap(), b"as good as compiled");
    // A damaged file is compiled again and replaced.
    let Jit { nvrtc, .. } = jit;
    fs::write(&file, &kept[..kept.len() / 2]).unwrap();
    let jit = Jit::with(nvrtc, Some(folder.to_path_buf()));
    assert_eq!(jit.image(&target, key).unwrap(), compiled);
    assert_eq!(fs::read(&file).unwrap(), kept);
    // Without a folder it is compiled, and kept in memory.
    let Jit { nvrtc, .. } = jit;
    let jit = Jit::with(nvrtc, None);
    assert_eq!(jit.image(&target, key).unwrap(), compiled);
}

#[test]
fn names_depend_on_everything() {
    let Some(nvrtc) = nvrtc() else { return };
    let base = limit::KEY;
    let other = LimitKey {
        unroll: base.unroll + 1,
        ..base
    };
    let target = Target::with(capability(9, 0), &nvrtc).unwrap();
    let ampere = Target::with(capability(8, 0), &nvrtc).unwrap();
    let of = |program, target, key| name(&nvrtc, program, &options(target, Key::Limit(key)));
    let program = Key::Limit(base).program();
    let changed = Program {
        source: "// other",
        ..program
    };
    let included = Program {
        headers: &[],
        ..program
    };
    let names = [
        of(program, &target, base),
        of(program, &target, other),
        of(program, &ampere, base),
        of(changed, &target, base),
        of(included, &target, base),
    ];
    for (i, name) in names.iter().enumerate() {
        assert!(!names[..i].contains(name), "{i}");
    }
}

#[test]
fn a_compiler_newer_than_the_driver_is_refused_by_name() {
    let Some(nvrtc) = nvrtc() else { return };
    let places = Places {
        setting: Some(nvrtc.file.clone()),
        ..Places::default()
    };
    let old = crate::cuda::Version {
        major: 11,
        minor: 0,
    };
    let search = Search::run(&places, Some(old));
    let error = search.found.unwrap_err().to_string();
    assert!(
        error.contains("newer than the driver, which supports CUDA 11.0"),
        "{error}"
    );
    assert!(error.contains(&nvrtc.file.display().to_string()), "{error}");
    assert_eq!(search.attempts.len(), 1);
}

#[test]
fn a_program_that_does_not_compile_gives_the_compilers_log() {
    let Some(nvrtc) = nvrtc() else { return };
    let program = Program {
        name: "bad.cu",
        source: "__global__ void kernel() { nonsense; }",
        headers: &[],
    };
    let error = nvrtc
        .compile(program, &[], Image::Ptx)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("bad.cu(1)") && error.contains("nonsense"),
        "{error}"
    );
}
