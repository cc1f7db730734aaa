//! `cargo xtask mutate`: each mutation is applied to a copy of the tree, and its tests must fail.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    command::{cargo, read, root, target, within},
    mutations::{Mutation, all},
};

/// Time for building a test.
const BUILD_LIMIT: Duration = Duration::from_secs(1200);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only mutations whose name contains this
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// List the mutations
    #[arg(long)]
    list: bool,
    /// Seconds that the tests of a mutation may take; a test that hangs has failed
    #[arg(long, default_value_t = 180, value_name = "SECONDS")]
    limit: u64,
}

/// What became of the tests.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Passed,
    /// With the names of those that failed.
    Failed(Vec<String>),
    Stopped,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let chosen: Vec<_> = all()
        .filter(|mutation| {
            args.only
                .as_ref()
                .is_none_or(|name| mutation.name.contains(name))
        })
        .collect();
    ensure!(!chosen.is_empty(), "no mutation has that name; see --list");
    if args.list {
        for Mutation {
            name, file, test, ..
        } in chosen
        {
            println!("{name:<44} {file}\n{:<44} cargo test {test}", "");
        }
        return Ok(());
    }
    let copy = Copy::new()?;
    let limit = Duration::from_secs(args.limit);
    for mutation in &chosen {
        copy.original(mutation)?;
    }
    let tests: BTreeSet<_> = chosen.iter().map(|mutation| mutation.test).collect();
    for test in tests {
        let outcome = copy.test(test, limit).context("without a mutation")?;
        ensure!(
            outcome == Outcome::Passed,
            "cargo test {test} does not pass without a mutation ({outcome:?})"
        );
        println!("passes without a mutation: cargo test {test}");
    }
    let mut survived = vec![];
    for mutation in &chosen {
        let start = Instant::now();
        let outcome = copy.mutated(mutation, limit).context(mutation.name)?;
        let (verdict, by) = match &outcome {
            Outcome::Passed => ("SURVIVED", String::new()),
            Outcome::Failed(tests) => ("caught", tests.join(", ")),
            Outcome::Stopped => ("caught", "a test that hangs".into()),
        };
        let took = start.elapsed().as_secs_f64();
        println!("{:<42} {verdict:<8} {took:>6.1} s  {by}", mutation.name);
        if outcome == Outcome::Passed {
            survived.push(mutation.name);
        }
    }
    println!(
        "{} of {} mutations caught",
        chosen.len() - survived.len(),
        chosen.len()
    );
    if !survived.is_empty() {
        bail!("not caught: {}", survived.join(", "));
    }
    Ok(())
}

/// A copy of the tracked files, in `target/mutants/tree`, built in `target/mutants/target`.
struct Copy {
    folder: PathBuf,
    /// Held for as long as the copy is used.
    _lock: File,
}

impl Copy {
    /// Makes it, or brings it up to date: files that are the same are left alone, so that they are
    /// not built again.
    fn new() -> Result<Self> {
        let folder = target().join("mutants");
        let tree = folder.join("tree");
        fs::create_dir_all(&tree)?;
        let lock = File::create(folder.join("lock"))?;
        ensure!(
            lock.try_lock().is_ok(),
            "another run uses {}",
            folder.display()
        );
        let list = read(
            Command::new("git")
                .args(["ls-files", "-z"])
                .current_dir(root()),
        )?;
        let files: BTreeSet<_> = list.split('\0').filter(|name| !name.is_empty()).collect();
        for file in &files {
            let from = root().join(file);
            if from.is_file() {
                let content = fs::read(&from).with_context(|| format!("reading {file}"))?;
                write_if_changed(&tree.join(file), &content)?;
            }
        }
        remove_others(&tree, &tree, &files)?;
        Ok(Self {
            folder,
            _lock: lock,
        })
    }

    fn cargo(&self, args: &str, more: &[&str]) -> Command {
        let mut command = cargo(args.split(' ').chain(more.iter().copied()));
        command
            .current_dir(self.folder.join("tree"))
            .env("CARGO_TARGET_DIR", self.folder.join("target"))
            // What takes time here is building.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("RUST_BACKTRACE", "0")
            // Ranks that would wait for ever end soon; tests that are about deadlines set their own.
            .env("DEEP_EP_TIMEOUT_SECS", "4");
        command
    }

    /// Builds the tests, which must succeed, then runs them.
    fn test(&self, test: &str, limit: Duration) -> Result<Outcome> {
        let args = format!("test {test}");
        let output = self.folder.join("output");
        let built = within(&mut self.cargo(&args, &["--no-run"]), BUILD_LIMIT, &output)?;
        ensure!(
            built.is_some_and(|status| status.success()),
            "cargo {args} --no-run fails; its output is in {}",
            output.display()
        );
        Ok(match within(&mut self.cargo(&args, &[]), limit, &output)? {
            Some(status) if status.success() => Outcome::Passed,
            Some(_) => {
                let output = fs::read(&output)?;
                let tests = failed_tests(&String::from_utf8_lossy(&output));
                ensure!(!tests.is_empty(), "cargo {args} failed, but no test of it");
                Outcome::Failed(tests)
            }
            None => Outcome::Stopped,
        })
    }

    fn path(&self, mutation: &Mutation) -> PathBuf {
        self.folder.join("tree").join(mutation.file)
    }

    /// The file that a mutation changes, which has the place to change once.
    fn original(&self, mutation: &Mutation) -> Result<String> {
        let Mutation {
            name, file, old, ..
        } = mutation;
        let original = fs::read_to_string(self.path(mutation))
            .with_context(|| format!("mutation {name}: reading {file}"))?;
        ensure!(
            original.matches(old).count() == 1,
            "mutation {name}: {file} must contain once:\n{old}"
        );
        Ok(original)
    }

    fn mutated(&self, mutation: &Mutation, limit: Duration) -> Result<Outcome> {
        let path = self.path(mutation);
        let original = self.original(mutation)?;
        fs::write(&path, original.replace(mutation.old, mutation.new))?;
        let outcome = self.test(mutation.test, limit);
        fs::write(&path, original)?;
        outcome
    }
}

/// Names of failed tests, without their modules. A test that takes its program down, as a deadlock
/// found by `loom` does, is not listed as failed: then it is the one that panicked.
fn failed_tests(output: &str) -> Vec<String> {
    let last = |test: &str| test.rsplit("::").next().unwrap_or(test).to_owned();
    let failed = output.lines().filter_map(|line| {
        let test = line.strip_prefix("test ")?;
        Some(last(test.strip_suffix("FAILED")?.split_once(" ...")?.0))
    });
    let failed: Vec<_> = failed.collect();
    if !failed.is_empty() || !output.contains("(signal: ") {
        return failed;
    }
    let panicked = output.lines().filter_map(|line| {
        let (test, rest) = line.strip_prefix("thread '")?.split_once("' ")?;
        rest.contains("panicked at").then(|| last(test))
    });
    panicked.collect::<BTreeSet<_>>().into_iter().collect()
}

fn write_if_changed(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, content).with_context(|| format!("writing {}", path.display()))
}

/// Removes files below `folder` that are not among `files`, which are named from `tree`.
fn remove_others(tree: &Path, folder: &Path, files: &BTreeSet<&str>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(tree, &path, files)?;
        } else {
            let name = path.strip_prefix(tree)?.to_string_lossy();
            if !files.contains(&*name) {
                fs::remove_file(&path)?;
            }
        }
    }
    Ok(())
}
