//! `deep-ep launch`: someone else's program as the ranks of a job.
//!
//! ```text
//!  launcher                         for each rank: deep-ep become <launcher> PROGRAM ARGS
//!     | -- environment of the job ----------> | asks the kernel to be killed with the launcher,
//!     |                                       | becomes the program, in a process group of its own
//!     | <-- lines of output, to be prefixed - |
//!     | -- signals, to the group -----------> |
//! ```
//!
//! One thread for each output and each process, and one for signals, tell the main thread what happens; it
//! alone decides. It is also the thread that starts the processes, which the kernel kills when that
//! thread ends. A process group is killed when its first process has ended, so nothing that a rank has
//! started outlives it.

use std::{
    ffi::OsString,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::{Handle, Signals},
};

use super::rendezvous::{Rendezvous, die_with};
use crate::args::{BecomeArgs, LaunchArgs};

/// How long the other ranks may take to say what they saw after one has failed.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// How long ranks may take to end after they were asked to.
const GRACE: Duration = Duration::from_secs(5);

/// What happens to a job.
enum Event {
    /// The first process of a rank ended.
    Ended(usize, io::Result<ExitStatus>),
    /// The launcher got a signal.
    Signal(i32),
}

/// Runs the job to its end; nothing of it is left when this returns.
pub(crate) fn run(args: &LaunchArgs) -> Result<ExitCode> {
    let (sender, events) = channel();
    let signals = forward_signals(sender.clone())?;
    let job = Job::start(args, &sender);
    let status = job.and_then(|mut job| job.watch(&events));
    signals.close();
    Ok(ExitCode::from(status?))
}

/// Becomes the program, unless the launcher is gone.
pub(crate) fn become_it(args: &BecomeArgs) -> Result<ExitCode> {
    die_with(args.launcher)?;
    let (program, rest) = args.program.split_first().context("no program")?;
    let error = Command::new(program).args(rest).exec();
    eprintln!("deep-ep launch: cannot run {}: {error}", program.display());
    // As a shell says that there is no such program.
    Ok(ExitCode::from(127))
}

fn forward_signals(events: Sender<Event>) -> Result<Handle> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("handling signals")?;
    let handle = signals.handle();
    thread::spawn(move || {
        for signal in signals.forever() {
            // Nobody listens any more when the job is over.
            let _ = events.send(Event::Signal(signal));
        }
    });
    Ok(handle)
}

/// A rank that runs, or has ended.
struct Rank {
    group: Pid,
    runs: bool,
    threads: Vec<JoinHandle<()>>,
}

/// The ranks. Dropping it kills those that still run.
struct Job {
    ranks: Vec<Rank>,
    /// Exit status of the first failure.
    failed: Option<u8>,
    /// What is done next to ranks that still run, and when.
    next: Option<(Signal, Instant)>,
    rendezvous: Rendezvous,
}

impl Job {
    fn start(args: &LaunchArgs, events: &Sender<Event>) -> Result<Self> {
        let mut job = Self {
            ranks: vec![],
            failed: None,
            next: None,
            rendezvous: Rendezvous::new(args.ranks)?,
        };
        for rank in 0..args.ranks {
            let child = job.spawn(rank, &args.program);
            let child = child.with_context(|| format!("cannot start rank {rank}"))?;
            job.ranks.push(Rank::new(rank, child, events)?);
        }
        Ok(job)
    }

    fn spawn(&self, rank: usize, program: &[OsString]) -> io::Result<Child> {
        // The running program itself, even if its file was replaced meanwhile.
        let mut command = Command::new("/proc/self/exe");
        self.rendezvous.tell(&mut command, rank);
        command
            .arg0("deep-ep")
            .arg("become")
            .arg(std::process::id().to_string())
            .args(program)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    }

    /// Decides until all ranks have ended; the exit status.
    fn watch(&mut self, events: &Receiver<Event>) -> Result<u8> {
        while self.ranks.iter().any(|rank| rank.runs) {
            let event = match self.next {
                None => events.recv().map_err(RecvTimeoutError::from),
                Some((_, when)) => {
                    events.recv_timeout(when.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Ended(rank, status)) => self.ended(rank, status)?,
                Ok(Event::Signal(signal)) => self.signalled(signal),
                Err(RecvTimeoutError::Timeout) => self.go_on(),
                Err(RecvTimeoutError::Disconnected) => return Err(anyhow!("ranks got lost")),
            }
        }
        for rank in &mut self.ranks {
            for thread in rank.threads.drain(..) {
                thread.join().map_err(|_| anyhow!("output got lost"))?;
            }
        }
        Ok(self.failed.unwrap_or(0))
    }

    fn ended(&mut self, rank: usize, status: io::Result<ExitStatus>) -> Result<()> {
        let status = status.with_context(|| format!("waiting for rank {rank}"))?;
        self.ranks[rank].runs = false;
        // What it has left behind.
        self.ranks[rank].send(Signal::KILL);
        if !status.success() && self.failed.is_none() {
            eprintln!(
                "deep-ep launch: rank {rank} {}",
                super::processes::ending(status)
            );
            let code = match (status.code(), status.signal()) {
                (Some(code), _) => code,
                (None, signal) => 128 + signal.unwrap_or(0),
            };
            self.failed = Some(u8::try_from(code).unwrap_or(1));
            self.next = Some((Signal::TERM, Instant::now() + LAST_WORDS));
        }
        Ok(())
    }

    /// Passes a signal on; the second one kills.
    fn signalled(&mut self, signal: i32) {
        let again = self.next.is_some();
        self.failed = self.failed.or(u8::try_from(128 + signal).ok());
        let passed = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
        self.send(if again { Signal::KILL } else { passed });
        self.next = Some((Signal::KILL, Instant::now() + GRACE));
    }

    /// Does what is due.
    fn go_on(&mut self) {
        if let Some((signal, _)) = self.next {
            self.send(signal);
            self.next = Some((Signal::KILL, Instant::now() + GRACE));
        }
    }

    fn send(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.runs) {
            rank.send(signal);
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.send(Signal::KILL);
    }
}

impl Rank {
    fn new(rank: usize, mut child: Child, events: &Sender<Event>) -> Result<Self> {
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let out = out.context("no pipe for output")?;
        let err = err.context("no pipe for errors")?;
        let events = events.clone();
        let threads = vec![
            thread::spawn(move || copy_lines(rank, out, io::stdout)),
            thread::spawn(move || copy_lines(rank, err, io::stderr)),
            thread::spawn(move || {
                let _ = events.send(Event::Ended(rank, child.wait()));
            }),
        ];
        Ok(Self {
            group: group.context("a process without a number")?,
            runs: true,
            threads,
        })
    }

    fn send(&self, signal: Signal) {
        // Fails when all have ended.
        let _ = kill_process_group(self.group, signal);
    }
}

/// Copies lines, each with the rank before it and written at once.
fn copy_lines<W: Write>(rank: usize, from: impl Read, to: impl Fn() -> W) {
    let mut from = BufReader::new(from);
    let mut line = vec![];
    loop {
        line.clear();
        line.extend(format!("[{rank}] ").bytes());
        let prefix = line.len();
        match from.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if line.len() > prefix && line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        // Nobody may read it any more; the program goes on.
        let _ = to().write_all(&line);
        let _ = to().flush();
    }
}
