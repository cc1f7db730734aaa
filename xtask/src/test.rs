//! `cargo xtask test`.

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{
    c,
    command::{cargo, read, root, shown, succeed},
    kernels, python,
};

/// Memory that the large case takes, with room for what else runs.
const LARGE_CASE_KIB: u64 = 14 << 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Leave the large case out even if there is memory for it
    #[arg(long)]
    skip_large: bool,
    #[command(flatten)]
    python: python::TestArgs,
}

/// Runs every step, the first that fails ends it.
pub(crate) fn run(args: &Args) -> Result<()> {
    install_components()?;
    let mut steps = Steps::default();
    steps.run("format", cargo(["fmt", "--all", "--check"]))?;
    steps.run(
        "clippy",
        cargo("clippy --workspace --all-targets --locked -- -D warnings".split(' ')),
    )?;
    let mut doc = cargo("doc --workspace --no-deps --document-private-items --locked".split(' '));
    doc.env("RUSTDOCFLAGS", "-D warnings");
    steps.run("documentation", doc)?;
    steps.run("tests", cargo(["test", "--workspace", "--locked"]))?;
    if c::is_possible() {
        steps.run("C", c::command()?)?;
    } else {
        println!("--- C left out: it needs gcc, g++, make and pkg-config");
    }
    steps.run("kernels", kernels::tests()?)?;
    for (name, command) in python::tests(&args.python)? {
        steps.run(name, command)?;
    }
    for example in examples()? {
        let run = ["run", "--locked", "-p", "deep-ep", "--example", &example];
        steps.run(&format!("example {example}"), cargo(run))?;
    }
    let available = available_kib()?;
    if args.skip_large {
        println!("--- large case left out, as asked");
    } else if available < LARGE_CASE_KIB {
        println!(
            "--- large case left out: it needs {} GiB, {} are available",
            LARGE_CASE_KIB >> 20,
            available >> 20
        );
    } else {
        let large = "test --release --locked -p deep-ep --test conformance -- --ignored";
        steps.run("large case", cargo(large.split(' ')))?;
    }
    steps.summary();
    Ok(())
}

/// The steps that are done, with their times.
#[derive(Default)]
pub(crate) struct Steps(Vec<(String, Duration)>);

impl Steps {
    pub(crate) fn run(&mut self, name: &str, mut command: Command) -> Result<()> {
        println!("--- {name}: {}", shown(&command));
        let start = Instant::now();
        succeed(&mut command).with_context(|| format!("step {name}"))?;
        let took = start.elapsed();
        println!("--- {name}: done in {:.1} s", took.as_secs_f64());
        self.0.push((name.to_owned(), took));
        Ok(())
    }

    pub(crate) fn summary(&self) {
        println!();
        for (name, took) in &self.0 {
            println!("{:>8.1} s  {name}", took.as_secs_f64());
        }
        let total: Duration = self.0.iter().map(|(_, took)| *took).sum();
        println!(
            "{:>8.1} s  all {} steps passed",
            total.as_secs_f64(),
            self.0.len()
        );
    }
}

/// Adds rustfmt and clippy to the toolchain where it lacks them.
fn install_components() -> Result<()> {
    for (subcommand, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        let mut probe = cargo([subcommand, "--version"]);
        probe.stdout(Stdio::null()).stderr(Stdio::null());
        if probe.status().is_ok_and(|status| status.success()) {
            continue;
        }
        let mut add = Command::new("rustup");
        add.args(["component", "add", component])
            .current_dir(root());
        if succeed(&mut add).is_err() {
            bail!("cargo {subcommand} is missing and rustup did not add it: install {component}");
        }
    }
    Ok(())
}

/// The library's examples, in the order of their numbers.
fn examples() -> Result<Vec<String>> {
    let metadata = read(&mut cargo(
        "metadata --no-deps --format-version 1 --locked".split(' '),
    ))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let targets = packages
        .filter(|package| package["name"] == "deep-ep")
        .flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let mut names: Vec<_> = targets
        .filter(|target| target["kind"][0] == "example")
        .filter_map(|target| target["name"].as_str().map(str::to_owned))
        .collect();
    names.sort();
    Ok(names)
}

fn available_kib() -> Result<u64> {
    let info = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|line| line.trim().split(' ').next()?.parse().ok())
        .context("/proc/meminfo has no MemAvailable")
}
