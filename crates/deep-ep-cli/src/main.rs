//! The `deep-ep` command: moves rows between ranks and says how fast and whether rightly.
//!
//! Exit status: 0 if everything was done and agrees with the reference, 1 if not, 2 if what was
//! asked for makes no sense.

#![forbid(unsafe_code)]

mod args;
mod batch;
mod bench;
mod doctor;
mod expert;
mod fp8;
mod input;
mod job;
mod launch;
mod limit;
mod options;
mod output;
mod report;
mod run;
mod source;
mod table;
mod verify;
mod workload;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

/// Why the program ends without success.
enum Failure {
    /// What was asked for makes no sense.
    Usage(anyhow::Error),
    /// It could not be done, or the result is wrong.
    Job(anyhow::Error),
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Job(error)
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = log().and_then(|()| match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Bench(args) if args.limit => limit::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Rank => return_code(launch::serve()),
    });
    let (error, code) = match done {
        Ok(code) => return code,
        Err(Failure::Job(error)) => (error, 1),
        Err(Failure::Usage(error)) => (error, 2),
    };
    eprintln!("error: {}", explain(&error));
    ExitCode::from(code)
}

/// An error and its causes, each once: many a message ends with that of its cause.
fn explain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text += ": ";
            text += &cause;
        }
    }
    text
}

fn return_code(done: anyhow::Result<ExitCode>) -> Result<ExitCode, Failure> {
    done.map_err(Failure::Job)
}

/// Log lines as `DEEP_EP_LOG` says, on standard error.
fn log() -> Result<(), Failure> {
    let settings = deep_ep::Settings::from_env().map_err(|error| Failure::Usage(error.into()))?;
    let filter = tracing_subscriber::EnvFilter::try_new(&settings.log.value).map_err(|error| {
        Failure::Usage(anyhow::anyhow!(
            "DEEP_EP_LOG is {:?}, but {error}",
            settings.log.value
        ))
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    Ok(())
}
