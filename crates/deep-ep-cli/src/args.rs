//! The command line.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use anyhow::{Result, ensure};
use clap::{ArgMatches, Args, Parser, Subcommand, parser::ValueSource};
use deep_ep::{Settings, cuda::ComputeCapability, routing::MAX_TOP_K};

use crate::{
    batch::Sizes,
    options::{Counts, EngineChoice, ExpertWork, Launch, Mode, Options, Outputs, RowType},
};

/// Expert-parallel dispatch and combine for Mixture-of-Experts models
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Dispatch a file's tokens to their experts and combine the results, measured and verified
    Run(Box<RunArgs>),
    /// The same with generated tokens; lists of values make a sweep
    Bench(Box<BenchArgs>),
    /// Compile the GPU kernels for these shapes into the cache folder, so that no call waits for them
    Warmup(WarmupArgs),
    /// What this machine has, what would be used, and what to do about what is missing
    Doctor(DoctorArgs),
    /// Run a program as the ranks of a job on this host
    Launch(LaunchArgs),
    /// One rank of a job; started by `run` and `bench`
    #[command(hide = true)]
    Rank,
    /// Becomes a program that ends when the launcher does; started by `launch`
    #[command(hide = true)]
    Become(BecomeArgs),
}

/// Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
/// DEEP_EP_SECRET in its environment. Lines of output begin with the rank. SIGINT, SIGTERM and SIGHUP are
/// passed on. When a rank fails the others are ended; the exit status is that of the first failure.
#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// Ranks
    #[arg(short = 'n', long, value_name = "R", value_parser = positive)]
    pub(crate) ranks: usize,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    pub(crate) program: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct BecomeArgs {
    /// Process id of the launcher
    pub(crate) launcher: i32,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) program: Vec<OsString>,
}

/// What `run` and `bench` share.
#[derive(Debug, Args)]
pub(crate) struct CommonArgs {
    /// Engine that moves the rows [default: DEEP_EP_ENGINE, or auto]
    #[arg(long, value_enum)]
    pub(crate) engine: Option<EngineChoice>,
    /// Bound on the SMs, or on the cpu engine the worker threads, of each rank
    #[arg(long, alias = "threads", value_name = "N", value_parser = positive)]
    pub(crate) num_sms: Option<usize>,
    /// Deadline of every wait, in seconds [default: DEEP_EP_TIMEOUT_SECS, or 300]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) timeout: Option<Duration>,
    /// Iterations that are measured
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = positive)]
    pub(crate) iters: usize,
    /// Iterations before those
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub(crate) warmup: usize,
    /// Write the results as JSON, one object per line; with `-` to standard output, and the table
    /// to standard error
    #[arg(long, value_name = "FILE|-")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// A safetensors file with `x` [T, H] BF16, F32 or F16, `topk_idx` [T, K] I64 or I32 and
    /// `topk_weights` [T, K] F32 [default: a small trace that ships with the program]
    #[arg(long, value_name = "FILE")]
    pub(crate) input: Option<PathBuf>,
    /// Experts over all ranks [default: `num_experts` in the file's metadata]
    #[arg(long, value_name = "E", value_parser = positive)]
    pub(crate) experts: Option<usize>,
    /// Ranks; tokens are split over them in contiguous blocks
    #[arg(long, default_value_t = 4, value_name = "R", value_parser = positive)]
    pub(crate) ranks: usize,
    /// Family of calls
    #[arg(long, value_enum, default_value_t = Mode::HighThroughput)]
    pub(crate) mode: Mode,
    /// How dispatched rows travel
    #[arg(long, value_enum, default_value_t = RowType::Bf16)]
    pub(crate) dtype: RowType,
    /// What a rank is
    #[arg(long, value_enum, default_value_t = Launch::Processes)]
    pub(crate) launch: Launch,
    /// Where dispatched rows and combine's input are (low-latency: combine's input)
    #[arg(long, value_enum, default_value_t = Outputs::Loan)]
    pub(crate) outputs: Outputs,
    /// Write the combined rows to a safetensors file, as `combined` [T, H] BF16
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Tokens of each rank
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4096",
        value_name = "T,.."
    )]
    pub(crate) tokens: Vec<usize>,
    /// Hidden size
    #[arg(long, value_delimiter = ',', default_value = "7168", value_name = "H,..", value_parser = positive)]
    pub(crate) hidden: Vec<usize>,
    /// Experts that each token chooses
    #[arg(long, value_delimiter = ',', default_value = "8", value_name = "K,..", value_parser = positive)]
    pub(crate) top_k: Vec<usize>,
    /// Experts over all ranks
    #[arg(long, value_delimiter = ',', default_value = "256", value_name = "E,..", value_parser = positive)]
    pub(crate) experts: Vec<usize>,
    /// Ranks
    #[arg(long, value_delimiter = ',', default_value = "2", value_name = "R,..", value_parser = positive)]
    pub(crate) ranks: Vec<usize>,
    /// Families of calls
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "high-throughput"
    )]
    pub(crate) mode: Vec<Mode>,
    /// How dispatched rows travel
    #[arg(long, value_enum, value_delimiter = ',', default_value = "bf16")]
    pub(crate) dtype: Vec<RowType>,
    /// What a rank is; with --engine cuda a thread
    #[arg(long, value_enum, value_delimiter = ',', default_value = "processes")]
    pub(crate) launch: Vec<Launch>,
    /// Where dispatched rows and combine's input are (low-latency: combine's input)
    #[arg(
        long,
        visible_alias = "landing",
        value_enum,
        value_delimiter = ',',
        default_value = "loan"
    )]
    pub(crate) outputs: Vec<Outputs>,
    /// How dispatch learns how many rows come (high-throughput, --engine cuda)
    #[arg(long, value_enum, value_delimiter = ',', default_value = "worst")]
    pub(crate) counts: Vec<Counts>,
    /// Calls of a run, which is a graph where the host waits for nothing (--engine cuda)
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = positive)]
    pub(crate) calls: usize,
    /// What the experts do between dispatch and combine. What they touch leaves dispatch's rows, and
    /// the next input, colder in the caches
    #[arg(long, value_enum, default_value_t = ExpertWork::Scale)]
    pub(crate) expert_work: ExpertWork,
    /// Groups of neighbouring experts
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "G,..", value_parser = positive)]
    pub(crate) groups: Vec<usize>,
    /// Groups that a token may choose experts from: its best ones [default: all]
    #[arg(long, value_delimiter = ',', value_name = "G,..", value_parser = positive)]
    pub(crate) top_groups: Vec<usize>,
    /// How unevenly experts are chosen: 0 evenly, 1 in proportion to 1, 1/2, 1/3, ...
    #[arg(long, value_delimiter = ',', default_value = "0", value_name = "S,..")]
    pub(crate) skew: Vec<f64>,
    /// Seed of the generated tokens
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Compare nothing with the reference (by default the first and the last iteration are; with
    /// --engine cuda the same calls with host tensors, before they are measured)
    #[arg(long)]
    pub(crate) no_verify: bool,
    /// Measure what memory and links of this host's GPUs can do at most: with --engine cuda besides the
    /// rest, as its floor; else nothing else
    #[arg(long)]
    pub(crate) limit: bool,
    /// SM counts: for --limit alone [default: 4,8,16,24,32,64], or of high-throughput calls with
    /// --engine cuda [default: 8,16,24]
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N,..",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) sms: Vec<u32>,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct WarmupArgs {
    /// Hidden size
    #[arg(long, required = true, value_delimiter = ',', value_name = "H,..", value_parser = positive)]
    pub(crate) hidden: Vec<usize>,
    /// Experts over all ranks
    #[arg(long, value_name = "E", value_parser = positive)]
    pub(crate) experts: usize,
    /// Experts that each token chooses
    #[arg(long, required = true, value_delimiter = ',', value_name = "K,..", value_parser = positive)]
    pub(crate) top_k: Vec<usize>,
    /// Ranks
    #[arg(long, required = true, value_delimiter = ',', value_name = "R,..", value_parser = positive)]
    pub(crate) ranks: Vec<usize>,
    /// How dispatched rows travel
    #[arg(long, value_enum, value_delimiter = ',', default_value = "bf16,fp8")]
    pub(crate) dtype: Vec<RowType>,
    /// Architectures of the GPUs, as `90a` or `90` [default: those of the GPUs that are here]
    #[arg(long, value_delimiter = ',', value_name = "A,..", value_parser = architecture)]
    pub(crate) arch: Vec<ComputeCapability>,
    /// Threads that compile [default: as many as there are processors]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) jobs: Option<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl BenchArgs {
    /// Whether calls with device tensors are measured.
    pub(crate) fn on_gpus(&self) -> bool {
        match self.common.engine {
            Some(engine) => engine == EngineChoice::Cuda,
            // A variable does not make more of --limit than it asks for.
            None if self.limit => false,
            None => Settings::from_env()
                .is_ok_and(|settings| settings.engine.value == deep_ep::EngineChoice::Cuda),
        }
    }

    /// Whether what was given on the command line can be used together.
    pub(crate) fn check(&self, given: &ArgMatches) -> Result<()> {
        let is_given = |id: &str| given.value_source(id) == Some(ValueSource::CommandLine);
        if self.on_gpus() {
            return Ok(());
        }
        for id in ["counts", "calls"] {
            ensure!(!is_given(id), "--{id} needs --engine cuda");
        }
        if !self.limit {
            ensure!(!is_given("sms"), "--sms needs --limit or --engine cuda");
            return Ok(());
        }
        // Everything else says what calls to measure, and none are.
        for id in given.ids().map(|id| id.as_str()) {
            let fits = ["limit", "sms", "json"].contains(&id) || !is_given(id);
            // A group of arguments has the name of its struct.
            if !fits && !id.ends_with("Args") {
                let name = id.replace('_', "-");
                anyhow::bail!("--{name} cannot be used with --limit alone: add --engine cuda");
            }
        }
        Ok(())
    }
}

impl RunArgs {
    pub(crate) fn options(&self) -> Options {
        Options {
            verify: true,
            keep_combined: self.output.is_some(),
            ..self
                .common
                .options(self.ranks, self.mode, self.dtype, self.outputs)
        }
    }
}

impl CommonArgs {
    /// A job that is verified and keeps nothing.
    pub(crate) fn options(
        &self,
        ranks: usize,
        mode: Mode,
        dtype: RowType,
        outputs: Outputs,
    ) -> Options {
        Options {
            ranks,
            mode,
            dtype,
            outputs,
            expert_work: ExpertWork::Scale,
            engine: self.engine,
            num_sms: self.num_sms,
            timeout: self.timeout,
            warmup: self.warmup,
            iters: self.iters,
            verify: true,
            keep_combined: false,
        }
    }
}

/// Whether a job of these sizes can be done with these options, before ranks are started.
pub(crate) fn check(sizes: &Sizes, options: &Options) -> Result<()> {
    let Sizes {
        hidden,
        top_k,
        experts,
        tokens,
    } = *sizes;
    ensure!(
        options.expert_work == ExpertWork::Scale || options.mode == Mode::HighThroughput,
        "--expert-work none needs --mode high-throughput"
    );
    ensure!(
        experts % options.ranks == 0,
        "{experts} experts cannot be split evenly over {} ranks: --ranks must divide {experts}",
        options.ranks
    );
    ensure!(top_k > 0, "topk_idx has no choices: K must be at least 1");
    ensure!(
        top_k <= MAX_TOP_K,
        "there are {top_k} choices for a token, but K must be at most {MAX_TOP_K}"
    );
    ensure!(
        experts < 1 << 31,
        "there are {experts} experts, but they must be fewer than 2^31"
    );
    ensure!(
        fits_memory(&[tokens, hidden, 2]),
        "{tokens} tokens over all ranks x hidden size {hidden} do not fit this machine's memory"
    );
    ensure!(
        fits_memory(&[tokens, top_k, 8]) && fits_memory(&[experts, 16]),
        "{tokens} tokens over all ranks x top-{top_k} of {experts} experts do not fit this machine's \
         memory"
    );
    ensure!(
        hidden % 8 == 0,
        "the hidden size is {hidden}, but a row must be a multiple of 16 bytes: 8 bf16 elements"
    );
    ensure!(
        options.dtype == RowType::Bf16 || hidden % 128 == 0,
        "the hidden size is {hidden}, but --dtype fp8 has one scale per 128 channels: it must be a multiple of 128"
    );
    Ok(())
}

/// Whether the system would give that many bytes at all.
fn fits_memory(factors: &[usize]) -> bool {
    let bytes = factors
        .iter()
        .try_fold(1usize, |bytes, &n| bytes.checked_mul(n));
    bytes.is_some_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok())
}

fn positive(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|&n| n > 0)
        .ok_or_else(|| "it must be an integer of at least 1".into())
}

/// `90`, `90a`, `sm_90a`: a GPU of capability 9.0. What is compiled for it is the library's choice.
fn architecture(text: &str) -> Result<ComputeCapability, String> {
    let digits = text.strip_prefix("sm_").unwrap_or(text);
    let digits = digits.strip_suffix('a').unwrap_or(digits);
    let number = Some(digits)
        .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|digits| digits.parse::<u32>().ok())
        .filter(|number| (10..10_000).contains(number));
    let number =
        number.ok_or("it must be an architecture as CUDA names them: 80, 89, 90a, 100a")?;
    Ok(ComputeCapability {
        major: number / 10,
        minor: number % 10,
    })
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok();
    seconds
        .filter(|s| (0.001..=31_536_000.0).contains(s))
        .and_then(|s| Duration::try_from_secs_f64(s).ok())
        .ok_or_else(|| "it must be a number of seconds from 0.001 to 31536000".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn architectures_are_read_as_cuda_names_them() {
        let gpu = |major, minor| Ok(ComputeCapability { major, minor });
        assert_eq!(architecture("80"), gpu(8, 0));
        assert_eq!(architecture("90a"), gpu(9, 0));
        assert_eq!(architecture("sm_103a"), gpu(10, 3));
        for bad in ["", "a", "9", "9.0", "+90", "sm_", "90b", "99999999999"] {
            assert!(architecture(bad).is_err(), "{bad}");
        }
    }
}
