//! `cargo xtask bench-cpu`: the CPU engine against a baseline that uses MPI.
//!
//! Both run by turns, so that what else the machine does hits both; what counts is the median over
//! pairs of the ratio of their times. The baseline prints one line of JSON with `dispatch_ms`,
//! `combine_ms` and `mismatches`, and takes `--T`, `--H`, `--E`, `--K` and `--iters`.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::command::{cargo, read, succeed, target};

const EXPERTS: usize = 256;
const TOP_K: usize = 8;
const MODES: [&str; 2] = ["loan", "caller"];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The baseline program
    #[arg(long, value_name = "PATH")]
    baseline: PathBuf,
    /// Pairs of runs for each row
    #[arg(long, default_value_t = 5, value_name = "N")]
    pairs: usize,
    /// Only rows whose name, such as 4096x7168x2, contains this
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Print JSON, one object for each row and mode
    #[arg(long)]
    json: bool,
}

/// A shape, and the ratios to reach: for loans and for the caller's memory.
struct Row {
    tokens: usize,
    hidden: usize,
    ranks: usize,
    iters: usize,
    dispatch: [f64; 2],
    combine: [f64; 2],
    /// Only pairs count in which the baseline's dispatch took less, in milliseconds: above, its
    /// ranks were on cores far apart.
    baseline_below: Option<f64>,
}

const ROWS: [Row; 4] = [
    Row {
        tokens: 4096,
        hidden: 7168,
        ranks: 2,
        iters: 20,
        dispatch: [0.60, 0.85],
        combine: [0.60, 0.80],
        baseline_below: None,
    },
    Row {
        tokens: 4096,
        hidden: 7168,
        ranks: 8,
        iters: 8,
        dispatch: [0.60, 1.0],
        combine: [0.70, 1.0],
        baseline_below: None,
    },
    Row {
        tokens: 4096,
        hidden: 2048,
        ranks: 4,
        iters: 20,
        dispatch: [0.60, 0.90],
        combine: [0.65, 0.90],
        baseline_below: None,
    },
    Row {
        tokens: 128,
        hidden: 7168,
        ranks: 2,
        iters: 200,
        dispatch: [0.60, 0.85],
        combine: [0.70, 0.90],
        baseline_below: Some(0.3),
    },
];

/// Milliseconds.
#[derive(Debug, Clone, Copy)]
struct Times {
    dispatch: f64,
    combine: f64,
}

/// One run of the baseline and one of each mode.
struct Pair {
    baseline: Times,
    modes: [Times; 2],
}

pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.pairs > 0, "--pairs must be at least 1");
    let baseline = fs::canonicalize(&args.baseline)
        .with_context(|| format!("the baseline {}", args.baseline.display()))?;
    succeed(&mut cargo(
        "build --release --locked --quiet -p deep-ep-cli".split(' '),
    ))?;
    for row in &ROWS {
        let name = format!("{}x{}x{}", row.tokens, row.hidden, row.ranks);
        if args
            .only
            .as_ref()
            .is_some_and(|only| !name.contains(only.as_str()))
        {
            continue;
        }
        let mut counted = vec![];
        let mut apart = vec![];
        // A row that is to be quick only may need more runs until enough of them are.
        for _ in 0..if row.baseline_below.is_some() {
            4 * args.pairs
        } else {
            args.pairs
        } {
            let pair = run_pair(row, &baseline)?;
            let counts = row
                .baseline_below
                .is_none_or(|below| pair.baseline.dispatch < below);
            if counts { &mut counted } else { &mut apart }.push(pair);
            if counted.len() == args.pairs {
                break;
            }
        }
        report(row, &name, &counted, args.json);
        if !apart.is_empty() {
            report(row, &format!("{name}, far cores"), &apart, args.json);
        }
    }
    Ok(())
}

fn run_pair(row: &Row, baseline: &PathBuf) -> Result<Pair> {
    Ok(Pair {
        baseline: run_baseline(row, baseline)?,
        modes: [run_engine(row, MODES[0])?, run_engine(row, MODES[1])?],
    })
}

fn run_baseline(row: &Row, baseline: &PathBuf) -> Result<Times> {
    let mut command = Command::new("mpirun");
    command
        .args("--allow-run-as-root --oversubscribe --bind-to none --mca pml ob1".split(' '))
        .args(["--mca", "btl", "self,vader", "-np", &row.ranks.to_string()])
        .arg(baseline);
    let options = [
        ("--T", row.tokens),
        ("--H", row.hidden),
        ("--E", EXPERTS),
        ("--K", TOP_K),
        ("--iters", row.iters),
    ];
    for (option, value) in options {
        command.args([option, &value.to_string()]);
    }
    let result = last_json(&read(&mut command)?)?;
    ensure!(
        result["mismatches"] == 0,
        "the baseline's result is wrong: {result}"
    );
    Ok(Times {
        dispatch: number(&result["dispatch_ms"])?,
        combine: number(&result["combine_ms"])?,
    })
}

fn run_engine(row: &Row, outputs: &str) -> Result<Times> {
    let mut command = Command::new(target().join("release/deep-ep"));
    // As the baseline does, combine sends back the received rows.
    command.args("bench --launch processes --json - --no-verify --expert-work none".split(' '));
    let options = [
        ("--ranks", row.ranks),
        ("--tokens", row.tokens),
        ("--hidden", row.hidden),
        ("--experts", EXPERTS),
        ("--top-k", TOP_K),
        ("--iters", row.iters),
    ];
    for (option, value) in options {
        command.args([option, &value.to_string()]);
    }
    let result = last_json(&read(command.args(["--outputs", outputs]))?)?;
    Ok(Times {
        dispatch: number(&result["dispatch"]["median_us"])? / 1e3,
        combine: number(&result["combine"]["median_us"])? / 1e3,
    })
}

/// The last line that is a JSON object.
fn last_json(output: &str) -> Result<Value> {
    let line = output.lines().rev().find(|line| line.starts_with('{'));
    let line = line.with_context(|| format!("no JSON in {output:?}"))?;
    serde_json::from_str(line).with_context(|| format!("reading {line:?}"))
}

fn number(value: &Value) -> Result<f64> {
    value
        .as_f64()
        .with_context(|| format!("{value} is not a time"))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

fn report(row: &Row, name: &str, pairs: &[Pair], as_json: bool) {
    if !as_json {
        println!("{name}, {} pairs", pairs.len());
    }
    type Operation = (&'static str, fn(&Times) -> f64, [f64; 2]);
    let operations: [Operation; 2] = [
        ("dispatch", |times| times.dispatch, row.dispatch),
        ("combine", |times| times.combine, row.combine),
    ];
    for (operation, time, targets) in operations {
        let mpi = median(pairs.iter().map(|pair| time(&pair.baseline)));
        for (mode, (outputs, target)) in MODES.into_iter().zip(targets).enumerate() {
            let own = median(pairs.iter().map(|pair| time(&pair.modes[mode])));
            let ratio = median(
                pairs
                    .iter()
                    .map(|pair| time(&pair.modes[mode]) / time(&pair.baseline)),
            );
            if as_json {
                let line = json!({
                    "row": name, "operation": operation, "output": outputs,
                    "pairs": pairs.len(), "ratio": ratio, "target": target,
                    "median_ms": own, "baseline_median_ms": mpi,
                });
                println!("{line}");
            } else {
                let verdict = if ratio <= target { "reached" } else { "missed" };
                println!(
                    "  {operation:<8} {outputs:<6}  ratio {ratio:.2}  target {target:.2} {verdict:<7}  {own:.3} ms against {mpi:.3} ms"
                );
            }
        }
    }
}
