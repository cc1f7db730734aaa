//! Ranks as processes.
//!
//! ```text
//!  launcher                              rank process: deep-ep rank
//!     | -- environment: RANK, WORLD_SIZE, MASTER_PORT, DEEP_EP_SECRET ... --> |
//!     | -- stdin: Task (JSON), end of file ---------------------------------> |
//!     |                                            all ranks meet by TCP, work |
//!     | <-- stdout: Outcome (one line of JSON), then the combined rows ------ |
//! ```
//!
//! A rank process asks the kernel to be killed when the launcher dies, whatever kills it; the
//! launcher kills all when one fails. Memory between ranks has no name, so nothing is left behind.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, ChildStdin, ChildStdout, Command, ExitCode, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use deep_ep::Communicator;
use half::bf16;
use serde::{Deserialize, Serialize};

use super::{
    Cause, Failure, Failures,
    rendezvous::{Rendezvous, die_with},
};
use crate::{job, options::Options, report::RankReport, source::Source};

/// How long the other ranks may take to say what they saw after one has failed.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// What a rank process is told.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    launcher: i32,
    source: Source,
    options: Options,
}

/// What it answers. `combined` bytes follow the line.
#[derive(Debug, Serialize, Deserialize)]
enum Outcome {
    Done {
        report: Box<RankReport>,
        combined: Option<usize>,
    },
    Failed {
        peer: bool,
        message: String,
    },
}

/// The launcher's side.
pub(super) fn run(source: &Source, options: &Options) -> Result<Vec<RankReport>> {
    let task = serde_json::to_string(&Task {
        launcher: rustix::process::getpid().as_raw_pid(),
        source: source.clone(),
        options: options.clone(),
    })?;
    let mut ranks = Ranks::start(options.ranks, &task)?;
    let mut reports: Vec<Option<RankReport>> = (0..options.ranks).map(|_| None).collect();
    let mut failures = Vec::new();
    let mut deadline = None;
    for _ in 0..options.ranks {
        let Some((rank, outcome)) = ranks.next_outcome(deadline) else {
            break;
        };
        match ranks.judge(rank, outcome) {
            Ok(report) => reports[rank] = Some(report),
            Err(failure) => {
                failures.push(failure);
                deadline.get_or_insert_with(|| Instant::now() + LAST_WORDS);
            }
        }
    }
    ranks.end();
    if !failures.is_empty() {
        return Err(Failures::new(failures).into());
    }
    reports
        .into_iter()
        .collect::<Option<Vec<_>>>()
        .context("a rank ended without a report")
}

/// What came out of a rank process before it closed its output.
type Answer = Result<(Outcome, Option<Vec<bf16>>)>;

/// The running rank processes. Dropping it kills those that still run.
struct Ranks {
    children: Vec<Child>,
    answers: mpsc::Receiver<(usize, Answer)>,
    rendezvous: Rendezvous,
}

impl Ranks {
    fn start(count: usize, task: &str) -> Result<Self> {
        let rendezvous = Rendezvous::new(count)?;
        let (sender, answers) = mpsc::channel();
        let mut this = Self {
            children: Vec::with_capacity(count),
            answers,
            rendezvous,
        };
        for rank in 0..count {
            // The running program itself, even if its file was replaced meanwhile.
            let mut command = Command::new("/proc/self/exe");
            this.rendezvous.tell(&mut command, rank);
            let mut child = command
                .arg0("deep-ep")
                .arg("rank")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .with_context(|| format!("cannot start the process of rank {rank}"))?;
            let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
            this.children.push(child);
            let (stdin, stdout) = stdin.zip(stdout).context("a rank process has no pipes")?;
            let (task, sender) = (task.to_owned(), sender.clone());
            thread::spawn(move || {
                // The receiver is gone when the job has failed; then nobody wants to know.
                let _ = sender.send((rank, converse(stdin, stdout, &task)));
            });
        }
        Ok(this)
    }

    /// The next rank that closed its output, if one does before the deadline.
    fn next_outcome(&self, deadline: Option<Instant>) -> Option<(usize, Answer)> {
        match deadline {
            None => self.answers.recv().ok(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.answers.recv_timeout(left).ok()
            }
        }
    }

    /// Puts together what a rank said and how it ended.
    fn judge(&mut self, rank: usize, answer: Answer) -> Result<RankReport, Failure> {
        let fail = |cause, message| {
            Err(Failure {
                rank,
                cause,
                message,
            })
        };
        let status = self.children[rank].wait();
        match answer {
            Ok((Outcome::Done { mut report, .. }, combined)) => {
                report.combined = combined;
                Ok(*report)
            }
            Ok((
                Outcome::Failed {
                    peer: true,
                    message,
                },
                _,
            )) => fail(Cause::Peer, message),
            Ok((
                Outcome::Failed {
                    peer: false,
                    message,
                },
                _,
            )) => fail(Cause::Own, message),
            Err(error) => fail(
                Cause::Died,
                match status {
                    Ok(status) => {
                        format!(
                            "its process {} ({})",
                            ending(status),
                            crate::explain(&error)
                        )
                    }
                    Err(error) => format!("its process cannot be waited for: {error}"),
                },
            ),
        }
    }

    /// Kills what still runs, and waits until all are gone.
    fn end(&mut self) {
        for child in &mut self.children {
            // Fails for those that ended by themselves.
            let _ = child.kill();
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.end();
    }
}

pub(super) fn ending(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(code)) => format!("ended with exit status {code}"),
        (None, None) => "ended".into(),
    }
}

/// Hands a rank its task and reads what it answers.
fn converse(mut stdin: ChildStdin, stdout: ChildStdout, task: &str) -> Answer {
    // A rank that died at once cannot read it; how it ended says more than this error.
    let _ = stdin.write_all(task.as_bytes());
    drop(stdin);
    let mut stdout = BufReader::new(stdout);
    let mut line = Vec::new();
    stdout.read_until(b'\n', &mut line)?;
    ensure!(!line.is_empty(), "without a report");
    let outcome: Outcome =
        serde_json::from_slice(&line).context("with a report that cannot be read")?;
    let combined = match outcome {
        Outcome::Done {
            combined: Some(bytes),
            ..
        } => {
            let mut rows = Vec::new();
            stdout.take(bytes as u64).read_to_end(&mut rows)?;
            ensure!(rows.len() == bytes, "while it sent its combined rows");
            Some(
                rows.as_chunks::<2>()
                    .0
                    .iter()
                    .map(|b| bf16::from_le_bytes(*b))
                    .collect(),
            )
        }
        _ => None,
    };
    Ok((outcome, combined))
}

/// The side of a rank process: does the task that stdin holds and answers on stdout.
pub(crate) fn serve() -> Result<ExitCode> {
    let mut task = String::new();
    std::io::stdin().read_to_string(&mut task)?;
    let task: Task = serde_json::from_str(&task)
        .context("`deep-ep rank` is how `deep-ep run` starts its ranks; it has no other use")?;
    die_with(task.launcher)?;
    let (outcome, combined) = match work(&task) {
        Ok(mut report) => {
            let combined = report.combined.take();
            let bytes = combined.as_ref().map(|rows| rows.len() * 2);
            (
                Outcome::Done {
                    report: Box::new(report),
                    combined: bytes,
                },
                combined,
            )
        }
        Err(error) => {
            let peer = Cause::of(&error) == Cause::Peer;
            (
                Outcome::Failed {
                    peer,
                    message: crate::explain(&error),
                },
                None,
            )
        }
    };
    let mut stdout = std::io::stdout().lock();
    serde_json::to_writer(&mut stdout, &outcome)?;
    stdout.write_all(b"\n")?;
    for rows in combined.iter().flat_map(|rows| rows.chunks(1 << 16)) {
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        stdout.write_all(&bytes)?;
    }
    stdout.flush()?;
    // The launcher prints the reason of a failure.
    Ok(match outcome {
        Outcome::Done { .. } => ExitCode::SUCCESS,
        Outcome::Failed { .. } => ExitCode::FAILURE,
    })
}

fn work(task: &Task) -> Result<RankReport> {
    let input = task.source.open()?;
    let communicator = Communicator::from_env()?;
    job::run(communicator, &input, &task.options)
}
