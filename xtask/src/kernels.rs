//! `cargo xtask kernels`: compiles every GPU kernel for every architecture, without a GPU.
//!
//! The compiler NVRTC comes from PyPI into a folder below `target`; nothing is installed elsewhere.
//! The library's own tests do the rest: they find the compiler by `DEEP_EP_NVRTC`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::command::{cargo, root, succeed, target};

/// The compiler's package and version, and the folder of its libraries in `site-packages`.
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";
const LIBRARIES: &str = "nvidia/cu13/lib";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Runs the task on its own.
pub(crate) fn run(_: &Args) -> Result<()> {
    succeed(&mut tests()?)
}

/// The tests of kernels and their compiler, with NVRTC at hand; their report is printed.
pub(crate) fn tests() -> Result<Command> {
    let nvrtc = nvrtc()?;
    let mut command = cargo("test --locked -p deep-ep --lib cuda:: -- --nocapture".split(' '));
    command.env("DEEP_EP_NVRTC", nvrtc);
    Ok(command)
}

/// The folder of the compiler's libraries, which are fetched if they are not there yet.
fn nvrtc() -> Result<PathBuf> {
    let environment = target().join("cuda-venv");
    if let Some(found) = libraries(&environment) {
        return Ok(found);
    }
    println!("--- fetching {PACKAGE} into {}", environment.display());
    // A second one that fetches at the same time must not see half an environment.
    let own = target().join(format!("cuda-venv-{}", std::process::id()));
    let mut create = Command::new("python3");
    create.args(["-m", "venv"]).arg(&own).current_dir(root());
    succeed(&mut create).context("python3 with its venv module is needed to fetch NVRTC")?;
    let mut install = Command::new(own.join("bin/python"));
    install.args(["-m", "pip", "install", "--quiet", PACKAGE]);
    let installed = succeed(&mut install).and_then(|()| {
        if fs::rename(&own, &environment).is_err() {
            // Another one was faster, or an old one is broken.
            ensure!(
                libraries(&environment).is_some(),
                "{} has no {LIBRARIES}: remove it and try again",
                environment.display()
            );
        }
        Ok(())
    });
    if own.exists() {
        fs::remove_dir_all(&own).with_context(|| format!("removing {}", own.display()))?;
    }
    installed?;
    libraries(&environment).with_context(|| format!("{PACKAGE} has no {LIBRARIES}"))
}

fn libraries(environment: &Path) -> Option<PathBuf> {
    let pythons = fs::read_dir(environment.join("lib")).ok()?;
    pythons
        .flatten()
        .map(|python| python.path().join("site-packages").join(LIBRARIES))
        .find(|folder| folder.join("libnvrtc.so.13").is_file())
}
