//! `deep-ep warmup`: compiles kernels into the cache folder before they are needed.

use std::{
    io::{self, Write},
    process::ExitCode,
    time::Instant,
};

use anyhow::Context;
use deep_ep::{
    DType, Error, Settings,
    cuda::{Warmed, WarmupConfig, architectures, warmup},
};

use crate::{Failure, args::WarmupArgs, options::RowType, output::print};

pub(crate) fn run(args: &WarmupArgs) -> Result<ExitCode, Failure> {
    // `main` has read the settings already, so that a bad one does not come this far.
    let settings = Settings::from_env().map_err(|error| Failure::Usage(error.into()))?;
    let start = Instant::now();
    let config = config(args)?;
    let warmed = warmup(&settings, &config, &|warmed| {
        // A reader that is gone does not make the kernels worse.
        let _ = writeln!(io::stdout(), "{}", line(warmed));
    })
    .map_err(failure)?;
    let cached = warmed.iter().filter(|warmed| warmed.cached).count();
    let folder = settings.cache_dir.value.unwrap_or_default();
    let text = format!(
        "{} programs in {:.1} s: {} compiled, {cached} cached before\n{}",
        warmed.len(),
        start.elapsed().as_secs_f64(),
        warmed.len() - cached,
        folder.display()
    );
    print(false, &text)?;
    Ok(ExitCode::SUCCESS)
}

fn config(args: &WarmupArgs) -> anyhow::Result<WarmupConfig> {
    let mut config = WarmupConfig::default();
    config.hidden.clone_from(&args.hidden);
    config.experts = args.experts;
    config.top_k.clone_from(&args.top_k);
    config.ranks.clone_from(&args.ranks);
    config.dtypes = args.dtype.iter().map(|&dtype| row(dtype)).collect();
    config.architectures = match args.arch.is_empty() {
        true => architectures()
            .context("--arch is not given, and there is no GPU here to compile for")?,
        false => args.arch.clone(),
    };
    config.jobs = args.jobs.unwrap_or(config.jobs);
    Ok(config)
}

fn row(dtype: RowType) -> DType {
    match dtype {
        RowType::Bf16 => DType::Bf16,
        RowType::Fp8 => DType::F8E4M3,
    }
}

/// What was asked for is an error of usage, by the name of its option.
fn failure(error: Error) -> Failure {
    match error {
        Error::InvalidArgument(mut reject) => {
            reject.argument = match &*reject.argument {
                "dtypes" => "dtype".into(),
                "architectures" => "arch".into(),
                name => name.replace('_', "-").into(),
            };
            Failure::Usage(anyhow::anyhow!("--{reject}"))
        }
        error => Failure::Job(error.into()),
    }
}

/// A program's line: what was done, its time, what it is for.
fn line(warmed: &Warmed) -> String {
    let done = if warmed.cached { "cached" } else { "compiled" };
    let constants = warmed.constants.iter();
    let shape: String = match constants.clone().all(|(_, value)| *value == 0) {
        true => " for every shape".into(),
        false => constants
            .map(|(name, value)| format!(" {name}={value}"))
            .collect(),
    };
    format!(
        "{done:8} {:6.2} s  {:8}  {}{shape}",
        warmed.took.as_secs_f64(),
        warmed.architecture,
        warmed.program
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_line_says_what_was_done_for_what() {
        let mut warmed = Warmed {
            program: "dispatch.cu",
            architecture: "sm_90a".into(),
            constants: vec![("RANKS", 8), ("TOP_K", 0)],
            cached: false,
            took: Duration::from_millis(1234),
        };
        assert_eq!(
            line(&warmed),
            "compiled   1.23 s  sm_90a    dispatch.cu RANKS=8 TOP_K=0"
        );
        warmed.cached = true;
        warmed.constants[0].1 = 0;
        assert_eq!(
            line(&warmed),
            "cached     1.23 s  sm_90a    dispatch.cu for every shape"
        );
        warmed.constants.clear();
        assert!(line(&warmed).ends_with("dispatch.cu for every shape"));
    }
}
