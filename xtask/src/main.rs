//! Tasks of this repository: `cargo xtask test`, `python`, `c`, `wheel`, `dist`, `header`, `kernels`,
//! `mutate`, `bench-cpu`.

#![forbid(unsafe_code)]

mod bench_cpu;
mod c;
mod command;
mod dist;
mod header;
mod kernels;
mod mutate;
mod mutations;
mod python;
mod test;

use std::process::ExitCode;

use clap::Parser;

/// Tasks of this repository
#[derive(Debug, Parser)]
enum Task {
    /// Test everything that can be tested on this machine
    Test(test::Args),
    /// Test the Python package
    Python(python::TestArgs),
    /// Test the C interface: header, installation, examples and programs as C and as C++
    C,
    /// Build the Python package's wheel
    Wheel(python::Args),
    /// Build a folder that tests and measures GPUs on a host without Rust
    Dist(dist::Args),
    /// Write the C header from the sources of the C interface
    Header(header::Args),
    /// Compile every GPU kernel for every architecture, without a GPU
    Kernels(kernels::Args),
    /// Break the code in known ways and see that the tests notice
    Mutate(mutate::Args),
    /// Compare the CPU engine with a baseline program that uses MPI, in one interleaved run
    BenchCpu(bench_cpu::Args),
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Test(args) => test::run(&args),
        Task::Python(args) => python::test(&args),
        Task::C => c::run(),
        Task::Wheel(args) => python::run(&args),
        Task::Dist(args) => dist::run(&args),
        Task::Header(args) => header::run(&args),
        Task::Kernels(args) => kernels::run(&args),
        Task::Mutate(args) => mutate::run(&args),
        Task::BenchCpu(args) => bench_cpu::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
