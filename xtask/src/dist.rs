//! `cargo xtask dist`: a folder that tests and measures the CUDA engine on a host without Rust.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::command::{cargo, read, root, succeed};

/// The script that runs everything, and its name in the folder.
const SCRIPT: (&str, &str) = ("scripts/gpu-test.sh", "gpu-test");

/// Test programs: their targets, and the names that the script knows them by.
const TESTS: [(&str, &str); 4] = [
    ("conformance", "conformance"),
    ("cuda", "cuda"),
    ("failure", "failure"),
    // The library's own tests.
    ("deep_ep", "unit"),
];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder to make, or to bring up to date
    #[arg(long, default_value = "dist/gpu-test")]
    out: PathBuf,
}

/// Makes the folder.
pub(crate) fn run(args: &Args) -> Result<()> {
    let folder = root().join(&args.out);
    let program = build("build --release --locked -p deep-ep-cli", false)?;
    let tests = build(
        "test --no-run --locked -p deep-ep --lib --test conformance --test cuda --test failure",
        true,
    )?;
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    place(find(&program, "deep-ep")?, &folder.join("deep-ep"))?;
    for (target, name) in TESTS {
        place(find(&tests, target)?, &folder.join(name))?;
    }
    let (script, name) = SCRIPT;
    fs::copy(root().join(script), folder.join(name))
        .with_context(|| format!("copying {script}"))?;
    println!("{}", folder.display());
    Ok(())
}

/// A program that cargo has made.
struct Program {
    target: String,
    file: PathBuf,
}

/// The programs that a cargo command makes, tests or others. What it says goes where ours goes.
fn build(command: &str, tests: bool) -> Result<Vec<Program>> {
    let mut command = cargo(command.split(' '));
    command
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit());
    programs(&read(&mut command)?, tests)
}

/// The programs among cargo's messages, one JSON object a line.
fn programs(messages: &str, tests: bool) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line).context("a message of cargo")?;
        let wanted =
            message["reason"] == "compiler-artifact" && message["profile"]["test"] == tests;
        let (target, file) = (&message["target"]["name"], &message["executable"]);
        if let (true, Some(target), Some(file)) = (wanted, target.as_str(), file.as_str()) {
            programs.push(Program {
                target: target.to_owned(),
                file: file.into(),
            });
        }
    }
    Ok(programs)
}

fn find<'a>(programs: &'a [Program], target: &str) -> Result<&'a Path> {
    let program = programs.iter().find(|program| program.target == target);
    program
        .map(|program| &*program.file)
        .with_context(|| format!("cargo made no program of the target {target}"))
}

/// Copies a program, without its symbols where `strip` is at hand.
fn place(from: &Path, to: &Path) -> Result<()> {
    let mut probe = Command::new("strip");
    probe.arg("--version").stdout(Stdio::null());
    if probe.status().is_ok_and(|status| status.success()) {
        return succeed(Command::new("strip").arg("-o").arg(to).arg(from));
    }
    fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_by_target() {
        let message = |reason: &str, test: bool, target: &str, file: Option<&str>| {
            serde_json::json!({
                "reason": reason,
                "profile": { "test": test },
                "target": { "name": target },
                "executable": file,
            })
            .to_string()
        };
        let messages = [
            message("compiler-artifact", false, "deep_ep", None),
            message("compiler-artifact", true, "deep_ep", Some("/a/unit")),
            message("compiler-artifact", true, "failure", Some("/a/failure")),
            message("build-finished", true, "other", Some("/a/other")),
            "not JSON".to_owned(),
        ]
        .join("\n");
        let found = programs(&messages, true).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(find(&found, "deep_ep").unwrap(), Path::new("/a/unit"));
        assert!(find(&found, "conformance").is_err());
        assert!(programs(&messages, false).unwrap().is_empty());
    }
}
