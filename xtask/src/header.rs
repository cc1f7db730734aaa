//! `cargo xtask header`: the C header, from the sources of the C interface.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, ensure};

use crate::command::root;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Change nothing; fail if the header is not what the sources say
    #[arg(long)]
    check: bool,
}

fn folder() -> PathBuf {
    root().join("crates/deep-ep-capi")
}

fn path() -> PathBuf {
    folder().join("include/deep_ep.h")
}

/// Writes the header, or compares it.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.check {
        return check();
    }
    fs::write(path(), generate()?).with_context(|| format!("writing {}", path().display()))
}

/// Compares the header with what the sources say.
pub(crate) fn check() -> Result<()> {
    let path = path();
    let found = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    ensure!(
        found == generate()?,
        "{} is not what the sources say: run `cargo xtask header`",
        path.display()
    );
    Ok(())
}

fn generate() -> Result<String> {
    let config = folder().join("cbindgen.toml");
    let mut config = cbindgen::Config::from_file(&config)
        .map_err(|error| anyhow::anyhow!("{}: {error}", config.display()))?;
    // All packages of the workspace have one version.
    let version = env!("CARGO_PKG_VERSION").split('.');
    if let Some(text) = &mut config.after_includes {
        for (name, number) in ["@MAJOR@", "@MINOR@", "@PATCH@"].into_iter().zip(version) {
            *text = text.replace(name, number);
        }
    }
    let sources = folder().join("src");
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(sources.join("status.rs"))
        .with_src(sources.join("tensor.rs"))
        .with_src(sources.join("communicator.rs"))
        .with_src(sources.join("buffer.rs"))
        .with_src(sources.join("layout.rs"))
        .with_src(sources.join("handle.rs"))
        .with_src(sources.join("loan.rs"))
        .with_src(sources.join("pending.rs"))
        .with_src(sources.join("dispatch.rs"))
        .with_src(sources.join("combine.rs"))
        .with_src(sources.join("low_latency/dispatch.rs"))
        .with_src(sources.join("low_latency/combine.rs"))
        .with_src(sources.join("masks.rs"))
        .with_src(sources.join("default_buffer.rs"))
        .with_src(sources.join("all_to_all.rs"))
        .generate()
        .context("reading the sources of the C interface")?;
    let mut text = vec![];
    bindings.write(&mut text);
    Ok(short_comments(&String::from_utf8(text)?))
}

/// Comments of one line, which take three as they are written, on one.
fn short_comments(header: &str) -> String {
    let lines: Vec<&str> = header.lines().collect();
    let mut short = String::new();
    let mut at = 0;
    while at < lines.len() {
        let (open, text) = (lines[at], lines.get(at + 1).copied().unwrap_or(""));
        let closes = lines.get(at + 2).is_some_and(|line| line.trim() == "*/");
        let line = match (open.trim(), text.trim().strip_prefix("* ")) {
            ("/**", Some(text)) if closes => {
                at += 2;
                format!("{open} {text} */")
            }
            _ => open.to_owned(),
        };
        short += line.trim_end();
        short.push('\n');
        at += 1;
    }
    short
}
