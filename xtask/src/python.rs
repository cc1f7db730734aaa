//! The Python package: `cargo xtask wheel`, `cargo xtask python`, and its part of `cargo xtask test`.
//!
//! Tools come from PyPI into an environment below `target`; nothing is installed elsewhere.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{
    command::{for_cargo, root, succeed, target},
    test::Steps,
};

/// What the environment holds.
const REQUIREMENTS: &str = "python/requirements-test.txt";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder for the wheel
    #[arg(long, default_value = "dist")]
    out: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TestArgs {
    /// Test with torch tensors, too; fetches torch unless python3 has it
    #[arg(long)]
    pub(crate) torch: bool,
}

/// Runs the package's part of the test alone.
pub(crate) fn test(args: &TestArgs) -> Result<()> {
    let mut steps = Steps::default();
    for (name, command) in tests(args)? {
        steps.run(name, command)?;
    }
    steps.summary();
    Ok(())
}

/// Builds the wheel.
pub(crate) fn run(args: &Args) -> Result<()> {
    let environment = environment(false)?;
    let out = root().join(&args.out);
    succeed(&mut environment.maturin("release", &out))?;
    println!("{}", newest_wheel(&out)?.display());
    Ok(())
}

/// A command of the tests, with its name. Each needs those before it.
pub(crate) type Step = (&'static str, Command);

/// The steps of the test; with `torch`, also on torch tensors, whose 3 GB are fetched the first
/// time. Without, torch is used if `python3` has it.
pub(crate) fn tests(args: &TestArgs) -> Result<Vec<Step>> {
    let environment = environment(args.torch)?;
    let wheels = target().join("python-wheels");
    // Only the new one may be there, whatever its name is.
    if wheels.exists() {
        fs::remove_dir_all(&wheels).with_context(|| format!("removing {}", wheels.display()))?;
    }
    let run = |module: &str, words: &str| {
        let mut command = environment.python();
        command.args(["-m", module]).args(words.split(' '));
        command
    };
    let mut install = run(
        "pip",
        "install --quiet --force-reinstall --no-deps --no-index",
    );
    install.arg("--find-links").arg(&wheels).arg("deep-ep-rs");
    Ok(vec![
        ("python lint", run("ruff", "check .")),
        ("python format", run("ruff", "format --check .")),
        ("python types", run("mypy", "--no-color-output")),
        // The profile of the Rust tests, which have compiled most of it.
        ("wheel", environment.maturin("dev", &wheels)),
        ("wheel installed", install),
        (
            "python stubs",
            run("mypy.stubtest", "--concise deep_ep._native"),
        ),
        ("python tests", run("pytest", "-q --durations=5")),
    ])
}

/// A folder with Python and the tools.
struct Environment(PathBuf);

impl Environment {
    fn python(&self) -> Command {
        let mut command = Command::new(self.0.join("bin/python"));
        command.current_dir(root());
        command
    }

    fn maturin(&self, profile: &str, out: &Path) -> Command {
        let mut command = Command::new(self.0.join("bin/maturin"));
        command.current_dir(root());
        command.args(["build", "--locked", "--profile", profile, "--out"]);
        command.arg(out);
        for_cargo(&mut command);
        command
    }
}

/// Whether `python` can import torch.
fn has_torch(mut python: Command) -> bool {
    python.args(["-c", "import torch"]).stderr(Stdio::null());
    python.status().is_ok_and(|status| status.success())
}

/// The environment, made anew when what it must hold has changed.
fn environment(torch: bool) -> Result<Environment> {
    let folder = target().join("python-venv");
    let environment = Environment(folder.clone());
    let stamp = folder.join("requirements");
    let wanted = fs::read_to_string(root().join(REQUIREMENTS)).context(REQUIREMENTS)?;
    if fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
        println!("--- making {} with {REQUIREMENTS}", folder.display());
        let mut create = Command::new("python3");
        create.args(["-m", "venv", "--clear"]).current_dir(root());
        if has_torch(Command::new("python3")) {
            create.arg("--system-site-packages");
        }
        create.arg(&folder);
        succeed(&mut create).context("python3 with its venv module is needed")?;
        let mut install = environment.python();
        install.args(["-m", "pip", "install", "--quiet", "-r", REQUIREMENTS]);
        succeed(&mut install)?;
        // Written last: half an environment is made again.
        fs::write(&stamp, &wanted).with_context(|| format!("writing {}", stamp.display()))?;
    }
    if torch && !has_torch(environment.python()) {
        println!("--- fetching torch");
        let mut install = environment.python();
        install.args(["-m", "pip", "install", "--quiet", "torch"]);
        succeed(&mut install)?;
    }
    Ok(environment)
}

fn newest_wheel(folder: &Path) -> Result<PathBuf> {
    let wheels = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let wheels = wheels.flatten().filter_map(|entry| {
        let path = entry.path();
        let made = entry.metadata().and_then(|data| data.modified()).ok()?;
        (path.extension()? == "whl").then_some((made, path))
    });
    match wheels.max() {
        Some((_, path)) => Ok(path),
        None => bail!("{} has no wheel", folder.display()),
    }
}
