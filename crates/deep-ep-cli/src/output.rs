//! Where results are printed.

use std::{
    fs::File,
    io::{self, Write},
    path::Path,
};

use anyhow::{Context, Result};
use serde::Serialize;

/// The target of `--json`: one object per line, each written as soon as it is known.
pub(crate) struct JsonLines {
    to: Option<Box<dyn Write>>,
    stdout: bool,
}

impl JsonLines {
    /// Nowhere, a file, or with `-` standard output.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self> {
        let stdout = path.is_some_and(|path| path == "-");
        let to: Option<Box<dyn Write>> = match path {
            None => None,
            Some(_) if stdout => Some(Box::new(io::stdout())),
            Some(path) => {
                Some(Box::new(File::create(path).with_context(|| {
                    format!("cannot write {}", path.display())
                })?))
            }
        };
        Ok(Self { to, stdout })
    }

    pub(crate) fn write(&mut self, object: &impl Serialize) -> Result<()> {
        let Some(to) = &mut self.to else {
            return Ok(());
        };
        let mut line = serde_json::to_string(object)?;
        line.push('\n');
        to.write_all(line.as_bytes())
            .and_then(|()| to.flush())
            .context("cannot write the JSON")
    }

    /// Whether standard output is for JSON alone.
    pub(crate) fn takes_stdout(&self) -> bool {
        self.stdout
    }
}

/// Prints for a person: to standard output, or to standard error where that is for JSON.
pub(crate) fn print(to_stderr: bool, text: &str) -> Result<()> {
    match to_stderr {
        true => writeln!(io::stderr(), "{text}"),
        false => writeln!(io::stdout(), "{text}"),
    }
    .context("cannot print the result")
}
