//! The `deep-ep` command: moves rows between ranks and says how fast and whether rightly.
//!
//! Exit status: 0 if everything was done and agrees with the reference, 1 if not, 2 if what was
//! asked for makes no sense.

#![deny(unsafe_code)]

mod args;
mod batch;
mod bench;
mod bench_gpu;
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
mod warmup;
mod workload;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

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
    many_connections();
    let given = Cli::command().get_matches();
    let cli = match Cli::from_arg_matches(&given) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    let checked = match (&cli.command, given.subcommand()) {
        (Command::Bench(args), Some((_, given))) => args.check(given).map_err(Failure::Usage),
        _ => Ok(()),
    };
    let done = checked
        .and_then(|()| log())
        .and_then(|()| match cli.command {
            Command::Bench(args) if args.on_gpus() => bench_gpu::run(&args),
            Command::Run(args) => run::run(&args),
            Command::Bench(args) if args.limit => limit::run(&args),
            Command::Bench(args) => bench::run(&args),
            Command::Warmup(args) => warmup::run(&args),
            Command::Doctor(args) => doctor::run(&args),
            Command::Launch(args) => return_code(launch::program::run(&args)),
            Command::Become(args) => return_code(launch::program::become_it(&args)),
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

/// Lets every stream have a queue of its own on its GPU. When ranks share one, a kernel of one waits
/// for a kernel of another, which must not stand behind it in a queue.
#[expect(unsafe_code, reason = "CUDA reads this from the environment only")]
fn many_connections() {
    const NAME: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(NAME).is_none() {
        // SAFETY: no other thread has been started yet.
        unsafe { std::env::set_var(NAME, "32") };
    }
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
