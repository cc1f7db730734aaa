//! `deep-ep run`: the main job on a file.

use std::process::ExitCode;

use anyhow::{Context, Result};
use half::bf16;
use safetensors::{Dtype, tensor::TensorView};

use crate::{
    Failure,
    args::{RunArgs, check},
    launch,
    output::{JsonLines, print},
    report::{JobReport, RankReport},
    source::Source,
    table,
};

pub(crate) fn run(args: &RunArgs) -> Result<ExitCode, Failure> {
    let source = match args.input.clone() {
        Some(path) => Source::File {
            path,
            experts: args.experts,
        },
        None => Source::Trace {
            experts: args.experts,
        },
    };
    let options = args.options();
    let input = source.open().map_err(Failure::Usage)?;
    check(&input.sizes(), &options).map_err(Failure::Usage)?;
    let mut json = JsonLines::open(args.common.json.as_deref()).map_err(Failure::Usage)?;

    let mut ranks = launch::run(args.launch, &source, &input, &options)?;
    let report = JobReport::new(&ranks, input.sizes(), &options, args.launch, source.name());
    if let Some(path) = &args.output {
        write_combined(path, &mut ranks, input.sizes().hidden)?;
    }
    json.write(&report)?;
    print(json.takes_stdout(), &table::job(&report))?;
    Ok(if report.verified {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The combined rows of all ranks, in the order of the input.
fn write_combined(path: &std::path::Path, ranks: &mut [RankReport], hidden: usize) -> Result<()> {
    let rows: Vec<bf16> = ranks
        .iter_mut()
        .flat_map(|r| r.combined.take().unwrap_or_default())
        .collect();
    let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
    let tensor = TensorView::new(Dtype::BF16, vec![rows.len() / hidden, hidden], &bytes)?;
    safetensors::serialize_to_file([("combined", tensor)], None, path)
        .with_context(|| format!("cannot write {}", path.display()))
}
